//! What rounds say: medians, the range of what each round says by itself, and whether two ranges part. The machine's speed changes from
//! minute to minute, so only figures of one round are compared with each other.

use perigee_lab::measuring::median;
use perigee_lab::paper::Verdict;
use serde::{Deserialize, Serialize};

/// The rounds' values: the least, the median and the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Range {
    pub low: f64,
    pub median: f64,
    pub high: f64,
    pub rounds: usize,
}

impl Range {
    /// `None` without values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        let low = values.iter().copied().reduce(f64::min)?;
        let high = values.iter().copied().reduce(f64::max)?;
        Some(Self { low, median: median(values.iter().copied())?, high, rounds: values.len() })
    }

    /// Whether all of it is above a value: `None` if some of it is and some is not.
    pub fn is_above(&self, value: f64) -> Option<bool> {
        match (self.low > value, self.high > value) {
            (true, _) => Some(true),
            (false, true) => None,
            (false, false) => Some(false),
        }
    }

    /// Whether all of it is above all of the other: `None` if the two overlap.
    pub fn is_above_range(&self, other: &Self) -> Option<bool> {
        match (self.low > other.high, self.high < other.low) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        }
    }

    /// `1.24 (1.20 to 1.31)`.
    pub fn words(&self, digits: usize) -> String {
        let Self { low, median, high, .. } = self;
        match self.rounds {
            1 => format!("{median:.digits$}"),
            _ => format!("{median:.digits$} ({low:.digits$} to {high:.digits$})"),
        }
    }
}

/// Below this, a range says little.
pub const ROUNDS_MIN: usize = 3;

/// `found`: whether what the paper says holds, as the ranges say. `rounds`: the fewest that any of the ranges has.
pub fn verdict(found: Option<bool>, rounds: usize) -> Verdict {
    match found {
        _ if rounds < ROUNDS_MIN => Verdict::NotJudged,
        Some(true) => Verdict::Agrees,
        Some(false) => Verdict::DoesNotAgree,
        None => Verdict::RangesOverlap,
    }
}

/// Whether all of them hold: one that does not decides, then one that is not known.
pub fn all(found: &[Option<bool>]) -> Option<bool> {
    match found {
        _ if found.contains(&Some(false)) => Some(false),
        _ if found.contains(&None) => None,
        _ => Some(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(values: &[f64]) -> Range {
        Range::of(values.iter().copied()).expect("values")
    }

    #[test]
    fn a_range_has_the_least_the_median_and_the_greatest() {
        let found = range(&[1.3, 1.1, 1.2, f64::NAN]);
        assert_eq!((found.low, found.median, found.high, found.rounds), (1.1, 1.2, 1.3, 3));
        assert_eq!(found.words(2), "1.20 (1.10 to 1.30)");
        assert_eq!(range(&[1.5]).words(1), "1.5");
        assert_eq!(Range::of([]), None);
    }

    #[test]
    fn a_range_is_above_a_value_only_as_a_whole() {
        let found = range(&[1.1, 1.3]);
        assert_eq!(found.is_above(1.0), Some(true));
        assert_eq!(found.is_above(1.2), None);
        assert_eq!(found.is_above(1.3), Some(false));
    }

    #[test]
    fn two_ranges_part_only_if_they_do_not_overlap() {
        let (low, middle, high) = (range(&[1.0, 1.1]), range(&[1.05, 1.3]), range(&[1.2, 1.4]));
        assert_eq!(high.is_above_range(&low), Some(true));
        assert_eq!(low.is_above_range(&high), Some(false));
        assert_eq!(middle.is_above_range(&low), None);
        assert_eq!(low.is_above_range(&low), None);
    }

    #[test]
    fn what_is_found_agrees_only_with_rounds_enough_and_ranges_that_part() {
        assert_eq!(verdict(Some(true), 5), Verdict::Agrees);
        assert_eq!(verdict(Some(false), 5), Verdict::DoesNotAgree);
        assert_eq!(verdict(None, 5), Verdict::RangesOverlap);
        for found in [Some(true), Some(false), None] {
            assert_eq!(verdict(found, 2), Verdict::NotJudged);
        }
    }

    #[test]
    fn one_that_does_not_hold_decides_before_one_that_is_not_known() {
        assert_eq!(all(&[Some(true), Some(true)]), Some(true));
        assert_eq!(all(&[Some(true), None]), None);
        assert_eq!(all(&[None, Some(false)]), Some(false));
    }
}
