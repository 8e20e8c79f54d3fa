//! Keeps requests alive across connections.
//!
//! ```text
//! connected --lost--> away --connected--> sends again what is unanswered, then goes on
//!     \-- device dropped or recalled, or hung up and lost: ends
//! ```
//!
//! If the server allows it, one session has several connections. Each request is sent on one of them. A flush on
//! any of them covers all writes that were answered before it, on whichever connection. When one connection is
//! lost, all of them are closed, and the next connections are a new opening of the session. The server first ends
//! what is left of the earlier opening (see [`perigee_block::sessions`]). So a request that is sent again never
//! runs before its first copy.
//!
//! A request fails if it has waited for `patience` without a connection. The link itself never gives up. A server
//! may just need long for a request. So if it sends nothing for long, it gets a question that needs no work, and it
//! is considered lost if it does not answer that either.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use perigee_block::locking;
use perigee_block::stats::Counters;
use perigee_http::Listen;
use perigee_model::compression::Compression;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufWriter};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::super::wire::{Chunk, Dialect, FramingError, ReplyHead, Request, command, export_flag};
use super::durability::Durability;
use super::handshake::{self, ExportInfo, HandshakeError, Stream, Way};
use super::pending::{Frame, PendingTable};

/// The time for one try to connect, with TLS and handshake. The next try is not later than a second after it.
pub const CONNECT_MAX: Duration = Duration::from_secs(5);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Requests are written to the socket, and answers read from it, in pieces of this size. Each piece shows that the
/// other side is alive.
const PIECE_BYTES: usize = 64 << 10;
/// How often the deadline for a silent server is doubled, if connecting again did not help. A server that has as
/// many requests as it takes on a connection does not read the question either.
const SILENCE_DOUBLINGS_MAX: u32 = 5;

/// What a device and its link share.
pub struct Shared {
    pub table: Mutex<PendingTable>,
    pub durability: Arc<Durability>,
    /// Nobody waits any longer for a server that is lost.
    pub hung_up: CancellationToken,
    /// The device was dropped.
    pub dropped: CancellationToken,
    /// All unanswered requests fail now.
    pub recalled: CancellationToken,
    /// Decides which reads are compressed.
    pub compression: Mutex<Compression>,
    pub counters: Arc<Counters>,
    /// The volume's new address, if the server says that it has moved. It is sent each time the server says so.
    pub moved: watch::Sender<Option<String>>,
}

impl Shared {
    /// Whether the next read of this length is to be compressed.
    pub fn compresses(&self, read_bytes: u32) -> bool {
        locking::lock(&self.compression).wants(read_bytes)
    }

    /// Decompresses a chunk, if it is compressed. `elapsed`: how long its bytes took to arrive.
    fn decompressed(
        &self,
        cookie: u64,
        chunk: Chunk,
        elapsed: Duration,
    ) -> Result<Chunk, FramingError> {
        let compression = || locking::lock(&self.compression);
        match chunk {
            Chunk::Compressed(found) => {
                lock(self).check_compressed(cookie, &found)?;
                let begun = Instant::now();
                let data = found.decompress()?;
                let (bytes, compressed_bytes) = (data.len() as u64, found.data.len() as u64);
                let work = found.work + begun.elapsed();
                compression().note_arrival(compressed_bytes, elapsed);
                compression().note_compressed(bytes, compressed_bytes, work);
                self.counters.saved(bytes.saturating_sub(compressed_bytes));
                Ok(Chunk::Data { offset: found.offset, data })
            }
            Chunk::Data { offset, data } => {
                compression().note_arrival(data.len() as u64, elapsed);
                if lock(self).may_be_compressed(cookie) {
                    compression().note_incompressible(data.len() as u64);
                }
                Ok(Chunk::Data { offset, data })
            }
            chunk => Ok(chunk),
        }
    }

    /// Records the server to which the session is connected from now on.
    pub fn connected(&self, way: &Way, info: &ExportInfo) {
        if self.durability.connected(info.home.as_ref()) {
            tracing::error!(export = way.name, server = %Address(&way.address),
                "the host of the volume's home booted anew: writes that were not flushed are lost; \
                 flushes fail until what uses the volume is started anew");
        }
    }
}

