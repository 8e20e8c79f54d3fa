//! `report.html`: the paper's figures 5 to 11, theirs in words beside ours. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::report::page::{self, TABLE_END, figure, row};
use perigee_lab::report::plots::{Line, Trace, curve, traces};

use crate::paper::ALMOST_ALL;
use crate::results::{Results, Run, VM_COUNT, Work, place};
use crate::series::{GuestPoint, ServerPoint};

const PERCENT: f64 = 100.0;
const MIB: f64 = (1 << 20) as f64;

// Writing to a String cannot fail, so the results of `write!` below are ignored.

fn text_of(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn percent(share: Option<f64>) -> String {
    text_of(share.map(|share| share * PERCENT), 0)
}

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: seeds", "");
    let quick = match results.is_quick {
        true => {
            " <b>This is a quick run with little data: it shows that all of it works, and its figures say nothing.</b>"
        }
        false => "",
    };
    let _ = writeln!(
        page,
        "<h1>Programs on {VM_COUNT} VMs, with their data local and far away</h1>\n<p class=\"lead\">Experiment 1 of Toyoshima, Yamaguchi and Oguchi \
         (\"Storage access optimization with virtual machine migration during execution of parallel data processing on a virtual machine PC \
         cluster\"), with Perigee. They had Xen guests of 2 GB, Hash-Partitioned Apriori with 20 MB of transactions, OSDL-DBT-3, iSCSI, and Dummynet between two \
         sites. Here are {VM_COUNT} VMs of one job with one vCPU and 320 MiB each, at one of two network namespaces of a machine with {} CPUs, and Perigee's remote volumes; \
         the lab delays what goes between the sites. HPA and PFP look at {} transactions ({:.1} MB), BLAST at {} sequences, and each VM asks a TPC-H database of scale factor {} \
         of its own. Times are from a program's start in all VMs, with cold caches, until it has ended in all, by the machine's clock.{quick}</p>",
        results.cpus,
        results.transactions,
        results.transactions_bytes as f64 / 1e6,
        results.sequences,
        results.scale_factor,
    );
    page::goals(&mut page, &results.goals);
    theirs_and_ours(&mut page, results);
    page.push_str("<h2>Not measured</h2>\n<ul>\n");
    for text in &results.not_measured {
        let _ = writeln!(page, "<li>{}</li>", text);
    }
    page.push_str("</ul>\n");
    execution(&mut page, results);
    over_time(&mut page, results);
    steps(&mut page, results);
    on_host(&mut page, results);
    all_runs(&mut page, results);
    page::end(&mut page, &results.versions);
    page
}

