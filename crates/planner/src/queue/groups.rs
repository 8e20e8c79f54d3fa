//! Rules of VMs about each other: `together` keeps a group on one host, `apart` keeps its VMs on different ones.
//!
//! - A VM counts at its host, at the host that it was given, and while it moves at both hosts. Nobody joins its group before it has come.
//! - A host that is drained binds nobody with `together`: all of its VMs leave. One at which the VM itself was lost binds it no longer.
//!   Any other host does, also while it does not answer: its VMs may run.
//! - The VMs of one job keep the rules among themselves too.

use std::collections::{BTreeMap, BTreeSet};

use perigee_model::tenant::{SEPARATOR, tenant_of};
use perigee_model::{HostId, HostRules, JobId};

/// So many VMs are named in a reason.
const NAMED_MAX: usize = 3;

/// The groups of a VM, or of each VM of a job, by their full names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Groups {
    /// It is at one host with the others of this group.
    pub together: Option<String>,
    /// It is at no host that has another one of this group.
    pub apart: Option<String>,
}

impl Groups {
    /// Of a job or VM with this full name. Groups of two tenants with one name are two groups.
    pub fn of(name: &str, rules: &HostRules) -> Self {
        let full =
            |group: &perigee_model::GroupName| format!("{}{SEPARATOR}{group}", tenant_of(name));
        Self { together: rules.together.as_ref().map(full), apart: rules.apart.as_ref().map(full) }
    }

    /// Whether it has no rule.
    pub fn is_none(&self) -> bool {
        self.together.is_none() && self.apart.is_none()
    }
}

/// The name of a group as its tenant writes it.
fn short(group: &str) -> &str {
    group.rsplit(SEPARATOR).next().unwrap_or(group)
}

/// Of one group: the VMs at each host, each by its name, or by the name of its job if that has several.
type Members = BTreeMap<HostId, BTreeSet<JobId>>;

/// Where the VMs of all groups are.
#[derive(Debug, Clone, Default)]
pub struct Grouped {
    together: BTreeMap<String, Members>,
    apart: BTreeMap<String, Members>,
}

impl Grouped {
    /// A VM, or one of a job's VMs, is at a host, or on the way there.
    pub fn add(&mut self, of: &JobId, groups: &Groups, host: &HostId) {
        let own = [(&mut self.together, &groups.together), (&mut self.apart, &groups.apart)];
        for (all, group) in own {
            let Some(group) = group else { continue };
            let members = all.entry(group.clone()).or_default();
            members.entry(host.clone()).or_default().insert(of.clone());
        }
    }

    /// Where a VM with these groups may be. `binds` says whether a host keeps the others of a group together.
    pub fn bounds(&self, of: &JobId, groups: &Groups, binds: impl Fn(&HostId) -> bool) -> Bounds {
        let others = |all: &BTreeMap<String, Members>, group: &Option<String>| {
            let members = group.as_ref().and_then(|group| all.get(group)).into_iter().flatten();
            let other = |(host, vms): (&HostId, &BTreeSet<JobId>)| {
                let other = vms.iter().find(|vm| *vm != of)?;
                Some((host.clone(), other.clone()))
            };
            members.filter_map(other).collect::<BTreeMap<HostId, JobId>>()
        };
        let mut beside = others(&self.together, &groups.together);
        beside.retain(|host, _| binds(host));
        let is_bound = !beside.is_empty();
        let members = groups.together.as_ref().and_then(|group| self.together.get(group));
        let there = |host: &HostId| {
            members.and_then(|all| all.get(host)).into_iter().flatten().filter(|vm| *vm != of)
        };
        // Where the group will be is known when the VM that moves has come.
        let moves =
            |vm: &JobId| beside.keys().filter(|host| there(host).any(|at| at == vm)).count() > 1;
        let settled: BTreeSet<HostId> =
            beside.keys().filter(|host| there(host).all(|vm| !moves(vm))).cloned().collect();
        beside.retain(|host, _| settled.contains(host));
        Bounds {
            groups: groups.clone(),
            beside: is_bound.then_some(beside),
            never: others(&self.apart, &groups.apart),
        }
    }
}

/// Where a VM may be for its groups. For each host one of the VMs there is named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    groups: Groups,
    /// Only at these hosts; `None`: at any.
    beside: Option<BTreeMap<HostId, JobId>>,
    /// Not at these.
    never: BTreeMap<HostId, JobId>,
}

impl Bounds {
    /// Whether it may be there.
    pub fn allow(&self, host: &HostId) -> bool {
        self.beside.as_ref().is_none_or(|hosts| hosts.contains_key(host))
            && !self.never.contains_key(host)
    }

    /// Why it may not be there; `None` if it may.
    pub fn why_not(&self, host: &HostId) -> Option<String> {
        if let Some(other) = self.never.get(host) {
            let group = self.groups.apart.as_deref().map(short).unwrap_or_default();
            return Some(format!("{other} is there, and the VMs of group {group} are kept apart"));
        }
        if self.allow(host) {
            return None;
        }
        let group = self.groups.together.as_deref().map(short).unwrap_or_default();
        let others = named(self.beside.as_ref()?);
        Some(format!("the VMs of group {group} are kept together: {others}"))
    }

    /// Why it may not be everywhere; empty if it may.
    pub fn in_words(&self) -> String {
        let apart = Some(&self.never).filter(|hosts| !hosts.is_empty());
        let rules = [("together with", self.beside.as_ref()), ("apart from", apart)];
        let words = rules
            .into_iter()
            .filter_map(|(rule, hosts)| Some(format!("it is kept {rule} {}", named(hosts?))));
        words.collect::<Vec<_>>().join("; ")
    }
}

/// As in `web-1 at h1, web-2 at h2`.
fn named(hosts: &BTreeMap<HostId, JobId>) -> String {
    if hosts.is_empty() {
        return "others of its group, of which one is just moving".to_owned();
    }
    let mut words: Vec<String> =
        hosts.iter().take(NAMED_MAX).map(|(host, vm)| format!("{vm} at {host}")).collect();
    let more = hosts.len().saturating_sub(NAMED_MAX);
    if more > 0 {
        words.push(format!("and {more} more"));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests;
