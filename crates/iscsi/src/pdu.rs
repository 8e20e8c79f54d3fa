//! Parses and writes PDUs (RFC 7143, chapter 11). It never does any I/O.
//!
//! A PDU has a basic header of 48 bytes, optional additional headers, and an optional header digest. Then
//! come the data, padded to a multiple of 4 bytes, and, if there are data, an optional data digest.

use perigee_block::stream::input::{Framing, Measured};

/// The basic header segment, which every PDU has.
pub const HEAD_BYTES: usize = 48;
/// A digest of header or data is a CRC32C (RFC 7143, 13.1).
pub const DIGEST_BYTES: usize = 4;
/// The tag that means "no tag".
pub const NO_TAG: u32 = 0xffff_ffff;

/// Opcodes of PDUs from initiators.
pub mod request {
    /// A ping, or the answer to one of the target's.
    pub const NOP_OUT: u8 = 0x00;
    /// A command with its CDB, and perhaps the first of its data.
    pub const SCSI_COMMAND: u8 = 0x01;
    /// Aborts tasks, or resets the unit or the target.
    pub const TASK_MANAGEMENT: u8 = 0x02;
    /// One step of a login.
    pub const LOGIN: u8 = 0x03;
    /// Keys and values after the login, of which this target knows SendTargets.
    pub const TEXT: u8 = 0x04;
    /// Data of a write.
    pub const DATA_OUT: u8 = 0x05;
    /// Ends the session, or a connection of it.
    pub const LOGOUT: u8 = 0x06;
    /// Asks for lost PDUs again. At ErrorRecoveryLevel 0, the only one here, it is refused.
    pub const SNACK: u8 = 0x10;
}

/// Opcodes of PDUs from targets.
pub mod response {
    /// The answer to a ping.
    pub const NOP_IN: u8 = 0x20;
    /// A command's status, with sense data if it failed.
    pub const SCSI_RESPONSE: u8 = 0x21;
    /// How a task management function ended.
    pub const TASK_MANAGEMENT: u8 = 0x22;
    /// The answer to one step of a login.
    pub const LOGIN: u8 = 0x23;
    /// The answer to a text.
    pub const TEXT: u8 = 0x24;
    /// Data of a read; the last one may carry the status.
    pub const DATA_IN: u8 = 0x25;
    /// The answer to a logout; then the target closes the connection.
    pub const LOGOUT: u8 = 0x26;
    /// Ready to transfer: asks for a part of a write's data.
    pub const R2T: u8 = 0x31;
    /// A PDU was not taken, with the reason and the PDU's header.
    pub const REJECT: u8 = 0x3f;
}

pub mod flag {
    /// The last PDU of its sequence. In a login it asks for the next stage.
    pub const FINAL: u8 = 0x80;
    /// The text continues in the next PDU.
    pub const CONTINUE: u8 = 0x40;
    /// A command that reads.
    pub const READ: u8 = 0x40;
    /// A command that writes.
    pub const WRITE: u8 = 0x20;
    /// A Data-In PDU that carries the command's status.
    pub const STATUS: u8 = 0x01;
    /// The residual count says how many bytes of the command did not fit into what the initiator expected.
    pub const OVERFLOW: u8 = 0x04;
    /// The residual count says how many bytes fewer than expected the command moved.
    pub const UNDERFLOW: u8 = 0x02;
}

/// The reasons of a Reject PDU.
pub mod reject {
    /// The CRC of the data is wrong. The task's data may be sent again.
    pub const DATA_DIGEST: u8 = 0x02;
    /// A SNACK was refused.
    pub const SNACK: u8 = 0x03;
    /// The PDU breaks the protocol, such as data for a task that takes none.
    pub const PROTOCOL: u8 = 0x04;
    /// The opcode, or what it asks for, is not known here.
    pub const NOT_SUPPORTED: u8 = 0x05;
    /// More immediate commands are under way than the target takes.
    pub const TOO_MANY_IMMEDIATE: u8 = 0x06;
    /// A field has a value that it can't have.
    pub const INVALID_FIELD: u8 = 0x09;
}

/// The bytes are not iSCSI. The start of the next PDU is not known, so the connection ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FramingError {
    #[error("a PDU has {length_bytes} bytes of data; the limit is {max_bytes}")]
    TooLong { length_bytes: u32, max_bytes: u32 },
    #[error("the digest of a PDU's header is wrong")]
    HeaderDigest,
    #[error("the digest of a PDU's data is wrong")]
    DataDigest,
}

/// A basic header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head(pub [u8; HEAD_BYTES]);

impl Head {
    /// A header with these first two bytes and zeros behind them.
    pub fn new(opcode: u8, flags: u8) -> Self {
        let mut head = Self([0; HEAD_BYTES]);
        head.0[0] = opcode;
        head.0[1] = flags;
        head
    }

