//! The image of a job's inputs at the job's host.
//!
//! The image's name is the hash of what is in it. So it is made once in the cluster, and every other host copies it. It
//! is made of a tar that streams from the repository to the volume server of the host, which unpacks it and makes a
//! filesystem. What breaks off is begun anew: nothing of it counts before the image is there. The name is taken before
//! anything is sent, so that nothing is sent twice.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{Stream, stream};
use perigee_http::{Body, Method};
use perigee_model::job::JobSpec;
use perigee_model::tenant::tenant_of;
use perigee_model::volume::{TREE_PREFIX, Upload};
use perigee_model::{HostId, ImageName, LayerId, Problem, ProblemKind, TenantName};
use perigee_repository::{Reading, View};
use tokio::sync::RwLock;
use uuid::Uuid;

use super::manifest::{Entry, Manifest};
use super::{WHAT, resolve, view};
use crate::accounts;
use crate::cluster::{Cluster, HostLink, now_ms};
use crate::files::pace::{Way, paced, while_kept};
use crate::guest::tars::{end, padding};
use crate::records::{ImageRecord, InputsImage, JobInputs, PendingImport, image_key};
use crate::storage::images;
use crate::storage::images::NoCopy;

/// How many images of inputs are made at a host at the same time. The others wait, so that VMs which run there have
/// most of its disk. The network has a limit of its own ([`crate::files::pace`]).
const AT_ONCE: usize = 3;
/// How many of them are one tenant's: whoever has much to stage does not hold up the others.
const AT_ONCE_OF_ONE: usize = 2;
const PIECE_BYTES: usize = 256 << 10;
/// An image that could not be made is tried again after this, and then after twice as long each time.
const AGAIN_MIN: Duration = Duration::from_secs(2);
const AGAIN_MAX: Duration = Duration::from_secs(300);

/// How far it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Staged {
    /// The host can use the image.
    Ready,
    /// It waits for others: why, in words.
    Waits(String),
}

/// What is being staged.
#[derive(Debug, Default)]
pub struct Staging {
    running: Mutex<BTreeMap<ImageName, Progress>>,
    /// What could not be made, until it is tried again.
    failed: Mutex<BTreeMap<(HostId, ImageName), Failed>>,
    submissions: Mutex<BTreeMap<TenantName, Arc<Submissions>>>,
}

/// A tenant's jobs that are being submitted.
#[derive(Debug, Default)]
pub struct Submissions {
    /// Held by whoever reads a list of inputs, and looks for what it names: each may take much memory.
    pub resolving: tokio::sync::Mutex<()>,
    /// Held to read by those who submit a job, from before they look for its inputs until it is recorded. Whoever removes
    /// uploaded files takes it without waiting for it, and only for a moment: nobody who submits waits for long.
    pub under_way: RwLock<()>,
    /// How many have begun.
    pub count: AtomicU64,
}

/// An image that could not be made.
#[derive(Debug)]
struct Failed {
    tries: u32,
    again: Instant,
    why: String,
}

#[derive(Debug)]
struct Progress {
    host: HostId,
    sent_bytes: u64,
    bytes: u64,
    is_sent: bool,
}

