//! Decides when a host is rented, which one, for which jobs, and when it is given back. It is a pure function of a snapshot.
//!
//! What is compared is money: what the machines and the traffic cost, and what waiting costs by the word of those who wait. The queue is
//! drained twice, as predicted, over all of its jobs (`drain.rs`): with the hosts that are there or starting, and with one more. Each
//! job goes where its own sum is least, so a job whose data would have to leave the provider's site for much money stays, while one with
//! little data goes. A host is rented if the whole queue's sum becomes less by it:
//!
//! ```text
//! waiting(without) + egress(without) > waiting(with) + egress(with) + machine(start, use, idle tail; at least its minimum)
//! ```
//!
//! The jobs that will probably arrive until then are a part of the queue (`expected.rs`), so that a host is worth as much in a stream of
//! jobs as in a queue.
//!
//! Then the next host is looked at in the same way, beside the one that was just decided, until none is worth its price.
//!
//! - **Waiting** costs what the job says for each hour until its end. A job with a deadline has a cost if the high end of its time (9 of
//!   10 cases) is after the deadline: its budget. A job with a budget alone pays its budget for no wait at all, and a part of the budget
//!   for a part of the wait.
//! - **Idle** hosts are kept until idling has cost as much as a new start would: what the start itself is paid for, and what the jobs that
//!   the host had would wait for meanwhile. That is the ski-rental rule (Karlin, Manasse, Rudolph, Sleator, Algorithmica 1988): whatever
//!   comes next, idling and a new start together cost at most twice what the better of the two does. Before its minimum time is over a
//!   host costs nothing more, and is kept.
//! - **Spot** hosts may be taken back, and a job begins anew elsewhere. A run of `t` seconds at a host that is taken back every `u` seconds
//!   takes `u (exp(t / u) - 1)` in the mean, if what it has done is lost each time (Daly, FGCS 2006, without checkpoints).
//! - **The budget** is what nobody has reserved yet. The high end of each start, and of each longer stay of a rented host, has to fit: the
//!   sum of all [`Rent::reserve`] and [`Keep::reserve`] is never above [`Snapshot::budget_left`]. Each has the host's lease in it, for which the host
//!   runs on when the controller is away. A host that needs more than is left stays
//!   until what is reserved reaches no further than that, and takes no more jobs.
//! - **Scarce** money goes where it does most: if what is left would not pay for one more of the dearest hosts until the budget's period
//!   is over, the offer that saves most for a dollar is chosen, and not the one that saves most, and no job counts that is only expected. The money is not spread over the period: a
//!   queue that is kept short early is short for longer.
//! - **Not known** is never free: an offer without a price is not considered, nor a kind that does not say that it has KVM, unless the job
//!   allows that. A job whose data may not leave their site never goes to a rented host.

mod drain;
mod expected;
mod explain;
mod idle;
pub mod keep;
#[cfg(test)]
mod tests;
mod waits;

pub use waits::{waits, waits_for_all};

use std::collections::{BTreeMap, BTreeSet};

use perigee_model::money::{Money, Price};
use perigee_model::rental::Offer;
use perigee_model::{HostId, JobId};

use drain::{Drained, Drains, Place};

/// A job that can't run at any host that is there is counted as if it waited for so long, in seconds: a day.
pub const NEVER_S: f64 = 86_400.0;

/// How many jobs are looked at, the first of the queue. Those behind them wait for more than a look.
pub const JOBS_MOST: usize = 2_000;

/// How many offers are looked at: the first of the snapshot that can be had and that could run a job that waits.
pub const OFFERS_MOST: usize = 32;

/// For so many seconds the jobs are expected that arrived in as many before.
pub const EXPECTED_S: f64 = 1800.0;

/// How many hosts are asked for at one look.
pub const RENTS_MOST: usize = 8;

/// The lease of a rented host, in seconds: so long a host runs on of which nobody hears, as when the controller is away.
pub const LEASE_S: f64 = 600.0;

/// A reservation reaches at least so many seconds beyond the look that makes it: a host can be emptied before it ends, and then its lease is paid.
pub const AHEAD_S: f64 = 300.0 + LEASE_S;

/// A host that never hears of its controller runs for so many seconds at most: a start, and the half hour after which its first boot ends it.
pub const UNHEARD_S: f64 = 300.0 + 1800.0;

