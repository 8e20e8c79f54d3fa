//! The changes that a running VM could make, with what each would have saved and what it costs.

use perigee_model::HostId;
use perigee_model::plan::Way;

use crate::copying::{Coming, Reading, copy_of};
use crate::cpu_load::load_factor;
use crate::facts::{HostFacts, Running};
use crate::figures::Figures;
use crate::hosts::{computing_factor, cpu_factor, slower_s};
use crate::learn::{Learned, Source};
use crate::moving::{Dirty, MoveCost, move_cost};
use crate::network::{added_s, lost_by_reads_share, not_computing_s};
use crate::options::CONFINED;
use crate::refused::Refused;
use crate::running::is_clearly_less;
use crate::running::left::{by_progress, share_left, sources, without_it};
use crate::running::sure::now;
use crate::spread::Spread;

/// What waiting for a CPU that others had has cost a VM, and what it would have cost at another host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CpuWait {
    pub here_s: f64,
    pub there_s: f64,
}

/// A change with which the job would have lost less.
pub(crate) struct Better<'a> {
    pub way: Way,
    pub to: &'a HostId,
    /// To the network.
    pub lost_there_s: f64,
    /// `None` if it is not known at both hosts.
    pub cpu_wait: Option<CpuWait>,
    pub saved_s: f64,
    pub cost: MoveCost,
    /// What it costs, with what is still lost until it begins.
    pub price_s: f64,
    /// The predicted loss until the job's end if the VM stays; `None` if it is not known.
    pub to_lose: Option<Spread>,
    /// Why it can't be made now.
    pub impossible: Option<String>,
}

impl Better<'_> {
    /// What it would have saved, after its cost.
    pub fn surplus_s(&self) -> f64 {
        self.saved_s - self.price_s
    }

    /// Whether it would clearly have lost less there, to the network and to waiting for a CPU.
    fn loses_clearly_less(&self, lost_s: f64) -> bool {
        let CpuWait { here_s, there_s } =
            self.cpu_wait.unwrap_or(CpuWait { here_s: 0.0, there_s: 0.0 });
        is_clearly_less(self.lost_there_s + there_s, lost_s + here_s)
    }

    /// The greater, the better: first of all it has to be possible.
    pub fn rank(&self) -> (bool, f64) {
        (self.impossible.is_none(), self.surplus_s())
    }
}

type Place<'a> = Result<Option<Better<'a>>, Refused>;

/// The best move, which is an error if the prediction failed for every host, and the copy.
pub(super) fn best<'a>(
    running: &'a Running,
    lost_s: f64,
    learned: Option<&Learned>,
) -> (Place<'a>, Option<Better<'a>>) {
    (best_place(running, lost_s, learned), copied(running, lost_s, learned))
}

/// What a change costs. Until it begins, the job goes on to lose what the change would save in this time.
pub(crate) fn price_s(cost: &MoveCost, saved_s: f64, in_s: f64) -> f64 {
    let saved_a_second = if in_s > 0.0 { (saved_s / in_s).clamp(0.0, 1.0) } else { 0.0 };
    cost.job_s + saved_a_second * cost.wait_s.unwrap_or(0.0)
}

/// Why a change was refused a short time ago.
fn refused(running: &Running, way: Way, to: &HostId) -> Option<String> {
    let mut all = running.refused.iter();
    all.find(|refused| refused.way == way && refused.to == *to).map(|refused| refused.why.clone())
}

/// Why the VM does not go to this host now, whether that pays or not; `None` if it may.
pub(super) fn why_it_may_not_go(running: &Running, to: &HostId, cost: &MoveCost) -> Option<String> {
    let is_away = |home: &&HostId| {
        [&running.host, *home].iter().all(|at| !running.cluster.is_one_site(at, to))
    };
    let confined = running.confined_to.as_ref().filter(is_away).map(|_| CONFINED.to_owned());
    let unknown_wait = || {
        let why = "it is not known when the moves before it over this link end";
        cost.wait_s.is_none().then(|| why.to_owned())
    };
    let refused = || refused(running, Way::Migrate, to);
    confined.or_else(|| cost.too_long()).or_else(unknown_wait).or_else(refused)
}

/// The same for the data volumes and the VM's host.
pub(crate) fn why_it_may_not_come(running: &Running) -> Option<String> {
    refused(running, Way::Copy, &running.host)
}

