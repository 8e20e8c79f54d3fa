//! `/vms`

use axum::extract::State;
use perigee_http::{Failure, Json, Reply};
use perigee_model::VmId;
use perigee_model::job::{Migration, MoveVm, Vm};
use perigee_model::volume_move::VolumesOnMove;

use super::caller::{Caller, Full};
use super::{Shared, json};
use crate::{jobs, migration, vms};

/// All VMs. A VM whose host does not answer is shown as it was last seen, with the reason.
#[utoipa::path(get, path = "/vms", tag = "vms", responses((status = 200, body = Vec<Vm>)))]
pub async fn list(State(cluster): Shared, caller: Caller) -> Reply<Vec<Vm>> {
    let mut vms = vms::list(&cluster).await?;
    vms.retain(|vm| {
        let record = jobs::of_vm(&cluster, &vm.id);
        let owner = record.as_ref().map_or("", |record| record.job.spec.owner.as_str());
        caller.sees_job(vm.id.as_str(), owner)
    });
    json(vms)
}

#[utoipa::path(get, path = "/vms/{vm}", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200, body = Vm)))]
pub async fn info(State(cluster): Shared, Full(vm): Full<VmId>) -> Reply<Vm> {
    json(vms::get(&cluster, &vm).await?)
}

/// Stops a VM at once. Its job fails.
#[utoipa::path(post, path = "/vms/{vm}/stop", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200)))]
pub async fn stop(State(cluster): Shared, Full(vm): Full<VmId>) -> Reply<()> {
    json(vms::stop(&cluster, &vm).await?)
}

/// Starts a live migration. The answer comes at once.
#[utoipa::path(post, path = "/vms/{vm}/move", tag = "vms", params(("vm" = String, Path)),
    request_body = MoveVm, responses((status = 200, body = Migration)))]
pub async fn move_vm(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    Json(ask): Json<MoveVm>,
) -> Reply<Migration> {
    if ask.volumes == VolumesOnMove::Follow && !ask.confirmed {
        vms::check_far(&cluster, &vm, &ask.host).await?;
    }
    json(vms::move_to(&cluster, &vm, ask.host, ask.volumes).await?)
}

/// Cancels a live migration that is running. The answer comes at once.
#[utoipa::path(post, path = "/vms/{vm}/move/cancel", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200, body = Migration)))]
pub async fn cancel_move(State(cluster): Shared, Full(vm): Full<VmId>) -> Reply<Migration> {
    json(migration::cancel(&cluster, &vm).await?)
}

/// A VM's migrations with their phases, the oldest first.
#[utoipa::path(get, path = "/vms/{vm}/migrations", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200, body = Vec<Migration>)))]
pub async fn migrations(State(cluster): Shared, Full(vm): Full<VmId>) -> Reply<Vec<Migration>> {
    json(migration::of_vm(&cluster, &vm).await?)
}

/// The end of the serial console.
#[utoipa::path(get, path = "/vms/{vm}/console", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn console(State(cluster): Shared, Full(vm): Full<VmId>) -> Result<String, Failure> {
    Ok(vms::console(&cluster, &vm).await?)
}
