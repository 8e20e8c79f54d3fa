//! The planner's input: the cluster and the job as they were measured at one moment.

use std::sync::Arc;

use perigee_model::budget::Spending;
use perigee_model::job::Start;
use perigee_model::load::VcpuUse;
use perigee_model::money::{Money, Price};
use perigee_model::phases::Phases;
use perigee_model::plan::{Estimate, Way};
use perigee_model::vm::{Accelerator, LinkProbe};
use perigee_model::volume::{BlockProbe, IoStats};
use perigee_model::{HostId, SiteId, VolumeName};
use serde::{Deserialize, Serialize};

use crate::gangs::GangFacts;
use crate::index::Indexed;
use crate::measured::MeasuredHost;
use crate::{PastRun, Refused, Traits};

/// The input for the plan of a job that has not started.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The hosts where the job could run.
    pub cluster: Cluster,
    /// The job that has not started.
    pub job: JobFacts,
    /// Earlier runs of jobs with its image and command, the newest last; none for a new job.
    pub history: Vec<PastRun>,
    /// The newest run of each of some other kinds of jobs. They show what jobs of this cluster are like.
    pub others: Vec<PastRun>,
}

/// What a plan needs to know of a job that has not started, beside the cluster. The fields are those of [`Snapshot`].
#[derive(Debug, Clone)]
pub struct Prepared {
    /// The job.
    pub job: JobFacts,
    /// Its earlier runs.
    pub history: Vec<PastRun>,
    /// Runs of other kinds of jobs.
    pub others: Vec<PastRun>,
}

/// The hosts that are up, and the measurements between them.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// Each host once, in any order.
    pub hosts: Indexed<HostFacts>,
    /// One pair of hosts represents its two sites. A direction without a link is not measured.
    pub links: Indexed<LinkFacts>,
    /// The request size of the block probes in `hosts` and `links`.
    pub probe_request_bytes: u64,
    /// Completed live migrations of any VM. They show how long the phases of a move take, beside the bytes.
    pub past_moves: Arc<Vec<PastMove>>,
}

impl Cluster {
    /// Builds the indexes now, so that all copies share them.
    #[must_use]
    pub fn indexed(self) -> Self {
        self.hosts.index();
        self.links.index();
        self
    }

    /// How busy the host's CPUs are.
    pub fn set_cpu_load(&mut self, host: &HostId, cpu_load: Option<CpuLoad>) {
        let Some(number) = self.hosts.index().number(host) else { return };
        self.hosts.beside_index()[number].cpu_load = cpu_load;
    }

    /// How migrations share each link, by its hosts: `from` and `to`.
    pub fn set_moves(&mut self, moves: impl Fn(&HostId, &HostId) -> LinkForMoves) {
        for link in self.links.beside_index() {
            link.moves = moves(&link.from, &link.to);
        }
    }

    pub(crate) fn host(&self, id: &HostId) -> Result<&HostFacts, Refused> {
        let number = self.hosts.index().number(id);
        number.map(|number| &self.hosts[number]).ok_or_else(|| Refused::HostNotUp(id.clone()))
    }

    /// Whether both hosts are at one site. A host that is not up is at none.
    pub(crate) fn is_one_site(&self, one: &HostId, other: &HostId) -> bool {
        matches!((self.host(one), self.host(other)), (Ok(one), Ok(other)) if one.site == other.site)
    }

    pub(crate) fn link(&self, from: &HostId, to: &HostId) -> Result<&LinkFacts, Refused> {
        let index = self.links.index();
        let probed = |number: usize| &self.links[number];
        // One pair of hosts is measured for each pair of sites.
        let of_others = || {
            let (from, to) = (self.host(from).ok()?, self.host(to).ok()?);
            let of_sites = || index.between_sites(&from.site, &to.site).map(probed);
            HostFacts::link_of_kind(from, to).or_else(of_sites)
        };
        let link = index.between_hosts(from, to).map(probed).or_else(of_others);
        link.ok_or_else(|| Refused::LinkNotMeasured { from: from.clone(), to: to.clone() })
    }

