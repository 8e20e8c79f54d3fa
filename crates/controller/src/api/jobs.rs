//! `/jobs`

use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use perigee_http::{Failure, Json, Reply};
use perigee_model::job::{Job, JobSpec, LogLine, Sample};
use perigee_model::plan::{Decision, Plan, Score};
use perigee_model::{JobId, Problem};
use serde::Deserialize;

use super::caller::{Caller, Full};
use super::{Shared, json};
use crate::{files, jobs, planning};

/// Predicts the ways to run a job without running it. Links that the plan needs are measured first.
#[utoipa::path(post, path = "/jobs/plan", tag = "jobs", request_body = JobSpec,
    responses((status = 200, body = Plan)))]
pub async fn plan(
    State(cluster): Shared,
    caller: Caller,
    Json(spec): Json<JobSpec>,
) -> Reply<Plan> {
    let spec = caller.job(&cluster, spec).await?;
    jobs::check(&cluster, &spec).await?;
    json(planning::plan(&cluster, &spec).await?)
}

#[utoipa::path(post, path = "/jobs", tag = "jobs", request_body = JobSpec,
    responses((status = 200, body = Job)))]
pub async fn submit(
    State(cluster): Shared,
    caller: Caller,
    Json(spec): Json<JobSpec>,
) -> Reply<Job> {
    let spec = caller.job(&cluster, spec).await?;
    let name = spec.name.clone();
    let submitted = jobs::submit(&cluster, spec).await;
    caller.did(submitted.as_ref().map_or(&name, |job| job.id.as_str()));
    json(submitted?)
}

/// All jobs, the oldest first.
#[utoipa::path(get, path = "/jobs", tag = "jobs", responses((status = 200, body = Vec<Job>)))]
pub async fn list(State(cluster): Shared, caller: Caller) -> Reply<Vec<Job>> {
    let mut jobs = jobs::list(&cluster).await?;
    jobs.retain(|job| caller.sees_this_job(job));
    json(jobs)
}

#[utoipa::path(get, path = "/jobs/{job}", tag = "jobs", params(("job" = String, Path)),
    responses((status = 200, body = Job)))]
pub async fn info(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<Job> {
    json(jobs::get(&cluster, &job).await?)
}

/// Deletes an ended job with its log and its output.
#[utoipa::path(delete, path = "/jobs/{job}", tag = "jobs", params(("job" = String, Path)),
    responses((status = 200)))]
pub async fn delete(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<()> {
    json(jobs::delete(&cluster, &job).await?)
}

/// Cancels a job. The answer comes at once.
#[utoipa::path(post, path = "/jobs/{job}/cancel", tag = "jobs", params(("job" = String, Path)),
    responses((status = 200, body = Job)))]
pub async fn cancel(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<Job> {
    json(jobs::intend(&cluster, &job, |intent| intent.cancel = true).await?)
}

#[derive(Debug, Deserialize)]
pub struct Page {
    #[serde(default)]
    after: u64,
    limit: Option<usize>,
}

/// The first log lines with a number higher than `after`, at most `limit`. An empty answer means that there are
/// no more. Only the end of a long log is kept; then the first line says how much is missing.
#[utoipa::path(get, path = "/jobs/{job}/log", tag = "jobs",
    params(("job" = String, Path), ("after" = Option<u64>, Query), ("limit" = Option<usize>, Query)),
    responses((status = 200, body = Vec<LogLine>)))]
pub async fn log(
    State(cluster): Shared,
    Full(job): Full<JobId>,
    query: Result<Query<Page>, axum::extract::rejection::QueryRejection>,
) -> Reply<Vec<LogLine>> {
    let Query(page) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    let limit = page.limit.unwrap_or(jobs::PAGE_LINES_MAX);
    json(jobs::log(&cluster, &job, page.after, limit).await?)
}

#[utoipa::path(get, path = "/jobs/{job}/decisions", tag = "jobs",
    params(("job" = String, Path)), responses((status = 200, body = Vec<Decision>)))]
pub async fn decisions(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<Vec<Decision>> {
    jobs::record(&cluster, &job).await?;
    json(planning::decisions(&cluster, &job).await?)
}

/// Compares the predictions for all stored jobs with their measured times.
#[utoipa::path(get, path = "/planner/score", tag = "jobs",
    responses((status = 200, body = Score)))]
pub async fn score(State(cluster): Shared, caller: Caller) -> Reply<Score> {
    json(planning::score(&cluster, |full| caller.sees(full)).await?)
}

/// The job's time series.
#[utoipa::path(get, path = "/jobs/{job}/samples", tag = "jobs", params(("job" = String, Path)),
    responses((status = 200, body = Vec<Sample>)))]
pub async fn samples(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<Vec<Sample>> {
    json(jobs::samples(&cluster, &job).await?)
}

/// The output tar of a job whose command has ended.
#[utoipa::path(get, path = "/jobs/{job}/output", tag = "jobs", params(("job" = String, Path)),
    responses((status = 200, body = Vec<u8>, content_type = "application/x-tar")))]
pub async fn output(State(cluster): Shared, Full(job): Full<JobId>) -> Result<Response, Failure> {
    let state = jobs::record(&cluster, &job).await?.job.state;
    let path = files::output_path(&cluster.state_dir, &job);
    let what = format!("output of job {job}");
    let file = tokio::fs::File::open(&path).await.map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound if state.is_final() => {
            Problem::not_found(what, "its command did not end, so it has none")
                .next(format!("`perigee job status {job}` says why"))
        }
        std::io::ErrorKind::NotFound => Problem::not_found(what, "the job has not ended")
            .next("a job has an output when its command has ended"),
        _ => Problem::internal(what, e),
    })?;
    let bytes =
        file.metadata().await.map_err(|e| Problem::internal("can't read an output", e))?.len();
    let body = Body::from_stream(tokio_util::io::ReaderStream::new(file));
    let headers =
        [(CONTENT_TYPE, "application/x-tar".to_owned()), (CONTENT_LENGTH, bytes.to_string())];
    Ok((headers, body).into_response())
}
