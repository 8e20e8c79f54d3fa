//! The backup of a VM: one backup of each disk, all of one moment. That of the root disk stands for all. It has the VM's description, has all disks sealed, begins
//! the backups of the others (its parts), and is shipped when they are complete. So a VM's backup exists when that of its root disk does.
//!
//! The disks are the root disk, the volumes that the VM writes, and where the VM has them the variables of its firmware and the state of its TPM: these are volumes too.
//! The disks with the same home are sealed together. Those with other homes are sealed one home after the other.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::backup::{
    Backup, BackupState, BackupTarget, SealForBackup, SealedForBackup, VmBackup, VmBackupPart,
};
use perigee_model::persistent_vm::NewVm;
use perigee_model::{BackupName, DiskRole, HostId, Problem, VmId, VolumeName};
use serde::{Deserialize, Serialize};

use super::{BackupRecord, backup_key, new_backup};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::records::{JobRecord, Owned, declared};
use crate::storage::volumes;

/// What the backup of a VM's root disk has beside that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfVm {
    /// What the target gets.
    pub has: VmBackup,
    /// What was sealed of each disk; none before that.
    pub sealed: BTreeMap<VolumeName, SealedForBackup>,
}

impl OfVm {
    /// The backups of the other disks.
    pub fn parts(&self) -> impl Iterator<Item = BackupName> {
        self.has.parts.iter().map(|part| part.backup.clone())
    }
}

/// The record of a VM without a job.
///
/// # Errors
/// `NotFound`.
pub fn find(cluster: &Cluster, vm: &VmId) -> Result<Arc<JobRecord>, Problem> {
    let record = cluster.index.of_vm(vm).filter(|record| record.kind.is_persistent_vm());
    record.ok_or_else(|| {
        Problem::not_found(format!("VM {vm}"), "there is no VM without a job of this name")
            .next("`perigee vm list` shows the VMs")
    })
}

/// The root disk of a VM, and what its backup of this name has beside that.
///
/// # Errors
/// `NotFound`; `Unavailable` if it has no disk yet.
pub fn describe(
    cluster: &Cluster,
    vm: &VmId,
    name: &BackupName,
) -> Result<(VolumeName, VmBackup), Problem> {
    let what = format!("can't back up VM {vm}");
    let record = find(cluster, vm)?;
    let persistent = record.kind.persistent_vm().filter(|vm| vm.has(DiskRole::Root));
    let (Some(persistent), Some(new)) = (persistent, declared(&record)) else {
        return Err(Problem::unavailable(what, "it has no disk before its first start")
            .next("start it first"));
    };
    if persistent.from_backup.is_some() {
        return Err(Problem::unavailable(what, "its disks are being made of a backup")
            .next("wait until it can be started"));
    }
    let root = own_disk(&record, &what, DiskRole::Root)?;
    let written = new.volumes.iter().filter(|volume| !volume.read_only).enumerate();
    let mut others: Vec<(VolumeName, String)> =
        written.map(|(at, one)| (one.volume.clone(), format!("data{at}"))).collect();
    // Without the variables of its firmware and the state of its TPM, such a guest may not boot, or not open its disk.
    for role in persistent.own_disks().iter().filter(|role| role.lasts()) {
        if *role != DiskRole::Root {
            others.push((own_disk(&record, &what, *role)?, role.to_string()));
        }
    }
    let part = |(volume, end): (VolumeName, String)| {
        let backup = BackupName::new(format!("{name}.{end}"))
            .map_err(|error| Problem::invalid(&what, error))?;
        Ok(VmBackupPart { volume, backup })
    };
    let parts = others.into_iter().map(part).collect::<Result<_, Problem>>()?;
    let cloud_init = persistent.cloud_init.clone();
    Ok((root, VmBackup { vm: NewVm { cloud_init, ..new }, parts }))
}

/// A disk of the VM's own, which it has had since its first start.
fn own_disk(record: &JobRecord, what: &str, role: DiskRole) -> Result<VolumeName, Problem> {
    let disks = record.placement.iter().flat_map(|placement| &placement.disks);
    let disk = disks.into_iter().find(|disk| disk.role == role);
    disk.map(|disk| disk.volume.clone())
        .ok_or_else(|| Problem::internal(what, format!("where its disk {role} is, is not known")))
}

