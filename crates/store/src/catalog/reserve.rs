//! Space for the catalog on a full disk.
//!
//! SQLite needs space also for a change that gives some back. So a file beside the catalog takes a little, and is
//! removed when such a change finds the disk full. It is made again as soon as there is space.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FallocateFlags, fallocate};
use rusqlite::{ErrorCode, Transaction};

use super::{Catalog, Result};

/// More than SQLite writes for any one of these changes.
const RESERVE_BYTES: i64 = 512 << 10;

pub(super) struct Reserve {
    path: PathBuf,
    is_missing: AtomicBool,
}

impl Reserve {
    /// The reserve of the catalog at this path. It is made if there is space for it.
    pub(super) fn beside(catalog: &Path) -> Self {
        let path = catalog.with_extension("reserve");
        let reserve = Self { path, is_missing: AtomicBool::new(true) };
        if !reserve.keep() {
            tracing::warn!("no space is reserved for the catalog; free space in the pool");
        }
        reserve
    }

    /// Makes the reserve if it is not there. Returns whether it is there.
    pub(super) fn keep(&self) -> bool {
        if !self.is_missing.load(Ordering::Relaxed) {
            return true;
        }
        let make = || -> io::Result<()> {
            let file: File = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&self.path)?;
            match fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES) {
                // A filesystem that can't reserve space is accepted.
                Err(nix::Error::EOPNOTSUPP) => Ok(()),
                done => Ok(done?),
            }
        };
        let made = make().is_ok();
        if !made {
            self.free();
        }
        self.is_missing.store(!made, Ordering::Relaxed);
        made
    }

    /// Returns whether there was a reserve.
    fn free(&self) -> bool {
        self.is_missing.store(true, Ordering::Relaxed);
        std::fs::remove_file(&self.path).is_ok()
    }
}

impl Catalog {
    /// As [`Self::change`], for changes that give space back or can't wait until there is some.
    pub(super) fn change_on_full_disk<T>(
        &self,
        work: impl Fn(&Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        let is_full =
            |error: &rusqlite::Error| error.sqlite_error_code() == Some(ErrorCode::DiskFull);
        match self.change(&work) {
            Err(error) if is_full(&error) && self.reserve.free() => self.change(&work),
            done => done,
        }
    }

    /// Makes the reserve again after it was used and there may be space.
    pub(crate) fn keep_reserve(&self) {
        let _is_there = self.reserve.keep();
    }
}