/// Keeps the connections of one remote disk, and makes them anew when they break.
pub struct Link {
    pub way: Arc<Way>,
    pub patience: Duration,
    pub silence_max: Duration,
    pub connections_max: u64,
    pub info: ExportInfo,
    pub shared: Arc<Shared>,
}

#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("not NBD: {0}")]
    Framing(#[from] FramingError),
    #[error("it answered nothing for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("its task panicked")]
    Panicked,
}

/// A new opening of the session, within [`CONNECT_MAX`].
pub async fn connect(
    way: &Way,
    session: Option<Bytes>,
) -> Result<(Stream, ExportInfo), HandshakeError> {
    in_time(handshake::connect(way, session)).await
}

/// Within [`CONNECT_MAX`].
pub async fn in_time<T>(
    made: impl Future<Output = Result<T, HandshakeError>>,
) -> Result<T, HandshakeError> {
    let made = tokio::time::timeout(CONNECT_MAX, made).await;
    made.unwrap_or(Err(HandshakeError::TimedOut(CONNECT_MAX.as_secs())))
}

impl Link {
    /// `stream` is the first connection of the opening with this number.
    pub async fn run(mut self, stream: Stream, opening: u64) {
        let mut connected = Some((stream, opening));
        let mut in_vain = 0;
        while let Some((stream, opening)) = connected {
            let silence_max = self.silence_max * 2_u32.pow(in_vain);
            let answered = self.answered();
            let Err(lost) = self.transmit(stream, opening, silence_max).await else { break };
            let silent = matches!(lost, Lost::Silent(_)) && self.answered() == answered;
            in_vain = if silent { (in_vain + 1).min(SILENCE_DOUBLINGS_MAX) } else { 0 };
            tracing::warn!(export = self.way.name, server = %Address(&self.way.address), %lost,
                "lost the connection to an NBD server; connecting again");
            connected = self.reconnect().await;
        }
        self.table().close("nobody waits for the other host any more");
    }

