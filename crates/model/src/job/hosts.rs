//! Hosts, sites and links as the controller knows them, and what was given up with a host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::balance::PlacePolicy;
use crate::drain::HostDrain;
use crate::lease::{HostLease, HostNotice};
use crate::load::{HostPressure, VcpuUse};
use crate::measurement::HostMeasurement;
use crate::vm::{Accelerator, HostAddresses, LinkProbe};
use crate::volume::BlockProbe;
use crate::waiting::Waiting;
use crate::{HostId, JobId, SiteId, VolumeName};

/// Whether a host's agent answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    /// It answered lately.
    Up,
    /// It did not answer for some time; nothing is placed there.
    Unreachable,
}

/// A host as the controller knows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Unique in the cluster; its agent was started with this name.
    pub id: HostId,
    /// Where its daemons listen.
    pub addresses: HostAddresses,
    /// Whether it answers.
    pub state: HostState,
    /// The host's own CPUs, as last reported; 0 until it has reported.
    pub cpus: u32,
    /// The host's own memory, as last reported; 0 until it has reported.
    pub memory_bytes: u64,
    /// Memory of the VMs placed there.
    pub memory_used_bytes: u64,
    /// What can be used of its memory without swapping, as last reported; `None` if that is not known.
    pub memory_available_bytes: Option<u64>,
    /// Tasks that run or wait there, mean of a minute, as last reported; `None` if that is not known.
    pub load_1min: Option<f64>,
    /// How many of its CPUs are in use, mean of the last minute, as last reported; `None` if that is not known.
    pub cpus_used_1m: Option<f64>,
    /// What its tasks wait for, as last reported.
    pub pressure: HostPressure,
    /// What the VMs there do with its CPUs, those together whose figures are known; `None` if those of no VM are, or if none is
    /// there.
    pub vcpus_1m: Option<VcpuUse>,
    /// Free bytes of its pool, as last reported; `None` if that is not known.
    pub pool_free_bytes: Option<u64>,
    /// The size of the filesystem that its pool is on, as last reported; `None` if that is not known.
    #[serde(default)]
    pub pool_size_bytes: Option<u64>,
    /// What its VMs run with; `None` until it has reported.
    pub accelerator: Option<Accelerator>,
    /// As the processor names itself: under KVM a VM moves only between hosts with equal ones.
    pub cpu_model: String,
    /// What this host cannot do, in plain words; see [`crate::vm::HostReport::warnings`].
    pub warnings: Vec<String>,
    /// Its parts that do not answer, its agent and its volume server, each by itself.
    pub waits: Vec<Waiting>,
    /// How far its drain is; `None` if it is not drained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<HostDrain>,
    /// That it ends itself without its controller, as last reported; `None` if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<HostLease>,
    /// That its provider takes it back, as last reported; `None` if no such thing was heard there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice: Option<HostNotice>,
    /// What was measured of it, or else of another host of its kind; `None` in lists, and if nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measurement: Option<HostMeasurement>,
    /// When its agent answered last; Unix time of the controller.
    pub last_seen_ms: u64,
}

/// Hosts with fast links between them.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Site {
    /// Unique in the cluster.
    pub id: SiteId,
    /// The hosts that registered with this site.
    pub hosts: Vec<HostId>,
    /// Which of these gets a VM, where several are as good for it.
    #[serde(default)]
    pub place: PlacePolicy,
}

/// What was measured from one host to another.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Link {
    /// The host that measured.
    pub from: HostId,
    /// The host that answered.
    pub to: HostId,
    /// Round trip and rate of TCP between the two agents.
    pub probe: LinkProbe,
    /// Block reads at `from` of an export whose home is `to`.
    pub blocks: Option<BlockProbe>,
    /// When; Unix time of the controller.
    pub measured_ms: u64,
}

/// What `host remove --force` gave up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostRemoval {
    /// Volumes whose home it was: their data is lost to the cluster.
    pub lost_volumes: Vec<VolumeName>,
    /// Volumes that it had become the home of: each is what it was when its move began, at its old home.
    pub returned_volumes: Vec<VolumeName>,
    /// Volumes that were moving away from it: what their new home had not copied yet is lost.
    pub incomplete_volumes: Vec<VolumeName>,
    /// Jobs that fail, because their VM or their data was there.
    pub failed_jobs: Vec<JobId>,
    /// Jobs that are placed again.
    pub placed_again: Vec<JobId>,
    /// Jobs whose VM was on its way from or to it: each goes on where its VM is found to run, or is
    /// treated as its `restart` says.
    pub moving_jobs: Vec<JobId>,
}

impl HostRemoval {
    /// One sentence for each kind of loss.
    pub fn in_words(&self) -> Vec<String> {
        let names = |names: Vec<&str>| names.join(", ");
        let mut words = Vec::new();
        if !self.lost_volumes.is_empty() {
            let lost = names(self.lost_volumes.iter().map(VolumeName::as_str).collect());
            words.push(format!("the data of these volumes is lost: {lost}"));
        }
        if !self.returned_volumes.is_empty() {
            let returned = names(self.returned_volumes.iter().map(VolumeName::as_str).collect());
            words.push(format!(
                "what was written to these volumes since they began to move there is lost: {returned}"
            ));
        }
        if !self.incomplete_volumes.is_empty() {
            let parts = names(self.incomplete_volumes.iter().map(VolumeName::as_str).collect());
            words.push(format!(
                "the parts of these volumes that were not copied from there yet are lost: {parts}"
            ));
        }
        if !self.failed_jobs.is_empty() {
            let failed = names(self.failed_jobs.iter().map(JobId::as_str).collect());
            words.push(format!("these jobs fail: {failed}"));
        }
        if !self.placed_again.is_empty() {
            let again = names(self.placed_again.iter().map(JobId::as_str).collect());
            words.push(format!("these jobs start again elsewhere: {again}"));
        }
        if !self.moving_jobs.is_empty() {
            let moving = names(self.moving_jobs.iter().map(JobId::as_str).collect());
            words.push(format!("the VMs of these jobs may be lost on their way: {moving}"));
        }
        words
    }
}
