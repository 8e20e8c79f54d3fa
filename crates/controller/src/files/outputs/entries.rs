//! What is in an output tar. A guest has written it, so nothing in it is trusted: every name is checked, an entry that is
//! neither a file, a directory nor a link is left out, and headers are bounded before they are read. What is left out is
//! told with its reason, and the other entries are taken.

use std::io::{ErrorKind, Read};

use bytes::Bytes;
use perigee_model::guest::name_in_text;
use perigee_repository::DataPath;

use crate::guest::tars::{self, ENTRIES_MAX, TarError};

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
        /// So much of it is not in the archive.
        holes_bytes: u64,
    },
    Content(Bytes),
    Link {
        path: DataPath,
        to: String,
    },
    LeftOut {
        name: String,
        why: String,
        /// It has content.
        is_lost: bool,
    },
}

/// Reads an archive, and passes on each part until `each` returns false. The holes of its files may have `holes_max` bytes together.
pub fn read(archive: impl Read, holes_max: u64, mut each: impl FnMut(Part) -> bool) {
    let (mut is_wanted, mut holes_left) = (true, holes_max);
    let end = tars::for_each_entry(archive, ENTRIES_MAX, |entry| {
        is_wanted = take(entry, &mut holes_left, &mut each)?;
        if is_wanted { Ok(()) } else { Err(TarError::Io(ErrorKind::Interrupted.into())) }
    });
    if let Err(error) = end
        && is_wanted
    {
        let why = format!("what follows could not be read: {error}");
        each(Part::LeftOut { name: String::new(), why, is_lost: true });
    }
}

fn take<R: Read>(
    entry: &mut tar::Entry<'_, R>,
    holes_left: &mut u64,
    each: &mut impl FnMut(Part) -> bool,
) -> Result<bool, TarError> {
    let kind = entry.header().entry_type();
    if kind.is_pax_global_extensions() {
        return Ok(true);
    }
    let name = name_in_text(&entry.path_bytes());
    let is_file = kind.is_file() || kind.is_gnu_sparse();
    let mut holes_bytes = 0;
    if kind.is_gnu_sparse() {
        // Nobody writes zeros without end because a header says so. The runner writes no more holes than this.
        holes_bytes = entry.size().saturating_sub(entry.header().entry_size()?);
        *holes_left =
            holes_left.checked_sub(holes_bytes).ok_or_else(|| TarError::Holes(name.clone()))?;
    }
    let mut left_out =
        |name, why: &str, is_lost| Ok(each(Part::LeftOut { name, why: why.to_owned(), is_lost }));
    let path = match inside(&entry.path_bytes()) {
        Ok(path) => path,
        Err(why) => return left_out(name, &why, is_file),
    };
    if kind.is_dir() {
        return Ok(path.is_root() || each(Part::Directory(path)));
    }
    if path.is_root() {
        return left_out(name, "it has no name", false);
    }
    if kind.is_symlink() {
        let to = entry.link_name_bytes().and_then(|to| String::from_utf8(to.into_owned()).ok());
        return match to {
            Some(to) => Ok(each(Part::Link { path, to })),
            None => left_out(name, "a link to a name that is not UTF-8", false),
        };
    }
    if !is_file {
        return left_out(name, in_words(kind), false);
    }
    let size_bytes = entry.size();
    if !each(Part::File { path, size_bytes, holes_bytes }) {
        return Ok(false);
    }
    let mut piece = vec![0; PIECE_BYTES];
    let mut left = size_bytes;
    while left > 0 {
        let length = entry.read(&mut piece)?;
        if length == 0 {
            let why = "the tar ends within it".to_owned();
            return Ok(each(Part::LeftOut { name, why, is_lost: true }));
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
