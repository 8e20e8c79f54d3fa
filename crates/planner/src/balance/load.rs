//! What the VMs of a look lose at their hosts, and would lose at others.

use std::collections::{BTreeMap, BTreeSet};

use perigee_model::{HostId, SiteId};

use super::{Comes, HostLoad, Look, TAKEN, TARGETS, VmLoad};

/// How many of the emptiest hosts of a site are looked at for one VM.
const EMPTIEST: usize = 4 * TARGETS;

/// The hosts' loads, with the moves that were decided since.
pub(super) struct Loads<'a> {
    pub look: &'a Look,
    numbers: BTreeMap<&'a HostId, usize>,
    at: Vec<At>,
    in_a_move: BTreeSet<usize>,
    /// Of each site the hosts that VMs may come to, those with the most idle processors first.
    emptiest: BTreeMap<&'a SiteId, Vec<usize>>,
    /// Where the VMs of each group are that is to be together.
    together: BTreeMap<&'a str, Vec<usize>>,
    /// The same for groups that are to be apart.
    apart: BTreeMap<&'a str, Vec<usize>>,
}

/// What is at a host.
#[derive(Default)]
struct At {
    /// Processors that are wanted; `None` if that is not known.
    wanted: Option<f64>,
    vms: usize,
    vms_memory_bytes: f64,
    free_memory_bytes: u64,
    free_vcpus: u32,
}

/// By so much less crowded a host must be that has not all the processors that a VM wants.
const LESS_CROWDED: f64 = 0.75;

fn is_sound(figure: &f64) -> bool {
    figure.is_finite() && *figure >= 0.0
}

/// Processors that the VM used, or wanted and did not get.
fn wanted(load: &VmLoad) -> Option<f64> {
    let (used, waited) = load.used_cpus.zip(load.waited_cpus)?;
    let wanted = Some(used + waited).filter(|_| is_sound(&used) && is_sound(&waited));
    wanted.map(|wanted| wanted.min(f64::from(load.vcpus)))
}

fn memory(load: &VmLoad) -> f64 {
    load.memory_bytes as f64
}

impl<'a> Loads<'a> {
    pub fn of(look: &'a Look) -> Self {
        let numbers: BTreeMap<&HostId, usize> =
            look.hosts.iter().enumerate().map(|(number, load)| (&load.host, number)).collect();
        let mut at: Vec<At> = look.hosts.iter().map(without_vms).collect();
        let [mut together, mut apart] = [BTreeMap::<&str, Vec<usize>>::new(), BTreeMap::new()];
        for load in &look.vms {
            let Some(&host) = numbers.get(&load.host) else { continue };
            let here = &mut at[host];
            here.wanted = here.wanted.zip(wanted(load)).map(|(others, own)| others + own);
            here.vms += 1;
            here.vms_memory_bytes += memory(load);
            for (groups, group) in [(&mut together, &load.together), (&mut apart, &load.apart)] {
                if let Some(group) = group {
                    groups.entry(group.as_str()).or_default().push(host);
                }
            }
        }
        let in_a_move = look.hosts.iter().enumerate().filter(|(_, load)| load.in_a_move);
        Self {
            in_a_move: in_a_move.map(|(number, _)| number).collect(),
            emptiest: emptiest(look, &at),
            numbers,
            at,
            together,
            apart,
            look,
        }
    }

    pub fn number(&self, host: &HostId) -> Option<usize> {
        self.numbers.get(host).copied()
    }

    pub fn host_of(&self, vm: usize) -> Option<usize> {
        self.number(&self.look.vms[vm].host)
    }

    pub fn not_known(&self) -> Vec<HostId> {
        let hosts = self.look.hosts.iter().zip(&self.at);
        hosts.filter(|(_, at)| at.wanted.is_none()).map(|(load, _)| load.host.clone()).collect()
    }

    /// How many other VMs are at the VM's host.
    pub fn neighbours(&self, vm: usize) -> usize {
        self.host_of(vm).map_or(0, |here| self.at[here].vms.saturating_sub(1))
    }

