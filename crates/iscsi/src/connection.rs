//! Runs one session, in one task: [`perigee_block::stream::turns`], with aborts and pings between.
//!
//! What a session may have in flight is bounded, and after some work it lets others run.
//!
//! An initiator that is silent is asked whether it is there, and dropped when it does not answer.
//!
//! [`run`] returns only when no task of the session runs any more, whatever ended it. Then the socket
//! is closed, and another session may take this one's place.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use perigee_block::stream::turns::{self, Batched, DRAIN_MAX, Exchange};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;

use super::batch::{Batch, BatchEnd};
use super::requests::Requests;
use super::session::Session;
use super::unit::Abort;
use super::{ConnectionError, Shared};

/// Returns when no task of the session runs any more.
pub async fn run<S>(
    stream: S,
    session: Session,
    shared: Arc<Shared>,
    stop: CancellationToken,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let device = session.disk().map(|disk| disk.device.clone());
    let silence_max = shared.silence_max;
    let requests = Requests::new(shared, session.client.clone(), session.portal);
    let batch = Batch::new(&session, requests);
    // A session for discovery has nobody who could abort its tasks.
    let (aborts, claim) = match session.attached {
        Some(attached) => (Aborts::Of(attached.place), Some((attached.claim, attached.login))),
        None => (Aborts::None, None),
    };
    let mut ticks = interval_at(tokio::time::Instant::now() + silence_max, silence_max);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut connection = Connection {
        stream,
        batch,
        aborts,
        ended: false,
        hears: true,
        ticks,
        life: Life { moved: true, asked: false },
    };
    let ended = turns::run(&mut connection, &stop).await;
    connection.hears &= ended.is_ok() || is_told(&ended);
    connection.batch.transfers.abort_all();
    if stop.is_cancelled() {
        // The initiator goes on with another session. What is not answered by then it sends again.
        let _unanswered = tokio::time::timeout(DRAIN_MAX, turns::drain(&mut connection)).await;
    }
    if let Some(device) = device {
        device.hang_up();
    }
    turns::drain(&mut connection).await;
    drop(connection);
    drop(claim);
    ended
}

/// As long as more comes, a few short answers wait for those of the next batch: of long writes each
/// read of the socket brings about one, and sending its answer takes a tenth of what it costs.
const HELD_BYTES_MAX: usize = 256;

/// Whether the initiator is still to hear why the connection ends.
fn is_told(ended: &Result<(), ConnectionError>) -> bool {
    matches!(ended, Err(ConnectionError::Framing(_)))
}

enum Aborts {
    None,
    Of(super::unit::Place),
}

impl Aborts {
    fn receiver(&mut self) -> Option<&mut mpsc::UnboundedReceiver<Abort>> {
        match self {
            Self::None => None,
            Self::Of(place) => Some(&mut place.aborts),
        }
    }
}

/// Whether the initiator is there.
struct Life {
    /// Something came, or was taken, since the last tick.
    moved: bool,
    /// It was asked, and has not answered yet.
    asked: bool,
}

struct Connection<S> {
    stream: S,
    batch: Batch,
    aborts: Aborts,
    /// The initiator has sent its last byte.
    ended: bool,
    /// The initiator still takes answers, as far as is known.
    hears: bool,
    ticks: Interval,
    life: Life,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Exchange for Connection<S> {
    type Error = ConnectionError;

    fn batch(&mut self) -> Result<Batched, ConnectionError> {
        Ok(match self.batch.run()? {
            BatchEnd::LoggedOut => Batched::Over,
            BatchEnd::NeedsInput if self.ended => Batched::Over,
            BatchEnd::NeedsInput | BatchEnd::Full => Batched::Waits,
            BatchEnd::TurnOver => Batched::TurnOver,
        })
    }

    fn poll_moved(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        // First: it counts what the initiator did not take, not what it gets only now.
        let mut moved = self.poll_tick(cx)?;
        moved |= self.poll_ended(cx)?;
        moved |= self.poll_aborts(cx);
        let unsent = self.batch.answers.output.unsent_bytes();
        if !self.ended && self.batch.input.has_room() {
            let filled = self.batch.input.poll_fill(Pin::new(&mut self.stream), cx)?;
            self.ended = matches!(filled, Poll::Ready(0));
            moved |= filled.is_ready();
            self.life.moved |= filled.is_ready();
            if filled.is_ready() && unsent <= HELD_BYTES_MAX {
                return Poll::Ready(Ok(()));
            }
        }
        let sent = self.batch.answers.output.poll_send(Pin::new(&mut self.stream), cx)?;
        moved |= unsent > 0 && sent.is_ready();
        // That the question itself was sent says nothing.
        let taken = self.batch.answers.output.unsent_bytes() < unsent;
        self.life.moved |= taken && !self.life.asked;
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
                let output = &mut self.batch.answers.output;
                self.hears = !matches!(output.poll_send(stream, cx), Poll::Ready(Err(_)));
            }
            if self.hears && !self.batch.answers.output.accepts() {
                return Poll::Pending;
            }
            let aborted = self.poll_aborts(cx);
            match self.batch.tasks.poll_next(cx) {
                Poll::Ready(Ok(ready)) if self.hears => self.batch.ended(ready),
                Poll::Ready(_) => {}
                Poll::Pending if aborted => {}
                Poll::Pending => break,
            }
        }
        let done = !self.hears || self.batch.answers.output.is_sent();
        if done && self.batch.tasks.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl<S> Connection<S> {
    /// Moves the answers of tasks that have ended into the output. True when there was one.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionError> {
        let mut moved = false;
        while self.batch.answers.output.accepts() {
            match self.batch.tasks.poll_next(cx) {
                Poll::Ready(ready) => {
                    self.batch.ended(ready?);
                    moved = true;
                }
                Poll::Pending => break,
            }
        }
        // Also after those that were aborted, which nobody is told of.
        self.batch.ask_for_data();
        Ok(moved)
    }

    /// Another session, or this one, wants this session's tasks to end.
    fn poll_aborts(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        while let Some(receiver) = self.aborts.receiver()
            && let Poll::Ready(Some(done)) = receiver.poll_recv(cx)
        {
            self.batch.transfers.abort_all();
            self.batch.tasks.abort_all(done);
            moved = true;
        }
        moved
    }

    /// Asks an initiator that was silent for long, and gives one up that does not answer.
    fn poll_tick(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionError> {
        // Until it is pending: only then the next tick wakes this task.
        let mut asks = false;
        while self.ticks.poll_tick(cx).is_ready() {
            if std::mem::take(&mut self.life.moved) {
                self.life.asked = false;
            } else if self.life.asked || !self.batch.answers.output.is_empty() {
                return Err(ConnectionError::Refused("the initiator is silent".into()));
            } else {
                self.life.asked = true;
                self.batch.answers.ping(0);
                asks = true;
            }
        }
        Ok(asks)
    }
}
