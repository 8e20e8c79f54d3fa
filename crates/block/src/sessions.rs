//! One connection for each session of a proxy, or of an iSCSI initiator.
//!
//! A client that lost its connection opens a new one and sends its unanswered requests again. If the
//! old connection's requests could still run then, one of them could overwrite what the new
//! connection wrote after it. So a session's new connection waits until the old one is drained.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Which session a connection is for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SessionKey {
    owner: Bytes,
    /// Which start of the owner's process; empty where that is not told.
    start: Bytes,
    number: Bytes,
}

/// Between the parts of a proxy's key. No name of an export has it.
const SEPARATOR: char = '#';

impl SessionKey {
    /// A key that is unlike any other key.
    pub fn plain(key: impl Into<Bytes>) -> Self {
        Self { owner: key.into(), start: Bytes::new(), number: Bytes::new() }
    }

    /// The key of a proxy, as it tells it to a home: one of the sessions that `server`, since this
    /// `start` of it, has on an export.
    pub fn of_proxy(server: impl Display, export: &str, start: impl Display, number: u64) -> Bytes {
        format!("{server}/{export}{SEPARATOR}{start}{SEPARATOR}{number}").into()
    }

    /// What a proxy has told.
    pub fn parse(told: &Bytes) -> Self {
        let mut parts = told.split(|byte| *byte == SEPARATOR as u8).map(|p| told.slice_ref(p));
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(owner), Some(start), Some(number), None) => Self { owner, start, number },
            _ => Self::plain(told.clone()),
        }
    }

    /// Whether an older connection has to end before the one of this key begins: it is of the same
    /// session, or of a process that was started again since, of whose sessions nobody knows which
    /// one goes on as which.
    fn ends(&self, older: &Self) -> bool {
        let same_session = older.start == self.start && older.number == self.number;
        older.owner == self.owner && (same_session || older.start != self.start)
    }
}

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

/// A map whose holders do nothing that can panic.
fn lock(live: &Mutex<HashMap<SessionKey, Live>>) -> MutexGuard<'_, HashMap<SessionKey, Live>> {
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SessionTable {
    /// Ends the connections that this one takes the place of, and returns when they are drained.
    pub async fn claim(&self, key: SessionKey, stop: &CancellationToken) -> Claim {
        loop {
            let older = {
                let mut live = lock(&self.live);
                let mut ended = None;
                for (_, older) in live.iter().filter(|(older, _)| key.ends(older)) {
                    older.stop.cancel();
                    ended = Some(older.ended.clone());
                }
                match ended {
                    Some(ended) => ended,
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
        lock(&self.live).remove(&self.key);
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
        let old = table.claim(SessionKey::plain("key"), &old_stop).await;
        let mut claiming = Box::pin(table.claim(SessionKey::plain("key"), &new_stop));
        let mut context = Context::from_waker(Waker::noop());
        assert!(claiming.as_mut().poll(&mut context).is_pending());
        assert!(old_stop.is_cancelled());
        drop(old);
        let new = claiming.await;
        assert!(!new_stop.is_cancelled());
        drop(new);
    }

    #[tokio::test]
    async fn sessions_that_swap_their_numbers_after_a_restart_wait_for_both_old_ones() {
        let table = SessionTable::default();
        let key = |start: u64, number| {
            SessionKey::parse(&SessionKey::of_proxy("server", "data@5", start, number))
        };
        let stops = [(); 2].map(|()| CancellationToken::new());
        let first = table.claim(key(1, 0), &stops[0]).await;
        let second = table.claim(key(1, 1), &stops[1]).await;
        let mut context = Context::from_waker(Waker::noop());
        // The client that was the second comes back first.
        let stop = CancellationToken::new();
        let mut claiming = Box::pin(table.claim(key(2, 0), &stop));
        assert!(claiming.as_mut().poll(&mut context).is_pending());
        assert!(stops.iter().all(CancellationToken::is_cancelled));
        drop(first);
        assert!(claiming.as_mut().poll(&mut context).is_pending(), "its own old requests may run");
        drop(second);
        let new = claiming.await;
        let other = SessionKey::of_proxy("server", "other", 2, 0);
        let other = table.claim(SessionKey::parse(&other), &CancellationToken::new()).await;
        assert!(!stop.is_cancelled(), "of another export");
        drop((new, other));
    }
}