    /// Lets jobs start at these hosts only. What is known of the hosts' names and sites is kept, as by all that follows.
    pub fn start_only_at(&mut self, hosts: &[HostId]) {
        let index = self.hosts.index();
        let numbers: Vec<usize> = hosts.iter().filter_map(|host| index.number(host)).collect();
        let all = self.hosts.beside_index();
        all.iter_mut().for_each(|host| host.takes_jobs = false);
        numbers.into_iter().for_each(|number| all[number].takes_jobs = true);
    }

    /// The host as if a VM ran there too. Returns what it was before, for [`Self::leave`].
    pub fn occupy(&mut self, host: &HostId, cpus: u32, memory_bytes: u64) -> Option<Before> {
        let number = self.hosts.index().number(host)?;
        let host = &mut self.hosts.beside_index()[number];
        let (running_vcpus, memory_free_bytes) = (host.running_vcpus, host.memory_free_bytes);
        host.running_vcpus = running_vcpus.saturating_add(cpus);
        host.memory_free_bytes = memory_free_bytes.saturating_sub(memory_bytes);
        Some(Before { number, running_vcpus, memory_free_bytes })
    }

    /// The vCPUs of the VMs that are placed at the host now, and the memory that is free there.
    pub fn set_placed(&mut self, host: &HostId, running_vcpus: u32, memory_free_bytes: u64) {
        let Some(number) = self.hosts.index().number(host) else { return };
        let host = &mut self.hosts.beside_index()[number];
        host.running_vcpus = running_vcpus;
        host.memory_free_bytes = memory_free_bytes;
    }

    /// The host as it was before a VM came. Of several VMs the last one leaves first.
    pub(crate) fn leave(&mut self, before: &Before) {
        let host = &mut self.hosts.beside_index()[before.number];
        host.running_vcpus = before.running_vcpus;
        host.memory_free_bytes = before.memory_free_bytes;
    }
}

/// What a host had before a VM came.
#[derive(Debug)]
pub struct Before {
    number: usize,
    running_vcpus: u32,
    memory_free_bytes: u64,
}

/// A host that is up.
#[derive(Debug, Clone)]
pub struct HostFacts {
    /// Unique in the snapshot.
    pub id: HostId,
    /// All hosts of one site are equally far from those of another.
    pub site: SiteId,
    /// The host's own CPUs.
    pub cpus: u32,
    /// The memory that is free for VMs, without the host's reserve and the demands of the VMs that are placed
    /// there.
    pub memory_free_bytes: u64,
    /// The vCPUs of the VMs that are placed there now.
    pub running_vcpus: u32,
    /// How busy its CPUs are; `None` if that is not known.
    pub cpu_load: Option<CpuLoad>,
    /// Whether a job may start there now.
    pub takes_jobs: bool,
    /// Of the hosts of its site that are as good for a job, the fullest one gets the job, and not the least busy one.
    pub packs: bool,
    /// What runs the VMs there.
    pub accelerator: Accelerator,
    /// Empty if it is not known.
    pub cpu_model: String,
    /// The last boots of jobs' VMs there.
    pub boots: Arc<Vec<Boot>>,
    /// Block reads at this host from an export whose home is this host.
    pub local_blocks: Option<BlockProbe>,
    /// The bytes that are free on the disk of its volume server; `None` if that is not known.
    pub pool_free_bytes: Option<u64>,
    /// What it costs; `None` if it is the users' own and nobody has to be paid for it. Hosts that cost the same share one.
    pub price: Option<Arc<Price>>,
    /// What was measured of it, or of another host of its kind; `None` if nothing was. Hosts of one kind share one.
    pub measured: Option<Arc<MeasuredHost>>,
}

/// How busy a host's CPUs were in the last minute. In facts about one running VM, that VM's vCPUs are left out, and at its host the
/// pressure too, of which the VM makes a part.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuLoad {
    /// The vCPUs of those VMs there whose load is known.
    pub measured_vcpus: u32,
    /// What these vCPUs did.
    pub vcpus_1m: VcpuUse,
    /// The share of the time in which a task of the host waited for a CPU; `None` if that is not known.
    pub pressure_share: Option<f64>,
}

