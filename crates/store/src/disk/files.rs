//! The file operations that the store uses, as traits, so that tests can lose unsynced writes, tear
//! pages, fail a sync or run out of space.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};
use perigee_model::volume::CachePolicy;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ReadWriteFlags};

use crate::disk::ahead::Streams;
use crate::disk::blocks::index;
use crate::disk::closing::{self, ClosedLater};
use crate::disk::direct::DirectFile;

/// A file of fixed length.
pub(crate) trait BlockFile: Send + Sync {
    /// Fills the whole buffer or fails.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// As [`BlockFile::read_at`] if all the bytes are in memory. Otherwise it returns `None` and may leave
    /// anything in the buffer.
    fn try_read_at(&self, _offset: u64, _buffer: &mut [u8]) -> Option<io::Result<()>> {
        None
    }

    /// The range to read ahead when a read begins that has to wait.
    fn ahead_of(&self, _read: &Range<u64>) -> Option<Range<u64>> {
        None
    }

    /// Begins to read a range into memory, if the file supports it. It may block for a short time.
    fn bring_in(&self, _range: Range<u64>) {}

    /// The descriptor, if this is a real file from which the kernel can read into any buffer.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Writes all data or fails. After a failure any part may have been written.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Sets whether reads and writes go through the page cache.
    fn set_cache(&self, _policy: CachePolicy) -> io::Result<()> {
        Ok(())
    }

    /// Frees the space of a range, which then reads as zeros.
    fn punch_hole(&self, offset: u64, length_bytes: u64) -> io::Result<()>;

    /// Reserves space, so that a later write into the range does not fail because the disk is full.
    fn reserve(&self, _offset: u64, _length_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// The next range from `from` on that may contain data other than zeros.
    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let end = self.len()?;
        Ok((from < end).then_some(from..end))
    }

    /// When this succeeds, every write that returned before is durable.
    fn sync(&self) -> io::Result<()>;

    /// As [`BlockFile::sync`], including the file's length. It is called once after the creation.
    fn sync_created(&self) -> io::Result<()> {
        self.sync()
    }

    fn len(&self) -> io::Result<u64>;
}

/// The directory that holds the files of a pool's layers.
pub(crate) trait LayerFiles: Send + Sync {
    /// Creates a file of zeros that takes no space, and replaces an existing one. It is durable only after
    /// [`BlockFile::sync_created`] and [`LayerFiles::sync_names`].
    fn create(&self, name: &str, length_bytes: u64) -> io::Result<Arc<dyn BlockFile>>;

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>>;

    /// Removes a file. It is not an error if the file does not exist.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// The space of a file on the disk; 0 if the file does not exist.
    fn allocated_bytes(&self, name: &str) -> io::Result<u64>;

    fn names(&self) -> io::Result<Vec<String>>;

    fn sync_names(&self) -> io::Result<()>;
}

/// A real directory.
pub(crate) struct DiskFiles {
    pub(crate) dir: PathBuf,
}

