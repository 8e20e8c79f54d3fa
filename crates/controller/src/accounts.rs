//! Tenants, their users, and the tokens and SSH keys by which users are known.
//!
//! All of it is in memory, so that asking who sends a request waits for nothing. The store is written first. Whoever
//! changes something has the turn.

mod tokens;
mod usage;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use perigee_http::Clock;
use perigee_model::client::EXPORT_KINDS;
use perigee_model::limits::{SSH_KEYS, TENANT_NAME_BYTES, TENANTS, USERS};
use perigee_model::tenant::{
    DEFAULT_TENANT, NewTenant, Quota, Role, Running, SEPARATOR, SshKey, User,
};
use perigee_model::units::format_duration;
use perigee_model::{Problem, TenantName, UserName};
use perigee_planner::queue::QuotaUse;
use serde::{Deserialize, Serialize};

use crate::api::doors;
use crate::clock;
use crate::cluster::{Cluster, Taken, now_ms};
use crate::files::inputs;
use crate::records::Records;

#[cfg(test)]
pub use tokens::expire;
pub use tokens::{TokenRecord, UsedToken, make_token, revoke_token, tokens_of};
#[cfg(test)]
pub use usage::pretend_to_make;
pub use usage::{Held, UploadRoom, hold_volume, tenant};

use usage::Making;

const TENANT_RECORDS: &str = "tenants/";
const USER_RECORDS: &str = "users/";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TenantRecord {
    pub name: TenantName,
    pub quota: Quota,
    /// Unix time. What is older is an earlier tenant's of this name.
    pub created_ms: u64,
}

#[derive(Debug, Default)]
pub struct Accounts {
    inner: RwLock<Inner>,
    /// Whoever changes accounts, or takes on a volume, takes turns. It is held over no call to a host.
    turn: tokio::sync::Mutex<()>,
    /// The volumes and images that are being made.
    making: Making,
}

type UserKey = (TenantName, UserName);

#[derive(Debug, Default)]
struct Inner {
    tenants: BTreeMap<TenantName, TenantRecord>,
    users: BTreeMap<UserKey, User>,
    /// By their ids.
    tokens: BTreeMap<String, TokenRecord>,
}

fn tenant_key(tenant: &TenantName) -> String {
    format!("{TENANT_RECORDS}{tenant}")
}

fn user_key(tenant: &TenantName, user: &UserName) -> String {
    format!("{USER_RECORDS}{tenant}/{user}")
}

impl Accounts {
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let mut inner = Inner::default();
        let (name, quota) = (TenantName::default(), Quota::default());
        inner.tenants.insert(name.clone(), TenantRecord { name, quota, created_ms: 0 });
        for tenant in records.list::<TenantRecord>(TENANT_RECORDS).await? {
            inner.tenants.insert(tenant.name.clone(), tenant);
        }
        for user in records.list::<User>(USER_RECORDS).await? {
            inner.users.insert((user.tenant.clone(), user.name.clone()), user);
        }
        for token in records.list::<TokenRecord>(tokens::RECORDS).await? {
            inner.tokens.insert(token.id.clone(), token);
        }
        Ok(Self { inner: RwLock::new(inner), ..Self::default() })
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The user who has this token, and the token without its secret, if it is good now. What is made with it ends with it, so
    /// nobody gets the one without the other.
    pub fn by_token(&self, token: &str) -> Option<(User, UsedToken)> {
        self.by_token_at(token, now_ms())
    }

    pub fn by_token_at(&self, token: &str, now_ms: u64) -> Option<(User, UsedToken)> {
        let inner = self.read();
        let record = tokens::find(&inner.tokens, token, now_ms)?;
        let user = inner.users.get(&(record.tenant.clone(), record.user.clone())).cloned()?;
        Some((user, UsedToken::from(record)))
    }

    /// Why a token does not count, for whoever has sent it. That its time is over is said only to those who have its secret.
    pub fn refusal(&self, token: &str, clock: &Clock) -> String {
        let inner = self.read();
        let Some(over) = tokens::known(&inner.tokens, token) else {
            return "the token is wrong, expired or revoked".to_owned();
        };
        let since_s = now_ms().saturating_sub(over.expires_ms) / 1000;
        let why = format!(
            "the token has expired {} ago, by the controller's clock",
            format_duration(since_s)
        );
        match clock.seen().last_jump {
            Some(jump) if jump.is_ahead() => format!("{why}; {}", clock::in_words(jump)),
            _ => why,
        }
    }

    /// The id of this token, if the token is good now.
    pub fn token_id(&self, token: &str) -> Option<String> {
        tokens::find(&self.read().tokens, token, now_ms()).map(|record| record.id.clone())
    }

    /// The user who has the token with this id, if it is good now. Whoever asks has seen the token.
    pub fn by_token_id(&self, id: &str) -> Option<User> {
        let inner = self.read();
        let record = tokens::good(&inner.tokens, id, now_ms())?;
        inner.users.get(&(record.tenant.clone(), record.user.clone())).cloned()
    }

