//! The part of a fake volume server that moves volumes. What it decides, it decides as a real one does: with
//! [`Residence`]. It has no layers: a volume's content goes along with the answer of the old home.

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::routing::{delete, get, post};
use perigee_http::{Client, Failure, Json, Reply};
use perigee_model::home::{
    CallOff, Depart, Departed, HomeRefused, HomeState, Place, Residence, ServerAddresses,
    TakeVolume, Tenure, VolumeHome,
};
use perigee_model::switchover::WriterEpochs;
use perigee_model::volume::{IoStats, VolumeSource};
use perigee_model::{Epoch, Incarnation, Problem, VolumeName};
use serde::{Deserialize, Serialize};

use super::{CreateVolume, Inside, Shared, Volume, hang, volume_info};

/// With a real volume server the content is fetched as layers.
#[derive(Serialize, Deserialize)]
struct DepartedWithData {
    departed: Departed,
    data: Vec<u8>,
}

/// What a test looks at or changes of volumes that move.
#[derive(Default)]
pub struct Moves {
    residences: std::collections::BTreeMap<VolumeName, Residence>,
    /// Kept for their new homes.
    pub departed: std::collections::BTreeMap<VolumeName, Volume>,
    /// A volume that comes here misses so much of its data.
    pub missing_bytes: u64,
    /// Why it can't be copied now.
    pub copying_fails: Option<String>,
    /// No volume is taken, and none departs: as if the other host did not answer.
    pub stands_still: bool,
    /// What is asked for is done, and the answers are lost.
    pub loses_answers: bool,
    /// Every volume has to stay.
    pub lets_none_go: bool,
    /// What its old home has let go can't be stored here.
    pub stores_none: bool,
}

pub fn routes() -> Router<std::sync::Arc<std::sync::Mutex<Inside>>> {
    Router::new()
        .route("/v1/volumes/{volume}/home", get(home))
        .route("/v1/volumes/{volume}/take", post(take))
        .route("/v1/volumes/{volume}/depart", post(depart))
        .route("/v1/volumes/{volume}/refuse", post(refuse))
        .route("/v1/volumes/{volume}/return", post(take_back))
        .route("/v1/volumes/{volume}/departed", delete(forget))
}

pub fn refused(why: HomeRefused) -> Failure {
    match why {
        HomeRefused::NotHere => Problem::not_found("move the volume", why).into(),
        why => Problem::conflict("move the volume", why).into(),
    }
}

impl Inside {
    pub fn residence(&self, volume: &VolumeName) -> Residence {
        match self.moves.residences.get(volume) {
            Some(residence) => residence.clone(),
            None if self.volumes.contains_key(volume) => {
                Residence::here(Tenure::first(Incarnation(1)))
            }
            None => Residence::unknown(),
        }
    }

    pub fn put_residence(&mut self, volume: &VolumeName, residence: Residence) {
        self.moves.residences.insert(volume.clone(), residence);
    }

    /// The volume is deleted.
    pub fn remove_residence(&mut self, volume: &VolumeName) {
        let before = self.residence(volume);
        self.put_residence(volume, before.delete());
    }

    /// The host is set up anew: it knows nothing of the volume.
    pub fn wipe(&mut self, volume: &VolumeName) {
        self.moves.residences.remove(volume);
        self.volumes.remove(volume);
    }

    pub fn home_of(&self, volume: &VolumeName) -> Result<Json<VolumeHome>, Failure> {
        if self.moves.loses_answers {
            return Err(Problem::unavailable("move the volume", "the answer is lost").into());
        }
        let residence = self.residence(volume);
        let home = match residence.place {
            Place::Here(tenure) => {
                HomeState::Here { tenure, missing_bytes: self.moves.missing_bytes }
            }
            Place::Departed { tenure, to } => HomeState::Departed { tenure, to },
            Place::NotHere => HomeState::NotHere { refused: residence.spent, had: residence.had },
        };
        let failed = self.moves.copying_fails.clone();
        Ok(Json(VolumeHome { volume: volume.clone(), home, failed }))
    }
}

async fn home(State(inside): Shared, Path(volume): Path<VolumeName>) -> Reply<VolumeHome> {
    inside.lock().expect("lock").home_of(&volume)
}

