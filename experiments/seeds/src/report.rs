//! `report.html`: the papers' figures, theirs in words beside ours. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::report::page::{self, TABLE_END, figure, row};
use perigee_lab::report::plots::{Spread, Trace, spreads, traces};

use crate::bench::{DATABASE_MEMORY_BYTES, STEPS, STREAMS};
use crate::cell::{Kind, VM_COUNT};
use crate::paper::{ALMOST_ALL, path};
use crate::results::{Column, Results, Run, Side, Work};
use crate::rounds::Range;
use crate::series::{GuestPoint, ServerPoint};

const PERCENT: f64 = 100.0;
const MIB: f64 = (1 << 20) as f64;

// Writing to a String cannot fail, so the results of `write!` below are ignored.

fn text_of(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn words_of(range: Option<Range>, digits: usize) -> String {
    range.map_or_else(|| "-".to_owned(), |range| range.words(digits))
}

fn percent(share: Option<f64>) -> String {
    text_of(share.map(|share| share * PERCENT), 0)
}

/// `dilated 21.3 times`, for axes.
fn dilated(results: &Results, kind: Kind, is_dilated: bool) -> String {
    match is_dilated {
        true => format!("dilated {:.1} times", results.pace(kind, true).0),
        false => "undilated".to_owned(),
    }
}

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: seeds", "");
    lead(&mut page, results);
    let text = "The papers' text names shapes and hardly any values; their plots are not at hand as numbers. The verdicts follow from the figures.";
    page::papers(&mut page, text, &results.paper);
    page.push_str("<h2>Not measured</h2>\n<ul>\n");
    for text in &results.not_measured {
        let _ = writeln!(page, "<li>{}</li>", text.replace('&', "&amp;").replace('<', "&lt;"));
    }
    page.push_str("</ul>\n");
    execution(&mut page, results);
    over_time(&mut page, results);
    moves(&mut page, results);
    networks(&mut page, results);
    steps(&mut page, results);
    all_cells(&mut page, results);
    page::goals(&mut page, &results.goals);
    page::end(&mut page, &results.versions);
    page
}

fn lead(page: &mut String, results: &Results) {
    let quick = if results.is_quick {
        " <b>This is a quick run of one round with little data: it shows that all of it works, and its figures say nothing.</b>"
    } else {
        ""
    };
    let factors: Vec<String> = results.dilations.iter().map(|(vms, of)| {
        format!("{:.1} for {vms} VMs at once ({:.2} s in a guest, {:.3} s on the host itself, times {})", of.factor(), of.guest_s, of.native_s, of.theirs)
    }).collect();
    let rounds = results.cells.iter().map(|one| one.cell.round).max().unwrap_or_default();
    let _ = writeln!(
        page,
        "<h1>Programs on {VM_COUNT} VMs, near their data and far away</h1>\n<p class=\"lead\">The experiments of Toyoshima, Yamaguchi and Oguchi \
         (000: \"Storage access optimization with virtual machine migration during execution of parallel data processing on a virtual machine PC \
         cluster\"; 001 and 004 are papers about the same), with Perigee. They had six servers and two iSCSI targets at two sites, Xen guests of 2 GB, \
         Hash-Partitioned Apriori with 20 MB of transactions, OSDL-DBT-3, and Dummynet between the sites. Here are as many hosts, which are network namespaces of one machine with {} CPUs, \
         and guests of {} MiB with one vCPU, each at a host of its own. HPA and PFP look at {} transactions ({:.2} MB), BLAST at {} sequences, and each VM asks a \
         TPC-H database of scale factor {} of its own ({} MiB), for which it has {} MiB of memory with the disk cache.{quick}</p>\n\
         <p><b>Dilation.</b> The guests compute f times slower than the papers' machines, so the round trips are f times as long, the hosts' network cards (1 Gbit/s) f times as slow, and seconds are \
         divided by f. f is measured before the first cell, with a fixed computation: {}. Rows that are called undilated have the papers' round trips and rates as they are, and seconds as they are. What holds in \
         both does not depend on f.</p>\n\
         <p><b>Rounds.</b> Each cell is a pair of runs in the same VMs, and {rounds} rounds have each cell once. A ratio is that of one round's pair; figures are medians, with the \
         least and the greatest of the rounds in brackets or as a bar. A shape is claimed only where such ranges part.</p>",
        results.cpus,
        results.memory_bytes >> 20,
        results.transactions,
        results.transactions_bytes as f64 / 1e6,
        results.sequences,
        results.scale_factor,
        results.database_bytes >> 20,
        DATABASE_MEMORY_BYTES >> 20,
        if factors.is_empty() { "not measured yet".to_owned() } else { factors.join("; ") },
    );
}

