//! Checks tar streams from people and guests, entry by entry. They are not trusted, and never unpacked here.
//!
//! An entry that could leave its directory is refused. An archive's metadata (long names, extended headers) is
//! read into memory, so its size is limited.

use std::cell::Cell;
use std::io::{self, Read, Write};

use perigee_model::guest::Seed;

/// The most bytes of headers between one entry's data and the next entry's data.
const HEADER_BYTES_MAX: u64 = 64 << 10;

/// The most entries. Each takes at least 512 bytes.
pub const ENTRIES_MAX: u64 = 1_000_000;

#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("entry {0:?} is a sparse file")]
    Kind(String),
    #[error("it has more than {0} entries")]
    Entries(u64),
    #[error("the seed's description: {0}")]
    Json(#[from] serde_json::Error),
}

/// A reader that returns no more bytes than its budget.
pub struct Bounded<'a, R> {
    inner: R,
    budget: &'a Cell<u64>,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.budget.get();
        if left == 0 && !buffer.is_empty() {
            let why = format!("the headers of an entry take more than {HEADER_BYTES_MAX} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let room = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let length = self.inner.read(&mut buffer[..room])?;
        self.budget.set(left - length as u64);
        Ok(length)
    }
}

/// Calls `each` for every entry. If it does not read a file's data, they are skipped.
pub fn for_each_entry<R: Read>(
    archive: R,
    entries_max: u64,
    mut each: impl FnMut(&mut tar::Entry<'_, Bounded<'_, R>>) -> Result<(), TarError>,
) -> Result<(), TarError> {
    let budget = Cell::new(HEADER_BYTES_MAX);
    let mut archive = tar::Archive::new(Bounded { inner: archive, budget: &budget });
    let mut entries = archive.entries()?;
    let mut count = 0;
    loop {
        // The iterator reads only headers here, because the previous entry was read completely.
        budget.set(HEADER_BYTES_MAX);
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

/// Writes the tar for a job's seed disk: the description.
pub fn write_seed<W: Write>(target: W, seed: &Seed) -> Result<W, TarError> {
    let mut builder = tar::Builder::new(target);
    let json = serde_json::to_vec(seed)?;
    let mut header = tar::Header::new_gnu();
    // The owner is the guest's root, which runs the job.
    header.set_uid(0);
    header.set_gid(0);
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_size(json.len() as u64);
    builder.append_data(&mut header, "job.json", &json[..])?;
    Ok(builder.into_inner()?)
}

#[cfg(test)]
pub mod tests;
