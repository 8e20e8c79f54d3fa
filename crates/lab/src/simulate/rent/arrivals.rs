//! Which jobs arrive, and when. It does not depend on the rule.

use super::file::Stream;
use super::market;
use crate::random::Random;

/// The standard deviation of a job's time, as a part of its mean: of a log-normal distribution.
const SPREAD: f64 = 0.8;
/// The standard deviation of the logarithm of a prediction's error. The median error is then 10 %; measured were 8 %
/// (`experiments/prediction`).
const ERROR: f64 = 0.15;

/// A job that arrives.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub at_ms: u64,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub compute_s: f64,
    pub predicted_s: f64,
    pub reads_bytes: u64,
    pub writes_bytes: u64,
    pub is_at_provider: bool,
    pub is_confined: bool,
    pub without_kvm: bool,
    /// Dollars.
    pub waiting_per_hour: f64,
    pub deadline_ms: Option<u64>,
    /// Dollars.
    pub budget: Option<f64>,
}

/// How much longer than predicted 9 of 10 runs take at most.
pub fn high() -> f64 {
    (ERROR * 1.2816).exp()
}

/// All jobs, in the order of their arrival.
pub fn of(streams: &[Stream], length_s: u64, seed: u64) -> Vec<Arrival> {
    let mut random = Random(seed);
    let mut all = Vec::new();
    for stream in streams {
        for _ in 0..stream.per_hour * length_s / 3600 {
            let at_s = random.between((0, length_s));
            all.push(one(stream, at_s, &mut random));
        }
        if stream.burst == 0 {
            continue;
        }
        // Somewhere in each of the times, all in one minute.
        for from_s in (0..length_s).step_by(usize::try_from(stream.every_s).unwrap_or(usize::MAX)) {
            let at_s = random.between((from_s, from_s + stream.every_s / 2));
            for _ in 0..stream.burst {
                let later_s = random.between((0, 60));
                all.push(one(stream, at_s + later_s, &mut random));
            }
        }
    }
    all.retain(|job| job.at_ms <= length_s * 1000);
    all.sort_by_key(|job| job.at_ms);
    all
}

fn one(stream: &Stream, at_s: u64, random: &mut Random) -> Arrival {
    let variance = (1.0 + SPREAD * SPREAD).ln();
    let factor = (variance.sqrt() * market::normal(random) - variance / 2.0).exp();
    let compute_s = (stream.compute_s as f64 * factor).max(1.0);
    let dollars = |money: perigee_model::money::Money| money.micros as f64 / 1e6;
    Arrival {
        at_ms: at_s * 1000,
        cpus: stream.cpus,
        memory_bytes: stream.memory_bytes,
        compute_s,
        predicted_s: compute_s * (ERROR * market::normal(random)).exp(),
        reads_bytes: stream.reads_bytes,
        writes_bytes: stream.writes_bytes,
        is_at_provider: stream.is_at_provider,
        is_confined: stream.is_confined,
        without_kvm: stream.without_kvm,
        waiting_per_hour: stream.waiting_per_hour.map_or(0.0, dollars),
        deadline_ms: stream.deadline_s.map(|deadline_s| (at_s + deadline_s) * 1000),
        budget: stream.budget.map(dollars),
    }
}