fn spread(range: Option<Range>) -> Option<[f64; 3]> {
    range.map(|range| [range.low, range.median, range.high])
}

/// Their figures 5 and 6.
fn execution(page: &mut String, results: &Results) {
    let rtts = results.rtts(Kind::Distance, true);
    let rtts = if rtts.is_empty() { results.rtts(Kind::IscsiPerigee, true) } else { rtts };
    let names: Vec<String> = rtts.iter().map(|rtt| format!("{rtt} ms")).collect();
    let across =
        |is_dilated| format!("their round trip ({})", dilated(results, Kind::Distance, is_dilated));
    let line = |name: String, of: &dyn Fn(u32) -> Option<Range>| Spread {
        name,
        values: rtts.iter().map(|rtt| spread(of(*rtt))).collect(),
    };
    let ratio =
        |kind, is_dilated, work| move |rtt: u32| results.ratio((kind, rtt, is_dilated), work);
    let mut tpch = Vec::new();
    for kind in [Kind::Distance, Kind::IscsiPerigee, Kind::IscsiTgt] {
        let name = match kind {
            Kind::Distance => "Perigee's path",
            Kind::IscsiPerigee => "iSCSI, Perigee",
            _ => "iSCSI, tgt",
        };
        tpch.push(line(name.to_owned(), &ratio(kind, true, Work::Tpch)));
    }
    let computing = |is_dilated: bool| -> Vec<Spread> {
        let of =
            |work: &Work| line(work.words().to_owned(), &ratio(Kind::Distance, is_dilated, *work));
        [Work::Hpa, Work::Pfp, Work::Blast].iter().map(of).collect()
    };
    let seconds = |work: Work| {
        let of = |side: Side| {
            line(side.name().to_owned(), &move |rtt| {
                results.seconds((Kind::Distance, rtt, true), work, side)
            })
        };
        Side::BOTH.map(of)
    };
    let times = "times as long as with data at the site's target";
    let mut plot = |title: &str, lines: &[Spread], across: &str, up: &str| {
        if lines.iter().any(|line| line.values.iter().flatten().next().is_some()) {
            figure(page, title, "", &spreads(&names, lines, (across, up), title));
        }
    };
    plot("TPC-H far away beside near (their figure 5)", &tpch, &across(true), times);
    plot(
        "Execution time of TPC-H over Perigee's path, near and far (their figure 5)",
        &seconds(Work::Tpch),
        &across(true),
        "their seconds",
    );
    plot(
        "HPA, PFP and BLAST far away beside near (their figure 6 has HPA)",
        &computing(true),
        &across(true),
        times,
    );
    plot(
        "Execution time of HPA, near and far (their figure 6)",
        &seconds(Work::Hpa),
        &across(true),
        "their seconds",
    );
    let all = |work: &Work| line(work.words().to_owned(), &ratio(Kind::Distance, false, *work));
    let all: Vec<Spread> = Work::ALL.iter().map(all).collect();
    plot("All programs far away beside near, undilated", &all, &across(false), times);
}

