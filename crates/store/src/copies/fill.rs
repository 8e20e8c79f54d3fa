//! Completes copies in the background, those of each source in a task of their own. Fetches that a reader waits for go
//! first, and the background goes on from where a reader last missed a block.

use std::collections::{HashMap, HashSet, VecDeque};
use std::convert::Infallible;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use perigee_block::device::IoError;
use perigee_block::locking::lock;
use perigee_model::LayerId;
use perigee_model::read_ahead::{self, FILL_PIECE_BLOCKS, fill_pieces_in_flight};
use perigee_model::volume::{BLOCK_BYTES, ContentDigest};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::blocking::blocking;
use crate::catalog::{self, Sealed, Verdict};
use crate::disk::blocks::{blocks_of, index};
use crate::layers::checksums;
use crate::layers::content;
use crate::layers::copy::{Came, ContentCheck, LayerCopy};
use crate::layers::layer::live_name;
use crate::layers::remote::Checksums;
use crate::pool::Pool;
use crate::pool::doubt::AGAIN_AFTER;
use crate::volume::visible_checksums;
use crate::work::{StopOnDrop, Work};

/// The other host is asked for the extents of this much at a time.
const WINDOW_BYTES: u64 = 256 << 20;
/// Fetched blocks are made durable when there are as many as this, or at the end.
const FLUSH_BYTES: u64 = 256 << 20;
/// Fetched blocks are made durable at least this often.
const FLUSH_EVERY: Duration = Duration::from_secs(30);
/// What is left of so many windows is kept in memory.
const OPEN_WINDOWS_MAX: usize = 64;
/// How often the blocks of a copy that differ from the other host's checksums are fetched again. If they still differ,
/// the other host's data and checksums don't fit each other.
const MENDS_MAX: u32 = 3;
/// For so long the source of a copy that is not the image's content is asked for its checksums, while it does not answer.
const QUESTIONS_MAX: Duration = Duration::from_secs(300);
const QUESTION_PAUSE: Duration = Duration::from_secs(30);

/// The result of completing a copy in the background.
#[derive(PartialEq, Eq)]
enum Filled {
    Whole,
    AsFarAsItGoes,
    /// The fetched bytes differ from the other host's checksums.
    Damaged,
}

/// The result of fetching again what is damaged of a copy.
enum Mended {
    Again,
    /// It was tried often enough.
    InVain,
    /// This host can't.
    Failed,
}

/// Limits transfers together to a number of bytes per second.
pub(crate) struct Pace {
    bytes_per_s: u64,
    next: Mutex<Instant>,
}

impl Pace {
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, next: Mutex::new(Instant::now()) }
    }

    fn after(&self, bytes: u64) -> Instant {
        let mut next = lock(&self.next);
        let at = next.max(Instant::now());
        let micros = bytes.saturating_mul(1_000_000) / self.bytes_per_s.max(1);
        *next = at + Duration::from_micros(micros);
        at
    }
}

/// What the tasks that complete copies in the background share. There is one for each source, so a host that does not
/// answer holds up only its own copies.
struct Background {
    pace: Pace,
    /// How often there was something new. Then what has failed is tried again.
    round: AtomicU64,
    /// The layers that are being completed now.
    busy: Mutex<HashSet<LayerId>>,
    /// Copies that are still damaged when they were mended. They are not tried again before there is something new.
    damaged: Mutex<HashSet<LayerId>>,
    /// From where a copy was mended last, and how often.
    mended: Mutex<HashMap<LayerId, (String, u32)>>,
}

impl Background {
    fn new(bytes_per_s: u64) -> Self {
        let (round, busy, damaged, mended) = Default::default();
        Self { pace: Pace::new(bytes_per_s), round, busy, damaged, mended }
    }

    fn round(&self) -> u64 {
        self.round.load(Ordering::SeqCst)
    }

    fn begin_round(&self) {
        lock(&self.damaged).clear();
        self.round.fetch_add(1, Ordering::SeqCst);
    }
}

