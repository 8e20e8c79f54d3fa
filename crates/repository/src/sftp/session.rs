//! One SFTP session: its open files, and what each request does.
//!
//! A file gets its name when the client closes it; until then only its session sees it ([`super::written`]). If the
//! connection ends before that, what has arrived is kept, and `stat` shows how much of it there is, so that `reput` can go
//! on there. The protocol can't tell a client that gives up from one that is done: OpenSSH's sftp closes the file after
//! Ctrl-C too, and then it is as short as it looks.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use perigee_model::Problem;
use perigee_model::data::{FileEntry, FileKind};
use russh_sftp::protocol::{
    Attrs, Data, ExtendedReply, File, FileAttributes, Handle, Name, OpenFlags, Packet, Status,
    StatusCode, Version,
};
use russh_sftp::server::{Handler, StatusReply};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OwnedSemaphorePermit;

use super::open_files::{OpenFile, OpenFiles};
use super::packets::{
    DATA_BYTES_MAX, FSYNC, HANDLES_MAX, LIMITS, POSIX_RENAME, attributes, done, extensions, limits,
    modified_ms, refused, two_paths,
};
use super::pump::pumped;
use super::serve::serve;
use super::written::{Files, name_of};
use crate::account::{Account, Accounts, Credential};
use crate::path::Location;
use crate::repository::Repository;
use crate::transfer::Reading;
use crate::view::{Entries, View};

/// How many entries of a directory one answer has. With the longest names it is far below 256 KiB.
const ENTRIES: usize = 100;

enum Open {
    Reading {
        reading: Box<Reading>,
        at: Location,
        _place: OpenFile,
    },
    /// One of the files that the session writes.
    Written {
        number: u64,
        is_writer: bool,
        _place: OpenFile,
    },
    Directory {
        /// `None` at the end.
        entries: Option<Entries>,
        at: Location,
        /// Files that the session writes, and that have no name in the tree: they come first.
        own: Vec<FileEntry>,
        /// The names of these, when they were given.
        given: BTreeSet<String>,
        /// It takes descriptors, as a file does.
        _place: OpenFile,
    },
}

/// Who uses the session.
pub struct User {
    pub repository: Arc<Repository>,
    pub accounts: Arc<dyn Accounts>,
    pub credential: Credential,
}

impl User {
    /// What the user may do now.
    fn view(&self) -> Result<View, StatusReply> {
        let account = self.accounts.account(&self.credential).ok_or_else(|| {
            let why = "the token or key with which you logged in does not count any more";
            StatusCode::PermissionDenied.with_message(why)
        })?;
        Ok(View::new(Arc::clone(&self.repository), account))
    }
}

/// Whether the one may do all that the other may. What it has open it keeps only then.
fn is_as_before(before: &Account, now: &Account) -> bool {
    let rights = |account: &Account| (account.may_write, account.is_admin);
    before.tenant == now.tenant && rights(before) == rights(now)
}

struct Sftp {
    user: User,
    /// What the user could do at the last request.
    account: Option<Account>,
    files: Arc<OpenFiles>,
    open: HashMap<String, Open>,
    written: Files,
    /// The number of the next handle.
    next: u64,
    /// One of the connection's channels.
    _place: OwnedSemaphorePermit,
}

/// Speaks SFTP over a channel, in a task of its own.
pub fn run<S>(stream: S, user: User, files: Arc<OpenFiles>, place: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (account, open, written) = (None, HashMap::new(), Files::default());
    let sftp = Sftp { user, account, files, open, written, next: 0, _place: place };
    tokio::spawn(serve(pumped(stream), sftp));
}

fn closed() -> StatusReply {
    StatusCode::Failure.with_message("there is no such handle")
}

impl Sftp {
    /// What the user may do now. Each request asks first.
    fn view(&mut self) -> Result<View, StatusReply> {
        let view = self.user.view();
        let now = view.as_ref().ok().map(View::account);
        let is_as_before = match (&self.account, now) {
            (Some(before), Some(now)) => is_as_before(before, now),
            (before, _) => before.is_none(),
        };
        if !is_as_before {
            self.open.clear();
            self.written.clear();
        }
        self.account = now.cloned();
        view
    }

    /// What the user may do now, and the place that a path means.
    fn at(&mut self, path: &str) -> Result<(View, Location), StatusReply> {
        let view = self.view()?;
        let location = Location::resolve(path, &view.account().tenant).map_err(refused)?;
        Ok((view, location))
    }

    /// What is open, if the user may still use it.
    fn handle(&mut self, handle: &str) -> Result<&mut Open, StatusReply> {
        self.view()?;
        self.open.get_mut(handle).ok_or_else(closed)
    }

