//! Runs the requests of one connection, in one task.
//!
//! | stage | module |
//! |---|---|
//! | whose turn it is | [`perigee_block::stream::turns`] |
//! | bytes to frames | [`perigee_block::stream::input`] |
//! | frames to answers, at once where nothing has to be waited for | `batch` |
//! | requests that wait for a disk, another host or a lock | `waiting` |
//! | answers to bytes, many in one write | [`perigee_block::stream::output`] |
//!
//! What a connection may have in flight is bounded, and after some work it lets others run.
//!
//! A flush runs in a task of its own. It covers what was answered before it on any connection,
//! since an answer is written only after its write has returned from the device.
//!
//! [`run`] returns only when no request of the connection runs any more, whatever ended it. Then
//! the socket is closed, and the session's claim is given back.

mod batch;
mod waiting;

#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::task::{Context, Poll};

use perigee_block::stream::turns::{self, Batched, DRAIN_MAX, Exchange};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::ConnectionError;
use super::negotiation::Agreed;
use batch::{Batch, BatchEnd};

/// Returns when no request of the connection runs any more.
pub async fn run<S>(
    stream: S,
    agreed: Agreed,
    stop: CancellationToken,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Agreed { export, rules, claim, login } = agreed;
    let device = export.device.clone();
    let batch = Batch::new(export.device, export.counters, rules);
    let mut connection = Connection { stream, batch, ended: false, hears: true };
    let ended = turns::run(&mut connection, &stop).await;
    connection.hears &= ended.is_ok();
    if stop.is_cancelled() {
        // The client goes on with another connection. What is not answered by then it sends again.
        let _unanswered = tokio::time::timeout(DRAIN_MAX, turns::drain(&mut connection)).await;
    }
    device.hang_up();
    turns::drain(&mut connection).await;
    drop(connection);
    drop((claim, login));
    ended
}

struct Connection<S> {
    stream: S,
    batch: Batch,
    /// The client has sent its last byte.
    ended: bool,
    /// The client still takes answers, as far as is known.
    hears: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Exchange for Connection<S> {
    type Error = ConnectionError;

    fn batch(&mut self) -> Result<Batched, ConnectionError> {
        Ok(match self.batch.run()? {
            BatchEnd::Disconnect => Batched::Over,
            // Most programs end without a goodbye.
            BatchEnd::NeedsInput if self.ended => Batched::Over,
            BatchEnd::NeedsInput | BatchEnd::Full => Batched::Waits,
            BatchEnd::TurnOver => Batched::TurnOver,
        })
    }

    fn poll_moved(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        let mut moved = self.poll_replies(cx)?;
        let unsent = !self.batch.output.is_sent();
        let sent = self.batch.output.poll_send(Pin::new(&mut self.stream), cx)?;
        moved |= unsent && sent.is_ready();
        if !self.ended && self.batch.input.has_room() {
            let filled = self.batch.input.poll_fill(Pin::new(&mut self.stream), cx)?;
            self.ended = matches!(filled, Poll::Ready(0));
            moved |= filled.is_ready();
        }
        if moved { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn new_turn(&mut self) {
        self.batch.new_turn();
    }

    fn give_up(&mut self) {
        self.hears = false;
    }

    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.hears {
                let stream = Pin::new(&mut self.stream);
                self.hears =
                    !matches!(self.batch.output.poll_send(stream, cx), Poll::Ready(Err(_)));
            }
            if self.hears && !self.batch.output.accepts() {
                return Poll::Pending;
            }
            match self.batch.waiting.poll_next(cx) {
                Poll::Ready(Ok(reply)) if self.hears => {
                    self.batch.output.push(reply.head, reply.payload);
                }
                Poll::Ready(_) => {}
                Poll::Pending => break,
            }
        }
        let done = !self.hears || self.batch.output.is_sent();
        if done && self.batch.waiting.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl<S> Connection<S> {
    /// Moves the replies of waiting requests into the output. True when there was one.
    fn poll_replies(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionError> {
        let mut moved = false;
        while self.batch.output.accepts() {
            match self.batch.waiting.poll_next(cx) {
                Poll::Ready(reply) => {
                    let reply = reply?;
                    self.batch.output.push(reply.head, reply.payload);
                    moved = true;
                }
                Poll::Pending => break,
            }
        }
        Ok(moved)
    }
}
