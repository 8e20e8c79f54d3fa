//! Tenants, their users, and the tokens by which users are known, as they are in memory.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use perigee_http::Clock;
use perigee_http::certificate::fingerprint;
use perigee_model::backup::BackupTarget;
use perigee_model::backup_key::BackupKey;
use perigee_model::secret::TOKEN_PREFIX;
use perigee_model::tenant::{DEFAULT_TENANT, Quota, Running, SEPARATOR, User};
use perigee_model::units::format_duration;
use perigee_model::{Problem, TenantName, UserName};
use perigee_planner::queue::QuotaUse;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use super::Usage;
use super::ledger::Ledger;
use crate::clock::{self, now_ms};
use crate::records::Records;

const TENANT_RECORDS: &str = "tenants/";

const USER_RECORDS: &str = "users/";

/// A tenant, and what it may use.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TenantRecord {
    pub name: TenantName,
    pub quota: Quota,
    /// Unix time. What is older is an earlier tenant's of this name.
    pub created_ms: u64,
    /// Where its users may have backups made.
    #[serde(default)]
    pub backup_targets: Vec<BackupTarget>,
    /// The key of its backups that are encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_key: Option<BackupKey>,
}

impl TenantRecord {
    /// A tenant that was made just now, or at this time; it may have no backups.
    pub fn new(name: TenantName, quota: Quota, created_ms: u64) -> Self {
        Self { name, quota, created_ms, backup_targets: Vec::new(), backup_key: None }
    }
}

/// The accounts in memory. The store has each change before they do.
#[derive(Debug, Default)]
pub struct Accounts {
    inner: RwLock<Inner>,
    /// Whoever changes accounts, or takes on a volume, takes turns. It is held over no call to a host.
    pub turn: tokio::sync::Mutex<()>,
    /// The volumes and images that are being made.
    pub making: Making,
}

type UserKey = (TenantName, UserName);

/// All tenants, users and tokens.
#[derive(Debug, Default)]
pub struct Inner {
    pub tenants: BTreeMap<TenantName, TenantRecord>,
    pub users: BTreeMap<UserKey, User>,
    /// By their ids.
    pub tokens: BTreeMap<String, TokenRecord>,
}

/// The key of a [`TenantRecord`].
pub fn tenant_key(tenant: &TenantName) -> String {
    format!("{TENANT_RECORDS}{tenant}")
}

/// The key of a user's record.
pub fn user_key(tenant: &TenantName, user: &UserName) -> String {
    format!("{USER_RECORDS}{tenant}/{user}")
}

impl Accounts {
    /// Reads all accounts from the store. The tenant `default` is always among them.
    ///
    /// # Errors
    /// If the store does not answer, or a record can't be read.
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let mut inner = Inner::default();
        let (name, quota) = (TenantName::default(), Quota::default());
        inner.tenants.insert(name.clone(), TenantRecord::new(name, quota, 0));
        for tenant in records.list::<TenantRecord>(TENANT_RECORDS).await? {
            inner.tenants.insert(tenant.name.clone(), tenant);
        }
        for user in records.list::<User>(USER_RECORDS).await? {
            inner.users.insert((user.tenant.clone(), user.name.clone()), user);
        }
        for token in records.list::<TokenRecord>(TOKEN_RECORDS).await? {
            inner.tokens.insert(token.id.clone(), token);
        }
        Ok(Self { inner: RwLock::new(inner), ..Self::default() })
    }

    /// The accounts, to look at. Nothing may wait while this is held.
    pub fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The accounts, to change after their records. Whoever changes them has [`Self::turn`].
    pub fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The user who has this token, and the token without its secret, if it is good now. What is made with it ends with it, so
    /// nobody gets the one without the other.
    pub fn by_token(&self, token: &str) -> Option<(User, UsedToken)> {
        self.by_token_at(token, now_ms())
    }

    /// As [`Self::by_token`], at the Unix time `now_ms`.
    pub fn by_token_at(&self, token: &str, now_ms: u64) -> Option<(User, UsedToken)> {
        let inner = self.read();
        let record = find(&inner.tokens, token, now_ms)?;
        let user = inner.users.get(&(record.tenant.clone(), record.user.clone())).cloned()?;
        Some((user, UsedToken::from(record)))
    }

    /// Why a token does not count, for whoever has sent it. That its time is over is said only to those who have its secret.
    pub fn refusal(&self, token: &str, clock: &Clock) -> String {
        let inner = self.read();
        let Some(over) = known(&inner.tokens, token) else {
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
        find(&self.read().tokens, token, now_ms()).map(|record| record.id.clone())
    }

    /// The user who has the token with this id, if it is good now. Whoever asks has seen the token.
    pub fn by_token_id(&self, id: &str) -> Option<User> {
        let inner = self.read();
        let record = good(&inner.tokens, id, now_ms())?;
        inner.users.get(&(record.tenant.clone(), record.user.clone())).cloned()
    }

    /// The user who logs in with this SSH key, as `SshKey::key` writes it. Anybody can register a public key, so the
    /// login name says whose it is: `TENANT/USER`, or `TENANT~USER` for programs to which a slash is a path, or only `USER`
    /// for a user of the tenant `default`.
    pub fn by_key(&self, key: &str, login: &str) -> Option<User> {
        let (tenant, user) = login.split_once(['/', SEPARATOR]).unwrap_or((DEFAULT_TENANT, login));
        let user = self.user(&TenantName::new(tenant).ok()?, &UserName::new(user).ok()?).ok()?;
        user.keys.iter().any(|own| own.key == key).then_some(user)
    }

    /// Whether there is a tenant with this name.
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
    pub fn quotas(&self, taken: &Usage, ledger: &Ledger) -> BTreeMap<String, QuotaUse> {
        let inner = self.read();
        let limited = inner.tenants.values().filter(|tenant| tenant.quota != Quota::default());
        let of = |all: &BTreeMap<String, Running>, name: &str| {
            all.get(name).copied().unwrap_or_default()
        };
        let used = limited.map(|tenant| {
            let name = tenant.name.to_string();
            let (used, persistent) = (of(&taken.running, &name), of(&taken.persistent, &name));
            let spending = ledger.spending(Some(&tenant.name));
            (name, QuotaUse { quota: tenant.quota, used, persistent, spending })
        });
        used.collect()
    }

    /// The names of all tenants, sorted.
    pub fn tenant_names(&self) -> Vec<TenantName> {
        self.read().tenants.keys().cloned().collect()
    }

    /// The users of a tenant, sorted by name; none if there is no such tenant.
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

    /// A tenant.
    ///
    /// # Errors
    /// `NotFound` if there is no such tenant.
    pub fn tenant(&self, tenant: &TenantName) -> Result<TenantRecord, Problem> {
        self.read().tenants.get(tenant).cloned().ok_or_else(|| unknown_tenant(tenant))
    }

    /// What a tenant may use.
    ///
    /// # Errors
    /// `NotFound` if there is no such tenant.
    pub fn quota(&self, tenant: &TenantName) -> Result<Quota, Problem> {
        let found = self.read().tenants.get(tenant).map(|tenant| tenant.quota);
        found.ok_or_else(|| unknown_tenant(tenant))
    }
}