/// The means of the guests' points, second by second.
fn mean_of_guests(run: &Run, pace_s: f64, value: fn(&GuestPoint) -> f64) -> Vec<(f64, f64)> {
    let longest = run.guests.iter().map(Vec::len).max().unwrap_or_default();
    let mut points = Vec::new();
    for index in 0..longest {
        let there: Vec<&GuestPoint> =
            run.guests.iter().filter_map(|points| points.get(index)).collect();
        let count = f64::from(u32::try_from(there.len()).unwrap_or(u32::MAX).max(1));
        let at_s = there.iter().map(|point| point.at_s).sum::<f64>() / count;
        points.push((at_s / pace_s, there.iter().map(|point| value(point)).sum::<f64>() / count));
    }
    points
}

/// Adds what the paper's text says of its figures 9 to 11.
fn with_theirs(title: &str, mut lines: Vec<Trace>) -> Vec<Trace> {
    if ["figure 9)", "figure 10)", "figure 11)"].iter().any(|theirs| title.ends_with(theirs)) {
        let ends = lines.iter().flat_map(|line| &line.points).map(|point| point.0);
        let last_s = ends.fold(0.0, f64::max);
        let level = ALMOST_ALL * PERCENT;
        let points = vec![(0.0, level), (last_s, level)];
        lines.push(Trace { name: "theirs, in words".to_owned(), points });
    }
    lines
}

/// The cells whose figures over time are shown: the farthest of a kind, and the nearest.
fn shown(results: &Results, kind: Kind) -> Vec<(String, Column, Side)> {
    let rtts = results.rtts(kind, true);
    let Some(far) = rtts.last() else { return Vec::new() };
    let mut shown = vec![("near".to_owned(), (kind, *far, true), Side::Near)];
    for rtt in [rtts[0], *far] {
        shown.push((format!("{rtt} ms"), (kind, rtt, true), Side::Far));
    }
    shown.dedup_by_key(|one| one.0.clone());
    shown
}

/// A run's points, with the seconds divided by the second argument.
type PointsOf<'a> = dyn Fn(&Run, f64) -> Vec<(f64, f64)> + 'a;

/// Their figures 7 to 11, of the first round.
fn over_time(page: &mut String, results: &Results) {
    let run = |column: Column, work: Work, side: Side| {
        let first = results.of(column).find(|one| one.cell.round == 1)?;
        first.run(work, side)
    };
    let of = |kind: Kind, work: Work, points: &PointsOf<'_>| -> Vec<Trace> {
        let trace = |(name, column, side): (String, Column, Side)| {
            Some(Trace {
                name,
                points: points(run(column, work, side)?, results.pace(kind, true).0),
            })
        };
        shown(results, kind).into_iter().filter_map(trace).collect()
    };
    let guests = |kind: Kind, work: Work, value: fn(&GuestPoint) -> f64| {
        of(kind, work, &|run, pace_s| mean_of_guests(run, pace_s, value))
    };
    let servers = |kind: Kind, work: Work, value: fn(&ServerPoint) -> Option<f64>| {
        let points = |run: &Run, pace_s: f64| {
            run.servers
                .iter()
                .filter_map(|point| Some((point.at_s / pace_s, value(point)?)))
                .collect()
        };
        of(kind, work, &points)
    };
    let mut plot = |kind: Kind, title: &str, caption: &str, unit: &str, lines: Vec<Trace>| {
        if lines.iter().any(|line| !line.points.is_empty()) {
            let across = format!("their seconds ({})", dilated(results, kind, true));
            let lines = with_theirs(title, lines);
            figure(page, title, caption, &traces(&lines, (&across, unit), title));
        }
    };
    let mean = "The first round; the mean of the four guests, each as its kernel counts.";
    let far = "The first round. The target at the other site; with data near it has nothing to do.";
    let busy: fn(&GuestPoint) -> f64 = |point| point.busy * PERCENT;
    let used: fn(&GuestPoint) -> f64 = |point| point.used * PERCENT;
    for kind in [Kind::IscsiPerigee, Kind::Distance] {
        let over = path(kind);
        plot(
            kind,
            &format!("CPU of the initiators, TPC-H, {over} (their figure 7)"),
            mean,
            "%",
            guests(kind, Work::Tpch, busy),
        );
        plot(
            kind,
            &format!("CPU of the target, TPC-H, {over} (their figure 8)"),
            far,
            "CPUs",
            servers(kind, Work::Tpch, |point| Some(point.cpus[1])),
        );
        plot(
            kind,
            &format!("Memory of the initiators, TPC-H, {over} (their figure 10)"),
            mean,
            "%",
            guests(kind, Work::Tpch, used),
        );
        plot(
            kind,
            &format!("Memory of the target with its disk cache, TPC-H, {over} (their figure 11)"),
            far,
            "%",
            servers(kind, Work::Tpch, |point| Some(point.memory[1]? * PERCENT)),
        );
    }
    plot(
        Kind::Distance,
        "CPU of the initiators, HPA (their figure 9)",
        mean,
        "%",
        guests(Kind::Distance, Work::Hpa, busy),
    );
}

