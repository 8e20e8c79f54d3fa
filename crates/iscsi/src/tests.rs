//! What takes long in life, with short times.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use perigee_block::exports::{Export, Exports, Opener, Peer};
use perigee_http::ClientAddress;
use perigee_model::Problem;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio_util::sync::CancellationToken;

use super::access::{Client, Clients};
use super::pdu::{Digests, HEAD_BYTES, Head, NO_TAG, flag, request, response};
use super::unit::KeepNothing;
use super::{Options, Target, converse};

const DEADLINE: Duration = Duration::from_secs(120);

/// No volumes, and no secrets.
struct Nothing;

impl Exports for Nothing {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        let names = (0..200).map(|number| format!("volume-{number}")).collect();
        Box::pin(async { Ok(names) })
    }

    fn open<'a>(
        &'a self,
        _: &'a str,
        _: Opener,
        _: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>> {
        Box::pin(async { Err(Problem::not_found("can't open it", "there is nothing")) })
    }
}

impl Clients for Nothing {
    fn find<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Option<Client>, Problem>> {
        Box::pin(async { Ok(Some(Client::unrestricted())) })
    }
}

/// A session for discovery, with a target that is soon impatient.
async fn discovering(silence_max: Duration) -> DuplexStream {
    let nothing = Arc::new(Nothing);
    let mut target = Target::new(Options {
        exports: nothing.clone(),
        clients: nothing,
        keep: Arc::new(KeepNothing),
        sessions_max: 1,
    });
    let shared = Arc::get_mut(&mut target.0).expect("nobody else has it");
    shared.silence_max = silence_max;
    let (mut ours, theirs) = tokio::io::duplex(1 << 20);
    let shared = target.0;
    let place = shared.logins.take(ClientAddress(Some([127, 0, 0, 1].into()))).expect("a place");
    let portal = ([127, 0, 0, 1], 3260).into();
    tokio::spawn(async move {
        let stop = CancellationToken::new();
        drop(converse(theirs, portal, "a test".into(), place, &shared, stop).await);
    });
    let login = Head::new(request::LOGIN | 0x40, 0x87).with_u32(24, 1);
    let keys = b"InitiatorName=iqn.test\0SessionType=Discovery\0MaxRecvDataSegmentLength=512\0";
    ours.write_all(&Digests::default().encode(login, keys)).await.expect("a login");
    let (head, _) = receive(&mut ours).await.expect("an answer");
    assert_eq!((head.opcode(), head.u16_at(36)), (response::LOGIN, 0));
    ours
}

async fn receive(stream: &mut DuplexStream) -> Option<(Head, Vec<u8>)> {
    let received = async {
        let mut bytes = [0; HEAD_BYTES];
        stream.read_exact(&mut bytes).await.ok()?;
        let head = Head(bytes);
        let length = usize::try_from(head.data_bytes()).expect("short");
        let mut data = vec![0; length.next_multiple_of(4)];
        stream.read_exact(&mut data).await.ok()?;
        data.truncate(length);
        Some((head, data))
    };
    tokio::time::timeout(DEADLINE, received).await.expect("an answer, or the end")
}

#[tokio::test]
async fn a_silent_initiator_is_asked_and_then_dropped() {
    let mut initiator = discovering(Duration::from_millis(200)).await;
    for _ in 0..2 {
        let (ping, _) = receive(&mut initiator).await.expect("a ping");
        assert_eq!((ping.opcode(), ping.itt()), (response::NOP_IN, NO_TAG));
        let pong = Head::new(request::NOP_OUT | 0x40, flag::FINAL)
            .with_u32(16, NO_TAG)
            .with_u32(20, ping.ttt());
        initiator.write_all(&pong.0).await.expect("it is still connected");
    }
    let (ping, _) = receive(&mut initiator).await.expect("a ping");
    assert_eq!(ping.opcode(), response::NOP_IN);
    assert!(receive(&mut initiator).await.is_none(), "it did not answer");
}

#[tokio::test]
async fn a_long_list_of_targets_comes_in_pieces() {
    let mut initiator = discovering(DEADLINE).await;
    let mut ask = Head::new(request::TEXT, flag::FINAL).with_u32(16, 5).with_u32(20, NO_TAG);
    let mut text = Vec::new();
    for cmd_sn in 1.. {
        let keys: &[u8] = if cmd_sn == 1 { b"SendTargets=All\0" } else { b"" };
        let bytes = Digests::default().encode(ask.with_u32(24, cmd_sn), keys);
        initiator.write_all(&bytes).await.expect("a request");
        let (head, piece) = receive(&mut initiator).await.expect("a piece");
        assert_eq!(head.opcode(), response::TEXT);
        assert!(piece.len() <= 512);
        text.extend(piece);
        if head.has(flag::FINAL) {
            break;
        }
        ask = ask.with_u32(20, head.ttt());
    }
    let text = String::from_utf8(text).expect("a text");
    assert_eq!(text.matches("TargetName=iqn.2026-11.org.perigee:volume-").count(), 200);
    assert_eq!(text.matches("TargetAddress=127.0.0.1:3260,1").count(), 200);
}
