//! The agent's HTTP API, as [`perigee_model::vm`] documents it.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use perigee_http::guard::restrict;
use perigee_http::{ClientAddress, Failure, Json, Peer, Reply};
use perigee_model::guest::GuestEvent;
use perigee_model::network::{HostNetworks, NetworksKnown};
use perigee_model::switchover::Fate;
use perigee_model::vm::{
    AskGuestAgent, AskMigrationKey, CancelMigration, ChangeVm, EndUnlessRan, ExpectFrames,
    HostReport, LinkProbe, MigrateOut, MigrationKey, ProbeLink, RenewGrant, VmChanged, VmChanges,
    VmReport, VmSpec,
};
use perigee_model::volume::ExportStats;
use perigee_model::{Problem, VmId, VmStart, exposition};
use serde::Deserialize;
use tokio::net::TcpStream;

use crate::metrics::{self, Proc};
use crate::vm::gone;
use crate::vm::{Request as Ask, Vm, network};
use crate::vms::Vms;
use crate::{callers, link};

type Shared = State<Arc<Vms>>;

/// The longest request: a spec with all its disks is some kilobytes.
const BODY_BYTES_MAX: usize = 256 << 10;

/// The agent's control API, under `/v1`, and its metrics.
pub fn router(vms: Arc<Vms>) -> Router {
    let router = Router::new()
        .route("/metrics", get(figures))
        .route("/v1/host", get(host))
        .route("/v1/vms", get(list))
        .route("/v1/changes", get(changes))
        .route("/v1/vms/{vm}", get(report).put(put).delete(delete))
        .route("/v1/vms/{vm}/end-unless-ran", post(end_unless_ran))
        .route("/v1/vms/{vm}/expect-frames", post(expect_frames))
        .route("/v1/vms/{vm}/migration-key", post(migration_key))
        .route("/v1/vms/{vm}/events", get(events))
        .route("/v1/vms/{vm}/console", get(console))
        .route("/v1/vms/{vm}/console/attach", get(attach_console))
        .route("/v1/vms/{vm}/vnc", get(view_screen))
        .route("/v1/vms/{vm}/ssh", get(ssh))
        .route("/v1/networks/{vni}/ssh/{address}", get(ssh_in_network))
        .route("/v1/vms/{vm}/guest-agent", post(ask_guest_agent))
        .route("/v1/vms/{vm}/change", post(change))
        .route("/v1/vms/{vm}/power-button", post(press_power_button))
        .route("/v1/vms/{vm}/begin-command", post(begin_command))
        .route("/v1/vms/{vm}/end-command", post(end_command))
        .route("/v1/vms/{vm}/sync", post(sync))
        .route("/v1/vms/{vm}/migrate", post(migrate))
        .route("/v1/vms/{vm}/migrate/cancel", post(cancel_migration))
        .route("/v1/vms/{vm}/migrate/grant", post(renew_grant))
        .route("/v1/networks", put_networks())
        .route("/v1/probe", post(probe))
        .route("/v1/blob", get(blob))
        .fallback(no_such_path)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(vms);
    restrict(router, callers::may)
}

fn id(text: &str) -> Result<VmId, Problem> {
    VmId::new(text).map_err(|e| Problem::invalid("can't find a VM", e))
}

async fn no_such_path() -> Failure {
    Failure(Problem::not_found(
        "can't answer the request",
        "the agent's API does not have this path",
    ))
}

async fn host(State(vms): Shared) -> Reply<HostReport> {
    Ok(Json(vms.host.report()?))
}

async fn list(State(vms): Shared) -> Reply<Vec<VmReport>> {
    Ok(Json(reports(&vms).await))
}

/// With what only the host knows of it.
fn report_of(vms: &Vms, vm: &Vm, stats: &[ExportStats]) -> VmReport {
    let report = vm.report(&vms.host.boot_id, stats);
    VmReport { sent: vms.host.networks.sent(vm.id()), ..report }
}

async fn reports(vms: &Vms) -> Vec<VmReport> {
    let stats = vms.host.volume_stats().await;
    vms.list().iter().map(|vm| report_of(vms, vm, &stats)).collect()
}

async fn figures(State(vms): Shared) -> Result<Response, Failure> {
    let reports = reports(&vms).await;
    let name = |vm: &VmReport| vms.host.networks.card_name(&vm.spec.network);
    let cards: Vec<_> = reports.iter().map(name).collect();
    let is_made = |device: &str| vms.host.networks.has_made(device);
    let mut page = metrics::page((&vms.host.report()?, is_made), &Proc::read(), &reports, &cards);
    metrics::write_terms(&mut page, &vms.host.terms);
    let page = page.into_text();
    Ok(([(CONTENT_TYPE, exposition::CONTENT_TYPE)], page).into_response())
}

#[derive(Debug, Deserialize)]
struct ChangesQuery {
    #[serde(default)]
    after: u64,
    #[serde(default)]
    wait_ms: u64,
}