    /// One of [`request`] or [`response`], without the bit for immediate delivery.
    pub fn opcode(&self) -> u8 {
        self.0[0] & 0x3f
    }

    /// Whether the command is outside of the order of CmdSN (the I bit).
    pub fn is_immediate(&self) -> bool {
        self.0[0] & 0x40 != 0
    }

    /// The second byte, whose bits ([`flag`]) depend on the opcode.
    pub fn flags(&self) -> u8 {
        self.0[1]
    }

    /// Whether one of these bits of [`flag`] is set.
    pub fn has(&self, flag: u8) -> bool {
        self.0[1] & flag != 0
    }

    /// The length of the additional headers. The field counts words of four bytes.
    pub fn ahs_bytes(&self) -> usize {
        usize::from(self.0[4]) * 4
    }

    /// The length of the data segment without its padding: 24 bits.
    pub fn data_bytes(&self) -> u32 {
        u32::from_be_bytes([0, self.0[5], self.0[6], self.0[7]])
    }

    /// A big-endian number. Panics beyond the header.
    pub fn u16_at(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    /// A big-endian number. Panics beyond the header.
    pub fn u32_at(&self, at: usize) -> u32 {
        u32::from_be_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    /// The logical unit, in the format of SAM-5: eight bytes, all zero for LUN 0.
    pub fn lun(&self) -> [u8; 8] {
        self.bytes_at(8)
    }

    /// The initiator's task tag.
    pub fn itt(&self) -> u32 {
        self.u32_at(16)
    }

    /// The target's transfer tag, or the referenced task's tag.
    pub fn ttt(&self) -> u32 {
        self.u32_at(20)
    }

    /// Where the command stands in the order of its session, modulo 2³² (RFC 1982).
    pub fn cmd_sn(&self) -> u32 {
        self.u32_at(24)
    }

    /// The command descriptor block. Longer ones would go on in an additional header.
    pub fn cdb(&self) -> [u8; 16] {
        self.bytes_at(32)
    }

    fn bytes_at<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0[at..at + N].try_into().expect("it lies within the header")
    }

    /// Puts bytes at an offset. Panics beyond the header.
    pub fn with(mut self, at: usize, bytes: &[u8]) -> Self {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Puts a big-endian number at an offset. Panics beyond the header.
    pub fn with_u32(self, at: usize, value: u32) -> Self {
        self.with(at, &value.to_be_bytes())
    }

    /// Sets the length of the data.
    pub fn with_data_bytes(self, length: usize) -> Self {
        let length = u32::try_from(length).expect("data are bounded far below 4 GiB");
        self.with(5, &length.to_be_bytes()[1..])
    }
}

/// The length with padding to a multiple of 4.
pub fn padded(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// The digests of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Digests {
    pub header: bool,
    pub data: bool,
}

impl Digests {
    /// The bytes of a header without additional headers.
    pub fn head_bytes(self) -> usize {
        HEAD_BYTES + if self.header { DIGEST_BYTES } else { 0 }
    }

    /// The bytes of a PDU with this much data.
    pub fn pdu_bytes(self, data_bytes: usize) -> usize {
        self.head_bytes() + self.tail_bytes(data_bytes) + data_bytes
    }

    /// The bytes after the data: padding and digest.
    pub fn tail_bytes(self, data_bytes: usize) -> usize {
        let digest = if self.data && data_bytes > 0 { DIGEST_BYTES } else { 0 };
        padded(data_bytes) - data_bytes + digest
    }

    /// Writes the header, and its digest if one is agreed on, to the begin of `room`.
    pub fn put_head(self, room: &mut [u8], head: &Head) {
        room[..HEAD_BYTES].copy_from_slice(&head.0);
        if self.header {
            room[HEAD_BYTES..][..DIGEST_BYTES].copy_from_slice(&digest(&[&head.0]));
        }
    }

    /// Writes the padding and digest that follow `data`. `room` has [`Self::tail_bytes`].
    pub fn put_tail(self, room: &mut [u8], data: &[u8]) {
        let padding = padded(data.len()) - data.len();
        room[..padding].fill(0);
        if self.data && !data.is_empty() {
            let digest = digest(&[data, &room[..padding]]);
            room[padding..][..DIGEST_BYTES].copy_from_slice(&digest);
        }
    }

    /// A whole PDU.
    pub fn encode(self, head: Head, data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; self.pdu_bytes(data.len())];
        let (front, rest) = bytes.split_at_mut(self.head_bytes());
        self.put_head(front, &head.with_data_bytes(data.len()));
        let (middle, tail) = rest.split_at_mut(data.len());
        middle.copy_from_slice(data);
        self.put_tail(tail, data);
        bytes
    }

    /// The data in the payload as measured by [`Framing::head`].
    ///
    /// # Errors
    /// When the digest is wrong.
    pub fn data<'a>(self, head: &Head, payload: &'a [u8]) -> Result<&'a [u8], FramingError> {
        let length = head.data_bytes() as usize;
        if self.data && length > 0 {
            let (data, found) = payload.split_at(padded(length));
            if digest(&[data]) != found {
                return Err(FramingError::DataDigest);
            }
        }
        Ok(&payload[..length])
    }
}

