//! A volume: a head over a chain of layers, and the epoch that may write.
//!
//! Every write and zero passes a gate. It holds the gate's read side from the comparison of the session's
//! epoch with the volume's until its bytes are written. Raising the epoch and sealing the head take the
//! write side, so they wait for writes in flight, and no later write has the old epoch or goes to the old
//! head. The guards are moved into the blocking call that does the work, so a write stays guarded even if
//! its client disconnects.

pub(crate) mod leases;
pub(crate) mod session;
pub(crate) mod visible_checksums;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};
use std::time::Instant;

use perigee_block::device::{Device, IoError};
use perigee_block::lease::{HostTag, Lease, NO_HOST};
use perigee_block::locking::{lock, read, write};
use perigee_model::switchover::EpochRefused;
use perigee_model::volume::{BLOCK_BYTES, EpochChange, EpochIssued};
use perigee_model::{Epoch, Incarnation, Problem, VolumeName};
use tokio::sync::OwnedRwLockWriteGuard;

use crate::blocking::blocking;
use crate::catalog::Catalog;
use crate::layers::chain::{Chain, Sealed};
use crate::layers::head::Head;
use crate::volume::session::Session;

/// What is done with a volume that should leave although a flush of it has failed, so that its last writes may be lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unflushed {
    /// It stays.
    Refused,
    /// It leaves, because another state of it is the volume already.
    Kept,
}

impl Unflushed {
    /// Refuses to let the volume leave if this result of a flush requires that.
    fn check(self, what: &str, flushed: Result<(), IoError>) -> Result<(), Problem> {
        match (self, flushed) {
            (_, Ok(())) => Ok(()),
            (Self::Kept, Err(error)) => {
                tracing::warn!("{what}: it could not be flushed: {error}");
                Ok(())
            }
            (Self::Refused, Err(error)) => Err(io_problem(what, &error)),
        }
    }
}

/// The layers of a volume at one moment. A snapshot replaces the whole stack.
#[derive(Clone)]
pub(crate) struct Stack {
    pub(crate) head: Arc<Head>,
    /// The chain below the head, shared by all volumes over the same layer.
    pub(crate) below: Arc<Sealed>,
}

impl Stack {
    /// The volume's size.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.head.layer.blocks() * BLOCK_BYTES
    }

    pub(crate) fn chain(&self) -> Chain<'_> {
        Chain { head: Some(&self.head.layer), below: &self.below }
    }
}

/// A volume whose head is in this pool.
pub struct Volume {
    name: VolumeName,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) lease: Lease,
    pub(crate) gate: Arc<tokio::sync::RwLock<()>>,
    /// Changed only while the gate's write side is held.
    epoch: AtomicU64,
    /// Set once, while the gate's write side is held.
    deleted: AtomicBool,
    /// It has another home now, or may have. Changed only while the gate's write side is held.
    gone: AtomicBool,
    stack: RwLock<Stack>,
    sessions: AtomicU64,
    /// When a session last ended, or when the volume was opened if none has ended yet.
    last_used: Mutex<Instant>,
}

impl Volume {
    pub(crate) fn new(
        name: VolumeName,
        epoch: Epoch,
        stack: Stack,
        catalog: Arc<Catalog>,
        lease: Lease,
    ) -> Self {
        Self {
            name,
            catalog,
            lease,
            gate: Arc::default(),
            epoch: AtomicU64::new(epoch.0),
            deleted: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            stack: RwLock::new(stack),
            sessions: AtomicU64::new(0),
            last_used: Mutex::new(Instant::now()),
        }
    }

    /// The volume's name.
    pub fn name(&self) -> &VolumeName {
        &self.name
    }

    /// The current size.
    pub fn size_bytes(&self) -> u64 {
        self.stack_ref().size_bytes()
    }

