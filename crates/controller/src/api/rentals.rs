//! `/providers` and `/rentals`

use axum::extract::State;
use perigee_http::{Json, Reply};
use perigee_model::RentalId;
use perigee_model::kept::KeptDisk;
use perigee_model::rental::{EndRental, ProviderOffers, RentHost, Rental};

use super::caller::Caller;
use super::{Name, Shared, json, to_its_end};
use crate::rentals;

/// Who has machines for rent, for how much, and what was refused lately for want of capacity or quota.
#[utoipa::path(get, path = "/providers", tag = "rentals",
    responses((status = 200, body = Vec<ProviderOffers>)))]
pub async fn offers(State(cluster): Shared) -> Reply<Vec<ProviderOffers>> {
    json(rentals::offers(&cluster).await)
}

/// Rents a host. The answer comes before the provider is asked; the rental shows what becomes of it. With the id of a rental that is known, the
/// answer is that rental.
#[utoipa::path(post, path = "/rentals", tag = "rentals", request_body = RentHost,
    responses((status = 200, body = Rental)))]
pub async fn rent(
    State(cluster): Shared,
    caller: Caller,
    Json(ask): Json<RentHost>,
) -> Reply<Rental> {
    json(to_its_end(async move { rentals::rent(&cluster, ask, caller.who).await }).await?)
}

/// The rented hosts, also those that were given back in the last month.
#[utoipa::path(get, path = "/rentals", tag = "rentals",
    responses((status = 200, body = Vec<Rental>)))]
pub async fn list(State(cluster): Shared) -> Reply<Vec<Rental>> {
    json(rentals::list(&cluster))
}

/// A rented host: how far it is, since when and why, and what it costs.
#[utoipa::path(get, path = "/rentals/{rental}", tag = "rentals", params(("rental" = String, Path)),
    responses((status = 200, body = Rental)))]
pub async fn info(State(cluster): Shared, Name(rental): Name<RentalId>) -> Reply<Rental> {
    json(rentals::get(&cluster, &rental)?)
}

/// The disks of rented hosts that are kept at their providers, because replicas are there, also those that were kept in the last month.
#[utoipa::path(get, path = "/kept-disks", tag = "rentals",
    responses((status = 200, body = Vec<KeptDisk>)))]
pub async fn kept_disks(State(cluster): Shared) -> Reply<Vec<KeptDisk>> {
    json(rentals::kept_disks(&cluster).await?)
}

/// Gives a rented host back: what it has leaves it first, or ends with it.
#[utoipa::path(post, path = "/rentals/{rental}/end", tag = "rentals",
    params(("rental" = String, Path)), request_body = EndRental,
    responses((status = 200, body = Rental)))]
pub async fn end(
    State(cluster): Shared,
    caller: Caller,
    Name(rental): Name<RentalId>,
    Json(ask): Json<EndRental>,
) -> Reply<Rental> {
    json(to_its_end(async move { rentals::end(&cluster, &rental, caller.who, ask).await }).await?)
}
