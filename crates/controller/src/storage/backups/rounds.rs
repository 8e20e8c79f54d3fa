//! The endless task for schedules of backups: begins the backups that are due, hears how they end, and has those deleted that are not kept.
//!
//! A schedule has one backup under way at most: the backup's own driver ships it and tries again. What was due meanwhile, or while no controller ran, is one backup.
//! What is not kept is looked for only after a backup is complete, so a target that fails loses nothing.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::backup::{BackupOf, BackupState};
use perigee_model::backup_schedule::{BackupFailure, BackupSchedule, kept, next_after};
use perigee_model::{BackupName, HostId, Problem, ProblemKind};

use super::schedules::{SCHEDULES, ScheduleRecord, TURN, records, schedule_key};
use super::{
    BACKUPS_PREFIX, BackupRecord, Begin, backup_key, begin, delete, is_same_place, reading, room,
    vm,
};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::tasks::Task;
use crate::records::{ImageRecord, VolumeRecord, image_key, volume_key};
use crate::storage::moves::in_words;
use crate::storage::volumes;

/// A schedule whose backup has failed begins the next one after so long, if none is due before.
const AGAIN: Duration = Duration::from_secs(3600);
/// A deletion at a target waits until nobody ships to that. For so long the deletion is not even asked for, because nobody begins to ship while it waits.
const PRUNE_LATER_MAX: Duration = Duration::from_secs(6 * 3600);
/// So many backups that have failed stay listed while no later one is complete.
const FAILED_MAX: usize = 10;
/// A deletion that has failed is not tried again for so long. While it is tried, nobody begins to ship to the same target.
const DELETE_AGAIN: Duration = Duration::from_secs(24 * 3600);

/// The task.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut changes = cluster.records.watch(SCHEDULES);
    loop {
        task.round(look_at_all(&cluster)).await;
        tokio::select! {
            () = tokio::time::sleep(cluster.timing.monitor) => {}
            _ = changes.next() => {}
        }
    }
}

async fn look_at_all(cluster: &Arc<Cluster>) -> Result<String, Problem> {
    let (all, now_ms) = (records(cluster).await?, now_ms());
    let (mut known, mut trouble) = (Known { cluster, all: None }, Ok(()));
    for record in all.iter().filter(|record| needs_a_look(record, now_ms)) {
        let key = schedule_key(&record.view.name);
        // One schedule with trouble keeps no other one from its backups.
        trouble = trouble.and(look_at(&mut known, &key).await);
    }
    trouble.map(|()| format!("looked at {} schedules of backups", all.len()))
}

fn needs_a_look(record: &ScheduleRecord, now_ms: u64) -> bool {
    let is_due = due_ms(&record.view, now_ms).is_some();
    is_due || record.view.under_way.is_some() || record.prune_since_ms.is_some()
}

/// Since when a backup is due; `None`: none is. One that is more than an interval away is due now: the clock was ahead when that was written.
fn due_ms(view: &BackupSchedule, now_ms: u64) -> Option<u64> {
    let soon_ms = now_ms.saturating_add(view.every_s.saturating_mul(1000));
    let is_due = |due_ms: &u64| *due_ms <= now_ms || *due_ms > soon_ms;
    view.next_ms.filter(is_due).map(|due_ms| due_ms.min(now_ms))
}

/// The records of all backups, read at most once for a look at all schedules.
struct Known<'a> {
    cluster: &'a Arc<Cluster>,
    all: Option<Vec<BackupRecord>>,
}

impl Known<'_> {
    async fn all(&mut self) -> Result<&[BackupRecord], Problem> {
        if self.all.is_none() {
            self.all = Some(self.cluster.records.list(BACKUPS_PREFIX).await?);
        }
        Ok(self.all.as_deref().unwrap_or_default())
    }
}

