//! The queue's predicted drain: which job starts when and where, if each goes where its own sum is least.
//!
//! The jobs are taken one after another. A host has as many slots as CPUs; a job takes as many as its CPUs, or as its part of the host's
//! memory, and starts when so many are free (list scheduling: Graham, SIAM J. Appl. Math. 1969). Two orders are tried, and the one with the
//! smaller sum counts: the queue's, and one in which the jobs that would be dear elsewhere come first, so that they have the own hosts.
//!
//! A job with several VMs is there once for each. They start when all have room, wherever that is.

use perigee_model::money::Money;
use perigee_model::rental::{MACHINE_CPUS_MAX, Offer};

use super::expected::expected;
use super::idle;
use super::{
    Host, JOBS_MOST, Job, NEVER_S, Planned, Run, SPOT_RISES, Snapshot, Start, UNKNOWN_START,
};

/// Millionths as a number to reckon with.
pub(super) fn micros(money: Money) -> f64 {
    money.micros as f64
}

/// Rounded up; what is below 0 is nothing.
pub(super) fn money(micros: f64) -> Money {
    Money::from_micros(idle::whole_s(micros))
}

pub(super) fn start(snapshot: &Snapshot, kind: &str) -> Start {
    snapshot.starts.get(kind).copied().unwrap_or(UNKNOWN_START)
}

/// What a rented place costs.
#[derive(Debug, Clone)]
struct Tariff {
    kind: String,
    /// Millionths of a dollar for each second, and the most that it may become.
    per_s: f64,
    high_per_s: f64,
    /// For each byte that leaves; `None` if not known.
    egress_per_byte: Option<f64>,
    taken_back_every_s: Option<f64>,
    minimum_s: f64,
}

/// A host in the drain.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// Its number in the snapshot; `None` if it would be rented.
    pub host: Option<usize>,
    cpus: u32,
    memory_bytes: u64,
    kvm: bool,
    tariff: Option<Tariff>,
    /// How much later than expected it may start.
    late_s: f64,
    /// When each slot is free, in order.
    free_s: Vec<f64>,
    /// When its running jobs have ended.
    busy_s: f64,
}

impl Place {
    pub(super) fn of_host(number: usize, host: &Host, snapshot: &Snapshot) -> Self {
        let tariff = host.rented.as_ref().and_then(|rented| {
            let price = &rented.price;
            let per_hour = price.per_hour_micros?;
            Some(tariff(&rented.kind, per_hour.get(), price, rented.spot, snapshot))
        });
        let mut free_s = vec![host.ready_in_s.max(0.0); host.cpus.min(MACHINE_CPUS_MAX) as usize];
        let mut busy_s: f64 = 0.0;
        let mut slot = free_s.iter_mut();
        for job in &host.running {
            busy_s = busy_s.max(job.left_s);
            for _ in 0..slots(job.cpus, job.memory_bytes, host.cpus, host.memory_bytes) {
                if let Some(free_s) = slot.next() {
                    *free_s = job.left_s.max(0.0);
                }
            }
        }
        free_s.sort_unstable_by(f64::total_cmp);
        Self {
            host: Some(number),
            cpus: host.cpus,
            memory_bytes: host.memory_bytes,
            kvm: host.kvm,
            tariff,
            late_s: 0.0,
            free_s,
            busy_s,
        }
    }

    pub(super) fn of_offer(offer: &Offer, snapshot: &Snapshot) -> Self {
        let Start { expected_s: ready_s, high_s, .. } = start(snapshot, &offer.kind);
        let tariff = offer.price.per_hour_micros.map(|per_hour| {
            tariff(&offer.kind, per_hour.get(), &offer.price, offer.spot, snapshot)
        });
        Self {
            host: None,
            cpus: offer.cpus,
            memory_bytes: offer.memory_bytes,
            kvm: offer.kvm == Some(true),
            tariff,
            late_s: (high_s - ready_s).max(0.0),
            free_s: vec![ready_s; offer.cpus.min(MACHINE_CPUS_MAX) as usize],
            busy_s: 0.0,
        }
    }

