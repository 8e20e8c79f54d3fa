//! Looks at jobs and rented hosts again and again, and says in a sentence what has changed.

use std::collections::BTreeMap;
use std::time::Duration;

use perigee_http::Client;
use perigee_http::certificate::now_ms;
use perigee_model::auto_mode::AutoMode;
use perigee_model::job::{Job, JobState};
use perigee_model::plan::Decision;
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;
use perigee_model::renting::Renting;
use perigee_model::{HostId, Problem, RentalId};

use super::outcome::{Event, JobRow, RentalRow, minutes};
use super::stage::Task;
use crate::cluster::Cluster;
use crate::demo::way_word;
use crate::progress::Steps;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// For all jobs, on a machine that is busy with other work: so long, and [`JOB_MAX`] for each of them.
const JOBS_MAX: Duration = Duration::from_secs(600);
const JOB_MAX: Duration = Duration::from_secs(120);
/// From the end of the last job.
const GIVE_BACK_MAX: Duration = Duration::from_secs(1200);

/// A job that is followed.
struct Followed {
    task: Task,
    is_first: bool,
    job: Job,
    /// Where its VM was first.
    host: Option<HostId>,
    decision: Option<Decision>,
}

/// What is known so far.
pub struct Watch<'a> {
    cluster: &'a Cluster,
    client: &'a Client,
    steps: &'a Steps,
    own_hosts: &'a [HostId],
    /// Times are told from this moment on.
    from_ms: u64,
    jobs: Vec<Followed>,
    rentals: BTreeMap<RentalId, Rental>,
    /// Why no host was rented, when that was said last, without its figures.
    nothing_because: String,
    events: Vec<Event>,
}

impl<'a> Watch<'a> {
    pub fn new(
        cluster: &'a Cluster,
        client: &'a Client,
        steps: &'a Steps,
        own_hosts: &'a [HostId],
    ) -> Self {
        Self {
            cluster,
            client,
            steps,
            own_hosts,
            from_ms: now_ms(),
            jobs: Vec::new(),
            rentals: BTreeMap::new(),
            nothing_because: String::new(),
            events: Vec::new(),
        }
    }

    /// What was said until now was before.
    pub fn count_from_now(&mut self) {
        let now_ms = now_ms();
        let before_s = self.since(now_ms);
        self.from_ms = now_ms;
        self.events.iter_mut().for_each(|event| event.at_s -= before_s);
    }

    pub fn follow(&mut self, job: Job, task: Task, is_first: bool) {
        self.jobs.push(Followed { task, is_first, job, host: None, decision: None });
    }

    /// Says and keeps a sentence.
    pub fn say(&mut self, text: String) {
        let at_s = self.since(now_ms());
        self.steps.say(&format!("  {at_s:>5.0} s  {text}"));
        self.events.push(Event { at_s, text });
    }

    fn since(&self, ms: u64) -> f64 {
        (ms as f64 - self.from_ms as f64) / 1000.0
    }

    /// When the last job of all has ended.
    pub fn last_end_s(&self) -> f64 {
        let ended_ms = self.jobs.iter().filter_map(|one| one.job.ended_ms).max();
        ended_ms.map_or(0.0, |ms| self.since(ms))
    }

    /// # Errors
    /// Jobs have not ended in time.
    pub async fn until_all_ended(&mut self) -> Result<(), Problem> {
        let what = "the end of all jobs";
        let left = |watch: &Self| {
            let left = watch.jobs.iter().filter(|one| !one.job.state.is_final());
            left.map(|one| format!("{} is {:?}: {}", one.job.id, one.job.state, one.job.reason))
                .collect()
        };
        let jobs = u32::try_from(self.jobs.len()).unwrap_or(u32::MAX);
        self.until(what, JOBS_MAX + JOB_MAX * jobs, left).await
    }

