//! Volumes that are used while their bytes still come from a backup: what is shown, what is refused meanwhile, and what a kill of the controller leaves.

use perigee_model::backup::{Backup, BackupState, BackupTarget, RestoreBackup, Restoring};
use perigee_model::job::{ClusterVolume, NewVolume};
use perigee_model::replica::ReplicateVolume;
use perigee_model::volume::{Snapshot, VolumeSource};
use perigee_model::volume_move::VolumeMoveCause;
use perigee_model::{BackupName, ImageName, Problem, ProblemKind, SiteId, VolumeName};

use super::fake::restoring::TO_COME_BYTES;
use super::{Lab, wait_for};
use crate::storage::backups::{self, BackupRecord};
use crate::storage::{images, moves, replicas, volumes};

const RESTORES: &str = "restores/";

fn backup() -> BackupName {
    BackupName::new("data-1").expect("a name")
}

fn target() -> BackupTarget {
    BackupTarget { address: "/backups".to_owned(), endpoint: None }
}

fn now() -> VolumeName {
    VolumeName::new("now").expect("a name")
}

/// The controller knows a backup at `cloud1` in this state, and the host finds the backup.
async fn knows(lab: &Lab, state: BackupState) {
    lab.cloud.inside().restores.backup = Some(backup());
    let view = Backup {
        host: Some(lab.cloud.id.clone()),
        state,
        taken_ms: Some(1),
        ended_ms: Some(1),
        size_bytes: Some(1 << 30),
        data_bytes: Some(TO_COME_BYTES),
        ..backups::new_backup(backup(), super::data_volume(), target(), 1)
    };
    let record = BackupRecord { view, whole: false, asks: false, schedule_made_ms: None, vm: None };
    lab.cluster.records.put("backups/data-1", &record).await.expect("a record");
}

async fn restore(lab: &Lab) -> Result<ClusterVolume, Problem> {
    let ask = RestoreBackup { volume: now(), host: None, from: None, whole: false };
    backups::restore(&lab.cluster, &backup(), ask).await
}

async fn shown(lab: &Lab) -> Option<Restoring> {
    volumes::volume(&lab.cluster, &now()).await.expect("a volume").restoring
}

async fn records(lab: &Lab) -> usize {
    lab.cluster.records.keys(RESTORES).await.expect("keys").len()
}

fn refused<T: std::fmt::Debug>(asked: Result<T, Problem>) {
    let problem = asked.expect_err("it is refused");
    assert_eq!(problem.kind, ProblemKind::Conflict, "{problem}");
    assert!(problem.why.contains("still to come from"), "{problem}");
}

