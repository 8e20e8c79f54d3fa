//! Who may send which request to the controller. A process of the controller's host may do everything over the unix
//! socket, which is protected by the permissions of its directory; so may an operator's certificate, and with `--insecure`
//! whoever sends no token. A user is known by its token, over any connection. A browser has the token in a cookie ([`super::cookie`]), which
//! counts for the pages only, and only if one of them has sent the request.
//!
//! [`TABLE`] says who may ask for what. What is not in it is for admins only. Which things a user sees is decided by
//! [`super::caller`].

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use perigee_http::guard::by_own_page;
use perigee_http::{ClientAddress, Failure, NOTICE_HEADER, Peer, PeerIdentity};
use perigee_model::tenant::{AuditEntry, Role};
use perigee_model::{HostId, Problem, TenantName};

use super::caller::Caller;
use super::cookie;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::term;

/// Who may send a request. Admins may send all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum May {
    /// Whoever it is.
    Anybody,
    /// A client that has neither a certificate nor a token.
    Stranger,
    /// The host whose name is in the path.
    ThisHost,
    /// Any host.
    Host,
    /// Users of every role. They see their own tenant's things.
    Member,
    /// Users who see all of their tenant.
    Operator,
    Admin,
}

/// `{x}` stands for one part of a path, and `{*x}` for all that follows; `*` is every method.
#[rustfmt::skip]
pub const TABLE: &[(May, &str, &str)] = &[
    // The pages that people look at.
    (May::Anybody,  "GET",    "/login"),
    (May::Anybody,  "POST",   "/login"),
    (May::Anybody,  "POST",   "/logout"),
    (May::Anybody,  "GET",    "/authority.pem"),
    (May::Anybody,  "GET",    "/web/style.css"),
    (May::Anybody,  "GET",    "/web/page.js"),
    (May::Anybody,  "GET",    "/web/console.js"),
    (May::Anybody,  "GET",    "/web/xterm.css"),
    (May::Anybody,  "GET",    "/web/xterm.mjs"),
    (May::Anybody,  "GET",    "/web/novnc.mjs"),
    (May::Member,   "GET",    "/"),
    (May::Member,   "GET",    "/live"),
    (May::Member,   "GET",    "/jobs"),
    (May::Member,   "GET",    "/jobs/{job}"),
    (May::Member,   "GET",    "/jobs/{job}/output.tar"),
    (May::Member,   "GET",    "/jobs/{job}/cancel"),
    (May::Member,   "POST",   "/jobs/{job}/cancel"),
    (May::Member,   "GET",    "/queue"),
    (May::Member,   "GET",    "/vms"),
    (May::Member,   "GET",    "/vms/{vm}"),
    (May::Member,   "GET",    "/vms/{vm}/console"),
    (May::Member,   "GET",    "/vms/{vm}/console/attach"),
    (May::Member,   "GET",    "/vms/{vm}/screen"),
    (May::Member,   "GET",    "/vms/{vm}/vnc"),
    (May::Member,   "GET",    "/vms/{vm}/start"),
    (May::Member,   "POST",   "/vms/{vm}/start"),
    (May::Member,   "GET",    "/vms/{vm}/stop"),
    (May::Member,   "POST",   "/vms/{vm}/stop"),
    (May::Member,   "GET",    "/volumes"),
    (May::Member,   "GET",    "/volumes/{volume}"),
    (May::Member,   "GET",    "/sites"),
    (May::Operator, "GET",    "/audit"),
    (May::Operator, "GET",    "/tenants"),
    (May::Operator, "GET",    "/tenants/{tenant}"),
    (May::Admin,    "GET",    "/hosts"),
    (May::Admin,    "GET",    "/hosts/{host}"),
    (May::Admin,    "GET",    "/hosts/{host}/drain"),
    (May::Admin,    "POST",   "/hosts/{host}/drain"),
    (May::Admin,    "GET",    "/hosts/{host}/undrain"),
    (May::Admin,    "POST",   "/hosts/{host}/undrain"),
    (May::Admin,    "GET",    "/rentals"),
    (May::Admin,    "GET",    "/rentals/{rental}"),
    // The API, and the doors for files.
    (May::Stranger, "POST",   "/v1/enrol"),
    (May::Stranger, "POST",   "/v1/enrol/check"),
    (May::ThisHost, "GET",    "/v1/hosts/{host}"),
    (May::ThisHost, "POST",   "/v1/hosts/{host}/check"),
    (May::ThisHost, "PUT",    "/v1/hosts/{host}"),
    (May::ThisHost, "POST",   "/v1/hosts/{host}/certificate"),
    (May::ThisHost, "POST",   "/v1/hosts/{host}/stops"),
    (May::ThisHost, "POST",   "/v1/hosts/{host}/shuts-down"),
    (May::Host,     "GET",    "/v1/revoked"),
    (May::Member,   "GET",    "/v1/me"),
    (May::Member,   "GET",    "/v1/openapi.json"),
    (May::Member,   "GET",    "/v1/sites"),
    (May::Member,   "GET",    "/v1/images"),
    (May::Member,   "POST",   "/v1/images"),
    (May::Member,   "POST",   "/v1/uploads"),
    (May::Member,   "GET",    "/v1/images/{image}"),
    (May::Member,   "DELETE", "/v1/images/{image}"),
    (May::Member,   "PUT",    "/v1/images/{image}/leave-site"),
    (May::Member,   "POST",   "/v1/images/{image}/replicate"),
    (May::Member,   "GET",    "/v1/volumes"),
    (May::Member,   "POST",   "/v1/volumes"),
    (May::Member,   "GET",    "/v1/volumes/{volume}"),
    (May::Member,   "DELETE", "/v1/volumes/{volume}"),
    (May::Member,   "POST",   "/v1/volumes/{volume}/snapshot"),
    (May::Member,   "PUT",    "/v1/volumes/{volume}/leave-site"),
    (May::Member,   "POST",   "/v1/volumes/{volume}/move"),
    (May::Member,   "GET",    "/v1/volumes/{volume}/move"),
    (May::Member,   "POST",   "/v1/volumes/{volume}/move/cancel"),
    (May::Member,   "POST",   "/v1/volumes/{volume}/replicas"),
    (May::Member,   "POST",   "/v1/volumes/{volume}/replicas/stop"),
    (May::Member,   "POST",   "/v1/volumes/{volume}/promote"),
    (May::Member,   "GET",    "/v1/networks"),
    (May::Member,   "POST",   "/v1/networks"),
    (May::Member,   "GET",    "/v1/networks/{network}"),
    (May::Member,   "DELETE", "/v1/networks/{network}"),
    (May::Member,   "GET",    "/v1/vms"),
    (May::Member,   "POST",   "/v1/vms"),
    (May::Member,   "GET",    "/v1/vms/{vm}"),
    (May::Member,   "DELETE", "/v1/vms/{vm}"),
    (May::Member,   "POST",   "/v1/vms/{vm}/start"),
    (May::Member,   "POST",   "/v1/vms/{vm}/restart"),
    (May::Member,   "POST",   "/v1/vms/{vm}/stop"),
    (May::Member,   "POST",   "/v1/vms/{vm}/move"),
    (May::Member,   "POST",   "/v1/vms/{vm}/move/cancel"),
    (May::Member,   "GET",    "/v1/vms/{vm}/migrations"),
    (May::Member,   "GET",    "/v1/vms/{vm}/balance"),
    (May::Member,   "POST",   "/v1/vms/{vm}/exec"),
    (May::Member,   "GET",    "/v1/vms/{vm}/exec"),
    (May::Member,   "DELETE", "/v1/vms/{vm}/exec"),
    (May::Member,   "POST",   "/v1/vms/{vm}/snapshot"),
    (May::Member,   "POST",   "/v1/vms/{vm}/restore"),
    (May::Member,   "POST",   "/v1/vms/{vm}/resize"),
    (May::Member,   "PUT",    "/v1/vms/{vm}/set"),
    (May::Member,   "POST",   "/v1/vms/{vm}/attach"),
    (May::Member,   "POST",   "/v1/vms/{vm}/detach"),
    (May::Member,   "GET",    "/v1/vms/{vm}/file"),
    (May::Member,   "PUT",    "/v1/vms/{vm}/file"),
    (May::Member,   "GET",    "/v1/vms/{vm}/console"),
    (May::Member,   "GET",    "/v1/vms/{vm}/console/attach"),
    (May::Member,   "GET",    "/v1/vms/{vm}/vnc"),
    (May::Member,   "GET",    "/v1/vms/{vm}/ssh"),
    (May::Member,   "POST",   "/v1/jobs/plan"),
    (May::Member,   "GET",    "/v1/jobs"),
    (May::Member,   "POST",   "/v1/jobs"),
    (May::Member,   "GET",    "/v1/jobs/{job}"),
    (May::Member,   "DELETE", "/v1/jobs/{job}"),
    (May::Member,   "POST",   "/v1/jobs/{job}/cancel"),
    (May::Member,   "POST",   "/v1/jobs/{job}/move"),
    (May::Member,   "POST",   "/v1/jobs/{job}/move/cancel"),
    (May::Member,   "GET",    "/v1/jobs/{job}/log"),
    (May::Member,   "GET",    "/v1/jobs/{job}/decisions"),
    (May::Member,   "GET",    "/v1/jobs/{job}/samples"),
    (May::Member,   "GET",    "/v1/jobs/{job}/left-out"),
    (May::Member,   "GET",    "/v1/jobs/{job}/output"),
    (May::Member,   "GET",    "/v1/backups"),
    (May::Member,   "POST",   "/v1/backups"),
    (May::Member,   "GET",    "/v1/backups/{backup}"),
    (May::Member,   "DELETE", "/v1/backups/{backup}"),
    (May::Member,   "POST",   "/v1/backups/{backup}/verify"),
    (May::Member,   "POST",   "/v1/backups/{backup}/restore"),
    (May::Member,   "POST",   "/v1/backups/{backup}/restore-vm"),
    (May::Member,   "POST",   "/v1/backups/{backup}/restore-image"),
    (May::Member,   "GET",    "/v1/backup-schedules"),
    (May::Member,   "POST",   "/v1/backup-schedules"),
    (May::Member,   "DELETE", "/v1/backup-schedules/{schedule}"),
    (May::Member,   "GET",    "/v1/planner/score"),
    (May::Member,   "GET",    "/v1/prices"),
    (May::Member,   "GET",    "/v1/tenants/{tenant}/users/{user}"),
    (May::Member,   "GET",    "/v1/tenants/{tenant}/users/{user}/tokens"),
    (May::Member,   "POST",   "/v1/tenants/{tenant}/users/{user}/tokens"),
    (May::Member,   "DELETE", "/v1/tenants/{tenant}/users/{user}/tokens/{token}"),
    (May::Member,   "PUT",    "/v1/tenants/{tenant}/users/{user}/keys"),
    (May::Member,   "DELETE", "/v1/tenants/{tenant}/users/{user}/keys/{key}"),
    // Which files a user sees is decided by the repository.
    (May::Member,   "*",      "/v1/data"),
    (May::Member,   "*",      "/v1/data/{tenant}"),
    (May::Member,   "*",      "/v1/data/{tenant}/{*path}"),
    (May::Member,   "*",      "/dav"),
    (May::Member,   "*",      "/dav/{*path}"),
    (May::Operator, "GET",    "/v1/tenants/{tenant}"),
    (May::Operator, "POST",   "/v1/look-for-backups"),
    (May::Operator, "GET",    "/v1/tenants/{tenant}/backup-key"),
    (May::Operator, "PUT",    "/v1/tenants/{tenant}/backup-key"),
    (May::Operator, "GET",    "/v1/audit"),
    (May::Admin,    "GET",    "/v1/tenants"),
    (May::Admin,    "POST",   "/v1/tenants"),
    (May::Admin,    "DELETE", "/v1/tenants/{tenant}"),
    (May::Admin,    "PUT",    "/v1/tenants/{tenant}/quota"),
    (May::Admin,    "PUT",    "/v1/tenants/{tenant}/backup-targets"),
    (May::Admin,    "GET",    "/v1/tenants/{tenant}/users"),
    (May::Admin,    "PUT",    "/v1/tenants/{tenant}/users/{user}"),
    (May::Admin,    "DELETE", "/v1/tenants/{tenant}/users/{user}"),
    (May::Admin,    "PUT",    "/v1/images/{image}/shared"),
    (May::Admin,    "POST",   "/v1/volumes/{volume}/adopt"),
    (May::Admin,    "POST",   "/v1/images/{image}/adopt"),
    (May::Admin,    "POST",   "/v1/vms/{vm}/end-unknown"),
    (May::Admin,    "POST",   "/v1/vms/{vm}/adopt"),
    (May::Admin,    "GET",    "/v1/unknown"),
    (May::Admin,    "GET",    "/v1/tasks"),
    (May::Admin,    "GET",    "/v1/upgrade"),
    (May::Admin,    "POST",   "/v1/upgrade/finish"),
    (May::Admin,    "GET",    "/v1/hosts"),
    (May::Admin,    "DELETE", "/v1/hosts/{host}"),
    (May::Admin,    "PUT",    "/v1/hosts/{host}/site"),
    (May::Admin,    "POST",   "/v1/hosts/{host}/give-up"),
    (May::Admin,    "POST",   "/v1/hosts/{host}/token"),
    (May::Admin,    "POST",   "/v1/hosts/{host}/revoke"),
    (May::Admin,    "POST",   "/v1/hosts/{host}/drain"),
    (May::Admin,    "POST",   "/v1/hosts/{host}/undrain"),
    (May::Admin,    "GET",    "/v1/hosts/{host}/measure"),
    (May::Admin,    "POST",   "/v1/hosts/{host}/measure"),
    (May::Admin,    "DELETE", "/v1/hosts/{host}/measure"),
    (May::Admin,    "GET",    "/v1/balance"),
    (May::Admin,    "PUT",    "/v1/sites/{site}/balance"),
    (May::Admin,    "PUT",    "/v1/sites/{site}/place"),
    (May::Admin,    "POST",   "/v1/operators/revoke"),
    (May::Admin,    "GET",    "/v1/providers"),
    (May::Admin,    "GET",    "/v1/rentals"),
    (May::Admin,    "POST",   "/v1/rentals"),
    (May::Admin,    "GET",    "/v1/rentals/{rental}"),
    (May::Admin,    "POST",   "/v1/rentals/{rental}/end"),
    (May::Admin,    "GET",    "/v1/kept-disks"),
    (May::Admin,    "GET",    "/v1/renting"),
    (May::Admin,    "PUT",    "/v1/renting"),
    (May::Admin,    "GET",    "/v1/links"),
    (May::Admin,    "POST",   "/v1/links/probe"),
    (May::Admin,    "GET",    "/metrics"),
    (May::Admin,    "GET",    "/v1/metrics/targets"),
    (May::Admin,    "GET",    "/v1/hosts/{host}/metrics"),
];

