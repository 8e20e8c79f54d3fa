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
//! After a move the account starts at 0 again, and the next move must save [`AFTER_A_MOVE`] times its cost. The
//! time lost is never more than the time passed, so the VM stays at least that long. All moves of a job after
//! the first together cost at most half of what the job lost to the network.

use perigee_model::HostId;
use perigee_model::plan::{Basis, Plan, PlanOption, Seconds, Way};
use perigee_model::units::format_seconds;

use crate::copying::copy_cost;
use crate::facts::{DiskFacts, HostFacts, Running};
use crate::figures::Figures;
use crate::hosts::load_factor;
use crate::learn::Learned;
use crate::moving::{Dirty, MoveCost, move_cost_with};
use crate::network::{io_s, lost_s, not_computing_s, seconds};
use crate::refused::Refused;
use crate::spread::Spread;
use crate::work::VolumeWork;

/// How many times its cost a move must save if the VM was moved before.
pub const AFTER_A_MOVE: f64 = 2.0;

/// How much a prediction of the remaining work counts; with 1 it would not count at all.
pub const TRUST: f64 = 0.5;

/// In 9 of 10 cases the remaining work differs from the prediction by at most this share.
const LEFT_ERROR: f64 = 0.24;
/// The same if only the command's own progress predicts it.
const PROGRESS_ERROR: (f64, f64) = (0.5, 2.0);
/// Less progress than this is not used for predictions.
const PROGRESS_LEAST: f64 = 0.05;

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
        /// The cost of the best move; `None` if no host is better.
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
        /// How long the migration or the copy takes.
        total_s: f64,
        /// All ways for the rest of the job; the move is chosen.
        plan: Plan,
    },
}

/// A change with which the job would have lost less.
struct Better<'a> {
    way: Way,
    to: &'a HostId,
    lost_there_s: f64,
    saved_s: f64,
    cost: MoveCost,
    /// The predicted loss until the job's end if the VM stays; `None` if it is not known.
    to_lose: Option<Spread>,
}

/// The loss at which the VM moves; see the module's documentation.
pub(crate) fn moves_at_s(price_s: f64, to_lose: Option<Spread>) -> f64 {
    match to_lose {
        Some(left) if left.low() >= price_s => price_s * TRUST,
        Some(left) if left.high() < price_s => price_s / TRUST,
        _ => price_s,
    }
}

/// Decides from the measurements since the VM came to its host. The caller repeats this while the job runs; the
/// decision is late by up to the time between two calls.
pub fn consider(running: &Running) -> Verdict {
    let lost_s = lost_s(&running.disks, running.wall_s, running.vcpu_s, running.cpus);
    let stay = |reason: String, cost_s| Verdict::Stay { reason, lost_s, cost_s };
    if !running.may_migrate {
        return stay("the job file says that it may not move".to_owned(), None);
    }
    let (best, other) = match best_changes(running, lost_s) {
        Ok((Some(best), other)) => (best, other),
        Ok((None, _)) => return stay("no host with room would lose less".to_owned(), None),
        Err(why) => return stay(format!("no move can be planned: {why}"), None),
    };
    let factor = if running.moves == 0 { 1.0 } else { AFTER_A_MOVE };
    let needed_s = moves_at_s(best.cost.job_s * factor, best.to_lose);
    let account = account(running, lost_s, &best);
    if best.saved_s < needed_s {
        let reason = if running.moves == 0 {
            account
        } else {
            format!("{account}; after a move the next must save {AFTER_A_MOVE:.0} times its cost")
        };
        return stay(reason, Some(best.cost.job_s));
    }
    let plan = plan(running, lost_s, &best, other.as_ref(), &account);
    let total_s = best.cost.total_s;
    Verdict::Move { way: best.way, to: best.to.clone(), reason: account, total_s, plan }
}

fn account(running: &Running, lost_s: f64, best: &Better) -> String {
    let to_lose = best.to_lose.map_or_else(String::new, |left| {
        format!("; {} more would be lost until its end", left.estimate())
    });
    let (lost, wall) = (format_seconds(lost_s), format_seconds(running.wall_s));
    let (there, cost) = (format_seconds(best.lost_there_s), format_seconds(best.cost.job_s));
    let (host, to) = (&running.host, best.to);
    let change = if best.way == Way::Copy {
        format!("{there} would have been with its data here; copying them costs {cost}")
    } else {
        format!("{there} would have been at {to}; moving there costs {cost}")
    };
    format!("{lost} of {wall} lost to the network at {host}, {change}{to_lose}")
}

