//! What a person changes of a VM without a job while it is off: its size, and what is on its root disk.
//!
//! A VM that is off has no driver, so its record is changed here. If its driver begins at the same time, one of the two fails
//! and is tried again.

use std::sync::Arc;

use perigee_model::job::{JobSpec, JobState, Vm};
use perigee_model::limits::JOB_DISK_BYTES;
use perigee_model::persistent_vm::{PersistentVm, ResizeVm};
use perigee_model::tenant::Running;
use perigee_model::volume::{BLOCK_BYTES, Resize, VolumeInfo};
use perigee_model::{DiskRole, ImageName, Problem, ProblemKind, VmId};

use super::persistent::record;
use crate::accounts::hold_volume;
use crate::cluster::Cluster;
use crate::records::{JobIntent, JobRecord, PlacedDisk, job_intent_key};
use crate::storage::{images, volumes};
use crate::vms;

/// # Errors
/// `Conflict` unless it is off, and nobody has asked for anything else.
pub(super) async fn check_off(
    cluster: &Cluster,
    what: &str,
    record: &JobRecord,
) -> Result<(), Problem> {
    let asked: Option<JobIntent> = cluster.records.read(&job_intent_key(&record.job.id)).await?;
    let asked = asked.unwrap_or_default();
    if record.ending.is_some() || asked.cancel {
        return Err(Problem::conflict(what, "it is being deleted"));
    }
    let is_off = |persistent: &PersistentVm| {
        let applied = asked.power.is_none_or(|(number, _)| number <= persistent.applied);
        !persistent.on && persistent.down.is_none() && applied
    };
    if record.kind.is_made_of_backup() {
        return Err(Problem::conflict(what, "its disks are being made of a backup")
            .next("wait until it can be started"));
    }
    let rests = record.job.state == JobState::Queued && record.job.host.is_none();
    if rests && record.kind.persistent_vm().is_some_and(is_off) {
        return Ok(());
    }
    let next = format!("stop it first: perigee vm stop {}", record.job.id);
    Err(Problem::conflict(what, "it is not stopped").next(next))
}

/// Changes the record of a VM that is off.
pub(super) async fn change(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    what: &str,
    change: impl FnOnce(&mut JobRecord) -> Result<(), Problem>,
) -> Result<Vm, Problem> {
    let id = record(cluster, vm).await?.job.id;
    let Some(mut own) = cluster.own_job(&id).await? else { return Err(vms::unknown(vm)) };
    check_off(cluster, what, &own.value).await?;
    change(&mut own.value)?;
    own.save().await.map_err(|problem| match problem.kind {
        ProblemKind::Internal => {
            Problem::conflict(what, "something else changed it at the same time").next("try again")
        }
        _ => problem,
    })?;
    cluster.drive_job(&id);
    vms::get(cluster, vm).await
}

pub(super) fn root_of(record: &JobRecord) -> Option<&PlacedDisk> {
    let disks = record.kept().into_iter().flat_map(|kept| &kept.disks);
    disks.into_iter().find(|disk| disk.role == DiskRole::Root)
}

/// # Errors
/// `Unavailable` while the root disk moves to another home.
fn check_stays(cluster: &Cluster, what: &str, record: &JobRecord) -> Result<(), Problem> {
    match root_of(record) {
        Some(root) if cluster.index.is_changing_home(&root.volume) => {
            let why = format!("its root disk {} is moving to another home", root.volume);
            Err(Problem::unavailable(what, why).next("try again in some seconds"))
        }
        _ => Ok(()),
    }
}

/// Makes the root disk of a VM that is off a clone of an image, at its next start. What was on it is lost.
///
/// # Errors
/// `Conflict` unless it is off; `NotFound` without such an image; `NoSpace` beyond the quota.
pub async fn restore(cluster: &Arc<Cluster>, vm: &VmId, image: ImageName) -> Result<Vm, Problem> {
    let what = format!("can't restore VM {vm} from {image}");
    let before = record(cluster, vm).await?;
    check_off(cluster, &what, &before).await?;
    check_stays(cluster, &what, &before)?;
    let size_bytes = images::image(cluster, &image).await?.size_bytes;
    let had_bytes = before.job.spec.root_bytes.unwrap_or_default();
    let root_bytes = had_bytes.max(size_bytes);
    JOB_DISK_BYTES
        .check(root_bytes)
        .map_err(|error| Problem::invalid(&what, format!("disk: {error}")))?;
    let _room = hold_volume(cluster, vm.as_str(), root_bytes - had_bytes).await?;
    change(cluster, vm, &what, |record| {
        let (number, job) = (record.restarts + 1, &mut record.job);
        job.spec.image = image;
        job.spec.root_bytes = Some(root_bytes);
        job.reason.clear();
        let disks = record.placement.as_mut().map(|placement| &mut placement.disks);
        let roots = disks.map(|disks| {
            disks.extract_if(.., |disk| disk.role == DiskRole::Root).collect::<Vec<_>>()
        });
        if let Some(persistent) = record.kind.persistent_vm_mut() {
            let roots = roots.unwrap_or_default().into_iter();
            persistent.dropped.extend(roots.map(|disk| (disk.home, disk.volume)));
            persistent.root_number = number;
            persistent.root_is_new = true;
            persistent.note.clear();
        }
        record.restarts = number;
        Ok(())
    })
    .await
}

