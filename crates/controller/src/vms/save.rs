//! The root disk of a VM that runs becomes an image.

use perigee_model::job::ClusterImage;
use perigee_model::volume::Snapshot;
use perigee_model::{DiskRole, Problem, VmId};

use crate::cluster::Cluster;
use crate::storage::images::snapshot_disk;
use crate::vms;

/// Makes an image of the root disk of a job's VM while it runs: what the disk would have after a power cut at this moment.
/// The guest is asked to write what it has in memory to the disk before.
///
/// # Errors
/// `Conflict` if it does not run, as `take_name`, or if the quota has no room.
pub async fn save(cluster: &Cluster, vm: &VmId, ask: &Snapshot) -> Result<ClusterImage, Problem> {
    let what = format!("can't save the root disk of {vm} as {}", ask.image);
    let job = cluster.index.of_vm(vm).ok_or_else(|| vms::unknown(vm))?;
    let disks = job.placement.iter().flat_map(|placement| &placement.disks);
    let root = disks.clone().find(|disk| disk.role == DiskRole::Root);
    let (Some(root), true) = (root, job.vm_started && job.ending.is_none()) else {
        return Err(Problem::conflict(what, "its VM does not run")
            .next(format!("`perigee job status {}` says how far it is", job.job.id)));
    };
    let mut note = String::new();
    if let Some(host) = &job.job.host {
        let path = format!("/v1/vms/{vm}/sync");
        let synced = async {
            cluster.hosts.get(host)?.agent_slow.post::<()>(&path, &serde_json::json!({})).await
        };
        if let Err(problem) = synced.await {
            let why = problem.why;
            note = format!("it lacks what the guest has not written to its disk yet: {why}");
        }
    }
    Ok(ClusterImage { note, ..snapshot_disk(cluster, root, ask).await? })
}
