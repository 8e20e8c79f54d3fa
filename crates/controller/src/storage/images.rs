//! The cluster's images: each name stands for one layer. The name is recorded in the store before any host
//! makes the image. Copies are made by the layer's UUID, and the volume servers compare them with its
//! checksums. A host can use a copy at once, because missing blocks are read from the host that it was copied
//! from. If that host is gone, or what comes from it is not the image's content, another one takes its place.

pub(crate) mod contents;
mod ensure;
mod imports;
mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::slice;
use std::sync::Arc;

use futures_util::future::join_all;
use perigee_model::job::ClusterImage;
use perigee_model::leave_site::{FindLayers, FoundLayers};
use perigee_model::volume::{CopyImage, DeletedImage, ImageInfo, Keep, Snapshot, VolumeInfo};
use perigee_model::{
    BackupName, DiskRole, HostId, ImageName, LayerId, Problem, ProblemKind, SiteId, TenantName,
    VolumeName,
};

use crate::accounts;
use crate::cluster::{Cluster, HostLink};
use crate::records::{ImageRecord, PendingImport, PlacedDisk, asked, image_key};
use crate::storage::volumes::{self, or_silent, reachable};
use crate::storage::{backups, left_behind};

pub use ensure::{NoCopy, ensure};
pub use imports::{finish_imports, import, import_inputs, restore, upload};
pub use sources::replace_lost_sources;

use imports::end_import;

/// An image at one host.
struct Found {
    host: HostId,
    info: ImageInfo,
}

async fn found(cluster: &Cluster) -> Vec<Found> {
    look(cluster).await.0
}

/// The images at all hosts, and the hosts that do not answer.
async fn look(cluster: &Cluster) -> (Vec<Found>, Vec<HostId>) {
    let hosts = cluster.hosts.serving();
    let mut silent: Vec<HostId> = cluster.hosts.all().iter().map(|host| host.id.clone()).collect();
    let asked = hosts.iter().map(|host| host.volume.get::<Vec<ImageInfo>>("/v1/images"));
    let mut found = Vec::new();
    for (host, answer) in hosts.iter().zip(join_all(asked).await) {
        let Some(infos) = or_silent(host, answer) else { continue };
        silent.retain(|id| *id != host.id);
        found.extend(infos.into_iter().map(|info| Found { host: host.id.clone(), info }));
    }
    (found, silent)
}

/// Why an image that a host shows is not one of the cluster; `None` if it is.
pub async fn why_unknown(cluster: &Cluster, info: &ImageInfo) -> Result<Option<String>, Problem> {
    let record: Option<ImageRecord> = cluster.records.read(&image_key(&info.name)).await?;
    Ok(match record {
        None if may_be_foreign(&info.name) => Some("no record has this name".to_owned()),
        Some(ImageRecord { layer: Some(layer), .. }) if layer != info.layer => {
            Some("the image of this name is another one".to_owned())
        }
        _ => None,
    })
}

/// Makes an image known that a host has and no record names.
///
/// # Errors
/// `Conflict` if there is one with this name.
pub async fn adopt(
    cluster: &Cluster,
    name: &ImageName,
    host: &HostId,
) -> Result<ClusterImage, Problem> {
    let link = reachable(cluster, host)?;
    let info: ImageInfo = link.volume.get(&format!("/v1/images/{name}")).await?;
    let record = ImageRecord {
        layer: Some(info.layer),
        size_bytes: Some(info.size_bytes),
        made_at: Some(host.clone()),
        leave_site: info.leave_site,
        ..ImageRecord::new(name.clone())
    };
    if info.name != *name || !cluster.records.create(&image_key(name), &record).await? {
        let what = format!("can't adopt image {name} of host {host}");
        return Err(Problem::conflict(what, "there is an image with this name")
            .next(format!("delete that one first: perigee image delete {name}")));
    }
    image(cluster, name).await
}

