//! The durable map of a layer: the states of its blocks, which survive a power cut.
//!
//! File `UUID.map`, pages of 4096 bytes. Page 0 is the header:
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | CRC32C of the rest of the page, little endian as every number here |
//! | 4..12 | `PERIGEEM` |
//! | 12..16 | version, 1 |
//! | 16..32 | the layer's UUID |
//! | 32..40 | blocks of the layer |
//!
//! Then two slots, A and B, for each 4064 bytes of packed states (16256 blocks, 63.5 MiB):
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | CRC32C of the rest of the slot |
//! | 4..8 | which page of states this is |
//! | 8..16 | generation, from 1 |
//! | 16..32 | the layer's UUID |
//! | 32..4096 | states, 2 bits each: 0 absent, 1 data, 2 zero, 3 at another host |
//!
//! **Meaning.** The valid slot with the higher generation has the states. A state is written here only
//! after the block's data is durable, so a block that is data in the map has its bytes. A page is always
//! written into the slot that does *not* have the current states. So a torn write fails its CRC, and the
//! other slot still has everything that was flushed. A slot of zeros was never written. If a page has no
//! valid slot and one slot of zeros, its first write was torn, and all its blocks are absent. The file is
//! sparse. A page's slots take space as soon as the page of states is used ([`reserve`]), so a full disk
//! fails a write and never a flush. The header is written with the first store.
//!
//! State 3 is only in the maps of incomplete copies of a layer's own blocks, and a map of any other layer that
//! has it is damaged. Programs before the pool's format 7 take such a map for damaged too; the format keeps
//! them from opening the pool.
//!
//! **Limits.** Damage of the current slot can't be told from a torn write; the map then returns to the
//! previous states. Two damaged slots are an error, never a guess. A torn slot with a matching CRC
//! (1 in 2³²) is accepted. The map says nothing about the bytes of a block.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use perigee_model::LayerId;

use crate::disk::blocks::{self, BlockStates, PAGE_STATE_BYTES};
use crate::disk::files::BlockFile;

/// The bytes of a page of a map file.
pub(crate) const PAGE_BYTES: usize = 4096;
const SLOT_HEADER_BYTES: usize = PAGE_BYTES - PAGE_STATE_BYTES;
const VERSION: u32 = 1;

/// The kind of file to which a header belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Magic {
    Durable,
    Live,
    Checksums,
}

impl Magic {
    fn bytes(self) -> [u8; 8] {
        match self {
            Self::Durable => *b"PERIGEEM",
            Self::Live => *b"PERIGEEL",
            Self::Checksums => *b"PERIGEES",
        }
    }
}

/// The reason why a map can't be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MapError {
    #[error("its header is damaged or belongs to another layer")]
    Header,
    #[error("both copies of page {0} are damaged")]
    Page(usize),
    #[error("its states are damaged")]
    States,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl MapError {
    /// Whether the same may work a moment later: this process or its host lacks something that others use now.
    pub(crate) fn passes(&self) -> bool {
        use nix::libc::{EINTR, EMFILE, ENFILE, ENOMEM};
        let code = if let Self::Io(error) = self { error.raw_os_error() } else { None };
        code.is_some_and(|code| [EINTR, EMFILE, ENFILE, ENOMEM].contains(&code))
    }
}

/// The reason why pages could not be stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// The pages may be stored again.
    #[error("can't write the map: {0}")]
    Write(io::Error),
    /// The content of the disk is no longer known.
    #[error("can't sync the map: {0}")]
    Sync(io::Error),
}

/// The slot that holds a page's states, and their generation (0: never written).
#[derive(Debug, Clone, Copy, Default)]
struct Current {
    slot: usize,
    generation: u64,
}

/// The map file of one layer: each page has two slots, and a flush writes the one that is not current.
pub(crate) struct MapFile {
    file: Arc<dyn BlockFile>,
    layer: LayerId,
    blocks: u64,
    /// The pages that were ever written, with their current slots.
    current: HashMap<usize, Current>,
    /// Nothing was stored yet, not even the header.
    is_new: bool,
}

/// Length of the map file of a layer.
pub(crate) fn file_bytes(blocks: u64) -> u64 {
    slot_offset(blocks::page_count(blocks), 0)
}

fn slot_offset(page: usize, slot: usize) -> u64 {
    (PAGE_BYTES * (1 + 2 * page + slot)) as u64
}

