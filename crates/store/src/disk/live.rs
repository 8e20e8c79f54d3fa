//! The live map of a head: the states of its blocks, for the case that this process is killed.
//!
//! A volume server may be killed while its VMs keep running. QEMU then reconnects and does not repeat
//! acknowledged writes. Their bytes are in the page cache, but the durable map ([`crate::disk::map`]) has the
//! blocks only after a flush. So every change of a block's state is also written here, without a sync,
//! after the block's data and before the acknowledgement.
//!
//! The file `UUID.live` is sparse. It has a header page like the durable map's, with magic `PERIGEEL` and
//! the kernel's boot id in bytes 40..56, and then the packed states. The header is written last at
//! creation. Byte 56 is 1 after a sync of the layer has failed.
//!
//! **Meaning.** While the kernel that wrote it runs, the page cache is complete, and this file is right.
//! After another boot it is not known which of its pages reached the disk, so the file is ignored and
//! written again. So a state that is only in this file never outlives its data.
//!
//! **A failed sync is recorded here first.** The kernel reports a lost write only once. The catalog may be
//! on the same failing disk, so writing to it may take long or fail. A note in the page cache is visible
//! at once: a server that starts after a kill knows that the data may not be what was written. (If the
//! process is killed *during* the failing sync, no client was told. Then the next sync reports the error,
//! or nothing does, if the dying process has consumed the report.)
//!
//! **Limits.** The map assumes that within one boot the filesystem of the pool is not unmounted and mounted
//! again with lost pages. The kernel reports such a loss as a failed sync, which poisons the head.

use std::io;
use std::sync::Arc;

use perigee_model::LayerId;
use uuid::Uuid;

use crate::disk::blocks::{BlockStates, PAGE_STATE_BYTES, index, packed_bytes, page_count};
use crate::disk::files::{BlockFile, LayerFiles};
use crate::disk::map::{self, Magic, MapError, PAGE_BYTES};

/// The map file that is written with each change, without a sync.
pub(crate) struct LiveMap {
    file: Arc<dyn BlockFile>,
    /// The header to write after a sync has failed.
    poisoned: Vec<u8>,
    /// Whether a sync had failed when the map was opened.
    pub(crate) was_poisoned: bool,
}

/// The header page. `poisoned` says whether a sync has failed.
fn header(layer: LayerId, boot: Uuid, blocks: u64, poisoned: bool) -> Vec<u8> {
    let mut header = map::header(Magic::Live, layer, blocks, boot.as_bytes());
    if poisoned {
        header[POISONED_BYTE] = 1;
        map::seal(&mut header);
    }
    header
}

/// The offset in the header.
const POISONED_BYTE: usize = 56;

fn file_bytes(blocks: u64) -> u64 {
    PAGE_BYTES as u64 + packed_bytes(blocks)
}

/// The offset and the length of a page's packed states. The last page may be shorter.
fn place(page: usize, blocks: u64) -> (u64, usize) {
    let first_byte = (page * PAGE_STATE_BYTES) as u64;
    let length = index(packed_bytes(blocks) - first_byte).min(PAGE_STATE_BYTES);
    (first_byte, length)
}

impl LiveMap {
    pub(crate) fn create(
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

    /// Returns `None` unless the map was written in this boot and is complete.
    pub(crate) fn load(
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

    /// Records that a sync of the layer has failed.
    pub(crate) fn poison(&self) -> io::Result<()> {
        self.file.write_at(0, &self.poisoned)
    }

    /// Writes packed states at the offset `first_byte` of all packed states.
    pub(crate) fn write(&self, first_byte: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_at(PAGE_BYTES as u64 + first_byte, bytes)
    }
}
