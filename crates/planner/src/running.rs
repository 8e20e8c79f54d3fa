//! Decides whether a running VM moves now.
//!
//! The remaining work of a job is unknown, so this is the ski-rental problem: rent until the paid rent equals
//! the price, then buy. Here, the VM stays until the time lost to the network, which the other host would have
//! saved, equals the price of the move. The price is the time that the job loses by its pause and its slower
//! work meanwhile, not how long the move takes. Whenever the job ends, it has then lost at most twice as much
//! as the best choice in hindsight (Karlin, Manasse, Rudolph, Sleator: Competitive snoopy caching, Algorithmica
//! 1988; no deterministic rule does better).
//!
//! History and progress often predict the remaining work. If the whole range of the predicted loss is above the
//! price, the VM moves when [`TRUST`] times the price is lost. If the whole range is below the price, it moves
//! only when the price divided by [`TRUST`] is lost. Otherwise it moves at the price (Purohit, Svitkina, Kumar:
//! Improving online algorithms via ML predictions, NeurIPS 2018). With a price `p` and trust `t`, the loss
//! relative to the best choice in hindsight is
//!
//! ```text
//! the prediction is right:           at most 1 + t         = 1.5 times
//! there is none, or it is undecided: at most 2 times
//! the prediction is wrong:           at most 1 + 1 / t     = 3 times
//! ```
//!
//! The last line also holds for predictions that change at every call, because the threshold is always between
//! `t p` and `p / t`.
//!
//! If the earlier runs of this very job are sure, the change is made at once (`running/sure.rs`). A right history then
//! loses no more than the best choice. A wrong one loses at most one price more in this run, and over all runs of the
//! job such changes cost at most `1 / SURE_RUNS`, a half, of what the best choices cost. So all runs of a job together
//! lose at most `1 + 1 / t + 1 / SURE_RUNS` = 3.5 times the best. The worst that an adversary reached is 2.4 times: it
//! ends each run that was moved at once.
//!
//! What waiting for a CPU that others had has cost counts as what the network has cost, where both hosts' load is measured: a job
//! that starves beside its data leaves them when what it has lost by that, and would not have lost at the other host, reaches the
//! price.
//!
//! The price has the wait for moves that are under way over the same link, because the gain comes after it.
//!
//! The same holds for a copy of the data to the VM's host. Of both changes the one that saves more is made. One that
//! was refused is not made for a while, and the other one may be.
//!
//! After a change the account starts at 0 again, and the next one must save more than its cost: each change doubles the price of the next
//! one, and that surcharge goes with time ([`Running::price_factor`], the same as for VMs that leave overloaded hosts, `balance`). The
//! time lost is never more than the time passed, so the VM stays at least that long.

use std::cmp::Ordering;

use perigee_model::HostId;
use perigee_model::plan::{Basis, Plan, PlanOption, Seconds, Way};
use perigee_model::units::format_seconds;

use crate::cpu_load::why_busy;
use crate::facts::Running;
use crate::figures::Figures;
use crate::learn::Learned;
use crate::network::{lost_s, not_computing_s, seconds};
use crate::options::way_name;
use crate::refused::Refused;
use crate::spread::Spread;

use changes::{Better, CpuWait};
pub(crate) use changes::{coming, of_host, price_s, reading_so_far, why_it_may_not_come};
pub(crate) use left::all_left;
pub use left::predicted_end;
use left::without_it;
pub use sure::SURE_RUNS;
pub(crate) use sure::Saving;

mod changes;
mod left;
mod sure;

/// Why a job without `move: auto` is left where it is.
pub(crate) const MAY_NOT_MOVE: &str = "the job file says that it may not move";

/// A smaller surcharge is not said.
const TOLD_FACTOR: f64 = 1.05;

/// How much a prediction of the remaining work counts; with 1 it would not count at all.
pub const TRUST: f64 = 0.5;

/// A host counts as better if the job would lose at most this share of what it loses here. Probes of two equal
/// links differ a little, and that is no reason to move.
const CLEARLY_LESS: f64 = 0.8;

/// What a running VM does now.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// It stays where it is.
    Stay {
        /// Why, in plain words.
        reason: String,
        /// The time lost to the network since the VM came to this host.
        lost_s: f64,
        /// The cost of the best change; `None` if none is better and possible.
        cost_s: Option<f64>,
    },
    /// The VM moves now, or its data.
    Move {
        /// [`Way::Migrate`], or [`Way::Copy`]: its data volumes come to its host.
        way: Way,
        /// The host with the largest saving after the cost of the move; for a copy the VM's own.
        to: HostId,
        /// The time lost and the cost of the move, in plain words.
        reason: String,
        /// All ways for the rest of the job; the move is chosen.
        plan: Plan,
    },
}

