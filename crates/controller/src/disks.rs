//! Attaches a VM's disks. Both staging and migrations need this.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::try_join_all;
use perigee_model::volume::{Attach, Attachment, EpochIssued, Openers};
use perigee_model::{Epoch, HostId, Problem, VolumeName};

use crate::catalog;
use crate::cluster::{Cluster, HostLink};
use crate::records::PlacedDisk;

pub async fn issue_epoch(home: &HostLink, disk: &PlacedDisk) -> Result<Epoch, Problem> {
    let target = format!("/v1/volumes/{}/epoch/issue", disk.volume);
    Ok(home.volume.post::<EpochIssued>(&target, &()).await?.epoch)
}

/// Lets a host open a volume at its home. The home lets no other host.
pub async fn allow(home: &HostLink, volume: &VolumeName, host: &HostId) -> Result<(), Problem> {
    home.volume.put(&format!("/v1/volumes/{volume}/hosts/{host}"), &()).await
}

/// Ends that, when the host has the volume attached no more.
pub async fn disallow(home: &HostLink, volume: &VolumeName, host: &HostId) -> Result<(), Problem> {
    home.volume.delete(&format!("/v1/volumes/{volume}/hosts/{host}")).await
}

/// Lets the hosts of all VMs open their disks, once, when the controller has started: the homes may be of an earlier version
/// or a backup, and know nothing of it.
pub async fn allow_again(cluster: Arc<Cluster>) {
    let mut left: BTreeSet<(HostId, VolumeName, HostId)> = BTreeSet::new();
    for job in cluster.unfinished_jobs() {
        let (Some(placement), Some(at)) = (&job.placement, &job.job.host) else { continue };
        let moving = cluster.unfinished_migrations();
        let moving = moving.iter().filter(|one| Some(&one.migration.vm) == job.job.vm.as_ref());
        let hosts: BTreeSet<HostId> =
            moving.map(|one| one.migration.to.clone()).chain([at.clone()]).collect();
        for disk in &placement.disks {
            let others = hosts.iter().filter(|host| **host != disk.home);
            left.extend(others.map(|host| (disk.home.clone(), disk.volume.clone(), host.clone())));
        }
    }
    loop {
        for one in left.clone() {
            let (home, volume, host) = &one;
            // A removed host lets nobody open anything.
            let is_done = match cluster.hosts.get(home) {
                Ok(link) => allow(&link, volume, host).await.is_ok(),
                Err(_) => true,
            };
            if is_done {
                left.remove(&one);
            }
        }
        if left.is_empty() {
            return std::future::pending().await;
        }
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}

/// Tells the host that is to become the volume's home which hosts may open it. Its old home may too: it serves the volume
/// to those who do not know the new one yet.
pub async fn allow_the_same(
    from: &HostLink,
    to: &HostLink,
    volume: &VolumeName,
) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/hosts");
    let mut openers: Openers = from.volume.get(&path).await?;
    openers.hosts.retain(|host| *host != to.id);
    openers.hosts.push(from.id.clone());
    to.volume.put(&path, &openers).await
}

/// Lets the hosts that were let in at the old home while the volume moved open it at its new one too. An old home that does not
/// answer has let nobody in.
pub async fn allow_those_too(from: &HostLink, to: &HostLink, volume: &VolumeName) {
    let path = format!("/v1/volumes/{volume}/hosts");
    let Ok(openers) = from.volume.get::<Openers>(&path).await else { return };
    for host in openers.hosts.iter().filter(|host| **host != to.id) {
        if let Err(problem) = allow(to, volume, host).await {
            tracing::warn!("{host} can't open volume {volume} at {}: {problem}", to.id);
        }
    }
}

/// Attaches the disks at a host, except those whose home it is.
pub async fn attach(cluster: &Cluster, disks: &[PlacedDisk], at: &HostId) -> Result<(), Problem> {
    let host = catalog::reachable(cluster, at)?;
    let elsewhere = disks.iter().filter(|disk| disk.home != *at);
    let attached = elsewhere.map(async |disk| {
        // The index says that the VM is at this host or moves there, so no new removal begins.
        if cluster.index.is_being_detached(at, &disk.volume) {
            let why = "what an earlier VM left there is being removed";
            return Err(Problem::unavailable(
                format!("can't attach volume {} at {at}", disk.volume),
                why,
            ));
        }
        let home = cluster.hosts.get(&disk.home)?;
        allow(&home, &disk.volume, at).await?;
        let nbd_addr = home.addresses.nbd_addr.clone();
        let target = format!("/v1/attachments/{}", disk.volume);
        host.volume.put::<Attachment>(&target, &Attach { nbd_addr }).await
    });
    try_join_all(attached).await.map(drop)
}
