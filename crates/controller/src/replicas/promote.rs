//! A replica becomes the volume, because the volume's home is lost.
//!
//! The promotion is recorded before any host is asked, and goes on after a restart of the controller. The volume
//! gets a new incarnation, so that no session of the lost one goes on with content that is older than what it
//! has seen. The lost home is told as soon as it answers ([`super::lost`]).

use std::sync::Arc;

use futures_util::future::join_all;
use perigee_model::home::{Tenure, VolumeHome};
use perigee_model::replica::{PromoteReplica, PromoteVolume, Promotion, VolumeReplica};
use perigee_model::{HostId, Incarnation, LayerId, Problem, ProblemKind, SiteId, VolumeName};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::driver::forget;
use super::lost::{self, SupersededVolume};
use super::{ReplicaRecord, records_of};
use crate::cluster::{Cluster, HostLink, now_ms};
use crate::records::{VolumeRecord, volume_key};
use crate::volume_moves;

const PREFIX: &str = "promotions/";

/// A promotion that is not over.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct PromotionRecord {
    shown: Promotion,
    site: SiteId,
    layer: LayerId,
    /// The volume's tenure at the lost home; `None` if that never told it.
    lost: Option<Tenure>,
    /// The first one of the new incarnation.
    tenure: Tenure,
    /// The lost home may answer.
    forced: bool,
}

fn key(volume: &VolumeName) -> String {
    format!("{PREFIX}{volume}")
}

/// Makes the newest complete point of a replica the volume, or only says what would be lost.
///
/// # Errors
/// `NotFound` if there is no complete point; `Conflict` if the home answers and `force` is not set, or a job uses
/// the volume; `Unavailable` if the replica's host does not answer.
pub async fn promote(
    cluster: &Arc<Cluster>,
    volume: &VolumeName,
    ask: PromoteVolume,
) -> Result<Promotion, Problem> {
    if let Some(begun) = cluster.records.read::<PromotionRecord>(&key(volume)).await? {
        carry_out(cluster, &begun).await?;
        return Ok(begun.shown);
    }
    let record = choose(cluster, volume, &ask).await?;
    if !ask.force {
        check_is_lost(cluster, &record.shown).await?;
    }
    if ask.dry_run {
        return Ok(record.shown);
    }
    let _promoting = hold(cluster, volume)?;
    if !cluster.records.create(&key(volume), &record).await? {
        let why = "it is being promoted already";
        return Err(Problem::conflict(what(volume), why));
    }
    carry_out(cluster, &record).await?;
    Ok(record.shown)
}

fn what(volume: &VolumeName) -> String {
    format!("can't make a replica of volume {volume} the volume")
}

/// While a promotion is under way, no job that uses the volume begins, and it is neither moved nor deleted.
fn hold<'a>(
    cluster: &'a Cluster,
    volume: &VolumeName,
) -> Result<crate::cluster::Hold<'a>, Problem> {
    cluster.index.begin_deletion(volume).map_err(|why| {
        Problem::conflict(what(volume), why).next(
            "cancel the job or the move first: its disk can't go on with content that is older than what \
             it has seen",
        )
    })
}

/// The replica with the newest complete point.
async fn choose(
    cluster: &Cluster,
    volume: &VolumeName,
    ask: &PromoteVolume,
) -> Result<PromotionRecord, Problem> {
    let mut records: Vec<ReplicaRecord> = cluster.records.list(&records_of(volume)).await?;
    if let Some(host) = &ask.host {
        records.retain(|record| record.shown.host == *host);
    }
    if records.is_empty() {
        return Err(Problem::not_found(what(volume), "it has no such replica").next(format!(
            "`perigee volume replicate {volume} --to SITE` makes one, while the home is there"
        )));
    }
    let asked = records.iter().map(|record| points(cluster, record));
    let (mut newest, mut silent) = (None, None);
    for (record, answer) in records.iter().zip(join_all(asked).await) {
        match answer {
            Ok(replica) => {
                let Some(point) = replica.complete().cloned() else { continue };
                let is_newer = newest.as_ref().is_none_or(
                    |(_, best, _): &(_, perigee_model::replica::ReplicaPoint, _)| {
                        point.taken_ms > best.taken_ms
                    },
                );
                if is_newer {
                    newest = Some((record, point, replica.tenure));
                }
            }
            Err(problem) => silent = Some(problem),
        }
    }
    let Some((record, point, tenure)) = newest else {
        let why = "none of its replicas was ever complete";
        return Err(silent.unwrap_or_else(|| Problem::not_found(what(volume), why)));
    };
    let stored: Option<VolumeRecord> = cluster.records.read(&volume_key(volume)).await?;
    let Some(from) = stored.map(|stored| stored.home).or_else(|| record.home.clone()) else {
        return Err(Problem::not_found(what(volume), "its home was never known"));
    };
    let now_ms = now_ms();
    let shown = Promotion {
        volume: volume.clone(),
        to: record.shown.host.clone(),
        taken_ms: point.taken_ms,
        age_s: now_ms.saturating_sub(point.taken_ms) / 1000,
        behind_bytes: record.shown.behind_bytes,
        in_use: record.in_use,
        from,
    };
    // Incarnation 0 belongs to volumes that are older than incarnations.
    let incarnation = Incarnation(Uuid::new_v4().as_fields().0.max(1));
    Ok(PromotionRecord {
        shown,
        site: record.shown.site.clone(),
        layer: point.layer,
        lost: record.tenure.max(tenure),
        tenure: Tenure::first(incarnation),
        forced: ask.force,
    })
}

