//! Writes the outputs as one tar stream to the output disk.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::Error;

const WRITE_BUFFER_BYTES: usize = 256 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    pub bytes: u64,
    pub sha256: String,
}

/// Writes the tar of `paths` from byte 0 of the disk. A path that does not exist is an error if
/// `all_must_exist`, and otherwise skipped.
pub fn write(device: &Path, paths: &[PathBuf], all_must_exist: bool) -> Result<Written, Error> {
    let mut disk = OpenOptions::new()
        .read(true)
        .write(true)
        .open(device)
        .map_err(Error::io("open the output disk"))?;
    let room_bytes = disk
        .seek(SeekFrom::End(0))
        .and_then(|size| disk.rewind().map(|()| size))
        .map_err(Error::io("find the size of the output disk"))?;
    let mut sink = Sink {
        disk: BufWriter::with_capacity(WRITE_BUFFER_BYTES, disk),
        hash: Sha256::new(),
        written_bytes: 0,
        room_bytes,
        overflow: false,
    };
    match archive(&mut sink, paths, all_must_exist) {
        Err(Error::Io { .. }) if sink.overflow => return Err(Error::OutputTooLarge(room_bytes)),
        other => other?,
    }
    let bytes = sink.written_bytes;
    let disk = sink
        .disk
        .into_inner()
        .map_err(|error| Error::io("write the output disk")(error.into_error()))?;
    disk.sync_all().map_err(Error::io("flush the output disk"))?;
    Ok(Written { bytes, sha256: hex(&sink.hash.finalize()) })
}

fn archive(sink: &mut Sink, paths: &[PathBuf], all_must_exist: bool) -> Result<(), Error> {
    let mut tar = tar::Builder::new(sink);
    tar.follow_symlinks(false);
    tar.sparse(false);
    for path in paths {
        match path.symlink_metadata() {
            Ok(metadata) => append(&mut tar, path, &metadata)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if all_must_exist {
                    return Err(Error::OutputMissing(path.display().to_string()));
                }
            }
            Err(error) => return Err(Error::io(format!("read {}", path.display()))(error)),
        }
    }
    tar.finish().map_err(Error::io("write the output tar"))
}

/// Adds a path. Names are the guest's paths without the leading `/`, in sorted order, so that equal outputs
/// give equal archives.
fn append(
    tar: &mut tar::Builder<&mut Sink>,
    path: &Path,
    metadata: &Metadata,
) -> Result<(), Error> {
    let doing = || format!("write {} to the output tar", path.display());
    let kind = metadata.file_type();
    if kind.is_socket() {
        // A socket is of no use without the process that listened.
        return Ok(());
    }
    let name = path.strip_prefix("/").unwrap_or(path);
    if !name.as_os_str().is_empty() {
        tar.append_path_with_name(path, name).map_err(Error::io(doing()))?;
    }
    if !kind.is_dir() {
        return Ok(());
    }
    let mut children = std::fs::read_dir(path)
        .and_then(|entries| entries.collect::<io::Result<Vec<_>>>())
        .map_err(Error::io(doing()))?;
    children.sort_by_key(std::fs::DirEntry::file_name);
    for child in children {
        let metadata = child.metadata().map_err(Error::io(doing()))?;
        append(tar, &child.path(), &metadata)?;
    }
    Ok(())
}

/// Counts and hashes the bytes on their way to the disk, and refuses bytes that do not fit.
struct Sink {
    disk: BufWriter<File>,
    hash: Sha256,
    written_bytes: u64,
    room_bytes: u64,
    overflow: bool,
}

impl Write for Sink {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.written_bytes + buffer.len() as u64 > self.room_bytes {
            self.overflow = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        let length = self.disk.write(buffer)?;
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

        fn write(&self, outputs: &[&str], all_must_exist: bool) -> Result<Written, Error> {
            let outputs: Vec<_> = outputs.iter().map(|name| self.path(name)).collect();
            write(&self.path("disk"), &outputs, all_must_exist)
        }
    }

    #[test]
    fn the_length_and_the_hash_are_those_of_the_stream_on_the_disk() {
        let bench = Bench::new(1024 * 1024);
        let written = bench.write(&["output"], true).unwrap();
        let disk = std::fs::read(bench.path("disk")).unwrap();
        let stream = &disk[..usize::try_from(written.bytes).unwrap()];
        assert_eq!(written.sha256, hex(&Sha256::digest(stream)));
        let mut archive = tar::Archive::new(stream);
        let names: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().into_owned())
            .collect();
        let relative = bench.path("output").strip_prefix("/").unwrap().to_owned();
        assert_eq!(names, [relative.clone(), relative.join("a")]);
    }

    #[test]
    fn outputs_larger_than_the_disk_are_a_clear_error() {
        let bench = Bench::new(4096);
        std::fs::write(bench.path("output/large"), vec![1; 10_000]).unwrap();
        assert!(matches!(bench.write(&["output"], true), Err(Error::OutputTooLarge(4096))));
    }

    #[test]
    fn a_missing_output_is_an_error_only_of_a_command_that_succeeded() {
        let bench = Bench::new(1024 * 1024);
        assert!(matches!(bench.write(&["output", "none"], true), Err(Error::OutputMissing(_))));
        assert!(bench.write(&["output", "none"], false).is_ok());
    }

    #[test]
    fn sockets_are_passed_over_and_links_are_kept_as_links() {
        let bench = Bench::new(1024 * 1024);
        let socket = std::os::unix::net::UnixListener::bind(bench.path("output/s")).unwrap();
        std::os::unix::fs::symlink("/nowhere", bench.path("output/link")).unwrap();
        assert!(bench.write(&["output"], true).is_ok());
        drop(socket);
    }
}
