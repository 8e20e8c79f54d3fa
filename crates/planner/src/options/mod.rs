//! The ways to run a job that has not started, with their predicted times.

use perigee_model::plan::{Basis, Estimate, Part, Plan, PlanOption, Seconds, Way};
use perigee_model::units::format_seconds;
use perigee_model::{HostId, VolumeName};

use crate::facts::{MoneyFacts, Snapshot};
use crate::figures::Figures;
use crate::learn::{Learned, Place};
use crate::refused::Refused;
use crate::spread::Spread;
use alike::ALL_UP_TO;
use stays::{Stay, stays};

/// Compares the ways to run a job, and chooses the one that is predicted to end first, unless the job's file says something of money (`cost.rs`).
///
/// Each [`Way`] is predicted for its best hosts; in a large cluster only the best of hosts that are alike for the job are looked at
/// closely (`alike.rs`). Ways that are not possible come last, with the reason (migration
/// is not allowed, the job may not start at the data, or others use its volume). `migrate`, `follow` and `copy`
/// keep to the rule of [`crate::consider`]: the VM runs remotely until the time that the change would have saved
/// reaches a threshold. This time is lost before it.
///
/// # Errors
/// [`Refused`] if no host has room, a volume's home is not up, or a link is not measured.
pub fn plan(snapshot: &Snapshot) -> Result<Plan, Refused> {
    match &snapshot.job.gang {
        Some(gang) => gang::plan(snapshot, gang),
        None => plan_looking_at(snapshot, ALL_UP_TO),
    }
}

/// The homes of all data are up.
fn homes_are_up(snapshot: &Snapshot) -> Result<(), Refused> {
    for volume in &snapshot.job.volumes {
        if snapshot.cluster.host(&volume.home).is_err() {
            let (volume, home) = (volume.volume.clone(), volume.home.clone());
            return Err(Refused::HomeNotUp { volume, home });
        }
    }
    Ok(())
}

/// The same, with a close look at every host if there are at most so many.
fn plan_looking_at(snapshot: &Snapshot, all_up_to: usize) -> Result<Plan, Refused> {
    let mut figures = Figures::default();
    homes_are_up(snapshot)?;
    let learned = Learned::of(snapshot, &mut figures)?;
    let stays = stays(snapshot, &learned, all_up_to, &mut figures)?;
    let mut candidates: Vec<Candidate> = [Way::Beside, Way::Replica, Way::Remote]
        .into_iter()
        .flat_map(|way| best_stays(&stays, way))
        .collect();
    candidates.extend(changes::best_moves(snapshot, &learned, &stays, &mut figures));
    candidates.extend(changes::best_copies(snapshot, &learned, &stays, &mut figures));
    let default_start = stays.iter().find(|s| s.refused.is_none()).map(|s| s.host.clone());
    let (cluster, job) = (&snapshot.cluster, &snapshot.job);
    let bill = |candidate: &Candidate| cost::bill((cluster, job), &learned, candidate);
    cost::decide(&mut candidates, (cluster, &job.money), &bill, &mut figures);
    let apart = |one: &Candidate, other: &Candidate| learned.longer(&one.place, &other.place);
    Ok(choose(candidates, (learned.basis, &job.money), &apart, (default_start, figures)))
}

#[derive(Clone)]
struct Candidate {
    option: PlanOption,
    /// Why it is not possible.
    impossible: Option<String>,
    /// That is for want of money alone.
    over_budget: bool,
    /// As in [`Stay`], of the host where it starts.
    replica_not_used: String,
    busy: String,
    rtt_ms: f64,
    place: Place,
    boot: Spread,
    migration: Spread,
    /// The VM moves, or its data come; `None` if nothing changes.
    change: Option<cost::Changed>,
    /// Of a gang: each of its VMs alone. `place` is that of the slowest one.
    ranks: Vec<Candidate>,
    /// The rank that decides.
    slowest: usize,
    /// What its VMs send to each other from there.
    talk: Spread,
    /// Of a VM of a gang whose data come to it: clones that come to its host with those of other VMs, and ship nothing more.
    come_with_others: Vec<VolumeName>,
}

/// How much longer a command takes at one candidate's place than at another's; what both have in common cancels out.
type Apart<'a> = &'a dyn Fn(&Candidate, &Candidate) -> Spread;

