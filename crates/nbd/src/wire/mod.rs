//! Parses and writes the protocol's frames. It never does any I/O.
//!
//! All numbers are big-endian. The names are those of the protocol's document
//! (`doc/proto.md` of the NetworkBlockDevice project) without the `NBD_` prefix.
//!
//! | frames | module |
//! |---|---|
//! | options of the handshake and their answers | `options` |
//! | requests | `request` |
//! | replies: how a server writes them | `answer` |
//! | replies: how a client reads them | `replies` |

use perigee_block::device::IoError;
use perigee_block::lease::{LeaseAnswer, LeaseAsk, LeaseRequest};

mod answer;
mod options;
mod replies;
mod request;

pub use answer::{Answer, AnswerTo, ContextRuns, Run};
pub use options::{
    GoOption, MetaContextOption, OptionHead, OptionReplyHead, encode_option, encode_option_reply,
    put_string, take_string,
};
pub use replies::{Chunk, Compressed, ReplyHead};
pub use request::Request;

/// The first 8 bytes of a server's greeting, `NBDMAGIC`.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// The next 8 bytes of the greeting, and the first of each option, `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// Longest read or write.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// The longest option. An export name and a few queries need much less.
pub const OPTION_BYTES_MAX: u32 = 64 << 10;
/// The longest string that the protocol allows.
pub const STRING_BYTES_MAX: u32 = 4096;
/// Longest description of the extents of one `BLOCK_STATUS` that a client takes.
const STATUS_BYTES_MAX: u32 = 16 << 20;
/// The bytes before the compressed data in a chunk of it.
const COMPRESSED_HEAD_BYTES: u32 = 16;

/// The format of requests and replies that the handshake has negotiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    Simple,
    /// Replies in chunks.
    Structured,
    /// Replies in chunks, and 64-bit lengths everywhere.
    Extended,
}

impl Dialect {
    /// The bytes of a request before its payload.
    pub fn request_head_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => 28,
            Self::Extended => 32,
        }
    }
}

pub mod handshake_flag {
    /// The server answers options that it does not know, instead of closing the connection. Both sides need it here.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No 124 zeros follow the answer to `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

pub mod option {
    /// Choose an export, the old way: a refusal closes the connection.
    pub const EXPORT_NAME: u32 = 1;
    /// End the negotiation.
    pub const ABORT: u32 = 2;
    /// Ask for the names of the exports.
    pub const LIST: u32 = 3;
    /// Begin TLS on this connection.
    pub const STARTTLS: u32 = 5;
    /// Ask about an export without opening it.
    pub const INFO: u32 = 6;
    /// Choose an export; a refusal has a reason, and the negotiation goes on.
    pub const GO: u32 = 7;
    /// Agree on replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Ask which metadata contexts an export has.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose the metadata contexts that `BLOCK_STATUS` reports.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Agree on lengths of 64 bits. Chunked replies come with it.
    pub const EXTENDED_HEADERS: u32 = 11;
    /// An option of Perigee's own: bytes that name a proxy's session. The server first ends an older
    /// connection of the same session, and never proxies such a session again. Other servers answer
    /// `ERR_UNSUP`.
    pub const PERIGEE_SESSION: u32 = 0x5047_0001;
}

pub mod reply {
    /// The option is done. It is the last reply to an option.
    pub const ACK: u32 = 1;
    /// One export's name.
    pub const SERVER: u32 = 2;
    /// One piece of information about an export ([`super::info`]).
    pub const INFO: u32 = 3;
    /// A context's name, with the number that stands for it in replies.
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = ERROR + 1;
    /// The server knows the option, and does not allow it.
    pub const ERR_POLICY: u32 = ERROR + 2;
    /// The option's data are wrong, or the option comes at the wrong time.
    pub const ERR_INVALID: u32 = ERROR + 3;
    /// TLS has to be begun first.
    pub const ERR_TLS_REQD: u32 = ERROR + 5;
    /// There is no such export, or the client may not see it.
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    /// The server is ending.
    pub const ERR_SHUTDOWN: u32 = ERROR + 7;
    /// The option needs [`super::option::EXTENDED_HEADERS`] first.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR + 10;
    /// An error of Perigee's own, for a proxy: the volume has another home now. Its data are `HOST:PORT`.
    pub const ERR_PERIGEE_MOVED: u32 = ERROR + 0x5047_0001;
    /// An error of Perigee's own, for a proxy: the volume of that name is another one than that of the writer epoch.
    pub const ERR_PERIGEE_REPLACED: u32 = ERROR + 0x5047_0002;