/// Finds out how much may be in flight on the link to the other host, so that its round trips don't limit the rate
/// and readers still don't wait behind a long queue.
#[derive(Default)]
pub(crate) struct Flow {
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
    /// Completes the copies that keep everything, those of one source one after the other and all at most at this
    /// rate, and makes the fetched blocks of the other copies durable. It runs until the future is dropped.
    pub async fn fill_copies(self: Arc<Self>, bytes_per_s: u64) {
        let all = Arc::new(Background::new(bytes_per_s));
        let (mut sources, mut tasks) = (HashSet::new(), JoinSet::new());
        let mut flush_at = Instant::now() + FLUSH_EVERY;
        loop {
            let copies = self.run(move |pool| Ok::<_, Infallible>(pool.copies_to_fill())).await;
            for copy in copies.unwrap_or_default() {
                let source = copy.remote.nbd_addr();
                if sources.insert(source.clone()) {
                    tasks.spawn(Arc::clone(&self).fill_from(source, Arc::clone(&all)));
                }
            }
            loop {
                tokio::select! {
                    () = self.to_fill.notified() => {
                        all.begin_round();
                        break;
                    }
                    Some(ended) = tasks.join_next() => {
                        let (source, round) = ended.unwrap_or_else(|panicked| {
                            std::panic::resume_unwind(panicked.into_panic())
                        });
                        sources.remove(&source);
                        if round != all.round() {
                            break;
                        }
                    }
                    () = tokio::time::sleep_until(flush_at), if !self.open_copies().is_empty() => {
                        if let Err(problem) = self.flush_copies().await {
                            tracing::error!(%problem, "can't make fetched blocks durable");
                        }
                        flush_at = Instant::now() + FLUSH_EVERY;
                        break;
                    }
                }
            }
        }
    }

    /// Completes the copies that come from one source. Each is tried once in a round. Returns the source and the last
    /// round.
    async fn fill_from(self: Arc<Self>, source: String, all: Arc<Background>) -> (String, u64) {
        let (mut round, mut tried) = (all.round(), HashSet::new());
        loop {
            if all.round() != round {
                round = all.round();
                tried.clear();
            }
            let copies = self.run(move |pool| Ok::<_, Infallible>(pool.copies_to_fill())).await;
            let of_source = copies.unwrap_or_default().into_iter();
            let mut of_source = of_source.filter(|copy| copy.remote.nbd_addr() == source);
            let Some(copy) = of_source.find(|copy| tried.insert(copy.layer().id)) else {
                return (source, round);
            };
            let layer = copy.layer().id;
            // Its source may have changed while it is completed.
            let waits = lock(&all.damaged).contains(&layer) || self.is_paused(layer);
            if waits || !lock(&all.busy).insert(layer) {
                continue;
            }
            match self.fill_in_background(&copy, &all.pace).await {
                Filled::Whole => {
                    lock(&all.mended).remove(&layer);
                    lock(&self.doubts).remove(&layer);
                }
                // It was read in vain, which is not done again every half a minute.
                Filled::AsFarAsItGoes if copy.seen() != ContentCheck::Nothing => self.pause(layer),
                Filled::AsFarAsItGoes => {}
                // What had come was dropped. The pool has another object for it now.
                Filled::Damaged if copy.is_closed() => {
                    tried.remove(&layer);
                }
                Filled::Damaged => match self.mend(&copy, &all).await {
                    Mended::Again => {
                        tried.remove(&layer);
                    }
                    // Whatever the other host says of its data: what came is not the image's.
                    Mended::InVain if copy.seen() == ContentCheck::Differs => {
                        if let Err(error) = self.drop_content(&copy, false).await {
                            tracing::warn!(%layer, %error, "can't drop what came of a copy");
                            self.pause(layer);
                        }
                    }
                    Mended::InVain => {
                        lock(&all.damaged).insert(layer);
                    }
                    Mended::Failed => self.pause(layer),
                },
            }
            lock(&all.busy).remove(&layer);
        }
    }

