//! Decides which VM moves because its host is overloaded, or because its data are elsewhere.
//!
//! A VM loses time while it wants a CPU and gets none, while its host is short of memory, and while it waits for the network to its data.
//! For each pair of a VM and another host an **account** adds up what being there would have saved since: of the VM's own time, and of its
//! neighbours' at both hosts. What being there would have lost is taken off, and an account is never below 0. A VM moves when an account
//! reaches the price of that move: the ski-rental rule of `running.rs`, so that what is lost by waiting is about what the move costs.
//!
//! Load changes, and a rule that follows each change pays for moves that gain nothing. So moves become dearer, and are bounded:
//!
//! - The price of a VM's moves doubles with each move, and that surcharge halves in [`SURCHARGE_HALVES_IN_S`].
//! - [`TRIAL_S`] after a move its gain is judged: what being at the old host would have lost since. If that is less than the price, the
//!   price doubles once more.
//! - An account never has more than [`MOST`] times what it needs: what was lost long ago is no reason to move today.
//! - A move has to fit: the target has processors, vCPUs and memory left for all that the VM wants. A host takes part in one move at a
//!   time, because a second one would be decided by loads that the first one changes. A VM that goes to its data needs no processors that
//!   nobody else wants: what it would lose there, and its neighbours by it, is in its account.
//!
//! What is not known is never idle. A host with an unknown load, or with a VM whose load is unknown, neither gets nor loses a VM, and the
//! accounts of its pairs stand still.
//!
//! A VM leaves the hosts that are balanced together only for its data: [`Comes`]. At other hosts no more counts as saved than the network to
//! its data would have, so that alone has to pay for the move.
//!
//! The caller decides whether a site balances at all, which VMs may move ([`VmLoad::may_move`]), and where a VM may go (`elsewhere`).

use std::collections::BTreeMap;

use perigee_model::balance::VmBalance;
use perigee_model::units::format_seconds;
use perigee_model::{HostId, SiteId, VmId};

use crate::MoveCost;

mod accounts;
mod data;
mod explain;
mod load;
#[cfg(test)]
mod tests;

pub use accounts::Accounts;
use accounts::Saved;
pub use data::Waited;
pub use explain::explain;
use load::Loads;

/// The surcharge of a VM's next move halves in this time. With an hour, loads that change every few minutes cause many more moves, which
/// gain nothing (`experiments/balance/square.yaml`).
pub const SURCHARGE_HALVES_IN_S: f64 = 14400.0;

/// How long after a move its gain is judged.
pub const TRIAL_S: f64 = 600.0;

/// An account has at most so many times what its move needs.
pub const MOST: f64 = 2.0;

/// A price counts at least so much, in seconds. A move always has a pause, and work at two hosts.
pub const LEAST_PRICE_S: f64 = 0.5;

/// A look counts for at most so many seconds. Rates that are averages over a longer time say little of it.
pub const LONGEST_LOOK_S: f64 = 60.0;

/// For how many target hosts a VM has accounts. Hosts with enough room are alike, so a few of them do.
pub const TARGETS: usize = 16;

/// Why a VM does not go by itself to a host ([`VmLoad::taken_from`]).
pub const TAKEN: &str = "a person has moved the VM away from there";

/// What is said of a move that is only advised.
const WOULD_MOVE: &str = "would move";

/// Where the network to its data is so much of what a VM would save, that is the reason of its move.
const MOSTLY: f64 = 0.9;

/// Less of the saving is not said.
const TOLD: f64 = 0.1;

/// Processors that a migration takes at each of its hosts.
pub const COPYING_CPUS: f64 = 0.5;

/// The time in seconds that a migration costs a VM that wants so many processors, and its neighbours.
pub fn price_s(cost: &MoveCost, wanted_cpus: f64) -> f64 {
    cost.job_s * wanted_cpus + COPYING_CPUS * cost.total_s
}

/// What was measured at the hosts that may exchange VMs since the look before. All rates are averages over that time.
#[derive(Debug, Clone)]
pub struct Look {
    /// The seconds since the look before; at least 0.
    pub passed_s: f64,
    /// Each host once.
    pub hosts: Vec<HostLoad>,
    /// The VMs at these hosts, each once. A VM that is just moving is not among them: its load is in `other_cpus` of both hosts, and its
    /// memory and vCPUs are free at neither.
    pub vms: Vec<VmLoad>,
}

