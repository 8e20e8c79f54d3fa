//! The HTTP door, below `/v1/data/TENANT/PATH`. Each request needs an [`Account`] among its extensions.
//!
//! | request | does |
//! |---|---|
//! | `GET`, `HEAD` | the file, or a range of it (`Range`); `ETag` is its SHA-256. Of a directory: a page of its list |
//! | `GET ?stat` | what it is, as JSON |
//! | `GET ?after=NAME&limit=N` | a later page of a directory |
//! | `PUT` | writes a file. With `X-Content-Sha256` only if the content has that SHA-256 |
//! | `PUT`, `Content-Range: bytes A-B/N` | continues an upload that was cut. `Upload-Offset` in a `HEAD`'s answer says where |
//! | `PUT`, `Upload-Offset: A` | the same by a client that does not know where the file ends: it ends with the body |
//! | `DELETE` | deletes a file or an empty directory, and what there is of uploads there that were cut |
//! | `GET ?uploads` | the uploads to a path and below it that were cut |
//! | `POST ?directory` | makes a directory |
//! | `PUT`, `DELETE` with `If-Match`, `If-None-Match` | only if what is there has, or has not, one of these tags; `*` is any file |
//! | `PUT`, `X-OC-Mtime: SECONDS` | it was last changed then, since 1970; `Last-Modified` says so |
//! | `POST ?modified=SECONDS` | says when a file or a directory was last changed |
//! | `POST ?rename=PATH` | gives it another name in the same tenant's tree |
//! | `GET ?shares`, `PUT ?share=TENANT`, `DELETE ?share=TENANT` | who else may read it |
//! | `POST ?upload`, then `PUT`, `GET`, `POST`, `DELETE` with `?upload=ID` | an upload in parts, see [`parallel`] |

pub(crate) mod headers;
pub mod parallel;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, Request, State};
use axum::http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, LAST_MODIFIED,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use futures_util::{StreamExt, stream};
use perigee_http::{Failure, Json};
use perigee_model::data::{BeginUpload, CONTENT_SHA256, FileEntry, OWN_TENANT};
use perigee_model::limits::FILE_LIST;
use perigee_model::{Problem, TenantName};
use serde::Deserialize;

use crate::account::Account;
use crate::dav;
use crate::path::Location;
use crate::repository::Repository;
use crate::transfer::{Reading, Writing};
use crate::upload::Begin;
use crate::view::View;
use headers::{
    ContentRange, Expected, Wanted, content_range, expected, is_unchanged, modified_ms, modified_s,
    wanted,
};

/// Where an upload that was cut can be continued; in a request, where it is.
const UPLOAD_OFFSET: &str = "upload-offset";
/// The most bytes of a request in JSON.
const JSON_BYTES_MAX: usize = 64 << 10;
/// How many bytes of a file are sent at once.
const SEND_BYTES: usize = 256 << 10;

#[derive(Debug, Deserialize)]
struct Options {
    stat: Option<String>,
    after: Option<String>,
    limit: Option<usize>,
    directory: Option<String>,
    rename: Option<String>,
    modified: Option<String>,
    shares: Option<String>,
    share: Option<TenantName>,
    upload: Option<String>,
    uploads: Option<String>,
}

/// The HTTP doors: `/v1/data/` and, for WebDAV, `/dav/`.
pub fn router(repository: Arc<Repository>) -> Router {
    Router::new()
        .route("/v1/data", any(top))
        .route("/v1/data/{tenant}", any(of_tenant))
        .route("/v1/data/{tenant}/", any(of_tenant))
        .route("/v1/data/{tenant}/{*path}", any(of_path))
        .with_state(Arc::clone(&repository))
        .merge(dav::router(repository))
}

type Shared = State<Arc<Repository>>;
type Asked = Result<Query<Options>, QueryRejection>;

async fn top(repository: Shared, options: Asked, request: Request) -> Response {
    answer(repository, None, options, request).await
}

