//! What a VM has printed on its serial console. Its host has that, and what it has printed at a host that it leaves is kept
//! here: it is shown before what it prints at the next one, and when the VM is off, until it starts again.

use perigee_model::{Problem, VmId};

use crate::cluster::Cluster;
use crate::console::{Kept, key};
use crate::records::start_of;
use crate::storage::volumes;

/// The end of what it has printed since it was started.
///
/// # Errors
/// If it runs at a host that does not answer or may not show it; if it is off and has printed nothing.
pub async fn read(cluster: &Cluster, vm: &VmId) -> Result<String, Problem> {
    let record = cluster.index.of_vm(vm);
    let kept = match &record {
        Some(record) => cluster.records.read::<Kept>(&key(&record.job.id)).await?,
        None => None,
    };
    let host = match super::host_of(cluster, vm).await {
        Ok(host) => volumes::reachable(cluster, &host)?,
        Err(off) => return kept.map(|kept| kept.text).ok_or(off),
    };
    let bytes = host.agent.get_bytes(&format!("/v1/vms/{vm}/console")).await?;
    let text = String::from_utf8_lossy(&bytes);
    let run = record.map(|record| start_of(&record, 0));
    let before = kept.filter(|kept| Some(kept.start.by_migration(0)) == run);
    Ok(before.map_or_else(String::new, |kept| kept.text) + &text)
}
