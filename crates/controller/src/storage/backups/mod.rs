//! Backups of volumes, VMs and images: one driver for each that is not complete, which alone writes its record.
//!
//! The volume's home ships a backup ([`perigee_model::backup`]); the controller orders that, and has it done again until it is done or given up. What was shipped is
//! used again, so a controller or a volume server that is killed in the middle loses nothing. A restore whose volume was not made is asked for again by whoever wants
//! it. A volume that was made, and whose bytes come afterwards, has a record and a driver too (`restoring`).
//!
//! | question | file |
//! |---|---|
//! | How is a backup shipped, and how deleted? | `driver.rs` |
//! | When does a schedule begin a backup, and which of its backups are deleted? | `rounds.rs`; the rules: `model/src/backup_schedule.rs` |
//! | What do people ask of schedules? | `schedules.rs` |
//! | What is the backup of a VM? | `vm.rs`; how a VM is made of one: `vms/from_backup.rs` (what is asked for), `jobs/from_backup.rs` (what its driver does) |
//! | What is the backup of an image? | `image.rs` |
//! | Where may a tenant's users have backups made, and how much may these hold? | `accounts/backups.rs` |
//! | Which backups are being read? | `reading.rs`; of which do volumes still get bytes? `restoring.rs` |

mod driver;
mod image;
mod reading;
mod restore;
mod restoring;
mod rounds;
pub mod schedules;
mod vm;

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::backup::{
    Backup, BackupOf, BackupState, BackupTarget, BackupUser, CheckBackup, FoundBackup, ListBackups,
    LookForBackups, NewBackup, VerifiedBackup, VerifyBackup, in_place_of_volume,
};
use perigee_model::backup_key::BackupKey;
use perigee_model::limits::{BACKUPS, TENANT_BACKUPS};
use perigee_model::persistent_vm::CloudInit;
use perigee_model::units::compact_time;
use perigee_model::volume::Progress;
use perigee_model::{BackupName, HostId, Problem, ScheduleName, TenantName, VolumeName};
use serde::{Deserialize, Serialize};

use crate::accounts::backups as room;
use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::records::{JobRecord, VolumeRecord, volume_key};
use crate::storage::{images, volumes};

pub use driver::drive;
pub use image::restore as restore_image;
pub use reading::begin as begin_reading;
pub use restore::{drop_disk, find, forget_disk, restore, restore_disk};
pub use restoring::{all as restoring, check_whole, drive as drive_restore, send_lost_keys};
pub use rounds::run;
use vm::OfVm;

/// A backup, as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupRecord {
    /// As shown to people.
    pub view: Backup,
    /// As in [`NewBackup`].
    pub whole: bool,
    /// The home is asked to ship it, and has not said that it ships no more. Meanwhile nothing is deleted at the target.
    pub asks: bool,
    /// When its schedule was made, which may have been followed by another one of that name; Unix time.
    #[serde(default)]
    pub schedule_made_ms: Option<u64>,
    /// Of the root disk of a VM.
    #[serde(default)]
    pub vm: Option<OfVm>,
}

const BACKUPS_PREFIX: &str = "backups/";
/// So many backups of others are named where a tenant is to have a target.
const OTHERS_NAMED: usize = 5;

fn backup_key(name: &BackupName) -> String {
    format!("{BACKUPS_PREFIX}{name}")
}

/// Starts the drivers of backups that are not complete, after a restart.
///
/// # Errors
/// If the store can't be read.
pub async fn drive_all(cluster: &Cluster) -> Result<(), Problem> {
    for backup in list(cluster).await? {
        if matches!(backup.state, BackupState::Shipping | BackupState::Deleting) {
            cluster.drive_backup(&backup.name);
        }
    }
    restoring::drive_all(cluster).await
}

/// Begins a backup of a volume, of a VM or of an image for this user, or for an admin; the answer comes at once.
///
/// # Errors
/// `NotFound` if there is no such thing; `Conflict` if it is a job's own; `Invalid` for a target that can't be one; `Forbidden` for one that the user's tenant may
/// not use.
pub async fn create(
    cluster: &Arc<Cluster>,
    ask: NewBackup,
    by: Option<BackupUser>,
) -> Result<Backup, Problem> {
    ask.to.check()?;
    let of = BackupOf::one(ask.volume, ask.vm, ask.image)?;
    let what = format!("can't back up {of}");
    find_thing(cluster, &what, &of).await?;
    check_listed(cluster, &what, &of).await?;
    let NewBackup { to, whole, encrypted, .. } = ask;
    begin(cluster, Begin { of, to, whole, encrypted, schedule: None, by }).await
}