    /// A place for one more open file or directory.
    fn place(&self, view: &View) -> Result<OpenFile, StatusReply> {
        if self.open.len() >= HANDLES_MAX {
            let why = format!(
                "{HANDLES_MAX} files and directories are open, which is the limit of a session"
            );
            return Err(StatusCode::Failure.with_message(why));
        }
        self.files.take(&view.account().tenant).map_err(refused)
    }

    fn add(&mut self, id: u32, open: Open) -> Handle {
        self.next += 1;
        let handle = self.next.to_string();
        self.open.insert(handle.clone(), open);
        Handle { id, handle }
    }

    /// Notes a change, whatever became of it.
    fn did<T>(
        &self,
        what: impl FnOnce() -> String,
        done: Result<T, Problem>,
    ) -> Result<T, StatusReply> {
        if let Some(account) = &self.account {
            self.user.accounts.did(account, &what(), done.as_ref().map(drop));
        }
        done.map_err(refused)
    }

    async fn entry(&mut self, id: u32, path: &str) -> Result<Attrs, StatusReply> {
        let (view, at) = self.at(path)?;
        let entry = match self.written.at(&at) {
            Some(file) => file.entry(),
            None => view.entry_or_unfinished(at).await.map_err(refused)?,
        };
        Ok(Attrs { id, attrs: attributes(&entry) })
    }

    async fn rename_to(
        &mut self,
        from: String,
        to: String,
        replace: bool,
    ) -> Result<(), StatusReply> {
        let ((view, old), (_, new)) = (self.at(&from)?, self.at(&to)?);
        let renamed = self.written.rename(&view, (old, new), replace).await;
        self.did(|| format!("rename {from} to {to}"), renamed)
    }

    /// What is read through a handle; less than asked for only at the end of the file.
    async fn read_from(
        &mut self,
        handle: &str,
        offset: u64,
        length: usize,
    ) -> Result<Vec<u8>, StatusReply> {
        let mut data: Vec<u8> = Vec::new();
        // Clients ask again for what is missing of an answer, which takes them another round trip.
        while data.len() < length {
            let (at, left) = (offset.saturating_add(data.len() as u64), length - data.len());
            let more = match self.handle(handle)? {
                Open::Reading { reading, .. } => {
                    reading.read(at, left).await.map(|piece| piece.to_vec())
                }
                Open::Written { number, .. } => {
                    let number = *number;
                    self.written.get(number).map_err(refused)?.read(at, left).await
                }
                Open::Directory { .. } => return Err(closed()),
            };
            let more = more.map_err(refused)?;
            if more.is_empty() {
                break;
            }
            data.extend(more);
        }
        Ok(data)
    }

    /// The next entries of a directory, as its session sees them.
    async fn next_entries(&mut self, handle: &str) -> Result<Vec<FileEntry>, StatusReply> {
        let view = self.view()?;
        let Some(Open::Directory { entries, at, own, given, .. }) = self.open.get_mut(handle)
        else {
            return Err(closed());
        };
        if !own.is_empty() {
            given.extend(own.iter().map(|entry| entry.name.clone()));
            return Ok(std::mem::take(own));
        }
        loop {
            let Some(directory) = entries.take() else { return Err(StatusCode::Eof.into()) };
            let (next, directory) = view.next(directory, ENTRIES).await.map_err(refused)?;
            if next.is_empty() {
                return Err(StatusCode::Eof.into());
            }
            *entries = Some(directory);
            let new = next.into_iter().filter(|entry| !given.contains(&entry.name));
            let shown = new.map(|entry| {
                let mut written = self.written.in_directory(at);
                let own = written.find(|file| name_of(file.at()) == entry.name);
                own.map_or(entry, |file| file.entry())
            });
            let shown: Vec<_> = shown.collect();
            if !shown.is_empty() {
                return Ok(shown);
            }
        }
    }

    /// Sets the length and the time of what a path names. Owner and mode are not kept, and to set them changes nothing.
    async fn set_at(&mut self, path: &str, attrs: &FileAttributes) -> Result<(), StatusReply> {
        let (view, at) = self.at(path)?;
        if let Some(number) = self.written.number_at(&at) {
            return self.set_written(number, attrs).await;
        }
        self.entry(0, path).await?;
        if let Some(length) = attrs.size {
            let cut = self.written.cut(&view, at.clone(), length).await;
            self.did(|| format!("set the length of {path}"), cut)?;
        }
        if let Some(modified_ms) = modified_ms(attrs) {
            let set = view.set_modified(at, modified_ms).await;
            self.did(|| format!("set the time of {path}"), set)?;
        }
        Ok(())
    }

