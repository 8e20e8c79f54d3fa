//! What leaves a host that is drained, in which order, and where it goes. It is a pure function of a snapshot.
//!
//! - **Target**: of the hosts that can take a VM and have room, those where it is soonest (at most `AS_SOON` times the shortest time)
//!   count as equal. One at the same site gets it, and of these the one with the most memory free, or the least where the site packs. Large VMs choose first: small ones find room anywhere.
//! - **Order**: what is moving already, then what leaves soonest. A volume whose VM has left comes before the next VM, because that VM
//!   reads it over the network.
//! - **Waiting**: a job that ends sooner than its move would be over is waited for. Its end is predicted anew each time, so one that takes
//!   longer moves after all.
//! - **Disks** come after their VMs. What they take in a pool is kept for them, so that no VM goes there whose disks would have no room then.
//! - **Not known is never no**: a host whose figures are missing is no target, and is named. What may be known soon is waited for.
//! - **Groups that are kept together** (`together.rs`) leave for one host, one VM after the other, or none of them leaves.
//! - **Jobs with several VMs** move as a whole: each VM that is at the host gets another one, at the site of the others if there is room.

mod together;

use std::collections::BTreeMap;

use perigee_model::drain::{DrainFate, DrainStep, DrainedKind};
use perigee_model::plan::Estimate;
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::{HostId, SiteId};

use crate::gangs::{Room, at_site, ruled};
use crate::queue::{Demand, Groups};

/// A target where a VM is this many times later than at the best one is as good.
const AS_SOON: f64 = 1.25;

/// Times that differ by less than this are equal.
const EQUAL_S: f64 = 1.0;

/// So many hosts are named with the reason why they are no target.
const NAMED_MAX: usize = 6;

/// Why a thing does not move while nobody knows how large its disks are.
pub const DISKS_NOT_KNOWN: &str = "how much its disks hold is not known yet";

/// The input: what is at the host, and the others.
#[derive(Debug, Clone)]
pub struct Leaving {
    /// The host that is drained.
    pub host: HostId,
    /// Its site.
    pub site: SiteId,
    /// All other hosts.
    pub others: Vec<Other>,
    /// Whether a job that ends before its move would be over is waited for.
    pub waits_for_ends: bool,
    /// VMs at the host, of jobs with one VM or without a job, in any order.
    pub vms: Vec<LeavingVm>,
    /// Jobs with several VMs, of which at least one is there.
    pub gangs: Vec<LeavingGang>,
    /// The volumes whose home it is.
    pub volumes: Vec<LeavingVolume>,
    /// The networks whose gateway it is, although hosts that can have it have VMs of them.
    pub gateways: Vec<String>,
}

/// Another host.
#[derive(Debug, Clone)]
pub struct Other {
    /// Unique in the snapshot.
    pub id: HostId,
    /// Its site.
    pub site: SiteId,
    /// What is free there for VMs.
    pub free: Demand,
    /// Of the hosts of its site that are as good for a VM, the fullest one gets the VM, and not the one with the most memory free.
    pub packs: bool,
    /// The bytes that are free in its pool; `None` if that is not known.
    pub pool_free_bytes: Option<u64>,
    /// Why nothing goes there, whatever it is.
    pub refusal: Option<Refusal>,
}

impl Other {
    /// The higher, the sooner it gets a VM.
    pub fn rank(&self) -> u64 {
        let free_bytes = self.free.memory_bytes;
        if self.packs { u64::MAX - free_bytes } else { free_bytes }
    }
}

/// Why something can't go to a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// In plain words.
    pub why: String,
    /// Whether that passes soon by itself.
    pub passes: bool,
}

/// What a thing at the host does now.
#[derive(Debug, Clone, PartialEq)]
pub enum Now {
    /// It can move.
    Ready,
    /// It moves already, to this host or these.
    Moving(Vec<HostId>),
    /// It can't move yet, for this reason.
    Waits(String),
    /// It can't move, for this reason.
    Stays(String),
}

/// One host where a thing could go. Hosts that are not named are not looked at.
#[derive(Debug, Clone, PartialEq)]
pub struct Way {
    /// The host.
    pub to: HostId,
    /// What the move would take, or why there is none.
    pub cost: Result<Cost, Refusal>,
}

/// What a move takes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Until all of it is there: of a VM, with the disks that come after it.
    pub seconds: f64,
    /// What is sent.
    pub bytes: u64,
}