/// A spot host costs at most so many times what it costs when it is asked for: the maximum price that the provider is told.
pub const SPOT_RISES: u64 = 2;

/// The seconds of a start that was never seen: what is expected, and the high end.
pub const UNKNOWN_START: Start =
    Start { expected_s: 120.0, high_s: 300.0, taken_back_every_s: None };

/// How long a kind is not asked for where it was refused, in seconds; twice as long after each further refusal, at most an hour.
pub const REFUSED_S: f64 = 300.0;

/// All that the rule looks at. Seconds count from now.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// The jobs that wait, in the queue's order.
    pub jobs: Vec<Job>,
    /// The jobs that arrived in the last [`EXPECTED_S`], whether they wait or not.
    pub arrived: Vec<Arrived>,
    /// The hosts that are there or starting.
    pub hosts: Vec<Host>,
    /// What can be rented.
    pub offers: Vec<Offer>,
    /// What was learned of the starts of each kind.
    pub starts: BTreeMap<String, Start>,
    /// Requests that were refused.
    pub refusals: Vec<Refusal>,
    /// What nobody has reserved yet.
    pub budget_left: Money,
    /// The time for which the budget is; `None` if it has no end.
    pub period: Option<Period>,
    /// How many hosts may be rented at once.
    pub rented_most: usize,
}

impl Snapshot {
    /// Whether the offer was refused lately.
    fn is_refused(&self, offer: &Offer) -> bool {
        self.refusals.iter().any(|refusal| {
            let same = refusal.kind == offer.kind && refusal.zone == offer.zone;
            same && refusal.spot == offer.spot && refusal.left_s() > 0.0
        })
    }
}

/// The time for which a budget is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Period {
    /// The seconds that are left.
    pub left_s: f64,
}

/// A job that waits.
#[derive(Debug, Clone)]
pub struct Job {
    /// Which job. One with several VMs is there for each of these, one after another: they start together.
    pub job: JobId,
    /// Its CPUs.
    pub cpus: u32,
    /// Its memory.
    pub memory_bytes: u64,
    /// At one of the cluster's own hosts; `None` if the job can't run there.
    pub own: Option<Run>,
    /// What leaving a provider's site costs if the job runs at an own host: its data are there.
    pub own_egress: Money,
    /// At a rented host, by the offer's kind. A kind that is missing can't run the job, or nobody knows how long.
    pub rented: BTreeMap<String, Run>,
    /// May the job's data leave their site?
    pub may_leave: bool,
    /// May the job run without KVM?
    pub without_kvm: bool,
    /// What waiting costs.
    pub worth: Worth,
}

/// A job that arrived so many seconds ago.
#[derive(Debug, Clone)]
pub struct Arrived {
    /// The seconds since then.
    pub ago_s: f64,
    /// The job, as it was then.
    pub job: Job,
}

/// A predicted run, with all that is sent before and after.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Run {
    /// The seconds that are expected.
    pub expected_s: f64,
    /// 9 of 10 runs take at most so many seconds.
    pub high_s: f64,
    /// What leaves the provider's site, at most. 0 at an own host.
    pub egress_bytes: u64,
}

/// What the job's owner says of waiting and of money.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Worth {
    /// What each hour until the job's end costs.
    pub waiting_per_hour: Option<Money>,
    /// The job is to have ended in so many seconds. Below 0 it is over.
    pub deadline_in_s: Option<f64>,
    /// The most that the job may spend. Also what a missed deadline costs; without a budget that is all that is left of the cluster's.
    pub budget: Option<Money>,
}

/// A host that is there or starting.
#[derive(Debug, Clone)]
pub struct Host {
    /// Which host.
    pub host: HostId,
    /// Its CPUs.
    pub cpus: u32,
    /// Its memory.
    pub memory_bytes: u64,
    /// Whether its VMs can use KVM.
    pub kvm: bool,
    /// When jobs can start there; 0 if it is there.
    pub ready_in_s: f64,
    /// The jobs that run there.
    pub running: Vec<Running>,
    /// `None` for the cluster's own.
    pub rented: Option<Rented>,
}

/// A job that runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Running {
    /// Its CPUs.
    pub cpus: u32,
    /// Its memory.
    pub memory_bytes: u64,
    /// The seconds until its end that are expected.
    pub left_s: f64,
    /// In 9 of 10 cases it has ended after so many seconds.
    pub left_high_s: f64,
}

