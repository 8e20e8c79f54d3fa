//! VMs that live without a job: what a person wants of one, and what its driver does next.
//!
//! Such a VM has the same record, the same driver and the same [`JobState`] as a job's VM. Instead of a command it has
//! [`PersistentVm`]: what is wanted of it, apart from what is observed. While it is off it is [`JobState::Queued`] and is not
//! wanted to run, so it has disks and no host; the scheduler leaves it alone.
//!
//! ```text
//!            start                 placed, staged        QEMU runs the guest
//! off ───────────────> queued ─────────────────> starting ──────────────────> running
//!  ^                     ^                                                      │
//!  │                     └─────────── restart, or its host has rebooted ────────┤
//!  └──────────────────────────────── stop, or the guest has powered off ────────┘
//! ```
//!
//! A stop presses the power button (ACPI), and the guest powers itself off. A guest that has not done so after
//! [`POWER_OFF_MS`] runs on, and the stop is over. With `force` the VM is stopped at once, as by a power cut.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::from_backup::FromBackup;
use crate::job::{JobState, Start};
use crate::labels::Labels;
use crate::limits::{SSH_KEYS, USER_DATA_BYTES};
use crate::network::Publish;
use crate::secret::Secret;
use crate::vm::{Firmware, Hardware, NetworkKind, VmStatus};
use crate::{DiskRole, HostId, HostRules, ImageName, Problem, VmId, VolumeName};

/// How long a guest may take to power off when it is asked to.
pub const POWER_OFF_MS: u64 = 90_000;

/// A guest that is still booting does not notice its power button, so it is pressed again after this time.
pub const PRESS_AGAIN_MS: u64 = 10_000;

/// What a person asks of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerRequest {
    /// It is to run.
    Start,
    /// It is to be off.
    Stop {
        /// At once, without asking the guest.
        force: bool,
    },
    /// It is to be off for a moment, and then to run.
    Restart {
        /// At once, without asking the guest.
        force: bool,
    },
}

/// A VM on its way from running to off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoingDown {
    /// The guest is not asked.
    pub force: bool,
    /// When its power button was pressed first. This and the others are in the time that the controller has seen to pass.
    pub pressed_ms: Option<u64>,
    /// When it was pressed last.
    pub pressed_again_ms: u64,
    /// Since when the guest could not be asked, because the VM does not run.
    pub stands_ms: Option<u64>,
    /// Why it goes down, where nobody has asked for that.
    pub reason: String,
    /// It is being removed from its host, so it needs nothing there any more.
    pub taken: bool,
}

/// What a VM without a job has instead of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistentVm {
    /// Whether it is meant to run. If it goes down at the same time, it starts again afterwards.
    pub on: bool,
    /// It is being stopped.
    pub down: Option<GoingDown>,
    /// The number of the last request that was taken into account.
    pub applied: u64,
    /// Its own disks were made, and have what the guest wrote.
    pub made: bool,
    /// What the last request came to, if it was not what was asked for.
    pub note: String,
    /// How cloud-init in its guest configures it.
    pub cloud_init: CloudInit,
    /// Which volumes are mounted where, in their order.
    pub mounts: Vec<Option<String>>,
    /// Which disks the volumes are, in their order; none: 0, 1 and so on.
    pub slots: Vec<u8>,
    /// The number of the last volume that came or went and was taken into account.
    pub plugged: u64,
    /// What boots its root disk.
    pub firmware: Firmware,
    /// What was asked for of its machine.
    pub hardware: Hardware,
    /// The root disk is to be a new clone of its image: it was restored, and has not started since.
    pub root_is_new: bool,
    /// Of the name of that root disk; 0 for the first one.
    pub root_number: u32,
    /// The number of the last size that was taken into account.
    pub sized: u64,
    /// The number of the last [`SetVm`] that was taken into account.
    pub set: u64,
    /// The memory that its guest was asked to keep at most, and that it starts with next. It counts with what it was started with until then.
    pub memory_next: Option<u64>,
    /// Root disks of before, and their homes, until the cleaner knows of them.
    pub dropped: Vec<(HostId, VolumeName)>,
    /// As [`NewVm::labels`].
    #[serde(default)]
    pub labels: Labels,
    /// Its disks are being made of a backup, and it does not start before.
    #[serde(default)]
    pub from_backup: Option<FromBackup>,
}

