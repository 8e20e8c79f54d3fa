//! Writing a file: whole or not there.
//!
//! 1. The bytes go into a part, a file in `parts/`, and are hashed while they arrive.
//! 2. The hash becomes an extended attribute of the part, and the part is synced: content and hash are on the disk. Of a
//!    large file, most was written to the disk while it arrived.
//! 3. The part is renamed to its name in the tree.
//! 4. The directory is synced, and only then the client has its answer.
//!
//! After a crash before 3 the name has what it had before, and after it the new content with its hash. A part without a
//! name is removed when the repository is opened. If its bytes came in order it is kept instead, for a day and until
//! the host boots again: the upload can be continued where it was cut.
//!
//! Threads that may block wait for the disk only. What waits for an S3 store is a task.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use perigee_model::Problem;
use perigee_model::data::FileEntry;
use perigee_model::limits::OBJECT_BYTES;
use perigee_model::units::format_bytes;
use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, XattrFlags, fallocate, fremovexattr, fsetxattr, fsync,
    ftruncate, openat, unlinkat,
};
use rustix::io::Errno;
use tokio::runtime::Handle;

use crate::errors::{missing, problem};
use crate::http::headers::Expected;
use crate::listing::{entry_of, errno, set_modified};
use crate::objects::{OBJECT, PIECE_BYTES as SENT_BYTES, SENDING, Sending, Target};
use crate::path::DataPath;
use crate::properties::{self, Property};
use crate::space::{Space, TARGET, attribute, lock};
use crate::sums::{Summer, Sums};

/// How much is read at once to hash it.
const PIECE_BYTES: usize = 1 << 20;

/// The disk's free space is checked each time a file has grown by this much.
const LOOK_EVERY_BYTES: u64 = 16 << 20;

/// So much of a file may be left out, to be written later: a client that sends pieces out of order has not more under way.
/// What is never written costs its sender nothing, and whoever hashes it much.
const GAPS_BYTES_MAX: u64 = 64 << 20;

/// An upload to a longer path can't be continued: ext4 has one block for all attributes of a file.
const TARGET_BYTES_MAX: usize = 1024;

/// Each time a file has grown by this much, the disk begins to write it: the client does not wait for all of it at the end.
const FLUSH_EVERY_BYTES: u64 = 32 << 20;

/// What is written to the disk while more of a file arrives.
#[derive(Debug, Default)]
struct Flushing {
    is_under_way: AtomicBool,
    /// Held while the disk writes.
    state: Mutex<Flushed>,
}

#[derive(Debug, Default)]
struct Flushed {
    /// The disk has failed. The kernel says that only once.
    has_failed: bool,
    /// The end of the upload writes the rest.
    is_over: bool,
}

/// A file that has no name in the tree yet, and the room that it takes of the quota.
#[derive(Debug)]
pub struct Part {
    space: Arc<Space>,
    path: DataPath,
    /// Tasks that send it to the store share it.
    pub file: Arc<File>,
    flushing: Arc<Flushing>,
    name: String,
    reserved_bytes: u64,
    /// When the client says that the file was last changed. Otherwise that is now.
    modified_ms: Option<u64>,
    /// What is to have its name until it gets it.
    expected: Option<Expected>,
    /// What of it was sent to the store.
    sending: Option<Sending>,
    /// It has a name in the tree, or is kept as an unfinished upload.
    is_settled: bool,
}

