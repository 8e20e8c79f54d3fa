//! Images of inputs and uploaded input files go when no job needs them any more.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use perigee_model::data::FileEntry;
use perigee_model::inputs::{InputFrom, UPLOADED_INPUTS};
use perigee_model::{ImageName, Problem, ProblemKind, TenantName};
use perigee_repository::{Location, View};

use super::staging::note_use;
use super::{PAGE, read_list, uploaded};
use crate::accounts::files;
use crate::cluster::Cluster;
use crate::cluster::tasks::Task;
use crate::hash::is_sha256;
use crate::records::ImageRecord;
use crate::storage::images;

const COLLECT_EVERY: Duration = Duration::from_secs(600);
/// An image that no unfinished job needs is kept for this long, for the next job with the same inputs.
const IMAGE_KEPT_MS: u64 = 3_600_000;
/// Uploaded files are kept for this long after the last job that needs them has ended, and for those who are about to
/// submit one.
const FILE_KEPT_MS: u64 = 24 * 3_600_000;
/// Files that are removed while nobody may submit a job.
const REMOVED_AT_ONCE: usize = 100;
/// How often that is tried while jobs are being submitted.
const TRIES: usize = 20;
const AGAIN: Duration = Duration::from_millis(500);

/// Removes what no job needs any more. This is repeated.
pub async fn collect(cluster: Arc<Cluster>, task: Task) {
    loop {
        let collect = async {
            collect_once(&cluster).await;
            let repository = Arc::clone(&cluster.repository);
            drop(tokio::task::spawn_blocking(move || repository.drop_idle_uploads()).await);
            Ok("looked for inputs and cut uploads that nobody needs".to_owned())
        };
        task.round(collect).await;
        tokio::time::sleep(COLLECT_EVERY).await;
    }
}

/// Removes the images of inputs and the uploaded input files that no job needs, of all tenants. A failure is logged,
/// and the next time tries again.
pub async fn collect_once(cluster: &Cluster) {
    if let Err(problem) = collect_images(cluster).await {
        tracing::warn!("can't collect images of inputs: {problem}");
    }
    let mut tenants = cluster.accounts.tenant_names();
    tenants.push(TenantName::default());
    tenants.sort();
    tenants.dedup();
    for tenant in tenants {
        if let Err(problem) = collect_files(cluster, &tenant).await {
            tracing::warn!("can't collect uploaded input files of tenant {tenant}: {problem}");
        }
    }
}

/// Whether an unfinished job needs the image.
fn is_needed(cluster: &Cluster, image: &ImageName) -> bool {
    let jobs = cluster.unfinished_jobs();
    jobs.iter().any(|job| job.inputs.as_ref().is_some_and(|inputs| inputs.image == *image))
}

async fn collect_images(cluster: &Cluster) -> Result<(), Problem> {
    for record in cluster.records.list::<ImageRecord>("images/").await? {
        let Some(inputs) = record.inputs else { continue };
        if is_needed(cluster, &record.name) {
            note_use(cluster, &record.name).await?;
        } else if cluster.clock.age_ms(inputs.used_ms) > IMAGE_KEPT_MS && record.import.is_none() {
            match images::delete(cluster, &record.name).await {
                Ok(_) => tracing::info!("image {} of inputs is removed", record.name),
                // Another host may still need it, or a host not answer. The next round tries again.
                Err(problem) => tracing::info!("image {} stays: {problem}", record.name),
            }
        }
    }
    Ok(())
}

