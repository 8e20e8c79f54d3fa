//! Runs the requests of one connection, in one task.
//!
//! | stage | module |
//! |---|---|
//! | how connections share a thread | [`perigee_block::stream::connection`] |
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

use perigee_block::measured::Measured;
use perigee_block::stream::connection;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::ConnectionError;
use super::negotiation::Agreed;
use batch::Requests;

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
    let requests = Requests::new(Measured::new(export.device, export.counters), rules);
    let ended = connection::run(stream, requests, &stop).await;
    drop((claim, login));
    ended
}