    /// No more jobs go there.
    pub(super) fn close(&mut self) {
        self.free_s.clear();
    }

    /// The job is placed there.
    fn take(&mut self, way: Way) {
        let slots = (way.slots as usize).min(self.free_s.len());
        self.free_s[..slots].fill(way.end_s);
        self.free_s.sort_unstable_by(f64::total_cmp);
    }

    /// What the machine costs until then, in millionths of a dollar; nothing if no job goes to a host that would be rented.
    fn machine(&self, ends_s: f64) -> f64 {
        let Some(tariff) = &self.tariff else { return 0.0 };
        let least_s = if self.host.is_none() && ends_s > 0.0 { tariff.minimum_s } else { 0.0 };
        tariff.per_s * ends_s.max(least_s)
    }

    /// In how many seconds a job would start there; `None` if it can't run there.
    pub(super) fn starts_s(&self, job: &Job) -> Option<f64> {
        self.way(job, 0.0).map(|way| way.start_s)
    }

    /// When VMs like this job would start there, one after another: at most so many; none if it can't run there.
    pub(super) fn starts_of(&self, job: &Job, most: usize) -> impl Iterator<Item = f64> {
        let slots = self.way(job, 0.0).map_or(usize::MAX, |way| way.slots.max(1) as usize);
        let each = self.free_s.chunks_exact(slots).take(most);
        each.filter_map(|slots_free_s| slots_free_s.last().copied())
    }

    /// How the job would run there, if it is there in so many seconds.
    fn way(&self, job: &Job, in_s: f64) -> Option<Way> {
        let slots = slots(job.cpus, job.memory_bytes, self.cpus, self.memory_bytes);
        let free_s = self.free_s.get((slots as usize).checked_sub(1)?)?.max(in_s);
        if job.cpus > self.cpus || job.memory_bytes > self.memory_bytes {
            return None;
        }
        if !self.kvm && !job.without_kvm {
            return None;
        }
        let Some(tariff) = &self.tariff else {
            let run = job.own?;
            let end_s = free_s + run.expected_s;
            let egress = micros(job.own_egress);
            return Some(Way {
                slots,
                start_s: free_s,
                end_s,
                high_s: run.high_s,
                egress,
                machine: 0.0,
                reserve: egress,
            });
        };
        let run = job.rented.get(&tariff.kind).filter(|_| job.may_leave)?;
        let way = tariff.way(run, slots, free_s, self.cpus, job)?;
        Some(Way { high_s: way.high_s + self.late_s, ..way })
    }
}

fn tariff(
    kind: &str,
    per_hour: u64,
    price: &perigee_model::money::Price,
    spot: bool,
    snapshot: &Snapshot,
) -> Tariff {
    let per_s = per_hour as f64 / 3600.0;
    let rises = if spot { SPOT_RISES } else { 1 };
    let per_gib = price.egress_per_gib_micros.map(|per_gib| per_gib.get() as f64);
    let every_s = start(snapshot, kind).taken_back_every_s.filter(|every_s| *every_s > 0.0);
    Tariff {
        kind: kind.to_owned(),
        per_s,
        high_per_s: per_s * rises as f64,
        egress_per_byte: per_gib.map(|per_gib| per_gib / (1_u64 << 30) as f64),
        taken_back_every_s: every_s.filter(|_| spot),
        minimum_s: f64::from(price.minimum_s),
    }
}

impl Tariff {
    fn way(&self, run: &Run, slots: u32, start_s: f64, cpus: u32, job: &Job) -> Option<Way> {
        let egress = match run.egress_bytes {
            0 => 0.0,
            bytes => self.egress_per_byte? * bytes as f64,
        };
        let lasts_s = self.with_losses(run.expected_s);
        let part = f64::from(slots) / f64::from(cpus.max(1));
        let reserve = egress + self.high_per_s * part * run.high_s;
        if job.worth.budget.is_some_and(|budget| reserve > micros(budget)) {
            return None;
        }
        Some(Way {
            slots,
            start_s,
            end_s: start_s + lasts_s,
            high_s: self.with_losses(run.high_s),
            egress,
            machine: self.per_s * part * lasts_s,
            reserve,
        })
    }

