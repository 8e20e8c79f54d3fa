//! How long a gang takes, by its earlier runs.
//!
//! Its VMs wait for each other, so their parts can't be told apart as those of a job with one VM can. What equal gangs took is all that counts,
//! wherever they ran and their data was; the range is wide while there are few.

use perigee_model::plan::Estimate;
use serde::{Deserialize, Serialize};

use crate::runs::Traits;

/// Runs of gangs that are less related than this say nothing.
const SAME_JOB: f64 = 0.95;

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
}
