//! The connections of one listener: how many there may be, and how long each may keep a place
//! without doing anything with it.
//!
//! A client that sends its request byte by byte, that stops in the middle of a body, or that never reads its
//! answer is hung up on; the others do not notice it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::middleware::map_request;
use axum::serve::Listener;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use perigee_model::Problem;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep, timeout, timeout_at};

/// Connections that are told at the same time that there is no place for them; more are hung up on.
const REFUSALS_MAX: usize = 64;
/// A refused client may send so long before its connection is closed.
const REFUSAL_DEADLINE: Duration = Duration::from_secs(1);

/// What one listener's clients may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Open at the same time.
    pub connections: usize,
    /// From the beginning, or from the end of the last answer, until all headers of a request are there.
    pub headers: Duration,
    /// Until the next bytes of a body come, and until the client takes the next bytes of an answer.
    pub silence: Duration,
    /// What a body has to bring on average, beyond `silence` for its beginning.
    pub body_bytes_per_s: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            headers: Duration::from_secs(30),
            silence: Duration::from_secs(60),
            body_bytes_per_s: 4096,
        }
    }
}

/// Why a body is not read to its end.
#[derive(Debug, thiserror::Error)]
enum BodyError {
    #[error("no byte of the body came for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("the body came slower than {0} bytes a second")]
    Slow(u64),
    #[error(transparent)]
    Broken(#[from] axum::Error),
}

/// Serves until it is dropped; the connections that are open then go on.
pub(crate) async fn serve<L: Listener>(mut listener: L, router: Router, limits: Limits) {
    let slow_bodies = map_request(move |request: Request| async move {
        request.map(|body| Body::from_stream(in_time(body.into_data_stream(), limits)))
    });
    let router = router.layer(slow_bodies);
    let permits = Arc::new(Semaphore::new(limits.connections));
    let refusals = Arc::new(Semaphore::new(REFUSALS_MAX));
    loop {
        let (stream, _) = listener.accept().await;
        let stream = Impatient { stream, patience: limits.silence, until: None };
        if let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
            let router = router.clone();
            tokio::spawn(async move {
                let _permit = permit;
                converse(stream, router, limits).await;
            });
        } else if let Ok(refusal) = Arc::clone(&refusals).try_acquire_owned() {
            tokio::spawn(async move {
                let _refusal = refusal;
                // Whether it reads the answer is the client's affair.
                drop(timeout(REFUSAL_DEADLINE, refuse(stream, limits)).await);
            });
        }
    }
}

pub(crate) async fn converse<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    limits: Limits,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.headers)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = connection.await {
        tracing::debug!(%error, "an HTTP connection ended");
    }
}

/// Says why, and takes what the client sends meanwhile: a close before it is read would be a reset.
async fn refuse(mut stream: impl AsyncRead + AsyncWrite + Unpin, limits: Limits) -> io::Result<()> {
    let why = format!("{} connections are open, and no more are taken", limits.connections);
    let problem = Problem::unavailable("answer the request", why).next("try again in a minute");
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

/// A body that fails when it does not come.
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

/// A stream whose writes fail when the other side takes nothing for too long.
struct Impatient<S> {
    stream: S,
    patience: Duration,
    /// Set while a write waits.
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
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
        let why = format!("the client took nothing for {} s", patience.as_secs());
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