impl LayerFiles for DiskFiles {
    fn create(&self, name: &str, length_bytes: u64) -> io::Result<Arc<dyn BlockFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(self.dir.join(name))?;
        file.set_len(length_bytes)?;
        Ok(Arc::new(DiskFile::from(file)))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>> {
        let file = OpenOptions::new().read(true).write(true).open(self.dir.join(name))?;
        Ok(Arc::new(DiskFile::from(file)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match closing::remove(&self.dir.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    fn allocated_bytes(&self, name: &str) -> io::Result<u64> {
        const UNIT_BYTES: u64 = 512; // of st_blocks, whatever the filesystem's blocks are
        match std::fs::metadata(self.dir.join(name)) {
            Ok(found) => Ok(found.blocks() * UNIT_BYTES),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    fn names(&self) -> io::Result<Vec<String>> {
        std::fs::read_dir(&self.dir)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }
}

/// Long writes go to the kernel in pieces of this size. ext4 keeps the data of one write in memory as one
/// unit, and walks through all of the unit for every later write of 4 KiB (measured: 10 µs in units of
/// 1 MiB, 2.6 µs in units of this size). In fragmented memory it also takes longer to allocate large units.
const PIECE_BYTES: u64 = 16 << 10;

/// A real file.
pub(crate) struct DiskFile {
    file: ClosedLater,
    /// The filesystem can't tell whether a read would wait, so each read counts as one that waits.
    always_waits: AtomicBool,
    /// Reads and writes bypass the page cache, through `direct`.
    is_direct: AtomicBool,
    direct: OnceLock<DirectFile>,
    streams: Streams,
}

impl From<File> for DiskFile {
    fn from(file: File) -> Self {
        forget_access_times(&file);
        read_only_what_is_asked(&file);
        let (always_waits, is_direct, streams) = Default::default();
        Self { file: file.into(), always_waits, is_direct, direct: OnceLock::new(), streams }
    }
}

/// Turns the kernel's read-ahead off, because it would read ahead for every client. `ahead` does it instead.
fn read_only_what_is_asked(file: &File) {
    if let Err(error) = fadvise(file, 0, None, Advice::Random) {
        tracing::debug!(%error, "can't turn off the kernel's read-ahead for a layer's file");
    }
}

/// Turns access times off: nothing uses them, and updating them slows each read. Only the owner of a file
/// may do this; otherwise they stay on.
fn forget_access_times(file: &File) {
    let flags = fcntl_getfl(file).map(|flags| flags | OFlags::NOATIME);
    if let Err(error) = flags.and_then(|flags| fcntl_setfl(file, flags)) {
        tracing::debug!(%error, "can't turn off access times for a layer's file");
    }
}

impl DiskFile {
    fn direct(&self) -> Option<&DirectFile> {
        self.direct.get().filter(|_| self.is_direct.load(Ordering::Relaxed))
    }
}

fn signed(n: u64) -> io::Result<i64> {
    i64::try_from(n).map_err(io::Error::other)
}

impl BlockFile for DiskFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self.direct() {
            Some(direct) => direct.read_at(offset, buffer),
            None => self.file.read_exact_at(buffer, offset),
        }
    }

    fn try_read_at(&self, offset: u64, buffer: &mut [u8]) -> Option<io::Result<()>> {
        if self.always_waits.load(Ordering::Relaxed) || self.is_direct.load(Ordering::Relaxed) {
            return None;
        }
        let length = buffer.len();
        let into = &mut [IoSliceMut::new(buffer)];
        match rustix::io::preadv2(&*self.file, into, offset, ReadWriteFlags::NOWAIT) {
            Ok(read) => (read == length).then_some(Ok(())),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                self.always_waits.store(true, Ordering::Relaxed);
                None
            }
            Err(error) => Some(Err(error.into())),
        }
    }

    fn ahead_of(&self, read: &Range<u64>) -> Option<Range<u64>> {
        if self.direct().is_some() { None } else { self.streams.ahead_of(read) }
    }

    fn bring_in(&self, range: Range<u64>) {
        let length = NonZeroU64::new(range.end - range.start);
        if let Err(error) = fadvise(&*self.file, range.start, length, Advice::WillNeed) {
            tracing::debug!(%error, "can't read ahead in a layer's file");
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.direct().is_none().then_some(self.file.as_fd())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if let Some(direct) = self.direct() {
            return direct.write_at(offset, data);
        }
        let mut at = 0;
        while at < data.len() {
            let rest = PIECE_BYTES - (offset + at as u64) % PIECE_BYTES;
            let end = data.len().min(at + index(rest));
            self.file.write_all_at(&data[at..end], offset + at as u64)?;
            at = end;
        }
        Ok(())
    }

    fn set_cache(&self, policy: CachePolicy) -> io::Result<()> {
        if policy == CachePolicy::Direct && self.direct.get().is_none() {
            let direct = DirectFile::open(&self.file)?;
            self.direct.get_or_init(|| direct);
        }
        self.is_direct.store(policy == CachePolicy::Direct, Ordering::Relaxed);
        Ok(())
    }

    fn punch_hole(&self, offset: u64, length_bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        match fallocate(&*self.file, flags, signed(offset)?, signed(length_bytes)?) {
            // On a filesystem without holes the blocks keep their space. Their state is already zero.
            Ok(()) | Err(nix::Error::EOPNOTSUPP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn reserve(&self, offset: u64, length_bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        match fallocate(&*self.file, flags, signed(offset)?, signed(length_bytes)?) {
            // A filesystem that can't reserve space is accepted.
            Ok(()) | Err(nix::Error::EOPNOTSUPP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let seek = |from: u64, whence| -> nix::Result<u64> {
            let from = i64::try_from(from).map_err(|_| nix::Error::EOVERFLOW)?;
            lseek(&*self.file, from, whence).map(i64::cast_unsigned)
        };
        match seek(from, Whence::SeekData) {
            Ok(start) => Ok(Some(start..seek(start, Whence::SeekHole)?)),
            Err(nix::Error::ENXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn sync_created(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}
