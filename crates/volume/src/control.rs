//! The control API: the table in [`perigee_model::volume`], route by route.

mod admissions;
mod backups;
mod callers;
mod clients;
mod confined;
mod grants;
mod handover;
mod long;
mod measure;
mod replicas;
mod vm_sockets;

use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::http::request::Parts;
use axum::response::Response;
use axum::routing::{get, post, put};
use bytes::{Bytes, BytesMut};
use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use perigee_block::device::{Device, IoError};
use perigee_block::exports::Peer;
use perigee_block::stats::StatsTable;
use perigee_http::guard::restrict;
use perigee_http::{ClientAddress, Failure, Json, Reply};
use perigee_model::limits::{BATCH_VOLUMES, OutOfLimits};
use perigee_model::volume::{
    Attach, Attachment, BlockProbe, CheckScope, ContentDigest, CopyImage, CreateVolume,
    CreateVolumes, DeletedImage, EpochChange, EpochChanges, EpochIssued, ExportStats, FlushVolumes,
    ImageInfo, ImportImage, Keep, OpenAhead, PoolInfo, ProbeBlocks, Resize, Snapshot, Upload,
    VolumeEpochChange, VolumeInfo,
};
use perigee_model::{BadName, ImageName, LayerId, OwnerName, Problem, TenantName, VolumeName};
use perigee_store::{Data, Pool, io_problem};
use serde::Deserialize;

use grants::Granted;

use crate::exports::PoolExports;
use crate::measure::Measuring;
use crate::observe;
use crate::probe::probe;
use crate::remotes::Remotes;
use crate::sites::Want;
use crate::sources::Sources;
use crate::vm_sockets::VmSockets;

/// The data of a volume is transferred in pieces of this size.
const PIECE_BYTES: u32 = 1 << 20;
/// At most this much of a refused body is read; then the connection is closed.
const DRAIN_BYTES_MAX: usize = 256 << 20;

/// How long the deletion of a volume waits for sessions of clients that have just ended.
const SESSION_END_MAX: Duration = Duration::from_secs(2);

/// The state that the handlers share.
pub struct Control {
    pub pool: Arc<Pool>,
    pub exports: Arc<PoolExports>,
    pub stats: Arc<StatsTable>,
    pub remotes: Remotes,
    /// `None` if this is a command and no server.
    pub vm_sockets: Option<Arc<VmSockets>>,
    pub sources: Arc<Sources>,
    /// `None` if this is a command and no server.
    pub measuring: Option<Measuring>,
}

type Shared = State<Arc<Control>>;

/// The control API of the volume server, under `/v1`; see [`perigee_model::volume`].
pub fn router(control: Arc<Control>) -> Router {
    let v1 = Router::new()
        .route("/pool", get(pool_info))
        .route("/images", get(list_images).post(import_image))
        .route("/uploads", post(upload))
        .route("/trees/{id}", put(receive_tree).delete(delete_tree))
        .route("/images/{image}", get(image_info).delete(delete_image))
        .route("/images/{image}/copy", post(copy_image))
        .route("/images/{image}/keep", put(keep_image))
        .route("/images/{image}/fill", post(fill_image))
        .route("/volumes", get(list_volumes).post(create_volume))
        .route("/batch/volumes", post(create_volumes))
        .route("/batch/epochs", post(change_epochs))
        .route("/batch/flush", post(flush_volumes))
        .route("/batch/open", post(open_ahead))
        .route("/volumes/{volume}", get(volume_info).delete(delete_volume))
        .route("/volumes/{volume}/snapshot", post(snapshot))
        .route("/volumes/{volume}/resize", post(resize))
        .route("/volumes/{volume}/compact", post(compact))
        .route("/volumes/{volume}/data", put(write_data).get(read_data))
        .route("/volumes/{volume}/epoch/issue", post(issue_epoch))
        .route("/volumes/{volume}/epoch", post(change_epoch))
        .route("/attachments", get(list_attachments))
        .route("/attachments/{volume}", put(attach).delete(detach))
        .route("/stats", get(list_stats))
        .route("/probe", post(probe_blocks))
        .route("/check", post(check))
        .merge(clients::routes())
        .merge(confined::routes())
        .merge(handover::routes())
        .merge(measure::routes())
        .merge(admissions::routes())
        .merge(backups::routes())
        .merge(replicas::routes())
        .merge(vm_sockets::routes())
        .merge(observe::trace());
    let router = Router::new()
        .nest("/v1", v1)
        .merge(observe::metrics())
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_path)
        .with_state(control);
    restrict(router, callers::may)
}

