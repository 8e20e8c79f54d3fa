//! The ways to run a gang: a job with several VMs, which start together.
//!
//! Each rank is predicted as a job of its own is, at the host where it would be and with the other VMs beside it; [`Ranks`] says
//! what all of them take. The way of a gang is that of its rank that is farthest from its data: `beside` if all are beside theirs.
//!
//! Looked at are the sites that have room for all of its VMs, at most [`SITES_MOST`] of them; if none has, and no site could ever have it, all hosts
//! together. At each, the ranks are placed
//! one after the other, each at the host that is best for it with those before it there: once with any host, and once with only those hosts
//! that are beside the rank's data, beside a replica, or far from both. Which of a placement's hosts gets which rank is changed for their talk
//! (`arrange.rs`) if that is no worse. So not all placements are looked at. A move goes from the best start to the best place with less loss, and a copy brings
//! the data to the start, as [`crate::gangs::consider`] makes them (`changes.rs`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use perigee_model::plan::{
    Basis, Estimate, OptionCost, Part, Plan, PlanOption, Seconds, Unknown, Way,
};
use perigee_model::units::format_bytes;
use perigee_model::{HostId, SiteId};

use super::alike::{self, Close};
use super::changes as of_one;
use super::cost;
use super::stays::{self, Stay};
use super::{Candidate, choose, homes_are_up, packing, whole_bytes};
use crate::arrange::{Place as Spot, arrange};
use crate::facts::{Before, Cluster, HostFacts, MoneyFacts, Snapshot};
use crate::figures::Figures;
use crate::gangs::{GangFacts, Ranks, Somewhere, Talked};
use crate::hosts::Boots;
use crate::refused::Refused;
use crate::spread::Spread;

/// Of the sites with room, those come first where all of its VMs may start, then those with its data, and then those with most room.
const SITES_MOST: usize = 6;
/// At each of them so many hosts are looked at, or twice as many as the gang has VMs; first those where they may start.
const HOSTS_MOST: usize = 32;

/// How near its data a rank has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Near {
    Any,
    Beside,
    Replica,
    Far,
}

impl Near {
    const ALL: [Self; 4] = [Self::Any, Self::Beside, Self::Replica, Self::Far];

    fn allows(self, way: Way, has_data: bool) -> bool {
        match self {
            Self::Any => true,
            Self::Beside => way == Way::Beside,
            Self::Replica => way != Way::Remote,
            Self::Far => way == Way::Remote || !has_data,
        }
    }
}

/// The farther from the data, the greater.
fn farness(way: Way) -> u8 {
    match way {
        Way::Beside => 0,
        Way::Replica => 1,
        _ => 2,
    }
}

/// Compares the ways as [`super::plan`] does.
///
/// # Errors
/// [`Refused`] if its VMs have no room together, a volume's home is not up, or a link is not measured.
pub(super) fn plan(snapshot: &Snapshot, gang: &GangFacts) -> Result<Plan, Refused> {
    homes_are_up(snapshot)?;
    let mut figures = Figures::default();
    let ranks = Ranks::of(snapshot, gang, &mut figures)?;
    let mut placer = Placer::of(snapshot, gang, &ranks);
    let scopes = placer.scopes();
    let starts = placer.ways(&scopes, false);
    if starts.is_empty() {
        return Err(placer.refused.take().unwrap_or_else(|| placer.no_room()));
    }
    let ends = placer.ways(&scopes, true);
    let mut candidates = starts.clone();
    let starts_so = |way: Way| starts.iter().any(|start| start.option.way == way);
    let not_allowed = ends.iter().filter(|end| end.impossible.is_some());
    candidates.extend(not_allowed.filter(|end| !starts_so(end.option.way)).cloned());
    candidates.extend(placer.moves(&starts, &ends, &mut figures));
    candidates.extend(placer.copies(&starts, &mut figures));
    if let Some(whole) = gang.whole.filter(|_| gang.runs.is_empty()) {
        figures.measured("what equal runs took, wherever they were".to_owned());
        candidates.iter_mut().for_each(|candidate| takes(candidate, whole));
    }
    let has_whole = gang.whole.is_some() && gang.runs.is_empty();
    let basis = if has_whole { Basis::History } else { ranks.basis() };
    let money = whole_money(&snapshot.job.money);
    let cluster = &snapshot.cluster;
    let bill = |candidate: &Candidate| bill(cluster, &ranks, candidate);
    cost::decide(&mut candidates, (cluster, &money), &bill, &mut figures);
    if let Some(first) = candidates.first() {
        placer.say(first, &mut figures);
    }
    let apart = |one: &Candidate, other: &Candidate| {
        let (rank, at) = (&ranks.all[one.slowest], |c: &Candidate| c.ranks[one.slowest].place);
        rank.learned.longer(&at(one), &at(other)).plus(one.talk).plus(other.talk.times(-1.0))
    };
    let default_start = candidates.first().and_then(|chosen| placer.default_start(&chosen.option));
    Ok(choose(candidates, (basis, &money), &apart, (default_start, figures)))
}

