//! Ages that no jump of the system's clock changes.
//!
//! The system's clock may be set, or start wrong after a power cut. An age that is the difference of two readings of it is then wrong
//! by as much, and what is deleted because of that age is gone for good. So a [`Clock`] counts the time that was seen to pass,
//! by the kernel's clock that nobody can set, and remembers at which moments the system's clock said something else than was to be
//! expected. A moment that was noted by the system's clock has an age in time that was seen to pass.
//!
//! ```text
//!   system's clock:  09:00 ───────── 09:30 │ 27 January ── one minute ── │ 09:31 ─────────▶
//!   seen to pass:        0 ───────── 30 min ───────────────────── 31 min ──────────────────▶
//!   the age of what was noted at 09:20, as seen at 09:40: 20 min; on 27 January: 10 min
//! ```
//!
//! Time during which the machine was off is seen by nobody, and does not count: what is to be deleted after an hour is deleted later. The time for which
//! only the process was away counts, if what the clock has seen is stored ([`Clock::seen`]).

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A smaller difference between the two clocks is no jump. The kernel leads its own one slowly to the right time.
const STEP_MS: u64 = 2_000;

/// People are told of jumps of this size.
const TOLD_MS: u64 = 60_000;

/// Beyond this the oldest stretches are forgotten. What was noted in them counts as noted when the next one began.
const STRETCHES_MAX: usize = 500;

/// What both clocks say at one moment.
#[derive(Debug, Clone, Copy)]
struct Moment {
    /// The system's clock; Unix time.
    wall_ms: u64,
    /// The time since the kernel's start.
    kernel_ms: u64,
}

/// The system's clock was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jump {
    /// What it was to say at that moment; Unix time.
    pub from_ms: u64,
    /// What it said.
    pub to_ms: u64,
}

/// A stretch of time in which the system's clock went on without a jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Stretch {
    /// What the system's clock said at its beginning.
    wall_ms: u64,
    /// How much time was seen to pass before.
    passed_ms: u64,
}

/// What a clock has seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockRecord {
    /// The boot of the machine in which the clock looked last, and the time since that boot.
    boot_id: String,
    kernel_ms: u64,
    /// The time that was seen to pass.
    passed_ms: u64,
    /// The oldest first. There is at least one.
    stretches: Vec<Stretch>,
    /// How often the system's clock has jumped by a minute or more.
    pub jumps: u64,
    /// The last of these jumps.
    pub last_jump: Option<Jump>,
}

impl Jump {
    /// By how much.
    pub fn length(&self) -> Duration {
        Duration::from_millis(self.from_ms.abs_diff(self.to_ms))
    }

    /// Whether the clock was set ahead.
    pub fn is_ahead(&self) -> bool {
        self.to_ms > self.from_ms
    }
}

impl ClockRecord {
    fn new(boot_id: &str, now: Moment) -> Self {
        Self {
            boot_id: boot_id.to_owned(),
            kernel_ms: now.kernel_ms,
            passed_ms: 0,
            stretches: vec![Stretch { wall_ms: now.wall_ms, passed_ms: 0 }],
            jumps: 0,
            last_jump: None,
        }
    }

    fn look(&mut self, boot_id: &str, now: Moment) {
        let was_here = self.boot_id == boot_id && self.kernel_ms <= now.kernel_ms;
        let since_look_ms = if was_here { now.kernel_ms - self.kernel_ms } else { 0 };
        self.passed_ms += since_look_ms;
        let expected_ms = self.expected_ms();
        let is_step = expected_ms.abs_diff(now.wall_ms) >= STEP_MS;
        // While the machine was off, its clock went on: only one that went back has jumped.
        let is_jump = is_step && (was_here || now.wall_ms < expected_ms);
        if is_jump && expected_ms.abs_diff(now.wall_ms) >= TOLD_MS {
            self.jumps += 1;
            self.last_jump = Some(Jump { from_ms: expected_ms, to_ms: now.wall_ms });
        }
        if is_step || !was_here {
            // A clock that was set back may have been so since the last look: what was noted since is not what it said the first time.
            let before_ms = if now.wall_ms < expected_ms { since_look_ms } else { 0 };
            self.stretches.push(Stretch {
                wall_ms: now.wall_ms.saturating_sub(before_ms),
                passed_ms: self.passed_ms - before_ms,
            });
        }
        let surplus = self.stretches.len().saturating_sub(STRETCHES_MAX);
        self.stretches.drain(..surplus);
        (self.boot_id, self.kernel_ms) = (boot_id.to_owned(), now.kernel_ms);
    }

    /// What the system's clock says now if it has not jumped.
    fn expected_ms(&self) -> u64 {
        let last = self.stretches.last();
        last.map_or(0, |last| last.wall_ms + self.passed_ms.saturating_sub(last.passed_ms))
    }

