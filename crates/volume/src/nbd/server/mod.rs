//! The server: accepts connections, lets each pick an export, runs its requests.
//!
//! ```text
//! accept -> negotiation (options, until GO) -> transmission (requests, at the same time) -> drained
//! ```
//!
//! A connection always ends drained: when its socket is closed, no request of it runs any more. A
//! proxy that comes back after a lost connection relies on this (see `sessions`).

mod command;
mod negotiation;
mod sessions;
mod transmission;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use perigee_http::Listen;
use perigee_model::Problem;
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::socket::Socket;
use super::wire::FramingError;
use crate::device::Device;
use crate::stats::Counters;
use sessions::SessionTable;

/// A client that has not picked an export by then is dropped.
const NEGOTIATION_MAX: Duration = Duration::from_secs(60);
/// After a failed accept (out of file descriptors) the listener waits this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What one connection works on.
pub struct Export {
    pub device: Arc<dyn Device>,
    pub read_only: bool,
    /// Where its requests are counted.
    pub counters: Arc<Counters>,
}

/// Who wants to open an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    Client,
    /// Another host's server on behalf of its client. It gets only what is here: proxying once
    /// more could go round in a circle.
    Proxy,
}

/// Finds exports by name.
pub trait Exports: Send + Sync + 'static {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>>;

    /// # Errors
    /// `NotFound` when there is no such export; anything else is why it can't be opened now.
    fn open<'a>(&'a self, name: &'a str, opener: Opener) -> BoxFuture<'a, Result<Export, Problem>>;
}

/// Why a connection ended before its client ended it.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("not NBD: {0}")]
    Framing(#[from] FramingError),
    #[error("{0}")]
    Refused(String),
    #[error("{0} panicked")]
    Panicked(String),
}

/// An address that is bound but not served yet.
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// A unix socket is for everybody who can reach it: the directory it is in guards it, because
    /// an unprivileged QEMU connects.
    ///
    /// # Errors
    /// `Conflict` when the address can't be bound.
    pub async fn bind(address: &Listen) -> Result<Self, Problem> {
        let bound = match address {
            Listen::Tcp(address) => TcpListener::bind(address).await.map(Self::Tcp),
            Listen::Unix(path) => bind_unix(path).await.map(Self::Unix),
        };
        bound.map_err(|e| perigee_http::cannot_listen("NBD on", address, &e))
    }

    async fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => Socket::tcp(listener.accept().await?.0),
            Self::Unix(listener) => Ok(Socket::Unix(listener.accept().await?.0)),
        }
    }
}

async fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let listener = perigee_http::bind_unix(path).await?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

struct Shared {
    exports: Arc<dyn Exports>,
    sessions: SessionTable,
}

/// Serves until `stop`; returns when every connection is drained.
pub async fn serve(exports: Arc<dyn Exports>, listeners: Vec<Listener>, stop: CancellationToken) {
    let shared = Arc::new(Shared { exports, sessions: SessionTable::default() });
    let mut accepting = JoinSet::new();
    for listener in listeners {
        accepting.spawn(accept(listener, shared.clone(), stop.clone()));
    }
    while let Some(ended) = accepting.join_next().await {
        if let Err(error) = ended {
            tracing::error!(%error, "an NBD listener ended");
        }
    }
}

async fn accept(listener: Listener, shared: Arc<Shared>, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "an NBD connection's task failed");
                }
            }
            accepted = listener.accept() => match accepted {
                Ok(socket) => {
                    connections.spawn(connection(socket, shared.clone(), stop.child_token()));
                }
                Err(error) => {
                    tracing::warn!(%error, "NBD accept");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn connection(socket: Socket, shared: Arc<Shared>, stop: CancellationToken) {
    let mut stream = socket;
    let mut negotiation = negotiation::Negotiation::new(&shared, stop.clone());
    let negotiated = tokio::select! {
        () = stop.cancelled() => return,
        ended = tokio::time::timeout(NEGOTIATION_MAX, negotiation.run(&mut stream)) => ended,
    };
    let ended = match negotiated {
        Ok(Ok(Some(agreed))) => transmission::run(stream, agreed, stop).await,
        Ok(Ok(None)) => Ok(()),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ConnectionError::Refused("no export was picked in time".into())),
    };
    if let Err(error) = ended {
        tracing::info!(%error, "NBD connection dropped");
    }
}
