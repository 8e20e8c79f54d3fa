//! The facts about a running VM, most of which are those about all others: the drivers of all running jobs ask for them twice a second, and a walk
//! over all VMs for each of them would cost more than all else that the controller does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use perigee_model::{HostId, JobId, VolumeName};
use perigee_planner::Cluster as Facts;

use super::{facts, shared_links, without_rented};
use crate::cluster::{Cluster, Gathered, Lane};
use crate::records::JobRecord;

/// What decisions about all running VMs have in common, as it was less than half of the time between two figures ago.
pub fn of(cluster: &Cluster) -> Arc<Gathered> {
    cluster.lately.get(cluster.timing.figures / 2, || {
        let (users, written) = (shared_links::users_of_lanes(cluster), written(cluster));
        let facts = without_rented(cluster, facts(cluster)).indexed();
        Gathered { facts, users, written }
    })
}

/// The facts for decisions about one VM: what it does itself does not count as the load of its host, and its own use of a link for its disks does
/// not limit its own migration.
pub fn facts_for(cluster: &Cluster, all: &Gathered, record: &JobRecord) -> Facts {
    let mut facts = all.facts.clone();
    if let Some(vm) = &record.job.vm {
        for (host, load) in cluster.hosts.loads_without(vm) {
            facts.set_cpu_load(&host, load);
        }
    }
    let own = shared_links::far_lanes(cluster, record);
    let is_alone = |lane: &Lane| own.contains(lane) && all.users.get(lane) == Some(&1);
    if own.iter().any(is_alone) {
        let others = all.users.keys().filter(|lane| !is_alone(lane));
        let used: BTreeSet<Lane> = others.cloned().collect();
        facts.set_moves(|from, to| shared_links::for_moves(cluster, &used, to, from));
    }
    facts
}

/// The volumes that VMs write away from their homes.
fn written(cluster: &Cluster) -> BTreeMap<VolumeName, Vec<(u64, JobId, HostId)>> {
    let mut written: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for job in cluster.unfinished_jobs().iter().filter(|job| job.vm_started) {
        let (Some(host), Some(placement)) = (&job.job.host, &job.placement) else { continue };
        for disk in placement.disks.iter().filter(|disk| disk.home != *host && !disk.read_only) {
            let by = (job.meter.arrived_ms, job.job.id.clone(), host.clone());
            written.entry(disk.volume.clone()).or_default().push(by);
        }
    }
    written
}

/// A host where the VM of another job writes this volume, away from its home. Of several it is the one where the first
/// VM came.
pub fn written_at(all: &Gathered, volume: &VolumeName, except: Option<&JobId>) -> Option<HostId> {
    let writers = all.written.get(volume)?.iter().filter(|(_, job, _)| Some(job) != except);
    writers.map(|(at, _, host)| (at, host)).min().map(|(_, host)| host.clone())
}
