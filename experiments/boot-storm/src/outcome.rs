//! The results of the storms, as in `results.json`.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use perigee_lab::paper::Figure;
use perigee_model::trace::{Operation, TraceRecord, TraceRequest, read_trace};
use perigee_model::volume::BLOCK_BYTES;
use perigee_planner::page_cache::simulate;
use serde::{Deserialize, Serialize};

use crate::extents::Placement;
use crate::replay::{Seen, Storm};
use crate::servers::Server;
use crate::{paper, report};

/// Response times are averaged over this time.
const BIN: Duration = Duration::from_millis(500);

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Results {
    pub versions: BTreeMap<String, String>,
    pub clients: usize,
    /// Few clients: the figures say nothing.
    #[serde(default)]
    pub is_quick: bool,
    /// What the paper says of its figures, and what these storms say. It follows from the rest.
    #[serde(skip_deserializing)]
    pub paper: Vec<Figure>,
    pub boot: Boot,
    /// The comparison of the servers, which took turns.
    pub peers: Vec<Case>,
    /// The storms with limits of memory and devices, which were traced.
    pub memory: Vec<Case>,
    /// The memory sizes in MiB with which the server was killed because it ran out of memory.
    #[serde(default)]
    pub too_small: Vec<(Layout, u64)>,
    /// Private files that are allocated completely before the storm, and private files that are allocated as
    /// they are written.
    #[serde(default)]
    pub allocation: Vec<Case>,
}

impl Results {
    /// Judges, and writes results.json and report.html.
    pub fn write(&mut self, out: &Path) -> Result<()> {
        self.paper = paper::figures(self);
        fs::create_dir_all(out)?;
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(out.join("results.json"), text).context("can't write results.json")?;
        fs::write(out.join("report.html"), report::html(self)).context("can't write report.html")
    }
}

/// The requests of one client.
#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
pub struct Boot {
    pub requests: usize,
    pub recorded_s: f64,
    pub read_mib: f64,
    pub written_mib: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// Source and private data on one device.
    Together,
    /// Each on its own device.
    Apart,
}

