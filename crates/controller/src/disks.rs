//! Attaches a VM's disks. Both staging and migrations need this.

use futures_util::future::try_join_all;
use perigee_model::volume::{Attach, Attachment, EpochIssued};
use perigee_model::{Epoch, HostId, Problem};

use crate::catalog;
use crate::cluster::{Cluster, HostLink};
use crate::records::PlacedDisk;

pub async fn issue_epoch(home: &HostLink, disk: &PlacedDisk) -> Result<Epoch, Problem> {
    let target = format!("/v1/volumes/{}/epoch/issue", disk.volume);
    Ok(home.volume.post::<EpochIssued>(&target, &()).await?.epoch)
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
        let nbd_addr = cluster.hosts.get(&disk.home)?.addresses.nbd_addr.clone();
        let target = format!("/v1/attachments/{}", disk.volume);
        host.volume.put::<Attachment>(&target, &Attach { nbd_addr }).await
    });
    try_join_all(attached).await.map(drop)
}
