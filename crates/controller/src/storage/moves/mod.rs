//! Moves of volumes to another home: one task each, which alone writes the move's record.
//!
//! The volume servers decide who is the home ([`perigee_model::home`]); here they are asked, and whoever
//! uses the volume is told. The states are drawn in [`perigee_model::volume_move`].
//!
//! Before anything is asked it stands in the record. Every request can be made again, and an answer that
//! does not come is asked for again: only an answer changes the state. A host that a person removed is not
//! waited for; what it had is lost, and the record says so.

mod fill;
mod pace;
mod request;
mod sync;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::grant::Allowed;
use perigee_model::home::{CallOff, HomeState, TakeVolume, Tenure, VolumeHome};
use perigee_model::volume_move::{VolumeMove, VolumeMoveEvent, VolumeMoveState};
use perigee_model::{HostId, Problem, ProblemKind, VolumeName};

use crate::admissions;
use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::ledger::left_site;
use crate::records::{Owned, VolumeMoveIntent, VolumeMoveRecord, volume_move_intent_key};

use pace::Pace;
pub use request::{call_off, cancel, forget, home_in_a_job, is_kept_by_a_vm, of_volume, request};
pub use sync::attach_at;

/// The new home stops its clients for a moment and asks the old one; then it answers.
const TAKE_DEADLINE: Duration = Duration::from_secs(60);

/// Between two tries; doubled each time up to this.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Why a move ended that a person did not want any more.
pub const CANCELLED: &str = "cancelled";

/// How the driver goes on after a step.
enum Step {
    Again,
    Wait(Duration),
}

/// Drives a move to its end.
///
/// # Errors
/// When the store fails; the caller tries again.
pub async fn drive(cluster: Arc<Cluster>, volume: VolumeName) -> Result<(), Problem> {
    let intent_key = volume_move_intent_key(&volume);
    let mut intents = cluster.records.watch_key(&intent_key);
    let (mut informed, mut failing_since, mut pause) = (BTreeSet::new(), None, cluster.timing.poll);
    let mut pace_of_copy = Pace::default();
    loop {
        let Some(record) = cluster.own_volume_move(&volume).await? else { return Ok(()) };
        if record.value.view.state.is_final() {
            return Ok(());
        }
        let intent: Option<VolumeMoveIntent> = cluster.records.read(&intent_key).await?;
        let is_unwanted = intent.is_some_and(|intent| intent.cancel == record.value.number);
        let mut run = Run {
            cluster: Arc::clone(&cluster),
            record,
            informed: &mut informed,
            failing_since: &mut failing_since,
            pace: &mut pace_of_copy,
        };
        let done = tokio::select! {
            done = run.step(is_unwanted) => done,
            // The step was left in the middle: it is done again.
            _ = intents.next() => continue,
        };
        let wait = match done {
            Ok(Step::Again) => {
                pause = cluster.timing.poll;
                continue;
            }
            Ok(Step::Wait(wait)) => {
                pause = cluster.timing.poll;
                wait
            }
            Err(problem) => {
                run.note(&problem).await?;
                pause = (pause * 2).min(PAUSE_MAX);
                pause
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = intents.next() => {}
        }
    }
}

struct Run<'a> {
    cluster: Arc<Cluster>,
    record: Owned<VolumeMoveRecord>,
    /// Hosts that know the new home.
    informed: &'a mut BTreeSet<HostId>,
    /// When the new home first could not take the volume.
    failing_since: &'a mut Option<Instant>,
    /// How fast the rest comes.
    pace: &'a mut Pace,
}

