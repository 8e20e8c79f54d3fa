//! One connection of the load generator. It keeps its queue of requests full.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use super::histogram::Histogram;
use super::offsets::Source;
use super::protocol::{Export, Kind, REQUEST_BYTES, ReplyParser, encode_request, handshake};
use super::{Address, Load};

/// A server that sends nothing for this long has failed.
pub const SILENCE_MAX: Duration = Duration::from_secs(30);

pub struct Connection {
    pub socket: OwnedFd,
    kind: Kind,
    length_bytes: u32,
    source: Source,
    parser: ReplyParser,
    /// When the request with this number as its cookie was sent.
    sent_ns: Vec<u64>,
    free: Vec<usize>,
    output: Output,
    pub in_flight: usize,
    /// There are no more offsets, or the run is over.
    pub ended: bool,
}

/// Requests that are not sent yet. The payload of a write is always the same, so it is in the buffer from the
/// start, and only the headers are written.
struct Output {
    buffer: Vec<u8>,
    frame_bytes: usize,
    start: usize,
    end: usize,
}

impl Output {
    fn new(kind: Kind, length_bytes: u32, depth: usize) -> Self {
        let payload = if kind == Kind::Write { length_bytes as usize } else { 0 };
        let frame_bytes = REQUEST_BYTES + payload;
        // Twice the depth, so that there is always room after a partly sent request.
        let bytes = (1..=u8::MAX).cycle();
        let buffer = bytes.take(frame_bytes * depth * 2).collect();
        Self { buffer, frame_bytes, start: 0, end: 0 }
    }

    fn head(&mut self) -> &mut [u8] {
        if self.end + self.frame_bytes > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let at = self.end;
        self.end += self.frame_bytes;
        &mut self.buffer[at..at + REQUEST_BYTES]
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn sent(&mut self, bytes: usize) {
        self.start += bytes;
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
    }
}

/// The result of one call of [`Connection::receive`].
#[derive(Debug, Default)]
pub struct Turn {
    pub done: u64,
}

impl Connection {
    pub fn open(load: &Load, export: &str, source: Source) -> io::Result<Self> {
        let (socket, export) = connect(&load.address, export, load.structured)?;
        if load.pattern.span() * u64::from(load.request_bytes) > export.size_bytes {
            return Err(io::Error::other("the export is smaller than what is to be used of it"));
        }
        Ok(Self {
            socket,
            kind: load.kind,
            length_bytes: load.request_bytes,
            source,
            parser: ReplyParser::default(),
            sent_ns: vec![0; load.depth],
            free: (0..load.depth).rev().collect(),
            output: Output::new(load.kind, load.request_bytes, load.depth),
            in_flight: 0,
            ended: false,
        })
    }

    /// Adds requests until the queue is full, and sends what the socket takes.
    pub fn fill(&mut self, now_ns: u64) -> io::Result<()> {
        while !self.ended
            && let Some(slot) = self.free.pop()
        {
            let Some(unit) = self.source.next() else {
                self.free.push(slot);
                self.ended = true;
                break;
            };
            let offset = unit * u64::from(self.length_bytes);
            let head = self.output.head();
            encode_request(head, self.kind, slot as u64, offset, self.length_bytes);
            self.sent_ns[slot] = now_ns;
            self.in_flight += 1;
        }
        self.send()
    }

    /// Whether the socket did not take all requests yet.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    pub fn send(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            let bytes = &self.output.buffer[self.output.start..self.output.end];
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(self.socket.as_raw_fd(), bytes, flags) {
                Ok(sent) => self.output.sent(sent),
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads what the server has sent; waits for it only if `wait`.
    pub fn receive(
        &mut self,
        buffer: &mut [u8],
        wait: bool,
        latencies: &mut Histogram,
        now_ns: impl Fn() -> u64,
    ) -> io::Result<Turn> {
        let flags = if wait { MsgFlags::empty() } else { MsgFlags::MSG_DONTWAIT };
        let received = match recv(self.socket.as_raw_fd(), buffer, flags) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => received,
            Err(Errno::EAGAIN) if wait => return Err(io::ErrorKind::TimedOut.into()),
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(Turn::default()),
            Err(error) => return Err(error.into()),
        };
        let now_ns = now_ns();
        let mut turn = Turn::default();
        let mut refused = None;
        let data_bytes = if self.kind == Kind::Read { u64::from(self.length_bytes) } else { 0 };
        let (sent_ns, free) = (&self.sent_ns, &mut self.free);
        self.parser.feed(
            &buffer[..received],
            |_| data_bytes,
            |done| match usize::try_from(done.cookie) {
                Ok(slot) if slot < sent_ns.len() && done.errno == 0 => {
                    latencies.add(now_ns.saturating_sub(sent_ns[slot]));
                    free.push(slot);
                    turn.done += 1;
                }
                _ => refused = Some(done),
            },
        )?;
        if let Some(refused) = refused {
            return Err(io::Error::other(format!(
                "request {} was answered with error {}",
                refused.cookie, refused.errno
            )));
        }
        self.in_flight -= usize::try_from(turn.done).expect("at most the queue's depth");
        Ok(turn)
    }

    /// Sends one request without data and waits for its reply. No other request may be in flight.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut request = [0; REQUEST_BYTES];
        encode_request(&mut request, Kind::Flush, 0, 0, 0);
        send(self.socket.as_raw_fd(), &request, MsgFlags::MSG_NOSIGNAL)?;
        let mut buffer = [0; 256];
        let (mut ended, mut errno) = (false, 0);
        while !ended {
            let received = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.parser.feed(
                &buffer[..received],
                |_| 0,
                |done| (ended, errno) = (true, done.errno),
            )?;
        }
        if errno == 0 { Ok(()) } else { Err(io::Error::other(format!("flush: error {errno}"))) }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut request = [0; REQUEST_BYTES];
        encode_request(&mut request, Kind::Disconnect, 0, 0, 0);
        // The server may have ended already.
        let _unsent = send(self.socket.as_raw_fd(), &request, MsgFlags::MSG_NOSIGNAL);
    }
}

fn connect(address: &Address, name: &str, structured: bool) -> io::Result<(OwnedFd, Export)> {
    match address {
        Address::Unix(path) => {
            let mut stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(SILENCE_MAX))?;
            let export = handshake(&mut stream, name, structured)?;
            Ok((stream.into(), export))
        }
        Address::Tcp(address) => {
            let mut stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(SILENCE_MAX))?;
            let export = handshake(&mut stream, name, structured)?;
            Ok((stream.into(), export))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_keeps_what_is_half_sent_when_it_starts_anew() {
        let mut output = Output::new(Kind::Write, 4, 2);
        let frame = REQUEST_BYTES + 4;
        for round in 0..20u8 {
            output.head().fill(round);
            let first = output.buffer[output.start];
            output.sent(frame / 2);
            output.head().fill(round + 100);
            assert_eq!(output.buffer[output.start - 1], first);
            output.sent(frame);
            assert_eq!(output.end - output.start, frame - frame / 2);
            output.sent(frame - frame / 2);
            assert!(output.is_empty());
        }
    }
}
