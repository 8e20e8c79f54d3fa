//! `/backups`, for admins.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use perigee_http::{Json, Reply};
use perigee_model::backup::{
    Backup, CheckBackup, FoundBackup, LookForBackups, NewBackup, RestoreBackup, VerifiedBackup,
};
use perigee_model::job::ClusterVolume;
use perigee_model::{BackupName, Problem};

use super::caller::{Caller, Full};
use super::{Shared, json, to_its_end};
use crate::storage::backups;

/// The backups that the controller knows, complete or not.
#[utoipa::path(get, path = "/backups", tag = "backups",
    responses((status = 200, body = Vec<Backup>)))]
pub async fn list(State(cluster): Shared) -> Reply<Vec<Backup>> {
    json(backups::list(&cluster).await?)
}

/// Begins a backup of a volume, which may be in use; the answer comes at once. Only what the target does not have is shipped.
#[utoipa::path(post, path = "/backups", tag = "backups", request_body = NewBackup,
    responses((status = 200, body = Backup)))]
pub async fn create(
    State(cluster): Shared,
    caller: Caller,
    Json(ask): Json<NewBackup>,
) -> Reply<Backup> {
    let ask = NewBackup { volume: caller.seen_name(&cluster, &ask.volume).await?, ..ask };
    caller.did(ask.volume.as_str());
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

/// The backups that a host finds at a target, also those that this controller does not know.
#[utoipa::path(post, path = "/look-for-backups", tag = "backups", request_body = LookForBackups,
    responses((status = 200, body = Vec<FoundBackup>)))]
pub async fn look(
    State(cluster): Shared,
    Json(ask): Json<LookForBackups>,
) -> Reply<Vec<FoundBackup>> {
    json(backups::look(&cluster, &ask).await?)
}