/// A host in a [`Look`].
#[derive(Debug, Clone)]
pub struct HostLoad {
    /// Which host.
    pub host: HostId,
    /// Its site. A VM looks for another host at its own site first.
    pub site: SiteId,
    /// Its processors.
    pub cpus: f64,
    /// Processors that everything but the listed VMs used; `None` if that is not known.
    pub other_cpus: Option<f64>,
    /// The share of the time in which something at the host waited for memory (`some` of PSI), 0 to 1. `None`, without PSI, is no reason to
    /// move.
    pub memory_stalled: Option<f64>,
    /// vCPUs that may still be placed there.
    pub free_vcpus: u32,
    /// Memory in bytes that no VM has yet.
    pub free_memory_bytes: u64,
    /// Whether VMs may come: the host answers, and is not drained.
    pub takes_vms: bool,
    /// Which of them.
    pub comes: Comes,
    /// Whether a migration from or to the host is under way.
    pub in_a_move: bool,
}

/// Which VMs of the hosts that are balanced together may come to a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Comes {
    /// All: it is one of these hosts.
    #[default]
    All,
    /// Those that have data there: it is a host of another site.
    ForData,
    /// The same, but they are only advised to: nothing moves by itself to that site.
    ForDataAdvised,
}

/// A VM in a [`Look`].
#[derive(Debug, Clone)]
pub struct VmLoad {
    /// Which VM.
    pub vm: VmId,
    /// Where the VM runs.
    pub host: HostId,
    /// Its vCPUs.
    pub vcpus: u32,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Processors that its vCPUs used; `None` if that is not known.
    pub used_cpus: Option<f64>,
    /// Run delay in seconds per second, the sum over its vCPUs: they wanted a processor and got none. `None` if that is not known.
    pub waited_cpus: Option<f64>,
    /// The share of the time that the VM lost to the network between itself and its data, 0 to 1; 0 for a VM without data, and `None` if
    /// that is not known.
    pub data_lost: Option<f64>,
    /// The hosts that have its data.
    pub data_at: Vec<HostId>,
    /// The host from which a person moved the VM last. The VM does not go back there by itself.
    pub taken_from: Option<HostId>,
    /// The name of a group of VMs that are to be at one host. A VM goes only where more of the group are than at its own host. While one of
    /// them moves, the others may not.
    pub together: Option<String>,
    /// The name of a group of VMs of which no two are to be at one host.
    pub apart: Option<String>,
    /// Whether the balancer may move the VM.
    pub may_move: bool,
}

/// What a VM would have at another host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Elsewhere {
    /// The time in seconds that a move there costs: the VM's and its neighbours'.
    pub price_s: f64,
    /// The share of the time that the VM would lose there to the network between itself and its data, 0 to 1.
    pub data_lost: f64,
}

/// What a look shows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Balanced {
    /// The VMs that would lose less elsewhere: those that move first, the best first, and then those that stay.
    pub decisions: Vec<VmBalance>,
    /// The hosts whose loads are not known. No VM comes to them or leaves them.
    pub not_known: Vec<HostId>,
}

/// A pair of a VM and a target that would save time now.
#[derive(Clone, Copy)]
struct Candidate {
    vm: usize,
    to: usize,
    saved: Saved,
    price_s: f64,
    needed_s: f64,
    fits: bool,
    /// What it would save is the network to its data.
    by_data: bool,
    /// It would only be advised.
    advised: bool,
}

impl Candidate {
    fn is_due(&self) -> bool {
        self.fits && self.saved.saved_s >= self.needed_s
    }

    fn surplus_s(&self) -> f64 {
        self.saved.saved_s - self.needed_s
    }
}

/// The hosts about which [`balance`] will ask `elsewhere` for each VM that may move, so that a caller can find that out before.
pub fn pairs(accounts: &Accounts, look: &Look) -> BTreeMap<VmId, Vec<HostId>> {
    let loads = Loads::of(look);
    let of_vm = |(number, load): (usize, &VmLoad)| {
        let hosts = targets(accounts, &loads, number, loads.host_of(number)?).into_iter();
        let mut hosts: Vec<HostId> = hosts.map(|host| look.hosts[host].host.clone()).collect();
        let judged = accounts.on_trial(&load.vm).filter(|from| !hosts.contains(from));
        if let Some(from) = judged.cloned() {
            hosts.push(from);
        }
        (!hosts.is_empty()).then(|| (load.vm.clone(), hosts))
    };
    let movable = look.vms.iter().enumerate().filter(|(_, load)| load.may_move);
    movable.filter_map(of_vm).collect()
}

