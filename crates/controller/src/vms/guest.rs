//! What qemu-guest-agent does in a VM that lives without a job: it says the guest's addresses, and holds its filesystems while a
//! snapshot is made. Programs: [`super::exec`]. Whatever it answers is the guest's word.

use perigee_model::guest_agent::Card;
use perigee_model::job::{ClusterImage, JobState};
use perigee_model::vm::AskGuestAgent;
use perigee_model::volume::Snapshot;
use perigee_model::{DiskRole, Problem, ProblemKind, VmId};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::records::JobRecord;
use crate::storage::{images, volumes};
use crate::vms;

/// Of the addresses that a guest says it has.
const ADDRESSES_MAX: usize = 16;

pub(super) async fn ask<T: DeserializeOwned>(
    cluster: &Cluster,
    vm: &VmId,
    execute: &str,
    arguments: Value,
) -> Result<T, Problem> {
    // No other host is asked where it is: one that is slow would keep a guest's filesystems standing still.
    let known = cluster.index.of_vm(vm).filter(|record| record.vm_started);
    let host = match known.and_then(|record| cluster.index.host_of(&record)) {
        Some(host) => host,
        None => vms::host_of(cluster, vm).await?,
    };
    let host = volumes::reachable(cluster, &host)?;
    let ask = AskGuestAgent { execute: execute.to_owned(), arguments };
    let answer: Value = host.agent_slow.post(&format!("/v1/vms/{vm}/guest-agent"), &ask).await?;
    serde_json::from_value(answer).map_err(|_| {
        let what = format!("can't understand the guest agent of {vm}");
        Problem::new(ProblemKind::Unsupported, what, format!("its answer to {execute} is odd"))
    })
}

/// # Errors
/// `NotFound`, or `Conflict` for a job's VM: it has no such channel.
pub(super) fn check_lasts(cluster: &Cluster, vm: &VmId) -> Result<(), Problem> {
    match cluster.index.of_vm(vm) {
        None => Err(vms::unknown(vm)),
        Some(record) if record.kind.is_persistent_vm() => Ok(()),
        Some(record) => {
            let why = format!("it is the VM of job {}, which has no guest agent", record.job.id);
            Err(Problem::conflict(format!("can't ask VM {vm}"), why))
        }
    }
}

/// The addresses that the guest says it has, without those of its loopback; none if no guest agent answers.
pub async fn addresses(cluster: &Cluster, vm: &VmId) -> Vec<String> {
    let asked = ask::<Vec<Card>>(cluster, vm, "guest-network-get-interfaces", json!({}));
    let cards = asked.await.unwrap_or_default().into_iter().filter(|card| card.name != "lo");
    let all = cards.flat_map(|card| card.ip_addresses);
    all.take(ADDRESSES_MAX).map(|address| address.ip_address.to_string()).collect()
}

/// Makes an image of the VM's root disk, also while it runs. If a guest agent answers, the guest's filesystems stand still
/// for that moment; otherwise the image is what a power cut would leave, and its note says so.
///
/// # Errors
/// `Conflict` if the VM has no disk yet, `Unavailable` while another one is made; others as for a volume's snapshot.
pub async fn snapshot(
    cluster: &Cluster,
    vm: &VmId,
    wanted: &Snapshot,
) -> Result<ClusterImage, Problem> {
    let record = cluster.index.of_vm(vm).ok_or_else(|| vms::unknown(vm))?;
    if !record.kind.is_persistent_vm() {
        return vms::save(cluster, vm, wanted).await;
    }
    let disks = record.kept().into_iter().flat_map(|kept| &kept.disks);
    let root = disks.into_iter().find(|disk| disk.role == DiskRole::Root);
    let made = record.kind.persistent_vm().is_some_and(|persistent| persistent.made);
    let Some(root) = root.filter(|_| made) else {
        let why = "its root disk is not made yet";
        return Err(Problem::conflict(format!("can't snapshot VM {vm}"), why));
    };
    // The end of one would let the filesystems go on while the other is made. Nor does a move begin from here on.
    let Some(_alone) = cluster.index.begin_snapshot(vm) else {
        let what = format!("can't snapshot VM {vm}");
        return Err(Problem::unavailable(what, "another snapshot of it is just being made")
            .next("try again in some seconds"));
    };
    // A guest that stands still for the snapshot would arrive at another host so.
    let is_moving = cluster.index.is_move_being_recorded(vm)
        || cluster.index.migrations_of(vm).iter().any(|moved| !moved.migration.state.is_final());
    if is_moving {
        let what = format!("can't snapshot VM {vm}");
        return Err(Problem::unavailable(what, "it is being moved to another host")
            .next("try again when it is there"));
    }
    // From the moment on that it has a host, its guest may run without having been recorded so.
    let is_off =
        |now: &JobRecord| now.job.state == JobState::Queued && now.restarts == record.restarts;
    if is_off(&record) {
        let made = images::snapshot_disk(cluster, root, wanted).await?;
        if cluster.index.of_vm(vm).is_some_and(|now| is_off(&now)) {
            return Ok(made);
        }
        return Ok(ClusterImage { note: in_doubt("it was started meanwhile"), ..made });
    }
    let frozen = ask::<u64>(cluster, vm, "guest-fsfreeze-freeze", json!({})).await;
    let made = images::snapshot_disk(cluster, root, wanted).await;
    let why = match frozen {
        Err(problem) => {
            Some(format!("the guest's filesystems did not stand still: {}", problem.why))
        }
        Ok(frozen) => {
            let thawed = ask::<u64>(cluster, vm, "guest-fsfreeze-thaw", json!({})).await;
            if let Err(problem) = &thawed {
                // Its host's agent does so too, after a while.
                tracing::warn!("VM {vm}: {problem}");
            }
            why_not_still(frozen, thawed)
        }
    };
    let note = why.map_or_else(String::new, |why| in_doubt(&why));
    Ok(ClusterImage { note, ..made? })
}

fn in_doubt(why: &str) -> String {
    format!("it may be no more than what a power cut would have left: {why}")
}

/// Why the filesystems of a guest that has said how many stood still may have gone on before they were let go on.
fn why_not_still(frozen: u64, thawed: Result<u64, Problem>) -> Option<String> {
    match (frozen, thawed) {
        (0, _) => Some("the guest has no filesystem that can stand still".to_owned()),
        (frozen, Ok(thawed)) if thawed >= frozen => None,
        // Its host lets them go on after a while, and a person may.
        (_, Ok(_)) => Some("the guest's filesystems went on before it was made".to_owned()),
        (_, Err(Problem { why, .. })) => {
            Some(format!("whether the guest's filesystems stood still is not known: {why}"))
        }
    }
}
