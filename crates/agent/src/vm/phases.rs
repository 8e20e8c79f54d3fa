//! Measures the phases of an outgoing migration from QEMU's reports. All functions are pure.
//!
//! Rounds are distinguished by QEMU's count of its passes over the memory. The parts of the pause lie between
//! QEMU's events, whose times are by the clock of this host:
//!
//! ```text
//! STOP ── flush ── pre-switchover ── record, epochs ── device ── remainder, device state ── sent ── arrival ── completed
//! ```
//!
//! From `device` on QEMU holds its lock until it has sent everything. So a query that is sent then is answered
//! when everything is sent, which gives the time `sent`.

use std::time::Duration;

use perigee_model::phases::{CopyRound, DOWNTIME_LIMIT_MAX_MS, Pause, Phases};

use crate::qmp::{Event, MigrateInfo};

/// The switch is near if copying the rest takes at most this time.
const NEAR: Duration = Duration::from_secs(1);

/// The measurements of one outgoing migration.
#[derive(Debug)]
pub struct Watch {
    rounds: Rounds,
    convergence: Convergence,
    limit_ms: u64,
    /// The pass in which the disks were last flushed.
    flushed_in: Option<u64>,
    /// The bytes that were sent before the pause, and the rate then.
    before_pause: Option<(u64, u64)>,
    record_us: u64,
}

/// The result of one check during the copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassCheck {
    pub is_near: bool,
    /// True once in each pass that may be the last.
    pub is_flush_due: bool,
    pub new_limit_ms: Option<u64>,
}

impl Watch {
    /// `limit_ms` is the pause that QEMU is allowed at first, in ms.
    pub fn new(limit_ms: u64) -> Self {
        Self {
            rounds: Rounds::default(),
            convergence: Convergence::default(),
            limit_ms,
            flushed_in: None,
            before_pause: None,
            record_us: 0,
        }
    }

    /// Takes QEMU's figures while it copies, and says what is due.
    pub fn copying(&mut self, info: &MigrateInfo, phases: &mut Phases) -> PassCheck {
        self.rounds.look(info, phases);
        let rate = info.ram.bytes_per_s();
        let soon_ms = self.limit_ms.saturating_add(1000 * NEAR.as_secs());
        let is_near = rate > 0 && info.ram.remaining <= rate.saturating_mul(soon_ms) / 1000;
        let pass = info.ram.dirty_sync_count;
        let is_flush_due = is_near && self.flushed_in != Some(pass);
        if is_flush_due {
            self.flushed_in = Some(pass);
        }
        let new_limit_ms = self.convergence.look(info, self.limit_ms);
        self.limit_ms = new_limit_ms.unwrap_or(self.limit_ms);
        PassCheck { is_near, is_flush_due, new_limit_ms }
    }

    /// Takes QEMU's figures when the guest stands still.
    pub fn at_switch(&mut self, info: &MigrateInfo, phases: &mut Phases) {
        if self.before_pause.is_none() {
            self.rounds.end(info, phases);
            self.before_pause = Some((info.ram.transferred, info.ram.bytes_per_s()));
        }
    }

    /// Records how long storing the record took in the pause.
    pub fn stored(&mut self, took: Duration) {
        self.record_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    }

    /// The parts of the pause, when everything is sent.
    pub fn pause(&self, moments: &Moments, transferred_bytes: u64) -> Option<Pause> {
        let (before_bytes, rate_bytes_per_s) = self.before_pause?;
        let bytes = transferred_bytes.saturating_sub(before_bytes);
        moments.pause(self.record_us, Remainder { bytes, rate_bytes_per_s })
    }
}

/// The rounds, as they are seen in QEMU's reports.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rounds {
    /// The current pass, from 1; 0 before the first report.
    pass: u32,
    /// QEMU's clock and bytes when the pass began.
    begun_ms: u64,
    begun_bytes: u64,
}

impl Rounds {
    /// Records a report. Passes that began and ended between two reports count as one round.
    pub fn look(&mut self, info: &MigrateInfo, phases: &mut Phases) {
        let pass = u32::try_from(info.ram.dirty_sync_count).unwrap_or(u32::MAX);
        if self.pass == 0 {
            self.pass = 1;
        }
        if pass > self.pass {
            self.close(pass - 1, info, phases);
        }
    }

    /// The memory is not copied any more, so the current pass has ended.
    pub fn end(&mut self, info: &MigrateInfo, phases: &mut Phases) {
        if self.pass > 0 && info.ram.transferred > self.begun_bytes {
            let pass = u32::try_from(info.ram.dirty_sync_count).unwrap_or(u32::MAX);
            self.close(pass.max(self.pass), info, phases);
        }
    }

