//! What the controller speaks: jobs, hosts, sites, links, and the cluster's images, volumes and VMs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::amounts::{CpuAmount, MemoryAmount};
use crate::budget::{JobCost, MoneyRules};
use crate::gang::moving::GangMove;
use crate::guest::{CommandEnd, LeftOut, LogStream};
use crate::labels::Labels;
use crate::load::VmLoad;
use crate::network::Publish;
use crate::persistent_vm::{NewVm, VmState};
use crate::phases::{Phases, PredictedPhases, copy_left_s};
use crate::plan::{Estimate, PredictedEnd};
use crate::vm::{Firmware, LinkProbe, NetworkKind};
use crate::volume::IoStats;
use crate::volume_move::{VolumeMove, VolumesOnMove};
use crate::waiting::Waiting;
use crate::{
    HostId, HostRules, ImageName, JobId, LeaveSite, MigrationId, SiteId, VmId, VolumeName,
};

mod catalog;
mod hosts;

pub use catalog::{
    AdoptVm, AdoptVolume, ClusterImage, ClusterVolume, EndUnknownVm, NewImage, NewVolume,
    ReplicateImage, Unknown, UnknownKind,
};
pub use hosts::{Host, HostRemoval, HostState, Link, Site};

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

/// A volume that a job uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobVolume {
    /// The volume's name in the cluster. A job names each volume once.
    pub volume: VolumeName,
    /// Where the job finds it.
    pub mount: String,
    /// Whether the job changes it.
    pub access: Access,
    /// Which VMs of a job with several ones have it, by their ranks; empty: all of them. A volume that is written is in one VM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,
}

impl JobVolume {
    /// Whether the VM with this rank has it.
    pub fn is_of_rank(&self, rank: u32) -> bool {
        self.ranks.is_empty() || self.ranks.contains(&rank)
    }
}

/// Where the VM starts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// Wherever the planner predicts the earliest end.
    #[default]
    Anywhere,
    /// At whichever host of the site the planner predicts the earliest end.
    Site(SiteId),
    /// At this host and no other: the job waits until it has room.
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

/// What becomes of a job if the guest's kernel has killed one of its processes because no memory was left, and the command goes on
/// without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OomKill {
    /// It fails when its command has ended, whatever its code is.
    #[default]
    Fail,
    /// Only the command's code counts.
    Ignore,
}

/// Processes of a job that the guest's kernel has killed because no memory was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OomKills {
    /// How many.
    pub processes: u64,
    /// The memory that all programs of the guest have together.
    pub memory_bytes: u64,
}

/// How long a process has between SIGTERM and SIGKILL whose job's file does not say it.
pub const STOP_GRACE_S_DEFAULT: u64 = 10;

