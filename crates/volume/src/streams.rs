//! Which blocks of another host's volume will be read next. No I/O and no clock.
//!
//! A stream is what reads on from where it ended, or with the same step from read to read. What is
//! fetched ahead of one begins small and doubles whenever the reader has used half of it, up to what the
//! link carries in two round trips: then it never waits, if the link has the rate for it.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

const STREAMS_MAX: usize = 8;
/// A read that begins so near to where a stream ended belongs to it: several may be under way.
const SLACK_BYTES: u64 = 512 << 10;
const AHEAD_BYTES_MIN: u64 = 128 << 10;
/// Bounds the memory for what is on its way, as a stream's.
pub const AHEAD_BYTES_MAX: u64 = 16 << 20;
/// So many equal steps are a stream.
const STEPS_MIN: u32 = 3;
const STEP_BYTES_MAX: u64 = 16 << 20;
const STEPS_AHEAD_MAX: u64 = 64;

/// The streams of one session.
#[derive(Default)]
pub struct Streams {
    sequential: VecDeque<Stream>,
    steps: Steps,
}

struct Stream {
    /// Where it has been read to.
    end: u64,
    reads: u32,
    /// Where it has been fetched to.
    fetched: u64,
    ahead_bytes: u64,
}

/// The last reads that belong to no other stream.
#[derive(Default)]
struct Steps {
    last: u64,
    step: i64,
    equal: u32,
    /// How many steps from `last` on are fetched.
    fetched: u64,
    ahead: u64,
}

impl Streams {
    /// What to fetch when this was asked for. `pipe_bytes`: what the link carries in two round trips.
    pub fn note(&mut self, offset: u64, length_bytes: u64, pipe_bytes: u64) -> Vec<Range<u64>> {
        let end = offset + length_bytes;
        let near = |stream: &Stream| {
            (stream.end.saturating_sub(SLACK_BYTES)..=stream.end + SLACK_BYTES).contains(&offset)
        };
        if let Some(at) = self.sequential.iter().position(near)
            && let Some(mut stream) = self.sequential.remove(at)
        {
            let fetch = stream.read_on(end, pipe_bytes);
            let sequential = stream.reads > 2;
            self.sequential.push_back(stream);
            return if sequential {
                fetch.into_iter().collect()
            } else {
                self.stepped(offset, length_bytes, pipe_bytes)
            };
        }
        if self.sequential.len() == STREAMS_MAX {
            self.sequential.pop_front();
        }
        let ahead_bytes = AHEAD_BYTES_MIN;
        self.sequential.push_back(Stream { end, reads: 1, fetched: end, ahead_bytes });
        self.stepped(offset, length_bytes, pipe_bytes)
    }

    fn stepped(&mut self, offset: u64, length_bytes: u64, pipe_bytes: u64) -> Vec<Range<u64>> {
        let steps = &mut self.steps;
        let step = offset.cast_signed() - steps.last.cast_signed();
        let possible = step != 0 && step.unsigned_abs() <= STEP_BYTES_MAX;
        steps.last = offset;
        if !possible || step != steps.step {
            *steps = Steps { last: offset, step, equal: u32::from(possible), fetched: 0, ahead: 2 };
            return Vec::new();
        }
        steps.equal = steps.equal.saturating_add(1);
        steps.fetched = steps.fetched.saturating_sub(1);
        if steps.equal < STEPS_MIN || steps.fetched * 2 > steps.ahead {
            return Vec::new();
        }
        let many = (pipe_bytes / length_bytes.max(1)).clamp(2, STEPS_AHEAD_MAX);
        steps.ahead = (steps.ahead * 2).min(many);
        let first = steps.fetched + 1;
        steps.fetched = steps.ahead;
        let place =
            |number: u64| offset.checked_add_signed(step.checked_mul(number.cast_signed())?);
        (first..=steps.ahead).filter_map(place).map(|at| at..at + length_bytes).collect()
    }
}

