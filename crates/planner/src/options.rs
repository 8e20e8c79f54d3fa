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
    // VMs by CPU, in thousandths: integers compare without surprises.
    let busy = |h: &HostFacts| u64::from(h.running_vms) * 1000 / u64::from(h.cpus.max(1));
    hosts.sort_by_key(|h| (busy(h), Reverse(h.memory_free_bytes), h.id.clone()));
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
    let allowed = snapshot.cluster.hosts.iter().filter(|h| is_allowed(&snapshot.job.start, h));
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
    host.takes_jobs && is_allowed(start, host)
}

/// The job file lets it start there.
fn is_allowed(start: &Start, host: &HostFacts) -> bool {
    match start {
        Start::Anywhere => true,
        Start::Site(site) => host.site == *site,
        Start::Host(id) => host.id == *id,
    }
}

/// Of the disk time, the share that was hidden behind computing in the measured runs is hidden
/// again, as long as there is computing to hide behind; the rest is waited for:
///
/// ```text
/// waited = io - min(io * overlap share, cpu)
/// ```
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
    let overlap_share = work.overlap_share();
    let waited = |io_s: f64| io_s - (io_s * overlap_share).min(work.cpu_s);
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
        candidate.impossible =
            Some("the job may not start there: by its file, or the host is full".to_owned());
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
    let mut refused = None;
    let moves = pairs.filter_map(|(start, end)| {
        predict_move(snapshot, work, start, end)
            .map_err(|why| refused = Some((start, end, why)))
            .ok()
    });
    let best =
        moves.min_by(|a, b| a.0.option.predicted.total_s.total_cmp(&b.0.option.predicted.total_s));
    let Some((mut best, cost_figures)) = best else {
        // Only where the hosts cannot exchange a VM at all is that worth a line of its own.
        let (start, end, why) = refused?;
        matches!(why, Refused::ProcessorDiffers { .. }).then_some(())?;
        let mut candidate = Candidate::new(Way::Migrate, start, &end.host, start.seconds);
        candidate.impossible = Some(why.to_string());
        return Some(candidate);
    };
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
///
/// # Errors
/// [`Refused`] when this move is not possible at all.
fn predict_move(
    snapshot: &Snapshot,
    work: &WorkProfile,
    start: &Stay,
    end: &Stay,
) -> Result<(Candidate, Vec<String>), Refused> {
    let (here, there) = (&start.seconds, &end.seconds);
    let data_bytes: f64 = work.volumes.values().map(|v| v.bytes).sum();
    let dirty = Dirty::new(snapshot.job.dirty_bytes_per_s, data_bytes, here.total_s - here.boot_s);
    let memory_bytes = snapshot.job.memory_bytes;
    let cost = move_cost_with(&snapshot.cluster, &start.host, &end.host, memory_bytes, dirty)?;
    let avoidable_s = here.network_s - there.network_s;
    let share_before = (cost.total_s / avoidable_s).min(1.0);
    let mut seconds = *here;
    seconds.network_s = here.network_s * share_before + there.network_s * (1.0 - share_before);
    seconds.migration_s = cost.total_s;
    add_up(&mut seconds);
    Ok((Candidate::new(Way::Migrate, start, &end.host, seconds), cost.figures))
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
    let other_s = &other.option.predicted;
    let less_s = other_s.network_s - predicted.network_s;
    let waiting = format!(
        "{} less waiting for the {:.1} ms link",
        format_seconds(less_s.max(0.0)),
        this.rtt_ms.max(other.rtt_ms)
    );
    let why = if predicted.migration_s > 0.0 {
        format!("{waiting} costs {} to move", format_seconds(predicted.migration_s))
    } else if other_s.migration_s > 0.0 && this.option.way == Way::Remote {
        let (cost, saved) = (other_s.migration_s, (-less_s).max(0.0));
        format!("a move costs {} and saves {}", format_seconds(cost), format_seconds(saved))
    } else {
        waiting
    };
    let other_total = format_seconds(other_s.total_s);
    format!("{total} instead of {other_total} {}: {why}", way_name(other.option.way))
}

