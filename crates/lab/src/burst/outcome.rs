//! What came of the story, as `results.json` has it, and what of it is wrong.

use std::collections::BTreeMap;

use perigee_model::job::JobState;
use perigee_model::money::Money;
use perigee_model::plan::Estimate;
use perigee_model::rental::states::RentalState;
use perigee_model::{HostId, JobId, RentalId, SiteId};
use serde::{Deserialize, Serialize};

use super::stage::Task;

/// A job of the queue, or the first one of its kind.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobRow {
    pub job: JobId,
    pub task: Task,
    /// Whether it ran before the queue, to show how long its kind takes.
    pub is_first: bool,
    pub state: JobState,
    /// Where its VM began, and whether that host was rented.
    pub host: Option<HostId>,
    pub rented: bool,
    /// How it came to its data, and why that was chosen.
    pub way: String,
    pub why: String,
    /// From the VM's start to the command's end.
    pub predicted: Option<Estimate>,
    pub measured_s: Option<f64>,
    /// `None` if nobody is paid for the job itself.
    pub predicted_cost: Option<Money>,
    pub spent: Option<Money>,
    /// Seconds from the submission of the queue. Below 0 it was before.
    pub submitted_s: f64,
    pub started_s: Option<f64>,
    pub ended_s: Option<f64>,
}

impl JobRow {
    /// Where its VM began, in words; `None` if it has not begun.
    pub fn place(&self) -> Option<String> {
        let host = self.host.as_ref()?;
        Some(if self.rented { format!("{host} (rented)") } else { host.to_string() })
    }

    /// What the job has waited until its end, at this price for an hour.
    pub fn waiting(&self, per_hour: Money) -> Option<Money> {
        Some(waiting(per_hour, self.ended_s? - self.submitted_s))
    }
}

/// What so many seconds of waiting cost.
pub fn waiting(per_hour: Money, seconds: f64) -> Money {
    let whole_ms = std::time::Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default();
    per_hour.of(u64::try_from(whole_ms.as_millis()).unwrap_or(u64::MAX), 3_600_000)
}

/// A host that was rented. Seconds count from the submission of the queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RentalRow {
    pub rental: RentalId,
    pub kind: String,
    pub site: SiteId,
    pub state: RentalState,
    /// Who rented it.
    pub by: String,
    pub asked_s: Option<f64>,
    pub joined_s: Option<f64>,
    pub ended_s: Option<f64>,
    /// Why the rule rented it, and for how many jobs.
    pub why: String,
    pub for_jobs: u32,
    /// Why it was given back.
    pub ends_because: String,
    /// What the rule expected it to cost and to save, the most that was reserved, and what was spent.
    pub predicted: Option<Money>,
    pub saves: Option<Money>,
    pub reserved: Money,
    pub spent: Option<Money>,
}

/// What happened, so many seconds after the submission of the queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    pub at_s: f64,
    pub text: String,
}

/// What the own hosts alone would need at least for the queue, by the predictions when it was submitted.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Alone {
    pub seconds: f64,
    /// What all waiting would cost.
    pub waiting: Money,
}

/// The whole story.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub versions: BTreeMap<String, String>,
    pub own_hosts: Vec<HostId>,
    pub budget: Money,
    pub waiting_per_hour: Money,
    pub rented_most: u32,
    /// `None` if the story did not come so far.
    pub alone: Option<Alone>,
    /// From the submission of the queue to the end of its last job.
    pub took_s: f64,
    pub jobs: Vec<JobRow>,
    pub rentals: Vec<RentalRow>,
    pub events: Vec<Event>,
    /// What kept the story from its end.
    pub problems: Vec<String>,
    /// What of the lab was there after its end.
    pub left_behind: Vec<String>,
}

impl Outcome {
    /// The jobs of the queue.
    pub fn queue(&self) -> impl Iterator<Item = &JobRow> {
        self.jobs.iter().filter(|job| !job.is_first)
    }

    /// What all rented hosts have cost, and what the rule expected.
    pub fn bill(&self) -> (Money, Money) {
        let spent = self.rentals.iter().filter_map(|rental| rental.spent).sum();
        (spent, self.rentals.iter().filter_map(|rental| rental.predicted).sum())
    }

    /// What the waiting of the queue has cost.
    pub fn waited(&self) -> Money {
        self.queue().filter_map(|job| job.waiting(self.waiting_per_hour)).sum()
    }

    /// What is wrong. Slowness, money that was not saved, and that no host was worth its money are not.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = self.problems.clone();
        for job in &self.jobs {
            if job.state != JobState::Succeeded {
                faults.push(format!("job {} is {:?}: {}", job.job, job.state, job.why));
            }
            if job.task == Task::Audit && job.rented {
                faults.push(format!("job {}, whose data may not leave home, left", job.job));
            }
        }
        for rental in self.rentals.iter().filter(|rental| !rental.state.is_over()) {
            faults.push(format!("rental {} is {}", rental.rental, rental.state));
        }
        let (spent, _) = self.bill();
        if spent > self.budget {
            faults.push(format!("{spent} were spent of {}", self.budget));
        }
        faults.extend(self.left_behind.iter().map(|what| format!("{what} is left")));
        faults
    }

    /// What is said below the tables of jobs and rentals: the bill, the story, and what is wrong.
    pub fn lines(&self) -> Vec<String> {
        let (spent, predicted) = self.bill();
        let bill =
            format!("the bill: {spent} spent, {predicted} predicted, {} allowed", self.budget);
        let wrong = self.faults().into_iter().map(|fault| format!("WRONG: {fault}"));
        [bill, String::new()].into_iter().chain(self.summary()).chain(wrong).collect()
    }

    /// The story in some sentences.
    pub fn summary(&self) -> Vec<String> {
        let (spent, predicted) = self.bill();
        let queued = self.queue().count();
        let rented = self.queue().filter(|job| job.rented).count();
        let mut said = Vec::new();
        if let Some(alone) = self.alone_at_the_end() {
            said.push(format!(
                "Alone, the own hosts would have needed at least {} for the {queued} jobs by the predictions; with {} rented hosts the jobs took {}.",
                minutes(alone.seconds),
                self.rentals.len(),
                minutes(self.took_s)
            ));
        }
        said.push(format!(
            "{rented} of the jobs ran at rented hosts, which cost {spent} of {}; {predicted} were predicted.",
            self.budget
        ));
        if let Some(alone) = self.alone_at_the_end() {
            said.push(format!(
                "All waiting cost {}, and would have cost at least {} at the own hosts alone.",
                self.waited(),
                alone.waiting
            ));
        }
        if self.rentals.is_empty() {
            said.push("No host was rented.".to_owned());
        } else if rented == 0 {
            said.push("No job ran at a rented host.".to_owned());
        }
        said
    }

    /// What is compared with what happened; `None` if the story did not come to its end.
    pub fn alone_at_the_end(&self) -> Option<&Alone> {
        self.alone.as_ref().filter(|_| self.problems.is_empty())
    }
}

