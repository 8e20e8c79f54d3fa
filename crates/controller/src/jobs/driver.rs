//! One task for each unfinished job. Only this task writes the job's record.
//!
//! It is a loop of steps. Each step can be repeated, because it is recorded before it is done, or because what
//! it makes is named after the job and found again. So a driver may be dropped at any `await` (by a cancel, or
//! at the controller's end) and later continue from the record.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::gang::Seen;
use perigee_model::job::JobState;
use perigee_model::waiting::Waiting;
use perigee_model::{JobId, Problem, ProblemKind, VmId};
use tokio::sync::Notify;

use super::cancel::STOPPED;
use super::cost;
use super::decide_move::RefusedChange;
use super::finish::NoRoom;
use super::follow::FailedStarts;
use super::gang::GangRun;
use super::log;
use super::samples::Samples;
use crate::cluster::Cluster;
use crate::job_files::JobDirectory;
use crate::records::{Ending, JobIntent, JobRecord, Kind, Owned, job_intent_key, vm_of};

/// How the loop continues after a step.
pub enum Step {
    Again,
    Wait(Duration),
    /// Waits until the driver is requested again.
    Leave,
}

/// The log says the same trouble of a job again after so long, and another one. A step may be tried twice a second.
const SAME_AGAIN: Duration = Duration::from_secs(600);
const OTHER_AGAIN: Duration = Duration::from_secs(10);

/// The trouble that the log has last said of a job, and when.
#[derive(Debug, Default)]
pub struct Said(Option<(String, Instant)>);

impl Said {
    fn is_new(&mut self, text: &str, now: Instant) -> bool {
        let after = |said: &str| if said == text { SAME_AGAIN } else { OTHER_AGAIN };
        if self.0.as_ref().is_some_and(|(said, at)| now < *at + after(said)) {
            return false;
        }
        self.0 = Some((text.to_owned(), now));
        true
    }
}

/// A job with one VM, a gang's member or a VM without a job, with its record, held by its driver. A gang has a
/// [`GangRun`].
pub struct Run {
    pub cluster: Arc<Cluster>,
    pub id: JobId,
    pub record: Owned<JobRecord>,
    pub files: Arc<JobDirectory>,
    pub samples: Samples,
    pub figures_read: Option<Instant>,
    /// When the report came from which the figures were read last.
    pub reported: Instant,
    /// When the last check found the VM at work; `None` if it did not.
    pub seen_at_work: Option<Instant>,
    /// When its VM was last seen to stand still, because its disks wait, and how long it has done so.
    pub seen_to_stand: Option<Instant>,
    pub stood_still: Duration,
    /// The last refusal of each kind of change that the planner wanted.
    pub refused: Vec<RefusedChange>,
    /// Since when the next volume that is to come to the VM has been refused.
    pub follow_refused: Option<Instant>,
    /// The host's tries to start the VM, which have failed so far.
    pub failed_starts: Option<FailedStarts>,
    /// The last time that the repository had no room for the outputs.
    pub no_room: Option<NoRoom>,
    /// What the log says of its troubles.
    pub trouble_said: Said,
    /// Why the guest of this member was not told to begin, the last time.
    pub not_begun: Option<String>,
    /// When this controller first saw that the job is to be cancelled. A clock that is set does not change how long the
    /// guest has for its outputs.
    pub cancel_seen: Option<Instant>,
    /// The same for a VM that is to be started once more for its outputs.
    pub collect_seen: Option<Instant>,
    /// Who cancels it does not wait for its outputs from a host that does not answer.
    pub is_hurried: bool,
    /// Whether the last report said that the guest runs, and that it does not move.
    pub seen_running: bool,
    /// [`crate::cluster::Index::home_changes`] before the step.
    homes_at: u64,
}

/// What the loop of steps asks of whoever has a record.
pub(super) trait Drives: Sized {
    /// `None` if there is no record.
    async fn load(cluster: &Arc<Cluster>, id: &JobId) -> Result<Option<Self>, Problem>;

    /// A step was interrupted: `again` goes on from what it has recorded, with what only this one knows.
    fn go_on_as(self, again: Self) -> Self;

