//! Which requests are refused before a handler sees them: those that a browser sends for a web page of someone else,
//! and those whose sender may not make them.
//!
//! A page can make its reader's browser send requests to any address, also to one that its own name is changed to
//! afterwards. Such a request carries the page's name as `Host`, its address as `Origin`, or says that it is
//! cross-site. None of our programs sends any of these. With TLS the browser itself checks the name. A unix socket is reached by a
//! browser too, through a tunnel (`ssh -L`).
//!
//! The controller's own pages are admitted. A browser sends their cookie without being asked by them, so a request that the cookie
//! speaks for also has to show that one of them has made it ([`by_own_page`]).

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::header::{CONNECTION, HOST, ORIGIN, UPGRADE};
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use perigee_model::Problem;

use crate::identity::Identity;
use crate::peer::Peer;
use crate::reply::Failure;

/// Browsers say with this where a request comes from.
const FETCH_SITE: &str = "sec-fetch-site";

/// What is checked of each request that comes over TCP.
#[derive(Debug, Clone, Default)]
pub(crate) struct Guard {
    /// The names under which the server listens; IP addresses need none.
    pub names: Arc<[String]>,
    /// Knows which certificates are revoked.
    pub identity: Option<Arc<Identity>>,
}

pub(crate) async fn check(guard: Guard, request: Request, next: Next) -> Response {
    let scheme = if guard.identity.is_some() { "https" } else { "http" };
    let refused = match request.extensions().get::<Peer>() {
        // A client of a unix socket may leave the Host out; a browser, behind a tunnel, does not.
        Some(Peer::Local) => {
            let headers = request.headers();
            let is_named = headers.contains_key(HOST);
            let named = if is_named { names_this_server(headers, &[]) } else { Ok(()) };
            named.and_then(|()| sent_by_a_page(headers, scheme)).err()
        }
        // A browser may have a user's password or an operator's certificate, and sends it with what any page asks for. The
        // name by which a client calls the server is checked by the client, with the server's certificate.
        Some(Peer::Stranger) => sent_by_a_page(request.headers(), scheme).err(),
        Some(Peer::Known(certified)) => {
            let checked = guard.identity.as_ref().map(|identity| identity.check(certified));
            let refusal = checked.and_then(Result::err).map(|refusal| refusal.to_string());
            refusal.or_else(|| sent_by_a_page(request.headers(), scheme).err())
        }
        Some(Peer::NotKnown) | None => {
            let headers = request.headers();
            let named = names_this_server(headers, &guard.names);
            named.and_then(|()| sent_by_a_page(headers, scheme)).err()
        }
    };
    match refused {
        None => next.run(request).await,
        Some(why) => {
            let what = format!("can't answer {} {}", request.method(), request.uri().path());
            let mut answer = Failure(Problem::forbidden(what, why)).into_response();
            // A client that has a new certificate meanwhile shows it over a new connection.
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            answer
        }
    }
}

fn text(value: Option<&HeaderValue>) -> Option<String> {
    value.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
}

fn host(headers: &HeaderMap) -> Result<String, String> {
    text(headers.get(HOST)).ok_or_else(|| "the request has no Host".to_owned())
}

/// # Errors
/// Why the request may be one that a web page has made whose own name was changed to this server's address.
fn names_this_server(headers: &HeaderMap, names: &[String]) -> Result<(), String> {
    let host = host(headers)?;
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() => name,
        _ => &host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    if bare.parse::<IpAddr>().is_err() && name != "localhost" && !names.iter().any(|n| n == name) {
        return Err(format!(
            "its Host is {name:?}, which is neither an IP address nor a name of this server"
        ));
    }
    Ok(())
}

/// # Errors
/// Why the request may be one that a web page of another server has made. With the same name, a page that was not encrypted is one of another
/// server too: anybody on the way may have made it.
fn sent_by_a_page(headers: &HeaderMap, scheme: &str) -> Result<(), String> {
    let origin = text(headers.get(ORIGIN));
    let is_own = |origin: &str| origin.split_once("://").is_some_and(|(of, _)| of == scheme);
    if let Some(origin) = origin.filter(|origin| !is_own(origin)) {
        return Err(format!("a web page of {origin:?} has sent it"));
    }
    of_this_server(headers)
}

/// Whether a request for which a browser's cookie speaks was made by a page of this server. What only reads may also be an address
/// that a person has typed.
///
/// # Errors
/// Why it may be one of another page's making.
pub fn by_own_page(method: &Method, headers: &HeaderMap) -> Result<(), String> {
    let reads = [Method::GET, Method::HEAD].contains(method) && !headers.contains_key(UPGRADE);
    if !reads && !headers.contains_key(ORIGIN) {
        return Err("it does not say which web page has sent it".to_owned());
    }
    of_this_server(headers)
}

