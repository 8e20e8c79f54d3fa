//! Drains hosts: nothing new comes to them, and what they have moves away while it runs.
//!
//! That a host is to be drained stands in its record, because a person has asked for that or because its provider takes the host back. All
//! else is looked at anew in each round, so a controller that was started again goes on where the last one was: [`facts`] gathers what is
//! at the host, [`perigee_planner::drain`] says what becomes of it, and here the moves are asked for, as a person would ask for them.
//! Between two hosts one thing moves at a time. A move that fails ends no job: the VM is where it was, and is tried again later, each time
//! after a longer pause ([`by_itself::failed_lately`]). What holds for all moves that nobody has asked for: [`by_itself`]. A move from a
//! host that is taken back overtakes those that wait for the same link ([`crate::cluster`]'s lanes).

mod facts;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::drain::{Drain, DrainFate, DrainHost, DrainStep, DrainedKind, HostDrain};
use perigee_model::job::MoveJob;
use perigee_model::plan::Trigger;
use perigee_model::volume_move::{VolumeMoveCause, VolumesOnMove};
use perigee_model::{HostId, JobId, Problem, VmId, VolumeName};
use perigee_planner::drain::plan;

use crate::clock::now_ms;
use crate::cluster::tasks::Task;
use crate::cluster::{Alone, Cluster};
use crate::migration::by_itself;
use crate::records::HostRecord;
use crate::storage::moves;
use crate::{jobs, migration};

/// How long a move is not asked for again after it was refused. After one that failed: [`by_itself::failed_lately`].
const AFTER_REFUSAL: Duration = Duration::from_secs(30);

/// What was asked to move and refused, why, and when.
#[derive(Debug, Default)]
struct RefusedMoves(BTreeMap<(DrainedKind, String), (Instant, String)>);

impl RefusedMoves {
    fn note(&mut self, step: &DrainStep, why: String) {
        self.0.insert((step.kind, step.name.clone()), (Instant::now(), why));
    }

    /// What was refused long ago is asked again.
    fn forget_old(&mut self, after: Duration) {
        self.0.retain(|_, (at, _)| at.elapsed() < after);
    }

    fn why(&self, step: &DrainStep) -> Option<String> {
        let (_, why) = self.0.get(&(step.kind, step.name.clone()))?;
        Some(format!("it is tried again in some seconds: {why}"))
    }
}

/// `POST /hosts/{host}/drain`: has a host drained, or only says what that would do. Repeating this changes nothing.
///
/// # Errors
/// `NotFound`.
pub async fn drain(
    cluster: &Arc<Cluster>,
    host: &HostId,
    by: String,
    ask: DrainHost,
) -> Result<HostDrain, Problem> {
    cluster.hosts.get(host)?;
    if !ask.dry_run {
        begin(cluster, host, Drain { asked_ms: now_ms(), by, boot_id: None }).await?;
    }
    let left = plan(&facts::gather(cluster, host).await?);
    if !ask.dry_run {
        cluster.hosts.note_left(host, left.clone());
        cluster.drain_now.notify_one();
    }
    let (asked, left) = (cluster.hosts.drain(host), Some(left));
    Ok(HostDrain { asked, left, keeps: facts::keeps(cluster, host).await? })
}

/// A host that is drained already stays as it is, unless its boot would end the drain that is there, and not this one.
async fn begin(cluster: &Cluster, host: &HostId, drain: Drain) -> Result<(), Problem> {
    let is_as_long = |now: Drain| now.boot_id.is_none() || now.boot_id == drain.boot_id;
    if !cluster.hosts.drain(host).is_some_and(is_as_long) {
        set(cluster, host, Some(drain)).await?;
        tracing::info!("host {host} is drained from now on");
        // Jobs that wait may wait for it.
        cluster.index.changed.notify_one();
        cluster.drain_now.notify_one();
    }
    Ok(())
}

/// `POST /hosts/{host}/shuts-down`: the machine is about to go down, and what is there leaves first. The drain is called off when the host
/// has booted again. A host that is drained already stays as it is. Repeating this changes nothing.
///
/// # Errors
/// `NotFound`; `Unavailable` while the controller has not heard in which boot the host is.
pub async fn shuts_down(cluster: &Cluster, host: &HostId) -> Result<(), Problem> {
    cluster.hosts.get(host)?;
    let boot_id = cluster.hosts.report(host).map(|report| report.boot_id.clone());
    let Some(boot_id) = boot_id.filter(|boot_id| !boot_id.is_empty()) else {
        let what = format!("can't have all leave host {host}");
        return Err(Problem::unavailable(what, "its agent has not answered the controller yet"));
    };
    let by = format!("host {host}, which shuts down");
    begin(cluster, host, Drain { asked_ms: now_ms(), by, boot_id: Some(boot_id) }).await
}

