//! A cache of what ended jobs have taught, for figures that are needed often. What it answers does not depend on what is in it
//! by chance: beside the histories that were needed last, it has the newest run of each tenant's last kinds of jobs.

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

/// The most other kinds of jobs from which the prediction of a new one is made: those of its tenant that succeeded last.
pub const OTHERS_MAX: usize = 32;

/// How many histories are read at once at the start.
const PAGE: usize = 100;

/// What jobs with one image and command have taught.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct History {
    /// The newest last.
    pub runs: Vec<PastRun>,
    /// The dirty rate that the last migration of such a job measured; `None` again after [`RUNS_KEPT`] runs without one.
    pub dirty_bytes_per_s: Option<u64>,
    /// How many runs ago.
    pub dirty_age_runs: usize,
    /// When such a job has succeeded last; Unix time.
    pub ended_ms: u64,
    /// The job of the newest run.
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

/// Histories of kinds of jobs, at most [`HISTORIES_MAX`] at a time, and the boots of all hosts.
#[derive(Debug, Default)]
pub struct HistoryCache {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The last boots at each host.
    boots: BTreeMap<HostId, Arc<Vec<Boot>>>,
    /// By their keys.
    histories: BTreeMap<String, Arc<History>>,
    /// For each tenant, the kinds of jobs that succeeded last: when, and the newest run, by the keys of their histories.
    last_kinds: BTreeMap<String, BTreeMap<String, (u64, PastRun)>>,
}

impl Inner {
    fn note_kind(&mut self, key: &str, history: &History) {
        let Some(newest) = history.runs.last() else { return };
        let tenant = tenant_of(&newest.traits.name).to_owned();
        let kinds = self.last_kinds.entry(tenant).or_default();
        kinds.insert(key.to_owned(), (history.ended_ms, newest.clone()));
        // One more than others are needed: a kind is no other one of itself.
        let oldest = kinds.iter().min_by_key(|(_, (ended_ms, _))| *ended_ms);
        let oldest = oldest.map(|(key, _)| key.clone()).filter(|_| kinds.len() > OTHERS_MAX + 1);
        if let Some(oldest) = oldest {
            kinds.remove(&oldest);
        }
    }
}

impl HistoryCache {
    /// Reads the boots of all hosts, and the newest run of each kind of jobs, in pages.
    ///
    /// # Errors
    /// If the store does not answer, or a record can't be read.
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let cache = Self::default();
        for key in records.keys(BOOTS).await? {
            let Ok(host) = HostId::new(key.trim_start_matches(BOOTS)) else { continue };
            if let Some(boots) = records.read(&key).await? {
                cache.set_boots(&host, boots);
            }
        }
        let mut after = String::new();
        loop {
            let page = records.list_after::<History>(RUNS, &after, PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(cache) };
            after.clone_from(last);
            page.iter().for_each(|(key, history)| cache.lock().note_kind(key, history));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the boots of a host, after its record.
    pub fn set_boots(&self, host: &HostId, boots: Vec<Boot>) {
        self.lock().boots.insert(host.clone(), Arc::new(boots));
    }

    /// Forgets the boots of a host that was removed.
    pub fn forget_boots(&self, host: &HostId) {
        self.lock().boots.remove(host);
    }

    /// The last boots of VMs at a host; empty if none is known.
    pub fn boots(&self, host: &HostId) -> Arc<Vec<Boot>> {
        self.lock().boots.get(host).cloned().unwrap_or_default()
    }

    /// `None` if it was not read yet.
    pub fn history(&self, key: &str) -> Option<Arc<History>> {
        self.lock().histories.get(key).cloned()
    }

    /// The newest run of each other kind of the tenant's jobs, of the [`OTHERS_MAX`] that succeeded last at most. The newest
    /// is the first.
    pub fn others(&self, key: &str, tenant: &str) -> Vec<PastRun> {
        let inner = self.lock();
        let kinds = inner.last_kinds.get(tenant).into_iter().flatten();
        let mut others: Vec<&(u64, PastRun)> =
            kinds.filter(|(other, _)| *other != key).map(|(_, newest)| newest).collect();
        others.sort_by_key(|(ended_ms, _)| std::cmp::Reverse(*ended_ms));
        others.into_iter().take(OTHERS_MAX).map(|(_, run)| run.clone()).collect()
    }

    /// Forgets a kind of jobs whose record was deleted.
    pub fn forget_history(&self, key: &str) {
        let mut inner = self.lock();
        inner.histories.remove(key);
        inner.last_kinds.values_mut().for_each(|kinds| drop(kinds.remove(key)));
        inner.last_kinds.retain(|_, kinds| !kinds.is_empty());
    }

    /// Replaces a kind's history, after its record or when it was read.
    pub fn set_history(&self, key: &str, history: Arc<History>) {
        let mut inner = self.lock();
        inner.note_kind(key, &history);
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