async fn of_tenant(
    repository: Shared,
    Path(tenant): Path<String>,
    options: Asked,
    request: Request,
) -> Response {
    answer(repository, Some((tenant, String::new())), options, request).await
}

async fn of_path(
    repository: Shared,
    Path((tenant, path)): Path<(String, String)>,
    options: Asked,
    request: Request,
) -> Response {
    answer(repository, Some((tenant, path)), options, request).await
}

fn locate(view: &View, named: Option<(String, String)>) -> Result<Location, Problem> {
    let Some((tenant, path)) = named else { return Ok(Location::Top) };
    let own = view.account().tenant.as_str();
    Location::new(if tenant == OWN_TENANT { own } else { &tenant }, &path)
}

/// The view of the account that sends a request.
pub fn view_of(repository: &Arc<Repository>, request: &Request) -> Result<View, Problem> {
    let account = request.extensions().get::<Account>().cloned().ok_or_else(|| {
        Problem::forbidden("can't use the repository", "it is not known who asks")
    })?;
    Ok(View::new(Arc::clone(repository), account))
}

async fn answer(
    State(repository): Shared,
    named: Option<(String, String)>,
    options: Asked,
    request: Request,
) -> Response {
    let Query(options) = match options {
        Ok(options) => options,
        Err(e) => {
            return Failure(Problem::invalid("request query", e.body_text())).into_response();
        }
    };
    let view = view_of(&repository, &request);
    let located = view.and_then(|view| Ok((locate(&view, named)?, view)));
    let (location, view) = match located {
        Ok(both) => both,
        Err(problem) => return Failure(problem).into_response(),
    };
    let may_continue = *request.method() == Method::HEAD || *request.method() == Method::PUT;
    let answered = match *request.method() {
        Method::GET | Method::HEAD => get(&view, &location, options, request).await,
        Method::PUT => put(&view, &location, options, request).await,
        Method::POST => post(&view, &location, options, request).await,
        Method::DELETE => delete(&view, &location, options, request.headers()).await,
        _ => Err(Problem::invalid("can't answer the request", "files know no such method")
            .next("WebDAV is spoken at /dav/TENANT/PATH")),
    };
    let is_complete = answered.as_ref().is_ok_and(|done| done.status() == StatusCode::CREATED);
    let mut response = answered.unwrap_or_else(|problem| Failure(problem).into_response());
    if may_continue
        && !is_complete
        && let Some(bytes) = view.unfinished_bytes(location).await
    {
        response.headers_mut().insert(UPLOAD_OFFSET, HeaderValue::from(bytes));
    }
    response
}

fn ok<T: serde::Serialize>(value: T) -> Result<Response, Problem> {
    Ok(Json(value).into_response())
}

async fn get(
    view: &View,
    location: &Location,
    options: Options,
    request: Request,
) -> Result<Response, Problem> {
    if let Some(id) = &options.upload {
        return ok(parallel::state(view, location, id).await?);
    }
    if options.shares.is_some() {
        return ok(view.shares(location.clone()).await?);
    }
    if options.uploads.is_some() {
        return ok(view.cut_uploads(location.clone()).await?);
    }
    let entry = view.entry(location.clone()).await?;
    if options.stat.is_some() {
        return ok(entry);
    }
    if entry.is_directory() {
        let limit = options.limit.unwrap_or(1000);
        FILE_LIST.check(limit).map_err(|e| e.problem("can't list a directory"))?;
        return ok(view.list(location.clone(), options.after, limit).await?);
    }
    if is_unchanged(request.headers(), &entry) {
        return Ok(with_version(StatusCode::NOT_MODIFIED.into_response(), &entry));
    }
    let range = wanted(request.headers(), &entry);
    if *request.method() == Method::HEAD {
        return Ok(file_response(&entry, &range, Body::empty()));
    }
    let reading = view.read(location.clone()).await?;
    // The file may have been replaced since it was looked at.
    let entry = reading.entry().clone();
    let range = wanted(request.headers(), &entry);
    let body = match &range {
        Wanted::Nothing => Body::empty(),
        Wanted::All => send(reading, 0, entry.size_bytes),
        Wanted::Part(from, until) => send(reading, *from, *until),
    };
    Ok(file_response(&entry, &range, body))
}

