//! What a tenant may do with files in the repository.

use std::sync::Arc;

use perigee_model::TenantName;
use perigee_repository::{Account, Quota, View};

use crate::cluster::Cluster;

/// The repository for work in a tenant's name: as a user of the tenant sees it.
pub fn view(cluster: &Cluster, tenant: &TenantName, user: String, may_write: bool) -> View {
    let (tenant, quota) = (tenant.clone(), quota_of(cluster, tenant));
    let account = Account { tenant, user, may_write, is_admin: false, quota };
    View::new(Arc::clone(&cluster.repository), account)
}

/// How many bytes and files a tenant may have in the repository.
pub fn quota_of(cluster: &Cluster, tenant: &TenantName) -> Quota {
    let quota = cluster.accounts.quota_of(&tenant.full("files"));
    let default = Quota::default();
    Quota {
        bytes: quota.file_bytes.unwrap_or(default.bytes),
        files: quota.files.unwrap_or(default.files),
    }
}
