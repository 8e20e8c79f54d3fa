//! The cluster's images and volumes. The truth is at each home; the store remembers which home,
//! so that a volume whose home is away is still known.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use perigee_model::job::{ClusterImage, ClusterVolume, NewImage, NewVolume};
use perigee_model::volume::{
    CreateVolume, ImageInfo, ImportImage, PoolInfo, Snapshot, VolumeInfo, VolumeSource,
};
use perigee_model::{Epoch, HostId, ImageName, Problem, ProblemKind, VolumeName};

use crate::cluster::{Cluster, HostLink};
use crate::records::{JobRecord, VolumeRecord, VolumeSeen};

// --- images ---

pub async fn images(cluster: &Cluster) -> Result<Vec<ClusterImage>, Problem> {
    let mut images: BTreeMap<ImageName, ClusterImage> = BTreeMap::new();
    let hosts = cluster.hosts.up();
    let asked = hosts.iter().map(|host| host.volume.get::<Vec<ImageInfo>>("/v1/images"));
    for (host, answer) in hosts.iter().zip(join_all(asked).await) {
        let Some(found) = or_silent(host, answer) else { continue };
        for info in found {
            images
                .entry(info.name.clone())
                .or_insert_with(|| image_view(&info))
                .hosts
                .push(host.id.clone());
        }
    }
    Ok(images.into_values().collect())
}

pub async fn image(cluster: &Cluster, name: &ImageName) -> Result<ClusterImage, Problem> {
    images(cluster).await?.into_iter().find(|i| i.name == *name).ok_or_else(|| no_image(name))
}

/// The hosts that have an image of this name, in words.
async fn image_at(cluster: &Cluster, name: &ImageName) -> Result<Option<String>, Problem> {
    let present = images(cluster).await?.into_iter().find(|i| i.name == *name);
    Ok(present.map(|i| i.hosts.iter().map(HostId::as_str).collect::<Vec<_>>().join(", ")))
}

fn no_image(name: &ImageName) -> Problem {
    Problem::not_found(format!("image {name}"), "no host that is up has an image of this name")
        .next("`perigee image list` shows the images, `perigee image import` makes one")
}

fn image_view(info: &ImageInfo) -> ClusterImage {
    ClusterImage {
        name: info.name.clone(),
        size_bytes: info.size_bytes,
        allocated_bytes: info.allocated_bytes,
        hosts: Vec::new(),
    }
}

/// Imports on one host and copies to every other host that is up.
pub async fn import(cluster: &Cluster, new: NewImage) -> Result<ClusterImage, Problem> {
    if let Some(place) = image_at(cluster, &new.name).await? {
        return Err(Problem::conflict(
            format!("import image {}", new.name),
            format!("there is an image of this name at {place}"),
        )
        .next("choose another name, or delete it first"));
    }
    let first = match &new.host {
        Some(host) => reachable(cluster, host)?,
        None => roomiest(cluster).await?,
    };
    let ask = ImportImage { name: new.name.clone(), source: new.source, layer: None };
    let info: ImageInfo = first.volume_slow.post("/v1/images", &ask).await?;
    for host in cluster.hosts.up().iter().filter(|host| host.id != first.id) {
        copy_image(&first, host, &info).await?;
    }
    image(cluster, &new.name).await
}

async fn copy_image(from: &HostLink, to: &HostLink, info: &ImageInfo) -> Result<(), Problem> {
    let ask = ImportImage {
        name: info.name.clone(),
        source: format!("nbd://{}/image:{}", from.addresses.nbd_addr, info.name),
        layer: Some(info.layer),
    };
    tracing::info!("copy image {} from {} to {}", info.name, from.id, to.id);
    match to.volume_slow.post::<ImageInfo>("/v1/images", &ask).await {
        Err(problem) if problem.kind != ProblemKind::Conflict => Err(problem),
        _ => Ok(()),
    }
}

/// Makes sure that the host has the image: a host that came later gets its copy now.
///
/// # Errors
/// `NotFound` when no host that is up has it.
pub async fn ensure_image(
    cluster: &Cluster,
    at: &HostLink,
    name: &ImageName,
) -> Result<ImageInfo, Problem> {
    let path = format!("/v1/images/{name}");
    match at.volume.get::<ImageInfo>(&path).await {
        Err(problem) if problem.kind == ProblemKind::NotFound => {}
        answer => return answer,
    }
    for host in cluster.hosts.up() {
        if let Ok(info) = host.volume.get::<ImageInfo>(&path).await {
            copy_image(&host, at, &info).await?;
            return at.volume.get(&path).await.map_err(|problem| match problem.kind {
                ProblemKind::NotFound => {
                    let what = format!("copy image {name} to {}", at.id);
                    Problem::unavailable(what, "another job's copy is under way")
                }
                _ => problem,
            });
        }
    }
    Err(no_image(name))
}