/// The whole gang takes so long, of which nothing more is known.
fn takes(candidate: &mut Candidate, whole: Estimate) {
    let boot_s = candidate.option.predicted.boot_s.min(whole.expected_s);
    let other_s = whole.expected_s - boot_s;
    candidate.option.predicted = Seconds { boot_s, other_s, ..Seconds::default() }.added_up();
    candidate.option.total = whole;
    candidate.option.unknown.clear();
    // Its VMs are paid for as long.
    candidate.ranks.iter_mut().for_each(|alone| alone.option.total = whole);
}

/// The budget of all VMs, as one.
fn whole_money(money: &MoneyFacts) -> MoneyFacts {
    let budget = money.budget.map(|part| money.whole_budget(part));
    MoneyFacts { budget, vms: 1, ..*money }
}

/// Each VM is paid for until the last one has ended.
fn bill(cluster: &Cluster, ranks: &Ranks, candidate: &Candidate) -> OptionCost {
    let each = ranks.all.iter().zip(&candidate.ranks);
    cost::sum(each.map(|(rank, alone)| cost::bill((cluster, &rank.job), &rank.learned, alone)))
}

/// The hosts of a site that have room for one of its VMs.
#[derive(Default)]
struct Scope {
    /// Their numbers, each with whether its VMs may start there, and whether it has their data or a replica of them.
    hosts: Vec<(usize, bool, bool)>,
    /// Whether one of them is so near.
    is_near: bool,
    /// For so many VMs.
    room: usize,
    /// The same at the hosts where they may start.
    room_to_start: usize,
}

/// Where the ranks could be.
struct Placer<'a> {
    snapshot: &'a Snapshot,
    gang: &'a GangFacts,
    ranks: &'a Ranks,
    /// With the VMs of the gang that were placed.
    cluster: Cluster,
    /// Ranks with the same volumes are placed as the first of them would be.
    classes: Vec<usize>,
    refused: Option<Refused>,
}

impl<'a> Placer<'a> {
    fn of(snapshot: &'a Snapshot, gang: &'a GangFacts, ranks: &'a Ranks) -> Self {
        let first = |rank: usize| gang.volumes.iter().position(|of| *of == gang.volumes[rank]);
        let classes = (0..gang.volumes.len()).map(|rank| first(rank).unwrap_or(rank)).collect();
        let cluster = snapshot.cluster.clone();
        Self { snapshot, gang, ranks, cluster, classes, refused: None }
    }

    /// For how many more of its VMs a host has room.
    fn holds(&self, host: &HostFacts) -> usize {
        let job = &self.snapshot.job;
        let by_memory = host.memory_free_bytes.checked_div(job.memory_bytes).unwrap_or(u64::MAX);
        let vcpus = host.cpus.saturating_mul(self.gang.vcpus_per_cpu);
        let vcpus = vcpus.saturating_sub(host.running_vcpus);
        let by_cpus = vcpus.checked_div(self.gang.least_cpus).unwrap_or(u32::MAX);
        let holds = usize::try_from(by_memory).unwrap_or(usize::MAX).min(by_cpus as usize);
        match (self.gang.apart, self.gang.together) {
            (true, _) => holds.min(1),
            (_, true) if holds < self.gang.volumes.len() => 0,
            _ => holds,
        }
    }

