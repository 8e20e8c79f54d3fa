//! A connection of a client with the controller that carries bytes both ways, as a WebSocket (RFC 6455): the console, the screen
//! and port 22 of a VM.
//!
//! The bytes are cut into binary messages anywhere. Text that a client sends counts as its bytes. Who offers the subprotocol `binary`
//! gets it. Nothing limits how long both sides may be silent: the server pings, and a client that answers no ping has vanished. It pings
//! only while it reads. If one of the two takes nothing for a minute while bytes wait for it, both are disconnected. A WebSocket counts
//! as a connection of its listener until it has ended.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::FusedStream as _;
use futures_util::{SinkExt as _, StreamExt as _};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use perigee_model::Problem;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf, copy, split};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Utf8Bytes};

use crate::connections::Impatient;
use crate::connections::places::ConnectionPlace;

pub(crate) const PROTOCOL: &str = "websocket";
pub(crate) const VERSION: &str = "13";
/// What noVNC and websockify call a WebSocket whose messages are bytes.
const BINARY: &str = "binary";
/// Who offers this too hears of a refusal by it: a browser takes no answer without a subprotocol that was offered.
const REFUSED: &str = "perigee-refused";

/// The longest message that is taken, in one frame or in several.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// At most this much goes into one message.
const SENT_BYTES: usize = 16 << 10;
/// Of what comes, so much is read at once.
const READ_BYTES: usize = 16 << 10;

/// No more fits into the frame that says the end (RFC 6455, 5.5).
const REASON_BYTES_MAX: usize = 123;

/// How often a silent client is asked for a sign of life.
const PING_EVERY: Duration = Duration::from_secs(20);
/// After so many questions without an answer it has vanished.
const PINGS_MAX: u32 = 3;
/// How long a side that is told the end may take to say it too.
const GOODBYE_MAX: Duration = Duration::from_secs(5);

/// The bytes of both directions.
#[derive(Debug)]
pub struct WebSocket<S = TokioIo<Upgraded>> {
    messages: WebSocketStream<S>,
    /// What has come and was not read yet.
    unread: Bytes,
    /// Of a server.
    pings: Option<Interval>,
    /// Pings since the last message of the other side.
    unanswered: u32,
}

impl<S: AsyncRead + AsyncWrite + Unpin> WebSocket<S> {
    async fn new(stream: S, role: Role) -> Self {
        let config = WebSocketConfig::default()
            .read_buffer_size(READ_BYTES)
            .write_buffer_size(0)
            .max_write_buffer_size(4 * SENT_BYTES)
            .max_message_size(Some(MESSAGE_BYTES_MAX))
            .max_frame_size(Some(MESSAGE_BYTES_MAX));
        let messages = WebSocketStream::from_raw_socket(stream, role, Some(config)).await;
        let pings = (role == Role::Server).then(|| {
            let mut pings = interval_at(Instant::now() + PING_EVERY, PING_EVERY);
            pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
            pings
        });
        Self { messages, unread: Bytes::new(), pings, unanswered: 0 }
    }

    pub(crate) async fn of_client(stream: S) -> Self {
        Self::new(stream, Role::Client).await
    }

    /// Asks for a sign of life when it is time for that. Pending until then.
    fn poll_ping(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(pings) = &mut self.pings else { return Poll::Pending };
        ready!(pings.poll_tick(cx));
        if self.unanswered == PINGS_MAX {
            let why = format!("it has answered none of {PINGS_MAX} pings");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
        }
        self.unanswered += 1;
        // Who does not take what waits for it is noticed by that, and who was told the end by its silence.
        if self.messages.poll_ready_unpin(cx).is_ready() {
            let _ = self.messages.start_send_unpin(Message::Ping(Bytes::new()));
            let _ = self.messages.poll_flush_unpin(cx);
        }
        Poll::Ready(Ok(()))
    }

    /// Tells the other side the end, and waits until it has said it too.
    async fn leave(mut self, code: CloseCode, why: impl Into<Utf8Bytes>) {
        let said = async {
            let is_understood = !self.messages.is_terminated();
            let goodbye = CloseFrame { code, reason: why.into() };
            self.messages.close(Some(goodbye)).await?;
            while let Some(message) = self.messages.next().await {
                message?;
            }
            // With unread bytes the kernel would drop what was said.
            let mut rest = [0; 1024];
            while !is_understood && self.messages.get_mut().read(&mut rest).await? > 0 {}
            Ok::<_, Error>(())
        };
        drop(timeout(GOODBYE_MAX, said).await);
    }
}

