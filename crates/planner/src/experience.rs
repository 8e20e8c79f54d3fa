//! Learns from earlier live migrations, phase by phase.
//!
//! From each move it takes what does not depend on the VM and the link: the time of the preparation and of the
//! pause without their round trips and bytes, and the time that QEMU needs to scan a byte of memory. It uses
//! the link as it was measured then, because a later measurement says nothing about an old move. A compressed move
//! shows how much faster its memory went than the link's rate, and nothing about scanning.

use perigee_model::phases::{CopyRound, Pause, Phases, Prepare};

use crate::facts::PastMove;
use crate::figures::Figures;
use crate::hosts::median;
use crate::modes::CompressionGain;

/// Round trips before the first byte, counted in the protocol: issue the epochs (1), attach the disks (2),
/// define the VM at the destination and get its address (3), ask the source to send (1), connect (1).
pub(crate) const PREPARE_ROUND_TRIPS: f64 = 8.0;

/// Round trips in the pause: flush a disk whose home is another host (1), raise its epoch (1), send the last
/// state (1), learn that the guest runs (1).
pub(crate) const PAUSE_ROUND_TRIPS: f64 = 4.0;

/// Medians over the moves that measured a figure, so that one move during a fault says nothing of the others. If no move
/// did, the figure is 0 and the assumption is named.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Experience {
    /// The preparation without its round trips.
    pub prepare_s: f64,
    /// Bytes sent in the first round for each byte of memory. It is below 1 because pages of zeros are not
    /// sent.
    pub share_sent: f64,
    /// The time of the first round without its bytes: scanning the memory for pages to send.
    pub scan_s_per_byte: f64,
    /// The pause without its round trips and without the rest of the memory.
    pub pause_s: f64,
    pub compression: CompressionGain,
}

impl Experience {
    /// What earlier moves have in common, the usual of each figure. Without any, what was measured when this was
    /// written is assumed; `figures` gets a line for each.
    pub fn of(moves: &[PastMove], figures: &mut Figures) -> Self {
        let usable: Vec<&PastMove> =
            moves.iter().filter(|m| m.memory_bytes > 0 && m.rate_bytes_per_s > 0).collect();
        let prepare_s = usual(usable.iter().filter_map(|m| Some(prepare_s(m, m.phases.prepare?))));
        let first = || usable.iter().filter_map(|m| Some((m, first_round(&m.phases)?)));
        let share_sent =
            usual(first().map(|(m, round)| round.bytes as f64 / m.memory_bytes as f64));
        let plain = first().filter(|(m, _)| !m.compressed);
        let scan_s_per_byte = usual(plain.map(|(m, round)| scan_s_per_byte(m, round)));
        let pause_s = usual(usable.iter().filter_map(|m| Some(pause_s(m, m.phases.pause?))));
        match (prepare_s, share_sent) {
            (None, None) => {
                figures.assumed("all of the memory is sent, and starting QEMU takes no time");
            }
            _ => figures.measured(words(usable.len(), prepare_s, share_sent, pause_s)),
        }
        Self {
            prepare_s: prepare_s.unwrap_or(0.0),
            share_sent: share_sent.unwrap_or(1.0).min(1.0),
            scan_s_per_byte: scan_s_per_byte.unwrap_or(0.0),
            pause_s: pause_s.unwrap_or(0.0),
            compression: compression(moves),
        }
    }
}

/// A greater gain is one of a link that was probed badly.
const GAIN_MAX: f64 = 4.0;

/// What compression has done for the rate of earlier moves, beside the assumption, which counts as one move.
///
/// A move under a limit shows no more gain than the limit let it have, and one that was slower than its link waited
/// for the CPUs. So both say nothing about the gain.
pub fn compression(moves: &[PastMove]) -> CompressionGain {
    let compressed = || moves.iter().filter(|m| m.compressed && m.rate_bytes_per_s > 0);
    let rate = |m: &PastMove| m.phases.copy_rate_bytes_per_s().map(|rate| rate as f64);
    let assumed = CompressionGain::default();
    let free = compressed().filter(|m| m.max_bytes_per_s.is_none());
    let gains = free.filter_map(|m| Some(rate(m)? / m.rate_bytes_per_s as f64));
    let of_the_link = gains.filter(|gain| *gain >= 1.0).map(|gain| gain.min(GAIN_MAX));
    let gain = mean(of_the_link.chain([assumed.gain])).unwrap_or(assumed.gain);
    // One VM's memory may compress far better than that of others.
    let rates = usual(compressed().filter_map(rate));
    let rate_max_bytes_per_s = rates.unwrap_or_default().max(assumed.rate_max_bytes_per_s);
    CompressionGain { gain, rate_max_bytes_per_s }
}

