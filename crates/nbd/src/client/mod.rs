//! The client: an export of another host as a [`Device`].
//!
//! Many requests are in flight at the same time, over several connections where the server allows it.
//! When a connection is lost, requests wait: the client connects again and sends everything unanswered
//! once more, so that a restart of the other server shows only as a pause.

mod durability;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handshake;
mod link;
mod pending;
mod tls;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::exports::SessionHome;
use perigee_block::lease::{LeaseAnswer, LeaseAsk};
use perigee_block::sessions::ProxyKey;
use perigee_block::stats::{Counters, Kind};
use perigee_block::trace::{self, Stage};
use perigee_http::Listen;
use perigee_model::{Incarnation, LayerId, Problem};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::DropGuard;

use super::wire::{
    Answer, Errno, Request, command, command_flag, export_flag, lease_answer, lease_offset,
};
pub use durability::Durability;
pub use handshake::Prepared;
use handshake::{ExportInfo, HandshakeError, Stream, Way};
use link::{Address, Link, Shared};
use pending::{Outgoing, PendingTable};
pub use tls::{ClientTls, RemoteTlsFiles};

/// How long a request waits for a lost host.
pub const PATIENCE_DEFAULT: Duration = Duration::from_secs(600);

/// A server that takes requests and sends nothing for this long is considered lost.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// A request that has waited for this long is told. Writes wait for other hosts' leases, which takes up to 10 s.
const LONG: Duration = Duration::from_secs(15);

/// Longest range of one zeroing or block status: their length has 32 bits on the wire.
const RANGE_BYTES_MAX: u64 = 1 << 30;

/// Which export to open, and how.
pub struct RemoteExport {
    pub address: Listen,
    pub name: String,
    /// How to encrypt. Connections over unix sockets are never encrypted.
    pub tls: Option<ClientTls>,
    /// A proxy's session (see [`perigee_block::sessions`]); no other session has the same.
    pub session: Option<Arc<ProxyKey>>,
    /// The number of connections of the session, if the server allows more than one.
    pub connections: u64,
    pub patience: Duration,
    pub silence_max: Duration,
    /// Where the requests' time on the network is counted.
    pub counters: Option<Arc<Counters>>,
    /// What the session has written so far, if it was connected in another way before.
    pub durability: Arc<Durability>,
    /// A connection to the same address that was made ahead.
    pub prepared: Option<Prepared>,
}

impl RemoteExport {
    /// One connection without TLS, with the default patience.
    pub fn new(address: Listen, name: impl Into<String>) -> Self {
        Self {
            address,
            name: name.into(),
            tls: None,
            session: None,
            connections: 1,
            patience: PATIENCE_DEFAULT,
            silence_max: SILENCE_MAX,
            counters: None,
            durability: Arc::default(),
            prepared: None,
        }
    }
}

/// What [`NbdDevice::open_or_moved`] found.
pub enum Opened {
    /// The export.
    Device(NbdDevice),
    /// The volume has another home now.
    Moved {
        /// `HOST:PORT` of its NBD server.
        nbd_addr: String,
    },
}

/// An open export of another host. Dropping it ends its connections.
pub struct NbdDevice {
    info: ExportInfo,
    shared: Arc<Shared>,
    _dropped: DropGuard,
    counters: Arc<Counters>,
    round_trip_ns: AtomicU64,
}

impl NbdDevice {
    /// Connects, with a deadline of a few seconds.
    ///
    /// # Errors
    /// `NotFound` when the server has no such export, `Unavailable` when there is no server.
    pub async fn open(remote: RemoteExport) -> Result<Self, Problem> {
        let (address, name) = (Address(&remote.address).to_string(), remote.name.clone());
        Self::connect(remote).await.map_err(|error| error.into_problem(&name, &address))
    }

