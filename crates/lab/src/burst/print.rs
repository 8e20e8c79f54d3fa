//! The tables at the end of the story. Whether anybody reads them does not matter: the lab is gone all the same.

use std::io::{self, Write};
use std::path::Path;

use perigee_model::money::Money;

use super::outcome::{JobRow, Outcome, RentalRow};

const JOBS: [&str; 8] =
    ["JOB", "WHERE", "SECONDS PREDICTED", "SECONDS", "MONEY PREDICTED", "MONEY", "WAY", "WHY"];
const RENTALS: [&str; 9] =
    ["RENTAL", "KIND", "ASKED", "JOINED", "ENDED", "PREDICTED", "RESERVED", "SPENT", "GIVEN BACK"];

pub fn outcome(outcome: &Outcome, out: &Path) {
    drop(write(&mut io::stdout(), outcome, out));
}

fn write(to: &mut impl Write, outcome: &Outcome, out: &Path) -> io::Result<()> {
    writeln!(to)?;
    table(to, &JOBS, outcome.jobs.iter().map(job))?;
    writeln!(to)?;
    table(to, &RENTALS, outcome.rentals.iter().map(rental))?;
    let (spent, predicted) = outcome.bill();
    writeln!(to, "  the bill: {spent} spent, {predicted} predicted, {} allowed\n", outcome.budget)?;
    for sentence in outcome.summary() {
        writeln!(to, "{sentence}")?;
    }
    for fault in outcome.faults() {
        writeln!(to, "WRONG: {fault}")?;
    }
    writeln!(to, "\n{}", out.join("report.html").display())
}

/// A job's line in the table, also on the page.
pub fn job(job: &JobRow) -> [String; 8] {
    let host = or_dash(job.host.as_ref().map(ToString::to_string));
    [
        job.job.to_string(),
        if job.rented { format!("{host} (rented)") } else { host },
        or_dash(job.predicted.map(|predicted| predicted.or_at_least())),
        or_dash(job.measured_s.map(|seconds| format!("{seconds:.0}"))),
        money(job.predicted_cost),
        money(job.spent),
        job.way.clone(),
        job.why.clone(),
    ]
}

/// A rental's line in the table, also on the page.
pub fn rental(rental: &RentalRow) -> [String; 9] {
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

fn table<const N: usize>(
    to: &mut impl Write,
    head: &[&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> io::Result<()> {
    let all: Vec<[String; N]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let mut widths = [0; N];
    for row in &all {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    for row in &all {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(to, "  {}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}