    /// # Errors
    /// Hosts were not given back in time.
    pub async fn until_all_given_back(&mut self) -> Result<(), Problem> {
        let left = |watch: &Self| {
            let left = watch.rentals.values().filter(|rental| !rental.state.is_over());
            left.map(|one| format!("{} is {}: {}", one.id, one.state, one.why)).collect()
        };
        self.until("the end of all rentals", GIVE_BACK_MAX, left).await
    }

    async fn until(
        &mut self,
        what: &str,
        deadline: Duration,
        left: impl Fn(&Self) -> Vec<String>,
    ) -> Result<(), Problem> {
        let end = tokio::time::Instant::now() + deadline;
        loop {
            let looked = self.look().await;
            let left = left(self);
            if looked.is_ok() && left.is_empty() {
                return Ok(());
            }
            if tokio::time::Instant::now() > end {
                let last = looked.err().map(|problem| problem.to_string());
                let why = last.unwrap_or_else(|| left.join("; "));
                let what = format!("can't wait any longer for {what}");
                return Err(Problem::unavailable(what, why));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn look(&mut self) -> Result<(), Problem> {
        let renting: Renting = self.client.get("/v1/renting").await?;
        let rentals: Vec<Rental> = self.client.get("/v1/rentals").await?;
        self.note_renting(&renting);
        rentals.into_iter().for_each(|rental| self.note_rental(rental));
        let jobs: Vec<Job> = self.client.get("/v1/jobs").await?;
        for now in jobs {
            let at = self.jobs.iter().position(|one| one.job.id == now.id);
            if let Some(at) = at.filter(|at| !self.jobs[*at].job.state.is_final()) {
                self.note_job(at, now).await?;
            }
        }
        Ok(())
    }

    fn note_renting(&mut self, renting: &Renting) {
        let because = &renting.nothing_because;
        let is_on = renting.settings.mode == AutoMode::On;
        let queued = self.jobs.iter().any(|one| one.job.state == JobState::Queued);
        // The same sentence with other figures is no news.
        let sentence: String = because.chars().filter(|c| !c.is_ascii_digit()).collect();
        if is_on && queued && !because.is_empty() && sentence != self.nothing_because {
            self.nothing_because = sentence;
            self.say(format!("The rule rents no more hosts now: {because}"));
        }
    }

    fn note_rental(&mut self, rental: Rental) {
        let before = self.rentals.get(&rental.id).map(|known| known.state);
        if let (None, Some(of)) = (before, &rental.rented_for) {
            let (id, kind, zone) = (&rental.id, &rental.offer.kind, &rental.offer.zone);
            self.say(format!(
                "The rule rents a {kind} in {zone}, {id}, for {} jobs: it is to save {} and to cost {}. {}",
                of.jobs_count, of.saves, of.costs, of.why
            ));
        }
        if before != Some(rental.state) {
            let (id, site) = (&rental.id, &rental.site);
            let spent = rental.spent.unwrap_or_default();
            match rental.state {
                RentalState::Wanted | RentalState::Asked | RentalState::Starting => {}
                RentalState::Joined => {
                    let took_s = took_s(&rental, RentalState::Asked, RentalState::Joined);
                    self.say(format!(
                        "{id}: the host has joined site {site} after {}.",
                        minutes(took_s)
                    ));
                }
                RentalState::Draining | RentalState::Ending
                    if before.is_none_or(|before| before != RentalState::Draining) =>
                {
                    let why = rental.ends_because.clone().unwrap_or_default();
                    self.say(format!("{id}: the host is given back: {why}"));
                }
                RentalState::Draining | RentalState::Ending => {}
                RentalState::Gone => self.say(format!("{id}: it is gone; {spent} were spent.")),
            }
        }
        self.rentals.insert(rental.id.clone(), rental);
    }

    async fn note_job(&mut self, at: usize, now: Job) -> Result<(), Problem> {
        let id = now.id.clone();
        let is_placed = now.started_ms.is_some() && self.jobs[at].host.is_none();
        if let Some(host) = now.host.clone().filter(|_| is_placed) {
            let decision = self.cluster.decisions(&id).await?.into_iter().next();
            let (way, why) = way_of(decision.as_ref());
            self.say(format!("{id} starts at {}: {way}: {why}", self.named(&host)));
            self.jobs[at].host = Some(host);
            self.jobs[at].decision = decision;
        }
        if now.state.is_final() {
            let measured = now.measured_s.map_or_else(|| "-".to_owned(), |s| format!("{s:.0} s"));
            let predicted = now.predicted.map_or_else(|| "-".to_owned(), |p| p.or_at_least());
            let host =
                self.jobs[at].host.as_ref().map_or_else(String::new, |host| self.named(host));
            match now.state {
                JobState::Succeeded => self
                    .say(format!("{id} has ended at {host}: {measured}; predicted {predicted}.")),
                state => self.say(format!("{id} has ended as {state:?}: {}", now.reason)),
            }
        }
        self.jobs[at].job = now;
        Ok(())
    }

    fn named(&self, host: &HostId) -> String {
        if self.own_hosts.contains(host) { host.to_string() } else { format!("{host} (rented)") }
    }

    /// The rows of the tables, and what was said.
    pub fn told(self) -> (Vec<JobRow>, Vec<RentalRow>, Vec<Event>) {
        let jobs = self.jobs.iter().map(|one| self.job_row(one)).collect();
        let rentals = self.rentals.values().map(|rental| self.rental_row(rental)).collect();
        (jobs, rentals, self.events)
    }

    fn job_row(&self, one: &Followed) -> JobRow {
        let (way, why) = way_of(one.decision.as_ref());
        let job = &one.job;
        JobRow {
            job: job.id.clone(),
            task: one.task,
            is_first: one.is_first,
            state: job.state,
            host: one.host.clone(),
            rented: one.host.as_ref().is_some_and(|host| !self.own_hosts.contains(host)),
            way,
            why: if job.state == JobState::Succeeded { why } else { job.reason.clone() },
            predicted: job.predicted,
            measured_s: job.measured_s,
            predicted_cost: job.cost.as_ref().map(|cost| cost.predicted.expected),
            spent: job.cost.as_ref().and_then(|cost| cost.spent),
            submitted_s: self.since(job.submitted_ms),
            started_s: job.started_ms.map(|ms| self.since(ms)),
            ended_s: job.ended_ms.map(|ms| self.since(ms)),
        }
    }

    fn rental_row(&self, rental: &Rental) -> RentalRow {
        let of = rental.rented_for.as_ref();
        let at = |state| rental.since_ms(state).map(|ms| self.since(ms));
        RentalRow {
            rental: rental.id.clone(),
            kind: rental.offer.kind.clone(),
            site: rental.site.clone(),
            state: rental.state,
            by: rental.by.clone(),
            asked_s: at(RentalState::Asked),
            joined_s: at(RentalState::Joined),
            ended_s: at(RentalState::Gone),
            why: of.map(|of| of.why.clone()).unwrap_or_default(),
            for_jobs: of.map_or(0, |of| of.jobs_count),
            ends_because: rental.ends_because.clone().unwrap_or_default(),
            predicted: of.map(|of| of.costs),
            saves: of.map(|of| of.saves),
            reserved: rental.reserved,
            spent: rental.spent,
        }
    }
}

fn took_s(rental: &Rental, from: RentalState, to: RentalState) -> f64 {
    let (from_ms, to_ms) = (rental.since_ms(from), rental.since_ms(to));
    from_ms.zip(to_ms).map_or(0.0, |(from, to)| to.saturating_sub(from) as f64 / 1000.0)
}

/// The way to the job's data, and why that one.
fn way_of(decision: Option<&Decision>) -> (String, String) {
    let chosen = decision.and_then(|decision| decision.plan.chosen());
    match (chosen, decision) {
        (Some(option), _) => (way_word(option.way).to_owned(), option.reason.clone()),
        (None, Some(decision)) => (String::new(), decision.summary.clone()),
        (None, None) => (String::new(), String::new()),
    }
}
