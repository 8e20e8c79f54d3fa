//! What libiscsi's newest conformance tests ask for, and version 1.19, which Debian has, does not.

use super::wire::{Initiator, NO_TAG, Pdu, head};
use crate::server::{MIB, Server};

const NAME: &str = "iqn.2026-11.test:edges";
const READ: u8 = 0xc0;
const WRITE: u8 = 0xa0;
const TAG: u32 = 21;

async fn session() -> (Server, Initiator) {
    let server = Server::start().await;
    server.create("data", 16 * MIB).await;
    let mut session = Initiator::session(&server, NAME, "data");
    session.greet();
    (server, session)
}

fn field(pdu: &Pdu, at: usize) -> u32 {
    u32::from_be_bytes(pdu.head[at..at + 4].try_into().expect("four"))
}

/// TEST UNIT READY, and its answer.
fn test_unit_ready(session: &mut Initiator, tag: u32) -> Pdu {
    let command = session.command(0x80, tag, 0, &[0; 6]);
    session.send(command, &[]);
    session.receive().expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_beyond_the_window_is_ignored_and_the_connection_goes_on() {
    let (_server, mut session) = session().await;
    let told_max = field(&test_unit_ready(&mut session, TAG), 32);
    let mut beyond = head(0x01, 0x80, &[(16, TAG + 1)]);
    beyond[24..28].copy_from_slice(&told_max.wrapping_add(1).to_be_bytes());
    session.send(beyond, &[]);
    let answer = test_unit_ready(&mut session, TAG + 2);
    assert_eq!((answer.opcode(), field(&answer, 16), answer.head[3]), (0x21, TAG + 2, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_writes_as_many_bytes_as_the_initiator_announced() {
    let (_server, mut session) = session().await;
    for (opcode, count_at, cdb_bytes) in [(0x2a, 8, 10), (0xaa, 9, 12), (0x8a, 13, 16)] {
        let mut cdb = vec![0; cdb_bytes];
        (cdb[0], cdb[count_at]) = (opcode, 1);
        assert_eq!(session.run(WRITE, 512, &cdb, &[b'a'; 512]), (0, 0));
        let command = session.command(WRITE, TAG, 200, &cdb);
        session.send(command, &[b'b'; 200]);
        let answer = session.receive().expect("an answer");
        assert_eq!((answer.opcode(), answer.head[3]), (0x21, 0), "{opcode:02x}");
        assert_eq!((answer.head[1] & 0x06, field(&answer, 44)), (0x04, 312), "overflow");
        let read = session.execute(READ, 512, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[]);
        let expected = [[b'b'; 200].as_slice(), &[b'a'; 312]].concat();
        assert!(read.data == expected, "{opcode:02x}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compare_and_write_with_more_or_less_data_than_its_blocks_take_is_refused() {
    let (_server, mut session) = session().await;
    for blocks in [1, 3] {
        let mut cdb = [0; 16];
        (cdb[0], cdb[13]) = (0x89, blocks);
        assert_eq!(session.run(WRITE, 2048, &cdb, &[0; 2048]), (2, 5), "{blocks} blocks");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_asks_for_nothing_known_is_rejected_and_the_session_goes_on() {
    let (_server, mut session) = session().await;
    let ask = |session: &mut Initiator, text: &[u8]| {
        let fields = [(16, TAG), (20, NO_TAG), (24, session.cmd_sn)];
        session.send(head(0x44, 0x80, &fields), text);
        session.receive().expect("an answer")
    };
    for wrong in [
        &b"SendTargetsPlease=All\0"[..],
        b"SendTargets=Alle\0",
        b"SendTargets=A\0",
        b"sENDtARGETS=aLL\0",
    ] {
        let answer = ask(&mut session, wrong);
        assert_eq!(answer.opcode(), 0x3f, "{}", String::from_utf8_lossy(wrong));
        assert_eq!(u32::from_be_bytes(answer.data[16..20].try_into().expect("four")), TAG);
    }
    let answer = ask(&mut session, b"SendTargets=All\0");
    assert_eq!(answer.opcode(), 0x24);
    let text = String::from_utf8_lossy(&answer.data).into_owned();
    assert!(text.contains("TargetName=iqn.2026-11.org.perigee:data"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_right_behind_its_write_is_answered_and_a_new_session_begins() {
    const ABORT: u32 = 77;
    let (server, mut session) = session().await;
    let write = session.command(WRITE, TAG, 4096, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0]);
    session.send(write, &[7; 4096]);
    session.send(head(0x42, 0x81, &[(16, ABORT), (20, TAG), (24, session.cmd_sn)]), &[]);
    let first = session.receive().expect("an answer");
    // Either the write was answered and there is nothing to abort, or it is never answered.
    if first.opcode() == 0x21 {
        assert_eq!((field(&first, 16), first.head[3]), (TAG, 0));
        let managed = session.receive().expect("an answer to the abort");
        assert_eq!((managed.opcode(), field(&managed, 16), managed.head[2]), (0x22, ABORT, 1));
    } else {
        assert_eq!((first.opcode(), field(&first, 16), first.head[2]), (0x22, ABORT, 0));
    }
    session.send(head(0x46, 0x80, &[(16, TAG + 1), (24, session.cmd_sn)]), &[]);
    assert_eq!(session.receive().expect("an answer to the logout").opcode(), 0x26);
    Initiator::session(&server, NAME, "data").greet();
}
