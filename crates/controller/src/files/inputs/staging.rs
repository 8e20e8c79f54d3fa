//! The image of a job's inputs at the job's host.
//!
//! The image's name is the hash of what is in it. So it is made once in the cluster, and every other host copies it. It
//! is made of a tar that streams from the repository to the volume server of the host, which unpacks it and makes a
//! filesystem. What breaks off is begun anew: nothing of it counts before the image is there. The name is taken before
//! anything is sent, so that nothing is sent twice.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{Stream, stream};
use perigee_http::{Body, Method};
use perigee_model::job::JobSpec;
use perigee_model::volume::{TREE_PREFIX, Upload};
use perigee_model::{ImageName, LayerId, Problem, ProblemKind, TenantName};
use perigee_repository::{Reading, View};
use uuid::Uuid;

use super::manifest::{Entry, Manifest};
use super::{WHAT, resolve, view};
use crate::accounts;
use crate::clock::now_ms;
use crate::cluster::paces::Way;
use crate::cluster::{Cluster, HostLink};
use crate::files::pace::{paced, while_kept};
use crate::guest::tars::{end, padding};
use crate::records::{ImageRecord, InputsImage, JobInputs, PendingImport, image_key};
use crate::storage::images;
use crate::storage::images::NoCopy;

const PIECE_BYTES: usize = 256 << 10;
/// How far it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Staged {
    /// The host can use the image.
    Ready,
    /// It waits for others: why, in words.
    Waits(String),
}

/// Looks what the inputs of a job are now, and makes sure that the host can use their image. `found` is told which image it is
/// before anything is made, so that nobody removes it meanwhile.
///
/// # Errors
/// `Invalid` or `NotFound` if an input is not there any more. All else can be tried again.
pub async fn ensure(
    cluster: &Cluster,
    at: &HostLink,
    spec: &JobSpec,
    known: Option<&JobInputs>,
    found: impl AsyncFnOnce(JobInputs) -> Result<(), Problem>,
) -> Result<Staged, Problem> {
    let Some(sha256) = &spec.inputs else { return Ok(Staged::Ready) };
    // The list is not read again while others are at work.
    if let Some(why) = known.and_then(|inputs| cluster.staging.waits(&at.id, &inputs.image)) {
        return Ok(Staged::Waits(why));
    }
    let tenant = TenantName::of(&spec.name);
    let (manifest, inputs) = resolve(cluster, &tenant, sha256).await?;
    found(inputs.clone()).await?;
    let view = view(cluster, &tenant);
    ensure_image(cluster, at, view, manifest, inputs).await.map_err(|problem| match problem.kind {
        // The image, its host or the tree has gone: it is made again.
        ProblemKind::NotFound | ProblemKind::Conflict | ProblemKind::Invalid => {
            Problem { kind: ProblemKind::Unavailable, ..problem }
        }
        _ => problem,
    })
}

async fn ensure_image(
    cluster: &Cluster,
    at: &HostLink,
    view: View,
    manifest: Manifest,
    inputs: JobInputs,
) -> Result<Staged, Problem> {
    let key = image_key(&inputs.image);
    match cluster.records.read::<ImageRecord>(&key).await? {
        Some(record) if record.import.is_some() => {
            let import = record.import.as_ref();
            let is_up = import
                .is_some_and(|import| cluster.hosts.up().iter().any(|host| host.id == import.host));
            if is_up {
                return Ok(Staged::Waits("its inputs are being staged".to_owned()));
            }
            // The host that was to make it is gone or silent: another one makes it.
            if !forget(cluster, &record).await? {
                return Ok(Staged::Waits("its inputs are being staged".to_owned()));
            }
        }
        Some(record) => {
            note_use(cluster, &inputs.image).await?;
            match images::ensure(cluster, at, &inputs.image).await {
                Ok(_) => return Ok(Staged::Ready),
                // Every host that had it is gone, or what is left shows something else, or is not given.
                Err(
                    NoCopy::Gone(_)
                    | NoCopy::NoneGood(_)
                    | NoCopy::Trouble(Problem { kind: ProblemKind::NotFound, .. }),
                ) => {
                    if !forget(cluster, &record).await? {
                        return Ok(Staged::Waits("its inputs are being staged".to_owned()));
                    }
                }
                // One that was made while the record was lost.
                Err(NoCopy::Trouble(problem)) if problem.kind == ProblemKind::Conflict => {
                    drop_copy(at, &inputs.image).await?;
                    return Err(problem);
                }
                Err(no_copy) => return Err(no_copy.into()),
            }
        }
        None => {}
    }
    if let Some(why) = cluster.staging.waits_after_failure(&at.id, &inputs.image) {
        return Ok(Staged::Waits(why));
    }
    let made = make(cluster, at, view, manifest, &inputs).await;
    match &made {
        Ok(_) => cluster.staging.forget_failure(&at.id, &inputs.image),
        Err(problem) => cluster.staging.note_failure(&at.id, &inputs.image, problem),
    }
    made
}

async fn drop_copy(at: &HostLink, image: &ImageName) -> Result<(), Problem> {
    match at.volume.delete(&format!("/v1/images/{image}")).await {
        Err(problem) if problem.kind != ProblemKind::NotFound => Err(problem),
        _ => Ok(()),
    }
}

/// Removes the record of an image that no host has as it is. `false` if somebody is making or deleting the image.
async fn forget(cluster: &Cluster, record: &ImageRecord) -> Result<bool, Problem> {
    let Some(_alone) = cluster.index.begin_import(&record.name) else { return Ok(false) };
    let key = image_key(&record.name);
    let now = cluster.records.read::<ImageRecord>(&key).await?;
    let is_same = now.is_some_and(|now| now.layer == record.layer && now.import == record.import);
    if is_same {
        cluster.records.remove(&key).await?;
    }
    Ok(is_same)
}