impl Layout {
    pub fn words(self) -> &'static str {
        match self {
            Self::Together => "on one device",
            Self::Apart => "on devices of their own",
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// Private blocks are allocated on the disk when they are written.
    #[default]
    OnDemand,
    /// All blocks of a volume are allocated before.
    Fixed,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Case {
    pub server: Server,
    pub round: u32,
    /// The clients' times between an answer and the next request, relative to the recording.
    pub pace: f64,
    pub layout: Layout,
    #[serde(default)]
    pub allocation: Allocation,
    /// The limit of the server's memory with the page cache that it fills.
    pub memory_max_mib: Option<u64>,
    pub reads_per_s_max: Option<u64>,
    /// The time until the last client was up.
    pub last_up_s: f64,
    pub median_up_s: f64,
    pub mean_response_ms: f64,
    pub p99_response_ms: f64,
    pub server_cpu_s: f64,
    pub memory_peak_mib: f64,
    /// MiB that were read from the device with the source, which also has the private data in the layout
    /// `Together`.
    pub source_device_read_mib: f64,
    pub private_device_read_mib: Option<f64>,
    /// The mean response time of the requests in each half second.
    pub response_ms: Vec<(f64, f64)>,
    pub cache: Option<Cache>,
    #[serde(default)]
    pub placement: Option<Placement>,
}

/// How reads were served, according to the server's own trace.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Cache {
    pub source: Served,
    pub private: Served,
    /// The number of reloads of source blocks over time in seconds.
    pub source_reloads: Vec<(f64, f64)>,
    pub private_reloads: Vec<(f64, f64)>,
    /// What a page cache of this size would have read from the devices, by the same trace (`perigee volume trace simulate`).
    #[serde(default)]
    pub simulated_read_mib: Option<f64>,
}

#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
pub struct Served {
    pub hits: u64,
    /// Requests that waited for the disk for a block that was never in memory before.
    pub first_loads: u64,
    /// Requests that waited for blocks that had all been in memory before.
    pub reloads: u64,
}

pub fn mib(bytes: u64) -> f64 {
    // Exact up to 8 PiB.
    bytes as f64 / f64::from(1 << 20)
}

/// The mean and the 99th percentile of the response times, and the mean in each half second.
pub struct Responses {
    pub mean_ms: f64,
    pub p99_ms: f64,
    pub over_time: Vec<(f64, f64)>,
}

impl Responses {
    pub fn of(storm: &Storm) -> Self {
        let moves_data = |seen: &&Seen| seen.operation != Operation::Other;
        let ms = |seen: &Seen| seen.took.as_secs_f64() * 1000.0;
        let mut all: Vec<f64> = storm.requests.iter().filter(moves_data).map(ms).collect();
        all.sort_by(f64::total_cmp);
        let mut bins: BTreeMap<u128, Vec<f64>> = BTreeMap::new();
        for seen in storm.requests.iter().filter(moves_data) {
            bins.entry(seen.at.as_nanos() / BIN.as_nanos()).or_default().push(ms(seen));
        }
        let at_s = |bin: u128| bin as f64 * BIN.as_secs_f64();
        Self {
            mean_ms: mean(&all),
            p99_ms: all.get(all.len() * 99 / 100).copied().unwrap_or_default(),
            over_time: bins.iter().map(|(bin, values)| (at_s(*bin), mean(values))).collect(),
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

impl Cache {
    /// # Errors
    /// If the bytes are no trace.
    pub fn of_trace(bytes: &[u8], cache_bytes: Option<u64>) -> Result<Self> {
        let records = read_trace(bytes)?;
        let simulated_read_mib = cache_bytes.map(|cache_bytes| {
            let outcome = simulate(&records, 1, cache_bytes);
            mib(outcome.first_bytes + outcome.again_bytes)
        });
        let mut cache = Self { simulated_read_mib, ..Self::default() };
        // For each block, the time of the first answer that contained it: since then it was in memory.
        let (mut source_in_ns, mut private_in_ns) = (HashMap::new(), HashMap::new());
        let mut reads: Vec<TraceRequest> = records
            .into_iter()
            .filter_map(|record| match record {
                TraceRecord::Request(r) if r.operation == Operation::Read => Some(r),
                _ => None,
            })
            .collect();
        reads.sort_by_key(|request| request.at_ns);
        for request in reads {
            let at_s = Duration::from_nanos(request.at_ns).as_secs_f64();
            let sides = [
                (request.served.source, u16::MAX, &mut source_in_ns, &mut cache.source),
                (request.served.private, request.client, &mut private_in_ns, &mut cache.private),
            ];
            for (is_served, owner, in_ns, served) in sides {
                if is_served {
                    served.count(&request, owner, in_ns);
                }
            }
            cache.source_reloads.push((at_s, cache.source.reloads as f64));
            cache.private_reloads.push((at_s, cache.private.reloads as f64));
        }
        for line in [&mut cache.source_reloads, &mut cache.private_reloads] {
            // This is enough for a plot.
            let every = (line.len() / 400).max(1);
            *line = line.iter().copied().step_by(every).chain(line.last().copied()).collect();
        }
        Ok(cache)
    }
}

impl Served {
    /// `in_ns`: since when each block of each owner was in memory.
    fn count(&mut self, request: &TraceRequest, owner: u16, in_ns: &mut HashMap<(u16, u64), u64>) {
        let end = request.offset + u64::from(request.length_bytes);
        let answered_ns = request.at_ns + u64::from(request.duration_us) * 1000;
        let mut was_in_memory = true;
        for block in request.offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES) {
            let since_ns = in_ns.entry((owner, block)).or_insert(answered_ns);
            was_in_memory &= *since_ns < request.at_ns;
            *since_ns = answered_ns.min(*since_ns);
        }
        match (request.served.at_once, was_in_memory) {
            (true, _) => self.hits += 1,
            (false, false) => self.first_loads += 1,
            (false, true) => self.reloads += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::trace::{Served as Place, TRACE_MAGIC};

    use super::*;

    #[test]
    fn a_block_that_was_read_before_is_a_reload() {
        let mut bytes = TRACE_MAGIC.to_vec();
        // The second request waits for the block that the first one loads.
        for (at_us, at_once) in [(10, false), (11, false), (20, true), (30, false)] {
            let request = TraceRequest {
                at_ns: at_us * 1000,
                offset: 0,
                length_bytes: 4096,
                duration_us: 5,
                client: 0,
                operation: Operation::Read,
                served: Place { at_once, source: true, ..Place::default() },
            };
            TraceRecord::Request(request).encode(&mut bytes);
        }
        let cache = Cache::of_trace(&bytes, None).unwrap();
        let Served { hits, first_loads, reloads } = cache.source;
        assert_eq!((hits, first_loads, reloads), (1, 2, 1));
    }
}
