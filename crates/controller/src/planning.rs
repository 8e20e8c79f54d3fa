//! Calls the planner: makes its snapshot from the store and from what the hosts report, and keeps its decisions
//! and what ended jobs teach it. The planner itself is a pure function.

mod decisions;
pub mod gang_traffic;
pub mod gangs;
mod history;
mod lately;
pub mod links;
pub mod measured;
mod money;
mod prices;
pub mod renting;
pub mod shared_links;
mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::balance::PlacePolicy;
use perigee_model::job::{Access, HostState, JobSpec, Migration};
use perigee_model::job_plan::HostWait;
use perigee_model::phases::PredictedPhases;
use perigee_model::plan::Plan;
use perigee_model::replica::Replica;
use perigee_model::tenant::tenant_of;
use perigee_model::volume_move::{VolumeMove, VolumeMoveState};
use perigee_model::{DiskRole, HostId, JobId, Problem, SiteId, VmId};
use perigee_planner::queue::Groups;
use perigee_planner::{
    Cluster as Facts, CopyFacts, DiskFacts, HostFacts, JobFacts, LinkFacts, MoveCost, Moving,
    PastMove, Prepared, Refused, Running, Snapshot, StillToCome, Traits, VolumeFacts,
};
use sha2::{Digest, Sha256};

use crate::clock::now_ms;
use crate::cluster::{Cluster, Gathered, HostLink, Used, capacity};
use crate::hash;
use crate::meter::Totals;
use crate::records::{JobRecord, PlacedDisk, Placement, vm_of};
use crate::storage::{leave_site, moves, replicas, volumes};

pub use decisions::{
    asked_plan, decisions, not_done, prefix as decisions_prefix, record, record_submission, score,
};
use history::history;
pub use history::{forget_host, forget_tenant, gang_ended, job_ended, run_of_member, wants_trace};
#[cfg(test)]
pub(crate) use history::{history_key, make_room};
pub use money::disk_bytes;
pub use prices::{Prices, VmPrices, move_cost};
#[cfg(test)]
pub(crate) use waits::hosts as hosts_that_are_waited_for;

/// Collects the facts about a job: its volumes and its earlier runs.
///
/// # Errors
/// `NotFound` for an unknown volume, `Unavailable` when its home does not answer.
pub async fn prepare(cluster: &Cluster, spec: &JobSpec) -> Result<Prepared, Problem> {
    let (mut volumes, all) = (Vec::new(), lately::of(cluster));
    for volume in &spec.volumes {
        let record = volumes::find(cluster, &volume.volume).await?;
        volumes::reachable(cluster, &record.home)?;
        let bytes = record.seen.as_ref().map_or(0, |seen| seen.allocated_bytes);
        let replicas = replicas::of_volume(cluster, &volume.volume).await?;
        let only_read = volume.access == Access::Read;
        let copy = CopyFacts {
            bytes,
            lacking: lacking(&replicas),
            // A clone is a volume of its own.
            written_at: match volume.access {
                Access::Clone => None,
                Access::Read | Access::Write => lately::written_at(&all, &volume.volume, None),
            },
            // What a clone writes is not the volume's.
            replica_sites: match volume.access {
                Access::Clone => Vec::new(),
                Access::Read | Access::Write => sites(&replicas),
            },
            confined: record.seen.is_some_and(|seen| seen.leave_site.is_never()),
            stays: only_read.then(|| READ_BY_OTHERS.to_owned()),
        };
        let (volume, home) = (volume.volume.clone(), record.home);
        volumes.push(VolumeFacts { volume, home, allocated_bytes: bytes, only_read, copy });
    }
    let confined = leave_site::confined_of(cluster, spec).await?;
    let history = history(cluster, spec).await?;
    let data_bytes = volumes.iter().map(|volume| volume.allocated_bytes).collect();
    let job = JobFacts {
        traits: traits(spec, data_bytes),
        memory_bytes: spec.memory_bytes,
        start: spec.start.clone(),
        may_migrate: spec.may_migrate,
        uses_confined: !confined.volumes.is_empty() || confined.image_at.is_some(),
        volumes,
        dirty_bytes_per_s: history.dirty_bytes_per_s,
        money: money::facts(cluster, spec, now_ms()).await?,
        gang: None,
    };
    let tenant = tenant_of(&spec.name);
    let others = cluster.history_cache.others(&history::history_key(spec), tenant);
    Ok(Prepared { job, history: history.runs.clone(), others })
}

