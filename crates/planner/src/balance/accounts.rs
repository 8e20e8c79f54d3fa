//! What the balancer remembers between two looks.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use perigee_model::balance::MoveTrial;
use perigee_model::{HostId, VmId};
use serde::{Deserialize, Serialize};

use super::{Look, MOSTLY, SURCHARGE_HALVES_IN_S, TRIAL_S, VmLoad};

/// The accounts of all VMs: at most [`super::TARGETS`] for each VM that loses something, or has moved in the last hours.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Accounts {
    vms: BTreeMap<VmId, Account>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Account {
    host: HostId,
    saved: BTreeMap<HostId, Saved>,
    /// The logarithm to the base 2 of the factor of the next move's price.
    doublings: f64,
    trial: Option<Trial>,
    /// What became of the trial before.
    judged: Option<Trial>,
}

impl Account {
    fn at(host: &HostId) -> Self {
        let host = host.clone();
        Self { host, saved: BTreeMap::new(), doublings: 0.0, trial: None, judged: None }
    }

    fn is_empty(&self) -> bool {
        self.saved.is_empty() && self.doublings <= 0.0 && self.trial.is_none()
    }
}

/// What being at a host would have saved, and in how much time. All are seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Saved {
    pub saved_s: f64,
    pub for_s: f64,
    /// What the VM has lost to the network to its data, and would have lost there.
    #[serde(default)]
    pub data_here_s: f64,
    #[serde(default)]
    pub data_there_s: f64,
}

impl Saved {
    /// Whether the network to the VM's data is what would be saved.
    pub fn is_by_data(&self) -> bool {
        let by_data_s = self.data_here_s - self.data_there_s;
        by_data_s > 0.0 && by_data_s >= self.saved_s * MOSTLY
    }

    fn plus(self, more: Self) -> Self {
        Self {
            saved_s: self.saved_s + more.saved_s,
            for_s: self.for_s + more.for_s,
            data_here_s: self.data_here_s + more.data_here_s,
            data_there_s: self.data_there_s + more.data_there_s,
        }
    }
}

/// A move whose gain is not known yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Trial {
    from: HostId,
    price_s: f64,
    gained_s: f64,
    left_s: f64,
}

impl Accounts {
    /// What counts of accounts that were kept for so many seconds: how dear the next moves are. What was saved before is no reason to move.
    #[must_use]
    pub fn after(mut self, age_s: f64) -> Self {
        for account in self.vms.values_mut() {
            account.doublings -= age_s.max(0.0) / SURCHARGE_HALVES_IN_S;
            (account.saved, account.trial) = (BTreeMap::new(), None);
        }
        self.vms.retain(|_, account| account.doublings > 0.0);
        self
    }

    /// The host that the VM has left, while that move is on trial.
    pub(super) fn on_trial(&self, vm: &VmId) -> Option<&HostId> {
        Some(&self.vms.get(vm)?.trial.as_ref()?.from)
    }

    /// Lets surcharges go with time. A VM that is at another host, by whatever hand, begins with empty accounts; one that is nowhere keeps
    /// its surcharge, because it may be on its way.
    pub(super) fn begin(&mut self, look: &Look) {
        let there: HashMap<&VmId, &HostId> =
            look.vms.iter().map(|load| (&load.vm, &load.host)).collect();
        let less = look.passed_s.max(0.0) / SURCHARGE_HALVES_IN_S;
        for (vm, account) in &mut self.vms {
            account.doublings = (account.doublings - less).max(0.0);
            match there.get(vm) {
                Some(host) if **host != account.host => {
                    account.host = (*host).clone();
                    (account.saved, account.trial) = (BTreeMap::new(), None);
                }
                Some(_) => {}
                None => account.saved.clear(),
            }
        }
        self.vms.retain(|vm, account| {
            !account.is_empty() && (there.contains_key(vm) || account.doublings > 0.0)
        });
    }

    /// What the moves of a VM cost, times this, is their price.
    pub(super) fn factor(&self, vm: &VmId) -> f64 {
        self.vms.get(vm).map_or(1.0, |account| account.doublings.exp2())
    }

