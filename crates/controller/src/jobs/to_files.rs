//! Moves the logs and samples of ended jobs from the store to files ([`crate::job_files`]), when the format level allows that. Those of a job that goes on
//! are moved by its driver.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::job::{LogLine, Sample};
use perigee_model::{JobId, Problem};

use super::{log, samples};
use crate::cluster::Cluster;
use crate::job_files::JobDirectory;
use crate::level;
use crate::records::{LogKept, Records};

/// Moves all there is. A reader sees each of them in the store or in files: the records go last.
///
/// # Errors
/// If the store or the disk fails.
pub async fn move_to_files(cluster: &Cluster) -> Result<(), Problem> {
    let records = &cluster.records;
    if level::in_force(records).await? < level::JOB_FILES {
        return Ok(());
    }
    let (logs, series) = (below(records, "logs/").await?, below(records, "samples/").await?);
    if logs.is_empty() && series.is_empty() {
        return Ok(());
    }
    let ended = cluster.jobs().await?.into_iter().filter(|record| record.job.state.is_final());
    let ended: BTreeMap<String, (JobId, u64)> = ended
        .map(|record| (record.job.id.to_string(), (record.job.id, record.job.submitted_ms)))
        .collect();
    let files_of = |(id, submitted_ms): &(JobId, u64)| cluster.job_files.of(id, *submitted_ms);
    // One that can't be moved does not hold up the others.
    let mut first = Ok(());
    for files in logs.iter().filter_map(|id| ended.get(id)).map(files_of) {
        first = first.and(move_log(records, &files).await);
    }
    for files in series.iter().filter_map(|id| ended.get(id)).map(files_of) {
        first = first.and(move_samples(records, &files).await);
    }
    first
}

async fn move_log(records: &Records, files: &Arc<JobDirectory>) -> Result<(), Problem> {
    let prefix = log::prefix(&files.job);
    let lines = records.list::<Vec<LogLine>>(&prefix).await?.concat();
    files.add_lines(lines, Vec::new(), LogKept::default()).await?;
    records.remove_all(&prefix).await
}

async fn move_samples(records: &Records, files: &Arc<JobDirectory>) -> Result<(), Problem> {
    let key = samples::key(&files.job);
    if files.samples().await?.is_none() {
        let points: Option<Vec<Sample>> = records.read(&key).await?;
        files.set_samples(points.unwrap_or_default()).await?;
    }
    records.remove(&key).await
}

/// The names after this prefix, up to the next `/`. One record at a time is in memory.
async fn below(records: &Records, prefix: &str) -> Result<Vec<String>, Problem> {
    let (mut names, mut after) = (Vec::new(), String::new());
    loop {
        let next = records.list_after::<serde_json::Value>(prefix, &after, 1).await?;
        let Some((key, _)) = next.into_iter().next() else { return Ok(names) };
        let rest = &key[prefix.len()..];
        let name = match rest.split_once('/') {
            Some((name, _)) => name.to_owned(),
            None => rest.to_owned(),
        };
        // All keys with more after the name, and none of another name.
        after = if rest.contains('/') { format!("{prefix}{name}/\u{10FFFF}") } else { key };
        names.push(name);
    }
}
