//! The volumes' figures in the text format of Prometheus.

use std::fmt::{self, Write};

use perigee_block::stats::StatsTable;
use perigee_block::trace::{BUCKETS, Histogram};
use perigee_model::volume::IoStats;

/// The page of `GET /metrics`.
pub fn page(table: &StatsTable) -> String {
    let mut page = String::new();
    write(&mut page, table).expect("a string takes everything");
    page
}

/// A counter's name, its help text, and its value by kind of request.
type Figure = (&'static str, &'static str, fn(&IoStats) -> [(&'static str, u64); 3]);

const FIGURES: [Figure; 2] = [
    ("perigee_volume_requests_total", "Requests that have ended.", |stats| {
        [("read", stats.reads), ("write", stats.writes), ("flush", stats.flushes)]
    }),
    ("perigee_volume_bytes_total", "Bytes of payload.", |stats| {
        [("read", stats.read_bytes), ("write", stats.write_bytes), ("flush", 0)]
    }),
];

/// As [`Figure`], with one value: what a volume costs the network, and what it is spared.
type NetworkFigure = (&'static str, &'static str, fn(&IoStats) -> u64);

const NETWORK_FIGURES: [NetworkFigure; 4] = [
    ("perigee_volume_network_requests_total", "Requests to other hosts.", |stats| {
        stats.network_requests
    }),
    (
        "perigee_volume_network_bytes_total",
        "Data of requests to other hosts, before compression.",
        |stats| stats.network_bytes,
    ),
    (
        "perigee_volume_network_saved_bytes_total",
        "How much of that data compression kept off the network.",
        |stats| stats.network_saved_bytes,
    ),
    (
        "perigee_volume_replica_reads_total",
        "Reads of another host's volume that were answered from a replica or another layer here.",
        |stats| stats.replica_reads,
    ),
];

fn write(page: &mut String, table: &StatsTable) -> fmt::Result {
    let volumes = table.all();
    for (name, help, values) in FIGURES {
        writeln!(page, "# HELP {name} {help}\n# TYPE {name} counter")?;
        for (volume, counters) in &volumes {
            for (kind, value) in values(&counters.snapshot()) {
                writeln!(page, "{name}{{volume=\"{volume}\",kind=\"{kind}\"}} {value}")?;
            }
        }
    }
    for (name, help, value) in NETWORK_FIGURES {
        writeln!(page, "# HELP {name} {help}\n# TYPE {name} counter")?;
        for (volume, counters) in &volumes {
            writeln!(page, "{name}{{volume=\"{volume}\"}} {}", value(&counters.snapshot()))?;
        }
    }
    let name = "perigee_volume_stage_seconds";
    writeln!(page, "# HELP {name} Time of requests by stage.\n# TYPE {name} histogram")?;
    for (volume, counters) in &volumes {
        for (stage, histogram) in counters.tracing.histograms() {
            let labels = format!("volume=\"{volume}\",stage=\"{}\"", stage.name());
            write_histogram(page, name, &labels, histogram)?;
        }
    }
    Ok(())
}

/// Stages that a volume never had are left out.
fn write_histogram(
    page: &mut String,
    name: &str,
    labels: &str,
    histogram: &Histogram,
) -> fmt::Result {
    let counts = histogram.counts();
    let mut below = 0;
    if counts.iter().all(|count| *count == 0) {
        return Ok(());
    }
    for (bucket, count) in counts[..BUCKETS - 1].iter().enumerate() {
        below += count;
        let (whole, rest) = ((1_u64 << bucket) / 1_000_000, (1_u64 << bucket) % 1_000_000);
        writeln!(page, "{name}_bucket{{{labels},le=\"{whole}.{rest:06}\"}} {below}")?;
    }
    let all = below + counts[BUCKETS - 1];
    let (whole, rest) = (histogram.sum_ns() / 1_000_000_000, histogram.sum_ns() % 1_000_000_000);
    writeln!(page, "{name}_bucket{{{labels},le=\"+Inf\"}} {all}")?;
    writeln!(page, "{name}_sum{{{labels}}} {whole}.{rest:09}")?;
    writeln!(page, "{name}_count{{{labels}}} {all}")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use perigee_model::VolumeName;

    use super::*;
    use perigee_block::trace::{Ended, Span, Stage};

    #[test]
    fn a_page_has_each_volume_s_figures() {
        let table = StatsTable::default();
        let counters = table.of(&VolumeName::new("data").expect("a name"));
        let span = Span::new(Instant::now());
        let before = Instant::now().checked_sub(Duration::from_micros(5)).expect("an uptime");
        span.add(Stage::Write, before);
        let ended =
            Ended { command: "write", offset: 0, length_bytes: 512, at_once: true, error: None };
        counters.tracing.end(&span, ended, 2);
        counters.read_from_replica();
        counters.saved(7);
        let page = page(&table);
        assert!(page.contains("perigee_volume_requests_total{volume=\"data\",kind=\"read\"} 0\n"));
        assert!(page.contains("perigee_volume_replica_reads_total{volume=\"data\"} 1\n"), "{page}");
        assert!(page.contains("perigee_volume_network_saved_bytes_total{volume=\"data\"} 7\n"));
        assert!(page.contains("perigee_volume_network_requests_total{volume=\"data\"} 0\n"));
        let labels = "volume=\"data\",stage=\"write\"";
        assert!(page.contains(&format!("_bucket{{{labels},le=\"0.000001\"}} 0\n")), "{page}");
        assert!(page.contains(&format!("_bucket{{{labels},le=\"4.194304\"}} 2\n")), "{page}");
        assert!(page.contains(&format!("_count{{{labels}}} 2\n")), "{page}");
        assert!(!page.contains("stage=\"flush\""), "it was never measured");
    }
}
