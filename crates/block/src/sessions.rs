//! One connection for each session of a proxy, or of an iSCSI initiator.
//!
//! A client that lost its connection opens a new one and sends its unanswered requests again. If the
//! old connection's requests could still run then, one of them could overwrite what the new
//! connection wrote after it. So a session's new connection waits until the old one is drained.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio_util::sync::{CancellationToken, DropGuard};

pub type SessionKey = Bytes;

#[derive(Default)]
pub struct SessionTable {
    live: Arc<Mutex<HashMap<SessionKey, Live>>>,
}

struct Live {
    /// Tells the connection to end.
    stop: CancellationToken,
    /// Cancelled when it has ended.
    ended: CancellationToken,
}

/// Held by a connection as long as its requests may run.
pub struct Claim {
    key: SessionKey,
    live: Arc<Mutex<HashMap<SessionKey, Live>>>,
    _ended: DropGuard,
}

impl SessionTable {
    /// Ends the connection that has this session now, and returns when it is drained.
    pub async fn claim(&self, key: SessionKey, stop: &CancellationToken) -> Claim {
        loop {
            let older = {
                let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
                match live.get(&key) {
                    Some(older) => {
                        older.stop.cancel();
                        older.ended.clone()
                    }
                    None => {
                        let ended = CancellationToken::new();
                        live.insert(key.clone(), Live { stop: stop.clone(), ended: ended.clone() });
                        let live = self.live.clone();
                        return Claim { key, live, _ended: ended.drop_guard() };
                    }
                }
            };
            older.cancelled().await;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Removed before `_ended` is cancelled: whoever waits for that finds the place free.
        self.live.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    #[tokio::test]
    async fn a_session_s_new_connection_waits_for_the_end_of_the_old_one() {
        let table = SessionTable::default();
        let (old_stop, new_stop) = (CancellationToken::new(), CancellationToken::new());
        let old = table.claim("key".into(), &old_stop).await;
        let mut claiming = Box::pin(table.claim("key".into(), &new_stop));
        let mut context = Context::from_waker(Waker::noop());
        assert!(claiming.as_mut().poll(&mut context).is_pending());
        assert!(old_stop.is_cancelled());
        drop(old);
        let new = claiming.await;
        assert!(!new_stop.is_cancelled());
        drop(new);
    }
}
