//! Where the VMs are that have rules about each other ([`perigee_model::HostRules`]).
//!
//! A VM counts from the moment at which it is given a host, and at both hosts while it moves, as its room does.

use std::collections::BTreeMap;

use perigee_model::{HostId, HostRules, JobId, Problem, VmId};
use perigee_planner::queue::{Bounds, Grouped, Groups};

use super::holds::{Held, Hold};
use super::{Index, Inner};
use crate::records::{JOB_INTENTS, JobIntent, JobRecord, Records, vm_of};

/// The groups of a record's VM; of a gang, those of each of its VMs.
pub fn groups_of(record: &JobRecord) -> Groups {
    Groups::of(record.job.id.as_str(), &record.job.spec.rules)
}

/// By what name a VM counts in its groups: the VMs of a gang keep the rules among themselves as a whole.
fn counted_as(record: &JobRecord) -> &JobId {
    record.kind.member().map_or(&record.job.id, |member| &member.gang)
}

impl Index {
    /// Where all VMs are that have rules.
    pub fn grouped(&self) -> Grouped {
        self.lock().grouped()
    }

    /// Where the VM may be for its rules; `None` if it has none. `binds` says whether a host keeps the others of a group together.
    pub fn bounds_of(&self, record: &JobRecord, binds: impl Fn(&HostId) -> bool) -> Option<Bounds> {
        self.lock().bounds_of(record, &groups_of(record), binds)
    }

    /// From here on the VM keeps these rules beside its own ones, until they are recorded as asked for: then [`Self::keep_rules`] keeps them.
    ///
    /// # Errors
    /// Why it can't where it is now, in plain words.
    pub fn begin_rules(
        &self,
        record: &JobRecord,
        rules: &HostRules,
        binds: impl Fn(&HostId) -> bool,
    ) -> Result<Hold<'_>, String> {
        let mut inner = self.lock();
        let groups = Groups::of(record.job.id.as_str(), rules);
        if let Some(bounds) = inner.bounds_of(record, &groups, binds) {
            let mut hosts = Vec::new();
            inner.each_place(|of, host, _| {
                if of.job.id == record.job.id {
                    hosts.push(host.clone());
                }
            });
            let refusal = hosts.iter().find_map(|host| Some((host, bounds.why_not(host)?)));
            if let Some((host, why)) = refusal {
                return Err(format!("it is at {host}: {why}"));
            }
        }
        let held = Held::Rules(vm_of(&record.job.id), groups);
        inner.held.push(held.clone());
        drop(inner);
        Ok(self.hold(held))
    }

    /// The VM keeps the rules that were asked for with this number until its driver has recorded them, whether anybody still waits for that
    /// or not.
    pub fn keep_rules(&self, record: &JobRecord, number: u64, rules: &HostRules) {
        let mut inner = self.lock();
        let id = &record.job.id;
        if inner.rules_asked.get(id).is_none_or(|(newest, _)| *newest < number) {
            let groups = Groups::of(id.as_str(), rules);
            inner.rules_asked.insert(id.clone(), (number, groups));
        }
        // The driver may have been faster.
        inner.forget_rules_recorded(id);
    }

    /// Keeps the rules that were asked for before the controller started, and that no driver has recorded yet.
    ///
    /// # Errors
    /// If the store does not answer, or a record can't be read.
    pub(super) async fn keep_rules_asked_for(&self, records: &Records) -> Result<(), Problem> {
        for key in records.keys(JOB_INTENTS).await? {
            let of = key.strip_prefix(JOB_INTENTS).and_then(|id| JobId::new(id).ok());
            let Some(record) = of.and_then(|id| self.job(&id)) else { continue };
            let asked: Option<JobIntent> = records.read(&key).await?;
            let Some((number, set)) = asked.and_then(|intent| intent.set) else { continue };
            if let Some(rules) = &set.rules {
                self.keep_rules(&record, number, rules);
            }
        }
        Ok(())
    }
}

impl Inner {
    /// Rules that are recorded hold because the VM's record has them. Those of a VM that has ended hold no longer.
    pub(super) fn forget_rules_recorded(&mut self, id: &JobId) {
        let Some((number, _)) = self.rules_asked.get(id) else { return };
        let record = self.jobs.get(id).and_then(|record| record.kind.persistent_vm());
        if record.is_none_or(|vm| vm.set >= *number) {
            self.rules_asked.remove(id);
        }
    }

    /// The groups of the VM, and those of the rules that it is being given.
    fn all_groups_of(&self, record: &JobRecord) -> Vec<Groups> {
        let vm = vm_of(&record.job.id);
        let coming = self.held.iter().filter_map(|held| match held {
            Held::Rules(of, groups) if *of == vm => Some(groups),
            _ => None,
        });
        let asked = self.rules_asked.get(&record.job.id).map(|(_, groups)| groups);
        let coming = coming.chain(asked).cloned();
        std::iter::once(groups_of(record)).chain(coming).collect()
    }

    /// Why the VM may not be at the host for its rules, or for those that it is being given, in plain words.
    pub(super) fn why_ruled_out(
        &self,
        record: &JobRecord,
        host: &HostId,
        binds: impl Fn(&HostId) -> bool,
    ) -> Option<String> {
        self.all_groups_of(record)
            .iter()
            .find_map(|groups| self.bounds_of(record, groups, &binds)?.why_not(host))
    }

    fn grouped(&self) -> Grouped {
        let mut grouped = Grouped::default();
        let held = self.held.iter().filter_map(|held| match held {
            Held::Rules(vm, groups) => Some((vm, groups)),
            _ => None,
        });
        let changing: BTreeMap<&VmId, &Groups> = held.collect();
        self.each_place(|record, host, _| {
            if record.job.spec.rules != HostRules::default() {
                grouped.add(counted_as(record), &groups_of(record), host);
            }
            if let Some(groups) = changing.get(&vm_of(&record.job.id)) {
                grouped.add(counted_as(record), groups, host);
            }
            if let Some((_, groups)) = self.rules_asked.get(&record.job.id) {
                grouped.add(counted_as(record), groups, host);
            }
        });
        grouped
    }

    /// `None` if there is no group.
    pub(super) fn bounds_of(
        &self,
        record: &JobRecord,
        groups: &Groups,
        binds: impl Fn(&HostId) -> bool,
    ) -> Option<Bounds> {
        let has_rules = !groups.is_none();
        has_rules.then(|| self.grouped().bounds(counted_as(record), groups, binds))
    }

    /// Whether the VM may not be at one of these hosts, for its rules or for those that it is being given.
    pub(super) fn is_ruled_out(
        &self,
        record: &JobRecord,
        hosts: &[&HostId],
        binds: impl Fn(&HostId) -> bool,
    ) -> bool {
        let binds = |host: &HostId| binds(host) && !record.avoid.contains(host);
        self.all_groups_of(record).iter().any(|groups| {
            let bounds = self.bounds_of(record, groups, binds);
            bounds.is_some_and(|bounds| hosts.iter().any(|host| !bounds.allow(host)))
        })
    }
}