/// Adds up what the look shows, and decides. `elsewhere` says what a VM would have at a host; `None` if the VM may not go there, or if that
/// is not known.
///
/// The accounts take each decided move for made. A VM that is seen at its old host again begins with empty accounts and keeps the surcharge.
pub fn balance(
    accounts: &mut Accounts,
    look: &Look,
    elsewhere: impl Fn(&VmId, &HostId) -> Option<Elsewhere>,
) -> Balanced {
    let (balanced, moves) = weigh(accounts, look, elsewhere, "moves");
    accounts
        .moved(moves.iter().map(|one| (&look.vms[one.vm], &look.hosts[one.to].host, one.price_s)));
    balanced
}

/// The same for moves that are not made: a VM that would move is due until its loss has been made up for.
pub fn advise(
    accounts: &mut Accounts,
    look: &Look,
    elsewhere: impl Fn(&VmId, &HostId) -> Option<Elsewhere>,
) -> Balanced {
    weigh(accounts, look, elsewhere, WOULD_MOVE).0
}

/// Adds up what the look shows, and decides; also returns the moves.
fn weigh(
    accounts: &mut Accounts,
    look: &Look,
    elsewhere: impl Fn(&VmId, &HostId) -> Option<Elsewhere>,
    verb: &str,
) -> (Balanced, Vec<Candidate>) {
    let elsewhere = |vm: &VmId, host: &HostId| elsewhere(vm, host).and_then(sound);
    let mut loads = Loads::of(look);
    accounts.begin(look);
    let counted_s = look.passed_s.clamp(0.0, LONGEST_LOOK_S);
    let mut candidates = Vec::new();
    for (vm, load) in look.vms.iter().enumerate() {
        let Some(here) = loads.host_of(vm) else { continue };
        accounts.judge_trial(&load.vm, counted_s, |from| {
            let from_data = elsewhere(&load.vm, from)?.data_lost;
            loads.saved(vm, here, loads.number(from)?, from_data)
        });
        if !load.may_move {
            accounts.close(&load.vm);
            continue;
        }
        let factor = accounts.factor(&load.vm);
        for to in targets(accounts, &loads, vm, here) {
            let host = &look.hosts[to].host;
            let Some(there) = elsewhere(&load.vm, host).filter(|_| loads.is_allowed(vm, to)) else {
                accounts.close_one(&load.vm, host);
                continue;
            };
            let Some(saved) = loads.saved_for(vm, here, to, there.data_lost) else { continue };
            let (price_s, needed_s) = (there.price_s, there.price_s * factor);
            let counted = Saved {
                saved_s: saved * counted_s,
                for_s: counted_s,
                data_here_s: load.data_lost.unwrap_or(0.0).min(1.0) * counted_s,
                data_there_s: there.data_lost * counted_s,
            };
            let Some(all) = accounts.add(load, host, counted, needed_s * MOST) else { continue };
            if saved > 0.0 {
                // What the processors cost it and its neighbours there is in the account.
                let by_data = counted.is_by_data();
                let fits = by_data || loads.fits(vm, here, to);
                let advised = look.hosts[to].comes == Comes::ForDataAdvised;
                let saved = all;
                candidates.push(Candidate {
                    vm,
                    to,
                    saved,
                    price_s,
                    needed_s,
                    fits,
                    by_data,
                    advised,
                });
            }
        }
    }
    let (decisions, moves) = decide(&mut loads, candidates, verb);
    (Balanced { decisions, not_known: loads.not_known() }, moves)
}

/// `None` for a price or a loss that can't be.
fn sound(there: Elsewhere) -> Option<Elsewhere> {
    let is_sound = there.price_s.is_finite() && (0.0..=1.0).contains(&there.data_lost);
    is_sound.then(|| Elsewhere { price_s: there.price_s.max(LEAST_PRICE_S), ..there })
}

/// The hosts whose accounts of the VM change: those with an account, and, if the VM loses anything where it is, those with its data and the
/// emptiest ones.
fn targets(accounts: &Accounts, loads: &Loads, vm: usize, here: usize) -> Vec<usize> {
    let load = &loads.look.vms[vm];
    let mut targets: Vec<usize> =
        accounts.open(&load.vm).filter_map(|host| loads.number(host)).collect();
    if loads.loses(vm, here) {
        let near = load.data_at.iter().filter_map(|host| loads.number(host));
        let new = near.chain(loads.emptiest(vm, here));
        for host in new {
            if targets.len() >= TARGETS {
                break;
            }
            if host != here && !targets.contains(&host) {
                targets.push(host);
            }
        }
    }
    targets
}

