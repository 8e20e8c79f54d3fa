//! The HTTP client.
//!
//! It follows no redirects, sends nothing through a proxy, and reads no answer that is longer than
//! [`answer::ANSWER_BYTES_MAX`].

mod answer;
mod connect;
mod create;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use answer::Response;
use answer::chain;
use axum::body::Body;
use axum::http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_RANGE, CONTENT_TYPE, HeaderValue, RANGE,
    SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use axum::http::{HeaderMap, HeaderName, Method, Request, StatusCode, Uri};
use bytes::Bytes;
use connect::{Connector, Way};
use futures_util::future::{BoxFuture, FutureExt as _};
use hyper::upgrade::Upgraded;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use perigee_model::data::CONTENT_SHA256;
use perigee_model::grant::{GRANT_HEADER, SignedGrant};
use perigee_model::term::TERM_HEADER;
use perigee_model::volume::{Progress, Step};
use perigee_model::{Problem, ProblemKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use crate::claim::Claim;
use crate::network::{Network, authority, authority_of};
use crate::tunnel::{self, Tunnel};
use crate::verify::Expected;
use crate::websocket::{self, WebSocket};
use answer::{ANSWER_BYTES_MAX, too_late, too_long};

/// The client closes a connection that was not used for this long. It is shorter than the server's limit, so that
/// no request is sent on a connection that the server closes.
const IDLE_MAX: Duration = Duration::from_secs(15);

/// For bodies and answers that are transferred as fast as the link allows.
const TRANSFER_MAX: Duration = Duration::from_secs(24 * 3600);
/// For requests that take as long as they need.
const WHOLE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// A server that works tells its progress several times a second.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// A header of a request; its value is ASCII.
type Header = (HeaderName, String);

fn json() -> Header {
    (CONTENT_TYPE, "application/json".to_owned())
}

/// The header of an answer with what whoever asks should know beside it.
pub const NOTICE_HEADER: &str = "perigee-notice";

/// This much of an error that is not ours is shown.
const FOREIGN_BYTES_MAX: usize = 4096;

/// Calls one server; cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    http: legacy::Client<Connector, Body>,
    /// `http://HOST:PORT`, without a slash at the end.
    base: String,
    /// The server's address as errors show it.
    address: String,
    /// How long the server may take for a whole answer.
    answer_max: Duration,
    /// What a person can do if the server can't be reached.
    hint: String,
    /// Says who asks, where that is not a certificate's or the connection's to say.
    authorization: Option<HeaderValue>,
    /// What the controller allows this host at the server.
    grant: Option<HeaderValue>,
    /// By what a controller commands the server.
    claim: Option<Arc<Claim>>,
    /// Whether the server's notice was shown.
    noticed: Arc<AtomicBool>,
}

