//! Where a tenant's users may have backups made, how much these hold, and the key of those that are encrypted.
//!
//! An admin allows targets to a tenant. No backups of others are there, so what a target holds is the tenant's. The host that ships to a target or deletes there counts
//! the bytes of all objects, and a record has what was counted last at each place. While a tenant has a quota of this, one of its backups is shipped at a time.

use perigee_model::backup::{Backup, BackupRoom, BackupTarget, BackupUser};
use perigee_model::backup_key::BackupKey;
use perigee_model::limits::TENANT_BACKUP_TARGETS;
use perigee_model::{HostId, Problem, ProblemKind, TenantName};
use serde::{Deserialize, Serialize};

use super::{put_tenant, tokens};
use crate::cluster::Cluster;
use crate::cluster::accounts::TenantRecord;
use crate::level;

/// What a tenant's backups hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRecord {
    /// The tenant.
    pub tenant: TenantName,
    /// Where something is, one for each target and, of directories, host.
    pub places: Vec<HeldPlace>,
}

/// A place with backups of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPlace {
    /// The target.
    pub at: BackupTarget,
    /// The host that has the directory; `None`: an S3 store.
    pub host: Option<HostId>,
    /// What was there when it was last counted, with what was shipped since.
    pub bytes: u64,
}

impl HeldPlace {
    fn is_at(&self, at: &BackupTarget, host: Option<&HostId>) -> bool {
        self.at == *at && (at.is_s3() || self.host.as_ref() == host)
    }
}

fn held_key(tenant: &TenantName) -> String {
    format!("backups_held/{tenant}")
}

/// Whether a backup with this user is the tenant's.
pub fn is_of(by: Option<&BackupUser>, tenant: &TenantName) -> bool {
    by.is_some_and(|by| by.tenant == *tenant)
}

/// Refuses a target that this user's tenant may not use. An admin may use all others.
///
/// # Errors
/// `Forbidden`; `Invalid` for an admin; `Conflict` before the end of an upgrade.
pub async fn check_target(
    cluster: &Cluster,
    what: &str,
    by: Option<&BackupUser>,
    to: &BackupTarget,
) -> Result<(), Problem> {
    let Some(by) = by else { return check_no_tenants(cluster, what, to, None) };
    if level::in_force(&cluster.records).await? < level::BACKUPS_OF_TENANTS {
        let why = "a volume server of the version before would count no bytes for the quota";
        return Err(Problem::conflict(what, why)
            .next("ask an admin to end the upgrade first: perigee upgrade finish"));
    }
    let allowed = cluster.accounts.tenant(&by.tenant)?.backup_targets;
    if allowed.contains(to) {
        return Ok(());
    }
    let named: Vec<&str> = allowed.iter().map(|target| target.address.as_str()).collect();
    let why = match named.is_empty() {
        true => format!("tenant {} may use no target for backups", by.tenant),
        false => format!("tenant {} may use these targets only: {}", by.tenant, named.join(", ")),
    };
    Err(Problem::forbidden(what, why)
        .next("use one of these, or ask an admin for another one (perigee tenant backups)"))
}

/// Refuses a target that is, or overlaps, that of a tenant, but for this tenant's.
fn check_no_tenants(
    cluster: &Cluster,
    what: &str,
    to: &BackupTarget,
    but: Option<&TenantName>,
) -> Result<(), Problem> {
    let accounts = cluster.accounts.read();
    let has = |tenant: &&TenantRecord| {
        let targets = &tenant.backup_targets;
        Some(&tenant.name) != but && targets.iter().any(|target| target.overlaps(to))
    };
    let Some(tenant) = accounts.tenants.values().find(has) else { return Ok(()) };
    let why = format!("{} is for the backups of tenant {}'s users", to.address, tenant.name);
    Err(Problem::invalid(what, why).next("choose another target: `perigee tenant info` shows them"))
}

/// The tenant whose users may have backups made at this target, or at one above it.
pub fn tenant_at(cluster: &Cluster, at: &BackupTarget) -> Option<TenantName> {
    let accounts = cluster.accounts.read();
    let has = |tenant: &&TenantRecord| tenant.backup_targets.iter().any(|one| at.is_within(one));
    accounts.tenants.values().find(has).map(|tenant| tenant.name.clone())
}

