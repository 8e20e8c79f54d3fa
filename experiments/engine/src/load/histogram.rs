//! Latencies in buckets whose width is at most 1/64 of their value. So a percentile is wrong by less than 2 %,
//! and adding a value takes a few nanoseconds.

/// The logarithm of the number of buckets per doubling.
const SUB_BITS: u32 = 6;
const SUB: u64 = 1 << SUB_BITS;

#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = (64 - SUB_BITS as usize + 1) << SUB_BITS;
        Self { counts: vec![0; buckets], total: 0 }
    }
}

/// Values below `SUB` have a bucket each. For larger values the highest `SUB_BITS + 1` bits give the bucket.
fn bucket(value_ns: u64) -> usize {
    let shift = (u64::BITS - value_ns.leading_zeros()).saturating_sub(SUB_BITS + 1);
    let index = u64::from(shift) * SUB + (value_ns >> shift);
    usize::try_from(index).expect("there are a few thousand buckets")
}

/// The middle of a bucket.
fn value_ns(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / SUB).saturating_sub(1);
    let low = (bucket - shift * SUB) << shift;
    low + ((1 << shift) >> 1)
}

impl Histogram {
    pub fn add(&mut self, value_ns: u64) {
        self.counts[bucket(value_ns)] += 1;
        self.total += 1;
    }

    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    pub fn clear(&mut self) {
        self.counts.fill(0);
        self.total = 0;
    }

    /// The value in µs that `percent` of all values do not exceed; 0 if there are no values.
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of one request")]
    pub fn percentile_us(&self, percent: u64) -> f64 {
        let rank = (self.total * percent).div_ceil(100).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return value_ns(bucket) as f64 / 1000.0;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_back_within_two_percent() {
        for value in [0, 1, 63, 64, 65, 127, 128, 1000, 48_123, 1_000_000, 9_999_999_999] {
            let back = value_ns(bucket(value));
            assert!(back.abs_diff(value) * 50 <= value, "{value} became {back}");
        }
    }

    #[test]
    fn buckets_grow_with_values_and_leave_none_out() {
        let mut last = 0;
        for value in 0..100_000 {
            let bucket = bucket(value);
            assert!(bucket == last || bucket == last + 1, "{value}");
            last = bucket;
        }
        assert!(bucket(u64::MAX) < Histogram::default().counts.len());
    }

    #[test]
    fn percentiles_of_a_hundred_values() {
        let mut histogram = Histogram::default();
        (1..=100).for_each(|us| histogram.add(us * 1000));
        let near = |got: f64, want: f64| (got - want).abs() <= want * 0.02;
        assert!(near(histogram.percentile_us(50), 50.0));
        assert!(near(histogram.percentile_us(99), 99.0));
        assert!(near(histogram.percentile_us(100), 100.0));
    }

    #[test]
    fn no_values_have_percentile_zero() {
        assert!(Histogram::default().percentile_us(99) < f64::EPSILON);
    }

    #[test]
    fn merged_histograms_count_both() {
        let (mut a, mut b) = (Histogram::default(), Histogram::default());
        a.add(1000);
        b.add(3_000_000);
        a.merge(&b);
        assert_eq!(a.total(), 2);
        assert!(a.percentile_us(99) > 2900.0);
    }
}
