//! Sense data: the reason why a command failed (SPC-4, 4.5).

/// Sense keys.
use perigee_block::device::IoError;

mod key {
    /// Nothing is wrong.
    pub const NO_SENSE: u8 = 0x0;
    /// What is stored can't be read or written.
    pub const MEDIUM_ERROR: u8 = 0x3;
    /// The target itself failed.
    pub const HARDWARE_ERROR: u8 = 0x4;
    /// The command is wrong. It fails again if it is sent again.
    pub const ILLEGAL_REQUEST: u8 = 0x5;
    /// Something has changed. The command was not carried out, and works when it is sent again.
    pub const UNIT_ATTENTION: u8 = 0x6;
    /// The unit may not be written, or has no space.
    pub const DATA_PROTECT: u8 = 0x7;
    /// The target gave the command up. The initiator may try again.
    pub const ABORTED_COMMAND: u8 = 0xb;
    /// What stands there is not what the initiator expected.
    pub const MISCOMPARE: u8 = 0xe;
}

/// Why a command failed, as it goes to the initiator in the fixed or the descriptor format (SPC-4, 4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sense {
    key: u8,
    /// Additional sense code and its qualifier.
    code: u16,
    /// A logical block, or an offset into the data.
    information: Option<u64>,
    /// The byte of the command that is wrong.
    cdb_byte: Option<u16>,
}

impl Sense {
    const fn new(key: u8, code: u16) -> Self {
        Self { key, code, information: None, cdb_byte: None }
    }

    /// What REQUEST SENSE answers when no unit attention waits.
    pub const NONE: Self = Self::new(key::NO_SENSE, 0);
    /// The command is not in [`super::opcodes`].
    pub const INVALID_OPCODE: Self = Self::new(key::ILLEGAL_REQUEST, 0x2000);
    /// The range goes beyond the end of the unit.
    pub const LBA_OUT_OF_RANGE: Self = Self::new(key::ILLEGAL_REQUEST, 0x2100);
    /// A LUN other than 0.
    pub const UNKNOWN_UNIT: Self = Self::new(key::ILLEGAL_REQUEST, 0x2500);
    /// The data that come with the command are cut within a field.
    pub const PARAMETER_LIST_LENGTH: Self = Self::new(key::ILLEGAL_REQUEST, 0x1a00);
    /// A field of the data that come with the command has a value that it can't have.
    pub const INVALID_PARAMETER: Self = Self::new(key::ILLEGAL_REQUEST, 0x2600);
    /// A release names another scope or kind than the reservation has.
    pub const INVALID_RELEASE: Self = Self::new(key::ILLEGAL_REQUEST, 0x2604);
    /// MODE SENSE asks for saved values.
    pub const NOT_SAVED: Self = Self::new(key::ILLEGAL_REQUEST, 0x3900);
    /// The unit has as many registrations as it takes.
    pub const TOO_MANY_REGISTRATIONS: Self = Self::new(key::ILLEGAL_REQUEST, 0x5504);
    /// The unit is read-only: by SWP, by the volume's lease, or because it is an image.
    pub const WRITE_PROTECTED: Self = Self::new(key::DATA_PROTECT, 0x2700);
    /// The pool is full. An initiator must not try again at once (SBC-3, 4.7.3.6).
    pub const SPACE_ALLOCATION_FAILED: Self = Self::new(key::DATA_PROTECT, 0x2707);
    /// The data can't be read.
    pub const READ_ERROR: Self = Self::new(key::MEDIUM_ERROR, 0x1100);
    /// The data can't be written.
    pub const WRITE_ERROR: Self = Self::new(key::MEDIUM_ERROR, 0x0c00);
    /// A fault of the server.
    pub const TARGET_FAILURE: Self = Self::new(key::HARDWARE_ERROR, 0x4400);
    /// The volume's home, at another host, does not answer.
    pub const NO_ANSWER_IN_TIME: Self = Self::new(key::ABORTED_COMMAND, 0x0801);
    /// A write's data did not come in the negotiated order.
    pub const DATA_PHASE: Self = Self::new(key::ABORTED_COMMAND, 0x4b00);