/// What is refused after a restore until each host was heard: the records may be older than what a host has. Drivers wait by themselves.
const HELD: [(&str, &str); 10] = [
    ("DELETE", "/v1/images/{image}"),
    ("DELETE", "/v1/volumes/{volume}"),
    ("POST", "/v1/volumes/{volume}/promote"),
    ("POST", "/v1/volumes/{volume}/adopt"),
    ("POST", "/v1/images/{image}/adopt"),
    ("POST", "/v1/vms/{vm}/adopt"),
    ("POST", "/v1/vms/{vm}/end-unknown"),
    ("POST", "/v1/backups/{backup}/restore"),
    ("POST", "/v1/backups/{backup}/restore-vm"),
    ("POST", "/v1/backups/{backup}/restore-image"),
];

/// Why this is refused after a restore, if it is.
fn held(cluster: &Cluster, method: &Method, path: &str) -> Option<Problem> {
    let is =
        |(of, pattern): &(&str, &str)| *of == method.as_str() && matched(pattern, path).is_some();
    let is_held = HELD.iter().any(is);
    let what = || format!("can't answer {method} {path}");
    is_held.then(|| cluster.restored.check(what()).err()).flatten()
}

/// The methods of requests that change nothing.
const READS: [&str; 4] = ["GET", "HEAD", "OPTIONS", "PROPFIND"];

