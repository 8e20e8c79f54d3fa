//! A recorded boot as a script: its requests, and the answer that each of them waited for.
//!
//! A guest sends a request some time after it has received an answer. So a request is not replayed at its time
//! in the recording, but at the recorded time after the end of another request: the last one that was answered
//! before it. A slow server makes the boot longer; a fast one does not make the guest faster.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use perigee_model::trace::{Operation, TraceRecord, read_trace};
use perigee_model::volume::BLOCK_BYTES;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub operation: Operation,
    pub offset: u64,
    pub length_bytes: u32,
    /// The request whose answer it waited for; `None` before the first answer.
    pub after: Option<usize>,
    /// The time from that answer, or from the start, until the request.
    pub think: Duration,
}

#[derive(Debug)]
pub struct Script {
    /// In the order of the requests.
    pub steps: Vec<Step>,
    /// How long the recorded boot took until its last answer.
    pub recorded: Duration,
}

impl Script {
    /// # Errors
    /// If the bytes are no trace of a client that read something.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let mut requests: Vec<_> = read_trace(bytes)?
            .into_iter()
            .filter_map(|record| match record {
                TraceRecord::Request(r) if r.client == 0 && r.operation != Operation::Other => {
                    Some(r)
                }
                _ => None,
            })
            .collect();
        requests.sort_by_key(|request| request.at_ns);
        let begin_ns = requests.first().context("the trace has no request")?.at_ns;
        let end_ns = |at: usize| requests[at].at_ns + u64::from(requests[at].duration_us) * 1000;
        let mut by_end: Vec<usize> = (0..requests.len()).collect();
        by_end.sort_by_key(|at| end_ns(*at));
        let steps = requests
            .iter()
            .map(|request| {
                let answered = by_end.partition_point(|at| end_ns(*at) <= request.at_ns);
                let after = answered.checked_sub(1).map(|last| by_end[last]);
                let since_ns = after.map_or(begin_ns, end_ns);
                Step {
                    operation: request.operation,
                    offset: request.offset,
                    length_bytes: request.length_bytes,
                    after,
                    think: Duration::from_nanos(request.at_ns - since_ns),
                }
            })
            .collect();
        let last_ns = by_end.last().map_or(begin_ns, |at| end_ns(*at));
        let script = Self { steps, recorded: Duration::from_nanos(last_ns - begin_ns) };
        ensure!(!script.blocks(Operation::Read).is_empty(), "the trace has no read");
        Ok(script)
    }

    /// The blocks that a boot reads or writes.
    pub fn blocks(&self, operation: Operation) -> BTreeSet<u64> {
        self.steps
            .iter()
            .filter(|step| step.operation == operation)
            .flat_map(|step| {
                let end = step.offset + u64::from(step.length_bytes);
                step.offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::trace::{Served, TRACE_MAGIC, TraceRequest};

    use super::*;

    fn request(at_us: u64, duration_us: u32, block: u64) -> TraceRecord {
        TraceRecord::Request(TraceRequest {
            at_ns: at_us * 1000,
            offset: block * BLOCK_BYTES,
            length_bytes: 4096,
            duration_us,
            client: 0,
            operation: Operation::Read,
            served: Served::default(),
        })
    }

    #[test]
    fn a_request_waits_for_the_last_answer_before_it() {
        let mut bytes = TRACE_MAGIC.to_vec();
        // In the order of their ends, as a recorder writes them.
        for record in [request(100, 10, 0), request(101, 50, 1), request(120, 100, 2)] {
            record.encode(&mut bytes);
        }
        request(160, 1, 3).encode(&mut bytes);
        let script = Script::parse(&bytes).unwrap();
        let waits: Vec<_> =
            script.steps.iter().map(|step| (step.after, step.think.as_micros())).collect();
        assert_eq!(waits, [(None, 0), (None, 1), (Some(0), 10), (Some(1), 9)]);
        assert_eq!(script.recorded, Duration::from_micros(120));
        assert_eq!(script.blocks(Operation::Read).len(), 4);
    }
}
