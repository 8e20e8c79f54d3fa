//! `report.html`: their figures beside ours on one page. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::report::page::{self, TABLE_END, figure, row};
use perigee_lab::report::plots::{Bar, bars};
use perigee_lab::report::svg::escape;
use perigee_model::measurement::{DiskFigures, DiskPath, HostMeasurement};

use crate::results::{Results, Where, disk, link, mbits};

// Writing to a String cannot fail, so the results of `write!` below are ignored.

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: what own and rented hosts can do", "");
    page.push_str("<h1>What own and rented hosts can do</h1>\n");
    let lead = format!(
        "A lab of two sites on one machine, with a WAN of {} ms and {} Mbit/s. Each figure was measured for at most {} s by `perigee host measure`: networks over the \
         connections that Perigee's hosts have with each other, {}, and a volume of another host over NBD through both volume servers and \
         over iSCSI. Sequential requests have 1 MiB, four at a time, and a flush after each 16 MiB that are written.",
        results.rtt_ms,
        results.rate_bits_per_s / 1_000_000,
        results.length_s,
        own_disk(results)
    );
    let _ = writeln!(page, "<p class=\"lead\">{}</p>", escape(&lead));
    page::papers(&mut page, PAPERS, &results.paper);
    network(&mut page, results, Where::Near, "001, figure 9; 004, figure 13");
    network(&mut page, results, Where::Far, "001, figure 12");
    let write = |figures: &DiskFigures| figures.write_bytes_per_s;
    let read = |figures: &DiskFigures| figures.read_bytes_per_s;
    disks(&mut page, results, "Write", write, "001, figures 10 and 11; 004, figure 14");
    disks(&mut page, results, "Read", read, "001, figures 10 and 11; 004, figure 15");
    small(&mut page, results);
    missing(&mut page, results);
    page::end(&mut page, &results.versions);
    page
}

/// How the own disks were read and written.
fn own_disk(results: &Results) -> &'static str {
    let is_direct =
        |of: &HostMeasurement| disk(of, DiskPath::Pool, Where::Near).map(|of| of.direct);
    match (is_direct(&results.own), is_direct(&results.rented)) {
        (Some(false), Some(false)) => "the own disk through the page cache",
        (Some(false), _) => {
            "the own disk with direct I/O, but that of the own host through the page cache"
        }
        (_, Some(false)) => {
            "the own disk with direct I/O, but that of the rented host through the page cache"
        }
        _ => "the own disk with direct I/O",
    }
}

const PAPERS: &str = "001 is Toyoshima, Yamaguchi, Oguchi: an evaluation of load balancing of a virtual-machine PC cluster and its application to a real cloud (in Japanese); \
        004 is their English paper on migrating virtual machines by the access to remote storage. Their bars are pictures: their texts name relations, and one number.";

