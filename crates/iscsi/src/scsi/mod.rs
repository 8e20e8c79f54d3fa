//! The SCSI of a volume: a direct-access block device (SBC-3, SPC-4) of 512-byte logical and 4096-byte
//! physical blocks, thinly provisioned.
//!
//! | question | module |
//! |---|---|
//! | which commands are there | `opcodes` |
//! | what does a command ask for | `command` |
//! | what does the unit say of itself | `inquiry`, `mode`, `report` |
//! | who may use it now | `reservations` |
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
/// As two to the power of this: logical blocks in a physical one.
pub const PHYSICAL_EXPONENT: u8 = 3;
/// The longest transfer of one command, 32 MiB: READ (10) can't ask for more. iPXE reads a kernel for
/// UEFI firmware with one command, whatever limit it is told of.
pub const TRANSFER_BLOCKS_MAX: u64 = 32 << 11;
/// The longest WRITE SAME. Initiators expect that they can write as much with one WRITE.
pub const WRITE_SAME_BLOCKS_MAX: u64 = TRANSFER_BLOCKS_MAX;
/// As many ranges one UNMAP takes.
pub const UNMAP_RANGES_MAX: u16 = 256;

pub mod status {
    pub const GOOD: u8 = 0x00;
    pub const CHECK_CONDITION: u8 = 0x02;
    pub const RESERVATION_CONFLICT: u8 = 0x18;
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// With the data to send, as many as were allocated for them.
    Good(Bytes),
    Check(Sense),
    Conflict,
}

impl Outcome {
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
