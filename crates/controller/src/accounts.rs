//! Tenants, their users, and the tokens and SSH keys by which users are known.
//!
//! All of it is in memory, so that asking who sends a request waits for nothing. The store is written first. Whoever
//! changes something has the turn.

pub mod backups;
pub mod files;
mod tokens;
mod usage;

use perigee_model::limits::{MONEY_MICROS, SSH_KEYS, USERS};
use perigee_model::tenant::{Quota, Role, SshKey, User};
use perigee_model::{Problem, TenantName, UserName};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::accounts::{TenantRecord, tenant_key, user_key};

#[cfg(test)]
pub use tokens::expire;
pub use tokens::{make_token, revoke_token, tokens_of};
#[cfg(test)]
pub use usage::pretend_to_make;
pub use usage::{QuotaHold, UploadRoom, hold_volume, tenant};

/// # Errors
/// `NotFound`.
pub async fn set_quota(cluster: &Cluster, name: &TenantName, quota: Quota) -> Result<(), Problem> {
    let _turn = cluster.accounts.turn.lock().await;
    let record = cluster.accounts.tenant(name)?;
    put_tenant(cluster, TenantRecord { quota, ..record }).await?;
    // A job may wait for it.
    cluster.index.changed.notify_one();
    Ok(())
}

/// Stores a tenant, or what is new of it. The caller has the turn.
///
/// # Errors
/// `Invalid` for a budget beyond the limit; if the store fails.
pub async fn put_tenant(cluster: &Cluster, record: TenantRecord) -> Result<(), Problem> {
    let name = record.name.clone();
    let budget = record.quota.budget_month.unwrap_or_default();
    MONEY_MICROS
        .check(budget.micros)
        .map_err(|error| error.problem(format!("can't set the budget of tenant {name}")))?;
    let key = tenant_key(&name);
    if !cluster.records.create_asked(&key, &record).await? {
        cluster.records.put(&key, &record).await?;
    }
    cluster.accounts.write().tenants.insert(name.clone(), record);
    cluster.repository.set_quota(&name, files::quota_of(cluster, &name));
    Ok(())
}

/// Tells the repository the quotas of all tenants, after a restart.
pub fn tell_quotas(cluster: &Cluster) {
    for name in cluster.accounts.tenant_names() {
        cluster.repository.set_quota(&name, files::quota_of(cluster, &name));
    }
}

/// Adds a user, or changes its role.
///
/// # Errors
/// `NotFound` if there is no such tenant; `Invalid` for an admin of another tenant than `default`.
pub async fn put_user(
    cluster: &Cluster,
    tenant: &TenantName,
    name: &UserName,
    role: Role,
) -> Result<User, Problem> {
    let what = format!("can't add user {tenant}/{name}");
    if role == Role::Admin && *tenant != TenantName::default() {
        let why = "an admin may do everything, for all tenants";
        return Err(Problem::invalid(what, why)
            .next(format!("add it as default/{name}, or with another role")));
    }
    let accounts = &cluster.accounts;
    let _turn = accounts.turn.lock().await;
    accounts.quota(tenant)?;
    let user = match accounts.user(tenant, name) {
        Ok(user) => User { role, ..user },
        Err(_) => {
            USERS.check(accounts.users_of(tenant).len() + 1).map_err(|e| e.problem(&what))?;
            let (tenant, name) = (tenant.clone(), name.clone());
            User { tenant, name, role, created_ms: now_ms(), keys: Vec::new() }
        }
    };
    save_user(cluster, &user).await?;
    Ok(user)
}

async fn save_user(cluster: &Cluster, user: &User) -> Result<(), Problem> {
    cluster.records.put(&user_key(&user.tenant, &user.name), user).await?;
    let key = (user.tenant.clone(), user.name.clone());
    cluster.accounts.write().users.insert(key, user.clone());
    Ok(())
}

/// Removes a user with its tokens and keys. What it has made is its tenant's, and stays.
///
/// # Errors
/// `NotFound`.
pub async fn remove_user(
    cluster: &Cluster,
    tenant: &TenantName,
    name: &UserName,
) -> Result<(), Problem> {
    let _turn = cluster.accounts.turn.lock().await;
    let user = cluster.accounts.user(tenant, name)?;
    forget_user(cluster, &user).await
}

/// Removes a user with all that is the user's own. The caller has the turn.
///
/// # Errors
/// If the store fails.
pub async fn forget_user(cluster: &Cluster, user: &User) -> Result<(), Problem> {
    tokens::forget_all(cluster, &user.tenant, &user.name).await?;
    cluster.requests.forget_of(&cluster.records, &user.tenant, &user.name).await?;
    cluster.records.remove(&user_key(&user.tenant, &user.name)).await?;
    let key = (user.tenant.clone(), user.name.clone());
    cluster.accounts.write().users.remove(&key);
    Ok(())
}

/// Adds an SSH key. One of the same name is replaced. Other users may have the key too: the login name says who comes.
///
/// # Errors
/// `NotFound` without such a user; `Invalid` beyond a limit; `Forbidden` if the token that adds it is not good any more.
pub async fn put_key(
    cluster: &Cluster,
    (tenant, name): (&TenantName, &UserName),
    key: SshKey,
) -> Result<User, Problem> {
    let what = format!("can't add key {} of user {tenant}/{name}", key.name);
    let accounts = &cluster.accounts;
    let _turn = accounts.turn.lock().await;
    tokens::check_used(cluster, &what, key.by_token.as_deref())?;
    let mut user = accounts.user(tenant, name)?;
    user.keys.retain(|own| own.name != key.name && own.key != key.key);
    user.keys.push(key);
    SSH_KEYS.check(user.keys.len()).map_err(|e| e.problem(&what))?;
    save_user(cluster, &user).await?;
    Ok(user)
}

/// # Errors
/// `NotFound`.
pub async fn remove_key(
    cluster: &Cluster,
    (tenant, name): (&TenantName, &UserName),
    key: &UserName,
) -> Result<(), Problem> {
    let _turn = cluster.accounts.turn.lock().await;
    let mut user = cluster.accounts.user(tenant, name)?;
    let before = user.keys.len();
    user.keys.retain(|own| own.name != *key);
    if user.keys.len() == before {
        return Err(Problem::not_found(format!("key {key}"), "the user has no such key")
            .next("`perigee user key list` shows the keys"));
    }
    save_user(cluster, &user).await
}
