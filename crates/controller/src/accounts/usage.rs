//! What tenants use of their quotas.
//!
//! Volumes and images count with the size that a VM sees, and so do the root disks of VMs that live without a job. A job's
//! own disks do not: its memory and its number of VMs are limited. VMs, vCPUs and memory are the scheduler's to compare ([`perigee_planner::queue`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use perigee_model::tenant::{Tenant, tenant_of};
use perigee_model::units::format_bytes;
use perigee_model::{Problem, TenantName};

use crate::cluster::Cluster;
use crate::records::{ImageRecord, VolumeRecord};

/// By tenant.
pub type Making = Mutex<BTreeMap<String, u64>>;

/// Room in a tenant's quota for a volume or an image that is being made. Afterwards its record counts.
#[derive(Debug)]
pub struct Held<'a> {
    making: &'a Making,
    tenant: String,
    bytes: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bytes) = making.get_mut(&self.tenant) {
            *bytes = bytes.saturating_sub(self.bytes);
        }
    }
}

/// A tenant, with what it uses.
///
/// # Errors
/// `NotFound`.
pub async fn tenant(cluster: &Cluster, name: &TenantName) -> Result<Tenant, Problem> {
    let quota = cluster.accounts.quota(name)?;
    let running = cluster.index.taken().running.remove(name.as_str()).unwrap_or_default();
    let volume_bytes = volume_bytes(cluster, name.as_str()).await?;
    let users = cluster.accounts.users_of(name).len() as u64;
    let (repository, of) = (Arc::clone(&cluster.repository), name.clone());
    let used = tokio::task::spawn_blocking(move || repository.used(&of)).await;
    let (file_bytes, files) = used.map_err(|e| Problem::internal("can't count files", e))??;
    Ok(Tenant { name: name.clone(), quota, running, volume_bytes, file_bytes, files, users })
}

/// The sizes of a tenant's volumes and images, and of its VMs' root disks, together, as last seen.
pub async fn volume_bytes(cluster: &Cluster, tenant: &str) -> Result<u64, Problem> {
    let volumes: Vec<VolumeRecord> = cluster.records.list("volumes/").await?;
    let images: Vec<ImageRecord> = cluster.records.list("images/").await?;
    let volumes = volumes.iter().filter(|volume| tenant_of(volume.name.as_str()) == tenant);
    let images = images.iter().filter(|image| tenant_of(image.name.as_str()) == tenant);
    let volumes = volumes.filter_map(|volume| volume.seen.as_ref()).map(|seen| seen.size_bytes);
    let jobs = cluster.unfinished_jobs();
    let lasting = jobs.iter().filter(|record| record.lasting.is_some());
    let roots = lasting.filter(|record| tenant_of(record.job.id.as_str()) == tenant);
    let roots = roots.filter_map(|record| record.job.spec.root_bytes);
    let sizes = volumes.chain(images.filter_map(|image| image.size_bytes)).chain(roots);
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
) -> Result<Held<'a>, Problem> {
    let accounts = &cluster.accounts;
    let tenant = tenant_of(full).to_owned();
    let making = &accounts.making;
    let held = |bytes| Held { making, tenant: tenant.clone(), bytes };
    let Some(limit) = accounts.quota_of(full).volume_bytes else { return Ok(held(0)) };
    let _turn = accounts.turn.lock().await;
    let stored = volume_bytes(cluster, &tenant).await?;
    let mut making = making.lock().unwrap_or_else(PoisonError::into_inner);
    let in_making = making.entry(tenant.clone()).or_default();
    let used = stored.saturating_add(*in_making);
    if used.saturating_add(bytes) > limit {
        let [used, limit, bytes] = [used, limit, bytes].map(format_bytes);
        let why = format!(
            "tenant {tenant} may have {limit} of volumes and images and has {used}; this one has {bytes}"
        );
        return Err(Problem::no_space(format!("can't make {full}"), why)
            .next("delete what is not needed, or ask an admin for more (perigee tenant quota)"));
    }
    *in_making = in_making.saturating_add(bytes);
    Ok(held(bytes))
}
