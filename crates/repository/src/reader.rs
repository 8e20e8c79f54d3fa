//! Reading a file. Whoever reads all of it in order gets what was written, or an error before its last bytes.

use std::fs::File;
use std::os::unix::fs::FileExt;

use bytes::Bytes;
use perigee_model::Problem;
use perigee_model::data::FileEntry;
use sha2::{Digest, Sha256};

use crate::errors::problem;
use crate::listing::errno;
use crate::upload::hex;

/// An open file. It stays what it was when it was opened, also when it is replaced or deleted.
#[derive(Debug)]
pub struct FileReader {
    file: File,
    entry: FileEntry,
    what: String,
    hasher: Sha256,
    /// How many bytes from the beginning were read in order.
    hashed: u64,
}

impl FileReader {
    pub(crate) fn new(file: File, entry: FileEntry, what: String) -> Self {
        Self { file, entry, what, hasher: Sha256::new(), hashed: 0 }
    }

    /// What is read.
    pub fn entry(&self) -> &FileEntry {
        &self.entry
    }

    /// Reads at most `max` bytes; none at the end of the file.
    ///
    /// # Errors
    /// `Internal` if the last bytes are read and the content is not what was written.
    pub fn read(&mut self, offset: u64, max: usize) -> Result<Bytes, Problem> {
        let left = self.entry.size_bytes.saturating_sub(offset);
        let length = usize::try_from(left).unwrap_or(max).min(max);
        if length == 0 {
            return Ok(Bytes::new());
        }
        let mut piece = vec![0; length];
        let read = self.file.read_exact_at(&mut piece, offset);
        read.map_err(|e| problem(&self.what, errno(e)))?;
        if offset == self.hashed {
            self.hasher.update(&piece);
            self.hashed += length as u64;
            if self.hashed == self.entry.size_bytes {
                self.check()?;
            }
        }
        Ok(piece.into())
    }

    fn check(&mut self) -> Result<(), Problem> {
        let found = hex(&std::mem::take(&mut self.hasher).finalize());
        match &self.entry.sha256 {
            Some(written) if *written != found => {
                tracing::error!(what = self.what, %written, %found, "a file of the repository is damaged");
                let why = format!(
                    "its content was damaged on the disk: the SHA-256 is {found}, and was {written}"
                );
                Err(Problem::internal(&self.what, why).next("upload the file again"))
            }
            _ => Ok(()),
        }
    }
}
