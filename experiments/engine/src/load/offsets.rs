//! Chooses the offsets of requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// xorshift64*: it takes a few nanoseconds a number, and is good enough to spread offsets.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`. The bias of the multiplication does not matter here.
    pub fn below(&mut self, bound: u64) -> u64 {
        let high = (u128::from(self.next()) * u128::from(bound)) >> 64;
        u64::try_from(high).expect("less than the bound")
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.below(i as u64 + 1);
            items.swap(i, usize::try_from(j).expect("at most i"));
        }
    }
}

/// The offsets of a run, in units of its request's length.
#[derive(Debug, Clone)]
pub enum Pattern {
    /// Any of the first `units`, repeatedly.
    Random { units: u64 },
    /// The first `units` in order, repeatedly.
    Sequential { units: u64 },
    /// Each of these once, distributed over all connections. Then the run is over.
    Once(Arc<Vec<u64>>),
    /// Each connection uses all of these once, in this order.
    OnceEach(Arc<Vec<u64>>),
    /// Any of these, repeatedly.
    Among(Arc<Vec<u64>>),
}

impl Pattern {
    /// All of the first `units` in a random order, which is the same each time.
    pub fn shuffled(units: u64, seed: u64) -> Vec<u64> {
        let mut all: Vec<u64> = (0..units).collect();
        Random::new(seed).shuffle(&mut all);
        all
    }

    /// The number of units from the start of the export that the pattern may use.
    pub fn span(&self) -> u64 {
        match self {
            Self::Random { units } | Self::Sequential { units } => *units,
            Self::Once(units) | Self::OnceEach(units) | Self::Among(units) => {
                units.iter().max().map_or(0, |last| last + 1)
            }
        }
    }

    /// One source for each of `connections`.
    pub fn sources(&self, connections: usize, seed: u64) -> Vec<Source> {
        let shared = Arc::new(AtomicUsize::new(0));
        (0..connections)
            .map(|index| {
                let next = match self {
                    Self::Once(_) => shared.clone(),
                    _ => Arc::default(),
                };
                // Sequential readers start at different offsets, as different clients would.
                let units = match self {
                    Self::Random { units } | Self::Sequential { units } => *units,
                    _ => 0,
                };
                let start = units * index as u64 / connections as u64;
                let random = Random::new(seed * 4096 + index as u64);
                Source { pattern: self.clone(), random, at: start, next }
            })
            .collect()
    }
}

/// The offsets of one connection.
#[derive(Debug)]
pub struct Source {
    pattern: Pattern,
    random: Random,
    at: u64,
    next: Arc<AtomicUsize>,
}

impl Source {
    /// The next unit; `None` if there are no more.
    pub fn next(&mut self) -> Option<u64> {
        match &self.pattern {
            Pattern::Random { units } => Some(self.random.below(*units)),
            Pattern::Among(units) => {
                let index = self.random.below(units.len() as u64);
                units.get(usize::try_from(index).expect("below a length")).copied()
            }
            Pattern::Sequential { units } => {
                let unit = self.at;
                self.at = (self.at + 1) % units;
                Some(unit)
            }
            Pattern::Once(units) | Pattern::OnceEach(units) => {
                units.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_offsets_stay_below_their_bound_and_reach_all_of_it() {
        let mut source = Pattern::Random { units: 8 }.sources(1, 1).remove(0);
        let mut seen = [false; 8];
        for _ in 0..1000 {
            let unit = source.next().expect("there is no end");
            seen[usize::try_from(unit).expect("small")] = true;
        }
        assert_eq!(seen, [true; 8]);
    }

    #[test]
    fn a_sequential_reader_goes_round() {
        let mut source = Pattern::Sequential { units: 3 }.sources(1, 1).remove(0);
        let units: Vec<_> = (0..5).filter_map(|_| source.next()).collect();
        assert_eq!(units, [0, 1, 2, 0, 1]);
    }

    #[test]
    fn once_is_shared_out_without_repeats() {
        let order = Arc::new(Pattern::shuffled(100, 7));
        let mut sources = Pattern::Once(order).sources(3, 1);
        let mut got = Vec::new();
        'all: loop {
            for source in &mut sources {
                match source.next() {
                    Some(unit) => got.push(unit),
                    None => break 'all,
                }
            }
        }
        got.sort_unstable();
        assert_eq!(got, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn once_each_gives_every_connection_the_same_order() {
        let order = Arc::new(vec![5, 1, 3]);
        for mut source in Pattern::OnceEach(order).sources(2, 1) {
            assert_eq!(
                (0..4).map(|_| source.next()).collect::<Vec<_>>(),
                [Some(5), Some(1), Some(3), None]
            );
        }
    }
}