/// The rate that an earlier move could have on its link.
fn link_rate(past: &PastMove) -> f64 {
    let rate = past.rate_bytes_per_s;
    past.max_bytes_per_s.map_or(rate, |most| most.clamp(1, rate)) as f64
}

fn words(count: usize, prepare: Option<f64>, share: Option<f64>, pause: Option<f64>) -> String {
    let seconds = |s: Option<f64>| s.map_or_else(|| "unknown".to_owned(), |s| format!("{s:.2} s"));
    let share = share.map_or_else(|| "unknown".to_owned(), |s| format!("{:.0} %", s * 100.0));
    let moves =
        if count == 1 { "1 earlier move".to_owned() } else { format!("{count} earlier moves") };
    format!(
        "{moves}: preparation {}, {share} of the memory sent at first, pause {}, beside bytes and round trips",
        seconds(prepare),
        seconds(pause)
    )
}

fn prepare_s(past: &PastMove, prepare: Prepare) -> f64 {
    let all_s = prepare.total_ms() as f64 / 1e3;
    (all_s - PREPARE_ROUND_TRIPS * past.rtt_ms / 1e3).max(0.0)
}

/// The first round, unless it was merged with the next one.
fn first_round(phases: &Phases) -> Option<CopyRound> {
    phases.rounds.first().copied().filter(|round| (round.first, round.last) == (1, 1))
}

fn scan_s_per_byte(past: &PastMove, round: CopyRound) -> f64 {
    let bytes_s = round.bytes as f64 / link_rate(past);
    (round.duration_ms as f64 / 1e3 - bytes_s).max(0.0) / past.memory_bytes as f64
}

fn pause_s(past: &PastMove, pause: Pause) -> f64 {
    let fixed_us = pause.total_us().saturating_sub(pause.remainder_us);
    (fixed_us as f64 / 1e6 - PAUSE_ROUND_TRIPS * past.rtt_ms / 1e3).max(0.0)
}

