//! One SFTP session: its open files, and what each request does.
//!
//! A file gets its name when the client closes it. If the connection ends before that, what has arrived is kept, and
//! `stat` shows how much of it there is, so that `reput` can go on there. The protocol can't tell a client that gives up
//! from one that is done: OpenSSH's sftp closes the file after Ctrl-C too, and then it is as short as it looks.

use std::collections::HashMap;
use std::sync::Arc;

use perigee_model::Problem;
use perigee_model::data::{FileEntry, FileKind};
use russh_sftp::protocol::{
    Attrs, Data, ExtendedReply, File, FileAttributes, Handle, Name, OpenFlags, Packet, Status,
    StatusCode, Version,
};
use russh_sftp::server::{Config, Handler, StatusReply, run_with_config};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OwnedSemaphorePermit;

use super::frames::Frames;
use super::open_files::{OpenFile, OpenFiles};
use super::packets::{
    DATA_BYTES_MAX, FSYNC, HANDLES_MAX, LIMITS, PACKET_BYTES_MAX, POSIX_RENAME, attributes, done,
    extensions, limits, refused, two_texts,
};
use super::pump::pumped;
use crate::account::{Account, Accounts, Credential};
use crate::path::Location;
use crate::repository::Repository;
use crate::transfer::{Reading, Writing};
use crate::upload::Begin;
use crate::view::{Entries, View};

/// How many entries of a directory one answer has. With the longest names it is far below 256 KiB.
const ENTRIES: usize = 100;

