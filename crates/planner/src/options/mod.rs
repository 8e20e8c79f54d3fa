//! The ways to run a job that has not started, with their predicted times.

use std::cmp::Reverse;

use perigee_model::job::Start;
use perigee_model::plan::{Estimate, Part, Plan, PlanOption, Seconds, Unknown, Way};
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::{HostId, SiteId};

use crate::cpu_load::{load_factor, why_busy};
use crate::facts::{HostFacts, Snapshot, VolumeFacts};
use crate::figures::Figures;
use crate::hosts::{boot, cpu_factor};
use crate::learn::{Learned, Place, Source};
use crate::refused::Refused;
use crate::spread::Spread;

/// Compares the ways to run a job, and chooses the one that is predicted to end first.
///
/// Each [`Way`] is predicted for its best hosts. Ways that are not possible come last, with the reason (migration
/// is not allowed, the job may not start at the data, or others use its volume). `migrate`, `follow` and `copy`
/// keep to the rule of [`crate::consider`]: the VM runs remotely until the time that the change would have saved
/// reaches a threshold. This time is lost before it.
///
/// # Errors
/// [`Refused`] if no host has room, a volume's home is not up, or a link is not measured.
pub fn plan(snapshot: &Snapshot) -> Result<Plan, Refused> {
    let mut figures = Figures::default();
    for volume in &snapshot.job.volumes {
        if snapshot.cluster.host(&volume.home).is_err() {
            let (volume, home) = (volume.volume.clone(), volume.home.clone());
            return Err(Refused::HomeNotUp { volume, home });
        }
    }
    let learned = Learned::of(snapshot, &mut figures)?;
    let stays = stays(snapshot, &learned, &mut figures)?;
    let mut candidates: Vec<Candidate> = [Way::Beside, Way::Replica, Way::Remote]
        .into_iter()
        .filter_map(|way| best_stay(&stays, way))
        .collect();
    candidates.extend(changes::best_moves(snapshot, &learned, &stays, &mut figures));
    candidates.extend(changes::best_copy(snapshot, &learned, &stays, &mut figures));
    let default_start = stays.iter().find(|s| s.refused.is_none()).map(|s| s.host.clone());
    Ok(choose(candidates, &learned, default_start, figures))
}

/// The whole job on one host.
struct Stay {
    host: HostId,
    /// Why the job may not start there.
    refused: Option<String>,
    way: Way,
    place: Place,
    boot: Spread,
    seconds: Seconds,
    total: Spread,
    rtt_ms: f64,
    unknown: Vec<Unknown>,
    /// Why its replica does not count; empty if there is none, or if it counts.
    replica_not_used: String,
    /// Why computing takes longer there than at an idle host; empty if it does not.
    busy: String,
    /// The host's site, if its hosts are filled one after the other.
    packs: Option<SiteId>,
}

/// One entry for each host with room and measured links, the least busy host first; of a site that packs, the fullest one.
fn stays(
    snapshot: &Snapshot,
    learned: &Learned,
    figures: &mut Figures,
) -> Result<Vec<Stay>, Refused> {
    let needed_bytes = snapshot.job.memory_bytes;
    let mut hosts: Vec<&HostFacts> =
        snapshot.cluster.hosts.iter().filter(|h| h.memory_free_bytes >= needed_bytes).collect();
    hosts.sort_by_key(|h| (vcpus_per_cpu(h), Reverse(h.memory_free_bytes), h.id.clone()));
    packing::fullest_first(&mut hosts);
    let mut refused = None;
    let mut stays = Vec::new();
    for host in hosts {
        match stay(snapshot, learned, host, figures) {
            Ok(stay) => stays.push(stay),
            Err(why) if why_not_start(&snapshot.job.start, host).is_none() => refused = Some(why),
            Err(_) => {}
        }
    }
    if stays.iter().any(|stay| stay.refused.is_none()) {
        return Ok(stays);
    }
    Err(refused.unwrap_or_else(|| no_host(snapshot)))
}

/// In thousandths, as an integer so that it can be compared.
fn vcpus_per_cpu(host: &HostFacts) -> u64 {
    u64::from(host.running_vcpus) * 1000 / u64::from(host.cpus.max(1))
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
            "it needs {} of memory, and the most that is free{place} is {} at {}",
            format_bytes(snapshot.job.memory_bytes),
            format_bytes(host.memory_free_bytes),
            host.id
        ),
    };
    Refused::NoHost(why)
}

