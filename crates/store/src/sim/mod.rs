//! A simulated disk in memory for tests of the store. It records every change, fails on request, and loses
//! in a power cut what real disks lose.
//!
//! [`disk`] has the content and the rules of a power cut. [`SimFiles`] implements the same traits as the
//! real directory. With [`SimFiles::record`] every change goes into a log, so a test can run a workload
//! once and then examine the disk after each operation. With [`SimFiles::fail`] one operation fails, or
//! all operations from then on.

pub(crate) mod disk;

use std::collections::HashMap;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rusqlite::Connection;

pub(crate) use crate::sim::disk::{Cut, Dice, Disk, Op, SECTOR_BYTES, Sector};

use crate::disk::files::{BlockFile, LayerFiles};
use crate::sim::disk::{InodeId, first_part};

/// How an operation fails. A failed write has written about half of its sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// EIO.
    Io,
    /// ENOSPC, for operations that take space.
    NoSpace,
    /// EMFILE: this process has too many files open.
    NoDescriptor,
}

impl Fault {
    fn error(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            Self::Io => nix::libc::EIO,
            Self::NoSpace => nix::libc::ENOSPC,
            Self::NoDescriptor => nix::libc::EMFILE,
        })
    }
}

/// The operations that fail, counted from 0, including reads.
#[derive(Debug, Clone)]
pub(crate) struct Faults {
    pub(crate) fault: Fault,
    pub(crate) operations: Range<u64>,
}

type Hook = Box<dyn FnOnce() + Send>;

/// A test's observations and controls of one file.
#[derive(Default)]
pub(crate) struct Controls {
    /// This runs once, at the start of the next sync.
    pub(crate) on_sync: Mutex<Option<Hook>>,
    /// This runs once, at the start of the next write.
    pub(crate) on_write: Mutex<Option<Hook>>,
    pub(crate) fail_sync: AtomicBool,
    /// Every read fails.
    pub(crate) unreadable: AtomicBool,
    pub(crate) reads: AtomicU64,
    /// A write writes about half of its sectors and then fails because the disk is full.
    pub(crate) full: AtomicBool,
    punched_bytes: AtomicU64,
    syncs: AtomicU64,
}

/// Watches the commits of the catalog through a separate connection.
struct CatalogTap {
    connection: Connection,
    copies: tempfile::TempDir,
    version: i64,
}

impl CatalogTap {
    fn new(dir: &Path) -> Self {
        let connection = Connection::open(dir.join("catalog.sqlite")).unwrap();
        Self { connection, copies: scratch_dir(), version: -1 }
    }

    /// The catalog's bytes if it has changed since this was last asked.
    fn changed(&mut self) -> Option<Vec<u8>> {
        let version =
            self.connection.query_row("PRAGMA data_version", [], |row| row.get(0)).unwrap();
        if self.version == version {
            return None;
        }
        self.version = version;
        let copy = self.copies.path().join("copy");
        self.connection.execute("VACUUM INTO ?1", [copy.to_str()]).unwrap();
        let bytes = std::fs::read(&copy).unwrap();
        std::fs::remove_file(copy).unwrap();
        Some(bytes)
    }
}

/// A directory for tests, in memory if the machine has such a filesystem, because SQLite syncs often.
pub(crate) fn scratch_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

#[derive(Default)]
struct Shared {
    disk: Disk,
    log: Option<Vec<Op>>,
    catalog: Option<CatalogTap>,
    controls: HashMap<InodeId, Arc<Controls>>,
    operations: u64,
    faults: Option<Faults>,
    /// Whether a sync has failed.
    sync_failed: bool,
}

impl Shared {
    fn apply(&mut self, op: Op) {
        self.note_commits();
        self.put(op);
    }

    fn put(&mut self, op: Op) {
        self.disk.apply(&op);
        if let Some(log) = &mut self.log {
            log.push(op);
        }
    }

    fn note_commits(&mut self) {
        if let Some(bytes) = self.catalog.as_mut().and_then(CatalogTap::changed) {
            self.put(Op::Catalog(Arc::new(bytes)));
        }
    }

