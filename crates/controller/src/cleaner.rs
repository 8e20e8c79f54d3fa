//! The cleaner removes the VMs, attachments and volumes of jobs, and the attachments of volumes that were deleted. Each
//! cleanup is recorded until it is done: a host that does not answer is asked again later.
//!
//! The order matters: a volume is removed only after every VM that may have it open. One that has moved is
//! removed when all of it is at its new home, or its old home was removed.
//!
//! The cleaner also removes files of jobs that are gone (`sweep_job_files`).
//!
//! Cleanups at removed hosts are also recorded: if such a host comes back, its VMs are ended and its volumes
//! removed. Nothing else waits for them, and at most [`GIVEN_UP_MAX`] of them are kept.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::{HostState, Job};
use perigee_model::{HostId, JobId, OwnerName, Problem, ProblemKind, VmId, VmStart, VolumeName};
use serde::{Deserialize, Serialize};

use crate::admissions;
use crate::clock::now_ms;
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, Detachment};
use crate::console;
use crate::job_files::{self, with_files};
use crate::records::{PlacedDisk, VolumeRecord, vm_of, volume_key};

/// How many times a job waits while the cleaner works on the same cleanup.
const OTHER_TRIES_MAX: u32 = 600;
const OTHER_TRY: Duration = Duration::from_millis(50);

/// How often the cleaner looks for files of jobs that are gone.
const SWEEP_EVERY: Duration = Duration::from_secs(3600);

/// The keys of what is left of deleted volumes. No job's name is like this: each ends with a number.
const OF_DELETED: &str = "cleanups/deleted/";

/// The most cleanups that wait only for removed hosts. Beyond this the oldest are dropped.
pub const GIVEN_UP_MAX: usize = 1000;

/// An intent: each part is removed from the record when it is done.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cleanup {
    /// Whose VM and volumes they are; `None` for the attachments of a volume that was deleted.
    pub job: Option<JobId>,
    pub name: String,
    pub vms: Vec<(HostId, VmId)>,
    /// The VM's starts up to this one are ended there. A later one goes on.
    pub up_to: VmStart,
    pub attachments: Vec<(HostId, VolumeName)>,
    pub volumes: Vec<(HostId, VolumeName)>,
    /// The owner of the volumes. Volumes with the same names and another owner are left alone.
    pub owner: Option<OwnerName>,
    pub made_ms: u64,
}

impl Cleanup {
    /// The cleanup `name` of a job, with nothing in it yet. It ends the VM's starts up to `up_to`.
    pub fn new(job: &JobId, name: &str, up_to: VmStart) -> Self {
        Self {
            job: Some(job.clone()),
            name: name.to_owned(),
            vms: Vec::new(),
            up_to,
            attachments: Vec::new(),
            volumes: Vec::new(),
            owner: None,
            made_ms: now_ms(),
        }
    }

    /// The VM and its attachments at one host.
    pub fn of_host(
        job: &JobId,
        name: &str,
        up_to: VmStart,
        host: &HostId,
        disks: &[PlacedDisk],
    ) -> Self {
        let mut cleanup = Self::new(job, name, up_to);
        cleanup.add_host(job, host, disks);
        cleanup
    }

    /// What any host has attached of a volume that was deleted.
    pub fn of_deleted(volume: &VolumeName, hosts: impl Iterator<Item = HostId>) -> Self {
        let made_ms = now_ms();
        Self {
            job: None,
            // A later volume of this name may be deleted before this is done.
            name: format!("{volume}/{made_ms}"),
            vms: Vec::new(),
            up_to: VmStart::default(),
            attachments: hosts.map(|host| (host, volume.clone())).collect(),
            volumes: Vec::new(),
            owner: None,
            made_ms,
        }
    }

    /// Adds a host where the VM is or was: the VM is ended there, and then its disks with other homes are detached.
    pub fn add_host(&mut self, job: &JobId, host: &HostId, disks: &[PlacedDisk]) {
        self.vms.push((host.clone(), vm_of(job)));
        self.add_attachments(host, disks);
    }

    /// Of a host where the VM never was.
    pub fn add_attachments(&mut self, host: &HostId, disks: &[PlacedDisk]) {
        let attached = disks.iter().filter(|disk| disk.home != *host);
        self.attachments.extend(attached.map(|disk| (host.clone(), disk.volume.clone())));
    }

