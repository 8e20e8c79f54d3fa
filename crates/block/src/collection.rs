//! Traces of some volumes that are kept in memory until they are fetched: what a job's requests
//! were, for whoever learns from them.
//!
//! A trace has the format of a file ([`perigee_model::trace`]). One that becomes too long is given
//! up as a whole, because half of a job says nothing about it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use perigee_model::limits::BATCH_VOLUMES;
use perigee_model::trace::{TRACE_MAGIC, TraceClient, TraceRecord};
use perigee_model::volume::CollectTrace;
use perigee_model::{JobId, Problem, VolumeName};

use crate::held_back::Windows;
use crate::recording::request_of;
use crate::trace::{Ended, Span};

/// Of one trace: some 600,000 requests.
const BYTES_MAX: usize = 16 << 20;
/// Traces at a time. When there are more, the oldest is dropped.
const COLLECTIONS_MAX: usize = 8;

/// The traces of one server, the newest last.
#[derive(Default)]
pub struct Collections(Mutex<Vec<(JobId, Arc<Collection>)>>);

/// One trace: a client record for each of its volumes, then a request record for each request that has
/// ended since. It has [`BYTES_MAX`] bytes at most.
struct Collection {
    started: Instant,
    windows: Windows,
    /// `None` when it was too long, or has ended.
    bytes: Mutex<Option<Vec<u8>>>,
}

/// Puts one volume's requests into a trace.
pub(crate) struct Collector {
    client: u16,
    holds_back: bool,
    collection: Arc<Collection>,
}

impl Collections {
    /// Begins a trace; one of the same name goes. Gives who collects each volume's requests.
    ///
    /// # Errors
    /// Invalid for too many volumes.
    pub(crate) fn start(
        &self,
        name: &JobId,
        ask: &CollectTrace,
    ) -> Result<Vec<(VolumeName, Collector)>, Problem> {
        let problem = |error| Problem::invalid(format!("can't collect the trace {name}"), error);
        BATCH_VOLUMES.check(ask.volumes.len() as u64).map_err(problem)?;
        let mut bytes = TRACE_MAGIC.to_vec();
        for (number, volume) in (0..).zip(&ask.volumes) {
            let name = volume.to_string();
            TraceRecord::Client(TraceClient { number, at_ns: 0, name }).encode(&mut bytes);
        }
        let bytes = Mutex::new(Some(bytes));
        let started = Instant::now();
        let collection = Arc::new(Collection { started, windows: Windows::new(started), bytes });
        self.end(name);
        let mut all = lock(&self.0);
        if all.len() >= COLLECTIONS_MAX {
            let (_, oldest) = all.remove(0);
            *lock(&oldest.bytes) = None;
        }
        all.push((name.clone(), Arc::clone(&collection)));
        let collector = |client, volume: &VolumeName| {
            let holds_back = ask.hold_back.contains(volume);
            let collection = Arc::clone(&collection);
            (volume.clone(), Collector { client, holds_back, collection })
        };
        Ok((0..).zip(&ask.volumes).map(|(n, volume)| collector(n, volume)).collect())
    }

    /// What was collected so far.
    ///
    /// # Errors
    /// Not found when there is none of that name; conflict when it was too long.
    pub fn get(&self, name: &JobId) -> Result<Vec<u8>, Problem> {
        let all = lock(&self.0);
        let Some((_, collection)) = all.iter().find(|(other, _)| other == name) else {
            return Err(Problem::not_found(
                format!("can't give the trace {name}"),
                "none of that name is kept",
            ));
        };
        lock(&collection.bytes).clone().ok_or_else(|| {
            let why = format!("it was longer than {} MiB, and was given up", BYTES_MAX >> 20);
            Problem::conflict(format!("can't give the trace {name}"), why)
        })
    }

    /// Ends it, if there is one of that name.
    pub fn end(&self, name: &JobId) {
        lock(&self.0).retain(|(other, collection)| {
            if other == name {
                *lock(&collection.bytes) = None;
            }
            other != name
        });
    }
}

