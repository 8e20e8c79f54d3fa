//! The relay: one thread that carries frames between the sites' TAPs, late, slow and lossy.
//!
//! ```text
//! TAP ── read ──> Wire (down? lost? when due?) ──> Ring ── due ──> write ── TAP
//! ```
//!
//! Each pair of sites has a link with two TAPs and two independent directions. The settings are in the
//! lab's `wan.json`. A connection to the relay's socket makes the relay read them, and returns its state.
//! A restart loses only the frames in transit.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use perigee_model::Problem;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::frame::{FRAME_BYTES_MAX, wire_bytes};
use super::ring::Ring;
use super::tap::Tap;
use super::wire::{Counts, Wire};
use crate::definition::{Definition, LabId, Link};
use crate::netns;
use crate::state::LabDir;

/// How many frames of one direction are handled before those of the next one.
const BATCH: usize = 64;
/// The longest time for which a peer that connects and does not read can delay the frames.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// The relay's answer to a connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RelayState {
    pub links: Vec<LinkState>,
    /// The reason why the settings could not be read. The previous settings then stay in effect.
    pub problem: Option<Problem>,
}

/// A link with what has gone over it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LinkState {
    #[serde(flatten)]
    pub link: Link,
    /// The frames from the first site to the second, and back.
    pub counts: [Counts; 2],
}

/// One direction of a link.
struct Way {
    from: usize,
    to: usize,
    /// Whether the TAP may have more frames.
    readable: bool,
    wire: Wire,
    ring: Ring,
}

/// Runs until it is killed. This is the command `perigee lab relay`.
///
/// # Errors
/// The lab or its network does not exist.
pub fn relay(base: &Path, id: &LabId) -> Result<(), Problem> {
    perigee_http::prepare_daemon();
    let dir = LabDir::new(base, id);
    let definition = dir.load()?.definition;
    let links = dir.wan()?.links;
    let taps = open_taps(&definition, &links)?;
    let listener = listen(&dir)?;
    // By default the kernel may delay a timer by up to 50 µs to save power.
    nix::sys::prctl::set_timerslack(1)
        .map_err(|e| Problem::internal("can't make the relay's timers exact", e))?;
    Relay { dir, ways: ways(&links), links, taps: &taps, scratch: vec![0; FRAME_BYTES_MAX] }
        .run(&listener)
}

/// Opens two TAPs for each link, in the first site and in the second.
fn open_taps(definition: &Definition, links: &[Link]) -> Result<Vec<Tap>, Problem> {
    let mut taps = Vec::new();
    for link in links {
        let [a, b] = &link.sites;
        for (site, other) in [(a, b), (b, a)] {
            let device = definition.wan_device(other);
            let open = || {
                let tap = Tap::open(&device)?;
                tap.set_super_frames(link.settings.super_frames())?;
                Ok(tap)
            };
            taps.push(netns::within(&definition.site_namespace(site), open)?);
        }
    }
    Ok(taps)
}

fn ways(links: &[Link]) -> Vec<Way> {
    let (seed, _) = uuid::Uuid::new_v4().as_u64_pair();
    let way = |(index, link): (usize, &Link)| {
        [(0, 1), (1, 0)].map(|(from, to)| Way {
            from: 2 * index + from,
            to: 2 * index + to,
            readable: true,
            wire: Wire::new(link.settings, seed.wrapping_add((2 * index + from) as u64)),
            ring: Ring::new(),
        })
    };
    links.iter().enumerate().flat_map(way).collect()
}

fn listen(dir: &LabDir) -> Result<UnixListener, Problem> {
    let path = dir.relay_socket();
    let fail = |e| Problem::internal(format!("can't listen at {}", path.display()), e);
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(fail(e)),
        _ => {}
    }
    let listener = UnixListener::bind(&path).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    Ok(listener)
}

struct Relay<'t> {
    dir: LabDir,
    links: Vec<Link>,
    taps: &'t [Tap],
    ways: Vec<Way>,
    /// Receives frames that are dropped because their ring is full.
    scratch: Vec<u8>,
}

