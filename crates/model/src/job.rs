//! What the controller speaks: jobs, hosts, sites, links, and the cluster's images, volumes and VMs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::guest::LogStream;
use crate::phases::Phases;
use crate::plan::Estimate;
use crate::vm::{Accelerator, HostAddresses, LinkProbe, VmStatus};
use crate::volume::{BlockProbe, IoStats, VolumeSource};
use crate::{Epoch, HostId, ImageName, JobId, MigrationId, SiteId, VmId, VolumeName};

/// How a job uses a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Reads and writes the volume itself; one job at a time.
    #[default]
    Write,
    /// The disk is read-only.
    Read,
    /// Reads and writes a copy-on-write clone made at the volume's home, deleted after the job.
    Clone,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobVolume {
    pub volume: VolumeName,
    /// Where the job finds it.
    pub mount: String,
    pub access: Access,
}

/// Where the VM starts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// Wherever the planner predicts the earliest end.
    #[default]
    Anywhere,
    Site(SiteId),
    Host(HostId),
}

/// What becomes of a job whose host is gone after its VM was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Restart {
    /// It waits for its host, and goes on there.
    #[default]
    Never,
    /// It starts again from its beginning at another host, once the old host can write none of
    /// its volumes any more.
    OnHostFailure,
}

/// Whose a job is that names nobody.
pub const DEFAULT_OWNER: &str = "default";

fn default_owner() -> String {
    DEFAULT_OWNER.to_owned()
}

/// A job as it is submitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobSpec {
    /// Jobs of one name, image, command and volumes share a history: the planner learns from it.
    pub name: String,
    pub image: ImageName,
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub root_bytes: Option<u64>,
    pub output_bytes: u64,
    pub volumes: Vec<JobVolume>,
    pub outputs: Vec<String>,
    pub start: Start,
    /// Whether the planner may migrate the running VM.
    pub may_migrate: bool,
    pub timeout_s: Option<u64>,
    /// SHA-256 of a tar of the input files, uploaded before (`POST /v1/bundles`).
    pub inputs: Option<String>,
    /// Who submitted it. Owners share the cluster equally.
    #[serde(default = "default_owner")]
    pub owner: String,
    /// The higher, the sooner it starts; within a priority, owners take turns.
    #[serde(default)]
    pub priority: i32,
    #[serde(default)]
    pub restart: Restart,
}

/// ```text
/// queued -> staging -> starting -> running -> collecting -> succeeded | failed
///    <-________\__________\__________/   (its host is gone: placed again)
///    \_________\__________\__________\____________\-> failed | cancelled
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waits for a host with room.
    Queued,
    /// Volumes are being made and the seed written.
    Staging,
    /// The VM boots.
    Starting,
    Running,
    /// The command ended; outputs are fetched and the VM is taken down.
    Collecting,
    Succeeded,
    Failed,
    Cancelled,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
    pub label: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Job {
    pub id: JobId,
    pub spec: JobSpec,
    pub state: JobState,
    /// Why it waits or failed, in plain words.
    #[serde(default)]
    pub reason: String,
    /// While it is queued: its place in the queue, from 1 on.
    #[serde(default)]
    pub queue_place: Option<u32>,
    /// Where its VM is now.
    pub host: Option<HostId>,
    pub vm: Option<VmId>,
    pub exit_code: Option<i32>,
    pub progress: Option<Progress>,
    /// Unix time.
    pub submitted_ms: u64,
    pub started_ms: Option<u64>,
    /// The command started.
    pub running_ms: Option<u64>,
    pub ended_ms: Option<u64>,
    /// The planner's prediction for the way chosen at submission, from VM start to the command's end.
    #[serde(default)]
    pub predicted: Option<Estimate>,
    /// From VM start to the command's end.
    pub measured_s: Option<f64>,
    pub migrations: Vec<Migration>,
    pub output_bytes: Option<u64>,
}