/// Says where a tenant's users may have backups made. What is at a target that was left out stays there, and counts no more.
///
/// # Errors
/// `NotFound` if there is no such tenant; `Invalid` for targets that overlap, or are another tenant's.
pub async fn set_targets(
    cluster: &Cluster,
    name: &TenantName,
    targets: Vec<BackupTarget>,
) -> Result<(), Problem> {
    let what = format!("can't set the targets for backups of tenant {name}");
    let _turn = cluster.accounts.turn.lock().await;
    let record = cluster.accounts.tenant(name)?;
    TENANT_BACKUP_TARGETS.check(targets.len()).map_err(|error| error.problem(&what))?;
    for (number, target) in targets.iter().enumerate() {
        target.check()?;
        check_no_tenants(cluster, &what, target, Some(name))?;
        if targets[..number].iter().any(|other| other.overlaps(target)) {
            let why = format!("{} overlaps another one of them", target.address);
            return Err(Problem::invalid(what, why).next("name each place once"));
        }
    }
    put_tenant(cluster, TenantRecord { backup_targets: targets, ..record }).await
}

/// The key of the tenant whose thing this is, if the tenant has one.
pub fn key_of(cluster: &Cluster, full: &str) -> Option<BackupKey> {
    cluster.accounts.tenant(&TenantName::of(full)).ok()?.backup_key
}

/// A tenant's key.
///
/// # Errors
/// `NotFound` if there is none.
pub fn key(cluster: &Cluster, tenant: &TenantName) -> Result<BackupKey, Problem> {
    cluster.accounts.tenant(tenant)?.backup_key.ok_or_else(|| {
        Problem::not_found(format!("the key for backups of tenant {tenant}"), "it has none")
            .next("make one: perigee backup key make")
    })
}

/// Gives a tenant its key: this one, or a new one. A key is never changed, because backups need it.
///
/// # Errors
/// `NotFound` if there is no such tenant; `Conflict` if it has another key.
pub async fn set_key(
    cluster: &Cluster,
    tenant: &TenantName,
    key: Option<BackupKey>,
) -> Result<BackupKey, Problem> {
    let what = format!("can't give tenant {tenant} a key for backups");
    let _turn = cluster.accounts.turn.lock().await;
    let record = cluster.accounts.tenant(tenant)?;
    match (&record.backup_key, key) {
        (Some(own), Some(key)) if *own == key => Ok(key),
        (Some(_), _) => {
            let why = "it has one, and its backups need that one";
            Err(Problem::conflict(what, why).next("see it: perigee backup key show"))
        }
        (None, key) => {
            let new = || tokens::random_bytes(&what).map(BackupKey::new);
            let key = key.map_or_else(new, Ok)?;
            let backup_key = Some(key.clone());
            put_tenant(cluster, TenantRecord { backup_key, ..record }).await?;
            Ok(key)
        }
    }
}

/// Refuses an encrypted backup of this thing without a key, and as long as the version before may come back.
///
/// # Errors
/// `Conflict`.
pub async fn check_encrypted(cluster: &Cluster, what: &str, full: &str) -> Result<(), Problem> {
    if level::in_force(&cluster.records).await? < level::BACKUPS_OF_TENANTS {
        let why = "the version before this one does not encrypt backups, and may come back";
        return Err(
            Problem::conflict(what, why).next("end the upgrade first: perigee upgrade finish")
        );
    }
    if key_of(cluster, full).is_some() {
        return Ok(());
    }
    let why = format!("it is to be encrypted, and tenant {} has no key", TenantName::of(full));
    Err(Problem::conflict(what, why).next("make one: perigee backup key make"))
}

/// The places that count: of targets that the tenant may use, at hosts that there are.
async fn places(cluster: &Cluster, tenant: &TenantName) -> Result<Vec<HeldPlace>, Problem> {
    let record: Option<HeldRecord> = cluster.records.read(&held_key(tenant)).await?;
    let mut places = record.map(|record| record.places).unwrap_or_default();
    let allowed = cluster.accounts.tenant(tenant)?.backup_targets;
    let is_gone = |host: &HostId| {
        cluster.hosts.get(host).is_err_and(|problem| problem.kind == ProblemKind::NotFound)
    };
    places.retain(|place| allowed.contains(&place.at) && !place.host.as_ref().is_some_and(is_gone));
    Ok(places)
}

