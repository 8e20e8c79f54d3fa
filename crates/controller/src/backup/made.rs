//! Makes a backup.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use perigee_http::Authority;
use perigee_model::units::compact_time;
use perigee_model::{Problem, ProblemKind};
use perigee_repository::OBJECT_ATTRIBUTE;
use rusqlite::{Connection, OpenFlags};
use rustix::fs::{CWD, RenameFlags, fgetxattr, flistxattr, renameat_with};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::{ENTRIES, ENTRIES_SHA256, FORMAT, HEADER, Header, Kind, Listed, PARTS};
use crate::clock::now_ms;
use crate::hash::hex;
use crate::job_files::{self, JOBS};
use crate::store::directory::{self, STORE};

/// The kernel lets a file have at most so many bytes of attributes' names, and so many in a value.
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
const BUFFER_BYTES: usize = 1 << 20;
/// How long a backup waits for a write of the controller to the store.
const STORE_WAIT: Duration = Duration::from_secs(30);

/// So much damage is named.
const DAMAGED_MAX: usize = 100;
/// What a kill has left is removed after so long.
const LEFTOVER_KEPT: Duration = Duration::from_secs(24 * 3600);

/// A backup that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    pub file: PathBuf,
    pub bytes: u64,
    /// Files of users whose contents are on the controller's disk and not in the backup.
    pub left_out_files: u64,
    pub left_out_bytes: u64,
    /// Damage of jobs' logs and samples on the controller's disk, which is in the backup as it is there.
    pub damaged: Vec<String>,
}

/// Backs up the controller with this state, which may run. `to` is the new file, or a directory in which it gets the present time as its name.
///
/// # Errors
/// `NotFound` if there is no such controller, `Conflict` if the file exists, `NoSpace`; also when the store is damaged.
pub fn make(state: &Path, to: &Path, with_files: bool) -> Result<Made, Problem> {
    let what = format!("can't back up the controller in {}", state.display());
    let store = state.join(STORE);
    if !store.is_file() {
        return Err(Problem::not_found(what, format!("there is no {}", store.display()))
            .next("name the controller's directory: --state DIR"));
    }
    let made_ms = now_ms();
    let file = match to.is_dir() {
        true => to.join(format!("controller-{}.tar", compact_time(made_ms))),
        false => to.to_owned(),
    };
    if file.exists() {
        return Err(Problem::conflict(what, format!("{} exists", file.display()))
            .next("choose another name, or a directory"));
    }
    let failed = |error: io::Error| {
        let what = format!("{what} to {}", file.display());
        match error.kind() {
            io::ErrorKind::AlreadyExists => Problem::conflict(what, "it exists since a moment ago")
                .next("choose another name, or a directory"),
            _ => Problem::of_io(ProblemKind::Unavailable, what, &error),
        }
    };
    remove_leftovers(&file).map_err(failed)?;
    let part = Temporary::beside(&file, "part").map_err(failed)?;
    let copy = Temporary::beside(&file, "store").map_err(failed)?;
    // What the store's copy names stays until it is copied too.
    let held = job_files::hold(state).map_err(failed)?;
    copy_store(&what, &store, &copy.0)?;
    let cluster = Authority::fingerprint_in(&directory::authority_dir(state))?;
    let header = Header { format: FORMAT, made_ms, cluster };
    let write = || -> io::Result<Made> {
        let new = File::options().write(true).open(&part.0)?;
        let mut backup = Writing::begin(new, &header)?;
        backup.add_file(STORE, &File::open(&copy.0)?)?;
        backup.walk(state, JOBS, with_files)?;
        drop(held);
        for name in PARTS {
            backup.walk(state, name, with_files)?;
        }
        let (left_out_files, left_out_bytes) = (backup.left_out_files, backup.left_out_bytes);
        let damaged = std::mem::take(&mut backup.damaged);
        let bytes = backup.end()?;
        publish(&part.0, &file)?;
        sync_directory(&file)?;
        Ok(Made { file: file.clone(), bytes, left_out_files, left_out_bytes, damaged })
    };
    write().map_err(failed)
}

/// Has a new name of this file be there after a power cut.
pub(super) fn sync_directory(of: &Path) -> io::Result<()> {
    job_files::sync_directory(directory_of(of))
}

