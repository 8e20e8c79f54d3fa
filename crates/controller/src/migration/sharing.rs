//! How a migration shares its link with other migrations, which wait for each other, and with VMs that use disks
//! over it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use perigee_model::job::{HostState, JobState, Migration};
use perigee_model::vm::{VmReport, VmStatus};
use perigee_model::{HostId, MigrationId, Problem, ProblemKind, SiteId, VmId};
use perigee_planner::LinkForMoves;

use super::Run;
use crate::cluster::{Cluster, Lane, now_ms};
use crate::planning;
use crate::planning::links;
use crate::records::vm_of;
use crate::storage::replicas;

/// The longest wait for other migrations over the link.
const TURN_MAX: Duration = Duration::from_secs(60 * 60);

/// A migration gets at most this share of a link over which other VMs use their disks. With more, its packets
/// would queue up before the link, and each request of these VMs would wait behind them.
const SHARE_PERCENT: u64 = 80;

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

/// Whether another VM moves, or waits to move, over the link from one host to the other.
pub fn is_busy(cluster: &Cluster, from: &HostId, to: &HostId) -> bool {
    !cluster.lanes.queue(&lane(cluster, from, to)).is_empty()
}

/// How long a migration still takes, with the wait for those before it; `None` if it is over, or if this is not known.
pub(super) fn left_ms(cluster: &Cluster, migration: &Migration) -> Option<u64> {
    let own_ms = migration.left_from_its_turn_ms(now_ms())?;
    let queue = cluster.lanes.queue(&lane_of(cluster, migration));
    let before = queue.iter().take_while(|id| **id != migration.id);
    let is_queued = queue.contains(&migration.id);
    let wait_ms = if is_queued { left_of_all_ms(cluster, before)? } else { 0 };
    Some(own_ms + wait_ms)
}

/// How long these migrations take, one after another; `None` if that is not known.
fn left_of_all_ms<'a>(
    cluster: &Cluster,
    ids: impl Iterator<Item = &'a MigrationId>,
) -> Option<u64> {
    let all = cluster.unfinished_migrations();
    let of = |id: &MigrationId| all.iter().find(|record| record.migration.id == *id);
    // One that has just ended takes no time.
    ids.filter_map(of).map(|record| record.migration.left_from_its_turn_ms(now_ms())).sum()
}

/// How a migration from one host to the other shares the link. `used` are the lanes that VMs use for their disks.
pub fn for_moves(
    cluster: &Cluster,
    used: &BTreeSet<Lane>,
    from: &HostId,
    to: &HostId,
) -> LinkForMoves {
    let queue = cluster.lanes.queue(&lane(cluster, from, to));
    LinkForMoves {
        wait_s: left_of_all_ms(cluster, queue.iter()).map(planning::seconds),
        max_bytes_per_s: max_bytes_per_s(cluster, used, from, to),
    }
}

fn lane_of(cluster: &Cluster, migration: &Migration) -> Lane {
    lane(cluster, &migration.from, &migration.to)
}

/// The queue of migrations from one host to the other.
fn lane(cluster: &Cluster, from: &HostId, to: &HostId) -> Lane {
    match (site_of(cluster, from), site_of(cluster, to)) {
        (Some(from), Some(to)) if from != to => (from.to_string(), to.to_string()),
        _ => (from.to_string(), to.to_string()),
    }
}

fn site_of(cluster: &Cluster, host: &HostId) -> Option<SiteId> {
    cluster.hosts.get(host).ok().map(|host| host.addresses.site.clone())
}

/// The links over which running VMs use their disks, whatever the direction; without those of one VM.
pub fn used_lanes(cluster: &Cluster, except: Option<&VmId>) -> BTreeSet<Lane> {
    let mut used = BTreeSet::new();
    for job in cluster.unfinished_jobs() {
        let Some(host) = job.job.host.as_ref().filter(|_| job.vm_started) else { continue };
        if except == Some(&vm_of(&job.job.id)) {
            continue;
        }
        let far = job.disks_needed().filter(|disk| disk.home != *host);
        used.extend(far.map(|disk| unordered(lane(cluster, &disk.home, host))));
    }
    used
}

/// What something uses now, as far as the controller knows.
#[derive(Debug, Default)]
pub struct InUse {
    lanes: BTreeSet<Lane>,
    /// Images and inputs come to them, which may be from anywhere.
    sites: BTreeSet<SiteId>,
}

impl InUse {
    /// Whether a link between these two hosts is used, whatever the direction.
    pub fn has(&self, cluster: &Cluster, one: &HostId, other: &HostId) -> bool {
        let is_used =
            |host: &HostId| site_of(cluster, host).is_some_and(|site| self.sites.contains(&site));
        is_used(one) || is_used(other) || self.lanes.contains(&unordered(lane(cluster, one, other)))
    }
}

/// The links over which VMs use their disks, VMs move, or volumes are copied, and the sites where a job is staged or its
/// VM boots.
///
/// # Errors
/// If the store can't be read.
pub async fn in_use(cluster: &Cluster) -> Result<InUse, Problem> {
    let replicas = replicas::being_shipped(cluster).await?;
    let moves = cluster.unfinished_migrations();
    let moves = moves.iter().map(|r| (r.migration.from.clone(), r.migration.to.clone()));
    let volumes = cluster.index.unfinished_volume_moves();
    let volumes = volumes.iter().filter(|record| record.shown.missing_bytes != Some(0));
    let volumes = volumes.map(|r| (r.shown.from.clone(), r.shown.to.clone()));
    let between = moves.chain(volumes).chain(replicas);
    let mut lanes = used_lanes(cluster, None);
    lanes.extend(between.map(|(from, to)| unordered(lane(cluster, &from, &to))));
    let jobs = cluster.unfinished_jobs();
    let begins = [JobState::Staging, JobState::Starting];
    let begin = jobs.iter().filter(|record| begins.contains(&record.job.state));
    let sites = begin.filter_map(|record| site_of(cluster, record.job.host.as_ref()?)).collect();
    Ok(InUse { lanes, sites })
}

/// The most that a migration may use of this link, if VMs use their disks over it.
fn max_bytes_per_s(
    cluster: &Cluster,
    used: &BTreeSet<Lane>,
    from: &HostId,
    to: &HostId,
) -> Option<u64> {
    let lane = lane(cluster, from, to);
    if !used.contains(&unordered(lane.clone())) {
        return None;
    }
    // The probe has one connection, so earlier migrations may have seen more.
    let probed = links::toward(cluster, from, to).map_or(0, |link| link.rate_bytes_per_s);
    let seen = cluster.index.past_moves().into_iter().filter_map(|record| {
        let moved = &record.migration;
        (lane_of(cluster, moved) == lane && !moved.compressed).then_some(())?;
        moved.phases.copy_rate_bytes_per_s()
    });
    let rate = seen.chain([probed]).max().filter(|rate| *rate > 0)?;
    Some(rate / 100 * SHARE_PERCENT)
}

fn unordered((a, b): Lane) -> Lane {
    if a <= b { (a, b) } else { (b, a) }
}