fn broken(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        Error::ConnectionClosed | Error::AlreadyClosed => io::ErrorKind::BrokenPipe.into(),
        error => io::Error::other(error),
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for WebSocket<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.unread.is_empty() {
                let length = this.unread.len().min(buffer.remaining());
                buffer.put_slice(&this.unread.split_to(length));
                return Poll::Ready(Ok(()));
            }
            match this.messages.poll_next_unpin(cx) {
                Poll::Ready(None) => return Poll::Ready(Ok(())),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(broken(error))),
                Poll::Ready(Some(Ok(message))) => {
                    this.unanswered = 0;
                    match message {
                        Message::Binary(bytes) => this.unread = bytes,
                        Message::Text(text) => this.unread = text.into(),
                        // A goodbye and a ping are answered while the next message is read.
                        Message::Close(_)
                        | Message::Ping(_)
                        | Message::Pong(_)
                        | Message::Frame(_) => {}
                    }
                }
                Poll::Pending => ready!(this.poll_ping(cx))?,
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for WebSocket<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let messages = &mut self.get_mut().messages;
        ready!(messages.poll_ready_unpin(cx)).map_err(broken)?;
        let length = bytes.len().min(SENT_BYTES);
        let message = Message::Binary(Bytes::copy_from_slice(&bytes[..length]));
        messages.start_send_unpin(message).map_err(broken)?;
        Poll::Ready(Ok(length))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().messages.poll_flush_unpin(cx).map_err(broken)
    }

    /// Says goodbye. What the other side has sent before it has heard that can still be read.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().messages.poll_close_unpin(cx).map_err(broken)
    }
}

/// A client that asks for a WebSocket, as it may.
#[derive(Debug)]
pub struct Asked {
    upgrade: OnUpgrade,
    place: Option<Arc<ConnectionPlace>>,
    accept: HeaderValue,
    is_binary: bool,
    hears_refusals: bool,
}

/// A WebSocket that begins when its answer was sent.
#[derive(Debug)]
pub struct Opening {
    upgrade: OnUpgrade,
    _place: Option<Arc<ConnectionPlace>>,
}

/// Takes a request for a WebSocket.
///
/// # Errors
/// `Invalid` when the request asks for something else.
pub fn asked(mut request: Request) -> Result<Asked, Problem> {
    let key = check(&request).map_err(|why| {
        let what = format!("{} {}", request.method(), request.uri().path());
        Problem::invalid(what, why).next("use a client for WebSockets (RFC 6455), or `perigee vm`")
    })?;
    let accept = derive_accept_key(key.as_bytes());
    let accept = HeaderValue::try_from(accept).map_err(|e| Problem::internal("answer", e))?;
    let is_binary = has_token(request.headers(), &SEC_WEBSOCKET_PROTOCOL, BINARY);
    let hears_refusals = has_token(request.headers(), &SEC_WEBSOCKET_PROTOCOL, REFUSED);
    let place = request.extensions().get::<Arc<ConnectionPlace>>().cloned();
    Ok(Asked {
        upgrade: hyper::upgrade::on(&mut request),
        place,
        accept,
        is_binary,
        hears_refusals,
    })
}

/// The key of a request that is one for a WebSocket (RFC 6455, 4.2.1).
fn check(request: &Request) -> Result<&HeaderValue, String> {
    let headers = request.headers();
    if request.method() != Method::GET || request.version() != Version::HTTP_11 {
        return Err("it is no GET of HTTP/1.1".to_owned());
    }
    if !has_token(headers, &CONNECTION, "upgrade") || !has_token(headers, &UPGRADE, PROTOCOL) {
        return Err(format!("it has no headers `Connection: Upgrade` and `Upgrade: {PROTOCOL}`"));
    }
    if headers.get(SEC_WEBSOCKET_VERSION).is_none_or(|version| version != VERSION) {
        return Err(format!("it has no header `Sec-WebSocket-Version: {VERSION}`"));
    }
    // 16 bytes in base64.
    let key = headers.get(SEC_WEBSOCKET_KEY).filter(|key| key.len() == 24);
    key.ok_or_else(|| "it has no header `Sec-WebSocket-Key` of 16 bytes".to_owned())
}

/// Whether a list in one or several headers has a word, whatever its case is.
fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    let lines = headers.get_all(name).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).any(|word| word.trim().eq_ignore_ascii_case(token))
}

