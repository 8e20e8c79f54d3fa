//! `/networks`

use axum::extract::State;
use perigee_http::{Json, Reply};
use perigee_model::network::{ClusterNetwork, NewNetwork};
use perigee_model::{NetworkName, Problem};

use super::caller::{Caller, Full};
use super::{Shared, json};
use crate::cluster::Cluster;
use crate::networks;

/// The tenant's networks, with the VMs that the caller sees.
#[utoipa::path(get, path = "/networks", tag = "networks",
    responses((status = 200, body = Vec<ClusterNetwork>)))]
pub async fn list(State(cluster): Shared, caller: Caller) -> Reply<Vec<ClusterNetwork>> {
    let mut networks = networks::list(&cluster).await?;
    networks.retain(|network| caller.sees(network.name.as_str()));
    networks.iter_mut().for_each(|network| hide_vms(&cluster, &caller, network));
    json(networks)
}

/// A member sees its own VMs only.
fn hide_vms(cluster: &Cluster, caller: &Caller, network: &mut ClusterNetwork) {
    network.vms.retain(|vm| {
        cluster.index.of_vm(&vm.vm).is_none_or(|record| caller.sees_this_job(&record.job))
    });
}

/// Makes a network. VMs of the tenant can be in it, at whichever hosts they are.
#[utoipa::path(post, path = "/networks", tag = "networks", request_body = NewNetwork,
    responses((status = 200, body = ClusterNetwork)))]
pub async fn create(
    State(cluster): Shared,
    caller: Caller,
    Json(new): Json<NewNetwork>,
) -> Reply<ClusterNetwork> {
    let new = caller.new_network(&cluster, new)?;
    json(networks::create(&cluster, new).await?)
}

/// A network, with those of its VMs that the caller sees.
#[utoipa::path(get, path = "/networks/{network}", tag = "networks",
    params(("network" = String, Path)), responses((status = 200, body = ClusterNetwork)))]
pub async fn info(
    State(cluster): Shared,
    caller: Caller,
    Full(name): Full<NetworkName>,
) -> Reply<ClusterNetwork> {
    json(shown(&cluster, &caller, &name).await?)
}

/// A network as this caller sees it.
///
/// # Errors
/// `NotFound`.
pub(super) async fn shown(
    cluster: &Cluster,
    caller: &Caller,
    name: &NetworkName,
) -> Result<ClusterNetwork, Problem> {
    let mut network = networks::info(cluster, name).await?;
    hide_vms(cluster, caller, &mut network);
    Ok(network)
}

/// Deletes a network that no VM uses.
#[utoipa::path(delete, path = "/networks/{network}", tag = "networks",
    params(("network" = String, Path)), responses((status = 200)))]
pub async fn delete(State(cluster): Shared, Full(name): Full<NetworkName>) -> Reply<()> {
    json(networks::delete(&cluster, &name).await?)
}
