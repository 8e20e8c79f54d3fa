//! Backups by schedule: when one begins, which ones are deleted, and what a target that fails does.

use perigee_model::backup::{Backup, BackupState, BackupTarget, NewBackup};
use perigee_model::backup_schedule::{BackupSchedule, Keep, NewBackupSchedule};
use perigee_model::{Problem, ProblemKind, ScheduleName, VolumeName};

use super::from_backup::with_a_vm;
use super::persistent_vms::web;
use super::{Lab, data_volume, wait_for};
use crate::clock::now_ms;
use crate::storage::backups::schedules::{self, ScheduleRecord, TURN, schedule_key};
use crate::storage::{backups, volumes};
use crate::vms;

pub const TO: &str = "/srv/backups";
const DAY_MS: u64 = 86_400_000;

pub fn ask(keep: &str) -> NewBackupSchedule {
    NewBackupSchedule {
        volume: Some(data_volume()),
        vm: None,
        image: None,
        to: BackupTarget { address: TO.to_owned(), endpoint: None },
        every_s: 3600,
        keep: keep.parse::<Keep>().expect("rules").0,
        encrypted: false,
    }
}

impl Lab {
    pub async fn schedule(&self) -> BackupSchedule {
        let mut all = schedules::list(&self.cluster).await.expect("schedules");
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    pub async fn backups(&self) -> Vec<Backup> {
        backups::list(&self.cluster).await.expect("backups")
    }

    /// The schedule's next backup is due at this time.
    pub async fn is_due(&self, at_ms: u64) {
        let _turn = TURN.lock().await;
        let key = schedule_key(&self.schedule().await.name);
        let owned = self.cluster.records.own::<ScheduleRecord>(&key).await.expect("the store");
        let mut record = owned.expect("the schedule");
        record.value.view.next_ms = Some(at_ms);
        record.save().await.expect("saved");
    }

    /// A backup of the schedule begins that is of this moment, and ends. Nothing waits to be deleted then.
    async fn backs_up_at(&self, taken_ms: u64) -> BackupSchedule {
        self.cloud.inside().backups.taken_ms = Some(taken_ms);
        self.is_due(1).await;
        let schedule = wait_for("the backup", async || {
            let schedule = self.schedule().await;
            let is_done = schedule.under_way.is_none() && schedule.next_ms > Some(1);
            is_done.then_some(schedule)
        });
        let schedule = schedule.await;
        wait_for("the deletions", async || {
            let all = self.backups().await;
            all.iter().all(|one| one.state != BackupState::Deleting).then_some(())
        })
        .await;
        schedule
    }

    /// The moments of the backups that the target has.
    async fn has(&self) -> Vec<u64> {
        let at = self.cloud.inside().backups.at.get(TO).cloned().unwrap_or_default();
        let all = self.backups().await;
        let there = all.iter().filter(|one| at.contains_key(&one.name));
        let mut taken: Vec<u64> = there.filter_map(|one| one.taken_ms).collect();
        assert_eq!(taken.len(), at.len(), "{all:?} {at:?}");
        taken.sort_unstable();
        taken
    }
}

#[tokio::test]
async fn a_schedule_whose_tenant_lacks_the_key_says_so() {
    let lab = Lab::up().await;
    schedules::set(&lab.cluster, ask("2d"), None).await.expect("a schedule");
    wait_for("the first backup", async || lab.schedule().await.last_success_ms.map(drop)).await;
    {
        let _turn = TURN.lock().await;
        let key = schedule_key(&lab.schedule().await.name);
        let owned = lab.cluster.records.own::<ScheduleRecord>(&key).await.expect("the store");
        let mut record = owned.expect("the schedule");
        record.value.view.encrypted = true;
        record.value.view.next_ms = Some(1);
        record.save().await.expect("saved");
    }
    wait_for("the reason", async || {
        lab.schedule().await.problem.contains("has no key").then_some(())
    })
    .await;
    assert_eq!(lab.backups().await.len(), 1, "none has begun");
}

#[tokio::test]
async fn a_schedule_keeps_what_it_is_told_and_a_target_that_fails_loses_nothing() {
    let lab = Lab::up().await;
    lab.cloud.inside().backups.taken_ms = Some(DAY_MS);
    schedules::set(&lab.cluster, ask("2d"), None).await.expect("a schedule");
    wait_for("the first backup", async || lab.schedule().await.last_success_ms.map(drop)).await;
    let first = lab.has().await;
    let day = |number: u64, hour: u64| (20_000 + number) * DAY_MS + hour * DAY_MS / 24;
    lab.backs_up_at(day(0, 1)).await;
    let second = lab.backs_up_at(day(0, 2)).await;
    assert_eq!(lab.has().await, [first[0], day(0, 2)], "the newest of each of two days");
    assert_eq!((second.kept, second.last_success_ms), (2, Some(day(0, 2))));

    let full = Problem::new(ProblemKind::NoSpace, "can't write /srv/backups", "it is full");
    lab.cloud.inside().backups.refuses = Some(full);
    let failed = lab.backs_up_at(day(1, 0)).await;
    assert!(failed.problem.contains("it is full"), "{failed:?}");
    assert!(failed.last_failure.is_some_and(|failure| failure.why.contains("it is full")));
    assert_eq!((failed.kept, failed.last_success_ms), (2, Some(day(0, 2))));
    assert_eq!(lab.has().await, [first[0], day(0, 2)], "nothing is deleted");

    lab.cloud.inside().backups.refuses = None;
    let again = lab.backs_up_at(day(1, 0)).await;
    assert!(again.problem.is_empty() && again.last_failure.is_some(), "{again:?}");
    assert_eq!(lab.has().await, [day(0, 2), day(1, 0)]);
    assert_eq!(lab.backups().await.len(), 2, "and the failed one is not listed any more");

    // The clock is set back: the last backup that was made is kept for all that.
    lab.backs_up_at(day(0, 3)).await;
    assert_eq!(lab.has().await, [day(0, 3), day(1, 0)]);
    lab.backs_up_at(day(0, 1)).await;
    assert_eq!(lab.has().await, [day(0, 1), day(0, 3), day(1, 0)]);
}

#[tokio::test]
async fn backups_of_a_clock_that_was_days_ahead_take_the_place_of_no_others() {
    let lab = Lab::up().await;
    let (old, ahead) = (20_000 * DAY_MS, now_ms() + 40 * DAY_MS);
    lab.cloud.inside().backups.taken_ms = Some(old);
    schedules::set(&lab.cluster, ask("2d"), None).await.expect("a schedule");
    wait_for("the first backup", async || lab.schedule().await.last_success_ms.map(drop)).await;
    for taken_ms in [ahead, ahead + DAY_MS, ahead + 2 * DAY_MS, old + DAY_MS, old + 2 * DAY_MS] {
        lab.backs_up_at(taken_ms).await;
    }
    let kept = [old + DAY_MS, old + 2 * DAY_MS, ahead, ahead + DAY_MS, ahead + 2 * DAY_MS];
    assert_eq!(lab.has().await, kept);
}

#[tokio::test]
async fn a_schedule_whose_clock_was_ahead_begins_its_next_backup_at_once() {
    let lab = Lab::up().await;
    let all = NewBackupSchedule { keep: Vec::new(), ..ask("2d") };
    schedules::set(&lab.cluster, all, None).await.expect("a schedule");
    wait_for("the first backup", async || lab.schedule().await.last_success_ms.map(drop)).await;
    lab.is_due(now_ms() + 40 * DAY_MS).await;
    wait_for("the second backup", async || {
        let is_planned = lab.schedule().await.next_ms < Some(now_ms() + DAY_MS);
        (is_planned && lab.backups().await.len() == 2).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_schedule_begins_no_second_backup_and_one_for_all_that_it_missed() {
    let mut lab = Lab::up().await;
    lab.cloud.inside().backups.hangs = true;
    let all = NewBackupSchedule { keep: Vec::new(), ..ask("2d") };
    schedules::set(&lab.cluster, all, None).await.expect("a schedule");
    wait_for("the first backup", async || lab.schedule().await.under_way.map(drop)).await;
    lab.is_due(1).await;
    let asked = lab.cloud.inside().backups.asked;
    lab.restart_controller().await;
    wait_for("it to be asked for again", async || {
        (lab.cloud.inside().backups.asked > asked).then_some(())
    })
    .await;
    assert_eq!(lab.backups().await.len(), 1);
    lab.cloud.inside().backups.hangs = false;
    let first = wait_for("it to be complete", async || {
        let schedule = lab.schedule().await;
        schedule.under_way.is_none().then_some(schedule)
    })
    .await;
    assert!(first.next_ms.is_some_and(|next_ms| next_ms > now_ms()), "{first:?}");
    assert_eq!(lab.backups().await.len(), 1);
    lab.is_due(now_ms() - 10 * 3_600_000).await;
    let second = wait_for("another one", async || {
        let schedule = lab.schedule().await;
        (schedule.last_success_ms > first.last_success_ms).then_some(schedule)
    })
    .await;
    assert!(second.next_ms.is_some_and(|next_ms| next_ms > now_ms()), "{second:?}");
    assert_eq!(lab.backups().await.len(), 2);
}

#[tokio::test]
async fn a_controller_that_is_killed_before_it_notes_a_backup_begins_no_second_one() {
    let mut lab = Lab::up().await;
    lab.cloud.inside().backups.hangs = true;
    let cut = lab.cluster.records.counts.cut_at("backup_schedules/", 2);
    schedules::set(&lab.cluster, ask("2d"), None).await.expect("a schedule");
    wait_for("the kill", async || cut.is_reached().then_some(())).await;
    lab.restart_controller().await;
    wait_for("the backup", async || lab.schedule().await.under_way.map(drop)).await;
    assert_eq!(lab.backups().await.len(), 1);
}

#[tokio::test]
async fn the_schedule_of_a_deleted_volume_ends_and_its_backups_stay() {
    let lab = Lab::up().await;
    schedules::set(&lab.cluster, ask("1d"), None).await.expect("a schedule");
    wait_for("the first backup", async || lab.schedule().await.last_success_ms.map(drop)).await;
    volumes::delete(&lab.cluster, &data_volume()).await.expect("deleted");
    let ended = lab.schedule().await;
    assert!(ended.ended.contains("was deleted") && ended.next_ms.is_none(), "{ended:?}");
    assert_eq!(lab.has().await.len(), 1);
    schedules::remove(&lab.cluster, &ended.name).await.expect("removed");
    let unknown = schedules::remove(&lab.cluster, &ended.name).await.expect_err("it is gone");
    assert_eq!(unknown.kind, ProblemKind::NotFound);
    assert_eq!(lab.has().await.len(), 1);
}

#[tokio::test]
async fn the_same_volume_and_target_changes_the_schedule_and_another_target_makes_one() {
    let lab = Lab::up().await;
    let first = schedules::set(&lab.cluster, ask("1d"), None).await.expect("a schedule");
    let again = NewBackupSchedule { every_s: 60, ..ask("4w") };
    let changed = schedules::set(&lab.cluster, again, None).await.expect("changed");
    assert_eq!((&changed.name, changed.made_ms, changed.every_s), (&first.name, first.made_ms, 60));
    let elsewhere = BackupTarget { address: "s3://bucket".to_owned(), endpoint: None };
    let other = NewBackupSchedule { to: elsewhere, ..ask("1d") };
    let other = schedules::set(&lab.cluster, other, None).await.expect("a schedule");
    assert_eq!(other.name, ScheduleName::new("tpch-2").expect("a name"));
    let none = VolumeName::new("none").expect("a name");
    let none = NewBackupSchedule { volume: Some(none), ..ask("1d") };
    let none = schedules::set(&lab.cluster, none, None).await.expect_err("there is no such volume");
    assert_eq!(none.kind, ProblemKind::NotFound);
}

impl Lab {
    /// Everything that hosts have at the target.
    pub fn at_target(&self) -> usize {
        let of = |inside: &super::fake::Inside| inside.backups.at.get(TO).map_or(0, |at| at.len());
        of(&self.home.inside()) + of(&self.cloud.inside())
    }
}

/// Any host reaches an S3 store.
#[tokio::test]
async fn a_backup_in_an_s3_store_is_deleted_by_another_host_if_its_own_is_away() {
    let lab = Lab::up().await;
    lab.home.inside().pool_free_bytes = Some(1 << 40);
    let to = BackupTarget { address: "s3://bucket".to_owned(), endpoint: None };
    let (vm, image, whole, encrypted) = Default::default();
    let new = NewBackup { volume: Some(data_volume()), vm, image, to, whole, encrypted };
    let begun = backups::create(&lab.cluster, new, None).await.expect("a backup");
    let done = lab.ended(&begun).await;
    assert_eq!((done.state, done.host.as_ref()), (BackupState::Completed, Some(&lab.cloud.id)));
    lab.cloud.inside().down = true;
    wait_for("the host to be away", async || {
        volumes::reachable(&lab.cluster, &lab.cloud.id).is_err().then_some(())
    })
    .await;
    backups::delete(&lab.cluster, &done.name, false).await.expect("it is deleted");
    wait_for("it to be gone", async || lab.backups().await.is_empty().then_some(())).await;
    assert_eq!(lab.home.inside().restores.deleted, [done.name]);
}

#[tokio::test]
async fn the_schedule_of_a_vm_backs_up_that_vm_and_no_later_one_of_its_name() {
    let lab = with_a_vm().await;
    let of_vm = NewBackupSchedule { volume: None, vm: Some(web()), ..ask("1d") };
    let made = schedules::set(&lab.cluster, of_vm, None).await.expect("a schedule");
    assert_eq!(made.name.as_str(), "web");
    wait_for("the first backup", async || lab.schedule().await.last_success_ms.map(drop)).await;
    assert_eq!(lab.backups().await.len(), 3, "the root disk, the volume and the variables");
    vms::persistent::delete(&lab.cluster, &web(), true).await.expect("deleted");
    wait_for("the VM to be gone", async || lab.cluster.index.of_vm(&web()).is_none().then_some(()))
        .await;
    lab.is_due(1).await;
    let ended = wait_for("the schedule to end", async || {
        let schedule = lab.schedule().await;
        (!schedule.ended.is_empty()).then_some(schedule)
    })
    .await;
    assert!(ended.ended.contains("VM web was deleted"), "{ended:?}");
    assert_eq!(lab.at_target(), 3);
}
