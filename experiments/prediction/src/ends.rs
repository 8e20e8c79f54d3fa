//! The end of a running job, as the API shows it meanwhile, beside its true end.

use perigee_model::job::{Job, JobState};
use perigee_model::plan::Estimate;
use serde::{Deserialize, Serialize};

use crate::results::{Score, count, quantile};

/// The shares of the command's time at which the shown end is compared.
pub const AT: [f64; 3] = [0.25, 0.5, 0.75];

/// What the API showed at one moment.
#[derive(Debug, Clone, Copy)]
struct Look {
    /// Unix time.
    at_ms: u64,
    left: Option<Estimate>,
}

/// What was shown while a job ran.
#[derive(Debug, Default)]
pub struct Looks(Vec<Look>);

/// The end that was shown at one of [`AT`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ShownEnd {
    /// The share of the command's time that had passed.
    pub at: f64,
    /// The predicted time of the command minus the true one, as a share of the true one; `None`: not known then.
    pub error: Option<f64>,
    /// Whether the true end was in the shown range.
    pub in_range: bool,
    /// The width of the range, and its interval score, as shares of the command's true time; `None`: not known then.
    pub range: Option<RangeScore>,
}

/// How good a shown range was.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RangeScore {
    pub width: f64,
    pub interval_score: f64,
}

impl Looks {
    pub fn note(&mut self, job: &Job, at_ms: u64) {
        if job.state == JobState::Running {
            let left = job.predicted_end.as_ref().and_then(|end| end.left);
            self.0.push(Look { at_ms, left });
        }
    }

    /// Compares what was shown with the truth. A moment before the first look has nothing.
    pub fn compare(&self, running_ms: u64, command_s: f64) -> Vec<ShownEnd> {
        let passed_s = |look: &Look| seconds(look.at_ms.saturating_sub(running_ms));
        let shown = |at: f64| {
            let before = self.0.iter().rev().find(|look| passed_s(look) <= at * command_s)?;
            let Some(left) = before.left else {
                return Some(ShownEnd { at, error: None, in_range: false, range: None });
            };
            let true_left_s = command_s - passed_s(before);
            let error = Some((left.expected_s - true_left_s) / command_s);
            let range = Some(RangeScore {
                width: (left.high_s - left.low_s) / command_s,
                interval_score: left.interval_score_s(true_left_s) / command_s,
            });
            Some(ShownEnd { at, error, in_range: left.holds(true_left_s), range })
        };
        AT.into_iter().filter_map(shown).collect()
    }
}

fn seconds(ms: u64) -> f64 {
    std::time::Duration::from_millis(ms).as_secs_f64()
}

/// The comparison of all ends that were shown at this share of the time. The second figure: how often none was known.
pub fn score<'a>(at: f64, ends: impl Iterator<Item = &'a ShownEnd>) -> (Score, usize) {
    let of_share: Vec<&ShownEnd> = ends.filter(|end| (end.at - at).abs() < 1e-9).collect();
    let errors: Vec<f64> = of_share.iter().filter_map(|end| end.error.map(f64::abs)).collect();
    let held = of_share.iter().filter(|end| end.in_range).count();
    let ranges: Vec<RangeScore> = of_share.iter().filter_map(|end| end.range).collect();
    let scores: f64 = ranges.iter().map(|range| range.interval_score).sum();
    let score = Score {
        predictions: errors.len(),
        median_error: quantile(errors.clone(), 0.5),
        p90_error: quantile(errors.clone(), 0.9),
        in_range: (!errors.is_empty()).then(|| count(held) / count(errors.len())),
        median_width: quantile(ranges.iter().map(|range| range.width).collect(), 0.5),
        interval_score: (!ranges.is_empty()).then(|| scores / count(ranges.len())),
    };
    (score, of_share.len() - errors.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_look_before_a_moment_is_compared_with_the_truth() {
        let left =
            |expected_s| Estimate { expected_s, low_s: expected_s - 1.0, high_s: expected_s + 1.0 };
        let look = |at_ms, left| Look { at_ms, left };
        // A command from 1,000 ms to 11,000 ms.
        let looks = Looks(vec![
            look(4_000, None),
            look(5_000, Some(left(8.0))),
            look(6_500, Some(left(1.0))),
        ]);
        let ends = looks.compare(1_000, 10.0);
        assert_eq!(ends.len(), 2, "nothing was seen before a quarter of it: {ends:?}");
        // 6 s were left, and 8 s were shown.
        assert!((ends[0].error.expect("known") - 0.2).abs() < 1e-9 && !ends[0].in_range);
        assert!((ends[1].error.expect("known") + 0.35).abs() < 1e-9);
        let (score, unknown) = score(0.5, ends.iter());
        assert_eq!((score.predictions, score.in_range, unknown), (1, Some(0.0), 0));
    }

    #[test]
    fn an_end_that_is_not_known_is_counted_apart() {
        let looks = Looks(vec![Look { at_ms: 0, left: None }]);
        let (score, unknown) = score(0.75, looks.compare(0, 4.0).iter());
        assert_eq!((score.predictions, score.median_error, unknown), (0, None, 1));
    }
}
