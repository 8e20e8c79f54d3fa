//! Registers, monitors, lists and removes hosts.

pub mod enrol;
pub mod look_back;
pub mod place;
pub mod watching;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::job::{Host, HostRemoval, HostState, Site};
use perigee_model::vm::{HostAddresses, HostReport};
use perigee_model::volume::VmSocketSeen;
use perigee_model::volume_move::VolumeMove;
use perigee_model::{HostId, Problem, SiteId, VolumeName};

use crate::clock::now_ms;
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, HostEntry, Said};
use crate::jobs::{self, Fate, Loss};
use crate::records::{HostRecord, JobRecord, VolumeRecord, vm_of};
use crate::storage::{given_up, leave_site, moves};
use crate::{networks, planning, restored};

/// `PUT /hosts/{host}`: registers a host. The host repeats this as a heartbeat.
pub async fn register(
    cluster: &Arc<Cluster>,
    id: &HostId,
    addresses: HostAddresses,
) -> Result<(), Problem> {
    let same = cluster.hosts.get(id).is_ok_and(|link| link.addresses == addresses);
    if same {
        if let Some(known) = cluster.hosts.lock().get_mut(id) {
            known.is_heard();
        }
        return Ok(());
    }
    restored::knocked(cluster, id).await?;
    let (cluster, id) = (Arc::clone(cluster), id.clone());
    // In a task of its own, so that the host is registered even if it closes the connection.
    let done = tokio::spawn(async move {
        enrol::check_addresses(&cluster, &id, &addresses).await?;
        // An admin may agree to another site meanwhile.
        let turn = cluster.enrolling.lock().await;
        check_site(&cluster, &id, &addresses.site).await?;
        let link = cluster.hosts.link(&id, addresses.clone())?;
        let said = cluster.hosts.said(&id);
        let record = record_of(&cluster, &id, addresses, said.clone());
        // The store comes first: a host that is known only in memory would not register again.
        cluster.records.put(&format!("hosts/{id}"), &record).await?;
        cluster.hosts.set(link, record.registered_ms, said);
        tracing::info!("host {id} of site {} registered", record.addresses.site);
        drop(turn);
        observe(&cluster, &id).await;
        leave_site::tell_sites(&cluster).await;
        // Guests of all hosts are kept from its addresses, and its own from the others'.
        cluster.networks.changed();
        // A removed host may have come back, with VMs and volumes that were given up.
        cluster.clean_now.notify_one();
        Ok(())
    });
    done.await.map_err(|e| Problem::internal("can't register a host", e))?
}

/// The record of a host that is registered now.
fn record_of(cluster: &Cluster, id: &HostId, addresses: HostAddresses, said: Said) -> HostRecord {
    let Said { interfaces, versions } = said;
    let drain = cluster.hosts.drain(id);
    HostRecord { addresses, registered_ms: now_ms(), interfaces, drain, versions }
}

/// `POST /hosts/{host}/stops`: the host's agent stops in order. Its VMs go on, and no job is lost with it.
///
/// # Errors
/// `NotFound`.
pub fn stops(cluster: &Cluster, id: &HostId) -> Result<(), Problem> {
    cluster.hosts.get(id)?;
    tracing::info!("the agent of host {id} stops; its VMs go on");
    cluster.hosts.stops(id);
    Ok(())
}

/// Data that may not leave a site may be read at each host of the site. So a host that is known does not choose another one.
async fn check_site(cluster: &Cluster, id: &HostId, site: &SiteId) -> Result<(), Problem> {
    let known: Option<HostRecord> = cluster.records.read(&format!("hosts/{id}")).await?;
    match known.map(|known| known.addresses.site) {
        Some(before) if before != *site => {
            let why = format!("it is of site {before} and says now that it is of site {site}");
            Err(Problem::conflict(format!("can't register host {id}"), why)
                .next(format!("if it was moved there, say so: perigee host site {id} {site}")))
        }
        _ => Ok(()),
    }
}

