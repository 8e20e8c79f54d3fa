//! Jobs. They are submitted here; one task drives each ([`drive`]), and the cleaner removes what they leave.
//!
//! ```text
//! queued     place     the scheduler gives a host with room; without a driver until then
//! staging    stage     volumes, seed, epochs, attachments
//! starting   follow    the VM, until the runner says that the command starts
//! running    follow    events, figures, migrations, until the command ends
//! collecting follow    until the outputs stand; then finish
//!            collect   the same of a VM that has ended, or was stopped as it was
//! (ending)   finish    output fetched, VM and volumes away, its cost settled; then a final state
//! ```
//!
//! A gang has a driver too, which makes its members, reads what becomes of them, and tells them to end ([`gang`]). Each
//! member goes through the states above, and is placed when it is made.

mod after_migration;
mod cancel;
mod collect;
mod cost;
mod decide_move;
mod driver;
mod ended;
mod finish;
mod follow;
mod follow_moves;
mod from_backup;
mod gang;
mod guest;
mod log;
mod persistent_vm;
mod place;
mod recovery;
mod restart;
mod samples;
mod stage;
mod to_files;
pub(crate) mod traces;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use perigee_model::gang::member_of;
use perigee_model::guest::LeftOut;
use perigee_model::job::{Job, JobSpec, JobState, LeftOutFiles, Migration, Sample};
use perigee_model::limits::{JOB_NAMES, JOB_NUMBER, JOBS, Limit, UNFINISHED_JOBS};
use perigee_model::plan::PredictedEnd;
use perigee_model::tenant::{Running, tenant_of};
use perigee_model::vm::VmReport;
use perigee_model::{JobId, Problem, ProblemKind, TenantName, VmId};
use perigee_planner::queue::Demand;

use crate::clock::now_ms;
use crate::cluster::members::members;
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, amounts};
use crate::console;
use crate::files::outputs::left_out;
use crate::files::{inputs, outputs};
use crate::job_files::{name_of, with_files};
use crate::meter::Meter;
use crate::planning::shared_links;
use crate::records::{
    JobInputs, JobIntent, JobRecord, Kind, LogKept, MigrationRecord, Traced, asked, job_intent_key,
    job_key, migration_intent_prefix, migration_prefix, vm_of,
};
use crate::storage::{images, volumes};
use crate::{networks, planning};

/// How long an erasure waits for another one of the same records.
const ERASURE_DEADLINE: Duration = Duration::from_secs(30);
const ERASURE_AGAIN: Duration = Duration::from_millis(10);
/// What a job's VM has of its memory is not known from an older report.
const REPORT_AGE_MAX: Duration = Duration::from_secs(30);
/// A job whose record is written often is not looked at more often than so.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// How often somebody looks for VMs without a job that were deleted.
const ERASE_EVERY: Duration = Duration::from_secs(600);

pub use cost::is_reserved;
pub use driver::drive;
pub use gang::{
    ask_to_leave, ask_to_move, call_off_leaving, call_off_move, last_message_of, log_of, log_of_all,
};
#[cfg(feature = "fuzzing")]
pub(crate) use guest::apply;
pub use log::PAGE_LINES_MAX;
#[cfg(test)]
pub use log::read as log;
pub use place::{job_of, number_of_root, own_volume};
pub use restart::{Fate, Loss, fate};
pub use stage::runner_places;
pub(crate) use stage::take_over;
#[cfg(test)]
pub use to_files::move_to_files;

/// Checks a job, gives it a number, and records it as queued.
///
/// # Errors
/// What is wrong with it: a name that nothing has, more than the tenant may use, inputs that are not there.
pub async fn submit(cluster: &Arc<Cluster>, spec: JobSpec) -> Result<Job, Problem> {
    // Until the job is recorded, none of its uploaded files is removed.
    let submissions = cluster.staging.submissions(&TenantName::of(&spec.name));
    let _submission = submissions.under_way.read().await;
    submissions.count.fetch_add(1, Ordering::SeqCst);
    check_room(cluster, &spec).await?;
    let inputs = check(cluster, &spec).await?;
    let counter = counter_key(&spec.name);
    let id = loop {
        let number = cluster.records.update(&counter, |n: Option<u64>| n.unwrap_or(0) + 1).await?;
        JOB_NUMBER.check(number).map_err(|error| error.problem("can't submit a job"))?;
        let id = JobId::new(format!("{}-{number:04}", spec.name))
            .map_err(|e| Problem::invalid("can't submit a job", e))?;
        // A controller that was restored from an older copy gives out a number again.
        if cluster.hosts.seen(&vm_of(&id)).is_empty() {
            break id;
        }
    };
    let mut record = JobRecord { inputs, ..new_record(id, spec) };
    gang::prepare(&mut record)?;
    add(cluster, record).await
}

