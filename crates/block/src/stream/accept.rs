//! Accepts connections, and ends only when all of them have ended.

use std::io;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The pause after a failed accept, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket.
pub trait Accept: Send + Sync + 'static {
    /// One new connection, with what the listener knows about it.
    type Accepted: Send;

    /// Waits for the next connection. It must lose none when it is dropped before it is ready.
    ///
    /// # Errors
    /// The reason why this connection can't be accepted. [`serve`] tries again after a pause.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Accepted>> + Send;
}

/// Accepts connections until `stop`, and returns when every connection is drained. `admit` returns the
/// future that serves a connection, or `None` to close it.
pub async fn serve<L, A, C>(
    protocol: &'static str,
    listeners: Vec<L>,
    admit: A,
    stop: CancellationToken,
) where
    L: Accept,
    A: Fn(L::Accepted) -> Option<C> + Clone + Send + 'static,
    C: Future<Output = ()> + Send + 'static,
{
    let mut accepting = JoinSet::new();
    for listener in listeners {
        accepting.spawn(accept_all(protocol, listener, admit.clone(), stop.clone()));
    }
    while let Some(ended) = accepting.join_next().await {
        if let Err(error) = ended {
            tracing::error!(%error, "a listener for {protocol} ended");
        }
    }
}

async fn accept_all<L, A, C>(protocol: &'static str, listener: L, admit: A, stop: CancellationToken)
where
    L: Accept,
    A: Fn(L::Accepted) -> Option<C>,
    C: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "the task of a connection over {protocol} failed");
                }
            }
            accepted = listener.accept() => match accepted {
                Ok(accepted) => {
                    if let Some(connection) = admit(accepted) {
                        connections.spawn(connection);
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "{protocol} accept");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}
