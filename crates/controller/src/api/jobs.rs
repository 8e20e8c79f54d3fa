//! `/jobs`

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Query, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use perigee_http::{Failure, Json, Reply};
use perigee_model::job::{Job, JobMoveAsked, JobSpec, LeftOutFiles, LogLine, MoveJob, Sample};
use perigee_model::job_file::{self, JobFile};
use perigee_model::job_plan::JobPlan;
use perigee_model::limits::WAIT_S;
use perigee_model::plan::{Decision, Score};
use perigee_model::units::parse_duration;
use perigee_model::{JobId, Problem};
use serde::Deserialize;

use super::caller::{Caller, Full};
use super::{Shared, json};
use crate::files::outputs;
use crate::records::JobIntent;
use crate::{jobs, planning, rentals};

/// A job in a request's body: a [`JobSpec`] as JSON, or a job file (`application/yaml`, RFC 9512).
pub struct JobBody(JobSpec);

/// The name of a job whose file names none.
const FILE_NAME: &str = "job";

impl<S: Send + Sync> FromRequest<S> for JobBody {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let kind = request.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let is_yaml = kind.is_some_and(|kind| kind.starts_with("application/yaml"));
        if !is_yaml {
            return Json::from_request(request, state).await.map(|Json(spec)| Self(spec));
        }
        let refused = |why: String| Failure(Problem::invalid("can't read the job file", why));
        let bytes =
            Bytes::from_request(request, state).await.map_err(|e| refused(e.body_text()))?;
        let text = std::str::from_utf8(&bytes).map_err(|e| refused(e.to_string()))?;
        let JobFile { spec, inputs } = job_file::parse(text, FILE_NAME)?;
        if !inputs.is_empty() {
            let why = "inputs: a request has no files beside it";
            return Err(Problem::invalid("can't read the job file", why)
                .next("submit it with perigee job submit, which sends them; or put the data on a volume")
                .into());
        }
        Ok(Self(spec))
    }
}

/// Predicts the ways to run a job without running it, at the hosts that are there and at hosts that could be rented. Links that the plan needs
/// are measured first. Nothing is rented. The job may also be a job file without inputs.
#[utoipa::path(post, path = "/jobs/plan", tag = "jobs",
    request_body(content((JobSpec = "application/json"), (String = "application/yaml"))),
    responses((status = 200, body = JobPlan)))]
pub async fn plan(
    State(cluster): Shared,
    caller: Caller,
    JobBody(spec): JobBody,
) -> Reply<JobPlan> {
    let spec = caller.job(&cluster, spec).await?;
    jobs::check(&cluster, &spec).await?;
    json(rentals::plan(&cluster, &spec).await?)
}

/// Submits a job. It is checked and recorded at once, and starts when the scheduler finds hosts for it. The job may also be a job file without
/// inputs.
#[utoipa::path(post, path = "/jobs", tag = "jobs",
    request_body(content((JobSpec = "application/json"), (String = "application/yaml"))),
    responses((status = 200, body = Job)))]
pub async fn submit(State(cluster): Shared, caller: Caller, JobBody(spec): JobBody) -> Reply<Job> {
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

/// The jobs that have not ended, and the last ones that have failed: so much is known without a look at the store, however many there are.
pub async fn list_open(State(cluster): Shared, caller: Caller) -> Reply<Vec<Job>> {
    let mut jobs = jobs::list_open(&cluster).await?;
    jobs.retain(|job| caller.sees_this_job(job));
    json(jobs)
}

/// The query of [`info`].
#[derive(Debug, Default, Deserialize)]
pub struct Looking {
    wait: Option<String>,
}

/// A job, with its state, its measured times, its migrations and, of a job with several VMs, its VMs. With `wait`, a duration such as `30s`, the
/// answer comes when the job has ended or this time is over, whichever is first.
#[utoipa::path(get, path = "/jobs/{job}", tag = "jobs",
    params(("job" = String, Path), ("wait" = Option<String>, Query)),
    responses((status = 200, body = Job)))]