impl Part {
    /// Takes room in the quota for one more upload, and deletes those that nobody has continued for too long.
    ///
    /// # Errors
    /// `Conflict` for the root; `NoSpace` if disk or quota are full.
    pub fn new(space: &Arc<Space>, path: &DataPath) -> Result<Self, Problem> {
        if path.is_root() {
            return Err(Problem::conflict(space.what("write", path), "it is a directory"));
        }
        space.drop_old_unfinished();
        space.check_room(path)?;
        space.usage.take_upload()?;
        let name = uuid::Uuid::new_v4().to_string();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = space.usage.take(0, 1).and_then(|()| {
            let made = openat(&space.parts, &name, flags, Mode::RUSR | Mode::WUSR);
            made.map_err(|e| {
                space.usage.give(0, 1);
                problem(space.what("write", path), e)
            })
        });
        match made {
            Ok(fd) => Ok(Self {
                space: Arc::clone(space),
                path: path.clone(),
                file: Arc::new(fd.into()),
                flushing: Arc::default(),
                name,
                reserved_bytes: 0,
                modified_ms: None,
                expected: None,
                sending: None,
                is_settled: false,
            }),
            Err(problem) => {
                space.usage.give_upload();
                Err(problem)
            }
        }
    }

    /// What there is of an upload that was cut. The part of a write that failed may have more: that is cut off.
    fn continued(space: &Arc<Space>, path: &DataPath) -> Result<Option<(Self, u64)>, Problem> {
        let Some(unfinished) = space.take_unfinished(path) else { return Ok(None) };
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&space.parts, &unfinished.part, flags, Mode::empty());
        let cut = opened.and_then(|fd| {
            let file = File::from(fd);
            // The disk has failed while it was written.
            attribute(&file, TARGET).ok_or(Errno::IO)?;
            ftruncate(&file, unfinished.length)?;
            Ok(file)
        });
        match cut {
            Ok(file) => {
                let part = Self {
                    space: Arc::clone(space),
                    path: path.clone(),
                    file: Arc::new(file),
                    flushing: Arc::default(),
                    name: unfinished.part,
                    reserved_bytes: unfinished.length,
                    modified_ms: None,
                    expected: None,
                    sending: None,
                    is_settled: false,
                };
                Ok(Some((part, unfinished.length)))
            }
            Err(error) => {
                space.drop_unfinished(&unfinished);
                Err(problem(space.what("continue the upload of", path), error))
            }
        }
    }

    /// Takes room until the file may have this length.
    pub fn reserve(&mut self, length: u64) -> Result<(), Problem> {
        let more = length.saturating_sub(self.reserved_bytes);
        if more > 0 {
            if self.space.objects.is_some() {
                let what = || self.space.what("write", &self.path);
                OBJECT_BYTES.check(length).map_err(|e| e.problem(what()))?;
            }
            self.space.usage.take(more, 0)?;
            self.reserved_bytes = length;
        }
        Ok(())
    }

    /// Writes anywhere in the file; holes read as zeros.
    ///
    /// # Errors
    /// `NoSpace` when the disk has no more room than other parts of the host need.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(|e| problem(self.space.what("write", &self.path), errno(e)))?;
        let end = offset + bytes.len() as u64;
        if offset / LOOK_EVERY_BYTES != end / LOOK_EVERY_BYTES {
            self.space.check_room(&self.path)?;
        }
        if offset / FLUSH_EVERY_BYTES != end / FLUSH_EVERY_BYTES && !self.is_remote() {
            self.flush();
        }
        Ok(())
    }

    /// Begins to write to the disk what has arrived, unless that is under way.
    fn flush(&self) {
        // What runs without a runtime waits at the end.
        let Ok(runtime) = Handle::try_current() else { return };
        if self.flushing.is_under_way.swap(true, Ordering::AcqRel) {
            return;
        }
        let (file, flushing) = (Arc::clone(&self.file), Arc::clone(&self.flushing));
        runtime.spawn_blocking(move || {
            {
                let mut state = lock(&flushing.state);
                if !state.is_over && file.sync_data().is_err() {
                    state.has_failed = true;
                    // Nobody can continue it.
                    let _ = fremovexattr(&file, TARGET);
                }
            }
            flushing.is_under_way.store(false, Ordering::Release);
        });
    }

    /// Sums up what the file has between two offsets.
    pub fn sum(&self, summer: &mut Summer, from: u64, until: u64) -> Result<(), Problem> {
        let mut piece = vec![0; PIECE_BYTES];
        let mut at = from;
        while at < until {
            let length = usize::try_from(until - at).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            let read = self.file.read_exact_at(&mut piece[..length], at);
            read.map_err(|e| problem(self.space.what("read again", &self.path), errno(e)))?;
            summer.update(&piece[..length]);
            at += length as u64;
        }
        Ok(())
    }

    /// # Errors
    /// `Invalid` if the client expects another hash.
    pub fn check(&self, sha256: &str, expected: Option<&str>) -> Result<(), Problem> {
        match expected.filter(|expected| *expected != sha256) {
            None => Ok(()),
            Some(expected) => {
                let what = self.space.what("write", &self.path);
                let why = format!("what arrived has the SHA-256 {sha256}, and not {expected}");
                Err(Problem::invalid(what, why).next("send the file again"))
            }
        }
    }

    /// Whether its content is to be in a store, and not on the disk.
    pub fn is_remote(&self) -> bool {
        self.space.objects.is_some()
    }

    /// Puts content and sums on the disk, and gives the file its name. If the content is in the store, as the object
    /// `key`, the part keeps only its length.
    ///
    /// # Errors
    /// If the name can't be had, or the disk fails. The file does not get its name then.
    pub fn publish(mut self, sums: &Sums, key: Option<&str>) -> Result<FileEntry, Problem> {
        let what = self.space.what("write", &self.path);
        let fault = |e| problem(&what, e);
        sums.keep(&self.file).map_err(fault)?;
        if let Some(key) = key {
            self.move_content(key)?;
        }
        {
            let mut flushed = lock(&self.flushing.state);
            flushed.is_over = true;
            if flushed.has_failed {
                return Err(fault(Errno::IO));
            }
        }
        // The last change of the part itself: until here its time says how old an unfinished upload is.
        if let Some(modified_ms) = self.modified_ms {
            set_modified(&self.file, modified_ms).map_err(fault)?;
        }
        self.file.sync_all().map_err(|e| fault(errno(e)))?;
        self.space.publish(&self.name, &self.path, self.expected.as_ref())?;
        self.is_settled = true;
        // The part may have reserved more than the file has in the end.
        let name = self.path.names().last().map_or("", String::as_str);
        let entry = entry_of(&self.file, name).map_err(fault)?.ok_or_else(|| missing(&what))?;
        self.space.usage.give(self.reserved_bytes.saturating_sub(entry.size_bytes), 0);
        self.space.usage.give_upload();
        // It is no unfinished upload any more. If this fails, the attribute says nothing that anyone asks for.
        let _ = fremovexattr(&self.file, TARGET);
        self.sending = None;
        if self.is_remote() {
            let _ = fremovexattr(&self.file, SENDING);
        }
        Ok(entry)
    }

    /// From here on the store has the content.
    fn move_content(&self, key: &str) -> Result<(), Problem> {
        let fault = |e| problem(self.space.what("write", &self.path), e);
        let length = self.file.metadata().map_err(|e| fault(errno(e)))?.len();
        fsetxattr(&self.file, OBJECT, key.as_bytes(), XattrFlags::empty()).map_err(fault)?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // To the end of the last block, of whatever size the disk's blocks are.
        let until = length.next_multiple_of(SENT_BYTES);
        fallocate(&self.file, hole, 0, until).map_err(fault)
    }

    /// If contents are kept in a store: sends what has arrived in order up to `until`, in whole pieces.
    ///
    /// # Errors
    /// If the store fails. What was sent is dropped.
    async fn send_until(&mut self, until: u64) -> Result<(), Problem> {
        let sent = self.send_pieces(until, SENT_BYTES).await;
        if sent.is_err() {
            self.stop_sending();
        }
        sent
    }

    /// Sends what the store does not have yet. Returns the key of the object; `None` if contents are kept on the disk, or
    /// if there is none. The object is whole when this returns.
    ///
    /// # Errors
    /// If the store fails. What was sent is dropped, and this can be tried again.
    pub async fn send_all(&mut self, sha256: &str) -> Result<Option<String>, Problem> {
        let sent = self.try_send_all(sha256).await;
        if sent.is_err() {
            self.stop_sending();
        }
        sent
    }

    async fn try_send_all(&mut self, sha256: &str) -> Result<Option<String>, Problem> {
        let Some(objects) = self.space.objects.clone() else { return Ok(None) };
        let file = Arc::clone(&self.file);
        let length = self.off_thread("read again", move || Ok(file.metadata()?.len())).await?;
        if length == 0 {
            return Ok(None);
        }
        if self.sending.is_none() && length <= SENT_BYTES {
            let target = self.target().await?;
            let place = objects.place(&target.what).await?;
            let bytes = self.read(0, length).await?;
            objects.put(&target, place, bytes, sha256).await?;
            return Ok(Some(target.key));
        }
        self.send_pieces(length, 1).await?;
        let Some(sending) = &mut self.sending else { return Ok(None) };
        sending.complete().await?;
        Ok(Some(sending.key().to_owned()))
    }

    async fn send_pieces(&mut self, until: u64, least: u64) -> Result<(), Problem> {
        let Some(objects) = self.space.objects.clone() else { return Ok(()) };
        loop {
            let at = self.sending.as_ref().map_or(0, Sending::sent);
            let length = until.saturating_sub(at).min(SENT_BYTES);
            if length < least {
                return Ok(());
            }
            if self.sending.is_none() {
                let target = self.target().await?;
                // Its id is noted, too, so that what the store has of it can be dropped.
                let sending = Sending::begin(&objects, target).await?;
                let noted = self.note(format!("{} {}", sending.key(), sending.id())).await;
                self.sending = Some(sending);
                noted?;
            }
            // A piece is in memory only when it has a place.
            let place = match &mut self.sending {
                Some(sending) => sending.place().await?,
                None => return Ok(()),
            };
            let piece = self.read(at, length).await?;
            if let Some(sending) = &mut self.sending {
                sending.send(place, piece);
            }
        }
    }

    /// The key of a new object, which is noted before anything is sent.
    async fn target(&self) -> Result<Target, Problem> {
        let key = format!("{}/{}", self.space.tenant(), uuid::Uuid::new_v4());
        self.note(key.clone()).await?;
        let what = self.space.what("write", &self.path);
        Ok(Target { key, path: self.path.to_string(), what })
    }

    /// Moves work with the disk off the async threads.
    async fn off_thread<T: Send + 'static>(
        &self,
        verb: &str,
        act: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> Result<T, Problem> {
        let done = tokio::task::spawn_blocking(act).await;
        let what = || self.space.what(verb, &self.path);
        done.map_err(|e| Problem::internal(what(), e))?.map_err(|e| problem(what(), errno(e)))
    }

    async fn note(&self, sending: String) -> Result<(), Problem> {
        let (file, space) = (Arc::clone(&self.file), Arc::clone(&self.space));
        self.off_thread("write", move || {
            fsetxattr(&file, SENDING, sending.as_bytes(), XattrFlags::empty())?;
            fsync(&file)?;
            Ok(fsync(&space.parts)?)
        })
        .await
    }

    async fn read(&self, at: u64, length: u64) -> Result<Vec<u8>, Problem> {
        let file = Arc::clone(&self.file);
        self.off_thread("read again", move || {
            let mut piece = vec![0; usize::try_from(length).unwrap_or(0)];
            file.read_exact_at(&mut piece, at)?;
            Ok(piece)
        })
        .await
    }

    /// What was sent is not what the file has, or not needed.
    pub fn stop_sending(&mut self) {
        self.sending = None;
        let Some(noted) = attribute(&self.file, SENDING) else { return };
        let discarded = self.space.discard_object(&noted);
        // If this fails, it is found at the next start.
        if let Err(error) = discarded.and_then(|()| fremovexattr(&self.file, SENDING)) {
            tracing::warn!(%error, "can't note that an object is to be deleted");
        }
    }

    /// Remembers for whoever continues the upload, also after a kill of the server, which file this is to be.
    fn mark_resumable(&self) -> bool {
        let target = format!("{}\n{}", self.space.boot_id, self.path);
        target.len() <= TARGET_BYTES_MAX
            && fsetxattr(&self.file, TARGET, target.as_bytes(), XattrFlags::empty()).is_ok()
    }

    fn keep(mut self, length: u64) {
        self.is_settled = true;
        self.stop_sending();
        self.space.usage.give(self.reserved_bytes.saturating_sub(length), 0);
        self.space.keep_unfinished(self.path.clone(), self.name.clone(), length);
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if self.is_settled {
            return;
        }
        if attribute(&self.file, OBJECT).is_some() {
            // Its content is in the store, and is deleted there before the part goes.
            self.space.add_garbage(self.name.clone());
            self.space.usage.give(self.reserved_bytes, 1);
            self.space.usage.give_upload();
            return;
        }
        self.stop_sending();
        match unlinkat(self.space.parts.as_fd(), &self.name, AtFlags::empty()) {
            Ok(()) => self.space.usage.give(self.reserved_bytes, 1),
            // It takes its room until the server starts again, or has its name and only its directory was not synced.
            Err(error) => tracing::warn!(%error, "can't remove an unfinished upload"),
        }
        self.space.usage.give_upload();
    }
}

