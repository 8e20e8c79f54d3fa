//! Which hosts are looked at closely: in a large cluster that would take too long for each of them, and most are alike.
//!
//! Hosts are alike for a job that are at one site, have the same processor, price and measurement, and have the same room for its data or not. A home of its
//! data, a host with a replica of them, and one with a link of its own are alike to no other. Hosts that are alike reach the data in
//! the same way. What is left of a prediction are two figures: how long the VM boots, and how much longer the job computes
//! because of the host's speed and load. Both are reckoned for every host, and a close look is taken at
//!
//! - the best host to stay at, for each way and price; of a site that packs, the fullest one that is almost as good;
//! - the first of alike hosts, which is the least busy one, and the best [`OF_ALIKE`] of those that no other is better than in
//!   both figures. A job that starts here and moves later, or whose data come, is predicted from these;
//! - as the end of a move, the first of alike hosts and the one where the job computes fastest.
//!
//! So the plan has the least predicted time of all hosts, with one exception. The prediction lets a job that computes longer lose
//! less while its data or its memory are copied, because it reads less in each second. A host that is slower in both figures might
//! therefore be predicted to end a little sooner after a copy. It is not looked at; the tests let a plan miss a tenth by that.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, HashMap};

use perigee_model::HostId;
use perigee_model::plan::{Seconds, Way};

use super::packing::{self, AS_FAST};
use super::stays::{may_start, sources, way_at};
use crate::cpu_load::load_factor;
use crate::facts::{HostFacts, JobFacts, Snapshot};
use crate::figures::Figures;
use crate::hosts::Boots;
use crate::index::Kind;
use crate::learn::{Learned, Place};
use crate::spread::Spread;

/// If not more hosts have room, each is looked at.
pub(super) const ALL_UP_TO: usize = 16;
/// Of hosts that are alike, so many are looked at beside the first one.
const OF_ALIKE: usize = 4;

/// A host that is looked at, by its number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Close {
    pub number: usize,
    /// Whether moves to it are looked at too.
    pub may_be_end: bool,
}

/// The hosts that are looked at, the least busy one first; of a site that packs, the fullest one.
pub(super) fn looked_at(
    snapshot: &Snapshot,
    learned: &Learned,
    boots: &Boots,
    all_up_to: usize,
) -> Vec<Close> {
    let hosts = &snapshot.cluster.hosts;
    let has_room = |host: &HostFacts| host.memory_free_bytes >= snapshot.job.memory_bytes;
    let with_room = hosts.iter().filter(|host| has_room(host)).count();
    let mut close: Vec<Close> = if with_room <= all_up_to {
        let numbers = (0..hosts.len()).filter(|number| has_room(&hosts[*number]));
        numbers.map(|number| Close { number, may_be_end: true }).collect()
    } else {
        let mut sorted = Sorted::new(snapshot, learned);
        for (number, host) in hosts.iter().enumerate().filter(|(_, host)| has_room(host)) {
            sorted.add(number, host, boots);
        }
        sorted.into_close()
    };
    close.sort_by(|a, b| order(&hosts[a.number]).cmp(&order(&hosts[b.number])));
    packing::fullest_first(&mut close, |one| &hosts[one.number]);
    close
}

/// The least busy host comes first.
pub(super) fn order(host: &HostFacts) -> (u64, Reverse<u64>, &HostId) {
    (vcpus_per_cpu(host), Reverse(host.memory_free_bytes), &host.id)
}

/// In thousandths, as an integer so that it can be compared.
pub(super) fn vcpus_per_cpu(host: &HostFacts) -> u64 {
    u64::from(host.running_vcpus) * 1000 / u64::from(host.cpus.max(1))
}

/// What is reckoned for every host.
#[derive(Clone, Copy)]
struct Rough<'a> {
    number: usize,
    host: &'a HostFacts,
    boot_s: f64,
    /// How much longer the job computes there than at an idle host of mean speed.
    factor: f64,
    total_s: f64,
}

impl Rough<'_> {
    fn comes_before(&self, other: &Self) -> bool {
        order(self.host) < order(other.host)
    }

    /// By the whole time; of equals the first one.
    fn by_total(&self, other: &Self) -> Ordering {
        self.total_s
            .total_cmp(&other.total_s)
            .then_with(|| order(self.host).cmp(&order(other.host)))
    }

    /// Whether it is at least as good in both figures; of equals the first one is.
    fn is_better_than(&self, other: &Self) -> bool {
        let is_equal = self.boot_s == other.boot_s && self.factor == other.factor;
        self.boot_s <= other.boot_s
            && self.factor <= other.factor
            && (!is_equal || self.comes_before(other))
    }
}

