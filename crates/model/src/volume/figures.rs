//! Measurements: counters, traces and probes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{JobId, VolumeName};

/// Counters of one export since the volume server started; they only grow.
///
/// `busy_ns` is the time during which at least one request was in flight; with the sum of
/// latencies it gives the mean queue depth while busy. The `network_*` half counts the same for
/// requests this server sent to another host on behalf of the export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IoStats {
    /// Read requests that were answered, with or without an error.
    pub reads: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Sum of the reads' latencies, from the request to its answer.
    pub read_ns: u64,
    /// Requests that change data: writes, write-zeroes and trims.
    pub writes: u64,
    /// Bytes that came with them; write-zeroes and trims carry none.
    pub write_bytes: u64,
    /// Sum of their latencies.
    pub write_ns: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Sum of their latencies.
    pub flush_ns: u64,
    /// Time in which at least one request of a client was in flight.
    pub busy_ns: u64,
    /// Requests that were sent to another host.
    pub network_requests: u64,
    /// Sum of their latencies.
    pub network_ns: u64,
    /// Time in which at least one of them was in flight.
    pub network_busy_ns: u64,
    /// Data that they carried, before compression.
    pub network_bytes: u64,
    /// How much of that data compression kept off the network.
    pub network_saved_bytes: u64,
    /// Reads of another host's volume that were answered from a replica or another layer here.
    pub replica_reads: u64,
    /// Writes refused because the session's epoch was not the volume's.
    pub fenced: u64,
}

/// The counters of one volume.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ExportStats {
    /// The volume; this server is its home, or has it attached.
    pub volume: VolumeName,
    /// Its counters since the volume server started.
    pub stats: IoStats,
}

/// One request of a client, in the answer to `GET /v1/volumes/VOLUME/trace`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedRequest {
    /// Microseconds since 1970.
    pub ended_us: u64,
    /// `read`, `write`, `flush`, `zero`, `status` or `cache`.
    pub command: String,
    /// Offset in the volume, in bytes.
    pub offset: u64,
    /// Length of the range; 0 for a flush.
    pub length_bytes: u64,
    /// Whether it was answered without waiting.
    pub at_once: bool,
    /// From the server's receipt of the request to its answer.
    pub total_ns: u64,
    /// The time spent in each stage. Stages that ran at the same time count in full.
    pub stages: Vec<StageTime>,
    /// Why it failed, in plain words; `None` if it succeeded.
    pub error: Option<String>,
}

/// Starts a trace of all volumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTrace {
    /// The name of a new file among the volume server's traces, in the format of [`crate::trace`].
    pub name: JobId,
}

/// Collects a trace of some volumes in memory until it is fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectTrace {
    /// The volumes to trace. A volume's position in this list is its client number in the trace.
    pub volumes: Vec<VolumeName>,
    /// The ones among them of which a few reads are answered late, in short windows
    /// ([`crate::trace::HELD_BACK_US`]). This shows how many reads are in flight together.
    #[serde(default)]
    pub hold_back: Vec<VolumeName>,
}

/// The result of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSummary {
    /// The file with the trace.
    pub file: PathBuf,
    /// Number of clients in it.
    pub clients: u64,
    /// Number of requests in it.
    pub requests: u64,
    /// Requests that are missing, because they came faster than the disk could record them.
    pub lost: u64,
}

/// A part of a request's time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTime {
    /// `queue`, `network`, `map`, `source_read`, `head_read`, `remote_read`, `write` or `flush`.
    pub stage: String,
    /// How long the request was in that stage.
    pub ns: u64,
}

/// Reads blocks of an export at random offsets and measures how long they take.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ProbeBlocks {
    /// `HOST:PORT` of the NBD server to ask; this server's own address measures the local case.
    pub nbd_addr: String,
    /// The export to read from; nothing is written.
    pub export: String,
    /// 1 to 1000.
    pub requests: u32,
    /// 512 to 1 MiB.
    pub request_bytes: u32,
}

/// The latency and the rate of reads from an export.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct BlockProbe {
    /// The median latency, with one read in flight at a time.
    pub latency_median_us: u64,
    /// The 95th percentile of the latencies, with one read in flight at a time.
    pub latency_p95_us: u64,
    /// The rate with 16 reads in flight.
    pub rate_bytes_per_s: u64,
}
