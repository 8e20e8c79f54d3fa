//! A VM without a job whose disks are being made of the backup of one. Its record has this until they are, so that its driver goes on with it after a restart.

use serde::{Deserialize, Serialize};

use crate::backup::BackupTarget;
use crate::{BackupName, DiskRole, HostId, LayerId, Problem, VolumeName};

/// What the disks of a VM are made of, and how far that is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FromBackup {
    /// The backup of the root disk, which stands for all.
    pub backup: BackupName,
    /// Where the backup is.
    pub from: BackupTarget,
    /// A disk is made when all its bytes were read and checked. Otherwise its bytes come afterwards.
    pub whole: bool,
    /// The disks, in the order in which they are made.
    pub disks: Vec<DiskFromBackup>,
    /// Why the disks can't be made: the VM is being deleted, with those that were made.
    pub failed: Option<Problem>,
}

/// A disk of such a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFromBackup {
    /// What the disk is for.
    pub role: DiskRole,
    /// The new volume.
    pub volume: VolumeName,
    /// Its home.
    pub host: HostId,
    /// The backup of the disk; `None`: there is none, and the disk is made as that of a new VM.
    pub backup: Option<BackupName>,
    /// The new layer with the backup's bytes. By that a later try knows the volume again.
    pub layer: LayerId,
    /// The size of the disk.
    pub size_bytes: u64,
    /// The volume is there.
    pub is_made: bool,
}
