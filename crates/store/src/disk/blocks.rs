//! The state of every block of a layer, 2 bits each, in memory as on disk.
//!
//! A page of states is allocated when its first block gets a state. All blocks of a missing page are
//! absent. Reading takes no lock. Changes of one page are serialized by [`StatePage::change`].

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use perigee_block::device::{Extent, IoError, is_within};
use perigee_block::locking::lock;
use perigee_model::volume::BLOCK_BYTES;

use crate::disk::sparse::Sparse;

/// Bytes of packed states in a page, as in a page of the durable map.
pub(crate) const PAGE_STATE_BYTES: usize = 4064;
/// Blocks of one page of states, 63.5 MiB of the layer.
pub(crate) const PAGE_BLOCKS: u64 = PAGE_STATE_BYTES as u64 * 4;
const PAGE_WORDS: usize = PAGE_STATE_BYTES / 8;
const WORD_BLOCKS: u64 = 32;
/// Bit 0 of every block in a word.
const LOW_BITS: u64 = 0x5555_5555_5555_5555;

/// The state of one block in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// The layer does not have the block; the layer below answers.
    Absent = 0,
    /// The block's bytes are in the data file.
    Data = 1,
    /// The block reads as zeros, whatever the data file or a layer below contains.
    Zero = 2,
    /// The layer has the block, and its bytes are still at another host. Only copies of a layer's own blocks
    /// have this state ([`crate::layers::copy`]).
    Remote = 3,
}

impl BlockState {
    fn from_bits(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::Absent,
            1 => Self::Data,
            2 => Self::Zero,
            _ => Self::Remote,
        }
    }

    /// A word in which all blocks have this state.
    fn pattern(self) -> u64 {
        self as u64 * LOW_BITS
    }
}

/// A count of blocks or bytes as an index into memory.
pub(crate) fn index(n: u64) -> usize {
    usize::try_from(n).expect("a 64-bit machine")
}

/// The blocks that a range of bytes touches.
pub(crate) fn blocks_of(offset: u64, length_bytes: u64) -> Range<u64> {
    offset / BLOCK_BYTES..(offset + length_bytes).div_ceil(BLOCK_BYTES)
}

/// The part of `a` that is also in `b`; may be empty.
pub(crate) fn overlap(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Bytes of the packed states of this many blocks, without a page's padding.
pub(crate) fn packed_bytes(blocks: u64) -> u64 {
    blocks.div_ceil(4)
}

/// The number of pages for the states of this many blocks.
pub(crate) fn page_count(blocks: u64) -> usize {
    index(blocks.div_ceil(PAGE_BLOCKS))
}

/// A range of blocks as one part per page of states.
pub(crate) fn by_page(blocks: Range<u64>) -> impl Iterator<Item = (usize, Range<u64>)> {
    let mut at = blocks.start;
    std::iter::from_fn(move || {
        (at < blocks.end).then(|| {
            let page = at / PAGE_BLOCKS;
            let part = at..blocks.end.min((page + 1) * PAGE_BLOCKS);
            at = part.end;
            (index(page), part)
        })
    })
}

/// The states of [`PAGE_BLOCKS`] blocks: block `n` of it is bits `2 * (n % 32)` and up of word
/// `n / 32`. On disk the words are little endian.
pub(crate) struct StatePage {
    words: [AtomicU64; PAGE_WORDS],
    changing: Mutex<()>,
}

/// The bits of the blocks of `range` in word `word`.
fn mask(word: u64, range: &Range<u64>) -> u64 {
    let first = word * WORD_BLOCKS;
    let bits_below = |block: u64| match block.clamp(first, first + WORD_BLOCKS) - first {
        WORD_BLOCKS => u64::MAX,
        blocks => (1 << (2 * blocks)) - 1,
    };
    bits_below(range.end) & !bits_below(range.start)
}

impl StatePage {
    fn new() -> Box<Self> {
        Box::new(Self {
            words: [const { AtomicU64::new(0) }; PAGE_WORDS],
            changing: Mutex::new(()),
        })
    }

    fn word(&self, word: u64) -> u64 {
        self.words[index(word)].load(Ordering::Acquire)
    }

    fn get(&self, block: u64) -> BlockState {
        BlockState::from_bits(self.word(block / WORD_BLOCKS) >> (2 * (block % WORD_BLOCKS)))
    }

    /// Where the run of `state` from `range.start` on ends within `range`.
    fn run_end(&self, range: &Range<u64>, state: BlockState) -> u64 {
        let mut at = range.start;
        while at < range.end {
            let differing =
                (self.word(at / WORD_BLOCKS) ^ state.pattern()) >> (2 * (at % WORD_BLOCKS));
            if differing != 0 {
                return range.end.min(at + u64::from(differing.trailing_zeros() / 2));
            }
            at = (at / WORD_BLOCKS + 1) * WORD_BLOCKS;
        }
        range.end
    }

    /// Each word that blocks of `range` are in, as it is once they have `state`.
    fn words_with(
        &self,
        range: &Range<u64>,
        state: BlockState,
    ) -> impl Iterator<Item = (u64, u64)> {
        (range.start / WORD_BLOCKS..range.end.div_ceil(WORD_BLOCKS)).map(move |word| {
            let mask = mask(word, range);
            (word, self.word(word) & !mask | state.pattern() & mask)
        })
    }

    /// Locks the page against other changes.
    fn change(&self) -> MutexGuard<'_, ()> {
        lock(&self.changing)
    }

    fn payload(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.load(Ordering::Acquire).to_le_bytes()).collect()
    }

    fn data_blocks(&self) -> u64 {
        self.count(|word| word & LOW_BITS & !(word >> 1))
    }

    /// Data and zeros.
    fn known_blocks(&self) -> u64 {
        self.count(|word| (word ^ word >> 1) & LOW_BITS)
    }

    fn remote_blocks(&self) -> u64 {
        self.count(|word| word & word >> 1 & LOW_BITS)
    }

    /// Counts the bits that are set in `of(word)`, over all words.
    fn count(&self, of: impl Fn(u64) -> u64) -> u64 {
        let words = self.words.iter();
        words.map(|word| u64::from(of(word.load(Ordering::Relaxed)).count_ones())).sum()
    }
}

