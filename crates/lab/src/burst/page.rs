//! The story's `report.html`: one page without scripts. It is a pure function of [`Outcome`].

use std::collections::BTreeMap;
use std::fmt::Write as _;

use perigee_model::money::Money;

use super::outcome::{JobRow, Outcome, RentalRow, minutes};
use crate::report::page::{self, TABLE_END, figure, row, table};
use crate::report::svg::{Anchor, Scale, Svg, escape};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = WIDTH - 24.0;
const LINE: f64 = 20.0;

/// The whole page.
pub fn html(outcome: &Outcome) -> String {
    let title = outcome.alone_at_the_end().map_or_else(
        || "A queue that did not come to its end".to_owned(),
        |alone| {
            let (alone, took) = (minutes(alone.seconds), minutes(outcome.took_s));
            format!("A queue of at least {alone}, done in {took}")
        },
    );
    let mut page = page::start(&format!("Perigee: {title}"), "td { white-space: normal; }\n");
    let lead = outcome.summary().join(" ");
    // Writing to a String cannot fail, so the results of `writeln!` are ignored.
    let _ = writeln!(page, "<h1>{title}</h1>\n<p class=\"lead\">{}</p>", escape(&lead));
    for fault in outcome.faults() {
        let _ = writeln!(page, "<p class=\"fault\">{}</p>", escape(&fault));
    }
    let caption = "A bar is a job from its VM's start to its end. Hosts whose names begin with rent were rented: the grey line is from the \
        request to the end.";
    figure(&mut page, "Which job ran where, and when", caption, &hosts(outcome));
    rentals(&mut page, outcome);
    jobs(&mut page, outcome);
    page.push_str("<h2>What happened</h2>\n<ul>\n");
    for event in &outcome.events {
        let _ = writeln!(page, "<li>{:.0} s: {}</li>", event.at_s, escape(&event.text));
    }
    page.push_str("</ul>\n");
    page::end(&mut page, &outcome.versions);
    page
}

