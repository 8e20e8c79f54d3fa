//! One request to EC2's Query API: signed, with a deadline, and asked again where that is safe.

use std::fmt;
use std::time::Duration;

use perigee_model::percent::encoded;
use perigee_model::units::format_seconds;
use reqwest::redirect::Policy;
use reqwest::{Response, Url};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::rustls::crypto::ring;

use super::errors::{self, Failed};
use crate::credentials::Source;
use crate::provider::{CloudError, CloudErrorKind, chain, short};
use crate::sigv4::{Request, Scope, authorization};
use crate::time;
use crate::xml::Element;

/// The version of EC2's API.
const VERSION: &str = "2016-11-15";
const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";
/// A page of 500 instances is some 3 MiB.
const ANSWER_BYTES_MAX: usize = 32 << 20;
const PAGES_MAX: usize = 100;
/// What is on all pages of a list together: five times as many instances as a cluster may have.
const ITEMS_MAX: usize = 50_000;
/// How often a request is sent whose answer was lost, if sending it twice does no harm.
const SENDS_MAX: u32 = 4;

/// How long EC2 is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waits {
    /// For one answer.
    pub answer: Duration,
    /// For a request with all its repetitions.
    pub request: Duration,
    /// For all pages of a list.
    pub list: Duration,
    /// Before the first repetition; each one waits twice as long as the one before.
    pub pause: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(30),
            request: Duration::from_secs(90),
            list: Duration::from_secs(300),
            pause: Duration::from_millis(500),
        }
    }
}

/// The fields of a request's form, and how EC2's answer is known.
#[derive(Debug, Clone)]
pub struct Form {
    text: String,
    action: &'static str,
    list: &'static str,
}

impl Form {
    /// A request for this action. EC2's answer has this list, though it may be empty.
    pub fn new(action: &'static str, list: &'static str) -> Self {
        let form = Self { text: String::new(), action, list };
        form.with("Action", action).with("Version", VERSION)
    }

    /// Why this is not EC2's answer: another one may be of a proxy or a login page.
    fn refuses(&self, answer: &Element) -> Option<String> {
        if answer.name().strip_suffix("Response") != Some(self.action) {
            let root = short(answer.name());
            return Some(format!("its answer is `{root}` and not `{}Response`", self.action));
        }
        let lacks_list = answer.at(self.list).is_none();
        lacks_list.then(|| format!("its answer has no `{}`", self.list))
    }

    /// The same with one more field.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        if !self.text.is_empty() {
            self.text.push('&');
        }
        // AWS wants all bytes encoded but letters, digits and `-._~`.
        self.text.extend(encoded(name));
        self.text.push('=');
        self.text.extend(encoded(&value.to_string()));
        self
    }

    /// The same with a list, `NAME.1`, `NAME.2` and so on.
    #[must_use]
    pub fn with_list<V: fmt::Display>(
        self,
        name: &str,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        let values = (1..).zip(values);
        values.fold(self, |form, (number, value)| form.with(&format!("{name}.{number}"), value))
    }

    /// The same for what has one of these values only. `number` counts the filters of the request from 1.
    #[must_use]
    pub fn filter<V: fmt::Display>(
        self,
        number: usize,
        name: &str,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        let form = self.with(&format!("Filter.{number}.Name"), name);
        form.with_list(&format!("Filter.{number}.Value"), values)
    }
}

/// Whether a request does harm if it is sent again although its answer was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
    /// None.
    Harmless,
    /// There might be two of what it makes.
    MakesTwo,
}

/// EC2 in one region.
#[derive(Debug)]
pub struct Client {
    http: reqwest::Client,
    endpoint: Url,
    host: String,
    region: String,
    credentials: Source,
    waits: Waits,
}

