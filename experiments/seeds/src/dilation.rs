//! Time dilation: the guests compute `f` times slower than the paper's machines did, so the network is made `f` times slower too, and
//! seconds are divided by `f` (Gupta et al., "To infinity and beyond: time-warped network emulation", NSDI 2006; Gupta, Vishwanath and Vahdat,
//! "DieCast", NSDI 2008).
//!
//! There the guests' clocks are slowed down too. QEMU 7.2 can't do that: `-icount` makes the guest's clock count instructions, which slows it only
//! while the guest computes. While the guest waits for a disk or a network, the clock goes at the machine's speed (`sleep=on`) or jumps to the next timer
//! (`sleep=off`). `-rtc clock=vm` only makes the real-time clock follow that clock. Neither has a factor. So the guests' clocks are not
//! dilated, and what they time out by (TCP's shortest retransmission timer, the kernel's writeback) is `f` times too short.

use anyhow::{Result, ensure};
use perigee_lab::wan::{Change, Rate};
use serde::{Deserialize, Serialize};

/// Of their network, Gigabit Ethernet.
pub const THEIR_BITS_PER_S: f64 = 1e9;
/// A link of a lab has at most this round trip.
const RTT_US_MAX: f64 = 10e6;

/// What one fixed computation takes, and where.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Dilation {
    /// In a guest, while all guests of the experiment compute.
    pub guest_s: f64,
    /// On the host itself, alone.
    pub native_s: f64,
    /// How many times as long it takes on the paper's machine as on the host itself. It is not measured but assumed.
    pub theirs: f64,
}

impl Dilation {
    /// # Errors
    /// A time is no positive number.
    pub fn new(guest_s: f64, native_s: f64, theirs: f64) -> Result<Self> {
        for (what, value) in [("guest", guest_s), ("native", native_s), ("theirs", theirs)] {
            ensure!(value.is_finite() && value > 0.0, "the dilation's {what} is {value}");
        }
        Ok(Self { guest_s, native_s, theirs })
    }

    /// How many times as long the guests compute as the paper's machines: 1 at least, because a network can't be made faster.
    pub fn factor(&self) -> f64 {
        (self.guest_s / (self.native_s * self.theirs)).max(1.0)
    }
}

/// The time that a second of the paper's takes: `f` in dilated cells, and 1 in the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace(pub f64);

impl Pace {
    /// The paper's seconds.
    pub fn theirs_s(self, measured_s: f64) -> f64 {
        measured_s / self.0
    }

    /// What the WAN is set to for one of the paper's round trips. The rate is that of the hosts' network cards.
    ///
    /// # Errors
    /// The round trip would be longer than a lab's may be.
    pub fn link(self, rtt_ms: u32) -> Result<Change> {
        let rtt_us = f64::from(rtt_ms) * 1000.0 * self.0;
        ensure!(rtt_us <= RTT_US_MAX, "{rtt_ms} ms times {:.1} is longer than 10 s", self.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 10 s")]
        let rtt_us = rtt_us.round() as u64;
        Ok(Change { rtt_us: Some(rtt_us), rate: Some(Rate::UNLIMITED), ..Change::default() })
    }

    /// The rate of a network card, in each direction.
    pub fn card_bits_per_s(self) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 1e9")]
        let rate = (THEIR_BITS_PER_S / self.0).round() as u64;
        rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_is_the_slowdown_of_the_guests_beside_their_machine() {
        let dilation = Dilation::new(3.2, 0.04, 4.0).expect("times");
        assert!((dilation.factor() - 20.0).abs() < 1e-9);
    }

    #[test]
    fn a_guest_that_is_faster_than_theirs_dilates_nothing() {
        let dilation = Dilation::new(0.05, 0.04, 4.0).expect("times");
        assert!((dilation.factor() - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn times_that_are_none_are_refused() {
        for (guest_s, native_s) in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            Dilation::new(guest_s, native_s, 1.0).expect_err("no time");
        }
    }

    #[test]
    fn a_round_trip_grows_and_a_rate_shrinks_by_the_factor_and_seconds_shrink_too() {
        let pace = Pace(20.0);
        assert_eq!(pace.link(16).expect("a link").rtt_us, Some(320_000));
        assert_eq!(pace.card_bits_per_s(), 50_000_000);
        assert!((pace.theirs_s(60.0) - 3.0).abs() < 1e-9);
        assert_eq!(Pace(1.0).link(16).expect("a link").rtt_us, Some(16_000));
        Pace(1000.0).link(16).expect_err("16 s");
    }
}
