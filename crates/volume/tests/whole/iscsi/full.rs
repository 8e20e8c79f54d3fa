//! A pool that is really full: a small ext4 with nothing left.

use crate::iscsi::wire::{Initiator, Outcome};
use crate::server::{MIB, Server, assert_io, said, try_run};
use crate::small::Small;

const READ: u8 = 0xc0;
const WRITE: u8 = 0xa0;
/// What one write brings, unasked.
const PIECE_BYTES: u32 = 64 << 10;
const BLOCKS: u32 = PIECE_BYTES / 512;
const NAME: &str = "iqn.2026-11.test:full";

/// CHECK CONDITION, DATA PROTECT, SPACE ALLOCATION FAILED WRITE PROTECT (SBC-3, 4.7.3.6).
const FULL: (u8, u8, u16) = (2, 7, 0x2707);
const GOOD: (u8, u8, u16) = (0, 0, 0);

fn cdb(opcode: u8, piece: u32, blocks: u32) -> Vec<u8> {
    let first = u64::from(piece * BLOCKS).to_be_bytes();
    [&[opcode, 0][..], &first, &blocks.to_be_bytes(), &[0, 0]].concat()
}

fn ended(outcome: &Outcome) -> (u8, u8, u16) {
    (outcome.status, outcome.key, outcome.code)
}

fn write(session: &mut Initiator, piece: u32, byte: u8) -> (u8, u8, u16) {
    let data = [byte; PIECE_BYTES as usize];
    ended(&session.execute(WRITE, PIECE_BYTES, &cdb(0x8a, piece, BLOCKS), &data))
}

fn reads(session: &mut Initiator, piece: u32, byte: u8) {
    let read = session.execute(READ, PIECE_BYTES, &cdb(0x88, piece, BLOCKS), &[]);
    assert_eq!((ended(&read), read.data.len()), (GOOD, PIECE_BYTES as usize), "piece {piece}");
    assert!(read.data.iter().all(|found| *found == byte), "piece {piece}");
}

/// Writes piece after piece until one is refused.
fn fill(session: &mut Initiator, from: u32) -> u32 {
    for piece in from..from + 512 {
        match write(session, piece, 2) {
            GOOD => {}
            refused => {
                assert_eq!(refused, FULL);
                return piece;
            }
        }
    }
    panic!("32 MiB fitted a disk of 32 MiB with 14 MiB of ballast");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_refuses_what_needs_space_and_the_session_goes_on_when_there_is_some() {
    let Some(small) = Small::mount_ext4() else {
        return eprintln!("skipped: only root with loop devices can mount a small ext4");
    };
    let mut server = Server::start_in(small.path.join("pool")).await;
    server.create("data", 64 * MIB).await;
    server.create("other", 64 * MIB).await;
    let mut session = Initiator::session(&server, NAME, "data");
    let mut other = Initiator::session(&server, NAME, "other");
    session.greet();
    other.greet();
    assert_eq!(write(&mut other, 0, 1), GOOD);
    assert_eq!(write(&mut session, 0, 1), GOOD);
    small.fill(14);
    let refused = fill(&mut session, 1);
    // Each way to write needs space there.
    let block = [3; 512];
    let pattern = session.execute(WRITE, 512, &cdb(0x93, refused, BLOCKS), &block);
    assert_eq!(ended(&pattern), FULL, "WRITE SAME");
    let verified = session.execute(WRITE, PIECE_BYTES, &cdb(0x8e, refused, BLOCKS), &[3; 65536]);
    assert_eq!(ended(&verified), FULL, "WRITE AND VERIFY");
    // What is there can be read and written, by everybody.
    reads(&mut session, 0, 1);
    reads(&mut session, refused - 1, 2);
    assert_eq!(write(&mut session, 0, 4), GOOD);
    assert_eq!(write(&mut other, 0, 5), GOOD);
    reads(&mut other, 0, 5);
    assert_eq!(session.run(0x80, 0, &cdb(0x91, 0, 0), &[]), (0, 0), "SYNCHRONIZE CACHE");
    let url = server.iscsi_url("data");
    let qemu = try_run(&["qemu-io", "-f", "raw", "-c", "write -P 3 32M 16M", &url]);
    assert!(said(&qemu).contains("No space left on device"), "{qemu:?}");

    small.make_room();
    assert_eq!(write(&mut session, refused, 6), GOOD);
    let more = fill(&mut session, refused + 1);
    assert!(more > refused + 100, "14 MiB more: {refused}, {more}");
    // What is unmapped is room for others.
    let unmap = [&[0, 62, 0, 16, 0, 0, 0, 0][..], &[0; 8], &(BLOCKS * 64).to_be_bytes(), &[0; 4]];
    let cdb_unmap = [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(session.run(WRITE, 24, &cdb_unmap, &unmap.concat()), (0, 0), "UNMAP");
    // Only what is durably unmapped is given back.
    assert_eq!(session.run(0x80, 0, &cdb(0x91, 0, 0), &[]), (0, 0), "SYNCHRONIZE CACHE");
    assert_eq!(write(&mut other, 1, 7), GOOD);
    server.kill();
    server.start_process().await;
    let at = |piece: u32, byte: u8| format!("read -P {byte} {} 64k", piece * PIECE_BYTES);
    assert_io(&server.qemu_io("data", &[&at(0, 0), &at(refused, 6), &at(more - 1, 2)]));
    assert_io(&server.qemu_io("other", &[&at(0, 5), &at(1, 7)]));
}
