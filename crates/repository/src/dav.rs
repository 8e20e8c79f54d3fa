//! The WebDAV door, `/dav/TENANT/PATH`. dav-server speaks the protocol; this is its filesystem.
//!
//! Locks are granted and mean nothing: two clients that write one file at the same time each write a whole one, and the
//! later one stays. Some clients do not write without a lock.

use std::io::SeekFrom;
use std::sync::Arc;
use std::time::SystemTime;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use bytes::{Buf, Bytes};
use dav_server::DavHandler;
use dav_server::davpath::DavPath;
use dav_server::fakels::FakeLs;
use dav_server::fs::{
    DavDirEntry, DavFile, DavFileSystem, DavMetaData, FsError, FsFuture, FsResult, FsStream,
    OpenOptions, ReadDirMeta,
};
use futures_util::{StreamExt, stream};
use perigee_http::Failure;
use perigee_model::data::FileEntry;
use perigee_model::{Problem, ProblemKind};

use crate::http::view_of;
use crate::listing::modified;
use crate::path::Location;
use crate::repository::Repository;
use crate::transfer::{Reading, Writing};
use crate::upload::Begin;
use crate::view::View;

const PREFIX: &str = "/dav";

/// How many entries of a directory are read at once.
const ENTRIES: usize = 256;

pub fn router(repository: Arc<Repository>) -> Router {
    Router::new()
        .route("/dav", any(answer))
        .route("/dav/", any(answer))
        .route("/dav/{*path}", any(answer))
        .with_state(repository)
}

async fn answer(state: State<Arc<Repository>>, request: Request) -> Response {
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    let mut response = answer_of_library(state, request).await;
    let is_content = is_read && response.status().is_success();
    close_to_browsers(response.headers_mut(), is_content);
    response
}

/// A browser stores what a user's file is, and never shows it as a page or runs it: it would run with the rights of
/// whoever opened it here. The library guesses a file's type by its name.
fn close_to_browsers(headers: &mut HeaderMap, is_content: bool) {
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let policy = "sandbox; default-src 'none'";
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let is_parts = kind.is_some_and(|kind| kind.starts_with(b"multipart/byteranges"));
    if is_content && !is_parts {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    }
}

async fn answer_of_library(
    State(repository): State<Arc<Repository>>,
    mut request: Request,
) -> Response {
    let view = match view_of(&repository, &request).and_then(|view| bounded(&request, view)) {
        Ok(view) => view,
        Err(problem) => return Failure(problem).into_response(),
    };
    // To replace what is there, the library deletes it first, before it knows whether the rest will work. So whoever wants
    // to replace something deletes it.
    request.headers_mut().insert("overwrite", HeaderValue::from_static("F"));
    let handler = DavHandler::builder()
        .filesystem(Box::new(Filesystem { view, deletes: *request.method() == Method::DELETE }))
        .locksystem(FakeLs::new())
        .strip_prefix(PREFIX)
        .build_handler();
    handler.handle(request).await.map(Body::new)
}

/// A list of a whole tree could be of any length: RFC 4918, 9.1 lets a server refuse it.
fn bounded(request: &Request, view: View) -> Result<View, Problem> {
    let depth = request.headers().get("depth").map(|depth| depth.as_bytes());
    let is_list = request.method().as_str() == "PROPFIND";
    if is_list && !matches!(depth, Some(b"0" | b"1")) {
        return Err(Problem::forbidden("can't list a whole tree", "its length has no limit")
            .next("list one directory at a time, with `Depth: 1`"));
    }
    let parts = request.uri().path().split('/').filter(|part| !part.is_empty());
    let is_change = ["DELETE", "MOVE", "COPY"].contains(&request.method().as_str());
    if is_change && parts.count() < 3 {
        return Err(Problem::forbidden(
            "can't do that with all files of a tenant",
            "it may be a mistake",
        )
        .next("name what is in the tenant's directory"));
    }
    Ok(view)
}

#[derive(Debug, Clone)]
struct Filesystem {
    view: View,
    /// The request is a `DELETE`, for which the library looks first whether there is anything.
    deletes: bool,
}

#[derive(Debug, Clone)]
struct Metadata(FileEntry);

