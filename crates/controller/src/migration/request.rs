//! Requests of people and the planner for migrations.

use std::sync::Arc;

use perigee_model::job::{Migration, MigrationState};
use perigee_model::vm::{HostReport, LinkProbe};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem, VmId, VmStart};
use perigee_planner::queue::Demand;
use perigee_planner::{Mode, MoveCost, Refused};

use super::name_of;
use crate::cleaner::Pending;
use crate::clock::now_ms;
use crate::cluster::{Alone, Cluster, capacity};
use crate::planning::links;
use crate::planning::shared_links;
use crate::records::{
    JobIntent, JobRecord, Membership, MigrationIntent, MigrationRecord, job_intent_key,
    migration_intent_key, migration_prefix, start_of, vm_of,
};
use crate::storage::{leave_site, volumes};
use crate::{networks, planning, tpm};

/// The reason of a migration that a person has asked for.
pub const ASKED: &str = "asked";

/// A requested migration.
#[derive(Debug, Clone)]
pub struct Request {
    pub to: HostId,
    pub reason: String,
    pub job_progress: Option<f64>,
    /// Whether the volumes that the VM writes come after it.
    pub volumes: VolumesOnMove,
}

/// What is known of a VM that may move.
struct Checked {
    from: HostId,
    report: Arc<HostReport>,
}

/// Whether the VM may move there now, but for the room there.
///
/// # Errors
/// `Conflict` if the VM cannot move now, `Unavailable` if the destination does not answer.
pub fn check(
    cluster: &Cluster,
    job: &JobRecord,
    to: &HostId,
    pending: &Pending,
) -> Result<(), Problem> {
    let earlier = cluster.index.migrations_of(&vm_of(&job.job.id));
    let is_moving = earlier.iter().any(|record| is_unsettled(record, job));
    checked(cluster, job, (to, false), (is_moving, pending)).map(drop)
}

/// It is under way, or the VM's driver has not taken its end into account.
fn is_unsettled(record: &MigrationRecord, job: &JobRecord) -> bool {
    !record.migration.state.is_final() || record.number > job.settled
}

fn checked(
    cluster: &Cluster,
    job: &JobRecord,
    (to, is_asked): (&HostId, bool),
    (is_moving, pending): (bool, &Pending),
) -> Result<Checked, Problem> {
    let vm = vm_of(&job.job.id);
    let refusal = |why: String| Problem::conflict(format!("can't move VM {vm} to {to}"), why);
    let refuse = |why: String| Err(refusal(why));
    let Some(from) = job.job.host.clone() else { return refuse("it is on no host yet".into()) };
    if !job.vm_started || job.ending.is_some() || job.finished.is_some() || job.collect.is_some() {
        return refuse(format!("its job is {:?}", job.job.state).to_lowercase());
    }
    if job.leaving.is_some() {
        return refuse("its job begins anew".into());
    }
    if job.kind.goes_down() {
        return refuse("it is being stopped".into());
    }
    if from == *to {
        return refuse("it is there already".into());
    }
    if is_moving {
        return refuse("it is being moved already".into());
    }
    // The job's next step records a cleanup for what the VM left there.
    if job.left.as_ref() == Some(to) || pending.has(&job.job.id, to) {
        let why = "the remains of an earlier move there are not removed yet";
        return Err(refusal(why.into()).next("try again in some seconds"));
    }
    if !job.kind.member().is_some_and(|member| goes_back(cluster, member)) {
        cluster.hosts.check_not_drained(to, format!("can't move VM {vm} to {to}"))?;
    }
    volumes::reachable(cluster, to)?;
    // What is not known of it yet refuses nothing for good.
    let Some(report) = cluster.hosts.report(to) else {
        let what = format!("can't move VM {vm} to {to}");
        return Err(Problem::unavailable(what, "the host has not reported yet"));
    };
    planning::can_move(cluster, job, &from, to)?;
    if let Some(why) = networks::refusal(cluster, to, &networks::kind_of(job)) {
        return refuse(format!("the host can't have VMs with such a network card now: {why}"));
    }
    let binds = |host: &HostId| cluster.hosts.binds(host);
    let bounds = cluster.index.bounds_of(job, binds);
    if let Some(why) = bounds.and_then(|bounds| bounds.why_not(to)) {
        return Err(refusal(why).next(other_rules(job)));
    }
    if let Some(why) = tpm::refusal(job, Some(&report)) {
        return refuse(format!("the host can't have VMs with a TPM now: {why}"));
    }
    leave_site::check_migration(cluster, job, (&from, to), is_asked)?;
    Ok(Checked { from, report })
}

