//! The few things the store asks of files, behind traits, so that tests can lose unsynced
//! writes, tear pages, fail a sync or run out of space.

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

use super::ahead::Streams;
use super::blocks::index;
use super::closing::{self, ClosedLater};
use super::direct::DirectFile;

/// A file of fixed length.
pub(super) trait BlockFile: Send + Sync {
    /// Fills the whole buffer or fails.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// As [`BlockFile::read_at`] if all of it is in memory. Otherwise `None`, and the buffer may
    /// hold anything.
    fn try_read_at(&self, _offset: u64, _buffer: &mut [u8]) -> Option<io::Result<()>> {
        None
    }

    /// What should be in memory soon, when a read that has to wait begins.
    fn ahead_of(&self, _read: &Range<u64>) -> Option<Range<u64>> {
        None
    }

    /// Begins to bring a range into memory, if that can be; may block a little.
    fn bring_in(&self, _range: Range<u64>) {}

    /// What the kernel reads from into any buffer, if it is a real file.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Writes all of it or fails; after a failure any part may have been written.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Whether reads and writes go through the page cache from now on.
    fn set_cache(&self, _policy: CachePolicy) -> io::Result<()> {
        Ok(())
    }

    /// Gives the space back; the range then reads as zeros.
    fn punch_hole(&self, offset: u64, length_bytes: u64) -> io::Result<()>;

    /// A later write into the range does not fail for want of space.
    fn reserve(&self, _offset: u64, _length_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// The next range from `from` on that may hold something else than zeros.
    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let end = self.len()?;
        Ok((from < end).then_some(from..end))
    }

    /// Every write that returned before is durable when this returns well.
    fn sync(&self) -> io::Result<()>;

    /// As [`BlockFile::sync`], and the file's length too: once after its creation.
    fn sync_created(&self) -> io::Result<()> {
        self.sync()
    }

    fn len(&self) -> io::Result<u64>;
}

/// The directory that holds the files of a pool's layers.
pub(super) trait LayerFiles: Send + Sync {
    /// A file of zeros that takes no space; one of that name is replaced. Nothing of it is durable
    /// before [`BlockFile::sync_created`] and [`LayerFiles::sync_names`].
    fn create(&self, name: &str, length_bytes: u64) -> io::Result<Arc<dyn BlockFile>>;

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>>;

    /// Nothing to remove is no error.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// What a file takes on the disk; one that is not there takes nothing.
    fn allocated_bytes(&self, name: &str) -> io::Result<u64>;

    fn names(&self) -> io::Result<Vec<String>>;

    fn sync_names(&self) -> io::Result<()>;
}

/// The real directory.
pub(super) struct DiskFiles {
    pub(super) dir: PathBuf,
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

/// Long writes go to the kernel in pieces: ext4 keeps in memory as one unit what came in as one, and
/// then walks through all of it for every later write of 4 KiB (measured, 10 µs in units of 1 MiB,
/// 2.6 µs in these). In a fragmented memory finding a place for large units is slower, too.
const PIECE_BYTES: u64 = 16 << 10;

/// A real file.
pub(super) struct DiskFile {
    file: ClosedLater,
    /// The filesystem can't tell whether a read would wait.
    always_waits: AtomicBool,
    /// Reads and writes go past the page cache, through `direct`.
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

/// The kernel would read ahead of every client; `ahead` says for whom it is done instead.
fn read_only_what_is_asked(file: &File) {
    if let Err(error) = fadvise(file, 0, None, Advice::Random) {
        tracing::debug!(%error, "the kernel reads ahead in a layer's file");
    }
}

/// Nobody asks when a layer was last read, and noting it costs each read. Who does not own the
/// file may not ask for that; then it is noted.
fn forget_access_times(file: &File) {
    let flags = fcntl_getfl(file).map(|flags| flags | OFlags::NOATIME);
    if let Err(error) = flags.and_then(|flags| fcntl_setfl(file, flags)) {
        tracing::debug!(%error, "reads note their time in a layer's file");
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
            tracing::debug!(%error, "nothing is read ahead in a layer's file");
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
            // Without holes the blocks keep their space; their state already says zero.
            Ok(()) | Err(nix::Error::EOPNOTSUPP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn reserve(&self, offset: u64, length_bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        match fallocate(&*self.file, flags, signed(offset)?, signed(length_bytes)?) {
            // A filesystem that can't reserve space is taken as it is.
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
