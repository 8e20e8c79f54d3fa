//! Runs one session, in one task: [`perigee_block::stream::connection`].
//!
//! [`run`] returns only when no task of the session runs any more, whatever has ended it. Then the socket is
//! closed, and another session may replace this one.

use std::sync::Arc;

use perigee_block::stream::connection;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::batch::Batch;
use super::session::{Attached, Session};
use super::{ConnectionError, Shared};

/// Runs a session, and returns when none of its tasks runs any more.
pub async fn run<S>(
    stream: S,
    mut session: Session,
    shared: Arc<Shared>,
    stop: CancellationToken,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (attached, held) = match session.attached.take() {
        Some(Attached { disk, place, claim, login }) => (Some((disk, place)), Some((claim, login))),
        None => (None, None),
    };
    let batch = Batch::new(shared, session, attached);
    let ended = connection::run(stream, batch, &stop).await;
    drop(held);
    ended
}
