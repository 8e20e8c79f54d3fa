//! The ways to run a job that has not started, with predicted seconds.

use std::cmp::Reverse;

use perigee_model::HostId;
use perigee_model::job::Start;
use perigee_model::plan::{Basis, Plan, PlanOption, Seconds, Way};
use perigee_model::units::{format_bytes, format_seconds};

use crate::facts::{HostFacts, Snapshot};
use crate::figures::Figures;
use crate::moving::{Dirty, move_cost_with};
use crate::network::io_s;
use crate::profile::{VolumeWork, WorkProfile};
use crate::refused::Refused;

/// Linux's default read-ahead: the request size of a job that nothing is known about.
const READ_AHEAD_BYTES: u64 = 128 << 10;

/// Compares the ways to run a job and chooses the one predicted to end first.
///
/// `remote`, `beside` and `migrate` are each given with their best hosts. What can't be done (no
/// migration allowed, beside the data is not where the job may start) stands last, with the reason.
/// `migrate` follows the rule of [`crate::consider`]: the VM runs remotely until the time that a
/// move would have saved equals its cost, so about the cost is lost before the move.
///
/// # Errors
/// [`Refused`] when no host has room, a volume's home is not up, or a link is not measured.
pub fn plan(snapshot: &Snapshot) -> Result<Plan, Refused> {
    let mut figures = Figures::default();
    for volume in &snapshot.job.volumes {
        if snapshot.cluster.host(&volume.home).is_err() {
            let (volume, home) = (volume.volume.clone(), volume.home.clone());
            return Err(Refused::HomeNotUp { volume, home });
        }
    }
    let (work, basis) = match &snapshot.history {
        Some(history) => {
            figures.measured(format!("work: mean of {} earlier runs", history.runs));
            (history.clone(), Basis::History)
        }
        None => (one_pass(snapshot, &mut figures)?, Basis::OnePass),
    };
    let stays = stays(snapshot, &work, &mut figures)?;
    let mut candidates: Vec<Candidate> =
        [Way::Beside, Way::Remote].into_iter().filter_map(|way| best_stay(&stays, way)).collect();
    candidates.extend(best_move(snapshot, &work, &stays, &mut figures));
    let default_start = stays.iter().find(|s| s.allowed).map(|s| s.host.clone());
    Ok(choose(candidates, basis, default_start, figures))
}

/// A job nothing is known of is taken to read what its volumes hold once.
fn one_pass(snapshot: &Snapshot, figures: &mut Figures) -> Result<WorkProfile, Refused> {
    figures.assumed(
        "one pass over the data, 128 KiB at a time, one request in flight; CPU time not counted",
    );
    let mut work = WorkProfile {
        runs: 0,
        boot_s: 0.0,
        cpu_s: 0.0,
        overlap_s: 0.0,
        other_s: 0.0,
        volumes: Default::default(),
    };
    for volume in &snapshot.job.volumes {
        figures.measured(format!(
            "volume {} at {} holds {}",
            volume.volume,
            volume.home,
            format_bytes(volume.allocated_bytes)
        ));
        let home = snapshot.cluster.host(&volume.home)?;
        if home.local_blocks.is_none() {
            figures.assumed(&format!("a local block read at {} takes no time", home.id));
        }
        let on_volume = VolumeWork {
            reads: volume.allocated_bytes.div_ceil(READ_AHEAD_BYTES) as f64,
            bytes: volume.allocated_bytes as f64,
            queue_depth: 1.0,
            home_latency_us: home.local_blocks.map_or(0.0, |b| b.latency_median_us as f64),
            ..VolumeWork::default()
        };
        work.volumes.insert(volume.volume.clone(), on_volume);
    }
    Ok(work)
}

/// The job from start to end on one host.
struct Stay {
    host: HostId,
    /// Whether the job may start there.
    allowed: bool,
    way: Way,
    seconds: Seconds,
    rtt_ms: f64,
}

/// One for each host with room and measured links, the least busy host first.
fn stays(
    snapshot: &Snapshot,
    work: &WorkProfile,
    figures: &mut Figures,
) -> Result<Vec<Stay>, Refused> {
    let needed_bytes = snapshot.job.memory_bytes;
    let mut hosts: Vec<&HostFacts> =
        snapshot.cluster.hosts.iter().filter(|h| h.memory_free_bytes >= needed_bytes).collect();
    hosts.sort_by_key(|h| (h.running_vms, Reverse(h.memory_free_bytes), h.id.clone()));
    let mut refused = None;
    let mut stays = Vec::new();
    for host in hosts {
        match stay(snapshot, work, host, figures) {
            Ok(stay) => stays.push(stay),
            Err(why) if may_start(&snapshot.job.start, host) => refused = Some(why),
            Err(_) => {}
        }
    }
    if stays.iter().any(|stay| stay.allowed) {
        return Ok(stays);
    }
    Err(refused.unwrap_or_else(|| no_host(snapshot)))
}

