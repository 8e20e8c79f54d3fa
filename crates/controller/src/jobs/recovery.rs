//! A volume that a job only reads, and whose filesystem was not unmounted: a power cut has ended the VM that wrote it. Its
//! journal wants to be replayed before anybody reads the files, which takes writing. So the job reads a clone of the volume,
//! in which its guest replays the journal. The volume stays as it is.

use perigee_model::job::Access;
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{Problem, ProblemKind};

use super::driver::Run;
use super::place::own_volume;
use crate::records::{JobRecord, PlacedDisk};
use crate::storage::volumes;

/// Where the superblock of ext2, ext3 and ext4 begins.
const SUPERBLOCK_AT: usize = 1024;
const MAGIC_AT: usize = SUPERBLOCK_AT + 0x38;
const MAGIC: [u8; 2] = 0xef53_u16.to_le_bytes();
/// The features without which nobody may mount it.
const INCOMPATIBLE_AT: usize = SUPERBLOCK_AT + 0x60;
/// Its journal has to be replayed.
const RECOVER: u32 = 0x4;

/// Whether the filesystem that begins with these bytes has to be written before it can be read.
fn wants_recovery(first: &[u8]) -> bool {
    let magic = first.get(MAGIC_AT..MAGIC_AT + 2);
    let features = first.get(INCOMPATIBLE_AT..INCOMPATIBLE_AT + 4);
    let features = features.and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
    magic == Some(&MAGIC[..]) && features.is_some_and(|features| features & RECOVER != 0)
}

impl Run {
    /// A disk that is to be made: of a volume that can't be read as it is, a clone of the job's own. Of data that the controller may
    /// not read nothing is supposed: then the guest says what is wrong.
    pub(super) async fn readable(&self, disk: &PlacedDisk) -> Result<PlacedDisk, Problem> {
        let is_read = disk.role.is_data() && disk.read_only && !disk.temporary;
        if !is_read || self.persistent().is_some() {
            return Ok(disk.clone());
        }
        let home = volumes::reachable(&self.cluster, &disk.home)?;
        let path = format!("/v1/volumes/{}/data?length_bytes={BLOCK_BYTES}", disk.volume);
        match home.volume.get_bytes(&path).await {
            Ok(first) if wants_recovery(&first) => {
                tracing::info!(
                    "job {} reads a clone of volume {}: its journal wants replaying",
                    self.id,
                    disk.volume
                );
                Ok(PlacedDisk {
                    volume: own_volume(&self.id, self.record.value.restarts, disk.role),
                    data_of: Some(disk.volume.clone()),
                    read_only: false,
                    temporary: true,
                    ..disk.clone()
                })
            }
            Ok(_) => Ok(disk.clone()),
            Err(problem) if problem.kind == ProblemKind::Conflict => Ok(disk.clone()),
            Err(problem) => Err(problem),
        }
    }
}

/// What a job reads that is not the volume which its file names.
pub(super) fn in_words(record: &JobRecord) -> Option<String> {
    if record.job.state.is_final() {
        return None;
    }
    let disks = record.placement.iter().flat_map(|placement| &placement.disks);
    let cloned = |disk: &&PlacedDisk| {
        let is_only_read = record.job.spec.volumes.iter().any(|volume| {
            volume.access == Access::Read && disk.data_of.as_ref() == Some(&volume.volume)
        });
        disk.temporary && is_only_read
    };
    let names: Vec<&str> =
        disks.filter(cloned).filter_map(|disk| Some(disk.data_of.as_ref()?.as_str())).collect();
    (!names.is_empty()).then(|| {
        format!(
            "it reads a clone of volume {}, whose filesystem was not unmounted: its journal is replayed in the clone",
            names.join(" and of volume ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(features: u32) -> Vec<u8> {
        let mut first = vec![0; 4096];
        first[MAGIC_AT..MAGIC_AT + 2].copy_from_slice(&MAGIC);
        first[INCOMPATIBLE_AT..INCOMPATIBLE_AT + 4].copy_from_slice(&features.to_le_bytes());
        first
    }

    #[test]
    fn a_filesystem_whose_journal_has_entries_wants_recovery() {
        assert!(wants_recovery(&superblock(0x2c2 | RECOVER)));
        assert!(!wants_recovery(&superblock(0x2c2)), "it was unmounted");
        assert!(!wants_recovery(&[0xff; 4096]), "no filesystem");
        assert!(!wants_recovery(&superblock(RECOVER)[..1100]), "it is cut off");
        assert!(!wants_recovery(&[]));
    }
}
