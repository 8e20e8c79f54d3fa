//! Bytes of a client for the fuzz targets, sent to a whole connection of the server.

use std::sync::Arc;

use perigee_block::fuzzing::One;
use perigee_block::stream::socket::Socket;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use super::{Server, ServerOptions, connection};

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

/// Runs a client that sends these bytes, receives every answer, and closes the connection.
fn talk(said: &[u8]) -> Vec<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let Server(shared) =
            Server::new(Arc::new(One), ServerOptions::default()).expect("a server");
        let serve = connection(Socket::Unix(theirs), shared, None, CancellationToken::new());
        let (mut reader, mut writer) = ours.into_split();
        let speak = async {
            // The server may have closed the connection.
            drop(writer.write_all(said).await);
            drop(writer.shutdown().await);
        };
        let mut answers = Vec::new();
        let listen = reader.read_to_end(&mut answers);
        let (_, _, heard) = tokio::join!(serve, speak, listen);
        drop(heard);
        answers
    })
}

/// The fuzzer's bytes follow the server's greeting.
pub fn handshake(input: &[u8]) {
    talk(input);
}

fn option(said: &mut Vec<u8>, option: u32, data: &[u8]) {
    said.extend(OPTION_MAGIC.to_be_bytes());
    said.extend(option.to_be_bytes());
    said.extend(u32::try_from(data.len()).expect("short").to_be_bytes());
    said.extend(data);
}

/// A successful handshake, and then requests. The first byte says which options are negotiated, and whether the
/// other bytes are sent unchanged or are made into requests that look valid.
pub fn transmission(input: &[u8]) {
    const GO: u32 = 7;
    const STRUCTURED_REPLY: u32 = 8;
    const SET_META_CONTEXT: u32 = 10;
    const EXTENDED_HEADERS: u32 = 11;
    let Some((how, rest)) = input.split_first() else { return };
    let mut said = 3_u32.to_be_bytes().to_vec();
    if how & 1 != 0 {
        option(&mut said, STRUCTURED_REPLY, &[]);
    }
    if how & 2 != 0 {
        option(&mut said, EXTENDED_HEADERS, &[]);
    }
    let name: &[u8] = if how & 4 == 0 { b"data" } else { b"read-only" };
    let name_length = u32::try_from(name.len()).expect("short").to_be_bytes();
    if how & 8 != 0 {
        let context = b"base:allocation";
        let data =
            [&name_length[..], name, &1_u32.to_be_bytes(), &15_u32.to_be_bytes(), context].concat();
        option(&mut said, SET_META_CONTEXT, &data);
    }
    option(&mut said, GO, &[&name_length[..], name, &[0, 0]].concat());
    if how & 16 != 0 {
        said.extend(rest);
    } else {
        requests(&mut said, rest, how & 2 != 0);
    }
    talk(&said);
}

/// Each request takes twelve of the fuzzer's bytes: command, flags, offset, length, and the real length of the
/// payload.
fn requests(said: &mut Vec<u8>, input: &[u8], extended: bool) {
    for (cookie, bytes) in (1_u64..).zip(input.chunks_exact(12)) {
        let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four"));
        let (offset, length) = (u64::from(number(2)) & 0x1f_ffff, number(6) & 0x1_ffff);
        let command = u16::from(bytes[0] % 10);
        if extended {
            said.extend(0x21e4_1c71_u32.to_be_bytes());
        } else {
            said.extend(0x2560_9513_u32.to_be_bytes());
        }
        said.extend(u16::from(bytes[1]).to_be_bytes());
        said.extend(command.to_be_bytes());
        said.extend(cookie.to_be_bytes());
        said.extend(offset.to_be_bytes());
        if extended {
            said.extend(u64::from(length).to_be_bytes());
        } else {
            said.extend(length.to_be_bytes());
        }
        // Most writes have as much payload as their head says.
        if command == 1 && bytes[10] != 0 {
            said.resize(said.len() + usize::try_from(length).expect("32 bits"), bytes[11]);
        }
    }
}