async fn points(cluster: &Cluster, record: &ReplicaRecord) -> Result<VolumeReplica, Problem> {
    let host = cluster.hosts.get(&record.shown.host)?;
    host.volume.get(&format!("/v1/volumes/{}/replica", record.shown.volume)).await
}

/// # Errors
/// `Conflict` while the home answers.
async fn check_is_lost(cluster: &Cluster, shown: &Promotion) -> Result<(), Problem> {
    let Promotion { volume, from, .. } = shown;
    let Ok(home) = cluster.hosts.get(from) else { return Ok(()) };
    match home.volume.get::<VolumeHome>(&format!("/v1/volumes/{volume}/home")).await {
        Err(problem) if problem.kind == ProblemKind::Unavailable => Ok(()),
        _ => {
            let why = format!("its home {from} answers");
            Err(Problem::conflict(what(volume), why).next(format!(
                "to move it without any loss: perigee volume move {volume} HOST; to give up what was \
                 written since the replica: --force"
            )))
        }
    }
}

/// Each step can be done again.
async fn carry_out(cluster: &Arc<Cluster>, record: &PromotionRecord) -> Result<(), Problem> {
    let Promotion { volume, from, to, .. } = &record.shown;
    let host = cluster.hosts.get(to)?;
    if let Some(lost) = record.lost {
        let superseded = SupersededVolume {
            volume: volume.clone(),
            host: from.clone(),
            lost,
            tenure: record.tenure,
            to: to.clone(),
        };
        lost::keep(cluster, &superseded).await?;
        // Where it answers, nothing is written there any more before the replica is the volume.
        if record.forced
            && let Err(problem) = lost::tell(cluster, &superseded).await
        {
            tracing::info!("volume {volume} at {from}: {problem}");
        }
    }
    let ask = PromoteReplica { layer: record.layer, tenure: record.tenure };
    let path = format!("/v1/volumes/{volume}/replica/promote");
    host.volume.post::<VolumeHome>(&path, &ask).await?;
    let at_home = |_: Option<VolumeRecord>| VolumeRecord {
        name: volume.clone(),
        home: to.clone(),
        seen: None,
    };
    cluster.records.update(&volume_key(volume), at_home).await?;
    volume_moves::forget(cluster, volume).await?;
    forget(cluster, volume, &record.site).await?;
    attach_others(cluster, volume, &host, from).await;
    tracing::warn!("volume {volume} is at {to} now; what {from} had written since is lost");
    cluster.records.remove(&key(volume)).await
}

/// A host that does not answer finds the volume when the lost home is back and tells it.
async fn attach_others(
    cluster: &Cluster,
    volume: &VolumeName,
    home: &Arc<HostLink>,
    from: &HostId,
) {
    for host in cluster.hosts.up().iter().filter(|host| host.id != home.id && host.id != *from) {
        let told = volume_moves::attach_at(cluster, host, volume, &home.addresses.nbd_addr).await;
        if let Err(problem) = told {
            tracing::warn!("volume {volume} at {}: {problem}", host.id);
        }
    }
}

/// Goes on with promotions that a controller has left in the middle, or that a host did not answer.
pub(super) async fn resume(cluster: &Arc<Cluster>) -> Result<(), Problem> {
    for record in cluster.records.list::<PromotionRecord>(PREFIX).await? {
        // Whoever asked for it is at it.
        let Ok(_promoting) = hold(cluster, &record.shown.volume) else { continue };
        if let Err(problem) = carry_out(cluster, &record).await {
            tracing::warn!("{}: {problem}", what(&record.shown.volume));
        }
    }
    Ok(())
}
