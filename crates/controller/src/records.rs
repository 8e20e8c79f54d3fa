//! The records in the store: their keys, types, and access to them.
//!
//! | key | value | written by |
//! |---|---|---|
//! | `hosts/HOST` | [`HostRecord`] | the host's registration, and who drains it |
//! | `join_tokens/HOST`, `enrolled/HOST`, `revoked/IDENTITY` | those of [`crate::hosts::enrol`] | enrolment |
//! | `backups_held/TENANT` | [`crate::accounts::backups::HeldRecord`]: what the tenant's backups hold | the drivers of its backups |
//! | `tenants/TENANT`, `users/TENANT/USER`, `tokens/ID` | those of [`crate::accounts`] | the API |
//! | `links/FROM/TO`, `local_blocks/HOST` | [`perigee_model::job::Link`], `BlockProbe` | probes |
//! | `links_of_sites/FROM/TO` | what a host that was removed has measured between two sites | the removal of a host |
//! | `images/IMAGE` | [`ImageRecord`] | whoever makes or deletes the image |
//! | `uploads/HOST/SOURCE` | [`UploadRecord`] | uploads and imports |
//! | `volumes/VOLUME` | [`VolumeRecord`] | the catalog |
//! | `jobs/JOB`, `jobs/VM` | [`JobRecord`], whose [`Kind`] says whether it is a job's, a gang's, a gang's member's or a persistent VM's | its driver only |
//! | `intents/jobs/JOB` | [`JobIntent`] | the API: requests of people about the job |
//! | `migrations/VM/NNNN` | [`MigrationRecord`] | the migration's driver only |
//! | `intents/migrations/VM/NNNN` | [`MigrationIntent`] | the job's driver |
//! | `volume_moves/VOLUME` | [`VolumeMoveRecord`] of its last move | the move's driver only |
//! | `intents/volume_moves/VOLUME` | [`VolumeMoveIntent`] | the API, and drivers of jobs that end |
//! | `replicas/VOLUME/SITE` | [`crate::storage::replicas::ReplicaRecord`] | the replica's driver |
//! | `intents/replicas/VOLUME/SITE` | [`crate::storage::replicas::ReplicaIntent`] | the API |
//! | `backups/BACKUP` | [`crate::storage::backups::BackupRecord`] | the API makes and removes it; else the backup's driver |
//! | `backup_schedules/SCHEDULE` | [`crate::storage::backups::schedules::ScheduleRecord`] | the API makes, changes and removes it, and ends those of a deleted volume; else the task for schedules. One at a time |
//! | `restores/LAYER` | the `RestoreRecord` (`storage/backups/restoring.rs`) of a volume whose bytes are still to come from a backup | the restore makes it; then its driver |
//! | `let_in/HOST` | which hosts a home lets in because they say that they have a volume attached, without a VM | [`crate::admissions::keep`] |
//! | `promotions/VOLUME` | a promotion of a replica that is not over | the promotion |
//! | `superseded/HOST/VOLUME/INCARNATION` | what a host that has the volume no more is to be told | the promotion |
//! | `shadows/VOLUME/HOST/TENURE` | [`crate::storage::left_behind::Shadow`] | the move's driver, and who drops it |
//! | `decisions/JOB/NNNN` | [`perigee_model::plan::Decision`] | the planner's caller |
//! | `left-out/JOB` | the files that are not among its outputs ([`crate::files::outputs::left_out`]) | the job's driver |
//! | `logs/JOB/NNNN` | before [`crate::level::JOB_FILES`]: the [`perigee_model::job::LogLine`]s among 100 messages of the guest | the job's driver |
//! | `samples/JOB` | before the same level: the job's time series | the job's driver |
//! | `talk/NAME/COUNT` | [`crate::planning::gang_traffic::GangHistory`]: what the VMs of such a gang sent to each other, and its last runs, rank by rank | the gang's driver, at its end |
//! | `runs/KEY`, `vm_boots/HOST` | the last runs of a kind of job, the last boots at a host | the job's driver, at its end |
//! | `cleanups/ID`, `cleanups/deleted/VOLUME` | [`crate::cleaner::Cleanup`] | the cleaner |
//! | `measurements/HOST`, `measured_kinds/HASH` | [`MeasurementRecord`]; [`perigee_model::measurement::HostMeasurement`] of a kind of rented hosts | the measurement |
//! | `rentals/RENTAL` | [`RentalRecord`] | its driver only |
//! | `intents/rentals/RENTAL` | [`RentalIntent`] | the API; the task that rents |
//! | `left_sites/RENTAL` | [`LeftSite`] | [`crate::ledger::left_site`] |
//! | `kept_disks/RENTAL` | [`perigee_model::kept::KeptDisk`] | the rental's driver makes it; then the task that keeps disks only |
//! | `kept_uses/RENTAL` | [`KeptUse`] of that disk | the driver of the rental that uses it; the task that keeps disks removes it |
//! | `renting/settings`, `renting/decisions` | what an admin has said of renting by itself, and the last decisions ([`crate::cluster::renter`]) | the API; the task that rents |
//! | `given_up/HOST` | [`crate::storage::given_up::GivenUp`] | the removal of a host |
//! | `networks/NETWORK`, `network_numbers/last`, `tunnels/HOST` | those of [`crate::networks`] | the API; who tells hosts |
//! | `ledger/lines/NNNN`, `ledger/sum` | [`crate::cluster::ledger::book::Line`], of which none is ever changed, and the sum of those that were removed | [`crate::ledger`]; jobs through it |
//! | `prices` | the file with the prices, as it could last be read | [`crate::prices`] |
//! | `requests/WHO/KEY` | [`asked::RequestRecord`] | whoever makes the record of what is asked for, with the same write |
//! | `counters/NAME` | the last number given to a job of that name | submission |
//! | `controller` | the number and the place of the last start | [`crate::term`] |
//! | `format` | the format level | [`crate::level`]: the end of an upgrade |
//! | `restored` | [`RestoredRecord`], until each host was heard | the restore; [`crate::restored`] |
//!
//! Intents (`intents/…`, placements), observations (job states, reports) and unknown values (`None`) have
//! separate fields everywhere. Fields of a newer version stay in a record that this version writes (`unknown_fields.rs`).

