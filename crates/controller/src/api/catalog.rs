//! `/images`, `/volumes`

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use perigee_http::{Json, Reply};
use perigee_model::job::{
    AdoptVolume, ClusterImage, ClusterVolume, NewImage, NewVolume, ReplicateImage, Unknown,
};
use perigee_model::leave_site::{LeaveSiteAsker, LeaveSiteSet, SetLeaveSite};
use perigee_model::replica::{PromoteVolume, Promotion, Replica, ReplicateVolume, StopReplica};
use perigee_model::tenant::ShareImage;
use perigee_model::volume::{DeletedImage, Snapshot, Upload};
use perigee_model::volume_move::{MoveVolume, VolumeMove, VolumeMoveCause};
use perigee_model::{HostId, ImageName, Problem, VolumeName};

use super::caller::{Caller, Full};
use super::{Shared, json, to_its_end};
use crate::cluster::Cluster;
use crate::records::asked;
use crate::storage::leave_site::{self, Of};
use crate::storage::{images, moves, replicas as of_volumes, unknown, volumes};

/// The query of [`images()`].
#[derive(serde::Deserialize)]
pub struct Which {
    #[serde(default)]
    all: bool,
}

/// The images; with `all` also those that were made of jobs' inputs.
#[utoipa::path(get, path = "/images", tag = "images",
    params(("all" = Option<bool>, Query)),
    responses((status = 200, body = Vec<ClusterImage>)))]
pub async fn images(
    State(cluster): Shared,
    caller: Caller,
    query: Result<Query<Which>, QueryRejection>,
) -> Reply<Vec<ClusterImage>> {
    let Query(Which { all }) =
        query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    let mut images = images::list(&cluster, all).await?;
    images.retain(|image| image.shared || caller.sees(image.name.as_str()));
    json(images)
}

/// Imports an image at one host. The other hosts get copies, which can be used at once and are completed in the
/// background. `missing_bytes` is the number of bytes that are still missing in them.
#[utoipa::path(post, path = "/images", tag = "images", request_body = NewImage,
    responses((status = 200, body = ClusterImage)))]
pub async fn import_image(
    State(cluster): Shared,
    caller: Caller,
    Json(new): Json<NewImage>,
) -> Reply<ClusterImage> {
    let new = caller.new_image(&cluster, new)?;
    // In a task of its own, because a client that disconnects must not end an import.
    let import = tokio::spawn(asked::carried(async move { images::import(&cluster, new).await }));
    json(import.await.map_err(|e| Problem::internal("can't import an image", e))??)
}

/// The query of [`upload_image`].
#[derive(serde::Deserialize)]
pub struct UploadTo {
    host: Option<HostId>,
}

/// Takes a disk image's file, for an import. It goes to the host that is named, or to the one with the most free
/// space; the answer says which. Import it there: the answer's `source` and `host` are fields of `NewImage`. It counts for
/// the tenant's quota of volumes until an image is made of it, or for an hour.
#[utoipa::path(post, path = "/uploads", tag = "images",
    params(("host" = Option<String>, Query)),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 200, body = Upload)))]
pub async fn upload_image(
    State(cluster): Shared,
    caller: Caller,
    query: Result<Query<UploadTo>, QueryRejection>,
    body: Body,
) -> Reply<Upload> {
    let Query(UploadTo { host }) =
        query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    // In a task of its own: what the host has by then is counted also if the client does not wait for the answer.
    let sent =
        tokio::spawn(
            async move { images::upload(&cluster, &caller.tenant, host.as_ref(), body).await },
        );
    json(sent.await.map_err(|e| Problem::internal("can't take an upload", e))??)
}

/// An image: the tenant's own of this name, or else the shared one. The answer has the hosts with a copy, and the bytes
/// that copies lack.
#[utoipa::path(get, path = "/images/{image}", tag = "images", params(("image" = String, Path)),
    responses((status = 200, body = ClusterImage)))]