/// What a tenant's backups hold, all together.
///
/// # Errors
/// `NotFound` if there is no such tenant.
pub async fn held_bytes(cluster: &Cluster, tenant: &TenantName) -> Result<u64, Problem> {
    let places = places(cluster, tenant).await?;
    Ok(places.iter().map(|place| place.bytes).fold(0, u64::saturating_add))
}

/// How much may be at the target of this backup, which this host is to ship; `None` for an admin's backup.
///
/// # Errors
/// `NotFound` if there is no such tenant.
pub async fn room_of(
    cluster: &Cluster,
    backup: &Backup,
    host: &HostId,
) -> Result<Option<BackupRoom>, Problem> {
    let Some(by) = &backup.by else { return Ok(None) };
    let tenant = by.tenant.clone();
    let limit_bytes = cluster.accounts.quota(&tenant)?.backup_bytes;
    let places = places(cluster, &tenant).await?;
    let elsewhere = places.iter().filter(|place| !place.is_at(&backup.at, Some(host)));
    let elsewhere_bytes = elsewhere.map(|place| place.bytes).fold(0, u64::saturating_add);
    Ok(Some(BackupRoom { tenant, limit_bytes, elsewhere_bytes }))
}

/// Whether a backup is not shipped before the other one has ended, because both count in one quota.
pub fn is_shipped_after(cluster: &Cluster, backup: &Backup, other: &Backup) -> bool {
    backup.by.as_ref().is_some_and(|by| {
        let quota = cluster.accounts.quota(&by.tenant);
        let is_limited = quota.is_ok_and(|quota| quota.backup_bytes.is_some());
        is_limited && backup.name != other.name && is_of(other.by.as_ref(), &by.tenant)
    })
}

/// The place of this backup was counted.
///
/// # Errors
/// If the store fails.
pub async fn counted(cluster: &Cluster, backup: &Backup, bytes: u64) -> Result<(), Problem> {
    change(cluster, backup, |_| bytes).await
}

/// So much was shipped to the place of this backup, which was not counted.
///
/// # Errors
/// If the store fails.
pub async fn add(cluster: &Cluster, backup: &Backup, bytes: u64) -> Result<(), Problem> {
    change(cluster, backup, |before| before.saturating_add(bytes)).await
}

async fn change(
    cluster: &Cluster,
    backup: &Backup,
    bytes: impl Fn(u64) -> u64,
) -> Result<(), Problem> {
    let Some(by) = &backup.by else { return Ok(()) };
    // Of a tenant that was deleted nothing is kept.
    if !cluster.accounts.has_tenant(by.tenant.as_str()) {
        return Ok(());
    }
    let allowed = places(cluster, &by.tenant).await?;
    let (at, host) = (&backup.at, backup.host.as_ref());
    let changed = |before: Option<HeldRecord>| {
        let mut places = before.map(|record| record.places).unwrap_or_default();
        let before = places.iter().find(|place| place.is_at(at, host)).map_or(0, |it| it.bytes);
        // What does not count any more is forgotten.
        places.retain(|place| {
            let is_known = |other: &HeldPlace| other.is_at(&place.at, place.host.as_ref());
            !place.is_at(at, host) && allowed.iter().any(is_known)
        });
        let host = host.filter(|_| !at.is_s3()).cloned();
        places.push(HeldPlace { at: at.clone(), host, bytes: bytes(before) });
        HeldRecord { tenant: by.tenant.clone(), places }
    };
    cluster.records.update(&held_key(&by.tenant), changed).await.map(drop)
}

/// Nothing is remembered of a tenant that is deleted.
///
/// # Errors
/// If the store fails.
pub async fn forget_tenant(cluster: &Cluster, tenant: &TenantName) -> Result<(), Problem> {
    cluster.records.remove(&held_key(tenant)).await
}
