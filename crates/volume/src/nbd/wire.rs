//! Bytes to frames and frames to bytes. No I/O here.
//!
//! All numbers are big-endian. The names are those of the protocol's document
//! (`doc/proto.md` of the NetworkBlockDevice project) without the `NBD_` prefix.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::device::{Extent, IoError};

pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Longest read or write.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Longest option: an export name and a few queries fit many times.
pub const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Longest string, as the protocol rules.
pub const STRING_BYTES_MAX: u32 = 4096;
/// Longest description of the extents of one `BLOCK_STATUS` that a client takes.
const STATUS_BYTES_MAX: u32 = 16 << 20;

pub mod handshake_flag {
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub const NO_ZEROES: u16 = 1 << 1;
}

pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    /// Ours: bytes that name a proxy's session. The server ends an older connection of the same
    /// session first, and never proxies such a session once more. Other servers answer `ERR_UNSUP`.
    pub const PERIGEE_SESSION: u32 = 0x5047_0001;
}

pub mod reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR + 1;
    pub const ERR_POLICY: u32 = ERROR + 2;
    pub const ERR_INVALID: u32 = ERROR + 3;
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    pub const ERR_TOO_BIG: u32 = ERROR + 9;

    pub fn is_error(kind: u32) -> bool {
        kind & ERROR != 0
    }
}

pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const BLOCK_SIZE: u16 = 3;
}

pub mod export_flag {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

pub mod command_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
}

const CHUNK_DONE: u16 = 1;

mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

const STATE_HOLE: u32 = 1;
const STATE_ZERO: u32 = 2;

pub const CONTEXT_ALLOCATION: &str = "base:allocation";
pub const CONTEXT_ALLOCATION_ID: u32 = 1;

/// The bytes are not NBD, or break one of its bounds. The connection ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FramingError {
    #[error("{what} begins with {found:#x}")]
    Magic { what: &'static str, found: u64 },
    #[error("{what} of {length_bytes} bytes, at most {max_bytes} are allowed")]
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
    Shutdown,
}

impl Errno {
    pub fn code(self) -> u32 {
        match self {
            Self::Perm => 1,
            Self::Io => 5,
            Self::Invalid => 22,
            Self::NoSpace => 28,
            Self::Shutdown => 108,
        }
    }

    pub fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Perm,
            22 | 75 | 95 => Self::Invalid,
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
            IoError::Poisoned(_) | IoError::Unreachable(_) | IoError::Io(_) => Self::Io,
        }
    }
}

fn bound(what: &'static str, length_bytes: u32, max_bytes: u32) -> Result<(), FramingError> {
    if length_bytes > max_bytes {
        return Err(FramingError::TooLong {
            what,
            length_bytes: length_bytes.into(),
            max_bytes: max_bytes.into(),
        });
    }
    Ok(())
}

fn length_u32(length: usize) -> u32 {
    u32::try_from(length).expect("frames are bounded far below 4 GiB")
}

/// The head of one option from a client; its data follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHead {
    pub option: u32,
    pub length_bytes: u32,
}

impl OptionHead {
    pub const BYTES: usize = 16;

    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, FramingError> {
        let mut bytes = bytes.as_slice();
        let magic = bytes.get_u64();
        if magic != OPTION_MAGIC {
            return Err(FramingError::Magic { what: "an option", found: magic });
        }
        let head = Self { option: bytes.get_u32(), length_bytes: bytes.get_u32() };
        bound("an option", head.length_bytes, OPTION_BYTES_MAX)?;
        Ok(head)
    }
}

/// One whole option, as a client sends it.
pub fn encode_option(option: u32, data: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(OptionHead::BYTES + data.len());
    out.put_u64(OPTION_MAGIC);
    out.put_u32(option);
    out.put_u32(length_u32(data.len()));
    out.put_slice(data);
    out.freeze()
}

/// The head of one answer to an option; its data follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReplyHead {
    pub option: u32,
    pub kind: u32,
    pub length_bytes: u32,
}