const COUNTERS: &str = "counters/";

/// Where the number of the last job of this name is.
fn counter_key(name: &str) -> String {
    format!("{COUNTERS}{name}")
}

/// Whether the tenant may have one more job.
///
/// # Errors
/// `NoSpace` with the limit.
async fn check_room(cluster: &Cluster, spec: &JobSpec) -> Result<(), Problem> {
    let tenant = tenant_of(&spec.name);
    let within = |limit: &'static Limit, others: u64, next: &str| {
        limit.check(others + 1).map(drop).map_err(|error| {
            let what = format!("can't submit job {}", spec.name);
            Problem::new(ProblemKind::NoSpace, what, error).next(next)
        })
    };
    within(&UNFINISHED_JOBS, cluster.index.unfinished_of(tenant), "wait until some have ended")?;
    within(
        &JOBS,
        cluster.index.kept_of(tenant),
        "delete jobs that have ended: perigee job delete",
    )?;
    if cluster.records.read::<u64>(&counter_key(&spec.name)).await?.is_some() {
        return Ok(());
    }
    let own = format!("{COUNTERS}{}", TenantName::of(&spec.name).full(""));
    let names = cluster.records.keys(&own).await?;
    let is_its = |key: &&String| tenant_of(key.trim_start_matches(COUNTERS)) == tenant;
    let names = names.iter().filter(is_its).count() as u64;
    within(&JOB_NAMES, names, "use a name again: each job of it gets its own number")
}

/// Forgets the numbers of the jobs of a tenant that is deleted.
///
/// # Errors
/// If the store fails.
pub async fn forget_tenant(cluster: &Cluster, tenant: &TenantName) -> Result<(), Problem> {
    cluster.records.remove_all(&format!("{COUNTERS}{}", tenant.full(""))).await
}

/// Stores the record of a job, or of a VM without one.
///
/// # Errors
/// `Conflict` if there is one with this id, or if a volume of it is being deleted.
pub async fn add(cluster: &Arc<Cluster>, record: JobRecord) -> Result<Job, Problem> {
    let id = record.job.id.clone();
    let (cluster, job) = (Arc::clone(cluster), record.job.clone());
    // In a task of its own, so that a job is queued even if the client disconnects.
    let made = tokio::spawn(asked::carried(async move {
        let volumes = record.job.spec.volumes.iter().map(|volume| volume.volume.clone());
        let _submission = cluster.index.begin_submission(volumes.collect()).map_err(|name| {
            let why = format!(
                "volume {name} is being deleted, or a replica of it is becoming the volume"
            );
            Problem::conflict(format!("can't make {id}"), why)
        })?;
        // Of two that publish one port at the same instant, the second one finds the first. And its network is not deleted meanwhile: a
        // gang's own one is made later.
        let own = networks::own_name(&id)?;
        let network = record.job.spec.network.name();
        let is_named = network.is_some_and(|name| !record.kind.is_gang() || *name != own);
        let _turn = if is_named { Some(cluster.networks.turn().await) } else { None };
        if is_named {
            networks::check(&cluster, &record.job.spec).await?;
            networks::check_card(&cluster, &record).await?;
        }
        if !cluster.records.create_asked(&job_key(&id), &record).await? {
            let why = "there is a job or a VM with this name already";
            return Err(
                Problem::conflict(format!("can't make {id}"), why).next("choose another name")
            );
        }
        cluster.index.note_kept(&id);
        cluster.index.put_job(&record);
        Ok(())
    }));
    made.await.map_err(|e| Problem::internal("can't submit a job", e))??;
    Ok(job)
}

