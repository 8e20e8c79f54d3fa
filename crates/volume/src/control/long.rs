//! Answers to requests that may take long, with a line of JSON for each [`Step`].

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::Response;
use futures_util::stream;
use perigee_http::Failure;
use perigee_model::Problem;
use perigee_model::volume::Step;
use perigee_store::{StopOnDrop, Work};
use serde::Serialize;

/// How often progress is reported.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

type Running<T> = Pin<Box<dyn Future<Output = Result<T, Problem>> + Send>>;

/// Answers with the progress of `run`, then with its result. If the client disconnects, the work is asked to
/// stop.
pub(super) fn follow<T, F>(run: impl FnOnce(Arc<Work>) -> F) -> Result<Response, Failure>
where
    T: Serialize + Send + 'static,
    F: Future<Output = Result<T, Problem>> + Send + 'static,
{
    let work = Arc::new(Work::default());
    let running: Running<T> = Box::pin(run(Arc::clone(&work)));
    let state = Some((running, StopOnDrop(work)));
    let lines = stream::unfold(state, |state| async move {
        let (mut running, work) = state?;
        let (step, next) = match tokio::time::timeout(PROGRESS_EVERY, &mut running).await {
            Err(_) => (Step::Progress(work.0.progress()), Some((running, work))),
            Ok(Ok(result)) => (Step::Done(result), None),
            Ok(Err(problem)) => (Step::Failed(problem), None),
        };
        Some((Ok::<_, Infallible>(line(&step)), next))
    });
    Response::builder()
        .header("content-type", "application/x-ndjson")
        .body(Body::from_stream(lines))
        .map_err(|error| Failure(Problem::internal("can't answer with progress", error)))
}

fn line<T: Serialize>(step: &Step<T>) -> Bytes {
    let mut text = serde_json::to_vec(step).expect("a step is plain data");
    text.push(b'\n');
    text.into()
}
