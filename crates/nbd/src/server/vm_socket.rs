//! The socket of one VM: it serves the VM's exports to processes of the VM's user, and nothing else.

use std::collections::BTreeSet;
use std::sync::Arc;

use perigee_block::stream::accept;
use perigee_block::stream::socket::Socket;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::{Listener, Server, connection};

/// A VM connects once for each disk. A connection that it has lost may not have ended here when the next one comes.
const CONNECTIONS_PER_EXPORT: usize = 4;

/// What one VM may have.
#[derive(Debug, PartialEq, Eq)]
pub struct OneVm {
    /// The user of its QEMU.
    pub uid: u32,
    /// Its exports, each `VOLUME@EPOCH`.
    pub exports: BTreeSet<String>,
}

impl OneVm {
    /// The exports, for an error.
    pub fn names(&self) -> String {
        self.exports.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
    }
}

impl Server {
    /// Serves a VM's own socket until `stop`; returns when every connection is drained.
    pub async fn serve_vm(self, listener: UnixListener, vm: OneVm, stop: CancellationToken) {
        let permits = Arc::new(Semaphore::new((vm.exports.len() + 1) * CONNECTIONS_PER_EXPORT));
        let (shared, vm, token) = (self.0, Arc::new(vm), stop.clone());
        let admit = move |socket: Socket| {
            if socket.peer_uid() != Some(vm.uid) {
                let (uid, peer) = (vm.uid, socket.peer_uid());
                tracing::warn!(uid, ?peer, "another user connected to a VM's socket; disconnected");
                return None;
            }
            let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
                tracing::warn!(uid = vm.uid, "a VM has too many NBD connections; disconnected");
                return None;
            };
            let connection =
                connection(socket, shared.clone(), Some(vm.clone()), token.child_token());
            Some(async move {
                connection.await;
                drop(permit);
            })
        };
        accept::serve("NBD", vec![Listener::Unix(listener)], admit, stop).await;
    }
}
