//! The frames that a client sends in the transmission phase.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use perigee_block::stream::input::{Framing, Measured};

use super::{Dialect, FramingError, PAYLOAD_BYTES_MAX, bound, command, command_flag};

const COMPACT_MAGIC: u32 = 0x2560_9513;
const EXTENDED_MAGIC: u32 = 0x21e4_1c71;

/// A request's head; its payload follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    /// The length of the payload, or of the request's range.
    pub length_bytes: u64,
}

impl Framing for Dialect {
    type Head = Request;
    type Error = FramingError;

    fn head(&self, bytes: &[u8]) -> Result<Option<Measured<Request>>, FramingError> {
        Ok(Request::parse(*self, bytes)?.map(|head| Measured {
            head,
            head_bytes: self.request_head_bytes(),
            payload_bytes: head.payload_bytes(*self),
        }))
    }
}

impl Request {
    /// Parses a head at the start of `bytes`. Returns `None` if it has not fully arrived.
    ///
    /// # Errors
    /// The bytes are not a request, or its payload is longer than [`PAYLOAD_BYTES_MAX`].
    pub fn parse(dialect: Dialect, mut bytes: &[u8]) -> Result<Option<Self>, FramingError> {
        if bytes.len() < dialect.request_head_bytes() {
            return Ok(None);
        }
        let extended = dialect == Dialect::Extended;
        let magic = bytes.get_u32();
        if magic != if extended { EXTENDED_MAGIC } else { COMPACT_MAGIC } {
            return Err(FramingError::Magic { what: "a request", found: magic.into() });
        }
        let request = Self {
            flags: bytes.get_u16(),
            command: bytes.get_u16(),
            cookie: bytes.get_u64(),
            offset: bytes.get_u64(),
            length_bytes: if extended { bytes.get_u64() } else { bytes.get_u32().into() },
        };
        if request.has_payload(dialect) {
            bound("a request's payload", request.length_bytes, PAYLOAD_BYTES_MAX)?;
        }
        Ok(Some(request))
    }

    /// Bytes that follow the head; at most [`PAYLOAD_BYTES_MAX`].
    pub fn payload_bytes(&self, dialect: Dialect) -> usize {
        if !self.has_payload(dialect) {
            return 0;
        }
        usize::try_from(self.length_bytes).expect("a payload's length was bounded")
    }

    /// A write has one. With extended headers a flag says so of other commands too. The protocol wants that flag of a write as well, but the
    /// client of QEMU 10.0 (Debian 13) leaves the flag out, and QEMU's own server lets it.
    pub fn has_payload(&self, dialect: Dialect) -> bool {
        let is_said = dialect == Dialect::Extended && self.flags & command_flag::PAYLOAD_LEN != 0;
        self.command == command::WRITE || is_said
    }

    /// The head as it is sent, with the flag that an extended write needs. Without extended headers the length must fit 32 bits.
    pub fn encode(&self, dialect: Dialect) -> Bytes {
        let extended = dialect == Dialect::Extended;
        let mut out = BytesMut::with_capacity(dialect.request_head_bytes());
        out.put_u32(if extended { EXTENDED_MAGIC } else { COMPACT_MAGIC });
        let write = extended && self.command == command::WRITE;
        out.put_u16(self.flags | if write { command_flag::PAYLOAD_LEN } else { 0 });
        out.put_u16(self.command);
        out.put_u64(self.cookie);
        out.put_u64(self.offset);
        if extended {
            out.put_u64(self.length_bytes);
        } else {
            out.put_u32(u32::try_from(self.length_bytes).expect("the sender cut it to 32 bits"));
        }
        out.freeze()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn write(flags: u16, length_bytes: u64) -> Request {
        Request { flags, command: command::WRITE, cookie: 7, offset: 1 << 40, length_bytes }
    }

    #[test]
    fn a_request_survives_its_encoding() {
        let request = write(command_flag::FUA | command_flag::PAYLOAD_LEN, 32 << 20);
        for dialect in [Dialect::Simple, Dialect::Structured, Dialect::Extended] {
            assert_eq!(Request::parse(dialect, &request.encode(dialect)), Ok(Some(request)));
        }
    }

    #[test]
    fn a_head_that_is_not_whole_waits_for_more() {
        let bytes = write(0, 512).encode(Dialect::Structured);
        assert_eq!(Request::parse(Dialect::Structured, &bytes[..27]), Ok(None));
    }

    #[test]
    fn a_payload_longer_than_the_bound_is_a_framing_error() {
        let request = write(command_flag::PAYLOAD_LEN, u64::from(PAYLOAD_BYTES_MAX) + 1);
        for dialect in [Dialect::Structured, Dialect::Extended] {
            let parsed = Request::parse(dialect, &request.encode(dialect));
            assert!(matches!(parsed, Err(FramingError::TooLong { .. })), "{dialect:?}");
        }
    }

    #[test]
    fn an_extended_request_says_itself_whether_it_has_a_payload_but_for_a_write_that_always_has_one()
     {
        for flags in [0, command_flag::PAYLOAD_LEN] {
            assert_eq!(write(flags, 512).payload_bytes(Dialect::Extended), 512);
        }
        let trim = Request { command: command::TRIM, ..write(0, 512) };
        assert_eq!(trim.payload_bytes(Dialect::Extended), 0);
        let with = Request { command: command::TRIM, ..write(command_flag::PAYLOAD_LEN, 512) };
        assert_eq!(with.payload_bytes(Dialect::Extended), 512);
        let zero = Request { command: command::WRITE_ZEROES, ..write(0, 1 << 40) };
        assert_eq!(
            Request::parse(Dialect::Extended, &zero.encode(Dialect::Extended)),
            Ok(Some(zero))
        );
    }

    #[test]
    fn the_bytes_of_an_extended_request_are_as_the_protocol_says() {
        let request = Request { offset: 0x1000, ..write(0, 0x200) };
        let want = [
            0x21, 0xe4, 0x1c, 0x71, 0, 0x20, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0x10,
            0, 0, 0, 0, 0, 0, 0, 2, 0,
        ];
        assert_eq!(&request.encode(Dialect::Extended)[..], want);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(data in proptest::collection::vec(any::<u8>(), 0..64)) {
            for dialect in [Dialect::Simple, Dialect::Extended] {
                if let Ok(Some(request)) = Request::parse(dialect, &data) {
                    prop_assert!(request.payload_bytes(dialect) <= PAYLOAD_BYTES_MAX as usize);
                }
            }
        }
    }
}
