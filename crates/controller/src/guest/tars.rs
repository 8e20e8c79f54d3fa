//! Checks tar streams from people and guests, entry by entry. They are not trusted, and never unpacked here. And writes
//! tars, in pieces: headers, content, [`padding`], …, [`end`].
//!
//! An entry that could leave its directory is refused. An archive's metadata (long names, extended headers) is
//! read into memory, so its size is limited.

use std::cell::Cell;
use std::io::{self, Read, Write};

use bytes::Bytes;
use perigee_model::guest::Seed;
use perigee_model::tar_headers::{Bounded, TAR_HEADER_BYTES_MAX};

/// The most entries. Each takes at least 512 bytes.
pub const ENTRIES_MAX: u64 = 1_000_000;

/// Why a tar stream is refused.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("entry {0:?} is a sparse file")]
    Kind(String),
    #[error("with entry {0:?}, the holes of its files are larger than they may be")]
    Holes(String),
    #[error("it has more than {0} entries")]
    Entries(u64),
    #[error("the seed's description: {0}")]
    Json(#[from] serde_json::Error),
}

/// Calls `each` for every entry. If it does not read a file's data, they are skipped.
pub fn for_each_entry<R: Read>(
    archive: R,
    entries_max: u64,
    mut each: impl FnMut(&mut tar::Entry<'_, Bounded<'_, R>>) -> Result<(), TarError>,
) -> Result<(), TarError> {
    let budget = Cell::new(TAR_HEADER_BYTES_MAX);
    let mut archive = tar::Archive::new(Bounded::new(archive, &budget));
    let mut entries = archive.entries()?;
    let mut count = 0;
    loop {
        // The iterator reads only headers here, because the previous entry was read completely.
        budget.set(TAR_HEADER_BYTES_MAX);
        let Some(entry) = entries.next() else { return Ok(()) };
        let mut entry = entry?;
        count += 1;
        if count > entries_max {
            return Err(TarError::Entries(entries_max));
        }
        budget.set(u64::MAX);
        each(&mut entry)?;
        io::copy(&mut entry, &mut io::sink())?;
    }
}

/// Checks every entry of a job's output, before a user unpacks it.
///
/// # Errors
/// If it is no tar, or contains something that takes more memory or disk space than its bytes.
pub fn check_output(archive: impl Read) -> Result<(), TarError> {
    for_each_entry(archive, ENTRIES_MAX, |entry| {
        if !entry.header().entry_type().is_gnu_sparse() {
            return Ok(());
        }
        Err(TarError::Kind(entry.path()?.to_string_lossy().into_owned()))
    })
}

/// Writes the tar for a job's seed disk: the description. Its owner is the guest's root, which runs the job.
pub fn write_seed<W: Write>(mut target: W, seed: &Seed) -> Result<W, TarError> {
    let json = serde_json::to_vec(seed)?;
    let size_bytes = json.len() as u64;
    let entry = Entry { is_directory: false, mode: 0o644, modified_s: 0, size_bytes };
    for part in [headers("job.json", &entry)?, json.into(), padding(size_bytes), end()] {
        target.write_all(&part)?;
    }
    Ok(target)
}

/// An entry that is written. It belongs to root.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub is_directory: bool,
    pub mode: u32,
    pub modified_s: u64,
    /// 0 for a directory.
    pub size_bytes: u64,
}

/// What stands before an entry's content. A long name has an entry of its own before it.
///
/// # Errors
/// If the path can't be that of an entry.
pub fn headers(path: &str, entry: &Entry) -> io::Result<Bytes> {
    let mut header = tar::Header::new_gnu();
    if entry.is_directory {
        header.set_entry_type(tar::EntryType::Directory);
    }
    header.set_uid(0);
    header.set_gid(0);
    header.set_mode(entry.mode);
    header.set_mtime(entry.modified_s);
    header.set_size(entry.size_bytes);
    let mut builder = tar::Builder::new(Vec::new());
    // Without its content, which follows.
    builder.append_data(&mut header, path, io::empty())?;
    Ok(std::mem::take(builder.get_mut()).into())
}

/// What follows a content of this length, so that the next header begins at a whole block.
pub fn padding(size_bytes: u64) -> Bytes {
    const ZEROS: [u8; 512] = [0; 512];
    let over = usize::try_from(size_bytes % 512).unwrap_or(0);
    Bytes::from_static(if over == 0 { &[] } else { &ZEROS[over..] })
}

/// The end of a tar.
pub fn end() -> Bytes {
    Bytes::from_static(&[0; 1024])
}

#[cfg(test)]
pub mod tests;