    fn table(&self) -> MutexGuard<'_, PendingTable> {
        lock(&self.shared)
    }

    fn answered(&self) -> u64 {
        self.table().answered
    }

    /// Returns without an error when the device was dropped or recalled.
    async fn transmit(
        &mut self,
        stream: Stream,
        opening: u64,
        silence_max: Duration,
    ) -> Result<(), Lost> {
        let (mut connections, mut joining) = (JoinSet::new(), JoinSet::new());
        let (frames, first) = mpsc::unbounded_channel();
        self.table().connect(frames, self.info.compression);
        let begin = |connections: &mut JoinSet<_>, stream, dialect, frames, lane| {
            let shared = Arc::clone(&self.shared);
            let connection = Connection { shared, dialect, lane, silence_max };
            connections.spawn(connection.run(stream, frames));
        };
        begin(&mut connections, stream, self.info.dialect, first, 0);
        for number in 1..self.connections() {
            let (way, told) = (Arc::clone(&self.way), self.way.joins(opening, number));
            joining.spawn(async move { connect(&way, told).await });
        }
        let ended = loop {
            tokio::select! {
                () = self.shared.dropped.cancelled() => {
                    // Each connection says goodbye when it has nothing more to send.
                    self.table().disconnect();
                    while connections.join_next().await.is_some() {}
                    break Ok(());
                }
                () = self.shared.recalled.cancelled() => break Ok(()),
                Some(ended) = connections.join_next() => break ended.unwrap_or(Err(Lost::Panicked)),
                Some(joined) = joining.join_next() => match joined {
                    Ok(Ok((stream, info)))
                        if info.is_still(&self.info) && info.home == self.info.home =>
                    {
                        let (frames, receiver) = mpsc::unbounded_channel();
                        let lane = self.table().join(frames, info.compression);
                        begin(&mut connections, stream, info.dialect, receiver, lane);
                    }
                    Ok(Err(error)) => {
                        tracing::debug!(export = self.way.name, %error, "one connection fewer");
                    }
                    _ => {}
                },
            }
        };
        self.table().disconnect();
        ended
    }

    /// The number of connections. Several are used only if the server guarantees that they behave like one.
    fn connections(&self) -> u64 {
        let allowed = self.way.session.is_some() && self.info.has(export_flag::CAN_MULTI_CONN);
        if allowed { self.connections_max } else { 1 }
    }

    /// Returns `None` if nobody needs a connection any more.
    async fn reconnect(&mut self) -> Option<(Stream, u64)> {
        let mut pause = Duration::ZERO;
        let mut why = String::from("connection lost");
        loop {
            let (way, opening) = (Arc::clone(&self.way), self.way.next_opening());
            let attempt = async move {
                tokio::time::sleep(pause).await;
                connect(&way, way.joins(opening, 0)).await
            };
            match self.wait_for(attempt, &why).await? {
                Ok((stream, info)) if info.is_still(&self.info) => {
                    tracing::info!(export = self.way.name, "connected to the NBD server again");
                    self.shared.connected(&self.way, &info);
                    // The server may have been replaced by another version.
                    self.info = info;
                    return Some((stream, opening));
                }
                Err(HandshakeError::Moved(nbd_addr)) => {
                    why = format!("the volume has another home now, at {nbd_addr}");
                    self.shared.moved.send_replace(Some(nbd_addr));
                }
                Ok((stream, info))
                    if self.way.session.is_some()
                        && info.is_confined_since(&self.info)
                        && info.is_same(&self.info) =>
                {
                    drop(stream);
                    why = "its data may not leave their site since then".to_owned();
                    let here = Address(&self.way.address).to_string();
                    self.shared.moved.send_replace(Some(here));
                    // Another try would close the connection of the one that takes this one's place.
                    self.wait_for(std::future::pending::<()>(), &why).await?;
                }
                Ok(_) => why = "the export of that name is another one now".to_owned(),
                Err(error) => why = error.to_string(),
            }
            pause = (pause * 2).clamp(Duration::from_millis(50), RETRY_PAUSE_MAX);
        }
    }

    /// Runs an attempt to connect, and meanwhile fails requests that are too old. Returns `None` if the device
    /// was dropped, hung up or recalled.
    async fn wait_for<T>(&mut self, attempt: impl Future<Output = T>, why: &str) -> Option<T> {
        tokio::pin!(attempt);
        loop {
            // A request that comes later is not too old before that time.
            let latest = Instant::now() + self.patience.max(Duration::from_millis(10));
            let expiry = self.table().next_expiry(self.patience).unwrap_or(latest);
            tokio::select! {
                () = self.shared.hung_up.cancelled() => return None,
                () = self.shared.dropped.cancelled() => return None,
                () = self.shared.recalled.cancelled() => return None,
                ended = &mut attempt => return Some(ended),
                () = tokio::time::sleep_until(expiry.into()) => {
                    let text = format!("{} at {}: {why}", self.way.name, Address(&self.way.address));
                    self.table().expire(Instant::now(), self.patience, &text);
                }
            }
        }
    }
}

/// Takes the table. It is never held over I/O.
pub fn lock(shared: &Shared) -> MutexGuard<'_, PendingTable> {
    locking::lock(&shared.table)
}

/// One connection of a link.
struct Connection {
    shared: Arc<Shared>,
    dialect: Dialect,
    lane: usize,
    silence_max: Duration,
}

impl Connection {
    /// Returns without an error when the device is dropped.
    async fn run(
        self,
        stream: Stream,
        mut frames: mpsc::UnboundedReceiver<Frame>,
    ) -> Result<(), Lost> {
        let (reader, writer) = tokio::io::split(stream);
        let heard = Heard::new();
        tokio::select! {
            ended = send(writer, self.dialect, &mut frames, &heard) => ended,
            ended = receive(reader, &self.shared, &heard) => ended,
            silent = self.silence(&heard) => Err(silent),
        }
    }

