//! Writes the outputs as one tar stream to the output disk.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::Error;

const WRITE_BUFFER_BYTES: usize = 256 * 1024;

/// The end of a tar. There is always room for it.
const END_BYTES: u64 = 1024;

/// What could not be written is named up to this number.
const NAMED_MAX: usize = 5;

#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    pub bytes: u64,
    pub sha256: String,
    /// Why the tar has not all of the outputs.
    pub lacks: Option<String>,
}

/// Writes the tar of `paths` from byte 0 of the disk. What does not fit, or can't be read, is left out and said.
pub fn write(device: &Path, paths: &[PathBuf]) -> Result<Written, Error> {
    let mut disk = OpenOptions::new()
        .read(true)
        .write(true)
        .open(device)
        .map_err(Error::io("open the output disk"))?;
    let room_bytes = disk
        .seek(SeekFrom::End(0))
        .and_then(|size| disk.rewind().map(|()| size))
        .map_err(Error::io("find the size of the output disk"))?;
    let sink = Sink {
        disk: BufWriter::with_capacity(WRITE_BUFFER_BYTES, disk),
        hash: Sha256::new(),
        written_bytes: 0,
        room_bytes: room_bytes.saturating_sub(END_BYTES),
        trouble: Trouble::None,
    };
    let mut tar = tar::Builder::new(sink);
    tar.follow_symlinks(false);
    tar.sparse(false);
    let mut archive = Archive { tar, disk_bytes: room_bytes, left_out: Vec::new(), more: 0 };
    for path in paths {
        archive.append(path)?;
    }
    let lacks = archive.lacks();
    archive.tar.get_mut().room_bytes = room_bytes;
    let sink = archive.tar.into_inner().map_err(Error::io("write the output tar"))?;
    let bytes = sink.written_bytes;
    let disk = sink
        .disk
        .into_inner()
        .map_err(|error| Error::io("write the output disk")(error.into_error()))?;
    disk.sync_all().map_err(Error::io("flush the output disk"))?;
    Ok(Written { bytes, sha256: hex(&sink.hash.finalize()), lacks })
}

struct Archive {
    tar: tar::Builder<Sink>,
    disk_bytes: u64,
    /// The first ones, with the reason.
    left_out: Vec<String>,
    more: u64,
}

impl Archive {
    /// Adds a path with all that is below it. Names are the guest's paths without the leading `/`, in sorted order, so
    /// that equal outputs give equal archives.
    fn append(&mut self, path: &Path) -> Result<(), Error> {
        let kind = match path.symlink_metadata() {
            Ok(metadata) => metadata.file_type(),
            Err(error) => {
                self.leave_out(path, &error);
                return Ok(());
            }
        };
        if kind.is_socket() {
            // A socket is of no use without the process that listened.
            return Ok(());
        }
        if !kind.is_file() && !kind.is_dir() && !kind.is_symlink() {
            self.leave_out(path, &"it is a device or a pipe");
            return Ok(());
        }
        let name = path.strip_prefix("/").unwrap_or(path);
        if !name.as_os_str().is_empty() {
            let before = self.tar.get_mut().mark();
            if let Err(error) = self.tar.append_path_with_name(path, name) {
                let trouble = self.tar.get_mut().back_to(before)?;
                match trouble {
                    Trouble::Disk => return Err(Error::io("write the output disk")(error)),
                    Trouble::Full => {
                        let disk_bytes = self.disk_bytes;
                        let why =
                            format!("it does not fit on the output disk of {disk_bytes} bytes");
                        self.leave_out(path, &why);
                    }
                    Trouble::None => self.leave_out(path, &error),
                }
            }
        }
        if !kind.is_dir() {
            return Ok(());
        }
        let children = std::fs::read_dir(path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let mut children = match children {
            Ok(children) => children,
            Err(error) => {
                self.leave_out(path, &error);
                return Ok(());
            }
        };
        children.sort_by_key(std::fs::DirEntry::file_name);
        children.iter().try_for_each(|child| self.append(&child.path()))
    }

    fn leave_out(&mut self, path: &Path, why: &dyn std::fmt::Display) {
        if self.left_out.len() < NAMED_MAX {
            self.left_out.push(format!("{}: {why}", path.display()));
        } else {
            self.more += 1;
        }
    }

    fn lacks(&self) -> Option<String> {
        let named = self.left_out.join("; ");
        match (self.left_out.is_empty(), self.more) {
            (true, _) => None,
            (false, 0) => Some(named),
            (false, more) => Some(format!("{named}; and {more} more")),
        }
    }
}

/// What ended a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    /// Nothing here: the file can't be read.
    None,
    /// There is no room.
    Full,
    /// The disk has failed.
    Disk,
}