impl Asked {
    /// The answer, which has to be sent, and what comes after it.
    pub fn answer(self) -> (Response, Opening) {
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = answer.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
        headers.insert(SEC_WEBSOCKET_ACCEPT, self.accept);
        if self.is_binary {
            headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(BINARY));
        }
        (answer, Opening { upgrade: self.upgrade, _place: self.place })
    }
}

impl Asked {
    /// Answers, and says why nothing is carried, as a WebSocket that ends at once: a browser keeps any other answer from the page that has
    /// asked. Its subprotocol is `perigee-refused`, if that was offered. With `is_final` it need not be asked for again.
    pub fn refuse(self, is_final: bool, why: String) -> Response {
        let hears = self.hears_refusals;
        let (mut answer, opening) = self.answer();
        if hears {
            let refused = HeaderValue::from_static(REFUSED);
            answer.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, refused);
        }
        let code = if is_final { CloseCode::Unsupported } else { CloseCode::Again };
        tokio::spawn(async move {
            // It counts as a connection until it has ended.
            let Opening { upgrade, _place } = opening;
            let Ok(client) = upgrade.await else { return };
            let client = WebSocket::new(TokioIo::new(client), Role::Server).await;
            client.leave(code, why[..why.floor_char_boundary(REASON_BYTES_MAX)].to_owned()).await;
        });
        answer
    }
}

impl Opening {
    /// Carries bytes between the client and another connection until one of them has closed, or until `over`, which says why.
    ///
    /// # Errors
    /// When the client has gone before the answer.
    pub async fn carry(
        self,
        other: &mut (impl AsyncRead + AsyncWrite + Unpin),
        over: impl Future<Output = &'static str>,
    ) -> io::Result<()> {
        let client = TokioIo::new(self.upgrade.await.map_err(io::Error::other)?);
        carry(WebSocket::new(client, Role::Server).await, other, over).await;
        Ok(())
    }
}

async fn carry<S: AsyncRead + AsyncWrite + Unpin>(
    mut client: WebSocket<S>,
    other: &mut (impl AsyncRead + AsyncWrite + Unpin),
    over: impl Future<Output = &'static str>,
) {
    let (code, why) = {
        let (mut from_client, mut to_client) = split(&mut client);
        let (mut from_other, mut to_other) = split(Impatient::carried_to(other));
        tokio::select! {
            ended = copy(&mut from_client, &mut to_other) => match ended {
                // The client has said goodbye, and was answered, or has gone.
                Ok(_) => return,
                Err(error) => why_broken(&error),
            },
            ended = copy(&mut from_other, &mut to_client) => match ended {
                Ok(_) => (CloseCode::Normal, "the other end has closed"),
                Err(error) => why_broken(&error),
            },
            why = over => (CloseCode::Policy, why),
        }
    };
    client.leave(code, why).await;
}

