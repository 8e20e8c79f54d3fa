//! Runs a connection in one task: reads frames, answers them, waits, and yields to other connections.
//!
//! ```text
//!            +---------------------- collect finished requests <--------+
//!            v                                                          |
//! socket -> input -> batch: answer at once, or start a task to wait ----+-> output -> socket
//! ```
//!
//! A batch consists of all frames of one read of the socket. Its answers are sent with one write. If the
//! peer does not receive its answers, no more frames are taken from it.
//!
//! A protocol implements [`Exchange`], which takes one frame at a time. The driver does everything else.
//! It returns only when no request of the connection runs any more, whatever has ended the connection.

use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Interval, MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;

use super::input::{Frame, Framing, Input};
use super::output::Output;
use crate::device::Device;
use crate::measured::Measured;

/// When the server stops, it waits this long for requests to other hosts, and for peers that are slow to
/// receive their last answers.
pub const DRAIN_MAX: Duration = Duration::from_secs(3);
/// The cost of one frame in addition to its bytes, in bytes of the budget.
const FRAME_COST_BYTES: usize = 4 << 10;
/// The work that a connection does before it yields to others.
const BUDGET_BYTES: usize = 4 << 20;

/// The result of taking the first frame of the input.
pub enum Taken {
    /// It is answered, or its work has begun, and it is removed.
    Done {
        /// The bytes that this has moved, which count against the budget of the connection's turn.
        cost_bytes: usize,
    },
    /// It stays in the input until answers are sent or work has ended.
    Full,
    /// The peer has ended the connection with it.
    Goodbye,
}

/// One connection's side of a protocol.
pub trait Exchange {
    /// The format of the peer's frames.
    type Framing: Framing;
    /// The reason why a connection ends.
    type Error: From<io::Error> + From<<Self::Framing as Framing>::Error>;

    /// As long as more frames come, up to this many bytes of answers wait for those of the next batch.
    const HELD_BYTES_MAX: usize = 0;

    /// The bytes that the peer has sent and that were not taken yet.
    fn input(&mut self) -> &mut Input<Self::Framing>;

    /// The answers that the peer has not received yet.
    fn output(&mut self) -> &mut Output;

    /// The device that the peer uses, if it has opened one.
    fn device(&self) -> Option<&Measured>;

    /// Answers the first frame of the input, or starts its work. `now` is the start of its batch.
    ///
    /// # Errors
    /// The reason for which the connection has to end.
    fn take(
        &mut self,
        frame: Frame<<Self::Framing as Framing>::Head>,
        now: Instant,
    ) -> Result<Taken, Self::Error>;

    /// Ready when a waiting request has ended and its answer is in the output.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>>;

    /// Whether no waiting request is running.
    fn is_idle(&self) -> bool;

    /// The error with which the connection ends if a frame's work panics.
    fn panicked() -> Self::Error;

    /// A peer that is silent for this long is asked to answer, and has the same time to do so.
    fn silence_max(&self) -> Option<Duration> {
        None
    }

    /// Asks the peer to answer, to find out whether it is alive.
    fn ask(&mut self) {}

    /// Aborts requests that another session wants to abort. Returns whether there were any.
    fn poll_aborts(&mut self, _cx: &mut Context<'_>) -> bool {
        false
    }

    /// Called when no more frames are taken. `because` is the reason if the peer has not ended the connection
    /// itself. Returns whether the peer can still receive the output.
    fn close(&mut self, because: Option<&Self::Error>) -> bool {
        because.is_none()
    }
}

/// Runs a connection, and returns when none of its requests runs any more.
///
/// # Errors
/// The reason why the connection ended, if its peer did not end it.
pub async fn run<S, E>(stream: S, exchange: E, stop: &CancellationToken) -> Result<(), E::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
    E: Exchange,
{
    let silence = exchange.silence_max().map(Silence::new);
    let budget_bytes = BUDGET_BYTES;
    let (ended, hears) = (false, true);
    let mut connection = Connection { stream, exchange, budget_bytes, ended, hears, silence };
    let ended = connection.converse(stop).await;
    connection.hears = connection.exchange.close(ended.as_ref().err());
    if stop.is_cancelled() {
        // The peer continues with another connection, and repeats its unanswered requests there.
        let _unanswered = tokio::time::timeout(DRAIN_MAX, connection.drain()).await;
    }
    if let Some(device) = connection.exchange.device() {
        device.hang_up();
    }
    connection.drain().await;
    ended
}

/// How a batch ended.
#[derive(PartialEq, Eq)]
enum Batched {
    /// The connection has to wait for its socket or for requests.
    Waits,
    /// There are more frames, but other connections run first.
    BudgetSpent,
    /// The peer has ended the connection or has gone.
    Over,
}

struct Connection<S, E> {
    stream: S,
    exchange: E,
    /// The rest of the budget.
    budget_bytes: usize,
    /// The peer has closed its sending side.
    ended: bool,
    /// The peer still receives answers, as far as is known.
    hears: bool,
    silence: Option<Silence>,
}

