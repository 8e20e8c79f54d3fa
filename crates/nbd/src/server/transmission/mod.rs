//! Runs the requests of one connection, in one task.
//!
//! | stage | module |
//! |---|---|
//! | how connections share a thread | [`perigee_block::stream::connection`] |
//! | bytes to frames | [`perigee_block::stream::input`] |
//! | frames to answers, for requests that need no waiting | `batch` |
//! | requests that wait for a disk, another host or a lock | `waiting` |
//! | answers to bytes, many in one write | [`perigee_block::stream::output`] |
//!
//! The requests in flight of a connection are limited, and after some work it yields to others.
//!
//! A flush runs in its own task. It covers all writes that were answered before it on any connection,
//! because an answer is sent only after its write has returned from the device.
//!
//! [`run`] returns only when no request of the connection runs any more, whatever has ended it. Then the
//! socket is closed and the session's claim is dropped.

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
    let Agreed { export, rules, claim, login, admission: _admission, end: _ } = agreed;
    let requests = Requests::new(Measured::new(export.device, export.counters), rules);
    let ended = connection::run(stream, requests, &stop).await;
    drop((claim, login));
    ended
}