    /// Whether it ends this start of a VM at the host.
    pub fn ends(&self, host: &HostId, vm: &VmId, start: VmStart) -> bool {
        start <= self.up_to && self.vms.iter().any(|(at, one)| at == host && one == vm)
    }

    /// Whether it removes the volume at the host.
    pub fn removes(&self, host: &HostId, volume: &VolumeName) -> bool {
        self.volumes.iter().any(|(at, one)| at == host && one == volume)
    }

    fn key(&self) -> String {
        match &self.job {
            Some(job) => format!("{}{}", prefix(job), self.name),
            None => format!("{OF_DELETED}{}", self.name),
        }
    }

    fn parts(&self) -> usize {
        self.vms.len() + self.attachments.len() + self.volumes.len()
    }

    /// Whether a part of it stands at a host of the cluster; all others are at removed ones.
    fn needs_a_host(&self, cluster: &Cluster) -> bool {
        let on_hosts = self.attachments.iter().chain(&self.volumes).map(|(host, _)| host);
        let mut hosts = self.vms.iter().map(|(host, _)| host).chain(on_hosts);
        hosts.any(|host| cluster.hosts.get(host).is_ok())
    }
}

/// The name of a cleanup of a job's run. A later VM may have the name of one whose cleanup waits for a removed host.
pub fn name_of(job: &Job, part: &str) -> String {
    format!("{:x}-{part}", job.submitted_ms)
}

/// Below it are the cleanups of a job.
pub fn prefix(job: &JobId) -> String {
    format!("cleanups/{job}/")
}

/// Records what is to be taken down; the same again changes nothing.
pub async fn hand_over(cluster: &Cluster, cleanup: &Cleanup) -> Result<(), Problem> {
    cluster.records.create(&cleanup.key(), cleanup).await?;
    cluster.clean_now.notify_one();
    Ok(())
}

/// Records what is to be taken down of something that a record still names, and then has that record changed. The cleaner waits for
/// both: before, it would find that what the record names is needed. Where only the first one comes to its end, all of this is to be
/// done again.
pub async fn hand_over_and(
    cluster: &Cluster,
    cleanup: &Cleanup,
    change: impl Future<Output = Result<(), Problem>>,
) -> Result<(), Problem> {
    let mut waits = 0;
    let held = loop {
        match cluster.index.begin_cleanup(&cleanup.key()) {
            Some(held) => break held,
            None if waits < OTHER_TRIES_MAX => tokio::time::sleep(OTHER_TRY).await,
            None => {
                let what = format!("can't hand over {}", cleanup.key());
                return Err(Problem::unavailable(what, "the cleaner has not ended with it"));
            }
        }
        waits += 1;
    };
    hand_over(cluster, cleanup).await?;
    change.await?;
    drop(held);
    cluster.clean_now.notify_one();
    Ok(())
}

/// What is still to be taken down of some VMs.
pub struct Pending(Vec<Cleanup>);

impl Pending {
    /// Of all VMs.
    ///
    /// # Errors
    /// If the store can't be read.
    pub async fn all(cluster: &Cluster) -> Result<Self, Problem> {
        cluster.records.list("cleanups/").await.map(Self)
    }

    /// Of one job's VM.
    ///
    /// # Errors
    /// If the store can't be read.
    pub async fn of(cluster: &Cluster, job: &JobId) -> Result<Self, Problem> {
        cluster.records.list(&prefix(job)).await.map(Self)
    }

    /// Whether something of the VM is still to be taken down at a host.
    pub fn has(&self, job: &JobId, host: &HostId) -> bool {
        self.0.iter().filter(|cleanup| cleanup.job.as_ref() == Some(job)).any(|cleanup| {
            cleanup.vms.iter().any(|(at, _)| at == host)
                || cleanup.attachments.iter().any(|(at, _)| at == host)
        })
    }
}

/// As [`Pending::has`], of one VM at one host.
pub async fn is_pending(cluster: &Cluster, job: &JobId, host: &HostId) -> Result<bool, Problem> {
    Ok(Pending::of(cluster, job).await?.has(job, host))
}

/// Whether the volume is still to be removed at the host.
pub async fn needs_volume(
    cluster: &Cluster,
    host: &HostId,
    volume: &VolumeName,
) -> Result<bool, Problem> {
    let all: Vec<Cleanup> = cluster.records.list("cleanups/").await?;
    Ok(all.iter().any(|cleanup| cleanup.removes(host, volume)))
}

