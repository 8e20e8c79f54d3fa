//! A trace of all volumes, written to a file as requests end.
//!
//! Requests only put a record into a queue, which a separate thread writes to the file. Records that come
//! faster than it can write are dropped and counted, so a trace never delays a client. A trace ends at a limit, and then
//! its summary is an error that says so.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use perigee_model::trace::{
    Operation, Served, TRACE_MAGIC, TraceClient, TraceRecord, TraceRequest,
};
use perigee_model::units::format_bytes;
use perigee_model::volume::TraceSummary;
use perigee_model::{Problem, VolumeName};

use crate::trace::{Ended, Span, Stage};

/// The most records that wait to be written.
const QUEUE_RECORDS: usize = 1 << 16;

/// The longest trace: some 38 million requests.
const TRACE_BYTES_MAX: u64 = 1 << 30;
/// The most that all traces in a directory may take.
const TRACES_BYTES_MAX: u64 = 4 << 30;

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
    writer: JoinHandle<io::Result<Written>>,
}

/// What a trace's file has.
#[derive(Debug)]
struct Written {
    requests: u64,
    /// There was more than it may have.
    is_full: bool,
}

impl Recording {
    /// # Errors
    /// A conflict when a trace is running or the file exists; invalid when the file can't be created; no space when
    /// the traces beside it take too much.
    pub fn start(&self, file: PathBuf) -> Result<(), Problem> {
        self.start_within(file, TRACE_BYTES_MAX, TRACES_BYTES_MAX)
    }

    fn start_within(&self, file: PathBuf, bytes_max: u64, all_max: u64) -> Result<(), Problem> {
        let what = format!("can't write a trace to {}", file.display());
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &*running {
            let why = format!("a trace to {} is running", running.file.display());
            return Err(
                Problem::conflict(what, why).next("end it with `perigee volume trace stop`")
            );
        }
        let dir = file.parent().unwrap_or(&file);
        let taken = bytes_in(dir).map_err(|error| Problem::invalid(&what, error))?;
        if taken + bytes_max > all_max {
            let (taken, limit) = (format_bytes(taken), format_bytes(all_max));
            let why = format!(
                "the traces in {} take {taken}; the limit of all is {limit}",
                dir.display()
            );
            return Err(Problem::no_space(what, why).next("remove some of them"));
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
            .spawn(move || write_all(writer, &incoming, bytes_max))
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
        let Written { requests, is_full } = writer
            .join()
            .map_err(|_| Problem::internal(&what, "the thread that wrote it has panicked"))?
            .map_err(|error| Problem::internal(&what, error))?;
        if is_full {
            let why =
                format!("it has reached {}, the limit of a trace", format_bytes(TRACE_BYTES_MAX));
            return Err(Problem::no_space(what, why)
                .next(format!("use its first {requests} requests, or trace for a shorter time")));
        }
        Ok(TraceSummary { file, clients: clients.len() as u64, requests, lost })
    }
}

fn bytes_in(dir: &Path) -> io::Result<u64> {
    std::fs::read_dir(dir)?.try_fold(0, |sum, entry| Ok(sum + entry?.metadata()?.len()))
}

/// Writes records until all senders are dropped, or the file is as long as it may be.
fn write_all(file: File, records: &Receiver<TraceRecord>, bytes_max: u64) -> io::Result<Written> {
    let mut out = BufWriter::new(file);
    out.write_all(TRACE_MAGIC)?;
    let mut requests = 0;
    let mut bytes = Vec::new();
    let mut left_bytes = bytes_max.saturating_sub(TRACE_MAGIC.len() as u64);
    let mut is_full = false;
    for record in records {
        bytes.clear();
        record.encode(&mut bytes);
        // The rest of the queue is read all the same, so that nobody waits for room in it.
        is_full |= left_bytes < bytes.len() as u64;
        if is_full {
            continue;
        }
        left_bytes -= bytes.len() as u64;
        out.write_all(&bytes)?;
        requests += u64::from(matches!(record, TraceRecord::Request(_)));
    }
    out.flush()?;
    Ok(Written { requests, is_full })
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
        table.start_trace(file.clone()).unwrap();
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
        let start = |name| dir.path().join(name);
        std::fs::write(dir.path().join("there"), "mine").unwrap();
        let recording = Recording::default();
        assert!(recording.start(start("there")).is_err());
        recording.start(start("a")).unwrap();
        assert!(recording.start(start("b")).is_err());
        assert_eq!(std::fs::read(dir.path().join("there")).unwrap(), b"mine");
        recording.stop().unwrap();
        assert!(recording.stop().is_err());
    }

    #[test]
    fn a_trace_ends_at_its_limit_and_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let recording = Recording::default();
        let file = dir.path().join("a");
        recording.start_within(file.clone(), 200, 300).unwrap();
        let recorder = recording.recorder(&"data".parse().unwrap()).unwrap();
        let ended =
            || Ended { command: "read", offset: 0, length_bytes: 512, at_once: true, error: None };
        (0..100).for_each(|_| recorder.record(&Span::new(Instant::now()), &ended()));
        drop(recorder);
        let problem = recording.stop().unwrap_err();
        assert!(problem.why.contains("the limit of a trace"), "{problem}");
        let bytes = std::fs::read(file).unwrap();
        assert!((100..=200).contains(&bytes.len()) && read_trace(&bytes).is_ok());
        let full = recording.start_within(dir.path().join("b"), 200, 300).unwrap_err();
        assert!(full.why.contains("the limit of all is 300 B"), "{full}");
    }
}
