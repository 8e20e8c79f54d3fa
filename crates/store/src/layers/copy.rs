//! An incomplete copy of another host's sealed layer. A missing block is fetched when it is read, and
//! kept for the next reader. There are two kinds:
//!
//! - A **whole** copy has no layer below it. It has the other host's content from that layer down, and a block
//!   that is absent here is fetched, until the copy is complete; then it is zeros.
//! - A copy of a layer's **own** blocks may stand anywhere in a chain. It is made with a durable map of what the
//!   layer has ([`crate::copies::incoming_layers`]): such a block is [`BlockState::Remote`] until its bytes are here, and an absent
//!   block is the layer below's. So which layer has a block never changes, and only where its bytes are does.
//!
//! **Fetched blocks are kept in the layer itself**, not in the heads above it. So all volumes over the
//! copy fetch a block only once, the layer is the same on every host that has it, and a complete copy
//! is a sealed layer like any other. A guest's writes go into heads; only fetches write here.
//!
//! A fetch holds the locks of its blocks from the lookup of their states until the fetched bytes are
//! written, as a guest's write does in a head. So a block is fetched once, however many readers want it,
//! and a block that the copy has is never written again. The reader gets its answer as soon as the bytes
//! have arrived; they are written to the copy afterwards. So a read keeps nothing for sure: a kill soon after the
//! answer, or a disk that fails, leaves the block missing, and it is fetched again. A copy is complete only when
//! the background has seen every block written, flushed them, and compared them with the other host's checksums.
//!
//! The files, and the way they become durable, are those of a [`Head`]. After a kill the copy has all blocks that
//! were written; after a power cut it has the flushed ones, and the others are fetched again. If the files of a
//! copy fail, nothing is lost: its data are no longer used, every read of it goes to the other host, and the
//! next server fetches all of it again. A map of own blocks stays right even then: each version of it that was
//! ever written has the same blocks, so the one that is found says what the layer has.

use std::collections::HashSet;
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;
use perigee_block::device::{Extent, IoError, Zeroing};
use perigee_block::locking::{lock, read, write};
use perigee_model::read_ahead::FILL_PIECE_BLOCKS;
use perigee_model::volume::BLOCK_BYTES;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;

use crate::disk::blocks::{BlockState, blocks_of, index, overlap};
use crate::layers::cold;
use crate::layers::head::Head;
use crate::layers::layer::Layer;
use crate::layers::remote::RemoteParent;
use crate::work::Work;

/// The longest time for which a fetch of the background lets readers' fetches go first, in round trips to the other
/// host. Where readers never pause, as those with many requests in flight, it goes on beside them.
const READERS_FIRST_ROUND_TRIPS: u32 = 2;
/// The bounds of that time: a round trip that is not known, or that was measured while the other host was away.
const READERS_FIRST: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_millis(250);
/// No block has this number.
const NOWHERE: u64 = u64::MAX;
/// The limit for fetches that are answered but not yet written. More would only use memory.
const UNWRITTEN_MAX: usize = 64;
/// From so many places of a source what came together is kept at once.
const BESIDE_MAX: usize = 4;

/// The fetches that readers wait for, over all copies of a pool. The background lets them go first.
#[derive(Default)]
pub(crate) struct Waiting {
    readers: AtomicUsize,
    ended: Notify,
}

/// One fetch that a reader waits for.
struct Reader<'a>(&'a Waiting);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::SeqCst);
        self.0.ended.notify_waiters();
    }
}

impl Waiting {
    fn enter(&self) -> Reader<'_> {
        self.readers.fetch_add(1, Ordering::SeqCst);
        Reader(self)
    }

    /// Returns when no reader waits for a fetch, or after this time.
    async fn nobody(&self, longest: Duration) {
        let nobody = async {
            loop {
                let ended = self.ended.notified();
                if self.readers.load(Ordering::SeqCst) == 0 {
                    return;
                }
                ended.await;
            }
        };
        let _waited = tokio::time::timeout(longest, nobody).await;
    }
}

