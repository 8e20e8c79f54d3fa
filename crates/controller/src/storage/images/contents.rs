//! What images show. The host that makes an image says the SHA-256 of its content, and the image's record keeps it. Each other
//! host is told with its copy what that has to show, compares it before the copy counts as complete, and drops what is
//! something else. Here it is seen to that such a copy is deleted or gets another source, and that people hear of it.
//!
//! An image whose content is not known yet (it was just made of a volume) is copied without that. When it
//! becomes known, hosts whose copies lack blocks are told, and complete copies are compared with what their hosts say.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use perigee_model::tenant::AuditEntry;
use perigee_model::volume::{ContentDigest, ImageInfo};
use perigee_model::{HostId, ImageName, LayerId, Problem, ProblemKind, TenantName};

use super::sources::Look;
use super::{Found, ask_for_copy, by_layer, in_words};
use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::records::{ImageRecord, RefusedSource, image_key};

/// Somebody else may write the record at the same time.
const TRIES_MAX: u32 = 10;
/// The pause before an image that somebody works on is tried again.
const TRY_PAUSE: Duration = Duration::from_secs(1);
/// A host has this long for one copy. Meanwhile nobody else works on the image.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// A host has this long for all its copies, and the rest waits for the next look.
const HOST_MAX: Duration = Duration::from_secs(30);

/// Whether nothing may be made of this host's copy.
pub(super) fn is_bad(record: Option<&ImageRecord>, info: &ImageInfo) -> bool {
    info.is_bad(record.and_then(|record| record.content))
}

/// Whether this host has got other content of the image from that one.
pub(super) fn was_deceived(record: Option<&ImageRecord>, at: &HostId, from: &HostId) -> bool {
    let pair = |refused: &RefusedSource| refused.at == *at && refused.from == *from;
    record.is_some_and(|record| record.refused.iter().any(pair))
}

/// The problem of a host that no host that answers gives the image as it is.
pub(super) fn none_good(
    name: &ImageName,
    at: &HostId,
    record: Option<&ImageRecord>,
    shown_at: &[HostId],
    silent: &[HostId],
) -> Problem {
    let what = format!("can't use image {name} at {at}");
    let mut refused = record.into_iter().flat_map(|record| &record.refused);
    let deceit = match refused.find(|refused| refused.at == *at) {
        Some(refused) => {
            format!("what host {} gave to {at} is not the image's content", refused.from)
        }
        None => format!("what {} shows is not the image's content", in_words(shown_at)),
    };
    if silent.is_empty() {
        return Problem::conflict(what, format!("{deceit}, and no other host shows it"))
            .next("look after that host (`perigee host revoke`), and import the image again");
    }
    Problem::unavailable(what, format!("{deceit}, and {} does not answer", in_words(silent)))
        .next("bring the host back, or see `perigee host list`")
}

/// The copies of which the hosts were told what they have to show, and did not keep it.
#[derive(Default)]
pub(super) struct Sent(HashSet<(HostId, LayerId)>);

/// An image, and a copy of it to be checked.
type CopyToCheck<'a> = (Arc<ImageRecord>, &'a Found);

/// Has each copy show what its image is: drops bad ones, and says to others what they have to show. Once for each look at all hosts. They are asked side by side, each for some time, so that none holds up the others.
pub(super) async fn check_copies(cluster: &Cluster, look: &Look, sent: &mut Sent) {
    let records = match cluster.records.list::<ImageRecord>("images/").await {
        Ok(records) => records,
        Err(problem) => return tracing::warn!("can't list the images: {problem}"),
    };
    let mut copies: HashMap<(&ImageName, LayerId), Vec<&Found>> = HashMap::new();
    for found in &look.found {
        copies.entry((&found.info.name, found.info.layer)).or_default().push(found);
    }
    let here: HashSet<_> =
        look.found.iter().map(|found| (found.host.clone(), found.info.layer)).collect();
    sent.0.retain(|known| here.contains(known));
    // In another order each time: a host may wait long for another one, so that the last of its copies are not reached.
    let mut hosts: HashMap<HostId, HashMap<ImageName, CopyToCheck<'_>>> = HashMap::new();
    for record in records.into_iter().filter(|record| record.import.is_none()) {
        let (name, layer) = (record.name.clone(), record.layer);
        let Some(copies) = layer.and_then(|layer| copies.get(&(&name, layer))) else { continue };
        let record = match with_content(cluster, record, copies, look).await {
            Ok(record) => Arc::new(record),
            Err(problem) => {
                tracing::warn!("image {name}: {problem}");
                continue;
            }
        };
        for found in copies {
            let is_sent = sent.0.contains(&(found.host.clone(), found.info.layer));
            if is_bad(Some(&record), &found.info) || !is_sent && lacks_content(&record, found) {
                let of_host = hosts.entry(found.host.clone()).or_default();
                of_host.insert(name.clone(), (Arc::clone(&record), found));
            }
        }
    }
    let asked = hosts.into_iter().map(|(host, copies)| async move {
        let mut kept_not = Vec::new();
        let checked = check_host(cluster, &host, &copies, &mut kept_not);
        if tokio::time::timeout(HOST_MAX, checked).await.is_err() {
            let max_s = HOST_MAX.as_secs();
            tracing::warn!(
                "the copies at host {host} are not all checked in {max_s} s; going on later"
            );
        }
        kept_not
    });
    sent.0.extend(join_all(asked).await.into_iter().flatten());
}

