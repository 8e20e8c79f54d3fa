//! What a controller does after a restore, before it does anything else: it asks each host of its records what the host has. A job whose VM has moved since the backup,
//! and a volume with another home, are then found where they are. A host that does not come back is given up by name.

use std::time::Instant;

use futures_util::future::join_all;
use perigee_model::vm::VmReport;
use perigee_model::volume::VolumeInfo;
use perigee_model::{HostId, Problem};

use crate::cluster::Cluster;
use crate::records::{RESTORED, RestoredRecord};

/// Waits until each host was heard or given up, and records that.
pub async fn wait(cluster: &Cluster) {
    let begun = Instant::now();
    let is_early = || begun.elapsed() < cluster.timing.restored_min;
    while let Some(hosts) =
        cluster.restored.waits_for().filter(|hosts| !hosts.is_empty() || is_early())
    {
        let heard = join_all(hosts.iter().map(|host| is_heard(cluster, host))).await;
        for (host, _) in hosts.iter().zip(heard).filter(|(_, is_heard)| *is_heard) {
            tracing::info!("host {host} has said what it has since the restore");
            cluster.restored.forget(host);
        }
        if !is_early() && cluster.restored.waits_for().is_some_and(|hosts| hosts.is_empty()) {
            break;
        }
        tokio::select! {
            () = tokio::time::sleep(cluster.timing.monitor) => {}
            () = cluster.restored.changed.notified() => {}
        }
    }
    while let Err(problem) = cluster.records.remove(RESTORED).await {
        tracing::warn!("can't record that all hosts were heard, trying again: {problem}");
        tokio::time::sleep(cluster.timing.monitor).await;
    }
    cluster.restored.end();
}

/// A host asks to be registered. One that has a certificate of this cluster and no record has joined since the backup: it may have VMs of jobs that the records have as
/// queued, so it is waited for too, until it has joined again or is given up.
///
/// # Errors
/// When the store fails.
pub async fn knocked(cluster: &Cluster, host: &HostId) -> Result<(), Problem> {
    if cluster.restored.waits_for().is_none() || cluster.hosts.get(host).is_ok() {
        return Ok(());
    }
    let Some(mut record) = cluster.records.own::<RestoredRecord>(RESTORED).await? else {
        return Ok(());
    };
    if !record.value.waits_for.contains(host) {
        record.value.waits_for.push(host.clone());
        record.save().await?;
    }
    if cluster.restored.add(host) {
        tracing::warn!(
            "host {host} has joined since the backup; it has to join again, or to be given up"
        );
    }
    Ok(())
}

/// A host was removed: nobody waits for it any more.
///
/// # Errors
/// When the store fails.
pub async fn removed(cluster: &Cluster, host: &HostId) -> Result<(), Problem> {
    match cluster.restored.waits_for().is_some_and(|hosts| hosts.contains(host)) {
        true => give_up(cluster, host).await,
        false => Ok(()),
    }
}

/// Whether both servers of the host say what they have. Its VMs are remembered.
async fn is_heard(cluster: &Cluster, host: &HostId) -> bool {
    let Ok(link) = cluster.hosts.get(host) else { return false };
    let (vms, volumes) = futures_util::join!(
        link.agent.get::<Vec<VmReport>>("/v1/vms"),
        link.volume.get::<Vec<VolumeInfo>>("/v1/volumes")
    );
    let (Ok(vms), Ok(_)) = (vms, volumes) else { return false };
    cluster.hosts.remember_vms(host, &vms);
    true
}

/// The host is not waited for any more. If it has VMs, they may be started a second time elsewhere; their disks have one writer all the same.
///
/// # Errors
/// `Conflict` if it is not waited for.
pub async fn give_up(cluster: &Cluster, host: &HostId) -> Result<(), Problem> {
    let record = cluster.records.own::<RestoredRecord>(RESTORED).await?;
    let waits = cluster.restored.waits_for().is_some_and(|hosts| hosts.contains(host));
    let Some(mut record) = record.filter(|_| waits) else {
        let why =
            "nothing waits for it: a host is given up after a restore, while it has not been heard";
        return Err(Problem::conflict(format!("can't give up host {host}"), why).next(format!(
            "to remove a host that is gone for good: perigee host remove {host} --force"
        )));
    };
    record.value.waits_for.retain(|one| one != host);
    record.save().await?;
    tracing::warn!("host {host} is given up: what it has since the backup is not known");
    cluster.restored.forget(host);
    Ok(())
}
