//! The parts of NBD that a load generator needs: the fixed newstyle handshake, requests, and finding the ends
//! of replies in a stream of bytes.
//!
//! It shares no code with the volume server's NBD, so that an error there cannot hide here.

use std::io::{self, Read, Write};

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED_REPLY: u32 = 8;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_ERROR_BIT: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
const CHUNK_DONE: u16 = 1;
const CHUNK_ERROR_BIT: u16 = 1 << 15;
/// The replies to the options that are used here are not longer.
const OPTION_REPLY_BYTES_MAX: u32 = 64 << 10;

pub const REQUEST_BYTES: usize = 28;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
}

pub fn encode_request(
    out: &mut [u8],
    kind: Kind,
    cookie: u64,
    offset_bytes: u64,
    length_bytes: u32,
) {
    out[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&0u16.to_be_bytes());
    out[6..8].copy_from_slice(&(kind as u16).to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..24].copy_from_slice(&offset_bytes.to_be_bytes());
    out[24..28].copy_from_slice(&length_bytes.to_be_bytes());
}

/// The result of the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    pub size_bytes: u64,
    pub structured: bool,
}

fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn take<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Opens an export; `structured` asks for structured replies, which the server may refuse.
pub fn handshake(
    stream: &mut (impl Read + Write),
    name: &str,
    structured: bool,
) -> io::Result<Export> {
    if u64::from_be_bytes(take(stream)?) != MAGIC
        || u64::from_be_bytes(take(stream)?) != OPTION_MAGIC
    {
        return Err(wrong("the server does not speak NBD newstyle"));
    }
    let flags = u16::from_be_bytes(take(stream)?);
    stream.write_all(&u32::from(flags & 3).to_be_bytes())?;
    let structured = structured && option(stream, OPTION_STRUCTURED_REPLY, &[])?.is_ok();
    let length = u32::try_from(name.len()).map_err(|_| wrong("the export's name is too long"))?;
    let go = [&length.to_be_bytes()[..], name.as_bytes(), &0u16.to_be_bytes()].concat();
    match option(stream, OPTION_GO, &go)? {
        Ok(Some(size_bytes)) => Ok(Export { size_bytes, structured }),
        Ok(None) => Err(wrong("the server said nothing about the export")),
        Err(text) => Err(wrong(format!("the server refused export {name:?}: {text}"))),
    }
}

/// `Ok(Ok(size of the export, if the server sent it))`, or the text of the refusal.
fn option(
    stream: &mut (impl Read + Write),
    option: u32,
    data: &[u8],
) -> io::Result<Result<Option<u64>, String>> {
    let length = u32::try_from(data.len()).map_err(|_| wrong("the option is too long"))?;
    let head =
        [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), data];
    stream.write_all(&head.concat())?;
    let mut size_bytes = None;
    loop {
        if u64::from_be_bytes(take(stream)?) != OPTION_REPLY_MAGIC {
            return Err(wrong("a reply to an option has the wrong magic"));
        }
        if u32::from_be_bytes(take(stream)?) != option {
            return Err(wrong("a reply to an option that was not sent"));
        }
        let kind = u32::from_be_bytes(take(stream)?);
        let length = u32::from_be_bytes(take(stream)?);
        if length > OPTION_REPLY_BYTES_MAX {
            return Err(wrong("a reply to an option is too long"));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        match kind {
            REPLY_ACK => return Ok(Ok(size_bytes)),
            kind if kind & REPLY_ERROR_BIT != 0 => {
                return Ok(Err(format!("{kind:#x} {}", String::from_utf8_lossy(&data))));
            }
            REPLY_INFO if data.len() >= 10 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                let size = data[2..10].try_into().expect("8 bytes");
                size_bytes = Some(u64::from_be_bytes(size));
            }
            _ => {}
        }
    }
}

/// One completed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    pub cookie: u64,
    /// NBD error number; 0 is success.
    pub errno: u32,
}

