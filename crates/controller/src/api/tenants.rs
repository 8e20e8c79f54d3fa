//! `/tenants`, `/me`, `/audit`

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use perigee_http::{Json, Reply};
use perigee_model::tenant::{
    AccessToken, AuditEntry, MadeAccessToken, Me, NewAccessToken, NewTenant, NewUser, Quota,
    SetBackupKey, SshKey, Tenant, TenantBackupKey, TenantBackupTargets, User,
};
use perigee_model::{Problem, TenantName, UserName};
use serde::Deserialize;

use super::caller::Caller;
use super::{Name, Shared, json, to_its_end};
use crate::accounts;
use crate::cluster::Cluster;
use crate::storage::backups;
use crate::tenants;

/// A tenant and one of its users, in a path.
type OfUser = Result<Path<(TenantName, UserName)>, PathRejection>;

fn parsed<T>(path: Result<Path<T>, PathRejection>) -> Result<T, Problem> {
    path.map(|Path(parts)| parts).map_err(|e| Problem::invalid("request path", e.body_text()))
}

/// Who asks: the user of the token, or an admin.
#[utoipa::path(get, path = "/me", tag = "tenants", responses((status = 200, body = Me)))]
pub async fn me(caller: Caller) -> Reply<Me> {
    json(caller.me())
}

/// The query of [`audit`].
#[derive(Debug, Deserialize)]
pub struct Since {
    #[serde(default)]
    pub since_ms: u64,
    pub tenant: Option<TenantName>,
}

/// The last entries of a tenant's audit log, the oldest first, at most 1000. The log has what was asked for but reading, and
/// what was refused, and keeps the newest 8 to 16 MiB.
#[utoipa::path(get, path = "/audit", tag = "tenants",
    params(("since_ms" = Option<u64>, Query), ("tenant" = Option<String>, Query)),
    responses((status = 200, body = Vec<AuditEntry>)))]
pub async fn audit(
    State(cluster): Shared,
    caller: Caller,
    query: Result<Query<Since>, QueryRejection>,
) -> Reply<Vec<AuditEntry>> {
    let Query(ask) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    let (tenant, since_ms) = audited(&cluster, &caller, ask)?;
    let read = tokio::task::spawn_blocking(move || cluster.audit.read(&tenant, since_ms));
    json(read.await.map_err(|e| Problem::internal("can't read the audit log", e))??)
}

/// The very last entries of the caller's own log, as [`audit`] has them: so much is read in no time, however long the log is.
pub async fn last_changes(State(cluster): Shared, caller: Caller) -> Reply<Vec<AuditEntry>> {
    let (tenant, since_ms) = audited(&cluster, &caller, Since { since_ms: 0, tenant: None })?;
    let read = tokio::task::spawn_blocking(move || cluster.audit.last(&tenant, since_ms));
    json(read.await.map_err(|e| Problem::internal("can't read the audit log", e))??)
}

/// Whose log is read, and from when on.
fn audited(cluster: &Cluster, caller: &Caller, ask: Since) -> Result<(TenantName, u64), Problem> {
    let tenant = ask.tenant.unwrap_or_else(|| caller.tenant.clone());
    caller.check_tenant(&tenant)?;
    // The log is kept when a tenant is deleted. Another tenant may get its name.
    let created_ms = cluster.accounts.created_ms(&tenant)?;
    let since_ms = if caller.is_admin() { ask.since_ms } else { ask.since_ms.max(created_ms) };
    Ok((tenant, since_ms))
}

/// The tenants, each with what it may use and what it uses.
#[utoipa::path(get, path = "/tenants", tag = "tenants",
    responses((status = 200, body = Vec<Tenant>)))]
pub async fn list(State(cluster): Shared) -> Reply<Vec<Tenant>> {
    let mut tenants = Vec::new();
    for name in cluster.accounts.tenant_names() {
        tenants.push(accounts::tenant(&cluster, &name).await?);
    }
    json(tenants)
}

/// Makes a tenant. It has no users yet.
#[utoipa::path(post, path = "/tenants", tag = "tenants", request_body = NewTenant,
    responses((status = 200, body = Tenant)))]
