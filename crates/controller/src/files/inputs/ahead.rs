//! Inputs of queued jobs, staged while the jobs wait: at the host where the job must start, or is most likely to. If it
//! starts at another one, the image is copied from there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::{Job, JobState, Start};
use perigee_model::{HostId, JobId, Problem};
use tokio::task::JoinHandle;

use super::staging;
use crate::cluster::tasks;
use crate::cluster::{Cluster, HostLink};
use crate::storage::volumes;

/// A job that starts at once stages its inputs itself.
const WAITED_MS: u64 = 3000;
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// After a failure, and to see whether the inputs have changed.
const AGAIN: Duration = Duration::from_secs(60);
/// So many of the queued jobs are looked at, the oldest first.
const JOBS_MAX: usize = 8;

/// So many are staged at the same time. A host makes fewer.
const AT_ONCE: usize = 4;

/// A task that ends when this is dropped.
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Stages inputs of some jobs at the same time. A job that is cancelled takes its task with it; one that starts does not,
/// and waits for the task. This never ends.
pub async fn stage_ahead(cluster: Arc<Cluster>, task: tasks::Task) {
    let mut tried: BTreeMap<JobId, Instant> = BTreeMap::new();
    let mut running: BTreeMap<JobId, Task> = BTreeMap::new();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let unfinished = cluster.unfinished_jobs();
        let goes_on = |id: &JobId| {
            let mut jobs = unfinished.iter();
            jobs.any(|it| it.job.id == *id && it.ending.is_none() && it.cancelled_ms.is_none())
        };
        running.retain(|id, task| !task.0.is_finished() && goes_on(id));
        let mut waiting: Vec<Job> = unfinished
            .iter()
            .filter(|record| record.job.state == JobState::Queued && record.ending.is_none())
            .filter(|record| record.job.spec.inputs.is_some())
            .filter(|record| cluster.clock.age_ms(record.job.submitted_ms) > WAITED_MS)
            .map(|record| record.job.clone())
            .collect();
        waiting.sort_by_key(|job| (-job.spec.priority, job.submitted_ms));
        waiting.truncate(JOBS_MAX);
        tried.retain(|id, _| waiting.iter().any(|job| job.id == *id));
        for job in waiting {
            let is_early = tried.get(&job.id).is_some_and(|at| at.elapsed() < AGAIN);
            if running.len() >= AT_ONCE || is_early || running.contains_key(&job.id) {
                continue;
            }
            tried.insert(job.id.clone(), Instant::now());
            let (cluster, id) = (Arc::clone(&cluster), job.id.clone());
            let staging = tokio::spawn(async move {
                if let Err(problem) = stage(&cluster, &job).await {
                    tracing::debug!("the inputs of job {} are not staged yet: {problem}", job.id);
                }
            });
            running.insert(id, Task(staging));
        }
        task.round(async { Ok(format!("stages the inputs of {} jobs", running.len())) }).await;
    }
}

async fn stage(cluster: &Cluster, job: &Job) -> Result<(), Problem> {
    let Some(host) = likely_host(cluster, job).await? else { return Ok(()) };
    tracing::debug!("stage the inputs of job {} at {}", job.id, host.id);
    staging::ensure(cluster, &host, &job.spec, None, async |_| Ok(())).await.map(drop)
}

/// Where the job is most likely to start; `None` if that is not known.
async fn likely_host(cluster: &Cluster, job: &Job) -> Result<Option<Arc<HostLink>>, Problem> {
    let up = cluster.hosts.up();
    let find = |id: &HostId| up.iter().find(|host| host.id == *id).cloned();
    let data = match job.spec.volumes.first() {
        Some(volume) => {
            volumes::settled_home(cluster, &volume.volume).await.ok().and_then(|home| find(&home))
        }
        None => None,
    };
    Ok(match &job.spec.start {
        Start::Host(host) => find(host),
        Start::Site(site) => {
            let mut at_site = up.iter().filter(|host| host.addresses.site == *site);
            data.filter(|host| host.addresses.site == *site).or_else(|| at_site.next().cloned())
        }
        Start::Anywhere => data.or_else(|| (up.len() == 1).then(|| up.first().cloned()).flatten()),
    })
}