    /// Whether a reply refuses its option: the highest bit says so.
    pub fn is_error(kind: u32) -> bool {
        kind & ERROR != 0
    }
}

pub mod info {
    /// The size in bytes, and the transmission flags ([`super::export_flag`]).
    pub const EXPORT: u16 = 0;
    /// The export's canonical name.
    pub const NAME: u16 = 1;
    /// A text for people.
    pub const DESCRIPTION: u16 = 2;
    /// The least, the preferred and the largest length of a request, in bytes.
    pub const BLOCK_SIZE: u16 = 3;
    /// Information of Perigee's own, between servers: [`perigee_block::exports::SessionHome`]. Other servers don't
    /// send it.
    pub const PERIGEE_HOME: u16 = 0x5045;
}

pub mod export_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused with `EPERM`.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` is known.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// [`super::command_flag::FUA`] is known.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` is known.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` is known.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// [`super::command_flag::DF`] is known.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes that all connections have acknowledged.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` is known.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// [`super::command_flag::FAST_ZERO`] is known.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

pub mod command {
    /// Reads a range, at most [`super::PAYLOAD_BYTES_MAX`].
    pub const READ: u16 = 0;
    /// Writes its payload, at most [`super::PAYLOAD_BYTES_MAX`].
    pub const WRITE: u16 = 1;
    /// The client ends the session. It is not answered.
    pub const DISCONNECT: u16 = 2;
    /// Everything that was acknowledged before is durable when the answer comes.
    pub const FLUSH: u16 = 3;
    /// Gives up the content of a range.
    pub const TRIM: u16 = 4;
    /// Reads a range ahead. No data are sent.
    pub const CACHE: u16 = 5;
    /// A command of Perigee's own, between servers: [`perigee_block::lease`]. The offset holds the question, and
    /// the answer is one byte of data. Other servers answer `EINVAL`.
    pub const PERIGEE_LEASE: u16 = 0x5045;
    /// Zeros a range, without a payload.
    pub const WRITE_ZEROES: u16 = 6;
    /// Reports the runs of the chosen metadata contexts.
    pub const BLOCK_STATUS: u16 = 7;
}

pub mod command_flag {
    /// The write is durable before it is answered ("force unit access").
    pub const FUA: u16 = 1 << 0;
    /// Zeroed space stays allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The data of a read come in one chunk ("don't fragment").
    pub const DF: u16 = 1 << 2;
    /// `BLOCK_STATUS` reports one run.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail with `ENOTSUP` instead of writing zeros slowly.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// With extended headers: the length is that of a payload.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
    /// A flag of Perigee's own, for a read: its data may be sent compressed. A client sets it only if the server
    /// has chosen [`super::CONTEXT_COMPRESSION`].
    pub const PERIGEE_COMPRESS: u16 = 1 << 15;
}

const CHUNK_DONE: u16 = 1;

mod chunk {
    /// No data. Only the last chunk of a reply may be one.
    pub const NONE: u16 = 0;
    /// An offset of 64 bits, and the data there.
    pub const OFFSET_DATA: u16 = 1;
    /// An offset of 64 bits and a length of 32: zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Runs with lengths and flags of 32 bits.
    pub const BLOCK_STATUS: u16 = 5;
    /// Runs with lengths and flags of 64 bits, for extended headers.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// An errno, and a text for people.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// The same, and the offset of what failed.
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
    /// A chunk of Perigee's own: the compressed data of a read that allowed it. Its offset, the number of bytes
    /// before compression, the microseconds that the server has spent on it, and one block of LZ4.
    pub const PERIGEE_COMPRESSED: u16 = 0x5045;
}

/// Flags of `base:allocation`.
const STATE_HOLE: u64 = 1;
const STATE_ZERO: u64 = 2;

/// The protocol's own context: which ranges are holes, and which read as zeros.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";
/// A client that has chosen this metadata context may ask for compressed reads. It is never in a reply to
/// `BLOCK_STATUS`. It is negotiated as a metadata context because this needs no further round trip.
pub const CONTEXT_COMPRESSION: &str = "perigee:compression";

/// The bytes are not NBD, or exceed one of its limits. The connection ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FramingError {
    #[error("{what} begins with {found:#x}")]
    Magic { what: &'static str, found: u64 },
    #[error("{what} has {length_bytes} bytes; the limit is {max_bytes}")]
    TooLong { what: &'static str, length_bytes: u64, max_bytes: u64 },
    #[error("{0}")]
    Malformed(&'static str),
}

/// The errors a reply can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Errno {
    Perm,
    Io,
    Invalid,
    NoSpace,
    /// The answer to FAST_ZERO if zeroing would not be fast.
    NotSupported,
    Shutdown,
}

impl Errno {
    /// The number on the wire, which is that of Linux.
    pub fn code(self) -> u32 {
        match self {
            Self::Perm => 1,
            Self::Io => 5,
            Self::Invalid => 22,
            Self::NoSpace => 28,
            Self::NotSupported => 95,
            Self::Shutdown => 108,
        }
    }

    /// What the code of another server means. Unknown codes are `EIO`, as the protocol asks.
    pub fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Perm,
            22 | 75 => Self::Invalid,
            95 => Self::NotSupported,
            28 => Self::NoSpace,
            108 => Self::Shutdown,
            _ => Self::Io,
        }
    }
}

