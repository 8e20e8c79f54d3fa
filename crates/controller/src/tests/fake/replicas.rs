//! The part of a fake volume server that keeps replicas of volumes and makes one of them the volume.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::{get, post};
use perigee_http::{Json, Reply};
use perigee_model::home::{Place, Tenure, VolumeHome};
use perigee_model::replica::{
    PinReplica, PromoteReplica, PullReplica, PulledReplica, ReplicaPin, ReplicaPoint, Supersede,
    Superseded, VolumeReplica,
};
use perigee_model::volume::ImageInfo;
use perigee_model::{ImageName, Incarnation, LayerId, Problem, VolumeName};

use super::{FakeHost, Inside, Shared};

/// What a test looks at or changes.
#[derive(Default)]
pub struct Replicas {
    /// The newest first.
    pub points: Vec<ReplicaPoint>,
    /// Rounds that were begun.
    pub pulls: u64,
    /// A round that begins has no other points than before.
    pub pulls_nothing: bool,
    /// No promotion is answered, and none is done.
    pub promotes_none: bool,
    /// The home does not give the volume up.
    pub gives_none_up: bool,
    /// Incarnations that don't begin here any more.
    pub over: HashSet<(VolumeName, Incarnation)>,
    /// What is kept as images.
    pub lost: Vec<Tenure>,
    pub pins: BTreeMap<VolumeName, ReplicaPin>,
    /// The volumes of which it has dropped a replica.
    pub dropped: Vec<VolumeName>,
}

pub fn point(number: u64) -> ReplicaPoint {
    let layer = LayerId(uuid::Uuid::from_u128(u128::from(number)));
    ReplicaPoint {
        layer,
        taken_ms: number,
        missing_bytes: 0,
        problem: String::new(),
        broken: false,
    }
}

pub fn routes() -> Router<Arc<Mutex<Inside>>> {
    Router::new()
        .route("/v1/volumes/{volume}/replica", get(replica).delete(drop_replica))
        .route("/v1/volumes/{volume}/replica/pull", post(pull))
        .route("/v1/volumes/{volume}/replica/pins", get(pins).post(pin))
        .route("/v1/volumes/{volume}/replica/promote", post(promote))
        .route("/v1/volumes/{volume}/supersede", post(supersede))
}

impl FakeHost {
    /// The tenure with which the volume is here.
    pub fn has(&self, volume: &VolumeName) -> Option<Tenure> {
        let inside = self.inside();
        match inside.residence(volume).place {
            Place::Here(tenure) => Some(tenure),
            _ => None,
        }
    }
}

async fn replica(State(inside): Shared, Path(volume): Path<VolumeName>) -> Reply<VolumeReplica> {
    let inside = inside.lock().expect("lock");
    let points = inside.replicas.points.clone();
    let tenure = points.first().map(|_| Tenure::first(Incarnation(1)));
    Ok(Json(VolumeReplica { volume, tenure, layers: points.len() as u64, points }))
}

async fn drop_replica(State(inside): Shared, Path(volume): Path<VolumeName>) -> Reply<()> {
    let replicas = &mut inside.lock().expect("lock").replicas;
    replicas.points.clear();
    replicas.dropped.push(volume);
    Ok(Json(()))
}

/// As the real one: all complete points but the newest are dropped, and a round of before is given up.
async fn pull(State(inside): Shared, Json(ask): Json<PullReplica>) -> Reply<PulledReplica> {
    let mut inside = inside.lock().expect("lock");
    inside.replicas.pulls += 1;
    if inside.replicas.pulls_nothing {
        return Ok(Json(PulledReplica { ships_bytes: 0 }));
    }
    let keep = usize::try_from(ask.keep).expect("few");
    inside.replicas.points.truncate(keep);
    let new = point(ask.taken_ms);
    inside.replicas.points.insert(0, new);
    Ok(Json(PulledReplica { ships_bytes: 0 }))
}

async fn pins(State(inside): Shared, Path(volume): Path<VolumeName>) -> Reply<Vec<ReplicaPin>> {
    let inside = inside.lock().expect("lock");
    Ok(Json(inside.replicas.pins.get(&volume).cloned().into_iter().collect()))
}

async fn pin(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Json(ask): Json<PinReplica>,
) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    inside.replicas.pins.remove(&volume);
    if let Some(layer) = ask.layer {
        let pin = ReplicaPin { replica: ask.replica, layer, filling: false, newer_bytes: 0 };
        inside.replicas.pins.insert(volume, pin);
    }
    Ok(Json(()))
}

async fn promote(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Json(ask): Json<PromoteReplica>,
) -> Reply<VolumeHome> {
    let mut inside = inside.lock().expect("lock");
    if inside.replicas.promotes_none {
        return Err(Problem::unavailable("promote", "nobody answers").into());
    }
    if inside.replicas.over.contains(&(volume.clone(), ask.tenure.incarnation())) {
        return Err(Problem::conflict("promote", "that is over").into());
    }
    let before = inside.residence(&volume);
    if let Some(after) = before.promote(ask.tenure).map_err(super::homes::refused)? {
        if !inside.replicas.points.iter().any(|point| point.layer == ask.layer) {
            return Err(Problem::not_found("promote", "no such point").into());
        }
        inside.replicas.points.clear();
        inside.put_volume(&volume);
        inside.put_residence(&volume, after);
    }
    inside.home_of(&volume)
}

async fn supersede(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Json(ask): Json<Supersede>,
) -> Reply<Superseded> {
    let mut inside = inside.lock().expect("lock");
    if inside.replicas.gives_none_up {
        return Err(Problem::unavailable("give up", "another host has blocks of it").into());
    }
    let which = ask.lost.incarnation();
    let image = ImageName::new(format!("{volume}-lost-{which}")).expect("a name");
    inside.replicas.over.insert((volume.clone(), which));
    let before = inside.residence(&volume);
    if matches!(before.place, Place::Here(here) if here.incarnation() == which) {
        let after = before.supersede(ask.lost).expect("it is here");
        inside.put_residence(&volume, after);
        inside.volumes.remove(&volume);
        inside.replicas.lost.push(ask.lost);
        let layer = LayerId(uuid::Uuid::new_v4());
        let info = ImageInfo { name: image.clone(), layer, ..super::image() };
        inside.images.insert(image.clone(), info);
    }
    let image = inside.images.contains_key(&image).then_some(image);
    Ok(Json(Superseded { image }))
}