/// A VM at the host.
#[derive(Debug, Clone)]
pub struct LeavingVm {
    /// Its name.
    pub name: String,
    /// What it needs.
    pub demand: Demand,
    /// What it does.
    pub now: Now,
    /// When its job ends; `None` if that is not known, or it has none.
    pub left: Option<Estimate>,
    /// What its disks at the host take in another pool; `None` if that is not known.
    pub disk_bytes: Option<u64>,
    /// Where it could go.
    pub ways: Vec<Way>,
    /// The group with which it is kept on one host, by its full name.
    pub together: Option<String>,
}

/// A job with several VMs.
#[derive(Debug, Clone)]
pub struct LeavingGang {
    /// Its name.
    pub name: String,
    /// What each of its VMs needs.
    pub demand: Demand,
    /// What it does.
    pub now: Now,
    /// When it ends; `None` if that is not known.
    pub left: Option<Estimate>,
    /// What the disks of one of its VMs at the host take in another pool, at most; `None` if that is not known.
    pub disk_bytes: Option<u64>,
    /// Where its VMs are, in the order of their ranks.
    pub hosts: Vec<HostId>,
    /// `sent[i][j]` is what rank `i` has sent to rank `j`.
    pub sent: Vec<Vec<u64>>,
    /// Where a VM of it that is at the host could go.
    pub ways: Vec<Way>,
    /// The rules of its VMs, also among themselves.
    pub groups: Groups,
}

/// A volume at the host.
#[derive(Debug, Clone)]
pub struct LeavingVolume {
    /// Its name.
    pub name: String,
    /// What it takes in another pool; `None` if that is not known.
    pub bytes: Option<u64>,
    /// What it does.
    pub now: Now,
    /// The VM or job at the host that uses it. The volume comes after it.
    pub with: Option<(DrainedKind, String)>,
    /// The VM that uses it at another host, or to which it belongs, and where that one is.
    pub beside: Option<(String, HostId)>,
    /// Volumes with the same text belong together, and go to one host.
    pub group: Option<String>,
    /// Where it could go.
    pub ways: Vec<Way>,
}

/// What becomes of each thing at the host, in the order in which that is done.
pub fn plan(facts: &Leaving) -> Vec<DrainStep> {
    let mut rooms = Rooms::new(facts);
    let mut steps: Vec<Planned> = Vec::new();
    let mut vms: Vec<&LeavingVm> = facts.vms.iter().collect();
    vms.sort_by(|one, other| {
        let size = |vm: &LeavingVm| (vm.demand.memory_bytes, vm.demand.cpus);
        size(other).cmp(&size(one)).then_with(|| one.name.cmp(&other.name))
    });
    let groups = together::groups(&vms);
    for vm in vms {
        match vm.together.as_ref().and_then(|group| groups.get(group)) {
            // All of them are planned with the first one.
            Some(group) if group[0].name == vm.name => {
                steps.extend(together::of_group(group, &mut rooms));
            }
            Some(_) => {}
            None => steps.push(of_vm(vm, &mut rooms)),
        }
    }
    steps.extend(facts.gangs.iter().map(|gang| of_gang(gang, &facts.host, &mut rooms)));
    if facts.waits_for_ends {
        wait_for_ends(&mut steps);
    }
    let users: Vec<DrainStep> = steps.iter().map(|planned| planned.step.clone()).collect();
    let mut groups = BTreeMap::new();
    for volume in &facts.volumes {
        steps.push(of_volume(volume, &users, &mut groups, &mut rooms));
    }
    let why = "its gateway is here, and goes to another host with its VMs";
    steps.extend(facts.gateways.iter().map(|network| {
        Planned::new(DrainedKind::Network, network, DrainFate::Waits, why.to_owned())
    }));
    steps.sort_by(|one, other| {
        one.key().partial_cmp(&other.key()).unwrap_or(std::cmp::Ordering::Equal)
    });
    steps.into_iter().map(|planned| planned.step).collect()
}

/// A step, with what orders it.
struct Planned {
    step: DrainStep,
    left_s: Option<f64>,
    /// Its VM is at another host already.
    is_far: bool,
}

impl Planned {
    fn new(kind: DrainedKind, name: &str, fate: DrainFate, why: String) -> Self {
        let (name, to) = (name.to_owned(), Vec::new());
        let step = DrainStep { kind, name, fate, to, why, takes_s: None, bytes: None };
        Self { step, left_s: None, is_far: false }
    }

