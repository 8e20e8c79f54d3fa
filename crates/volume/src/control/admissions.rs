//! The part of the API with which the controller says which other hosts may open a volume.

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path};
use axum::routing::{get, put};
use perigee_http::{Json, Reply};
use perigee_model::volume::{AdmittedHosts, AllAdmittedHosts};
use perigee_model::{HostId, VolumeName};

use super::{Control, Named, Shared};
use axum::extract::State;

/// What a home is told at once: as many bytes as it may answer. A volume takes about a hundred of them.
const ALL_BYTES_MAX: usize = 64 << 20;

/// The routes for the hosts that may open a volume.
pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route(
            "/admissions",
            get(list_all).put(add_all).layer(DefaultBodyLimit::max(ALL_BYTES_MAX)),
        )
        .route("/volumes/{volume}/hosts", get(list).put(add_several))
        .route("/volumes/{volume}/hosts/{host}", put(add).delete(remove))
}

async fn list_all(State(control): Shared) -> Reply<AllAdmittedHosts> {
    Ok(Json(AllAdmittedHosts { volumes: control.pool.all_admitted_hosts().await? }))
}

/// Those that were let in before stay so.
async fn add_all(
    State(control): Shared,
    Json(AllAdmittedHosts { volumes }): Json<AllAdmittedHosts>,
) -> Reply<()> {
    Ok(Json(control.pool.admit_all(volumes).await?))
}

async fn list(State(control): Shared, Named(volume): Named<VolumeName>) -> Reply<AdmittedHosts> {
    Ok(Json(AdmittedHosts { hosts: control.pool.admitted_hosts(&volume).await? }))
}

/// Those that were let in before stay so.
async fn add_several(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(AdmittedHosts { hosts }): Json<AdmittedHosts>,
) -> Reply<()> {
    Ok(Json(control.pool.admit(&volume, hosts).await?))
}

async fn add(
    State(control): Shared,
    Path((volume, host)): Path<(VolumeName, HostId)>,
) -> Reply<()> {
    Ok(Json(control.pool.admit(&volume, vec![host]).await?))
}

/// What the host has open of the volume is closed.
async fn remove(
    State(control): Shared,
    Path((volume, host)): Path<(VolumeName, HostId)>,
) -> Reply<()> {
    control.pool.end_admission(&volume, &host).await?;
    control.exports.admissions.end(&volume, &host);
    Ok(Json(()))
}