/// What is paid for a host.
#[derive(Debug, Clone)]
pub struct Rented {
    /// As in [`Offer::kind`].
    pub kind: String,
    /// As in [`Offer::spot`].
    pub spot: bool,
    /// What it costs now.
    pub price: Price,
    /// For how long it has been paid.
    pub paid_s: f64,
    /// For how long no job has run there; `None` if one runs, or if the host is starting.
    pub idle_s: Option<f64>,
    /// How far ahead its cost is reserved.
    pub reserved_s: f64,
    /// What an hour of waiting would cost the jobs that it had last, together.
    pub waiting_per_hour: Money,
}

/// What was learned of a kind's starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Start {
    /// The seconds from the request to the first job that are expected.
    pub expected_s: f64,
    /// 9 of 10 starts take at most so many seconds.
    pub high_s: f64,
    /// The mean seconds until a spot host is taken back; `None` if that was never seen.
    pub taken_back_every_s: Option<f64>,
}

/// A request that the provider refused.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// As in [`Offer::kind`].
    pub kind: String,
    /// As in [`Offer::zone`].
    pub zone: String,
    /// As in [`Offer::spot`].
    pub spot: bool,
    /// How long ago the last refusal was.
    pub ago_s: f64,
    /// How many there were since the last start there.
    pub times: u32,
}

impl Refusal {
    /// In how many seconds the kind is asked for again.
    #[must_use]
    pub fn left_s(&self) -> f64 {
        refused_for_s(self.times) - self.ago_s
    }
}

/// For how many seconds nothing is tried again that was refused so many times.
#[must_use]
pub fn refused_for_s(times: u32) -> f64 {
    let doublings = i32::try_from(times.saturating_sub(1)).unwrap_or(i32::MAX).min(4);
    (REFUSED_S * 2f64.powi(doublings)).min(3600.0)
}

/// What is decided, and where the jobs would go then.
#[derive(Debug, Clone, Default)]
pub struct Decided {
    /// Which hosts are asked for, given back, and kept.
    pub decisions: Vec<Decision>,
    /// Where each job would run, and when, in the queue's order.
    pub planned: Vec<Planned>,
    /// Why no further host is asked for, in words.
    pub no_more_because: String,
}

/// One decision.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// A host is asked for.
    Rent(Box<Rent>),
    /// A host is emptied and given back.
    GiveBack(GiveBack),
    /// A host stays.
    Keep(Keep),
}

/// A host that is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Rent {
    /// What is asked for.
    pub offer: Offer,
    /// What has to be reserved before.
    pub reserve: Money,
    /// How many seconds of the machine that pays for.
    pub reserved_s: f64,
    /// The jobs that would run there.
    pub jobs: Vec<JobId>,
    /// What the whole queue's waiting and egress cost less.
    pub saves: Money,
    /// What the machine is expected to cost.
    pub costs: Money,
    /// The figures, in words.
    pub why: String,
}

/// A host that is given back.
#[derive(Debug, Clone, PartialEq)]
pub struct GiveBack {
    /// Which host.
    pub host: HostId,
    /// The figures, in words.
    pub why: String,
}

/// A host that stays until the next look.
#[derive(Debug, Clone, PartialEq)]
pub struct Keep {
    /// Which host.
    pub host: HostId,
    /// What has to be reserved beside what is.
    pub reserve: Money,
    /// How far ahead the reservation then reaches, in seconds.
    pub reserved_s: f64,
    /// The figures, in words.
    pub why: String,
}

/// Where a job would run.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// Which job.
    pub job: JobId,
    /// The host that is there or starting; `None` at one that would be rented.
    pub host: Option<HostId>,
    /// In how many seconds it would start.
    pub start_s: f64,
    /// In how many seconds it would end.
    pub end_s: f64,
    /// What of the budget has to be reserved before it starts there: its egress, and the machine's time by the high end.
    pub reserve: Money,
}