impl Relay<'_> {
    fn run(&mut self, listener: &UnixListener) -> Result<(), Problem> {
        let began = Instant::now();
        let taps = self.taps;
        let mut polled: Vec<PollFd<'_>> =
            taps.iter().map(|tap| PollFd::new(tap, PollFlags::IN)).collect();
        polled.push(PollFd::new(listener, PollFlags::IN));
        loop {
            let mut timeout = None;
            for way in &mut self.ways {
                way.receive(&taps[way.from], began, &mut self.scratch)?;
                way.send(&taps[way.to], now_ns(began));
                let due_ns = way.ring.first().map(|(due_ns, _)| due_ns);
                let next = if way.readable { Some(0) } else { due_ns };
                timeout = [timeout, next].into_iter().flatten().min();
            }
            wait(&mut polled, timeout, began)?;
            for way in &mut self.ways {
                way.readable |= !polled[way.from].revents().is_empty();
            }
            if polled.last().is_some_and(|fd| !fd.revents().is_empty()) {
                self.answer(listener);
            }
        }
    }

    fn answer(&mut self, listener: &UnixListener) {
        let problem = self.reload().err();
        if let Some(problem) = &problem {
            tracing::warn!(%problem, "can't read the WAN's settings; the previous ones stay in effect");
        }
        let links = self.links.iter().zip(self.ways.chunks(2)).map(|(link, ways)| LinkState {
            link: link.clone(),
            counts: [ways[0].wire.counts, ways[1].wire.counts],
        });
        let state = RelayState { links: links.collect(), problem };
        let send = |mut stream: UnixStream| -> std::io::Result<()> {
            stream.set_nonblocking(false)?;
            stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
            stream.write_all(&serde_json::to_vec(&state)?)
        };
        if let Err(error) = listener.accept().and_then(|(stream, _)| send(stream)) {
            tracing::warn!(%error, "can't send the relay's state");
        }
    }

    fn reload(&mut self) -> Result<(), Problem> {
        let new = self.dir.wan()?.links;
        for (index, link) in self.links.iter_mut().enumerate() {
            let Some(set) = new.iter().find(|n| n.sites == link.sites) else { continue };
            if set.settings == link.settings {
                continue;
            }
            for number in [2 * index, 2 * index + 1] {
                self.taps[number].set_super_frames(set.settings.super_frames())?;
                self.ways[number].wire.set(set.settings);
            }
            link.settings = set.settings;
            tracing::info!(%link, settings = %link.settings, "a link's settings changed");
        }
        Ok(())
    }
}

impl Way {
    /// Reads the frames that have arrived, at most a batch.
    fn receive(&mut self, tap: &Tap, began: Instant, scratch: &mut [u8]) -> Result<(), Problem> {
        for _ in 0..BATCH {
            if !self.readable {
                break;
            }
            let (room, full) = match self.ring.room() {
                Some(room) => (room, false),
                None => (&mut *scratch, true),
            };
            let length = match tap.read(room) {
                Ok(length) => length,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => {
                        self.readable = false;
                        break;
                    }
                    ErrorKind::Interrupted => continue,
                    _ => {
                        return Err(Problem::internal("can't read from the sites' network", error));
                    }
                },
            };
            if full {
                self.wire.counts.queue_full_frames += 1;
                continue;
            }
            // The clock is read after the frame, so that no frame arrives too early.
            if let Some(due_ns) = self.wire.offer(now_ns(began), wire_bytes(&room[..length])) {
                self.ring.push(length, due_ns);
            }
        }
        Ok(())
    }

    /// Writes the frames that are due.
    fn send(&mut self, tap: &Tap, now_ns: u64) {
        while let Some((_, frame)) = self.ring.first().filter(|(due_ns, _)| *due_ns <= now_ns) {
            // If the network card does not accept a frame, the frame counts as lost.
            if tap.write(frame).is_err() {
                self.wire.counts.refused_frames += 1;
            }
            self.ring.pop();
        }
    }
}

fn now_ns(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Waits until a frame comes or the next one is due.
fn wait(polled: &mut [PollFd<'_>], due_ns: Option<u64>, began: Instant) -> Result<(), Problem> {
    let timeout = due_ns.map(|due_ns| {
        let left = Duration::from_nanos(due_ns.saturating_sub(now_ns(began)));
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    match poll(polled, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(Problem::internal("can't wait for the sites' network", error)),
    }
}

/// Makes the relay read the settings, and returns its state.
///
/// # Errors
/// `Unavailable` when it is not running; also the fault in the settings.
pub fn ask(dir: &LabDir) -> Result<RelayState, Problem> {
    let path = dir.relay_socket();
    let fail = |error: &dyn std::fmt::Display| {
        Problem::unavailable("can't ask the lab's relay", format!("{}: {error}", path.display()))
            .next("the lab restarts it if it has ended; its log is net/relay.log in the lab's directory")
    };
    let mut stream = UnixStream::connect(&path).map_err(|e| fail(&e))?;
    stream.set_read_timeout(Some(ASK_TIMEOUT)).map_err(|e| fail(&e))?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).map_err(|e| fail(&e))?;
    let state: RelayState = serde_json::from_slice(&answer).map_err(|e| fail(&e))?;
    match state.problem {
        Some(problem) => Err(problem),
        None => Ok(state),
    }
}