mod access;
pub mod asked;
mod declared;
mod gang_traffic;
mod kept;
mod kind;
mod measurement;
mod rental;
mod unknown_fields;

use std::net::Ipv4Addr;

use perigee_model::backup::BackupTarget;
use perigee_model::drain::Drain;
use perigee_model::home::Tenure;
use perigee_model::job::{Job, JobVolume, Migration, MigrationState};
use perigee_model::network::Card;
use perigee_model::persistent_vm::{PowerRequest, ResizeVm, SetVm};
use perigee_model::upgrade::HostVersions;
use perigee_model::vm::{EpochRaise, HostAddresses, VmSpec};
use perigee_model::volume::{ContentDigest, ImageFormat, IoStats};
use perigee_model::volume_move::VolumeMove;
use perigee_model::{
    BackupName, DiskRole, Epoch, HostId, ImageName, JobId, LayerId, LeaveSite, OwnerName, VmId,
    VmStart, VolumeName,
};
use perigee_planner::Traits;
use perigee_planner::replay::Replayed;
use serde::{Deserialize, Serialize};

use crate::meter::Meter;

pub use access::{Owned, Records, state_problem};
pub use declared::declared;
pub use gang_traffic::Talk;
pub use kept::{KEPT_DISKS, KeptUse, is_late, kept_disk_key, kept_use_key};
pub use kind::{Gang, GangCopy, GangKeys, GangMoveRequest, Kind, Membership};
pub use measurement::{
    MEASURED_KINDS, MEASUREMENTS, MeasurementRecord, measured_kind_key, measurement_key,
};
pub use rental::{
    LEFT_SITES, LeftSite, RENTALS, RentalIntent, RentalRecord, left_site_key, rental_intent_key,
    rental_key,
};