impl OptionReplyHead {
    pub const BYTES: usize = 20;

    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, FramingError> {
        let mut bytes = bytes.as_slice();
        let magic = bytes.get_u64();
        if magic != OPTION_REPLY_MAGIC {
            return Err(FramingError::Magic { what: "an option's reply", found: magic });
        }
        let head =
            Self { option: bytes.get_u32(), kind: bytes.get_u32(), length_bytes: bytes.get_u32() };
        bound("an option's reply", head.length_bytes, OPTION_BYTES_MAX)?;
        Ok(head)
    }
}

pub fn encode_option_reply(option: u32, kind: u32, data: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(OptionReplyHead::BYTES + data.len());
    out.put_u64(OPTION_REPLY_MAGIC);
    out.put_u32(option);
    out.put_u32(kind);
    out.put_u32(length_u32(data.len()));
    out.put_slice(data);
    out.freeze()
}

/// A length and that many bytes of text, as names and queries are sent.
pub fn put_string(out: &mut BytesMut, text: &str) {
    out.put_u32(length_u32(text.len()));
    out.put_slice(text.as_bytes());
}

/// Takes what [`put_string`] put.
pub fn take_string(data: &mut Bytes) -> Result<String, FramingError> {
    const SHORT: FramingError = FramingError::Malformed("a string is longer than its option");
    let length_bytes = data.try_get_u32().map_err(|_| SHORT)?;
    bound("a string", length_bytes, STRING_BYTES_MAX)?;
    let length = length_bytes as usize;
    if data.remaining() < length {
        return Err(SHORT);
    }
    String::from_utf8(data.split_to(length).into())
        .map_err(|_| FramingError::Malformed("a string is not UTF-8"))
}

/// The data of `INFO` and `GO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GoOption {
    pub name: String,
    pub infos: Vec<u16>,
}

impl GoOption {
    pub fn parse(mut data: Bytes) -> Result<Self, FramingError> {
        const SHORT: FramingError = FramingError::Malformed("GO or INFO ends too early");
        let name = take_string(&mut data)?;
        let count = data.try_get_u16().map_err(|_| SHORT)?;
        if data.remaining() != usize::from(count) * 2 {
            return Err(FramingError::Malformed("GO or INFO has not as many items as it says"));
        }
        Ok(Self { name, infos: (0..count).map(|_| data.get_u16()).collect() })
    }

    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        put_string(&mut out, &self.name);
        out.put_u16(u16::try_from(self.infos.len()).expect("there are only a few kinds of info"));
        for info in &self.infos {
            out.put_u16(*info);
        }
        out.freeze()
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaContextOption {
    pub name: String,
    pub queries: Vec<String>,
}

impl MetaContextOption {
    pub fn parse(mut data: Bytes) -> Result<Self, FramingError> {
        let name = take_string(&mut data)?;
        let count = data
            .try_get_u32()
            .map_err(|_| FramingError::Malformed("a context option ends too early"))?;
        // Not `collect` with a size hint: the count is the client's word only.
        let mut queries = Vec::new();
        for _ in 0..count {
            queries.push(take_string(&mut data)?);
        }
        if data.has_remaining() {
            return Err(FramingError::Malformed("a context option has bytes left over"));
        }
        Ok(Self { name, queries })
    }

    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        put_string(&mut out, &self.name);
        out.put_u32(length_u32(self.queries.len()));
        for query in &self.queries {
            put_string(&mut out, query);
        }
        out.freeze()
    }
}

/// A request's head; a write's payload follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub length_bytes: u32,
}

