//! The I/O figures of each volume, as documented at [`IoStats`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::volume::{CollectTrace, ExportStats, IoStats, TraceSummary};
use perigee_model::{JobId, Problem, VolumeName};

use crate::collection::Collections;
use crate::device::IoError;
use crate::recording::Recording;
use crate::trace::Tracing;

/// The counters of every volume that was opened since the server started.
#[derive(Default)]
pub struct StatsTable {
    volumes: Mutex<BTreeMap<VolumeName, Arc<Counters>>>,
    recording: Recording,
    /// Traces that are kept in memory.
    pub collections: Collections,
}

impl StatsTable {
    /// The counters of a volume. The first call for a volume makes them, all zero.
    pub fn of(&self, volume: &VolumeName) -> Arc<Counters> {
        let mut volumes = lock(&self.volumes);
        let counters = volumes.entry(volume.clone()).or_insert_with(|| {
            let counters = Counters::default();
            counters.tracing.record(self.recording.recorder(volume));
            Arc::new(counters)
        });
        Arc::clone(counters)
    }

    /// Records the requests of all volumes from now on.
    ///
    /// # Errors
    /// As [`Recording::start`].
    pub fn start_trace(&self, file: PathBuf) -> Result<(), Problem> {
        let volumes = lock(&self.volumes);
        self.recording.start(file)?;
        for (volume, counters) in &*volumes {
            counters.tracing.record(self.recording.recorder(volume));
        }
        Ok(())
    }

    /// Waits until the file is written.
    ///
    /// # Errors
    /// As [`Recording::stop`].
    pub fn stop_trace(&self) -> Result<TraceSummary, Problem> {
        let volumes = lock(&self.volumes);
        volumes.values().for_each(|counters| counters.tracing.record(None));
        self.recording.stop()
    }

    /// Collects the requests of some volumes in memory from now on.
    ///
    /// # Errors
    /// As [`Collections::start`].
    pub fn collect_trace(&self, name: &JobId, ask: &CollectTrace) -> Result<(), Problem> {
        for (volume, collector) in self.collections.start(name, ask)? {
            self.of(&volume).tracing.collect(collector);
        }
        Ok(())
    }

    /// The figures of every volume at this moment, by volume name.
    pub fn list(&self) -> Vec<ExportStats> {
        lock(&self.volumes)
            .iter()
            .map(|(volume, counters)| ExportStats {
                volume: volume.clone(),
                stats: counters.snapshot(),
            })
            .collect()
    }

    /// The counters of every volume, by volume name.
    pub fn all(&self) -> Vec<(VolumeName, Arc<Counters>)> {
        let volumes = lock(&self.volumes);
        volumes.iter().map(|(volume, counters)| (volume.clone(), Arc::clone(counters))).collect()
    }

    /// Removes a deleted volume's figures. A new volume with the same name starts from zero.
    pub fn forget(&self, volume: &VolumeName) {
        if let Some(counters) = lock(&self.volumes).remove(volume) {
            counters.tracing.record(None);
        }
    }
}

/// The counters of one volume.
#[derive(Default)]
pub struct Counters {
    reads: Class,
    writes: Class,
    flushes: Class,
    busy: Busy,
    /// Requests to another host on behalf of the volume.
    network: Class,
    network_busy: Busy,
    network_saved_bytes: AtomicU64,
    replica_reads: AtomicU64,
    fenced: AtomicU64,
    /// The stages of the volume's requests, and who follows them.
    pub tracing: Tracing,
}

impl Counters {
    /// Times a request that began at `started`.
    pub fn time(self: &Arc<Self>, kind: Kind, started: Instant) -> Timer {
        self.busy(kind).begin(started);
        Timer { counters: Arc::clone(self), kind, started, bytes: 0 }
    }

    fn class(&self, kind: Kind) -> &Class {
        match kind {
            Kind::Read => &self.reads,
            Kind::Write => &self.writes,
            Kind::Flush => &self.flushes,
            Kind::Network => &self.network,
        }
    }

    fn busy(&self, kind: Kind) -> &Busy {
        match kind {
            Kind::Read | Kind::Write | Kind::Flush => &self.busy,
            Kind::Network => &self.network_busy,
        }
    }

    /// Begins a batch of requests that are answered at once, one after the other.
    pub(crate) fn begin_batch(&self) -> Instant {
        let now = Instant::now();
        self.busy.begin(now);
        now
    }

    /// Counts a batch. Its time is divided evenly among its requests, because reading the clock for each
    /// would take longer than most of them.
    pub(crate) fn end_batch(&self, started: Instant, counts: &BatchCounts) {
        let now = Instant::now();
        let requests = counts.reads + counts.writes;
        if requests == 0 {
            return self.busy.forget();
        }
        self.busy.end(now);
        let elapsed_ns = nanoseconds(now.saturating_duration_since(started));
        let read_ns = elapsed_ns * counts.reads / requests;
        self.reads.add(counts.reads, counts.read_bytes, read_ns);
        self.writes.add(counts.writes, counts.write_bytes, elapsed_ns - read_ns);
    }

