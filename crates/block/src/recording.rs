//! A trace of all volumes, written to a file as requests end.
//!
//! Requests only put a record into a queue, which a separate thread writes to the file. Records that come
//! faster than it can write are dropped and counted, so a trace never delays a client.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use perigee_model::trace::{
    Operation, Served, TRACE_MAGIC, TraceClient, TraceRecord, TraceRequest,
};
use perigee_model::volume::{StartTrace, TraceSummary};
use perigee_model::{Problem, VolumeName};

use crate::trace::{Ended, Span, Stage};

/// The most records that wait to be written.
const QUEUE_RECORDS: usize = 1 << 16;

/// Puts one client's requests into the trace.
#[derive(Clone)]
pub struct Recorder {
    client: u16,
    queue: Arc<Queue>,
}

struct Queue {
    started: Instant,
    records: SyncSender<TraceRecord>,
    lost: AtomicU64,
}

impl Queue {
    fn push(&self, record: TraceRecord) {
        if self.records.try_send(record).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn since_start_ns(&self, at: Instant) -> u64 {
        since_ns(self.started, at)
    }
}

impl Recorder {
    pub fn record(&self, span: &Span, ended: &Ended) {
        let request = request_of(self.client, self.queue.started, span, ended);
        self.queue.push(TraceRecord::Request(request));
    }
}

/// A request as a trace has it that began at `started`.
pub fn request_of(client: u16, started: Instant, span: &Span, ended: &Ended) -> TraceRequest {
    let mut served = Served {
        at_once: ended.at_once,
        held: span.held.load(Ordering::Relaxed),
        ..Served::default()
    };
    for (stage, _) in span.stages() {
        match stage {
            Stage::SourceRead => served.source = true,
            Stage::HeadRead | Stage::Write => served.private = true,
            Stage::RemoteRead | Stage::Network => served.remote = true,
            Stage::Queue | Stage::Map | Stage::Flush => {}
        }
    }
    let duration_us = span.since.elapsed().as_micros();
    TraceRequest {
        at_ns: since_ns(started, span.since),
        offset: ended.offset,
        length_bytes: u32::try_from(ended.length_bytes).unwrap_or(u32::MAX),
        duration_us: u32::try_from(duration_us).unwrap_or(u32::MAX),
        client,
        operation: Operation::from_name(ended.command),
        served,
    }
}

fn since_ns(started: Instant, at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(started).as_nanos()).unwrap_or(u64::MAX)
}

/// The running trace, if there is one.
#[derive(Default)]
pub struct Recording(Mutex<Option<Running>>);

struct Running {
    file: PathBuf,
    queue: Arc<Queue>,
    clients: BTreeMap<VolumeName, u16>,
    writer: JoinHandle<io::Result<u64>>,
}

