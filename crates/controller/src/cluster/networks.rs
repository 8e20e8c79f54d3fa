//! What all parts of the controller share of the networks of tenants.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// What the controller remembers of networks beside the records.
#[derive(Default)]
pub struct Networks {
    /// Whoever makes or deletes networks, or gives addresses, takes turns.
    turn: tokio::sync::Mutex<()>,
    /// A VM is elsewhere, or a network has changed.
    changed: Notify,
    /// Why there can be no more networks, since that was last tried. None was removed since then.
    full: Mutex<Option<String>>,
    /// Networks that count and have no records, so that a test of their limit need not make them.
    #[cfg(test)]
    pub counted: std::sync::atomic::AtomicUsize,
}

impl Networks {
    /// Waits for the turn of the caller, who gives addresses.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Waits until something has changed.
    pub async fn until_changed(&self) {
        self.changed.notified().await;
    }

    /// Has the hosts told soon what has changed.
    pub fn changed(&self) {
        self.changed.notify_one();
    }

    /// Why there can be no more networks.
    pub fn full(&self) -> MutexGuard<'_, Option<String>> {
        self.full.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A network was removed. The caller has its turn.
    pub fn removed(&self) {
        self.full().take();
        self.changed();
    }
}
