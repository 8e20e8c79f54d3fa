//! What ended jobs taught and is asked for all the time, in memory beside the store.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use perigee_model::{HostId, Problem};

use crate::records::Records;

/// Beyond it, what is kept is forgotten and read again from the store.
const DIRTY_RATES_MAX: usize = 10_000;

#[derive(Debug, Default)]
pub struct Taught {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The seconds of the last boots at each host.
    boots: BTreeMap<HostId, Vec<f64>>,
    /// By the key of a job's history.
    dirty_rates: BTreeMap<String, Option<u64>>,
}

impl Taught {
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let taught = Self::default();
        for key in records.keys("boots/").await? {
            let Ok(host) = HostId::new(key.trim_start_matches("boots/")) else { continue };
            if let Some(boots) = records.read(&key).await? {
                taught.set_boots(&host, boots);
            }
        }
        Ok(taught)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_boots(&self, host: &HostId, mut boots: Vec<f64>) {
        boots.sort_by(f64::total_cmp);
        self.lock().boots.insert(host.clone(), boots);
    }

    /// The median of the last boots there.
    pub fn boot_s(&self, host: &HostId) -> Option<f64> {
        let inner = self.lock();
        let boots = inner.boots.get(host)?;
        boots.get(boots.len() / 2).copied()
    }

    /// `None` when it was not read yet; `Some(None)` when nothing is known.
    pub fn dirty_rate(&self, history: &str) -> Option<Option<u64>> {
        self.lock().dirty_rates.get(history).copied()
    }

    pub fn set_dirty_rate(&self, history: &str, rate: Option<u64>) {
        let mut inner = self.lock();
        if inner.dirty_rates.len() >= DIRTY_RATES_MAX {
            inner.dirty_rates.clear();
        }
        inner.dirty_rates.insert(history.to_owned(), rate);
    }
}
