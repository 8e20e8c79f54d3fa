//! A volume's writable layer, and the order in which its writes become durable.
//!
//! A write puts its bytes into the data file, then the changed states into the live map, then into
//! memory, and is then acknowledged. Flushes run one at a time:
//!
//! 1. Take the set of dirty map pages, with their current states.
//! 2. Sync the data file. The bytes of every state taken in step 1 were written before.
//! 3. Write exactly the pages taken, and sync the map. This is skipped if no block changed its state.
//! 4. At the first flush, sync the names of the files, and record in the catalog that the layer was
//!    touched.
//! 5. Punch holes for blocks that were zero in step 1 and still are.
//!
//! States that change after step 1 belong to the next flush. A failed sync is never repeated, because
//! the kernel reports a lost write only once. The head is then poisoned: reads continue, writes are
//! refused. The live map records this at once, the catalog soon after.
//!
//! **A head gets its files with its first write**, so a clone is only one catalog transaction. In the
//! catalog a layer is untouched from its creation until step 4. The next server finds an untouched head
//! in one of these states:
//!
//! | what happened | what the next server finds |
//! |---|---|
//! | nothing was written | no files: an empty head |
//! | a kill while the files were created | no live map (its header is written last): an empty head, whose first write creates the files again |
//! | a kill after that | a live map of this boot, which is right, as for every head |
//! | a power cut before step 3 | no live map of this boot and no durable map (its header is written by the first flush): an empty head |
//! | a power cut in step 3 or 4, or a full disk in step 4 | a durable map, as after every flush; or only some of the files. Then no flush was acknowledged, and the head is empty. It durably removes these files before it creates its own |
//!
//! A touched layer whose files are missing is an error, never an empty head.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use perigee_block::device::{IoError, Zeroing};
use perigee_block::locking::lock;
use perigee_block::trace::{self, Stage};
use perigee_model::LayerId;
use perigee_model::volume::{BLOCK_BYTES, CachePolicy};
use uuid::Uuid;

use crate::disk::blocks::{BlockState, BlockStates, blocks_of, by_page, index};
use crate::disk::files::{BlockFile, LayerFiles};
use crate::disk::live::LiveMap;
use crate::disk::locks::RangeLocks;
use crate::disk::map::{self, MapError, MapFile, StoreError};
use crate::layers::layer::{self, Layer, LayerError, data_name, live_name, map_name};

/// What all heads of a pool share.
pub(crate) struct HeadHome {
    pub(crate) files: Arc<dyn LayerFiles>,
    /// The kernel's id of this boot.
    pub(crate) boot: Uuid,
    /// Records durably that a layer was touched.
    pub(crate) record_touched: Box<dyn Fn(LayerId) -> io::Result<()> + Send + Sync>,
}

/// The changes that no flush has taken yet.
#[derive(Default)]
struct Dirty {
    map_pages: BTreeSet<usize>,
    /// Ranges that became zero and whose space may be freed.
    zeroed: Vec<Range<u64>>,
}

/// The changes that one flush makes durable.
struct FlushSet {
    pages: Vec<(usize, Vec<u8>)>,
    zeroed: Vec<Range<u64>>,
}

/// A head's files besides the data file.
struct Files {
    live: LiveMap,
    map: Arc<dyn BlockFile>,
}

/// The durable state to which a flush writes.
struct Durable {
    /// `None` until the head has files.
    map: Option<MapFile>,
    /// The names of the files are durable, and the catalog has recorded that the layer was touched.
    recorded: bool,
}

pub(crate) struct Head {
    pub(crate) layer: Arc<Layer>,
    pub(crate) locks: Arc<RangeLocks>,
    pub(crate) cache: CachePolicy,
    home: Arc<HeadHome>,
    files: OnceLock<Files>,
    /// Locked for the duration of a flush.
    durable: Mutex<Durable>,
    /// A change of states is added here after it was made. A flush takes this set before it reads the
    /// states, so it sees each change completely.
    dirty: Mutex<Dirty>,
    /// Something was written since the last flush began.
    unsynced: AtomicBool,
    /// A write to the live map has failed and may have been partial. From then on every write records its
    /// states there, even if they seem unchanged.
    live_unsure: AtomicBool,
    poisoned: OnceLock<String>,
    flush_lock: Arc<tokio::sync::Mutex<()>>,
}

impl Head {
    /// An empty head without files.
    pub(crate) fn new(home: &Arc<HeadHome>, id: LayerId, size_bytes: u64) -> Self {
        let durable = Durable { map: None, recorded: false };
        Self::assemble(home, Layer::empty(id, size_bytes), OnceLock::new(), durable)
    }