/// The move or the copy with the larger saving after its cost, and then the other one. An error only if the
/// prediction failed for every host and nothing can be copied.
fn best_changes(
    running: &Running,
    lost_s: f64,
) -> Result<(Option<Better<'_>>, Option<Better<'_>>), Refused> {
    let (cluster, traits) = (&running.cluster, &running.traits);
    let learned = Learned::from_history(cluster, traits, &running.history, &mut Figures::default());
    let copy = copied(running, lost_s, learned.as_ref());
    match (best_place(running, lost_s, learned.as_ref()), copy) {
        (Ok(Some(place)), Some(copy)) if surplus_s(&copy) > surplus_s(&place) => {
            Ok((Some(copy), Some(place)))
        }
        (Ok(None) | Err(_), Some(copy)) => Ok((Some(copy), None)),
        (place, copy) => Ok((place?, copy)),
    }
}

/// The data volumes come to the VM's host. `None` if one of them can't, or if none is elsewhere.
fn copied<'a>(running: &'a Running, lost_s: f64, learned: Option<&Learned>) -> Option<Better<'a>> {
    let (cluster, to) = (&running.cluster, &running.host);
    let far = running.disks.iter().filter(|disk| disk.home != *to);
    let volumes: Vec<(&HostId, u64)> =
        far.map(|disk| Some((&disk.home, disk.copy_bytes?))).collect::<Option<_>>()?;
    if volumes.is_empty() || lost_s == 0.0 {
        return None;
    }
    let cost = copy_cost(cluster, to, &volumes).ok()?;
    let here = cluster.host(to).ok()?;
    let local = vec![to; running.disks.len()];
    let by_history = learned.and_then(|learned| to_lose(running, here, &local, learned));
    let to_lose = by_history.or_else(|| to_lose_by_progress(running, lost_s));
    Some(Better { way: Way::Copy, to, lost_there_s: 0.0, saved_s: lost_s, cost, to_lose })
}

/// The host with the largest saving after the cost of the move. An error only if the prediction failed for
/// every host.
fn best_place<'a>(
    running: &'a Running,
    lost_s: f64,
    learned: Option<&Learned>,
) -> Result<Option<Better<'a>>, Refused> {
    let mut best: Option<Better> = None;
    let mut refused = None;
    for host in &running.cluster.hosts {
        if host.id == running.host || host.memory_free_bytes < running.memory_bytes {
            continue;
        }
        match place(running, lost_s, host, learned) {
            Ok(place) if place.lost_there_s > lost_s * CLEARLY_LESS || lost_s == 0.0 => {}
            Ok(place) if best.as_ref().is_none_or(|b| surplus_s(&place) > surplus_s(b)) => {
                best = Some(place);
            }
            Ok(_) => {}
            Err(why) => refused = Some(why),
        }
    }
    match (best, refused) {
        (None, Some(why)) => Err(why),
        (best, _) => Ok(best),
    }
}

fn surplus_s(place: &Better) -> f64 {
    place.saved_s - place.cost.job_s
}

fn place<'a>(
    running: &'a Running,
    lost_s: f64,
    host: &'a HostFacts,
    learned: Option<&Learned>,
) -> Result<Better<'a>, Refused> {
    let to = &host.id;
    let mut figures = Figures::default();
    let here_s = network_s(running, &running.host, &mut figures)?;
    let there_s = network_s(running, to, &mut figures)?;
    let bound_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    let lost_there_s =
        if here_s > 0.0 { (lost_s * there_s / here_s).min(bound_s) } else { bound_s };
    let data_bytes = running.disks.iter().map(data_bytes).sum();
    let dirty = Dirty::new(running.dirty_bytes_per_s, data_bytes, running.wall_s);
    let (cluster, from) = (&running.cluster, &running.host);
    let mut cost = move_cost_with(cluster, from, to, running.memory_bytes, dirty)?;
    for figure in figures.into_vec() {
        if !cost.figures.contains(&figure) {
            cost.figures.push(figure);
        }
    }
    let saved_s = lost_s - lost_there_s - slower_s(running, host)?;
    let homes: Vec<&HostId> = running.disks.iter().map(|disk| &disk.home).collect();
    let by_history = learned.and_then(|learned| to_lose(running, host, &homes, learned));
    let to_lose = by_history.or_else(|| to_lose_by_progress(running, saved_s));
    Ok(Better { way: Way::Migrate, to, lost_there_s, saved_s, cost, to_lose })
}