    /// As [`Self::open`], for a proxy: the volume may have another home now.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_or_moved(remote: RemoteExport) -> Result<Opened, Problem> {
        let (address, name) = (Address(&remote.address).to_string(), remote.name.clone());
        match Self::connect(remote).await {
            Ok(device) => Ok(Opened::Device(device)),
            Err(HandshakeError::Moved(nbd_addr)) => Ok(Opened::Moved { nbd_addr }),
            Err(error) => Err(error.into_problem(&name, &address)),
        }
    }

    /// Makes a connection ahead, with a deadline of a few seconds. To open the export over it then takes one round trip
    /// ([`RemoteExport::prepared`]).
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn prepare(remote: RemoteExport) -> Result<Prepared, Problem> {
        let RemoteExport { address, name, tls, .. } = remote;
        let prepared = link::in_time(handshake::prepare(&address, tls.as_ref())).await;
        prepared.map_err(|error| error.into_problem(&name, &Address(&address).to_string()))
    }

    async fn connect(mut remote: RemoteExport) -> Result<Self, HandshakeError> {
        let prepared = remote.prepared.take();
        let (address, name) = (remote.address.clone(), remote.name.clone());
        let (tls, session) = (remote.tls.clone(), remote.session.clone());
        let way = Arc::new(Way { address, name, tls, session });
        let opening = way.next_opening();
        if let Some(prepared) = prepared {
            let opened = handshake::open(prepared, &way, way.joins(opening, 0));
            match link::in_time(opened).await {
                // The server may have closed it meanwhile.
                Err(HandshakeError::Io(_) | HandshakeError::Framing(_)) => {}
                opened => {
                    let (stream, info) = opened?;
                    return Ok(Self::over(stream, opening, way, info, &remote));
                }
            }
        }
        let opening = way.next_opening();
        let (stream, info) = link::connect(&way, way.joins(opening, 0)).await?;
        Ok(Self::over(stream, opening, way, info, &remote))
    }

    /// Gets the address of the volume's new home each time the server says that the volume has one. It is the same address
    /// if the data are confined since the device was opened: then it has to be opened again. It ends with the device.
    pub fn moves(&self) -> watch::Receiver<Option<String>> {
        self.shared.moved.subscribe()
    }

    /// The device of an export that the handshake has opened.
    fn over(
        stream: Stream,
        opening: u64,
        way: Arc<Way>,
        info: ExportInfo,
        remote: &RemoteExport,
    ) -> Self {
        let durability = Arc::clone(&remote.durability);
        let table = Mutex::new(PendingTable::new(Arc::clone(&durability)));
        let (hung_up, dropped, recalled) = Default::default();
        let moved = watch::Sender::new(None);
        let counters = remote.counters.clone().unwrap_or_default();
        let shared = Arc::new(Shared {
            table,
            durability,
            hung_up,
            dropped,
            recalled,
            compression: Mutex::default(),
            counters: Arc::clone(&counters),
            moved,
        });
        shared.connected(&way, &info);
        let link = Link {
            way,
            patience: remote.patience,
            silence_max: remote.silence_max,
            connections_max: remote.connections,
            info: info.clone(),
            shared: Arc::clone(&shared),
        };
        tokio::spawn(link.run(stream, opening));
        let _dropped = shared.dropped.clone().drop_guard();
        let round_trip_ns = AtomicU64::new(nanoseconds(info.round_trip));
        Self { info, shared, _dropped, counters, round_trip_ns }
    }

    /// Where the volume is, if the server says so.
    pub fn home(&self) -> Option<&SessionHome> {
        self.info.home.as_ref()
    }

    /// What the session has written so far.
    pub fn durability(&self) -> Arc<Durability> {
        Arc::clone(&self.shared.durability)
    }

    /// Whether the connection is lost now.
    pub fn is_away(&self) -> bool {
        !link::lock(&self.shared).is_connected()
    }

    /// Since when the server has not answered, if it is away or a request waits for long.
    pub fn unanswered_since(&self) -> Option<Instant> {
        link::lock(&self.shared).unanswered_since(LONG)
    }

    /// Whether it is the same export, as far as the servers say. It may be confined now.
    pub fn is_same(&self, other: &Self) -> bool {
        self.info.is_same(&other.info)
    }

    /// Ends the connection: all unanswered requests fail now.
    pub fn recall(&self) {
        self.shared.recalled.cancel();
    }

    /// Makes the link look thin from now on.
    #[cfg(test)]
    pub fn seem_thin(&self) {
        let mut compression = perigee_block::locking::lock(&self.shared.compression);
        compression.note_arrival(1 << 20, Duration::from_secs(1000));
    }

    /// As the server has said in its handshake.
    pub fn read_only(&self) -> bool {
        self.info.has(export_flag::READ_ONLY)
    }

    async fn ask(
        &self,
        command: u16,
        flags: u16,
        offset: u64,
        length_bytes: u32,
        payload: Bytes,
    ) -> Result<Answer, IoError> {
        let mut timer = self.counters.time(Kind::Network, Instant::now());
        let _stage = trace::stage(Stage::Network);
        let sent_bytes = payload.len();
        let request =
            Request { flags, command, cookie: 0, offset, length_bytes: length_bytes.into() };
        let answer = self.send(request, payload).await?;
        timer.carried(sent_bytes);
        if let Answer::Data { data, .. } = &answer {
            timer.carried(data.len());
        }
        Ok(answer)
    }

    /// Sends a request that no client of the volume waits for, or that is counted already.
    async fn send(&self, request: Request, payload: Bytes) -> Result<Answer, IoError> {
        let asked = Instant::now();
        let (reply, answer) = oneshot::channel();
        let gone = || IoError::Unreachable("the connection was closed by this side".into());
        link::lock(&self.shared).insert(Outgoing { request, payload, reply }, asked);
        let answer = answer.await.map_err(|_| gone())??;
        self.round_trip_ns.fetch_min(nanoseconds(asked.elapsed()), Ordering::Relaxed);
        match answer {
            Answer::Error(errno, message) => Err(self.io_error(errno, message)),
            answer => Ok(answer),
        }
    }

    fn io_error(&self, errno: Errno, message: String) -> IoError {
        let message = if message.is_empty() { format!("NBD {errno:?}") } else { message };
        match errno {
            Errno::NoSpace => IoError::NoSpace,
            Errno::Perm if self.read_only() => IoError::ReadOnly,
            Errno::Perm => IoError::Refused(message),
            Errno::Invalid | Errno::NotSupported => IoError::Invalid(message),
            Errno::Io | Errno::Shutdown => IoError::from(std::io::Error::other(message)),
        }
    }

    /// For a server without FUA, a flush after the change replaces it.
    async fn change(
        &self,
        command: u16,
        flags: u16,
        range: (u64, u32),
        payload: Bytes,
        fua: bool,
    ) -> Result<(), IoError> {
        let native = fua && self.info.has(export_flag::SEND_FUA);
        let flags = flags | if native { command_flag::FUA } else { 0 };
        self.ask(command, flags, range.0, range.1, payload).await?;
        if fua && !native {
            self.flush().await?;
        }
        if fua { self.shared.durability.check() } else { Ok(()) }
    }

    fn read_flags(&self, length_bytes: u32) -> u16 {
        let compressed = self.info.compression && self.shared.compresses(length_bytes);
        if compressed { command_flag::PERIGEE_COMPRESS } else { 0 }
    }

    async fn read_all(&self, offset: u64, length_bytes: u32) -> Result<Bytes, IoError> {
        let mut parts = BytesMut::new();
        let mut done = 0;
        loop {
            let length = (length_bytes - done).min(self.info.request_bytes_max);
            let at = offset + u64::from(done);
            let Answer::Data { data, .. } =
                self.ask(command::READ, self.read_flags(length), at, length, Bytes::new()).await?
            else {
                return Err(IoError::from(std::io::Error::other("a read without data")));
            };
            if length == length_bytes {
                return Ok(data);
            }
            parts.extend_from_slice(&data);
            done += length;
            if done == length_bytes {
                return Ok(parts.freeze());
            }
        }
    }
}

