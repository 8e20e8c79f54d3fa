//! Writes the outputs as one tar stream to the output disk.

use std::collections::BTreeMap;
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use perigee_model::guest::{HOLES_FACTOR, LeftOut, name_in_text};
use perigee_model::limits::LEFT_OUT;
use perigee_model::units::format_bytes;
use sha2::{Digest, Sha256};

use crate::error::Error;

const WRITE_BUFFER_BYTES: usize = 256 * 1024;

/// The end of a tar. There is always room for it.
const END_BYTES: u64 = 1024;

/// A file with holes that has more parts is written with its holes: the controller reads no larger headers.
const PARTS_MAX: u64 = 2000;

/// A tar of outputs: its length and SHA-256.
#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    pub bytes: u64,
    pub sha256: String,
    /// Why the tar has not all of the outputs, beside the files that were told.
    pub lacks: Option<String>,
}

/// Writes the tar of `paths` from byte 0 of the disk. Each file that is left out is told, with the reason, and each path
/// below which outputs may be that could not be looked for.
pub fn write(
    device: &Path,
    paths: &[PathBuf],
    unread: &BTreeMap<PathBuf, String>,
    tell: &mut dyn FnMut(LeftOut),
) -> Result<Written, Error> {
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
    let mut archive =
        Archive { tar, disk_bytes: room_bytes, holes_bytes: 0, tell, told: 0, more: 0 };
    for (path, why) in unread {
        archive.lose(path, why);
    }
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

struct Archive<'a> {
    tar: tar::Builder<Sink>,
    disk_bytes: u64,
    /// Of all files together.
    holes_bytes: u64,
    tell: &'a mut dyn FnMut(LeftOut),
    told: u64,
    /// Lost files that were not told, because there are too many.
    more: u64,
}

impl Archive<'_> {
    /// Adds a path with all that is below it. Names are the guest's paths without the leading `/`, in sorted order, so
    /// that equal outputs give equal archives.
    fn append(&mut self, path: &Path) -> Result<(), Error> {
        let kind = match path.symlink_metadata() {
            Ok(metadata) => metadata.file_type(),
            Err(error) => {
                self.lose(path, &error);
                return Ok(());
            }
        };
        if let Some(what) = without_content(kind) {
            self.leave_out(path, what, false);
            return Ok(());
        }
        if kind.is_file() {
            match self.choose_format(path) {
                Ok(None) => {}
                Ok(Some(why)) => {
                    self.lose(path, &why);
                    return Ok(());
                }
                Err(error) => {
                    self.lose(path, &error);
                    return Ok(());
                }
            }
        }
        let name = path.strip_prefix("/").unwrap_or(path);
        if !name.as_os_str().is_empty() {
            let before = self.tar.get_mut().mark();
            if let Err(error) = self.tar.append_path_with_name(path, name) {
                let trouble = self.tar.get_mut().back_to(before)?;
                match trouble {
                    Trouble::Disk => return Err(Error::io("write the output disk")(error)),
                    Trouble::Full => {
                        let disk = format_bytes(self.disk_bytes);
                        let why = format!(
                            "it does not fit on the output disk of {disk}: say `output: SIZE`"
                        );
                        self.lose(path, &why);
                    }
                    Trouble::None => self.leave_out(path, &error.to_string(), !kind.is_symlink()),
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
                self.lose(path, &error);
                return Ok(());
            }
        };
        children.sort_by_key(std::fs::DirEntry::file_name);
        children.iter().try_for_each(|child| self.append(&child.path()))
    }

    /// A file with holes is judged by what it holds. Returns why it can't be written.
    fn choose_format(&mut self, path: &Path) -> io::Result<Option<String>> {
        let file = File::open(path)?;
        let about = file.metadata()?;
        let data = if about.blocks() * 512 < about.len() { data_of(&file)? } else { None };
        self.tar.sparse(data.is_some());
        let Some(data_bytes) = data else { return Ok(None) };
        let holes_bytes = self.holes_bytes.saturating_add(about.len().saturating_sub(data_bytes));
        if holes_bytes > self.disk_bytes.saturating_mul(HOLES_FACTOR) {
            let size = format_bytes(about.len());
            return Ok(Some(format!(
                "with its holes it has {size}, and the holes of all outputs may be {HOLES_FACTOR} times as large as `output`: \
                 pack it with tar -S"
            )));
        }
        self.holes_bytes = holes_bytes;
        Ok(None)
    }

    fn lose(&mut self, path: &Path, why: &dyn std::fmt::Display) {
        self.leave_out(path, &why.to_string(), true);
    }

    fn leave_out(&mut self, path: &Path, why: &str, is_lost: bool) {
        if LEFT_OUT.check(self.told + 1).is_err() {
            self.more += u64::from(is_lost);
            return;
        }
        self.told += 1;
        let path = name_in_text(path.as_os_str().as_bytes());
        (self.tell)(LeftOut { path, why: why.to_owned(), is_lost });
    }

    fn lacks(&self) -> Option<String> {
        (self.more > 0).then(|| format!("{} more files than can be named", self.more))
    }
}

