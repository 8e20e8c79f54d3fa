//! What the host and the runner in the guest say to each other.
//!
//! **Seed disk** (serial `seed`): a tar stream from byte 0. Its first entry is `job.json`
//! ([`Seed`]). Entries below `inputs/` may follow, with ownership in the guest's numbering: a VM without Perigee gets
//! its input files so.
//!
//! **Inputs disk** (serial `inputs`): an ext4 filesystem with the job's input files, a mount like those of the data disks.
//!
//! **Output disk** (serial `output`): the runner writes one tar stream from byte 0 and then says how
//! long it is. The host never mounts it.
//!
//! **cidata disk** (serial `cidata`), if the root disk has no [`RUNNER_MARK`]: what cloud-init reads. It has the runner as the file
//! `runner`, and says that it is started.
//!
//! **Channel**: the virtio-serial port `org.perigee.job`, one JSON object a line, both ways. The
//! guest numbers its messages from 1 without a gap and keeps each until it is acknowledged, so that
//! neither a migration nor a restarted agent loses one: when a host says `resume`, the guest sends
//! everything that is not acknowledged again, in order. The host ignores numbers it already has.
//! A new connection may begin in the middle of a line whose start went to the old one: the host says
//! `resume` again when a line does not parse or a number is missing. The guest has at most 64 KiB under way without
//! an acknowledgement.
//! A data disk is unmounted before `exited`; a command stopped by its timeout never has code 0.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::DiskRole;

/// The name of the virtio-serial port between runner and agent, in `/dev/virtio-ports` in the
/// guest.
pub const PORT_NAME: &str = "org.perigee.job";

/// In the second sector of a disk whose system has the runner and starts it by itself. What has another image gets the runner
/// from a disk for cloud-init.
pub const RUNNER_MARK: &[u8] = b"perigee-runner";

/// Where [`RUNNER_MARK`] is.
pub const RUNNER_MARK_AT: usize = 512;

/// A line longer than this is cut by the guest and is a framing error for the host.
pub const LINE_BYTES_MAX: usize = 64 * 1024;

/// The description of a job on the seed disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seed {
    /// The job's id, for the guest's own messages.
    pub job: String,
    /// Run as `command[0]` with the rest as arguments, as root, in `/job`. Empty only with `collect`.
    pub command: Vec<String>,
    /// The command's environment, beside what the runner sets itself.
    pub env: BTreeMap<String, String>,
    /// The job's input files, then its volumes in the order of the job file.
    pub mounts: Vec<Mount>,
    /// Paths in the guest that go to the output disk, and patterns of paths. A relative one begins at the job's directory.
    pub outputs: Vec<String>,
    /// `/output` is to have so much room, because the job's file says so.
    pub output_bytes: Option<u64>,
    /// The command is ended after so many seconds from its start; `None`: never.
    pub timeout_s: Option<u64>,
    /// A process of the job that is to end gets SIGTERM, and SIGKILL so many seconds later.
    pub stop_grace_s: u64,
    /// The address of its network card, if it has one.
    pub network: Option<GuestNetwork>,
    /// The other VMs of its job, if it is one of several.
    pub gang: Option<GuestGang>,
    /// The VM ended under its job and is started once more: nothing is run, and the outputs are what is on its disks. The command
    /// is empty then.
    pub collect: bool,
}

/// What a guest is told of the gang that it belongs to ([`crate::gang`]).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestGang {
    /// Which of the members it is.
    pub rank: u32,
    /// All of them, in the order of their ranks.
    pub members: Vec<GuestMember>,
    /// vCPUs of each: so many processes an MPI program starts there.
    pub slots: u32,
    /// The addresses of their network, as `10.7.0.0/24`.
    pub subnet: String,
    /// Only the first runs the command. The others are there until they are asked to end it.
    pub mpi: bool,
    /// With which each member logs in to each.
    pub user: GuestKey,
    /// As which each member's SSH server proves itself.
    pub host: GuestKey,
}

/// A key for SSH, made for one gang.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestKey {
    /// As OpenSSH writes it.
    pub private: String,
    /// One line, as in `authorized_keys`.
    pub public: String,
}

/// A member of a gang as the others reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestMember {
    /// Its host name.
    pub name: String,
    /// In the gang's network.
    pub address: Ipv4Addr,
}