#[tokio::test]
async fn a_volume_shows_what_is_still_to_come_and_its_backup_is_not_deleted_before() {
    let mut lab = Lab::up().await;
    knows(&lab, BackupState::Completed).await;
    let made = restore(&lab).await.expect("a volume").restoring.expect("bytes are to come");
    assert_eq!((made.total_bytes, made.missing_bytes), (TO_COME_BYTES, TO_COME_BYTES));
    refused(backups::delete(&lab.cluster, &backup(), false).await);
    {
        let mut inside = lab.cloud.inside();
        inside.restores.layers[0].missing_bytes = 4096;
        inside.restores.layers[0].problem = "the target is away".to_owned();
    }
    wait_for("the figures", async || {
        let left = shown(&lab).await?;
        (left.missing_bytes == 4096 && left.problem == "the target is away").then_some(())
    })
    .await;
    let all = volumes::volumes(&lab.cluster).await.expect("a list");
    assert!(all.iter().any(|one| one.name == now() && one.restoring.is_some()), "{all:?}");
    lab.restart_controller().await;
    refused(backups::delete(&lab.cluster, &backup(), false).await);
    lab.cloud.inside().restores.layers.clear();
    wait_for("the end", async || shown(&lab).await.is_none().then_some(())).await;
    backups::delete(&lab.cluster, &backup(), false).await.expect("nobody needs it");
    wait_for("the deletion", async || {
        (!lab.cloud.inside().restores.deleted.is_empty()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_needs_all_bytes_is_refused_until_they_have_come() {
    let lab = Lab::up().await;
    knows(&lab, BackupState::Completed).await;
    restore(&lab).await.expect("a volume");
    let to = lab.home.id.clone();
    refused(moves::request(&lab.cluster, &now(), &to, VolumeMoveCause::Asked).await);
    let image = ImageName::new("image").expect("a name");
    refused(images::snapshot(&lab.cluster, &now(), &Snapshot { image }).await);
    let ask = ReplicateVolume { to: SiteId::new("home").expect("name"), every_s: 3600, keep: 1 };
    refused(replicas::replicate(&lab.cluster, &now(), &ask).await);
    let clone = NewVolume {
        name: VolumeName::new("clone").expect("a name"),
        host: None,
        size_bytes: None,
        source: VolumeSource::Volume(now()),
        leave_site: Default::default(),
    };
    refused(volumes::create(&lab.cluster, clone).await);
    // A volume that is deleted needs nothing any more.
    volumes::delete(&lab.cluster, &now()).await.expect("deleted");
    lab.cloud.inside().restores.layers.clear();
    wait_for("the end", async || (records(&lab).await == 0).then_some(())).await;
}

#[tokio::test]
async fn a_killed_controller_knows_each_volume_that_needs_a_backup() {
    for write in 1..=2 {
        let mut lab = Lab::up().await;
        knows(&lab, BackupState::Completed).await;
        let cut = lab.cluster.records.counts.cut_at(RESTORES, write);
        tokio::select! {
            made = restore(&lab) => panic!("there is no write {write}: {made:?}"),
            () = wait_for("the cut", async || cut.is_reached().then_some(())) => {}
        }
        lab.restart_controller().await;
        let is_made = !lab.cloud.inside().restores.layers.is_empty();
        assert_eq!((is_made, records(&lab).await), (write == 2, usize::from(write == 2)));
        if is_made {
            refused(backups::delete(&lab.cluster, &backup(), false).await);
            wait_for("the figures", async || (shown(&lab).await?.missing_bytes > 0).then_some(()))
                .await;
            lab.cloud.inside().restores.layers.clear();
            wait_for("the end", async || (records(&lab).await == 0).then_some(())).await;
        }
    }
}

#[tokio::test]
async fn a_backup_that_is_being_deleted_is_not_restored() {
    let lab = Lab::up().await;
    knows(&lab, BackupState::Deleting).await;
    let refused = restore(&lab).await.expect_err("it goes");
    assert!(refused.why.contains("being deleted"), "{refused}");
    let gone = volumes::volume(&lab.cluster, &now()).await.expect_err("no volume");
    assert_eq!((gone.kind, records(&lab).await), (ProblemKind::NotFound, 0), "{gone}");
}

#[tokio::test]
async fn a_deletion_waits_for_a_host_of_which_the_record_was_lost() {
    let lab = Lab::up().await;
    knows(&lab, BackupState::Completed).await;
    restore(&lab).await.expect("a volume");
    let layer = lab.cloud.inside().restores.layers[0].clone();
    lab.cloud.inside().restores.layers.clear();
    wait_for("the end", async || (records(&lab).await == 0).then_some(())).await;
    lab.cloud.inside().restores.layers.push(layer);
    backups::delete(&lab.cluster, &backup(), false).await.expect("it begins");
    wait_for("the reason", async || {
        let shown = backups::get(&lab.cluster, &backup()).await.ok()?;
        shown.problem.contains("still gets bytes").then_some(())
    })
    .await;
    assert!(lab.cloud.inside().restores.deleted.is_empty());
}

#[tokio::test]
async fn a_host_of_an_older_version_reads_all_bytes_first() {
    let lab = Lab::up().await;
    lab.cloud.inside().restores.is_older = true;
    knows(&lab, BackupState::Completed).await;
    let made = restore(&lab).await.expect("a volume");
    assert_eq!((made.restoring, records(&lab).await), (None, 0));
}
