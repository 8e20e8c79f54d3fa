//! Requests that can't be answered at once: each runs in a task until its reply is ready.

use std::num::NonZeroUsize;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use perigee_block::device::{Device, IoError};
use perigee_block::measured::Measured;
use perigee_block::trace;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::super::super::wire::{Answer, AnswerTo, Dialect, Errno, lease_byte, lease_offset};
use super::super::ConnectionError;
use super::super::command::Command;
use super::super::contexts::describe;

const REQUESTS_MAX: usize = 64;
/// No further request is started while this many bytes of payload are in flight.
const PAYLOAD_BYTES_MAX: usize = 64 << 20;

/// Half of the CPUs compress. The threads on which this runs also read and write the disks of this host's VMs.
static COMPRESSING: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
    let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    Arc::new(Semaphore::new((cpus / 2).max(1)))
});
/// How long an answer waits for its turn to be compressed.
const COMPRESS_WAIT_MAX: Duration = Duration::from_millis(200);

/// An encoded answer that is ready to be sent.
pub struct Reply {
    /// What is sent, in this order.
    pub pieces: [Bytes; 3],
    /// The request's share of the payload in flight.
    share_bytes: usize,
}

/// The requests of one connection that were not answered at once. Their number and the bytes of their payload are
/// bounded.
pub struct Waiting {
    device: Arc<Measured>,
    dialect: Dialect,
    /// `None`: the request is not answered, because the volume has another home now.
    tasks: JoinSet<Option<Reply>>,
    payload_bytes: usize,
}

impl Waiting {
    /// No request waits.
    pub fn new(device: Arc<Measured>, dialect: Dialect) -> Self {
        Self { device, dialect, tasks: JoinSet::new(), payload_bytes: 0 }
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Whether no further request is read from the connection until one of these is answered.
    pub fn is_full(&self) -> bool {
        self.tasks.len() >= REQUESTS_MAX || self.payload_bytes >= PAYLOAD_BYTES_MAX
    }

    /// Starts a request that was read from the socket at `since`.
    pub fn start(&mut self, to: AnswerTo, command: Command, payload: Bytes, since: Instant) {
        let share_bytes = match command {
            Command::Read { length_bytes, .. } => length_bytes as usize,
            _ => payload.len(),
        };
        self.payload_bytes += share_bytes;
        let (device, dialect) = (self.device.clone(), self.dialect);
        self.tasks.spawn(async move {
            let work = execute(&*device, command, payload);
            let answer = match trace::queued(since, work).await {
                Err(IoError::Moved) => return None,
                answer => answer.unwrap_or_else(|error| refusal(&error)),
            };
            Some(Reply { pieces: dialect.encode_answer(to, answer), share_bytes })
        });
    }

    /// The next reply, in the order in which requests end. Pending when there is no request.
    ///
    /// # Errors
    /// When a request will never be answered: its task panicked, or the volume has another home now.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reply, ConnectionError>> {
        if self.tasks.is_empty() {
            return Poll::Pending;
        }
        match ready!(self.tasks.poll_join_next(cx)) {
            Some(Ok(None)) => Poll::Ready(Err(ConnectionError::Moved)),
            Some(Ok(Some(reply))) => {
                self.payload_bytes -= reply.share_bytes;
                Poll::Ready(Ok(reply))
            }
            Some(Err(error)) => Poll::Ready(Err(ConnectionError::Panicked(error.to_string()))),
            None => Poll::Pending,
        }
    }
}

async fn execute(device: &dyn Device, command: Command, payload: Bytes) -> Result<Answer, IoError> {
    match command {
        Command::Read { offset, length_bytes, compressed } => {
            let data = device.read(offset, length_bytes).await?;
            return Ok(if compressed {
                compress(&COMPRESSING, offset, data).await
            } else {
                Answer::Data { offset, data }
            });
        }
        Command::Status { offset, length_bytes, only_one, contexts } => {
            let told = describe(device, contexts, offset, length_bytes, only_one).await?;
            return Ok(Answer::Status(told));
        }
        Command::Lease(ask) => {
            let data = Bytes::from(vec![lease_byte(device.lease(ask).await?)]);
            return Ok(Answer::Data { offset: lease_offset(ask), data });
        }
        Command::Write { offset, fua } => device.write(offset, payload, fua).await?,
        Command::Flush => device.flush().await?,
        Command::Zero { offset, length_bytes, how, fua } => {
            device.zero(offset, length_bytes, how, fua).await?;
        }
        Command::Cache { offset, length_bytes } => device.prefetch(offset, length_bytes).await?,
    }
    Ok(Answer::Done)
}

/// Compresses the answer to a read. It is sent as it is if compression makes it shorter by less than an eighth, or if
/// it would wait for too long.
async fn compress(permits: &Arc<Semaphore>, offset: u64, data: Bytes) -> Answer {
    let began = Instant::now();
    let permit = tokio::time::timeout(COMPRESS_WAIT_MAX, Arc::clone(permits).acquire_owned());
    let Ok(Ok(permit)) = permit.await else { return Answer::Data { offset, data } };
    let original = data.clone();
    // The wait for a free thread counts too, so that a busy host is asked for fewer compressed reads.
    let work = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        lz4_flex::block::compress(&original)
    });
    let length_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
    match work.await {
        Ok(packed) if packed.len() < data.len() - data.len() / 8 => {
            let work_us = u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX);
            Answer::Compressed { offset, length_bytes, work_us, data: packed.into() }
        }
        _ => Answer::Data { offset, data },
    }
}

/// The error that the client gets, with the reason in words for clients that take structured replies.
pub fn refusal(error: &IoError) -> Answer {
    Answer::Error(Errno::from(error), error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reads_are_sent_as_they_are_while_others_keep_the_cpus_busy_with_compression() {
        let (permits, data) = (Arc::new(Semaphore::new(1)), Bytes::from(vec![7; 1 << 16]));
        let compressed = async || compress(&permits, 0, data.clone()).await;
        assert!(matches!(compressed().await, Answer::Compressed { .. }));
        let busy = permits.acquire().await.expect("a permit");
        match compressed().await {
            Answer::Data { data: sent, .. } => assert_eq!(sent, data),
            _ => panic!("nobody had time to compress it"),
        }
        drop(busy);
        assert!(matches!(compressed().await, Answer::Compressed { .. }));
    }
}
