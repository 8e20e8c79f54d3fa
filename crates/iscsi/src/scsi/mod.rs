//! The SCSI of a volume: a direct-access block device (SBC-3, SPC-4) of 512-byte logical and 4096-byte
//! physical blocks, thinly provisioned.
//!
//! | question | module |
//! |---|---|
//! | which commands are supported | `opcodes` |
//! | how are commands parsed | `command` |
//! | which properties does the unit report | `inquiry`, `mode`, `report` |
//! | which initiators may use it now | `reservations` |
//! | how does a command fail | `sense` |

pub mod command;
pub mod inquiry;
pub mod mode;
pub mod opcodes;
pub mod report;
pub mod reservations;
pub mod sense;

use bytes::Bytes;

use sense::Sense;

/// A logical block.
pub const BLOCK_BYTES: u64 = 512;
/// A physical block has two to the power of this logical blocks.
pub const PHYSICAL_EXPONENT: u8 = 3;
/// The longest transfer of one command, 32 MiB, which is the limit of READ (10). iPXE reads a kernel for UEFI
/// firmware with one command and ignores smaller limits.
pub const TRANSFER_BLOCKS_MAX: u64 = 32 << 11;
/// The longest WRITE SAME. Initiators expect that they can write as much with one WRITE.
pub const WRITE_SAME_BLOCKS_MAX: u64 = TRANSFER_BLOCKS_MAX;
/// The most ranges of one UNMAP.
pub const UNMAP_RANGES_MAX: u16 = 256;

pub mod status {
    /// The command is done.
    pub const GOOD: u8 = 0x00;
    /// The command failed; the sense data say why.
    pub const CHECK_CONDITION: u8 = 0x02;
    /// Another initiator holds a reservation that forbids the command.
    pub const RESERVATION_CONFLICT: u8 = 0x18;
}

/// The outcome of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Success, with the data to send, cut to the allocated length.
    Good(Bytes),
    Check(Sense),
    Conflict,
}

impl Outcome {
    /// Success without data.
    pub const DONE: Self = Self::Good(Bytes::new());

    /// An answer, cut to what the initiator has allocated.
    pub fn answer(mut data: Vec<u8>, allocated_bytes: impl TryInto<usize>) -> Self {
        data.truncate(allocated_bytes.try_into().unwrap_or(usize::MAX));
        Self::Good(data.into())
    }
}

impl From<Sense> for Outcome {
    fn from(sense: Sense) -> Self {
        Self::Check(sense)
    }
}
