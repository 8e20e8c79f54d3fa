//! A volume: a head over a chain, and who may write it now.
//!
//! Every write and zero passes a gate: it holds the gate's read side from the comparison of the
//! session's epoch with the volume's until its bytes are written. Raising the epoch and sealing
//! the head take the write side, so they wait for writes in flight, and no write with the old
//! epoch, or into the old head, comes after. The guards travel into the blocking call that does
//! the work: a client that goes away leaves no half-guarded write behind.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use perigee_model::volume::{BLOCK_BYTES, EpochChange, EpochIssued};
use perigee_model::{Epoch, Problem, VolumeName};
use tokio::sync::OwnedRwLockReadGuard;

use super::blocks::{BlockState, blocks_of};
use super::catalog::{Catalog, EpochRefused};
use super::chain::Chain;
use super::head::{Head, Patch, partial_edges};
use super::locks::RangeGuard;
use super::{blocking, check_range};
use crate::device::{Device, Extent, IoError, Zeroing};

/// The layers of a volume at one moment. A snapshot replaces it whole.
#[derive(Clone)]
pub(super) struct Stack {
    pub(super) head: Arc<Head>,
    /// The head's layer first.
    pub(super) chain: Arc<Chain>,
}

/// A volume whose head is in this pool.
pub struct Volume {
    name: VolumeName,
    size_bytes: u64,
    catalog: Arc<Catalog>,
    gate: Arc<tokio::sync::RwLock<()>>,
    /// Changed only under the gate's write side.
    epoch: AtomicU64,
    /// Set once, under the gate's write side.
    deleted: AtomicBool,
    stack: RwLock<Stack>,
    sessions: AtomicU64,
}

/// What a write holds until its bytes are in the file.
struct Admitted {
    _gate: OwnedRwLockReadGuard<()>,
    _blocks: RangeGuard,
}

impl Volume {
    pub(super) fn new(
        name: VolumeName,
        size_bytes: u64,
        epoch: Epoch,
        stack: Stack,
        catalog: Arc<Catalog>,
    ) -> Self {
        Self {
            name,
            size_bytes,
            catalog,
            gate: Arc::default(),
            epoch: AtomicU64::new(epoch.0),
            deleted: AtomicBool::new(false),
            stack: RwLock::new(stack),
            sessions: AtomicU64::new(0),
        }
    }

    pub fn name(&self) -> &VolumeName {
        &self.name
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The epoch whose sessions may write now.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::SeqCst))
    }

    /// A session of a writer epoch; `None` takes the volume's epoch of this moment.
    pub fn session(self: &Arc<Self>, epoch: Option<Epoch>) -> Arc<dyn Device> {
        self.sessions.fetch_add(1, Ordering::SeqCst);
        Arc::new(Session { epoch: epoch.unwrap_or_else(|| self.epoch()), volume: Arc::clone(self) })
    }

    pub(super) fn open_sessions(&self) -> u64 {
        self.sessions.load(Ordering::SeqCst)
    }

    pub(super) fn stack(&self) -> Stack {
        self.stack.read().expect("no holder panics").clone()
    }

    /// # Errors
    /// When the catalog can't be written.
    pub async fn issue_epoch(self: &Arc<Self>) -> Result<EpochIssued, Problem> {
        let volume = Arc::clone(self);
        blocking(move || {
            let epoch = volume.catalog.issue_epoch(&volume.name).map_err(|error| {
                Problem::internal(format!("can't issue an epoch of volume {}", volume.name), error)
            })?;
            Ok(EpochIssued { epoch })
        })
        .await
    }

    /// As [`EpochChange`] says: once it returns, no write of the old epoch is in flight.
    ///
    /// # Errors
    /// A conflict unless the volume's epoch is `from` or `to`, and `to` was issued and not given back.
    pub async fn change_epoch(self: &Arc<Self>, change: EpochChange) -> Result<(), Problem> {
        let gate = Arc::clone(&self.gate).write_owned().await;
        let volume = Arc::clone(self);
        blocking(move || {
            let _gate = gate;
            let what = format!("can't change the epoch of volume {} to {}", volume.name, change.to);
            match volume.catalog.change_epoch(&volume.name, change) {
                Ok(Ok(())) => {
                    volume.epoch.store(change.to.0, Ordering::SeqCst);
                    Ok(())
                }
                Ok(Err(EpochRefused::NotIssued { issued_max })) => {
                    let why = format!("epochs up to {issued_max} were issued");
                    Err(Problem::conflict(what, why).next("issue the epoch first"))
                }
                Ok(Err(EpochRefused::NotFrom { epoch })) => {
                    let why = format!("its epoch is {epoch}, not {}", change.from);
                    Err(Problem::conflict(what, why))
                }
                Ok(Err(EpochRefused::Returned)) => {
                    Err(Problem::conflict(what, "this epoch was given back before"))
                }
                Err(error) => Err(Problem::internal(what, error)),
            }
        })
        .await
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.stack().head.poisoned().is_some()
    }

    /// Every write that returned before this call is durable when it returns well.
    ///
    /// # Errors
    /// [`IoError::Poisoned`] when a sync failed, now or before.
    pub async fn flush(self: &Arc<Self>) -> Result<(), IoError> {
        // A head that a snapshot has replaced since was flushed when it was sealed.
        let head = self.stack().head;
        let result = head.flush().await;
        if matches!(result, Err(IoError::Poisoned(_))) {
            let volume = Arc::clone(self);
            blocking(move || {
                volume.record_poison(&head);
                Ok::<_, IoError>(())
            })
            .await?;
        }
        result
    }

    /// So that a restarted server still refuses writes. The volume is read-only in this process
    /// either way, so a catalog that can't be written changes nothing now.
    fn record_poison(&self, head: &Head) {
        let Some(why) = head.poisoned() else { return };
        if let Err(error) = self.catalog.poison(head.layer.id, why) {
            tracing::error!(volume = %self.name, %error, "can't record that a flush failed");
        }
    }

    /// Drains writes, flushes, and lets `replace` put other layers in place of the present ones
    /// while nothing writes. `None` leaves them.
    pub(super) async fn replace_stack<T: Send + 'static>(
        self: &Arc<Self>,
        what: &str,
        replace: impl FnOnce(&Stack) -> Result<(Option<Stack>, T), Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let gate = Arc::clone(&self.gate).write_owned().await;
        let (volume, what) = (Arc::clone(self), what.to_owned());
        blocking(move || {
            let _gate = gate;
            let stack = volume.stack();
            stack.head.flush_now().map_err(|error| {
                volume.record_poison(&stack.head);
                io_problem(&what, &error)
            })?;
            let (new, result) = replace(&stack)?;
            if let Some(new) = new {
                *volume.stack.write().expect("no holder panics") = new;
            }
            Ok(result)
        })
        .await
    }

    /// Runs `forget` while nothing writes and no session is open; after it no write succeeds.
    pub(super) async fn delete_with(
        self: &Arc<Self>,
        forget: impl FnOnce() -> Result<(), Problem> + Send + 'static,
    ) -> Result<(), Problem> {
        let gate = Arc::clone(&self.gate).write_owned().await;
        let volume = Arc::clone(self);
        blocking(move || {
            let _gate = gate;
            let open = volume.open_sessions();
            if open > 0 {
                let what = format!("can't delete volume {}", volume.name);
                let problem = Problem::conflict(what, format!("open sessions: {open}"));
                return Err(problem.next("stop what uses it"));
            }
            forget()?;
            volume.deleted.store(true, Ordering::SeqCst);
            Ok(())
        })
        .await
    }
}

