//! The devices that clients use: a session of a volume with a writer epoch, or a read-only sealed layer.
//!
//! Each request has two forms. `try_read` and `try_write` run at once, in the caller's thread and without
//! an allocation, if every lock is free, the bytes are in the page cache and nothing has to be created on
//! the disk. The async methods wait for locks and the disk.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, OriginRun, Zeroing};
use perigee_block::lease::{HostTag, LeaseAnswer, LeaseAsk};
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{Epoch, Incarnation, LayerId};
use tokio::sync::OwnedRwLockReadGuard;
use tokio_util::sync::CancellationToken;

use crate::blocking::blocking;
use crate::disk::blocks::check_range;
use crate::disk::blocks::{BlockState, PAGE_BLOCKS, blocks_of, index, overlap};
use crate::disk::files::BlockFile;
use crate::disk::locks::RangeGuard;
use crate::layers::chain::{Chain, Sealed};
use crate::layers::cold;
use crate::layers::head::partial_edges;
use crate::volume::{Stack, Volume};

const BLOCK_BYTES_U32: u32 = 4096;

/// One client's view of a volume.
pub(crate) struct Session {
    volume: Arc<Volume>,
    epoch: Epoch,
    /// Whose server it is of.
    host: HostTag,
    hung_up: CancellationToken,
}

/// The locks that a write holds until its bytes are in the file.
struct Admitted {
    _gate: OwnedRwLockReadGuard<()>,
    _blocks: RangeGuard,
}

/// Bytes to write from `offset` on. Blocks that the head does not have yet are completed.
struct Patch {
    offset: u64,
    data: Bytes,
}

/// The old bytes of blocks that the head did not have when they were read. They are read without a lock,
/// because they may be on another host. They are valid as long as the head is the same one and still does
/// not have the block. A head never loses a block.
#[derive(Default)]
struct Below {
    head: Option<LayerId>,
    blocks: Vec<(u64, Bytes)>,
}

impl Below {
    async fn read(stack: &Stack, offset: u64, length_bytes: u64) -> Result<Self, IoError> {
        let mut blocks = Vec::new();
        for (block, _) in partial_edges(offset, length_bytes) {
            if stack.head.layer.states.get(block) == BlockState::Absent {
                let plan = stack.chain().plan(block * BLOCK_BYTES, BLOCK_BYTES_U32);
                blocks.push((block, plan.read().await?));
            }
        }
        Ok(Self { head: Some(stack.head.layer.id), blocks })
    }

    /// `None` if the block was not read, or was read for another head.
    fn get(&self, stack: &Stack, block: u64) -> Option<&Bytes> {
        let known = self.head == Some(stack.head.layer.id);
        self.blocks.iter().find(|(at, _)| known && *at == block).map(|(_, bytes)| bytes)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.volume.session_ended();
    }
}

impl Session {
    pub(crate) fn new(volume: Arc<Volume>, epoch: Epoch, host: HostTag) -> Self {
        Self { volume, epoch, host, hung_up: CancellationToken::new() }
    }

    /// Waits for the lock on the blocks, and checks the epoch. The epoch can't change as long as the result
    /// is held.
    async fn admit(&self, offset: u64, length_bytes: u64) -> Result<(Stack, Admitted), IoError> {
        let gate = loop {
            if !self.volume.lease.allows(self.host) {
                self.unless_hung_up(self.volume.end_leases(self.host)).await?;
            }
            let gate = Arc::clone(&self.volume.gate).read_owned().await;
            if self.volume.lease.allows(self.host) {
                break gate;
            }
        };
        self.volume.check_writer(self.epoch)?;
        let stack = self.volume.stack();
        check_range(stack.size_bytes(), offset, length_bytes)?;
        stack.head.check_writable()?;
        let blocks = stack.head.locks.lock(blocks_of(offset, length_bytes)).await;
        Ok((stack, Admitted { _gate: gate, _blocks: blocks }))
    }

    /// What waits for another host waits no longer than the client.
    async fn unless_hung_up<T>(
        &self,
        waits: impl Future<Output = Result<T, IoError>>,
    ) -> Result<T, IoError> {
        let gone = || IoError::Unreachable("the client went away".to_owned());
        self.hung_up.run_until_cancelled(waits).await.ok_or_else(gone)?
    }

    /// What departed was flushed before, but what the new home has got since was not.
    async fn flush_here(&self) -> Result<(), IoError> {
        self.volume.flush().await?;
        self.volume.check_here()
    }

    async fn write_admitted(&self, offset: u64, data: Bytes) -> Result<(), IoError> {
        if data.is_empty() {
            return Ok(());
        }
        let length_bytes = data.len() as u64;
        let mut below = Below::default();
        loop {
            let (stack, admitted) = self.admit(offset, length_bytes).await?;
            if let Some(patch) = patch(&stack, offset, data.clone(), &below) {
                return blocking(move || {
                    let _admitted = admitted;
                    stack.head.write(patch.offset, &patch.data)
                })
                .await;
            }
            // The locks are released, so that no other request waits for another host because of this write.
            drop(admitted);
            below = Below::read(&stack, offset, length_bytes).await?;
        }
    }

    /// Makes the whole write at once if it need not wait. It holds its locks for two system calls.
    fn write_now(&self, offset: u64, data: &[u8]) -> Option<Result<(), IoError>> {
        let length_bytes = data.len() as u64;
        let _gate = self.volume.gate.try_read().ok()?;
        self.volume.check_here().ok()?;
        if !self.volume.lease.allows(self.host) {
            return None;
        }
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
        let mut below = Below::default();
        loop {
            let (stack, admitted) = self.admit(offset, length_bytes).await?;
            if let Some((patches, whole)) = zero_patches(&stack, offset, length_bytes, &below) {
                return blocking(move || {
                    let _admitted = admitted;
                    for patch in &patches {
                        stack.head.write(patch.offset, &patch.data)?;
                    }
                    if whole.is_empty() { Ok(()) } else { zero_blocks(&stack, &whole, how) }
                })
                .await;
            }
            drop(admitted);
            below = Below::read(&stack, offset, length_bytes).await?;
        }
    }
}

