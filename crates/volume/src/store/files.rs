//! The few things the store asks of files, behind traits, so that tests can lose unsynced
//! writes, tear pages, fail a sync or run out of space.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

use nix::fcntl::{FallocateFlags, fallocate};

/// A file of fixed length.
pub(super) trait BlockFile: Send + Sync {
    /// Fills the whole buffer or fails.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes all of it or fails; after a failure any part may have been written.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Gives the space back; the range then reads as zeros.
    fn punch_hole(&self, offset: u64, length_bytes: u64) -> io::Result<()>;

    /// Every write that returned before is durable when this returns well.
    fn sync(&self) -> io::Result<()>;

    fn len(&self) -> io::Result<u64>;
}

/// Whether a new file's space is there before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    OnDemand,
    /// A later write into the file does not fail for want of space.
    Reserved,
}

/// The directory that holds the files of a pool's layers.
pub(super) trait LayerFiles: Send + Sync {
    /// A file of zeros; one of that name is replaced. Its length is durable when this returns,
    /// its name after [`LayerFiles::sync_names`].
    fn create(&self, name: &str, length_bytes: u64, space: Space)
    -> io::Result<Arc<dyn BlockFile>>;

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
    fn create(
        &self,
        name: &str,
        length_bytes: u64,
        space: Space,
    ) -> io::Result<Arc<dyn BlockFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(self.dir.join(name))?;
        file.set_len(length_bytes)?;
        if space == Space::Reserved {
            reserve(&file, length_bytes)?;
        }
        file.sync_all()?;
        Ok(Arc::new(file))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>> {
        let file = OpenOptions::new().read(true).write(true).open(self.dir.join(name))?;
        Ok(Arc::new(file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.dir.join(name)) {
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

fn signed(n: u64) -> io::Result<i64> {
    i64::try_from(n).map_err(io::Error::other)
}

/// A filesystem that can't reserve space is taken as it is.
fn reserve(file: &File, length_bytes: u64) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, signed(length_bytes)?) {
        Ok(()) | Err(nix::Error::EOPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl BlockFile for File {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        FileExt::write_all_at(self, data, offset)
    }

    fn punch_hole(&self, offset: u64, length_bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        match fallocate(self, flags, signed(offset)?, signed(length_bytes)?) {
            // Without holes the blocks keep their space; their state already says zero.
            Ok(()) | Err(nix::Error::EOPNOTSUPP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}
