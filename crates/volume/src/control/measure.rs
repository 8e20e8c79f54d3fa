//! The part of the control API with which the controller has disks measured.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use perigee_http::{Failure, Json, Reply};
use perigee_model::measurement::{IscsiPortal, MeasureDisk, OpenPortal};
use perigee_model::{Problem, VolumeName};

use super::{Control, Named, Shared, long};
use crate::measure::Measuring;

/// The routes for measurements.
pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route("/measure", post(disk))
        .route("/measure/{volume}/fill", post(fill))
        .route("/measure/{volume}/portal", post(open_portal).delete(close_portal))
}

fn measuring(control: &Control) -> Result<&Measuring, Problem> {
    control.measuring.as_ref().ok_or_else(|| {
        Problem::conflict("can't measure a disk", "no volume server runs")
            .next("start one: perigee volume serve")
    })
}

async fn disk(State(control): Shared, Json(ask): Json<MeasureDisk>) -> Result<Response, Failure> {
    // It ends with this answer, and not later.
    long::follow(move |_| async move { measuring(&control)?.disk(&ask).await })
}

async fn fill(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
) -> Result<Response, Failure> {
    long::follow(move |_| async move { measuring(&control)?.fill(&volume).await })
}

async fn open_portal(
    State(control): Shared,
    Named(volume): Named<VolumeName>,
    Json(ask): Json<OpenPortal>,
) -> Reply<IscsiPortal> {
    if ask.volume != volume {
        let why = format!("the request is about {}", ask.volume);
        return Err(Problem::invalid(format!("can't serve volume {volume}"), why).into());
    }
    Ok(Json(measuring(&control)?.open_portal(ask).await?))
}

async fn close_portal(State(control): Shared, Named(volume): Named<VolumeName>) -> Reply<()> {
    measuring(&control)?.close_portal(&volume);
    Ok(Json(()))
}