/// The loss at which the VM moves; see the module's documentation.
pub(crate) fn moves_at_s(price_s: f64, to_lose: Option<Spread>) -> f64 {
    match to_lose {
        Some(left) if left.low() >= price_s => price_s * TRUST,
        Some(left) if left.high() < price_s => price_s / TRUST,
        _ => price_s,
    }
}

/// Why it stays, with the factor that its earlier moves have left.
pub(crate) fn with_surcharge(account: String, factor: f64) -> String {
    if factor < TOLD_FACTOR {
        return account;
    }
    format!("{account}; after its last moves it must save {factor:.1} times that")
}

/// Whether the time that the network adds there is so much less that the difference is not only noise.
pub(crate) fn is_clearly_less(there_s: f64, here_s: f64) -> bool {
    here_s > 0.0 && there_s <= here_s * CLEARLY_LESS
}

/// Decides from the measurements since the VM came to its host. The caller repeats this while the job runs; the
/// decision is late by up to the time between two calls.
pub fn consider(running: &Running) -> Verdict {
    let lost_s = lost_s(&running.disks, running.wall_s, running.vcpu_s, running.cpus);
    let stay = |reason: String, cost_s| Verdict::Stay { reason, lost_s, cost_s };
    if !running.may_migrate {
        return stay(MAY_NOT_MOVE.to_owned(), None);
    }
    let (cluster, traits) = (&running.cluster, &running.traits);
    let learned = Learned::from_history(cluster, traits, &running.history, &mut Figures::default());
    let learned = learned.as_ref();
    if let Some(change) = learned.and_then(|learned| sure::at_once(running, lost_s, learned)) {
        return change;
    }
    let changes = match best_first(running, lost_s, learned) {
        Ok(changes) => changes,
        Err(why) => return stay(format!("no move can be planned: {why}"), None),
    };
    let Some(best) = changes.first().filter(|change| change.impossible.is_none()) else {
        return stay(why_none(&changes), None);
    };
    let factor = running.price_factor.max(1.0);
    let needed_s = moves_at_s(best.price_s * factor, best.to_lose);
    let account = account(running, lost_s, best);
    if best.saved_s < needed_s {
        return stay(with_surcharge(account, factor), Some(best.price_s));
    }
    let plan = plan(running, lost_s, best, &changes[1..], &account);
    Verdict::Move { way: best.way, to: best.to.clone(), reason: account, plan }
}

/// The best move and the copy, the better one first; one that is not possible comes last. An error only if the
/// prediction failed for every host and nothing can be copied.
fn best_first<'a>(
    running: &'a Running,
    lost_s: f64,
    learned: Option<&Learned>,
) -> Result<Vec<Better<'a>>, Refused> {
    let (place, copy) = changes::best(running, lost_s, learned);
    let can_copy = copy.as_ref().is_some_and(|copy| copy.impossible.is_none());
    let place = match place {
        Err(why) if !can_copy => return Err(why),
        place => place.unwrap_or_default(),
    };
    let mut changes: Vec<Better> = place.into_iter().chain(copy).collect();
    // The sort is stable: of equally good ones the move is made.
    changes.sort_by(|a, b| b.rank().partial_cmp(&a.rank()).unwrap_or(Ordering::Equal));
    Ok(changes)
}

fn why_none(changes: &[Better]) -> String {
    let mut why = Vec::new();
    if changes.iter().all(|change| change.way != Way::Migrate) {
        why.push("no host with room would lose less".to_owned());
    }
    for change in changes {
        let impossible = change.impossible.as_deref().unwrap_or_default();
        why.push(format!("{} is not possible: {impossible}", way_name(change.way)));
    }
    why.join("; ")
}

/// Less of the wall time is not said.
const WAIT_TOLD: f64 = 0.01;

