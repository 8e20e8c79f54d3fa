//! Predicts a run at another distance from its data by replaying its block trace.
//!
//! The trace has the times at which each request arrived and was answered. It does not say which answer a
//! request waited for, so rules decide. They were found by replaying traces of eight workloads, recorded at 0
//! to 16 ms, and comparing with runs at the other distances (median error of the time 6 %; above 29 % in 1 of
//! 10 cases). In the rules, small letters are times of the trace and capitals are times of the replay; `t` is a
//! request's time and `d` its answer's:
//!
//! - A read that starts where another one ended is the next *window* of a stream that the guest reads ahead.
//!   The guest issues it when the reader reaches the window before it, `p`, and so has used up the window
//!   before that, `pp`. `p` itself may still be in flight:
//!   `T = max(T_p, D_pp) + t - max(t_p, d_pp)`.
//! - Every other request waits for the latest earlier answer that was demanded, `w`: `T >= D_w + t - d_w`.
//!   Demanded are: reads that are no windows, windows that the reader has reached, and flushes. Only writes and
//!   flushes wait for writes, because for a reader the guest's page cache takes a write at once.
//! - One thread does one thing after another: `T >= T_before + t - max(t_before, d_w)`. While such a thread
//!   waits for a read it issues no window. If windows are issued during demanded reads as often as by chance,
//!   the workload has several threads, and this rule does not apply.
//!
//! Only the times of the trace decide which request waits for which. So every simulated time is a sum and a
//! maximum of latencies.
//!
//! Far from its data the VM's reads go through the proxy of its host, which reads ahead and keeps what was read.
//! The replay makes that proxy's own decisions (`proxy.rs`): a read from memory takes as long as at the home, and a
//! read of what is on its way waits for it.
//!
//! The replay is for longer distances than that of the trace. For shorter ones the counters are better, because
//! the trace does not show how long the reader would have waited for a window at home.
//!
//! A local trace hides how many requests a job keeps in flight: each is answered before the next one is sent,
//! so they are replayed one after the other, and the predicted time is too long. So the volume server holds back a few
//! answers while it traces, which shows how many requests are in flight (`held_back.rs`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use serde::{Deserialize, Serialize};

use proxy::{Memory, Proxy};

mod held_back;
mod proxy;

/// Linux's smallest read-ahead window. Shorter sequential reads are a program's own, and it waits for each.
const WINDOW_BYTES_MIN: u32 = 16 << 10;

/// With fewer windows nothing is concluded about the number of threads.
const WINDOWS_MIN: usize = 20;
/// The workload has several threads if windows are issued during demanded reads more often than this share of
/// the number expected by chance.
const BY_CHANCE: f64 = 0.5;

/// The round trip of a WAN. Round trips are counted at this one distance, because at longer distances fewer of
/// them overlap with other work.
const PROBED_ROUND_TRIP_US: f64 = 16_000.0;
/// The link of 1 Gbit/s at which the waiting for bytes is counted.
const PROBED_US_PER_BYTE: f64 = 0.008;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It may be a read-ahead window; otherwise the program waits for it.
    Read,
    /// A write or write-zeroes. Only writes and flushes wait for it.
    Write,
    /// The program waits for it.
    Flush,
}

/// One request to one of a VM's disks. Times are relative to the command's start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// The disk's number from 0, which is its client number in the trace.
    pub disk: u16,
    /// The kind decides which requests wait for which.
    pub kind: Kind,
    /// The first byte on the disk.
    pub offset: u64,
    /// The bytes read, written or zeroed; 0 for a flush.
    pub length_bytes: u32,
    /// When it arrived.
    pub at_us: f64,
    /// When it was answered; at least `at_us`.
    pub answered_us: f64,
    /// The part of its time for which its answer was held back.
    pub held_us: f64,
}

/// The network path from the VM to one disk.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Way {
    /// How much longer each request takes than at the disk's home; 0 at the home.
    pub round_trip_us: f64,
    /// The time of each byte on the link; requests share the link one after the other.
    pub us_per_byte: f64,
    /// Whether the host's proxy reads ahead and keeps what was read.
    pub through_proxy: bool,
}