/// A host that has registered.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostRecord {
    pub addresses: HostAddresses,
    pub registered_ms: u64,
    /// The addresses of its interfaces, as it last said them.
    pub interfaces: Vec<Ipv4Addr>,
    /// That it is to be drained.
    pub drain: Option<Drain>,
    /// The versions of its daemons, as they last said them.
    #[serde(default)]
    pub versions: HostVersions,
}

/// The key of the [`RestoredRecord`].
pub const RESTORED: &str = "restored";

/// The store was restored from a backup, and hosts may have more than it knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredRecord {
    /// When the backup was made; Unix time.
    pub backup_ms: u64,
    /// Unix time.
    pub restored_ms: u64,
    /// The hosts of the records, without those that were given up.
    pub waits_for: Vec<HostId>,
}

/// A volume that a person made, and what its home last reported about it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VolumeRecord {
    pub name: VolumeName,
    pub home: HostId,
    /// `None` while it is being made.
    pub seen: Option<VolumeSeen>,
}

/// An image's name, taken for one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    pub name: ImageName,
    /// `None` while it is being made of a volume.
    pub layer: Option<LayerId>,
    /// The import that makes it; `None` when its result is known.
    pub import: Option<PendingImport>,
    pub leave_site: LeaveSite,
    /// The size that a VM sees; `None` until it is known.
    pub size_bytes: Option<u64>,
    /// Every tenant may use it.
    pub shared: bool,
    /// The host that has made it. The other hosts copy it from there while that answers.
    pub made_at: Option<HostId>,
    /// It was made of a job's inputs.
    pub inputs: Option<InputsImage>,
    /// What it shows; `None` while its host has not said that.
    pub content: Option<ContentDigest>,
    /// Hosts that have served something else under its name.
    pub refused: Vec<RefusedSource>,
}

/// A host that has served other content than the image's, and the host that has found that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedSource {
    pub at: HostId,
    pub from: HostId,
}

/// The prefix of the records of uploads.
pub const UPLOADS: &str = "uploads/";

/// A host removes an upload after an hour, and looks once a minute.
pub const UPLOAD_KEPT_MS: u64 = (3600 + 120) * 1000;

/// A file that was sent to a host for an import, and counts for its tenant's quota.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UploadRecord {
    pub host: HostId,
    /// What the import names.
    pub source: String,
    pub tenant: String,
    pub bytes: u64,
    /// Since when it is there; Unix time.
    pub since_ms: u64,
}

impl UploadRecord {
    /// The key of an [`UploadRecord`].
    pub fn key(host: &HostId, source: &str) -> String {
        format!("{UPLOADS}{host}/{source}")
    }
}

/// What is known of an image of inputs beside its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputsImage {
    /// When a job last needed it; Unix time.
    pub used_ms: u64,
}

impl ImageRecord {
    /// The record of a name that has no layer yet.
    pub fn new(name: ImageName) -> Self {
        let leave_site = LeaveSite::Allowed;
        let (layer, import, size_bytes, made_at, inputs, content, refused) = Default::default();
        let shared = false;
        Self {
            name,
            layer,
            import,
            leave_site,
            size_bytes,
            shared,
            made_at,
            inputs,
            content,
            refused,
        }
    }
}

/// An import that was begun: what the host was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingImport {
    pub host: HostId,
    /// As in [`perigee_model::volume::ImportImage`]; of a backup empty.
    pub source: String,
    pub format: Option<ImageFormat>,
    /// The backup of which the image is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<ImportedBackup>,
}

/// The backup of which an image is made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedBackup {
    pub backup: BackupName,
    /// Where it is.
    pub from: BackupTarget,
}

/// What a volume's home last reported about it. The sizes are in bytes: what a VM sees, and what the data takes in the
/// pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VolumeSeen {
    pub size_bytes: u64,
    pub allocated_bytes: u64,
    pub epoch: Epoch,
    pub leave_site: LeaveSite,
}