/// The problem of an image that no answering host has. A host that does not answer may have it.
fn not_shown(name: &ImageName, silent: &[HostId]) -> Problem {
    if silent.is_empty() {
        return no_image(name);
    }
    let why = format!("no host that answers has it, and {} does not answer", in_words(silent));
    Problem::unavailable(format!("image {name}"), why)
        .next("bring the host back, or see `perigee host list` and `perigee image list`")
}

fn being_imported(name: &ImageName, host: &HostId) -> Problem {
    Problem::unavailable(format!("image {name}"), format!("it is being imported at {host}"))
        .next("wait until `perigee image list` shows it")
}

fn in_words(hosts: &[HostId]) -> String {
    let hosts: Vec<&str> = hosts.iter().map(HostId::as_str).collect();
    format!("host {}", hosts.join(", "))
}

/// All images, each with the hosts that have the layer of that name. Those of jobs' inputs only if they are asked for.
pub async fn list(cluster: &Cluster, with_inputs: bool) -> Result<Vec<ClusterImage>, Problem> {
    let mut all = images(cluster).await?;
    if !with_inputs {
        let records = cluster.records.list::<ImageRecord>("images/").await?;
        let of_inputs: BTreeSet<ImageName> =
            records.into_iter().filter(|r| r.inputs.is_some()).map(|r| r.name).collect();
        all.retain(|image| !of_inputs.contains(&image.name));
    }
    Ok(all)
}

async fn images(cluster: &Cluster) -> Result<Vec<ClusterImage>, Problem> {
    let records = cluster.records.list::<ImageRecord>("images/").await?;
    let shared = records.iter().filter(|record| record.shared).map(|record| record.name.clone());
    let shared: BTreeSet<ImageName> = shared.collect();
    let known: BTreeMap<ImageName, ImageRecord> =
        records.iter().map(|record| (record.name.clone(), record.clone())).collect();
    let mut layers: BTreeMap<ImageName, LayerId> =
        records.into_iter().filter_map(|record| Some((record.name, record.layer?))).collect();
    let mut images: BTreeMap<ImageName, ClusterImage> = BTreeMap::new();
    let mut strange = BTreeSet::new();
    for Found { host, info } in found(cluster).await {
        if may_be_foreign(&info.name) && !known.contains_key(&info.name) {
            strange.insert((host, info.name));
            continue;
        }
        if *layers.entry(info.name.clone()).or_insert(info.layer) != info.layer {
            strange.insert((host, info.name));
            continue;
        }
        let image = images.entry(info.name.clone()).or_insert_with(|| view(&info));
        image.shared = shared.contains(&info.name);
        if contents::is_bad(known.get(&info.name), &info) {
            continue;
        }
        image.hosts.push(host);
        image.missing_bytes += missing_bytes(&info);
    }
    cluster.strange_images.log_new(strange);
    Ok(images.into_values().collect())
}

/// One image, as in [`images`].
///
/// # Errors
/// `NotFound` if there is no such image.
pub async fn image(cluster: &Cluster, name: &ImageName) -> Result<ClusterImage, Problem> {
    images(cluster).await?.into_iter().find(|i| i.name == *name).ok_or_else(|| no_image(name))
}

fn no_image(name: &ImageName) -> Problem {
    Problem::not_found(format!("image {name}"), "no host that is up has an image with this name")
        .next("`perigee image list` shows the images, `perigee image import` makes one")
}

fn view(info: &ImageInfo) -> ClusterImage {
    ClusterImage {
        name: info.name.clone(),
        size_bytes: info.size_bytes,
        allocated_bytes: info.allocated_bytes,
        hosts: Vec::new(),
        missing_bytes: 0,
        leave_site: info.leave_site,
        shared: false,
        note: String::new(),
    }
}

fn missing_bytes(info: &ImageInfo) -> u64 {
    info.remote.as_ref().map_or(0, |remote| remote.missing_bytes)
}

