//! What a job and a VM may ask for: the same rules for the CLI, the controller and the agent.
//!
//! A job file's reader ([`crate::job_file`]) checks each field by itself, to name its line. The
//! controller checks a whole [`JobSpec`], whoever sent it; the agent checks a whole [`VmSpec`].

use std::collections::{BTreeMap, BTreeSet};

use crate::budget::MoneyRules;
use crate::data::FileAddress;
use crate::disk_role::DiskRole;
use crate::job::{Access, JobSpec, JobVolume};
use crate::limits::{
    ARGUMENT_BYTES, COMMAND_BYTES, CPUS, GANG_NAME_BYTES, JOB_DISK_BYTES, JOB_NAME_BYTES,
    JOB_VOLUMES, KEEP_OUTPUTS_S, MEMBERS, MEMORY_BYTES, MONEY_MICROS, OUTPUTS, OWNER_BYTES,
    OutOfLimits, PATH_BYTES, PRIORITY, PUBLISHED, STOP_GRACE_S, TIMEOUT_S, VM_DISKS,
};
use crate::vm::{NetworkKind, VmSpec};
use crate::{GroupName, JobId, Problem, VolumeName};

/// Why a job or a VM can't be as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadSpec {
    /// A number is too small or too large.
    #[error(transparent)]
    Limit(#[from] OutOfLimits),
    /// A job's name is not one that an id can be made of.
    #[error(
        "{0:?} is not a job's name: {range}, each of a-z, 0-9, '.', '_' and '-', the first a letter or a digit",
        range = JOB_NAME_BYTES.range()
    )]
    JobName(String),
    /// The name of a job's owner has characters that can't be shown.
    #[error("an owner's name has no control characters")]
    Owner,
    /// A command without a first word, or with an empty one.
    #[error("it names no program")]
    NoProgram,
    /// The kernel ends each word of a command, each variable and each path with a zero byte.
    #[error("it can't contain a zero byte")]
    ZeroByte,
    /// Not a name that a shell can set (POSIX, Base Definitions 3.231).
    #[error("{0:?} is not an environment variable's name")]
    EnvName(String),
    /// Not a path from the guest's root on, in one way to write it.
    #[error("{0:?} is not an absolute path in the VM, without . and ..")]
    Path(String),
    /// Not a directory of the repository.
    #[error(
        "{0:?} is not a directory of the repository: write repo://TENANT/PATH, or a path in your own files"
    )]
    OutputsTo(String),
    /// The end of a range is not above its beginning.
    #[error("the most that it may have is not above what it always has")]
    NoRange,
    /// Only what a job has in its own directory is deleted after a while.
    #[error(
        "what goes to `outputs-to` is never deleted by itself, so only one of the two can be given"
    )]
    KeptElsewhere,
    /// Only a gateway publishes ports.
    #[error("a VM publishes ports only in a network of its tenant: add network: NAME")]
    PublishedNowhere,
    /// A host has each port once.
    #[error("port {0} is published twice")]
    PublishedTwice(u16),
    /// A volume over what the guest's system itself mounts.
    #[error("/{0} belongs to the VM's system: mount it elsewhere")]
    SystemMount(String),
    /// A path that would be several fields there.
    #[error(
        "cloud-init writes the path {0:?} into /etc/fstab, so it can't have spaces, control characters or `\\`"
    )]
    FstabMount(String),
    /// A job names a volume in two places.
    #[error("volume {0} is named twice")]
    VolumeTwice(VolumeName),
    /// Two volumes of a job have one directory.
    #[error("two volumes can't both be mounted at {0}")]
    MountTwice(String),
    /// Its input files are a disk too.
    #[error("a job with inputs can have {} volumes at most", JOB_VOLUMES.max - 1)]
    DiskForInputs,
    /// Two disks of a VM have one role.
    #[error("it has two disks {0}")]
    DiskTwice(DiskRole),
    /// Several VMs can't write one volume.
    #[error(
        "several VMs can't write volume {0}: say `ranks: [0]` for the only VM that has it, `access: read`, or `access: clone` for a copy for each VM"
    )]
    WrittenByMany(VolumeName),
    /// A volume of a job is in no VM, or twice in one.
    #[error("volume {volume} is for rank {rank}: a job with {count} VMs has the ranks 0 to {last}, and each is named once", last = count - 1)]
    Ranks {
        /// The volume.
        volume: VolumeName,
        /// The rank that is named and that the job has not, or twice.
        rank: u32,
        /// How many VMs the job has.
        count: u32,
    },
    /// One VM alone may be at another site than its data anyway.
    #[error(
        "the field says where VMs of a job with several VMs may be: say `count` too, or leave the field out"
    )]
    RanksOfOne,
    /// A port leads to one VM.
    #[error("a job with several VMs can't publish ports")]
    PublishedByMany,
    /// Nobody reaches a VM in a network of its own.
    #[error(
        "the VMs of a job with several ones reach each other in a network of their tenant: name one, or none"
    )]
    UserNetwork,
    /// No host has a VM and has it not.
    #[error("together and apart can't both name {0}")]
    TogetherAndApart(GroupName),
    /// Each of them would be beside the others and away from them.
    #[error("the VMs of a job with several VMs are kept together or apart: say one of the two")]
    ManyTogetherAndApart,
    /// QEMU boots the first disk.
    #[error("its first disk is {0}, and a VM boots from its root disk")]
    NotRoot(DiskRole),
}

