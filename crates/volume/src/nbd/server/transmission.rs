//! Command to effect: runs the requests of one connection, many at the same time.
//!
//! One loop reads requests and starts a task for each; one task writes the replies in the order in
//! which requests end. A request holds its permits from before its payload is read until its reply
//! is written: that bounds the memory of a connection, and all permits back means it is drained.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter, ReadHalf, WriteHalf,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::super::socket::Socket;
use super::super::wire::{self, Answer, Errno, Request, command};
use super::ConnectionError;
use super::command::{Command, Refusal, Rules, check};
use super::negotiation::Agreed;
use crate::device::{Device, Extent, IoError};

const REQUESTS_MAX: u32 = 64;
/// Payload of all requests in flight, in KiB; two of the longest fit.
const PAYLOAD_KIB_MAX: u32 = 64 << 10;
/// Extents in one reply.
const EXTENTS_MAX: usize = 1 << 16;
/// When the server stops, requests that wait for another host get this long.
const DRAIN_MAX: Duration = Duration::from_secs(3);

/// A request's share of the connection's bounds.
struct Permit {
    _request: OwnedSemaphorePermit,
    _payload: OwnedSemaphorePermit,
}

struct Reply {
    head: Bytes,
    payload: Bytes,
    permit: Permit,
}

struct Limits {
    requests: Arc<Semaphore>,
    payload: Arc<Semaphore>,
}

impl Limits {
    fn new() -> Self {
        Self {
            requests: Arc::new(Semaphore::new(REQUESTS_MAX as usize)),
            payload: Arc::new(Semaphore::new(PAYLOAD_KIB_MAX as usize)),
        }
    }

    async fn admit(&self, request: &Request) -> Permit {
        let bytes = match request.command {
            command::READ | command::WRITE => request.length_bytes.min(wire::PAYLOAD_BYTES_MAX),
            _ => 0,
        };
        let open = "the semaphores are never closed";
        Permit {
            _request: self.requests.clone().acquire_owned().await.expect(open),
            _payload: self
                .payload
                .clone()
                .acquire_many_owned(bytes.div_ceil(1024))
                .await
                .expect(open),
        }
    }

    async fn drained(&self) {
        let _all =
            self.requests.acquire_many(REQUESTS_MAX).await.expect("the semaphore is never closed");
    }
}

/// Returns when no request of the connection runs any more.
pub async fn run(
    stream: BufReader<Socket>,
    agreed: Agreed,
    stop: CancellationToken,
) -> Result<(), ConnectionError> {
    let Agreed { export, rules, claim } = agreed;
    let (mut reader, writer) = tokio::io::split(stream);
    let (replies, queue) = mpsc::channel(REQUESTS_MAX as usize);
    let writing = tokio::spawn(write_replies(writer, queue, stop.clone()));
    let limits = Limits::new();
    let connection =
        Connection { device: export.device.clone(), rules, replies, stop: stop.clone() };
    let ended = tokio::select! {
        () = stop.cancelled() => Ok(()),
        ended = read_requests(&mut reader, &connection, &limits) => ended,
    };
    if stop.is_cancelled() {
        // The client goes on with another connection. What is not answered by then it sends again.
        if tokio::time::timeout(DRAIN_MAX, limits.drained()).await.is_err() {
            writing.abort();
        }
    }
    export.device.hang_up();
    limits.drained().await;
    drop(connection);
    if let Err(error) = writing.await
        && error.is_panic()
    {
        tracing::error!(%error, "the NBD writer failed");
    }
    drop(claim);
    ended
}

struct Connection {
    device: Arc<dyn Device>,
    rules: Rules,
    replies: mpsc::Sender<Reply>,
    stop: CancellationToken,
}

async fn read_requests(
    reader: &mut ReadHalf<BufReader<Socket>>,
    connection: &Connection,
    limits: &Limits,
) -> Result<(), ConnectionError> {
    loop {
        let mut head = [0; Request::BYTES];
        match reader.read_exact(&mut head).await {
            // Without a DISCONNECT, but that is how most programs end.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            ended => ended?,
        };
        let request = Request::parse(&head)?;
        if request.command == command::DISCONNECT {
            return Ok(());
        }
        let permit = limits.admit(&request).await;
        let payload = if request.command == command::WRITE {
            read_payload(reader, request.length_bytes as usize).await?
        } else {
            Bytes::new()
        };
        start(connection, request, payload, permit);
    }
}

