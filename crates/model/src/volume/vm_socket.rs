//! The NBD socket of one VM.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::VmId;

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
