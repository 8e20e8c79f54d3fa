//! Restores a backup into an empty directory, whose controller commands the hosts from its next start on.
//!
//! All of it is unpacked beside that directory and compared with its checksums before the directory gets its name. So a restore that is killed, or finds
//! damage, leaves nothing that could be started. The restored store says that each host has to be heard first ([`crate::restored`]).

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use perigee_model::{HostId, Problem, ProblemKind};
use rustix::fs::{XattrFlags, fsetxattr, syncfs};

use super::made::{Hashing, sync_directory};
use super::{ENTRIES, ENTRIES_SHA256, FORMAT, HEADER, Header, Kind, Listed, PARTS};
use crate::clock::now_ms;
use crate::job_files::{JOBS, remove_directory};
use crate::records::{RESTORED, Records, RestoredRecord};
use crate::store::SqliteStore;
use crate::store::directory::{self, STORE};
use crate::term;

/// The header and the list are read into memory, and are not larger than this.
const LIST_BYTES_MAX: u64 = 1 << 30;
const BUFFER_BYTES: usize = 1 << 20;

/// A controller that was restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// When the backup was made; Unix time.
    pub made_ms: u64,
    /// The hosts of its records.
    pub hosts: Vec<HostId>,
    /// The terms of its starts are above this one.
    pub term: u64,
}

/// Restores the backup into this directory, which is made, or is there and empty.
///
/// # Errors
/// `Conflict` if something is there; `Invalid` if the backup is not whole, or damaged; `NoSpace`.
pub async fn restore(file: &Path, state: &Path) -> Result<Restored, Problem> {
    let what = format!("can't restore {} into {}", file.display(), state.display());
    check_empty(&what, state)?;
    let part = unpack(&what, file, state)?;
    let (header, hosts) = (part.header.clone(), part.hold(&what).await?);
    let failed = |error| Problem::of_io(ProblemKind::Unavailable, &what, &error);
    part.put_in_place(state).map_err(failed)?;
    let term = term::take_over(state).await?;
    Ok(Restored { made_ms: header.made_ms, hosts, term })
}

fn check_empty(what: &str, state: &Path) -> Result<(), Problem> {
    let is_empty = match std::fs::read_dir(state) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => return Err(Problem::of_io(ProblemKind::Invalid, what, &error)),
    };
    if is_empty {
        return Ok(());
    }
    // A controller that runs there has the lock; nobody else is to have it while this looks.
    if state.join("lock").exists() {
        drop(directory::lock(state)?);
    }
    Err(Problem::conflict(what, "the directory is not empty, and a restore replaces nothing")
        .next("name another directory with --state, or move away what is there"))
}

/// An unpacked backup, which is removed again unless it is put in place.
struct Part {
    dir: PathBuf,
    header: Header,
    is_in_place: bool,
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_in_place
            && let Err(error) = remove_directory(&self.dir)
        {
            tracing::warn!(path = %self.dir.display(), %error, "can't remove what was unpacked");
        }
    }
}

impl Part {
    /// Has the controller wait for each host of its records, which it returns.
    async fn hold(&self, what: &str) -> Result<Vec<HostId>, Problem> {
        let records = Records::new(Arc::new(SqliteStore::open(&self.dir.join(STORE))?));
        let keys = records.keys("hosts/").await?;
        let hosts = keys.iter().map(|key| HostId::new(key.trim_start_matches("hosts/")));
        let hosts: Vec<HostId> =
            hosts.collect::<Result<_, _>>().map_err(|e| Problem::invalid(what, e))?;
        let (backup_ms, restored_ms) = (self.header.made_ms, now_ms());
        let record = RestoredRecord { backup_ms, restored_ms, waits_for: hosts.clone() };
        records.put(RESTORED, &record).await?;
        Ok(hosts)
    }

    fn put_in_place(mut self, state: &Path) -> io::Result<()> {
        syncfs(File::open(&self.dir)?)?;
        // A directory that is there and empty is replaced.
        std::fs::rename(&self.dir, state)?;
        self.is_in_place = true;
        sync_directory(state)
    }
}

/// Unpacks the backup beside the directory, and compares all of it with the checksums.
fn unpack(what: &str, file: &Path, state: &Path) -> Result<Part, Problem> {
    let invalid =
        |why: String| Problem::invalid(what, why).next("use another backup; nothing was restored");
    let name =
        state.file_name().ok_or_else(|| invalid("it is no name of a directory".to_owned()))?;
    let dir = state.with_file_name(format!(".{}.restoring", name.to_string_lossy()));
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::Other => {
            invalid(format!("the backup is cut off or damaged: {error}"))
        }
        _ => Problem::of_io(ProblemKind::Invalid, what, &error),
    };
    let opened =
        File::open(file).map_err(|error| Problem::of_io(ProblemKind::Invalid, what, &error))?;
    let made_ms = 0;
    let mut part = Part {
        dir,
        header: Header { format: FORMAT, made_ms, cluster: String::new() },
        is_in_place: false,
    };
    let make = || -> io::Result<Header> {
        remove_directory(&part.dir)?;
        make_directory(&part.dir)?;
        let mut unpacked = Unpacked::default();
        unpacked.read(opened, &part.dir)?;
        let (header, listed) = unpacked.checked()?;
        listed.iter().try_for_each(|one| finish(&part.dir, one))?;
        // What is made in a directory changes its time.
        let mut directories = listed.iter().rev().filter(|one| one.kind == Kind::Directory);
        directories.try_for_each(|one| set_attributes(&part.dir, one))?;
        Ok(header)
    };
    part.header = make().map_err(failed)?;
    Ok(part)
}