/// The state of each block of a layer. Pages whose blocks are all absent take no memory.
pub(crate) struct BlockStates {
    pages: Sparse<Box<StatePage>>,
    blocks: u64,
}

impl std::fmt::Debug for BlockStates {
    /// Prints runs of equal states, because a large layer has millions of bytes of states.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.runs(0..self.blocks)).finish()
    }
}

impl BlockStates {
    /// All absent.
    pub(crate) fn new(blocks: u64) -> Self {
        Self { pages: Sparse::new(page_count(blocks)), blocks }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) fn has_page(&self, page: usize) -> bool {
        self.pages.get(page).is_some()
    }

    /// The allocated pages. All blocks of the other pages are absent.
    pub(crate) fn pages_in_use(&self) -> impl Iterator<Item = usize> {
        self.pages.in_use().map(|(page, _)| page)
    }

    /// The packed states of a page.
    pub(crate) fn payload(&self, page: usize) -> Vec<u8> {
        self.pages.get(page).map_or_else(|| vec![0; PAGE_STATE_BYTES], |page| page.payload())
    }

    /// Loads the states of a page that nothing uses yet. Returns `false` if the bytes are too many or
    /// name blocks beyond the end.
    pub(crate) fn load(&self, page: usize, payload: &[u8]) -> bool {
        let blocks_left = self.blocks.saturating_sub(page as u64 * PAGE_BLOCKS);
        let words = payload.chunks(8).map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        });
        let valid = |(at, word): (u64, u64)| {
            let beyond = !mask(at, &(0..blocks_left));
            word & beyond == 0
        };
        if payload.len() > PAGE_STATE_BYTES || !(0..).zip(words.clone()).all(valid) {
            return false;
        }
        let to = self.pages.get_or_init(page, StatePage::new);
        for (to, word) in to.words.iter().zip(words) {
            to.store(word, Ordering::Release);
        }
        true
    }

    pub(crate) fn get(&self, block: u64) -> BlockState {
        let page = self.pages.get(index(block / PAGE_BLOCKS));
        page.map_or(BlockState::Absent, |page| page.get(block % PAGE_BLOCKS))
    }

    /// The state at `range.start` and where the run of it ends within `range`.
    pub(crate) fn run(&self, range: &Range<u64>) -> (BlockState, u64) {
        let state = self.get(range.start);
        let mut at = range.start;
        while at < range.end {
            let number = at / PAGE_BLOCKS;
            let first = number * PAGE_BLOCKS;
            let page_end = range.end.min(first + PAGE_BLOCKS);
            if let Some(page) = self.pages.get(index(number)) {
                let end = first + page.run_end(&(at - first..page_end - first), state);
                if end < page_end {
                    return (state, end);
                }
                at = end;
            } else if state == BlockState::Absent {
                let next = self.pages.next_in_use(index(number) + 1);
                at = next.map_or(range.end, |page| range.end.min(page as u64 * PAGE_BLOCKS));
            } else {
                return (state, at);
            }
        }
        (state, range.end)
    }

    /// Splits `range` into runs of equal state. Two neighbouring runs may have the same state if blocks
    /// change at the same time.
    pub(crate) fn runs(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, BlockState)> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            (at < range.end).then(|| {
                let (state, end) = self.run(&(at..range.end));
                // The block may have changed between the two looks at it.
                let run = at..end.max(at + 1);
                at = run.end;
                (run, state)
            })
        })
    }

    /// Whether all blocks of the range have this state.
    pub(crate) fn all_are(&self, range: &Range<u64>, state: BlockState) -> bool {
        range.is_empty() || self.run(range) == (state, range.end)
    }

    /// Gives blocks of one page a state. Before the change is made in memory, `write_down` gets the offset
    /// and the bytes of the packed states that change. If it fails, nothing is changed.
    pub(crate) fn change<E>(
        &self,
        blocks: &Range<u64>,
        state: BlockState,
        write_down: impl FnOnce(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let number = blocks.start / PAGE_BLOCKS;
        let page = self.pages.get_or_init(index(number), StatePage::new);
        let first = number * PAGE_BLOCKS;
        let blocks = blocks.start - first..blocks.end - first;
        let _turn = page.change();
        let bytes: Vec<u8> =
            page.words_with(&blocks, state).flat_map(|(_, word)| word.to_le_bytes()).collect();
        let byte_of_first_word = blocks.start / WORD_BLOCKS * 8;
        let from = blocks.start / 4;
        let part =
            index(from - byte_of_first_word)..index(blocks.end.div_ceil(4) - byte_of_first_word);
        write_down(number * PAGE_STATE_BYTES as u64 + from, &bytes[part])?;
        for (word, value) in page.words_with(&blocks, state) {
            page.words[index(word)].store(value, Ordering::Release);
        }
        Ok(())
    }

    /// As [`Self::change`], in memory only.
    pub(crate) fn set(&self, blocks: Range<u64>, state: BlockState) {
        for (_, part) in by_page(blocks) {
            let set: Result<(), std::convert::Infallible> =
                self.change(&part, state, |_, _| Ok(()));
            set.expect("it can't fail");
        }
    }

    /// How many bytes of the layer are data or zeros here.
    pub(crate) fn known_bytes(&self) -> u64 {
        let blocks: u64 = self.pages.in_use().map(|(_, page)| page.known_blocks()).sum();
        blocks * BLOCK_BYTES
    }

    /// How many bytes of the layer are still at another host.
    pub(crate) fn remote_bytes(&self) -> u64 {
        let blocks: u64 = self.pages.in_use().map(|(_, page)| page.remote_blocks()).sum();
        blocks * BLOCK_BYTES
    }

    /// How many bytes of the layer are data.
    pub(crate) fn data_bytes(&self) -> u64 {
        let blocks: u64 = self.pages.in_use().map(|(_, page)| page.data_blocks()).sum();
        blocks * BLOCK_BYTES
    }
}