    /// As [`Sftp::set_at`], of a file that the session writes.
    async fn set_written(
        &mut self,
        number: u64,
        attrs: &FileAttributes,
    ) -> Result<(), StatusReply> {
        let view = self.view()?;
        let file = self.written.get(number).map_err(refused)?;
        if let Some(length) = attrs.size {
            file.set_length(&view, length).await.map_err(refused)?;
        }
        if let Some(modified_ms) = modified_ms(attrs) {
            file.set_modified(modified_ms);
        }
        Ok(())
    }

    /// Ends the writing of a file. Who reads it goes on with what has its name then.
    async fn end_writing(&mut self, view: &View, number: u64) -> Result<(), StatusReply> {
        let at = self.written.get(number).map_err(refused)?.at().clone();
        let ended = self.written.close(view, number).await;
        let is_over = self.written.get(number).is_err();
        match ended {
            Ok(None) => {}
            Ok(Some(_)) => self.did(|| format!("write {at}"), Ok(()))?,
            Err(problem) => return self.did(|| format!("write {at}"), Err(problem)),
        }
        let is_reader =
            |open: &Open| matches!(open, Open::Written { number: of, .. } if *of == number);
        let readers: Vec<String> = self
            .open
            .iter()
            .filter(|(_, open)| is_over && is_reader(open))
            .map(|(handle, _)| handle.clone())
            .collect();
        for handle in readers {
            let Some(Open::Written { _place, .. }) = self.open.remove(&handle) else { continue };
            // If it was deleted there is nothing to read any more.
            if let Ok(reading) = view.read(at.clone()).await {
                let (reading, at) = (Box::new(reading), at.clone());
                self.open.insert(handle, Open::Reading { reading, at, _place });
            }
        }
        Ok(())
    }
}

impl Handler for Sftp {
    type Error = StatusReply;

    fn unimplemented(&self) -> StatusReply {
        StatusCode::OpUnsupported.into()
    }

    async fn init(
        &mut self,
        _version: u32,
        _extensions: HashMap<String, String>,
    ) -> Result<Version, StatusReply> {
        Ok(Version { extensions: extensions(), ..Version::new() })
    }

    async fn open(
        &mut self,
        id: u32,
        path: String,
        flags: OpenFlags,
        _attrs: FileAttributes,
    ) -> Result<Handle, StatusReply> {
        let (view, at) = self.at(&path)?;
        let _place = self.place(&view)?;
        let is_writer = flags.contains(OpenFlags::WRITE);
        let open = match self.written.number_at(&at) {
            Some(number) if !is_writer => Open::Written { number, is_writer, _place },
            None if !is_writer => {
                let reading = Box::new(view.read(at.clone()).await.map_err(refused)?);
                Open::Reading { reading, at, _place }
            }
            _ => match self.written.open(&view, at, flags).await {
                Ok(number) => Open::Written { number, is_writer, _place },
                Err(problem) => {
                    return self.did(|| format!("write {path}"), Err(problem));
                }
            },
        };
        Ok(self.add(id, open))
    }

    async fn close(&mut self, id: u32, handle: String) -> Result<Status, StatusReply> {
        let view = self.view()?;
        match self.open.remove(&handle).ok_or_else(closed)? {
            Open::Written { number, is_writer: true, .. } => {
                self.end_writing(&view, number).await?;
            }
            Open::Reading { .. } | Open::Written { .. } | Open::Directory { .. } => {}
        }
        Ok(done(id))
    }

    async fn read(
        &mut self,
        id: u32,
        handle: String,
        offset: u64,
        length: u32,
    ) -> Result<Data, StatusReply> {
        let length = usize::try_from(length.min(DATA_BYTES_MAX)).unwrap_or(0);
        let data = self.read_from(&handle, offset, length).await?;
        if data.is_empty() { Err(StatusCode::Eof.into()) } else { Ok(Data { id, data }) }
    }

    async fn write(
        &mut self,
        id: u32,
        handle: String,
        offset: u64,
        data: Vec<u8>,
    ) -> Result<Status, StatusReply> {
        let view = self.view()?;
        let Open::Written { number, is_writer: true, .. } = self.handle(&handle)? else {
            return Err(closed());
        };
        let number = *number;
        let file = self.written.get(number).map_err(refused)?;
        file.write(&view, offset, &data).await.map_err(refused)?;
        Ok(done(id))
    }

