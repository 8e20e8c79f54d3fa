//! The part of a fake volume server that has volumes, their epochs and their attachments.

use super::*;

pub fn routes() -> Router<Arc<Mutex<Inside>>> {
    Router::new()
        .route("/v1/volumes", get(volumes).post(create))
        .route("/v1/volumes/{volume}", get(volume).delete(delete_volume))
        .route("/v1/volumes/{volume}/data", put(write).get(read))
        .route("/v1/volumes/{volume}/leave-site", put(set_leave_site))
        .route("/v1/volumes/{volume}/snapshot", post(snapshot))
        .route("/v1/volumes/{volume}/resize", post(resize))
        .route("/v1/layers/find", post(find_layers))
        .route("/v1/layers/leave-site", put(set_layers_leave_site))
        .route("/v1/volumes/{volume}/epoch/issue", post(issue))
        .route("/v1/volumes/{volume}/epoch", post(change_epoch))
        .route("/v1/attachments", get(attachments))
        .route("/v1/attachments/{volume}", put(attach).delete(detach))
}

async fn snapshot(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Json(ask): Json<Snapshot>,
) -> Reply<ImageInfo> {
    while_held(&inside, |inside| inside.holds_snapshots).await;
    let mut inside = inside.lock().expect("lock");
    let volume = inside.volumes.get(&name).ok_or_else(no_volume)?;
    let made = ImageInfo {
        size_bytes: volume.info.size_bytes,
        leave_site: volume.info.leave_site,
        name: ask.image.clone(),
        layer: LayerId(uuid::Uuid::new_v4()),
        ..image()
    };
    inside.images.insert(ask.image, made.clone());
    if inside.goes_on {
        inside.still = 0;
    }
    Ok(Json(made))
}

fn no_volume() -> Failure {
    Problem::not_found("volume", "there is none").into()
}

async fn volumes(State(inside): Shared) -> Reply<Vec<VolumeInfo>> {
    let inside = inside.lock().expect("lock");
    Ok(Json(inside.volumes.values().map(|volume| volume.info.clone()).collect()))
}

/// Somebody waits until it is told what a volume is, or no longer.
struct OpenInfo(Arc<Mutex<Inside>>);

impl OpenInfo {
    fn new(inside: &Arc<Mutex<Inside>>) -> Self {
        let mut counted = inside.lock().expect("lock");
        counted.infos_open += 1;
        counted.infos_open_max = counted.infos_open_max.max(counted.infos_open);
        Self(Arc::clone(inside))
    }
}

impl Drop for OpenInfo {
    fn drop(&mut self) {
        if let Ok(mut inside) = self.0.lock() {
            inside.infos_open -= 1;
        }
    }
}

async fn volume(State(inside): Shared, Path(name): Path<VolumeName>) -> Reply<VolumeInfo> {
    let _open = OpenInfo::new(&inside);
    while_held(&inside, |inside| inside.holds_infos).await;
    let inside = inside.lock().expect("lock");
    inside.volumes.get(&name).map(|v| Json(v.info.clone())).ok_or_else(no_volume)
}

async fn create(State(inside): Shared, Json(new): Json<CreateVolume>) -> Reply<VolumeInfo> {
    let mut inside = inside.lock().expect("lock");
    if inside.no_new_volumes {
        return Err(Problem::unavailable("create a volume", "not now").into());
    }
    if inside.volumes.contains_key(&new.name) {
        return Err(Problem::conflict("create a volume", "there is one").into());
    }
    if let VolumeSource::Image(image) = &new.source
        && std::mem::take(&mut inside.image_vanishes)
    {
        inside.images.remove(image);
        return Err(Problem::not_found("create a volume", "there is no such image").into());
    }
    if let VolumeSource::Volume(source) = &new.source
        && !inside.volumes.contains_key(source)
    {
        return Err(no_volume());
    }
    let mut info = volume_info(&new);
    if let Some(other) = inside.measured.makes.clone() {
        info.name = other;
    }
    let volume = Volume {
        info: info.clone(),
        issued: 1,
        returned: 0,
        data: match &new.source {
            VolumeSource::Image(_) if !inside.has_cloud_images => golden(),
            _ => Vec::new(),
        },
        stats: IoStats::default(),
    };
    inside.volumes.insert(new.name, volume);
    Ok(Json(info))
}

/// The beginning of a disk whose system has the runner.
fn golden() -> Vec<u8> {
    let mut disk = vec![0; RUNNER_MARK_AT];
    disk.extend(RUNNER_MARK);
    disk
}

async fn set_leave_site(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Json(SetLeaveSiteAs { set: ask, asker }): Json<SetLeaveSiteAs>,
) -> Reply<LeaveSiteSet> {
    let mut inside = inside.lock().expect("lock");
    let users = inside.users_of_layers.clone();
    inside.leave_site_asker = asker;
    let info = &mut inside.volumes.get_mut(&name).ok_or_else(no_volume)?.info;
    let before = std::mem::replace(&mut info.leave_site, ask.leave_site);
    let (also, may_leave) = (users.clone(), users);
    let layers = vec![LayerId(uuid::Uuid::nil())];
    Ok(Json(LeaveSiteSet { before, leave_site: ask.leave_site, layers, also, may_leave }))
}

