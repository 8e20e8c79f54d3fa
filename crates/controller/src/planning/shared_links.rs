//! Who uses a link, and how much of it a migration may have.

use std::collections::{BTreeMap, BTreeSet};

use perigee_model::job::{JobState, Migration};
use perigee_model::{HostId, MigrationId, Problem, SiteId, VmId};
use perigee_planner::LinkForMoves;

use super::{links, seconds};
use crate::clock::now_ms;
use crate::cluster::{Cluster, Lane};
use crate::records::{JobRecord, vm_of};
use crate::storage::replicas;

/// A migration gets at most this share of a link over which other VMs use their disks. With more, its packets
/// would queue up before the link, and each request of these VMs would wait behind them.
const SHARE_PERCENT: u64 = 80;

/// Whether another VM moves, or waits to move, over the link from one host to the other.
pub fn is_busy(cluster: &Cluster, from: &HostId, to: &HostId) -> bool {
    !cluster.lanes.queue(&lane(cluster, from, to)).is_empty()
}

/// How long a migration still takes, with the wait for those before it; `None` if it is over, or if this is not known.
pub fn left_ms(cluster: &Cluster, migration: &Migration) -> Option<u64> {
    let own_ms = migration.left_from_its_turn_ms(now_ms())?;
    let queue = cluster.lanes.queue(&lane_of(cluster, migration));
    let before = queue.iter().take_while(|id| **id != migration.id);
    let is_queued = queue.contains(&migration.id);
    let wait_ms = if is_queued { left_of_all_ms(cluster, before)? } else { 0 };
    Some(own_ms + wait_ms)
}

/// How long these migrations take, one after another; `None` if that is not known.
pub fn left_of_all_ms<'a>(
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
        wait_s: left_of_all_ms(cluster, queue.iter()).map(seconds),
        max_bytes_per_s: max_bytes_per_s(cluster, used, from, to),
    }
}

/// The queue of migrations in which this one is.
pub fn lane_of(cluster: &Cluster, migration: &Migration) -> Lane {
    lane(cluster, &migration.from, &migration.to)
}

/// The queue of migrations from one host to the other.
pub fn lane(cluster: &Cluster, from: &HostId, to: &HostId) -> Lane {
    match (site_of(cluster, from), site_of(cluster, to)) {
        (Some(from), Some(to)) if from != to => (from.to_string(), to.to_string()),
        _ => (from.to_string(), to.to_string()),
    }
}

/// The host's site; `None` if the host is not known.
pub fn site_of(cluster: &Cluster, host: &HostId) -> Option<SiteId> {
    cluster.hosts.get(host).ok().map(|host| host.addresses.site.clone())
}

/// The links over which running VMs use their disks, whatever the direction; without those of one VM.
pub fn used_lanes(cluster: &Cluster, except: Option<&VmId>) -> BTreeSet<Lane> {
    let jobs = cluster.unfinished_jobs();
    let others = jobs.iter().filter(|job| except != Some(&vm_of(&job.job.id)));
    others.flat_map(|job| far_lanes(cluster, job)).collect()
}

/// How many running VMs use their disks over each link.
pub fn users_of_lanes(cluster: &Cluster) -> BTreeMap<Lane, usize> {
    let mut users = BTreeMap::new();
    for lane in cluster.unfinished_jobs().iter().flat_map(|job| far_lanes(cluster, job)) {
        *users.entry(lane).or_default() += 1;
    }
    users
}

/// The links over which a running VM uses its disks, whatever the direction.
pub fn far_lanes(cluster: &Cluster, job: &JobRecord) -> BTreeSet<Lane> {
    let Some(host) = job.job.host.as_ref().filter(|_| job.vm_started) else {
        return BTreeSet::new();
    };
    let far = job.disks_needed().filter(|disk| disk.home != *host);
    far.map(|disk| unordered(lane(cluster, &disk.home, host))).collect()
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
    let volumes = volumes.iter().filter(|record| record.view.missing_bytes != Some(0));
    let volumes = volumes.map(|r| (r.view.from.clone(), r.view.to.clone()));
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
pub fn max_bytes_per_s(
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

/// A migration with its time left, which its record does not have.
pub fn shown(cluster: &Cluster, migration: Migration) -> Migration {
    Migration { left_ms: left_ms(cluster, &migration), ..migration }
}
