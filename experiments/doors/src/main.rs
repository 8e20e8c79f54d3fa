//! Measures the doors of the data repository (HTTP, WebDAV, SFTP, FTPS) beside nginx, vsftpd and OpenSSH's sftp-server: on one
//! machine, in one run, with the same clients, alternating. Then the server is killed under load, and what it had
//! acknowledged is looked for; and clients send one file that is larger than the server's memory, and many small ones.

mod clients;
mod heavy;
mod killed;
mod report;
mod results;
mod servers;

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use perigee_lab::measuring::{self, load_1min, median};
use sha2::{Digest as _, Sha256};
use tokio::signal::unix::{SignalKind, signal};

use clients::{Load, Workspace};
use results::{Door, Measurement, Results, Summing, What};
use servers::Servers;

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary
    #[arg(long)]
    program: PathBuf,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/doors")]
    out: PathBuf,
    /// The directory on whose disk the servers keep their files
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// One round with little data, which only shows that it works
    #[arg(long)]
    quick: bool,
}

/// How much is sent.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Of the one file of one client.
    large_bytes: u64,
    /// Of each of the files that 64 clients send at once.
    medium_bytes: u64,
    /// Files of 4 KiB that each of 8 clients sends.
    small_files: usize,
    /// Files whose upload was acknowledged before the server is killed.
    acknowledged: usize,
    /// Of the file that is larger than the server's memory.
    huge_bytes: u64,
    /// Small files that one client sends.
    many_files: usize,
}

const FULL: Sizes = Sizes {
    large_bytes: 512 << 20,
    medium_bytes: 8 << 20,
    small_files: 250,
    acknowledged: 500,
    huge_bytes: servers::MEMORY_BYTES + (512 << 20),
    many_files: 10_000,
};
const QUICK: Sizes = Sizes {
    large_bytes: 64 << 20,
    medium_bytes: 1 << 20,
    small_files: 20,
    acknowledged: 100,
    huge_bytes: servers::MEMORY_BYTES + (64 << 20),
    many_files: 200,
};

static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Whether somebody wants this to end.
pub fn is_interrupted() -> bool {
    IS_INTERRUPTED.load(Ordering::Relaxed)
}

/// After Ctrl-C or SIGTERM all that waits for a client ends with an error, and the servers and their files go.
fn end_when_asked() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            IS_INTERRUPTED.store(true, Ordering::Relaxed);
            eprintln!("it ends; the servers and their files are removed");
        });
    });
    Ok(())
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    end_when_asked()?;
    let (rounds, sizes) = if arguments.quick { (1, QUICK) } else { (arguments.rounds, FULL) };
    let work = Workspace::new(&arguments.dir)?;
    let mut servers = Servers::start(&arguments.program, work.path())?;
    let programs = [("curl", "curl"), ("lftp", "lftp"), ("rclone", "rclone")];
    let mut results = Results {
        versions: measuring::versions(measuring::version_of(&arguments.program), &programs),
        cpus: std::thread::available_parallelism()?.get(),
        is_quick: arguments.quick,
        ..Results::default()
    };
    results.versions.extend(servers::versions());
    results.summing = Some(summing());
    for round in 1..=rounds {
        measure(&servers, &work, sizes, round, &mut results.measurements)?;
        // What was measured is kept, whatever happens later.
        results.judge();
        save(&arguments.out, &results)?;
    }
    results.killed = killed::run(&mut servers, &work, sizes)?;
    results.judge();
    save(&arguments.out, &results)?;
    let heavy = heavy::run(&servers, &work, sizes, &mut results.heavy);
    drop(servers);
    results.judge();
    save(&arguments.out, &results)?;
    heavy?;
    print(&results);
    ensure!(results.killed.iter().all(|killed| killed.lost == 0), "acknowledged files are lost");
    Ok(())
}

/// The median of some tries over a buffer in memory.
fn summing() -> Summing {
    let bytes = vec![7; 64 << 20];
    let tries = |sum: &dyn Fn(&[u8])| {
        let timed = |_| {
            let begun = Instant::now();
            sum(&bytes);
            begun.elapsed().as_secs_f64() * f64::from((1 << 30) / (64 << 20))
        };
        median((0..9).map(timed)).unwrap_or_default()
    };
    Summing {
        sha256_s_per_gib: tries(&|bytes| {
            std::hint::black_box(Sha256::digest(bytes));
        }),
        crc64_s_per_gib: tries(&|bytes| {
            std::hint::black_box(crc_fast::crc64_nvme(bytes));
        }),
    }
}

/// One round: each work at each door, in an order that turns with the round.
fn measure(
    servers: &Servers,
    work: &Workspace,
    sizes: Sizes,
    round: u32,
    all: &mut Vec<Measurement>,
) -> Result<()> {
    for load in Load::all(sizes) {
        work.prepare(&load)?;
        let mut doors = Door::ALL.to_vec();
        doors.rotate_left(round as usize % Door::ALL.len());
        for door in doors {
            for is_upload in [true, false] {
                ensure!(!is_interrupted(), "it was interrupted");
                let what = What { load: load.name, is_upload };
                let begun = Instant::now();
                clients::transfer(servers, work, door, &load, is_upload)
                    .with_context(|| format!("{door:?}, {what:?}"))?;
                let seconds = begun.elapsed().as_secs_f64();
                // What is still on its way to the disk would slow down the next one.
                run("sync", &[])?;
                let durable_s = begun.elapsed().as_secs_f64();
                eprintln!(
                    "round {round}: {door:?} {what:?}: {seconds:.2} s ({durable_s:.2} s with sync)"
                );
                all.push(Measurement {
                    door,
                    what,
                    round,
                    bytes: load.bytes(),
                    files: load.files(),
                    seconds,
                    durable_s,
                    load_1min: load_1min()?,
                });
            }
            work.clear(&load)?;
            servers.clear(door)?;
        }
    }
    Ok(())
}

fn save(out: &std::path::Path, results: &Results) -> Result<()> {
    std::fs::create_dir_all(out)?;
    std::fs::write(out.join("results.json"), serde_json::to_vec_pretty(results)?)?;
    std::fs::write(out.join("report.html"), report::html(results))
        .with_context(|| format!("can't write to {}", out.display()))
}

/// Runs a program to its end.
pub fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let ended = Command::new(program).args(arguments).stdin(std::process::Stdio::null()).status();
    let ended = ended.with_context(|| format!("can't run {program}"))?;
    ensure!(ended.success(), "{program} {}: {ended}", arguments.join(" "));
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the medians are what it is for")]
fn print(results: &Results) {
    println!("{:<19} {:<28} {:>10} {:>10}", "door", "work", "MiB/s", "files/s");
    for row in results.medians() {
        let (door, what) = (row.door.name(), row.what.name());
        println!("{door:<19} {what:<28} {:>10.1} {:>10.1}", row.mib_per_s, row.files_per_s);
    }
    for goal in &results.goals {
        println!("{}: {} ({:?})", goal.goal, goal.measured, goal.met);
    }
}
