//! `report.html`: the results on one page. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::measuring::median;
use perigee_lab::report::page::{self, figure, row};
use perigee_lab::report::plots::{Bar, Line, bars, curve};
use perigee_lab::report::svg::escape;

use crate::curves::{ATTACH, CHAIN, CLIENTS, SIZE_READ, SIZE_WRITE, VOLUMES};
use crate::goals::OPEN_TIME;
use crate::results::{CPU, Figure, IOPS, IOPS_WITH_FLUSH, MACHINE, Measurement, P99_US, Results};
use crate::workloads::{WORKLOADS, Workload};

// Writing to a String cannot fail, so the results of `write!` below are ignored.

pub fn html(results: &Results) -> String {
    let mut page =
        page::start("Perigee: the volume engine beside its peers", include_str!("style.css"));
    let met = results.goals.iter().filter(|goal| goal.met == Some(true)).count();
    let judged = results.goals.iter().filter(|goal| goal.met.is_some()).count();
    let _ = writeln!(
        page,
        "<h1>The volume engine beside its peers</h1>\n<p class=\"lead\">{met} of {judged} goals are met. \
         Medians of {} rounds; within a round all servers take turns.</p>",
        results.rounds
    );
    if results.quick {
        page.push_str("<p class=\"fault\">A quick run: these figures say little.</p>\n");
    }
    machine(&mut page, results);
    goals(&mut page, results);
    page.push_str(
        "<h2>Workloads</h2>\n<p>The volume server and QEMU's servers serve a clone of one golden image; nbdkit \
         serves the image itself (file) or its own overlay (cow), whose map is lost when it ends. Echo has no storage: it \
         answers with zeros, so it shows what the messages alone cost. Everything is in the page cache unless the \
         workload is called cold.</p>\n",
    );
    for workload in &WORKLOADS {
        workload_figure(&mut page, results, workload);
    }
    curves(&mut page, results);
    counted(&mut page, results);
    fio(&mut page, results);
    versions(&mut page, results);
    page.push_str(page::END);
    page
}

/// So that the figures of two machines can be compared.
fn machine(page: &mut String, results: &Results) {
    let own = results.figures.iter().filter(|figure| figure.server == MACHINE);
    let own = own.map(|of| format!("{} takes {:.2} {}", of.name, of.value, of.unit));
    let echo = |workload: &str, transport: &str| {
        let rate = results.median(workload, transport, "echo", IOPS)?;
        let transport = transport_words(transport);
        Some(format!("echo answers {:.0} k/s of {workload} over {transport}", rate / 1000.0))
    };
    let cases = ["read-4k-qd32", "read-4k-64-clients"];
    let echo = cases.iter().flat_map(|name| [echo(name, "unix"), echo(name, "tcp")]).flatten();
    let all: Vec<String> = own.chain(echo).collect();
    if !all.is_empty() {
        let _ = writeln!(page, "<p>On this machine {}.</p>", escape(&all.join("; ")));
    }
}

fn goals(page: &mut String, results: &Results) {
    page.push_str(
        "<h2>Goals</h2>\n<div class=\"scroll\"><table>\n<tr><th>goal</th><th>target</th><th>measured</th>\
         <th>met</th><th>ours : theirs</th></tr>\n",
    );
    for goal in &results.goals {
        let met = match goal.met {
            Some(true) => "yes",
            Some(false) => "no",
            None => "not measured",
        };
        let cells = [
            goal.goal.clone(),
            goal.target.clone(),
            goal.measured.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}")),
            met.to_owned(),
            goal.how.clone(),
        ];
        row(page, if goal.met == Some(false) { "missed" } else { "" }, &cells);
    }
    page.push_str("</table></div>\n");
}

fn class(server: &str) -> &'static str {
    match server {
        "perigee" => "ours",
        "echo" => "echo",
        _ => "peer",
    }
}

fn workload_figure(page: &mut String, results: &Results, workload: &Workload) {
    let transport = workload.transport.word();
    let bar = |server: String| {
        let value = |column| results.median(workload.name, transport, &server, column);
        let iops = value(IOPS)?;
        let (cpu, p99_us) = (value(CPU)?, value(P99_US)?);
        let flush = value(IOPS_WITH_FLUSH)
            .map_or_else(String::new, |iops| format!(", {:.0} k with its flush", iops / 1000.0));
        let label = format!("{:.1} k, p99 {p99_us:.0} µs, CPU {cpu:.1} s{flush}", iops / 1000.0);
        Some(Bar { class: class(&server), name: server, value: iops / 1000.0, label })
    };
    let servers = results.servers(workload.name, transport);
    let mut all: Vec<Bar> = servers.into_iter().filter_map(bar).collect();
    if all.is_empty() {
        return;
    }
    all.sort_by(|a, b| b.value.total_cmp(&a.value));
    let title = format!("{} ({})", workload.title, transport_words(transport));
    let svg = bars(&all, "thousand requests a second", &title);
    let caption = "Behind each bar: requests a second, the time that 99 % do not exceed, and the server's CPU \
                   seconds for a million requests.";
    figure(page, &title, caption, &svg);
}

fn transport_words(transport: &str) -> &'static str {
    if transport == "tcp" { "TCP" } else { "unix socket" }
}

/// A curve of the measurements: its name, its title, and the quantity on the x axis.
const CURVES: [(&str, &str, &str); 5] = [
    (CLIENTS, "4 KiB random read by a number of clients, each at queue depth 1", "clients"),
    (
        VOLUMES,
        "4 KiB random read from a number of clones, each by one client at queue depth 4",
        "clones",
    ),
    (SIZE_READ, "4 KiB random read of blocks spread over a sparse volume, queue depth 32", "GiB"),
    (SIZE_WRITE, "4 KiB first write of blocks spread over a sparse volume, queue depth 32", "GiB"),
    (CHAIN, "4 KiB random read through a chain of layers, queue depth 32", "layers"),
];