impl Way {
    /// The path to a disk whose home is another host.
    fn far(us_per_byte: f64) -> Self {
        Self { round_trip_us: PROBED_ROUND_TRIP_US, us_per_byte, through_proxy: true }
    }

    fn is_far(&self) -> bool {
        self.round_trip_us > 0.0 || self.us_per_byte > 0.0
    }
}

/// What a replay shows about the job far from its data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Replayed {
    /// The dependent round trips: how many seconds the command takes longer for each second of round trip.
    pub round_trips: f64,
    /// The bytes for which the command waits on a link of 1 Gbit/s, beside the round trips.
    pub waited_bytes: f64,
    /// The bytes that the link carries, with those that are read ahead for nothing.
    pub sent_bytes: f64,
    /// How many reads the command keeps in flight together; `None` if no answers were held back.
    pub depth: Option<f64>,
    /// The number of reads whose answers were held back.
    pub held: u64,
    /// The number of all requests.
    pub requests: u64,
}

/// A trace, with the dependencies between its requests.
#[derive(Debug, Clone)]
pub struct Replay {
    steps: Vec<Step>,
    several_threads: bool,
    /// The requests that the command's end waited for.
    end: Cause,
    end_us: f64,
    end_worked_us: f64,
    /// As in [`Replayed`].
    depth: Option<f64>,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    request: Request,
    cause: Cause,
    /// The time that a single thread worked after the request before this one and its answer.
    worked_us: f64,
}

#[derive(Debug, Clone, Copy)]
enum Cause {
    /// A window, with its `p` and `pp`.
    Window { reached: usize, used: usize },
    /// The answer that it waited for; `None` at the beginning.
    Answer(Option<usize>),
}