/// Whether something of a job stands at a host of the cluster.
pub async fn is_left(cluster: &Cluster, job: &JobId) -> Result<bool, Problem> {
    let pending: Vec<Cleanup> = cluster.records.list(&prefix(job)).await?;
    Ok(pending.iter().any(|cleanup| cleanup.needs_a_host(cluster)))
}

/// A host of the cluster where the VM of this cleanup may still run; `None` when there is none. What else is left of it is
/// removed when its hosts answer.
pub async fn may_run_at(cluster: &Cluster, cleanup: &Cleanup) -> Result<Option<HostId>, Problem> {
    let Some(left) = cluster.records.read::<Cleanup>(&cleanup.key()).await? else {
        return Ok(None);
    };
    let mut hosts = left.vms.into_iter().map(|(host, _)| host);
    Ok(hosts.find(|host| cluster.hosts.get(host).is_ok()))
}

/// The endless task that works on cleanups, every [`Timing::monitor`](crate::cluster::Timing) and when somebody asks
/// for that.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut swept: Option<Instant> = None;
    loop {
        let look = async {
            let did = match clean(&cluster, "cleanups/").await? {
                true => "removed what hosts that answer have left",
                false => "removed what others do not remove just now",
            };
            if swept.is_none_or(|at| at.elapsed() >= SWEEP_EVERY) {
                sweep_job_files(&cluster).await?;
                swept = Some(Instant::now());
            }
            Ok(did.to_owned())
        };
        task.round(look).await;
        tokio::select! {
            () = tokio::time::sleep(cluster.timing.monitor) => {}
            () = cluster.clean_now.notified() => {}
        }
    }
}

/// Removes the files of jobs that are gone. They are there after a backup that held them while their job was deleted, and after a restore from a backup
/// that is older than its copy of them.
async fn sweep_job_files(cluster: &Cluster) -> Result<(), Problem> {
    // Before the records: files are made after the record of their job.
    let mut gone: BTreeSet<String> = cluster.job_files.names().await?.into_iter().collect();
    if gone.is_empty() {
        return Ok(());
    }
    for record in cluster.jobs().await? {
        for id in with_files(&record) {
            gone.remove(&job_files::name_of(&id, record.job.submitted_ms));
        }
    }
    for name in gone {
        tracing::info!("removing {name} from the files of jobs: there is no such job any more");
        cluster.job_files.remove(&name).await?;
    }
    Ok(())
}

/// Tries once to remove everything of a job. Parts at hosts that do not answer are tried again later.
pub async fn try_now(cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
    try_all(cluster, &prefix(job)).await
}

/// The same for what is left of a volume that was deleted.
pub async fn detach_now(cluster: &Cluster, deleted: &VolumeName) -> Result<(), Problem> {
    try_all(cluster, &format!("{OF_DELETED}{deleted}/")).await
}

async fn try_all(cluster: &Cluster, prefix: &str) -> Result<(), Problem> {
    let mut waits = 0;
    while !clean(cluster, prefix).await? && waits < OTHER_TRIES_MAX {
        waits += 1;
        tokio::time::sleep(OTHER_TRY).await;
    }
    Ok(())
}

/// Returns false if another task was working on a part of it.
async fn clean(cluster: &Cluster, prefix: &str) -> Result<bool, Problem> {
    let mut sweep = Sweep { cluster, silent: BTreeSet::new() };
    let mut mine = true;
    let mut given_up: Vec<(u64, String)> = Vec::new();
    for key in cluster.records.keys(prefix).await? {
        let Some(_cleaning) = cluster.index.begin_cleanup(&key) else {
            mine = false;
            continue;
        };
        let Some(mut cleanup) = cluster.records.read::<Cleanup>(&key).await? else { continue };
        let before = cleanup.parts();
        sweep.clean(&mut cleanup).await?;
        if cleanup.parts() == 0 {
            cluster.records.remove(&key).await?;
            continue;
        }
        if cleanup.parts() < before {
            cluster.records.put(&key, &cleanup).await?;
        }
        if !cleanup.needs_a_host(cluster) {
            given_up.push((cleanup.made_ms, key));
        }
    }
    forget_surplus(cluster, given_up).await?;
    Ok(mine)
}