/// With another amount the VM has no range any more, unless another one comes with it.
fn resize_spec(spec: &mut JobSpec, ask: &ResizeVm) {
    if let Some(cpus) = ask.cpus {
        (spec.cpus, spec.cpus_max) = (cpus, ask.cpus_max);
    }
    if let Some(memory_bytes) = ask.memory_bytes {
        (spec.memory_bytes, spec.memory_max_bytes) = (memory_bytes, ask.memory_max_bytes);
    }
}

/// Gives a VM another number of CPUs, another amount of memory, or a larger root disk. One that runs is changed as far as that can be
/// done ([`vms::live`]).
///
/// # Errors
/// `Conflict` if it is on its way between off and on; `Invalid` for what no VM, or not this tenant, can have.
pub async fn resize(cluster: &Arc<Cluster>, vm: &VmId, ask: ResizeVm) -> Result<Vm, Problem> {
    let what = format!("can't resize VM {vm}");
    let invalid = |why: String| Problem::invalid(&what, why);
    if ask.memory_max_bytes.is_some() && ask.memory_bytes.is_none() {
        return Err(invalid("memory: say the least too, as in 1GiB..4GiB".to_owned()));
    }
    if ask.cpus_max.is_some() && ask.cpus.is_none() {
        return Err(invalid("cpus: say the least too, as in 1..4".to_owned()));
    }
    let before = record(cluster, vm).await?;
    if before.vm_started {
        return vms::live::resize(cluster, vm, ask).await;
    }
    check_off(cluster, &what, &before).await?;
    check_stays(cluster, &what, &before)?;
    let mut spec = before.job.spec.clone();
    resize_spec(&mut spec, &ask);
    spec.check_vm(&what)?;
    let needs = Running { vms: 1, cpus: spec.cpus_most(), memory_bytes: spec.memory_bytes };
    if let Some(why) = cluster.accounts.quota_of(vm.as_str()).lacks(Running::default(), needs) {
        return Err(
            invalid(why).next("ask for less, or ask an admin for more (perigee tenant quota)")
        );
    }
    let had_bytes = spec.root_bytes.unwrap_or_default();
    let root_bytes = ask.disk_bytes.unwrap_or(had_bytes).max(1).next_multiple_of(BLOCK_BYTES);
    let root_bytes = if ask.disk_bytes.is_none() { had_bytes } else { root_bytes };
    JOB_DISK_BYTES.check(root_bytes).map_err(|error| invalid(format!("disk: {error}")))?;
    if root_bytes < had_bytes {
        return Err(invalid("disk: it can only grow".to_owned())
            .next("make a smaller VM, and copy what is on this one"));
    }
    let _room = hold_volume(cluster, vm.as_str(), root_bytes - had_bytes).await?;
    let is_made = |persistent: &PersistentVm| persistent.has(DiskRole::Root);
    if let Some(root) = root_of(&before)
        && before.kind.persistent_vm().is_some_and(is_made)
        && root_bytes > had_bytes
    {
        let home = volumes::reachable(cluster, &root.home)?;
        let path = format!("/v1/volumes/{}/resize", root.volume);
        // A disk that is larger than its record says harms nobody, so this comes first.
        let larger = Resize { size_bytes: root_bytes, shrink: false };
        let _: VolumeInfo = home.volume.post(&path, &larger).await?;
    }
    change(cluster, vm, &what, |record| {
        // Somebody else may have changed the rest meanwhile.
        let to = &mut record.job.spec;
        resize_spec(to, &ask);
        if ask.disk_bytes.is_some() {
            to.root_bytes = to.root_bytes.max(Some(root_bytes));
        }
        Ok(())
    })
    .await
}
