//! `/backups`, for admins.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use perigee_http::{Json, Reply};
use perigee_model::backup::{
    Backup, CheckBackup, FoundBackup, LookForBackups, NewBackup, RestoreBackup, RestoreVmBackup,
    VerifiedBackup,
};
use perigee_model::backup_schedule::{BackupSchedule, NewBackupSchedule};
use perigee_model::job::{ClusterVolume, DEFAULT_OWNER, Vm};
use perigee_model::{BackupName, Problem, ScheduleName, VmId, VolumeName};

use super::caller::{Caller, Full};
use super::{Shared, json, to_its_end};
use crate::cluster::Cluster;
use crate::storage::backups::{self, schedules};
use crate::vms;

/// The backups that the controller knows, complete or not.
#[utoipa::path(get, path = "/backups", tag = "backups",
    responses((status = 200, body = Vec<Backup>)))]
pub async fn list(State(cluster): Shared) -> Reply<Vec<Backup>> {
    json(backups::list(&cluster).await?)
}

/// The full names of the volume and the VM that are named.
async fn named(
    cluster: &Arc<Cluster>,
    caller: &Caller,
    volume: Option<VolumeName>,
    vm: Option<VmId>,
) -> Result<(Option<VolumeName>, Option<VmId>), Problem> {
    let volume = match volume {
        Some(volume) => Some(caller.seen_name(cluster, &volume).await?),
        None => None,
    };
    let vm = match vm {
        Some(vm) => Some(caller.seen_name(cluster, &vm).await?),
        None => None,
    };
    volume.iter().for_each(|volume| caller.did(volume.as_str()));
    vm.iter().for_each(|vm| caller.did(vm.as_str()));
    Ok((volume, vm))
}

/// Begins a backup of a volume or of a VM, which may be in use; the answer comes at once. Only what the target does not have is shipped.
#[utoipa::path(post, path = "/backups", tag = "backups", request_body = NewBackup,
    responses((status = 200, body = Backup)))]
pub async fn create(
    State(cluster): Shared,
    caller: Caller,
    Json(ask): Json<NewBackup>,
) -> Reply<Backup> {
    let (volume, vm) = named(&cluster, &caller, ask.volume, ask.vm).await?;
    let ask = NewBackup { volume, vm, ..ask };
    json(to_its_end(async move { backups::create(&cluster, ask).await }).await?)
}

/// A backup, with how far it is.
#[utoipa::path(get, path = "/backups/{backup}", tag = "backups",
    params(("backup" = String, Path)), responses((status = 200, body = Backup)))]
pub async fn info(State(cluster): Shared, Full(backup): Full<BackupName>) -> Reply<Backup> {
    json(backups::get(&cluster, &backup).await?)
}

/// The query of [`delete`].
#[derive(serde::Deserialize)]
pub struct How {
    #[serde(default)]
    forget: bool,
}

/// Deletes a backup, with what no other one at its target needs; the answer comes at once. With `forget` what is at the target stays.
#[utoipa::path(delete, path = "/backups/{backup}", tag = "backups",
    params(("backup" = String, Path), ("forget" = Option<bool>, Query)),
    responses((status = 200)))]
pub async fn delete(
    State(cluster): Shared,
    Full(backup): Full<BackupName>,
    query: Result<Query<How>, QueryRejection>,
) -> Reply<()> {
    let Query(How { forget }) =
        query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    json(backups::delete(&cluster, &backup, forget).await?)
}

/// Reads all of a backup, and says what is missing or damaged. Without a target in the request, where the controller knows the backup.
#[utoipa::path(post, path = "/backups/{backup}/verify", tag = "backups",
    params(("backup" = String, Path)), request_body = CheckBackup,
    responses((status = 200, body = VerifiedBackup)))]
pub async fn verify(
    State(cluster): Shared,
    Full(backup): Full<BackupName>,
    Json(ask): Json<CheckBackup>,
) -> Reply<VerifiedBackup> {
    json(to_its_end(async move { backups::verify(&cluster, &backup, ask).await }).await?)
}

/// Makes a new volume of a backup. The answer comes when the volume is there. Bytes of the volume come afterwards, unless `whole` is asked for.
#[utoipa::path(post, path = "/backups/{backup}/restore", tag = "backups",
    params(("backup" = String, Path)), request_body = RestoreBackup,
    responses((status = 200, body = ClusterVolume)))]
pub async fn restore(
    State(cluster): Shared,
    caller: Caller,
    Full(backup): Full<BackupName>,
    Json(ask): Json<RestoreBackup>,
) -> Reply<ClusterVolume> {
    let ask = RestoreBackup { volume: caller.new_name(&cluster, &ask.volume)?, ..ask };
    json(to_its_end(async move { backups::restore(&cluster, &backup, ask).await }).await?)
}

/// Makes a new VM of a backup of one, which can be started. The answer comes when its disks are there. Their bytes come afterwards, unless `whole` is asked for.
#[utoipa::path(post, path = "/backups/{backup}/restore-vm", tag = "backups",
    params(("backup" = String, Path)), request_body = RestoreVmBackup,
    responses((status = 200, body = Vm)))]
pub async fn restore_vm(
    State(cluster): Shared,
    caller: Caller,
    Full(backup): Full<BackupName>,
    Json(ask): Json<RestoreVmBackup>,
) -> Reply<Vm> {
    let ask = RestoreVmBackup { vm: caller.new_name(&cluster, &ask.vm)?, ..ask };
    let owner = caller.user.as_ref().map_or(DEFAULT_OWNER.to_owned(), ToString::to_string);
    let made = async move { vms::from_backup::restore(&cluster, &backup, ask, owner).await };
    json(to_its_end(made).await?)
}

/// The backups that a host finds at a target, also those that this controller does not know.
#[utoipa::path(post, path = "/look-for-backups", tag = "backups", request_body = LookForBackups,
    responses((status = 200, body = Vec<FoundBackup>)))]
pub async fn look(
    State(cluster): Shared,
    Json(ask): Json<LookForBackups>,
) -> Reply<Vec<FoundBackup>> {
    json(backups::look(&cluster, &ask).await?)
}

/// The schedules of backups.
#[utoipa::path(get, path = "/backup-schedules", tag = "backups",
    responses((status = 200, body = Vec<BackupSchedule>)))]
pub async fn list_schedules(State(cluster): Shared) -> Reply<Vec<BackupSchedule>> {
    json(schedules::list(&cluster).await?)
}

/// Backs up a volume or a VM again and again, from now on; the answer comes at once. The same volume or VM with the same target changes the schedule that is there.
#[utoipa::path(post, path = "/backup-schedules", tag = "backups", request_body = NewBackupSchedule,
    responses((status = 200, body = BackupSchedule)))]
pub async fn set_schedule(
    State(cluster): Shared,
    caller: Caller,
    Json(ask): Json<NewBackupSchedule>,
) -> Reply<BackupSchedule> {
    let (volume, vm) = named(&cluster, &caller, ask.volume, ask.vm).await?;
    let ask = NewBackupSchedule { volume, vm, ..ask };
    json(to_its_end(async move { schedules::set(&cluster, ask).await }).await?)
}

/// Ends a schedule. Its backups stay, and one that is under way goes on.
#[utoipa::path(delete, path = "/backup-schedules/{schedule}", tag = "backups",
    params(("schedule" = String, Path)), responses((status = 200)))]
pub async fn end_schedule(State(cluster): Shared, Full(schedule): Full<ScheduleName>) -> Reply<()> {
    json(schedules::remove(&cluster, &schedule).await?)
}
