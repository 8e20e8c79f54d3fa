//! The answer to a request, whose body is read piece by piece and within a deadline.

use std::io;

use axum::http::{HeaderValue, StatusCode};
use bytes::{Bytes, BytesMut};
use futures_util::{Stream, stream};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

/// The longest answer that is read into memory.
pub(super) const ANSWER_BYTES_MAX: usize = 64 << 20;

/// An answer whose body is unread.
#[derive(Debug)]
pub struct Response {
    pub(super) status: StatusCode,
    /// The term of a controller that commands the server instead of this one.
    pub(super) term: Option<HeaderValue>,
    pub(super) body: Incoming,
    /// When the whole body has to be here.
    pub(super) until: Instant,
}

impl Response {
    /// The next bytes of the body; `None` at its end.
    ///
    /// # Errors
    /// When the connection ends, or the answer takes too long.
    pub async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            let frame = timeout_at(self.until, self.body.frame()).await.map_err(|_| too_late())?;
            let Some(frame) = frame else { return Ok(None) };
            // What is not data are trailers, which no server of ours sends.
            if let Ok(data) = frame.map_err(|e| io::Error::other(chain(&e)))?.into_data() {
                return Ok(Some(data));
            }
        }
    }

    /// The body as a stream.
    pub fn bytes_stream(self) -> impl Stream<Item = io::Result<Bytes>> + Unpin + Send {
        let pieces = stream::try_unfold(self, |mut response| async move {
            Ok(response.chunk().await?.map(|bytes| (bytes, response)))
        });
        Box::pin(pieces)
    }

    /// The whole body.
    pub(super) async fn whole(mut self) -> io::Result<Bytes> {
        let mut whole = BytesMut::new();
        while let Some(piece) = self.chunk().await? {
            if whole.len() + piece.len() > ANSWER_BYTES_MAX {
                return Err(too_long("answer"));
            }
            whole.extend_from_slice(&piece);
        }
        Ok(whole.freeze())
    }
}

pub(super) fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the answer did not come in time")
}

pub(super) fn too_long(what: &str) -> io::Error {
    let why =
        format!("the {what} is longer than {} MiB, which is the limit", ANSWER_BYTES_MAX >> 20);
    io::Error::new(io::ErrorKind::FileTooLarge, why)
}

/// An error with its sources, each of them once.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
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
