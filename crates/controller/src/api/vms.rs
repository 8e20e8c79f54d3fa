//! `/vms`

use axum::extract::{Query, Request, State};
use axum::response::{IntoResponse, Response};
use perigee_http::{Failure, Json, Peer, Reply};
use perigee_model::job::{
    AdoptVm, ClusterImage, DEFAULT_OWNER, EndUnknownVm, Migration, MoveVm, Vm,
};
use perigee_model::persistent_vm::{
    AttachVolume, CopiedFile, DetachVolume, ExecBegun, ExecInVm, ExecStatus, NewVm, PowerRequest,
    ResizeVm, RestoreVm, SetVm, StopVm, VmState,
};
use perigee_model::volume::Snapshot;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{Problem, VmId};

use super::caller::{Caller, Full};
use super::{Shared, json, to_its_end};
use crate::cluster::Cluster;
use crate::records::declared;
use crate::storage::unknown;
use crate::{migration, vms};

/// All VMs. A VM whose host does not answer is shown as it was last seen, with the reason.
#[utoipa::path(get, path = "/vms", tag = "vms", responses((status = 200, body = Vec<Vm>)))]
pub async fn list(State(cluster): Shared, caller: Caller) -> Reply<Vec<Vm>> {
    let vms = vms::list(&cluster).await?;
    json(seen(&cluster, &caller, vms))
}

/// The same as the hosts have said a moment ago: they are not asked for it.
pub async fn list_lately(State(cluster): Shared, caller: Caller) -> Reply<Vec<Vm>> {
    let vms = vms::list_lately(&cluster).await?;
    json(seen(&cluster, &caller, vms))
}

fn seen(cluster: &Cluster, caller: &Caller, mut vms: Vec<Vm>) -> Vec<Vm> {
    vms.retain(|vm| {
        let record = cluster.index.of_vm(&vm.id);
        let owner = record.as_ref().map_or("", |record| record.job.spec.owner.as_str());
        caller.sees_job(vm.id.as_str(), owner)
    });
    vms
}

/// A VM, with its state and its addresses: of a running VM without a job those that its guest says, and before them the
/// one that a network of the cluster has given it.
#[utoipa::path(get, path = "/vms/{vm}", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200, body = Vm)))]
pub async fn info(State(cluster): Shared, Full(vm): Full<VmId>) -> Reply<Vm> {
    let mut found = vms::get(&cluster, &vm).await?;
    if found.job.is_none() && found.status == VmState::Running {
        found.addresses = vms::guest::addresses(&cluster, &vm).await;
    }
    let record = cluster.index.of_vm(&vm);
    found.declared = record.as_deref().and_then(declared).map(Box::new);
    if let Some(own) = record.and_then(|record| record.card.clone()) {
        let own = own.address.to_string();
        // The guest may say others too, or nothing.
        if !found.addresses.iter().any(|said| said.split('/').next() == Some(own.as_str())) {
            found.addresses.insert(0, own);
        }
    }
    json(found)
}

/// Makes a VM that lives without a job, and starts it unless it is to be stopped at first. The answer comes at once.
#[utoipa::path(post, path = "/vms", tag = "vms", request_body = NewVm,
    responses((status = 200, body = Vm)))]
pub async fn create(State(cluster): Shared, caller: Caller, Json(new): Json<NewVm>) -> Reply<Vm> {
    let new = caller.new_vm(&cluster, new).await?;
    let owner = caller.user.as_ref().map_or(DEFAULT_OWNER.to_owned(), ToString::to_string);
    json(vms::persistent::create(&cluster, new, owner).await?)
}

/// Starts a VM that lives without a job. The answer comes at once; one that runs already goes on.
#[utoipa::path(post, path = "/vms/{vm}/start", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200, body = Vm)))]
pub async fn start(State(cluster): Shared, Full(vm): Full<VmId>) -> Reply<Vm> {
    json(vms::persistent::request_power(&cluster, &vm, PowerRequest::Start).await?)
}