/// Reserves space for the header, which the first store writes.
pub(crate) fn reserve_header(file: &dyn BlockFile) -> io::Result<()> {
    file.reserve(0, PAGE_BYTES as u64)
}

/// Reserves space for the two slots of a page.
pub(crate) fn reserve(file: &dyn BlockFile, page: usize) -> io::Result<()> {
    file.reserve(slot_offset(page, 0), 2 * PAGE_BYTES as u64)
}

/// Puts the page's checksum (CRC-32C of all other bytes) into its first 4 bytes.
pub(crate) fn seal(page: &mut [u8]) {
    let crc = crc32c::crc32c(&page[4..]);
    page[..4].copy_from_slice(&crc.to_le_bytes());
}

/// Whether the page's checksum is right.
pub(crate) fn is_sealed(page: &[u8]) -> bool {
    page[..4] == crc32c::crc32c(&page[4..]).to_le_bytes()
}

/// The header page of a file of states. `tag` is the boot id of a live map.
pub(crate) fn header(magic: Magic, layer: LayerId, blocks: u64, tag: &[u8; 16]) -> Vec<u8> {
    let mut page = vec![0; PAGE_BYTES];
    page[4..12].copy_from_slice(&magic.bytes());
    page[12..16].copy_from_slice(&VERSION.to_le_bytes());
    page[16..32].copy_from_slice(layer.0.as_bytes());
    page[32..40].copy_from_slice(&blocks.to_le_bytes());
    page[40..56].copy_from_slice(tag);
    seal(&mut page);
    page
}

/// Whether a map file has a header, which is written with its first store.
pub(crate) fn has_header(file: &dyn BlockFile) -> io::Result<bool> {
    let mut header = vec![0; PAGE_BYTES];
    file.read_at(0, &mut header)?;
    Ok(header.iter().any(|byte| *byte != 0))
}

fn check_header(file: &dyn BlockFile, layer: LayerId, blocks: u64) -> Result<(), MapError> {
    if file.len()? != file_bytes(blocks) {
        return Err(MapError::Header);
    }
    let mut found = vec![0; PAGE_BYTES];
    file.read_at(0, &mut found)?;
    if found == header(Magic::Durable, layer, blocks, &[0; 16]) {
        Ok(())
    } else {
        Err(MapError::Header)
    }
}

/// The slots of the pages that were ever written, in order.
fn read_slots(
    file: &dyn BlockFile,
    blocks: u64,
    mut each: impl FnMut(usize, &[u8]) -> Result<(), MapError>,
) -> Result<(), MapError> {
    let mut slots = vec![0; 2 * PAGE_BYTES];
    let mut next_page = 0;
    // Slots in a hole of the file were never written.
    while let Some(data) = file.next_data(slot_offset(next_page, 0))? {
        let page_of = |offset: u64| (blocks::index(offset) / PAGE_BYTES - 1) / 2;
        let first = page_of(data.start).max(next_page);
        next_page = page_of(data.end - 1) + 1;
        for page in first..next_page.min(blocks::page_count(blocks)) {
            file.read_at(slot_offset(page, 0), &mut slots)?;
            each(page, &slots)?;
        }
    }
    Ok(())
}

/// The pages whose states are not known, because both slots are damaged.
///
/// # Errors
/// When the header is damaged, or the file can't be read.
pub(crate) fn damaged_pages(
    file: &dyn BlockFile,
    layer: LayerId,
    blocks: u64,
) -> Result<Vec<usize>, MapError> {
    check_header(file, layer, blocks)?;
    let mut damaged = Vec::new();
    read_slots(file, blocks, |page, slots| {
        if choose(slots, layer, page).is_err() {
            damaged.push(page);
        }
        Ok(())
    })?;
    Ok(damaged)
}

impl MapFile {
    /// The map of a layer without blocks, in a new file with [`file_bytes`] bytes.
    pub(crate) fn new(file: Arc<dyn BlockFile>, layer: LayerId, blocks: u64) -> Self {
        Self { file, layer, blocks, current: HashMap::new(), is_new: true }
    }

    /// Nothing was stored yet.
    pub(crate) fn is_new(&self) -> bool {
        self.is_new
    }

    /// Writes a map with these states durably into a new file with [`file_bytes`] bytes.
    pub(crate) fn create(
        file: Arc<dyn BlockFile>,
        layer: LayerId,
        states: &BlockStates,
    ) -> io::Result<Self> {
        let mut map = Self::new(file, layer, states.blocks());
        let used: Vec<_> = states.pages_in_use().map(|page| (page, states.payload(page))).collect();
        match map.store(&used) {
            Ok(()) => Ok(map),
            Err(StoreError::Write(error) | StoreError::Sync(error)) => Err(error),
        }
    }

