//! The demo's `report.html`: a single file without scripts, with a light and a dark style.
//!
//! It is a pure function of [`Outcome`], so a report can be drawn again from `results.json`.

mod charts;
pub mod page;
pub mod plots;
pub mod svg;

use std::fmt::Write;

use perigee_model::phases::{Part, Phases};
use perigee_model::plan::Plan;
use perigee_model::units;

use crate::demo::outcome::{ORDER_WORDS, Outcome, Run, RunName};
use crate::demo::{PLAIN_WORDS, basis_words, way_word};
use page::{figure, row};
use svg::escape;

/// The whole page.
pub fn html(outcome: &Outcome) -> String {
    let mut page = page::start(&format!("Perigee: {}", outcome.title()), "");
    head(&mut page, outcome);
    figure(
        &mut page,
        "How long the job takes",
        &format!(
            "Each run is the same job: a database VM that answers the same queries with a cold cache. {ORDER_WORDS}"
        ),
        &charts::bars(outcome),
    );
    results(&mut page, outcome);
    time_lines(&mut page, outcome);
    moves(&mut page, outcome);
    reasons(&mut page, outcome);
    setting(&mut page, outcome);
    page.push_str(page::END);
    page
}

/// The page's first chart as a file of its own, for a document: its style is in it, and is the light one.
pub fn picture(outcome: &Outcome) -> String {
    let style = "text{fill:#5c6670;font:12.5px sans-serif}.name{fill:#1d2329;font-weight:600}.value{fill:#1d2329}\
        .inside{fill:#fff}.grid{stroke:#dfe3e7}.axis{stroke:#5c6670}.predicted{fill:#b9cfe8}.measured{fill:#2f6fbf}\
        .peer{fill:#7a8794}";
    let svg = charts::bars(outcome);
    let open = "<svg xmlns=\"http://www.w3.org/2000/svg\" ";
    let svg = svg.replacen("<svg ", open, 1);
    let white = r##"<rect width="100%" height="100%" fill="#ffffff"/>"##;
    svg.replacen(">\n", &format!(">\n<style>{style}</style>\n{white}\n"), 1)
}

// Writing to a String cannot fail, so the results of `write!` below are ignored.

fn head(page: &mut String, outcome: &Outcome) {
    let _ =
        writeln!(page, "<h1>{}</h1>\n<p class=\"lead\">{}</p>", outcome.title(), summary(outcome));
    for fault in outcome.faults() {
        let _ = writeln!(page, "<p class=\"fault\">{}</p>", escape(&fault));
    }
    for told in outcome.out_of_order() {
        let _ = writeln!(page, "<p>{}</p>", escape(&told));
    }
}

fn summary(outcome: &Outcome) -> String {
    let seconds = |name| outcome.run(name).map(|run| run.measured_s);
    let (Some(plain), Some(remote), Some(beside)) =
        (&outcome.plain, seconds(RunName::Remote), seconds(RunName::Beside))
    else {
        return "Not all runs took place.".to_owned();
    };
    let far = [RunName::Planned, RunName::Large].into_iter().filter_map(|name| outcome.run(name));
    let far: Vec<String> =
        far.map(|run| format!("{:.1} s: {}", run.measured_s, went(run))).collect();
    format!(
        "A database VM {} ms away from its data needs {:.1} s for its queries with QEMU's own NBD, {remote:.1} s with \
         Perigee, and {beside:.1} s beside the data. Started far away, it took {}.",
        outcome.rtt_ms,
        plain.measured_s,
        escape(&far.join("; and "))
    )
}

/// What the planner did in a run.
fn went(run: &Run) -> String {
    let Some(m) = run.migrations.first() else {
        let came = "the planner brought the data to the VM";
        return if run.data_came() { came } else { "nothing moved" }.to_owned();
    };
    let done = m
        .job_progress
        .map_or_else(String::new, |p| format!(" with {:.0} % of its work done", p * 100.0));
    format!(
        "the planner moved the running VM to {}{done}, at the cost of a pause of {} ms",
        m.to, m.downtime_ms
    )
}