    /// How often the price of the VM's next move has doubled, if these accounts were not aged for so many seconds. The factor of the price is
    /// 2 to the power of that.
    pub fn doublings(&self, vm: &VmId, age_s: f64) -> f64 {
        let known = self.vms.get(vm).map_or(0.0, |account| account.doublings);
        (known - age_s.max(0.0) / SURCHARGE_HALVES_IN_S).max(0.0)
    }

    /// Notes a change that was decided elsewhere: the VM goes from one host to the other, or its data come to the host where it is. `before`
    /// are the VM's [`Self::doublings`] until then. `age_s`: for how long these accounts were not aged.
    pub fn note(&mut self, vm: &VmId, (from, to): (&HostId, &HostId), before: f64, age_s: f64) {
        let gone = age_s.max(0.0) / SURCHARGE_HALVES_IN_S;
        if from != to {
            self.clear_changed(&BTreeSet::from([from, to]));
        }
        self.vms.retain(|_, account| {
            account.doublings > gone || !account.saved.is_empty() || account.trial.is_some()
        });
        let account = self.vms.entry(vm.clone()).or_insert_with(|| Account::at(to));
        (account.host, account.trial) = (to.clone(), None);
        account.saved.clear();
        account.doublings = before + 1.0 + gone;
    }

    /// Whether anything is remembered of the VM.
    pub fn has(&self, vm: &VmId) -> bool {
        self.vms.contains_key(vm)
    }

    /// The VMs of which anything is remembered.
    pub fn known(&self) -> impl Iterator<Item = &VmId> {
        self.vms.keys()
    }

    /// The hosts that VMs have left whose moves are on trial: a look at them judges these moves.
    pub fn left_on_trial(&self) -> impl Iterator<Item = &HostId> {
        self.vms.values().filter_map(|account| Some(&account.trial.as_ref()?.from))
    }

    /// Takes over what other accounts remember of a VM that is at this host now: how dear its next move is, and a move there that is on
    /// trial. `ages_s`: for how long these accounts, and the others, were not aged.
    pub fn adopt(&mut self, others: &mut Self, (vm, host): (&VmId, &HostId), ages_s: (f64, f64)) {
        let Some(mut account) = others.vms.remove(vm) else { return };
        let [gone, gone_there] = [ages_s.0, ages_s.1].map(|s| s.max(0.0) / SURCHARGE_HALVES_IN_S);
        account.doublings = (account.doublings - gone_there).max(0.0) + gone;
        account.saved.clear();
        if account.host != *host {
            (account.host, account.trial) = (host.clone(), None);
        }
        let Some(known) = self.vms.get_mut(vm) else {
            self.vms.insert(vm.clone(), account);
            return;
        };
        known.doublings = known.doublings.max(account.doublings);
        known.trial = known.trial.take().or(account.trial);
    }

    /// Forgets a VM that was deleted: another VM may get its name.
    pub fn forget(&mut self, vm: &VmId) {
        self.vms.remove(vm);
    }

    /// The hosts for which the VM has an account.
    pub(super) fn open(&self, vm: &VmId) -> impl Iterator<Item = &HostId> {
        self.vms.get(vm).into_iter().flat_map(|account| account.saved.keys())
    }

    /// What being at a host would have saved the VM, and in how much time, in seconds.
    pub(super) fn saved(&self, vm: &VmId, host: &HostId) -> (f64, f64) {
        let saved = self.vms.get(vm).and_then(|account| account.saved.get(host));
        saved.map_or((0.0, 0.0), |saved| (saved.saved_s, saved.for_s))
    }

    /// Whether the network to the VM's data is what being at that host would have saved.
    pub(super) fn is_by_data(&self, vm: &VmId, host: &HostId) -> bool {
        self.vms.get(vm).and_then(|account| account.saved.get(host)).is_some_and(Saved::is_by_data)
    }