    /// The epoch whose sessions may write now.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::SeqCst))
    }

    /// A session with a writer epoch; `None` means the volume's current epoch.
    pub fn session(self: &Arc<Self>, epoch: Option<Epoch>) -> Arc<dyn Device> {
        self.session_of(NO_HOST, epoch)
    }

    /// As [`Self::session`], of another host's server.
    pub(crate) fn session_of(
        self: &Arc<Self>,
        host: HostTag,
        epoch: Option<Epoch>,
    ) -> Arc<dyn Device> {
        self.sessions.fetch_add(1, Ordering::SeqCst);
        Arc::new(Session::new(Arc::clone(self), epoch.unwrap_or_else(|| self.epoch()), host))
    }

    pub(crate) fn session_ended(&self) {
        *lock(&self.last_used) = Instant::now();
        self.sessions.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn last_used(&self) -> Instant {
        *lock(&self.last_used)
    }

    /// Whether a session with this epoch may write. The caller holds the gate's read side, so the answer
    /// stays right until it releases it.
    pub(crate) fn check_writer(&self, session: Epoch) -> Result<(), IoError> {
        self.check_here()?;
        let volume = self.epoch();
        if session != volume {
            return Err(IoError::Fenced { session, volume });
        }
        self.check_there()
    }

    /// # Errors
    /// When the volume was deleted, or has another home now.
    pub(crate) fn check_there(&self) -> Result<(), IoError> {
        self.check_here()?;
        if self.deleted.load(Ordering::SeqCst) {
            return Err(IoError::Invalid(format!("volume {} was deleted", self.name)));
        }
        Ok(())
    }

    /// # Errors
    /// When the volume has another home now.
    pub(crate) fn check_here(&self) -> Result<(), IoError> {
        if self.gone.load(Ordering::SeqCst) { Err(IoError::Moved) } else { Ok(()) }
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        self.epoch().incarnation()
    }

    pub(crate) fn open_sessions(&self) -> u64 {
        self.sessions.load(Ordering::SeqCst)
    }

    pub(crate) fn stack(&self) -> Stack {
        self.stack_ref().clone()
    }

    /// The lock must be held only for requests that do not wait.
    pub(crate) fn stack_ref(&self) -> RwLockReadGuard<'_, Stack> {
        read(&self.stack)
    }

    /// # Errors
    /// When the catalog can't be written.
    pub async fn issue_epoch(self: &Arc<Self>) -> Result<EpochIssued, Problem> {
        let gate = Arc::clone(&self.gate).read_owned().await;
        let volume = Arc::clone(self);
        blocking(move || {
            let _gate = gate;
            let what = format!("can't issue an epoch of volume {}", volume.name);
            volume.check_here().map_err(|error| io_problem(&what, &error))?;
            match volume.catalog.issue_epoch(&volume.name) {
                Ok(Some(epoch)) => Ok(EpochIssued { epoch }),
                Ok(None) => {
                    let why = format!("all {} epochs of it were issued", Epoch::COUNT_MAX);
                    Err(Problem::conflict(what, why).next("clone the volume and use the clone"))
                }
                Err(error) => Err(Problem::internal(what, error)),
            }
        })
        .await
    }

    /// Changes the epoch by the rules of [`EpochChange`]. When it returns, no write with the old epoch is in
    /// flight.
    ///
    /// # Errors
    /// A conflict unless the volume's epoch is `from` or `to`, and `to` was issued and not returned.
    pub async fn change_epoch(self: &Arc<Self>, change: EpochChange) -> Result<(), Problem> {
        let gate = Arc::clone(&self.gate).write_owned().await;
        let volume = Arc::clone(self);
        blocking(move || {
            let _gate = gate;
            let what = format!("can't change the epoch of volume {} to {}", volume.name, change.to);
            volume.check_here().map_err(|error| io_problem(&what, &error))?;
            match volume.catalog.change_epoch(&volume.name, change) {
                Ok(Ok(())) => {
                    volume.epoch.store(change.to.0, Ordering::SeqCst);
                    Ok(())
                }
                Ok(Err(refused)) => {
                    let problem = Problem::conflict(what, refused);
                    Err(match refused {
                        EpochRefused::NotIssued { .. } => problem.next("issue the epoch first"),
                        EpochRefused::NotFrom { .. } | EpochRefused::Returned => problem,
                    })
                }
                Err(error) => Err(Problem::internal(what, error)),
            }
        })
        .await
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.stack().head.poisoned().is_some()
    }

    /// When this succeeds, every write that returned before the call is durable.
    ///
    /// # Errors
    /// [`IoError::Poisoned`] when a sync failed, now or before.
    pub async fn flush(self: &Arc<Self>) -> Result<(), IoError> {
        // If a snapshot replaces the head in the meantime, it flushes it.
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

    /// Records the poisoning, so that a restarted server also refuses writes. If the catalog can't be
    /// written, the volume is still read-only in this process.
    fn record_poison(&self, head: &Head) {
        let Some(why) = head.poisoned() else { return };
        if let Err(error) = self.catalog.poison(head.layer.id, why) {
            tracing::error!(volume = %self.name, %error, "can't record that a flush failed");
        }
    }

    /// Flushes, waits for writes in flight, flushes again, and lets `replace` return other layers while
    /// nothing writes. `None` keeps the current layers. So clients wait only for the second, short flush and
    /// for `replace`.
    pub(crate) async fn replace_stack<T: Send + 'static>(
        self: &Arc<Self>,
        what: &str,
        replace: impl FnOnce(&Stack) -> Result<(Option<Stack>, T), Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let still = self.stand_still(what).await?;
        self.replace_still_stack(what, still, replace).await
    }

    /// No write begins while the guard is held, and none is in flight. Whoever holds several of these takes no other lock after the first, and is the only
    /// one who does: the pool's lock `changes` sees to that.
    pub(crate) async fn stand_still(
        self: &Arc<Self>,
        what: &str,
    ) -> Result<OwnedRwLockWriteGuard<()>, Problem> {
        self.flush().await.map_err(|error| io_problem(what, &error))?;
        Ok(Arc::clone(&self.gate).write_owned().await)
    }

    /// As [`Self::replace_stack`], of a volume that stands still.
    pub(crate) async fn replace_still_stack<T: Send + 'static>(
        self: &Arc<Self>,
        what: &str,
        gate: OwnedRwLockWriteGuard<()>,
        replace: impl FnOnce(&Stack) -> Result<(Option<Stack>, T), Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let (volume, what) = (Arc::clone(self), what.to_owned());
        blocking(move || {
            let _gate = gate;
            volume.check_here().map_err(|error| io_problem(&what, &error))?;
            let stack = volume.stack();
            stack.head.flush_now().map_err(|error| {
                volume.record_poison(&stack.head);
                io_problem(&what, &error)
            })?;
            let (new, result) = replace(&stack)?;
            if let Some(new) = new {
                *write(&volume.stack) = new;
            }
            Ok(result)
        })
        .await
    }

    /// Replaces the layers below the head by others with the same content. The caller holds the pool's lock
    /// `changes`.
    pub(crate) fn replace_below(&self, below: Arc<Sealed>) {
        write(&self.stack).below = below;
    }

    /// As [`Self::replace_stack`], for a volume that gets another home: when `depart` succeeds, nothing is
    /// read or written here any more. `depart` says whether that may be so when it fails.
    pub(crate) async fn leave(
        self: &Arc<Self>,
        what: &str,
        unflushed: Unflushed,
        depart: impl FnOnce(&Stack) -> Result<(), (Problem, bool)> + Send + 'static,
    ) -> Result<(), Problem> {
        unflushed.check(what, self.flush().await)?;
        let gate = Arc::clone(&self.gate).write_owned().await;
        let (volume, what) = (Arc::clone(self), what.to_owned());
        blocking(move || {
            let _gate = gate;
            volume.check_here().map_err(|error| io_problem(&what, &error))?;
            if !volume.lease.allows(NO_HOST) {
                let why = "another host has begun to keep blocks of it in memory";
                return Err(Problem::unavailable(what, why).next("ask again: the host is told"));
            }
            let stack = volume.stack();
            let flushed = stack.head.flush_now();
            if flushed.is_err() {
                volume.record_poison(&stack.head);
            }
            unflushed.check(&what, flushed)?;
            let (left, gone) = match depart(&stack) {
                Ok(()) => (Ok(()), true),
                Err((problem, gone)) => (Err(problem), gone),
            };
            volume.gone.store(gone, Ordering::SeqCst);
            left
        })
        .await
    }

    /// Runs `forget` while nothing writes and no session is open. No write succeeds afterwards.
    pub(crate) async fn delete_with(
        self: &Arc<Self>,
        forget: impl FnOnce() -> Result<(), Problem> + Send + 'static,
    ) -> Result<(), Problem> {
        let gate = Arc::clone(&self.gate).write_owned().await;
        let volume = Arc::clone(self);
        blocking(move || {
            let _gate = gate;
            let what = format!("can't delete volume {}", volume.name);
            volume.check_here().map_err(|error| io_problem(&what, &error))?;
            let open = volume.open_sessions();
            if open > 0 {
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

/// Converts an I/O error for the control API.
pub fn io_problem(what: &str, error: &IoError) -> Problem {
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
        IoError::Moved => {
            Problem::conflict(what, error).next("look where the volume is, and ask that host")
        }
        IoError::Io(_) => Problem::internal(what, error),
    }
}
