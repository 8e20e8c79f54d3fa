//! The parts of iSCSI (RFC 7143) that a load generator needs: the headers that it sends, and finding the ends
//! of answers in a stream of bytes. It shares no code with the target.

use std::io;

pub const HEAD_BYTES: usize = 48;
pub const SECTOR_BYTES: u32 = 512;
pub const NO_TAG: u32 = u32::MAX;

pub mod opcode {
    pub const NOP_OUT: u8 = 0x00;
    pub const COMMAND: u8 = 0x01;
    pub const LOGIN: u8 = 0x03;
    pub const DATA_OUT: u8 = 0x05;
    pub const NOP_IN: u8 = 0x20;
    pub const RESPONSE: u8 = 0x21;
    pub const LOGIN_RESPONSE: u8 = 0x23;
    pub const DATA_IN: u8 = 0x25;
    pub const READY: u8 = 0x31;
}

pub fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    /// SYNCHRONIZE CACHE of the whole disk.
    Flush,
    /// TEST UNIT READY.
    Ask,
    /// INQUIRY, with the standard answer.
    Inquire,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head(pub [u8; HEAD_BYTES]);

impl Head {
    pub fn new(opcode: u8, flags: u8, tag: u32) -> Self {
        let mut head = Self([0; HEAD_BYTES]);
        (head.0[0], head.0[1]) = (opcode, flags);
        head.put(16, tag);
        head
    }

    /// A command for this many bytes at `offset_bytes`: one with 16 bytes, or one without a range.
    pub fn command(kind: Kind, tag: u32, lun: u8, offset_bytes: u64, length_bytes: u32) -> Self {
        let (flags, code) = match kind {
            Kind::Read => (0xc0, 0x88),
            Kind::Write => (0xa0, 0x8a),
            Kind::Flush => (0x80, 0x91),
            Kind::Ask => (0x80, 0),
            Kind::Inquire => (0xc0, 0x12),
        };
        let mut head = Self::new(opcode::COMMAND, flags, tag);
        head.0[9] = lun;
        head.put(20, length_bytes);
        head.0[32] = code;
        if kind == Kind::Inquire {
            // The allocation length has two bytes.
            head.0[34..38].copy_from_slice(&(length_bytes << 8).to_be_bytes());
            return head;
        }
        let first = offset_bytes / u64::from(SECTOR_BYTES);
        head.0[34..42].copy_from_slice(&first.to_be_bytes());
        head.put(42, length_bytes / SECTOR_BYTES);
        head
    }

    pub fn number(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.0[at..at + 4].try_into().expect("4 bytes"))
    }

    pub fn put(&mut self, at: usize, number: u32) {
        self.0[at..at + 4].copy_from_slice(&number.to_be_bytes());
    }

    pub fn put_data_bytes(&mut self, length: usize) {
        let length = u32::try_from(length).expect("a segment is short");
        self.0[5..8].copy_from_slice(&length.to_be_bytes()[1..]);
    }

    pub fn data_bytes(&self) -> usize {
        u32::from_be_bytes([0, self.0[5], self.0[6], self.0[7]]) as usize
    }

    pub fn opcode(&self) -> u8 {
        self.0[0] & 0x3f
    }

    pub fn tag(&self) -> u32 {
        self.number(16)
    }
}

/// Splits a stream into the headers of PDUs and skips their data. A header is returned when its data have
/// passed.
#[derive(Debug, Default)]
pub struct Parser {
    head: Vec<u8>,
    skip: usize,
    whole: Option<Head>,
}

impl Parser {
    /// # Errors
    /// Errors of `each`, and PDUs that were not requested.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(&Head) -> io::Result<()>,
    ) -> io::Result<()> {
        loop {
            let skipped = self.skip.min(bytes.len());
            bytes = &bytes[skipped..];
            self.skip -= skipped;
            if self.skip > 0 {
                return Ok(());
            }
            if let Some(head) = self.whole.take() {
                each(&head)?;
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let taken = (HEAD_BYTES - self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if let Ok(whole) = <[u8; HEAD_BYTES]>::try_from(&self.head[..]) {
                let head = Head(whole);
                if head.0[4] != 0 {
                    return Err(wrong("the target sent additional headers"));
                }
                self.head.clear();
                self.skip = head.data_bytes().next_multiple_of(4);
                self.whole = Some(head);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_come_out_wherever_the_stream_is_cut() {
        let mut stream = Vec::new();
        for (tag, data_bytes) in [(1, 0), (2, 5), (3, 100), (4, 0)] {
            let mut head = Head::new(opcode::DATA_IN, 0x80, tag);
            head.put_data_bytes(data_bytes);
            stream.extend(head.0);
            stream.extend(vec![0xff; data_bytes.next_multiple_of(4)]);
        }
        for piece in [1, 47, 48, 49, 1000] {
            let (mut parser, mut tags) = (Parser::default(), Vec::new());
            for bytes in stream.chunks(piece) {
                let took = parser.feed(bytes, |head| {
                    tags.push(head.tag());
                    Ok(())
                });
                took.expect("no error");
            }
            assert_eq!(tags, [1, 2, 3, 4], "in pieces of {piece}");
        }
    }
}
