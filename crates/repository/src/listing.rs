//! What a directory has: all of it in pieces, or one sorted page.

use std::collections::BinaryHeap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_model::data::{FileEntry, FileKind, FileList};
use rustix::fs::{
    Dir, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, fgetxattr, futimens, openat,
};
use rustix::io::Errno;

use crate::path::DataPath;

/// The extended attribute with a file's SHA-256.
pub const SHA256: &str = "user.perigee.sha256";

/// A directory that is read in pieces. Its order is that of the disk.
#[derive(Debug)]
pub struct Directory {
    fd: OwnedFd,
    names: Dir,
}

impl Directory {
    /// Reads the directory from its start. `fd` is the directory itself.
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        let names = Dir::read_from(&fd)?;
        Ok(Self { fd, names })
    }

    /// The next entries; none at the end.
    pub fn next(&mut self, max: usize) -> Result<Vec<FileEntry>, Errno> {
        let mut entries = Vec::new();
        while entries.len() < max {
            let Some(name) = self.next_name()? else { break };
            entries.extend(entry(self.fd.as_fd(), &name)?);
        }
        Ok(entries)
    }

    /// The entries after a name, sorted. Memory is needed for one page only, however many there are.
    pub fn page(mut self, after: Option<&str>, max: usize) -> Result<FileList, Errno> {
        let mut smallest = BinaryHeap::with_capacity(max + 2);
        while let Some(name) = self.next_name()? {
            if after.is_none_or(|after| name.as_str() > after) {
                smallest.push(name);
                if smallest.len() > max + 1 {
                    smallest.pop();
                }
            }
        }
        let mut names = smallest.into_sorted_vec();
        let more = names.len() > max;
        names.truncate(max);
        let after = if more { names.last().cloned() } else { None };
        let mut entries = Vec::with_capacity(names.len());
        for name in names {
            entries.extend(entry(self.fd.as_fd(), &name)?);
        }
        Ok(FileList { entries, after })
    }

    /// A name that no door could have stored is not shown.
    fn next_name(&mut self) -> Result<Option<String>, Errno> {
        while let Some(entry) = self.names.read() {
            let entry = entry?;
            let name = entry.file_name().to_str().ok();
            if let Some(name) = name.filter(|name| DataPath::parse(name).is_ok()) {
                return Ok(Some(name.to_owned()));
            }
        }
        Ok(None)
    }
}

/// What has this name in the directory. Only files and directories count.
pub fn entry(directory: BorrowedFd<'_>, name: &str) -> Result<Option<FileEntry>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match openat(directory, name, flags, Mode::empty()) {
        Ok(fd) => entry_of(&File::from(fd), name),
        // It has gone, or is a link or a socket.
        Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What an open file or directory is.
pub fn entry_of(file: &File, name: &str) -> Result<Option<FileEntry>, Errno> {
    let metadata = file.metadata().map_err(errno)?;
    let (kind, size_bytes) = match metadata.file_type() {
        kind if kind.is_file() => (FileKind::File, metadata.len()),
        kind if kind.is_dir() => (FileKind::Directory, 0),
        _ => return Ok(None),
    };
    let modified_ms = metadata.modified().map_or(0, unix_ms);
    let sha256 = if kind == FileKind::File { sha256_of(file.as_fd()) } else { None };
    Ok(Some(FileEntry { name: name.to_owned(), kind, size_bytes, modified_ms, sha256 }))
}

/// Milliseconds since 1970.
pub fn unix_ms(at: SystemTime) -> u64 {
    let since_1970 = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

/// The system's number of an error.
pub fn errno(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

fn sha256_of(fd: BorrowedFd<'_>) -> Option<String> {
    let mut text = [0_u8; 64];
    let length = fgetxattr(fd, SHA256, &mut text[..]).ok()?;
    let text = std::str::from_utf8(text.get(..length)?).ok()?;
    is_sha256(text).then(|| text.to_owned())
}

/// Whether a text is a SHA-256 in hexadecimal.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Says when an open file or directory was last changed.
pub fn set_modified(file: &File, modified_ms: u64) -> Result<(), Errno> {
    let (seconds, ms) = (modified_ms / 1000, modified_ms % 1000);
    let tv_sec = seconds.try_into().map_err(|_| Errno::RANGE)?;
    let last_modification = Timespec { tv_sec, tv_nsec: ms.cast_signed() * 1_000_000 };
    let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    futimens(file, &Timestamps { last_access, last_modification })
}

/// The time of an entry's last change.
pub fn modified(entry: &FileEntry) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(entry.modified_ms)
}
