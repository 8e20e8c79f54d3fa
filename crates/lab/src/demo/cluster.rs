//! The demo's requests to the controller, with deadlines and progress.

use std::path::Path;
use std::time::Duration;

use perigee_http::Client;
use perigee_model::job::{
    Bundle, ClusterImage, ClusterVolume, Job, JobSpec, JobState, Link, LogLine, NewImage,
    NewVolume, Sample,
};
use perigee_model::plan::{Decision, Plan};
use perigee_model::volume::VolumeSource;
use perigee_model::{HostId, ImageName, JobId, Problem, VolumeName};

use crate::images::import_everywhere;
use crate::progress::Step;
use crate::up::Lab;

const QUICK: Duration = Duration::from_secs(30);
/// For imports: the controller answers after the image is written.
const SLOW: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_millis(400);
/// Longer than the job's own timeout, so that staging and collecting fit.
const JOB_DEADLINE: Duration = Duration::from_secs(1200);

#[derive(Debug, Clone)]
pub struct Cluster {
    quick: Client,
    slow: Client,
}

impl Cluster {
    pub fn new(lab: &Lab) -> Result<Self, Problem> {
        Ok(Self { quick: lab.client(QUICK)?, slow: lab.client(SLOW)? })
    }

    pub async fn import_image(
        &self,
        name: &ImageName,
        file: &Path,
    ) -> Result<ClusterImage, Problem> {
        let source = std::path::absolute(file)
            .map_err(|e| Problem::invalid(format!("can't import {}", file.display()), e))?;
        let source = source.to_string_lossy().into_owned();
        let new = NewImage { name: name.clone(), source, host: None };
        import_everywhere(&self.slow, &new).await
    }

    pub async fn create_volume(
        &self,
        name: &VolumeName,
        home: &HostId,
        size_bytes: u64,
    ) -> Result<ClusterVolume, Problem> {
        let new = NewVolume {
            name: name.clone(),
            host: Some(home.clone()),
            size_bytes: Some(size_bytes),
            source: VolumeSource::Empty,
        };
        self.quick.post("/v1/volumes", &new).await
    }

    pub async fn probe_links(&self) -> Result<Vec<Link>, Problem> {
        self.slow.post("/v1/links/probe", &serde_json::json!({})).await
    }

    /// Uploads a tar and returns its id for [`JobSpec::inputs`].
    pub async fn upload(&self, bundle: &Path) -> Result<String, Problem> {
        let file = tokio::fs::File::open(bundle)
            .await
            .map_err(|e| Problem::internal(format!("can't open {}", bundle.display()), e))?;
        let stored: Bundle =
            self.slow.send_body(perigee_http::Method::POST, "/v1/bundles", file).await?;
        Ok(stored.sha256)
    }

    pub async fn plan(&self, spec: &JobSpec) -> Result<Plan, Problem> {
        self.slow.post("/v1/jobs/plan", spec).await
    }

    /// Submits a job and waits until it has succeeded.
    pub async fn run(&self, spec: &JobSpec, step: &mut Step) -> Result<Job, Problem> {
        let job: Job = self.slow.post("/v1/jobs", spec).await?;
        let id = job.id;
        let end = tokio::time::Instant::now() + JOB_DEADLINE;
        loop {
            let job: Job = self.quick.get(&format!("/v1/jobs/{id}")).await?;
            step.at(&state_line(&job));
            match job.state {
                JobState::Succeeded => return Ok(job),
                JobState::Failed | JobState::Cancelled => return Err(self.failure(&job).await),
                _ => {}
            }
            if tokio::time::Instant::now() >= end {
                let why = format!("it has not ended after {JOB_DEADLINE:?}: {}", state_line(&job));
                return Err(Problem::unavailable(format!("can't run job {id}"), why));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    pub async fn decisions(&self, job: &JobId) -> Result<Vec<Decision>, Problem> {
        self.quick.get(&format!("/v1/jobs/{job}/decisions")).await
    }

    pub async fn samples(&self, job: &JobId) -> Result<Vec<Sample>, Problem> {
        self.quick.get(&format!("/v1/jobs/{job}/samples")).await
    }

    /// The files of a job's output: their names without directories, and their contents.
    pub async fn output(&self, job: &JobId) -> Result<Vec<(String, String)>, Problem> {
        let bytes = self.slow.get_bytes(&format!("/v1/jobs/{job}/output")).await?;
        let read = || -> std::io::Result<Vec<(String, String)>> {
            let mut files = Vec::new();
            for entry in tar::Archive::new(&bytes[..]).entries()? {
                let mut entry = entry?;
                if entry.header().entry_type().is_file() {
                    let path = entry.path()?.into_owned();
                    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    files.push((name, std::io::read_to_string(&mut entry)?));
                }
            }
            Ok(files)
        };
        read().map_err(|e| Problem::internal(format!("can't read the output of job {job}"), e))
    }

    /// A problem with the last lines of a failed job's log.
    async fn failure(&self, job: &Job) -> Problem {
        let lines: Vec<LogLine> =
            self.quick.get(&format!("/v1/jobs/{}/log?after=0", job.id)).await.unwrap_or_default();
        let tail: Vec<&str> =
            lines.iter().rev().take(15).rev().map(|line| line.line.as_str()).collect();
        let code = job.exit_code.map_or_else(String::new, |code| format!(" (exit code {code})"));
        let why = format!("{}{code}", job.reason);
        Problem::internal(format!("job {} failed", job.id), why).next(if tail.is_empty() {
            String::new()
        } else {
            format!("the end of its log:\n    {}", tail.join("\n    "))
        })
    }
}

fn state_line(job: &Job) -> String {
    let place = job.host.as_ref().map_or_else(String::new, |host| format!(" on {host}"));
    let state = match job.state {
        JobState::Queued => "queued",
        JobState::Staging => "staging",
        JobState::Starting => "booting",
        JobState::Running => "running",
        JobState::Collecting => "collecting outputs",
        JobState::Succeeded => "succeeded",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
    };
    let moving = job.migrations.iter().any(|m| m.ended_ms.is_none());
    let moving = if moving { ", migrating" } else { "" };
    match (&job.progress, job.state) {
        (Some(p), JobState::Running) => {
            format!("{state}{place}{moving}, {}/{} {}", p.done, p.total, p.label)
        }
        _ => format!("{state}{place}{moving}"),
    }
}