/// The record of a job about which nothing is decided yet.
pub fn new_record(id: JobId, spec: JobSpec) -> JobRecord {
    JobRecord {
        kind: Kind::Job,
        job: new_job(id, spec),
        placement: None,
        vm_started: false,
        last_seq: 0,
        seq_before: 0,
        finished: None,
        kept_outputs: None,
        ending: None,
        ends_because: None,
        settled: 0,
        moves: 0,
        left: None,
        meter: Meter::default(),
        log: LogKept::default(),
        counted_ms: 0,
        restarts: 0,
        avoid: Vec::new(),
        leaving: None,
        boot_id: String::new(),
        refused_by: Vec::new(),
        traced: Traced::default(),
        to_follow: Vec::new(),
        stayed: 0,
        inputs: None,
        cancelled_ms: None,
        collect: None,
        card: None,
    }
}

fn new_job(id: JobId, spec: JobSpec) -> Job {
    Job {
        id,
        spec,
        state: JobState::Queued,
        reason: String::new(),
        waits: Vec::new(),
        queue_place: None,
        host: None,
        vm: None,
        exit_code: None,
        end: None,
        oom_kills: None,
        progress: None,
        submitted_ms: now_ms(),
        started_ms: None,
        running_ms: None,
        ended_ms: None,
        predicted: None,
        predicted_end: None,
        measured_s: None,
        migrations: Vec::new(),
        outputs: None,
        left_out: 0,
        members: Vec::new(),
        gang_move: None,
        memory: None,
        cpu_time: None,
        cost: None,
    }
}

/// Checks a job before anything is done for it. Returns what its inputs are.
///
/// # Errors
/// `Invalid` or `NotFound`, with the name of the field.
pub async fn check(cluster: &Cluster, spec: &JobSpec) -> Result<Option<JobInputs>, Problem> {
    spec.check()?;
    let needs = Demand { cpus: spec.cpus, memory_bytes: spec.memory_bytes };
    let cpus = spec.cpus_most().saturating_mul(spec.count);
    let needs = Running { vms: spec.count, cpus, ..needs.times(spec.count).running() };
    let quota = cluster.accounts.quota_of(&spec.name);
    if let Some(why) = quota.lacks(Running::default(), needs) {
        return Err(Problem::invalid(format!("job {}", spec.name), why)
            .next("ask for less, or ask an admin for more (perigee tenant quota)"));
    }
    gang::check(cluster, spec)?;
    gang::check_ranks(cluster, spec).await?;
    outputs::check(cluster, spec).await?;
    for volume in &spec.volumes {
        volumes::find(cluster, &volume.volume).await?;
    }
    networks::check(cluster, spec).await?;
    gang::check_network(cluster, spec).await?;
    let inputs = inputs::check(cluster, spec).await?;
    if !cluster.hosts.up().is_empty() {
        // The hosts are asked only for a name that no job has used yet.
        images::layer_of(cluster, &spec.image).await?;
    }
    Ok(inputs)
}

/// # Errors
/// `NotFound`, also for a VM without a job.
pub async fn record(cluster: &Cluster, id: &JobId) -> Result<JobRecord, Problem> {
    let record = any_record(cluster, id).await?;
    if record.kind.is_persistent_vm() { Err(unknown(id)) } else { Ok(record) }
}

/// The same for a VM without a job too.
///
/// # Errors
/// `NotFound`.
pub async fn any_record(cluster: &Cluster, id: &JobId) -> Result<JobRecord, Problem> {
    cluster.records.read(&job_key(id)).await?.ok_or_else(|| unknown(id))
}

/// The problem of a job that does not exist, or that somebody may not know of.
pub fn unknown(id: &JobId) -> Problem {
    Problem::not_found(format!("job {id}"), "there is no job with this name")
        .next("`perigee job list` shows the jobs")
}

