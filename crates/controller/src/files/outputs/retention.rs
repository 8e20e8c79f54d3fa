//! Deletes the outputs of jobs when their time is over. Each deletion is in the tenant's audit log.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::tenant::AuditEntry;
use perigee_model::{JobId, Problem, TenantName};

use super::remove;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::members::members;
use crate::cluster::tasks::Task;
use crate::records::KeptOutputs;

/// The time between two searches.
const EVERY: Duration = Duration::from_secs(60);

/// Who deletes them, in the audit log.
const WHO: &str = "perigee";

/// The endless task that deletes outputs whose time is over, every [`EVERY`].
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    loop {
        let expire = async {
            expire(&cluster).await.map(|jobs| format!("deleted the outputs of {jobs} jobs"))
        };
        task.round(expire).await;
        tokio::time::sleep(EVERY).await;
    }
}

/// Deletes what was kept for as long as it was to be, by the time that was seen to pass: a clock that is set deletes nothing. Returns
/// how many jobs had such outputs.
///
/// # Errors
/// If the jobs can't be listed. Outputs that can't be deleted now are tried again.
pub async fn expire(cluster: &Arc<Cluster>) -> Result<usize, Problem> {
    let mut deleted = 0;
    for record in cluster.jobs().await? {
        let is_over = |kept: &KeptOutputs| cluster.clock.age_ms(kept.since_ms) >= kept.for_ms;
        // What a member has goes with all that its gang has, and only when that has ended.
        if record.kind.is_member()
            || !record.job.state.is_final()
            || record.job.outputs.is_none()
            || !record.kept_outputs.as_ref().is_some_and(is_over)
        {
            continue;
        }
        let id = record.job.id;
        match expire_one(cluster, &id).await {
            Ok(()) => deleted += 1,
            Err(problem) => tracing::warn!("job {id}: {problem}"),
        }
    }
    Ok(deleted)
}

async fn expire_one(cluster: &Arc<Cluster>, id: &JobId) -> Result<(), Problem> {
    // The job has ended, so no driver has its record.
    let Some(mut record) = cluster.own_job(id).await? else { return Ok(()) };
    remove(cluster, &record.value.job).await?;
    for member in members(cluster, &record.value).await? {
        if let Some(mut member) = cluster.own_job(&member.job.id).await? {
            member.value.job.outputs = None;
            member.save().await?;
        }
    }
    let Some(outputs) = record.value.job.outputs.take() else { return Ok(()) };
    record.save().await?;
    let request = format!("DELETE {} (its time is over)", outputs.at);
    let entry = AuditEntry {
        at_ms: now_ms(),
        who: WHO.to_owned(),
        request,
        thing: id.to_string(),
        status: 200,
    };
    cluster.audit.add(&TenantName::of(id.as_str()), entry);
    Ok(())
}