/// `POST /hosts/{host}/undrain`: calls the drain of a host off. Moves that wait for their turn are called off, and those that are under
/// way come to their end. What has left stays where it is.
///
/// # Errors
/// `NotFound`.
pub async fn undrain(cluster: &Arc<Cluster>, host: &HostId) -> Result<(), Problem> {
    cluster.hosts.get(host)?;
    // What an undrain that was cut short has not called off is called off now.
    if cluster.hosts.drain(host).is_some() {
        set(cluster, host, None).await?;
        tracing::info!("host {host} is not drained any more");
    }
    for record in cluster.unfinished_migrations() {
        let migration = &record.migration;
        if migration.from == *host && migration.reason == reason(host) && !record.asked_source {
            call_off(cluster, &migration.vm).await?;
        }
    }
    for record in cluster.unfinished_jobs().iter().filter(|record| record.kind.gang().is_some()) {
        jobs::call_off_leaving(cluster, &record.job.id, host).await?;
    }
    for record in cluster.index.unfinished_volume_moves() {
        if record.view.cause == VolumeMoveCause::Drains(host.clone()) {
            moves::call_off(cluster, &record).await?;
        }
    }
    cluster.index.changed.notify_one();
    Ok(())
}

async fn set(cluster: &Cluster, host: &HostId, drain: Option<Drain>) -> Result<(), Problem> {
    // It may register again meanwhile, or be removed.
    let _turn = cluster.enrolling.lock().await;
    let key = format!("hosts/{host}");
    let Some(mut record) = cluster.records.own::<HostRecord>(&key).await? else {
        return Err(Problem::not_found(format!("host {host}"), "it was just removed"));
    };
    record.value.drain.clone_from(&drain);
    record.save().await?;
    cluster.hosts.note_drain(host, drain);
    Ok(())
}

/// A migration that has just ended needs no cancelling.
async fn call_off(cluster: &Arc<Cluster>, vm: &VmId) -> Result<(), Problem> {
    match migration::cancel(cluster, vm).await {
        Err(problem) if problem.kind == perigee_model::ProblemKind::Conflict => Ok(()),
        done => done.map(drop),
    }
}

/// The reason of the migrations from a host that is drained.
fn reason(host: &HostId) -> String {
    format!("host {host} is drained")
}

/// Drains the hosts that are to be drained, until that is called off: what comes there later leaves again.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut refused = RefusedMoves::default();
    loop {
        task.round(round(&cluster, &mut refused)).await;
        tokio::select! {
            () = cluster.drain_now.notified() => {}
            () = cluster.index.moved.notified() => {}
            () = tokio::time::sleep(cluster.timing.monitor) => {}
        }
        // Many changes at once cause one round.
        tokio::time::sleep(cluster.timing.poll).await;
    }
}

async fn round(cluster: &Arc<Cluster>, refused: &mut RefusedMoves) -> Result<String, Problem> {
    refused.forget_old(AFTER_REFUSAL);
    let (mut did, mut failed) = (Vec::new(), drain_taken_back(cluster).await.err());
    failed = failed.or(end_booted(cluster).await.err());
    for host in cluster.hosts.drained() {
        match step(cluster, &host, refused).await {
            Ok(left) => did.push(format!("{host}: {left} left")),
            Err(problem) => failed = Some(problem),
        }
    }
    match failed {
        Some(problem) => Err(problem),
        None if did.is_empty() => Ok("no host is drained".to_owned()),
        None => Ok(did.join(", ")),
    }
}

/// Has each host drained whose provider takes the host back, as a person would have. Whoever calls that off has it begin again as long as
/// the notice stands.
async fn drain_taken_back(cluster: &Arc<Cluster>) -> Result<(), Problem> {
    for (host, notice) in cluster.hosts.taken_back() {
        tracing::warn!("the provider takes host {host} back: {}", notice.in_words());
        let by = format!("its provider's notice ({})", notice.in_words());
        drain(cluster, &host, by, DrainHost::default()).await?;
    }
    Ok(())
}

