//! Numbers that the same seed gives again.

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same seed gives the same numbers.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from the first to the last, both included.
    pub fn between(&mut self, (first, last): (u64, u64)) -> u64 {
        first + self.next() % (last - first + 1)
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        let at = usize::try_from(self.next()).unwrap_or(0) % from.len().max(1);
        from.get(at)
    }

    /// A number from 0 up to, but without, 1.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
