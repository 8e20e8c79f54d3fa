//! Runs the workloads with fio's nbd engine, the standard load generator, as well.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::load::{Address, Kind};
use crate::process::{cpu_s, usage};
use crate::results::Measurement;
use crate::rounds::Plan;
use crate::servers::{Fixtures, Server, Started};
use crate::workloads::{WORKLOADS, Workload};

const SERVERS: [Server; 5] =
    [Server::Perigee, Server::QEMU, Server::NbdkitFile, Server::NbdkitCow, Server::Echo];
const NAMES: [&str; 3] = ["read-4k-qd32", "write-4k-qd32", "read-4k-64-clients"];
const ROUNDS_MAX: u32 = 1;

/// Whether fio with its nbd engine is installed. Without it the report shows our generator alone.
pub fn is_there() -> bool {
    Command::new("fio")
        .arg("--enghelp")
        .output()
        .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("nbd"))
}

pub fn run(fixtures: &Fixtures, plan: &Plan, say: impl Fn(&str)) -> Result<Vec<Measurement>> {
    let mut all = Vec::new();
    let wanted = |w: &&Workload| NAMES.contains(&w.name) && plan.wants("fio");
    for workload in WORKLOADS.iter().filter(wanted) {
        say(&format!("fio: {} over {}", workload.name, workload.transport.word()));
        for round in 0..plan.rounds.min(ROUNDS_MAX) {
            for server in SERVERS {
                if workload.kind == Kind::Read || server.takes_writes() {
                    all.push(
                        one(fixtures, workload, server, round)
                            .with_context(|| format!("fio: {} on {server:?}", workload.name))?,
                    );
                }
            }
        }
    }
    Ok(all)
}

fn one(
    fixtures: &Fixtures,
    workload: &Workload,
    server: Server,
    round: u32,
) -> Result<Measurement> {
    let started = fixtures.start(server, workload.disk, workload.transport, None)?;
    let before_s = cpu_s(started.id())?;
    let output =
        command(workload, &started, fixtures.image_bytes).output().context("can't start fio")?;
    if !output.status.success() {
        bail!("it ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    let cpu_s = cpu_s(started.id())? - before_s;
    let usage = usage(started.id())?;
    started.stop(fixtures)?;
    let text = String::from_utf8_lossy(&output.stdout);
    // There may be warnings before the JSON.
    let json = &text[text.find('{').unwrap_or(0)..];
    let report: Value = serde_json::from_str(json).context("fio's report")?;
    let mut measurement = parse(&report, workload, cpu_s).context("fio's report lacks figures")?;
    measurement.server = server.name();
    measurement.round = round;
    (measurement.server_rss_mib, measurement.server_private_mib) =
        (usage.rss_mib, usage.private_mib);
    Ok(measurement)
}

fn command(workload: &Workload, started: &Started, size_bytes: u64) -> Command {
    let uri = match &started.address {
        Address::Unix(path) => {
            format!("nbd+unix:///{}?socket={}", started.export, path.display())
        }
        Address::Tcp(address) => format!("nbd://{address}/{}", started.export),
    };
    let kind = if workload.kind == Kind::Read { "randread" } else { "randwrite" };
    let mut command = Command::new("fio");
    command
        .args(["--name=bench", "--ioengine=nbd", "--output-format=json", "--thread"])
        .args(["--time_based", "--runtime=1", "--group_reporting"])
        .arg(format!("--size={size_bytes}"))
        .arg(format!("--uri={uri}"))
        .arg(format!("--rw={kind}"))
        .arg(format!("--bs={}", workload.request_bytes))
        .arg(format!("--iodepth={}", workload.depth))
        .arg(format!("--numjobs={}", workload.connections));
    command
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of a request")]
fn parse(report: &Value, workload: &Workload, cpu_s: f64) -> Option<Measurement> {
    let half = if workload.kind == Kind::Read { "read" } else { "write" };
    let job = report.get("jobs")?.get(0)?.get(half)?;
    let percentile = |which: &str| {
        let ns = job.get("clat_ns")?.get("percentile")?.get(which)?.as_u64()?;
        Some(ns as f64 / 1000.0)
    };
    let total = job.get("total_ios")?.as_f64()?;
    let iops = job.get("iops")?.as_f64()?;
    Some(Measurement {
        workload: workload.name.into(),
        transport: workload.transport.word().into(),
        generator: "fio".into(),
        iops: iops.round(),
        mib_per_s: (iops * f64::from(workload.request_bytes) / f64::from(1 << 20)).round(),
        p50_us: percentile("50.000000").unwrap_or(0.0),
        p99_us: percentile("99.000000").unwrap_or(0.0),
        server_cpu_s_per_million: (cpu_s * 1e8 / total.max(1.0)).round() / 100.0,
        ..Measurement::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_s_report_becomes_a_measurement() {
        let report = serde_json::json!({"jobs": [{"read": {
            "iops": 1000.4, "total_ios": 2000,
            "clat_ns": {"percentile": {"50.000000": 20_000, "99.000000": 90_000}}
        }}]});
        let measured = parse(&report, &WORKLOADS[0], 0.02).expect("figures");
        assert_eq!((measured.iops, measured.p50_us, measured.p99_us), (1000.0, 20.0, 90.0));
        assert_eq!(measured.server_cpu_s_per_million, 10.0);
        assert_eq!(parse(&serde_json::json!({}), &WORKLOADS[0], 0.0), None);
    }
}