impl Replay {
    /// Finds the dependencies. `requests` are in the order of their arrival; the command ended at `end_us`.
    pub fn new(requests: &[Request], end_us: f64) -> Self {
        let mut tracer = Tracer::default();
        let mut steps = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let cause = tracer.cause(requests, index);
            let worked_us = tracer.worked_us(requests, index, request.at_us);
            steps.push(Step { request: *request, cause, worked_us });
        }
        tracer.reach_last_windows(requests);
        tracer.answered_until(requests, end_us);
        let end = Cause::Answer(tracer.latest_read.max(requests, tracer.latest_demand).0);
        let end_worked_us = tracer.worked_us(requests, requests.len(), end_us);
        let depth = held_back::depth(&steps);
        let several_readers =
            depth.is_some_and(|depth| held_back::read_together(&mut steps, depth));
        let several_threads = several_readers || tracer.several_threads(end_us);
        Self { steps, several_threads, end, end_us, end_worked_us, depth }
    }

    /// Whether windows were issued while the program waited for other reads.
    pub fn has_several_threads(&self) -> bool {
        self.several_threads
    }

    /// The command's seconds if each disk has another path than in the trace. Both lists are indexed by the
    /// disk's number.
    pub fn through(&self, traced: &[Way], wanted: &[Way]) -> f64 {
        self.run(traced, wanted).0
    }

    /// The same, and the bytes over all links.
    fn run(&self, traced: &[Way], wanted: &[Way]) -> (f64, f64) {
        let mut times: Vec<(f64, f64)> = Vec::with_capacity(self.steps.len());
        let mut memory = Memory::default();
        let mut proxies: Vec<Option<Proxy>> =
            wanted.iter().map(|way| way.is_far().then(|| Proxy::new(*way))).collect();
        let after = |times: &[(f64, f64)], worked_us: f64| match times.last() {
            Some((before_us, _)) if !self.several_threads => before_us + worked_us,
            _ => f64::NEG_INFINITY,
        };
        for Step { request, cause, worked_us } in &self.steps {
            let at_us = self.time_of(*cause, request.at_us, &times).max(after(&times, *worked_us));
            let disk = usize::from(request.disk);
            let was = traced.get(disk).copied().unwrap_or_default();
            let bytes = f64::from(request.length_bytes);
            let own_us = request.answered_us - request.at_us - request.held_us;
            let own_us = (own_us - was.round_trip_us - was.us_per_byte * bytes).max(0.0);
            let answered_us = match (proxies.get_mut(disk).and_then(Option::as_mut), request.kind) {
                (None, _) => at_us + own_us,
                (Some(proxy), Kind::Read) => proxy.read(&mut memory, request, at_us, own_us),
                (Some(proxy), Kind::Write) => proxy.write(&mut memory, request, at_us, own_us),
                (Some(proxy), Kind::Flush) => proxy.ask(0.0, at_us, own_us),
            };
            times.push((at_us, answered_us));
        }
        let end_us = self.time_of(self.end, self.end_us, &times);
        let sent_bytes = proxies.iter().flatten().map(|proxy| proxy.sent_bytes).sum();
        (end_us.max(after(&times, self.end_worked_us)) / 1e6, sent_bytes)
    }

    /// What the command would wait for if the disks of `data` were far away. They were local in the trace.
    pub fn far(&self, data: &[bool]) -> Replayed {
        let ways = |way: Way| -> Vec<Way> {
            data.iter().map(|is_data| if *is_data { way } else { Way::default() }).collect()
        };
        let (seconds, sent_bytes) = self.run(&[], &ways(Way::far(0.0)));
        let thinner_s = self.through(&[], &ways(Way::far(PROBED_US_PER_BYTE)));
        // Of a trace in which answers were held back, a replay at home shows how long it takes without that.
        let home_s = if self.depth.is_some() { self.through(&[], &[]) } else { self.end_us / 1e6 };
        let longer_s = seconds - home_s;
        let waited_bytes = (thinner_s - seconds).max(0.0) * 1e6 / PROBED_US_PER_BYTE;
        Replayed {
            round_trips: longer_s.max(0.0) / (PROBED_ROUND_TRIP_US / 1e6),
            waited_bytes: waited_bytes.min(sent_bytes),
            sent_bytes,
            depth: self.depth,
            held: self.steps.iter().filter(|step| step.request.held_us > 0.0).count() as u64,
            requests: self.steps.len() as u64,
        }
    }

    /// The time in the replay of an event that happened at `traced_us` in the trace.
    fn time_of(&self, cause: Cause, traced_us: f64, times: &[(f64, f64)]) -> f64 {
        let traced = |index: usize| &self.steps[index].request;
        match cause {
            Cause::Window { reached, used } => {
                let (at_us, used_us) = (traced(reached).at_us, traced(used).answered_us);
                // A window that was issued before that answer did not wait for it.
                if used_us > traced_us {
                    return times[reached].0 + traced_us - at_us;
                }
                times[reached].0.max(times[used].1) + traced_us - at_us.max(used_us)
            }
            Cause::Answer(Some(index)) => times[index].1 + traced_us - traced(index).answered_us,
            Cause::Answer(None) => traced_us,
        }
    }
}

/// The request that was answered last.
#[derive(Debug, Clone, Copy, Default)]
struct Latest(Option<usize>);

impl Latest {
    fn max(self, requests: &[Request], other: Self) -> Self {
        let answered_us = |index: usize| requests[index].answered_us;
        match (self.0, other.0) {
            (Some(a), Some(b)) if answered_us(b) >= answered_us(a) => other,
            (None, _) => other,
            _ => self,
        }
    }

    fn see(&mut self, requests: &[Request], index: usize) {
        *self = self.max(requests, Self(Some(index)));
    }
}

/// A window of a stream, and the one before it.
#[derive(Debug, Clone, Copy)]
struct Window {
    index: usize,
    before: Option<usize>,
}

