//! The part of a fake volume server that ships backups: what a target has is a list of names.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::post;
use perigee_http::{Json, Reply};
use perigee_model::backup::{BackupTarget, DeleteBackup, ShipBackup, ShippedBackup};
use perigee_model::volume::Step;
use perigee_model::{BackupName, Problem, VolumeName};
use serde::Serialize;

use super::{Inside, Shared};

/// What a test looks at or changes.
#[derive(Default)]
pub struct Backups {
    /// What each target has.
    pub at: BTreeMap<String, BTreeSet<BackupName>>,
    /// How often something was to be shipped.
    pub asked: u64,
    /// Nothing is complete meanwhile.
    pub hangs: bool,
    /// Why nothing can be shipped.
    pub refuses: Option<Problem>,
    /// The moment of the next backup; `None`: as the controller says.
    pub taken_ms: Option<u64>,
}

pub fn routes() -> Router<Arc<Mutex<Inside>>> {
    Router::new()
        .route("/v1/volumes/{volume}/backup", post(ship))
        .route("/v1/volumes/{volume}/backup/end", post(end))
        .route("/v1/backups/delete", post(delete))
}

fn step<T: Serialize>(step: &Step<T>) -> String {
    serde_json::to_string(step).expect("JSON") + "\n"
}

async fn ship(
    State(inside): Shared,
    Path(_): Path<VolumeName>,
    Json(ask): Json<ShipBackup>,
) -> String {
    inside.lock().expect("lock").backups.asked += 1;
    while inside.lock().expect("lock").backups.hangs {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let backups = &mut inside.lock().expect("lock").backups;
    if let Some(problem) = backups.refuses.clone() {
        return step(&Step::<ShippedBackup>::Failed(problem));
    }
    backups.at.entry(ask.to.address).or_default().insert(ask.name);
    step(&Step::Done(ShippedBackup {
        taken_ms: backups.taken_ms.unwrap_or(ask.now_ms),
        size_bytes: 4096,
        data_bytes: 4096,
        shipped_bytes: 4096,
    }))
}

async fn end(State(_): Shared, Json(_): Json<BackupTarget>) -> Reply<()> {
    Ok(Json(()))
}

async fn delete(State(inside): Shared, Json(ask): Json<DeleteBackup>) -> String {
    let backups = &mut inside.lock().expect("lock").backups;
    if let Some(problem) = backups.refuses.clone() {
        return step(&Step::<()>::Failed(problem));
    }
    backups.at.entry(ask.at.address).or_default().remove(&ask.backup);
    step(&Step::Done(()))
}