impl Collector {
    /// Whether anybody may still fetch what it collects.
    pub fn is_wanted(&self) -> bool {
        lock(&self.collection.bytes).is_some()
    }

    /// Whether a read that arrives now would be held back.
    pub fn is_due(&self, now: Instant) -> bool {
        self.holds_back && self.is_wanted() && self.collection.windows.is_due(now)
    }

    /// As [`Self::is_due`]. If so, it also counts the read as held back.
    pub fn hold(&self, now: Instant) -> bool {
        self.holds_back && self.is_wanted() && self.collection.windows.hold(now)
    }

    /// Adds a request that has ended. The whole trace is given up when it becomes longer than
    /// [`BYTES_MAX`]; nothing is added to one that was given up or has ended.
    pub fn collect(&self, span: &Span, ended: &Ended) {
        self.collection.windows.count();
        let mut bytes = lock(&self.collection.bytes);
        let Some(kept) = &mut *bytes else { return };
        let request = request_of(self.client, self.collection.started, span, ended);
        TraceRecord::Request(request).encode(kept);
        if kept.len() > BYTES_MAX {
            *bytes = None;
        }
    }
}

/// Bytes are whole at every step; a panic elsewhere is no reason to collect no more.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use perigee_model::trace::read_trace;

    use super::*;
    use crate::stats::StatsTable;

    fn read(table: &StatsTable, volume: &str, times: usize) {
        let counters = table.of(&volume.parse().unwrap());
        for _ in 0..times {
            if counters.tracing.is_followed() {
                let (command, error) = ("read", None);
                let ended =
                    Ended { command, offset: 4096, length_bytes: 512, at_once: true, error };
                counters.tracing.end(&Span::new(Instant::now()), ended, 0);
            }
        }
    }

    fn ask(volumes: &[&str]) -> CollectTrace {
        let volumes = volumes.iter().map(|volume| volume.parse().unwrap()).collect();
        CollectTrace { volumes, hold_back: Vec::new() }
    }

    fn job(name: &str) -> JobId {
        JobId::new(name).unwrap()
    }

    #[test]
    fn a_trace_has_the_requests_of_its_volumes_until_it_is_ended() {
        let table = StatsTable::default();
        read(&table, "a", 1);
        table.collections.start(&job("job"), &ask(&["a"])).unwrap();
        table.collect_trace(&job("job"), &ask(&["a", "b"])).unwrap();
        for volume in ["a", "b", "other", "b"] {
            read(&table, volume, 1);
        }
        let records = read_trace(&table.collections.get(&job("job")).unwrap()).unwrap();
        let requests = records.iter().filter_map(|record| match record {
            TraceRecord::Client(_) => None,
            TraceRecord::Request(request) => Some(request.client),
        });
        assert_eq!(requests.collect::<Vec<_>>(), [0, 1, 1]);
        assert_eq!(records.len(), 5);
        table.collections.end(&job("job"));
        assert!(table.collections.get(&job("job")).is_err());
        read(&table, "a", 1);
        let counters = table.of(&"a".parse().unwrap());
        read(&table, "a", 1);
        assert!(!counters.tracing.is_followed(), "nobody collects any more");
    }

    #[test]
    fn a_trace_that_is_too_long_is_given_up_and_says_so() {
        let table = StatsTable::default();
        table.collect_trace(&job("job"), &ask(&["a"])).unwrap();
        read(&table, "a", BYTES_MAX / 28 + 1);
        let problem = table.collections.get(&job("job")).unwrap_err();
        assert!(problem.why.contains("longer than 16 MiB"), "{problem}");
    }

    #[test]
    fn the_oldest_of_too_many_is_dropped() {
        let table = StatsTable::default();
        for number in 0..=COLLECTIONS_MAX {
            table.collect_trace(&job(&format!("job{number}")), &ask(&["a"])).unwrap();
        }
        assert!(table.collections.get(&job("job0")).is_err());
        assert!(table.collections.get(&job("job1")).is_ok());
    }
}