async fn look_at(known: &mut Known<'_>, key: &str) -> Result<(), Problem> {
    let _turn = TURN.lock().await;
    // Nobody else has written what comes next after this moment.
    let now_ms = now_ms();
    let cluster = known.cluster;
    let Some(mut record) = cluster.records.own::<ScheduleRecord>(key).await? else { return Ok(()) };
    let before = record.value.clone();
    let mut look = Look { cluster, known, record: &mut record.value, now_ms };
    look.hear().await?;
    look.begin_due().await?;
    look.prune().await?;
    if record.value == before {
        return Ok(());
    }
    record.save().await
}

struct Look<'a, 'k> {
    cluster: &'a Arc<Cluster>,
    known: &'a mut Known<'k>,
    record: &'a mut ScheduleRecord,
    now_ms: u64,
}

impl Look<'_, '_> {
    /// The backups that this schedule has begun.
    async fn own(&mut self) -> Result<Vec<BackupRecord>, Problem> {
        let all = self.known.all().await?.iter();
        Ok(all.filter(|backup| self.record.has_begun(backup)).cloned().collect())
    }

    /// Hears whether the backup that is under way has ended.
    async fn hear(&mut self) -> Result<(), Problem> {
        let Some(name) = self.record.view.under_way.clone() else { return Ok(()) };
        let backup: Option<BackupRecord> = self.cluster.records.read(&backup_key(&name)).await?;
        match backup.map(|backup| backup.view) {
            Some(view) if view.state == BackupState::Shipping => return Ok(()),
            Some(view) if view.state == BackupState::Completed => {
                self.record.view.last_success_ms = view.taken_ms;
                self.record.view.problem.clear();
                self.record.newest = Some(name);
                self.record.prune_since_ms.get_or_insert(self.now_ms);
            }
            Some(view) if view.state == BackupState::Failed => self.failed(view.problem),
            // Somebody has deleted it since.
            _ => {}
        }
        self.record.view.under_way = None;
        if self.record.view.ended.is_empty() {
            self.skip_missed();
        } else {
            self.record.prune_since_ms = None;
        }
        Ok(())
    }

    /// What was due while a backup was under way is not made up for.
    fn skip_missed(&mut self) {
        let view = &mut self.record.view;
        if let Some(due_ms) = view.next_ms.filter(|due_ms| *due_ms <= self.now_ms) {
            view.next_ms = Some(next_after(due_ms, view.every_s, self.now_ms));
        }
    }

    fn failed(&mut self, why: String) {
        let view = &mut self.record.view;
        let again_ms = self.now_ms.saturating_add(millis(AGAIN));
        view.next_ms = view.next_ms.map(|next_ms| next_ms.min(again_ms));
        view.last_failure = Some(BackupFailure { at_ms: self.now_ms, why: why.clone() });
        view.problem = why;
    }

    /// Begins a backup if one is due and none is under way.
    async fn begin_due(&mut self) -> Result<(), Problem> {
        let view = &self.record.view;
        let due_ms = due_ms(view, self.now_ms);
        let (Some(due_ms), None) = (due_ms, &view.under_way) else { return Ok(()) };
        let Some(of) = self.of().await? else {
            self.record.end_without_its_thing();
            return Ok(());
        };
        self.record.view.next_ms = Some(next_after(due_ms, self.record.view.every_s, self.now_ms));
        let own = self.own().await?;
        // One that was begun by a controller that was killed before this record said so.
        let begun = own.iter().find(|backup| backup.view.state == BackupState::Shipping);
        if let Some(begun) = begun {
            self.record.view.under_way = Some(begun.view.name.clone());
            return Ok(());
        }
        self.forget_failed(&own).await?;
        if let Err(problem) = self.check_allowed(&of).await {
            self.failed(in_words(&problem));
            return Ok(());
        }
        let view = &self.record.view;
        let new = Begin {
            of,
            to: view.to.clone(),
            whole: false,
            encrypted: view.encrypted,
            schedule: Some((view.name.clone(), view.made_ms)),
            by: view.by.clone(),
        };
        match begin(self.cluster, new).await {
            Ok(backup) => self.record.view.under_way = Some(backup.name),
            // Another one of the volume has begun in this second, or one of the VM is shipped to the same target: a later look begins it.
            Err(problem) if problem.kind == ProblemKind::Conflict => {
                self.record.view.next_ms = Some(due_ms);
            }
            Err(problem) => self.failed(in_words(&problem)),
        }
        Ok(())
    }