/// Refuses a second backup of a VM to a target while another one is shipped there: what the disks keep for the first one would go.
///
/// # Errors
/// `Conflict`.
pub fn check_alone(known: &[Backup], new: &Backup) -> Result<(), Problem> {
    let Some(vm) = &new.vm else { return Ok(()) };
    let is_other = |one: &&Backup| {
        let is_shipped = one.state == BackupState::Shipping && one.part_of.is_none();
        let is_same = one.vm.as_ref() == Some(vm) && one.at.address == new.at.address;
        is_shipped && is_same && one.name != new.name
    };
    let Some(other) = known.iter().find(is_other) else { return Ok(()) };
    let why = format!("backup {} of it is being shipped to the same target", other.name);
    Err(Problem::conflict(format!("can't back up VM {vm}"), why)
        .next("wait until that one is complete, or has failed: perigee backup list"))
}

/// What is to be shipped of a VM's disk; `None`: the backup is of a volume alone. The backup of a root disk has all disks sealed first, and waits for its parts.
///
/// # Errors
/// `Unavailable` if a home does not answer; `Conflict` if a part has failed, or the backup of which this is a part.
pub async fn sealed(
    cluster: &Arc<Cluster>,
    record: &mut Owned<BackupRecord>,
) -> Result<Option<SealedForBackup>, Problem> {
    let volume = record.value.view.volume.clone();
    if let Some(root) = record.value.view.part_of.clone() {
        return sealed_of_part(cluster, &root, &volume).await.map(Some);
    }
    let Some(of_vm) = &record.value.vm else { return Ok(None) };
    if of_vm.sealed.is_empty() {
        let others = of_vm.has.parts.iter().map(|part| part.volume.clone());
        let volumes: Vec<VolumeName> = std::iter::once(volume.clone()).chain(others).collect();
        let sealed = seal(cluster, volumes, &record.value.view.at).await?;
        if let Some(of_vm) = &mut record.value.vm {
            of_vm.sealed = sealed;
        }
        record.save().await?;
    }
    begin_parts(cluster, &record.value).await?;
    wait_for_parts(cluster, &record.value.view).await?;
    let of_vm = record.value.vm.as_ref();
    Ok(of_vm.and_then(|of_vm| of_vm.sealed.get(&volume).cloned()))
}

async fn sealed_of_part(
    cluster: &Cluster,
    root: &BackupName,
    volume: &VolumeName,
) -> Result<SealedForBackup, Problem> {
    let record: Option<BackupRecord> = cluster.records.read(&backup_key(root)).await?;
    let record = record.filter(|record| record.view.state == BackupState::Shipping);
    let sealed = record.and_then(|record| record.vm?.sealed.remove(volume));
    sealed.ok_or_else(|| {
        let why = format!("backup {root}, of which this is a part, has ended");
        Problem::conflict(format!("can't back up volume {volume}"), why)
    })
}

/// Has these volumes sealed: those of one home at one moment.
async fn seal(
    cluster: &Arc<Cluster>,
    volumes: Vec<VolumeName>,
    to: &BackupTarget,
) -> Result<BTreeMap<VolumeName, SealedForBackup>, Problem> {
    let mut at: BTreeMap<HostId, Vec<VolumeName>> = BTreeMap::new();
    for volume in volumes {
        at.entry(volumes::settled_home(cluster, &volume).await?).or_default().push(volume);
    }
    let mut asked = Vec::new();
    // Nothing is sealed while a home is away.
    for (home, volumes) in at {
        asked.push((volumes::reachable(cluster, &home)?, volumes));
    }
    let mut sealed = BTreeMap::new();
    for (host, volumes) in asked {
        let ask = SealForBackup { volumes, to: to.clone(), now_ms: now_ms() };
        let layers: Vec<SealedForBackup> = host.volume_slow.post("/v1/backups/seal", &ask).await?;
        if layers.len() != ask.volumes.len() {
            let why = format!("{} has not said what it has sealed of each disk", host.id);
            return Err(Problem::internal("can't seal the disks of a VM", why));
        }
        sealed.extend(ask.volumes.into_iter().zip(layers));
    }
    Ok(sealed)
}

