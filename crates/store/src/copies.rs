//! Images that are copies of another host's images. A copy can be used at once: missing blocks are read
//! from the other host, and the copy is completed in the background. Fetches that a reader waits for go first,
//! and the background goes on from where a reader last missed a block.

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use futures_util::stream::FuturesUnordered;
use perigee_block::device::IoError;
use perigee_block::exports::OWN_SUFFIX;
use perigee_model::volume::{BLOCK_BYTES, CopyImage, ImageInfo, Keep};
use perigee_model::{ImageName, LayerId, Problem};
use tokio::time::Instant;
use uuid::Uuid;

use super::blocking;
use super::blocks::{BlockState, blocks_of, index};
use super::catalog::{self, LayerRow, Sealed};
use super::checksums;
use super::copy::LayerCopy;
use super::head::Head;
use super::layer::{self, LayerError, live_name, map_name};
use super::map::{MapFile, StoreError};
use super::pool::Pool;
use super::volume::io_problem;
use super::work::{StopOnDrop, Work};

/// 128 KiB are fetched at a time. A reader of one of these blocks waits for all of them.
const PIECE_BLOCKS: u64 = 32;
const PIECES_IN_FLIGHT: usize = 8;
/// The other host is asked for the extents of this much at a time.
const WINDOW_BYTES: u64 = 256 << 20;
/// Fetched blocks are made durable when there are as many as this, or at the end.
const FLUSH_BYTES: u64 = 256 << 20;
/// Fetched blocks are made durable at least this often.
const FLUSH_EVERY: Duration = Duration::from_secs(30);

/// The result of completing a copy in the background.
#[derive(PartialEq, Eq)]
enum Filled {
    AsFarAsItGoes,
    /// The fetched bytes differ from the other host's checksums.
    Damaged,
}

/// Limits a transfer to a number of bytes per second.
pub(super) struct Pace {
    bytes_per_s: u64,
    next: Instant,
}

impl Pace {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, next: Instant::now() }
    }

    fn after(&mut self, bytes: u64) -> Instant {
        let at = self.next.max(Instant::now());
        let micros = bytes.saturating_mul(1_000_000) / self.bytes_per_s.max(1);
        self.next = at + Duration::from_micros(micros);
        at
    }
}

fn failed(what: &str) -> impl Fn(rusqlite::Error) -> Problem {
    move |error| catalog::problem(what, &error)
}

impl Pool {
    /// Makes an image of a read-only export of another host. If the export is a sealed layer, the copy has
    /// the same layer id, and a repeated request succeeds and does nothing. A layer that this pool has already,
    /// perhaps below a volume that came from another host, only gets the name.
    ///
    /// # Errors
    /// A conflict when the name or the layer is taken; not found when the other host has no such export;
    /// unavailable when it does not answer.
    pub async fn copy_image(
        self: &Arc<Self>,
        name: &ImageName,
        request: CopyImage,
    ) -> Result<ImageInfo, Problem> {
        let CopyImage { nbd_addr, export, keep, layer: wanted } = request;
        let what = format!("can't copy image {name} from {nbd_addr}");
        let export = export.unwrap_or_else(|| format!("image:{name}"));
        if export.ends_with(OWN_SUFFIX) {
            let why = format!("{export} has only a part of what the layer shows");
            return Err(Problem::invalid(what, why));
        }
        let mut remote = self.remote_row(&what, &nbd_addr, &export).await?;
        remote.keep = keep;
        if let Some(wanted) = wanted.filter(|wanted| remote.is_layer != Some(*wanted)) {
            let why = format!("the other host's export {export} is not layer {wanted}");
            return Err(Problem::conflict(what, why).next("check the image on the other host"));
        }
        let layer = remote.is_layer.unwrap_or_else(|| LayerId(Uuid::new_v4()));
        let size_bytes = Self::layer_size(&what, remote.size_bytes)?;
        let guard = Arc::clone(&self.changes).lock_owned().await;
        if !self.has_named(&what, name, layer).await? {
            let (pool, name) = (Arc::clone(self), name.clone());
            blocking(move || {
                let _guard = guard;
                if pool.catalog.has_layer(layer).map_err(failed(&what))? {
                    return pool.catalog.name_layer(&name, layer).map_err(failed(&what));
                }
                let new = LayerRow { id: layer, ..LayerRow::new_head(size_bytes, None) };
                let row = LayerRow { remote: Some(remote), ..new };
                layer::clear(&*pool.files, layer)
                    .map_err(|error| io_problem(&what, &error.into()))?;
                pool.catalog.add_image(&name, &row).map_err(failed(&what))
            })
            .await?;
            self.to_fill.notify_one();
        }
        self.image_info(name).await
    }

