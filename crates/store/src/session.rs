//! What a client gets of a volume: a session of a writer epoch, or a sealed layer to read.
//!
//! Each request comes in two ways. `try_read` and `try_write` do it at once, in the caller's
//! thread and without an allocation, if every lock is free, the bytes are in the page cache and
//! nothing has to be made on the disk. The async methods wait for whatever there is to wait for.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, OriginRun, Zeroing};
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{Epoch, LayerId};
use tokio::sync::OwnedRwLockReadGuard;

use super::blocks::{BlockState, PAGE_BLOCKS, blocks_of, index, overlap};
use super::chain::{Chain, Sealed};
use super::cold;
use super::files::BlockFile;
use super::head::partial_edges;
use super::locks::RangeGuard;
use super::volume::{Stack, Volume};
use super::{blocking, check_range};

const BLOCK_BYTES_U32: u32 = 4096;

/// One client's view of a volume.
pub(super) struct Session {
    volume: Arc<Volume>,
    epoch: Epoch,
}

/// What a write holds until its bytes are in the file.
struct Admitted {
    _gate: OwnedRwLockReadGuard<()>,
    _blocks: RangeGuard,
}

/// Bytes from `offset` on, filled up to whole blocks where the head has no block yet.
struct Patch {
    offset: u64,
    data: Bytes,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.volume.session_ended();
    }
}

impl Session {
    pub(super) fn new(volume: Arc<Volume>, epoch: Epoch) -> Self {
        Self { volume, epoch }
    }

    /// Waits for its turn on the blocks, with the epoch checked and kept as it is.
    async fn admit(&self, offset: u64, length_bytes: u64) -> Result<(Stack, Admitted), IoError> {
        let gate = Arc::clone(&self.volume.gate).read_owned().await;
        self.volume.check_writer(self.epoch)?;
        let stack = self.volume.stack();
        check_range(stack.size_bytes(), offset, length_bytes)?;
        stack.head.check_writable()?;
        let blocks = stack.head.locks.lock(blocks_of(offset, length_bytes)).await;
        Ok((stack, Admitted { _gate: gate, _blocks: blocks }))
    }

    async fn write_admitted(&self, offset: u64, data: Bytes) -> Result<(), IoError> {
        if data.is_empty() {
            return Ok(());
        }
        let (stack, admitted) = self.admit(offset, data.len() as u64).await?;
        let patch = patch(&stack, offset, data).await?;
        blocking(move || {
            let _admitted = admitted;
            stack.head.write(patch.offset, &patch.data)
        })
        .await
    }

    /// The whole write, if nothing is in its way; what it holds, it holds for the time of two
    /// system calls.
    fn write_now(&self, offset: u64, data: &[u8]) -> Option<Result<(), IoError>> {
        let length_bytes = data.len() as u64;
        let _gate = self.volume.gate.try_read().ok()?;
        let stack = self.volume.stack_ref();
        let admitted = self
            .volume
            .check_writer(self.epoch)
            .and_then(|()| check_range(stack.size_bytes(), offset, length_bytes));
        if let Err(error) = admitted {
            return Some(Err(error));
        }
        let head = &*stack.head;
        let blocks = blocks_of(offset, length_bytes);
        if !head.is_prepared(&blocks) {
            return None;
        }
        let _blocks = head.locks.try_lock(blocks.clone())?;
        let is_data = |block: u64| head.layer.states.get(block) == BlockState::Data;
        let starts_whole = offset.is_multiple_of(BLOCK_BYTES) || is_data(blocks.start);
        let end = offset + length_bytes;
        if !starts_whole || !(end.is_multiple_of(BLOCK_BYTES) || is_data(blocks.end - 1)) {
            return None;
        }
        Some(head.write(offset, data))
    }

    async fn zero_admitted(
        &self,
        offset: u64,
        length_bytes: u64,
        how: Zeroing,
    ) -> Result<(), IoError> {
        if length_bytes == 0 {
            return Ok(());
        }
        let (stack, admitted) = self.admit(offset, length_bytes).await?;
        let mut patches = Vec::new();
        let mut whole = blocks_of(offset, length_bytes);
        for (block, bytes) in partial_edges(offset, length_bytes) {
            if block == whole.start {
                whole.start += 1;
            } else {
                whole.end -= 1;
            }
            let zeros = BytesMut::zeroed(bytes.len()).freeze();
            patches.push(patch(&stack, block * BLOCK_BYTES + bytes.start as u64, zeros).await?);
        }
        blocking(move || {
            let _admitted = admitted;
            for patch in &patches {
                stack.head.write(patch.offset, &patch.data)?;
            }
            if whole.is_empty() { Ok(()) } else { zero_blocks(&stack, &whole, how) }
        })
        .await
    }
}