/// Why the job may not start at a host.
fn why_not_start(start: &Start, host: &HostFacts) -> Option<String> {
    match start {
        Start::Site(site) if !is_allowed(start, host) => {
            Some(format!("its file lets the job start only at site {site}"))
        }
        Start::Host(only) if !is_allowed(start, host) => {
            Some(format!("its file lets the job start only at host {only}"))
        }
        _ if !host.takes_jobs => {
            let why = "is drained, has no room, has VMs beside which the job is not to be, starts as many VMs as it can, or is kept for an earlier one";
            Some(format!("host {} takes no job now: it {why}", host.id))
        }
        _ => None,
    }
}

/// Whether the job file lets it start there.
fn is_allowed(start: &Start, host: &HostFacts) -> bool {
    match start {
        Start::Anywhere => true,
        Start::Site(site) => host.site == *site,
        Start::Host(id) => host.id == *id,
    }
}

/// The range of a prediction assumes that a job reads what has changed since a replica at most this many times more often
/// than the rest.
const CHANGED_READ_MORE: f64 = 8.0;

fn sources(volumes: &[VolumeFacts], far_share: impl Fn(&VolumeFacts) -> f64) -> Vec<Source<'_>> {
    let source = |volume| Source { far_share: far_share(volume), home: &volume.home };
    volumes.iter().map(source).collect()
}

fn stay(
    snapshot: &Snapshot,
    learned: &Learned,
    host: &HostFacts,
    figures: &mut Figures,
) -> Result<Stay, Refused> {
    let cluster = &snapshot.cluster;
    let mut rtt_ms: f64 = 0.0;
    let homes: Vec<&HostId> = snapshot.job.volumes.iter().map(|volume| &volume.home).collect();
    for home in homes.iter().filter(|home| **home != &host.id) {
        rtt_ms = rtt_ms.max(cluster.link(&host.id, home)?.probe.rtt_ms);
    }
    let volumes = &snapshot.job.volumes;
    let share = |volume: &VolumeFacts| volume.copy.far_share(&host.id);
    let has_replica = volumes.iter().any(|volume| volume.home != host.id && share(volume) < 1.0);
    let place = learned.place(cluster, host, &sources(volumes, share), figures)?;
    let (boot, boot_unknown) = boot(cluster, host, &snapshot.job.traits.image);
    let (command, mut of_command) = learned.at(&place);
    let is_remote = place.round_trip_s > 0.0;
    let mut unknown: Vec<Unknown> = boot_unknown.into_iter().collect();
    if has_replica && is_remote {
        figures.assumed("a job reads what has changed since a replica as often as the rest");
        let why = "how much it reads of what has changed since the replica is not known".to_owned();
        unknown.push(Unknown { part: Part::Network, why });
        let mut if_it_reads = |times: f64| {
            let share = |volume: &VolumeFacts| (times * share(volume)).min(1.0);
            let place = learned.place(cluster, host, &sources(volumes, share), figures)?;
            Ok::<_, Refused>(learned.at(&place).1.expected - of_command.expected)
        };
        let (less, more) = (if_it_reads(0.0)?, if_it_reads(CHANGED_READ_MORE)?);
        of_command = of_command.plus(Spread::between(less, 0.0, more)).at_least(0.0);
    }
    unknown.extend(cpu_factor(cluster, &host.id).1);
    unknown
        .extend(learned.unknown.iter().filter(|u| is_remote || u.part != Part::Network).cloned());
    Ok(Stay {
        host: host.id.clone(),
        refused: why_not_start(&snapshot.job.start, host),
        way: match homes.iter().all(|home| **home == host.id) {
            true => Way::Beside,
            false if has_replica => Way::Replica,
            false => Way::Remote,
        },
        place,
        boot,
        seconds: Seconds { boot_s: boot.expected, ..command }.added_up(),
        total: boot.together(of_command),
        rtt_ms,
        unknown,
        replica_not_used: replica_not_used(volumes, &host.id),
        busy: busy(host, snapshot.job.traits.cpus, figures),
        packs: host.packs.then(|| host.site.clone()),
    })
}

/// Why computing takes longer at the host. That, or that it is not known, is said among the plan's figures too.
fn busy(host: &HostFacts, vcpus: u32, figures: &mut Figures) -> String {
    let busy = why_busy(host, vcpus);
    if !busy.is_empty() {
        let times = load_factor(host, vcpus).expected;
        figures.measured(format!("{busy}, so computing there takes {times:.1} times as long"));
    } else if host.cpu_load.is_none() && host.running_vcpus > 0 {
        let (vcpus, id) = (host.running_vcpus, &host.id);
        figures.assumed(&format!(
            "the {vcpus} vCPUs of the VMs at {id} compute half of the time, because how busy {id} is was not measured"
        ));
    }
    busy
}

