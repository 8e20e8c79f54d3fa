//! Runs one workload on one server: starts it, measures, stops it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::unistd::{Whence, lseek};
use perigee_lab::interrupt;

use crate::load::offsets::Pattern;
use crate::load::{self, Load, Measured};
use crate::process::{Usage, cpu_s, usage};
use crate::results::Measurement;
use crate::servers::{Fixtures, Server, Started};
use crate::workloads::{Order, Workload};

const WARM_UP: Duration = Duration::from_millis(200);

pub fn measure(
    fixtures: &Fixtures,
    workload: &Workload,
    server: Server,
    round: u32,
    duration: Duration,
) -> Result<Measurement> {
    let started =
        fixtures.start(server, workload.disk, workload.transport, workload.pin.server())?;
    if workload.cold {
        evict(&started.files(fixtures))?;
    } else {
        warm(&started.files(fixtures))?;
    }
    let mut load = load_of(fixtures, workload, &started, duration);
    load.seed = u64::from(round) + 1;
    if workload.order == Order::Once {
        load.warm_up = Duration::ZERO;
    }
    let (measured, before, after) = observe(&load, started.id())?;
    started.stop(fixtures)?;
    let mut measurement = record(workload.name, server, &load, &measured, (before, after));
    measurement.transport = workload.transport.word().into();
    measurement.round = round;
    Ok(measurement)
}

/// Runs a load, and returns the server's usage at its start and end.
pub fn observe(load: &Load, pid: u32) -> Result<(Measured, Usage, Usage)> {
    interrupt::check()?;
    let mut before = usage(pid)?;
    let mut ended_cpu_s = Ok(0.0);
    let began_cpu_s = &mut before.cpu_s;
    let measured =
        load::run(load, || *began_cpu_s = cpu_s(pid).unwrap_or(0.0), || ended_cpu_s = cpu_s(pid))
            .context("the load failed")?;
    let after = Usage { cpu_s: ended_cpu_s?, ..usage(pid)? };
    Ok((measured, before, after))
}

/// The load of a workload for a started server.
pub fn load_of(
    fixtures: &Fixtures,
    workload: &Workload,
    started: &Started,
    duration: Duration,
) -> Load {
    let units = fixtures.image_bytes / u64::from(workload.request_bytes);
    Load {
        address: started.address.clone(),
        exports: vec![started.export.clone()],
        structured: workload.structured,
        kind: workload.kind,
        request_bytes: workload.request_bytes,
        pattern: match workload.order {
            Order::Random => Pattern::Random { units },
            Order::Sequential => Pattern::Sequential { units },
            Order::Once => Pattern::Once(Arc::new(Pattern::shuffled(units, 11))),
        },
        connections: workload.connections,
        depth: workload.depth,
        threads: 1,
        warm_up: WARM_UP,
        duration,
        flush: workload.flush,
        cpu: workload.pin.generator(),
        seed: 1,
    }
}

/// Converts the figures of a run to the form of `results.json`.
#[expect(clippy::cast_precision_loss, reason = "requests and bytes of a few seconds")]
pub fn record(
    workload: &str,
    server: Server,
    load: &Load,
    measured: &Measured,
    (before, after): (Usage, Usage),
) -> Measurement {
    let (iops, requests) = (measured.iops(), measured.requests as f64);
    let read_bytes = after.device_read_bytes.saturating_sub(before.device_read_bytes);
    let with_flush_s = measured.seconds + measured.flush_seconds;
    Measurement {
        workload: workload.into(),
        server: server.name(),
        generator: "own".into(),
        iops: iops.round(),
        mib_per_s: tenths(iops * f64::from(load.request_bytes) / f64::from(1 << 20)),
        p50_us: tenths(measured.latencies.percentile_us(50)),
        p99_us: tenths(measured.latencies.percentile_us(99)),
        server_cpu_s_per_million: hundredths(
            (after.cpu_s - before.cpu_s) * 1e6 / requests.max(1.0),
        ),
        server_rss_mib: tenths(after.rss_mib),
        server_private_mib: tenths(after.private_mib),
        iops_with_flush: load.flush.then(|| (requests / with_flush_s.max(1e-9)).round()),
        device_read_mib: Some(tenths(read_bytes as f64 / f64::from(1 << 20))),
        ..Measurement::default()
    }
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Writes back the dirty pages of these files and drops the files from the page cache.
pub fn evict(files: &[PathBuf]) -> Result<()> {
    for path in files {
        // The file may have been removed since it was listed.
        let Ok(file) = File::open(path) else { continue };
        file.sync_data()?;
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    }
    Ok(())
}

/// Reads the data of these files into the page cache. Some machines reclaim pages that were not read for a
/// minute (DAMON's `pageout`), and then the server whose files are read least often would be measured with a
/// partly cold cache. Holes are skipped, because reading them would fill the cache with zeros.
pub fn warm(files: &[PathBuf]) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    for path in files {
        // The file may have been removed since it was listed.
        let Ok(file) = File::open(path) else { continue };
        let mut at = 0;
        while let Ok(data) = lseek(&file, at, Whence::SeekData) {
            let hole = lseek(&file, data, Whence::SeekHole)?;
            at = data;
            while at < hole {
                let length = buffer.len().min(usize::try_from(hole - at)?);
                file.read_exact_at(&mut buffer[..length], u64::try_from(at)?)?;
                at += i64::try_from(length)?;
            }
        }
    }
    Ok(())
}

/// Reads the data of all files below a directory into the page cache.
pub fn warm_all(dir: &Path) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            warm_all(&path)?;
        } else if path.is_file() {
            warm(&[path])?;
        }
    }
    Ok(())
}