fn of_this_server(headers: &HeaderMap) -> Result<(), String> {
    if let Some(origin) = text(headers.get(ORIGIN)) {
        let host = host(headers)?;
        if origin.split_once("://").is_none_or(|(_, of)| of != host) {
            return Err(format!("a web page of {origin:?} has sent it"));
        }
    }
    match text(headers.get(FETCH_SITE)).as_deref() {
        None | Some("same-origin" | "none") => Ok(()),
        Some(site) => Err(format!("a web page has sent it ({site})")),
    }
}

/// Says whether this peer may send a request with this method and path.
pub type MaySend = fn(&Peer, &Method, &[&str]) -> bool;

/// Refuses what a daemon's table of callers does not allow. It is asked before the routes are, so a new route is closed
/// until the table opens it.
///
/// A process of the same host may do everything: its socket is protected by the permissions of its directory. So may
/// whoever is not known, because plain TCP is only spoken where the user has asked for that. A server other than
/// [`crate::serve`] has to say who asks: without a [`Peer`] nothing is allowed.
pub fn restrict(router: Router, may: MaySend) -> Router {
    router.layer(from_fn(move |request: Request, next: Next| only(may, request, next)))
}

async fn only(may: MaySend, request: Request, next: Next) -> Response {
    let segments: Vec<&str> = request.uri().path().split('/').skip(1).collect();
    let refused = match request.extensions().get::<Peer>() {
        Some(Peer::Local | Peer::NotKnown) => None,
        Some(peer) if may(peer, request.method(), &segments) => None,
        Some(peer) => Some(peer.to_string()),
        None => Some("an unknown client".to_owned()),
    };
    match refused {
        None => next.run(request).await,
        Some(peer) => {
            let what = format!("can't answer {} {}", request.method(), request.uri().path());
            Failure(Problem::forbidden(what, format!("{peer} may not ask for this")))
                .into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(headers: &[(&'static str, &str)]) -> Result<(), String> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().expect("a value"));
        }
        names_this_server(&map, &["perigee.example".to_owned()])?;
        sent_by_a_page(&map, "http")
    }

    #[test]
    fn a_program_that_names_an_address_or_this_server_is_heard() {
        for host in
            ["10.0.0.1:7000", "[fd00::1]:7000", "127.0.0.1", "localhost:7", "perigee.example:7"]
        {
            check(&[("host", host)]).expect(host);
        }
        check(&[("host", "10.0.0.1:7"), ("origin", "http://10.0.0.1:7")]).expect("its own page");
        check(&[("host", "10.0.0.1:7"), ("sec-fetch-site", "same-origin")]).expect("its own page");
    }

    #[test]
    fn a_web_page_of_someone_else_is_not() {
        for headers in [
            &[][..],
            &[("host", "evil.example")],
            &[("host", "10.0.0.1.evil.example:7000")],
            &[("host", "10.0.0.1:7"), ("origin", "http://evil.example")],
            &[("host", "10.0.0.1:7"), ("origin", "null")],
            &[("host", "10.0.0.1:7"), ("origin", "https://10.0.0.1:7")],
            &[("host", "10.0.0.1:7"), ("origin", "http://10.0.0.1:8")],
            &[("host", "10.0.0.1:7"), ("sec-fetch-site", "cross-site")],
            &[("host", "10.0.0.1:7"), ("sec-fetch-site", "same-site")],
        ] {
            check(headers).expect_err(&format!("{headers:?}"));
        }
    }

    #[test]
    fn a_cookie_speaks_only_for_what_a_page_of_this_server_has_sent() {
        let ask = |method: &Method, headers: &[(&'static str, &str)]| {
            let mut map = HeaderMap::new();
            map.insert("host", "10.0.0.1:7".parse().expect("a value"));
            for (name, value) in headers {
                map.insert(*name, value.parse().expect("a value"));
            }
            by_own_page(method, &map)
        };
        let own = ("origin", "https://10.0.0.1:7");
        ask(&Method::GET, &[]).expect("an address that was typed");
        ask(&Method::GET, &[("sec-fetch-site", "none")]).expect("the same");
        ask(&Method::GET, &[("sec-fetch-site", "same-origin")]).expect("a link of a page");
        ask(&Method::POST, &[own, ("sec-fetch-site", "same-origin")]).expect("a form of a page");
        ask(&Method::GET, &[own, ("upgrade", "websocket")]).expect("a WebSocket of a page");
        for (method, headers) in [
            (Method::POST, &[][..]),
            (Method::DELETE, &[("sec-fetch-site", "same-origin")]),
            (Method::POST, &[("origin", "null")]),
            (Method::POST, &[("origin", "https://10.0.0.1:8")]),
            (Method::POST, &[own, ("sec-fetch-site", "cross-site")]),
            (Method::GET, &[("sec-fetch-site", "same-site")]),
            (Method::GET, &[("upgrade", "websocket")]),
            (Method::GET, &[("upgrade", "websocket"), ("origin", "https://10.0.0.1:8")]),
        ] {
            ask(&method, headers).expect_err(&format!("{method} {headers:?}"));
        }
    }
}
