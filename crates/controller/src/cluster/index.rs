//! What is unfinished, in memory: so that nobody lists the store to place, move or show a job.
//!
//! The store is written first, the index follows: every owner of a record tells it what it saved.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use perigee_model::job::{JobState, MigrationState};
use perigee_model::{HostId, JobId, Problem, VmId};
use tokio::sync::Notify;

use crate::records::{JobRecord, MigrationRecord, Records};

#[derive(Debug, Default)]
pub struct Index {
    inner: Mutex<Inner>,
    /// Something changed that may let a queued job start.
    pub changed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    /// All that are not in a final state.
    jobs: BTreeMap<JobId, Arc<JobRecord>>,
    /// Of the VMs of these jobs.
    migrations: BTreeMap<(VmId, u32), Arc<MigrationRecord>>,
}

/// What is promised of a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    pub memory_bytes: u64,
    pub cpus: u32,
    pub vms: u32,
    /// Jobs among them whose volumes are being made or whose guest boots.
    pub booting: u32,
}

impl Used {
    fn add(&mut self, record: &JobRecord) {
        self.memory_bytes += record.job.spec.memory_bytes;
        self.cpus += record.job.spec.cpus;
        self.vms += 1;
    }
}

impl Index {
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let index = Self::default();
        for record in records.list::<JobRecord>("jobs/").await? {
            index.put_job(&record);
        }
        for record in records.list::<MigrationRecord>("migrations/").await? {
            index.put_migration(&record);
        }
        Ok(index)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn put_job(&self, record: &JobRecord) {
        let id = &record.job.id;
        let mut inner = self.lock();
        let before = if record.job.state.is_final() {
            if let Some(vm) = &record.job.vm {
                inner.migrations.retain(|(of, _), _| of != vm);
            }
            inner.jobs.remove(id)
        } else {
            inner.jobs.insert(id.clone(), Arc::new(record.clone()))
        };
        drop(inner);
        let same = before.is_some_and(|old| {
            (old.job.state, &old.job.host) == (record.job.state, &record.job.host)
        });
        if !same {
            self.changed.notify_one();
        }
    }

    pub fn put_migration(&self, record: &MigrationRecord) {
        let key = (record.migration.vm.clone(), record.number);
        let mut inner = self.lock();
        // Those of an ended job are of no use any more.
        let of_unfinished = inner.job_of(&record.migration.vm).is_some();
        if of_unfinished {
            inner.migrations.insert(key, Arc::new(record.clone()));
        }
        drop(inner);
        if record.migration.state.is_final() {
            self.changed.notify_one();
        }
    }

    pub fn jobs(&self) -> Vec<Arc<JobRecord>> {
        self.lock().jobs.values().cloned().collect()
    }

    pub fn job(&self, id: &JobId) -> Option<Arc<JobRecord>> {
        self.lock().jobs.get(id).cloned()
    }

    pub fn unfinished_migrations(&self) -> Vec<Arc<MigrationRecord>> {
        let inner = self.lock();
        let unfinished = inner.migrations.values().filter(|r| !r.migration.state.is_final());
        unfinished.cloned().collect()
    }

    pub fn unsettled_migrations(&self) -> Vec<Arc<MigrationRecord>> {
        self.lock().unsettled().cloned().collect()
    }

    /// What is promised of each host: to every VM that is or will be there, and to every one that
    /// is moving or has come there.
    pub fn used(&self) -> BTreeMap<HostId, Used> {
        let mut used: BTreeMap<HostId, Used> = BTreeMap::new();
        let inner = self.lock();
        for record in inner.jobs.values() {
            let Some(host) = &record.job.host else { continue };
            let of_host = used.entry(host.clone()).or_default();
            of_host.add(record);
            if matches!(record.job.state, JobState::Staging | JobState::Starting) {
                of_host.booting += 1;
            }
        }
        for moved in inner.unsettled() {
            if let Some(record) = inner.job_of(&moved.migration.vm) {
                used.entry(moved.migration.to.clone()).or_default().add(record);
            }
        }
        used
    }
}

impl Inner {
    /// A job's VM carries the job's name.
    fn job_of(&self, vm: &VmId) -> Option<&Arc<JobRecord>> {
        let id = JobId::new(vm.as_str()).ok()?;
        self.jobs.get(&id).filter(|record| record.job.vm.as_ref() == Some(vm))
    }

    fn unsettled(&self) -> impl Iterator<Item = &Arc<MigrationRecord>> {
        self.migrations.values().filter(|record| {
            record.migration.state != MigrationState::Aborted
                && self.job_of(&record.migration.vm).is_some_and(|job| record.number > job.settled)
        })
    }
}