/// Stops a VM, which keeps its disks. Its guest is asked to power off, unless `force` is said. A job's VM is stopped at
/// once, and its job fails. The answer comes at once.
#[utoipa::path(post, path = "/vms/{vm}/stop", tag = "vms", params(("vm" = String, Path)),
    request_body = StopVm, responses((status = 200)))]
pub async fn stop(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    Json(ask): Json<StopVm>,
) -> Reply<()> {
    json(vms::stop(&cluster, &vm, ask).await?)
}

/// Stops a VM that lives without a job, and starts it again. The answer comes at once.
#[utoipa::path(post, path = "/vms/{vm}/restart", tag = "vms", params(("vm" = String, Path)),
    request_body = StopVm, responses((status = 200, body = Vm)))]
pub async fn restart(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    Json(ask): Json<StopVm>,
) -> Reply<Vm> {
    json(
        vms::persistent::request_power(&cluster, &vm, PowerRequest::Restart { force: ask.force })
            .await?,
    )
}

/// Deletes a VM that lives without a job, and its own disks. The answer comes at once.
#[utoipa::path(delete, path = "/vms/{vm}", tag = "vms",
    params(("vm" = String, Path), ("force" = Option<bool>, Query)), responses((status = 200)))]
pub async fn delete(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    query: Result<Query<StopVm>, axum::extract::rejection::QueryRejection>,
) -> Reply<()> {
    let Query(ask) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    json(vms::persistent::delete(&cluster, &vm, ask.force).await?)
}

/// Ends a VM that a host has and no record names there: its guest is asked to power off, or it is ended at once. One that is off is removed. Its
/// disks stay.
#[utoipa::path(post, path = "/vms/{vm}/end-unknown", tag = "vms", params(("vm" = String, Path)),
    request_body = EndUnknownVm, responses((status = 200)))]
pub async fn end_unknown(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    Json(ask): Json<EndUnknownVm>,
) -> Reply<()> {
    json(unknown::end_vm(&cluster, &vm, &ask).await?)
}

/// Makes the record of a VM without a job that runs at a host and that no record names there: it goes on.
#[utoipa::path(post, path = "/vms/{vm}/adopt", tag = "vms", params(("vm" = String, Path)),
    request_body = AdoptVm, responses((status = 200, body = Vm)))]
pub async fn adopt(
    State(cluster): Shared,
    caller: Caller,
    Full(vm): Full<VmId>,
    Json(ask): Json<AdoptVm>,
) -> Reply<Vm> {
    let owner = caller.user.as_ref().map_or(DEFAULT_OWNER.to_owned(), ToString::to_string);
    json(to_its_end(async move { vms::adopt::adopt(&cluster, &vm, ask, owner).await }).await?)
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

/// Starts a program in a VM that lives without a job, as root. The guest has to run qemu-guest-agent.
#[utoipa::path(post, path = "/vms/{vm}/exec", tag = "vms", params(("vm" = String, Path)),
    request_body = ExecInVm, responses((status = 200, body = ExecBegun)))]
pub async fn exec(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    Json(wanted): Json<ExecInVm>,
) -> Reply<ExecBegun> {
    json(vms::exec::begin(&cluster, &vm, wanted).await?)
}

/// How far such a program is, and what it has printed. It is told once that it has ended.
#[utoipa::path(get, path = "/vms/{vm}/exec", tag = "vms",
    params(("vm" = String, Path), ("pid" = u64, Query)), responses((status = 200, body = ExecStatus)))]
pub async fn exec_status(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    query: Result<Query<ExecBegun>, axum::extract::rejection::QueryRejection>,
) -> Reply<ExecStatus> {
    let Query(begun) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    json(vms::exec::status(&cluster, &vm, begun.pid).await?)
}

/// Ends such a program, with all that it has started: it is asked to, and killed when it does not follow within seconds. Says what it
/// has printed.
#[utoipa::path(delete, path = "/vms/{vm}/exec", tag = "vms",
    params(("vm" = String, Path), ("pid" = u64, Query)), responses((status = 200, body = ExecStatus)))]