impl Client {
    /// A client for a region at an endpoint of its own, or at AWS's.
    ///
    /// # Errors
    /// Why there is none.
    pub fn new(
        region: &str,
        endpoint: Option<&str>,
        credentials: Source,
        waits: Waits,
    ) -> Result<Self, String> {
        let aws = format!("https://ec2.{region}.amazonaws.com/");
        let endpoint = Url::parse(endpoint.unwrap_or(&aws)).map_err(|error| error.to_string())?;
        let host = endpoint.host_str().ok_or("the endpoint names no host")?;
        let host = endpoint.port().map_or(host.to_owned(), |port| format!("{host}:{port}"));
        if !["http", "https"].contains(&endpoint.scheme()) || endpoint.path() != "/" {
            return Err("an endpoint has the form https://HOST".to_owned());
        }
        // Another one may be there already.
        let _ = ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .redirect(Policy::none())
            .http1_only()
            .user_agent(concat!("perigee/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(waits.answer.min(Duration::from_secs(10)))
            .build()
            .map_err(|error| chain(&error))?;
        Ok(Self { http, endpoint, host, region: region.to_owned(), credentials, waits })
    }

    /// Sends a request, and again while EC2 has too many requests, or does not answer and the request does no harm.
    ///
    /// # Errors
    /// `what` in the words that an error begins with, and what EC2 says.
    pub async fn ask(&self, what: &str, form: &Form, again: Again) -> Result<Element, Failed> {
        let end = Instant::now() + self.waits.request;
        let mut pause = self.waits.pause;
        let mut sends = 0;
        loop {
            let failed = match self.send(what, form, end).await {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            sends += 1;
            let is_worth_it = match failed.error.kind {
                CloudErrorKind::Throttled => true,
                CloudErrorKind::Unclear => again == Again::Harmless && sends < SENDS_MAX,
                _ => false,
            };
            let wait = pause + pause.mul_f64(share());
            if !is_worth_it || Instant::now() + wait >= end {
                return Err(failed);
            }
            sleep(wait).await;
            pause *= 2;
        }
    }

    /// What `read` finds on all pages of an answer that is a list. One page is kept at a time.
    ///
    /// # Errors
    /// As [`Self::ask`]; also if the pages have no end, take too long, or `read` says why one makes no sense.
    pub async fn pages<T>(
        &self,
        what: &str,
        form: &Form,
        read: impl Fn(&Element) -> Result<Vec<T>, String>,
    ) -> Result<Vec<T>, CloudError> {
        let unclear =
            |why: String| CloudError::new(CloudErrorKind::Unclear, format!("{what}: {why}"));
        let all = async {
            let mut page = self.ask(what, form, Again::Harmless).await?;
            let mut items = Vec::new();
            let mut add = |page: &Element| {
                items.extend(read(page)?);
                match items.len() {
                    0..=ITEMS_MAX => Ok(()),
                    count => {
                        Err(format!("its pages have {count} items; at most {ITEMS_MAX} are read"))
                    }
                }
            };
            add(&page).map_err(unclear)?;
            let mut tokens = Vec::new();
            while let Some(token) = page.text("nextToken").map(str::to_owned) {
                if tokens.contains(&token) || tokens.len() + 1 >= PAGES_MAX {
                    let why = format!("its pages have no end (at most {PAGES_MAX} are read)");
                    return Err(unclear(why));
                }
                let form = form.clone().with("NextToken", &token);
                page = self.ask(what, &form, Again::Harmless).await?;
                add(&page).map_err(unclear)?;
                tokens.push(token);
            }
            Ok(items)
        };
        let within = format_seconds(self.waits.list.as_secs_f64());
        let late = |_| unclear(format!("not all of its pages came within {within}"));
        timeout(self.waits.list, all).await.map_err(late)?
    }

    async fn send(&self, what: &str, form: &Form, end: Instant) -> Result<Element, Failed> {
        let unclear = |why: String| {
            CloudError::new(CloudErrorKind::Unclear, format!("{what}: {}: {why}", self.host))
        };
        let request = self.signed(form)?;
        let end = end.min(Instant::now() + self.waits.answer);
        let within = format_seconds(self.waits.answer.as_secs_f64());
        let late = |_| unclear(format!("no answer within {within}"));
        let answer = timeout_at(end, self.http.execute(request)).await.map_err(late)?;
        let answer = answer.map_err(|error| unclear(chain(&error.without_url())))?;
        let status = answer.status();
        let body = timeout_at(end, whole(answer)).await.map_err(late)?.map_err(unclear)?;
        if status.is_success() {
            let read = Element::parse(&body).and_then(|answer| match form.refuses(&answer) {
                Some(why) => Err(why),
                None => Ok(answer),
            });
            return read
                .map_err(|why| unclear(format!("it does not answer as EC2 does: {why}")).into());
        }
        Err(errors::of(what, status.as_u16(), &body))
    }

    fn signed(&self, form: &Form) -> Result<reqwest::Request, CloudError> {
        let credentials = self.credentials.read()?;
        let now = time::basic(time::now_unix_s());
        let mut headers =
            vec![("content-type", FORM), ("host", self.host.as_str()), ("x-amz-date", &now)];
        headers.extend(credentials.token().map(|token| ("x-amz-security-token", token)));
        let body = form.text.as_bytes();
        let request = Request { method: "POST", query: "", headers: &headers, body };
        let scope = Scope { time: &now, region: &self.region, service: "ec2" };
        let authorization = authorization(&request, scope, &credentials);
        let mut request = self.http.post(self.endpoint.clone()).body(form.text.clone());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.header("authorization", authorization).build();
        // An error could have a header in it.
        request.map_err(|_| {
            CloudError::new(
                CloudErrorKind::NotAllowed,
                "the credentials for EC2 fit into no header",
            )
        })
    }
}

/// The body of an answer.
async fn whole(mut answer: Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(part) = answer.chunk().await.map_err(|error| chain(&error.without_url()))? {
        if body.len() + part.len() > ANSWER_BYTES_MAX {
            return Err(format!("its answer is longer than {ANSWER_BYTES_MAX} bytes"));
        }
        body.extend_from_slice(&part);
    }
    Ok(body)
}

/// Some number from 0 to 1, so that those who were told to come later do not come together.
fn share() -> f64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    f64::from(now.map_or(0, |since| since.subsec_nanos() % 1_000_000)) / 1e6
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const LITTLE: Waits = Waits {
        answer: Duration::from_millis(200),
        request: Duration::from_millis(600),
        list: Duration::from_secs(3600),
        pause: Duration::from_millis(1),
    };

    /// A client for a server at this address, and the file of its keys.
    fn client(address: SocketAddr, waits: Waits) -> (Client, tempfile::NamedTempFile) {
        let keys = tempfile::NamedTempFile::new().expect("a file");
        let lines =
            "aws_access_key_id = a\naws_secret_access_key = b\naws_session_token = c/d+e=\n";
        std::fs::write(keys.path(), lines).expect("it is written");
        let (endpoint, credentials) =
            (format!("http://{address}"), Source::File(keys.path().to_owned()));
        let client = Client::new("a", Some(&endpoint), credentials, waits).expect("a client");
        (client, keys)
    }

    fn form() -> Form {
        Form::new("DescribeInstances", "reservationSet")
    }

    /// What a client with little patience gets from a server at this address.
    async fn asked(address: SocketAddr, again: Again) -> CloudError {
        let (client, _keys) = client(address, LITTLE);
        client.ask("can't list", &form(), again).await.expect_err("no answer").error
    }

    async fn served(router: axum::Router) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    /// What it gets from one that answers so.
    async fn answered(status: u16, body: &'static str) -> CloudError {
        let status = axum::http::StatusCode::from_u16(status).expect("a status");
        let router = axum::Router::new().fallback(async move || (status, body));
        asked(served(router).await, Again::Harmless).await
    }

    #[tokio::test]
    async fn a_server_that_never_answers_is_not_waited_for() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        for again in [Again::Harmless, Again::MakesTwo] {
            let error = asked(address, again).await;
            assert_eq!(error.kind, CloudErrorKind::Unclear);
            assert!(error.message.contains("no answer within 0.20 s"), "{error}");
        }
    }

    #[tokio::test]
    async fn what_does_not_answer_as_ec2_does_is_said_to() {
        let error = answered(200, "<html><p>Please log in</html>").await;
        assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
        assert!(error.message.contains("as EC2 does"), "{error}");
        let elsewhere = answered(307, "").await;
        assert!(elsewhere.message.contains("307"), "{elsewhere}");
    }

    #[test]
    fn only_ec2s_own_answer_is_one() {
        for (text, why) in [
            ("<html/>", "`html` and not `DescribeInstancesResponse`"),
            ("<Response><reservationSet/></Response>", "and not"),
            ("<DescribeImagesResponse><reservationSet/></DescribeImagesResponse>", "and not"),
            ("<DescribeInstancesResponse/>", "no `reservationSet`"),
        ] {
            let answer = Element::parse(text.as_bytes()).expect("a document");
            let refused = form().refuses(&answer).expect(text);
            assert!(refused.contains(why), "{text}: {refused}");
        }
        let empty = "<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>";
        let answer = Element::parse(empty.as_bytes()).expect("a document");
        assert_eq!(form().refuses(&answer), None);
    }

    /// Reads a list without an end, of so many items in each page. Returns why that is given up, and after how many pages.
    async fn endless(items: usize) -> (String, usize) {
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        let page = async move || {
            let number = counted.fetch_add(1, Ordering::Relaxed);
            format!(
                "<DescribeInstancesResponse><reservationSet/><nextToken>{number}</nextToken></DescribeInstancesResponse>"
            )
        };
        let address = served(axum::Router::new().fallback(page)).await;
        let hour = Duration::from_secs(3600);
        let waits = Waits { answer: hour, request: hour, ..LITTLE };
        let (client, _keys) = client(address, waits);
        let read = |_: &Element| Ok(vec![(); items]);
        let error = client.pages("can't list", &form(), read).await.expect_err("no end");
        assert_eq!(error.kind, CloudErrorKind::Unclear);
        (error.message, sent.load(Ordering::Relaxed))
    }

    #[tokio::test]
    async fn pages_without_an_end_are_not_read_for_ever() {
        let (error, sent) = endless(1).await;
        assert!(error.contains("at most 100"), "{error}");
        assert_eq!(sent, 100);
    }

    #[tokio::test]
    async fn more_items_than_there_can_be_are_not_kept_and_the_limit_is_named() {
        let (error, sent) = endless(20_000).await;
        assert!(error.contains("at most 50000"), "{error}");
        assert_eq!(sent, 3);
    }

    #[tokio::test]
    async fn all_pages_together_have_a_deadline() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let hour = Duration::from_secs(3600);
        let waits =
            Waits { answer: hour, request: hour, list: Duration::from_millis(50), ..LITTLE };
        let (client, _keys) = client(address, waits);
        let read = |_: &Element| Ok(vec![()]);
        let error = client.pages("can't list", &form(), read).await.expect_err("no answer");
        assert_eq!(error.kind, CloudErrorKind::Unclear);
        assert!(error.message.contains("within 0.05 s"), "{error}");
    }

