//! Runs the requests of one connection, in one task.
//!
//! ```text
//!            +-------------------------- take replies that are ready <--+
//!            v                                                          |
//! socket -> input -> batch: check, then answer at once or start a task -+-> output -> socket
//! ```
//!
//! | stage | module |
//! |---|---|
//! | bytes to frames | [`crate::stream::input`] |
//! | frames to answers, at once where nothing has to be waited for | `batch` |
//! | requests that wait for a disk, another host or a lock | `waiting` |
//! | answers to bytes, many in one write | [`crate::stream::output`] |
//!
//! A batch is all the requests that one read of the socket brought; their answers leave with one
//! write. When the client does not take its answers, no more requests are taken. What a connection
//! may have in flight is bounded, and after some work it lets other connections run.
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

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::ConnectionError;
use super::negotiation::Agreed;
use batch::{Batch, BatchEnd};

/// When the server stops, requests that wait for another host get this long, and so do clients
/// that are slow to take their last answers.
const DRAIN_MAX: Duration = Duration::from_secs(3);

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
    let ended = connection.transmit(&stop).await;
    connection.hears &= ended.is_ok();
    if stop.is_cancelled() {
        // The client goes on with another connection. What is not answered by then it sends again.
        let _unanswered = tokio::time::timeout(DRAIN_MAX, connection.drain()).await;
    }
    device.hang_up();
    connection.drain().await;
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

/// What came of waiting.
#[derive(PartialEq, Eq)]
enum Event {
    /// There may be work now.
    Moved,
    Stopped,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Until the client says goodbye or goes away, or the server stops.
    async fn transmit(&mut self, stop: &CancellationToken) -> Result<(), ConnectionError> {
        let mut stopped = pin!(stop.cancelled());
        loop {
            let end = self.batch.run()?;
            // Most programs end without a goodbye.
            if end == BatchEnd::Disconnect || end == BatchEnd::NeedsInput && self.ended {
                return Ok(());
            }
            let waits = end != BatchEnd::TurnOver;
            let event = poll_fn(|cx| {
                let event = self.poll_event(stopped.as_mut(), cx);
                if event.is_pending() {
                    self.batch.new_turn();
                }
                if event.is_pending() && !waits { Poll::Ready(Ok(Event::Moved)) } else { event }
            })
            .await?;
            if event == Event::Stopped {
                return Ok(());
            }
            if !waits {
                self.batch.new_turn();
                tokio::task::yield_now().await;
            }
        }
    }

    fn poll_event(
        &mut self,
        stopped: Pin<&mut impl Future<Output = ()>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Event, ConnectionError>> {
        if stopped.poll(cx).is_ready() {
            return Poll::Ready(Ok(Event::Stopped));
        }
        let mut moved = self.poll_replies(cx)?;
        let unsent = !self.batch.output.is_empty();
        let sent = self.batch.output.poll_send(Pin::new(&mut self.stream), cx)?;
        moved |= unsent && sent.is_ready();
        if !self.ended && self.batch.input.has_room() {
            let filled = self.batch.input.poll_fill(Pin::new(&mut self.stream), cx)?;
            self.ended = matches!(filled, Poll::Ready(0));
            moved |= filled.is_ready();
        }
        if moved { Poll::Ready(Ok(Event::Moved)) } else { Poll::Pending }
    }

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

    /// Waits until no request runs, and sends the answers as long as the client takes them.
    async fn drain(&mut self) {
        let mut patience = pin!(tokio::time::sleep(DRAIN_MAX));
        poll_fn(|cx| {
            if patience.as_mut().poll(cx).is_ready() {
                self.hears = false;
            }
            self.poll_drained(cx)
        })
        .await;
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
        let done = !self.hears || self.batch.output.is_empty();
        if done && self.batch.waiting.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }
}
