//! What a server sends in transmission.

use bytes::{BufMut, Bytes, BytesMut};

use super::{
    CHUNK_DONE, CHUNK_MAGIC, CONTEXT_ALLOCATION_ID, Dialect, EXTENDED_CHUNK_MAGIC, Errno,
    SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO, chunk, length_u32,
};
use crate::device::Extent;

/// The longest text of an error.
const ERROR_TEXT_BYTES_MAX: usize = 1024;

/// What a request came to, on its way to the client.
#[derive(Debug, Clone)]
pub enum Answer {
    Done,
    Data { offset: u64, data: Bytes },
    Extents(Vec<Extent>),
    Error(Errno, String),
}

/// Which request an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerTo {
    pub cookie: u64,
    pub offset: u64,
}

impl Dialect {
    /// Bytes before the data in the reply to a read.
    pub fn data_head_bytes(self) -> usize {
        match self {
            Self::Simple => 16,
            Self::Structured => 20 + 8,
            Self::Extended => 32 + 8,
        }
    }

    /// Bytes of a reply that says only that it is done.
    pub fn done_bytes(self) -> usize {
        match self {
            Self::Simple => 16,
            Self::Structured => 20,
            Self::Extended => 32,
        }
    }

    /// What stands before the data of a read, `data_head_bytes` long.
    pub fn put_data_head(self, out: &mut impl BufMut, to: AnswerTo, length: usize) {
        match self {
            Self::Simple => put_simple_head(out, to, 0),
            Self::Structured | Self::Extended => {
                self.put_chunk_head(out, chunk::OFFSET_DATA, to, 8 + length);
                out.put_u64(to.offset);
            }
        }
    }

    /// The whole reply of a request that was done, `done_bytes` long.
    pub fn put_done(self, out: &mut impl BufMut, to: AnswerTo) {
        match self {
            Self::Simple => put_simple_head(out, to, 0),
            Self::Structured | Self::Extended => self.put_chunk_head(out, chunk::NONE, to, 0),
        }
    }

    /// The head of a reply and the payload to send after it.
    pub fn encode_answer(self, to: AnswerTo, answer: Answer) -> (Bytes, Bytes) {
        let mut out = BytesMut::with_capacity(64);
        let mut payload = Bytes::new();
        match answer {
            Answer::Data { data, .. } if !data.is_empty() => {
                self.put_data_head(&mut out, to, data.len());
                payload = data;
            }
            Answer::Done | Answer::Data { .. } => self.put_done(&mut out, to),
            Answer::Extents(extents) => self.put_extents(&mut out, to, &extents),
            Answer::Error(errno, text) => self.put_error(&mut out, to, errno, &text),
        }
        (out.freeze(), payload)
    }

    fn put_extents(self, out: &mut BytesMut, to: AnswerTo, extents: &[Extent]) {
        match self {
            // Nobody can ask for extents without structured replies.
            Self::Simple => put_simple_head(out, to, Errno::Invalid.code()),
            Self::Structured => {
                self.put_chunk_head(out, chunk::BLOCK_STATUS, to, 4 + 8 * extents.len());
                out.put_u32(CONTEXT_ALLOCATION_ID);
                for extent in extents {
                    out.put_u32(u32::try_from(extent.length_bytes).unwrap_or(u32::MAX));
                    out.put_u32(u32::try_from(state(extent)).expect("only two bits are used"));
                }
            }
            Self::Extended => {
                self.put_chunk_head(out, chunk::BLOCK_STATUS_EXT, to, 8 + 16 * extents.len());
                out.put_u32(CONTEXT_ALLOCATION_ID);
                out.put_u32(length_u32(extents.len()));
                for extent in extents {
                    out.put_u64(extent.length_bytes);
                    out.put_u64(state(extent));
                }
            }
        }
    }

    fn put_error(self, out: &mut BytesMut, to: AnswerTo, errno: Errno, text: &str) {
        if self == Self::Simple {
            return put_simple_head(out, to, errno.code());
        }
        let text = &text.as_bytes()[..text.floor_char_boundary(ERROR_TEXT_BYTES_MAX)];
        self.put_chunk_head(out, chunk::ERROR, to, 6 + text.len());
        out.put_u32(errno.code());
        out.put_u16(u16::try_from(text.len()).expect("the text was cut"));
        out.put_slice(text);
    }

    fn put_chunk_head(self, out: &mut impl BufMut, kind: u16, to: AnswerTo, length: usize) {
        let extended = self == Self::Extended;
        out.put_u32(if extended { EXTENDED_CHUNK_MAGIC } else { CHUNK_MAGIC });
        out.put_u16(CHUNK_DONE);
        out.put_u16(kind);
        out.put_u64(to.cookie);
        if extended {
            out.put_u64(to.offset);
            out.put_u64(length as u64);
        } else {
            out.put_u32(length_u32(length));
        }
    }
}

fn put_simple_head(out: &mut impl BufMut, to: AnswerTo, error: u32) {
    out.put_u32(SIMPLE_REPLY_MAGIC);
    out.put_u32(error);
    out.put_u64(to.cookie);
}

fn state(extent: &Extent) -> u64 {
    (if extent.hole { STATE_HOLE } else { 0 }) | if extent.zero { STATE_ZERO } else { 0 }
}