async fn changes(State(vms): Shared, Query(query): Query<ChangesQuery>) -> Reply<VmChanges> {
    vms.host.changes.wait(query.after, Duration::from_millis(query.wait_ms)).await;
    // Taken before anything is read, so that later changes are reported the next time.
    let revision = vms.host.changes.now();
    let all = vms.list();
    let changed: Vec<_> = all.iter().filter(|vm| vm.changed_since(query.after)).collect();
    let stats = if changed.is_empty() { Vec::new() } else { vms.host.volume_stats().await };
    Ok(Json(VmChanges {
        revision,
        present: all.iter().map(|vm| vm.id().clone()).collect(),
        changed: changed.into_iter().map(|vm| report_of(&vms, vm, &stats)).collect(),
    }))
}

/// Answers at once, or, if a wait is given, when the VM has changed or was deleted.
async fn report(
    State(vms): Shared,
    peer: Peer,
    Path(vm): Path<String>,
    Query(query): Query<ChangesQuery>,
) -> Reply<VmReport> {
    let (id, wait) = (id(&vm)?, Duration::from_millis(query.wait_ms));
    let vm = vms.get(&id)?;
    callers::check_source(&peer, &id, vm.spec.arrives_from.as_ref())?;
    vms.host.changes.wait_until(wait, || vm.changed_since(query.after)).await;
    // The VM may have been deleted in the meantime, or another one started.
    let vm = vms.get(&id)?;
    callers::check_source(&peer, &id, vm.spec.arrives_from.as_ref())?;
    Ok(Json(report_of(&vms, &vm, &vms.host.volume_stats().await)))
}

async fn put(
    State(vms): Shared,
    Path(vm): Path<String>,
    Json(spec): Json<VmSpec>,
) -> Reply<VmReport> {
    if id(&vm)? != spec.vm {
        let why = format!("the path names {vm} and the spec {}", spec.vm);
        return Err(Problem::invalid("can't start a VM", why).into());
    }
    let vm = vms.put(spec).await?;
    Ok(Json(report_of(&vms, &vm, &vms.host.volume_stats().await)))
}

async fn delete(
    State(vms): Shared,
    Path(vm): Path<String>,
    Query(start): Query<VmStart>,
) -> Reply<()> {
    vms.delete(&id(&vm)?, start).await?;
    Ok(Json(()))
}

async fn end_unless_ran(
    State(vms): Shared,
    peer: Peer,
    Path(vm): Path<String>,
    Json(asked): Json<EndUnlessRan>,
) -> Reply<Fate> {
    Ok(Json(vms.end_unless_ran(&peer, &id(&vm)?, &asked.migration).await?))
}

async fn expect_frames(
    State(vms): Shared,
    peer: Peer,
    Path(vm): Path<String>,
    Json(told): Json<ExpectFrames>,
) -> Reply<()> {
    Ok(Json(vms.expect_frames(&peer, &id(&vm)?, &told.migration).await?))
}

/// Asked for by POST, although nothing changes: no proxy or log on the way keeps the answer.
async fn migration_key(
    State(vms): Shared,
    peer: Peer,
    Extension(ClientAddress(source)): Extension<ClientAddress>,
    Path(vm): Path<String>,
    Json(ask): Json<AskMigrationKey>,
) -> Reply<MigrationKey> {
    let vm = vms.get(&id(&vm)?)?;
    let key = vm.migration_key(&peer, &ask.migration)?;
    vm.comes_from(source);
    Ok(Json(key))
}

#[derive(Debug, Deserialize)]
struct EventsQuery {
    #[serde(default)]
    after: u64,
}

async fn events(
    State(vms): Shared,
    Path(vm): Path<String>,
    Query(query): Query<EventsQuery>,
) -> Reply<Vec<GuestEvent>> {
    let vm = vms.get(&id(&vm)?)?;
    let read = tokio::task::spawn_blocking(move || {
        // A client that asks for later messages has stored the earlier ones.
        vm.log.taken(query.after)?;
        vm.log.after(query.after)
    });
    let messages =
        read.await.map_err(|e| Problem::internal("can't read a guest's messages", e))??;
    Ok(Json(messages))
}

async fn console(State(vms): Shared, Path(vm): Path<String>) -> Result<String, Failure> {
    Ok(vms.get(&id(&vm)?)?.console()?)
}

/// Bytes of both directions follow the answer.
async fn attach_console(
    State(vms): Shared,
    Path(vm): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    let attached = vms.get(&id(&vm)?)?.attach().await?;
    let (answer, begun) = perigee_http::accept(request)?;
    tokio::spawn(attached.carry(begun));
    Ok(answer)
}

/// The VM's screen, as VNC has it.
async fn view_screen(
    State(vms): Shared,
    Path(vm): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    let attached = vms.get(&id(&vm)?)?.view().await?;
    let (answer, begun) = perigee_http::accept(request)?;
    tokio::spawn(attached.carry(begun));
    Ok(answer)
}