/// How cloud-init configures a guest, where its image has that.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CloudInit {
    /// The name of its first user; `None`: the image's own, for example `debian`.
    #[serde(default)]
    pub user: Option<String>,
    /// The user's SSH keys, each a line of a public key file.
    #[serde(default)]
    pub ssh_keys: Vec<String>,
    /// The user-data: a cloud-config, a script, or whatever else cloud-init takes. It comes before all that Perigee says.
    #[serde(default)]
    pub user_data: Option<String>,
}

impl CloudInit {
    /// # Errors
    /// [`Problem`] of the kind `invalid`: `what` could not be done.
    pub fn check(&self, what: &str) -> Result<(), Problem> {
        let invalid = |why: String| Problem::invalid(what, why);
        if let Some(user) = &self.user {
            let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
            let begins = user.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
            if !begins || user.len() > 32 || !user.chars().all(letter) {
                return Err(invalid(format!("user: {user:?} is no name of a Linux user")));
            }
        }
        SSH_KEYS.check(self.ssh_keys.len()).map_err(|error| invalid(error.to_string()))?;
        // A key that is private is not shown in the error.
        if let Some(secret) = self.ssh_keys.iter().find_map(|key| Secret::of(key)) {
            return Err(invalid(format!("SSH keys: there is {secret} among them"))
                .next("give the public half, which is in the file whose name ends with .pub"));
        }
        if let Some(at) = self.ssh_keys.iter().position(|key| !is_guest_key(key)) {
            let why = "no line of a public key file, like `ssh-ed25519 AAAA… ann@desk`";
            return Err(invalid(format!("SSH key {}: it is {why}", at + 1)));
        }
        let length = self.user_data.as_ref().map(String::len);
        let checked = length.map(|length| USER_DATA_BYTES.check(length));
        checked.transpose().map(drop).map_err(|error| invalid(error.to_string()))
    }
}

/// Whether it is a key as an OpenSSH server takes it, of whatever kind: the guest's own server decides which it lets in.
fn is_guest_key(line: &str) -> bool {
    let mut words = line.split_ascii_whitespace();
    let (Some(kind), Some(key)) = (words.next(), words.next()) else { return false };
    let known =
        ["ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-"].iter().any(|begin| kind.starts_with(begin));
    let base64 = key.bytes().all(|b| b.is_ascii_alphanumeric() || b"+/=".contains(&b));
    // The encoded key begins with the length of its kind's name.
    let is_key = known && base64 && key.starts_with("AAAA");
    is_key && line.len() <= GUEST_KEY_BYTES_MAX && !line.chars().any(char::is_control)
}

/// An RSA key of 16,384 bits has 2.7 KiB, and a comment follows.
const GUEST_KEY_BYTES_MAX: usize = 8192;

/// What is known of a VM when its driver decides what is next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// As its record says.
    pub state: JobState,
    /// A host was asked to start it.
    pub is_started: bool,
    /// The guest runs now.
    pub runs: bool,
}

/// What a driver does next with its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing until somebody wants something.
    Rest,
    /// As with a job's VM: it is placed, staged, started and followed.
    GoOn,
    /// The guest is asked to power off; then as [`Self::GoOn`].
    Press,
    /// It is taken down now. Its disks stay.
    TakeDown,
}

impl PersistentVm {
    /// Whether the scheduler is to find a host for it.
    pub fn waits_for_a_host(&self) -> bool {
        self.on && self.down.is_none() && self.from_backup.is_none()
    }