/// A copy of a layer of another host, which fetches what it lacks.
pub(crate) struct LayerCopy {
    pub(crate) head: Arc<Head>,
    pub(crate) remote: Arc<RemoteParent>,
    waiting: Arc<Waiting>,
    /// Where a reader last missed a block, for the background to go on from there; [`NOWHERE`] if none did.
    missed: AtomicU64,
    /// Held for reading during a write. Once it is true, nothing more is written.
    closed: RwLock<bool>,
    /// Blocks that are missing here are zeros.
    complete: AtomicBool,
    /// The bytes that are missing here and are zeros at the other host, as far as is known. Nobody fetches them.
    holes_bytes: AtomicU64,
    unwritten: Arc<Semaphore>,
    /// The first bytes of what came together for readers and is being kept.
    kept_beside: Mutex<HashSet<u64>>,
    /// The failure of a write was already logged.
    complained: AtomicBool,
    /// The latest work of completing the copy in the background.
    filling: Mutex<Arc<Work>>,
    /// Why the last try to complete it failed; `None` if it did not.
    failed: Mutex<Option<String>>,
    /// In the last try all blocks came but those that are damaged at their source.
    source_damaged: AtomicBool,
    /// The blocks that have come and differ from the other host's checksums, or can't be read any more.
    damaged: Mutex<Vec<Range<u64>>>,
    seen: Mutex<ContentCheck>,
}

/// What reading all of a copy has shown, to compare it with the image's content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum ContentCheck {
    /// It was not read, or is the image's.
    #[default]
    Nothing,
    /// This host can't read all of it.
    Unreadable,
    /// All of it could be read, and is something else.
    Differs,
}

/// What a fetch got from the other host.
pub(crate) struct Came {
    pub(crate) bytes: u64,
    /// The task that writes it to the copy.
    pub(crate) keeping: JoinHandle<Result<(), IoError>>,
}

fn bytes_of(blocks: &Range<u64>) -> Range<u64> {
    blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES
}

impl LayerCopy {
    pub(crate) fn new(head: Head, remote: Arc<RemoteParent>, waiting: Arc<Waiting>) -> Self {
        let unwritten = Arc::new(Semaphore::new(UNWRITTEN_MAX));
        let (head, missed) = (Arc::new(head), AtomicU64::new(NOWHERE));
        let (closed, complete, holes_bytes, complained) = Default::default();
        let (filling, failed, source_damaged, damaged, seen, kept_beside) = Default::default();
        Self {
            head,
            remote,
            waiting,
            missed,
            closed,
            complete,
            holes_bytes,
            unwritten,
            kept_beside,
            complained,
            filling,
            failed,
            source_damaged,
            damaged,
            seen,
        }
    }

    /// Whether it has the layer's own blocks only.
    pub(crate) fn is_own(&self) -> bool {
        self.remote.is_own()
    }

    pub(crate) fn layer(&self) -> &Arc<Layer> {
        &self.head.layer
    }

    /// The state of the first block of a range, and where the run of it ends. Absent are only the blocks that
    /// the layers below a copy of own blocks answer for.
    pub(crate) fn run(&self, blocks: &Range<u64>) -> (BlockState, u64) {
        let is_poisoned = self.head.poisoned().is_some();
        if is_poisoned && !self.is_own() {
            return (BlockState::Remote, blocks.end);
        }
        let (state, end) = self.layer().states.run(blocks);
        // The block may have changed between the two lookups.
        let end = end.max(blocks.start + 1);
        let state = match state {
            BlockState::Absent if self.is_own() => BlockState::Absent,
            BlockState::Absent if self.complete.load(Ordering::Acquire) => BlockState::Zero,
            BlockState::Absent => BlockState::Remote,
            BlockState::Data if is_poisoned => BlockState::Remote,
            state => state,
        };
        (state, end)
    }

    /// The other host's extents of bytes that were missing at the lookup.
    pub(crate) async fn extents(&self, span: &Range<u64>) -> Result<Vec<Extent>, IoError> {
        if self.is_own() {
            // They are data there, as the map says.
            let length_bytes = span.end - span.start;
            return Ok(vec![Extent { length_bytes, hole: false, zero: false }]);
        }
        self.remote.extents(span).await
    }

    /// Reads bytes that were missing at the lookup.
    pub(crate) async fn read(self: &Arc<Self>, span: &Range<u64>) -> Result<Bytes, IoError> {
        let blocks = blocks_of(span.start, span.end - span.start);
        let first = bytes_of(&blocks).start;
        let _reader = self.waiting.enter();
        self.missed.store(blocks.end, Ordering::Relaxed);
        let (bytes, came) = self.fetch(blocks).await?;
        if came.is_some() {
            self.keep_beside(span.start);
        }
        Ok(bytes.slice(index(span.start - first)..index(span.end - first)))
    }

    /// Keeps what has come together with this byte, as long as the source has it at hand.
    fn keep_beside(self: &Arc<Self>, offset: u64) {
        let beside = self.remote.beside(offset);
        let Some(first) = beside.first().map(|range| range.start) else { return };
        {
            let mut kept = lock(&self.kept_beside);
            // The others come with the rest: the source has only few pieces at hand.
            if kept.len() >= BESIDE_MAX || !kept.insert(first) {
                return;
            }
        }
        let copy = Arc::clone(self);
        tokio::spawn(async move {
            for blocks in copy.missing_of(&beside) {
                // What does not come now comes with the rest.
                let Ok((_, came)) = copy.fetch(blocks).await else { break };
                if let Some(came) = came {
                    drop(came.keeping.await);
                }
            }
            lock(&copy.kept_beside).remove(&first);
        });
    }

