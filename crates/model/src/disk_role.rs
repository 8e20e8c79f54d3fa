//! What a VM's disk is for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a VM's disk is for. In JSON, as virtio-blk's serial number and as the name of QEMU's block
/// node it is `root`, `seed`, `output`, `inputs`, `cidata`, `nvram`, `tpm`, `data0`, `data1` and so on: the runner in the guest finds
/// its disks by it. (A serial number has at most 20 bytes, `VIRTIO_BLK_ID_BYTES`.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DiskRole {
    /// A clone of the job's image, which the VM boots.
    Root,
    /// A tar with the job's description; never written by the guest.
    Seed,
    /// The guest writes its outputs to it, as a tar.
    Output,
    /// What cloud-init reads in a VM without a job: a FAT filesystem. Never written by the guest.
    CloudInit,
    /// The variables of a VM's UEFI firmware. It is the firmware's flash memory and no disk of the guest.
    Nvram,
    /// The state of a VM's TPM. It is no disk of the guest either.
    Tpm,
    /// A clone of the image of the job's input files, which the guest mounts.
    Inputs,
    /// The job's volume of this index, from 0, in the order of the job file.
    Data(u8),
}

/// Why a text is no [`DiskRole`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not what a disk is for: root, seed, output, inputs, cidata, nvram, tpm, or data0 to data255"
)]
pub struct BadDiskRole {
    text: String,
}

impl DiskRole {
    /// Whether it is the same disk at all starts of a VM that lives without a job.
    pub fn lasts(self) -> bool {
        matches!(self, Self::Root | Self::Nvram | Self::Tpm)
    }

    /// The disk of a job's volume; `None` where there is no such role. (How many volumes a job can
    /// have says [`crate::limits::JOB_VOLUMES`].)
    pub fn data(index: usize) -> Option<Self> {
        u8::try_from(index).ok().map(Self::Data)
    }

    /// Whether it is one of the job's volumes and not of the VM's own disks.
    pub fn is_data(self) -> bool {
        matches!(self, Self::Data(_))
    }

    /// Whether the guest has it as a disk.
    pub fn is_disk_of_guest(self) -> bool {
        !matches!(self, Self::Nvram | Self::Tpm)
    }
}

impl fmt::Display for DiskRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.pad("root"),
            Self::Seed => f.pad("seed"),
            Self::Output => f.pad("output"),
            Self::CloudInit => f.pad("cidata"),
            Self::Nvram => f.pad("nvram"),
            Self::Tpm => f.pad("tpm"),
            Self::Inputs => f.pad("inputs"),
            Self::Data(index) => f.pad(&format!("data{index}")),
        }
    }
}

impl FromStr for DiskRole {
    type Err = BadDiskRole;

    fn from_str(text: &str) -> Result<Self, BadDiskRole> {
        let role = match text {
            "root" => Some(Self::Root),
            "seed" => Some(Self::Seed),
            "output" => Some(Self::Output),
            "cidata" => Some(Self::CloudInit),
            "nvram" => Some(Self::Nvram),
            "tpm" => Some(Self::Tpm),
            "inputs" => Some(Self::Inputs),
            _ => text
                .strip_prefix("data")
                .and_then(|index| Self::data(index.parse().ok()?))
                // One way to write each: no `data00`, no `data+1`.
                .filter(|role| role.to_string() == text),
        };
        role.ok_or_else(|| BadDiskRole { text: text.chars().take(80).collect() })
    }
}

impl TryFrom<String> for DiskRole {
    type Error = BadDiskRole;

    fn try_from(text: String) -> Result<Self, BadDiskRole> {
        text.parse()
    }
}

impl From<DiskRole> for String {
    fn from(role: DiskRole) -> String {
        role.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_written_as_the_guest_reads_it_from_the_disk() {
        for (role, text) in [
            (DiskRole::Root, "root"),
            (DiskRole::Seed, "seed"),
            (DiskRole::Output, "output"),
            (DiskRole::CloudInit, "cidata"),
            (DiskRole::Nvram, "nvram"),
            (DiskRole::Tpm, "tpm"),
            (DiskRole::Inputs, "inputs"),
            (DiskRole::Data(0), "data0"),
            (DiskRole::Data(255), "data255"),
        ] {
            assert_eq!(serde_json::to_string(&role).unwrap(), format!("{text:?}"));
            assert_eq!(serde_json::from_str::<DiskRole>(&format!("{text:?}")).unwrap(), role);
            assert!(text.len() <= 20, "virtio-blk has room for it");
        }
    }

    #[test]
    fn what_no_vm_has_is_no_role() {
        for text in ["", "data", "data00", "data+1", "data256", "Root", "root,x"] {
            assert!(text.parse::<DiskRole>().is_err(), "{text:?}");
        }
        assert_eq!(DiskRole::data(256), None);
    }
}
