//! A volume's writable layer, and the order in which its writes become durable.
//!
//! A write: bytes into the data file, then the changed states into the live map, then into
//! memory, then the acknowledgement. A flush, one at a time:
//!
//! 1. take the set of dirty map pages, with their states as they are now;
//! 2. sync the data file: every state taken in 1 had its bytes written before;
//! 3. write exactly the pages taken, and sync the map; skipped when no block changed state;
//! 4. punch holes for blocks that 1 took as zero and that still are.
//!
//! States that change after 1 belong to the next flush. A failed sync is never tried again,
//! since the kernel reports a lost write once: the head is poisoned, reads go on, writes are
//! refused.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use perigee_model::LayerId;
use perigee_model::volume::BLOCK_BYTES;
use uuid::Uuid;

use super::blocks::{BlockState, BlockStates, blocks_of, index};
use super::files::{LayerFiles, Space};
use super::layer::{Layer, LayerError, data_name, live_name, map_name};
use super::live::LiveMap;
use super::locks::RangeLocks;
use super::map::{self, MapError, MapFile, PAYLOAD_BYTES, StoreError};
use crate::device::{IoError, Zeroing};

/// Bytes from `offset` on. Where they end within a block, that block is data already: whoever
/// makes a patch fills up the other blocks. They go to the file in one write, so that no sector
/// is ever half filled up.
pub(super) struct Patch {
    pub(super) offset: u64,
    pub(super) data: Bytes,
}

/// What changed since the last flush took it.
#[derive(Default)]
struct Dirty {
    map_pages: BTreeSet<usize>,
    /// Ranges that became zero and whose space may be given back.
    zeroed: Vec<Range<u64>>,
}

/// What one flush makes durable.
struct Taken {
    pages: Vec<(usize, Vec<u8>)>,
    zeroed: Vec<Range<u64>>,
}

pub(super) struct Head {
    pub(super) layer: Arc<Layer>,
    pub(super) locks: Arc<RangeLocks>,
    live: LiveMap,
    /// Held for the length of a flush.
    map: Mutex<MapFile>,
    /// Locked only while `layer.states` is, so that a flush takes states and set together.
    dirty: Mutex<Dirty>,
    /// Something was written that no flush has taken yet.
    unsynced: AtomicBool,
    poisoned: OnceLock<String>,
    flush_turn: Arc<tokio::sync::Mutex<()>>,
}

impl Head {
    /// Makes the files of an empty head; durable once the names are synced.
    pub(super) fn create(
        files: &dyn LayerFiles,
        id: LayerId,
        size_bytes: u64,
        boot: Uuid,
    ) -> io::Result<Self> {
        let states = BlockStates::new(size_bytes / BLOCK_BYTES);
        let data = files.create(&data_name(id), size_bytes, Space::OnDemand)?;
        let map_bytes = map::file_bytes(states.blocks());
        let map = files.create(&map_name(id), map_bytes, Space::Reserved)?;
        let map = MapFile::create(map, id, &states)?;
        let live = LiveMap::create(files, &live_name(id), id, boot, &states)?;
        let layer = Layer { id, data, states: states.into() };
        Ok(Self::assemble(layer, map, live, Dirty::default(), false))
    }

    /// Opens a head as the last process of this boot left it, or else as the last flush did.
    pub(super) fn open(
        files: &dyn LayerFiles,
        id: LayerId,
        size_bytes: u64,
        boot: Uuid,
    ) -> Result<Self, LayerError> {
        Self::try_open(files, id, size_bytes, boot)
            .map_err(|source| LayerError { layer: id, source })
    }