    /// The blocks of these ranges that are missing here, in pieces.
    pub(crate) fn missing_of(&self, ranges: &[Range<u64>]) -> impl Iterator<Item = Range<u64>> {
        let blocks = ranges.iter().map(|range| blocks_of(range.start, range.end - range.start));
        blocks.flat_map(|blocks| self.missing(&blocks, FILL_PIECE_BLOCKS))
    }

    /// The block after the last one that a reader missed since the last call.
    pub(crate) fn take_missed(&self) -> Option<u64> {
        let block = self.missed.swap(NOWHERE, Ordering::Relaxed);
        (block != NOWHERE).then_some(block)
    }

    /// Returns when no reader waits for a fetch of any copy, or after a short time.
    pub(crate) async fn readers_first(&self) {
        let longest = self.remote.round_trip() * READERS_FIRST_ROUND_TRIPS;
        self.waiting.nobody(longest.clamp(*READERS_FIRST.start(), *READERS_FIRST.end())).await;
    }

    /// Reads blocks from the copy and the other host. The bytes from the other host may still be being
    /// written when this returns.
    pub(crate) async fn fetch(
        self: &Arc<Self>,
        blocks: Range<u64>,
    ) -> Result<(Bytes, Option<Came>), IoError> {
        let locked = self.head.locks.lock(blocks.clone()).await;
        let first = bytes_of(&blocks).start;
        let mut runs = Vec::new();
        let mut rest = blocks.clone();
        while !rest.is_empty() {
            let (state, end) = self.run(&rest);
            runs.push((rest.start..end, state));
            rest.start = end;
        }
        let reads = runs.iter().map(|(run, state)| async {
            let span = bytes_of(run);
            let bytes = match state {
                BlockState::Zero | BlockState::Absent => Bytes::new(),
                BlockState::Remote => self.remote.read(&span).await?,
                BlockState::Data => {
                    let file = Arc::clone(self.layer().data());
                    cold::read(file, span.start, index(span.end - span.start)).await?.into()
                }
            };
            Ok::<_, IoError>((span.start, bytes))
        });
        let mut buffer = vec![0; index(bytes_of(&blocks).end - first)];
        for (at, bytes) in try_join_all(reads).await? {
            let at = index(at - first);
            buffer[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let bytes = Bytes::from(buffer);
        runs.retain(|(_, state)| *state == BlockState::Remote);
        if runs.is_empty() {
            return Ok((bytes, None));
        }
        let came_bytes =
            runs.iter().map(|(run, _)| bytes_of(run)).map(|span| span.end - span.start);
        let came_bytes = came_bytes.sum();
        let permit = Arc::clone(&self.unwritten).acquire_owned().await.expect("it is never closed");
        let (copy, fetched) = (Arc::clone(self), bytes.clone());
        let keeping = tokio::task::spawn_blocking(move || {
            let _held = (locked, permit);
            let kept = runs.iter().try_for_each(|(run, _)| copy.keep(first, run, &fetched));
            copy.complain(&kept);
            kept
        });
        Ok((bytes, Some(Came { bytes: came_bytes, keeping })))
    }

    /// Writes the missing ones of these blocks; `bytes` begin at block `first`. The caller holds their locks.
    fn keep(&self, first: u64, blocks: &Range<u64>, bytes: &[u8]) -> Result<(), IoError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        let closed = read(&self.closed);
        if *closed {
            return Ok(());
        }
        let of = |blocks: &Range<u64>| {
            let span = bytes_of(blocks);
            &bytes[index(span.start - first)..index(span.end - first)]
        };
        let mut at = blocks.start;
        while at < blocks.end {
            let is_zero = |block: u64| *of(&(block..block + 1)) == ZEROS;
            let zero = is_zero(at);
            let end = (at + 1..blocks.end).find(|block| is_zero(*block) != zero);
            let run = at..end.unwrap_or(blocks.end);
            if zero {
                self.head.zero(run.clone(), Zeroing::KeepSpace)?;
            } else {
                self.head.write(run.start * BLOCK_BYTES, of(&run))?;
            }
            at = run.end;
        }
        Ok(())
    }

    fn complain(&self, kept: &Result<(), IoError>) {
        match kept {
            Ok(()) => self.complained.store(false, Ordering::Relaxed),
            Err(error) if !self.complained.swap(true, Ordering::Relaxed) => {
                tracing::warn!(layer = %self.layer().id, %error, "can't keep fetched blocks");
            }
            Err(_) => {}
        }
    }

    /// The missing parts of a range, in pieces.
    pub(crate) fn missing(&self, blocks: &Range<u64>, piece_blocks: u64) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut rest = blocks.clone();
        while !rest.is_empty() {
            let (state, end) = self.run(&rest);
            if state == BlockState::Remote {
                let starts = (rest.start..end).step_by(index(piece_blocks));
                missing
                    .extend(starts.map(|start| start..end.min(start.saturating_add(piece_blocks))));
            }
            rest.start = end;
        }
        missing
    }

