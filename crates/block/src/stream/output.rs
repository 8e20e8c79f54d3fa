//! Output: collects replies, so that one write to the socket sends many of them.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes};
use tokio::io::AsyncWrite;

use super::buffers::{BUFFER_BYTES, Buffer};

/// The number of pieces in one write.
const PIECES_MAX: usize = 8;

/// The replies of one connection that were not sent yet.
#[derive(Default)]
pub struct Output {
    buffer: Option<Buffer>,
    /// The start of the buffer's unsent bytes.
    start: usize,
    end: usize,
    /// Sent after the buffer. While this is not empty, no reply is added.
    rest: VecDeque<Bytes>,
    /// Something was written and the stream was not flushed since.
    unflushed: bool,
}

impl Output {
    /// Whether every reply was handed to the stream.
    pub fn is_empty(&self) -> bool {
        self.start == self.end && self.rest.is_empty()
    }

    /// Whether nothing is left, including in a stream that buffers itself (TLS).
    pub fn is_sent(&self) -> bool {
        self.is_empty() && !self.unflushed
    }

    pub(crate) fn unsent_bytes(&self) -> usize {
        self.end - self.start + self.rest.iter().map(Bytes::len).sum::<usize>()
    }

    /// Whether a reply may be added. It may have any length, but at most one reply exceeds the buffer.
    pub fn accepts(&self) -> bool {
        self.rest.is_empty() && self.end < BUFFER_BYTES
    }

    /// Space for a reply of this many bytes, with any content. [`Self::commit`] adds the reply.
    pub fn room(&mut self, length: usize) -> Option<&mut [u8]> {
        if !self.rest.is_empty() || length > BUFFER_BYTES - self.end {
            return None;
        }
        let buffer = self.buffer.get_or_insert_with(Buffer::borrow);
        Some(&mut buffer[self.end..self.end + length])
    }

    /// Adds the reply that fills the first `length` bytes of the last [`Self::room`]. `length` is at most the
    /// length of that room.
    pub fn commit(&mut self, length: usize) {
        self.end += length;
    }

    /// Adds a reply in pieces. If it does not fit the buffer, it is sent without being copied.
    pub fn push<const N: usize>(&mut self, pieces: [Bytes; N]) {
        let length = pieces.iter().map(Bytes::len).sum();
        match self.room(length) {
            Some(mut room) => {
                pieces.iter().for_each(|piece| room.put_slice(piece));
                self.commit(length);
            }
            None => self.rest.extend(pieces.into_iter().filter(|piece| !piece.is_empty())),
        }
    }

    /// Ready when everything is sent. A buffer is held only while it contains unsent bytes.
    pub fn poll_send<S: AsyncWrite>(
        &mut self,
        mut stream: Pin<&mut S>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while !self.is_empty() {
            let sent = ready!(self.poll_write(stream.as_mut(), cx))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unflushed = true;
            self.advance(sent);
        }
        // Frees a buffer whose space was requested but not used.
        self.buffer = None;
        if self.unflushed {
            ready!(stream.poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write<S: AsyncWrite>(
        &self,
        stream: Pin<&mut S>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        let buffered = self.buffer.as_ref().map_or(&[][..], |b| &b[self.start..self.end]);
        if self.rest.is_empty() {
            return stream.poll_write(cx, buffered);
        }
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        let sources = std::iter::once(buffered).chain(self.rest.iter().map(|piece| &piece[..]));
        let mut count = 0;
        for source in sources.filter(|source| !source.is_empty()).take(PIECES_MAX) {
            pieces[count] = IoSlice::new(source);
            count += 1;
        }
        stream.poll_write_vectored(cx, &pieces[..count])
    }

    fn advance(&mut self, mut sent: usize) {
        let buffered = sent.min(self.end - self.start);
        self.start += buffered;
        sent -= buffered;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            self.buffer = None;
        }
        while let Some(piece) = self.rest.front_mut()
            && sent > 0
        {
            let taken = sent.min(piece.len());
            piece.advance(taken);
            sent -= taken;
            if piece.is_empty() {
                self.rest.pop_front();
            }
        }
    }
}
