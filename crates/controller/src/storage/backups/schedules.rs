//! Schedules of backups, as people ask for them and look at them. [`super::rounds`] begins their backups.

use std::sync::Arc;

use perigee_model::backup::{BackupOf, BackupState, BackupUser};
use perigee_model::backup_schedule::{BackupSchedule, NewBackupSchedule};
use perigee_model::limits::{BACKUP_SCHEDULES, TENANT_BACKUP_SCHEDULES};
use perigee_model::{BackupName, Problem, ScheduleName, TenantName, VolumeName};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use super::{BACKUPS_PREFIX, BackupRecord, check_listed, find_thing, room, vm};
use crate::clock::now_ms;
use crate::cluster::Cluster;

/// A schedule of backups.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleRecord {
    /// As shown to people, but for what the records of its backups say.
    pub view: BackupSchedule,
    /// Its newest complete backup, by the order in which they were begun: it is kept whatever the clock says.
    pub newest: Option<BackupName>,
    /// Since when there may be backups that are not kept; Unix time.
    pub prune_since_ms: Option<u64>,
    /// When the VM was made, which may have been followed by another one of that name; Unix time.
    pub vm_made_ms: Option<u64>,
}

impl ScheduleRecord {
    /// Whether this schedule has begun the backup: not an earlier one of the same name.
    pub fn has_begun(&self, backup: &BackupRecord) -> bool {
        backup.view.schedule.as_ref() == Some(&self.view.name)
            && backup.schedule_made_ms == Some(self.view.made_ms)
    }

    /// It begins no backup any more, and deletes none.
    fn end(&mut self, why: String) {
        tracing::warn!("the schedule {} of backups has ended: {why}", self.view.name);
        self.view.ended = why;
        self.view.next_ms = None;
        self.prune_since_ms = None;
    }

    /// As [`Self::end`], because the volume or VM is gone.
    pub fn end_without_its_thing(&mut self) {
        let of = self.view.of_in_words();
        self.end(format!("{of} was deleted; its backups stay until somebody deletes them"));
    }
}

/// Below it are the schedules.
pub const SCHEDULES: &str = "backup_schedules/";

/// The key of a [`ScheduleRecord`].
pub fn schedule_key(name: &ScheduleName) -> String {
    format!("{SCHEDULES}{name}")
}

/// Held while a schedule is read and written again. No host is asked meanwhile.
pub static TURN: Mutex<()> = Mutex::const_new(());

/// All schedules.
///
/// # Errors
/// If the store can't be read.
pub async fn records(cluster: &Cluster) -> Result<Vec<ScheduleRecord>, Problem> {
    cluster.records.list(SCHEDULES).await
}

/// Makes a schedule, whose first backup is due at once, or changes the one of the same thing with the same target.
///
/// # Errors
/// `NotFound` if there is no such volume, VM or image; `Conflict` if it is a job's own; `Invalid` for what can't be a schedule; `Forbidden` for a target that the user's tenant may
/// not use.
pub async fn set(
    cluster: &Arc<Cluster>,
    ask: NewBackupSchedule,
    by: Option<BackupUser>,
) -> Result<BackupSchedule, Problem> {
    let of = BackupOf::one(ask.volume.clone(), ask.vm.clone(), ask.image.clone())?;
    let what = format!("can't back up {of} by a schedule");
    ask.check(&what)?;
    room::check_target(cluster, &what, by.as_ref(), &ask.to).await?;
    if ask.encrypted {
        room::check_encrypted(cluster, &what, of.name()).await?;
    }
    find_thing(cluster, &what, &of).await?;
    let _turn = TURN.lock().await;
    // From here on nobody asks a host: whoever deletes the volume ends its schedules, before or after this.
    check_listed(cluster, &what, &of).await?;
    let all = records(cluster).await?;
    let is_of_same = |one: &&ScheduleRecord| {
        let view = &one.view;
        let is_of_tenant = tenant_of(view.by.as_ref()) == tenant_of(by.as_ref());
        let is_of_thing = view.volume == ask.volume && view.vm == ask.vm && view.image == ask.image;
        is_of_tenant && is_of_thing && view.to == ask.to
    };
    if let Some(there) = all.iter().find(is_of_same) {
        if there.view.ended.is_empty() {
            return change(cluster, &there.view.name, ask).await;
        }
        cluster.records.remove(&schedule_key(&there.view.name)).await?;
    }
    let next = "end others: perigee backup unschedule NAME";
    BACKUP_SCHEDULES.check(all.len() + 1).map_err(|error| error.problem(&what).next(next))?;
    if let Some(by) = &by {
        let own = all.iter().filter(|one| room::is_of(one.view.by.as_ref(), &by.tenant)).count();
        TENANT_BACKUP_SCHEDULES.check(own + 1).map_err(|error| error.problem(&what).next(next))?;
    }
    let vm_made_ms = match &of {
        BackupOf::Volume(_) | BackupOf::Image(_) => None,
        BackupOf::Vm(name) => Some(vm::find(cluster, name)?.job.submitted_ms),
    };
    let made_ms = now_ms();
    let view = BackupSchedule {
        name: free_name(&what, of.name(), &all)?,
        volume: ask.volume,
        vm: ask.vm,
        image: ask.image,
        to: ask.to,
        every_s: ask.every_s,
        keep: ask.keep,
        made_ms,
        next_ms: Some(made_ms),
        under_way: None,
        last_success_ms: None,
        last_failure: None,
        kept: 0,
        ended: String::new(),
        problem: String::new(),
        by,
        encrypted: ask.encrypted,
    };
    let record =
        ScheduleRecord { view: view.clone(), newest: None, prune_since_ms: None, vm_made_ms };
    cluster.records.put(&schedule_key(&view.name), &record).await?;
    Ok(view)
}

