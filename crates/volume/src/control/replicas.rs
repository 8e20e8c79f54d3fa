//! The part of the control API for replicas of volumes: [`perigee_model::replica`].

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use perigee_http::{Failure, Json, Reply};
use perigee_model::home::VolumeHome;
use perigee_model::replica::{
    PinReplica, PromoteReplica, PullReplica, PulledReplica, ReplicaPin, SealReplica, SealedReplica,
    Supersede, Superseded, VolumeReplica,
};
use perigee_model::{Problem, VolumeName};

use super::grants::Granted;
use super::{Control, Named, Shared, check_address, long};

/// The routes for replicas.
pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route("/volumes/{volume}/replica", get(replica).delete(drop_replica))
        .route("/volumes/{volume}/replica/pull", post(pull))
        .route("/volumes/{volume}/replica/compact", post(compact))
        .route("/volumes/{volume}/replica/promote", post(promote))
        .route("/volumes/{volume}/replica/seal", post(seal))
        .route("/volumes/{volume}/replica/pins", get(pins).post(pin))
        .route("/volumes/{volume}/supersede", post(supersede))
}

async fn replica(State(control): Shared, Named(volume): Named<VolumeName>) -> Reply<VolumeReplica> {
    Ok(Json(control.pool.replica(&volume).await?))
}

async fn drop_replica(State(control): Shared, Named(volume): Named<VolumeName>) -> Reply<()> {
    Ok(Json(control.pool.drop_replica(&volume).await?))
}

/// A client that hangs up does not stop it.
async fn pull(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(ask): Json<PullReplica>,
) -> Reply<PulledReplica> {
    let what = format!("can't make a replica of volume {volume}");
    check_address(&what, &ask.from.nbd_addr)?;
    let exports = Arc::clone(&control.exports);
    let pulling = tokio::spawn(async move { exports.pull_replica(&volume, &ask).await });
    Ok(Json(pulling.await.map_err(|error| Problem::internal(what, error))??))
}

async fn compact(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
) -> Result<Response, Failure> {
    let pool = control.pool.clone();
    long::follow(move |work| async move { pool.compact_replica(&volume, work).await })
}

async fn promote(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(ask): Json<PromoteReplica>,
) -> Reply<VolumeHome> {
    Ok(Json(control.exports.promote(&volume, ask).await?))
}

async fn seal(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    granted: Granted,
    Json(ask): Json<SealReplica>,
) -> Reply<SealedReplica> {
    let what = format!("can't seal volume {volume} for a replica");
    granted.check(&what, |allows| allows.replicates(&volume, &ask.replica))?;
    Ok(Json(control.pool.seal_replica(&volume, ask).await?))
}

async fn pins(State(control): Shared, Named(volume): Named<VolumeName>) -> Reply<Vec<ReplicaPin>> {
    Ok(Json(control.pool.replica_pins(&volume).await?))
}

async fn pin(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    granted: Granted,
    Json(ask): Json<PinReplica>,
) -> Reply<()> {
    let what = format!("can't say what a replica has of volume {volume}");
    granted.check(&what, |allows| allows.replicates(&volume, &ask.replica))?;
    Ok(Json(control.pool.pin_replica(&volume, ask).await?))
}

/// A client that hangs up does not stop it.
async fn supersede(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(ask): Json<Supersede>,
) -> Reply<Superseded> {
    let what = format!("can't give up volume {volume}");
    check_address(&what, &ask.to.nbd_addr)?;
    let exports = Arc::clone(&control.exports);
    let ending = tokio::spawn(async move { exports.supersede(&volume, &ask).await });
    Ok(Json(ending.await.map_err(|error| Problem::internal(what, error))??))
}
