//! The cluster rents hosts by itself: what an admin allows, what the last look has decided, and what the scheduler has to know of that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::money::Money;
use perigee_model::rental::HostFound;
use perigee_model::renting::{
    LearnedStart, RENT_DECISIONS_MAX, RentDecision, RentSettings, Renting, SetRenting,
};
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::rent::{Job, Run, Snapshot, refused_for_s};
use tokio::sync::Notify;

use crate::clock::now_ms;
use crate::records::Records;

/// `renting/settings`: what an admin has said.
const SETTINGS: &str = "renting/settings";

/// `renting/decisions`: the last decisions, the newest last.
const DECISIONS: &str = "renting/decisions";

/// Predictions of so many kinds of jobs are kept in memory.
const PREDICTED_MAX: usize = 4_000;

/// The intervals of the task that looks.
#[derive(Debug, Clone, Copy)]
pub struct RenterTiming {
    /// Between two looks.
    pub look: Duration,
    /// What the providers offer is asked for again after so long.
    pub offers: Duration,
    /// A prediction counts for so long.
    pub predicted: Duration,
}

impl Default for RenterTiming {
    fn default() -> Self {
        Self {
            look: Duration::from_secs(10),
            offers: Duration::from_secs(60),
            predicted: Duration::from_secs(120),
        }
    }
}

/// How one kind of job would run, whichever of the waiting jobs it is.
#[derive(Debug, Clone, Default)]
pub struct Predicted {
    /// At an own host; `None` if the job can't run there.
    pub own: Option<Run>,
    /// What leaves a provider's site then.
    pub own_egress: Money,
    /// At rented hosts, by [`kind_key`].
    pub rented: BTreeMap<String, Run>,
    /// Whether its data may leave their site.
    pub may_leave: bool,
}

/// The name of a kind of machine among those of all providers.
pub fn kind_key(provider: &str, kind: &str) -> String {
    format!("{provider}/{kind}")
}

/// What a look has gathered that does not change from one pass of the scheduler to the next one.
#[derive(Debug, Clone, Default)]
pub struct Basis {
    /// The jobs about which it was gathered, with what each would take. [`Job::worth`] is as it was then.
    pub jobs: BTreeMap<JobId, Job>,
    /// What hosts of a kind have shown to be.
    pub found: BTreeMap<String, HostFound>,
    /// The rest of what the rule looks at, with kinds as [`kind_key`] has them. The jobs that wait and the hosts are not in it: they are read at each
    /// pass.
    pub rest: Snapshot,
}

/// What a look has shown.
#[derive(Debug, Clone, Default)]
pub struct Look {
    pub at_ms: Option<u64>,
    pub budget_left: Option<Money>,
    pub decisions: Vec<RentDecision>,
    pub nothing_because: String,
    pub not_known: Vec<String>,
    pub starts: Vec<LearnedStart>,
}

/// A rented host, as it was used last.
#[derive(Debug, Clone, Copy)]
struct LastUse {
    /// Since when no job runs there; Unix time.
    idle_since_ms: Option<u64>,
    /// What an hour of waiting would cost the jobs that it had last, together.
    waiting_per_hour: Money,
}

/// A job that could not start at a rented host where the rule had put it.
#[derive(Debug, Clone, Copy)]
struct RefusedJob {
    at: Instant,
    /// How often.
    times: u32,
}

impl RefusedJob {
    fn first() -> Self {
        Self { at: Instant::now(), times: 1 }
    }

    /// While it is put nowhere, nothing new is learned.
    fn again(&mut self) {
        self.again_after(self.at.elapsed());
    }

    fn again_after(&mut self, passed: Duration) {
        if !self.counts_after(passed) {
            *self = Self { at: Instant::now(), times: self.times.saturating_add(1) };
        }
    }

    fn counts(&self) -> bool {
        self.counts_after(self.at.elapsed())
    }

    fn counts_after(&self, passed: Duration) -> bool {
        passed.as_secs_f64() < refused_for_s(self.times)
    }
}