/// Who sends a request.
#[derive(Debug, Clone)]
pub enum Sender {
    User(Caller),
    Host(HostId),
    Stranger,
    /// The controller does not call itself.
    Controller,
}

impl Sender {
    /// # Errors
    /// When a token does not count, or it is not known who sends the request.
    fn of(cluster: &Cluster, request: &Request) -> Result<Self, String> {
        let path = request.uri().path();
        let in_header = token(request.headers(), path);
        if let Some(token) = in_header.or_else(|| cookie::token(request.headers(), path)) {
            let known = cluster.accounts.by_token(&token);
            let refusal = || cluster.accounts.refusal(&token, &cluster.clock);
            let (user, token) = known.ok_or_else(refusal)?;
            return Ok(Self::User(Caller { token: Some(token), ..user.into() }));
        }
        match request.extensions().get::<Peer>() {
            None => Err("an unknown client may not ask for this".to_owned()),
            Some(peer @ (Peer::Local | Peer::NotKnown)) => Ok(Self::User(Caller::admin(peer))),
            Some(Peer::Stranger) => Ok(Self::Stranger),
            Some(peer @ Peer::Known(certified)) => Ok(match &certified.identity {
                PeerIdentity::Operator => Self::User(Caller::admin(peer)),
                PeerIdentity::Host(host) => Self::Host(host.clone()),
                PeerIdentity::Controller => Self::Controller,
            }),
        }
    }
}

