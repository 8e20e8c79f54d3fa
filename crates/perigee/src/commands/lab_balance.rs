//! `perigee lab run balance`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use perigee_lab::balance::{self, Move};
use perigee_lab::{LabId, Options, Steps};
use perigee_model::{Problem, units};

use crate::arguments::BaseOption;
use crate::context::Context;
use crate::output::{self, Column, Format};

/// What `perigee lab run balance` takes.
#[derive(Debug, clap::Args)]
pub struct LabBalanceOptions {
    /// The golden image: the directory that scripts/golden-image prints
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    /// For how many percent of the time each of the four VMs wants a CPU. Their host has one
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=100))]
    busy: u64,
    /// For how long the run delay is measured, before and after
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = units::parse_duration)]
    measure: u64,
    /// The run is over after so many looks of the balancer, one every 10 s, at loads that are known and without a move
    #[arg(long, value_name = "N", default_value_t = 18)]
    calm: usize,
    /// Directory for results.json
    #[arg(long, default_value = "out/lab-balance", value_name = "DIR")]
    out: PathBuf,
    /// The lab's id, four hexadecimal digits [default: random]
    #[arg(long)]
    id: Option<LabId>,
    #[command(flatten)]
    base: BaseOption,
}

/// As many vCPUs as a host with one CPU takes.
const VMS: u32 = 4;

const MOVES: &[Column<Move>] = &[
    ("vm", |m| m.vm.to_string()),
    ("from", |m| m.from.to_string()),
    ("to", |m| m.to.to_string()),
    ("predicted", |m| output::seconds(m.predicted_at_s)),
    ("decided", |m| output::seconds(Some(m.decided_at_s))),
    ("ended", |m| output::seconds(m.ended_at_s)),
    ("pause", |m| format!("{} ms", m.pause_ms)),
    ("state", |m| output::word(&m.state)),
];

/// The exit code is 1 if a VM moved twice, a move was aborted, or a guest noticed; it never judges speed.
pub async fn run(
    ask: LabBalanceOptions,
    context: &Context,
    steps: &Steps,
) -> Result<ExitCode, Problem> {
    let options = balance::Options {
        id: ask.id.unwrap_or_else(LabId::random),
        lab: Options { base: ask.base.base, ..Options::new()? },
        image: ask.image,
        vms: VMS,
        busy_percent: ask.busy,
        measure: Duration::from_secs(ask.measure),
        calm_looks: ask.calm,
        out: ask.out,
    };
    let outcome = balance::balance(&options, steps).await?;
    match context.format {
        Format::Table | Format::Csv => output::list(context.format, &outcome.moves, MOVES)?,
        Format::Json | Format::Yaml => output::one(context.format, &outcome, &[])?,
    }
    if context.format == Format::Table {
        let mut lines = vec![String::new()];
        lines.extend(outcome.lines());
        lines.push(options.out.join("results.json").display().to_string());
        output::text(&lines.join("\n"));
    }
    Ok(if outcome.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
