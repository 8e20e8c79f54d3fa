//! The live map of a head: which blocks it has, as a kill of this process leaves it.
//!
//! A volume server may be killed while its VMs live on, and QEMU then reconnects and does not
//! send again what was acknowledged. Those writes are in the page cache, but the durable map
//! ([`super::map`]) knows of a block only after a flush. So every change of a block's state is
//! also written here, without a sync, after the block's data and before the acknowledgement.
//!
//! File `UUID.live`, sparse: a header page as the durable map's, with magic `PERIGEEL` and the
//! kernel's boot id in bytes 40..56, then the packed states. The header is written last at
//! creation. Byte 56 is 1 once a sync of the layer has failed.
//!
//! **What it means.** While the kernel that wrote it runs, the page cache is whole, and this file
//! has the truth. After another boot nothing is known about which of its pages reached the disk:
//! it is ignored and made anew. So a state that only stands here never outlives its data.
//!
//! **A failed sync is noted here first.** The kernel reports a lost write once, and the catalog, on
//! what may be the same failing disk, can take its time or refuse. A note in the page cache is
//! there at once, and a server that takes over after a kill knows that what it finds may not be
//! what was written. (Killed *in* the sync that fails, nobody was told: then the next sync reports
//! it, or, if the dying process has taken the report with it, no one does.)
//!
//! **Limits.** It trusts that within one boot the filesystem under the pool is not torn away and
//! brought back with pages lost; the kernel reports that as a failed sync, which poisons the head.

use std::io;
use std::sync::Arc;

use perigee_model::LayerId;
use uuid::Uuid;

use super::blocks::{BlockStates, PAGE_STATE_BYTES, index, packed_bytes, page_count};
use super::files::{BlockFile, LayerFiles};
use super::map::{self, Magic, MapError, PAGE_BYTES};

pub(super) struct LiveMap {
    file: Arc<dyn BlockFile>,
    /// What its header is once a sync has failed.
    poisoned: Vec<u8>,
    /// It was that when it was opened.
    pub(super) was_poisoned: bool,
}

/// The header, as it is once a sync has failed or before.
fn header(layer: LayerId, boot: Uuid, blocks: u64, poisoned: bool) -> Vec<u8> {
    let mut header = map::header(Magic::Live, layer, blocks, boot.as_bytes());
    if poisoned {
        header[POISONED_BYTE] = 1;
        map::seal(&mut header);
    }
    header
}

/// Of the header.
const POISONED_BYTE: usize = 56;

fn file_bytes(blocks: u64) -> u64 {
    PAGE_BYTES as u64 + packed_bytes(blocks)
}

/// Where the packed states of a page begin, and their length: the last page's may be shorter.
fn place(page: usize, blocks: u64) -> (u64, usize) {
    let first_byte = (page * PAGE_STATE_BYTES) as u64;
    let length = index(packed_bytes(blocks) - first_byte).min(PAGE_STATE_BYTES);
    (first_byte, length)
}

impl LiveMap {
    pub(super) fn create(
        files: &dyn LayerFiles,
        name: &str,
        layer: LayerId,
        boot: Uuid,
        states: &BlockStates,
    ) -> io::Result<Self> {
        let blocks = states.blocks();
        let file = files.create(name, file_bytes(blocks))?;
        let poisoned = header(layer, boot, blocks, true);
        let live = Self { file, poisoned, was_poisoned: false };
        for page in states.pages_in_use() {
            let (first_byte, length) = place(page, states.blocks());
            live.write(first_byte, &states.payload(page)[..length])?;
        }
        live.file.write_at(0, &header(layer, boot, blocks, false))?;
        Ok(live)
    }

    /// `None` unless this boot's kernel has the truth in it.
    pub(super) fn load(
        file: Arc<dyn BlockFile>,
        layer: LayerId,
        boot: Uuid,
        blocks: u64,
    ) -> Result<Option<(Self, BlockStates)>, MapError> {
        if file.len()? != file_bytes(blocks) {
            return Ok(None);
        }
        let mut found = vec![0; PAGE_BYTES];
        file.read_at(0, &mut found)?;
        let poisoned = header(layer, boot, blocks, true);
        let live = Self { was_poisoned: found == poisoned, file, poisoned };
        if !live.was_poisoned && found != header(layer, boot, blocks, false) {
            return Ok(None);
        }
        let states = BlockStates::new(blocks);
        let mut next_page = 0;
        while let Some(data) =
            live.file.next_data((PAGE_BYTES + next_page * PAGE_STATE_BYTES) as u64)?
        {
            let page_of = |offset: u64| (index(offset) - PAGE_BYTES) / PAGE_STATE_BYTES;
            let first = page_of(data.start).max(next_page);
            next_page = page_of(data.end - 1) + 1;
            for page in first..next_page.min(page_count(blocks)) {
                let (first_byte, length) = place(page, blocks);
                let mut payload = vec![0; length];
                live.file.read_at(PAGE_BYTES as u64 + first_byte, &mut payload)?;
                if payload.iter().any(|byte| *byte != 0) && !states.load(page, &payload) {
                    return Err(MapError::States);
                }
            }
        }
        Ok(Some((live, states)))
    }

    /// Notes that a sync of the layer has failed.
    pub(super) fn poison(&self) -> io::Result<()> {
        self.file.write_at(0, &self.poisoned)
    }

    /// Writes packed states from byte `first_byte` of them on.
    pub(super) fn write(&self, first_byte: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_at(PAGE_BYTES as u64 + first_byte, bytes)
    }
}
