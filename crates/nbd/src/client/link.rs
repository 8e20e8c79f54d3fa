//! Keeps requests alive across connections.
//!
//! ```text
//! connected --lost--> reconnecting --connected--> sends again what is unanswered, then goes on
//!     \-- device dropped, or hung up and lost: ends
//! ```
//!
//! One task owns the connection and the table of unanswered requests. A request that has waited
//! for `patience` while there is no connection fails; the link itself never gives up.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use perigee_http::Listen;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufWriter, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::super::wire::{Chunk, Dialect, FramingError, ReplyHead, Request, command};
use super::handshake::{self, ExportInfo, HandshakeError, Stream, Way};
use super::pending::{Outgoing, PendingTable};

pub const CONNECT_MAX: Duration = Duration::from_secs(5);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

pub struct Link {
    pub way: Arc<Way>,
    pub patience: Duration,
    pub info: ExportInfo,
    pub requests: mpsc::UnboundedReceiver<Outgoing>,
    pub hung_up: CancellationToken,
    pub table: Mutex<PendingTable>,
}

#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("not NBD: {0}")]
    Framing(#[from] FramingError),
}

/// Connects within [`CONNECT_MAX`].
pub async fn connect(way: &Way) -> Result<(Stream, ExportInfo), HandshakeError> {
    tokio::time::timeout(CONNECT_MAX, handshake::connect(way))
        .await
        .unwrap_or(Err(HandshakeError::TimedOut(CONNECT_MAX.as_secs())))
}

impl Link {
    pub async fn run(mut self, stream: Stream) {
        let mut connected = Some(stream);
        while let Some(stream) = connected {
            let Err(lost) = self.transmit(stream).await else { return };
            tracing::warn!(export = self.way.name, server = %Address(&self.way.address), %lost,
                "lost the connection to an NBD server; connecting again");
            connected = self.reconnect().await;
        }
        self.table().fail_all("nobody waits for the other host any more");
    }

    fn table(&self) -> MutexGuard<'_, PendingTable> {
        lock(&self.table)
    }

    /// Returns without an error when the device was dropped.
    async fn transmit(&mut self, stream: Stream) -> Result<(), Lost> {
        let (reader, writer) = tokio::io::split(stream);
        let Self { requests, table, info, .. } = self;
        tokio::select! {
            ended = send(writer, info.dialect, requests, table) => ended,
            ended = receive(reader, table) => ended,
        }
    }

    /// `None` when nobody needs a connection any more.
    async fn reconnect(&mut self) -> Option<Stream> {
        let mut pause = Duration::ZERO;
        let mut why = String::from("connection lost");
        loop {
            let attempt = {
                let way = Arc::clone(&self.way);
                async move {
                    tokio::time::sleep(pause).await;
                    connect(&way).await
                }
            };
            match self.wait_for(attempt, &why).await? {
                Ok((stream, info)) if info.is_still(&self.info) => {
                    tracing::info!(export = self.way.name, "connected to the NBD server again");
                    // It may be another version of the server.
                    self.info = info;
                    return Some(stream);
                }
                Ok(_) => why = "the export of that name is another one now".to_owned(),
                Err(error) => why = error.to_string(),
            }
            pause = (pause * 2).clamp(Duration::from_millis(50), RETRY_PAUSE_MAX);
        }
    }

    /// Runs an attempt to connect; meanwhile takes new requests and fails those that are too old.
    /// `None` when the device was dropped or hung up.
    async fn wait_for<T>(&mut self, attempt: impl Future<Output = T>, why: &str) -> Option<T> {
        tokio::pin!(attempt);
        let hung_up = self.hung_up.clone();
        loop {
            let expiry = self.table().next_expiry(self.patience);
            let expired = async {
                match expiry {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = hung_up.cancelled() => return None,
                ended = &mut attempt => return Some(ended),
                outgoing = self.requests.recv() => {
                    self.table().insert(outgoing?, Instant::now());
                }
                () = expired => {
                    let text = format!("{} at {}: {why}", self.way.name, Address(&self.way.address));
                    self.table().expire(Instant::now(), self.patience, &text);
                }
            }
        }
    }
}

/// Only the link's own task has the table: if it panics, nobody takes the lock any more.
fn lock(table: &Mutex<PendingTable>) -> MutexGuard<'_, PendingTable> {
    table.lock().expect("no holder panics and goes on")
}

/// First what an earlier connection left unanswered, then new requests as they come.
async fn send(
    writer: WriteHalf<Stream>,
    dialect: Dialect,
    requests: &mut mpsc::UnboundedReceiver<Outgoing>,
    table: &Mutex<PendingTable>,
) -> Result<(), Lost> {
    let mut writer = BufWriter::with_capacity(64 << 10, writer);
    let again = lock(table).resend();
    for (request, payload) in again {
        send_one(&mut writer, dialect, request, payload).await?;
    }
    writer.flush().await?;
    while let Some(outgoing) = requests.recv().await {
        let payload = outgoing.payload.clone();
        let request = lock(table).insert(outgoing, Instant::now());
        send_one(&mut writer, dialect, request, payload).await?;
        if requests.is_empty() {
            writer.flush().await?;
        }
    }
    let goodbye =
        Request { flags: 0, command: command::DISCONNECT, cookie: 0, offset: 0, length_bytes: 0 };
    send_one(&mut writer, dialect, goodbye, Bytes::new()).await?;
    Ok(writer.flush().await?)
}

async fn send_one(
    writer: &mut BufWriter<WriteHalf<Stream>>,
    dialect: Dialect,
    request: Request,
    payload: Bytes,
) -> Result<(), Lost> {
    writer.write_all(&request.encode(dialect)).await?;
    Ok(writer.write_all(&payload).await?)
}

/// Never returns without an error: the server has no way to say goodbye.
async fn receive(mut reader: ReadHalf<Stream>, table: &Mutex<PendingTable>) -> Result<(), Lost> {
    loop {
        let mut head = [0; ReplyHead::BYTES];
        reader.read_exact(&mut head).await?;
        let mut more = [0; ReplyHead::MORE_BYTES_MAX];
        let more = &mut more[..ReplyHead::more_bytes(&head)];
        reader.read_exact(more).await?;
        match ReplyHead::parse(&head, more)? {
            ReplyHead::Simple { cookie, error } => {
                let expected = lock(table).simple_payload_bytes(cookie)?;
                let length = if error.is_some() { 0 } else { expected };
                let data = read_bytes(&mut reader, length).await?;
                lock(table).simple(cookie, error, data)?;
            }
            ReplyHead::Chunk { cookie, kind, done, length_bytes } => {
                let data = read_bytes(&mut reader, length_bytes as usize).await?;
                lock(table).chunk(cookie, Chunk::parse(kind, data)?, done)?;
            }
        }
    }
}

async fn read_bytes<R: AsyncRead + Unpin>(
    reader: &mut R,
    length: usize,
) -> Result<Bytes, std::io::Error> {
    let mut data = BytesMut::zeroed(length);
    reader.read_exact(&mut data).await?;
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
