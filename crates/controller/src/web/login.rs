//! Logging in with a token, and out again.
//!
//! The cookie has the token itself, so the token's end, its revocation and the removal of its user end what is shown too, and nothing is
//! kept here.

use axum::extract::{Query, Request, State};
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE, LOCATION, SET_COOKIE};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{Html, IntoResponse as _, Response};
use perigee_http::guard::by_own_page;
use perigee_http::{ClientAddress, Failure};
use perigee_model::Problem;
use perigee_model::tenant::AuditEntry;
use serde::Deserialize;

use super::{Shared, Web};
use crate::api::{cookie, note_unknown};
use crate::clock::now_ms;

/// A token and a path have not nearly as much.
const FORM_BYTES_MAX: usize = 8 << 10;

/// What the page is told, and its form says.
#[derive(Debug, Default, Deserialize)]
pub struct LogIn {
    #[serde(default)]
    token: String,
    /// The page to go to afterwards.
    #[serde(default)]
    to: String,
}

/// A path of this server, or the first page: nobody is sent elsewhere by a link to this page.
fn own_path(to: &str) -> &str {
    let is_own = to.starts_with('/') && !to.starts_with("//") && !to.contains('\\');
    let is_plain = to.bytes().all(|byte| byte.is_ascii_graphic());
    if is_own && is_plain && cookie::is_page(to.split('?').next().unwrap_or_default()) {
        to
    } else {
        "/"
    }
}

fn fingerprint(web: &Web) -> String {
    let is_secure = web.cluster.network.identity().is_some();
    if is_secure { web.cluster.authority.fingerprint().to_owned() } else { String::new() }
}

/// The page on which one logs in.
pub async fn form(State(web): Shared, uri: Uri) -> Html<String> {
    let asked = Query::<LogIn>::try_from_uri(&uri).map(|Query(asked)| asked).unwrap_or_default();
    Html(perigee_web::login("", own_path(&asked.to), &fingerprint(&web)))
}

/// Takes a token from the form, and has the browser keep it.
pub async fn log_in(State(web): Shared, request: Request) -> Result<Response, Failure> {
    by_own_page(&Method::POST, request.headers())
        .map_err(|why| Problem::forbidden("can't log in", why))?;
    let address = request.extensions().get::<ClientAddress>().and_then(|address| address.0);
    let asked = read(request).await?;
    let (token, to) = (asked.token.trim(), own_path(&asked.to).to_owned());
    let accounts = &web.cluster.accounts;
    let Some((user, used)) = accounts.by_token(token) else {
        let why = accounts.refusal(token, &web.cluster.clock);
        let from = address.map_or_else(|| "this host".to_owned(), |address| address.to_string());
        note_unknown(&web.cluster, &from, "POST /login", &why);
        let page = perigee_web::login(&format!("Can't log in: {why}."), &to, &fingerprint(&web));
        return Ok((StatusCode::UNAUTHORIZED, Html(page)).into_response());
    };
    let entry = AuditEntry {
        at_ms: now_ms(),
        who: format!("{}/{}", user.tenant, user.name),
        request: "POST /login".to_owned(),
        thing: format!("token {}", used.id),
        status: StatusCode::SEE_OTHER.as_u16(),
    };
    let cluster = web.cluster;
    // The disk may be slow, and the answer does not wait for it.
    tokio::task::spawn_blocking(move || cluster.audit.add(&user.tenant, entry));
    let life_s = used.expires_ms.saturating_sub(now_ms()) / 1000;
    let cookie = cookie::set(token, life_s);
    Ok((StatusCode::SEE_OTHER, [(SET_COOKIE, cookie), (LOCATION, to)]).into_response())
}

/// The fields of the form. They are written as a query is.
async fn read(request: Request) -> Result<LogIn, Problem> {
    let what = "can't log in";
    let body = axum::body::to_bytes(request.into_body(), FORM_BYTES_MAX).await;
    let body = body.map_err(|e| Problem::invalid(what, e))?;
    let text = str::from_utf8(&body).map_err(|e| Problem::invalid(what, e))?;
    let uri: Uri = format!("/?{text}").parse().map_err(|e| Problem::invalid(what, e))?;
    let fields = Query::<LogIn>::try_from_uri(&uri);
    fields.map(|Query(fields)| fields).map_err(|e| Problem::invalid(what, e.body_text()))
}

/// Has the browser forget the token. The token itself is good until its end, or until somebody revokes it.
pub async fn log_out(headers: HeaderMap) -> Result<Response, Failure> {
    by_own_page(&Method::POST, &headers).map_err(|why| Problem::forbidden("can't log out", why))?;
    let to = cookie::LOGIN.to_owned();
    let headers = [(SET_COOKIE, cookie::clear()), (LOCATION, to)];
    Ok((StatusCode::SEE_OTHER, headers).into_response())
}

/// The authority's certificate, which is no secret: with it a browser can trust these pages.
pub async fn authority(State(web): Shared) -> Response {
    let headers = [
        (CONTENT_TYPE, "application/x-pem-file"),
        (CONTENT_DISPOSITION, "attachment; filename=\"ca.pem\""),
    ];
    (headers, web.cluster.authority.ca_pem().to_owned()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_sent_to_another_server() {
        for own in ["/jobs", "/jobs/a-0001?rank=2", "/"] {
            assert_eq!(own_path(own), own);
        }
        for other in [
            "",
            "//evil.example",
            "https://evil.example",
            "/\\evil.example",
            "/jobs\r\nx: y",
            "/v1/jobs",
            "/login",
        ] {
            assert_eq!(own_path(other), "/", "{other:?}");
        }
    }
}