/// Directories that the guest's system mounts itself.
const SYSTEM_DIRECTORIES: [&str; 4] = ["dev", "proc", "run", "sys"];

/// A job's name: the part of its id before the number.
///
/// # Errors
/// [`BadSpec::JobName`], also when a name made of it would be too long.
pub fn check_job_name(name: &str) -> Result<(), BadSpec> {
    let bad = || BadSpec::JobName(name.chars().take(80).collect());
    JOB_NAME_BYTES.check(name.len()).map_err(|_| bad())?;
    JobId::new(name).map(drop).map_err(|_| bad())
}

/// A command and its arguments.
///
/// # Errors
/// [`BadSpec`] when it has no program, or the kernel does not take a word of it.
pub fn check_command(command: &[String]) -> Result<(), BadSpec> {
    if command.first().is_none_or(String::is_empty) {
        return Err(BadSpec::NoProgram);
    }
    command.iter().try_for_each(|word| check_word(word, word.len()))
}

fn check_word(text: &str, length: usize) -> Result<(), BadSpec> {
    if text.contains('\0') {
        return Err(BadSpec::ZeroByte);
    }
    ARGUMENT_BYTES.check(length)?;
    Ok(())
}

/// A variable of a command's environment.
///
/// # Errors
/// [`BadSpec`] when no shell can set it or the kernel does not take it.
pub fn check_env(name: &str, value: &str) -> Result<(), BadSpec> {
    let is_name = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !is_name {
        return Err(BadSpec::EnvName(name.chars().take(80).collect()));
    }
    check_word(value, name.len() + "=".len() + value.len())
}

/// Command and environment together.
fn check_command_length(command: &[String], env: &BTreeMap<String, String>) -> Result<(), BadSpec> {
    let words = command.iter().map(|word| word.len() + 1);
    let variables = env.iter().map(|(name, value)| name.len() + value.len() + 2);
    COMMAND_BYTES.check(words.chain(variables).sum::<usize>())?;
    Ok(())
}

/// An absolute path in the guest, other than `/` itself.
///
/// # Errors
/// [`BadSpec`] when it is relative, has `.` or `..`, or is too long for Linux.
pub fn check_guest_path(path: &str) -> Result<(), BadSpec> {
    PATH_BYTES.check(path.len())?;
    if path.contains('\0') {
        return Err(BadSpec::ZeroByte);
    }
    let goes_round = path.split('/').any(|part| part == ".." || part == ".");
    if !path.starts_with('/') || path.trim_end_matches('/').is_empty() || goes_round {
        return Err(BadSpec::Path(path.chars().take(80).collect()));
    }
    Ok(())
}

/// A file or a directory that is an output, or a pattern of them: absolute, or relative to the job's directory.
///
/// # Errors
/// As [`check_guest_path`], but for a relative path.
pub fn check_output_path(path: &str) -> Result<(), BadSpec> {
    if path.starts_with('/') {
        return check_guest_path(path);
    }
    check_guest_path(&format!("/{path}")).map_err(|why| match why {
        BadSpec::Path(_) => BadSpec::Path(path.chars().take(80).collect()),
        why => why,
    })
}

/// Where a job's outputs go in the repository.
///
/// # Errors
/// [`BadSpec::OutputsTo`] when it names no directory.
pub fn check_outputs_to(text: &str) -> Result<FileAddress, BadSpec> {
    let bad = || BadSpec::OutputsTo(text.chars().take(80).collect());
    let address: FileAddress = text.parse().map_err(|_| bad())?;
    let goes_round = address.path.split('/').any(|part| matches!(part, "." | ".."));
    if address.path.is_empty() || goes_round { Err(bad()) } else { Ok(address) }
}

