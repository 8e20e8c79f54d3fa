//! What an admin says of a site: what is done about overloaded hosts, and in which order the hosts get VMs; what the last looks have shown,
//! and how dear the moves of VMs are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use perigee_http::Clock;
use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::{LoadNotKnown, PlacePolicy, SiteBalance, VmBalance};
use perigee_model::{HostId, Problem, SiteId, VmId};
use perigee_planner::balance::{Accounts, Elsewhere, Look};
use serde::{Deserialize, Serialize};

use super::Cluster;
use crate::clock::now_ms;
use crate::records::Records;

const RECORDS: &str = "balance/";

/// What is kept of a site. The accounts are those after the last changes of its VMs that were decided: without them a controller that is
/// started again would not know which VMs have moved.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct BalanceRecord {
    pub mode: AutoMode,
    /// In which order its hosts get VMs.
    pub place: PlacePolicy,
    pub accounts: Accounts,
    /// When these changes were decided, Unix time; 0 if there were none.
    pub decided_ms: u64,
}

/// The key of a [`BalanceRecord`].
pub fn balance_key(site: &SiteId) -> String {
    format!("{RECORDS}{site}")
}

/// What was measured at a site, and what its VMs would have at other hosts.
#[derive(Debug)]
pub struct Seen {
    pub look: Look,
    /// Of the VMs that may move by themselves and lose something; the error says in plain words why they can't go there.
    pub ways: BTreeMap<(VmId, HostId), Result<Elsewhere, String>>,
    /// Why the loads of these hosts are not known.
    pub not_known: BTreeMap<HostId, String>,
}

/// What a look has shown.
#[derive(Debug, Clone)]
pub struct Looked {
    pub at_ms: u64,
    pub vms: Vec<VmBalance>,
    pub not_known: Vec<LoadNotKnown>,
    pub seen: Arc<Seen>,
}

#[derive(Debug)]
struct Site {
    mode: AutoMode,
    accounts: Accounts,
    /// From when on the accounts are not aged yet.
    aged: Instant,
    looked: Option<Looked>,
}

impl Default for Site {
    fn default() -> Self {
        let (mode, accounts) = (AutoMode::default(), Accounts::default());
        Self { mode, accounts, aged: Instant::now(), looked: None }
    }
}

impl Site {
    fn age_s(&self) -> f64 {
        self.aged.elapsed().as_secs_f64()
    }
}

/// The modes of all sites, as their records have them, the accounts of their VMs, and the last looks.
#[derive(Debug, Default)]
pub struct Balances {
    sites: Mutex<BTreeMap<SiteId, Site>>,
    /// The sites whose hosts are filled one after the other.
    packed: Mutex<BTreeSet<SiteId>>,
    /// Whoever changes what is said of a site takes turns.
    pub turn: tokio::sync::Mutex<()>,
}