fn both(results: &Results) -> [(&'static str, &HostMeasurement); 2] {
    [("own host", &results.own), ("rented host", &results.rented)]
}

fn network(page: &mut String, results: &Results, at: Where, theirs: &str) {
    let mut all = Vec::new();
    for (name, of) in both(results) {
        let Some(link) = link(of, at) else { continue };
        let rates = [
            ("sends", link.to_bytes_per_s),
            ("receives", link.from_bytes_per_s),
            ("sends, 4 streams", link.to_streams_bytes_per_s),
            ("receives, 4 streams", link.from_streams_bytes_per_s),
        ];
        for (does, rate) in rates {
            let Some(value) = rate.map(mbits) else { continue };
            all.push(bar(format!("{name} {does}"), value, format!("{value:.0} Mbit/s")));
        }
    }
    let title = format!("Network of a host {}", at.words());
    let caption = format!("Theirs: {theirs}. Megabits per second.");
    figure(page, &title, &caption, &bars(&all, "Mbit/s", &title));
}

fn bar(name: String, value: f64, label: String) -> Bar {
    let class = if name.starts_with("own") { "ours" } else { "peer" };
    Bar { name, class, value, label }
}

const WAYS: [(DiskPath, Where, &str); 5] = [
    (DiskPath::Pool, Where::Near, "own disk"),
    (DiskPath::Iscsi, Where::Near, "iSCSI, its site"),
    (DiskPath::Nbd, Where::Near, "Perigee, its site"),
    (DiskPath::Iscsi, Where::Far, "iSCSI, WAN"),
    (DiskPath::Nbd, Where::Far, "Perigee, WAN"),
];

fn disks(
    page: &mut String,
    results: &Results,
    does: &str,
    value: fn(&DiskFigures) -> f64,
    theirs: &str,
) {
    let mut all = Vec::new();
    for (path, at, way) in WAYS {
        for (name, of) in both(results) {
            let Some(figures) = disk(of, path, at) else { continue };
            let value = value(figures) / 1e6;
            all.push(bar(format!("{name}: {way}"), value, format!("{value:.1} MB/s")));
        }
    }
    let title = format!("Disks: {}", does.to_lowercase());
    let caption = format!("Theirs: {theirs}. Megabytes per second, sequential.");
    figure(page, &title, &caption, &bars(&all, "MB/s", &title));
}

fn small(page: &mut String, results: &Results) {
    let text = "Requests of 4 KiB per second, one after another; each write is followed by a flush. The papers have no such figures.";
    page::table(page, "Random requests", text, &["disk", "reads", "writes"]);
    for (path, at, way) in WAYS {
        for (name, of) in both(results) {
            let Some(figures) = disk(of, path, at) else { continue };
            let per_s = |value: f64| format!("{value:.0}");
            let (reads, writes) = (figures.random_reads_per_s, figures.random_writes_per_s);
            row(page, "", &[format!("{name}: {way}"), per_s(reads), per_s(writes)]);
        }
    }
    page.push_str(TABLE_END);
}

/// What was not measured, and why.
fn missing(page: &mut String, results: &Results) {
    let mut all = Vec::new();
    for (name, of) in both(results) {
        let links = of.networks.iter().map(|link| (&link.with, &link.problem));
        let disks = of.disks.iter().map(|disk| (&disk.at, &disk.problem));
        let bad = links.chain(disks).filter(|(_, problem)| !problem.is_empty());
        all.extend(bad.map(|(at, problem)| format!("{name}, at {at}: {problem}")));
    }
    if all.is_empty() {
        return;
    }
    page.push_str("<h2>Not measured</h2>\n<ul>\n");
    for line in all {
        let _ = writeln!(page, "<li class=\"fault\">{}</li>", escape(&line));
    }
    page.push_str("</ul>\n");
}

#[cfg(test)]
mod tests {
    use perigee_lab::paper::Verdict;
    use perigee_model::HostId;
    use perigee_model::measurement::{DiskMeasurement, MeasurementState, NetworkFigures};

    use super::*;
    use crate::paper;

    fn measured(host: &str, near: &str, far: &str, mib_per_s: u64) -> HostMeasurement {
        let id = |name: &str| HostId::new(name).expect("a name");
        let link = |with: &str| NetworkFigures {
            with: id(with),
            site: "any".parse().expect("a name"),
            rtt_ms: Some(1.0),
            to_bytes_per_s: Some(mib_per_s << 20),
            from_bytes_per_s: Some(mib_per_s << 21),
            to_streams_bytes_per_s: None,
            from_streams_bytes_per_s: None,
            problem: String::new(),
        };
        let figures = DiskFigures {
            size_bytes: 1 << 28,
            read_bytes_per_s: 1e8,
            write_bytes_per_s: 5e7,
            random_reads_per_s: 100.0,
            random_writes_per_s: 50.0,
            direct: true,
        };
        let disk = |path, at: &str, share: f64| DiskMeasurement {
            path,
            at: id(at),
            figures: Some(DiskFigures {
                read_bytes_per_s: figures.read_bytes_per_s * share,
                write_bytes_per_s: figures.write_bytes_per_s * share,
                ..figures
            }),
            problem: String::new(),
        };
        let failed = DiskMeasurement {
            path: DiskPath::Iscsi,
            at: id(far),
            figures: None,
            problem: "<no> driver".to_owned(),
        };
        HostMeasurement {
            host: id(host),
            kind: None,
            state: MeasurementState::Done,
            now: String::new(),
            by: "ann".to_owned(),
            begun_ms: 1,
            ended_ms: Some(2),
            length_s: 10,
            networks: vec![link(near), link(far)],
            disks: vec![
                disk(DiskPath::Pool, host, 1.0),
                disk(DiskPath::Iscsi, near, 0.5),
                disk(DiskPath::Nbd, near, 0.8),
                failed,
            ],
        }
    }

    fn results(is_quick: bool) -> Results {
        let mut results = Results {
            versions: Default::default(),
            cpus: 2,
            load_1min: 0.5,
            is_quick,
            rtt_ms: 16,
            rate_bits_per_s: 200_000_000,
            length_s: 10,
            own: measured("home1", "home2", "rent-1", 45),
            rented: measured("rent-1", "cloud1", "home1", 10),
            paper: Vec::new(),
        };
        results.paper = paper::figures(&results);
        results
    }

    #[test]
    fn the_page_stands_alone_has_each_figure_and_names_what_is_missing() {
        let page = html(&results(false));
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        for part in ["001 Fig. 9", "001 Fig. 12", "004 Fig. 15", "4.5 times", "&lt;no&gt; driver"] {
            assert!(page.contains(part), "{part} is not in the page");
        }
    }

    #[test]
    fn a_disk_that_was_read_through_the_page_cache_is_said_to_be() {
        let mut cached = results(false);
        let through = "the own disk through the page cache";
        assert!(!html(&cached).contains(through));
        for disk in cached.own.disks.iter_mut().chain(&mut cached.rented.disks) {
            disk.figures.iter_mut().for_each(|figures| figures.direct = false);
        }
        let page = html(&cached);
        assert!(page.contains(through) && !page.contains("with direct I/O"), "{page}");
    }

    #[test]
    fn measurements_decide_what_agrees_and_a_quick_run_decides_nothing() {
        let judged = results(false).paper;
        let verdicts: Vec<_> = judged.iter().map(|figure| figure.verdict).collect();
        let (yes, no) = (Verdict::Agrees, Verdict::DoesNotAgree);
        assert_eq!(verdicts, [yes, no, yes, yes, yes, yes], "{judged:?}");
        assert!(results(true).paper.iter().all(|figure| figure.verdict == Verdict::NotJudged));
    }
}