    /// For how long at least it was seen that the system's clock has said this, or more.
    fn age_ms(&self, noted_ms: u64) -> u64 {
        let mut until_ms = self.passed_ms;
        // A clock that was set back says a time twice: the later one counts.
        for stretch in self.stretches.iter().rev() {
            let into_ms = noted_ms.checked_sub(stretch.wall_ms);
            let at_ms = into_ms.and_then(|into_ms| stretch.passed_ms.checked_add(into_ms));
            if let Some(at_ms) = at_ms.filter(|at_ms| *at_ms <= until_ms.saturating_add(STEP_MS)) {
                return self.passed_ms.saturating_sub(at_ms);
            }
            until_ms = stretch.passed_ms;
        }
        // It was noted before, or while nobody looked.
        let after = self.stretches.iter().find(|stretch| stretch.wall_ms > noted_ms);
        after.map_or(0, |after| self.passed_ms - after.passed_ms)
    }
}

/// Says how much time was seen to pass.
#[derive(Debug)]
pub struct Clock {
    boot_id: String,
    seen: Mutex<ClockRecord>,
    /// By how much a test has set the system's clock, and how much time it has let pass.
    set_ms: AtomicI64,
    let_pass_ms: AtomicU64,
}

impl Clock {
    /// A clock that has seen nothing yet. What was noted before has age 0 now. The id is that of this boot of the machine
    /// ([`crate::boot_id`]).
    pub fn new(boot_id: String) -> Self {
        let seen = ClockRecord::new(&boot_id, moment());
        Self::of(boot_id, seen)
    }

    /// A clock that goes on from what an earlier one has seen.
    pub fn going_on(boot_id: String, seen: ClockRecord) -> Self {
        let clock = Self::of(boot_id, seen);
        drop(clock.look());
        clock
    }

    fn of(boot_id: String, seen: ClockRecord) -> Self {
        let (set_ms, let_pass_ms) = (AtomicI64::new(0), AtomicU64::new(0));
        Self { boot_id, seen: Mutex::new(seen), set_ms, let_pass_ms }
    }

    /// What this clock has seen until now, to be stored for the next one.
    pub fn seen(&self) -> ClockRecord {
        self.look().clone()
    }

    /// How much time was seen to pass in all.
    pub fn passed_ms(&self) -> u64 {
        self.look().passed_ms
    }

    /// How much time was seen to pass since something was noted by the system's clock; Unix time. It may have been more.
    pub fn age_ms(&self, noted_ms: u64) -> u64 {
        self.look().age_ms(noted_ms)
    }

    /// As [`Clock::age_ms`], since the time of a file, for example.
    pub fn age(&self, noted: SystemTime) -> Duration {
        Duration::from_millis(self.age_ms(unix_ms(noted)))
    }

    fn look(&self) -> MutexGuard<'_, ClockRecord> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // Read in the turn, so that no two readings are taken in the wrong order.
        let Moment { wall_ms, kernel_ms } = moment();
        let passed_ms = self.let_pass_ms.load(Ordering::Relaxed);
        let wall_ms = wall_ms.saturating_add_signed(self.set_ms.load(Ordering::Relaxed));
        seen.look(&self.boot_id, Moment { wall_ms, kernel_ms: kernel_ms + passed_ms });
        seen
    }

    /// For tests: as if the system's clock were set, for this clock alone.
    pub fn pretend_set(&self, by_ms: i64) {
        drop(self.look());
        self.set_ms.fetch_add(by_ms, Ordering::Relaxed);
    }

    /// For tests: as if so much time had passed, for this clock alone.
    pub fn pretend_passed(&self, length: Duration) {
        let length_ms = u64::try_from(length.as_millis()).unwrap_or(u64::MAX);
        self.let_pass_ms.fetch_add(length_ms, Ordering::Relaxed);
        self.set_ms.fetch_add(length_ms.cast_signed(), Ordering::Relaxed);
    }
}

fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The time since the kernel's start, with the time for which the machine was suspended. Nobody can set this clock.
pub fn since_boot_ms() -> u64 {
    // The kernel has had this clock since 2.6.39.
    let kernel = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    u64::try_from(kernel.as_millis()).unwrap_or(u64::MAX)
}

