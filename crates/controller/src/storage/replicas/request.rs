//! Replicas as people ask for them and look at them.

use std::sync::Arc;

use perigee_model::limits::{REPLICA_EVERY_S, REPLICA_POINTS};
use perigee_model::replica::{Replica, ReplicateVolume};
use perigee_model::{HostId, Problem, SiteId, VolumeName};

use super::{ReplicaIntent, ReplicaRecord, intent_key, intents_of, kept, record_key, records_of};
use crate::cluster::{Cluster, HostLink};
use crate::records::{VolumeRecord, volume_key};
use crate::storage::{backups, volumes};

/// Records what is wanted, and starts the driver. The answer comes at once.
///
/// # Errors
/// `NotFound` if there is no such volume or site; `Conflict` if the volume is at that site, or is a job's own.
pub async fn replicate(
    cluster: &Arc<Cluster>,
    volume: &VolumeName,
    ask: &ReplicateVolume,
) -> Result<Replica, Problem> {
    let what = format!("can't replicate volume {volume} to {}", ask.to);
    REPLICA_EVERY_S.check(ask.every_s).map_err(|error| error.problem(&what))?;
    REPLICA_POINTS.check(ask.keep).map_err(|error| error.problem(&what))?;
    let home = volumes::find(cluster, volume).await?.home;
    if cluster.records.read::<VolumeRecord>(&volume_key(volume)).await?.is_none() {
        let why = "it was made for a job and ends with it";
        return Err(Problem::conflict(what, why));
    }
    backups::check_whole(cluster, &what, volume).await?;
    let home = cluster.hosts.get(&home)?;
    if home.addresses.site == ask.to {
        let why = format!("its home {} is at that site", home.id);
        return Err(Problem::conflict(what, why).next("choose another site: `perigee site list`"));
    }
    let key = record_key(volume, &ask.to);
    let host = match cluster.records.read::<ReplicaRecord>(&key).await? {
        Some(there) => there.view.host,
        None => host_at(cluster, &what, &ask.to).await?.id.clone(),
    };
    let view = Replica {
        volume: volume.clone(),
        site: ask.to.clone(),
        host,
        every_s: ask.every_s,
        keep: ask.keep,
        complete_ms: None,
        points: 0,
        behind_bytes: None,
        missing_bytes: None,
        stopping: false,
        kept: None,
        problem: String::new(),
    };
    let record = ReplicaRecord::new(view);
    let intent = ReplicaIntent {
        volume: volume.clone(),
        site: ask.to.clone(),
        every_s: ask.every_s,
        keep: ask.keep,
        stop: false,
    };
    // One that is just being dropped has both records or none.
    let turn = cluster.replica_records.lock().await;
    // Nothing is written if it is there.
    cluster.records.create(&key, &record).await?;
    cluster.records.put(&intent_key(volume, &ask.to), &intent).await?;
    drop(turn);
    cluster.drive_replica(volume, &ask.to);
    shown_at(cluster, volume, &ask.to).await
}

/// The host with the most room at a site.
///
/// # Errors
/// `NotFound` if no host is at the site; `Unavailable` if none takes it.
pub(super) async fn host_at(
    cluster: &Cluster,
    what: &str,
    site: &SiteId,
) -> Result<Arc<HostLink>, Problem> {
    let hosts = cluster.hosts.all();
    if !hosts.iter().any(|host| host.addresses.site == *site) {
        return Err(Problem::not_found(what, format!("no host is at site {site}"))
            .next("`perigee site list` shows the sites"));
    }
    volumes::roomiest_of(cluster, |host| host.addresses.site == *site).await
}

/// Ends a replica; the answer comes at once, and what the replica has is dropped in the background.
///
/// # Errors
/// `NotFound` if there is none.
pub async fn stop(
    cluster: &Arc<Cluster>,
    volume: &VolumeName,
    site: &SiteId,
) -> Result<Replica, Problem> {
    let key = intent_key(volume, site);
    let Some(mut intent) = cluster.records.read::<ReplicaIntent>(&key).await? else {
        return Err(no_replica(volume, site));
    };
    // It may be gone a moment after the driver hears of this.
    let mut view = shown_at(cluster, volume, site).await?;
    intent.stop = true;
    cluster.records.put(&key, &intent).await?;
    cluster.drive_replica(volume, site);
    view.stopping = true;
    Ok(view)
}

fn no_replica(volume: &VolumeName, site: &SiteId) -> Problem {
    let what = format!("the replica of volume {volume} at {site}");
    Problem::not_found(what, "there is none")
        .next(format!("`perigee volume info {volume}` shows its replicas"))
}

async fn shown_at(
    cluster: &Cluster,
    volume: &VolumeName,
    site: &SiteId,
) -> Result<Replica, Problem> {
    let mut all = of_volume(cluster, volume).await?;
    all.retain(|replica| replica.site == *site);
    all.pop().ok_or_else(|| no_replica(volume, site))
}

/// The volume's replicas.
///
/// # Errors
/// If the store can't be read.
pub async fn of_volume(cluster: &Cluster, volume: &VolumeName) -> Result<Vec<Replica>, Problem> {
    shown(cluster, &records_of(volume), &intents_of(volume)).await
}

/// All replicas.
///
/// # Errors
/// If the store can't be read.
pub async fn list(cluster: &Cluster) -> Result<Vec<Replica>, Problem> {
    shown(cluster, "replicas/", super::INTENTS).await
}

/// The hosts between which a round of a replica is under way: the volume's home and the replica's host.
///
/// # Errors
/// If the store can't be read.
pub async fn being_shipped(cluster: &Cluster) -> Result<Vec<(HostId, HostId)>, Problem> {
    let records: Vec<ReplicaRecord> = cluster.records.list("replicas/").await?;
    let under_way = records.into_iter().filter(|record| record.view.missing_bytes.is_some());
    Ok(under_way.filter_map(|record| Some((record.home?, record.view.host))).collect())
}

async fn shown(cluster: &Cluster, records: &str, intents: &str) -> Result<Vec<Replica>, Problem> {
    let intents: Vec<ReplicaIntent> = cluster.records.list(intents).await?;
    let mut all: Vec<Replica> = cluster
        .records
        .list::<ReplicaRecord>(records)
        .await?
        .into_iter()
        .map(|record| record.view)
        .collect();
    for shown in &mut all {
        let mut wanted = intents.iter();
        if let Some(intent) =
            wanted.find(|one| one.volume == shown.volume && one.site == shown.site)
        {
            (shown.every_s, shown.keep) = (intent.every_s, intent.keep);
            shown.stopping |= intent.stop;
        }
    }
    kept::show(cluster, &mut all).await?;
    Ok(all)
}

/// Refuses a move of the volume to a site that has a replica of it, because no other site would have a copy then.
///
/// # Errors
/// `Conflict` if there is one; if the store can't be read.
pub async fn check_far(
    cluster: &Cluster,
    volume: &VolumeName,
    host: &HostId,
) -> Result<(), Problem> {
    let Ok(host) = cluster.hosts.get(host) else { return Ok(()) };
    let replicas = of_volume(cluster, volume).await?;
    let Some(near) = replicas.iter().find(|replica| replica.site == host.addresses.site) else {
        return Ok(());
    };
    let what = format!("can't move volume {volume} to {}", host.id);
    let why = format!("its replica is at {}, and no other site would have a copy of it", near.site);
    Err(Problem::conflict(what, why).next(format!(
        "keep a replica at another site first, and end this one (perigee volume replicate {volume} --to {} --stop); \
         or move it anyway (perigee volume move {volume} {} --yes)",
        near.site, host.id
    )))
}