    /// Opens a head in the state in which the last process of this boot left it, or else in the state of the
    /// last flush. `untouched` comes from the catalog.
    pub(crate) fn open(
        home: &Arc<HeadHome>,
        id: LayerId,
        size_bytes: u64,
        untouched: bool,
    ) -> Result<Self, LayerError> {
        let head = Self::open_copy(home, id, size_bytes, untouched)?;
        let checked = layer::check_all_here(&head.layer.states);
        checked.map_err(|source| LayerError { layer: id, source })?;
        Ok(head)
    }

    /// As [`Self::open`], for a layer of which some blocks may still be at another host.
    pub(crate) fn open_copy(
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
        // These files were created before the live map's header.
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
        // A killed process may have left pages that were written but not synced.
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
        // The punched holes are not recorded, but punching a hole twice costs little.
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

    /// Adds the changes that the first flush has to make durable.
    fn with(self, dirty: Dirty) -> Self {
        Self { dirty: Mutex::new(dirty), unsynced: AtomicBool::new(true), ..self }
    }

    /// Sets whether the data goes through the page cache. By default it does.
    pub(crate) fn with_cache(self, cache: CachePolicy) -> Self {
        self.layer.set_cache(cache);
        Self { cache, ..self }
    }

    /// The reason why the head is read-only, if it is.
    pub(crate) fn poisoned(&self) -> Option<&str> {
        self.poisoned.get().map(String::as_str)
    }

    /// Nothing more is written from now on. The first reason stays.
    pub(crate) fn poison(&self, why: String) -> IoError {
        IoError::Poisoned(self.poisoned.get_or_init(|| why).clone())
    }

    /// Poisons the head after a failed sync, and records it in the live map for the next server of this boot.
    fn sync_failed(&self, why: String) -> IoError {
        let noted = self.files.get().map_or(Ok(()), |files| files.live.poison());
        if let Err(error) = noted {
            tracing::error!(layer = %self.layer.id, %error, "can't record that a sync failed");
        }
        self.poison(why)
    }

    pub(crate) fn check_writable(&self) -> Result<(), IoError> {
        self.poisoned().map_or(Ok(()), |why| Err(IoError::Poisoned(why.to_owned())))
    }

    /// Whether nothing was ever written or zeroed in this head.
    pub(crate) fn is_untouched(&self) -> bool {
        self.layer.states.all_are(&(0..self.layer.blocks()), BlockState::Absent)
    }

    /// Whether a write of these blocks needs no waiting: it goes to the page cache, and the files and the
    /// page of states exist.
    pub(crate) fn is_prepared(&self, blocks: &Range<u64>) -> bool {
        self.files.get().is_some()
            && self.cache == CachePolicy::Shared
            && by_page(blocks.clone()).all(|(page, _)| self.layer.states.has_page(page))
    }

    /// The files. They are created if this is the first write, and are then not durable yet.
    fn files(&self) -> io::Result<&Files> {
        if let Some(files) = self.files.get() {
            return Ok(files);
        }
        let mut durable = lock(&self.durable);
        if let Some(files) = self.files.get() {
            return Ok(files);
        }
        let (id, blocks) = (self.layer.id, self.layer.blocks());
        let files = &*self.home.files;
        // A power cut may have left some files of a flush that was never acknowledged.
        if layer::has_any_file(files, id)? {
            layer::clear(files, id)?;
        }
        let data = files.create(&data_name(id), blocks * BLOCK_BYTES)?;
        let map = files.create(&map_name(id), map::file_bytes(blocks))?;
        // The reservation ensures that even a flush without blocks finds space.
        map::reserve_header(&*map)?;
        let live = LiveMap::create(files, &live_name(id), id, self.home.boot, &self.layer.states)?;
        self.layer.set_data(data);
        self.layer.set_cache(self.cache);
        durable.map = Some(MapFile::new(Arc::clone(&map), id, blocks));
        Ok(self.files.get_or_init(|| Files { live, map }))
    }

    /// Writes bytes from `offset` on. A block that is written in part must be data already; for other blocks
    /// the caller has to add the rest of the block. All bytes go to the file in one write, so that no sector
    /// is left with only a part of them. The caller holds the locks of the blocks.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), IoError> {
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
    pub(crate) fn zero(&self, blocks: Range<u64>, how: Zeroing) -> Result<(), IoError> {
        self.check_writable()?;
        let files = self.files()?;
        let punch = (how == Zeroing::FreeSpace).then(|| blocks.clone());
        let result = self.mark(files, blocks, BlockState::Zero, punch);
        self.set_unsynced();
        result
    }

    /// What these blocks have is to come from another host again, and `missing` is the state of such blocks. Only for a
    /// copy, which keeps nothing meanwhile; its other blocks stay as they are.
    pub(crate) fn lose(&self, blocks: &Range<u64>, missing: BlockState) -> Result<(), IoError> {
        self.check_writable()?;
        let files = self.files()?;
        let runs: Vec<_> = self.layer.states.runs(blocks.clone()).collect();
        let has = |state| matches!(state, BlockState::Data | BlockState::Zero);
        for (run, _) in runs.into_iter().filter(|(_, state)| has(*state)) {
            self.mark(files, run, missing, None)?;
        }
        self.set_unsynced();
        Ok(())
    }

    /// This is called after the bytes are written. A flush clears the flag before its sync, so the sync
    /// covers them. A failed write counts too, because it may have changed any part of its blocks, and
    /// the bytes that are read now must not change with a power cut after a flush or after sealing.
    fn set_unsynced(&self) {
        if !self.unsynced.load(Ordering::SeqCst) {
            self.unsynced.store(true, Ordering::SeqCst);
        }
    }

    /// Gives blocks a state. The state survives a kill of this process at once, and a power cut after a flush.
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
            lock(&self.dirty).map_pages.insert(page);
        }
        if let Some(punch) = punch {
            let mut dirty = lock(&self.dirty);
            match dirty.zeroed.last_mut() {
                Some(last) if last.end == punch.start => last.end = punch.end,
                _ => dirty.zeroed.push(punch),
            }
        }
        Ok(())
    }

    /// When this succeeds, every write that returned before is durable.
    pub(crate) async fn flush(self: &Arc<Self>) -> Result<(), IoError> {
        let guard = Arc::clone(&self.flush_lock).lock_owned().await;
        let head = Arc::clone(self);
        crate::blocking::blocking(move || {
            let _guard = guard;
            head.flush_now()
        })
        .await
    }

    /// Flushes, and blocks the thread.
    pub(crate) fn flush_now(&self) -> Result<(), IoError> {
        let mut durable = lock(&self.durable);
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

    /// Why the last flush has not made everything durable; `None` if it has. The caller ensures that nothing is
    /// written.
    pub(crate) fn why_unflushed(&self) -> Option<&str> {
        let failed = "its map can't be written";
        self.poisoned().or_else(|| self.unsynced.load(Ordering::SeqCst).then_some(failed))
    }

    /// Writes all states of a head whose flush failed to its durable map, although nobody says any more what is
    /// durable. So the next server of this boot finds the blocks as they are, also without the live map.
    ///
    /// # Errors
    /// When the map can't be written.
    pub(crate) fn keep_unflushed(&self) -> io::Result<()> {
        let mut durable = lock(&self.durable);
        let Some(map) = &mut durable.map else { return Ok(()) };
        let states = &self.layer.states;
        let pages: Vec<_> =
            states.pages_in_use().map(|page| (page, states.payload(page))).collect();
        match map.store(&pages) {
            Err(StoreError::Write(error)) => Err(error),
            Ok(()) | Err(StoreError::Sync(_)) => Ok(()),
        }
    }

    /// Makes the names of the files durable, with which the flush is durable. If the catalog can't be written
    /// now, a later flush does it.
    fn record_touched(&self) -> Result<bool, IoError> {
        let named = self.home.files.sync_names();
        named.map_err(|error| self.sync_failed(format!("can't sync its files' names: {error}")))?;
        let recorded = (self.home.record_touched)(self.layer.id);
        if let Err(error) = &recorded {
            tracing::warn!(layer = %self.layer.id, %error, "can't record that it has files");
        }
        Ok(recorded.is_ok())
    }

    fn take_dirty(&self) -> FlushSet {
        let states = &self.layer.states;
        let dirty = std::mem::take(&mut *lock(&self.dirty));
        // The ranges are read before the pages, so a block that becomes zero in between waits for the next
        // flush.
        let zeroed = dirty.zeroed.into_iter().flat_map(|range| zero_runs(states, range)).collect();
        let pages = dirty.map_pages.into_iter().map(|page| (page, states.payload(page))).collect();
        FlushSet { pages, zeroed }
    }

    fn put_back(&self, taken: FlushSet) {
        let mut dirty = lock(&self.dirty);
        dirty.map_pages.extend(taken.pages.into_iter().map(|(page, _)| page));
        dirty.zeroed.extend(taken.zeroed);
        drop(dirty);
        self.unsynced.store(true, Ordering::SeqCst);
    }

    /// Frees the space of blocks whose zero state is durable. Blocks that are being written now, and blocks
    /// for which the filesystem refuses, wait for the next flush; this costs only space.
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
                    tracing::warn!(layer = %self.layer.id, %error, "can't free the space of zero blocks");
                    later.push(run);
                }
            }
        }
        lock(&self.dirty).zeroed.extend(later);
    }
}

/// Loads a head's live map if a server of this boot has written it.
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

/// The partial first and last block of a range, as `(block, bytes of it in the range)`.
pub(crate) fn partial_edges(offset: u64, length_bytes: u64) -> Vec<(u64, Range<usize>)> {
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
