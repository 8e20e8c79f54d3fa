//! Measures what encryption costs between the hosts of a lab: a volume that is read over the WAN (NBD over TLS), and a VM
//! that migrates (through the agents' tunnel). The same is done in a lab that encrypts nothing.

mod migration;
mod reading;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use perigee_lab::measuring::{self, QEMU, load_1min, median};
use perigee_lab::wan::LinkSettings;
use perigee_lab::{Lab, Options, Steps, with_lab};
use perigee_model::{HostId, Problem};
use serde::{Deserialize, Serialize};

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the labs run
    #[arg(long)]
    program: PathBuf,
    /// The golden image's directory
    #[arg(long)]
    image: PathBuf,
    /// The directory for results.json
    #[arg(long, default_value = "experiments/tls")]
    out: PathBuf,
    /// The round-trip time of the WAN in ms
    #[arg(long, default_value_t = 0)]
    rtt: u32,
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// One round with little data, which only shows that it works
    #[arg(long)]
    quick: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum What {
    /// 1 MiB requests through the volume servers of both hosts; the CPU time is theirs.
    ReadVolume,
    /// The CPU time is that of both QEMUs, with that of the guest and of their start.
    MigrateVm,
}

/// One transfer.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Measurement {
    what: What,
    encrypted: bool,
    round: u32,
    bytes: u64,
    seconds: f64,
    cpu_s: f64,
    /// The machine's load, which other processes may have caused.
    load_1min: f64,
}

/// The medians of one kind of transfer.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Cost {
    what: What,
    encrypted: bool,
    mib_per_s: f64,
    cpu_s_per_gib: f64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Results {
    versions: BTreeMap<String, String>,
    cpus: usize,
    rtt_ms: u32,
    costs: Vec<Cost>,
    measurements: Vec<Measurement>,
}

/// How much is transferred.
#[derive(Clone, Copy)]
struct Size {
    volume_bytes: u64,
    memory_bytes: u64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let (rounds, size) = if arguments.quick {
        (1, Size { volume_bytes: 64 << 20, memory_bytes: 32 << 20 })
    } else {
        (arguments.rounds, Size { volume_bytes: 1 << 30, memory_bytes: 512 << 20 })
    };
    let mut results = Results {
        versions: measuring::versions(measuring::version_of(&arguments.program), &[QEMU]),
        cpus: std::thread::available_parallelism()?.get(),
        rtt_ms: arguments.rtt,
        ..Results::default()
    };
    for encrypted in [false, true] {
        let mut definition = measuring::two_sites(&arguments.image);
        definition.insecure = !encrypted;
        for link in &mut definition.links {
            link.settings = LinkSettings::of_rtt_us(u64::from(arguments.rtt) * 1000);
        }
        let program = std::path::absolute(&arguments.program)?;
        let options = Options { program, ..Options::new()? };
        let work = async |lab: Lab| {
            let measured = measure(&lab, &arguments.image, encrypted, rounds, size).await;
            measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
        };
        let measured = with_lab(definition, &options, &Steps::default(), work).await?;
        results.measurements.extend(measured);
    }
    results.costs = costs(&results.measurements);
    std::fs::create_dir_all(&arguments.out)?;
    let path = arguments.out.join("results.json");
    std::fs::write(&path, serde_json::to_vec_pretty(&results)?)
        .with_context(|| format!("can't write {}", path.display()))?;
    print(&results);
    Ok(())
}

async fn measure(
    lab: &Lab,
    image: &Path,
    encrypted: bool,
    rounds: u32,
    size: Size,
) -> Result<Vec<Measurement>> {
    let hosts = [HostId::new("home1")?, HostId::new("cloud1")?];
    let mut all = Vec::new();
    let mut note = |what, round, (bytes, seconds, cpu_s): (u64, f64, f64)| -> Result<()> {
        eprintln!(
            "{what:?}, encrypted: {encrypted}, round {round}: {seconds:.2} s, CPU {cpu_s:.2} s"
        );
        let load_1min = load_1min()?;
        all.push(Measurement { what, encrypted, round, bytes, seconds, cpu_s, load_1min });
        Ok(())
    };
    reading::prepare(lab, &hosts, size.volume_bytes).await?;
    for round in 1..=rounds {
        note(What::ReadVolume, round, reading::read(lab, &hosts, round).await?)?;
    }
    let vm = migration::boot(lab, image, &hosts[0], size.memory_bytes).await?;
    for round in 1..=rounds {
        note(What::MigrateVm, round, migration::there(lab, &vm, &hosts).await?)?;
        migration::back(lab, &vm, &hosts).await?;
    }
    Ok(all)
}

fn costs(measurements: &[Measurement]) -> Vec<Cost> {
    let mut kinds: Vec<_> = measurements.iter().map(|m| (m.what, m.encrypted)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of_kind = |(what, encrypted)| {
        let all =
            || measurements.iter().filter(move |m| (m.what, m.encrypted) == (what, encrypted));
        let rates = all().map(|m| in_mib(m.bytes) / m.seconds);
        let cpu = all().map(|m| m.cpu_s / (in_mib(m.bytes) / 1024.0));
        Some(Cost { what, encrypted, mib_per_s: median(rates)?, cpu_s_per_gib: median(cpu)? })
    };
    kinds.into_iter().filter_map(of_kind).collect()
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn in_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Runs a program to its end.
fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let ended = Command::new(program).args(arguments).stdin(Stdio::null()).status();
    let ended = ended.with_context(|| format!("can't run {program}"))?;
    ensure!(ended.success(), "{program} {}: {ended}", arguments.join(" "));
    Ok(())
}

/// How long anything may take.
const DEADLINE: Duration = Duration::from_secs(600);

#[expect(clippy::print_stdout, reason = "the medians are what it is for")]
fn print(results: &Results) {
    println!("{:<12} {:<10} {:>10} {:>14}", "transfer", "encrypted", "MiB/s", "CPU s per GiB");
    for Cost { what, encrypted, mib_per_s, cpu_s_per_gib } in &results.costs {
        println!("{what:<12?} {encrypted:<10} {mib_per_s:>10.0} {cpu_s_per_gib:>14.2}");
    }
}
