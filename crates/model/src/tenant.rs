//! Tenants, and whose a thing is.
//!
//! The full name of a tenant's thing is `TENANT~NAME`, and the things of the tenant `default` have no prefix. Ownership is
//! this prefix, and nothing else. Volume servers and agents know full names only. The controller's API makes them of what
//! a person writes ([`TenantName::meant`]), and the controller's answers show them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::backup::BackupTarget;
use crate::backup_key::BackupKey;
use crate::budget::Spending;
use crate::ids::{BadName, Owned, TenantName, UserName};
use crate::money::Money;
use crate::secret::Secret;
use crate::units::format_bytes;
use crate::{ImageName, Problem};

/// Between a tenant and the name of its thing.
pub const SEPARATOR: char = '~';
/// The tenant of those who are in no other.
pub const DEFAULT_TENANT: &str = "default";

/// Whose the thing with this full name is.
pub fn tenant_of(full: &str) -> &str {
    full.split_once(SEPARATOR).map_or(DEFAULT_TENANT, |(tenant, _)| tenant)
}

impl TenantName {
    /// Whose the thing with this full name is.
    pub fn of(full: &str) -> Self {
        Self::new(tenant_of(full)).unwrap_or_default()
    }

    /// The full name of this tenant's thing.
    pub fn full(&self, name: &str) -> String {
        if self.as_str() == DEFAULT_TENANT {
            return name.to_owned();
        }
        format!("{self}{SEPARATOR}{name}")
    }

    /// Whether the thing with this full name is this tenant's.
    pub fn owns(&self, full: &str) -> bool {
        tenant_of(full) == self.as_str()
    }

    /// The full name that a user of this tenant means: a short name is one of this tenant's. The name of another
    /// tenant's thing becomes one of this tenant's that nothing ever has ([`is_nobodys`]). So whoever looks for it finds
    /// nothing, in the same way and in the same time as with any other name that nothing has.
    pub fn meant(&self, text: &str) -> String {
        match text.split_once(SEPARATOR) {
            None => self.full(text),
            Some((tenant, name)) if tenant == self.as_str() && !name.contains(SEPARATOR) => {
                self.full(name)
            }
            Some((tenant, _)) if tenant == self.as_str() => text.to_owned(),
            Some(_) => format!("{self}{SEPARATOR}{text}"),
        }
    }

    /// The full name that somebody means who may name the things of all tenants.
    pub fn meant_by_admin(text: &str) -> String {
        let short = text.strip_prefix(DEFAULT_TENANT).and_then(|rest| rest.strip_prefix(SEPARATOR));
        short.unwrap_or(text).to_owned()
    }
}

/// The full name of a thing of the same tenant as the one with this full name.
pub fn sibling(full: &str, name: &str) -> String {
    match full.split_once(SEPARATOR) {
        None => name.to_owned(),
        Some((tenant, _)) => format!("{tenant}{SEPARATOR}{name}"),
    }
}

/// Whether nothing ever has this full name: it has more than one tenant, or the one whose things have no prefix.
pub fn is_nobodys(full: &str) -> bool {
    match full.split_once(SEPARATOR) {
        None => false,
        Some((tenant, name)) => tenant == DEFAULT_TENANT || name.contains(SEPARATOR),
    }
}

/// The name for a thing that is to be made. `full` is what [`TenantName::meant`] has made of what the person wrote.
///
/// # Errors
/// `Invalid` when nothing may have it.
pub fn new_name<N: Owned>(full: String) -> Result<N, Problem> {
    let what = || format!("can't use the name {full:?}");
    if is_nobodys(&full) {
        let why = format!("only the name of another tenant's thing has a {SEPARATOR:?}");
        return Err(Problem::invalid(what(), why).next("choose a name of your own tenant"));
    }
    N::named(full.clone()).map_err(|e: BadName| Problem::invalid(what(), e))
}

/// What a user may do.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Uses what the tenant has, and its own jobs.
    Member,
    /// Also sees and ends all jobs of the tenant, and sees its quota and its audit log.
    Operator,
    /// Does everything, for all tenants. Only users of the tenant `default` can be admins.
    Admin,
}

/// A text that names no [`Role`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a role: use member, operator or admin")]
pub struct BadRole(String);

impl std::str::FromStr for Role {
    type Err = BadRole;

    fn from_str(text: &str) -> Result<Self, BadRole> {
        match text {
            "member" => Ok(Self::Member),
            "operator" => Ok(Self::Operator),
            "admin" => Ok(Self::Admin),
            _ => Err(BadRole(text.chars().take(80).collect())),
        }
    }
}