pub(crate) fn default_stop_grace_s() -> u64 {
    STOP_GRACE_S_DEFAULT
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
    /// What the root disk is a clone of.
    pub image: ImageName,
    /// The program and its arguments, run in `/job` as root; the program's name is looked up in
    /// `PATH`. See [`crate::limits::COMMAND_BYTES`].
    pub command: Vec<String>,
    /// The environment of the command. A name has letters, digits and `_`, and no digit first.
    pub env: BTreeMap<String, String>,
    /// vCPUs of the VM, as many as [`crate::limits::CPUS`] allows.
    pub cpus: u32,
    /// The VM has so many vCPUs. While others want its host's CPUs, they have the part of `cpus` of them; `None`: no more than `cpus`.
    #[serde(default)]
    pub cpus_max: Option<u32>,
    /// Memory of the VM, as much as [`crate::limits::MEMORY_BYTES`] allows.
    pub memory_bytes: u64,
    /// While it runs and its host and its tenant's quota have it, the VM gets up to so much memory; `None`: no more than `memory_bytes`.
    #[serde(default)]
    pub memory_max_bytes: Option<u64>,
    /// The size of the root disk, at least the image's; `None`: the image's.
    pub root_bytes: Option<u64>,
    /// The size of the output disk: as much as the tar of all outputs can take.
    pub output_bytes: u64,
    /// `/output` in the VM is to have room for as much. Where `root_bytes` says nothing, the root disk is so much larger than its image.
    #[serde(default)]
    pub has_output_room: bool,
    /// The job's data disks, at most [`crate::limits::JOB_VOLUMES`].
    pub volumes: Vec<JobVolume>,
    /// Files and directories in the VM that go into the repository at the end; none: `/output`. A path is absolute, or
    /// relative to the job's directory, and may be a pattern with `*`, `?`, `[…]` and `**`.
    pub outputs: Vec<String>,
    /// Where they go: `repo://TENANT/PATH` of the job's own tenant, or a path in its files; `None`: `jobs/JOB`.
    #[serde(default)]
    pub outputs_to: Option<String>,
    /// After so many seconds from the job's end what it has in `jobs/JOB` is deleted; `None`: as the controller is told,
    /// which keeps it until somebody deletes it.
    #[serde(default)]
    pub keep_outputs_s: Option<u64>,
    /// Where the VM may start.
    pub start: Start,
    /// Whether the planner may migrate the running VM.
    pub may_migrate: bool,
    /// Whether what the job writes may leave the site of confined data that it uses. If not, its root disk and its
    /// output are confined to that site.
    #[serde(default = "never")]
    pub writes: LeaveSite,
    /// Whether VMs of a job with several VMs may be at other sites than the confined data that they use. They read the data there without keeping
    /// any, and say to each other what they say through the encrypted tunnels between hosts.
    #[serde(default = "never")]
    pub ranks: LeaveSite,
    /// The command is ended after so many seconds from its start, so without the VM's boot; `None`: never.
    pub timeout_s: Option<u64>,
    /// A process that is to end, for whatever reason, gets SIGTERM, and SIGKILL so many seconds later.
    #[serde(default = "default_stop_grace_s")]
    pub stop_grace_s: u64,
    /// Whether it fails when one of its processes is killed because no memory is left.
    #[serde(default)]
    pub oom_kill: OomKill,
    /// SHA-256 of the list of its inputs ([`crate::inputs::InputList`] in JSON), which is the file `.inputs/SHA256` of
    /// the job's tenant in the data repository. Uploaded files that it names are `.inputs/SHA256` too, each under its
    /// own hash.
    pub inputs: Option<String>,
    /// Who submitted it: the user, where a token says that. Tenants share the cluster equally, and their users share
    /// their tenant's part.
    #[serde(default = "default_owner")]
    pub owner: String,
    /// The higher, the sooner it starts; within a priority, owners take turns.
    #[serde(default)]
    pub priority: i32,
    /// What becomes of it when its host is lost.
    #[serde(default)]
    pub restart: Restart,
    /// Its VM's network card. A job with one uses no data that may not leave its site.
    #[serde(default)]
    #[schema(value_type = String)]
    pub network: NetworkKind,
    /// Ports of its VM that are reached from outside, as `8080:80`, at the host that has its network's gateway. The network has a
    /// way out.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub publish: Vec<Publish>,
    /// How many VMs it has ([`crate::gang`]).
    #[serde(default = "one")]
    pub count: u32,
    /// Only the first of its VMs runs the command. The others are there, with an SSH server, until it has ended.
    #[serde(default)]
    pub mpi: bool,
    /// What boots its root disk.
    #[serde(default)]
    pub firmware: Firmware,
    /// Its VM has a TPM 2.0, which is new at each start and goes with the VM's disks.
    #[serde(default)]
    pub tpm: bool,
    /// Beside which other VMs of its tenant its VMs are, and beside which never. Those of a job with several ones keep the rules among
    /// themselves too.
    #[serde(default)]
    pub rules: HostRules,
    /// What it may cost, and by when it is to end.
    #[serde(default)]
    pub money: MoneyRules,
}

impl JobSpec {
    /// The vCPUs that its VM has.
    pub fn cpus_most(&self) -> u32 {
        self.cpus_max.unwrap_or(self.cpus)
    }
}

