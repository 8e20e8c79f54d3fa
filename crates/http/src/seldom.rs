//! Says what anybody can cause as often as he likes: at once, and then now and again how often it has happened since.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time between two reports.
const EVERY: Duration = Duration::from_secs(10);

/// One kind of such an event.
#[derive(Debug, Default)]
pub struct Seldom {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    reported: Option<Instant>,
    since: u64,
}

impl Seldom {
    /// It has happened. Returns how often since the last report, if it is to be reported now.
    pub fn happened(&self) -> Option<u64> {
        self.happened_at(Instant::now())
    }

    fn happened_at(&self, now: Instant) -> Option<u64> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.since = inner.since.saturating_add(1);
        if inner.reported.is_some_and(|reported| now < reported + EVERY) {
            return None;
        }
        inner.reported = Some(now);
        Some(std::mem::take(&mut inner.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_at_once_and_then_with_how_often_it_happened() {
        let (seldom, begun) = (Seldom::default(), Instant::now());
        assert_eq!(seldom.happened_at(begun), Some(1));
        for _ in 0..1000 {
            assert_eq!(seldom.happened_at(begun), None);
        }
        assert_eq!(seldom.happened_at(begun + EVERY), Some(1001));
        assert_eq!(seldom.happened_at(begun + EVERY), None);
    }
}
