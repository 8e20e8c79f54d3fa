//! A simulated disk, and the states in which a power cut may leave it.
//!
//! **Assumptions about a real disk.** A 512-byte sector is old or new, never a mix. Until a file is
//! synced, each of its sectors may keep the synced version or any later one, independently of its
//! neighbours and of other files: writes tear at every sector, and are reordered and dropped. The same
//! holds for names until the directory is synced: a file may be missing, be back again, or still be the one
//! that it replaced. After a failed sync, data that was not durable stays in doubt for ever: the kernel
//! reports the error once and marks the pages clean, so a later sync succeeds without writing them. (This
//! does not hold for names: a filesystem that fails to sync a directory stops its journal, and no later
//! sync succeeds.) The catalog has its last commit: SQLite with `synchronous=FULL` syncs its log before a
//! commit returns, and this is trusted.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use crate::disk::blocks::index;

pub(crate) const SECTOR_BYTES: usize = 512;

pub(crate) type Sector = Arc<[u8; SECTOR_BYTES]>;
pub(super) type InodeId = u64;

/// One change of the disk.
#[derive(Clone)]
pub(crate) enum Op {
    /// Creates a file that is empty until its length is set. An existing file becomes empty.
    Create {
        name: String,
        inode: InodeId,
    },
    SetLength {
        inode: InodeId,
        length_bytes: u64,
    },
    Write {
        inode: InodeId,
        offset: u64,
        data: Vec<u8>,
    },
    Punch {
        inode: InodeId,
        offset: u64,
        length_bytes: u64,
    },
    Sync {
        inode: InodeId,
    },
    /// A sync that includes the file's length.
    SyncCreated {
        inode: InodeId,
    },
    /// A sync that reports an error.
    FailedSync {
        inode: InodeId,
    },
    Remove {
        name: String,
    },
    SyncNames,
    /// A commit of the catalog, with its bytes.
    Catalog(Arc<Vec<u8>>),
    /// The disk after a power cut.
    Replaced(Box<Disk>),
}

impl Op {
    /// The part of this operation that a process leaves if it dies within it; `None` if that is all or
    /// nothing.
    pub(crate) fn torn(&self) -> Option<Self> {
        match self {
            Self::Write { inode, offset, data } => {
                let data = first_part(*offset, data).to_vec();
                (!data.is_empty()).then_some(Self::Write { inode: *inode, offset: *offset, data })
            }
            _ => None,
        }
    }
}

/// About half of a write, up to the end of a sector.
pub(super) fn first_part(offset: u64, data: &[u8]) -> &[u8] {
    let middle = offset + data.len() as u64 / 2;
    let end = middle / SECTOR_BYTES as u64 * SECTOR_BYTES as u64;
    &data[..index(end.saturating_sub(offset))]
}

/// Which of the unsynced changes survive a power cut.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cut {
    Nothing,
    /// All changes before operation `n` and none of the later ones: the disk kept the order.
    Before(u64),
    /// All or nothing for each file and each name.
    ByFile(u64),
    /// Any version of each sector and each name.
    BySector(u64),
}

/// A small random generator with a seed, good enough to choose sectors.
#[derive(Clone)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        index((mixed ^ (mixed >> 31)) % n as u64)
    }
}

/// Makes the choices of a [`Cut`].
struct Chooser {
    cut: Cut,
    dice: Dice,
    /// For [`Cut::ByFile`], whether this file keeps its changes.
    keeps_file: bool,
}

impl Chooser {
    fn new(cut: Cut) -> Self {
        let (Cut::ByFile(seed) | Cut::BySector(seed)) = cut else {
            return Self { cut, dice: Dice(0), keeps_file: false };
        };
        Self { cut, dice: Dice(seed), keeps_file: false }
    }

    fn next_file(&mut self) {
        self.keeps_file = self.dice.below(2) == 1;
    }

    /// Chooses the version that survives. The first one is the last synced one.
    fn choose<'a, T>(&mut self, versions: &'a [(u64, T)]) -> &'a T {
        let last = versions.len() - 1;
        let at = match self.cut {
            Cut::Nothing => 0,
            Cut::Before(end) => versions.iter().rposition(|(at, _)| *at < end).unwrap_or(0),
            Cut::ByFile(_) if self.keeps_file => last,
            Cut::ByFile(_) => 0,
            Cut::BySector(_) => self.dice.below(versions.len()),
        };
        &versions[at].1
    }
}

/// The durable version of something, followed by its later versions, each with the operation that made it.
#[derive(Clone)]
struct Pending<T> {
    versions: Vec<(u64, T)>,
    /// A sync has failed, so no later sync makes it durable.
    in_doubt: bool,
}

impl<T> Pending<T> {
    fn since(durable: T) -> Self {
        Self { versions: vec![(0, durable)], in_doubt: false }
    }

    fn push(&mut self, now: u64, version: T) {
        self.versions.push((now, version));
        self.in_doubt = false;
    }
}