/// Their figures 14 and 15.
fn moves(page: &mut String, results: &Results) {
    let text = "Their seconds. A move is that of two VMs with what they run, one after the other.";
    let columns = [
        "round trip",
        "dilation",
        "move, s",
        "run at the data, s",
        "both, s",
        "run far away, s",
        "both beside far away",
    ];
    let mut rows = Vec::new();
    for is_dilated in [true, false] {
        for rtt in results.rtts(Kind::MoveHand, is_dilated) {
            let column = (Kind::MoveHand, rtt, is_dilated);
            let pace = results.pace(Kind::MoveHand, is_dilated);
            let of = |value: &dyn Fn(&crate::results::Measured) -> Option<f64>| {
                Range::of(results.of(column).filter_map(value))
            };
            let run =
                |one: &crate::results::Measured, side| Some(one.run(Work::Tpch, side)?.seconds);
            let moved_s = |one: &crate::results::Measured| Some(one.moved.as_ref()?.seconds);
            let both_s =
                |one: &crate::results::Measured| Some(moved_s(one)? + run(one, Side::Near)?);
            rows.push([
                format!("{rtt} ms"),
                dilated(results, Kind::MoveHand, is_dilated),
                words_of(of(&|one| Some(pace.theirs_s(moved_s(one)?))), 2),
                words_of(results.seconds(column, Work::Tpch, Side::Near), 2),
                words_of(of(&|one| Some(pace.theirs_s(both_s(one)?))), 2),
                words_of(results.seconds(column, Work::Tpch, Side::Far), 2),
                words_of(of(&|one| Some(both_s(one)? / run(one, Side::Far)?)), 2),
            ]);
        }
    }
    if rows.is_empty() {
        return;
    }
    page::table(page, "Moving to the data (their figures 14 and 15)", text, &columns);
    rows.iter().for_each(|cells| row(page, "", cells));
    page.push_str(TABLE_END);
}

fn networks(page: &mut String, results: &Results) {
    let text = "One network for what ranks say to each other and for storage, and one for each, in turns in the same VMs. Each host's card has the rate of their Ethernet in each direction.";
    let columns = [
        "program",
        "dilation",
        "one beside two",
        "ranks' talk, MiB",
        "all else, MiB",
        "busiest card with one, % of its rate",
    ];
    let mut rows = Vec::new();
    for is_dilated in [true, false] {
        let column = (Kind::Network, 0, is_dilated);
        for work in Work::ALL {
            let Some(ratio) = results.ratio(column, work) else { continue };
            let of = |side, value: fn(&crate::results::CardsUse) -> f64| {
                Range::of(
                    results.of(column).filter_map(|one| Some(value(&one.run(work, side)?.cards?))),
                )
            };
            rows.push([
                work.words().to_owned(),
                dilated(results, Kind::Network, is_dilated),
                ratio.words(2),
                words_of(of(Side::Near, |cards| cards.tunnels_bytes as f64 / MIB), 1),
                words_of(of(Side::Near, |cards| cards.others_bytes as f64 / MIB), 1),
                words_of(of(Side::Far, |cards| cards.busiest * PERCENT), 0),
            ]);
        }
    }
    if rows.is_empty() {
        return;
    }
    page::table(page, "One network or two", text, &columns);
    rows.iter().for_each(|cells| row(page, "", cells));
    page.push_str(TABLE_END);
}

