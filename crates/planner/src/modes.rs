//! Chooses how a VM's memory is sent in a live migration.
//!
//! | mode | what it is |
//! |---|---|
//! | plain | pages are sent as they are |
//! | compressed | QEMU's multifd with zstd: fewer bytes on the link, more work for the CPUs |
//! | slowed | the vCPUs are stopped for a part of the time (QEMU's auto-converge), so that they change less memory |
//!
//! A slowed VM may be sent compressed too. Auto-converge is always on: QEMU slows down every VM that changes more
//! than half of what is sent, so no other prediction is made for such a VM. Pre-copy sends all pages, then repeatedly those that changed in the
//! meantime, until the rest fits into the pause (Clark et al., Live Migration of Virtual Machines, NSDI 2005). With
//! memory `V`, rate `R` and dirty rate `D` the rounds take `V/R`, `V/R · D/R`, `V/R · (D/R)²` …, a geometric series.
//! It ends only if `D` is clearly below `R`.
//!
//! QEMU counts its limit in bytes before compression. Under a limit, compression is therefore predicted and used only
//! so far that memory which does not compress at all still fits through the link ([`CompressionGain::under_limit`]).
//!
//! Post-copy is not used. With it the VM runs at the destination before all its memory is there, so the loss of either
//! host ends it. QEMU also needs `userfaultfd` for it, which the kernel refuses to unprivileged processes.

use perigee_model::phases::DOWNTIME_LIMIT_FIRST_MS;
use perigee_model::units::format_seconds;

use crate::moving::{SPEED_WHILE_COPIED, whole_bytes};
use crate::refused::Refused;

/// QEMU pauses the VM when the rest can be sent within this time.
const DOWNTIME_LIMIT_S: f64 = DOWNTIME_LIMIT_FIRST_MS as f64 / 1e3;

const ROUNDS_MAX: u32 = 30;

/// QEMU slows a VM down after two rounds in which it changed more than half of what was sent.
const ROUNDS_BEFORE_SLOWED: u32 = 2;
/// A slowed VM changes at most this share of what is sent.
const SHARE_CHANGED: f64 = 0.5;
/// How much QEMU slows a VM down: not at all, its steps with its own settings, and its limit.
const PERCENT_STEPS: [u8; 10] = [0, 20, 30, 40, 50, 60, 70, 80, 90, PERCENT_MAX];
const PERCENT_MAX: u8 = 99;

/// Compression must save at least this share of the time, because it takes CPUs from other VMs too.
const WORTH_COMPRESSING: f64 = 0.1;

/// How compression changes the rate of sending, counted in bytes before compression.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompressionGain {
    /// How many times faster memory is sent while the link is the bottleneck.
    pub gain: f64,
    /// The highest rate: beyond it the hosts' CPUs are the bottleneck.
    pub rate_max_bytes_per_s: f64,
}

impl Default for CompressionGain {
    /// Measured with a guest of 256 MiB: 4.8 s instead of 9.7 s over 100 Mbit/s (QEMU 7.2, zstd, two channels). The
    /// rate of the CPUs is assumed: on a link without a limit, compression took longer.
    fn default() -> Self {
        Self { gain: 2.0, rate_max_bytes_per_s: 30.0 * f64::from(1 << 20) }
    }
}

/// The gain that is used under a limit of 80 % of the link: with memory that does not compress, it is 100 %.
const GAIN_UNDER_LIMIT_MAX: f64 = 1.25;

impl CompressionGain {
    /// What of it is used where a limit leaves a part of the link to others.
    #[must_use]
    pub fn under_limit(self) -> Self {
        Self { gain: self.gain.min(GAIN_UNDER_LIMIT_MAX), ..self }
    }
}

/// The memory to send.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub first_bytes: f64,
    /// The time that QEMU needs to look through it.
    pub scan_s: f64,
    pub dirty_bytes_per_s: f64,
}

/// How memory is sent, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mode {
    /// Compressed with zstd.
    pub compressed: bool,
    /// The share of the time in which the vCPUs are stopped from the third round on.
    pub throttle_percent: Option<u8>,
    /// Why this mode was chosen, in plain words.
    pub why: String,
}

impl Mode {
    /// For a move that a person wants, and that can't be predicted. If it would not end, all is done so that it may.
    pub fn without_prediction(refused: &Refused) -> Self {
        if matches!(refused, Refused::WouldNotConverge { .. }) {
            let why = format!(
                "memory is sent compressed, and the VM is slowed down by {PERCENT_MAX} % meanwhile: {refused}"
            );
            return Self { compressed: true, throttle_percent: Some(PERCENT_MAX), why };
        }
        Self { why: format!("memory is sent as it is: {refused}"), ..Self::default() }
    }
}

/// The prediction for one mode.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Copying {
    pub mode: Mode,
    /// Before compression.
    pub bytes: f64,
    pub copy_s: f64,
    /// The time that the job loses meanwhile, without the pause.
    pub lost_s: f64,
}

