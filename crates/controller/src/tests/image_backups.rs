//! Backups of images: which host ships one, what a restore makes once, and when a schedule of one ends.

use perigee_model::backup::{Backup, BackupState, BackupTarget, NewBackup, RestoreImageBackup};
use perigee_model::backup_schedule::NewBackupSchedule;
use perigee_model::job::ClusterImage;
use perigee_model::{ImageName, Problem, ProblemKind};

use super::backup_schedules::{TO, ask};
use super::{Lab, wait_for};
use crate::records::{ImageRecord, image_key};
use crate::storage::backups::schedules;
use crate::storage::{backups, images, volumes};

fn name(text: &str) -> ImageName {
    ImageName::new(text).expect("a name")
}

fn of_debian(to: &str) -> NewBackup {
    let to = BackupTarget { address: to.to_owned(), endpoint: None };
    let (volume, vm, whole, encrypted) = Default::default();
    NewBackup { volume, vm, image: Some(name("debian")), to, whole, encrypted }
}

impl Lab {
    /// No two backups of one name begin in one second.
    async fn begins(&self, to: &str) -> Backup {
        wait_for("the backup to begin", async || {
            backups::create(&self.cluster, of_debian(to), None).await.ok()
        })
        .await
    }

    async fn backs_up(&self, to: &str) -> Backup {
        self.ended(&self.begins(to).await).await
    }

    async fn restores(&self, backup: &Backup, image: &str) -> Result<ClusterImage, Problem> {
        let ask = RestoreImageBackup { image: name(image), host: None, from: None };
        backups::restore_image(&self.cluster, &backup.name, ask).await
    }
}

#[tokio::test]
async fn an_image_is_made_of_its_backup_under_a_free_name_and_overwrites_none() {
    let lab = Lab::up().await;
    let done = lab.backs_up(TO).await;
    assert_eq!((done.state, done.image.clone()), (BackupState::Completed, Some(name("debian"))));
    let taken = lab.restores(&done, "debian").await.expect_err("it is there");
    assert_eq!(taken.kind, ProblemKind::Conflict, "{taken}");
    let made = lab.restores(&done, "again").await.expect("an image");
    assert_eq!(made.hosts.len(), 2, "the other host has a copy: {made:?}");
    let before = images::layer_of(&lab.cluster, &name("debian")).await.expect("its layer");
    assert_ne!(images::layer_of(&lab.cluster, &name("again")).await.expect("its layer"), before);
    images::delete(&lab.cluster, &name("debian")).await.expect("deleted");
    lab.restores(&done, "debian").await.expect("its old name is free");
}

#[tokio::test]
async fn a_directory_is_one_of_the_host_that_has_made_the_image_and_any_host_ships_to_a_store() {
    let lab = Lab::up().await;
    images::layer_of(&lab.cluster, &name("debian")).await.expect("its layer is known");
    let made_at = Some(lab.home.id.clone());
    let change = |old: Option<ImageRecord>| ImageRecord {
        made_at: made_at.clone(),
        ..old.expect("a record")
    };
    lab.cluster.records.update(&image_key(&name("debian")), change).await.expect("changed");
    let done = lab.backs_up(TO).await;
    assert_eq!((done.state, done.host.as_ref()), (BackupState::Completed, Some(&lab.home.id)));
    lab.home.inside().down = true;
    wait_for("the host to be away", async || {
        volumes::reachable(&lab.cluster, &lab.home.id).is_err().then_some(())
    })
    .await;
    let elsewhere = lab.begins("/srv/other").await;
    wait_for("what it waits for", async || {
        let known = backups::get(&lab.cluster, &elsewhere.name).await.expect("the backup");
        known.problem.contains("host home1 does not answer").then_some(())
    })
    .await;
    let stored = lab.backs_up("s3://bucket").await;
    assert_eq!((stored.state, stored.host.as_ref()), (BackupState::Completed, Some(&lab.cloud.id)));
}

