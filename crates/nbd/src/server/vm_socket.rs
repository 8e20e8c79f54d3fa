//! The socket of one VM: it serves the VM's exports to processes of the VM's user, and nothing else.
//!
//! The exports change while the VM runs: a disk comes or goes. Sessions of those that stay go on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use perigee_block::locking::lock;
use perigee_block::stream::accept;
use perigee_block::stream::socket::Socket;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use super::{Listener, Server, connection};

/// A VM connects once for each disk. A connection that it has lost may not have ended here when the next one comes.
const CONNECTIONS_PER_EXPORT: usize = 4;

/// What one VM may have.
#[derive(Debug)]
pub struct OneVm {
    /// The user of its QEMU.
    pub uid: u32,
    /// Its exports, each `VOLUME@EPOCH`, and what ends the sessions of each.
    exports: Mutex<BTreeMap<String, CancellationToken>>,
    connections: Places,
}

impl OneVm {
    /// `uid` is the user of the VM's QEMU: nobody else's process is served. `exports` are what it may open now.
    #[must_use]
    pub fn new(uid: u32, exports: &[String]) -> Self {
        let exports = exports.iter().map(|name| (name.clone(), CancellationToken::new())).collect();
        Self { uid, exports: Mutex::new(exports), connections: Places::default() }
    }

    /// How many connections it has.
    pub fn connections(&self) -> usize {
        self.connections.0.load(Ordering::Relaxed)
    }

    /// From now on it has these. The sessions of those that it has no more end.
    pub fn change(&self, exports: &[String]) {
        let wanted: BTreeSet<&String> = exports.iter().collect();
        let mut has = lock(&self.exports);
        has.retain(|name, stop| {
            let stays = wanted.contains(name);
            if !stays {
                stop.cancel();
            }
            stays
        });
        for name in wanted {
            has.entry(name.clone()).or_default();
        }
    }

    /// Whether the VM may open this export now.
    pub fn has(&self, export: &str) -> bool {
        lock(&self.exports).contains_key(export)
    }

    /// What ends the sessions of an export: at once if it is not the VM's any more.
    pub fn end_of(&self, export: &str) -> CancellationToken {
        let end = lock(&self.exports).get(export).cloned();
        end.unwrap_or_else(|| {
            let ended = CancellationToken::new();
            ended.cancel();
            ended
        })
    }

    /// The exports, for an error.
    pub fn names(&self) -> String {
        lock(&self.exports).keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    fn connections_max(&self) -> usize {
        (lock(&self.exports).len() + 1) * CONNECTIONS_PER_EXPORT
    }
}

/// How many connections there are.
#[derive(Debug, Clone, Default)]
struct Places(Arc<AtomicUsize>);

/// One connection.
struct Place(Places);

impl Places {
    fn take(&self, max: usize) -> Option<Place> {
        let place = Place(self.clone());
        (self.0.fetch_add(1, Ordering::Relaxed) < max).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    /// Serves a VM's own socket until `stop`; returns when every connection is drained.
    pub async fn serve_vm(self, listener: UnixListener, vm: Arc<OneVm>, stop: CancellationToken) {
        let (shared, token) = (self.0, stop.clone());
        let places = vm.connections.clone();
        let admit = move |socket: Socket| {
            if socket.peer_uid() != Some(vm.uid) {
                let (uid, peer) = (vm.uid, socket.peer_uid());
                tracing::warn!(uid, ?peer, "another user connected to a VM's socket; disconnected");
                return None;
            }
            let Some(place) = places.take(vm.connections_max()) else {
                tracing::warn!(uid = vm.uid, "a VM has too many NBD connections; disconnected");
                return None;
            };
            let connection =
                connection(socket, shared.clone(), Some(vm.clone()), token.child_token());
            Some(async move {
                connection.await;
                drop(place);
            })
        };
        accept::serve("NBD", vec![Listener::Unix(listener)], admit, stop).await;
    }
}