/// Refuses a volume or an image that there is not, of which hosts may be asked.
async fn find_thing(cluster: &Cluster, what: &str, of: &BackupOf) -> Result<(), Problem> {
    match of {
        BackupOf::Volume(volume) => volumes::find(cluster, volume).await.map(drop),
        BackupOf::Image(name) => image::check(cluster, what, name).await,
        BackupOf::Vm(_) => Ok(()),
    }
}

/// Refuses what is a job's own, and a VM or an image that there is not. No host is asked.
async fn check_listed(cluster: &Cluster, what: &str, of: &BackupOf) -> Result<(), Problem> {
    let volume = match of {
        BackupOf::Vm(name) => return vm::find(cluster, name).map(drop),
        BackupOf::Image(name) => return image::check_listed(cluster, what, name).await,
        BackupOf::Volume(volume) => volume,
    };
    match cluster.records.read::<VolumeRecord>(&volume_key(volume)).await? {
        Some(_) => Ok(()),
        None => Err(Problem::conflict(what, "it was made for a job and ends with it")),
    }
}

/// A backup to be begun, of something that there is.
struct Begin {
    of: BackupOf,
    to: BackupTarget,
    whole: bool,
    encrypted: bool,
    /// Its schedule, and when that was made.
    schedule: Option<(ScheduleName, u64)>,
    by: Option<BackupUser>,
}

/// Makes the record of a backup, and starts its driver. No host is asked.
///
/// # Errors
/// `Conflict` if another backup of the same began in this second, or one of a VM is being shipped to the same target; `Invalid` if there are too many; `Unavailable` if a
/// VM has no disk yet; `Forbidden` as in [`create`].
async fn begin(cluster: &Cluster, new: Begin) -> Result<Backup, Problem> {
    let Begin { of, to, whole, encrypted, schedule, by } = new;
    let what = format!("can't back up {of}");
    // Of two that are begun at the same moment, the second one finds the first one. Meanwhile no tenant gets other targets.
    let _beginning = cluster.beginning_backups.lock().await;
    room::check_target(cluster, &what, by.as_ref(), &to).await?;
    let begun_ms = now_ms();
    let name = BackupName::new(format!("{}-{}", of.name(), compact_time(begun_ms)))
        .map_err(|error| Problem::invalid(&what, error))?;
    let (volume, vm) = match &of {
        BackupOf::Volume(volume) => (volume.clone(), None),
        BackupOf::Image(image) => (in_place_of_volume(image), None),
        BackupOf::Vm(vm) => {
            let (root, has) = vm::describe(cluster, vm, &name)?;
            (root, Some(OfVm { has, sealed: BTreeMap::new() }))
        }
    };
    let parts: Vec<BackupName> = vm.iter().flat_map(OfVm::parts).collect();
    if encrypted {
        room::check_encrypted(cluster, &what, name.as_str()).await?;
    }
    let (schedule, schedule_made_ms) = schedule.unzip();
    let (of_vm, of_image) = match of {
        BackupOf::Volume(_) => (None, None),
        BackupOf::Vm(vm) => (Some(vm), None),
        BackupOf::Image(image) => (None, Some(image)),
    };
    let new = new_backup(name, volume, to, begun_ms);
    let view = Backup { vm: of_vm, image: of_image, parts, schedule, by, encrypted, ..new };
    let known = list(cluster).await?;
    check_number(&known, &what, view.by.as_ref(), 1 + view.parts.len())?;
    vm::check_alone(&known, &view)?;
    let record = BackupRecord { view: view.clone(), whole, asks: false, schedule_made_ms, vm };
    if !cluster.records.create_asked(&backup_key(&view.name), &record).await? {
        return Err(
            Problem::conflict(what, "another backup of it began in this second").next("try again")
        );
    }
    cluster.drive_backup(&view.name);
    Ok(view)
}