    /// The VM's move that is on trial, and the one that was judged last.
    pub(super) fn trials(&self, vm: &VmId) -> (Option<MoveTrial>, Option<MoveTrial>) {
        let shown = |trial: &Trial| {
            let Trial { from, price_s, gained_s, left_s } = trial.clone();
            MoveTrial { from, price_s, gained_s, left_s }
        };
        let account = self.vms.get(vm);
        let of = |trial: fn(&Account) -> &Option<Trial>| {
            account.and_then(|account| trial(account).as_ref()).map(shown)
        };
        (of(|account| &account.trial), of(|account| &account.judged))
    }

    pub(super) fn close(&mut self, vm: &VmId) {
        if let Some(account) = self.vms.get_mut(vm) {
            account.saved.clear();
        }
    }

    pub(super) fn close_one(&mut self, vm: &VmId, to: &HostId) {
        if let Some(account) = self.vms.get_mut(vm) {
            account.saved.remove(to);
        }
    }

    /// Adds seconds that were saved or lost, up to `most_s`. Returns the account; `None` if it is empty.
    pub(super) fn add(
        &mut self,
        load: &VmLoad,
        to: &HostId,
        more: Saved,
        most_s: f64,
    ) -> Option<Saved> {
        let known = self.vms.get_mut(&load.vm).and_then(|account| account.saved.get_mut(to));
        let all = known.as_deref().copied().unwrap_or_default().plus(more);
        let new = Saved { saved_s: all.saved_s.min(most_s), ..all };
        match known {
            Some(known) if new.saved_s > 0.0 => *known = new,
            Some(_) => self.close_one(&load.vm, to),
            None if new.saved_s > 0.0 => {
                self.of(load).saved.insert(to.clone(), new);
            }
            None => {}
        }
        (new.saved_s > 0.0).then_some(new)
    }

    fn of(&mut self, load: &VmLoad) -> &mut Account {
        self.vms.entry(load.vm.clone()).or_insert_with(|| Account::at(&load.host))
    }

    /// What was saved counts no longer at these hosts, where a VM was or will be that is part of that.
    fn clear_changed(&mut self, changed: &BTreeSet<&HostId>) {
        for account in self.vms.values_mut() {
            if changed.contains(&account.host) {
                account.saved.clear();
            } else {
                account.saved.retain(|to, _| !changed.contains(to));
            }
        }
    }

    /// VMs with their new hosts and the prices.
    pub(super) fn moved<'a>(
        &mut self,
        moves: impl Iterator<Item = (&'a VmLoad, &'a HostId, f64)> + Clone,
    ) {
        let changed: BTreeSet<&HostId> =
            moves.clone().flat_map(|(load, to, _)| [&load.host, to]).collect();
        if changed.is_empty() {
            return;
        }
        self.clear_changed(&changed);
        for (load, to, price_s) in moves {
            let account = self.of(load);
            account.doublings += 1.0;
            let trial = Trial { from: load.host.clone(), price_s, gained_s: 0.0, left_s: TRIAL_S };
            (account.host, account.trial) = (to.clone(), Some(trial));
        }
    }

    /// The VM has stayed where it is, because its move was refused: that makes no other one dearer.
    pub fn undo(&mut self, vm: &VmId, stays_at: &HostId) {
        if let Some(account) = self.vms.get_mut(vm) {
            account.doublings = (account.doublings - 1.0).max(0.0);
            (account.host, account.trial) = (stays_at.clone(), None);
        }
    }

    /// `saved` is what being at the host before would save now, in seconds per second; `None` if that is not known.
    pub(super) fn judge_trial(
        &mut self,
        vm: &VmId,
        passed_s: f64,
        saved: impl Fn(&HostId) -> Option<f64>,
    ) {
        let Some(account) = self.vms.get_mut(vm) else { return };
        let Some(trial) = &mut account.trial else { return };
        trial.left_s -= passed_s;
        let saved = saved(&trial.from);
        trial.gained_s -= saved.unwrap_or(0.0) * passed_s;
        if trial.left_s <= 0.0 {
            // What can't be judged at the end was no wrong prediction.
            if saved.is_some() && trial.gained_s < trial.price_s {
                account.doublings += 1.0;
            }
            account.judged = account.trial.take().filter(|_| saved.is_some());
        }
    }
}
