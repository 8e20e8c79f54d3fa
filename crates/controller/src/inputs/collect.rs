//! Images of inputs and uploaded input files go when no job needs them any more.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::data::FileEntry;
use perigee_model::inputs::{InputFrom, UPLOADED_INPUTS};
use perigee_model::{ImageName, Problem, ProblemKind, TenantName};
use perigee_repository::{Location, View};

use super::staging::note_use;
use super::{PAGE, read_list, uploaded};
use crate::cluster::{Cluster, now_ms};
use crate::files::is_sha256;
use crate::records::ImageRecord;
use crate::{data, images, jobs};

const COLLECT_EVERY: Duration = Duration::from_secs(600);
/// An image that no unfinished job needs is kept for this long, for the next job with the same inputs.
const IMAGE_KEPT_MS: u64 = 3_600_000;
/// Uploaded files are kept for this long after the last job that needs them has ended, and for those who are about to
/// submit one.
const FILE_KEPT_MS: u64 = 24 * 3_600_000;

/// Removes what no job needs any more. This is repeated.
pub async fn collect(cluster: Arc<Cluster>) {
    loop {
        collect_once(&cluster, now_ms()).await;
        if let Err(problem) = jobs::erase_deleted(&cluster).await {
            tracing::warn!("{problem}");
        }
        tokio::time::sleep(COLLECT_EVERY).await;
    }
}

pub async fn collect_once(cluster: &Cluster, now_ms: u64) {
    if let Err(problem) = collect_images(cluster, now_ms).await {
        tracing::warn!("can't collect images of inputs: {problem}");
    }
    let mut tenants = cluster.accounts.tenant_names();
    tenants.push(TenantName::default());
    tenants.sort();
    tenants.dedup();
    for tenant in tenants {
        if let Err(problem) = collect_files(cluster, &tenant, now_ms).await {
            tracing::warn!("can't collect uploaded input files of tenant {tenant}: {problem}");
        }
    }
}

/// Whether an unfinished job needs the image.
fn is_needed(cluster: &Cluster, image: &ImageName) -> bool {
    let jobs = cluster.unfinished_jobs();
    jobs.iter().any(|job| job.inputs.as_ref().is_some_and(|inputs| inputs.image == *image))
}

async fn collect_images(cluster: &Cluster, now_ms: u64) -> Result<(), Problem> {
    for record in cluster.records.list::<ImageRecord>("images/").await? {
        let Some(inputs) = record.inputs else { continue };
        if is_needed(cluster, &record.name) {
            note_use(cluster, &record.name).await?;
        } else if now_ms.saturating_sub(inputs.used_ms) > IMAGE_KEPT_MS && record.import.is_none() {
            match images::delete(cluster, &record.name).await {
                Ok(()) => tracing::info!("image {} of inputs is removed", record.name),
                // A volume may still stand on it, or a host not answer. The next round tries again.
                Err(problem) => tracing::info!("image {} stays: {problem}", record.name),
            }
        }
    }
    Ok(())
}

/// The uploaded files that jobs of the tenant need: those of unfinished ones, and of those that ended less than a day ago.
async fn needed_files(
    cluster: &Cluster,
    tenant: &TenantName,
    now_ms: u64,
) -> Result<BTreeSet<String>, Problem> {
    let mut needed = BTreeSet::new();
    for record in cluster.jobs().await? {
        let job = &record.job;
        let Some(list) = &job.spec.inputs else { continue };
        let is_over =
            job.ended_ms.is_some_and(|ended_ms| now_ms.saturating_sub(ended_ms) > FILE_KEPT_MS);
        if is_over || !tenant.owns(job.id.as_str()) || !needed.insert(list.clone()) {
            continue;
        }
        match read_list(cluster, tenant, list).await {
            Ok(list) => {
                needed.extend(list.inputs.into_iter().filter_map(|input| match input.from {
                    InputFrom::File(file) => Some(file.sha256),
                    _ => None,
                }))
            }
            // Somebody has removed or replaced it.
            Err(problem) if problem.kind == ProblemKind::Invalid => {}
            Err(problem) => return Err(problem),
        }
    }
    Ok(needed)
}

/// Removes old uploads that no job needs, one page of the directory after the other.
async fn collect_files(cluster: &Cluster, tenant: &TenantName, now_ms: u64) -> Result<(), Problem> {
    let account = data::account_of_tenant(cluster, tenant, true);
    let view = View::new(cluster.repository.clone(), account);
    let directory = Location::new(tenant.as_str(), UPLOADED_INPUTS)?;
    let mut after = None;
    loop {
        let page = match view.list(directory.clone(), after, PAGE).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(()),
            page => page?,
        };
        let is_old = |entry: &FileEntry| {
            is_sha256(&entry.name) && now_ms.saturating_sub(entry.modified_ms) > FILE_KEPT_MS
        };
        let old: Vec<FileEntry> = page.entries.into_iter().filter(is_old).collect();
        if !old.is_empty() {
            // Nobody submits a job with one of them meanwhile.
            let _alone = cluster.staging.collecting.write().await;
            let needed = needed_files(cluster, tenant, now_ms).await?;
            for entry in old.iter().filter(|entry| !needed.contains(&entry.name)) {
                match view.remove_file(uploaded(tenant, &entry.name)?).await {
                    Err(problem) if problem.kind != ProblemKind::NotFound => return Err(problem),
                    _ => tracing::debug!(%tenant, file = entry.name, "removed an uploaded input"),
                }
            }
        }
        after = page.after;
        if after.is_none() {
            return Ok(());
        }
    }
}
