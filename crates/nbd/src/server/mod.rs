//! The server: accepts connections, negotiates an export with each client, and runs its requests.
//!
//! ```text
//! accept -> negotiation (options, until GO) -> transmission (requests, at the same time) -> drained
//! ```
//!
//! A connection is always drained before it ends: when its socket is closed, none of its requests runs any
//! more. A proxy that reconnects relies on this (see [`perigee_block::sessions`]).

mod access;
mod command;
pub(crate) mod common_name;
mod contexts;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod negotiation;
mod tls;
mod transmission;
mod vm_socket;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use perigee_block::exports::Exports;
use perigee_block::sessions::SessionTable;
use perigee_block::stream::accept::{self, Accept};
use perigee_block::stream::socket::Socket;
use perigee_http::{ClientAddress, ConnectionPlace, Listen, Places};
use perigee_model::Problem;
use tokio::net::{TcpListener, UnixListener};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use super::wire::FramingError;
use access::{Access, Peer};
use negotiation::{Agreed, Negotiation, Outcome};
pub use tls::{ServerTls, TlsFiles};
use tls::{Shown, Tls};
pub use vm_socket::OneVm;

/// A client that has not chosen an export within this time is disconnected.
const NEGOTIATION_MAX: Duration = Duration::from_secs(30);
const CLIENTS_MAX_DEFAULT: usize = 4096;

/// The reason why a connection ended before its client ended it.
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
    #[error("the volume has another home now: its client finds it when it connects again")]
    Moved,
}

/// An address that is bound but not served yet.
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Only the server's own user and root may connect to a unix socket, unless somebody changes its permissions.
    /// Each VM has a socket of its own: [`Server::serve_vm`].
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
}

impl Accept for Listener {
    type Accepted = Socket;

    async fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => Socket::tcp(listener.accept().await?.0),
            Self::Unix(listener) => Socket::unix(listener.accept().await?.0),
        }
    }
}

async fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let listener = perigee_http::bind_unix(path).await?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// The options of the server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    pub tls: Option<ServerTls>,
    /// The file that says which exports a client over TCP may see; without it, all of them. See [`access`].
    pub access_list: Option<PathBuf>,
    /// Whether clients can list the exports that they may see.
    pub listing: bool,
    /// The most clients over TCP; further ones are disconnected. Clients on unix sockets have a separate limit
    /// of the same size, so that remote clients can't keep this host's VMs from their disks.
    pub clients_max: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { tls: None, access_list: None, listing: true, clients_max: CLIENTS_MAX_DEFAULT }
    }
}

struct Shared {
    exports: Arc<dyn Exports>,
    sessions: SessionTable,
    tls: Option<Tls>,
    access: Access,
    local: Places,
    remote: Places,
    negotiation_max: Duration,
}

impl Shared {
    fn place(&self, socket: &Socket) -> Result<ConnectionPlace, String> {
        match socket {
            Socket::Unix(_) => self.local.take(ClientAddress(None)),
            Socket::Tcp(_) => self.remote.take(ClientAddress(socket.address())),
        }
    }
}

/// Serves exports over NBD, on any number of listeners.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

impl Server {
    /// # Errors
    /// When a file that the options name can't be used.
    pub fn new(exports: Arc<dyn Exports>, options: ServerOptions) -> Result<Self, Problem> {
        let access = Access { listing: options.listing, list: options.access_list };
        access.view(&Peer::default())?;
        let tls = options.tls.as_ref().map(Tls::load).transpose()?;
        let places = || Places::shared(options.clients_max);
        Ok(Self(Arc::new(Shared {
            exports,
            sessions: SessionTable::default(),
            tls,
            access,
            local: places(),
            remote: places(),
            negotiation_max: NEGOTIATION_MAX,
        })))
    }

    /// The time until a client has chosen its export; for tests. Panics once the server serves.
    #[cfg(test)]
    pub fn set_negotiation_max(&mut self, max: Duration) {
        Arc::get_mut(&mut self.0).expect("it does not serve yet").negotiation_max = max;
    }

