//! Imports, and restores of backups. One is recorded until its host has reported the result. If the answer is lost, the import is requested
//! again with the same layer, so the image is made only once.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _, stream};
use perigee_http::Method;
use perigee_model::backup::RestoreImage;
use perigee_model::job::{ClusterImage, HostState, NewImage};
use perigee_model::volume::{ImageInfo, ImportImage, TREE_PREFIX, Upload};
use perigee_model::{HostId, ImageName, LayerId, Problem, ProblemKind, TenantName};
use serde::Serialize;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{copy, image, take_name};
use crate::accounts::{self, UploadRoom};
use crate::clock::now_ms;
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, Hold, HostLink};
use crate::records::{
    ImageRecord, ImportedBackup, PendingImport, UPLOAD_KEPT_MS, UPLOADS, UploadRecord, image_key,
};
use crate::storage::backups;
use crate::storage::volumes::{reachable, roomiest};

/// So much of a refused upload is read, for so long.
const DRAIN_BYTES_MAX: usize = 64 << 20;
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// How long a deletion waits for the end of an import.
const END_DEADLINE: Duration = Duration::from_secs(30);
const END_AGAIN: Duration = Duration::from_millis(50);

/// Imports an image at one host. The other hosts that are up get copies, which can be used at once.
pub async fn import(cluster: &Cluster, new: NewImage) -> Result<ClusterImage, Problem> {
    let first = match &new.host {
        Some(host) => reachable(cluster, host)?,
        None => roomiest(cluster).await?,
    };
    let what = format!("can't import image {}", new.name);
    let (host, source, format) = (first.id.clone(), new.source, new.format);
    let import = PendingImport { host, source, format, backup: None };
    let record = ImageRecord { leave_site: new.leave_site, ..ImageRecord::new(new.name) };
    make(cluster, &what, record, (&first, import), || ()).await
}

/// Makes an image of a backup at this host, of the size that the backup says. The other hosts that are up get copies, which can be used at once. The caller holds the room for the image, which
/// `taken` gives back, because from then on the record counts.
///
/// # Errors
/// `Conflict` if the name is taken, or the backup damaged; `NoSpace`; what the host says. Then there is no image.
pub async fn restore(
    cluster: &Cluster,
    what: &str,
    name: ImageName,
    (of, size_bytes): (ImportedBackup, u64),
    host: &HostLink,
    taken: impl FnOnce(),
) -> Result<ClusterImage, Problem> {
    let (source, format, backup) = (String::new(), None, Some(of));
    let import = PendingImport { host: host.id.clone(), source, format, backup };
    let record = ImageRecord { size_bytes: Some(size_bytes), ..ImageRecord::new(name) };
    make(cluster, what, record, (host, import), taken).await
}

/// Makes an image in this way, on a new layer.
async fn make(
    cluster: &Cluster,
    what: &str,
    record: ImageRecord,
    (host, import): (&HostLink, PendingImport),
    taken: impl FnOnce(),
) -> Result<ClusterImage, Problem> {
    let name = record.name.clone();
    let Some(_importing) = cluster.index.begin_import(&name) else {
        return Err(Problem::conflict(what, "an import with this name is running")
            .next("wait for it; `perigee image list` shows its result"));
    };
    let layer = Some(LayerId(Uuid::new_v4()));
    let record = ImageRecord { layer, import: Some(import), ..record };
    take_name(cluster, what, &record).await?;
    taken();
    let note = finish_import(cluster, host, record).await?;
    Ok(ClusterImage { note, ..image(cluster, &name).await? })
}

/// Makes an image of inputs at one host, of a tree that `send` sends there. Its name is taken before: if the controller
/// ends meanwhile, the host is asked for the image when it starts again, and the name is free if the tree did not arrive.
/// Whoever calls this holds the import (`begin_import`) and the room for it, which `taken` gives back, because from then
/// on the record counts. Other hosts get copies when they need them.
///
/// # Errors
/// `Conflict` if the name is taken; what `send` and the host say.
pub async fn import_inputs(
    cluster: &Cluster,
    host: &HostLink,
    record: ImageRecord,
    taken: impl FnOnce(),
    send: impl Future<Output = Result<(), Problem>>,
) -> Result<(), Problem> {
    let what = format!("can't make the image {} of inputs", record.name);
    take_name(cluster, &what, &record).await?;
    taken();
    if let Err(problem) = send.await {
        cluster.records.remove(&image_key(&record.name)).await?;
        return Err(problem);
    }
    finish_import(cluster, host, record).await.map(drop)
}

