//! What a tenant's files take, counted in one place, so that uploads at the same time can't exceed the quota together.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use perigee_model::limits::UPLOADS;
use perigee_model::units::format_bytes;
use perigee_model::{Problem, TenantName};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use crate::account::Quota;

/// What there is, and what is reserved for uploads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    pub bytes: u64,
    pub files: u64,
    /// Uploads that are under way or can be continued.
    pub uploads: usize,
}

/// What a tenant's files use, and how much they may use. It is counted in memory; at the start the files themselves
/// are counted.
#[derive(Debug)]
pub struct Usage {
    tenant: TenantName,
    state: Mutex<(Used, Quota)>,
}

impl Usage {
    /// Without a limit until [`Usage::set_quota`].
    pub fn new(tenant: TenantName, used: Used) -> Self {
        Self { tenant, state: Mutex::new((used, Quota::default())) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, (Used, Quota)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes, files and uploads at this moment, with those under way.
    pub fn used(&self) -> Used {
        self.state().0
    }

    /// It holds from now on. What is there beyond it stays.
    pub fn set_quota(&self, quota: Quota) {
        self.state().1 = quota;
    }

    /// Takes room for something new.
    ///
    /// # Errors
    /// `NoSpace` if the quota has no room for it; then nothing is taken.
    pub fn take(&self, bytes: u64, files: u64) -> Result<(), Problem> {
        let mut state = self.state();
        let (used, quota) = &mut *state;
        let new_bytes = used.bytes.saturating_add(bytes);
        let new_files = used.files.saturating_add(files);
        let over = |why: String| {
            Problem::no_space(format!("can't store a file of tenant {}", self.tenant), why)
                .next("delete files that nobody needs, and uploads that were cut (`perigee data list --uploads`), or ask an admin for a larger quota")
        };
        if bytes > 0 && new_bytes > quota.bytes {
            return Err(over(format!(
                "{} are used, {} more are needed, and the tenant's quota is {}",
                format_bytes(used.bytes),
                format_bytes(bytes),
                format_bytes(quota.bytes)
            )));
        }
        if files > 0 && new_files > quota.files {
            return Err(over(format!(
                "the tenant has {} files and directories, and its quota is {}",
                used.files, quota.files
            )));
        }
        (used.bytes, used.files) = (new_bytes, new_files);
        Ok(())
    }

    /// Counts what is there already, whatever the quota says.
    pub fn take_anyway(&self, bytes: u64) {
        let used = &mut self.state().0;
        used.bytes = used.bytes.saturating_add(bytes);
        used.files = used.files.saturating_add(1);
    }

    /// Gives back what was taken. It never goes below zero.
    pub fn give(&self, bytes: u64, files: u64) {
        let used = &mut self.state().0;
        used.bytes = used.bytes.saturating_sub(bytes);
        used.files = used.files.saturating_sub(files);
    }

    /// # Errors
    /// `Conflict` if there are too many uploads.
    pub fn take_upload(&self) -> Result<(), Problem> {
        let used = &mut self.state().0;
        UPLOADS.check(used.uploads + 1).map_err(|e| {
            Problem::conflict(format!("can't begin an upload of tenant {}", self.tenant), e)
                .next("wait until others are complete, or delete those that were cut: `perigee data list --uploads`")
        })?;
        used.uploads += 1;
        Ok(())
    }

    /// Gives back the place of one upload.
    pub fn give_upload(&self) {
        let used = &mut self.state().0;
        used.uploads = used.uploads.saturating_sub(1);
    }
}

/// What is below a directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Below {
    pub bytes: u64,
    pub files: u64,
    /// The most names in a row below it.
    pub names: usize,
    /// The longest path below it.
    pub path_bytes: usize,
}

/// Counts what is below a directory.
pub fn count(directory: BorrowedFd<'_>) -> Result<Below, Errno> {
    let mut below = Below::default();
    let mut entries = Dir::read_from(directory)?;
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let stat = match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // It was removed in the meantime.
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error),
        };
        let length = name.to_bytes().len();
        below.files += 1;
        below.names = below.names.max(1);
        below.path_bytes = below.path_bytes.max(length);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => below.bytes += u64::try_from(stat.st_size).unwrap_or(0),
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let child = match openat(directory, name, flags, Mode::empty()) {
                    Ok(child) => count(child.as_fd())?,
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error),
                };
                below.bytes += child.bytes;
                below.files += child.files;
                below.names = below.names.max(1 + child.names);
                if child.names > 0 {
                    below.path_bytes = below.path_bytes.max(length + 1 + child.path_bytes);
                }
            }
            _ => {}
        }
    }
    Ok(below)
}
