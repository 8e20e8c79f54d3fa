//! What hosts have and no record names there: after a restore of an older copy of the state, or because it was made at a host without the
//! controller. It is listed in one place, with what can be done with it, and nothing is done with it before somebody says so. What the
//! controller itself has ended is not among it: the cleaner has records of that.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use perigee_http::Client;
use perigee_model::job::{EndUnknownVm, Unknown, UnknownKind};
use perigee_model::vm::{VmReport, VmStatus};
use perigee_model::volume::{ImageInfo, VolumeInfo};
use perigee_model::{HostId, Problem, ProblemKind, VmId, VolumeName};
use serde::de::DeserializeOwned;

use crate::cleaner::Cleanup;
use crate::cluster::{Cluster, HostLink};
use crate::records::{JobRecord, VolumeRecord, job_key};
use crate::storage::volumes::{or_silent, reachable};
use crate::storage::{given_up, images, replicas};

/// All of it. A host that does not answer is left out.
///
/// # Errors
/// If the store fails.
pub async fn list(cluster: &Cluster) -> Result<Vec<Unknown>, Problem> {
    let (mut all, volumes, images) =
        (vms(cluster).await?, volumes(cluster).await?, images(cluster).await?);
    all.extend(volumes);
    all.extend(images);
    all.sort_by(|a, b| (a.kind, &a.name, &a.host).cmp(&(b.kind, &b.name, &b.host)));
    Ok(all)
}

/// What the hosts that answer say, with their names.
async fn asked<T: DeserializeOwned>(
    cluster: &Cluster,
    client: fn(&HostLink) -> &Client,
    path: &str,
) -> Vec<(HostId, T)> {
    let hosts = cluster.hosts.up();
    let answers = join_all(hosts.iter().map(|host| client(host).get::<Vec<T>>(path))).await;
    let said = hosts.iter().zip(answers).filter_map(|(host, answer)| {
        let all = or_silent(host, answer)?;
        Some(all.into_iter().map(|one| (host.id.clone(), one)).collect::<Vec<_>>())
    });
    said.flatten().collect()
}

async fn vms(cluster: &Cluster) -> Result<Vec<Unknown>, Problem> {
    let reports: Vec<(HostId, VmReport)> = asked(cluster, |host| &host.agent, "/v1/vms").await;
    let mut unknown = Vec::new();
    for (host, report) in reports {
        let Some(why) = why_unknown(cluster, &host, &report).await? else { continue };
        let vm = &report.spec.vm;
        // Its job may just have ended, and been cleaned up.
        let Ok(link) = cluster.hosts.get(&host) else { continue };
        let again = link.agent.get::<VmReport>(&format!("/v1/vms/{vm}")).await;
        if again.is_err_and(|problem| problem.kind == ProblemKind::NotFound) {
            continue;
        }
        unknown.push(Unknown {
            kind: UnknownKind::Vm,
            name: vm.to_string(),
            size_bytes: report.spec.memory_bytes,
            allocated_bytes: 0,
            status: Some(report.status),
            why,
            next: next_of(&report, &host),
            host,
        });
    }
    Ok(unknown)
}

/// What can be done with a VM that no record names.
fn next_of(report: &VmReport, host: &HostId) -> String {
    let vm = &report.spec.vm;
    let end =
        format!("end it: perigee vm end {vm} --host {host}; its disks stay, and can be adopted");
    let is_off = matches!(report.status, VmStatus::Shutdown | VmStatus::Gone | VmStatus::Migrated);
    match report.spec.machine.persistent && !is_off {
        true => format!("go on with it: perigee vm adopt {vm} --host {host}; or {end}"),
        false => end,
    }
}

