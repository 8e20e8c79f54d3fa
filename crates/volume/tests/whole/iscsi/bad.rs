//! Initiators that break the rules: a bounded answer, a dropped connection where the protocol says so,
//! no growth of memory, and everybody else undisturbed.

use std::net::TcpStream;

use super::wire::{Initiator, NO_TAG, Pdu, head};
use crate::server::{MIB, Server, assert_io, until};

const NAME: &str = "iqn.2026-11.test:bad";
const READ: u8 = 0xc0;
const WRITE: u8 = 0xa0;

/// What the server has in memory of its own.
fn resident_mib(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).expect("status");
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("RssAnon");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("KiB");
    kib / 1024
}

/// A session that does everything right, while others do not.
fn still_works(good: &mut Initiator) {
    assert_eq!(good.run(WRITE, 512, &[0x2a, 0, 0, 0, 0, 8, 0, 0, 1, 0], &[7; 512]), (0, 0));
    assert_eq!(good.run(READ, 512, &[0x28, 0, 0, 0, 0, 8, 0, 0, 1, 0], &[]), (0, 0));
}

async fn server_with_session() -> (Server, Initiator) {
    let server = Server::start().await;
    server.create("data", 64 * MIB).await;
    let mut good = Initiator::session(&server, "iqn.2026-11.test:good", "data");
    good.greet();
    (server, good)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_login_is_hung_up_on() {
    let (server, mut good) = server_with_session().await;
    let wrong = [
        b"GET / HTTP/1.1\r\nHost: there are more than forty-eight bytes here\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        head(0x01, 0x80, &[]).to_vec(),
        // A login that announces sixteen megabytes.
        head(0x43, 0x87, &[(4, 0x00ff_ffff)]).to_vec(),
        // Additional headers in a login.
        head(0x43, 0x87, &[(4, 0xff00_0000)]).to_vec(),
    ];
    for bytes in wrong {
        let mut bad = Initiator::connect(&server);
        bad.raw(&bytes);
        assert!(bad.is_hung_up_on(), "{:02x?}", &bytes[..8]);
    }
    still_works(&mut good);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_makes_no_sense_is_refused() {
    let (server, mut good) = server_with_session().await;
    let refused = |name: &str, volume: &str, keys: &[&str]| {
        let mut bad = Initiator::connect(&server);
        let status = bad.log_in(name, volume, keys);
        assert!(bad.is_hung_up_on());
        status
    };
    assert_eq!(refused(NAME, "nothing", &[]), 0x0203);
    assert_eq!(refused(NAME, "../data", &[]), 0x0203);
    assert_eq!(refused(NAME, "data@1", &[]), 0x0203);
    assert_eq!(refused("nobody", "data", &[]), 0x0200);
    assert_eq!(refused(&format!("iqn.{}", "a".repeat(300)), "data", &[]), 0x0200);
    assert_eq!(refused(NAME, "data", &["MaxBurstLength=1"]), 0x0200);
    assert_eq!(refused(NAME, "data", &["MaxBurstLength=512", "MaxBurstLength=1024"]), 0x0200);
    assert_eq!(refused(NAME, "data", &["no value"]), 0x0200);
    assert_eq!(refused(NAME, "data", &["SessionType=Other"]), 0x0209);
    still_works(&mut good);
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_pdus_end_their_connection_only() {
    let (server, mut good) = server_with_session().await;
    let mut too_long = Initiator::session(&server, NAME, "data");
    too_long.raw(&head(0x01, WRITE, &[(4, 0x00ff_ffff), (24, 1)]));
    assert!(too_long.is_hung_up_on());
    let mut gap = Initiator::session(&server, NAME, "data");
    gap.cmd_sn += 5;
    let command = gap.command(0x80, 1, 0, &[0; 6]);
    gap.send(command, &[]);
    assert!(gap.is_hung_up_on(), "a command is missing");
    let mut second_login = Initiator::session(&server, NAME, "data");
    second_login.send(head(0x43, 0x87, &[]), b"InitiatorName=iqn.x\0");
    assert!(second_login.is_hung_up_on());
    let mut endless = Initiator::session(&server, NAME, "data");
    for _ in 0..20 {
        endless.send(head(0x44, 0x40, &[(16, 1), (20, NO_TAG)]), &[b'x'; 8000]);
    }
    while endless.receive().is_some() {}
    still_works(&mut good);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_offered_is_rejected_and_the_session_goes_on() {
    let (server, mut good) = server_with_session().await;
    for opcode in [0x10, 0x1c, 0x3f, 0x25] {
        good.send(head(opcode, 0x80, &[(16, 9), (20, NO_TAG)]), &[]);
        let answer = good.receive().expect("an answer");
        assert_eq!(answer.opcode(), 0x3f, "opcode {opcode:#x}");
    }
    // Data for a task that nobody knows.
    good.send(head(0x05, 0x80, &[(16, 77), (20, 5)]), &[1; 512]);
    still_works(&mut good);
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_digests_end_their_connection() {
    let (server, mut good) = server_with_session().await;
    let digests = ["HeaderDigest=CRC32C", "DataDigest=CRC32C"];
    let with_digests = || {
        let mut initiator = Initiator::connect(&server);
        assert_eq!(initiator.log_in(NAME, "data", &digests), 0);
        initiator.greet();
        still_works(&mut initiator);
        initiator
    };
    let mut wrong_head = with_digests();
    let command = wrong_head.command(0x80, 1, 0, &[0; 6]);
    wrong_head.raw(&[&command[..], &[1, 2, 3, 4]].concat());
    assert!(wrong_head.is_hung_up_on());
    let mut wrong_data = with_digests();
    let mut write = wrong_data.command(WRITE, 1, 512, &[0x2a, 0, 0, 0, 0, 16, 0, 0, 1, 0]);
    write[5..8].copy_from_slice(&[0, 2, 0]);
    let digest = crc32c::crc32c(&write).to_le_bytes();
    wrong_data.raw(&[&write[..], &digest, &[9; 512], &[1, 2, 3, 4]].concat());
    let reject = wrong_data.receive().expect("the reason");
    assert_eq!((reject.opcode(), reject.head[2]), (0x3f, 0x02));
    assert!(wrong_data.is_hung_up_on());
    still_works(&mut good);
    assert_io(&server.qemu_io("data", &["read -P 0 8k 512"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_beyond_the_end_and_nonsense_are_check_conditions() {
    let (server, mut good) = server_with_session().await;
    let illegal = (2, 5);
    let last = [0x88, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 1, 0, 0];
    assert_eq!(good.run(READ, 512, &last, &[]), illegal);
    assert_eq!(good.run(READ, 512, &[0x28, 0, 0, 2, 0, 0, 0, 0, 1, 0], &[]), illegal);
    let beyond = [0x2a, 0, 0, 1, 255, 255, 0, 0, 2, 0];
    assert_eq!(good.run(WRITE, 1024, &beyond, &[1; 1024]), illegal);
    for opcode in 0..=255_u8 {
        // Whatever it is, it is answered.
        let (status, _) = good.run(READ, 64, &[opcode; 16], &[]);
        assert!(matches!(status, 0 | 2 | 0x18), "opcode {opcode:#x}: status {status:#x}");
    }
    still_works(&mut good);
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_initiator_that_takes_no_answers_costs_little_and_disturbs_nobody() {
    let (server, mut good) = server_with_session().await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 32M"]));
    let before = resident_mib(&server);
    let mut deaf: Vec<Initiator> =
        (0..8).map(|n| Initiator::session(&server, &format!("{NAME}{n}"), "data")).collect();
    for initiator in &mut deaf {
        initiator.greet();
        // Each asks for 128 KiB, and takes nothing.
        let read = [0x28, 0, 0, 0, 0, 0, 0, 1, 0, 0];
        let many: Vec<u8> =
            (0..100).flat_map(|tag| initiator.command(READ, tag, 131_072, &read)).collect();
        while initiator.pour(&many) && initiator.cmd_sn < 50_000 {
            initiator.cmd_sn += 100;
        }
    }
    still_works(&mut good);
    let grown = resident_mib(&server).saturating_sub(before);
    assert!(grown < 64, "{grown} MiB more for eight of them");
    drop(deaf);
    still_works(&mut good);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_logins_costs_little_and_disturbs_nobody() {
    let (server, mut good) = server_with_session().await;
    let before = resident_mib(&server);
    // Some say nothing, some half a login, some log in over and over under one name.
    let mut silent = Vec::new();
    for number in 0..600 {
        // Those beyond the bound are hung up on, and may not even get so far.
        let Ok(stream) = TcpStream::connect(&server.iscsi_addr) else { continue };
        if number % 2 == 0 {
            drop(std::io::Write::write_all(&mut &stream, &head(0x43, 0x87, &[])[..20]));
        }
        silent.push(stream);
    }
    still_works(&mut good);
    drop(silent);
    // Their places are free again when the server has seen that they are gone.
    until("a login to be let in", async || {
        let mut initiator = Initiator::connect(&server);
        initiator.raw(&head(0x43, 0x87, &[]));
        initiator.receive().is_some()
    })
    .await;
    for _ in 0..300 {
        drop(Initiator::session(&server, NAME, "data"));
    }
    still_works(&mut good);
    let grown = resident_mib(&server).saturating_sub(before);
    assert!(grown < 48, "{grown} MiB more after the flood");
    until("the sessions to end", async || {
        let info: perigee_model::volume::VolumeInfo =
            server.control.get("/v1/volumes/data").await.expect("the volume");
        info.sessions == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_that_never_get_their_data_are_bounded() {
    let (server, mut good) = server_with_session().await;
    let before = resident_mib(&server);
    let mut stuck = Initiator::session(&server, NAME, "data");
    stuck.greet();
    // Eight mebibytes each, and not a byte of them comes.
    for tag in 0..100 {
        let write = [0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0];
        let command = stuck.command(WRITE, tag, 8 << 20, &write);
        stuck.send(command, &[]);
    }
    let first = stuck.receive().expect("an answer");
    assert_eq!(first.opcode(), 0x31, "a request for data");
    still_works(&mut good);
    let grown = resident_mib(&server).saturating_sub(before);
    assert!(grown < 32, "{grown} MiB more");
    drop(stuck);
}

/// A WRITE (16) of so many MiB, whose data are all to be asked for.
fn long_write(session: &mut Initiator, tag: u32, mib: u8) -> [u8; 48] {
    let cdb = [0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, mib * 8, 0, 0, 0];
    session.command(WRITE, tag, u32::from(mib) << 20, &cdb)
}

#[tokio::test(flavor = "multi_thread")]
async fn immediate_commands_without_end_are_rejected() {
    let (server, mut good) = server_with_session().await;
    let mut flood = Initiator::session(&server, NAME, "data");
    flood.greet();
    for tag in 0..200 {
        let mut write = long_write(&mut flood, tag, 8);
        write[0] |= 0x40;
        flood.send(write, &[]);
    }
    let rejected = loop {
        let pdu = flood.receive().expect("an answer");
        if pdu.opcode() != 0x31 {
            break pdu;
        }
    };
    assert_eq!((rejected.opcode(), rejected.head[2]), (0x3f, 0x06), "too many immediate commands");
    still_works(&mut good);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_is_aborted_makes_room_for_the_next() {
    const FIRST: u32 = 71;
    const SECOND: u32 = 72;
    const ABORT: u32 = 73;
    let (server, _good) = server_with_session().await;
    let mut session = Initiator::session(&server, NAME, "data");
    session.greet();
    for (tag, mib) in [(FIRST, 31), (SECOND, 8)] {
        let write = long_write(&mut session, tag, mib);
        session.send(write, &[]);
    }
    let asked_of = |pdu: &Pdu| u32::from_be_bytes(pdu.head[16..20].try_into().expect("four"));
    let first = session.receive().expect("an answer");
    assert_eq!((first.opcode(), asked_of(&first)), (0x31, FIRST));
    session.send(head(0x42, 0x81, &[(16, ABORT), (20, FIRST)]), &[]);
    let second = loop {
        let pdu = session.receive().expect("the second is asked for its data");
        if pdu.opcode() == 0x31 && asked_of(&pdu) != FIRST {
            break pdu;
        }
    };
    assert_eq!(asked_of(&second), SECOND);
}
