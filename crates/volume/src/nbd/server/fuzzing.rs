//! Bytes of a client for the fuzz targets, sent to a whole connection of the server.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_model::Problem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use super::{Export, Exports, Opener, Server, ServerOptions, connection};
use crate::device::{Device, Extent, IoError, Zeroing};
use crate::stream::socket::Socket;

const SIZE_BYTES: usize = 1 << 20;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn with<T>(&self, offset: u64, length: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
        let from = usize::try_from(offset).expect("the server checks the range");
        work(&mut self.0.lock().expect("no holder panics")[from..from + length])
    }
}

impl Device for Memory {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES as u64
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        let length = usize::try_from(length_bytes).expect("32 bits");
        Box::pin(async move { Ok(self.with(offset, length, |b| Bytes::copy_from_slice(b))) })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        // Some at once and some with a wait, as a disk does.
        (offset & 4096 == 0).then(|| {
            self.with(offset, buffer.len(), |bytes| buffer.copy_from_slice(bytes));
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.with(offset, data.len(), |bytes| bytes.copy_from_slice(&data));
            Ok(())
        })
    }

    fn zero(
        &self,
        offset: u64,
        length_bytes: u64,
        _: Zeroing,
        _: bool,
    ) -> BoxFuture<'_, Result<(), IoError>> {
        let length = usize::try_from(length_bytes).expect("the server checks the range");
        Box::pin(async move {
            self.with(offset, length, |bytes| bytes.fill(0));
            Ok(())
        })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, _: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        let extent = Extent { length_bytes: length.min(70_000), hole: true, zero: true };
        Box::pin(async move { Ok(vec![extent]) })
    }
}

/// Exports for targets of any protocol.
pub(crate) struct One;

impl Exports for One {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        Box::pin(async { Ok(vec!["data".into(), "read-only".into()]) })
    }

    fn open<'a>(&'a self, name: &'a str, _: Opener) -> BoxFuture<'a, Result<Export, Problem>> {
        Box::pin(async move {
            if name != "data" && name != "read-only" {
                return Err(Problem::not_found("can't open it", "there is no such export"));
            }
            let device = Arc::new(Memory(Mutex::new(vec![1; SIZE_BYTES])));
            Ok(Export { device, read_only: name != "data", counters: Arc::default() })
        })
    }
}

/// A client that says this, takes every answer, and hangs up.
fn talk(said: &[u8]) -> Vec<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let Server(shared) =
            Server::new(Arc::new(One), ServerOptions::default()).expect("a server");
        let serve = connection(Socket::Unix(theirs), shared, CancellationToken::new());
        let (mut reader, mut writer) = ours.into_split();
        let speak = async {
            // A server that has hung up takes no more.
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

/// Everything after the server's greeting is the fuzzer's.
pub fn handshake(input: &[u8]) {
    talk(input);
}

fn option(said: &mut Vec<u8>, option: u32, data: &[u8]) {
    said.extend(OPTION_MAGIC.to_be_bytes());
    said.extend(option.to_be_bytes());
    said.extend(u32::try_from(data.len()).expect("short").to_be_bytes());
    said.extend(data);
}

/// A handshake that succeeds, and then requests. The first byte says which options are agreed on
/// and whether what follows is taken as it is or made into requests that look right.
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

/// Twelve bytes of the fuzzer for each: command, flags, offset, length, and how long the payload
/// really is.
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
        // Most writes bring what they promise.
        if command == 1 && bytes[10] != 0 {
            said.resize(said.len() + usize::try_from(length).expect("32 bits"), bytes[11]);
        }
    }
}