impl<S: AsyncRead + AsyncWrite + Unpin, E: Exchange> Connection<S, E> {
    /// Serves until the peer ends the connection or goes away, or the server stops.
    async fn converse(&mut self, stop: &CancellationToken) -> Result<(), E::Error> {
        let mut stopped = pin!(stop.cancelled());
        loop {
            let batched = self.batch()?;
            if batched == Batched::Over {
                return Ok(());
            }
            let waits = batched == Batched::Waits;
            let stops = poll_fn(|cx| {
                if stopped.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Ok(true));
                }
                let moved = self.poll_moved(cx).map_ok(|()| false);
                if moved.is_pending() {
                    self.budget_bytes = BUDGET_BYTES;
                }
                if moved.is_pending() && !waits { Poll::Ready(Ok(false)) } else { moved }
            })
            .await?;
            if stops {
                return Ok(());
            }
            if !waits {
                self.budget_bytes = BUDGET_BYTES;
                tokio::task::yield_now().await;
            }
        }
    }

    /// Waits until no request runs, and sends the answers as long as the peer receives them.
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

    /// Takes complete frames from the input and answers or starts them.
    fn batch(&mut self) -> Result<Batched, E::Error> {
        let Some(first) = self.exchange.input().first()? else { return Ok(self.needs_input()) };
        let now = self.exchange.device().map_or_else(Instant::now, Measured::begin_batch);
        // A panic must not close the socket before the connection is drained.
        let batched = catch_unwind(AssertUnwindSafe(|| self.take_all(first, now)));
        if let Some(device) = self.exchange.device() {
            device.end_batch(now);
        }
        batched.unwrap_or_else(|_| Err(E::panicked()))
    }

    fn take_all(
        &mut self,
        first: Frame<<E::Framing as Framing>::Head>,
        now: Instant,
    ) -> Result<Batched, E::Error> {
        let mut next = Some(first);
        while let Some(frame) = next {
            if self.budget_bytes == 0 {
                return Ok(Batched::BudgetSpent);
            }
            match self.exchange.take(frame, now)? {
                Taken::Done { cost_bytes } => {
                    let cost_bytes = FRAME_COST_BYTES + cost_bytes;
                    self.budget_bytes = self.budget_bytes.saturating_sub(cost_bytes);
                }
                Taken::Full => return Ok(Batched::Waits),
                Taken::Goodbye => return Ok(Batched::Over),
            }
            next = self.exchange.input().first()?;
        }
        Ok(self.needs_input())
    }

    /// The result when the input has no complete frame. Most programs close the socket without a last message.
    fn needs_input(&self) -> Batched {
        if self.ended { Batched::Over } else { Batched::Waits }
    }

    /// Ready when bytes were received or sent, or when a waiting request has ended.
    fn poll_moved(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), E::Error>> {
        // This comes first, because it must not count output that is sent only now.
        let mut moved = self.poll_silence(cx)?;
        while self.exchange.output().accepts() {
            match self.exchange.poll_ended(cx)? {
                Poll::Ready(()) => moved = true,
                Poll::Pending => break,
            }
        }
        moved |= self.exchange.poll_aborts(cx);
        let holds = self.exchange.output().unsent_bytes() <= E::HELD_BYTES_MAX;
        if !holds {
            moved |= self.poll_send(cx)?;
        }
        if self.poll_fill(cx)? {
            if holds {
                return Poll::Ready(Ok(()));
            }
            moved = true;
        }
        if holds {
            moved |= self.poll_send(cx)?;
        }
        if moved { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Returns whether all of the output was just sent.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Result<bool, E::Error> {
        let output = self.exchange.output();
        let (unsent_bytes, was_sent) = (output.unsent_bytes(), output.is_sent());
        let sent = output.poll_send(Pin::new(&mut self.stream), cx)?;
        if output.unsent_bytes() < unsent_bytes
            && let Some(silence) = &mut self.silence
        {
            silence.took();
        }
        Ok(!was_sent && sent.is_ready())
    }

    /// Returns whether bytes were received, or the end of the stream.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Result<bool, E::Error> {
        if self.ended || !self.exchange.input().has_room() {
            return Ok(false);
        }
        let filled = self.exchange.input().poll_fill(Pin::new(&mut self.stream), cx)?;
        self.ended = matches!(filled, Poll::Ready(0));
        if filled.is_ready()
            && let Some(silence) = &mut self.silence
        {
            silence.said();
        }
        Ok(filled.is_ready())
    }

    /// Asks a silent peer to answer, and fails if it does not.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Result<bool, E::Error> {
        let Some(silence) = &mut self.silence else { return Ok(false) };
        // Polled until it is pending, because only then the next tick wakes this task.
        let mut asks = false;
        while silence.ticks.poll_tick(cx).is_ready() {
            if std::mem::take(&mut silence.moved) {
                silence.asked = false;
            } else if silence.asked || !self.exchange.output().is_empty() {
                let silent = io::Error::new(io::ErrorKind::TimedOut, "the other side is silent");
                return Err(silent.into());
            } else {
                silence.asked = true;
                self.exchange.ask();
                asks = true;
            }
        }
        Ok(asks)
    }

    /// Ready when no request runs any more, and the answers are sent if the peer receives them.
    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.hears {
                let sent = self.exchange.output().poll_send(Pin::new(&mut self.stream), cx);
                self.hears = !matches!(sent, Poll::Ready(Err(_)));
            }
            if self.hears && !self.exchange.output().accepts() {
                return Poll::Pending;
            }
            let aborted = self.exchange.poll_aborts(cx);
            if self.exchange.poll_ended(cx).is_pending() && !aborted {
                break;
            }
            if !self.hears {
                *self.exchange.output() = Output::default();
            }
        }
        let done = !self.hears || self.exchange.output().is_sent();
        if done && self.exchange.is_idle() { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// Finds out whether the peer is alive.
struct Silence {
    ticks: Interval,
    /// Something was received from the peer, or received by it, since the last tick.
    moved: bool,
    /// The peer was asked, and has not answered yet.
    asked: bool,
}

impl Silence {
    fn new(silence_max: Duration) -> Self {
        let mut ticks = interval_at(tokio::time::Instant::now() + silence_max, silence_max);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, moved: true, asked: false }
    }

    fn said(&mut self) {
        self.moved = true;
    }

    /// The peer has received something. The question itself does not count.
    fn took(&mut self) {
        self.moved |= !self.asked;
    }
}
