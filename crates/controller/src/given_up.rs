//! What was given up with a removed host, in case that it comes back: its volumes are named as a warning of
//! the host, until somebody uses or deletes them. Its VMs are ended by the [`crate::cleaner`].

use std::collections::BTreeMap;

use perigee_model::{HostId, Problem, VolumeName};
use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, now_ms};

/// Volumes named of one host; of more, only the number is kept.
const VOLUMES_MAX: usize = 1000;

/// Removed hosts that are remembered; beyond that, the one removed first is forgotten.
const HOSTS_MAX: usize = 100;

const PREFIX: &str = "given_up/";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GivenUp {
    host: HostId,
    removed_ms: u64,
    volumes: Vec<VolumeName>,
    /// Volumes beyond those.
    more_volumes: usize,
}

fn key(host: &HostId) -> String {
    format!("{PREFIX}{host}")
}

/// Before the host is removed. It may have been removed before, and come back.
pub async fn keep(cluster: &Cluster, host: &HostId, lost: &[VolumeName]) -> Result<(), Problem> {
    if lost.is_empty() {
        return Ok(());
    }
    let add = |old: Option<GivenUp>| {
        let (mut volumes, more) =
            old.map_or((Vec::new(), 0), |old| (old.volumes, old.more_volumes));
        volumes.extend(
            lost.iter().filter(|name| !volumes.contains(name)).cloned().collect::<Vec<_>>(),
        );
        let more_volumes = more + volumes.len().saturating_sub(VOLUMES_MAX);
        volumes.truncate(VOLUMES_MAX);
        GivenUp { host: host.clone(), removed_ms: now_ms(), volumes, more_volumes }
    };
    cluster.records.update(&key(host), add).await?;
    let mut all: Vec<GivenUp> = cluster.records.list(PREFIX).await?;
    all.sort_by_key(|given_up| given_up.removed_ms);
    let surplus = all.len().saturating_sub(HOSTS_MAX);
    for old in all.iter().take(surplus) {
        tracing::warn!("what was given up with host {} is forgotten", old.host);
        cluster.records.remove(&key(&old.host)).await?;
    }
    Ok(())
}

/// A volume that was given up is in use again, or about to be deleted.
pub async fn found_again(
    cluster: &Cluster,
    host: &HostId,
    volume: &VolumeName,
) -> Result<(), Problem> {
    let Some(given_up) = cluster.records.read::<GivenUp>(&key(host)).await? else { return Ok(()) };
    let volumes: Vec<VolumeName> =
        given_up.volumes.into_iter().filter(|name| name != volume).collect();
    // Without their names nobody could find the others.
    if volumes.is_empty() {
        return cluster.records.remove(&key(host)).await;
    }
    cluster.records.put(&key(host), &GivenUp { volumes, ..given_up }).await
}

/// A sentence for each host of which something was given up.
pub async fn warnings(cluster: &Cluster) -> Result<BTreeMap<HostId, String>, Problem> {
    let all: Vec<GivenUp> = cluster.records.list(PREFIX).await?;
    Ok(all.into_iter().map(|given_up| (given_up.host.clone(), given_up.in_words())).collect())
}

impl GivenUp {
    fn in_words(&self) -> String {
        let names: Vec<&str> = self.volumes.iter().map(VolumeName::as_str).collect();
        let more = match self.more_volumes {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!(
            "these volumes were given up when the host was removed, and may be old: {}{more}; use \
             them by their names, or delete them with `perigee volume delete`",
            names.join(", ")
        )
    }
}