pub async fn image(
    State(cluster): Shared,
    caller: Caller,
    Full(image): Full<ImageName>,
) -> Reply<ClusterImage> {
    let image = caller.image(&cluster, &image).await?;
    json(images::image(&cluster, &image).await?)
}

/// Frees an image's name at once, also of a snapshot of a volume that is in use. The answer says what stands on its layer: the
/// layer is merged into that in the background, as soon as only one chain needs it.
#[utoipa::path(delete, path = "/images/{image}", tag = "images", params(("image" = String, Path)),
    responses((status = 200, body = DeletedImage)))]
pub async fn delete_image(
    State(cluster): Shared,
    caller: Caller,
    Full(image): Full<ImageName>,
) -> Reply<DeletedImage> {
    caller.check_shared(&cluster, &image).await?;
    let mut deleted = images::delete(&cluster, &image).await?;
    // Of a shared image, what other tenants have made is not told.
    let is_seen = |what: &String| what.split(' ').next_back().is_some_and(|name| caller.sees(name));
    deleted.stands_on_it.retain(is_seen);
    json(deleted)
}

/// The volumes that the caller sees, with their homes and replicas. The figures of a home that does not answer are its
/// last ones.
#[utoipa::path(get, path = "/volumes", tag = "volumes",
    responses((status = 200, body = Vec<ClusterVolume>)))]
pub async fn volumes(State(cluster): Shared, caller: Caller) -> Reply<Vec<ClusterVolume>> {
    let mut volumes = volumes::volumes(&cluster).await?;
    volumes.retain(|volume| caller.sees(volume.name.as_str()));
    let mut seen = Vec::with_capacity(volumes.len());
    for volume in volumes {
        if caller.seen_name(&cluster, &volume.name).await.is_ok() {
            seen.push(volume);
        }
    }
    json(seen)
}

/// Makes a volume: empty, a clone of an image or of another volume, or, for an admin, a volume of another host's
/// export. It can be used at once.
#[utoipa::path(post, path = "/volumes", tag = "volumes", request_body = NewVolume,
    responses((status = 200, body = ClusterVolume)))]
pub async fn create_volume(
    State(cluster): Shared,
    caller: Caller,
    Json(new): Json<NewVolume>,
) -> Reply<ClusterVolume> {
    let new = caller.new_volume(&cluster, new).await?;
    json(volumes::create(&cluster, new).await?)
}

/// A volume, with its home, its replicas and its size.
#[utoipa::path(get, path = "/volumes/{volume}", tag = "volumes",
    params(("volume" = String, Path)), responses((status = 200, body = ClusterVolume)))]
pub async fn volume(
    State(cluster): Shared,
    Full(volume): Full<VolumeName>,
) -> Reply<ClusterVolume> {
    json(volumes::volume(&cluster, &volume).await?)
}

/// What hosts have and no record names there: VMs, volumes and images, with what can be done with each. Nothing is done by itself.
#[utoipa::path(get, path = "/unknown", tag = "hosts",
    responses((status = 200, body = Vec<Unknown>)))]
pub async fn unknown(State(cluster): Shared) -> Reply<Vec<Unknown>> {
    json(unknown::list(&cluster).await?)
}

/// Makes an image known that a host has and no record names.
#[utoipa::path(post, path = "/images/{image}/adopt", tag = "images",
    params(("image" = String, Path)), request_body = AdoptVolume,
    responses((status = 200, body = ClusterImage)))]
pub async fn adopt_image(
    State(cluster): Shared,
    Full(image): Full<ImageName>,
    Json(ask): Json<AdoptVolume>,
) -> Reply<ClusterImage> {
    json(images::adopt(&cluster, &image, &ask.host).await?)
}

/// Makes a volume known that was made at a host without the controller. A host that reports a volume does not do that by
/// itself.
#[utoipa::path(post, path = "/volumes/{volume}/adopt", tag = "volumes",
    params(("volume" = String, Path)), request_body = AdoptVolume,
    responses((status = 200, body = ClusterVolume)))]
