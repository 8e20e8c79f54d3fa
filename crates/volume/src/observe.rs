//! The part of the control API for observation: figures for Prometheus, the requests of one volume as they
//! end, and traces of all volumes in a file.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use axum::routing::{get, post, put};
use futures_util::stream;
use perigee_http::{Failure, Json, Reply};
use perigee_model::exposition;
use perigee_model::limits::TRACE_S;
use perigee_model::volume::{CollectTrace, StartTrace, TraceSummary};
use perigee_model::{JobId, Problem, ProblemKind, VolumeName};
use serde::Deserialize;
use tokio::time::Instant;

use crate::control::{Control, Named};
use crate::metrics;

/// `/metrics`, for Prometheus.
pub fn metrics() -> Router<Arc<Control>> {
    Router::new().route("/metrics", get(figures))
}

/// The routes that record and give out the requests to volumes.
pub fn trace() -> Router<Arc<Control>> {
    Router::new()
        .route("/volumes/{volume}/trace", get(requests))
        .route("/trace/start", post(start_trace))
        .route("/trace/stop", post(stop_trace))
        .route("/traces/{name}", put(collect_trace).get(collected_trace).delete(end_trace))
}

async fn figures(State(control): State<Arc<Control>>) -> Result<Response, Failure> {
    let pool = control.pool.info().await;
    let page = metrics::page(&control.stats, pool.as_ref().ok());
    answer(exposition::CONTENT_TYPE, Body::from(page))
}

#[derive(Deserialize)]
struct Span {
    seconds: u64,
}

/// Answers with one line of JSON for each request that ends within the given number of seconds.
async fn requests(
    State(control): State<Arc<Control>>,
    Named(volume): Named<VolumeName>,
    span: Result<Query<Span>, QueryRejection>,
) -> Result<Response, Failure> {
    let what = format!("can't trace volume {volume}");
    let Query(Span { seconds }) =
        span.map_err(|error| Problem::invalid(&what, error.body_text()))?;
    TRACE_S.check(seconds).map_err(|error| error.problem(&what))?;
    match control.pool.volume(&volume).await {
        Err(problem) if problem.kind == ProblemKind::NotFound => {
            let attachments = control.pool.attachments().await?;
            if attachments.iter().all(|(name, _)| *name != volume) {
                return Err(problem.into());
            }
        }
        found => drop(found?),
    }
    let requests = control.stats.of(&volume).tracing.follow();
    let end = Instant::now() + Duration::from_secs(seconds);
    let lines = stream::unfold(requests, move |mut requests| async move {
        let request = tokio::time::timeout_at(end, requests.recv()).await.ok()??;
        let line = serde_json::to_string(&request).map(|line| line + "\n");
        Some((line, requests))
    });
    answer("application/jsonl", Body::from_stream(lines))
}

async fn start_trace(
    State(control): State<Arc<Control>>,
    Json(request): Json<StartTrace>,
) -> Reply<()> {
    let dir = control.pool.traces_dir();
    perigee_http::private_directory(&dir)?;
    Ok(Json(control.stats.start_trace(dir.join(format!("{}.trace", request.name)))?))
}

async fn stop_trace(State(control): State<Arc<Control>>) -> Reply<TraceSummary> {
    let stopped = tokio::task::spawn_blocking(move || control.stats.stop_trace()).await;
    Ok(Json(stopped.map_err(|error| Problem::internal("can't end a trace", error))??))
}

async fn collect_trace(
    State(control): State<Arc<Control>>,
    Named(name): Named<JobId>,
    Json(ask): Json<CollectTrace>,
) -> Reply<()> {
    Ok(Json(control.stats.collect_trace(&name, &ask)?))
}

async fn collected_trace(
    State(control): State<Arc<Control>>,
    Named(name): Named<JobId>,
) -> Result<Response, Failure> {
    let bytes = control.stats.collections.get(&name)?;
    answer("application/octet-stream", Body::from(bytes))
}

async fn end_trace(State(control): State<Arc<Control>>, Named(name): Named<JobId>) -> Reply<()> {
    control.stats.collections.end(&name);
    Ok(Json(()))
}

fn answer(kind: &str, body: Body) -> Result<Response, Failure> {
    Response::builder()
        .header("content-type", kind)
        .body(body)
        .map_err(|error| Failure(Problem::internal("can't answer with figures", error)))
}
