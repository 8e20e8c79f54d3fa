//! Experiment 1 of Toyoshima, Yamaguchi and Oguchi, "Storage access optimization with virtual machine migration during execution of
//! parallel data processing on a virtual machine PC cluster", with Perigee: programs that compute (HPA; here also PFP and BLAST)
//! and one that reads (TPC-H), on four VMs, with their data local and at a distance of 1 to 16 ms.
//!
//! Where the paper has iSCSI and Dummynet, there are Perigee's remote volumes and the lab's WAN. All hosts are network namespaces of one
//! machine.

mod bench;
mod domain0;
mod paper;
mod report;
mod results;
mod right;
mod series;
mod tables;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use perigee_lab::measuring::{self, QEMU};
use perigee_lab::{Lab, Options, Steps, with_lab};
use perigee_model::Problem;

use bench::{Bench, Size};
use results::{Results, Work};

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
    /// Round-trip times in ms, beside the local data, in the order in which they are measured
    #[arg(long, value_delimiter = ',', default_value = "16,4,1,8,2")]
    rtts: Vec<u32>,
    /// No distance is begun that would probably end later than this
    #[arg(long, default_value_t = 19.0)]
    minutes: f64,
    /// Measure only these: hpa, pfp, blast, tpch
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Transactions that HPA and PFP look at; 100,000 are about 3 MB
    #[arg(long, default_value_t = 6000)]
    transactions: u32,
    /// Sequences of 1,500 bases in BLAST's database
    #[arg(long, default_value_t = 1000)]
    sequences: u32,
    /// The size of the tables, from 0.01 on; 1 is about 1 GB
    #[arg(long, default_value_t = 0.01)]
    scale_factor: f64,
    /// The programs of experiments/workloads
    #[arg(long, default_value = "experiments/workloads")]
    workloads: PathBuf,
    /// Measure nothing: judge and draw what results.json has
    #[arg(long)]
    report_only: bool,
    /// Little data, local and at 16 ms, which only shows that it works
    #[arg(long)]
    quick: bool,
}

impl Arguments {
    fn small(mut self) -> Self {
        if self.quick {
            self.rtts = vec![16];
            (self.transactions, self.sequences) = (1500, 100);
        }
        self
    }

    fn works(&self) -> Result<Vec<Work>> {
        for word in &self.only {
            ensure!(
                Work::ALL.iter().any(|w| w.name() == word),
                "--only {word}: there is no such program"
            );
        }
        let is_named = |work: &Work| self.only.iter().any(|word| word == work.name());
        Ok(Work::ALL.into_iter().filter(|work| self.only.is_empty() || is_named(work)).collect())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse().small();
    if let Some(dir) = &arguments.tables {
        tables::write(arguments.scale_factor, dir)?;
        return Ok(());
    }
    let works = arguments.works()?;
    let mut results = Results::load(&arguments.out)?;
    if arguments.report_only {
        results.write(&arguments.out)?;
        report::print(&results);
        return Ok(());
    }
    let image = arguments.image.as_deref().context("--image is missing")?;
    let began = Instant::now();
    results.cpus = std::thread::available_parallelism()?.get();
    results.is_quick = arguments.quick;
    results.versions = measuring::versions(measuring::version_of(&arguments.program), &[QEMU]);
    let program = std::path::absolute(&arguments.program)?;
    let options = Options { program, ..Options::new()? };
    let steps = Steps::default();
    let work = async |lab: Lab| {
        let measured =
            measure(&lab, &arguments, image, &works, (&steps, began), &mut results).await;
        measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
    };
    let minutes = expected_min(&arguments, &works);
    steps.say(&format!(
        "This takes about {minutes:.0} minutes on two quiet CPUs without KVM. What would end later than after {:.0} minutes is not begun.",
        arguments.minutes
    ));
    with_lab(measuring::two_sites(image), &options, &steps, work).await?;
    if arguments.only.is_empty() {
        results.whole_s = began.elapsed().as_secs_f64();
        results.write(&arguments.out)?;
    }
    report::print(&results);
    Ok(())
}

/// How long it takes, by what it took on two CPUs without KVM: the preparation, and at each distance the VMs' start and the programs.
fn expected_min(arguments: &Arguments, works: &[Work]) -> f64 {
    let places = arguments.rtts.len() as f64 + 1.0;
    let programs = works.len() as f64 / Work::ALL.len() as f64;
    let (prepare_min, start_min, all_min) = match arguments.quick {
        true => (1.5, 0.3, 1.6),
        false => (2.0, 0.3, 2.2),
    };
    prepare_min + places * (start_min + programs * all_min)
}

async fn measure(
    lab: &Lab,
    arguments: &Arguments,
    image: &Path,
    works: &[Work],
    (steps, began): (&Steps, Instant),
    results: &mut Results,
) -> Result<()> {
    let size = Size {
        transactions: arguments.transactions,
        sequences: arguments.sequences,
        scale_factor: arguments.scale_factor,
    };
    let mut bench = Bench::prepare(lab, image, &arguments.workloads, size, steps).await?;
    if results.size() != size {
        steps.say("  the figures of an earlier run are of other data: all are measured anew");
        (results.runs, results.on_host) = (Vec::new(), Vec::new());
    }
    results.transactions = size.transactions;
    results.transactions_bytes = bench.transactions_bytes;
    results.sequences = size.sequences;
    results.scale_factor = size.scale_factor;
    results.table_bytes = bench.table_bytes;
    results.accelerator = bench.accelerator().await?;
    let on_host = bench.on_host(works)?;
    results.on_host.retain(|run| !works.contains(&run.work));
    results.on_host.extend(on_host);
    results.write(&arguments.out)?;
    let mut longest = Duration::ZERO;
    for rtt_ms in std::iter::once(None).chain(arguments.rtts.iter().copied().map(Some)) {
        let begins = Instant::now();
        if (began.elapsed() + longest).as_secs_f64() > arguments.minutes * 60.0 {
            steps.say(&format!("  no time is left for data {}", results::place(rtt_ms)));
            continue;
        }
        let runs = bench.run(rtt_ms, works).await?;
        results.runs.retain(|run| run.rtt_ms != rtt_ms || !works.contains(&run.work));
        results.runs.extend(runs);
        results.write(&arguments.out)?;
        longest = longest.max(begins.elapsed());
    }
    Ok(())
}