/// The hosts that are up where the VM may not be for its rules about other VMs, with the reasons.
pub fn ruled_out(cluster: &Cluster, job: &JobRecord) -> Vec<(HostId, String)> {
    let Some(bounds) = cluster.index.bounds_of(job, |host| cluster.hosts.binds(host)) else {
        return Vec::new();
    };
    let up = cluster.hosts.up().into_iter();
    up.filter_map(|host| Some((host.id.clone(), bounds.why_not(&host.id)?))).collect()
}

/// What to do about rules that are in the way.
fn other_rules(job: &JobRecord) -> String {
    let id = &job.job.id;
    match job.kind.is_persistent_vm() {
        true => format!("choose another host, or give it other rules first: perigee vm set {id}"),
        false => "choose another host: a job keeps the rules of its file".to_owned(),
    }
}

/// Reserves the room at the destination, records the migration and starts its driver.
///
/// # Errors
/// `Conflict` if the VM cannot move now, `Unavailable` if the destination does not answer.
pub async fn request(
    cluster: &Arc<Cluster>,
    job: &JobRecord,
    request: Request,
) -> Result<Migration, Problem> {
    requested(cluster, job, request, Alone::Nowhere).await
}

/// The same, at hosts that take part in no other migration.
pub(super) async fn requested(
    cluster: &Arc<Cluster>,
    job: &JobRecord,
    request: Request,
    alone: Alone,
) -> Result<Migration, Problem> {
    let vm = vm_of(&job.job.id);
    let member = job.kind.member().cloned();
    if let Some(member) = &member
        && !is_of_gang_move(cluster, member, &request.to)
    {
        return Err(not_alone(&vm, member, &request.to));
    }
    let earlier: Vec<MigrationRecord> = cluster.records.list(&migration_prefix(&vm)).await?;
    let is_moving = earlier.iter().any(|record| is_unsettled(record, job));
    let pending = Pending::of(cluster, &job.job.id).await?;
    let asked = (&request.to, request.reason == ASKED && member.is_none());
    let Checked { from, report } = checked(cluster, job, asked, (is_moving, &pending))?;
    // The migrations before may have no records: the VM was adopted.
    let number = earlier.last().map_or(0, |record| record.number).max(job.settled) + 1;
    let link = links::toward(cluster, &from, &request.to);
    let cost = planning::move_cost(cluster, job, &from, &request.to).await?;
    let new = new_record(&vm, start_of(job, number), from, request, link, cost)?;
    let record = MigrationRecord { of_load: alone == Alone::AtBoth, ..new };
    // In a task of its own, so that a client that disconnects leaves no migration without a driver.
    let begun = begin(Arc::clone(cluster), record, member, (capacity(&report), alone));
    let made = tokio::spawn(begun);
    made.await.map_err(|e| Problem::internal(format!("can't move VM {vm}"), e))?
}

/// Why one VM of a gang is not moved by itself.
pub fn not_alone(vm: &VmId, member: &Membership, to: &HostId) -> Problem {
    let why = format!("it is one of the VMs of job {}, which move all or none", member.gang);
    let next =
        format!("`perigee job move {}` moves them, each to the host that you name", member.gang);
    Problem::conflict(format!("can't move VM {vm} to {to}"), why).next(next)
}

/// Whether its gang moves, and this VM goes there.
fn is_of_gang_move(cluster: &Cluster, member: &Membership, to: &HostId) -> bool {
    let gang = cluster.index.job(&member.gang);
    let open = gang.as_ref().and_then(|gang| gang.kind.gang()?.open_move());
    let leg = open.and_then(|open| Some((open, open.legs.get(member.rank as usize)?)));
    leg.is_some_and(|(open, leg)| open.goal(leg) == to)
}

/// Whether the VMs of its gang go back to where they were.
fn goes_back(cluster: &Cluster, member: &Membership) -> bool {
    let gang = cluster.index.job(&member.gang);
    gang.and_then(|gang| Some(gang.kind.gang()?.open_move()?.is_undone())).unwrap_or(false)
}

async fn begin(
    cluster: Arc<Cluster>,
    record: MigrationRecord,
    member: Option<Membership>,
    (total, alone): (Demand, Alone),
) -> Result<Migration, Problem> {
    let Migration { vm, from, to, .. } = &record.migration;
    let refusal = |why: String| Problem::conflict(format!("can't move VM {vm} to {to}"), why);
    let there = (total, |host: &HostId| cluster.hosts.binds(host));
    let _moving = cluster.index.begin_move(vm, (from, to), there, alone).map_err(refusal)?;
    // From here on its gang's driver waits for this one. The gang may have gone another way before.
    if member.is_some_and(|member| !is_of_gang_move(&cluster, &member, to)) {
        return Err(refusal("its job's VMs do not move there any more".to_owned()));
    }
    if !cluster.create_migration(&record).await? {
        return Err(refusal("it is being moved already".to_owned()));
    }
    cluster.drive_migration(&record);
    Ok(record.migration)
}