    /// A unit attention with this additional code and qualifier.
    pub const fn attention(code: u16) -> Self {
        Self::new(key::UNIT_ATTENTION, code)
    }

    /// `byte` is the first wrong byte of the command.
    pub fn invalid_field(byte: usize) -> Self {
        let cdb_byte = u16::try_from(byte).ok();
        Self { cdb_byte, ..Self::new(key::ILLEGAL_REQUEST, 0x2400) }
    }

    /// `offset` is that of the first byte that differs.
    pub fn miscompare(offset: u64) -> Self {
        Self { information: Some(offset), ..Self::new(key::MISCOMPARE, 0x1d00) }
    }

    /// What an error of the volume is for an initiator. What another try may mend is an aborted command.
    pub fn of(error: &IoError, writing: bool) -> Self {
        match error {
            IoError::NoSpace => Self::SPACE_ALLOCATION_FAILED,
            IoError::Fenced { .. } | IoError::Refused(_) | IoError::ReadOnly => {
                Self::WRITE_PROTECTED
            }
            IoError::Invalid(_) => Self::LBA_OUT_OF_RANGE,
            IoError::Unreachable(_) | IoError::Moved => Self::NO_ANSWER_IN_TIME,
            IoError::Poisoned(_) | IoError::Io(_) if writing => Self::WRITE_ERROR,
            IoError::Poisoned(_) | IoError::Io(_) => Self::READ_ERROR,
        }
    }

    /// In the format that the initiator has chosen with D_SENSE.
    pub fn encode(&self, descriptors: bool) -> Vec<u8> {
        if descriptors { self.as_descriptors() } else { self.fixed() }
    }

    fn fixed(&self) -> Vec<u8> {
        let mut bytes = vec![0; 18];
        bytes[0] = 0x70;
        bytes[2] = self.key;
        bytes[7] = 10;
        bytes[12..14].copy_from_slice(&self.code.to_be_bytes());
        if let Some(information) = self.information.and_then(|i| u32::try_from(i).ok()) {
            bytes[0] |= 0x80;
            bytes[3..7].copy_from_slice(&information.to_be_bytes());
        }
        if let Some(byte) = self.cdb_byte {
            bytes[15] = 0xc0;
            bytes[16..18].copy_from_slice(&byte.to_be_bytes());
        }
        bytes
    }

    fn as_descriptors(&self) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        bytes[0] = 0x72;
        bytes[1] = self.key;
        bytes[2..4].copy_from_slice(&self.code.to_be_bytes());
        if let Some(information) = self.information {
            bytes.extend([0x00, 0x0a, 0x80, 0x00]);
            bytes.extend(information.to_be_bytes());
        }
        if let Some(byte) = self.cdb_byte {
            bytes.extend([0x02, 0x06, 0, 0, 0xc0]);
            bytes.extend(byte.to_be_bytes());
            bytes.push(0);
        }
        bytes[7] = u8::try_from(bytes.len() - 8).expect("two short descriptors");
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_sense_says_key_code_and_field() {
        let bytes = Sense::invalid_field(3).encode(false);
        assert_eq!((bytes[0], bytes[2], bytes[12], bytes[13]), (0x70, 5, 0x24, 0));
        assert_eq!(bytes[15..18], [0xc0, 0, 3]);
        let bytes = Sense::miscompare(0x1234).encode(false);
        assert_eq!((bytes[0], bytes[2]), (0xf0, 0xe));
        assert_eq!(bytes[3..7], [0, 0, 0x12, 0x34]);
    }

    #[test]
    fn descriptors_say_the_same() {
        let bytes = Sense::miscompare(7).encode(true);
        assert_eq!(bytes[..4], [0x72, 0xe, 0x1d, 0]);
        assert_eq!(usize::from(bytes[7]), bytes.len() - 8);
        assert_eq!(bytes[8..12], [0, 0x0a, 0x80, 0]);
        let bytes = Sense::invalid_field(2).encode(true);
        assert_eq!(bytes[8..], [0x02, 0x06, 0, 0, 0xc0, 0, 2, 0]);
    }

    #[test]
    fn a_full_pool_is_a_failed_space_allocation() {
        assert_eq!(Sense::of(&IoError::NoSpace, true).code, 0x2707);
    }
}