    /// Its disks beside its volumes.
    pub fn own_disks(&self) -> &'static [DiskRole] {
        use DiskRole::{CloudInit, Nvram, Root, Tpm};
        match (self.firmware.has_variables(), self.hardware.tpm) {
            (false, false) => &[Root, CloudInit],
            (true, false) => &[Root, CloudInit, Nvram],
            (false, true) => &[Root, CloudInit, Tpm],
            (true, true) => &[Root, CloudInit, Nvram, Tpm],
        }
    }

    /// Whether this disk of its own has what the guest wrote, so that it is not made anew.
    pub fn has(&self, role: DiskRole) -> bool {
        self.made && !(role == DiskRole::Root && self.root_is_new)
    }

    /// Which disk the volume at this place in the VM's list is.
    pub fn role_of(&self, index: usize) -> Option<DiskRole> {
        match self.slots.get(index) {
            Some(slot) => Some(DiskRole::Data(*slot)),
            None => DiskRole::data(index),
        }
    }

    /// The first disk that no volume of the VM's list is.
    pub fn free_slot(&self, volumes: usize) -> Option<u8> {
        let taken: Vec<_> = (0..volumes).filter_map(|index| self.role_of(index)).collect();
        (0..=u8::MAX).find(|slot| !taken.contains(&DiskRole::Data(*slot)))
    }

    /// A volume was added at the end of the VM's list, which had so many.
    pub fn adds(&mut self, volumes: usize, slot: u8) {
        let before = (self.slots.len()..volumes).filter_map(|index| u8::try_from(index).ok());
        self.slots.extend(before);
        self.slots.push(slot);
        self.mounts.push(None);
    }

    /// The volume at this place of the VM's list, which had so many, goes. The others stay the disks that they are.
    pub fn drops(&mut self, volumes: usize, index: usize) {
        let before = (self.slots.len()..volumes).filter_map(|index| u8::try_from(index).ok());
        self.slots.extend(before);
        if index < self.slots.len() {
            self.slots.remove(index);
        }
        if index < self.mounts.len() {
            self.mounts.remove(index);
        }
    }

    /// Takes a request into account, each once.
    pub fn apply(&mut self, number: u64, request: PowerRequest, state: JobState) {
        if number <= self.applied {
            return;
        }
        self.applied = number;
        self.note.clear();
        let (on, force) = match request {
            PowerRequest::Start => {
                self.on = true;
                return;
            }
            PowerRequest::Stop { force } => (false, force),
            PowerRequest::Restart { force } => (true, force),
        };
        self.on = on;
        if state == JobState::Queued {
            return;
        }
        let down = self.down.get_or_insert_with(|| GoingDown::new(""));
        down.force |= force;
    }

    /// What its driver does with a VM that is seen so.
    pub fn next(&self, seen: Seen, now_ms: u64) -> Next {
        match (&self.down, seen.state) {
            (Some(_), JobState::Queued) => Next::TakeDown,
            (None, JobState::Queued) if !self.on => Next::Rest,
            (None, _) => Next::GoOn,
            (Some(down), JobState::Running) if !down.force => match down.pressed_ms {
                _ if !seen.runs => Next::GoOn,
                None => Next::Press,
                Some(_) if now_ms >= down.pressed_again_ms.saturating_add(PRESS_AGAIN_MS) => {
                    Next::Press
                }
                Some(_) => Next::GoOn,
            },
            // A guest that was not started yet is not asked.
            (Some(down), JobState::Starting) if !down.force && seen.is_started => Next::GoOn,
            (Some(_), _) => Next::TakeDown,
        }
    }

    /// The power button was pressed.
    pub fn pressed(&mut self, now_ms: u64) {
        if let Some(down) = &mut self.down {
            down.pressed_ms.get_or_insert(now_ms);
            down.pressed_again_ms = now_ms;
        }
    }

    /// The VM does not run, so its guest can't be asked. Returns whether that is new.
    pub fn stands_still(&mut self, now_ms: u64) -> bool {
        let Some(down) = self.down.as_mut().filter(|down| !down.force) else { return false };
        let is_new = down.stands_ms.is_none() && down.pressed_ms.is_none();
        if is_new {
            down.stands_ms = Some(now_ms);
        }
        is_new
    }

    /// Ends a stop that the guest does not follow. Returns whether it did.
    pub fn give_up(&mut self, now_ms: u64) -> bool {
        let Some(down) = self.down.as_ref().filter(|down| !down.force) else { return false };
        let since_ms = down.pressed_ms.or(down.stands_ms);
        if since_ms.is_none_or(|since_ms| now_ms < since_ms.saturating_add(POWER_OFF_MS)) {
            return false;
        }
        let limit_s = POWER_OFF_MS / 1000;
        let why = match down.pressed_ms {
            Some(_) => {
                format!(
                    "the guest was asked to power off and did not within {limit_s} s, so it runs on"
                )
            }
            None => format!(
                "the VM stood still for {limit_s} s, so its guest could not be asked to power off"
            ),
        };
        self.down = None;
        self.on = true;
        self.note = format!("{why}; `perigee vm stop VM --force` stops it at once");
        true
    }

    /// Its QEMU has ended, or the guest powered off: it is taken down.
    pub fn ended(&mut self, why: &str) {
        match &mut self.down {
            // That is what was wanted.
            Some(down) => down.force = true,
            None => self.fail(why),
        }
    }

    /// It can't run, or not any more: it is off until somebody starts it.
    pub fn fail(&mut self, why: &str) {
        self.on = false;
        self.down = Some(GoingDown { force: true, ..GoingDown::new(why) });
    }

    /// It is about to be removed from its host.
    pub fn takes_down(&mut self) {
        if let Some(down) = &mut self.down {
            down.taken = true;
        }
    }

    /// Whether it is being removed from its host.
    pub fn is_taken_down(&self) -> bool {
        self.down.as_ref().is_some_and(|down| down.taken)
    }

    /// It is down. Returns why, where nobody has asked for that.
    pub fn is_down(&mut self) -> String {
        self.down.take().map(|down| down.reason).unwrap_or_default()
    }
}