/// Splits a stream of simple and structured replies into completed requests, and skips their data.
#[derive(Debug, Default)]
pub struct ReplyParser {
    head: [u8; Self::HEAD_BYTES_MAX],
    have: usize,
    /// Number of data bytes that are still to be skipped.
    skip: u64,
    /// The request that is complete when everything is skipped.
    ending: Option<Done>,
}

/// The content of a complete header.
struct Head {
    done: Option<Done>,
    data_bytes: u64,
}

impl ReplyParser {
    /// The header of a chunk, with the error number that follows it in an error chunk.
    const HEAD_BYTES_MAX: usize = 24;

    /// `data_bytes(cookie)` is the length of the data that a successful simple reply carries.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        data_bytes: impl Fn(u64) -> u64,
        mut done: impl FnMut(Done),
    ) -> io::Result<()> {
        loop {
            let skipped = self.skip.min(bytes.len() as u64);
            self.skip -= skipped;
            bytes = &bytes[usize::try_from(skipped).expect("at most the length of a slice")..];
            if self.skip > 0 {
                return Ok(());
            }
            if let Some(ended) = self.ending.take() {
                done(ended);
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let missing = self.head_bytes().saturating_sub(self.have).min(bytes.len());
            self.head[self.have..self.have + missing].copy_from_slice(&bytes[..missing]);
            self.have += missing;
            bytes = &bytes[missing..];
            if self.have == self.head_bytes() {
                let head = self.parse(&data_bytes)?;
                self.have = 0;
                self.skip = head.data_bytes;
                self.ending = head.done;
            }
        }
    }

    /// The length of the header, as far as its first bytes determine it.
    fn head_bytes(&self) -> usize {
        if self.have < 16 || self.u32(0) != CHUNK_MAGIC {
            return 16;
        }
        if self.u16(6) & CHUNK_ERROR_BIT != 0 { 24 } else { 20 }
    }

    fn parse(&self, data_bytes: &impl Fn(u64) -> u64) -> io::Result<Head> {
        let cookie = u64::from_be_bytes(self.head[8..16].try_into().expect("8 bytes"));
        match self.u32(0) {
            SIMPLE_REPLY_MAGIC => {
                let errno = self.u32(4);
                let data_bytes = if errno == 0 { data_bytes(cookie) } else { 0 };
                Ok(Head { done: Some(Done { cookie, errno }), data_bytes })
            }
            CHUNK_MAGIC => {
                let (flags, kind, length) = (self.u16(4), self.u16(6), self.u32(16));
                let last = flags & CHUNK_DONE != 0;
                if kind & CHUNK_ERROR_BIT == 0 {
                    let done = last.then_some(Done { cookie, errno: 0 });
                    return Ok(Head { done, data_bytes: length.into() });
                }
                let rest = length.checked_sub(4).ok_or_else(|| wrong("an error without a number"));
                let errno = self.u32(20).max(1);
                Ok(Head {
                    // An error ends the measurement, so the last chunk need not arrive.
                    done: Some(Done { cookie, errno }),
                    data_bytes: rest?.into(),
                })
            }
            magic => Err(wrong(format!("a reply has the magic {magic:#x}"))),
        }
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.head[at..at + 2].try_into().expect("2 bytes"))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.head[at..at + 4].try_into().expect("4 bytes"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn simple(cookie: u64, errno: u32, data: &[u8]) -> Vec<u8> {
        let head = [
            &SIMPLE_REPLY_MAGIC.to_be_bytes()[..],
            &errno.to_be_bytes(),
            &cookie.to_be_bytes(),
            data,
        ];
        head.concat()
    }

    fn chunk(cookie: u64, flags: u16, kind: u16, data: &[u8]) -> Vec<u8> {
        let length = u32::try_from(data.len()).expect("short");
        let head = [
            &CHUNK_MAGIC.to_be_bytes()[..],
            &flags.to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
            &length.to_be_bytes(),
            data,
        ];
        head.concat()
    }

    /// The result when the stream arrives in pieces of `piece` bytes.
    fn parse(stream: &[u8], piece: usize) -> io::Result<Vec<(u64, u32)>> {
        let (mut parser, mut ended) = (ReplyParser::default(), Vec::new());
        for bytes in stream.chunks(piece) {
            parser.feed(bytes, |_| 100, |done| ended.push((done.cookie, done.errno)))?;
        }
        Ok(ended)
    }

    #[test]
    fn replies_of_both_kinds_end_wherever_the_stream_is_cut() {
        let stream = [
            simple(7, 0, &[1; 100]),
            chunk(8, 0, 1, &[2; 58]),
            chunk(8, CHUNK_DONE, 2, &[3; 12]),
            chunk(9, CHUNK_DONE, 0, &[]),
            simple(10, 5, &[]),
            simple(11, 0, &[4; 100]),
        ]
        .concat();
        for piece in [1, 2, 3, 15, 16, 17, 20, 21, 100, stream.len()] {
            let want = vec![(7, 0), (8, 0), (9, 0), (10, 5), (11, 0)];
            assert_eq!(parse(&stream, piece).expect("replies"), want, "in pieces of {piece}");
        }
    }

    #[test]
    fn an_error_chunk_carries_its_number() {
        let data = [&28u32.to_be_bytes()[..], &4u16.to_be_bytes(), b"full"].concat();
        let stream = [chunk(3, CHUNK_DONE, CHUNK_ERROR_BIT | 1, &data), simple(4, 0, &[0; 100])];
        for piece in [1, 23, 1000] {
            assert_eq!(parse(&stream.concat(), piece).expect("replies"), [(3, 28), (4, 0)]);
        }
    }

    #[test]
    fn what_is_no_reply_is_refused() {
        assert!(parse(&[0; 16], 16).is_err());
        assert!(parse(&chunk(1, CHUNK_DONE, CHUNK_ERROR_BIT, &[0; 2])[..], 64).is_ok());
        let short = [chunk(1, CHUNK_DONE, CHUNK_ERROR_BIT, &[0; 2]), simple(1, 0, &[])].concat();
        assert!(parse(&short, 64).is_err());
    }

    /// A server that has sent all its answers before the first request.
    struct Scripted {
        says: Cursor<Vec<u8>>,
        heard: Vec<u8>,
    }

    impl Read for Scripted {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.says.read(buffer)
        }
    }

    impl Write for Scripted {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.heard.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn greeting() -> Vec<u8> {
        [&MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &3u16.to_be_bytes()].concat()
    }

    fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let length = u32::try_from(data.len()).expect("short");
        let parts = [
            &OPTION_REPLY_MAGIC.to_be_bytes()[..],
            &option.to_be_bytes(),
            &kind.to_be_bytes(),
            &length.to_be_bytes(),
            data,
        ];
        parts.concat()
    }

    #[test]
    fn a_handshake_finds_the_size_and_takes_a_refusal_of_structured_replies() {
        let info = [&0u16.to_be_bytes()[..], &4096u64.to_be_bytes(), &1u16.to_be_bytes()].concat();
        let says = [
            greeting(),
            option_reply(OPTION_STRUCTURED_REPLY, REPLY_ERROR_BIT | 1, b"no"),
            option_reply(OPTION_GO, REPLY_INFO, &info),
            option_reply(OPTION_GO, REPLY_ACK, &[]),
        ];
        let mut server = Scripted { says: Cursor::new(says.concat()), heard: Vec::new() };
        let export = handshake(&mut server, "disk", true).expect("an export");
        assert_eq!(export, Export { size_bytes: 4096, structured: false });
        assert_eq!(server.heard[..4], 3u32.to_be_bytes());
    }

    #[test]
    fn a_refused_export_is_an_error_with_the_server_s_words() {
        let says =
            [greeting(), option_reply(OPTION_GO, REPLY_ERROR_BIT | 6, b"no such export")].concat();
        let mut server = Scripted { says: Cursor::new(says), heard: Vec::new() };
        let error = handshake(&mut server, "disk", false).expect_err("a refusal");
        assert!(error.to_string().contains("no such export"), "{error}");
    }
}