/// What was lost here and would have been there, with the wait for a CPU where that counts.
fn losses(running: &Running, lost_s: f64, best: &Better) -> (String, String) {
    let (lost, wall) = (format_seconds(lost_s), format_seconds(running.wall_s));
    let (host, there) = (&running.host, format_seconds(best.lost_there_s));
    let told = |wait: &CpuWait| wait.here_s.max(wait.there_s) >= running.wall_s * WAIT_TOLD;
    let Some(wait) = best.cpu_wait.filter(told) else {
        return (format!("{lost} of {wall} lost to the network at {host}"), there);
    };
    let [waited, waits_there] = [wait.here_s, wait.there_s].map(format_seconds);
    let here = running.cluster.host(host).ok();
    let busy = here.map(|here| why_busy(&without_it(running, here), running.cpus));
    let busy = busy.filter(|_| wait.here_s > wait.there_s).unwrap_or_default();
    let busy = if busy.is_empty() { busy } else { format!(" ({busy})") };
    if lost_s <= 0.0 && best.lost_there_s <= 0.0 {
        return (format!("{waited} of {wall} waited for a CPU at {host}{busy}"), waits_there);
    }
    let here = format!(
        "{lost} of {wall} lost to the network at {host} and {waited} waited for a CPU there{busy}"
    );
    (here, format!("{there} and {waits_there}"))
}

fn account(running: &Running, lost_s: f64, best: &Better) -> String {
    let to_lose = best.to_lose.map_or_else(String::new, |left| {
        format!("; {} more would be lost until its end", left.estimate())
    });
    let (lost, there) = losses(running, lost_s, best);
    let (to, cost) = (best.to, format_seconds(best.price_s));
    let change = if best.way == Way::Copy {
        format!("{there} would have been with its data here; copying them costs {cost}")
    } else {
        format!("{there} would have been at {to}; moving there costs {cost}")
    };
    format!("{lost}, {change}{to_lose}")
}

/// All ways for the rest of the job. The rest is taken to be like the work so far.
fn plan(running: &Running, lost_s: f64, best: &Better, others: &[Better], account: &str) -> Plan {
    let not_computing_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    // A wait for a CPU makes the computing longer.
    let cpu_wait_s = best.cpu_wait.map_or(0.0, |wait| wait.here_s);
    let waiting_s = not_computing_s - cpu_wait_s;
    let busy_s: f64 = running.disks.iter().map(|d| seconds(d.client.busy_ns)).sum();
    let local_io_s = (busy_s.min(waiting_s) - lost_s).max(0.0);
    let stay = Seconds {
        cpu_s: running.wall_s - waiting_s,
        local_io_s,
        network_s: lost_s,
        other_s: (waiting_s - lost_s - local_io_s).max(0.0),
        ..Seconds::default()
    };
    let changed = |better: &Better| {
        let (network_s, migration_s) = (better.lost_there_s, better.price_s);
        let there = better.cpu_wait.filter(|_| best.cpu_wait.is_some());
        let cpu_s = stay.cpu_s + there.map_or(0.0, |wait| wait.there_s - wait.here_s);
        Seconds { cpu_s, network_s, migration_s, ..stay }.added_up()
    };
    let stay = stay.added_up();
    let start = running.host.clone();
    let option = |way, end, predicted: Seconds, chosen: bool, reason| PlanOption {
        way,
        start: start.clone(),
        end,
        predicted,
        total: Spread::between(0.0, predicted.total_s, 2.0 * predicted.total_s).estimate(),
        shipped_bytes: None,
        unknown: Vec::new(),
        longer: None,
        chosen,
        reason,
        cost: None,
        hosts: Vec::new(),
        end_hosts: Vec::new(),
    };
    let mut figures = vec!["assumed: as much work is left as was done here".to_owned()];
    figures.extend(best.cost.figures.iter().cloned());
    let mut options =
        vec![option(best.way, best.to.clone(), changed(best), true, account.to_owned())];
    let other = |other: &Better| {
        let less = format_seconds(best.surplus_s() - other.surplus_s());
        let why = match &other.impossible {
            Some(why) => format!("not possible: {why}"),
            None => format!("would save {less} less, after its cost"),
        };
        option(other.way, other.to.clone(), changed(other), false, why)
    };
    let (possible, impossible): (Vec<&Better>, Vec<&Better>) =
        others.iter().partition(|other| other.impossible.is_none());
    options.extend(possible.into_iter().map(other));
    let saved = format!("would lose {} more", format_seconds(best.saved_s));
    options.push(option(Way::Remote, start.clone(), stay, false, saved));
    options.extend(impossible.into_iter().map(other));
    Plan { basis: Basis::Running, options, figures, moves: true }
}

#[cfg(test)]
mod tests;