impl fmt::Display for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(caller) => f.write_str(&caller.who),
            Self::Host(host) => write!(f, "host {host}"),
            Self::Stranger => f.write_str("a client without a certificate or a token"),
            Self::Controller => f.write_str("the controller"),
        }
    }
}

/// The token that a request has. Clients of WebDAV send it as the password of any user. Elsewhere a password does not count:
/// a browser keeps it, and sends it with what any web page asks for.
fn token(headers: &HeaderMap, path: &str) -> Option<String> {
    let (scheme, value) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(value.trim().to_owned());
    }
    if !is_webdav(path) {
        return Some(String::new());
    }
    let decoded = BASE64_STANDARD.decode(value.trim()).unwrap_or_default();
    let text = String::from_utf8(decoded).unwrap_or_default();
    scheme.eq_ignore_ascii_case("basic").then(|| match text.split_once(':') {
        Some((_, password)) => password.to_owned(),
        None => String::new(),
    })
}

fn is_webdav(path: &str) -> bool {
    path == "/dav" || path.starts_with("/dav/")
}

/// The value of the first `{x}`, if the path has this pattern.
pub(super) fn matched<'a>(pattern: &str, path: &'a str) -> Option<Option<&'a str>> {
    let (mut expected, mut parts) = (pattern.split('/'), path.split('/'));
    let mut first = None;
    loop {
        match (expected.next(), parts.next()) {
            (None, None) => return Some(first),
            (Some(rest), _) if rest.starts_with("{*") => return Some(first),
            (Some(expected), Some(part)) if expected.starts_with('{') && !part.is_empty() => {
                first = first.or(Some(part));
            }
            (Some(expected), Some(part)) if expected == part => {}
            _ => return None,
        }
    }
}

