//! What the planner has to know of a gang's VMs, and what its runs teach.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::job::{Access, Job, JobSpec, JobVolume, Start};
use perigee_model::volume::IoStats;
use perigee_model::{HostId, JobId, Problem, SiteId};
use perigee_planner::gangs::{GangFacts, RanksRun, Talked};
use perigee_planner::queue::{Demand, Groups};
use perigee_planner::{Cluster as Facts, PastRun, Prepared};

use super::gang_traffic::{self, program};
use super::{Cluster, facts, waits};
use crate::cluster::VCPUS_PER_CPU;
use crate::records::{JobRecord, Membership, PlacedDisk};
use crate::storage::leave_site;

/// Adds what is known of its VMs to the facts about a job, if it has several ones.
///
/// # Errors
/// If the store fails.
pub async fn add(
    cluster: &Cluster,
    spec: &JobSpec,
    prepared: &mut Prepared,
) -> Result<(), Problem> {
    if !spec.is_gang() {
        return Ok(());
    }
    let known = gang_traffic::known_of_name(cluster, &spec.name, spec.count).await?;
    let groups = Groups::of(&spec.name, &spec.rules);
    prepared.job.gang = Some(Arc::new(GangFacts {
        volumes: (0..spec.count).map(|rank| numbers_of(&spec.volumes, rank)).collect(),
        runs: known.runs_of(&program(&spec.image, &spec.command, spec.mpi)),
        whole: known.predicted(spec, &prepared.job.traits),
        sent: known.sent,
        vcpus_per_cpu: VCPUS_PER_CPU,
        least_cpus: spec.cpus,
        one_site: fits_one_site(cluster, spec, &groups),
        together: groups.together.is_some(),
        apart: groups.apart.is_some(),
    }));
    Ok(())
}

/// Whether one site has room for all VMs of a gang where they may start, when all jobs have ended. The queue then starts it at one site
/// (`queue/gang.rs`).
fn fits_one_site(cluster: &Cluster, spec: &JobSpec, groups: &Groups) -> bool {
    let bounds = JobId::new(&spec.name)
        .ok()
        .map(|id| cluster.index.grouped().bounds(&id, groups, |host| cluster.hosts.binds(host)));
    let demand = Demand { cpus: spec.cpus, memory_bytes: spec.memory_bytes };
    let rented = waits::rented_for_others(cluster, spec);
    let used = cluster.index.used();
    let mut of_sites: BTreeMap<SiteId, u32> = BTreeMap::new();
    for host in cluster.hosts.up() {
        let site = &host.addresses.site;
        let is_left_out = rented.contains(&host.id)
            || cluster.hosts.drain(&host.id).is_some()
            || bounds.as_ref().is_some_and(|bounds| !bounds.allow(&host.id))
            || !may_start(&spec.start, &host.id, site);
        let left = waits::for_jobs(cluster, &used, &host.id).filter(|_| !is_left_out);
        let Some(left) = left else { continue };
        let holds = left.holds(demand);
        let holds = if groups.apart.is_some() { holds.min(1) } else { holds };
        let room = of_sites.entry(site.clone()).or_default();
        *room = room.saturating_add(holds);
    }
    of_sites.into_values().any(|room| room >= spec.count)
}

/// Whether a job file that says so lets its VMs start at a host of a site.
pub fn may_start(start: &Start, host: &HostId, site: &SiteId) -> bool {
    match start {
        Start::Anywhere => true,
        Start::Site(only) => only == site,
        Start::Host(only) => only == host,
    }
}

/// Where data of a gang may not leave their site, none of its VMs starts elsewhere.
///
/// # Errors
/// `NotFound` for an unknown volume, `Unavailable` when its home does not answer.
pub async fn keep_to_site(
    cluster: &Cluster,
    spec: &JobSpec,
    facts: &mut Facts,
) -> Result<(), Problem> {
    let Some(site) = leave_site::site_of_gang(cluster, spec).await? else { return Ok(()) };
    let elsewhere = facts.hosts.iter_mut().filter(|host| host.site != site);
    elsewhere.for_each(|host| host.takes_jobs = false);
    Ok(())
}

/// The numbers of the volumes that a rank has.
pub fn numbers_of(volumes: &[JobVolume], rank: u32) -> Vec<usize> {
    let all = volumes.iter().enumerate();
    all.filter(|(_, volume)| volume.is_of_rank(rank)).map(|(number, _)| number).collect()
}

/// What a run that has succeeded shows of each rank; `None` if that is not known of one of them.
pub fn run_of(
    cluster: &Cluster,
    gang: &Job,
    members: &[Option<Arc<JobRecord>>],
    sent: &[Vec<u64>],
) -> Option<RanksRun> {
    let of_member = |member: &Option<Arc<JobRecord>>| {
        let run: &PastRun = member.as_ref()?.kind.member()?.run.as_ref()?;
        Some(run.clone())
    };
    let ranks = members.iter().map(of_member).collect::<Option<Vec<PastRun>>>()?;
    let hosts: Vec<HostId> = ranks.iter().map(|run| run.host.clone()).collect();
    // A link that is not known any more: what they sent over it teaches nothing.
    let talk = Talked::at(&facts(cluster), &hosts, sent).ok()?;
    let program = program(&gang.spec.image, &gang.spec.command, gang.spec.mpi);
    Some(RanksRun { program, ranks, talk })
}

/// How many VMs of its gang have started at the host of this one and read the volume of this disk there, with this one. A volume server counts for
/// each volume, whoever reads it. A clone is one VM's own, also where the job only reads the volume.
pub fn readers_beside(cluster: &Cluster, member: &Membership, disk: &PlacedDisk) -> u64 {
    let shared = disk.data_of.as_ref().filter(|_| disk.read_only && !disk.temporary);
    let Some(volume) = shared else { return 1 };
    let gang = cluster.index.job(&member.gang);
    let Some(gang) = gang.as_ref() else { return 1 };
    let is_read = |of: &&JobVolume| of.volume == *volume && of.access == Access::Read;
    let Some(of) = gang.job.spec.volumes.iter().find(is_read) else { return 1 };
    let hosts = gang.kind.gang().map_or(&[][..], |gang| gang.hosts.as_slice());
    let own = hosts.get(member.rank as usize);
    let there = (0..).zip(hosts).filter(|(rank, host)| Some(*host) == own && of.is_of_rank(*rank));
    (there.count() as u64).max(1)
}

/// One VM's part of what a volume server has counted for so many that read alike.
pub fn part_of(stats: IoStats, readers: u64) -> IoStats {
    let part = |sum: u64| sum / readers.max(1);
    IoStats {
        reads: part(stats.reads),
        read_bytes: part(stats.read_bytes),
        read_ns: part(stats.read_ns),
        network_requests: part(stats.network_requests),
        network_ns: part(stats.network_ns),
        network_bytes: part(stats.network_bytes),
        network_saved_bytes: part(stats.network_saved_bytes),
        replica_reads: part(stats.replica_reads),
        ..stats
    }
}

/// The earlier runs of a member's rank.
///
/// # Errors
/// If the store fails.
pub async fn runs_of_rank(
    cluster: &Cluster,
    record: &JobRecord,
    member: &Membership,
) -> Result<Vec<PastRun>, Problem> {
    let known = gang_traffic::known(cluster, &member.gang, member.count).await?;
    let spec = &record.job.spec;
    let runs = known.runs_of(&program(&spec.image, &spec.command, member.mpi));
    let rank = member.rank as usize;
    Ok(runs.into_iter().filter_map(|run| run.ranks.into_iter().nth(rank)).collect())
}