/// Requests the image from its host until the result is known. The layer is in the record, so the image is made
/// only once. If the import fails, the name is free again. Returns what the host says to the image's user.
async fn finish_import(
    cluster: &Cluster,
    host: &HostLink,
    record: ImageRecord,
) -> Result<String, Problem> {
    let (Some(layer), Some(import)) = (record.layer, &record.import) else {
        return Ok(String::new());
    };
    let (name, key) = (record.name.clone(), image_key(&record.name));
    let answer = match &import.backup {
        Some(of) => request_restore(cluster, host, &name, layer, of).await?,
        None => {
            let (source, format) = (import.source.clone(), import.format);
            let (layer, leave_site) = (Some(layer), record.leave_site);
            let ask = ImportImage { name: name.clone(), source, format, layer, leave_site };
            request_import(cluster, host, &ask).await?
        }
    };
    if import.backup.is_none() {
        // The host has said how it ended, and has removed the file.
        cluster.records.remove(&UploadRecord::key(&host.id, &import.source)).await?;
    }
    let info = match answer {
        Ok(info) => info,
        Err(problem) => {
            cluster.records.remove(&key).await?;
            return Err(problem);
        }
    };
    let is_of_inputs = record.inputs.is_some();
    // A backup says how large its image is, and the record has counted since.
    let is_counted = record.size_bytes.is_some_and(|counted| info.size_bytes <= counted);
    let made_at = Some(host.id.clone());
    // A backup says whether its image may leave its site.
    let leave_site = if info.leave_site.is_never() { info.leave_site } else { record.leave_site };
    let known = ImageRecord { import: None, made_at, leave_site, content: info.content, ..record };
    if is_of_inputs {
        // Room for its files was taken before. The disk has more, which is empty.
        return cluster.records.put(&key, &known).await.map(|()| info.note);
    }
    let _room = match is_counted {
        true => None,
        false => Some(room_for(cluster, host, &name, info.size_bytes).await?),
    };
    let known = ImageRecord { size_bytes: Some(info.size_bytes), ..known };
    cluster.records.put(&key, &known).await?;
    copy_to_others(cluster, host, &known, layer).await;
    Ok(info.note)
}

/// How the import has ended at the host: with the image, or with the host's problem. The host ends an import whose client leaves.
///
/// # Errors
/// `Unavailable` if the answer was lost, and `Conflict` if the image is deleted meanwhile.
async fn request_import(
    cluster: &Cluster,
    host: &HostLink,
    ask: &ImportImage,
) -> Result<Result<ImageInfo, Problem>, Problem> {
    let asked = request(cluster, host, &ask.name, "/v1/images", ask).await;
    if let (Err(problem), Some(tree)) = (&asked, ask.source.strip_prefix(TREE_PREFIX))
        && problem.kind == ProblemKind::Conflict
    {
        // No image will be made of it. If the host does not answer, it goes by itself after an hour.
        drop(host.volume.delete(&format!("/v1/trees/{tree}")).await);
    }
    asked
}

/// The same of a restore. Meanwhile the backup is not deleted.
async fn request_restore(
    cluster: &Cluster,
    host: &HostLink,
    name: &ImageName,
    layer: LayerId,
    of: &ImportedBackup,
) -> Result<Result<ImageInfo, Problem>, Problem> {
    let _reading = backups::begin_reading(&of.backup);
    let (key, encrypted) = backups::encryption(cluster, &of.backup).await?;
    let (backup, from) = (of.backup.clone(), of.from.clone());
    let ask = RestoreImage { backup, from, layer, key, encrypted };
    request(cluster, host, name, &format!("/v1/images/{name}/restore"), &ask).await
}

async fn request(
    cluster: &Cluster,
    host: &HostLink,
    name: &ImageName,
    path: &str,
    ask: &(impl Serialize + Sync),
) -> Result<Result<ImageInfo, Problem>, Problem> {
    let mut cancelled = cluster.cancelled_imports.subscribe();
    tokio::select! {
        answer = host.volume.hear_long(path, ask, |_| {}) => match answer {
            Err(problem) if problem.kind == ProblemKind::Unavailable => {
                Err(problem.next(format!(
                    "the import continues when host {} answers, and `perigee image list` shows it then; to \
                     give it up: perigee image delete {name}",
                    host.id
                )))
            }
            Err(problem) => Ok(Err(problem)),
            Ok(ended) => Ok(ended),
        },
        // Whoever deletes the image removes the record as well.
        () = is_cancelled(&mut cancelled, name) => {
            let why = "the image was deleted before its import had ended";
            Err(Problem::conflict(format!("can't import image {name}"), why))
        }
    }
}