pub async fn adopt_volume(
    State(cluster): Shared,
    Full(volume): Full<VolumeName>,
    Json(ask): Json<AdoptVolume>,
) -> Reply<ClusterVolume> {
    json(volumes::adopt(&cluster, &volume, &ask.host).await?)
}

/// Deletes a volume and its data. Refused while a job or VM uses it, while it moves, and while it has a replica.
#[utoipa::path(delete, path = "/volumes/{volume}", tag = "volumes",
    params(("volume" = String, Path)), responses((status = 200)))]
pub async fn delete_volume(State(cluster): Shared, Full(volume): Full<VolumeName>) -> Reply<()> {
    json(volumes::delete(&cluster, &volume).await?)
}

/// Seals the current content of a volume under an image's name, at the volume's home.
#[utoipa::path(post, path = "/volumes/{volume}/snapshot", tag = "volumes",
    params(("volume" = String, Path)), request_body = Snapshot,
    responses((status = 200, body = ClusterImage)))]
pub async fn snapshot(
    State(cluster): Shared,
    caller: Caller,
    Full(volume): Full<VolumeName>,
    Json(ask): Json<Snapshot>,
) -> Reply<ClusterImage> {
    let ask = Snapshot { image: caller.new_image_name(&cluster, &ask.image)? };
    json(images::snapshot(&cluster, &volume, &ask).await?)
}

/// Lets every tenant use an image of the tenant `default`, or ends that. A tenant's own image of the same name comes
/// first. Jobs and volumes that use it already go on.
#[utoipa::path(put, path = "/images/{image}/shared", tag = "images",
    params(("image" = String, Path)), request_body = ShareImage,
    responses((status = 200, body = ClusterImage)))]
pub async fn share_image(
    State(cluster): Shared,
    Full(image): Full<ImageName>,
    Json(ask): Json<ShareImage>,
) -> Reply<ClusterImage> {
    json(images::share(&cluster, &image, ask.shared).await?)
}

/// Changes whether a volume may leave its site. `never` is refused while other sites have copies; `allowed` has to
/// be confirmed.
#[utoipa::path(put, path = "/volumes/{volume}/leave-site", tag = "volumes",
    params(("volume" = String, Path)), request_body = SetLeaveSite,
    responses((status = 200, body = LeaveSiteSet)))]
pub async fn set_volume_leave_site(
    State(cluster): Shared,
    caller: Caller,
    Full(volume): Full<VolumeName>,
    Json(ask): Json<SetLeaveSite>,
) -> Reply<LeaveSiteSet> {
    let asker = asker(&cluster, &caller).await?;
    let of = Of::Volume(volume);
    json(to_its_end(async move { leave_site::set(&cluster, &of, ask, asker).await }).await?)
}

/// `None` for an admin.
async fn asker(cluster: &Cluster, caller: &Caller) -> Result<Option<LeaveSiteAsker>, Problem> {
    if caller.is_admin() {
        return Ok(None);
    }
    leave_site::asker(cluster, &caller.tenant).await.map(Some)
}

/// The same for an image.
#[utoipa::path(put, path = "/images/{image}/leave-site", tag = "images",
    params(("image" = String, Path)), request_body = SetLeaveSite,
    responses((status = 200, body = LeaveSiteSet)))]
pub async fn set_image_leave_site(
    State(cluster): Shared,
    caller: Caller,
    Full(image): Full<ImageName>,
    Json(ask): Json<SetLeaveSite>,
) -> Reply<LeaveSiteSet> {
    caller.check_shared(&cluster, &image).await?;
    let asker = asker(&cluster, &caller).await?;
    let of = Of::Image(image);
    json(to_its_end(async move { leave_site::set(&cluster, &of, ask, asker).await }).await?)
}

/// Copies an image to all hosts of a site. The copies can be used at once, and get their blocks in the background.
#[utoipa::path(post, path = "/images/{image}/replicate", tag = "images",
    params(("image" = String, Path)), request_body = ReplicateImage,
    responses((status = 200, body = ClusterImage)))]
