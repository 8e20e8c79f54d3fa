//! Reads the bytes of a command descriptor block (CDB) and checks them.

use perigee_block::device::is_within;

use super::super::opcodes::{self, op};
use super::super::reservations::PERSISTENT_OUT_BYTES;
use super::super::sense::Sense;
use super::super::{BLOCK_BYTES, PHYSICAL_EXPONENT, TRANSFER_BLOCKS_MAX, WRITE_SAME_BLOCKS_MAX};
use super::{Command, Compare, ModeSense, Range, ReportOpcodes};

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
        // A page code without the EVPD bit.
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

    /// The first block and the number of blocks. Their position depends on the command's length.
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

    /// The range of a command that transfers blocks.
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

#[cfg(test)]
mod tests;
