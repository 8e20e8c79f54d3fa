//! The load generator. It drives one or many connections to an NBD server, each with a full queue.
//!
//! fio's nbd engine needs about 6 µs of CPU for a request, so above 150 thousand requests a second it is the
//! bottleneck. Here a thread waits for all of its connections at once, reads all replies that have arrived, and
//! sends as many new requests with one call. The replies' data are not verified; only errors are noticed.

pub mod connection;
pub mod histogram;
pub mod offsets;
pub mod protocol;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use nix::poll::PollTimeout;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use connection::{Connection, SILENCE_MAX};
use histogram::Histogram;
use offsets::Pattern;
pub use protocol::Kind;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// A load to put on a server.
#[derive(Debug, Clone)]
pub struct Load {
    pub address: Address,
    /// The connections are distributed over these.
    pub exports: Vec<String>,
    /// Ask for structured replies.
    pub structured: bool,
    pub kind: Kind,
    pub request_bytes: u32,
    pub pattern: Pattern,
    pub connections: usize,
    /// Requests in flight on each connection.
    pub depth: usize,
    pub threads: usize,
    /// The time before counting begins.
    pub warm_up: Duration,
    /// A pattern with an end may end earlier.
    pub duration: Duration,
    /// Whether to send one flush at the end, which is timed separately.
    pub flush: bool,
    pub cpu: Option<usize>,
    pub seed: u64,
}

/// The result of a load.
#[derive(Debug, Clone)]
pub struct Measured {
    pub requests: u64,
    pub seconds: f64,
    pub flush_seconds: f64,
    pub latencies: Histogram,
}

impl Measured {
    #[expect(clippy::cast_precision_loss, reason = "requests of a few seconds")]
    pub fn iops(&self) -> f64 {
        self.requests as f64 / self.seconds.max(1e-9)
    }
}

const WARMING: u8 = 0;
const MEASURING: u8 = 1;
const ENDING: u8 = 2;

/// Size of one read from a connection; large enough for a queue of long reads.
const BUFFER_BYTES: usize = 512 << 10;

/// Opens the connections of a load, and does nothing else.
///
/// # Errors
/// If the server refuses.
pub fn connect(load: &Load) -> io::Result<Vec<Connection>> {
    let sources = load.pattern.sources(load.connections, load.seed).into_iter();
    sources
        .enumerate()
        .map(|(index, source)| {
            let export = &load.exports[index % load.exports.len()];
            Connection::open(load, export, source)
        })
        .collect()
}

/// Runs a load. `began` is called when counting starts, and `ended` when it stops.
///
/// # Errors
/// If the server refuses, answers a request with an error, or sends nothing for [`SILENCE_MAX`].
pub fn run(load: &Load, began: impl FnOnce(), ended: impl FnOnce()) -> io::Result<Measured> {
    let threads = load.threads.clamp(1, load.connections);
    let mut shares: Vec<Vec<Connection>> = (0..threads).map(|_| Vec::new()).collect();
    for (index, connection) in connect(load)?.into_iter().enumerate() {
        shares[index % threads].push(connection);
    }
    let mut began = Some(began);
    let phase = AtomicU8::new(WARMING);
    // Without a warm-up every request counts, also those that complete before this thread runs again.
    if load.warm_up.is_zero()
        && let Some(began) = began.take()
    {
        began();
        phase.store(MEASURING, Ordering::Relaxed);
    }
    let start = Instant::now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = shares
            .into_iter()
            .map(|share| {
                let (phase, cpu) = (&phase, load.cpu);
                scope.spawn(move || {
                    if let Some(cpu) = cpu {
                        crate::process::pin_this_thread(cpu)?;
                    }
                    Worker::new(share, start)?.run(phase)
                })
            })
            .collect();
        if let Some(began) = began.take() {
            std::thread::sleep(load.warm_up);
            began();
            phase.store(MEASURING, Ordering::Relaxed);
        }
        let deadline = Instant::now() + load.duration;
        while Instant::now() < deadline && !workers.iter().all(|worker| worker.is_finished()) {
            let left = deadline.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(Duration::from_millis(20)));
        }
        phase.store(ENDING, Ordering::Relaxed);
        ended();
        let mut whole: Option<Ended> = None;
        for worker in workers {
            let mine = worker.join().expect("a worker does not panic")?;
            match &mut whole {
                Some(whole) => whole.add(mine),
                None => whole = Some(mine),
            }
        }
        let mut whole = whole.expect("there is at least one worker");
        let flush_seconds = if load.flush { whole.flush()? } else { 0.0 };
        Ok(Measured {
            requests: whole.latencies.total(),
            seconds: whole.seconds,
            flush_seconds,
            latencies: whole.latencies,
        })
    })
}

/// The result of a worker.
struct Ended {
    latencies: Histogram,
    seconds: f64,
    connections: Vec<Connection>,
}

impl Ended {
    fn add(&mut self, other: Self) {
        self.latencies.merge(&other.latencies);
        self.seconds = self.seconds.max(other.seconds);
        self.connections.extend(other.connections);
    }

