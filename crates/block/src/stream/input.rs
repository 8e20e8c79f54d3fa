//! Input: reads all bytes that the socket has, and splits them into frames.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::io::poll_read_buf;

use super::buffers::{BUFFER_BYTES, Buffer};

/// A longer payload that has not fully arrived is received directly into separate memory.
const PAYLOAD_IN_BUFFER_MAX: usize = 64 << 10;
/// If less than this is free at the buffer's end, its content is moved to the front.
const ROOM_BYTES_MIN: usize = 64 << 10;

/// The format of a protocol's frames: a head, then a payload whose length is in the head.
pub trait Framing {
    /// The parsed head of a frame.
    type Head: Copy;
    /// The reason why bytes are no frame of the protocol. The connection ends with it, because nobody knows
    /// where the next frame begins.
    type Error;

    /// Parses a head at the start of `bytes`. Returns `None` if it has not fully arrived.
    ///
    /// # Errors
    /// The bytes are not a valid head, or the payload is longer than the protocol allows.
    fn head(&self, bytes: &[u8]) -> Result<Option<Measured<Self::Head>>, Self::Error>;
}

/// A head, and how many bytes it and its payload take in the stream.
pub struct Measured<H> {
    /// The parsed head.
    pub head: H,
    /// The length of the head.
    pub head_bytes: usize,
    /// The length of what follows the head: the payload, and padding if the protocol has it. 0 when there is
    /// none.
    pub payload_bytes: usize,
}

/// A complete frame at the front of the input, until [`Input::skip`] or [`Input::take`] removes it.
pub struct Frame<H> {
    /// The parsed head.
    pub head: H,
    /// The position of the payload, in the buffer or in separate memory.
    payload: Range<usize>,
}

/// A frame whose payload has separate memory. It may not have fully arrived.
struct Large<H> {
    head: H,
    payload: BytesMut,
    missing_bytes: usize,
}

/// What one connection has received and not processed yet. At its front is a frame, or a part of one.
pub struct Input<F: Framing> {
    framing: F,
    buffer: Option<Buffer>,
    /// The start of the buffer's unprocessed bytes.
    start: usize,
    end: usize,
    /// This frame precedes the bytes in the buffer.
    large: Option<Large<F::Head>>,
}

impl<F: Framing> Input<F> {
    /// An empty input.
    pub fn new(framing: F) -> Self {
        Self { framing, buffer: None, start: 0, end: 0, large: None }
    }

    /// The first frame, if it has fully arrived.
    ///
    /// # Errors
    /// As [`Framing::head`].
    pub fn first(&mut self) -> Result<Option<Frame<F::Head>>, F::Error> {
        if let Some(large) = &self.large {
            let frame = Frame { head: large.head, payload: 0..large.payload.len() };
            return Ok((large.missing_bytes == 0).then_some(frame));
        }
        let Some(buffer) = &self.buffer else { return Ok(None) };
        let Some(measured) = self.framing.head(&buffer[self.start..self.end])? else {
            return Ok(None);
        };
        let Measured { head, head_bytes, payload_bytes } = measured;
        let at = self.start + head_bytes;
        let payload = at..at + payload_bytes;
        if payload.end <= self.end {
            return Ok(Some(Frame { head, payload }));
        }
        if payload.len() > PAYLOAD_IN_BUFFER_MAX {
            self.begin_large(head, payload);
        }
        Ok(None)
    }

    /// The payload of the first frame, which [`Self::first`] has returned.
    pub fn payload(&self, frame: &Frame<F::Head>) -> &[u8] {
        match (&self.large, &self.buffer) {
            (Some(large), _) => &large.payload,
            (None, Some(buffer)) => &buffer[frame.payload.clone()],
            (None, None) => &[],
        }
    }

    /// Removes the first frame.
    pub fn skip(&mut self, frame: Frame<F::Head>) {
        if self.large.take().is_none() {
            self.start = frame.payload.end;
            self.give_back_if_empty();
        }
    }

    /// Removes the first frame and keeps its payload.
    pub fn take(&mut self, frame: Frame<F::Head>) -> Bytes {
        if let Some(large) = self.large.take() {
            return large.payload.freeze();
        }
        let payload = Bytes::copy_from_slice(self.payload(&frame));
        self.skip(frame);
        payload
    }

    /// Whether there is room to read from the socket.
    pub fn has_room(&self) -> bool {
        match &self.large {
            Some(large) => large.missing_bytes > 0,
            None => self.end - self.start < BUFFER_BYTES - ROOM_BYTES_MIN,
        }
    }

    /// Reads once. 0 bytes mean the end of the stream. A buffer is held only while it contains bytes.
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

    fn begin_large(&mut self, head: F::Head, place: Range<usize>) {
        let Some(buffer) = &self.buffer else { return };
        let mut payload = BytesMut::with_capacity(place.len());
        payload.extend_from_slice(&buffer[place.start..self.end]);
        let missing_bytes = place.len() - payload.len();
        self.large = Some(Large { head, payload, missing_bytes });
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