/// The same for a job that waits, or for a VM without one. Such a VM's root disk, where it has one, counts as its data: it
/// starts beside it if there is room.
///
/// # Errors
/// As [`prepare`].
pub async fn prepare_record(cluster: &Cluster, record: &JobRecord) -> Result<Prepared, Problem> {
    let mut prepared = prepare(cluster, &record.job.spec).await?;
    prepared.job.money.deadline_s = money::deadline_s(&record.job.spec, record.job.submitted_ms);
    money::take_spent(&mut prepared.job.money, &record.job);
    // A VM without a job is never started far from its data in order to move to them.
    prepared.job.may_migrate &= !record.kind.is_persistent_vm();
    let own = record.kept().into_iter().flat_map(|kept| &kept.disks);
    for disk in own.filter(|disk| disk.role == DiskRole::Root) {
        volumes::reachable(cluster, &disk.home)?;
        let bytes = ROOT_BYTES_READ;
        let confined = disk.leave_site.is_never();
        let copy = CopyFacts { bytes, confined, ..CopyFacts::default() };
        let (volume, home) = (disk.volume.clone(), disk.home.clone());
        prepared.job.traits.data_bytes.push(bytes);
        let facts = VolumeFacts { volume, home, allocated_bytes: bytes, only_read: false, copy };
        prepared.job.volumes.push(facts);
    }
    Ok(prepared)
}

/// What a VM without a job is expected to read of its root disk. Only the order of the hosts depends on it.
const ROOT_BYTES_READ: u64 = 256 << 20;

/// A plan of a job that is not submitted yet, and what it was made from.
pub struct Planned {
    /// The cluster and the job. Hosts without room for the job are as they will be when they have room.
    pub snapshot: Snapshot,
    /// When hosts have room that have none now.
    pub waits: Vec<HostWait>,
    /// The ways at the hosts that are there, or why there is none.
    pub plan: Result<Plan, Problem>,
}

/// Plans a job that has not started. Links that the plan needs are measured first.
///
/// # Errors
/// `NotFound` for an unknown volume.
pub async fn plan(cluster: &Arc<Cluster>, spec: &JobSpec) -> Result<Planned, Problem> {
    let mut prepared = prepare(cluster, spec).await?;
    gangs::add(cluster, spec, &mut prepared).await?;
    let Prepared { mut job, history, others } = prepared;
    job.money.month = money::month(cluster, &spec.name);
    let homes: Vec<HostId> = job.volumes.iter().map(|volume| volume.home.clone()).collect();
    let not_measured = links::ensure(cluster, &homes).await;
    let rented = waits::rented_for_others(cluster, spec);
    // A host with room for one VM has not yet room for several ones: see below.
    let full = match spec.count > 1 {
        true => BTreeMap::new(),
        false => waits::without_room(cluster, spec, &rented),
    };
    let mut waits = waits::waits(cluster, spec, &rented, &full).await?;
    let mut facts = facts(cluster);
    waits::make_room(&mut facts, &full, spec);
    leave_out(&mut facts, &rented);
    gangs::keep_to_site(cluster, spec, &mut facts).await?;
    if let Ok(id) = JobId::new(&spec.name) {
        let groups = Groups::of(&spec.name, &spec.rules);
        let bounds = cluster.index.grouped().bounds(&id, &groups, |host| cluster.hosts.binds(host));
        facts.hosts.iter_mut().for_each(|host| host.takes_jobs &= bounds.allow(&host.id));
    }
    let mut snapshot = Snapshot { cluster: facts, job, history, others };
    let mut plan = perigee_planner::plan(&snapshot);
    if let Some(gang) = snapshot.job.gang.clone()
        && matches!(plan, Err(Refused::NoHost(_)))
    {
        waits::make_room_for_all(cluster, &mut snapshot.cluster, (spec, &rented));
        let of_all = (&snapshot.cluster, &*gang);
        waits = waits::waits_for_all(cluster, spec, &rented, of_all).await?;
        plan = perigee_planner::plan(&snapshot);
    }
    let plan = plan.map_err(|refused| match (refused, not_measured) {
        (Refused::LinkNotMeasured { .. }, Some(problem)) => problem,
        (refused, _) => refused.into(),
    });
    Ok(Planned { snapshot, waits, plan })
}

