//! Reads and writes records as typed values.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use perigee_model::Problem;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::asked;
use super::unknown_fields::UnknownFields;
use crate::store::{Entry, Revision, Store, StoreError, Swap, Watch, Write};

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        state_problem("can't use the controller's store", error.is_full(), error)
    }
}

/// Something in the controller's state directory can't be read or written. `is_full`: its disk has no room.
pub fn state_problem(
    what: impl Into<String>,
    is_full: bool,
    error: impl std::fmt::Display,
) -> Problem {
    match is_full {
        true => Problem::no_space(what, "the disk of the controller's state directory is full")
            .next("free space there: nothing can be recorded until then"),
        false => Problem::internal(what, error)
            .next("check the permissions of the controller's state directory and its disk"),
    }
}

/// Typed access to a store; cheap to clone.
#[derive(Clone)]
pub struct Records {
    store: Arc<dyn Store>,
    pub counts: Arc<Counts>,
}

/// Numbers of the store's operations since the controller started.
#[derive(Debug, Default)]
pub struct Counts {
    pub gets: AtomicU64,
    pub lists: AtomicU64,
    pub writes: AtomicU64,
    #[cfg(test)]
    cut: std::sync::OnceLock<Arc<Cut>>,
}

/// Ends all writes of a controller at one of them, as if it was killed then. Tests then start another one.
#[cfg(test)]
#[derive(Debug)]
pub struct Cut {
    /// Writes of keys with this in them are counted.
    of: String,
    left: AtomicU64,
}

#[cfg(test)]
impl Cut {
    /// Whether that write was asked for, so that nothing is written any more.
    pub fn is_reached(&self) -> bool {
        self.left.load(Ordering::SeqCst) == 0
    }
}

#[cfg(test)]
impl Counts {
    /// From this write on, of those of keys with `of` in them, nothing is written any more.
    pub fn cut_at(&self, of: &str, write: u64) -> Arc<Cut> {
        let cut = Cut { of: of.to_owned(), left: AtomicU64::new(write) };
        Arc::clone(self.cut.get_or_init(|| Arc::new(cut)))
    }

    async fn stop_at_cut(&self, key: &str) {
        let Some(cut) = self.cut.get() else { return };
        let less = |left: u64| left.checked_sub(1);
        if key.contains(&cut.of) {
            cut.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).ok();
        }
        if cut.is_reached() {
            std::future::pending::<()>().await;
        }
    }
}