/// Outputs that are deleted after a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptOutputs {
    /// Unix time.
    pub since_ms: u64,
    pub for_ms: u64,
}

impl KeptOutputs {
    /// Until when, if the clock goes right and the controller's machine is on; Unix time.
    pub fn until_ms(&self) -> u64 {
        self.since_ms.saturating_add(self.for_ms)
    }
}

/// A job with everything its driver must know after a restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobRecord {
    /// What it is of.
    pub kind: Kind,
    /// What people see of it, without the migrations: these have their own records.
    pub job: Job,
    /// Where its VM and its disks are meant to be; `None` while it is queued.
    pub placement: Option<Placement>,
    /// The VM's start was requested. From then on a missing VM is a lost VM.
    pub vm_started: bool,
    /// The number of the last guest message that was taken into account.
    pub last_seq: u64,
    /// The number of the last message of the runs before: a guest that is started again counts from 1 again.
    pub seq_before: u64,
    pub finished: Option<Output>,
    /// For how long its outputs are kept; `None`: until somebody deletes them.
    pub kept_outputs: Option<KeptOutputs>,
    /// How it ends. This is decided before anything is taken down.
    pub ending: Option<Ending>,
    /// Why it ends, while [`Job::reason`] says what its end waits for.
    pub ends_because: Option<String>,
    /// Number of the last migration that was taken into account.
    pub settled: u32,
    /// Completed migrations among them, and data volumes that came to its VM.
    pub moves: u32,
    /// The host that the VM has moved away from, until the cleaner has a record of what is left there.
    pub left: Option<HostId>,
    pub meter: Meter,
    pub log: LogKept,
    /// For how long its VM was seen running in the current state. The time limits are compared with this.
    pub counted_ms: u64,
    /// How often it began anew because its host was gone.
    pub restarts: u32,
    /// Hosts at which it was lost. Its VM and disks may exist there until these hosts are back.
    pub avoid: Vec<HostId>,
    /// The host that it is about to leave. Its VM there may have lost its writer epochs, so the job begins anew
    /// even if that host comes back.
    pub leaving: Option<HostId>,
    /// The boot of the host in which the VM was last seen; empty while it is not known.
    pub boot_id: String,
    /// Hosts that cannot start its VM.
    pub refused_by: Vec<HostId>,
    /// The block trace of its command.
    pub traced: Traced,
    /// Volumes that are to come to its VM's host, the next one first.
    pub to_follow: Vec<VolumeName>,
    /// [`JobIntent::stay`] as far as it is carried out.
    pub stayed: u32,
    /// Its inputs, as they were when somebody looked last.
    pub inputs: Option<JobInputs>,
    /// Since when its command is to end, because the job is cancelled; Unix time.
    pub cancelled_ms: Option<u64>,
    /// Its VM ended before its outputs were written, and is started once more only to write them.
    pub collect: Option<Collect>,
    /// Its card in a network of its tenant; `None` until it is staged first.
    pub card: Option<Card>,
}

/// What the inputs of a job are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobInputs {
    /// The image with them; its name is made of their hashes.
    pub image: ImageName,
    pub bytes: u64,
    /// Files and directories.
    pub entries: u64,
}

impl JobRecord {
    /// For messages: a VM without a job is no job.
    pub fn in_words(&self) -> String {
        format!("{} {}", self.kind.word(), self.job.id)
    }

    /// Whether its VM can still be changed in this run: it neither leaves its host nor ends. Once that is not so, it never is again.
    pub fn is_in_run(&self, run: VmStart) -> bool {
        let stays = self.leaving.is_none() && self.ending.is_none() && !self.kind.is_taken_down();
        start_of(self, 0) == run && stays
    }

