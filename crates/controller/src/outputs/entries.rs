//! What is in an output tar. A guest has written it, so nothing in it is trusted: every name is checked, an entry that is
//! neither a file, a directory nor a link is left out, and headers are bounded before they are read. What is left out is
//! told with its reason, and the other entries are taken.

use std::io::{ErrorKind, Read};

use bytes::Bytes;
use perigee_repository::DataPath;

use crate::tars::{self, ENTRIES_MAX, TarError};

/// The bytes of a file that are passed on at once.
const PIECE_BYTES: usize = 128 << 10;

/// A part of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    Directory(DataPath),
    /// Its content follows. If the archive is cut, it is not all of it.
    File {
        path: DataPath,
        size_bytes: u64,
    },
    Content(Bytes),
    Link {
        path: DataPath,
        to: String,
    },
    LeftOut {
        name: String,
        why: String,
    },
}

/// Reads an archive, and passes on each part until `each` returns false.
pub fn read(archive: impl Read, mut each: impl FnMut(Part) -> bool) {
    let mut is_wanted = true;
    let end = tars::for_each_entry(archive, ENTRIES_MAX, |entry| {
        is_wanted = take(entry, &mut each)?;
        if is_wanted { Ok(()) } else { Err(TarError::Io(ErrorKind::Interrupted.into())) }
    });
    if let Err(error) = end
        && is_wanted
    {
        let why = format!("what follows could not be read: {error}");
        each(Part::LeftOut { name: String::new(), why });
    }
}

fn take<R: Read>(
    entry: &mut tar::Entry<'_, R>,
    each: &mut impl FnMut(Part) -> bool,
) -> Result<bool, TarError> {
    let kind = entry.header().entry_type();
    if kind.is_pax_global_extensions() {
        return Ok(true);
    }
    let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
    if kind.is_gnu_sparse() {
        // How much of the archive belongs to it is in what it says itself. The runner never writes one.
        return Err(TarError::Kind(name));
    }
    let mut left_out = |name, why: &str| Ok(each(Part::LeftOut { name, why: why.to_owned() }));
    let path = match inside(&entry.path_bytes()) {
        Ok(path) => path,
        Err(why) => return left_out(name, &why),
    };
    if kind.is_dir() {
        return Ok(path.is_root() || each(Part::Directory(path)));
    }
    if path.is_root() {
        return left_out(name, "it has no name");
    }
    if kind.is_symlink() {
        let to = entry.link_name_bytes().and_then(|to| String::from_utf8(to.into_owned()).ok());
        return match to {
            Some(to) => Ok(each(Part::Link { path, to })),
            None => left_out(name, "a link to a name that is not UTF-8"),
        };
    }
    if !kind.is_file() {
        return left_out(name, in_words(kind));
    }
    let size_bytes = entry.size();
    if !each(Part::File { path, size_bytes }) {
        return Ok(false);
    }
    let mut piece = vec![0; PIECE_BYTES];
    let mut left = size_bytes;
    while left > 0 {
        let length = entry.read(&mut piece)?;
        if length == 0 {
            return Ok(each(Part::LeftOut { name, why: "the tar ends within it".to_owned() }));
        }
        left = left.saturating_sub(length as u64);
        if !each(Part::Content(Bytes::copy_from_slice(&piece[..length]))) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn in_words(kind: tar::EntryType) -> &'static str {
    match kind {
        tar::EntryType::Link => "a hard link",
        tar::EntryType::Char | tar::EntryType::Block => "a device",
        tar::EntryType::Fifo => "a FIFO",
        _ => "neither a file, a directory nor a link",
    }
}

/// The path of an entry below the outputs' directory.
fn inside(path: &[u8]) -> Result<DataPath, String> {
    let text = std::str::from_utf8(path).map_err(|_| "its name is not UTF-8")?;
    if text.starts_with('/') {
        return Err("its path is absolute".to_owned());
    }
    let names: Vec<&str> = text.split('/').filter(|name| *name != ".").collect();
    if names.contains(&"..") {
        return Err("its path goes up with '..'".to_owned());
    }
    DataPath::parse(&names.join("/")).map_err(|problem| problem.why)
}