    /// Whether the pool has this image. A conflict if another layer has the name, or the layer another name, or a
    /// volume writes it.
    async fn has_named(
        self: &Arc<Self>,
        what: &str,
        name: &ImageName,
        layer: LayerId,
    ) -> Result<bool, Problem> {
        let (pool, what, name) = (Arc::clone(self), what.to_owned(), name.clone());
        blocking(move || {
            let images = pool.catalog.images().map_err(failed(&what))?;
            if let Some((other, _)) = images.iter().find(|(n, l)| *l == layer && *n != name) {
                let why = format!("layer {layer} is image {other} here");
                return Err(Problem::conflict(&what, why));
            }
            match images.iter().find(|(found, _)| *found == name) {
                Some((_, found)) if *found == layer => Ok(true),
                Some(_) => Err(Problem::conflict(&what, "an image with that name exists already")
                    .next("delete it first, or choose another name")),
                None => {
                    let here = pool.catalog.has_layer(layer).map_err(failed(&what))?;
                    if here && !pool.catalog.is_sealed(layer).map_err(failed(&what))? {
                        let why = format!("a volume of this pool writes layer {layer}");
                        return Err(Problem::conflict(what, why));
                    }
                    Ok(false)
                }
            }
        })
        .await
    }

    /// Changes what a copy keeps: [`Keep::All`] starts completing it, [`Keep::Read`] stops that.
    ///
    /// # Errors
    /// Not found; a conflict when the image is not a copy, or is a copy that keeps nothing.
    pub async fn keep_image(
        self: &Arc<Self>,
        name: &ImageName,
        keep: Keep,
    ) -> Result<ImageInfo, Problem> {
        let what = format!("can't change what image {name} keeps to {keep}");
        let info = self.image_info(name).await?;
        match info.remote.as_ref().map(|remote| remote.keep) {
            Some(now) if (now == Keep::Never) != (keep == Keep::Never) => {
                let why = format!("it was made to keep {now}");
                return Err(Problem::conflict(what, why).next("delete it and copy it again"));
            }
            Some(_) => {}
            None => {
                let why = "it is not a copy, or it is a complete copy";
                return Err(Problem::conflict(what, why));
            }
        }
        let pool = Arc::clone(self);
        blocking(move || {
            let copies = pool.copies_of(&info);
            if copies.iter().any(|copy| copy.is_own()) && keep != Keep::All {
                let why = "it came with a volume from another host, and is always copied whole";
                return Err(Problem::conflict(what, why));
            }
            for copy in copies {
                pool.catalog.set_keep(copy.layer().id, keep).map_err(failed(&what))?;
                if keep != Keep::All {
                    copy.stop_filling();
                }
            }
            Ok::<_, Problem>(())
        })
        .await?;
        self.to_fill.notify_one();
        self.image_info(name).await
    }

    /// Completes a copy without a rate limit. It does nothing if the copy is already complete.
    ///
    /// # Errors
    /// Not found; a conflict when the copy keeps nothing; no space; unavailable when the other host does not
    /// answer or the work was stopped. Blocks that were fetched before an error are kept.
    pub async fn fill_image(
        self: &Arc<Self>,
        name: &ImageName,
        work: Arc<Work>,
    ) -> Result<ImageInfo, Problem> {
        let what = format!("can't complete image {name}");
        let info = self.image_info(name).await?;
        if info.remote.as_ref().is_some_and(|remote| remote.keep == Keep::Never) {
            return Err(Problem::conflict(what, "it does not keep the blocks that it reads"));
        }
        let pool = Arc::clone(self);
        for copy in blocking(move || Ok::<_, Problem>(pool.copies_of(&info))).await? {
            let what = what.clone();
            let filled = self.fill(&copy, &work, &mut Pace::new(u64::MAX)).await;
            filled.map_err(|error| match error {
                IoError::Io(error) if error.kind() == ErrorKind::Interrupted => {
                    Problem::unavailable(what, error)
                }
                IoError::Io(error) if error.kind() == ErrorKind::InvalidData => {
                    Problem::conflict(what, error).next("check the image at the other host")
                }
                error => io_problem(&what, &error),
            })?;
        }
        self.image_info(name).await
    }

