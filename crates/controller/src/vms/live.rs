//! What a person changes of a VM while it runs: more vCPUs, less memory, a larger root disk.
//!
//! Each change is made at the host, and then the VM's driver records it, which alone writes the VM's record. While it is made, the VM is neither
//! moved nor changed otherwise. It may be stopped or deleted, or begin anew elsewhere: so a change names the run that it means, and both the
//! host and the driver leave another run alone. What the guest has to do for it, its guest agent is asked for; where there is none, the answer says so.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::Vm;
use perigee_model::limits::{CPUS, JOB_DISK_BYTES, MEMORY_BYTES};
use perigee_model::persistent_vm::{ExecInVm, PersistentVm, ResizeVm};
use perigee_model::tenant::{Running, tenant_of};
use perigee_model::vm::{ChangeVm, VmChanged};
use perigee_model::volume::{BLOCK_BYTES, Resize, VolumeInfo};
use perigee_model::{DiskRole, HostId, Problem, ProblemKind, VmId};

use super::change::root_of;
use crate::accounts::hold_volume;
use crate::cluster::{Cluster, Hold, HostLink, capacity};
use crate::records::{JobIntent, JobRecord, Live, job_intent_key, start_of, vm_of};
use crate::storage::volumes;
use crate::vms;

/// How long the VM's driver may take to record a change.
const RECORD_PATIENCE: Duration = Duration::from_secs(30);
/// How long a program may take in the guest.
const GUEST_PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// cloud-init does this at each boot, whatever the partition table and the filesystem are.
const GROW_FILESYSTEM: &str = "command -v cloud-init >/dev/null || exit 127; \
    cloud-init single --name growpart --frequency always && cloud-init single --name resizefs --frequency always";

/// A guest's kernel finds a new vCPU after a moment, and many guests leave it off.
fn use_cpus(count: u32) -> String {
    format!(
        "tries=0; while [ $tries -lt 50 ]; do \
           for cpu in /sys/devices/system/cpu/cpu[0-9]*/online; do [ \"$(cat $cpu)\" = 1 ] || echo 1 >$cpu; done; \
           [ \"$(grep -c ^processor /proc/cpuinfo)\" -ge {count} ] && exit 0; \
           tries=$((tries + 1)); sleep 0.2; \
         done; exit 1"
    )
}

/// # Errors
/// `Invalid` or `Conflict` before anything is changed; what a host says where that fails later.
pub async fn resize(cluster: &Arc<Cluster>, vm: &VmId, ask: ResizeVm) -> Result<Vm, Problem> {
    let what = format!("can't resize VM {vm} while it runs");
    let (_held, before, host) = begin(cluster, vm, &what).await?;
    let at = volumes::reachable(cluster, &host)?;
    let spec = &before.job.spec;
    if let Some(cpus) = ask.cpus {
        if spec.cpus_max.is_some() || ask.cpus_max.is_some() {
            let why = "cpus: a VM that runs keeps its range, or that it has none";
            return Err(Problem::conflict(&what, why).next("stop it first"));
        }
        check_cpus(cluster, &what, &before, &host, cpus)?;
    }
    if let Some(bytes) = ask.memory_bytes {
        let is_range = spec.memory_max_bytes.is_some() || ask.memory_max_bytes.is_some();
        check_memory(&what, bytes, spec.memory_bytes, is_range)?;
    }
    let mut notes = Vec::new();
    if let Some(bytes) = ask.disk_bytes {
        notes.extend(grow_root(cluster, &what, vm, &before, &at, bytes).await?);
    }
    if let Some(count) = ask.cpus {
        let size = |cpus| ResizeVm { cpus: Some(cpus), ..ResizeVm::default() };
        // They count before they are there.
        note(cluster, &before, size(count)).await?;
        let done = match check_room(cluster, &what, &before, &host) {
            Ok(()) => change(&at, &before, &ChangeVm::Cpus { count }).await.map(drop),
            full => full,
        };
        if let Err(problem) = done {
            // Without an answer some, or all, may be there.
            let is_known = problem.kind != ProblemKind::Unavailable;
            if is_known && note(cluster, &before, size(spec.cpus)).await.is_ok()
                || now(cluster, &before).is_none()
            {
                return Err(problem);
            }
            return Err(problem.next(format!("{count} vCPUs still count for it: resize it again")));
        }
        let why = in_guest(cluster, vm, &use_cpus(count)).await;
        notes.extend(why.map(|why| format!("the guest may leave its new vCPUs unused: {why}")));
    }
    if let Some(bytes) = ask.memory_bytes {
        let changed = change(&at, &before, &ChangeVm::Memory { bytes }).await?;
        note(cluster, &before, ResizeVm { memory_bytes: Some(bytes), ..ResizeVm::default() })
            .await?;
        let has = changed.memory_bytes.filter(|has| *has > bytes.saturating_add(1 << 20));
        notes.extend(has.map(|has| {
            let mib = has >> 20;
            format!("its guest still has {mib} MiB, and gives the rest back when it can")
        }));
    }
    let mut shown = vms::get(cluster, vm).await?;
    if !notes.is_empty() {
        shown.reason = notes.join("; ");
    }
    Ok(shown)
}