    fn state(&self) -> JobState;

    async fn step(&mut self) -> Result<Step, Problem>;

    /// Takes into account what people ask of it.
    async fn apply_intent(&mut self) -> Result<(), Problem>;

    /// What the driver of its gang wants to know at once.
    fn seen_by_gang(&self) -> Option<Seen>;

    fn wake_gang(&self);

    /// What follows a step that failed, and the pause before the next one.
    async fn troubled(&mut self, problem: Problem) -> Result<Duration, Problem>;
}

/// Drives a job to its end.
///
/// # Errors
/// If the store fails. The caller tries again.
pub async fn drive(cluster: Arc<Cluster>, id: JobId) -> Result<(), Problem> {
    let Some(found) = cluster.own_job(&id).await? else { return Ok(()) };
    match found.value.kind {
        Kind::Job | Kind::Member(_) | Kind::PersistentVm(_) => drive_as::<Run>(&cluster, &id).await,
        Kind::Gang(_) => drive_as::<GangRun>(&cluster, &id).await,
    }
}

async fn drive_as<D: Drives>(cluster: &Arc<Cluster>, id: &JobId) -> Result<(), Problem> {
    let mut intents = cluster.records.watch_key(&job_intent_key(id));
    let news = News::of(cluster, id);
    let Some(mut run) = D::load(cluster, id).await? else { return Ok(()) };
    run.apply_intent().await?;
    loop {
        if run.state().is_final() {
            return Ok(());
        }
        let before = run.seen_by_gang();
        let done = tokio::select! {
            done = run.step() => done,
            _ = intents.next() => {
                // The step was interrupted: continue from what it has recorded.
                let Some(again) = D::load(cluster, id).await? else { return Ok(()) };
                run = run.go_on_as(again);
                run.apply_intent().await?;
                continue;
            }
        };
        if run.seen_by_gang() != before {
            run.wake_gang();
        }
        let pause = match done {
            Ok(Step::Again) => continue,
            Ok(Step::Wait(pause)) => pause,
            Ok(Step::Leave) => return Ok(()),
            Err(problem) => run.troubled(problem).await?,
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = intents.next() => run.apply_intent().await?,
            () = news.wake.notified() => {}
        }
    }
}

/// The notification of changes of a job's VM, while its driver runs.
struct News {
    cluster: Arc<Cluster>,
    vm: VmId,
    wake: Arc<Notify>,
}

impl News {
    fn of(cluster: &Arc<Cluster>, job: &JobId) -> Self {
        let vm = vm_of(job);
        Self { cluster: Arc::clone(cluster), wake: cluster.wakes.of(&vm), vm }
    }
}

impl Drop for News {
    fn drop(&mut self) {
        self.cluster.wakes.forget(&self.vm);
    }
}

impl Drives for Run {
    async fn load(cluster: &Arc<Cluster>, id: &JobId) -> Result<Option<Self>, Problem> {
        let Some(record) = cluster.own_job(id).await? else {
            return Ok(None);
        };
        cost::say_left_sites(cluster, &record.value);
        let files = log::files_of(cluster, &record.value);
        Ok(Some(Self {
            cluster: Arc::clone(cluster),
            id: id.clone(),
            record,
            samples: Samples::load(cluster, &files).await?,
            files,
            figures_read: None,
            reported: Instant::now(),
            seen_at_work: None,
            seen_to_stand: None,
            stood_still: Duration::ZERO,
            refused: Vec::new(),
            follow_refused: None,
            failed_starts: None,
            no_room: None,
            trouble_said: Said::default(),
            not_begun: None,
            cancel_seen: None,
            collect_seen: None,
            is_hurried: false,
            seen_running: false,
            homes_at: 0,
        }))
    }

    fn go_on_as(self, again: Self) -> Self {
        Self { cancel_seen: self.cancel_seen, collect_seen: self.collect_seen, ..again }
    }

    fn state(&self) -> JobState {
        self.job().state
    }

    fn seen_by_gang(&self) -> Option<Seen> {
        self.seen_as_member()
    }