/// The uploaded files that jobs of the tenant need: those of unfinished ones, and of those that ended less than a day ago.
async fn needed_files(cluster: &Cluster, tenant: &TenantName) -> Result<BTreeSet<String>, Problem> {
    let mut needed = BTreeSet::new();
    for record in cluster.jobs().await? {
        let job = &record.job;
        let Some(list) = &job.spec.inputs else { continue };
        let is_over =
            job.ended_ms.is_some_and(|ended_ms| cluster.clock.age_ms(ended_ms) > FILE_KEPT_MS);
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

/// Removes those of some uploaded files that no job needs. `false` if that was not known, because jobs were submitted
/// meanwhile.
async fn remove_unneeded(
    cluster: &Cluster,
    view: &View,
    tenant: &TenantName,
    files: &[FileEntry],
) -> Result<bool, Problem> {
    let submissions = cluster.staging.submissions(tenant);
    let mut left = files;
    for _ in 0..TRIES {
        let before = submissions.count.load(Ordering::SeqCst);
        // Whoever has begun before has ended then, and the job is recorded or refused.
        let is_quiet = submissions.under_way.try_write().is_ok();
        if !is_quiet {
            tokio::time::sleep(AGAIN).await;
            continue;
        }
        let needed = needed_files(cluster, tenant).await?;
        while !left.is_empty() {
            let (some, others) = left.split_at(left.len().min(REMOVED_AT_ONCE));
            let Ok(_alone) = submissions.under_way.try_write() else { break };
            if submissions.count.load(Ordering::SeqCst) != before {
                break;
            }
            for entry in some.iter().filter(|entry| !needed.contains(&entry.name)) {
                match view.remove_file(uploaded(tenant, &entry.name)?).await {
                    Err(problem) if problem.kind != ProblemKind::NotFound => return Err(problem),
                    _ => tracing::debug!(%tenant, file = entry.name, "removed an uploaded input"),
                }
            }
            left = others;
        }
        if left.is_empty() {
            return Ok(true);
        }
        tokio::time::sleep(AGAIN).await;
    }
    Ok(false)
}

/// Removes the images of inputs and the uploaded input files of a tenant that is to be deleted. If it has jobs, they stay.
///
/// # Errors
/// If a host does not answer that has one of them, or the repository can't be used.
pub async fn forget_tenant(cluster: &Cluster, tenant: &TenantName) -> Result<(), Problem> {
    if !cluster.records.keys(&format!("jobs/{}", tenant.full(""))).await?.is_empty() {
        return Ok(());
    }
    let images = cluster.records.list::<ImageRecord>("images/").await?;
    for record in images.iter().filter(|record| record.inputs.is_some()) {
        if tenant.owns(record.name.as_str()) {
            images::delete(cluster, &record.name).await?;
        }
    }
    let view = files::view(cluster, tenant, "the controller".to_owned(), true);
    let directory = Location::new(tenant.as_str(), UPLOADED_INPUTS)?;
    loop {
        let page = match view.list(directory.clone(), None, PAGE).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(()),
            page => page?,
        };
        if page.entries.is_empty() {
            return view.remove_directory(directory).await;
        }
        for entry in page.entries {
            let path = format!("{UPLOADED_INPUTS}/{}", entry.name);
            // What is no file was not put there by Perigee, and stays: then the tenant does too.
            view.remove_file(Location::new(tenant.as_str(), &path)?).await?;
        }
    }
}

/// Removes old uploads that no job needs, one page of the directory after the other.
async fn collect_files(cluster: &Cluster, tenant: &TenantName) -> Result<(), Problem> {
    let view = files::view(cluster, tenant, "the controller".to_owned(), true);
    let directory = Location::new(tenant.as_str(), UPLOADED_INPUTS)?;
    let mut after = None;
    loop {
        let page = match view.list(directory.clone(), after, PAGE).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(()),
            page => page?,
        };
        let is_old = |entry: &FileEntry| {
            is_sha256(&entry.name) && cluster.clock.age_ms(entry.modified_ms) > FILE_KEPT_MS
        };
        let old: Vec<FileEntry> = page.entries.into_iter().filter(is_old).collect();
        if !old.is_empty() && !remove_unneeded(cluster, &view, tenant, &old).await? {
            tracing::debug!(%tenant, "uploaded inputs stay: jobs are being submitted all the time");
            return Ok(());
        }
        after = page.after;
        if after.is_none() {
            return Ok(());
        }
    }
}
