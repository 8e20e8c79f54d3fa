//! Backups of volumes: one driver for each that is not complete, which alone writes its record.
//!
//! The volume's home ships a backup ([`perigee_model::backup`]); the controller orders that, and has it done again until it is done or given up. What was shipped is
//! used again, so a controller or a volume server that is killed in the middle loses nothing. A restore whose volume was not made is asked for again by whoever wants
//! it. A volume that was made, and whose bytes come afterwards, has a record and a driver too (`restoring`).

mod driver;
mod restore;
mod restoring;

use std::sync::Arc;

use perigee_model::backup::{
    Backup, BackupState, BackupTarget, CheckBackup, FoundBackup, LookForBackups, NewBackup,
    VerifiedBackup, VerifyBackup,
};
use perigee_model::limits::BACKUPS;
use perigee_model::units::compact_time;
use perigee_model::volume::Progress;
use perigee_model::{BackupName, HostId, Problem};
use serde::{Deserialize, Serialize};

use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::records::{VolumeRecord, volume_key};
use crate::storage::volumes;

pub use driver::drive;
pub use restore::restore;
pub use restoring::{all as restoring, check_whole, drive as drive_restore};

/// A backup, as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupRecord {
    /// As shown to people.
    pub view: Backup,
    /// As in [`NewBackup`].
    pub whole: bool,
    /// The home is asked to ship it, and has not said that it ships no more. Meanwhile nothing is deleted at the target.
    pub asks: bool,
}

const BACKUPS_PREFIX: &str = "backups/";

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

/// Begins a backup of a volume; the answer comes at once.
///
/// # Errors
/// `NotFound` if there is no such volume; `Conflict` if it is a job's own; `Invalid` for a target that can't be one.
pub async fn create(cluster: &Arc<Cluster>, ask: NewBackup) -> Result<Backup, Problem> {
    ask.to.check()?;
    let volume = ask.volume;
    let what = format!("can't back up volume {volume}");
    volumes::find(cluster, &volume).await?;
    if cluster.records.read::<VolumeRecord>(&volume_key(&volume)).await?.is_none() {
        return Err(Problem::conflict(what, "it was made for a job and ends with it"));
    }
    let known = cluster.records.keys(BACKUPS_PREFIX).await?.len();
    BACKUPS.check(known + 1).map_err(|error| {
        error.problem(&what).next("forget old ones: perigee backup delete NAME")
    })?;
    let begun_ms = now_ms();
    let name = BackupName::new(format!("{volume}-{}", compact_time(begun_ms)))
        .map_err(|error| Problem::invalid(&what, error))?;
    let view = Backup {
        name: name.clone(),
        volume,
        at: ask.to,
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
    };
    let record = BackupRecord { view: view.clone(), whole: ask.whole, asks: false };
    if !cluster.records.create_asked(&backup_key(&name), &record).await? {
        return Err(
            Problem::conflict(what, "another backup of it began in this second").next("try again")
        );
    }
    cluster.drive_backup(&name);
    Ok(view)
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
    let record: Option<BackupRecord> = cluster.records.read(&backup_key(name)).await?;
    record.map(|record| record.view).ok_or_else(|| {
        Problem::not_found(format!("backup {name}"), "the controller knows no backup with this name")
            .next("`perigee backup list` shows those that it knows, `perigee backup list --from TARGET` those that are at a target")
    })
}

/// Deletes a backup in the background, with what no other one at its target needs. Or only forgets it: then what is at the target stays.
///
/// # Errors
/// `NotFound`; `Conflict` while it is shipped, or a volume still gets bytes from it.
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
    if forget {
        return cluster.records.remove(&key).await;
    }
    if let Some(volume) = restoring::reader_of(cluster, name, &view.at).await? {
        let why = format!("bytes of volume {volume} are still to come from it");
        return Err(Problem::conflict(format!("can't delete backup {name}"), why).next(format!(
            "wait until all have come (`perigee volume info {volume}`), or delete the volume and what was made of it"
        )));
    }
    view.state = BackupState::Deleting;
    view.problem.clear();
    record.save().await?;
    cluster.drive_backup(name);
    Ok(())
}

/// What a host finds at a target.
///
/// # Errors
/// `Invalid` if a directory is named without its host; what the host says.
pub async fn look(cluster: &Cluster, ask: &LookForBackups) -> Result<Vec<FoundBackup>, Problem> {
    ask.at.check()?;
    let host = reader(cluster, &ask.at, ask.host.as_ref()).await?;
    host.volume_slow.post("/v1/backups/list", &ask.at).await
}

/// Has a backup read and compared with its checksums.
///
/// # Errors
/// `NotFound`; what the host says.
pub async fn verify(
    cluster: &Cluster,
    name: &BackupName,
    ask: CheckBackup,
) -> Result<VerifiedBackup, Problem> {
    let (at, host) = place(cluster, name, ask.at, ask.host).await?;
    let host = reader(cluster, &at, host.as_ref()).await?;
    let ask = VerifyBackup { backup: name.clone(), at };
    host.volume.post_long("/v1/backups/verify", &ask, |_: Progress| {}).await
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
