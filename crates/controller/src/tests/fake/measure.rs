//! Disks that are measured: figures that a test knows.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::post;
use perigee_http::{Json, Reply};
use perigee_model::client::target_name;
use perigee_model::measurement::{DiskFigures, IscsiPortal, MeasureDisk, MeasuredDisk, OpenPortal};
use perigee_model::volume::Step;
use perigee_model::{Problem, VolumeName};
use serde::Serialize;

use super::{Inside, Shared};

/// What a fake was asked to measure, and how it does.
#[derive(Default)]
pub struct Measured {
    pub asked: Vec<MeasureDisk>,
    pub filled: Vec<VolumeName>,
    pub portals: Vec<VolumeName>,
    /// No measurement of a disk ends.
    pub hangs: bool,
    /// It answers that it has made this volume, whatever it was asked for.
    pub makes: Option<VolumeName>,
    /// It answers with a portal of this volume's, whatever it was asked for.
    pub answers_with: Option<VolumeName>,
    /// It has no initiator for iSCSI.
    pub no_iscsi: bool,
}

pub fn routes() -> Router<Arc<Mutex<Inside>>> {
    Router::new()
        .route("/v1/measure", post(disk))
        .route("/v1/measure/{volume}/fill", post(fill))
        .route("/v1/measure/{volume}/portal", post(open_portal).delete(close_portal))
}

pub(super) fn step<T: Serialize>(step: &Step<T>) -> String {
    serde_json::to_string(step).expect("JSON") + "\n"
}

async fn disk(State(inside): Shared, Json(ask): Json<MeasureDisk>) -> String {
    let is_iscsi = matches!(ask.disk, MeasuredDisk::Iscsi { .. });
    inside.lock().expect("lock").measured.asked.push(ask.clone());
    while inside.lock().expect("lock").measured.hangs {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    if is_iscsi && inside.lock().expect("lock").measured.no_iscsi {
        let problem = Problem::unsupported("measure", "there is no driver");
        return step(&Step::<DiskFigures>::Failed(problem));
    }
    step(&Step::Done(DiskFigures {
        size_bytes: ask.size_bytes,
        read_bytes_per_s: 1e8,
        write_bytes_per_s: 5e7,
        random_reads_per_s: 1000.0,
        random_writes_per_s: 100.0,
        direct: true,
    }))
}

async fn fill(State(inside): Shared, Path(volume): Path<VolumeName>) -> String {
    inside.lock().expect("lock").measured.filled.push(volume);
    step(&Step::Done(()))
}

async fn open_portal(State(inside): Shared, Json(ask): Json<OpenPortal>) -> Reply<IscsiPortal> {
    let mut inside = inside.lock().expect("lock");
    let target = target_name(inside.measured.answers_with.as_ref().unwrap_or(&ask.volume).as_str());
    inside.measured.portals.push(ask.volume);
    Ok(Json(IscsiPortal { portal: "127.0.0.1:3260".to_owned(), target }))
}

async fn close_portal(State(inside): Shared, Path(volume): Path<VolumeName>) -> Reply<()> {
    inside.lock().expect("lock").measured.portals.retain(|open| *open != volume);
    Ok(Json(()))
}
