//! `perigee lab run faults`

use std::path::PathBuf;
use std::process::ExitCode;

use perigee_lab::faults::{self, CellResult, Outcome, Verdict, word};
use perigee_lab::{Options, Steps};
use perigee_model::Problem;

use crate::arguments::BaseOption;
use crate::context::Context;
use crate::output::{self, Column, Format};

/// What `perigee lab run faults` takes.
#[derive(Debug, clap::Args)]
pub struct FaultsOptions {
    /// Only these cells, for example `copy,filling,kill-new-volume`, `copy` or `,,wan-down-60s`. May be repeated
    /// [default: all that have no result in DIR/results.json yet]
    #[arg(long, value_name = "PLACEMENT,PHASE,FAULT")]
    only: Vec<String>,
    /// The golden image: the directory that scripts/golden-image prints
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    /// Directory for results.json and report.html. Results of cells that are not run now stay there
    #[arg(long, default_value = "out/faults", value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    base: BaseOption,
}

const CELLS: &[Column<CellResult>] = &[
    ("placement", |c| word(c.cell.placement)),
    ("phase", |c| word(c.cell.phase)),
    ("fault", |c| word(c.cell.fault)),
    ("verdict", |c| word(c.verdict)),
    ("seconds", |c| output::seconds(Some(c.took_s))),
    ("longest wait", |c| {
        if c.longest_ms == 0 { "-".to_owned() } else { format!("{} ms", c.longest_ms) }
    }),
    ("ended", |c| c.ended.clone()),
];

/// The exit code is 1 if a cell is wrong.
pub async fn run(
    ask: FaultsOptions,
    context: &Context,
    steps: &Steps,
) -> Result<ExitCode, Problem> {
    let options = faults::Options {
        lab: Options { base: ask.base.base, ..Options::new()? },
        kernel: ask.image.join("vmlinuz"),
        image: ask.image.join("debian-pg.raw"),
        cells: faults::choose(&ask.only)?,
        out: ask.out,
    };
    let cells = faults::faults(&options, steps).await?;
    output::list(context.format, &cells, CELLS)?;
    if context.format == Format::Table {
        let faults = cells.iter().flat_map(|cell| {
            cell.faults.iter().map(move |fault| format!("{}: {fault}", cell.cell))
        });
        let all = Outcome::read(&options.out)?.line();
        let files = options.out.join("report.html").display().to_string();
        let lines: Vec<String> = faults.chain([String::new(), all, files]).collect();
        output::text(&lines.join("\n"));
    }
    let is_wrong = cells.iter().any(|cell| cell.verdict == Verdict::Wrong);
    Ok(if is_wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