async fn no_such_path(request: Request) -> Failure {
    let what = format!("{} {}", request.method(), request.uri().path());
    Failure(Problem::not_found(what, "the volume server's API does not have this path and method"))
}

/// A name in a path. A wrong name is answered with a [`Problem`], like every wrong request.
pub struct Named<T>(pub T);

impl<T: FromStr<Err = BadName>, S: Send + Sync> FromRequestParts<S> for Named<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let what = format!("{} {}", parts.method, parts.uri.path());
        let invalid = |why: String| Failure(Problem::invalid(what.as_str(), why));
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|error| invalid(error.body_text()))?;
        text.parse().map(Self).map_err(|error| invalid(error.to_string()))
    }
}

/// The address from which a request comes.
pub struct Asker(pub Peer);

impl<S: Send + Sync> FromRequestParts<S> for Asker {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        match parts.extensions.get::<ClientAddress>() {
            Some(ClientAddress(address)) => {
                let is_own = address.is_none();
                let peer =
                    Peer { address: *address, encrypted: false, is_own, is_authenticated: is_own };
                Ok(Self(peer))
            }
            None => Err(Failure(Problem::internal(
                format!("{} {}", parts.method, parts.uri.path()),
                "the address of the client is not known",
            ))),
        }
    }
}

async fn pool_info(State(control): Shared) -> Reply<PoolInfo> {
    Ok(Json(control.pool.info().await?))
}

async fn list_images(State(control): Shared) -> Reply<Vec<ImageInfo>> {
    Ok(Json(control.pool.images().await?))
}

async fn import_image(
    State(control): Shared,
    Asker(peer): Asker,
    Json(request): Json<ImportImage>,
) -> Result<Response, Failure> {
    long::follow(move |work| async move {
        let source = request.source.clone();
        let open = |what: &str, source: &str| control.sources.open(what, source, peer.is_own);
        let imported = control.pool.import_opened(request, open, &work).await;
        // A tree may have many files.
        let sources = Arc::clone(&control.sources);
        drop(tokio::task::spawn_blocking(move || sources.used(&source)).await);
        imported
    })
}

/// For which tenant the controller sends an upload; nobody's if an operator sends it.
#[derive(Debug, Deserialize)]
struct UploadOf {
    tenant: Option<TenantName>,
}

async fn upload(
    State(control): Shared,
    Query(UploadOf { tenant }): Query<UploadOf>,
    request: Request,
) -> Reply<Upload> {
    let mut body = request.into_body().into_data_stream();
    let received = control.sources.receive(tenant, &mut body).await;
    if received.is_err() {
        drain(&mut body).await;
    }
    Ok(Json(received?))
}

async fn receive_tree(
    State(control): Shared,
    Path(id): Path<String>,
    request: Request,
) -> Reply<Upload> {
    let mut body = request.into_body().into_data_stream();
    let received = control.sources.trees.receive(&id, &mut body).await;
    if received.is_err() {
        drain(&mut body).await;
    }
    Ok(Json(received?))
}

async fn delete_tree(State(control): Shared, Path(id): Path<String>) -> Reply<()> {
    // A tree may have many files.
    let removed = tokio::task::spawn_blocking(move || control.sources.trees.remove(&id)).await;
    removed.map_err(|error| Problem::internal("can't remove a tree of files", error))?;
    Ok(Json(()))
}

async fn image_info(State(control): Shared, Named(image): Named<ImageName>) -> Reply<ImageInfo> {
    Ok(Json(control.pool.image_info(&image).await?))
}

#[derive(Deserialize)]
struct OnlyBad {
    bad_copy_of: Option<LayerId>,
    /// The image's content.
    unless: Option<ContentDigest>,
}

