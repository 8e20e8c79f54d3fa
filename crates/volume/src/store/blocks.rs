//! The state of every block of a layer, 2 bits each, in memory as on disk.

use std::ops::Range;

use perigee_model::volume::BLOCK_BYTES;

/// What a layer has to say about one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockState {
    /// Nothing: the layer below answers.
    Absent = 0,
    /// Its bytes are in the data file.
    Data = 1,
    /// Zeros, whatever the data file or a layer below has.
    Zero = 2,
}

impl BlockState {
    fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Absent,
            1 => Self::Data,
            _ => Self::Zero,
        }
    }

    /// Four blocks of this state.
    fn pattern(self) -> u8 {
        self as u8 * 0x55
    }
}

/// A count of blocks or bytes as an index into memory.
pub(super) fn index(n: u64) -> usize {
    usize::try_from(n).expect("a 64-bit machine")
}

/// The blocks that a range of bytes touches.
pub(super) fn blocks_of(offset: u64, length_bytes: u64) -> Range<u64> {
    offset / BLOCK_BYTES..(offset + length_bytes).div_ceil(BLOCK_BYTES)
}

/// The part of `a` that is also in `b`; may be empty.
pub(super) fn overlap(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Packed states: block `n` is bits `2 * (n % 4)` and up of byte `n / 4`.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct BlockStates {
    packed: Vec<u8>,
    blocks: u64,
}

impl std::fmt::Debug for BlockStates {
    /// As runs: a large layer has millions of bytes of states.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.runs(0..self.blocks)).finish()
    }
}

impl BlockStates {
    /// All absent.
    pub(super) fn new(blocks: u64) -> Self {
        Self { packed: vec![0; index(blocks.div_ceil(4))], blocks }
    }

    /// `None` when the bytes are no states of that many blocks.
    pub(super) fn from_packed(packed: Vec<u8>, blocks: u64) -> Option<Self> {
        let tail_bits = 2 * (blocks % 4);
        let tail_ok = tail_bits == 0 || packed.last().is_some_and(|last| last >> tail_bits == 0);
        let no_fourth_state = packed.iter().all(|byte| byte & (byte >> 1) & 0x55 == 0);
        (packed.len() == index(blocks.div_ceil(4)) && tail_ok && no_fourth_state)
            .then_some(Self { packed, blocks })
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(super) fn packed(&self) -> &[u8] {
        &self.packed
    }

    pub(super) fn get(&self, block: u64) -> BlockState {
        BlockState::from_bits(self.packed[index(block / 4)] >> (2 * (block % 4)))
    }

    /// The state at `range.start` and where the run of it ends within `range`.
    pub(super) fn run(&self, range: &Range<u64>) -> (BlockState, u64) {
        let state = self.get(range.start);
        let mut block = range.start;
        while block < range.end {
            if block.is_multiple_of(4)
                && block + 4 <= range.end
                && self.packed[index(block / 4)] == state.pattern()
            {
                block += 4;
            } else if self.get(block) == state {
                block += 1;
            } else {
                break;
            }
        }
        (state, block)
    }

    /// Runs of equal state that together are `range`.
    pub(super) fn runs(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, BlockState)> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            (at < range.end).then(|| {
                let (state, end) = self.run(&(at..range.end));
                let run = at..end;
                at = end;
                (run, state)
            })
        })
    }

    pub(super) fn all_are(&self, range: &Range<u64>, state: BlockState) -> bool {
        range.is_empty() || self.run(range) == (state, range.end)
    }

    /// The bytes, and where they start, that hold `range` once its blocks have `state`.
    pub(super) fn preview(&self, range: &Range<u64>, state: BlockState) -> (usize, Vec<u8>) {
        let first_byte = range.start / 4;
        let mut bytes = self.packed[index(first_byte)..index(range.end.div_ceil(4))].to_vec();
        let mut block = range.start;
        while block < range.end {
            let byte = &mut bytes[index(block / 4 - first_byte)];
            if block.is_multiple_of(4) && block + 4 <= range.end {
                *byte = state.pattern();
                block += 4;
            } else {
                let shift = 2 * (block % 4);
                *byte = *byte & !(3 << shift) | (state as u8) << shift;
                block += 1;
            }
        }
        (index(first_byte), bytes)
    }

    /// Puts what [`Self::preview`] made in place.
    pub(super) fn apply(&mut self, first_byte: usize, bytes: &[u8]) {
        self.packed[first_byte..first_byte + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn set(&mut self, range: &Range<u64>, state: BlockState) {
        let (first_byte, bytes) = self.preview(range, state);
        self.apply(first_byte, &bytes);
    }

    /// How many bytes of the layer are data.
    pub(super) fn data_bytes(&self) -> u64 {
        let data_blocks: u64 = self
            .packed
            .iter()
            .map(|byte| u64::from((byte & 0x55 & !(byte >> 1)).count_ones()))
            .sum();
        data_blocks * BLOCK_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_a_range_leaves_its_neighbours() {
        let mut states = BlockStates::new(23);
        states.set(&(3..18), BlockState::Zero);
        states.set(&(5..6), BlockState::Data);
        let found: Vec<_> = states.runs(0..23).collect();
        assert_eq!(
            found,
            [
                (0..3, BlockState::Absent),
                (3..5, BlockState::Zero),
                (5..6, BlockState::Data),
                (6..18, BlockState::Zero),
                (18..23, BlockState::Absent),
            ]
        );
        assert_eq!(states.data_bytes(), BLOCK_BYTES);
    }

    #[test]
    fn bytes_that_are_no_states_are_refused() {
        assert!(BlockStates::from_packed(vec![0b0110_0000], 4).is_some());
        assert!(BlockStates::from_packed(vec![0b1100_0000], 4).is_none(), "there is no state 3");
        assert!(BlockStates::from_packed(vec![0b0100_0000], 3).is_none(), "beyond the end");
        assert!(BlockStates::from_packed(vec![0, 0], 4).is_none(), "too long");
    }
}
