//! The part of the control API for data that may not leave its site: [`perigee_model::leave_site`].

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::{post, put};
use perigee_http::{Json, Reply};
use perigee_model::leave_site::{
    FindLayers, FoundLayers, LeaveSiteSet, SetLayersLeaveSite, SetLeaveSiteAs, SiteAddress, SiteMap,
};
use perigee_model::{ImageName, VolumeName};
use perigee_store::Data;

use super::{Asker, Control, Named, Shared};

/// The routes for data that may not leave their site.
pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route("/volumes/{volume}/leave-site", put(set_of_volume))
        .route("/images/{image}/leave-site", put(set_of_image))
        .route("/layers/find", post(find_layers))
        .route("/layers/leave-site", put(set_layers_leave_site))
        .route("/sites", put(set_sites))
}

async fn set_of_volume(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(ask): Json<SetLeaveSiteAs>,
) -> Reply<LeaveSiteSet> {
    Ok(Json(control.exports.set_leave_site(&Data::Volume(volume), ask).await?))
}

async fn set_of_image(
    State(control): Shared,
    Named(image): Named<ImageName>,
    Json(ask): Json<SetLeaveSiteAs>,
) -> Reply<LeaveSiteSet> {
    Ok(Json(control.exports.set_leave_site(&Data::Image(image), ask).await?))
}

async fn find_layers(State(control): Shared, Json(ask): Json<FindLayers>) -> Reply<FoundLayers> {
    Ok(Json(control.pool.find_layers(ask).await?))
}

async fn set_layers_leave_site(
    State(control): Shared,
    Json(ask): Json<SetLayersLeaveSite>,
) -> Reply<()> {
    control.pool.set_layers_leave_site(ask).await?;
    Ok(Json(control.exports.close_foreign().await?))
}

async fn set_sites(
    State(control): Shared,
    Asker(peer): Asker,
    Json(mut map): Json<SiteMap>,
) -> Reply<()> {
    if let (Some(address), Some(site)) = (peer.address, map.teller.take()) {
        map.hosts.push(SiteAddress { address, site });
    }
    Ok(Json(control.exports.set_sites(map).await?))
}