    fn try_open(
        files: &dyn LayerFiles,
        id: LayerId,
        size_bytes: u64,
        boot: Uuid,
    ) -> Result<Self, MapError> {
        let blocks = size_bytes / BLOCK_BYTES;
        let data = files.open(&data_name(id))?;
        let map = files.open(&map_name(id))?;
        // A killed process may have left pages that were written and not synced.
        map.sync()?;
        let (map, durable) = MapFile::load(map, id, blocks)?;
        let left = match files.open(&live_name(id)) {
            Ok(file) => LiveMap::load(file, id, boot, blocks)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        let (live, states, map_pages) = match left {
            Some((live, states)) => {
                let pages = differing_pages(&durable, &states);
                (live, states, pages)
            }
            None => {
                let live = LiveMap::create(files, &live_name(id), id, boot, &durable)?;
                (live, durable, BTreeSet::new())
            }
        };
        // Which holes were punched is not recorded; punching one twice costs little.
        let zeroed = zero_runs(&states, 0..blocks);
        let layer = Layer { id, data, states: states.into() };
        Ok(Self::assemble(layer, map, live, Dirty { map_pages, zeroed }, true))
    }

    fn assemble(layer: Layer, map: MapFile, live: LiveMap, dirty: Dirty, unsynced: bool) -> Self {
        Self {
            layer: Arc::new(layer),
            locks: Arc::default(),
            live,
            map: Mutex::new(map),
            dirty: Mutex::new(dirty),
            unsynced: AtomicBool::new(unsynced),
            poisoned: OnceLock::new(),
            flush_turn: Arc::default(),
        }
    }

    /// Why it is read-only, if it is.
    pub(super) fn poisoned(&self) -> Option<&str> {
        self.poisoned.get().map(String::as_str)
    }

    pub(super) fn poison(&self, why: String) -> IoError {
        IoError::Poisoned(self.poisoned.get_or_init(|| why).clone())
    }

    pub(super) fn check_writable(&self) -> Result<(), IoError> {
        self.poisoned().map_or(Ok(()), |why| Err(IoError::Poisoned(why.to_owned())))
    }

    /// Whether nothing was ever written or zeroed here.
    pub(super) fn is_untouched(&self) -> bool {
        let states = self.layer.states.read().expect("no holder panics");
        states.all_are(&(0..states.blocks()), BlockState::Absent)
    }

    /// The caller holds the locks of the patch's blocks.
    pub(super) fn write(&self, patch: &Patch) -> Result<(), IoError> {
        self.check_writable()?;
        self.layer.data.write_at(patch.offset, &patch.data)?;
        self.mark(blocks_of(patch.offset, patch.data.len() as u64), BlockState::Data, None)
    }

    /// Makes whole blocks zero. The caller holds their locks.
    pub(super) fn zero(&self, blocks: Range<u64>, how: Zeroing) -> Result<(), IoError> {
        self.check_writable()?;
        let punch = (how == Zeroing::FreeSpace).then(|| blocks.clone());
        self.mark(blocks, BlockState::Zero, punch)
    }

    /// Gives blocks a state, for a kill of this process at once, for a power cut with a flush.
    fn mark(
        &self,
        blocks: Range<u64>,
        state: BlockState,
        punch: Option<Range<u64>>,
    ) -> Result<(), IoError> {
        let same = self.layer.states.read().expect("no holder panics").all_are(&blocks, state);
        if !same || punch.is_some() {
            let mut states = self.layer.states.write().expect("no holder panics");
            let (first_byte, bytes) = states.preview(&blocks, state);
            if !same {
                self.live.write(first_byte, &bytes)?;
                states.apply(first_byte, &bytes);
            }
            let mut dirty = self.dirty.lock().expect("no holder panics");
            if !same {
                let last_byte = first_byte + bytes.len() - 1;
                dirty.map_pages.extend(first_byte / PAYLOAD_BYTES..=last_byte / PAYLOAD_BYTES);
            }
            dirty.zeroed.extend(punch);
        }
        // After the bytes are written: a flush that clears this before its sync covers them.
        self.unsynced.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Every write that returned before is durable when this returns well.
    pub(super) async fn flush(self: &Arc<Self>) -> Result<(), IoError> {
        let turn = Arc::clone(&self.flush_turn).lock_owned().await;
        let head = Arc::clone(self);
        super::blocking(move || {
            let _turn = turn;
            head.flush_now()
        })
        .await
    }

    /// The flush itself; blocks.
    pub(super) fn flush_now(&self) -> Result<(), IoError> {
        let mut map = self.map.lock().expect("no holder panics");
        self.check_writable()?;
        if !self.unsynced.swap(false, Ordering::SeqCst) {
            return Ok(());
        }
        let taken = self.take_dirty();
        self.layer
            .data
            .sync()
            .map_err(|error| self.poison(format!("can't sync its data: {error}")))?;
        if !taken.pages.is_empty() {
            match map.store(&taken.pages) {
                Ok(()) => {}
                Err(StoreError::Write(error)) => {
                    self.put_back(taken);
                    return Err(error.into());
                }
                Err(error @ StoreError::Sync(_)) => return Err(self.poison(error.to_string())),
            }
        }
        self.punch(taken.zeroed);
        Ok(())
    }

    fn take_dirty(&self) -> Taken {
        let states = self.layer.states.read().expect("no holder panics");
        let dirty = std::mem::take(&mut *self.dirty.lock().expect("no holder panics"));
        let packed = states.packed();
        let pages = dirty
            .map_pages
            .into_iter()
            .map(|page| (page, packed[map::payload_range(page, packed.len())].to_vec()))
            .collect();
        let zeroed = dirty.zeroed.into_iter().flat_map(|range| zero_runs(&states, range)).collect();
        Taken { pages, zeroed }
    }

    fn put_back(&self, taken: Taken) {
        let _states = self.layer.states.read().expect("no holder panics");
        let mut dirty = self.dirty.lock().expect("no holder panics");
        dirty.map_pages.extend(taken.pages.into_iter().map(|(page, _)| page));
        dirty.zeroed.extend(taken.zeroed);
        self.unsynced.store(true, Ordering::SeqCst);
    }

    /// Gives back the space of blocks whose zero state is durable. What is being written now
    /// waits for the next flush; so does what the filesystem refuses, since space is all it costs.
    fn punch(&self, zeroed: Vec<Range<u64>>) {
        let mut later = Vec::new();
        for range in zeroed {
            let Some(_guard) = self.locks.try_lock(range.clone()) else {
                later.push(range);
                continue;
            };
            let runs = {
                let states = self.layer.states.read().expect("no holder panics");
                zero_runs(&states, range)
            };
            for run in runs {
                let (at, length) = (run.start * BLOCK_BYTES, (run.end - run.start) * BLOCK_BYTES);
                if let Err(error) = self.layer.data.punch_hole(at, length) {
                    tracing::warn!(layer = %self.layer.id, %error, "can't give space back");
                    later.push(run);
                }
            }
        }
        self.dirty.lock().expect("no holder panics").zeroed.extend(later);
    }
}

fn zero_runs(states: &BlockStates, range: Range<u64>) -> Vec<Range<u64>> {
    states.runs(range).filter(|(_, state)| *state == BlockState::Zero).map(|(run, _)| run).collect()
}

/// The map pages in which two sets of states differ.
fn differing_pages(a: &BlockStates, b: &BlockStates) -> BTreeSet<usize> {
    let pages = a.packed().chunks(PAYLOAD_BYTES).zip(b.packed().chunks(PAYLOAD_BYTES));
    pages.enumerate().filter(|(_, (a, b))| a != b).map(|(page, _)| page).collect()
}

/// Where a partial first and last block of a range lie: `(block, bytes of it in the range)`.
pub(super) fn partial_edges(offset: u64, length_bytes: u64) -> Vec<(u64, Range<usize>)> {
    let blocks = blocks_of(offset, length_bytes);
    let mut edges = Vec::new();
    for block in [blocks.start, blocks.end.saturating_sub(1)] {
        let start = offset.max(block * BLOCK_BYTES) - block * BLOCK_BYTES;
        let end = (offset + length_bytes).min((block + 1) * BLOCK_BYTES) - block * BLOCK_BYTES;
        if (start > 0 || end < BLOCK_BYTES) && edges.last().is_none_or(|(last, _)| *last != block) {
            edges.push((block, index(start)..index(end)));
        }
    }
    edges
}