impl HostFacts {
    /// The same for hosts that share a price, and 0 for those without one.
    pub(crate) fn price_number(&self) -> usize {
        self.price.as_ref().map_or(0, |price| Arc::as_ptr(price).addr())
    }

    /// Whether a VM that runs here can continue at another host: the guest must see the same processor. TCG
    /// emulates its own processor; KVM shows the host's.
    ///
    /// # Errors
    /// [`Refused`] with the difference.
    pub fn can_send_to(&self, other: &Self) -> Result<(), Refused> {
        let refuse = |why| {
            let (from, to) = (self.id.clone(), other.id.clone());
            Err(Refused::ProcessorDiffers { from, to, why })
        };
        if self.accelerator != other.accelerator {
            let (here, there) = (self.accelerator, other.accelerator);
            return refuse(format!("VMs run with {here:?} at one and with {there:?} at the other"));
        }
        let known = !self.cpu_model.is_empty() && !other.cpu_model.is_empty();
        if self.accelerator == Accelerator::Kvm && known && self.cpu_model != other.cpu_model {
            return refuse(format!("{:?} is not {:?}", self.cpu_model, other.cpu_model));
        }
        Ok(())
    }
}

/// One boot of a job's VM, from its start to the command's start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Boot {
    /// The image that was booted.
    pub image: String,
    /// Its wall time.
    pub seconds: f64,
    /// Its vCPU time.
    pub cpu_s: f64,
}

/// The link in one direction. `probe` is `from` reading from `to`; `blocks` is `from` reading an export whose
/// home is `to`.
#[derive(Debug, Clone)]
pub struct LinkFacts {
    /// The host that sends requests and receives the bytes.
    pub from: HostId,
    /// The host that answers.
    pub to: HostId,
    /// The site of `from`.
    pub from_site: SiteId,
    /// The site of `to`.
    pub to_site: SiteId,
    /// RTT in milliseconds and rate of one TCP stream. It counts as not measured when its rate is 0 or its
    /// RTT is negative or not finite.
    pub probe: LinkProbe,
    /// Block reads over the link; `None` if they were not measured.
    pub blocks: Option<BlockProbe>,
    /// How a migration from `to` to `from` shares the link.
    pub moves: LinkForMoves,
}

/// How a migration shares its link with others.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkForMoves {
    /// The time until the migrations before it have ended; `None` if that is not known.
    pub wait_s: Option<f64>,
    /// The rate that it may have on the link; `None` if no VM uses its disks over it.
    pub max_bytes_per_s: Option<u64>,
}

impl LinkFacts {
    /// The rate that a migration from `to` to `from` has on the link. Above 0.
    pub(crate) fn rate_for_moves(&self) -> f64 {
        let rate = self.probe.rate_bytes_per_s;
        self.moves.max_bytes_per_s.map_or(rate, |most| most.clamp(1, rate)) as f64
    }

    pub(crate) fn is_measured(&self) -> bool {
        self.probe.rtt_ms.is_finite() && self.probe.rtt_ms >= 0.0 && self.probe.rate_bytes_per_s > 0
    }
}

/// A completed live migration.
#[derive(Debug, Clone, Default)]
pub struct PastMove {
    /// The VM's memory.
    pub memory_bytes: u64,
    /// The rate of the link as probed before that move, not as it is now.
    pub rate_bytes_per_s: u64,
    /// The RTT of the link before that move; at least 0.
    pub rtt_ms: f64,
    /// The rate that it could have on the link; `None` if no other VM used its disks over it.
    pub max_bytes_per_s: Option<u64>,
    /// Whether its memory was sent compressed. The bytes of its phases are those before compression.
    pub compressed: bool,
    /// How long its phases took.
    pub phases: Phases,
}