fn way_name(way: Way) -> &'static str {
    match way {
        Way::Remote => "remote",
        Way::Migrate => "migrate",
        Way::Beside => "beside",
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::SiteId;
    use proptest::prelude::*;

    use super::*;
    use crate::fixture::*;

    fn snapshot(reads: f64) -> Snapshot {
        Snapshot { cluster: cluster(), job: job(), history: Some(history(reads)) }
    }

    fn at_site_home(reads: f64) -> Snapshot {
        let mut snapshot = snapshot(reads);
        snapshot.job.start = Start::Site(SiteId::new("home").unwrap());
        snapshot
    }

    fn option(plan: &Plan, way: Way) -> &PlanOption {
        plan.options.iter().find(|o| o.way == way).unwrap()
    }

    #[test]
    fn a_job_that_may_start_anywhere_starts_beside_its_data() {
        let mut snapshot = snapshot(2500.0);
        snapshot.cluster.hosts[2].running_vms = 1;
        let plan = plan(&snapshot).unwrap();
        let best = &plan.options[0];
        assert_eq!((best.way, best.start.as_str()), (Way::Beside, "cloud1"));
        assert!(best.chosen && plan.moves);
        assert_close(best.predicted.total_s, 12.0 + 20.0 + 0.5 + 1.0);
        assert_close(option(&plan, Way::Remote).predicted.network_s, 40.5);
    }

    #[test]
    fn a_job_that_starts_far_from_its_data_is_migrated() {
        let plan = plan(&at_site_home(2500.0)).unwrap();
        let best = &plan.options[0];
        assert_eq!((best.way, best.end.as_str()), (Way::Migrate, "cloud1"));
        assert!(best.chosen && plan.moves);
        // By the rule, as much is lost before the move as the move costs.
        assert_close(best.predicted.migration_s, 4.192);
        assert_close(best.predicted.network_s, 4.192);
        assert_eq!(
            best.reason,
            "42 s instead of 74 s remote: 36 s less waiting for the 16.0 ms link costs 4.2 s to move"
        );
        let beside = plan.options.last().unwrap();
        assert_eq!(beside.way, Way::Beside);
        assert!(beside.reason.starts_with("not possible"), "{}", beside.reason);
    }

    #[test]
    fn no_move_is_proposed_between_hosts_whose_processors_differ() {
        let mut snapshot = at_site_home(2500.0);
        snapshot.cluster.hosts[2].cpu_model = "Xeon".to_owned();
        let plan = plan(&snapshot).unwrap();
        assert_eq!(plan.options[0].way, Way::Remote);
        let reason = &option(&plan, Way::Migrate).reason;
        assert!(reason.contains("not possible") && reason.contains("\"EPYC\" is not \"Xeon\""));
    }

    #[test]
    fn a_host_that_takes_no_jobs_now_is_not_started_at() {
        let mut snapshot = snapshot(2500.0);
        snapshot.cluster.hosts[2].takes_jobs = false;
        let plan = plan(&snapshot).unwrap();
        assert_eq!(plan.options[0].way, Way::Migrate, "it may still be moved there");
    }

    #[test]
    fn a_job_that_loses_less_than_a_move_costs_stays_remote() {
        let plan = plan(&at_site_home(100.0)).unwrap();
        assert_eq!(plan.options[0].way, Way::Remote);
        assert!(!plan.moves);
        assert_eq!(
            plan.options[0].reason,
            "35 s instead of 39 s migrate: a move costs 4.2 s and saves 0 s"
        );
    }

    #[test]
    fn a_job_that_may_not_move_stays_remote() {
        let mut snapshot = at_site_home(2500.0);
        snapshot.job.may_migrate = false;
        let plan = plan(&snapshot).unwrap();
        assert_eq!(plan.options[0].way, Way::Remote);
        assert!(option(&plan, Way::Migrate).reason.contains("may not move"));
        assert!(!plan.moves);
    }

    #[test]
    fn a_job_bound_to_the_data_s_host_moves_nothing() {
        let mut snapshot = snapshot(2500.0);
        snapshot.job.start = Start::Host(host_id("cloud1"));
        let plan = plan(&snapshot).unwrap();
        assert_eq!((plan.options[0].way, plan.moves), (Way::Beside, false));
    }

    #[test]
    fn without_history_one_pass_over_the_data_is_assumed_and_said() {
        let mut snapshot = at_site_home(0.0);
        snapshot.history = None;
        let plan = plan(&snapshot).unwrap();
        assert_eq!(plan.basis, Basis::OnePass);
        assert!(plan.figures.iter().any(|f| f.starts_with("assumed: one pass over the data")));
        assert!(plan.figures.contains(&"volume data at cloud1 holds 256 MiB".to_owned()));
        // 2048 reads of 128 KiB: 16.2 ms for the link and 120 KiB more than the probe read.
        let longer_s = 120.0 / 1024.0 / 128.0;
        let network_s = option(&plan, Way::Remote).predicted.network_s;
        assert_close(network_s, 2048.0 * (0.0162 + longer_s));
    }

    #[test]
    fn what_overlapped_with_computing_stays_hidden() {
        let mut snapshot = snapshot(2500.0);
        let history = snapshot.history.as_mut().unwrap();
        history.overlap_s = 0.5;
        history.volumes.get_mut(&volume_name("data")).unwrap().busy_s = 0.5;
        let plan = plan(&snapshot).unwrap();
        assert_close(option(&plan, Way::Beside).predicted.local_io_s, 0.0);
        // The computing of 20 s hides no more than 20 s.
        assert_close(option(&plan, Way::Remote).predicted.network_s, 41.0 - 20.0);
    }

    #[test]
    fn of_equal_hosts_the_least_busy_is_taken() {
        let mut snapshot = at_site_home(10.0);
        snapshot.cluster.hosts[0].running_vms = 1;
        assert_eq!(plan(&snapshot).unwrap().options[0].start.as_str(), "home2");
    }

    #[test]
    fn no_room_is_a_refusal_with_figures() {
        let mut snapshot = at_site_home(10.0);
        snapshot.cluster.hosts.iter_mut().for_each(|h| h.memory_free_bytes = 100 * MIB);
        let refused = plan(&snapshot).unwrap_err().to_string();
        assert_eq!(
            refused,
            "no host can take the job: it needs 512 MiB of memory, and the most there is at site \
             home is 100 MiB at home2"
        );
    }

    #[test]
    fn a_home_that_is_not_up_is_a_refusal() {
        let mut snapshot = snapshot(10.0);
        snapshot.cluster.hosts.retain(|h| h.id.as_str() != "cloud1");
        assert!(matches!(plan(&snapshot), Err(Refused::HomeNotUp { .. })));
    }

    #[test]
    fn a_link_that_is_not_measured_is_a_refusal() {
        let mut snapshot = at_site_home(10.0);
        snapshot.cluster.links.clear();
        assert!(matches!(plan(&snapshot), Err(Refused::LinkNotMeasured { .. })));
    }

    #[test]
    fn a_job_with_data_at_two_sites_equally_gains_nothing_by_a_move() {
        let mut snapshot = at_site_home(500.0);
        let mut other = snapshot.job.volumes[0].clone();
        (other.volume, other.home) = (volume_name("other"), host_id("home1"));
        snapshot.job.volumes.push(other);
        let history = snapshot.history.as_mut().unwrap();
        let work = history.volumes[&volume_name("data")];
        history.volumes.insert(volume_name("other"), work);
        let plan = plan(&snapshot).unwrap();
        assert_eq!((plan.options[0].way, plan.options[0].start.as_str()), (Way::Remote, "home1"));
    }

    proptest! {
        #[test]
        fn parts_add_up_and_the_best_possible_is_chosen(
            reads in 0.0..1e6f64,
            cpu_s in 0.0..1e4f64,
            overlap_s in 0.0..1e3f64,
            busy_s in 0.0..1e3f64,
            rtt_ms in 0.0..500.0f64,
            rate in 1u64..1 << 40,
            dirty in proptest::option::of(0u64..1 << 32),
        ) {
            let mut snapshot = at_site_home(reads);
            snapshot.job.dirty_bytes_per_s = dirty;
            for link in &mut snapshot.cluster.links {
                link.probe = perigee_model::vm::LinkProbe { rtt_ms, rate_bytes_per_s: rate };
            }
            let history = snapshot.history.as_mut().unwrap();
            (history.cpu_s, history.overlap_s) = (cpu_s, overlap_s);
            history.volumes.values_mut().for_each(|work| work.busy_s = busy_s);
            let plan = plan(&snapshot).unwrap();
            prop_assert_eq!(plan.options.iter().filter(|o| o.chosen).count(), 1);
            for option in &plan.options {
                let s = &option.predicted;
                let parts = [s.boot_s, s.cpu_s, s.local_io_s, s.network_s, s.other_s, s.migration_s];
                prop_assert!(parts.iter().all(|p| p.is_finite() && *p >= 0.0), "{:?}", s);
                prop_assert!((parts.iter().sum::<f64>() - s.total_s).abs() < 1e-6);
                let possible = !option.reason.starts_with("not possible");
                prop_assert!(!possible || plan.options[0].predicted.total_s <= s.total_s);
            }
        }
    }
}