fn replica_not_used(volumes: &[VolumeFacts], host: &HostId) -> String {
    let mut others = volumes.iter().filter(|volume| volume.home != *host).filter_map(|volume| {
        let writer = volume.copy.replica_not_used(host)?;
        Some(format!(
            "the replica of volume {} at {host} is not used, because {writer} writes the volume, and no other host reads \
             it from a replica meanwhile",
            volume.volume
        ))
    });
    others.next().unwrap_or_default()
}

#[derive(Clone)]
struct Candidate {
    option: PlanOption,
    /// Why it is not possible.
    impossible: Option<String>,
    /// As in [`Stay`], of the host where it starts.
    replica_not_used: String,
    busy: String,
    rtt_ms: f64,
    place: Place,
    boot: Spread,
    migration: Spread,
}

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
        };
        let (place, boot, rtt_ms) = (start.place, start.boot, start.rtt_ms);
        let (replica_not_used, busy) = (start.replica_not_used.clone(), start.busy.clone());
        let migration = Spread::default();
        Self { option, impossible: None, replica_not_used, busy, rtt_ms, place, boot, migration }
    }

    /// How much longer it takes than another; the parts that both have cancel out.
    fn longer(&self, other: &Self, learned: &Learned) -> Spread {
        let mut apart = learned.longer(&self.place, &other.place);
        if self.option.start != other.option.start {
            apart = apart.plus(self.boot).plus(other.boot.times(-1.0));
        }
        let apart = apart.plus(self.migration).plus(other.migration.times(-1.0));
        let expected = self.option.predicted.total_s - other.option.predicted.total_s;
        Spread { expected, ..apart }
    }
}

/// The fastest host to stay at. Of equally fast hosts it is the first, which is the least busy; at a site that packs, of those that are almost
/// as fast.
fn best_stay(stays: &[Stay], way: Way) -> Option<Candidate> {
    let of_way = stays.iter().filter(|s| s.way == way);
    let best = of_way.min_by(|a, b| {
        let (a_is_last, b_is_last) = (a.refused.is_some(), b.refused.is_some());
        a_is_last.cmp(&b_is_last).then(a.seconds.total_s.total_cmp(&b.seconds.total_s))
    })?;
    let best = packing::fullest_as_fast(stays, best);
    let mut candidate = Candidate::new(way, best, &best.host);
    candidate.impossible.clone_from(&best.refused);
    Some(candidate)
}

fn choose(
    mut candidates: Vec<Candidate>,
    learned: &Learned,
    default_start: Option<HostId>,
    figures: Figures,
) -> Plan {
    // The sort is stable: of equal ways the one that was added first wins, and a migration is added last.
    candidates.sort_by(changes::by_time);
    let with_its_host = |index: usize| {
        let Candidate { replica_not_used, busy, .. } = &candidates[index];
        let said = [&reason(&candidates, index), replica_not_used, busy];
        let said = said.into_iter().filter(|text| !text.is_empty()).map(String::as_str);
        said.collect::<Vec<_>>().join("; ")
    };
    let reasons: Vec<String> = (0..candidates.len()).map(with_its_host).collect();
    let longer: Vec<Estimate> =
        candidates.iter().map(|c| c.longer(&candidates[0], learned).estimate()).collect();
    for (index, (candidate, reason)) in candidates.iter_mut().zip(reasons).enumerate() {
        candidate.option.reason = reason;
        // What is not possible takes no time.
        let is_other = index > 0 && candidate.impossible.is_none();
        candidate.option.longer = is_other.then_some(longer[index]);
    }
    let mut options: Vec<PlanOption> = candidates.into_iter().map(|c| c.option).collect();
    let mut moves = false;
    if let Some(best) = options.first_mut() {
        best.chosen = true;
        moves = match best.way {
            Way::Migrate | Way::Follow | Way::Copy => true,
            Way::Beside | Way::Replica => default_start.is_some_and(|start| start != best.start),
            Way::Remote => false,
        };
    }
    Plan { basis: learned.basis, options, figures: figures.into_vec(), moves }
}

/// Why the first way is chosen, or why another one is not.
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

mod changes;
mod packing;

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
