//! A server that answers every request at once, with zeros. It shows the cost of the messages alone.

use std::collections::HashMap;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;
use nix::poll::PollTimeout;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::socket::{MsgFlags, recv};
use nix::sys::uio::writev;

use crate::load::Address;
use crate::load::protocol::REQUEST_BYTES;

const WORKERS: usize = 2;
const READ_BYTES_MAX: usize = 1 << 20;
const BUFFER_BYTES: usize = 512 << 10;
/// The most slices of one `writev`.
const SLICES_MAX: usize = 1024;

static ZEROS: [u8; READ_BYTES_MAX] = [0; READ_BYTES_MAX];

/// Serves until the process ends.
///
/// # Errors
/// If the address is in use.
pub fn serve(address: &Address, size_bytes: u64) -> io::Result<()> {
    let workers: Vec<Arc<Worker>> =
        (0..WORKERS).map(|_| Worker::new().map(Arc::new)).collect::<io::Result<_>>()?;
    for worker in &workers {
        let worker = worker.clone();
        std::thread::spawn(move || worker.run());
    }
    let accept = accepter(address)?;
    for worker in workers.iter().cycle() {
        let mut stream = accept()?;
        match shake(&mut stream, size_bytes) {
            Ok(()) => worker.add(stream.into_fd())?,
            // The client only checked whether the server listens.
            Err(_gone) => {}
        }
    }
    Ok(())
}

trait Stream: Read + Write {
    fn into_fd(self: Box<Self>) -> OwnedFd;
}

impl<T: Read + Write + Into<OwnedFd>> Stream for T {
    fn into_fd(self: Box<Self>) -> OwnedFd {
        (*self).into()
    }
}

type Accept = Box<dyn Fn() -> io::Result<Box<dyn Stream>>>;

fn accepter(address: &Address) -> io::Result<Accept> {
    fn unix(path: &Path) -> io::Result<Accept> {
        let listener = UnixListener::bind(path)?;
        Ok(Box::new(move || Ok(Box::new(listener.accept()?.0))))
    }
    fn tcp(address: SocketAddr) -> io::Result<Accept> {
        let listener = TcpListener::bind(address)?;
        Ok(Box::new(move || {
            let (stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream))
        }))
    }
    match address {
        Address::Unix(path) => unix(path),
        Address::Tcp(address) => tcp(*address),
    }
}

/// The server's part of the handshake: every export exists, and structured replies are not supported.
fn shake(stream: &mut (impl Read + Write + ?Sized), size_bytes: u64) -> io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let option: [u8; 4] = head[8..12].try_into().expect("4 bytes");
        let length = u32::from_be_bytes(head[12..16].try_into().expect("4 bytes"));
        if length > 64 << 10 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let length = u32::try_from(data.len()).expect("a few bytes");
            let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
            let head = [&magic[..], &option, &kind.to_be_bytes(), &length.to_be_bytes(), data];
            stream.write_all(&head.concat())
        };
        match u32::from_be_bytes(option) {
            // GO, and INFO, after which the client may send more options.
            kind @ (6 | 7) => {
                let info = [&[0, 0][..], &size_bytes.to_be_bytes(), &[0x01, 0x0d]].concat();
                reply(3, &info)?;
                reply(1, &[])?;
                if kind == 7 {
                    return Ok(());
                }
            }
            _ => reply(0x8000_0001, &[])?,
        }
    }
}

struct Worker {
    epoll: Epoll,
    connections: Mutex<HashMap<u64, Connection>>,
}

impl Worker {
    fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { epoll, connections: Mutex::default() })
    }

    fn add(&self, socket: OwnedFd) -> io::Result<()> {
        let key = u64::try_from(socket.as_raw_fd()).expect("a descriptor is not negative");
        // The lock is held only while a worker answers.
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        self.epoll.add(socket.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, key))?;
        connections.insert(key, Connection { socket, requests: Requests::default() });
        Ok(())
    }

    fn run(&self) {
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut ready = [EpollEvent::empty(); 64];
        loop {
            let Ok(count) = self.epoll.wait(&mut ready, PollTimeout::NONE) else { continue };
            let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
            for event in &ready[..count] {
                let Some(connection) = connections.get_mut(&event.data()) else { continue };
                if connection.turn(&mut buffer).is_err() {
                    connections.remove(&event.data());
                }
            }
        }
    }
}

