//! What a provider does: spot prices, spot hosts that are taken back, refused requests, and how long starts take.
//!
//! **Taken back.** In each zone there are times with spot hosts of a kind, and times without. When a time without begins, all spot hosts of
//! the kind there are taken back, and until it ends each request is refused. The lengths of both have the quantiles of a published trace: spot
//! instances with 64 Intel CPUs in three zones of AWS (us-east-1b to 1d), looked at every 34 s for 152 h in April 2023, 221 times of each kind
//! (`preemption/1-node/aws-04-19-2023` of <https://github.com/skypilot-org/spot-traces>, commit 221da1a; Wu and others, Can't Be Late, NSDI
//! 2024). The trace's mean is 1.6 h with such hosts and 0.4 h without. Between two quantiles times differ by factors.
//!
//! **Prices.** A spot price changes every hour around the offer's price, with a coefficient of variation of 0.15, and keeps 0.9 of its
//! distance from the mean from one hour to the next. In 90 days of one small kind (2,758 prices in three regions until February 2026,
//! `spot_prices.csv` of <https://github.com/maliksudais24/AWS-EC2-Spot-Price-Prediction>) it is 0.23, 0.09 and 0.04. That list mixes the zones
//! of a region, so it does not say how the price of one zone goes from hour to hour: the 0.9 is our choice.
//!
//! **Starts** take the offer's time, times a log-normal factor whose logarithm has a standard deviation of 0.25: our choice, too.

use crate::random::Random;

/// The quantiles of the times with spot hosts, and without: the share, and seconds.
const WITH: [(f64, f64); 9] = [
    (0.0, 34.0),
    (0.05, 136.0),
    (0.1, 170.0),
    (0.25, 374.0),
    (0.5, 1360.0),
    (0.75, 5338.0),
    (0.9, 14314.0),
    (0.95, 26724.0),
    (1.0, 81974.0),
];
const WITHOUT: [(f64, f64); 9] = [
    (0.0, 34.0),
    (0.05, 102.0),
    (0.1, 170.0),
    (0.25, 272.0),
    (0.5, 544.0),
    (0.75, 1292.0),
    (0.9, 3298.0),
    (0.95, 4624.0),
    (1.0, 29240.0),
];
/// The mean of the times with spot hosts in that trace, in seconds.
pub const TAKEN_BACK_EVERY_S: f64 = 5861.0;

const VARIATION: f64 = 0.15;
const KEEPS: f64 = 0.9;
/// A price is between these parts of its mean.
const PRICES: (f64, f64) = (0.55, 1.45);
/// The standard deviation of the logarithm of a start's time.
const STARTS: f64 = 0.25;

/// A number with the mean 0 and the deviation 1, nearly normal: the sum of twelve even ones (the central limit theorem).
pub fn normal(random: &mut Random) -> f64 {
    (0..12).map(|_| random.share()).sum::<f64>() - 6.0
}

fn by_quantiles(of: &[(f64, f64)], random: &mut Random) -> f64 {
    let share = random.share();
    let pair = of.windows(2).find(|pair| share <= pair[1].0);
    let Some([(from, least), (to, most)]) = pair else { return of[of.len() - 1].1 };
    least * (most / least).powf((share - from) / (to - from))
}

/// When spot hosts of each offer can be had, and what they cost, for the whole run.
pub struct Market {
    offers: Vec<OfOffer>,
}

struct OfOffer {
    /// When the time without begins, and when it ends, in milliseconds.
    without: Vec<(u64, u64)>,
    /// The price in each hour, as a part of the mean.
    prices: Vec<f64>,
}

impl Market {
    pub fn new(offers: usize, length_s: u64, seed: u64) -> Self {
        let of_offer = |number: usize| {
            let mut random =
                Random(seed.wrapping_mul(0x9e37_79b9) ^ ((number as u64) << 40) ^ 0x5b07);
            OfOffer {
                without: without(length_s, &mut random),
                prices: prices(length_s, &mut random),
            }
        };
        Self { offers: (0..offers).map(of_offer).collect() }
    }

    /// A spot host of the offer can be had now.
    pub fn has(&self, offer: usize, now_ms: u64) -> bool {
        !self.offers[offer].without.iter().any(|(from, to)| (*from..*to).contains(&now_ms))
    }

    /// When the offer's spot hosts are taken back next.
    pub fn taken_back_ms(&self, offer: usize, now_ms: u64) -> Option<u64> {
        self.offers[offer].without.iter().map(|(from, _)| *from).find(|from| *from >= now_ms)
    }

    /// What a spot host costs now, as a part of the offer's price.
    pub fn price(&self, offer: usize, now_ms: u64) -> f64 {
        let prices = &self.offers[offer].prices;
        let hour = usize::try_from(now_ms / 3_600_000).unwrap_or(usize::MAX);
        prices.get(hour).or(prices.last()).copied().unwrap_or(1.0)
    }
}

fn without(length_s: u64, random: &mut Random) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    // It begins somewhere in a time with spot hosts.
    let mut now_s = by_quantiles(&WITH, random) * random.share();
    while now_s < length_s as f64 {
        let ends_s = now_s + by_quantiles(&WITHOUT, random);
        all.push((milliseconds(now_s), milliseconds(ends_s)));
        now_s = ends_s + by_quantiles(&WITH, random);
    }
    all
}

fn prices(length_s: u64, random: &mut Random) -> Vec<f64> {
    let mut away = VARIATION * normal(random);
    let step = VARIATION * (1.0 - KEEPS * KEEPS).sqrt();
    let hours = length_s / 3600 + 1;
    let next = |_| {
        let price = (1.0 + away).clamp(PRICES.0, PRICES.1);
        away = KEEPS * away + step * normal(random);
        price
    };
    (0..hours).map(next).collect()
}

pub fn milliseconds(seconds: f64) -> u64 {
    crate::simulate::network::whole_ms(seconds)
}

/// How long a start takes, in milliseconds.
pub fn start_ms(boot_s: u64, random: &mut Random) -> u64 {
    milliseconds(boot_s as f64 * (STARTS * normal(random)).exp())
}

/// The high end of a start, in seconds: 9 of 10 take at most so long.
pub fn start_high_s(boot_s: u64) -> f64 {
    boot_s as f64 * (STARTS * 1.2816).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_with_spot_hosts_have_the_quantiles_of_the_trace() {
        let mut random = Random(1);
        let mut all: Vec<f64> = (0..20_000).map(|_| by_quantiles(&WITH, &mut random)).collect();
        all.sort_unstable_by(f64::total_cmp);
        assert!((all[10_000] / 1360.0 - 1.0).abs() < 0.1, "{}", all[10_000]);
        let mean = all.iter().sum::<f64>() / 20_000.0;
        assert!((mean / TAKEN_BACK_EVERY_S - 1.0).abs() < 0.25, "{mean}");
    }

    #[test]
    fn a_spot_host_can_be_had_until_it_is_taken_back() {
        let market = Market::new(2, 100_000, 7);
        let (from, to) = market.offers[0].without[0];
        assert_eq!(market.taken_back_ms(0, from), Some(from));
        assert!(!market.has(0, from) && market.has(0, to));
        assert!((PRICES.0..=PRICES.1).contains(&market.price(1, 1)));
    }
}
