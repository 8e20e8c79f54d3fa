//! What is used over time: by the VMs, as their guests say, and by the two targets, with what the links between sites carry.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use perigee_lab::usage::Usage;
use perigee_lab::{Lab, wan};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::bench::is_wan;
use crate::target_memory::Gauge;

const EVERY: Duration = Duration::from_secs(1);

/// A guest's own figures. Shares are means since the point before.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GuestPoint {
    /// Since its program began.
    pub at_s: f64,
    /// The share of the time in which its CPU worked.
    pub busy: f64,
    /// The share in which it waited for a disk.
    pub waits: f64,
    /// The share of its memory that is in use, with its disk cache.
    pub used: f64,
    /// The share of its memory that is disk cache.
    pub cached: f64,
}

/// The figures of the two targets: what they used since the point before, and have. The first is at the VMs' site, the second at the other one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ServerPoint {
    /// Since the program began.
    pub at_s: f64,
    /// CPUs.
    pub cpus: [f64; 2],
    /// The share of a target's memory that is in use, with its disk cache; `None`: not known.
    pub memory: [Option<f64>; 2],
    /// Bytes per second over the WAN, both directions.
    pub wan_bytes_per_s: f64,
}

/// One VM's figures of a program, and how long that took there.
///
/// # Errors
/// If the text is not what `works.py` writes.
pub fn of_guest(text: &str) -> Result<(f64, Vec<GuestPoint>)> {
    let mut samples = Vec::new();
    for line in text.lines() {
        let numbers: Result<Vec<f64>, _> = line.split(' ').map(str::parse).collect();
        let numbers: [f64; 7] = numbers
            .ok()
            .and_then(|n| n.try_into().ok())
            .with_context(|| format!("a sample: {line:?}"))?;
        samples.push(numbers);
    }
    let (first, last) = (samples.first(), samples.last());
    let (first, last) = first.zip(last).context("no samples")?;
    let points = samples.windows(2).filter_map(|pair| {
        let [before, now] = pair else { return None };
        let [busy, waits, idle] = [1, 2, 3].map(|index| (now[index] - before[index]).max(0.0));
        let ticks = busy + waits + idle;
        (ticks > 0.0 && now[4] > 0.0).then(|| GuestPoint {
            at_s: now[0] - first[0],
            busy: busy / ticks,
            waits: waits / ticks,
            used: (now[4] - now[5]) / now[4],
            cached: now[6] / now[4],
        })
    });
    Ok((last[0] - first[0], points.collect()))
}

/// The processes of a target.
#[derive(Debug, Clone)]
pub struct Target {
    pub pids: Vec<u32>,
    pub memory: Option<Gauge>,
}

/// Looks at the targets until it is stopped.
pub struct Sampler {
    label: Arc<Mutex<String>>,
    ends: Ends,
    task: JoinHandle<Vec<(String, ServerPoint)>>,
}

/// The sampler ends when this is dropped: otherwise a run that failed would wait for it for ever.
struct Ends(Arc<AtomicBool>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Sampler {
    pub fn start(lab: &Lab, targets: [Target; 2]) -> Self {
        let label: Arc<Mutex<String>> = Arc::default();
        let ends = Arc::new(AtomicBool::new(false));
        let lab = lab.clone();
        let (of, is_over) = (Arc::clone(&label), Arc::clone(&ends));
        let task = tokio::task::spawn_blocking(move || {
            let (began, mut points) = (Instant::now(), Vec::new());
            let (mut before, mut before_s) = (Counted::of(&lab, &targets), 0.0);
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(EVERY);
                let (now, at_s) = (Counted::of(&lab, &targets), began.elapsed().as_secs_f64());
                let over = at_s - before_s;
                let cpus = [0, 1].map(|it| ((now.cpu_s[it] - before.cpu_s[it]) / over).max(0.0));
                let memory = targets.each_ref().map(|it| it.memory.as_ref()?.share());
                let wan_bytes_per_s = now.wan_bytes.saturating_sub(before.wan_bytes) as f64 / over;
                let label = of.lock().unwrap_or_else(PoisonError::into_inner).clone();
                points.push((label, ServerPoint { at_s, cpus, memory, wan_bytes_per_s }));
                (before, before_s) = (now, at_s);
            }
            points
        });
        Self { label, ends: Ends(ends), task }
    }

    /// What runs from now on.
    pub fn name(&self, label: &str) {
        label.clone_into(&mut self.label.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// All points, with what ran.
    pub async fn stop(self) -> Result<Vec<(String, ServerPoint)>> {
        drop(self.ends);
        self.task.await.context("the sampler")
    }
}

/// What was counted so far.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    cpu_s: [f64; 2],
    wan_bytes: u64,
}

impl Counted {
    fn of(lab: &Lab, targets: &[Target; 2]) -> Self {
        let used = |pid: &u32| Usage::of(*pid).map_or(0.0, |usage| usage.cpu_s);
        let cpu_s = targets.each_ref().map(|target| target.pids.iter().map(used).sum());
        let links = wan::counts(lab).unwrap_or_default();
        let wan = links.iter().filter(|link| is_wan(&link.link.sites));
        let wan_bytes = wan.flat_map(|link| &link.counts).map(|c| c.carried_bytes).sum();
        Self { cpu_s, wan_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_s_figures_are_shares_of_its_time_and_memory() {
        let text = "10.0 100 10 90 1000 500 300\n12.0 200 20 180 1000 250 400\n12.5 250 20 180 1000 100 500\n";
        let (seconds, points) = of_guest(text).expect("figures");
        assert_eq!((seconds, points.len()), (2.5, 2));
        let first = GuestPoint { at_s: 2.0, busy: 0.5, waits: 0.05, used: 0.75, cached: 0.4 };
        assert_eq!(points[0], first);
        assert_eq!((points[1].busy, points[1].used), (1.0, 0.9));
        of_guest("10.0 1").expect_err("too few numbers");
        of_guest("").expect_err("no line");
    }
}