    /// The mean time of a run that begins anew each time that the host is taken back.
    fn with_losses(&self, run_s: f64) -> f64 {
        self.taken_back_every_s
            .map_or(run_s, |every_s| every_s * ((run_s / every_s).min(20.0)).exp_m1())
    }
}

/// How many of a host's slots a job takes.
fn slots(cpus: u32, memory_bytes: u64, of_cpus: u32, of_memory_bytes: u64) -> u32 {
    let by_memory = u128::from(memory_bytes) * u128::from(of_cpus);
    let by_memory = by_memory.div_ceil(u128::from(of_memory_bytes.max(1)));
    cpus.max(u32::try_from(by_memory).unwrap_or(u32::MAX)).max(1)
}

/// How a job would run at a place. Money is in millionths of a dollar.
#[derive(Debug, Clone, Copy)]
struct Way {
    slots: u32,
    start_s: f64,
    end_s: f64,
    /// Of the run.
    high_s: f64,
    egress: f64,
    /// The job's part of the machine's price.
    machine: f64,
    reserve: f64,
}

/// Where a job goes.
#[derive(Debug, Clone, Copy)]
struct Goes {
    place: usize,
    way: Way,
}

/// A drain of the whole queue.
#[derive(Debug, Clone, Default)]
pub(super) struct Drained {
    /// What waiting, egress and the rented machines cost until their last jobs end, in millionths of a dollar.
    pub sum: f64,
    goes: Vec<Option<Goes>>,
    /// Of each place: when its last job ends.
    ends_s: Vec<f64>,
    /// Of each place: what of the machine is in the sum.
    counted: Vec<f64>,
    /// Of each job.
    per_hour: Vec<f64>,
    /// How many of the jobs wait already: the first ones.
    waiting: usize,
    /// The places when all jobs are at theirs.
    pub places: Vec<Place>,
}

/// What a place would be used for.
#[derive(Debug, Clone)]
pub(super) struct UseOf {
    /// The numbers in the snapshot of those that wait already, and how many do in the whole queue.
    pub jobs: Vec<usize>,
    pub of: usize,
    /// When the last one ends.
    pub ends_s: f64,
    /// What of the machine is in the sum, in millionths of a dollar.
    pub counted: f64,
    /// The high end of the longest run of those that start at once, in seconds, and what all those cost to leave.
    pub first_high_s: f64,
    pub first_egress: Money,
    /// What an hour of waiting costs those that start at once.
    pub waiting_per_hour: Money,
}

impl Drained {
    /// Whether a job goes there that waits, or one that is expected within so many seconds.
    pub(super) fn is_used(&self, place: usize, within_s: f64) -> bool {
        let mut all = self.goes.iter().enumerate();
        all.any(|(job, goes)| {
            goes.is_some_and(|goes| {
                goes.place == place && (job < self.waiting || goes.way.start_s <= within_s)
            })
        })
    }

    /// `None` if no job goes there.
    pub(super) fn use_of(&self, place: usize) -> Option<UseOf> {
        let way = |(job, goes): (usize, &Option<Goes>)| {
            goes.filter(|goes| goes.place == place).map(|goes| (job, goes.way))
        };
        let there: Vec<(usize, Way)> = self.goes.iter().enumerate().filter_map(way).collect();
        let first_s = there.iter().map(|(_, way)| way.start_s).min_by(f64::total_cmp)?;
        let first = || there.iter().filter(|(_, way)| way.start_s <= first_s + 1.0);
        Some(UseOf {
            jobs: there.iter().map(|(job, _)| *job).filter(|job| *job < self.waiting).collect(),
            of: self.waiting,
            ends_s: self.ends_s[place],
            counted: self.counted[place],
            first_high_s: first().map(|(_, way)| way.high_s).fold(0.0, f64::max),
            first_egress: money(first().map(|(_, way)| way.egress).sum()),
            waiting_per_hour: money(first().map(|(job, _)| self.per_hour[*job]).sum()),
        })
    }