#[derive(Clone, Default)]
struct Inode {
    length_bytes: u64,
    pending_length: Option<Pending<u64>>,
    /// Sectors that are not all zeros.
    sectors: BTreeMap<u64, Sector>,
    pending: BTreeMap<u64, Pending<Sector>>,
}

impl Inode {
    fn sector(&self, at: u64) -> Sector {
        self.sectors.get(&at).cloned().unwrap_or_else(|| Arc::new([0; SECTOR_BYTES]))
    }

    fn set(&mut self, at: u64, sector: Sector) {
        if sector.iter().all(|byte| *byte == 0) {
            self.sectors.remove(&at);
        } else {
            self.sectors.insert(at, sector);
        }
    }

    fn change(&mut self, now: u64, offset: u64, length_bytes: u64, with: impl Fn(u64) -> u8) {
        let mut at = offset;
        while at < offset + length_bytes {
            let number = at / SECTOR_BYTES as u64;
            let end = ((number + 1) * SECTOR_BYTES as u64).min(offset + length_bytes);
            let old = self.sector(number);
            let mut new = *old;
            for place in at..end {
                new[index(place % SECTOR_BYTES as u64)] = with(place - offset);
            }
            let new = Arc::new(new);
            let pending = self.pending.entry(number).or_insert_with(|| Pending::since(old));
            pending.push(now, Arc::clone(&new));
            self.set(number, new);
            at = end;
        }
    }

    fn set_length(&mut self, now: u64, length_bytes: u64) {
        let old = self.length_bytes;
        self.pending_length.get_or_insert_with(|| Pending::since(old)).push(now, length_bytes);
        if length_bytes < old {
            let from = length_bytes.next_multiple_of(SECTOR_BYTES as u64);
            if from > length_bytes {
                self.change(
                    now,
                    length_bytes,
                    (from - length_bytes).min(old - length_bytes),
                    |_| 0,
                );
            }
            let beyond: Vec<u64> =
                self.sectors.range(from / SECTOR_BYTES as u64..).map(|(at, _)| *at).collect();
            for at in beyond {
                self.change(now, at * SECTOR_BYTES as u64, SECTOR_BYTES as u64, |_| 0);
            }
        }
        self.length_bytes = length_bytes;
    }

    fn synced(&mut self) {
        self.pending.retain(|_, pending| pending.in_doubt);
    }

    fn length_synced(&mut self) {
        self.pending_length = self.pending_length.take().filter(|pending| pending.in_doubt);
    }

    fn sync_failed(&mut self) {
        self.pending.values_mut().for_each(|pending| pending.in_doubt = true);
        self.pending_length.iter_mut().for_each(|pending| pending.in_doubt = true);
    }

    fn cut(&mut self, chooser: &mut Chooser) {
        for (at, pending) in std::mem::take(&mut self.pending) {
            self.set(at, Arc::clone(chooser.choose(&pending.versions)));
        }
        if let Some(pending) = self.pending_length.take() {
            self.length_bytes = *chooser.choose(&pending.versions);
            // The range beyond the end reads as zeros if the file grows again.
            self.sectors.split_off(&self.length_bytes.div_ceil(SECTOR_BYTES as u64));
        }
    }
}

#[derive(Clone, Default)]
pub(crate) struct Disk {
    /// The number of operations so far.
    now: u64,
    inodes: BTreeMap<InodeId, Inode>,
    names: BTreeMap<String, InodeId>,
    pending_names: BTreeMap<String, Pending<Option<InodeId>>>,
    catalog: Option<Arc<Vec<u8>>>,
}

impl Disk {
    pub(crate) fn apply(&mut self, op: &Op) {
        self.now += 1;
        let now = self.now;
        match op {
            Op::Create { name, inode } => match self.names.get(name) {
                Some(there) => self.inode_mut(*there).set_length(now, 0),
                None => {
                    self.inodes.insert(*inode, Inode::default());
                    self.point(name, Some(*inode));
                }
            },
            Op::SetLength { inode, length_bytes } => {
                self.inode_mut(*inode).set_length(now, *length_bytes);
            }
            Op::Write { inode, offset, data } => {
                let length_bytes = data.len() as u64;
                self.inode_mut(*inode).change(now, *offset, length_bytes, |at| data[index(at)]);
            }
            Op::Punch { inode, offset, length_bytes } => {
                self.inode_mut(*inode).change(now, *offset, *length_bytes, |_| 0);
            }
            Op::Sync { inode } => self.inode_mut(*inode).synced(),
            Op::SyncCreated { inode } => {
                self.inode_mut(*inode).synced();
                self.inode_mut(*inode).length_synced();
            }
            Op::FailedSync { inode } => self.inode_mut(*inode).sync_failed(),
            Op::Remove { name } => self.point(name, None),
            Op::SyncNames => self.pending_names.clear(),
            Op::Catalog(bytes) => self.catalog = Some(Arc::clone(bytes)),
            Op::Replaced(disk) => *self = Self { now, ..Disk::clone(disk) },
        }
    }