pub(crate) fn new_record(
    vm: &VmId,
    start: VmStart,
    from: HostId,
    request: Request,
    link: Option<LinkProbe>,
    cost: Result<MoveCost, Refused>,
) -> Result<MigrationRecord, Problem> {
    let number = start.migration;
    let milliseconds = |seconds: fn(&MoveCost) -> Option<f64>| {
        cost.as_ref().ok().and_then(seconds).map(planning::milliseconds)
    };
    let (predicted_total_ms, predicted_wait_ms) =
        (milliseconds(|cost| Some(cost.total_s)), milliseconds(|cost| cost.wait_s));
    let predicted_phases = cost.as_ref().ok().map(planning::phases_of);
    let mode = mode_of(cost);
    let (id, hosts) = (name_of(vm, number)?, [from, request.to]);
    let migration = Migration {
        predicted_total_ms,
        predicted_wait_ms,
        predicted_phases,
        job_progress: request.job_progress,
        compressed: mode.compressed,
        throttle_percent: mode.throttle_percent,
        mode_reason: mode.why,
        link,
        volumes: request.volumes,
        ..Migration::new(id, vm.clone(), hosts, request.reason, now_ms())
    };
    Ok(MigrationRecord {
        migration,
        number,
        start,
        plan: None,
        asked_source: false,
        io_before: Vec::new(),
        boot_id: String::new(),
        watched_ms: 0,
        of_load: false,
    })
}

/// How the memory is sent, with the reason; also for a move that a person wants against the prediction.
fn mode_of(cost: Result<MoveCost, Refused>) -> Mode {
    let too_long = cost.as_ref().ok().and_then(MoveCost::too_long);
    let mode = cost.map_or_else(|refused| Mode::without_prediction(&refused), |cost| cost.mode);
    let Some(too_long) = too_long else { return mode };
    Mode { why: format!("{}; {too_long}", mode.why), ..mode }
}

/// Cancels the VM's running migration. The VM stays at its source, unless it has already arrived. If it has, the volumes
/// that still follow it stay where they are.
///
/// # Errors
/// `Conflict` if no migration is running and no volume follows the VM.
pub async fn cancel(cluster: &Arc<Cluster>, vm: &VmId) -> Result<Migration, Problem> {
    let all: Vec<MigrationRecord> = cluster.records.list(&migration_prefix(vm)).await?;
    let Some(record) = all.last().filter(|record| !record.migration.state.is_final()) else {
        return cancel_following(cluster, vm, all.into_iter().next_back()).await;
    };
    let cancel = |intent: Option<MigrationIntent>| MigrationIntent {
        cancel: true,
        ..intent.unwrap_or_default()
    };
    cluster.records.update(&migration_intent_key(vm, record.number), cancel).await?;
    Ok(record.migration.clone())
}

/// `last` is the VM's last migration, which has ended.
async fn cancel_following(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    last: Option<MigrationRecord>,
) -> Result<Migration, Problem> {
    let refusal = || {
        let what = format!("can't cancel the migration of VM {vm}");
        Problem::conflict(what, "no migration is running")
    };
    let job = cluster.index.of_vm(vm).ok_or_else(refusal)?;
    if job.job.state.is_final() {
        return Err(refusal());
    }
    let is_followed = |last: &MigrationRecord| {
        let is_settled = job.settled >= last.number;
        last.migration.state == MigrationState::Completed
            && match is_settled {
                true => !job.to_follow.is_empty(),
                false => last.migration.volumes == VolumesOnMove::Follow,
            }
    };
    let Some(last) = last.filter(is_followed) else {
        return Err(match job.to_follow.first() {
            Some(volume) => refusal().next(format!(
                "its data comes to it; to cancel that: perigee volume move {volume} --cancel"
            )),
            None => refusal(),
        });
    };
    let cancel = |intent: Option<MigrationIntent>| MigrationIntent {
        cancel: true,
        ..intent.unwrap_or_default()
    };
    // Its job may not know yet that it has arrived.
    cluster.records.update(&migration_intent_key(vm, last.number), cancel).await?;
    let stay = |intent: Option<JobIntent>| {
        let intent = intent.unwrap_or_default();
        JobIntent { stay: intent.stay.saturating_add(1), ..intent }
    };
    cluster.records.update(&job_intent_key(&job.job.id), stay).await?;
    cluster.drive_job(&job.job.id);
    Ok(last.migration)
}

/// The VM's migrations, the oldest first.
pub async fn of_vm(cluster: &Cluster, vm: &VmId) -> Result<Vec<Migration>, Problem> {
    let all: Vec<MigrationRecord> = cluster.records.list(&migration_prefix(vm)).await?;
    Ok(all.into_iter().map(|record| shared_links::shown(cluster, record.migration)).collect())
}
