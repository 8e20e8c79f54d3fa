//! The part of a fake volume server that has layers to which bytes are still to come from a backup.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use perigee_http::{Json, Reply};
use perigee_model::backup::RestoringLayer;
use perigee_model::{BackupName, VolumeName};

use super::{Inside, Shared};

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
    /// How often it was asked for the layers.
    pub looked: u64,
    /// The volumes that were made of backups, or were to be.
    pub asked: Vec<VolumeName>,
    /// This volume can't be made.
    pub refuses: Option<VolumeName>,
    /// No volume is made meanwhile.
    pub hangs: bool,
}

/// So many bytes come after each volume.
pub const TO_COME_BYTES: u64 = 1 << 20;

pub fn routes() -> Router<Arc<Mutex<Inside>>> {
    Router::new().route("/v1/backups/restoring", get(restoring))
}

async fn restoring(State(inside): Shared) -> Reply<Vec<RestoringLayer>> {
    let restores = &mut inside.lock().expect("lock").restores;
    restores.looked += 1;
    Ok(Json(restores.layers.clone()))
}