#[derive(Default)]
struct State {
    settings: RentSettings,
    last: Vec<RentDecision>,
    look: Look,
    basis: Arc<Basis>,
    /// The jobs that wait for nothing but room, in the queue's order, as of the scheduler's last pass.
    for_room: Arc<Vec<JobId>>,
    /// Of those the jobs that could not start at the rented host where the rule had put them.
    refused: BTreeMap<JobId, RefusedJob>,
    uses: BTreeMap<HostId, LastUse>,
    /// Each kind of job, with what it was predicted for.
    predicted: BTreeMap<String, (Instant, u64, Arc<Predicted>)>,
}

/// What is known of the renting rule.
#[derive(Default)]
pub struct Renter {
    state: Mutex<State>,
    /// Wakes the task that looks.
    pub look_now: Notify,
    /// Whoever changes what an admin has said, or acts by it, takes turns.
    pub turn: tokio::sync::Mutex<()>,
}

impl Renter {
    pub(super) async fn load(records: &Records) -> Result<Self, Problem> {
        let settings = records.read(SETTINGS).await?.unwrap_or_default();
        let last = records.read(DECISIONS).await?.unwrap_or_default();
        let state = State { settings, last, ..State::default() };
        Ok(Self { state: Mutex::new(state), ..Self::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn settings(&self) -> RentSettings {
        self.lock().settings
    }

    /// Records what an admin says. The caller has a turn.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn set(&self, records: &Records, ask: SetRenting) -> Result<(), Problem> {
        let change = |old: Option<RentSettings>| old.unwrap_or_default().with(ask);
        let settings = records.update(SETTINGS, change).await?;
        self.lock().settings = settings;
        self.look_now.notify_one();
        Ok(())
    }

    /// How it is shown.
    pub fn shown(&self) -> Renting {
        let state = self.lock();
        let Look { at_ms, budget_left, decisions, nothing_because, not_known, starts } =
            state.look.clone();
        Renting {
            settings: state.settings,
            looked_ms: at_ms,
            budget_left,
            decisions,
            nothing_because,
            not_known,
            starts,
            last: state.last.clone(),
        }
    }

    /// Notes what a look has shown, and keeps those of its decisions that are new.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn note_look(
        &self,
        records: &Records,
        look: Look,
        new: Vec<RentDecision>,
    ) -> Result<(), Problem> {
        let last = {
            let mut state = self.lock();
            state.look = look;
            if new.is_empty() {
                return Ok(());
            }
            state.last.extend(new);
            let excess = state.last.len().saturating_sub(RENT_DECISIONS_MAX);
            state.last.drain(..excess);
            state.last.clone()
        };
        records.put(DECISIONS, &last).await
    }

    /// Those of the last look.
    pub fn decided(&self) -> Vec<RentDecision> {
        self.lock().look.decisions.clone()
    }

    pub fn basis(&self) -> Arc<Basis> {
        Arc::clone(&self.lock().basis)
    }

    pub fn set_basis(&self, basis: Arc<Basis>) {
        self.lock().basis = basis;
    }

    /// The jobs that wait for nothing but room, in the queue's order.
    pub fn for_room(&self) -> Arc<Vec<JobId>> {
        Arc::clone(&self.lock().for_room)
    }

    /// Notes them after a pass of the scheduler, and those of all that wait that could not start at the rented host where the rule had put them. A job
    /// may wait for something else for a moment; what was learned of it is forgotten when it waits no more.
    pub fn note_pass(
        &self,
        for_room: Vec<JobId>,
        waits: &BTreeSet<&JobId>,
        refused: impl IntoIterator<Item = JobId>,
    ) {
        let mut state = self.lock();
        let before = std::mem::take(&mut state.refused);
        state.refused = before.into_iter().filter(|(job, _)| waits.contains(job)).collect();
        for job in refused.into_iter().filter(|job| waits.contains(job)) {
            let entry = state.refused.entry(job);
            entry.and_modify(RefusedJob::again).or_insert_with(RefusedJob::first);
        }
        state.for_room = Arc::new(for_room);
    }

    /// Those of the jobs that wait for room that are put at no rented host now, because they could not start at one.
    pub fn refused_jobs(&self) -> BTreeSet<JobId> {
        let state = self.lock();
        let counts = state.refused.iter().filter(|(_, refused)| refused.counts());
        counts.map(|(job, _)| job.clone()).collect()
    }

    /// Notes that jobs run at a rented host, for which an hour of waiting costs so much together, or that none does.
    pub fn note_use(&self, host: &HostId, running: Option<Money>) {
        let mut state = self.lock();
        let before = state.uses.get(host).copied();
        let idle_since_ms = before.and_then(|before| before.idle_since_ms);
        let last_use = match running {
            Some(waiting_per_hour) => LastUse { idle_since_ms: None, waiting_per_hour },
            None => LastUse {
                idle_since_ms: idle_since_ms.or_else(|| Some(now_ms())),
                waiting_per_hour: before.map_or(Money::ZERO, |before| before.waiting_per_hour),
            },
        };
        state.uses.insert(host.clone(), last_use);
    }

    /// Since when no job has run there, and what an hour of waiting would cost those that it had last.
    pub fn last_use(&self, host: &HostId) -> (Option<u64>, Money) {
        let found = self.lock().uses.get(host).copied();
        found.map_or((None, Money::ZERO), |last| (last.idle_since_ms, last.waiting_per_hour))
    }

    /// Forgets all hosts but these.
    pub fn forget_uses_but(&self, hosts: &BTreeSet<HostId>) {
        self.lock().uses.retain(|host, _| hosts.contains(host));
    }

    /// What was predicted for a kind of job, if that is not older, and was made from the same hosts and offers.
    pub fn predicted(&self, key: &str, from: u64, age: Duration) -> Option<Arc<Predicted>> {
        let state = self.lock();
        let (at, made_from, predicted) = state.predicted.get(key)?;
        (*made_from == from && at.elapsed() < age).then(|| Arc::clone(predicted))
    }

    /// Keeps a prediction. If there are too many, those are dropped that are no longer used.
    pub fn note_predicted(&self, key: String, from: u64, predicted: Arc<Predicted>, age: Duration) {
        let mut state = self.lock();
        if state.predicted.len() >= PREDICTED_MAX {
            state
                .predicted
                .retain(|_, (at, made_from, _)| *made_from == from && at.elapsed() < age);
        }
        if state.predicted.len() < PREDICTED_MAX {
            state.predicted.insert(key, (Instant::now(), from, predicted));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_could_not_start_at_a_rented_host_is_put_at_none_for_a_while_and_forgotten_when_it_waits_no_more()
     {
        let job = |name: &str| JobId::new(name).expect("a name");
        let (renter, both) = (Renter::default(), vec![job("j-1"), job("j-2")]);
        let refused = || renter.refused_jobs().into_iter().collect::<Vec<_>>();
        let waits: BTreeSet<&JobId> = both.iter().collect();
        renter.note_pass(both.clone(), &waits, [job("j-1"), job("j-9")]);
        assert_eq!(refused(), [job("j-1")], "the other one does not wait");
        // For a moment it waits for something else.
        renter.note_pass(vec![job("j-2")], &waits, []);
        assert_eq!(refused(), [job("j-1")]);
        // Nothing new is learned while it is put nowhere.
        renter.note_pass(both.clone(), &waits, [job("j-1")]);
        let times = renter.lock().refused[&job("j-1")].times;
        assert_eq!((refused(), times), (vec![job("j-1")], 1));
        renter.note_pass(vec![job("j-2")], &[&job("j-2")].into(), []);
        assert!(refused().is_empty());
        let (mut refused, long) = (RefusedJob::first(), Duration::from_secs(301));
        assert!(!refused.counts_after(long));
        refused.again_after(long);
        assert_eq!((refused.counts_after(long), refused.times), (true, 2));
    }
}