/// Port 22 of a guest in a user network.
async fn ssh(
    State(vms): Shared,
    Path(vm): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    let stream = network::dial(&*vms.get(&id(&vm)?)?, &vms.host).await?;
    carry(stream, request)
}

/// The same of one in a network of its tenant whose gateway is here.
async fn ssh_in_network(
    State(vms): Shared,
    Path((vni, address)): Path<(u16, Ipv4Addr)>,
    request: Request,
) -> Result<Response, Failure> {
    let stream = vms.host.networks.dial(vni, address).await?;
    carry(stream, request)
}

fn carry(mut stream: TcpStream, request: Request) -> Result<Response, Failure> {
    let (answer, begun) = perigee_http::accept(request)?;
    tokio::spawn(async move {
        let ended = begun.carry(&mut stream).await;
        tracing::debug!(?ended, "an SSH connection has ended");
    });
    Ok(answer)
}

async fn ask_guest_agent(
    State(vms): Shared,
    Path(vm): Path<String>,
    Json(ask): Json<AskGuestAgent>,
) -> Reply<serde_json::Value> {
    Ok(Json(vms.get(&id(&vm)?)?.ask_guest_agent(ask).await?))
}

async fn change(
    State(vms): Shared,
    Path(vm): Path<String>,
    Query(start): Query<VmStart>,
    Json(ask): Json<ChangeVm>,
) -> Reply<VmChanged> {
    Ok(Json(vms.get(&id(&vm)?)?.change(start, ask).await?))
}

async fn press_power_button(State(vms): Shared, Path(vm): Path<String>) -> Reply<()> {
    let vm = vms.get(&id(&vm)?)?;
    let answer = vm.ask(Ask::PressPowerButton).await;
    answer.unwrap_or_else(|| Err(gone(vm.id())))?;
    Ok(Json(()))
}

/// The same again changes nothing. Only a gang's member waits for it.
async fn begin_command(State(vms): Shared, Path(vm): Path<String>) -> Result<StatusCode, Failure> {
    vms.get(&id(&vm)?)?.intents.begin_command();
    Ok(StatusCode::ACCEPTED)
}

/// The same again changes nothing. The guest says by itself when its command has ended.
async fn end_command(State(vms): Shared, Path(vm): Path<String>) -> Result<StatusCode, Failure> {
    vms.get(&id(&vm)?)?.intents.end_command();
    Ok(StatusCode::ACCEPTED)
}

async fn sync(State(vms): Shared, Path(vm): Path<String>) -> Reply<()> {
    Ok(Json(vms.get(&id(&vm)?)?.intents.sync().await?))
}

async fn migrate(
    State(vms): Shared,
    Path(vm): Path<String>,
    Json(order): Json<MigrateOut>,
) -> Result<StatusCode, Failure> {
    let vm = vms.get(&id(&vm)?)?;
    let answer = vm.ask(|answer| Ask::Migrate(Box::new(order), answer)).await;
    answer.unwrap_or_else(|| Err(gone(vm.id())))?;
    Ok(StatusCode::ACCEPTED)
}

async fn cancel_migration(
    State(vms): Shared,
    Path(vm): Path<String>,
    Json(asked): Json<CancelMigration>,
) -> Result<StatusCode, Failure> {
    let vm = vms.get(&id(&vm)?)?;
    let answer = vm.ask(|answer| Ask::CancelMigration(asked, answer)).await;
    answer.unwrap_or_else(|| Err(gone(vm.id())))?;
    Ok(StatusCode::ACCEPTED)
}

async fn renew_grant(
    State(vms): Shared,
    Path(vm): Path<String>,
    Json(renewed): Json<RenewGrant>,
) -> Reply<()> {
    let vm = vms.get(&id(&vm)?)?;
    let answer = vm.ask(|answer| Ask::RenewGrant(renewed, answer)).await;
    answer.unwrap_or_else(|| Err(gone(vm.id())))?;
    Ok(Json(()))
}

/// A network may have many VMs.
const NETWORKS_BYTES_MAX: usize = 32 << 20;

fn put_networks() -> axum::routing::MethodRouter<Arc<Vms>> {
    axum::routing::put(networks).layer(DefaultBodyLimit::max(NETWORKS_BYTES_MAX))
}

async fn networks(State(vms): Shared, Json(wanted): Json<HostNetworks>) -> Reply<NetworksKnown> {
    Ok(Json(vms.host.networks.take(wanted)?))
}

async fn probe(State(vms): Shared, Json(request): Json<ProbeLink>) -> Reply<LinkProbe> {
    Ok(Json(link::probe(&request, &vms.host.network).await?))
}

#[derive(Debug, Deserialize)]
struct BlobQuery {
    length_bytes: u64,
}

async fn blob(Query(query): Query<BlobQuery>) -> Result<Response, Failure> {
    Ok(link::blob(query.length_bytes)?.into_response())
}
