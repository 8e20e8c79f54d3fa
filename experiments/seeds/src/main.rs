//! Experiment 1 of Toyoshima, Yamaguchi and Oguchi, "Storage access optimization with virtual machine migration during execution of
//! parallel data processing on a virtual machine PC cluster", with Perigee: programs that compute (HPA; here also PFP and BLAST)
//! and one that reads (TPC-H), on four VMs, with their data local and at a distance of 1 to 16 ms.
//!
//! Where the paper has iSCSI and Dummynet, there are Perigee's remote volumes and the lab's WAN. All hosts are network namespaces of one
//! machine.

mod bench;
mod paper;
mod report;
mod results;
mod series;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Parser;
use perigee_lab::measuring::{self, QEMU};
use perigee_lab::{Lab, Options, Steps, with_lab};
use perigee_model::Problem;

use bench::{Bench, Size};
use results::{Results, Work};

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the lab runs
    #[arg(long)]
    program: PathBuf,
    /// The directory of an image with Open MPI, mpi4py, BLAST and PostgreSQL
    #[arg(long)]
    image: PathBuf,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/seeds")]
    out: PathBuf,
    /// Round-trip times in ms, beside the local data
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16")]
    rtts: Vec<u32>,
    /// Measure only these: hpa, pfp, blast, tpch
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Transactions that HPA and PFP look at; 100,000 are about 3 MB
    #[arg(long, default_value_t = 40_000)]
    transactions: u32,
    /// Sequences of 1,500 bases in BLAST's database
    #[arg(long, default_value_t = 2000)]
    sequences: u32,
    /// The size of the tables; 1 is about 1 GB
    #[arg(long, default_value_t = 0.1)]
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
            (self.transactions, self.sequences, self.scale_factor) = (3000, 100, 0.01);
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
    let works = arguments.works()?;
    let mut results = Results::load(&arguments.out)?;
    if arguments.report_only {
        results.write(&arguments.out)?;
        report::print(&results);
        return Ok(());
    }
    results.cpus = std::thread::available_parallelism()?.get();
    results.is_quick = arguments.quick;
    results.versions = measuring::versions(measuring::version_of(&arguments.program), &[QEMU]);
    let program = std::path::absolute(&arguments.program)?;
    let options = Options { program, ..Options::new()? };
    let steps = Steps::default();
    let work = async |lab: Lab| {
        let measured = measure(&lab, &arguments, &works, &steps, &mut results).await;
        measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
    };
    with_lab(measuring::two_sites(&arguments.image), &options, &steps, work).await?;
    report::print(&results);
    Ok(())
}

async fn measure(
    lab: &Lab,
    arguments: &Arguments,
    works: &[Work],
    steps: &Steps,
    results: &mut Results,
) -> Result<()> {
    let size = Size {
        transactions: arguments.transactions,
        sequences: arguments.sequences,
        scale_factor: arguments.scale_factor,
    };
    let mut bench =
        Bench::prepare(lab, &arguments.image, &arguments.workloads, size, steps).await?;
    results.transactions = arguments.transactions;
    results.transactions_bytes = bench.transactions_bytes;
    results.sequences = arguments.sequences;
    results.scale_factor = arguments.scale_factor;
    results.table_bytes = bench.table_bytes;
    for rtt_ms in std::iter::once(None).chain(arguments.rtts.iter().copied().map(Some)) {
        let runs = bench.run(rtt_ms, works).await?;
        results.runs.retain(|run| run.rtt_ms != rtt_ms || !works.contains(&run.work));
        results.runs.extend(runs);
        results.write(&arguments.out)?;
    }
    Ok(())
}
