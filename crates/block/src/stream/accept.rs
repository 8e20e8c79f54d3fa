//! Accepts connections, and ends only when all of them have ended.

use std::io;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// After a failed accept (out of file descriptors) the listener waits this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub trait Accept: Send + Sync + 'static {
    type Accepted: Send;

    fn accept(&self) -> impl Future<Output = io::Result<Self::Accepted>> + Send;
}

/// Serves until `stop`; returns when every connection is drained. `admit` says what becomes of a
/// connection; one that gets `None` is hung up on.
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
            tracing::error!(%error, "an {protocol} listener ended");
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
                    tracing::error!(%error, "an {protocol} connection's task failed");
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
