//! An incomplete copy of another host's sealed layer. A missing block is fetched when it is read, and
//! kept for the next reader.
//!
//! **Fetched blocks are kept in the layer itself**, not in the heads above it. So all volumes over the
//! copy fetch a block only once, the layer is the same on every host that has it, and a complete copy
//! is a sealed layer like any other. A guest's writes go into heads; only fetches write here.
//!
//! A fetch holds the locks of its blocks from the lookup of their states until the fetched bytes are
//! written, as a guest's write does in a head. So a block is fetched once, however many readers want it,
//! and a block that the copy has is never written again. The reader gets its answer as soon as the bytes
//! have arrived; they are written to the copy afterwards.
//!
//! The files, and the way they become durable, are those of a [`Head`]. After a kill the copy has all its
//! blocks; after a power cut it has the flushed ones, and the others are fetched again. If the files of a
//! copy fail, nothing is lost: they are no longer used, every read goes to the other host, and the next
//! server starts with empty files.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use bytes::Bytes;
use futures_util::future::try_join_all;
use perigee_block::device::{IoError, Zeroing};
use perigee_model::volume::BLOCK_BYTES;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::blocks::{BlockState, blocks_of, index, overlap};
use super::cold;
use super::head::Head;
use super::layer::Layer;
use super::remote::RemoteParent;
use super::work::Work;

/// The limit for fetches that are answered but not yet written. More would only use memory.
const UNWRITTEN_MAX: usize = 64;

pub(super) struct LayerCopy {
    pub(super) head: Arc<Head>,
    pub(super) remote: Arc<RemoteParent>,
    /// Held for reading during a write. Once it is true, nothing more is written.
    closed: RwLock<bool>,
    /// Blocks that are missing here are zeros.
    complete: AtomicBool,
    unwritten: Arc<Semaphore>,
    /// The failure of a write was already logged.
    complained: AtomicBool,
    /// The latest work of completing the copy in the background.
    filling: Mutex<Arc<Work>>,
}

/// The task that writes fetched bytes to the copy.
type Keeping = JoinHandle<Result<(), IoError>>;

fn bytes_of(blocks: &Range<u64>) -> Range<u64> {
    blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES
}

impl LayerCopy {
    pub(super) fn new(head: Head, remote: Arc<RemoteParent>) -> Self {
        let unwritten = Arc::new(Semaphore::new(UNWRITTEN_MAX));
        let (closed, complete, complained, filling) = Default::default();
        Self { head: Arc::new(head), remote, closed, complete, unwritten, complained, filling }
    }

    pub(super) fn layer(&self) -> &Arc<Layer> {
        &self.head.layer
    }

    /// The state of the first block of a range, and where the run of it ends.
    pub(super) fn run(&self, blocks: &Range<u64>) -> (BlockState, u64) {
        if self.head.poisoned().is_some() {
            return (BlockState::Absent, blocks.end);
        }
        let (state, end) = self.layer().states.run(blocks);
        // The block may have changed between the two lookups.
        let end = end.max(blocks.start + 1);
        match state {
            BlockState::Absent if self.complete.load(Ordering::Acquire) => (BlockState::Zero, end),
            state => (state, end),
        }
    }

    /// Reads bytes that were missing at the lookup.
    pub(super) async fn read(self: &Arc<Self>, span: &Range<u64>) -> Result<Bytes, IoError> {
        let blocks = blocks_of(span.start, span.end - span.start);
        let first = bytes_of(&blocks).start;
        let (bytes, _keeping) = self.fetch(blocks).await?;
        Ok(bytes.slice(index(span.start - first)..index(span.end - first)))
    }

    /// Reads blocks from the copy and the other host. The bytes from the other host may still be being
    /// written when this returns.
    pub(super) async fn fetch(
        self: &Arc<Self>,
        blocks: Range<u64>,
    ) -> Result<(Bytes, Option<Keeping>), IoError> {
        let locked = self.head.locks.lock(blocks.clone()).await;
        let first = bytes_of(&blocks).start;
        let mut runs = Vec::new();
        let mut rest = blocks.clone();
        while !rest.is_empty() {
            let (state, end) = self.run(&rest);
            runs.push((rest.start..end, state));
            rest.start = end;
        }
        let reads = runs.iter().filter(|(_, state)| *state != BlockState::Zero);
        let reads = reads.map(|(run, state)| async {
            let span = bytes_of(run);
            let bytes = match state {
                BlockState::Absent => self.remote.read(&span).await?,
                _ => {
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
        runs.retain(|(_, state)| *state == BlockState::Absent);
        if runs.is_empty() {
            return Ok((bytes, None));
        }
        let permit = Arc::clone(&self.unwritten).acquire_owned().await.expect("it is never closed");
        let (copy, fetched) = (Arc::clone(self), bytes.clone());
        let keeping = tokio::task::spawn_blocking(move || {
            let _held = (locked, permit);
            let kept = runs.iter().try_for_each(|(run, _)| copy.keep(first, run, &fetched));
            copy.complain(&kept);
            kept
        });
        Ok((bytes, Some(keeping)))
    }

    /// Writes the missing ones of these blocks; `bytes` begin at block `first`. The caller holds their locks.
    fn keep(&self, first: u64, blocks: &Range<u64>, bytes: &[u8]) -> Result<(), IoError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        let closed = self.closed.read().expect("no holder panics");
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
    pub(super) fn missing(&self, blocks: &Range<u64>, piece_blocks: u64) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut rest = blocks.clone();
        while !rest.is_empty() {
            let (state, end) = self.run(&rest);
            if state == BlockState::Absent {
                let starts = (rest.start..end).step_by(index(piece_blocks));
                missing.extend(starts.map(|start| start..end.min(start + piece_blocks)));
            }
            rest.start = end;
        }
        missing
    }

    pub(super) fn missing_bytes(&self) -> u64 {
        let has_bytes = match self.head.poisoned() {
            Some(_) => 0,
            None => self.layer().states.known_bytes(),
        };
        bytes_of(&overlap(&(0..self.remote.blocks()), &(0..self.layer().blocks()))).end - has_bytes
    }

    /// Forbids or allows writes. When this returns after `true`, no write is in progress.
    pub(super) fn close(&self, closed: bool) {
        *self.closed.write().expect("no holder panics") = closed;
    }

    pub(super) fn is_closed(&self) -> bool {
        *self.closed.read().expect("no holder panics")
    }

    /// From now on, blocks that are missing here read as zeros.
    pub(super) fn set_complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Begins the work of completing the copy in the background.
    pub(super) fn begin_filling(&self) -> Arc<Work> {
        let work = Arc::<Work>::default();
        *self.filling.lock().expect("no holder panics") = Arc::clone(&work);
        work
    }

    pub(super) fn stop_filling(&self) {
        self.filling.lock().expect("no holder panics").stop();
    }
}