    /// The user who logs in with this SSH key, as [`SshKey::key`] writes it. Anybody can register a public key, so the
    /// login name says whose it is: `TENANT/USER`, or `TENANT~USER` for programs to which a slash is a path, or only `USER`
    /// for a user of the tenant `default`.
    pub fn by_key(&self, key: &str, login: &str) -> Option<User> {
        let (tenant, user) = login.split_once(['/', SEPARATOR]).unwrap_or((DEFAULT_TENANT, login));
        let user = self.user(&TenantName::new(tenant).ok()?, &UserName::new(user).ok()?).ok()?;
        user.keys.iter().any(|own| own.key == key).then_some(user)
    }

    pub fn has_tenant(&self, name: &str) -> bool {
        TenantName::new(name).is_ok_and(|name| self.read().tenants.contains_key(&name))
    }

    /// The quota of the tenant whose thing this is.
    pub fn quota_of(&self, full: &str) -> Quota {
        self.read()
            .tenants
            .get(&TenantName::of(full))
            .map(|tenant| tenant.quota)
            .unwrap_or_default()
    }

    /// All quotas, with what is used of each.
    pub fn quotas(&self, taken: &Taken) -> BTreeMap<String, QuotaUse> {
        let inner = self.read();
        let limited = inner.tenants.values().filter(|tenant| tenant.quota != Quota::default());
        let of = |all: &BTreeMap<String, Running>, name: &str| {
            all.get(name).copied().unwrap_or_default()
        };
        let used = limited.map(|tenant| {
            let name = tenant.name.to_string();
            let (used, lasting) = (of(&taken.running, &name), of(&taken.lasting, &name));
            (name, QuotaUse { quota: tenant.quota, used, lasting })
        });
        used.collect()
    }

    pub fn tenant_names(&self) -> Vec<TenantName> {
        self.read().tenants.keys().cloned().collect()
    }

    pub fn users_of(&self, tenant: &TenantName) -> Vec<User> {
        self.read().users.values().filter(|user| user.tenant == *tenant).cloned().collect()
    }

    /// # Errors
    /// `NotFound`.
    pub fn user(&self, tenant: &TenantName, name: &UserName) -> Result<User, Problem> {
        let found = self.read().users.get(&(tenant.clone(), name.clone())).cloned();
        found.ok_or_else(|| unknown_user(tenant, name))
    }

    /// When the tenant was made.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn created_ms(&self, tenant: &TenantName) -> Result<u64, Problem> {
        let found = self.read().tenants.get(tenant).map(|tenant| tenant.created_ms);
        found.ok_or_else(|| unknown_tenant(tenant))
    }

    fn quota(&self, tenant: &TenantName) -> Result<Quota, Problem> {
        let found = self.read().tenants.get(tenant).map(|tenant| tenant.quota);
        found.ok_or_else(|| unknown_tenant(tenant))
    }
}

pub fn unknown_tenant(tenant: &TenantName) -> Problem {
    Problem::not_found(format!("tenant {tenant}"), "there is no tenant with this name")
        .next("`perigee tenant list` shows the tenants")
}

pub fn unknown_user(tenant: &TenantName, user: &UserName) -> Problem {
    Problem::not_found(format!("user {tenant}/{user}"), "there is no user with this name")
        .next("`perigee user list` shows the users")
}

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
    put_tenant(cluster, TenantRecord { name, quota, created_ms: now_ms() }).await
}

/// # Errors
/// `NotFound`.
pub async fn set_quota(cluster: &Cluster, name: &TenantName, quota: Quota) -> Result<(), Problem> {
    let _turn = cluster.accounts.turn.lock().await;
    let created_ms = cluster.accounts.created_ms(name)?;
    put_tenant(cluster, TenantRecord { name: name.clone(), quota, created_ms }).await?;
    // A job may wait for it.
    cluster.index.changed.notify_one();
    Ok(())
}

async fn put_tenant(cluster: &Cluster, record: TenantRecord) -> Result<(), Problem> {
    let name = record.name.clone();
    cluster.records.put(&tenant_key(&name), &record).await?;
    cluster.accounts.write().tenants.insert(name.clone(), record);
    cluster.repository.set_quota(&name, doors::quota_of(cluster, &name));
    Ok(())
}

/// Tells the repository the quotas of all tenants, after a restart.
pub fn tell_quotas(cluster: &Cluster) {
    for name in cluster.accounts.tenant_names() {
        cluster.repository.set_quota(&name, doors::quota_of(cluster, &name));
    }
}

/// Deletes a tenant that has nothing any more, with its users.
///
/// # Errors
/// `Conflict` while it has volumes, images, jobs or files.
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
    cluster.records.remove(&tenant_key(name)).await?;
    accounts.write().tenants.remove(name);
    Ok(())
}

async fn forget_files(cluster: &Cluster, tenant: &TenantName) -> Result<(), Problem> {
    let (repository, of) = (Arc::clone(&cluster.repository), tenant.clone());
    let forgotten = tokio::task::spawn_blocking(move || repository.forget(&of));
    forgotten.await.map_err(|e| Problem::internal("can't use the repository", e))?
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

/// The caller has the turn.
async fn forget_user(cluster: &Cluster, user: &User) -> Result<(), Problem> {
    tokens::forget_all(cluster, &user.tenant, &user.name).await?;
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