/// Makes whole blocks zero. Where nothing was ever written, and nothing below shows through, they
/// are zero already: a discard of a large volume costs what is used of it.
fn zero_blocks(stack: &Stack, blocks: &Range<u64>, how: Zeroing) -> Result<(), IoError> {
    for page in stack.chain().pages_in_use(blocks) {
        let first = page as u64 * PAGE_BLOCKS;
        stack.head.zero(overlap(blocks, &(first..first + PAGE_BLOCKS)), how)?;
    }
    Ok(())
}

/// Fills up the blocks that a write covers in part and that the head does not have yet.
/// The caller holds their locks.
async fn patch(stack: &Stack, offset: u64, data: Bytes) -> Result<Patch, IoError> {
    let mut start = offset;
    let (mut before, mut after) = (Bytes::new(), Bytes::new());
    for (block, bytes) in partial_edges(offset, data.len() as u64) {
        if stack.head.layer.states.get(block) == BlockState::Data {
            continue;
        }
        let at = block * BLOCK_BYTES;
        let old = stack.chain().plan(at, BLOCK_BYTES_U32).read(&stack.below).await?;
        if bytes.start > 0 {
            start = at;
            before = old.slice(..bytes.start);
        }
        after = old.slice(bytes.end..);
    }
    if before.is_empty() && after.is_empty() {
        return Ok(Patch { offset, data });
    }
    Ok(Patch { offset: start, data: [before, data, after].concat().into() })
}

impl Device for Session {
    fn size_bytes(&self) -> u64 {
        self.volume.size_bytes()
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            let stack = self.volume.stack();
            check_range(stack.size_bytes(), offset, length_bytes.into())?;
            stack.chain().plan(offset, length_bytes).read(&stack.below).await
        })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        let stack = self.volume.stack_ref();
        match check_range(stack.size_bytes(), offset, buffer.len() as u64) {
            Ok(()) => stack.chain().try_read(offset, buffer),
            Err(error) => Some(Err(error)),
        }
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.write_admitted(offset, data).await?;
            if fua { self.volume.flush().await } else { Ok(()) }
        })
    }

    fn try_write(&self, offset: u64, data: &[u8]) -> Option<Result<(), IoError>> {
        if data.is_empty() { Some(Ok(())) } else { self.write_now(offset, data) }
    }

    fn zero(
        &self,
        offset: u64,
        length_bytes: u64,
        how: Zeroing,
        fua: bool,
    ) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.zero_admitted(offset, length_bytes, how).await?;
            if fua { self.volume.flush().await } else { Ok(()) }
        })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(self.volume.flush())
    }

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move {
            let stack = self.volume.stack();
            check_range(stack.size_bytes(), offset, length_bytes)?;
            stack.chain().extents(offset, length_bytes).await
        })
    }

    fn origins(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<OriginRun>, IoError>> {
        Box::pin(async move {
            check_range(self.volume.size_bytes(), offset, length_bytes)?;
            Ok(self.volume.stack().chain().origins(offset, length_bytes))
        })
    }
}

/// A sealed layer with its chain, read-only. Its size never changes.
pub(super) struct SealedDevice {
    pub(super) size_bytes: u64,
    pub(super) layers: Arc<Sealed>,
}

impl SealedDevice {
    fn chain(&self) -> Chain<'_> {
        Chain { head: None, below: &self.layers }
    }
}

impl Device for SealedDevice {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn layer(&self) -> Option<LayerId> {
        self.layers.layers().first().map(|top| top.id)
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move { self.chain().plan(offset, length_bytes).read(&self.layers).await })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        self.chain().try_read(offset, buffer)
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move { self.chain().extents(offset, length_bytes).await })
    }

    fn origins(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<OriginRun>, IoError>> {
        Box::pin(async move { Ok(self.chain().origins(offset, length_bytes)) })
    }
}

/// The checksums of a sealed layer, read-only.
pub(super) struct SumsDevice {
    pub(super) size_bytes: u64,
    pub(super) file: Arc<dyn BlockFile>,
}

impl Device for SumsDevice {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            let length = index(length_bytes.into());
            Ok(cold::read(Arc::clone(&self.file), offset, length).await?.into())
        })
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, _: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move { Ok(vec![Extent { length_bytes: length, hole: false, zero: false }]) })
    }
}