impl Run<'_> {
    async fn step(&mut self, is_unwanted: bool) -> Result<Step, Problem> {
        match self.view().state {
            VolumeMoveState::Taking if is_unwanted => self.give_up(CANCELLED.to_owned()).await,
            VolumeMoveState::Taking => self.take().await,
            VolumeMoveState::CallingOff => self.call_off().await,
            VolumeMoveState::Redirecting => self.redirect().await,
            VolumeMoveState::Filling => self.fill().await,
            VolumeMoveState::Completed | VolumeMoveState::CalledOff | VolumeMoveState::Lost => {
                Ok(Step::Again)
            }
        }
    }

    /// Asks the new home to take the volume.
    async fn take(&mut self) -> Result<Step, Problem> {
        let Some(to) = self.to() else {
            return self.give_up(format!("host {} was removed", self.view().to)).await;
        };
        let Some(from) = self.from() else {
            return self.give_up(format!("host {} was removed", self.view().from)).await;
        };
        let Some(tenure) = self.record.value.tenure else { return self.learn_tenure(&from).await };
        let volume = self.view().volume.clone();
        match admissions::allow_the_same(&self.cluster, &from, &to, &volume).await {
            // The old home may be away because it is not needed any more: only the answer to an earlier try was lost.
            Err(problem) if may_pass(&problem) => match self.home_at(&to).await {
                Ok(HomeState::Here { tenure: now, missing_bytes }) if now > tenure => {
                    return self.taken(missing_bytes).await;
                }
                _ => return self.not_taken(problem).await,
            },
            Err(problem) => return self.give_up(in_words(&problem)).await,
            Ok(()) => {}
        }
        let grant = self.cluster.grant(&to.id, Allowed::Home { volume, tenure })?;
        let (old, new) = (from.volume_server(), to.volume_server());
        let ask = TakeVolume { from: old, to: new, tenure, grant };
        let path = self.path("take");
        let asked = to.volume_slow.post::<VolumeHome>(&path, &ask);
        let patience = self.cluster.timing.take_patience;
        let deadline = self
            .failing_since
            .map_or(TAKE_DEADLINE, |since| patience.saturating_sub(since.elapsed()));
        let answer = tokio::time::timeout(deadline, asked).await.unwrap_or_else(|_| {
            let why = format!("{} did not answer within {} s", to.id, deadline.as_secs());
            Err(Problem::unavailable(self.what(), why))
        });
        match answer.map(|answer| answer.home) {
            Ok(HomeState::Here { tenure: now, missing_bytes }) if now > tenure => {
                self.taken(missing_bytes).await
            }
            Ok(home) => self.not_taken(self.odd(&to, &home)).await,
            Err(problem) if may_pass(&problem) => self.not_taken(problem).await,
            Err(problem) => self.give_up(in_words(&problem)).await,
        }
    }

    /// The new home may take it later. Not for ever: the volume may have left its old home, and then it
    /// has none. A controller that restarts counts from the beginning.
    async fn not_taken(&mut self, problem: Problem) -> Result<Step, Problem> {
        let patience = self.cluster.timing.take_patience;
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        if since.elapsed() < patience {
            return Err(problem);
        }
        let VolumeMove { from, to, problem: before, .. } = self.view();
        // The last try was cut short, and says less than the one before.
        let last = if before.is_empty() { in_words(&problem) } else { before.clone() };
        let why = format!("{to} could not take it from {from} for {patience:?}: {last}");
        self.give_up(why).await
    }

    /// Nothing was asked yet: whatever stands against the move ends it at once.
    async fn learn_tenure(&mut self, from: &HostLink) -> Result<Step, Problem> {
        match self.home_at(from).await {
            Ok(HomeState::Here { tenure, .. }) => {
                self.record.value.tenure = Some(tenure);
                self.record.save().await?;
            }
            Ok(HomeState::Departed { .. } | HomeState::NotHere { .. }) => {
                let why = format!("the volume is not at {} any more", from.id);
                self.end(VolumeMoveEvent::Returned, why).await?;
            }
            Err(problem) if may_pass(&problem) => return Err(problem),
            Err(problem) => self.end(VolumeMoveEvent::Returned, in_words(&problem)).await?,
        }
        Ok(Step::Again)
    }

    /// The new home refuses for good before the old one takes the volume back: never are there two.
    async fn call_off(&mut self) -> Result<Step, Problem> {
        // Until the tenure is known, nobody is asked for anything. What a removed host may have taken is
        // gone with it.
        if let (Some(tenure), Some(to)) = (self.record.value.tenure, self.to()) {
            let ask = CallOff { tenure };
            let answer: VolumeHome = to.volume.post(&self.path("refuse"), &ask).await?;
            match answer.home {
                HomeState::Here { tenure: now, missing_bytes } if now > tenure => {
                    return self.taken(missing_bytes).await;
                }
                // It had it, and somebody deleted it there.
                HomeState::NotHere { had, .. } if had > tenure => return self.taken(0).await,
                HomeState::NotHere { refused, .. } if refused > tenure => {}
                // What it keeps is of an earlier move.
                HomeState::Departed { tenure: gone, .. } if gone <= tenure => {}
                home => return Err(self.odd(&to, &home)),
            }
        }
        let Some(from) = self.from() else {
            let from = &self.view().from;
            return self.lost(format!("host {from} was removed, and the volume with it")).await;
        };
        if let Some(tenure) = self.record.value.tenure {
            match self.return_to(&from, tenure).await {
                // Somebody deleted the volume there, or moved it without the controller.
                Err(problem)
                    if matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Conflict) =>
                {
                    tracing::warn!("{}: {problem}", self.what());
                }
                done => done?,
            }
        }
        let why = self.view().problem.clone();
        self.end(VolumeMoveEvent::Returned, why).await?;
        Ok(Step::Again)
    }

    async fn return_to(&self, from: &HostLink, tenure: Tenure) -> Result<(), Problem> {
        let ask = CallOff { tenure };
        let answer: VolumeHome = from.volume.post(&self.path("return"), &ask).await?;
        match answer.home {
            HomeState::Here { .. } => Ok(()),
            home => Err(self.odd(from, &home)),
        }
    }

    async fn taken(&mut self, missing_bytes: u64) -> Result<Step, Problem> {
        let VolumeMove { volume, from, to, started_ms, .. } = self.view();
        if missing_bytes > 0 && left_site::leaves(&self.cluster, from, to) {
            // All that is missing comes from the old home, now or when somebody reads it.
            let left = [(from.clone(), missing_bytes)].into();
            left_site::over(&self.cluster, &format!("volume/{volume}/{started_ms}"), &left).await?;
        }
        self.advance(VolumeMoveEvent::Taken)?;
        let view = &mut self.record.value.view;
        (view.taken_ms, view.missing_bytes) = (Some(now_ms()), Some(missing_bytes));
        view.problem.clear();
        self.record.save().await?;
        tracing::info!("volume {} has its home at {}", self.view().volume, self.view().to);
        Ok(Step::Again)
    }

    /// It is not wanted, or cannot be done. The new home may have taken it all the same.
    async fn give_up(&mut self, why: String) -> Result<Step, Problem> {
        tracing::warn!("{}: {why}", self.what());
        self.advance(VolumeMoveEvent::GivenUp)?;
        self.record.value.view.problem = self.cluster.hosts.named(&why);
        self.record.save().await?;
        Ok(Step::Again)
    }

    async fn lost(&mut self, why: String) -> Result<Step, Problem> {
        tracing::warn!("the move of volume {}: {why}", self.view().volume);
        self.end(VolumeMoveEvent::HostRemoved, why).await?;
        self.drive_users();
        Ok(Step::Again)
    }

    /// The jobs and VMs with the volume at the host that was removed hear what has become of it.
    fn drive_users(&self) {
        let VolumeMove { volume, to, .. } = self.view();
        for record in self.cluster.index.jobs_that_name(volume, to) {
            self.cluster.drive_job(&record.job.id);
        }
    }

    /// The one place where a move ends.
    async fn end(&mut self, event: VolumeMoveEvent, problem: String) -> Result<(), Problem> {
        self.advance(event)?;
        let view = &mut self.record.value.view;
        (view.ended_ms, view.problem) = (Some(now_ms()), problem);
        self.record.save().await?;
        let volume = &self.view().volume;
        // A job that has ended needs no account of its volumes.
        if !self.record.value.listed && request::job_with(&self.cluster, volume).is_none() {
            request::forget(&self.cluster, volume).await?;
        }
        Ok(())
    }

    fn advance(&mut self, event: VolumeMoveEvent) -> Result<(), Problem> {
        let state = &mut self.record.value.view.state;
        *state = state.next(event)?;
        Ok(())
    }

    /// Says what the move waits for.
    async fn note(&mut self, problem: &Problem) -> Result<(), Problem> {
        // What the step changed and could not store has not happened.
        let volume = self.view().volume.clone();
        let Some(stored) = self.cluster.own_volume_move(&volume).await? else { return Ok(()) };
        self.record = stored;
        let text = self.cluster.hosts.named(&in_words(problem));
        let view = &mut self.record.value.view;
        // Why it is called off stays said.
        if view.state == VolumeMoveState::CallingOff || view.problem == text {
            tracing::debug!("{}: {text}", self.what());
            return Ok(());
        }
        tracing::warn!("{}: {text}", self.what());
        self.record.value.view.problem = text;
        self.record.save().await
    }

    fn view(&self) -> &VolumeMove {
        &self.record.value.view
    }

    fn what(&self) -> String {
        format!("can't move volume {} to {}", self.view().volume, self.view().to)
    }

    fn path(&self, verb: &str) -> String {
        format!("/v1/volumes/{}/{verb}", self.view().volume)
    }

    /// `None` when a person removed the host.
    fn from(&self) -> Option<Arc<HostLink>> {
        self.cluster.hosts.get(&self.view().from).ok()
    }

    /// As [`Run::from`], the new home.
    fn to(&self) -> Option<Arc<HostLink>> {
        self.cluster.hosts.get(&self.view().to).ok()
    }

    async fn home_at(&self, host: &HostLink) -> Result<HomeState, Problem> {
        Ok(host.volume.get::<VolumeHome>(&self.path("home")).await?.home)
    }

    fn odd(&self, host: &HostLink, said: &HomeState) -> Problem {
        let why = format!("the volume server of {} says of its home: {said:?}", host.id);
        Problem::internal(self.what(), why)
    }
}

/// Whether the same request may succeed later.
fn may_pass(problem: &Problem) -> bool {
    matches!(problem.kind, ProblemKind::Unavailable | ProblemKind::Internal)
}

/// A problem in one line.
pub(crate) fn in_words(problem: &Problem) -> String {
    match problem.next.is_empty() {
        true => format!("{}: {}", problem.what, problem.why),
        false => format!("{}: {}; {}", problem.what, problem.why, problem.next),
    }
}