    /// Returns when a request waits and nothing was sent or received for too long, not even the answer to a
    /// question that needs no work. The question is asked on this connection, because another one says nothing
    /// about this one.
    async fn silence(&self, heard: &Heard) -> Lost {
        let half = self.silence_max / 2;
        loop {
            let oldest = lock(&self.shared).oldest(self.lane);
            let since = oldest.map_or_else(Instant::now, |oldest| oldest.max(heard.last()));
            if since.elapsed() < half {
                tokio::time::sleep_until((since + half).into()).await;
                continue;
            }
            let answer = lock(&self.shared).probe(self.lane);
            let _late = tokio::time::timeout(half, answer).await;
            if heard.last() <= since {
                return Lost::Silent(self.silence_max);
            }
        }
    }
}

/// When bytes last moved on a connection.
struct Heard {
    begun: Instant,
    after_ms: AtomicU64,
}

impl Heard {
    fn new() -> Self {
        Self { begun: Instant::now(), after_ms: AtomicU64::new(0) }
    }

    fn moved(&self) {
        let after_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.after_ms.store(after_ms, Ordering::Relaxed);
    }

    fn last(&self) -> Instant {
        self.begun + Duration::from_millis(self.after_ms.load(Ordering::Relaxed))
    }
}

/// Sends requests until no more can come.
async fn send<W: AsyncWrite + Unpin>(
    writer: W,
    dialect: Dialect,
    frames: &mut mpsc::UnboundedReceiver<Frame>,
    heard: &Heard,
) -> Result<(), Lost> {
    let mut writer = BufWriter::with_capacity(PIECE_BYTES, writer);
    while let Some((request, payload)) = frames.recv().await {
        writer.write_all(&request.encode(dialect)).await?;
        for piece in payload.chunks(PIECE_BYTES) {
            writer.write_all(piece).await?;
            heard.moved();
        }
        if frames.is_empty() {
            writer.flush().await?;
        }
    }
    let goodbye =
        Request { flags: 0, command: command::DISCONNECT, cookie: 0, offset: 0, length_bytes: 0 };
    writer.write_all(&goodbye.encode(dialect)).await?;
    Ok(writer.flush().await?)
}

/// Always returns an error, because the protocol has no way for a server to end the connection.
async fn receive<R: AsyncRead + Unpin>(
    mut reader: R,
    shared: &Shared,
    heard: &Heard,
) -> Result<(), Lost> {
    loop {
        let mut head = [0; ReplyHead::BYTES];
        reader.read_exact(&mut head).await?;
        let mut more = [0; ReplyHead::MORE_BYTES_MAX];
        let more = &mut more[..ReplyHead::more_bytes(&head)];
        reader.read_exact(more).await?;
        heard.moved();
        match ReplyHead::parse(&head, more)? {
            ReplyHead::Simple { cookie, error } => {
                let expected = lock(shared).simple_payload_bytes(cookie)?;
                let length = if error.is_some() { 0 } else { expected };
                let data = read_bytes(&mut reader, length, heard).await?;
                lock(shared).simple(cookie, error, data)?;
            }
            ReplyHead::Chunk { cookie, kind, done, length_bytes } => {
                let begun = Instant::now();
                let data = read_bytes(&mut reader, length_bytes as usize, heard).await?;
                let chunk = Chunk::parse(kind, data)?;
                let chunk = shared.decompressed(cookie, chunk, begun.elapsed())?;
                lock(shared).chunk(cookie, chunk, done)?;
            }
        }
    }
}

async fn read_bytes<R: AsyncRead + Unpin>(
    reader: &mut R,
    length: usize,
    heard: &Heard,
) -> Result<Bytes, std::io::Error> {
    let mut data = BytesMut::zeroed(length);
    for piece in data.chunks_mut(PIECE_BYTES) {
        reader.read_exact(piece).await?;
        heard.moved();
    }
    Ok(data.freeze())
}

/// An address as people write it.
pub struct Address<'a>(pub &'a Listen);

impl std::fmt::Display for Address<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Listen::Tcp(address) => f.write_str(address),
            Listen::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