async fn forget_surplus(cluster: &Cluster, mut all: Vec<(u64, String)>) -> Result<(), Problem> {
    let surplus = all.len().saturating_sub(GIVEN_UP_MAX);
    all.sort();
    for (_, key) in all.into_iter().take(surplus) {
        tracing::warn!(
            "{key} is forgotten: more than {GIVEN_UP_MAX} wait for removed hosts; if its host comes \
             back, remove its VM and volumes there by hand"
        );
        cluster.records.remove(&key).await?;
    }
    Ok(())
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
            self.keep_console(&host, cleanup).await;
            let path = format!("/v1/vms/{vm}?{}", cleanup.up_to.query());
            if !self.delete(&host, Part::Vm, &path).await {
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
        // A VM at a removed host no longer needs its volumes at other hosts: it has lost its right to write.
        if cleanup.vms.iter().any(|(host, _)| self.cluster.hosts.get(host).is_ok()) {
            return Ok(());
        }
        let mut left = Vec::new();
        let owner = cleanup.owner.as_ref().map_or_else(String::new, |o| format!("?owner={o}"));
        for (host, volume) in std::mem::take(&mut cleanup.volumes) {
            let is_incomplete = self.cluster.index.incomplete_move(&volume).is_some();
            let path = format!("/v1/volumes/{volume}{owner}");
            if is_incomplete || !self.delete(&host, Part::Volume, &path).await {
                left.push((host, volume));
            }
        }
        cleanup.volumes = left;
        Ok(())
    }

    /// What a VM has printed is worth no wait.
    async fn keep_console(&self, host: &HostId, cleanup: &Cleanup) {
        let Some(job) = &cleanup.job else { return };
        let Ok(link) = self.cluster.hosts.get(host) else { return };
        if self.cluster.hosts.state(host) != HostState::Up || self.silent.contains(host) {
            return;
        }
        let kept = console::keep(self.cluster, job, cleanup.up_to, &link).await;
        if let Err(problem) = kept
            && !matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Unsupported)
        {
            tracing::warn!("what {job} has printed on its console at {host} is lost: {problem}");
        }
    }

    /// Removes an attachment unless another VM there needs it.
    async fn detach(&mut self, host: &HostId, volume: &VolumeName) -> bool {
        let cluster = self.cluster;
        let _detaching = match cluster.index.begin_detachment(host, volume) {
            Detachment::Held(hold) => hold,
            Detachment::Needed => return true,
            Detachment::Busy => return false,
        };
        let is_gone = self.delete(host, Part::Volume, &format!("/v1/attachments/{volume}")).await;
        if is_gone {
            self.disallow(host, volume).await;
        }
        is_gone
    }

    /// The home is told if it answers: nobody waits for that.
    async fn disallow(&self, host: &HostId, volume: &VolumeName) {
        let record = self.cluster.records.read::<VolumeRecord>(&volume_key(volume)).await;
        let Ok(Some(VolumeRecord { home, .. })) = record else { return };
        let Ok(link) = self.cluster.hosts.get(&home) else { return };
        if home == *host || self.cluster.hosts.state(&home) != HostState::Up {
            return;
        }
        // Something else there may read it. If that is not known, the host is let out later.
        if let Ok(at) = self.cluster.hosts.get(host)
            && !matches!(admissions::is_read(self.cluster, volume, &at).await, Ok(false))
        {
            return;
        }
        if let Err(problem) = admissions::disallow(&link, volume, host).await {
            tracing::warn!("host {host} may still open volume {volume} at {home}: {problem}");
        }
    }

    /// Deletes a part, and returns whether it is gone. A removed host may come back with it.
    async fn delete(&mut self, host: &HostId, part: Part, path: &str) -> bool {
        let Ok(link) = self.cluster.hosts.get(host) else { return false };
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
            // A later start of the VM is there: those that are meant have ended.
            Err(problem) if part == Part::Vm && problem.kind == ProblemKind::Conflict => true,
            Err(problem) => {
                tracing::debug!("can't delete {path} at {host}: {problem}");
                if problem.kind == ProblemKind::Unavailable {
                    self.silent.insert(host.clone());
                }
                false
            }
        }
    }
}

/// The daemon of a host to which a part belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Vm,
    Volume,
}
