//! The hosts: where they can be reached, and what they last said.
//!
//! The address is what a host registered; the report is an observation with its time. A host from
//! which nothing was heard since the controller started has no report: not known.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_model::job::{Host, HostState, Site};
use perigee_model::vm::{HostAddresses, HostReport, VmReport};
use perigee_model::{HostId, Problem, VmId};

use crate::cluster::{Cluster, now_ms};
use crate::records::{HostRecord, MigrationRecord, Records};

/// How to talk to one host. Every client has its deadline.
#[derive(Debug, Clone)]
pub struct HostLink {
    pub id: HostId,
    pub addresses: HostAddresses,
    pub agent: Client,
    pub volume: Client,
    /// For what takes as long as its bytes: imports, copies, probes.
    pub agent_slow: Client,
    pub volume_slow: Client,
}

impl HostLink {
    fn new(id: HostId, addresses: HostAddresses) -> Result<Self, Problem> {
        let quick = Duration::from_secs(10);
        Ok(Self {
            agent: Client::new(&addresses.agent_url, quick)?,
            volume: Client::new(&addresses.volume_url, quick)?,
            agent_slow: Client::new(&addresses.agent_url, Duration::from_secs(120))?,
            volume_slow: Client::new(&addresses.volume_url, Duration::from_secs(3600))?,
            id,
            addresses,
        })
    }
}

#[derive(Debug)]
struct Known {
    link: Arc<HostLink>,
    report: Option<HostReport>,
    /// Last answer or registration; at first the time when the controller began to wait.
    heard: Instant,
    last_seen_ms: u64,
    /// What its VMs last looked like, for the time when it does not answer.
    vms: BTreeMap<VmId, VmReport>,
}

#[derive(Debug)]
pub struct Hosts {
    deadline: Duration,
    known: Mutex<BTreeMap<HostId, Known>>,
}

impl Hosts {
    pub async fn load(records: &Records, deadline: Duration) -> Result<Self, Problem> {
        let hosts = Self { deadline, known: Mutex::default() };
        for key in records.keys("hosts/").await? {
            let Some(record) = records.read::<HostRecord>(&key).await? else { continue };
            let id = HostId::new(key.trim_start_matches("hosts/"))
                .map_err(|e| Problem::internal("read the hosts", e))?;
            hosts.set(id, record.addresses, record.registered_ms)?;
        }
        Ok(hosts)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<HostId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, id: HostId, addresses: HostAddresses, seen_ms: u64) -> Result<(), Problem> {
        let link = Arc::new(HostLink::new(id.clone(), addresses)?);
        let known = Known {
            link,
            report: None,
            heard: Instant::now(),
            last_seen_ms: seen_ms,
            vms: BTreeMap::new(),
        };
        self.lock().insert(id, known);
        Ok(())
    }

    /// # Errors
    /// `NotFound` when no such host ever registered.
    pub fn get(&self, id: &HostId) -> Result<Arc<HostLink>, Problem> {
        self.lock().get(id).map(|known| Arc::clone(&known.link)).ok_or_else(|| {
            Problem::not_found(format!("host {id}"), "no host of this name has registered")
                .next("`perigee host list` shows the hosts")
        })
    }

    pub fn state(&self, id: &HostId) -> HostState {
        let known = self.lock();
        let silent = known.get(id).is_none_or(|host| host.heard.elapsed() > self.deadline);
        state_of(silent)
    }

    /// What the host last said of itself; `None` when nothing was heard from it yet.
    pub fn report(&self, id: &HostId) -> Option<HostReport> {
        self.lock().get(id).and_then(|known| known.report.clone())
    }

    pub fn all(&self) -> Vec<Arc<HostLink>> {
        self.lock().values().map(|known| Arc::clone(&known.link)).collect()
    }

    pub fn up(&self) -> Vec<Arc<HostLink>> {
        let mut hosts = self.all();
        hosts.retain(|host| self.state(&host.id) == HostState::Up);
        hosts
    }

