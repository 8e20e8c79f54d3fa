//! Backups of images: the layers that they share with volumes are shipped once, and an image comes back when all of it was read and was right.

use std::path::Path;

use perigee_model::backup::{FoundBackup, RestoreImage, ShipBackup, ShippedBackup};
use perigee_model::volume::{CreateVolume, ImageInfo, Snapshot, VolumeInfo, VolumeSource};
use perigee_model::{BackupName, ImageName, LayerId, LeaveSite, Problem, ProblemKind};
use uuid::Uuid;

use crate::backups::{LISTS_BYTES, Store, ask, check_pool, files, flip, target, three_pieces};
use crate::s3::KEY;
use crate::server::{MIB, Server, assert_io};

async fn ship(server: &Server, image: &str, ask: &ShipBackup) -> Result<ShippedBackup, Problem> {
    server.control.post_long(&format!("/v1/images/{image}/backup"), ask, |_| {}).await
}

/// Seals what the volume `data` has as an image.
async fn snapshot(server: &Server, image: &str) -> ImageInfo {
    let ask = Snapshot { image: ImageName::new(image).expect("a name") };
    server.control.post("/v1/volumes/data/snapshot", &ask).await.expect("an image")
}

fn restored(backup: &str, from: &Path) -> RestoreImage {
    RestoreImage {
        backup: BackupName::new(backup).expect("a name"),
        from: target(from),
        layer: LayerId(Uuid::new_v4()),
        key: None,
        encrypted: false,
    }
}

async fn restore(server: &Server, image: &str, ask: &RestoreImage) -> Result<ImageInfo, Problem> {
    server.control.post_long(&format!("/v1/images/{image}/restore"), ask, |_| {}).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_below_a_volume_that_was_backed_up_is_at_the_target_already() {
    let (server, to) = three_pieces().await;
    snapshot(&server, "golden").await;
    server.clone_image("clone", "golden").await;
    assert_io(&server.qemu_io("clone", &["write -P 7 0 1M", "flush"]));
    let path = "/v1/volumes/clone/backup";
    let of_clone: ShippedBackup =
        server.control.post_long(path, &ask("clone", to.path()), |_| {}).await.expect("a backup");
    assert!(of_clone.shipped_bytes > 40 * MIB, "{of_clone:?}");
    let shipped = ship(&server, "golden", &ask("golden", to.path())).await.expect("a backup");
    assert!(shipped.shipped_bytes < LISTS_BYTES, "{shipped:?}");
    assert_eq!((shipped.size_bytes, shipped.data_bytes), (64 * MIB, 40 * MIB));
    let none = ship(&server, "other", &ask("other", to.path())).await.expect_err("there is none");
    assert_eq!(none.kind, ProblemKind::NotFound, "{none}");
    check_pool(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_comes_back_once_under_a_free_name() {
    let ((server, to), other) = (three_pieces().await, Server::start().await);
    snapshot(&server, "base").await;
    assert_io(&server.qemu_io("data", &["write -P 4 0 1M", "flush"]));
    let sealed = snapshot(&server, "golden").await;
    assert!(sealed.chain.len() > 1, "{sealed:?}");
    ship(&server, "golden", &ask("golden", to.path())).await.expect("a backup");
    let found: Vec<FoundBackup> =
        other.control.post("/v1/backups/list", &target(to.path())).await.expect("a list");
    assert_eq!(found[0].image.as_ref().map(ImageName::as_str), Some("golden"), "{found:?}");
    let ask = restored("golden", to.path());
    let made = restore(&other, "again", &ask).await.expect("an image");
    assert_eq!((made.layer, made.size_bytes), (ask.layer, 64 * MIB));
    assert!(made.remote.is_none() && made.content.is_some(), "all of it is there: {made:?}");
    other.clone_image("clone", "again").await;
    let all = ["read -P 4 0 1M", "read -P 1 1M 15M", "read -P 2 16M 16M", "read -P 0 40M 24M"];
    assert_io(&other.qemu_io("clone", &all));
    // Its answer was lost, and the backup is away by now.
    std::fs::remove_dir_all(to.path().join("layers")).expect("removed");
    assert_eq!(restore(&other, "again", &ask).await.expect("it is there").layer, ask.layer);
    let taken = restore(&other, "again", &restored("golden", to.path())).await;
    assert_eq!(taken.expect_err("it is another one").kind, ProblemKind::Conflict);
    check_pool(&other).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_backup_makes_no_image() {
    let (server, to) = three_pieces().await;
    snapshot(&server, "golden").await;
    ship(&server, "golden", &ask("golden", to.path())).await.expect("a backup");
    flip(&files(to.path(), "/00000002-")[0], MIB);
    let refused = restore(&server, "again", &restored("golden", to.path())).await;
    assert_eq!(refused.expect_err("it is damaged").kind, ProblemKind::Conflict);
    let none = server.control.get::<ImageInfo>("/v1/images/again").await;
    assert_eq!(none.expect_err("there is none").kind, ProblemKind::NotFound);
    check_pool(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_may_not_leave_its_site_goes_to_directories_only_and_stays_confined() {
    let (store, to) = (Store::start().await, tempfile::tempdir().expect("a directory"));
    let variables = [("AWS_ACCESS_KEY_ID", KEY), ("AWS_SECRET_ACCESS_KEY", KEY)];
    let server = Server::start().await.with_variables(&variables).await;
    let new = CreateVolume::new("data".parse().expect("a name"), Some(MIB), VolumeSource::Empty);
    let new = CreateVolume { leave_site: LeaveSite::Never, ..new };
    let _: VolumeInfo = server.control.post("/v1/volumes", &new).await.expect("a volume");
    assert_io(&server.qemu_io("data", &["write -P 1 0 64k", "flush"]));
    snapshot(&server, "golden").await;
    let away = ShipBackup { to: store.target(), ..ask("golden", to.path()) };
    let refused = ship(&server, "golden", &away).await.expect_err("it would leave its site");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    ship(&server, "golden", &ask("golden", to.path())).await.expect("a backup");
    let made = restore(&server, "again", &restored("golden", to.path())).await.expect("an image");
    assert_eq!(made.leave_site, LeaveSite::Never);
}
