//! `/renting`

use axum::extract::State;
use perigee_http::{Json, Reply};
use perigee_model::renting::{Renting, SetRenting};

use super::{Shared, json, to_its_end};
use crate::rentals;

/// Whether the cluster rents hosts by itself, what the last look has decided or would do, and why.
#[utoipa::path(get, path = "/renting", tag = "rentals", responses((status = 200, body = Renting)))]
pub async fn show(State(cluster): Shared) -> Reply<Renting> {
    json(cluster.renter.shown())
}

/// Sets whether the cluster rents hosts by itself, what waiting costs a job that does not say it, and how many hosts may be rented at once. What
/// is left out stays as it is.
#[utoipa::path(put, path = "/renting", tag = "rentals", request_body = SetRenting,
    responses((status = 200, body = Renting)))]
pub async fn set(State(cluster): Shared, Json(ask): Json<SetRenting>) -> Reply<Renting> {
    json(to_its_end(async move { rentals::set_renting(&cluster, ask).await }).await?)
}