fn theirs_and_ours(page: &mut String, results: &Results) {
    let text = "The paper's text names shapes and hardly any values; its plots are not at hand as numbers. Where it says \"almost 100 %\", the plots below have a line \"theirs\".";
    page::table(page, "Theirs and ours", text, &["figure", "theirs", "ours", "agrees", "why not"]);
    for figure in &results.paper {
        let agrees = match figure.agrees {
            Some(true) => "yes",
            Some(false) => "no",
            None => "not judged",
        };
        let why = figure.why.clone().unwrap_or_default();
        let cells = [&figure.figure, &figure.theirs, &figure.ours, agrees, &why].map(String::from);
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

/// What TPC-H's steps take, by distance.
fn steps(page: &mut String, results: &Results) {
    let places = results.places();
    let of = |at: &Option<u32>| results.run(Work::Tpch, *at).map(|run| run.steps.as_slice());
    let Some(names) = places.iter().find_map(of).filter(|steps| !steps.is_empty()) else { return };
    let mut columns = vec!["step".to_owned()];
    columns.extend(places.iter().map(|at| place(*at)));
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let text =
        "Seconds, in the order of the power test; the mean of the VMs, by the machine's clock.";
    page::table(page, "TPC-H, step by step", text, &columns);
    for (index, step) in names.iter().enumerate() {
        let seconds = |at| of(at).and_then(|steps| steps.get(index)).map(|step| step.seconds);
        let mut cells = vec![step.name.clone()];
        cells.extend(places.iter().map(|at| text_of(seconds(at), 2)));
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

fn on_host(page: &mut String, results: &Results) {
    if results.on_host.is_empty() {
        return;
    }
    let text = format!(
        "The paper's Domain0 and DomainU: the same programs with {VM_COUNT} processes on the host itself, without any VM, and in the VMs with local data. The VMs ran with {}.",
        if results.accelerator.is_empty() {
            "an accelerator that is not known"
        } else {
            &results.accelerator
        }
    );
    let columns = ["program", "host, s", "VMs, s", "times", "host's CPUs, %", "load before"];
    page::table(page, "On the host itself and in the VMs", &text, &columns);
    for run in &results.on_host {
        let cells = [
            run.work.words().to_owned(),
            format!("{:.1}", run.seconds),
            text_of(results.seconds(run.work, None), 1),
            text_of(results.overhead(run.work), 1),
            percent(Some(run.busy)),
            format!("{:.1}", run.load_1min),
        ];
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

/// Their figures 5 and 6.
fn execution(page: &mut String, results: &Results) {
    let places = results.places();
    let names: Vec<String> = places.iter().map(|at| place(*at)).collect();
    let lines = |works: &[Work], of: &dyn Fn(Work, Option<u32>) -> Option<f64>| -> Vec<Line> {
        let line = |work: &Work| Line {
            name: work.words().to_owned(),
            values: places.iter().map(|at| of(*work, *at)).collect(),
        };
        works.iter().map(line).collect()
    };
    let seconds = |work, at| results.seconds(work, at);
    let growth = |work, at| results.growth(work, at);
    let computing = [Work::Hpa, Work::Pfp, Work::Blast];
    for (title, works) in [
        ("Execution time of TPC-H (their figure 5)", &[Work::Tpch][..]),
        ("Execution time of HPA, PFP and BLAST (their figure 6 has HPA)", &computing),
    ] {
        let svg = curve(&names, &lines(works, &seconds), ("where the data is", "s"), title);
        figure(page, title, "", &svg);
    }
    let title = "Execution time beside that with local data";
    let svg =
        curve(&names, &lines(&Work::ALL, &growth), ("where the data is", "times as long"), title);
    figure(page, title, "", &svg);
}

/// The means of the guests' points, second by second.
fn mean_of_guests(run: &Run, value: fn(&GuestPoint) -> f64) -> Vec<(f64, f64)> {
    let longest = run.guests.iter().map(Vec::len).max().unwrap_or_default();
    let mut points = Vec::new();
    for index in 0..longest {
        let there: Vec<&GuestPoint> =
            run.guests.iter().filter_map(|points| points.get(index)).collect();
        let count = f64::from(u32::try_from(there.len()).unwrap_or(u32::MAX).max(1));
        let at_s = there.iter().map(|point| point.at_s).sum::<f64>() / count;
        points.push((at_s, there.iter().map(|point| value(point)).sum::<f64>() / count));
    }
    points
}

/// At most four lines can be told apart: local data, two round trips, and theirs.
fn shown(results: &Results) -> Vec<Option<u32>> {
    let places = results.places();
    let wanted = [None, Some(4), Some(16)];
    let found: Vec<Option<u32>> = wanted.into_iter().filter(|at| places.contains(at)).collect();
    if found.len() > 1 { found } else { places.into_iter().take(wanted.len()).collect() }
}

/// Adds what the paper's text says of its figures 9 and 10. (Figure 11 is in MiB here.)
fn with_theirs(title: &str, mut lines: Vec<Trace>) -> Vec<Trace> {
    if ["figure 9)", "figure 10)"].iter().any(|theirs| title.ends_with(theirs)) {
        let ends = lines.iter().flat_map(|line| &line.points).map(|point| point.0);
        let last_s = ends.fold(0.0, f64::max);
        let level = ALMOST_ALL * PERCENT;
        let points = vec![(0.0, level), (last_s, level)];
        lines.push(Trace { name: "theirs, in words".to_owned(), points });
    }
    lines
}

fn over_time(page: &mut String, results: &Results) {
    let guests = |work: Work, value: fn(&GuestPoint) -> f64| -> Vec<Trace> {
        let run = |at: &Option<u32>| results.run(work, *at);
        let of = |run: &Run| Trace { name: run.place(), points: mean_of_guests(run, value) };
        shown(results).iter().filter_map(run).map(of).collect()
    };
    let servers = |work: Work, value: fn(&ServerPoint) -> f64| -> Vec<Trace> {
        let run = |at: &Option<u32>| results.run(work, *at);
        let points =
            |run: &Run| run.servers.iter().map(|point| (point.at_s, value(point))).collect();
        let of = |run: &Run| Trace { name: run.place(), points: points(run) };
        shown(results).iter().filter_map(run).map(of).collect()
    };
    let mut plot = |title: &str, caption: &str, unit: &str, lines: Vec<Trace>| {
        if lines.iter().any(|line| !line.points.is_empty()) {
            let lines = with_theirs(title, lines);
            figure(page, title, caption, &traces(&lines, ("s", unit), title));
        }
    };
    let mean = "The mean of the four guests, each as its kernel counts.";
    let at_far = "The volume server's process at the host at the other end of the WAN. With local data it has nothing to do.";
    let cpu = |point: &GuestPoint| point.busy * PERCENT;
    plot("CPU of the initiators, TPC-H (their figure 7)", mean, "%", guests(Work::Tpch, cpu));
    plot(
        "CPU of the target, TPC-H (their figure 8)",
        at_far,
        "CPUs",
        servers(Work::Tpch, |p| p.cpus[1]),
    );
    plot("CPU of the initiators, HPA (their figure 9)", mean, "%", guests(Work::Hpa, cpu));
    plot("CPU of the initiators, PFP", mean, "%", guests(Work::Pfp, cpu));
    plot("CPU of the initiators, BLAST", mean, "%", guests(Work::Blast, cpu));
    let used = "All that is not free, with the disk cache; the mean of the four guests.";
    plot(
        "Memory of the initiators, TPC-H (their figure 10)",
        used,
        "%",
        guests(Work::Tpch, |point| point.used * PERCENT),
    );
    plot(
        "Memory of the initiators, HPA",
        used,
        "%",
        guests(Work::Hpa, |point| point.used * PERCENT),
    );
    plot(
        "Memory of the target, TPC-H (their figure 11)",
        "The volume server's process, without the disk cache, which the hosts of this lab share.",
        "MiB",
        servers(Work::Tpch, |point| point.resident_bytes[1] as f64 / MIB),
    );
    plot(
        "What the WAN carries, TPC-H",
        "Both directions.",
        "MiB/s",
        servers(Work::Tpch, |point| point.wan_bytes_per_s / MIB),
    );
}

fn all_runs(page: &mut String, results: &Results) {
    let columns = [
        "program",
        "data",
        "s",
        "times local",
        "guests' CPU, %",
        "waits for disks, %",
        "guests' memory at the end, %",
        "of it disk cache, %",
        "server here, CPUs",
        "server there, CPUs",
        "server there, MiB",
        "WAN, MiB",
        "fastest guest clock",
        "load before",
    ];
    let text = "CPU: means over the run. Here is the VMs' host, there the other one. Load: threads that ran or waited for a CPU in the minute before.";
    page::table(page, "All runs", text, &columns);
    for run in &results.runs {
        let means = run.means();
        let cells = [
            run.work.words().to_owned(),
            run.place(),
            format!("{:.1}", run.seconds),
            text_of(results.growth(run.work, run.rtt_ms), 2),
            percent(means.busy),
            percent(means.waits),
            percent(means.used_last),
            percent(means.cached_last),
            text_of(means.server_cpus[0], 2),
            text_of(means.server_cpus[1], 2),
            text_of(means.far_resident_bytes.map(|bytes| bytes / MIB), 0),
            text_of(means.wan_bytes.map(|bytes| bytes / MIB), 1),
            text_of(run.clocks.iter().copied().reduce(f64::max), 2),
            format!("{:.1}", run.load_1min),
        ];
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

#[expect(clippy::print_stdout, reason = "the figures are what it is for")]
pub fn print(results: &Results) {
    for work in Work::ALL {
        let cell = |at: &Option<u32>| {
            format!("{}: {} s", place(*at), text_of(results.seconds(work, *at), 1))
        };
        let cells: Vec<String> = results.places().iter().map(cell).collect();
        println!("{:<6} {}", work.words(), cells.join("   "));
    }
    for run in &results.on_host {
        let times = text_of(results.overhead(run.work), 1);
        let how = if results.accelerator.is_empty() { "VMs" } else { &results.accelerator };
        println!(
            "{:<6} host itself: {:.1} s   VMs with local data ({how}): {times} times as long",
            run.work.words(),
            run.seconds
        );
    }
    if results.whole_s > 0.0 {
        println!("all of it: {:.1} min", results.whole_s / 60.0);
    }
    for goal in &results.goals {
        let met = match goal.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "-",
        };
        println!("{met:<7} {}: {}", goal.goal, goal.measured);
    }
    for text in &results.not_measured {
        println!("not measured: {text}");
    }
}
