//! Volumes that come to a VM without a job and go from it, also while it runs.
//!
//! Of a VM that runs, the volume is recorded first, so nobody else writes it, and then its host's QEMU gets it. It is taken from QEMU before it
//! is recorded to have gone. Wherever the controller is stopped between the two, the VM has the volume in its list, and starts with it next.
//! Of a VM that is taken down meanwhile, the cleaner removes from its host what it had, and waits with the volume until this here has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::{Access, JobVolume, Vm};
use perigee_model::limits::JOB_VOLUMES;
use perigee_model::persistent_vm::{AttachVolume, DetachVolume, PersistentVm};
use perigee_model::spec::{check_beside, check_mount};
use perigee_model::vm::{ChangeVm, Disk, Machine};
use perigee_model::volume::VolumeInfo;
use perigee_model::{DiskRole, HostId, LeaveSite, Problem, ProblemKind, VmId, VolumeName};

use super::persistent::record;
use super::{change, live};
use crate::cluster::{Cluster, HostLink};
use crate::jobs::take_over;
use crate::records::{
    JobIntent, JobRecord, Live, PlacedDisk, VolumeChange, job_intent_key, start_of,
};
use crate::storage::{attach, leave_site, volumes};
use crate::vms;

/// How long a host is asked to attach a volume.
const ATTACH_PATIENCE: Duration = Duration::from_secs(10);

/// Gives a VM a further volume.
///
/// # Errors
/// `NotFound` without such a volume; `Conflict` if somebody else uses it, or if it can't come now.
pub async fn attach(cluster: &Arc<Cluster>, vm: &VmId, ask: AttachVolume) -> Result<Vm, Problem> {
    let what = format!("can't attach volume {} to VM {vm}", ask.volume);
    let before = record(cluster, vm).await?;
    volumes::find(cluster, &ask.volume).await?;
    if !before.vm_started {
        change::check_off(cluster, &what, &before).await?;
        let hold = cluster.index.begin_submission(vec![ask.volume.clone()]);
        let _hold =
            hold.map_err(|_| Problem::conflict(&what, "it is being deleted or replaced"))?;
        return change::change(cluster, vm, &what, |record| {
            // Another one may have come since.
            comes(&what, record, &ask, None)?.apply(record);
            Ok(())
        })
        .await;
    }
    let conflict = |why: String| Problem::conflict(&what, why);
    let (_held, before, host) = live::begin(cluster, vm, &what).await?;
    let writes = !ask.read_only;
    let _volume =
        cluster.index.begin_attachment((vm, &host), &ask.volume, writes).map_err(conflict)?;
    let at = volumes::reachable(cluster, &host)?;
    let comes = place(cluster, &what, &before, &ask).await?;
    let VolumeChange::Comes { disk: Some(disk), .. } = &comes else {
        return Err(Problem::internal(what, "it has no place"));
    };
    let disk = disk.clone();
    note(cluster, &before, comes).await?;
    let plugged = async {
        attach_there(cluster, &disk, &host).await?;
        live::change(&at, &before, &ChangeVm::Plug(disk_of(&what, &disk)?)).await
    };
    let Err(problem) = plugged.await else { return vms::get(cluster, vm).await };
    // An answer may have been lost.
    let undone = async {
        live::change(&at, &before, &ChangeVm::Unplug { role: disk.role }).await?;
        note(cluster, &before, VolumeChange::Goes(ask.volume.clone())).await
    };
    if undone.await.is_ok() {
        return Err(problem);
    }
    let has_it = |now: Arc<JobRecord>| has(&now, &ask.volume);
    if !live::now(cluster, &before).is_some_and(has_it) {
        return Err(problem);
    }
    let next = format!("perigee vm detach {vm} {}", ask.volume);
    Err(problem.next(format!("it is still in the VM's list; to take it from there: {next}")))
}

fn has(record: &JobRecord, volume: &VolumeName) -> bool {
    record.job.spec.volumes.iter().any(|has| has.volume == *volume)
}

/// Takes a volume from a VM. The volume stays.
///
/// # Errors
/// `NotFound` if the VM does not have it; `Conflict` if its guest does not let it go.
pub async fn detach(cluster: &Arc<Cluster>, vm: &VmId, ask: DetachVolume) -> Result<Vm, Problem> {
    let what = format!("can't detach volume {} from VM {vm}", ask.volume);
    let before = record(cluster, vm).await?;
    let check = |record: &JobRecord| match has(record, &ask.volume) {
        true => Ok(()),
        false => Err(Problem::not_found(&what, "the VM does not have it")),
    };
    check(&before)?;
    let goes = VolumeChange::Goes(ask.volume.clone());
    if !before.vm_started {
        return change::change(cluster, vm, &what, |record| {
            goes.apply(record);
            Ok(())
        })
        .await;
    }
    let (_held, before, host) = live::begin(cluster, vm, &what).await?;
    check(&before)?;
    let at = volumes::reachable(cluster, &host)?;
    let placed = before.placement.iter().flat_map(|placement| &placement.disks);
    let mut data = placed.filter(|disk| disk.role.is_data());
    let Some(disk) = data.find(|disk| disk.volume == ask.volume).cloned() else {
        return Err(Problem::internal(what, "the VM runs without it"));
    };
    live::change(&at, &before, &ChangeVm::Unplug { role: disk.role }).await?;
    note(cluster, &before, goes).await?;
    vms::get(cluster, vm).await
}