/// Decides. The whole queue's cost with what is decided is never above its cost without, by the same predictions.
#[must_use]
pub fn decide(snapshot: &Snapshot) -> Decided {
    let There { mut places, reserves, mut left, given_back } = there(snapshot);
    let mut decisions: Vec<Decision> = given_back.into_iter().map(Decision::GiveBack).collect();
    let drains = Drains::new(snapshot);
    let mut drained = drains.best(&places, left);
    let rented = snapshot.hosts.iter().filter(|host| host.rented.is_some()).count();
    let most = snapshot.rented_most.saturating_sub(rented).min(RENTS_MOST);
    let mut no_more_because = explain::enough(snapshot, rented);
    for _ in 0..most {
        let (rent, place, with) = match best_offer(snapshot, &drains, &places, &drained, left) {
            Ok(best) => best,
            Err(why) => {
                no_more_because = why;
                break;
            }
        };
        left = left.less(rent.reserve);
        places.push(place);
        drained = with;
        decisions.push(Decision::Rent(Box::new(rent)));
    }
    for (at, (place, more)) in places.iter().zip(reserves).enumerate() {
        let Some(host) = place.host.map(|number| &snapshot.hosts[number]) else { continue };
        if let Some(rented) = &host.rented {
            let start_s = drains.start(&rented.kind).expected_s;
            let is_used = drained.is_used(at, start_s);
            decisions.push(idle::stay(host, rented, is_used, more, &drains));
        }
    }
    Decided { decisions, planned: drained.planned(snapshot, &places), no_more_because }
}

/// Where the jobs would go with the hosts that are there or starting, without any decision.
#[must_use]
pub fn planned(snapshot: &Snapshot) -> Vec<Planned> {
    let There { places, left, .. } = there(snapshot);
    Drains::new(snapshot).best(&places, left).planned(snapshot, &places)
}

/// The hosts that are there or starting.
struct There {
    /// Those that stay, and what is reserved for each beside what is.
    places: Vec<Place>,
    reserves: Vec<Money>,
    /// What is left of the budget then.
    left: Money,
    given_back: Vec<GiveBack>,
}

fn there(snapshot: &Snapshot) -> There {
    let (mut places, mut reserves, mut given_back) = (Vec::new(), Vec::new(), Vec::new());
    let mut left = snapshot.budget_left;
    for (number, host) in snapshot.hosts.iter().enumerate() {
        let mut place = Place::of_host(number, host, snapshot);
        let more = match idle::reserved(host, left) {
            Ok(Some(more)) => more,
            Ok(None) => {
                place.close();
                Money::ZERO
            }
            Err(why) => {
                given_back.push(GiveBack { host: host.host.clone(), why });
                continue;
            }
        };
        left = left.less(more);
        places.push(place);
        reserves.push(more);
    }
    There { places, reserves, left, given_back }
}

/// The offers that can be had now, and at which a job that waits could run: with a known price, and not refused lately.
fn usable(snapshot: &Snapshot) -> impl Iterator<Item = &Offer> {
    let known = |offer: &&Offer| offer.price.per_hour_micros.is_some() && offer.cpus > 0;
    let predicted: BTreeSet<&String> =
        snapshot.jobs.iter().flat_map(|job| job.rented.keys()).collect();
    let takes_a_job = move |offer: &&Offer| {
        let has_kvm = offer.kvm == Some(true);
        predicted.contains(&offer.kind)
            && snapshot.jobs.iter().any(|job| {
                let has_room = job.cpus <= offer.cpus && job.memory_bytes <= offer.memory_bytes;
                let may_go = job.may_leave && (has_kvm || job.without_kvm);
                may_go && has_room && job.rented.contains_key(&offer.kind)
            })
    };
    let free = snapshot.offers.iter().filter(known).filter(|offer| !snapshot.is_refused(offer));
    free.filter(takes_a_job).take(OFFERS_MOST)
}

/// Whether what is left would not pay for the rented hosts and one more of the dearest kind until the period is over. Then the offer that
/// saves most for a dollar is better than the one that saves most.
fn is_tight(snapshot: &Snapshot, left: Money) -> bool {
    let Some(period) = snapshot.period else { return false };
    let per_hour = |price: &Price| price.per_hour_micros.map_or(0.0, |micros| micros.get() as f64);
    let rented = snapshot.hosts.iter().filter_map(|host| host.rented.as_ref());
    let rented: f64 = rented.map(|rented| per_hour(&rented.price)).sum();
    let dearest = usable(snapshot).map(|offer| per_hour(&offer.price)).fold(0.0, f64::max);
    (rented + dearest) * period.left_s / 3600.0 > drain::micros(left)
}