/// Where a volume is mounted in the guest: not over what the guest's system itself mounts.
///
/// # Errors
/// As [`check_guest_path`], and [`BadSpec::SystemMount`].
pub fn check_mount(path: &str) -> Result<(), BadSpec> {
    check_guest_path(path)?;
    let top = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
    if SYSTEM_DIRECTORIES.contains(&top) {
        return Err(BadSpec::SystemMount(top.to_owned()));
    }
    Ok(())
}

/// Where cloud-init mounts a volume: it writes the path into the guest's `/etc/fstab` as it is.
///
/// # Errors
/// As [`check_mount`], and [`BadSpec::FstabMount`].
pub fn check_fstab_mount(path: &str) -> Result<(), BadSpec> {
    check_mount(path)?;
    if path.contains(|c: char| c.is_whitespace() || c.is_control() || c == '\\') {
        return Err(BadSpec::FstabMount(path.chars().take(80).collect()));
    }
    Ok(())
}

/// Whether a job's volume goes with those before it.
///
/// # Errors
/// [`BadSpec::VolumeTwice`], [`BadSpec::MountTwice`].
pub fn check_beside(volume: &JobVolume, earlier: &[JobVolume]) -> Result<(), BadSpec> {
    if earlier.iter().any(|other| other.volume == volume.volume) {
        return Err(BadSpec::VolumeTwice(volume.volume.clone()));
    }
    let same_mount =
        |other: &JobVolume| other.mount.trim_end_matches('/') == volume.mount.trim_end_matches('/');
    if earlier.iter().any(same_mount) {
        return Err(BadSpec::MountTwice(volume.mount.clone()));
    }
    Ok(())
}

impl JobSpec {
    /// What a job's VM and a VM without a job have in common.
    ///
    /// # Errors
    /// [`Problem`] of the kind `invalid`: `what` could not be done.
    pub fn check_vm(&self, what: &str) -> Result<(), Problem> {
        let field = |field: &str, checked: Result<(), BadSpec>| {
            checked.map_err(|why| Problem::invalid(what, format!("{field}: {why}")))
        };
        field("cpus", check_cpus(self))?;
        field("memory", check_memory(self))?;
        field("volumes", within(JOB_VOLUMES.check(self.volumes.len())))?;
        field("publish", check_publish(self))?;
        field("apart", self.rules.check(1))?;
        field("owner", check_owner(&self.owner))
    }

    /// All that can be said of a job without the cluster.
    ///
    /// # Errors
    /// [`Problem`] of the kind `invalid`, which names the field as the job file does.
    pub fn check(&self) -> Result<(), Problem> {
        let field = |field: &str, checked: Result<(), BadSpec>| {
            checked.map_err(|why| {
                let name: String = self.name.chars().take(80).collect();
                Problem::invalid(format!("job {name:?}"), format!("{field}: {why}"))
                    .next("change it and submit the job again")
            })
        };
        field("name", check_job_name(&self.name))?;
        field("command", check_command(&self.command))?;
        for (name, value) in &self.env {
            field("env", check_env(name, value))?;
        }
        field("command", check_command_length(&self.command, &self.env))?;
        field("cpus", check_cpus(self))?;
        field("memory", check_memory(self))?;
        if let Some(root_bytes) = self.root_bytes {
            field("root", within(JOB_DISK_BYTES.check(root_bytes)))?;
        }
        field("output", within(JOB_DISK_BYTES.check(self.output_bytes)))?;
        field("volumes", within(JOB_VOLUMES.check(self.volumes.len())))?;
        if self.inputs.is_some() && JOB_VOLUMES.check(self.volumes.len() + 1).is_err() {
            field("volumes", Err(BadSpec::DiskForInputs))?;
        }
        for (index, volume) in self.volumes.iter().enumerate() {
            field("volumes", check_mount(&volume.mount))?;
            field("volumes", check_beside(volume, &self.volumes[..index]))?;
        }
        field("outputs", within(OUTPUTS.check(self.outputs.len())))?;
        self.outputs.iter().try_for_each(|path| field("outputs", check_output_path(path)))?;
        if let Some(to) = &self.outputs_to {
            field("outputs-to", check_outputs_to(to).map(drop))?;
        }
        if let Some(keep_s) = self.keep_outputs_s {
            field("keep-outputs", within(KEEP_OUTPUTS_S.check(keep_s)))?;
            if self.outputs_to.is_some() {
                field("keep-outputs", Err(BadSpec::KeptElsewhere))?;
            }
        }
        if let Some(timeout_s) = self.timeout_s {
            field("timeout", within(TIMEOUT_S.check(timeout_s)))?;
        }
        field("stop-grace", within(STOP_GRACE_S.check(self.stop_grace_s)))?;
        field("priority", within(PRIORITY.check(self.priority)))?;
        let MoneyRules { budget, waiting_costs_per_hour, .. } = self.money;
        for (name, money) in [("budget", budget), ("waiting-costs", waiting_costs_per_hour)] {
            let micros = money.unwrap_or_default().micros;
            field(name, within(MONEY_MICROS.check(micros)))?;
        }
        field("publish", check_publish(self))?;
        field("count", within(MEMBERS.check(self.count)))?;
        for volume in &self.volumes {
            field("volumes", check_ranks(volume, self.count))?;
        }
        field("apart", self.rules.check(self.count))?;
        if self.is_gang() {
            field("name", within(GANG_NAME_BYTES.check(self.name.len())))?;
            let is_written_by_many =
                |volume: &&JobVolume| volume.access == Access::Write && volume.ranks.len() != 1;
            if let Some(volume) = self.volumes.iter().find(is_written_by_many) {
                field("volumes", Err(BadSpec::WrittenByMany(volume.volume.clone())))?;
            }
            if matches!(self.network, NetworkKind::User | NetworkKind::Bridge(_)) {
                field("network", Err(BadSpec::UserNetwork))?;
            }
            if !self.publish.is_empty() {
                field("publish", Err(BadSpec::PublishedByMany))?;
            }
        }
        if !self.is_gang() && !self.ranks.is_never() {
            field("ranks", Err(BadSpec::RanksOfOne))?;
        }
        field("owner", check_owner(&self.owner))
    }
}