/// What TPC-H's steps take, by distance.
fn steps(page: &mut String, results: &Results) {
    let columns: Vec<Column> = [Kind::Distance, Kind::IscsiPerigee, Kind::IscsiTgt]
        .into_iter()
        .flat_map(|kind| results.rtts(kind, true).into_iter().map(move |rtt| (kind, rtt, true)))
        .collect();
    let run = |column: Column| results.of(column).find_map(|one| one.run(Work::Tpch, Side::Far));
    let Some(names) = columns.iter().find_map(|column| run(*column)).map(|run| &run.steps) else {
        return;
    };
    let mut heads = vec!["step".to_owned()];
    heads.extend(columns.iter().map(|(kind, rtt, _)| format!("{}, {rtt} ms", kind.name())));
    let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    let text = format!(
        "Their seconds with the data far away, medians of the rounds; the mean of the VMs. The power test is {STEPS}, and the throughput test has the streams {} beside a stream of refreshes that are rolled back.",
        STREAMS.join(" and ")
    );
    page::table(page, "TPC-H, step by step", &text, &heads);
    for (index, step) in names.iter().enumerate() {
        let mut cells = vec![step.name.clone()];
        for column in &columns {
            let pace = results.pace(column.0, column.2);
            let all = results.of(*column).filter_map(|one| {
                Some(pace.theirs_s(one.run(Work::Tpch, Side::Far)?.steps.get(index)?.seconds))
            });
            cells.push(text_of(Range::of(all).map(|range| range.median), 2));
        }
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

fn all_cells(page: &mut String, results: &Results) {
    let columns = [
        "cell",
        "program",
        "near, s",
        "far, s",
        "far beside near",
        "guests' CPU, %",
        "waits for disks, %",
        "guests' memory at most (TPC-H: the database's), %",
        "near target, CPUs",
        "far target, CPUs",
        "far target's memory, %",
        "WAN, MiB",
        "fixed computation, s",
        "load before",
    ];
    let text = "Seconds as the machine measured them, not divided by f. For a host's cell, far is over iSCSI to the site's target; for a network's, near is two networks and far one. The columns after the ratio are of the far run.";
    page::table(page, "All cells", text, &columns);
    for one in &results.cells {
        for work in Work::ALL {
            let [near, far] = Side::BOTH.map(|side| one.run(work, side));
            let Some(run) = far.or(near) else { continue };
            let means = run.means;
            let cells = [
                one.cell.to_string(),
                work.words().to_owned(),
                text_of(near.map(|run| run.seconds), 1),
                text_of(far.map(|run| run.seconds), 1),
                text_of(one.ratio(work), 2),
                percent(means.busy),
                percent(means.waits),
                percent(means.used_most),
                text_of(means.target_cpus[0], 2),
                text_of(means.target_cpus[1], 2),
                percent(means.target_memory_last[1]),
                text_of(means.wan_bytes.map(|bytes| bytes / MIB), 1),
                text_of(one.fixed_s, 1),
                format!("{:.1}", one.load_1min),
            ];
            row(page, "", &cells);
        }
    }
    page.push_str(TABLE_END);
}

#[expect(clippy::print_stdout, reason = "the figures are what it is for")]
pub fn print(results: &Results) {
    for figure in &results.paper {
        println!("{:<32} {}: {}", figure.verdict.words(), figure.figure, figure.ours);
    }
    println!("{} cells in {:.1} min", results.cells.len(), results.whole_s / 60.0);
    for goal in &results.goals {
        let met = match goal.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "-",
        };
        println!("{met:<7} {}: {}", goal.goal, goal.measured);
    }
}