/// How an upload begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// With nothing.
    Empty,
    /// With nothing, and what a cut leaves is dropped: nobody would continue it. Who goes away before the end of the commit
    /// gets no file.
    Once,
    /// With what there is of an upload that was cut: this many bytes of it.
    Continue(u64),
    /// With the file's content, which [`crate::View::write`] copies. If there is no file: with an upload that was cut,
    /// where [`Space::resumes_at`] says.
    Present,
}

/// A file while it is written. When it is dropped before [`Upload::publish`], it can be continued if its bytes came in
/// order.
#[derive(Debug)]
pub struct Upload {
    /// `None` after the commit.
    part: Option<Part>,
    length: u64,
    summer: Summer,
    /// How many bytes from the beginning are summed up.
    summed: u64,
    /// How many bytes were left out, to be written later: at most so many are.
    gaps: u64,
    is_resumable: bool,
}

impl Upload {
    /// Begins to write a file.
    ///
    /// # Errors
    /// `Conflict` if it is to continue where the upload was not cut.
    pub fn begin(space: &Arc<Space>, path: &DataPath, how: Begin) -> Result<Self, Problem> {
        match how {
            Begin::Empty | Begin::Continue(0) => Self::empty(space, path),
            Begin::Once => Ok(Self::new(Part::new(space, path)?, false)),
            Begin::Continue(at) => Self::continued(space, path, at),
            Begin::Present => match space.resumes_at(path) {
                Some(at) => Self::continued(space, path, at),
                None => Self::empty(space, path),
            },
        }
    }

