//! What an image is made of, and the copy that `qemu-img` reads where it may not read the source itself.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::{Whence, lseek};
use perigee_model::Problem;

use crate::disk::blocks::index;
use crate::images::qemu_img::{self, INPUT};
use crate::work::Work;

/// The copy can be stopped after each piece.
const PIECE_BYTES: u64 = 1 << 20;

/// The source of an image.
#[derive(Debug)]
pub enum ImportFrom {
    /// What is read is this file, whatever its name stands for by then.
    File(File),
    /// An `nbd://` address.
    Nbd(String),
    /// A directory with the files of a filesystem that is to be made. See `dir_images.rs`.
    Tree(Tree),
}

/// A directory that stays while this is there.
pub struct Tree {
    pub(crate) directory: PathBuf,
    _held: Box<dyn Send + Sync>,
}

impl std::fmt::Debug for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Tree").field(&self.directory).finish()
    }
}

impl Tree {
    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl ImportFrom {
    /// Accepts only an absolute path or an nbd:// address. `qemu-img` itself accepts many other forms, which may
    /// contain options.
    ///
    /// # Errors
    /// `NotFound` if there is no such file, `Invalid` if it can't be one.
    pub fn open_any(what: &str, source: &str) -> Result<Self, Problem> {
        if source.starts_with("nbd://") {
            return Ok(Self::Nbd(source.to_owned()));
        }
        let path = Path::new(source);
        if !path.is_absolute() {
            return Err(Problem::invalid(
                what,
                "the source is neither an absolute path nor an nbd:// address",
            ));
        }
        // A pipe is opened at once, and then refused.
        let flags = nix::libc::O_NONBLOCK;
        Self::opened(what, File::options().read(true).custom_flags(flags).open(path))
    }

    /// A tree that was unpacked. `held` keeps its owner from removing it.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn tree(
        what: &str,
        directory: PathBuf,
        held: impl Send + Sync + 'static,
    ) -> Result<Self, Problem> {
        let directory = crate::images::dir_images::check_tree(what, directory)?;
        Ok(Self::Tree(Tree { directory, _held: Box::new(held) }))
    }

    /// What an attempt to open a file has given.
    ///
    /// # Errors
    /// As [`Self::open_any`].
    pub fn opened(what: &str, file: std::io::Result<File>) -> Result<Self, Problem> {
        let file = file.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                Problem::not_found(what, "the file does not exist on the volume server's machine")
            }
            _ => Problem::invalid(what, error),
        })?;
        match file.metadata() {
            Ok(found) if found.is_file() || found.file_type().is_block_device() => {
                Ok(Self::File(file))
            }
            Ok(_) => Err(Problem::invalid(what, "the source is neither a file nor a disk")),
            Err(error) => Err(Problem::invalid(what, error)),
        }
    }

    pub(super) fn argument(&self) -> &str {
        match self {
            Self::File(_) | Self::Tree(_) => INPUT,
            Self::Nbd(address) => address,
        }
    }

    pub(super) fn file(&self) -> Option<&File> {
        match self {
            Self::File(file) => Some(file),
            Self::Nbd(_) | Self::Tree(_) => None,
        }
    }
}

/// Copies a file until its end or until the work is stopped. Holes stay holes.
///
/// # Errors
/// `StorageFull` when there is no more room, `Interrupted` when it was stopped.
pub(super) fn copy(from: &File, to: &File, work: &Work) -> io::Result<()> {
    let mut buffer = vec![0; index(PIECE_BYTES)];
    let mut data = 0..0;
    loop {
        work.step(0)?;
        qemu_img::check_room(to)?;
        if data.is_empty() {
            let Some(next) = next_data(from, data.end)? else { break };
            data = next;
        }
        let wanted = index(PIECE_BYTES.min(data.end - data.start));
        let length = from.read_at(&mut buffer[..wanted], data.start)?;
        if length == 0 {
            break;
        }
        to.write_all_at(&buffer[..length], data.start)?;
        data.start += length as u64;
    }
    // A disk has no length of its own here, and ends where its data does.
    to.set_len(from.metadata()?.len().max(data.start))
}

/// The next data of a file from an offset on, if there is any. All of a disk is data.
fn next_data(file: &File, from: u64) -> io::Result<Option<Range<u64>>> {
    if !file.metadata()?.is_file() {
        return Ok(Some(from..u64::MAX));
    }
    let at = i64::try_from(from).map_err(io::Error::other)?;
    let start = match lseek(file, at, Whence::SeekData) {
        Ok(start) => start,
        Err(nix::Error::ENXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = lseek(file, start, Whence::SeekHole)?;
    Ok(Some(start.cast_unsigned()..end.cast_unsigned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_sparse_file_that_qemu_img_may_not_read_takes_the_space_of_its_data() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            File::options().read(true).write(true).create_new(true).open(path).unwrap()
        };
        let (from, to) = (file("from"), file("to"));
        let length_bytes = 3 << 30;
        from.set_len(length_bytes).unwrap();
        from.write_all_at(&[7; 5000], 1 << 30).unwrap();
        copy(&from, &to, &Work::default()).unwrap();
        let meta = to.metadata().unwrap();
        assert_eq!(meta.len(), length_bytes);
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
        let mut bytes = [0; 5001];
        to.read_exact_at(&mut bytes, 1 << 30).unwrap();
        assert!(bytes[..5000] == [7; 5000] && bytes[5000] == 0);
    }

    #[test]
    fn a_copy_that_nobody_waits_for_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, [7; 4096]).unwrap();
        let (from, to) = (File::open(path).unwrap(), tempfile::tempfile().unwrap());
        let work = Work::default();
        work.stop();
        assert_eq!(copy(&from, &to, &work).unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert_eq!(to.metadata().unwrap().len(), 0);
    }

    #[test]
    fn a_pipe_is_no_source_and_nobody_waits_for_its_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let refused = ImportFrom::open_any("import", path.to_str().unwrap()).unwrap_err();
        assert!(refused.why.contains("neither a file nor a disk"), "{refused}");
    }
}
