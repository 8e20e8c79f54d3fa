//! Whether a running VM moves now.
//!
//! The remaining work of a job is unknown, so the rule is the one for renting or buying skis: pay
//! by the day until what was paid equals the price, then buy. Here: stay until the time lost to
//! the network, that the other place would have saved, equals the predicted cost of the move.
//! Whenever the job ends, it then has lost at most twice what the best choice in hindsight would
//! have (Karlin, Manasse, Rudolph, Sleator: Competitive snoopy caching, Algorithmica 1988; no
//! deterministic rule does better).
//!
//! After a move the account starts anew and the next move must save [`AFTER_A_MOVE`] times its
//! cost. As no more time can be lost than passes, the VM stays at least so long; and all the moves
//! of a job together, after the first, cost at most half of what it lost to the network.

use perigee_model::HostId;
use perigee_model::plan::{Basis, Plan, PlanOption, Seconds, Way};
use perigee_model::units::format_seconds;

use crate::facts::{DiskFacts, Running};
use crate::figures::Figures;
use crate::moving::{Dirty, MoveCost, move_cost_with};
use crate::network::{io_s, lost_s, not_computing_s, seconds};
use crate::options::add_up;
use crate::profile::VolumeWork;
use crate::refused::Refused;

/// How many times its cost a move must save when the VM was moved before.
pub const AFTER_A_MOVE: f64 = 2.0;

/// A place counts as better when it would lose at most this share of what is lost here: probes of
/// two equal links differ a little, and that is no reason to move.
const CLEARLY_LESS: f64 = 0.8;

#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    Stay {
        reason: String,
        /// Lost to the network since the VM came to this host.
        lost_s: f64,
        /// Of the best move, if there is a better place.
        cost_s: Option<f64>,
    },
    Move {
        to: HostId,
        reason: String,
        plan: Plan,
    },
}

/// A place where the job would have lost less.
struct Better<'a> {
    to: &'a HostId,
    lost_there_s: f64,
    saved_s: f64,
    cost: MoveCost,
}

/// Decides with what was measured since the VM came to its host. To be asked again and again while
/// the job runs: the answer is late by the time between two calls.
pub fn consider(running: &Running) -> Verdict {
    let lost_s = lost_s(&running.disks, running.wall_s, running.vcpu_s, running.cpus);
    let stay = |reason: String, cost_s| Verdict::Stay { reason, lost_s, cost_s };
    if !running.may_migrate {
        return stay("the job file says that it may not move".to_owned(), None);
    }
    let best = match best_place(running, lost_s) {
        Ok(Some(best)) => best,
        Ok(None) => return stay("no host with room would lose less".to_owned(), None),
        Err(why) => return stay(format!("no move can be judged: {why}"), None),
    };
    let factor = if running.moves == 0 { 1.0 } else { AFTER_A_MOVE };
    let needed_s = best.cost.total_s * factor;
    let account = account(running, lost_s, &best);
    if best.saved_s < needed_s {
        let reason = if running.moves == 0 {
            account
        } else {
            format!("{account}; after a move the next must save {AFTER_A_MOVE:.0} times its cost")
        };
        return stay(reason, Some(best.cost.total_s));
    }
    let plan = plan(running, lost_s, &best, &account);
    Verdict::Move { to: best.to.clone(), reason: account, plan }
}

fn account(running: &Running, lost_s: f64, best: &Better) -> String {
    format!(
        "{} of {} lost to the network at {}, {} would have been at {}; moving there costs {}",
        format_seconds(lost_s),
        format_seconds(running.wall_s),
        running.host,
        format_seconds(best.lost_there_s),
        best.to,
        format_seconds(best.cost.total_s)
    )
}

/// The place for which the most is saved beyond its cost. An error only when every place fails.
fn best_place(running: &Running, lost_s: f64) -> Result<Option<Better<'_>>, Refused> {
    let mut best: Option<Better> = None;
    let mut refused = None;
    for host in &running.cluster.hosts {
        if host.id == running.host || host.memory_free_bytes < running.memory_bytes {
            continue;
        }
        match place(running, lost_s, &host.id) {
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
    place.saved_s - place.cost.total_s
}

fn place<'a>(running: &'a Running, lost_s: f64, to: &'a HostId) -> Result<Better<'a>, Refused> {
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
    Ok(Better { to, lost_there_s, saved_s: lost_s - lost_there_s, cost })
}

/// What the network should add to this job's I/O at a host, by the probes. Only the ratio between
/// two hosts is used, so that what the probes get wrong at both is of no effect.
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

/// Both ways for the rest of the job, of which nothing is known but what was done.
fn plan(running: &Running, lost_s: f64, best: &Better, account: &str) -> Plan {
    let waiting_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    let busy_s: f64 = running.disks.iter().map(|d| seconds(d.client.busy_ns)).sum();
    let local_io_s = (busy_s.min(waiting_s) - lost_s).max(0.0);
    let mut stay = Seconds {
        cpu_s: running.wall_s - waiting_s,
        local_io_s,
        network_s: lost_s,
        other_s: waiting_s - lost_s - local_io_s,
        ..Seconds::default()
    };
    let mut there = stay;
    there.network_s = best.lost_there_s;
    there.migration_s = best.cost.total_s;
    add_up(&mut stay);
    add_up(&mut there);
    let start = running.host.clone();
    let option = |way, end, predicted, chosen, reason| PlanOption {
        way,
        start: start.clone(),
        end,
        predicted,
        chosen,
        reason,
    };
    let mut figures = vec!["assumed: as much work is left as was done here".to_owned()];
    figures.extend(best.cost.figures.iter().cloned());
    let saved = format!("would lose {} more", format_seconds(best.saved_s));
    let migrate = option(Way::Migrate, best.to.clone(), there, true, account.to_owned());
    let remote = option(Way::Remote, start.clone(), stay, false, saved);
    Plan { basis: Basis::Running, options: vec![migrate, remote], figures, moves: true }
}
