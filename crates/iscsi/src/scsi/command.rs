//! Parses a command, or returns why it is refused (SBC-3, SPC-4). These are pure functions.

use perigee_block::device::is_within;

use super::opcodes::{self, op};
use super::reservations::PERSISTENT_OUT_BYTES;
use super::sense::Sense;
use super::{BLOCK_BYTES, PHYSICAL_EXPONENT, TRANSFER_BLOCKS_MAX, WRITE_SAME_BLOCKS_MAX};

/// Bytes of the volume, within its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub offset: u64,
    pub length_bytes: u64,
}

impl Range {
    /// Of a range that is transferred.
    pub fn transfer_bytes(self) -> usize {
        usize::try_from(self.length_bytes).expect("a transfer's length was bounded")
    }
}

/// The data with which VERIFY compares the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// None: the blocks must only be readable.
    Nothing,
    /// The same number of blocks from the initiator.
    Each,
    /// One block from the initiator, for all blocks.
    One,
}

/// A valid command, whose range is within the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Read {
        range: Range,
        fua: bool,
    },
    Write {
        range: Range,
        fua: bool,
    },
    WriteVerify {
        range: Range,
        compare: bool,
    },
    Verify {
        range: Range,
        compare: Compare,
    },
    /// With `data` the initiator sends the block; otherwise zeros are written.
    WriteSame {
        range: Range,
        unmap: bool,
        data: bool,
    },
    CompareAndWrite {
        range: Range,
        fua: bool,
    },
    OrWrite {
        range: Range,
        fua: bool,
    },
    Unmap {
        list_bytes: u16,
    },
    SynchronizeCache,
    Prefetch {
        range: Range,
        immediate: bool,
    },
    LbaStatus {
        offset: u64,
        allocated_bytes: u32,
    },
    TestUnitReady,
    StartStop {
        flush: bool,
    },
    PreventAllow,
    RequestSense {
        descriptors: bool,
        allocated_bytes: u8,
    },
    Inquiry {
        page: Option<u8>,
        allocated_bytes: u16,
    },
    ReadCapacity10,
    ReadCapacity16 {
        allocated_bytes: u32,
    },
    ReadDefects {
        long: bool,
        lists: u8,
        allocated_bytes: u32,
    },
    ReportLuns {
        select: u8,
        allocated_bytes: u32,
    },
    ReportOpcodes(ReportOpcodes),
    ReportTaskManagement {
        extended: bool,
        allocated_bytes: u32,
    },
    ModeSense(ModeSense),
    ModeSelect {
        long: bool,
        list_bytes: u16,
    },
    Reserve,
    Release,
    PersistentIn {
        action: u8,
        allocated_bytes: u16,
    },
    PersistentOut {
        action: u8,
        scope_type: u8,
        list_bytes: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportOpcodes {
    pub timeouts: bool,
    pub options: u8,
    pub opcode: u8,
    pub service_action: u16,
    pub allocated_bytes: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModeSense {
    /// The ten-byte form.
    pub long: bool,
    pub block_descriptor: bool,
    pub control: u8,
    pub page: u8,
    pub subpage: u8,
    pub allocated_bytes: u16,
}

/// Parses a command. `blocks` is the volume's current size.
///
/// # Errors
/// The sense data to answer with.
pub fn parse(cdb: &[u8; 16], blocks: u64) -> Result<Command, Sense> {
    let entries = opcodes::of(cdb[0]);
    let entry = match entries {
        [] => return Err(Sense::INVALID_OPCODE),
        [only] if only.service_action.is_none() => only,
        _ => {
            let wanted = Some(opcodes::service_action(cdb));
            let found = entries.iter().find(|entry| entry.service_action == wanted);
            found.ok_or_else(|| Sense::invalid_field(1))?
        }
    };
    let meaningless =
        entry.usage.iter().zip(cdb).skip(1).position(|(usage, byte)| byte & !usage != 0);
    if let Some(at) = meaningless {
        return Err(Sense::invalid_field(at + 1));
    }
    let bytes = Bytes { cdb, blocks };
    match bytes.medium()? {
        Some(command) => Ok(command),
        // A page without EVPD.
        None if cdb[0] == op::INQUIRY && cdb[1] == 0 && cdb[2] != 0 => Err(Sense::invalid_field(2)),
        None if cdb[0] == op::PERSISTENT_RESERVE_OUT && bytes.u32(5) != PERSISTENT_OUT_BYTES => {
            Err(Sense::PARAMETER_LIST_LENGTH)
        }
        None => bytes.other(),
    }
}

struct Bytes<'a> {
    cdb: &'a [u8; 16],
    blocks: u64,
}

impl Bytes<'_> {
    fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.cdb[at], self.cdb[at + 1]])
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes([self.cdb[at], self.cdb[at + 1], self.cdb[at + 2], self.cdb[at + 3]])
    }

    fn has(&self, byte: usize, bit: u8) -> bool {
        self.cdb[byte] & bit != 0
    }

    /// The first block and the number of blocks of a command, whose position depends on the command's length.
    fn extent(&self) -> (u64, u64) {
        match self.cdb[0] >> 5 {
            0 => {
                let first = u32::from_be_bytes([0, self.cdb[1] & 0x1f, self.cdb[2], self.cdb[3]]);
                // In the six-byte form 0 means 256 blocks.
                let count = if self.cdb[4] == 0 { 256 } else { self.cdb[4].into() };
                (first.into(), count)
            }
            4 => {
                let first = u64::from(self.u32(2)) << 32 | u64::from(self.u32(6));
                (first, self.u32(10).into())
            }
            5 => (self.u32(2).into(), self.u32(6).into()),
            _ => (self.u32(2).into(), self.u16(7).into()),
        }
    }

    fn range_of(&self, first: u64, count: u64) -> Result<Range, Sense> {
        if !is_within(self.blocks, first, count) {
            return Err(Sense::LBA_OUT_OF_RANGE);
        }
        Ok(Range { offset: first * BLOCK_BYTES, length_bytes: count * BLOCK_BYTES })
    }

    fn range(&self) -> Result<Range, Sense> {
        let (first, count) = self.extent();
        self.range_of(first, count)
    }

    /// Of blocks that are transferred.
    fn transfer(&self) -> Result<Range, Sense> {
        let range = self.range()?;
        if range.length_bytes > TRANSFER_BLOCKS_MAX * BLOCK_BYTES {
            let at = match self.cdb[0] >> 5 {
                4 => 10,
                5 => 6,
                _ => 7,
            };
            return Err(Sense::invalid_field(at));
        }
        Ok(range)
    }

    /// Commands about blocks. `None`: it is another kind of command.
    fn medium(&self) -> Result<Option<Command>, Sense> {
        let fua = self.has(1, 0x08);
        let command = match self.cdb[0] {
            op::READ_6 => Command::Read { range: self.transfer()?, fua: false },
            op::READ_10 | op::READ_12 | op::READ_16 => {
                Command::Read { range: self.transfer()?, fua }
            }
            op::WRITE_6 => Command::Write { range: self.transfer()?, fua: false },
            op::WRITE_10 | op::WRITE_12 | op::WRITE_16 => {
                Command::Write { range: self.transfer()?, fua }
            }
            op::WRITE_VERIFY_10 | op::WRITE_VERIFY_12 | op::WRITE_VERIFY_16 => {
                Command::WriteVerify { range: self.transfer()?, compare: self.has(1, 0x02) }
            }
            op::VERIFY_10 | op::VERIFY_12 | op::VERIFY_16 => {
                let compare = match self.cdb[1] >> 1 & 3 {
                    0 => Compare::Nothing,
                    1 => Compare::Each,
                    3 => Compare::One,
                    _ => return Err(Sense::invalid_field(1)),
                };
                Command::Verify { range: self.transfer()?, compare }
            }
            op::WRITE_SAME_10 | op::WRITE_SAME_16 => self.write_same()?,
            op::COMPARE_AND_WRITE => {
                let (first, _) = self.extent();
                let range = self.range_of(first, self.cdb[13].into())?;
                Command::CompareAndWrite { range, fua }
            }
            op::ORWRITE => Command::OrWrite { range: self.transfer()?, fua },
            op::SYNCHRONIZE_CACHE_10 | op::SYNCHRONIZE_CACHE_16 => {
                self.range()?;
                Command::SynchronizeCache
            }
            op::PREFETCH_10 | op::PREFETCH_16 => {
                Command::Prefetch { range: self.to_end()?, immediate: self.has(1, 0x02) }
            }
            op::SERVICE_ACTION_IN_16
                if opcodes::service_action(self.cdb) == op::action::GET_LBA_STATUS =>
            {
                let (first, _) = self.extent();
                self.range_of(first, 1)?;
                let offset = self.physical_block(first) * BLOCK_BYTES;
                Command::LbaStatus { offset, allocated_bytes: self.u32(10) }
            }
            _ => return Ok(None),
        };
        Ok(Some(command))
    }

    /// The status is kept for physical blocks. A request that begins in the middle of one is answered from the
    /// next one on, if there is one. (libiscsi's conformance test requires this, and QEMU only asks for whole
    /// physical blocks.)
    fn physical_block(&self, first: u64) -> u64 {
        let next = first.next_multiple_of(1 << PHYSICAL_EXPONENT);
        if next < self.blocks { next } else { first }
    }

    /// The range of a command for which 0 blocks mean all blocks to the end.
    fn to_end(&self) -> Result<Range, Sense> {
        match self.extent() {
            (first, 0) if first <= self.blocks => self.range_of(first, self.blocks - first),
            _ => self.range(),
        }
    }

    fn write_same(&self) -> Result<Command, Sense> {
        let (first, count) = self.extent();
        let count_at = if self.cdb[0] == op::WRITE_SAME_10 { 7 } else { 10 };
        let range = self.range_of(first, count)?;
        // WSNZ is set: 0 blocks do not mean all blocks here.
        if count == 0 || count > WRITE_SAME_BLOCKS_MAX {
            return Err(Sense::invalid_field(count_at));
        }
        let data = self.cdb[0] == op::WRITE_SAME_10 || !self.has(1, 0x01);
        Ok(Command::WriteSame { range, unmap: self.has(1, 0x08), data })
    }

    /// Commands about the unit. A command that is in the table but not here is refused.
    fn other(&self) -> Result<Command, Sense> {
        let command = match self.cdb[0] {
            op::TEST_UNIT_READY => Command::TestUnitReady,
            op::UNMAP => Command::Unmap { list_bytes: self.u16(7) },
            op::REQUEST_SENSE => Command::RequestSense {
                descriptors: self.has(1, 0x01),
                allocated_bytes: self.cdb[4],
            },
            op::START_STOP_UNIT => Command::StartStop { flush: !self.has(4, 0x04) },
            op::PREVENT_ALLOW => Command::PreventAllow,
            op::READ_CAPACITY_10 => Command::ReadCapacity10,
            op::READ_DEFECT_DATA_10 => Command::ReadDefects {
                long: false,
                lists: self.cdb[2],
                allocated_bytes: self.u16(7).into(),
            },
            op::READ_DEFECT_DATA_12 => Command::ReadDefects {
                long: true,
                lists: self.cdb[1],
                allocated_bytes: self.u32(6),
            },
            op::REPORT_LUNS => {
                Command::ReportLuns { select: self.cdb[2], allocated_bytes: self.u32(6) }
            }
            op::SERVICE_ACTION_IN_16 => Command::ReadCapacity16 { allocated_bytes: self.u32(10) },
            op::MAINTENANCE_IN => self.maintenance_in()?,
            op::INQUIRY | op::MODE_SENSE_6 | op::MODE_SENSE_10 => self.described(),
            op::MODE_SELECT_6 => {
                Command::ModeSelect { long: false, list_bytes: self.cdb[4].into() }
            }
            op::MODE_SELECT_10 => Command::ModeSelect { long: true, list_bytes: self.u16(7) },
            op::RESERVE_6 => Command::Reserve,
            op::RELEASE_6 => Command::Release,
            op::PERSISTENT_RESERVE_IN => {
                Command::PersistentIn { action: self.cdb[1], allocated_bytes: self.u16(7) }
            }
            op::PERSISTENT_RESERVE_OUT => Command::PersistentOut {
                action: self.cdb[1],
                scope_type: self.cdb[2],
                list_bytes: self.u32(5),
            },
            _ => return Err(Sense::INVALID_OPCODE),
        };
        Ok(command)
    }

    fn maintenance_in(&self) -> Result<Command, Sense> {
        let allocated_bytes = self.u32(6);
        match opcodes::service_action(self.cdb) {
            op::action::REPORT_SUPPORTED_OPCODES => Ok(Command::ReportOpcodes(ReportOpcodes {
                timeouts: self.has(2, 0x80),
                options: self.cdb[2] & 0x07,
                opcode: self.cdb[3],
                service_action: self.u16(4),
                allocated_bytes,
            })),
            op::action::REPORT_SUPPORTED_TASK_MANAGEMENT => {
                Ok(Command::ReportTaskManagement { extended: self.has(2, 0x80), allocated_bytes })
            }
            _ => Err(Sense::INVALID_OPCODE),
        }
    }

    fn described(&self) -> Command {
        if self.cdb[0] == op::INQUIRY {
            let page = self.has(1, 0x01).then_some(self.cdb[2]);
            return Command::Inquiry { page, allocated_bytes: self.u16(3) };
        }
        let long = self.cdb[0] == op::MODE_SENSE_10;
        Command::ModeSense(ModeSense {
            long,
            block_descriptor: !self.has(1, 0x08),
            control: self.cdb[2] >> 6,
            page: self.cdb[2] & 0x3f,
            subpage: self.cdb[3],
            allocated_bytes: if long { self.u16(7) } else { self.cdb[4].into() },
        })
    }
}

