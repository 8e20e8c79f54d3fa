//! What a client makes of a server's replies.

use bytes::{Buf, Bytes};

use super::{
    CHUNK_DONE, CHUNK_MAGIC, EXTENDED_CHUNK_MAGIC, Errno, FramingError, OPTION_BYTES_MAX,
    PAYLOAD_BYTES_MAX, SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO, STATUS_BYTES_MAX, bound, chunk,
};
use crate::device::Extent;

/// The head of what a server sends in transmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHead {
    /// A read's data follows when `error` is `None`.
    Simple { cookie: u64, error: Option<Errno> },
    /// [`Chunk::parse`] takes the `length_bytes` that follow.
    Chunk { cookie: u64, kind: u16, done: bool, length_bytes: u32 },
}

impl ReplyHead {
    /// A head is at least so long; [`Self::more_bytes`] says how many follow.
    pub const BYTES: usize = 16;
    pub const MORE_BYTES_MAX: usize = 16;

    pub fn more_bytes(bytes: &[u8; Self::BYTES]) -> usize {
        match bytes.as_slice().get_u32() {
            CHUNK_MAGIC => 4,
            EXTENDED_CHUNK_MAGIC => 16,
            _ => 0,
        }
    }

    /// `more` holds [`Self::more_bytes`] bytes.
    pub fn parse(bytes: &[u8; Self::BYTES], mut more: &[u8]) -> Result<Self, FramingError> {
        let mut bytes = bytes.as_slice();
        match bytes.get_u32() {
            SIMPLE_REPLY_MAGIC => {
                let code = bytes.get_u32();
                let error = (code != 0).then(|| Errno::from_code(code));
                Ok(Self::Simple { cookie: bytes.get_u64(), error })
            }
            magic @ (CHUNK_MAGIC | EXTENDED_CHUNK_MAGIC) => {
                const SHORT: FramingError = FramingError::Malformed("a reply's head ends early");
                let done = bytes.get_u16() & CHUNK_DONE != 0;
                let kind = bytes.get_u16();
                let cookie = bytes.get_u64();
                let length_bytes = if magic == CHUNK_MAGIC {
                    u64::from(more.try_get_u32().map_err(|_| SHORT)?)
                } else {
                    // The request's offset, which the cookie tells as well.
                    more.try_get_u64().map_err(|_| SHORT)?;
                    more.try_get_u64().map_err(|_| SHORT)?
                };
                let max_bytes = match kind {
                    chunk::OFFSET_DATA => PAYLOAD_BYTES_MAX + 8,
                    chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => STATUS_BYTES_MAX,
                    _ => OPTION_BYTES_MAX,
                };
                let length_bytes = bound("a reply's chunk", length_bytes, max_bytes)?;
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
            chunk::BLOCK_STATUS_EXT => parse_extents_ext(data),
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
        extents.push(extent(length_bytes, data.get_u32().into())?);
    }
    Ok(Chunk::Extents(extents))
}

/// As [`parse_extents`], with numbers of 64 bits and a count.
fn parse_extents_ext(mut data: Bytes) -> Result<Chunk, FramingError> {
    const BAD: FramingError = FramingError::Malformed("a block status has no whole extents");
    if data.remaining() < 24 || data.remaining() % 16 != 8 {
        return Err(BAD);
    }
    data.advance(4);
    let count = data.get_u32() as usize;
    if count != data.remaining() / 16 {
        return Err(BAD);
    }
    let mut extents = Vec::with_capacity(count);
    while data.has_remaining() {
        let length_bytes = data.get_u64();
        extents.push(extent(length_bytes, data.get_u64())?);
    }
    Ok(Chunk::Extents(extents))
}

fn extent(length_bytes: u64, state: u64) -> Result<Extent, FramingError> {
    if length_bytes == 0 {
        return Err(FramingError::Malformed("a block status has an empty extent"));
    }
    let (hole, zero) = (state & STATE_HOLE != 0, state & STATE_ZERO != 0);
    Ok(Extent { length_bytes, hole, zero })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Answer, AnswerTo, Dialect};
    use super::*;

    const TO: AnswerTo = AnswerTo { cookie: 9, offset: 4096 };

    #[test]
    fn extents_survive_a_reply() {
        let extents = vec![
            Extent { length_bytes: 4096, hole: false, zero: false },
            Extent { length_bytes: 8192, hole: true, zero: true },
        ];
        for dialect in [Dialect::Structured, Dialect::Extended] {
            let (head, _) = dialect.encode_answer(TO, Answer::Extents(extents.clone()));
            assert_eq!(parse_whole(&head), (9, Chunk::Extents(extents.clone())));
        }
    }

    #[test]
    fn an_error_carries_its_text() {
        for dialect in [Dialect::Structured, Dialect::Extended] {
            let answer = Answer::Error(Errno::NoSpace, "the pool is full".into());
            let (head, _) = dialect.encode_answer(TO, answer);
            let want = Chunk::Error { errno: Errno::NoSpace, message: "the pool is full".into() };
            assert_eq!(parse_whole(&head), (9, want));
        }
    }

    #[test]
    fn the_head_of_data_is_as_long_as_it_says() {
        for dialect in [Dialect::Simple, Dialect::Structured, Dialect::Extended] {
            let mut out = Vec::new();
            dialect.put_data_head(&mut out, TO, 512);
            assert_eq!(out.len(), dialect.data_head_bytes());
            out.clear();
            dialect.put_done(&mut out, TO);
            assert_eq!(out.len(), dialect.done_bytes());
        }
    }

    #[test]
    fn the_bytes_of_an_extended_reply_are_as_the_protocol_says() {
        let mut out = Vec::new();
        Dialect::Extended.put_data_head(&mut out, TO, 512);
        let want = [
            0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0x10, 0,
            0, 0, 0, 0, 0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0,
        ];
        assert_eq!(out, want);
    }

    fn parse_whole(bytes: &[u8]) -> (u64, Chunk) {
        let head: [u8; 16] = bytes[..16].try_into().expect("16 bytes");
        let end = 16 + ReplyHead::more_bytes(&head);
        match ReplyHead::parse(&head, &bytes[16..end]).expect("a chunk") {
            ReplyHead::Chunk { cookie, kind, length_bytes, done } => {
                assert!(done);
                assert_eq!(length_bytes as usize, bytes.len() - end);
                let data = Bytes::copy_from_slice(&bytes[end..]);
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
            drop(Chunk::parse(kind & 0x8007, Bytes::from(data.clone())));
            if let Some(head) = data.first_chunk() {
                drop(ReplyHead::parse(head, &data[ReplyHead::BYTES..]));
            }
        }
    }
}