    /// Counts an operation, and returns its fault if it is to fail.
    fn fault(&mut self, takes_space: bool) -> Option<Fault> {
        let at = self.operations;
        self.operations += 1;
        let faults = self.faults.as_ref().filter(|faults| faults.operations.contains(&at))?;
        (takes_space || faults.fault != Fault::NoSpace).then_some(faults.fault)
    }

    fn try_op(&mut self, takes_space: bool, op: Op) -> io::Result<()> {
        if let Some(fault) = self.fault(takes_space) {
            return Err(fault.error());
        }
        self.apply(op);
        Ok(())
    }

    fn controls(&mut self, inode: InodeId) -> Arc<Controls> {
        Arc::clone(self.controls.entry(inode).or_default())
    }
}

/// An open file.
pub(crate) struct SimFile {
    inode: InodeId,
    shared: Arc<Mutex<Shared>>,
    controls: Arc<Controls>,
}

impl Deref for SimFile {
    type Target = Controls;

    fn deref(&self) -> &Controls {
        &self.controls
    }
}

impl SimFile {
    /// A file on its own disk.
    pub(crate) fn alone(length_bytes: u64) -> Self {
        let files = SimFiles::default();
        files.create("alone", length_bytes).unwrap().sync_created().unwrap();
        files.sync_names().unwrap();
        files.find("alone").unwrap()
    }

    /// Simulates a power cut of its disk.
    pub(crate) fn power_cut(&self, dice: &mut Dice) {
        SimFiles(Arc::clone(&self.shared)).power_cut(dice);
    }

    pub(crate) fn punched_bytes(&self) -> u64 {
        self.punched_bytes.load(Ordering::SeqCst)
    }

    pub(crate) fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }

    fn sync_with(&self, op: Op) -> io::Result<()> {
        run(&self.on_sync);
        self.syncs.fetch_add(1, Ordering::SeqCst);
        let mut shared = self.lock();
        let fault = shared.fault(true);
        let fault = fault.or(self.fail_sync.load(Ordering::SeqCst).then_some(Fault::Io));
        if let Some(fault) = fault {
            shared.sync_failed = true;
            shared.apply(Op::FailedSync { inode: self.inode });
            return Err(fault.error());
        }
        shared.apply(op);
        Ok(())
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
        let mut shared = self.lock();
        self.reads.fetch_add(1, Ordering::SeqCst);
        let fault = shared.fault(false);
        let fault = fault.or(self.unreadable.load(Ordering::SeqCst).then_some(Fault::Io));
        if let Some(fault) = fault {
            return Err(fault.error());
        }
        let whole = shared.disk.read(self.inode, offset, buffer);
        whole.then_some(()).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    fn try_read_at(&self, offset: u64, buffer: &mut [u8]) -> Option<io::Result<()>> {
        Some(self.read_at(offset, buffer))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        run(&self.on_write);
        let mut shared = self.lock();
        let fault = shared.fault(true);
        let fault = fault.or(self.full.load(Ordering::SeqCst).then_some(Fault::NoSpace));
        let inside = offset + data.len() as u64 <= shared.disk.length_bytes(self.inode);
        assert!(inside, "a write beyond the end of a file of fixed length");
        let written = if fault.is_some() { first_part(offset, data) } else { data };
        shared.apply(Op::Write { inode: self.inode, offset, data: written.to_vec() });
        fault.map_or(Ok(()), |fault| Err(fault.error()))
    }

    fn punch_hole(&self, offset: u64, length_bytes: u64) -> io::Result<()> {
        self.lock().try_op(true, Op::Punch { inode: self.inode, offset, length_bytes })?;
        self.punched_bytes.fetch_add(length_bytes, Ordering::SeqCst);
        Ok(())
    }

    fn reserve(&self, _: u64, _: u64) -> io::Result<()> {
        self.lock().fault(true).map_or(Ok(()), |fault| Err(fault.error()))
    }

    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        Ok(self.lock().disk.next_data(self.inode, from))
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_with(Op::Sync { inode: self.inode })
    }

    fn sync_created(&self) -> io::Result<()> {
        self.sync_with(Op::SyncCreated { inode: self.inode })
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().disk.length_bytes(self.inode))
    }
}