impl Stream {
    fn read_on(&mut self, end: u64, pipe_bytes: u64) -> Option<Range<u64>> {
        self.reads = self.reads.saturating_add(1);
        self.end = self.end.max(end);
        let from = self.fetched.max(self.end);
        // Half of it is used.
        if self.reads <= 2 || from - self.end > self.ahead_bytes / 2 {
            return None;
        }
        let max = pipe_bytes.clamp(AHEAD_BYTES_MIN, AHEAD_BYTES_MAX);
        self.ahead_bytes = (self.ahead_bytes * 2).min(max);
        self.fetched = (self.end + self.ahead_bytes).max(from);
        (self.fetched > from).then_some(from..self.fetched)
    }
}

/// How much a link carries: the highest rate that was seen lately, by bytes that came while a request
/// was on its way.
#[derive(Default)]
pub struct Pace {
    bytes_per_s: u64,
}

impl Pace {
    /// A request took `elapsed`, and so many bytes came in that time on all of them.
    pub fn note(&mut self, bytes: u64, elapsed: Duration) {
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX).max(1);
        let rate = bytes.saturating_mul(1_000_000) / micros;
        self.bytes_per_s = rate.max(self.bytes_per_s - self.bytes_per_s / 64);
    }

    /// In two round trips, and some more to find a higher rate.
    pub fn pipe_bytes(&self, round_trip: Duration) -> u64 {
        let micros = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
        let carried = self.bytes_per_s.saturating_mul(micros) / 1_000_000;
        (2 * carried + (512 << 10)).min(AHEAD_BYTES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = 128 << 10;
    const PIPE: u64 = 4 << 20;

    fn total(ranges: &[Range<u64>]) -> u64 {
        ranges.iter().map(|range| range.end - range.start).sum()
    }

    #[test]
    fn a_scan_is_fetched_once_and_ahead_of_it_up_to_what_the_link_carries() {
        let mut streams = Streams::default();
        let (mut fetched, mut next) = (0, 3 * PIECE);
        for read in 0..1000 {
            for range in streams.note(read * PIECE, PIECE, PIPE) {
                assert_eq!(range.start, next, "nothing twice, and nothing left out");
                next = range.end;
                fetched += range.end - range.start;
            }
            let ahead = next.saturating_sub((read + 1) * PIECE);
            assert!(ahead <= PIPE, "{ahead}");
            assert!(read < 50 || ahead >= PIPE / 2 - PIECE, "{read}: {ahead}");
        }
        assert!(fetched >= 990 * PIECE);
    }

    #[test]
    fn random_reads_fetch_nothing() {
        let mut streams = Streams::default();
        let mut state = 1_u64;
        let mut fetched = 0;
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            fetched += total(&streams.note((state >> 24) & !4095, 4096, PIPE));
        }
        assert!(fetched < 10_000 * 4096 / 100, "{fetched}");
    }

    #[test]
    fn reads_with_the_same_step_are_fetched_ahead() {
        for step in [1_i64 << 20, -(3 << 20)] {
            let mut streams = Streams::default();
            let mut places = Vec::new();
            let first = 1_u64 << 40;
            for read in 0..200_i64 {
                let at = first.checked_add_signed(read * step).expect("a place");
                places.extend(streams.note(at, 4096, PIPE).iter().map(|range| range.start));
            }
            let mut unique = places.clone();
            unique.sort_unstable();
            unique.dedup();
            assert_eq!(unique.len(), places.len(), "nothing twice");
            assert!(places.len() >= 190, "{}", places.len());
        }
    }

    #[test]
    fn the_pipe_grows_with_the_rate_and_the_round_trip() {
        let mut pace = Pace::default();
        let round_trip = Duration::from_millis(16);
        assert_eq!(pace.pipe_bytes(round_trip), 512 << 10);
        pace.note(1 << 20, round_trip);
        assert!(pace.pipe_bytes(round_trip) > 2 << 20);
        assert!(pace.pipe_bytes(Duration::from_millis(1)) < 1 << 20);
    }
}
