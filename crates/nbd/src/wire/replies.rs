//! Parses a server's replies for the client.

use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};

use super::{
    CHUNK_DONE, CHUNK_MAGIC, COMPRESSED_HEAD_BYTES, ContextRuns, EXTENDED_CHUNK_MAGIC, Errno,
    FramingError, OPTION_BYTES_MAX, PAYLOAD_BYTES_MAX, Run, SIMPLE_REPLY_MAGIC, STATUS_BYTES_MAX,
    bound, chunk,
};

/// The head of what a server sends in transmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHead {
    /// A read's data follows when `error` is `None`.
    Simple { cookie: u64, error: Option<Errno> },
    /// [`Chunk::parse`] takes the `length_bytes` that follow.
    Chunk { cookie: u64, kind: u16, done: bool, length_bytes: u32 },
}

impl ReplyHead {
    /// The least length of a head. [`Self::more_bytes`] says how many bytes follow.
    pub const BYTES: usize = 16;
    /// The longest rest of a head, that of a chunk with extended headers.
    pub const MORE_BYTES_MAX: usize = 16;

    /// How many bytes the head has after these.
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
                    chunk::PERIGEE_COMPRESSED => PAYLOAD_BYTES_MAX + COMPRESSED_HEAD_BYTES,
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
    Compressed(Compressed),
    Status(ContextRuns),
    Error { errno: Errno, message: String },
}

/// The compressed data of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compressed {
    pub offset: u64,
    /// Before compression.
    pub length_bytes: u32,
    /// The time that the server spent on compressing it.
    pub work: Duration,
    pub data: Bytes,
}

impl Compressed {
    /// The data before compression. The caller has checked its length in the head, because memory is allocated for it.
    pub fn decompress(&self) -> Result<Bytes, FramingError> {
        let length = self.length_bytes as usize;
        let mut data = BytesMut::zeroed(length);
        match lz4_flex::block::decompress_into(&self.data, &mut data) {
            Ok(found) if found == length => Ok(data.freeze()),
            _ => Err(FramingError::Malformed("compressed data that does not match its head")),
        }
    }
}