fn never() -> LeaveSite {
    LeaveSite::Never
}

fn one() -> u32 {
    1
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
    /// The command runs.
    Running,
    /// The command ended; outputs are fetched and the VM is taken down.
    Collecting,
    /// The command ended with code 0, and its outputs are stored.
    Succeeded,
    /// The command ended with another code, or the job could not go on; [`Job::reason`] says why.
    Failed,
    /// Somebody cancelled it. It may have outputs, of what its command had done.
    Cancelled,
}

/// How far a command is, as it says itself.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// How many of `total` are done, in whatever the command counts.
    pub done: u64,
    /// What `done` will be at the end; the command may correct it.
    pub total: u64,
    /// What the command does now, in its own words; may be empty.
    pub label: String,
}

/// A job as the API shows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Unique among all jobs that the controller ever had.
    pub id: JobId,
    /// As it was submitted.
    pub spec: JobSpec,
    /// How far it is.
    pub state: JobState,
    /// Why it waits or failed, in plain words.
    pub reason: String,
    /// What its VM, or the controller for it, waits for.
    pub waits: Vec<Waiting>,
    /// While it is queued: its place among its tenant's jobs in the queue, from 1 on.
    pub queue_place: Option<u32>,
    /// Where its VM is now.
    pub host: Option<HostId>,
    /// Its VM, from placement on.
    pub vm: Option<VmId>,
    /// The code with which the command ended, 0 to 255.
    pub exit_code: Option<i32>,
    /// What the code does not say of the command's end.
    pub end: Option<CommandEnd>,
    /// The processes that its guest's kernel has killed because no memory was left, if any.
    pub oom_kills: Option<OomKills>,
    /// What the command said last of its progress.
    pub progress: Option<Progress>,
    /// Unix time.
    pub submitted_ms: u64,
    /// When the VM was started; Unix time.
    pub started_ms: Option<u64>,
    /// The command started.
    pub running_ms: Option<u64>,
    /// When the job reached its last state; Unix time.
    pub ended_ms: Option<u64>,
    /// The planner's prediction for the way chosen at submission, from VM start to the command's end.
    pub predicted: Option<Estimate>,
    /// While the command runs: when it ends, predicted anew from its progress and its figures.
    pub predicted_end: Option<PredictedEnd>,
    /// From VM start to the command's end.
    pub measured_s: Option<f64>,
    /// Every migration of its VM, in their order, failed ones too.
    pub migrations: Vec<Migration>,
    /// What it has in the repository; `None` until all of it is there, and after it was deleted.
    pub outputs: Option<JobOutputs>,
    /// How many files of its VM are not among them. `GET /v1/jobs/JOB/left-out` names them.
    pub left_out: u64,
    /// The VMs of a gang, in the order of their ranks; empty for a job with one VM.
    pub members: Vec<Member>,
    /// The last move of all VMs of a gang.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang_move: Option<GangMove>,
    /// While its VM runs: what that uses of its vCPUs, as in [`Vm`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_time: Option<CpuAmount>,
    /// While its VM runs: what that has of its memory, where it may have more or less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryAmount>,
    /// What it was predicted to cost, and what it cost; `None` if nobody has to be paid for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<JobCost>,
}

impl Job {
    /// The part of its work that its command has reported as done, 0 to 1; `None` until it reports some.
    pub fn progress_part(&self) -> Option<f64> {
        let progress = self.progress.as_ref()?;
        (progress.total > 0).then(|| progress.done as f64 / progress.total as f64)
    }
}

/// One VM of a gang.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// From 0 on.
    pub rank: u32,
    /// Its VM.
    pub vm: VmId,
    /// Where its VM is now.
    pub host: Option<HostId>,
    /// Its address in the gang's network.
    #[schema(value_type = Option<String>)]
    pub address: Option<std::net::Ipv4Addr>,
    /// How far it is.
    pub state: JobState,
    /// Why it waits or failed, in plain words.
    pub reason: String,
    /// The code with which its command ended.
    pub exit_code: Option<i32>,
    /// Bytes that it has sent to each rank over the gang's network, as last read. Empty if they were not counted.
    pub sent_bytes: Vec<u64>,
}

