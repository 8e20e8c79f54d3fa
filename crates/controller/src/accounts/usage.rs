//! What tenants use of their quotas.
//!
//! Volumes and images count with the size that a VM sees, and so do the root disks of VMs that live without a job. A file
//! that was sent for an import counts with its bytes until its host has removed it. A job's own disks do not count: its memory and its number of VMs are limited. VMs, vCPUs and memory are the scheduler's to compare ([`perigee_planner::queue`]).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use perigee_model::limits::VOLUMES;
use perigee_model::tenant::{Tenant, tenant_of};
use perigee_model::units::format_bytes;
use perigee_model::{Problem, ProblemKind, TenantName};

use super::backups;
use crate::cluster::Cluster;
use crate::cluster::accounts::{InMaking, Making, TenantRecord};
use crate::records::{ImageRecord, UPLOAD_KEPT_MS, UPLOADS, UploadRecord, VolumeRecord};

/// Room for a file that is being sent is taken in such steps, because each looks at all that the tenant has.
const UPLOAD_STEP_BYTES: u64 = 64 << 20;

/// Room in a tenant's quota for a volume or an image that is being made. Afterwards its record counts.
#[derive(Debug)]
pub struct QuotaHold<'a> {
    making: &'a Making,
    tenant: String,
    bytes: u64,
    count: u64,
}

impl Drop for QuotaHold<'_> {
    fn drop(&mut self) {
        let mut making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(making) = making.get_mut(&self.tenant) {
            making.bytes = making.bytes.saturating_sub(self.bytes);
            making.count = making.count.saturating_sub(self.count);
        }
    }
}

/// A tenant, with what it uses.
///
/// # Errors
/// `NotFound`.
pub async fn tenant(cluster: &Cluster, name: &TenantName) -> Result<Tenant, Problem> {
    let TenantRecord { quota, backup_targets, .. } = cluster.accounts.tenant(name)?;
    let running = cluster.index.taken().running.remove(name.as_str()).unwrap_or_default();
    let volume_bytes = volume_bytes(cluster, name.as_str()).await?;
    let users = cluster.accounts.users_of(name).len() as u64;
    let (repository, of) = (Arc::clone(&cluster.repository), name.clone());
    let used = tokio::task::spawn_blocking(move || repository.used(&of)).await;
    let (file_bytes, files) = used.map_err(|e| Problem::internal("can't count files", e))??;
    let spending = cluster.ledger.spending(Some(name));
    let backup_bytes = backups::held_bytes(cluster, name).await?;
    let name = name.clone();
    Ok(Tenant {
        name,
        quota,
        running,
        volume_bytes,
        file_bytes,
        files,
        backup_bytes,
        backup_targets,
        users,
        spending,
    })
}

/// The sizes of a tenant's volumes and images, and of its VMs' root disks, together, as last seen.
pub async fn volume_bytes(cluster: &Cluster, tenant: &str) -> Result<u64, Problem> {
    let volumes: Vec<VolumeRecord> = cluster.records.list("volumes/").await?;
    let images: Vec<ImageRecord> = cluster.records.list("images/").await?;
    let volumes = volumes.iter().filter(|volume| tenant_of(volume.name.as_str()) == tenant);
    let images = images.iter().filter(|image| tenant_of(image.name.as_str()) == tenant);
    let volumes = volumes.filter_map(|volume| volume.seen.as_ref()).map(|seen| seen.size_bytes);
    let jobs = cluster.unfinished_jobs();
    let persistent = jobs.iter().filter(|record| record.kind.is_persistent_vm());
    let roots = persistent.filter(|record| tenant_of(record.job.id.as_str()) == tenant);
    let roots = roots.filter_map(|record| record.job.spec.root_bytes);
    let uploads: Vec<UploadRecord> = cluster.records.list(UPLOADS).await?;
    let is_kept = |one: &UploadRecord| cluster.clock.age_ms(one.since_ms) < UPLOAD_KEPT_MS;
    let uploads = uploads.iter().filter(|one| one.tenant == tenant && is_kept(one));
    let uploads = uploads.map(|upload| upload.bytes);
    let sizes =
        volumes.chain(images.filter_map(|image| image.size_bytes)).chain(roots).chain(uploads);
    // A host may say anything.
    Ok(sizes.fold(0, u64::saturating_add))
}

/// Takes room for a volume or an image that is to be made. `full` is its name.
///
/// # Errors
/// `NoSpace` with what is used and what the limit is.
pub async fn hold_volume<'a>(
    cluster: &'a Cluster,
    full: &str,
    bytes: u64,
) -> Result<QuotaHold<'a>, Problem> {
    let tenant = tenant_of(full).to_owned();
    let what = format!("can't make {full}");
    let mut held = count_one(cluster, tenant, &what).await?;
    held.bytes = take(cluster, &held.tenant, bytes, &what).await?;
    Ok(held)
}

/// One more volume or image. What a tenant has without a quota is limited too.
async fn count_one<'a>(
    cluster: &'a Cluster,
    tenant: String,
    what: &str,
) -> Result<QuotaHold<'a>, Problem> {
    let _turn = cluster.accounts.turn.lock().await;
    let making = &cluster.accounts.making;
    let before = in_making(making, &tenant).count;
    let mut stored = 0;
    for prefix in ["volumes/", "images/"] {
        let own = format!("{prefix}{}", TenantName::new(&tenant).unwrap_or_default().full(""));
        let keys = cluster.records.keys(&own).await?;
        let is_its = |key: &&String| tenant_of(key.trim_start_matches(prefix)) == tenant;
        stored += keys.iter().filter(is_its).count() as u64;
    }
    VOLUMES.check(stored + before + 1).map_err(|error| {
        Problem::new(ProblemKind::NoSpace, what, error).next("delete what is not needed")
    })?;
    let mut all = making.lock().unwrap_or_else(PoisonError::into_inner);
    let own = all.entry(tenant.clone()).or_default();
    own.count += 1;
    Ok(QuotaHold { making, tenant, bytes: 0, count: 1 })
}