/// In words, something of a tenant's users that is a backup or a schedule, if there is one. An encrypted backup of the tenant's things counts too, whoever has made it:
/// nobody could read it without the tenant's key.
///
/// # Errors
/// If the store can't be read.
pub async fn any_of_tenant(
    cluster: &Cluster,
    tenant: &TenantName,
) -> Result<Option<String>, Problem> {
    let backups = list(cluster).await?.into_iter();
    let needs_key = |backup: &Backup| backup.encrypted && tenant.owns(backup.name.as_str());
    let mut backups =
        backups.filter(|backup| room::is_of(backup.by.as_ref(), tenant) || needs_key(backup));
    let backup = backups.next().map(|backup| format!("backup {}", backup.name));
    let schedules = schedules::records(cluster).await?.into_iter();
    let mut schedules = schedules.filter(|one| room::is_of(one.view.by.as_ref(), tenant));
    let schedule = || schedules.next().map(|one| format!("schedule {} of backups", one.view.name));
    Ok(backup.or_else(schedule))
}

/// Refuses targets where backups of others than this tenant's users are, as far as the controller knows. One that the tenant has already is not looked at.
///
/// # Errors
/// `NotFound` if there is no such tenant; `Conflict`, which names the backups and schedules.
pub async fn check_no_others(
    cluster: &Cluster,
    tenant: &TenantName,
    targets: &[BackupTarget],
) -> Result<(), Problem> {
    let has = cluster.accounts.tenant(tenant)?.backup_targets;
    let backups = list(cluster).await?;
    let schedules = schedules::records(cluster).await?;
    for target in targets.iter().filter(|target| !has.contains(target)) {
        let is_others = |at: &BackupTarget, by: Option<&BackupUser>| {
            at.overlaps(target) && !room::is_of(by, tenant)
        };
        let there = backups.iter().filter(|one| is_others(&one.at, one.by.as_ref()));
        let there = there.filter(|one| one.part_of.is_none());
        let there = there.map(|one| format!("backup {}", one.name));
        let planned = schedules.iter().map(|one| &one.view).filter(|one| one.ended.is_empty());
        let planned = planned.filter(|one| is_others(&one.to, one.by.as_ref()));
        let planned = planned.map(|one| format!("schedule {}", one.name));
        let all: Vec<String> = there.chain(planned).collect();
        if all.is_empty() {
            continue;
        }
        let more = all.len().saturating_sub(OTHERS_NAMED);
        let named = all[..all.len() - more].join(", ");
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let what = format!("can't set the targets for backups of tenant {tenant}");
        let why = format!("{} is a place of others: {named}{more}", target.address);
        return Err(Problem::conflict(what, why).next(
            "choose another place, or delete these first (perigee backup delete, perigee backup unschedule)",
        ));
    }
    Ok(())
}

/// Refuses more backups than there can be, of all and of a user's tenant.
fn check_number(
    known: &[Backup],
    what: &str,
    by: Option<&BackupUser>,
    more: usize,
) -> Result<(), Problem> {
    let next = "delete old ones: perigee backup delete NAME";
    BACKUPS.check(known.len() + more).map_err(|error| error.problem(what).next(next))?;
    let Some(by) = by else { return Ok(()) };
    let own = known.iter().filter(|backup| room::is_of(backup.by.as_ref(), &by.tenant)).count();
    let checked = TENANT_BACKUPS.check(own + more);
    checked.map(drop).map_err(|error| error.problem(what).next(next))
}

/// A backup of which nothing was shipped yet.
pub(crate) fn new_backup(
    name: BackupName,
    volume: VolumeName,
    at: BackupTarget,
    begun_ms: u64,
) -> Backup {
    Backup {
        name,
        volume,
        vm: None,
        image: None,
        parts: Vec::new(),
        part_of: None,
        at,
        host: None,
        state: BackupState::Shipping,
        begun_ms,
        taken_ms: None,
        ended_ms: None,
        size_bytes: None,
        data_bytes: None,
        shipped_bytes: 0,
        progress: None,
        problem: String::new(),
        schedule: None,
        by: None,
        encrypted: false,
    }
}

/// Whether both have their bytes at the same place. Directories of two hosts are two places, also if they have the same path.
fn is_same_place(one: &Backup, other: &Backup) -> bool {
    one.at.address == other.at.address && (one.at.is_s3() || one.host == other.host)
}

