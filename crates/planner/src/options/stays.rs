//! The whole job on one host.

use perigee_model::job::Start;
use perigee_model::plan::{Part, Seconds, Unknown, Way};
use perigee_model::units::format_bytes;
use perigee_model::{HostId, SiteId};

use super::alike::{self, Close};
use crate::cpu_load::{load_factor, why_busy};
use crate::facts::{Cluster, HostFacts, JobFacts, Snapshot, VolumeFacts};
use crate::figures::Figures;
use crate::hosts::{Boots, cpu_factor};
use crate::learn::{Learned, Place, Source};
use crate::refused::Refused;
use crate::spread::Spread;

/// The whole job on one host.
pub(super) struct Stay {
    pub host: HostId,
    /// Why the job may not start there.
    pub refused: Option<String>,
    /// Whether moves to it are looked at.
    pub may_be_end: bool,
    pub way: Way,
    pub place: Place,
    pub boot: Spread,
    /// Without the boot.
    pub command: Spread,
    pub seconds: Seconds,
    pub total: Spread,
    pub rtt_ms: f64,
    pub unknown: Vec<Unknown>,
    /// Why its replica does not count; empty if there is none, or if it counts.
    pub replica_not_used: String,
    /// Why computing takes longer there than at an idle host; empty if it does not.
    pub busy: String,
    /// The host's site, if its hosts are filled one after the other.
    pub packs: Option<SiteId>,
    /// As [`HostFacts::price_number`].
    pub price: usize,
}

/// One entry for each host that is looked at closely, the least busy host first; of a site that packs, the fullest one.
/// Hosts without room, or whose links are not measured, have none.
pub(super) fn stays(
    snapshot: &Snapshot,
    learned: &Learned,
    all_up_to: usize,
    figures: &mut Figures,
) -> Result<Vec<Stay>, Refused> {
    let mut refused = None;
    let mut stays = Vec::new();
    let boots = Boots::of(&snapshot.cluster, &snapshot.job.traits.image);
    for close in alike::looked_at(snapshot, learned, &boots, all_up_to) {
        let host = &snapshot.cluster.hosts[close.number];
        let (cluster, job) = (&snapshot.cluster, &snapshot.job);
        match stay((cluster, job), learned, &boots, close, figures) {
            Ok(stay) => stays.push(stay),
            Err(why) if may_start(&snapshot.job.start, host) => refused = Some(why),
            Err(_) => {}
        }
    }
    if stays.iter().any(|stay| stay.refused.is_none()) {
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

/// Whether [`why_not_start`] has no reason.
pub(super) fn may_start(start: &Start, host: &HostFacts) -> bool {
    host.takes_jobs && is_allowed(start, host)
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

pub(super) fn sources(
    volumes: &[VolumeFacts],
    far_share: impl Fn(&VolumeFacts) -> f64,
) -> Vec<Source<'_>> {
    let source = |volume| Source { far_share: far_share(volume), home: &volume.home };
    volumes.iter().map(source).collect()
}

/// How the job gets to its data if the whole of it runs at this host.
pub(super) fn way_at(volumes: &[VolumeFacts], host: &HostId) -> Way {
    let mut far = volumes.iter().filter(|volume| volume.home != *host).peekable();
    if far.peek().is_none() {
        return Way::Beside;
    }
    match far.any(|volume| volume.copy.far_share(host) < 1.0) {
        true => Way::Replica,
        false => Way::Remote,
    }
}

/// At one host, whether there is room or not.
pub(super) fn stay(
    (cluster, job): (&Cluster, &JobFacts),
    learned: &Learned,
    boots: &Boots,
    close: Close,
    figures: &mut Figures,
) -> Result<Stay, Refused> {
    let host = &cluster.hosts[close.number];
    let mut rtt_ms: f64 = 0.0;
    let homes: Vec<&HostId> = job.volumes.iter().map(|volume| &volume.home).collect();
    for home in homes.iter().filter(|home| **home != &host.id) {
        rtt_ms = rtt_ms.max(cluster.link(&host.id, home)?.probe.rtt_ms);
    }
    let volumes = &job.volumes;
    let share = |volume: &VolumeFacts| volume.copy.far_share(&host.id);
    let way = way_at(volumes, &host.id);
    let place = learned.place(cluster, host, &sources(volumes, share), figures)?;
    let (boot, boot_unknown) = boots.at(close.number, host);
    let (command, mut of_command) = learned.at(&place);
    let is_remote = place.round_trip_s > 0.0;
    let mut unknown: Vec<Unknown> = boot_unknown.into_iter().collect();
    if way == Way::Replica && is_remote {
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
        refused: why_not_start(&job.start, host),
        may_be_end: close.may_be_end,
        way,
        place,
        boot,
        command: of_command,
        seconds: Seconds { boot_s: boot.expected, ..command }.added_up(),
        total: boot.together(of_command),
        rtt_ms,
        unknown,
        replica_not_used: replica_not_used(volumes, &host.id),
        busy: busy(host, job.traits.cpus, figures),
        packs: host.packs.then(|| host.site.clone()),
        price: host.price_number(),
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