fn check_ranks(volume: &JobVolume, count: u32) -> Result<(), BadSpec> {
    let mut named = BTreeSet::new();
    match volume.ranks.iter().find(|rank| **rank >= count || !named.insert(**rank)) {
        Some(rank) => Err(BadSpec::Ranks { volume: volume.volume.clone(), rank: *rank, count }),
        None => Ok(()),
    }
}

fn check_cpus(spec: &JobSpec) -> Result<(), BadSpec> {
    CPUS.check(spec.cpus)?;
    match spec.cpus_max {
        Some(most) if most <= spec.cpus => Err(BadSpec::NoRange),
        Some(most) => within(CPUS.check(most)),
        None => Ok(()),
    }
}

fn check_memory(spec: &JobSpec) -> Result<(), BadSpec> {
    MEMORY_BYTES.check(spec.memory_bytes)?;
    match spec.memory_max_bytes {
        Some(most) if most <= spec.memory_bytes => Err(BadSpec::NoRange),
        Some(most) => within(MEMORY_BYTES.check(most)),
        None => Ok(()),
    }
}

fn check_publish(spec: &JobSpec) -> Result<(), BadSpec> {
    PUBLISHED.check(spec.publish.len())?;
    if !spec.publish.is_empty() && spec.network.name().is_none() {
        return Err(BadSpec::PublishedNowhere);
    }
    let mut taken = std::collections::BTreeSet::new();
    match spec.publish.iter().find(|one| !taken.insert((one.protocol, one.outside))) {
        Some(twice) => Err(BadSpec::PublishedTwice(twice.outside)),
        None => Ok(()),
    }
}

fn check_owner(owner: &str) -> Result<(), BadSpec> {
    OWNER_BYTES.check(owner.len())?;
    if owner.chars().any(char::is_control) { Err(BadSpec::Owner) } else { Ok(()) }
}

fn within<T>(checked: Result<T, OutOfLimits>) -> Result<(), BadSpec> {
    checked.map(drop).map_err(BadSpec::Limit)
}

impl VmSpec {
    /// What every QEMU of ours can start with.
    ///
    /// # Errors
    /// [`Problem`] of the kind `invalid`.
    pub fn check(&self) -> Result<(), Problem> {
        self.judge().map_err(|why| Problem::invalid(format!("start the VM {}", self.vm), why))
    }

    fn judge(&self) -> Result<(), BadSpec> {
        CPUS.check(self.cpus)?;
        match self.machine.cpus_least {
            Some(least) if least >= self.cpus => return Err(BadSpec::NoRange),
            Some(least) => within(CPUS.check(least))?,
            None => {}
        }
        MEMORY_BYTES.check(self.memory_bytes)?;
        match self.machine.memory_least_bytes {
            Some(least) if least >= self.memory_bytes => return Err(BadSpec::NoRange),
            Some(least) => within(MEMORY_BYTES.check(least))?,
            None => {}
        }
        VM_DISKS.check(self.disks.len())?;
        for (index, disk) in self.disks.iter().enumerate() {
            if index == 0 && disk.role != DiskRole::Root {
                return Err(BadSpec::NotRoot(disk.role));
            }
            if self.disks[..index].iter().any(|other| other.role == disk.role) {
                return Err(BadSpec::DiskTwice(disk.role));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "spec/tests.rs"]
mod tests;
