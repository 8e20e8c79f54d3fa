//! The resources that are free while the queue is processed, and the reasons why a job does not fit.

use perigee_model::job::Start;
use perigee_model::units::format_bytes;
use perigee_model::{HostId, JobId};

use super::{Demand, HostRoom, Waiting, named};

#[derive(Clone)]
pub(super) struct Rooms {
    pub(super) rooms: Vec<Room>,
    /// Hosts where nothing starts because they are drained.
    drained: Vec<Room>,
    /// The start conditions for whose first job a host is reserved.
    pub(super) kept: Vec<Start>,
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
    pub(super) fn new(hosts: &[HostRoom], drained: &[HostRoom]) -> Self {
        let room = |host: &HostRoom| Room { host: host.clone(), kept_for: None };
        let (rooms, drained) = (hosts.iter().map(room), drained.iter().map(room));
        Self { rooms: rooms.collect(), drained: drained.collect(), kept: Vec::new() }
    }

    /// The drained host where the job could start, or one of its VMs, if that is why it starts nowhere.
    pub(super) fn why_drained(&self, waiting: &Waiting) -> Option<String> {
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

    /// Whether a host is reserved for this job.
    pub(super) fn keep_one_for(&self, job: &JobId) -> bool {
        self.rooms.iter().any(|room| room.kept_for.as_ref() == Some(job))
    }

    /// The hosts where the job can start now. If no host has enough CPUs or memory free, one may be reserved
    /// for the job.
    pub(super) fn with_room(&mut self, waiting: &Waiting) -> Result<Vec<HostId>, Wait> {
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
            return Err(Wait::NoHost);
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
    fn keep_one(&mut self, waiting: &Waiting) -> Wait {
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

pub(super) fn may_use(waiting: &Waiting, room: &Room) -> bool {
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