fn results(page: &mut String, outcome: &Outcome) {
    page.push_str(
        "<h2>Figures</h2>\n<div class=\"scroll\"><table>\n<tr><th>run</th><th>predicted</th><th>measured, s</th>\
         <th>in range</th><th>error, %</th><th>migration, ms</th><th>pause, ms</th><th>moved</th><th>moved at, %</th>\
         <th>answers, SHA-256</th></tr>\n",
    );
    if let Some(plain) = &outcome.plain {
        let mut cells = vec!["–".to_owned(); 10];
        cells[0] = "plain NBD".to_owned();
        cells[2] = format!("{:.1}", plain.measured_s);
        cells[9] = plain.answers_sha256.chars().take(12).collect();
        row(page, "", &cells);
    }
    for run in &outcome.runs {
        let migration = run.migrations.first();
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
        let cells = [
            run.name.word().to_owned(),
            or_dash(run.predicted.map(|p| p.or_at_least())),
            format!("{:.1}", run.measured_s),
            or_dash(run.in_range().map(|held| if held { "yes" } else { "no" }.to_owned())),
            or_dash(run.error().map(|error| format!("{:+.0}", error * 100.0))),
            or_dash(migration.map(|m| m.total_ms.to_string())),
            or_dash(migration.map(|m| m.downtime_ms.to_string())),
            or_dash(migration.map(|m| units::format_bytes(m.bytes))),
            or_dash(migration.and_then(|m| m.job_progress).map(|p| format!("{:.0}", p * 100.0))),
            run.answers_sha256.chars().take(12).collect(),
        ];
        row(page, "", &cells);
    }
    let checked = if outcome.answers_checked {
        "SQLite computes the same answers from the same tables, with integers."
    } else {
        "SQLite computes other answers."
    };
    let _ = writeln!(page, "</table></div>\n<p class=\"soft\">{checked}</p>");
}

fn time_lines(page: &mut String, outcome: &Outcome) {
    page.push_str("<h2>What happened when</h2>\n");
    let _ = writeln!(page, "<p class=\"soft\">plain NBD: {}</p>", escape(PLAIN_WORDS));
    let shared = charts::Shared::of(outcome);
    for run in &outcome.runs {
        let caption = match run.name {
            RunName::Remote => {
                "The VM stays on the far side of the WAN and reads everything over the network."
            }
            RunName::Beside => "The job file places the VM beside its data.",
            RunName::Planned => {
                "The VM starts on the far side of the WAN; the planner measures and decides."
            }
            RunName::Large => {
                "The same, with the tables on a volume that has much more data. It is too large to copy."
            }
            RunName::Replica => "As planned, with a replica of the data there.",
        };
        let caption = format!("{caption} {}", run.why());
        figure(page, run.name.word(), &caption, &charts::time_line(run, &shared));
    }
}

/// The phases of each migration.
fn moves(page: &mut String, outcome: &Outcome) {
    let moved = outcome.runs.iter().flat_map(|run| run.migrations.iter().map(move |m| (run, m)));
    for (run, migration) in moved {
        let title = format!("Where the migration's time went, run {}", run.name.word());
        let caption = format!(
            "{} → {}: {} ms from the decision on, of them {} ms of pause (dark).",
            migration.from, migration.to, migration.total_ms, migration.downtime_ms
        );
        figure(page, &title, &caption, &plots::bars(&phase_bars(&migration.phases), "ms", &title));
    }
}

/// One bar for each phase of a migration.
pub fn phase_bars(phases: &Phases) -> Vec<plots::Bar> {
    let bar = |part: Part| {
        let ms = std::time::Duration::from_micros(part.duration_us).as_secs_f64() * 1e3;
        plots::Bar {
            name: part.name,
            class: if part.paused { "ours" } else { "peer" },
            value: ms,
            label: format!("{ms:.1} ms {}", part.note).trim_end().to_owned(),
        }
    };
    phases.parts().into_iter().map(bar).collect()
}

fn reasons(page: &mut String, outcome: &Outcome) {
    page.push_str("<h2>What the planner said</h2>\n");
    for run in &outcome.runs {
        let _ = writeln!(page, "<h3>Before the run {}</h3>", run.name.word());
        plan(page, &run.plan);
        decisions(page, run);
    }
}