    /// Completes the copies that keep everything, one after the other and at most at this rate, and makes the
    /// fetched blocks of the other copies durable. It runs until the future is dropped.
    pub async fn fill_copies(self: Arc<Self>, bytes_per_s: u64) {
        let mut pace = Pace::new(bytes_per_s);
        // Damaged copies are not tried again in the background.
        let mut damaged = HashSet::new();
        loop {
            let pool = Arc::clone(&self);
            let copies = blocking(move || Ok::<_, Infallible>(pool.copies_to_fill())).await;
            for copy in copies.unwrap_or_default() {
                if !damaged.contains(&copy.layer().id)
                    && self.fill_in_background(&copy, &mut pace).await == Filled::Damaged
                {
                    damaged.insert(copy.layer().id);
                }
            }
            let again = self.to_fill.notified();
            if self.open_copies().is_empty() {
                again.await;
                damaged.clear();
            } else if tokio::time::timeout(FLUSH_EVERY, again).await.is_ok() {
                damaged.clear();
            } else if let Err(problem) = self.flush_copies().await {
                tracing::error!(%problem, "can't make fetched blocks durable");
            }
        }
    }

    async fn fill_in_background(
        self: &Arc<Self>,
        copy: &Arc<LayerCopy>,
        pace: &mut Pace,
    ) -> Filled {
        let layer = copy.layer().id;
        let work = copy.begin_filling();
        let _stop = StopOnDrop(Arc::clone(&work));
        // From now on, `stop_filling` stops this work.
        let wanted = self.catalog.copies_to_fill();
        if !wanted.is_ok_and(|wanted| wanted.contains(&layer)) {
            return Filled::AsFarAsItGoes;
        }
        let Err(error) = self.fill(copy, &work, pace).await else { return Filled::AsFarAsItGoes };
        let kind = if let IoError::Io(error) = &error { Some(error.kind()) } else { None };
        if kind != Some(ErrorKind::Interrupted) {
            tracing::warn!(%layer, %error, "can't complete a copy now; trying again later");
        }
        if kind == Some(ErrorKind::InvalidData) { Filled::Damaged } else { Filled::AsFarAsItGoes }
    }

    pub(super) fn copies_to_fill(&self) -> Vec<Arc<LayerCopy>> {
        let layers = self.catalog.copies_to_fill().unwrap_or_else(|error| {
            tracing::error!(%error, "can't list the copies to complete");
            Vec::new()
        });
        layers.into_iter().filter_map(|layer| self.layer_copy(layer)).collect()
    }

    /// The layers of an image that still get blocks from another host.
    fn copies_of(&self, image: &ImageInfo) -> Vec<Arc<LayerCopy>> {
        image.chain.iter().filter_map(|layer| self.layer_copy(*layer)).collect()
    }

    /// Fetches the blocks that are missing here and not empty on the other host. One pass is enough, because
    /// the other host's layer never changes. After a reader has missed a block, it goes on from there.
    pub(super) async fn fill(
        self: &Arc<Self>,
        copy: &Arc<LayerCopy>,
        work: &Arc<Work>,
        pace: &mut Pace,
    ) -> Result<(), IoError> {
        copy.head.check_writable()?;
        let mut unfilled = Unfilled::new(copy.layer().blocks() * BLOCK_BYTES);
        work.expect(unfilled.size_bytes);
        let (mut from, mut fetched_bytes) = (0, 0);
        while let Some(window) = unfilled.next(from) {
            let visited = fill_window(copy, &mut unfilled, window, from, (work, pace)).await?;
            (from, fetched_bytes) = (visited.next, fetched_bytes + visited.fetched_bytes);
            if fetched_bytes >= FLUSH_BYTES {
                self.flush_copy(copy).await?;
                fetched_bytes = 0;
            }
        }
        self.flush_copy(copy).await?;
        compare_with_source(copy, work).await?;
        self.complete(copy).await
    }