fn check_cpus(
    cluster: &Cluster,
    what: &str,
    before: &JobRecord,
    host: &HostId,
    cpus: u32,
) -> Result<(), Problem> {
    CPUS.check(cpus).map_err(|error| Problem::invalid(what, format!("cpus: {error}")))?;
    let Some(more) = cpus.checked_sub(before.job.spec.cpus) else {
        let why = "cpus: a guest that runs keeps its vCPUs";
        return Err(Problem::conflict(what, why).next("stop it first"));
    };
    let tenant = tenant_of(before.job.id.as_str());
    let used = cluster.index.taken().running.get(tenant).copied().unwrap_or_default();
    let needs = Running { vms: 0, cpus: more, memory_bytes: 0 };
    let quota = cluster.accounts.quota_of(before.job.id.as_str());
    if let Some(why) = quota.lacks(used, needs) {
        return Err(
            Problem::no_space(what, why).next("ask an admin for more (perigee tenant quota)")
        );
    }
    let Some(report) = cluster.hosts.report(host) else {
        return Err(Problem::unavailable(what, "its host has not reported yet"));
    };
    let mut free = capacity(&report);
    free.take(cluster.index.used().get(host).map(|used| used.demand).unwrap_or_default());
    if more > free.cpus {
        let why = format!("cpus: only {} more are free at its host", free.cpus);
        return Err(Problem::no_space(what, why).next("move it to another host first"));
    }
    Ok(())
}

/// Something else may have got the same vCPUs meanwhile: whoever looks when both count finds too many.
fn check_room(cluster: &Cluster, what: &str, of: &JobRecord, host: &HostId) -> Result<(), Problem> {
    let id = of.job.id.as_str();
    let has = cluster.index.taken().running.get(tenant_of(id)).copied().unwrap_or_default();
    if let Some(why) = cluster.accounts.quota_of(id).lacks(has, Running::default()) {
        return Err(Problem::no_space(what, why).next("try again: another VM has just got them"));
    }
    let Some(report) = cluster.hosts.report(host) else {
        return Err(Problem::unavailable(what, "its host has not reported yet"));
    };
    let used = cluster.index.used().get(host).map(|used| used.demand).unwrap_or_default();
    if used.cpus <= capacity(&report).cpus {
        return Ok(());
    }
    let why = "cpus: another VM has just got those that were free at its host";
    Err(Problem::no_space(what, why).next("move it to another host first"))
}

fn check_memory(what: &str, bytes: u64, started_with: u64, is_range: bool) -> Result<(), Problem> {
    MEMORY_BYTES
        .check(bytes)
        .map_err(|error| Problem::invalid(what, format!("memory: {error}")))?;
    if is_range {
        let why = "memory: a VM that runs keeps its range, or that it has none";
        return Err(Problem::conflict(what, why).next("stop it first"));
    }
    if bytes <= started_with {
        return Ok(());
    }
    let why = format!("memory: it was started with {} MiB, and has no more", started_with >> 20);
    Err(Problem::conflict(what, why).next("stop it first"))
}