/// What of a directory is of no use without the processes that had it open.
fn without_content(kind: FileType) -> Option<&'static str> {
    match () {
        () if kind.is_socket() => Some("a socket"),
        () if kind.is_fifo() => Some("a FIFO"),
        () if kind.is_char_device() || kind.is_block_device() => Some("a device"),
        () => None,
    }
}

/// How much data a file with holes has; `None` if it has none, or so many that they are written too.
fn data_of(file: &File) -> io::Result<Option<u64>> {
    let (mut data_bytes, mut parts, mut at) = (0, 0, 0);
    loop {
        let begin = match lseek(file, at, Whence::SeekData) {
            // Nothing but a hole follows.
            Err(Errno::ENXIO) => return Ok(Some(data_bytes)),
            // The filesystem knows no holes.
            Err(Errno::EINVAL) => return Ok(None),
            begin => begin?,
        };
        at = lseek(file, begin, Whence::SeekHole)?;
        data_bytes += u64::try_from(at - begin).unwrap_or_default();
        parts += 1;
        if parts > PARTS_MAX {
            return Ok(None);
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
            self.write_and_tell(outputs).0
        }

        fn write_and_tell(&self, outputs: &[&str]) -> (Written, Vec<LeftOut>) {
            let outputs: Vec<_> = outputs.iter().map(|name| self.path(name)).collect();
            let mut told = Vec::new();
            let written =
                write(&self.path("disk"), &outputs, &BTreeMap::new(), &mut |one| told.push(one))
                    .unwrap();
            let below = format!("{}/", self.directory.path().display());
            let short = |one: LeftOut| LeftOut { path: one.path.replace(&below, ""), ..one };
            (written, told.into_iter().map(short).collect())
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
        let (written, told) = bench.write_and_tell(&["output"]);
        assert_eq!(bench.names(&written), ["output", "output/a", "output/c"].map(PathBuf::from));
        assert!(told.len() == 1 && told[0].path == "output/b" && told[0].is_lost, "{told:?}");
        assert!(told[0].why.contains("disk of 8 KiB"), "{told:?}");
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

    /// A FIFO made a job fail that had ended with 0, and a socket was passed over in silence.
    #[test]
    fn what_has_no_content_is_named_and_not_lost_and_links_are_kept_as_links() {
        let bench = Bench::new(1024 * 1024);
        let socket = std::os::unix::net::UnixListener::bind(bench.path("output/s")).unwrap();
        nix::unistd::mkfifo(&bench.path("output/f"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        std::os::unix::fs::symlink("/nowhere", bench.path("output/link")).unwrap();
        let (written, told) = bench.write_and_tell(&["output"]);
        let names = ["output", "output/a", "output/link"].map(PathBuf::from);
        assert_eq!((bench.names(&written), &written.lacks), (names.to_vec(), &None));
        let told: Vec<_> =
            told.iter().map(|one| (one.path.as_str(), one.why.as_str(), one.is_lost)).collect();
        assert_eq!(told, [("output/f", "a FIFO", false), ("output/s", "a socket", false)]);
        drop(socket);
    }

    /// A file with almost no data made a job fail for its apparent size.
    #[test]
    fn a_file_with_holes_takes_the_room_of_what_it_holds() {
        let bench = Bench::new(1024 * 1024);
        let file = File::create(bench.path("output/holes")).unwrap();
        file.set_len(8 * 1024 * 1024).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"data", 5 * 1024 * 1024).unwrap();
        let (written, told) = bench.write_and_tell(&["output"]);
        assert_eq!(told, []);
        assert!(written.bytes < 100 * 1024, "{written:?}");
        let disk = std::fs::read(bench.path("disk")).unwrap();
        let mut archive = tar::Archive::new(&disk[..usize::try_from(written.bytes).unwrap()]);
        let mut holes = archive.entries().unwrap().nth(2).unwrap().unwrap();
        let mut content = Vec::new();
        io::Read::read_to_end(&mut holes, &mut content).unwrap();
        assert!(content == std::fs::read(bench.path("output/holes")).unwrap());

        file.set_len(1024 * 1024 * 1024).unwrap();
        let (written, told) = bench.write_and_tell(&["output"]);
        assert_eq!(bench.names(&written).len(), 2);
        assert!(told[0].is_lost && told[0].why.contains("with its holes it has 1 GiB"), "{told:?}");
    }
}