fn no_host(snapshot: &Snapshot) -> Refused {
    let allowed = snapshot.cluster.hosts.iter().filter(|h| may_start(&snapshot.job.start, h));
    let place = match &snapshot.job.start {
        Start::Anywhere => String::new(),
        Start::Site(site) => format!(" at site {site}"),
        Start::Host(host) => format!(" as host {host}"),
    };
    let why = match allowed.max_by_key(|h| h.memory_free_bytes) {
        None => format!("none is up{place}"),
        Some(host) => format!(
            "it needs {} of memory, and the most there is{place} is {} at {}",
            format_bytes(snapshot.job.memory_bytes),
            format_bytes(host.memory_free_bytes),
            host.id
        ),
    };
    Refused::NoHost(why)
}

fn may_start(start: &Start, host: &HostFacts) -> bool {
    match start {
        Start::Anywhere => true,
        Start::Site(site) => host.site == *site,
        Start::Host(id) => host.id == *id,
    }
}

/// What stays hidden behind computing was hidden in the measured runs as well, so the disk time
/// that exceeds `overlap_s` is waited for.
fn stay(
    snapshot: &Snapshot,
    work: &WorkProfile,
    host: &HostFacts,
    figures: &mut Figures,
) -> Result<Stay, Refused> {
    let mut io_here_s = 0.0;
    let mut io_home_s = 0.0;
    let mut rtt_ms: f64 = 0.0;
    let mut beside = true;
    for volume in &snapshot.job.volumes {
        if volume.home != host.id {
            beside = false;
            rtt_ms = rtt_ms.max(snapshot.cluster.link(&host.id, &volume.home)?.probe.rtt_ms);
        }
        let Some(on_volume) = work.volumes.get(&volume.volume) else { continue };
        io_home_s += on_volume.home_s();
        io_here_s += io_s(&snapshot.cluster, &host.id, &volume.home, on_volume, figures)?;
    }
    let waited = |io_s: f64| (io_s - work.overlap_s).max(0.0);
    let boot_s = host.boot_s.unwrap_or(work.boot_s);
    if boot_s == 0.0 {
        figures.assumed("starting the VM takes no time (the same for every way)");
    }
    let mut seconds = Seconds {
        boot_s,
        cpu_s: work.cpu_s,
        local_io_s: waited(io_home_s),
        network_s: waited(io_here_s) - waited(io_home_s),
        other_s: work.other_s,
        ..Seconds::default()
    };
    add_up(&mut seconds);
    Ok(Stay {
        host: host.id.clone(),
        allowed: may_start(&snapshot.job.start, host),
        way: if beside { Way::Beside } else { Way::Remote },
        seconds,
        rtt_ms,
    })
}

pub(crate) fn add_up(s: &mut Seconds) {
    s.total_s = s.boot_s + s.cpu_s + s.local_io_s + s.network_s + s.other_s + s.migration_s;
}

struct Candidate {
    option: PlanOption,
    /// Why it can't be done.
    impossible: Option<String>,
    rtt_ms: f64,
}

impl Candidate {
    fn new(way: Way, start: &Stay, end: &HostId, predicted: Seconds) -> Self {
        let (start, rtt_ms) = (start.host.clone(), start.rtt_ms);
        let end = end.clone();
        let reason = String::new();
        let option = PlanOption { way, start, end, predicted, chosen: false, reason };
        Self { option, impossible: None, rtt_ms }
    }
}

/// The fastest host to stay at; of equals the first, which is the least busy.
fn best_stay(stays: &[Stay], way: Way) -> Option<Candidate> {
    let of_way = stays.iter().filter(|s| s.way == way);
    let best = of_way.min_by(|a, b| {
        b.allowed.cmp(&a.allowed).then(a.seconds.total_s.total_cmp(&b.seconds.total_s))
    })?;
    let mut candidate = Candidate::new(way, best, &best.host, best.seconds);
    if !best.allowed {
        candidate.impossible = Some("the job file has it start elsewhere".to_owned());
    }
    Some(candidate)
}

