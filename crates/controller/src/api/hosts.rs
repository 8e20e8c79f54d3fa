//! `/hosts`, `/sites`, `/links`

use axum::extract::{Query, State};
use perigee_http::{Json, Reply};
use perigee_model::balance::SetPlace;
use perigee_model::drain::{DrainHost, HostDrain};
use perigee_model::enrol::SetSite;
use perigee_model::job::{Host, HostRemoval, Link, Site};
use perigee_model::measurement::{HostMeasurement, MeasureHost};
use perigee_model::vm::HostAddresses;
use perigee_model::{HostId, Problem, SiteId};
use serde::Deserialize;

use super::caller::Caller;
use super::{Name, Shared, json, to_its_end};
use crate::planning::links;
use crate::{drain, hosts, measuring, restored};

/// Registers a host. The host repeats this every few seconds as a heartbeat.
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

/// The host's agent stops in order, for an upgrade: its VMs go on, and no job is lost with it.
#[utoipa::path(post, path = "/hosts/{host}/stops", tag = "hosts", params(("host" = String, Path)),
    responses((status = 200)))]
pub async fn stops(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<()> {
    hosts::stops(&cluster, &host)?;
    json(())
}

/// The machine is about to go down: what is there leaves first, as in a drain. It is called off when the host has booted again.
#[utoipa::path(post, path = "/hosts/{host}/shuts-down", tag = "hosts", params(("host" = String, Path)),
    responses((status = 200)))]
pub async fn shuts_down(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<()> {
    json(to_its_end(async move { drain::shuts_down(&cluster, &host).await }).await?)
}

/// After a restore of the controller: the host is not waited for any more. What it has since the backup is not known.
#[utoipa::path(post, path = "/hosts/{host}/give-up", tag = "hosts",
    params(("host" = String, Path)), responses((status = 200)))]
pub async fn give_up(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<()> {
    json(to_its_end(async move { restored::give_up(&cluster, &host).await }).await?)
}

/// Says at which site a host is from now on. Its agent has to say the same.
#[utoipa::path(put, path = "/hosts/{host}/site", tag = "hosts", params(("host" = String, Path)),
    request_body = SetSite, responses((status = 200)))]
pub async fn set_site(
    State(cluster): Shared,
    Name(host): Name<HostId>,
    Json(SetSite { site }): Json<SetSite>,
) -> Reply<()> {
    json(to_its_end(async move { hosts::set_site(&cluster, &host, site).await }).await?)
}

/// The hosts, each with its state, its figures and its warnings.
#[utoipa::path(get, path = "/hosts", tag = "hosts", responses((status = 200, body = Vec<Host>)))]
pub async fn list(State(cluster): Shared) -> Reply<Vec<Host>> {
    json(hosts::list(&cluster).await?)
}

/// A host, with its state, its figures and its warnings.
#[utoipa::path(get, path = "/hosts/{host}", tag = "hosts", params(("host" = String, Path)),
    responses((status = 200, body = Host)))]
pub async fn info(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<Host> {
    let info = hosts::info(&cluster, &host).await?;
    json(Host { measurement: measuring::known(&cluster, &host), ..info })
}

/// Has a host drained: nothing new comes to it, and what it has moves away while it runs. Or only says what would happen. The answer
/// comes at once; what is left is shown at the host.
#[utoipa::path(post, path = "/hosts/{host}/drain", tag = "hosts", params(("host" = String, Path)),
    request_body = DrainHost, responses((status = 200, body = HostDrain)))]
pub async fn drain(
    State(cluster): Shared,
    caller: Caller,
    Name(host): Name<HostId>,
    Json(ask): Json<DrainHost>,
) -> Reply<HostDrain> {
    json(to_its_end(async move { drain::drain(&cluster, &host, caller.who, ask).await }).await?)
}

/// Calls the drain of a host off. What has left stays where it is.
#[utoipa::path(post, path = "/hosts/{host}/undrain", tag = "hosts",
    params(("host" = String, Path)), responses((status = 200)))]