pub async fn create(
    State(cluster): Shared,
    caller: Caller,
    Json(new): Json<NewTenant>,
) -> Reply<Tenant> {
    let name = new.name.clone();
    caller.did(name.as_str());
    let change = async move {
        tenants::create_tenant(&cluster, new).await?;
        accounts::tenant(&cluster, &name).await
    };
    json(to_its_end(change).await?)
}

/// A tenant, with what it may use and what it uses.
#[utoipa::path(get, path = "/tenants/{tenant}", tag = "tenants", params(("tenant" = String, Path)),
    responses((status = 200, body = Tenant)))]
pub async fn info(
    State(cluster): Shared,
    caller: Caller,
    Name(tenant): Name<TenantName>,
) -> Reply<Tenant> {
    caller.check_tenant(&tenant)?;
    json(accounts::tenant(&cluster, &tenant).await?)
}

/// Deletes a tenant that has no volumes, images and jobs any more, with its users.
#[utoipa::path(delete, path = "/tenants/{tenant}", tag = "tenants",
    params(("tenant" = String, Path)), responses((status = 200)))]
pub async fn delete(State(cluster): Shared, Name(tenant): Name<TenantName>) -> Reply<()> {
    json(to_its_end(async move { tenants::delete_tenant(&cluster, &tenant).await }).await?)
}

/// Changes what a tenant may use. What it has already stays.
#[utoipa::path(put, path = "/tenants/{tenant}/quota", tag = "tenants",
    params(("tenant" = String, Path)), request_body = Quota,
    responses((status = 200, body = Tenant)))]
pub async fn set_quota(
    State(cluster): Shared,
    Name(tenant): Name<TenantName>,
    Json(quota): Json<Quota>,
) -> Reply<Tenant> {
    let change = async move {
        accounts::set_quota(&cluster, &tenant, quota).await?;
        accounts::tenant(&cluster, &tenant).await
    };
    json(to_its_end(change).await?)
}

/// Says where a tenant's users may have backups made. No backups of others may be there: those that the controller knows are named. What is at a target that is left out stays there, and counts no more.
#[utoipa::path(put, path = "/tenants/{tenant}/backup-targets", tag = "tenants",
    params(("tenant" = String, Path)), request_body = TenantBackupTargets,
    responses((status = 200, body = Tenant)))]
pub async fn set_backup_targets(
    State(cluster): Shared,
    Name(tenant): Name<TenantName>,
    Json(ask): Json<TenantBackupTargets>,
) -> Reply<Tenant> {
    let change = async move {
        // No backup of others begins there between the two.
        let beginning = cluster.beginning_backups.lock().await;
        backups::check_no_others(&cluster, &tenant, &ask.targets).await?;
        accounts::backups::set_targets(&cluster, &tenant, ask.targets).await?;
        drop(beginning);
        accounts::tenant(&cluster, &tenant).await
    };
    json(to_its_end(change).await?)
}

/// A tenant's key, with which its backups are encrypted where that is asked for. Keep a copy where the loss of the cluster does not reach: nobody reads them without it.
#[utoipa::path(get, path = "/tenants/{tenant}/backup-key", tag = "tenants",
    params(("tenant" = String, Path)), responses((status = 200, body = TenantBackupKey)))]
pub async fn backup_key(
    State(cluster): Shared,
    caller: Caller,
    Name(tenant): Name<TenantName>,
) -> Reply<TenantBackupKey> {
    caller.check_tenant(&tenant)?;
    let key = accounts::backups::key(&cluster, &tenant)?;
    json(TenantBackupKey { tenant, key })
}

/// Gives a tenant its key: a new one, or one that backups of another cluster were encrypted with. It is never changed.
#[utoipa::path(put, path = "/tenants/{tenant}/backup-key", tag = "tenants",
    params(("tenant" = String, Path)), request_body = SetBackupKey,
    responses((status = 200, body = TenantBackupKey)))]
pub async fn set_backup_key(
    State(cluster): Shared,
    caller: Caller,
    Name(tenant): Name<TenantName>,
    Json(ask): Json<SetBackupKey>,
) -> Reply<TenantBackupKey> {
    caller.check_tenant(&tenant)?;
    let change = async move {
        let key = accounts::backups::set_key(&cluster, &tenant, ask.key).await?;
        Ok(TenantBackupKey { tenant, key })
    };
    json(to_its_end(change).await?)
}