/// All jobs, also ended ones, sorted by id. A job with several VMs is one.
///
/// # Errors
/// If the store does not answer.
pub async fn list(cluster: &Cluster) -> Result<Vec<Job>, Problem> {
    let mut jobs = Vec::new();
    let mut moves: BTreeMap<VmId, Vec<Migration>> = BTreeMap::new();
    for record in cluster.records.list::<MigrationRecord>("migrations/").await? {
        moves.entry(record.migration.vm.clone()).or_default().push(record.migration);
    }
    let mut members: BTreeMap<JobId, Vec<JobRecord>> = BTreeMap::new();
    let mut shown = Vec::new();
    for record in cluster.jobs().await? {
        match &record.kind {
            Kind::Job | Kind::Gang(_) => shown.push(record),
            Kind::Member(member) => members.entry(member.gang.clone()).or_default().push(record),
            Kind::PersistentVm(_) => {}
        }
    }
    for record in shown {
        let mut of_vms = moves.remove(&vm_of(&record.job.id)).unwrap_or_default();
        let members = members.remove(&record.job.id).unwrap_or_default();
        for member in &members {
            of_vms.extend(moves.remove(&vm_of(&member.job.id)).unwrap_or_default());
        }
        let job = view(cluster, &record, of_vms);
        jobs.push(gang::with_members(job, members));
    }
    jobs.sort_by_key(|job| job.submitted_ms);
    Ok(jobs)
}

/// The jobs that have not ended, and the last ones that have failed, the oldest first. They are as in [`list`], but without their migrations,
/// and without the VMs of a job that has failed.
/// What has ended well is not read, however much it is.
///
/// # Errors
/// If the store does not answer.
pub async fn list_open(cluster: &Cluster) -> Result<Vec<Job>, Problem> {
    let open = cluster.unfinished_jobs().into_iter().chain(cluster.index.failed());
    let mut jobs = Vec::new();
    for record in open.filter(|record| record.kind.is_a_job()) {
        let job = view(cluster, &record, Vec::new());
        jobs.push(match record.kind.is_gang() && !record.job.state.is_final() {
            true => gang::with_members(job, members(cluster, &record).await?),
            false => job,
        });
    }
    jobs.sort_by_key(|job| job.submitted_ms);
    Ok(jobs)
}

/// One job, as in [`list`], with the migrations of all of its VMs.
///
/// # Errors
/// `NotFound` if there is no such job.
pub async fn get(cluster: &Cluster, id: &JobId) -> Result<Job, Problem> {
    let record = record(cluster, id).await?;
    let mut moves: Vec<MigrationRecord> =
        cluster.records.list(&migration_prefix(&vm_of(id))).await?;
    let members = members(cluster, &record).await?;
    for member in &members {
        let of_member = migration_prefix(&vm_of(&member.job.id));
        moves.extend(cluster.records.list::<MigrationRecord>(&of_member).await?);
    }
    let moves = moves.into_iter().map(|record| record.migration).collect();
    Ok(gang::with_members(view(cluster, &record, moves), members))
}

/// The same when it has ended, or after this time.
///
/// # Errors
/// `NotFound` if there is no such job, or when it is deleted.
pub async fn when_ended(cluster: &Cluster, id: &JobId, wait: Duration) -> Result<Job, Problem> {
    let begun = Instant::now();
    let mut changes = cluster.records.watch_key(&job_key(id));
    loop {
        let job = get(cluster, id).await?;
        let left = wait.saturating_sub(begun.elapsed());
        if job.state.is_final() || left.is_zero() {
            return Ok(job);
        }
        // Whether there was a change or the time is over: the job is looked at once more.
        let _changed = tokio::time::timeout(left, changes.next()).await;
        tokio::time::sleep(LOOK_AGAIN.min(left)).await;
    }
}

/// What its host has said of a job's VM lately.
fn report_of(cluster: &Cluster, record: &JobRecord) -> Option<VmReport> {
    let host = record.job.host.as_ref()?;
    let seen = cluster.hosts.fresh_vm(host, &vm_of(&record.job.id), REPORT_AGE_MAX);
    seen.map(|(_, report)| report)
}

