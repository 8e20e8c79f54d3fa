//! What the planner is given: the cluster and the job as measured at one moment.

use perigee_model::job::Start;
use perigee_model::phases::Phases;
use perigee_model::vm::{Accelerator, LinkProbe};
use perigee_model::volume::{BlockProbe, IoStats};
use perigee_model::{HostId, SiteId, VolumeName};

use crate::{Refused, WorkProfile};

/// All that a plan for a job that has not started is made from.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The hosts and links.
    pub cluster: Cluster,
    /// The job to be planned.
    pub job: JobFacts,
    /// What earlier runs of the same job did; none for a new job.
    pub history: Option<WorkProfile>,
}

/// Hosts that are up, and what was measured between them.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// The hosts that are up.
    pub hosts: Vec<HostFacts>,
    /// Links between them; each has one direction.
    pub links: Vec<LinkFacts>,
    /// Request size of the block probes in `hosts` and `links`.
    pub probe_request_bytes: u64,
    /// Completed live migrations, of any VM: what the phases of a move take here beside its bytes.
    pub past_moves: Vec<PastMove>,
}

impl Cluster {
    pub(crate) fn host(&self, id: &HostId) -> Result<&HostFacts, Refused> {
        self.hosts.iter().find(|h| h.id == *id).ok_or_else(|| Refused::HostNotUp(id.clone()))
    }

    pub(crate) fn link(&self, from: &HostId, to: &HostId) -> Result<&LinkFacts, Refused> {
        let measured = || self.links.iter().filter(|link| link.is_measured());
        let site = |id: &HostId| self.host(id).ok().map(|host| &host.site);
        let of_sites = |link: &&LinkFacts| {
            site(from) == Some(&link.from_site) && site(to) == Some(&link.to_site)
        };
        // One pair of hosts is measured for each pair of sites.
        measured()
            .find(|l| l.from == *from && l.to == *to)
            .or_else(|| measured().find(of_sites))
            .ok_or_else(|| Refused::LinkNotMeasured { from: from.clone(), to: to.clone() })
    }
}

/// A host that is up.
#[derive(Debug, Clone)]
pub struct HostFacts {
    /// The host's name.
    pub id: HostId,
    /// The site it is in.
    pub site: SiteId,
    /// Its CPUs.
    pub cpus: u32,
    /// Memory that a new VM can have.
    pub memory_free_bytes: u64,
    /// VMs that run on it now.
    pub running_vms: u32,
    /// A job may start there now.
    pub takes_jobs: bool,
    /// How its CPUs run VMs. A VM moves only between hosts with the same accelerator.
    pub accelerator: Accelerator,
    /// Empty where it is not known.
    pub cpu_model: String,
    /// From VM start to the command's start, as measured in the last runs there.
    pub boot_s: Option<f64>,
    /// Block reads at this host of an export whose home it is.
    pub local_blocks: Option<BlockProbe>,
}

impl HostFacts {
    /// Whether a VM that runs here can go on at another host: its processor must look the same to it.
    /// TCG makes its own processor, KVM shows the host's.
    ///
    /// # Errors
    /// [`Refused`] with what differs.
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

/// One direction: `probe` is `from` reading from `to`, `blocks` is `from` reading an export whose
/// home is `to`.
#[derive(Debug, Clone)]
pub struct LinkFacts {
    /// The host that reads.
    pub from: HostId,
    /// The host that is read from.
    pub to: HostId,
    /// The site of `from`.
    pub from_site: SiteId,
    /// The site of `to`.
    pub to_site: SiteId,
    /// Round-trip time and rate of the network.
    pub probe: LinkProbe,
    /// Round-trip time and rate of block reads, if they were measured.
    pub blocks: Option<BlockProbe>,
}

impl LinkFacts {
    fn is_measured(&self) -> bool {
        self.probe.rtt_ms.is_finite() && self.probe.rtt_ms >= 0.0 && self.probe.rate_bytes_per_s > 0
    }
}

/// A completed live migration.
#[derive(Debug, Clone)]
pub struct PastMove {
    /// The VM's memory.
    pub memory_bytes: u64,
    /// The rate and RTT of the link as probed before that move, not as they are now.
    pub rate_bytes_per_s: u64,
    /// Round-trip time of that link, in milliseconds.
    pub rtt_ms: f64,
    /// Where its time went.
    pub phases: Phases,
}

/// A job that has not started.
#[derive(Debug, Clone)]
pub struct JobFacts {
    /// Memory of its VM.
    pub memory_bytes: u64,
    /// Where it may start.
    pub start: Start,
    /// Whether its VM may be moved while it runs.
    pub may_migrate: bool,
    /// Its data volumes.
    pub volumes: Vec<VolumeFacts>,
    /// How fast the job dirties memory, if an earlier migration of it measured that.
    pub dirty_bytes_per_s: Option<u64>,
}

/// A data volume of a job that has not started.
#[derive(Debug, Clone)]
pub struct VolumeFacts {
    /// The volume's name.
    pub volume: VolumeName,
    /// The host that has its data.
    pub home: HostId,
    /// Bytes that hold data: what a job can read at most.
    pub allocated_bytes: u64,
}

/// A job while its command runs.
///
/// Every figure counts from the moment the VM came to `host`: its command's start there, or the end of the migration that
/// brought it. So each move starts the figures from zero.
#[derive(Debug, Clone)]
pub struct Running {
    /// The hosts and links.
    pub cluster: Cluster,
    /// Where the VM runs now.
    pub host: HostId,
    /// Memory of the VM.
    pub memory_bytes: u64,
    /// vCPUs of the VM.
    pub cpus: u32,
    /// Whether the VM may be moved.
    pub may_migrate: bool,
    /// Live migrations of this job so far.
    pub moves: u32,
    /// How fast the job changes its memory, if an earlier migration of it measured that.
    pub dirty_bytes_per_s: Option<u64>,
    /// Time since the VM came to `host`, in seconds.
    pub wall_s: f64,
    /// vCPU time in `wall_s`, the sum over all vCPUs, in seconds.
    pub vcpu_s: f64,
    /// Its data volumes.
    pub disks: Vec<DiskFacts>,
}

/// One disk of a VM: its volume's counters, as differences over the time looked at.
#[derive(Debug, Clone)]
pub struct DiskFacts {
    /// The volume's name.
    pub volume: VolumeName,
    /// The host that has its data.
    pub home: HostId,
    /// Measured by the volume servers of the hosts where the VM ran; added up if there were several.
    pub client: IoStats,
    /// Measured at the volume's home; equal to `client` while the VM runs there.
    pub at_home: IoStats,
}