    /// Serves until `stop`; returns when every connection is drained.
    pub async fn serve(self, listeners: Vec<Listener>, stop: CancellationToken) {
        let (shared, token) = (self.0, stop.clone());
        let admit = move |socket: Socket| {
            let place = match shared.place(&socket) {
                Ok(place) => place,
                Err(why) => {
                    tracing::warn!(client = socket.peer(), why, "an NBD client was disconnected");
                    return None;
                }
            };
            let connection = connection(socket, shared.clone(), None, token.child_token());
            Some(async move {
                connection.await;
                drop(place);
            })
        };
        accept::serve("NBD", listeners, admit, stop).await;
    }
}

/// `vm` is the VM whose socket it is, if it is one's.
async fn connection(
    socket: Socket,
    shared: Arc<Shared>,
    vm: Option<Arc<OneVm>>,
    stop: CancellationToken,
) {
    let negotiated = tokio::select! {
        () = stop.cancelled() => return,
        ended = tokio::time::timeout(shared.negotiation_max, negotiate(socket, &shared, vm, &stop)) => ended,
    };
    let ended = match negotiated {
        Ok(Ok(Some((stream, agreed)))) => {
            let end = agreed.end.clone();
            let disk_has_gone = async {
                match &end {
                    Some(end) => end.cancelled().await,
                    None => std::future::pending().await,
                }
            };
            let mut run = std::pin::pin!(run(stream, agreed, stop.clone()));
            tokio::select! {
                ended = &mut run => ended,
                () = disk_has_gone => {
                    stop.cancel();
                    run.await
                }
            }
        }
        Ok(Ok(None)) => Ok(()),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            Err(ConnectionError::Refused("the client did not choose an export in time".into()))
        }
    };
    if let Err(error) = ended {
        tracing::info!(%error, "an NBD connection was closed because of an error");
    }
}

/// The transmission.
async fn run(
    stream: Stream,
    agreed: Agreed,
    stop: CancellationToken,
) -> Result<(), ConnectionError> {
    let (stream, client) = match stream {
        Stream::Plain(socket) => return transmission::run(socket, agreed, stop).await,
        Stream::Encrypted(stream, None) => return transmission::run(*stream, agreed, stop).await,
        Stream::Encrypted(stream, Some(client)) => (stream, client),
    };
    let admission = agreed.admission.clone();
    let let_out = async {
        match &admission {
            Some(admission) => admission.ended().await,
            None => std::future::pending().await,
        }
    };
    let mut run = std::pin::pin!(transmission::run(*stream, agreed, stop.clone()));
    tokio::select! {
        ended = &mut run => ended,
        () = let_out => {
            tracing::info!("an NBD connection ends: its host may open the volume no more");
            stop.cancel();
            run.await
        }
        () = client.until_revoked() => {
            tracing::warn!("an NBD connection ends: its client's certificate is revoked");
            stop.cancel();
            run.await
        }
    }
}

enum Stream {
    Plain(Socket),
    /// With the client's certificate, if it is one of the cluster.
    Encrypted(Box<TlsStream<Socket>>, Option<Shown>),
}

/// `None` when the client went away or gave up.
async fn negotiate(
    mut socket: Socket,
    shared: &Shared,
    vm: Option<Arc<OneVm>>,
    stop: &CancellationToken,
) -> Result<Option<(Stream, Agreed)>, ConnectionError> {
    let is_own = socket.is_own() && vm.is_none();
    let local = is_own || vm.is_some();
    let (address, ip) = (socket.peer(), socket.address());
    let peer = Peer { local, is_own, vm, address, ip, ..Peer::default() };
    let mut negotiation = Negotiation::new(shared, peer, stop.clone());
    if !negotiation.greet(&mut socket).await? {
        return Ok(None);
    }
    let tls = match (negotiation.options(&mut socket).await?, &shared.tls) {
        (Outcome::Agreed(agreed), _) => return Ok(Some((Stream::Plain(socket), *agreed))),
        (Outcome::StartTls, Some(tls)) => tls,
        (Outcome::StartTls, None) | (Outcome::End, _) => return Ok(None),
    };
    let (mut stream, shown) = tls.accept(socket).await?;
    let mut negotiation =
        negotiation.encrypted(tls::common_name(&stream), shown.as_ref().and_then(Shown::host));
    match negotiation.options(&mut stream).await? {
        Outcome::Agreed(agreed) => Ok(Some((Stream::Encrypted(Box::new(stream), shown), *agreed))),
        Outcome::StartTls | Outcome::End => Ok(None),
    }
}
