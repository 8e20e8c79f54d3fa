//! What the host and the runner in the guest say to each other.
//!
//! **Seed disk** (serial `seed`): a tar stream from byte 0. Its first entry is `job.json`
//! ([`Seed`]); the others are the input files, below `inputs/`, with ownership in the guest's numbering.
//!
//! **Output disk** (serial `output`): the runner writes one tar stream from byte 0 and then says how
//! long it is. The host never mounts it.
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

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::DiskRole;

pub const PORT_NAME: &str = "org.perigee.job";

/// A line longer than this is cut by the guest and is a framing error for the host.
pub const LINE_BYTES_MAX: usize = 64 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seed {
    pub job: String,
    /// Run as `command[0]` with the rest as arguments, as root, in `/job`.
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub mounts: Vec<Mount>,
    /// Paths in the guest that go to the output disk.
    pub outputs: Vec<String>,
    pub timeout_s: Option<u64>,
}

/// A data disk and where the job finds it. An empty disk gets an ext4 filesystem first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    #[serde(rename = "serial")]
    pub role: DiskRole,
    pub path: String,
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuestMessage {
    pub seq: u64,
    /// Milliseconds since the guest booted, by the guest's clock.
    pub uptime_ms: u64,
    #[serde(flatten)]
    pub body: GuestBody,
}

/// A message as the agent hands it on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuestEvent {
    /// How long before this answer it came to the agent: whoever reads it late still knows when it happened,
    /// whatever the hosts' clocks say.
    #[serde(default)]
    pub age_ms: u64,
    #[serde(flatten)]
    pub message: GuestMessage,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum GuestBody {
    /// The runner has read the seed and mounted the disks; the command starts now.
    Started,
    Log {
        stream: LogStream,
        line: String,
    },
    /// From the FIFO named by `PERIGEE_PROGRESS`, where the command writes lines `DONE/TOTAL LABEL`.
    Progress {
        done: u64,
        total: u64,
        label: String,
    },
    /// The command ended; outputs are written next. `code` is 128 + N for a signal N.
    Exited {
        code: i32,
    },
    /// The output tar stands on the output disk; the guest powers off after the acknowledgement.
    Finished {
        output_bytes: u64,
        output_sha256: String,
    },
    /// The runner itself could not do its part (a mount, a bad seed).
    Failed {
        reason: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogStream {
    Stdout,
    Stderr,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostMessage {
    /// Send again all that is not acknowledged.
    Resume,
    /// Everything up to and including this number is stored.
    Ack(u64),
}