fn plan(page: &mut String, plan: &Plan) {
    let _ = writeln!(
        page,
        "<p class=\"soft\">Predicted from {}.</p>\n<div class=\"scroll\"><table>\n<tr><th>option</th>\
         <th>from → to</th><th>boot, s</th><th>CPU, s</th><th>local I/O, s</th><th>network, s</th>\
         <th>other, s</th><th>migration, s</th><th>total</th><th>not known</th></tr>",
        basis_words(plan.basis)
    );
    for option in &plan.options {
        let predicted = &option.predicted;
        let mut cells = vec![
            format!("{}{}", way_word(option.way), if option.chosen { " (chosen)" } else { "" }),
            format!("{} → {}", option.start, option.end),
        ];
        let parts = [
            predicted.boot_s,
            predicted.cpu_s,
            predicted.local_io_s,
            predicted.network_s,
            predicted.other_s,
            predicted.migration_s,
        ];
        cells.extend(parts.iter().map(|s| format!("{s:.1}")));
        cells.push(option.total.or_at_least());
        let unknown: Vec<&str> = option.unknown.iter().map(|u| u.part.name()).collect();
        cells.push(unknown.join(", "));
        row(page, if option.chosen { "chosen" } else { "" }, &cells);
    }
    page.push_str("</table></div>\n<ul class=\"soft\">\n");
    for option in plan.options.iter().filter(|o| !o.reason.is_empty()) {
        let _ = writeln!(
            page,
            "<li>{} from {}: {}</li>",
            way_word(option.way),
            option.start,
            escape(&option.reason)
        );
    }
    let _ = writeln!(
        page,
        "</ul>\n<p class=\"soft\">Based on: {}.</p>",
        escape(&plan.figures.join("; "))
    );
}

fn decisions(page: &mut String, run: &Run) {
    if run.decisions.is_empty() {
        return;
    }
    page.push_str("<ul>\n");
    for decision in &run.decisions {
        let after_s =
            std::time::Duration::from_millis(decision.at_ms.saturating_sub(run.started_ms))
                .as_secs_f64();
        let measured = decision
            .measured_s
            .map_or_else(String::new, |s| format!("; measured afterwards: {s:.1} s"));
        let but = match decision.outcome.as_str() {
            "" => String::new(),
            outcome => format!("; but {}", escape(outcome)),
        };
        let _ = writeln!(
            page,
            "<li>{after_s:.1} s after the VM's start: {}{but}{measured}</li>",
            escape(&decision.summary)
        );
    }
    page.push_str("</ul>\n");
}

fn setting(page: &mut String, outcome: &Outcome) {
    let _ = writeln!(
        page,
        "<h2>Setting</h2>\n<p>TPC-H scale factor {}, {} of tables in PostgreSQL, queries {}. Hosts are network \
         namespaces of one machine; a WAN of {} ms round trip, {} in each direction, lies between the sites. The volume of \
         the run large has {} more.</p>",
        outcome.scale_factor,
        units::format_bytes(outcome.table_bytes),
        escape(&outcome.queries.join(", ")),
        outcome.rtt_ms,
        escape(&outcome.rate),
        units::format_bytes(outcome.archive_bytes)
    );
    if !outcome.links.is_empty() {
        page.push_str("<div class=\"scroll\"><table>\n<tr><th>link</th><th>round trip, ms</th><th>rate</th><th>block read, median, ms</th></tr>\n");
        for link in &outcome.links {
            let blocks = link.blocks.map(|b| std::time::Duration::from_micros(b.latency_median_us));
            let cells = [
                format!("{} → {}", link.from, link.to),
                format!("{:.1}", link.probe.rtt_ms),
                units::format_rate(link.probe.rate_bytes_per_s),
                blocks
                    .map_or_else(|| "–".to_owned(), |d| format!("{:.2}", d.as_secs_f64() * 1000.0)),
            ];
            row(page, "", &cells);
        }
        page.push_str("</table></div>\n");
    }
    page.push_str("<p class=\"soft\">");
    let versions: Vec<String> =
        outcome.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let _ = writeln!(page, "Versions: {}</p>", escape(&versions.join("; ")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::outcome::tests::good;

    #[test]
    fn the_page_stands_alone() {
        let page = html(&good());
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        assert_eq!(page.matches("<svg").count(), 7);
        assert_eq!(page.matches("</svg>").count(), 7);
    }

    /// A document that shows the picture gives it no style.
    #[test]
    fn the_picture_has_its_style_in_it() {
        let picture = picture(&good());
        assert!(
            picture.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox"),
            "{picture}"
        );
        assert_eq!(picture.matches("<style>").count(), 1);
        assert!(picture.contains(".measured{fill") && picture.ends_with("</svg>\n"), "{picture}");
    }

    #[test]
    fn words_of_others_cannot_become_markup() {
        let page = html(&good());
        assert!(page.contains("the earliest end &lt;&amp;&gt;"));
        assert!(!page.contains("<&>"));
    }

    #[test]
    fn a_fault_stands_at_the_top() {
        let mut outcome = good();
        outcome.answers_checked = false;
        assert!(html(&outcome).contains("class=\"fault\""));
        assert!(!html(&good()).contains("class=\"fault\""));
    }
}