    pub(super) fn planned(&self, snapshot: &Snapshot, places: &[Place]) -> Vec<Planned> {
        let planned = |(job, goes): (usize, &Option<Goes>)| {
            let goes = goes.as_ref()?;
            let host = places[goes.place].host.map(|number| snapshot.hosts[number].host.clone());
            Some(Planned {
                job: snapshot.jobs[job].job.clone(),
                host,
                start_s: goes.way.start_s,
                end_s: goes.way.end_s,
                reserve: money(goes.way.reserve),
            })
        };
        let waiting = self.goes.iter().take(self.waiting).enumerate();
        waiting.filter_map(planned).collect()
    }
}

/// The drains of one queue with other hosts.
pub(super) struct Drains<'s> {
    snapshot: &'s Snapshot,
    /// Those that wait, and then those that are expected, each with the seconds until it is there.
    jobs: Vec<(f64, &'s Job)>,
    waiting: usize,
    /// When each job would end with the cluster's own hosts alone.
    without_s: Vec<f64>,
    /// The queue's order, and the other one if it differs.
    orders: Vec<Vec<usize>>,
    per_hour: Vec<f64>,
}

impl<'s> Drains<'s> {
    pub(super) fn new(snapshot: &'s Snapshot) -> Self {
        let mut jobs: Vec<(f64, &Job)> =
            snapshot.jobs.iter().take(JOBS_MOST).map(|job| (0.0, job)).collect();
        let waiting = jobs.len();
        // A budget that is tight is for those who wait.
        let is_tight = super::is_tight(snapshot, snapshot.budget_left);
        let arrived = snapshot.arrived.as_slice();
        let arrived = if is_tight { &arrived[..0] } else { arrived };
        let expected = expected(arrived).into_iter().map(|one| (one.in_s, one.job));
        jobs.extend(expected.take(JOBS_MOST - waiting));
        let queue: Vec<usize> = (0..jobs.len()).collect();
        let mut dear_first = queue.clone();
        // Those that are expected come last.
        dear_first[..waiting]
            .sort_by(|one, other| dear(jobs[*other].1).total_cmp(&dear(jobs[*one].1)));
        let mut orders = vec![queue];
        if dear_first != orders[0] {
            orders.push(dear_first);
        }
        let per_hour =
            jobs.iter().map(|(_, job)| micros(job.worth.waiting_per_hour.unwrap_or_default()));
        let per_hour = per_hour.collect();
        let without_s = vec![NEVER_S; jobs.len()];
        let mut drains = Self { snapshot, jobs, waiting, without_s, orders, per_hour };
        let own = snapshot.hosts.iter().enumerate().filter(|(_, host)| host.rented.is_none());
        let own: Vec<Place> =
            own.map(|(number, host)| Place::of_host(number, host, snapshot)).collect();
        let alone = drains.drain(&own, &drains.orders[0], f64::INFINITY);
        for (without_s, goes) in drains.without_s.iter_mut().zip(&alone.goes) {
            *without_s = goes.map_or(NEVER_S, |goes| goes.way.end_s.max(1.0));
        }
        drains
    }

    pub(super) fn start(&self, kind: &str) -> Start {
        start(self.snapshot, kind)
    }

    /// The drain in the order with the smaller sum.
    pub(super) fn best(&self, places: &[Place], left: Money) -> Drained {
        let all = self.orders.iter().map(|order| self.drain(places, order, micros(left)));
        all.min_by(|one, other| one.sum.total_cmp(&other.sum)).unwrap_or_default()
    }

    fn drain(&self, places: &[Place], order: &[usize], mut left: f64) -> Drained {
        let mut places = places.to_vec();
        let mut ends_s: Vec<f64> = places.iter().map(|place| place.busy_s).collect();
        let mut goes = vec![None; self.jobs.len()];
        let mut sum = 0.0;
        for all in order.chunk_by(|one, other| self.are_one_job(*one, *other)) {
            let from_s = self.all_have_room_s(all, &places, left);
            // Nothing is kept free for those that may never have room together.
            let have_room = from_s < NEVER_S;
            for &number in all {
                let least = self.least((number, from_s), &places, left);
                let Some((least, at, way)) = least.filter(|_| have_room) else {
                    sum += self.waiting(number, NEVER_S, NEVER_S);
                    continue;
                };
                sum += least - way.machine;
                left -= way.reserve;
                ends_s[at] = ends_s[at].max(way.end_s);
                places[at].take(way);
                goes[number] = Some(Goes { place: at, way });
            }
        }
        let counted: Vec<f64> =
            places.iter().zip(&ends_s).map(|(place, ends_s)| place.machine(*ends_s)).collect();
        sum += counted.iter().sum::<f64>();
        let (per_hour, waiting) = (self.per_hour.clone(), self.waiting);
        Drained { sum, goes, ends_s, counted, per_hour, waiting, places }
    }

