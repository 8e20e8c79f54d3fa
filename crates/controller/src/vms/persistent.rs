//! Makes, starts, stops and deletes VMs that live without a job. Each request is recorded; the VM's driver carries it out
//! (`jobs/persistent_vm.rs`).

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::job::{Access, JobSpec, JobState, JobVolume, Restart, Vm};
use perigee_model::limits::{JOB_DISK_BYTES, PERSISTENT_VMS};
use perigee_model::persistent_vm::{NewVm, PersistentVm, PowerRequest};
use perigee_model::spec::{check_beside, check_fstab_mount, check_job_name};
use perigee_model::tenant::{Running, tenant_of};
use perigee_model::{JobId, LeaveSite, Problem, ProblemKind, VmId};

use super::live;
use crate::accounts::hold_volume;
use crate::cluster::Cluster;
use crate::guest::user_data;
use crate::records::{JobIntent, JobRecord, Kind, job_intent_key};
use crate::storage::{images, unknown, volumes};
use crate::{cleaner, jobs, networks, vms};

/// Makes a VM. Unless it is to be stopped at first, it starts as soon as a host has room.
///
/// # Errors
/// `Invalid`, `NotFound` or `NoSpace`, with the name of the field; `Conflict` if the name is taken.
pub async fn create(cluster: &Arc<Cluster>, new: NewVm, owner: String) -> Result<Vm, Problem> {
    let name = new.name.clone();
    check_name(&name)?;
    let image = images::image(cluster, &new.image).await?;
    let root_bytes = new.disk_bytes.unwrap_or(image.size_bytes);
    if root_bytes < image.size_bytes {
        let why = format!("disk: it is smaller than image {}", new.image);
        return Err(Problem::invalid(format!("can't make VM {name}"), why));
    }
    for volume in &new.volumes {
        volumes::find(cluster, &volume.volume).await?;
    }
    let record = new_record(cluster, new, owner, root_bytes).await?;
    let _room = hold_volume(cluster, name.as_str(), root_bytes).await?;
    jobs::add(cluster, record).await?;
    vms::get(cluster, &name).await
}

fn check_name(name: &VmId) -> Result<(), Problem> {
    let invalid = |why: String| Problem::invalid(format!("can't make VM {name}"), why);
    if looks_like_a_job(name.as_str()) {
        let why = format!("{name} could be the id of a job, or of one of its runs");
        return Err(invalid(why).next("choose another name"));
    }
    check_job_name(name.as_str()).map_err(|why| invalid(why.to_string()))
}

/// The record of a VM that is to be made with a root disk of this size, after all has been checked but whether its image and its volumes are there.
///
/// # Errors
/// As [`create`].
pub(super) async fn new_record(
    cluster: &Cluster,
    new: NewVm,
    owner: String,
    root_bytes: u64,
) -> Result<JobRecord, Problem> {
    let name = new.name.clone();
    let what = || format!("can't make VM {name}");
    let invalid = |why: String| Problem::invalid(what(), why);
    check_name(&name)?;
    JOB_DISK_BYTES.check(root_bytes).map_err(|error| invalid(format!("disk: {error}")))?;
    let spec = job_spec(&new, owner, root_bytes)?;
    spec.check_vm(&what())?;
    networks::check(cluster, &spec).await?;
    new.labels.check(&what())?;
    new.cloud_init.check(&what())?;
    new.cloud_init.user_data.as_deref().map(user_data::check).transpose()?;
    let needs = Running { vms: 1, cpus: spec.cpus_most(), memory_bytes: spec.memory_bytes };
    if let Some(why) = cluster.accounts.quota_of(name.as_str()).lacks(Running::default(), needs) {
        return Err(
            invalid(why).next("ask for less, or ask an admin for more (perigee tenant quota)")
        );
    }
    let tenant = tenant_of(name.as_str());
    let is_its = |record: &&Arc<JobRecord>| {
        record.kind.is_persistent_vm() && tenant_of(record.job.id.as_str()) == tenant
    };
    let count = cluster.unfinished_jobs().iter().filter(is_its).count();
    PERSISTENT_VMS.check(count + 1).map_err(|error| {
        Problem::new(ProblemKind::NoSpace, what(), error).next("delete VMs that nobody needs")
    })?;
    let id = id_of(&name)?;
    forget_deleted(cluster, &id).await?;
    let untouched = unknown::check_untouched(cluster, &name).await;
    untouched.map_err(|problem| Problem { what: what(), ..problem })?;
    let mut record = jobs::new_record(id, spec);
    record.job.vm = Some(name.clone());
    record.kind = Kind::PersistentVm(PersistentVm {
        on: !new.stopped,
        cloud_init: new.cloud_init,
        firmware: new.firmware,
        hardware: new.hardware,
        labels: new.labels,
        mounts: new.volumes.into_iter().map(|volume| volume.mount).collect(),
        ..PersistentVm::default()
    });
    Ok(record)
}

