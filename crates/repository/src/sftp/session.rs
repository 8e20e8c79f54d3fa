//! One SFTP session: its open files, and what each request does.
//!
//! A file gets its name when the client closes it. If the connection ends before that, what has arrived is kept, and
//! `stat` shows how much of it there is, so that `reput` can go on there. The protocol can't tell a client that gives up
//! from one that is done: OpenSSH's sftp closes the file after Ctrl-C too, and then it is as short as it looks.

use std::collections::HashMap;

use perigee_model::Problem;
use perigee_model::data::{FileEntry, FileKind};
use russh_sftp::protocol::{
    Attrs, Data, ExtendedReply, File, FileAttributes, Handle, Name, OpenFlags, Packet, Status,
    StatusCode, Version,
};
use russh_sftp::server::{Config, Handler, StatusReply, run_with_config};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OwnedSemaphorePermit;

use super::packets::{
    DATA_BYTES_MAX, FSYNC, HANDLES_MAX, LIMITS, PACKET_BYTES_MAX, POSIX_RENAME, attributes, done,
    extensions, limits, refused, two_texts,
};
use crate::path::Location;
use crate::transfer::{Reading, Writing};
use crate::upload::Begin;
use crate::view::{Entries, View};

/// How many entries of a directory one answer has. With the longest names it is far below 256 KiB.
const ENTRIES: usize = 100;

enum Open {
    Reading(Reading),
    Writing(Writing),
    /// `None` at the end.
    Directory(Option<Entries>),
}

struct Sftp {
    view: View,
    open: HashMap<String, Open>,
    /// The number of the next handle.
    next: u64,
    /// One of the connection's channels.
    _place: OwnedSemaphorePermit,
}

/// Speaks SFTP over a channel, in a task of its own.
pub async fn run<S>(stream: S, view: View, place: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let config = Config { max_client_packet_len: PACKET_BYTES_MAX };
    let sftp = Sftp { view, open: HashMap::new(), next: 0, _place: place };
    run_with_config(stream, sftp, config).await;
}

fn closed() -> StatusReply {
    StatusCode::Failure.with_message("there is no such handle")
}

impl Sftp {
    fn at(&self, path: &str) -> Result<Location, StatusReply> {
        Location::resolve(path, &self.view.account().tenant).map_err(refused)
    }

    fn add(&mut self, id: u32, open: Open) -> Result<Handle, StatusReply> {
        if self.open.len() >= HANDLES_MAX {
            let why = format!("{HANDLES_MAX} files are open, which is the limit of a session");
            return Err(StatusCode::Failure.with_message(why));
        }
        self.next += 1;
        let handle = self.next.to_string();
        self.open.insert(handle.clone(), open);
        Ok(Handle { id, handle })
    }

    async fn entry(&self, id: u32, path: &str) -> Result<Attrs, StatusReply> {
        let entry = self.view.entry_or_unfinished(self.at(path)?).await.map_err(refused)?;
        Ok(Attrs { id, attrs: attributes(&entry) })
    }

    async fn write_to(&self, location: Location, flags: OpenFlags) -> Result<Writing, Problem> {
        let what = || format!("can't write repo:/{location}");
        let exists = self.view.entry(location.clone()).await.is_ok();
        if flags.contains(OpenFlags::EXCLUDE) && exists {
            return Err(Problem::conflict(what(), "it exists already"));
        }
        if !flags.contains(OpenFlags::CREATE) && !exists {
            return Err(crate::errors::missing(what()));
        }
        let is_empty = flags.contains(OpenFlags::TRUNCATE);
        let how = if is_empty { Begin::Empty } else { Begin::Present };
        self.view.write(location, how, false).await
    }

    async fn set(&mut self, handle: &str, attrs: &FileAttributes) -> Result<(), StatusReply> {
        match (self.open.get_mut(handle), attrs.size) {
            (Some(Open::Writing(writing)), Some(length)) => {
                writing.set_length(length).await.map_err(refused)
            }
            // Owner, mode and times are not kept.
            (Some(_), None) => Ok(()),
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
        let location = self.at(&path)?;
        let open = if flags.contains(OpenFlags::WRITE) {
            Open::Writing(self.write_to(location, flags).await.map_err(refused)?)
        } else {
            Open::Reading(self.view.read(location).await.map_err(refused)?)
        };
        self.add(id, open)
    }

    async fn close(&mut self, id: u32, handle: String) -> Result<Status, StatusReply> {
        match self.open.remove(&handle).ok_or_else(closed)? {
            Open::Writing(writing) => writing.commit(None).await.map(drop).map_err(refused)?,
            Open::Reading(_) | Open::Directory(_) => {}
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
        let Some(Open::Reading(reading)) = self.open.get_mut(&handle) else {
            return Err(closed());
        };
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
        let Some(Open::Writing(writing)) = self.open.get_mut(&handle) else {
            return Err(closed());
        };
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
        let attrs = match self.open.get(&handle).ok_or_else(closed)? {
            Open::Reading(reading) => attributes(reading.entry()),
            Open::Writing(writing) => FileAttributes {
                size: Some(writing.length()),
                permissions: Some(0o100_644),
                ..FileAttributes::default()
            },
            Open::Directory(_) => attributes(&FileEntry {
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
        let entries = self.view.directory(self.at(&path)?).await.map_err(refused)?;
        self.add(id, Open::Directory(Some(entries)))
    }

    async fn readdir(&mut self, id: u32, handle: String) -> Result<Name, StatusReply> {
        let Some(Open::Directory(entries)) = self.open.get_mut(&handle) else {
            return Err(closed());
        };
        let Some(directory) = entries.take() else { return Err(StatusCode::Eof.into()) };
        let (next, directory) = self.view.next(directory, ENTRIES).await.map_err(refused)?;
        if next.is_empty() {
            return Err(StatusCode::Eof.into());
        }
        self.open.insert(handle, Open::Directory(Some(directory)));
        let files = next.iter().map(|entry| File::new(entry.name.as_str(), attributes(entry)));
        Ok(Name { id, files: files.collect() })
    }

    async fn remove(&mut self, id: u32, path: String) -> Result<Status, StatusReply> {
        self.view.remove_file(self.at(&path)?).await.map_err(refused)?;
        Ok(done(id))
    }

    async fn mkdir(
        &mut self,
        id: u32,
        path: String,
        _attrs: FileAttributes,
    ) -> Result<Status, StatusReply> {
        self.view.make_directory(self.at(&path)?).await.map_err(refused)?;
        Ok(done(id))
    }

    async fn rmdir(&mut self, id: u32, path: String) -> Result<Status, StatusReply> {
        self.view.remove_directory(self.at(&path)?).await.map_err(refused)?;
        Ok(done(id))
    }

    async fn realpath(&mut self, id: u32, path: String) -> Result<Name, StatusReply> {
        let path = self.at(&path)?.to_string();
        Ok(Name { id, files: vec![File::new(path, FileAttributes::default())] })
    }

    async fn rename(&mut self, id: u32, from: String, to: String) -> Result<Status, StatusReply> {
        self.view.rename(self.at(&from)?, self.at(&to)?, false).await.map_err(refused)?;
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
                let (from, to) = (self.at(&from)?, self.at(&to)?);
                self.view.rename(from, to, true).await.map_err(refused)?;
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
