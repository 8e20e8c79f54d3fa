//! The jobs that arrived in the last half hour, the newest ones of them: the rule expects as many again.

use std::collections::BTreeMap;

use perigee_model::JobId;
use perigee_planner::rent::{Arrived, EXPECTED_S, JOBS_MOST, Job};

/// At most [`JOBS_MOST`] after each look.
#[derive(Debug, Default)]
pub struct Arrivals {
    /// Each with the time of its submission.
    jobs: BTreeMap<JobId, (u64, Job)>,
    /// That of the oldest one, if there are as many as may be: older ones are not kept.
    oldest_ms: Option<u64>,
}

impl Arrivals {
    /// Whether the rule wants to know of a job that was submitted at this Unix time, and does not yet.
    pub fn lacks(&self, job: &JobId, submitted_ms: u64, age_ms: impl Fn(u64) -> u64) -> bool {
        let is_kept = self.oldest_ms.is_none_or(|oldest_ms| submitted_ms > oldest_ms);
        let is_new = || age_ms(submitted_ms) as f64 / 1e3 < EXPECTED_S;
        is_kept && !self.jobs.contains_key(job) && is_new()
    }

    /// Notes a job as it is when it is first seen.
    pub fn note(&mut self, submitted_ms: u64, job: &Job) {
        self.jobs.entry(job.job.clone()).or_insert_with(|| (submitted_ms, job.clone()));
    }

    /// Those that count, the newest ones first. The others are forgotten.
    pub fn all(&mut self, age_ms: impl Fn(u64) -> u64) -> Vec<Arrived> {
        let ago_s = |at_ms: u64| age_ms(at_ms) as f64 / 1e3;
        self.jobs.retain(|_, (at_ms, _)| ago_s(*at_ms) < EXPECTED_S);
        let mut newest: Vec<(u64, JobId)> =
            self.jobs.iter().map(|(id, (at_ms, _))| (*at_ms, id.clone())).collect();
        newest.sort_by_key(|(at_ms, _)| std::cmp::Reverse(*at_ms));
        for (_, old) in newest.drain(newest.len().min(JOBS_MOST)..) {
            self.jobs.remove(&old);
        }
        let is_full = newest.len() == JOBS_MOST;
        self.oldest_ms = newest.last().filter(|_| is_full).map(|(at_ms, _)| *at_ms);
        let arrived = |(at_ms, id): (u64, JobId)| {
            let (_, job) = self.jobs.get(&id)?;
            Some(Arrived { ago_s: ago_s(at_ms), job: job.clone() })
        };
        newest.into_iter().filter_map(arrived).collect()
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::money::Money;
    use perigee_planner::rent::Worth;

    use super::*;

    fn job(number: usize) -> Job {
        Job {
            job: JobId::new(format!("j-{number}")).expect("a name"),
            cpus: 1,
            memory_bytes: 1,
            own: None,
            own_egress: Money::ZERO,
            rented: BTreeMap::new(),
            may_leave: true,
            without_kvm: true,
            worth: Worth::default(),
        }
    }

    #[test]
    fn of_many_jobs_in_half_an_hour_the_newest_are_kept_and_older_ones_are_not_asked_about_again() {
        let mut arrivals = Arrivals::default();
        let age_ms = |at_ms: u64| 1_000_000 - at_ms;
        for number in 0..JOBS_MOST + 50 {
            arrivals.note(number as u64, &job(number));
        }
        let all = arrivals.all(age_ms);
        assert_eq!((all.len(), arrivals.jobs.len()), (JOBS_MOST, JOBS_MOST));
        assert_eq!(all[0].job.job, job(JOBS_MOST + 49).job, "the newest one comes first");
        assert!(!arrivals.lacks(&job(49).job, 49, age_ms), "older than all that are kept");
        assert!(!arrivals.lacks(&job(60).job, 60, age_ms), "it is known");
        assert!(arrivals.lacks(&job(9999).job, 9999, age_ms));
        assert!(arrivals.all(|_| 1_800_000).is_empty(), "half an hour ago");
    }
}