/// Records a name for one layer. The name stays taken until the image is deleted.
///
/// # Errors
/// `Conflict` if it is taken, also by an import that is running.
async fn take_name(cluster: &Cluster, what: &str, record: &ImageRecord) -> Result<(), Problem> {
    let name = &record.name;
    let at: Vec<String> = found(cluster)
        .await
        .into_iter()
        .filter(|found| found.info.name == *name)
        .map(|found| found.host.to_string())
        .collect();
    // What a host shows as an image of inputs without a record may be anything, and takes the name from nobody.
    if !at.is_empty() && record.inputs.is_none() {
        let why = format!("there is an image with this name at {}", at.join(", "));
        return Err(Problem::conflict(what, why).next("choose another name, or delete it first"));
    }
    if !cluster.records.create_asked(&image_key(name), record).await? {
        let why = "an image of a host that does not answer has the name, or one that is being made";
        return Err(Problem::conflict(what, why)
            .next(format!("choose another name, or free it: `perigee image delete {name}`")));
    }
    Ok(())
}

/// Whether the request that is carried out has taken the name of a snapshot before, and was broken off before the image was known: it goes on now.
async fn has_taken(cluster: &Cluster, name: &ImageName) -> Result<bool, Problem> {
    let key = image_key(name);
    if !asked::has_made(&key) {
        return Ok(false);
    }
    let record: Option<ImageRecord> = cluster.records.read(&key).await?;
    Ok(record.is_some_and(|record| record.layer.is_none() && record.import.is_none()))
}

/// Whether a host may not say that it has this image: it may have been broken into, and would give the image to a tenant.
/// What an operator makes at a host without the controller is an image of the tenant `default`.
fn may_be_foreign(name: &ImageName) -> bool {
    !TenantName::default().owns(name.as_str())
}

/// The layer of a name. If the image was made at a host without the controller, it is recorded now.
pub async fn layer_of(cluster: &Cluster, name: &ImageName) -> Result<LayerId, Problem> {
    if let Some(ImageRecord { layer: Some(layer), .. }) =
        cluster.records.read(&image_key(name)).await?
    {
        return Ok(layer);
    }
    if may_be_foreign(name)
        && cluster.records.read::<ImageRecord>(&image_key(name)).await?.is_none()
    {
        return Err(no_image(name));
    }
    let (mut found, silent) = look(cluster).await;
    found.retain(|found| found.info.name == *name);
    let Some(first) = found.first() else { return Err(not_shown(name, &silent)) };
    let layer = first.info.layer;
    if let Some(other) = found.iter().find(|other| other.info.layer != layer) {
        let why = format!("{} and {} have different images with this name", first.host, other.host);
        return Err(Problem::conflict(format!("image {name}"), why)
            .next("delete the wrong one at its host, with `perigee image delete --pool`"));
    }
    bind(cluster, name, &first.info, None).await?;
    Ok(layer)
}

/// Records which layer an image's name means.
///
/// # Errors
/// `Conflict` if the name means another one.
pub(crate) async fn bind(
    cluster: &Cluster,
    name: &ImageName,
    shown: &ImageInfo,
    made_at: Option<&HostId>,
) -> Result<(), Problem> {
    let record = |old: Option<ImageRecord>| {
        let old = old.unwrap_or_else(|| ImageRecord::new(name.clone()));
        let layer = Some(old.layer.unwrap_or(shown.layer));
        let made_at = old.made_at.clone().or_else(|| made_at.cloned());
        // With the same write: whoever uses the image from then on finds it confined.
        let is_confined = layer == Some(shown.layer) && shown.leave_site.is_never();
        let leave_site = if is_confined { shown.leave_site } else { old.leave_site };
        let size_bytes = Some(shown.size_bytes);
        ImageRecord { layer, import: None, size_bytes, made_at, leave_site, ..old }
    };
    let kept = cluster.records.update(&image_key(name), record).await?;
    if kept.layer == Some(shown.layer) {
        return Ok(());
    }
    Err(Problem::conflict(
        format!("image {name}"),
        "the name was taken by another layer in the meantime",
    ))
}

