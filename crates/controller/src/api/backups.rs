//! `/backups`. A user of a tenant sees the backups that the tenant's users have had made; of VMs a member only its own ones. An admin sees all. A tenant's users back up
//! the tenant's own images, and admins those that are shared.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use perigee_http::{Json, Reply};
use perigee_model::backup::{
    Backup, BackupTarget, CheckBackup, FoundBackup, LookForBackups, NewBackup, RestoreBackup,
    RestoreImageBackup, RestoreVmBackup, VerifiedBackup,
};
use perigee_model::backup_schedule::{BackupSchedule, NewBackupSchedule};
use perigee_model::job::{ClusterImage, ClusterVolume, DEFAULT_OWNER, Vm};
use perigee_model::tenant::Role;
use perigee_model::{BackupName, ImageName, Problem, ScheduleName, VmId, VolumeName};

use super::caller::{Caller, Full};
use super::{Shared, json, to_its_end};
use crate::accounts::backups::{check_target, tenant_at};
use crate::cluster::Cluster;
use crate::storage::backups::{self, schedules};
use crate::vms;

/// The backups that the controller knows, complete or not.
#[utoipa::path(get, path = "/backups", tag = "backups",
    responses((status = 200, body = Vec<Backup>)))]
pub async fn list(State(cluster): Shared, caller: Caller) -> Reply<Vec<Backup>> {
    let mut all = backups::list(&cluster).await?;
    all.retain(|backup| caller.sees_backup(backup.by.as_ref(), backup.vm.is_some()));
    json(all)
}

/// Refuses a backup that this caller may not read: it has to be one that the caller sees, and where the tenant may have backups. What the controller does not know, an
/// operator of the tenant reads there.
async fn check_read(
    cluster: &Cluster,
    caller: &Caller,
    name: &BackupName,
    at: Option<&BackupTarget>,
) -> Result<(), Problem> {
    let Some(by) = caller.backup_user() else { return Ok(()) };
    let known = backups::known(cluster, name).await?;
    match &known {
        Some(known) if !caller.sees_backup(known.by.as_ref(), known.vm.is_some()) => {
            return Err(backups::unknown(name));
        }
        None if at.is_none() || caller.role < Role::Operator => return Err(backups::unknown(name)),
        _ => {}
    }
    let at = at.filter(|at| known.is_none_or(|known| known.at != **at));
    let Some(at) = at else { return Ok(()) };
    check_target(cluster, &format!("can't read backup {name}"), Some(&by), at).await
}

/// A backup that the caller sees.
pub(super) async fn seen(
    cluster: &Cluster,
    caller: &Caller,
    name: &BackupName,
) -> Result<Backup, Problem> {
    let known = backups::get(cluster, name).await?;
    match caller.sees_backup(known.by.as_ref(), known.vm.is_some()) {
        true => Ok(known),
        false => Err(backups::unknown(name)),
    }
}

/// What is to be backed up.
type Named = (Option<VolumeName>, Option<VmId>, Option<ImageName>);

/// The same with full names.
async fn named(
    cluster: &Arc<Cluster>,
    caller: &Caller,
    (volume, vm, image): Named,
) -> Result<Named, Problem> {
    let volume = match volume {
        Some(volume) => Some(caller.seen_name(cluster, &volume).await?),
        None => None,
    };
    let vm = match vm {
        Some(vm) => Some(caller.seen_name(cluster, &vm).await?),
        None => None,
    };
    let image = match image {
        Some(image) => Some(own_image(cluster, caller, &image).await?),
        None => None,
    };
    volume.iter().for_each(|volume| caller.did(volume.as_str()));
    vm.iter().for_each(|vm| caller.did(vm.as_str()));
    image.iter().for_each(|image| caller.did(image.as_str()));
    Ok((volume, vm, image))
}

/// The full name of an image of the caller's tenant. A backup of a shared one would be a backup of another tenant's.
async fn own_image(
    cluster: &Cluster,
    caller: &Caller,
    image: &ImageName,
) -> Result<ImageName, Problem> {
    let own = caller.seen_name(cluster, image).await?;
    let meant = caller.image(cluster, image).await?;
    if meant == own {
        return Ok(own);
    }
    let why = "it is shared with all tenants, so an admin backs it up";
    Err(Problem::forbidden(format!("can't back up image {meant}"), why)
        .next("make a volume of it, and back that up: perigee volume create --image"))
}

/// Begins a backup of a volume or of a VM, which may be in use, or of an image; the answer comes at once. Only what the target does not have is shipped.
#[utoipa::path(post, path = "/backups", tag = "backups", request_body = NewBackup,
    responses((status = 200, body = Backup)))]
pub async fn create(
    State(cluster): Shared,
    caller: Caller,
    Json(ask): Json<NewBackup>,
) -> Reply<Backup> {
    let (volume, vm, image) = named(&cluster, &caller, (ask.volume, ask.vm, ask.image)).await?;
    let (ask, by) = (NewBackup { volume, vm, image, ..ask }, caller.backup_user());
    json(to_its_end(async move { backups::create(&cluster, ask, by).await }).await?)
}

/// A backup, with how far it is.
#[utoipa::path(get, path = "/backups/{backup}", tag = "backups",
    params(("backup" = String, Path)), responses((status = 200, body = Backup)))]
