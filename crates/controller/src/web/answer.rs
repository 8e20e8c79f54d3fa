//! What all pages have in common: the headers that a browser keeps to, and refusals as pages.

use std::io::Read as _;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY,
    CONTENT_TYPE, HeaderValue, LOCATION, REFERRER_POLICY, SET_COOKIE, VARY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::middleware::Next;
use axum::response::{Html, IntoResponse as _, Response};
use flate2::read::GzDecoder;
use perigee_http::{Failure, Peer};
use perigee_model::Problem;
use perigee_model::percent::encoded_path;
use perigee_web::parts::{Page, Section, Tone, Trouble};
use perigee_web::{CONSOLE, Frame, SCRIPT, STYLE, TERMINAL, TERMINAL_STYLE, VIEWER, document};

use crate::api::cookie;

/// Nothing but what this server sends as files of their own: no text of a user becomes a program, whatever a page shows.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
    connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// More of a problem is not read.
const PROBLEM_BYTES_MAX: usize = 64 << 10;

/// The headers of every page. A form says which page it is of only where the policy of referrers lets it (`same-origin`).
const HEADERS: [(HeaderName, &str); 5] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// A file that has another path when it has other content.
const KEPT: &str = "public, max-age=31536000, immutable";

pub async fn style() -> Response {
    file(CSS, STYLE)
}

pub async fn script() -> Response {
    file(JAVASCRIPT, SCRIPT)
}

pub async fn console() -> Response {
    file(JAVASCRIPT, CONSOLE)
}

pub async fn terminal_style() -> Response {
    file(CSS, TERMINAL_STYLE)
}

pub async fn terminal(headers: HeaderMap) -> Result<Response, Failure> {
    Ok(compressed(&headers, TERMINAL)?)
}

pub async fn viewer(headers: HeaderMap) -> Result<Response, Failure> {
    Ok(compressed(&headers, VIEWER)?)
}

const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

fn file(kind: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, kind), (CACHE_CONTROL, KEPT)], text).into_response()
}

/// A script that is kept compressed. All browsers take it so.
fn compressed(headers: &HeaderMap, script: &'static [u8]) -> Result<Response, Problem> {
    let takes = headers.get(ACCEPT_ENCODING).and_then(|takes| takes.to_str().ok());
    let mut answer = if takes.is_some_and(|takes| takes.contains("gzip")) {
        ([(CONTENT_ENCODING, "gzip")], script).into_response()
    } else {
        let mut plain = Vec::new();
        let read = GzDecoder::new(script).read_to_end(&mut plain);
        read.map_err(|e| Problem::internal("can't read a script of the pages", e))?;
        plain.into_response()
    };
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(JAVASCRIPT));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static(KEPT));
    headers.insert(VARY, HeaderValue::from_static("accept-encoding"));
    Ok(answer)
}

/// Makes a page of a refusal, sends whoever is not known to the page where one logs in, and adds the headers.
pub async fn finish(request: Request, next: Next) -> Response {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let headers = request.headers();
    let has_cookie = cookie::token(headers, request.uri().path()).is_some();
    let is_stranger = matches!(request.extensions().get::<Peer>(), Some(Peer::Stranger) | None);
    let is_unknown = is_stranger && !has_cookie && !headers.contains_key(AUTHORIZATION);
    let is_page = cookie::is_page(request.uri().path());
    let answer = next.run(request).await;
    let status = answer.status();
    // The cookie's token is wrong, or over.
    let is_over = has_cookie && status == StatusCode::UNAUTHORIZED;
    let mut answer = if is_page && (is_over || (is_unknown && status == StatusCode::FORBIDDEN)) {
        to_login(&path, is_over)
    } else if status.is_client_error() || status.is_server_error() {
        refusal(answer).await
    } else {
        answer
    };
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    // What a page shows is nobody else's.
    let headers = answer.headers_mut();
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    answer
}

/// Sends a browser to the page where one logs in, and from there back. What was to be done is not done unasked: its question is asked
/// again, which has the same path.
fn to_login(path: &str, is_over: bool) -> Response {
    // A stream of events is no page to come back to.
    if path.starts_with("/live") {
        let mut answer = StatusCode::UNAUTHORIZED.into_response();
        forget(&mut answer, is_over);
        return answer;
    }
    let to = match path {
        "/" => cookie::LOGIN.to_owned(),
        path => format!("{}?to={}", cookie::LOGIN, encoded_path(path)),
    };
    let mut answer = StatusCode::SEE_OTHER.into_response();
    if let Ok(to) = HeaderValue::from_str(&to) {
        answer.headers_mut().insert(LOCATION, to);
    }
    forget(&mut answer, is_over);
    answer
}

fn forget(answer: &mut Response, is_over: bool) {
    if is_over && let Ok(cookie) = HeaderValue::from_str(&cookie::clear()) {
        answer.headers_mut().insert(SET_COOKIE, cookie);
    }
}

/// A problem as a page. What is no problem stays as it is.
async fn refusal(answer: Response) -> Response {
    let (mut parts, body) = answer.into_parts();
    let is_json = parts.headers.get(CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if !is_json {
        return Response::from_parts(parts, body);
    }
    let bytes = to_bytes(body, PROBLEM_BYTES_MAX).await.unwrap_or_default();
    let Ok(problem) = serde_json::from_slice::<Problem>(&bytes) else {
        return Response::from_parts(parts, Body::from(bytes));
    };
    parts.headers.remove(CONTENT_TYPE);
    parts.headers.remove("content-length");
    let page = Html(document::render(&of_problem(&problem), &Frame::default()));
    (parts.status, parts.headers, page).into_response()
}

fn of_problem(problem: &Problem) -> Page {
    let trouble = Trouble {
        tone: Tone::Bad,
        what: problem.what.clone(),
        href: String::new(),
        why: problem.why.clone(),
        next: problem.next.clone(),
    };
    let section = Section::new("problem", "What is wrong", "").linked("The first page", "/");
    Page::new("This can't be shown", "", vec![Section { troubles: vec![trouble], ..section }])
}