    fn moves(kind: DrainedKind, name: &str, to: Vec<HostId>, cost: Cost) -> Self {
        let mut planned = Self::new(kind, name, DrainFate::Moves, String::new());
        planned.step.to = to;
        (planned.step.takes_s, planned.step.bytes) = (Some(cost.seconds), Some(cost.bytes));
        planned
    }

    /// What is no question of where it could go; `None` if it can move.
    fn of_now(kind: DrainedKind, name: &str, now: &Now) -> Option<Self> {
        let new = |fate, why: &str| Self::new(kind, name, fate, why.to_owned());
        Some(match now {
            Now::Ready => return None,
            Now::Moving(to) => {
                let mut planned = new(DrainFate::Moving, "");
                planned.step.to.clone_from(to);
                planned
            }
            Now::Waits(why) => new(DrainFate::Waits, why),
            Now::Stays(why) => new(DrainFate::Stays, why),
        })
    }

    fn stuck(kind: DrainedKind, name: &str, refusals: &Refusals) -> Self {
        let fate = if refusals.may_pass() { DrainFate::Waits } else { DrainFate::Stays };
        Self::new(kind, name, fate, refusals.in_words())
    }

    fn key(&self) -> (DrainFate, bool, f64, DrainedKind, &str) {
        let step = &self.step;
        // What takes nobody knows how long comes last.
        let takes_s = step.takes_s.unwrap_or(f64::INFINITY);
        (step.fate, !self.is_far, takes_s, step.kind, &step.name)
    }
}

/// A job that ends before its move would be over is waited for. The moves to one host are made one after the other.
fn wait_for_ends(steps: &mut [Planned]) {
    let mut moves: Vec<&mut Planned> =
        steps.iter_mut().filter(|planned| planned.step.fate == DrainFate::Moves).collect();
    moves.sort_by(|one, other| {
        one.key().partial_cmp(&other.key()).unwrap_or(std::cmp::Ordering::Equal)
    });
    let mut until_s: BTreeMap<HostId, f64> = BTreeMap::new();
    for planned in moves {
        let (Some(to), Some(takes_s)) = (planned.step.to.first().cloned(), planned.step.takes_s)
        else {
            continue;
        };
        let over_s = until_s.get(&to).copied().unwrap_or_default() + takes_s;
        match planned.left_s {
            Some(left_s) if left_s <= over_s => {
                let (ends, moved) = (format_seconds(left_s), format_seconds(over_s));
                let why = format!("it ends in about {ends}, and would be moved in {moved}");
                (planned.step.fate, planned.step.why) = (DrainFate::Waits, why);
                planned.step.to.clear();
            }
            _ => drop(until_s.insert(to, over_s)),
        }
    }
}

fn of_vm(vm: &LeavingVm, rooms: &mut Rooms) -> Planned {
    let kind = DrainedKind::Vm;
    if let Some(planned) = Planned::of_now(kind, &vm.name, &vm.now) {
        return planned;
    }
    let mut refusals = Refusals::default();
    let open = rooms.open(&vm.ways, &mut refusals, |other| {
        lacks(other, vm.demand).or_else(|| rooms.lacks_pool(other, vm.disk_bytes))
    });
    let best = rooms.nearest(open, |other| Some(other.rank()));
    let Some((to, cost)) = best else { return Planned::stuck(kind, &vm.name, &refusals) };
    rooms.take(&to, vm.demand, vm.disk_bytes.unwrap_or_default());
    Planned {
        left_s: vm.left.map(|left| left.expected_s),
        ..Planned::moves(kind, &vm.name, vec![to], cost)
    }
}

