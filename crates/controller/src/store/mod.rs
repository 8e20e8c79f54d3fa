//! The controller's store: keys with JSON values, behind one small trait.
//!
//! A write names the revision that it expects, and is refused if the key has another one, so that two writers
//! never overwrite each other unnoticed. A revision is never used twice, even after a key was deleted and
//! created again. `contract.rs` is the test suite that every store must pass.

pub mod directory;
mod sqlite;

#[cfg(test)]
mod contract;

use std::future::Future;
use std::pin::Pin;

use serde_json::Value;
use tokio::sync::broadcast;

pub use sqlite::SqliteStore;

/// Grows with every write to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(i64);

/// A key with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub key: String,
    pub value: Value,
    /// The write that gave it this value.
    pub revision: Revision,
}

/// What becomes of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    Put(Value),
    Delete,
}

/// What became of a write.
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub enum Swap {
    Done(Revision),
    /// The key's revision (or its absence) is not the expected one; nothing was written.
    Differs,
}

/// What a watcher is told.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    Put(Entry),
    Deleted(String),
    /// Changes were lost because the watcher was too slow: list again.
    Missed,
}

/// Why the store did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the store's database: {0}")]
    Sqlite(#[from] rusqlite::Error),
    #[error("the store holds no JSON under {key:?}: {source}")]
    NotJson { key: String, source: serde_json::Error },
    #[error("a task of the store was stopped: {0}")]
    Stopped(#[from] tokio::task::JoinError),
}

impl StoreError {
    /// Whether its disk has no room.
    pub fn is_full(&self) -> bool {
        let code = match self {
            Self::Sqlite(error) => error.sqlite_error_code(),
            _ => None,
        };
        code == Some(rusqlite::ErrorCode::DiskFull)
    }
}

/// What a store's functions answer later.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Where records are. Each implementation has to pass `contract.rs`.
pub trait Store: Send + Sync + 'static {
    fn get<'a>(&'a self, key: &'a str) -> Answer<'a, Option<Entry>>;

    /// All entries whose key starts with `prefix`, in the order of their keys.
    fn list<'a>(&'a self, prefix: &'a str) -> Answer<'a, Vec<Entry>>;

    /// The first `limit` entries whose key starts with `prefix` and comes after `after`, in the
    /// order of their keys.
    fn list_after<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
        limit: usize,
    ) -> Answer<'a, Vec<Entry>>;

    /// Writes only if the key's revision is `expected`; `None` means that there is no such key.
    /// A write that was answered `Done` survives a crash of the machine.
    fn compare_and_swap<'a>(
        &'a self,
        key: &'a str,
        expected: Option<Revision>,
        write: Write,
    ) -> Answer<'a, Swap>;

    /// Makes a key that must not exist, and writes another one beside it, whatever that has. Both are there afterwards, or neither.
    fn create_with<'a>(
        &'a self,
        key: &'a str,
        value: Value,
        beside: (&'a str, Value),
    ) -> Answer<'a, Swap>;

    /// Every change of a key below `prefix` from now on, in the order of the writes.
    fn watch(&self, prefix: &str) -> Watch;
}

/// Changes below one prefix, or of one key.
#[derive(Debug)]
pub struct Watch {
    changes: broadcast::Receiver<Change>,
    /// Other keys are left out.
    only: Option<String>,
}

impl Watch {
    /// Only the changes of this key: `jobs/web` is also a prefix of `jobs/web2`.
    pub fn of_key(self, key: &str) -> Self {
        Self { only: Some(key.to_owned()), ..self }
    }

    /// Waits for the next change; `None` if the store is closed.
    pub async fn next(&mut self) -> Option<Change> {
        loop {
            let change = match self.changes.recv().await {
                Ok(change) => change,
                Err(broadcast::error::RecvError::Lagged(_)) => Change::Missed,
                Err(broadcast::error::RecvError::Closed) => return None,
            };
            let key = match &change {
                Change::Put(entry) => Some(&entry.key),
                Change::Deleted(key) => Some(key),
                Change::Missed => None,
            };
            if key.is_none() || self.only.is_none() || key == self.only.as_ref() {
                return Some(change);
            }
        }
    }
}
