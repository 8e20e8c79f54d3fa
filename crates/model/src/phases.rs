//! Where a live migration's time goes, phase by phase.
//!
//! ```text
//! asked |  prepare: epochs, attach, QEMU  |  copy: round 1, 2, 3 …  |  pause  | runs there
//!                                                                  /           \
//!                        flush of the disks, record, epochs, remainder, device state, arrival, resume
//! ```
//!
//! The controller fills in the preparation, the source's agent the rest. What has not happened yet,
//! or was not seen, is `None`: an agent that was restarted in the middle does not guess.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::units::{format_bytes, format_rate};

/// What is left of the memory may take so long to send before the guest is paused for it; raised
/// only where the copying does not get that far.
pub const DOWNTIME_LIMIT_FIRST_MS: u32 = 100;

/// It is never raised beyond that.
pub const DOWNTIME_LIMIT_MAX_MS: u32 = 2000;

/// A migration that takes longer than this many seconds from its turn on is cancelled: it hardly ends.
pub const TOTAL_MAX_S: u64 = 15 * 60;

/// A migration that has sent less says nothing of its link's rate: up to 16 MiB of it may still be in buffers of the two
/// hosts, where they come as fast as memory is read.
const RATE_BYTES_MIN: u64 = 64 << 20;

/// More rounds than that are thinned out: two neighbours become one.
pub const ROUNDS_MAX: usize = 32;

/// The phases of one migration, as far as it has come.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Phases {
    /// Before the first byte of memory; filled in by the controller.
    pub prepare: Option<Prepare>,
    /// In their order; at most [`ROUNDS_MAX`].
    pub rounds: Vec<CopyRound>,
    /// While the guest stands still; filled in by the source's agent when it is over.
    pub pause: Option<Pause>,
}

/// How long the planner said that the phases would take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PredictedPhases {
    /// Until the first byte of memory is sent.
    pub prepare_ms: u64,
    /// All rounds, with the last one, which is sent in the pause.
    pub copy_ms: u64,
    /// The pause without that round.
    pub pause_ms: u64,
}

/// What is done before the first byte of memory is sent. The VM runs meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Prepare {
    /// Issuing a new writer epoch for each disk, at the disks' homes.
    pub epochs_ms: u64,
    /// Making the disks reachable at the destination: so much longer than issuing the epochs, which is
    /// done at the same time.
    pub attach_ms: u64,
    /// From asking for the destination's QEMU until it listens.
    pub qemu_ms: u64,
    /// From then until the source's QEMU was told to send.
    pub begin_ms: u64,
}

/// One pass over the memory that has changed, or several passes that were made one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CopyRound {
    /// The numbers of the first and last pass in it, from 1.
    pub first: u32,
    /// The number of the last pass in it.
    pub last: u32,
    /// From the begin of its first pass to the end of its last.
    pub duration_ms: u64,
    /// Sent in it.
    pub bytes: u64,
    /// How fast the guest changed its memory, as QEMU saw it at the end of the round.
    pub dirty_bytes_per_s: u64,
}

/// The parts of the pause, in the order in which they happen. Together they are the time in which
/// the guest does not run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pause {
    /// Requests in flight end, and the disks are flushed.
    pub flush_us: u64,
    /// The agent writes down that the switch begins.
    pub record_us: u64,
    /// The writer epochs are raised at the disks' homes, and QEMU is told to go on.
    pub epochs_us: u64,
    /// The memory that was left to send. QEMU sends it in one go with the state of the devices, so
    /// this is worked out from its bytes and the rate.
    pub remainder_us: u64,
    /// The state of the devices is saved and sent.
    pub device_us: u64,
    /// The destination's QEMU loads the state and says so.
    pub arrival_us: u64,
    /// The destination's agent stores that the VM is there and lets it run.
    pub resume_us: u64,
    /// How much memory was left to send in the pause.
    pub remainder_bytes: u64,
}

impl Prepare {
    /// The whole preparation.
    pub fn total_ms(&self) -> u64 {
        self.epochs_ms + self.attach_ms + self.qemu_ms + self.begin_ms
    }
}

impl Pause {
    /// The whole pause: how long the guest stood still.
    pub fn total_us(&self) -> u64 {
        self.flush_us
            + self.record_us
            + self.epochs_us
            + self.remainder_us
            + self.device_us
            + self.arrival_us
            + self.resume_us
    }
}