/// A VM's spec as that of a job without a command: placing and staging need nothing else.
pub(super) fn job_spec(new: &NewVm, owner: String, root_bytes: u64) -> Result<JobSpec, Problem> {
    let mut volumes: Vec<JobVolume> = Vec::new();
    for volume in &new.volumes {
        let access = if volume.read_only { Access::Read } else { Access::Write };
        // As a job's volume each needs a place of its own.
        let mount = volume.mount.clone().unwrap_or(format!("/mnt/{}", volume.volume));
        check_fstab_mount(&mount)
            .map_err(|why| Problem::invalid(format!("can't make VM {}", new.name), why))?;
        let next = JobVolume { volume: volume.volume.clone(), mount, access, ranks: Vec::new() };
        check_beside(&next, &volumes)
            .map_err(|why| Problem::invalid(format!("can't make VM {}", new.name), why))?;
        volumes.push(next);
    }
    Ok(JobSpec {
        name: new.name.to_string(),
        image: new.image.clone(),
        command: Vec::new(),
        env: BTreeMap::new(),
        cpus: new.cpus,
        memory_bytes: new.memory_bytes,
        cpus_max: new.cpus_max,
        memory_max_bytes: new.memory_max_bytes,
        root_bytes: Some(root_bytes),
        output_bytes: 0,
        volumes,
        outputs: Vec::new(),
        outputs_to: None,
        keep_outputs_s: None,
        publish: new.publish.clone(),
        start: new.start.clone(),
        may_migrate: new.may_migrate,
        writes: LeaveSite::Never,
        ranks: LeaveSite::Never,
        timeout_s: None,
        has_output_room: false,
        stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
        oom_kill: Default::default(),
        inputs: None,
        owner,
        priority: 0,
        restart: if new.restart_elsewhere { Restart::OnHostFailure } else { Restart::Never },
        network: new.network.clone(),
        count: 1,
        mpi: false,
        firmware: Default::default(),
        tpm: false,
        rules: new.rules.clone(),
        money: Default::default(),
    })
}

/// The ids of jobs end with a number of four digits or more, and the volumes of their later runs have `-r1` and so on in
/// their names. `deleted` is where the cleaner keeps volumes.
fn looks_like_a_job(name: &str) -> bool {
    let end = name.rsplit_once('-').map_or("", |(_, end)| end);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_run = end.strip_prefix('r').is_some_and(is_number);
    let is_member = perigee_model::gang::of_member(name).is_some();
    is_run || is_member || (end.len() >= 4 && is_number(end)) || name == "deleted"
}

pub(super) fn id_of(vm: &VmId) -> Result<JobId, Problem> {
    JobId::new(vm.as_str()).map_err(|e| Problem::invalid(format!("VM {vm}"), e))
}

