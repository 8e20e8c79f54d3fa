//! A copy that still lacks blocks reads them from one host. If that host is gone or silent, or has the image no
//! more, the copy goes on from another host that has all of the same layer. The volume servers compare the layer's
//! UUID when they connect, and the copy with the checksums when it is complete.

use std::sync::Arc;

use perigee_model::volume::ImageInfo;
use perigee_model::{HostId, Problem, ProblemKind};

use super::{Found, by_layer, contents, copy, look};
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, HostLink};
use crate::records::{ImageRecord, image_key};

/// The time between two checks, as a multiple of the monitor's period: 30 s.
const MONITORED: u32 = 15;

/// The images and states of all hosts at one time.
pub(super) struct Look {
    up: Vec<Arc<HostLink>>,
    pub(super) found: Vec<Found>,
    pub(super) silent: Vec<HostId>,
}

/// Runs until the controller ends.
pub async fn replace_lost_sources(cluster: Arc<Cluster>, task: Task) {
    let (mut sent, period) = (contents::Sent::default(), cluster.timing.monitor * MONITORED);
    loop {
        let replace_all = async {
            let up = cluster.hosts.up();
            let (found, silent) = look(&cluster).await;
            let look = Look { up, found, silent };
            contents::check_copies(&cluster, &look, &mut sent).await;
            let lost = |found: &&Found| look.has_lost_source(&found.host, &found.info);
            for lost in look.found.iter().filter(lost) {
                let (name, host) = (&lost.info.name, &lost.host);
                if let Err(problem) = replace(&cluster, lost, &look).await {
                    tracing::warn!("the copy of image {name} at {host} has no source: {problem}");
                }
            }
            Ok(format!("looked at {} images of hosts", look.found.len()))
        };
        task.round(replace_all).await;
        tokio::time::sleep(period).await;
    }
}

impl Look {
    /// Whether the image at this host lacks blocks, and no other host that is up and has the image is at the address
    /// from which it gets them. An address that is no host's at all counts as gone too, because its host was
    /// removed.
    fn has_lost_source(&self, at: &HostId, image: &ImageInfo) -> bool {
        let Some(remote) = &image.remote else { return false };
        if remote.refused || remote.unclear {
            return true;
        }
        let mut up = self.up.iter();
        let Some(source) = up.find(|host| host.addresses.nbd_addr == remote.nbd_addr) else {
            return true;
        };
        let by_name = remote.export == format!("image:{}", image.name);
        // It was not made from an image, or the host did not tell which images it has.
        if !by_name && remote.export != by_layer(image.layer) || self.silent.contains(&source.id) {
            return false;
        }
        let mut images = self.found.iter().filter(|found| found.host == source.id);
        source.id == *at || !images.any(|found| is_same(&found.info, image))
    }
}

fn is_same(one: &ImageInfo, other: &ImageInfo) -> bool {
    (&one.name, one.layer) == (&other.name, other.layer)
}

async fn replace(cluster: &Cluster, lost: &Found, look: &Look) -> Result<(), Problem> {
    let (name, layer) = (&lost.info.name, lost.info.layer);
    let to = cluster.hosts.get(&lost.host)?;
    let record = cluster.records.read::<ImageRecord>(&image_key(name)).await?;
    // Two copies that lack blocks could wait for each other, so the source has all of them.
    let mut sources: Vec<Arc<HostLink>> = look
        .found
        .iter()
        .filter(|other| is_same(&other.info, &lost.info) && other.info.remote.is_none())
        .filter(|other| !contents::is_bad(record.as_ref(), &other.info))
        .filter(|other| !contents::was_deceived(record.as_ref(), &lost.host, &other.host))
        .filter_map(|other| cluster.hosts.get(&other.host).ok())
        .collect();
    let present = lost.info.remote.as_ref().map(|remote| &remote.nbd_addr);
    // The present one is the best, but not after what came from there was not the image's content.
    let is_unclear = lost.info.remote.as_ref().is_some_and(|remote| remote.unclear);
    sources.sort_by_key(|source| {
        let is_present = present == Some(&source.addresses.nbd_addr);
        (is_present == is_unclear, source.addresses.site != to.addresses.site)
    });
    let mut tried = Ok(());
    for source in sources {
        // Somebody imports or deletes it at this moment.
        let Some(_alone) = cluster.index.begin_import(name) else { return Ok(()) };
        let now = match to.volume.get::<ImageInfo>(&format!("/v1/images/{name}")).await {
            // It was deleted, perhaps because it was refused.
            Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(()),
            now => now?,
        };
        if now.layer != layer || !look.has_lost_source(&lost.host, &now) {
            return Ok(());
        }
        tried = copy(cluster, &source, &to, name, layer).await.map(drop);
        if tried.is_ok() {
            break;
        }
    }
    tried
}
