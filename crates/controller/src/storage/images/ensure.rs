//! How a host gets the copy of an image that it needs, and from which host.

use perigee_model::volume::ImageInfo;
use perigee_model::{HostId, ImageName, LayerId, Problem, ProblemKind};

use super::{
    Found, being_imported, contents, copy, layer_of, look, missing_bytes, no_image, not_shown,
};
use crate::cluster::{Cluster, HostLink};
use crate::records::{ImageRecord, image_key};

/// Why a host can't use an image now.
#[derive(Debug)]
pub enum NoCopy {
    /// All hosts have answered, and none has it.
    Gone(Problem),
    /// All hosts have answered, and none that may give it to this one shows the image's content.
    NoneGood(Problem),
    /// It may be otherwise soon, or when somebody has mended it.
    Trouble(Problem),
}

impl From<Problem> for NoCopy {
    fn from(problem: Problem) -> Self {
        Self::Trouble(problem)
    }
}

impl From<NoCopy> for Problem {
    fn from(no_copy: NoCopy) -> Self {
        match no_copy {
            NoCopy::Gone(problem) | NoCopy::NoneGood(problem) | NoCopy::Trouble(problem) => problem,
        }
    }
}

/// Makes sure that a host can use the image: a host that has no copy gets one now.
///
/// # Errors
/// `Gone` with `NotFound`, and `NoneGood` with `Conflict`. Else among others `Unavailable` while it is imported or a host that
/// does not answer may have it, and `Conflict` if the host has a different image with that name.
pub async fn ensure(
    cluster: &Cluster,
    at: &HostLink,
    name: &ImageName,
) -> Result<ImageInfo, NoCopy> {
    // The record is read before the hosts are asked, so that an import that ends meanwhile still counts as one.
    let mut record = cluster.records.read::<ImageRecord>(&image_key(name)).await?;
    let layer = layer_of(cluster, name).await.map_err(|problem| match problem.kind {
        ProblemKind::NotFound => NoCopy::Gone(problem),
        _ => NoCopy::Trouble(problem),
    })?;
    let mut unclear_from = None;
    if let Some(info) = copy_at(at, name, layer).await? {
        let bad = record.as_ref().filter(|known| contents::is_bad(Some(known), &info));
        let Some(known) = bad else { return Ok(info) };
        contents::drop_bad(cluster, at, known, &info).await?;
        let remote = info.remote.filter(|remote| remote.unclear);
        unclear_from = remote.map(|remote| remote.nbd_addr);
        record = cluster.records.read(&image_key(name)).await?;
    }
    let (mut sources, silent) = look(cluster).await;
    sources.retain(|source| source.info.name == *name && source.info.layer == layer);
    let shown_at: Vec<HostId> = sources.iter().map(|source| source.host.clone()).collect();
    sources.retain(|source| {
        let is_bad = contents::is_bad(record.as_ref(), &source.info);
        !is_bad && !contents::was_deceived(record.as_ref(), &at.id, &source.host)
    });
    // Somebody else has made the copy meanwhile. It is no source of itself.
    if let Some(made) = sources.iter().position(|source| source.host == at.id) {
        return Ok(sources.swap_remove(made).info);
    }
    let Some(best) = best_source(cluster, record.as_ref(), &sources, unclear_from.as_deref())
    else {
        return Err(no_source(name, &at.id, record.as_ref(), &shown_at, silent));
    };
    let from = cluster.hosts.get(&best.host)?;
    check_may_leave(&best.info, &from, at)?;
    keep_content(cluster, record.as_ref(), best).await?;
    Ok(copy(cluster, &from, at, name, layer).await?)
}

/// What the host has of the image's layer; `None` if it has no image of this name.
///
/// # Errors
/// `Conflict` if it has a different one with that name.
async fn copy_at(
    at: &HostLink,
    name: &ImageName,
    layer: LayerId,
) -> Result<Option<ImageInfo>, Problem> {
    match at.volume.get::<ImageInfo>(&format!("/v1/images/{name}")).await {
        Ok(info) if info.layer == layer => Ok(Some(info)),
        Ok(_) => {
            let why = format!("host {} has a different image with this name", at.id);
            Err(Problem::conflict(format!("can't use image {name}"), why)
                .next("delete that one at its host, with `perigee image delete --pool`"))
        }
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(None),
        Err(problem) => Err(problem),
    }
}

/// The host that gives a copy. A complete image is preferred: a copy of a copy needs two hosts. Of these, the one at the host that has
/// made it: what another host says of its copy can't be checked, and that host may have been broken into.
///
/// `unclear_from`: the address of a host from which something came that was not the image's content.
fn best_source<'a>(
    cluster: &Cluster,
    record: Option<&ImageRecord>,
    sources: &'a [Found],
    unclear_from: Option<&str>,
) -> Option<&'a Found> {
    let made_at = record.and_then(|record| record.made_at.as_ref());
    sources.iter().min_by_key(|source| {
        let missing_bytes = missing_bytes(&source.info);
        let host = cluster.hosts.get(&source.host).ok();
        let is_unclear =
            host.is_some_and(|host| Some(host.addresses.nbd_addr.as_str()) == unclear_from);
        (is_unclear, missing_bytes > 0, made_at != Some(&source.host), missing_bytes)
    })
}

/// # Errors
/// `Conflict` if the image may not leave its site, and the host is at another one.
fn check_may_leave(image: &ImageInfo, from: &HostLink, at: &HostLink) -> Result<(), Problem> {
    let (here, there) = (&from.addresses.site, &at.addresses.site);
    if !image.leave_site.is_never() || here == there {
        return Ok(());
    }
    let why = format!(
        "its policy is leave-site: never; it is at site {here}, and {} is at {there}",
        at.id
    );
    Err(Problem::conflict(format!("can't copy image {}", image.name), why)
        .next("use it at a host of its site"))
}

/// What the host says that has made an image is kept before anybody else has it.
async fn keep_content(
    cluster: &Cluster,
    record: Option<&ImageRecord>,
    source: &Found,
) -> Result<(), Problem> {
    let Some(known) = record.filter(|known| known.content.is_none()) else { return Ok(()) };
    let Found { host, info } = source;
    if known.made_at.as_ref() == Some(host)
        && let (None, Some(content)) = (&info.remote, info.content)
    {
        contents::keep(cluster, &info.name, info.layer, content).await?;
    }
    Ok(())
}

/// Why a host gets the image from nobody. A host that does not answer may have it as it is, unless this one has got something
/// else from there.
fn no_source(
    name: &ImageName,
    at: &HostId,
    record: Option<&ImageRecord>,
    shown_at: &[HostId],
    mut silent: Vec<HostId>,
) -> NoCopy {
    if let Some(import) = record.and_then(|record| record.import.as_ref()) {
        return being_imported(name, &import.host).into();
    }
    silent.retain(|host| !contents::was_deceived(record, at, host));
    match (shown_at.is_empty(), silent.is_empty()) {
        (true, true) => NoCopy::Gone(no_image(name)),
        (true, false) => not_shown(name, &silent).into(),
        (false, true) => NoCopy::NoneGood(contents::none_good(name, at, record, shown_at, &[])),
        (false, false) => contents::none_good(name, at, record, shown_at, &silent).into(),
    }
}
