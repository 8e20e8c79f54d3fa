//! Moves of volumes as people and jobs ask for them.

use std::sync::Arc;

use perigee_model::volume_move::{VolumeMove, VolumeMoveCause, VolumeMoveState};
use perigee_model::{HostId, Problem, VolumeName};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::records::{
    JobRecord, PlacedDisk, VolumeMoveIntent, VolumeMoveRecord, VolumeRecord, volume_key,
    volume_move_intent_key, volume_move_key,
};
use crate::storage::{backups, leave_site, volumes};

/// Records a volume's move to another home and starts its driver.
///
/// # Errors
/// `Conflict` when the volume cannot move now, `Unavailable` when a host does not answer.
pub async fn request(
    cluster: &Arc<Cluster>,
    volume: &VolumeName,
    to: &HostId,
    cause: VolumeMoveCause,
) -> Result<VolumeMove, Problem> {
    cluster.hosts.get(to)?;
    let (from, listed) = home_of(cluster, volume).await?;
    if from == *to {
        return Err(refusal(volume, to, "it is there already"));
    }
    cluster.hosts.check_not_drained(to, format!("can't move volume {volume} to {to}"))?;
    volumes::reachable(cluster, &from)?;
    volumes::reachable(cluster, to)?;
    leave_site::check_move(cluster, volume, &from, to).await?;
    backups::check_whole(cluster, format!("can't move volume {volume} to {to}"), volume).await?;
    let view = VolumeMove {
        volume: volume.clone(),
        from,
        to: to.clone(),
        state: VolumeMoveState::Taking,
        cause,
        started_ms: now_ms(),
        taken_ms: None,
        ended_ms: None,
        missing_bytes: None,
        left_ms: None,
        problem: String::new(),
    };
    let record = VolumeMoveRecord { view, number: 1, tenure: None, listed };
    // Not part of the request: one that is dropped leaves no move without a driver.
    let made = tokio::spawn(begin(Arc::clone(cluster), record));
    made.await.map_err(|e| Problem::internal(format!("can't move volume {volume}"), e))?
}

async fn begin(cluster: Arc<Cluster>, mut record: VolumeMoveRecord) -> Result<VolumeMove, Problem> {
    let VolumeMove { volume, from, to, .. } = record.view.clone();
    let _moving = cluster.index.begin_volume_move(&volume, &from).map_err(|why| {
        refusal(&volume, &to, why).next(format!(
            "try again when that is over; `perigee volume info {volume}` shows the volume"
        ))
    })?;
    // From here on no other move begins. One may have ended since the home was read.
    let (home, _) = home_of(&cluster, &volume).await?;
    if home != from {
        return Err(refusal(&volume, &to, format!("its home is {home} by now")));
    }
    match cluster.own_volume_move(&volume).await? {
        Some(mut last) => {
            record.number = last.value.number.saturating_add(1);
            last.value = record.clone();
            last.save().await?;
        }
        None => {
            if !cluster.records.create(&volume_move_key(&volume), &record).await? {
                return Err(refusal(&volume, &to, "it is being moved already"));
            }
            cluster.index.put_volume_move(&record);
        }
    }
    cluster.drive_volume_move(&volume);
    Ok(record.view)
}

fn refusal(volume: &VolumeName, to: &HostId, why: impl ToString) -> Problem {
    Problem::conflict(format!("can't move volume {volume} to {to}"), why.to_string())
}

/// The volume's home, and whether it has a record of its own.
async fn home_of(cluster: &Cluster, volume: &VolumeName) -> Result<(HostId, bool), Problem> {
    if let Some((_, disk)) = job_with(cluster, volume) {
        return Ok((disk.home, false));
    }
    volumes::find(cluster, volume).await?;
    let record: Option<VolumeRecord> = cluster.records.read(&volume_key(volume)).await?;
    record.map(|record| (record.home, true)).ok_or_else(|| {
        let why = "it was made for a job that has ended, and is about to be deleted";
        Problem::conflict(format!("can't move volume {volume}"), why)
    })
}

/// The unfinished job that has made the volume for itself.
pub(super) fn job_with(
    cluster: &Cluster,
    volume: &VolumeName,
) -> Option<(Arc<JobRecord>, PlacedDisk)> {
    cluster.unfinished_jobs().into_iter().find_map(|job| {
        let mut disks = job.placement.iter().flat_map(|placement| &placement.disks);
        let disk = disks.find(|disk| disk.volume == *volume && disk.temporary)?.clone();
        Some((job, disk))
    })
}

/// Whether it is a disk of a VM without a job that the VM keeps when it is off.
pub fn is_kept_by_a_vm(cluster: &Cluster, volume: &VolumeName) -> bool {
    job_with(cluster, volume)
        .is_some_and(|(record, disk)| record.kind.is_persistent_vm() && disk.role.lasts())
}

/// The home of a volume that was made for an unfinished job.
pub fn home_in_a_job(cluster: &Cluster, volume: &VolumeName) -> Option<HostId> {
    job_with(cluster, volume).map(|(_, disk)| disk.home)
}

/// Calls off the volume's move, unless the new home has taken the volume.
///
/// # Errors
/// `Conflict` when none is under way, or when it is done.
pub async fn cancel(cluster: &Cluster, volume: &VolumeName) -> Result<VolumeMove, Problem> {
    let what = || format!("can't cancel the move of volume {volume}");
    let Some(last) = cluster.index.volume_move(volume).filter(|r| !r.view.state.is_final()) else {
        return Err(Problem::conflict(what(), "none is under way"));
    };
    let VolumeMove { from, to, state, .. } = &last.view;
    if state.is_taken() {
        let why = format!("{to} is its home already; only copying its data is not over");
        return Err(Problem::conflict(what(), why).next(format!(
            "to move it back when all of it is there: perigee volume move {volume} {from}"
        )));
    }
    call_off(cluster, &last).await?;
    Ok(last.view.clone())
}

/// Has a move called off if it still can be.
pub async fn call_off(cluster: &Cluster, record: &VolumeMoveRecord) -> Result<(), Problem> {
    let key = volume_move_intent_key(&record.view.volume);
    let intent: Option<VolumeMoveIntent> = cluster.records.read(&key).await?;
    // Each write has the driver begin its step again.
    if intent.is_some_and(|intent| intent.cancel == record.number) {
        return Ok(());
    }
    cluster.records.put(&key, &VolumeMoveIntent { cancel: record.number }).await
}

/// The volume's last move.
///
/// # Errors
/// `NotFound` when it never moved.
pub async fn of_volume(cluster: &Cluster, volume: &VolumeName) -> Result<VolumeMove, Problem> {
    let last = cluster.index.volume_move(volume);
    last.map(|record| record.view.clone()).ok_or_else(|| {
        Problem::not_found(format!("the move of volume {volume}"), "the volume never moved")
    })
}

/// Forgets the last move of a volume that is gone.
pub async fn forget(cluster: &Cluster, volume: &VolumeName) -> Result<(), Problem> {
    cluster.records.remove(&volume_move_key(volume)).await?;
    cluster.records.remove(&volume_move_intent_key(volume)).await?;
    cluster.index.forget_volume_move(volume);
    Ok(())
}
