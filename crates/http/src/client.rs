//! The HTTP client.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use perigee_model::Problem;
use perigee_model::volume::{Progress, Step};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Body, Method, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The client closes a connection that was not used for this long.
const IDLE_MAX: Duration = Duration::from_secs(15);

/// For requests that take as long as they need.
const WHOLE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// A server that works tells its progress several times a second.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Calls one server; cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    /// `http://HOST:PORT`, without a slash at the end.
    base: String,
    /// The server's address as errors show it.
    address: String,
    /// What a person can do if the server can't be reached.
    hint: String,
}

impl Client {
    /// `address` is `http://HOST:PORT` or `unix:PATH`. Connects within 3 s and expects an answer
    /// within `timeout`.
    ///
    /// # Errors
    /// `Invalid` when the address has neither form.
    pub fn new(address: &str, timeout: Duration) -> Result<Self, Problem> {
        let mut builder = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(Duration::from_secs(3))
            // Shorter than the server's limit, so that no request is sent on a connection that it closes.
            .pool_idle_timeout(IDLE_MAX)
            .timeout(timeout);
        let base = if let Some(path) = address.strip_prefix("unix:") {
            builder = builder.unix_socket(std::path::Path::new(path));
            "http://localhost".to_owned()
        } else if address.starts_with("http://") {
            address.trim_end_matches('/').to_owned()
        } else {
            return Err(Problem::invalid(
                format!("can't use the address {address:?}"),
                "it is neither http://HOST:PORT nor unix:PATH",
            ));
        };
        let http = builder.build().map_err(|e| Problem::internal("HTTP client", chain(&e)))?;
        Ok(Self { http, base, address: address.to_owned(), hint: String::new() })
    }

    /// Sets what a person can do if the server can't be reached, for errors.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
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
        self.json::<serde_json::Value>(Method::DELETE, path, None::<&()>).await.map(drop)
    }

    /// Sends bytes as they come from a stream. The time of the whole request is not limited.
    pub async fn send_body<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: impl Into<Body>,
    ) -> Result<T, Problem> {
        let request = self
            .http
            .request(method, self.url(path))
            .timeout(Duration::from_secs(24 * 3600))
            .body(body);
        self.parse(&self.body(self.run(request).await?).await?)
    }

    /// The whole answer, within the client's deadline.
    pub async fn get_bytes(&self, path: &str) -> Result<Bytes, Problem> {
        self.exchange(Method::GET, self.url(path), None).await
    }

    /// The answer, with its body unread, for streaming. An error status is returned as a [`Problem`].
    pub async fn get_response(&self, path: &str) -> Result<Response, Problem> {
        let request = self.http.get(self.url(path)).timeout(Duration::from_secs(24 * 3600));
        self.check(self.run(request).await?).await
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
        let request = self.http.post(self.url(path)).timeout(WHOLE_MAX);
        let first = tokio::time::timeout(SILENCE_MAX, self.run(request.json(body)));
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
        loop {
            let chunk = tokio::time::timeout(silence_max, response.chunk()).await;
            let received = chunk.map_err(|_| self.silent())?.map_err(|e| self.unavailable(&e))?;
            let Some(received) = received else { return Ok(None) };
            text.extend_from_slice(&received);
            let mut done = 0;
            while let Some(length) = text[done..].iter().position(|byte| *byte == b'\n') {
                let line = &text[done..done + length];
                done += length + 1;
                if let Some(result) =
                    take(serde_json::from_slice(line).map_err(|e| self.unread(&e))?)
                {
                    return Ok(Some(result));
                }
            }
            text.drain(..done);
        }
    }

    async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, Problem> {
        let body = body.map(serde_json::to_vec).transpose();
        let body = body.map_err(|e| {
            Problem::internal(format!("can't send a request to {}", self.address), e)
        })?;
        self.parse(&self.exchange(method, self.url(path), body).await?)
    }

    /// This is not generic and is boxed, so that it is compiled only once.
    fn exchange(
        &self,
        method: Method,
        url: String,
        json: Option<Vec<u8>>,
    ) -> BoxFuture<'_, Result<Bytes, Problem>> {
        let mut request = self.http.request(method, url);
        if let Some(json) = json {
            request = request.header(CONTENT_TYPE, "application/json").body(json);
        }
        async move { self.body(self.run(request).await?).await }.boxed()
    }

    async fn run(&self, request: reqwest::RequestBuilder) -> Result<Response, Problem> {
        request.send().await.map_err(|e| self.unavailable(&e))
    }

    async fn check(&self, response: Response) -> Result<Response, Problem> {
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = response.bytes().await.map_err(|e| self.unavailable(&e))?;
        Err(serde_json::from_slice(&body).unwrap_or_else(|_| {
            Problem::internal(
                format!("a request to {} failed", self.address),
                format!("HTTP {status}: {}", String::from_utf8_lossy(&body)),
            )
        }))
    }

    async fn body(&self, response: Response) -> Result<Bytes, Problem> {
        self.check(response).await?.bytes().await.map_err(|e| self.unavailable(&e))
    }

    fn parse<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, Problem> {
        let text = if body.is_empty() { b"null" } else { body };
        serde_json::from_slice(text).map_err(|e| self.unread(&e))
    }

    fn unread(&self, error: &serde_json::Error) -> Problem {
        Problem::internal(format!("can't understand the answer of {}", self.address), error)
            .next("check that both sides run the same version of perigee")
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn unavailable(&self, error: &reqwest::Error) -> Problem {
        let what = format!("no answer from {}", self.address);
        if error.is_connect() {
            // Only the root cause, because `what` has the address.
            return Problem::unavailable(what, root(error)).next(&self.hint);
        }
        Problem::unavailable(what, chain(error))
    }
}

fn root(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// An error with its sources, each of them once.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        source = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use perigee_model::ProblemKind;

    use super::*;

    #[tokio::test]
    async fn who_does_not_listen_is_named_with_the_reason_and_what_to_do() {
        let client = Client::new("http://127.0.0.1:1", Duration::from_secs(5)).expect("address");
        let problem = client.hint("start it").get::<()>("/").await.expect_err("nobody is there");
        let expected = "no answer from http://127.0.0.1:1: Connection refused (os error 111)";
        assert_eq!(problem.to_string(), format!("{expected}\n  start it"));
    }

    #[tokio::test]
    async fn bytes_that_do_not_come_are_not_waited_for_beyond_the_deadline() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let client = Client::new(&address, Duration::from_millis(100)).expect("a client");
        let silent = tokio::time::timeout(Duration::from_secs(60), client.get_bytes("/v1/x"));
        let problem = silent.await.expect("the client gives up").expect_err("nobody answers");
        assert_eq!(problem.kind, ProblemKind::Unavailable, "{problem}");
    }
}
