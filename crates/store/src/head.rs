//! A volume's writable layer, and the order in which its writes become durable.
//!
//! A write: bytes into the data file, then the changed states into the live map, then into
//! memory, then the acknowledgement. A flush, one at a time:
//!
//! 1. take the set of dirty map pages, with their states as they are now;
//! 2. sync the data file: every state taken in 1 had its bytes written before;
//! 3. write exactly the pages taken, and sync the map; skipped when no block changed state;
//! 4. at the first flush, sync the names of the files, and record in the catalog that the layer
//!    was touched;
//! 5. punch holes for blocks that 1 took as zero and that still are.
//!
//! States that change after 1 belong to the next flush. A failed sync is never tried again,
//! since the kernel reports a lost write once: the head is poisoned, reads go on, writes are
//! refused. The live map notes it at once, the catalog soon after.
//!
//! **A head gets its files with its first write**, so that a clone is one catalog transaction. The
//! catalog calls a layer untouched from its creation until 4. What the next server finds of an
//! untouched head:
//!
//! | what happened | what is found |
//! |---|---|
//! | nothing was written | no files: an empty head |
//! | a kill while the files were made | no live map (its header comes last): an empty head, whose first write makes the files anew |
//! | a kill after that | this boot's live map: the truth, as for every head |
//! | a power cut before 3 | no live map of this boot and no durable one (its header comes with the first flush): an empty head |
//! | a power cut in 3 or 4, or 4 found the disk full | a durable map, as after every flush; or some of the files or none, and then no flush was acknowledged: an empty head, which durably removes them before it makes its own |
//!
//! A touched layer whose files are missing is an error, never an empty head.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use perigee_block::device::{IoError, Zeroing};
use perigee_block::trace::{self, Stage};
use perigee_model::LayerId;
use perigee_model::volume::{BLOCK_BYTES, CachePolicy};
use uuid::Uuid;

use super::blocks::{BlockState, BlockStates, blocks_of, by_page, index};
use super::files::{BlockFile, LayerFiles};
use super::layer::{self, Layer, LayerError, data_name, live_name, map_name};
use super::live::LiveMap;
use super::locks::RangeLocks;
use super::map::{self, MapError, MapFile, StoreError};

/// Where heads are kept.
pub(super) struct HeadHome {
    pub(super) files: Arc<dyn LayerFiles>,
    /// The kernel's id of this boot.
    pub(super) boot: Uuid,
    /// Records durably that a layer was touched.
    pub(super) record_touched: Box<dyn Fn(LayerId) -> io::Result<()> + Send + Sync>,
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

/// What a head has on disk besides its data.
struct Files {
    live: LiveMap,
    map: Arc<dyn BlockFile>,
}

/// What a flush writes to.
struct Durable {
    /// `None` until the head has files.
    map: Option<MapFile>,
    /// The names of the files are durable, and the catalog knows that the layer was touched.
    recorded: bool,
}

pub(super) struct Head {
    pub(super) layer: Arc<Layer>,
    pub(super) locks: Arc<RangeLocks>,
    pub(super) cache: CachePolicy,
    home: Arc<HeadHome>,
    files: OnceLock<Files>,
    /// Held for the length of a flush.
    durable: Mutex<Durable>,
    /// A change of states is entered here after it was made. A flush takes it before it looks at
    /// the states, so what it takes is whole.
    dirty: Mutex<Dirty>,
    /// Something was written that no flush has taken yet.
    unsynced: AtomicBool,
    /// A write of the live map has failed and may have left a part there: from then on every write
    /// writes its states down, also where they seem to be the same.
    live_unsure: AtomicBool,
    poisoned: OnceLock<String>,
    flush_lock: Arc<tokio::sync::Mutex<()>>,
}

impl Head {
    /// An empty head without files.
    pub(super) fn new(home: &Arc<HeadHome>, id: LayerId, size_bytes: u64) -> Self {
        let durable = Durable { map: None, recorded: false };
        Self::assemble(home, Layer::empty(id, size_bytes), OnceLock::new(), durable)
    }

    /// Opens a head as the last process of this boot left it, or else as the last flush did.
    /// `untouched` is what the catalog calls it.
    pub(super) fn open(
        home: &Arc<HeadHome>,
        id: LayerId,
        size_bytes: u64,
        untouched: bool,
    ) -> Result<Self, LayerError> {
        let opened = if untouched && !layer::was_flushed(&*home.files, id, size_bytes)? {
            Self::open_unflushed(home, id, size_bytes)
        } else {
            Self::open_flushed(home, id, size_bytes, !untouched)
        };
        opened.map_err(|source| LayerError { layer: id, source })
    }