impl GoingDown {
    fn new(reason: &str) -> Self {
        let reason = reason.to_owned();
        let (pressed_ms, stands_ms) = (None, None);
        Self { force: false, pressed_ms, pressed_again_ms: 0, stands_ms, reason, taken: false }
    }
}

/// A volume of a VM without a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewVmVolume {
    /// The volume's name in the cluster.
    pub volume: VolumeName,
    /// The guest can't write it.
    #[serde(default)]
    pub read_only: bool,
    /// Where cloud-init mounts it; `None`: nowhere.
    #[serde(default)]
    pub mount: Option<String>,
}

/// A VM to be made, without a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewVm {
    /// Unique in the cluster.
    pub name: VmId,
    /// What its root disk is a clone of.
    pub image: ImageName,
    /// vCPUs, as many as [`crate::limits::CPUS`] allows.
    pub cpus: u32,
    /// As [`crate::job::JobSpec::cpus_max`].
    #[serde(default)]
    pub cpus_max: Option<u32>,
    /// Memory, as much as [`crate::limits::MEMORY_BYTES`] allows.
    pub memory_bytes: u64,
    /// While it runs and its host and its tenant's quota have it, it gets up to so much memory; `None`: no more than `memory_bytes`.
    #[serde(default)]
    pub memory_max_bytes: Option<u64>,
    /// The size of its root disk, at least the image's; `None`: the image's.
    #[serde(default)]
    pub disk_bytes: Option<u64>,
    /// Its network card.
    #[serde(default)]
    #[schema(value_type = String)]
    pub network: NetworkKind,
    /// Its ports that are reached from outside, as `8080:80`, at the host that has its network's gateway.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub publish: Vec<Publish>,
    /// Its other disks, in their order: `data0` and so on.
    #[serde(default)]
    pub volumes: Vec<NewVmVolume>,
    /// Where it may start.
    #[serde(default)]
    pub start: Start,
    /// Whether it moves by itself: away from an overloaded host or one that is drained, or to its data. A person moves it either way.
    #[serde(default = "by_itself")]
    pub may_migrate: bool,
    /// Whether it starts again elsewhere if its host does not answer any more and all its disks are at other hosts.
    #[serde(default)]
    pub restart_elsewhere: bool,
    /// It is made and not started.
    #[serde(default)]
    pub stopped: bool,
    /// How cloud-init in its guest configures it.
    #[serde(default)]
    pub cloud_init: CloudInit,
    /// What boots its root disk.
    #[serde(default)]
    pub firmware: Firmware,
    /// What its machine is to have.
    #[serde(default)]
    pub hardware: Hardware,
    /// Beside which other VMs of its tenant it is, and beside which never.
    #[serde(default)]
    pub rules: HostRules,
    /// By which its makers find it again.
    #[serde(default)]
    pub labels: Labels,
}