/// Counts and hashes the bytes on their way to the disk, and refuses bytes that do not fit.
struct Sink {
    disk: BufWriter<File>,
    hash: Sha256,
    written_bytes: u64,
    room_bytes: u64,
    trouble: Trouble,
}

impl Sink {
    /// Where the stream is, to come back to it.
    fn mark(&self) -> (u64, Sha256) {
        (self.written_bytes, self.hash.clone())
    }

    /// Forgets what was written since, and returns what was the trouble.
    fn back_to(&mut self, (written_bytes, hash): (u64, Sha256)) -> Result<Trouble, Error> {
        let trouble = std::mem::replace(&mut self.trouble, Trouble::None);
        self.disk
            .seek(SeekFrom::Start(written_bytes))
            .map_err(Error::io("write the output disk"))?;
        (self.written_bytes, self.hash) = (written_bytes, hash);
        Ok(trouble)
    }
}

impl Write for Sink {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.written_bytes + buffer.len() as u64 > self.room_bytes {
            self.trouble = Trouble::Full;
            return Err(io::ErrorKind::StorageFull.into());
        }
        let length = self.disk.write(buffer).inspect_err(|_| self.trouble = Trouble::Disk)?;
        self.hash.update(&buffer[..length]);
        self.written_bytes += length as u64;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.disk.flush()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bench {
        directory: tempfile::TempDir,
    }

    impl Bench {
        fn new(disk_bytes: u64) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let disk = File::create(directory.path().join("disk")).unwrap();
            disk.set_len(disk_bytes).unwrap();
            std::fs::create_dir(directory.path().join("output")).unwrap();
            std::fs::write(directory.path().join("output/a"), "hello").unwrap();
            Self { directory }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        fn write(&self, outputs: &[&str]) -> Written {
            let outputs: Vec<_> = outputs.iter().map(|name| self.path(name)).collect();
            write(&self.path("disk"), &outputs).unwrap()
        }

        /// What the tar on the disk has, below the bench's directory.
        fn names(&self, written: &Written) -> Vec<PathBuf> {
            let disk = std::fs::read(self.path("disk")).unwrap();
            let stream = &disk[..usize::try_from(written.bytes).unwrap()];
            assert_eq!(written.sha256, hex(&Sha256::digest(stream)));
            let mut archive = tar::Archive::new(stream);
            let relative = self.directory.path().strip_prefix("/").unwrap();
            let path = |entry: io::Result<tar::Entry<'_, &[u8]>>| {
                entry.unwrap().path().unwrap().strip_prefix(relative).unwrap().to_owned()
            };
            archive.entries().unwrap().map(path).collect()
        }
    }

    #[test]
    fn the_length_and_the_hash_are_those_of_the_stream_on_the_disk() {
        let bench = Bench::new(1024 * 1024);
        let written = bench.write(&["output"]);
        assert_eq!(bench.names(&written), ["output", "output/a"].map(PathBuf::from));
        assert_eq!(written.lacks, None);
    }

    #[test]
    fn what_does_not_fit_is_left_out_and_the_rest_is_there() {
        let bench = Bench::new(8192);
        std::fs::write(bench.path("output/b"), vec![1; 10_000]).unwrap();
        std::fs::write(bench.path("output/c"), "small").unwrap();
        let written = bench.write(&["output"]);
        assert_eq!(bench.names(&written), ["output", "output/a", "output/c"].map(PathBuf::from));
        let lacks = written.lacks.unwrap();
        assert!(lacks.contains("output/b") && lacks.contains("disk of 8192 bytes"), "{lacks}");
    }

    #[test]
    fn a_disk_that_is_full_to_the_last_block_has_a_whole_tar() {
        for room in (1024..8192).step_by(512) {
            let bench = Bench::new(room);
            std::fs::write(bench.path("output/b"), vec![1; 700]).unwrap();
            let written = bench.write(&["output"]);
            assert!(written.bytes <= room && bench.names(&written).len() <= 3, "{room}");
        }
    }

    #[test]
    fn only_the_first_names_of_what_is_left_out_are_told() {
        let bench = Bench::new(1024);
        for number in 0..9 {
            std::fs::write(bench.path(&format!("output/{number}")), "x").unwrap();
        }
        let lacks = bench.write(&["output"]).lacks.unwrap();
        assert!(lacks.ends_with("and 6 more"), "{lacks}");
    }

    #[test]
    fn sockets_are_passed_over_and_links_are_kept_as_links() {
        let bench = Bench::new(1024 * 1024);
        let socket = std::os::unix::net::UnixListener::bind(bench.path("output/s")).unwrap();
        std::os::unix::fs::symlink("/nowhere", bench.path("output/link")).unwrap();
        assert_eq!(bench.write(&["output"]).lacks, None);
        drop(socket);
    }
}
