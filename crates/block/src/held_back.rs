//! Holds back answers in short windows, which shows how many reads a program keeps in flight.
//!
//! A local disk answers a read before the next one is issued, so that a trace of a local run looks the same for one
//! reader and for many. When answers are late by [`HELD_BACK_US`], as they are far from the data, each reader issues
//! one read and waits: the reads that arrive in a window of that length are those in flight together.
//!
//! A window begins with the first read after a random time, about one a second, so that a program loses less than 2 %
//! of its time. At most 1 % of the requests are held back, whatever the program does.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::trace::HELD_BACK_US;

/// How long an answer is held back, and how long a window lasts.
pub(crate) const HELD_BACK: Duration = Duration::from_micros(HELD_BACK_US as u64);
/// At most one of this many requests is held back.
const ONE_OF: u64 = 100;
/// A window begins only when this many reads may be held back.
const ROOM: u64 = 8;
/// The first window begins after this time at the earliest, and at the latest after twice it.
const FIRST: Duration = Duration::from_millis(100);
/// The same for the time between two windows.
const BETWEEN: Duration = Duration::from_millis(700);

/// The windows of one trace; its volumes share them.
pub(crate) struct Windows(Mutex<State>);

struct State {
    /// When the next window may begin.
    next: Instant,
    /// When the present one ends.
    open_until: Option<Instant>,
    requests: u64,
    held: u64,
    random: u64,
}

impl Windows {
    pub fn new(now: Instant) -> Self {
        Self::with_seed(now, RandomState::new().build_hasher().finish())
    }

    fn with_seed(now: Instant, seed: u64) -> Self {
        let mut state =
            State { next: now, open_until: None, requests: 0, held: 0, random: seed | 1 };
        state.next = now + state.random_time(FIRST);
        Self(Mutex::new(state))
    }

    /// Counts a request that has ended.
    pub fn count(&self) {
        self.lock().requests += 1;
    }

    /// Whether a read that arrives now would be held back.
    pub fn is_due(&self, now: Instant) -> bool {
        self.lock().is_due(now)
    }

    /// As [`Self::is_due`]. If so, it also counts the read, and begins a window if none is open.
    pub fn hold(&self, now: Instant) -> bool {
        let mut state = self.lock();
        if !state.is_due(now) {
            return false;
        }
        if state.open_until.is_none_or(|until| now >= until) {
            state.open_until = Some(now + HELD_BACK);
            state.next = now + HELD_BACK + state.random_time(BETWEEN);
        }
        state.held += 1;
        true
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_due(&self, now: Instant) -> bool {
        let left = (self.requests / ONE_OF).saturating_sub(self.held);
        match self.open_until {
            Some(until) if now < until => left > 0,
            _ => now >= self.next && left >= ROOM,
        }
    }

    /// Between once and twice this time.
    fn random_time(&mut self, least: Duration) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let share =
            f64::from(u32::try_from(self.random >> 32).unwrap_or_default()) / f64::from(u32::MAX);
        least.mul_f64(1.0 + share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates readers that each issue a read when their last one is answered, after 100 us or late. Returns the
    /// number of reads, the number of those held back, and the most reads of one window.
    fn run(readers: usize, seconds: u64, seed: u64) -> (u64, u64, u64) {
        let start = Instant::now();
        let windows = Windows::with_seed(start, seed);
        let mut next_at = vec![Duration::ZERO; readers];
        let (mut reads, mut held, mut in_window, mut most) = (0, 0, 0, 0);
        let mut last_held: Option<Duration> = None;
        loop {
            let reader = (0..readers).min_by_key(|reader| next_at[*reader]).expect("one");
            let now = next_at[reader];
            if now > Duration::from_secs(seconds) {
                return (reads, held, most);
            }
            reads += 1;
            windows.count();
            let mut took = Duration::from_micros(100);
            if windows.hold(start + now) {
                took += HELD_BACK;
                held += 1;
                let same = last_held.is_some_and(|last| now < last + HELD_BACK);
                in_window = if same { in_window + 1 } else { 1 };
                last_held = Some(if same { last_held.unwrap_or(now) } else { now });
                most = most.max(in_window);
            }
            next_at[reader] = now + took;
        }
    }

    #[test]
    fn the_reads_of_a_window_are_those_in_flight_together() {
        for readers in [1, 3, 8] {
            let (_, held, most) = run(readers, 5, 7);
            assert_eq!(most, readers as u64);
            assert!(held >= 2 * readers as u64, "{held}");
        }
    }

    #[test]
    fn at_most_one_of_a_hundred_requests_is_held_back() {
        for seed in 1..20 {
            let (reads, held, _) = run(8, 3, seed);
            assert!(held * ONE_OF <= reads, "{held} of {reads}");
            // One reader loses 16 ms with each.
            let (reads, held, _) = run(1, 10, seed);
            assert!(held * ONE_OF <= reads && held <= 15, "{held} of {reads}");
        }
    }

    #[test]
    fn a_program_with_few_requests_is_left_alone() {
        let now = Instant::now();
        let windows = Windows::new(now);
        (0..799).for_each(|_| windows.count());
        assert!(!windows.is_due(now + Duration::from_secs(60)));
        windows.count();
        assert!(windows.is_due(now + Duration::from_secs(60)));
        assert!(!windows.is_due(now), "not before its time");
    }
}