/// The offer that makes the queue's sum least, if one makes it less at all and fits what is left.
///
/// # Errors
/// Why none does, in words: that of the offer that comes nearest.
fn best_offer(
    snapshot: &Snapshot,
    drains: &Drains,
    places: &[Place],
    before: &Drained,
    left: Money,
) -> Result<(Rent, Place, Drained), String> {
    if let Some(why) = explain::nobody_waits(snapshot) {
        return Err(why);
    }
    let is_tight = is_tight(snapshot, left);
    let (mut best, mut nearest) = (None::<Gain>, None::<(f64, String)>);
    for offer in usable(snapshot) {
        match gain(snapshot, drains, (places, before), left, offer) {
            Ok(found) => {
                let score = |one: &Gain| if is_tight { one.for_a_dollar() } else { one.gain };
                if best.as_ref().is_none_or(|best| score(best) < score(&found)) {
                    best = Some(found);
                }
            }
            Err(not) if nearest.as_ref().is_none_or(|(gain, _)| *gain < not.0) => {
                nearest = Some(not);
            }
            Err(_) => {}
        }
    }
    let why = || nearest.map_or_else(|| explain::no_offers(snapshot), |(_, why)| why);
    best.map(|best| (best.rent, best.place, best.with)).ok_or_else(why)
}

/// An offer that makes the queue's sum less.
struct Gain {
    /// By so much, in millionths of a dollar.
    gain: f64,
    rent: Rent,
    place: Place,
    with: Drained,
}

impl Gain {
    fn for_a_dollar(&self) -> f64 {
        self.gain / drain::micros(self.rent.costs).max(1.0)
    }
}

/// What the queue gains by an offer.
///
/// # Errors
/// How much it would gain, and why the offer is not taken.
fn gain(
    snapshot: &Snapshot,
    drains: &Drains,
    (places, before): (&[Place], &Drained),
    left: Money,
    offer: &Offer,
) -> Result<Gain, (f64, String)> {
    let place = Place::of_offer(offer, snapshot);
    let all = [places, std::slice::from_ref(&place)].concat();
    let with = drains.best(&all, left);
    // For jobs that are only expected nothing is rented.
    let use_of = with.use_of(places.len()).filter(|use_of| !use_of.jobs.is_empty());
    let use_of = use_of.ok_or_else(|| {
        let with_more = drains.best(&all, Money::from_micros(u64::MAX)).use_of(places.len());
        let is_poor = with_more.is_some_and(|use_of| !use_of.jobs.is_empty());
        (f64::NEG_INFINITY, explain::no_job_goes(offer, is_poor.then_some(left)))
    })?;
    let start = drains.start(&offer.kind);
    let tail_s = idle::tail_s(&offer.price, start, use_of.waiting_per_hour);
    let no_price = || (f64::NEG_INFINITY, explain::no_offers(snapshot));
    let machine = idle::machine(&offer.price, use_of.ends_s + tail_s).ok_or_else(no_price)?;
    // The sums have the time of the new host until its last job ends; the rest of the machine's price is beside them.
    let beside = (drain::micros(machine) - use_of.counted).max(0.0);
    let gain = before.sum - with.sum - beside;
    let saves = drain::money(gain + drain::micros(machine));
    if gain <= 0.0 {
        return Err((gain, explain::too_dear(offer, saves, machine)));
    }
    let first_s = (use_of.first_high_s + start.high_s + AHEAD_S).max(UNHEARD_S);
    let held = idle::high(&offer.price, offer.spot, first_s).ok_or_else(no_price)?;
    let reserve = held.plus(use_of.first_egress);
    if reserve > left {
        return Err((gain, explain::over_budget(offer, saves, machine, reserve, left)));
    }
    let rent = Rent {
        why: explain::rent(offer, &use_of, saves, machine, reserve, left),
        offer: offer.clone(),
        reserve,
        reserved_s: first_s.max(f64::from(offer.price.minimum_s)),
        jobs: use_of.jobs.iter().map(|job| snapshot.jobs[*job].job.clone()).collect(),
        saves,
        costs: machine,
    };
    Ok(Gain { gain, rent, place, with })
}