/// Keeps an image from being collected for a while.
pub(super) async fn note_use(cluster: &Cluster, image: &ImageName) -> Result<(), Problem> {
    let Some(record) = cluster.records.read::<ImageRecord>(&image_key(image)).await? else {
        return Ok(());
    };
    let inputs = Some(InputsImage { used_ms: now_ms() });
    let note = |old: Option<ImageRecord>| {
        let old = old.unwrap_or_else(|| record.clone());
        ImageRecord { inputs, ..old }
    };
    cluster.records.update(&image_key(image), note).await.map(drop)
}

async fn make(
    cluster: &Cluster,
    at: &HostLink,
    view: View,
    manifest: Manifest,
    inputs: &JobInputs,
) -> Result<Staged, Problem> {
    let place = match cluster.staging.take(&at.id, inputs) {
        Ok(place) => place,
        Err(why) => return Ok(Staged::Waits(why)),
    };
    let Some(_importing) = cluster.index.begin_import(&inputs.image) else {
        return Ok(Staged::Waits("the image of its inputs is being made or deleted".to_owned()));
    };
    // Another job's may have become ready since this was looked up.
    if cluster.records.read::<ImageRecord>(&image_key(&inputs.image)).await?.is_some() {
        return Ok(Staged::Waits("the image of its inputs was made just now".to_owned()));
    }
    // What a host has without a record may be anything.
    drop_copy(at, &inputs.image).await?;
    let room = accounts::hold_volume(cluster, inputs.image.as_str(), inputs.bytes).await?;
    let tree = Uuid::new_v4();
    // A body is not bound to the life of this future.
    let (sent, mut progress_of) = tokio::sync::watch::channel(0);
    let pace = cluster.paces.of(at, Way::In);
    let body = Body::from_stream(paced(tar(view, manifest, sent), Arc::clone(&pace)));
    let path = format!("/v1/trees/{tree}");
    let sending = at.volume_slow.send_body::<Upload>(Method::PUT, &path, body);
    let sending = while_kept(cluster, at, Way::In, &pace, sending);
    let telling = async {
        while progress_of.changed().await.is_ok() {
            let sent_bytes = *progress_of.borrow_and_update();
            cluster.staging.note(&place.image, |progress| progress.sent_bytes = sent_bytes);
        }
        // All is sent. The answer follows.
        std::future::pending::<()>().await;
    };
    let send = async {
        let sent = tokio::select! {
            sent = sending => sent.map(drop),
            () = telling => Ok(()),
        };
        match sent {
            Ok(()) => cluster.staging.note(&place.image, |progress| progress.is_sent = true),
            // If only the answer was lost, the host has it.
            Err(_) => drop(at.volume.delete(&path).await),
        }
        sent
    };
    let source = format!("{TREE_PREFIX}{tree}");
    let import = PendingImport { host: at.id.clone(), source, format: None, backup: None };
    let record = ImageRecord {
        layer: Some(LayerId(Uuid::new_v4())),
        import: Some(import),
        size_bytes: Some(inputs.bytes),
        inputs: Some(InputsImage { used_ms: now_ms() }),
        ..ImageRecord::new(inputs.image.clone())
    };
    images::import_inputs(cluster, at, record, || drop(room), send).await?;
    Ok(Staged::Ready)
}

/// What comes next in the tar.
enum Next {
    Headers,
    Content { reading: Box<Reading>, offset: u64 },
    Over,
}

/// The tar of a manifest, as it is read from the repository. It ends early if a file is not what the manifest says.
fn tar(
    view: View,
    manifest: Manifest,
    sent: tokio::sync::watch::Sender<u64>,
) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Send + 'static {
    let begin = (manifest.into_parts(), Next::Headers, view, sent);
    stream::try_unfold(begin, |(mut parts, next, view, sent)| async move {
        match next {
            Next::Over => Ok(None),
            Next::Headers => match parts.next() {
                None => Ok(Some((end(), (parts, Next::Over, view, sent)))),
                Some(part) => {
                    let (headers, entry) = part.map_err(std::io::Error::other)?;
                    let next = match entry {
                        Entry::File(file) if file.size_bytes > 0 => {
                            let reading = view.read(file.at.clone()).await;
                            let reading = reading.map_err(std::io::Error::other)?;
                            if reading.entry().sha256.as_ref() != Some(&file.sha256) {
                                let why = format!("repo:/{} was changed meanwhile", file.at);
                                return Err(std::io::Error::other(Problem::unavailable(WHAT, why)));
                            }
                            Next::Content { reading: Box::new(reading), offset: 0 }
                        }
                        _ => Next::Headers,
                    };
                    Ok(Some((headers, (parts, next, view, sent))))
                }
            },
            Next::Content { mut reading, offset } => {
                let piece = reading.read(offset, PIECE_BYTES).await;
                let piece = piece.map_err(std::io::Error::other)?;
                let length = reading.entry().size_bytes;
                let offset = offset + piece.len() as u64;
                if piece.is_empty() {
                    return Err(std::io::Error::other("a file of the repository ended early"));
                }
                sent.send_modify(|sent| *sent += piece.len() as u64);
                if offset < length {
                    let next = Next::Content { reading, offset };
                    return Ok(Some((piece, (parts, next, view, sent))));
                }
                let mut last = bytes::BytesMut::from(&piece[..]);
                last.extend_from_slice(&padding(length));
                Ok(Some((last.freeze(), (parts, Next::Headers, view, sent))))
            }
        }
    })
}
