//! `report.html`: all placements on one page. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::report::page::{self, figure, row};
use perigee_lab::report::plots::{Bar, Line, bars, curve};
use perigee_lab::report::svg::escape;

use crate::case::{Way, Work};
use crate::paper;
use crate::results::{Direction, Results, System, float};

// Writing to a String cannot fail, so the results of `write!` below are ignored.

const PAPER: &str = "000 is Toyoshima, Yamaguchi, Oguchi: \"Storage access optimization with virtual machine migration during execution of parallel data \
     processing on a virtual machine PC cluster\". Medians decide.";

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: placements", "");
    let mib = |bytes: u64| bytes >> 20;
    let _ = writeln!(
        page,
        "<h1>One job in every placement of its data</h1>\n<p class=\"lead\">TPC-H queries in PostgreSQL (scale factor {}, \
         {} MiB of tables) and a scan of {} MiB, in guests with one vCPU and {} MiB, without KVM. Hosts are network \
         namespaces of one machine with {} CPUs; the WAN between them has no limit of its rate here. Times are from the \
         beginning of the work to its end, without the guest's boot; medians where there are several rounds.</p>",
        results.scale_factor,
        mib(results.table_bytes),
        mib(results.scan_bytes),
        mib(results.memory_bytes),
        results.cpus
    );
    goals(&mut page, results);
    page::papers(&mut page, PAPER, &results.paper);
    execution(&mut page, results);
    migrations(&mut page, results);
    totals(&mut page, results);
    scans(&mut page, results);
    disk_moves(&mut page, results);
    runs(&mut page, results);
    page::end(&mut page, &results.all_versions());
    page
}

fn goals(page: &mut String, results: &Results) {
    page::goals(page, &results.goals);
    for what in &results.not_measured {
        let _ = writeln!(page, "<p class=\"soft\">Not measured: {}</p>", escape(what));
    }
}

/// A line over the round trips.
fn line(results: &Results, name: &str, value: impl Fn(u32) -> Option<f64>) -> Line {
    Line { name: name.to_owned(), values: results.rtts_ms().into_iter().map(value).collect() }
}

fn plot(page: &mut String, results: &Results, (title, caption): (&str, &str), lines: &[Line]) {
    if lines.iter().all(|line| line.values.iter().all(Option::is_none)) {
        return;
    }
    let places: Vec<String> = results.rtts_ms().iter().map(u32::to_string).collect();
    let axes = ("round trip, ms", "s");
    figure(page, title, caption, &curve(&places, lines, axes, title));
}

fn execution(page: &mut String, results: &Results) {
    page.push_str("<h2>Execution time against the round trip</h2>\n");
    let of = |ways: &[Way]| -> Vec<Line> {
        let one =
            |way: &Way| line(results, way.words(), |rtt| results.work_s(Work::Tpch, rtt, *way));
        ways.iter().map(one).collect()
    };
    let title = "The queries, read over the WAN";
    let caption = "The data stays where it is, and the VM too.";
    plot(page, results, (title, caption), &of(&[Way::Local, Way::Iscsi, Way::Nbd, Way::Remote]));
    let title = "The queries, with the VM or its data moved";
    let caption = "The move begins when the work begins, and goes on beside it.";
    plot(page, results, (title, caption), &of(&[Way::Remote, Way::Copy, Way::Stay, Way::Follow]));
    table(page, results, Work::Tpch);
}

