//! Replicas whose rented host is given back, and whose disk is kept at its provider ([`perigee_model::kept`]).
//!
//! From the moment on when that is wanted the replica's driver makes no round and tells the home nothing: the home keeps the layer that the
//! snapshot will have. The replica's record says that it stands still, and only then the provider is asked. When a host joins whose disk was made
//! of the snapshot, the replica is at that host, and its next round ships only what has changed.

use perigee_model::job::HostState;
use perigee_model::kept::{KeptDisk, KeptReplica, KeptState};
use perigee_model::replica::Replica;
use perigee_model::{HostId, Problem, RentalId, VolumeName};

use super::{ReplicaRecord, request};
use crate::cluster::Cluster;
use crate::records::{
    HostRecord, KEPT_DISKS, KeptUse, VolumeRecord, is_late, kept_use_key, volume_key,
};

/// Where a replica is.
pub(super) enum Place {
    /// At the host of its record.
    Here,
    /// Its disk is kept, or is about to be.
    Kept(RentalId),
    /// At this host from now on.
    At(HostId),
}

fn has(kept: &KeptDisk, replica: &Replica) -> bool {
    kept.host == replica.host
        && kept.site == replica.site
        && kept.volumes.contains(&replica.volume)
        && matches!(kept.state, KeptState::Wanted | KeptState::Asked | KeptState::Kept)
}

/// Where it is now.
///
/// # Errors
/// If the store can't be read.
pub(super) async fn place(cluster: &Cluster, record: &ReplicaRecord) -> Result<Place, Problem> {
    let view = &record.view;
    let all: Vec<KeptDisk> = cluster.records.list(KEPT_DISKS).await?;
    if let Some(kept) = all.into_iter().find(|kept| has(kept, view)) {
        let used: Option<KeptUse> = cluster.records.read(&kept_use_key(&kept.id)).await?;
        let user = used.and_then(|used| used.rental);
        if kept.state == KeptState::Kept
            && let Some(host) = joined(cluster, user.as_ref())
        {
            return Ok(Place::At(host));
        }
        let stands = match kept.state {
            KeptState::Kept => {
                comes(cluster, user.as_ref())
                    || !has_other_host(cluster, view)
                    || !has_home(cluster, &view.volume).await?
            }
            // What was to be kept is not waited for any longer than its host waits.
            _ => !is_late(&kept, |ms| cluster.clock.age_ms(ms)),
        };
        if stands {
            return Ok(Place::Kept(kept.id));
        }
    }
    let is_known = cluster.hosts.get(&view.host).is_ok()
        || cluster.records.read::<HostRecord>(&format!("hosts/{}", view.host)).await?.is_some();
    // A host of one's own may come back, and while the home is lost this may be the last copy.
    let rental = cluster.rentals.of_host(&view.host);
    let never_back = rental.is_some_and(|one| one.state.is_over());
    if is_known || !never_back || !has_home(cluster, &view.volume).await? {
        return Ok(Place::Here);
    }
    // It is made anew where it is wanted, if some host is there.
    let other = request::host_at(cluster, "can't replicate", &view.site).await;
    Ok(other.map_or(Place::Here, |host| Place::At(host.id.clone())))
}

/// The host with a disk made of the snapshot, once it has joined.
fn joined(cluster: &Cluster, user: Option<&RentalId>) -> Option<HostId> {
    let host = user.and_then(|rental| HostId::new(rental.as_str()).ok());
    host.filter(|host| cluster.hosts.get(host).is_ok())
}

/// Whether that host may still join.
fn comes(cluster: &Cluster, user: Option<&RentalId>) -> bool {
    let rental = user.and_then(|rental| cluster.rentals.get(rental));
    rental.is_some_and(|one| !one.state.is_over())
}

/// Whether another host of the site can have the replica now.
fn has_other_host(cluster: &Cluster, replica: &Replica) -> bool {
    cluster.hosts.up().iter().any(|host| {
        let is_there = host.addresses.site == replica.site && host.id != replica.host;
        is_there && cluster.hosts.drain(&host.id).is_none()
    })
}

/// Whether the volume's home is up. If not, a replica may be the last copy.
///
/// # Errors
/// If the store can't be read.
pub async fn has_home(cluster: &Cluster, volume: &VolumeName) -> Result<bool, Problem> {
    let record: Option<VolumeRecord> = cluster.records.read(&volume_key(volume)).await?;
    Ok(record.is_some_and(|one| cluster.hosts.state(&one.home) == HostState::Up))
}

/// Whether a replica stands still for this disk.
pub fn is_still(record: &ReplicaRecord, kept: &RentalId) -> bool {
    record.held.as_ref() == Some(kept)
}

/// Those at a host.
///
/// # Errors
/// If the store can't be read.
pub async fn at_host(cluster: &Cluster, host: &HostId) -> Result<Vec<ReplicaRecord>, Problem> {
    let mut all: Vec<ReplicaRecord> = cluster.records.list("replicas/").await?;
    let shown = request::list(cluster).await?;
    all.retain(|record| {
        let view = &record.view;
        let is_it = |one: &&Replica| one.volume == view.volume && one.site == view.site;
        view.host == *host && shown.iter().find(is_it).is_some_and(|one| !one.stopping)
    });
    Ok(all)
}

/// Says of each replica whose disk is kept that this is so.
///
/// # Errors
/// If the store can't be read.
pub(super) async fn show(cluster: &Cluster, replicas: &mut [Replica]) -> Result<(), Problem> {
    if replicas.is_empty() {
        return Ok(());
    }
    let all: Vec<KeptDisk> = cluster.records.list(KEPT_DISKS).await?;
    for replica in replicas {
        replica.kept = all.iter().find(|kept| has(kept, replica)).map(KeptReplica::of);
    }
    Ok(())
}
