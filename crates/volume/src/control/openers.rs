//! The part of the API with which the controller says which other hosts may open a volume.

use std::sync::Arc;

use axum::Router;
use axum::extract::Path;
use axum::routing::{get, put};
use perigee_http::{Json, Reply};
use perigee_model::volume::Openers;
use perigee_model::{HostId, VolumeName};

use super::{Control, Named, Shared};
use axum::extract::State;

pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route("/volumes/{volume}/hosts", get(list).put(set))
        .route("/volumes/{volume}/hosts/{host}", put(add).delete(remove))
}

async fn list(State(control): Shared, Named(volume): Named<VolumeName>) -> Reply<Openers> {
    Ok(Json(Openers { hosts: control.pool.openers(&volume).await? }))
}

async fn set(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(Openers { hosts }): Json<Openers>,
) -> Reply<()> {
    Ok(Json(control.pool.set_openers(&volume, hosts).await?))
}

async fn add(
    State(control): Shared,
    Path((volume, host)): Path<(VolumeName, HostId)>,
) -> Reply<()> {
    Ok(Json(control.pool.set_opener(&volume, &host, true).await?))
}

async fn remove(
    State(control): Shared,
    Path((volume, host)): Path<(VolumeName, HostId)>,
) -> Reply<()> {
    Ok(Json(control.pool.set_opener(&volume, &host, false).await?))
}
