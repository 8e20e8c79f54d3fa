//! One long question to each host's agent: what changed? The answers stand in the registry of hosts
//! and wake the drivers of the jobs concerned, so that no VM is asked for by itself.
//!
//! A host's VMs are all asked for again once in the time between two figures, in one question. A
//! driver that hears nothing asks its host itself, seldom.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::vm::VmChanges;
use perigee_model::{HostId, ProblemKind};
use tokio::task::JoinSet;

use crate::cluster::{Cluster, HostLink};

/// The longest question where no VM is; shorter than the client's deadline.
const QUIET_WAIT: Duration = Duration::from_secs(10);

/// Between two answers, so that a guest that says much is not asked for each line.
const GAP: Duration = Duration::from_millis(50);

/// Watches every host there is, also those that come later.
pub async fn run(cluster: Arc<Cluster>) {
    let mut watched: BTreeSet<HostId> = BTreeSet::new();
    let mut watchers: JoinSet<HostId> = JoinSet::new();
    loop {
        for host in cluster.hosts.all() {
            if watched.insert(host.id.clone()) {
                let cluster = Arc::clone(&cluster);
                watchers.spawn(async move {
                    watch(&cluster, &host.id).await;
                    host.id.clone()
                });
            }
        }
        tokio::select! {
            () = tokio::time::sleep(cluster.timing.monitor) => {}
            Some(ended) = watchers.join_next() => match ended {
                Ok(host) => drop(watched.remove(&host)),
                // Which one it was is not known: all end, and are watched again.
                Err(error) => {
                    tracing::error!("watch a host: {error}");
                    watchers.shutdown().await;
                    watched.clear();
                }
            },
        }
    }
}

/// Until the host is removed or has another address.
async fn watch(cluster: &Cluster, id: &HostId) {
    let Ok(link) = cluster.hosts.get(id) else { return };
    let mut known = Asked::default();
    while cluster.hosts.get(id).is_ok_and(|now| now.addresses == link.addresses) {
        let pause = match known.ask(cluster, &link).await {
            Ok(()) => GAP.min(cluster.timing.poll),
            Err(ProblemKind::NotFound) => cluster.timing.host_deadline,
            Err(_) => cluster.timing.monitor,
        };
        tokio::time::sleep(pause).await;
    }
}

#[derive(Default)]
struct Asked {
    revision: u64,
    /// When all VMs were last told.
    all_at: Option<Instant>,
    had_vms: bool,
}

impl Asked {
    async fn ask(&mut self, cluster: &Cluster, link: &HostLink) -> Result<(), ProblemKind> {
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
            tracing::debug!("watch host {}: {problem}", link.id);
            self.all_at = None;
            problem.kind
        })?;
        // An agent that was started again has higher numbers; one that counts anew tells all.
        self.revision = changes.revision;
        self.had_vms = !changes.present.is_empty();
        if all {
            self.all_at = Some(begun);
        }
        let gone = cluster.hosts.take_changes(&link.id, &changes, all);
        for vm in changes.changed.iter().map(|report| &report.spec.vm).chain(&gone) {
            cluster.wakes.wake(vm);
        }
        Ok(())
    }
}