/// Seconds of work: a row for each way, a column for each round trip.
fn table(page: &mut String, results: &Results, work: Work) {
    page.push_str("<div class=\"scroll\"><table>\n<tr><th>work, s</th>");
    for rtt_ms in results.rtts_ms() {
        let _ = write!(page, "<th>{rtt_ms} ms</th>");
    }
    page.push_str("</tr>\n");
    for way in Way::ALL {
        let is_never = work == Work::Scan && !way.is_measured_with(work);
        if is_never {
            continue;
        }
        let mut cells = vec![way.words().to_owned()];
        cells.extend(results.rtts_ms().into_iter().map(|rtt| {
            let found = results.work_s(work, rtt, way);
            found.map_or_else(|| "not measured".to_owned(), |s| format!("{s:.1}"))
        }));
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
}

fn migrations(page: &mut String, results: &Results) {
    page.push_str("<h2>Migration time against the round trip</h2>\n");
    let of = |way: Way| {
        line(results, way.words(), |rtt| {
            let ms = |run: &crate::results::Run| Some(float(run.migration?.total_ms));
            Some(results.median(Work::Tpch, rtt, way, ms)? / 1e3)
        })
    };
    let title = "Live migrations while the queries run";
    let caption = "From asking until the VM runs beside its data. With follow, its own disks come after that.";
    plot(page, results, (title, caption), &[of(Way::Stay), of(Way::Follow)]);
    let of_copy = line(results, "all of the data is there", |rtt| {
        results.median(Work::Tpch, rtt, Way::Copy, |run| Some(float(run.copy?.total_ms) / 1e3))
    });
    let taken = line(results, "the new home has it", |rtt| {
        results.median(Work::Tpch, rtt, Way::Copy, |run| Some(float(run.copy?.taken_ms?) / 1e3))
    });
    let title = "The data's move to the VM while the queries run";
    let caption = "From asking. The volume is used at its new home before its data is there.";
    plot(page, results, (title, caption), &[of_copy, taken]);
}

fn totals(page: &mut String, results: &Results) {
    page.push_str("<h2>Migration and execution together</h2>\n");
    let way =
        |way: Way, name: &str| line(results, name, |rtt| results.work_s(Work::Tpch, rtt, way));
    let lines = [
        way(Way::Iscsi, Way::Iscsi.words()),
        line(results, "migration + local work", |rtt| paper::sum_s(results, rtt)),
        way(Way::Stay, "work while it moves"),
    ];
    let title = "The total";
    let caption =
        "The paper's sum, plain iSCSI for comparison, and the job that works while it is moved.";
    plot(page, results, (title, caption), &lines);
}

fn scans(page: &mut String, results: &Results) {
    page.push_str("<h2>A scan</h2>\n");
    let of = |way: Way, pass: usize, name: &str| {
        line(results, name, |rtt| results.pass_s(rtt, way, pass))
    };
    let lines = [
        of(Way::Local, 0, Way::Local.words()),
        of(Way::Iscsi, 0, Way::Iscsi.words()),
        of(Way::Nbd, 0, Way::Nbd.words()),
        of(Way::Remote, 0, Way::Remote.words()),
    ];
    let caption = "One file from start to end, with the guest's page cache empty.";
    plot(page, results, ("The first pass", caption), &lines);
    let lines = [
        of(Way::Local, 1, Way::Local.words()),
        of(Way::Iscsi, 1, Way::Iscsi.words()),
        of(Way::Nbd, 1, Way::Nbd.words()),
        of(Way::Remote, 1, Way::Remote.words()),
    ];
    let caption =
        "The guest's page cache is empty again; what the local volume server has kept is there.";
    plot(page, results, ("The second pass", caption), &lines);
}

fn disk_moves(page: &mut String, results: &Results) {
    if results.disk_moves.is_empty() {
        return;
    }
    let _ = writeln!(
        page,
        "<h2>A VM moved with its disk</h2>\n<p>The VM writes 256 KiB/s to its root disk while it is moved over a WAN of {}. \
         The image below its overlay is at both hosts. QEMU alone and libvirt mirror the overlay first and move the guest \
         then; Perigee moves the guest first. libvirt's guest is a `pc` with the processor qemu64; the others are q35.</p>\n<div class=\"scroll\"><table>\n<tr><th>system</th><th>direction</th>\
         <th>overlay, MiB</th><th>runs there after, s</th><th>all there after, s</th><th>pause, ms</th><th>memory, MiB</th>\
         <th>WAN, MiB</th><th>there when it runs</th><th>load</th></tr>",
        escape(&results.moves_wan)
    );
    let mib = |bytes: u64| format!("{:.1}", float(bytes) / f64::from(1 << 20));
    for m in &results.disk_moves {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
        let direction = match m.direction {
            Direction::There => "there",
            Direction::Back => "back",
        };
        let cells = [
            m.system.words().to_owned(),
            direction.to_owned(),
            (m.overlay_bytes >> 20).to_string(),
            format!("{:.2}", m.runs_after_ms / 1e3),
            format!("{:.2}", m.complete_after_ms / 1e3),
            format!("{:.0}", m.pause_ms),
            mib(m.memory_bytes),
            or_dash(m.wan_bytes_complete.map(mib)),
            or_dash(m.share_there().map(|share| format!("{:.1} %", share * 100.0))),
            format!("{:.1}", m.load_1min),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
    let bar = |m: &crate::results::DiskMove, ms: f64| Bar {
        name: format!("{}, {} MiB", m.system.words(), m.overlay_bytes >> 20),
        class: if m.system == System::Perigee { "ours" } else { "peer" },
        value: ms / 1e3,
        label: format!("{:.2} s", ms / 1e3),
    };
    let there = || results.disk_moves.iter().filter(|m| m.direction == Direction::There);
    let running: Vec<Bar> = there().map(|m| bar(m, m.runs_after_ms)).collect();
    let complete: Vec<Bar> = there().map(|m| bar(m, m.complete_after_ms)).collect();
    let title = "Until the guest runs at its destination";
    figure(page, title, "From asking.", &bars(&running, "s", title));
    let title = "Until all of its disk is there";
    figure(page, title, "From asking.", &bars(&complete, "s", title));
}

fn runs(page: &mut String, results: &Results) {
    page.push_str(
        "<h2>All runs</h2>\n<div class=\"scroll\"><table>\n<tr><th>work</th><th>RTT, ms</th><th>way</th><th>round</th>\
         <th>boot, s</th><th>work, s</th><th>migration, ms</th><th>pause, ms</th><th>WAN, MiB</th><th>load</th></tr>\n",
    );
    for run in &results.runs {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
        let cells = [
            run.work.name().to_owned(),
            run.rtt_ms.to_string(),
            run.way.words().to_owned(),
            run.round.to_string(),
            format!("{:.1}", run.boot_s),
            format!("{:.2}", run.work_s),
            or_dash(run.migration.map(|m| m.total_ms.to_string())),
            or_dash(run.migration.map(|m| m.pause_ms.to_string())),
            or_dash(run.wan_bytes.map(|bytes| format!("{:.1}", float(bytes) / f64::from(1 << 20)))),
            format!("{:.1}", run.load_1min),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;

    #[test]
    fn the_page_stands_alone_and_names_what_is_missed() {
        let page = html(&results());
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        assert!(page.contains("Missed: A remote scan at 16 ms"), "{page}");
        assert!(page.contains("000 Fig. 15"), "{page}");
        assert!(page.contains("Not measured: The queries again"), "{page}");
    }
}
