//! A replica becomes the volume, because the volume's home is lost.
//!
//! The promotion is recorded before any host is asked, and goes on after a restart of the controller
//! ([`super::carry_out`]). The volume gets a new incarnation, so that no session of the lost one goes on with content
//! that is older than what it has seen. The lost home is told as soon as it answers ([`super::lost`]).

use std::cmp::Reverse;
use std::sync::Arc;

use futures_util::future::join_all;
use perigee_model::home::Tenure;
use perigee_model::job::HostState;
use perigee_model::replica::{PromoteVolume, Promotion, ReplicaPoint, VolumeReplica};
use perigee_model::{HostId, Incarnation, LayerId, Problem, VolumeName};
use uuid::Uuid;

use super::carry_out::{self, PromotionRecord, answers, key};
use super::{ReplicaRecord, records_of};
use crate::cluster::Cluster;
use crate::records::{VolumeRecord, volume_key};

/// Makes the newest complete point of a replica the volume, or only says what would be lost. A promotion that is
/// recorded is gone on with.
///
/// # Errors
/// `NotFound` if there is no complete point; `Conflict` if the home answers and `force` is not set, or a job uses
/// the volume; `Unavailable` if a host does not answer that has to.
pub async fn promote(
    cluster: &Arc<Cluster>,
    volume: &VolumeName,
    ask: PromoteVolume,
) -> Result<Promotion, Problem> {
    if ask.cancel {
        return carry_out::cancel(cluster, volume).await;
    }
    if let Some(begun) = cluster.records.read::<PromotionRecord>(&key(volume)).await? {
        return match ask.dry_run {
            true => Ok(begun.view),
            false => carry_out::go_on(cluster, volume, Some(&ask)).await,
        };
    }
    let record = choose(cluster, volume, &ask).await?;
    if !ask.force {
        check_is_lost(cluster, &record.view).await?;
    }
    if ask.dry_run {
        return Ok(record.view);
    }
    carry_out::begin(cluster, &record).await
}

pub(super) fn what(volume: &VolumeName) -> String {
    format!("can't make a replica of volume {volume} the volume")
}

/// A replica and the point of it that is taken.
type Chosen<'a> = (&'a ReplicaRecord, ReplicaPoint);

/// The replica with the newest complete point, or the one that was asked for.
///
/// # Errors
/// `NotFound` if there is no such point; `Unavailable` if a replica that may have a newer one does not answer.
pub(super) async fn choose(
    cluster: &Cluster,
    volume: &VolumeName,
    ask: &PromoteVolume,
) -> Result<PromotionRecord, Problem> {
    let mut records: Vec<ReplicaRecord> = cluster.records.list(&records_of(volume)).await?;
    let stored: Option<VolumeRecord> = cluster.records.read(&volume_key(volume)).await?;
    let home = stored.map(|stored| stored.home);
    // Replicas of what the volume was before an earlier promotion don't know its present home.
    let at_home = records.iter().find(|record| home.is_some() && record.home == home);
    let incarnation = at_home.and_then(|record| record.tenure).map(Tenure::incarnation);
    if let Some(host) = &ask.host {
        records.retain(|record| record.view.host == *host);
    }
    if records.is_empty() {
        return Err(Problem::not_found(what(volume), "it has no such replica").next(format!(
            "`perigee volume replicate {volume} --to SITE` makes one, while the home is there"
        )));
    }
    let (present, mut silent) = ask_replicas(cluster, volume, &records).await;
    let counts = |replica: &VolumeReplica| {
        let of = replica.tenure.map(Tenure::incarnation);
        ask.host.is_some() || incarnation.is_none() || of == incarnation
    };
    let present = present.into_iter().filter(|(_, replica)| counts(replica));
    let Some((record, point)) = newest(cluster, present, ask.layer) else {
        let none = || none_complete(volume, ask.layer);
        return Err(silent.pop().map_or_else(none, |(_, problem)| problem));
    };
    check_is_newest(cluster, volume, (record, &point), &silent)?;
    let Some(from) = home.or_else(|| record.home.clone()) else {
        return Err(Problem::not_found(what(volume), "its home was never known"));
    };
    let silent = cluster.hosts.silent_for(&from).as_secs();
    let age_s = (cluster.clock.age_ms(point.taken_ms) / 1000).saturating_sub(silent);
    Ok(recorded(volume, from, (record, point), (age_s, silent), ask.force))
}

type Present<'a> = Vec<(&'a ReplicaRecord, VolumeReplica)>;
type Silent<'a> = Vec<(&'a ReplicaRecord, Problem)>;