    fn new(part: Part, is_resumable: bool) -> Self {
        let (length, summed, gaps) = (0, 0, 0);
        Self { part: Some(part), length, summer: Summer::new(), summed, gaps, is_resumable }
    }

    fn empty(space: &Arc<Space>, path: &DataPath) -> Result<Self, Problem> {
        let old = space.take_unfinished(path);
        old.into_iter().for_each(|old| space.drop_unfinished(&old));
        let part = Part::new(space, path)?;
        let is_resumable = part.mark_resumable();
        Ok(Self::new(part, is_resumable))
    }

    fn continued(space: &Arc<Space>, path: &DataPath, at: u64) -> Result<Self, Problem> {
        let there = space.unfinished_bytes(path).unwrap_or(0);
        let refused = |why| {
            Problem::conflict(space.what("continue the upload of", path), why)
                .next(format!("continue at {there}"))
        };
        if at > there {
            return Err(refused(format!("{there} bytes of it have arrived, and not {at}")));
        }
        let Some((part, length)) = Part::continued(space, path)? else {
            return Err(refused("another client continues it".to_owned()));
        };
        let mut upload = Self::new(part, true);
        upload.length = length;
        upload.set_length(at)?;
        upload.sum_until(at)?;
        Ok(upload)
    }

    fn part(&mut self) -> Result<&mut Part, Problem> {
        self.part.as_mut().ok_or_else(|| Problem::conflict("can't write a file", "it is closed"))
    }