fn by_itself() -> bool {
    true
}

/// Says anew what was said of a VM when it was made; what is `None` stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(min_properties = 1)]
pub struct SetVm {
    /// As [`NewVm::may_migrate`].
    #[serde(default)]
    pub may_migrate: Option<bool>,
    /// As [`NewVm::rules`]. They hold at once and in place of all rules before, and no VM moves for them.
    #[serde(default)]
    pub rules: Option<HostRules>,
}

impl SetVm {
    /// The same after another one.
    #[must_use]
    pub fn after(self, before: Self) -> Self {
        Self {
            may_migrate: self.may_migrate.or(before.may_migrate),
            rules: self.rules.or(before.rules),
        }
    }
}

/// Gives a VM a further volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachVolume {
    /// The volume's name in the cluster.
    pub volume: VolumeName,
    /// The guest can't write it.
    #[serde(default)]
    pub read_only: bool,
}

/// Takes a volume from a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DetachVolume {
    /// The volume's name in the cluster.
    pub volume: VolumeName,
}

/// Whether a stop asks the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StopVm {
    /// The VM is stopped at once, as by a power cut. Otherwise the guest is asked to power off.
    #[serde(default)]
    pub force: bool,
}

/// Makes the root disk of a VM that is off a clone of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoreVm {
    /// For example a snapshot of this VM.
    pub image: ImageName,
}

/// Another size for a VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResizeVm {
    /// vCPUs; `None`: as many as before. While the VM runs they can only become more.
    #[serde(default)]
    pub cpus: Option<u32>,
    /// With `cpus`: as in [`NewVm`]. Such a range is given to a VM that is stopped.
    #[serde(default)]
    pub cpus_max: Option<u32>,
    /// Memory; `None`: as much as before. While the VM runs it is at most what the VM was started with.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// With `memory_bytes`: as in [`NewVm`]. Such a range is given to a VM that is stopped.
    #[serde(default)]
    pub memory_max_bytes: Option<u64>,
    /// The size of its root disk, which can only grow; `None`: as before.
    #[serde(default)]
    pub disk_bytes: Option<u64>,
}

/// A file that was copied into a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CopiedFile {
    /// Its length.
    pub bytes: u64,
}

/// A program to be run in a guest, as root.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecInVm {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// What it reads from its standard input, in base64.
    #[serde(default)]
    pub input_base64: Option<String>,
    /// It is ended when nobody has asked for its status for a minute and a half.
    #[serde(default)]
    pub end_unwatched: bool,
}

/// A program that runs in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecBegun {
    /// The guest's number of it.
    pub pid: u64,
}

/// How far a program in a guest is. It is told once that it has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecStatus {
    /// Whether it has ended.
    pub exited: bool,
    /// With which code.
    pub exit_code: Option<i32>,
    /// By which signal, instead of a code.
    pub signal: Option<i32>,
    /// What it has printed.
    pub stdout_base64: String,
    /// What it has printed to standard error.
    pub stderr_base64: String,
    /// The guest agent has dropped a part of that.
    pub truncated: bool,
}

/// What a VM does, as people see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// It has no host, and is not meant to run.
    Stopped,
    /// It waits for a host with room.
    Waiting,
    /// Its disks are being made, or its QEMU is being started.
    Starting,
    /// The guest was asked to power off, or the VM is being taken down.
    Stopping,
    /// Waiting for a migration to come in.
    Incoming,
    /// The guest runs.
    Running,
    /// The guest stands still and can go on.
    Paused,
    /// Stopped by QEMU because a disk answered with an error; it goes on when the disk does.
    IoError,
    /// Its state went to another host.
    Migrated,
    /// The guest powered off, rebooted or panicked.
    Shutdown,
    /// Its QEMU has ended.
    Gone,
}