    /// The emptiest hosts that have room for the VM: half of them at its own site, if that has as many.
    pub fn emptiest(&self, vm: usize, here: usize) -> impl Iterator<Item = usize> + '_ {
        let own = &self.look.hosts[here].site;
        let others = self.emptiest.iter().filter(move |(site, _)| **site != own);
        let at_others = others.flat_map(|(_, hosts)| hosts.iter().take(2));
        let at_own = self.emptiest.get(own).into_iter().flatten().take(EMPTIEST);
        let rest = at_own.clone();
        let has_room = move |host: &usize| *host != here && self.is_allowed(vm, *host);
        let first = at_own.copied().filter(has_room).take(TARGETS / 2);
        let rest = rest.copied().filter(has_room).skip(TARGETS / 2);
        first.chain(at_others.copied().filter(has_room)).chain(rest)
    }

    /// Processors that are wanted beyond those that the host has: so many seconds are lost there each second.
    fn lost(&self, host: usize, wanted: f64) -> f64 {
        (wanted - self.look.hosts[host].cpus).max(0.0)
    }

    /// What the host's being short of memory costs, if so much of its VMs' memory were not there.
    fn memory_costs(&self, host: usize, vm_bytes: f64, all_bytes: f64) -> f64 {
        let stalled = self.look.hosts[host].memory_stalled.filter(|s| (0.0..=1.0).contains(s));
        stalled.unwrap_or(0.0) * vm_bytes / all_bytes.max(1.0)
    }

    /// What the VM costs itself and its neighbours where it is, in seconds per second.
    fn costs(&self, vm: usize, here: usize) -> Option<f64> {
        let load = &self.look.vms[vm];
        let (all, own) = (self.at[here].wanted?, wanted(load)?);
        let by_memory = self.memory_costs(here, memory(load), self.at[here].vms_memory_bytes);
        Some(self.lost(here, all) - self.lost(here, all - own) + by_memory)
    }

    /// Whether the VM's being elsewhere can save anything.
    pub fn loses(&self, vm: usize, here: usize) -> bool {
        let data_lost = self.look.vms[vm].data_lost;
        self.costs(vm, here).zip(data_lost).is_some_and(|(costs, data)| costs > 0.0 || data > 0.0)
    }

    /// What the VM's being at the other host, where it would lose that share of its time to the network, would save all of its neighbours,
    /// old and new, and itself, in seconds per second. `None` if a load is not known.
    pub fn saved(&self, vm: usize, here: usize, there: usize, data_lost: f64) -> Option<f64> {
        let load = &self.look.vms[vm];
        let own = wanted(load)?;
        let data_here = load.data_lost.filter(is_sound)?;
        let all = self.at[there].wanted?;
        let all_bytes = self.at[there].vms_memory_bytes + memory(load);
        let would_cost = self.lost(there, all + own) - self.lost(there, all)
            + self.memory_costs(there, memory(load), all_bytes);
        Some(self.costs(vm, here)? - would_cost + data_here.min(1.0) - data_lost)
    }

    /// What of that is a reason to go there. For a CPU no VM leaves the hosts that are balanced together, so at another host no more counts than
    /// what the VM would lose less to the network to its data.
    pub fn saved_for(&self, vm: usize, here: usize, there: usize, data_lost: f64) -> Option<f64> {
        let saved = self.saved(vm, here, there, data_lost)?;
        let by_data = self.look.vms[vm].data_lost?.min(1.0) - data_lost;
        let is_near = self.look.hosts[there].comes == Comes::All;
        Some(if is_near { saved } else { saved.min(by_data) })
    }

    /// Processors that are wanted at the host; `None` if that is not known.
    pub fn wanted(&self, host: usize) -> Option<f64> {
        self.at[host].wanted
    }

    /// What stands against the VM's being at the host, whatever that would save; `None` if nothing does. `by_data`: the VM would go there for
    /// its data, for which processors need not be left.
    pub fn why_not(&self, vm: usize, here: usize, to: usize, by_data: bool) -> Option<String> {
        let (load, host, at) = (&self.look.vms[vm], &self.look.hosts[to], &self.at[to]);
        let why = if !host.takes_vms {
            "it is drained, does not answer, or has its VMs give memory back"
        } else if load.taken_from.as_ref() == Some(&host.host) {
            TAKEN
        } else if !self.is_near(vm, to) {
            "it is at another site, and has no data of the VM"
        } else if load.memory_bytes > at.free_memory_bytes {
            "it has not enough memory free"
        } else if load.vcpus > at.free_vcpus {
            "it has not enough vCPUs free"
        } else if !self.is_allowed_by_groups(vm, to) {
            "the VMs that this one is to be with, or not with, stand against it"
        } else if at.wanted.is_none() {
            "its load is not known"
        } else if !by_data && self.at[here].wanted.is_some() && !self.fits(vm, here, to) {
            "it has no processors left for the VM"
        } else {
            return None;
        };
        Some(why.to_owned())
    }

    /// Whether the VM may be at the host: room that can't be shared, the rules of its groups, and what a person has decided.
    pub fn is_allowed(&self, vm: usize, to: usize) -> bool {
        let (load, host) = (&self.look.vms[vm], &self.look.hosts[to]);
        let at = &self.at[to];
        let has_room = load.memory_bytes <= at.free_memory_bytes && load.vcpus <= at.free_vcpus;
        let is_back = load.taken_from.as_ref() == Some(&host.host);
        let is_free = host.takes_vms && has_room && !is_back;
        is_free && self.is_near(vm, to) && self.is_allowed_by_groups(vm, to)
    }

    /// Whether the host is one of those that are balanced together, or has data of the VM.
    pub fn is_near(&self, vm: usize, to: usize) -> bool {
        let host = &self.look.hosts[to];
        host.comes == Comes::All || self.look.vms[vm].data_at.contains(&host.host)
    }

    fn is_allowed_by_groups(&self, vm: usize, to: usize) -> bool {
        let load = &self.look.vms[vm];
        let count = |hosts: &[usize], at: Option<usize>| {
            hosts.iter().filter(|host| Some(**host) == at).count()
        };
        let together = load.together.as_deref().and_then(|group| self.together.get(group));
        let apart = load.apart.as_deref().and_then(|group| self.apart.get(group));
        let joins = together.is_none_or(|hosts| {
            // The VM itself is one of those at its host.
            hosts.len() == 1 || count(hosts, Some(to)) >= count(hosts, self.host_of(vm))
        });
        joins && apart.is_none_or(|hosts| count(hosts, Some(to)) == 0)
    }

    /// Whether the processors that the VM wants are left at the host, or are wanted by clearly less there, with the VM, than at its own host:
    /// a host with few processors is never quite idle. The more crowded one of both hosts is less crowded after each such move, so while the
    /// loads stay as they are the moves come to an end.
    pub fn fits(&self, vm: usize, here: usize, to: usize) -> bool {
        let all = |host: usize| self.at[host].wanted;
        let own = wanted(&self.look.vms[vm]);
        let Some(((wanted, there), own)) = all(here).zip(all(to)).zip(own) else { return false };
        let share = |host: usize, wanted: f64| wanted / self.look.hosts[host].cpus;
        let there = share(to, there + own);
        there <= 1.0 || there <= share(here, wanted) * LESS_CROWDED
    }

    /// Takes the VM's room at the other host, if neither host takes part in a move.
    pub fn reserve(&mut self, vm: usize, to: usize) -> bool {
        let Some(from) = self.host_of(vm) else { return false };
        if [from, to].iter().any(|host| self.in_a_move.contains(host)) {
            return false;
        }
        self.in_a_move.extend([from, to]);
        true
    }
}

fn without_vms(load: &HostLoad) -> At {
    let has_cpus = is_sound(&load.cpus) && load.cpus > 0.0;
    At {
        wanted: load.other_cpus.filter(|other| is_sound(other) && has_cpus),
        free_memory_bytes: load.free_memory_bytes,
        free_vcpus: load.free_vcpus,
        ..At::default()
    }
}

fn emptiest<'a>(look: &'a Look, at: &[At]) -> BTreeMap<&'a SiteId, Vec<usize>> {
    let mut sites: BTreeMap<&SiteId, Vec<(f64, usize)>> = BTreeMap::new();
    for (number, (load, at)) in look.hosts.iter().zip(at).enumerate() {
        let Some(free) = at.wanted.map(|wanted| load.cpus - wanted) else { continue };
        if load.takes_vms && load.comes == Comes::All && free > 0.0 {
            sites.entry(&load.site).or_default().push((free, number));
        }
    }
    let sorted = sites.into_iter().map(|(site, mut hosts)| {
        hosts.sort_by(|a, b| b.0.total_cmp(&a.0));
        (site, hosts.into_iter().map(|(_, number)| number).collect())
    });
    sorted.collect()
}