impl Balances {
    pub(super) async fn load(records: &Records, clock: &Clock) -> Result<Self, Problem> {
        let balances = Self::default();
        for (key, record) in records.list_after::<BalanceRecord>(RECORDS, "", usize::MAX).await? {
            let site = SiteId::new(key.trim_start_matches(RECORDS))
                .map_err(|e| Problem::internal("can't read how sites are balanced", e))?;
            let BalanceRecord { mode, place, accounts, decided_ms } = record;
            let age_s = std::time::Duration::from_millis(clock.age_ms(decided_ms)).as_secs_f64();
            let known = Site { mode, accounts: accounts.after(age_s), ..Site::default() };
            balances.set_place(&site, place);
            balances.lock().insert(site, known);
        }
        Ok(balances)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SiteId, Site>> {
        self.sites.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sites whose hosts are filled one after the other.
    pub fn packed(&self) -> BTreeSet<SiteId> {
        self.packed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn place(&self, site: &SiteId) -> PlacePolicy {
        match self.packed().contains(site) {
            true => PlacePolicy::Pack,
            false => PlacePolicy::Spread,
        }
    }

    /// Notes what the site's record says.
    pub fn set_place(&self, site: &SiteId, place: PlacePolicy) {
        let mut packed = self.packed.lock().unwrap_or_else(PoisonError::into_inner);
        match place {
            PlacePolicy::Pack => packed.insert(site.clone()),
            PlacePolicy::Spread => packed.remove(site),
        };
    }

    pub fn mode(&self, site: &SiteId) -> AutoMode {
        self.lock().get(site).map(|known| known.mode).unwrap_or_default()
    }

    /// Notes what the site's record says. What was seen with another mode is shown no longer, and does not count.
    pub fn set_mode(&self, site: &SiteId, mode: AutoMode) {
        let mut sites = self.lock();
        let known = sites.entry(site.clone()).or_default();
        if known.mode != mode {
            let accounts = std::mem::take(&mut known.accounts).after(known.age_s());
            *known = Site { mode, accounts, ..Site::default() };
        }
    }

    /// The accounts of a site's VMs, as they were when they were aged last. To change them, take a turn.
    pub fn accounts(&self, site: &SiteId) -> Accounts {
        self.lock().get(site).map(|known| known.accounts.clone()).unwrap_or_default()
    }

    /// Takes what other sites remember of VMs that are at this one now: moves between sites make the next one dearer as others do, and are
    /// judged. Returns whether there was anything. The caller has a turn.
    pub fn adopt(&self, site: &SiteId, look: &Look) -> bool {
        let hosts = look.hosts.iter().filter(|load| load.site == *site);
        let hosts: BTreeSet<&HostId> = hosts.map(|load| &load.host).collect();
        let here = look.vms.iter().filter(|load| hosts.contains(&load.host));
        let here: BTreeMap<&VmId, &HostId> = here.map(|load| (&load.vm, &load.host)).collect();
        let mut sites = self.lock();
        let mut own = sites.remove(site).unwrap_or_default();
        let mut adopted = false;
        for other in sites.values_mut() {
            let known: Vec<VmId> = other.accounts.known().cloned().collect();
            let ages_s = (own.age_s(), other.age_s());
            for vm in known {
                if let Some(host) = here.get(&vm) {
                    own.accounts.adopt(&mut other.accounts, (&vm, host), ages_s);
                    adopted = true;
                }
            }
        }
        sites.insert(site.clone(), own);
        adopted
    }

    /// Notes the accounts as a look has left them.
    pub fn set_accounts(&self, site: &SiteId, accounts: Accounts) {
        let mut sites = self.lock();
        let known = sites.entry(site.clone()).or_default();
        (known.accounts, known.aged) = (accounts, Instant::now());
    }

    /// How often the price of the VM's next move has doubled. It may have moved between sites.
    fn doublings(&self, vm: &VmId) -> f64 {
        let sites = self.lock();
        let all = sites.values().map(|known| known.accounts.doublings(vm, known.age_s()));
        all.fold(0.0, f64::max)
    }

    /// So many times its cost the VM's next move must save, whoever decides it.
    pub fn price_factor(&self, vm: &VmId) -> f64 {
        self.doublings(vm).exp2()
    }

    /// The accounts without this VM, as they are now, of each site that remembers the VM.
    fn without(&self, vm: &VmId) -> Vec<(SiteId, Accounts)> {
        let sites = self.lock();
        let rest = |(site, known): (&SiteId, &Site)| {
            let mut rest = known.accounts.clone();
            rest.forget(vm);
            (site.clone(), rest.after(known.age_s()))
        };
        sites.iter().filter(|(_, known)| known.accounts.has(vm)).map(rest).collect()
    }

    /// Notes what a look has shown that was made with this mode.
    pub fn note(&self, site: &SiteId, mode: AutoMode, looked: Looked) {
        let mut sites = self.lock();
        let known = sites.entry(site.clone()).or_default();
        if known.mode == mode {
            known.looked = Some(looked);
        }
    }

    /// What the last look at a site has shown; `None` if there was none.
    pub fn looked(&self, site: &SiteId) -> Option<Looked> {
        self.lock().get(site)?.looked.clone()
    }

    /// How the site is shown.
    pub fn shown(&self, site: &SiteId) -> SiteBalance {
        let (mode, looked) = (self.mode(site), self.looked(site));
        let looked_ms = looked.as_ref().map(|looked| looked.at_ms);
        let (vms, not_known) =
            looked.map(|looked| (looked.vms, looked.not_known)).unwrap_or_default();
        SiteBalance { site: site.clone(), mode, looked_ms, vms, not_known }
    }
}

impl Cluster {
    /// Notes a change that makes the VM's next one dearer, and that no look has decided: the VM has come from one host to the other, or its data
    /// to its host.
    ///
    /// # Errors
    /// If it can't be recorded. It counts all the same until the controller ends.
    pub async fn note_change(
        &self,
        vm: &VmId,
        (from, to): (&HostId, &HostId),
    ) -> Result<(), Problem> {
        let site = self.hosts.get(to)?.addresses.site.clone();
        let balances = &self.balances;
        let _turn = balances.turn.lock().await;
        let before = balances.doublings(vm);
        let kept = {
            let mut sites = balances.lock();
            let known = sites.entry(site.clone()).or_default();
            let age_s = known.age_s();
            known.accounts.note(vm, (from, to), before, age_s);
            known.accounts.clone().after(age_s)
        };
        self.keep_accounts(&site, &kept).await
    }

    /// Forgets the moves of a VM that was deleted. They make no move of a later VM with its name dearer.
    ///
    /// # Errors
    /// If the store fails: then the moves are forgotten at the next try.
    pub async fn forget_changes(&self, vm: &VmId) -> Result<(), Problem> {
        let balances = &self.balances;
        let _turn = balances.turn.lock().await;
        for (site, rest) in balances.without(vm) {
            self.keep_accounts(&site, &rest).await?;
            if let Some(known) = balances.lock().get_mut(&site) {
                known.accounts.forget(vm);
            }
        }
        Ok(())
    }

    /// Records the accounts of a site as they are now. The caller has a turn.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn keep_accounts(&self, site: &SiteId, accounts: &Accounts) -> Result<(), Problem> {
        let change = |record: Option<BalanceRecord>| BalanceRecord {
            accounts: accounts.clone(),
            decided_ms: now_ms(),
            ..record.unwrap_or_default()
        };
        self.records.update(&balance_key(site), change).await.map(drop)
    }
}