/// The export of an image for other hosts: nobody who was not told its layer's id can guess it.
pub fn by_layer(layer: LayerId) -> String {
    format!("layer:{layer}")
}

/// If the host has a copy already, the copy gets what it still lacks from this source from now on.
async fn copy(
    cluster: &Cluster,
    from: &HostLink,
    to: &HostLink,
    name: &ImageName,
    layer: LayerId,
) -> Result<ImageInfo, Problem> {
    tracing::info!("copy image {name} from {} to {}", from.id, to.id);
    ask_for_copy(cluster, from, to, name, layer).await
}

async fn ask_for_copy(
    cluster: &Cluster,
    from: &HostLink,
    to: &HostLink,
    name: &ImageName,
    layer: LayerId,
) -> Result<ImageInfo, Problem> {
    let record = cluster.records.read::<ImageRecord>(&image_key(name)).await?;
    let ask = CopyImage {
        content: record.filter(|known| known.layer == Some(layer)).and_then(|known| known.content),
        nbd_addr: from.addresses.nbd_addr.clone(),
        export: Some(by_layer(layer)),
        keep: Keep::All,
        layer: Some(layer),
    };
    to.volume.post(&format!("/v1/images/{name}/copy"), &ask).await
}

/// A host that has all of an image: the preferred one, or else the one that has made the image. Another one only if that one has not all of it, or does not answer
/// and `may_be_any` is said.
///
/// # Errors
/// `NotFound` if there is no such image; `Unavailable` if such a host does not answer.
pub async fn whole_at(
    cluster: &Cluster,
    name: &ImageName,
    preferred: Option<&HostId>,
    may_be_any: bool,
) -> Result<Arc<HostLink>, Problem> {
    let layer = layer_of(cluster, name).await?;
    let record: Option<ImageRecord> = cluster.records.read(&image_key(name)).await?;
    if let Some(import) = record.as_ref().and_then(|record| record.import.as_ref()) {
        return Err(being_imported(name, &import.host));
    }
    let first = preferred.or(record.as_ref().and_then(|record| record.made_at.as_ref()));
    let (mut found, silent) = look(cluster).await;
    if let Some(first) = first.filter(|first| !may_be_any && silent.contains(first)) {
        let why = format!("{} does not answer", in_words(slice::from_ref(first)));
        return Err(Problem::unavailable(format!("image {name}"), why)
            .next("bring the host back, or see `perigee host list`"));
    }
    found.retain(|found| {
        let Found { info, .. } = found;
        let is_it = info.name == *name && info.layer == layer && info.remote.is_none();
        is_it && !contents::is_bad(record.as_ref(), info)
    });
    found.sort_by_key(|found| (Some(&found.host) != first, found.host.clone()));
    let Some(best) = found.first() else {
        let why = "no host that answers has all of it";
        return Err(Problem::unavailable(format!("image {name}"), why)
            .next("bring its hosts back, or see `perigee image list`"));
    };
    reachable(cluster, &best.host)
}

/// An image that is being made of this backup.
///
/// # Errors
/// If the store can't be read.
pub async fn made_of(cluster: &Cluster, backup: &BackupName) -> Result<Option<ImageName>, Problem> {
    let records = cluster.records.list::<ImageRecord>("images/").await?;
    let is_of =
        |import: &PendingImport| import.backup.as_ref().is_some_and(|of| of.backup == *backup);
    let mut made = records.into_iter().filter(|record| record.import.as_ref().is_some_and(is_of));
    Ok(made.next().map(|record| record.name))
}

/// Makes sure that each host of a site that is up has a copy, which gets its blocks in the background.
///
/// # Errors
/// `Unavailable` if no host of the site is up; as [`ensure()`].
pub async fn replicate(
    cluster: &Cluster,
    name: &ImageName,
    to: &SiteId,
) -> Result<ClusterImage, Problem> {
    let up = cluster.hosts.up();
    let hosts: Vec<_> = up.iter().filter(|host| host.addresses.site == *to).collect();
    if hosts.is_empty() {
        let what = format!("can't copy image {name} to site {to}");
        return Err(Problem::unavailable(what, "no host of that site is up")
            .next("see `perigee host list`"));
    }
    for host in hosts {
        ensure(cluster, host, name).await?;
    }
    image(cluster, name).await
}