    /// The figures at this moment. They are read one after the other, so a request that ends meanwhile may be in
    /// some of them only.
    pub fn snapshot(&self) -> IoStats {
        IoStats {
            reads: get(&self.reads.requests),
            read_bytes: get(&self.reads.bytes),
            read_ns: get(&self.reads.latency_ns),
            writes: get(&self.writes.requests),
            write_bytes: get(&self.writes.bytes),
            write_ns: get(&self.writes.latency_ns),
            flushes: get(&self.flushes.requests),
            flush_ns: get(&self.flushes.latency_ns),
            busy_ns: self.busy.total_ns(),
            network_requests: get(&self.network.requests),
            network_ns: get(&self.network.latency_ns),
            network_busy_ns: self.network_busy.total_ns(),
            network_bytes: get(&self.network.bytes),
            network_saved_bytes: get(&self.network_saved_bytes),
            replica_reads: get(&self.replica_reads),
            fenced: get(&self.fenced),
        }
    }

    /// Counts bytes that compression has kept off the network.
    pub fn saved(&self, bytes: u64) {
        self.network_saved_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a read of another host's volume that was answered from a layer here.
    pub fn read_from_replica(&self) {
        self.replica_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a change that was refused because another writer has the volume.
    pub(crate) fn note(&self, result: &Result<(), IoError>) {
        if let Err(IoError::Fenced { .. } | IoError::Refused(_)) = result {
            self.fenced.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Requests of one kind.
#[derive(Default)]
struct Class {
    requests: AtomicU64,
    bytes: AtomicU64,
    latency_ns: AtomicU64,
}

impl Class {
    fn add(&self, requests: u64, bytes: u64, latency_ns: u64) {
        if requests > 0 {
            self.requests.fetch_add(requests, Ordering::Relaxed);
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.latency_ns.fetch_add(latency_ns, Ordering::Relaxed);
        }
    }
}

/// The time during which at least one request was in flight.
#[derive(Default)]
struct Busy(Mutex<BusyState>);

#[derive(Default)]
struct BusyState {
    in_flight: u32,
    /// The start of the current period, in which `in_flight` is not 0.
    since: Option<Instant>,
    /// When the last period ended.
    ended: Option<Instant>,
    ended_ns: u64,
}

impl Busy {
    /// Begins a request at a moment that may be in the past. No time is counted twice.
    fn begin(&self, since: Instant) {
        let mut state = lock(&self.0);
        if state.in_flight == 0 {
            state.since = Some(state.ended.map_or(since, |ended| ended.max(since)));
        }
        state.in_flight += 1;
    }

    fn end(&self, now: Instant) {
        let mut state = lock(&self.0);
        state.in_flight -= 1;
        if state.in_flight == 0
            && let Some(since) = state.since.take()
        {
            state.ended_ns += nanoseconds(now.saturating_duration_since(since));
            state.ended = Some(now);
        }
    }

    /// Ends an entry that was not a request after all.
    fn forget(&self) {
        let mut state = lock(&self.0);
        state.in_flight -= 1;
        if state.in_flight == 0 {
            state.since = None;
        }
    }

    fn total_ns(&self) -> u64 {
        let state = lock(&self.0);
        state.ended_ns + state.since.map_or(0, |since| nanoseconds(since.elapsed()))
    }
}

/// The kind as which a request is counted.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A read by a client of the volume. Its bytes are those it got.
    Read,
    /// Includes trims and zeroes, which carry no bytes.
    Write,
    /// A flush by a client of the volume, without bytes.
    Flush,
    /// A request to another host on behalf of the volume.
    Network,
}

/// One request in flight. It is counted when this is dropped, however the request ended.
pub struct Timer {
    counters: Arc<Counters>,
    kind: Kind,
    started: Instant,
    bytes: u64,
}

impl Timer {
    /// Adds bytes of payload.
    pub fn carried(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let now = Instant::now();
        self.counters.busy(self.kind).end(now);
        let latency_ns = nanoseconds(now.saturating_duration_since(self.started));
        self.counters.class(self.kind).add(1, self.bytes, latency_ns);
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Ignores poisoning: the figures are consistent at every step, so counting goes on after a panic elsewhere.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The counts of one batch of requests that were answered at once.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct BatchCounts {
    /// Reads without an error.
    pub reads: u64,
    /// The bytes that they got.
    pub read_bytes: u64,
    /// Writes without an error.
    pub writes: u64,
    /// The bytes that they carried.
    pub write_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_requests_are_busy_once() {
        let busy = Busy::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        busy.begin(at(0));
        busy.begin(at(10));
        busy.end(at(20));
        busy.end(at(30));
        busy.begin(at(50));
        busy.end(at(55));
        assert_eq!(busy.total_ns(), 35_000_000);
        // It was taken while the one before it was in flight.
        busy.begin(at(52));
        busy.end(at(60));
        assert_eq!(busy.total_ns(), 40_000_000);
    }

    #[test]
    fn a_request_in_flight_counts_as_busy_already() {
        let counters = Arc::new(Counters::default());
        let _timer = counters.time(Kind::Network, Instant::now());
        std::thread::sleep(Duration::from_millis(2));
        let stats = counters.snapshot();
        assert!(stats.network_busy_ns >= 2_000_000);
        assert_eq!(stats.network_requests, 0);
    }
}