    /// The disks without which the job can't go on. The guest has read its seed when the command runs; what cloud-init
    /// reads in a VM without a job, it reads again whenever its guest boots.
    pub fn disks_needed(&self) -> impl Iterator<Item = &PlacedDisk> {
        let is_persistent = self.kind.is_persistent_vm();
        let is_read_once =
            move |role| role == DiskRole::Seed || (role == DiskRole::CloudInit && !is_persistent);
        let seed_is_read = self.job.running_ms.is_some();
        let disks = self.placement.iter().flat_map(|placement| &placement.disks);
        disks.filter(move |disk| !is_read_once(disk.role) || !seed_is_read)
    }
}

/// The state of a job's block trace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Traced {
    /// Its command has not started.
    #[default]
    NotYet,
    /// There is none: it would show nothing new, could not be made, or ended with a migration.
    Not,
    /// The volume server has been collecting it since this Unix time.
    Since { at_ms: u64 },
    /// It was replayed.
    Replayed(Replayed),
}

/// How much of a job's log is kept, and how much was dropped.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct LogKept {
    pub bytes: u64,
    pub dropped_lines: u64,
    /// Number of the last line that was dropped.
    pub dropped_seq: u64,
    /// The last line of the guest says that what follows is not kept.
    #[serde(default)]
    pub hides: bool,
}

/// A job's outputs, as they came to the repository: the size and the digest of the tar.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Output {
    pub bytes: u64,
    pub sha256: String,
    /// Why it has not all of the outputs.
    pub lacks: Option<String>,
}

/// The outputs of a job whose VM has ended, or was stopped as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collect {
    /// How the job ends, whatever becomes of its outputs.
    pub ending: Ending,
    pub reason: String,
    /// The last lines of the VM's console; may be empty.
    pub console: String,
    pub step: CollectStep,
    /// Why its guest can't write the outputs.
    pub failed: Option<String>,
}

impl Collect {
    /// The outputs of a job that ends so, before the first step.
    pub fn new(ending: Ending, reason: String) -> Self {
        let (console, step) = (String::new(), CollectStep::Ends);
        Self { ending, reason, console, step, failed: None }
    }
}

/// How far a VM is that is started once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectStep {
    /// The VM of before may still run.
    Ends,
    /// That one can't write any more, and the seed says what is to be done.
    Ready,
    /// Its host was asked for it.
    Started,
}

/// How a job ends after its outputs were collected from its disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    Collected { exit_code: i32 },
    Failed,
    Cancelled,
}

/// Where a job runs and where its disks are, as it was decided and is now.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Placement {
    /// Where the VM starts; root, seed, output and inputs have their home there.
    pub start: HostId,
    /// In the order of the VM's disks.
    pub disks: Vec<PlacedDisk>,
    /// The traits by which later jobs find this run.
    pub traits: Traits,
    /// The VM has said nothing of a network card, and has one in a user network.
    pub has_user_card: bool,
}

/// A disk of a job's VM, with the volume behind it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlacedDisk {
    #[serde(rename = "serial")]
    pub role: DiskRole,
    pub volume: VolumeName,
    /// The volume's name in the job file, for a data disk.
    pub data_of: Option<VolumeName>,
    pub home: HostId,
    /// The home was another host when the job was placed.
    pub home_changed: bool,
    /// The epoch of the VM's session; `None` until the volume exists.
    pub epoch: Option<Epoch>,
    pub read_only: bool,
    /// Made for this job and deleted with it.
    pub temporary: bool,
    /// Whether it may leave its site.
    pub leave_site: LeaveSite,
}

