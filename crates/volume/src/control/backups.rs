//! The part of the control API for backups: [`perigee_model::backup`].

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use perigee_http::{Failure, Json, Reply};
use perigee_model::VolumeName;
use perigee_model::backup::{
    BackupTarget, DeleteBackup, FoundBackup, RestoreVolume, RestoringLayer, SealForBackup,
    SealedForBackup, ShipBackup, VerifyBackup,
};

use super::{Control, Named, Shared, long};
use crate::backups::target::Target;
use crate::backups::{delete, restore, seal, ship};

/// The routes for backups.
pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route("/volumes/{volume}/backup", post(back_up))
        .route("/volumes/{volume}/backup/end", post(end))
        .route("/volumes/{volume}/restore", post(restore_volume))
        .route("/backups/seal", post(seal_disks))
        .route("/backups/restoring", get(restoring))
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
    long::follow(move |work| async move { ship(&pool, &volume, &ask, &work).await })
}

async fn seal_disks(
    State(control): Shared,
    Json(ask): Json<SealForBackup>,
) -> Reply<Vec<SealedForBackup>> {
    Ok(Json(seal(&control.pool, &ask).await?))
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

async fn restoring(State(control): Shared) -> Reply<Vec<RestoringLayer>> {
    Ok(Json(control.pool.restoring().await?))
}

async fn list(Json(at): Json<BackupTarget>) -> Reply<Vec<FoundBackup>> {
    Ok(Json(restore::list(&Target::new(&at)?).await?))
}

async fn verify(Json(ask): Json<VerifyBackup>) -> Result<Response, Failure> {
    long::follow(move |work| async move { restore::verify(&ask, &work).await })
}

async fn delete_backup(Json(ask): Json<DeleteBackup>) -> Result<Response, Failure> {
    long::follow(move |work| async move { delete::delete(&ask, &work).await })
}