    /// How long nothing was heard of the host, in plain words.
    pub fn silence(&self, id: &HostId) -> String {
        match self.lock().get(id) {
            Some(known) => {
                format!("host {id} has not answered for {} s", known.heard.elapsed().as_secs())
            }
            None => format!("host {id} is not known"),
        }
    }

    fn heard(&self, id: &HostId, report: HostReport) {
        if let Some(known) = self.lock().get_mut(id) {
            known.report = Some(report);
            known.heard = Instant::now();
            known.last_seen_ms = now_ms();
        }
    }

    pub fn remember_vm(&self, id: &HostId, report: &VmReport) {
        if let Some(known) = self.lock().get_mut(id) {
            known.vms.insert(report.spec.vm.clone(), report.clone());
        }
    }

    /// All its VMs, seen at once: what is not among them is not there.
    pub fn remember_vms(&self, id: &HostId, reports: &[VmReport]) {
        if let Some(known) = self.lock().get_mut(id) {
            known.vms = reports.iter().map(|r| (r.spec.vm.clone(), r.clone())).collect();
        }
    }

    pub fn remembered_vms(&self, id: &HostId) -> Vec<VmReport> {
        self.lock().get(id).map(|k| k.vms.values().cloned().collect()).unwrap_or_default()
    }
}

fn state_of(silent: bool) -> HostState {
    if silent { HostState::Unreachable } else { HostState::Up }
}

/// `PUT /hosts/{host}`: a host makes itself known, and says again that it is there.
pub async fn register(
    cluster: &Cluster,
    id: &HostId,
    addresses: HostAddresses,
) -> Result<(), Problem> {
    let same = cluster.hosts.get(id).is_ok_and(|link| link.addresses == addresses);
    if same {
        if let Some(known) = cluster.hosts.lock().get_mut(id) {
            known.heard = Instant::now();
            known.last_seen_ms = now_ms();
        }
        return Ok(());
    }
    let record = HostRecord { addresses: addresses.clone(), registered_ms: now_ms() };
    cluster.hosts.set(id.clone(), addresses, record.registered_ms)?;
    cluster.records.put(&format!("hosts/{id}"), &record).await?;
    tracing::info!("host {id} of site {} registered", record.addresses.site);
    observe(cluster, id).await;
    Ok(())
}

