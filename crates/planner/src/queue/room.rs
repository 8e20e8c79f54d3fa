//! The resources that are free while the queue is processed, and the reasons why a job does not fit.

use std::sync::Arc;

use perigee_model::job::Start;
use perigee_model::units::format_bytes;
use perigee_model::{HostId, JobId};

use super::{Bounds, Demand, Goes, Grouped, HostRoom, Queue, Rented, Waiting, named};

#[derive(Clone)]
pub(super) struct Rooms {
    pub(super) rooms: Vec<Room>,
    /// Hosts where nothing starts because they are drained.
    drained: Vec<Room>,
    /// The start conditions for whose first job a host is reserved.
    pub(super) kept: Vec<Start>,
    /// Where the VMs are that have rules about each other, with those that start in this pass.
    grouped: Grouped,
    rented: Arc<Rented>,
}

/// A job that waits, and where it may start for its rules and for the renting rule.
pub(super) struct Ruled<'a> {
    waiting: &'a Waiting,
    bounds: Bounds,
    rented: Arc<Rented>,
    /// The rented host to which it goes.
    pub(super) goes: Option<Goes>,
}

impl std::ops::Deref for Ruled<'_> {
    type Target = Waiting;

    fn deref(&self) -> &Waiting {
        self.waiting
    }
}

impl Ruled<'_> {
    /// How many of its VMs a host may have that has so much free.
    pub(super) fn holds(&self, free: Demand) -> u32 {
        let holds = free.holds(self.demand);
        if self.is_one_each() { holds.min(1) } else { holds }
    }

    /// Whether all of its VMs start at one host.
    pub(super) fn is_one_host(&self) -> bool {
        self.waiting.groups.together.is_some()
    }

    /// Whether each of its VMs starts at another host.
    pub(super) fn is_one_each(&self) -> bool {
        self.waiting.groups.apart.is_some()
    }

    /// As if the renting rule had not put it anywhere.
    pub(super) fn at_own_hosts(&self) -> Self {
        let (bounds, rented) = (self.bounds.clone(), Arc::clone(&self.rented));
        Self { waiting: self.waiting, bounds, rented, goes: None }
    }

    /// Whether it may start there for all that the renting rule says.
    fn may_rent(&self, host: &HostId) -> bool {
        let is_named = matches!(&self.waiting.start, Start::Host(named) if named == host);
        let may_go = match &self.goes {
            Some(goes) => goes.host == *host,
            None => !self.rented.hosts.contains(host),
        };
        is_named || may_go
    }

    /// One large VM in place of all of its VMs.
    pub(super) fn as_one(&self) -> Waiting {
        Waiting { demand: self.whole(), ..self.waiting.clone() }
    }

    /// A reason to wait, with the rules that leave fewer hosts for it.
    pub(super) fn with_rules(&self, reason: String) -> String {
        let rules = self.bounds.in_words();
        if rules.is_empty() { reason } else { format!("{reason}; {rules}") }
    }
}

#[derive(Clone)]
pub(super) struct Room {
    pub(super) host: HostRoom,
    pub(super) kept_for: Option<JobId>,
}

/// Why there is no room for a job now.
#[derive(Debug)]
pub(super) enum Wait {
    NoHost,
    /// Its rules about other VMs leave no host.
    RuledOut,
    /// No host where it may start is large enough; this is the largest one.
    TooLarge(HostId, Demand),
    /// The hosts that are large enough have VMs without a job, which leave too little of them.
    PersistentVms,
    /// No host has enough free: the host with the most, and whether it is reserved for this job.
    Full {
        at: HostId,
        free: Demand,
        kept: bool,
    },
    /// The hosts with room are reserved for another job.
    KeptForAnother(JobId),
    /// The hosts with room are starting as many jobs as they may.
    Starting,
}

impl Rooms {
    pub(super) fn new(queue: &Queue) -> Self {
        let room = |host: &HostRoom| Room { host: host.clone(), kept_for: None };
        let (rooms, drained) = (queue.hosts.iter().map(room), queue.drained.iter().map(room));
        Self {
            rooms: rooms.collect(),
            drained: drained.collect(),
            kept: Vec::new(),
            grouped: queue.grouped.clone(),
            rented: Arc::clone(&queue.rented),
        }
    }

