//! `perigee lab run burst`

use std::path::PathBuf;

use perigee_lab::burst::{self, JobRow, Outcome, RentalRow};
use perigee_lab::{LabId, Options, Steps};
use perigee_model::Problem;

use crate::arguments::BaseOption;
use crate::context::Context;
use crate::output::{self, Column, Format};

/// What `perigee lab run burst` takes.
#[derive(Debug, clap::Args)]
pub struct BurstOptions {
    /// The golden image: the directory that scripts/golden-image prints
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    /// How many jobs the queue has
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(12..=200))]
    jobs: u32,
    /// For how many seconds a job works on each of the 4 to 12 parts of its data
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=60))]
    part: u32,
    /// Directory for report.html and results.json
    #[arg(long, default_value = "out/demo-burst", value_name = "DIR")]
    out: PathBuf,
    /// The lab's id, four hexadecimal digits [default: random]
    #[arg(long)]
    id: Option<LabId>,
    #[command(flatten)]
    base: BaseOption,
}

const JOBS: &[Column<JobRow>] = &[
    ("job", |j| j.job.to_string()),
    ("where", |j| output::or_dash(j.place().as_ref())),
    ("seconds predicted", |j| output::or_dash(j.predicted.map(|p| p.or_at_least()).as_ref())),
    ("seconds", |j| output::or_dash(j.measured_s.map(|s| format!("{s:.0}")).as_ref())),
    ("money predicted", |j| output::or_dash(j.predicted_cost.as_ref())),
    ("money", |j| output::or_dash(j.spent.as_ref())),
    ("way", |j| j.way.clone()),
    ("why", |j| j.why.clone()),
];

const RENTALS: &[Column<RentalRow>] = &[
    ("rental", |r| r.rental.to_string()),
    ("kind", |r| r.kind.clone()),
    ("asked", |r| output::seconds(r.asked_s)),
    ("joined", |r| output::seconds(r.joined_s)),
    ("ended", |r| output::seconds(r.ended_s)),
    ("predicted", |r| output::or_dash(r.predicted.as_ref())),
    ("reserved", |r| r.reserved.to_string()),
    ("spent", |r| output::or_dash(r.spent.as_ref())),
    ("given back", |r| r.ends_because.clone()),
];

/// The exit code says whether something is wrong; it never judges speed.
pub async fn run(ask: BurstOptions, context: &Context, steps: &Steps) -> Result<(), Problem> {
    let options = burst::Options {
        id: ask.id.unwrap_or_else(LabId::random),
        lab: Options { base: ask.base.base, ..Options::new()? },
        image: ask.image,
        jobs: ask.jobs,
        part_s: ask.part,
        out: ask.out,
    };
    let outcome = burst::burst(&options, steps).await?;
    let report = options.out.join("report.html").display().to_string();
    print(context.format, &outcome, &report)?;
    let faults = outcome.faults();
    if faults.is_empty() {
        return Ok(());
    }
    Err(Problem::internal("the story ended with a wrong result", faults.join("; "))
        .next(format!("the whole story is in {report}")))
}

/// As a table: the jobs, the rentals, and what came of them in sentences. CSV has the jobs only, for it has one heading.
fn print(format: Format, outcome: &Outcome, report: &str) -> Result<(), Problem> {
    match format {
        Format::Json | Format::Yaml => return output::one(format, outcome, &[]),
        Format::Csv => return output::list(format, &outcome.jobs, JOBS),
        Format::Table => {}
    }
    output::list(format, &outcome.jobs, JOBS)?;
    output::text("");
    output::list(format, &outcome.rentals, RENTALS)?;
    output::text(&format!("{}\n\n{report}", outcome.lines().join("\n")));
    Ok(())
}
