//! A VM's disks at their homes and where the VM is: what staging and migrations both need.

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

/// Makes the disks reachable at a host, where they are not at home.
pub async fn attach(cluster: &Cluster, disks: &[PlacedDisk], at: &HostId) -> Result<(), Problem> {
    let host = catalog::reachable(cluster, at)?;
    let elsewhere = disks.iter().filter(|disk| disk.home != *at);
    let attached = elsewhere.map(async |disk| {
        // The index says that the VM is or comes here, so no new removal begins.
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