/// A volume whose move was called off by trouble may move again after this.
const TROUBLE_MS: u64 = 10 * 60 * 1000;

/// Why the home of a volume that a job only reads does not move.
const READ_BY_OTHERS: &str = "the job only reads it, and others may too";

/// The hosts that have a complete replica of the volume, with what was written to the volume since.
fn lacking(replicas: &[Replica]) -> Vec<(HostId, u64)> {
    let kept = replicas.iter().filter(|replica| !replica.stopping && replica.points > 0);
    kept.filter_map(|replica| Some((replica.host.clone(), replica.behind_bytes?))).collect()
}

/// The sites to which a volume with these replicas does not come unasked, as [`replicas::check_far`] sees it.
fn sites(replicas: &[Replica]) -> Vec<SiteId> {
    replicas.iter().map(|replica| replica.site.clone()).collect()
}

/// Collects the facts about a running job, as they were when its figures were read so long ago, but for what was refused a
/// short time ago.
pub async fn running(
    cluster: &Cluster,
    record: &JobRecord,
    age: Duration,
) -> Result<Option<Running>, Problem> {
    let (Some(host), Some(placement)) = (&record.job.host, &record.placement) else {
        return Ok(None);
    };
    let here = record.meter.totals.since(&record.meter.at_arrival);
    let spec = &record.job.spec;
    let history = history(cluster, spec).await?;
    let since_command = record.meter.totals.since(&record.meter.at_command);
    let requests = data_disks(placement, &since_command).iter().map(requests).sum();
    let all = lately::of(cluster);
    Ok(Some(Running {
        cluster: lately::facts_for(cluster, &all, record),
        traits: placement.traits.clone(),
        // Other jobs count only in the first run of a job.
        others: match history.runs.is_empty() {
            true => {
                cluster.history_cache.others(&history::history_key(spec), tenant_of(&spec.name))
            }
            false => Vec::new(),
        },
        history: history.runs.clone(),
        progress: record.job.progress_part(),
        progress_at_arrival: record.meter.progress_at_arrival,
        requests,
        host: host.clone(),
        moving: moving(cluster, record),
        memory_bytes: cluster.index.demand_to_move(record).memory_bytes,
        cpus: spec.cpus_most(),
        may_migrate: spec.may_migrate,
        confined_to: {
            let mut confined = placement.disks.iter().filter(|disk| disk.leave_site.is_never());
            confined.next().map(|disk| disk.home.clone())
        },
        refused: Vec::new(),
        moves: record.moves,
        price_factor: cluster.balances.price_factor(&vm_of(&record.job.id)),
        dirty_bytes_per_s: dirty_rate_of(cluster, record, history.dirty_bytes_per_s),
        wall_s: (at_its_host_s(cluster, record) - age.as_secs_f64()).max(0.0),
        vcpu_s: seconds(here.vcpu_ms),
        run_delay_s: here.run_delay_ms.map(seconds),
        disks: disks_that_may_come(cluster, record, (placement, &all), &here).await?,
    }))
}