/// The job with its migrations, which have their own records, its position in the queue, and its predicted end.
fn view(cluster: &Cluster, record: &JobRecord, migrations: Vec<Migration>) -> Job {
    let shown = migrations.into_iter().map(|moved| shared_links::shown(cluster, moved));
    let predicted_end = predicted_end(cluster, &record.job);
    let inputs = record.inputs.as_ref();
    let staging = inputs.and_then(|inputs| cluster.staging.in_words(&inputs.image));
    let recovered = recovery::in_words(record);
    let gang_move = record.kind.gang().and_then(|gang| gang.last_move.clone());
    let spec = &record.job.spec;
    let has_range = spec.memory_max_bytes.is_some() || spec.cpus_max.is_some();
    let is_one = record.vm_started && !record.kind.is_gang() && has_range;
    let seen = is_one.then(|| report_of(cluster, record)).flatten();
    let memory = is_one.then(|| amounts::shown(cluster, record, seen.as_ref())).flatten();
    let cpu_time = is_one.then(|| amounts::cpu_time(record, seen.as_ref())).flatten();
    let mut job = Job {
        migrations: shown.collect(),
        predicted_end,
        gang_move,
        memory,
        cpu_time,
        ..record.job.clone()
    };
    if job.state == JobState::Queued
        && let Some((place, reason)) = cluster.index.wait_of(&job.id)
    {
        job.queue_place = Some(place);
        // The earlier reason stays visible.
        let separator = if job.reason.is_empty() { "" } else { "; " };
        job.reason = format!("{}{separator}{reason}", job.reason);
    }
    if let Some(words) = staging
        && matches!(job.state, JobState::Queued | JobState::Staging)
    {
        let separator = if job.reason.is_empty() { "" } else { "; " };
        job.reason = format!("{words}{separator}{}", job.reason);
    }
    if let Some(words) = recovered {
        let separator = if job.reason.is_empty() { "" } else { "; " };
        job.reason = format!("{}{separator}{words}", job.reason);
    }
    job
}

/// When the job ends, as last predicted; `None` if its command does not run.
pub fn predicted_end(cluster: &Cluster, job: &Job) -> Option<PredictedEnd> {
    (job.state == JobState::Running).then(|| cluster.index.predicted_end(&job.id))
}

/// Records on a job that its driver failed because of a fault in the controller. The driver is not running.
pub async fn report_fault(cluster: &Arc<Cluster>, id: &JobId, reason: &str) -> Result<(), Problem> {
    let Some(mut record) = cluster.own_job(id).await? else { return Ok(()) };
    if record.value.ending.is_none() && !record.value.job.state.is_final() {
        reason.clone_into(&mut record.value.job.reason);
        record.save().await?;
    }
    Ok(())
}

/// Records a person's request. The job's driver carries it out.
///
/// # Errors
/// `Conflict` if the job has ended.
pub async fn intend(
    cluster: &Cluster,
    id: &JobId,
    request: impl Fn(&mut JobIntent),
) -> Result<Job, Problem> {
    let record = record(cluster, id).await?;
    if let Some(member) = record.kind.member() {
        let why = format!("it is a VM of job {}, which ends as a whole", member.gang);
        return Err(Problem::conflict(format!("can't change job {id}"), why)
            .next(format!("`perigee job cancel {}` ends them all", member.gang)));
    }
    let job = get(cluster, id).await?;
    if job.state.is_final() {
        return Err(Problem::conflict(format!("can't change job {id}"), "it has ended"));
    }
    let change = |old: Option<JobIntent>| {
        let mut intent = old.unwrap_or_default();
        request(&mut intent);
        intent
    };
    cluster.records.update(&job_intent_key(id), change).await?;
    // A queued job has no driver, so one is started.
    cluster.drive_job(id);
    Ok(job)
}

/// The figures of a job over time, the oldest first.
///
/// # Errors
/// `NotFound` if there is no such job.
pub async fn samples(cluster: &Cluster, id: &JobId) -> Result<Vec<Sample>, Problem> {
    samples::read(cluster, &record(cluster, id).await?).await
}

/// The files that are not among a job's outputs.
pub async fn left_out(cluster: &Cluster, id: &JobId) -> Result<LeftOutFiles, Problem> {
    let spec = record(cluster, id).await?.job.spec;
    if !spec.is_gang() {
        return left_out::of(cluster, id).await;
    }
    let mut all = LeftOutFiles::default();
    for rank in 0..spec.count {
        let of = left_out::of(cluster, &member_of(id, rank)).await?;
        all.more += of.more;
        let files = of.files.into_iter();
        all.files
            .extend(files.map(|one| LeftOut { path: format!("rank-{rank}:{}", one.path), ..one }));
    }
    Ok(all)
}