    /// Not all of its VMs have room together where they may start.
    fn no_room(&self) -> Refused {
        let (job, count) = (&self.snapshot.job, self.gang.volumes.len());
        let mut of_sites: BTreeMap<&SiteId, usize> = BTreeMap::new();
        for host in self.cluster.hosts.iter().filter(|host| stays::may_start(&job.start, host)) {
            let room = of_sites.entry(&host.site).or_default();
            *room = room.saturating_add(self.holds(host));
        }
        let rooms = of_sites.into_values();
        let (hosts, room) = match self.gang.one_site {
            true => ("the site with most room", rooms.max().unwrap_or_default()),
            false => ("the hosts", rooms.fold(0, usize::saturating_add)),
        };
        let each = if self.gang.apart { ", one at each host" } else { "" };
        let together = match (self.gang.together, self.gang.one_site) {
            (true, _) => ", all at one host",
            (false, true) => ", all at one site",
            (false, false) => "",
        };
        let (vcpus, memory) = (self.gang.least_cpus, format_bytes(job.memory_bytes));
        let has = if self.gang.one_site { "has" } else { "have" };
        Refused::NoHost(format!(
            "its {count} VMs need {memory} of memory and {vcpus} vCPUs each{each}{together}, and {hosts} where they may start {has} room for {room}"
        ))
    }

    /// The numbers of the hosts at each place that is looked at.
    fn scopes(&self) -> Vec<Vec<usize>> {
        let (hosts, count) = (&self.cluster.hosts, self.gang.volumes.len());
        let near = self.near();
        let mut sites: BTreeMap<&SiteId, Scope> = BTreeMap::new();
        for (number, host) in hosts.iter().enumerate() {
            let holds = self.holds(host);
            if holds == 0 {
                continue;
            }
            let may_start = stays::may_start(&self.snapshot.job.start, host);
            let is_near = near.contains(&host.id);
            let scope = sites.entry(&host.site).or_default();
            scope.hosts.push((number, may_start, is_near));
            scope.is_near |= is_near;
            scope.room = scope.room.saturating_add(holds);
            if may_start {
                scope.room_to_start = scope.room_to_start.saturating_add(holds);
            }
        }
        let mut with_room: Vec<&Scope> =
            sites.values().filter(|scope| scope.room >= count).collect();
        with_room.sort_by_key(|scope| {
            (scope.room_to_start < count, !scope.is_near, Reverse(scope.room))
        });
        with_room.truncate(SITES_MOST);
        if with_room.is_empty() && !self.gang.one_site {
            let all = sites.values().flat_map(|scope| scope.hosts.iter().copied());
            return vec![self.looked_at(all.collect())];
        }
        with_room.into_iter().map(|scope| self.looked_at(scope.hosts.clone())).collect()
    }

    /// Of these hosts, those that are looked at. The flags say whether its VMs may start there, and whether it is near their data.
    fn looked_at(&self, mut all: Vec<(usize, bool, bool)>) -> Vec<usize> {
        let hosts = &self.cluster.hosts;
        let order = |(number, may_start, is_near): &(usize, bool, bool)| {
            (!*may_start, !*is_near, alike::order(&hosts[*number]))
        };
        all.sort_by(|one, other| order(one).cmp(&order(other)));
        all.truncate(HOSTS_MOST.max(2 * self.gang.volumes.len()));
        let mut numbers: Vec<usize> = all.into_iter().map(|(number, ..)| number).collect();
        packing::fullest_first(&mut numbers, |number| &hosts[number]);
        numbers
    }

    /// The hosts with its data or a replica of them.
    fn near(&self) -> BTreeSet<HostId> {
        let volumes = self.snapshot.job.volumes.iter();
        let each = volumes.flat_map(|volume| {
            let replicas = volume.copy.lacking.iter().map(|(host, _)| host);
            replicas.chain([&volume.home]).cloned()
        });
        each.collect()
    }

