//! Space for the catalog on a full disk.
//!
//! SQLite needs space also for a change that gives some back. So a file beside the catalog takes a little, and is
//! removed when such a change finds the disk full, or the catalog can't be opened. It is made again as soon as there is
//! space. Who has the catalog's connection removes and makes it, so that what was freed for one change is not taken
//! back by another one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FallocateFlags, fallocate};
use rusqlite::{ErrorCode, Transaction};

use crate::catalog::{Catalog, Result};

/// More than SQLite writes for any one of these changes.
const RESERVE_BYTES: i64 = 512 << 10;

/// A file beside the database that is given up when the disk is full, so that deleting still works.
pub(super) struct Reserve {
    path: PathBuf,
    is_missing: AtomicBool,
}

impl Reserve {
    /// The reserve of the catalog at this path. It is made if there is space for it.
    pub(super) fn beside(catalog: &Path) -> Self {
        let reserve = Self { path: path_of(catalog), is_missing: AtomicBool::new(true) };
        if !reserve.keep() {
            tracing::warn!("no space is reserved for the catalog; free space in the pool");
        }
        reserve
    }

    /// Frees what an earlier server has reserved. Returns whether there was something.
    pub(super) fn free_beside(catalog: &Path) -> bool {
        std::fs::remove_file(path_of(catalog)).is_ok()
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

fn path_of(catalog: &Path) -> PathBuf {
    catalog.with_extension("reserve")
}

impl Catalog {
    /// As [`Self::change`], for changes that give space back or can't wait until there is some.
    pub(super) fn change_on_full_disk<T>(
        &self,
        work: impl Fn(&Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        let is_full =
            |error: &rusqlite::Error| error.sqlite_error_code() == Some(ErrorCode::DiskFull);
        let mut connection = self.lock();
        match self.change_with(&mut connection, &work) {
            Err(error) if is_full(&error) && self.reserve.free() => {
                self.change_with(&mut connection, &work)
            }
            done => done,
        }
    }

    /// Makes the reserve again after it was used and there may be space.
    pub(crate) fn keep_reserve(&self) {
        let _alone = self.lock();
        let _is_there = self.reserve.keep();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use super::*;
    use crate::tests::full::SmallDisk;

    #[test]
    fn what_was_freed_for_a_change_is_not_reserved_again_before_it_is_made() {
        let Some(disk) = SmallDisk::mount() else { return };
        let catalog = Catalog::open(&disk.path().join("catalog.sqlite")).expect("a catalog");
        disk.fill("others");
        let (tries, text, other) = (AtomicU32::new(0), "x".repeat(100 << 10), &catalog);
        std::thread::scope(|scope| {
            let changed = catalog.change_on_full_disk(|tx| {
                if tries.fetch_add(1, Ordering::SeqCst) == 1 {
                    scope.spawn(move || other.keep_reserve());
                    // It waits for this change, however long that takes.
                    std::thread::sleep(Duration::from_millis(100));
                }
                tx.execute("INSERT INTO stores VALUES (?1)", [&text])
            });
            changed.expect("the space that was freed for it");
        });
        assert_eq!(tries.load(Ordering::SeqCst), 2, "the disk was full");
    }
}