impl Device for NbdDevice {
    fn size_bytes(&self) -> u64 {
        self.info.size_bytes
    }

    fn layer(&self) -> Option<LayerId> {
        self.info.layer
    }

    fn incarnation(&self) -> Option<Incarnation> {
        self.info.incarnation
    }

    fn is_confined(&self) -> bool {
        self.info.confined
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(self.read_all(offset, length_bytes))
    }

    fn write(&self, offset: u64, mut data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            let mut at = offset;
            while !data.is_empty() {
                let length = self.info.request_bytes_max.min(u32_of(data.len() as u64));
                let part = data.split_to(length as usize);
                self.change(command::WRITE, 0, (at, length), part, fua).await?;
                at += u64::from(length);
            }
            Ok(())
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
            if !self.info.has(export_flag::SEND_WRITE_ZEROES) {
                return Err(IoError::Invalid("the server does not write zeroes".into()));
            }
            let flags = match how {
                Zeroing::KeepSpace => command_flag::NO_HOLE,
                Zeroing::FreeSpace => 0,
            };
            let mut done = 0;
            while done < length_bytes {
                let length = (length_bytes - done).min(RANGE_BYTES_MAX);
                let range = (offset + done, u32_of(length));
                self.change(command::WRITE_ZEROES, flags, range, Bytes::new(), fua).await?;
                done += length;
            }
            Ok(())
        })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            if self.info.has(export_flag::SEND_FLUSH) {
                self.ask(command::FLUSH, 0, 0, 0, Bytes::new()).await?;
            }
            self.shared.durability.check()
        })
    }

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move {
            if !self.info.allocation {
                return Ok(vec![Extent { length_bytes, hole: false, zero: false }]);
            }
            let length = u32_of(length_bytes.min(RANGE_BYTES_MAX));
            match self.ask(command::BLOCK_STATUS, 0, offset, length, Bytes::new()).await? {
                Answer::Status(contexts) => {
                    let runs = contexts.into_iter().flat_map(|context| context.runs);
                    Ok(cut(runs.map(Extent::from), length_bytes))
                }
                _ => Err(IoError::from(std::io::Error::other("a block status without extents"))),
            }
        })
    }

    fn round_trip(&self) -> Duration {
        Duration::from_nanos(self.round_trip_ns.load(Ordering::Relaxed))
    }

    fn lease(&self, ask: LeaseAsk) -> BoxFuture<'_, Result<LeaseAnswer, IoError>> {
        Box::pin(async move {
            // The home holds its answer back while the lease lasts. Nobody waits for the network meanwhile, so it is not counted.
            let (command, offset) = (command::PERIGEE_LEASE, lease_offset(ask));
            let request = Request { flags: 0, command, cookie: 0, offset, length_bytes: 1 };
            match self.send(request, Bytes::new()).await? {
                Answer::Data { data, .. } => lease_answer(&data),
                _ => None,
            }
            .ok_or_else(|| IoError::from(std::io::Error::other("no answer about the lease")))
        })
    }

    fn hang_up(&self) {
        self.shared.hung_up.cancel();
    }
}

/// The last extent of a block status may end beyond what was asked for.
fn cut(extents: impl Iterator<Item = Extent>, length_bytes: u64) -> Vec<Extent> {
    let mut left = length_bytes;
    let mut kept = Vec::new();
    for mut extent in extents {
        extent.length_bytes = extent.length_bytes.min(left);
        left -= extent.length_bytes;
        if extent.length_bytes > 0 {
            kept.push(extent);
        }
    }
    kept
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn u32_of(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use perigee_model::ProblemKind;

    use super::*;

    #[test]
    fn extents_end_where_the_question_ended() {
        let extent = |length_bytes| Extent { length_bytes, hole: false, zero: false };
        let told = [extent(4096), extent(8192)].into_iter();
        assert_eq!(cut(told, 6144), [extent(4096), extent(2048)]);
    }

    #[tokio::test]
    async fn what_is_no_address_is_not_worth_another_try() {
        for text in ["", "here", "127.0.0.1:port"] {
            let remote = RemoteExport::new(Listen::Tcp(text.to_owned()), "data");
            let problem = NbdDevice::open(remote).await.err().expect("no server");
            assert_eq!(problem.kind, ProblemKind::Invalid, "{text:?}: {problem:?}");
        }
    }
}