/// Chooses the mode with which the job loses the least time. The VM is slowed down only if copying would not end
/// otherwise. `rate` is what the link carries for this migration. `None` if copying would not end in any mode.
pub(crate) fn choose(memory: Memory, rate: f64, compression: CompressionGain) -> Option<Copying> {
    let faster = (rate * compression.gain).min(compression.rate_max_bytes_per_s);
    let (plain, compressed) = (copying(memory, rate, false), copying(memory, faster, true));
    let (mut chosen, why) = match (plain, compressed) {
        (Some(plain), Some(compressed)) => {
            let pays = compressed.lost_s < plain.lost_s * (1.0 - WORTH_COMPRESSING);
            let (chosen, other) = if pays { (compressed, plain) } else { (plain, compressed) };
            let why = format!("{} to copy, {}", format_seconds(chosen.copy_s), other_way(&other));
            (chosen, why)
        }
        (Some(only), None) | (None, Some(only)) => {
            let why = format!("{}, copying would not end", how(!only.mode.compressed));
            (only, why)
        }
        (None, None) => return None,
    };
    let mut words = format!("memory is sent {}: {why}", how(chosen.mode.compressed));
    if let Some(percent) = chosen.mode.throttle_percent {
        words = format!(
            "{words}; the VM is slowed down by {percent} % meanwhile, because it changes {}/s of its memory and the \
             link carries {}/s",
            whole_bytes(memory.dirty_bytes_per_s),
            whole_bytes(rate)
        );
    }
    chosen.mode.why = words;
    Some(chosen)
}

fn other_way(other: &Copying) -> String {
    let slowed = other
        .mode
        .throttle_percent
        .map_or_else(String::new, |percent| format!(", with the VM slowed down by {percent} %"));
    format!("{} {}{slowed}", format_seconds(other.copy_s), how(other.mode.compressed))
}

fn how(compressed: bool) -> &'static str {
    if compressed { "compressed" } else { "as it is" }
}

/// With a VM that is slowed down as little as is enough; `None` if it would not end.
fn copying(memory: Memory, rate: f64, compressed: bool) -> Option<Copying> {
    let share = |percent: u8| f64::from(percent) / 100.0;
    let percent = PERCENT_STEPS.into_iter().find(|percent| {
        memory.dirty_bytes_per_s * (1.0 - share(*percent)) <= rate * SHARE_CHANGED
    })?;
    let rounds = Rounds::of(memory, rate, share(percent))?;
    let throttle_percent = (percent > 0).then_some(percent);
    let mode = Mode { compressed, throttle_percent, why: String::new() };
    let copy_s = rounds.bytes / rate + memory.scan_s;
    let slowed_s = rounds.slowed_bytes / rate;
    let speed_slowed = SPEED_WHILE_COPIED * (1.0 - share(percent));
    let lost_s = (copy_s - slowed_s) * (1.0 - SPEED_WHILE_COPIED) + slowed_s * (1.0 - speed_slowed);
    Some(Copying { mode, bytes: rounds.bytes, copy_s, lost_s })
}

/// The rounds of a migration that ends.
#[derive(Debug, Clone, Copy, Default)]
struct Rounds {
    bytes: f64,
    /// How many of them are sent while the VM is slowed down.
    slowed_bytes: f64,
}

