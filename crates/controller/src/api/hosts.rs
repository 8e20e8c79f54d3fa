//! `/hosts`, `/sites`, `/links`

use axum::extract::State;
use perigee_http::{Json, Reply};
use perigee_model::HostId;
use perigee_model::job::{Host, Link, Site};
use perigee_model::vm::HostAddresses;

use super::{Name, Shared, json};
use crate::{hosts, links};

/// A host makes itself known, and says again every few seconds that it is there.
#[utoipa::path(put, path = "/hosts/{host}", tag = "hosts", params(("host" = String, Path)),
    request_body = HostAddresses, responses((status = 200)))]
pub async fn register(
    State(cluster): Shared,
    Name(host): Name<HostId>,
    Json(addresses): Json<HostAddresses>,
) -> Reply<()> {
    hosts::register(&cluster, &host, addresses).await?;
    json(())
}

#[utoipa::path(get, path = "/hosts", tag = "hosts", responses((status = 200, body = Vec<Host>)))]
pub async fn list(State(cluster): Shared) -> Reply<Vec<Host>> {
    json(hosts::list(&cluster).await?)
}

#[utoipa::path(get, path = "/hosts/{host}", tag = "hosts", params(("host" = String, Path)),
    responses((status = 200, body = Host)))]
pub async fn info(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<Host> {
    json(hosts::info(&cluster, &host).await?)
}

/// Forgets a host that is unreachable and holds nothing.
#[utoipa::path(delete, path = "/hosts/{host}", tag = "hosts", params(("host" = String, Path)),
    responses((status = 200)))]
pub async fn remove(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<()> {
    json(hosts::remove(&cluster, &host).await?)
}

#[utoipa::path(get, path = "/sites", tag = "hosts", responses((status = 200, body = Vec<Site>)))]
pub async fn sites(State(cluster): Shared) -> Reply<Vec<Site>> {
    json(hosts::sites(&cluster))
}

/// What was measured between hosts.
#[utoipa::path(get, path = "/links", tag = "links", responses((status = 200, body = Vec<Link>)))]
pub async fn links(State(cluster): Shared) -> Reply<Vec<Link>> {
    json(links::list(&cluster).await?)
}

/// Measures every ordered pair of hosts now.
#[utoipa::path(post, path = "/links/probe", tag = "links",
    responses((status = 200, body = Vec<Link>)))]
pub async fn probe_links(State(cluster): Shared) -> Reply<Vec<Link>> {
    json(links::probe_all(&cluster).await?)
}