/// Calls the drain of each host off that was drained to shut down and has booted since.
async fn end_booted(cluster: &Arc<Cluster>) -> Result<(), Problem> {
    for (host, boot_id) in cluster.hosts.drained_for_a_boot() {
        let now = cluster.hosts.report(&host).map(|report| report.boot_id.clone());
        if now.is_some_and(|now| !now.is_empty() && now != boot_id) {
            tracing::info!("host {host} has booted again");
            undrain(cluster, &host).await?;
        }
    }
    Ok(())
}

/// Looks at what is left at a host, and has the next things move. Returns how much is left.
async fn step(
    cluster: &Arc<Cluster>,
    host: &HostId,
    refused: &mut RefusedMoves,
) -> Result<usize, Problem> {
    let mut steps = plan(&facts::gather(cluster, host).await?);
    // Where something is on its way to.
    let moving = steps.iter().filter(|step| step.fate == DrainFate::Moving);
    let mut busy: BTreeSet<HostId> = moving.flat_map(|step| step.to.iter().cloned()).collect();
    for step in steps.iter_mut().filter(|step| step.fate == DrainFate::Moves) {
        if let Some(why) = refused.why(step) {
            (step.fate, step.why) = (DrainFate::Waits, why);
        }
        // Another host may be drained too, or what was measured have a VM moved.
        let waits = |to: &HostId| by_itself::waits_for(cluster, host, to, Alone::AtDestination);
        let is_vm = step.kind == DrainedKind::Vm;
        let is_busy = step.to.iter().any(|to| busy.contains(to) || (is_vm && waits(to).is_some()));
        if step.fate != DrainFate::Moves || is_busy || cluster.hosts.drain(host).is_none() {
            continue;
        }
        match request(cluster, host, step).await {
            Ok(()) => {
                busy.extend(step.to.iter().cloned());
                step.fate = DrainFate::Moving;
            }
            Err(problem) => {
                let why = format!("{}: {}", problem.what, problem.why);
                tracing::info!(
                    "host {host} is drained, and {} {} waits: {why}",
                    step.kind,
                    step.name
                );
                refused.note(step, why);
                let why = refused.why(step).unwrap_or_default();
                (step.fate, step.why) = (DrainFate::Waits, why);
            }
        }
    }
    let left = steps.len();
    cluster.hosts.note_left(host, steps);
    Ok(left)
}

async fn request(cluster: &Arc<Cluster>, host: &HostId, step: &DrainStep) -> Result<(), Problem> {
    let name = |e: perigee_model::ids::BadName| Problem::internal("can't drain a host", e);
    let Some(to) = step.to.first() else { return Ok(()) };
    match step.kind {
        DrainedKind::Vm => {
            let vm = VmId::new(&step.name).map_err(name)?;
            move_vm(cluster, host, &vm, to).await?;
            // The drain may have been called off just before this was recorded.
            if cluster.hosts.drain(host).is_none() { call_off(cluster, &vm).await } else { Ok(()) }
        }
        DrainedKind::Job => {
            let job = JobId::new(&step.name).map_err(name)?;
            let ask = MoveJob { hosts: step.to.clone(), ..MoveJob::default() };
            jobs::ask_to_leave(cluster, &job, ask, host).await?;
            // As with a VM.
            if cluster.hosts.drain(host).is_some() {
                return Ok(());
            }
            jobs::call_off_leaving(cluster, &job, host).await
        }
        // It goes there by itself (`networks/gateways.rs`).
        DrainedKind::Network => Ok(()),
        DrainedKind::Volume => {
            let volume = VolumeName::new(&step.name).map_err(name)?;
            let cause = VolumeMoveCause::Drains(host.clone());
            moves::request(cluster, &volume, to, cause).await?;
            // As with a VM.
            match cluster.index.volume_move(&volume) {
                Some(of) if cluster.hosts.drain(host).is_none() => {
                    moves::call_off(cluster, &of).await.map(drop)
                }
                _ => Ok(()),
            }
        }
    }
}

async fn move_vm(
    cluster: &Arc<Cluster>,
    from: &HostId,
    vm: &VmId,
    to: &HostId,
) -> Result<(), Problem> {
    let request = migration::Request {
        to: to.clone(),
        reason: reason(from),
        job_progress: cluster.index.of_vm(vm).and_then(|record| record.job.progress_part()),
        // Those whose home is the host leave it one after the other.
        volumes: VolumesOnMove::Stay,
    };
    let why = (Trigger::Drained, format!("move from {from} to {to}: {}", reason(from)));
    by_itself::begin_recorded(cluster, (vm, from), request, Alone::AtDestination, why).await
}