/// For how long the command has run at the VM's present host, with its data where they are now.
fn at_its_host_s(cluster: &Cluster, record: &JobRecord) -> f64 {
    seconds(cluster.clock.age_ms(record.meter.arrived_ms))
}

/// The data volumes' counters, by the names in the job file. The VM's own disks are left out. The boot and the
/// start of a program read the root disk, and the guest then has these blocks in memory and hardly reads them
/// again. So they do not show what a move would cost or save.
fn data_disks(placement: &Placement, totals: &Totals) -> Vec<DiskFacts> {
    let disks = placement.disks.iter().zip(&totals.disks);
    disks
        .filter_map(|(disk, stats)| {
            Some(DiskFacts {
                volume: disk.data_of.clone()?,
                home: disk.home.clone(),
                client: stats.client,
                at_home: stats.home,
                far_requests: stats.far_requests,
                copy: CopyFacts::default(),
                coming: None,
                outage_ns: stats.outage_ns,
            })
        })
        .collect()
}

/// The data volumes' counters, with what a copy to the VM's host would ship. A volume that others may read stays
/// at its home, and so does one whose last move was called off on purpose, or by trouble less than [`TROUBLE_MS`] ago.
async fn disks_that_may_come(
    cluster: &Cluster,
    record: &JobRecord,
    (placement, all): (&Placement, &Gathered),
    totals: &Totals,
) -> Result<Vec<DiskFacts>, Problem> {
    let mut facts = data_disks(placement, totals);
    let data = placement.disks.iter().filter(|disk| disk.data_of.is_some());
    for ((fact, disk), bytes) in facts.iter_mut().zip(data).zip(&placement.traits.data_bytes) {
        let last = cluster.index.volume_move(&disk.volume).filter(|last| {
            // What was called off on purpose stays so, and trouble may pass. Beside people, the program itself does that, with
            // volumes of a run that ends.
            let is_recent = |ended_ms| cluster.clock.age_ms(ended_ms) < TROUBLE_MS;
            let counts =
                last.view.problem == moves::CANCELLED || last.view.ended_ms.is_some_and(is_recent);
            last.view.state == VolumeMoveState::CalledOff
                && last.view.started_ms >= record.meter.arrived_ms
                && counts
        });
        fact.coming = still_to_come(cluster, record, disk, *bytes);
        let called_off = last.map(|last| last.view.problem.clone());
        let read = disk.read_only.then(|| READ_BY_OTHERS.to_owned());
        let replicas = replicas::of_volume(cluster, &fact.volume).await?;
        fact.copy = CopyFacts {
            bytes: *bytes,
            lacking: lacking(&replicas),
            written_at: lately::written_at(all, &disk.volume, Some(&record.job.id)),
            replica_sites: if disk.temporary { Vec::new() } else { sites(&replicas) },
            confined: disk.leave_site.is_never(),
            stays: read.or(called_off),
        };
    }
    Ok(facts)
}

/// What is missing of a volume of so many bytes, if it is on its way to its VM's host.
fn still_to_come(
    cluster: &Cluster,
    record: &JobRecord,
    disk: &PlacedDisk,
    bytes: u64,
) -> Option<StillToCome> {
    let last = cluster.index.volume_move(&disk.volume)?;
    let VolumeMove { from, to, state, missing_bytes, .. } = &last.view;
    let comes = !state.is_final() && *state != VolumeMoveState::CallingOff;
    (comes && record.job.host.as_ref() == Some(to)).then(|| StillToCome {
        from: from.clone(),
        bytes: missing_bytes.unwrap_or(bytes).min(bytes),
    })
}

fn requests(disk: &DiskFacts) -> f64 {
    (disk.client.reads + disk.client.writes + disk.client.flushes) as f64
}