const FIGURE_CURVES: [(&str, &str, &str, &str); 2] = [
    (ATTACH, "Attaching a volume: to the end of its first write and flush", "GiB", "ms"),
    (OPEN_TIME, "Starting the server on a pool, to its first answer", "volumes", "s"),
];

fn curves(page: &mut String, results: &Results) {
    page.push_str("<h2>Cost grows with work, not with size</h2>\n");
    for (name, title, axis) in CURVES {
        let points = results
            .results
            .iter()
            .filter(|m| m.workload == name)
            .filter_map(|m| Some((m.server.clone(), m.at?, m.iops / 1000.0)));
        draw(page, points.collect(), title, (axis, "thousand requests a second"));
    }
    for (name, title, axis, unit) in FIGURE_CURVES {
        let points = results
            .figures
            .iter()
            .filter(|f| f.name == name)
            .filter_map(|f| Some((f.server.clone(), f.at?, f.value)));
        draw(page, points.collect(), title, (axis, unit));
    }
}

/// The points are server, position and value. Of several values at one position the median is drawn.
fn draw(page: &mut String, points: Vec<(String, f64, f64)>, title: &str, axes: (&str, &str)) {
    let (mut places, mut servers): (Vec<f64>, Vec<String>) = (Vec::new(), Vec::new());
    for (server, place, _) in &points {
        if !places.contains(place) {
            places.push(*place);
        }
        if !servers.contains(server) {
            servers.push(server.clone());
        }
    }
    if points.is_empty() {
        return;
    }
    places.sort_by(f64::total_cmp);
    let value = |server: &str, place: f64| {
        let here = points.iter().filter(|(s, p, _)| s == server && *p == place);
        median(here.map(|(.., value)| *value))
    };
    let lines: Vec<Line> = servers
        .into_iter()
        .map(|name| {
            let values = places.iter().map(|place| value(&name, *place)).collect();
            Line { name, values }
        })
        .collect();
    let labels: Vec<String> = places.iter().map(|place| format!("{place:.0}")).collect();
    figure(page, title, "", &curve(&labels, &lines, axes, title));
}

fn counted(page: &mut String, results: &Results) {
    page.push_str(
        "<h2>Counted once</h2>\n<div class=\"scroll\"><table>\n<tr><th>figure</th><th>server</th><th>value</th></tr>\n",
    );
    for Figure { name, server, value, unit, .. } in
        results.figures.iter().filter(|figure| figure.at.is_none() && figure.server != MACHINE)
    {
        row(page, "", &[name.clone(), server.clone(), format!("{value:.2} {unit}")]);
    }
    page.push_str("</table></div>\n");
}

fn fio(page: &mut String, results: &Results) {
    let by_fio: Vec<&Measurement> =
        results.results.iter().filter(|m| m.generator == "fio").collect();
    if by_fio.is_empty() {
        return;
    }
    page.push_str(
        "<h2>By fio</h2>\n<p>fio's nbd engine beside the generator used above. Where echo, which does nothing, is \
         hardly faster than the rest, fio itself is what was measured.</p>\n<div class=\"scroll\"><table>\n\
         <tr><th>workload</th><th>transport</th><th>server</th><th>fio, k/s</th><th>own generator, k/s</th></tr>\n",
    );
    let mut seen = Vec::new();
    for m in &by_fio {
        let case = (&m.workload, &m.transport, &m.server);
        if seen.contains(&case) {
            continue;
        }
        seen.push(case);
        let same = by_fio.iter().filter(|o| (&o.workload, &o.transport, &o.server) == case);
        let fio = median(same.map(|m| m.iops));
        let own = results.median(&m.workload, &m.transport, &m.server, IOPS);
        let thousands = |iops: Option<f64>| {
            iops.map_or_else(|| "–".to_owned(), |iops| format!("{:.1}", iops / 1000.0))
        };
        let cells = [
            m.workload.clone(),
            m.transport.clone(),
            m.server.clone(),
            thousands(fio),
            thousands(own),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
}

fn versions(page: &mut String, results: &Results) {
    let versions: Vec<String> =
        results.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let _ = writeln!(page, "<p class=\"soft\">Versions: {}</p>", escape(&versions.join("; ")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::judge;
    use crate::results::tests::measurement;

    fn some() -> Results {
        let mut results = Results { rounds: 5, ..Results::default() };
        for (server, iops) in [("perigee", 9000.0), ("nbdkit cow", 1000.0)] {
            results.results.push(measurement("read-4k-qd32", server, "unix", iops));
            let fio = measurement("read-4k-qd32", server, "unix", iops);
            results.results.push(Measurement { generator: "fio".into(), ..fio });
            for at in [1.0, 2.0] {
                let point = measurement(CLIENTS, server, "unix", iops);
                results.results.push(Measurement { at: Some(at), ..point });
            }
        }
        results.goals = judge(&results);
        results.versions.insert("a <b>".into(), "1".into());
        results
    }

    #[test]
    fn the_page_stands_alone() {
        let page = html(&some());
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        assert_eq!(page.matches("<svg").count(), 2);
        assert!(page.contains("a &lt;b&gt;"));
    }

    #[test]
    fn a_missed_goal_is_marked() {
        let mut results = some();
        assert!(!html(&results).contains("class=\"missed\""));
        results.results[0].iops = 10.0;
        results.goals = judge(&results);
        assert!(html(&results).contains("class=\"missed\""));
    }

    #[test]
    fn a_run_without_results_has_a_page() {
        assert!(html(&Results::default()).contains("0 of 0 goals"));
    }
}