/// `PUT /hosts/{host}/site`: from now on the host is of this site. Its agent has to say the same.
///
/// # Errors
/// `NotFound`.
pub async fn set_site(cluster: &Cluster, id: &HostId, site: SiteId) -> Result<(), Problem> {
    let known = cluster.hosts.get(id)?;
    let _turn = cluster.enrolling.lock().await;
    let addresses = HostAddresses { site, ..known.addresses.clone() };
    let link = cluster.hosts.link(id, addresses.clone())?;
    let said = cluster.hosts.said(id);
    let record = record_of(cluster, id, addresses, said.clone());
    cluster.records.put(&format!("hosts/{id}"), &record).await?;
    tracing::warn!("host {id} is of site {} from now on", record.addresses.site);
    cluster.hosts.set(link, record.registered_ms, said);
    Ok(())
}

/// Requests a report from every host, repeatedly.
pub async fn monitor(cluster: Arc<Cluster>, task: Task) {
    loop {
        let look = async {
            let hosts = cluster.hosts.all();
            let looks = hosts.iter().map(async |host| {
                observe(&cluster, &host.id).await;
                cluster.hosts.look_at_pool(&host.id).await;
            });
            futures_util::future::join_all(looks).await;
            leave_site::tell_sites(&cluster).await;
            let up = cluster.hosts.up().len();
            Ok(format!("asked {} hosts, of which {up} are up", hosts.len()))
        };
        task.round(look).await;
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}

async fn observe(cluster: &Cluster, id: &HostId) {
    let Ok(link) = cluster.hosts.get(id) else { return };
    let before = cluster.hosts.state(id);
    let (agent, volume_server) = tokio::join!(
        link.agent.get::<HostReport>("/v1/host"),
        link.volume.get::<Vec<VmSocketSeen>>("/v1/vms")
    );
    cluster.hosts.note_volume_server(id, volume_server.ok().as_deref());
    match agent {
        Ok(report) => {
            cluster.hosts.heard(id, report);
            if cluster.hosts.is_taken_back(id) && cluster.hosts.drain(id).is_none() {
                cluster.drain_now.notify_one();
            }
            if let Err(problem) = keep_said(cluster, id).await {
                tracing::warn!("can't keep what host {id} says of itself, trying again: {problem}");
            }
        }
        Err(problem) => {
            tracing::debug!("no report from host {id}: {problem}");
            cluster.hosts.missed(id, &problem);
        }
    }
    match (before, cluster.hosts.state(id)) {
        (HostState::Up, HostState::Unreachable) => {
            tracing::warn!("host {id} is unreachable: {}", cluster.hosts.silence(id));
        }
        (HostState::Unreachable, HostState::Up) => tracing::info!("host {id} is back"),
        _ => {}
    }
}

/// Keeps the addresses that a host says of its interfaces, and the versions of its daemons. A controller that starts tells the addresses to all
/// hosts before it has heard this one.
async fn keep_said(cluster: &Cluster, id: &HostId) -> Result<(), Problem> {
    if cluster.hosts.new_said(id).is_none() {
        return Ok(());
    }
    // It may register again meanwhile, or be removed.
    let _turn = cluster.enrolling.lock().await;
    let known = cluster.records.own::<HostRecord>(&format!("hosts/{id}")).await?;
    if let (Some(mut known), Some(now)) = (known, cluster.hosts.new_said(id)) {
        known.value.interfaces.clone_from(&now.interfaces);
        known.value.versions.clone_from(&now.versions);
        known.save().await?;
        cluster.hosts.note_said(id, now);
    }
    Ok(())
}

/// All hosts as people see them, from memory: no host is asked. Volumes that were given up with a host are warnings of
/// it.
///
/// # Errors
/// If the store does not answer.
pub async fn list(cluster: &Cluster) -> Result<Vec<Host>, Problem> {
    let used = memory_used(cluster);
    let mut given_up = given_up::warnings(cluster).await?;
    let known = cluster.hosts.lock();
    let views = known.iter().map(|(id, known)| {
        let mut host = view(id, known, &used, cluster.hosts.deadline);
        host.warnings.extend(given_up.remove(id));
        host
    });
    Ok(views.collect())
}

/// One host, as in [`list`].
///
/// # Errors
/// `NotFound` if no such host has registered.
pub async fn info(cluster: &Cluster, id: &HostId) -> Result<Host, Problem> {
    cluster.hosts.get(id)?;
    list(cluster)
        .await?
        .into_iter()
        .find(|host| host.id == *id)
        .ok_or_else(|| Problem::not_found(format!("host {id}"), "it was just removed"))
}

fn view(id: &HostId, known: &HostEntry, used: &BTreeMap<HostId, u64>, deadline: Duration) -> Host {
    let report = known.report.as_ref();
    let state = known.state(deadline);
    let mut warnings = report.map(|r| r.warnings.clone()).unwrap_or_default();
    if state == HostState::Unreachable {
        warnings.insert(0, known.silence(id));
    }
    Host {
        id: id.clone(),
        addresses: known.link.addresses.clone(),
        state,
        cpus: report.map_or(0, |r| r.cpus),
        memory_bytes: report.map_or(0, |r| r.memory_bytes),
        memory_used_bytes: used.get(id).copied().unwrap_or(0),
        memory_available_bytes: report.and_then(|r| r.memory_available_bytes),
        load_1min: report.and_then(|r| r.load_1min),
        cpus_used_1m: report.and_then(|r| r.cpus_used_1m),
        pressure: report.map(|r| r.pressure).unwrap_or_default(),
        vcpus_1m: known.vcpus_1m(None).map(|(_, load)| load),
        pool_free_bytes: known.pool_free_bytes(),
        pool_size_bytes: known.pool_size_bytes(),
        accelerator: report.map(|r| r.accelerator),
        cpu_model: report.map(|r| r.cpu_model.clone()).unwrap_or_default(),
        warnings,
        waits: known.waits(id),
        drain: known.shown_drain(),
        lease: report.and_then(|r| r.lease.clone()),
        notice: report.and_then(|r| r.notice.clone()),
        measurement: None,
        last_seen_ms: known.heard.seen_ms,
    }
}

/// The memory that is reserved for VMs at each host.
pub fn memory_used(cluster: &Cluster) -> BTreeMap<HostId, u64> {
    cluster.index.used().into_iter().map(|(host, used)| (host, used.demand.memory_bytes)).collect()
}

/// The sites that have a host, sorted, with their hosts.
pub fn sites(cluster: &Cluster) -> Vec<Site> {
    let mut sites: BTreeMap<_, Vec<HostId>> = BTreeMap::new();
    for host in cluster.hosts.all() {
        sites.entry(host.addresses.site.clone()).or_default().push(host.id.clone());
    }
    let site = |(id, hosts)| {
        let place = cluster.balances.place(&id);
        Site { id, hosts, place }
    };
    sites.into_iter().map(site).collect()
}

/// One of them.
///
/// # Errors
/// `NotFound` for a site without a host.
pub fn site(cluster: &Cluster, id: &SiteId) -> Result<Site, Problem> {
    let found = sites(cluster).into_iter().find(|site| site.id == *id);
    found.ok_or_else(|| {
        Problem::not_found(format!("site {id}"), "no host is there")
            .next("`perigee site list` shows the sites")
    })
}

/// Removes a host that is gone for good, and returns what is lost with it.
///
/// The driver of a migration from or to the host then no longer waits for it, and ends the migration.
///
/// # Errors
/// `NotFound` for a host that has no record; `Conflict` while the host is up. Without `force`, also while a migration needs it, or if something would be
/// lost.
pub async fn remove(cluster: &Cluster, id: &HostId, force: bool) -> Result<HostRemoval, Problem> {
    if let Err(unknown) = cluster.hosts.get(id) {
        // One with addresses that this controller can't use is not in memory.
        let record: Option<HostRecord> = cluster.records.read(&format!("hosts/{id}")).await?;
        record.ok_or(unknown)?;
    }
    let conflict = |why: String| Problem::conflict(format!("can't remove host {id}"), why);
    if cluster.hosts.state(id) == HostState::Up {
        return Err(conflict("it is up; stop its agent first".to_owned()));
    }
    for record in cluster.unfinished_migrations() {
        let migration = &record.migration;
        if !force && (migration.from == *id || migration.to == *id) {
            let why = format!("migration {} has not ended", migration.id);
            let next = format!(
                "perigee vm move {} --cancel; if the host is gone for good: perigee host remove {id} \
                 --force",
                migration.vm
            );
            return Err(conflict(why).next(next));
        }
    }
    for record in cluster.index.unfinished_volume_moves() {
        let VolumeMove { volume, from, to, .. } = &record.view;
        if !force && (from == id || to == id) {
            let why = format!("volume {volume} is moving from {from} to {to}");
            let next = format!(
                "perigee volume move {volume} --cancel; if the host is gone for good: perigee host \
                 remove {id} --force"
            );
            return Err(conflict(why).next(next));
        }
    }
    let removal = what_goes_with(cluster, id).await?;
    let losses = removal.in_words();
    if !force && !losses.is_empty() {
        return Err(conflict(losses.join("; "))
            .next(format!("`perigee host remove {id} --force` gives that up")));
    }
    if cluster.network.identity().is_some() {
        enrol::revoke_host(cluster, id.clone()).await?;
    }
    tracing::warn!("host {id} is removed: {}", losses.join("; "));
    given_up::keep(cluster, id, &removal.lost_volumes).await?;
    for volume in &removal.lost_volumes {
        cluster.records.remove(&format!("volumes/{volume}")).await?;
    }
    planning::links::forget(cluster, id).await?;
    planning::forget_host(cluster, id).await?;
    networks::forget_host(cluster, id).await?;
    cluster.records.remove(&format!("hosts/{id}")).await?;
    cluster.hosts.lock().remove(id);
    restored::removed(cluster, id).await?;
    // Of a host that is known, the end of a measurement is recorded.
    cluster.measurements.forget(&cluster.records, id).await?;
    let jobs = removal.failed_jobs.iter().chain(&removal.placed_again).chain(&removal.moving_jobs);
    jobs.for_each(|job| cluster.drive_job(job));
    Ok(removal)
}

async fn what_goes_with(cluster: &Cluster, id: &HostId) -> Result<HostRemoval, Problem> {
    let mut removal = HostRemoval::default();
    let volumes: Vec<VolumeRecord> = cluster.records.list("volumes/").await?;
    let lost = volumes.into_iter().filter(|volume| volume.home == *id);
    removal.lost_volumes = lost.map(|volume| volume.name).collect();
    for record in cluster.index.unfinished_volume_moves() {
        let shown = &record.view;
        let is_kept = record.listed || moves::is_kept_by_a_vm(cluster, &shown.volume);
        let goes_back = shown.to == *id && record.tenure.is_some() && is_kept;
        if goes_back && cluster.hosts.get(&shown.from).is_ok() {
            removal.lost_volumes.retain(|lost| *lost != shown.volume);
            removal.returned_volumes.push(shown.volume.clone());
        }
        if shown.from == *id && shown.state.is_taken() && shown.missing_bytes != Some(0) {
            removal.lost_volumes.retain(|lost| *lost != shown.volume);
            removal.incomplete_volumes.push(shown.volume.clone());
        }
    }
    let moves = cluster.unfinished_migrations();
    for record in cluster.unfinished_jobs() {
        let job = record.job.id.clone();
        let homes = record.disks_needed().map(|disk| &disk.home);
        let needed: Vec<&HostId> = record.job.host.iter().chain(homes).collect();
        let mut moving = moves.iter().map(|moved| &moved.migration);
        if moving.any(|m| m.vm == vm_of(&job) && (m.from == *id || m.to == *id)) {
            removal.moving_jobs.push(job);
        } else if uses_any(&record, false, &removal.incomplete_volumes) {
            removal.failed_jobs.push(job);
        } else if needed.contains(&id) || uses_any(&record, true, &removal.incomplete_volumes) {
            match jobs::fate(&record, id, Loss::Removed) {
                Fate::Again => removal.placed_again.push(job),
                Fate::Fail(_) | Fate::Wait(_) => removal.failed_jobs.push(job),
            }
        }
    }
    Ok(removal)
}

/// Whether one of the volumes is a disk of the job; `temporary`: one that is only for the job.
fn uses_any(record: &JobRecord, temporary: bool, volumes: &[VolumeName]) -> bool {
    record.disks_needed().any(|disk| disk.temporary == temporary && volumes.contains(&disk.volume))
}