/// All backups that the controller knows.
///
/// # Errors
/// If the store can't be read.
pub async fn list(cluster: &Cluster) -> Result<Vec<Backup>, Problem> {
    let records: Vec<BackupRecord> = cluster.records.list(BACKUPS_PREFIX).await?;
    Ok(records.into_iter().map(|record| record.view).collect())
}

/// One of them.
///
/// # Errors
/// `NotFound`.
pub async fn get(cluster: &Cluster, name: &BackupName) -> Result<Backup, Problem> {
    known(cluster, name).await?.ok_or_else(|| unknown(name))
}

/// One of them, if the controller knows it.
///
/// # Errors
/// If the store can't be read.
pub async fn known(cluster: &Cluster, name: &BackupName) -> Result<Option<Backup>, Problem> {
    let record: Option<BackupRecord> = cluster.records.read(&backup_key(name)).await?;
    Ok(record.map(|record| record.view))
}

/// The key with which a host reads a backup, if the backup's tenant has one, and whether the controller knows that the backup is encrypted.
///
/// # Errors
/// If the store can't be read.
pub async fn encryption(
    cluster: &Cluster,
    name: &BackupName,
) -> Result<(Option<BackupKey>, bool), Problem> {
    let encrypted = known(cluster, name).await?.is_some_and(|known| known.encrypted);
    Ok((room::key_of(cluster, name.as_str()), encrypted))
}

/// What is said of a backup that the controller does not know.
pub fn unknown(name: &BackupName) -> Problem {
    Problem::not_found(format!("backup {name}"), "the controller knows no backup with this name")
        .next("`perigee backup list` shows those that it knows, `perigee backup list --from TARGET` those that are at a target")
}

/// Deletes a backup in the background, with what no other one at its target needs. Or only forgets it: then what is at the target stays.
///
/// # Errors
/// `NotFound`; `Conflict` while it is shipped or read, or a volume still gets bytes from it.
pub async fn delete(cluster: &Cluster, name: &BackupName, forget: bool) -> Result<(), Problem> {
    let key = backup_key(name);
    let _looking = driver::LOOKING.lock().await;
    let Some(mut record) = cluster.records.own::<BackupRecord>(&key).await? else {
        return get(cluster, name).await.map(drop);
    };
    let view = &mut record.value.view;
    if view.state == BackupState::Shipping {
        return Err(Problem::conflict(
            format!("can't delete backup {name}"),
            "it is being shipped",
        )
        .next("wait until it is complete, or has failed"));
    }
    let refused = |why: String, next: &str| {
        Err(Problem::conflict(format!("can't delete backup {name}"), why).next(next))
    };
    if std::iter::once(name).chain(&view.parts).any(reading::is_read) {
        return refused("it is being restored or verified".to_owned(), "wait until that is over");
    }
    let names: Vec<&BackupName> = std::iter::once(name).chain(&view.parts).collect();
    // The driver of a VM may not have gone on since the controller has started.
    let makes = |record: &JobRecord| {
        let of = record.kind.persistent_vm().and_then(|vm| vm.from_backup.as_ref());
        let mut disks = of.into_iter().flat_map(|of| &of.disks);
        disks.any(|disk| disk.backup.as_ref().is_some_and(|backup| names.contains(&backup)))
    };
    if let Some(record) = cluster.unfinished_jobs().iter().find(|record| makes(record)) {
        let why = format!("VM {} is being made of it", record.job.id);
        return refused(why, "wait until that is over");
    }
    if let Some(image) = images::made_of(cluster, name).await? {
        return refused(format!("image {image} is being made of it"), "wait until that is over");
    }
    if let Some(root) = &view.part_of
        && let Some(root) = cluster.records.read::<BackupRecord>(&backup_key(root)).await?
    {
        let why = format!("it is a part of backup {}", root.view.name);
        return refused(why, "delete that one");
    }
    if let Some(part) = vm::part_that_is_shipped(cluster, &view.parts).await? {
        let why = format!("its part {part} is being shipped");
        return refused(why, "wait until it is complete, or has failed");
    }
    if forget {
        for part in &view.parts {
            cluster.records.remove(&backup_key(part)).await?;
        }
        return cluster.records.remove(&key).await;
    }
    for one in std::iter::once(name).chain(&view.parts) {
        if let Some(volume) = restoring::reader_of(cluster, one, &view.at).await? {
            let why = format!("bytes of volume {volume} are still to come from it");
            let next = format!(
                "wait until all have come (`perigee volume info {volume}`), or delete the volume and what was made of it"
            );
            return refused(why, &next);
        }
    }
    view.state = BackupState::Deleting;
    view.problem.clear();
    record.save().await?;
    cluster.drive_backup(name);
    Ok(())
}

