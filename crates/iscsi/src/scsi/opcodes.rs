//! The supported commands, and the bits of them that have a meaning. One table decides which commands are
//! refused, and what REPORT SUPPORTED OPERATION CODES reports.

/// One command, or one service action of a command.
#[derive(Debug)]
pub struct Opcode {
    pub opcode: u8,
    pub service_action: Option<u16>,
    /// The bits that have a meaning, as long as the command. The first byte is the opcode, and the service
    /// action is at its position.
    pub usage: &'static [u8],
}

const fn plain(usage: &'static [u8]) -> Opcode {
    Opcode { opcode: usage[0], service_action: None, usage }
}

const fn action(service_action: u16, usage: &'static [u8]) -> Opcode {
    Opcode { opcode: usage[0], service_action: Some(service_action), usage }
}

const F: u8 = 0xff;

pub mod op {
    /// Fails only with what else has to be told: a unit attention.
    pub const TEST_UNIT_READY: u8 = 0x00;
    /// The unit attention that waits, or none.
    pub const REQUEST_SENSE: u8 = 0x03;
    /// Reads with 21 bits of address, at most 256 blocks.
    pub const READ_6: u8 = 0x08;
    /// Writes with 21 bits of address, at most 256 blocks.
    pub const WRITE_6: u8 = 0x0a;
    /// What the unit is, and its pages of vital product data (SPC-4, 6.6 and 7.8).
    pub const INQUIRY: u8 = 0x12;
    /// Changes [`super::super::mode::Settings`].
    pub const MODE_SELECT_6: u8 = 0x15;
    /// The old reservation, which ends with the session.
    pub const RESERVE_6: u8 = 0x16;
    /// Gives the old reservation up.
    pub const RELEASE_6: u8 = 0x17;
    /// Shows the pages of settings (SPC-4, 7.5).
    pub const MODE_SENSE_6: u8 = 0x1a;
    /// Flushes if the unit is to stop, and the unit goes on all the same.
    pub const START_STOP_UNIT: u8 = 0x1b;
    /// Taken and without effect, as there is no medium to remove.
    pub const PREVENT_ALLOW: u8 = 0x1e;
    /// The last block in 32 bits; all ones for more, which READ CAPACITY (16) tells.
    pub const READ_CAPACITY_10: u8 = 0x25;
    /// Reads with 32 bits of address, at most 65,535 blocks.
    pub const READ_10: u8 = 0x28;
    /// Writes with 32 bits of address, at most 65,535 blocks.
    pub const WRITE_10: u8 = 0x2a;
    /// Writes durably, and on request compares what stands there then.
    pub const WRITE_VERIFY_10: u8 = 0x2e;
    /// Reads, and compares with the initiator's data if it sends any.
    pub const VERIFY_10: u8 = 0x2f;
    /// Reads ahead, at most 64 MiB of the range.
    pub const PREFETCH_10: u8 = 0x34;
    /// Makes all that was written before durable, also outside of its range.
    pub const SYNCHRONIZE_CACHE_10: u8 = 0x35;
    /// An empty list.
    pub const READ_DEFECT_DATA_10: u8 = 0x37;
    /// Writes one block again and again, or unmaps the range.
    pub const WRITE_SAME_10: u8 = 0x41;
    /// Gives the space of ranges back; they read as zeros then (SBC-3, 5.28).
    pub const UNMAP: u8 = 0x42;
    /// As [`MODE_SELECT_6`], with longer lengths.
    pub const MODE_SELECT_10: u8 = 0x55;
    /// As [`MODE_SENSE_6`], with longer lengths.
    pub const MODE_SENSE_10: u8 = 0x5a;
    /// Reads registrations and reservations (SPC-4, 6.15).
    pub const PERSISTENT_RESERVE_IN: u8 = 0x5e;
    /// Changes registrations and reservations (SPC-4, 6.16).
    pub const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
    /// Reads with 64 bits of address.
    pub const READ_16: u8 = 0x88;
    /// Writes if what stands there is what the initiator expects, in one step (SBC-3, 5.2).
    pub const COMPARE_AND_WRITE: u8 = 0x89;
    /// Writes with 64 bits of address.
    pub const WRITE_16: u8 = 0x8a;
    /// Writes the bits that are set there or in the initiator's data, in one step.
    pub const ORWRITE: u8 = 0x8b;
    /// As [`WRITE_VERIFY_10`], with 64 bits of address.
    pub const WRITE_VERIFY_16: u8 = 0x8e;
    /// As [`VERIFY_10`], with 64 bits of address.
    pub const VERIFY_16: u8 = 0x8f;
    /// As [`PREFETCH_10`], with 64 bits of address.
    pub const PREFETCH_16: u8 = 0x90;
    /// As [`SYNCHRONIZE_CACHE_10`], with 64 bits of address.
    pub const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    /// As [`WRITE_SAME_10`], with 64 bits of address.
    pub const WRITE_SAME_16: u8 = 0x93;
    /// READ CAPACITY (16) and GET LBA STATUS, by [`action`].
    pub const SERVICE_ACTION_IN_16: u8 = 0x9e;
    /// The units of the target: LUN 0 alone.
    pub const REPORT_LUNS: u8 = 0xa0;
    /// What is supported, by [`action`].
    pub const MAINTENANCE_IN: u8 = 0xa3;
    /// Reads with 32 bits of address, and 32 bits of length.
    pub const READ_12: u8 = 0xa8;
    /// Writes with 32 bits of address, and 32 bits of length.
    pub const WRITE_12: u8 = 0xaa;
    /// As [`WRITE_VERIFY_10`], with 32 bits of length.
    pub const WRITE_VERIFY_12: u8 = 0xae;
    /// As [`VERIFY_10`], with 32 bits of length.
    pub const VERIFY_12: u8 = 0xaf;
    /// An empty list.
    pub const READ_DEFECT_DATA_12: u8 = 0xb7;

