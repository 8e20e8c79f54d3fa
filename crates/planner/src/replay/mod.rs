//! What a run would have taken at another distance from its data, by replaying its block trace.
//!
//! The trace says when each request came and when it was answered. Which answer a request waited for
//! is not in it, so a rule decides. It was found by replaying traces of eight workloads, recorded at
//! 0 to 16 ms, against runs at the other distances (median error of the time 6 %, 1 in 10 above
//! 29 %). Small letters are the trace's times and capitals the replay's, `t` of a request and `d` of
//! its answer:
//!
//! - A read that starts where another one ended is the next *window* of a stream that is read ahead.
//!   It is issued when the reader reaches the window before it, `p`, and so has used up the one
//!   before that, `pp`; `p` itself may still be under way:
//!   `T = max(T_p, D_pp) + t - max(t_p, d_pp)`.
//! - Everything else waits for the latest answer before it that somebody demanded, `w`:
//!   `T >= D_w + t - d_w`. Demanded are reads that are no window, windows that the reader has
//!   reached, and flushes; only writes and flushes wait for writes, because the guest's page cache
//!   takes a write and goes on.
//! - One thread of control does one thing after another: `T >= T_before + t - max(t_before, d_w)`,
//!   for what it did since. While such a thread waits for a read it issues no window. Where windows are issued during demanded reads
//!   as often as by chance, there are several threads, and this does not hold.
//!
//! Which request waits for which is decided by the trace's times alone. So every simulated time is a
//! sum and maximum of latencies, and no shorter where these are longer.
//!
//! The replay is for greater distances than the trace's. Toward the data the counters are better: how
//! long a window would have been waited for at home is not in the trace.
//!
//! A local run hides how many requests a job keeps in flight together: each is answered before the
//! next one comes, so they are replayed one after the other. The replay is then too long.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Linux's smallest window of read-ahead. Shorter reads that follow each other are a program's own,
/// each waited for.
const WINDOW_BYTES_MIN: u32 = 16 << 10;

/// Fewer windows say nothing about the number of threads.
const WINDOWS_MIN: usize = 20;
/// There are several threads when windows are issued during demanded reads more often than this
/// share of what chance would do.
const BY_CHANCE: f64 = 0.5;

/// A WAN's. Round trips are counted at one distance: the farther, the more of them nothing hides.
const PROBED_ROUND_TRIP_US: f64 = 16_000.0;

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It may be a window of read-ahead, or somebody waits for it.
    Read,
    /// A write or zeroing. Only writes and flushes wait for it.
    Write,
    /// Somebody waits for it.
    Flush,
}

/// One request to one of a VM's disks. Times count from the command's start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// The disk's number, from 0 on: its client number in the trace.
    pub disk: u16,
    /// Decides what it waits for and who waits for it.
    pub kind: Kind,
    /// The first byte on the disk.
    pub offset: u64,
    /// The bytes read, written or zeroed; 0 for a flush.
    pub length_bytes: u32,
    /// When it came.
    pub at_us: f64,
    /// When it was answered; never before `at_us`.
    pub answered_us: f64,
}

/// The way from the VM to one disk.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Way {
    /// What each request takes longer than at the disk's home; 0 there.
    pub round_trip_us: f64,
    /// What each byte takes on the link, one request after the other.
    pub us_per_byte: f64,
}

/// A trace, and what waits for what in it.
#[derive(Debug, Clone)]
pub struct Replay {
    steps: Vec<Step>,
    several_threads: bool,
    /// For the command's end: the requests that it waited for.
    end: Cause,
    end_us: f64,
    end_worked_us: f64,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    request: Request,
    cause: Cause,
    /// What a single thread did after the request before this one, and after it had its answer.
    worked_us: f64,
}

#[derive(Debug, Clone, Copy)]
enum Cause {
    /// A window, with its `p` and `pp`.
    Window { reached: usize, used: usize },
    /// What was waited for; none at the beginning.
    Answer(Option<usize>),
}

