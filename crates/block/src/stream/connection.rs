//! Runs a connection in one task: takes what came, answers, waits, and lets others run.
//!
//! ```text
//!            +-------------------------- take what has ended <----------+
//!            v                                                          |
//! socket -> input -> batch: answer at once, or start what has to wait --+-> output -> socket
//! ```
//!
//! A batch is all that one read of the socket brought; the answers leave with one write. When the
//! peer does not take its answers, nothing more is taken from it.
//!
//! A protocol is an [`Exchange`]: it takes one frame at a time and says what became of it. The
//! driver does everything else, and returns only when nothing of the connection runs any more,
//! whatever ended it.

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

/// When the server stops, what waits for another host gets this long, and so do peers that are slow
/// to take their last answers.
pub const DRAIN_MAX: Duration = Duration::from_secs(3);
/// What one frame costs besides its bytes, in bytes of the budget.
const FRAME_COST_BYTES: usize = 4 << 10;
/// How much work a connection does before it lets others run.
const BUDGET_BYTES: usize = 4 << 20;

/// What became of the first frame of the input.
pub enum Taken {
    /// It is answered, or its work has begun, and it is removed. `cost_bytes`: what it moved.
    Done { cost_bytes: usize },
    /// It stays: answers have to be sent, or work has to end, before it is taken.
    Full,
    /// The peer said goodbye with it.
    Goodbye,
}

/// One connection's side of a protocol.
pub trait Exchange {
    type Framing: Framing;
    type Error: From<io::Error> + From<<Self::Framing as Framing>::Error>;

    /// As long as more comes, so many bytes of answers wait for those of the next batch.
    const HELD_BYTES_MAX: usize = 0;

    fn input(&mut self) -> &mut Input<Self::Framing>;

    fn output(&mut self) -> &mut Output;

    /// What the peer works on, if it works on anything.
    fn device(&self) -> Option<&Measured>;

    /// Answers the first frame of the input, or starts its work. `now`: when its batch began.
    ///
    /// # Errors
    /// When the connection has to end.
    fn take(
        &mut self,
        frame: Frame<<Self::Framing as Framing>::Head>,
        now: Instant,
    ) -> Result<Taken, Self::Error>;

    /// Ready when something that had to wait has ended, and its answer is in the output.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>>;

    /// Whether nothing runs that had to wait.
    fn is_idle(&self) -> bool;

    /// What the connection ends with when a frame's work panicked.
    fn panicked() -> Self::Error;

    /// A peer that says nothing for so long is asked whether it is there, and has as long to
    /// answer.
    fn silence_max(&self) -> Option<Duration> {
        None
    }

    /// Asks the peer whether it is there.
    fn ask(&mut self) {}

    /// Ends what others want to be ended. True when there was something.
    fn poll_aborts(&mut self, _cx: &mut Context<'_>) -> bool {
        false
    }

    /// No more frames are taken. `because`: why, if the peer has not ended the connection. True
    /// when the peer still hears what is in the output.
    fn close(&mut self, because: Option<&Self::Error>) -> bool {
        because.is_none()
    }
}

/// Returns when nothing of the connection runs any more.
///
/// # Errors
/// Why the connection ended, when its peer did not end it.
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
        // The peer goes on with another connection. What is not answered by then it sends again.
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
    /// Nothing more is possible until something moves.
    Waits,
    /// There is more to take, but other connections run first.
    BudgetSpent,
    /// The peer said goodbye or went away.
    Over,
}

struct Connection<S, E> {
    stream: S,
    exchange: E,
    /// What is left of the budget until others run.
    budget_bytes: usize,
    /// The peer has sent its last byte.
    ended: bool,
    /// The peer still takes answers, as far as is known.
    hears: bool,
    silence: Option<Silence>,
}

impl<S: AsyncRead + AsyncWrite + Unpin, E: Exchange> Connection<S, E> {
    /// Until the peer says goodbye or goes away, or the server stops.
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

    /// Waits until nothing of the connection runs, and sends the answers as long as the peer takes
    /// them.
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

    /// Takes whole frames from the input and answers or starts them.
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

    /// Most programs end without a goodbye.
    fn needs_input(&self) -> Batched {
        if self.ended { Batched::Over } else { Batched::Waits }
    }

    /// Ready when something moved: bytes came or left, or what was waited for has ended.
    fn poll_moved(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), E::Error>> {
        // First: it judges what the peer has not taken, not what it gets only now.
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

    /// Whether all that was in the output is sent now.
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

    /// Whether bytes came, or their end.
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

    /// Asks a peer that was silent for long, and gives one up that does not answer.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Result<bool, E::Error> {
        let Some(silence) = &mut self.silence else { return Ok(false) };
        // Until it is pending: only then the next tick wakes this task.
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

    /// Ready when nothing runs any more, and the answers are sent as far as the peer hears.
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

/// Whether the peer is there.
struct Silence {
    ticks: Interval,
    /// Something came, or was taken, since the last tick.
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

    /// That the question itself was sent says nothing.
    fn took(&mut self) {
        self.moved |= !self.asked;
    }
}