    fn flush(&mut self) -> io::Result<f64> {
        let start = Instant::now();
        self.connections[0].flush()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

struct Worker {
    connections: Vec<Connection>,
    /// Used only to wait for more than one connection.
    epoll: Epoll,
    buffer: Vec<u8>,
    latencies: Histogram,
    start: Instant,
}

fn since_ns(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl Worker {
    fn new(connections: Vec<Connection>, start: Instant) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (index, connection) in connections.iter().enumerate() {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, index as u64);
            epoll.add(connection.socket.as_fd(), event)?;
        }
        let (buffer, latencies) = (vec![0; BUFFER_BYTES], Histogram::default());
        Ok(Self { connections, epoll, buffer, latencies, start })
    }

    fn run(mut self, phase: &AtomicU8) -> io::Result<Ended> {
        let mut phase_seen = phase.load(Ordering::Relaxed);
        let mut began_ns = since_ns(self.start);
        let mut ended_ns = began_ns;
        for connection in &mut self.connections {
            connection.fill(began_ns)?;
        }
        let mut ready = [EpollEvent::empty(); 64];
        while self.connections.iter().any(|connection| connection.in_flight > 0) {
            if self.connections.len() == 1 && !self.connections[0].has_output() {
                self.turn(0, true)?;
            } else {
                for index in self.wait(&mut ready)? {
                    self.turn(index, false)?;
                }
            }
            let now_ns = since_ns(self.start);
            ended_ns = now_ns;
            let phase = phase.load(Ordering::Relaxed);
            if phase != phase_seen {
                if phase_seen == WARMING {
                    self.latencies.clear();
                    began_ns = now_ns;
                }
                phase_seen = phase;
                if phase == ENDING {
                    break;
                }
            }
        }
        let latencies = self.latencies.clone();
        self.drain()?;
        let seconds = Duration::from_nanos(ended_ns - began_ns).as_secs_f64();
        Ok(Ended { latencies, seconds, connections: self.connections })
    }

    /// Waits for connections that can be read or written.
    fn wait(&mut self, ready: &mut [EpollEvent]) -> io::Result<Vec<usize>> {
        for (index, connection) in self.connections.iter().enumerate() {
            if connection.has_output() {
                let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT;
                let mut event = EpollEvent::new(flags, index as u64);
                self.epoll.modify(connection.socket.as_fd(), &mut event)?;
            }
        }
        let timeout = PollTimeout::try_from(SILENCE_MAX).expect("half a minute");
        let count = self.epoll.wait(ready, timeout)?;
        if count == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        for (index, connection) in self.connections.iter().enumerate() {
            if connection.has_output() {
                let mut event = EpollEvent::new(EpollFlags::EPOLLIN, index as u64);
                self.epoll.modify(connection.socket.as_fd(), &mut event)?;
            }
        }
        let indices = ready[..count].iter().map(|event| usize::try_from(event.data()));
        Ok(indices.collect::<Result<_, _>>().expect("an index is what was registered"))
    }

    fn turn(&mut self, index: usize, wait: bool) -> io::Result<()> {
        let connection = &mut self.connections[index];
        let start = self.start;
        connection.receive(&mut self.buffer, wait, &mut self.latencies, || since_ns(start))?;
        connection.fill(since_ns(start))
    }

    /// Reads the remaining replies, which do not count.
    fn drain(&mut self) -> io::Result<()> {
        let mut ignored = Histogram::default();
        for connection in &mut self.connections {
            connection.ended = true;
        }
        let mut ready = [EpollEvent::empty(); 64];
        while self.connections.iter().any(|connection| connection.in_flight > 0) {
            for index in self.wait(&mut ready)? {
                let connection = &mut self.connections[index];
                connection.receive(&mut self.buffer, false, &mut ignored, || 0)?;
                connection.send()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Runs the generator against the echo server in this process.
    fn against_echo(kind: Kind, structured: bool) -> Measured {
        let dir = tempfile::tempdir().expect("a directory");
        let address = Address::Unix(dir.path().join("echo.sock"));
        let server = address.clone();
        // It serves until the test's process ends.
        std::thread::spawn(move || crate::echo::serve(&server, 1 << 30));
        let load = Load {
            address,
            exports: vec!["any".into()],
            structured,
            kind,
            request_bytes: 4096,
            pattern: Pattern::Once(Arc::new(Pattern::shuffled(1000, 1))),
            connections: 3,
            depth: 7,
            threads: 2,
            warm_up: Duration::ZERO,
            duration: Duration::from_secs(60),
            flush: true,
            cpu: None,
            seed: 1,
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while connect(&load).is_err() {
            assert!(Instant::now() < deadline, "waited 30 s for the echo server's socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        run(&load, || (), || ()).expect("every request is answered")
    }

    #[test]
    fn every_read_and_write_is_answered_once() {
        for kind in [Kind::Read, Kind::Write] {
            assert_eq!(against_echo(kind, false).requests, 1000);
        }
    }

    #[test]
    fn a_server_without_structured_replies_is_driven_with_simple_ones() {
        assert_eq!(against_echo(Kind::Read, true).requests, 1000);
    }
}