impl Request {
    pub const BYTES: usize = 28;

    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, FramingError> {
        let mut bytes = bytes.as_slice();
        let magic = bytes.get_u32();
        if magic != REQUEST_MAGIC {
            return Err(FramingError::Magic { what: "a request", found: magic.into() });
        }
        let request = Self {
            flags: bytes.get_u16(),
            command: bytes.get_u16(),
            cookie: bytes.get_u64(),
            offset: bytes.get_u64(),
            length_bytes: bytes.get_u32(),
        };
        if request.command == command::WRITE {
            bound("a write", request.length_bytes, PAYLOAD_BYTES_MAX)?;
        }
        Ok(request)
    }

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut rest = out.as_mut_slice();
        rest.put_u32(REQUEST_MAGIC);
        rest.put_u16(self.flags);
        rest.put_u16(self.command);
        rest.put_u64(self.cookie);
        rest.put_u64(self.offset);
        rest.put_u32(self.length_bytes);
        out
    }
}

/// What a request came to, on its way to the client.
#[derive(Debug, Clone)]
pub enum Answer {
    Done,
    Data { offset: u64, data: Bytes },
    Extents(Vec<Extent>),
    Error(Errno, String),
}

/// The head of a reply and the payload to send after it.
pub fn encode_answer(cookie: u64, answer: Answer, structured: bool) -> (Bytes, Bytes) {
    if !structured {
        return encode_simple(cookie, answer);
    }
    let mut out = BytesMut::with_capacity(64);
    let mut payload = Bytes::new();
    match answer {
        Answer::Data { offset, data } if !data.is_empty() => {
            put_chunk_head(&mut out, chunk::OFFSET_DATA, cookie, 8 + data.len());
            out.put_u64(offset);
            payload = data;
        }
        Answer::Done | Answer::Data { .. } => put_chunk_head(&mut out, chunk::NONE, cookie, 0),
        Answer::Extents(extents) => {
            put_chunk_head(&mut out, chunk::BLOCK_STATUS, cookie, 4 + 8 * extents.len());
            out.put_u32(CONTEXT_ALLOCATION_ID);
            for extent in extents {
                out.put_u32(u32::try_from(extent.length_bytes).unwrap_or(u32::MAX));
                let hole = if extent.hole { STATE_HOLE } else { 0 };
                out.put_u32(hole | if extent.zero { STATE_ZERO } else { 0 });
            }
        }
        Answer::Error(errno, message) => {
            let text = &message.as_bytes()[..message.floor_char_boundary(1024)];
            put_chunk_head(&mut out, chunk::ERROR, cookie, 6 + text.len());
            out.put_u32(errno.code());
            out.put_u16(u16::try_from(text.len()).expect("the text was cut"));
            out.put_slice(text);
        }
    }
    (out.freeze(), payload)
}

fn encode_simple(cookie: u64, answer: Answer) -> (Bytes, Bytes) {
    let (error, payload) = match answer {
        Answer::Done => (0, Bytes::new()),
        Answer::Data { data, .. } => (0, data),
        Answer::Error(errno, _) => (errno.code(), Bytes::new()),
        // Nobody can ask for extents without structured replies.
        Answer::Extents(_) => (Errno::Invalid.code(), Bytes::new()),
    };
    let mut out = BytesMut::with_capacity(16);
    out.put_u32(SIMPLE_REPLY_MAGIC);
    out.put_u32(error);
    out.put_u64(cookie);
    (out.freeze(), payload)
}

fn put_chunk_head(out: &mut BytesMut, kind: u16, cookie: u64, length: usize) {
    out.put_u32(CHUNK_MAGIC);
    out.put_u16(CHUNK_DONE);
    out.put_u16(kind);
    out.put_u64(cookie);
    out.put_u32(length_u32(length));
}

/// The head of what a server sends in transmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHead {
    /// A read's data follows when `error` is `None`.
    Simple { cookie: u64, error: Option<Errno> },
    /// [`Chunk::parse`] takes the `length_bytes` that follow.
    Chunk { cookie: u64, kind: u16, done: bool, length_bytes: u32 },
}

impl ReplyHead {
    /// A simple reply is complete after these; a chunk's head has [`Self::CHUNK_MORE_BYTES`] more.
    pub const BYTES: usize = 16;
    pub const CHUNK_MORE_BYTES: usize = 4;