/// Whether this sender may send a request with this method and path.
pub fn may(sender: &Sender, method: &Method, path: &str) -> bool {
    // A HEAD request is answered as a GET request, without the body.
    let method = if method == Method::HEAD { &Method::GET } else { method };
    let found = TABLE.iter().find_map(|(may, of, pattern)| {
        let is_of = ["*", method.as_str()].contains(of);
        matched(pattern, path).filter(|_| is_of).map(|first| (*may, first))
    });
    let (least, first) = found.unwrap_or((May::Admin, None));
    if least == May::Anybody {
        return true;
    }
    match sender {
        Sender::User(caller) => match least {
            May::Member => true,
            May::Operator => caller.role >= Role::Operator,
            May::Anybody => true,
            May::Stranger | May::ThisHost | May::Host | May::Admin => caller.is_admin(),
        },
        Sender::Host(own) => match least {
            May::ThisHost => first == Some(own.as_str()),
            May::Host => true,
            _ => false,
        },
        Sender::Stranger => least == May::Stranger,
        Sender::Controller => false,
    }
}

/// Refuses what the sender may not ask for, tells the handlers who asks, and writes the audit log. It is asked before the
/// routes are, so a new route is closed until the table opens it.
pub async fn admit(
    State(cluster): State<Arc<Cluster>>,
    mut request: Request,
    next: Next,
) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let refuse = |why: String| {
        Failure(Problem::forbidden(format!("can't answer {method} {path}"), why)).into_response()
    };
    // Clients of WebDAV send no token before they are asked for one, as a password.
    let challenge = |problem: Response| {
        let scheme = if path.starts_with("/dav") { "Basic" } else { "Bearer" };
        let challenge = format!("{scheme} realm=\"perigee\", charset=\"UTF-8\"");
        (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, challenge)], problem.into_body())
            .into_response()
    };
    let is_from_cookie = cookie::token(request.headers(), &path).is_some();
    if is_from_cookie && let Err(why) = by_own_page(&method, request.headers()) {
        return refuse(why);
    }
    let sender = match Sender::of(&cluster, &request) {
        Ok(sender) => sender,
        Err(why) => {
            note_unknown_token(&cluster, &request, &why);
            return challenge(refuse(why));
        }
    };
    let refused = |sender: &Sender, path: &str| {
        if matches!(sender, Sender::Stranger) && path.starts_with("/dav") {
            return challenge(refuse("it needs a token as the password".to_owned()));
        }
        refuse(format!("{sender} may not ask for this"))
    };
    let mut unwritten = Unwritten::new(&cluster, &sender, &request);
    let refusal = cluster.claim.refusal();
    let superseded = refusal.map(|refusal| {
        term::superseded(&cluster.state_dir, format!("can't answer {method} {path}"), &refusal)
    });
    let mut answer = if !may(&sender, &method, &path) {
        refused(&sender, &path)
    } else if let Some(problem) = superseded.filter(|_| !READS.contains(&method.as_str())) {
        Failure(problem).into_response()
    } else if let Some(problem) = held(&cluster, &method, &path) {
        Failure(problem).into_response()
    } else {
        if let Sender::User(caller) = &sender {
            request.extensions_mut().insert(caller.clone());
        }
        next.run(request).await
    };
    if let Some(notice) = notice(&cluster).and_then(|notice| HeaderValue::from_str(&notice).ok()) {
        answer.headers_mut().insert(NOTICE_HEADER, notice);
    }
    unwritten.answered(answer.status());
    answer
}