#[tokio::test]
async fn a_restore_of_an_image_goes_on_after_the_controller_was_killed() {
    let mut lab = Lab::up().await;
    let done = lab.backs_up(TO).await;
    for host in [&lab.home, &lab.cloud] {
        host.inside().restores.hangs = true;
    }
    let (cluster, backup) = (lab.cluster.clone(), done.name.clone());
    let restoring = tokio::spawn(async move {
        let ask = RestoreImageBackup { image: name("again"), host: None, from: None };
        backups::restore_image(&cluster, &backup, ask).await
    });
    let key = image_key(&name("again"));
    let record =
        async |lab: &Lab| lab.cluster.records.read::<ImageRecord>(&key).await.expect("the store");
    let begun = wait_for("its record", async || record(&lab).await).await;
    restoring.abort();
    lab.restart_controller().await;
    let kept = backups::delete(&lab.cluster, &done.name, false).await.expect_err("it is read");
    assert_eq!(kept.kind, ProblemKind::Conflict, "{kept}");
    for host in [&lab.home, &lab.cloud] {
        host.inside().restores.hangs = false;
    }
    let made =
        wait_for("the image", async || record(&lab).await.filter(|record| record.import.is_none()))
            .await;
    assert_eq!((made.layer, made.size_bytes), (begun.layer, Some(1 << 30)));
}

#[tokio::test]
async fn no_image_is_made_of_a_backup_that_is_being_deleted() {
    let lab = Lab::up().await;
    let done = lab.backs_up(TO).await;
    let shipper =
        [&lab.home, &lab.cloud].into_iter().find(|one| done.host.as_ref() == Some(&one.id));
    let shipper = shipper.expect("its host");
    shipper.inside().backups.hangs = true;
    let next = lab.begins(TO).await;
    wait_for("the next one to be shipped", async || {
        let known = backups::get(&lab.cluster, &next.name).await.expect("the backup");
        known.host.map(drop)
    })
    .await;
    backups::delete(&lab.cluster, &done.name, false).await.expect("it waits for the next one");
    let refused = lab.restores(&done, "again").await.expect_err("its bytes are about to go");
    assert!(refused.why.contains("is being deleted"), "{refused}");
    shipper.inside().backups.hangs = false;
    assert_eq!(lab.ended(&next).await.state, BackupState::Completed);
}

#[tokio::test]
async fn no_second_host_ships_to_a_store_while_the_first_one_may_still_ship() {
    let mut lab = Lab::up().await;
    lab.home.inside().backups.hangs = true;
    lab.cloud.inside().backups.hangs = true;
    let begun = lab.begins("s3://bucket").await;
    let first = wait_for("its host", async || {
        backups::get(&lab.cluster, &begun.name).await.expect("the backup").host
    })
    .await;
    let (shipper, other) = match first == lab.home.id {
        true => (&lab.home, &lab.cloud),
        false => (&lab.cloud, &lab.home),
    };
    // The answer is lost with the controller, and then the host is away.
    shipper.inside().down = true;
    let silent = format!("host {first} does not answer");
    other.inside().backups.hangs = false;
    lab.restart_controller().await;
    let waits = wait_for("what it waits for", async || {
        let known = backups::get(&lab.cluster, &begun.name).await.expect("the backup");
        known.problem.contains(&silent).then_some(known)
    })
    .await;
    assert_eq!((waits.state, waits.host), (BackupState::Shipping, Some(first)));
    let inside = [lab.home.inside().backups.asked, lab.cloud.inside().backups.asked];
    assert!(inside.contains(&0), "one host was asked only: {inside:?}");
}

#[tokio::test]
async fn the_schedule_of_an_image_backs_up_what_has_its_name_and_ends_without_it() {
    let lab = Lab::up().await;
    let of_image = NewBackupSchedule { volume: None, image: Some(name("debian")), ..ask("1d") };
    let made = schedules::set(&lab.cluster, of_image, None).await.expect("a schedule");
    assert_eq!((made.name.as_str(), &*made.of_in_words()), ("debian", "image debian"));
    wait_for("the first backup", async || lab.schedule().await.last_success_ms.map(drop)).await;
    images::delete(&lab.cluster, &name("debian")).await.expect("deleted");
    lab.is_due(1).await;
    let ended = wait_for("the schedule to end", async || {
        let schedule = lab.schedule().await;
        (!schedule.ended.is_empty()).then_some(schedule)
    })
    .await;
    assert!(ended.ended.contains("image debian was deleted"), "{ended:?}");
    assert_eq!(lab.at_target(), 1, "its backups stay");
}