pub async fn exec_end(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    query: Result<Query<ExecBegun>, axum::extract::rejection::QueryRejection>,
) -> Reply<ExecStatus> {
    let Query(begun) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    json(to_its_end(async move { vms::exec::end(&cluster, &vm, begun.pid).await }).await?)
}

/// Makes an image of the root disk of a VM that lives without a job, also while it runs.
#[utoipa::path(post, path = "/vms/{vm}/snapshot", tag = "vms", params(("vm" = String, Path)),
    request_body = Snapshot, responses((status = 200, body = ClusterImage)))]
pub async fn snapshot(
    State(cluster): Shared,
    caller: Caller,
    Full(vm): Full<VmId>,
    Json(ask): Json<Snapshot>,
) -> Reply<ClusterImage> {
    let ask = Snapshot { image: caller.new_image_name(&cluster, &ask.image)? };
    json(to_its_end(async move { vms::guest::snapshot(&cluster, &vm, &ask).await }).await?)
}

/// Makes the root disk of a VM that is off a clone of an image; what was on it is lost. It is made when the VM starts next.
#[utoipa::path(post, path = "/vms/{vm}/restore", tag = "vms", params(("vm" = String, Path)),
    request_body = RestoreVm, responses((status = 200, body = Vm)))]
pub async fn restore(
    State(cluster): Shared,
    caller: Caller,
    Full(vm): Full<VmId>,
    Json(ask): Json<RestoreVm>,
) -> Reply<Vm> {
    let image = caller.image(&cluster, &ask.image).await?;
    json(vms::change::restore(&cluster, &vm, image).await?)
}

/// Gives a VM other numbers of CPUs, another amount of memory, or a larger root disk. While it runs it can get more vCPUs, a larger disk, and
/// give memory back; `reason` says what the guest has not done for that.
#[utoipa::path(post, path = "/vms/{vm}/resize", tag = "vms", params(("vm" = String, Path)),
    request_body = ResizeVm, responses((status = 200, body = Vm)))]
pub async fn resize(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    Json(ask): Json<ResizeVm>,
) -> Reply<Vm> {
    json(to_its_end(async move { vms::change::resize(&cluster, &vm, ask).await }).await?)
}

/// Says anew whether a VM that lives without a job moves by itself, and beside which other VMs of its tenant it is or never is, also while it
/// runs.
#[utoipa::path(put, path = "/vms/{vm}/set", tag = "vms", params(("vm" = String, Path)),
    request_body = SetVm, responses((status = 200, body = Vm)))]
pub async fn set(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    Json(ask): Json<SetVm>,
) -> Reply<Vm> {
    json(to_its_end(async move { vms::set::set(&cluster, &vm, ask).await }).await?)
}

/// Gives a VM that lives without a job a further volume, also while it runs.
#[utoipa::path(post, path = "/vms/{vm}/attach", tag = "vms", params(("vm" = String, Path)),
    request_body = AttachVolume, responses((status = 200, body = Vm)))]
pub async fn attach(
    State(cluster): Shared,
    caller: Caller,
    Full(vm): Full<VmId>,
    Json(ask): Json<AttachVolume>,
) -> Reply<Vm> {
    let volume = caller.seen_name(&cluster, &ask.volume).await?;
    let ask = AttachVolume { volume, ..ask };
    json(to_its_end(async move { vms::attachments::attach(&cluster, &vm, ask).await }).await?)
}

/// Takes a volume from a VM that lives without a job. While it runs its guest has to let the volume go. The volume stays.
#[utoipa::path(post, path = "/vms/{vm}/detach", tag = "vms", params(("vm" = String, Path)),
    request_body = DetachVolume, responses((status = 200, body = Vm)))]
pub async fn detach(
    State(cluster): Shared,
    caller: Caller,
    Full(vm): Full<VmId>,
    Json(ask): Json<DetachVolume>,
) -> Reply<Vm> {
    let volume = caller.seen_name(&cluster, &ask.volume).await?;
    let ask = DetachVolume { volume };
    json(to_its_end(async move { vms::attachments::detach(&cluster, &vm, ask).await }).await?)
}