fn of_gang(gang: &LeavingGang, host: &HostId, rooms: &mut Rooms) -> Planned {
    let kind = DrainedKind::Job;
    if let Some(planned) = Planned::of_now(kind, &gang.name, &gang.now) {
        return planned;
    }
    let mut refusals = Refusals::default();
    let open = rooms.open(&gang.ways, &mut refusals, |other| {
        lacks(other, gang.demand).or_else(|| rooms.lacks_pool(other, gang.disk_bytes))
    });
    // A VM that is at another host stays there, whether that has more room or not.
    let holds = |other: &Other| {
        let is_open = open.iter().any(|(to, _)| *to == other.id);
        if is_open {
            other.free.holds(gang.demand).min(pool_holds(other, gang.disk_bytes))
        } else {
            0
        }
    };
    let usable = rooms.others.iter().filter(|other| {
        other.refusal.is_none() && (holds(other) > 0 || gang.hosts.contains(&other.id))
    });
    let all: Vec<Room> = usable
        .map(|other| Room { host: other.id.clone(), site: other.site.clone(), holds: holds(other) })
        .collect();
    let all = ruled(all, &gang.groups, &gang.hosts);
    let mut sites: Vec<&SiteId> = all.iter().map(|room| &room.site).collect();
    sites.sort();
    sites.dedup();
    let moved =
        |hosts: &[HostId]| hosts.iter().zip(&gang.hosts).filter(|(to, now)| to != now).count();
    let ways = sites.into_iter().filter_map(|site| at_site(&all, site, &gang.hosts, &gang.sent));
    let Some(hosts) = ways.min_by_key(|hosts| moved(hosts)) else {
        let of_it = gang.hosts.iter().filter(|at| *at == host).count();
        if open.is_empty() {
            return Planned::stuck(kind, &gang.name, &refusals);
        }
        let room = open.iter().map(|(to, _)| to.as_str()).collect::<Vec<_>>().join(", ");
        let why = format!(
            "no site has room for all {} of its VMs, of which {of_it} are here; some would have room at {room}",
            gang.hosts.len()
        );
        let fate = if refusals.may_pass() { DrainFate::Waits } else { DrainFate::Stays };
        return Planned::new(kind, &gang.name, fate, why);
    };
    let mut whole = Cost::default();
    for (to, _) in hosts.iter().zip(&gang.hosts).filter(|(to, now)| to != now) {
        rooms.take(to, gang.demand, gang.disk_bytes.unwrap_or_default());
        let cost = open.iter().find(|(open, _)| open == to).map(|(_, cost)| *cost);
        let cost = cost.unwrap_or_default();
        whole.seconds += cost.seconds;
        whole.bytes = whole.bytes.saturating_add(cost.bytes);
    }
    let left_s = gang.left.map(|left| left.expected_s);
    Planned { left_s, ..Planned::moves(kind, &gang.name, hosts, whole) }
}

fn of_volume<'a>(
    volume: &'a LeavingVolume,
    users: &[DrainStep],
    groups: &mut BTreeMap<&'a str, HostId>,
    rooms: &mut Rooms,
) -> Planned {
    let (kind, name) = (DrainedKind::Volume, &volume.name);
    if let Some(planned) = Planned::of_now(kind, name, &volume.now) {
        return planned;
    }
    let user = volume
        .with
        .as_ref()
        .and_then(|(of, with)| users.iter().find(|step| step.kind == *of && step.name == *with));
    if let Some(user) = user {
        return with_its_user(volume, user);
    }
    let mut refusals = Refusals::default();
    let wanted = match (&volume.beside, &volume.group) {
        (Some((_, host)), _) => Some(host.clone()),
        (None, Some(group)) => groups.get(group.as_str()).cloned(),
        (None, None) => None,
    };
    if let Some((_, host)) = &volume.beside {
        rooms.comes_now(host, name);
    }
    let open =
        rooms.open(&volume.ways, &mut refusals, |other| rooms.lacks_pool(other, volume.bytes));
    let near = open.iter().find(|(to, _)| Some(to) == wanted.as_ref()).cloned();
    let Some((to, cost)) = near.or_else(|| rooms.nearest(open, |other| other.pool_free_bytes))
    else {
        return Planned::stuck(kind, name, &refusals);
    };
    rooms.take(&to, Demand::default(), volume.bytes.unwrap_or_default());
    if let Some(group) = &volume.group {
        groups.entry(group).or_insert_with(|| to.clone());
    }
    let is_far = volume.beside.is_some();
    Planned { is_far, ..Planned::moves(kind, name, vec![to], cost) }
}

/// A volume that a VM uses here: it comes after the VM, or stays as the VM does.
fn with_its_user(volume: &LeavingVolume, user: &DrainStep) -> Planned {
    let (kind, name) = (DrainedKind::Volume, &volume.name);
    let of = format!("{} {}", user.kind, user.name);
    let (fate, why) = match user.fate {
        DrainFate::Moving | DrainFate::Moves => {
            (DrainFate::Waits, format!("it comes after {of}, which uses it"))
        }
        DrainFate::Waits => (DrainFate::Waits, format!("{of} uses it, and waits")),
        DrainFate::Stays => (DrainFate::Stays, format!("{of} uses it, and can't leave")),
    };
    Planned::new(kind, name, fate, why)
}