struct Connection {
    socket: OwnedFd,
    requests: Requests,
}

impl Connection {
    fn turn(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let received = match recv(self.socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => received,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let mut replies = Vec::with_capacity(64);
        let goes_on = self.requests.feed(&buffer[..received], &mut replies);
        self.answer(&replies)?;
        if goes_on { Ok(()) } else { Err(io::ErrorKind::ConnectionAborted.into()) }
    }

    fn answer(&self, replies: &[Reply]) -> io::Result<()> {
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(replies.len() * 2);
        for reply in replies {
            slices.push(IoSlice::new(&reply.head));
            if reply.data_bytes > 0 {
                slices.push(IoSlice::new(&ZEROS[..reply.data_bytes]));
            }
        }
        let mut slices = slices.as_mut_slice();
        while !slices.is_empty() {
            match writev(&self.socket, &slices[..slices.len().min(SLICES_MAX)]) {
                Ok(written) => IoSlice::advance_slices(&mut slices, written),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Reply {
    head: [u8; 16],
    data_bytes: usize,
}

/// Splits a stream of requests.
#[derive(Debug, Default)]
struct Requests {
    head: [u8; REQUEST_BYTES],
    have: usize,
    /// Bytes of a write's payload that are still to be skipped.
    skip: usize,
}

impl Requests {
    /// Returns `false` if the client disconnects or sends an invalid request.
    fn feed(&mut self, mut bytes: &[u8], replies: &mut Vec<Reply>) -> bool {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return true;
            }
            let part = (REQUEST_BYTES - self.have).min(bytes.len());
            self.head[self.have..self.have + part].copy_from_slice(&bytes[..part]);
            self.have += part;
            bytes = &bytes[part..];
            if self.have < REQUEST_BYTES {
                return true;
            }
            self.have = 0;
            let length = u32::from_be_bytes(self.head[24..28].try_into().expect("4 bytes"));
            let length = length as usize;
            let kind = self.head[7];
            if self.head[..4] != [0x25, 0x60, 0x95, 0x13] || length > READ_BYTES_MAX || kind == 2 {
                return false;
            }
            let mut head = [0; 16];
            head[..4].copy_from_slice(&[0x67, 0x44, 0x66, 0x98]);
            head[8..].copy_from_slice(&self.head[8..16]);
            replies.push(Reply { head, data_bytes: if kind == 0 { length } else { 0 } });
            self.skip = if kind == 1 { length } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::protocol::{Kind, encode_request};

    fn request(kind: Kind, cookie: u64, length_bytes: u32) -> Vec<u8> {
        let mut head = vec![0; REQUEST_BYTES];
        encode_request(&mut head, kind, cookie, 0, length_bytes);
        if kind == Kind::Write {
            head.resize(REQUEST_BYTES + length_bytes as usize, 7);
        }
        head
    }

    #[test]
    fn requests_are_found_wherever_the_stream_is_cut() {
        let stream =
            [request(Kind::Read, 1, 4096), request(Kind::Write, 2, 50), request(Kind::Flush, 3, 0)]
                .concat();
        for piece in [1, 27, 28, 29, 77, 200] {
            let (mut requests, mut replies) = (Requests::default(), Vec::new());
            for bytes in stream.chunks(piece) {
                assert!(requests.feed(bytes, &mut replies));
            }
            let got: Vec<_> = replies.iter().map(|r| (r.head[15], r.data_bytes)).collect();
            assert_eq!(got, [(1, 4096), (2, 0), (3, 0)], "in pieces of {piece}");
        }
    }

    #[test]
    fn goodbye_and_nonsense_end_a_connection() {
        assert!(!Requests::default().feed(&request(Kind::Disconnect, 1, 0), &mut Vec::new()));
        assert!(!Requests::default().feed(&[0; REQUEST_BYTES], &mut Vec::new()));
    }
}