/// Why no record names the VM at this host; `None` if one does.
async fn why_unknown(
    cluster: &Cluster,
    host: &HostId,
    report: &VmReport,
) -> Result<Option<String>, Problem> {
    let (vm, start) = (&report.spec.vm, report.spec.start);
    let record = cluster.index.of_vm(vm);
    let is_its = |record: &JobRecord| record.job.submitted_ms == start.submitted_ms;
    if let Some(record) = record.as_deref().filter(|record| is_its(record)) {
        if may_have(cluster, record, vm, host) {
            return Ok(None);
        }
        // The VM may just have been found at another host: the index follows the store.
        let stored: Option<JobRecord> = cluster.records.read(&job_key(&record.job.id)).await?;
        if stored.is_some_and(|record| is_its(&record) && may_have(cluster, &record, vm, host)) {
            return Ok(None);
        }
    }
    let cleanups: Vec<Cleanup> = cluster.records.list("cleanups/").await?;
    let is_ended = |cleanup: &Cleanup| cleanup.ends(host, vm, start);
    if cleanups.iter().any(is_ended) {
        return Ok(None);
    }
    Ok(Some(match record {
        Some(record) if is_its(&record) => {
            let at =
                record.job.host.as_ref().map_or("no host".to_owned(), |at| format!("host {at}"));
            format!("its record has it at {at}")
        }
        Some(_) => "the record of this name is of a later VM".to_owned(),
        None => "no record has this name".to_owned(),
    }))
}

/// Whether the host is one of those where a record has its VM, or had it until now.
fn may_have(cluster: &Cluster, record: &JobRecord, vm: &VmId, host: &HostId) -> bool {
    let of_record = [&record.job.host, &record.left, &record.leaving];
    let start = record.placement.iter().map(|placement| &placement.start);
    let moves = cluster.unfinished_migrations();
    let moving = moves.iter().filter(|one| one.migration.vm == *vm);
    let ends = moving.flat_map(|one| [&one.migration.from, &one.migration.to]);
    let mut hosts = of_record.into_iter().flatten().chain(start).chain(&record.avoid).chain(ends);
    hosts.any(|one| one == host)
}

async fn volumes(cluster: &Cluster) -> Result<Vec<Unknown>, Problem> {
    let infos: Vec<(HostId, VolumeInfo)> = asked(cluster, |host| &host.volume, "/v1/volumes").await;
    // Afterwards: what has just been made is recorded by now.
    let records: Vec<VolumeRecord> = cluster.records.list("volumes/").await?;
    let homes: BTreeMap<&VolumeName, &HostId> =
        records.iter().map(|record| (&record.name, &record.home)).collect();
    let given_up = given_up::all(cluster).await?;
    let cleanups: Vec<Cleanup> = cluster.records.list("cleanups/").await?;
    let replicas = replicas::list(cluster).await?;
    let jobs = cluster.unfinished_jobs();
    let mut unknown = Vec::new();
    for (host, info) in infos {
        let name = &info.name;
        let is_given_up = given_up.get(&host).is_some_and(|all| all.contains(name));
        let is_ended = cleanups.iter().any(|cleanup| cleanup.removes(&host, name))
            || cluster.measurements.has(&host, name);
        let is_moving = cluster
            .index
            .volume_move(name)
            .is_some_and(|last| last.view.to == host || last.view.from == host);
        let is_replica = replicas.iter().any(|r| r.volume == *name && r.host == host);
        let mut disks = jobs.iter().filter_map(|job| job.placement.as_ref()).flat_map(|p| &p.disks);
        let is_disk = disks.any(|disk| disk.volume == *name);
        let home = homes.get(name);
        let is_here = home.is_some_and(|home| **home == host);
        if is_given_up || is_ended || is_moving || is_replica || is_disk || is_here {
            continue;
        }
        if replicas::is_superseded(cluster, &host, name).await? {
            continue;
        }
        let made_for =
            info.owner.as_ref().map_or_else(String::new, |o| format!(", it was made for {o}"));
        let why = match home {
            Some(home) => format!("its record has it at host {home}{made_for}"),
            None => format!("no record has this name{made_for}"),
        };
        unknown.push(Unknown {
            kind: UnknownKind::Volume,
            name: name.to_string(),
            size_bytes: info.size_bytes,
            allocated_bytes: info.allocated_bytes,
            status: None,
            why,
            next: format!(
                "make it the volume of this name: perigee volume adopt {name} --host {host}; then it can also be deleted"
            ),
            host,
        });
    }
    Ok(unknown)
}