impl std::fmt::Debug for GuestGang {
    /// Without its keys.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestGang")
            .field("rank", &self.rank)
            .field("members", &self.members)
            .finish()
    }
}

/// How a guest reaches its network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNetwork {
    /// The card's own one.
    pub address: Ipv4Addr,
    /// How many bits of the address are the network's.
    pub prefix_bits: u8,
    /// The way to everything else.
    pub gateway: Ipv4Addr,
    /// A resolver of names.
    pub dns: Ipv4Addr,
    /// The guest goes on if it can't set it up: nobody has asked for it.
    pub optional: bool,
}

/// That of every VM in a [`crate::vm::NetworkKind::User`] network, at every host.
pub const USER_NETWORK: GuestNetwork = GuestNetwork {
    address: Ipv4Addr::new(10, 0, 2, 15),
    prefix_bits: 24,
    gateway: Ipv4Addr::new(10, 0, 2, 2),
    dns: Ipv4Addr::new(10, 0, 2, 3),
    optional: false,
};

/// A data disk and where the job finds it. An empty disk gets an ext4 filesystem first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// By its serial number the runner finds the disk.
    #[serde(rename = "serial")]
    pub role: DiskRole,
    /// An absolute path in the guest; the directory is made if it is not there.
    pub path: String,
    /// It is mounted read-only; an empty disk is then an error.
    pub read_only: bool,
}

/// One line of the guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuestMessage {
    /// From 1 on without a gap, for the whole life of the guest.
    pub seq: u64,
    /// Milliseconds since the guest booted, by the guest's clock.
    pub uptime_ms: u64,
    /// What it says.
    #[serde(flatten)]
    pub body: GuestBody,
}

/// In the place of a reason that may not leave the site of the job's data.
const HIDDEN: &str = "why may not leave the site of this job's data";

impl GuestMessage {
    /// The message without the command's own words.
    #[must_use]
    pub fn without_words(self) -> Self {
        let body = match self.body {
            GuestBody::Log { stream, .. } => GuestBody::log(stream, String::new()),
            GuestBody::Progress { done, total, .. } => {
                GuestBody::Progress { done, total, label: String::new() }
            }
            GuestBody::LeftOut(LeftOut { is_lost, .. }) => GuestBody::LeftOut(LeftOut {
                path: String::new(),
                why: "the names of files may not leave the site of this job's data".to_owned(),
                is_lost,
            }),
            GuestBody::Failed { .. } => GuestBody::Failed { reason: HIDDEN.to_owned() },
            GuestBody::Finished { lacks: Some(_), output_bytes, output_sha256 } => {
                GuestBody::Finished { lacks: Some(HIDDEN.to_owned()), output_bytes, output_sha256 }
            }
            body => body,
        };
        Self { body, ..self }
    }
}

/// A message as the agent hands it on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuestEvent {
    /// How long before this answer it came to the agent: whoever reads it late still knows when it happened,
    /// whatever the hosts' clocks say.
    pub age_ms: u64,
    /// As the guest sent it.
    #[serde(flatten)]
    pub message: GuestMessage,
}

/// What the runner in the guest says of its job. Logs and progress come while the command runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum GuestBody {
    /// Only of a gang's member: the runner has read the seed, mounted the disks and set up the network. It waits for
    /// [`HostMessage::Begin`].
    Ready,
    /// The runner has read the seed and mounted the disks; the command starts now.
    Started,
    /// A line of the command's output, or a part of one.
    Log {
        /// Where the command wrote it.
        stream: LogStream,
        /// Without the end of the line; cut so that the message fits into [`LINE_BYTES_MAX`].
        line: String,
        /// The line goes on in the next message of this stream: it is long, or its end had not come after a moment.
        #[serde(default, skip_serializing_if = "is_false")]
        continues: bool,
    },
    /// From the FIFO named by `PERIGEE_PROGRESS`, where the command writes lines `DONE/TOTAL LABEL`.
    Progress {
        /// How many of `total` are done, in whatever the command counts.
        done: u64,
        /// What `done` will be at the end.
        total: u64,
        /// The command's own words for what it does now; may be empty.
        label: String,
    },
    /// The guest's kernel has killed processes of the job because no memory was left. Said at once, and again when there are more.
    OutOfMemory {
        /// How many until now.
        killed: u64,
        /// The memory that all programs of the guest have together.
        memory_bytes: u64,
    },
    /// The command ended; outputs are written next. `code` is 128 + N for a signal N.
    Exited {
        /// 0 to 255; 0 is success.
        code: i32,
        /// What the code does not say.
        end: CommandEnd,
    },
    /// A file that is not among the outputs. All of them come before [`GuestBody::Finished`].
    LeftOut(LeftOut),
    /// The output tar stands on the output disk; the guest powers off after the acknowledgement.
    Finished {
        /// The tar's length on the disk.
        output_bytes: u64,
        /// The SHA-256 of these bytes, in lower-case hexadecimal digits.
        output_sha256: String,
        /// Why the tar has not all of the outputs, beside the files that were named; `None` if it has.
        lacks: Option<String>,
    },
    /// All that was in memory when the host asked for it is on the disks.
    Synced {
        /// The number with which the host asked; `None` if it has said none.
        number: Option<u32>,
    },
    /// The runner itself could not do its part (a mount, a bad seed).
    Failed {
        /// Why not, for the person who submitted the job.
        reason: String,
    },
}