    async fn fill_in_background(self: &Arc<Self>, copy: &Arc<LayerCopy>, pace: &Pace) -> Filled {
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
            return Filled::Whole;
        };
        let kind = if let IoError::Io(error) = &error { Some(error.kind()) } else { None };
        if kind != Some(ErrorKind::Interrupted) {
            copy.filled(Some(error.to_string()));
            tracing::warn!(%layer, %error, "can't complete a copy now; trying again later");
        }
        if kind == Some(ErrorKind::InvalidData) { Filled::Damaged } else { Filled::AsFarAsItGoes }
    }

    fn is_paused(&self, layer: LayerId) -> bool {
        let doubts = lock(&self.doubts);
        doubts.get(&layer).and_then(|doubt| doubt.not_before).is_some_and(|at| Instant::now() < at)
    }

    fn pause(&self, layer: LayerId) {
        lock(&self.doubts).entry(layer).or_default().pause(AGAIN_AFTER);
    }

    /// Has the damaged blocks of a copy fetched again.
    async fn mend(self: &Arc<Self>, copy: &Arc<LayerCopy>, all: &Background) -> Mended {
        let (layer, copy) = (copy.layer().id, Arc::clone(copy));
        let from = copy.remote.nbd_addr();
        match lock(&all.mended).entry(layer).or_default() {
            (last, times) if *last != from => (*last, *times) = (from, 1),
            (_, MENDS_MAX) => return Mended::InVain,
            (_, times) => *times += 1,
        }
        let renewed = self.change(move |pool| pool.renew_damaged(&copy)).await;
        if let Err(error) = &renewed {
            tracing::warn!(%layer, %error, "can't have the damaged blocks of a copy fetched again");
        }
        if renewed.is_ok() { Mended::Again } else { Mended::Failed }
    }

    pub(crate) fn copies_to_fill(&self) -> Vec<Arc<LayerCopy>> {
        let layers = self.catalog.copies_to_fill().unwrap_or_else(|error| {
            tracing::error!(%error, "can't list the copies to complete");
            Vec::new()
        });
        layers.into_iter().filter_map(|layer| self.layer_copy(layer)).collect()
    }

    /// Fetches the blocks that are missing here and not empty on the other host. One pass is enough, because
    /// the other host's layer never changes. After a reader has missed a block, it goes on from there.
    pub(crate) async fn fill(
        self: &Arc<Self>,
        copy: &Arc<LayerCopy>,
        work: &Arc<Work>,
        pace: &Pace,
    ) -> Result<(), IoError> {
        copy.head.check_writable()?;
        copy.learn_holes().await?;
        let mut unfilled = Unfilled::new(copy.layer().blocks() * BLOCK_BYTES);
        work.expect(unfilled.size_bytes);
        let (mut from, mut fetched_bytes, flow) = (0, 0, Arc::<Flow>::default());
        // A source that compares what it gives out says so of bytes that are not what they have to be.
        let mut damage = None;
        // Each fetch is a task of its own, so that it goes on while something else is waited for here.
        let mut fetches = JoinSet::new();
        loop {
            while fetches.len() < flow.pieces_in_flight(copy) {
                if let Some(missed) = copy.take_missed().filter(|block| unfilled.has(*block)) {
                    from = missed;
                    unfilled.begin_at(missed);
                }
                let Some((window, blocks)) = unfilled.next_piece(copy, from, work).await? else {
                    break;
                };
                from = blocks.start;
                let at = pace.after(length_bytes(&blocks));
                let (copy, flow) = (Arc::clone(copy), Arc::clone(&flow));
                fetches.spawn(async move { (window, fetch_piece(&copy, blocks, &flow, at).await) });
            }
            let Some(fetched) = fetches.join_next().await else { break };
            let (window, fetched) = fetched.map_err(std::io::Error::other)?;
            let bytes = match fetched {
                // The other blocks can come all the same.
                Err(IoError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    let why = damage.get_or_insert(error.to_string());
                    copy.filled(Some(why.clone()));
                    0
                }
                fetched => fetched?,
            };
            if damage.is_none() && copy.remote.is_backup() {
                copy.filled(None);
            }
            work.step(bytes)?;
            work.step(unfilled.fetched(window, bytes))?;
            fetched_bytes += bytes;
            if fetched_bytes >= FLUSH_BYTES {
                self.flush_copy(copy).await?;
                fetched_bytes = 0;
            }
        }
        self.flush_copy(copy).await?;
        copy.set_source_damaged(damage.is_some());
        if let Some(why) = damage {
            return Err(std::io::Error::other(why).into());
        }
        if copy.is_own() && copy.missing_bytes() > 0 && !copy.is_closed() {
            return Err(std::io::Error::other("some blocks have not come").into());
        }
        loop {
            let compared = self.compare(copy, work).await?;
            if self.complete(copy, compared).await? {
                return Ok(());
            }
        }
    }

    /// Compares a fully fetched copy with the image's content. If that is not known, or differs, with the other host's
    /// checksums.
    async fn compare(
        self: &Arc<Self>,
        copy: &Arc<LayerCopy>,
        work: &Arc<Work>,
    ) -> Result<Compared, IoError> {
        let Some(wanted) = self.wanted_content(copy).await? else {
            compare_with_source(copy, work).await?;
            return Ok(Compared { content: None, data_bytes: copy.layer().data_bytes() });
        };
        // A reader may still fetch what the other host has called empty.
        let data_bytes = copy.layer().data_bytes();
        work.expect(data_bytes);
        let (layer, reading) = (Arc::clone(copy.layer()), Arc::clone(work));
        copy.set_seen(ContentCheck::Nothing);
        let found = blocking(move || content::of_layer(&layer, &reading)).await;
        match found {
            Ok(found) if found == wanted => {
                return Ok(Compared { content: Some(wanted), data_bytes });
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error.into()),
            Err(error) => {
                // It is this host that can't read it. What it can't read is fetched again.
                copy.set_seen(ContentCheck::Unreadable);
                return match compare_with_source(copy, work).await {
                    Err(IoError::Io(found)) if found.kind() == ErrorKind::InvalidData => {
                        Err(IoError::Io(found))
                    }
                    _ => Err(error.into()),
                };
            }
            Ok(_) => copy.set_seen(ContentCheck::Differs),
        }
        let asked = Instant::now();
        let is_clear = loop {
            match compare_with_source(copy, work).await {
                Ok(()) => {
                    // Before a host is accused, all is read again: this host could have misread it.
                    copy.set_seen(ContentCheck::Unreadable);
                    let (layer, reading) = (Arc::clone(copy.layer()), Arc::clone(work));
                    work.expect(data_bytes);
                    let again = blocking(move || content::of_layer(&layer, &reading)).await?;
                    copy.set_seen(ContentCheck::Differs);
                    if again == wanted {
                        return Ok(Compared { content: Some(wanted), data_bytes });
                    }
                    break true;
                }
                // Only what is damaged is fetched again.
                Err(IoError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    return Err(IoError::Io(error));
                }
                Err(error) if work.is_stopped() => return Err(error),
                Err(IoError::Unreachable(why)) if asked.elapsed() < QUESTIONS_MAX => {
                    tracing::warn!(layer = %copy.layer().id, why, "a copy is not the image's content");
                    tokio::time::sleep(QUESTION_PAUSE).await;
                }
                Err(_) => break false,
            }
        };
        let from = copy.remote.nbd_addr();
        let verdict = self.drop_content(copy, is_clear).await?;
        let why = match verdict {
            Some(Verdict::Deceit) => "not from there any more",
            Some(Verdict::Unclear) => "it needs another source",
            None => "all of it is fetched again",
        };
        let why =
            format!("what came from {from} is not the image's content, which is {wanted}; {why}");
        Err(std::io::Error::new(ErrorKind::InvalidData, why).into())
    }

    async fn wanted_content(
        self: &Arc<Self>,
        copy: &LayerCopy,
    ) -> Result<Option<ContentDigest>, IoError> {
        if copy.is_own() {
            return Ok(None);
        }
        let layer = copy.layer().id;
        let wanted = self.run(move |pool| pool.catalog.content(layer)).await;
        wanted.map_err(|error| catalog::io_error(error).into())
    }

    /// Turns a fully fetched copy into a sealed layer like any other. Returns `false` if it has to be compared again.
    async fn complete(
        self: &Arc<Self>,
        copy: &Arc<LayerCopy>,
        compared: Compared,
    ) -> Result<bool, IoError> {
        let copy = Arc::clone(copy);
        self.change(move |pool| {
            if copy.is_closed() {
                // It was deleted in the meantime, or another task has completed it.
                return Ok(true);
            }
            copy.close(true);
            let completed = pool.complete_closed(&copy, compared);
            if !matches!(completed, Ok(true)) {
                copy.close(false);
            }
            completed
        })
        .await
    }

    fn complete_closed(&self, copy: &LayerCopy, compared: Compared) -> Result<bool, IoError> {
        copy.head.flush_now()?;
        let id = copy.layer().id;
        if !copy.is_own() {
            let wanted = self.catalog.content(id).map_err(catalog::io_error)?;
            let is_same =
                compared.content.is_none() || compared.data_bytes == copy.layer().data_bytes();
            if wanted != compared.content || !is_same {
                return Ok(false);
            }
        }
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
        Ok(true)
    }
}

