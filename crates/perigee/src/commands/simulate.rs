//! `perigee lab simulate`

use std::path::PathBuf;

use perigee_lab::Steps;
use perigee_lab::simulate::{self, OfRule, Run, shown};
use perigee_model::Problem;
use serde::Serialize;

use crate::output::{self, Column, Format};

/// What `perigee lab simulate` takes.
#[derive(Debug, clap::Args)]
pub struct SimulateOptions {
    /// A scenario, YAML: its hosts, VMs, loads, jobs and failures. experiments/balance has examples
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How many runs each rule has, with the seeds 1, 2, and so on
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Directory for report.html and results.json
    #[arg(long, default_value = "out/simulate", value_name = "DIR")]
    out: PathBuf,
}

/// One rule in one scenario.
#[derive(Serialize)]
struct Line {
    scenario: String,
    rule: OfRule,
}

const RULES: &[Column<Line>] = &[
    ("scenario", |l| l.scenario.clone()),
    ("rule", |l| l.rule.rule.clone()),
    ("lost", |l| shown(l.rule.spread(Run::lost_s))),
    ("by moves", |l| shown(l.rule.spread(|run| run.moving_s))),
    ("moves", |l| shown(l.rule.spread(|run| f64::from(run.moves)))),
    ("to and fro", |l| shown(l.rule.spread(|run| f64::from(run.back)))),
];

/// A table and CSV have a line for each rule in each scenario, with seconds of a vCPU; JSON and YAML have all of results.json.
pub fn run(ask: SimulateOptions, format: Format, steps: &Steps) -> Result<(), Problem> {
    let SimulateOptions { files, seeds, out } = ask;
    let options = simulate::Options { files, seeds, out };
    let outcome = simulate::simulate(&options, steps)?;
    if matches!(format, Format::Json | Format::Yaml) {
        return output::one(format, &outcome, &[]);
    }
    let lines = outcome.scenarios.iter().flat_map(|scenario| {
        let line = |rule: &OfRule| Line { scenario: scenario.title.clone(), rule: rule.clone() };
        scenario.rules.iter().map(line)
    });
    output::list(format, &lines.collect::<Vec<_>>(), RULES)?;
    if format == Format::Table {
        output::text(&options.out.join("report.html").display().to_string());
    }
    Ok(())
}