fn with_version(mut response: Response, entry: &FileEntry) -> Response {
    let etag = entry.sha256.as_ref().and_then(|sha256| format!("\"{sha256}\"").parse().ok());
    if let Some(etag) = etag {
        response.headers_mut().insert(ETAG, etag);
    }
    if let Ok(modified) = httpdate::fmt_http_date(modified_s(entry)).parse() {
        response.headers_mut().insert(LAST_MODIFIED, modified);
    }
    response
}

/// A file's content is never a page: it is data, whatever a browser would make of it.
fn file_response(entry: &FileEntry, range: &Wanted, body: Body) -> Response {
    let size = entry.size_bytes;
    let (status, length, part) = match range {
        Wanted::Nothing => (StatusCode::RANGE_NOT_SATISFIABLE, 0, Some(format!("bytes */{size}"))),
        Wanted::All => (StatusCode::OK, size, None),
        Wanted::Part(from, until) => (
            StatusCode::PARTIAL_CONTENT,
            until - from,
            Some(format!("bytes {from}-{}/{size}", until - 1)),
        ),
    };
    let mut response = with_version((status, body).into_response(), entry);
    let headers = response.headers_mut();
    headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(part) = part.and_then(|part| part.parse().ok()) {
        headers.insert(CONTENT_RANGE, part);
    }
    response
}

fn send(reading: Reading, from: u64, until: u64) -> Body {
    let pieces = stream::try_unfold((reading, from), move |(mut reading, at)| async move {
        let left = usize::try_from(until - at).unwrap_or(SEND_BYTES);
        let piece = reading.read(at, left.min(SEND_BYTES)).await;
        let piece = piece.map_err(|problem| std::io::Error::other(problem.to_string()))?;
        let next = at + piece.len() as u64;
        Ok::<_, std::io::Error>((!piece.is_empty()).then_some((piece, (reading, next))))
    });
    Body::from_stream(pieces)
}

async fn put(
    view: &View,
    location: &Location,
    options: Options,
    request: Request,
) -> Result<Response, Problem> {
    let (head, body) = request.into_parts();
    let range = content_range(&head.headers)?;
    if let Some(id) = &options.upload {
        return ok(parallel::part(view, location, id, range, body).await?);
    }
    if let Some(with) = options.share {
        view.share(location.clone(), with, true).await?;
        return ok(());
    }
    let from = match (&range, upload_offset(&head.headers)?) {
        (None, at) => at,
        (Some(range), None) => Some(range.from),
        (Some(_), Some(_)) => {
            let why = "it has a Content-Range and an Upload-Offset";
            return Err(Problem::invalid("can't write a file", why).next("send one of them"));
        }
    };
    let modified_ms = modified_ms(&head.headers)?;
    let expected = expected(&head.headers)?;
    if let Some(refused) = failed(view, location, expected.as_ref()).await {
        return Ok(refused);
    }
    let how = from.map_or(Begin::Empty, Begin::Continue);
    let mut writing = view.write(location.clone(), how, true).await?;
    if let Some(expected) = expected {
        writing.expect(expected).await?;
    }
    if let Err(problem) = receive(&mut writing, from.unwrap_or(0), range.as_ref(), body).await {
        // What has arrived is kept, also if the disk does not take more; but not if the quota doesn't.
        return Err(writing.leave().await.err().unwrap_or(problem));
    }
    if let Some(ContentRange { until, total: Some(total), .. }) = range
        && until < total
    {
        writing.leave().await?;
        return Ok(StatusCode::ACCEPTED.into_response());
    }
    if let Some(modified_ms) = modified_ms {
        writing.set_modified(modified_ms).await?;
    }
    let entry = writing.commit(expected_sha256(&head.headers)?).await?;
    Ok(with_version((StatusCode::CREATED, Json(entry.clone())).into_response(), &entry))
}

