//! The demo's tables on the terminal. Whether anybody reads them does not matter: its lab is taken down all the same.

use std::io::{self, Write};
use std::path::Path;

use perigee_model::plan::{Basis, Plan, Trigger, Way};
use perigee_model::units;

use super::outcome::{Outcome, RunName};

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
            option.total.to_string(),
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
    for run in &outcome.runs {
        let unknown = run.plan.basis == Basis::OnePass;
        let mark = if unknown { "*" } else { "" };
        let predicted = run.predicted.map_or_else(|| "-".to_owned(), |p| format!("{mark}{p}"));
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
        )?;
    }
    if outcome.runs.iter().any(|run| run.plan.basis == Basis::OnePass) {
        writeln!(
            to,
            "  * predicted before any run of this job, from the size of its data; its CPU time was not known"
        )?;
    }
    for run in &outcome.runs {
        // A migration's reason stands in its own line below.
        let chosen = run.decisions.iter().filter(|decision| decision.trigger == Trigger::TimeLost);
        for decision in chosen.filter(|_| run.migrations.is_empty()) {
            writeln!(to, "  {}: {}", run.name.word(), decision.summary)?;
        }
        for m in &run.migrations {
            writeln!(to, "  {}: {} → {}: {}", run.name.word(), m.from, m.to, m.reason)?;
            for part in m.phases.parts() {
                let ms = std::time::Duration::from_micros(part.duration_us).as_secs_f64() * 1e3;
                let pause = if part.paused { " (paused)" } else { "" };
                writeln!(to, "      {:<14} {ms:>9.1} ms{pause}  {}", part.name, part.note)?;
            }
        }
    }
    if let Some(shape) = outcome.shape() {
        writeln!(to, "  {shape}")?;
    }
    let answers = if outcome.answers_checked { "equal SQLite's" } else { "are WRONG" };
    writeln!(to, "  the answers to {} {answers}", outcome.queries.join(", "))?;
    writeln!(
        to,
        "  {}\n  {}",
        out.join("report.html").display(),
        out.join("result.json").display()
    )?;
    Ok(())
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