/// The hosts that are up, and the measurements between them. All of it is in memory.
pub fn facts(cluster: &Cluster) -> Facts {
    let used = cluster.index.used();
    let up = cluster.hosts.up().into_iter();
    let mut hosts: Vec<_> = up.filter_map(|host| facts_of(cluster, &host, &used, None)).collect();
    if let Some(mut prices) = cluster.prices.now(&cluster.rentals) {
        hosts.iter_mut().for_each(|host| host.price = prices.of(&host.id, &host.site));
    }
    measured::Known::of(cluster).note(&mut hosts);
    let site = |host: &HostId| cluster.hosts.get(host).ok().map(|h| h.addresses.site.clone());
    let used_lanes = shared_links::used_lanes(cluster, None);
    let links = cluster.links.all().into_iter().filter_map(|link| {
        Some(LinkFacts {
            from_site: site(&link.from)?,
            to_site: site(&link.to)?,
            moves: shared_links::for_moves(cluster, &used_lanes, &link.to, &link.from),
            from: link.from,
            to: link.to,
            probe: link.probe,
            blocks: link.blocks,
        })
    });
    Facts {
        hosts: hosts.into(),
        links: links.collect(),
        probe_request_bytes: u64::from(links::PROBE_REQUEST_BYTES),
        past_moves: Arc::new(past_moves(cluster)),
    }
}

/// No VM goes by itself to a host that the cluster has rented for jobs that wait: it has no room for them.
fn without_rented(cluster: &Cluster, mut facts: Facts) -> Facts {
    let of_rule = cluster.rentals.hosts_by_rule();
    if !of_rule.is_empty() {
        let rented = facts.hosts.iter_mut().filter(|host| of_rule.contains(&host.id));
        rented.for_each(|host| host.memory_free_bytes = 0);
    }
    facts
}

/// No job starts at these hosts, and no VM goes there.
fn leave_out(facts: &mut Facts, hosts: &BTreeSet<HostId>) {
    if hosts.is_empty() {
        return;
    }
    for host in facts.hosts.iter_mut().filter(|host| hosts.contains(&host.id)) {
        (host.takes_jobs, host.memory_free_bytes) = (false, 0);
    }
}

/// A host that is up.
fn host_facts(
    cluster: &Cluster,
    host: &HostId,
    used: &BTreeMap<HostId, Used>,
    vm: Option<&VmId>,
) -> Option<HostFacts> {
    let host = cluster.hosts.get(host).ok()?;
    (cluster.hosts.state(&host.id) == HostState::Up)
        .then(|| facts_of(cluster, &host, used, vm))
        .flatten()
}

/// `None` if the host has not reported yet.
fn facts_of(
    cluster: &Cluster,
    host: &HostLink,
    used: &BTreeMap<HostId, Used>,
    vm: Option<&VmId>,
) -> Option<HostFacts> {
    let report = cluster.hosts.report(&host.id)?;
    let used = used.get(&host.id).copied().unwrap_or_default();
    let mut free = capacity(&report);
    free.take(used.demand);
    Some(HostFacts {
        id: host.id.clone(),
        site: host.addresses.site.clone(),
        cpus: report.cpus,
        memory_free_bytes: free.memory_bytes,
        running_vcpus: used.vcpus,
        cpu_load: cluster.hosts.cpu_load(&host.id, vm),
        takes_jobs: cluster.hosts.drain(&host.id).is_none(),
        packs: cluster.balances.place(&host.addresses.site) == PlacePolicy::Pack,
        accelerator: report.accelerator,
        cpu_model: report.cpu_model.clone(),
        boots: cluster.history_cache.boots(&host.id),
        local_blocks: cluster.links.local(&host.id).and_then(|local| local.blocks),
        pool_free_bytes: cluster.hosts.pool_free_bytes(&host.id),
        price: None,
        measured: None,
    })
}

