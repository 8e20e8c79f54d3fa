//! `perigee lab simulate`

use std::path::PathBuf;

use perigee_lab::simulate::{self, BesideLab, BesideLabOptions, Bill, OfRule, Run, shown};
use perigee_lab::{Options, Steps};
use perigee_model::Problem;
use serde::Serialize;

use crate::arguments::BaseOption;
use crate::output::{self, Column, Format};

/// What `perigee lab simulate` takes.
#[derive(Debug, clap::Args)]
pub struct SimulateOptions {
    /// A scenario, YAML: its hosts, VMs, loads, jobs and failures. experiments/balance has examples
    #[arg(required_unless_present = "beside_lab", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How many runs each rule has, with the seeds 1, 2, and so on
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Also run this scenario, whose jobs are listed, in a lab of real VMs, and say how far the simulator is from the lab. Needs root
    #[arg(long, value_name = "FILE", requires = "image")]
    beside_lab: Option<PathBuf>,
    /// The golden image of that lab: the directory that scripts/golden-image prints
    #[arg(long, value_name = "DIR", requires = "beside_lab")]
    image: Option<PathBuf>,
    #[command(flatten)]
    base: BaseOption,
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

/// Where hosts can be rented, in dollars.
const RENTING: &[Column<Line>] = &[
    ("scenario", |l| l.scenario.clone()),
    ("rule", |l| l.rule.rule.clone()),
    ("all-in", |l| dollars(l, Bill::all_in)),
    ("machines", |l| dollars(l, |bill| bill.machines)),
    ("egress", |l| dollars(l, |bill| bill.egress)),
    ("waiting", |l| dollars(l, |bill| bill.waiting)),
    ("missed deadlines", |l| dollars(l, |bill| bill.late)),
    ("over budget", |l| dollars(l, |bill| bill.over_budget)),
    ("hosts", |l| dollars(l, |bill| f64::from(bill.rented))),
    ("host hours", |l| dollars(l, |bill| bill.host_hours)),
    ("begun anew", |l| dollars(l, |bill| f64::from(bill.lost_jobs))),
];

fn dollars(line: &Line, figure: fn(&Bill) -> f64) -> String {
    let of = |run: &Run| run.bill.as_ref().map_or(0.0, figure);
    format!("{:.2}", line.rule.spread(of).mean)
}

/// A table and CSV have a line for each rule in each scenario, with seconds of a vCPU; JSON and YAML have all of results.json.
pub async fn run(ask: SimulateOptions, format: Format, steps: &Steps) -> Result<(), Problem> {
    let SimulateOptions { files, seeds, beside_lab, image, base, out } = ask;
    let beside_lab = match beside_lab.zip(image) {
        Some((file, image)) => {
            let lab = Options { base: base.base, ..Options::new()? };
            Some(BesideLabOptions { file, image, lab })
        }
        None => None,
    };
    let options = simulate::Options { files, seeds, beside_lab, out };
    let outcome = simulate::simulate(&options, steps).await?;
    if matches!(format, Format::Json | Format::Yaml) {
        return output::one(format, &outcome, &[]);
    }
    let lines = outcome.scenarios.iter().flat_map(|scenario| {
        let line = |rule: &OfRule| Line { scenario: scenario.title.clone(), rule: rule.clone() };
        scenario.rules.iter().map(line)
    });
    let rents = |line: &Line| line.rule.runs.iter().any(|run| run.bill.is_some());
    let (renting, moving): (Vec<Line>, Vec<Line>) = lines.partition(rents);
    if !moving.is_empty() || renting.is_empty() {
        output::list(format, &moving, RULES)?;
    }
    if !renting.is_empty() {
        output::list(format, &renting, RENTING)?;
    }
    if format == Format::Table {
        let beside = outcome.scenarios.iter().filter_map(|scenario| scenario.beside_lab.as_ref());
        beside.for_each(|beside| output::text(&said(beside)));
        output::text(&options.out.join("report.html").display().to_string());
    }
    Ok(())
}

fn said(beside: &BesideLab) -> String {
    format!(
        "Beside a lab: the makespan differs by {:+.1} %, a job's time by {:.1} % in the middle and {:.1} % at most.",
        100.0 * beside.makespan.error,
        100.0 * beside.median_error,
        100.0 * beside.most_error
    )
}
