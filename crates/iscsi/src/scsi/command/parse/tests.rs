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