async fn delete_image(
    State(control): Shared,
    Named(image): Named<ImageName>,
    query: Result<Query<OnlyBad>, QueryRejection>,
) -> Reply<DeletedImage> {
    let Query(OnlyBad { bad_copy_of, unless }) = query.map_err(|error| {
        Problem::invalid(format!("can't delete image {image}"), error.body_text())
    })?;
    let pool = &control.pool;
    let deleted = match bad_copy_of {
        Some(layer) => {
            pool.delete_bad_copy(&image, layer, unless).await.map(|()| DeletedImage::default())
        }
        None => pool.delete_image(&image).await,
    };
    Ok(Json(deleted?))
}

async fn copy_image(
    State(control): Shared,
    Named(image): Named<ImageName>,
    Json(request): Json<CopyImage>,
) -> Reply<ImageInfo> {
    check_address(&format!("can't copy image {image}"), &request.nbd_addr)?;
    Ok(Json(control.pool.copy_image(&image, request).await?))
}

async fn keep_image(
    State(control): Shared,
    Named(image): Named<ImageName>,
    Json(keep): Json<Keep>,
) -> Reply<ImageInfo> {
    Ok(Json(control.pool.keep_image(&image, keep).await?))
}

async fn fill_image(
    State(control): Shared,
    Named(image): Named<ImageName>,
) -> Result<Response, Failure> {
    let pool = control.pool.clone();
    long::follow(move |work| async move { pool.fill_image(&image, work).await })
}

async fn list_volumes(State(control): Shared) -> Reply<Vec<VolumeInfo>> {
    Ok(Json(control.pool.volumes().await?))
}

async fn create_volume(
    State(control): Shared,
    Json(request): Json<CreateVolume>,
) -> Reply<VolumeInfo> {
    Ok(Json(control.pool.create_volume(request).await?))
}

async fn create_volumes(
    State(control): Shared,
    Json(request): Json<CreateVolumes>,
) -> Reply<Vec<VolumeInfo>> {
    Ok(Json(control.pool.create_volumes(request).await?))
}

/// Whoever knows the id of a layer may read it over NBD, so another host is told none.
async fn volume_info(
    State(control): Shared,
    granted: Granted,
    Named(volume): Named<VolumeName>,
) -> Reply<VolumeInfo> {
    let mut info = control.pool.volume_info(&volume).await?;
    if granted.is_elsewhere(&control) {
        info.chain.clear();
    }
    Ok(Json(info))
}

#[derive(Deserialize)]
struct OwnedBy {
    owner: Option<OwnerName>,
}

async fn delete_volume(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    query: Result<Query<OwnedBy>, QueryRejection>,
) -> Reply<()> {
    let Query(OwnedBy { owner }) = query.map_err(|error| {
        Problem::invalid(format!("can't delete volume {volume}"), error.body_text())
    })?;
    let patience = Instant::now() + SESSION_END_MAX;
    while control.pool.open_sessions(&volume) > 0 && Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let deleted = control.pool.delete_volume_of(&volume, owner).await;
    deleted.map_err(|problem| control.exports.logins.name_users(&volume, problem))?;
    control.stats.forget(&volume);
    Ok(Json(()))
}

async fn snapshot(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(request): Json<Snapshot>,
) -> Reply<ImageInfo> {
    Ok(Json(control.pool.snapshot(&volume, request).await?))
}

async fn resize(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(request): Json<Resize>,
) -> Reply<VolumeInfo> {
    let resized = control.pool.resize_volume(&volume, request).await;
    Ok(Json(resized.map_err(|problem| control.exports.logins.name_users(&volume, problem))?))
}

async fn issue_epoch(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
) -> Reply<EpochIssued> {
    Ok(Json(control.pool.volume(&volume).await?.issue_epoch().await?))
}

async fn change_epoch(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    granted: Granted,
    Json(change): Json<EpochChange>,
) -> Reply<VolumeInfo> {
    may_change(&granted, &volume, change)?;
    control.pool.volume(&volume).await?.change_epoch(change).await?;
    Ok(Json(control.pool.volume_info(&volume).await?))
}

fn may_change(granted: &Granted, volume: &VolumeName, change: EpochChange) -> Result<(), Problem> {
    let what = format!("can't change the writer epoch of volume {volume}");
    granted.check(&what, |allows| allows.changes(volume, change))
}