    /// Writes the map of a new layer as [`Self::create`] does, with space for every later store of its pages.
    pub(crate) fn create_reserved(
        file: Arc<dyn BlockFile>,
        layer: LayerId,
        states: &BlockStates,
    ) -> io::Result<Self> {
        reserve_header(&*file)?;
        states.pages_in_use().try_for_each(|page| reserve(&*file, page))?;
        Self::create(file, layer, states)
    }

    /// Reads the states. The file must be synced before: the slot that is read must be durable, because the
    /// next store overwrites the other one.
    pub(crate) fn load(
        file: Arc<dyn BlockFile>,
        layer: LayerId,
        blocks: u64,
    ) -> Result<(Self, BlockStates), MapError> {
        check_header(&*file, layer, blocks)?;
        let states = BlockStates::new(blocks);
        let mut current = HashMap::new();
        read_slots(&*file, blocks, |page, slots| {
            let chosen = choose(slots, layer, page)?;
            if chosen.generation > 0 {
                let from = chosen.slot * PAGE_BYTES + SLOT_HEADER_BYTES;
                if !states.load(page, &slots[from..from + PAGE_STATE_BYTES]) {
                    return Err(MapError::States);
                }
                current.insert(page, chosen);
            }
            Ok(())
        })?;
        let map = Self { is_new: false, current, ..Self::new(file, layer, blocks) };
        Ok((map, states))
    }

    /// Writes pages of states and makes them durable. Their data must be durable already.
    pub(crate) fn store(&mut self, pages: &[(usize, Vec<u8>)]) -> Result<(), StoreError> {
        if self.is_new {
            let header = header(Magic::Durable, self.layer, self.blocks, &[0; 16]);
            self.file.write_at(0, &header).map_err(StoreError::Write)?;
        }
        for (page, payload) in pages {
            let to = self.next(*page);
            let mut slot = vec![0; PAGE_BYTES];
            let number = u32::try_from(*page).expect("a map of less than 2^32 pages");
            slot[4..8].copy_from_slice(&number.to_le_bytes());
            slot[8..16].copy_from_slice(&to.generation.to_le_bytes());
            slot[16..32].copy_from_slice(self.layer.0.as_bytes());
            slot[SLOT_HEADER_BYTES..SLOT_HEADER_BYTES + payload.len()].copy_from_slice(payload);
            seal(&mut slot);
            self.file.write_at(slot_offset(*page, to.slot), &slot).map_err(StoreError::Write)?;
        }
        let synced = if self.is_new { self.file.sync_created() } else { self.file.sync() };
        synced.map_err(StoreError::Sync)?;
        self.is_new = false;
        for (page, _) in pages {
            let stored = self.next(*page);
            self.current.insert(*page, stored);
        }
        Ok(())
    }

    /// The slot and generation for the next store of a page.
    fn next(&self, page: usize) -> Current {
        let current = self.current.get(&page).copied().unwrap_or_default();
        Current { slot: 1 - current.slot, generation: current.generation + 1 }
    }
}

/// The generation in a slot: `Some(0)` if the slot was never written, `None` if it is damaged.
fn generation(slot: &[u8], layer: LayerId, page: usize) -> Option<u64> {
    if slot.iter().all(|byte| *byte == 0) {
        return Some(0);
    }
    let number = u32::try_from(page).ok()?;
    let ours = is_sealed(slot)
        && slot[4..8] == number.to_le_bytes()
        && slot[16..32] == *layer.0.as_bytes();
    ours.then(|| u64::from_le_bytes(slot[8..16].try_into().expect("eight bytes")))
}

fn choose(slots: &[u8], layer: LayerId, page: usize) -> Result<Current, MapError> {
    let (a, b) = slots.split_at(PAGE_BYTES);
    let (a, b) = (generation(a, layer, page), generation(b, layer, page));
    match (a, b) {
        // B is written first, so a damaged A with an unwritten B can't come from a torn write.
        (None, None | Some(0)) => Err(MapError::Page(page)),
        (a, b) if a >= b => Ok(Current { slot: 0, generation: a.unwrap_or(0) }),
        (_, b) => Ok(Current { slot: 1, generation: b.unwrap_or(0) }),
    }
}