/// The most that a tenant may have at the same time; `None`: as much as there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Quota {
    /// VMs of its jobs that have begun.
    #[serde(default)]
    pub vms: Option<u32>,
    /// Their vCPUs together.
    #[serde(default)]
    pub cpus: Option<u32>,
    /// Their memory together.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// The sizes of its volumes and images together, as a VM sees them.
    #[serde(default)]
    pub volume_bytes: Option<u64>,
    /// Bytes of its files in the data repository.
    #[serde(default)]
    pub file_bytes: Option<u64>,
    /// These files and their directories; `None`: a million.
    #[serde(default)]
    pub files: Option<u64>,
    /// Bytes that its backups hold at the targets that it may use.
    #[serde(default)]
    pub backup_bytes: Option<u64>,
    /// What its jobs may cost in a month (UTC), with what is reserved for those that have not ended, in millionths of a dollar.
    #[serde(default, rename = "budget_month_micros")]
    pub budget_month: Option<Money>,
}

/// What a tenant's jobs, or one job, take of its quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Running {
    /// VMs.
    pub vms: u32,
    /// Their vCPUs together.
    pub cpus: u32,
    /// Their memory together.
    pub memory_bytes: u64,
}

impl Running {
    /// Adds another one.
    pub fn add(&mut self, other: Self) {
        self.vms = self.vms.saturating_add(other.vms);
        self.cpus = self.cpus.saturating_add(other.cpus);
        self.memory_bytes = self.memory_bytes.saturating_add(other.memory_bytes);
    }
}

impl Quota {
    /// Why there is no room for this beside what is used; `None` if there is.
    pub fn lacks(&self, used: Running, more: Running) -> Option<String> {
        let count = |limit: Option<u32>, used: u32, more: u32, of: &str| {
            let limit = limit.filter(|limit| used.saturating_add(more) > *limit)?;
            Some(format!("it needs {more} of the tenant's {limit} {of}, and {used} are in use"))
        };
        let memory = || {
            let (used, more) = (used.memory_bytes, more.memory_bytes);
            let limit = self.memory_bytes.filter(|limit| used.saturating_add(more) > *limit)?;
            let [more, limit, used] = [more, limit, used].map(format_bytes);
            Some(format!(
                "it needs {more} of the tenant's {limit} of memory, and {used} are in use"
            ))
        };
        count(self.vms, used.vms, more.vms, "VMs")
            .or_else(|| count(self.cpus, used.cpus, more.cpus, "vCPUs"))
            .or_else(memory)
    }
}

/// `POST /v1/tenants`: makes a tenant.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NewTenant {
    /// At most [`crate::limits::TENANT_NAME_BYTES`] long.
    pub name: TenantName,
    /// The most that it may have.
    #[serde(default)]
    pub quota: Quota,
}

/// A tenant, with what it may have and what it has.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Tenant {
    /// Unique in the cluster.
    pub name: TenantName,
    /// The most that it may have.
    pub quota: Quota,
    /// What its jobs use.
    pub running: Running,
    /// The sizes of its volumes and images together.
    pub volume_bytes: u64,
    /// Bytes of its files in the data repository, with unfinished uploads.
    pub file_bytes: u64,
    /// The number of these files and their directories.
    pub files: u64,
    /// Bytes that its backups hold, as they were last counted at each target.
    #[serde(default)]
    pub backup_bytes: u64,
    /// Where its users may have backups made.
    #[serde(default)]
    pub backup_targets: Vec<BackupTarget>,
    /// The number of its users.
    pub users: u64,
    /// What it has spent in this month, and what is reserved.
    #[serde(default)]
    pub spending: Spending,
}

/// `PUT /v1/tenants/{tenant}/backup-targets`: where a tenant's users may have backups made. No other tenant's may be there.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantBackupTargets {
    /// At most [`crate::limits::TENANT_BACKUP_TARGETS`].
    pub targets: Vec<BackupTarget>,
}

/// `PUT /v1/tenants/{tenant}/backup-key`: the key with which the tenant's backups are encrypted.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetBackupKey {
    /// The key, as in a key file; `None`: a new one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub key: Option<BackupKey>,
}

/// A tenant's key for backups that are encrypted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantBackupKey {
    /// The tenant.
    pub tenant: TenantName,
    /// The key, as in a key file.
    #[schema(value_type = String)]
    pub key: BackupKey,
}

