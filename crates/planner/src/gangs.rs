//! How long a gang takes, by its earlier runs.
//!
//! By what each of its VMs did, its time is predicted at any host (`gangs/ranks.rs`, `options/gang.rs`). Where nothing is known of its
//! VMs, because their counters were read too late, all that counts is what equal gangs took, wherever they ran and their data was; the range is wide while there
//! are few.

mod moves;
mod place;
mod ranks;

use perigee_model::plan::{Estimate, PredictedEnd};
use serde::{Deserialize, Serialize};

use crate::runs::{SAME_JOB, Traits};

pub use moves::{GangVerdict, RunningGang, consider};
pub use place::{Room, at_site, ruled};
pub use ranks::{GangFacts, RANKS_KEPT, RanksRun, Talked, keep};
pub(crate) use ranks::{Rank, Ranks, Somewhere};

/// One earlier run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GangRun {
    /// Of each of its VMs.
    pub traits: Traits,
    /// From the start of its VMs until the last command had ended.
    pub seconds: f64,
}

/// `None` without an equal run. Of one run it may differ by half, and of several by as much as they do from their middle, and some more.
pub fn predict(runs: &[GangRun], traits: &Traits) -> Option<Estimate> {
    let alike = runs.iter().filter(|run| run.traits.relation(traits) >= SAME_JOB);
    let mut seconds: Vec<f64> = alike.map(|run| run.seconds).filter(|s| *s > 0.0).collect();
    seconds.sort_by(f64::total_cmp);
    let upper = *seconds.get(seconds.len() / 2)?;
    let lower = *seconds.get((seconds.len() - 1) / 2)?;
    let expected_s = f64::midpoint(lower, upper);
    let apart = seconds.iter().map(|s| (s / expected_s - 1.0).abs()).fold(0.0, f64::max);
    let wide = apart + 1.0 / (seconds.len() as f64 + 1.0);
    let low_s = expected_s * (1.0 - wide).max(0.0);
    Some(Estimate { expected_s, low_s, high_s: expected_s * (1.0 + wide) })
}

/// The least progress that says something of the pace.
const PROGRESS_LEAST: f64 = 0.01;
/// What is left by the pace may be so much less or more.
const PACE_ERROR: f64 = 0.3;

/// When a gang ends that has run for so long since its VMs were started: by its prediction, and by the progress that its first VM has
/// reported in so many seconds. The more is done, the more counts the progress; the range holds both.
pub fn left(
    predicted: Option<Estimate>,
    ran_s: f64,
    (progress, command_s): (Option<f64>, f64),
) -> PredictedEnd {
    let by_runs = predicted.map(|all| all.after(ran_s)).filter(|left| left.high_s > 0.0);
    let done = progress.filter(|done| (PROGRESS_LEAST..=1.0).contains(done) && command_s > 0.0);
    let by_pace = done.map(|done| {
        let expected_s = command_s * (1.0 - done) / done;
        let (low_s, high_s) = (expected_s * (1.0 - PACE_ERROR), expected_s * (1.0 + PACE_ERROR));
        (done, Estimate { expected_s, low_s, high_s })
    });
    let (left, why) = match (by_runs, by_pace) {
        (Some(runs), Some((done, pace))) => {
            let expected_s = runs.expected_s * (1.0 - done) + pace.expected_s * done;
            let (low_s, high_s) = (runs.low_s.min(pace.low_s), runs.high_s.max(pace.high_s));
            let both = Estimate { expected_s, low_s, high_s };
            (Some(both), "from its earlier runs and its first VM's progress")
        }
        (Some(runs), None) => (Some(runs), "from its earlier runs"),
        (None, Some((_, pace))) => (Some(pace), "from its first VM's progress"),
        (None, None) if predicted.is_some() => {
            (None, "it takes longer than its earlier runs, and its first VM reports no progress")
        }
        (None, None) => (None, "no equal job has succeeded, and its first VM reports no progress"),
    };
    PredictedEnd { left, why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, seconds: f64) -> GangRun {
        GangRun { traits: traits(name), seconds }
    }

    fn traits(name: &str) -> Traits {
        Traits { name: name.to_owned(), cpus: 1, memory_bytes: 1 << 28, ..Traits::default() }
    }

    #[test]
    fn the_range_narrows_with_more_runs_and_other_gangs_say_nothing() {
        assert_eq!(predict(&[], &traits("a")), None);
        assert_eq!(predict(&[run("b", 5.0)], &traits("a")), None);
        let one = predict(&[run("a", 10.0), run("b", 99.0)], &traits("a")).expect("a run");
        assert_eq!((one.expected_s, one.low_s, one.high_s), (10.0, 5.0, 15.0));
        let runs = [run("a", 10.0), run("a", 11.0), run("a", 9.0)];
        let three = predict(&runs, &traits("a")).expect("three runs");
        assert_eq!(three.expected_s, 10.0);
        assert!(three.low_s > one.low_s && three.high_s < one.high_s, "{three:?}");
        assert!(runs.iter().all(|run| three.holds(run.seconds)), "{three:?}");
    }

    #[test]
    fn its_end_is_known_by_its_runs_by_its_progress_or_not_at_all() {
        let all = Estimate { expected_s: 100.0, low_s: 80.0, high_s: 120.0 };
        let by_runs = left(Some(all), 30.0, (None, 20.0));
        assert_eq!(by_runs.left, Some(Estimate { expected_s: 70.0, low_s: 50.0, high_s: 90.0 }));
        let by_pace = left(None, 30.0, (Some(0.25), 20.0)).left.expect("a pace");
        assert_eq!(by_pace.expected_s, 60.0);
        let both = left(Some(all), 30.0, (Some(0.25), 20.0)).left.expect("both");
        assert!(both.expected_s > 60.0 && both.expected_s < 70.0 && both.holds(90.0), "{both:?}");
        let late = left(Some(all), 130.0, (None, 120.0));
        assert!(late.left.is_none() && late.why.contains("longer"), "{late:?}");
        assert!(left(None, 1.0, (Some(0.0), 1.0)).left.is_none());
    }
}