    fn open_unflushed(
        home: &Arc<HeadHome>,
        id: LayerId,
        size_bytes: u64,
    ) -> Result<Self, MapError> {
        let blocks = size_bytes / BLOCK_BYTES;
        let Some((live, states)) = load_live(home, id, blocks)? else {
            return Ok(Self::new(home, id, size_bytes));
        };
        // They were made before the live map's header.
        let data = home.files.open(&data_name(id))?;
        let map = home.files.open(&map_name(id))?;
        let dirty = Dirty {
            map_pages: states.pages_in_use().collect(),
            zeroed: zero_runs(&states, 0..blocks),
        };
        let new_map = MapFile::new(Arc::clone(&map), id, blocks);
        let durable = Durable { map: Some(new_map), recorded: false };
        let layer = Layer::new(id, data, states);
        Ok(Self::assemble(home, layer, Files { live, map }.into(), durable).with(dirty))
    }

    fn open_flushed(
        home: &Arc<HeadHome>,
        id: LayerId,
        size_bytes: u64,
        recorded: bool,
    ) -> Result<Self, MapError> {
        let blocks = size_bytes / BLOCK_BYTES;
        let data = home.files.open(&data_name(id))?;
        let map = home.files.open(&map_name(id))?;
        // A killed process may have left pages that were written and not synced.
        map.sync_created()?;
        let (durable, flushed) = MapFile::load(Arc::clone(&map), id, blocks)?;
        let durable = Durable { map: Some(durable), recorded };
        let (live, states, map_pages) = match load_live(home, id, blocks)? {
            Some((live, states)) => {
                let pages = differing_pages(&flushed, &states);
                (live, states, pages)
            }
            None => {
                let name = live_name(id);
                let live = LiveMap::create(&*home.files, &name, id, home.boot, &flushed)?;
                (live, flushed, BTreeSet::new())
            }
        };
        // Which holes were punched is not recorded; punching one twice costs little.
        let dirty = Dirty { map_pages, zeroed: zero_runs(&states, 0..blocks) };
        let layer = Layer::new(id, data, states);
        Ok(Self::assemble(home, layer, Files { live, map }.into(), durable).with(dirty))
    }

    fn assemble(
        home: &Arc<HeadHome>,
        layer: Layer,
        files: OnceLock<Files>,
        durable: Durable,
    ) -> Self {
        let poisoned = OnceLock::new();
        if files.get().is_some_and(|files| files.live.was_poisoned) {
            poisoned.get_or_init(|| "a sync failed before the last server ended".to_owned());
        }
        Self {
            layer: Arc::new(layer),
            locks: Arc::default(),
            cache: CachePolicy::Shared,
            home: Arc::clone(home),
            files,
            durable: Mutex::new(durable),
            dirty: Mutex::default(),
            unsynced: AtomicBool::new(false),
            live_unsure: AtomicBool::new(false),
            poisoned,
            flush_lock: Arc::default(),
        }
    }

    /// What the first flush has to do.
    fn with(self, dirty: Dirty) -> Self {
        Self { dirty: Mutex::new(dirty), unsynced: AtomicBool::new(true), ..self }
    }

    /// How its data are read and written; else they go through the page cache.
    pub(super) fn with_cache(self, cache: CachePolicy) -> Self {
        self.layer.set_cache(cache);
        Self { cache, ..self }
    }

    /// Why it is read-only, if it is.
    pub(super) fn poisoned(&self) -> Option<&str> {
        self.poisoned.get().map(String::as_str)
    }

    pub(super) fn poison(&self, why: String) -> IoError {
        IoError::Poisoned(self.poisoned.get_or_init(|| why).clone())
    }

    /// A sync has failed: the next server of this boot has to know it, whatever becomes of this one.
    fn sync_failed(&self, why: String) -> IoError {
        let noted = self.files.get().map_or(Ok(()), |files| files.live.poison());
        if let Err(error) = noted {
            tracing::error!(layer = %self.layer.id, %error, "can't note that a sync failed");
        }
        self.poison(why)
    }

    pub(super) fn check_writable(&self) -> Result<(), IoError> {
        self.poisoned().map_or(Ok(()), |why| Err(IoError::Poisoned(why.to_owned())))
    }