pub(crate) fn is_false(flag: &bool) -> bool {
    !flag
}

impl GuestBody {
    /// A whole line of the command's output.
    pub fn log(stream: LogStream, line: impl Into<String>) -> Self {
        Self::Log { stream, line: line.into(), continues: false }
    }

    /// The command ended with this code, and nobody has stopped it.
    #[must_use]
    pub fn exited(code: i32) -> Self {
        Self::Exited { code, end: CommandEnd::default() }
    }
}

/// A file of a job that is not among its outputs in the repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftOut {
    /// Where it was in the guest. Bytes that are no UTF-8 are shown as `\xe9`.
    pub path: String,
    /// Why it was left out.
    pub why: String,
    /// It had content, which is lost: the job has failed. Without: a device, a FIFO, a link that leads nowhere and the like.
    pub is_lost: bool,
}

/// A file's name, or a path, in words: bytes that are no UTF-8 are shown as `\xe9`.
pub fn name_in_text(name: &[u8]) -> String {
    let chunks = name.utf8_chunks();
    let text = chunks.map(|chunk| {
        let invalid: String = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")).collect();
        format!("{}{invalid}", chunk.valid())
    });
    text.collect()
}

/// The holes of all outputs may be so many times as large as the output disk. They take no room there, but in the repository.
pub const HOLES_FACTOR: u64 = 16;

/// How a command ended, beside its code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct CommandEnd {
    /// The signal that ended it; `None`: it has exited.
    pub signal: Option<i32>,
    /// Why it was stopped; `None`: it ended by itself.
    pub stopped: Option<Stopped>,
    /// A process did not end within the job's `stop-grace`, and was killed.
    pub outlived_grace: bool,
}

/// Why a command was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    /// It ran longer than the job's `timeout`.
    TimedOut,
    /// Somebody asked for it.
    Cancelled,
}

/// Which of its two outputs a command wrote to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogStream {
    /// Its file descriptor 1.
    Stdout,
    /// Its file descriptor 2.
    Stderr,
}

/// A runner's reason begins so if it can't read what it is to do, for example because it is older than the controller.
pub const SEED_REFUSED: &str = "the seed disk is not valid";

/// What the agent says to the runner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostMessage {
    /// Send again all that is not acknowledged.
    Resume,
    /// Everything up to and including this number is stored.
    Ack(u64),
    /// All members of the gang are ready: the command may start. A later one changes nothing.
    Begin,
    /// The command is to end now; then the outputs are written as after any end. A later one changes nothing.
    EndCommand,
    /// The number of the next [`HostMessage::Sync`].
    SyncNumber(u32),
    /// Write everything that is in memory to the disks, and say [`GuestBody::Synced`].
    Sync,
    /// The VM has stood still, and with it the guest's clock: this is its host's. A guest whose clock is behind sets it.
    Clock {
        /// Unix time in microseconds.
        unix_us: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names_that_are_no_utf8_are_two_texts() {
        let names: [&[u8]; 3] = [b"caf\xe9.txt", b"caf\xe8.txt", "café.txt".as_bytes()];
        assert_eq!(names.map(name_in_text), ["caf\\xe9.txt", "caf\\xe8.txt", "café.txt"]);
    }
}