    /// Refuses what no later look can begin before somebody changes something.
    ///
    /// # Errors
    /// As `begin`, for the target and the key.
    async fn check_allowed(&self, of: &BackupOf) -> Result<(), Problem> {
        let (view, what) = (&self.record.view, format!("can't back up {of}"));
        room::check_target(self.cluster, &what, view.by.as_ref(), &view.to).await?;
        match view.encrypted {
            true => room::check_encrypted(self.cluster, &what, of.name()).await,
            false => Ok(()),
        }
    }

    /// What is backed up, if it is still there.
    async fn of(&self) -> Result<Option<BackupOf>, Problem> {
        let view = &self.record.view;
        if let Some(vm) = &view.vm {
            let record = vm::find(self.cluster, vm).ok();
            let is_it = record.map(|record| record.job.submitted_ms) == self.record.vm_made_ms;
            return Ok(is_it.then(|| BackupOf::Vm(vm.clone())));
        }
        if let Some(image) = &view.image {
            // It never changes: another one of this name is what is to be backed up now.
            let record: Option<ImageRecord> = self.cluster.records.read(&image_key(image)).await?;
            return Ok(record.map(|record| BackupOf::Image(record.name)));
        }
        let Some(volume) = &view.volume else { return Ok(None) };
        let record: Option<VolumeRecord> = self.cluster.records.read(&volume_key(volume)).await?;
        Ok(record.map(|record| BackupOf::Volume(record.name)))
    }

    /// Of backups that were never complete, only the last ones stay listed. Of a volume's, nothing is asked of the target: it may be away.
    async fn forget_failed(&self, own: &[BackupRecord]) -> Result<(), Problem> {
        let mut failed: Vec<&BackupRecord> = own.iter().filter(|one| has_failed(one)).collect();
        failed.sort_by_key(|backup| std::cmp::Reverse(backup.view.begun_ms));
        for backup in failed.into_iter().skip(FAILED_MAX) {
            let name = &backup.view.name;
            // Of a VM, some disks may be at the target.
            if let Err(problem) = delete(self.cluster, name, backup.view.parts.is_empty()).await {
                tracing::warn!(%problem, "backup {name} stays listed");
            }
        }
        Ok(())
    }

    /// Has the backups deleted that are not kept: after a complete one, and as soon as nobody ships to the target.
    async fn prune(&mut self) -> Result<(), Problem> {
        let Some(since_ms) = self.record.prune_since_ms else { return Ok(()) };
        let own = self.own().await?;
        let mut not_kept = self.not_kept(&own);
        let all = self.known.all().await?;
        // What a host that is away has in a directory is deleted after a later backup.
        not_kept.retain(|backup| !is_away(self.cluster, all, backup));
        let is_shipped_to = |backup: &&BackupRecord| {
            all.iter().any(|one| one.asks && is_same_place(&one.view, &backup.view))
        };
        // A time that is still to come was written when the clock was ahead.
        let is_late = self
            .now_ms
            .checked_sub(since_ms)
            .is_none_or(|late_ms| late_ms >= millis(PRUNE_LATER_MAX));
        if not_kept.iter().any(is_shipped_to) && !is_late {
            return Ok(());
        }
        for backup in not_kept {
            let name = &backup.view.name;
            if let Err(problem) = delete(self.cluster, name, false).await {
                tracing::warn!(%problem, "backup {name} is deleted later");
            }
        }
        self.record.prune_since_ms = None;
        Ok(())
    }