/// A place at a host, until this is dropped.
struct Place<'a> {
    staging: &'a Staging,
    image: ImageName,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.staging.lock().remove(&self.image);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Staging {
    /// A tenant's submissions.
    pub fn submissions(&self, tenant: &TenantName) -> Arc<Submissions> {
        Arc::clone(locked(&self.submissions).entry(tenant.clone()).or_default())
    }

    /// The image could not be made: the next try is later each time, because each sends all files again.
    fn note_failure(&self, host: &HostId, image: &ImageName, problem: &Problem) {
        let mut failed = locked(&self.failed);
        let now = Instant::now();
        failed.retain(|_, failed| now < failed.again + AGAIN_MAX);
        let entry = failed.entry((host.clone(), image.clone()));
        let entry = entry.or_insert_with(|| Failed { tries: 0, again: now, why: String::new() });
        let wait = AGAIN_MIN.saturating_mul(1 << entry.tries.min(16)).min(AGAIN_MAX);
        (entry.tries, entry.again) = (entry.tries + 1, now + wait);
        entry.why = format!("{}: {}", problem.what, problem.why);
    }

    /// Why it is not tried again yet.
    fn waits_after_failure(&self, host: &HostId, image: &ImageName) -> Option<String> {
        let failed = locked(&self.failed);
        let Failed { again, why, .. } = failed.get(&(host.clone(), image.clone()))?;
        let left = again.checked_duration_since(Instant::now())?;
        Some(format!("{why}; its inputs are staged again in {} s", left.as_secs() + 1))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ImageName, Progress>> {
        locked(&self.running)
    }

    /// How far the image is, in words, while it is made.
    pub fn in_words(&self, image: &ImageName) -> Option<String> {
        let running = self.lock();
        let Progress { sent_bytes, bytes, is_sent, .. } = running.get(image)?;
        let mb = |bytes: u64| bytes.div_ceil(1_000_000);
        Some(match is_sent {
            true => format!("staging inputs: making a disk of {} MB", mb(*bytes)),
            false => format!("staging inputs: {} of {} MB", mb(*sent_bytes), mb(*bytes)),
        })
    }

    /// Why nothing can be done for this image at this host now, unless it is there.
    fn waits(&self, host: &HostId, image: &ImageName) -> Option<String> {
        let running = why_it_waits(&self.lock(), host, image);
        running.or_else(|| self.waits_after_failure(host, image))
    }

    /// # Errors
    /// Why it has to wait.
    fn take(&self, host: &HostId, inputs: &JobInputs) -> Result<Place<'_>, String> {
        let mut running = self.lock();
        if let Some(why) = why_it_waits(&running, host, &inputs.image) {
            return Err(why);
        }
        let progress =
            Progress { host: host.clone(), sent_bytes: 0, bytes: inputs.bytes, is_sent: false };
        running.insert(inputs.image.clone(), progress);
        Ok(Place { staging: self, image: inputs.image.clone() })
    }

    fn note(&self, image: &ImageName, note: impl FnOnce(&mut Progress)) {
        if let Some(progress) = self.lock().get_mut(image) {
            note(progress);
        }
    }
}

fn why_it_waits(
    running: &BTreeMap<ImageName, Progress>,
    host: &HostId,
    image: &ImageName,
) -> Option<String> {
    if let Some(other) = running.get(image) {
        let at = &other.host;
        return Some(format!("another job's inputs, which are the same, are staged at {at}"));
    }
    let tenant = tenant_of(image.as_str());
    let at_host = running.iter().filter(|(_, progress)| progress.host == *host);
    let (all, own) = at_host.fold((0, 0), |(all, own), (other, _)| {
        (all + 1, own + usize::from(tenant_of(other.as_str()) == tenant))
    });
    let others = match (all >= AT_ONCE, own >= AT_ONCE_OF_ONE) {
        (_, true) => own,
        (true, false) => all,
        (false, false) => return None,
    };
    Some(format!("the inputs of {others} other jobs are being staged at {host}"))
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
        Ok(_) => drop(locked(&cluster.staging.failed).remove(&(at.id.clone(), inputs.image))),
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
    let (sent, mut told) = tokio::sync::watch::channel(0);
    let pace = cluster.paces.of(at, Way::In);
    let body = Body::from_stream(paced(tar(view, manifest, sent), Arc::clone(&pace)));
    let path = format!("/v1/trees/{tree}");
    let sending = at.volume_slow.send_body::<Upload>(Method::PUT, &path, body);
    let sending = while_kept(cluster, at, Way::In, &pace, sending);
    let telling = async {
        while told.changed().await.is_ok() {
            let sent_bytes = *told.borrow_and_update();
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
    let import = PendingImport { host: at.id.clone(), source, format: None };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenant_does_not_take_all_places_of_a_host() {
        let host = HostId::new("home1").expect("a name");
        let image = |name: &str| ImageName::new(name).expect("a name");
        let mut running = BTreeMap::new();
        let progress = || Progress { host: host.clone(), sent_bytes: 0, bytes: 1, is_sent: false };
        for name in ["acme~inputs-1", "acme~inputs-2"] {
            assert_eq!(why_it_waits(&running, &host, &image(name)), None);
            running.insert(image(name), progress());
        }
        assert!(why_it_waits(&running, &host, &image("acme~inputs-3")).is_some());
        assert_eq!(why_it_waits(&running, &host, &image("blue~inputs-1")), None);
        running.insert(image("blue~inputs-1"), progress());
        let why = why_it_waits(&running, &host, &image("blue~inputs-2")).expect("it is full");
        assert!(why.contains("of 3 other jobs"), "{why}");
        let elsewhere = HostId::new("home2").expect("a name");
        assert_eq!(why_it_waits(&running, &elsewhere, &image("acme~inputs-3")), None);
    }
}