    /// Turns a fully fetched copy into a sealed layer like any other.
    async fn complete(self: &Arc<Self>, copy: &Arc<LayerCopy>) -> Result<(), IoError> {
        let guard = Arc::clone(&self.changes).lock_owned().await;
        let (pool, copy) = (Arc::clone(self), Arc::clone(copy));
        blocking(move || {
            let _guard = guard;
            if copy.is_closed() {
                // It was deleted in the meantime, or another task has completed it.
                return Ok(());
            }
            copy.close(true);
            let completed = pool.complete_closed(&copy);
            if completed.is_err() {
                copy.close(false);
            }
            completed
        })
        .await
    }

    fn complete_closed(&self, copy: &LayerCopy) -> Result<(), IoError> {
        copy.head.flush_now()?;
        let id = copy.layer().id;
        let figures = Sealed { layer: id, data_bytes: copy.layer().data_bytes() };
        self.catalog.complete_copy(figures).map_err(catalog::io_error)?;
        copy.set_complete();
        tracing::info!(layer = %id, "a copy is complete");
        self.forget_copy(id);
        if let Err(error) = self.reopen_chains(&[id]) {
            // Their chains in memory have the same bytes.
            tracing::error!(%error, "volumes keep their old chains until the next start");
        }
        if let Err(error) = self.files.remove(&live_name(id)) {
            tracing::warn!(layer = %id, %error, "can't remove a complete layer's live map");
        }
        self.note_sealed();
        Ok(())
    }

    async fn flush_copy(self: &Arc<Self>, copy: &Arc<LayerCopy>) -> Result<(), IoError> {
        let flushed = copy.head.flush().await;
        if matches!(flushed, Err(IoError::Poisoned(_))) {
            let (pool, copy) = (Arc::clone(self), Arc::clone(copy));
            let recorded = blocking(move || {
                let (layer, why) = (copy.layer().id, copy.head.poisoned().unwrap_or_default());
                pool.catalog.poison(layer, why)
            });
            if let Err(error) = recorded.await {
                tracing::error!(%error, "can't record that a flush failed");
            }
        }
        flushed
    }

    /// # Errors
    /// The last failure.
    pub(super) async fn flush_copies(self: &Arc<Self>) -> Result<(), Problem> {
        let mut flushed = Ok(());
        for copy in self.open_copies() {
            if let Err(error) = self.flush_copy(&copy).await {
                flushed =
                    Err(io_problem(&format!("can't flush layer {}", copy.layer().id), &error));
            }
        }
        flushed
    }

    /// Completes every copy, without a rate limit.
    #[cfg(test)]
    pub(super) async fn fill_all_copies(self: &Arc<Self>) {
        for copy in self.copies_to_fill() {
            self.fill(&copy, &Arc::default(), &mut Pace::new(u64::MAX)).await.expect("a filling");
        }
    }

    /// Waits until all fetched blocks are written.
    #[cfg(test)]
    pub(super) async fn settle_copies(&self) {
        for copy in self.open_copies() {
            drop(copy.head.locks.lock(0..copy.layer().blocks()).await);
        }
    }