#[derive(Debug)]
enum Open {
    Reading(Reading),
    /// With the length that the client has announced.
    Writing(Option<Writing>, Option<u64>),
    Written(FileEntry),
}

#[derive(Debug)]
struct OpenFile {
    open: Open,
    at: u64,
}

fn refused(problem: Problem) -> FsError {
    match problem.kind {
        ProblemKind::NotFound => FsError::NotFound,
        ProblemKind::Conflict => FsError::Exists,
        ProblemKind::Forbidden | ProblemKind::Invalid => FsError::Forbidden,
        ProblemKind::NoSpace => FsError::InsufficientStorage,
        ProblemKind::Unsupported => FsError::NotImplemented,
        ProblemKind::Unavailable | ProblemKind::Internal => FsError::GeneralFailure,
    }
}

fn location(path: &DavPath) -> FsResult<Location> {
    let text = std::str::from_utf8(path.as_bytes()).map_err(|_| FsError::Forbidden)?;
    match text.trim_start_matches('/').split_once('/') {
        None if text.trim_matches('/').is_empty() => Ok(Location::Top),
        None => Location::new(text.trim_matches('/'), "").map_err(refused),
        Some((tenant, path)) => Location::new(tenant, path).map_err(refused),
    }
}

impl Filesystem {
    async fn open_file(&self, path: &DavPath, options: OpenOptions) -> FsResult<Box<dyn DavFile>> {
        let location = location(path)?;
        if !options.write {
            let reading = self.view.read(location).await.map_err(refused)?;
            return Ok(Box::new(OpenFile { open: Open::Reading(reading), at: 0 }));
        }
        let exists = self.view.entry(location.clone()).await.is_ok();
        if options.create_new && exists {
            return Err(FsError::Exists);
        }
        if !options.create && !exists {
            return Err(FsError::NotFound);
        }
        let how = if options.truncate { Begin::Empty } else { Begin::Present };
        let writing = self.view.write(location, how, false).await.map_err(refused)?;
        let at = if options.append { writing.length() } else { 0 };
        let announced = options.size.filter(|_| options.truncate);
        Ok(Box::new(OpenFile { open: Open::Writing(Some(writing), announced), at }))
    }
}

impl DavFileSystem for Filesystem {
    fn open<'a>(
        &'a self,
        path: &'a DavPath,
        options: OpenOptions,
    ) -> FsFuture<'a, Box<dyn DavFile>> {
        Box::pin(self.open_file(path, options))
    }

    fn read_dir<'a>(
        &'a self,
        path: &'a DavPath,
        _meta: ReadDirMeta,
    ) -> FsFuture<'a, FsStream<Box<dyn DavDirEntry>>> {
        Box::pin(async move {
            let view = self.view.clone();
            let entries = view.directory(location(path)?).await.map_err(refused)?;
            let pieces = stream::try_unfold((view, entries), |(view, entries)| async move {
                let (next, entries) = view.next(entries, ENTRIES).await.map_err(refused)?;
                Ok::<_, FsError>((!next.is_empty()).then_some((next, (view, entries))))
            });
            let each = pieces.flat_map(|piece| {
                let entries: Vec<FsResult<Box<dyn DavDirEntry>>> = match piece {
                    Ok(piece) => piece
                        .into_iter()
                        .map(|entry| Ok(Box::new(Metadata(entry)) as Box<dyn DavDirEntry>))
                        .collect(),
                    Err(error) => vec![Err(error)],
                };
                stream::iter(entries)
            });
            Ok(Box::pin(each) as FsStream<Box<dyn DavDirEntry>>)
        })
    }

    fn metadata<'a>(&'a self, path: &'a DavPath) -> FsFuture<'a, Box<dyn DavMetaData>> {
        Box::pin(async move {
            let location = location(path)?;
            let entry = match self.deletes {
                true => self.view.entry_or_cut(location).await,
                false => self.view.entry(location).await,
            };
            let entry = entry.map_err(refused)?;
            Ok(Box::new(Metadata(entry)) as Box<dyn DavMetaData>)
        })
    }

    fn create_dir<'a>(&'a self, path: &'a DavPath) -> FsFuture<'a, ()> {
        Box::pin(async move { self.view.make_directory(location(path)?).await.map_err(refused) })
    }

    fn remove_dir<'a>(&'a self, path: &'a DavPath) -> FsFuture<'a, ()> {
        Box::pin(async move { self.view.remove_directory(location(path)?).await.map_err(refused) })
    }

    fn remove_file<'a>(&'a self, path: &'a DavPath) -> FsFuture<'a, ()> {
        Box::pin(async move { self.view.remove_file(location(path)?).await.map_err(refused) })
    }

    fn rename<'a>(&'a self, from: &'a DavPath, to: &'a DavPath) -> FsFuture<'a, ()> {
        Box::pin(async move {
            let (from, to) = (location(from)?, location(to)?);
            self.view.rename(from, to, true).await.map_err(refused)
        })
    }

    fn copy<'a>(&'a self, from: &'a DavPath, to: &'a DavPath) -> FsFuture<'a, ()> {
        Box::pin(
            async move { self.view.copy(location(from)?, location(to)?).await.map_err(refused) },
        )
    }
}