/// Whether a VM that runs at one host can go on at another.
///
/// # Errors
/// The reason, in plain words.
pub fn can_move(
    cluster: &Cluster,
    record: &JobRecord,
    from: &HostId,
    to: &HostId,
) -> Result<(), Problem> {
    let of = |id: &HostId| {
        let mut facts = host_facts(cluster, id, &BTreeMap::new(), None)?;
        as_its_guest_sees(&mut facts, record);
        Some(facts)
    };
    match (of(from), of(to)) {
        // A source that does not answer the controller may still be able to send.
        (Some(from), Some(to)) => Ok(from.can_send_to(&to)?),
        _ => Ok(()),
    }
}

/// A guest whose CPU is not its host's sees of the host's processor only its maker: QEMU does not hide that under KVM.
fn as_its_guest_sees(host: &mut HostFacts, record: &JobRecord) {
    if !record.kind.hardware(&record.job.spec).cpu.is_as_the_host() {
        let maker = host.cpu_model.split(|c: char| !c.is_ascii_alphanumeric()).next();
        host.cpu_model = maker.unwrap_or_default().to_owned();
    }
}

/// The completed moves, each with its link as it was measured then. Moves without such a measurement are left
/// out.
pub(crate) fn past_moves(cluster: &Cluster) -> Vec<PastMove> {
    let moves = cluster.index.past_moves();
    let completed = moves.iter().filter_map(|record| {
        let link = record.migration.link?;
        // What one with a range of memory had then is not known any more.
        let spec = &record.plan.as_ref()?.spec;
        let memory_bytes =
            spec.machine.memory_least_bytes.is_none().then_some(spec.memory_bytes)?;
        Some(PastMove {
            memory_bytes,
            rate_bytes_per_s: link.rate_bytes_per_s,
            rtt_ms: link.rtt_ms,
            max_bytes_per_s: record.migration.max_bytes_per_s,
            compressed: record.migration.compressed,
            phases: record.migration.phases.clone(),
        })
    });
    completed.collect()
}

/// The migration of the job's VM that has begun.
fn moving(cluster: &Cluster, record: &JobRecord) -> Option<Moving> {
    let moves = cluster.index.migrations_of(record.job.vm.as_ref()?);
    let under_way = moves.iter().map(|m| &m.migration).find(|m| !m.state.is_final())?;
    let left_ms = shared_links::shown(cluster, under_way.clone()).left_ms;
    Some(Moving { to: under_way.to.clone(), left_s: left_ms.map(seconds) })
}

/// An older sample says little of what a VM does now.
const SAMPLE_AGE_MAX: Duration = Duration::from_secs(120);

/// How fast the job's VM changes its memory: as its last migration measured it, or those of earlier runs; without any, as its host has
/// sampled it. A sample of less than 1 MiB/s is not told from 0, and says nothing.
fn dirty_rate_of(cluster: &Cluster, record: &JobRecord, of_earlier: Option<u64>) -> Option<u64> {
    let sampled = || {
        let (host, vm) = (record.job.host.as_ref()?, record.job.vm.as_ref()?);
        let (_, report) = cluster.hosts.fresh_vm(host, vm, SAMPLE_AGE_MAX)?;
        report.load.dirty_bytes_per_s.filter(|rate| *rate > 0)
    };
    last_dirty_rate(cluster, record).or(of_earlier).or_else(sampled)
}

/// The dirty rate that the last migration of the job's VM measured.
fn last_dirty_rate(cluster: &Cluster, record: &JobRecord) -> Option<u64> {
    let moves = cluster.index.migrations_of(record.job.vm.as_ref()?);
    moves.iter().rev().map(|m| dirty_rate(&m.migration)).find(|rate| *rate > 0)
}

/// QEMU may slow a VM down after so many passes in which it changed more than half of what was sent.
const SLOWED_AFTER_PASSES: u32 = 2;