    /// Where it would start if nothing were known of it. If one of its VMs starts there so, that is no other place.
    fn default_start(&self, chosen: &PlanOption) -> Option<HostId> {
        let start = &self.snapshot.job.start;
        let may_start = |host: &&HostFacts| stays::may_start(start, host) && self.holds(host) > 0;
        let open = self.cluster.hosts.iter().filter(may_start);
        let first = open.min_by(|a, b| alike::order(a).cmp(&alike::order(b)))?;
        let is_chosen = chosen.hosts.contains(&first.id);
        Some(if is_chosen { chosen.start.clone() } else { first.id.clone() })
    }

    /// The best placement of each way and of hosts of the same prices; `ends`: also where it may not start.
    fn ways(&mut self, scopes: &[Vec<usize>], ends: bool) -> Vec<Candidate> {
        let mut all: Vec<Candidate> = Vec::new();
        let mut seen: Vec<Vec<usize>> = Vec::new();
        for numbers in scopes {
            for near in Near::ALL {
                let Some(hosts) = self.place(numbers, near, ends) else { continue };
                if seen.contains(&hosts) {
                    continue;
                }
                seen.push(hosts.clone());
                all.extend(self.all_at(&hosts));
            }
        }
        self.keep_best(&mut all);
        let mut all: Vec<Candidate> = all.into_iter().map(|one| self.arranged(one)).collect();
        // Another rank may be the one that is far from its data now.
        self.keep_best(&mut all);
        all.sort_by_key(|candidate| farness(candidate.option.way));
        all
    }

    /// Of each kind the soonest one is left.
    fn keep_best(&self, all: &mut Vec<Candidate>) {
        all.sort_by(of_one::by_time);
        let mut kinds = Vec::new();
        all.retain(|candidate| super::add_new(&mut kinds, self.kind(candidate)));
    }

    /// The way, and the prices of the hosts.
    fn kind(&self, candidate: &Candidate) -> (Way, Vec<usize>) {
        let price = |host: &HostId| self.cluster.host(host).map_or(0, HostFacts::price_number);
        let mut prices: Vec<usize> = candidate.option.hosts.iter().map(price).collect();
        prices.sort_unstable();
        prices.dedup();
        (candidate.option.way, prices)
    }

    /// A host for each rank; `None` if one finds none.
    fn place(&mut self, numbers: &[usize], near: Near, ends: bool) -> Option<Vec<usize>> {
        let mut known: Vec<Option<Vec<(usize, Stay)>>> =
            (0..self.classes.len()).map(|_| None).collect();
        let mut placed: Vec<usize> = Vec::new();
        let mut befores: Vec<Before> = Vec::new();
        for class in self.classes.clone() {
            let has_data = !self.gang.volumes[class].is_empty();
            if known[class].is_none() {
                known[class] = Some(self.stays(class, numbers));
            }
            let open = |number: usize| {
                let (together, apart) = (self.gang.together, self.gang.apart);
                self.holds(&self.cluster.hosts[number]) > 0 && !(apart && placed.contains(&number))
                    || together && placed.contains(&number)
            };
            let first = placed.first().copied().filter(|_| self.gang.together);
            let fits = |(number, stay): &&(usize, Stay)| {
                open(*number)
                    && first.is_none_or(|first| first == *number)
                    && near.allows(stay.way, has_data)
                    && (ends || stay.refused.is_none())
            };
            let of_class = known[class].iter().flatten().filter(fits);
            let best = best_of(of_class);
            let Some(number) = best else { break };
            placed.push(number);
            let (cpus, memory_bytes) = (self.gang.least_cpus, self.snapshot.job.memory_bytes);
            let id = self.cluster.hosts[number].id.clone();
            befores.extend(self.cluster.occupy(&id, cpus, memory_bytes));
            for (class, all) in known.iter_mut().enumerate() {
                for (_, stay) in all.iter_mut().flatten().filter(|(of, _)| *of == number) {
                    if let Ok(now) = self.stay(class, number) {
                        *stay = now;
                    }
                }
            }
        }
        befores.iter().rev().for_each(|before| self.cluster.leave(before));
        (placed.len() == self.classes.len()).then_some(placed)
    }

