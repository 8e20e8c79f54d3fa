//! Volumes that can be used while bytes of them are still to come from a backup: one record and one driver for each.
//!
//! Their host does the work. The driver only looks how far the host is, and keeps the record as long as the host's layer needs the backup: a snapshot of the volume may
//! need the backup longer than the volume. Meanwhile nobody deletes the backup.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::backup::{
    Backup, BackupState, BackupTarget, Restoring, RestoringLayer, SendBackupKey,
};
use perigee_model::volume::VolumeInfo;
use perigee_model::{BackupName, HostId, LayerId, Problem, ProblemKind, TenantName, VolumeName};
use serde::{Deserialize, Serialize};

use super::driver::LOOKING;
use super::rounds::millis;
use super::{known, list, room};
use crate::clock::now_ms;
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, HostLink};
use crate::records::{JobRecord, VolumeRecord};
use crate::storage::moves::in_words;

/// A volume whose layer gets its bytes from a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreRecord {
    /// The layer below the volume's head, of which the record is.
    pub layer: LayerId,
    /// The volume.
    pub volume: VolumeName,
    /// Its home, which does not change meanwhile.
    pub host: HostId,
    /// When the restore was asked for; Unix time.
    pub begun_ms: u64,
    /// The host has answered that the volume is there. Until then it may still make the volume.
    pub is_made: bool,
    /// Where the backup is.
    pub from: BackupTarget,
    /// As shown to people.
    pub view: Restoring,
}

const RESTORES_PREFIX: &str = "restores/";
/// A host whose answer was lost makes no volume so long after it was asked.
const MADE_MAX: Duration = Duration::from_secs(600);
/// How often hosts are asked for layers that lack a key, as a multiple of the monitor's period: 30 s.
const MONITORED: u32 = 15;
/// How often a host is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_secs(1);

fn restore_key(layer: LayerId) -> String {
    format!("{RESTORES_PREFIX}{layer}")
}

async fn records(cluster: &Cluster) -> Result<Vec<RestoreRecord>, Problem> {
    cluster.records.list(RESTORES_PREFIX).await
}

/// Starts the drivers of all of them, after a restart.
///
/// # Errors
/// If the store can't be read.
pub(super) async fn drive_all(cluster: &Cluster) -> Result<(), Problem> {
    records(cluster).await?.iter().for_each(|record| cluster.drive_restore(record.layer));
    Ok(())
}

/// The volumes of which bytes are still to come.
///
/// # Errors
/// If the store can't be read.
pub async fn all(cluster: &Cluster) -> Result<BTreeMap<VolumeName, Restoring>, Problem> {
    let mut all = records(cluster).await?;
    // An earlier volume of the same name may just have been deleted.
    all.sort_by_key(|record| record.begun_ms);
    Ok(all.into_iter().map(|record| (record.volume, record.view)).collect())
}

/// Refuses what can't be done with a volume of which bytes are still to come.
///
/// # Errors
/// `Conflict`.
pub async fn check_whole(
    cluster: &Cluster,
    what: impl Into<String>,
    volume: &VolumeName,
) -> Result<(), Problem> {
    let Some(restoring) = all(cluster).await?.remove(volume) else { return Ok(()) };
    let why = format!("bytes of it are still to come from backup {}", restoring.backup);
    Err(Problem::conflict(what, why).next(format!(
        "wait until all have come: `perigee volume info {volume}` shows how many are missing"
    )))
}

/// A volume that needs this backup. The caller holds [`LOOKING`], so none begins to.
pub(super) async fn reader_of(
    cluster: &Cluster,
    backup: &BackupName,
    at: &BackupTarget,
) -> Result<Option<VolumeName>, Problem> {
    // A directory of the same name at another host is another target. That is not asked here: the backup waits in vain at worst.
    let needs =
        |record: &RestoreRecord| record.view.backup == *backup && record.from.address == at.address;
    Ok(records(cluster).await?.into_iter().find(needs).map(|record| record.volume))
}

/// Records that a host is about to make the volume. From now on nobody deletes the backup.
///
/// # Errors
/// `Conflict` if the backup is being deleted.
pub(super) async fn begin(cluster: &Cluster, record: &RestoreRecord) -> Result<(), Problem> {
    let view = &record.view;
    let _looking = LOOKING.lock().await;
    let what = format!("can't restore backup {} as volume {}", view.backup, record.volume);
    check_not_deleted(cluster, what, &view.backup, &record.from).await?;
    cluster.records.put(&restore_key(record.layer), record).await
}