fn best_move(
    snapshot: &Snapshot,
    work: &WorkProfile,
    stays: &[Stay],
    figures: &mut Figures,
) -> Option<Candidate> {
    let starts = stays.iter().filter(|s| s.allowed && s.way == Way::Remote);
    let pairs = starts.flat_map(|start| {
        let better = stays.iter().filter(|end| end.seconds.network_s < start.seconds.network_s);
        better.map(move |end| (start, end))
    });
    let moves = pairs.filter_map(|(start, end)| predict_move(snapshot, work, start, end));
    let (mut best, cost_figures) = moves
        .min_by(|a, b| a.0.option.predicted.total_s.total_cmp(&b.0.option.predicted.total_s))?;
    if snapshot.job.may_migrate {
        cost_figures.into_iter().for_each(|figure| figures.measured(figure));
        let start = &best.option.start;
        figures.assumed(&format!("after a move the root disk, left at {start}, is hardly read"));
    } else {
        best.impossible = Some("the job file says that it may not move".to_owned());
    }
    Some(best)
}

/// Remotely up to the moment at which a move would have saved its cost, then at the other host.
/// `None` when this move is not possible at all.
fn predict_move(
    snapshot: &Snapshot,
    work: &WorkProfile,
    start: &Stay,
    end: &Stay,
) -> Option<(Candidate, Vec<String>)> {
    let (here, there) = (&start.seconds, &end.seconds);
    let data_bytes: f64 = work.volumes.values().map(|v| v.bytes).sum();
    let dirty = Dirty::new(snapshot.job.dirty_bytes_per_s, data_bytes, here.total_s - here.boot_s);
    let memory_bytes = snapshot.job.memory_bytes;
    let cost =
        move_cost_with(&snapshot.cluster, &start.host, &end.host, memory_bytes, dirty).ok()?;
    let avoidable_s = here.network_s - there.network_s;
    let share_before = (cost.total_s / avoidable_s).min(1.0);
    let mut seconds = *here;
    seconds.network_s = here.network_s * share_before + there.network_s * (1.0 - share_before);
    seconds.migration_s = cost.total_s;
    add_up(&mut seconds);
    Some((Candidate::new(Way::Migrate, start, &end.host, seconds), cost.figures))
}

fn choose(
    mut candidates: Vec<Candidate>,
    basis: Basis,
    default_start: Option<HostId>,
    figures: Figures,
) -> Plan {
    // The sort is stable: of equals, the way that was put in first, a migration last.
    candidates.sort_by(|a, b| {
        let totals = a.option.predicted.total_s.total_cmp(&b.option.predicted.total_s);
        a.impossible.is_some().cmp(&b.impossible.is_some()).then(totals)
    });
    let reasons: Vec<String> = (0..candidates.len()).map(|i| reason(&candidates, i)).collect();
    for (candidate, reason) in candidates.iter_mut().zip(reasons) {
        candidate.option.reason = reason;
    }
    let mut options: Vec<PlanOption> = candidates.into_iter().map(|c| c.option).collect();
    let mut moves = false;
    if let Some(best) = options.first_mut() {
        best.chosen = true;
        moves = match best.way {
            Way::Migrate => true,
            Way::Beside => default_start.is_some_and(|start| start != best.start),
            Way::Remote => false,
        };
    }
    Plan { basis, options, figures: figures.into_vec(), moves }
}

/// Why the first is chosen, or why another one is not.
fn reason(candidates: &[Candidate], index: usize) -> String {
    let this = &candidates[index];
    if let Some(why) = &this.impossible {
        return format!("not possible: {why}");
    }
    let best = &candidates[0].option.predicted;
    let predicted = &this.option.predicted;
    if index > 0 {
        let longer = format_seconds(predicted.total_s - best.total_s);
        return format!("{longer} longer than {}", way_name(candidates[0].option.way));
    }
    let total = format_seconds(predicted.total_s);
    let Some(other) = candidates.get(1).filter(|c| c.impossible.is_none()) else {
        return format!("{total}; it is the only way");
    };
    let rtt_ms = this.rtt_ms.max(other.rtt_ms);
    let less_s = other.option.predicted.network_s - predicted.network_s;
    let instead = format!(
        "{total} instead of {} {}",
        format_seconds(other.option.predicted.total_s),
        way_name(other.option.way)
    );
    let waiting = if less_s >= 0.0 {
        format!("{} less waiting for the {rtt_ms:.1} ms link", format_seconds(less_s))
    } else {
        format!("a move would save {} of waiting for the link", format_seconds(-less_s))
    };
    let moving = match (predicted.migration_s, other.option.predicted.migration_s) {
        (paid, 0.0) if paid > 0.0 => format!(" costs {} to move", format_seconds(paid)),
        (0.0, saved) if saved > 0.0 && less_s < 0.0 => {
            format!(" and cost {}", format_seconds(saved))
        }
        (0.0, saved) if saved > 0.0 => format!(", and {} of moving saved", format_seconds(saved)),
        _ => String::new(),
    };
    format!("{instead}: {waiting}{moving}")
}

fn way_name(way: Way) -> &'static str {
    match way {
        Way::Remote => "remote",
        Way::Migrate => "migrate",
        Way::Beside => "beside",
    }
}
