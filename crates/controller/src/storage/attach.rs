//! Attaches a VM's disks. Both staging and migrations need this.

use futures_util::future::try_join_all;
use perigee_model::volume::{Attach, Attachment, EpochIssued};
use perigee_model::{Epoch, HostId, Problem};

use crate::admissions;
use crate::cluster::{Cluster, HostLink};
use crate::records::PlacedDisk;
use crate::storage::volumes;

/// Asks the volume's home for a new epoch, which no session has had before.
///
/// # Errors
/// If the home does not answer or has no such volume.
pub async fn issue_epoch(home: &HostLink, disk: &PlacedDisk) -> Result<Epoch, Problem> {
    let target = format!("/v1/volumes/{}/epoch/issue", disk.volume);
    Ok(home.volume.post::<EpochIssued>(&target, &()).await?.epoch)
}

/// Attaches the disks at a host, except those whose home it is.
pub async fn attach(cluster: &Cluster, disks: &[PlacedDisk], at: &HostId) -> Result<(), Problem> {
    let host = volumes::reachable(cluster, at)?;
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
        admissions::allow(&home, &disk.volume, at).await?;
        // What its old home let in when the move began is copied to the new one, and this may be later.
        let moving = cluster.index.volume_move(&disk.volume).map(|last| last.view.clone());
        if let Some(moving) = moving.filter(|shown| !shown.state.is_final() && shown.to != *at)
            && let Ok(new) = cluster.hosts.get(&moving.to)
            && let Err(problem) = admissions::allow(&new, &disk.volume, at).await
        {
            tracing::debug!(
                "{at} is let in to volume {} when it has moved: {problem}",
                disk.volume
            );
        }
        let nbd_addr = home.addresses.nbd_addr.clone();
        let target = format!("/v1/attachments/{}", disk.volume);
        host.volume.put::<Attachment>(&target, &Attach { nbd_addr }).await
    });
    try_join_all(attached).await.map(drop)
}