impl From<VmStatus> for VmState {
    fn from(status: VmStatus) -> Self {
        match status {
            VmStatus::Starting => Self::Starting,
            VmStatus::Incoming => Self::Incoming,
            VmStatus::Running => Self::Running,
            VmStatus::Paused => Self::Paused,
            VmStatus::IoError => Self::IoError,
            VmStatus::Migrated => Self::Migrated,
            VmStatus::Shutdown => Self::Shutdown,
            VmStatus::Gone => Self::Gone,
        }
    }
}

impl VmState {
    /// Its guest runs, or stands still and may go on.
    pub fn is_up(self) -> bool {
        matches!(self, Self::Running | Self::Paused | Self::IoError)
    }

    /// That of a VM without a job, of which no host has said anything.
    pub fn unseen(persistent: &PersistentVm, state: JobState) -> Self {
        match state {
            JobState::Queued if persistent.waits_for_a_host() => Self::Waiting,
            JobState::Queued => Self::Stopped,
            _ if persistent.down.is_some() => Self::Stopping,
            _ => Self::Starting,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(state: JobState, runs: bool) -> Seen {
        Seen { state, is_started: true, runs }
    }

    #[test]
    fn a_volume_that_goes_leaves_the_others_the_disks_that_they_are() {
        let mut vm = PersistentVm { mounts: vec![None, None, None], ..PersistentVm::default() };
        let role = DiskRole::Data;
        assert_eq!((vm.role_of(2), vm.free_slot(3)), (Some(role(2)), Some(3)));
        vm.drops(3, 1);
        assert_eq!((vm.role_of(0), vm.role_of(1)), (Some(role(0)), Some(role(2))));
        assert_eq!(vm.free_slot(2), Some(1));
        vm.adds(2, 1);
        assert_eq!((vm.slots.clone(), vm.mounts.len()), (vec![0, 2, 1], 3));
    }

    fn on() -> PersistentVm {
        PersistentVm { on: true, ..PersistentVm::default() }
    }

    #[test]
    fn a_guest_may_get_keys_of_all_kinds_and_nothing_else() {
        let with = |key: &str| CloudInit { ssh_keys: vec![key.to_owned()], ..CloudInit::default() };
        for key in [
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKey ann@desk",
            "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQC7 ann",
            "ecdsa-sha2-nistp256 AAAAE2VjZHNh",
            "sk-ssh-ed25519@openssh.com AAAAGnNrLXNz",
        ] {
            with(key).check("vm").expect(key);
        }
        for key in [
            "",
            "ssh-rsa",
            "ssh-rsa hello",
            "command=\"x\" ssh-rsa AAAA",
            "ssh-rsa AAAA\nssh-rsa AAAA",
        ] {
            with(key).check("vm").expect_err(key);
        }
        let private = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW";
        let problem = with(private).check("vm").expect_err("a private key");
        assert!(problem.why.contains("a private key"), "{problem}");
        assert!(!problem.to_string().contains("b3Blb"), "it is not shown: {problem}");
    }

    #[test]
    fn a_stop_asks_the_guest_and_a_forced_one_does_not() {
        let mut vm = on();
        vm.apply(1, PowerRequest::Stop { force: false }, JobState::Running);
        assert_eq!(vm.next(seen(JobState::Running, true), 0), Next::Press);
        vm.pressed(1000);
        assert_eq!(vm.next(seen(JobState::Running, true), 2000), Next::GoOn);
        assert_eq!(vm.next(seen(JobState::Running, true), 1000 + PRESS_AGAIN_MS), Next::Press);
        vm.apply(2, PowerRequest::Stop { force: true }, JobState::Running);
        assert_eq!(vm.next(seen(JobState::Running, true), 2000), Next::TakeDown);
    }

    #[test]
    fn a_vm_that_was_stopped_rests_until_it_is_started() {
        let mut vm = on();
        vm.apply(1, PowerRequest::Stop { force: false }, JobState::Running);
        vm.ended("the guest powered off");
        assert_eq!(vm.next(seen(JobState::Running, false), 0), Next::TakeDown);
        assert_eq!(vm.is_down(), "", "it was asked for");
        assert_eq!(vm.next(seen(JobState::Queued, false), 0), Next::Rest);
        assert!(!vm.waits_for_a_host());
        vm.apply(2, PowerRequest::Start, JobState::Queued);
        assert_eq!(vm.next(seen(JobState::Queued, false), 0), Next::GoOn);
        assert!(vm.waits_for_a_host());
    }

    #[test]
    fn a_vm_that_is_restarted_goes_down_and_waits_for_a_host() {
        let mut vm = on();
        vm.apply(1, PowerRequest::Restart { force: true }, JobState::Running);
        assert_eq!(vm.next(seen(JobState::Running, true), 0), Next::TakeDown);
        assert!(!vm.waits_for_a_host(), "it is not down yet");
        vm.is_down();
        assert!(vm.waits_for_a_host());
    }

    #[test]
    fn a_guest_that_does_not_power_off_runs_on_and_that_is_said() {
        let mut vm = on();
        vm.apply(1, PowerRequest::Stop { force: false }, JobState::Running);
        assert!(!vm.give_up(u64::MAX), "it was not asked yet");
        vm.pressed(1000);
        assert!(!vm.give_up(1000 + POWER_OFF_MS - 1));
        assert!(vm.give_up(1000 + POWER_OFF_MS));
        assert_eq!(vm.next(seen(JobState::Running, true), 0), Next::GoOn);
        assert!(vm.on && vm.note.contains("--force"), "{vm:?}");
    }

    #[test]
    fn a_vm_that_stands_still_does_not_stop_for_ever() {
        let mut vm = on();
        vm.apply(1, PowerRequest::Stop { force: false }, JobState::Running);
        assert_eq!(vm.next(seen(JobState::Running, false), 0), Next::GoOn);
        assert!(vm.stands_still(1000) && !vm.stands_still(2000), "it counts from the first time");
        assert!(!vm.give_up(1000 + POWER_OFF_MS - 1));
        assert!(vm.give_up(1000 + POWER_OFF_MS));
        assert!(vm.on && vm.note.contains("stood still"), "{vm:?}");
    }

    #[test]
    fn a_vm_that_no_host_was_asked_to_start_is_stopped_at_once() {
        let mut vm = on();
        vm.apply(1, PowerRequest::Stop { force: false }, JobState::Starting);
        let early = Seen { state: JobState::Starting, is_started: false, runs: false };
        assert_eq!(vm.next(early, 0), Next::TakeDown);
        assert_eq!(vm.next(seen(JobState::Starting, false), 0), Next::GoOn);
    }

    #[test]
    fn a_guest_that_powers_off_by_itself_is_off_and_the_reason_is_kept() {
        let mut vm = on();
        vm.ended("the guest powered off");
        assert_eq!(vm.next(seen(JobState::Running, false), 0), Next::TakeDown);
        assert_eq!(vm.is_down(), "the guest powered off");
        assert!(!vm.on);
    }

    #[test]
    fn a_request_counts_once_and_an_old_one_never() {
        let mut vm = on();
        vm.apply(2, PowerRequest::Stop { force: true }, JobState::Running);
        vm.is_down();
        let before = vm.clone();
        vm.apply(2, PowerRequest::Start, JobState::Queued);
        vm.apply(1, PowerRequest::Start, JobState::Queued);
        assert_eq!(vm, before);
    }

    #[test]
    fn a_vm_that_is_off_and_is_stopped_does_nothing() {
        let mut vm = PersistentVm::default();
        vm.apply(1, PowerRequest::Stop { force: true }, JobState::Queued);
        assert_eq!(vm.next(seen(JobState::Queued, false), 0), Next::Rest);
        assert_eq!(VmState::unseen(&vm, JobState::Queued), VmState::Stopped);
    }
}