impl Command {
    /// Bytes that the initiator sends with it.
    pub fn data_out_bytes(&self) -> usize {
        match *self {
            Self::Write { range, .. }
            | Self::WriteVerify { range, .. }
            | Self::OrWrite { range, .. }
            | Self::Verify { range, compare: Compare::Each } => range.transfer_bytes(),
            Self::CompareAndWrite { range, .. } => range.transfer_bytes() * 2,
            Self::Verify { range, compare: Compare::One } if range.length_bytes > 0 => 512,
            Self::WriteSame { data: true, .. } => 512,
            Self::Unmap { list_bytes } | Self::ModeSelect { list_bytes, .. } => list_bytes.into(),
            Self::PersistentOut { list_bytes, .. } => list_bytes as usize,
            _ => 0,
        }
    }

    /// Whether it changes the volume's bytes.
    pub fn writes(&self) -> bool {
        matches!(
            self,
            Self::Write { .. }
                | Self::WriteVerify { .. }
                | Self::WriteSame { .. }
                | Self::CompareAndWrite { .. }
                | Self::OrWrite { .. }
                | Self::Unmap { .. }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: u64 = 1 << 20;

    fn cdb(bytes: &[u8]) -> [u8; 16] {
        let mut cdb = [0; 16];
        cdb[..bytes.len()].copy_from_slice(bytes);
        cdb
    }

    fn parsed(bytes: &[u8]) -> Result<Command, Sense> {
        parse(&cdb(bytes), BLOCKS)
    }

    fn read(first: u64, count: u64) -> Result<Command, Sense> {
        let range = Range { offset: first * 512, length_bytes: count * 512 };
        Ok(Command::Read { range, fua: false })
    }

    #[test]
    fn each_length_of_a_read_has_its_blocks_elsewhere() {
        assert_eq!(parsed(&[0x08, 0x01, 0x02, 0x03, 4, 0]), read(0x1_0203, 4));
        assert_eq!(parsed(&[0x08, 0, 0, 0, 0, 0]), read(0, 256));
        assert_eq!(parsed(&[0x28, 0, 0, 1, 2, 3, 0, 0, 9, 0]), read(0x1_0203, 9));
        assert_eq!(parsed(&[0xa8, 0, 0, 1, 2, 3, 0, 0, 0, 9, 0, 0]), read(0x1_0203, 9));
        assert_eq!(parsed(&[0x88, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 9, 0, 0]), read(0x1_0203, 9));
    }

    #[test]
    fn blocks_beyond_the_end_are_out_of_range() {
        assert_eq!(parsed(&[0x28, 0, 0, 0x0f, F, F, 0, 0, 1, 0]), read(BLOCKS - 1, 1));
        assert_eq!(parsed(&[0x28, 0, 0, 0x0f, F, F, 0, 0, 2, 0]), Err(Sense::LBA_OUT_OF_RANGE));
        assert_eq!(parsed(&[0x28, 0, 0, 0x10, 0, 1, 0, 0, 0, 0]), Err(Sense::LBA_OUT_OF_RANGE));
        let last = [0x88, 0, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0];
        assert_eq!(parsed(&last), Err(Sense::LBA_OUT_OF_RANGE));
    }

    #[test]
    fn bits_that_mean_nothing_are_refused() {
        // RDPROTECT: there is no protection information.
        assert_eq!(parsed(&[0x28, 0x20, 0, 0, 0, 0, 0, 0, 1, 0]), Err(Sense::invalid_field(1)));
        assert_eq!(parsed(&[0x00, 0, 0, 0, 0, 0x04]), Err(Sense::invalid_field(5)));
        assert_eq!(parsed(&[0x5e, 0x09]), Err(Sense::invalid_field(1)));
        assert_eq!(parsed(&[0xff]), Err(Sense::INVALID_OPCODE));
    }

    #[test]
    fn a_command_without_an_arm_is_refused() {
        let unknown = cdb(&[0x01]);
        let bytes = Bytes { cdb: &unknown, blocks: BLOCKS };
        assert_eq!(bytes.other(), Err(Sense::INVALID_OPCODE));
        for entry in &opcodes::OPCODES {
            let mut known = cdb(&[entry.opcode]);
            known[1] = u8::try_from(entry.service_action.unwrap_or(0)).expect("five bits");
            assert_ne!(parse(&known, BLOCKS), Err(Sense::INVALID_OPCODE), "{entry:02x?}");
        }
    }

    #[test]
    fn a_transfer_longer_than_the_unit_says_is_refused() {
        let long = [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0];
        assert_eq!(parsed(&long), Err(Sense::invalid_field(10)));
    }

    #[test]
    fn a_list_that_is_not_as_long_as_it_has_to_be_is_not_asked_for() {
        let out = |length: u8| parsed(&[0x5f, 0, 0, 0, 0, length, 0, 0, 24, 0]);
        assert_eq!(out(F), Err(Sense::PARAMETER_LIST_LENGTH));
        assert_eq!(out(0).expect("a command").data_out_bytes(), 24);
    }

    #[test]
    fn one_command_reads_as_much_as_firmware_asks_for() {
        assert_eq!(parsed(&[0x28, 0, 0, 0, 0, 0, 0, F, F, 0]), read(0, 0xffff));
    }

    #[test]
    fn what_an_initiator_sends_is_told_by_the_command() {
        let bytes = |cdb: &[u8]| parsed(cdb).expect("a command").data_out_bytes();
        assert_eq!(bytes(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0]), 4096);
        assert_eq!(bytes(&[0x2f, 0x02, 0, 0, 0, 0, 0, 0, 8, 0]), 4096);
        assert_eq!(bytes(&[0x2f, 0x06, 0, 0, 0, 0, 0, 0, 8, 0]), 512);
        assert_eq!(bytes(&[0x2f, 0, 0, 0, 0, 0, 0, 0, 8, 0]), 0);
        assert_eq!(bytes(&[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0]), 2048);
        assert_eq!(bytes(&[0x93, 0x09, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0]), 0);
        assert_eq!(bytes(&[0x41, 0, 0, 0, 0, 0, 0, 0, 2, 0]), 512);
    }

    const F: u8 = 0xff;
}