/// What an earlier VM has left of it there may just be removed.
async fn attach_there(cluster: &Cluster, disk: &PlacedDisk, host: &HostId) -> Result<(), Problem> {
    let begun = Instant::now();
    loop {
        match attach::attach(cluster, std::slice::from_ref(disk), host).await {
            Err(problem)
                if problem.kind == ProblemKind::Unavailable
                    && begun.elapsed() < ATTACH_PATIENCE =>
            {
                tokio::time::sleep(cluster.timing.poll).await;
            }
            done => return done,
        }
    }
}

/// How the volume comes to the end of the VM's list.
fn comes(
    what: &str,
    before: &JobRecord,
    ask: &AttachVolume,
    disk: Option<PlacedDisk>,
) -> Result<VolumeChange, Problem> {
    let invalid = |why: String| Problem::invalid(what, why);
    let access = if ask.read_only { Access::Read } else { Access::Write };
    let (volume, mount) = (ask.volume.clone(), format!("/mnt/{}", ask.volume));
    check_mount(&mount).map_err(|why| invalid(why.to_string()))?;
    let next = JobVolume { volume, mount, access, ranks: Vec::new() };
    let volumes = &before.job.spec.volumes;
    check_beside(&next, volumes).map_err(|why| Problem::conflict(what, why))?;
    JOB_VOLUMES.check(volumes.len() + 1).map_err(|error| invalid(error.to_string()))?;
    let slot =
        before.kind.persistent_vm().and_then(|persistent| persistent.free_slot(volumes.len()));
    let slot = slot.ok_or_else(|| invalid("it has no place for another disk".to_owned()))?;
    Ok(VolumeChange::Comes { volume: next, slot, disk })
}

/// The same for a VM that runs, with the epoch with which it opens the volume.
async fn place(
    cluster: &Cluster,
    what: &str,
    before: &JobRecord,
    ask: &AttachVolume,
) -> Result<VolumeChange, Problem> {
    let VolumeChange::Comes { volume, slot, .. } = comes(what, before, ask, None)? else {
        return Err(Problem::internal(what, "it has no place"));
    };
    if slot >= Machine::PORTS {
        let why = format!("{} volumes can come while it runs", Machine::PORTS);
        return Err(Problem::conflict(what, why).next("stop the VM first"));
    }
    let mut with_it = before.job.spec.clone();
    with_it.volumes.push(volume.clone());
    if leave_site::confined_of(cluster, &with_it).await?.is_any() {
        let why = "data that may not leave its site comes to a VM only when it starts";
        return Err(Problem::conflict(what, why).next("stop the VM first"));
    }
    let home = volumes::reachable(cluster, &volumes::find(cluster, &ask.volume).await?.home)?;
    let mut disk = PlacedDisk {
        role: DiskRole::Data(slot),
        volume: ask.volume.clone(),
        data_of: Some(ask.volume.clone()),
        home: home.id.clone(),
        home_changed: false,
        epoch: None,
        read_only: ask.read_only,
        temporary: false,
        leave_site: LeaveSite::Allowed,
    };
    disk.epoch = Some(match ask.read_only {
        true => epoch_of(&home, &ask.volume).await?,
        false => take_over(&home, &disk).await?,
    });
    Ok(VolumeChange::Comes { volume, slot, disk: Some(disk) })
}

async fn epoch_of(home: &HostLink, volume: &VolumeName) -> Result<perigee_model::Epoch, Problem> {
    let info: VolumeInfo = home.volume.get(&format!("/v1/volumes/{volume}")).await?;
    Ok(info.epoch)
}

fn disk_of(what: &str, placed: &PlacedDisk) -> Result<Disk, Problem> {
    let epoch = placed.epoch.ok_or_else(|| Problem::internal(what, "it has no epoch"))?;
    let (role, volume) = (placed.role, placed.volume.clone());
    Ok(Disk { role, volume, epoch, read_only: placed.read_only })
}

/// Has the VM's driver record it.
async fn note(cluster: &Arc<Cluster>, of: &JobRecord, change: VolumeChange) -> Result<(), Problem> {
    live::check_run(cluster, of)?;
    let run = start_of(of, 0);
    let next = |old: Option<JobIntent>| {
        let old = old.unwrap_or_default();
        let number = old.volume.as_ref().map_or(1, |last| last.number + 1);
        JobIntent { volume: Some(Live { number, change: change.clone(), run }), ..old }
    };
    let asked = cluster.records.update(&job_intent_key(&of.job.id), next).await?;
    let number = asked.volume.map_or(0, |volume| volume.number);
    live::until_noted(cluster, of, |persistent: &PersistentVm| persistent.plugged >= number).await
}
