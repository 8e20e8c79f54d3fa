//! Requests that make a thing once, however often they are repeated: their clients have given them keys.
//!
//! The record of the thing, and the [`RequestRecord`] that says which request has made it, are one write
//! ([`super::Records::create_asked`]). So a repeated request finds what the first one has made, also if the controller was killed before it could
//! answer. A request that has made nothing leaves nothing, and is carried out when it is repeated.
//!
//! The request that is being carried out is known to the task that does so, and to those to which it hands that on ([`carried`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use perigee_http::Clock;
use perigee_model::limits::KEYED_REQUESTS;
use perigee_model::{Problem, ProblemKind, TenantName, UserName};
use serde::{Deserialize, Serialize};

use super::Records;
use crate::clock::now_ms;

const REQUESTS: &str = "requests/";
/// For so long the key of a request is remembered.
pub const KEPT_MS: u64 = 24 * 3600 * 1000;
/// A new request removes so many that are older. More are removed than come.
const FORGOTTEN_AT_ONCE: usize = 4;

tokio::task_local! {
    static ASKED: Arc<Asked>;
}

/// What a request with a key has made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// SHA-256 of what was asked for.
    pub digest: String,
    /// When it was asked for first; Unix time.
    pub at_ms: u64,
    /// The key of the record that it has made.
    pub made: String,
}

/// A request with a key, as it has come.
#[derive(Debug)]
pub struct Ask {
    /// One caller's keys are nobody else's.
    pub who: String,
    /// SHA-256 of the key.
    pub key: String,
    /// SHA-256 of what is asked for.
    pub digest: String,
}

/// What is to be done with a request.
pub enum Begun {
    /// It is carried out, or answered with what the earlier one has made.
    Now(Arc<Asked>, Option<RequestRecord>),
    /// The first one with this key is being carried out.
    UnderWay,
    /// The first one with this key has asked for something else.
    OfAnother,
}

/// The requests with a key that this controller carries out, and those that are remembered.
#[derive(Debug, Clone, Default)]
pub struct Requests(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// What is asked for by those that are carried out.
    under_way: BTreeMap<String, String>,
    /// The keys of the records, with their times, the oldest first.
    kept: BTreeSet<(u64, String)>,
    /// How many of them each caller has.
    counts: BTreeMap<String, u64>,
}

/// A request that is carried out. It is over when nobody has this any more.
#[derive(Debug)]
pub struct Asked {
    requests: Requests,
    /// The key of its record.
    key: String,
    digest: String,
    at_ms: u64,
    made: Mutex<Option<String>>,
}

impl Requests {
    /// Those that an earlier controller has carried out.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let requests = Self::default();
        for (key, record) in records.list_each::<RequestRecord>(REQUESTS).await? {
            // One that can't be read is the oldest, and goes first.
            requests.lock().keep(record.map_or(0, |record| record.at_ms), &key);
        }
        Ok(requests)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request.
    ///
    /// # Errors
    /// `NoSpace` if the caller has too many; if the store fails.
    pub async fn begin(
        &self,
        records: &Records,
        clock: &Clock,
        ask: Ask,
    ) -> Result<Begun, Problem> {
        let key = format!("{REQUESTS}{}/{}", ask.who, ask.key);
        {
            let mut state = self.lock();
            match state.under_way.get(&key) {
                // The record of an old one is being removed.
                Some(digest) if digest.is_empty() || *digest == ask.digest => {
                    return Ok(Begun::UnderWay);
                }
                Some(_) => return Ok(Begun::OfAnother),
                None => state.under_way.insert(key.clone(), ask.digest.clone()),
            };
        }
        let mut asked = Asked {
            requests: self.clone(),
            key,
            digest: ask.digest,
            at_ms: now_ms(),
            made: Mutex::default(),
        };
        let before: Option<RequestRecord> = records.read(&asked.key).await?;
        match before {
            Some(before) if clock.age_ms(before.at_ms) >= KEPT_MS => {
                self.forget(records, before.at_ms, &asked.key).await?;
            }
            Some(before) if before.digest != asked.digest => return Ok(Begun::OfAnother),
            Some(before) => {
                // The record is written anew if what it has made is to be made once more.
                asked.at_ms = before.at_ms;
                asked.made = Mutex::new(Some(before.made.clone()));
                return Ok(Begun::Now(Arc::new(asked), Some(before)));
            }
            None => {}
        }
        self.forget_old(records, clock).await?;
        let count = self.lock().counts.get(who_of(&asked.key)).copied().unwrap_or_default();
        KEYED_REQUESTS.check(count + 1).map_err(|error| {
            Problem::new(ProblemKind::NoSpace, "can't keep the request's Idempotency-Key", error)
                .next("each is kept for 24 hours; until then, send requests without the header")
        })?;
        Ok(Begun::Now(Arc::new(asked), None))
    }

