//! The experiments of Goiri, Julià and Guitart, "Efficient data management support for virtualized service providers", with
//! Perigee: how long the creation of a VM takes with a local and a remote disk, a copy of a file of 580 MB, a video
//! encoder, and the same encoder when its VM is migrated in the middle of its run. And one more: what a VM that reads a
//! remote disk keeps of its speed while the inputs of another job are staged.
//!
//! Both hosts are network namespaces of one machine, so they are equal. Where the paper has NFS, there is Perigee's proxy.

mod bench;
mod paper;
mod report;
mod results;
mod series;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Parser;
use perigee_lab::measuring::{self, QEMU};
use perigee_lab::wan::{LinkSettings, Rate};
use perigee_lab::{Lab, Options, Steps, with_lab};
use perigee_model::Problem;

use bench::{Bench, Size};
use results::{Other, Results, Task};

/// Gigabit Ethernet, as in the paper.
const RATE_BITS_PER_S: u64 = 1_000_000_000;
const RTT_US: u64 = 200;

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the lab runs
    #[arg(long, default_value = "target/release/perigee")]
    program: PathBuf,
    /// The directory of an image with ffmpeg
    #[arg(long)]
    image: Option<PathBuf>,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/staging")]
    out: PathBuf,
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Measure nothing: judge and draw what results.json has
    #[arg(long)]
    report_only: bool,
    /// One round with little data, which only shows that it works
    #[arg(long)]
    quick: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.report_only {
        return finish(measuring::earlier(&arguments.out)?, &arguments.out);
    }
    let image = arguments.image.as_deref().context("--image is missing")?;
    let (rounds, size) = match arguments.quick {
        true => (1, Size { file_bytes: 32 << 20, frames: 300 }),
        false => (arguments.rounds, Size { file_bytes: 580_000_000, frames: 1500 }),
    };
    let mut definition = measuring::two_sites(image);
    for link in &mut definition.links {
        let rate = Rate(Some(RATE_BITS_PER_S));
        link.settings = LinkSettings { rate, ..LinkSettings::of_rtt_us(RTT_US) };
    }
    let program = std::path::absolute(&arguments.program)?;
    let options = Options { program, ..Options::new()? };
    let steps = Steps::default();
    let work = async |lab: Lab| {
        let measured = measure(&lab, image, rounds, size, &steps).await;
        measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
    };
    let mut results = with_lab(definition, &options, &steps, work).await?;
    results.versions = measuring::versions(measuring::version_of(&arguments.program), &[QEMU]);
    results.is_quick = arguments.quick;
    finish(results, &arguments.out)
}

/// Judges, writes and prints.
fn finish(mut results: Results, out: &Path) -> Result<()> {
    results.judge();
    std::fs::create_dir_all(out)?;
    for (name, content) in [
        ("results.json", serde_json::to_string_pretty(&results)?),
        ("report.html", report::html(&results)),
    ] {
        let path = out.join(name);
        std::fs::write(&path, content)
            .with_context(|| format!("can't write {}", path.display()))?;
    }
    report::print(&results);
    Ok(())
}

async fn measure(
    lab: &Lab,
    image: &Path,
    rounds: u32,
    size: Size,
    steps: &Steps,
) -> Result<Results> {
    let mut results = Results {
        cpus: std::thread::available_parallelism()?.get(),
        file_bytes: size.file_bytes,
        frames: size.frames,
        ..Results::default()
    };
    let mut bench = Bench::prepare(lab, image, size, steps).await?;
    results.video_bytes = bench.video_bytes;
    for round in 1..=rounds {
        for host in [0, 1] {
            for is_local in [true, false] {
                results.creations.push(bench.create(round, host, is_local).await?);
            }
        }
    }
    for round in 1..=rounds {
        for host in [0, 1] {
            for is_local in [true, false] {
                for task in [Task::Copy, Task::Encode] {
                    results.runs.push(bench.run(round, task, host, is_local).await?);
                }
            }
            results.migrations.push(bench.migrate(round, host).await?);
        }
        results.inputs.extend(bench.encode_input(round).await?);
        for other in Other::ALL {
            results.beside.push(bench.beside(round, other).await?);
        }
    }
    Ok(results)
}