fn lacks(other: &Other, demand: Demand) -> Option<Refusal> {
    if other.free.holds(demand) > 0 {
        return None;
    }
    let why = format!(
        "no room: {} CPUs and {} of memory are free, and it needs {} and {}",
        other.free.cpus,
        format_bytes(other.free.memory_bytes),
        demand.cpus,
        format_bytes(demand.memory_bytes)
    );
    Some(Refusal { why, passes: false })
}

/// The disks of how many VMs the pool holds. Disks of which the size is not known are for
/// [`Rooms::lacks_pool`].
fn pool_holds(other: &Other, disk_bytes: Option<u64>) -> u32 {
    let held =
        other.pool_free_bytes.unwrap_or_default().checked_div(disk_bytes.unwrap_or_default());
    held.map_or(u32::MAX, |held| u32::try_from(held).unwrap_or(u32::MAX))
}

/// What is free at the other hosts while the plan is made.
struct Rooms {
    site: SiteId,
    /// Their pools have less free here than they say by `coming`.
    others: Vec<Other>,
    /// What the disks take in the pool of a host whose VMs have left for there already, or leave now. It may be there in part.
    coming: BTreeMap<HostId, u64>,
    /// Of these what is kept for volumes that are to follow, by their names.
    follows: BTreeMap<String, u64>,
}

impl Rooms {
    fn new(facts: &Leaving) -> Self {
        let (site, others) = (facts.site.clone(), facts.others.clone());
        let mut rooms = Self { site, others, coming: BTreeMap::new(), follows: BTreeMap::new() };
        for vm in &facts.vms {
            if let Now::Moving(to) = &vm.now {
                for to in to {
                    rooms.will_come(to, vm.disk_bytes);
                }
            }
        }
        for gang in &facts.gangs {
            let Now::Moving(to) = &gang.now else { continue };
            let leave = to.iter().zip(&gang.hosts).filter(|(_, now)| **now == facts.host);
            for (to, _) in leave {
                rooms.will_come(to, gang.disk_bytes);
            }
        }
        for volume in &facts.volumes {
            match (&volume.now, &volume.beside) {
                (Now::Moving(to), _) => {
                    for to in to {
                        rooms.will_come(to, volume.bytes);
                    }
                }
                (_, Some((_, host))) if rooms.may_come(volume, host) => {
                    let kept = rooms.will_come(host, volume.bytes);
                    rooms.follows.insert(volume.name.clone(), kept);
                }
                _ => {}
            }
        }
        rooms
    }

    /// Whether a volume can follow its VM to this host. One that nothing lets go there keeps no room from others.
    fn may_come(&self, volume: &LeavingVolume, to: &HostId) -> bool {
        let is_refused = volume
            .ways
            .iter()
            .any(|way| way.to == *to && way.cost.as_ref().is_err_and(|refusal| !refusal.passes));
        let other = self.others.iter().find(|other| other.id == *to);
        let free = other.and_then(|other| other.pool_free_bytes);
        volume.with.is_none()
            && !is_refused
            && free.is_some_and(|free| volume.bytes.is_some_and(|bytes| bytes <= free))
    }

    /// Keeps room in the pool. Returns how much.
    fn will_come(&mut self, to: &HostId, bytes: Option<u64>) -> u64 {
        let other = self.others.iter_mut().find(|other| other.id == *to);
        let Some(free) = other.and_then(|other| other.pool_free_bytes.as_mut()) else { return 0 };
        let kept = bytes.unwrap_or_default().min(*free);
        *free -= kept;
        *self.coming.entry(to.clone()).or_default() += kept;
        kept
    }

    /// What was kept for this volume is free for it.
    fn comes_now(&mut self, to: &HostId, volume: &str) {
        let kept = self.follows.remove(volume).unwrap_or_default();
        let Some(coming) = self.coming.get_mut(to) else { return };
        *coming = coming.saturating_sub(kept);
        let other = self.others.iter_mut().find(|other| other.id == *to);
        if let Some(free) = other.and_then(|other| other.pool_free_bytes.as_mut()) {
            *free += kept;
        }
    }