/// Which file of a guest.
#[derive(Debug, serde::Deserialize)]
pub struct GuestPath {
    path: String,
}

type InGuest = Result<Query<GuestPath>, axum::extract::rejection::QueryRejection>;

fn path_in_guest(query: InGuest) -> Result<String, Problem> {
    let Query(asked) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    Ok(asked.path)
}

/// Reads a file in the guest of a VM that lives without a job. The guest has to run qemu-guest-agent.
#[utoipa::path(get, path = "/vms/{vm}/file", tag = "vms",
    params(("vm" = String, Path), ("path" = String, Query)),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream")))]
pub async fn read_file(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    query: InGuest,
) -> Result<Response, Failure> {
    let body = vms::guest_files::read(&cluster, &vm, &path_in_guest(query)?).await?;
    Ok(([("content-type", "application/octet-stream")], body).into_response())
}

/// Writes a file in the guest of a VM that lives without a job, also in the place of one that is there.
#[utoipa::path(put, path = "/vms/{vm}/file", tag = "vms",
    params(("vm" = String, Path), ("path" = String, Query)),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = CopiedFile)))]
pub async fn write_file(
    State(cluster): Shared,
    Full(vm): Full<VmId>,
    query: InGuest,
    request: Request,
) -> Reply<CopiedFile> {
    let content = request.into_body().into_data_stream();
    json(vms::guest_files::write(&cluster, &vm, &path_in_guest(query)?, content).await?)
}

/// The serial console, for one client at a time, as a WebSocket (RFC 6455). Its binary messages are the bytes that the guest
/// prints and that the client types, cut anywhere; what comes as text counts as its bytes. A message of a client has 64 KiB at most. Who
/// offers the subprotocol `binary` gets it. A client that answers no ping for a minute is disconnected, and so is one whose token is
/// not good any more (code 1008).
#[utoipa::path(get, path = "/vms/{vm}/console/attach", tag = "vms", params(("vm" = String, Path)),
    responses((status = 101, description = "A WebSocket")))]
pub async fn attach_console(
    State(cluster): Shared,
    caller: Caller,
    peer: Peer,
    Full(vm): Full<VmId>,
    request: Request,
) -> Result<Response, Failure> {
    Ok(vms::attach_console(&cluster, &vm, caller.token, peer, request).await?)
}

/// The screen of a VM that was made with one (`vnc`): VNC (RFB) in a WebSocket, as with the console, for example for noVNC.
#[utoipa::path(get, path = "/vms/{vm}/vnc", tag = "vms", params(("vm" = String, Path)),
    responses((status = 101, description = "A WebSocket")))]
pub async fn view_screen(
    State(cluster): Shared,
    caller: Caller,
    peer: Peer,
    Full(vm): Full<VmId>,
    request: Request,
) -> Result<Response, Failure> {
    Ok(vms::view_screen(&cluster, &vm, (caller.token, peer), request).await?)
}

/// Port 22 of the guest: an SSH connection in a WebSocket, as with the console.
#[utoipa::path(get, path = "/vms/{vm}/ssh", tag = "vms", params(("vm" = String, Path)),
    responses((status = 101, description = "A WebSocket")))]
pub async fn ssh(
    State(cluster): Shared,
    caller: Caller,
    peer: Peer,
    Full(vm): Full<VmId>,
    request: Request,
) -> Result<Response, Failure> {
    Ok(vms::ssh(&cluster, &vm, (caller.token, peer), request).await?)
}

/// The end of the serial console.
#[utoipa::path(get, path = "/vms/{vm}/console", tag = "vms", params(("vm" = String, Path)),
    responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn console(State(cluster): Shared, Full(vm): Full<VmId>) -> Result<String, Failure> {
    Ok(vms::console::read(&cluster, &vm).await?)
}