    fn close(&mut self, last: u32, info: &MigrateInfo, phases: &mut Phases) {
        phases.add_round(CopyRound {
            first: self.pass,
            last,
            duration_ms: info.total_time.saturating_sub(self.begun_ms),
            bytes: info.ram.transferred.saturating_sub(self.begun_bytes),
            dirty_bytes_per_s: info.ram.dirty_bytes_per_s(),
        });
        self.pass = last.saturating_add(1);
        (self.begun_ms, self.begun_bytes) = (info.total_time, info.ram.transferred);
    }
}

/// The moments of the pause, in microseconds of this host's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moments {
    pub stopped_us: Option<u64>,
    pub at_switch_us: Option<u64>,
    pub behind_switch_us: Option<u64>,
    pub sent_us: Option<u64>,
    pub completed_us: Option<u64>,
    /// At the destination: when the guest ran.
    pub resumed_us: Option<u64>,
}

impl Moments {
    /// Records an event of QEMU.
    pub fn on_event(&mut self, event: &Event) {
        let at_us = event.timestamp.us();
        match (event.name.as_str(), event.data["status"].as_str()) {
            ("STOP", _) if self.at_switch_us.is_none() => self.stopped_us = Some(at_us),
            ("MIGRATION", Some("setup")) => *self = Self::default(),
            ("MIGRATION", Some("pre-switchover")) => self.at_switch_us = Some(at_us),
            ("MIGRATION", Some("device")) => self.behind_switch_us = Some(at_us),
            ("MIGRATION", Some("completed")) => self.completed_us = Some(at_us),
            ("RESUME", _) if self.completed_us.is_some() => {
                self.resumed_us.get_or_insert(at_us);
            }
            _ => {}
        }
    }

    /// At the destination: the time from the arrival of the state until the guest ran.
    pub fn resume_us(&self) -> Option<u64> {
        Some(self.resumed_us?.saturating_sub(self.completed_us?))
    }

    /// The parts of the pause; `None` if a moment was not seen.
    pub fn pause(&self, record_us: u64, remainder: Remainder) -> Option<Pause> {
        let behind_us = self.behind_switch_us?;
        let completed_us = self.completed_us?;
        let switch_us = behind_us.saturating_sub(self.at_switch_us?);
        let sent_us =
            self.sent_us.unwrap_or(completed_us).clamp(behind_us, completed_us.max(behind_us));
        let sending_us = sent_us - behind_us;
        let remainder_us = remainder.us().min(sending_us);
        Some(Pause {
            flush_us: self.at_switch_us?.saturating_sub(self.stopped_us?),
            record_us: record_us.min(switch_us),
            epochs_us: switch_us.saturating_sub(record_us),
            remainder_us,
            device_us: sending_us - remainder_us,
            arrival_us: completed_us.saturating_sub(sent_us),
            resume_us: 0,
            remainder_bytes: remainder.bytes,
        })
    }
}

/// The memory that is sent in the pause.
#[derive(Debug, Clone, Copy, Default)]
pub struct Remainder {
    pub bytes: u64,
    pub rate_bytes_per_s: u64,
}

impl Remainder {
    fn us(self) -> u64 {
        match self.rate_bytes_per_s {
            0 => 0,
            rate => self.bytes.saturating_mul(1_000_000) / rate,
        }
    }
}

/// Checks whether the copying converges. It begins with a short downtime limit, which is raised only after
/// passes that left as much memory as the pass before.
#[derive(Debug, Clone, Copy, Default)]
pub struct Convergence {
    pass: u64,
    remaining_bytes: u64,
    /// Number of consecutive passes without progress.
    stuck: u32,
}

/// After this many consecutive passes without progress the limit is raised.
const STUCK_PASSES: u32 = 2;