    /// Whether nothing was ever written or zeroed here.
    pub(super) fn is_untouched(&self) -> bool {
        self.layer.states.all_are(&(0..self.layer.blocks()), BlockState::Absent)
    }

    /// Whether a write of these blocks waits for nothing: it goes into the page cache, and finds
    /// its files and its page of states made.
    pub(super) fn is_prepared(&self, blocks: &Range<u64>) -> bool {
        self.files.get().is_some()
            && self.cache == CachePolicy::Shared
            && by_page(blocks.clone()).all(|(page, _)| self.layer.states.has_page(page))
    }

    /// The files, made now if this is the first write. Nothing of them is durable yet.
    fn files(&self) -> io::Result<&Files> {
        if let Some(files) = self.files.get() {
            return Ok(files);
        }
        let mut durable = self.durable.lock().expect("no holder panics");
        if let Some(files) = self.files.get() {
            return Ok(files);
        }
        let (id, blocks) = (self.layer.id, self.layer.blocks());
        let files = &*self.home.files;
        // A power cut may have left a part of what a flush that nobody was told of had made.
        if layer::has_any_file(files, id)? {
            layer::clear(files, id)?;
        }
        let data = files.create(&data_name(id), blocks * BLOCK_BYTES)?;
        let map = files.create(&map_name(id), map::file_bytes(blocks))?;
        // So that even a flush without blocks finds space.
        map::reserve_header(&*map)?;
        let live = LiveMap::create(files, &live_name(id), id, self.home.boot, &self.layer.states)?;
        self.layer.set_data(data);
        self.layer.set_cache(self.cache);
        durable.map = Some(MapFile::new(Arc::clone(&map), id, blocks));
        Ok(self.files.get_or_init(|| Files { live, map }))
    }

    /// Bytes from `offset` on. Where they end within a block, that block is data already: the
    /// caller fills up the other blocks. They go to the file in one write, so that no sector is
    /// ever half filled up. The caller holds the locks of the blocks.
    pub(super) fn write(&self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        self.check_writable()?;
        let files = self.files()?;
        let written = {
            let _stage = trace::stage(Stage::Write);
            self.layer.data().write_at(offset, data)
        };
        let blocks = blocks_of(offset, data.len() as u64);
        let result = written
            .map_err(IoError::from)
            .and_then(|()| self.mark(files, blocks, BlockState::Data, None));
        self.set_unsynced();
        result
    }

    /// Makes whole blocks zero. The caller holds their locks.
    pub(super) fn zero(&self, blocks: Range<u64>, how: Zeroing) -> Result<(), IoError> {
        self.check_writable()?;
        let files = self.files()?;
        let punch = (how == Zeroing::FreeSpace).then(|| blocks.clone());
        let result = self.mark(files, blocks, BlockState::Zero, punch);
        self.set_unsynced();
        result
    }

    /// After the bytes are written: a flush that clears this before its sync covers them. A write
    /// that failed may have changed any part of its blocks, so it counts too: what is read now must
    /// not change with a power cut after a flush, or after the head is sealed.
    fn set_unsynced(&self) {
        if !self.unsynced.load(Ordering::SeqCst) {
            self.unsynced.store(true, Ordering::SeqCst);
        }
    }

    /// Gives blocks a state, for a kill of this process at once, for a power cut with a flush.
    fn mark(
        &self,
        files: &Files,
        blocks: Range<u64>,
        state: BlockState,
        punch: Option<Range<u64>>,
    ) -> Result<(), IoError> {
        let states = &self.layer.states;
        for (page, part) in by_page(blocks) {
            if states.all_are(&part, state) && !self.live_unsure.load(Ordering::Relaxed) {
                continue;
            }
            let _stage = trace::stage(Stage::Map);
            if !states.has_page(page) {
                map::reserve(&*files.map, page)?;
            }
            states
                .change(&part, state, |first_byte, bytes| files.live.write(first_byte, bytes))
                .inspect_err(|_| self.live_unsure.store(true, Ordering::Relaxed))?;
            self.dirty.lock().expect("no holder panics").map_pages.insert(page);
        }
        if let Some(punch) = punch {
            let mut dirty = self.dirty.lock().expect("no holder panics");
            match dirty.zeroed.last_mut() {
                Some(last) if last.end == punch.start => last.end = punch.end,
                _ => dirty.zeroed.push(punch),
            }
        }
        Ok(())
    }

