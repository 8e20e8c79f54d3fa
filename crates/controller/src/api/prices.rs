//! `/prices`

use axum::extract::State;
use perigee_http::Reply;
use perigee_model::HostId;
use perigee_model::prices::KnownPrices;

use super::{Shared, json};

/// What hosts, disks and traffic cost, as far as it is known, and what is not known and why. Hosts that are not named cost nothing, but for
/// rented ones, which cost what their providers have said.
#[utoipa::path(get, path = "/prices", tag = "controller",
    responses((status = 200, body = KnownPrices)))]
pub async fn prices(State(cluster): Shared) -> Reply<KnownPrices> {
    let site_of =
        |host: &HostId| cluster.hosts.get(host).ok().map(|host| host.addresses.site.clone());
    json(cluster.prices.known(&cluster.rentals, site_of))
}