    /// How many bytes the file has so far.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Writes bytes at an offset.
    ///
    /// # Errors
    /// `NoSpace` if the quota or the disk has no room for them.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        let end = offset
            .checked_add(bytes.len() as u64)
            .filter(|end| i64::try_from(*end).is_ok())
            .ok_or_else(|| Problem::invalid("can't write a file", "the offset is too large"))?;
        if offset != self.length {
            self.end_resuming();
        }
        let gaps = match offset.checked_sub(self.length) {
            Some(gap) => self.gaps_with(gap)?,
            None => self.gaps.saturating_sub(bytes.len() as u64),
        };
        self.reserve(end)?;
        self.part()?.write(offset, bytes)?;
        if offset == self.summed {
            self.summer.update(bytes);
            self.summed = end;
        } else if offset < self.summed {
            self.sum_anew();
        }
        self.length = self.length.max(end);
        self.gaps = gaps;
        Ok(())
    }

    /// What is left out if so much more is.
    fn gaps_with(&self, gap: u64) -> Result<u64, Problem> {
        let gaps = self.gaps.saturating_add(gap);
        if gaps <= GAPS_BYTES_MAX {
            return Ok(gaps);
        }
        let why = format!(
            "{} of it would be left out, and at most {} may be",
            format_bytes(gaps),
            format_bytes(GAPS_BYTES_MAX)
        );
        Err(Problem::invalid("can't write a file", why).next("send its bytes in order"))
    }

    /// Reads at most `max` bytes of what has come.
    ///
    /// # Errors
    /// If the disk fails.
    pub fn read(&mut self, offset: u64, max: usize) -> Result<Vec<u8>, Problem> {
        let left = usize::try_from(self.length.saturating_sub(offset)).unwrap_or(max);
        let part = self.part()?;
        let mut piece = vec![0; left.min(max)];
        let read = part.file.read_exact_at(&mut piece, offset);
        read.map_err(|e| problem(part.space.what("read again", &part.path), errno(e)))?;
        Ok(piece)
    }

    /// When the file was last changed, as its client says.
    pub fn set_modified(&mut self, modified_ms: u64) -> Result<(), Problem> {
        self.part()?.modified_ms = Some(modified_ms);
        Ok(())
    }

    /// What is to have its name until it gets it.
    pub fn expect(&mut self, expected: Expected) -> Result<(), Problem> {
        self.part()?.expected = Some(expected);
        Ok(())
    }

    /// What clients have noted about it.
    pub fn set_properties(&mut self, noted: &[Property]) -> Result<(), Problem> {
        let part = self.part()?;
        let what = part.space.what("write", &part.path);
        let packed = properties::packed(noted, &what)?;
        properties::write(&part.file, &packed).map_err(|e| problem(what, e))
    }

    /// It is to have another name in the same tenant's tree.
    pub fn move_to(&mut self, path: DataPath) -> Result<(), Problem> {
        let is_resumable = self.is_resumable;
        let part = self.part()?;
        part.path = path;
        if is_resumable && !part.mark_resumable() {
            self.end_resuming();
        }
        Ok(())
    }

    /// Whose file it is; `None` after the commit.
    pub fn space(&self) -> Option<Arc<Space>> {
        self.part.as_ref().map(|part| Arc::clone(&part.space))
    }

    /// Whether nothing has to be read again to know its hash.
    pub fn is_hashed(&self) -> bool {
        self.summed == self.length
    }

    /// Cuts or extends the file.
    ///
    /// # Errors
    /// As [`Upload::write`].
    pub fn set_length(&mut self, length: u64) -> Result<(), Problem> {
        if length == self.length {
            return Ok(());
        }
        let mut gaps = if length == 0 { 0 } else { self.gaps };
        if length > self.length {
            self.end_resuming();
            // Some clients set the length first and then send all bytes. Whether they have is looked at in the end.
            gaps = gaps.saturating_add(length - self.length);
        }
        self.reserve(length)?;
        let part = self.part()?;
        let set = part.file.set_len(length);
        set.map_err(|e| problem(part.space.what("write", &part.path), errno(e)))?;
        (self.length, self.gaps) = (length, gaps);
        if length < self.summed {
            self.sum_anew();
        }
        Ok(())
    }

    /// What was summed up is not what the file has any more.
    fn sum_anew(&mut self) {
        (self.summer, self.summed) = (Summer::new(), 0);
        self.part.iter_mut().for_each(Part::stop_sending);
    }

    fn sum_until(&mut self, end: u64) -> Result<(), Problem> {
        if let Some(part) = &self.part {
            part.sum(&mut self.summer, self.summed, end)?;
        }
        self.summed = end;
        Ok(())
    }

    /// Takes room until the file may have this length. What does not fit into the quota can't be continued: what has come
    /// of it would fill the quota, and nobody sees it in a list.
    fn reserve(&mut self, length: u64) -> Result<(), Problem> {
        let reserved = self.part()?.reserve(length);
        if reserved.is_err() {
            self.end_resuming();
        }
        reserved
    }

    /// It can't be continued any more, for example because nobody could say where.
    pub fn end_resuming(&mut self) {
        if std::mem::take(&mut self.is_resumable)
            && let Some(part) = &self.part
        {
            let _ = fremovexattr(&part.file, TARGET);
        }
    }

    /// Whether its content is to be in a store.
    pub fn is_remote(&self) -> bool {
        self.part.as_ref().is_some_and(Part::is_remote)
    }

    /// If contents are kept in a store: sends what has arrived in order, in whole pieces.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn send(&mut self) -> Result<(), Problem> {
        let summed = self.summed;
        match &mut self.part {
            Some(part) => part.send_until(summed).await,
            None => Ok(()),
        }
    }

    /// What it has stays when the store fails at its end, so that a retry sends it again.
    ///
    /// # Errors
    /// As [`Part::send_all`].
    pub async fn send_all(&mut self, sha256: &str) -> Result<Option<String>, Problem> {
        match &mut self.part {
            Some(part) => part.send_all(sha256).await,
            None => Ok(None),
        }
    }

    /// All has arrived: its sums.
    ///
    /// # Errors
    /// `Invalid` if the SHA-256 is not the expected one. Then it can't be continued.
    pub fn whole(&mut self, expected: Option<&str>) -> Result<Sums, Problem> {
        self.gaps_with(0)?;
        self.sum_until(self.length)?;
        let sums = self.summer.sums();
        let checked = self.part()?.check(&sums.sha256, expected);
        self.is_resumable &= checked.is_ok();
        checked.map(|()| sums)
    }

    /// The file gets its name. If contents are in a store, `key` is the object with this one.
    ///
    /// # Errors
    /// As [`Part::publish`]; then it is dropped.
    pub fn publish(mut self, sums: &Sums, key: Option<&str>) -> Result<FileEntry, Problem> {
        let part = self.part.take();
        let part =
            part.ok_or_else(|| Problem::conflict("can't write a file", "it is closed already"))?;
        part.publish(sums, key)
    }

    #[cfg(test)]
    /// The file, whose content is kept on the disk, is complete: it gets its name.
    ///
    /// # Errors
    /// As [`Upload::whole`] and [`Upload::publish`].
    pub fn commit(mut self, expected: Option<&str>) -> Result<FileEntry, Problem> {
        let sums = self.whole(expected)?;
        self.publish(&sums, None)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(part) = self.part.take()
            && self.is_resumable
            && self.length > 0
        {
            part.keep(self.length);
        }
    }
}
