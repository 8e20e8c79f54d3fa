//! How a migration shares its link with other migrations, which wait for each other, and with VMs that use disks
//! over it.

use std::time::{Duration, Instant};

use perigee_model::job::HostState;
use perigee_model::vm::{VmReport, VmStatus};
use perigee_model::{Problem, ProblemKind};

use super::Run;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::planning;
use crate::planning::shared_links::{lane_of, max_bytes_per_s, used_lanes};

/// The longest wait for other migrations over the link.
const TURN_MAX: Duration = Duration::from_secs(60 * 60);

impl Run {
    /// Waits until no other VM moves over the link. A migration whose source was asked already is under way, and does
    /// not wait.
    pub(super) async fn take_turn(&mut self) -> Result<(), Problem> {
        let migration = &self.record.value.migration;
        let (lane, id) = (lane_of(&self.cluster, migration), migration.id.clone());
        if self.record.value.asked_source {
            self.cluster.lanes.resume(&lane, &id);
            return Ok(());
        }
        if self.cluster.hosts.is_taken_back(&migration.from) {
            self.cluster.lanes.hurry(&lane, &id);
        }
        self.cluster.lanes.enter(&lane, &id);
        let waiting_since = Instant::now();
        let mut ahead = self.cluster.lanes.ahead(&lane, &id);
        while ahead > 0 {
            self.note_moves_ahead(ahead).await?;
            let fewer = self.cluster.lanes.fewer_than(ahead, &lane, &id);
            if let Ok(fewer) = tokio::time::timeout(self.cluster.timing.monitor, fewer).await {
                ahead = fewer;
                continue;
            }
            if waiting_since.elapsed() > TURN_MAX {
                let minutes = TURN_MAX.as_secs() / 60;
                let why = format!("{ahead} other moves over its link did not end in {minutes} min");
                return Err(self.unavailable(why));
            }
            self.check_while_it_waits().await?;
            // Its source may go soon since.
            if self.cluster.hosts.is_taken_back(&self.record.value.migration.from) {
                self.cluster.lanes.hurry(&lane, &id);
                ahead = self.cluster.lanes.ahead(&lane, &id);
            }
        }
        self.note_moves_ahead(0).await?;
        // Its time begins with its turn.
        self.begun = Instant::now();
        Ok(())
    }

    pub(super) fn leave_queue(&self) {
        self.cluster.lanes.leave(&self.record.value.migration.id);
    }

    /// Records the rate that this migration may have on its link, and returns it in bytes before compression.
    pub(super) fn limit_rate(&mut self) -> Option<u64> {
        let migration = &mut self.record.value.migration;
        let lanes = used_lanes(&self.cluster, Some(&self.vm));
        let most = max_bytes_per_s(&self.cluster, &lanes, &migration.from, &migration.to);
        migration.max_bytes_per_s = most;
        if !migration.compressed {
            return most;
        }
        // QEMU 7.2 counts the bytes before compression.
        let compression = perigee_planner::compression(&planning::past_moves(&self.cluster));
        let gain = compression.under_limit().gain;
        most.map(|most| times(most, gain))
    }

    /// The job does not act on a dead VM or host while its migration is not over, so a migration that waits must
    /// end then.
    pub(super) async fn check_while_it_waits(&self) -> Result<(), Problem> {
        for host in [self.source()?, self.destination()?] {
            if self.cluster.hosts.state(&host.id) != HostState::Up {
                return Err(self.unavailable(format!("host {} does not answer", host.id)));
            }
        }
        let ended = match self.source()?.agent.get::<VmReport>(&self.path()).await {
            Ok(report) => matches!(report.status, VmStatus::Gone | VmStatus::Shutdown),
            Err(problem) => problem.kind == ProblemKind::NotFound,
        };
        if ended { Err(self.unavailable("it has ended".to_owned())) } else { Ok(()) }
    }

    fn unavailable(&self, why: String) -> Problem {
        Problem::unavailable(format!("can't move VM {}", self.vm), why)
    }

    async fn note_moves_ahead(&mut self, ahead: usize) -> Result<(), Problem> {
        let ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
        if self.record.value.migration.moves_ahead == ahead {
            return Ok(());
        }
        let migration = &mut self.record.value.migration;
        migration.moves_ahead = ahead;
        if ahead == 0 {
            migration.waited_ms = now_ms().saturating_sub(migration.started_ms);
        }
        self.record.save().await
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a rate; the cast saturates"
)]
fn times(rate: u64, gain: f64) -> u64 {
    (rate as f64 * gain) as u64
}

/// Queues the unfinished migrations after a restart of the controller: those that are under way first. They keep these
/// places, in whatever order their drivers start.
pub fn queue_all(cluster: &Cluster) {
    let mut all = cluster.unfinished_migrations();
    all.sort_by_key(|record| (!record.asked_source, record.migration.started_ms));
    for record in all {
        cluster.lanes.enter(&lane_of(cluster, &record.migration), &record.migration.id);
    }
}
