//! I/O figures for each volume: what [`IoStats`] documents, counted where the requests pass.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_model::VolumeName;
use perigee_model::volume::{ExportStats, IoStats};

use crate::device::{Device, Extent, IoError, Zeroing};

/// Counters of every volume that was opened since the server started.
#[derive(Default)]
pub struct StatsTable {
    volumes: Mutex<BTreeMap<VolumeName, Arc<Counters>>>,
}

impl StatsTable {
    pub fn of(&self, volume: &VolumeName) -> Arc<Counters> {
        lock(&self.volumes).entry(volume.clone()).or_default().clone()
    }

    pub fn list(&self) -> Vec<ExportStats> {
        lock(&self.volumes)
            .iter()
            .map(|(volume, counters)| ExportStats {
                volume: volume.clone(),
                stats: counters.snapshot(),
            })
            .collect()
    }

    /// A deleted volume's figures go with it; a new one of the same name starts from zero.
    pub fn forget(&self, volume: &VolumeName) {
        lock(&self.volumes).remove(volume);
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
    fenced: AtomicU64,
}

impl Counters {
    /// Times a request to another host.
    pub fn network(&self) -> Timer<'_> {
        Timer::start(&self.network, &self.network_busy)
    }

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
            fenced: get(&self.fenced),
        }
    }

    fn note(&self, result: &Result<(), IoError>) {
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

/// The time during which at least one request was in flight.
#[derive(Default)]
struct Busy(Mutex<BusyState>);

#[derive(Default)]
struct BusyState {
    in_flight: u32,
    /// Of the period that began when `in_flight` left 0.
    since: Option<Instant>,
    ended_ns: u64,
}

impl Busy {
    fn begin(&self, now: Instant) {
        let mut state = lock(&self.0);
        if state.in_flight == 0 {
            state.since = Some(now);
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
        }
    }

    fn total_ns(&self) -> u64 {
        let state = lock(&self.0);
        state.ended_ns + state.since.map_or(0, |since| nanoseconds(since.elapsed()))
    }
}

/// One request in flight. It counts when it is dropped, however the request ended.
pub struct Timer<'a> {
    class: &'a Class,
    busy: &'a Busy,
    started: Instant,
    bytes: u64,
}

impl<'a> Timer<'a> {
    fn start(class: &'a Class, busy: &'a Busy) -> Self {
        let started = Instant::now();
        busy.begin(started);
        Self { class, busy, started, bytes: 0 }
    }

    /// Bytes of payload that were carried.
    pub fn carried(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        self.busy.end(now);
        self.class.requests.fetch_add(1, Ordering::Relaxed);
        self.class.bytes.fetch_add(self.bytes, Ordering::Relaxed);
        let latency_ns = nanoseconds(now.saturating_duration_since(self.started));
        self.class.latency_ns.fetch_add(latency_ns, Ordering::Relaxed);
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device whose requests are counted. Trims and zeroes count as writes that carry no bytes.
pub struct Metered {
    inner: Arc<dyn Device>,
    counters: Arc<Counters>,
}

impl Metered {
    pub fn new(inner: Arc<dyn Device>, counters: Arc<Counters>) -> Self {
        Self { inner, counters }
    }
}

impl Device for Metered {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            let mut timer = Timer::start(&self.counters.reads, &self.counters.busy);
            let data = self.inner.read(offset, length_bytes).await?;
            timer.carried(data.len());
            Ok(data)
        })
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            let mut timer = Timer::start(&self.counters.writes, &self.counters.busy);
            let length = data.len();
            let result = self.inner.write(offset, data, fua).await;
            self.counters.note(&result);
            if result.is_ok() {
                timer.carried(length);
            }
            result
        })
    }

    fn zero(
        &self,
        offset: u64,
        length_bytes: u64,
        how: Zeroing,
        fua: bool,
    ) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            let _timer = Timer::start(&self.counters.writes, &self.counters.busy);
            let result = self.inner.zero(offset, length_bytes, how, fua).await;
            self.counters.note(&result);
            result
        })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            let _timer = Timer::start(&self.counters.flushes, &self.counters.busy);
            self.inner.flush().await
        })
    }

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        self.inner.extents(offset, length_bytes)
    }

    fn hang_up(&self) {
        self.inner.hang_up();
    }
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
    }

    #[test]
    fn a_request_in_flight_counts_as_busy_already() {
        let counters = Counters::default();
        let _timer = counters.network();
        std::thread::sleep(Duration::from_millis(2));
        let stats = counters.snapshot();
        assert!(stats.network_busy_ns >= 2_000_000);
        assert_eq!(stats.network_requests, 0);
    }
}
