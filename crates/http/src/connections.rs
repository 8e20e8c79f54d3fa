//! The connections of one listener: their number is limited, and so is the time for which each may be idle.
//!
//! A client that sends its request byte by byte, that stops in the middle of a body, or that never reads its
//! answer is disconnected. The other clients are not affected.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::middleware::{Next, from_fn, map_request};
use axum::serve::Listener;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use perigee_model::Problem;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep, timeout, timeout_at};

use crate::guard::{self, Guard};
use crate::identity::Identity;
use crate::peer::{ClientAddress, Peer};
use crate::seldom::Seldom;
use places::{ConnectionPlace, Places};

pub mod places;

/// The number of refused connections that get an answer at the same time; further ones are closed at once.
const REFUSALS_MAX: usize = 64;
/// How long a refused client may send before its connection is closed.
const REFUSAL_DEADLINE: Duration = Duration::from_secs(1);

/// The limits of one listener's clients.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The most connections at the same time.
    pub connections: usize,
    /// The most of them from one address.
    pub connections_of_one: usize,
    /// The time for a TLS handshake.
    pub handshake: Duration,
    /// The time from the connection's start, or from the end of the last answer, until all headers of a request
    /// have arrived.
    pub headers: Duration,
    /// The time until the next bytes of a body arrive, and until the client receives the next bytes of an answer.
    pub silence: Duration,
    /// The least average rate of a body, after `silence` for its beginning.
    pub body_bytes_per_s: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            connections_of_one: 512,
            handshake: Duration::from_secs(10),
            headers: Duration::from_secs(30),
            silence: SILENCE_MAX,
            body_bytes_per_s: 4096,
        }
    }
}

/// The reason why a body is not read to its end.
#[derive(Debug, thiserror::Error)]
enum BodyError {
    #[error("no byte of the body came for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("the body came slower than {0} bytes a second")]
    Slow(u64),
    #[error(transparent)]
    Broken(#[from] axum::Error),
}

/// A connection as it was accepted.
pub(crate) trait Accepted {
    /// The user, of a process of this host; `None` for one that is not known.
    fn user(&self) -> Option<u32>;

    /// Sends what is written without waiting for more. The body of an answer is written after its head: the kernel would
    /// keep it until the client has acknowledged the head, which a client does after 40 ms.
    fn send_at_once(&self) -> io::Result<()> {
        Ok(())
    }

    /// Lets it end when the other side has vanished.
    fn notice_loss(&self) {}
}

impl Accepted for TcpStream {
    fn user(&self) -> Option<u32> {
        None
    }

    fn send_at_once(&self) -> io::Result<()> {
        self.set_nodelay(true)
    }

    fn notice_loss(&self) {
        notice_loss(self);
    }
}

impl Accepted for UnixStream {
    fn user(&self) -> Option<u32> {
        self.peer_cred().ok().map(|peer| peer.uid())
    }
}

/// A connection is asked for a sign of life after so many seconds of silence, and then as often.
const SIGN_OF_LIFE_S: u32 = 20;
/// After so many signs that did not come the other side has vanished.
const SIGNS_MISSED: u32 = 3;

/// Has the kernel end a silent connection whose other side has vanished: a tunnel may be silent for hours.
pub(crate) fn notice_loss(stream: &TcpStream) {
    use nix::sys::socket::{setsockopt, sockopt};
    let set = || {
        setsockopt(stream, sockopt::TcpKeepIdle, &SIGN_OF_LIFE_S)?;
        setsockopt(stream, sockopt::TcpKeepInterval, &SIGN_OF_LIFE_S)?;
        setsockopt(stream, sockopt::TcpKeepCount, &SIGNS_MISSED)?;
        setsockopt(stream, sockopt::KeepAlive, &true)
    };
    if let Err(error) = set() {
        tracing::warn!(%error, "a client that vanishes is not noticed");
    }
}

/// Serves until it is dropped. Connections that are open then stay open.
pub(crate) async fn serve<L: Listener>(
    mut listener: L,
    router: Router,
    limits: Limits,
    guard: Guard,
) where
    ClientAddress: From<L::Addr>,
    L::Io: Accepted,
{
    let tls = guard.identity.clone();
    let checked =
        from_fn(move |request: Request, next: Next| guard::check(guard.clone(), request, next));
    let slow_bodies = map_request(move |request: Request| async move {
        request.map(|body| Body::from_stream(in_time(body.into_data_stream(), limits)))
    });
    let router = router.layer(slow_bodies).layer(checked);
    let places = Places::new(limits.connections, limits.connections_of_one);
    let refusals = Arc::new(Semaphore::new(REFUSALS_MAX));
    let no_tls = Arc::new(Seldom::default());
    loop {
        let (stream, address) = listener.accept().await;
        let address = ClientAddress::from(address);
        let plain = Peer::of_plain(address, stream.user());
        if let Err(error) = stream.send_at_once() {
            // The client has gone already, or its answers come later.
            tracing::debug!(?address, %error, "can't set an option of a connection");
        }
        stream.notice_loss();
        let stream = Impatient::new(stream, limits.silence);
        match places.take(address) {
            Ok(place) => {
                let client = (address, plain, Some(Arc::new(place)));
                let (router, tls, no_tls) = (router.clone(), tls.clone(), Arc::clone(&no_tls));
                tokio::spawn(welcome(stream, client, router, tls, limits, no_tls));
            }
            Err(why) => {
                // The connections beyond these are closed without a word.
                if let Ok(refusal) = Arc::clone(&refusals).try_acquire_owned() {
                    tokio::spawn(turn_away(stream, tls.clone(), why, refusal));
                }
            }
        }
    }
}

/// Serves one connection until its end: first the TLS handshake, where there is an identity, then the requests. A tunnel keeps the
/// connection's place for longer than the conversation.
async fn welcome<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    (address, plain, place): (ClientAddress, Peer, Option<Arc<ConnectionPlace>>),
    router: Router,
    tls: Option<Arc<Identity>>,
    limits: Limits,
    no_tls: Arc<Seldom>,
) {
    let Some(tls) = tls else {
        return converse(stream, (address, plain, place), router, limits).await;
    };
    let error = match timeout(limits.handshake, tls.accept(stream)).await {
        Ok(Ok((stream, peer))) => {
            return converse(stream, (address, peer, place), router, limits).await;
        }
        // Whoever measures the way here only connects.
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it did not finish its handshake in time".to_owned(),
    };
    if let Some(count) = no_tls.happened() {
        tracing::info!(?address, %error, count, "no TLS with a client");
    }
}