impl Candidate {
    fn new(way: Way, start: &Stay, end: &HostId) -> Self {
        let option = PlanOption {
            way,
            start: start.host.clone(),
            end: end.clone(),
            predicted: start.seconds,
            total: start.total.estimate(),
            shipped_bytes: Some(whole_bytes(start.place.sent_bytes)),
            unknown: start.unknown.clone(),
            longer: None,
            chosen: false,
            reason: String::new(),
            cost: None,
            hosts: Vec::new(),
            end_hosts: Vec::new(),
        };
        let (place, boot, rtt_ms) = (start.place, start.boot, start.rtt_ms);
        let (replica_not_used, busy) = (start.replica_not_used.clone(), start.busy.clone());
        let migration = Spread::default();
        let (impossible, over_budget, change) = (None, false, None);
        Self {
            option,
            impossible,
            over_budget,
            replica_not_used,
            busy,
            rtt_ms,
            place,
            boot,
            migration,
            change,
            ranks: Vec::new(),
            slowest: 0,
            talk: Spread::default(),
            come_with_others: Vec::new(),
        }
    }

    /// How much longer it takes than another; the parts that both have cancel out.
    fn longer(&self, other: &Self, apart: Apart) -> Spread {
        let mut apart = apart(self, other);
        let (this, that) = (&self.option, &other.option);
        if this.start != that.start || this.hosts != that.hosts {
            apart = apart.plus(self.boot).plus(other.boot.times(-1.0));
        }
        let apart = apart.plus(self.migration).plus(other.migration.times(-1.0));
        let expected = self.option.predicted.total_s - other.option.predicted.total_s;
        Spread { expected, ..apart }
    }
}

/// The fastest host to stay at of each price. Of equally fast hosts it is the first, which is the least busy; at a site that packs, of those
/// that are almost as fast.
fn best_stays(stays: &[Stay], way: Way) -> Vec<Candidate> {
    let mut prices: Vec<usize> = Vec::new();
    for stay in stays {
        add_new(&mut prices, stay.price);
    }
    prices.into_iter().filter_map(|price| best_stay(stays, way, price)).collect()
}

/// Adds what is not there, and says whether it was new.
fn add_new<T: PartialEq>(all: &mut Vec<T>, one: T) -> bool {
    let is_new = !all.contains(&one);
    if is_new {
        all.push(one);
    }
    is_new
}

fn best_stay(stays: &[Stay], way: Way, price: usize) -> Option<Candidate> {
    let of_way = stays.iter().filter(|s| s.way == way && s.price == price);
    let best = of_way.min_by(|a, b| {
        let (a_is_last, b_is_last) = (a.refused.is_some(), b.refused.is_some());
        a_is_last.cmp(&b_is_last).then(a.seconds.total_s.total_cmp(&b.seconds.total_s))
    })?;
    let best = packing::fullest_as_fast(stays, best);
    let mut candidate = Candidate::new(way, best, &best.host);
    candidate.impossible.clone_from(&best.refused);
    Some(candidate)
}

/// The plan with the candidates in this order. The first one is chosen, if it is possible.
fn choose(
    mut candidates: Vec<Candidate>,
    (basis, money): (Basis, &MoneyFacts),
    apart: Apart,
    (default_start, figures): (Option<HostId>, Figures),
) -> Plan {
    let with_its_host = |index: usize| {
        let Candidate { replica_not_used, busy, .. } = &candidates[index];
        let said = [&reason(&candidates, index, money), replica_not_used, busy];
        let said = said.into_iter().filter(|text| !text.is_empty()).map(String::as_str);
        said.collect::<Vec<_>>().join("; ")
    };
    let reasons: Vec<String> = (0..candidates.len()).map(with_its_host).collect();
    let longer: Vec<Estimate> =
        candidates.iter().map(|c| c.longer(&candidates[0], apart).estimate()).collect();
    for (index, (candidate, reason)) in candidates.iter_mut().zip(reasons).enumerate() {
        candidate.option.reason = reason;
        // What is not possible takes no time.
        let is_other = index > 0 && candidate.impossible.is_none();
        candidate.option.longer = is_other.then_some(longer[index]);
    }
    let is_possible = candidates.first().is_some_and(|first| first.impossible.is_none());
    let mut options: Vec<PlanOption> = candidates.into_iter().map(|c| c.option).collect();
    let mut moves = false;
    if let Some(best) = options.first_mut().filter(|_| is_possible) {
        best.chosen = true;
        moves = match best.way {
            Way::Migrate | Way::Follow | Way::Copy => true,
            Way::Beside | Way::Replica => default_start.is_some_and(|start| start != best.start),
            Way::Remote => false,
        };
    }
    Plan { basis, options, figures: figures.into_vec(), moves }
}

