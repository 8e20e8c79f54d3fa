//! What is used over time: by the VMs, as their guests say, and by the volume servers of both hosts, with what the WAN carries.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use perigee_lab::usage::Usage;
use perigee_lab::{Lab, wan};
use perigee_model::HostId;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

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

/// The figures of the volume servers: what they used since the point before, and have.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ServerPoint {
    /// Since the program began.
    pub at_s: f64,
    /// CPUs, at the VMs' host and at the data's host.
    pub cpus: [f64; 2],
    /// Memory of the processes, without the page cache.
    pub resident_bytes: [u64; 2],
    /// Bytes per second over the WAN, both directions.
    pub wan_bytes_per_s: f64,
}

/// One VM's figures of a program, and how long that took there.
///
/// # Errors
/// If the text is not what `rank.sh` writes.
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

/// Looks at the volume servers until it is stopped.
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
    /// `hosts`: the VMs' and the data's.
    pub fn start(lab: &Lab, hosts: &[HostId; 2]) -> Self {
        let label: Arc<Mutex<String>> = Arc::default();
        let ends = Arc::new(AtomicBool::new(false));
        let (lab, hosts) = (lab.clone(), hosts.clone());
        let (of, is_over) = (Arc::clone(&label), Arc::clone(&ends));
        let task = tokio::task::spawn_blocking(move || {
            let (began, mut points) = (Instant::now(), Vec::new());
            let (mut before, mut before_s) = (Counted::of(&lab, &hosts), 0.0);
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(EVERY);
                let (now, at_s) = (Counted::of(&lab, &hosts), began.elapsed().as_secs_f64());
                let over = at_s - before_s;
                let point = ServerPoint {
                    at_s,
                    cpus: [0, 1]
                        .map(|host| ((now.cpu_s[host] - before.cpu_s[host]) / over).max(0.0)),
                    resident_bytes: now.resident_bytes,
                    wan_bytes_per_s: now.wan_bytes.saturating_sub(before.wan_bytes) as f64 / over,
                };
                let label = of.lock().unwrap_or_else(PoisonError::into_inner).clone();
                points.push((label, point));
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
    resident_bytes: [u64; 2],
    wan_bytes: u64,
}

impl Counted {
    fn of(lab: &Lab, hosts: &[HostId; 2]) -> Self {
        let mut counted = Self::default();
        for (index, host) in hosts.iter().enumerate() {
            let pid = lab.host_pid(host, "volume").ok().and_then(|pid| u32::try_from(pid).ok());
            let Some(pid) = pid else { continue };
            counted.cpu_s[index] = Usage::of(pid).map_or(0.0, |usage| usage.cpu_s);
            counted.resident_bytes[index] = resident_bytes(pid);
        }
        let links = wan::counts(lab).unwrap_or_default();
        counted.wan_bytes =
            links.iter().flat_map(|link| &link.counts).map(|c| c.carried_bytes).sum();
        counted
    }
}

fn resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    let kib = line.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
    kib.unwrap_or_default() << 10
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
