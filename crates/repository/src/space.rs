//! One tenant's files.
//!
//! The calls block on the disk; the doors make them through [`crate::View`], which moves them off the async threads.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use perigee_http::Clock;
use perigee_model::data::{CutUpload, FileEntry, FileList};
use perigee_model::limits::{PATH_BYTES, PATH_NAMES};
use perigee_model::{Problem, TenantName};
use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, RenameFlags, XattrFlags, fgetxattr, fremovexattr, fsetxattr,
    fstatvfs, fsync, linkat, mkdirat, openat, renameat, renameat_with, unlinkat,
};
use rustix::io::Errno;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use crate::beneath::{open, open_directory};
use crate::errors::{missing, no_room, problem};
use crate::http::headers::Expected;
use crate::listing::{Directory, entry, entry_of, errno, set_modified, unix_ms};
use crate::objects::{OBJECT, ObjectReader, Objects, SENDING};
use crate::path::DataPath;
use crate::properties::{self, Property};
use crate::reader::{FileReader, Source};
use crate::usage::{Below, Usage, Used, count};

/// An upload that was cut can be continued for this long.
pub const UNFINISHED_KEPT: Duration = Duration::from_secs(24 * 3600);

/// The extended attribute of an unfinished upload: which boot of the host it is of, and the file's path.
pub const TARGET: &str = "user.perigee.target";

/// An object is deleted this long after its file: until then, whoever has opened the file says so.
const GARBAGE_KEPT: Duration = Duration::from_secs(5);
/// What the store has refused to delete is tried again after this.
const GARBAGE_AGAIN: Duration = Duration::from_secs(60);
/// After so many failures in a row, the store would fail for the other objects too.
const FAILURES_MAX: usize = 3;

/// How many files are hashed again at the same time, and how many of one tenant.
const HASHING_MAX: usize = 4;
const HASHING_OF_ONE_MAX: usize = 2;

static HASHING: Semaphore = Semaphore::const_new(HASHING_MAX);

/// One of the files that are hashed again, until this is dropped.
#[derive(Debug)]
pub struct HashTurn {
    _of_tenant: Option<OwnedSemaphorePermit>,
    _of_all: Option<SemaphorePermit<'static>>,
}

/// The space that files leave to what else is on the disk, such as the controller's store.
const RESERVE_BYTES: u64 = 256 << 20;

/// An upload that was cut, of which a part is in `parts/`.
#[derive(Debug)]
pub struct Unfinished {
    /// The name of the part.
    pub part: String,
    pub length: u64,
    pub since: SystemTime,
}

/// One tenant's files, its quota, and its unfinished uploads.
#[derive(Debug)]
pub struct Space {
    tenant: TenantName,
    pub(crate) tree: OwnedFd,
    pub(crate) parts: OwnedFd,
    pub(crate) usage: Usage,
    /// Names change one after the other, so that the sizes that are added and taken away are those of the names.
    changes: Mutex<()>,
    /// The tenant was deleted. It changes in the turn of [`Space::changes`].
    is_gone: AtomicBool,
    pub(crate) unfinished: Mutex<HashMap<DataPath, Unfinished>>,
    /// Which boot of this host it is.
    pub(crate) boot_id: String,
    pub(crate) clock: Arc<Clock>,
    /// Where the contents of new files are, if not on the disk.
    pub(crate) objects: Option<Arc<Objects>>,
    /// Who hashes files again that are on the disk: it takes a CPU and the disk for as long as they are large.
    hashing: Arc<Semaphore>,
    /// Parts whose objects are to be deleted, and from when on that is tried.
    garbage: Mutex<Vec<(String, Instant)>>,
}

/// Takes it also after a panic of another thread: what is guarded is whole after each step.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An attribute of a file, if it has it.
pub fn attribute(file: &File, name: &str) -> Option<String> {
    let mut text = [0_u8; 8192];
    let length = fgetxattr(file, name, &mut text[..]).ok()?;
    Some(std::str::from_utf8(text.get(..length)?).ok()?.to_owned())
}