/// How much longer the computing since the arrival would have taken at the other host, beside the VMs that run
/// there.
fn slower_s(running: &Running, there: &HostFacts) -> Result<f64, Refused> {
    let here = running.cluster.host(&running.host)?;
    let there = load_factor(there, there.running_vms.saturating_add(1)).expected;
    let ratio = there / load_factor(here, here.running_vms).expected;
    let waiting_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    Ok(((running.wall_s - waiting_s) * (ratio - 1.0)).max(0.0))
}

/// The time that will be lost here and not there until the job's end, predicted from earlier runs: the loss of
/// a whole run, times the share of its requests that are still to come. If the command reports its progress,
/// the range covers both shares.
fn to_lose(
    running: &Running,
    there: &HostFacts,
    homes_then: &[&HostId],
    learned: &Learned,
) -> Option<Spread> {
    let cluster = &running.cluster;
    let homes: Vec<&HostId> = running.disks.iter().map(|disk| &disk.home).collect();
    let place =
        |host, homes: &[&HostId]| learned.place(cluster, host, homes, &mut Figures::default()).ok();
    let here = place(cluster.host(&running.host).ok()?, &homes)?;
    let whole = learned.network_longer(&here, &place(there, homes_then)?);
    let by_requests = 1.0 - (running.requests / learned.requests.max(1.0)).min(1.0);
    let by_progress = running.progress.map(|progress| (1.0 - progress).clamp(0.0, 1.0));
    let other = by_progress.unwrap_or(by_requests);
    let left = Spread::between(by_requests.min(other), by_requests, by_requests.max(other))
        .plus(Spread::noise(LEFT_ERROR * by_requests));
    Some(whole.by(left).at_least(0.0))
}

/// The same for a job without history: the remaining work costs as much as the work so far.
fn to_lose_by_progress(running: &Running, saved_s: f64) -> Option<Spread> {
    let progress = running.progress?;
    let here = progress - running.progress_at_arrival;
    if here < PROGRESS_LEAST {
        return None;
    }
    let expected = (saved_s * (1.0 - progress) / here).max(0.0);
    let (low, high) = PROGRESS_ERROR;
    Some(Spread::between(expected * low, expected, expected * high))
}

/// The time that the network should add to this job's I/O at a host, according to the probes. Only the ratio of
/// two hosts is used, so an error that the probes make at both has no effect.
fn network_s(running: &Running, at: &HostId, figures: &mut Figures) -> Result<f64, Refused> {
    let mut total_s = 0.0;
    for disk in &running.disks {
        let work = VolumeWork::learn(disk);
        total_s += io_s(&running.cluster, at, &disk.home, &work, figures)? - work.home_s();
    }
    Ok(total_s.max(0.0))
}

fn data_bytes(disk: &DiskFacts) -> f64 {
    (disk.client.read_bytes + disk.client.write_bytes) as f64
}

/// All ways for the rest of the job. The rest is taken to be like the work so far.
fn plan(
    running: &Running,
    lost_s: f64,
    best: &Better,
    other: Option<&Better>,
    account: &str,
) -> Plan {
    let waiting_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    let busy_s: f64 = running.disks.iter().map(|d| seconds(d.client.busy_ns)).sum();
    let local_io_s = (busy_s.min(waiting_s) - lost_s).max(0.0);
    let stay = Seconds {
        cpu_s: running.wall_s - waiting_s,
        local_io_s,
        network_s: lost_s,
        other_s: waiting_s - lost_s - local_io_s,
        ..Seconds::default()
    };
    let changed = |better: &Better| {
        let (network_s, migration_s) = (better.lost_there_s, better.cost.job_s);
        Seconds { network_s, migration_s, ..stay }.added_up()
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
    };
    let mut figures = vec!["assumed: as much work is left as was done here".to_owned()];
    figures.extend(best.cost.figures.iter().cloned());
    let saved = format!("would lose {} more", format_seconds(best.saved_s));
    let mut options =
        vec![option(best.way, best.to.clone(), changed(best), true, account.to_owned())];
    if let Some(other) = other {
        let less = format_seconds(surplus_s(best) - surplus_s(other));
        let why = format!("would save {less} less, after its cost");
        options.push(option(other.way, other.to.clone(), changed(other), false, why));
    }
    options.push(option(Way::Remote, start.clone(), stay, false, saved));
    Plan { basis: Basis::Running, options, figures, moves: true }
}

#[cfg(test)]
mod tests;