/// Asks every host for its report, again and again.
pub async fn monitor(cluster: Arc<Cluster>) {
    loop {
        let hosts = cluster.hosts.all();
        let looks = hosts.iter().map(|host| observe(&cluster, &host.id));
        futures_util::future::join_all(looks).await;
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}

async fn observe(cluster: &Cluster, id: &HostId) {
    let Ok(link) = cluster.hosts.get(id) else { return };
    let before = cluster.hosts.state(id);
    match link.agent.get::<HostReport>("/v1/host").await {
        Ok(report) => cluster.hosts.heard(id, report),
        Err(problem) => tracing::debug!("look at host {id}: {problem}"),
    }
    match (before, cluster.hosts.state(id)) {
        (HostState::Up, HostState::Unreachable) => tracing::warn!("host {id} is unreachable"),
        (HostState::Unreachable, HostState::Up) => tracing::info!("host {id} is back"),
        _ => {}
    }
}

pub async fn list(cluster: &Cluster) -> Result<Vec<Host>, Problem> {
    let used = memory_used(cluster).await?;
    let known = cluster.hosts.lock();
    Ok(known.iter().map(|(id, host)| view(id, host, &used, cluster.hosts.deadline)).collect())
}

pub async fn info(cluster: &Cluster, id: &HostId) -> Result<Host, Problem> {
    cluster.hosts.get(id)?;
    list(cluster)
        .await?
        .into_iter()
        .find(|host| host.id == *id)
        .ok_or_else(|| Problem::not_found(format!("host {id}"), "it was just removed"))
}

fn view(id: &HostId, known: &Known, used: &BTreeMap<HostId, u64>, deadline: Duration) -> Host {
    let report = known.report.as_ref();
    Host {
        id: id.clone(),
        addresses: known.link.addresses.clone(),
        state: state_of(known.heard.elapsed() > deadline),
        cpus: report.map_or(0, |r| r.cpus),
        memory_bytes: report.map_or(0, |r| r.memory_bytes),
        memory_used_bytes: used.get(id).copied().unwrap_or(0),
        accelerator: report.map(|r| r.accelerator),
        warnings: report.map(|r| r.warnings.clone()).unwrap_or_default(),
        last_seen_ms: known.last_seen_ms,
    }
}

/// Memory promised to VMs: where each job's VM is or will be, and where one is moving or has come to.
pub async fn memory_used(cluster: &Cluster) -> Result<BTreeMap<HostId, u64>, Problem> {
    let mut used = BTreeMap::new();
    let jobs = cluster.unfinished_jobs().await?;
    for record in &jobs {
        if let Some(host) = &record.job.host {
            *used.entry(host.clone()).or_default() += record.job.spec.memory_bytes;
        }
    }
    for record in cluster.unsettled_migrations(&jobs).await? {
        let job = jobs.iter().find(|j| j.job.vm.as_ref() == Some(&record.migration.vm));
        let memory_bytes = job.map_or(0, |j| j.job.spec.memory_bytes);
        *used.entry(record.migration.to).or_default() += memory_bytes;
    }
    Ok(used)
}

/// VMs promised to each host.
pub async fn vms_placed(cluster: &Cluster) -> Result<BTreeMap<HostId, u32>, Problem> {
    let mut vms = BTreeMap::new();
    for host in cluster.unfinished_jobs().await?.into_iter().filter_map(|r| r.job.host) {
        *vms.entry(host).or_default() += 1;
    }
    Ok(vms)
}

pub fn sites(cluster: &Cluster) -> Vec<Site> {
    let mut sites: BTreeMap<_, Vec<HostId>> = BTreeMap::new();
    for host in cluster.hosts.all() {
        sites.entry(host.addresses.site.clone()).or_default().push(host.id.clone());
    }
    sites.into_iter().map(|(id, hosts)| Site { id, hosts }).collect()
}

/// Forgets a host that is gone for good.
pub async fn remove(cluster: &Cluster, id: &HostId) -> Result<(), Problem> {
    cluster.hosts.get(id)?;
    let _placing = cluster.placing.lock().await;
    let refuse = |why: String| Err(Problem::conflict(format!("remove host {id}"), why));
    if cluster.hosts.state(id) == HostState::Up {
        return refuse("it is up; stop its agent first".to_owned());
    }
    for record in cluster.unfinished_jobs().await? {
        let placed = record.placement.iter().flat_map(|p| &p.disks).any(|d| d.home == *id);
        if placed || record.job.host.as_ref() == Some(id) {
            return refuse(format!("job {} is on it", record.job.id));
        }
    }
    for MigrationRecord { migration, .. } in cluster.unfinished_migrations().await? {
        if migration.from == *id || migration.to == *id {
            return refuse(format!("migration {} is not over", migration.id));
        }
    }
    let volumes: Vec<crate::records::VolumeRecord> = cluster.records.list("volumes/").await?;
    if let Some(volume) = volumes.iter().find(|volume| volume.home == *id) {
        return refuse(format!("it is the home of volume {}", volume.name));
    }
    for host in cluster.hosts.all() {
        cluster.records.remove(&format!("links/{id}/{}", host.id)).await?;
        cluster.records.remove(&format!("links/{}/{id}", host.id)).await?;
    }
    cluster.records.remove(&format!("local_blocks/{id}")).await?;
    cluster.records.remove(&format!("hosts/{id}")).await?;
    cluster.hosts.lock().remove(id);
    Ok(())
}