/// What everybody is told beside an answer: what is read is as this controller has known it, and after a restore as the backup has it.
pub fn notice(cluster: &Cluster) -> Option<String> {
    let refusal = cluster.claim.refusal();
    let superseded = refusal.map(|refusal| term::superseded(&cluster.state_dir, "", &refusal).why);
    superseded.or_else(|| cluster.restored.notice())
}

/// Notes that a token did not count: somebody may be trying tokens. Anybody can do that, so not each request is noted.
fn note_unknown_token(cluster: &Arc<Cluster>, request: &Request, why: &str) {
    let address = request.extensions().get::<ClientAddress>().and_then(|address| address.0);
    let mut from = address.map_or_else(|| "this host".to_owned(), |address| address.to_string());
    if let Some(client) = asks_for(request.headers()) {
        from = format!("{from}, which says that it asks for {client}");
    }
    let asked = format!("{} {}", request.method(), request.uri().path());
    note_unknown(cluster, &from, &asked, why);
}

/// The header in which a gateway names its client. Anybody can send it, so nothing is decided by it: it is noted beside the address
/// from which the request has come.
const ASKS_FOR: &str = "perigee-asks-for";

fn asks_for(headers: &HeaderMap) -> Option<IpAddr> {
    headers.get(ASKS_FOR)?.to_str().ok()?.parse().ok()
}