/// The mean over the rounds before QEMU may have slowed the VM down. Afterwards it changes less.
fn dirty_rate(migration: &Migration) -> u64 {
    let (mut high_passes, mut changed_bytes, mut ms) = (0, 0_u64, 0_u64);
    for round in &migration.phases.rounds {
        if high_passes >= SLOWED_AFTER_PASSES {
            break;
        }
        let changed = round.dirty_bytes_per_s.saturating_mul(round.duration_ms) / 1000;
        if changed > round.bytes / 2 {
            let passes = round.last.saturating_sub(round.first).saturating_add(1);
            high_passes = passes.saturating_add(high_passes);
        }
        (changed_bytes, ms) =
            (changed_bytes.saturating_add(changed), ms.saturating_add(round.duration_ms));
    }
    let mean = changed_bytes.saturating_mul(1000).checked_div(ms).filter(|mean| *mean > 0);
    mean.unwrap_or(migration.dirty_bytes_per_s)
}

fn traits(spec: &JobSpec, data_bytes: Vec<u64>) -> Traits {
    Traits {
        name: spec.name.clone(),
        cpus: spec.cpus_most(),
        memory_bytes: spec.memory_bytes,
        image: spec.image.to_string(),
        inputs: digest(&serde_json::json!([spec.env, spec.inputs, spec.volumes])),
        data_bytes,
    }
}

pub(crate) fn digest(value: &serde_json::Value) -> String {
    hash::hex(&Sha256::digest(value.to_string()))
}

/// Milliseconds as seconds.
pub fn seconds(ms: u64) -> f64 {
    ms as f64 / 1e3
}

/// What a prediction says of each phase of a migration.
pub fn phases_of(cost: &MoveCost) -> PredictedPhases {
    PredictedPhases {
        prepare_ms: milliseconds(cost.prepare_s),
        copy_ms: milliseconds(cost.copy_s),
        pause_ms: milliseconds(cost.pause_s),
    }
}

/// Seconds as milliseconds, rounded. A negative number and NaN are 0.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a measured time is positive and small; the cast saturates"
)]
pub fn milliseconds(s: f64) -> u64 {
    (s * 1e3).round() as u64
}

#[cfg(test)]
mod tests {
    use perigee_model::job::MigrationState;
    use perigee_model::phases::CopyRound;

    use super::*;

    /// A migration with rounds of so many seconds and bytes a second that changed; 100 MiB are sent in a second.
    fn moved(rounds: &[(u64, u64)]) -> Migration {
        let (id, vm) = ("q-0001-m1".parse().expect("a name"), "q-0001".parse().expect("a name"));
        let hosts = ["home1", "cloud1"].map(|host| host.parse().expect("a name"));
        let mut moved = Migration::new(id, vm, hosts, "asked".to_owned(), 0);
        (moved.state, moved.ended_ms) = (MigrationState::Completed, Some(1));
        for (number, (seconds, dirty_bytes_per_s)) in (1..).zip(rounds) {
            moved.phases.rounds.push(CopyRound {
                first: number,
                last: number,
                duration_ms: seconds * 1000,
                bytes: seconds * (100 << 20),
                dirty_bytes_per_s: *dirty_bytes_per_s,
            });
            moved.dirty_bytes_per_s = *dirty_bytes_per_s;
        }
        moved
    }

    /// QEMU does so without an order too.
    #[test]
    fn a_vm_that_was_slowed_down_does_not_teach_its_slow_rate() {
        let slowed = moved(&[(10, 200 << 20), (10, 200 << 20), (10, 4 << 20), (10, 4 << 20)]);
        assert_eq!(dirty_rate(&slowed), 200 << 20);
    }

    /// It made all later moves of the job look dear.
    #[test]
    fn a_short_burst_is_not_how_fast_a_vm_changes_its_memory() {
        assert_eq!(dirty_rate(&moved(&[(9, 10 << 20), (1, 500 << 20)])), 59 << 20);
    }

    #[test]
    fn before_the_first_round_is_over_the_last_figure_counts() {
        let begun = Migration { dirty_bytes_per_s: 7, ..moved(&[]) };
        assert_eq!(dirty_rate(&begun), 7);
    }
}
