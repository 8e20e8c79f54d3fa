//! Completes copies in the background. Fetches that a reader waits for go first, and the background goes on from
//! where a reader last missed a block.

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::TryStreamExt;
use futures_util::stream::FuturesUnordered;
use perigee_block::device::IoError;
use perigee_block::locking::lock;
use perigee_model::read_ahead::{self, FILL_PIECE_BLOCKS, fill_pieces_in_flight};
use perigee_model::volume::BLOCK_BYTES;
use tokio::time::Instant;

use super::blocks::{blocks_of, index};
use super::catalog::{self, Sealed};
use super::checksums;
use super::copy::{Came, LayerCopy};
use super::layer::live_name;
use super::pool::Pool;
use super::work::{StopOnDrop, Work};

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

/// Finds out how much may be in flight on the link to the other host, so that its round trips don't limit the rate
/// and readers still don't wait behind a long queue.
#[derive(Default)]
pub(super) struct Flow {
    link: Mutex<read_ahead::Pace>,
    /// The number of bytes that have arrived.
    came_bytes: AtomicU64,
}

impl Flow {
    fn pieces_in_flight(&self, copy: &LayerCopy) -> usize {
        fill_pieces_in_flight(&lock(&self.link), copy.remote.round_trip())
    }

    /// Fetches blocks and notes how long that takes. Blocks that a reader has fetched meanwhile come from this
    /// host's disk, and say nothing about the link.
    async fn fetch(
        &self,
        copy: &Arc<LayerCopy>,
        blocks: Range<u64>,
    ) -> Result<Option<Came>, IoError> {
        let (asked, before) = (Instant::now(), self.came_bytes.load(Ordering::Relaxed));
        let (_, came) = copy.fetch(blocks).await?;
        if let Some(Came { bytes, .. }) = &came {
            let came_bytes = self.came_bytes.fetch_add(*bytes, Ordering::Relaxed) + bytes - before;
            lock(&self.link).note(came_bytes, asked.elapsed());
        }
        Ok(came)
    }
}

impl Pool {
    /// Completes the copies that keep everything, one after the other and at most at this rate, and makes the
    /// fetched blocks of the other copies durable. It runs until the future is dropped.
    pub async fn fill_copies(self: Arc<Self>, bytes_per_s: u64) {
        let mut pace = Pace::new(bytes_per_s);
        // Damaged copies are not tried again in the background.
        let mut damaged = HashSet::new();
        loop {
            let copies = self.run(move |pool| Ok::<_, Infallible>(pool.copies_to_fill())).await;
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
        let Err(error) = self.fill(copy, &work, pace).await else {
            copy.filled(None);
            return Filled::AsFarAsItGoes;
        };
        let kind = if let IoError::Io(error) = &error { Some(error.kind()) } else { None };
        if kind != Some(ErrorKind::Interrupted) {
            copy.filled(Some(error.to_string()));
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
        let (mut from, mut fetched_bytes, flow) = (0, 0, Flow::default());
        while let Some(window) = unfilled.next(from) {
            let limits = (&flow, &mut *pace);
            let visited = fill_window(copy, &mut unfilled, (window, from), work, limits).await?;
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
        let copy = Arc::clone(copy);
        self.change(move |pool| {
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
    let size_bytes = copy.layer().blocks() * BLOCK_BYTES;
    let damaged = findings.into_iter().map(|(range, _)| range.unwrap_or(0..size_bytes));
    let damaged = damaged.map(|range| blocks_of(range.start, range.end - range.start));
    copy.set_damaged(damaged.collect());
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
    (window, from): (usize, u64),
    work: &Work,
    (flow, pace): (&Flow, &mut Pace),
) -> Result<Visited, IoError> {
    let window_bytes = unfilled.bytes(window);
    let mut pieces = missing_pieces(copy, window_bytes.clone()).await?;
    begin_at(&mut pieces, from);
    let mut visited = Visited { fetched_bytes: 0, next: window_bytes.end / BLOCK_BYTES };
    let mut fetches = FuturesUnordered::new();
    let (mut started, mut left_early) = (false, false);
    loop {
        while fetches.len() < flow.pieces_in_flight(copy) && !left_early {
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
            let at = pace.after(length_bytes(&blocks));
            fetches.push(fetch_piece(copy, blocks, flow, at));
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
        return Ok(copy.missing(&blocks, FILL_PIECE_BLOCKS).into());
    }
    let (mut at, mut missing) = (part.start, VecDeque::new());
    for extent in copy.remote.extents(&part).await? {
        if copy.remote.has_bytes(&extent) {
            missing.extend(copy.missing(&blocks_of(at, extent.length_bytes), FILL_PIECE_BLOCKS));
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
    flow: &Flow,
    at: Instant,
) -> Result<u64, IoError> {
    tokio::time::sleep_until(at).await;
    copy.readers_first().await;
    let fetched_bytes = length_bytes(&blocks);
    if let Some(came) = flow.fetch(copy, blocks).await? {
        came.keeping.await.map_err(std::io::Error::other)??;
    }
    Ok(fetched_bytes)
}

fn length_bytes(blocks: &Range<u64>) -> u64 {
    (blocks.end - blocks.start) * BLOCK_BYTES
}

#[cfg(test)]
impl Flow {
    pub(super) fn pipe_bytes(&self, round_trip: Duration) -> u64 {
        lock(&self.link).pipe_bytes(round_trip)
    }

    /// As the background fetches one piece.
    pub(super) async fn fetch_now(
        &self,
        copy: &Arc<LayerCopy>,
        blocks: Range<u64>,
    ) -> Result<u64, IoError> {
        fetch_piece(copy, blocks, self, Instant::now()).await
    }
}
