//! A VM's disks at their homes and where the VM is: what staging and migrations both need.

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
    for disk in disks.iter().filter(|disk| disk.home != *at) {
        let nbd_addr = cluster.hosts.get(&disk.home)?.addresses.nbd_addr.clone();
        let target = format!("/v1/attachments/{}", disk.volume);
        host.volume.put::<Attachment>(&target, &Attach { nbd_addr }).await?;
    }
    Ok(())
}