fn rentals(page: &mut String, outcome: &Outcome) {
    let (spent, predicted) = outcome.bill();
    let text = format!(
        "{spent} were spent, {predicted} predicted, and {} allowed. At most {} hosts were rented at once. Seconds count from the submission of the queue.",
        outcome.budget, outcome.rented_most
    );
    let columns = [
        "rental",
        "kind",
        "asked",
        "joined",
        "ended",
        "predicted",
        "reserved",
        "spent",
        "given back because",
        "rented because",
    ];
    table(page, "Rented hosts", &text, &columns);
    for rental in &outcome.rentals {
        let mut cells = cells_of_rental(rental).to_vec();
        cells.push(rental.why.clone());
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

fn jobs(page: &mut String, outcome: &Outcome) {
    let text = format!(
        "Each hour until a job's end costs {}. The first job of each kind ran before the queue. Money is what the job itself is charged; rented hosts \
         are in the table above.",
        outcome.waiting_per_hour
    );
    let columns = [
        "job",
        "where",
        "seconds predicted",
        "seconds",
        "money predicted",
        "money",
        "way",
        "why",
        "data",
    ];
    table(page, "Jobs", &text, &columns);
    for job in &outcome.jobs {
        let mut cells = cells_of_job(job).to_vec();
        cells.push(job.task.data().to_owned());
        row(page, if job.rented { "chosen" } else { "" }, &cells);
    }
    page.push_str(TABLE_END);
}

fn cells_of_job(job: &JobRow) -> [String; 8] {
    [
        job.job.to_string(),
        or_dash(job.place()),
        or_dash(job.predicted.map(|predicted| predicted.or_at_least())),
        or_dash(job.measured_s.map(|seconds| format!("{seconds:.0}"))),
        money(job.predicted_cost),
        money(job.spent),
        job.way.clone(),
        job.why.clone(),
    ]
}

fn cells_of_rental(rental: &RentalRow) -> [String; 9] {
    [
        rental.rental.to_string(),
        rental.kind.clone(),
        seconds(rental.asked_s),
        seconds(rental.joined_s),
        seconds(rental.ended_s),
        money(rental.predicted),
        rental.reserved.to_string(),
        money(rental.spent),
        rental.ends_because.clone(),
    ]
}

fn seconds(at_s: Option<f64>) -> String {
    or_dash(at_s.map(|at_s| format!("{at_s:.0} s")))
}

fn money(money: Option<Money>) -> String {
    or_dash(money.map(|money| money.to_string()))
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// A line for each job that ran at a host at the same time as others.
fn lanes<'o>(outcome: &'o Outcome) -> BTreeMap<String, Vec<Vec<&'o JobRow>>> {
    let mut hosts: BTreeMap<String, Vec<Vec<&'o JobRow>>> = BTreeMap::new();
    let mut queue: Vec<&JobRow> = outcome.queue().collect();
    queue.sort_by(|one, other| start_s(one).total_cmp(&start_s(other)));
    for job in queue {
        let Some(host) = &job.host else { continue };
        let lanes = hosts.entry(host.to_string()).or_default();
        let is_free = |lane: &&mut Vec<&JobRow>| {
            lane.last().is_none_or(|last| last.ended_s.is_some_and(|end_s| end_s <= start_s(job)))
        };
        match lanes.iter_mut().find(is_free) {
            Some(lane) => lane.push(job),
            None => lanes.push(vec![job]),
        }
    }
    hosts
}

fn start_s(job: &JobRow) -> f64 {
    job.started_s.unwrap_or(0.0)
}

fn hosts(outcome: &Outcome) -> String {
    let hosts = lanes(outcome);
    let lines: usize = hosts.values().map(Vec::len).sum();
    let ends = outcome.rentals.iter().filter_map(|rental| rental.ended_s);
    let longest_s = ends.fold(outcome.took_s.max(1.0), f64::max);
    let floor = 10.0 + LINE * lines as f64 + 8.0 * hosts.len() as f64;
    let mut svg = Svg::new(WIDTH, floor + 40.0);
    let scale = Scale::new(longest_s, LEFT, RIGHT);
    for (value, text) in scale.ticks() {
        let x = scale.at(value);
        svg.line("grid", (x, 4.0), (x, floor));
        svg.text("", (x, floor + 16.0), Anchor::Middle, &text);
    }
    let mut y = 8.0;
    for (host, lanes) in &hosts {
        svg.text("server", (LEFT - 10.0, y + 13.0), Anchor::End, host);
        let of_host = |rental: &&RentalRow| rental.rental.as_str() == host;
        if let Some(rental) = outcome.rentals.iter().find(of_host) {
            let (from, to) = (rental.asked_s.unwrap_or(0.0), rental.ended_s.unwrap_or(longest_s));
            svg.line("axis", (scale.at(from.max(0.0)), y), (scale.at(to), y));
        }
        for lane in lanes {
            lane.iter().for_each(|job| bar(&mut svg, &scale, y + 2.0, job));
            y += LINE;
        }
        y += 8.0;
    }
    svg.text("", (RIGHT, floor + 34.0), Anchor::End, "seconds from the submission of the queue");
    svg.finish("The jobs of each host over time")
}

fn bar(svg: &mut Svg, scale: &Scale, y: f64, job: &JobRow) {
    let (from, to) = (scale.at(start_s(job)), scale.at(job.ended_s.unwrap_or(start_s(job))));
    let class = match job.task {
        super::Task::Report => "near",
        super::Task::Search => "measured",
        super::Task::Audit => "far",
    };
    svg.rect(class, from, y, to - from - 1.0, LINE - 4.0);
    if to - from > 60.0 {
        svg.text("value inside", (from + 5.0, y + 12.0), Anchor::Start, job.task.word());
    }
}

#[cfg(test)]
mod tests {
    use super::super::outcome::tests::outcome;
    use super::*;

    #[test]
    fn the_page_has_each_job_each_rental_and_the_bill_and_is_safe() {
        let page = html(&outcome());
        for wanted in [
            "report-0004",
            "rent-1 (rented)",
            "it was idle",
            "it saves more than it costs",
            "$0.11 were spent, $0.12 predicted",
            "A queue of at least 12 min 14 s, done in 1 min 30 s",
            "&lt;soonest&gt;",
            "a host is asked for",
        ] {
            assert!(page.contains(wanted), "{wanted:?} is not in {page}");
        }
        assert!(!page.contains("<soonest>") && !page.contains("class=\"fault\""));
    }

    #[test]
    fn a_story_that_did_not_come_to_its_end_has_a_page_that_says_so() {
        let problems = vec!["no answer in time".to_owned()];
        let page = html(&Outcome { problems, alone: None, ..outcome() });
        for wanted in ["did not come to its end", "no answer in time", "report-0004"] {
            assert!(page.contains(wanted), "{wanted:?} is not in {page}");
        }
        assert!(!page.contains("would have needed"), "{page}");
    }
}