    /// Those that are complete and not kept, those whose deletion has failed some time ago, and those that have failed before the newest complete one.
    fn not_kept<'b>(&self, own: &'b [BackupRecord]) -> Vec<&'b BackupRecord> {
        let complete = |backup: &&BackupRecord| backup.view.state == BackupState::Completed;
        let taken = own.iter().filter(complete).filter_map(|backup| backup.view.taken_ms);
        // Backups of a clock that was ahead take no place of others, and are kept until their time has come.
        let is_to_come = |taken_ms: u64| taken_ms > self.now_ms;
        let kept = kept(taken.filter(|at| !is_to_come(*at)), &self.record.view.keep);
        let newest: Option<&BackupName> = self.record.newest.as_ref();
        let newest_ms = own.iter().find(|one| Some(&one.view.name) == newest);
        let newest_ms = newest_ms.map_or(0, |newest| newest.view.begun_ms);
        let is_kept = |backup: &BackupRecord| match backup.view.state {
            BackupState::Shipping | BackupState::Deleting => true,
            BackupState::Completed => {
                backup.view.taken_ms.is_none_or(|at| is_to_come(at) || kept.contains(&at))
            }
            // What such a one has shipped is used by the next one.
            BackupState::Failed if has_failed(backup) => backup.view.begun_ms >= newest_ms,
            BackupState::Failed => has_just_ended(backup, self.now_ms),
        };
        let goes = |backup: &&BackupRecord| {
            let name = &backup.view.name;
            !is_kept(backup) && Some(name) != newest && !reading::is_read(name)
        };
        own.iter().filter(goes).collect()
    }
}

/// Whether it was given up before it was complete. One whose deletion has failed was complete.
fn has_failed(backup: &BackupRecord) -> bool {
    backup.view.state == BackupState::Failed && backup.view.taken_ms.is_none()
}

/// Whether its deletion has failed not long ago.
fn has_just_ended(backup: &BackupRecord, now_ms: u64) -> bool {
    let ago_ms = backup.view.ended_ms.and_then(|ended_ms| now_ms.checked_sub(ended_ms));
    ago_ms.is_some_and(|ago_ms| ago_ms < millis(DELETE_AGAIN))
}

/// Whether a host that is away has it, or one of its parts, in a directory.
fn is_away(cluster: &Cluster, all: &[BackupRecord], backup: &BackupRecord) -> bool {
    let view = &backup.view;
    let is_of_it =
        |one: &&BackupRecord| one.view.name == view.name || view.parts.contains(&one.view.name);
    let is_silent = |host: &HostId| {
        let reached = volumes::reachable(cluster, host);
        reached.is_err_and(|problem| problem.kind == ProblemKind::Unavailable)
    };
    let mut hosts = all.iter().filter(is_of_it).filter_map(|one| one.view.host.as_ref());
    !view.at.is_s3() && hosts.any(is_silent)
}

/// In milliseconds.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use perigee_model::backup::BackupTarget;

    use super::*;

    #[test]
    fn a_backup_is_due_if_the_clock_was_ahead_when_the_next_one_was_planned() {
        let at = |next_ms| BackupSchedule {
            name: "data".parse().expect("a name"),
            volume: None,
            vm: None,
            image: None,
            to: BackupTarget { address: "/srv".to_owned(), endpoint: None },
            every_s: 60,
            keep: Vec::new(),
            made_ms: 0,
            next_ms,
            under_way: None,
            last_success_ms: None,
            last_failure: None,
            kept: 0,
            ended: String::new(),
            problem: String::new(),
            by: None,
            encrypted: false,
        };
        let due = |next_ms| due_ms(&at(next_ms), 100_000);
        assert_eq!((due(None), due(Some(100_001)), due(Some(160_000))), (None, None, None));
        assert_eq!((due(Some(70_000)), due(Some(160_001))), (Some(70_000), Some(100_000)));
    }
}
