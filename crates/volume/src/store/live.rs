//! The live map of a head: which blocks it has, as a kill of this process leaves it.
//!
//! A volume server may be killed while its VMs live on, and QEMU then reconnects and does not
//! send again what was acknowledged. Those writes are in the page cache, but the durable map
//! ([`super::map`]) knows of a block only after a flush. So every change of a block's state is
//! also written here, without a sync, after the block's data and before the acknowledgement.
//!
//! File `UUID.live`: a header page as the durable map's, with magic `PERIGEEL` and the kernel's
//! boot id in bytes 40..56, then the packed states. The header is written last at creation.
//!
//! **What it means.** While the kernel that wrote it runs, the page cache is whole, and this file
//! has the truth. After another boot nothing is known about which of its pages reached the disk:
//! it is ignored and made anew. So a state that only stands here never outlives its data.
//!
//! **Limits.** It trusts that within one boot the filesystem under the pool is not torn away and
//! brought back with pages lost; the kernel reports that as a failed sync, which poisons the head.

use std::io;
use std::sync::Arc;

use perigee_model::LayerId;
use uuid::Uuid;

use super::blocks::BlockStates;
use super::files::{BlockFile, LayerFiles, Space};
use super::map::{self, Magic, PAGE_BYTES};

pub(super) struct LiveMap {
    file: Arc<dyn BlockFile>,
}

impl LiveMap {
    pub(super) fn create(
        files: &dyn LayerFiles,
        name: &str,
        layer: LayerId,
        boot: Uuid,
        states: &BlockStates,
    ) -> io::Result<Self> {
        let length_bytes = (PAGE_BYTES + states.packed().len()) as u64;
        let file = files.create(name, length_bytes, Space::Reserved)?;
        let live = Self { file };
        live.write(0, states.packed())?;
        let header = map::header(Magic::Live, layer, states.blocks(), boot.as_bytes());
        live.file.write_at(0, &header)?;
        Ok(live)
    }

    /// `None` unless this boot's kernel has the truth in it.
    pub(super) fn load(
        file: Arc<dyn BlockFile>,
        layer: LayerId,
        boot: Uuid,
        blocks: u64,
    ) -> io::Result<Option<(Self, BlockStates)>> {
        let mut packed = vec![0; BlockStates::new(blocks).packed().len()];
        if file.len()? != (PAGE_BYTES + packed.len()) as u64 {
            return Ok(None);
        }
        let mut header = vec![0; PAGE_BYTES];
        file.read_at(0, &mut header)?;
        if header != map::header(Magic::Live, layer, blocks, boot.as_bytes()) {
            return Ok(None);
        }
        file.read_at(PAGE_BYTES as u64, &mut packed)?;
        Ok(BlockStates::from_packed(packed, blocks).map(|states| (Self { file }, states)))
    }

    /// Writes packed states from byte `first_byte` of them on.
    pub(super) fn write(&self, first_byte: usize, bytes: &[u8]) -> io::Result<()> {
        self.file.write_at((PAGE_BYTES + first_byte) as u64, bytes)
    }
}
