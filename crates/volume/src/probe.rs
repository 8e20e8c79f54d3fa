//! Measures reads of another host's export: the latency of a block, and the rate of many reads at once.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::{StreamExt, TryStreamExt, stream};
use perigee_block::device::Device;
use perigee_model::Problem;
use perigee_model::limits::{OutOfLimits, PROBE_REQUEST_BYTES, PROBE_REQUESTS};
use perigee_model::volume::{BlockProbe, ProbeBlocks};
use perigee_nbd::NbdDevice;

use crate::remotes::Remotes;

const IN_FLIGHT: usize = 16;
/// The deadline for a host that stops answering.
const PATIENCE: Duration = Duration::from_secs(10);

/// # Errors
/// `Invalid` when the figures asked for are out of bounds, `NotFound` and `Unavailable` when the
/// export can't be opened or read.
pub async fn probe(remotes: &Remotes, ask: &ProbeBlocks) -> Result<BlockProbe, Problem> {
    let what = format!("can't probe {:?} at {}", ask.export, ask.nbd_addr);
    let invalid = |error: OutOfLimits| error.problem(&what);
    PROBE_REQUESTS.check(ask.requests).map_err(invalid)?;
    PROBE_REQUEST_BYTES.check(ask.request_bytes).map_err(invalid)?;
    let mut remote = remotes.export(ask.nbd_addr.clone(), ask.export.clone());
    remote.patience = PATIENCE;
    let device = Arc::new(NbdDevice::open(remote).await?);
    let places = device.size_bytes() / u64::from(ask.request_bytes);
    if places == 0 {
        return Err(Problem::invalid(what, "the export is smaller than one request"));
    }
    let mut random = Random::from_clock();
    let mut offset = || random.below(places) * u64::from(ask.request_bytes);
    let failed = |error| Problem::unavailable(&what, error);

    let mut latencies = Vec::with_capacity(ask.requests as usize);
    for _ in 0..ask.requests {
        let started = Instant::now();
        device.read(offset(), ask.request_bytes).await.map_err(failed)?;
        latencies.push(started.elapsed());
    }
    latencies.sort_unstable();

    let offsets: Vec<u64> = (0..ask.requests).map(|_| offset()).collect();
    let started = Instant::now();
    stream::iter(offsets)
        .map(|offset| device.read(offset, ask.request_bytes))
        .buffer_unordered(IN_FLIGHT)
        .try_for_each(|_| std::future::ready(Ok(())))
        .await
        .map_err(failed)?;
    let bytes = u128::from(ask.requests) * u128::from(ask.request_bytes);
    let rate = bytes * 1_000_000_000 / started.elapsed().as_nanos().max(1);
    Ok(BlockProbe {
        latency_median_us: percentile_us(&latencies, 50),
        latency_p95_us: percentile_us(&latencies, 95),
        rate_bytes_per_s: u64::try_from(rate).unwrap_or(u64::MAX),
    })
}

/// `sorted` has at least one element.
fn percentile_us(sorted: &[Duration], percent: usize) -> u64 {
    let index = (sorted.len() * percent / 100).min(sorted.len() - 1);
    u64::try_from(sorted[index].as_micros()).unwrap_or(u64::MAX)
}

/// SplitMix64: good enough to avoid read-ahead and caches, without a dependency.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn from_clock() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(since.as_secs() ^ (u64::from(since.subsec_nanos()) << 32))
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_a_few_and_of_many() {
        let one = [Duration::from_micros(7)];
        assert_eq!((percentile_us(&one, 50), percentile_us(&one, 95)), (7, 7));
        let hundred: Vec<Duration> = (0..100).map(Duration::from_micros).collect();
        assert_eq!((percentile_us(&hundred, 50), percentile_us(&hundred, 95)), (50, 95));
    }

    #[test]
    fn random_numbers_stay_below_the_limit_and_differ() {
        let mut random = Random(1);
        let numbers: Vec<u64> = (0..1000).map(|_| random.below(50)).collect();
        assert!(numbers.iter().all(|n| *n < 50));
        assert!((0..50).all(|n| numbers.contains(&n)));
    }
}