/// Makes the records of the parts that have none yet, and starts their drivers.
async fn begin_parts(cluster: &Cluster, root: &BackupRecord) -> Result<(), Problem> {
    for VmBackupPart { volume, backup } in root.vm.iter().flat_map(|of_vm| &of_vm.has.parts) {
        let view = &root.view;
        let new = new_backup(backup.clone(), volume.clone(), view.at.clone(), view.begun_ms);
        let record = BackupRecord {
            view: Backup {
                vm: view.vm.clone(),
                part_of: Some(view.name.clone()),
                by: view.by.clone(),
                encrypted: view.encrypted,
                ..new
            },
            whole: root.whole,
            asks: false,
            schedule_made_ms: None,
            vm: None,
        };
        cluster.records.create(&backup_key(backup), &record).await?;
        cluster.drive_backup(backup);
    }
    Ok(())
}

/// Waits until all parts are complete. The driver of each gives up by itself, so this ends.
async fn wait_for_parts(cluster: &Cluster, root: &Backup) -> Result<(), Problem> {
    let what = format!("can't back up {}", root.name);
    for part in &root.parts {
        loop {
            let record: Option<BackupRecord> = cluster.records.read(&backup_key(part)).await?;
            match record.map(|record| record.view) {
                Some(view) if view.state == BackupState::Completed => break,
                Some(view) if view.state == BackupState::Shipping => {}
                Some(view) => {
                    let why = format!("its part {part} has failed: {}", view.problem);
                    return Err(Problem::conflict(what, why));
                }
                None => {
                    return Err(Problem::conflict(what, format!("its part {part} was deleted")));
                }
            }
            tokio::time::sleep(cluster.timing.poll).await;
        }
    }
    Ok(())
}

/// A part that is still being shipped, if there is one.
pub async fn part_that_is_shipped(
    cluster: &Cluster,
    parts: &[BackupName],
) -> Result<Option<BackupName>, Problem> {
    for part in parts {
        let record: Option<BackupRecord> = cluster.records.read(&backup_key(part)).await?;
        if record.is_some_and(|record| record.view.state == BackupState::Shipping) {
            return Ok(Some(part.clone()));
        }
    }
    Ok(None)
}

/// The backup of the root disk is deleted at the target: the parts follow. Waits until they are gone. The driver of each gives up by itself, so this ends.
///
/// # Errors
/// When the store fails. Within: `Conflict` if a part can't be deleted.
pub async fn delete_parts(
    cluster: &Cluster,
    root: &Backup,
) -> Result<Result<(), Problem>, Problem> {
    for part in &root.parts {
        let Some(mut record) = cluster.records.own::<BackupRecord>(&backup_key(part)).await? else {
            continue;
        };
        if record.value.view.state == BackupState::Deleting {
            continue;
        }
        record.value.view.state = BackupState::Deleting;
        record.save().await?;
        cluster.drive_backup(part);
    }
    for part in &root.parts {
        loop {
            let record: Option<BackupRecord> = cluster.records.read(&backup_key(part)).await?;
            match record.map(|record| record.view) {
                None => break,
                Some(view) if view.state == BackupState::Deleting => {}
                Some(view) => {
                    let what = format!("can't delete backup {}", root.name);
                    let why = format!("its part {part} stays: {}", view.problem);
                    return Ok(Err(Problem::conflict(what, why)));
                }
            }
            tokio::time::sleep(cluster.timing.poll).await;
        }
    }
    Ok(Ok(()))
}

/// The figures of a root disk's backup with those of its parts.
pub async fn add_parts(cluster: &Cluster, view: &mut Backup) -> Result<(), Problem> {
    for part in &view.parts {
        let record: Option<BackupRecord> = cluster.records.read(&backup_key(part)).await?;
        let Some(part) = record.map(|record| record.view) else { continue };
        let sum = |one: Option<u64>, other: Option<u64>| Some(one?.saturating_add(other?));
        view.size_bytes = sum(view.size_bytes, part.size_bytes);
        view.data_bytes = sum(view.data_bytes, part.data_bytes);
        view.shipped_bytes = view.shipped_bytes.saturating_add(part.shipped_bytes);
    }
    Ok(())
}