impl From<&IoError> for Errno {
    fn from(error: &IoError) -> Self {
        match error {
            IoError::NoSpace => Self::NoSpace,
            IoError::Fenced { .. } | IoError::Refused(_) | IoError::ReadOnly => Self::Perm,
            IoError::Invalid(_) => Self::Invalid,
            // A request to a volume that has moved is not answered at all.
            IoError::Poisoned(_) | IoError::Unreachable(_) | IoError::Moved | IoError::Io(_) => {
                Self::Io
            }
        }
    }
}

/// Checks a length against its limit, and so that it fits 32 bits.
fn bound(what: &'static str, length_bytes: u64, max_bytes: u32) -> Result<u32, FramingError> {
    match u32::try_from(length_bytes) {
        Ok(length) if length <= max_bytes => Ok(length),
        _ => Err(FramingError::TooLong { what, length_bytes, max_bytes: max_bytes.into() }),
    }
}

fn length_u32(length: usize) -> u32 {
    u32::try_from(length).expect("frames are bounded far below 4 GiB")
}
const LEASE_REQUESTS: [LeaseRequest; 3] =
    [LeaseRequest::Hold, LeaseRequest::Keep, LeaseRequest::GiveBack];
const LEASE_ANSWERS: [LeaseAnswer; 4] =
    [LeaseAnswer::Refused, LeaseAnswer::Granted, LeaseAnswer::Still, LeaseAnswer::Recalled];

fn lease_request_number(request: LeaseRequest) -> u64 {
    match request {
        LeaseRequest::Hold => 0,
        LeaseRequest::Keep => 1,
        LeaseRequest::GiveBack => 2,
    }
}

/// The offset of a question about a lease.
pub fn lease_offset(ask: LeaseAsk) -> u64 {
    (ask.number << 2) | lease_request_number(ask.request)
}

/// The question that an offset holds; `None` for a request that is not known.
pub fn lease_ask(offset: u64) -> Option<LeaseAsk> {
    let request =
        LEASE_REQUESTS.into_iter().find(|request| lease_request_number(*request) == offset & 3)?;
    Some(LeaseAsk { request, number: offset >> 2 })
}

/// The data of the answer.
pub fn lease_byte(answer: LeaseAnswer) -> u8 {
    match answer {
        LeaseAnswer::Refused => 0,
        LeaseAnswer::Granted => 1,
        LeaseAnswer::Still => 2,
        LeaseAnswer::Recalled => 3,
    }
}

/// The answer in the data; `None` if it is none of those known.
pub fn lease_answer(data: &[u8]) -> Option<LeaseAnswer> {
    LEASE_ANSWERS.into_iter().find(|answer| data == [lease_byte(*answer)])
}
