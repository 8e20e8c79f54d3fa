//! The demo's tables on the terminal. Whether anybody reads them does not matter: its lab is taken down all the same.

use std::io::{self, Write};
use std::path::Path;

use perigee_model::plan::{Basis, Plan, Way};
use perigee_model::units;

use super::outcome::{ORDER_WORDS, Outcome, Run, RunName};

/// Why there is a run without Perigee.
pub const PLAIN_WORDS: &str = "What people have today: QEMU's own NBD client reads each block from qemu-nbd at the data's host.";

pub fn way_word(way: Way) -> &'static str {
    match way {
        Way::Remote => "remote",
        Way::Migrate => "migrate",
        Way::Follow => "follow",
        Way::Copy => "copy",
        Way::Replica => "replica",
        Way::Beside => "beside",
    }
}

pub fn basis_words(basis: Basis) -> &'static str {
    match basis {
        Basis::History => "earlier runs of this job, measured",
        Basis::OnePass => "only the size of its data, which is taken to be read once",
        Basis::Running => "this job's figures while it runs",
    }
}

/// Prints the plan before a run.
pub fn plan(name: RunName, plan: &Plan) {
    drop(write_plan(&mut io::stdout(), name, plan));
}

pub fn outcome(outcome: &Outcome, out: &Path) {
    drop(write_outcome(&mut io::stdout(), outcome, out));
}

fn write_plan(to: &mut impl Write, name: RunName, plan: &Plan) -> io::Result<()> {
    writeln!(to, "\n  job plan for the run {}, from {}:", name.word(), basis_words(plan.basis))?;
    for option in &plan.options {
        writeln!(
            to,
            "  {} {:<8} {} → {:<8} {:<18} {}",
            if option.chosen { "*" } else { " " },
            way_word(option.way),
            option.start,
            option.end,
            option.total.or_at_least(),
            option.reason
        )?;
    }
    for unknown in plan.chosen().iter().flat_map(|option| &option.unknown) {
        writeln!(to, "      not known: {}: {}", unknown.part.name(), unknown.why)?;
    }
    for figure in &plan.figures {
        writeln!(to, "      {figure}")?;
    }
    Ok(())
}

fn write_outcome(to: &mut impl Write, outcome: &Outcome, out: &Path) -> io::Result<()> {
    writeln!(
        to,
        "\n  {:<10} {:>18} {:>11} {:>9} {:>11} {:>10} {:>11}",
        "run", "predicted", "measured s", "in range", "migration s", "downtime s", "moved"
    )?;
    if let Some(plain) = &outcome.plain {
        let dash = "-";
        writeln!(
            to,
            "  {:<10} {dash:>18} {:>11.1} {dash:>9} {dash:>11} {dash:>10} {dash:>11}",
            "plain NBD", plain.measured_s
        )?;
    }
    for run in &outcome.runs {
        write_run(to, run)?;
    }
    if outcome.runs.iter().any(|run| run.plan.basis == Basis::OnePass) {
        writeln!(
            to,
            "  * predicted before any run of this job, from the size of its data; its CPU time was not known"
        )?;
    }
    writeln!(to, "\n  {ORDER_WORDS}")?;
    for told in outcome.out_of_order() {
        writeln!(to, "  But: {told}")?;
    }
    writeln!(to, "  plain NBD: {PLAIN_WORDS}")?;
    for run in &outcome.runs {
        writeln!(to, "  {}: {}", run.name.word(), run.why())?;
        for m in &run.migrations {
            writeln!(to, "    {} → {}", m.from, m.to)?;
            for part in m.phases.parts() {
                let ms = std::time::Duration::from_micros(part.duration_us).as_secs_f64() * 1e3;
                let pause = if part.paused { " (paused)" } else { "" };
                writeln!(to, "      {:<14} {ms:>9.1} ms{pause}  {}", part.name, part.note)?;
            }
        }
    }
    let answers = if outcome.answers_checked { "equal SQLite's" } else { "are WRONG" };
    writeln!(to, "  the answers to {} {answers}", outcome.queries.join(", "))?;
    writeln!(
        to,
        "  {}\n  {}",
        out.join("report.html").display(),
        out.join("results.json").display()
    )?;
    Ok(())
}

fn write_run(to: &mut impl Write, run: &Run) -> io::Result<()> {
    let mark = if run.plan.basis == Basis::OnePass { "*" } else { "" };
    let predicted =
        run.predicted.map_or_else(|| "-".to_owned(), |p| format!("{mark}{}", p.or_at_least()));
    let held = run.in_range().map_or("-", |held| if held { "yes" } else { "no" });
    let moved = run.migrations.first().map_or_else(Default::default, |m| {
        let seconds =
            |ms: u64| format!("{:.2}", std::time::Duration::from_millis(ms).as_secs_f64());
        [seconds(m.total_ms), seconds(m.downtime_ms), units::format_bytes(m.bytes)]
    });
    let [total, downtime, size] =
        moved.map(|s: String| if s.is_empty() { "-".to_owned() } else { s });
    writeln!(
        to,
        "  {:<10} {predicted:>18} {:>11.1} {held:>9} {total:>11} {downtime:>10} {size:>11}",
        run.name.word(),
        run.measured_s
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::outcome::tests::good;

    /// The demo ended with a panic, and its lab stayed.
    #[test]
    fn tables_that_nobody_reads_are_no_reason_to_panic() {
        let good = good();
        let mut closed: &mut [u8] = &mut [];
        write_plan(&mut closed, RunName::Planned, &good.runs[0].plan).expect_err("no reader");
        write_outcome(&mut closed, &good, Path::new("demo")).expect_err("no reader");
    }
}