async fn change_epochs(
    State(control): Shared,
    granted: Granted,
    Json(ask): Json<EpochChanges>,
) -> Reply<()> {
    check_batch("can't change epochs", ask.changes.len())?;
    for one in &ask.changes {
        may_change(&granted, &one.volume, one.change)?;
    }
    let change = async |one: VolumeEpochChange| {
        control.pool.volume(&one.volume).await?.change_epoch(one.change).await
    };
    first_problem(join_all(ask.changes.into_iter().map(change)).await)
}

async fn flush_volumes(State(control): Shared, Json(ask): Json<FlushVolumes>) -> Reply<()> {
    check_batch("can't flush volumes", ask.volumes.len())?;
    let flush = async |volume: VolumeName| {
        let what = format!("can't flush volume {volume}");
        let flushed = control.pool.volume(&volume).await?.flush().await;
        flushed.map_err(|error| io_problem(&what, &error))
    };
    first_problem(join_all(ask.volumes.into_iter().map(flush)).await)
}

async fn open_ahead(State(control): Shared, Json(ask): Json<OpenAhead>) -> Reply<()> {
    check_batch("open exports", ask.exports.len())?;
    control.exports.open_ahead(&ask.exports).await?;
    Ok(Json(()))
}

fn check_batch(what: &str, count: usize) -> Result<(), Problem> {
    let too_many = |error: OutOfLimits| error.problem(what).next("send several requests");
    BATCH_VOLUMES.check(count).map(drop).map_err(too_many)
}

fn first_problem(results: Vec<Result<(), Problem>>) -> Reply<()> {
    results.into_iter().collect::<Result<(), Problem>>()?;
    Ok(Json(()))
}

async fn list_attachments(State(control): Shared) -> Reply<Vec<Attachment>> {
    let attachments = control.pool.attachments().await?;
    Ok(Json(attachments.into_iter().map(|(v, addr)| attachment(&control, v, addr)).collect()))
}

/// Sessions that are open go on with the home at its new address.
async fn attach(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(Attach { nbd_addr }): Json<Attach>,
) -> Reply<Attachment> {
    check_address(&format!("can't attach volume {volume}"), &nbd_addr)?;
    control.pool.attach(&volume, &nbd_addr).await?;
    control.exports.attached(&volume);
    control.exports.repoint(&volume, None).await?;
    Ok(Json(attachment(&control, volume, nbd_addr)))
}

fn check_address(what: &str, nbd_addr: &str) -> Result<(), Problem> {
    match nbd_addr.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(()),
        _ => Err(Problem::invalid(what, format!("{nbd_addr:?} is not HOST:PORT"))),
    }
}

fn attachment(control: &Control, volume: VolumeName, nbd_addr: String) -> Attachment {
    let sessions = control.exports.proxied_sessions(&volume);
    Attachment { volume, nbd_addr, sessions }
}

#[derive(Deserialize)]
struct Detach {
    /// A volume with open sessions stays attached.
    #[serde(default)]
    unless_open: bool,
}

/// Open sessions stay open. New sessions no longer find the volume.
async fn detach(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    query: Result<Query<Detach>, QueryRejection>,
) -> Reply<()> {
    let what = format!("can't detach volume {volume}");
    let Query(Detach { unless_open }) =
        query.map_err(|error| Problem::invalid(&what, error.body_text()))?;
    // Nobody opens it between the look and the end of the attachment.
    let _turn = if unless_open { Some(control.exports.turns.moving(&volume).await?) } else { None };
    let sessions = control.exports.proxied_sessions(&volume);
    if unless_open && sessions > 0 {
        let why = format!("{sessions} sessions on it are open here");
        return Err(Problem::conflict(what, why).next("close them, then try again").into());
    }
    control.pool.detach(&volume).await?;
    control.exports.detached(&volume);
    Ok(Json(()))
}

async fn list_stats(State(control): Shared) -> Reply<Vec<ExportStats>> {
    Ok(Json(control.stats.list()))
}

async fn probe_blocks(State(control): Shared, Json(ask): Json<ProbeBlocks>) -> Reply<BlockProbe> {
    Ok(Json(probe(&control.remotes, &ask).await?))
}