    fn wake_gang(&self) {
        self.wake_own_gang();
    }

    async fn step(&mut self) -> Result<Step, Problem> {
        self.homes_at = self.cluster.index.home_changes();
        self.follow_homes().await?;
        self.drop_old_roots().await?;
        if self.record.value.ending.is_some() {
            return self.finish().await;
        }
        if let Some(collect) = self.record.value.collect.clone() {
            return self.collect(collect).await;
        }
        if let Some(step) = self.make_of_backup().await? {
            return Ok(step);
        }
        if let Some(step) = self.persistent_step().await? {
            return Ok(step);
        }
        match self.job().state {
            JobState::Queued => self.place().await,
            JobState::Staging => self.stage().await,
            JobState::Starting | JobState::Running | JobState::Collecting => self.follow().await,
            JobState::Succeeded | JobState::Failed | JobState::Cancelled => Ok(Step::Again),
        }
    }

    async fn apply_intent(&mut self) -> Result<(), Problem> {
        let intent: Option<JobIntent> =
            self.cluster.records.read(&job_intent_key(&self.id)).await?;
        self.is_hurried = intent.as_ref().is_some_and(|intent| intent.cancel && intent.now);
        let power = intent.as_ref().and_then(|intent| intent.power);
        if let (Some(persistent), Some((number, request))) =
            (self.record.value.kind.persistent_vm_mut(), power)
            && number > persistent.applied
        {
            persistent.apply(number, request, self.record.value.job.state);
            self.record.save().await?;
        }
        self.apply_set(intent.as_ref().and_then(|intent| intent.set.clone())).await?;
        self.apply_size(intent.as_ref().and_then(|intent| intent.size.clone())).await?;
        self.apply_volume(intent.as_ref().and_then(|intent| intent.volume.as_ref())).await?;
        let Some(intent) = intent.filter(|_| self.record.value.ending.is_none()) else {
            return Ok(());
        };
        let (ending, reason) = match intent {
            JobIntent { cancel: true, .. } => (Ending::Cancelled, self.why_cancelled().to_owned()),
            JobIntent { stop_vm: true, .. } => (Ending::Failed, STOPPED.to_owned()),
            _ => return Ok(()),
        };
        if intent.gives_up {
            return self.give_up_outputs(ending, reason).await;
        }
        if self.may_have_outputs() && !intent.now && !intent.stop_vm {
            return self.begin_cancel().await;
        }
        self.end_after_outputs(ending, reason).await
    }

    async fn troubled(&mut self, problem: Problem) -> Result<Duration, Problem> {
        let mut disks = self.record.value.placement.iter().flat_map(|placement| &placement.disks);
        // The step may have asked a host for a volume that has its home elsewhere.
        let homes_may_be_old = self.homes_at != self.cluster.index.home_changes()
            || disks.any(|disk| self.cluster.index.is_changing_home(&disk.volume));
        let (cluster, said) = (&self.cluster, &mut self.trouble_said);
        let Some(text) = fatal(cluster, &mut self.record, said, homes_may_be_old, problem).await?
        else {
            return Ok(self.cluster.timing.monitor);
        };
        if self.record.value.collect.is_some() {
            self.end_without_outputs(&text).await?;
            return Ok(Duration::ZERO);
        }
        tracing::warn!("job {} fails: {text}", self.id);
        self.end(Ending::Failed, text).await?;
        Ok(Duration::ZERO)
    }
}

impl Run {
    /// Decides how the job ends. The steps in `finish` follow.
    pub async fn end(&mut self, ending: Ending, reason: String) -> Result<(), Problem> {
        if ending == Ending::Failed && self.persistent().is_some() {
            return self.fail_persistent(&reason).await;
        }
        self.record.end(ending, reason).await
    }

    /// Says why the job waits; an empty text when it does not.
    pub async fn say(&mut self, reason: &str) -> Result<(), Problem> {
        self.record.say(reason, Vec::new()).await
    }

