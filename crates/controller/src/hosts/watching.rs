//! Watches the VMs of each host with one long request to its agent, which answers when something has changed.
//! The answers go to the registry of hosts and wake the drivers of the jobs concerned, so no VM is polled by
//! itself.
//!
//! All VMs of a host are also requested once in each interval between two figures, in one request. A driver
//! that hears nothing asks its host itself, at long intervals.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::vm::{VmChanges, VmReport};
use perigee_model::{HostId, Problem, VmId};
use tokio::task::JoinSet;

use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, HostLink};
use crate::networks;

/// The longest request if the host has no VM. It is shorter than the client's deadline.
const QUIET_WAIT: Duration = Duration::from_secs(10);

/// The pause between two answers, so that a guest that sends many lines does not cause one request for each.
const GAP: Duration = Duration::from_millis(50);

/// Watches all hosts, including those that register later.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut watched: BTreeSet<HostId> = BTreeSet::new();
    let mut watchers: JoinSet<HostId> = JoinSet::new();
    loop {
        let look = async {
            for host in cluster.hosts.all() {
                if watched.insert(host.id.clone()) {
                    let cluster = Arc::clone(&cluster);
                    watchers.spawn(async move {
                        watch(&cluster, &host.id).await;
                        host.id.clone()
                    });
                }
            }
            Ok(format!("watches {} hosts", watched.len()))
        };
        task.round(look).await;
        tokio::select! {
            () = tokio::time::sleep(cluster.timing.monitor) => {}
            Some(ended) = watchers.join_next() => match ended {
                Ok(host) => drop(watched.remove(&host)),
                // It is not known which task it was, so all are stopped and started again.
                Err(error) => {
                    tracing::error!("a task that watched a host failed: {error}");
                    watchers.shutdown().await;
                    watched.clear();
                }
            },
        }
    }
}

/// Watches one host until it is removed or has another address.
async fn watch(cluster: &Cluster, id: &HostId) {
    let Ok(link) = cluster.hosts.get(id) else { return };
    let mut known = Asked::default();
    while cluster.hosts.get(id).is_ok_and(|now| now.addresses == link.addresses) {
        let pause = match known.ask(cluster, &link).await {
            Ok(()) => GAP.min(cluster.timing.poll),
            Err(_) => cluster.timing.monitor,
        };
        tokio::time::sleep(pause).await;
    }
}

#[derive(Default)]
struct Asked {
    revision: u64,
    /// When all VMs were last reported.
    all_at: Option<Instant>,
    had_vms: bool,
    /// The last change of each of its VMs that was heard of.
    heard: BTreeMap<VmId, u64>,
}

impl Asked {
    async fn ask(&mut self, cluster: &Cluster, link: &HostLink) -> Result<(), Problem> {
        let figures = cluster.timing.figures;
        let since_all = self.all_at.map(|at| at.elapsed());
        let wait = match since_all {
            Some(since) if self.had_vms => figures.saturating_sub(since),
            Some(_) => QUIET_WAIT,
            None => Duration::ZERO,
        };
        let all = wait.is_zero();
        let after = if all { 0 } else { self.revision };
        let path = format!("/v1/changes?after={after}&wait_ms={}", wait.as_millis());
        let begun = Instant::now();
        let changes: VmChanges = link.agent_wait.get(&path).await.map_err(|problem| {
            tracing::debug!("can't watch host {}: {problem}", link.id);
            self.all_at = None;
            problem
        })?;
        // A restarted agent has higher numbers. If its numbers are lower, it reports all VMs.
        self.revision = changes.revision;
        self.had_vms = !changes.present.is_empty();
        if all {
            self.all_at = Some(begun);
        }
        let gone = cluster.hosts.take_changes(&link.id, &changes, all);
        if self.hear(&changes).into_iter().any(networks::concerns) {
            cluster.networks.changed();
        }
        for vm in changes.changed.iter().map(|report| &report.spec.vm).chain(&gone) {
            cluster.wakes.wake(vm);
        }
        Ok(())
    }

    /// The reports of what has changed. In those of all VMs most say nothing but higher figures.
    fn hear<'a>(&mut self, changes: &'a VmChanges) -> Vec<&'a VmReport> {
        let mut changed: Vec<&VmReport> = changes.changed.iter().collect();
        changed.retain(|report| {
            let before = self.heard.insert(report.spec.vm.clone(), report.revision);
            before != Some(report.revision)
        });
        let present: BTreeSet<&VmId> = changes.present.iter().collect();
        self.heard.retain(|vm, _| present.contains(vm));
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hosts of all networks were found out anew with each report of each of their VMs.
    #[test]
    fn what_only_has_higher_figures_is_no_change() {
        let mut asked = Asked::default();
        let report =
            |revision| VmReport { revision, ..crate::tests::report(crate::tests::vm_spec()) };
        let mut hear = |revision: u64, is_present: bool| {
            let report = report(revision);
            let present = is_present.then(|| report.spec.vm.clone()).into_iter().collect();
            asked.hear(&VmChanges { revision, present, changed: vec![report] }).len()
        };
        assert_eq!([hear(3, true), hear(3, true), hear(4, true), hear(4, false)], [1, 0, 1, 0]);
        assert_eq!(hear(4, true), 1, "it was gone in between");
    }
}