    /// Opens the files of a copy. If they have failed before, the copy starts again without any of its bytes; if
    /// that is not possible, all its blocks are read from the other host.
    pub(super) fn copy_head(&self, row: &LayerRow) -> Result<Head, LayerError> {
        let own = row.remote.as_ref().is_some_and(|remote| remote.own);
        let open = || {
            let open = if own { Head::open_copy } else { Head::open };
            open(&self.home, row.id, row.size_bytes, row.untouched)
        };
        let why = match &row.poisoned {
            Some(why) => why.clone(),
            None => {
                let head = open()?;
                let Some(why) = head.poisoned() else { return Ok(head) };
                why.to_owned()
            }
        };
        // The catalog is changed first and last: in between it says that the files must not be used.
        let noted = self.catalog.poison(row.id, &why).map_err(catalog::io_error);
        let renewed = noted.and_then(|()| {
            if own {
                return self.renew_own(row);
            }
            layer::clear(&*self.files, row.id)?;
            self.catalog.empty_copy(row.id).map_err(catalog::io_error)
        });
        let Err(error) = renewed else {
            return if own { open() } else { Ok(Head::new(&self.home, row.id, row.size_bytes)) };
        };
        tracing::error!(layer = %row.id, %error, "can't start a copy again without its bytes");
        let head = if own { open()? } else { Head::new(&self.home, row.id, row.size_bytes) };
        head.poison(why);
        Ok(head)
    }

    /// Makes all data of a copy of own blocks remote again, durably. Which blocks it has stays as it is.
    fn renew_own(&self, row: &LayerRow) -> std::io::Result<()> {
        let blocks = row.size_bytes / BLOCK_BYTES;
        let map = self.files.open(&map_name(row.id))?;
        map.sync_created()?;
        let loaded = MapFile::load(map, row.id, blocks);
        let (mut map, states) = loaded.map_err(std::io::Error::other)?;
        let data = states.runs(0..blocks).filter(|(_, state)| *state == BlockState::Data);
        for (run, _) in data.collect::<Vec<_>>() {
            states.set(run, BlockState::Remote);
        }
        let pages: Vec<_> =
            states.pages_in_use().map(|page| (page, states.payload(page))).collect();
        match map.store(&pages) {
            Err(StoreError::Write(error) | StoreError::Sync(error)) => return Err(error),
            Ok(()) => {}
        }
        self.files.remove(&live_name(row.id))?;
        self.files.sync_names()?;
        self.catalog.renew_copy(row.id).map_err(catalog::io_error)
    }

    /// Drops the open copies of layers that were deleted from the catalog.
    pub(super) fn drop_copies(&self, deleted: &[LayerId]) {
        for copy in self.open_copies().iter().filter(|copy| deleted.contains(&copy.layer().id)) {
            copy.close(true);
            copy.stop_filling();
            self.forget_copy(copy.layer().id);
        }
    }
}

/// Compares the fetched bytes with the other host's checksums, if it has any.
async fn compare_with_source(copy: &LayerCopy, work: &Arc<Work>) -> Result<(), IoError> {
    let Some(checksums) = copy.remote.checksums().await else { return Ok(()) };
    work.expect(copy.layer().data_bytes());
    let findings = checksums::compare_with_source(copy, &*checksums, work).await?;
    let Some((range, _)) = findings.first() else { return Ok(()) };
    let at = range.as_ref().map_or(0, |range| range.start);
    let why =
        format!("the bytes fetched from offset {at} on differ from the other host's checksums");
    Err(std::io::Error::new(ErrorKind::InvalidData, why).into())
}

/// The windows of a copy that are not filled yet.
struct Unfilled {
    size_bytes: u64,
    /// For each window the bytes that are not yet counted as done; `None` once it is filled.
    windows: Vec<Option<u64>>,
}

impl Unfilled {
    fn new(size_bytes: u64) -> Self {
        let starts = (0..size_bytes).step_by(index(WINDOW_BYTES));
        let windows = starts.map(|start| Some(WINDOW_BYTES.min(size_bytes - start))).collect();
        Self { size_bytes, windows }
    }

    fn window_of(block: u64) -> usize {
        index(block * BLOCK_BYTES / WINDOW_BYTES)
    }

    fn has(&self, block: u64) -> bool {
        matches!(self.windows.get(Self::window_of(block)), Some(Some(_)))
    }

    /// The window of a block or the next one that is not filled; after the last one it begins again.
    fn next(&self, block: u64) -> Option<usize> {
        let from = Self::window_of(block).min(self.windows.len());
        let mut order = (from..self.windows.len()).chain(0..from);
        order.find(|window| self.windows[*window].is_some())
    }

    fn bytes(&self, window: usize) -> Range<u64> {
        let start = window as u64 * WINDOW_BYTES;
        start..(start + WINDOW_BYTES).min(self.size_bytes)
    }

