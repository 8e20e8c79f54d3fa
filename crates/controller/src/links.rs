//! What lies between hosts: round trip, rate and the time of a block read, measured by the hosts.
//!
//! Links are measured when their hosts are first seen up, when a plan needs one that is not
//! measured yet or long ago, and when somebody asks.

use std::sync::Arc;

use perigee_model::job::Link;
use perigee_model::vm::{LinkProbe, ProbeLink};
use perigee_model::volume::{BlockProbe, ImageInfo, ProbeBlocks, VolumeInfo};
use perigee_model::{HostId, Problem};

use crate::cluster::{Cluster, HostLink, now_ms};

/// The size of a block read in a probe: PostgreSQL's page, and close to what guests send.
pub const PROBE_REQUEST_BYTES: u32 = 8192;

const PROBE_REQUESTS: u32 = 64;

/// Enough for a rate on a fast link, and short on a slow one.
const PROBE_LENGTH_BYTES: u64 = 8 << 20;

/// A plan measures again what is older.
const FRESH_MS: u64 = 10 * 60 * 1000;

pub async fn list(cluster: &Cluster) -> Result<Vec<Link>, Problem> {
    cluster.records.list("links/").await
}

pub async fn local_blocks(cluster: &Cluster, host: &HostId) -> Result<Option<BlockProbe>, Problem> {
    let local: Option<Local> = cluster.records.read(&local_key(host)).await?;
    Ok(local.and_then(|local| local.blocks))
}

/// What flows from one host to the other, as last measured: by the one that reads.
pub async fn toward(
    cluster: &Cluster,
    from: &HostId,
    to: &HostId,
) -> Result<Option<LinkProbe>, Problem> {
    let link: Option<Link> = cluster.records.read(&key(to, from)).await?;
    Ok(link.map(|link| link.probe))
}

/// Block reads of a host from itself.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Local {
    /// `None` when it has nothing to read.
    blocks: Option<BlockProbe>,
    measured_ms: u64,
}

/// Measures every ordered pair of hosts that are up, one after the other.
///
/// # Errors
/// When a host that is up does not measure; what was measured before is kept.
pub async fn probe_all(cluster: &Cluster) -> Result<Vec<Link>, Problem> {
    let _quiet = cluster.network.lock().await;
    let hosts = cluster.hosts.up();
    for from in &hosts {
        probe_local(cluster, from).await?;
        for to in hosts.iter().filter(|to| to.id != from.id) {
            probe_link(cluster, from, to).await?;
        }
    }
    list(cluster).await
}

/// Measures what a plan about these homes needs: each host from and to each of them. What is known
/// and old is measured again, but not while VMs use the links.
///
/// A host that does not measure keeps no plan from the others: the first problem is given back.
///
/// # Errors
/// When the store fails.
pub async fn ensure(cluster: &Cluster, homes: &[HostId]) -> Result<Option<Problem>, Problem> {
    let _quiet = cluster.network.lock().await;
    let busy = cluster.unfinished_jobs().iter().any(|record| record.vm_started);
    let oldest_ms = if busy { 0 } else { now_ms().saturating_sub(FRESH_MS) };
    let hosts = cluster.hosts.up();
    let mut failed = None;
    for home in hosts.iter().filter(|host| homes.contains(&host.id)) {
        for host in &hosts {
            if let Err(problem) = ensure_pair(cluster, host, home, oldest_ms).await {
                tracing::warn!("measure between {} and {}: {problem}", host.id, home.id);
                failed.get_or_insert(problem);
            }
        }
    }
    Ok(failed)
}

/// Both directions between a host and a home; the home itself when it is the host.
async fn ensure_pair(
    cluster: &Cluster,
    host: &HostLink,
    home: &HostLink,
    oldest_ms: u64,
) -> Result<(), Problem> {
    let readable = async || Ok::<_, Problem>(something_to_read(home).await?.is_some());
    if host.id == home.id {
        let local: Option<Local> = cluster.records.read(&local_key(&home.id)).await?;
        let local = local.filter(|local| local.measured_ms >= oldest_ms);
        let known = match local {
            Some(Local { blocks: Some(_), .. }) => true,
            Some(Local { blocks: None, .. }) => !readable().await?,
            None => false,
        };
        return if known { Ok(()) } else { probe_local(cluster, home).await };
    }
    let link = known_link(cluster, host, home, oldest_ms).await?;
    let known = match link {
        Some(Link { blocks: Some(_), .. }) => true,
        Some(Link { blocks: None, .. }) => !readable().await?,
        None => false,
    };
    if !known {
        probe_link(cluster, host, home).await?;
    }
    if known_link(cluster, home, host, oldest_ms).await?.is_none() {
        probe_link(cluster, home, host).await?;
    }
    Ok(())
}

