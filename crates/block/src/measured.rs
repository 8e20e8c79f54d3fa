//! Counts and traces requests, as a wrapper around the device that does the work.
//!
//! Each connection has its own [`Measured`]. Requests that have to wait are measured one by one. Requests
//! that are answered at once are counted in batches, because reading the clock twice for each would take
//! longer than most of them; one of [`SAMPLE`] of them is traced, and counts as [`SAMPLE`] requests in the
//! histograms. If a client follows the volume's trace, every request is traced.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_model::{Incarnation, LayerId};

use crate::device::{Device, Extent, IoError, OriginRun, Zeroing};
use crate::held_back::HELD_BACK;
use crate::lease::{LeaseAnswer, LeaseAsk};
use crate::stats::{BatchCounts, Counters, Kind};
use crate::switch::Switch;
use crate::trace::{self, Ended, Span, Stage};

/// One of this many requests that are answered at once is traced.
pub const SAMPLE: u32 = 64;

/// A device whose requests are counted for its volume, on behalf of one connection.
pub struct Measured {
    device: Arc<Switch>,
    counters: Arc<Counters>,
    /// Requests that were tried at once, whether they were answered or not.
    tried: Count,
    reads: Count,
    read_bytes: Count,
    writes: Count,
    write_bytes: Count,
}

/// A number that only the connection's own task changes, so it needs no atomic addition.
#[derive(Default)]
struct Count(AtomicU64);

impl Count {
    /// The new value.
    fn add(&self, more: usize) -> u64 {
        let value = self.0.load(Ordering::Relaxed).wrapping_add(more as u64);
        self.0.store(value, Ordering::Relaxed);
        value
    }

    fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// A request to the device.
#[derive(Clone, Copy)]
struct Asked {
    command: &'static str,
    kind: Option<Kind>,
    offset: u64,
    length_bytes: u64,
    /// The payload of a write.
    payload_bytes: usize,
}

impl Asked {
    /// A request that is not counted.
    fn new(command: &'static str, offset: u64, length_bytes: u64) -> Self {
        Self { command, kind: None, offset, length_bytes, payload_bytes: 0 }
    }

    fn of(self, kind: Kind) -> Self {
        Self { kind: Some(kind), ..self }
    }

    fn ended<T>(self, at_once: bool, result: &Result<T, IoError>) -> Ended {
        let Self { command, offset, length_bytes, .. } = self;
        let error = result.as_ref().err().map(ToString::to_string);
        Ended { command, offset, length_bytes, at_once, error }
    }
}

impl Measured {
    /// Counts the requests of one connection to `device` in `counters`, which are those of its volume.
    pub fn new(device: Arc<Switch>, counters: Arc<Counters>) -> Self {
        let (tried, reads, read_bytes, writes, write_bytes) = Default::default();
        Self { device, counters, tried, reads, read_bytes, writes, write_bytes }
    }

    /// Begins a batch of requests that are tried at once, one after the other, until [`Self::end_batch`].
    pub fn begin_batch(&self) -> Instant {
        self.counters.begin_batch()
    }

    /// Counts the requests that were answered at once since `begun`.
    pub fn end_batch(&self, begun: Instant) {
        let counts = BatchCounts {
            reads: self.reads.take(),
            read_bytes: self.read_bytes.take(),
            writes: self.writes.take(),
            write_bytes: self.write_bytes.take(),
        };
        self.counters.end_batch(begun, &counts);
    }

    /// As [`Device::try_read`], for one request of `length` bytes. `work` reads them, possibly in pieces.
    pub fn try_read_into(
        &self,
        offset: u64,
        length: usize,
        work: impl FnOnce(&dyn Device) -> Option<Result<(), IoError>>,
    ) -> Option<Result<(), IoError>> {
        if self.counters.tracing.is_due(Instant::now()) {
            // Its answer is held back, so the caller has to wait for it.
            return None;
        }
        let asked = Asked::new("read", offset, length as u64);
        let result = self.at_once(asked, || self.device.at_once(work));
        if let Some(Ok(())) = result {
            self.reads.add(1);
            self.read_bytes.add(length);
        }
        result
    }

    fn at_once(
        &self,
        asked: Asked,
        work: impl FnOnce() -> Option<Result<(), IoError>>,
    ) -> Option<Result<(), IoError>> {
        let sampled = self.tried.add(1).is_multiple_of(SAMPLE.into());
        if !sampled && !self.counters.tracing.is_followed() {
            return work();
        }
        let span = Span::new(Instant::now());
        let result = span.enter(work)?;
        let weight = if sampled { SAMPLE } else { 0 };
        self.counters.tracing.end(&span, asked.ended(true, &result), weight);
        Some(result)
    }