/// Gives copies of a new image to the other hosts that are up, as far as its policy allows that.
async fn copy_to_others(cluster: &Cluster, from: &HostLink, image: &ImageRecord, layer: LayerId) {
    let gets_copy = |other: &HostLink| {
        let is_near = other.addresses.site == from.addresses.site;
        other.id != from.id && (is_near || !image.leave_site.is_never())
    };
    let name = &image.name;
    for other in cluster.hosts.up().iter().filter(|other| gets_copy(other)) {
        if let Err(problem) = copy(cluster, from, other, name, layer).await {
            // It gets its copy when it first needs one.
            tracing::warn!("host {} has no copy of image {name} yet: {problem}", other.id);
        }
    }
}

/// Takes room in the tenant's quota for an image that was just made. Its size was not known before.
///
/// # Errors
/// `NoSpace` if there is no such room. Then the image is deleted again.
async fn room_for<'a>(
    cluster: &'a Cluster,
    host: &HostLink,
    name: &ImageName,
    size_bytes: u64,
) -> Result<accounts::QuotaHold<'a>, Problem> {
    let refused = match accounts::hold_volume(cluster, name.as_str(), size_bytes).await {
        Err(problem) if problem.kind == ProblemKind::NoSpace => problem,
        room => return room,
    };
    match host.volume.delete(&format!("/v1/images/{name}")).await {
        // Its record stays, so that the image can be deleted.
        Err(problem) if problem.kind != ProblemKind::NotFound => {
            tracing::warn!(
                "can't delete image {name} at {}, which is over a quota: {problem}",
                host.id
            );
        }
        _ => cluster.records.remove(&image_key(name)).await?,
    }
    Err(refused)
}

/// Passes a file on to the host that is to make an image of it. Nothing of it is kept here. It counts for the tenant's quota
/// while it comes, and until an image is made of it or its host removes it.
///
/// # Errors
/// `NoSpace` beyond the quota; what the host says.
pub async fn upload(
    cluster: &Arc<Cluster>,
    tenant: &TenantName,
    host: Option<&HostId>,
    body: perigee_http::Body,
) -> Result<Upload, Problem> {
    let to = match host {
        Some(host) => reachable(cluster, host)?,
        None => roomiest(cluster).await?,
    };
    let room = Arc::new(UploadRoom::new(Arc::clone(cluster), tenant.to_string()));
    let parts = Arc::new(tokio::sync::Mutex::new(body.into_data_stream()));
    let begun = (Arc::clone(&parts), Arc::clone(&room));
    let counted = stream::try_unfold(begun, async |(parts, room)| {
        let next = parts.lock().await.next().await.transpose().map_err(io::Error::other)?;
        let Some(part) = next else { return Ok(None) };
        room.add(part.len() as u64).await.map_err(io::Error::other)?;
        Ok::<_, io::Error>(Some((part, (parts, room))))
    });
    let body = perigee_http::Body::from_stream(counted);
    let path = format!("/v1/uploads?tenant={tenant}");
    let sent = to.volume.send_body::<Upload>(Method::POST, &path, body).await;
    if let Some(problem) = room.refused() {
        room.give_back();
        drain(&parts, DRAIN_MAX).await;
        return Err(problem);
    }
    let stored = sent?;
    if room.counts() {
        forget_old_uploads(cluster).await?;
        let record = UploadRecord {
            host: to.id.clone(),
            source: stored.source.clone(),
            tenant: tenant.to_string(),
            bytes: stored.bytes,
            since_ms: now_ms(),
        };
        let key = UploadRecord::key(&record.host, &record.source);
        // Only if the controller ends before this does it count for nobody, until its host removes it after an hour.
        room.recorded(cluster.records.put(&key, &record)).await?;
    }
    Ok(Upload { host: Some(to.id.clone()), ..stored })
}

