//! A cache of what ended jobs have taught, for figures that are needed often.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use perigee_model::tenant::tenant_of;
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::{Boot, PastRun, RUNS_KEPT};
use serde::{Deserialize, Serialize};

use crate::records::Records;

/// The prefix of the records of the last boots; the host's id follows it.
pub const BOOTS: &str = "vm_boots/";

/// The most histories in memory. Beyond this the cache is emptied and read again from the store.
const HISTORIES_MAX: usize = 1000;

/// The prefix of the records of the last runs of one kind of job.
pub const RUNS: &str = "runs/";

/// The most other kinds of jobs from which the prediction of a new one is made.
const OTHERS_MAX: usize = 32;

/// What jobs with one image and command have taught.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct History {
    /// The newest last.
    pub runs: Vec<PastRun>,
    /// The dirty rate that the last migration of such a job measured; `None` again after [`RUNS_KEPT`] runs without one.
    pub dirty_bytes_per_s: Option<u64>,
    /// How many runs ago.
    #[serde(default)]
    pub dirty_age_runs: usize,
    /// When such a job has succeeded last; Unix time.
    #[serde(default)]
    pub ended_ms: u64,
    /// The job of the newest run.
    #[serde(default)]
    pub newest: Option<JobId>,
}

impl History {
    /// Keeps what a run's migrations have measured. A rate that says that moves are dear is also the reason why none
    /// measures it again, so it is not kept for longer than a run is.
    pub fn keep_dirty_rate(&mut self, measured: Option<u64>) {
        self.dirty_age_runs = if measured.is_some() { 0 } else { self.dirty_age_runs + 1 };
        if measured.is_some() || self.dirty_age_runs >= RUNS_KEPT {
            self.dirty_bytes_per_s = measured;
        }
    }
}

#[derive(Debug, Default)]
pub struct Taught {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The last boots at each host.
    boots: BTreeMap<HostId, Vec<Boot>>,
    /// By their keys.
    histories: BTreeMap<String, Arc<History>>,
}

impl Taught {
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let taught = Self::default();
        for key in records.keys(BOOTS).await? {
            let Ok(host) = HostId::new(key.trim_start_matches(BOOTS)) else { continue };
            if let Some(boots) = records.read(&key).await? {
                taught.set_boots(&host, boots);
            }
        }
        for key in records.keys(RUNS).await?.into_iter().take(OTHERS_MAX) {
            if let Some(history) = records.read(&key).await? {
                taught.set_history(&key, Arc::new(history));
            }
        }
        Ok(taught)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_boots(&self, host: &HostId, boots: Vec<Boot>) {
        self.lock().boots.insert(host.clone(), boots);
    }

    pub fn forget_boots(&self, host: &HostId) {
        self.lock().boots.remove(host);
    }

    pub fn boots(&self, host: &HostId) -> Vec<Boot> {
        self.lock().boots.get(host).cloned().unwrap_or_default()
    }

    /// `None` if it was not read yet.
    pub fn history(&self, key: &str) -> Option<Arc<History>> {
        self.lock().histories.get(key).cloned()
    }

    /// The newest run of each other kind of the tenant's jobs that is in memory, [`OTHERS_MAX`] at most.
    pub fn others(&self, key: &str, tenant: &str) -> Vec<PastRun> {
        let inner = self.lock();
        let others = inner.histories.iter().filter(|(other, _)| *other != key);
        let newest = others.filter_map(|(_, history)| history.runs.last());
        newest
            .filter(|run| tenant_of(&run.traits.name) == tenant)
            .take(OTHERS_MAX)
            .cloned()
            .collect()
    }

    pub fn forget_history(&self, key: &str) {
        self.lock().histories.remove(key);
    }

    pub fn set_history(&self, key: &str, history: Arc<History>) {
        let mut inner = self.lock();
        if inner.histories.len() >= HISTORIES_MAX {
            inner.histories.clear();
        }
        inner.histories.insert(key.to_owned(), history);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dirty_rate_is_forgotten_when_no_migration_measures_it_again() {
        let mut history = History::default();
        history.keep_dirty_rate(Some(5));
        for _ in 1..RUNS_KEPT {
            history.keep_dirty_rate(None);
        }
        assert_eq!(history.dirty_bytes_per_s, Some(5));
        history.keep_dirty_rate(None);
        assert_eq!(history.dirty_bytes_per_s, None);
    }
}