    /// `read_bytes` returns the number of the result's bytes to count.
    async fn follow<T>(
        &self,
        asked: Asked,
        read_bytes: impl FnOnce(&T) -> usize,
        work: impl Future<Output = Result<T, IoError>>,
    ) -> Result<T, IoError> {
        let queued = trace::queued_since();
        let since = queued.unwrap_or_else(Instant::now);
        let mut timer = asked.kind.map(|kind| self.counters.time(kind, since));
        let span = Span::new(since);
        if queued.is_some() {
            span.add(Stage::Queue, since);
        }
        let result = span.follow(work).await;
        if let (Some(timer), Ok(value)) = (&mut timer, &result) {
            timer.carried(asked.payload_bytes + read_bytes(value));
        }
        drop(timer);
        if matches!(asked.kind, Some(Kind::Read)) && self.counters.tracing.holds(since) {
            span.held.store(true, Ordering::Relaxed);
            tokio::time::sleep(HELD_BACK).await;
        }
        self.counters.tracing.end(&span, asked.ended(false, &result), 1);
        result
    }

    async fn change(
        &self,
        asked: Asked,
        work: impl Future<Output = Result<(), IoError>>,
    ) -> Result<(), IoError> {
        let result = self.follow(asked, |()| 0, work).await;
        self.counters.note(&result);
        result
    }
}

impl Device for Measured {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn layer(&self) -> Option<LayerId> {
        self.device.layer()
    }

    fn incarnation(&self) -> Option<Incarnation> {
        self.device.incarnation()
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        let asked = Asked::new("read", offset, length_bytes.into()).of(Kind::Read);
        let bytes = self.device.run(move |device| device.read(offset, length_bytes));
        Box::pin(self.follow(asked, Bytes::len, bytes))
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        let length = buffer.len();
        self.try_read_into(offset, length, |device| device.try_read(offset, buffer))
    }

    fn try_write(&self, offset: u64, data: &[u8]) -> Option<Result<(), IoError>> {
        let asked = Asked::new("write", offset, data.len() as u64);
        let result =
            self.at_once(asked, || self.device.at_once(|device| device.try_write(offset, data)))?;
        if result.is_ok() {
            self.writes.add(1);
            self.write_bytes.add(data.len());
        }
        self.counters.note(&result);
        Some(result)
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>> {
        let payload_bytes = data.len();
        let asked = Asked::new("write", offset, payload_bytes as u64).of(Kind::Write);
        let asked = Asked { payload_bytes, ..asked };
        let done = self.device.run(move |device| device.write(offset, data.clone(), fua));
        Box::pin(self.change(asked, done))
    }

    fn zero(
        &self,
        offset: u64,
        length_bytes: u64,
        how: Zeroing,
        fua: bool,
    ) -> BoxFuture<'_, Result<(), IoError>> {
        let asked = Asked::new("zero", offset, length_bytes).of(Kind::Write);
        let done = self.device.run(move |device| device.zero(offset, length_bytes, how, fua));
        Box::pin(self.change(asked, done))
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        let asked = Asked::new("flush", 0, 0).of(Kind::Flush);
        Box::pin(self.change(asked, self.device.run(|device| device.flush())))
    }

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        let asked = Asked::new("status", offset, length_bytes);
        let told = self.device.run(move |device| device.extents(offset, length_bytes));
        Box::pin(self.follow(asked, |_| 0, told))
    }

    fn origins(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<OriginRun>, IoError>> {
        let asked = Asked::new("status", offset, length_bytes);
        let told = self.device.run(move |device| device.origins(offset, length_bytes));
        Box::pin(self.follow(asked, |_| 0, told))
    }

    fn prefetch(&self, offset: u64, length_bytes: u64) -> BoxFuture<'_, Result<(), IoError>> {
        let asked = Asked::new("cache", offset, length_bytes);
        let done = self.device.run(move |device| device.prefetch(offset, length_bytes));
        Box::pin(self.follow(asked, |()| 0, done))
    }