/// What the replicas' hosts have, and those that don't say so.
async fn ask_replicas<'a>(
    cluster: &Cluster,
    volume: &VolumeName,
    records: &'a [ReplicaRecord],
) -> (Present<'a>, Silent<'a>) {
    let asked = records.iter().map(|record| points(cluster, &record.view.host, volume));
    let (mut present, mut silent) = (Vec::new(), Vec::new());
    for (record, answer) in records.iter().zip(join_all(asked).await) {
        match answer {
            Ok(replica) => present.push((record, replica)),
            Err(problem) => silent.push((record, problem)),
        }
    }
    (present, silent)
}

/// How new a point is; larger is newer. One that was taken while the controller's clock was wrong is not the newest one because of
/// that.
fn newness(cluster: &Cluster, taken_ms: u64) -> impl Ord + use<> {
    (Reverse(cluster.clock.age_ms(taken_ms)), taken_ms)
}

/// The newest complete point of these replicas, of the first replica that has it; with `layer` only that point counts.
fn newest<'a>(
    cluster: &Cluster,
    replicas: impl Iterator<Item = (&'a ReplicaRecord, VolumeReplica)>,
    layer: Option<LayerId>,
) -> Option<Chosen<'a>> {
    let wanted = |point: &ReplicaPoint| {
        point.missing_bytes == 0 && layer.is_none_or(|layer| point.layer == layer)
    };
    let newness = |chosen: &Chosen<'_>| newness(cluster, chosen.1.taken_ms);
    replicas
        .filter_map(|(record, replica)| Some((record, replica.points.into_iter().find(wanted)?)))
        .reduce(|best, next| if newness(&next) > newness(&best) { next } else { best })
}

fn none_complete(volume: &VolumeName, layer: Option<LayerId>) -> Problem {
    let why = match layer {
        Some(layer) => format!("point {layer} of its replica is not there any more"),
        None => "none of its replicas was ever complete".to_owned(),
    };
    Problem::not_found(what(volume), why)
        .next(format!("`perigee volume info {volume}` shows its replicas"))
}

/// Whether none of the replicas that don't answer has a newer complete point, as far as is known.
///
/// # Errors
/// `Unavailable` if one has.
fn check_is_newest(
    cluster: &Cluster,
    volume: &VolumeName,
    (record, point): (&ReplicaRecord, &ReplicaPoint),
    silent: &Silent<'_>,
) -> Result<(), Problem> {
    let is_newer = |silent: &ReplicaRecord| {
        let complete_ms = silent.view.complete_ms;
        complete_ms.is_some_and(|ms| newness(cluster, ms) > newness(cluster, point.taken_ms))
    };
    let Some((newer, _)) = silent.iter().find(|(silent, _)| is_newer(silent)) else {
        return Ok(());
    };
    let (better, best) = (&newer.view.host, &record.view.host);
    let why = format!("{better} has a newer replica than {best} and does not answer");
    Err(Problem::unavailable(what(volume), why).next(format!(
        "bring {better} back; to take the older one: perigee volume promote {volume} --host {best}"
    )))
}

fn recorded(
    volume: &VolumeName,
    from: HostId,
    (record, point): Chosen<'_>,
    (age_s, silent_s): (u64, u64),
    forced: bool,
) -> PromotionRecord {
    let view = Promotion {
        volume: volume.clone(),
        to: record.view.host.clone(),
        layer: point.layer,
        taken_ms: point.taken_ms,
        age_s,
        silent_s,
        behind_bytes: record.view.behind_bytes,
        in_use: record.in_use,
        from,
    };
    // Volumes that were made before there were incarnations have incarnation 0.
    let incarnation = Incarnation(Uuid::new_v4().as_fields().0.max(1));
    PromotionRecord {
        volume: volume.clone(),
        view,
        site: record.view.site.clone(),
        layer: point.layer,
        lost: record.tenure,
        tenure: Tenure::first(incarnation),
        forced,
        decided: false,
    }
}

/// What a host has of a volume's replica.
pub(super) async fn points(
    cluster: &Cluster,
    host: &HostId,
    volume: &VolumeName,
) -> Result<VolumeReplica, Problem> {
    let host = cluster.hosts.get(host)?;
    host.volume.get(&format!("/v1/volumes/{volume}/replica")).await
}

/// # Errors
/// `Conflict` while the home answers; `Unavailable` while it may only be slow.
async fn check_is_lost(cluster: &Cluster, view: &Promotion) -> Result<(), Problem> {
    let Promotion { volume, from, .. } = view;
    if answers(cluster, volume, from, false).await {
        let why = format!("its home {from} answers");
        return Err(Problem::conflict(what(volume), why).next(format!(
            "to move it without any loss: perigee volume move {volume} HOST; to give up what was \
             written since the replica: --force"
        )));
    }
    if cluster.hosts.get(from).is_ok() && cluster.hosts.state(from) == HostState::Up {
        let why = format!("its home {from} may only be slow: {}", cluster.hosts.silence(from));
        return Err(Problem::unavailable(what(volume), why).next(
            "try again when `perigee host list` shows it as unreachable; if only its volume server is lost: --force",
        ));
    }
    Ok(())
}