/// Deletes an ended job with everything that was kept of it; its outputs only if they are not to be kept.
///
/// # Errors
/// `Conflict` while it runs, or while parts of it are still to be removed.
pub async fn delete(
    cluster: &Arc<Cluster>,
    id: &JobId,
    keeps_outputs: bool,
) -> Result<(), Problem> {
    let record = record(cluster, id).await?;
    let refuse = |why: &str| Err(Problem::conflict(format!("can't delete job {id}"), why));
    if !record.job.state.is_final() {
        return refuse("it has not ended; cancel it first");
    }
    if let Some(member) = record.kind.member() {
        return refuse(&format!("it is a VM of job {}, which is deleted as a whole", member.gang));
    }
    let members = members(cluster, &record).await?;
    for one in members.iter().chain([&record]) {
        if crate::cleaner::is_left(cluster, &one.job.id).await? {
            return refuse("parts of it stand on a host that does not answer");
        }
    }
    if !keeps_outputs {
        outputs::remove(cluster, &record.job).await?;
    }
    for one in members.iter().chain([&record]) {
        erase(cluster, one).await?;
    }
    Ok(())
}

/// Forgets again and again what was deleted, and moves what an older version has left in the store. It does not end.
pub async fn keep_erasing(cluster: Arc<Cluster>, task: Task) {
    loop {
        let erase = async {
            erase_deleted(&cluster).await?;
            to_files::move_to_files(&cluster).await?;
            Ok("forgot what is nowhere any more".to_owned())
        };
        task.round(erase).await;
        tokio::time::sleep(ERASE_EVERY).await;
    }
}

/// Forgets the VMs without a job that were deleted, when nothing of them is left at a host.
pub async fn erase_deleted(cluster: &Cluster) -> Result<(), Problem> {
    let records = cluster.jobs().await?.into_iter();
    for record in
        records.filter(|record| record.kind.is_persistent_vm() && record.job.state.is_final())
    {
        if !crate::cleaner::is_left(cluster, &record.job.id).await? {
            erase(cluster, &record).await?;
        }
    }
    Ok(())
}

/// Removes everything that was kept of an ended job or VM. A later VM may have its name already: nothing of that is touched.
///
/// # Errors
/// If the store fails.
pub async fn erase(cluster: &Cluster, record: &JobRecord) -> Result<(), Problem> {
    erase_with(cluster, record, with_files(record)).await
}

/// The same, of a VM of a gang that starts again: what its lost run has printed is kept.
async fn erase_all_but_log(cluster: &Cluster, record: &JobRecord) -> Result<(), Problem> {
    erase_with(cluster, record, Vec::new()).await
}

async fn erase_with(
    cluster: &Cluster,
    record: &JobRecord,
    logs: Vec<JobId>,
) -> Result<(), Problem> {
    let id = &record.job.id;
    let begun = Instant::now();
    let _alone = loop {
        match cluster.index.begin_erasure(id) {
            Some(hold) => break hold,
            None if begun.elapsed() < ERASURE_DEADLINE => tokio::time::sleep(ERASURE_AGAIN).await,
            None => {
                let why = "somebody else removes its records, and has not ended";
                return Err(
                    Problem::unavailable(format!("can't delete {id}"), why).next("try again")
                );
            }
        }
    };
    let now: Option<JobRecord> = cluster.records.read(&job_key(id)).await?;
    let is_it = |now: JobRecord| {
        now.job.submitted_ms == record.job.submitted_ms && now.job.state.is_final()
    };
    if !now.is_some_and(is_it) {
        return Ok(());
    }
    let vm = vm_of(id);
    let moves = [migration_prefix(&vm), migration_intent_prefix(&vm)];
    for prefix in [planning::decisions_prefix(id)].iter().chain(&moves) {
        cluster.records.remove_all(prefix).await?;
    }
    for of in &logs {
        cluster.records.remove_all(&log::prefix(of)).await?;
        cluster.job_files.remove(&name_of(of, record.job.submitted_ms)).await?;
    }
    log::files_of(cluster, record).remove_samples().await?;
    cluster.records.remove(&samples::key(id)).await?;
    left_out::forget(cluster, id).await?;
    cluster.forget_changes(&vm).await?;
    cluster.records.remove(&console::key(id)).await?;
    cluster.records.remove(&job_intent_key(id)).await?;
    cluster.records.remove(&job_key(id)).await?;
    cluster.index.note_erased(id);
    Ok(())
}