pub async fn undrain(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<()> {
    json(to_its_end(async move { drain::undrain(&cluster, &host).await }).await?)
}

/// Has a host measured: its links, its pool's disk, and disks of other hosts. The answer comes at once.
#[utoipa::path(post, path = "/hosts/{host}/measure", tag = "hosts", params(("host" = String, Path)),
    request_body = MeasureHost, responses((status = 200, body = HostMeasurement)))]
pub async fn measure(
    State(cluster): Shared,
    caller: Caller,
    Name(host): Name<HostId>,
    Json(ask): Json<MeasureHost>,
) -> Reply<HostMeasurement> {
    let begun = async move { measuring::start(&cluster, &host, ask, caller.who).await };
    json(to_its_end(begun).await?)
}

/// The last measurement of a host, also while it is under way; of a host that was not measured, that of another one of its kind.
#[utoipa::path(get, path = "/hosts/{host}/measure", tag = "hosts", params(("host" = String, Path)),
    responses((status = 200, body = HostMeasurement)))]
pub async fn measured(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<HostMeasurement> {
    cluster.hosts.get(&host)?;
    json(measuring::get(&cluster, &host)?)
}

/// Calls the measurement of a host off. What was measured is kept.
#[utoipa::path(delete, path = "/hosts/{host}/measure", tag = "hosts",
    params(("host" = String, Path)), responses((status = 200, body = HostMeasurement)))]
pub async fn cancel_measurement(
    State(cluster): Shared,
    Name(host): Name<HostId>,
) -> Reply<HostMeasurement> {
    json(measuring::cancel(&cluster, &host)?)
}

/// The query of [`remove`].
#[derive(Debug, Deserialize)]
pub struct Force {
    #[serde(default)]
    force: bool,
}

/// Removes a host that is unreachable. If volumes or VMs are lost with it, `force` is required.
#[utoipa::path(delete, path = "/hosts/{host}", tag = "hosts",
    params(("host" = String, Path), ("force" = Option<bool>, Query)),
    responses((status = 200, body = HostRemoval)))]
pub async fn remove(
    State(cluster): Shared,
    Name(host): Name<HostId>,
    query: Result<Query<Force>, axum::extract::rejection::QueryRejection>,
) -> Reply<HostRemoval> {
    let Query(query) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    json(to_its_end(async move { hosts::remove(&cluster, &host, query.force).await }).await?)
}

/// The sites, each with its hosts.
#[utoipa::path(get, path = "/sites", tag = "hosts", responses((status = 200, body = Vec<Site>)))]
pub async fn sites(State(cluster): Shared) -> Reply<Vec<Site>> {
    json(hosts::sites(&cluster))
}

/// Says which of the hosts of a site that are as good for a VM gets it: the least busy one, or the fullest one.
#[utoipa::path(put, path = "/sites/{site}/place", tag = "hosts", params(("site" = String, Path)),
    request_body = SetPlace, responses((status = 200, body = Site)))]
pub async fn set_place(
    State(cluster): Shared,
    Name(site): Name<SiteId>,
    Json(ask): Json<SetPlace>,
) -> Reply<Site> {
    json(to_its_end(async move { hosts::place::set(&cluster, &site, ask).await }).await?)
}

/// The measurements of the links between hosts.
#[utoipa::path(get, path = "/links", tag = "links", responses((status = 200, body = Vec<Link>)))]
pub async fn links(State(cluster): Shared) -> Reply<Vec<Link>> {
    json(cluster.links.all())
}

/// Measures every ordered pair of sites now.
#[utoipa::path(post, path = "/links/probe", tag = "links",
    responses((status = 200, body = Vec<Link>)))]
pub async fn probe_links(State(cluster): Shared) -> Reply<Vec<Link>> {
    json(links::probe_all(&cluster).await?)
}
