//! The part of the control API for volumes whose home moves: [`perigee_model::home`].

use std::sync::Arc;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::routing::{delete, get, post};
use perigee_http::{Json, Reply};
use perigee_model::home::{
    CallOff, Depart, Departed, DepartedLayer, TakeVolume, Tenure, VolumeHome,
};
use perigee_model::{Problem, VolumeName};
use perigee_store::Data;
use serde::Deserialize;

use super::grants::Granted;
use super::{Asker, Control, Named, Shared, check_address};
use crate::sites::Want;

/// The routes for volumes whose home moves.
pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route("/volumes/{volume}/home", get(home))
        .route("/volumes/{volume}/take", post(take))
        .route("/volumes/{volume}/seal", post(seal))
        .route("/volumes/{volume}/depart", post(depart))
        .route("/volumes/{volume}/refuse", post(refuse))
        .route("/volumes/{volume}/return", post(return_home))
        .route("/volumes/{volume}/departed", delete(forget))
}

async fn home(State(control): Shared, Named(volume): Named<VolumeName>) -> Reply<VolumeHome> {
    Ok(Json(control.pool.home(&volume).await?))
}

/// A client that hangs up does not stop it.
async fn take(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(ask): Json<TakeVolume>,
) -> Reply<VolumeHome> {
    let what = format!("can't take volume {volume}");
    check_address(&what, &ask.from.nbd_addr)?;
    check_address(&what, &ask.to.nbd_addr)?;
    let exports = Arc::clone(&control.exports);
    let taking = tokio::spawn(async move { exports.take(&volume, &ask).await });
    Ok(Json(taking.await.map_err(|error| Problem::internal(what, error))??))
}

/// For the new home, before it asks the volume to depart.
async fn seal(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Asker(peer): Asker,
    granted: Granted,
) -> Reply<Vec<DepartedLayer>> {
    let what = format!("can't seal volume {volume} for a new home");
    granted.check(&what, |allows| allows.takes(&volume))?;
    let of = Data::Volume(volume.clone());
    control.exports.check_leaving(&of, Want::Home, peer).await?;
    Ok(Json(control.pool.seal_ahead(&volume).await?))
}

/// A client that hangs up does not stop it.
async fn depart(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Asker(peer): Asker,
    granted: Granted,
    Json(ask): Json<Depart>,
) -> Reply<Departed> {
    let what = format!("can't let volume {volume} go");
    granted.check(&what, |allows| allows.takes_after(&volume, ask.tenure))?;
    let of = Data::Volume(volume.clone());
    control.exports.check_leaving(&of, Want::Home, peer).await?;
    check_address(&what, &ask.to.nbd_addr)?;
    let exports = Arc::clone(&control.exports);
    let departing = tokio::spawn(async move { exports.depart(&volume, &ask).await });
    Ok(Json(departing.await.map_err(|error| Problem::internal(what, error))??))
}

async fn refuse(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(call_off): Json<CallOff>,
) -> Reply<VolumeHome> {
    Ok(Json(control.pool.refuse_home(&volume, call_off).await?))
}

async fn return_home(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(call_off): Json<CallOff>,
) -> Reply<VolumeHome> {
    Ok(Json(control.exports.return_home(&volume, call_off).await?))
}

#[derive(Deserialize)]
struct OfTenure {
    tenure: Tenure,
}

async fn forget(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    query: Result<Query<OfTenure>, QueryRejection>,
) -> Reply<()> {
    let Query(OfTenure { tenure }) = query.map_err(|error| {
        Problem::invalid(format!("can't forget volume {volume}"), error.body_text())
    })?;
    Ok(Json(control.pool.forget_departed(&volume, tenure).await?))
}
