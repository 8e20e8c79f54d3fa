//! Rules that rent hosts: Perigee's, and others beside it.
//!
//! What the others do is what their documents say of them, as simple as that can be said. All of them give jobs only hosts that can run them,
//! keep confined data at home, start a job at an own host if one has room, and look at the budget before they rent. None of them reserves
//! what a host may cost until it ends; one ends its hosts when the budget is spent.

use perigee_model::rental::Offer;

/// A rule that rents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RentRule {
    /// Nothing is rented.
    Never,
    /// As many of the cheapest hosts as the jobs need that have no room; idle ones go after 10 minutes (Kubernetes' cluster autoscaler,
    /// `--scale-down-unneeded-time`).
    AtOnce,
    /// One more of the cheapest hosts in each minute with more than 10 waiting jobs; idle ones go after 5 minutes.
    Threshold,
    /// Four hosts when jobs wait and none is there; they end after 50 minutes, or after 15 idle ones (`condor_annex`: its `-duration` of 0.83 h
    /// and its `-idle` of 0.25 h by default).
    Annex,
    /// For each job without room the host that runs it for the least money, egress left out; it goes with its job (SkyPilot's optimizer,
    /// cost).
    Cheapest,
    /// For each job without room the host that runs it fastest; it goes with its job (SkyPilot's optimizer, time).
    Fastest,
    /// As the cheapest, and all hosts end before the budget is overspent. Where there is one.
    Stopped,
    /// The rule of the planner.
    Perigee,
}

impl RentRule {
    pub const ALL: [Self; 8] = [
        Self::Never,
        Self::AtOnce,
        Self::Threshold,
        Self::Annex,
        Self::Cheapest,
        Self::Fastest,
        Self::Stopped,
        Self::Perigee,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::AtOnce => "at-once",
            Self::Threshold => "threshold",
            Self::Annex => "annex",
            Self::Cheapest => "cheapest",
            Self::Fastest => "fastest",
            Self::Stopped => "stopped",
            Self::Perigee => "perigee",
        }
    }

    pub fn title(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::AtOnce => "at once, as a cluster autoscaler",
            Self::Threshold => "threshold: more than 10 wait",
            Self::Annex => "fixed size, as HTCondor's annex",
            Self::Cheapest => "cheapest for each job, as SkyPilot",
            Self::Fastest => "fastest for each job, as SkyPilot",
            Self::Stopped => "cheapest, and all stops at the budget",
            Self::Perigee => "Perigee: the whole queue",
        }
    }

    /// For how long an idle host stays, in seconds.
    pub fn idle_s(self) -> u64 {
        match self {
            Self::AtOnce => 600,
            Self::Threshold => 300,
            Self::Annex => 900,
            Self::Never | Self::Cheapest | Self::Fastest | Self::Stopped | Self::Perigee => 0,
        }
    }

    /// For how long a host takes jobs, in seconds.
    pub fn lease_s(self) -> Option<u64> {
        (self == Self::Annex).then_some(3000)
    }
}

/// More jobs wait than this.
const THRESHOLD: usize = 10;
/// The size of an annex.
const ANNEX: usize = 4;

/// A job that waits, as a rule sees it.
pub struct Waits {
    pub cpus: u32,
    pub memory_bytes: u64,
    pub without_kvm: bool,
    pub may_leave: bool,
}

/// What a rule sees.
pub struct View<'a> {
    pub waiting: &'a [Waits],
    /// CPUs and memory that are free at rented hosts, or will be when they have started.
    pub free: Vec<(u32, u64)>,
    pub rented: usize,
    /// The offers that can be asked for, each with how much faster than an own host it computes.
    pub offers: Vec<(usize, &'a Offer, f64)>,
}

/// Which offers a peer asks for now, by their numbers.
pub fn rents(rule: RentRule, view: &View) -> Vec<usize> {
    match rule {
        RentRule::Never | RentRule::Perigee => Vec::new(),
        RentRule::AtOnce => packed(view, by_cpu),
        RentRule::Threshold if view.waiting.len() > THRESHOLD => {
            first(view).map_or_else(Vec::new, |offer| vec![offer])
        }
        RentRule::Annex if view.rented == 0 => {
            first(view).map_or_else(Vec::new, |offer| vec![offer; ANNEX])
        }
        RentRule::Threshold | RentRule::Annex => Vec::new(),
        RentRule::Cheapest | RentRule::Stopped => for_each(view, by_run),
        RentRule::Fastest => for_each(view, by_time),
    }
}

fn per_hour(offer: &Offer) -> f64 {
    offer.price.per_hour_micros.map_or(f64::INFINITY, |per_hour| per_hour.get() as f64)
}

/// The least is the best.
type Order = fn(&Offer, f64) -> (f64, f64);

fn by_cpu(offer: &Offer, _speed: f64) -> (f64, f64) {
    (per_hour(offer) / f64::from(offer.cpus), 0.0)
}

fn by_run(offer: &Offer, speed: f64) -> (f64, f64) {
    (per_hour(offer) / speed, 0.0)
}

fn by_time(offer: &Offer, speed: f64) -> (f64, f64) {
    (-speed, per_hour(offer))
}

fn best(view: &View, job: &Waits, order: Order) -> Option<usize> {
    let fits = |(_, offer, _): &&(usize, &Offer, f64)| {
        let is_large = offer.cpus >= job.cpus && offer.memory_bytes >= job.memory_bytes;
        is_large && job.may_leave && (offer.kvm == Some(true) || job.without_kvm)
    };
    let all = view.offers.iter().filter(fits);
    let best = all.min_by(|(_, one, a), (_, other, b)| {
        let (one, other) = (order(one, *a), order(other, *b));
        one.0.total_cmp(&other.0).then(one.1.total_cmp(&other.1))
    });
    best.map(|(number, ..)| *number)
}

/// The offer with the cheapest CPUs for the first job that could go.
fn first(view: &View) -> Option<usize> {
    view.waiting.iter().find_map(|job| best(view, job, by_cpu))
}

/// Takes the first room that the job has.
fn take(free: &mut [(u32, u64)], job: &Waits) -> bool {
    let room =
        free.iter_mut().find(|(cpus, memory)| *cpus >= job.cpus && *memory >= job.memory_bytes);
    let Some((cpus, memory)) = room else { return false };
    (*cpus, *memory) = (*cpus - job.cpus, *memory - job.memory_bytes);
    true
}

/// As many hosts as the waiting jobs need, packed by first fit.
fn packed(view: &View, order: Order) -> Vec<usize> {
    let mut free = view.free.clone();
    let mut asked = Vec::new();
    for job in view.waiting.iter().filter(|job| job.may_leave) {
        if take(&mut free, job) {
            continue;
        }
        let Some(number) = best(view, job, order) else { continue };
        let offer = view.offers.iter().find(|(one, ..)| *one == number);
        if let Some((_, offer, _)) = offer {
            free.push((offer.cpus - job.cpus, offer.memory_bytes - job.memory_bytes));
            asked.push(number);
        }
    }
    asked
}

/// A host for each job that has none.
fn for_each(view: &View, order: Order) -> Vec<usize> {
    let mut free = view.free.clone();
    let without = view.waiting.iter().filter(|job| job.may_leave && !take(&mut free, job));
    without.filter_map(|job| best(view, job, order)).collect()
}