/// A job that has not started.
#[derive(Debug, Clone)]
pub struct JobFacts {
    /// The properties by which earlier runs are compared with it.
    pub traits: Traits,
    /// The memory of its VM.
    pub memory_bytes: u64,
    /// Where the job file lets it start.
    pub start: Start,
    /// Whether the job file lets its VM move.
    pub may_migrate: bool,
    /// It uses data that may not leave their site: its memory, which has some of them, is not sent to another
    /// site over a link that is not encrypted.
    pub uses_confined: bool,
    /// Its data volumes, in the order of the job file.
    pub volumes: Vec<VolumeFacts>,
    /// How fast the job changes its memory, if an earlier migration of it has measured that.
    pub dirty_bytes_per_s: Option<u64>,
    /// What counts for its price.
    pub money: MoneyFacts,
    /// What is known of its VMs, if it has several ones. The other facts are those of each VM, with all volumes.
    pub gang: Option<Arc<GangFacts>>,
}

/// What counts for the price of a job that has not started. Of a job with several VMs: for each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MoneyFacts {
    /// The most that the VM may cost.
    pub budget: Option<Money>,
    /// What the job's earlier runs have cost. The budget is what is left without that.
    pub spent: Money,
    /// How many VMs the job has, which share its budget; 0 and 1 are one.
    pub vms: u32,
    /// The budget of its tenant for the month, and what is gone of that; `None` if it has none.
    pub month: Option<(Money, Spending)>,
    /// The time from now until the job is to end; below 0 if that is over.
    pub deadline_s: Option<f64>,
    /// What an hour until its end is worth.
    pub waiting_per_hour: Option<Money>,
    /// The size of its root and output disks; `None` if it is not known.
    pub disk_bytes: Option<u64>,
    /// The command is ended after so many seconds.
    pub timeout_s: Option<u64>,
    /// The machine is paid for so long before the VM's start: from its request on, if it is rented for the job.
    pub paid_before: Estimate,
}

impl MoneyFacts {
    /// So much time has passed.
    pub(crate) fn pass_s(&mut self, seconds: f64) {
        self.deadline_s = self.deadline_s.map(|left_s| left_s - seconds);
    }

    /// The budget of all VMs, of which each has this part.
    pub(crate) fn whole_budget(&self, part: Money) -> Money {
        part.of(u64::from(self.vms.max(1)), 1)
    }
}

/// A data volume of a job that has not started.
#[derive(Debug, Clone)]
pub struct VolumeFacts {
    /// The name in the job file.
    pub volume: VolumeName,
    /// The host that has its data.
    pub home: HostId,
    /// The bytes that it holds; 0 if that is not known yet.
    pub allocated_bytes: u64,
    /// The job writes nothing to it.
    pub only_read: bool,
    /// How its home could move to the VM's host while the job runs.
    pub copy: CopyFacts,
}

/// How a volume's home could move to the host of a VM that uses it.
#[derive(Debug, Clone, Default)]
pub struct CopyFacts {
    /// The bytes that it would at most ship.
    pub bytes: u64,
    /// Hosts that have a part of it, with the bytes that they lack: those with a complete replica.
    pub lacking: Vec<(HostId, u64)>,
    /// A host where another VM writes it, away from its home. While one host writes a volume, no other reads it from its
    /// replica or keeps its blocks in memory.
    pub written_at: Option<HostId>,
    /// The sites with a replica of it, complete or not. It is not copied to one of them, because no other site would
    /// have a copy of it then.
    pub replica_sites: Vec<SiteId>,
    /// It may not leave its site.
    pub confined: bool,
    /// Why it stays wherever the VM is; `None` if it need not.
    pub stays: Option<String>,
}

impl CopyFacts {
    /// The share of its reads that its home would answer if the VM is at this host: 1 without a replica there, or if
    /// another host writes it.
    pub(crate) fn far_share(&self, host: &HostId) -> f64 {
        if self.bytes == 0 || self.replica_not_used(host).is_some() {
            return 1.0;
        }
        self.bytes_to(host) as f64 / self.bytes as f64
    }

    /// The other host that writes it, because of which a replica at this host is not used.
    pub(crate) fn replica_not_used(&self, host: &HostId) -> Option<&HostId> {
        let has_replica = self.lacking.iter().any(|(at, _)| at == host);
        self.written_at.as_ref().filter(|writer| has_replica && *writer != host)
    }

