//! What is to be taken down, kept until it is down: a host that is away is asked again later.
//!
//! The order matters: a volume goes only when every VM that may have it open is gone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::job::HostState;
use perigee_model::{HostId, JobId, OwnerName, Problem, ProblemKind, VmId, VolumeName};
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::records::{PlacedDisk, vm_of};

/// While the cleaner is at work on the same cleanup, a job waits for it so often.
const OTHER_TRIES_MAX: u32 = 600;
const OTHER_TRY: Duration = Duration::from_millis(50);

/// An intent: each part is removed from the record when it is done.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cleanup {
    pub job: JobId,
    pub name: String,
    pub vms: Vec<(HostId, VmId)>,
    pub attachments: Vec<(HostId, VolumeName)>,
    pub volumes: Vec<(HostId, VolumeName)>,
    /// What the volumes carry: others of their names are left alone.
    #[serde(default)]
    pub owner: Option<OwnerName>,
}

impl Cleanup {
    pub fn new(job: &JobId, name: &str) -> Self {
        Self {
            job: job.clone(),
            name: name.to_owned(),
            vms: Vec::new(),
            attachments: Vec::new(),
            volumes: Vec::new(),
            owner: None,
        }
    }

    /// The VM and its attachments at one host.
    pub fn of_host(job: &JobId, name: &str, host: &HostId, disks: &[PlacedDisk]) -> Self {
        let mut cleanup = Self::new(job, name);
        cleanup.add_host(host, disks);
        cleanup
    }

    pub fn add_host(&mut self, host: &HostId, disks: &[PlacedDisk]) {
        self.vms.push((host.clone(), vm_of(&self.job)));
        let attached = disks.iter().filter(|disk| disk.home != *host);
        self.attachments.extend(attached.map(|disk| (host.clone(), disk.volume.clone())));
    }

    fn key(&self) -> String {
        format!("{}{}", prefix(&self.job), self.name)
    }

    fn is_done(&self) -> bool {
        self.vms.is_empty() && self.attachments.is_empty() && self.volumes.is_empty()
    }
}

pub fn prefix(job: &JobId) -> String {
    format!("cleanups/{job}/")
}

/// Records what is to be taken down; the same again changes nothing.
pub async fn hand_over(cluster: &Cluster, cleanup: &Cleanup) -> Result<(), Problem> {
    cluster.records.create(&cleanup.key(), cleanup).await?;
    cluster.clean_now.notify_one();
    Ok(())
}

/// Whether something of the VM is still to be taken down at a host.
pub async fn is_pending(cluster: &Cluster, job: &JobId, host: &HostId) -> Result<bool, Problem> {
    let pending: Vec<Cleanup> = cluster.records.list(&prefix(job)).await?;
    Ok(pending.iter().any(|cleanup| {
        cleanup.vms.iter().any(|(at, _)| at == host)
            || cleanup.attachments.iter().any(|(at, _)| at == host)
    }))
}

pub async fn run(cluster: Arc<Cluster>) {
    loop {
        if let Err(problem) = clean(&cluster, "cleanups/").await {
            tracing::warn!("clean up: {problem}");
        }
        tokio::select! {
            () = tokio::time::sleep(cluster.timing.monitor) => {}
            () = cluster.clean_now.notified() => {}
        }
    }
}

/// One try at everything a job left; what does not answer stays for later.
pub async fn try_now(cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
    let mut waits = 0;
    while !clean(cluster, &prefix(job)).await? && waits < OTHER_TRIES_MAX {
        waits += 1;
        tokio::time::sleep(OTHER_TRY).await;
    }
    Ok(())
}

/// Whether nobody else was at work on a part of it.
async fn clean(cluster: &Cluster, prefix: &str) -> Result<bool, Problem> {
    let mut sweep = Sweep { cluster, silent: BTreeSet::new() };
    let mut mine = true;
    for key in cluster.records.keys(prefix).await? {
        let Some(_cleaning) = cluster.index.begin_cleanup(&key) else {
            mine = false;
            continue;
        };
        let Some(mut cleanup) = cluster.records.read::<Cleanup>(&key).await? else { continue };
        sweep.clean(&mut cleanup).await?;
        if cleanup.is_done() {
            cluster.records.remove(&key).await?;
        } else {
            cluster.records.put(&key, &cleanup).await?;
        }
    }
    Ok(mine)
}

/// One pass; a host that does not answer is asked once in it.
struct Sweep<'a> {
    cluster: &'a Cluster,
    silent: BTreeSet<HostId>,
}

impl Sweep<'_> {
    async fn clean(&mut self, cleanup: &mut Cleanup) -> Result<(), Problem> {
        let mut left = Vec::new();
        for (host, vm) in std::mem::take(&mut cleanup.vms) {
            if !self.delete(&host, Part::Vm, &format!("/v1/vms/{vm}")).await {
                left.push((host, vm));
            }
        }
        cleanup.vms = left;
        let mut left = Vec::new();
        for (host, volume) in std::mem::take(&mut cleanup.attachments) {
            let vm_there = cleanup.vms.iter().any(|(at, _)| *at == host);
            if vm_there || !self.detach(&host, &volume).await {
                left.push((host, volume));
            }
        }
        cleanup.attachments = left;
        if !cleanup.vms.is_empty() {
            return Ok(());
        }
        let mut left = Vec::new();
        let owner = cleanup.owner.as_ref().map_or_else(String::new, |o| format!("?owner={o}"));
        for (host, volume) in std::mem::take(&mut cleanup.volumes) {
            if !self.delete(&host, Part::Volume, &format!("/v1/volumes/{volume}{owner}")).await {
                left.push((host, volume));
            }
        }
        cleanup.volumes = left;
        Ok(())
    }

    /// Removes an attachment unless another VM there needs it.
    async fn detach(&mut self, host: &HostId, volume: &VolumeName) -> bool {
        let cluster = self.cluster;
        let Some(_detaching) = cluster.index.begin_detachment(host, volume) else { return true };
        self.delete(host, Part::Volume, &format!("/v1/attachments/{volume}")).await
    }

    /// Whether the thing is gone. A host that was removed from the cluster took it along.
    async fn delete(&mut self, host: &HostId, part: Part, path: &str) -> bool {
        let Ok(link) = self.cluster.hosts.get(host) else { return true };
        let is_up = self.cluster.hosts.state(host) == HostState::Up;
        if !is_up || self.silent.contains(host) {
            return false;
        }
        let client = match part {
            Part::Vm => &link.agent,
            Part::Volume => &link.volume,
        };
        match client.delete(path).await {
            Ok(()) => true,
            Err(problem) if problem.kind == ProblemKind::NotFound => true,
            Err(problem) => {
                tracing::debug!("delete {path} at {host}: {problem}");
                if problem.kind == ProblemKind::Unavailable {
                    self.silent.insert(host.clone());
                }
                false
            }
        }
    }
}

/// Which of a host's daemons has it.
#[derive(Debug, Clone, Copy)]
enum Part {
    Vm,
    Volume,
}
