//! Values with their uncertainty.

use perigee_model::plan::Estimate;

/// Measured: relative to a prediction from runs at another time, 1 of 20 runs took less than 0.8 times as long, and 1
/// of 20 more than 1.35 times.
const DELAYED: f64 = 1.45;

/// 9 of 10 values are within this many standard deviations of the mean.
pub(crate) const NINE_OF_TEN: f64 = 1.645;

/// An expected value, and the distances below and above it within which the true value is in 9 of 10 cases. The
/// two distances differ if one side is better known. For example, a job has at most as many dependent round
/// trips as requests, and perhaps far fewer.
///
/// Distances of independent values add as their squares do. All distances are those of 9 in 10 cases, so
/// weights made from them are the same as weights made from standard deviations.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Spread {
    pub expected: f64,
    pub down: f64,
    pub up: f64,
}

impl Spread {
    /// A range without width.
    pub fn exactly(expected: f64) -> Self {
        Self { expected, down: 0.0, up: 0.0 }
    }

    /// `expected` lies within the range also if `low` and `high` do not enclose it.
    pub fn between(low: f64, expected: f64, high: f64) -> Self {
        Self { expected, down: (expected - low).max(0.0), up: (high - expected).max(0.0) }
    }

    /// A value whose distance to both sides is this share of it.
    pub fn relative(expected: f64, share: f64) -> Self {
        let distance = expected.abs() * share;
        Self { expected, down: distance, up: distance }
    }

    /// A time that differs by this share from one measurement to the next. Downwards it is this share, and
    /// upwards more, because a machine that others use delays a run more often than it speeds it up.
    pub fn repeated(expected: f64, share: f64) -> Self {
        let distance = expected.abs() * share;
        Self { expected, down: distance, up: distance * DELAYED }
    }

    /// Zero, with this distance to both sides.
    pub fn noise(distance: f64) -> Self {
        Self { expected: 0.0, down: distance, up: distance }
    }

    /// The sum with an independent value.
    pub fn plus(self, other: Self) -> Self {
        Self {
            expected: self.expected + other.expected,
            down: self.down.hypot(other.down),
            up: self.up.hypot(other.up),
        }
    }

    /// The sum with a value that is wrong in the same direction at the same time. Times on one host are an example: all
    /// of them are longer while others use the host.
    pub fn together(self, other: Self) -> Self {
        Self {
            expected: self.expected + other.expected,
            down: self.down + other.down,
            up: self.up + other.up,
        }
    }

    /// A negative factor swaps the two ends.
    pub fn times(self, factor: f64) -> Self {
        let (down, up) = (self.down * factor.abs(), self.up * factor.abs());
        let (down, up) = if factor < 0.0 { (up, down) } else { (down, up) };
        Self { expected: self.expected * factor, down, up }
    }

    /// The product with an independent value. Both must be positive.
    pub fn by(self, other: Self) -> Self {
        let expected = self.expected * other.expected;
        let down = (self.down * other.expected).hypot(other.down * self.expected);
        Self { expected, down, up: (self.up * other.expected).hypot(other.up * self.expected) }
    }

    /// Between two predictions of one value: this share of the way from this one to the other. The range holds what
    /// both expect.
    pub fn toward(self, other: Self, share: f64) -> Self {
        let mix = |this: f64, other: f64| this * (1.0 - share) + other * share;
        let low = mix(self.low(), other.low()).min(self.expected).min(other.expected);
        let high = mix(self.high(), other.high()).max(self.expected).max(other.expected);
        Self::between(low, mix(self.expected, other.expected), high)
    }

    /// Bounds the whole range from below.
    pub fn at_least(self, least: f64) -> Self {
        let expected = self.expected.max(least);
        Self::between(self.low().max(least), expected, self.high().max(expected))
    }

    /// Bounds the whole range from above.
    pub fn at_most(self, most: f64) -> Self {
        let expected = self.expected.min(most);
        Self::between(self.low().min(expected), expected, self.high().min(most))
    }

    /// The lower end, which may be below zero.
    pub fn low(self) -> f64 {
        self.expected - self.down
    }

    /// The upper end.
    pub fn high(self) -> f64 {
        self.expected + self.up
    }

    /// The mean of both distances, for weights.
    pub fn distance(self) -> f64 {
        f64::midpoint(self.down, self.up)
    }

    /// The same in seconds, for users.
    pub fn estimate(self) -> Estimate {
        Estimate { expected_s: self.expected, low_s: self.low(), high_s: self.high() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixture::assert_close;

    #[test]
    fn independent_distances_add_as_squares() {
        let sum = Spread::between(7.0, 10.0, 10.0).plus(Spread::between(1.0, 5.0, 6.0));
        assert_close(sum.expected, 15.0);
        assert_close(sum.low(), 10.0);
        assert_close(sum.high(), 16.0);
    }

    #[test]
    fn distances_of_what_is_wrong_together_add() {
        let sum = Spread::between(7.0, 10.0, 10.0).together(Spread::between(1.0, 5.0, 6.0));
        assert_close(sum.low(), 8.0);
        assert_close(sum.high(), 16.0);
        assert!(Spread::repeated(10.0, 0.2).up > Spread::repeated(10.0, 0.2).down);
    }

    #[test]
    fn what_is_taken_away_swaps_its_sides() {
        let less = Spread::between(1.0, 3.0, 10.0).times(-2.0);
        assert_close(less.low(), -20.0);
        assert_close(less.high(), -2.0);
    }

    proptest! {
        #[test]
        fn bounds_keep_the_order(
            low in -10.0..10.0f64, more in 0.0..10.0f64, most in 0.0..10.0f64, bound in -30.0..30.0f64,
        ) {
            let spread = Spread::between(low, low + more, low + more + most);
            for bounded in [spread.at_least(bound), spread.at_most(bound)] {
                prop_assert!(bounded.down >= 0.0 && bounded.up >= 0.0);
            }
            prop_assert!(spread.at_least(bound).low() >= bound - 1e-9);
            prop_assert!(spread.at_most(bound).high() <= bound + 1e-9);
        }
    }
}
