//! A new volume is made of a backup.

use std::sync::Arc;

use perigee_model::backup::{BackupTarget, FoundBackup, RestoreBackup, RestoreVolume};
use perigee_model::job::ClusterVolume;
use perigee_model::volume::{Progress, VolumeInfo};
use perigee_model::{BackupName, HostId, LeaveSite, Problem, TenantName};

use super::{place, reader, reading};
use crate::accounts;
use crate::cluster::{Cluster, HostLink};
use crate::storage::volumes;

/// Makes a volume of a backup. The volume is there when all its bytes are.
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
    let volume = ask.volume;
    let path = format!("/v1/volumes/{volume}/restore");
    let ask = RestoreVolume {
        backup: name.clone(),
        from: at,
        tenant: TenantName::of(volume.as_str()),
        leave_site: LeaveSite::Allowed,
    };
    let room = accounts::hold_volume(cluster, volume.as_str(), found.size_bytes).await?;
    let making = host.volume.hear_long::<VolumeInfo>(&path, &ask, |_: Progress| {});
    volumes::make_at(cluster, &volume, &host, making, room).await
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
    let all: Vec<FoundBackup> = host.volume_slow.post("/v1/backups/list", &at).await?;
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