/// The users of a tenant, with their roles.
#[utoipa::path(get, path = "/tenants/{tenant}/users", tag = "tenants",
    params(("tenant" = String, Path)), responses((status = 200, body = Vec<User>)))]
pub async fn users(State(cluster): Shared, Name(tenant): Name<TenantName>) -> Reply<Vec<User>> {
    cluster.accounts.created_ms(&tenant)?;
    json(cluster.accounts.users_of(&tenant))
}

/// A user, with its SSH keys.
#[utoipa::path(get, path = "/tenants/{tenant}/users/{user}", tag = "tenants",
    params(("tenant" = String, Path), ("user" = String, Path)),
    responses((status = 200, body = User)))]
pub async fn user(State(cluster): Shared, caller: Caller, path: OfUser) -> Reply<User> {
    let (tenant, user) = parsed(path)?;
    caller.check_self(&tenant, &user)?;
    json(cluster.accounts.user(&tenant, &user)?)
}

/// Adds a user, or changes its role.
#[utoipa::path(put, path = "/tenants/{tenant}/users/{user}", tag = "tenants",
    params(("tenant" = String, Path), ("user" = String, Path)), request_body = NewUser,
    responses((status = 200, body = User)))]
pub async fn put_user(
    State(cluster): Shared,
    path: OfUser,
    Json(new): Json<NewUser>,
) -> Reply<User> {
    let (tenant, user) = parsed(path)?;
    let change = async move { accounts::put_user(&cluster, &tenant, &user, new.role).await };
    json(to_its_end(change).await?)
}

/// Removes a user with its tokens and SSH keys. What it has made is its tenant's, and stays.
#[utoipa::path(delete, path = "/tenants/{tenant}/users/{user}", tag = "tenants",
    params(("tenant" = String, Path), ("user" = String, Path)), responses((status = 200)))]
pub async fn remove_user(State(cluster): Shared, path: OfUser) -> Reply<()> {
    let (tenant, user) = parsed(path)?;
    json(to_its_end(async move { accounts::remove_user(&cluster, &tenant, &user).await }).await?)
}

/// A user's tokens, without their secrets.
#[utoipa::path(get, path = "/tenants/{tenant}/users/{user}/tokens", tag = "tenants",
    params(("tenant" = String, Path), ("user" = String, Path)),
    responses((status = 200, body = Vec<AccessToken>)))]
pub async fn tokens(
    State(cluster): Shared,
    caller: Caller,
    path: OfUser,
) -> Reply<Vec<AccessToken>> {
    let (tenant, user) = parsed(path)?;
    caller.check_self(&tenant, &user)?;
    cluster.accounts.user(&tenant, &user)?;
    json(accounts::tokens_of(&cluster, &tenant, &user))
}

/// Makes a token with which the user is known. It is shown this once. One that the user asks for with a token ends with that
/// one at the latest.
#[utoipa::path(post, path = "/tenants/{tenant}/users/{user}/tokens", tag = "tenants",
    params(("tenant" = String, Path), ("user" = String, Path)), request_body = NewAccessToken,
    responses((status = 200, body = MadeAccessToken)))]
pub async fn make_token(
    State(cluster): Shared,
    caller: Caller,
    path: OfUser,
    Json(new): Json<NewAccessToken>,
) -> Reply<MadeAccessToken> {
    let (tenant, user) = parsed(path)?;
    caller.check_self(&tenant, &user)?;
    let by = caller.own_token(&tenant, &user).cloned();
    let change = async move {
        accounts::make_token(&cluster, &tenant, &user, new.life_s, by.as_ref()).await
    };
    let made = to_its_end(change).await?;
    caller.did(&format!("token {}", made.id));
    json(made)
}

/// Revokes a token, and the tokens and SSH keys that the user has made with it.
#[utoipa::path(delete, path = "/tenants/{tenant}/users/{user}/tokens/{token}", tag = "tenants",
    params(("tenant" = String, Path), ("user" = String, Path), ("token" = String, Path)),
    responses((status = 200)))]