    pub mod action {
        /// Of SERVICE ACTION IN (16): size, block length, and what unmapped blocks read as (SBC-3, 5.16).
        pub const READ_CAPACITY_16: u16 = 0x10;
        /// Of SERVICE ACTION IN (16): which ranges are mapped (SBC-3, 5.6).
        pub const GET_LBA_STATUS: u16 = 0x12;
        /// Of MAINTENANCE IN (SPC-4, 6.35).
        pub const REPORT_SUPPORTED_OPCODES: u16 = 0x0c;
        /// Of MAINTENANCE IN (SPC-4, 6.36).
        pub const REPORT_SUPPORTED_TASK_MANAGEMENT: u16 = 0x0d;
    }
}

/// In the order of the opcodes; a command's service actions are side by side.
#[rustfmt::skip]
pub const OPCODES: [Opcode; 53] = [
    plain(&[op::TEST_UNIT_READY, 0, 0, 0, 0, 0]),
    plain(&[op::REQUEST_SENSE, 1, 0, 0, F, 0]),
    plain(&[op::READ_6, 0x1f, F, F, F, 0]),
    plain(&[op::WRITE_6, 0x1f, F, F, F, 0]),
    plain(&[op::INQUIRY, 1, F, F, F, 0]),
    plain(&[op::MODE_SELECT_6, 0x11, 0, 0, F, 0]),
    plain(&[op::RESERVE_6, 0, 0, 0, 0, 0]),
    plain(&[op::RELEASE_6, 0, 0, 0, 0, 0]),
    plain(&[op::MODE_SENSE_6, 0x08, F, F, F, 0]),
    plain(&[op::START_STOP_UNIT, 1, 0, 0x0f, 0xf7, 0]),
    plain(&[op::PREVENT_ALLOW, 0, 0, 0, 3, 0]),
    plain(&[op::READ_CAPACITY_10, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    plain(&[op::READ_10, 0x18, F, F, F, F, 0x3f, F, F, 0]),
    plain(&[op::WRITE_10, 0x18, F, F, F, F, 0x3f, F, F, 0]),
    plain(&[op::WRITE_VERIFY_10, 0x12, F, F, F, F, 0x3f, F, F, 0]),
    plain(&[op::VERIFY_10, 0x16, F, F, F, F, 0x3f, F, F, 0]),
    plain(&[op::PREFETCH_10, 0x02, F, F, F, F, 0x3f, F, F, 0]),
    plain(&[op::SYNCHRONIZE_CACHE_10, 0x06, F, F, F, F, 0x3f, F, F, 0]),
    plain(&[op::READ_DEFECT_DATA_10, 0, 0x1f, 0, 0, 0, 0, F, F, 0]),
    plain(&[op::WRITE_SAME_10, 0x08, F, F, F, F, 0x3f, F, F, 0]),
    plain(&[op::UNMAP, 0, 0, 0, 0, 0, 0x3f, F, F, 0]),
    plain(&[op::MODE_SELECT_10, 0x11, 0, 0, 0, 0, 0, F, F, 0]),
    plain(&[op::MODE_SENSE_10, 0x18, F, F, 0, 0, 0, F, F, 0]),
    action(0, &[op::PERSISTENT_RESERVE_IN, 0, 0, 0, 0, 0, 0, F, F, 0]),
    action(1, &[op::PERSISTENT_RESERVE_IN, 1, 0, 0, 0, 0, 0, F, F, 0]),
    action(2, &[op::PERSISTENT_RESERVE_IN, 2, 0, 0, 0, 0, 0, F, F, 0]),
    action(3, &[op::PERSISTENT_RESERVE_IN, 3, 0, 0, 0, 0, 0, F, F, 0]),
    action(0, &[op::PERSISTENT_RESERVE_OUT, 0, F, 0, 0, F, F, F, F, 0]),
    action(1, &[op::PERSISTENT_RESERVE_OUT, 1, F, 0, 0, F, F, F, F, 0]),
    action(2, &[op::PERSISTENT_RESERVE_OUT, 2, F, 0, 0, F, F, F, F, 0]),
    action(3, &[op::PERSISTENT_RESERVE_OUT, 3, F, 0, 0, F, F, F, F, 0]),
    action(4, &[op::PERSISTENT_RESERVE_OUT, 4, F, 0, 0, F, F, F, F, 0]),
    action(5, &[op::PERSISTENT_RESERVE_OUT, 5, F, 0, 0, F, F, F, F, 0]),
    action(6, &[op::PERSISTENT_RESERVE_OUT, 6, F, 0, 0, F, F, F, F, 0]),
    plain(&[op::READ_16, 0x18, F, F, F, F, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::COMPARE_AND_WRITE, 0x18, F, F, F, F, F, F, F, F, 0, 0, 0, F, 0x3f, 0]),
    plain(&[op::WRITE_16, 0x18, F, F, F, F, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::ORWRITE, 0x18, F, F, F, F, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::WRITE_VERIFY_16, 0x12, F, F, F, F, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::VERIFY_16, 0x16, F, F, F, F, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::PREFETCH_16, 0x02, F, F, F, F, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::SYNCHRONIZE_CACHE_16, 0x06, F, F, F, F, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::WRITE_SAME_16, 0x09, F, F, F, F, F, F, F, F, F, F, F, F, 0x3f, 0]),
    action(op::action::READ_CAPACITY_16, &[op::SERVICE_ACTION_IN_16, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    action(op::action::GET_LBA_STATUS, &[op::SERVICE_ACTION_IN_16, 0x12, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[op::REPORT_LUNS, 0, F, 0, 0, 0, F, F, F, F, 0, 0]),
    action(op::action::REPORT_SUPPORTED_OPCODES, &[op::MAINTENANCE_IN, 0x0c, 0x87, F, F, F, F, F, F, F, 0, 0]),
    action(op::action::REPORT_SUPPORTED_TASK_MANAGEMENT, &[op::MAINTENANCE_IN, 0x0d, 0x80, 0, 0, 0, F, F, F, F, 0, 0]),
    plain(&[op::READ_12, 0x18, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::WRITE_12, 0x18, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::WRITE_VERIFY_12, 0x12, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::VERIFY_12, 0x16, F, F, F, F, F, F, F, F, 0x3f, 0]),
    plain(&[op::READ_DEFECT_DATA_12, 0x1f, 0, 0, 0, 0, F, F, F, F, 0, 0]),
];

/// The index of each opcode's first entry, plus one.
const FIRST: [u8; 256] = {
    let mut first = [0; 256];
    let mut at = OPCODES.len();
    while at > 0 {
        // There are far fewer than 255 entries.
        first[OPCODES[at - 1].opcode as usize] = at.to_le_bytes()[0];
        at -= 1;
    }
    first
};

/// The entries of an opcode: one, or one for each service action; none if the opcode is unknown.
pub fn of(opcode: u8) -> &'static [Opcode] {
    static ALL: [Opcode; OPCODES.len()] = OPCODES;
    let Some(first) = usize::from(FIRST[usize::from(opcode)]).checked_sub(1) else { return &[] };
    let rest = &ALL[first..];
    let count = rest.iter().take_while(|entry| entry.opcode == opcode).count();
    &rest[..count]
}

/// The service action of a command that has one.
pub fn service_action(cdb: &[u8; 16]) -> u16 {
    u16::from(cdb[1] & 0x1f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_found_by_its_opcode() {
        for entry in &OPCODES {
            let found = of(entry.opcode);
            assert!(found.iter().any(|other| other.service_action == entry.service_action));
            assert!(found.iter().all(|other| other.opcode == entry.opcode));
            assert!(matches!(entry.usage.len(), 6 | 10 | 12 | 16), "{entry:?}");
        }
        assert!(of(0x01).is_empty());
    }

    #[test]
    fn the_table_is_in_order() {
        assert!(OPCODES.is_sorted_by_key(|entry| (entry.opcode, entry.service_action)));
    }
}
