//! What a proxy of another host's volume fetches before it is asked for: predicts which blocks will be read
//! next. No I/O and no clock. The proxy does it (`crates/volume/src/proxy.rs`), and the planner's replay asks
//! the same code what a job would wait for.
//!
//! A stream is a series of reads that are sequential, or that have the same distance from one to the next. The
//! part that is fetched ahead of a stream starts small. It doubles whenever the reader has used half of it, up
//! to the bytes that the link carries in two round trips. Then the reader never waits, if the link is fast
//! enough for it.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use crate::volume::BLOCK_BYTES;

/// This number is raised when a change of the proxy clearly changes the time that a job takes over it. Older runs
/// over a network then say nothing about the next one.
pub const PROXY_GENERATION: u32 = 1;

/// Longer reads are not kept in memory: a reader of so much at once waits for only one round trip.
pub const KEPT_READ_BYTES_MAX: u32 = 4 << 20;
/// After a write or discard of more blocks than this, nothing stays in memory: it may be a discard of the whole
/// volume.
pub const REMOVED_BLOCKS_MAX: u64 = 1 << 14;
/// The default of a host's memory for blocks of other hosts' volumes.
pub const READ_CACHE_BYTES: u64 = 512 << 20;
/// What is fetched ahead comes in pieces of this size: a reader waits for one, and not for all.
const PIECE_BLOCKS: u64 = 64;

/// The blocks in which a range of bytes lies.
pub fn blocks_of(offset: u64, length_bytes: u64) -> Range<u64> {
    offset / BLOCK_BYTES..(offset + length_bytes).div_ceil(BLOCK_BYTES)
}

/// A range of bytes that is fetched ahead, as the blocks of each piece.
pub fn pieces(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let blocks = blocks_of(range.start, range.end - range.start);
    let mut at = blocks.start;
    std::iter::from_fn(move || {
        let piece = at..(at + PIECE_BLOCKS).min(blocks.end);
        at = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// A copy is completed in the background by requests of this many blocks.
pub const FILL_PIECE_BLOCKS: u64 = 32;
/// The number of these requests that are in flight at once: as many as the link carries in two round trips.
pub fn fill_pieces_in_flight(pace: &Pace, round_trip: Duration) -> usize {
    let pieces = pace.pipe_bytes(round_trip) / (FILL_PIECE_BLOCKS * BLOCK_BYTES);
    usize::try_from(pieces).unwrap_or(usize::MAX).max(1)
}

/// The default of the highest rate at which copies are completed.
pub const FILL_BYTES_PER_S: u64 = 100 << 20;

const STREAMS_MAX: usize = 8;
/// A read that begins this near to the end of a stream belongs to it, because several reads may be in flight.
const SLACK_BYTES: u64 = 512 << 10;
const AHEAD_BYTES_MIN: u64 = 128 << 10;
/// The most bytes that are fetched ahead of a stream. This limits the memory.
pub const AHEAD_BYTES_MAX: u64 = 16 << 20;
/// This many equal steps make a stream.
const STEPS_MIN: u32 = 3;
const STEP_BYTES_MAX: u64 = 16 << 20;
const STEPS_AHEAD_MAX: u64 = 64;

/// The streams of one session.
#[derive(Debug, Default)]
pub struct Streams {
    sequential: VecDeque<Stream>,
    steps: Steps,
}

#[derive(Debug)]
struct Stream {
    /// The end of the last read.
    end: u64,
    reads: u32,
    /// The end of the last fetch.
    fetched: u64,
    ahead_bytes: u64,
}

/// The last reads that belong to no other stream.
#[derive(Debug, Default)]
struct Steps {
    last: u64,
    step: i64,
    equal: u32,
    /// The number of steps after `last` that were fetched.
    fetched: u64,
    ahead: u64,
}

impl Streams {
    /// Records a read, and returns the ranges to fetch. `pipe_bytes` is what the link carries in two round
    /// trips.
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

/// The rate of a link: the highest rate that was seen lately, from the bytes that arrived while a request was
/// in flight.
#[derive(Debug, Default)]
pub struct Pace {
    bytes_per_s: u64,
}

impl Pace {
    /// Records that a request took `elapsed`, and that this many bytes arrived in that time for all requests.
    pub fn note(&mut self, bytes: u64, elapsed: Duration) {
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX).max(1);
        let rate = bytes.saturating_mul(1_000_000) / micros;
        self.bytes_per_s = rate.max(self.bytes_per_s - self.bytes_per_s / 64);
    }

    /// The bytes of two round trips, and some more to find a higher rate.
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