pub async fn info(
    State(cluster): Shared,
    Full(job): Full<JobId>,
    query: Result<Query<Looking>, axum::extract::rejection::QueryRejection>,
) -> Reply<Job> {
    let invalid = |why: String| Problem::invalid("request query", why);
    let Query(ask) = query.map_err(|e| invalid(e.body_text()))?;
    let wait_s = match &ask.wait {
        None => 0,
        Some(text) => parse_duration(text).map_err(|e| invalid(format!("wait: {e}")))?,
    };
    let wait_s = WAIT_S.check(wait_s).map_err(|e| invalid(format!("wait: {e}")))?;
    json(jobs::when_ended(&cluster, &job, Duration::from_secs(wait_s)).await?)
}

/// The query of [`delete`].
#[derive(Debug, Deserialize)]
pub struct Deleting {
    /// What it has in the repository stays.
    #[serde(default)]
    keep_outputs: bool,
}

/// Deletes an ended job with its log, and what it has in `jobs/JOB` of the repository. What went to its `outputs-to` stays.
#[utoipa::path(delete, path = "/jobs/{job}", tag = "jobs",
    params(("job" = String, Path), ("keep_outputs" = Option<bool>, Query)),
    responses((status = 200)))]
pub async fn delete(
    State(cluster): Shared,
    Full(job): Full<JobId>,
    query: Result<Query<Deleting>, axum::extract::rejection::QueryRejection>,
) -> Reply<()> {
    let Query(ask) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    json(jobs::delete(&cluster, &job, ask.keep_outputs).await?)
}

/// The query of [`cancel`].
#[derive(Debug, Deserialize)]
pub struct Cancelling {
    /// The VM is stopped at once, and the outputs are what is on its disks. The second time, there are none.
    #[serde(default)]
    pub now: bool,
}

/// Cancels a job. The answer comes at once. A command that runs is ended, and the outputs that it has are fetched. After 5
/// minutes, or with `now` at once, the VM is stopped as it is, and started once more only to write what is on its disks. A second
/// request with `now` ends the job without its outputs.
#[utoipa::path(post, path = "/jobs/{job}/cancel", tag = "jobs",
    params(("job" = String, Path), ("now" = Option<bool>, Query)),
    responses((status = 200, body = Job)))]
pub async fn cancel(
    State(cluster): Shared,
    Full(job): Full<JobId>,
    query: Result<Query<Cancelling>, axum::extract::rejection::QueryRejection>,
) -> Reply<Job> {
    let Query(ask) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    let request = |intent: &mut JobIntent| {
        intent.cancel = true;
        intent.gives_up |= intent.now && ask.now;
        intent.now |= ask.now;
    };
    json(jobs::intend(&cluster, &job, request).await?)
}

/// Moves all VMs of a job with several ones while they run, or none: if one can't, those that were moved go back. The answer
/// comes at once. `gang_move` of the job shows how far it is.
#[utoipa::path(post, path = "/jobs/{job}/move", tag = "jobs", params(("job" = String, Path)),
    request_body = MoveJob, responses((status = 200, body = JobMoveAsked)))]
pub async fn move_job(
    State(cluster): Shared,
    Full(job): Full<JobId>,
    Json(ask): Json<MoveJob>,
) -> Reply<JobMoveAsked> {
    json(jobs::ask_to_move(&cluster, &job, ask).await?)
}

/// Calls such a move off: the VMs that were moved go back. The answer comes at once.
#[utoipa::path(post, path = "/jobs/{job}/move/cancel", tag = "jobs",
    params(("job" = String, Path)), responses((status = 200, body = JobMoveAsked)))]