impl Recording {
    /// # Errors
    /// A conflict when a trace is running or the file exists; invalid when the file can't be created.
    pub fn start(&self, request: StartTrace) -> Result<(), Problem> {
        let StartTrace { file } = request;
        let what = format!("can't write a trace to {}", file.display());
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &*running {
            let why = format!("a trace to {} is running", running.file.display());
            return Err(
                Problem::conflict(what, why).next("end it with `perigee volume trace stop`")
            );
        }
        if !file.is_absolute() {
            return Err(Problem::invalid(what, "the path is not absolute"));
        }
        let opened = OpenOptions::new().write(true).create_new(true).open(&file);
        let writer = opened.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => Problem::conflict(&what, "the file exists already"),
            _ => Problem::invalid(&what, error),
        })?;
        let (records, incoming) = sync_channel(QUEUE_RECORDS);
        let queue = Queue { started: Instant::now(), records, lost: AtomicU64::new(0) };
        let writer = std::thread::Builder::new()
            .name("trace".into())
            .spawn(move || write_all(writer, &incoming))
            .map_err(|error| Problem::internal(&what, error))?;
        let clients = BTreeMap::new();
        *running = Some(Running { file, queue: Arc::new(queue), clients, writer });
        Ok(())
    }

    /// The recorder for a volume, if a trace is running.
    pub fn recorder(&self, volume: &VolumeName) -> Option<Recorder> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let running = running.as_mut()?;
        let queue = Arc::clone(&running.queue);
        let next = u16::try_from(running.clients.len()).ok()?;
        let client = *running.clients.entry(volume.clone()).or_insert_with(|| {
            let (at_ns, name) = (queue.since_start_ns(Instant::now()), volume.to_string());
            queue.push(TraceRecord::Client(TraceClient { number: next, at_ns, name }));
            next
        });
        Some(Recorder { client, queue })
    }

    /// Ends the trace. The caller has dropped all its recorders. This waits until their records are written.
    ///
    /// # Errors
    /// Not found when no trace is running; no space or an I/O error when the file is not complete.
    pub fn stop(&self) -> Result<TraceSummary, Problem> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Running { file, queue, clients, writer }) = running.take() else {
            return Err(Problem::not_found("can't end a trace", "none is running"));
        };
        let lost = queue.lost.load(Ordering::Relaxed);
        // The writer ends when all senders are dropped.
        drop(queue);
        let what = format!("the trace {} is not complete", file.display());
        let requests = writer
            .join()
            .map_err(|_| Problem::internal(&what, "the thread that wrote it has panicked"))?
            .map_err(|error| Problem::internal(what, error))?;
        Ok(TraceSummary { file, clients: clients.len() as u64, requests, lost })
    }
}

/// Writes records until all senders are dropped. Returns the number of requests.
fn write_all(file: File, records: &Receiver<TraceRecord>) -> io::Result<u64> {
    let mut out = BufWriter::new(file);
    out.write_all(TRACE_MAGIC)?;
    let mut requests = 0;
    let mut bytes = Vec::new();
    for record in records {
        bytes.clear();
        record.encode(&mut bytes);
        out.write_all(&bytes)?;
        requests += u64::from(matches!(record, TraceRecord::Request(_)));
    }
    out.flush()?;
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use perigee_model::trace::read_trace;

    use super::*;
    use crate::stats::StatsTable;

    fn read(table: &StatsTable, volume: &str) {
        let counters = table.of(&volume.parse().unwrap());
        let (command, error) = ("read", None);
        let ended = Ended { command, offset: 4096, length_bytes: 512, at_once: true, error };
        if counters.tracing.is_followed() {
            counters.tracing.end(&Span::new(Instant::now()), ended, 0);
        }
    }

    #[test]
    fn a_trace_has_the_requests_of_old_and_new_volumes_between_start_and_stop() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("boot.trace");
        let table = StatsTable::default();
        read(&table, "old");
        table.start_trace(StartTrace { file: file.clone() }).unwrap();
        for volume in ["old", "new", "old"] {
            read(&table, volume);
        }
        let summary = table.stop_trace().unwrap();
        read(&table, "old");
        assert_eq!((summary.clients, summary.requests, summary.lost), (2, 3, 0));
        let mut names = Vec::new();
        let mut requests = Vec::new();
        for record in read_trace(&std::fs::read(file).unwrap()).unwrap() {
            match record {
                TraceRecord::Client(client) => names.push(client.name),
                TraceRecord::Request(request) => requests.push(request.client),
            }
        }
        assert_eq!((names, requests), (vec!["old".into(), "new".into()], vec![0, 1, 0]));
    }

    #[test]
    fn no_file_is_overwritten_and_one_trace_runs_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let start = |name| StartTrace { file: dir.path().join(name) };
        std::fs::write(dir.path().join("there"), "mine").unwrap();
        let recording = Recording::default();
        assert!(recording.start(start("there")).is_err());
        recording.start(start("a")).unwrap();
        assert!(recording.start(start("b")).is_err());
        assert_eq!(std::fs::read(dir.path().join("there")).unwrap(), b"mine");
        recording.stop().unwrap();
        assert!(recording.stop().is_err());
    }
}
