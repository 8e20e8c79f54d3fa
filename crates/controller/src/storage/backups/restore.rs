//! New volumes are made of backups: one that somebody asks for, and the disks of a VM.

use std::sync::Arc;

use perigee_model::backup::{
    BackupTarget, FoundBackup, ListBackups, RestoreBackup, RestoreVolume, Restoring,
};
use perigee_model::from_backup::{DiskFromBackup, FromBackup};
use perigee_model::job::ClusterVolume;
use perigee_model::volume::{Progress, VolumeInfo};
use perigee_model::{
    BackupName, HostId, LayerId, LeaveSite, OwnerName, Problem, ProblemKind, TenantName, VolumeName,
};
use uuid::Uuid;

use super::restoring::RestoreRecord;
use super::{encryption, place, reader, reading, restoring};
use crate::accounts;
use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::storage::volumes;

/// Makes a volume of a backup. Unless `whole` is asked for, the volume is there before its bytes are.
///
/// # Errors
/// `NotFound` if there is no such backup; `Conflict` if the name is taken, or the backup damaged; `NoSpace`; what the host says. Then there is no volume.
pub async fn restore(
    cluster: &Arc<Cluster>,
    name: &BackupName,
    ask: RestoreBackup,
) -> Result<ClusterVolume, Problem> {
    let what = format!("can't restore backup {name} as volume {}", ask.volume);
    let _reading = reading::begin(name);
    let (found, from, host) = find(cluster, &what, name, (ask.from, ask.host)).await?;
    let RestoreBackup { volume, whole, .. } = ask;
    let room = accounts::hold_volume(cluster, volume.as_str(), found.size_bytes).await?;
    let (layer, owner) = (LayerId(Uuid::new_v4()), None);
    let new = New { volume: &volume, backup: name, from: &from, layer, whole, owner };
    let making = new.make(cluster, &host);
    let made = volumes::make_at(cluster, &volume, &host, making, room).await?;
    let restoring = restoring::all(cluster).await?.remove(&volume);
    Ok(ClusterVolume { restoring, ..made })
}

/// A volume that a host is to make of a backup.
struct New<'a> {
    volume: &'a VolumeName,
    backup: &'a BackupName,
    from: &'a BackupTarget,
    layer: LayerId,
    whole: bool,
    owner: Option<OwnerName>,
}

impl New<'_> {
    fn record(&self, host: &HostLink) -> RestoreRecord {
        RestoreRecord {
            layer: self.layer,
            volume: self.volume.clone(),
            host: host.id.clone(),
            begun_ms: now_ms(),
            is_made: false,
            from: self.from.clone(),
            view: Restoring {
                backup: self.backup.clone(),
                total_bytes: 0,
                missing_bytes: 0,
                problem: String::new(),
                is_damaged: false,
            },
        }
    }

    /// Has the host make it. That bytes of it come afterwards is recorded before. The inner error is the host's own: then there is no volume.
    async fn make(
        &self,
        cluster: &Cluster,
        host: &HostLink,
    ) -> Result<Result<VolumeInfo, Problem>, Problem> {
        let (key, encrypted) = encryption(cluster, self.backup).await?;
        let ask = RestoreVolume {
            backup: self.backup.clone(),
            from: self.from.clone(),
            tenant: TenantName::of(self.volume.as_str()),
            leave_site: LeaveSite::Allowed,
            at_once: (!self.whole).then_some(self.layer),
            layer: self.whole.then_some(self.layer),
            owner: self.owner.clone(),
            key,
            encrypted,
        };
        if !self.whole
            && let Err(problem) = restoring::begin(cluster, &self.record(host)).await
        {
            return Ok(Err(problem));
        }
        let path = format!("/v1/volumes/{}/restore", self.volume);
        let made = host.volume.hear_long::<VolumeInfo>(&path, &ask, |_: Progress| {}).await;
        if !self.whole {
            restoring::answered(cluster, self.layer, &made).await?;
        }
        made
    }

    /// What the host has under this name, if an earlier try has made that.
    async fn made_before(&self, host: &HostLink) -> Result<Option<VolumeInfo>, Problem> {
        match host.volume.get::<VolumeInfo>(&format!("/v1/volumes/{}", self.volume)).await {
            Ok(info) => {
                let is_own = self.owner.is_some() && info.owner == self.owner;
                let is_it = is_own || info.chain.contains(&self.layer);
                Ok(Some(info).filter(|_| is_it))
            }
            Err(problem) if problem.kind == ProblemKind::NotFound => Ok(None),
            Err(problem) => Err(problem),
        }
    }

    /// As [`Self::made_before`]. Who may not delete the backup yet is recorded.
    async fn find_made(
        &self,
        cluster: &Cluster,
        host: &HostLink,
    ) -> Result<Option<VolumeInfo>, Problem> {
        let Some(info) = self.made_before(host).await? else { return Ok(None) };
        if self.owner.is_none() {
            volumes::record_made(cluster, &host.id, &info).await?;
        }
        if !self.whole && info.chain.contains(&self.layer) {
            restoring::begin(cluster, &self.record(host)).await?;
            restoring::answered(cluster, self.layer, &Ok(Ok(info.clone()))).await?;
        }
        Ok(Some(info))
    }
}