    fn inode_mut(&mut self, id: InodeId) -> &mut Inode {
        self.inodes.get_mut(&id).expect("inodes stay until a power cut")
    }

    fn point(&mut self, name: &str, to: Option<InodeId>) {
        let from = match to {
            Some(inode) => self.names.insert(name.to_owned(), inode),
            None => self.names.remove(name),
        };
        let pending =
            self.pending_names.entry(name.to_owned()).or_insert_with(|| Pending::since(from));
        pending.push(self.now, to);
    }

    /// The disk after a power cut now.
    pub(crate) fn after(&self, cut: Cut) -> Self {
        let mut chooser = Chooser::new(cut);
        let mut disk = self.clone();
        for inode in disk.inodes.values_mut() {
            chooser.next_file();
            inode.cut(&mut chooser);
        }
        for (name, pending) in std::mem::take(&mut disk.pending_names) {
            chooser.next_file();
            match chooser.choose(&pending.versions) {
                Some(inode) => disk.names.insert(name, *inode),
                None => disk.names.remove(&name),
            };
        }
        let named: Vec<InodeId> = disk.names.values().copied().collect();
        disk.inodes.retain(|inode, _| named.contains(inode));
        disk
    }

    pub(crate) fn operations(&self) -> u64 {
        self.now
    }

    /// The catalog's bytes as of its last commit.
    pub(crate) fn catalog(&self) -> Option<&Arc<Vec<u8>>> {
        self.catalog.as_ref()
    }

    pub(super) fn find(&self, name: &str) -> Option<InodeId> {
        self.names.get(name).copied()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.names.keys().cloned().collect()
    }

    pub(super) fn next_inode(&self) -> InodeId {
        self.inodes.keys().next_back().map_or(0, |last| last + 1)
    }

    pub(super) fn length_bytes(&self, inode: InodeId) -> u64 {
        self.inodes[&inode].length_bytes
    }

    /// The space of blocks that are not all zeros, as in a sparse file.
    pub(super) fn used_bytes(&self, inode: InodeId) -> u64 {
        const BLOCK_SECTORS: u64 = 8;
        let blocks: BTreeSet<u64> =
            self.inodes[&inode].sectors.keys().map(|at| at / BLOCK_SECTORS).collect();
        blocks.len() as u64 * BLOCK_SECTORS * SECTOR_BYTES as u64
    }

    /// The next sectors from `from` on that are not all zeros.
    pub(super) fn next_data(&self, inode: InodeId, from: u64) -> Option<Range<u64>> {
        let sector_bytes = SECTOR_BYTES as u64;
        let inode = &self.inodes[&inode];
        let (first, _) = inode.sectors.range(from / sector_bytes..).next()?;
        let end = (*first..).find(|at| !inode.sectors.contains_key(at))?;
        let found = from.max(first * sector_bytes)..(end * sector_bytes).min(inode.length_bytes);
        (!found.is_empty()).then_some(found)
    }

    /// Fills the buffer; `false` beyond the end.
    pub(super) fn read(&self, inode: InodeId, offset: u64, buffer: &mut [u8]) -> bool {
        let inode = &self.inodes[&inode];
        if offset + buffer.len() as u64 > inode.length_bytes {
            return false;
        }
        let mut at = offset;
        let mut rest = buffer;
        while !rest.is_empty() {
            let within = index(at % SECTOR_BYTES as u64);
            let length = (SECTOR_BYTES - within).min(rest.len());
            let (part, later) = rest.split_at_mut(length);
            match inode.sectors.get(&(at / SECTOR_BYTES as u64)) {
                Some(sector) => part.copy_from_slice(&sector[within..within + length]),
                None => part.fill(0),
            }
            at += length as u64;
            rest = later;
        }
        true
    }

    /// Describes an operation, for the message of a failed test.
    pub(crate) fn describe(&self, op: &Op) -> String {
        let name = |inode: &InodeId| {
            let found = self.names.iter().find(|(_, there)| *there == inode);
            found.map_or_else(|| format!("inode {inode}"), |(name, _)| name.clone())
        };
        match op {
            Op::Create { name, .. } => format!("create {name}"),
            Op::SetLength { inode, length_bytes } => {
                format!("{}: length {length_bytes}", name(inode))
            }
            Op::Write { inode, offset, data } => {
                format!("{}: write {} at {offset}", name(inode), data.len())
            }
            Op::Punch { inode, offset, length_bytes } => {
                format!("{}: punch {length_bytes} at {offset}", name(inode))
            }
            Op::SyncCreated { inode } => format!("{}: sync with length", name(inode)),
            Op::Sync { inode } => format!("{}: sync", name(inode)),
            Op::FailedSync { inode } => format!("{}: sync that fails", name(inode)),
            Op::Remove { name } => format!("remove {name}"),
            Op::SyncNames => "sync names".to_owned(),
            Op::Catalog(_) => "catalog commit".to_owned(),
            Op::Replaced(_) => "power cut".to_owned(),
        }
    }
}