impl Convergence {
    /// Records a report. Returns a new downtime limit if the current one is not reached.
    pub fn look(&mut self, info: &MigrateInfo, limit_ms: u64) -> Option<u64> {
        if info.ram.dirty_sync_count <= self.pass {
            return None;
        }
        // In the first pass all of the memory is left, so there is nothing to compare with.
        let helped = self.pass < 2 || info.ram.remaining < self.remaining_bytes / 10 * 9;
        (self.pass, self.remaining_bytes) = (info.ram.dirty_sync_count, info.ram.remaining);
        if helped {
            self.stuck = 0;
            return None;
        }
        self.stuck += 1;
        let max_ms = u64::from(DOWNTIME_LIMIT_MAX_MS);
        if self.stuck < STUCK_PASSES || limit_ms >= max_ms {
            return None;
        }
        self.stuck = 0;
        Some((limit_ms * 2).min(max_ms))
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::phases::Phases;
    use serde_json::json;

    use super::*;
    use crate::qmp::{RamInfo, Timestamp};

    fn info(pass: u64, total_time: u64, transferred: u64, remaining: u64) -> MigrateInfo {
        let ram = RamInfo {
            dirty_sync_count: pass,
            transferred,
            remaining,
            dirty_pages_rate: 10,
            page_size: 4096,
            ..RamInfo::default()
        };
        MigrateInfo { total_time, ram, ..MigrateInfo::default() }
    }

    #[test]
    fn rounds_lie_between_looks_that_show_another_pass() {
        let (mut rounds, mut phases) = (Rounds::default(), Phases::default());
        rounds.look(&info(1, 100, 50, 0), &mut phases);
        rounds.look(&info(1, 900, 400, 0), &mut phases);
        assert_eq!(phases.rounds, []);
        rounds.look(&info(2, 1000, 500, 0), &mut phases);
        rounds.look(&info(5, 1300, 560, 0), &mut phases);
        rounds.end(&info(5, 1350, 600, 0), &mut phases);
        let seen: Vec<_> =
            phases.rounds.iter().map(|r| (r.first, r.last, r.duration_ms, r.bytes)).collect();
        assert_eq!(seen, [(1, 1, 1000, 500), (2, 4, 300, 60), (5, 5, 50, 40)]);
        assert_eq!(phases.rounds[0].dirty_bytes_per_s, 40960);
    }

    /// They wrapped, or ended the migration's task.
    #[test]
    fn figures_of_qemu_that_are_too_large_stay_at_the_largest() {
        let (mut rounds, mut phases) = (Rounds::default(), Phases::default());
        let mut odd = info(u64::MAX, 100, 50, 0);
        odd.ram.dirty_pages_rate = u64::MAX;
        rounds.look(&odd, &mut phases);
        odd.ram.transferred = u64::MAX;
        rounds.end(&odd, &mut phases);
        assert_eq!(phases.rounds.len(), 2);
        assert!(phases.rounds.iter().all(|round| round.dirty_bytes_per_s == u64::MAX));
    }

    fn event(name: &str, status: &str, microseconds: u64) -> Event {
        let timestamp = Timestamp { seconds: 7, microseconds };
        Event { name: name.into(), data: json!({"status": status}), timestamp }
    }

    #[test]
    fn the_parts_of_the_pause_fill_the_time_between_qemus_events() {
        let mut moments = Moments::default();
        for (name, status, at_us) in [
            ("STOP", "", 100),
            ("MIGRATION", "pre-switchover", 600),
            ("MIGRATION", "device", 20_600),
            ("MIGRATION", "completed", 90_600),
        ] {
            moments.on_event(&event(name, status, at_us));
        }
        moments.sent_us = Some(7_000_000 + 60_600);
        let remainder = Remainder { bytes: 3 << 20, rate_bytes_per_s: 100 << 20 };
        let pause = moments.pause(4000, remainder).unwrap();
        assert_eq!((pause.flush_us, pause.record_us, pause.epochs_us), (500, 4000, 16_000));
        assert_eq!((pause.remainder_us, pause.device_us), (30_000, 10_000));
        assert_eq!((pause.arrival_us, pause.total_us()), (30_000, 90_500));
    }

    #[test]
    fn a_remainder_is_never_longer_than_the_sending() {
        let mut moments = Moments::default();
        moments.on_event(&event("STOP", "", 0));
        moments.on_event(&event("MIGRATION", "pre-switchover", 0));
        moments.on_event(&event("MIGRATION", "device", 10));
        moments.on_event(&event("MIGRATION", "completed", 30));
        let slow = Remainder { bytes: 1 << 30, rate_bytes_per_s: 1 };
        let pause = moments.pause(0, slow).unwrap();
        assert_eq!((pause.remainder_us, pause.device_us, pause.arrival_us), (20, 0, 0));
    }

    #[test]
    fn a_pause_of_which_a_moment_was_not_seen_is_not_guessed() {
        let mut moments = Moments::default();
        moments.on_event(&event("MIGRATION", "device", 10));
        assert_eq!(moments.pause(0, Remainder::default()), None);
        // The next migration starts from the beginning.
        moments.on_event(&event("MIGRATION", "setup", 20));
        assert_eq!(moments, Moments::default());
    }

    #[test]
    fn the_downtime_limit_is_raised_only_when_passes_do_not_help() {
        let mut convergence = Convergence::default();
        for (pass, remaining) in [(1, 1000), (2, 500), (3, 400), (4, 300), (5, 290)] {
            assert_eq!(convergence.look(&info(pass, 0, 0, remaining), 100), None, "pass {pass}");
        }
        assert_eq!(convergence.look(&info(5, 0, 0, 400), 100), None, "the same pass");
        assert_eq!(convergence.look(&info(6, 0, 0, 300), 100), Some(200));
        assert_eq!(convergence.look(&info(7, 0, 0, 300), 200), None);
        assert_eq!(convergence.look(&info(8, 0, 0, 300), 1900), Some(2000));
        assert_eq!(convergence.look(&info(10, 0, 0, 300), 2000), None);
    }
}