    pub(crate) fn bytes_to(&self, host: &HostId) -> u64 {
        let lacked = self.lacking.iter().find(|(at, _)| at == host).map(|(_, bytes)| *bytes);
        lacked.map_or(self.bytes, |lacked| lacked.min(self.bytes))
    }
}

/// A job while its command runs.
///
/// Every figure counts from the VM's arrival at `host` (its command's start there, or the end of the migration
/// that brought it). After a move all of them start at 0 again.
#[derive(Debug, Clone)]
pub struct Running {
    /// The hosts where the VM could go.
    pub cluster: Cluster,
    /// The properties by which earlier runs are compared with it.
    pub traits: Traits,
    /// Earlier runs of such jobs, the newest last.
    pub history: Vec<PastRun>,
    /// As [`Snapshot::others`].
    pub others: Vec<PastRun>,
    /// The progress of the whole job, 0 to 1, as its command last reported it.
    pub progress: Option<f64>,
    /// The same when the VM arrived at this host.
    pub progress_at_arrival: f64,
    /// Requests to the data volumes since the command's start, at all hosts.
    pub requests: f64,
    /// Where the VM runs now.
    pub host: HostId,
    /// The migration that has begun; `None` if there is none.
    pub moving: Option<Moving>,
    /// The memory of the VM.
    pub memory_bytes: u64,
    /// The vCPUs of the VM.
    pub cpus: u32,
    /// Whether the job file lets the VM move.
    pub may_migrate: bool,
    /// A host at the site of data that the VM uses and that may not leave this site; `None` if it uses no such data.
    pub confined_to: Option<HostId>,
    /// Changes that were refused a short time ago: they are not made now.
    pub refused: Vec<RefusedWay>,
    /// Live migrations of this job, and volumes that came to its VM, so far.
    pub moves: u32,
    /// So many times its cost the next change must save: what [`crate::balance::Accounts`] says after the VM's changes so far; 1 without any.
    pub price_factor: f64,
    /// How fast the VM changes its memory, measured by a migration of this job, or else of an earlier run.
    pub dirty_bytes_per_s: Option<u64>,
    /// Wall time since the VM came to `host`.
    pub wall_s: f64,
    /// vCPU time since then, summed over all vCPUs.
    pub vcpu_s: f64,
    /// For how long since then the vCPU that waited longest was ready to run and had no CPU; `None` if that is not known.
    pub run_delay_s: Option<f64>,
    /// Its data volumes, without the root disk.
    pub disks: Vec<DiskFacts>,
}

/// A migration of a running VM.
#[derive(Debug, Clone)]
pub struct Moving {
    /// Where it takes the VM.
    pub to: HostId,
    /// How long it still takes; `None` if that is not known.
    pub left_s: Option<f64>,
}

/// A change that was refused a short time ago.
#[derive(Debug, Clone)]
pub struct RefusedWay {
    /// [`Way::Migrate`] or [`Way::Copy`].
    pub way: Way,
    /// The host to which the VM or its data would have come. The same change to another host is not refused.
    pub to: HostId,
    /// Why, in plain words.
    pub why: String,
}

/// What is missing of a volume that comes to its VM's host.
#[derive(Debug, Clone)]
pub struct StillToCome {
    /// The host that has it.
    pub from: HostId,
    /// At most so much.
    pub bytes: u64,
}

/// One disk of a VM: the differences of its volume's counters over a period.
#[derive(Debug, Clone)]
pub struct DiskFacts {
    /// The name in the job file.
    pub volume: VolumeName,
    /// The host that has the volume's data.
    pub home: HostId,
    /// The counters at the hosts where the VM ran, summed over these hosts.
    pub client: IoStats,
    /// The counters at the volume's home; equal to `client` while the VM runs there.
    pub at_home: IoStats,
    /// The requests of `client` while the home was another host, whether they were answered from memory or not.
    pub far_requests: u64,
    /// How its home could move to the VM's host now.
    pub copy: CopyFacts,
    /// What of it is still to come, if it is on its way to the VM's host.
    pub coming: Option<StillToCome>,
    /// Time in which requests to the home waited and none was answered, because the link or the home was down.
    pub outage_ns: u64,
}
