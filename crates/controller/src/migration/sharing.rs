//! How a migration shares its link with other migrations, which wait for each other, and with VMs that use disks
//! over it.

use std::time::{Duration, Instant};

use perigee_model::job::HostState;
use perigee_model::vm::{LinkProbe, VmReport, VmStatus};
use perigee_model::{HostId, Problem, ProblemKind, VmId};

use super::Run;
use crate::cluster::{Cluster, Lane, Place};
use crate::links;
use crate::records::vm_of;

/// The longest wait for other migrations over the link.
const TURN_MAX: Duration = Duration::from_secs(60 * 60);

/// A migration gets at most this share of a link over which other VMs use their disks. With more, its packets
/// would queue up before the link, and each request of these VMs would wait behind them.
const SHARE_PERCENT: u64 = 80;

/// Memory is compressed on links that are slower than this. On a link of 100 Mbit/s the migration of a guest of 256 MiB
/// took 4.8 s instead of 9.7 s (QEMU 7.2, zstd, two channels). On a link without a limit, compression took longer.
const THIN_BYTES_PER_S: u64 = 25 << 20;

impl Run {
    /// Waits until no other VM moves over the link. A migration whose source was asked already is under way, and does
    /// not wait.
    pub(super) async fn take_turn(&mut self) -> Result<Place, Problem> {
        let migration = &self.record.value.migration;
        let lane = lane(&self.cluster, &migration.from, &migration.to);
        let id = migration.id.clone();
        if self.record.value.asked_source {
            return Ok(self.cluster.lanes.resume(lane, id));
        }
        let place = self.cluster.lanes.enter(lane, id);
        let waiting_since = Instant::now();
        let mut ahead = place.ahead();
        while ahead > 0 {
            self.note_moves_ahead(ahead).await?;
            let fewer = place.fewer_than(ahead);
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
        }
        self.note_moves_ahead(0).await?;
        // Its time begins with its turn.
        self.begun = Instant::now();
        Ok(place)
    }

    /// The job does not act on a dead VM or host while its migration is not over, so a migration that waits must
    /// end then.
    async fn check_while_it_waits(&self) -> Result<(), Problem> {
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
        self.record.value.migration.moves_ahead = ahead;
        self.record.save().await
    }
}

/// Whether another VM moves, or waits to move, over the link from one host to the other.
pub fn is_busy(cluster: &Cluster, from: &HostId, to: &HostId) -> bool {
    cluster.lanes.len(&lane(cluster, from, to)) > 0
}

/// The queue of migrations from one host to the other.
fn lane(cluster: &Cluster, from: &HostId, to: &HostId) -> Lane {
    let site = |host: &HostId| cluster.hosts.get(host).ok().map(|h| h.addresses.site.to_string());
    match (site(from), site(to)) {
        (Some(from), Some(to)) if from != to => (from, to),
        _ => (from.to_string(), to.to_string()),
    }
}

/// Whether memory is compressed on this link.
pub(super) fn is_thin(link: Option<&LinkProbe>) -> bool {
    link.is_some_and(|link| (1..THIN_BYTES_PER_S).contains(&link.rate_bytes_per_s))
}

/// The most memory that the VM's migration may send in a second, if other VMs use disks over this link.
pub(super) fn max_bytes_per_s(
    cluster: &Cluster,
    vm: &VmId,
    from: &HostId,
    to: &HostId,
) -> Option<u64> {
    let ends = unordered(lane(cluster, from, to));
    let mut others = cluster.unfinished_jobs().into_iter().filter(|job| vm_of(&job.job.id) != *vm);
    let shared = others.any(|job| {
        let Some(host) = job.job.host.as_ref().filter(|_| job.vm_started) else { return false };
        let homes = job.placement.iter().flat_map(|placement| &placement.disks);
        homes
            .into_iter()
            .any(|disk| disk.home != *host && unordered(lane(cluster, &disk.home, host)) == ends)
    });
    if !shared {
        return None;
    }
    // The probe has one connection, so earlier migrations may have seen more.
    let probed = links::toward(cluster, from, to).map_or(0, |link| link.rate_bytes_per_s);
    let seen = cluster.index.past_moves().into_iter().filter_map(|record| {
        let moved = &record.migration;
        (lane(cluster, &moved.from, &moved.to) == lane(cluster, from, to) && !moved.compressed)
            .then_some(moved)?;
        let bytes: u64 = moved.phases.rounds.iter().map(|round| round.bytes).sum();
        let ms: u64 = moved.phases.rounds.iter().map(|round| round.duration_ms).sum();
        (bytes * 1000).checked_div(ms)
    });
    let rate = seen.chain([probed]).max().filter(|rate| *rate > 0)?;
    Some(rate / 100 * SHARE_PERCENT)
}

fn unordered((a, b): Lane) -> Lane {
    if a <= b { (a, b) } else { (b, a) }
}