/// Why the first way is chosen, or why another one is not.
fn reason(candidates: &[Candidate], index: usize, money: &MoneyFacts) -> String {
    let this = &candidates[index];
    if let Some(why) = &this.impossible {
        return format!("not possible: {why}");
    }
    let best = &candidates[0].option.predicted;
    let predicted = &this.option.predicted;
    if index > 0 {
        let longer_s = predicted.total_s - best.total_s;
        let word = if longer_s < 0.0 { "sooner" } else { "longer" };
        let (longer, chosen) = (format_seconds(longer_s.abs()), &candidates[0].option);
        let more = cost::beside(chosen, &this.option);
        return format!("{longer} {word} than {}{more}", way_name(chosen.way));
    }
    if let Some(why) = cost::why_chosen(candidates, money) {
        return why;
    }
    let total = format_seconds(predicted.total_s);
    let Some(other) = other_way(candidates) else {
        return format!("{total}; it is the only way");
    };
    let other_s = &other.option.predicted;
    let less_s = other_s.network_s - predicted.network_s;
    let waiting = format!(
        "{} less waiting for the {:.1} ms link",
        format_seconds(less_s.max(0.0)),
        this.rtt_ms.max(other.rtt_ms)
    );
    let why = if predicted.migration_s > 0.0 {
        let what = if this.option.way == Way::Copy { "copy" } else { "move" };
        format!("{waiting} costs {} to {what}", format_seconds(predicted.migration_s))
    } else if other_s.migration_s > 0.0 && matches!(this.option.way, Way::Remote | Way::Replica) {
        let (cost, saved) = (other_s.migration_s, (-less_s).max(0.0));
        let what = if other.option.way == Way::Copy { "copy" } else { "move" };
        format!("a {what} costs {} and saves {}", format_seconds(cost), format_seconds(saved))
    } else {
        not_the_network(predicted, other_s).unwrap_or(waiting)
    };
    let other_total = format_seconds(other_s.total_s);
    format!("{total} instead of {other_total} {}: {why}", way_name(other.option.way))
}

/// What makes most of the difference between two ways, if that is not the network.
fn not_the_network(this: &Seconds, other: &Seconds) -> Option<String> {
    let less_s = |part: Part| other.of(part) - this.of(part);
    let most = Part::ALL.into_iter().max_by(|a, b| less_s(*a).total_cmp(&less_s(*b)))?;
    let what = match most {
        Part::Boot => "booting",
        Part::Cpu => "computing",
        Part::LocalIo => "local I/O",
        Part::Other => "other waiting",
        Part::Migration => "moving",
        Part::Network => return None,
    };
    // Less is shown as nothing.
    (less_s(most) >= 0.01).then(|| format!("{} less {what}", format_seconds(less_s(most))))
}

/// With which one the best way is compared: a change with staying, and staying with the next way. `follow` is
/// nearly the same as `migrate`.
fn other_way(candidates: &[Candidate]) -> Option<&Candidate> {
    let is_change = |c: &&Candidate| c.option.predicted.migration_s > 0.0;
    let possible = || {
        let others = candidates.iter().skip(1).filter(|c| c.impossible.is_none());
        others.filter(|c| c.option.way != Way::Follow)
    };
    let stays = possible().find(|c| !is_change(c));
    candidates.first().filter(is_change).and(stays).or_else(|| possible().next())
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn whole_bytes(bytes: f64) -> u64 {
    bytes as u64
}

pub(crate) fn way_name(way: Way) -> &'static str {
    match way {
        Way::Remote => "remote",
        Way::Migrate => "migrate",
        Way::Follow => "follow",
        Way::Copy => "copy",
        Way::Replica => "replica",
        Way::Beside => "beside",
    }
}

pub(crate) use changes::CONFINED;
pub(crate) use cost::{Trade, best_trades, why_over};

mod alike;
mod changes;
mod cost;
mod gang;
mod packing;
mod stays;

#[cfg(test)]
mod many_hosts;
#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
