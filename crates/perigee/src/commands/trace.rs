//! `perigee volume trace`

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use perigee_http::Client;
use perigee_model::trace::{TraceRecord, read_trace};
use perigee_model::units::format_bytes;
use perigee_model::volume::{StartTrace, TraceSummary, TracedRequest};
use perigee_model::{JobId, Problem, VolumeName};
use perigee_planner::page_cache::{CacheOutcome, simulate};

use crate::arguments::size;
use crate::output::{self, Column, Format};
use crate::servers::{CONTROL_SOCKET, pool_server};

/// `perigee volume trace VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum TraceVerb {
    /// Show each request to a volume when it has ended, and the time of each of its steps
    Follow {
        /// The volume
        name: VolumeName,
        /// How long to watch
        #[arg(long, value_name = "N", default_value_t = 10)]
        seconds: u64,
        /// The pool directory of its volume server
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// Record the requests to all volumes in a file of the pool, until `perigee volume trace stop`, which says where it
    /// is
    Start {
        /// The trace's name; none of that name may exist
        name: JobId,
        /// The pool directory of the volume server
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// End the recording
    Stop {
        /// The pool directory of the volume server
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// Show a recorded file
    Show {
        /// The file
        file: PathBuf,
    },
    /// Predict what a server with so much memory would have read from its disk, and what of that again
    Simulate {
        /// The file
        file: PathBuf,
        /// The page cache's size, as 64MiB; several sizes are compared
        #[arg(long, value_name = "SIZE", value_parser = size, value_delimiter = ',', required = true)]
        memory: Vec<u64>,
        /// How often each client of the trace is there, all asking at the same moments
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=COPIES_MAX))]
        copies: u32,
    },
}

/// As many clients as an experiment with a storm has, and more.
const COPIES_MAX: i64 = 10_000;

/// `stop` takes long: it writes the requests that are still in memory.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Watches a volume server, has it record, or prints a recorded file.
pub async fn run(verb: TraceVerb, format: Format) -> Result<(), Problem> {
    match verb {
        TraceVerb::Follow { name, seconds, pool } => {
            follow(&*pool_server(&pool).await?, &name, seconds, format).await
        }
        TraceVerb::Start { name, pool } => {
            running_server(&pool).await?.post("/v1/trace/start", &StartTrace { name }).await
        }
        TraceVerb::Stop { pool } => {
            let summary: TraceSummary =
                running_server(&pool).await?.post("/v1/trace/stop", &()).await?;
            output::one(format, &summary, SUMMARY)
        }
        TraceVerb::Show { file } => show(&file, format),
        TraceVerb::Simulate { file, memory, copies } => {
            let records = read(&file)?;
            let of = |memory_bytes: &u64| simulate(&records, copies, *memory_bytes);
            let outcomes: Vec<CacheOutcome> = memory.iter().map(of).collect();
            output::list(format, &outcomes, OUTCOMES)
        }
    }
}

const OUTCOMES: &[Column<CacheOutcome>] = &[
    ("memory", |o| format_bytes(o.memory_bytes)),
    ("read", |o| format_bytes(o.read_bytes)),
    ("in memory", |o| {
        o.hit_ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{:.1} %", 100.0 * ratio))
    }),
    ("from disk", |o| format_bytes(o.first_bytes)),
    ("again", |o| format_bytes(o.again_bytes)),
];

const SUMMARY: &[Column<TraceSummary>] = &[
    ("file", |t| t.file.display().to_string()),
    ("clients", |t| t.clients.to_string()),
    ("requests", |t| t.requests.to_string()),
    ("lost", |t| t.lost.to_string()),
];

/// A request of a recorded file, as it is printed.
#[derive(serde::Serialize)]
struct Row {
    at_us: u64,
    client: String,
    operation: &'static str,
    offset: u64,
    length_bytes: u32,
    duration_us: u32,
    served: String,
}