/// One phase in words, for people.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// What is done, in a few words; copying has the numbers of its passes.
    pub name: String,
    /// How long it took.
    pub duration_us: u64,
    /// Bytes and rates, where there are any.
    pub note: String,
    /// The guest does not run in it.
    pub paused: bool,
}

impl Phases {
    /// Adds a round; where there are too many, neighbours become one, the early ones first.
    pub fn add_round(&mut self, round: CopyRound) {
        self.rounds.push(round);
        if self.rounds.len() <= ROUNDS_MAX {
            return;
        }
        let all = std::mem::take(&mut self.rounds);
        let (early, late) = all.split_at(ROUNDS_MAX / 2 * 2);
        self.rounds = early.chunks(2).filter_map(merged).collect();
        self.rounds.extend_from_slice(late);
    }

    /// Bytes sent in all rounds.
    pub fn copied_bytes(&self) -> u64 {
        self.rounds.iter().map(|round| round.bytes).sum()
    }

    /// How long all rounds took.
    pub fn copy_ms(&self) -> u64 {
        self.rounds.iter().map(|round| round.duration_ms).sum()
    }

    /// The bytes that all rounds sent in a second; `None` if they sent too few to say it.
    pub fn copy_rate_bytes_per_s(&self) -> Option<u64> {
        let bytes = self.copied_bytes();
        let rate = bytes.saturating_mul(1000).checked_div(self.copy_ms());
        rate.filter(|_| bytes >= RATE_BYTES_MIN)
    }

    /// All phases that were seen, in their order.
    pub fn parts(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        if let Some(prepare) = self.prepare {
            let names = [
                ("issue epochs", prepare.epochs_ms),
                ("attach disks", prepare.attach_ms),
                ("start QEMU", prepare.qemu_ms),
                ("begin", prepare.begin_ms),
            ];
            parts.extend(names.map(|(name, ms)| Part::running(name.to_owned(), ms, String::new())));
        }
        for round in &self.rounds {
            let mut note = format_bytes(round.bytes);
            if round.dirty_bytes_per_s > 0 {
                note = format!("{note}, changed at {}", format_rate(round.dirty_bytes_per_s));
            }
            parts.push(Part::running(round.name(), round.duration_ms, note));
        }
        if let Some(pause) = &self.pause {
            parts.extend(pause.parts());
        }
        parts
    }
}

impl Part {
    fn running(name: String, duration_ms: u64, note: String) -> Self {
        Self { name, duration_us: duration_ms * 1000, note, paused: false }
    }
}

impl CopyRound {
    fn name(&self) -> String {
        if self.first == self.last {
            format!("copy {}", self.first)
        } else {
            format!("copy {} to {}", self.first, self.last)
        }
    }
}

impl Pause {
    fn parts(&self) -> impl Iterator<Item = Part> {
        let parts = [
            ("flush disks", self.flush_us, String::new()),
            ("record", self.record_us, String::new()),
            ("raise epochs", self.epochs_us, String::new()),
            ("remainder", self.remainder_us, format_bytes(self.remainder_bytes)),
            ("device state", self.device_us, String::new()),
            ("arrival", self.arrival_us, String::new()),
            ("resume", self.resume_us, String::new()),
        ];
        parts.into_iter().map(|(name, duration_us, note)| Part {
            name: name.to_owned(),
            duration_us,
            note,
            paused: true,
        })
    }
}

/// Neighbours as one round. The dirty rate is the higher one: QEMU may have slowed the VM down in the other.
fn merged(rounds: &[CopyRound]) -> Option<CopyRound> {
    let (first, last) = (rounds.first()?, rounds.last()?);
    Some(CopyRound {
        first: first.first,
        last: last.last,
        duration_ms: rounds.iter().map(|round| round.duration_ms).sum(),
        bytes: rounds.iter().map(|round| round.bytes).sum(),
        dirty_bytes_per_s: rounds.iter().map(|round| round.dirty_bytes_per_s).max()?,
    })
}