    /// The headers that are sent, read back from the request, have the signature that is sent.
    #[test]
    fn what_is_sent_is_what_is_signed() {
        let (client, _keys) = client(([127, 0, 0, 1], 8123).into(), LITTLE);
        let request = client.signed(&form()).expect("a request");
        let header = |name: &str| {
            let values: Vec<_> = request.headers().get_all(name).iter().collect();
            assert_eq!(values.len(), 1, "{name}: {values:?}");
            values[0].to_str().expect("a text")
        };
        let sent = header("authorization");
        let (_, names) = sent.split_once("SignedHeaders=").expect("the names");
        let (names, _) = names.split_once(',').expect("their end");
        let headers: Vec<(&str, &str)> =
            names.split(';').map(|name| (name, header(name))).collect();
        assert_eq!(names, "content-type;host;x-amz-date;x-amz-security-token");
        assert_eq!(header("host"), request.url().authority());
        assert_eq!(header("x-amz-security-token"), "c/d+e=");
        let again = Request {
            method: request.method().as_str(),
            query: request.url().query().unwrap_or_default(),
            headers: &headers,
            body: request.body().and_then(|body| body.as_bytes()).expect("a body"),
        };
        let scope = Scope { time: header("x-amz-date"), region: "a", service: "ec2" };
        let credentials = client.credentials.read().expect("keys");
        assert_eq!(sent, authorization(&again, scope, &credentials));
        assert_eq!(request.url().path(), "/");
    }

    #[tokio::test]
    async fn who_has_no_time_is_not_asked_for_ever() {
        let busy = "<Response><Errors><Error><Code>RequestLimitExceeded</Code></Error></Errors></Response>";
        let error = answered(503, busy).await;
        // On a slow machine the last one of the answers may be late.
        let kinds = [CloudErrorKind::Throttled, CloudErrorKind::Unclear];
        assert!(kinds.contains(&error.kind), "{error}");
    }

    #[test]
    fn fields_of_a_form_are_numbered_from_1() {
        let form = Form::new("A", "b").filter(1, "tag:x", ["a b", "c"]).with_list("Id", [7]);
        assert_eq!(
            form.text,
            "Action=A&Version=2016-11-15&Filter.1.Name=tag%3Ax&Filter.1.Value.1=a%20b&Filter.1.Value.2=c&Id.1=7"
        );
    }
}