/// CRC32C is sent with its lowest byte first.
fn digest(parts: &[&[u8]]) -> [u8; DIGEST_BYTES] {
    parts.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part)).to_le_bytes()
}

/// The framing of PDUs in a connection's stream.
#[derive(Debug, Clone, Copy)]
pub struct PduFraming {
    pub digests: Digests,
    /// The most data in a PDU, as this side has announced.
    pub data_bytes_max: u32,
}

impl Framing for PduFraming {
    type Head = Head;
    type Error = FramingError;

    fn head(&self, bytes: &[u8]) -> Result<Option<Measured<Head>>, FramingError> {
        let Some(front) = bytes.first_chunk::<HEAD_BYTES>() else { return Ok(None) };
        let head = Head(*front);
        let length_bytes = head.data_bytes();
        if length_bytes > self.data_bytes_max {
            let max_bytes = self.data_bytes_max;
            return Err(FramingError::TooLong { length_bytes, max_bytes });
        }
        let covered = HEAD_BYTES + head.ahs_bytes();
        let head_bytes = covered + if self.digests.header { DIGEST_BYTES } else { 0 };
        if bytes.len() < head_bytes {
            return Ok(None);
        }
        if self.digests.header && digest(&[&bytes[..covered]]) != bytes[covered..head_bytes] {
            return Err(FramingError::HeaderDigest);
        }
        let data_bytes = length_bytes as usize;
        let payload_bytes = data_bytes + self.digests.tail_bytes(data_bytes);
        Ok(Some(Measured { head, head_bytes, payload_bytes }))
    }
}

/// Whether `a` comes before `b` in wrapping serial numbers (RFC 1982).
pub fn serial_before(a: u32, b: u32) -> bool {
    a != b && b.wrapping_sub(a) < 1 << 31
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Digests = Digests { header: true, data: true };

    fn framing(digests: Digests) -> PduFraming {
        PduFraming { digests, data_bytes_max: 8192 }
    }

    #[test]
    fn a_pdu_is_measured_as_it_was_encoded() {
        for digests in [Digests::default(), BOTH, Digests { header: false, data: true }] {
            for data in [&b""[..], b"a", b"four", b"fives"] {
                let bytes = digests.encode(Head::new(request::TEXT, flag::FINAL), data);
                assert!(framing(digests).head(&bytes[..47]).expect("no error").is_none());
                let measured = framing(digests).head(&bytes).expect("a PDU").expect("a whole one");
                assert_eq!(measured.head_bytes + measured.payload_bytes, bytes.len());
                let payload = &bytes[measured.head_bytes..];
                assert_eq!(digests.data(&measured.head, payload), Ok(data));
            }
        }
    }

    #[test]
    fn a_flipped_bit_is_found_by_the_digests() {
        let bytes = BOTH.encode(Head::new(request::TEXT, flag::FINAL), b"data!");
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            let found = match framing(BOTH).head(&bad) {
                Ok(Some(measured)) => {
                    let payload = &bad[measured.head_bytes..];
                    BOTH.data(&measured.head, payload).err()
                }
                Ok(None) => Some(FramingError::HeaderDigest),
                Err(error) => Some(error),
            };
            assert!(found.is_some(), "byte {at}");
        }
    }

    #[test]
    fn the_digest_is_the_one_of_the_standard() {
        // RFC 7143, appendix on CRC examples: 32 bytes of zeros.
        assert_eq!(digest(&[&[0; 32]]), [0xaa, 0x36, 0x91, 0x8a]);
    }

    #[test]
    fn data_longer_than_allowed_are_refused_before_they_arrive() {
        let head = Head::new(request::DATA_OUT, 0).with_data_bytes(8193);
        let refused = framing(Digests::default()).head(&head.0).err();
        assert_eq!(refused, Some(FramingError::TooLong { length_bytes: 8193, max_bytes: 8192 }));
    }

    #[test]
    fn numbers_go_round() {
        assert!(
            serial_before(1, 2)
                && serial_before(u32::MAX, 0)
                && serial_before(0x7fff_ffff, 0x8000_0000)
        );
        assert!(!serial_before(2, 1) && !serial_before(3, 3) && !serial_before(0, u32::MAX));
    }
}
