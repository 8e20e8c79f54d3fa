//! The frames in transit in one direction: a first-in, first-out queue in one ring of bytes.
//!
//! The ring grows up to a limit, and reuses the memory of frames that have arrived. A frame never wraps
//! around the end, so one `read` and one `write` move it.

use std::collections::VecDeque;

use super::frame::FRAME_BYTES_MAX;

const FIRST_BYTES: usize = 1 << 20;
/// Enough for 16 Gbit/s with a round-trip time of 64 ms.
const BYTES_MAX: usize = 64 << 20;

#[derive(Debug)]
struct Entry {
    start: usize,
    length: usize,
    due_ns: u64,
}

/// Frames on their way, in the order in which they arrive. Its memory grows up to a bound, beyond which frames are
/// lost as in a full queue.
#[derive(Debug)]
pub struct Ring {
    bytes: Vec<u8>,
    bytes_max: usize,
    entries: VecDeque<Entry>,
    /// Where the last frame ends.
    tail: usize,
}

impl Ring {
    /// Small at first.
    pub fn new() -> Self {
        Self::with(FIRST_BYTES, BYTES_MAX)
    }

    fn with(first_bytes: usize, bytes_max: usize) -> Self {
        Self { bytes: vec![0; first_bytes], bytes_max, entries: VecDeque::new(), tail: 0 }
    }

    /// Space for one frame of any length; `None` if the ring is full. [`Self::push`] keeps the frame that
    /// was written there.
    pub fn room(&mut self) -> Option<&mut [u8]> {
        self.tail = self.find()?;
        self.bytes.get_mut(self.tail..self.tail + FRAME_BYTES_MAX)
    }

    /// Appends the first `length` bytes of [`Self::room`] as a frame.
    pub fn push(&mut self, length: usize, due_ns: u64) {
        self.entries.push_back(Entry { start: self.tail, length, due_ns });
        self.tail += length;
    }

    /// The oldest frame, and when it is due.
    pub fn first(&self) -> Option<(u64, &[u8])> {
        let entry = self.entries.front()?;
        Some((entry.due_ns, self.bytes.get(entry.start..entry.start + entry.length)?))
    }

    /// Forgets the first frame. Without one it does nothing.
    pub fn pop(&mut self) {
        self.entries.pop_front();
    }

    fn find(&mut self) -> Option<usize> {
        let Some(first) = self.entries.front() else { return Some(0) };
        let head = first.start;
        if self.tail > head {
            if self.bytes.len() - self.tail >= FRAME_BYTES_MAX {
                return Some(self.tail);
            }
            // The tail must not reach the head, because the ring would look empty.
            if head > FRAME_BYTES_MAX {
                return Some(0);
            }
        } else if head - self.tail > FRAME_BYTES_MAX {
            return Some(self.tail);
        }
        self.grow()
    }

    fn grow(&mut self) -> Option<usize> {
        if self.bytes.len() * 2 > self.bytes_max {
            return None;
        }
        let mut larger = vec![0; self.bytes.len() * 2];
        let mut tail = 0;
        for entry in &mut self.entries {
            let frame = &self.bytes[entry.start..entry.start + entry.length];
            larger[tail..tail + entry.length].copy_from_slice(frame);
            entry.start = tail;
            tail += entry.length;
        }
        self.bytes = larger;
        Some(tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts a frame in whose bytes tell its number.
    fn put(ring: &mut Ring, number: u64, length: usize) -> bool {
        let Some(room) = ring.room() else { return false };
        let byte = number.to_le_bytes()[0];
        room[..length].fill(byte);
        ring.push(length, number);
        true
    }

    fn take(ring: &mut Ring) -> Option<(u64, usize)> {
        let (number, frame) = ring.first()?;
        assert!(frame.iter().all(|b| *b == number.to_le_bytes()[0]), "frame {number} is damaged");
        let length = frame.len();
        ring.pop();
        Some((number, length))
    }

    #[test]
    fn frames_come_out_whole_and_in_order_however_the_ring_wraps_and_grows() {
        let mut ring = Ring::with(4 * FRAME_BYTES_MAX, 64 * FRAME_BYTES_MAX);
        let length = |number: u64| usize::try_from(1 + number * 7919 % 66_000).expect("small");
        let (mut put_next, mut take_next) = (0, 0);
        for round in 0..3000u64 {
            for _ in 0..round % 9 {
                put_next += u64::from(put(&mut ring, put_next, length(put_next)));
            }
            for _ in 0..(round / 3) % 10 {
                let Some(taken) = take(&mut ring) else { break };
                assert_eq!(taken, (take_next, length(take_next)));
                take_next += 1;
            }
        }
        assert!(put_next > 1000 && take_next > 1000);
        assert!(ring.bytes.len() > 4 * FRAME_BYTES_MAX, "it has grown");
    }

    #[test]
    fn a_full_ring_has_no_room_until_a_frame_has_left() {
        let mut ring = Ring::with(4 * FRAME_BYTES_MAX, 8 * FRAME_BYTES_MAX);
        let mut count = 0;
        while put(&mut ring, count, 60_000) {
            count += 1;
        }
        assert!((7..=9).contains(&count), "{count}");
        for number in 0..3 {
            assert_eq!(take(&mut ring), Some((number, 60_000)));
        }
        assert!(put(&mut ring, count, 60_000));
        let left: Vec<u64> = std::iter::from_fn(|| take(&mut ring)).map(|(n, _)| n).collect();
        assert_eq!(left, (3..=count).collect::<Vec<_>>());
        assert_eq!(ring.room().map(|room| room.len()), Some(FRAME_BYTES_MAX));
    }
}