/// What a tenant is making. Whoever counts what it has asks for this first, and for what is stored afterwards. So
/// what gets its record in between counts twice for a moment, and never not at all.
fn in_making(making: &Making, tenant: &str) -> InMaking {
    let all = making.lock().unwrap_or_else(PoisonError::into_inner);
    all.get(tenant).copied().unwrap_or_default()
}

/// Adds to what a tenant is making, and returns how much: nothing if it has no quota.
async fn take(cluster: &Cluster, tenant: &str, bytes: u64, what: &str) -> Result<u64, Problem> {
    let accounts = &cluster.accounts;
    let limit = TenantName::new(tenant).ok().and_then(|of| accounts.quota(&of).ok()?.volume_bytes);
    let Some(limit) = limit else { return Ok(0) };
    let _turn = accounts.turn.lock().await;
    let before = in_making(&accounts.making, tenant).bytes;
    let stored = volume_bytes(cluster, tenant).await?;
    let used = stored.saturating_add(before);
    if used.saturating_add(bytes) > limit {
        let [used, limit, bytes] = [used, limit, bytes].map(format_bytes);
        let why = format!(
            "tenant {tenant} may have {limit} of volumes and images and has {used}; this one has {bytes}"
        );
        return Err(Problem::no_space(what, why)
            .next("delete what is not needed, or ask an admin for more (perigee tenant quota)"));
    }
    let mut making = accounts.making.lock().unwrap_or_else(PoisonError::into_inner);
    let in_making = making.entry(tenant.to_owned()).or_default();
    in_making.bytes = in_making.bytes.saturating_add(bytes);
    Ok(bytes)
}

/// As if the tenant were making so many volumes.
#[cfg(test)]
pub fn pretend_to_make<'a>(cluster: &'a Cluster, tenant: &str, count: u64) -> QuotaHold<'a> {
    let making = &cluster.accounts.making;
    let mut all = making.lock().unwrap_or_else(PoisonError::into_inner);
    all.entry(tenant.to_owned()).or_default().count += count;
    QuotaHold { making, tenant: tenant.to_owned(), bytes: 0, count }
}

/// Room for a file that is being sent, whose length nobody knows yet. It is given back when this is dropped.
pub struct UploadRoom {
    cluster: Arc<Cluster>,
    tenant: String,
    /// Taken, and how much of that is used.
    taken: AtomicU64,
    sent: AtomicU64,
    /// The tenant has no quota, or none any more: nothing more is taken.
    is_unlimited: AtomicBool,
    refused: Mutex<Option<Problem>>,
}

impl UploadRoom {
    /// Room for a file that the tenant sends. Nothing is taken from its quota yet.
    pub fn new(cluster: Arc<Cluster>, tenant: String) -> Self {
        let (taken, sent, is_unlimited, refused) = Default::default();
        Self { cluster, tenant, taken, sent, is_unlimited, refused }
    }

    /// To be called before more bytes are passed on. One task does so.
    ///
    /// # Errors
    /// `NoSpace` beyond the tenant's quota; [`Self::refused`] has it too.
    pub async fn add(&self, bytes: u64) -> Result<(), Problem> {
        let sent = self.sent.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let taken = self.taken.load(Ordering::Relaxed);
        if sent <= taken || self.is_unlimited.load(Ordering::Relaxed) {
            return Ok(());
        }
        let what = "can't take an upload";
        let needed = sent - taken;
        let added = match take(&self.cluster, &self.tenant, needed.max(UPLOAD_STEP_BYTES), what)
            .await
        {
            Ok(0) => {
                self.is_unlimited.store(true, Ordering::Relaxed);
                0
            }
            Ok(added) => added,
            // Near the limit, in small steps.
            Err(_) => match take(&self.cluster, &self.tenant, needed, what).await {
                Ok(added) => added,
                Err(problem) => {
                    let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
                    *refused = Some(problem.clone());
                    return Err(problem);
                }
            },
        };
        self.taken.store(taken.saturating_add(added), Ordering::Relaxed);
        Ok(())
    }

    /// Why no more could be taken.
    pub fn refused(&self) -> Option<Problem> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Records the whole file, and it counts no more as one that comes. In between nobody counts it twice, or not at all.
    pub async fn recorded(
        &self,
        record: impl Future<Output = Result<(), Problem>>,
    ) -> Result<(), Problem> {
        let _turn = self.cluster.accounts.turn.lock().await;
        record.await?;
        self.give_back();
        Ok(())
    }

    /// From now on nothing counts any more.
    pub fn give_back(&self) {
        if self.counts() {
            let (bytes, tenant) = (self.taken.swap(0, Ordering::Relaxed), self.tenant.clone());
            drop(QuotaHold { making: &self.cluster.accounts.making, tenant, bytes, count: 0 });
        }
    }

    /// Whether anything counts: the tenant has a quota, or had one when the upload began.
    pub fn counts(&self) -> bool {
        self.taken.load(Ordering::Relaxed) != 0
    }
}

impl Drop for UploadRoom {
    fn drop(&mut self) {
        self.give_back();
    }
}