/// Deletes an image from all hosts. Then its name is free. What stands on it goes on: each host merges the image's layer
/// into that as soon as only one chain needs it.
///
/// # Errors
/// `Conflict` if somebody needs it by its name, or another host for what is not complete. `Unavailable` while a host does
/// not answer, because a copy that remains there would conflict with the next image of the name.
pub async fn delete(cluster: &Cluster, name: &ImageName) -> Result<DeletedImage, Problem> {
    let what = format!("can't delete image {name}");
    for record in cluster.unfinished_jobs() {
        if record.inputs.as_ref().is_some_and(|inputs| inputs.image == *name) {
            let why = format!("{} has it as its inputs", record.in_words());
            return Err(Problem::conflict(what, why).next("wait for its end, or end it"));
        }
        // A VM without a job that has its root disk needs its image no more.
        let has_root =
            record.kind.persistent_vm().is_some_and(|persistent| persistent.has(DiskRole::Root));
        if record.job.spec.image == *name && !has_root {
            let why = format!("{} starts from it", record.in_words());
            return Err(Problem::conflict(what, why).next("wait for its end, or end it"));
        }
    }
    let _importing = end_import(cluster, name).await?;
    let record = cluster.records.read::<ImageRecord>(&image_key(name)).await?;
    let is_taken = record.is_some();
    let (mut found, silent) = look(cluster).await;
    found.retain(|found| found.info.name == *name);
    if found.is_empty() && !is_taken {
        return Err(not_shown(name, &silent));
    }
    if !silent.is_empty() {
        let why = format!("{} does not answer and may have a copy", in_words(&silent));
        return Err(Problem::unavailable(what, why)
            .next("bring the host back, or `perigee host remove` it if it is gone for good"));
    }
    for found in &found {
        let host = reachable(cluster, &found.host)?;
        left_behind::drop_on(cluster, &host, found.info.layer).await?;
    }
    check_not_read(cluster, &what, &found).await?;
    // A copy that is not complete, and has something on it, is not deleted. It comes first: then no copy has been deleted yet.
    found.sort_by_key(|found| {
        std::cmp::Reverse((missing_bytes(&found.info) > 0, found.info.children))
    });
    let mut hosts: Vec<HostId> = found.into_iter().map(|found| found.host).collect();
    if let Some(import) = record.and_then(|record| record.import)
        && cluster.hosts.get(&import.host).is_ok()
        && !hosts.contains(&import.host)
    {
        // It may not have ended its part of the import yet.
        hosts.push(import.host);
    }
    let mut on_it = BTreeSet::new();
    for host in hosts {
        let host = reachable(cluster, &host)?;
        match host.volume.delete_answered::<DeletedImage>(&format!("/v1/images/{name}")).await {
            Err(problem) if problem.kind != ProblemKind::NotFound => return Err(problem),
            Err(_) => {}
            Ok(deleted) => on_it.extend(deleted.stands_on_it),
        }
    }
    cluster.records.remove(&image_key(name)).await?;
    Ok(DeletedImage { stands_on_it: on_it.into_iter().collect() })
}

/// Refuses while a volume of another host reads the image's layer from there and keeps nothing: it would lose what it reads.
async fn check_not_read(cluster: &Cluster, what: &str, found: &[Found]) -> Result<(), Problem> {
    let layers: BTreeSet<LayerId> = found.iter().map(|found| found.info.layer).collect();
    let find = FindLayers { layers: layers.into_iter().collect(), volume: None };
    for host in cluster.hosts.up() {
        let read: FoundLayers = host.volume.post("/v1/layers/find", &find).await?;
        if !read.readers.is_empty() {
            let why =
                format!("{} at {} reads it from another host", read.readers.join(", "), host.id);
            return Err(Problem::conflict(what, why).next("delete that first"));
        }
    }
    Ok(())
}