/// `12 min 5 s`.
pub fn minutes(seconds: f64) -> String {
    let whole_s = std::time::Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default();
    let whole_s = whole_s.as_secs();
    if whole_s < 60 {
        return format!("{whole_s} s");
    }
    format!("{} min {} s", whole_s / 60, whole_s % 60)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// One job that ran at a rented host, and that host.
    pub fn outcome() -> Outcome {
        let job = JobRow {
            job: "report-0004".parse().expect("an id"),
            task: Task::Report,
            is_first: false,
            state: JobState::Succeeded,
            host: Some("rent-1".parse().expect("a name")),
            rented: true,
            way: "replica".to_owned(),
            why: "<soonest>".to_owned(),
            predicted: Some(Estimate { expected_s: 57.0, low_s: 50.0, high_s: 70.0 }),
            measured_s: Some(60.0),
            predicted_cost: None,
            spent: None,
            submitted_s: 0.0,
            started_s: Some(30.0),
            ended_s: Some(90.0),
        };
        let rental = RentalRow {
            rental: "rent-1".parse().expect("an id"),
            kind: "lab.large".to_owned(),
            site: "cloud".parse().expect("a name"),
            state: RentalState::Gone,
            by: "the renting rule".to_owned(),
            asked_s: Some(1.0),
            joined_s: Some(10.0),
            ended_s: Some(200.0),
            why: "it saves more than it costs".to_owned(),
            for_jobs: 7,
            ends_because: "it was idle".to_owned(),
            predicted: Some(Money::from_micros(120_000)),
            saves: Some(Money::from_micros(500_000)),
            reserved: Money::from_micros(250_000),
            spent: Some(Money::from_micros(110_000)),
        };
        Outcome {
            versions: BTreeMap::new(),
            own_hosts: vec!["home1".parse().expect("a name")],
            budget: Money::from_micros(3_000_000),
            waiting_per_hour: Money::from_micros(1_000_000),
            rented_most: 3,
            alone: Some(Alone { seconds: 734.0, waiting: Money::from_micros(2_000_000) }),
            took_s: 90.0,
            jobs: vec![job],
            rentals: vec![rental],
            events: vec![Event { at_s: 1.0, text: "a host is asked for".to_owned() }],
            problems: Vec::new(),
            left_behind: Vec::new(),
        }
    }

    #[test]
    fn a_story_that_went_well_has_no_fault_and_one_that_did_not_names_them() {
        let good = outcome();
        assert_eq!(good.faults(), Vec::<String>::new());
        let mut bad = outcome();
        bad.jobs[0].task = Task::Audit;
        bad.rentals[0].state = RentalState::Joined;
        bad.rentals[0].spent = Some(Money::from_micros(3_000_001));
        bad.left_behind.push("a process".to_owned());
        bad.problems.push("can't wait any longer".to_owned());
        let faults = bad.faults().join("\n");
        for word in [
            "may not leave home",
            "is joined",
            "were spent of $3.00",
            "a process is left",
            "can't wait any longer",
        ] {
            assert!(faults.contains(word), "{word:?} is not in {faults:?}");
        }
    }

    #[test]
    fn the_lines_below_the_tables_have_the_bill_and_what_is_wrong() {
        let mut story = outcome();
        story.left_behind.push("a process".to_owned());
        let lines = story.lines();
        assert_eq!(lines[0], "the bill: $0.11 spent, $0.12 predicted, $3.00 allowed");
        assert_eq!(lines.last().map(String::as_str), Some("WRONG: a process is left"));
    }

    #[test]
    fn that_nothing_was_rented_is_said_and_is_no_fault() {
        let says = |story: &Outcome, what: &str| story.summary().iter().any(|said| said == what);
        let mut story = outcome();
        assert!(!says(&story, "No host was rented.") && story.summary().len() == 3);
        story.jobs[0].rented = false;
        assert!(says(&story, "No job ran at a rented host."), "{:?}", story.summary());
        story.rentals.clear();
        assert!(says(&story, "No host was rented."), "{:?}", story.summary());
        assert_eq!(story.faults(), Vec::<String>::new());
    }

    #[test]
    fn waiting_is_counted_from_the_submission_to_the_end() {
        // 90 s at $1 an hour.
        assert_eq!(outcome().waited(), Money::from_micros(25_000));
        assert_eq!(minutes(59.9), "59 s");
        assert_eq!(minutes(734.0), "12 min 14 s");
    }
}