/// Requests of people about a job.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct JobIntent {
    /// The command is ended, and the outputs are fetched.
    pub cancel: bool,
    /// The VM is stopped at once, and the outputs are what is on its disks.
    pub now: bool,
    /// The job ends at once, without its outputs.
    pub gives_up: bool,
    /// `vm stop`: the VM is stopped, and the job fails.
    pub stop_vm: bool,
    /// How often a person called off that volumes come to the VM.
    pub stay: u32,
    /// What is asked of a VM without a job, and which request that is.
    pub power: Option<(u64, PowerRequest)>,
    /// The size that such a VM has got while it ran.
    pub size: Option<Live<ResizeVm>>,
    /// The volume that has come to such a VM or has gone from it while it ran.
    pub volume: Option<Live<VolumeChange>>,
    /// What was said of such a VM anew, and which request that is.
    pub set: Option<(u64, SetVm)>,
    /// Where the VMs of a gang are to go, and which request that is.
    pub move_gang: Option<(u64, GangMoveRequest)>,
}

/// A change that a VM has got while it ran.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Live<T> {
    /// Which one it is, of its kind.
    pub number: u64,
    pub change: T,
    /// The run in which the VM has got it. To another one it means nothing.
    pub run: VmStart,
}

/// A volume comes to a VM without a job, or goes from it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum VolumeChange {
    Comes {
        volume: JobVolume,
        slot: u8,
        /// As it is attached, if the VM runs.
        disk: Option<PlacedDisk>,
    },
    Goes(VolumeName),
}

impl VolumeChange {
    /// Changes the VM's record. The same again changes nothing.
    pub fn apply(&self, record: &mut JobRecord) {
        let Some(persistent) = record.kind.persistent_vm_mut() else { return };
        let volumes = &mut record.job.spec.volumes;
        let disks = record.placement.as_mut().map(|placement| &mut placement.disks);
        let at = |name: &VolumeName| volumes.iter().position(|volume| volume.volume == *name);
        match self {
            Self::Comes { volume, slot, disk } if at(&volume.volume).is_none() => {
                persistent.adds(volumes.len(), *slot);
                volumes.push(volume.clone());
                if let (Some(disks), Some(disk)) = (disks, disk) {
                    disks.push(disk.clone());
                }
            }
            Self::Comes { .. } => {}
            Self::Goes(name) => {
                let Some(index) = at(name) else { return };
                persistent.drops(volumes.len(), index);
                volumes.remove(index);
                if let Some(disks) = disks {
                    disks.retain(|disk| !disk.role.is_data() || disk.volume != *name);
                }
            }
        }
    }
}

/// A migration with everything its driver must know after a restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MigrationRecord {
    pub migration: Migration,
    pub number: u32,
    /// The VM's start at the destination.
    pub start: VmStart,
    /// Spec and epochs at the destination; `None` until the epochs are issued.
    pub plan: Option<MovePlan>,
    /// The source was asked to send the VM, and may have done so.
    pub asked_source: bool,
    /// The destination's counters of the disks before the VM arrived.
    pub io_before: Vec<IoStats>,
    /// The boot of the destination host in which its QEMU waits for the VM.
    pub boot_id: String,
    /// For how long a controller has watched it. Its time limit is compared with this.
    pub watched_ms: u64,
    /// Nobody has asked for it: what was measured was the reason.
    pub of_load: bool,
}

impl MigrationRecord {
    /// Whether something of it may be at its hosts.
    pub fn may_have_begun(&self) -> bool {
        self.migration.state != MigrationState::Aborted || self.plan.is_some()
    }
}

/// What a migration does at its switchover: the VM's spec at the destination, and the epochs that fence the source off
/// from its disks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MovePlan {
    pub spec: VmSpec,
    pub raises: Vec<EpochRaise>,
}

/// Requests about a migration.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct MigrationIntent {
    /// The job ends and takes both VMs down: the migration's driver does nothing more.
    pub abandon: bool,
    /// A person wants the VM to stay where it is.
    pub cancel: bool,
}

/// A volume's move with everything its driver must know after a restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VolumeMoveRecord {
    /// As shown to people.
    pub view: VolumeMove,
    /// Which of the volume's moves it is, from 1.
    pub number: u32,
    /// The volume's tenure at the old home; `None` until that says it. Nobody is asked for anything before.
    pub tenure: Option<Tenure>,
    /// The volume has a record of its own: a person made it. The others belong to a job.
    pub listed: bool,
}

