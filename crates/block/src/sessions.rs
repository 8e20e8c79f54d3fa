//! Whose connections a session's new connection takes the place of, for proxies and iSCSI initiators.
//!
//! A client that lost its connection opens a new one and sends its unanswered requests again. If the
//! old connection's requests could still run then, one of them could overwrite what the new
//! connection wrote after it. So a session's new connection waits until the old one is drained.
//!
//! A proxy's session may have several connections at the same time. They are of one opening, and when
//! one of them is lost all are made anew: the first one of the next opening waits until all of the
//! earlier ones are drained.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use crate::lease::{HostTag, NO_HOST, SEVERAL};
use crate::locking;

/// The session to which a connection belongs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SessionKey {
    /// The host that the client has proved to be; empty if it has proved nothing. What another host sends names another session.
    proved: Bytes,
    owner: Bytes,
    /// The id of the start of the owner's process; empty if the owner has not sent one.
    start: Bytes,
    number: Bytes,
    /// Grows each time the session is connected anew.
    opening: u64,
    /// Which one of the connections of this opening.
    connection: u64,
}

/// Separates the parts of a proxy's key. No export name contains it.
const SEPARATOR: char = '#';

/// One of a proxy's sessions on an export, as the proxy names it to the home.
#[derive(Debug)]
pub struct ProxyKey {
    session: String,
}

impl ProxyKey {
    /// One of the sessions that `server`, since this `start` of it, has on an export.
    pub fn new(server: impl Display, export: &str, start: impl Display, number: u64) -> Self {
        let session = format!("{server}/{export}{SEPARATOR}{start}{SEPARATOR}{number}");
        Self { session }
    }

    /// The session is connected anew: what is left of its connections ends at the home.
    ///
    /// Numbers grow over all sessions: a client that comes back has the session number that it had.
    pub fn next_opening() -> u64 {
        static OPENINGS: AtomicU64 = AtomicU64::new(1);
        OPENINGS.fetch_add(1, Ordering::SeqCst)
    }

    /// What one connection of an opening tells the home.
    pub fn told(&self, opening: u64, connection: u64) -> Bytes {
        format!("{}{SEPARATOR}{opening}{SEPARATOR}{connection}", self.session).into()
    }
}

impl SessionKey {
    /// A key without a start id: it equals only itself.
    pub fn plain(key: impl Into<Bytes>) -> Self {
        let (start, number) = (Bytes::new(), Bytes::new());
        Self { proved: Bytes::new(), owner: key.into(), start, number, opening: 0, connection: 0 }
    }

    /// Parses the key that a proxy has sent.
    pub fn parse(told: &Bytes) -> Self {
        let parts: Vec<Bytes> =
            told.split(|byte| *byte == SEPARATOR as u8).map(|part| told.slice_ref(part)).collect();
        let number = |part: &Bytes| std::str::from_utf8(part).ok()?.parse().ok();
        match &parts[..] {
            [owner, start, session, opening, connection] => {
                let (Some(opening), Some(connection)) = (number(opening), number(connection))
                else {
                    return Self::plain(told.clone());
                };
                let (owner, start, number) = (owner.clone(), start.clone(), session.clone());
                Self { proved: Bytes::new(), owner, start, number, opening, connection }
            }
            _ => Self::plain(told.clone()),
        }
    }

    /// The key as that of a client that has proved to be this host.
    #[must_use]
    pub fn of_host(self, host: &str) -> Self {
        Self { proved: Bytes::copy_from_slice(host.as_bytes()), ..self }
    }

    /// Which host's server it is of. [`NO_HOST`] for who is no such server. Another host's is another one, whatever it sends.
    pub fn host(&self) -> HostTag {
        let server = self.owner.split(|byte| *byte == b'/').next().unwrap_or_default();
        let id = std::str::from_utf8(server).ok().and_then(|text| Uuid::parse_str(text).ok());
        // FNV-1a, because the catalog remembers the tag: it must be the same after a restart.
        let mix = |tag: u64| {
            let bytes = self.proved.iter();
            bytes.fold(tag, |tag, byte| (tag ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
        };
        id.map(|id| mix(id.as_u64_pair().1)).filter(|tag| *tag != SEVERAL).unwrap_or(NO_HOST)
    }

    fn is_session_of(&self, other: &Self) -> bool {
        (&self.proved, &self.owner, &self.start, &self.number)
            == (&other.proved, &other.owner, &other.start, &other.number)
    }

    /// Whether an older connection has to end before the one of this key begins: it is of an earlier
    /// opening of the session, or of a process that was started again since, of whose sessions nobody
    /// knows which one goes on as which.
    fn ends(&self, older: &Self) -> bool {
        let replaced = older.is_session_of(self) && (older.opening < self.opening || older == self);
        let is_of_same = older.proved == self.proved && older.owner == self.owner;
        replaced || is_of_same && older.start != self.start
    }

    /// Whether the session was connected anew since this key was made.
    fn is_before(&self, other: &Self) -> bool {
        self.is_session_of(other) && self.opening < other.opening
    }
}

/// The live connections of one protocol's sessions, by their keys.
#[derive(Default)]
pub struct SessionTable {
    live: Arc<Mutex<HashMap<SessionKey, Live>>>,
}

struct Live {
    /// Asks the connection to end.
    stop: CancellationToken,
    /// Cancelled when the connection has ended.
    ended: CancellationToken,
}

/// A connection holds this as long as its requests may run.
pub struct Claim {
    key: SessionKey,
    live: Arc<Mutex<HashMap<SessionKey, Live>>>,
    _ended: DropGuard,
}

fn lock(live: &Mutex<HashMap<SessionKey, Live>>) -> MutexGuard<'_, HashMap<SessionKey, Live>> {
    locking::lock(live)
}

impl SessionTable {
    /// Ends the connections that this one replaces, and returns when they are drained.
    /// `None` when the session was connected anew meanwhile: nobody waits for this connection.
    pub async fn claim(&self, key: SessionKey, stop: &CancellationToken) -> Option<Claim> {
        loop {
            let older = {
                let mut live = lock(&self.live);
                if live.keys().any(|other| key.is_before(other)) {
                    return None;
                }
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
                        return Some(Claim { key, live, _ended: ended.drop_guard() });
                    }
                }
            };
            older.cancelled().await;
        }
    }
}