impl Rounds {
    fn of(memory: Memory, rate: f64, slowed_share: f64) -> Option<Self> {
        let mut round_bytes = memory.first_bytes;
        let mut rounds = Self { bytes: round_bytes, slowed_bytes: 0.0 };
        for round in 1..=ROUNDS_MAX {
            let is_slowed = slowed_share > 0.0 && round > ROUNDS_BEFORE_SLOWED;
            let dirty = memory.dirty_bytes_per_s * if is_slowed { 1.0 - slowed_share } else { 1.0 };
            // A page that changed twice is sent once.
            round_bytes = (round_bytes * dirty / rate).min(memory.first_bytes);
            rounds.bytes += round_bytes;
            rounds.slowed_bytes += if is_slowed { round_bytes } else { 0.0 };
            if round_bytes <= rate * DOWNTIME_LIMIT_S {
                return Some(rounds);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixture::{assert_close, host_id};

    const MIB: f64 = 1048576.0;

    fn memory(dirty_mib: f64) -> Memory {
        Memory { first_bytes: 256.0 * MIB, scan_s: 0.0, dirty_bytes_per_s: dirty_mib * MIB }
    }

    fn chosen(dirty_mib: f64, rate_mib: f64) -> Option<Copying> {
        choose(memory(dirty_mib), rate_mib * MIB, CompressionGain::default())
    }

    #[test]
    fn memory_is_compressed_on_a_thin_link_and_not_on_a_fast_one() {
        let thin = chosen(0.0, 12.5).unwrap();
        assert!(thin.mode.compressed);
        assert_close(thin.copy_s, 256.0 / 25.0);
        assert_eq!(thin.mode.why, "memory is sent compressed: 10 s to copy, 20 s as it is");
        let fast = chosen(0.0, 100.0).unwrap();
        assert!(!fast.mode.compressed);
        assert_eq!(fast.mode.why, "memory is sent as it is: 2.6 s to copy, 8.5 s compressed");
    }

    #[test]
    fn a_vm_that_changes_its_memory_faster_than_it_is_sent_is_compressed_before_it_is_slowed() {
        let compressed = chosen(12.0, 12.5).unwrap();
        assert_eq!((compressed.mode.compressed, compressed.mode.throttle_percent), (true, None));
        assert!(compressed.mode.why.contains("with the VM slowed down by 50 %"), "{compressed:?}");
        let slowed = chosen(200.0, 100.0).unwrap();
        // At 80 % it changes 40 MiB/s, which is below half of the rate.
        assert_eq!((slowed.mode.compressed, slowed.mode.throttle_percent), (false, Some(80)));
        let expected = "; the VM is slowed down by 80 % meanwhile, because it changes 200 MiB/s of its memory and \
                        the link carries 100 MiB/s";
        assert!(slowed.mode.why.ends_with(expected), "{}", slowed.mode.why);
    }

    /// QEMU slows such a VM down, whoever expects it.
    #[test]
    fn a_vm_that_changes_more_than_half_of_what_is_sent_is_predicted_as_slowed() {
        let slowed = chosen(80.0, 100.0).unwrap();
        assert_eq!(slowed.mode.throttle_percent, Some(40));
        // 256 MiB, two rounds at full speed, and then each has 48 % of the one before.
        let full_mib = 256.0 * (1.0 + 0.8 + 0.64);
        assert!(slowed.bytes > full_mib * MIB && slowed.bytes < (full_mib + 256.0 * 0.64) * MIB);
        assert_eq!(chosen(50.0, 100.0).unwrap().mode.throttle_percent, None);
    }

    #[test]
    fn under_a_limit_memory_that_does_not_compress_fits_through_the_link() {
        let limit_mib = 0.8 * 12.5;
        let gain = CompressionGain::default().under_limit().gain;
        assert_close(limit_mib * gain, 12.5);
    }

    #[test]
    fn a_slowed_vm_sends_its_first_rounds_at_full_speed() {
        let slowed = chosen(200.0, 100.0).unwrap();
        // 256 MiB, then twice at most 256 MiB, and then 102.4, 41, 16.4 and 6.6 MiB.
        let sent_mib = 3.0 * 256.0 + 102.4 + 40.96 + 16.384 + 6.5536;
        assert_close(slowed.bytes, sent_mib * MIB);
        assert_close(slowed.copy_s, sent_mib / 100.0);
        let slowed_s = (102.4 + 40.96 + 16.384 + 6.5536) / 100.0;
        assert_close(slowed.lost_s, 7.68 * 0.5 + slowed_s * 0.9);
    }

    #[test]
    fn a_move_that_is_not_predicted_says_why() {
        let (from, to) = (host_id("home1"), host_id("cloud1"));
        let unknown = Refused::LinkNotMeasured { from: from.clone(), to: to.clone() };
        let plain = Mode::without_prediction(&unknown);
        assert_eq!((plain.compressed, plain.throttle_percent), (false, None));
        let why = "memory is sent as it is: the link from home1 to cloud1 is not measured yet";
        assert_eq!(plain.why, why);
        let (dirty, rate) = ("1 TiB".to_owned(), "1 MiB".to_owned());
        let endless = Refused::WouldNotConverge { from, to, dirty, rate };
        let slowed = Mode::without_prediction(&endless);
        assert_eq!((slowed.compressed, slowed.throttle_percent), (true, Some(99)));
        assert!(slowed.why.ends_with("would not end"), "{}", slowed.why);
    }

    #[test]
    fn memory_that_changes_faster_than_any_mode_can_send_it_is_not_sent() {
        assert_eq!(chosen(10_000.0, 10.0), None);
    }

    proptest! {
        #[test]
        fn no_other_mode_loses_much_less(
            dirty_mib in 0.0..400.0f64, rate_mib in 1.0..400.0f64,
            gain in 1.0..4.0f64, rate_max_mib in 10.0..400.0f64,
        ) {
            let compression = CompressionGain { gain, rate_max_bytes_per_s: rate_max_mib * MIB };
            let memory = memory(dirty_mib);
            let rate = rate_mib * MIB;
            let faster = (rate * gain).min(compression.rate_max_bytes_per_s);
            let chosen = choose(memory, rate, compression);
            let all = [copying(memory, rate, false), copying(memory, faster, true)];
            for other in all.into_iter().flatten() {
                let chosen = chosen.as_ref().expect("one mode ends");
                prop_assert!(chosen.lost_s <= other.lost_s / (1.0 - WORTH_COMPRESSING) + 1e-9);
                let sent = if chosen.mode.compressed { faster } else { rate };
                let is_slowed = chosen.mode.throttle_percent.is_some();
                prop_assert_eq!(is_slowed, memory.dirty_bytes_per_s > sent * SHARE_CHANGED);
            }
        }
    }
}