/// The answer to a client that expects something else to be there. It is told before all bytes have come; what changes
/// meanwhile is seen when the file gets its name.
async fn failed(view: &View, at: &Location, expected: Option<&Expected>) -> Option<Response> {
    let expected = expected?;
    let there = view.entry(at.clone()).await.ok();
    if expected.holds(there.as_ref()) {
        return None;
    }
    let problem = Expected::failed(format!("can't change repo:/{at}"));
    let mut response = Failure(problem).into_response();
    *response.status_mut() = StatusCode::PRECONDITION_FAILED;
    Some(response)
}

async fn receive(
    writing: &mut Writing,
    mut at: u64,
    range: Option<&ContentRange>,
    body: Body,
) -> Result<(), Problem> {
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|e| Problem::unavailable("can't receive a file", e))?;
        writing.write(at, &piece).await?;
        at += piece.len() as u64;
    }
    match range {
        Some(range) if at != range.until => {
            let why =
                format!("its Content-Range ends at {}, and its bytes end at {at}", range.until);
            Err(Problem::invalid("can't receive a file", why))
        }
        _ => Ok(()),
    }
}

fn upload_offset(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    let Some(value) = headers.get(UPLOAD_OFFSET) else { return Ok(None) };
    match value.to_str().ok().and_then(headers::number) {
        Some(at) => Ok(Some(at)),
        None => Err(Problem::invalid("can't write a file", "its Upload-Offset is not a number")),
    }
}

fn expected_sha256(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get(CONTENT_SHA256) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().to_ascii_lowercase();
    match crate::listing::is_sha256(&text) {
        true => Ok(Some(text)),
        false => Err(Problem::invalid(
            "can't write a file",
            "X-Content-Sha256 is not a SHA-256 of 64 hexadecimal digits",
        )),
    }
}

async fn post(
    view: &View,
    location: &Location,
    options: Options,
    request: Request,
) -> Result<Response, Problem> {
    match options {
        Options { upload: Some(id), .. } if id.is_empty() => {
            let body = axum::body::to_bytes(request.into_body(), JSON_BYTES_MAX).await;
            let body = body.map_err(|e| Problem::invalid("can't begin an upload", e))?;
            let begin: BeginUpload = serde_json::from_slice(&body)
                .map_err(|e| Problem::invalid("can't begin an upload", e))?;
            ok(parallel::begin(view, location, begin).await?)
        }
        Options { upload: Some(id), .. } => ok(parallel::complete(view, location, &id).await?),
        Options { rename: Some(to), .. } => {
            let Location::In(tenant, _) = location else {
                return Err(Problem::conflict("can't rename /", "it always exists"));
            };
            let to = Location::new(tenant.as_str(), &to)?;
            view.rename(location.clone(), to, false).await?;
            ok(())
        }
        Options { modified: Some(at), .. } => {
            let why = "it is no number of seconds since 1970";
            let at = headers::unix_time_ms(&at);
            let at = at.ok_or_else(|| Problem::invalid("can't set the time of a file", why))?;
            view.set_modified(location.clone(), at).await?;
            ok(())
        }
        Options { directory: Some(_), .. } => {
            view.make_directory(location.clone()).await?;
            ok(())
        }
        _ => Err(Problem::invalid(
            "can't answer the request",
            "a POST needs ?upload, ?rename, ?modified or ?directory",
        )
        .next("send a file with PUT")),
    }
}

async fn delete(
    view: &View,
    location: &Location,
    options: Options,
    headers: &HeaderMap,
) -> Result<Response, Problem> {
    if let Some(refused) = failed(view, location, expected(headers)?.as_ref()).await {
        return Ok(refused);
    }
    if let Some(id) = &options.upload {
        parallel::drop_upload(view, location, id).await?;
    } else if let Some(with) = options.share {
        view.share(location.clone(), with, false).await?;
    } else if view.entry(location.clone()).await.is_ok_and(|entry| entry.is_directory()) {
        view.remove_directory(location.clone()).await?;
    } else {
        view.remove_file(location.clone()).await?;
    }
    ok(())
}