    /// Where the job may start for its rules, as things stand in this pass.
    pub(super) fn ruled<'a>(&self, waiting: &'a Waiting) -> Ruled<'a> {
        let is_drained = |host: &HostId| self.drained.iter().any(|room| room.host.id == *host);
        let binds = |host: &HostId| !is_drained(host) && !waiting.lost_at.contains(host);
        let bounds = self.grouped.bounds(&waiting.job, &waiting.groups, binds);
        let rented = Arc::clone(&self.rented);
        // The renting rule knows nothing of the hosts where it may not start, nor of its rules about other VMs.
        let may_go = |goes: &&Goes| {
            let is_allowed = !waiting.avoid.contains(&goes.host) && bounds.allow(&goes.host);
            waiting.count <= 1 && is_allowed
        };
        let goes = rented.goes.get(&waiting.job).filter(may_go).cloned();
        Ruled { waiting, bounds, rented, goes }
    }

    /// Whether a host that is reserved for no job has so much free, and may start a job now.
    pub(super) fn has_open(&self, least: Demand) -> bool {
        let is_open = |room: &Room| room.kept_for.is_none() && room.host.start_slots > 0;
        self.rooms.iter().any(|room| is_open(room) && least.fits(room.host.free))
    }

    /// The job's VMs start at these hosts.
    pub(super) fn has_started(&mut self, waiting: &Waiting, hosts: &[HostId]) {
        for host in hosts {
            self.grouped.add(&waiting.job, &waiting.groups, host);
        }
    }

    /// The drained host where the job could start, or one of its VMs, if that is why it starts nowhere.
    pub(super) fn why_drained(&self, waiting: &Ruled) -> Option<String> {
        let fits =
            |room: &&Room| may_use(waiting, room) && waiting.demand.fits(room.host.for_jobs());
        let host = &self.drained.iter().find(fits)?.host.id;
        Some(format!("host {host} is drained: perigee host undrain {host}"))
    }

    pub(super) fn take(&mut self, host: &HostId, demand: Demand) {
        if let Some(room) = self.rooms.iter_mut().find(|room| room.host.id == *host) {
            room.host.free.take(demand);
            room.host.start_slots = room.host.start_slots.saturating_sub(1);
        }
    }

    /// No host is reserved for this job any more.
    pub(super) fn keep_none_for(&mut self, waiting: &Waiting) {
        let is_its = |room: &&mut Room| room.kept_for.as_ref() == Some(&waiting.job);
        for room in self.rooms.iter_mut().filter(is_its) {
            room.kept_for = None;
            self.kept.retain(|start| *start != waiting.start);
        }
    }

    /// Whether a host is reserved for this job.
    pub(super) fn keep_one_for(&self, job: &JobId) -> bool {
        self.rooms.iter().any(|room| room.kept_for.as_ref() == Some(job))
    }

    /// The hosts where the job can start now. If no host has enough CPUs or memory free, one may be reserved
    /// for the job.
    pub(super) fn with_room(&mut self, waiting: &Ruled) -> Result<Vec<HostId>, Wait> {
        let demand = waiting.demand;
        let allowed: Vec<&Room> = self.rooms.iter().filter(|room| may_use(waiting, room)).collect();
        let open = |room: &&&Room| room.kept_for.is_none() && demand.fits(room.host.free);
        let ready = allowed.iter().filter(open).filter(|room| room.host.start_slots > 0);
        let ready: Vec<HostId> = ready.map(|room| room.host.id.clone()).collect();
        if !ready.is_empty() {
            return Ok(ready);
        }
        if allowed.iter().any(|room| open(&room)) {
            return Err(Wait::Starting);
        }
        let Some(largest) = allowed.iter().max_by_key(|room| share(demand, room.host.total)) else {
            let is_ruled_out = self.rooms.iter().any(|room| may_start(waiting, room));
            return Err(if is_ruled_out { Wait::RuledOut } else { Wait::NoHost });
        };
        if !demand.fits(largest.host.total) {
            return Err(Wait::TooLarge(largest.host.id.clone(), largest.host.total));
        }
        if !allowed.iter().any(|room| demand.fits(room.host.for_jobs())) {
            return Err(Wait::PersistentVms);
        }
        let kept = allowed.iter().filter(|room| demand.fits(room.host.free));
        if let Some(other) = kept.filter_map(|room| room.kept_for.clone()).next() {
            return Err(Wait::KeptForAnother(other));
        }
        Err(self.keep_one(waiting))
    }

    /// Reserves the host that will probably have room soonest: the one with the most free already. Nothing else
    /// starts there, so its free resources only grow.
    fn keep_one(&mut self, waiting: &Ruled) -> Wait {
        let demand = waiting.demand;
        let may_keep = !self.kept.contains(&waiting.start);
        let candidates = self
            .rooms
            .iter_mut()
            .filter(|room| may_use(waiting, room) && demand.fits(room.host.for_jobs()));
        let best = candidates.max_by_key(|room| {
            (room.kept_for.is_none(), share(demand, room.host.free), room.host.free.memory_bytes)
        });
        let Some(best) = best else { return Wait::NoHost };
        let kept = may_keep && best.kept_for.is_none();
        if kept {
            best.kept_for = Some(waiting.job.clone());
            self.kept.push(waiting.start.clone());
        }
        Wait::Full { at: best.host.id.clone(), free: best.host.free, kept }
    }
}