fn tenant_of(by: Option<&BackupUser>) -> Option<&TenantName> {
    by.map(|by| &by.tenant)
}

async fn change(
    cluster: &Cluster,
    name: &ScheduleName,
    ask: NewBackupSchedule,
) -> Result<BackupSchedule, Problem> {
    let Some(mut record) = cluster.records.own::<ScheduleRecord>(&schedule_key(name)).await? else {
        return Err(unknown(name));
    };
    let view = &mut record.value.view;
    let soon_ms = now_ms().saturating_add(ask.every_s.saturating_mul(1000));
    view.next_ms = view.next_ms.map(|next_ms| next_ms.min(soon_ms));
    (view.every_s, view.keep) = (ask.every_s, ask.keep);
    view.encrypted |= ask.encrypted;
    record.save().await?;
    let backups: Vec<BackupRecord> = cluster.records.list(BACKUPS_PREFIX).await?;
    Ok(shown(record.value, &backups))
}

/// The name of what is backed up, or with a number if there is a schedule of that name.
fn free_name(what: &str, of: &str, all: &[ScheduleRecord]) -> Result<ScheduleName, Problem> {
    let is_free = |name: &String| all.iter().all(|one| one.view.name.as_str() != name);
    let numbered = (2..).map(|number: u32| format!("{of}-{number}"));
    let name = std::iter::once(of.to_owned()).chain(numbered).find(is_free).unwrap_or_default();
    ScheduleName::new(name).map_err(|error| Problem::invalid(what, error))
}

/// The schedules with what their backups say.
///
/// # Errors
/// If the store can't be read.
pub async fn list(cluster: &Cluster) -> Result<Vec<BackupSchedule>, Problem> {
    let all = records(cluster).await?;
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let backups: Vec<BackupRecord> = cluster.records.list(BACKUPS_PREFIX).await?;
    Ok(all.into_iter().map(|record| shown(record, &backups)).collect())
}

fn shown(record: ScheduleRecord, backups: &[BackupRecord]) -> BackupSchedule {
    let own = || backups.iter().filter(|backup| record.has_begun(backup));
    let kept = own().filter(|backup| backup.view.state == BackupState::Completed).count();
    let is_under_way =
        |name: Option<&BackupName>| name.is_some() && name == record.view.under_way.as_ref();
    let waits = backups.iter().filter(|backup| {
        let view = &backup.view;
        let is_its = is_under_way(Some(&view.name)) || is_under_way(view.part_of.as_ref());
        is_its && view.state == BackupState::Shipping
    });
    let waits = waits.map(|backup| backup.view.problem.clone());
    let is_stuck = |backup: &&BackupRecord| {
        let is_old = backup.view.taken_ms.is_some();
        is_old && matches!(backup.view.state, BackupState::Deleting | BackupState::Failed)
    };
    let stuck = own().filter(is_stuck).map(|backup| backup.view.problem.clone());
    let mut problems = waits.chain([record.view.problem.clone()]).chain(stuck);
    let problem = problems.find(|problem| !problem.is_empty()).unwrap_or_default();
    let kept = u64::try_from(kept).unwrap_or(u64::MAX);
    BackupSchedule { kept, problem, ..record.view }
}

/// One of them, without what its backups say.
///
/// # Errors
/// `NotFound`.
pub async fn get(cluster: &Cluster, name: &ScheduleName) -> Result<BackupSchedule, Problem> {
    let record: Option<ScheduleRecord> = cluster.records.read(&schedule_key(name)).await?;
    record.map(|record| record.view).ok_or_else(|| unknown(name))
}

/// Ends a schedule. Its backups stay, and one that is under way goes on.
///
/// # Errors
/// `NotFound`.
pub async fn remove(cluster: &Cluster, name: &ScheduleName) -> Result<(), Problem> {
    let _turn = TURN.lock().await;
    let key = schedule_key(name);
    get(cluster, name).await?;
    cluster.records.remove(&key).await
}

/// What is said of a schedule that there is not.
pub fn unknown(name: &ScheduleName) -> Problem {
    Problem::not_found(format!("schedule {name} of backups"), "there is none with this name")
        .next("`perigee backup schedules` shows them")
}

/// The volume is deleted: its schedules end, and its backups stay.
///
/// # Errors
/// If the store fails.
pub async fn end_of_volume(cluster: &Cluster, volume: &VolumeName) -> Result<(), Problem> {
    let _turn = TURN.lock().await;
    for found in records(cluster).await? {
        if found.view.volume.as_ref() != Some(volume) || !found.view.ended.is_empty() {
            continue;
        }
        let key = schedule_key(&found.view.name);
        let Some(mut record) = cluster.records.own::<ScheduleRecord>(&key).await? else { continue };
        record.value.end_without_its_thing();
        record.save().await?;
    }
    Ok(())
}