impl Claim {
    /// The host whose server the connection is of; [`NO_HOST`] if it is of another client.
    pub fn host(&self) -> HostTag {
        self.key.host()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Removed before `_ended` is cancelled, so that a waiting connection finds the session free.
        lock(&self.live).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[tokio::test]
    async fn a_host_that_sends_another_ones_key_ends_nothing_and_is_another_host() {
        let table = SessionTable::default();
        let (stop, other_stop) = (CancellationToken::new(), CancellationToken::new());
        let server = Uuid::from_u128(7);
        let key = |start: &str, host: &str| {
            let key = ProxyKey::new(server, "data@5", start, 0);
            SessionKey::parse(&key.told(1, 0)).of_host(host)
        };
        let own = table.claim(key("first", "x"), &stop).await.expect("the first");
        let mut claiming = Box::pin(table.claim(key("evil", "b"), &other_stop));
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(Some(other)) = claiming.as_mut().poll(&mut context) else {
            panic!("it waits for the other host's connection");
        };
        assert!(!stop.is_cancelled());
        assert_ne!(own.host(), other.host());
        assert_ne!(own.host(), NO_HOST);
    }

    #[tokio::test]
    async fn a_session_s_new_connection_waits_for_the_end_of_the_old_one() {
        let table = SessionTable::default();
        let (old_stop, new_stop) = (CancellationToken::new(), CancellationToken::new());
        let old = table.claim(SessionKey::plain("key"), &old_stop).await.expect("the first");
        let mut claiming = Box::pin(table.claim(SessionKey::plain("key"), &new_stop));
        let mut context = Context::from_waker(Waker::noop());
        assert!(claiming.as_mut().poll(&mut context).is_pending());
        assert!(old_stop.is_cancelled());
        drop(old);
        let new = claiming.await.expect("the newest");
        assert!(!new_stop.is_cancelled());
        drop(new);
    }

    #[tokio::test]
    async fn sessions_that_swap_their_numbers_after_a_restart_wait_for_both_old_ones() {
        let table = SessionTable::default();
        let key = |start: u64, number| {
            SessionKey::parse(&ProxyKey::new("server", "data@5", start, number).told(1, 0))
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
        let other = ProxyKey::new("server", "other", 2, 0).told(1, 0);
        let other = table.claim(SessionKey::parse(&other), &CancellationToken::new()).await;
        assert!(!stop.is_cancelled(), "of another export");
        drop((new, other));
    }

    #[tokio::test]
    async fn the_connections_of_one_opening_live_beside_each_other_and_end_before_the_next() {
        let table = SessionTable::default();
        let session = ProxyKey::new("server", "data@5", 1, 0);
        let key = |opening, connection| SessionKey::parse(&session.told(opening, connection));
        let stops = [(); 2].map(|()| CancellationToken::new());
        let first = table.claim(key(1, 0), &stops[0]).await;
        let second = table.claim(key(1, 1), &stops[1]).await;
        assert!(first.is_some() && second.is_some());
        assert!(!stops.iter().any(CancellationToken::is_cancelled));
        let stop = CancellationToken::new();
        let mut claiming = Box::pin(table.claim(key(2, 0), &stop));
        let mut context = Context::from_waker(Waker::noop());
        assert!(claiming.as_mut().poll(&mut context).is_pending());
        assert!(stops.iter().all(CancellationToken::is_cancelled));
        drop((first, second));
        let _newest = claiming.await.expect("the newest");
        assert!(table.claim(key(1, 2), &stop).await.is_none(), "it comes too late");
        assert!(!stop.is_cancelled());
    }

    #[tokio::test]
    async fn a_client_that_comes_back_is_not_taken_for_one_that_came_before() {
        let table = SessionTable::default();
        let key =
            |opening| SessionKey::parse(&ProxyKey::new("server", "data@5", 1, 0).told(opening, 0));
        let stop = CancellationToken::new();
        // The first session has lost its connection several times.
        let openings = [(); 3].map(|()| ProxyKey::next_opening());
        let old = table.claim(key(openings[2]), &stop).await.expect("the first session");
        let again = CancellationToken::new();
        let mut claiming = Box::pin(table.claim(key(ProxyKey::next_opening()), &again));
        let mut context = Context::from_waker(Waker::noop());
        assert!(claiming.as_mut().poll(&mut context).is_pending() && stop.is_cancelled());
        drop(old);
        assert!(claiming.await.is_some());
    }
}
