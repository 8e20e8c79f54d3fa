//! The WebDAV door, `/dav/TENANT/PATH`. dav-server speaks the protocol; this is its filesystem. What it would understand
//! wrongly never gets there ([`headers`]).

mod headers;
mod locks;
mod properties;

use std::io::SeekFrom;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use bytes::{Buf, Bytes};
use dav_server::DavHandler;
use dav_server::davpath::DavPath;
use dav_server::fs::{
    DavDirEntry, DavFile, DavFileSystem, DavMetaData, DavProp, FsError, FsFuture, FsResult,
    FsStream, OpenOptions, ReadDirMeta,
};
use futures_util::{StreamExt, stream};
use perigee_http::Failure;
use perigee_model::data::FileEntry;
use perigee_model::{Problem, ProblemKind};

use crate::http::headers::{MODIFIED, modified_ms};
use crate::http::view_of;
use crate::listing::modified;
use crate::path::{Location, not_utf8};
use crate::repository::Repository;
use crate::transfer::{Reading, Writing};
use crate::upload::Begin;
use crate::view::View;
use locks::Locks;

const PREFIX: &str = "/dav";

/// How many entries of a directory are read at once.
const ENTRIES: usize = 256;

type Shared = State<(Arc<Repository>, Locks)>;

/// The repository over WebDAV (RFC 4918), classes 1 and 2, below `/dav`. Each request carries a view of what its user
/// may see.
pub fn router(repository: Arc<Repository>) -> Router {
    Router::new()
        .route("/dav", any(answer))
        .route("/dav/", any(answer))
        .route("/dav/{*path}", any(answer))
        .with_state((repository, Locks::default()))
}

async fn answer(State((repository, locks)): Shared, mut request: Request) -> Response {
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    let prepared = match view_of(&repository, &request) {
        Ok(view) => prepared(view, &locks, &mut request).await,
        Err(problem) => Err(problem),
    };
    let mut response = match prepared {
        Ok(filesystem) => answer_of_library(filesystem, locks, request).await,
        Err(problem) => Failure(problem).into_response(),
    };
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

async fn answer_of_library(filesystem: Filesystem, locks: Locks, request: Request) -> Response {
    let keeps_time = filesystem.modified_ms.is_some();
    let handler = DavHandler::builder()
        .principal(filesystem.view.account().user.clone())
        .filesystem(Box::new(filesystem))
        .locksystem(Box::new(locks))
        .strip_prefix(PREFIX)
        .build_handler();
    let mut response = handler.handle(request).await.map(Body::new);
    if keeps_time && response.status().is_success() {
        response.headers_mut().insert(MODIFIED, HeaderValue::from_static("accepted"));
    }
    response
}

/// The files for a request, when it is one that may be answered.
async fn prepared(view: View, locks: &Locks, request: &mut Request) -> Result<Filesystem, Problem> {
    headers::check(request.headers_mut())?;
    let at = place(request.uri().path())?;
    check_bounds(request, &at)?;
    let method = request.method().clone();
    if let Some(max) = headers::body_bytes_max(&method) {
        let body = std::mem::take(request.body_mut());
        let body = axum::body::to_bytes(body, max).await;
        let body = body.map_err(|e| Problem::invalid("can't answer the request", e))?;
        let body = headers::checked_body(&method, body.to_vec())?;
        if method.as_str() == "LOCK" && !body.is_empty() {
            view.may_write(at.clone()).await?;
            if let Location::In(tenant, _) = &at {
                locks.check_room(tenant)?;
            }
        }
        *request.body_mut() = Body::from(body);
    }
    let modified_ms = match method.as_str() {
        "PUT" | "COPY" | "MOVE" => modified_ms(request.headers())?,
        _ => None,
    };
    let mut filesystem = Filesystem { view, method, replaces: None, modified_ms };
    if matches!(filesystem.method.as_str(), "COPY" | "MOVE") {
        let to = place(&headers::destination(request.headers())?)?;
        let overwrites = headers::overwrites(request.headers())?;
        filesystem.replaces = replaced(&filesystem, at, to).await?.filter(|_| overwrites);
    }
    Ok(filesystem)
}

/// What the path of an address means: as the library takes it, with `.` and `..` in it.
fn place(path: &str) -> Result<Location, Problem> {
    let invalid = |_| Problem::invalid("can't answer the request", "its path can't be understood");
    let mut path = DavPath::new(path).map_err(invalid)?;
    path.set_prefix(PREFIX).map_err(invalid)?;
    meant(&path)
}

fn meant(path: &DavPath) -> Result<Location, Problem> {
    let text = std::str::from_utf8(path.as_bytes()).map_err(|_| not_utf8(path.as_bytes()))?;
    match text.trim_start_matches('/').split_once('/') {
        None if text.trim_matches('/').is_empty() => Ok(Location::Top),
        None => Location::new(text.trim_matches('/'), ""),
        Some((tenant, path)) => Location::new(tenant, path),
    }
}

/// All of a tenant's files, or of all tenants.
fn is_all(at: &Location) -> bool {
    match at {
        Location::Top => true,
        Location::In(_, path) => path.is_root(),
    }
}

/// A list of a whole tree could be of any length: RFC 4918, 9.1 lets a server refuse it.
fn check_bounds(request: &Request, at: &Location) -> Result<(), Problem> {
    let depth = request.headers().get("depth").map(|depth| depth.as_bytes());
    let is_list = request.method().as_str() == "PROPFIND";
    if is_list && !matches!(depth, Some(b"0" | b"1")) {
        return Err(Problem::forbidden("can't list a whole tree", "its length has no limit")
            .next("list one directory at a time, with `Depth: 1`"));
    }
    let is_change = ["DELETE", "MOVE", "COPY"].contains(&request.method().as_str());
    if is_change && is_all(at) {
        return Err(all_at_once());
    }
    Ok(())
}

fn all_at_once() -> Problem {
    Problem::forbidden("can't do that with all files of a tenant", "it may be a mistake")
        .next("name what is in the tenant's directory")
}

/// The file that a copy or a move replaces. What else is at the destination the library deletes first, so whatever could
/// fail after that is looked at before.
async fn replaced(
    filesystem: &Filesystem,
    from: Location,
    to: Location,
) -> Result<Option<Location>, Problem> {
    let Filesystem { view, method, .. } = filesystem;
    let is_move = method.as_str() == "MOVE";
    let what = || format!("can't {} repo:/{from} to repo:/{to}", method.as_str().to_lowercase());
    if is_all(&to) {
        return Err(all_at_once());
    }
    if let (Location::In(of, old), Location::In(other, new)) = (&from, &to) {
        if of == other && old != new && (old.is_within(new) || new.is_within(old)) {
            return Err(Problem::forbidden(what(), "one of them is in the other"));
        }
        if is_move && of != other {
            return Err(Problem::forbidden(what(), "they are of two tenants")
                .next("copy the file, and delete the old one"));
        }
    }
    // The library says what is not there.
    let Ok(source) = view.entry(from.clone()).await else { return Ok(None) };
    for changed in [Some(&to), is_move.then_some(&from)].into_iter().flatten() {
        match view.may_write(changed.clone()).await {
            Err(problem) if problem.kind != ProblemKind::NotFound => return Err(problem),
            _ => {}
        }
    }
    let there = view.entry(to.clone()).await;
    let is_file = there.is_ok_and(|there| !there.is_directory()) && !source.is_directory();
    Ok(is_file.then_some(to))
}

#[derive(Debug, Clone)]
struct Filesystem {
    view: View,
    method: Method,
    /// The file that the request replaces. It is not deleted first: it is there until the new one is.
    replaces: Option<Location>,
    /// When the client says that what it writes was changed.
    modified_ms: Option<u64>,
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
        ProblemKind::Unavailable | ProblemKind::Superseded | ProblemKind::Internal => {
            FsError::GeneralFailure
        }
    }
}