/// Refuses a backup that is being deleted. The caller holds [`LOOKING`], so no deletion begins meanwhile.
pub(super) async fn check_not_deleted(
    cluster: &Cluster,
    what: impl Into<String>,
    backup: &BackupName,
    from: &BackupTarget,
) -> Result<(), Problem> {
    let is_it =
        |known: &Backup| known.state == BackupState::Deleting && known.at.address == from.address;
    match known(cluster, backup).await?.filter(is_it) {
        None => Ok(()),
        Some(_) => {
            Err(Problem::conflict(what, "the backup is being deleted").next("use another backup"))
        }
    }
}

/// The host has answered whether the volume is there, or the answer was lost.
///
/// # Errors
/// If the store fails.
pub(super) async fn answered(
    cluster: &Cluster,
    layer: LayerId,
    answer: &Result<Result<VolumeInfo, Problem>, Problem>,
) -> Result<(), Problem> {
    let key = restore_key(layer);
    match answer {
        Ok(Err(_)) => return cluster.records.remove(&key).await,
        // All of it was read first: the host, or the backup, is of an older version.
        Ok(Ok(info)) if !info.chain.contains(&layer) => {
            return cluster.records.remove(&key).await;
        }
        Ok(Ok(info)) => {
            if let Some(mut record) = cluster.records.own::<RestoreRecord>(&key).await? {
                let bytes = info.remote_bytes;
                record.value.is_made = true;
                (record.value.view.total_bytes, record.value.view.missing_bytes) = (bytes, bytes);
                record.save().await?;
            }
        }
        Err(_) => {}
    }
    cluster.drive_restore(layer);
    Ok(())
}

/// What the driver finds.
enum Found {
    /// Nothing is to come any more: all is there, or the layer is not.
    Nothing,
    Layer(RestoringLayer),
    NotKnown(Problem),
}

/// Follows how far the host is, until nothing is to come any more.
///
/// # Errors
/// When the store fails; the caller tries again.
pub async fn drive(cluster: Arc<Cluster>, layer: LayerId) -> Result<(), Problem> {
    let key = restore_key(layer);
    loop {
        let Some(mut record) = cluster.records.own::<RestoreRecord>(&key).await? else {
            return Ok(());
        };
        let before = record.value.clone();
        let view = &mut record.value.view;
        match look(&cluster, &before).await {
            Found::Nothing => return cluster.records.remove(&key).await,
            Found::Layer(found) => {
                view.total_bytes = view.total_bytes.max(found.missing_bytes);
                view.missing_bytes = found.missing_bytes;
                view.problem = found.problem;
                view.is_damaged = found.is_damaged;
                record.value.is_made = true;
            }
            Found::NotKnown(problem) => view.problem = in_words(&problem),
        }
        if record.value != before {
            record.save().await?;
        }
        tokio::time::sleep(LOOK_EVERY.min(cluster.timing.monitor)).await;
    }
}

async fn look(cluster: &Cluster, record: &RestoreRecord) -> Found {
    let host = match cluster.hosts.get(&record.host) {
        Ok(host) => host,
        // It was removed, and with it the volume.
        Err(problem) if problem.kind == ProblemKind::NotFound => return Found::Nothing,
        Err(problem) => return Found::NotKnown(problem),
    };
    let all = match host.volume.get::<Vec<RestoringLayer>>("/v1/backups/restoring").await {
        Ok(all) => all,
        Err(problem) => return Found::NotKnown(problem),
    };
    match all.into_iter().find(|one| one.layer == record.layer) {
        Some(found) => {
            if found.lacks_key {
                send_key(cluster, &host, &record.view.backup, &record.from).await;
            }
            Found::Layer(found)
        }
        None if record.is_made => Found::Nothing,
        None if now_ms().saturating_sub(record.begun_ms) > millis(MADE_MAX) => Found::Nothing,
        None => {
            let what = format!("can't say how far the restore of volume {} is", record.volume);
            Found::NotKnown(Problem::unavailable(what, "its host's answer was lost"))
        }
    }
}

/// The host has the key in memory only, and was started again.
async fn send_key(cluster: &Cluster, host: &HostLink, backup: &BackupName, from: &BackupTarget) {
    let Some(key) = room::key_of(cluster, backup.as_str()) else { return };
    let ask = SendBackupKey { at: from.clone(), key };
    if let Err(problem) = host.volume.post::<()>("/v1/backups/key", &ask).await {
        tracing::warn!(%problem, "host {} lacks the key of backup {backup}", host.id);
    }
}