async fn images(cluster: &Cluster) -> Result<Vec<Unknown>, Problem> {
    let infos: Vec<(HostId, ImageInfo)> = asked(cluster, |host| &host.volume, "/v1/images").await;
    let mut unknown = Vec::new();
    for (host, info) in infos {
        let Some(why) = images::why_unknown(cluster, &info).await? else { continue };
        let name = &info.name;
        unknown.push(Unknown {
            kind: UnknownKind::Image,
            name: name.to_string(),
            size_bytes: info.size_bytes,
            allocated_bytes: info.allocated_bytes,
            status: None,
            next: format!(
                "if no image has this name, make it one: perigee image adopt {name} --host {host}"
            ),
            why,
            host,
        });
    }
    Ok(unknown)
}

/// What a host says of a VM that no record names there.
///
/// # Errors
/// `Conflict` if a record names it, `NotFound` if the host has none; `what` could not be done.
pub async fn unknown_vm(
    cluster: &Cluster,
    vm: &VmId,
    host: &HostId,
    what: &str,
) -> Result<VmReport, Problem> {
    let link = reachable(cluster, host)?;
    let report: VmReport = link.agent.get(&format!("/v1/vms/{vm}")).await?;
    match why_unknown(cluster, host, &report).await? {
        Some(_) => Ok(report),
        None => Err(Problem::conflict(what, "it is known, and not left over")),
    }
}

/// Ends a VM that no record names at this host. Its disks stay.
///
/// # Errors
/// `Conflict` if a record names it; `NotFound` if the host has none.
pub async fn end_vm(cluster: &Cluster, vm: &VmId, ask: &EndUnknownVm) -> Result<(), Problem> {
    let host = reachable(cluster, &ask.host)?;
    let path = format!("/v1/vms/{vm}");
    let what = format!("can't end VM {vm} of host {}", host.id);
    let known = |problem: Problem| match problem.kind {
        ProblemKind::Conflict => problem.next(format!("stop it: perigee vm stop {vm}")),
        _ => problem,
    };
    let report = unknown_vm(cluster, vm, &host.id, &what).await.map_err(known)?;
    let is_off = matches!(report.status, VmStatus::Shutdown | VmStatus::Gone | VmStatus::Migrated);
    if ask.force || is_off {
        tracing::warn!("VM {vm} of host {} is ended, which no record names there", host.id);
        return host.agent.delete(&format!("{path}?{}", report.spec.start.query())).await;
    }
    host.agent.post(&format!("{path}/power-button"), &()).await
}

/// A VM that is asked for, and that no record of this controller names, if a host has one: nothing is done with it, and nothing gets its name.
///
/// # Errors
/// `Conflict` with the host.
pub async fn check_untouched(cluster: &Cluster, vm: &VmId) -> Result<(), Problem> {
    for (host, _) in cluster.hosts.seen(vm) {
        let Ok(link) = reachable(cluster, &host) else { continue };
        // What was heard last may be old.
        let Ok(report) = link.agent.get::<VmReport>(&format!("/v1/vms/{vm}")).await else {
            continue;
        };
        if why_unknown(cluster, &host, &report).await?.is_none() {
            continue;
        }
        let what = format!("nothing is done with VM {vm}");
        let why =
            format!("host {host} has a VM with this name that this controller has no record of");
        return Err(Problem::conflict(what, why).next(format!(
            "an admin sees with `perigee host unknown` what can be done with it, for example: perigee vm end {vm} --host {host}"
        )));
    }
    Ok(())
}