/// The best move of each VM, or why its best one is not made; and again those that are made.
fn decide(
    loads: &mut Loads,
    mut candidates: Vec<Candidate>,
    verb: &str,
) -> (Vec<VmBalance>, Vec<Candidate>) {
    candidates
        .sort_by(|a, b| b.fits.cmp(&a.fits).then_with(|| b.surplus_s().total_cmp(&a.surplus_s())));
    // In the order of their first candidates.
    let mut chosen: Vec<(Candidate, bool)> = Vec::new();
    let mut places: BTreeMap<usize, usize> = BTreeMap::new();
    for candidate in candidates {
        match places.get(&candidate.vm) {
            None => {
                let moves = candidate.is_due()
                    && (candidate.advised || loads.reserve(candidate.vm, candidate.to));
                places.insert(candidate.vm, chosen.len());
                chosen.push((candidate, moves));
            }
            // Its best target is in another move or is only advised, this one may not be.
            Some(&place) => {
                let (best, moves) = chosen[place];
                let is_left = candidate.is_due() && !candidate.advised;
                if is_left && (!moves || best.advised) && loads.reserve(candidate.vm, candidate.to)
                {
                    chosen[place] = (candidate, true);
                }
            }
        }
    }
    let made = chosen.iter().filter(|(one, moves)| *moves && !one.advised);
    let moves: Vec<_> = made.map(|(one, _)| *one).collect();
    let mut decisions: Vec<VmBalance> = chosen
        .iter()
        .map(|(candidate, moves)| {
            let verb = if candidate.advised { WOULD_MOVE } else { verb };
            decision(loads, candidate, moves.then_some(verb))
        })
        .collect();
    decisions.sort_by_key(|decision| !decision.moves);
    (decisions, moves)
}

/// `moves` says in words that it does.
fn decision(loads: &Loads, candidate: &Candidate, moves: Option<&str>) -> VmBalance {
    let (load, to) = (&loads.look.vms[candidate.vm], &loads.look.hosts[candidate.to].host);
    let Candidate { saved: Saved { saved_s, .. }, needed_s, .. } = *candidate;
    let (vm, host) = (load.vm.clone(), load.host.clone());
    let reason = reason(loads, candidate, moves);
    VmBalance { vm, host, to: to.clone(), moves: moves.is_some(), saved_s, needed_s, reason }
}

fn reason(loads: &Loads, candidate: &Candidate, moves: Option<&str>) -> String {
    let (load, to) = (&loads.look.vms[candidate.vm], &loads.look.hosts[candidate.to].host);
    let price = format_seconds(candidate.price_s);
    let saved = saved(loads, candidate);
    let surcharge = if candidate.needed_s > candidate.price_s * 1.01 {
        format!(", and after its last moves it must save {}", format_seconds(candidate.needed_s))
    } else {
        String::new()
    };
    if let Some(verb) = moves {
        format!("{verb} {} → {to}: {saved}; a move costs {price}{surcharge}", load.host)
    } else if !candidate.fits {
        format!("stays at {}: {saved}, but {to} has no processors left for it", load.host)
    } else if candidate.is_due() {
        format!("stays at {} until another move is over: {saved}", load.host)
    } else {
        format!("stays at {}: {saved}; a move costs {price}{surcharge}", load.host)
    }
}

/// What being at the other host would have saved, and what of it is the network to the VM's data.
fn saved(loads: &Loads, candidate: &Candidate) -> String {
    let (load, to) = (&loads.look.vms[candidate.vm], &loads.look.hosts[candidate.to].host);
    let Saved { saved_s, for_s, data_here_s, data_there_s } = candidate.saved;
    let [all, time, here, there] = [saved_s, for_s, data_here_s, data_there_s].map(format_seconds);
    let by_data_s = data_here_s - data_there_s;
    let hosts: Vec<&str> = load.data_at.iter().map(HostId::as_str).collect();
    let data = if hosts.is_empty() { String::new() } else { format!(" at {}", hosts.join(", ")) };
    if candidate.by_data {
        return format!(
            "has lost {here} of the last {time} to the network to its data{data}, would have lost {there} at {to}"
        );
    }
    let whose = match loads.neighbours(candidate.vm) {
        0 => String::new(),
        1 => ", its own and of 1 neighbour".to_owned(),
        many => format!(", its own and of {many} neighbours"),
    };
    let said = format!("{to} would have saved {all} in the last {time}{whose}");
    if by_data_s.abs() < saved_s * TOLD {
        return said;
    }
    format!(
        "{said}; it has lost {here} to the network to its data{data}, would have lost {there} there"
    )
}