    async fn forget_old(&self, records: &Records, clock: &Clock) -> Result<(), Problem> {
        for _ in 0..FORGOTTEN_AT_ONCE {
            let oldest = {
                let mut state = self.lock();
                let oldest = state.kept.first().cloned();
                let is_free = |(at_ms, key): &(u64, String)| {
                    clock.age_ms(*at_ms) >= KEPT_MS && !state.under_way.contains_key(key)
                };
                let Some((at_ms, key)) = oldest.filter(is_free) else { return Ok(()) };
                // Nobody uses the key again until its record is gone.
                state.under_way.insert(key.clone(), String::new());
                let (requests, digest, made) = (self.clone(), String::new(), Mutex::default());
                Asked { requests, key, digest, at_ms, made }
            };
            self.forget(records, oldest.at_ms, &oldest.key).await?;
        }
        Ok(())
    }

    /// Forgets all requests of a user who is removed: one of the same name has asked for nothing.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn forget_of(
        &self,
        records: &Records,
        tenant: &TenantName,
        user: &UserName,
    ) -> Result<(), Problem> {
        let prefix = format!("{REQUESTS}{tenant}/{user}/");
        for key in records.keys(&prefix).await? {
            records.remove(&key).await?;
        }
        let mut state = self.lock();
        let gone: Vec<(u64, String)> =
            state.kept.iter().filter(|(_, key)| key.starts_with(&prefix)).cloned().collect();
        for (at_ms, key) in gone {
            state.drop_kept(at_ms, &key);
        }
        Ok(())
    }

    async fn forget(&self, records: &Records, at_ms: u64, key: &str) -> Result<(), Problem> {
        records.remove(key).await?;
        self.lock().drop_kept(at_ms, key);
        Ok(())
    }
}

impl State {
    fn keep(&mut self, at_ms: u64, key: &str) {
        if self.kept.insert((at_ms, key.to_owned())) {
            *self.counts.entry(who_of(key).to_owned()).or_default() += 1;
        }
    }

    fn drop_kept(&mut self, at_ms: u64, key: &str) {
        if !self.kept.remove(&(at_ms, key.to_owned())) {
            return;
        }
        let who = who_of(key);
        if let Some(count) = self.counts.get_mut(who) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(who);
            }
        }
    }
}

/// The part of a record's key that stands for the caller.
fn who_of(key: &str) -> &str {
    key.rsplit_once('/').map_or(key, |(who, _)| who)
}

impl Asked {
    /// The key of its record.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    pub(super) fn has_made(&self, key: &str) -> RequestRecord {
        RequestRecord { digest: self.digest.clone(), at_ms: self.at_ms, made: key.to_owned() }
    }

    pub(super) fn note_made(&self, key: &str) {
        *self.made() = Some(key.to_owned());
        self.requests.lock().keep(self.at_ms, &self.key);
    }

    fn made(&self) -> MutexGuard<'_, Option<String>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After a failure: the request is not remembered if what it has made is gone again.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn forget_undone(&self, records: &Records) -> Result<(), Problem> {
        let Some(made) = self.made().clone() else { return Ok(()) };
        if records.read::<serde_json::Value>(&made).await?.is_none() {
            self.requests.forget(records, self.at_ms, &self.key).await?;
        }
        Ok(())
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.requests.lock().under_way.remove(&self.key);
    }
}

/// The request that this task carries out, if it has a key.
pub(super) fn under_way() -> Option<Arc<Asked>> {
    ASKED.try_with(Arc::clone).ok()
}

/// Whether the request that this task carries out has made the record with this key before: it was broken off then, and is repeated now.
pub fn has_made(key: &str) -> bool {
    under_way().is_some_and(|asked| asked.made().as_deref() == Some(key))
}

/// Carries a request out.
pub fn carry<T>(asked: Arc<Asked>, work: impl Future<Output = T>) -> impl Future<Output = T> {
    ASKED.scope(asked, work)
}

/// Work of a request that another task does. It belongs to the request that this task carries out.
pub fn carried<T>(work: impl Future<Output = T> + Send) -> impl Future<Output = T> + Send {
    let asked = under_way();
    async move {
        match asked {
            Some(asked) => carry(asked, work).await,
            None => work.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::limits::KEYED_REQUESTS;

    use super::*;
    use crate::store::SqliteStore;

    #[tokio::test]
    async fn one_key_too_many_is_refused_with_the_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = SqliteStore::open(&dir.path().join("state.db")).expect("a store");
        let (records, clock) = (Records::new(Arc::new(store)), Clock::new("boot".to_owned()));
        let requests = Requests::default();
        let ask = |who: &str| Ask { who: who.to_owned(), key: "k".into(), digest: "d".into() };
        let most = u64::try_from(KEYED_REQUESTS.max).expect("it is small");
        requests.lock().counts.insert("requests/acme/ann".to_owned(), most);
        let refused = requests.begin(&records, &clock, ask("acme/ann")).await.err();
        let refused = refused.expect("she has too many").to_string();
        assert!(refused.contains("number of requests with an Idempotency-Key"), "{refused}");
        let other = requests.begin(&records, &clock, ask("acme/amy")).await;
        assert!(matches!(other, Ok(Begun::Now(_, None))), "another caller's are her own");
    }
}
