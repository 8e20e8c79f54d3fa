//! A fuzz target of the client: a server that sends bytes from the fuzzer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use perigee_block::device::{Device, Zeroing};
use perigee_block::sessions::ProxyKey;
use perigee_http::Listen;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::handshake::{self, Way};
use super::{NbdDevice, RemoteExport};
use crate::wire::{self, Chunk, encode_option_reply, option, reply};

/// The deadline of a run. A run normally ends much sooner, because the server closes the connection at the end.
const DEADLINE: Duration = Duration::from_secs(10);

/// Runs a server that sends these bytes, receives every request, and closes the connection.
fn listen(said: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let conversation = async {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let (mut reader, mut writer) = tokio::io::split(theirs);
        let speak = async move {
            drop(writer.write_all(said).await);
            drop(writer.shutdown().await);
        };
        let hear = async move { drop(reader.read_to_end(&mut Vec::new()).await) };
        let talk = async move {
            let stream = handshake::buffered(Box::new(ours) as _);
            let way = Way {
                address: Listen::Unix("/nonexistent".into()),
                name: "data".into(),
                tls: None,
                session: Some(Arc::new(ProxyKey::new("server", "data", "start", 0))),
            };
            let Ok((stream, info)) = handshake::agree(stream, &way, way.joins(1, 0)).await else {
                return;
            };
            let mut remote = RemoteExport::new(way.address.clone(), "data");
            remote.patience = Duration::ZERO;
            let device = NbdDevice::over(stream, 1, Arc::new(way), info, &remote);
            ask(&device).await;
        };
        tokio::join!(speak, hear, talk);
    };
    runtime
        .expect("a runtime")
        .block_on(async { tokio::time::timeout(DEADLINE, conversation).await })
        .expect("the client ends when the server has hung up");
}

/// One request of each kind, at the same time.
async fn ask(device: &NbdDevice) {
    // When the connection is lost, nobody waits for another one.
    device.hang_up();
    let read = async {
        if let Ok(bytes) = device.read(4096, 8192).await {
            assert_eq!(bytes.len(), 8192, "a read is whole");
        }
    };
    let extents = async {
        if let Ok(extents) = device.extents(0, 1 << 20).await {
            let told: u64 = extents.iter().map(|extent| extent.length_bytes).sum();
            assert!(told <= 1 << 20, "more than was asked for");
        }
    };
    let changes = async {
        drop(device.write(0, Bytes::from_static(&[7; 512]), true).await);
        drop(device.zero(0, 4096, Zeroing::FreeSpace, false).await);
        drop(device.flush().await);
    };
    tokio::join!(read, extents, changes);
}

/// The first byte says what the fuzzer's bytes are: everything that the server sends, or what follows a successful
/// handshake. In the second case they are sent unchanged or are made into replies that look valid.
pub fn client(input: &[u8]) {
    let Some((how, rest)) = input.split_first() else { return };
    if how & 16 != 0 {
        return compressed(rest);
    }
    if how & 1 != 0 {
        return listen(rest);
    }
    let mut said = greeting();
    let extended = how & 2 != 0;
    let answer = |said: &mut Vec<u8>, option, kind, data: &[u8]| {
        said.extend(encode_option_reply(option, kind, data));
    };
    if extended {
        answer(&mut said, option::EXTENDED_HEADERS, reply::ACK, &[]);
    } else {
        answer(&mut said, option::EXTENDED_HEADERS, reply::ERR_UNSUP, &[]);
        let kind = if how & 4 != 0 { reply::ACK } else { reply::ERR_UNSUP };
        answer(&mut said, option::STRUCTURED_REPLY, kind, &[]);
    }
    if extended || how & 4 != 0 {
        answer(
            &mut said,
            option::SET_META_CONTEXT,
            reply::META_CONTEXT,
            b"\0\0\0\x01base:allocation",
        );
        answer(&mut said, option::SET_META_CONTEXT, reply::ACK, &[]);
    }
    answer(&mut said, option::PERIGEE_SESSION, reply::ACK, &[]);
    // An export of one mebibyte with every flag that a server can offer.
    answer(&mut said, option::GO, reply::INFO, &[0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0x0d, 0x6d]);
    answer(&mut said, option::GO, reply::ACK, &[]);
    if how & 8 != 0 {
        said.extend(rest);
    } else {
        replies(&mut said, rest, extended);
    }
    listen(&said);
}

/// The content of a chunk of compressed data, as the answer to a read of at most this much.
fn compressed(input: &[u8]) {
    const READ_BYTES_MAX: u32 = 1 << 20;
    if let Ok(Chunk::Compressed(found)) = Chunk::compressed(Bytes::copy_from_slice(input))
        && found.length_bytes <= READ_BYTES_MAX
        && let Ok(data) = found.decompress()
    {
        assert_eq!(data.len(), found.length_bytes as usize, "as its head says");
    }
}

fn greeting() -> Vec<u8> {
    let flags = 3_u16.to_be_bytes();
    [&wire::MAGIC.to_be_bytes()[..], &wire::OPTION_MAGIC.to_be_bytes(), &flags].concat()
}

/// Each reply takes eight of the fuzzer's bytes: the kind of head, the request, the kind of chunk, and the length.
fn replies(said: &mut Vec<u8>, input: &[u8], extended: bool) {
    for bytes in input.chunks_exact(8) {
        let cookie = u64::from(bytes[1] % 6);
        if bytes[0] & 1 != 0 {
            said.extend(0x6744_6698_u32.to_be_bytes());
            said.extend(u32::from(bytes[2] & 31).to_be_bytes());
            said.extend(cookie.to_be_bytes());
        } else {
            let kind = [0, 1, 2, 5, 6, 0x8001, 0x8002, 0x5045][usize::from(bytes[2] & 7)];
            let length = u64::from(u16::from_be_bytes([bytes[3], bytes[4]]));
            let magic: u32 = if extended { 0x6e8a_278c } else { 0x668e_33ef };
            said.extend(magic.to_be_bytes());
            said.extend(u16::from(bytes[0] >> 7).to_be_bytes());
            said.extend(u16::to_be_bytes(kind));
            said.extend(cookie.to_be_bytes());
            if extended {
                said.extend(0_u64.to_be_bytes());
                said.extend(length.to_be_bytes());
            } else {
                said.extend(&length.to_be_bytes()[4..]);
            }
            // An offset, or a context and a run, that may be valid.
            let offset = 4096 + u64::from(bytes[5]) * 64;
            let payload = [&offset.to_be_bytes()[..], &[bytes[6], bytes[7], 0, 8]].concat();
            let end = said.len() + usize::try_from(length).expect("16 bits");
            said.extend(payload);
            said.resize(end, bytes[6]);
        }
    }
}