/// With what a fully fetched copy was compared.
#[derive(Clone, Copy)]
struct Compared {
    /// The image's content; `None` if it is not known.
    content: Option<ContentDigest>,
    /// How much data the copy had then. Data never changes, so it is the same as long as there is no more.
    data_bytes: u64,
}

/// Compares the fetched bytes with the other host's checksums, unless it says that there are none.
async fn compare_with_source(copy: &LayerCopy, work: &Arc<Work>) -> Result<(), IoError> {
    let Some(checksums) = copy.remote.checksums().await? else { return Ok(()) };
    work.expect(copy.layer().data_bytes());
    let findings = match checksums {
        Checksums::Own(sums) => checksums::compare_with_source(copy, &*sums, work).await?,
        Checksums::Visible(sums) => {
            visible_checksums::compare_with_source(copy, &*sums, work).await?
        }
    };
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

/// What of a copy is not filled yet.
struct Unfilled {
    size_bytes: u64,
    windows: Vec<Window>,
    /// What the source has at hand now, because it came together with what was asked for.
    beside: VecDeque<Range<u64>>,
    /// The first bytes of all that came together so far. What is missing of that was damaged.
    asked: HashSet<u64>,
}

/// A part of a copy of which the other host's extents are asked for at once.
struct Window {
    /// The bytes that are not yet counted as done.
    left_bytes: u64,
    /// What is still to be fetched; `None` if that is not known.
    pieces: Option<VecDeque<Range<u64>>>,
    in_flight: usize,
}

impl Window {
    fn is_exhausted(&self) -> bool {
        self.pieces.as_ref().is_some_and(VecDeque::is_empty)
    }

    /// If nothing of it is left or in flight, returns the bytes that were not counted yet: they are holes.
    fn holes(&mut self) -> u64 {
        let is_filled = self.is_exhausted() && self.in_flight == 0;
        if is_filled { std::mem::take(&mut self.left_bytes) } else { 0 }
    }
}

impl Unfilled {
    fn new(size_bytes: u64) -> Self {
        let starts = (0..size_bytes).step_by(index(WINDOW_BYTES));
        let left_bytes = starts.map(|start| WINDOW_BYTES.min(size_bytes - start));
        let window = |left_bytes| Window { left_bytes, pieces: None, in_flight: 0 };
        let windows = left_bytes.map(window).collect();
        Self { size_bytes, windows, beside: VecDeque::new(), asked: HashSet::new() }
    }

    fn window_of(block: u64) -> usize {
        index(block * BLOCK_BYTES / WINDOW_BYTES)
    }

    fn has(&self, block: u64) -> bool {
        self.windows.get(Self::window_of(block)).is_some_and(|window| !window.is_exhausted())
    }

    /// Puts a block's window in order, beginning with this block.
    fn begin_at(&mut self, block: u64) {
        if let Some(pieces) = &mut self.windows[Self::window_of(block)].pieces {
            begin_at(pieces, block);
        }
    }

    /// The window of a block or the next one of which something is left; after the last one it begins again.
    fn next(&self, block: u64) -> Option<usize> {
        let from = Self::window_of(block).min(self.windows.len());
        let mut order = (from..self.windows.len()).chain(0..from);
        order.find(|window| !self.windows[*window].is_exhausted())
    }

    fn bytes(&self, window: usize) -> Range<u64> {
        let start = window as u64 * WINDOW_BYTES;
        start..(start + WINDOW_BYTES).min(self.size_bytes)
    }

    /// These blocks come next, with all that their source hands out together with them.
    fn add_with_beside(&mut self, copy: &LayerCopy, piece: Range<u64>) {
        let mut at = piece.start;
        while at < piece.end {
            let beside = copy.remote.beside(at * BLOCK_BYTES);
            let of_block = beside.iter().find(|range| range.contains(&(at * BLOCK_BYTES)));
            let (Some(first), Some(of_block)) = (beside.first(), of_block) else {
                self.beside.push_back(at..piece.end);
                return;
            };
            if self.asked.insert(first.start) {
                self.beside.extend(copy.missing_of(&beside));
            }
            at = of_block.end.div_ceil(BLOCK_BYTES);
        }
    }

    /// The next of the blocks that the source has at hand, and their window.
    fn next_beside(&mut self) -> Option<(usize, Range<u64>)> {
        let blocks = self.beside.pop_front()?;
        let at = Self::window_of(blocks.start);
        self.windows[at].in_flight += 1;
        Some((at, blocks))
    }

    /// The next blocks to fetch, from this block on and then those before it, and their window.
    async fn next_piece(
        &mut self,
        copy: &LayerCopy,
        from: u64,
        work: &Work,
    ) -> Result<Option<(usize, Range<u64>)>, IoError> {
        if let Some(next) = self.next_beside() {
            return Ok(Some(next));
        }
        while let Some(at) = self.next(from) {
            if self.windows[at].pieces.is_none() {
                let mut pieces = missing_pieces(copy, self.bytes(at)).await?;
                begin_at(&mut pieces, from);
                self.forget_some();
                self.windows[at].pieces = Some(pieces);
            }
            let window = &mut self.windows[at];
            let piece = window.pieces.as_mut().and_then(VecDeque::pop_front);
            if window.is_exhausted() {
                // Without the memory that it had.
                window.pieces = Some(VecDeque::new());
            }
            if let Some(piece) = piece {
                self.add_with_beside(copy, piece);
                if let Some(next) = self.next_beside() {
                    return Ok(Some(next));
                }
            }
            let window = &mut self.windows[at];
            work.step(window.holes())?;
        }
        Ok(None)
    }

    /// Limits the memory. What is left of these windows is asked for again, without what has come.
    fn forget_some(&mut self) {
        let is_open = |window: &&mut Window| window.pieces.is_some() && !window.is_exhausted();
        if self.windows.iter_mut().filter(is_open).count() >= OPEN_WINDOWS_MAX {
            self.windows.iter_mut().filter(is_open).for_each(|window| window.pieces = None);
        }
    }

    /// Counts fetched bytes of a window. Returns what its holes add.
    fn fetched(&mut self, window: usize, bytes: u64) -> u64 {
        let window = &mut self.windows[window];
        window.left_bytes = window.left_bytes.saturating_sub(bytes);
        window.in_flight -= 1;
        window.holes()
    }
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
    pub(crate) fn pipe_bytes(&self, round_trip: Duration) -> u64 {
        lock(&self.link).pipe_bytes(round_trip)
    }

    /// As the background fetches one piece.
    pub(crate) async fn fetch_now(
        &self,
        copy: &Arc<LayerCopy>,
        blocks: Range<u64>,
    ) -> Result<u64, IoError> {
        fetch_piece(copy, blocks, self, Instant::now()).await
    }
}
