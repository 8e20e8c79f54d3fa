//! What qemu-guest-agent in a guest answers, as far as somebody uses it (QEMU's `qga/qapi-schema.json`).
//!
//! All of it is the guest's word. A host's agent reads an answer as one of these types and passes on nothing else, so that
//! an answer takes no more memory than its line.

use serde::{Deserialize, Serialize};

/// The longest answer that is read, with all that is around its data.
pub const ANSWER_BYTES_MAX: usize = 256 << 10;

/// A part of a file that is copied: in base64 it fits into an answer, and into a request to a host's agent.
pub const FILE_PART_BYTES: usize = 128 << 10;

/// `guest-exec-status`
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ProgramStatus {
    /// It has ended.
    pub exited: bool,
    /// With which code.
    pub exitcode: Option<i32>,
    /// By which signal.
    pub signal: Option<i32>,
    /// What it has printed, in base64.
    pub out_data: String,
    /// What it has printed to standard error, in base64.
    pub err_data: String,
    /// A part of the first is missing.
    pub out_truncated: bool,
    /// A part of the second is missing.
    pub err_truncated: bool,
}

/// One of `guest-network-get-interfaces`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Card {
    /// As the guest's kernel has it, for example `eth0`.
    pub name: String,
    /// None without a configuration.
    #[serde(default)]
    pub ip_addresses: Vec<CardAddress>,
}

/// An address of a [`Card`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CardAddress {
    /// Of IPv4 or IPv6.
    pub ip_address: std::net::IpAddr,
}

/// `guest-file-read`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct FilePart {
    /// In base64.
    pub buf_b64: String,
    /// Nothing follows.
    pub eof: bool,
}

/// `guest-file-write`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileWritten {
    /// Bytes that were taken, which may be fewer than were sent.
    pub count: usize,
}
