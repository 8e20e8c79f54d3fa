//! An iSCSI target (RFC 7143, error recovery level 0) for [`perigee_block::device::Device`]s.
//!
//! ```text
//! accept -> login (name, CHAP, keys) -> full feature phase (concurrent commands) -> drained
//! ```
//!
//! | question | module |
//! |---|---|
//! | the format of PDUs | `pdu` |
//! | which keys are negotiated, and how | `text` |
//! | which initiator may use which target, and how it authenticates | `access`, `chap` |
//! | how does a session begin | `login`, `session` |
//! | which commands are answered at once, and which wait | `batch`, `transfer`, `tasks`, `connection` |
//! | pings, task management, discovery, logout | `requests` |
//! | what do the sessions of a volume share | `unit` |
//! | what does a command mean, and what does it do | `scsi`, `execute` |
//! | Which iSCSI messages may an initiator send, and how does a session begin? | `lib.rs`, `login.rs` |
//! | Which initiator may use which target, and how does it authenticate? | `access.rs`, `volume/src/iscsi_clients.rs`, `chap.rs` |
//! | What does a SCSI command mean, and what does it do? | `scsi/`, `execute.rs` |
//! | What do the sessions of one volume share, and which part of it survives a restart? | `unit.rs`, `scsi/reservations.rs` |
//!
//! A target is a volume: `iqn.2026-11.org.perigee:VOLUME`, with one unit, number 0. A session has one
//! connection (MaxConnections is 1); a volume can have any number of sessions. A write is answered when
//! it survives a kill of this server; a flush or FUA makes it durable (WCE is set). ORDERED commands run
//! like SIMPLE ones: an initiator that needs an order waits for the answer.
//!
//! A session is always drained before it ends: when its socket is closed, none of its tasks runs any more.
//! Only then can another session with the same name and ISID begin.

pub mod access;
mod answers;
mod batch;
pub mod chap;
mod connection;
mod execute;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod login;
mod pdu;
mod requests;
mod scsi;
mod session;
mod tasks;
#[cfg(test)]
mod tests;
mod text;
mod transfer;
pub mod unit;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use perigee_block::exports::Exports;
use perigee_block::sessions::SessionTable;
use perigee_block::stream::accept::{self, Accept};
use perigee_block::stream::socket::Socket;
use perigee_http::{ClientAddress, ConnectionPlace, Listen, Places};
use perigee_model::Problem;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use access::Clients;
use login::Login;
use unit::{Keep, Units};

/// An initiator that has not logged in within this time is disconnected.
const LOGIN_MAX: Duration = Duration::from_secs(30);
/// The most concurrent logins from one address.
const LOGINS_PER_ADDRESS_MAX: usize = 256;
/// An initiator that is silent for this long gets a ping, and has the same time to answer it.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// The reason why a connection ended before its initiator ended it.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("not iSCSI: {0}")]
    Framing(#[from] pdu::FramingError),
    #[error("not iSCSI: {0}")]
    Text(#[from] text::TextError),
    #[error("not iSCSI: {0}")]
    Protocol(&'static str),
    #[error("refused: {0}")]
    Refused(String),
    #[error("{0} panicked")]
    Panicked(String),
}

/// The options of a target.
pub struct Options {
    pub exports: Arc<dyn Exports>,
    pub clients: Arc<dyn Clients>,
    pub keep: Arc<dyn Keep>,
    /// The most sessions. Further initiators are disconnected.
    pub sessions_max: usize,
}

struct Shared {
    exports: Arc<dyn Exports>,
    clients: Arc<dyn Clients>,
    sessions: SessionTable,
    units: Units,
    places: Places,
    /// Taken for the time of a login.
    logins: Places,
    next_tsih: AtomicU16,
    silence_max: Duration,
}

impl Shared {
    /// A session's handle; never 0, which stands for a new session.
    fn next_tsih(&self) -> u16 {
        self.next_tsih.fetch_add(1, Ordering::Relaxed) % u16::MAX + 1
    }
}

/// An address that is bound but not served yet.
pub struct Listener(TcpListener);

impl Listener {
    /// # Errors
    /// `Conflict` when the address can't be bound.
    pub async fn bind(address: &str) -> Result<Self, Problem> {
        let listen = Listen::Tcp(address.into());
        let bound = TcpListener::bind(address).await;
        bound.map(Self).map_err(|e| perigee_http::cannot_listen("iSCSI on", &listen, &e))
    }

    /// Where it is bound, with the port that the system has chosen if none was named.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl Accept for Listener {
    type Accepted = (TcpStream, SocketAddr);

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        self.0.accept().await
    }
}

/// The iSCSI target of a volume server: every volume is one target with one unit, LUN 0.
pub struct Target(Arc<Shared>);

impl Target {
    /// A target that nobody reaches until [`Target::serve`].
    pub fn new(options: Options) -> Self {
        let Options { exports, clients, keep, sessions_max } = options;
        Self(Arc::new(Shared {
            exports,
            clients,
            sessions: SessionTable::default(),
            units: Units::new(keep),
            places: Places::shared(sessions_max),
            logins: Places::new(usize::MAX, LOGINS_PER_ADDRESS_MAX),
            next_tsih: AtomicU16::new(0),
            silence_max: SILENCE_MAX,
        }))
    }

    /// Serves until `stop`; returns when every session is drained.
    pub async fn serve(self, listeners: Vec<Listener>, stop: CancellationToken) {
        let (shared, token) = (self.0, stop.clone());
        let admit = move |(socket, peer): (TcpStream, SocketAddr)| {
            let address = ClientAddress::from(peer);
            let places =
                shared.places.take(address).and_then(|own| Ok((own, shared.logins.take(address)?)));
            let (place, login) = match places {
                Ok(places) => places,
                Err(why) => {
                    tracing::debug!(%peer, why, "an initiator was disconnected");
                    return None;
                }
            };
            let connection = connection(socket, login, shared.clone(), token.child_token());
            Some(async move {
                connection.await;
                drop(place);
            })
        };
        accept::serve("iSCSI", listeners, admit, stop).await;
    }
}

async fn connection(
    socket: TcpStream,
    login: ConnectionPlace,
    shared: Arc<Shared>,
    stop: CancellationToken,
) {
    let ended = match socket.local_addr().and_then(|at| Ok((Socket::tcp(socket)?, at))) {
        Ok((socket, portal)) => {
            let peer = socket.peer();
            converse(socket, portal, peer, login, &shared, stop).await
        }
        Err(error) => Err(error.into()),
    };
    if let Err(error) = ended {
        tracing::info!(%error, "an iSCSI connection was closed because of an error");
    }
}

async fn converse<S>(
    mut stream: S,
    portal: SocketAddr,
    peer: String,
    login: ConnectionPlace,
    shared: &Arc<Shared>,
    stop: CancellationToken,
) -> Result<(), ConnectionError>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let logging_in = Login::new(shared, peer, stop.clone()).run(&mut stream, portal);
    let logged_in = tokio::select! {
        () = stop.cancelled() => return Ok(()),
        ended = tokio::time::timeout(LOGIN_MAX, logging_in) => ended,
    };
    drop(login);
    match logged_in {
        Ok(Ok(Some(session))) => {
            tracing::debug!(initiator = %session.port.0, "an iSCSI session begins");
            connection::run(stream, session, Arc::clone(shared), stop).await
        }
        Ok(Ok(None)) => Ok(()),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ConnectionError::Refused("the initiator did not log in in time".into())),
    }
}