/// Requests about a volume's move.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct VolumeMoveIntent {
    /// The number of the move that is to be called off.
    pub cancel: u32,
}

/// Whose promotion a record is; [`crate::storage::replicas`] has the rest.
#[derive(Debug, Clone, Deserialize)]
pub struct PromotedVolume {
    pub volume: VolumeName,
}

/// The prefix of the records of [`PromotedVolume`].
pub const PROMOTIONS: &str = "promotions/";

/// The key of a [`VolumeRecord`].
pub fn volume_key(volume: &VolumeName) -> String {
    format!("volumes/{volume}")
}

/// The key of the [`VolumeMoveRecord`] of a volume's last move.
pub fn volume_move_key(volume: &VolumeName) -> String {
    format!("volume_moves/{volume}")
}

/// The key of a [`VolumeMoveIntent`].
pub fn volume_move_intent_key(volume: &VolumeName) -> String {
    format!("intents/volume_moves/{volume}")
}

/// The key of an [`ImageRecord`].
pub fn image_key(name: &ImageName) -> String {
    format!("images/{name}")
}

/// The key of a [`JobRecord`].
pub fn job_key(job: &JobId) -> String {
    format!("jobs/{job}")
}

/// Where what people ask of jobs and VMs is.
pub const JOB_INTENTS: &str = "intents/jobs/";

/// The key of a [`JobIntent`].
pub fn job_intent_key(job: &JobId) -> String {
    format!("{JOB_INTENTS}{job}")
}

/// Below it are the [`MigrationRecord`]s of a VM, in the order of their numbers.
pub fn migration_prefix(vm: &VmId) -> String {
    format!("migrations/{vm}/")
}

/// The key of a [`MigrationRecord`].
pub fn migration_key(vm: &VmId, number: u32) -> String {
    format!("{}{}", migration_prefix(vm), in_order(number))
}

/// Below it are the [`MigrationIntent`]s of a VM.
pub fn migration_intent_prefix(vm: &VmId) -> String {
    format!("intents/migrations/{vm}/")
}

/// The key of a [`MigrationIntent`].
pub fn migration_intent_key(vm: &VmId, number: u32) -> String {
    format!("{}{}", migration_intent_prefix(vm), in_order(number))
}

/// Texts in the order of their numbers. Those of up to 9999 are as they always were, and a letter comes after all digits.
pub fn in_order(number: u32) -> String {
    if number <= 9999 { format!("{number:04}") } else { format!("n{number:010}") }
}

/// The owner name of a job's volumes: the job's id with the time of its submission, because another controller
/// may have a job with the same id.
pub fn owner_of(job: &Job) -> OwnerName {
    OwnerName::new(format!("{}-{:x}", job.id, job.submitted_ms / 1000))
        .or_else(|_| OwnerName::new(job.id.as_str()))
        .expect("a job's id is a name")
}

/// The id of a job's VM, which is the job's id.
///
/// # Panics
/// Never: the rule for names is the same for both.
pub fn vm_of(job: &JobId) -> VmId {
    VmId::new(job.as_str()).expect("a job's id is a name")
}

/// The last start of a job's VM in its present run, with which it only writes its outputs. No migration has so high a number.
pub fn last_start_of(record: &JobRecord) -> VmStart {
    start_of(record, 0).whole_run()
}

/// The start of a job's VM in its present run: at the destination of this migration, or 0 where it boots.
pub fn start_of(record: &JobRecord, migration: u32) -> VmStart {
    VmStart { submitted_ms: record.job.submitted_ms, run: record.restarts, migration }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_are_listed_in_their_order_also_after_9999() {
        let numbers = [1, 9, 10, 999, 1000, 9999, 10_000, 10_001, 99_999, 100_000, u32::MAX];
        let texts = numbers.map(in_order);
        assert!(texts.is_sorted(), "{texts:?}");
        assert_eq!(in_order(12), "0012", "as in stores that are there");
    }
}
