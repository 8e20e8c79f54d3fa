//! The frames that a server sends in the transmission phase.

use bytes::{BufMut, Bytes, BytesMut};
use perigee_block::device::Extent;

use super::{
    CHUNK_DONE, CHUNK_MAGIC, COMPRESSED_HEAD_BYTES, Dialect, EXTENDED_CHUNK_MAGIC, Errno,
    SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO, chunk, length_u32,
};

/// The longest text of an error.
const ERROR_TEXT_BYTES_MAX: usize = 1024;

/// The answer to a request.
#[derive(Debug, Clone)]
pub enum Answer {
    Done,
    Data {
        offset: u64,
        data: Bytes,
    },
    /// The compressed data of a read.
    Compressed {
        offset: u64,
        /// Before compression.
        length_bytes: u32,
        work_us: u32,
        data: Bytes,
    },
    /// One for each context that the client chose; at least one.
    Status(Vec<ContextRuns>),
    Error(Errno, String),
}

/// The block status of one context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextRuns {
    /// The number that the handshake gave the context.
    pub context: u32,
    pub runs: Vec<Run>,
}

/// Bytes with the same flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub length_bytes: u64,
    pub flags: u64,
}

impl From<Extent> for Run {
    fn from(extent: Extent) -> Self {
        let hole = if extent.hole { STATE_HOLE } else { 0 };
        let zero = if extent.zero { STATE_ZERO } else { 0 };
        Self { length_bytes: extent.length_bytes, flags: hole | zero }
    }
}

impl From<Run> for Extent {
    fn from(run: Run) -> Self {
        let (hole, zero) = (run.flags & STATE_HOLE != 0, run.flags & STATE_ZERO != 0);
        Self { length_bytes: run.length_bytes, hole, zero }
    }
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

    /// Bytes after the data in the reply to a read.
    pub fn data_end_bytes(self) -> usize {
        match self {
            Self::Simple => 0,
            Self::Structured | Self::Extended => self.done_bytes(),
        }
    }

    /// Writes the bytes before the data of a read. There are `data_head_bytes` of them.
    pub fn put_data_head(self, out: &mut impl BufMut, to: AnswerTo, length: usize) {
        match self {
            Self::Simple => put_simple_head(out, to, 0),
            Self::Structured | Self::Extended => {
                self.put_chunk_head_with(out, 0, chunk::OFFSET_DATA, to, 8 + length);
                out.put_u64(to.offset);
            }
        }
    }

    /// Writes the bytes after the data of a read. There are `data_end_bytes` of them.
    ///
    /// The end is a chunk of its own because of QEMU's client (7.1 and later). A request there that has its reply
    /// takes the lock for receiving headers once more. By then a later request may have that lock, and keeps it until
    /// the next header arrives. So without this chunk a finished read would wait until a later one is answered. The
    /// header of this chunk arrives at once and frees the lock.
    pub fn put_data_end(self, out: &mut impl BufMut, to: AnswerTo) {
        if self != Self::Simple {
            self.put_done(out, to);
        }
    }

    /// The whole reply of a request that was done, `done_bytes` long.
    pub fn put_done(self, out: &mut impl BufMut, to: AnswerTo) {
        match self {
            Self::Simple => put_simple_head(out, to, 0),
            Self::Structured | Self::Extended => self.put_chunk_head(out, chunk::NONE, to, 0),
        }
    }

    /// The pieces of a reply, in the order in which they are sent: its head, its payload, and its end.
    pub fn encode_answer(self, to: AnswerTo, answer: Answer) -> [Bytes; 3] {
        let (mut out, mut end) = (BytesMut::with_capacity(64), BytesMut::new());
        let mut payload = Bytes::new();
        match answer {
            Answer::Data { data, .. } if !data.is_empty() => {
                self.put_data_head(&mut out, to, data.len());
                payload = data;
                self.put_data_end(&mut end, to);
            }
            Answer::Compressed { offset, length_bytes, work_us, data } => {
                let length = COMPRESSED_HEAD_BYTES as usize + data.len();
                self.put_chunk_head_with(&mut out, 0, chunk::PERIGEE_COMPRESSED, to, length);
                out.put_u64(offset);
                out.put_u32(length_bytes);
                out.put_u32(work_us);
                payload = data;
                self.put_data_end(&mut end, to);
            }
            Answer::Done | Answer::Data { .. } => self.put_done(&mut out, to),
            Answer::Status(contexts) => self.put_status(&mut out, to, &contexts),
            Answer::Error(errno, text) => self.put_error(&mut out, to, errno, &text),
        }
        [out.freeze(), payload, end.freeze()]
    }

    fn put_status(self, out: &mut BytesMut, to: AnswerTo, contexts: &[ContextRuns]) {
        let run_bytes = if self == Self::Extended { 16 } else { 8 };
        let head_bytes = if self == Self::Extended { 8 } else { 4 };
        for (left, ContextRuns { context, runs }) in (0..contexts.len()).rev().zip(contexts) {
            let length = head_bytes + run_bytes * runs.len();
            let flags = if left == 0 { CHUNK_DONE } else { 0 };
            let kind = match self {
                // A client can't request a block status without structured replies.
                Self::Simple => return put_simple_head(out, to, Errno::Invalid.code()),
                Self::Structured => chunk::BLOCK_STATUS,
                Self::Extended => chunk::BLOCK_STATUS_EXT,
            };
            self.put_chunk_head_with(out, flags, kind, to, length);
            out.put_u32(*context);
            if self == Self::Extended {
                out.put_u32(length_u32(runs.len()));
                for run in runs {
                    out.put_u64(run.length_bytes);
                    out.put_u64(run.flags);
                }
            } else {
                for run in runs {
                    out.put_u32(u32::try_from(run.length_bytes).expect("the range was cut"));
                    out.put_u32(u32::try_from(run.flags).expect("only a few bits are used"));
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

    /// The head of a reply's only chunk.
    fn put_chunk_head(self, out: &mut impl BufMut, kind: u16, to: AnswerTo, length: usize) {
        self.put_chunk_head_with(out, CHUNK_DONE, kind, to, length);
    }

    fn put_chunk_head_with(
        self,
        out: &mut impl BufMut,
        flags: u16,
        kind: u16,
        to: AnswerTo,
        length: usize,
    ) {
        let extended = self == Self::Extended;
        out.put_u32(if extended { EXTENDED_CHUNK_MAGIC } else { CHUNK_MAGIC });
        out.put_u16(flags);
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
