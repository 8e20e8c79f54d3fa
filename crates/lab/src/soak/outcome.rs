//! The result of a soak: the content of `results.json`.

use std::collections::BTreeMap;

use perigee_model::JobId;
use perigee_model::job::{JobState, MigrationState};
use serde::{Deserialize, Serialize};

/// What a soak has found, as `results.json` has it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub seed: u64,
    pub length_s: f64,
    pub jobs_submitted: u32,
    /// The jobs that have ended.
    pub jobs: Vec<SoakJob>,
    pub events: Vec<Event>,
    pub moves_completed: u32,
    pub moves_aborted: u32,
    /// The times for which a job has stood still.
    pub waits: Vec<Wait>,
    /// The leftovers on the hosts after the last job, for people.
    pub left: Vec<String>,
    /// Why the soak failed; empty when all is right.
    pub faults: Vec<String>,
}

/// One job of a soak, and whether it computed what it should.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SoakJob {
    pub id: JobId,
    pub volume: String,
    pub state: JobState,
    pub reason: String,
    /// The job's count of the runs that have ended on its volume.
    pub count: Option<u32>,
    /// How often its command has run.
    pub runs: u32,
    /// How often its VM was started. More than once only after the loss of its host.
    pub starts: u32,
    /// Whether the checksum in the job's answer is the expected one.
    pub is_right: bool,
    pub moves: u32,
}

/// A time for which a job has stood still.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Wait {
    pub job: JobId,
    /// Where it stood.
    pub at: String,
    pub from_s: f64,
    pub length_s: f64,
    /// What the job showed as its reason meanwhile.
    pub why: String,
}

/// An act on the lab.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    pub at_s: f64,
    pub what: String,
}

impl Outcome {
    /// Counts a job that has ended, with its moves.
    pub fn add(&mut self, (job, moves): (SoakJob, Vec<MigrationState>)) {
        for state in moves {
            match state {
                MigrationState::Completed => self.moves_completed += 1,
                _ => self.moves_aborted += 1,
            }
        }
        self.jobs.push(job);
    }

    /// For people: counts of jobs, moves and breaks.
    pub fn line(&self) -> String {
        let right = self.jobs.iter().filter(|job| job.is_right).count();
        format!(
            "{right} of {} jobs right, {} moves ({} aborted), {} things broken",
            self.jobs.len(),
            self.moves_completed,
            self.moves_aborted,
            self.events.len()
        )
    }

    /// Every job must have succeeded with the right answer, and must have run once for each start of its VM:
    /// the jobs of one volume must have counted 1, 2, 3 and so on. A run that a lost host has ended may have
    /// counted too.
    pub fn judge(&mut self) {
        let mut counts: BTreeMap<&str, (Vec<u32>, u32)> = BTreeMap::new();
        for job in &self.jobs {
            if job.state != JobState::Succeeded {
                self.faults.push(format!("job {}: {:?}: {}", job.id, job.state, job.reason));
            } else if !job.is_right {
                self.faults.push(format!("job {} gave a wrong answer", job.id));
            } else if job.runs > job.starts {
                let (id, runs, starts) = (&job.id, job.runs, job.starts);
                self.faults
                    .push(format!("job {id} ran {runs} times, and was started {starts} times"));
            }
            let (seen, starts) = counts.entry(&job.volume).or_default();
            seen.extend(job.count);
            *starts += job.starts.max(1);
        }
        for (volume, (mut seen, starts)) in counts {
            seen.sort_unstable();
            let is_twice = seen.windows(2).any(|pair| pair[0] == pair[1]);
            if is_twice || seen.last().is_some_and(|last| *last > starts) {
                self.faults.push(format!("the jobs of volume {volume} counted {seen:?}"));
            }
        }
        for wait in self.waits.iter().filter(|wait| wait.why.is_empty()) {
            let Wait { job, at, from_s, length_s, .. } = wait;
            self.faults.push(format!(
                "job {job} ({at}) stood still for {length_s:.0} s from {from_s:.0} s on, and did not say why"
            ));
        }
        self.faults.extend(self.left.iter().map(|left| format!("left behind: {left}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(count: u32, state: JobState, is_right: bool) -> SoakJob {
        SoakJob {
            id: JobId::new(format!("soak-{count:04}")).expect("a name"),
            volume: "soak-1".to_owned(),
            state,
            reason: String::new(),
            count: Some(count),
            runs: 1,
            starts: 1,
            is_right,
            moves: 0,
        }
    }

    fn faults(jobs: Vec<SoakJob>) -> Vec<String> {
        let mut outcome = Outcome { jobs, ..Outcome::default() };
        outcome.judge();
        outcome.faults
    }

    #[test]
    fn jobs_that_count_on_and_answer_right_are_no_fault() {
        let jobs = vec![job(2, JobState::Succeeded, true), job(1, JobState::Succeeded, true)];
        assert_eq!(faults(jobs), Vec::<String>::new());
    }

    #[test]
    fn a_job_whose_run_was_lost_is_seen_in_the_count_of_the_others() {
        let jobs = vec![job(1, JobState::Succeeded, true), job(3, JobState::Succeeded, true)];
        assert_eq!(faults(jobs), ["the jobs of volume soak-1 counted [1, 3]"]);
    }

    #[test]
    fn a_job_that_began_anew_may_have_counted_twice_and_no_other() {
        let again = SoakJob { starts: 2, runs: 2, ..job(3, JobState::Succeeded, true) };
        let jobs = vec![again.clone(), job(1, JobState::Succeeded, true)];
        assert_eq!(faults(jobs), Vec::<String>::new());
        let jobs = vec![SoakJob { count: Some(4), ..again }, job(1, JobState::Succeeded, true)];
        assert_eq!(faults(jobs), ["the jobs of volume soak-1 counted [1, 4]"]);
        let twice = SoakJob { runs: 2, ..job(1, JobState::Succeeded, true) };
        assert_eq!(faults(vec![twice]), ["job soak-0001 ran 2 times, and was started 1 times"]);
    }

    #[test]
    fn a_failed_job_and_a_wrong_answer_are_faults() {
        let jobs = vec![job(1, JobState::Failed, false), job(2, JobState::Succeeded, false)];
        assert_eq!(faults(jobs).len(), 2);
    }

    #[test]
    fn a_wait_that_nobody_explains_is_a_fault() {
        let wait = |why: &str| Wait {
            job: JobId::new("soak-0001").expect("a name"),
            at: "running at home1, 3 done, 0 of 0 moves over".to_owned(),
            from_s: 60.0,
            length_s: 100.0,
            why: why.to_owned(),
        };
        let waits = vec![wait("its volume's home cloud1 does not answer"), wait("")];
        let mut outcome = Outcome { waits, ..Outcome::default() };
        outcome.judge();
        assert_eq!(outcome.faults.len(), 1, "{:?}", outcome.faults);
        assert!(outcome.faults[0].contains("stood still for 100 s from 60 s on"));
    }

    #[test]
    fn what_is_left_is_a_fault() {
        let mut outcome = Outcome { left: vec!["VM x on home1".to_owned()], ..Outcome::default() };
        outcome.judge();
        assert_eq!(outcome.faults, ["left behind: VM x on home1"]);
    }
}