pub async fn info(
    State(cluster): Shared,
    caller: Caller,
    Full(backup): Full<BackupName>,
) -> Reply<Backup> {
    json(seen(&cluster, &caller, &backup).await?)
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
    caller: Caller,
    Full(backup): Full<BackupName>,
    query: Result<Query<How>, QueryRejection>,
) -> Reply<()> {
    let Query(How { forget }) =
        query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    seen(&cluster, &caller, &backup).await?;
    if forget && !caller.is_admin() {
        let why = "its bytes count in the tenant's quota as long as they are at the target";
        return Err(Problem::forbidden(format!("can't forget backup {backup}"), why)
            .next("delete it without --forget")
            .into());
    }
    json(backups::delete(&cluster, &backup, forget).await?)
}

/// Reads all of a backup, and says what is missing or damaged. Without a target in the request, where the controller knows the backup.
#[utoipa::path(post, path = "/backups/{backup}/verify", tag = "backups",
    params(("backup" = String, Path)), request_body = CheckBackup,
    responses((status = 200, body = VerifiedBackup)))]
pub async fn verify(
    State(cluster): Shared,
    caller: Caller,
    Full(backup): Full<BackupName>,
    Json(ask): Json<CheckBackup>,
) -> Reply<VerifiedBackup> {
    check_read(&cluster, &caller, &backup, ask.at.as_ref()).await?;
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
    check_read(&cluster, &caller, &backup, ask.from.as_ref()).await?;
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
    check_read(&cluster, &caller, &backup, ask.from.as_ref()).await?;
    let tenant = caller.backup_user().map(|by| by.tenant);
    let owner = caller.user.as_ref().map_or(DEFAULT_OWNER.to_owned(), ToString::to_string);
    let made =
        async move { vms::from_backup::restore(&cluster, &backup, ask, owner, tenant).await };
    json(to_its_end(made).await?)
}

/// Makes a new image of the backup of an image. The image is there when all bytes were read and checked.
#[utoipa::path(post, path = "/backups/{backup}/restore-image", tag = "backups",
    params(("backup" = String, Path)), request_body = RestoreImageBackup,
    responses((status = 200, body = ClusterImage)))]
pub async fn restore_image(
    State(cluster): Shared,
    caller: Caller,
    Full(backup): Full<BackupName>,
    Json(ask): Json<RestoreImageBackup>,
) -> Reply<ClusterImage> {
    let ask = RestoreImageBackup { image: caller.new_image_name(&cluster, &ask.image)?, ..ask };
    check_read(&cluster, &caller, &backup, ask.from.as_ref()).await?;
    let made = async move { backups::restore_image(&cluster, &backup, ask).await };
    json(to_its_end(made).await?)
}

/// The backups that a host finds at a target, also those that this controller does not know.
#[utoipa::path(post, path = "/look-for-backups", tag = "backups", request_body = LookForBackups,
    responses((status = 200, body = Vec<FoundBackup>)))]
pub async fn look(
    State(cluster): Shared,
    caller: Caller,
    Json(ask): Json<LookForBackups>,
) -> Reply<Vec<FoundBackup>> {
    if let Some(by) = caller.backup_user() {
        check_target(&cluster, "can't look for backups", Some(&by), &ask.at).await?;
    }
    let tenant = match &ask.tenant {
        Some(tenant) => {
            caller.check_tenant(tenant)?;
            cluster.accounts.tenant(tenant)?.name
        }
        None => tenant_at(&cluster, &ask.at)
            .filter(|_| caller.is_admin())
            .unwrap_or_else(|| caller.tenant.clone()),
    };
    let mut all = backups::look(&cluster, &ask, &tenant).await?;
    all.retain(|found| caller.sees(found.name.as_str()));
    json(all)
}

/// The schedules of backups.
#[utoipa::path(get, path = "/backup-schedules", tag = "backups",
    responses((status = 200, body = Vec<BackupSchedule>)))]
pub async fn list_schedules(State(cluster): Shared, caller: Caller) -> Reply<Vec<BackupSchedule>> {
    let mut all = schedules::list(&cluster).await?;
    all.retain(|schedule| caller.sees_backup(schedule.by.as_ref(), schedule.vm.is_some()));
    json(all)
}

/// Backs up a volume, a VM or an image again and again, from now on; the answer comes at once. The same thing with the same target changes the schedule that is there.
#[utoipa::path(post, path = "/backup-schedules", tag = "backups", request_body = NewBackupSchedule,
    responses((status = 200, body = BackupSchedule)))]
pub async fn set_schedule(
    State(cluster): Shared,
    caller: Caller,
    Json(ask): Json<NewBackupSchedule>,
) -> Reply<BackupSchedule> {
    let (volume, vm, image) = named(&cluster, &caller, (ask.volume, ask.vm, ask.image)).await?;
    let (ask, by) = (NewBackupSchedule { volume, vm, image, ..ask }, caller.backup_user());
    json(to_its_end(async move { schedules::set(&cluster, ask, by).await }).await?)
}

/// Ends a schedule. Its backups stay, and one that is under way goes on.
#[utoipa::path(delete, path = "/backup-schedules/{schedule}", tag = "backups",
    params(("schedule" = String, Path)), responses((status = 200)))]
pub async fn end_schedule(
    State(cluster): Shared,
    caller: Caller,
    Full(schedule): Full<ScheduleName>,
) -> Reply<()> {
    let known = schedules::get(&cluster, &schedule).await?;
    if !caller.sees_backup(known.by.as_ref(), known.vm.is_some()) {
        return Err(schedules::unknown(&schedule).into());
    }
    json(schedules::remove(&cluster, &schedule).await?)
}