    async fn lstat(&mut self, id: u32, path: String) -> Result<Attrs, StatusReply> {
        self.entry(id, &path).await
    }

    async fn stat(&mut self, id: u32, path: String) -> Result<Attrs, StatusReply> {
        self.entry(id, &path).await
    }

    async fn fstat(&mut self, id: u32, handle: String) -> Result<Attrs, StatusReply> {
        let attrs = match self.handle(&handle)? {
            Open::Reading { reading, .. } => attributes(reading.entry()),
            Open::Written { number, .. } => {
                let number = *number;
                attributes(&self.written.get(number).map_err(refused)?.entry())
            }
            Open::Directory { .. } => attributes(&FileEntry {
                name: String::new(),
                kind: FileKind::Directory,
                size_bytes: 0,
                modified_ms: 0,
                sha256: None,
            }),
        };
        Ok(Attrs { id, attrs })
    }

    async fn setstat(
        &mut self,
        id: u32,
        path: String,
        attrs: FileAttributes,
    ) -> Result<Status, StatusReply> {
        self.set_at(&path, &attrs).await?;
        Ok(done(id))
    }

    async fn fsetstat(
        &mut self,
        id: u32,
        handle: String,
        attrs: FileAttributes,
    ) -> Result<Status, StatusReply> {
        match self.handle(&handle)? {
            Open::Written { number, .. } => {
                let number = *number;
                self.set_written(number, &attrs).await?;
            }
            Open::Reading { at, .. } | Open::Directory { at, .. } => {
                let path = at.to_string();
                self.set_at(&path, &attrs).await?;
            }
        }
        Ok(done(id))
    }

    async fn opendir(&mut self, id: u32, path: String) -> Result<Handle, StatusReply> {
        let (view, at) = self.at(&path)?;
        let _place = self.place(&view)?;
        let entries = Some(view.directory(at.clone()).await.map_err(refused)?);
        let mut own = Vec::new();
        for file in self.written.in_directory(&at) {
            if view.entry(file.at().clone()).await.is_err() {
                own.push(file.entry());
            }
        }
        let given = BTreeSet::new();
        Ok(self.add(id, Open::Directory { entries, at, own, given, _place }))
    }

    async fn readdir(&mut self, id: u32, handle: String) -> Result<Name, StatusReply> {
        let next = self.next_entries(&handle).await?;
        let files = next.iter().map(|entry| File::new(entry.name.as_str(), attributes(entry)));
        Ok(Name { id, files: files.collect() })
    }

    async fn remove(&mut self, id: u32, path: String) -> Result<Status, StatusReply> {
        let (view, at) = self.at(&path)?;
        let deleted = self.written.delete(&view, at).await;
        self.did(|| format!("delete {path}"), deleted)?;
        Ok(done(id))
    }

    async fn mkdir(
        &mut self,
        id: u32,
        path: String,
        _attrs: FileAttributes,
    ) -> Result<Status, StatusReply> {
        let (view, at) = self.at(&path)?;
        let made = self.written.make_directory(&view, at).await;
        self.did(|| format!("make the directory {path}"), made)?;
        Ok(done(id))
    }

    async fn rmdir(&mut self, id: u32, path: String) -> Result<Status, StatusReply> {
        let (view, at) = self.at(&path)?;
        let deleted = self.written.delete_directory(&view, at).await;
        self.did(|| format!("delete the directory {path}"), deleted)?;
        Ok(done(id))
    }

    async fn realpath(&mut self, id: u32, path: String) -> Result<Name, StatusReply> {
        let path = self.at(&path)?.1.to_string();
        Ok(Name { id, files: vec![File::new(path, FileAttributes::default())] })
    }

    async fn rename(&mut self, id: u32, from: String, to: String) -> Result<Status, StatusReply> {
        self.rename_to(from, to, false).await?;
        Ok(done(id))
    }

    async fn extended(
        &mut self,
        id: u32,
        request: String,
        data: Vec<u8>,
    ) -> Result<Packet, StatusReply> {
        match request.as_str() {
            POSIX_RENAME => {
                let (from, to) = two_paths(&data)?;
                self.rename_to(from, to, true).await?;
                Ok(Packet::Status(done(id)))
            }
            // What is closed is on the disk; until then nobody relies on it.
            FSYNC => Ok(Packet::Status(done(id))),
            LIMITS => {
                let data = russh_sftp::ser::to_bytes(&limits()).map_err(|_| StatusCode::Failure)?;
                Ok(Packet::ExtendedReply(ExtendedReply { id, data: data.to_vec() }))
            }
            _ => Err(StatusCode::OpUnsupported.into()),
        }
    }
}
