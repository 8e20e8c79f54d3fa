//! Deletes the outputs of jobs when their time is over. Each deletion is in the tenant's audit log.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::tenant::AuditEntry;
use perigee_model::{JobId, Problem, TenantName};

use super::remove;
use crate::cluster::{Cluster, now_ms};
use crate::jobs;

/// The time between two searches.
const EVERY: Duration = Duration::from_secs(60);

/// Who deletes them, in the audit log.
const WHO: &str = "perigee";

pub async fn run(cluster: Arc<Cluster>) {
    loop {
        if let Err(problem) = expire(&cluster, now_ms()).await {
            tracing::warn!("{problem}");
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Deletes what is kept until a time before this. Returns how many jobs had such outputs.
///
/// # Errors
/// If the jobs can't be listed. Outputs that can't be deleted now are tried again.
pub async fn expire(cluster: &Arc<Cluster>, now_ms: u64) -> Result<usize, Problem> {
    let mut deleted = 0;
    for record in cluster.jobs().await? {
        let until_ms = record.job.outputs.as_ref().and_then(|outputs| outputs.kept_until_ms);
        // What a member has goes with all that its gang has, and only when that has ended.
        if record.member.is_some()
            || !record.job.state.is_final()
            || until_ms.is_none_or(|until_ms| until_ms > now_ms)
        {
            continue;
        }
        let id = record.job.id;
        match expire_one(cluster, &id, now_ms).await {
            Ok(()) => deleted += 1,
            Err(problem) => tracing::warn!("job {id}: {problem}"),
        }
    }
    Ok(deleted)
}

async fn expire_one(cluster: &Arc<Cluster>, id: &JobId, now_ms: u64) -> Result<(), Problem> {
    // The job has ended, so no driver has its record.
    let Some(mut record) = cluster.own_job(id).await? else { return Ok(()) };
    remove(cluster, &record.value.job).await?;
    for member in jobs::members(cluster, &record.value).await? {
        if let Some(mut member) = cluster.own_job(&member.job.id).await? {
            member.value.job.outputs = None;
            member.save().await?;
        }
    }
    let Some(outputs) = record.value.job.outputs.take() else { return Ok(()) };
    record.save().await?;
    let request = format!("DELETE {} (its time is over)", outputs.at);
    let entry = AuditEntry {
        at_ms: now_ms,
        who: WHO.to_owned(),
        request,
        thing: id.to_string(),
        status: 200,
    };
    cluster.audit.add(&TenantName::of(id.as_str()), entry);
    Ok(())
}