fn damaged(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

fn make_directory(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// The path of an entry, which leads nowhere else.
fn safe(dir: &Path, path: &str) -> io::Result<PathBuf> {
    let names = Path::new(path).components();
    let is_safe = names.clone().all(|name| matches!(name, Component::Normal(_)));
    let first = names.clone().next().and_then(|name| name.as_os_str().to_str());
    let is_known =
        first.is_some_and(|first| first == STORE || first == JOBS || PARTS.contains(&first));
    match is_safe && is_known {
        true => Ok(dir.join(path)),
        false => Err(damaged(format!("a backup has no {path:?}"))),
    }
}

/// What was found in the tar file.
#[derive(Default)]
struct Unpacked {
    header: Option<Vec<u8>>,
    /// The length and SHA-256 of each file.
    files: BTreeMap<String, (u64, String)>,
    list: Option<(Vec<u8>, String)>,
    list_sha256: Option<Vec<u8>>,
}

impl Unpacked {
    fn read(&mut self, file: File, dir: &Path) -> io::Result<()> {
        let mut tar = tar::Archive::new(BufReader::with_capacity(BUFFER_BYTES, file));
        for entry in tar.entries()? {
            let entry = entry?;
            let path = entry.path()?.to_str().map(str::to_owned);
            let path = path.ok_or_else(|| damaged("an entry's name is no text"))?;
            if entry.header().entry_type() != tar::EntryType::Regular {
                return Err(damaged(format!("{path:?} is no file")));
            }
            match path.as_str() {
                HEADER => self.header = Some(in_memory(entry)?.0),
                ENTRIES => self.list = Some(in_memory(entry)?),
                ENTRIES_SHA256 => self.list_sha256 = Some(in_memory(entry)?.0),
                _ => {
                    let found = to_disk(entry, &safe(dir, &path)?)?;
                    self.files.insert(path, found);
                }
            }
        }
        Ok(())
    }

    /// The header and the list, if all files are as the list says.
    fn checked(self) -> io::Result<(Header, Vec<Listed>)> {
        let cut_off = || damaged("its last entries are missing");
        let header = self.header.ok_or_else(|| damaged("it is no backup of a controller"))?;
        let (list, sha256) = self.list.ok_or_else(cut_off)?;
        if self.list_sha256.ok_or_else(cut_off)? != sha256.as_bytes() {
            return Err(damaged(format!("the checksum of {ENTRIES} differs")));
        }
        let header: Header = serde_json::from_slice(&header)?;
        if header.format != FORMAT {
            let known = format!("its format is {}, and this program knows {FORMAT}", header.format);
            return Err(damaged(known));
        }
        let listed: Vec<Listed> = serde_json::from_slice(&list)?;
        let mut found = self.files;
        for one in listed.iter().filter(|one| one.kind == Kind::File) {
            match found.remove(&one.path) {
                Some((length, sha256)) if length == one.length && sha256 == one.sha256 => {}
                Some(_) => return Err(damaged(format!("{} differs from its checksum", one.path))),
                None => return Err(damaged(format!("{} is missing", one.path))),
            }
        }
        match found.into_keys().next() {
            Some(path) => Err(damaged(format!("{path} is not in its list"))),
            None => Ok((header, listed)),
        }
    }
}

fn in_memory(entry: impl Read) -> io::Result<(Vec<u8>, String)> {
    let (mut bytes, mut entry) = (Vec::new(), Hashing::new(entry.take(LIST_BYTES_MAX + 1)));
    entry.read_to_end(&mut bytes)?;
    match entry.length > LIST_BYTES_MAX {
        true => Err(damaged("its list is too long")),
        false => Ok((bytes, entry.sha256())),
    }
}

fn to_disk(entry: impl Read, path: &Path) -> io::Result<(u64, String)> {
    if let Some(dir) = path.parent() {
        make_directory(dir)?;
    }
    let mut file = new_file(path)?;
    let mut entry = Hashing::new(entry);
    io::copy(&mut entry, &mut file)?;
    Ok((entry.length, entry.sha256()))
}

fn new_file(path: &Path) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

/// Makes what has no entry of its own, and gives files their attributes.
fn finish(dir: &Path, one: &Listed) -> io::Result<()> {
    let path = safe(dir, &one.path)?;
    match one.kind {
        Kind::Directory => make_directory(&path),
        Kind::File => set_attributes(dir, one),
        Kind::Name => {
            if let Some(dir) = path.parent() {
                make_directory(dir)?;
            }
            // It takes no space: its content is in the S3 store.
            new_file(&path)?.set_len(one.length)?;
            set_attributes(dir, one)
        }
    }
}

fn set_attributes(dir: &Path, one: &Listed) -> io::Result<()> {
    let file = File::open(safe(dir, &one.path)?)?;
    for (name, value) in &one.attributes {
        let value = BASE64_STANDARD.decode(value).map_err(|error| damaged(error.to_string()))?;
        fsetxattr(&file, name.as_str(), &value, XattrFlags::empty())?;
    }
    file.set_modified(UNIX_EPOCH + Duration::from_millis(one.modified_ms))
}