    /// How much is still to be fetched, in bytes. Of a whole copy without the parts that the other host has said to be holes.
    pub(crate) fn missing_bytes(&self) -> u64 {
        let states = &self.layer().states;
        let is_poisoned = self.head.poisoned().is_some();
        if self.is_own() {
            let lost_bytes = if is_poisoned { states.data_bytes() } else { 0 };
            return states.remote_bytes() + lost_bytes;
        }
        let has_bytes = if is_poisoned { 0 } else { states.known_bytes() };
        let size_bytes =
            bytes_of(&overlap(&(0..self.remote.blocks()), &(0..self.layer().blocks()))).end;
        let holes_bytes = self.holes_bytes.load(Ordering::Relaxed);
        // A reader may have asked for some of them.
        (size_bytes - has_bytes).saturating_sub(holes_bytes)
    }

    /// Asks the other host which of the missing parts hold data, for [`Self::missing_bytes`].
    pub(crate) async fn learn_holes(&self) -> Result<(), IoError> {
        if self.is_own() {
            return Ok(());
        }
        let to_come_bytes = self.remote.data_bytes(|blocks| self.absent_bytes(blocks)).await?;
        self.holes_bytes.store(0, Ordering::Relaxed);
        let holes_bytes = self.missing_bytes().saturating_sub(to_come_bytes);
        self.holes_bytes.store(holes_bytes, Ordering::Relaxed);
        Ok(())
    }

    fn absent_bytes(&self, blocks: &Range<u64>) -> u64 {
        let missing = self.missing(blocks, u64::MAX).into_iter();
        missing.map(|run| bytes_of(&run)).map(|span| span.end - span.start).sum()
    }

    /// Forbids or allows writes. When this returns after `true`, no write is in progress.
    pub(crate) fn close(&self, closed: bool) {
        *write(&self.closed) = closed;
    }

    pub(crate) fn is_closed(&self) -> bool {
        *read(&self.closed)
    }

    /// From now on, blocks that are missing here read as zeros.
    pub(crate) fn set_complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Begins the work of completing the copy in the background.
    pub(crate) fn begin_filling(&self) -> Arc<Work> {
        let work = Arc::<Work>::default();
        *lock(&self.filling) = Arc::clone(&work);
        work
    }

    /// Records why a try to complete the copy failed; `None` if it did not.
    pub(crate) fn filled(&self, failed: Option<String>) {
        *lock(&self.failed) = failed;
    }

    pub(crate) fn why_not_filled(&self) -> Option<String> {
        lock(&self.failed).clone()
    }

    pub(crate) fn set_source_damaged(&self, is_damaged: bool) {
        self.source_damaged.store(is_damaged, Ordering::Relaxed);
    }

    pub(crate) fn is_source_damaged(&self) -> bool {
        self.source_damaged.load(Ordering::Relaxed)
    }

    pub(crate) fn set_seen(&self, seen: ContentCheck) {
        *lock(&self.seen) = seen;
    }

    pub(crate) fn seen(&self) -> ContentCheck {
        *lock(&self.seen)
    }

    /// These blocks differ from the other host's checksums, or can't be read any more.
    pub(crate) fn set_damaged(&self, blocks: Vec<Range<u64>>) {
        *lock(&self.damaged) = blocks;
    }

    /// Makes the damaged blocks missing. Only for copies that are closed.
    pub(crate) fn lose_damaged(&self) -> Result<(), IoError> {
        let missing = if self.is_own() { BlockState::Remote } else { BlockState::Absent };
        lock(&self.damaged).drain(..).try_for_each(|blocks| self.head.lose(&blocks, missing))
    }

    /// Something here of it can't be used: it is damaged, or its disk has failed.
    pub(crate) fn is_broken(&self) -> bool {
        !lock(&self.damaged).is_empty() || self.head.poisoned().is_some()
    }

    pub(crate) fn stop_filling(&self) {
        lock(&self.filling).stop();
    }
}
