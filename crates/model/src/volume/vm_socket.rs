//! The NBD socket of one VM.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{VmId, VolumeName};

/// A VM's own NBD socket at its host's volume server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSocket {
    /// The VM that uses it.
    pub vm: VmId,
    /// The user of the VM's QEMU. No other user may connect. No other VM has this user, unless it is the volume
    /// server's own.
    pub uid: u32,
    /// The exports that it serves, each `VOLUME@EPOCH`.
    pub exports: Vec<String>,
}

/// Where that socket is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSocketAt {
    /// On the volume server's host.
    pub path: PathBuf,
}

/// A VM's socket as the volume server sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSocketSeen {
    /// What it is for.
    #[serde(flatten)]
    pub socket: VmSocket,
    /// How many connections the VM's QEMU has open. Each disk has one.
    pub connections: usize,
    /// The volumes whose homes do not answer.
    pub unanswered: Vec<Unanswered>,
}

/// A volume of a VM whose home does not answer this host's volume server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unanswered {
    /// The volume.
    pub volume: VolumeName,
    /// `IP:PORT` of the home's NBD server.
    pub nbd_addr: String,
    /// Unix time.
    pub since_ms: u64,
}
