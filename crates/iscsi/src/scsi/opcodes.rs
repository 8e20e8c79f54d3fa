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
    pub const TEST_UNIT_READY: u8 = 0x00;
    pub const REQUEST_SENSE: u8 = 0x03;
    pub const READ_6: u8 = 0x08;
    pub const WRITE_6: u8 = 0x0a;
    pub const INQUIRY: u8 = 0x12;
    pub const MODE_SELECT_6: u8 = 0x15;
    pub const RESERVE_6: u8 = 0x16;
    pub const RELEASE_6: u8 = 0x17;
    pub const MODE_SENSE_6: u8 = 0x1a;
    pub const START_STOP_UNIT: u8 = 0x1b;
    pub const PREVENT_ALLOW: u8 = 0x1e;
    pub const READ_CAPACITY_10: u8 = 0x25;
    pub const READ_10: u8 = 0x28;
    pub const WRITE_10: u8 = 0x2a;
    pub const WRITE_VERIFY_10: u8 = 0x2e;
    pub const VERIFY_10: u8 = 0x2f;
    pub const PREFETCH_10: u8 = 0x34;
    pub const SYNCHRONIZE_CACHE_10: u8 = 0x35;
    pub const READ_DEFECT_DATA_10: u8 = 0x37;
    pub const WRITE_SAME_10: u8 = 0x41;
    pub const UNMAP: u8 = 0x42;
    pub const MODE_SELECT_10: u8 = 0x55;
    pub const MODE_SENSE_10: u8 = 0x5a;
    pub const PERSISTENT_RESERVE_IN: u8 = 0x5e;
    pub const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
    pub const READ_16: u8 = 0x88;
    pub const COMPARE_AND_WRITE: u8 = 0x89;
    pub const WRITE_16: u8 = 0x8a;
    pub const ORWRITE: u8 = 0x8b;
    pub const WRITE_VERIFY_16: u8 = 0x8e;
    pub const VERIFY_16: u8 = 0x8f;
    pub const PREFETCH_16: u8 = 0x90;
    pub const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    pub const WRITE_SAME_16: u8 = 0x93;
    pub const SERVICE_ACTION_IN_16: u8 = 0x9e;
    pub const REPORT_LUNS: u8 = 0xa0;
    pub const MAINTENANCE_IN: u8 = 0xa3;
    pub const READ_12: u8 = 0xa8;
    pub const WRITE_12: u8 = 0xaa;
    pub const WRITE_VERIFY_12: u8 = 0xae;
    pub const VERIFY_12: u8 = 0xaf;
    pub const READ_DEFECT_DATA_12: u8 = 0xb7;

    pub mod action {
        pub const READ_CAPACITY_16: u16 = 0x10;
        pub const GET_LBA_STATUS: u16 = 0x12;
        pub const REPORT_SUPPORTED_OPCODES: u16 = 0x0c;
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