/// Tells a client for whom there is no place why, and closes the connection.
async fn turn_away<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    tls: Option<Arc<Identity>>,
    why: String,
    _refusal: OwnedSemaphorePermit,
) {
    let answer = async {
        match tls {
            None => refuse(stream, why).await,
            Some(tls) => refuse(tls.accept(stream).await?.0, why).await,
        }
    };
    // It does not matter whether the client reads the answer.
    drop(timeout(REFUSAL_DEADLINE, answer).await);
}

pub(crate) async fn converse<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    (address, peer, place): (ClientAddress, Peer, Option<Arc<ConnectionPlace>>),
    router: Router,
    limits: Limits,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<_>| {
        request.extensions_mut().insert(address);
        request.extensions_mut().insert(peer.clone());
        if let Some(place) = &place {
            request.extensions_mut().insert(Arc::clone(place));
        }
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.headers)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    if let Err(error) = connection.await {
        tracing::debug!(%error, "an HTTP connection ended");
    }
}

/// Sends the reason, and reads what the client sends: closing with unread bytes would reset the connection
/// before the client can read the answer.
async fn refuse(mut stream: impl AsyncRead + AsyncWrite + Unpin, why: String) -> io::Result<()> {
    let problem =
        Problem::unavailable("can't answer the request", why).next("try again in a minute");
    let body = serde_json::to_vec(&problem)?;
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(&body).await?;
    stream.shutdown().await?;
    let mut buffer = [0; 4096];
    while stream.read(&mut buffer).await? > 0 {}
    Ok(())
}

/// A body that fails if it arrives too slowly.
fn in_time(
    body: BodyDataStream,
    limits: Limits,
) -> impl Stream<Item = Result<Bytes, BodyError>> + Send {
    let begin = Instant::now();
    stream::try_unfold((body, 0), move |(mut body, received): (BodyDataStream, u64)| async move {
        let earned = Duration::from_secs(received / limits.body_bytes_per_s.max(1));
        let (silent, slow) = (Instant::now() + limits.silence, begin + limits.silence + earned);
        let next = timeout_at(silent.min(slow), body.next()).await.map_err(|_| {
            if slow < silent && received > 0 {
                BodyError::Slow(limits.body_bytes_per_s)
            } else {
                BodyError::Silent(limits.silence)
            }
        })?;
        let Some(bytes) = next.transpose()? else { return Ok(None) };
        let received = received + bytes.len() as u64;
        Ok(Some((bytes, (body, received))))
    })
}

/// How long bytes may wait until the other side takes some of them.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// A stream whose writes fail if the other side receives nothing for too long.
pub(crate) struct Impatient<S> {
    stream: S,
    patience: Duration,
    /// Set while a write waits.
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    fn new(stream: S, patience: Duration) -> Self {
        Self { stream, patience, until: None }
    }

    /// What bytes are carried to, from a connection that is not read while they wait: that its other side has gone would not be
    /// noticed.
    pub(crate) fn carried_to(stream: S) -> Self {
        Self::new(stream, SILENCE_MAX)
    }

    fn judge<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.until = None;
            return written;
        }
        let patience = self.patience;
        let until = self.until.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(until.as_mut().poll(context));
        let why = format!("the other side received nothing for {} s", patience.as_secs());
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.judge(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(context, closed)
    }
}

#[cfg(test)]
mod tests;
