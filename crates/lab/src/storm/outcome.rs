//! The result of a storm: the content of `results.json`.

use std::collections::{BTreeMap, HashSet};

use perigee_model::Problem;
use perigee_model::client::Over;
use perigee_model::trace::{Operation, TraceRecord, TraceRequest, read_trace};
use perigee_model::volume::BLOCK_BYTES;
use serde::{Deserialize, Serialize};

use crate::usage::Usage;

/// What a boot storm has shown, as `results.json` has it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub versions: BTreeMap<String, String>,
    pub over: Over,
    /// The memory of each machine.
    pub memory_mib: u32,
    /// In the order in which they were started.
    pub machines: Vec<MachineOutcome>,
    /// From the first machine's start until the last machine was up.
    pub last_up_s: f64,
    /// Blocks of the image that at least one machine read, each counted once.
    pub source_distinct_bytes: u64,
    /// What all machines together read of the image.
    pub source_read_bytes: u64,
    /// What the volume server read from the disk.
    pub device_read_bytes: u64,
    pub server_cpu_s: f64,
    /// The volume server's own memory, without the page cache.
    pub server_memory_peak_bytes: u64,
    /// How much of the pool is in the page cache at the end.
    pub page_cache_bytes: u64,
    /// Reads that were answered without waiting for the disk. `reads_waited` counts the others.
    pub reads_at_once: u64,
    pub reads_waited: u64,
    /// The seconds in which there were requests, with their number and their mean response time.
    pub seconds: Vec<Second>,
}

/// One machine: `up_s` seconds after the first one was started it was up; requests and bytes are those of its disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineOutcome {
    pub name: String,
    pub up_s: f64,
    pub requests: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
}

/// The requests of all machines in one second of the storm.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Second {
    pub at_s: u32,
    pub requests: u32,
    pub mean_response_ms: f64,
}

impl Outcome {
    /// Makes the result from the time after which each machine was up, the recorded trace, and the volume
    /// server's usage.
    ///
    /// # Errors
    /// The bytes are not a trace.
    pub fn new(up_s: Vec<(String, f64)>, trace: &[u8], server: Usage) -> Result<Self, Problem> {
        let records =
            read_trace(trace).map_err(|error| Problem::internal("can't read the trace", error))?;
        let machine = |(name, up_s)| MachineOutcome {
            name,
            up_s,
            requests: 0,
            read_bytes: 0,
            written_bytes: 0,
        };
        let mut outcome = Self {
            last_up_s: up_s.iter().map(|(_, up_s)| *up_s).fold(0.0, f64::max),
            machines: up_s.into_iter().map(machine).collect(),
            device_read_bytes: server.read_bytes,
            server_cpu_s: server.cpu_s,
            server_memory_peak_bytes: server.memory_peak_bytes,
            ..Self::default()
        };
        outcome.count(records);
        Ok(outcome)
    }

    fn count(&mut self, records: Vec<TraceRecord>) {
        let (mut machine_of, mut source) = (BTreeMap::new(), HashSet::new());
        let mut seconds: BTreeMap<u32, (u32, f64)> = BTreeMap::new();
        for record in records {
            let request = match record {
                TraceRecord::Client(client) => {
                    // A clone's name is MACHINE.IMAGE.NUMBER.
                    let owner = client.name.split('.').next().unwrap_or_default();
                    let at = self.machines.iter().position(|machine| machine.name == owner);
                    machine_of.insert(client.number, at);
                    continue;
                }
                TraceRecord::Request(request) => request,
            };
            if let Some(Some(at)) = machine_of.get(&request.client) {
                self.machines[*at].count(&request);
            }
            if request.operation == Operation::Read {
                if request.served.at_once {
                    self.reads_at_once += 1;
                } else {
                    self.reads_waited += 1;
                }
                if request.served.source {
                    let end = request.offset + u64::from(request.length_bytes);
                    source.extend(request.offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES));
                    self.source_read_bytes += u64::from(request.length_bytes);
                }
            }
            let at_s = u32::try_from(request.at_ns / 1_000_000_000).unwrap_or(u32::MAX);
            let second = seconds.entry(at_s).or_default();
            second.0 += 1;
            second.1 += f64::from(request.duration_us) / 1000.0;
        }
        self.source_distinct_bytes = source.len() as u64 * BLOCK_BYTES;
        self.seconds = seconds
            .into_iter()
            .map(|(at_s, (requests, sum_ms))| Second {
                at_s,
                requests,
                mean_response_ms: sum_ms / f64::from(requests),
            })
            .collect();
    }
}

impl MachineOutcome {
    fn count(&mut self, request: &TraceRequest) {
        self.requests += 1;
        let length = u64::from(request.length_bytes);
        match request.operation {
            Operation::Read => self.read_bytes += length,
            Operation::Write => self.written_bytes += length,
            Operation::Zero | Operation::Flush | Operation::Other => {}
        }
    }
}

#[cfg(test)]
pub mod tests {
    use perigee_model::trace::{Served, TRACE_MAGIC, TraceClient};

    use super::*;

    /// Two machines that read the same two blocks of the image; the second one also writes one.
    pub fn two_machines() -> Outcome {
        let mut bytes = TRACE_MAGIC.to_vec();
        let mut put = |record: TraceRecord| record.encode(&mut bytes);
        for number in [0, 1] {
            let name = format!("m{}.golden.1", number + 1);
            put(TraceRecord::Client(TraceClient { number, at_ns: 0, name }));
            let read = TraceRequest {
                at_ns: u64::from(number) * 1_000_000_000,
                offset: 4096,
                length_bytes: 8192,
                duration_us: 3000,
                client: number,
                operation: Operation::Read,
                served: Served { source: true, at_once: number == 1, ..Served::default() },
            };
            put(TraceRecord::Request(read));
        }
        put(TraceRecord::Request(TraceRequest {
            at_ns: 1_500_000_000,
            offset: 0,
            length_bytes: 4096,
            duration_us: 1000,
            client: 1,
            operation: Operation::Write,
            served: Served { private: true, ..Served::default() },
        }));
        let up_s = vec![("m1".to_owned(), 11.5), ("m2".to_owned(), 12.5)];
        let server = Usage { cpu_s: 0.25, memory_peak_bytes: 9 << 20, read_bytes: 8192 };
        Outcome::new(up_s, &bytes, server).expect("a trace")
    }

    #[test]
    fn a_block_that_two_machines_read_is_one_block_of_the_source() {
        let outcome = two_machines();
        assert_eq!((outcome.source_distinct_bytes, outcome.source_read_bytes), (8192, 16384));
        assert_eq!((outcome.reads_at_once, outcome.reads_waited), (1, 1));
        let m2 = &outcome.machines[1];
        assert_eq!((m2.requests, m2.read_bytes, m2.written_bytes), (2, 8192, 4096));
        let second = Second { at_s: 1, requests: 2, mean_response_ms: 2.0 };
        assert_eq!(outcome.seconds[1], second);
        assert!((outcome.last_up_s - 12.5).abs() < f64::EPSILON);
    }
}