/// A job's outputs in the repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobOutputs {
    /// `repo://TENANT/PATH`, the directory in which they are.
    pub at: String,
    /// How many files.
    pub files: u64,
    /// Their lengths together.
    pub bytes: u64,
    /// When they will be deleted; Unix time. `None`: not by itself.
    pub kept_until_ms: Option<u64>,
}

/// The files of a job's VM that are not among its outputs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct LeftOutFiles {
    /// By their paths. For a job with several VMs, `rank-N:` stands before them.
    pub files: Vec<LeftOut>,
    /// How many there are beside them.
    pub more: u64,
}

/// ```text
/// preparing -> copying -> switching -> completed
///     \___________\___________\-> aborted (the VM runs at the source)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MigrationState {
    /// Epochs are issued, the disks attached at the destination, and its QEMU started.
    Preparing,
    /// Memory is sent while the VM runs at the source.
    Copying,
    /// The VM is paused: epochs are raised and the last state is sent.
    Switching,
    /// The VM runs at the destination.
    Completed,
    /// The VM is at the source, or ended; [`Migration::error`] says why.
    Aborted,
}

/// One attempt to move a VM, as the API shows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// `VM-mN`: the VM's name and the migration's number, from 1.
    pub id: MigrationId,
    /// The VM that moves.
    pub vm: VmId,
    /// The host it was at.
    pub from: HostId,
    /// The host it moves to.
    pub to: HostId,
    /// How far it is.
    pub state: MigrationState,
    /// Why the VM was moved.
    pub reason: String,
    /// Why it was aborted; while it is under way, what hinders it.
    pub error: String,
    /// When it was asked for; Unix time.
    pub started_ms: u64,
    /// When it completed or was aborted; Unix time.
    pub ended_ms: Option<u64>,
    /// What the planner said that preparation, copying and pause would take; `None` if it could not predict that.
    pub predicted_total_ms: Option<u64>,
    /// How long the planner said that it would wait for other VMs' moves over the same link; `None` if that was not
    /// known.
    pub predicted_wait_ms: Option<u64>,
    /// What makes up `predicted_total_ms`; `None` if it could not be predicted.
    pub predicted_phases: Option<PredictedPhases>,
    /// How long it waited for other VMs' moves.
    pub waited_ms: u64,
    /// Preparation, copying and pause together, as far as it has come; without the wait.
    pub total_ms: u64,
    /// How long it still takes, with the wait for other moves; `None` if it is over, or if this is not known.
    pub left_ms: Option<u64>,
    /// How long the guest stood still: QEMU's figure, and the time until the destination's agent
    /// let it run.
    pub downtime_ms: u64,
    /// Memory and device state sent so far.
    pub bytes: u64,
    /// The job's progress when the migration began, 0 to 1.
    pub job_progress: Option<f64>,
    /// The link to the destination, as last measured when the migration was asked for.
    pub link: Option<LinkProbe>,
    /// Where the time went, as far as it has come.
    pub phases: Phases,
    /// Memory that is not sent yet, the rate of sending, and how fast the guest changes its memory.
    pub remaining_bytes: u64,
    /// How fast memory is sent now.
    pub rate_bytes_per_s: u64,
    /// How fast the guest changes its memory now.
    pub dirty_bytes_per_s: u64,
    /// Whether the volumes that the VM writes come after it.
    pub volumes: VolumesOnMove,
    /// The number of other VMs' moves over the same link that it waits for.
    pub moves_ahead: u32,
    /// Whether the memory is sent compressed. [`Self::bytes`] and the rates are those before compression.
    pub compressed: bool,
    /// For how many percent of the time the vCPUs are stopped while memory is copied, because the VM would change more
    /// than half of what can be sent meanwhile; `None` if the VM is not slowed down.
    pub throttle_percent: Option<u8>,
    /// Why the memory is sent in this way, with the times of the other ways.
    pub mode_reason: String,
    /// The rate that it may have on the link, because other VMs use their disks over it; `None` if none do.
    pub max_bytes_per_s: Option<u64>,
}

