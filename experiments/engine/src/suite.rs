//! The whole benchmark: set up, all rounds, curves, figures, then results and report.
#![expect(clippy::print_stdout, reason = "this is where the benchmark prints")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use perigee_lab::{interrupt, measuring};

use crate::curves::Curves;
use crate::figures::Figures;
use crate::fio;
use crate::goals::{Goal, judge};
use crate::machine;
use crate::measure::warm_all;
use crate::report;
use crate::results::{IOPS, MACHINE, Results};
use crate::rounds::{self, Plan};
use crate::servers::Fixtures;

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The program to measure
    #[arg(long, default_value = "target/release/perigee")]
    perigee: PathBuf,
    /// How many times everything is measured
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Only show that everything works: the runs are short, and their figures are not meaningful
    #[arg(long)]
    quick: bool,
    /// Only workloads, curves and figures whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// In the workloads, only servers whose name contains this; may be given more than once
    #[arg(long)]
    server: Vec<String>,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/engine")]
    out: PathBuf,
    /// The directory for images, pools and sockets while it runs; it must be on a real disk
    #[arg(long, default_value = "out/bench")]
    scratch: PathBuf,
}

/// If a signal ends the run, the measurements so far are kept and the scratch files are removed.
pub fn run(arguments: &RunArgs) -> Result<()> {
    interrupt::hold()?;
    let ended = measure_all(arguments);
    // A signal is the reason of the error.
    interrupt::check()?;
    ended
}

fn measure_all(arguments: &RunArgs) -> Result<()> {
    let start = Instant::now();
    let say = |what: &str| println!("{:6.1} s  {what}", start.elapsed().as_secs_f64());
    std::fs::create_dir_all(&arguments.scratch).context("can't make the scratch directory")?;
    let scratch = tempfile::Builder::new().prefix("run.").tempdir_in(&arguments.scratch)?;
    let dir = scratch.path().canonicalize()?;
    let perigee = arguments.perigee.canonicalize().context("the perigee binary")?;
    let plan = Plan {
        rounds: arguments.rounds,
        duration: Duration::from_millis(if arguments.quick { 300 } else { 400 }),
        only: arguments.only.clone(),
        servers: arguments.server.clone(),
        few_servers: arguments.quick,
    };
    let mut results = Results {
        versions: versions(&perigee),
        rounds: plan.rounds,
        quick: arguments.quick,
        ..Results::default()
    };
    let image_bytes = if arguments.quick { 64 << 20 } else { 512 << 20 };
    let fixtures = Fixtures::make(&dir, &perigee, image_bytes, say)?;
    say("the machine itself");
    results.figures.extend(machine::measure(&fixtures.base())?);
    print_machine(&results);
    // The results are saved after each phase.
    for cold in [false, true] {
        results.results.extend(rounds::run(&fixtures, &plan, cold, say)?);
        keep(&arguments.out, &mut results)?;
    }
    results.figures.extend(Figures { fixtures: &fixtures, plan: &plan }.run(say)?);
    keep(&arguments.out, &mut results)?;
    warm_all(&dir)?;
    Curves { fixtures: &fixtures, plan: &plan }.run(&mut results, say)?;
    keep(&arguments.out, &mut results)?;
    if fio::is_there() {
        results.results.extend(fio::run(&fixtures, &plan, say)?);
    } else {
        say("there is no fio with an nbd engine: its figures are left out");
    }
    keep(&arguments.out, &mut results)?;
    print_medians(&results);
    print_goals(&results.goals);
    say("done; removing the scratch files");
    scratch.close()?;
    say("gone");
    Ok(())
}

/// Judges and draws the results of an earlier run again.
pub fn report_again(dir: &Path) -> Result<()> {
    let text = std::fs::read_to_string(dir.join("results.json")).context("results.json")?;
    let mut results: Results = serde_json::from_str(&text).context("results.json")?;
    keep(dir, &mut results)?;
    print_machine(&results);
    print_medians(&results);
    print_goals(&results.goals);
    Ok(())
}

/// Judges the results and writes them with their report.
fn keep(out: &Path, results: &mut Results) -> Result<()> {
    results.goals = judge(results);
    std::fs::create_dir_all(out)?;
    let mut text = serde_json::to_string_pretty(results)?;
    text.push('\n');
    std::fs::write(out.join("results.json"), text).context("can't write results.json")?;
    std::fs::write(out.join("report.html"), report::html(results))
        .context("can't write report.html")
}

fn versions(perigee: &Path) -> BTreeMap<String, String> {
    let programs = ["qemu-nbd", "qemu-storage-daemon", "nbdkit", "fio"].map(|name| (name, name));
    let mut versions = measuring::versions(measuring::version_of(perigee), &programs);
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    versions.insert("CPUs".into(), cpus.to_string());
    versions
}

fn print_machine(results: &Results) {
    for figure in results.figures.iter().filter(|figure| figure.server == MACHINE) {
        println!("  {:<38}{:>8.2} {}", figure.name, figure.value, figure.unit);
    }
}

fn print_medians(results: &Results) {
    let mut cases: Vec<(String, String)> = Vec::new();
    for m in results.results.iter().filter(|m| m.at.is_none() && m.generator == "own") {
        let case = (m.workload.clone(), m.transport.clone());
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    for (workload, transport) in cases {
        println!("\n{workload} over {transport}");
        println!(
            "  {:<36}{:>10}{:>10}{:>10}{:>10}{:>12}{:>10}",
            "", "IOPS", "MiB/s", "p50 µs", "p99 µs", "CPU s/M", "RSS MiB"
        );
        for server in results.servers(&workload, &transport) {
            let median =
                |column| results.median(&workload, &transport, &server, column).unwrap_or(f64::NAN);
            println!(
                "  {server:<36}{:>10.0}{:>10.1}{:>10.1}{:>10.1}{:>12.2}{:>10.1}",
                median(IOPS),
                median(|m| Some(m.mib_per_s)),
                median(|m| Some(m.p50_us)),
                median(|m| Some(m.p99_us)),
                median(|m| Some(m.server_cpu_s_per_million)),
                median(|m| Some(m.server_rss_mib)),
            );
        }
    }
}

fn print_goals(goals: &[Goal]) {
    println!("\n{:<88}{:>10}{:>14}  met", "goal", "measured", "target");
    for goal in goals {
        let measured = goal.measured.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
        let met = match goal.met {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "not measured",
        };
        println!("{:<88}{measured:>10}{:>14}  {met:<4} {}", goal.goal, goal.target, goal.how);
    }
}
