//! Reading a file. Whoever reads all of it in order gets what was written, or an error before its last bytes.

use std::fs::File;

use crate::errors::problem;
use crate::objects::ObjectReader;
use crate::sums::Check;
use bytes::Bytes;
use perigee_model::Problem;
use perigee_model::data::FileEntry;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;

/// Where the content of a file is.
#[derive(Debug)]
pub enum Source {
    /// In the file.
    Local(File),
    /// In an S3 store.
    Object(ObjectReader),
}

/// An open file. It stays what it was when it was opened, also when it is replaced or deleted.
#[derive(Debug)]
pub struct FileReader {
    source: Source,
    entry: FileEntry,
    what: String,
    check: Check,
    /// How many bytes from the beginning were read in order.
    checked: u64,
    /// The content is not what was written: nothing is read any more.
    damage: Option<Problem>,
}

impl FileReader {
    pub(crate) fn new(source: Source, entry: FileEntry, what: String) -> Self {
        let file = match &source {
            Source::Local(file) => Some(file),
            Source::Object(_) => None,
        };
        let check = Check::of(file, entry.sha256.as_deref());
        Self { source, entry, what, check, checked: 0, damage: None }
    }

    /// Whether reading waits for another host. Then [`FileReader::read_async`] takes no thread meanwhile.
    pub(crate) fn is_remote(&self) -> bool {
        matches!(self.source, Source::Object(_))
    }

    /// What is read.
    pub fn entry(&self) -> &FileEntry {
        &self.entry
    }

    /// Reads at most `max` bytes of a file on the disk; none at the end of the file.
    ///
    /// # Errors
    /// `Internal` if the last bytes are read and the content is not what was written.
    pub fn read(&mut self, offset: u64, max: usize) -> Result<Bytes, Problem> {
        let length = self.length(offset, max);
        if length == 0 {
            return Ok(Bytes::new());
        }
        let piece = match &mut self.source {
            Source::Local(file) => read_local(file, offset, length, &self.what)?,
            Source::Object(_) => {
                return Err(Problem::internal(&self.what, "only a task may wait for the store"));
            }
        };
        self.checked(offset, piece)
    }

    /// As [`FileReader::read`].
    ///
    /// # Errors
    /// As [`FileReader::read`].
    pub(crate) async fn read_async(&mut self, offset: u64, max: usize) -> Result<Bytes, Problem> {
        let length = self.length(offset, max);
        if length == 0 {
            return Ok(Bytes::new());
        }
        let piece = match &mut self.source {
            Source::Local(file) => read_local(file, offset, length, &self.what)?,
            Source::Object(object) => object.read(offset, length).await?,
        };
        self.checked(offset, piece)
    }

    fn length(&self, offset: u64, max: usize) -> usize {
        let left = self.entry.size_bytes.saturating_sub(offset);
        usize::try_from(left).unwrap_or(max).min(max)
    }

    fn checked(&mut self, offset: u64, piece: Bytes) -> Result<Bytes, Problem> {
        if let Some(damage) = &self.damage {
            return Err(damage.clone());
        }
        if offset == self.checked {
            self.check.update(&piece);
            self.checked += piece.len() as u64;
            if self.checked == self.entry.size_bytes {
                self.end()?;
            }
        }
        Ok(piece)
    }

    fn end(&mut self) -> Result<(), Problem> {
        let Err(differs) = self.check.end() else { return Ok(()) };
        tracing::error!(what = self.what, differs, "a file of the repository is damaged");
        let why = format!("its content was damaged where it is kept: {differs}");
        let damage = Problem::internal(&self.what, why).next("upload the file again");
        self.damage = Some(damage.clone());
        Err(damage)
    }
}

fn read_local(file: &File, offset: u64, length: usize, what: &str) -> Result<Bytes, Problem> {
    let mut piece = Vec::with_capacity(length);
    while piece.len() < length {
        let at = offset + piece.len() as u64;
        match rustix::io::pread(file, spare_capacity(&mut piece), at) {
            // It was cut.
            Ok(0) => return Err(problem(what, Errno::IO)),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(problem(what, error)),
        }
    }
    piece.truncate(length);
    Ok(piece.into())
}
