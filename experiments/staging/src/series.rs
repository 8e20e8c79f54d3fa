//! The CPU time of both hosts and the traffic between them, over time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use perigee_lab::bare::Machine;
use perigee_lab::usage::Usage;
use perigee_lab::{Lab, wan};
use perigee_model::{HostId, VmId};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

pub const EVERY: Duration = Duration::from_secs(1);

/// Means over the time since the point before.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Point {
    pub at_s: f64,
    /// CPUs that the VM's QEMU used at each host.
    pub vm_cpus: [f64; 2],
    /// CPUs that the volume server used at each host: what Domain-0 is in the paper.
    pub server_cpus: [f64; 2],
    /// Bytes per second between the hosts, both directions.
    pub bytes_per_s: f64,
}

/// Means over a part of a migrated VM's run.
#[derive(Debug, Clone, Copy)]
pub struct Phase {
    /// At the host that the VM leaves, and at the other one.
    pub vm_cpus: [f64; 2],
    /// Of the volume servers of both hosts.
    pub server_cpus: f64,
    pub bytes_per_s: f64,
}

impl Phase {
    /// `None` without points.
    pub fn of<'a>(points: impl Iterator<Item = &'a Point>, from: usize) -> Option<Self> {
        let points: Vec<&Point> = points.collect();
        let count = f64::from(u32::try_from(points.len()).ok()?);
        let mean = |value: &dyn Fn(&Point) -> f64| {
            points.iter().map(|point| value(point)).sum::<f64>() / count
        };
        (!points.is_empty()).then(|| Self {
            vm_cpus: [from, 1 - from].map(|host| mean(&|point| point.vm_cpus[host])),
            server_cpus: mean(&|point| point.server_cpus.iter().sum()),
            bytes_per_s: mean(&|point| point.bytes_per_s),
        })
    }
}

/// What was counted since the beginning.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    vm_s: [f64; 2],
    server_s: [f64; 2],
    bytes: u64,
}

pub struct Sampler {
    began: Instant,
    ends: Ends,
    task: JoinHandle<Vec<Point>>,
}

/// The sampler ends when this is dropped: otherwise a run that failed would wait for it for ever.
struct Ends(Arc<AtomicBool>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Sampler {
    pub fn start(lab: &Lab, hosts: &[HostId; 2], vm: &VmId) -> Result<Self> {
        let began = Instant::now();
        let ends = Arc::new(AtomicBool::new(false));
        let mut counter = Counter {
            lab: lab.clone(),
            hosts: hosts.clone(),
            vm: vm.clone(),
            ended_s: [0.0; 2],
            last: [None; 2],
        };
        let is_over = Arc::clone(&ends);
        let task = tokio::task::spawn_blocking(move || {
            let (mut before, mut before_s) = (counter.count(), 0.0);
            let mut points = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(EVERY);
                let (now, at_s) = (counter.count(), began.elapsed().as_secs_f64());
                let over = at_s - before_s;
                let rate = |new: f64, old: f64| ((new - old) / over).max(0.0);
                points.push(Point {
                    at_s,
                    vm_cpus: [0, 1].map(|host| rate(now.vm_s[host], before.vm_s[host])),
                    server_cpus: [0, 1].map(|host| rate(now.server_s[host], before.server_s[host])),
                    bytes_per_s: now.bytes.saturating_sub(before.bytes) as f64 / over,
                });
                (before, before_s) = (now, at_s);
            }
            points
        });
        Ok(Self { began, ends: Ends(ends), task })
    }

    pub fn elapsed_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    pub async fn stop(self) -> Result<Vec<Point>> {
        drop(self.ends);
        self.task.await.context("the sampler")
    }
}

struct Counter {
    lab: Lab,
    hosts: [HostId; 2],
    vm: VmId,
    /// Of QEMUs that have ended.
    ended_s: [f64; 2],
    /// The QEMU that was seen last at each host, and its CPU time.
    last: [Option<(u32, f64)>; 2],
}

impl Counter {
    fn count(&mut self) -> Counted {
        let mut counted = Counted::default();
        for (index, host) in self.hosts.iter().enumerate() {
            let pid = match self.last[index] {
                Some((pid, _)) if Usage::of(pid).is_ok() => Some(pid),
                _ => {
                    self.ended_s[index] += self.last[index].take().map_or(0.0, |(_, cpu_s)| cpu_s);
                    Machine::of(&self.lab, host, &self.vm).ok().map(|(_, pid)| pid)
                }
            };
            if let Some((pid, usage)) = pid.and_then(|pid| Some((pid, Usage::of(pid).ok()?))) {
                self.last[index] = Some((pid, usage.cpu_s));
            }
            let running_s = self.last[index].map_or(0.0, |(_, cpu_s)| cpu_s);
            counted.vm_s[index] = self.ended_s[index] + running_s;
            let server =
                self.lab.host_pid(host, "volume").ok().and_then(|pid| u32::try_from(pid).ok());
            let server = server.and_then(|pid| Usage::of(pid).ok());
            counted.server_s[index] = server.map_or(0.0, |usage| usage.cpu_s);
        }
        let links = wan::counts(&self.lab).unwrap_or_default();
        counted.bytes = links.iter().flat_map(|link| &link.counts).map(|c| c.carried_bytes).sum();
        counted
    }
}