/// The record, with the content as soon as it is known.
async fn with_content(
    cluster: &Cluster,
    record: ImageRecord,
    copies: &[&Found],
    look: &Look,
) -> Result<ImageRecord, Problem> {
    if record.content.is_none()
        && let Some(content) = said_content(cluster, &record, copies, look)
        && let Some(layer) = record.layer
    {
        return keep(cluster, &record.name, layer, content).await;
    }
    Ok(record)
}

/// Whether a copy that lacks blocks was not told yet what it has to show. What came with a volume is not compared with that.
fn lacks_content(record: &ImageRecord, found: &Found) -> bool {
    let info = &found.info;
    let is_whole_copy =
        info.remote.as_ref().is_some_and(|remote| remote.export == by_layer(info.layer));
    is_whole_copy && record.content.is_some() && info.content != record.content
}

/// What can't be found out of one copy keeps none of the others from it.
async fn check_host(
    cluster: &Cluster,
    host: &HostId,
    copies: &HashMap<ImageName, CopyToCheck<'_>>,
    kept_not: &mut Vec<(HostId, LayerId)>,
) {
    let Ok(at) = cluster.hosts.get(host) else { return };
    for (record, found) in copies.values() {
        match check_copy(cluster, &at, record, found).await {
            Ok(true) => {}
            Ok(false) => kept_not.push((host.clone(), found.info.layer)),
            Err(problem) => tracing::warn!("image {} at {host}: {problem}", record.name),
        }
    }
}

/// Returns `false` if the host was told what its copy has to show, and did not keep that.
async fn check_copy(
    cluster: &Cluster,
    at: &HostLink,
    record: &ImageRecord,
    found: &Found,
) -> Result<bool, Problem> {
    let name = &record.name;
    let mut tries = 0;
    let _alone = loop {
        match cluster.index.begin_import(name) {
            Some(alone) => break alone,
            // Somebody imports or deletes it at this moment, or it is checked at another host.
            None if tries < TRIES_MAX => tokio::time::sleep(TRY_PAUSE).await,
            None => return Ok(true),
        }
        tries += 1;
    };
    let asked = check_alone(cluster, at, name, found.info.layer);
    tokio::time::timeout(ANSWER_MAX, asked).await.unwrap_or_else(|_| {
        let why = format!("the host does not answer in {} s", ANSWER_MAX.as_secs());
        Err(Problem::unavailable(format!("can't check image {name} at {}", at.id), why))
    })
}

async fn check_alone(
    cluster: &Cluster,
    at: &HostLink,
    name: &ImageName,
    layer: LayerId,
) -> Result<bool, Problem> {
    // The look may be old, and the image another one by now, or deleted.
    let now = match at.volume.get::<ImageInfo>(&format!("/v1/images/{name}")).await {
        Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(true),
        now => now?,
    };
    let known = cluster.records.read::<ImageRecord>(&image_key(name)).await?;
    let Some(known) = known.filter(|known| known.layer == Some(now.layer)) else {
        return Ok(true);
    };
    if now.layer != layer {
        return Ok(true);
    }
    if is_bad(Some(&known), &now) {
        return drop_bad(cluster, at, &known, &now).await.map(|()| true);
    }
    let now = Found { host: at.id.clone(), info: now };
    if lacks_content(&known, &now)
        && let Some(remote) = &now.info.remote
        && let Some(from) = host_at(cluster, &remote.nbd_addr)
    {
        let copy = ask_for_copy(cluster, &from, at, name, now.info.layer).await?;
        return Ok(copy.content == known.content);
    }
    Ok(true)
}

fn host_at(cluster: &Cluster, nbd_addr: &str) -> Option<Arc<HostLink>> {
    cluster.hosts.all().into_iter().find(|host| host.addresses.nbd_addr == nbd_addr)
}

/// The content as the host says that has made the image. If it is not known who did, or that host is gone, as all hosts say
/// that have all of it.
fn said_content(
    cluster: &Cluster,
    record: &ImageRecord,
    copies: &[&Found],
    look: &Look,
) -> Option<ContentDigest> {
    let mut complete = copies.iter().filter(|found| found.info.remote.is_none());
    let made_at = record.made_at.as_ref().filter(|host| cluster.hosts.get(host).is_ok());
    if let Some(made_at) = made_at {
        return complete.find(|found| found.host == *made_at)?.info.content;
    }
    let first = complete.next()?.info.content?;
    let all_same = complete.all(|found| found.info.content == Some(first));
    (all_same && look.silent.is_empty()).then_some(first)
}