pub async fn replicate_image(
    State(cluster): Shared,
    Full(image): Full<ImageName>,
    Json(ask): Json<ReplicateImage>,
) -> Reply<ClusterImage> {
    json(images::replicate(&cluster, &image, &ask.to).await?)
}

/// Moves a volume to another home, also while it is in use; the answer comes at once. The volume is used at
/// its new home as soon as that has taken it; what it holds is copied in the background.
#[utoipa::path(post, path = "/volumes/{volume}/move", tag = "volumes",
    params(("volume" = String, Path)), request_body = MoveVolume,
    responses((status = 200, body = VolumeMove)))]
pub async fn move_volume(
    State(cluster): Shared,
    Full(volume): Full<VolumeName>,
    Json(ask): Json<MoveVolume>,
) -> Reply<VolumeMove> {
    if !ask.confirmed {
        of_volumes::check_far(&cluster, &volume, &ask.to).await?;
    }
    json(moves::request(&cluster, &volume, &ask.to, VolumeMoveCause::Asked).await?)
}

/// The volume's last move, ended or not.
#[utoipa::path(get, path = "/volumes/{volume}/move", tag = "volumes",
    params(("volume" = String, Path)), responses((status = 200, body = VolumeMove)))]
pub async fn last_move(
    State(cluster): Shared,
    Full(volume): Full<VolumeName>,
) -> Reply<VolumeMove> {
    json(moves::of_volume(&cluster, &volume).await?)
}

/// Calls off a volume's move while the new home has not taken the volume; the answer comes at once.
#[utoipa::path(post, path = "/volumes/{volume}/move/cancel", tag = "volumes",
    params(("volume" = String, Path)), responses((status = 200, body = VolumeMove)))]
pub async fn cancel_volume_move(
    State(cluster): Shared,
    Full(volume): Full<VolumeName>,
) -> Reply<VolumeMove> {
    json(moves::cancel(&cluster, &volume).await?)
}

/// Keeps a replica of a volume at another site, or changes how often it is made; the answer comes at once.
#[utoipa::path(post, path = "/volumes/{volume}/replicas", tag = "volumes",
    params(("volume" = String, Path)), request_body = ReplicateVolume,
    responses((status = 200, body = Replica)))]
pub async fn replicate_volume(
    State(cluster): Shared,
    Full(volume): Full<VolumeName>,
    Json(ask): Json<ReplicateVolume>,
) -> Reply<Replica> {
    json(of_volumes::replicate(&cluster, &volume, &ask).await?)
}

/// Ends a replica. The answer comes at once; the replica's data is dropped in the background.
#[utoipa::path(post, path = "/volumes/{volume}/replicas/stop", tag = "volumes",
    params(("volume" = String, Path)), request_body = StopReplica,
    responses((status = 200, body = Replica)))]
pub async fn stop_replica(
    State(cluster): Shared,
    Full(volume): Full<VolumeName>,
    Json(ask): Json<StopReplica>,
) -> Reply<Replica> {
    json(of_volumes::stop(&cluster, &volume, &ask.to).await?)
}

/// Makes the newest complete replica the volume, because the volume's home is lost. What was written since then is lost.
#[utoipa::path(post, path = "/volumes/{volume}/promote", tag = "volumes",
    params(("volume" = String, Path)), request_body = PromoteVolume,
    responses((status = 200, body = Promotion)))]
pub async fn promote_volume(
    State(cluster): Shared,
    Full(volume): Full<VolumeName>,
    Json(ask): Json<PromoteVolume>,
) -> Reply<Promotion> {
    // In a task of its own: a client that disconnects does not leave it in the middle.
    let promoting = tokio::spawn(async move { of_volumes::promote(&cluster, &volume, ask).await });
    json(promoting.await.map_err(|e| Problem::internal("can't promote a volume", e))??)
}
