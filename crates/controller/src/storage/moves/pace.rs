//! How long the new home still copies, from what was missing in the last seconds.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Older figures count no more.
const WINDOW: Duration = Duration::from_secs(10);
/// A step that is so many times as fast as all others together was no copying: parts without data are counted as
/// missing until the new home knows them, and then vanish at once.
const VANISHES: u128 = 5;
/// Of fewer steps nobody can say which one was unlike the others.
const STEPS_MIN: usize = 3;
/// What is shorter says little.
const SPAN_MIN: Duration = Duration::from_millis(500);

/// What was missing, and when. The latest one is last.
#[derive(Debug, Default)]
pub(super) struct Pace {
    seen: VecDeque<(Instant, u64)>,
}

impl Pace {
    /// Notes what is missing now, and returns how long the rest takes; `None` if nothing has come for a while.
    pub(super) fn left(&mut self, now: Instant, missing_bytes: u64) -> Option<Duration> {
        self.seen
            .retain(|(at, bytes)| now.duration_since(*at) <= WINDOW && *bytes >= missing_bytes);
        self.seen.push_back((now, missing_bytes));
        let (span, came_bytes) = self.came()?;
        if missing_bytes == 0 || came_bytes == 0 || span < SPAN_MIN {
            return None;
        }
        let micros = span.as_micros() * u128::from(missing_bytes) / u128::from(came_bytes);
        Some(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }

    /// What was copied within the window, and how long that took.
    fn came(&self) -> Option<(Duration, u64)> {
        let pairs = self.seen.iter().zip(self.seen.iter().skip(1));
        let steps = pairs.map(|((from, before), (at, after))| (*at - *from, before - after));
        let rate = |(span, bytes): (Duration, u64)| {
            u128::from(bytes) * 1_000_000 / span.as_micros().max(1)
        };
        let all = steps.clone().reduce(|(span, bytes), step| (span + step.0, bytes + step.1))?;
        let fastest = steps.max_by_key(|step| rate(*step))?;
        let rest = (all.0 - fastest.0, all.1 - fastest.1);
        let has_vanished = self.seen.len() > STEPS_MIN
            && rest.0 >= SPAN_MIN
            && rest.1 > 0
            && rate(fastest) > VANISHES * rate(rest);
        Some(if has_vanished { rest } else { all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_time_left_is_that_of_the_last_seconds_rate() {
        let (mut pace, begun) = (Pace::default(), Instant::now());
        let at = |ms| begun + Duration::from_millis(ms);
        assert_eq!(pace.left(begun, 1000 * MIB), None, "nothing has come yet");
        assert_eq!(pace.left(at(100), 900 * MIB), None, "that is too short");
        assert_eq!(pace.left(at(1000), 800 * MIB), Some(Duration::from_secs(4)));
        // Slower from now on: after a while only that counts.
        for second in 2..=11 {
            pace.left(at(second * 1000), (800 - second * 10) * MIB);
        }
        assert_eq!(pace.left(at(12_000), 680 * MIB), Some(Duration::from_secs(68)));
    }

    /// The time left was ten times too short for a while.
    #[test]
    fn parts_without_data_that_vanish_are_no_copying() {
        let (mut pace, begun) = (Pace::default(), Instant::now());
        let at = |ms| begun + Duration::from_millis(ms);
        pace.left(begun, 2000 * MIB);
        pace.left(at(1000), 500 * MIB);
        for (second, missing) in [(2, 490), (3, 480)] {
            pace.left(at(second * 1000), missing * MIB);
        }
        assert_eq!(pace.left(at(4000), 470 * MIB), Some(Duration::from_secs(47)));
    }

    #[test]
    fn a_copy_that_stands_still_has_no_time_left() {
        let (mut pace, begun) = (Pace::default(), Instant::now());
        pace.left(begun, 100 * MIB);
        assert!(pace.left(begun + Duration::from_secs(1), 50 * MIB).is_some());
        assert_eq!(pace.left(begun + Duration::from_secs(12), 50 * MIB), None);
        assert_eq!(pace.left(begun + Duration::from_secs(13), 0), None, "it is over");
    }

    #[test]
    fn what_is_missing_again_begins_anew() {
        let (mut pace, begun) = (Pace::default(), Instant::now());
        pace.left(begun, 10 * MIB);
        assert_eq!(pace.left(begun + Duration::from_secs(1), 20 * MIB), None);
    }
}