fn location(path: &DavPath) -> FsResult<Location> {
    meant(path).map_err(refused)
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
        let mut writing = self.view.write(location, how, false).await.map_err(refused)?;
        if self.method.as_str() == "LOCK" {
            // What is locked and not there is made empty: RFC 4918, 7.3.
            let entry = writing.commit(None).await.map_err(refused)?;
            return Ok(Box::new(OpenFile { open: Open::Written(entry), at: 0 }));
        }
        if let Some(modified_ms) = self.modified_ms {
            writing.set_modified(modified_ms).await.map_err(refused)?;
        }
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
            // A DELETE is also of an upload that was cut.
            let entry = match self.method == Method::DELETE {
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
        Box::pin(async move {
            let location = location(path)?;
            if self.replaces.as_ref() == Some(&location) {
                return Ok(());
            }
            self.view.remove_file(location).await.map_err(refused)
        })
    }

    fn rename<'a>(&'a self, from: &'a DavPath, to: &'a DavPath) -> FsFuture<'a, ()> {
        Box::pin(async move {
            let (from, to) = (location(from)?, location(to)?);
            self.view.rename(from, to.clone(), true).await.map_err(refused)?;
            match self.modified_ms {
                Some(modified_ms) => self.view.set_modified(to, modified_ms).await.map_err(refused),
                None => Ok(()),
            }
        })
    }

    fn copy<'a>(&'a self, from: &'a DavPath, to: &'a DavPath) -> FsFuture<'a, ()> {
        Box::pin(async move {
            let (from, to) = (location(from)?, location(to)?);
            self.view.copy(from, to, self.modified_ms).await.map_err(refused)
        })
    }

    fn have_props<'a>(
        &'a self,
        _path: &'a DavPath,
    ) -> Pin<Box<dyn Future<Output = bool> + Send + 'a>> {
        Box::pin(std::future::ready(true))
    }

    fn patch_props<'a>(
        &'a self,
        path: &'a DavPath,
        patch: Vec<(bool, DavProp)>,
    ) -> FsFuture<'a, Vec<(StatusCode, DavProp)>> {
        Box::pin(async move { properties::patch(&self.view, location(path)?, patch).await })
    }

    fn get_props<'a>(&'a self, path: &'a DavPath, _content: bool) -> FsFuture<'a, Vec<DavProp>> {
        Box::pin(async move {
            let noted = self.view.properties(location(path)?).await.map_err(refused)?;
            Ok(noted.into_iter().map(properties::shown).collect())
        })
    }

    fn get_prop<'a>(&'a self, path: &'a DavPath, prop: DavProp) -> FsFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let noted = self.view.properties(location(path)?).await.map_err(refused)?;
            let namespace = prop.namespace.unwrap_or_default();
            let asked = noted.into_iter().find(|one| one.is(&namespace, &prop.name));
            asked.map(|one| one.xml.into_bytes()).ok_or(FsError::NotFound)
        })
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

    /// Half of the hash: clients put a few of them into one header, for which some have little room.
    fn etag(&self) -> Option<String> {
        self.0.sha256.as_deref()?.get(..32).map(str::to_owned)
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
