//! `perigee lab run soak`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use perigee_lab::soak::{self, SoakJob};
use perigee_lab::{LabId, Options, Steps};
use perigee_model::{Problem, units};

use crate::arguments::BaseOption;
use crate::context::Context;
use crate::output::{self, Column, Format};

/// What `perigee lab run soak` takes.
#[derive(Debug, clap::Args)]
pub struct SoakOptions {
    /// How long to break things: 10m, 1h. The run then waits for the last jobs
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = units::parse_duration)]
    length: u64,
    /// Number of unfinished jobs to keep in the cluster
    #[arg(long, value_name = "N", default_value_t = 3)]
    jobs: u16,
    /// The same seed breaks the same things in the same order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Also kill all that runs on a host at once, as a power cut does. Its jobs then begin anew
    #[arg(long)]
    power_cuts: bool,
    /// The golden image: the directory that scripts/golden-image prints
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    /// Directory for results.json
    #[arg(long, default_value = "out/soak", value_name = "DIR")]
    out: PathBuf,
    /// The lab's id, four hexadecimal digits [default: random]
    #[arg(long)]
    id: Option<LabId>,
    #[command(flatten)]
    base: BaseOption,
}

const JOBS: &[Column<SoakJob>] = &[
    ("job", |j| j.id.to_string()),
    ("volume", |j| j.volume.clone()),
    ("state", |j| format!("{:?}", j.state).to_lowercase()),
    ("answer", |j| if j.is_right { "right" } else { "wrong" }.to_owned()),
    ("moves", |j| j.moves.to_string()),
    ("reason", |j| j.reason.clone()),
];

/// The exit code is 1 if a job's answer was wrong or something was left behind.
pub async fn run(soak: SoakOptions, context: &Context, steps: &Steps) -> Result<ExitCode, Problem> {
    let options = soak::Options {
        id: soak.id.unwrap_or_else(LabId::random),
        lab: Options { base: soak.base.base, ..Options::new()? },
        kernel: Some(soak.image.join("vmlinuz")),
        image: soak.image.join("debian-pg.raw"),
        length: Duration::from_secs(soak.length),
        jobs: soak.jobs,
        seed: soak.seed,
        power_cuts: soak.power_cuts,
        out: soak.out,
    };
    let outcome = soak::soak(&options, steps).await?;
    match context.format {
        Format::Table | Format::Csv => output::list(context.format, &outcome.jobs, JOBS)?,
        Format::Json | Format::Yaml => output::one(context.format, &outcome, &[])?,
    }
    if context.format == Format::Table {
        let mut lines = vec![String::new(), outcome.line()];
        lines.extend(outcome.faults.iter().map(|fault| format!("fault: {fault}")));
        lines.push(options.out.join("results.json").display().to_string());
        output::text(&lines.join("\n"));
    }
    Ok(if outcome.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