impl Migration {
    /// One that is just asked for. Nothing is known of it yet; `started_ms` is Unix time.
    pub fn new(
        id: MigrationId,
        vm: VmId,
        [from, to]: [HostId; 2],
        reason: String,
        started_ms: u64,
    ) -> Self {
        Self {
            id,
            vm,
            from,
            to,
            state: MigrationState::Preparing,
            reason,
            error: String::new(),
            started_ms,
            ended_ms: None,
            predicted_total_ms: None,
            predicted_wait_ms: None,
            predicted_phases: None,
            waited_ms: 0,
            total_ms: 0,
            left_ms: None,
            downtime_ms: 0,
            bytes: 0,
            job_progress: None,
            link: None,
            phases: Phases::default(),
            remaining_bytes: 0,
            rate_bytes_per_s: 0,
            dirty_bytes_per_s: 0,
            volumes: VolumesOnMove::default(),
            moves_ahead: 0,
            compressed: false,
            throttle_percent: None,
            mode_reason: String::new(),
            max_bytes_per_s: None,
        }
    }

    /// How long it still takes once no other move is before it; `None` if it is over, or if this is not known.
    pub fn left_from_its_turn_ms(&self, now_ms: u64) -> Option<u64> {
        if self.state.is_final() {
            return None;
        }
        if self.state == MigrationState::Copying && self.rate_bytes_per_s > 0 {
            let (left, rate) = (self.remaining_bytes, self.rate_bytes_per_s);
            return copy_left_s(left, rate, self.dirty_bytes_per_s).map(whole_ms);
        }
        let begun_ms = self.started_ms + self.waited_ms;
        let passed_ms = if self.moves_ahead > 0 { 0 } else { now_ms.saturating_sub(begun_ms) };
        self.predicted_total_ms.map(|whole_ms| whole_ms.saturating_sub(passed_ms))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn whole_ms(seconds: f64) -> u64 {
    (seconds * 1e3) as u64
}

/// One line of a job's log.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// The number of the guest's message it came in: lines are in this order, with gaps.
    pub seq: u64,
    /// Since the guest booted.
    pub uptime_ms: u64,
    /// Where the command wrote it.
    pub stream: LogStream,
    /// Without the end of the line.
    pub line: String,
    /// The line goes on in the next one of this stream (and rank): it is longer than 8 KiB, or its end had not come after a second.
    #[serde(default, skip_serializing_if = "crate::guest::is_false")]
    pub continues: bool,
    /// When its host's agent got it, by the controller's clock; 0 if that is not known.
    pub arrived_ms: u64,
    /// Of a job with several VMs, where the lines of all are asked for: the rank of the VM that wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
}

/// A VM as the API shows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Unique in the cluster; a job's VM has the job's id for its name.
    pub id: VmId,
    /// The job it runs; `None` for one that lives without a job.
    pub job: Option<JobId>,
    /// Where it is now; `None` for one that is stopped or waits for a host.
    pub host: Option<HostId>,
    /// What it does, as last heard.
    pub status: VmState,
    /// Why the status is what it is, where that needs words.
    pub reason: String,
    /// What it waits for: its guest, or a part of it, stands still.
    pub waits: Vec<Waiting>,
    /// Its vCPUs; where it may have more, those of which it always has the time.
    pub cpus: u32,
    /// What it uses of its vCPUs, where it has more of them than it always has the time of.
    #[serde(default)]
    pub cpu_time: Option<CpuAmount>,
    /// Its memory, as asked for; the least, where it may have more.
    pub memory_bytes: u64,
    /// What it has of its memory, where it may have more or less; `None`: it has all.
    #[serde(default)]
    pub memory: Option<MemoryAmount>,
    /// Since its present QEMU was started: a migration begins anew.
    pub uptime_ms: u64,
    /// Which of its runs this is, from 0: it ends when the VM is off, also for a restart.
    pub run: u32,
    /// When it was made: two VMs of one name, one after the other, differ in this. 0 for one that the controller knows nothing of.
    pub made_ms: u64,
    /// CPU time of all its vCPUs since its present QEMU was started.
    pub vcpu_ms: u64,
    /// What its vCPUs had of its host's CPUs, as last reported.
    pub load: VmLoad,
    /// What all its disks together were asked for at its present host, since its volume server was started.
    pub io: IoStats,
    /// The migration that is under way, or its last one.
    pub migration: Option<MigrationId>,
    /// Whether it moves by itself; `None` for one that the controller knows nothing of.
    pub may_migrate: Option<bool>,
    /// As [`Job::predicted_end`] of its job.
    pub predicted_end: Option<PredictedEnd>,
    /// Its volumes, in the order of its disks.
    pub volumes: Vec<VmVolume>,
    /// The image of its root disk; `None` for one that the controller knows nothing of.
    pub image: Option<ImageName>,
    /// Its address in a network of its tenant, and the addresses that the guest says it has, if it runs
    /// qemu-guest-agent; only in the answer for one VM.
    pub addresses: Vec<String>,
    /// Beside which other VMs of its tenant it is, and beside which never.
    #[serde(default)]
    pub rules: HostRules,
    /// As it was made with; none for a job's VM.
    #[serde(default)]
    pub labels: Labels,
    /// What makes such a VM as it is now, without the cloud-init data, which may have secrets; only in the answer for one VM that lives without a
    /// job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<Box<NewVm>>,
}

