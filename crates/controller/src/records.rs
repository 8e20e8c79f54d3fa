//! The records in the store: their keys, types, and access to them.
//!
//! | key | value | written by |
//! |---|---|---|
//! | `hosts/HOST` | [`HostRecord`] | the host's registration |
//! | `links/FROM/TO`, `local_blocks/HOST` | [`perigee_model::job::Link`], `BlockProbe` | probes |
//! | `images/IMAGE` | [`ImageRecord`] | whoever makes or deletes the image |
//! | `volumes/VOLUME` | [`VolumeRecord`] | the catalog |
//! | `jobs/JOB` | [`JobRecord`] | the job's driver only |
//! | `intents/jobs/JOB` | [`JobIntent`] | the API: requests of people about the job |
//! | `migrations/VM/NNNN` | [`MigrationRecord`] | the migration's driver only |
//! | `intents/migrations/VM/NNNN` | [`MigrationIntent`] | the job's driver |
//! | `decisions/JOB/NNNN` | [`perigee_model::plan::Decision`] | the planner's caller |
//! | `logs/JOB/NNNN` | the [`perigee_model::job::LogLine`]s among 100 messages of the guest | the job's driver |
//! | `samples/JOB` | the job's time series | the job's driver |
//! | `runs/KEY`, `vm_boots/HOST` | the last runs of a kind of job, the last boots at a host | the job's driver, at its end |
//! | `cleanups/ID` | [`crate::cleaner::Cleanup`] | the cleaner |
//! | `given_up/HOST` | [`crate::given_up::GivenUp`] | the removal of a host |
//! | `counters/NAME` | the last number given to a job of that name | submission |
//!
//! Intents (`intents/…`, placements), observations (job states, reports) and unknown values (`None`) have
//! separate fields everywhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use perigee_model::job::{Job, Migration};
use perigee_model::vm::{EpochRaise, HostAddresses, VmSpec};
use perigee_model::volume::IoStats;
use perigee_model::{
    DiskRole, Epoch, HostId, ImageName, JobId, LayerId, OwnerName, Problem, VmId, VolumeName,
};
use perigee_planner::Traits;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::meter::Meter;
use crate::store::{Entry, Revision, Store, StoreError, Swap, Watch, Write};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostRecord {
    pub addresses: HostAddresses,
    pub registered_ms: u64,
}

/// A volume that people made, and what its home last said of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VolumeRecord {
    pub name: VolumeName,
    pub home: HostId,
    /// `None` while it is being made.
    pub seen: Option<VolumeSeen>,
}

/// An image's name, taken for one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    pub name: ImageName,
    /// `None` while it is being made of a volume.
    pub layer: Option<LayerId>,
    /// Until its host has said what became of the import.
    #[serde(default)]
    pub import: Option<PendingImport>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingImport {
    pub host: HostId,
    /// As the host's volume server reads it.
    pub source: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VolumeSeen {
    pub size_bytes: u64,
    pub allocated_bytes: u64,
    pub epoch: Epoch,
}

/// A job with everything its driver must know after a restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobRecord {
    /// As shown to people, but for the migrations, which stand in their own records.
    pub job: Job,
    /// Where its parts are meant to be; `None` while it is queued.
    pub placement: Option<Placement>,
    /// The VM was asked for; from here on a missing VM is a lost VM.
    pub vm_started: bool,
    /// The highest guest message taken into account.
    pub last_seq: u64,
    pub finished: Option<Output>,
    /// How it ends, decided before anything is taken down.
    pub ending: Option<Ending>,
    /// Number of the last migration that was taken into account.
    pub settled: u32,
    /// Completed migrations among them.
    pub moves: u32,
    /// The VM moved away from there, and what it left is not yet given to the cleaner.
    pub left: Option<HostId>,
    pub meter: Meter,
    #[serde(default)]
    pub log: LogKept,
    /// For how long its VM was seen to run in the state it is in: what counts for the limits.
    #[serde(default)]
    pub counted_ms: u64,
    /// How often it began anew, because its host was gone.
    #[serde(default)]
    pub restarts: u32,
    /// Hosts that it was lost at: what it left there may stand until they are back.
    #[serde(default)]
    pub avoid: Vec<HostId>,
    /// The host that it is about to leave: its VM there may have lost the right to write, so the job
    /// begins anew even if that host is back.
    #[serde(default)]
    pub leaving: Option<HostId>,
    /// Which boot of its host the VM was last seen in; empty while it is not known.
    #[serde(default)]
    pub boot_id: String,
    /// Hosts that cannot start its VM.
    #[serde(default)]
    pub refused_by: Vec<HostId>,
    /// The block trace of its command.
    #[serde(default)]
    pub traced: Traced,
}