async fn compact(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
) -> Result<Response, Failure> {
    let pool = control.pool.clone();
    long::follow(move |work| async move { pool.compact_volume(&volume, work).await })
}

async fn check(State(control): Shared, Json(scope): Json<CheckScope>) -> Result<Response, Failure> {
    let pool = control.pool.clone();
    long::follow(move |work| async move { pool.check(scope, work).await })
}

/// Writes the body from offset 0 with the volume's current epoch, and flushes.
async fn write_data(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    request: Request,
) -> Reply<()> {
    let device = control.pool.volume(&volume).await?.session(None);
    let what = format!("can't write to volume {volume}");
    let mut body = request.into_body().into_data_stream();
    let written = write_body(&*device, &what, &mut body).await;
    if written.is_err() {
        drain(&mut body).await;
    }
    Ok(Json(written?))
}

async fn write_body(
    device: &dyn Device,
    what: &str,
    body: &mut BodyDataStream,
) -> Result<(), Problem> {
    let io_failed = |error: IoError| io_problem(what, &error);
    let mut piece = BytesMut::new();
    let mut offset = 0;
    while let Some(received) = body.next().await {
        let received = received
            .map_err(|error| Problem::invalid(what, format!("the body ended early: {error}")))?;
        piece.extend_from_slice(&received);
        if offset + piece.len() as u64 > device.size_bytes() {
            let why = format!("the data is longer than the volume's {}", device.size_bytes());
            return Err(Problem::invalid(what, why).next("create a larger volume"));
        }
        if piece.len() >= PIECE_BYTES as usize {
            offset += write_piece(device, offset, &mut piece).await.map_err(io_failed)?;
        }
    }
    write_piece(device, offset, &mut piece).await.map_err(io_failed)?;
    device.flush().await.map_err(io_failed)
}

/// Reads the rest of a refused body, because many clients read the answer only after they have sent
/// everything.
async fn drain(body: &mut BodyDataStream) {
    let mut left = DRAIN_BYTES_MAX;
    while let Some(Ok(received)) = body.next().await {
        left = left.saturating_sub(received.len());
        if left == 0 {
            return;
        }
    }
}

async fn write_piece(
    device: &dyn Device,
    offset: u64,
    piece: &mut BytesMut,
) -> Result<u64, IoError> {
    let length_bytes = piece.len() as u64;
    if length_bytes > 0 {
        device.write(offset, piece.split().freeze(), false).await?;
    }
    Ok(length_bytes)
}

#[derive(Deserialize)]
struct DataRange {
    length_bytes: Option<u64>,
}

/// Answers with the first bytes of a volume, or all of them. An error in the middle ends the body early;
/// the client sees that it is shorter than its announced length.
async fn read_data(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Asker(peer): Asker,
    range: Result<Query<DataRange>, QueryRejection>,
) -> Result<Response, Failure> {
    let of = Data::Volume(volume.clone());
    control.exports.check_leaving(&of, Want::Content, peer).await?;
    let Query(range) =
        range.map_err(|error| Problem::invalid("can't read a volume's data", error.body_text()))?;
    let device = control.pool.volume(&volume).await?.session(None);
    let length_bytes = range.length_bytes.unwrap_or(device.size_bytes());
    if length_bytes > device.size_bytes() {
        let what = format!("can't read {length_bytes} bytes of volume {volume}");
        let why = format!("it has {} bytes", device.size_bytes());
        return Err(Problem::invalid(what, why).into());
    }
    let pieces = stream::try_unfold((device, 0), move |(device, offset)| async move {
        let left = length_bytes - offset;
        if left == 0 {
            return Ok::<_, IoError>(None);
        }
        let length = u32::try_from(left).unwrap_or(u32::MAX).min(PIECE_BYTES);
        let piece: Bytes = device.read(offset, length).await?;
        Ok(Some((piece, (device, offset + u64::from(length)))))
    });
    Response::builder()
        .header("content-type", "application/octet-stream")
        .header("content-length", length_bytes)
        .body(Body::from_stream(pieces))
        .map_err(|error| Failure(Problem::internal("can't answer with a volume's data", error)))
}