/// Makes whole blocks zero. Blocks that no layer has are zero already, so the cost of discarding a large
/// volume depends only on the part that is used.
fn zero_blocks(stack: &Stack, blocks: &Range<u64>, how: Zeroing) -> Result<(), IoError> {
    for page in stack.chain().pages_in_use(blocks) {
        let first = page as u64 * PAGE_BLOCKS;
        stack.head.zero(overlap(blocks, &(first..first + PAGE_BLOCKS)), how)?;
    }
    Ok(())
}

/// Completes the blocks that a write covers in part and that the head does not have yet. Returns `None` if
/// `below` lacks one of them. The caller holds their locks.
fn patch(stack: &Stack, offset: u64, data: Bytes, below: &Below) -> Option<Patch> {
    static ZEROS: [u8; 4096] = [0; 4096];
    let mut start = offset;
    let (mut before, mut after) = (Bytes::new(), Bytes::new());
    for (block, bytes) in partial_edges(offset, data.len() as u64) {
        let old = match stack.head.layer.states.get(block) {
            BlockState::Data => continue,
            BlockState::Zero => Bytes::from_static(&ZEROS),
            BlockState::Absent => below.get(stack, block)?.clone(),
            BlockState::Remote => unreachable!("a volume's head has all its blocks here"),
        };
        if bytes.start > 0 {
            start = block * BLOCK_BYTES;
            before = old.slice(..bytes.start);
        }
        after = old.slice(bytes.end..);
    }
    if before.is_empty() && after.is_empty() {
        return Some(Patch { offset, data });
    }
    Some(Patch { offset: start, data: [before, data, after].concat().into() })
}

/// The zeros to write at the edges of a range, and the whole blocks between them. Returns `None` if `below`
/// lacks a block.
fn zero_patches(
    stack: &Stack,
    offset: u64,
    length_bytes: u64,
    below: &Below,
) -> Option<(Vec<Patch>, Range<u64>)> {
    let mut patches = Vec::new();
    let mut whole = blocks_of(offset, length_bytes);
    for (block, bytes) in partial_edges(offset, length_bytes) {
        if block == whole.start {
            whole.start += 1;
        } else {
            whole.end -= 1;
        }
        let zeros = BytesMut::zeroed(bytes.len()).freeze();
        patches.push(patch(stack, block * BLOCK_BYTES + bytes.start as u64, zeros, below)?);
    }
    Some((patches, whole))
}

impl Device for Session {
    fn size_bytes(&self) -> u64 {
        self.volume.size_bytes()
    }

    fn incarnation(&self) -> Option<Incarnation> {
        Some(self.volume.incarnation())
    }

    fn epoch(&self) -> Option<Epoch> {
        Some(self.epoch)
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            self.volume.check_here()?;
            let stack = self.volume.stack();
            check_range(stack.size_bytes(), offset, length_bytes.into())?;
            stack.chain().plan(offset, length_bytes).read().await
        })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        self.volume.check_here().ok()?;
        let stack = self.volume.stack_ref();
        match check_range(stack.size_bytes(), offset, buffer.len() as u64) {
            Ok(()) => stack.chain().try_read(offset, buffer),
            Err(error) => Some(Err(error)),
        }
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.write_admitted(offset, data).await?;
            if fua { self.flush_here().await } else { Ok(()) }
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
            if fua { self.flush_here().await } else { Ok(()) }
        })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(self.flush_here())
    }

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move {
            self.volume.check_here()?;
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

    fn lease(&self, ask: LeaseAsk) -> BoxFuture<'_, Result<LeaseAnswer, IoError>> {
        Box::pin(self.unless_hung_up(self.volume.ask_lease(self.host, ask)))
    }

    fn hang_up(&self) {
        self.hung_up.cancel();
    }
}

/// The part of a [`Device`] that is the same for each that can't be written.
macro_rules! read_only {
    () => {
        fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
            Box::pin(async { Err(IoError::ReadOnly) })
        }

        fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
            Box::pin(async { Err(IoError::ReadOnly) })
        }

        fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
            Box::pin(async { Ok(()) })
        }
    };
}

pub(crate) use read_only;

/// A sealed layer with its chain, read-only. Its size never changes.
pub(crate) struct SealedDevice {
    pub(crate) size_bytes: u64,
    pub(crate) layers: Arc<Sealed>,
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
        self.layers.layers().next().map(|top| top.id)
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move { self.chain().plan(offset, length_bytes).read().await })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        self.chain().try_read(offset, buffer)
    }

    read_only!();

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

/// Only what one sealed layer itself has, read-only. The rest reads as zeros, and its extents say that it is
/// no data and not known to be zeros.
pub(crate) struct OwnDevice(pub(crate) SealedDevice);

impl Device for OwnDevice {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn layer(&self) -> Option<LayerId> {
        self.0.layer()
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        self.0.read(offset, length_bytes)
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        self.0.try_read(offset, buffer)
    }

    read_only!();

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move { Ok(self.0.layers.own_extents(offset, length_bytes)) })
    }
}

/// The checksums of a sealed layer, read-only.
pub(crate) struct SumsDevice {
    pub(crate) size_bytes: u64,
    pub(crate) file: Arc<dyn BlockFile>,
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

    read_only!();

    fn extents(&self, _: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move { Ok(vec![Extent { length_bytes: length, hole: false, zero: false }]) })
    }
}
