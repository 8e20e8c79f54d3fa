//! Bytes to frames: what the socket has, taken at once, and the requests in it.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::io::poll_read_buf;

use super::super::super::wire::{Dialect, FramingError, Request};
use super::buffers::{BUFFER_BYTES, Buffer};

/// A longer payload that is not whole yet is received straight into memory of its own.
const PAYLOAD_IN_BUFFER_MAX: usize = 64 << 10;
/// With less room than this at its end, the buffer's content moves to its front.
const ROOM_BYTES_MIN: usize = 64 << 10;

/// A whole request at the front of the input, until [`Input::skip`] or [`Input::take`] removes it.
pub struct Frame {
    pub request: Request,
    /// Where its payload is, in the buffer or in memory of its own.
    payload: Range<usize>,
}

/// A request whose payload has memory of its own, perhaps not all of it here yet.
struct Large {
    request: Request,
    payload: BytesMut,
    missing_bytes: usize,
}

pub struct Input {
    dialect: Dialect,
    buffer: Option<Buffer>,
    /// What of the buffer is not taken yet.
    start: usize,
    end: usize,
    /// It comes before what is in the buffer.
    large: Option<Large>,
}

impl Input {
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect, buffer: None, start: 0, end: 0, large: None }
    }

    /// The first request, if it is here whole.
    ///
    /// # Errors
    /// When the bytes are no request.
    pub fn first(&mut self) -> Result<Option<Frame>, FramingError> {
        if let Some(large) = &self.large {
            let frame = Frame { request: large.request, payload: 0..large.payload.len() };
            return Ok((large.missing_bytes == 0).then_some(frame));
        }
        let Some(buffer) = &self.buffer else { return Ok(None) };
        let Some(request) = Request::parse(self.dialect, &buffer[self.start..self.end])? else {
            return Ok(None);
        };
        let at = self.start + self.dialect.request_head_bytes();
        let payload = at..at + request.payload_bytes(self.dialect);
        if payload.end <= self.end {
            return Ok(Some(Frame { request, payload }));
        }
        if payload.len() > PAYLOAD_IN_BUFFER_MAX {
            self.begin_large(request, payload);
        }
        Ok(None)
    }

    pub fn payload(&self, frame: &Frame) -> &[u8] {
        match (&self.large, &self.buffer) {
            (Some(large), _) => &large.payload,
            (None, Some(buffer)) => &buffer[frame.payload.clone()],
            (None, None) => &[],
        }
    }

    /// Removes the first request.
    pub fn skip(&mut self, frame: Frame) {
        if self.large.take().is_none() {
            self.start = frame.payload.end;
            self.give_back_if_empty();
        }
    }

    /// Removes the first request and keeps its payload.
    pub fn take(&mut self, frame: Frame) -> Bytes {
        if let Some(large) = self.large.take() {
            return large.payload.freeze();
        }
        let payload = Bytes::copy_from_slice(self.payload(&frame));
        self.skip(frame);
        payload
    }

    /// Whether reading from the socket makes sense.
    pub fn has_room(&self) -> bool {
        match &self.large {
            Some(large) => large.missing_bytes > 0,
            None => self.end - self.start < BUFFER_BYTES - ROOM_BYTES_MIN,
        }
    }

    /// Reads once; 0 bytes are the stream's end. A buffer is held only while bytes are in it.
    pub fn poll_fill<S: AsyncRead>(
        &mut self,
        stream: Pin<&mut S>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if let Some(large) = &mut self.large {
            let mut rest = (&mut large.payload).limit(large.missing_bytes);
            let read = ready!(poll_read_buf(stream, cx, &mut rest))?;
            large.missing_bytes -= read;
            return Poll::Ready(Ok(read));
        }
        let buffer = self.buffer.get_or_insert_with(Buffer::borrow);
        if self.start > 0 && BUFFER_BYTES - self.end < ROOM_BYTES_MIN {
            buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let mut free = ReadBuf::new(&mut buffer[self.end..]);
        let polled = stream.poll_read(cx, &mut free);
        let read = free.filled().len();
        self.end += read;
        self.give_back_if_empty();
        polled.map_ok(|()| read)
    }

    fn begin_large(&mut self, request: Request, place: Range<usize>) {
        let Some(buffer) = &self.buffer else { return };
        let mut payload = BytesMut::with_capacity(place.len());
        payload.extend_from_slice(&buffer[place.start..self.end]);
        let missing_bytes = place.len() - payload.len();
        self.large = Some(Large { request, payload, missing_bytes });
        self.start = self.end;
        self.give_back_if_empty();
    }

    fn give_back_if_empty(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            self.buffer = None;
        }
    }
}