/// The data volumes that are at other hosts.
pub(crate) fn coming(running: &Running) -> Vec<Coming<'_>> {
    let far = running.disks.iter().filter(|disk| disk.home != running.host);
    far.map(|d| Coming { volume: &d.volume, home: &d.home, copy: &d.copy }).collect()
}

/// How the work so far has waited for its reads.
pub(crate) fn reading_so_far(running: &Running, lost_s: f64) -> Reading {
    let waits_s = lost_s * lost_by_reads_share(&running.disks);
    Reading::of(waits_s, running.wall_s - lost_s, false)
}

/// How the rest of the work waits for its reads, according to the job's earlier runs.
pub(super) fn reading_later(
    running: &Running,
    learned: &Learned,
    now: &crate::learn::Place,
) -> Option<Reading> {
    Some(learned.reading(now, share_left(running, learned)?.expected))
}

/// The data volumes come to the VM's host. `None` if none is elsewhere, or if a link is not measured.
fn copied<'a>(running: &'a Running, lost_s: f64, learned: Option<&Learned>) -> Option<Better<'a>> {
    let (cluster, to) = (&running.cluster, &running.host);
    let volumes = coming(running);
    if volumes.is_empty() || !is_clearly_less(0.0, lost_s) {
        return None;
    }
    let measured = reading_so_far(running, lost_s);
    // A copy takes long, and what comes later may wait for its reads far more than what was done so far.
    let later =
        learned.and_then(|learned| reading_later(running, learned, &now(running, learned)?));
    let reading = later.filter(|later| later.waits_per_work > measured.waits_per_work);
    let (cost, impossible) = copy_of(cluster, to, &volumes, reading.unwrap_or(measured)).ok()?;
    let impossible = impossible.or_else(|| why_it_may_not_come(running));
    let here = cluster.host(to).ok()?;
    let local = vec![Source::home(to); running.disks.len()];
    let by_history = learned.and_then(|learned| to_lose(running, here, &local, learned, None));
    let to_lose = by_history.or_else(|| by_progress(running, lost_s));
    let (lost_there_s, saved_s) = (0.0, lost_s);
    let price_s = price_s(&cost, saved_s, running.wall_s);
    Some(Better {
        way: Way::Copy,
        to,
        lost_there_s,
        cpu_wait: None,
        saved_s,
        cost,
        price_s,
        to_lose,
        impossible,
    })
}

/// The host with the largest saving after the cost of the move; one that is not possible only if there is no other.
/// An error only if the prediction failed for every host.
fn best_place<'a>(running: &'a Running, lost_s: f64, learned: Option<&Learned>) -> Place<'a> {
    let mut best: Option<Better> = None;
    let mut refused = None;
    for host in &running.cluster.hosts {
        if host.id == running.host || host.memory_free_bytes < running.memory_bytes {
            continue;
        }
        match place(running, lost_s, host, learned) {
            Ok(place) if !place.loses_clearly_less(lost_s) => {}
            Ok(place) if best.as_ref().is_none_or(|best| place.rank() > best.rank()) => {
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

/// A move of one VM of several that move together, judged by its measurements alone.
pub(crate) fn of_host<'a>(
    running: &'a Running,
    lost_s: f64,
    host: &'a HostFacts,
) -> Result<Better<'a>, Refused> {
    place(running, lost_s, host, None)
}

fn place<'a>(
    running: &'a Running,
    lost_s: f64,
    host: &'a HostFacts,
    learned: Option<&Learned>,
) -> Result<Better<'a>, Refused> {
    let to = &host.id;
    let mut figures = Figures::default();
    let network_s =
        |at, figures: &mut Figures| added_s(&running.cluster, &running.disks, at, figures);
    let here_s = network_s(&running.host, &mut figures)?;
    let there_s = network_s(to, &mut figures)?;
    let bound_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    let cpu_wait = cpu_wait(running, lost_s, host)?;
    let lost_there_s = match here_s > 0.0 {
        true => (lost_s * there_s / here_s).min(bound_s),
        // It may leave its data for a CPU, and then loses what the probes say.
        false if cpu_wait.is_some() => there_s,
        // It should lose nothing here, so there is no ratio.
        false if there_s > 0.0 => bound_s,
        false => 0.0,
    };
    let dirty = Dirty::of_running(running.dirty_bytes_per_s, &running.disks, running.wall_s);
    let (cluster, from) = (&running.cluster, &running.host);
    let mut cost = move_cost(cluster, from, to, running.memory_bytes, dirty)?;
    for figure in figures.into_vec() {
        if !cost.figures.contains(&figure) {
            cost.figures.push(figure);
        }
    }
    let saved_by_cpus_s = match cpu_wait {
        Some(CpuWait { here_s, there_s }) => here_s - there_s,
        None => -computing_longer_s(running, host)?,
    };
    let saved_s = lost_s - lost_there_s + saved_by_cpus_s;
    let by_history = learned
        .and_then(|learned| to_lose(running, host, &sources(running, to), learned, cpu_wait));
    let to_lose = by_history.or_else(|| by_progress(running, saved_s));
    let impossible = why_it_may_not_go(running, to, &cost);
    let price_s = price_s(&cost, saved_s, running.wall_s);
    Ok(Better {
        way: Way::Migrate,
        to,
        lost_there_s,
        cpu_wait,
        saved_s,
        cost,
        price_s,
        to_lose,
        impossible,
    })
}