    /// One rank at each of the hosts. A link that is not measured is noted.
    fn stays(&mut self, rank: usize, numbers: &[usize]) -> Vec<(usize, Stay)> {
        let mut stays = Vec::with_capacity(numbers.len());
        for number in numbers {
            match self.stay(rank, *number) {
                Ok(stay) => stays.push((*number, stay)),
                Err(why) => self.refused = Some(why),
            }
        }
        stays
    }

    /// One rank at one host, beside the VMs that are placed there now.
    fn stay(&self, rank: usize, number: usize) -> Result<Stay, Refused> {
        self.stay_by(rank, number, &mut Figures::default())
    }

    /// The same, with the figures that it rests on.
    fn stay_by(&self, rank: usize, number: usize, figures: &mut Figures) -> Result<Stay, Refused> {
        let rank = &self.ranks.all[rank];
        let boots = Boots::of(&self.cluster, &rank.job.traits.image);
        let close = Close { number, may_be_end: true };
        stays::stay((&self.cluster, &rank.job), &rank.learned, &boots, close, figures)
    }

    /// Says on what figures a candidate rests.
    fn say(&self, candidate: &Candidate, figures: &mut Figures) {
        let index = self.cluster.hosts.index();
        for (rank, host) in candidate.option.hosts.iter().enumerate() {
            if let Some(number) = index.number(host) {
                // It was predicted there before.
                drop(self.stay_by(rank, number, figures));
            }
        }
        let sent: u64 = self.gang.sent.iter().flatten().sum();
        if sent > 0 {
            let sent = format_bytes(sent);
            figures.measured(format!("its VMs have sent {sent} to each other in an earlier run"));
        }
        if candidate.ranks.len() > 1 {
            let slowest = candidate.slowest;
            figures.measured(format!("the slowest VM is rank {slowest}: the parts are its own"));
        }
    }

    /// The same hosts, with the ranks in the order that is best for their talk, if that is no worse.
    fn arranged(&mut self, given: Candidate) -> Candidate {
        if self.gang.sent.iter().flatten().all(|bytes| *bytes == 0) {
            return given;
        }
        let spot = |host: &HostId| {
            let site = self.cluster.host(host).ok()?.site.clone();
            Some(Spot { host: host.clone(), site })
        };
        let spots: Option<Vec<Spot>> = given.option.hosts.iter().map(spot).collect();
        let Some(spots) = spots else { return given };
        let arranged = arrange(spots.clone(), &self.gang.sent);
        if arranged == spots {
            return given;
        }
        let index = self.cluster.hosts.index();
        let other: Option<Vec<usize>> =
            arranged.iter().map(|spot| index.number(&spot.host)).collect();
        let total_s = |one: &Candidate| one.option.predicted.total_s;
        match other.and_then(|numbers| self.all_at(&numbers)) {
            Some(other) if total_s(&other) <= total_s(&given) => other,
            _ => given,
        }
    }

    /// All ranks at these hosts, each beside the others. A link that is not measured is noted.
    fn all_at(&mut self, numbers: &[usize]) -> Option<Candidate> {
        match self.predict(numbers) {
            Ok(candidate) => Some(candidate),
            Err(refused) => {
                self.refused = Some(refused);
                None
            }
        }
    }

    fn predict(&mut self, numbers: &[usize]) -> Result<Candidate, Refused> {
        let hosts: Vec<HostId> =
            numbers.iter().map(|number| self.cluster.hosts[*number].id.clone()).collect();
        let (cpus, memory_bytes) = (self.gang.least_cpus, self.snapshot.job.memory_bytes);
        let befores: Vec<Before> =
            hosts.iter().filter_map(|host| self.cluster.occupy(host, cpus, memory_bytes)).collect();
        let mut stays = Vec::with_capacity(numbers.len());
        for (rank, (number, host)) in numbers.iter().zip(&hosts).enumerate() {
            // A VM is not among those that it shares its host with.
            let there = &self.cluster.hosts[*number];
            let (vcpus, free_bytes) = (there.running_vcpus, there.memory_free_bytes);
            let others = (vcpus.saturating_sub(cpus), free_bytes.saturating_add(memory_bytes));
            self.cluster.set_placed(host, others.0, others.1);
            stays.push(self.stay(rank, *number));
            self.cluster.set_placed(host, vcpus, free_bytes);
        }
        befores.iter().rev().for_each(|before| self.cluster.leave(before));
        let stays: Vec<Stay> = stays.into_iter().collect::<Result<_, _>>()?;
        let talked = Talked::at(&self.cluster, &hosts, &self.gang.sent)?;
        Ok(self.candidate(hosts, &stays, &talked))
    }

