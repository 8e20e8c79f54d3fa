//! The benchmark of the volume server and its peers: `make bench`.

mod control;
mod curves;
mod echo;
mod figures;
mod fio;
mod goals;
mod load;
mod machine;
mod measure;
mod process;
mod report;
mod results;
mod rounds;
mod servers;
mod stats;
mod suite;
mod workloads;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use load::offsets::Pattern;
use load::{Address, Kind, Load};

#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Serve zeros without storage, to show the cost of the messages alone
    Echo {
        /// `unix:PATH` or `ADDRESS:PORT`
        address: String,
        /// Size of the export, in MiB
        #[arg(long, default_value_t = 1024)]
        size_mib: u64,
    },
    /// Put a load on one NBD server and print the result
    Load(LoadArgs),
    /// Measure the volume server and its peers
    Run(suite::RunArgs),
    /// Judge results.json and draw its report.html again
    Report {
        #[arg(default_value = "experiments/engine")]
        dir: PathBuf,
    },
}

#[derive(Debug, Args)]
struct LoadArgs {
    /// `unix:PATH` or `ADDRESS:PORT`
    address: String,
    /// The export's name
    #[arg(long, default_value = "")]
    export: String,
    /// Write instead of reading
    #[arg(long)]
    write: bool,
    /// Sequential requests instead of random ones
    #[arg(long)]
    sequential: bool,
    /// Ask for structured replies
    #[arg(long)]
    structured: bool,
    /// How many MiB of the export are used
    #[arg(long, default_value_t = 512)]
    span_mib: u64,
    #[arg(long, default_value_t = 4096)]
    request_bytes: u32,
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Requests in flight on each connection
    #[arg(long, default_value_t = 32)]
    depth: usize,
    #[arg(long, default_value_t = 1)]
    threads: usize,
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Bind the generator to this CPU
    #[arg(long)]
    cpu: Option<usize>,
    /// Show this process's CPU time per million requests
    #[arg(long)]
    pid: Option<u32>,
}

fn main() -> ExitCode {
    match run(Cli::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("perigee-engine-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<()> {
    match verb {
        Verb::Echo { address, size_mib } => {
            Ok(echo::serve(&parse_address(&address)?, size_mib << 20)?)
        }
        Verb::Load(arguments) => drive(arguments),
        Verb::Run(arguments) => suite::run(&arguments),
        Verb::Report { dir } => suite::report_again(&dir),
    }
}

fn parse_address(text: &str) -> Result<Address> {
    Ok(match text.strip_prefix("unix:") {
        Some(path) => Address::Unix(PathBuf::from(path)),
        None => Address::Tcp(text.parse().context("it is neither unix:PATH nor ADDRESS:PORT")?),
    })
}

#[expect(clippy::print_stdout, reason = "a command that prints its result")]
fn drive(arguments: LoadArgs) -> Result<()> {
    let units = (arguments.span_mib << 20) / u64::from(arguments.request_bytes);
    let load = Load {
        address: parse_address(&arguments.address)?,
        exports: vec![arguments.export],
        structured: arguments.structured,
        kind: if arguments.write { Kind::Write } else { Kind::Read },
        request_bytes: arguments.request_bytes,
        pattern: if arguments.sequential {
            Pattern::Sequential { units }
        } else {
            Pattern::Random { units }
        },
        connections: arguments.connections,
        depth: arguments.depth,
        threads: arguments.threads,
        warm_up: Duration::from_millis(200),
        duration: Duration::from_secs_f64(arguments.seconds),
        flush: arguments.write,
        cpu: arguments.cpu,
        seed: 1,
    };
    let cpu = || arguments.pid.map_or(0.0, |pid| process::cpu_s(pid).unwrap_or(0.0));
    let (mut before, mut after) = (0.0, 0.0);
    let measured = load::run(&load, || before = cpu(), || after = cpu())?;
    let iops = measured.iops();
    println!(
        "{iops:.0} IOPS, {:.0} MiB/s, p50 {:.1} µs, p99 {:.1} µs, server CPU {:.2} s per million, flush {:.3} s",
        iops * f64::from(load.request_bytes) / f64::from(1 << 20),
        measured.latencies.percentile_us(50),
        measured.latencies.percentile_us(99),
        (after - before) * 1e6 / (iops * measured.seconds).max(1.0),
        measured.flush_seconds,
    );
    Ok(())
}