fn moment() -> Moment {
    Moment { wall_ms: unix_ms(SystemTime::now()), kernel_ms: since_boot_ms() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE_MS: u64 = 60_000;
    const DAY_MS: u64 = 24 * 60 * MINUTE_MS;
    const START: Moment = Moment { wall_ms: 1_800_000_000_000, kernel_ms: 5_000 };

    /// So long after the start, by the kernel's clock, and so far from the right time.
    fn at(passed_ms: u64, wrong_ms: i64) -> Moment {
        let wall_ms = (START.wall_ms + passed_ms).saturating_add_signed(wrong_ms);
        Moment { wall_ms, kernel_ms: START.kernel_ms + passed_ms }
    }

    fn days(count: i64) -> i64 {
        count * DAY_MS.cast_signed()
    }

    #[test]
    fn an_age_is_the_time_that_was_seen_to_pass_whatever_the_clock_says() {
        for jump in [days(60), days(-60)] {
            let mut seen = ClockRecord::new("a", START);
            let noted_ms = START.wall_ms + MINUTE_MS;
            seen.look("a", at(10 * MINUTE_MS, 0));
            assert_eq!(seen.age_ms(noted_ms), 9 * MINUTE_MS);
            seen.look("a", at(11 * MINUTE_MS, jump));
            assert_eq!(seen.age_ms(noted_ms), 10 * MINUTE_MS, "{jump}");
            assert_eq!((seen.jumps, seen.last_jump.unwrap().is_ahead()), (1, jump > 0));
            // What is noted while the clock is wrong has its age too.
            let noted_wrongly_ms = at(11 * MINUTE_MS, jump).wall_ms;
            seen.look("a", at(12 * MINUTE_MS, 0));
            assert_eq!(seen.age_ms(noted_ms), 11 * MINUTE_MS, "{jump}");
            assert_eq!(seen.age_ms(noted_wrongly_ms), MINUTE_MS, "{jump}");
            assert_eq!(seen.jumps, 2);
            seen.look("a", at(30 * DAY_MS, 0));
            assert_eq!(seen.age_ms(noted_ms), 30 * DAY_MS - MINUTE_MS, "{jump}");
        }
    }

    /// The clock says a time again that it has said before.
    #[test]
    fn what_is_noted_between_a_jump_back_and_the_next_look_is_not_old() {
        let mut seen = ClockRecord::new("a", START);
        seen.look("a", at(DAY_MS, 0));
        let back = -i64::try_from(60 * MINUTE_MS).unwrap();
        let noted_ms = at(DAY_MS + 10_000, back).wall_ms;
        seen.look("a", at(DAY_MS + MINUTE_MS, back));
        assert_eq!(seen.age_ms(noted_ms), MINUTE_MS - 10_000);
    }

    #[test]
    fn the_time_for_which_a_machine_was_off_does_not_count() {
        let mut seen = ClockRecord::new("a", START);
        let noted_ms = START.wall_ms;
        seen.look("a", at(MINUTE_MS, 0));
        // The process alone was away for ten minutes.
        let mut seen: ClockRecord =
            serde_json::from_str(&serde_json::to_string(&seen).unwrap()).expect("what was stored");
        seen.look("a", at(11 * MINUTE_MS, 0));
        assert_eq!(seen.age_ms(noted_ms), 11 * MINUTE_MS);
        // The machine was off for a day. What was noted after the last look counts from its start on.
        let late_ms = at(11 * MINUTE_MS + 5_000, 0).wall_ms;
        seen.look("b", Moment { kernel_ms: 100, ..at(DAY_MS, 0) });
        seen.look("b", Moment { kernel_ms: 100 + MINUTE_MS, ..at(DAY_MS + MINUTE_MS, 0) });
        assert_eq!(seen.age_ms(noted_ms), 12 * MINUTE_MS);
        assert_eq!(seen.age_ms(late_ms), MINUTE_MS);
        assert_eq!(seen.jumps, 0, "its clock went on while it was off");
        // It starts with a clock that has lost the time.
        seen.look("c", Moment { wall_ms: MINUTE_MS, kernel_ms: 100 });
        assert_eq!((seen.jumps, seen.age_ms(noted_ms)), (1, 12 * MINUTE_MS));
    }

    #[test]
    fn what_was_noted_before_the_clock_began_counts_from_then_on() {
        let mut seen = ClockRecord::new("a", START);
        seen.look("a", at(MINUTE_MS, 0));
        assert_eq!(seen.age_ms(START.wall_ms - DAY_MS), MINUTE_MS);
        assert_eq!(seen.age_ms(0), MINUTE_MS);
        assert_eq!(seen.age_ms(START.wall_ms + DAY_MS), 0, "it is yet to come");
    }

    #[test]
    fn a_clock_that_is_led_to_the_right_time_has_not_jumped() {
        let mut seen = ClockRecord::new("a", START);
        for minute in 1..=60 {
            seen.look("a", at(minute * MINUTE_MS, i64::try_from(minute).unwrap() * 30));
        }
        assert_eq!((seen.stretches.len(), seen.jumps), (1, 0));
        let noted_ms = START.wall_ms;
        assert_eq!(seen.age_ms(noted_ms), 60 * MINUTE_MS);
    }

    #[test]
    fn the_oldest_stretches_are_forgotten_and_no_age_becomes_too_large() {
        let mut seen = ClockRecord::new("a", START);
        for minute in 1..=2 * STRETCHES_MAX as u64 {
            let wrong = if minute % 2 == 0 { 0 } else { days(1) };
            seen.look("a", at(minute * MINUTE_MS, wrong));
        }
        assert_eq!(seen.stretches.len(), STRETCHES_MAX);
        let all_ms = 2 * STRETCHES_MAX as u64 * MINUTE_MS;
        assert!(seen.age_ms(START.wall_ms) <= all_ms);
        assert!(seen.age_ms(START.wall_ms) >= all_ms / 2 - 2 * MINUTE_MS);
    }
}