/// An earlier VM of this name was deleted, and its record may still be there, or what somebody who came late has asked of it.
pub(super) async fn forget_deleted(cluster: &Cluster, id: &JobId) -> Result<(), Problem> {
    let record = match jobs::any_record(cluster, id).await {
        Err(problem) if problem.kind == ProblemKind::NotFound => {
            return cluster.records.remove(&job_intent_key(id)).await;
        }
        record => record?,
    };
    if !record.kind.is_persistent_vm() || !record.job.state.is_final() {
        return Ok(());
    }
    if cleaner::is_left(cluster, id).await? {
        let why = "an earlier VM with this name was deleted, and parts of it stand on a host that does not answer";
        return Err(Problem::conflict(format!("can't make VM {id}"), why)
            .next("choose another name, or bring the host back"));
    }
    jobs::erase(cluster, &record).await
}

/// # Errors
/// `NotFound` if there is no VM with this name; `Conflict` if it is a job's.
pub(super) async fn record(cluster: &Cluster, vm: &VmId) -> Result<JobRecord, Problem> {
    let Some(record) = cluster.index.of_vm(vm) else {
        unknown::check_untouched(cluster, vm).await?;
        return Err(vms::unknown(vm));
    };
    match record.kind {
        Kind::PersistentVm(_) => Ok(JobRecord::clone(&record)),
        Kind::Job | Kind::Member(_) | Kind::Gang(_) => {
            let why = format!("it is the VM of job {}, which starts and ends it", record.job.id);
            Err(Problem::conflict(format!("can't change VM {vm}"), why))
        }
    }
}

/// Records what a person asks of a VM without a job, and has it carried out.
///
/// # Errors
/// `NotFound` if there is none; `Conflict` if it is a job's or is being deleted.
pub async fn request_power(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    request: PowerRequest,
) -> Result<Vm, Problem> {
    let record = not_deleted(cluster, vm).await?;
    let next = |old: Option<JobIntent>| {
        let old = old.unwrap_or_default();
        let number = old.power.map_or(1, |(number, _)| number + 1);
        JobIntent { power: Some((number, request)), ..old }
    };
    let asked = cluster.records.update(&job_intent_key(&record.job.id), next).await?;
    // Before that it would still be shown as it was, and whoever looks at it could take that for the end.
    let number = asked.power.map_or(0, |(number, _)| number);
    live::until_heeded(cluster, &record, |persistent| persistent.applied >= number).await?;
    vms::get(cluster, vm).await
}

/// The record of a VM without a job, for something that a person asks of it.
///
/// # Errors
/// As [`record`]; `Conflict` if the VM is being deleted.
pub(super) async fn not_deleted(cluster: &Cluster, vm: &VmId) -> Result<JobRecord, Problem> {
    let record = record(cluster, vm).await?;
    let asked: Option<JobIntent> = cluster.records.read(&job_intent_key(&record.job.id)).await?;
    if record.ending.is_some() || asked.is_some_and(|intent| intent.cancel) {
        return Err(Problem::conflict(format!("can't change VM {vm}"), "it is being deleted"));
    }
    Ok(record)
}

/// Deletes a VM with its own disks. Its volumes stay.
///
/// # Errors
/// `Conflict` while it runs, unless `force` says that it is stopped at once.
pub async fn delete(cluster: &Cluster, vm: &VmId, force: bool) -> Result<(), Problem> {
    let record = record(cluster, vm).await?;
    let is_off = record.job.state == JobState::Queued && record.job.host.is_none();
    if !is_off && !force {
        return Err(Problem::conflict(format!("can't delete VM {vm}"), "it is not stopped").next(
            format!("stop it first: perigee vm stop {vm}, or: perigee vm delete {vm} --force"),
        ));
    }
    let id = &record.job.id;
    let cancel = |old: Option<JobIntent>| JobIntent { cancel: true, ..old.unwrap_or_default() };
    cluster.records.update(&job_intent_key(id), cancel).await?;
    cluster.drive_job(id);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_a_job_may_get_is_no_vms() {
        for name in ["hello-0001", "a-12345", "x-y-0000", "db-r1", "db-r12", "deleted"] {
            assert!(looks_like_a_job(name), "{name}");
        }
        for name in ["web", "web-1", "web-001", "debian-12", "0001", "a-000x", "a-r", "a-rx1", "r1"]
        {
            assert!(!looks_like_a_job(name), "{name}");
        }
    }
}