fn directory_of(file: &Path) -> &Path {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty());
    dir.unwrap_or(Path::new("."))
}

/// Gives the file its name, if nothing has that name.
fn publish(part: &Path, file: &Path) -> io::Result<()> {
    match renameat_with(CWD, part, CWD, file, RenameFlags::NOREPLACE) {
        // NFS knows no such rename. What has the old name is removed with it.
        Err(rustix::io::Errno::INVAL) => std::fs::hard_link(part, file),
        renamed => Ok(renamed?),
    }
}

/// Removes what a kill has left beside this file long ago. Another backup to the same directory may be at work.
fn remove_leftovers(file: &Path) -> io::Result<()> {
    let own = format!(".{}.", file.file_name().unwrap_or_default().to_string_lossy());
    for entry in std::fs::read_dir(directory_of(file))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_of_backup = name.starts_with(&own) || name.starts_with(".controller-");
        if !is_of_backup || !(name.ends_with(".part") || name.ends_with(".store")) {
            continue;
        }
        let changed = entry.metadata().and_then(|meta| meta.modified());
        let age = changed.ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > LEFTOVER_KEPT) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// An empty file that only this user may read, and that is removed when this is dropped. No other backup has the same one.
struct Temporary(PathBuf);

impl Temporary {
    fn beside(file: &Path, what: &str) -> io::Result<Self> {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let path = file.with_file_name(format!(".{name}.{}.{what}", Uuid::new_v4()));
        File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "can't remove a temporary file");
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Copies the store as it is at one moment, while the controller writes to it.
fn copy_store(what: &str, store: &Path, copy: &Path) -> Result<(), Problem> {
    let copied = || -> rusqlite::Result<String> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let store = Connection::open_with_flags(store, flags)?;
        store.busy_timeout(STORE_WAIT)?;
        store.execute("VACUUM INTO ?1", [copy.display().to_string()])?;
        let copy = Connection::open_with_flags(copy, flags)?;
        copy.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))
    };
    match copied() {
        Ok(sound) if sound == "ok" => Ok(()),
        Ok(damage) => Err(Problem::internal(what, format!("its store is damaged: {damage}"))
            .next("keep the backups that there are; look after the disk of the controller")),
        Err(error) if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull) => {
            Err(Problem::no_space(what, "there is no room for a copy of its store")
                .next("free space at the backup's place, or choose another one"))
        }
        Err(error) => Err(Problem::internal(what, format!("its store can't be copied: {error}"))),
    }
}

/// A backup that is being written.
struct Writing {
    tar: tar::Builder<BufWriter<File>>,
    listed: Vec<Listed>,
    left_out_files: u64,
    left_out_bytes: u64,
    damaged: Vec<String>,
}

impl Writing {
    fn begin(file: File, header: &Header) -> io::Result<Self> {
        let tar = tar::Builder::new(BufWriter::with_capacity(BUFFER_BYTES, file));
        let (listed, damaged) = (Vec::new(), Vec::new());
        let mut new = Self { tar, listed, left_out_files: 0, left_out_bytes: 0, damaged };
        let header = serde_json::to_vec(header)?;
        new.add(HEADER, header.len() as u64, &header[..])?;
        Ok(new)
    }