const ROWS: &[Column<Row>] = &[
    ("at s", |r| format!("{}.{:06}", r.at_us / 1_000_000, r.at_us % 1_000_000)),
    ("client", |r| r.client.clone()),
    ("operation", |r| r.operation.to_owned()),
    ("offset", |r| r.offset.to_string()),
    ("bytes", |r| r.length_bytes.to_string()),
    ("us", |r| r.duration_us.to_string()),
    ("served", |r| if r.served.is_empty() { "-".to_owned() } else { r.served.clone() }),
];

fn show(file: &Path, format: Format) -> Result<(), Problem> {
    output::list(format, &rows(read(file)?), ROWS)
}

fn read(file: &Path) -> Result<Vec<TraceRecord>, Problem> {
    let what = format!("can't read the trace {}", file.display());
    let bytes = std::fs::read(file).map_err(|error| Problem::invalid(&what, error))?;
    read_trace(&bytes).map_err(|error| Problem::invalid(what, error))
}

fn rows(records: Vec<TraceRecord>) -> Vec<Row> {
    let mut names = std::collections::HashMap::new();
    let mut rows = Vec::new();
    for record in records {
        match record {
            TraceRecord::Client(client) => {
                names.insert(client.number, client.name);
            }
            TraceRecord::Request(request) => rows.push(Row {
                at_us: request.at_ns / 1000,
                client: names.get(&request.client).cloned().unwrap_or_else(|| "?".to_owned()),
                operation: request.operation.name(),
                offset: request.offset,
                length_bytes: request.length_bytes,
                duration_us: request.duration_us,
                served: request.served.to_string(),
            }),
        }
    }
    rows
}

/// A client of the pool's volume server. Without a running server there are no requests to record.
async fn running_server(pool: &Path) -> Result<Client, Problem> {
    let socket = pool.join(CONTROL_SOCKET);
    if !socket.exists() {
        let what = format!("no volume server runs on the pool {}", pool.display());
        return Err(Problem::unavailable(what, "the pool has no control socket")
            .next("start one: perigee volume serve --pool DIR --nbd ADDRESS"));
    }
    Client::new(&format!("unix:{}", socket.display()), CALL_TIMEOUT)
}

/// Prints each request of a volume as it ends.
async fn follow(
    client: &Client,
    volume: &VolumeName,
    seconds: u64,
    format: Format,
) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/trace?seconds={seconds}");
    let mut failed = Ok(());
    let printed = client.get_lines(&path, |request: TracedRequest| {
        let text = match format {
            Format::Table => line(&request),
            _ => serde_json::to_string(&request).unwrap_or_else(|e| {
                failed = Err(Problem::internal("can't print a request", e));
                String::new()
            }),
        };
        output::put(format!("{text}\n").as_bytes());
    });
    printed.await?;
    failed
}

fn line(request: &TracedRequest) -> String {
    let TracedRequest { ended_us, command, offset, length_bytes, at_once, total_ns, .. } = request;
    let mut text = format!(
        "{}.{:06} {command:<6} {offset:>14} +{length_bytes:<8} {:>10}",
        ended_us / 1_000_000,
        ended_us % 1_000_000,
        us(*total_ns),
    );
    if *at_once {
        text.push_str(" at once");
    }
    for stage in &request.stages {
        text.push_str(&format!(" {}={}", stage.stage, us(stage.ns)));
    }
    if let Some(error) = &request.error {
        text.push_str(&format!(" error: {error}"));
    }
    text
}

/// Nanoseconds as microseconds with one decimal.
fn us(ns: u64) -> String {
    format!("{}.{}us", ns / 1000, ns % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use perigee_model::volume::StageTime;

    use super::*;

    #[test]
    fn a_line_has_the_request_its_time_and_its_stages() {
        let request = TracedRequest {
            ended_us: 1_000_000_000_000_007,
            command: "read".into(),
            offset: 4096,
            length_bytes: 512,
            at_once: true,
            total_ns: 5_250,
            stages: vec![StageTime { stage: "head_read".into(), ns: 3_000 }],
            error: None,
        };
        let words: Vec<String> = line(&request).split_whitespace().map(str::to_owned).collect();
        let want =
            ["1000000000.000007", "read", "4096", "+512", "5.2us", "at", "once", "head_read=3.0us"];
        assert_eq!(words, want);
    }
}