    pub fn is_chunk(bytes: &[u8; Self::BYTES]) -> bool {
        bytes[..4] == CHUNK_MAGIC.to_be_bytes()
    }

    /// `more` is read from the connection only when [`Self::is_chunk`].
    pub fn parse(
        bytes: &[u8; Self::BYTES],
        more: [u8; Self::CHUNK_MORE_BYTES],
    ) -> Result<Self, FramingError> {
        let mut bytes = bytes.as_slice();
        match bytes.get_u32() {
            SIMPLE_REPLY_MAGIC => {
                let code = bytes.get_u32();
                let error = (code != 0).then(|| Errno::from_code(code));
                Ok(Self::Simple { cookie: bytes.get_u64(), error })
            }
            CHUNK_MAGIC => {
                let done = bytes.get_u16() & CHUNK_DONE != 0;
                let kind = bytes.get_u16();
                let cookie = bytes.get_u64();
                let length_bytes = u32::from_be_bytes(more);
                let max_bytes = match kind {
                    chunk::OFFSET_DATA => PAYLOAD_BYTES_MAX + 8,
                    chunk::BLOCK_STATUS => STATUS_BYTES_MAX,
                    _ => OPTION_BYTES_MAX,
                };
                bound("a reply's chunk", length_bytes, max_bytes)?;
                Ok(Self::Chunk { cookie, kind, done, length_bytes })
            }
            found => Err(FramingError::Magic { what: "a reply", found: found.into() }),
        }
    }
}

/// The content of one chunk of a structured reply, as a client gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    Nothing,
    Data { offset: u64, data: Bytes },
    Zeros { offset: u64, length_bytes: u32 },
    Extents(Vec<Extent>),
    Error { errno: Errno, message: String },
}

impl Chunk {
    pub fn parse(kind: u16, mut data: Bytes) -> Result<Self, FramingError> {
        const SHORT: FramingError = FramingError::Malformed("a reply's chunk ends too early");
        match kind {
            chunk::NONE => Ok(Self::Nothing),
            chunk::OFFSET_DATA => {
                Ok(Self::Data { offset: data.try_get_u64().map_err(|_| SHORT)?, data })
            }
            chunk::OFFSET_HOLE => Ok(Self::Zeros {
                offset: data.try_get_u64().map_err(|_| SHORT)?,
                length_bytes: data.try_get_u32().map_err(|_| SHORT)?,
            }),
            chunk::BLOCK_STATUS => parse_extents(data),
            chunk::ERROR | chunk::ERROR_OFFSET => {
                let code = data.try_get_u32().map_err(|_| SHORT)?;
                let length = usize::from(data.try_get_u16().map_err(|_| SHORT)?);
                if data.remaining() < length {
                    return Err(SHORT);
                }
                let message = String::from_utf8_lossy(&data[..length]).into_owned();
                Ok(Self::Error { errno: Errno::from_code(code), message })
            }
            // The protocol: an unknown kind with the highest bit set is some error.
            _ if kind & (1 << 15) != 0 => {
                Ok(Self::Error { errno: Errno::Io, message: format!("error chunk {kind:#x}") })
            }
            _ => Err(FramingError::Malformed("a reply has a chunk of an unknown kind")),
        }
    }
}