pub async fn delete_image(cluster: &Cluster, name: &ImageName) -> Result<(), Problem> {
    let present = image(cluster, name).await?;
    for job in cluster.unfinished_jobs() {
        if job.job.spec.image == *name {
            let why = format!("job {} starts from it", job.job.id);
            return Err(Problem::conflict(format!("delete image {name}"), why));
        }
    }
    // Where something stands on it first: what refuses does so before any copy is gone.
    let path = format!("/v1/images/{name}");
    let mut copies = Vec::new();
    for host in &present.hosts {
        let host = reachable(cluster, host)?;
        match host.volume.get::<ImageInfo>(&path).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => {}
            answer => copies.push((answer?.children, host)),
        }
    }
    copies.sort_by_key(|(children, _)| std::cmp::Reverse(*children));
    for (_, host) in copies {
        match host.volume.delete(&path).await {
            Err(problem) if problem.kind != ProblemKind::NotFound => return Err(problem),
            _ => {}
        }
    }
    Ok(())
}

// --- volumes ---

pub async fn volumes(cluster: &Cluster) -> Result<Vec<ClusterVolume>, Problem> {
    let jobs = cluster.unfinished_jobs();
    let mut volumes = BTreeMap::new();
    let hosts = cluster.hosts.up();
    let asked = hosts.iter().map(|host| host.volume.get::<Vec<VolumeInfo>>("/v1/volumes"));
    for (host, answer) in hosts.iter().zip(join_all(asked).await) {
        for info in or_silent(host, answer).into_iter().flatten() {
            let view = view(&info.name, &host.id, Some(&seen(&info)), &jobs);
            volumes.insert(info.name, view);
        }
    }
    for record in cluster.records.list::<VolumeRecord>("volumes/").await? {
        let silent = !hosts.iter().any(|host| host.id == record.home);
        if silent {
            let view = view(&record.name, &record.home, record.seen.as_ref(), &jobs);
            volumes.entry(record.name).or_insert(view);
        }
    }
    Ok(volumes.into_values().collect())
}

pub async fn volume(cluster: &Cluster, name: &VolumeName) -> Result<ClusterVolume, Problem> {
    let record = find(cluster, name).await?;
    Ok(view(name, &record.home, record.seen.as_ref(), &cluster.unfinished_jobs()))
}

fn view(
    name: &VolumeName,
    home: &HostId,
    seen: Option<&VolumeSeen>,
    jobs: &[Arc<JobRecord>],
) -> ClusterVolume {
    ClusterVolume {
        name: name.clone(),
        home: home.clone(),
        size_bytes: seen.map_or(0, |s| s.size_bytes),
        allocated_bytes: seen.map_or(0, |s| s.allocated_bytes),
        epoch: seen.map_or(Epoch(0), |s| s.epoch),
        used_by: writer(jobs, name).map(|record| record.job.id.clone()),
    }
}

fn seen(info: &VolumeInfo) -> VolumeSeen {
    VolumeSeen {
        size_bytes: info.size_bytes,
        allocated_bytes: info.allocated_bytes,
        epoch: info.epoch,
    }
}

/// The job that has the volume open for writing.
pub fn writer<'a>(jobs: &'a [Arc<JobRecord>], name: &VolumeName) -> Option<&'a JobRecord> {
    let record = jobs.iter().find(|record| {
        let disks = record.placement.iter().flat_map(|placement| &placement.disks);
        disks.into_iter().any(|disk| disk.volume == *name && !disk.read_only)
    })?;
    Some(record)
}

/// A volume's home and what is known of it: asked at its home if that answers. A volume
/// that was made at a host without the controller is found and remembered.
pub async fn find(cluster: &Cluster, name: &VolumeName) -> Result<VolumeRecord, Problem> {
    let key = format!("volumes/{name}");
    let path = format!("/v1/volumes/{name}");
    if let Some(mut record) = cluster.records.read::<VolumeRecord>(&key).await? {
        let Ok(home) = cluster.hosts.get(&record.home) else { return Ok(record) };
        if let Ok(info) = home.volume.get::<VolumeInfo>(&path).await {
            let now = Some(seen(&info));
            if record.seen != now {
                record.seen = now;
                cluster.records.put(&key, &record).await?;
            }
        }
        return Ok(record);
    }
    for host in cluster.hosts.up() {
        if let Ok(info) = host.volume.get::<VolumeInfo>(&path).await {
            let record =
                VolumeRecord { name: name.clone(), home: host.id.clone(), seen: Some(seen(&info)) };
            let jobs = cluster.unfinished_jobs();
            let mut disks = jobs.iter().filter_map(|j| j.placement.as_ref()).flat_map(|p| &p.disks);
            let made_by_a_job =
                info.owner.is_some() || disks.any(|disk| disk.temporary && disk.volume == *name);
            if !made_by_a_job {
                cluster.records.create(&key, &record).await?;
            }
            return Ok(record);
        }
    }
    Err(Problem::not_found(
        format!("volume {name}"),
        "no host that is up has a volume of this name",
    )
    .next("`perigee volume list` shows the volumes, `perigee volume create` makes one"))
}

