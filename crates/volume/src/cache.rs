//! Blocks of other hosts' volumes in memory: one bounded store for all proxied volumes of this host.
//! [`crate::coherent`] decides which blocks may be kept, and when they may be read.
//!
//! When the store is full, it drops blocks that were not read for a while ([`Clock`]).

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use perigee_block::locking::lock;
use perigee_model::clock::Clock;
use perigee_model::volume::BLOCK_BYTES;
use tokio::sync::Semaphore;

const BLOCK: usize = 4096;
/// This many consecutive blocks are in one shard.
const RUN_BLOCKS: u64 = 64;
const SHARDS: usize = 16;

/// The number of a volume's content, which changes when another host may have written. Numbers are never used
/// again, so blocks of an older content are not read any more, and are dropped with time.
pub type Content = u64;

/// Blocks of other hosts' volumes, in memory.
pub struct ReadCache {
    shards: Vec<Mutex<Shard>>,
    shard_blocks_max: usize,
    /// One permit for each block that may be fetched ahead at the same time.
    pub ahead: Arc<Semaphore>,
}

/// The most blocks that are fetched ahead at the same time.
const AHEAD_BLOCKS_MAX: usize = 64 << 20 >> 12;

type Shard = Clock<(Content, u64), Box<[u8; BLOCK]>>;

impl ReadCache {
    /// As many blocks as fit into so many bytes.
    pub fn new(size_bytes: u64) -> Self {
        let blocks = usize::try_from(size_bytes / BLOCK_BYTES).unwrap_or(usize::MAX);
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let ahead = Arc::new(Semaphore::new(AHEAD_BLOCKS_MAX.min(blocks / 4)));
        Self { shards, shard_blocks_max: blocks / SHARDS, ahead }
    }

    fn shard(&self, content: Content, block: u64) -> MutexGuard<'_, Shard> {
        let number = (content.wrapping_mul(7) ^ (block / RUN_BLOCKS)) % SHARDS as u64;
        let shard = &self.shards[usize::try_from(number).unwrap_or(0)];
        lock(shard)
    }

    /// The parts of a range of blocks, each in one shard.
    fn runs(blocks: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let mut at = blocks.start;
        std::iter::from_fn(move || {
            let end = ((at / RUN_BLOCKS + 1) * RUN_BLOCKS).min(blocks.end);
            let run = at..end;
            at = end;
            (!run.is_empty()).then_some(run)
        })
    }

    /// Copies the bytes into `buffer`. Returns false if some of them are not in memory.
    pub fn read(&self, content: Content, offset: u64, buffer: &mut [u8]) -> bool {
        let end = offset + buffer.len() as u64;
        let blocks = offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        let mut rest = buffer;
        for run in Self::runs(blocks) {
            let mut shard = self.shard(content, run.start);
            for block in run {
                let Some(data) = shard.read(&(content, block)) else { return false };
                let begins = block * BLOCK_BYTES;
                let (from, to) = (offset.max(begins) - begins, (end - begins).min(BLOCK_BYTES));
                let part = &data[index(from)..index(to)];
                let (here, after) = rest.split_at_mut(part.len());
                here.copy_from_slice(part);
                rest = after;
            }
        }
        true
    }

    /// The range from the first missing block to the last one.
    pub fn missing(&self, content: Content, blocks: &Range<u64>) -> Option<Range<u64>> {
        let mut missing: Option<Range<u64>> = None;
        for run in Self::runs(blocks.clone()) {
            let shard = self.shard(content, run.start);
            for block in run.filter(|block| shard.get(&(content, *block)).is_none()) {
                let start = missing.as_ref().map_or(block, |range| range.start);
                missing = Some(start..block + 1);
            }
        }
        missing
    }

    /// Keeps the whole blocks of `data`.
    pub fn insert(&self, content: Content, offset: u64, data: &[u8]) {
        let first = offset.div_ceil(BLOCK_BYTES);
        let skip = index(first * BLOCK_BYTES - offset);
        let whole = data.get(skip..).unwrap_or_default().as_chunks::<BLOCK>().0;
        for run in Self::runs(first..first + whole.len() as u64) {
            let mut shard = self.shard(content, run.start);
            for block in run {
                let key = (content, block);
                let place = shard.place(key, self.shard_blocks_max, || Box::new([0; BLOCK]));
                if let Some(data) = place {
                    **data = whole[index(block - first)];
                }
            }
        }
    }

    /// Drops these blocks.
    pub fn remove(&self, content: Content, blocks: Range<u64>) {
        for run in Self::runs(blocks) {
            let mut shard = self.shard(content, run.start);
            for block in run {
                shard.remove(&(content, block));
            }
        }
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(byte: u8) -> Vec<u8> {
        vec![byte; BLOCK]
    }

    #[test]
    fn what_was_kept_is_read_and_only_that() {
        let cache = ReadCache::new(64 << 20);
        // The half block at each end is not kept.
        let data = [vec![1; 2048], block(2), block(3), vec![4; 2048]].concat();
        cache.insert(7, 2048, &data);
        let mut buffer = [0; 4096];
        assert!(cache.read(7, 4096 + 2048, &mut buffer));
        assert_eq!((buffer[2047], buffer[2048]), (2, 3));
        assert!(!cache.read(7, 2048, &mut buffer) && !cache.read(8, 4096, &mut buffer));
        assert_eq!(cache.missing(7, &(0..200)), Some(0..200));
        assert_eq!(cache.missing(7, &(1..3)), None);
        cache.remove(7, 2..100);
        assert_eq!(cache.missing(7, &(0..4)), Some(0..4));
        assert!(cache.read(7, 4096, &mut buffer) && !cache.read(7, 8192, &mut buffer));
    }

    #[test]
    fn it_never_has_more_than_its_limit_and_keeps_what_is_read() {
        let limit = SHARDS * 8;
        let cache = ReadCache::new((limit * BLOCK) as u64);
        let mut buffer = [0; 4096];
        let mut kept = 0;
        for number in 0..100_000_u64 {
            cache.insert(1, number * BLOCK_BYTES, &block(5));
            kept += u32::from(cache.read(1, 0, &mut buffer));
        }
        let slots: usize = (0..16).map(|n| cache.shard(1, n * RUN_BLOCKS).slots()).sum();
        assert_eq!(slots, limit);
        assert_eq!(kept, 100_000, "the block that is read all the time stays");
    }
}
