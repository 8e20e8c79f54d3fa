//! Files that do to unsynced writes what a power cut does: each 512-byte sector keeps what was
//! synced, or any version written since, whatever its neighbours keep. And files that fail.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::blocks::index;
use super::files::{BlockFile, LayerFiles};

pub(super) const SECTOR_BYTES: usize = 512;

/// Contents of sectors since they were last known durable, that one first.
#[derive(Default)]
pub(super) struct Versions(BTreeMap<usize, Vec<Vec<u8>>>);

impl Versions {
    /// Call before and after the bytes change.
    pub(super) fn record(&mut self, bytes: &[u8], from: usize, length: usize) {
        if length == 0 {
            return;
        }
        for sector in from / SECTOR_BYTES..=(from + length - 1) / SECTOR_BYTES {
            let end = ((sector + 1) * SECTOR_BYTES).min(bytes.len());
            let now = bytes[sector * SECTOR_BYTES..end].to_vec();
            self.0.entry(sector).or_default().push(now);
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Vec<Vec<u8>>)> {
        self.0.iter().map(|(sector, versions)| (*sector, versions))
    }
}

/// Small, seeded, good enough to choose sectors.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        index((mixed ^ (mixed >> 31)) % n as u64)
    }
}

#[derive(Default)]
struct Content {
    bytes: Vec<u8>,
    unsynced: Versions,
    punched_bytes: u64,
    syncs: u64,
}

type Hook = Box<dyn FnOnce() + Send>;

pub(super) struct SimFile {
    content: Mutex<Content>,
    /// Run once, at the start of the next sync.
    pub(super) on_sync: Mutex<Option<Hook>>,
    /// Run once, at the start of the next write.
    pub(super) on_write: Mutex<Option<Hook>>,
    pub(super) fail_sync: AtomicBool,
    /// A write gets half of its bytes in and then finds no space.
    pub(super) full: AtomicBool,
}

impl SimFile {
    pub(super) fn new(length_bytes: u64) -> Self {
        let content = Content { bytes: vec![0; index(length_bytes)], ..Content::default() };
        Self {
            content: Mutex::new(content),
            on_sync: Mutex::default(),
            on_write: Mutex::default(),
            fail_sync: AtomicBool::new(false),
            full: AtomicBool::new(false),
        }
    }

    pub(super) fn power_cut(&self, dice: &mut Dice) {
        let mut content = self.content.lock().unwrap();
        let unsynced = std::mem::take(&mut content.unsynced);
        for (sector, versions) in unsynced.iter() {
            let kept = &versions[dice.below(versions.len())];
            let from = sector * SECTOR_BYTES;
            content.bytes[from..from + kept.len()].copy_from_slice(kept);
        }
    }

    /// In blocks that are not all zeros, as a sparse file's.
    fn used_bytes(&self) -> u64 {
        let content = self.content.lock().unwrap();
        let blocks = content.bytes.chunks(4096);
        blocks.filter(|block| block.iter().any(|byte| *byte != 0)).count() as u64 * 4096
    }

    pub(super) fn punched_bytes(&self) -> u64 {
        self.content.lock().unwrap().punched_bytes
    }

    pub(super) fn syncs(&self) -> u64 {
        self.content.lock().unwrap().syncs
    }

    fn change(&self, offset: u64, length: usize, with: impl FnOnce(&mut [u8])) {
        let mut content = self.content.lock().unwrap();
        let Content { bytes, unsynced, .. } = &mut *content;
        let from = index(offset);
        unsynced.record(bytes, from, length);
        with(&mut bytes[from..from + length]);
        unsynced.record(bytes, from, length);
    }
}

fn run(hook: &Mutex<Option<Hook>>) {
    let hook = hook.lock().unwrap().take();
    if let Some(hook) = hook {
        hook();
    }
}

impl BlockFile for SimFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let content = self.content.lock().unwrap();
        let from = index(offset);
        let found = content.bytes.get(from..from + buffer.len());
        buffer.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn try_read_at(&self, offset: u64, buffer: &mut [u8]) -> Option<io::Result<()>> {
        Some(self.read_at(offset, buffer))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        run(&self.on_write);
        if self.full.load(Ordering::SeqCst) {
            let half = &data[..data.len() / 2];
            self.change(offset, half.len(), |bytes| bytes.copy_from_slice(half));
            return Err(io::Error::from_raw_os_error(nix::libc::ENOSPC));
        }
        self.change(offset, data.len(), |bytes| bytes.copy_from_slice(data));
        Ok(())
    }

    fn punch_hole(&self, offset: u64, length_bytes: u64) -> io::Result<()> {
        self.change(offset, index(length_bytes), |bytes| bytes.fill(0));
        self.content.lock().unwrap().punched_bytes += length_bytes;
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        run(&self.on_sync);
        let mut content = self.content.lock().unwrap();
        content.syncs += 1;
        if self.fail_sync.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(nix::libc::EIO));
        }
        content.unsynced.clear();
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.content.lock().unwrap().bytes.len() as u64)
    }
}

#[derive(Default)]
pub(super) struct SimFiles(Mutex<HashMap<String, Arc<SimFile>>>);

impl SimFiles {
    pub(super) fn power_cut(&self, dice: &mut Dice) {
        let files = self.0.lock().unwrap();
        let mut names: Vec<_> = files.keys().collect();
        // The order of a hash map would make a seed mean something else in every run.
        names.sort_unstable();
        for name in names {
            files[name].power_cut(dice);
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.lock().unwrap().contains_key(name)
    }

    pub(super) fn file(&self, name: &str) -> Arc<SimFile> {
        Arc::clone(&self.0.lock().unwrap()[name])
    }
}

impl LayerFiles for SimFiles {
    fn create(&self, name: &str, length_bytes: u64) -> io::Result<Arc<dyn BlockFile>> {
        let file = Arc::new(SimFile::new(length_bytes));
        self.0.lock().unwrap().insert(name.to_owned(), Arc::clone(&file));
        Ok(file)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>> {
        let files = self.0.lock().unwrap();
        Ok(Arc::clone(files.get(name).ok_or(io::ErrorKind::NotFound)?) as Arc<dyn BlockFile>)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.lock().unwrap().remove(name);
        Ok(())
    }

    fn allocated_bytes(&self, name: &str) -> io::Result<u64> {
        let file = self.0.lock().unwrap().get(name).map(Arc::clone);
        Ok(file.map_or(0, |file| file.used_bytes()))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.0.lock().unwrap().keys().cloned().collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        Ok(())
    }
}