/// A volume of a VM.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VmVolume {
    /// The volume.
    pub volume: VolumeName,
    /// Where its home is.
    pub home: HostId,
    /// Whether it is still to come after its VM.
    pub follows: bool,
    /// Its last move, as far as it is known.
    pub last_move: Option<VolumeMove>,
}

impl VmVolume {
    /// Whether it is on its way after its VM, or is about to be.
    pub fn is_moving(&self) -> bool {
        self.follows || self.last_move.as_ref().is_some_and(|last| !last.state.is_final())
    }
}

/// Asks for a migration.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MoveVm {
    /// Where to.
    pub host: HostId,
    /// Whether the volumes that it writes come after it.
    #[serde(default)]
    pub volumes: VolumesOnMove,
    /// They come although a replica of one is at the destination's site, and no other site has a copy of it then.
    #[serde(default)]
    pub confirmed: bool,
}

/// Asks for a move of all VMs of a gang.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct MoveJob {
    /// Where to: a host for each rank, or one for all of them. Empty if a site is named.
    #[serde(default)]
    pub hosts: Vec<HostId>,
    /// To this site, to whichever of its hosts have room.
    #[serde(default)]
    pub site: Option<SiteId>,
    /// Whether the VMs' own disks and the volumes that they write come after them.
    #[serde(default)]
    pub volumes: VolumesOnMove,
    /// They come although a replica of one is at the destination's site, and no other site has a copy of it then.
    #[serde(default)]
    pub confirmed: bool,
}

/// A move of all VMs of a gang was asked for.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct JobMoveAsked {
    /// [`GangMove::asked`] of the move that carries it out.
    pub request: u64,
    /// Where each rank goes.
    pub hosts: Vec<HostId>,
}

/// One point of a job's time series.
///
/// `io` and `vcpu_ms` are sums over the whole job, over all its disks and over all hosts it was
/// on; they only grow. `io` counts at the volume server of the host where the VM is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Unix time.
    pub at_ms: u64,
    /// Where the VM was.
    pub host: HostId,
    /// 0 to 1.
    pub progress: Option<f64>,
    /// What its disks' clients asked for.
    pub io: IoStats,
    /// CPU time of all its vCPUs.
    pub vcpu_ms: u64,
}
