//! Opening what is below a directory, and nothing else.
//!
//! `openat2` with `RESOLVE_BENEATH` makes the kernel refuse a way out of the directory and every link on the way. A
//! kernel before 5.6 does not have it. There each name is opened in the directory before it and without following
//! links, which comes to the same: the names are checked, so none of them is `..`. Paths that are too long for one
//! call are opened like this too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

use crate::path::DataPath;

/// Flags with which every directory and file of the tree is opened. A FIFO that was put there from outside blocks nobody.
const ALWAYS: OFlags = OFlags::CLOEXEC.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK);

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// Opens what a path names.
pub fn open(tree: BorrowedFd<'_>, path: &DataPath, flags: OFlags) -> Result<OwnedFd, Errno> {
    if path.is_root() {
        return openat(tree, ".", flags | ALWAYS, Mode::empty());
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(tree, path.to_string(), flags | ALWAYS, Mode::empty(), resolve) {
        Err(Errno::NOSYS | Errno::NAMETOOLONG) => walk(tree, path, flags),
        opened => opened,
    }
}

/// Opens a directory.
pub fn open_directory(tree: BorrowedFd<'_>, path: &DataPath) -> Result<OwnedFd, Errno> {
    open(tree, path, DIRECTORY)
}

/// Opens one name after the other.
pub fn walk(tree: BorrowedFd<'_>, path: &DataPath, flags: OFlags) -> Result<OwnedFd, Errno> {
    let Some((name, above)) = path.names().split_last() else {
        return openat(tree, ".", flags | ALWAYS, Mode::empty());
    };
    let mut directory: Option<OwnedFd> = None;
    for part in above {
        let from = directory.as_ref().map_or(tree, AsFd::as_fd);
        directory = Some(openat(from, part.as_str(), DIRECTORY | ALWAYS, Mode::empty())?);
    }
    let from = directory.as_ref().map_or(tree, AsFd::as_fd);
    openat(from, name.as_str(), flags | ALWAYS, Mode::empty())
}
