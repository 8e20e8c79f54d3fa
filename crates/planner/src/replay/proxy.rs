//! The proxy in a replay: what the volume server of the VM's host does with the reads of a disk whose home is another
//! host. The same code as there decides what is fetched ahead and what is kept ([`perigee_model::read_ahead`],
//! [`Clock`]). This file only adds the times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::time::Duration;

use perigee_model::clock::Clock;
use perigee_model::read_ahead::{
    KEPT_READ_BYTES_MAX, Pace, READ_CACHE_BYTES, REMOVED_BLOCKS_MAX, Streams, blocks_of, pieces,
};
use perigee_model::volume::BLOCK_BYTES;

use super::{Request, Way, ticks};

const KEPT_BLOCKS_MAX: usize = (READ_CACHE_BYTES / BLOCK_BYTES) as usize;

/// The memory of the VM's host for blocks of all its disks: when each one arrives.
pub(super) type Memory = Clock<(u16, u64), f64>;

/// The proxy of one disk.
#[derive(Debug)]
pub(super) struct Proxy {
    way: Way,
    streams: Streams,
    pace: Pace,
    /// The fetches that are on their way, by the time of their arrival (as [`ticks`]).
    coming: BinaryHeap<Reverse<(u64, Coming)>>,
    came_bytes: u64,
    link_free_us: f64,
    /// The bytes of all requests to the home.
    pub sent_bytes: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Coming {
    /// As [`ticks`].
    asked: u64,
    bytes: u64,
    came_before: u64,
}

impl Proxy {
    /// Nothing is read ahead yet, and the link is idle.
    pub fn new(way: Way) -> Self {
        let (streams, pace, coming, came_bytes, sent_bytes) = Default::default();
        let link_free_us = f64::NEG_INFINITY;
        Self { way, streams, pace, coming, came_bytes, link_free_us, sent_bytes }
    }

    /// Returns when a request is answered that comes at `at_us` and takes `own_us` at the home.
    pub fn ask(&mut self, bytes: f64, at_us: f64, own_us: f64) -> f64 {
        self.sent_bytes += bytes;
        let mut answered_us = at_us + own_us + self.way.round_trip_us;
        if self.way.us_per_byte > 0.0 {
            answered_us = answered_us.max(self.link_free_us) + self.way.us_per_byte * bytes;
            self.link_free_us = answered_us;
        }
        answered_us
    }

    /// The same for a read, of which parts may be in memory. A read from memory takes `own_us` too.
    pub fn read(&mut self, memory: &mut Memory, read: &Request, at_us: f64, own_us: f64) -> f64 {
        if !self.way.through_proxy || read.length_bytes > KEPT_READ_BYTES_MAX {
            return self.ask(read.length_bytes.into(), at_us, own_us);
        }
        self.arrived_until(at_us);
        let length_bytes = u64::from(read.length_bytes);
        let blocks = blocks_of(read.offset, length_bytes);
        let mut now_us = at_us;
        let mut block = blocks.start;
        while block < blocks.end {
            if let Some(arrives_us) = memory.read(&(read.disk, block)) {
                now_us = now_us.max(*arrives_us);
                block += 1;
            } else {
                let run = missing(memory, read.disk, block..blocks.end, now_us);
                now_us = now_us.max(self.fetch(memory, read.disk, &run, now_us, own_us));
                block = run.end;
            }
        }
        let pipe_bytes = self.pace.pipe_bytes(micros(self.way.round_trip_us));
        for piece in
            self.streams.note(read.offset, length_bytes, pipe_bytes).iter().flat_map(pieces)
        {
            self.fetch_ahead(memory, read.disk, piece, at_us, own_us);
        }
        now_us.max(at_us + own_us)
    }

    /// The same for a write. Its data is in memory when it is answered.
    pub fn write(&mut self, memory: &mut Memory, write: &Request, at_us: f64, own_us: f64) -> f64 {
        let answered_us = self.ask(write.length_bytes.into(), at_us, own_us);
        let blocks = blocks_of(write.offset, write.length_bytes.into());
        if !self.way.through_proxy {
            return answered_us;
        }
        if blocks.end - blocks.start > REMOVED_BLOCKS_MAX {
            *memory = Memory::default();
        } else {
            keep(memory, write.disk, &blocks, answered_us);
        }
        answered_us
    }

    /// Fetches the part of a piece that is neither in memory nor on its way. If the piece's beginning is on its way,
    /// nothing is fetched.
    fn fetch_ahead(
        &mut self,
        memory: &mut Memory,
        disk: u16,
        piece: Range<u64>,
        at_us: f64,
        own_us: f64,
    ) {
        let kept = |block: &u64| memory.get(&(disk, *block)).is_some_and(|us| *us <= at_us);
        let Some(first) = piece.clone().find(|block| !kept(block)) else { return };
        if memory.get(&(disk, first)).is_none() {
            let run = missing(memory, disk, first..piece.end, at_us);
            self.fetch(memory, disk, &run, at_us, own_us);
        }
    }

    fn fetch(
        &mut self,
        memory: &mut Memory,
        disk: u16,
        blocks: &Range<u64>,
        at_us: f64,
        own_us: f64,
    ) -> f64 {
        let bytes = (blocks.end - blocks.start) * BLOCK_BYTES;
        let answered_us = self.ask(bytes as f64, at_us, own_us);
        let came_before = self.came_bytes;
        let coming = Coming { asked: ticks(at_us), bytes, came_before };
        self.coming.push(Reverse((ticks(answered_us), coming)));
        keep(memory, disk, blocks, answered_us);
        answered_us
    }

    /// Updates the link's rate by what has arrived.
    fn arrived_until(&mut self, now_us: f64) {
        while let Some(Reverse((at, coming))) = self.coming.peek().copied() {
            if at > ticks(now_us) {
                break;
            }
            self.coming.pop();
            self.came_bytes += coming.bytes;
            let elapsed_us = f64::from_bits(at) - f64::from_bits(coming.asked);
            self.pace.note(self.came_bytes - coming.came_before, micros(elapsed_us));
        }
    }
}

/// The range from the first block to the last one that is not in memory. It ends before a block that is on its way.
fn missing(memory: &Memory, disk: u16, blocks: Range<u64>, now_us: f64) -> Range<u64> {
    let mut run = blocks.start..blocks.start + 1;
    for block in run.end..blocks.end {
        match memory.get(&(disk, block)) {
            Some(arrives_us) if *arrives_us > now_us => break,
            Some(_) => {}
            None => run.end = block + 1,
        }
    }
    run
}

fn keep(memory: &mut Memory, disk: u16, blocks: &Range<u64>, arrives_us: f64) {
    for block in blocks.clone() {
        if let Some(place) = memory.place((disk, block), KEPT_BLOCKS_MAX, || 0.0) {
            *place = arrives_us;
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn micros(us: f64) -> Duration {
    Duration::from_micros(us as u64)
}
