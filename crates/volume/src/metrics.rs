//! The figures of the pool and its volumes, for Prometheus.

use std::fmt::Display;

use perigee_block::stats::StatsTable;
use perigee_block::trace::{BUCKETS, Histogram};
use perigee_model::exposition::{Kind, Page};
use perigee_model::volume::{IoStats, PoolInfo};

/// The page of `GET /metrics`. `pool` is `None` when the pool could not be looked at.
pub fn page(table: &StatsTable, pool: Option<&PoolInfo>) -> String {
    let mut page = Page::default();
    if let Some(pool) = pool {
        write_pool(&mut page, pool);
    }
    write_volumes(&mut page, table);
    page.into_text()
}

fn write_pool(page: &mut Page, pool: &PoolInfo) {
    let figures = [
        (
            "perigee_pool_size_bytes",
            "Size of the filesystem that the pool is on.",
            pool.total_bytes,
        ),
        ("perigee_pool_free_bytes", "What can still be written there.", pool.free_bytes),
        ("perigee_pool_data_bytes", "Data in all layers, each counted once.", pool.data_bytes),
        ("perigee_pool_volumes", "Volumes whose home is this pool.", pool.volumes),
        ("perigee_pool_images", "Images and snapshots in the pool.", pool.images),
    ];
    for (name, help, value) in figures {
        page.one(name, Kind::Gauge, help, value);
    }
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

fn write_volumes(page: &mut Page, table: &StatsTable) {
    let volumes = table.all();
    for (name, help, values) in FIGURES {
        page.family(name, Kind::Counter, help);
        for (volume, counters) in &volumes {
            for (kind, value) in values(&counters.snapshot()) {
                page.figure(&[("volume", volume), ("kind", &kind)], value);
            }
        }
    }
    for (name, help, value) in NETWORK_FIGURES {
        page.family(name, Kind::Counter, help);
        for (volume, counters) in &volumes {
            page.figure(&[("volume", volume)], value(&counters.snapshot()));
        }
    }
    page.family("perigee_volume_stage_seconds", Kind::Histogram, "Time of requests by stage.");
    for (volume, counters) in &volumes {
        for (stage, histogram) in counters.tracing.histograms() {
            write_histogram(page, &[("volume", volume), ("stage", &stage.name())], histogram);
        }
    }
}

/// Stages that a volume never had are left out.
fn write_histogram(page: &mut Page, labels: &[(&str, &dyn Display)], histogram: &Histogram) {
    let counts = histogram.counts();
    let mut below = 0;
    if counts.iter().all(|count| *count == 0) {
        return;
    }
    let bucket = |page: &mut Page, most: &dyn Display, count: u64| {
        let labels: Vec<_> = labels.iter().copied().chain([("le", most)]).collect();
        page.figure_of("_bucket", &labels, count);
    };
    for (number, count) in counts[..BUCKETS - 1].iter().enumerate() {
        below += count;
        let (whole, rest) = ((1_u64 << number) / 1_000_000, (1_u64 << number) % 1_000_000);
        bucket(page, &format_args!("{whole}.{rest:06}"), below);
    }
    let all = below + counts[BUCKETS - 1];
    bucket(page, &"+Inf", all);
    let (whole, rest) = (histogram.sum_ns() / 1_000_000_000, histogram.sum_ns() % 1_000_000_000);
    page.figure_of("_sum", labels, format_args!("{whole}.{rest:09}"));
    page.figure_of("_count", labels, all);
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
        let page = page(&table, None);
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