pub async fn revoke_token(
    State(cluster): Shared,
    caller: Caller,
    path: Result<Path<(TenantName, UserName, String)>, PathRejection>,
) -> Reply<()> {
    let (tenant, user, token) = parsed(path)?;
    caller.check_self(&tenant, &user)?;
    let change = async move { accounts::revoke_token(&cluster, &tenant, &user, &token).await };
    json(to_its_end(change).await?)
}

/// Adds an SSH key. One of the same name is replaced.
#[utoipa::path(put, path = "/tenants/{tenant}/users/{user}/keys", tag = "tenants",
    params(("tenant" = String, Path), ("user" = String, Path)), request_body = SshKey,
    responses((status = 200, body = User)))]
pub async fn put_key(
    State(cluster): Shared,
    caller: Caller,
    path: OfUser,
    Json(key): Json<SshKey>,
) -> Reply<User> {
    let (tenant, user) = parsed(path)?;
    caller.check_self(&tenant, &user)?;
    let key = SshKey::new(key.name, &key.key)
        .map_err(|e| Problem::invalid(format!("can't add a key of {tenant}/{user}"), e))?;
    let by_token = caller.own_token(&tenant, &user).map(|token| token.id.clone());
    let key = SshKey { by_token, ..key };
    let change = async move { accounts::put_key(&cluster, (&tenant, &user), key).await };
    json(to_its_end(change).await?)
}

/// Removes an SSH key.
#[utoipa::path(delete, path = "/tenants/{tenant}/users/{user}/keys/{key}", tag = "tenants",
    params(("tenant" = String, Path), ("user" = String, Path), ("key" = String, Path)),
    responses((status = 200)))]
pub async fn remove_key(
    State(cluster): Shared,
    caller: Caller,
    path: Result<Path<(TenantName, UserName, UserName)>, PathRejection>,
) -> Reply<()> {
    let (tenant, user, key) = parsed(path)?;
    caller.check_self(&tenant, &user)?;
    let change = async move { accounts::remove_key(&cluster, (&tenant, &user), &key).await };
    json(to_its_end(change).await?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use perigee_http::Peer;
    use perigee_model::tenant::Role;

    use super::*;
    use crate::cluster::{Timing, Traffic};
    use crate::tests::PATIENCE;

    /// A cluster, and what is kept for as long as it is used.
    async fn opened() -> (Arc<Cluster>, impl Sized) {
        let dir = tempfile::tempdir().expect("a directory");
        let (wanted, drivers) = tokio::sync::mpsc::unbounded_channel();
        let opened = Cluster::open(
            dir.path(),
            Timing::default(),
            Traffic::Plain,
            Default::default(),
            wanted,
        )
        .await;
        (opened.expect("a cluster"), (dir, drivers))
    }

    /// It was in the store, and did not count until the controller started again.
    #[tokio::test]
    async fn a_quota_is_changed_also_if_the_client_does_not_wait_for_the_answer() {
        let (cluster, _kept) = opened().await;
        let quota = Quota { vms: Some(7), ..Quota::default() };
        let tenant = Name(TenantName::default());
        let request = set_quota(State(Arc::clone(&cluster)), tenant, Json(quota));
        assert!(request.now_or_never().is_none(), "the client has gone before the answer");
        let changed = async {
            while cluster.accounts.quota_of("a-job") != quota {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, changed).await.expect("it is changed");
    }

    /// It was not in the store any more, and good until the controller started again.
    #[tokio::test]
    async fn a_token_is_revoked_also_if_the_client_does_not_wait_for_the_answer() {
        let (cluster, _kept) = opened().await;
        let (tenant, ann) = (TenantName::default(), UserName::new("ann").expect("a name"));
        accounts::put_user(&cluster, &tenant, &ann, Role::Member).await.expect("a user");
        let made = accounts::make_token(&cluster, &tenant, &ann, 3600, None).await;
        let made = made.expect("a token");
        let path = Ok(Path((tenant, ann, made.id.clone())));
        let request = revoke_token(State(Arc::clone(&cluster)), Caller::admin(&Peer::Local), path);
        assert!(request.now_or_never().is_none(), "the client has gone before the answer");
        let revoked = async {
            while cluster.accounts.by_token(&made.token).is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, revoked).await.expect("it is revoked");
    }
}