/// Many clients read the answer only after they have sent everything.
async fn drain<T: AsRef<[u8]>, E>(
    parts: &tokio::sync::Mutex<impl Stream<Item = Result<T, E>> + Unpin>,
    longest: Duration,
) {
    let read = async {
        let mut left = DRAIN_BYTES_MAX;
        let mut parts = parts.lock().await;
        while let Some(Ok(part)) = parts.next().await
            && left > 0
        {
            left = left.saturating_sub(part.as_ref().len());
        }
    };
    // Who sends slowly gets the answer before.
    let _late = tokio::time::timeout(longest, read).await;
}

/// Uploads that their hosts have removed because no image was made of them.
async fn forget_old_uploads(cluster: &Cluster) -> Result<(), Problem> {
    for old in cluster.records.list::<UploadRecord>(UPLOADS).await? {
        if cluster.clock.age_ms(old.since_ms) >= UPLOAD_KEPT_MS {
            cluster.records.remove(&UploadRecord::key(&old.host, &old.source)).await?;
        }
    }
    Ok(())
}

async fn is_cancelled(cancelled: &mut broadcast::Receiver<ImageName>, name: &ImageName) {
    loop {
        match cancelled.recv().await {
            Ok(other) if other != *name => {}
            // Whoever cancels says it again and again.
            Err(RecvError::Lagged(_)) => {}
            Ok(_) => return,
            Err(RecvError::Closed) => return std::future::pending().await,
        }
    }
}

/// Ends an import that is under way here, and keeps others from beginning.
pub(super) async fn end_import<'a>(
    cluster: &'a Cluster,
    name: &ImageName,
) -> Result<Hold<'a>, Problem> {
    let begun = Instant::now();
    loop {
        if let Some(hold) = cluster.index.begin_import(name) {
            return Ok(hold);
        }
        if begun.elapsed() > END_DEADLINE {
            let why = format!(
                "its import, or another deletion of it, has not ended within {} s",
                END_DEADLINE.as_secs()
            );
            return Err(
                Problem::unavailable(format!("can't delete image {name}"), why).next("try again")
            );
        }
        // Nobody hears it where another deletion is under way.
        let _ = cluster.cancelled_imports.send(name.clone());
        tokio::time::sleep(END_AGAIN).await;
    }
}

/// Continues imports whose answers were lost. This runs until the controller ends.
pub async fn finish_imports(cluster: Arc<Cluster>, task: Task) {
    // An import may take hours; the others do not wait for it.
    let mut running = JoinSet::new();
    loop {
        let look = async {
            let records = cluster.records.list::<ImageRecord>("images/").await?;
            let imports: Vec<ImageRecord> =
                records.into_iter().filter(|record| record.import.is_some()).collect();
            let count = imports.len();
            for record in imports {
                let cluster = Arc::clone(&cluster);
                running.spawn(async move { finish_lost_import(&cluster, record.name).await });
            }
            Ok(format!("{count} imports are under way"))
        };
        task.round(look).await;
        tokio::time::sleep(cluster.timing.monitor).await;
        while running.try_join_next().is_some() {}
    }
}

async fn finish_lost_import(cluster: &Cluster, name: ImageName) {
    // Another task is finishing this import.
    let Some(_importing) = cluster.index.begin_import(&name) else { return };
    let finished = async {
        let key = image_key(&name);
        let record = cluster.records.read::<ImageRecord>(&key).await?;
        let pending = record.and_then(|record| Some((record.import.clone()?.host, record)));
        let Some((host, record)) = pending else { return Ok(()) };
        match cluster.hosts.get(&host) {
            Ok(link) if cluster.hosts.state(&host) == HostState::Up => {
                let note = finish_import(cluster, &link, record).await?;
                if !note.is_empty() {
                    tracing::info!("image {name}: {note}");
                }
                Ok(())
            }
            Ok(_) => Ok(()),
            // The host was removed, and the image with it.
            Err(_) => cluster.records.remove(&key).await,
        }
    };
    if let Err(problem) = finished.await {
        tracing::warn!("image {name}: {problem}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_sends_slowly_is_told_of_a_refusal_before_everything_is_read() {
        let part = stream::iter([Ok::<_, io::Error>(vec![0_u8; 1024])]);
        let parts = tokio::sync::Mutex::new(part.chain(stream::pending()));
        drain(&parts, Duration::from_millis(10)).await;
        assert!(parts.try_lock().is_ok(), "nobody reads any more");
    }
}
