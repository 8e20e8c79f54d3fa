//! `/balance`, and the mode of a site.

use axum::extract::State;
use perigee_http::{Json, Reply};
use perigee_model::balance::{SetBalance, SiteBalance, VmStanding};
use perigee_model::{SiteId, VmId};

use super::caller::Full;
use super::{Name, Shared, json, to_its_end};
use crate::balance;

/// Which VMs would lose less at another host of their site, why they move or stay, and which hosts' loads are not known.
#[utoipa::path(get, path = "/balance", tag = "hosts",
    responses((status = 200, body = Vec<SiteBalance>)))]
pub async fn balance(State(cluster): Shared) -> Reply<Vec<SiteBalance>> {
    json(balance::list(&cluster))
}

/// Where a VM stands: what it loses at its host, what it would have saved at others, its last moves, and what would happen next.
#[utoipa::path(get, path = "/vms/{vm}/balance", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200, body = VmStanding)))]
pub async fn of_vm(State(cluster): Shared, Full(vm): Full<VmId>) -> Reply<VmStanding> {
    json(balance::explain::of_vm(&cluster, &vm).await?)
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