/// What makes hosts alike.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    kind: Kind,
    /// `None` of a host that is alike to others.
    alone: Option<usize>,
    has_room_for_data: bool,
    /// [`HostFacts::price_number`].
    price: usize,
    /// [`HostFacts::measured_number`].
    measured: usize,
}

/// Hosts that are alike.
struct Alike<'a> {
    way: Way,
    /// As if the job computed as fast as at an idle host of mean speed; `None` if a link is not measured.
    place: Option<Place>,
    /// Where the job may start: the first host, and those that no other is better than.
    first: Option<Rough<'a>>,
    best: Vec<Rough<'a>>,
    /// The ends of moves.
    first_end: Option<Rough<'a>>,
    fastest_end: Option<Rough<'a>>,
}

struct Sorted<'a> {
    snapshot: &'a Snapshot,
    learned: &'a Learned,
    /// Of each host, whether it is alike to no other.
    alone: Vec<bool>,
    data_bytes: u64,
    numbers: HashMap<Key, usize>,
    all: Vec<Alike<'a>>,
    /// The best hosts to stay at, where the job may start and where it may not.
    best_stays: [[Option<Rough<'a>>; 3]; 2],
    /// Whether some host costs something.
    is_paid: bool,
    /// The best ones for each price then.
    best_of_price: HashMap<(usize, bool, usize), Rough<'a>>,
    /// All hosts of sites that pack, by the same.
    packed: [[Vec<Rough<'a>>; 3]; 2],
    /// The last host where the job may start but for a link that is not measured.
    not_measured: Option<Rough<'a>>,
}

impl<'a> Sorted<'a> {
    fn new(snapshot: &'a Snapshot, learned: &'a Learned) -> Self {
        let index = snapshot.cluster.hosts.index();
        let volumes = &snapshot.job.volumes;
        let homes = volumes.iter().map(|volume| &volume.home);
        let replicas = volumes.iter().flat_map(|volume| &volume.copy.lacking).map(|(at, _)| at);
        let mut alone = vec![false; snapshot.cluster.hosts.len()];
        let apart = snapshot.cluster.links.index().apart();
        for number in homes.chain(replicas).chain(apart).filter_map(|host| index.number(host)) {
            alone[number] = true;
        }
        let data_bytes = volumes.iter().map(|volume| volume.copy.bytes);
        Self {
            snapshot,
            learned,
            alone,
            data_bytes: data_bytes.fold(0, u64::saturating_add),
            numbers: HashMap::new(),
            all: Vec::new(),
            best_stays: Default::default(),
            is_paid: snapshot.cluster.hosts.iter().any(|host| host.price.is_some()),
            best_of_price: HashMap::new(),
            packed: Default::default(),
            not_measured: None,
        }
    }

    fn add(&mut self, number: usize, host: &'a HostFacts, boots: &Boots) {
        let JobFacts { start, traits, .. } = &self.snapshot.job;
        let may_start = may_start(start, host);
        let alike = self.alike(number, host);
        let booted = &self.snapshot.cluster.hosts.index().booted;
        let factor = booted.cpu_factor(number) * load_factor(host, traits.cpus).expected;
        let boot_s = boots.expected_s(number, host);
        let mut rough = Rough { number, host, boot_s, factor, total_s: f64::INFINITY };
        let alike = &mut self.all[alike];
        let Some(place) = alike.place else {
            let last = &mut self.not_measured;
            if may_start && last.is_none_or(|last| last.comes_before(&rough)) {
                *last = Some(rough);
            }
            return;
        };
        let place = Place { cpu_factor: Spread::exactly(factor), ..place };
        let (command, _) = self.learned.expected_at(&place);
        rough.total_s = Seconds { boot_s, ..command }.added_up().total_s;
        let way = match alike.way {
            Way::Beside => 0,
            Way::Replica => 1,
            _ => 2,
        };
        let best_stay = &mut self.best_stays[usize::from(may_start)][way];
        if best_stay.is_none_or(|best| rough.by_total(&best).is_lt()) {
            *best_stay = Some(rough);
        }
        if self.is_paid {
            let best = self.best_of_price.entry((host.price_number(), may_start, way));
            let best = best.or_insert(rough);
            if rough.by_total(best).is_lt() {
                *best = rough;
            }
        }
        if host.packs {
            self.packed[usize::from(may_start)][way].push(rough);
        }
        alike.add(rough, may_start);
    }

    /// The number of the hosts that this one is alike to.
    fn alike(&mut self, number: usize, host: &HostFacts) -> usize {
        let key = Key {
            kind: self.snapshot.cluster.hosts.index().kind(number),
            alone: self.alone[number].then_some(number),
            has_room_for_data: host.pool_free_bytes.is_none_or(|free| free >= self.data_bytes),
            price: host.price_number(),
            measured: host.measured_number(),
        };
        let next = self.all.len();
        let found = *self.numbers.entry(key).or_insert(next);
        if found == next {
            self.all.push(Alike::of(self.snapshot, self.learned, host));
        }
        found
    }

    fn into_close(self) -> Vec<Close> {
        let mut close: BTreeMap<usize, bool> = BTreeMap::new();
        let mut note = |rough: &Rough, may_be_end: bool| {
            *close.entry(rough.number).or_default() |= may_be_end;
        };
        let stays = self.best_stays.iter().flatten().flatten();
        let packed = self.best_stays.iter().flatten().zip(self.packed.iter().flatten());
        let fullest = packed.filter_map(|(best, all)| fullest_as_fast(best.as_ref()?, all));
        let of_price = self.best_of_price.iter().filter_map(|((_, may_start, way), best)| {
            fullest_as_fast(best, &self.packed[usize::from(*may_start)][*way])
        });
        let paid = self.best_of_price.values().chain(of_price);
        let all = stays.chain(fullest).chain(paid).chain(&self.not_measured);
        all.for_each(|rough| note(rough, false));
        for mut alike in self.all {
            alike.best.sort_by(Rough::by_total);
            alike.best.truncate(OF_ALIKE);
            alike.best.iter().chain(&alike.first).for_each(|rough| note(rough, false));
            let ends = alike.first_end.iter().chain(&alike.fastest_end);
            ends.for_each(|rough| note(rough, true));
        }
        close.into_iter().map(|(number, may_be_end)| Close { number, may_be_end }).collect()
    }
}

/// At a site that packs: the fullest host where the job takes hardly longer than at the best one.
fn fullest_as_fast<'b, 'a>(best: &Rough<'a>, packed: &'b [Rough<'a>]) -> Option<&'b Rough<'a>> {
    let as_fast = packed.iter().filter(|rough| {
        rough.host.site == best.host.site
            && rough.host.price_number() == best.host.price_number()
            && rough.total_s <= best.total_s * AS_FAST
    });
    as_fast.min_by(|a, b| packing::order(a.host).cmp(&packing::order(b.host)))
}

impl<'a> Alike<'a> {
    /// Those that are alike to this host.
    fn of(snapshot: &Snapshot, learned: &Learned, host: &HostFacts) -> Self {
        let volumes = &snapshot.job.volumes;
        let sources = sources(volumes, |volume| volume.copy.far_share(&host.id));
        let place = learned.place(&snapshot.cluster, host, &sources, &mut Figures::default());
        Self {
            way: way_at(volumes, &host.id),
            place: place.ok(),
            first: None,
            best: Vec::new(),
            first_end: None,
            fastest_end: None,
        }
    }

    fn add(&mut self, rough: Rough<'a>, may_start: bool) {
        if self.first_end.is_none_or(|first| rough.comes_before(&first)) {
            self.first_end = Some(rough);
        }
        let is_faster = |fastest: Rough| match rough.factor.total_cmp(&fastest.factor) {
            Ordering::Less => true,
            Ordering::Equal => rough.comes_before(&fastest),
            Ordering::Greater => false,
        };
        if self.fastest_end.is_none_or(is_faster) {
            self.fastest_end = Some(rough);
        }
        if !may_start {
            return;
        }
        if self.first.is_none_or(|first| rough.comes_before(&first)) {
            self.first = Some(rough);
        }
        if !self.best.iter().any(|best| best.is_better_than(&rough)) {
            self.best.retain(|best| !rough.is_better_than(best));
            self.best.push(rough);
        }
    }
}