    /// Adds an entry with exactly so many bytes. Returns their SHA-256.
    fn add(&mut self, path: &str, length: u64, bytes: impl Read) -> io::Result<String> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(length);
        header.set_mode(0o600);
        header.set_mtime(now_ms() / 1000);
        let mut bytes = Hashing::new(bytes.take(length));
        self.tar.append_data(&mut header, path, &mut bytes)?;
        match bytes.length == length {
            true => Ok(bytes.sha256()),
            false => Err(io::Error::other(format!("{path} became shorter while it was read"))),
        }
    }

    fn add_file(&mut self, path: &str, file: &File) -> io::Result<()> {
        let (length, sha256) = if path.split('/').next() == Some(JOBS) {
            // What was not recorded of a job's log may be cut off while it is read. Such a file is small.
            let mut bytes = Vec::new();
            Read::read_to_end(&mut &*file, &mut bytes)?;
            let line = job_files::damage_in(path, &bytes);
            let line = line.filter(|_| self.damaged.len() < DAMAGED_MAX);
            self.damaged.extend(line.map(|line| format!("{path}: line {line} can't be read")));
            let length = bytes.len() as u64;
            (length, self.add(path, length, &bytes[..])?)
        } else {
            let length = file.metadata()?.len();
            (length, self.add(path, length, file)?)
        };
        self.list(path, Kind::File, file, (length, sha256))
    }

    fn list(
        &mut self,
        path: &str,
        kind: Kind,
        file: &File,
        (length, sha256): (u64, String),
    ) -> io::Result<()> {
        let modified = file.metadata()?.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        let modified_ms = u64::try_from(modified.as_millis()).unwrap_or(u64::MAX);
        let attributes = attributes(file)?;
        let path = path.to_owned();
        self.listed.push(Listed { path, kind, length, sha256, modified_ms, attributes });
        Ok(())
    }

    /// Adds what is at this path below the state directory, if something is there.
    fn walk(&mut self, state: &Path, path: &str, with_files: bool) -> io::Result<()> {
        // Parts of unfinished uploads are nobody's files.
        let names: Vec<&str> = path.split('/').collect();
        if matches!(names[..], ["data", "tenants", _, "parts"]) {
            return Ok(());
        }
        let at = state.join(path);
        let file = match File::options().read(true).custom_flags(nix::libc::O_NOFOLLOW).open(&at) {
            // It was deleted a moment ago, or there is none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file?,
        };
        let meta = file.metadata()?;
        if meta.is_dir() {
            self.list(path, Kind::Directory, &file, (0, String::new()))?;
            let mut below = Vec::new();
            let entries = match std::fs::read_dir(&at) {
                // It got another name a moment ago.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                entries => entries?,
            };
            for entry in entries {
                let name = entry?.file_name().into_string();
                below.push(name.map_err(|name| {
                    io::Error::other(format!("{path} has a file with the name {name:?}"))
                })?);
            }
            below.sort();
            return below
                .iter()
                .try_for_each(|name| self.walk(state, &format!("{path}/{name}"), with_files));
        }
        let is_content = path.starts_with("data/tenants/");
        let length = meta.len();
        if attribute(&file, OBJECT_ATTRIBUTE)?.is_some() {
            self.list(path, Kind::Name, &file, (length, String::new()))
        } else if is_content && !with_files {
            self.left_out_files += 1;
            self.left_out_bytes += length;
            Ok(())
        } else {
            self.add_file(path, &file)
        }
    }

    /// Adds the list, and has all of it on the disk. Returns the length of the file.
    fn end(mut self) -> io::Result<u64> {
        let list = serde_json::to_vec(&self.listed)?;
        let sha256 = self.add(ENTRIES, list.len() as u64, &list[..])?;
        self.add(ENTRIES_SHA256, sha256.len() as u64, sha256.as_bytes())?;
        let mut buffered = self.tar.into_inner()?;
        buffered.flush()?;
        let file = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok(file.metadata()?.len())
    }
}

fn attributes(file: &File) -> io::Result<BTreeMap<String, String>> {
    let mut names = vec![0_u8; ATTRIBUTE_BYTES_MAX];
    let length = flistxattr(file, &mut names[..])?;
    let mut found = BTreeMap::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        // Others are the kernel's, or of the machine's administrator.
        let Ok(name) = std::str::from_utf8(name) else { continue };
        if name.starts_with("user.")
            && let Some(value) = attribute(file, name)?
        {
            found.insert(name.to_owned(), BASE64_STANDARD.encode(value));
        }
    }
    Ok(found)
}

fn attribute(file: &File, name: &str) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0_u8; ATTRIBUTE_BYTES_MAX];
    match fgetxattr(file, name, &mut value[..]) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(rustix::io::Errno::NODATA) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Computes the SHA-256 of what is read.
pub(super) struct Hashing<R> {
    inner: R,
    hash: Sha256,
    pub(super) length: u64,
}

impl<R> Hashing<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, hash: Sha256::new(), length: 0 }
    }

    pub(super) fn sha256(self) -> String {
        hex(&self.hash.finalize())
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(&buffer[..read]);
        self.length += read as u64;
        Ok(read)
    }
}
