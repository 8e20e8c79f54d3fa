//! The part of the control API for backups: [`perigee_model::backup`].

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use perigee_http::{Failure, Json, Reply};
use perigee_model::backup::{
    BackupTarget, DeleteBackup, FoundBackup, ListBackups, RestoreImage, RestoreVolume,
    RestoringLayer, SealForBackup, SealedForBackup, SendBackupKey, ShipBackup, VerifyBackup,
};
use perigee_model::{ImageName, Problem, VolumeName};

use super::{Control, Named, Shared, long};
use crate::backups::{Source, delete, lacks_key, restore, seal, ship, take_backup_key};

/// The routes for backups.
pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route("/volumes/{volume}/backup", post(back_up))
        .route("/volumes/{volume}/backup/end", post(end))
        .route("/volumes/{volume}/restore", post(restore_volume))
        .route("/images/{image}/backup", post(back_up_image))
        .route("/images/{image}/restore", post(restore_image))
        .route("/backups/seal", post(seal_disks))
        .route("/backups/restoring", get(restoring))
        .route("/backups/key", post(take_key))
        .route("/backups/list", post(list))
        .route("/backups/verify", post(verify))
        .route("/backups/delete", post(delete_backup))
}

async fn back_up(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(ask): Json<ShipBackup>,
) -> Result<Response, Failure> {
    let pool = Arc::clone(&control.pool);
    let of = Source::Volume(volume);
    long::follow(move |work| async move { ship(&pool, &of, &ask, &work).await })
}

async fn back_up_image(
    State(control): Shared,
    Named(image): Named<ImageName>,
    Json(ask): Json<ShipBackup>,
) -> Result<Response, Failure> {
    let pool = Arc::clone(&control.pool);
    let of = Source::Image(image);
    long::follow(move |work| async move { ship(&pool, &of, &ask, &work).await })
}

async fn seal_disks(
    State(control): Shared,
    Json(ask): Json<SealForBackup>,
) -> Reply<Vec<SealedForBackup>> {
    // In a task of its own: a client that leaves stops it nowhere in the middle.
    let pool = Arc::clone(&control.pool);
    let sealing = tokio::spawn(async move { seal(&pool, &ask).await });
    let sealed = sealing
        .await
        .map_err(|error| Problem::internal("can't seal the disks of a VM for a backup", error))?;
    Ok(Json(sealed?))
}

async fn end(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(at): Json<BackupTarget>,
) -> Reply<()> {
    Ok(Json(control.pool.drop_filling(&volume, &at.address).await?))
}

async fn restore_volume(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(ask): Json<RestoreVolume>,
) -> Result<Response, Failure> {
    let pool = Arc::clone(&control.pool);
    long::follow(move |work| async move { restore::restore(&pool, &volume, &ask, &work).await })
}

async fn restore_image(
    State(control): Shared,
    Named(image): Named<ImageName>,
    Json(ask): Json<RestoreImage>,
) -> Result<Response, Failure> {
    let pool = Arc::clone(&control.pool);
    long::follow(
        move |work| async move { restore::restore_image(&pool, &image, &ask, &work).await },
    )
}

async fn restoring(State(control): Shared) -> Reply<Vec<RestoringLayer>> {
    let mut all = control.pool.restoring().await?;
    all.iter_mut().for_each(|one| one.lacks_key = lacks_key(&one.from));
    Ok(Json(all))
}

async fn take_key(Json(ask): Json<SendBackupKey>) -> Reply<()> {
    Ok(Json(take_backup_key(&ask).await?))
}

async fn list(Json(ask): Json<ListBackups>) -> Reply<Vec<FoundBackup>> {
    Ok(Json(restore::list(&ask).await?))
}

async fn verify(Json(ask): Json<VerifyBackup>) -> Result<Response, Failure> {
    long::follow(move |work| async move { restore::verify(&ask, &work).await })
}

async fn delete_backup(Json(ask): Json<DeleteBackup>) -> Result<Response, Failure> {
    long::follow(move |work| async move { delete::delete(&ask, &work).await })
}