/// What [`OBJECT`] and [`SENDING`] have: a key, and the store's id of an object in pieces after a space.
fn key_and_id(noted: &str) -> (&str, Option<&str>) {
    match noted.split_once(' ') {
        Some((key, id)) => (key, Some(id)),
        None => (noted, None),
    }
}

impl Space {
    /// Opens a tenant's directory, and makes it if it does not exist.
    ///
    /// # Errors
    /// If the directory can't be used.
    pub fn open(
        tenant: TenantName,
        directory: &Path,
        boot_id: &str,
        clock: Arc<Clock>,
    ) -> Result<Self, Problem> {
        let fault =
            |e: Errno| problem(format!("can't use the directory {}", directory.display()), e);
        let opened = |name: &str| {
            let path = directory.join(name);
            perigee_http::private_directory(&path)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            openat(CWD, &path, flags, Mode::empty()).map_err(fault)
        };
        let (tree, parts) = (opened("tree")?, opened("parts")?);
        let Below { bytes, files, .. } = count(tree.as_fd()).map_err(fault)?;
        let usage = Usage::new(tenant.clone(), Used { bytes, files, uploads: 0 });
        let space = Self {
            tenant,
            tree,
            parts,
            usage,
            changes: Mutex::default(),
            is_gone: AtomicBool::new(false),
            unfinished: Mutex::default(),
            boot_id: boot_id.to_owned(),
            clock,
            objects: None,
            hashing: Arc::new(Semaphore::new(HASHING_OF_ONE_MAX)),
            garbage: Mutex::default(),
        };
        space.find_unfinished().map_err(fault)?;
        Ok(space)
    }

    /// Keeps the contents of new files in a store.
    pub fn kept_in(mut self, objects: Option<Arc<Objects>>) -> Self {
        self.objects = objects;
        self
    }

    /// The turn to hash a file that is on the disk. The others wait.
    pub(crate) async fn hash_turn(self: Arc<Self>) -> HashTurn {
        // They are never closed.
        let of_tenant = Arc::clone(&self.hashing).acquire_owned().await.ok();
        HashTurn { _of_tenant: of_tenant, _of_all: HASHING.acquire().await.ok() }
    }

    /// Uploads that a kill of the server has cut can be continued. After a reboot nobody knows which of their bytes
    /// reached the disk, so they are removed.
    fn find_unfinished(&self) -> Result<(), Errno> {
        self.each_part(|name, is_garbage| {
            if is_garbage {
                self.add_garbage(name.to_owned());
                return Ok(());
            }
            match self.target_of(name) {
                Some((path, length)) if self.usage.take_upload().is_ok() => {
                    self.usage.take_anyway(length);
                    self.keep_unfinished(path, name.to_owned(), length);
                    Ok(())
                }
                _ => unlinkat(&self.parts, name, AtFlags::empty()),
            }
        })
    }

    /// Calls `each` with the name of each part, and whether it only names an object that is to be deleted.
    fn each_part(
        &self,
        mut each: impl FnMut(&str, bool) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut parts = Dir::read_from(&self.parts)?;
        while let Some(part) = parts.read() {
            let part = part?;
            let Ok(name) = part.file_name().to_str() else { continue };
            if !matches!(name, "." | "..") {
                each(name, self.is_garbage(name)?)?;
            }
        }
        Ok(())
    }