    fn candidate(&self, hosts: Vec<HostId>, stays: &[Stay], talked: &Talked) -> Candidate {
        let ranks = self.ranks;
        let talk = ranks.talk(talked);
        let somewhere = |stay: &Stay| Somewhere {
            place: stay.place,
            seconds: Seconds { boot_s: 0.0, ..stay.seconds }.added_up(),
            command: stay.command,
        };
        let each: Vec<Somewhere> = stays.iter().map(somewhere).collect();
        let all = ranks.together(&each, talk);
        let boots: Vec<Spread> = stays.iter().map(|stay| stay.boot).collect();
        let (boot, boot_is_known) = ranks.boot(&boots, &hosts);
        let way = stays.iter().map(|stay| stay.way).max_by_key(|way| farness(*way));
        let slowest = &stays[all.slowest];
        let mut whole = Candidate::new(way.unwrap_or(Way::Beside), slowest, &hosts[0]);
        whole.option.start.clone_from(&hosts[0]);
        let predicted = Seconds { boot_s: boot.expected, ..all.seconds }.added_up();
        let total = boot.together(all.command);
        whole.option.predicted = predicted;
        whole.option.total = Spread { expected: predicted.total_s, ..total }.estimate();
        whole.option.unknown = unknown(stays, boot_is_known, ranks.talk_unknown(talked));
        let read: f64 = stays.iter().map(|stay| stay.place.sent_bytes).sum();
        whole.option.shipped_bytes = Some(whole_bytes(read + self.between(&hosts)));
        whole.boot = boot;
        whole.rtt_ms = stays.iter().map(|stay| stay.rtt_ms).fold(0.0, f64::max);
        whole.impossible = stays.iter().find_map(|stay| stay.refused.clone());
        (whole.slowest, whole.talk) = (all.slowest, talk);
        whole.ranks = stays.iter().map(|stay| alone(stay, &whole)).collect();
        whole.option.hosts = hosts;
        whole
    }

    /// The bytes that the ranks send to each other between hosts.
    fn between(&self, hosts: &[HostId]) -> f64 {
        let rows = hosts.iter().zip(&self.gang.sent);
        let each = rows.flat_map(|(from, row)| {
            hosts.iter().zip(row).filter(move |(to, _)| *to != from).map(|(_, bytes)| *bytes as f64)
        });
        each.sum()
    }
}

/// The soonest one; at a site that packs the fullest host that is almost as good.
fn best_of<'s>(open: impl Iterator<Item = &'s (usize, Stay)>) -> Option<usize> {
    let all: Vec<&(usize, Stay)> = open.collect();
    let total_s = |one: &(usize, Stay)| one.1.seconds.total_s;
    let best = all
        .iter()
        .copied()
        .reduce(|best, next| if total_s(next) < total_s(best) { next } else { best })?;
    let as_fast = all.iter().copied().find(|one| packing::is_as_fast(&one.1, &best.1));
    Some(as_fast.unwrap_or(best).0)
}

/// One VM of a gang by itself, which is there until the whole gang has ended.
fn alone(stay: &Stay, whole: &Candidate) -> Candidate {
    let mut alone = Candidate::new(stay.way, stay, &stay.host);
    alone.boot = whole.boot;
    alone.option.total = whole.option.total;
    alone
}

/// What is not known of one of the ranks, each once.
fn unknown(stays: &[Stay], boot_is_known: bool, talk: Option<Unknown>) -> Vec<Unknown> {
    let mut all: Vec<Unknown> = Vec::new();
    for unknown in stays.iter().flat_map(|stay| &stay.unknown).chain(&talk) {
        if !(all.contains(unknown) || boot_is_known && unknown.part == Part::Boot) {
            all.push(unknown.clone());
        }
    }
    all
}

mod changes;
#[cfg(test)]
mod tests;