pub async fn cancel_move(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<JobMoveAsked> {
    json(jobs::call_off_move(&cluster, &job).await?)
}

/// The query of [`log`].
#[derive(Debug, Deserialize)]
pub struct Page {
    #[serde(default)]
    pub after: u64,
    pub limit: Option<usize>,
    pub rank: Option<u32>,
    pub after_each: Option<String>,
}

/// The first log lines with a number higher than `after`, at most `limit`. An empty answer means that there are
/// no more. Only the end of a long log is kept; then the first line says how much is missing. Each VM of a job with several
/// ones has a log: `rank` says which, and without it it is the first one's. With `after_each` it is the log of all of them, in the
/// order in which their lines arrived, each line with its `rank`: it has the number of the last line that is known of each rank,
/// separated by commas, and is empty at first.
#[utoipa::path(get, path = "/jobs/{job}/log", tag = "jobs",
    params(("job" = String, Path), ("after" = Option<u64>, Query), ("limit" = Option<usize>, Query),
        ("rank" = Option<u32>, Query), ("after_each" = Option<String>, Query)),
    responses((status = 200, body = Vec<LogLine>)))]
pub async fn log(
    State(cluster): Shared,
    Full(job): Full<JobId>,
    query: Result<Query<Page>, axum::extract::rejection::QueryRejection>,
) -> Reply<Vec<LogLine>> {
    let Query(page) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    let limit = page.limit.unwrap_or(jobs::PAGE_LINES_MAX);
    if let Some(after) = &page.after_each {
        let numbers = after.split(',').filter(|text| !text.is_empty()).map(str::parse);
        let after: Result<Vec<u64>, _> = numbers.collect();
        let after =
            after.map_err(|e| Problem::invalid("request query", format!("after_each: {e}")))?;
        return json(jobs::log_of_all(&cluster, &job, &after, limit).await?);
    }
    json(jobs::log_of(&cluster, &job, page.rank, (page.after, limit)).await?)
}

/// The decisions about a job's placement and moves, the oldest first: the options, their predicted times, and why one
/// was chosen.
#[utoipa::path(get, path = "/jobs/{job}/decisions", tag = "jobs",
    params(("job" = String, Path)), responses((status = 200, body = Vec<Decision>)))]
pub async fn decisions(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<Vec<Decision>> {
    jobs::record(&cluster, &job).await?;
    json(planning::decisions(&cluster, &job).await?)
}

/// Compares the predictions for all stored jobs with their measured times and with what was spent; for admins also those for rented hosts.
#[utoipa::path(get, path = "/planner/score", tag = "jobs",
    responses((status = 200, body = Score)))]
pub async fn score(State(cluster): Shared, caller: Caller) -> Reply<Score> {
    json(planning::score(&cluster, |full| caller.sees(full), caller.is_admin()).await?)
}

/// The job's time series.
#[utoipa::path(get, path = "/jobs/{job}/samples", tag = "jobs", params(("job" = String, Path)),
    responses((status = 200, body = Vec<Sample>)))]
pub async fn samples(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<Vec<Sample>> {
    json(jobs::samples(&cluster, &job).await?)
}

/// The files of the job's VM that are not among its outputs, with the reasons.
#[utoipa::path(get, path = "/jobs/{job}/left-out", tag = "jobs", params(("job" = String, Path)),
    responses((status = 200, body = LeftOutFiles)))]
pub async fn left_out(State(cluster): Shared, Full(job): Full<JobId>) -> Reply<LeftOutFiles> {
    json(jobs::left_out(&cluster, &job).await?)
}

/// The outputs of an ended job as a tar, made of its files in the repository.
#[utoipa::path(get, path = "/jobs/{job}/output", tag = "jobs", params(("job" = String, Path)),
    responses((status = 200, body = Vec<u8>, content_type = "application/x-tar")))]
pub async fn output(State(cluster): Shared, Full(job): Full<JobId>) -> Result<Response, Failure> {
    let job = jobs::record(&cluster, &job).await?.job;
    if job.outputs.is_none() {
        let what = format!("output of job {}", job.id);
        return Err(match job.state.is_final() {
            true => Problem::not_found(what, "it has none, or they were deleted")
                .next(format!("`perigee job status {}` says why", job.id)),
            false => Problem::not_found(what, "the job has not ended")
                .next("a job has an output when its command has ended"),
        }
        .into());
    }
    let body = Body::from_stream(outputs::archive(&cluster, &job).await?);
    Ok(([(CONTENT_TYPE, "application/x-tar")], body).into_response())
}