/// Lets every tenant use an image, or ends that.
///
/// # Errors
/// `Invalid` for an image of another tenant than `default`.
pub async fn share(
    cluster: &Cluster,
    name: &ImageName,
    shared: bool,
) -> Result<ClusterImage, Problem> {
    if !TenantName::default().owns(name.as_str()) {
        let why = "only images of the tenant default can be shared";
        return Err(Problem::invalid(format!("can't share image {name}"), why)
            .next("import it again under a name without a tenant"));
    }
    layer_of(cluster, name).await?;
    let record = |old: Option<ImageRecord>| ImageRecord {
        shared,
        ..old.unwrap_or_else(|| ImageRecord::new(name.clone()))
    };
    cluster.records.update(&image_key(name), record).await?;
    image(cluster, name).await
}

/// Seals the current content of a volume under a name, at the volume's home.
pub async fn snapshot(
    cluster: &Cluster,
    volume: &VolumeName,
    ask: &Snapshot,
) -> Result<ClusterImage, Problem> {
    let what = format!("can't snapshot volume {volume} as {}", ask.image);
    backups::check_whole(cluster, what, volume).await?;
    let home = reachable(cluster, &volumes::settled_home(cluster, volume).await?)?;
    let size_bytes = volumes::limited_size(cluster, ask.image.as_str(), volume).await?;
    seal(cluster, &home, volume, size_bytes, ask).await
}

/// The same of a VM's disk, at the home that the VM's record names.
///
/// # Errors
/// `Unavailable` while the disk moves to another home; `Conflict` while bytes of it are still to come from a backup; as [`take_name`], or if the quota has no room.
pub async fn snapshot_disk(
    cluster: &Cluster,
    disk: &PlacedDisk,
    ask: &Snapshot,
) -> Result<ClusterImage, Problem> {
    let what = || format!("can't snapshot volume {} as {}", disk.volume, ask.image);
    if cluster.index.is_changing_home(&disk.volume) {
        let why = format!("volume {} is moving to another home", disk.volume);
        return Err(Problem::unavailable(what(), why).next("try again in some seconds"));
    }
    backups::check_whole(cluster, what(), &disk.volume).await?;
    let home = reachable(cluster, &disk.home)?;
    let info: VolumeInfo = home.volume.get(&format!("/v1/volumes/{}", disk.volume)).await?;
    seal(cluster, &home, &disk.volume, info.size_bytes, ask).await
}

async fn seal(
    cluster: &Cluster,
    home: &HostLink,
    volume: &VolumeName,
    size_bytes: u64,
    ask: &Snapshot,
) -> Result<ClusterImage, Problem> {
    let what = format!("can't snapshot volume {volume} as {}", ask.image);
    let _room = accounts::hold_volume(cluster, ask.image.as_str(), size_bytes).await?;
    let record = ImageRecord::new(ask.image.clone());
    let is_again = has_taken(cluster, &ask.image).await?;
    if !is_again {
        take_name(cluster, &what, &record).await?;
    }
    let path = format!("/v1/volumes/{volume}/snapshot");
    let made = match home.volume_slow.post::<ImageInfo>(&path, ask).await {
        // The request of before has come to its end there. Nobody else makes an image with this name.
        Err(problem) if is_again && problem.kind == ProblemKind::Conflict => {
            let found = home.volume.get::<ImageInfo>(&format!("/v1/images/{}", ask.image)).await;
            found.map_err(|_| problem)
        }
        made => made,
    };
    match made {
        Ok(info) => {
            bind(cluster, &ask.image, &info, Some(&home.id)).await?;
            Ok(ClusterImage { hosts: vec![home.id.clone()], ..view(&info) })
        }
        Err(problem) => {
            if problem.kind != ProblemKind::Unavailable {
                cluster.records.remove(&image_key(&ask.image)).await?;
            }
            Err(problem)
        }
    }
}