#[derive(Default)]
pub(crate) struct SimFiles(Arc<Mutex<Shared>>);

impl SimFiles {
    pub(crate) fn new(disk: Disk) -> Self {
        Self(Arc::new(Mutex::new(Shared { disk, ..Shared::default() })))
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap()
    }

    /// From now on, records every change and every commit of the catalog in `dir`.
    pub(crate) fn record(&self, dir: &Path) {
        let mut shared = self.lock();
        shared.log.get_or_insert_default();
        shared.catalog = Some(CatalogTap::new(dir));
        shared.note_commits();
    }

    /// The number of operations in the log, including all commits of the catalog until now.
    pub(crate) fn recorded(&self) -> usize {
        let mut shared = self.lock();
        shared.note_commits();
        shared.log.as_ref().map_or(0, Vec::len)
    }

    pub(crate) fn take_log(&self) -> Vec<Op> {
        self.recorded();
        self.lock().log.take().unwrap_or_default()
    }

    /// Sets the faults from now on, and returns the previous ones.
    pub(crate) fn fail(&self, faults: Option<Faults>) -> Option<Faults> {
        std::mem::replace(&mut self.lock().faults, faults)
    }

    /// The number of operations, including reads.
    pub(crate) fn operations(&self) -> u64 {
        self.lock().operations
    }

    pub(crate) fn sync_failed(&self) -> bool {
        self.lock().sync_failed
    }

    pub(crate) fn disk(&self) -> Disk {
        self.lock().disk.clone()
    }

    /// A power cut after which each sector and each name has its synced version or any later one.
    pub(crate) fn power_cut(&self, dice: &mut Dice) {
        dice.below(2);
        self.cut(Cut::BySector(dice.0));
    }

    /// The caller has closed the pool.
    pub(crate) fn cut(&self, cut: Cut) {
        let mut shared = self.lock();
        shared.note_commits();
        // The old files no longer exist, but their inode numbers may be used again.
        shared.controls.clear();
        let left = shared.disk.after(cut);
        shared.put(Op::Replaced(Box::new(left)));
    }

    pub(crate) fn file(&self, name: &str) -> Arc<SimFile> {
        Arc::new(self.find(name).expect("a file of that name"))
    }

    fn find(&self, name: &str) -> Option<SimFile> {
        let mut shared = self.lock();
        let inode = shared.disk.find(name)?;
        let controls = shared.controls(inode);
        Some(SimFile { inode, shared: Arc::clone(&self.0), controls })
    }
}

impl LayerFiles for SimFiles {
    fn create(&self, name: &str, length_bytes: u64) -> io::Result<Arc<dyn BlockFile>> {
        let mut shared = self.lock();
        let new = shared.disk.next_inode();
        shared.try_op(true, Op::Create { name: name.to_owned(), inode: new })?;
        let inode = shared.disk.find(name).expect("just made");
        shared.try_op(true, Op::SetLength { inode, length_bytes })?;
        drop(shared);
        Ok(self.file(name))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>> {
        if let Some(fault) = self.lock().fault(false) {
            return Err(fault.error());
        }
        let file = self.find(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut shared = self.lock();
        if shared.disk.find(name).is_none() {
            return Ok(());
        }
        shared.try_op(false, Op::Remove { name: name.to_owned() })
    }

    fn allocated_bytes(&self, name: &str) -> io::Result<u64> {
        let shared = self.lock();
        Ok(shared.disk.find(name).map_or(0, |inode| shared.disk.used_bytes(inode)))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.lock().disk.names())
    }

    fn sync_names(&self) -> io::Result<()> {
        let mut shared = self.lock();
        let synced = shared.try_op(false, Op::SyncNames);
        shared.sync_failed |= synced.is_err();
        synced
    }
}
