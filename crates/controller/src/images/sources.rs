//! A copy that still lacks blocks reads them from one host. If that host is gone or silent, the copy goes on from
//! another host that has all of the same layer. The volume servers compare the layer's UUID when they connect, and
//! the copy with the checksums when it is complete.

use std::sync::Arc;

use perigee_model::Problem;
use perigee_model::volume::ImageInfo;

use super::{Found, copy, look};
use crate::cluster::{Cluster, HostLink};

/// The time between two looks, as a multiple of that of the monitor: 30 s.
const MONITORED: u32 = 15;

/// Runs until the controller ends.
pub async fn replace_lost_sources(cluster: Arc<Cluster>) {
    loop {
        let up = cluster.hosts.up();
        let (found, _) = look(&cluster).await;
        for lost in found.iter().filter(|found| has_lost_source(&found.info, &up)) {
            let (name, host) = (&lost.info.name, &lost.host);
            if let Err(problem) = replace(&cluster, lost, &found).await {
                tracing::warn!("the copy of image {name} at {host} has no source: {problem}");
            }
        }
        tokio::time::sleep(cluster.timing.monitor * MONITORED).await;
    }
}

/// Whether it lacks blocks, and no host that is up has the address from which it gets them. An address that is no
/// host's at all counts as gone too, because its host was removed.
fn has_lost_source(image: &ImageInfo, up: &[Arc<HostLink>]) -> bool {
    image
        .remote
        .as_ref()
        .is_some_and(|remote| up.iter().all(|host| host.addresses.nbd_addr != remote.nbd_addr))
}

async fn replace(cluster: &Cluster, lost: &Found, found: &[Found]) -> Result<(), Problem> {
    let (name, layer) = (&lost.info.name, lost.info.layer);
    let to = cluster.hosts.get(&lost.host)?;
    // Two copies that lack blocks could wait for each other, so the source has all of them.
    let mut sources: Vec<Arc<HostLink>> = found
        .iter()
        .filter(|other| other.info.name == *name && other.info.layer == layer)
        .filter(|other| other.info.remote.is_none())
        .filter_map(|other| cluster.hosts.get(&other.host).ok())
        .collect();
    sources.sort_by_key(|source| source.addresses.site != to.addresses.site);
    let Some(source) = sources.first() else { return Ok(()) };
    // Somebody imports or deletes it at this moment.
    let Some(_alone) = cluster.index.begin_import(name) else { return Ok(()) };
    let now: ImageInfo = to.volume.get(&format!("/v1/images/{name}")).await?;
    if now.layer == layer && has_lost_source(&now, &cluster.hosts.up()) {
        copy(source, &to, name, layer).await?;
    }
    Ok(())
}