    /// Whether these are two VMs of one job that waits. They start together.
    fn are_one_job(&self, one: usize, other: usize) -> bool {
        one.max(other) < self.waiting && self.jobs[one].1.job == self.jobs[other].1.job
    }

    /// When all VMs of a job have room at once; 0 if it has only one.
    fn all_have_room_s(&self, all: &[usize], places: &[Place], mut left: f64) -> f64 {
        if all.len() < 2 {
            return 0.0;
        }
        let (mut places, mut from_s) = (places.to_vec(), 0.0);
        for &number in all {
            if let Some((_, at, way)) = self.least((number, 0.0), &places, left) {
                from_s = way.start_s.max(from_s);
                left -= way.reserve;
                // None of them has room when another one has ended.
                places[at].take(Way { end_s: NEVER_S, ..way });
            }
        }
        from_s
    }

    /// Where the job's own sum is least if it starts after so many seconds, of places that end it at the same cost the one that ends it first. `None`
    /// if not to run is as good.
    fn least(
        &self,
        (number, from_s): (usize, f64),
        places: &[Place],
        left: f64,
    ) -> Option<(f64, usize, Way)> {
        let (in_s, job) = self.jobs[number];
        let mut best: Option<(f64, usize, Way)> = None;
        for (at, place) in places.iter().enumerate() {
            let Some(way) = place.way(job, in_s.max(from_s)).filter(|way| way.reserve <= left)
            else {
                continue;
            };
            let waiting = self.waiting(number, way.end_s, way.start_s + way.high_s);
            let cost = waiting + way.egress + way.machine;
            let is_better = best.as_ref().is_none_or(|(least, _, before)| {
                cost < *least || (cost <= *least && way.end_s < before.end_s)
            });
            if is_better {
                best = Some((cost, at, way));
            }
        }
        let (cost, at, way) = best?;
        let is_own = places[at].tariff.is_none();
        (is_own || cost < self.waiting(number, NEVER_S, NEVER_S)).then_some((cost, at, way))
    }

    /// What waiting costs the job until these ends, the expected one and the high end, in millionths of a dollar.
    fn waiting(&self, number: usize, end_s: f64, high_end_s: f64) -> f64 {
        let (in_s, job) = self.jobs[number];
        let worth = &job.worth;
        let hours = self.per_hour[number] * (end_s - in_s).max(0.0) / 3600.0;
        let budget = worth.budget.map(micros);
        match worth.deadline_in_s {
            Some(left_s) if left_s >= 0.0 && high_end_s > left_s + in_s => {
                hours + budget.unwrap_or_else(|| micros(self.snapshot.budget_left))
            }
            Some(_) => hours,
            None if worth.waiting_per_hour.is_some() => hours,
            None => budget.unwrap_or(0.0) * (end_s / self.without_s[number]).min(1.0),
        }
    }
}

/// How dear it is that the job goes to a rented host: its egress for each second of a CPU there. One that never goes is the dearest.
fn dear(job: &Job) -> f64 {
    let each =
        |run: &Run| run.egress_bytes as f64 / (run.expected_s * f64::from(job.cpus)).max(1.0);
    let least = job.rented.values().map(each).min_by(f64::total_cmp);
    let here = micros(job.own_egress);
    match least.filter(|_| job.may_leave) {
        // What leaves if it stays speaks for going.
        Some(_) if here > 0.0 => -here,
        Some(least) => least,
        None => f64::INFINITY,
    }
}
