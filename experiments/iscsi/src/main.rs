//! Drives an iSCSI target with a full queue of reads or writes on one session, and prints the number of answers
//! and the CPU time of the target and of this generator.
//!
//! `iscsi-perf` and QEMU's driver need more CPU time for a request than a fast target does. With one core each
//! they would be the bottleneck.

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use perigee_iscsi_load::session::{Order, Session};
use perigee_iscsi_load::wire::Kind;

/// The time before counting begins.
const WARM_UP: Duration = Duration::from_millis(500);
/// A clock tick is 1/100 s on every current Linux.
const TICKS_PER_S: f64 = 100.0;

#[derive(Clone, Copy, ValueEnum)]
enum Workload {
    RandomRead,
    RandomWrite,
    Read,
    Write,
}

#[derive(Parser)]
struct Options {
    portal: SocketAddr,
    target: String,
    lun: u8,
    workload: Workload,
    /// The process id of the target, whose CPU time is measured
    #[arg(long)]
    pid: u32,
    #[arg(long, default_value_t = 4096)]
    request_bytes: u32,
    /// Requests in flight
    #[arg(long, default_value_t = 32)]
    depth: u32,
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let (kind, order) = match options.workload {
        Workload::RandomRead => (Kind::Read, Order::random(options.seed)),
        Workload::RandomWrite => (Kind::Write, Order::random(options.seed)),
        Workload::Read => (Kind::Read, Order::sequential()),
        Workload::Write => (Kind::Write, Order::sequential()),
    };
    let mut session = Session::open(options.portal, &options.target, options.lun)?;
    session.begin(kind, options.request_bytes, options.depth, order)?;
    go_on(&mut session, WARM_UP)?;
    let before = (cpu_s(options.pid)?, cpu_s(std::process::id())?, session.answered());
    let began = Instant::now();
    go_on(&mut session, Duration::from_secs_f64(options.seconds))?;
    let seconds = began.elapsed().as_secs_f64();
    let (target_s, own_s) = (cpu_s(options.pid)? - before.0, cpu_s(std::process::id())? - before.1);
    let requests = session.answered() - before.2;
    ensure!(requests > 0, "the target answered nothing in {seconds} s");
    #[expect(clippy::cast_precision_loss, reason = "requests of a few seconds")]
    let requests = requests as f64;
    let line = serde_json::json!({
        "iops": (requests / seconds).round(),
        "server_cpu_us": two_digits(target_s / requests * 1e6),
        "server_cores": two_digits(target_s / seconds),
        "generator_cores": two_digits(own_s / seconds),
    });
    session.end()?;
    #[expect(clippy::print_stdout, reason = "the result is what it is for")]
    {
        println!("{line}");
    }
    Ok(())
}

fn two_digits(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn go_on(session: &mut Session, how_long: Duration) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < how_long {
        session.turn()?;
    }
    Ok(())
}

/// CPU seconds of a process with all of its threads.
fn cpu_s(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).context("the target's process")?;
    // The program's name is in parentheses and may contain anything.
    let (_, fields) = stat.rsplit_once(')').context("the kernel's figures")?;
    let fields: Vec<f64> =
        fields.split_whitespace().map(|field| field.parse().unwrap_or(0.0)).collect();
    let ticks = fields.get(11..13).context("the kernel's figures")?;
    Ok(ticks.iter().sum::<f64>() / TICKS_PER_S)
}
