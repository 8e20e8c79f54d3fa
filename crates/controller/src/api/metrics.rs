//! `/metrics`: the controller's figures for Prometheus.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use perigee_model::job::JobState;

use super::Shared;

// Writing to a String cannot fail, so the results of `writeln!` below are ignored.

pub async fn metrics(State(cluster): Shared) -> String {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let mut text = String::new();
    let mut say = |name: &str, kind: &str, help: &str, value: String| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
    };
    let counters = &cluster.counters;
    let passes = "Decisions over the whole queue";
    say("perigee_scheduler_passes_total", "counter", passes, read(&counters.passes).to_string());
    let seconds = std::time::Duration::from_micros(read(&counters.pass_us)).as_secs_f64();
    let help = "Time they took";
    say("perigee_scheduler_pass_seconds_total", "counter", help, seconds.to_string());
    let placed = read(&counters.placed).to_string();
    say("perigee_jobs_placed_total", "counter", "Jobs that were given a host", placed);
    let jobs = cluster.unfinished_jobs();
    let queued = jobs.iter().filter(|record| record.job.state == JobState::Queued).count();
    say("perigee_jobs_queued", "gauge", "Jobs that wait for a host", queued.to_string());
    let help = "Jobs that have not ended";
    say("perigee_jobs_unfinished", "gauge", help, jobs.len().to_string());
    let name = "perigee_store_operations_total";
    let _ = writeln!(text, "# HELP {name} Operations of the store\n# TYPE {name} counter");
    let counts = &cluster.records.counts;
    for (operation, count) in
        [("get", &counts.gets), ("list", &counts.lists), ("write", &counts.writes)]
    {
        let _ = writeln!(text, "{name}{{operation=\"{operation}\"}} {}", read(count));
    }
    text
}