/// Returns what the guest has not done.
async fn grow_root(
    cluster: &Arc<Cluster>,
    what: &str,
    vm: &VmId,
    before: &JobRecord,
    at: &HostLink,
    bytes: u64,
) -> Result<Option<String>, Problem> {
    let had_bytes = before.job.spec.root_bytes.unwrap_or_default();
    let size_bytes = bytes.max(1).next_multiple_of(BLOCK_BYTES);
    let invalid = |why: String| Problem::invalid(what, format!("disk: {why}"));
    JOB_DISK_BYTES.check(size_bytes).map_err(|error| invalid(error.to_string()))?;
    if size_bytes < had_bytes {
        return Err(invalid("it can only grow".to_owned())
            .next("make a smaller VM, and copy what is on this one"));
    }
    let Some(root) = root_of(before) else {
        return Err(Problem::internal(what, "it runs without a root disk"));
    };
    if root.home != at.id {
        let why = format!("disk: {} is at {}, and the VM at {}", root.volume, root.home, at.id);
        return Err(Problem::conflict(what, why).next(format!(
            "move it to its VM (perigee volume move {} {}), or stop the VM",
            root.volume, at.id
        )));
    }
    let room = hold_volume(cluster, vm.as_str(), size_bytes - had_bytes).await?;
    let size = |bytes| ResizeVm { disk_bytes: Some(bytes), ..ResizeVm::default() };
    // It counts before it is there: wherever this is stopped, no disk is larger than what counts.
    note(cluster, before, size(size_bytes)).await?;
    drop(room);
    let larger = Resize { size_bytes, shrink: false };
    let path = format!("/v1/volumes/{}/resize", root.volume);
    if let Err(problem) = at.volume.post::<VolumeInfo>(&path, &larger).await {
        if problem.kind != ProblemKind::Unavailable && had_bytes > 0 {
            note(cluster, before, size(had_bytes)).await?;
        }
        return Err(problem);
    }
    change(at, before, &ChangeVm::GrowDisk { role: DiskRole::Root, size_bytes }).await?;
    let why = in_guest(cluster, vm, GROW_FILESYSTEM).await;
    Ok(why.map(|why| {
        format!("the disk is larger, and the guest's filesystem grows at its next boot: {why}")
    }))
}

/// As [`crate::cluster::Index::begin_change`], once all that this run of the VM has got before is recorded: of each kind of change only the last
/// one is kept until then.
///
/// # Errors
/// `Conflict` if it can't be changed now, `NotFound` if it was deleted, `Unavailable` if an earlier change is not recorded yet.
pub(super) async fn begin<'a>(
    cluster: &'a Arc<Cluster>,
    vm: &VmId,
    what: &str,
) -> Result<(Hold<'a>, Arc<JobRecord>, HostId), Problem> {
    let (held, before, host) =
        cluster.index.begin_change(vm).map_err(|why| Problem::conflict(what, why))?;
    let asked: Option<JobIntent> = cluster.records.read(&job_intent_key(&before.job.id)).await?;
    let (asked, run) = (asked.unwrap_or_default(), start_of(&before, 0));
    let sized = asked.size.filter(|last| last.run == run).map_or(0, |last| last.number);
    let plugged = asked.volume.filter(|last| last.run == run).map_or(0, |last| last.number);
    until_noted(cluster, &before, |has| has.sized >= sized && has.plugged >= plugged).await?;
    check_run(cluster, &before)?;
    let gone = || Problem::not_found(what, "it was deleted meanwhile");
    let before = now(cluster, &before).ok_or_else(gone)?;
    Ok((held, before, host))
}

/// Changes the VM at its host, in the run of this record.
pub(crate) async fn change(
    at: &HostLink,
    of: &JobRecord,
    ask: &ChangeVm,
) -> Result<VmChanged, Problem> {
    let path = format!("/v1/vms/{}/change?{}", vm_of(&of.job.id), start_of(of, 0).query());
    at.agent_slow.post(&path, ask).await
}

/// Has the VM's driver record its new size.
async fn note(cluster: &Arc<Cluster>, of: &JobRecord, size: ResizeVm) -> Result<(), Problem> {
    check_run(cluster, of)?;
    let run = start_of(of, 0);
    let next = |old: Option<JobIntent>| {
        let old = old.unwrap_or_default();
        let number = old.size.as_ref().map_or(1, |last| last.number + 1);
        JobIntent { size: Some(Live { number, change: size, run }), ..old }
    };
    let asked = cluster.records.update(&job_intent_key(&of.job.id), next).await?;
    let number = asked.size.map_or(0, |size| size.number);
    until_noted(cluster, of, |persistent| persistent.sized >= number).await
}