async fn read_payload<R: AsyncRead + Unpin>(
    reader: &mut R,
    length: usize,
) -> Result<Bytes, std::io::Error> {
    let mut payload = BytesMut::with_capacity(length);
    while payload.len() < length {
        let missing = length - payload.len();
        if reader.read_buf(&mut (&mut payload).limit(missing)).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(payload.freeze())
}

fn start(connection: &Connection, request: Request, payload: Bytes, permit: Permit) {
    let (device, rules) = (connection.device.clone(), connection.rules);
    let replies = connection.replies.clone();
    // Were the task to panic, its request would never be answered: the connection ends instead.
    let panicked = connection.stop.clone().drop_guard();
    tokio::spawn(async move {
        let answer = match check(&request, &rules) {
            Ok(command) => execute(&*device, command, payload).await,
            Err(Refusal { errno, message }) => Answer::Error(errno, message),
        };
        let (head, payload) = wire::encode_answer(request.cookie, answer, rules.structured);
        // It fails only when the connection is gone, and then nobody waits for the reply.
        let _unsent = replies.send(Reply { head, payload, permit }).await;
        panicked.disarm();
    });
}

async fn execute(device: &dyn Device, command: Command, payload: Bytes) -> Answer {
    let done = |()| Answer::Done;
    let result = match command {
        // The protocol leaves open what an empty range means. Here it means nothing to do.
        Command::Read { length_bytes: 0, .. } | Command::Zero { length_bytes: 0, .. } => {
            Ok(Answer::Done)
        }
        Command::Write { .. } if payload.is_empty() => Ok(Answer::Done),
        Command::Read { offset, length_bytes } => {
            device.read(offset, length_bytes).await.map(|data| Answer::Data { offset, data })
        }
        Command::Write { offset, fua } => device.write(offset, payload, fua).await.map(done),
        Command::Flush => device.flush().await.map(done),
        Command::Zero { offset, length_bytes, how, fua } => {
            device.zero(offset, length_bytes.into(), how, fua).await.map(done)
        }
        Command::Status { offset, length_bytes, only_one } => {
            let max = if only_one { 1 } else { EXTENTS_MAX };
            device
                .extents(offset, length_bytes.into())
                .await
                .map(|extents| Answer::Extents(merge(extents, max)))
        }
    };
    result.unwrap_or_else(|error| refusal(&error))
}

fn refusal(error: &IoError) -> Answer {
    Answer::Error(Errno::from(error), error.to_string())
}

/// Neighbours of one kind become one extent; of these the first `max`.
fn merge(extents: Vec<Extent>, max: usize) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::new();
    for extent in extents {
        let full = merged.len() == max;
        match merged.last_mut() {
            Some(last) if last.hole == extent.hole && last.zero == extent.zero => {
                last.length_bytes += extent.length_bytes;
            }
            _ if full => break,
            _ => merged.push(extent),
        }
    }
    merged
}

async fn write_replies(
    writer: WriteHalf<BufReader<Socket>>,
    mut queue: mpsc::Receiver<Reply>,
    stop: CancellationToken,
) {
    let mut writer = BufWriter::with_capacity(64 << 10, writer);
    while let Some(reply) = queue.recv().await {
        if let Err(error) = write_reply(&mut writer, reply, queue.is_empty()).await {
            tracing::debug!(%error, "NBD client went away");
            stop.cancel();
            return;
        }
    }
}

/// What stands in the buffer goes out when no other reply waits.
async fn write_reply<W: AsyncWrite + Unpin>(
    writer: &mut W,
    reply: Reply,
    last: bool,
) -> std::io::Result<()> {
    writer.write_all(&reply.head).await?;
    writer.write_all(&reply.payload).await?;
    if last {
        writer.flush().await?;
    }
    drop(reply.permit);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(length_bytes: u64, hole: bool) -> Extent {
        Extent { length_bytes, hole, zero: hole }
    }

    #[test]
    fn neighbours_of_one_kind_are_one_extent() {
        let extents = vec![extent(4096, true), extent(4096, true), extent(4096, false)];
        assert_eq!(merge(extents, 9), [extent(8192, true), extent(4096, false)]);
    }

    #[test]
    fn the_first_extent_alone_is_as_long_as_it_can_be() {
        let extents = vec![extent(4096, true), extent(4096, true), extent(4096, false)];
        assert_eq!(merge(extents, 1), [extent(8192, true)]);
    }
}
