//! A new volume is made of a backup.

use std::sync::Arc;

use perigee_model::backup::{
    BackupTarget, FoundBackup, ListBackups, RestoreBackup, RestoreVolume, Restoring,
};
use perigee_model::job::ClusterVolume;
use perigee_model::volume::{Progress, VolumeInfo};
use perigee_model::{BackupName, HostId, LayerId, LeaveSite, Problem, TenantName};
use uuid::Uuid;

use super::restoring::RestoreRecord;
use super::{known, place, reader, reading, restoring, room};
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
    let (found, at, host) = find(cluster, &what, name, (ask.from, ask.host)).await?;
    let RestoreBackup { volume, whole, .. } = ask;
    let path = format!("/v1/volumes/{volume}/restore");
    let layer = LayerId(Uuid::new_v4());
    let ask = RestoreVolume {
        backup: name.clone(),
        from: at,
        tenant: TenantName::of(volume.as_str()),
        leave_site: LeaveSite::Allowed,
        at_once: (!whole).then_some(layer),
        key: room::key_of(cluster, name.as_str()),
        encrypted: known(cluster, name).await?.is_some_and(|known| known.encrypted),
    };
    let record = RestoreRecord {
        layer,
        volume: volume.clone(),
        host: host.id.clone(),
        begun_ms: now_ms(),
        is_made: false,
        from: ask.from.clone(),
        view: Restoring {
            backup: name.clone(),
            total_bytes: 0,
            missing_bytes: 0,
            problem: String::new(),
            is_damaged: false,
        },
    };
    let room = accounts::hold_volume(cluster, volume.as_str(), found.size_bytes).await?;
    let making = async {
        if !whole && let Err(problem) = restoring::begin(cluster, &record).await {
            return Ok(Err(problem));
        }
        let made = host.volume.hear_long::<VolumeInfo>(&path, &ask, |_: Progress| {}).await;
        if !whole {
            restoring::answered(cluster, layer, &made).await?;
        }
        made
    };
    let made = volumes::make_at(cluster, &volume, &host, making, room).await?;
    let restoring = restoring::all(cluster).await?.remove(&volume);
    Ok(ClusterVolume { restoring, ..made })
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
    let (only, key) = (Some(name.clone()), room::key_of(cluster, name.as_str()));
    let ask = ListBackups { at: at.clone(), only, is_short: false, key };
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