enum Open {
    Reading {
        reading: Reading,
        _place: OpenFile,
    },
    Writing {
        writing: Writing,
        path: String,
        _place: OpenFile,
    },
    Directory {
        /// `None` at the end.
        entries: Option<Entries>,
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
    /// The number of the next handle.
    next: u64,
    /// One of the connection's channels.
    _place: OwnedSemaphorePermit,
}

/// Speaks SFTP over a channel, in a task of its own.
pub async fn run<S>(stream: S, user: User, files: Arc<OpenFiles>, place: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let config = Config { max_client_packet_len: PACKET_BYTES_MAX };
    let (account, open) = (None, HashMap::new());
    let sftp = Sftp { user, account, files, open, next: 0, _place: place };
    run_with_config(Frames::new(pumped(stream)), sftp, config).await;
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

    fn add(&mut self, id: u32, open: Open) -> Result<Handle, StatusReply> {
        if self.open.len() >= HANDLES_MAX {
            let why = format!(
                "{HANDLES_MAX} files and directories are open, which is the limit of a session"
            );
            return Err(StatusCode::Failure.with_message(why));
        }
        self.next += 1;
        let handle = self.next.to_string();
        self.open.insert(handle.clone(), open);
        Ok(Handle { id, handle })
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
        let entry = view.entry_or_unfinished(at).await.map_err(refused)?;
        Ok(Attrs { id, attrs: attributes(&entry) })
    }

    async fn write_to(
        view: &View,
        location: Location,
        flags: OpenFlags,
    ) -> Result<Writing, Problem> {
        let what = || format!("can't write repo:/{location}");
        let exists = view.entry(location.clone()).await.is_ok();
        if flags.contains(OpenFlags::EXCLUDE) && exists {
            return Err(Problem::conflict(what(), "it exists already"));
        }
        if !flags.contains(OpenFlags::CREATE) && !exists {
            return Err(crate::errors::missing(what()));
        }
        let is_empty = flags.contains(OpenFlags::TRUNCATE);
        let how = if is_empty { Begin::Empty } else { Begin::Present };
        view.write(location, how, false).await
    }

    async fn rename_to(
        &mut self,
        from: String,
        to: String,
        replace: bool,
    ) -> Result<(), StatusReply> {
        let ((view, old), (_, new)) = (self.at(&from)?, self.at(&to)?);
        self.did(|| format!("rename {from} to {to}"), view.rename(old, new, replace).await)
    }

    async fn set(&mut self, handle: &str, attrs: &FileAttributes) -> Result<(), StatusReply> {
        match (self.handle(handle)?, attrs.size) {
            (Open::Writing { writing, .. }, Some(length)) => {
                writing.set_length(length).await.map_err(refused)
            }
            // Owner, mode and times are not kept.
            (_, None) => Ok(()),
            _ => Err(closed()),
        }
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
        let (view, location) = self.at(&path)?;
        let _place = self.files.take(&view.account().tenant).map_err(refused)?;
        let open = if flags.contains(OpenFlags::WRITE) {
            match Self::write_to(&view, location, flags).await {
                Ok(writing) => Open::Writing { writing, path, _place },
                Err(problem) => {
                    return self.did(|| format!("write {path}"), Err(problem));
                }
            }
        } else {
            Open::Reading { reading: view.read(location).await.map_err(refused)?, _place }
        };
        self.add(id, open)
    }

    async fn close(&mut self, id: u32, handle: String) -> Result<Status, StatusReply> {
        self.view()?;
        match self.open.remove(&handle).ok_or_else(closed)? {
            Open::Writing { writing, path, .. } => {
                let committed = writing.commit(None).await.map(drop);
                self.did(|| format!("write {path}"), committed)?;
            }
            Open::Reading { .. } | Open::Directory { .. } => {}
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
        let Open::Reading { reading, .. } = self.handle(&handle)? else { return Err(closed()) };
        let length = usize::try_from(length.min(DATA_BYTES_MAX)).unwrap_or(0);
        let mut data = reading.read(offset, length).await.map_err(refused)?.to_vec();
        // Clients ask again for what is missing of an answer, which takes them another round trip.
        while data.len() < length {
            let more = reading.read(offset + data.len() as u64, length - data.len()).await;
            let more = more.map_err(refused)?;
            if more.is_empty() {
                break;
            }
            data.extend_from_slice(&more);
        }
        if data.is_empty() { Err(StatusCode::Eof.into()) } else { Ok(Data { id, data }) }
    }

    async fn write(
        &mut self,
        id: u32,
        handle: String,
        offset: u64,
        data: Vec<u8>,
    ) -> Result<Status, StatusReply> {
        let Open::Writing { writing, .. } = self.handle(&handle)? else { return Err(closed()) };
        writing.write(offset, &data).await.map_err(refused)?;
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
            Open::Writing { writing, .. } => FileAttributes {
                size: Some(writing.length()),
                permissions: Some(0o100_644),
                ..FileAttributes::default()
            },
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
        if attrs.size.is_some() {
            return Err(StatusCode::OpUnsupported.into());
        }
        self.entry(id, &path).await?;
        Ok(done(id))
    }

    async fn fsetstat(
        &mut self,
        id: u32,
        handle: String,
        attrs: FileAttributes,
    ) -> Result<Status, StatusReply> {
        self.set(&handle, &attrs).await?;
        Ok(done(id))
    }

    async fn opendir(&mut self, id: u32, path: String) -> Result<Handle, StatusReply> {
        let (view, at) = self.at(&path)?;
        let _place = self.files.take(&view.account().tenant).map_err(refused)?;
        let entries = Some(view.directory(at).await.map_err(refused)?);
        self.add(id, Open::Directory { entries, _place })
    }

    async fn readdir(&mut self, id: u32, handle: String) -> Result<Name, StatusReply> {
        let view = self.view()?;
        let Open::Directory { entries, .. } = self.handle(&handle)? else { return Err(closed()) };
        let Some(directory) = entries.take() else { return Err(StatusCode::Eof.into()) };
        let (next, directory) = view.next(directory, ENTRIES).await.map_err(refused)?;
        if next.is_empty() {
            return Err(StatusCode::Eof.into());
        }
        *entries = Some(directory);
        let files = next.iter().map(|entry| File::new(entry.name.as_str(), attributes(entry)));
        Ok(Name { id, files: files.collect() })
    }

    async fn remove(&mut self, id: u32, path: String) -> Result<Status, StatusReply> {
        let (view, at) = self.at(&path)?;
        self.did(|| format!("delete {path}"), view.remove_file(at).await)?;
        Ok(done(id))
    }

    async fn mkdir(
        &mut self,
        id: u32,
        path: String,
        _attrs: FileAttributes,
    ) -> Result<Status, StatusReply> {
        let (view, at) = self.at(&path)?;
        self.did(|| format!("make the directory {path}"), view.make_directory(at).await)?;
        Ok(done(id))
    }

    async fn rmdir(&mut self, id: u32, path: String) -> Result<Status, StatusReply> {
        let (view, at) = self.at(&path)?;
        self.did(|| format!("delete the directory {path}"), view.remove_directory(at).await)?;
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
                let (from, to) = two_texts(&data).ok_or(StatusCode::BadMessage)?;
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