/// An I/O error as the control API tells it.
pub(crate) fn io_problem(what: &str, error: &IoError) -> Problem {
    match error {
        IoError::NoSpace => Problem::no_space(what, error).next("free space in the pool"),
        IoError::Poisoned(_) => {
            Problem::conflict(what, error).next("copy the volume to a healthy disk")
        }
        IoError::Fenced { .. } | IoError::Refused(_) | IoError::ReadOnly => {
            Problem::conflict(what, error)
        }
        IoError::Invalid(_) => Problem::invalid(what, error),
        IoError::Unreachable(_) => Problem::unavailable(what, error),
        IoError::Io(_) => Problem::internal(what, error),
    }
}

/// One client's view of a volume.
struct Session {
    volume: Arc<Volume>,
    epoch: Epoch,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.volume.sessions.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Session {
    /// Waits for its turn on the blocks, with the epoch checked and kept as it is.
    async fn admit(&self, offset: u64, length_bytes: u64) -> Result<(Stack, Admitted), IoError> {
        check_range(self.volume.size_bytes, offset, length_bytes)?;
        let gate = Arc::clone(&self.volume.gate).read_owned().await;
        let epoch = self.volume.epoch();
        if self.epoch != epoch {
            return Err(IoError::Fenced { session: self.epoch, volume: epoch });
        }
        if self.volume.deleted.load(Ordering::SeqCst) {
            return Err(IoError::Invalid(format!("volume {} was deleted", self.volume.name)));
        }
        let stack = self.volume.stack();
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
            stack.head.write(&patch)
        })
        .await
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
                stack.head.write(patch)?;
            }
            if whole.is_empty() { Ok(()) } else { stack.head.zero(whole, how) }
        })
        .await
    }
}

/// Fills up the blocks that a write covers in part and that the head does not have yet.
/// The caller holds their locks.
async fn patch(stack: &Stack, offset: u64, data: Bytes) -> Result<Patch, IoError> {
    let mut start = offset;
    let (mut before, mut after) = (Bytes::new(), Bytes::new());
    for (block, bytes) in partial_edges(offset, data.len() as u64) {
        let state = stack.head.layer.runs(block..block + 1)[0].1;
        if state == BlockState::Data {
            continue;
        }
        let at = block * BLOCK_BYTES;
        let old = stack.chain.read(at, BLOCK_BYTES_U32).await?;
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

const BLOCK_BYTES_U32: u32 = 4096;

impl Device for Session {
    fn size_bytes(&self) -> u64 {
        self.volume.size_bytes
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            check_range(self.volume.size_bytes, offset, length_bytes.into())?;
            self.volume.stack().chain.read(offset, length_bytes).await
        })
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.write_admitted(offset, data).await?;
            if fua { self.volume.flush().await } else { Ok(()) }
        })
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
            check_range(self.volume.size_bytes, offset, length_bytes)?;
            self.volume.stack().chain.extents(offset, length_bytes).await
        })
    }
}

/// A sealed layer with its chain, read-only.
pub(super) struct SealedDevice {
    pub(super) size_bytes: u64,
    pub(super) chain: Chain,
}

impl Device for SealedDevice {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            check_range(self.size_bytes, offset, length_bytes.into())?;
            self.chain.read(offset, length_bytes).await
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

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move {
            check_range(self.size_bytes, offset, length_bytes)?;
            self.chain.extents(offset, length_bytes).await
        })
    }
}