    fn target_of(&self, part: &str) -> Option<(DataPath, u64)> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(openat(&self.parts, part, flags, Mode::empty()).ok()?);
        let mut text = vec![0_u8; 8192];
        let length = fgetxattr(&file, TARGET, &mut text[..]).ok()?;
        let (boot_id, path) = std::str::from_utf8(text.get(..length)?).ok()?.split_once('\n')?;
        let metadata = file.metadata().ok()?;
        let is_new = self.clock.age(metadata.modified().ok()?) < UNFINISHED_KEPT;
        (boot_id == self.boot_id && is_new).then_some(())?;
        Some((DataPath::parse(path).ok()?, metadata.len()))
    }

    fn open_part(&self, part: &str) -> Result<File, Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        openat(&self.parts, part, flags, Mode::empty()).map(File::from)
    }

    /// Whether a part has an object. If it is the beginning of one, the part itself may still be continued.
    fn is_garbage(&self, part: &str) -> Result<bool, Errno> {
        let file = self.open_part(part)?;
        if attribute(&file, OBJECT).is_some() {
            return Ok(true);
        }
        if let Some(sending) = attribute(&file, SENDING) {
            self.discard_object(&sending)?;
            fremovexattr(&file, SENDING)?;
        }
        Ok(false)
    }

    /// Notes that an object is garbage which has no part of its own: its key, and the store's id of it.
    pub(crate) fn discard_object(&self, sending: &str) -> Result<(), Errno> {
        let name = uuid::Uuid::new_v4().to_string();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&self.parts, &name, flags, Mode::RUSR | Mode::WUSR)?;
        fsetxattr(&file, OBJECT, sending.as_bytes(), XattrFlags::empty())?;
        fsync(&file)?;
        fsync(&self.parts)?;
        self.add_garbage(name);
        Ok(())
    }

    /// A part whose object is to be deleted, unless the part has a name in the tree too.
    pub(crate) fn add_garbage(&self, part: String) {
        self.add_garbage_for(part, GARBAGE_KEPT);
    }

    fn add_garbage_for(&self, part: String, after: Duration) {
        lock(&self.garbage).push((part, Instant::now() + after));
    }

    /// Before a name in the tree goes away: if the file's content is an object, the file gets a second name in `parts/`, so
    /// that the object can be deleted afterwards.
    fn retire(&self, above: &OwnedFd, name: &str) -> Result<Option<String>, Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(openat(above, name, flags, Mode::empty())?);
        if attribute(&file, OBJECT).is_none() {
            return Ok(None);
        }
        let part = uuid::Uuid::new_v4().to_string();
        linkat(above, name, &self.parts, &part, AtFlags::empty())?;
        Ok(Some(part))
    }

    /// Deletes objects that no file of the tree has. What fails is tried again later, and holds up no other.
    pub(crate) async fn delete_garbage(self: &Arc<Self>) {
        let Some(objects) = &self.objects else { return };
        let now = Instant::now();
        let garbage: Vec<_> = lock(&self.garbage).extract_if(.., |(_, at)| *at <= now).collect();
        let mut left = garbage.into_iter().map(|(part, _)| part);
        let (mut in_a_row, mut failed) = (0, None);
        while in_a_row < FAILURES_MAX
            && let Some(part) = left.next()
        {
            match self.delete_object(objects, &part).await {
                Ok(true) => in_a_row = 0,
                Ok(false) => self.add_garbage(part),
                Err(problem) => {
                    (in_a_row, failed) = (in_a_row + 1, Some(problem));
                    self.add_garbage_for(part, GARBAGE_AGAIN);
                }
            }
        }
        if let Some(problem) = failed {
            tracing::warn!(tenant = %self.tenant, %problem, "objects are deleted later");
        }
        left.for_each(|part| self.add_garbage(part));
    }

    /// Whether it was deleted: a file that is being read stays.
    async fn delete_object(
        self: &Arc<Self>,
        objects: &Objects,
        part: &str,
    ) -> Result<bool, Problem> {
        let off_thread = async |act: fn(&Self, &str) -> Result<Option<String>, Errno>| {
            let (space, part) = (Arc::clone(self), part.to_owned());
            let what = "can't delete an object";
            let done = tokio::task::spawn_blocking(move || act(&space, &part)).await;
            done.map_err(|e| Problem::internal(what, e))?.map_err(|e| problem(what, e))
        };
        if let Some(noted) = off_thread(Self::object_of_garbage).await? {
            let (key, id) = key_and_id(&noted);
            if objects.is_in_use(key) {
                return Ok(false);
            }
            objects.delete(key, id).await?;
        }
        off_thread(|space, part| match unlinkat(&space.parts, part, AtFlags::empty()) {
            // It was found twice.
            Ok(()) | Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        })
        .await?;
        Ok(true)
    }

    /// The object that a part names, unless a file of the tree has it too.
    fn object_of_garbage(&self, part: &str) -> Result<Option<String>, Errno> {
        let file = match self.open_part(part) {
            Err(Errno::NOENT) => return Ok(None),
            file => file?,
        };
        let has_name = file.metadata().map_err(errno)?.nlink() > 1;
        Ok(attribute(&file, OBJECT).filter(|_| !has_name))
    }

    /// Remembers what there is of an upload, instead of what there was of an earlier one.
    pub(crate) fn keep_unfinished(&self, path: DataPath, part: String, length: u64) {
        let new = Unfinished { part, length, since: SystemTime::now() };
        let old = lock(&self.unfinished).insert(path, new);
        old.into_iter().for_each(|old| self.drop_unfinished(&old));
    }

    /// Takes what there is of an upload, to continue or to drop it.
    pub(crate) fn take_unfinished(&self, path: &DataPath) -> Option<Unfinished> {
        lock(&self.unfinished).remove(path)
    }

    pub(crate) fn drop_unfinished(&self, unfinished: &Unfinished) {
        let removed = unlinkat(&self.parts, &unfinished.part, AtFlags::empty());
        if let Err(error) = removed {
            tracing::warn!(tenant = %self.tenant, %error, "can't remove an unfinished upload");
        }
        self.usage.give(unfinished.length, 1);
        self.usage.give_upload();
    }

    /// Drops uploads that were cut long ago.
    pub(crate) fn drop_old_unfinished(&self) {
        let is_old = |since: SystemTime| self.clock.age(since) > UNFINISHED_KEPT;
        self.drop_unfinished_if(|_, unfinished| is_old(unfinished.since));
    }

    /// Drops what there is of uploads to a path and below it that were cut. Whether there were any.
    pub(crate) fn drop_unfinished_within(&self, path: &DataPath) -> bool {
        self.drop_unfinished_if(|of, _| of.is_within(path))
    }

    fn drop_unfinished_if(&self, is_meant: impl Fn(&DataPath, &Unfinished) -> bool) -> bool {
        let meant: Vec<_> =
            lock(&self.unfinished).extract_if(|path, one| is_meant(path, one)).collect();
        meant.iter().for_each(|(_, unfinished)| self.drop_unfinished(unfinished));
        !meant.is_empty()
    }

    /// The uploads to a path and below it that were cut.
    pub(crate) fn unfinished_within(&self, path: &DataPath) -> Vec<CutUpload> {
        let all = lock(&self.unfinished);
        let within = all.iter().filter(|(of, _)| of.is_within(path));
        let shown = within.map(|(of, unfinished)| CutUpload {
            path: of.to_string(),
            size_bytes: unfinished.length,
            kept_until_ms: unix_ms(unfinished.since + UNFINISHED_KEPT),
        });
        shown.collect()
    }

    /// The turn to change names.
    ///
    /// # Errors
    /// `NotFound` if the tenant was deleted.
    fn turn(&self, what: &str) -> Result<MutexGuard<'_, ()>, Problem> {
        let turn = lock(&self.changes);
        if self.is_gone.load(Ordering::Relaxed) { Err(missing(what)) } else { Ok(turn) }
    }

    /// Until this is dropped, all changes wait.
    #[cfg(test)]
    pub fn hold(&self) -> MutexGuard<'_, ()> {
        lock(&self.changes)
    }

    /// From now on nothing gets a name here: the tenant is deleted.
    ///
    /// # Errors
    /// `Conflict` if anything has one.
    pub(crate) fn close(&self) -> Result<(), Problem> {
        let _turn = lock(&self.changes);
        if !self.list(&DataPath::default(), None, 1)?.entries.is_empty() {
            let what = format!("can't delete the files of tenant {}", self.tenant);
            return Err(Problem::conflict(what, format!("it has files: repo://{}/", self.tenant))
                .next("delete what it has first"));
        }
        self.is_gone.store(true, Ordering::Relaxed);
        lock(&self.unfinished).clear();
        Ok(())
    }

    /// Removes what is in `parts/`, but for what names an object that is still to be deleted. Whether nothing is left.
    pub(crate) fn drop_parts(&self) -> Result<bool, Errno> {
        let mut is_empty = true;
        self.each_part(|name, is_garbage| {
            is_empty &= !is_garbage;
            if is_garbage { Ok(()) } else { unlinkat(&self.parts, name, AtFlags::empty()) }
        })?;
        // The beginning of an object becomes a part of its own meanwhile.
        Ok(is_empty && lock(&self.garbage).is_empty())
    }

    /// How much there is of an upload of this file that was cut.
    pub fn unfinished_bytes(&self, path: &DataPath) -> Option<u64> {
        lock(&self.unfinished).get(path).map(|unfinished| unfinished.length)
    }

    /// Where a client goes on that knows no more of a cut upload than the size of a file: one byte before its end. A client
    /// that found the whole size would take the upload for done, and send nothing.
    pub fn resumes_at(&self, path: &DataPath) -> Option<u64> {
        self.unfinished_bytes(path).filter(|length| *length > 1).map(|length| length - 1)
    }

    /// Whose files these are.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// `can't read repo://TENANT/PATH`.
    pub(crate) fn what(&self, verb: &str, path: &DataPath) -> String {
        format!("can't {verb} repo://{}/{path}", self.tenant)
    }

    /// # Errors
    /// `NoSpace` if the disk has less room than is left to others.
    pub(crate) fn check_room(&self, path: &DataPath) -> Result<(), Problem> {
        let what = || self.what("write", path);
        let disk = fstatvfs(&self.parts).map_err(|e| problem(what(), e))?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) >= RESERVE_BYTES {
            return Ok(());
        }
        let why = format!(
            "the disk of the repository has less than {} MiB free, which are kept for the cluster itself",
            RESERVE_BYTES >> 20
        );
        Err(no_room(what(), why))
    }

    /// What a path names.
    ///
    /// # Errors
    /// `NotFound` if it names nothing.
    pub fn entry(&self, path: &DataPath) -> Result<FileEntry, Problem> {
        self.open_entry(path, "find").map(|(_, entry)| entry)
    }

    fn open_entry(&self, path: &DataPath, verb: &str) -> Result<(File, FileEntry), Problem> {
        let fault = |e| problem(self.what(verb, path), e);
        let file = File::from(open(self.tree.as_fd(), path, OFlags::RDONLY).map_err(fault)?);
        let name = path.names().last().map_or("", String::as_str);
        let found = entry_of(&file, name).map_err(fault)?;
        Ok((file, found.ok_or_else(|| missing(self.what(verb, path)))?))
    }

    /// Says when a file or a directory was last changed.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn set_modified(&self, path: &DataPath, modified_ms: u64) -> Result<(), Problem> {
        let verb = "set the time of";
        let (file, _) = self.open_entry(path, verb)?;
        set_modified(&file, modified_ms).map_err(|e| problem(self.what(verb, path), e))
    }

    /// What clients have noted about a file or a directory.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn properties(&self, path: &DataPath) -> Result<Vec<Property>, Problem> {
        self.open_entry(path, "find").map(|(file, _)| properties::read(&file))
    }

    /// Changes what is noted about a file or a directory.
    ///
    /// # Errors
    /// `NotFound` if there is none, `NoSpace` if it is too much.
    pub fn change_properties(
        &self,
        path: &DataPath,
        change: impl FnOnce(&mut Vec<Property>),
    ) -> Result<(), Problem> {
        let what = self.what("note anything about", path);
        let _turn = self.turn(&what)?;
        let (file, _) = self.open_entry(path, "note anything about")?;
        let mut noted = properties::read(&file);
        change(&mut noted);
        let packed = properties::packed(&noted, &what)?;
        let noted = properties::write(&file, &packed).and_then(|()| fsync(&file));
        noted.map_err(|e| problem(what, e))
    }

    /// What is noted about a file that a part replaces stays.
    fn carry_over(&self, above: &OwnedFd, name: &str, part: &str) -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let old = File::from(openat(above, name, flags, Mode::empty())?);
        properties::carry_over(&old, &self.open_part(part)?)
    }

    /// Opens a file to read it.
    ///
    /// # Errors
    /// `NotFound` if there is no file, `Conflict` if it is a directory.
    pub fn read(&self, path: &DataPath) -> Result<FileReader, Problem> {
        let (file, entry) = self.open_entry(path, "read")?;
        if entry.is_directory() {
            return Err(problem(self.what("read", path), Errno::ISDIR));
        }
        let what = self.what("read", path);
        let key = (entry.size_bytes > 0).then(|| attribute(&file, OBJECT)).flatten();
        let source = match (key, &self.objects) {
            (None, _) => Source::Local(file),
            (Some(key), Some(objects)) => {
                Source::Object(ObjectReader::new(objects, key_and_id(&key).0, what.clone()))
            }
            (Some(_), None) => {
                let why =
                    "its content is in an S3 store, and the controller was started without one";
                return Err(Problem::unavailable(what, why).next("start it with --data"));
            }
        };
        Ok(FileReader::new(source, entry, what))
    }

    /// Opens a directory to list it.
    ///
    /// # Errors
    /// `NotFound` if it does not exist, `Conflict` if it is a file.
    pub fn directory(&self, path: &DataPath) -> Result<Directory, Problem> {
        let opened = open_directory(self.tree.as_fd(), path).and_then(Directory::new);
        opened.map_err(|e| problem(self.what("list", path), e))
    }

    /// A sorted page of a directory.
    ///
    /// # Errors
    /// As [`Space::directory`].
    pub fn list(
        &self,
        path: &DataPath,
        after: Option<&str>,
        max: usize,
    ) -> Result<FileList, Problem> {
        let page = self.directory(path)?.page(after, max);
        page.map_err(|e| problem(self.what("list", path), e))
    }

    /// The directory above, opened, and the name in it.
    fn above<'a>(&self, path: &'a DataPath, what: &str) -> Result<(OwnedFd, &'a str), Problem> {
        let split = path.split();
        let (above, name) = split.ok_or_else(|| {
            Problem::conflict(what, "this is the tenant's own directory, which always exists")
        })?;
        let opened = open_directory(self.tree.as_fd(), &above).map_err(|e| problem(what, e))?;
        Ok((opened, name))
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// `Conflict` if the name is taken, `NotFound` if the directory above does not exist.
    pub fn make_directory(&self, path: &DataPath) -> Result<(), Problem> {
        let what = self.what("make the directory", path);
        let turn = self.turn(&what)?;
        let (above, name) = self.above(path, &what)?;
        self.usage.take(0, 1)?;
        let made = mkdirat(&above, name, Mode::RWXU);
        if let Err(error) = made {
            self.usage.give(0, 1);
            return Err(problem(what, error));
        }
        drop(turn);
        fsync(&above).map_err(|e| problem(what, e))
    }

    /// Makes the directories above a path that do not exist.
    ///
    /// # Errors
    /// As [`Space::make_directory`], if one of them is a file.
    pub fn make_directories_above(&self, path: &DataPath) -> Result<(), Problem> {
        let Some((above, _)) = path.split() else { return Ok(()) };
        if open_directory(self.tree.as_fd(), &above).is_ok() {
            return Ok(());
        }
        self.make_directories_above(&above)?;
        match self.make_directory(&above) {
            // Another upload has made it.
            Err(_) if open_directory(self.tree.as_fd(), &above).is_ok() => Ok(()),
            made => made,
        }
    }

    /// Deletes a file.
    ///
    /// # Errors
    /// `NotFound` if it does not exist, `Conflict` if it is a directory.
    pub fn remove_file(&self, path: &DataPath) -> Result<(), Problem> {
        let what = self.what("delete", path);
        let fault = |e| problem(&what, e);
        let turn = self.turn(&what)?;
        let (above, name) = self.above(path, &what)?;
        let found = entry(above.as_fd(), name).map_err(fault)?;
        let found = found.ok_or_else(|| missing(&what))?;
        if found.is_directory() {
            return Err(fault(Errno::ISDIR));
        }
        let retired = self.retire(&above, name).map_err(fault)?;
        unlinkat(&above, name, AtFlags::empty()).map_err(fault)?;
        self.usage.give(found.size_bytes, 1);
        drop(turn);
        fsync(&above).map_err(fault)?;
        self.add_retired(retired);
        Ok(())
    }

    fn add_retired(&self, retired: Option<String>) {
        retired.into_iter().for_each(|part| self.add_garbage(part));
    }

    /// Deletes an empty directory.
    ///
    /// # Errors
    /// `Conflict` if it is not empty or is a file.
    pub fn remove_directory(&self, path: &DataPath) -> Result<(), Problem> {
        let what = self.what("delete the directory", path);
        let fault = |e| problem(&what, e);
        let turn = self.turn(&what)?;
        let (above, name) = self.above(path, &what)?;
        unlinkat(&above, name, AtFlags::REMOVEDIR).map_err(fault)?;
        self.usage.give(0, 1);
        drop(turn);
        fsync(&above).map_err(fault)
    }

    /// Gives a file or a directory another name. With `replace`, a file takes the place of another file.
    ///
    /// # Errors
    /// `Conflict` if the new name is taken.
    pub fn rename(&self, from: &DataPath, to: &DataPath, replace: bool) -> Result<(), Problem> {
        let what = format!("{} to {to}", self.what("rename", from));
        let fault = |e| problem(&what, e);
        let turn = self.turn(&what)?;
        let ((old_above, old), (new_above, new)) =
            (self.above(from, &what)?, self.above(to, &what)?);
        let moved = entry(old_above.as_fd(), old).map_err(fault)?;
        let moved = moved.ok_or_else(|| missing(&what))?;
        if from == to {
            return Ok(());
        }
        let replaced = entry(new_above.as_fd(), new).map_err(fault)?;
        let mut retired = None;
        match replaced {
            Some(file) if replace && !moved.is_directory() && !file.is_directory() => {
                retired = self.retire(&new_above, new).map_err(fault)?;
                renameat(&old_above, old, &new_above, new).map_err(fault)?;
                self.usage.give(file.size_bytes, 1);
            }
            Some(_) => return Err(fault(Errno::EXIST)),
            None => {
                if moved.is_directory() {
                    self.check_depth(from, to, &what)?;
                }
                renameat_with(&old_above, old, &new_above, new, RenameFlags::NOREPLACE)
                    .map_err(fault)?;
            }
        }
        drop(turn);
        fsync(&new_above).and_then(|()| fsync(&old_above)).map_err(fault)?;
        self.add_retired(retired);
        Ok(())
    }

    /// What is below a directory must still have paths of an allowed length afterwards.
    fn check_depth(&self, from: &DataPath, to: &DataPath, what: &str) -> Result<(), Problem> {
        if to.names().len() <= from.names().len() && to.length_bytes() <= from.length_bytes() {
            return Ok(());
        }
        let opened = open_directory(self.tree.as_fd(), from);
        let below = opened.and_then(|fd| count(fd.as_fd())).map_err(|e| problem(what, e))?;
        PATH_NAMES.check(to.names().len() + below.names).map_err(|e| e.problem(what))?;
        let longest = to.length_bytes() + 1 + below.path_bytes;
        PATH_BYTES.check(longest).map_err(|e| e.problem(what)).map(drop)
    }

    /// Gives a part that is complete and on the disk its name in the tree.
    pub(crate) fn publish(
        &self,
        part: &str,
        path: &DataPath,
        expected: Option<&Expected>,
    ) -> Result<(), Problem> {
        let what = self.what("write", path);
        let fault = |e| problem(&what, e);
        let turn = self.turn(&what)?;
        let (above, name) = self.above(path, &what)?;
        let replaced = entry(above.as_fd(), name).map_err(fault)?;
        if replaced.as_ref().is_some_and(FileEntry::is_directory) {
            return Err(fault(Errno::ISDIR));
        }
        if expected.is_some_and(|expected| !expected.holds(replaced.as_ref())) {
            return Err(Expected::failed(&what));
        }
        let retired = match replaced {
            Some(_) => {
                self.carry_over(&above, name, part).map_err(fault)?;
                self.retire(&above, name).map_err(fault)?
            }
            None => None,
        };
        renameat(&self.parts, part, &above, name).map_err(fault)?;
        if let Some(file) = replaced {
            self.usage.give(file.size_bytes, 1);
        }
        drop(turn);
        fsync(&above).map_err(fault)?;
        self.add_retired(retired);
        Ok(())
    }
}