impl Records {
    /// The records in a store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, counts: Arc::default() }
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.counts.gets.fetch_add(1, Ordering::Relaxed);
        self.store.get(key).await
    }

    async fn list_entries(&self, prefix: &str) -> Result<Vec<Entry>, StoreError> {
        self.counts.lists.fetch_add(1, Ordering::Relaxed);
        self.store.list(prefix).await
    }

    async fn swap(
        &self,
        key: &str,
        expected: Option<Revision>,
        write: Write,
    ) -> Result<Swap, StoreError> {
        self.counts.writes.fetch_add(1, Ordering::Relaxed);
        #[cfg(test)]
        self.counts.stop_at_cut(key).await;
        self.store.compare_and_swap(key, expected, write).await
    }

    /// The record with this key; `None` if there is none.
    ///
    /// # Errors
    /// `Internal` if the store does not answer, or what it has is no `T`. All functions here fail so.
    pub async fn read<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, Problem> {
        self.get(key).await?.map(|entry| decode(entry).map(|(value, _)| value)).transpose()
    }

    /// Every value below the prefix, in the order of the keys.
    pub async fn list<T: DeserializeOwned>(&self, prefix: &str) -> Result<Vec<T>, Problem> {
        let entries = self.list_entries(prefix).await?;
        entries.into_iter().map(|entry| decode(entry).map(|(value, _)| value)).collect()
    }

    /// The same with the keys, where one that can't be read keeps nobody from the others.
    pub async fn list_each<T: DeserializeOwned>(
        &self,
        prefix: &str,
    ) -> Result<Vec<(String, Result<T, Problem>)>, Problem> {
        let entries = self.list_entries(prefix).await?;
        let each = |entry: Entry| (entry.key.clone(), decode(entry).map(|(value, _)| value));
        Ok(entries.into_iter().map(each).collect())
    }

    /// The first values below the prefix whose keys come after `after`, with their keys.
    pub async fn list_after<T: DeserializeOwned>(
        &self,
        prefix: &str,
        after: &str,
        limit: usize,
    ) -> Result<Vec<(String, T)>, Problem> {
        let entries = {
            self.counts.lists.fetch_add(1, Ordering::Relaxed);
            self.store.list_after(prefix, after, limit).await?
        };
        entries.into_iter().map(|entry| Ok((entry.key.clone(), decode(entry)?.0))).collect()
    }

    /// Every key below the prefix, sorted.
    pub async fn keys(&self, prefix: &str) -> Result<Vec<String>, Problem> {
        Ok(self.list_entries(prefix).await?.into_iter().map(|entry| entry.key).collect())
    }

    /// Writes a key that must not exist; `false` when it does.
    pub async fn create<T: Serialize>(&self, key: &str, value: &T) -> Result<bool, Problem> {
        let write = Write::Put(encode(key, value)?);
        Ok(matches!(self.swap(key, None, write).await?, Swap::Done(_)))
    }

    /// Makes the record of a thing that somebody may have asked for with a key ([`asked`]); `false` when there is one. That the request has made
    /// it is the same write.
    ///
    /// # Errors
    /// `NoSpace` beyond the caller's number of requests with a key.
    pub async fn create_asked<T: Serialize>(&self, key: &str, value: &T) -> Result<bool, Problem> {
        let Some(asked) = asked::under_way() else { return self.create(key, value).await };
        let beside = encode(asked.key(), &asked.has_made(key))?;
        self.counts.writes.fetch_add(1, Ordering::Relaxed);
        #[cfg(test)]
        self.counts.stop_at_cut(key).await;
        let made = self.store.create_with(key, encode(key, value)?, (asked.key(), beside)).await?;
        let is_made = matches!(made, Swap::Done(_));
        if is_made {
            asked.note_made(key);
        }
        Ok(is_made)
    }

    /// Reads, changes and writes a record. If another task writes in between, this is repeated, so `change` may
    /// run several times.
    pub async fn update<T: Serialize + DeserializeOwned>(
        &self,
        key: &str,
        change: impl Fn(Option<T>) -> T,
    ) -> Result<T, Problem> {
        loop {
            let (old, revision, unknown) = match self.get(key).await? {
                Some(entry) => {
                    let (value, revision, unknown) = decode_all(entry)?;
                    (Some(value), Some(revision), unknown)
                }
                None => (None, None, None),
            };
            let new = change(old);
            let write = Write::Put(encode_with(key, &new, unknown.as_ref())?);
            if let Swap::Done(_) = self.swap(key, revision, write).await? {
                return Ok(new);
            }
        }
    }

    /// Writes a record, whatever is there. For records that nobody else changes.
    pub async fn put<T: Serialize + DeserializeOwned>(
        &self,
        key: &str,
        value: &T,
    ) -> Result<(), Problem> {
        loop {
            let before = self.get(key).await?;
            let revision = before.as_ref().map(|entry| entry.revision);
            // Of what can't be read, nothing is kept.
            let before = before.and_then(|entry| decode_all::<T>(entry).ok());
            let unknown = before.and_then(|(_, _, unknown)| unknown);
            let write = Write::Put(encode_with(key, value, unknown.as_ref())?);
            if let Swap::Done(_) = self.swap(key, revision, write).await? {
                return Ok(());
            }
        }
    }

    /// Removes a record, whatever it says; nothing happens if there is none.
    pub async fn remove(&self, key: &str) -> Result<(), Problem> {
        while let Some(entry) = self.get(key).await? {
            let swap = self.swap(key, Some(entry.revision), Write::Delete);
            if let Swap::Done(_) = swap.await? {
                break;
            }
        }
        Ok(())
    }

    /// Removes every record below the prefix, one by one.
    pub async fn remove_all(&self, prefix: &str) -> Result<(), Problem> {
        for key in self.keys(prefix).await? {
            self.remove(&key).await?;
        }
        Ok(())
    }

    /// The writes below the prefix, from now on.
    pub fn watch(&self, prefix: &str) -> Watch {
        self.store.watch(prefix)
    }

    /// The writes of this key, from now on.
    pub fn watch_key(&self, key: &str) -> Watch {
        self.store.watch(key).of_key(key)
    }

    /// Takes a record as its only owner.
    pub async fn own<T: Serialize + DeserializeOwned>(
        &self,
        key: &str,
    ) -> Result<Option<Owned<T>>, Problem> {
        let Some(entry) = self.get(key).await? else { return Ok(None) };
        let (value, revision, unknown) = decode_all(entry)?;
        let (records, key) = (self.clone(), key.to_owned());
        Ok(Some(Owned { records, key, revision, value, unknown, tell: Box::new(|_| {}) }))
    }
}

/// A record that only its owner writes. A write of a second owner fails.
pub struct Owned<T> {
    records: Records,
    key: String,
    revision: Revision,
    pub value: T,
    /// What it has beyond that, as it was read.
    unknown: Option<UnknownFields>,
    /// Called after each save.
    tell: Box<dyn Fn(&T) + Send + Sync>,
}

impl<T> Owned<T> {
    /// From now on `tell` hears of each value that is saved.
    #[must_use]
    pub fn telling(mut self, tell: impl Fn(&T) + Send + Sync + 'static) -> Self {
        self.tell = Box::new(tell);
        self
    }
}

