//! One direction of a link. It decides which frames pass, and when they are due at the other end.
//!
//! The rate is a virtual clock: the link is free again when the last accepted frame has left. A frame
//! that would have to wait too long is dropped, as by a router with a full queue. This code never reads
//! a clock; times are nanoseconds since any fixed moment.

use serde::{Deserialize, Serialize};

use super::settings::LinkSettings;

const BITS_PER_BYTE: u64 = 8;
const NS_PER_S: u64 = 1_000_000_000;
const NS_PER_US: u64 = 1000;
const MILLION: u64 = 1_000_000;

/// Frames since the link was made. A frame of 64 KiB counts as one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub carried_frames: u64,
    /// Including the headers of each segment.
    pub carried_bytes: u64,
    /// Dropped because of the link's loss setting.
    pub lost_frames: u64,
    /// Dropped because too many frames were waiting for the link.
    pub queue_full_frames: u64,
    /// Dropped while the link was down.
    pub down_frames: u64,
    /// Not accepted by the network card at the other end.
    pub refused_frames: u64,
}

/// One direction of a link: when a frame arrives, or that it is lost.
#[derive(Debug, Clone)]
pub struct Wire {
    settings: LinkSettings,
    free_at_ns: u64,
    last_due_ns: u64,
    random: u64,
    pub counts: Counts,
}

impl Wire {
    /// `seed` decides which frames are lost.
    pub fn new(settings: LinkSettings, seed: u64) -> Self {
        let counts = Counts::default();
        // With the state 0 the generator would return only zeros.
        Self { settings, free_at_ns: 0, last_due_ns: 0, random: seed.max(1), counts }
    }

    /// Changes the settings. Frames in transit still arrive when they were due.
    pub fn set(&mut self, settings: LinkSettings) {
        if settings.rate != self.settings.rate {
            self.free_at_ns = 0;
        }
        self.settings = settings;
    }

    /// Returns when a frame that was sent at `now_ns` is due at the other end, or `None` if it is dropped.
    pub fn offer(&mut self, now_ns: u64, wire_bytes: u64) -> Option<u64> {
        if self.settings.down {
            self.counts.down_frames += 1;
            return None;
        }
        if self.settings.loss_ppm > 0 && self.draw() < u64::from(self.settings.loss_ppm) {
            self.counts.lost_frames += 1;
            return None;
        }
        let mut left_ns = now_ns;
        if let Some(rate) = self.settings.rate.0 {
            let start_ns = self.free_at_ns.max(now_ns);
            if start_ns - now_ns > self.settings.wait_us_max() * NS_PER_US {
                self.counts.queue_full_frames += 1;
                return None;
            }
            left_ns = start_ns + (wire_bytes * BITS_PER_BYTE * NS_PER_S).div_ceil(rate.max(1));
            self.free_at_ns = left_ns;
        }
        // Frames never overtake each other, even if the round-trip time has become shorter.
        let one_way_ns = self.settings.rtt_us * NS_PER_US / 2;
        self.last_due_ns = self.last_due_ns.max(left_ns + one_way_ns);
        self.counts.carried_frames += 1;
        self.counts.carried_bytes += wire_bytes;
        Some(self.last_due_ns)
    }

    /// A random number below one million (xorshift64*).
    fn draw(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % MILLION
    }
}

#[cfg(test)]
mod tests {
    use super::super::settings::Rate;
    use super::*;

    const MS: u64 = 1_000_000;

    fn wire(change: impl FnOnce(&mut LinkSettings)) -> Wire {
        let mut settings = LinkSettings::of_rtt_us(16_000);
        change(&mut settings);
        Wire::new(settings, 7)
    }

    #[test]
    fn a_frame_is_due_half_a_round_trip_later() {
        let mut wire = wire(|_| {});
        assert_eq!(wire.offer(100, 60_000), Some(100 + 8 * MS));
        assert_eq!(wire.offer(101, 60), Some(101 + 8 * MS), "it waits for no other");
    }

    #[test]
    fn frames_leave_one_after_the_other_at_the_rate() {
        let mut wire = wire(|s| s.rate = Rate(Some(8_000_000))); // 1 byte in 1 µs
        assert_eq!(wire.offer(0, 1000), Some(MS + 8 * MS));
        assert_eq!(wire.offer(0, 1000), Some(2 * MS + 8 * MS));
        // The link was idle meanwhile, and saved nothing up.
        assert_eq!(wire.offer(10 * MS, 1000), Some(11 * MS + 8 * MS));
    }

    #[test]
    fn what_is_carried_in_a_second_is_the_rate() {
        let mut wire = wire(|s| s.rate = Rate(Some(97_000_000)));
        let (mut now_ns, mut bytes) = (0, 0);
        while now_ns < NS_PER_S {
            bytes += if wire.offer(now_ns, 1514).is_some() { 1514 } else { 0 };
            now_ns += 50_000; // 242 Mbit/s are offered
        }
        let waits = 97_000_000 / 20; // 50 ms of the rate wait at the end
        assert!((97_000_000..97_000_000 + waits + 20_000).contains(&(bytes * 8)), "{bytes}");
        assert!(wire.counts.queue_full_frames > 0);
        assert_eq!(wire.counts.carried_bytes, bytes);
    }

    #[test]
    fn a_queue_that_is_full_drops_what_comes_last() {
        let mut wire = wire(|s| s.rate = Rate(Some(8_000_000)));
        let accepted = (0..1000).filter(|_| wire.offer(0, 1000).is_some()).count();
        // 50 ms at this rate are 50 frames; less than 128 KiB, which may always wait.
        assert_eq!(accepted, 132);
        assert_eq!(wire.counts.queue_full_frames, 868);
        assert!(wire.offer(2 * MS, 1000).is_some(), "there is room again");
    }

    #[test]
    fn the_share_of_lost_frames_is_the_one_set() {
        let mut wire = wire(|s| s.loss_ppm = 10_000);
        let lost = (0..100_000).filter(|now| wire.offer(*now, 60).is_none()).count();
        assert!((800..1200).contains(&lost), "{lost} of 100000");
        assert_eq!(wire.counts.lost_frames, lost as u64);
        wire.set(LinkSettings { loss_ppm: 1_000_000, ..LinkSettings::of_rtt_us(0) });
        assert!((0..1000).all(|now| wire.offer(now, 60).is_none()));
    }

    #[test]
    fn nothing_passes_while_the_link_is_down() {
        let mut wire = wire(|s| s.down = true);
        assert_eq!(wire.offer(0, 60), None);
        wire.set(LinkSettings::of_rtt_us(16_000));
        assert_eq!(wire.offer(1, 60), Some(1 + 8 * MS));
        assert_eq!(wire.counts.down_frames, 1);
    }

    #[test]
    fn frames_do_not_overtake_each_other_when_the_round_trip_gets_shorter() {
        let mut wire = wire(|_| {});
        let first = wire.offer(0, 60).expect("carried");
        wire.set(LinkSettings::of_rtt_us(0));
        assert_eq!(wire.offer(1, 60), Some(first));
        assert_eq!(wire.offer(first + 5, 60), Some(first + 5));
    }
}
