//! The experiments of Toyoshima, Yamaguchi and Oguchi with Perigee: "Storage access optimization with virtual machine migration during execution of parallel data
//! processing on a virtual machine PC cluster", and the papers around it. Programs that compute (HPA; here also PFP and BLAST)
//! and one that reads (TPC-H), with their data at the site and at another one, 0 to 16 ms away; over Perigee's own path and over plain iSCSI; moved to
//! their data and not; and with one network for all, or two.
//!
//! | question | file |
//! |---|---|
//! | what is measured, in which order | `cell.rs` |
//! | by how much is time dilated, and why not the guests' clocks | `dilation.rs` |
//! | what do rounds say, and when do two ranges part | `rounds.rs` |
//! | what is the cluster like | `bench.rs` |
//! | how is a cell measured | `gang.rs`, `iscsi.rs`, `host.rs`; in the guests `works.py` |
//! | does it agree with the papers | `paper.rs` |

mod bench;
mod cell;
mod dilation;
mod domain0;
mod found;
mod gang;
mod host;
mod iscsi;
mod paper;
mod report;
mod results;
mod right;
mod rounds;
mod series;
mod tables;
mod target_memory;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use perigee_lab::measuring::{self, QEMU};
use perigee_lab::{Lab, Options, Steps, with_lab};
use perigee_model::Problem;

use bench::{Bench, Size};
use cell::{Cell, Kind};
use dilation::{Dilation, Pace};
use iscsi::Targets;
use results::{Measured, Results, Work};

/// So many cells that fail one after the other end the run.
const FAILURES_MAX: u32 = 3;

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the lab runs
    #[arg(long, default_value = "target/release/perigee")]
    program: PathBuf,
    /// The directory of an image with Open MPI, mpi4py, BLAST and PostgreSQL
    #[arg(long)]
    image: Option<PathBuf>,
    /// Only writes TPC-H's tables into this directory
    #[arg(long)]
    tables: Option<PathBuf>,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/seeds")]
    out: PathBuf,
    /// The paper's round-trip times in ms
    #[arg(long, value_delimiter = ',', default_value = "0,4,16")]
    rtts: Vec<u32>,
    /// How often each cell is measured
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// No cell is begun after so many minutes
    #[arg(long, default_value_t = 120.0)]
    minutes: f64,
    /// Only these parts: distance, iscsi-perigee, iscsi-tgt, move-hand, move-planner, network, host
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// How many times as long the paper's machine computes as one CPU of this one. It is an assumption: no such machine is at hand
    #[arg(long, default_value_t = 4.0)]
    theirs: f64,
    /// Transactions that HPA and PFP look at; 700,000 are about 20 MB
    #[arg(long, default_value_t = 1500)]
    transactions: u32,
    /// Sequences of 1,500 bases in BLAST's database
    #[arg(long, default_value_t = 80)]
    sequences: u32,
    /// The size of the tables, from 0.01 on; 1 is about 1 GB
    #[arg(long, default_value_t = 0.01)]
    scale_factor: f64,
    /// The memory of each guest. With 128 MiB TPC-H after HPA is out of memory for minutes
    #[arg(long, default_value_t = 192)]
    memory_mib: u64,
    /// The programs of experiments/workloads
    #[arg(long, default_value = "experiments/workloads")]
    workloads: PathBuf,
    /// Measure nothing: judge and draw what results.json has
    #[arg(long)]
    report_only: bool,
    /// One round with little data and two round trips, which only shows that it works
    #[arg(long)]
    quick: bool,
}

impl Arguments {
    fn small(mut self) -> Self {
        if self.quick {
            (self.rounds, self.rtts, self.scale_factor) = (1, vec![0, 16], 0.01);
        }
        self
    }

    /// The cells to measure, round by round.
    fn cells(&self) -> Result<Vec<Cell>> {
        let only: Result<Vec<Kind>> = self.only.iter().map(|word| Kind::parse(word)).collect();
        let only = only?;
        let is_chosen = |cell: &Cell| only.is_empty() || only.contains(&cell.kind);
        let is_wanted = |cell: &Cell| !self.quick || cell.is_of_quick_run(&self.rtts);
        let all = (1..=self.rounds).flat_map(|round| cell::of_round(round, &self.rtts));
        Ok(all.filter(is_chosen).filter(is_wanted).collect())
    }