/// Whether it may start there, if there is room.
pub(super) fn may_use(waiting: &Ruled, room: &Room) -> bool {
    let host = &room.host.id;
    may_start(waiting, room) && waiting.bounds.allow(host) && waiting.may_rent(host)
}

/// The same, whatever its rules about other VMs say.
fn may_start(waiting: &Waiting, room: &Room) -> bool {
    let start_ok = match &waiting.start {
        Start::Anywhere => true,
        Start::Site(site) => room.host.site == *site,
        Start::Host(id) => room.host.id == *id,
    };
    start_ok && !waiting.avoid.contains(&room.host.id)
}

/// The free share of the needed resources in thousandths, at most 1000; of the two resources, the scarcer
/// one's.
fn share(needed: Demand, room: Demand) -> u64 {
    let of = |part: u64, whole: u64| {
        part.saturating_mul(1000).checked_div(whole).map_or(1000, |share| share.min(1000))
    };
    of(room.cpus.into(), needed.cpus.into()).min(of(room.memory_bytes, needed.memory_bytes))
}

impl Wait {
    pub(super) fn reason(&self, waiting: &Waiting) -> String {
        let place = match &waiting.start {
            Start::Anywhere => String::new(),
            Start::Site(site) => format!(" at site {site}"),
            Start::Host(host) => format!(" as host {host}"),
        };
        let needs = words(waiting.demand);
        match self {
            Self::NoHost if !waiting.avoid.is_empty() => {
                "no other host is up than those where it was lost or that cannot start it"
                    .to_owned()
            }
            Self::NoHost => format!("no host is up{place}"),
            Self::RuledOut => {
                format!("no host{place} that is up may have it beside the VMs that are there")
            }
            Self::TooLarge(host, total) => {
                format!(
                    "it needs {needs}; the largest host{place} is {host} with {}",
                    words(*total)
                )
            }
            Self::PersistentVms => format!(
                "it needs {needs}, and VMs without a job leave less than that of each host{place}"
            ),
            Self::Full { at, free, kept } => {
                let kept = if *kept { ", which is reserved for it" } else { "" };
                format!(
                    "it needs {needs}; the most that is free{place} is {} at {at}{kept}",
                    words(*free)
                )
            }
            Self::KeptForAnother(job) => {
                format!("the hosts with room are reserved for {}", named(job, waiting))
            }
            Self::Starting => {
                "each host with room is starting as many jobs as it may at once".to_owned()
            }
        }
    }
}

pub(super) fn words(demand: Demand) -> String {
    let plural = if demand.cpus == 1 { "" } else { "s" };
    format!("{} CPU{plural} and {} of memory", demand.cpus, format_bytes(demand.memory_bytes))
}