pub async fn create(cluster: &Cluster, new: NewVolume) -> Result<ClusterVolume, Problem> {
    if let Ok(present) = find(cluster, &new.name).await {
        let why = format!("there is a volume of this name at {}", present.home);
        return Err(Problem::conflict(format!("create volume {}", new.name), why)
            .next("choose another name, or delete it first"));
    }
    let home = home_for(cluster, &new).await?;
    if let VolumeSource::Image(image) = &new.source {
        ensure_image(cluster, &home, image).await?;
    }
    let key = format!("volumes/{}", new.name);
    let mut record = VolumeRecord { name: new.name.clone(), home: home.id.clone(), seen: None };
    if !cluster.records.create(&key, &record).await? {
        let why = "somebody else is making a volume of this name";
        return Err(Problem::conflict(format!("create volume {}", new.name), why));
    }
    let ask = CreateVolume::new(new.name.clone(), new.size_bytes, new.source.clone());
    match home.volume_slow.post::<VolumeInfo>("/v1/volumes", &ask).await {
        Ok(info) => {
            record.seen = Some(seen(&info));
            cluster.records.put(&key, &record).await?;
            Ok(view(&new.name, &home.id, record.seen.as_ref(), &[]))
        }
        Err(problem) => {
            // An answer that got lost may hide a volume: then the record stays, to be deleted.
            if problem.kind != ProblemKind::Unavailable {
                cluster.records.remove(&key).await?;
            }
            Err(problem)
        }
    }
}

async fn home_for(cluster: &Cluster, new: &NewVolume) -> Result<Arc<HostLink>, Problem> {
    let source_home = match &new.source {
        VolumeSource::Volume(source) => Some(find(cluster, source).await?.home),
        VolumeSource::Empty | VolumeSource::Image(_) | VolumeSource::Remote { .. } => None,
    };
    match (&new.host, source_home) {
        (Some(host), Some(home)) if *host != home => Err(Problem::invalid(
            format!("create volume {} at {host}", new.name),
            format!("its source has its home at {home}, and a clone stays beside its source"),
        )),
        (Some(host), _) => reachable(cluster, host),
        (None, Some(home)) => reachable(cluster, &home),
        (None, None) => roomiest(cluster).await,
    }
}

pub async fn delete(cluster: &Cluster, name: &VolumeName) -> Result<(), Problem> {
    let record = find(cluster, name).await?;
    let _deletion = cluster.index.begin_deletion(name).map_err(|why| {
        Problem::conflict(format!("delete volume {name}"), why)
            .next("wait for the job, or cancel it")
    })?;
    let home = reachable(cluster, &record.home)?;
    match home.volume.delete(&format!("/v1/volumes/{name}")).await {
        Err(problem) if problem.kind != ProblemKind::NotFound => Err(problem),
        _ => cluster.records.remove(&format!("volumes/{name}")).await,
    }
}

pub async fn snapshot(
    cluster: &Cluster,
    name: &VolumeName,
    ask: &Snapshot,
) -> Result<ClusterImage, Problem> {
    let home = reachable(cluster, &find(cluster, name).await?.home)?;
    // One name, one content: an image of this name at another host is copied to where it is missing.
    if let Some(place) = image_at(cluster, &ask.image).await? {
        let why = format!("there is an image of this name at {place}");
        return Err(Problem::conflict(format!("snapshot volume {name} as {}", ask.image), why)
            .next("choose another name, or delete it first"));
    }
    let path = format!("/v1/volumes/{name}/snapshot");
    let info: ImageInfo = home.volume_slow.post(&path, ask).await?;
    Ok(ClusterImage { hosts: vec![home.id.clone()], ..image_view(&info) })
}

/// # Errors
/// `Unavailable` when the host does not answer, in plain words.
pub fn reachable(cluster: &Cluster, host: &HostId) -> Result<Arc<HostLink>, Problem> {
    let link = cluster.hosts.get(host)?;
    if cluster.hosts.state(host) == perigee_model::job::HostState::Unreachable {
        return Err(Problem::unavailable(format!("host {host}"), cluster.hosts.silence(host))
            .next("bring it back, or see `perigee host list`"));
    }
    Ok(link)
}

async fn roomiest(cluster: &Cluster) -> Result<Arc<HostLink>, Problem> {
    let hosts = cluster.hosts.up();
    let asked = hosts.iter().map(|host| host.volume.get::<PoolInfo>("/v1/pool"));
    let pools = join_all(asked).await;
    hosts
        .iter()
        .zip(pools)
        .filter_map(|(host, pool)| pool.ok().map(|pool| (pool.free_bytes, host)))
        .max_by_key(|(free_bytes, _)| *free_bytes)
        .map(|(_, host)| Arc::clone(host))
        .ok_or_else(|| {
            Problem::unavailable("find a host", "no host is up").next("see `perigee host list`")
        })
}

/// A host that does not answer leaves its part out of a list, with a word in the log.
fn or_silent<T>(host: &HostLink, answer: Result<T, Problem>) -> Option<T> {
    answer.inspect_err(|problem| tracing::warn!("host {}: {problem}", host.id)).ok()
}
