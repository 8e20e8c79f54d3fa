//! `/balance`, and the mode of a site.

use axum::extract::State;
use perigee_http::{Json, Reply};
use perigee_model::SiteId;
use perigee_model::balance::{SetBalance, SiteBalance};

use super::{Name, Shared, json, to_its_end};
use crate::balance;

/// Which VMs would lose less at another host of their site, why they move or stay, and which hosts' loads are not known.
#[utoipa::path(get, path = "/balance", tag = "hosts",
    responses((status = 200, body = Vec<SiteBalance>)))]
pub async fn balance(State(cluster): Shared) -> Reply<Vec<SiteBalance>> {
    json(balance::list(&cluster))
}

/// Sets what is done about overloaded hosts of a site: nothing, advice, or moves.
#[utoipa::path(put, path = "/sites/{site}/balance", tag = "hosts", params(("site" = String, Path)),
    request_body = SetBalance, responses((status = 200, body = SiteBalance)))]
pub async fn set_balance(
    State(cluster): Shared,
    Name(site): Name<SiteId>,
    Json(ask): Json<SetBalance>,
) -> Reply<SiteBalance> {
    json(to_its_end(async move { balance::set_mode(&cluster, &site, ask).await }).await?)
}
