//! What was given up with a removed host, in case it comes back. A warning of that host lists its volumes until
//! each of them is used or deleted. The [`crate::cleaner`] stops its VMs.

use std::collections::BTreeMap;

use perigee_model::{HostId, Problem, VolumeName};
use serde::{Deserialize, Serialize};

use crate::clock::now_ms;
use crate::cluster::Cluster;

/// The most volumes that are listed for one host. Of the others only the number is kept.
const VOLUMES_MAX: usize = 1000;

/// The most removed hosts that are remembered. Beyond this, the host that was removed first is forgotten.
const HOSTS_MAX: usize = 100;

const PREFIX: &str = "given_up/";

/// The record of a removed host: the volumes that were given up with it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GivenUp {
    host: HostId,
    removed_ms: u64,
    volumes: Vec<VolumeName>,
    /// Number of volumes that are not listed.
    more_volumes: usize,
}

fn key(host: &HostId) -> String {
    format!("{PREFIX}{host}")
}

/// Records the volumes before the host is removed. The host may have been removed before and come back.
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

/// Removes a volume from the list, because it is used again or about to be deleted.
pub async fn found_again(
    cluster: &Cluster,
    host: &HostId,
    volume: &VolumeName,
) -> Result<(), Problem> {
    let Some(given_up) = cluster.records.read::<GivenUp>(&key(host)).await? else { return Ok(()) };
    let volumes: Vec<VolumeName> =
        given_up.volumes.into_iter().filter(|name| name != volume).collect();
    // The unlisted volumes can't be found without their names, so the record goes too.
    if volumes.is_empty() {
        return cluster.records.remove(&key(host)).await;
    }
    cluster.records.put(&key(host), &GivenUp { volumes, ..given_up }).await
}

/// Whether this volume was given up with this host.
pub async fn has(cluster: &Cluster, host: &HostId, volume: &VolumeName) -> Result<bool, Problem> {
    let given_up = cluster.records.read::<GivenUp>(&key(host)).await?;
    Ok(given_up.is_some_and(|given_up| given_up.volumes.contains(volume)))
}

/// What was given up, by host.
pub async fn all(cluster: &Cluster) -> Result<BTreeMap<HostId, Vec<VolumeName>>, Problem> {
    let all: Vec<GivenUp> = cluster.records.list(PREFIX).await?;
    Ok(all.into_iter().map(|given_up| (given_up.host, given_up.volumes)).collect())
}

/// One warning for each host of which volumes were given up.
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
             them by their names, or delete them with `perigee volume delete`{}",
            names.join(", "),
            match self.more_volumes {
                0 => String::new(),
                _ => format!(
                    "; those that are not named here: perigee volume adopt NAME --host {}",
                    self.host
                ),
            }
        )
    }
}