/// Processes the trace once. It keeps the requests that are in flight, and one window for each stream.
#[derive(Debug, Default)]
struct Tracer {
    /// By disk and by the offset at which the next window would start.
    streams: HashMap<(u16, u64), Window>,
    /// Requests in flight: when each is answered (as [`ticks`]), and its index.
    in_flight: BinaryHeap<Reverse<(u64, usize)>>,
    /// The latest demanded answers: of reads and flushes, and of all requests.
    latest_read: Latest,
    latest_demand: Latest,
    /// Until when demanded reads are in flight, for the number of threads.
    demanded_until_us: f64,
    demanded_us: f64,
    windows: usize,
    windows_during_demand: usize,
}

impl Tracer {
    fn cause(&mut self, requests: &[Request], index: usize) -> Cause {
        let request = &requests[index];
        self.answered_until(requests, request.at_us);
        let stream = (request.kind == Kind::Read && request.length_bytes >= WINDOW_BYTES_MIN)
            .then(|| self.streams.remove(&(request.disk, request.offset)))
            .flatten();
        if request.kind == Kind::Read {
            let end = request.offset + u64::from(request.length_bytes);
            let window = Window { index, before: stream.map(|window| window.index) };
            self.streams.insert((request.disk, end), window);
        }
        if let Some(reached) = stream {
            self.windows += 1;
            let other_demand = requests[reached.index].answered_us < self.demanded_until_us
                && request.at_us < self.demanded_until_us;
            self.windows_during_demand += usize::from(other_demand);
            // The reader has reached this window and waits for it.
            self.demand(requests, reached.index, request.at_us);
            let used = reached.before.unwrap_or(reached.index);
            return Cause::Window { reached: reached.index, used };
        }
        let latest = match request.kind {
            Kind::Read => self.latest_read,
            Kind::Write | Kind::Flush => self.latest_demand,
        };
        self.in_flight.push(Reverse((ticks(request.answered_us), index)));
        if request.kind == Kind::Read {
            let from_us = request.at_us.max(self.demanded_until_us);
            self.demanded_us += (request.answered_us - from_us).max(0.0);
            self.demanded_until_us = self.demanded_until_us.max(request.answered_us);
        }
        Cause::Answer(latest.0)
    }

    /// The time since the request before this one and since the latest demanded answer.
    fn worked_us(&self, requests: &[Request], index: usize, at_us: f64) -> f64 {
        let before_us = index.checked_sub(1).map_or(0.0, |before| requests[before].at_us);
        let answered_us = self.latest_demand.0.map_or(0.0, |latest| requests[latest].answered_us);
        (at_us - before_us.max(answered_us)).max(0.0)
    }

    /// The reader waits for a window, which counts as demanded from its answer on.
    fn demand(&mut self, requests: &[Request], index: usize, now_us: f64) {
        if requests[index].answered_us <= now_us {
            self.answered(requests, index);
        } else {
            self.in_flight.push(Reverse((ticks(requests[index].answered_us), index)));
        }
    }

    fn answered(&mut self, requests: &[Request], index: usize) {
        self.latest_demand.see(requests, index);
        if requests[index].kind != Kind::Write {
            self.latest_read.see(requests, index);
        }
    }

    fn answered_until(&mut self, requests: &[Request], now_us: f64) {
        while let Some(Reverse((at, index))) = self.in_flight.peek().copied() {
            if at > ticks(now_us) {
                break;
            }
            self.in_flight.pop();
            self.answered(requests, index);
        }
    }

    /// A stream that ended was read to its end.
    fn reach_last_windows(&mut self, requests: &[Request]) {
        let last: Vec<usize> = self.streams.values().map(|window| window.index).collect();
        for index in last {
            self.in_flight.push(Reverse((ticks(requests[index].answered_us), index)));
        }
    }

    fn several_threads(&self, end_us: f64) -> bool {
        if self.windows < WINDOWS_MIN || end_us <= 0.0 {
            return false;
        }
        let by_chance = self.windows as f64 * self.demanded_us / end_us;
        by_chance >= 1.0 && self.windows_during_demand as f64 >= BY_CHANCE * by_chance
    }
}

/// A positive float as an integer with the same order: its bits.
fn ticks(us: f64) -> u64 {
    us.max(0.0).to_bits()
}

#[cfg(test)]
mod tests;