/// What a side that breaks the rules is told.
fn why_broken(error: &io::Error) -> (CloseCode, &'static str) {
    match error.get_ref().and_then(|error| error.downcast_ref::<Error>()) {
        Some(Error::Capacity(_)) => (CloseCode::Size, "a message is too long"),
        Some(Error::Utf8(_)) => (CloseCode::Invalid, "a text is not UTF-8"),
        Some(Error::Protocol(_)) => (CloseCode::Protocol, "it is no WebSocket (RFC 6455)"),
        _ => (CloseCode::Away, "the connection is broken"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::task::JoinHandle;

    use super::*;

    /// Whatever a slow machine does meanwhile.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A server whose other connection sends back what comes. The first result is what a client has.
    async fn echo() -> (DuplexStream, JoinHandle<()>) {
        let (client, at_server) = duplex(1 << 10);
        let (mut other, echo) = duplex(1 << 10);
        tokio::spawn(async move {
            let (mut reads, mut writes) = split(echo);
            copy(&mut reads, &mut writes).await
        });
        let server = WebSocket::new(at_server, Role::Server).await;
        let carried =
            tokio::spawn(async move { carry(server, &mut other, std::future::pending()).await });
        (client, carried)
    }

    #[tokio::test]
    async fn bytes_go_both_ways_until_the_client_says_goodbye() {
        let (client, carried) = echo().await;
        let (mut from, mut to) = split(WebSocket::of_client(client).await);
        let sent: Vec<u8> =
            (0..1_000_000_u32).map(|at| at.to_le_bytes()[at as usize % 3]).collect();
        let sends = async {
            to.write_all(&sent).await.expect("it is taken");
            to.flush().await.expect("it is taken");
        };
        let mut came = vec![0; sent.len()];
        let (_, read) =
            timeout(PATIENCE, async { tokio::join!(sends, from.read_exact(&mut came)) })
                .await
                .expect("it comes back");
        read.expect("all of it");
        assert!(came == sent);
        to.shutdown().await.expect("a goodbye");
        let mut rest = Vec::new();
        let answered = timeout(PATIENCE, from.read_to_end(&mut rest)).await.expect("an answer");
        assert_eq!(answered.expect("the end"), 0);
        timeout(PATIENCE, carried).await.expect("it ends").expect("without a panic");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_stays_as_long_as_it_answers_pings() {
        let (client, carried) = echo().await;
        let mut client = WebSocket::of_client(client).await;
        let mut byte = [0];
        let hour = timeout(Duration::from_secs(3600), client.read(&mut byte)).await;
        assert!(hour.is_err(), "{hour:?}");
        client.write_all(b"x").await.expect("it is taken");
        client.read_exact(&mut byte).await.expect("it comes back");
        assert!(!carried.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_answers_no_ping_has_vanished() {
        let (_client, carried) = echo().await;
        timeout(Duration::from_secs(120), carried).await.expect("it ends").expect("no panic");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_has_sent_what_nobody_takes_is_not_kept_for_ever() {
        let (client, at_server) = duplex(1 << 20);
        let (mut other, _takes_nothing) = duplex(1 << 10);
        let server = WebSocket::new(at_server, Role::Server).await;
        let carried =
            tokio::spawn(async move { carry(server, &mut other, std::future::pending()).await });
        let mut client = WebSocket::of_client(client).await;
        client.write_all(&[0; 100_000]).await.expect("there is room");
        client.flush().await.expect("there is room");
        timeout(Duration::from_secs(120), carried).await.expect("it ends").expect("no panic");
    }

    /// What a server says at last to a client that sends this.
    async fn told(sent: &[u8]) -> (u16, String) {
        let (mut client, _carried) = echo().await;
        client.write_all(sent).await.expect("it is taken");
        let mut head = [0; 4];
        timeout(PATIENCE, client.read_exact(&mut head)).await.expect("in time").expect("a goodbye");
        assert_eq!(head[0], 0x88, "a goodbye: {head:?}");
        let mut why = vec![0; usize::from(head[1]) - 2];
        client.read_exact(&mut why).await.expect("the reason");
        (u16::from_be_bytes([head[2], head[3]]), String::from_utf8(why).expect("UTF-8"))
    }

    #[tokio::test(start_paused = true)]
    async fn who_breaks_the_rules_is_told_and_left() {
        // A frame with a length of 64 bits, masked. Nothing of its content is waited for.
        let long = [&[0x82, 0xff][..], &(65_537_u64).to_be_bytes(), &[0; 4]].concat();
        assert_eq!(told(&long).await.0, 1009);
        let not_masked = [0x82, 0x01, b'x'];
        assert_eq!(told(&not_masked).await.0, 1002);
    }

    fn request(headers: &[(&str, &str)]) -> Request {
        let mut request = Request::new(Body::empty());
        for (name, value) in headers {
            let name: HeaderName = name.parse().expect("a name");
            request.headers_mut().append(name, value.parse().expect("a value"));
        }
        request
    }

    #[test]
    fn only_a_request_for_a_websocket_is_answered_as_one() {
        let all = [
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "WebSocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        // The example of RFC 6455, 1.3.
        let (answer, _) = asked(request(&all)).expect("a WebSocket").answer();
        assert_eq!(answer.status(), StatusCode::SWITCHING_PROTOCOLS);
        assert_eq!(answer.headers()[SEC_WEBSOCKET_ACCEPT], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert!(!answer.headers().contains_key(SEC_WEBSOCKET_PROTOCOL));
        for missing in 0..all.len() {
            let rest: Vec<_> =
                (0..all.len()).filter(|at| *at != missing).map(|at| all[at]).collect();
            asked(request(&rest)).expect_err("it lacks one");
        }
        for (offered, chosen) in [("chat, binary", true), ("chat", false)] {
            let offers = [&all[..], &[("sec-websocket-protocol", offered)]].concat();
            let (answer, _) = asked(request(&offers)).expect("a WebSocket").answer();
            let protocol = answer.headers().get(SEC_WEBSOCKET_PROTOCOL);
            assert_eq!(protocol.is_some_and(|protocol| protocol == BINARY), chosen);
        }
    }
}