/// Measures links nobody measured yet, while no job runs that the probe would disturb.
pub async fn measure_new_links(cluster: Arc<Cluster>) {
    loop {
        tokio::time::sleep(cluster.timing.monitor).await;
        if let Err(problem) = measure_one_new_link(&cluster).await {
            tracing::debug!("measure a link: {problem}");
        }
    }
}

async fn measure_one_new_link(cluster: &Cluster) -> Result<(), Problem> {
    let _quiet = cluster.network.lock().await;
    if !cluster.unfinished_jobs().is_empty() {
        return Ok(());
    }
    let mut reported = cluster.hosts.up();
    reported.retain(|host| cluster.hosts.report(&host.id).is_some());
    let known = cluster.records.keys("links/").await?;
    for from in &reported {
        for to in reported.iter().filter(|to| to.id != from.id) {
            if !known.contains(&key(&from.id, &to.id)) {
                return probe_link(cluster, from, to).await;
            }
        }
    }
    Ok(())
}

async fn known_link(
    cluster: &Cluster,
    from: &HostLink,
    to: &HostLink,
    oldest_ms: u64,
) -> Result<Option<Link>, Problem> {
    let link: Option<Link> = cluster.records.read(&key(&from.id, &to.id)).await?;
    Ok(link.filter(|link| link.measured_ms >= oldest_ms))
}

async fn probe_link(cluster: &Cluster, from: &HostLink, to: &HostLink) -> Result<(), Problem> {
    let ask = ProbeLink {
        peer_agent_url: to.addresses.agent_url.clone(),
        length_bytes: PROBE_LENGTH_BYTES,
    };
    let probe: LinkProbe = from.agent_slow.post("/v1/probe", &ask).await?;
    let link = Link {
        from: from.id.clone(),
        to: to.id.clone(),
        probe,
        blocks: probe_blocks(from, to).await?,
        measured_ms: now_ms(),
    };
    cluster.records.put(&key(&from.id, &to.id), &link).await
}

async fn probe_local(cluster: &Cluster, host: &HostLink) -> Result<(), Problem> {
    let local = Local { blocks: probe_blocks(host, host).await?, measured_ms: now_ms() };
    cluster.records.put(&local_key(&host.id), &local).await
}

/// Reads at `from` what has its home at `to`; `None` when there is nothing to read.
async fn probe_blocks(from: &HostLink, to: &HostLink) -> Result<Option<BlockProbe>, Problem> {
    let Some(export) = something_to_read(to).await? else { return Ok(None) };
    let ask = ProbeBlocks {
        nbd_addr: to.addresses.nbd_addr.clone(),
        export,
        requests: PROBE_REQUESTS,
        request_bytes: PROBE_REQUEST_BYTES,
    };
    from.volume_slow.post("/v1/probe", &ask).await.map(Some)
}

/// The export with the most data, so that the probe reads blocks and not holes.
async fn something_to_read(host: &HostLink) -> Result<Option<String>, Problem> {
    let volumes: Vec<VolumeInfo> = host.volume.get("/v1/volumes").await?;
    let images: Vec<ImageInfo> = host.volume.get("/v1/images").await?;
    let volumes = volumes.into_iter().map(|v| (v.allocated_bytes, v.name.to_string()));
    let images = images.into_iter().map(|i| (i.allocated_bytes, format!("image:{}", i.name)));
    Ok(volumes.chain(images).max().filter(|(bytes, _)| *bytes > 0).map(|(_, export)| export))
}

fn key(from: &HostId, to: &HostId) -> String {
    format!("links/{from}/{to}")
}

fn local_key(host: &HostId) -> String {
    format!("local_blocks/{host}")
}