/// The time that the VM has waited for a CPU since its arrival, and what its computing would have taken longer at the other host
/// than alone. `None` where that is not measured at both: a host whose load is not known is not idle. A VM with more vCPUs than
/// a host has CPUs waits for itself, which says nothing of others. Nor does what it has waited count while its host is not busier
/// than the other one any more: unlike the network, others' load comes and goes.
///
/// That a host has faster processors is no reason to move by itself: boots show that only roughly.
fn cpu_wait(running: &Running, lost_s: f64, there: &HostFacts) -> Result<Option<CpuWait>, Refused> {
    let cluster = &running.cluster;
    let here = cluster.host(&running.host)?;
    let is_known = there.cpu_load.is_some() && running.cpus <= here.cpus.min(there.cpus);
    let Some(here_s) = running.run_delay_s.filter(|_| is_known) else { return Ok(None) };
    let busy_there = load_factor(there, running.cpus).expected;
    let here_now = without_it(running, here);
    let is_still_busy = load_factor(&here_now, running.cpus).expected > busy_there;
    if here_now.cpu_load.is_some() && !is_still_busy {
        return Ok(None);
    }
    let waiting_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    let [speed_here, speed_there] =
        [&here.id, &there.id].map(|host| cpu_factor(cluster, host).0.expected);
    let slower = (speed_there / speed_here).max(1.0);
    let there_s = (running.wall_s - waiting_s) * (slower * busy_there - 1.0);
    // The other vCPUs may have lost time to the network meanwhile, which counts once.
    let here_s = here_s.min(waiting_s - lost_s).max(0.0);
    Ok(Some(CpuWait { here_s, there_s }))
}

/// How much longer the computing since the arrival would have taken at the other host, beside the VMs that run
/// there.
fn computing_longer_s(running: &Running, there: &HostFacts) -> Result<f64, Refused> {
    let cluster = &running.cluster;
    let here = cluster.host(&running.host)?;
    let (here, own) = (without_it(running, here), running.cpus);
    let factor_here = computing_factor(cluster, &here, own);
    let factor_there = computing_factor(cluster, there, own);
    let waiting_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    Ok(slower_s(running.wall_s - waiting_s, factor_here, factor_there))
}

/// The time that will be lost here and not there until the job's end, predicted from earlier runs: the loss of
/// a whole run, times the share of its work that is left. Where the wait for a CPU is known at both, it is a part of the loss.
fn to_lose(
    running: &Running,
    there: &HostFacts,
    sources_then: &[Source],
    learned: &Learned,
    cpu_wait: Option<CpuWait>,
) -> Option<Spread> {
    let cluster = &running.cluster;
    let place = |host: &HostFacts, sources: &[Source]| {
        learned.place(cluster, host, sources, &mut Figures::default()).ok()
    };
    let here = without_it(running, cluster.host(&running.host).ok()?);
    let (now, then) = (place(&here, &sources(running, &here.id))?, place(there, sources_then)?);
    let whole = match cpu_wait {
        Some(_) => learned.longer(&now, &then),
        None => learned.network_longer(&now, &then),
    };
    Some(whole.by(share_left(running, learned)?).at_least(0.0))
}