    fn lacks_pool(&self, other: &Other, bytes: Option<u64>) -> Option<Refusal> {
        let not_known = |why: &str| Some(Refusal { why: why.to_owned(), passes: true });
        let Some(bytes) = bytes else { return not_known(DISKS_NOT_KNOWN) };
        let coming = self.coming.get(&other.id).copied().unwrap_or_default();
        match other.pool_free_bytes {
            None => not_known("how much its pool has free is not known yet"),
            Some(free) if free >= bytes => None,
            Some(free) => {
                let (has, needs) = (format_bytes(free), format_bytes(bytes));
                let mut why = format!(
                    "no room on the disk: {has} are free in its pool, and {needs} would come"
                );
                if coming > 0 {
                    why.push_str(&format!(", after {} that come there now", format_bytes(coming)));
                }
                // Some of that is there already, so that it is counted twice.
                Some(Refusal { why, passes: free.saturating_add(coming) >= bytes })
            }
        }
    }

    /// The hosts that can take it now. Why the others can't goes to `refusals`.
    fn open(
        &self,
        ways: &[Way],
        refusals: &mut Refusals,
        lacks: impl Fn(&Other) -> Option<Refusal>,
    ) -> Vec<(HostId, Cost)> {
        let mut open = Vec::new();
        for other in &self.others {
            let way = ways.iter().find(|way| way.to == other.id);
            let refusal = match (&other.refusal, way.map(|way| &way.cost)) {
                (Some(refusal), _) => Some(refusal.clone()),
                // Enough others were found.
                (None, None) => {
                    refusals.has_more = true;
                    continue;
                }
                (None, Some(Err(refusal))) => Some(refusal.clone()),
                (None, Some(Ok(_))) => lacks(other),
            };
            match (refusal, way) {
                (None, Some(Way { cost: Ok(cost), .. })) => open.push((other.id.clone(), *cost)),
                (Some(refusal), _) => refusals.others.push((other.id.clone(), refusal)),
                (None, _) => {}
            }
        }
        open
    }

    /// Of those whose move is as soon as the soonest: one at the same site if there is one, then the one with the most room.
    fn nearest(
        &self,
        open: Vec<(HostId, Cost)>,
        room: impl Fn(&Other) -> Option<u64>,
    ) -> Option<(HostId, Cost)> {
        let soonest_s = open.iter().map(|(_, cost)| cost.seconds).fold(f64::INFINITY, f64::min);
        let most_s = (soonest_s * AS_SOON).max(soonest_s + EQUAL_S);
        let near = open.into_iter().filter(|(_, cost)| cost.seconds <= most_s);
        let rank = |other: &Other| (other.site == self.site, room(other));
        // Of equal ones the first by name, so that the same question has the same answer.
        near.rev().max_by_key(|(to, _)| self.get(to).map(rank))
    }

    fn get(&self, id: &HostId) -> Option<&Other> {
        self.others.iter().find(|other| other.id == *id)
    }

    fn take(&mut self, id: &HostId, demand: Demand, bytes: u64) {
        let Some(other) = self.others.iter_mut().find(|other| other.id == *id) else { return };
        other.free.take(demand);
        other.pool_free_bytes = other.pool_free_bytes.map(|free| free.saturating_sub(bytes));
    }
}

/// Why a thing can go to none of the hosts.
#[derive(Default)]
struct Refusals {
    others: Vec<(HostId, Refusal)>,
    /// There are hosts that were not looked at.
    has_more: bool,
}

impl Refusals {
    fn may_pass(&self) -> bool {
        self.has_more || self.others.iter().any(|(_, refusal)| refusal.passes)
    }

    /// Each reason once, with the hosts that it is of.
    fn in_words(&self) -> String {
        if self.others.is_empty() {
            return "there is no other host".to_owned();
        }
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for (host, refusal) in self.others.iter().take(NAMED_MAX) {
            match reasons.iter_mut().find(|(why, _)| *why == refusal.why) {
                Some((_, hosts)) => hosts.push(host.as_str()),
                None => reasons.push((&refusal.why, vec![host.as_str()])),
            }
        }
        let mut words: Vec<String> =
            reasons.iter().map(|(why, hosts)| format!("{}: {why}", hosts.join(", "))).collect();
        let more = self.others.len().saturating_sub(NAMED_MAX);
        if more > 0 {
            words.push(format!("and {more} other hosts can't take it"));
        }
        if self.has_more {
            words.push("further hosts are looked at later".to_owned());
        }
        words.join("; ")
    }
}

#[cfg(test)]
mod tests;
