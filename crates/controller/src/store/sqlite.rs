//! The store in one SQLite file: WAL, every write synced, one connection behind a mutex.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use serde_json::Value;
use tokio::sync::broadcast;

use super::{Answer, Change, Entry, Revision, Store, StoreError, Swap, Watch, Write};

/// How many changes a watcher may fall behind before it must list again. Each running job has a watcher.
const CHANGES_KEPT: usize = 32;

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS entries (
        key TEXT PRIMARY KEY,
        value TEXT NOT NULL,
        revision INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS counter (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL);
    INSERT OR IGNORE INTO counter VALUES (1, 0);
";

/// A store in one SQLite database, in the mode in which a write that was answered is on the disk.
#[derive(Debug, Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    connection: Mutex<Connection>,
    /// One channel for each watched prefix, so that a write wakes only its watchers.
    watchers: Mutex<BTreeMap<String, broadcast::Sender<Change>>>,
}

impl SqliteStore {
    /// Opens the database, and creates it if it does not exist.
    ///
    /// # Errors
    /// If the file can't be created or is not a database.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let connection = Connection::open(path)?;
        connection.busy_timeout(std::time::Duration::from_secs(5))?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "full")?;
        connection.execute_batch(SCHEMA)?;
        let watchers = Mutex::default();
        Ok(Self { inner: Arc::new(Inner { connection: Mutex::new(connection), watchers }) })
    }

    /// Runs on a thread where waiting for the disk is allowed.
    fn run<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Inner, &mut Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Answer<'static, T> {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move {
            tokio::task::spawn_blocking(move || {
                // A panic in `act` rolled its transaction back: the connection is still sound.
                let mut connection =
                    inner.connection.lock().unwrap_or_else(PoisonError::into_inner);
                act(&inner, &mut connection)
            })
            .await?
        })
    }
}

impl Inner {
    fn tell(&self, change: &Change) {
        let key = match change {
            Change::Put(entry) => &entry.key,
            Change::Deleted(key) => key,
            Change::Missed => return,
        };
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        let ends = key.char_indices().map(|(at, _)| at).chain([key.len()]);
        for end in ends {
            let prefix = &key[..end];
            // The last watcher of this prefix is gone.
            if watchers.get(prefix).is_some_and(|watcher| watcher.send(change.clone()).is_err()) {
                watchers.remove(prefix);
            }
        }
    }
}

impl Store for SqliteStore {
    fn get<'a>(&'a self, key: &'a str) -> Answer<'a, Option<Entry>> {
        let key = key.to_owned();
        self.run(move |_, connection| {
            connection
                .prepare_cached("SELECT key, value, revision FROM entries WHERE key = ?1")?
                .query_row([key], row)
                .optional()?
                .map(entry)
                .transpose()
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Answer<'a, Vec<Entry>> {
        let prefix = prefix.to_owned();
        self.run(move |_, connection| {
            // U+10FFFF sorts after every character that a key can have.
            let end = format!("{prefix}\u{10FFFF}");
            connection
                .prepare_cached(
                    "SELECT key, value, revision FROM entries WHERE key >= ?1 AND key < ?2 ORDER BY key",
                )?
                .query_map([prefix, end], row)?
                .map(|row| entry(row?))
                .collect()
        })
    }

    fn list_after<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
        limit: usize,
    ) -> Answer<'a, Vec<Entry>> {
        let (prefix, after) = (prefix.to_owned(), after.to_owned());
        self.run(move |_, connection| {
            let end = format!("{prefix}\u{10FFFF}");
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            connection
                .prepare_cached(
                    "SELECT key, value, revision FROM entries
                     WHERE key >= ?1 AND key > ?2 AND key < ?3 ORDER BY key LIMIT ?4",
                )?
                .query_map(params![prefix, after, end, limit], row)?
                .map(|row| entry(row?))
                .collect()
        })
    }

    fn compare_and_swap<'a>(
        &'a self,
        key: &'a str,
        expected: Option<Revision>,
        write: Write,
    ) -> Answer<'a, Swap> {
        let key = key.to_owned();
        self.run(move |inner, connection| {
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            if revision_of(&transaction, &key)? != expected {
                return Ok(Swap::Differs);
            }
            let revision = next_revision(&transaction)?;
            let change = apply(&transaction, key, write, revision)?;
            transaction.commit()?;
            // This is done under the mutex, so that watchers see the writes in their order.
            inner.tell(&change);
            Ok(Swap::Done(revision))
        })
    }

    fn create_with<'a>(
        &'a self,
        key: &'a str,
        value: Value,
        (beside, beside_value): (&'a str, Value),
    ) -> Answer<'a, Swap> {
        let (key, beside) = (key.to_owned(), beside.to_owned());
        self.run(move |inner, connection| {
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            if revision_of(&transaction, &key)?.is_some() {
                return Ok(Swap::Differs);
            }
            let revision = next_revision(&transaction)?;
            let made = apply(&transaction, key, Write::Put(value), revision)?;
            let next = next_revision(&transaction)?;
            let noted = apply(&transaction, beside, Write::Put(beside_value), next)?;
            transaction.commit()?;
            inner.tell(&made);
            inner.tell(&noted);
            Ok(Swap::Done(revision))
        })
    }

    fn watch(&self, prefix: &str) -> Watch {
        let mut watchers = self.inner.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        // Removes the channels of ended jobs.
        watchers.retain(|_, watcher| watcher.receiver_count() > 0);
        let watcher =
            watchers.entry(prefix.to_owned()).or_insert_with(|| broadcast::channel(CHANGES_KEPT).0);
        Watch { changes: watcher.subscribe(), only: None }
    }
}

fn revision_of(transaction: &Transaction<'_>, key: &str) -> Result<Option<Revision>, StoreError> {
    let present: Option<i64> = transaction
        .query_row("SELECT revision FROM entries WHERE key = ?1", [key], |r| r.get(0))
        .optional()?;
    Ok(present.map(Revision))
}

fn next_revision(transaction: &Transaction<'_>) -> Result<Revision, StoreError> {
    let next = transaction.query_row(
        "UPDATE counter SET revision = revision + 1 RETURNING revision",
        [],
        |r| r.get(0),
    )?;
    Ok(Revision(next))
}

fn apply(
    transaction: &Transaction<'_>,
    key: String,
    write: Write,
    revision: Revision,
) -> Result<Change, StoreError> {
    match write {
        Write::Put(value) => {
            transaction.execute(
                "INSERT INTO entries VALUES (?1, ?2, ?3)
                 ON CONFLICT (key) DO UPDATE SET value = ?2, revision = ?3",
                params![key, value.to_string(), revision.0],
            )?;
            Ok(Change::Put(Entry { key, value, revision }))
        }
        Write::Delete => {
            transaction.execute("DELETE FROM entries WHERE key = ?1", [&key])?;
            Ok(Change::Deleted(key))
        }
    }
}

fn row(row: &rusqlite::Row<'_>) -> rusqlite::Result<(String, String, i64)> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?))
}

fn entry((key, value, revision): (String, String, i64)) -> Result<Entry, StoreError> {
    let value: Value = serde_json::from_str(&value)
        .map_err(|source| StoreError::NotJson { key: key.clone(), source })?;
    Ok(Entry { key, value, revision: Revision(revision) })
}