#[cfg(test)]
impl PartialEq for BlockStates {
    fn eq(&self, other: &Self) -> bool {
        self.blocks == other.blocks && self.runs(0..self.blocks).eq(other.runs(0..self.blocks))
    }
}

/// Refuses a range that is not within a volume. The volume may have become smaller since the protocol
/// server checked the range.
pub(crate) fn check_range(size_bytes: u64, offset: u64, length_bytes: u64) -> Result<(), IoError> {
    if is_within(size_bytes, offset, length_bytes) {
        return Ok(());
    }
    let why = format!("{length_bytes} bytes at {offset} of a volume of {size_bytes}");
    Err(IoError::Invalid(why))
}

/// Adds an extent, and merges it with the last one if they are of the same kind.
pub(crate) fn join(extents: &mut Vec<Extent>, next: Extent) {
    match extents.last_mut() {
        Some(last) if (last.hole, last.zero) == (next.hole, next.zero) => {
            last.length_bytes += next.length_bytes;
        }
        _ => extents.push(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_a_range_leaves_its_neighbours() {
        let states = BlockStates::new(123);
        states.set(3..98, BlockState::Zero);
        states.set(5..6, BlockState::Data);
        states.set(64..96, BlockState::Data);
        let found: Vec<_> = states.runs(0..123).collect();
        assert_eq!(
            found,
            [
                (0..3, BlockState::Absent),
                (3..5, BlockState::Zero),
                (5..6, BlockState::Data),
                (6..64, BlockState::Zero),
                (64..96, BlockState::Data),
                (96..98, BlockState::Zero),
                (98..123, BlockState::Absent),
            ]
        );
        assert_eq!(states.data_bytes(), 33 * BLOCK_BYTES);
    }

    #[test]
    fn blocks_at_another_host_are_neither_data_nor_known() {
        let states = BlockStates::new(100);
        states.set(0..40, BlockState::Remote);
        states.set(10..11, BlockState::Data);
        states.set(11..13, BlockState::Zero);
        let found: Vec<_> = states.runs(0..100).map(|(run, state)| (run.start, state)).collect();
        assert_eq!(
            found,
            [
                (0, BlockState::Remote),
                (10, BlockState::Data),
                (11, BlockState::Zero),
                (13, BlockState::Remote),
                (40, BlockState::Absent),
            ]
        );
        let counted = [states.data_bytes(), states.known_bytes(), states.remote_bytes()];
        assert_eq!(counted.map(|bytes| bytes / BLOCK_BYTES), [1, 3, 37]);
        let loaded = BlockStates::new(100);
        assert!(loaded.load(0, &states.payload(0)) && loaded == states);
    }

    #[test]
    fn runs_go_on_over_pages_and_over_pages_that_are_not_there() {
        let blocks = (16 << 40) / BLOCK_BYTES;
        let states = BlockStates::new(blocks);
        let middle = 1000 * PAGE_BLOCKS;
        states.set(middle - 2..middle + PAGE_BLOCKS + 7, BlockState::Data);
        let found: Vec<_> = states.runs(0..blocks).collect();
        let data = middle - 2..middle + PAGE_BLOCKS + 7;
        assert_eq!(
            found,
            [
                (0..data.start, BlockState::Absent),
                (data.clone(), BlockState::Data),
                (data.end..blocks, BlockState::Absent),
            ]
        );
        assert_eq!(states.pages_in_use().collect::<Vec<_>>(), [999, 1000, 1001]);
    }

    #[test]
    fn what_is_written_down_are_the_bytes_of_the_changed_blocks() {
        let states = BlockStates::new(2 * PAGE_BLOCKS);
        states.set(PAGE_BLOCKS + 40..PAGE_BLOCKS + 41, BlockState::Data);
        let range = PAGE_BLOCKS + 42..PAGE_BLOCKS + 49;
        let mut written = None;
        let changed: Result<(), ()> = states.change(&range, BlockState::Zero, |at, bytes| {
            written = Some((at, bytes.to_vec()));
            Ok(())
        });
        changed.expect("it can't fail");
        assert_eq!(written, Some((4064 + 10, vec![0b1010_0001, 0b1010_1010, 0b0000_0010])));
        let failed = states.change(&range, BlockState::Data, |_, _| Err(()));
        assert!(failed.is_err() && states.all_are(&range, BlockState::Zero));
    }

    #[test]
    fn bytes_that_are_no_states_are_refused() {
        let load = |blocks, payload: &[u8]| BlockStates::new(blocks).load(0, payload);
        assert!(load(4, &[0b0110_0000]));
        assert!(!load(3, &[0b0100_0000]), "beyond the end");
        assert!(!load(4, &[0, 1]), "beyond the end");
        assert!(!load(PAGE_BLOCKS * 2, &[0; PAGE_STATE_BYTES + 1]), "too long");
    }
}