async fn take(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Json(ask): Json<TakeVolume>,
) -> Reply<VolumeHome> {
    {
        let inside = inside.lock().expect("lock");
        if inside.residence(&volume).take(ask.tenure).map_err(refused)?.is_none() {
            return inside.home_of(&volume);
        }
        if inside.moves.stands_still {
            return Err(Problem::unavailable("move the volume", "its home is silent").into());
        }
    }
    hang(&inside).await;
    let from = Client::new(&ask.from.control_url, std::time::Duration::from_secs(10))?;
    let order = Depart { tenure: ask.tenure, to: ask.to };
    let DepartedWithData { departed, data } =
        from.post(&format!("/v1/volumes/{volume}/depart"), &order).await?;
    let mut inside = inside.lock().expect("lock");
    if inside.moves.stores_none {
        return Err(Problem::unavailable("take the volume", "the pool's disk fails").into());
    }
    // It may have been refused meanwhile.
    if let Some(after) = inside.residence(&volume).take(ask.tenure).map_err(refused)? {
        inside.put_residence(&volume, after);
        inside.attachments.remove(&volume);
        let new = CreateVolume::new(volume.clone(), Some(departed.size_bytes), VolumeSource::Empty);
        let mut info = volume_info(&new);
        (info.owner, info.epoch) = (departed.owner, departed.epochs.current);
        let (issued, returned) = (departed.epochs.issued_max.0, departed.epochs.returned_max.0);
        let taken = Volume { info, issued, returned, data, stats: IoStats::default() };
        inside.volumes.insert(volume.clone(), taken);
    }
    inside.home_of(&volume)
}

async fn depart(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Json(ask): Json<Depart>,
) -> Reply<DepartedWithData> {
    let mut inside = inside.lock().expect("lock");
    if inside.moves.stands_still {
        return Err(Problem::unavailable("let the volume go", "not now").into());
    }
    if inside.moves.lets_none_go {
        return Err(Problem::conflict("let the volume go", "a client's clone stands on it").into());
    }
    if let Some(after) = inside.residence(&volume).depart(ask.tenure, &ask.to).map_err(refused)? {
        inside.put_residence(&volume, after);
        let gone = inside.volumes.remove(&volume).expect("a volume that is here");
        inside.moves.departed.insert(volume.clone(), gone);
        let ServerAddresses { nbd_addr, .. } = ask.to;
        inside.attachments.insert(volume.clone(), nbd_addr);
    }
    let gone = &inside.moves.departed[&volume];
    let departed = Departed {
        tenure: ask.tenure.next(),
        size_bytes: gone.info.size_bytes,
        epochs: WriterEpochs {
            current: gone.info.epoch,
            issued_max: Epoch(gone.issued),
            returned_max: Epoch(gone.returned),
        },
        chain: Vec::new(),
        tenant: gone.info.tenant.clone(),
        cache: gone.info.cache,
        owner: gone.info.owner.clone(),
        leave_site: gone.info.leave_site,
    };
    Ok(Json(DepartedWithData { departed, data: gone.data.clone() }))
}

async fn refuse(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Json(ask): Json<CallOff>,
) -> Reply<VolumeHome> {
    let mut inside = inside.lock().expect("lock");
    if let Some(after) = inside.residence(&volume).refuse(ask.tenure) {
        inside.put_residence(&volume, after);
    }
    inside.home_of(&volume)
}

async fn take_back(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Json(ask): Json<CallOff>,
) -> Reply<VolumeHome> {
    let mut inside = inside.lock().expect("lock");
    if let Some(after) = inside.residence(&volume).take_back(ask.tenure).map_err(refused)? {
        inside.put_residence(&volume, after);
        if let Some(back) = inside.moves.departed.remove(&volume) {
            inside.volumes.insert(volume.clone(), back);
            inside.attachments.remove(&volume);
        }
    }
    inside.home_of(&volume)
}

async fn forget(
    State(inside): Shared,
    Path(volume): Path<VolumeName>,
    Query(query): Query<std::collections::BTreeMap<String, u64>>,
) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    if let Some(after) = inside.residence(&volume).forget(Tenure(query["tenure"])) {
        inside.put_residence(&volume, after);
        inside.moves.departed.remove(&volume);
    }
    Ok(Json(()))
}
