//! The reports of a unit: its size, its commands, and which blocks have data.

use perigee_block::device::Extent;

use super::command::ReportOpcodes;
use super::opcodes::{self, OPCODES, Opcode};
use super::sense::Sense;
use super::{BLOCK_BYTES, Outcome, PHYSICAL_EXPONENT};

/// The answer to READ CAPACITY (10): eight bytes. A size beyond 32 bits is reported as all ones.
pub fn capacity_10(blocks: u64) -> Outcome {
    let last = u32::try_from(blocks.saturating_sub(1)).unwrap_or(u32::MAX);
    let block_bytes = u32::try_from(BLOCK_BYTES).expect("512");
    let data = [last.to_be_bytes(), block_bytes.to_be_bytes()].concat();
    Outcome::answer(data, 8_usize)
}

/// The answer to READ CAPACITY (16): 32 bytes, cut to what the initiator has allocated.
pub fn capacity_16(blocks: u64, allocated_bytes: u32) -> Outcome {
    let mut data = vec![0; 32];
    data[..8].copy_from_slice(&blocks.saturating_sub(1).to_be_bytes());
    data[8..12].copy_from_slice(&u32::try_from(BLOCK_BYTES).expect("512").to_be_bytes());
    data[13] = PHYSICAL_EXPONENT;
    // Thin provisioning, and unmapped blocks read as zeros.
    data[14] = 0xc0;
    Outcome::answer(data, allocated_bytes)
}

/// There is one unit, number 0.
pub fn luns(select: u8, allocated_bytes: u32) -> Outcome {
    let count = match select {
        0x00 | 0x02 => 1,
        // Well-known units.
        0x01 => 0,
        _ => return Sense::invalid_field(2).into(),
    };
    if allocated_bytes < 16 {
        return Sense::invalid_field(6).into();
    }
    let mut data = vec![0; 8 + 8 * count];
    data[3] = u8::try_from(8 * count).expect("one unit");
    Outcome::answer(data, allocated_bytes)
}

/// The requested lists of defects, which are empty.
pub fn defects(long: bool, lists: u8, allocated_bytes: u32) -> Outcome {
    let mut data = vec![0, lists & 0x1f, 0, 0];
    if long {
        data.extend([0, 0, 0, 0]);
    }
    Outcome::answer(data, allocated_bytes)
}

/// The answer to REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS: 4 bytes, or 16 in the extended form. Less than 4
/// allocated bytes are refused.
pub fn task_management(extended: bool, allocated_bytes: u32) -> Outcome {
    if allocated_bytes < 4 {
        return Sense::invalid_field(6).into();
    }
    // Abort task, abort task set, clear task set, unit reset, target reset.
    let mut data = vec![0xda, 0, 0, 0];
    if extended {
        data[3] = 12;
        data.resize(16, 0);
    }
    Outcome::answer(data, allocated_bytes)
}

/// The answer to REPORT SUPPORTED OPERATION CODES: all commands, or one with the bits that have a meaning, and for
/// each a deadline if that is asked for.
pub fn opcodes(asked: &ReportOpcodes) -> Outcome {
    let ReportOpcodes { timeouts, options, opcode, service_action, allocated_bytes } = *asked;
    if options == 0 {
        return Outcome::answer(all_opcodes(timeouts), allocated_bytes);
    }
    let entries = opcodes::of(opcode);
    let plain = entries.iter().find(|entry| entry.service_action.is_none());
    let acting = entries.iter().find(|entry| entry.service_action == Some(service_action));
    let found = match options {
        // The opcode alone, which has to have no service actions.
        1 if plain.is_some() || entries.is_empty() => plain,
        // With its service action, which it has to have.
        2 if plain.is_none() => acting,
        3 => plain.filter(|_| service_action == 0).or(acting),
        _ => return Sense::invalid_field(2).into(),
    };
    Outcome::answer(one_opcode(found, timeouts), allocated_bytes)
}

fn all_opcodes(timeouts: bool) -> Vec<u8> {
    let mut data = vec![0; 4];
    for entry in &OPCODES {
        let mut flags = if timeouts { 0x02 } else { 0 };
        flags |= u8::from(entry.service_action.is_some());
        data.extend([entry.opcode, 0]);
        data.extend(entry.service_action.unwrap_or(0).to_be_bytes());
        data.extend([0, flags, 0, cdb_bytes(entry)]);
        if timeouts {
            data.extend(NO_TIMEOUTS);
        }
    }
    let length = u32::try_from(data.len() - 4).expect("a short table");
    data[..4].copy_from_slice(&length.to_be_bytes());
    data
}