async fn find_layers(State(inside): Shared, Json(ask): Json<FindLayers>) -> Reply<FoundLayers> {
    let inside = inside.lock().expect("lock");
    let users = inside.copies.clone();
    let layers = if users.is_empty() { Vec::new() } else { ask.layers };
    let is_on = |name: &&VolumeName| inside.stand_on_images.contains(name);
    let departed = inside.moves.departed.keys().filter(is_on);
    let readers = inside.readers.clone();
    Ok(Json(FoundLayers { layers, users, departed: departed.cloned().collect(), readers }))
}

async fn set_layers_leave_site(
    State(inside): Shared,
    Json(ask): Json<SetLayersLeaveSite>,
) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    if let Some(volume) = ask.of.volume.and_then(|volume| inside.volumes.get_mut(&volume)) {
        volume.info.leave_site = ask.leave_site;
    }
    Ok(Json(()))
}

pub fn volume_info(new: &CreateVolume) -> VolumeInfo {
    VolumeInfo {
        name: new.name.clone(),
        size_bytes: new.size_bytes.unwrap_or(1 << 20),
        head_bytes: 0,
        allocated_bytes: 100 << 20,
        own_bytes: 0,
        shared_bytes: 100 << 20,
        remote_bytes: 0,
        chain: Vec::new(),
        epoch: Epoch(1),
        health: VolumeHealth::Ok,
        sessions: 0,
        tenant: TenantName::default(),
        cache: CachePolicy::default(),
        owner: new.owner.clone(),
        leave_site: new.leave_site,
    }
}

async fn delete_volume(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    let volumes = &mut inside.volumes;
    let meant = query.get("owner");
    let is_meant = volumes.get(&name).is_some_and(|volume| {
        meant.is_none()
            || volume.info.owner.as_ref().map(OwnerName::as_str) == meant.map(String::as_str)
    });
    if !is_meant {
        return Err(no_volume());
    }
    inside.remove_residence(&name);
    inside.volumes.remove(&name);
    Ok(Json(()))
}

async fn write(State(inside): Shared, Path(name): Path<VolumeName>, body: Bytes) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    inside.volumes.get_mut(&name).ok_or_else(no_volume)?.data = body.to_vec();
    Ok(Json(()))
}

async fn read(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Query(query): Query<BTreeMap<String, usize>>,
) -> Result<Vec<u8>, Failure> {
    let mut inside = inside.lock().expect("lock");
    inside.data_reads += 1;
    let volume = inside.volumes.get(&name).ok_or_else(no_volume)?;
    Ok(volume.data.iter().copied().take(query["length_bytes"]).collect())
}

async fn resize(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Json(ask): Json<Resize>,
) -> Reply<VolumeInfo> {
    inside.lock().expect("lock").resizes_asked += 1;
    while_held(&inside, |inside| inside.holds_resizes).await;
    let mut inside = inside.lock().expect("lock");
    let info = &mut inside.volumes.get_mut(&name).ok_or_else(no_volume)?.info;
    info.size_bytes = ask.size_bytes;
    Ok(Json(info.clone()))
}

async fn issue(State(inside): Shared, Path(name): Path<VolumeName>) -> Reply<EpochIssued> {
    inside.lock().expect("lock").epochs_asked += 1;
    while_held(&inside, |inside| inside.holds_epochs).await;
    let mut inside = inside.lock().expect("lock");
    let volume = inside.volumes.get_mut(&name).ok_or_else(no_volume)?;
    volume.issued += 1;
    Ok(Json(EpochIssued { epoch: Epoch(volume.issued) }))
}

async fn change_epoch(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Json(change): Json<EpochChange>,
) -> Reply<VolumeInfo> {
    let mut inside = inside.lock().expect("lock");
    let volume = inside.volumes.get_mut(&name).ok_or_else(no_volume)?;
    let before = WriterEpochs {
        current: volume.info.epoch,
        issued_max: Epoch(volume.issued),
        returned_max: Epoch(volume.returned),
    };
    let refused = |e| Problem::conflict("change the epoch", e);
    let after = before.apply(change).map_err(refused)?;
    (volume.info.epoch, volume.returned) = (after.current, after.returned_max.0);
    Ok(Json(volume.info.clone()))
}

async fn attachments(State(inside): Shared) -> Reply<Vec<Attachment>> {
    let inside = inside.lock().expect("lock");
    let attachments = inside.attachments.iter().map(|(volume, nbd_addr)| Attachment {
        volume: volume.clone(),
        nbd_addr: nbd_addr.clone(),
        sessions: 0,
    });
    Ok(Json(attachments.collect()))
}

async fn attach(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Json(ask): Json<Attach>,
) -> Reply<Attachment> {
    inside.lock().expect("lock").attachments_asked += 1;
    while_held(&inside, |inside| inside.holds_attachments).await;
    inside.lock().expect("lock").attachments.insert(volume.clone(), ask.nbd_addr.clone());
    Ok(Json(Attachment { volume, nbd_addr: ask.nbd_addr, sessions: 0 }))
}

async fn detach(State(inside): Shared, Path(volume): Path<VolumeName>) -> Reply<()> {
    hang(&inside).await;
    inside.lock().expect("lock").attachments.remove(&volume);
    Ok(Json(()))
}