impl Replay {
    /// Finds what waits for what. `requests` come in the order of their arrival; the command ended
    /// at `end_us`.
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
        let several_threads = tracer.several_threads(end_us);
        Self { steps, several_threads, end, end_us, end_worked_us }
    }

    /// Whether windows were issued while something else was waited for.
    pub fn has_several_threads(&self) -> bool {
        self.several_threads
    }

    /// The command's seconds when each disk is reached by another way than when it was traced; both
    /// are by the number of the disk.
    pub fn through(&self, traced: &[Way], wanted: &[Way]) -> f64 {
        let mut times: Vec<(f64, f64)> = Vec::with_capacity(self.steps.len());
        let mut link_free_us = vec![f64::NEG_INFINITY; wanted.len()];
        let after = |times: &[(f64, f64)], worked_us: f64| match times.last() {
            Some((before_us, _)) if !self.several_threads => before_us + worked_us,
            _ => f64::NEG_INFINITY,
        };
        for Step { request, cause, worked_us } in &self.steps {
            let at_us = self.time_of(*cause, request.at_us, &times).max(after(&times, *worked_us));
            let disk = usize::from(request.disk);
            let (was, way) = (way(traced, disk), way(wanted, disk));
            let bytes = f64::from(request.length_bytes);
            let own_us = request.answered_us - request.at_us;
            let own_us = (own_us - was.round_trip_us - was.us_per_byte * bytes).max(0.0);
            let mut answered_us = at_us + own_us + way.round_trip_us;
            if let Some(free_us) = link_free_us.get_mut(disk).filter(|_| way.us_per_byte > 0.0) {
                answered_us = answered_us.max(*free_us) + way.us_per_byte * bytes;
                *free_us = answered_us;
            }
            times.push((at_us, answered_us));
        }
        let end_us = self.time_of(self.end, self.end_us, &times);
        end_us.max(after(&times, self.end_worked_us)) / 1e6
    }

    /// Dependent round trips: what a round trip adds to the time for each of its seconds, when the
    /// disks of `data` are that far away, and were beside the VM.
    pub fn round_trips(&self, data: &[bool]) -> f64 {
        let far = |is_data: &bool| {
            let round_trip_us = if *is_data { PROBED_ROUND_TRIP_US } else { 0.0 };
            Way { round_trip_us, us_per_byte: 0.0 }
        };
        let ways: Vec<Way> = data.iter().map(far).collect();
        (self.through(&[], &ways) - self.end_us / 1e6) / (PROBED_ROUND_TRIP_US / 1e6)
    }

    /// When something happens that happened at `traced_us`.
    fn time_of(&self, cause: Cause, traced_us: f64, times: &[(f64, f64)]) -> f64 {
        let traced = |index: usize| &self.steps[index].request;
        match cause {
            Cause::Window { reached, used } => {
                let (at_us, used_us) = (traced(reached).at_us, traced(used).answered_us);
                // A window that was issued before the other one came did not wait for it.
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

fn way(ways: &[Way], disk: usize) -> Way {
    ways.get(disk).copied().unwrap_or_default()
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

/// Goes through the trace once. What it keeps at a time is what is in flight, and one window for
/// each stream.
#[derive(Debug, Default)]
struct Tracer {
    /// By disk and the offset at which the next window would start.
    streams: HashMap<(u16, u64), Window>,
    /// In flight: when it is answered, in ticks of its bits, and which.
    in_flight: BinaryHeap<Reverse<(u64, usize)>>,
    /// Of answers that were demanded: of reads and flushes, and of everything.
    latest_read: Latest,
    latest_demand: Latest,
    /// Demanded reads in flight until then, for the number of threads.
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
            // The reader has come to this window, and waits for it.
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

    /// Since the request before this one and the latest demanded answer.
    fn worked_us(&self, requests: &[Request], index: usize, at_us: f64) -> f64 {
        let before_us = index.checked_sub(1).map_or(0.0, |before| requests[before].at_us);
        let answered_us = self.latest_demand.0.map_or(0.0, |latest| requests[latest].answered_us);
        (at_us - before_us.max(answered_us)).max(0.0)
    }

    /// Somebody waits for a window; it counts from its answer on.
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

/// Positive floats have the order of their bits.
fn ticks(us: f64) -> u64 {
    us.max(0.0).to_bits()
}

#[cfg(test)]
mod tests;
