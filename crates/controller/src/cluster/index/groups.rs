//! Where the VMs are that have rules about each other ([`perigee_model::HostRules`]).
//!
//! A VM counts from the moment at which it is given a host, and at both hosts while it moves, as its room does.

use std::collections::BTreeMap;

use perigee_model::{HostId, HostRules, JobId, VmId};
use perigee_planner::queue::{Bounds, Grouped, Groups};

use super::holds::{Held, Hold};
use super::{Index, Inner};
use crate::records::{JobRecord, vm_of};

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

    /// From here on the VM keeps these rules beside its own ones, until its driver has recorded them.
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
}

impl Inner {
    fn grouped(&self) -> Grouped {
        let mut grouped = Grouped::default();
        let changing = self.held.iter().filter_map(|held| match held {
            Held::Rules(vm, groups) => Some((vm, groups)),
            _ => None,
        });
        let changing: BTreeMap<&VmId, &Groups> = changing.collect();
        self.each_place(|record, host, _| {
            if record.job.spec.rules != HostRules::default() {
                grouped.add(counted_as(record), &groups_of(record), host);
            }
            if let Some(groups) = changing.get(&vm_of(&record.job.id)) {
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
        let vm = vm_of(&record.job.id);
        let coming = self.held.iter().filter_map(|held| match held {
            Held::Rules(of, groups) if *of == vm => Some(groups.clone()),
            _ => None,
        });
        let binds = |host: &HostId| binds(host) && !record.avoid.contains(host);
        std::iter::once(groups_of(record)).chain(coming).any(|groups| {
            let bounds = self.bounds_of(record, &groups, binds);
            bounds.is_some_and(|bounds| hosts.iter().any(|host| !bounds.allow(host)))
        })
    }
}