impl Client {
    /// For an address that this host's user or configuration gives: `unix:PATH`, or `http://HOST:PORT`, which is
    /// not encrypted. An address that comes from another host is for [`Network::client`].
    ///
    /// Connects within 3 s and expects an answer within `answer_max`.
    ///
    /// # Errors
    /// `Invalid` when the address has neither form.
    pub fn new(address: &str, answer_max: Duration) -> Result<Self, Problem> {
        match address.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            Some(path) => Ok(Self::over(Way::Unix(path.into()), address, answer_max)),
            None => Network::Plain.client(address, Expected::Address, answer_max).map_err(|_| {
                Problem::invalid(
                    format!("can't use the address {address:?}"),
                    "it is none of unix:PATH, https://HOST:PORT and http://HOST:PORT",
                )
            }),
        }
    }

    /// For whoever has no certificate: a host that joins, or a user with a token. The controller has to show one of the
    /// authority with this fingerprint.
    ///
    /// # Errors
    /// `Invalid` when the address is not `https://HOST:PORT`.
    pub fn to_enrol(
        address: &str,
        fingerprint: &str,
        answer_max: Duration,
    ) -> Result<Self, Problem> {
        let authority = authority_of(address).filter(|_| address.starts_with("https://"));
        let authority = authority.ok_or_else(|| {
            Problem::invalid(
                format!("can't use the address {address:?}"),
                "it is not https://HOST:PORT",
            )
        })?;
        let way = Way::Enrol(authority.to_owned(), fingerprint.to_owned());
        Ok(Self::over(way, address, answer_max))
    }

    /// An address that [`Network`] has checked.
    pub(crate) fn to_authority(
        address: &str,
        authority: &str,
        network: &Network,
        expected: Expected,
        answer_max: Duration,
    ) -> Self {
        let authority = authority.to_owned();
        let way = match network {
            Network::Plain => Way::Tcp(authority),
            Network::Tls(identity) => Way::Tls(authority, identity.clone(), expected),
        };
        Self::over(way, address, answer_max)
    }

    fn over(way: Way, address: &str, answer_max: Duration) -> Self {
        let base = match &way {
            Way::Unix(_) => "http://localhost".to_owned(),
            Way::Tcp(authority) | Way::Tls(authority, ..) | Way::Enrol(authority, _) => {
                format!("http://{authority}")
            }
        };
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_MAX)
            .build(Connector(way));
        let (address, hint) = (address.to_owned(), String::new());
        Self {
            http,
            base,
            address,
            answer_max,
            hint,
            authorization: None,
            grant: None,
            claim: None,
            noticed: Arc::default(),
        }
    }

    /// Sends a user's token with each request.
    ///
    /// # Errors
    /// `Invalid` when it has a character that no token has. The error does not show it.
    pub fn with_token(mut self, token: &str) -> Result<Self, Problem> {
        let value = HeaderValue::try_from(format!("Bearer {token}"));
        let mut value = value.map_err(|_| {
            Problem::invalid("can't use the token", "it has a character that no token has")
        })?;
        value.set_sensitive(true);
        self.authorization = Some(value);
        Ok(self)
    }

    /// Sets what a person can do if the server can't be reached, for errors.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    /// Shows with each request what the controller allows this host at the server.
    #[must_use]
    pub fn granted(mut self, grant: Option<&SignedGrant>) -> Self {
        // One that is no header's value was never signed, and the server would refuse it too.
        self.grant = grant.and_then(|grant| HeaderValue::from_str(&grant.0).ok());
        self
    }

    /// Shows with each request by what this controller commands the server. Nothing is sent when that does not count any more.
    #[must_use]
    pub fn claiming(mut self, claim: &Arc<Claim>) -> Self {
        self.claim = Some(Arc::clone(claim));
        self
    }

    /// The server's address as it was given, for errors.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Asks for what is at a path, `/v1/…`.
    ///
    /// # Errors
    /// The server's own [`Problem`], or `Unavailable` when it does not answer in time.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        self.json(Method::GET, path, None::<&()>).await
    }

    /// Sends JSON to a path. A request whose answer is lost may have been carried out.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, Problem> {
        self.json(Method::POST, path, Some(body)).await
    }

    /// Puts JSON at a path. It can be sent again when its answer is lost.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn put<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, Problem> {
        self.json(Method::PUT, path, Some(body)).await
    }

    /// Removes what is at a path.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn delete(&self, path: &str) -> Result<(), Problem> {
        self.delete_answered::<serde_json::Value>(path).await.map(drop)
    }

    /// As [`Client::delete`], of what answers what has become of it.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn delete_answered<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        self.json(Method::DELETE, path, None::<&()>).await
    }

    /// Sends bytes as they come from a stream. The time of the whole request is not limited.
    pub async fn send_body<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: impl Into<Body>,
    ) -> Result<T, Problem> {
        let answer = self.exchange(method, path, None, body.into(), TRANSFER_MAX);
        self.parse(&answer.await?)
    }

    /// The whole answer, within the client's deadline.
    pub async fn get_bytes(&self, path: &str) -> Result<Bytes, Problem> {
        self.exchange(Method::GET, path, None, Body::empty(), self.answer_max).await
    }

    /// Asks a server that is none of Perigee's, with one header, and returns the answer as text; `None` if the server has nothing there
    /// (404).
    ///
    /// # Errors
    /// `Unavailable` when it does not answer in time, `Internal` when it answers anything else.
    ///
    /// # Panics
    /// If the header is not ASCII.
    pub async fn text(
        &self,
        method: Method,
        path: &str,
        (name, value): (&'static str, &str),
    ) -> Result<Option<String>, Problem> {
        let header = Some((HeaderName::from_static(name), value.to_owned()));
        let response = self.run(method, path, header, Body::empty(), self.answer_max).await?;
        if response.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        let body = self.check(response).await?.whole().await.map_err(|e| self.broken(&e))?;
        String::from_utf8(body.into()).map(Some).map_err(|error| {
            Problem::internal(format!("can't understand the answer of {}", self.address), error)
        })
    }

    /// The answer, with its body unread, for streaming. An error status is returned as a [`Problem`].
    pub async fn get_response(&self, path: &str) -> Result<Response, Problem> {
        self.check(self.run(Method::GET, path, None, Body::empty(), TRANSFER_MAX).await?).await
    }

    /// A part of what is at a path, from one byte until before another, with its body unread. A server that does not know
    /// ranges sends the whole.
    pub async fn get_range(&self, path: &str, from: u64, until: u64) -> Result<Response, Problem> {
        let range = format!("bytes={from}-{}", until.saturating_sub(1));
        let header = Some((RANGE, range));
        self.check(self.run(Method::GET, path, header, Body::empty(), TRANSFER_MAX).await?).await
    }

    /// Puts a part of a file at a path: from one byte until before another, of so many in all.
    pub async fn put_range<T: DeserializeOwned>(
        &self,
        path: &str,
        (from, until, total): (u64, u64, u64),
        body: Body,
    ) -> Result<T, Problem> {
        let range = format!("bytes {from}-{}/{total}", until.saturating_sub(1));
        let header = Some((CONTENT_RANGE, range));
        self.parse(&self.exchange(Method::PUT, path, header, body, TRANSFER_MAX).await?)
    }

    /// Puts a file at a path, only if what arrives has this SHA-256.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn put_checked<T: DeserializeOwned>(
        &self,
        path: &str,
        sha256: &str,
        body: Body,
    ) -> Result<T, Problem> {
        let header = Some((HeaderName::from_static(CONTENT_SHA256), sha256.to_owned()));
        self.parse(&self.exchange(Method::PUT, path, header, body, TRANSFER_MAX).await?)
    }

    /// Sends a request that may take long, and reports its progress until it is done.
    pub async fn post_long<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        told: impl FnMut(Progress),
    ) -> Result<T, Problem> {
        self.hear_long(path, body, told).await?
    }

    /// As [`Client::post_long`], and tells the server's own failure of the work, which is the inner error,
    /// from an answer that was lost. There is no limit for the whole, but the server must go on telling.
    pub async fn hear_long<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        mut told: impl FnMut(Progress),
    ) -> Result<Result<T, Problem>, Problem> {
        let body = Body::from(self.to_json(body)?);
        let run = self.run(Method::POST, path, Some(json()), body, WHOLE_MAX);
        let first = tokio::time::timeout(SILENCE_MAX, run);
        let response = self.check(first.await.map_err(|_| self.silent())??).await?;
        let done = self.lines(response, SILENCE_MAX, |step| match step {
            Step::Progress(progress) => {
                told(progress);
                None
            }
            Step::Done(result) => Some(Ok(result)),
            Step::Failed(problem) => Some(Err(problem)),
        });
        done.await?.ok_or_else(|| {
            let what = format!("no answer from {}", self.address);
            Problem::unavailable(what, "the answer ended before the work was done").next(&self.hint)
        })
    }

    fn silent(&self) -> Problem {
        let why = format!("it has told nothing of its work for {} s", SILENCE_MAX.as_secs());
        Problem::unavailable(format!("no answer from {}", self.address), why).next(&self.hint)
    }

    /// Passes on each line of a long answer when it arrives.
    pub async fn get_lines<T: DeserializeOwned>(
        &self,
        path: &str,
        mut take: impl FnMut(T),
    ) -> Result<(), Problem> {
        let response = self.get_response(path).await?;
        let taken = self.lines(response, WHOLE_MAX, |line| {
            take(line);
            None::<()>
        });
        taken.await.map(drop)
    }

    /// Parses each line of JSON, until `take` returns a result.
    async fn lines<T: DeserializeOwned, R>(
        &self,
        mut response: Response,
        silence_max: Duration,
        mut take: impl FnMut(T) -> Option<R>,
    ) -> Result<Option<R>, Problem> {
        let mut text = Vec::new();
        // Where the search for a line's end goes on: a long line is not searched again with each piece.
        let mut searched = 0;
        loop {
            let chunk = tokio::time::timeout(silence_max, response.chunk()).await;
            let received = chunk.map_err(|_| self.silent())?.map_err(|e| self.broken(&e))?;
            let Some(received) = received else { return Ok(None) };
            text.extend_from_slice(&received);
            let mut done = 0;
            while let Some(length) = text[searched..].iter().position(|byte| *byte == b'\n') {
                let line = &text[done..searched + length];
                searched += length + 1;
                done = searched;
                if let Some(result) =
                    take(serde_json::from_slice(line).map_err(|e| self.unread(&e))?)
                {
                    return Ok(Some(result));
                }
            }
            text.drain(..done);
            searched = text.len();
            if text.len() > ANSWER_BYTES_MAX {
                return Err(self.broken(&too_long("line")));
            }
        }
    }

    async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, Problem> {
        let (header, body) = match body {
            Some(body) => (Some(json()), Body::from(self.to_json(body)?)),
            None => (None, Body::empty()),
        };
        self.parse(&self.exchange(method, path, header, body, self.answer_max).await?)
    }

    fn to_json(&self, body: &impl Serialize) -> Result<Vec<u8>, Problem> {
        let what = || format!("can't send a request to {}", self.address);
        serde_json::to_vec(body).map_err(|e| Problem::internal(what(), e))
    }

    /// This is not generic and is boxed, so that it is compiled only once.
    fn exchange<'a>(
        &'a self,
        method: Method,
        path: &'a str,
        header: Option<Header>,
        body: Body,
        answer_max: Duration,
    ) -> BoxFuture<'a, Result<Bytes, Problem>> {
        async move {
            let response = self.run(method, path, header, body, answer_max).await?;
            self.check(response).await?.whole().await.map_err(|e| self.broken(&e))
        }
        .boxed()
    }

    async fn run(
        &self,
        method: Method,
        path: &str,
        header: impl IntoIterator<Item = Header>,
        body: Body,
        answer_max: Duration,
    ) -> Result<Response, Problem> {
        let until = Instant::now() + answer_max;
        let request = self.request(method, path, header, body)?;
        Ok(answered(self.send(request, until).await?, until))
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        headers: impl IntoIterator<Item = Header>,
        body: Body,
    ) -> Result<Request<Body>, Problem> {
        let url: Uri = format!("{}{path}", self.base)
            .parse()
            .map_err(|e| Problem::invalid(format!("can't ask {} for {path:?}", self.address), e))?;
        let mut request = Request::new(body);
        (*request.method_mut(), *request.uri_mut()) = (method, url);
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        for (name, value) in headers {
            request.headers_mut().insert(name, value.parse().expect("ASCII"));
        }
        if let Some(grant) = &self.grant {
            request.headers_mut().insert(GRANT_HEADER, grant.clone());
        }
        if let Some(claim) = &self.claim {
            claim.check(&self.address)?;
            request.headers_mut().insert(TERM_HEADER, claim.header().clone());
        }
        Ok(request)
    }

    async fn send(
        &self,
        request: Request<Body>,
        until: Instant,
    ) -> Result<hyper::Response<hyper::body::Incoming>, Problem> {
        self.try_send(request, until).await.map_err(|lost| lost.problem)
    }

    async fn try_send(
        &self,
        request: Request<Body>,
        until: Instant,
    ) -> Result<hyper::Response<hyper::body::Incoming>, Lost> {
        let lost = |problem| Lost { was_sent: true, problem };
        let answer = timeout_at(until, self.http.request(request));
        let answer = answer.await.map_err(|_| lost(self.broken(&too_late())))?;
        let answer = answer
            .map_err(|e| Lost { was_sent: !e.is_connect(), problem: self.unavailable(&e) })?;
        let notice = answer.headers().get(NOTICE_HEADER).and_then(|notice| notice.to_str().ok());
        if let Some(notice) = notice
            && !self.noticed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("{}: {notice}", self.address);
        }
        Ok(answer)
    }

    /// Asks for bytes of both directions ([`crate::accept`]), for which nothing is a deadline afterwards.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn tunnel(&self, path: &str) -> Result<Tunnel, Problem> {
        let (_, upgraded) = self.upgraded(path, tunnel::PROTOCOL, &[]).await?;
        Ok(TokioIo::new(upgraded))
    }

    /// The same as a WebSocket ([`websocket::asked`]).
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn websocket(&self, path: &str) -> Result<WebSocket, Problem> {
        let key = generate_key();
        let asks = [(SEC_WEBSOCKET_VERSION, websocket::VERSION), (SEC_WEBSOCKET_KEY, &key)];
        let (head, upgraded) = self.upgraded(path, websocket::PROTOCOL, &asks).await?;
        let accept = derive_accept_key(key.as_bytes());
        if head.get(SEC_WEBSOCKET_ACCEPT).is_none_or(|answer| *answer != accept) {
            return Err(self.broken(&std::io::Error::other("it does not know WebSockets")));
        }
        Ok(WebSocket::of_client(TokioIo::new(upgraded)).await)
    }

    async fn upgraded(
        &self,
        path: &str,
        protocol: &'static str,
        headers: &[(HeaderName, &str)],
    ) -> Result<(HeaderMap, Upgraded), Problem> {
        let until = Instant::now() + self.answer_max;
        let protocol = Some((UPGRADE, protocol.to_owned()));
        let mut request = self.request(Method::GET, path, protocol, Body::empty())?;
        request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        for (name, value) in headers {
            request.headers_mut().insert(name, value.parse().expect("ASCII"));
        }
        let answer = self.send(request, until).await?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            self.check(answered(answer, until)).await?;
            let why = std::io::Error::other("it does not carry bytes both ways");
            return Err(self.broken(&why));
        }
        let head = answer.headers().clone();
        let upgraded = timeout_at(until, hyper::upgrade::on(answer)).await;
        let upgraded = upgraded.map_err(|_| self.broken(&too_late()))?;
        upgraded.map(|on| (head, on)).map_err(|e| self.broken(&std::io::Error::other(e)))
    }

    async fn check(&self, response: Response) -> Result<Response, Problem> {
        let (status, term) = (response.status, response.term.clone());
        if status.is_success() {
            return Ok(response);
        }
        let body = response.whole().await.map_err(|e| self.broken(&e))?;
        let problem = serde_json::from_slice(&body).unwrap_or_else(|_| {
            let text =
                String::from_utf8_lossy(&body[..body.len().min(FOREIGN_BYTES_MAX)]).into_owned();
            Problem::internal(
                format!("a request to {} failed", self.address),
                format!("HTTP {status}: {text}"),
            )
        });
        Err(match &self.claim {
            Some(claim) if problem.kind == ProblemKind::Superseded => {
                claim.apply_refusal(&self.address, term.as_ref(), &problem)
            }
            _ => problem,
        })
    }

    fn parse<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, Problem> {
        let text = if body.is_empty() { b"null" } else { body };
        serde_json::from_slice(text).map_err(|e| self.unread(&e))
    }

    fn unread(&self, error: &serde_json::Error) -> Problem {
        Problem::internal(format!("can't understand the answer of {}", self.address), error)
            .next("check that both sides run the same version of perigee")
    }

    fn unavailable(&self, error: &legacy::Error) -> Problem {
        let what = format!("no answer from {}", self.address);
        if error.is_connect() {
            // Only the root cause, because `what` has the address.
            return Problem::unavailable(what, root(error)).next(&self.hint);
        }
        Problem::unavailable(what, chain(error))
    }

    /// The answer has begun, or its time is over.
    fn broken(&self, error: &std::io::Error) -> Problem {
        Problem::unavailable(format!("no answer from {}", self.address), error)
    }
}

/// No answer has come.
struct Lost {
    /// The request may have been carried out.
    was_sent: bool,
    problem: Problem,
}

fn answered(answer: hyper::Response<hyper::body::Incoming>, until: Instant) -> Response {
    let (head, body) = answer.into_parts();
    let term = head.headers.get(TERM_HEADER).cloned();
    Response { status: head.status, term, body, until }
}

fn root(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

impl Network {
    /// A client for an address that comes from another host. It is `http://HOST:PORT`, or `https://HOST:PORT` if the
    /// network has TLS; never a unix socket.
    ///
    /// # Errors
    /// `Invalid` when the address is anything else.
    pub fn client(
        &self,
        address: &str,
        expected: Expected,
        answer_max: Duration,
    ) -> Result<Client, Problem> {
        let authority =
            address.strip_prefix(self.scheme()).and_then(authority).ok_or_else(|| {
                Problem::invalid(
                    format!("can't use the address {address:?}"),
                    format!("it is not {}HOST:PORT", self.scheme()),
                )
            })?;
        Ok(Client::to_authority(address, authority, self, expected, answer_max))
    }
}
