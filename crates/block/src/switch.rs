//! The device of a session, which can be changed while the session is open.
//!
//! ```text
//! open --hold--> held: new requests wait, those in flight go on
//!   ^              |-- all in flight have ended: [`Held::change`] --> open, with the new device
//!   '--------------'-- not in time, or dropped: open, with the old device
//! ```
//!
//! A request is answered by the device that it began on. There are two exceptions. For a device whose
//! other host is away, requests can be recalled ([`Held::recall`]): then they fail there, and are asked
//! of the new device, as they would be sent again over a new connection. And a volume that has another
//! home now fails them ([`IoError::Moved`]), and they are asked of the new device as well.
//!
//! What an open switch costs a request: two atomic operations on a cache line that only the session
//! uses, and two more where the request has to wait for something. There is no allocation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use futures_util::future::BoxFuture;
use perigee_model::{Incarnation, LayerId};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::device::{Device, IoError};

/// The present device of one session, and the requests that are in flight at it.
pub struct Switch {
    state: RwLock<State>,
    /// Told when the switch is open again.
    opened: Notify,
}

struct State {
    current: Arc<Current>,
    held: bool,
    /// Nobody waits for answers any more.
    hung_up: bool,
    /// The present device is the last one.
    ended: bool,
}

/// A device between two changes. Each request that waits for something has one.
struct Current {
    device: Arc<dyn Device>,
    recalled: AtomicBool,
    /// Cancelled when the last request is gone.
    drained: CancellationToken,
    _guard: DropGuard,
}

impl Current {
    fn new(device: Arc<dyn Device>) -> Arc<Self> {
        let drained = CancellationToken::new();
        let (recalled, _guard) = (AtomicBool::new(false), drained.clone().drop_guard());
        Arc::new(Self { device, recalled, drained, _guard })
    }
}

impl Switch {
    /// An open switch with this device.
    pub fn new(device: Arc<dyn Device>) -> Arc<Self> {
        let current = Current::new(device);
        let state = State { current, held: false, hung_up: false, ended: false };
        Arc::new(Self { state: RwLock::new(state), opened: Notify::new() })
    }

    /// The state is whole even after a panic: a device that panics at once changes nothing here.
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Device::size_bytes`] of the present device.
    pub fn size_bytes(&self) -> u64 {
        self.read().current.device.size_bytes()
    }

    /// [`Device::layer`] of the present device.
    pub fn layer(&self) -> Option<LayerId> {
        self.read().current.device.layer()
    }

    /// [`Device::incarnation`] of the present device.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.read().current.device.incarnation()
    }

    /// The device of this moment, for what a change need not wait for.
    pub fn present(&self) -> Arc<dyn Device> {
        Arc::clone(&self.read().current.device)
    }

    /// [`Device::hang_up`] for the present device, and for each one that a change brings later.
    pub fn hang_up(&self) {
        let mut state = self.write();
        state.hung_up = true;
        state.current.device.hang_up();
    }

    /// Gives it its last device. No change brings another one, not even one that is under way. What is in flight ends
    /// at the device that it began on.
    pub fn end(&self, device: Arc<dyn Device>) {
        let mut state = self.write();
        state.ended = true;
        let old = std::mem::replace(&mut state.current, Current::new(device));
        drop(state);
        drop(old);
    }

    /// Does what waits for nothing. `None` while the switch is held, too.
    pub fn at_once<T>(&self, work: impl FnOnce(&dyn Device) -> Option<T>) -> Option<T> {
        let state = self.read();
        if state.held { None } else { work(&*state.current.device) }
    }

    /// Does what may wait. While the switch is held it waits for that first.
    ///
    /// # Errors
    /// What the device says.
    pub async fn run<T>(
        &self,
        work: impl for<'a> Fn(&'a dyn Device) -> BoxFuture<'a, Result<T, IoError>>,
    ) -> Result<T, IoError> {
        loop {
            let current = self.enter().await;
            let result = work(&*current.device).await;
            let again = match &result {
                Err(IoError::Unreachable(_)) => current.recalled.load(Ordering::SeqCst),
                Err(IoError::Moved) => !self.is_present(&current),
                _ => false,
            };
            if !again {
                return result;
            }
        }
    }

    /// Whether new requests go to this device, and none is about to take its place.
    fn is_present(&self, current: &Current) -> bool {
        let state = self.read();
        !state.held && Arc::ptr_eq(&state.current.device, &current.device)
    }

    /// Whether nobody waits for answers any more.
    pub fn is_hung_up(&self) -> bool {
        self.read().hung_up
    }

    async fn enter(&self) -> Arc<Current> {
        loop {
            if let Some(current) = self.entered() {
                return current;
            }
            // From here on it hears of an opening.
            let opened = self.opened.notified();
            if let Some(current) = self.entered() {
                return current;
            }
            opened.await;
        }
    }

    fn entered(&self) -> Option<Arc<Current>> {
        let state = self.read();
        (!state.held).then(|| Arc::clone(&state.current))
    }

    /// Holds new requests. `None` when somebody else holds them, and when it has its last device.
    pub fn hold(self: &Arc<Self>) -> Option<Held> {
        let mut state = self.write();
        if state.ended || std::mem::replace(&mut state.held, true) {
            return None;
        }
        // From now on only requests keep the old one.
        let renewed = Current::new(Arc::clone(&state.current.device));
        let old = std::mem::replace(&mut state.current, renewed);
        let (drained, in_flight) = (old.drained.clone(), Arc::downgrade(&old));
        Some(Held { switch: Arc::clone(self), drained, in_flight })
    }
}

/// A switch whose new requests are held. Dropped, it opens with the device that it had.
pub struct Held {
    switch: Arc<Switch>,
    /// Cancelled when nothing is in flight any more.
    drained: CancellationToken,
    /// What was in flight, as long as some of it is.
    in_flight: Weak<Current>,
}

impl Held {
    /// Whether everything in flight has ended by then.
    pub async fn drained_until(&self, deadline: Instant) -> bool {
        tokio::time::timeout_at(deadline, self.drained.cancelled()).await.is_ok()
    }

    /// Opens with another device, unless it got its last one meanwhile. Everything in flight has ended, or fails with
    /// [`IoError::Moved`] and is asked of the new device.
    pub fn change(mut self, device: Arc<dyn Device>) {
        self.in_flight = Weak::new();
        let mut state = self.switch.write();
        if state.hung_up {
            device.hang_up();
        }
        let new = Current::new(device);
        let unused = if state.ended { new } else { std::mem::replace(&mut state.current, new) };
        drop(state);
        drop(unused);
    }

    /// Opens with another device, which is asked everything again that was in flight: because of
    /// `give_up` it fails at the old one, as [`IoError::Unreachable`].
    pub fn recall(self, give_up: impl FnOnce(), device: Arc<dyn Device>) {
        if let Some(old) = self.in_flight.upgrade() {
            old.recalled.store(true, Ordering::SeqCst);
        }
        give_up();
        self.change(device);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.switch.write();
        state.held = false;
        let unused = match self.in_flight.upgrade() {
            // It is still in flight, and the next change has to wait for it too.
            Some(old) if !state.ended => Some(std::mem::replace(&mut state.current, old)),
            old => old,
        };
        drop(state);
        drop(unused);
        self.switch.opened.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