/// What a host finds at a target, with the key of this tenant.
///
/// # Errors
/// `Invalid` if a directory is named without its host; what the host says.
pub async fn look(
    cluster: &Cluster,
    ask: &LookForBackups,
    tenant: &TenantName,
) -> Result<Vec<FoundBackup>, Problem> {
    ask.at.check()?;
    let host = reader(cluster, &ask.at, ask.host.as_ref()).await?;
    let key = room::key_of(cluster, &tenant.full("backup"));
    let (only, encrypted) = (None, false);
    let ask = ListBackups { at: ask.at.clone(), only, is_short: true, key, encrypted };
    let mut all: Vec<FoundBackup> = host.volume_slow.post("/v1/backups/list", &ask).await?;
    for of_vm in all.iter_mut().filter_map(|found| found.vm.as_mut()) {
        // It may have secrets, and a volume server of an older version leaves nothing out.
        of_vm.vm.cloud_init = CloudInit::default();
    }
    Ok(all)
}

/// Has a backup read and compared with its checksums: of a VM that the controller knows, with all its disks.
///
/// # Errors
/// `NotFound`; what the host says.
pub async fn verify(
    cluster: &Cluster,
    name: &BackupName,
    ask: CheckBackup,
) -> Result<VerifiedBackup, Problem> {
    let parts = known(cluster, name).await?.map(|root| root.parts).unwrap_or_default();
    let mut all = VerifiedBackup { read_bytes: 0, problems: Vec::new() };
    // All of it, also what comes last.
    let _reading = reading::begin(name);
    for name in std::iter::once(name).chain(&parts) {
        let (at, host) = place(cluster, name, ask.at.clone(), ask.host.clone()).await?;
        let host = reader(cluster, &at, host.as_ref()).await?;
        let (key, encrypted) = encryption(cluster, name).await?;
        let ask = VerifyBackup { backup: name.clone(), at, key, encrypted };
        let read: VerifiedBackup =
            host.volume.post_long("/v1/backups/verify", &ask, |_: Progress| {}).await?;
        all.read_bytes += read.read_bytes;
        all.problems.extend(read.problems);
    }
    Ok(all)
}

/// Where a backup is, and the host that is named or has shipped it.
async fn place(
    cluster: &Cluster,
    name: &BackupName,
    at: Option<BackupTarget>,
    host: Option<HostId>,
) -> Result<(BackupTarget, Option<HostId>), Problem> {
    let (at, host) = match at {
        Some(at) => (at, host),
        None => {
            let known = get(cluster, name).await?;
            (known.at, host.or(known.host))
        }
    };
    at.check()?;
    Ok((at, host))
}

/// The host that reads a target.
async fn reader(
    cluster: &Cluster,
    at: &BackupTarget,
    host: Option<&HostId>,
) -> Result<Arc<HostLink>, Problem> {
    match host {
        Some(host) => volumes::reachable(cluster, host),
        None if at.is_s3() => volumes::roomiest(cluster).await,
        None => {
            let what = format!("can't read the backups in {}", at.address);
            Err(Problem::invalid(what, "it is a directory, and no host is named")
                .next("name the host that has it: --host"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_two_hosts_are_two_places_and_an_s3_store_is_one() {
        let at = |address: &str, host: &str| {
            let name = BackupName::new("data-1").expect("a name");
            let at = BackupTarget { address: address.to_owned(), endpoint: None };
            let host = HostId::new(host).expect("a name");
            let volume = VolumeName::new("data").expect("a name");
            Backup { host: Some(host), ..new_backup(name, volume, at, 1) }
        };
        let is_same = |address| is_same_place(&at(address, "home1"), &at(address, "home2"));
        assert!(is_same("s3://bucket") && !is_same("/srv"));
        assert!(is_same_place(&at("/srv", "home1"), &at("/srv", "home1")));
        assert!(!is_same_place(&at("/srv", "home1"), &at("/mnt", "home1")));
    }
}