/// What was found of a VM in one run says nothing of it in another one, nor of a later VM of its name.
///
/// # Errors
/// `NotFound` if it was deleted; `Conflict` if it has left its host, or does so now.
pub(super) fn check_run(cluster: &Cluster, of: &JobRecord) -> Result<(), Problem> {
    let what = || format!("can't record how VM {} was changed", of.job.id);
    match now(cluster, of) {
        None => Err(Problem::not_found(what(), "it was deleted meanwhile")),
        Some(now) if now.is_in_run(start_of(of, 0)) => Ok(()),
        Some(_) => {
            let why = "it is being stopped or deleted, or has left its host meanwhile";
            Err(Problem::conflict(what(), why).next("try again when it runs"))
        }
    }
}

/// The record of the same VM as it is now; `None` if it was deleted.
pub(super) fn now(cluster: &Cluster, of: &JobRecord) -> Option<Arc<JobRecord>> {
    let is_it = |now: &Arc<JobRecord>| now.job.submitted_ms == of.job.submitted_ms;
    cluster.index.job(&of.job.id).filter(is_it)
}

/// Waits until the VM's driver has recorded what was asked for.
///
/// # Errors
/// As [`check_run`]: then it never does. `Unavailable` if it has not come to it yet.
pub(super) async fn until_noted(
    cluster: &Arc<Cluster>,
    of: &JobRecord,
    is_recorded: impl Fn(&PersistentVm) -> bool,
) -> Result<(), Problem> {
    until(cluster, of, is_recorded, || check_run(cluster, of)).await
}

/// Waits until the VM's driver has begun what was asked for.
///
/// # Errors
/// `NotFound` if it was deleted. `Unavailable` if the driver has not come to it yet.
pub(super) async fn until_heeded(
    cluster: &Arc<Cluster>,
    of: &JobRecord,
    is_heeded: impl Fn(&PersistentVm) -> bool,
) -> Result<(), Problem> {
    until(cluster, of, is_heeded, || is_there(cluster, of)).await
}

fn is_there(cluster: &Cluster, of: &JobRecord) -> Result<(), Problem> {
    let what = format!("can't change VM {}", of.job.id);
    let gone = || Problem::not_found(what, "it was deleted meanwhile");
    now(cluster, of).map(drop).ok_or_else(gone)
}

/// `may_come` says why it never will.
async fn until(
    cluster: &Arc<Cluster>,
    of: &JobRecord,
    is_recorded: impl Fn(&PersistentVm) -> bool,
    may_come: impl Fn() -> Result<(), Problem>,
) -> Result<(), Problem> {
    cluster.drive_job(&of.job.id);
    let begun = Instant::now();
    loop {
        // This is looked at first: once it is over, nothing more is recorded.
        let may_come = may_come();
        let record = now(cluster, of);
        if record.is_some_and(|now| now.kind.persistent_vm().is_some_and(&is_recorded)) {
            return Ok(());
        }
        may_come?;
        if begun.elapsed() > RECORD_PATIENCE {
            let what = format!("can't record how VM {} was changed", of.job.id);
            return Err(Problem::unavailable(what, "its driver has not come to it")
                .next("it is recorded as soon as that goes on"));
        }
        tokio::time::sleep(LOOK_EVERY.min(cluster.timing.poll)).await;
    }
}

/// Runs this in the guest's shell. Returns why it was not done; `None` if it was.
async fn in_guest(cluster: &Cluster, vm: &VmId, script: &str) -> Option<String> {
    let command = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    let ended = async {
        let wanted = ExecInVm { command, ..ExecInVm::default() };
        let begun = vms::exec::start(cluster, vm, wanted).await?;
        loop {
            let status = vms::exec::status(cluster, vm, begun.pid).await?;
            if status.exited {
                return Ok::<_, Problem>(status);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    match tokio::time::timeout(GUEST_PATIENCE, ended).await {
        Ok(Ok(status)) => match status.exit_code {
            Some(0) => None,
            Some(127) => Some("it has no cloud-init".to_owned()),
            _ => Some("what was asked of the guest has failed there".to_owned()),
        },
        Ok(Err(problem)) => Some(problem.why),
        Err(_) => Some(format!("it takes longer than {} s", GUEST_PATIENCE.as_secs())),
    }
}