/// Sends hosts the keys that layers of theirs lack where the record of a restore was lost with an older state of the controller. Runs until the controller ends.
pub async fn send_lost_keys(cluster: Arc<Cluster>, task: Task) {
    loop {
        task.round(send_lacking(&cluster)).await;
        tokio::time::sleep(cluster.timing.monitor * MONITORED).await;
    }
}

async fn send_lacking(cluster: &Cluster) -> Result<String, Problem> {
    let (hosts, mut lacking, mut refused) = (cluster.hosts.serving(), 0, BTreeMap::new());
    let mut of = None;
    for host in &hosts {
        // One that does not answer is asked again.
        let all = host.volume.get::<Vec<RestoringLayer>>("/v1/backups/restoring").await;
        let mut all = all.unwrap_or_default();
        all.retain(|layer| layer.lacks_key);
        if all.is_empty() {
            continue;
        }
        lacking += all.len();
        let of = match &mut of {
            Some(of) => of,
            none => none.insert(KeyHolders::read(cluster).await?),
        };
        let mut sent = BTreeSet::new();
        // The driver of a restore sends the key itself.
        for layer in all.into_iter().filter(|layer| !of.followed.contains(&layer.layer)) {
            let Ok(backup) = BackupName::new(layer.backup) else { continue };
            let place = (TenantName::of(backup.as_str()), layer.from);
            if sent.contains(&place) {
                continue;
            }
            if of.has(cluster, &host.id, &backup) {
                send_key(cluster, host, &backup, &place.1).await;
                sent.insert(place);
            } else {
                *refused.entry(host.id.as_str()).or_insert(0_u64) += 1;
            }
        }
    }
    if !refused.is_empty() {
        let at: Vec<String> = refused.iter().map(|(host, of)| format!("{host}: {of}")).collect();
        tracing::warn!(
            "hosts ask for keys of backups that they may not have, for so many layers: {}",
            at.join(", ")
        );
    }
    Ok(format!("asked {} hosts, of which {lacking} layers lacked a key", hosts.len()))
}

/// What says which hosts may have the keys of lost restores.
struct KeyHolders {
    /// The layers whose restores are recorded.
    followed: BTreeSet<LayerId>,
    backups: Vec<Backup>,
    volumes: Vec<VolumeRecord>,
    jobs: Vec<Arc<JobRecord>>,
}

impl KeyHolders {
    async fn read(cluster: &Cluster) -> Result<Self, Problem> {
        Ok(Self {
            followed: records(cluster).await?.into_iter().map(|record| record.layer).collect(),
            backups: list(cluster).await?,
            volumes: cluster.records.list("volumes/").await?,
            jobs: cluster.unfinished_jobs(),
        })
    }

    /// Whether a host has shipped the backup, or lasting disks of its tenant are recorded there. A job that runs there is not enough, and a rented host gets no such
    /// key: the host may have been broken into, and the key opens all backups of the tenant.
    fn has(&self, cluster: &Cluster, host: &HostId, backup: &BackupName) -> bool {
        if cluster.rentals.of_host(host).is_some() {
            return false;
        }
        let tenant = TenantName::of(backup.as_str());
        let has_shipped =
            |known: &Backup| known.name == *backup && known.host.as_ref() == Some(host);
        let is_its =
            |volume: &VolumeRecord| volume.home == *host && tenant.owns(volume.name.as_str());
        let has_disk = |record: &Arc<JobRecord>| {
            let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
            let lasts = record.kind.is_persistent_vm() && tenant.owns(record.job.id.as_str());
            lasts && disks.any(|disk| disk.home == *host)
        };
        self.backups.iter().any(has_shipped)
            || self.volumes.iter().any(is_its)
            || self.jobs.iter().any(has_disk)
    }
}

/// A host that answers and says that a layer of it needs the backup. The record of that may be lost: the controller may be restored from an older state.
pub(super) async fn host_that_reads(
    cluster: &Cluster,
    backup: &BackupName,
    at: &BackupTarget,
) -> Option<HostId> {
    for host in cluster.hosts.serving() {
        let all = host.volume.get::<Vec<RestoringLayer>>("/v1/backups/restoring").await;
        let needs =
            |one: &RestoringLayer| one.backup == backup.as_str() && one.from.address == at.address;
        if all.is_ok_and(|all| all.iter().any(needs)) {
            return Some(host.id.clone());
        }
    }
    None
}
