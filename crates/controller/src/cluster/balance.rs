//! What is done about overloaded hosts, site by site, and what the last looks have shown.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use perigee_model::balance::{BalanceMode, LoadNotKnown, SiteBalance, VmBalance};
use perigee_model::{Problem, SiteId};
use perigee_planner::balance::Accounts;
use serde::{Deserialize, Serialize};

use crate::records::Records;

const RECORDS: &str = "balance/";

/// What is kept of a site. The accounts are those before the last moves that were decided: without them a controller that is started again
/// would not know which VMs have moved.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct BalanceRecord {
    pub mode: BalanceMode,
    pub accounts: Accounts,
    /// When these moves were decided, Unix time; 0 if there were none.
    pub decided_ms: u64,
}

/// The key of a [`BalanceRecord`].
pub fn balance_key(site: &SiteId) -> String {
    format!("{RECORDS}{site}")
}

/// What a look has shown.
#[derive(Debug, Clone)]
pub struct Looked {
    pub at_ms: u64,
    pub vms: Vec<VmBalance>,
    pub not_known: Vec<LoadNotKnown>,
}

/// The modes of all sites that have been given one, as their records have them, and the last looks.
#[derive(Debug, Default)]
pub struct Balances {
    sites: Mutex<BTreeMap<SiteId, (BalanceMode, Option<Looked>)>>,
    /// Whoever changes a mode takes turns.
    pub turn: tokio::sync::Mutex<()>,
}

impl Balances {
    pub(super) async fn load(records: &Records) -> Result<Self, Problem> {
        let balances = Self::default();
        for (key, record) in records.list_after::<BalanceRecord>(RECORDS, "", usize::MAX).await? {
            let site = SiteId::new(key.trim_start_matches(RECORDS))
                .map_err(|e| Problem::internal("can't read how sites are balanced", e))?;
            balances.set_mode(&site, record.mode);
        }
        Ok(balances)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SiteId, (BalanceMode, Option<Looked>)>> {
        self.sites.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn mode(&self, site: &SiteId) -> BalanceMode {
        self.lock().get(site).map(|(mode, _)| *mode).unwrap_or_default()
    }

    /// Notes what the site's record says. What was seen with another mode is shown no longer.
    pub fn set_mode(&self, site: &SiteId, mode: BalanceMode) {
        let mut sites = self.lock();
        let entry = sites.entry(site.clone()).or_default();
        if entry.0 != mode {
            *entry = (mode, None);
        }
    }

    /// Notes what a look has shown that was made with this mode.
    pub fn note(&self, site: &SiteId, mode: BalanceMode, looked: Looked) {
        let mut sites = self.lock();
        let entry = sites.entry(site.clone()).or_default();
        if entry.0 == mode {
            entry.1 = Some(looked);
        }
    }

    /// How the site is shown.
    pub fn shown(&self, site: &SiteId) -> SiteBalance {
        let (mode, looked) = self.lock().get(site).cloned().unwrap_or_default();
        let looked_ms = looked.as_ref().map(|looked| looked.at_ms);
        let (vms, not_known) =
            looked.map(|looked| (looked.vms, looked.not_known)).unwrap_or_default();
        SiteBalance { site: site.clone(), mode, looked_ms, vms, not_known }
    }
}