    fn size(&self) -> Size {
        Size {
            transactions: self.transactions,
            sequences: self.sequences,
            scale_factor: self.scale_factor,
            memory_bytes: self.memory_mib << 20,
        }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse().small();
    if let Some(dir) = &arguments.tables {
        tables::write(arguments.scale_factor, dir)?;
        return Ok(());
    }
    let mut results = Results::load(&arguments.out)?;
    if arguments.report_only {
        ensure!(
            !results.cells.is_empty(),
            "{} has no results of this program",
            arguments.out.display()
        );
        results.write(&arguments.out)?;
        report::print(&results);
        return Ok(());
    }
    let image = arguments.image.as_deref().context("--image is missing")?;
    let steps = Steps::default();
    begin(&arguments, &mut results, &steps)?;
    let cells: Vec<Cell> =
        arguments.cells()?.into_iter().filter(|cell| !results.has(*cell)).collect();
    steps.say(&format!(
        "{} cells are to be measured, each of about a minute and a half on two quiet CPUs without KVM; {} are there. None is begun after {:.0} minutes.",
        cells.len(), results.cells.len(), arguments.minutes
    ));
    if cells.is_empty() {
        report::print(&results);
        return Ok(());
    }
    let program = std::path::absolute(&arguments.program)?;
    let options = Options { program, ..Options::new()? };
    let work = async |lab: Lab| {
        let measured = measure(&lab, &arguments, image, &cells, &steps, &mut results).await;
        measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
    };
    with_lab(bench::cluster(image)?, &options, &steps, work).await?;
    report::print(&results);
    Ok(())
}

/// Goes on with the results that are there, if they are of the same version and the same data; otherwise all is measured anew.
fn begin(arguments: &Arguments, results: &mut Results, steps: &Steps) -> Result<()> {
    let versions = measuring::versions(measuring::version_of(&arguments.program), &[QEMU]);
    let size = arguments.size();
    let is_other = results.versions != versions || results.size() != size;
    if is_other && !results.cells.is_empty() {
        steps.say("The cells that are there are of another version or of other data: all are measured anew.");
    }
    if is_other {
        *results = Results::default();
    }
    results.versions = versions;
    results.cpus = std::thread::available_parallelism()?.get();
    results.is_quick = arguments.quick;
    (results.transactions, results.sequences) = (size.transactions, size.sequences);
    (results.scale_factor, results.memory_bytes) = (size.scale_factor, size.memory_bytes);
    Ok(())
}

async fn measure(
    lab: &Lab,
    arguments: &Arguments,
    image: &Path,
    cells: &[Cell],
    steps: &Steps,
    results: &mut Results,
) -> Result<()> {
    let began = Instant::now();
    let mut counted_s = 0.0;
    let mut bench =
        Bench::prepare(lab, image, &arguments.workloads, arguments.size(), steps).await?;
    results.transactions_bytes = bench.transactions_bytes;
    results.table_bytes = bench.table_bytes;
    results.database_bytes = bench.database_bytes;
    results.target_memory_bytes = bench.target_memory_bytes();
    results.accelerator = bench.accelerator().await?;
    dilate(&mut bench, arguments.theirs, cells, results).await?;
    let mut targets: Option<Targets> = None;
    let mut failures = 0;
    for (number, cell) in cells.iter().enumerate() {
        let minutes = began.elapsed().as_secs_f64() / 60.0;
        if minutes > arguments.minutes {
            let left = cells.len() - number;
            steps.say(&format!(
                "No time is left for {left} cells. The same command goes on with them."
            ));
            break;
        }
        steps.say(&format!("{}/{} after {minutes:.0} min: {cell}", number + 1, cells.len()));
        let pace = results.pace(cell.kind, cell.is_dilated);
        let needs_targets = matches!(cell.kind, Kind::IscsiPerigee | Kind::IscsiTgt | Kind::Host);
        if needs_targets && targets.is_none() {
            bench.free_network().await?;
            targets = Some(Targets::start(&bench, &lab_program(arguments)?).await?);
        }
        match cell_of(&mut bench, *cell, pace, targets.as_mut()).await {
            Ok(measured) => {
                results.keep(measured);
                failures = 0;
            }
            Err(error) => {
                steps.say(&format!("  {cell} has failed: {error:#}"));
                results.failed.insert(cell.to_string(), format!("{error:#}"));
                failures += 1;
            }
        }
        let now_s = began.elapsed().as_secs_f64();
        results.whole_s += now_s - counted_s;
        counted_s = now_s;
        results.write(&arguments.out)?;
        ensure!(failures < FAILURES_MAX, "{failures} cells one after the other have failed");
    }
    Ok(())
}

/// Measures one cell.
async fn cell_of(
    bench: &mut Bench<'_>,
    cell: Cell,
    pace: Pace,
    targets: Option<&mut Targets>,
) -> Result<Measured> {
    match (cell.kind, targets) {
        (Kind::IscsiPerigee | Kind::IscsiTgt, Some(targets)) => {
            bench.iscsi(cell, pace, targets).await
        }
        (Kind::Host, Some(targets)) => bench.host(cell, pace, &Work::ALL, targets).await,
        (Kind::Network, _) => bench.gang(cell, pace, &[Work::Hpa, Work::Pfp, Work::Tpch]).await,
        _ => bench.gang(cell, pace, &Work::ALL).await,
    }
}

fn lab_program(arguments: &Arguments) -> Result<PathBuf> {
    Ok(std::path::absolute(&arguments.program)?)
}

/// Measures by how much time is dilated, for each number of VMs that has no factor yet. Cells that are there keep theirs.
async fn dilate(
    bench: &mut Bench<'_>,
    theirs: f64,
    cells: &[Cell],
    results: &mut Results,
) -> Result<()> {
    let counts: std::collections::BTreeSet<u32> =
        cells.iter().map(|cell| cell.kind.vms()).collect();
    for vms in counts {
        if results.dilations.contains_key(&vms) {
            continue;
        }
        let programs = bench.scratch.join("programs");
        let native: Result<Vec<f64>> = (0..5).map(|_| domain0::fixed_s(&programs)).collect();
        let native_s = measuring::median(native?).context("no times")?;
        let dilation = Dilation::new(bench.calibrate(vms).await?, native_s, theirs)?;
        bench.steps.say(&format!(
            "Time is dilated {:.1} times for {vms} VMs: a fixed computation takes {:.2} s in each of them at once, {:.3} s on the host itself, and on the paper's machine {theirs} times as long as that (assumed).",
            dilation.factor(), dilation.guest_s, dilation.native_s
        ));
        results.dilations.insert(vms, dilation);
    }
    Ok(())
}