/// Seconds until memory is copied: what is left, and what is changed while it is sent, and so on.
/// `None` when the rate is not known yet, or when it would take longer than a migration may, because memory changes
/// nearly as fast as it is sent.
pub fn copy_left_s(
    remaining_bytes: u64,
    rate_bytes_per_s: u64,
    dirty_bytes_per_s: u64,
) -> Option<f64> {
    let gained = rate_bytes_per_s.checked_sub(dirty_bytes_per_s).filter(|gained| *gained > 0)?;
    let left_s = as_f64(remaining_bytes) / as_f64(gained);
    (left_s <= as_f64(TOTAL_MAX_S)).then_some(left_s)
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a VM's memory, or seconds")]
fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn round(number: u32, bytes: u64) -> CopyRound {
        CopyRound {
            first: number,
            last: number,
            duration_ms: 10,
            bytes,
            dirty_bytes_per_s: u64::from(number),
        }
    }

    #[test]
    fn early_rounds_are_thinned_out_first() {
        let mut phases = Phases::default();
        for number in 1..=33 {
            phases.add_round(round(number, 1));
        }
        assert_eq!(phases.rounds.len(), 17);
        assert_eq!((phases.rounds[0].first, phases.rounds[0].last), (1, 2));
        assert_eq!((phases.rounds[16].first, phases.rounds[16].last), (33, 33));
        assert_eq!(phases.rounds[0].dirty_bytes_per_s, 2);
    }

    #[test]
    fn what_may_be_in_buffers_says_nothing_of_a_link_s_rate() {
        let sent = |bytes| Phases { rounds: vec![round(1, bytes)], ..Phases::default() };
        assert_eq!(sent(16 << 20).copy_rate_bytes_per_s(), None);
        assert_eq!(sent(128 << 20).copy_rate_bytes_per_s(), Some((128 << 20) * 100));
        assert_eq!(Phases::default().copy_rate_bytes_per_s(), None);
    }

    #[test]
    fn the_parts_of_a_pause_add_up_and_stand_in_order() {
        let pause = Pause {
            flush_us: 1,
            record_us: 2,
            epochs_us: 4,
            remainder_us: 8,
            device_us: 16,
            arrival_us: 32,
            resume_us: 64,
            remainder_bytes: 1 << 20,
        };
        let phases = Phases { pause: Some(pause), ..Phases::default() };
        let parts = phases.parts();
        assert_eq!(parts.iter().map(|part| part.duration_us).sum::<u64>(), pause.total_us());
        assert!(parts.iter().all(|part| part.paused));
        assert_eq!((parts[0].name.as_str(), parts[6].name.as_str()), ("flush disks", "resume"));
        assert_eq!(parts[3].note, "1 MiB");
    }

    #[test]
    fn what_was_not_seen_has_no_part() {
        assert_eq!(Phases::default().parts(), []);
        let prepared = Phases { prepare: Some(Prepare::default()), ..Phases::default() };
        assert!(prepared.parts().iter().all(|part| !part.paused));
    }

    #[test]
    fn the_time_left_counts_what_changes_meanwhile() {
        assert_eq!(copy_left_s(100, 50, 0), Some(2.0));
        assert_eq!(copy_left_s(100, 50, 25), Some(4.0));
        assert_eq!(copy_left_s(100, 50, 50), None);
        assert_eq!(copy_left_s(100, 0, 0), None);
        assert_eq!(copy_left_s(64 << 30, 10_000_001, 10_000_000), None, "2000 years are not known");
    }

    proptest! {
        #[test]
        fn however_many_rounds_there_are_their_number_is_bounded_and_nothing_is_lost(
            bytes in proptest::collection::vec(0u64..1 << 40, 0..300),
        ) {
            let mut phases = Phases::default();
            let mut sum = 0;
            for (index, bytes) in bytes.iter().enumerate() {
                let number = u32::try_from(index).unwrap() + 1;
                phases.add_round(round(number, *bytes));
                sum += bytes;
            }
            prop_assert!(phases.rounds.len() <= ROUNDS_MAX);
            prop_assert_eq!(phases.copied_bytes(), sum);
            prop_assert_eq!(phases.copy_ms(), bytes.len() as u64 * 10);
            let mut next = 1;
            for round in &phases.rounds {
                prop_assert_eq!(round.first, next);
                next = round.last + 1;
            }
        }
    }
}
