//! `perigee lab run burst`

use std::path::PathBuf;

use perigee_lab::burst;
use perigee_lab::{LabId, Options, Steps};
use perigee_model::Problem;

use crate::arguments::BaseOption;
use crate::context::Context;
use crate::output::{self, Format};

/// What `perigee lab run burst` takes.
#[derive(Debug, clap::Args)]
pub struct BurstOptions {
    /// The golden image: the directory that scripts/golden-image prints
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    /// How many jobs the queue has
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(12..=200))]
    jobs: u32,
    /// Directory for report.html and results.json
    #[arg(long, default_value = "out/demo-burst", value_name = "DIR")]
    out: PathBuf,
    /// The lab's id, four hexadecimal digits [default: random]
    #[arg(long)]
    id: Option<LabId>,
    #[command(flatten)]
    base: BaseOption,
}

/// The exit code says whether something is wrong; it never judges speed.
pub async fn run(ask: BurstOptions, context: &Context, steps: &Steps) -> Result<(), Problem> {
    let options = burst::Options {
        id: ask.id.unwrap_or_else(LabId::random),
        lab: Options { base: ask.base.base, ..Options::new()? },
        image: ask.image,
        jobs: ask.jobs,
        out: ask.out,
    };
    let outcome = burst::burst(&options, steps).await?;
    match context.format {
        // It has printed its tables.
        Format::Table => Ok(()),
        _ => output::one(context.format, &outcome, &[]),
    }
}
