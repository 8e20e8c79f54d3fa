//! Bytes of an initiator for the fuzz targets, sent to a whole connection of the target.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use perigee_block::fuzzing::One;
use perigee_http::ClientAddress;
use perigee_model::Problem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use super::access::{Client, Clients};
use super::chap::{Chap, Credentials, Secret};
use super::pdu::{Digests, Head, NO_TAG, flag, request};
use super::unit::KeepNothing;
use super::{Options, Target, converse};

/// Any conversation ends much sooner: a client that says nothing more has hung up.
const DEADLINE: Duration = Duration::from_secs(10);
const TARGET: &str = "iqn.2026-11.org.perigee:data";

struct Strangers;

impl Clients for Strangers {
    fn find<'a>(&'a self, initiator: &'a str) -> BoxFuture<'a, Result<Option<Client>, Problem>> {
        let credentials = |user: &str, secret: &str| Credentials {
            user: user.into(),
            secret: Secret::new(secret),
        };
        let mut client = Client::unrestricted();
        if initiator.ends_with("chap") {
            let target = Some(credentials("target", "staple"));
            client.chap = Some(Chap { initiator: credentials("user", "horse"), target });
        }
        Box::pin(async { Ok(Some(client)) })
    }
}

/// An initiator that says this, takes every answer, and hangs up.
fn talk(said: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let Target(shared) = Target::new(Options {
            exports: Arc::new(One),
            clients: Arc::new(Strangers),
            keep: Arc::new(KeepNothing),
            sessions_max: 1,
        });
        let portal = ([127, 0, 0, 1], 3260).into();
        let place = shared.logins.take(ClientAddress(Some([127, 0, 0, 1].into())));
        let place = place.expect("the only one");
        let stop = CancellationToken::new();
        let serve = converse(theirs, portal, "fuzz".into(), place, &shared, stop);
        let (mut reader, mut writer) = tokio::io::split(ours);
        let speak = async {
            // A target that has hung up takes no more.
            drop(writer.write_all(said).await);
            drop(writer.shutdown().await);
        };
        let mut answers = Vec::new();
        let listen = reader.read_to_end(&mut answers);
        let all = async { tokio::join!(serve, speak, listen) };
        drop(tokio::time::timeout(DEADLINE, all).await.expect("it comes to an end"));
    });
}

fn login_head(flags: u8) -> Head {
    Head::new(request::LOGIN | 0x40, flags).with(8, &[0x40, 0, 0, 1, 0, 0]).with_u32(24, 1)
}

/// Login PDUs. The first byte says whether what follows is taken as it is, or made into login PDUs
/// with the texts that follow, each with its flags and its length before it.
pub fn iscsi_login(input: &[u8]) {
    let Some((how, mut rest)) = input.split_first() else { return };
    if how & 1 != 0 {
        return talk(rest);
    }
    let mut said = Vec::new();
    while let [flags, length, ..] = *rest {
        let text = &rest[2..][..usize::from(length).min(rest.len() - 2)];
        said.extend(Digests::default().encode(login_head(flags), text));
        rest = &rest[2 + text.len()..];
    }
    talk(&said);
}

/// A login that succeeds, and then PDUs. The first byte says which digests there are, and whether
/// what follows is taken as it is or made into PDUs that look right.
pub fn iscsi_session(input: &[u8]) {
    let Some((how, rest)) = input.split_first() else { return };
    let word = |on: bool| if on { "CRC32C" } else { "None" };
    let digests = Digests { header: how & 1 != 0, data: how & 2 != 0 };
    let text = format!(
        "InitiatorName=iqn.fuzz\0TargetName={TARGET}\0SessionType={}\0HeaderDigest={}\0\
         DataDigest={}\0InitialR2T=No\0MaxOutstandingR2T=4\0MaxBurstLength=4096\0",
        if how & 4 == 0 { "Normal" } else { "Discovery" },
        word(digests.header),
        word(digests.data)
    );
    // From operation to the full feature phase.
    let mut said = Digests::default().encode(login_head(0x87), text.as_bytes());
    if how & 8 != 0 {
        said.extend(rest);
    } else {
        pdus(&mut said, rest, digests);
    }
    talk(&said);
}

const OPCODES: [u8; 8] = [
    request::SCSI_COMMAND,
    request::SCSI_COMMAND,
    request::DATA_OUT,
    request::TASK_MANAGEMENT,
    request::TEXT,
    request::NOP_OUT,
    request::LOGOUT,
    request::SNACK,
];

/// Twenty-four bytes of the fuzzer for each: opcode, flags, tags, a command, and how much data.
fn pdus(said: &mut Vec<u8>, input: &[u8], digests: Digests) {
    let mut cmd_sn = 1_u32;
    for bytes in input.chunks_exact(24) {
        let opcode = OPCODES[usize::from(bytes[0] & 7)];
        let mut flags = bytes[1];
        if bytes[0] & 8 != 0 {
            flags |= flag::FINAL;
        }
        let length = usize::from(u16::from_be_bytes([bytes[5], bytes[6]]) & 0x3fff);
        let ttt = if bytes[4] & 0x80 != 0 { NO_TAG } else { u32::from(bytes[4]) };
        let expected = if opcode == request::SCSI_COMMAND { u32::from(bytes[4]) << 9 } else { ttt };
        let mut head = Head::new(opcode, flags)
            .with_u32(16, u32::from(bytes[2]))
            .with_u32(20, expected)
            .with_u32(24, cmd_sn)
            .with(32, &bytes[8..24]);
        if opcode == request::DATA_OUT {
            head = head.with_u32(36, u32::from(bytes[7])).with_u32(40, u32::from(bytes[3]) << 9);
        } else if bytes[0] & 0x10 != 0 {
            head.0[0] |= 0x40;
        } else {
            cmd_sn += 1;
        }
        said.extend(digests.encode(head, &vec![bytes[7]; length]));
    }
}