    /// Every write that returned before is durable when this returns well.
    pub(super) async fn flush(self: &Arc<Self>) -> Result<(), IoError> {
        let guard = Arc::clone(&self.flush_lock).lock_owned().await;
        let head = Arc::clone(self);
        super::blocking(move || {
            let _guard = guard;
            head.flush_now()
        })
        .await
    }

    /// The flush itself; blocks.
    pub(super) fn flush_now(&self) -> Result<(), IoError> {
        let mut durable = self.durable.lock().expect("no holder panics");
        self.check_writable()?;
        if !self.unsynced.swap(false, Ordering::SeqCst) {
            return Ok(());
        }
        let Durable { map, recorded } = &mut *durable;
        let map = map.as_mut().expect("a head is written after its files are made");
        let taken = self.take_dirty();
        let data = self.layer.data();
        let syncing = trace::stage(Stage::Flush);
        let synced = if *recorded { data.sync() } else { data.sync_created() };
        synced.map_err(|error| self.sync_failed(format!("can't sync its data: {error}")))?;
        drop(syncing);
        if !taken.pages.is_empty() || map.is_new() {
            let _stage = trace::stage(Stage::Map);
            match map.store(&taken.pages) {
                Ok(()) => {}
                Err(StoreError::Write(error)) => {
                    self.put_back(taken);
                    return Err(error.into());
                }
                Err(error @ StoreError::Sync(_)) => return Err(self.sync_failed(error.to_string())),
            }
        }
        if !*recorded {
            *recorded = self.record_touched()?;
        }
        self.punch(taken.zeroed);
        Ok(())
    }

    /// The flush is durable with the names of the files. Where the catalog can't be written now, a
    /// later flush records it.
    fn record_touched(&self) -> Result<bool, IoError> {
        let named = self.home.files.sync_names();
        named.map_err(|error| self.sync_failed(format!("can't sync its files' names: {error}")))?;
        let recorded = (self.home.record_touched)(self.layer.id);
        if let Err(error) = &recorded {
            tracing::warn!(layer = %self.layer.id, %error, "can't record that it has files");
        }
        Ok(recorded.is_ok())
    }

    fn take_dirty(&self) -> Taken {
        let states = &self.layer.states;
        let dirty = std::mem::take(&mut *self.dirty.lock().expect("no holder panics"));
        // Before the pages: a block that becomes zero in between waits for the next flush.
        let zeroed = dirty.zeroed.into_iter().flat_map(|range| zero_runs(states, range)).collect();
        let pages = dirty.map_pages.into_iter().map(|page| (page, states.payload(page))).collect();
        Taken { pages, zeroed }
    }

    fn put_back(&self, taken: Taken) {
        let mut dirty = self.dirty.lock().expect("no holder panics");
        dirty.map_pages.extend(taken.pages.into_iter().map(|(page, _)| page));
        dirty.zeroed.extend(taken.zeroed);
        drop(dirty);
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
            for run in zero_runs(&self.layer.states, range) {
                let (at, length) = (run.start * BLOCK_BYTES, (run.end - run.start) * BLOCK_BYTES);
                if let Err(error) = self.layer.data().punch_hole(at, length) {
                    tracing::warn!(layer = %self.layer.id, %error, "can't give space back");
                    later.push(run);
                }
            }
        }
        self.dirty.lock().expect("no holder panics").zeroed.extend(later);
    }
}

/// What this boot's kernel knows of a head, if a server has made it a live map since.
fn load_live(
    home: &HeadHome,
    id: LayerId,
    blocks: u64,
) -> Result<Option<(LiveMap, BlockStates)>, MapError> {
    match home.files.open(&live_name(id)) {
        Ok(file) => LiveMap::load(file, id, home.boot, blocks),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn zero_runs(states: &BlockStates, range: Range<u64>) -> Vec<Range<u64>> {
    states.runs(range).filter(|(_, state)| *state == BlockState::Zero).map(|(run, _)| run).collect()
}

/// The map pages in which two sets of states differ.
fn differing_pages(a: &BlockStates, b: &BlockStates) -> BTreeSet<usize> {
    let used: BTreeSet<usize> = a.pages_in_use().chain(b.pages_in_use()).collect();
    used.into_iter().filter(|page| a.payload(*page) != b.payload(*page)).collect()
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