/// Timeouts descriptor: the times of commands are not known.
const NO_TIMEOUTS: [u8; 12] = [0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn cdb_bytes(entry: &Opcode) -> u8 {
    u8::try_from(entry.usage.len()).expect("at most 16")
}

fn one_opcode(entry: Option<&Opcode>, timeouts: bool) -> Vec<u8> {
    let Some(entry) = entry else { return vec![0, 0x01, 0, 0] };
    // Supported as the standard has it.
    let mut data = vec![0, 0x03, 0, cdb_bytes(entry)];
    data.extend(entry.usage);
    if timeouts {
        data[1] |= 0x80;
        data.extend(NO_TIMEOUTS);
    }
    data
}

/// The blocks from `offset` on that have their own data.
pub fn lba_status(offset: u64, extents: &[Extent], allocated_bytes: u32) -> Outcome {
    let mut runs: Vec<(u64, u64, bool)> = Vec::new();
    let mut at = offset;
    for extent in extents {
        match runs.last_mut() {
            Some((_, length, hole)) if *hole == extent.hole => *length += extent.length_bytes,
            _ => runs.push((at, extent.length_bytes, extent.hole)),
        }
        at += extent.length_bytes;
    }
    let mut data = vec![0; 8];
    for (start, length, hole) in runs {
        let blocks = u32::try_from(length.div_ceil(BLOCK_BYTES)).unwrap_or(u32::MAX);
        data.extend((start / BLOCK_BYTES).to_be_bytes());
        data.extend(blocks.to_be_bytes());
        data.extend([u8::from(hole), 0, 0, 0]);
    }
    let length = u32::try_from(data.len() - 4).expect("as many runs as were asked for");
    data[..4].copy_from_slice(&length.to_be_bytes());
    Outcome::answer(data, allocated_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good(outcome: Outcome) -> Vec<u8> {
        match outcome {
            Outcome::Good(data) => data.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_large_volume_says_so_in_the_short_form() {
        assert_eq!(good(capacity_10(1 << 32))[..4], [0xff; 4]);
        assert_eq!(good(capacity_10((1 << 32) + 5))[..4], [0xff; 4]);
        assert_eq!(
            good(capacity_16(1 << 40, 12)),
            [0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]
        );
    }

    #[test]
    fn runs_of_one_kind_are_one() {
        let extent = |length_bytes, hole| Extent { length_bytes, hole, zero: hole };
        let extents = [extent(4096, false), extent(8192, false), extent(4096, true)];
        let data = good(lba_status(4096, &extents, 100));
        assert_eq!(data[..4], [0, 0, 0, 36]);
        assert_eq!(data[8..24], [0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 24, 0, 0, 0, 0]);
        assert_eq!(data[24..40], [0, 0, 0, 0, 0, 0, 0, 32, 0, 0, 0, 8, 1, 0, 0, 0]);
    }

    #[test]
    fn each_way_to_ask_for_one_opcode_has_its_rules() {
        let ask = |options, opcode, service_action| {
            let timeouts = false;
            opcodes(&ReportOpcodes {
                timeouts,
                options,
                opcode,
                service_action,
                allocated_bytes: 99,
            })
        };
        assert_eq!(good(ask(1, 0x28, 0))[1], 3);
        assert_eq!(good(ask(1, 0xf0, 0))[1], 1);
        assert_eq!(ask(1, 0x9e, 0), Outcome::Check(Sense::invalid_field(2)));
        assert_eq!(good(ask(2, 0x9e, 0x10))[1], 3);
        assert_eq!(good(ask(2, 0x9e, 0x11))[1], 1);
        assert_eq!(ask(2, 0x28, 0), Outcome::Check(Sense::invalid_field(2)));
        assert_eq!(good(ask(3, 0x9e, 0x12))[1], 3);
        assert_eq!(
            good(opcodes(&ReportOpcodes {
                timeouts: true,
                options: 0,
                opcode: 0,
                service_action: 0,
                allocated_bytes: u32::MAX
            }))
            .len(),
            4 + 20 * OPCODES.len()
        );
    }
}