/// `PUT /v1/tenants/{tenant}/users/{user}`: adds a user, or changes its role.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NewUser {
    /// What it may do.
    pub role: Role,
}

/// A user of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct User {
    /// Its tenant.
    pub tenant: TenantName,
    /// Unique in the tenant.
    pub name: UserName,
    /// What it may do.
    pub role: Role,
    /// Unix time.
    pub created_ms: u64,
    /// The SSH keys with which it logs in at the data repository.
    pub keys: Vec<SshKey>,
}

/// A user's SSH key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SshKey {
    /// Unique among the user's keys.
    pub name: UserName,
    /// Kind and key, as in an OpenSSH public key file, without the comment.
    pub key: String,
    /// The id of the user's token with which it was added. It ends when that token is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by_token: Option<String>,
}

/// Why a text is not an SSH key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadSshKey {
    /// It is something that nobody else may know.
    #[error("it is {0}; the public half is wanted, which is in the file whose name ends with .pub")]
    Secret(Secret),
    /// Anything else.
    #[error(
        "it is not an OpenSSH public key of the kind Ed25519 or ECDSA: one line like `ssh-ed25519 AAAA…`"
    )]
    Other,
}

impl SshKey {
    /// A key, of one line of a public key file. The comment at its end is dropped.
    ///
    /// # Errors
    /// [`BadSshKey`].
    pub fn new(name: UserName, line: &str) -> Result<Self, BadSshKey> {
        if let Some(secret) = Secret::of(line) {
            return Err(BadSshKey::Secret(secret));
        }
        let mut words = line.split_ascii_whitespace();
        let (Some(kind), Some(key)) = (words.next(), words.next()) else {
            return Err(BadSshKey::Other);
        };
        // The door knows no others, and a key that never lets its user in should not be taken.
        let known = kind == "ssh-ed25519" || kind.starts_with("ecdsa-sha2-");
        let base64 = key.bytes().all(|b| b.is_ascii_alphanumeric() || b"+/=".contains(&b));
        // The encoded key begins with the length of its kind's name.
        if known && base64 && key.starts_with("AAAA") && line.len() <= KEY_BYTES_MAX {
            Ok(Self { name, key: format!("{kind} {key}"), by_token: None })
        } else {
            Err(BadSshKey::Other)
        }
    }
}

/// Of the line with its comment.
const KEY_BYTES_MAX: usize = 4096;

/// `POST /v1/tenants/{tenant}/users/{user}/tokens`: makes a token.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct NewAccessToken {
    /// How long it is good for; see [`crate::limits::ACCESS_TOKEN_S`].
    pub life_s: u64,
}

/// A new token. It is shown this once.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MadeAccessToken {
    /// The secret, in one word.
    pub token: String,
    /// By which it is listed and revoked.
    pub id: String,
    /// Unix time.
    pub expires_ms: u64,
    /// Of the cluster's authority: `perigee login` asks for it. None if the controller runs with `--insecure`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// `https://HOST:PORT`, where other machines reach the controller, as far as the controller knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller_url: Option<String>,
}

/// A user's token, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AccessToken {
    /// The part of it that is no secret.
    pub id: String,
    /// Unix time.
    pub created_ms: u64,
    /// Unix time.
    pub expires_ms: u64,
}

/// `GET /v1/me`: who asks, as the controller sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Me {
    /// Whose things short names are.
    pub tenant: TenantName,
    /// `None` for an operator's certificate and for the controller's unix socket.
    pub user: Option<UserName>,
    /// What it may do.
    pub role: Role,
}

/// `PUT /v1/images/{image}/shared`: whether every tenant may use an image.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct ShareImage {
    /// Whether they may.
    pub shared: bool,
}

/// An entry of the audit log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Unix time.
    pub at_ms: u64,
    /// `TENANT/USER`, or what is known of who has no token: `an operator` has a certificate, `a process of this host` uses
    /// the controller's unix socket.
    pub who: String,
    /// The method and the path of the request.
    pub request: String,
    /// The full name of what was made or meant, where the path does not say it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub thing: String,
    /// The status of the HTTP answer; 499 if the client did not wait for it.
    pub status: u16,
}

/// The image of the tenant `default` that a user of another tenant means, if its own tenant has none of this name.
pub fn shared_image(own: &ImageName) -> Option<ImageName> {
    let (_, name) = own.as_str().split_once(SEPARATOR)?;
    (!name.contains(SEPARATOR)).then(|| ImageName::new(name).ok())?
}

#[cfg(test)]
#[path = "tenant/tests.rs"]
mod tests;