/// A job's block trace, where one teaches something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Traced {
    /// Its command has not started.
    #[default]
    NotYet,
    /// It is not wanted, could not be made, or ended with a migration.
    Not,
    /// Its volume server collects it since this Unix time.
    Since { at_ms: u64 },
    /// It was replayed.
    Replayed { round_trips: f64 },
}

/// How much of a job's log is kept, and what of it is not any more.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct LogKept {
    pub bytes: u64,
    pub dropped_lines: u64,
    /// Number of the last line that was dropped.
    pub dropped_seq: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Output {
    pub bytes: u64,
    pub sha256: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    Collected { exit_code: i32 },
    Failed,
    Cancelled,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Placement {
    /// Where the VM starts; root, seed and output volumes have their home there.
    pub start: HostId,
    /// In the order of the VM's disks.
    pub disks: Vec<PlacedDisk>,
    /// By which this run is known to later ones.
    #[serde(default)]
    pub traits: Traits,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PlacedDisk {
    #[serde(rename = "serial")]
    pub role: DiskRole,
    pub volume: VolumeName,
    /// The volume's name in the job file, for a data disk.
    pub data_of: Option<VolumeName>,
    pub home: HostId,
    /// The VM's session; `None` until the volume stands.
    pub epoch: Option<Epoch>,
    pub read_only: bool,
    /// Made for this job and deleted with it.
    pub temporary: bool,
}

/// Requests of people about a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobIntent {
    pub cancel: bool,
    /// `vm stop`: the VM goes, and the job fails.
    pub stop_vm: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MigrationRecord {
    pub migration: Migration,
    pub number: u32,
    /// Spec and epochs at the destination; `None` until the epochs are issued.
    pub plan: Option<MovePlan>,
    /// The source was asked to send; it may have done so.
    pub asked_source: bool,
    /// The destination's counters of the disks before the VM was there.
    pub io_before: Vec<IoStats>,
    /// The boot of the destination in which its QEMU waits for the VM.
    #[serde(default)]
    pub boot_id: String,
    /// For how long controllers have watched over it: what counts for its limit.
    #[serde(default)]
    pub watched_ms: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MovePlan {
    pub spec: VmSpec,
    pub raises: Vec<EpochRaise>,
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct MigrationIntent {
    /// The job ends and takes both VMs down: do nothing more.
    pub abandon: bool,
    /// A person wants the VM to stay where it is.
    #[serde(default)]
    pub cancel: bool,
}

pub fn image_key(name: &ImageName) -> String {
    format!("images/{name}")
}

pub fn job_key(job: &JobId) -> String {
    format!("jobs/{job}")
}

pub fn job_intent_key(job: &JobId) -> String {
    format!("intents/jobs/{job}")
}

pub fn migration_prefix(vm: &VmId) -> String {
    format!("migrations/{vm}/")
}

pub fn migration_key(vm: &VmId, number: u32) -> String {
    format!("migrations/{vm}/{number:04}")
}

pub fn migration_intent_key(vm: &VmId, number: u32) -> String {
    format!("intents/migrations/{vm}/{number:04}")
}

/// What a job's volumes carry: its id, and when it was submitted, because another controller may have a job
/// of the same id.
pub fn owner_of(job: &Job) -> OwnerName {
    OwnerName::new(format!("{}-{:x}", job.id, job.submitted_ms / 1000))
        .or_else(|_| OwnerName::new(job.id.as_str()))
        .expect("a job's id is a name")
}

/// The VM of a job; both carry one name.
///
/// # Panics
/// Never: the rule for names is the same for both.
pub fn vm_of(job: &JobId) -> VmId {
    VmId::new(job.as_str()).expect("a job's id is a name")
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        Problem::internal("can't use the controller's store", error)
            .next("check the free space and the permissions of the controller's state directory")
    }
}

/// Typed access to a store; cheap to clone.
#[derive(Clone)]
pub struct Records {
    store: Arc<dyn Store>,
    pub counts: Arc<Counts>,
}

/// Operations of the store since the controller started.
#[derive(Debug, Default)]
pub struct Counts {
    pub gets: AtomicU64,
    pub lists: AtomicU64,
    pub writes: AtomicU64,
}

impl Records {
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
        self.store.compare_and_swap(key, expected, write).await
    }

    pub async fn read<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, Problem> {
        self.get(key).await?.map(|entry| decode(entry).map(|(value, _)| value)).transpose()
    }

    /// Every value below the prefix, in the order of the keys.
    pub async fn list<T: DeserializeOwned>(&self, prefix: &str) -> Result<Vec<T>, Problem> {
        let entries = self.list_entries(prefix).await?;
        entries.into_iter().map(|entry| decode(entry).map(|(value, _)| value)).collect()
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

    pub async fn keys(&self, prefix: &str) -> Result<Vec<String>, Problem> {
        Ok(self.list_entries(prefix).await?.into_iter().map(|entry| entry.key).collect())
    }

    /// Writes a key that must not exist; `false` when it does.
    pub async fn create<T: Serialize>(&self, key: &str, value: &T) -> Result<bool, Problem> {
        let write = Write::Put(encode(key, value)?);
        Ok(matches!(self.swap(key, None, write).await?, Swap::Done(_)))
    }

    /// Reads, changes and writes a record. If another task writes in between, this is repeated, so `change` may
    /// run several times.
    pub async fn update<T: Serialize + DeserializeOwned>(
        &self,
        key: &str,
        change: impl Fn(Option<T>) -> T,
    ) -> Result<T, Problem> {
        loop {
            let (old, revision) = match self.get(key).await? {
                Some(entry) => {
                    let (value, revision) = decode(entry)?;
                    (Some(value), Some(revision))
                }
                None => (None, None),
            };
            let new = change(old);
            let write = Write::Put(encode(key, &new)?);
            if let Swap::Done(_) = self.swap(key, revision, write).await? {
                return Ok(new);
            }
        }
    }

    pub async fn put<T: Serialize>(&self, key: &str, value: &T) -> Result<(), Problem> {
        let value = encode(key, value)?;
        loop {
            let revision = self.get(key).await?.map(|entry| entry.revision);
            let write = Write::Put(value.clone());
            if let Swap::Done(_) = self.swap(key, revision, write).await? {
                return Ok(());
            }
        }
    }

    pub async fn remove(&self, key: &str) -> Result<(), Problem> {
        while let Some(entry) = self.get(key).await? {
            let swap = self.swap(key, Some(entry.revision), Write::Delete);
            if let Swap::Done(_) = swap.await? {
                break;
            }
        }
        Ok(())
    }

    pub async fn remove_all(&self, prefix: &str) -> Result<(), Problem> {
        for key in self.keys(prefix).await? {
            self.remove(&key).await?;
        }
        Ok(())
    }

    pub fn watch(&self, prefix: &str) -> Watch {
        self.store.watch(prefix)
    }

    /// Takes a record as its only owner.
    pub async fn own<T: DeserializeOwned>(&self, key: &str) -> Result<Option<Owned<T>>, Problem> {
        let Some(entry) = self.get(key).await? else { return Ok(None) };
        let (value, revision) = decode(entry)?;
        let (records, key) = (self.clone(), key.to_owned());
        Ok(Some(Owned { records, key, revision, value, tell: Box::new(|_| {}) }))
    }
}

/// A record that only its owner writes. A write of a second owner fails.
pub struct Owned<T> {
    records: Records,
    key: String,
    revision: Revision,
    pub value: T,
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
        let write = Write::Put(encode(&self.key, &self.value)?);
        let swap = self.records.swap(&self.key, Some(self.revision), write);
        match swap.await? {
            Swap::Done(revision) => {
                self.revision = revision;
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

fn decode<T: DeserializeOwned>(entry: Entry) -> Result<(T, Revision), Problem> {
    let value = serde_json::from_value(entry.value).map_err(|e| {
        Problem::internal(format!("can't read record {}", entry.key), e)
            .next("check whether another version of perigee has written the state directory")
    })?;
    Ok((value, entry.revision))
}