impl<T: Serialize> Owned<T> {
    /// # Errors
    /// `Internal` when somebody else wrote the record: the holder must read it again.
    pub async fn save(&mut self) -> Result<(), Problem> {
        let value = encode_with(&self.key, &self.value, self.unknown.as_ref())?;
        let after =
            self.unknown.as_ref().and_then(|_| UnknownFields::of(value.clone(), &self.value));
        let write = Write::Put(value);
        let swap = self.records.swap(&self.key, Some(self.revision), write);
        match swap.await? {
            Swap::Done(revision) => {
                self.revision = revision;
                self.unknown = after;
                (self.tell)(&self.value);
                Ok(())
            }
            Swap::Differs => Err(Problem::internal(
                format!("can't write record {}", self.key),
                "another task than its owner has written it",
            )),
        }
    }
}

fn encode<T: Serialize>(key: &str, value: &T) -> Result<serde_json::Value, Problem> {
    serde_json::to_value(value)
        .map_err(|e| Problem::internal(format!("can't write record {key}"), e))
}

/// With what the record has beyond what this version knows.
fn encode_with<T: Serialize>(
    key: &str,
    value: &T,
    unknown: Option<&UnknownFields>,
) -> Result<serde_json::Value, Problem> {
    let mut value = encode(key, value)?;
    if let Some(unknown) = unknown {
        unknown.keep_in(&mut value);
    }
    Ok(value)
}

fn decode<T: DeserializeOwned>(entry: Entry) -> Result<(T, Revision), Problem> {
    let value = serde_json::from_value(entry.value).map_err(|e| unreadable(&entry.key, &e))?;
    Ok((value, entry.revision))
}

/// As [`decode`], and what the record has beyond that.
fn decode_all<T: Serialize + DeserializeOwned>(
    entry: Entry,
) -> Result<(T, Revision, Option<UnknownFields>), Problem> {
    let value = T::deserialize(&entry.value).map_err(|e| unreadable(&entry.key, &e))?;
    let unknown = UnknownFields::of(entry.value, &value);
    Ok((value, entry.revision, unknown))
}

fn unreadable(key: &str, error: &serde_json::Error) -> Problem {
    Problem::internal(format!("can't read record {key}"), error)
        .next("check whether another version of perigee has written the state directory")
}

#[cfg(test)]
mod tests {
    use perigee_model::ProblemKind;
    use rusqlite::ffi;
    use serde_json::json;

    use super::*;
    use crate::store::SqliteStore;

    #[derive(Debug, Default, Serialize, serde::Deserialize)]
    struct Inner {
        b: u32,
    }

    /// What the version of before knows of a record.
    #[derive(Debug, Default, Serialize, serde::Deserialize)]
    struct Older {
        a: u32,
        inner: Inner,
    }

    async fn with_newer_record() -> (tempfile::TempDir, Records) {
        let dir = tempfile::tempdir().expect("a directory");
        let store = SqliteStore::open(&dir.path().join("state.db")).expect("a store");
        let records = Records::new(Arc::new(store));
        let newer = json!({"a": 1, "inner": {"b": 1, "c": [2]}, "d": {"e": 3}});
        assert!(records.create("k", &newer).await.expect("written"));
        (dir, records)
    }

    async fn stored(records: &Records) -> serde_json::Value {
        records.read("k").await.expect("the store").expect("the record")
    }

    fn changed(to: u32) -> serde_json::Value {
        json!({"a": to, "inner": {"b": to, "c": [2]}, "d": {"e": 3}})
    }

    #[tokio::test]
    async fn a_record_of_a_newer_version_keeps_its_fields_when_it_is_updated_and_put() {
        let (_dir, records) = with_newer_record().await;
        let set = |to| move |_: Option<Older>| Older { a: to, inner: Inner { b: to } };
        records.update("k", set(2)).await.expect("updated");
        assert_eq!(stored(&records).await, changed(2));
        records.put("k", &set(3)(None)).await.expect("put");
        assert_eq!(stored(&records).await, changed(3));
    }

    #[tokio::test]
    async fn a_record_of_a_newer_version_keeps_its_fields_at_each_save_of_its_owner() {
        let (_dir, records) = with_newer_record().await;
        let mut owned = records.own::<Older>("k").await.expect("the store").expect("the record");
        for to in 2..5 {
            owned.value = Older { a: to, inner: Inner { b: to } };
            owned.save().await.expect("saved");
            assert_eq!(stored(&records).await, changed(to));
        }
    }

    #[test]
    fn a_full_disk_of_the_controller_is_no_fault_of_ours() {
        let failed = |code| {
            let error = rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            Problem::from(StoreError::Sqlite(error)).kind
        };
        assert_eq!(failed(ffi::SQLITE_FULL), ProblemKind::NoSpace);
        assert_eq!(failed(ffi::SQLITE_CORRUPT), ProblemKind::Internal);
    }
}