    /// The same, with what its VM waits for.
    pub(super) async fn say_waiting(
        &mut self,
        reason: &str,
        waits: Vec<Waiting>,
    ) -> Result<(), Problem> {
        self.record.say(reason, waits).await
    }

    /// Says what the job's end waits for.
    pub(super) async fn say_end_waits(&mut self, why: &str) -> Result<(), Problem> {
        self.record.say_end_waits(why).await
    }

    /// The job, as people see it.
    pub fn job(&self) -> &perigee_model::job::Job {
        &self.record.value.job
    }
}

/// Decides what a failed step means; this is the only place that does. A fault of the cluster never ends a job: if something does
/// not answer, has no room or is broken, the job waits and shows the reason. The job ends if it requested something that cannot
/// be had: then the reason is returned.
///
/// # Errors
/// If the store fails.
pub(super) async fn fatal(
    cluster: &Arc<Cluster>,
    record: &mut Owned<JobRecord>,
    said: &mut Said,
    homes_may_be_old: bool,
    problem: Problem,
) -> Result<Option<String>, Problem> {
    let id = record.value.job.id.clone();
    let text = cluster.hosts.named(&format!("{}: {}", problem.what, problem.why));
    // Changes of the step that were not stored count as not made.
    let stored = cluster.own_job(&id).await?;
    *record =
        stored.ok_or_else(|| Problem::not_found(format!("job {id}"), "its record was deleted"))?;
    let asked_for_it = match problem.kind {
        ProblemKind::Invalid | ProblemKind::NotFound | ProblemKind::Conflict => true,
        ProblemKind::Unavailable
        | ProblemKind::Forbidden
        | ProblemKind::NoSpace
        | ProblemKind::Superseded
        | ProblemKind::Internal
        // A host may lack for a moment what a VM needs.
        | ProblemKind::Unsupported => false,
    };
    let now = &record.value;
    let ends = now.ending.is_some() || now.kind.goes_down();
    if asked_for_it && !homes_may_be_old && !ends {
        return Ok(Some(text));
    }
    if said.is_new(&text, Instant::now()) {
        tracing::warn!("job {id} waits: {text}");
    }
    match now.ending.is_some() || now.kind.is_judged() {
        true => record.say_end_waits(&text).await?,
        false => record.say(&text, Vec::new()).await?,
    }
    Ok(None)
}

impl Owned<JobRecord> {
    /// Says why it waits, in words and for programs; both empty when it does not.
    pub async fn say(&mut self, reason: &str, waits: Vec<Waiting>) -> Result<(), Problem> {
        let job = &mut self.value.job;
        if job.reason != reason || job.waits != waits {
            reason.clone_into(&mut job.reason);
            job.waits = waits;
            self.save().await?;
        }
        Ok(())
    }

    /// Says what its end waits for.
    pub async fn say_end_waits(&mut self, why: &str) -> Result<(), Problem> {
        let record = &mut self.value;
        record.ends_because.get_or_insert_with(|| record.job.reason.clone());
        self.say(why, Vec::new()).await
    }

    /// Records how it ends.
    pub async fn end(&mut self, ending: Ending, reason: String) -> Result<(), Problem> {
        self.value.ending = Some(ending);
        self.value.job.reason = reason;
        self.value.job.waits.clear();
        self.save().await
    }
}

impl JobRecord {
    /// The end waits no more: the reason is again why the job ends.
    pub fn end_goes_on(&mut self) {
        if let Some(because) = self.ends_because.take() {
            self.job.reason = because;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_that_stays_is_said_once_however_often_it_is_met() {
        let (mut said, begun) = (Said::default(), Instant::now());
        let half = Duration::from_millis(500);
        let times =
            (0..1000_u32).filter(|time| said.is_new("the disk is full", begun + half * *time));
        assert_eq!(times.count(), 1);
        let at = begun + half * 1000;
        assert!(said.is_new("the host does not answer", at));
        assert!(!said.is_new("the disk is full", at + half));
        assert!(said.is_new("the disk is full", at + OTHER_AGAIN));
        assert!(said.is_new("the disk is full", at + OTHER_AGAIN + SAME_AGAIN));
    }
}
