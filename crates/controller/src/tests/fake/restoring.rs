//! Volumes that are made of backups, and layers that still get bytes from one.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::{get, post};
use perigee_http::{Json, Reply};
use perigee_model::backup::{
    BackupTarget, DeleteBackup, FoundBackup, RestoreVolume, RestoringLayer,
};
use perigee_model::volume::{CreateVolume, Step, VolumeInfo, VolumeSource};
use perigee_model::{BackupName, LayerId, VolumeName};
use uuid::Uuid;

use super::{Inside, IoStats, Shared, Volume, volume_info};

/// What a fake has of backups.
#[derive(Default)]
pub struct Restores {
    /// A backup with this name is at each target.
    pub backup: Option<BackupName>,
    /// The layers to which bytes are still to come.
    pub layers: Vec<RestoringLayer>,
    /// It reads all bytes first, whatever it is asked for, as an older version does.
    pub is_older: bool,
    pub deleted: Vec<BackupName>,
}

/// So many bytes come after each volume.
pub const TO_COME_BYTES: u64 = 1 << 20;

pub fn routes() -> Router<Arc<Mutex<Inside>>> {
    Router::new()
        .route("/v1/backups/list", post(list))
        .route("/v1/backups/restoring", get(restoring))
        .route("/v1/backups/delete", post(delete))
        .route("/v1/volumes/{volume}/restore", post(restore))
}

fn step<T: serde::Serialize>(step: &Step<T>) -> String {
    serde_json::to_string(step).expect("JSON") + "\n"
}

async fn list(State(inside): Shared, Json(_): Json<BackupTarget>) -> Reply<Vec<FoundBackup>> {
    let name = inside.lock().expect("lock").restores.backup.clone();
    let found = |name| FoundBackup {
        name,
        volume: None,
        taken_ms: 1,
        size_bytes: 1 << 30,
        data_bytes: TO_COME_BYTES,
        problem: String::new(),
    };
    Ok(Json(name.map(found).into_iter().collect()))
}

async fn restoring(State(inside): Shared) -> Reply<Vec<RestoringLayer>> {
    Ok(Json(inside.lock().expect("lock").restores.layers.clone()))
}

async fn delete(State(inside): Shared, Json(ask): Json<DeleteBackup>) -> String {
    inside.lock().expect("lock").restores.deleted.push(ask.backup);
    step(&Step::Done(()))
}

async fn restore(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Json(ask): Json<RestoreVolume>,
) -> String {
    let mut inside = inside.lock().expect("lock");
    let mut info: VolumeInfo =
        volume_info(&CreateVolume::new(name.clone(), Some(1 << 30), VolumeSource::Empty));
    let at_once = ask.at_once.filter(|_| !inside.restores.is_older);
    info.chain = vec![LayerId(Uuid::new_v4()), at_once.unwrap_or(LayerId(Uuid::new_v4()))];
    if let Some(layer) = at_once {
        info.remote_bytes = TO_COME_BYTES;
        inside.restores.layers.push(RestoringLayer {
            layer,
            backup: ask.backup.to_string(),
            from: ask.from,
            missing_bytes: TO_COME_BYTES,
            problem: String::new(),
            is_damaged: false,
        });
    }
    let (issued, returned, data, stats) = (1, 0, Vec::new(), IoStats::default());
    let volume = Volume { info: info.clone(), issued, returned, data, stats };
    inside.volumes.insert(name, volume);
    step(&Step::Done(info))
}