fn usual(values: impl Iterator<Item = f64>) -> Option<f64> {
    median(&mut values.collect::<Vec<_>>())
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0.0);
    for value in values {
        sum += value;
        count += 1.0;
    }
    (count > 0.0).then(|| sum / count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    /// 1 GiB of memory, half of it sent, over the link of 128 MiB/s and 16 ms.
    fn past() -> PastMove {
        let round = |number, duration_ms, mib: u64| CopyRound {
            first: number,
            last: number,
            duration_ms,
            bytes: mib * MIB,
            dirty_bytes_per_s: 0,
        };
        PastMove {
            memory_bytes: 1024 * MIB,
            rate_bytes_per_s: WAN_BYTES_PER_S,
            rtt_ms: 16.0,
            phases: Phases {
                // 1,000 ms beside 8 round trips.
                prepare: Some(Prepare {
                    epochs_ms: 28,
                    attach_ms: 100,
                    qemu_ms: 900,
                    begin_ms: 100,
                }),
                // 4 s for the bytes, 2 s for scanning.
                rounds: vec![round(1, 6000, 512), round(2, 100, 10)],
                // 40 ms beside 4 round trips and the remainder.
                pause: Some(Pause {
                    flush_us: 20_000,
                    record_us: 4_000,
                    epochs_us: 20_000,
                    resume_us: 0,
                    remainder_us: 500_000,
                    device_us: 20_000,
                    arrival_us: 40_000,
                    remainder_bytes: 64 * MIB,
                }),
            },
            ..PastMove::default()
        }
    }

    #[test]
    fn each_phase_is_learned_without_its_link_and_its_vm() {
        let mut figures = Figures::default();
        let learned = Experience::of(&[past()], &mut figures);
        assert_close(learned.prepare_s, 1.0);
        assert_close(learned.share_sent, 0.5);
        assert_close(learned.scan_s_per_byte * 1024.0 * MIB as f64, 2.0);
        assert_close(learned.pause_s, 0.04);
        let words = figures.into_vec().join("\n");
        assert!(words.contains("1 earlier move: preparation 1.00 s, 50 %"), "{words}");
    }

    #[test]
    fn a_move_during_a_fault_says_nothing_of_the_next_ones() {
        let mut faulty = past();
        faulty.phases.prepare = Some(Prepare { qemu_ms: 60_000, ..Prepare::default() });
        faulty.phases.pause = Some(Pause { epochs_us: 10_000_000, ..Pause::default() });
        let learned = Experience::of(&[past(), faulty, past()], &mut Figures::default());
        assert_close(learned.prepare_s, 1.0);
        assert_close(learned.pause_s, 0.04);
    }

    #[test]
    fn a_move_that_was_not_watched_teaches_only_what_was_seen() {
        let mut unseen = past();
        unseen.phases = Phases { prepare: unseen.phases.prepare, ..Phases::default() };
        let learned = Experience::of(&[unseen], &mut Figures::default());
        assert_close(learned.prepare_s, 1.0);
        assert_close(learned.share_sent, 1.0);
        assert_close(learned.pause_s, 0.0);
    }

    #[test]
    fn a_compressed_move_teaches_its_gain_and_nothing_about_scanning() {
        let mut compressed = PastMove { compressed: true, ..past() };
        // 522 MiB in 6.1 s.
        compressed.rate_bytes_per_s = 64 * MIB;
        let learned = Experience::of(&[compressed], &mut Figures::default());
        assert_close(learned.scan_s_per_byte, 0.0);
        assert_close(learned.share_sent, 0.5);
        assert_close(learned.compression.gain, f64::midpoint(2.0, 522.0 / 6.1 / 64.0));
        assert_close(learned.compression.rate_max_bytes_per_s, 522.0 / 6.1 * MIB as f64);
    }

    /// All later moves over fast links were compressed because of it, and took longer so.
    #[test]
    fn memory_that_compresses_oddly_well_says_nothing_of_other_vms() {
        let mut odd = PastMove { compressed: true, rate_bytes_per_s: 8 * MIB, ..past() };
        odd.phases.rounds =
            vec![CopyRound { duration_ms: 1000, bytes: 500 * MIB, ..past().phases.rounds[0] }];
        let other = PastMove { compressed: true, ..past() };
        let learned = compression(&[odd, other.clone(), other]);
        assert_close(learned.rate_max_bytes_per_s, 522.0 / 6.1 * MIB as f64);
    }

    #[test]
    fn a_move_that_its_limit_or_the_cpus_slowed_down_does_not_lower_the_gain() {
        let assumed = CompressionGain::default().gain;
        let limited = PastMove { compressed: true, max_bytes_per_s: Some(80 * MIB), ..past() };
        assert_close(compression(&[limited]).gain, assumed);
        // 86 MiB/s over a link of 128 MiB/s.
        let slow = PastMove { compressed: true, ..past() };
        assert_close(compression(&[slow]).gain, assumed);
        // A link that was probed with a thousandth of its rate.
        let lucky =
            PastMove { compressed: true, rate_bytes_per_s: WAN_BYTES_PER_S / 1000, ..past() };
        assert_close(compression(&[lucky]).gain, 3.0);
        // What was sent is still in buffers.
        let mut short = PastMove { compressed: true, rate_bytes_per_s: 8 * MIB, ..past() };
        short.phases.rounds =
            vec![CopyRound { duration_ms: 50, bytes: 16 * MIB, ..past().phases.rounds[0] }];
        assert_eq!(compression(&[short]), CompressionGain::default());
    }

    #[test]
    fn rounds_that_were_made_one_do_not_count_as_the_first() {
        let mut thinned = past();
        thinned.phases.rounds[0].last = 2;
        let learned = Experience::of(&[thinned], &mut Figures::default());
        assert_close(learned.share_sent, 1.0);
    }

    #[test]
    fn without_earlier_moves_the_assumption_is_named() {
        let mut figures = Figures::default();
        Experience::of(&[], &mut figures);
        assert!(figures.into_vec()[0].starts_with("assumed: all of the memory"));
    }
}
