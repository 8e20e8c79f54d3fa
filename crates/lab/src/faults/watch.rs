//! Checks all the time that there is only one writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use perigee_http::Client;
use perigee_model::home::{HomeState, Tenure, VolumeHome};
use perigee_model::{HostId, Problem, VmId, VolumeName};

use super::inflict::qemu_of;
use crate::up::Lab;

const EVERY: Duration = Duration::from_millis(50);
/// The vCPUs of a QEMU that waits for its VM have run for less than this: 100 ms.
const IDLE_TICKS: u64 = 10;

/// A task that checks until it is stopped.
pub struct Watch {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<Option<String>>,
}

impl Watch {
    fn start<W>(work: impl FnOnce(Arc<AtomicBool>) -> W) -> Self
    where
        W: Future<Output = Option<String>> + Send + 'static,
    {
        let stop = Arc::<AtomicBool>::default();
        let task = tokio::spawn(work(Arc::clone(&stop)));
        Self { stop, task }
    }

    /// Stops the task. Returns what it has seen wrong.
    pub async fn end(self) -> Result<Option<String>, Problem> {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.map_err(|error| Problem::internal("can't watch the writers", error))
    }

    /// Two volume servers never are a volume's home at the same time. Both say it one after the other if the volume
    /// moves in between, so the first is asked again.
    pub fn homes(servers: [(HostId, Client); 2], volume: VolumeName) -> Self {
        Self::start(async move |stop| {
            while !stop.load(Ordering::Relaxed) {
                let [(one, first), (other, second)] = &servers;
                let path = format!("/v1/volumes/{volume}/home");
                let before = tenure(first, &path).await;
                if before.is_some()
                    && tenure(second, &path).await.is_some()
                    && tenure(first, &path).await == before
                {
                    return Some(format!("{one} and {other} were homes of {volume} at once"));
                }
                tokio::time::sleep(EVERY).await;
            }
            None
        })
    }

    /// When a VM has run at the new host, it never runs at the old host again: the kernel counts the time of both
    /// vCPUs.
    pub fn vcpus(lab: &Lab, vm: &VmId, from: &HostId, to: &HostId) -> Self {
        let (lab, vm, from, to) = (lab.clone(), vm.clone(), from.clone(), to.clone());
        Self::start(async move |stop| {
            let (mut has_run, mut old_then) = (false, None);
            while !stop.load(Ordering::Relaxed) {
                let old = vcpu_ticks(&lab, &from, &vm);
                if has_run && let Some(now) = old {
                    // `old_then`: the first value that was read after the new one had run.
                    if now > *old_then.get_or_insert(now) + IDLE_TICKS {
                        return Some(format!("VM {vm} ran at {from} and at {to} at once"));
                    }
                }
                has_run |= vcpu_ticks(&lab, &to, &vm).is_some_and(|ticks| ticks > IDLE_TICKS);
                tokio::time::sleep(EVERY).await;
            }
            None
        })
    }
}

/// The tenure of a server that says that it is the home.
async fn tenure(server: &Client, path: &str) -> Option<Tenure> {
    match server.get::<VolumeHome>(path).await.ok()?.home {
        HomeState::Here { tenure, .. } => Some(tenure),
        HomeState::Departed { .. } | HomeState::NotHere { .. } => None,
    }
}

/// The CPU time of a VM's vCPUs at a host, in clock ticks.
fn vcpu_ticks(lab: &Lab, host: &HostId, vm: &VmId) -> Option<u64> {
    let pid = qemu_of(lab, host, vm)?.pid;
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let ticks = threads.flatten().filter_map(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).ok()?;
        let (name, fields) = stat.split_once('(')?.1.rsplit_once(')')?;
        let is_vcpu = name.starts_with("CPU ");
        let fields: Vec<u64> =
            fields.split_whitespace().skip(11).take(2).filter_map(|f| f.parse().ok()).collect();
        is_vcpu.then(|| fields.iter().sum::<u64>())
    });
    Some(ticks.sum())
}