/// The problem of a tenant that does not exist.
pub fn unknown_tenant(tenant: &TenantName) -> Problem {
    Problem::not_found(format!("tenant {tenant}"), "there is no tenant with this name")
        .next("`perigee tenant list` shows the tenants")
}

/// The problem of a user that does not exist.
pub fn unknown_user(tenant: &TenantName, user: &UserName) -> Problem {
    Problem::not_found(format!("user {tenant}/{user}"), "there is no user with this name")
        .next("`perigee user list` shows the users")
}

const TOKEN_RECORDS: &str = "tokens/";

/// A user's token. Its secret is not kept, only the digest of the secret.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TokenRecord {
    pub id: String,
    pub tenant: TenantName,
    pub user: UserName,
    pub sha256: String,
    pub created_ms: u64,
    pub expires_ms: u64,
    /// The id of the user's token that has made it, and with which it ends.
    pub made_by: Option<String>,
}

/// The token with which a user asks for something.
#[derive(Debug, Clone)]
pub struct UsedToken {
    pub id: String,
    pub expires_ms: u64,
}

impl From<&TokenRecord> for UsedToken {
    fn from(record: &TokenRecord) -> Self {
        Self { id: record.id.clone(), expires_ms: record.expires_ms }
    }
}

/// The key of a [`TokenRecord`].
pub fn token_key(id: &str) -> String {
    format!("{TOKEN_RECORDS}{id}")
}

/// The record of a token that is good now. An unknown token is compared too, so that the time tells nothing.
fn find<'a>(
    all: &'a BTreeMap<String, TokenRecord>,
    token: &str,
    now_ms: u64,
) -> Option<&'a TokenRecord> {
    known(all, token).filter(|record| now_ms < record.expires_ms)
}

/// The record of a token, also if its time is over.
fn known<'a>(all: &'a BTreeMap<String, TokenRecord>, token: &str) -> Option<&'a TokenRecord> {
    let (id, _) = token.strip_prefix(TOKEN_PREFIX)?.split_once('_')?;
    let found = all.get(id);
    let expected = found.map_or("", |record| record.sha256.as_str());
    let is_equal = bool::from(fingerprint(token.as_bytes()).as_bytes().ct_eq(expected.as_bytes()));
    found.filter(|_| is_equal)
}

/// The record of the token with this id, if it is good now.
fn good<'a>(
    all: &'a BTreeMap<String, TokenRecord>,
    id: &str,
    now_ms: u64,
) -> Option<&'a TokenRecord> {
    all.get(id).filter(|record| now_ms < record.expires_ms)
}

/// What tenants are making.
pub type Making = Mutex<BTreeMap<String, InMaking>>;

/// What one tenant is making, which counts for its quota before there is a record.
#[derive(Debug, Clone, Copy, Default)]
pub struct InMaking {
    /// Of volumes and images, as a VM sees them.
    pub bytes: u64,
    pub count: u64,
}