/// Makes a disk of a VM, or finds the one that an earlier try has made. Of the VM's own disks `owner` is the owner; its volumes get a record, as all volumes have.
/// Returns whether the disk may leave its site.
///
/// # Errors
/// `Unavailable` if the host or the target is away; others as [`restore`].
pub async fn restore_disk(
    cluster: &Arc<Cluster>,
    of: &FromBackup,
    disk: &DiskFromBackup,
    backup: &BackupName,
    owner: &OwnerName,
) -> Result<LeaveSite, Problem> {
    let host = volumes::reachable(cluster, &disk.host)?;
    let new = new_disk(of, disk, backup, owner);
    let made = match new.find_made(cluster, &host).await? {
        Some(info) => Ok(info),
        None => make_disk(cluster, &host, &new, disk).await,
    };
    let info = match made {
        // What an earlier try has asked for may have come to its end just now.
        Err(problem) if problem.kind == ProblemKind::Conflict => {
            new.find_made(cluster, &host).await?.ok_or(problem)?
        }
        made => made?,
    };
    if !disk.role.is_data() && info.owner != new.owner {
        host.volume.delete(&format!("/v1/volumes/{}", disk.volume)).await?;
        let what = format!("can't make disk {} of backup {backup}", disk.volume);
        let why = format!("the volume server of host {} is of an older version", host.id);
        return Err(Problem::unsupported(what, why).next("upgrade that host first"));
    }
    Ok(info.leave_site)
}

fn new_disk<'a>(
    of: &'a FromBackup,
    disk: &'a DiskFromBackup,
    backup: &'a BackupName,
    owner: &OwnerName,
) -> New<'a> {
    let owner = (!disk.role.is_data()).then(|| owner.clone());
    let (volume, from, layer) = (&disk.volume, &of.from, disk.layer);
    New { volume, backup, from, layer, whole: of.whole, owner }
}

async fn make_disk(
    cluster: &Arc<Cluster>,
    host: &HostLink,
    new: &New<'_>,
    disk: &DiskFromBackup,
) -> Result<VolumeInfo, Problem> {
    if !disk.role.is_data() {
        return new.make(cluster, host).await?;
    }
    let room = accounts::hold_volume(cluster, disk.volume.as_str(), disk.size_bytes).await?;
    let mut made = None;
    let making = async {
        let answer = new.make(cluster, host).await;
        made = answer.as_ref().ok().and_then(|answer| answer.as_ref().ok()).cloned();
        answer
    };
    volumes::make_at(cluster, &disk.volume, host, making, room).await?;
    made.ok_or_else(|| {
        Problem::internal(format!("can't make disk {}", disk.volume), "its host has said nothing")
    })
}

/// Deletes a volume of a VM whose other disks could not be made, if it was made of this backup.
///
/// # Errors
/// `Unavailable` if the host is away; as [`volumes::delete`].
pub async fn drop_disk(
    cluster: &Cluster,
    of: &FromBackup,
    disk: &DiskFromBackup,
    owner: &OwnerName,
) -> Result<(), Problem> {
    let Some(backup) = &disk.backup else { return Ok(()) };
    let host = volumes::reachable(cluster, &disk.host)?;
    match new_disk(of, disk, backup, owner).made_before(&host).await? {
        Some(_) => volumes::delete(cluster, &disk.volume).await,
        // An earlier try has deleted it, and its record may have stayed.
        None if disk.is_made => match volumes::delete(cluster, &disk.volume).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
            deleted => deleted,
        },
        None => forget_disk(cluster, disk).await,
    }
}

/// Forgets the record of a volume that was to be made for a VM, if the volume was not made.
///
/// # Errors
/// `Conflict` if it is just being made; if the store fails.
pub async fn forget_disk(cluster: &Cluster, disk: &DiskFromBackup) -> Result<(), Problem> {
    volumes::forget_not_made(cluster, &disk.volume).await
}

/// A backup that can be read, where it is, and the host that reads it. The place is the one that is said, or else the one that the controller knows.
///
/// # Errors
/// `NotFound` if there is no such backup; `Conflict` if it is damaged; what the host says.
pub async fn find(
    cluster: &Cluster,
    what: &str,
    name: &BackupName,
    (from, host): (Option<BackupTarget>, Option<HostId>),
) -> Result<(FoundBackup, BackupTarget, Arc<HostLink>), Problem> {
    let (at, host) = place(cluster, name, from, host).await?;
    let host = reader(cluster, &at, host.as_ref()).await?;
    let (key, encrypted) = encryption(cluster, name).await?;
    let only = Some(name.clone());
    let ask = ListBackups { at: at.clone(), only, is_short: false, key, encrypted };
    let all: Vec<FoundBackup> = host.volume_slow.post("/v1/backups/list", &ask).await?;
    let Some(found) = all.into_iter().find(|found| found.name == *name) else {
        let why = format!("{} has no backup with this name", at.address);
        return Err(Problem::not_found(what, why)
            .next("`perigee backup list --from TARGET` shows those that it has"));
    };
    match found.problem.is_empty() {
        true => Ok((found, at, host)),
        false => Err(Problem::conflict(what, found.problem).next("use another backup")),
    }
}