/// Only one context is ever negotiated, so its number says nothing.
fn parse_extents(mut data: Bytes) -> Result<Chunk, FramingError> {
    if data.remaining() < 12 || data.remaining() % 8 != 4 {
        return Err(FramingError::Malformed("a block status has no whole extents"));
    }
    data.advance(4);
    let mut extents = Vec::with_capacity(data.remaining() / 8);
    while data.has_remaining() {
        let length_bytes = data.get_u32().into();
        let state = data.get_u32();
        if length_bytes == 0 {
            return Err(FramingError::Malformed("a block status has an empty extent"));
        }
        let (hole, zero) = (state & STATE_HOLE != 0, state & STATE_ZERO != 0);
        extents.push(Extent { length_bytes, hole, zero });
    }
    Ok(Chunk::Extents(extents))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_survives_its_encoding() {
        let request = Request {
            flags: command_flag::FUA,
            command: command::WRITE,
            cookie: 7,
            offset: 1 << 40,
            length_bytes: PAYLOAD_BYTES_MAX,
        };
        assert_eq!(Request::parse(&request.encode()), Ok(request));
    }

    #[test]
    fn a_write_longer_than_the_bound_is_a_framing_error() {
        let request = Request {
            flags: 0,
            command: command::WRITE,
            cookie: 7,
            offset: 0,
            length_bytes: PAYLOAD_BYTES_MAX + 1,
        };
        assert!(matches!(Request::parse(&request.encode()), Err(FramingError::TooLong { .. })));
    }

    #[test]
    fn an_option_longer_than_the_bound_is_a_framing_error() {
        let mut bytes = [0; OptionHead::BYTES];
        bytes.copy_from_slice(&encode_option(option::GO, &[]));
        bytes[12..].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(matches!(OptionHead::parse(&bytes), Err(FramingError::TooLong { .. })));
    }

    #[test]
    fn a_go_option_survives_its_encoding() {
        let go = GoOption { name: "data@3".into(), infos: vec![info::NAME, info::BLOCK_SIZE] };
        assert_eq!(GoOption::parse(go.encode()), Ok(go));
    }

    #[test]
    fn a_context_option_that_promises_more_than_it_has_is_refused() {
        let mut out = BytesMut::new();
        put_string(&mut out, "data");
        out.put_u32(u32::MAX);
        assert!(MetaContextOption::parse(out.freeze()).is_err());
    }

    #[test]
    fn extents_survive_a_structured_reply() {
        let extents = vec![
            Extent { length_bytes: 4096, hole: false, zero: false },
            Extent { length_bytes: 8192, hole: true, zero: true },
        ];
        let (head, _) = encode_answer(9, Answer::Extents(extents.clone()), true);
        let (cookie, chunk) = parse_whole(&head);
        assert_eq!((cookie, chunk), (9, Chunk::Extents(extents)));
    }

    #[test]
    fn an_error_carries_its_text() {
        let answer = Answer::Error(Errno::NoSpace, "the pool is full".into());
        let (head, _) = encode_answer(1, answer, true);
        let want = Chunk::Error { errno: Errno::NoSpace, message: "the pool is full".into() };
        assert_eq!(parse_whole(&head), (1, want));
    }

    fn parse_whole(bytes: &[u8]) -> (u64, Chunk) {
        let head: [u8; 16] = bytes[..16].try_into().expect("16 bytes");
        assert!(ReplyHead::is_chunk(&head));
        let more: [u8; 4] = bytes[16..20].try_into().expect("4 bytes");
        match ReplyHead::parse(&head, more).expect("a chunk") {
            ReplyHead::Chunk { cookie, kind, length_bytes, done } => {
                assert!(done);
                assert_eq!(length_bytes as usize, bytes.len() - 20);
                let data = Bytes::copy_from_slice(&bytes[20..]);
                (cookie, Chunk::parse(kind, data).expect("a chunk's content"))
            }
            ReplyHead::Simple { .. } => panic!("a simple reply"),
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_parser_panic(
            data in proptest::collection::vec(any::<u8>(), 0..200),
            kind in any::<u16>(),
        ) {
            let bytes = Bytes::from(data.clone());
            drop(GoOption::parse(bytes.clone()));
            drop(MetaContextOption::parse(bytes.clone()));
            drop(Chunk::parse(kind & 0x8007, bytes));
            if let Some(head) = data.first_chunk() {
                drop(Request::parse(head));
            }
            if let Some(head) = data.first_chunk() {
                drop(OptionHead::parse(head));
            }
            if let Some(head) = data.first_chunk() {
                drop(OptionReplyHead::parse(head));
            }
            if let Some(head) = data.first_chunk() {
                drop(ReplyHead::parse(head, [1, 2, 3, 4]));
            }
        }
    }
}
