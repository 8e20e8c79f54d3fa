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

use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// When the server stops, what waits for another host gets this long, and so do peers that are slow
/// to take their last answers.
pub const DRAIN_MAX: Duration = Duration::from_secs(3);

/// How a batch ended.
#[derive(PartialEq, Eq)]
pub enum Batched {
    /// Nothing more is possible until something moves.
    Waits,
    /// There is more to take, and others come first.
    TurnOver,
    /// The peer said goodbye or went away.
    Over,
}

/// One connection's side of a protocol.
pub trait Exchange {
    type Error;

    /// Takes what is in the input, and answers or starts it.
    fn batch(&mut self) -> Result<Batched, Self::Error>;

    /// Ready when something moved: bytes came or left, or what was waited for has ended.
    fn poll_moved(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>>;

    /// Others had their turn.
    fn new_turn(&mut self);

    /// Ready when nothing runs any more, and the answers are sent as far as the peer hears.
    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()>;

    /// The peer takes no more answers.
    fn give_up(&mut self);
}

/// Until the peer says goodbye or goes away, or the server stops.
pub async fn run<E: Exchange>(exchange: &mut E, stop: &CancellationToken) -> Result<(), E::Error> {
    let mut stopped = pin!(stop.cancelled());
    loop {
        let batched = exchange.batch()?;
        if batched == Batched::Over {
            return Ok(());
        }
        let waits = batched == Batched::Waits;
        let stops = poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(true));
            }
            let moved = exchange.poll_moved(cx).map_ok(|()| false);
            if moved.is_pending() {
                exchange.new_turn();
            }
            if moved.is_pending() && !waits { Poll::Ready(Ok(false)) } else { moved }
        })
        .await?;
        if stops {
            return Ok(());
        }
        if !waits {
            exchange.new_turn();
            tokio::task::yield_now().await;
        }
    }
}

/// Waits until nothing of the connection runs, and sends the answers as long as the peer takes them.
pub async fn drain<E: Exchange>(exchange: &mut E) {
    let mut patience = pin!(tokio::time::sleep(DRAIN_MAX));
    poll_fn(|cx| {
        if patience.as_mut().poll(cx).is_ready() {
            exchange.give_up();
        }
        exchange.poll_drained(cx)
    })
    .await;
}