impl Chunk {
    /// # Errors
    /// If the chunk is cut, or of a kind that is neither known nor an error.
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
            chunk::PERIGEE_COMPRESSED => Self::compressed(data),
            chunk::BLOCK_STATUS => parse_runs(data, false),
            chunk::BLOCK_STATUS_EXT => parse_runs(data, true),
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

impl Chunk {
    /// The content of a chunk of compressed data.
    pub fn compressed(mut data: Bytes) -> Result<Self, FramingError> {
        const SHORT: FramingError =
            FramingError::Malformed("compressed data that ends in its head");
        Ok(Self::Compressed(Compressed {
            offset: data.try_get_u64().map_err(|_| SHORT)?,
            length_bytes: data.try_get_u32().map_err(|_| SHORT)?,
            work: Duration::from_micros(data.try_get_u32().map_err(|_| SHORT)?.into()),
            data,
        }))
    }
}

/// With `extended`, lengths and flags of 64 bits after a count.
fn parse_runs(mut data: Bytes, extended: bool) -> Result<Chunk, FramingError> {
    const BAD: FramingError = FramingError::Malformed("a block status has incomplete runs");
    let context = data.try_get_u32().map_err(|_| BAD)?;
    let run_bytes = if extended { 16 } else { 8 };
    let count = if extended {
        data.try_get_u32().map_err(|_| BAD)? as usize
    } else {
        data.remaining() / run_bytes
    };
    if count == 0 || data.remaining() != count * run_bytes {
        return Err(BAD);
    }
    let mut runs = Vec::with_capacity(count);
    while data.has_remaining() {
        let run = if extended {
            Run { length_bytes: data.get_u64(), flags: data.get_u64() }
        } else {
            Run { length_bytes: data.get_u32().into(), flags: data.get_u32().into() }
        };
        if run.length_bytes == 0 {
            return Err(FramingError::Malformed("a block status has an empty run"));
        }
        runs.push(run);
    }
    Ok(Chunk::Status(ContextRuns { context, runs }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Answer, AnswerTo, Dialect};
    use super::*;

    const TO: AnswerTo = AnswerTo { cookie: 9, offset: 4096 };

    #[test]
    fn the_runs_of_each_context_survive_a_reply() {
        let runs = vec![Run { length_bytes: 4096, flags: 0 }, Run { length_bytes: 8192, flags: 3 }];
        let first = ContextRuns { context: 1, runs };
        let second = ContextRuns { context: 2, ..first.clone() };
        for dialect in [Dialect::Structured, Dialect::Extended] {
            let answer = Answer::Status(vec![first.clone(), second.clone()]);
            let [bytes, ..] = dialect.encode_answer(TO, answer);
            let (one, two) = bytes.split_at(bytes.len() / 2);
            assert_eq!(parse_one(one), (9, Chunk::Status(first.clone()), false));
            assert_eq!(parse_one(two), (9, Chunk::Status(second.clone()), true));
        }
    }

    #[test]
    fn an_error_carries_its_text() {
        for dialect in [Dialect::Structured, Dialect::Extended] {
            let answer = Answer::Error(Errno::NoSpace, "the pool is full".into());
            let [head, ..] = dialect.encode_answer(TO, answer);
            let want = Chunk::Error { errno: Errno::NoSpace, message: "the pool is full".into() };
            assert_eq!(parse_one(&head), (9, want, true));
        }
    }

    #[test]
    fn the_head_and_the_end_of_data_are_as_long_as_they_say() {
        for dialect in [Dialect::Simple, Dialect::Structured, Dialect::Extended] {
            let mut out = Vec::new();
            dialect.put_data_head(&mut out, TO, 512);
            assert_eq!(out.len(), dialect.data_head_bytes());
            out.clear();
            dialect.put_done(&mut out, TO);
            assert_eq!(out.len(), dialect.done_bytes());
            out.clear();
            dialect.put_data_end(&mut out, TO);
            assert_eq!(out.len(), dialect.data_end_bytes());
        }
    }

    #[test]
    fn the_bytes_of_an_extended_reply_are_as_the_protocol_says() {
        let mut out = Vec::new();
        Dialect::Extended.put_data_head(&mut out, TO, 512);
        let want = [
            0x6e, 0x8a, 0x27, 0x8c, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0x10, 0,
            0, 0, 0, 0, 0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0,
        ];
        assert_eq!(out, want);
    }

    #[test]
    fn compressed_data_survive_a_reply() {
        let content = b"compress".repeat(512);
        let packed = Bytes::from(lz4_flex::block::compress(&content));
        for dialect in [Dialect::Structured, Dialect::Extended] {
            let answer = Answer::Compressed {
                offset: 8192,
                length_bytes: 4096,
                work_us: 7,
                data: packed.clone(),
            };
            let pieces = dialect.encode_answer(TO, answer);
            let (cookie, chunk, done) = parse_one(&pieces[..2].concat());
            let Chunk::Compressed(found) = chunk else { panic!("{chunk:?}") };
            assert_eq!((cookie, done, found.offset), (9, false, 8192));
            assert_eq!(found.work, Duration::from_micros(7));
            assert_eq!(found.decompress().expect("the data"), content);
        }
    }

    #[test]
    fn compressed_data_of_another_length_than_their_head_says_are_refused() {
        let packed = Bytes::from(lz4_flex::block::compress(&[7; 8192]));
        for length_bytes in [0, 4096, 8191, 8193] {
            let (offset, work, data) = (0, Duration::ZERO, packed.clone());
            let found = Compressed { offset, length_bytes, work, data };
            assert!(found.decompress().is_err(), "{length_bytes}");
        }
    }

    /// The cookie, the content, and whether it is the reply's last chunk.
    fn parse_one(bytes: &[u8]) -> (u64, Chunk, bool) {
        let head: [u8; 16] = bytes[..16].try_into().expect("16 bytes");
        let end = 16 + ReplyHead::more_bytes(&head);
        match ReplyHead::parse(&head, &bytes[16..end]).expect("a chunk") {
            ReplyHead::Chunk { cookie, kind, length_bytes, done } => {
                assert_eq!(length_bytes as usize, bytes.len() - end);
                let data = Bytes::copy_from_slice(&bytes[end..]);
                (cookie, Chunk::parse(kind, data).expect("a chunk's content"), done)
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
            if let Ok(Chunk::Compressed(mut found)) = Chunk::compressed(Bytes::from(data.clone())) {
                found.length_bytes %= 1 << 16;
                drop(found.decompress());
            }
            if let Some(head) = data.first_chunk() {
                drop(ReplyHead::parse(head, &data[ReplyHead::BYTES..]));
            }
        }
    }
}