    /// It is no request: it may take seconds, and a change of the device does not wait for it.
    fn lease(&self, ask: LeaseAsk) -> BoxFuture<'_, Result<LeaseAnswer, IoError>> {
        let device = self.device.present();
        Box::pin(async move { device.lease(ask).await })
    }

    fn hang_up(&self) {
        self.device.hang_up();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use perigee_model::Epoch;
    use perigee_model::trace::{HELD_BACK_US, TraceRecord, read_trace};
    use perigee_model::volume::CollectTrace;

    use super::*;

    /// Reads below offset 4096 succeed at once, others wait. Writes are refused because of the epoch.
    struct Half;

    impl Device for Half {
        fn size_bytes(&self) -> u64 {
            8192
        }

        fn read(&self, _: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
            Box::pin(async move { Ok(vec![7; length_bytes as usize].into()) })
        }

        fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
            buffer.fill(7);
            (offset < 4096).then_some(Ok(()))
        }

        fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
            Box::pin(async { Err(IoError::Fenced { session: Epoch(1), volume: Epoch(2) }) })
        }

        fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
            Box::pin(async { Ok(()) })
        }

        fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
            Box::pin(async { Ok(()) })
        }

        fn extents(&self, _: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
            Box::pin(async { Ok(Vec::new()) })
        }
    }

    fn measured() -> (Measured, Arc<Counters>) {
        let counters = Arc::<Counters>::default();
        (Measured::new(Switch::new(Arc::new(Half)), Arc::clone(&counters)), counters)
    }

    #[test]
    fn what_is_answered_at_once_counts_when_its_batch_ends() {
        let (device, counters) = measured();
        let begun = device.begin_batch();
        let mut buffer = [0; 512];
        assert!(matches!(device.try_read(0, &mut buffer), Some(Ok(()))));
        assert!(matches!(device.try_read(512, &mut buffer), Some(Ok(()))));
        assert!(device.try_read(4096, &mut buffer).is_none());
        assert!(device.try_write(0, &buffer).is_none());
        assert_eq!(counters.snapshot().reads, 0);
        device.end_batch(begun);
        let stats = counters.snapshot();
        assert_eq!((stats.reads, stats.read_bytes, stats.writes), (2, 1024, 0));
    }

    /// Whether an answer of a traced volume is held back within this time.
    async fn is_held(hold_back: bool, at_most: Duration) -> bool {
        let table = crate::stats::StatsTable::default();
        let (name, volume) = ("job".parse().unwrap(), "a".parse().unwrap());
        let hold_back = if hold_back { vec!["a".parse().unwrap()] } else { vec![] };
        let ask = CollectTrace { volumes: vec!["a".parse().unwrap()], hold_back };
        table.collect_trace(&name, &ask).unwrap();
        let device = Measured::new(Switch::new(Arc::new(Half)), table.of(&volume));
        let begun = Instant::now();
        while begun.elapsed() < at_most {
            for _ in 0..200 {
                if device.try_read(0, &mut [0; 512]).is_none() {
                    device.read(0, 512).await.expect("bytes");
                }
            }
            let records = read_trace(&table.collections.get(&name).unwrap()).unwrap();
            let mut requests = records.iter().filter_map(|record| match record {
                TraceRecord::Request(request) => Some(request),
                TraceRecord::Client(_) => None,
            });
            if let Some(held) = requests.find(|request| request.served.held) {
                assert!(held.duration_us >= HELD_BACK_US && !held.served.at_once);
                return true;
            }
        }
        false
    }

    #[tokio::test]
    async fn a_few_answers_are_held_back_where_that_is_asked_for() {
        assert!(is_held(true, Duration::from_secs(60)).await);
        assert!(!is_held(false, Duration::from_millis(300)).await);
    }

    #[tokio::test]
    async fn what_waits_counts_by_itself_from_when_it_was_taken() {
        let (device, counters) = measured();
        let mut follower = counters.tracing.follow();
        let taken = Instant::now();
        std::thread::sleep(std::time::Duration::from_millis(2));
        trace::queued(taken, async {
            device.read(4096, 512).await.expect("bytes");
            device.flush().await.expect("a flush");
        })
        .await;
        let stats = counters.snapshot();
        assert_eq!((stats.reads, stats.read_bytes, stats.flushes), (1, 512, 1));
        assert!(stats.read_ns >= 2_000_000 && stats.busy_ns >= 2_000_000, "{stats:?}");
        let read = follower.try_recv().expect("the read");
        assert_eq!((read.command.as_str(), read.offset, read.length_bytes), ("read", 4096, 512));
        let [queue] = &read.stages[..] else { panic!("{read:?}") };
        assert!(queue.stage == "queue" && queue.ns >= 2_000_000);
        // The wait was the first one's.
        assert_eq!(follower.try_recv().expect("the flush").stages, []);
    }

    #[tokio::test]
    async fn a_write_of_another_epoch_counts_as_fenced() {
        let (device, counters) = measured();
        assert!(device.write(0, Bytes::from_static(b"late"), false).await.is_err());
        let stats = counters.snapshot();
        assert_eq!((stats.fenced, stats.writes, stats.write_bytes), (1, 1, 0));
    }
}
