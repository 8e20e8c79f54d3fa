//! Tenants are made, and deleted when they have nothing any more.

use std::sync::Arc;

use perigee_model::client::EXPORT_KINDS;
use perigee_model::limits::{TENANT_NAME_BYTES, TENANTS};
use perigee_model::tenant::NewTenant;
use perigee_model::{Problem, TenantName};

use crate::accounts::{forget_user, put_tenant};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::accounts::{TenantRecord, tenant_key};
use crate::files::inputs;
use crate::storage::backups;

/// # Errors
/// `Conflict` if there is such a tenant; `Invalid` if the name can't be a tenant's.
pub async fn create_tenant(cluster: &Cluster, new: NewTenant) -> Result<(), Problem> {
    let NewTenant { name, quota } = new;
    let what = format!("can't make tenant {name}");
    TENANT_NAME_BYTES.check(name.as_str().len()).map_err(|e| e.problem(&what))?;
    if EXPORT_KINDS.contains(&name.as_str()) {
        let why = format!("{name} is a kind of export, and its volumes' names would be unclear");
        return Err(Problem::invalid(what, why).next("choose another name"));
    }
    let accounts = &cluster.accounts;
    let _turn = accounts.turn.lock().await;
    if accounts.quota(&name).is_ok() {
        return Err(Problem::conflict(what, "there is a tenant with this name"));
    }
    TENANTS.check(accounts.tenant_names().len() + 1).map_err(|e| e.problem(&what))?;
    // What an earlier tenant of this name had is gone, also if the controller has stopped while it was deleted.
    forget_files(cluster, &name).await?;
    crate::planning::forget_tenant(cluster, &name).await?;
    put_tenant(cluster, TenantRecord::new(name, quota, now_ms())).await
}

/// Deletes a tenant that has nothing any more, with its users.
///
/// # Errors
/// `Conflict` while it has volumes, images, jobs, backups or files, or an encrypted backup needs its key.
pub async fn delete_tenant(cluster: &Cluster, name: &TenantName) -> Result<(), Problem> {
    let what = format!("can't delete tenant {name}");
    if *name == TenantName::default() {
        return Err(Problem::invalid(what, "what is nobody else's is this tenant's"));
    }
    let accounts = &cluster.accounts;
    accounts.quota(name)?;
    // Nobody has asked for these, and nobody sees them.
    inputs::forget_tenant(cluster, name).await?;
    let _turn = accounts.turn.lock().await;
    accounts.quota(name)?;
    for (kind, prefix) in
        [("job", "jobs/"), ("volume", "volumes/"), ("image", "images/"), ("network", "networks/")]
    {
        let own = format!("{prefix}{}", name.full(""));
        if let Some(key) = cluster.records.keys(&own).await?.first() {
            let why = format!("it has {kind} {}", key.trim_start_matches(prefix));
            return Err(Problem::conflict(what, why).next("delete what it has first"));
        }
    }
    if let Some(of_backups) = backups::any_of_tenant(cluster, name).await? {
        let why = format!("it has {of_backups}");
        return Err(Problem::conflict(what, why).next("delete what it has first"));
    }
    let (repository, of) = (Arc::clone(&cluster.repository), name.clone());
    let has_files = tokio::task::spawn_blocking(move || repository.has_files(&of));
    if has_files.await.map_err(|e| Problem::internal(&what, e))?? {
        let why = format!("it has files: repo://{name}/");
        return Err(Problem::conflict(what, why).next("delete what it has first"));
    }
    // From here on nobody can begin to write a file of it.
    for user in accounts.users_of(name) {
        forget_user(cluster, &user).await?;
    }
    forget_files(cluster, name).await?;
    crate::planning::forget_tenant(cluster, name).await?;
    crate::jobs::forget_tenant(cluster, name).await?;
    crate::accounts::backups::forget_tenant(cluster, name).await?;
    cluster.records.remove(&tenant_key(name)).await?;
    accounts.write().tenants.remove(name);
    Ok(())
}

async fn forget_files(cluster: &Cluster, tenant: &TenantName) -> Result<(), Problem> {
    let (repository, of) = (Arc::clone(&cluster.repository), tenant.clone());
    let forgotten = tokio::task::spawn_blocking(move || repository.forget(&of));
    forgotten.await.map_err(|e| Problem::internal("can't use the repository", e))?
}