    /// Counts fetched bytes of a window.
    fn fetched(&mut self, window: usize, bytes: u64) {
        if let Some(left) = &mut self.windows[window] {
            *left = left.saturating_sub(bytes);
        }
    }

    /// The window is filled. Returns its bytes that were not counted yet.
    fn end(&mut self, window: usize) -> u64 {
        self.windows[window].take().unwrap_or(0)
    }
}

/// The end of a visit to a window.
struct Visited {
    fetched_bytes: u64,
    /// The block where the work goes on.
    next: u64,
}

/// Fetches a window's missing blocks, from block `from` on if it is in the window and then those before it. If a
/// reader misses a block in another window, it ends early, and the work goes on there.
async fn fill_window(
    copy: &Arc<LayerCopy>,
    unfilled: &mut Unfilled,
    window: usize,
    from: u64,
    (work, pace): (&Work, &mut Pace),
) -> Result<Visited, IoError> {
    let window_bytes = unfilled.bytes(window);
    let mut pieces = missing_pieces(copy, window_bytes.clone()).await?;
    begin_at(&mut pieces, from);
    let mut visited = Visited { fetched_bytes: 0, next: window_bytes.end / BLOCK_BYTES };
    let mut fetches = FuturesUnordered::new();
    let (mut started, mut left_early) = (false, false);
    loop {
        while fetches.len() < PIECES_IN_FLIGHT && !left_early {
            // Each visit fetches something, however often readers miss blocks elsewhere.
            match copy.take_missed().filter(|_| started) {
                Some(missed) if Unfilled::window_of(missed) == window => {
                    begin_at(&mut pieces, missed);
                }
                Some(missed) if unfilled.has(missed) => {
                    (visited.next, left_early) = (missed, true);
                    break;
                }
                _ => {}
            }
            let Some(blocks) = pieces.pop_front() else { break };
            fetches.push(fetch_piece(copy, blocks.clone(), pace.after(length_bytes(&blocks))));
            started = true;
        }
        let Some(bytes) = fetches.try_next().await? else { break };
        visited.fetched_bytes += bytes;
        unfilled.fetched(window, bytes);
        work.step(bytes)?;
    }
    if pieces.is_empty() {
        work.step(unfilled.end(window))?;
    }
    Ok(visited)
}

/// The blocks of a part that are missing here and not empty at the other host, in order.
async fn missing_pieces(
    copy: &LayerCopy,
    part: Range<u64>,
) -> Result<VecDeque<Range<u64>>, IoError> {
    if copy.is_own() {
        let blocks = part.start / BLOCK_BYTES..part.end / BLOCK_BYTES;
        return Ok(copy.missing(&blocks, PIECE_BLOCKS).into());
    }
    let (mut at, mut missing) = (part.start, VecDeque::new());
    for extent in copy.remote.extents(&part).await? {
        if copy.remote.has_bytes(&extent) {
            missing.extend(copy.missing(&blocks_of(at, extent.length_bytes), PIECE_BLOCKS));
        }
        at += extent.length_bytes;
    }
    Ok(missing)
}

/// Puts the pieces in order, beginning with the one that has a block or comes after it.
fn begin_at(pieces: &mut VecDeque<Range<u64>>, block: u64) {
    pieces.make_contiguous().sort_unstable_by_key(|piece| piece.start);
    let before = pieces.partition_point(|piece| piece.end <= block);
    pieces.rotate_left(before);
}

/// Fetches blocks in the background, and keeps them.
async fn fetch_piece(
    copy: &Arc<LayerCopy>,
    blocks: Range<u64>,
    at: Instant,
) -> Result<u64, IoError> {
    tokio::time::sleep_until(at).await;
    copy.readers_first().await;
    let fetched_bytes = length_bytes(&blocks);
    if let (_, Some(keeping)) = copy.fetch(blocks).await? {
        keeping.await.map_err(std::io::Error::other)??;
    }
    Ok(fetched_bytes)
}

fn length_bytes(blocks: &Range<u64>) -> u64 {
    (blocks.end - blocks.start) * BLOCK_BYTES
}