/// ```text
/// preparing -> copying -> switching -> completed
///     \___________\___________\-> aborted (the VM runs at the source)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MigrationState {
    Preparing,
    Copying,
    Switching,
    Completed,
    Aborted,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    pub id: MigrationId,
    pub vm: VmId,
    pub from: HostId,
    pub to: HostId,
    pub state: MigrationState,
    /// Why the VM was moved.
    pub reason: String,
    /// Why it was aborted.
    #[serde(default)]
    pub error: String,
    pub started_ms: u64,
    pub ended_ms: Option<u64>,
    pub predicted_total_ms: Option<u64>,
    pub total_ms: u64,
    pub downtime_ms: u64,
    pub bytes: u64,
    /// The job's progress when the migration began, 0 to 1.
    pub job_progress: Option<f64>,
    /// The link to the destination, as last measured when the migration was asked for.
    #[serde(default)]
    pub link: Option<LinkProbe>,
    /// Where the time went, as far as it has come.
    #[serde(default)]
    pub phases: Phases,
    /// Memory that is not sent yet, the rate of sending, and how fast the guest changes its memory.
    #[serde(default)]
    pub remaining_bytes: u64,
    #[serde(default)]
    pub rate_bytes_per_s: u64,
    #[serde(default)]
    pub dirty_bytes_per_s: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    pub seq: u64,
    /// Since the guest booted.
    pub uptime_ms: u64,
    pub stream: LogStream,
    pub line: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    Up,
    /// It did not answer for some time; nothing is placed there.
    Unreachable,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Host {
    pub id: HostId,
    pub addresses: HostAddresses,
    pub state: HostState,
    pub cpus: u32,
    pub memory_bytes: u64,
    /// Memory of the VMs placed there.
    pub memory_used_bytes: u64,
    pub accelerator: Option<Accelerator>,
    #[serde(default)]
    pub cpu_model: String,
    pub warnings: Vec<String>,
    pub last_seen_ms: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Site {
    pub id: SiteId,
    pub hosts: Vec<HostId>,
}

/// What was measured from one host to another.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Link {
    pub from: HostId,
    pub to: HostId,
    pub probe: LinkProbe,
    /// Block reads at `from` of an export whose home is `to`.
    pub blocks: Option<BlockProbe>,
    pub measured_ms: u64,
}

/// A volume as the cluster knows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterVolume {
    pub name: VolumeName,
    pub home: HostId,
    pub size_bytes: u64,
    pub allocated_bytes: u64,
    pub epoch: Epoch,
    /// The job that has it open for writing.
    pub used_by: Option<JobId>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NewVolume {
    pub name: VolumeName,
    /// Its home; default: the source's home, else the host with the most room.
    #[serde(default)]
    pub host: Option<HostId>,
    #[serde(default)]
    pub size_bytes: Option<u64>,
    pub source: VolumeSource,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterImage {
    pub name: ImageName,
    pub size_bytes: u64,
    pub allocated_bytes: u64,
    /// Hosts that can use it.
    pub hosts: Vec<HostId>,
    /// What the hosts' copies together have not fetched yet.
    #[serde(default)]
    pub missing_bytes: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NewImage {
    pub name: ImageName,
    /// A path on the host that imports it.
    pub source: String,
    /// Where to import it first; every other host gets a copy. Default: any host.
    #[serde(default)]
    pub host: Option<HostId>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    pub id: VmId,
    pub job: Option<JobId>,
    pub host: HostId,
    pub status: VmStatus,
    #[serde(default)]
    pub reason: String,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub uptime_ms: u64,
    pub vcpu_ms: u64,
    pub migration: Option<MigrationId>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MoveVm {
    pub host: HostId,
}

/// An uploaded tar of input files, kept under its SHA-256.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bundle {
    pub sha256: String,
    pub bytes: u64,
}

/// One point of a job's time series.
///
/// `io` and `vcpu_ms` are sums over the whole job, over all its disks and over all hosts it was
/// on; they only grow. `io` counts at the volume server of the host where the VM is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Unix time.
    pub at_ms: u64,
    pub host: HostId,
    /// 0 to 1.
    pub progress: Option<f64>,
    pub io: IoStats,
    pub vcpu_ms: u64,
}

/// What `host remove --force` gave up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostRemoval {
    /// Volumes whose home it was: their data is lost to the cluster.
    pub lost_volumes: Vec<VolumeName>,
    /// Jobs that fail, because their VM or their data was there.
    pub failed_jobs: Vec<JobId>,
    /// Jobs that are placed again.
    pub placed_again: Vec<JobId>,
    /// Jobs whose VM was on its way from or to it: each goes on where its VM is found to run, or is
    /// treated as its `restart` says.
    #[serde(default)]
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