/// As [`note_unknown_token`], of a client at an address that has asked for something.
pub(crate) fn note_unknown(cluster: &Arc<Cluster>, from: &str, asked: &str, why: &str) {
    let Some(count) = cluster.bad_tokens.happened() else { return };
    tracing::warn!(from, count, "a request is refused: {why}");
    let entry = AuditEntry {
        at_ms: now_ms(),
        who: format!("a client at {from}"),
        request: asked.to_owned(),
        thing: format!("{why}; {count} such requests since the last entry"),
        status: StatusCode::UNAUTHORIZED.as_u16(),
    };
    let cluster = Arc::clone(cluster);
    // The disk may be slow, and the answer does not wait for it.
    tokio::task::spawn_blocking(move || cluster.audit.add(&TenantName::default(), entry));
}

/// An entry of the audit log. It is written when the request is over, also if the client has gone meanwhile.
struct Unwritten {
    cluster: Arc<Cluster>,
    sender: Sender,
    entry: AuditEntry,
    /// Whether the request only reads, or is one that comes every few seconds.
    is_noise: bool,
}

/// The status of a request whose client has gone before the answer.
const GONE: u16 = 499;

/// What a request for a file asks for: the new name, or with whom the file is to be shared.
fn asked(request: &Request) -> String {
    let path = request.uri().path();
    let is_file =
        path.starts_with("/v1/data") || (path.starts_with("/v1/vms/") && path.ends_with("/file"));
    let query = request.uri().query().filter(|_| is_file);
    query.map_or_else(String::new, |query| format!("?{query}"))
}

/// Where WebDAV copies or moves a file.
fn destination(headers: &HeaderMap) -> String {
    let uri = headers.get("destination").and_then(|value| value.to_str().ok()?.parse().ok());
    uri.map_or_else(String::new, |uri: Uri| uri.path().to_owned())
}

impl Unwritten {
    fn new(cluster: &Arc<Cluster>, sender: &Sender, request: &Request) -> Self {
        let (method, path) = (request.method(), request.uri().path());
        // Who attaches to a console or a screen or logs in can type there, and a guest's files are not the cluster's.
        let in_guest = ["/v1/vms/", "/vms/"].iter().any(|begin| path.starts_with(begin));
        let types = path.ends_with("/console/attach")
            || (in_guest && ["/file", "/ssh", "/vnc"].iter().any(|end| path.ends_with(end)));
        let reads = READS.contains(&method.as_str()) && !types;
        let is_noise = match sender {
            Sender::User(_) => reads,
            Sender::Host(_) => reads || *method == Method::PUT,
            // Who logs in is noted with the name that the token has. Anybody may read these files, and log out.
            Sender::Stranger | Sender::Controller => {
                reads || [cookie::LOGIN, "/logout"].contains(&path)
            }
        };
        let entry = AuditEntry {
            at_ms: now_ms(),
            who: sender.to_string(),
            request: format!("{method} {path}{}", asked(request)),
            thing: destination(request.headers()),
            status: GONE,
        };
        Self { cluster: Arc::clone(cluster), sender: sender.clone(), entry, is_noise }
    }

    fn answered(&mut self, status: StatusCode) {
        self.entry.status = status.as_u16();
    }

    /// Anybody who reaches the port could fill the log with what is refused to strangers.
    fn is_wanted(&self) -> bool {
        let refusals = [StatusCode::FORBIDDEN, StatusCode::UNAUTHORIZED];
        let refused = refusals.iter().any(|status| self.entry.status == status.as_u16());
        match self.sender {
            Sender::User(_) | Sender::Host(_) => !self.is_noise || refused,
            Sender::Stranger | Sender::Controller => !self.is_noise && !refused,
        }
    }
}

impl Drop for Unwritten {
    fn drop(&mut self) {
        if !self.is_wanted() {
            return;
        }
        let mut entry = self.entry.clone();
        let tenant = match &self.sender {
            Sender::User(caller) => {
                if let Some(thing) = caller.thing.get() {
                    entry.thing.clone_from(thing);
                }
                caller.tenant.clone()
            }
            Sender::Host(_) | Sender::Stranger | Sender::Controller => TenantName::default(),
        };
        let cluster = Arc::clone(&self.cluster);
        // The disk may be slow, and the answer does not wait for it.
        tokio::task::spawn_blocking(move || cluster.audit.add(&tenant, entry));
    }
}