impl DavMetaData for Metadata {
    fn len(&self) -> u64 {
        self.0.size_bytes
    }

    fn modified(&self) -> FsResult<SystemTime> {
        Ok(modified(&self.0))
    }

    fn is_dir(&self) -> bool {
        self.0.is_directory()
    }

    fn etag(&self) -> Option<String> {
        self.0.sha256.clone()
    }
}

impl DavDirEntry for Metadata {
    fn name(&self) -> Vec<u8> {
        self.0.name.clone().into_bytes()
    }

    fn metadata(&self) -> FsFuture<'_, Box<dyn DavMetaData>> {
        let metadata: Box<dyn DavMetaData> = Box::new(self.clone());
        Box::pin(std::future::ready(Ok(metadata)))
    }
}

impl OpenFile {
    async fn write(&mut self, bytes: Bytes) -> FsResult<()> {
        let Open::Writing(Some(writing), _) = &mut self.open else {
            return Err(FsError::Forbidden);
        };
        writing.write(self.at, &bytes).await.map_err(refused)?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}

impl DavFile for OpenFile {
    fn metadata(&mut self) -> FsFuture<'_, Box<dyn DavMetaData>> {
        let entry = match &self.open {
            Open::Reading(reading) => Ok(reading.entry().clone()),
            Open::Written(entry) => Ok(entry.clone()),
            // It has no name yet.
            Open::Writing(..) => Err(FsError::NotFound),
        };
        let metadata = entry.map(|entry| Box::new(Metadata(entry)) as Box<dyn DavMetaData>);
        Box::pin(std::future::ready(metadata))
    }

    fn write_buf(&mut self, mut buf: Box<dyn Buf + Send>) -> FsFuture<'_, ()> {
        let bytes = buf.copy_to_bytes(buf.remaining());
        Box::pin(self.write(bytes))
    }

    fn write_bytes(&mut self, bytes: Bytes) -> FsFuture<'_, ()> {
        Box::pin(self.write(bytes))
    }

    fn read_bytes(&mut self, count: usize) -> FsFuture<'_, Bytes> {
        Box::pin(async move {
            let Open::Reading(reading) = &mut self.open else { return Err(FsError::Forbidden) };
            let bytes = reading.read(self.at, count).await.map_err(refused)?;
            self.at += bytes.len() as u64;
            Ok(bytes)
        })
    }

    fn seek(&mut self, to: SeekFrom) -> FsFuture<'_, u64> {
        let length = match &self.open {
            Open::Reading(reading) => reading.entry().size_bytes,
            Open::Writing(Some(writing), _) => writing.length(),
            _ => self.at,
        };
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => length.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        let sought = at.ok_or(FsError::GeneralFailure).inspect(|at| self.at = *at);
        Box::pin(std::future::ready(sought))
    }

    /// Called once, when the body is complete, or shorter than it was announced.
    fn flush(&mut self) -> FsFuture<'_, ()> {
        Box::pin(async move {
            let Open::Writing(writing, announced) = &mut self.open else { return Ok(()) };
            let Some(writing) = writing.take() else { return Ok(()) };
            if announced.is_some_and(|announced| announced != writing.length()) {
                writing.leave().await.map_err(refused)?;
                return Err(FsError::GeneralFailure);
            }
            self.open = Open::Written(writing.commit(None).await.map_err(refused)?);
            Ok(())
        })
    }
}