/// Keeps what an image shows. What is known already stays.
///
/// # Errors
/// As [`change`].
pub(crate) async fn keep(
    cluster: &Cluster,
    name: &ImageName,
    layer: LayerId,
    content: ContentDigest,
) -> Result<ImageRecord, Problem> {
    change(cluster, name, layer, |record| {
        record.content.get_or_insert(content);
    })
    .await
}

/// Changes the record of this layer's image.
///
/// # Errors
/// Not found if the image was deleted meanwhile, also if another one has its name now.
async fn change(
    cluster: &Cluster,
    name: &ImageName,
    layer: LayerId,
    by: impl Fn(&mut ImageRecord),
) -> Result<ImageRecord, Problem> {
    let mut tries = 0;
    loop {
        let owned = cluster.records.own::<ImageRecord>(&image_key(name)).await?;
        let Some(mut owned) = owned.filter(|owned| owned.value.layer == Some(layer)) else {
            let why = "it was deleted in the meantime";
            return Err(Problem::not_found(format!("can't note what image {name} shows"), why));
        };
        by(&mut owned.value);
        tries += 1;
        match owned.save().await {
            Err(problem) if problem.kind == ProblemKind::Internal && tries < TRIES_MAX => {}
            saved => return saved.map(|()| owned.value),
        }
    }
}

/// Deletes a copy that is not what the image shows. One that volumes stand on stays: it has nothing of what has come, and gets
/// another source. Its source is kept with the image, so that the host never copies from there again. Somebody else may do the
/// same, so its host deletes it only if it is not good, and whoever uses the copy looks at it again afterwards.
///
/// # Errors
/// `Conflict` if volumes stand on a complete copy, or the host has made the image.
pub(crate) async fn drop_bad(
    cluster: &Cluster,
    at: &HostLink,
    record: &ImageRecord,
    info: &ImageInfo,
) -> Result<(), Problem> {
    let name = &record.name;
    let what = format!("can't use image {name} at {}", at.id);
    match &info.remote {
        Some(remote) => {
            let from = host_at(cluster, &remote.nbd_addr);
            let from = from.map_or_else(|| remote.nbd_addr.clone(), |host| host.id.to_string());
            if remote.refused {
                note(cluster, record, &at.id, &from).await?;
            } else {
                // Nobody is accused: it may be the disk of either host, or the host of which the copy was made before.
                let at = &at.id;
                tracing::warn!("what came to {at} from {from} is not image {name}'s content");
            }
            if info.children > 0 {
                return Ok(());
            }
        }
        None if record.made_at.as_ref() == Some(&at.id) => {
            let why =
                "the host has made the image, and shows another content now than it said then";
            return Err(Problem::conflict(what, why)
                .next("check the host's disk: `perigee check`; then delete the image, and import it again"));
        }
        None if info.children > 0 => {
            let why = "its copy there is not what the image shows, and volumes stand on it";
            return Err(
                Problem::conflict(what, why).next("end the jobs and VMs there that use the image")
            );
        }
        None => {
            tracing::error!("host {} has a copy of image {name} that is not what it shows", at.id);
            audit(cluster, name, &at.id, "an unknown host");
        }
    }
    let unless = record.content.map(|content| format!("&unless={content}")).unwrap_or_default();
    let path = format!("/v1/images/{name}?bad_copy_of={}{unless}", info.layer);
    match at.volume.delete(&path).await {
        Err(problem) if !matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Conflict) => {
            Err(problem)
        }
        _ => Ok(()),
    }
}

/// Notes that a host has served other content than the image's. The first time, people are told.
async fn note(
    cluster: &Cluster,
    record: &ImageRecord,
    at: &HostId,
    from: &str,
) -> Result<(), Problem> {
    let Ok(host) = HostId::new(from) else { return Ok(()) };
    if was_deceived(Some(record), at, &host) {
        return Ok(());
    }
    let name = &record.name;
    tracing::error!("host {from} has served content to {at} that is not image {name}'s");
    audit(cluster, name, at, &format!("host {from}"));
    let there = |host: &HostId| cluster.hosts.get(host).is_ok();
    let Some(layer) = record.layer else { return Ok(()) };
    change(cluster, name, layer, |record| {
        record.refused.retain(|refused| there(&refused.at) && there(&refused.from));
        if !was_deceived(Some(record), at, &host) {
            record.refused.push(RefusedSource { at: at.clone(), from: host.clone() });
        }
    })
    .await
    .map(drop)
}

fn audit(cluster: &Cluster, name: &ImageName, at: &HostId, from: &str) {
    let entry = AuditEntry {
        at_ms: now_ms(),
        who: format!("host {at}"),
        request: format!("REFUSE the content of image {name} from {from}"),
        thing: name.to_string(),
        status: 409,
    };
    cluster.audit.add(&TenantName::of(name.as_str()), entry);
}
