//! Volumes of backups that are used before their bytes have arrived. Where the others must not come meanwhile, the background fetches a byte a second.

use std::path::Path;

use perigee_model::backup::{RestoreVolume, RestoringLayer};
use perigee_model::volume::VolumeInfo;
use perigee_model::{BackupName, LayerId, LeaveSite, Problem, TenantName};
use uuid::Uuid;

use crate::backups::{back_up, check_pool, files, flip, target, three_pieces};
use crate::server::{FILL_RATE_VARIABLE, MIB, Server, assert_io, run, said, until};

pub async fn restoring(server: &Server) -> Vec<RestoringLayer> {
    server.control.get("/v1/backups/restoring").await.expect("a list")
}

/// Makes a volume `now` of the backup `first`.
async fn restore(server: &Server, from: &Path) -> Result<VolumeInfo, Problem> {
    let ask = RestoreVolume {
        backup: BackupName::new("first").expect("a name"),
        from: target(from),
        tenant: TenantName::default(),
        leave_site: LeaveSite::Allowed,
        at_once: Some(LayerId(Uuid::new_v4())),
        layer: None,
        owner: None,
        key: None,
        encrypted: false,
    };
    server.control.post_long("/v1/volumes/now/restore", &ask, |_| {}).await
}

pub const SLOWLY: [(&str, &str); 1] = [(FILL_RATE_VARIABLE, "1")];

/// As [`three_pieces`], with a backup.
async fn backed_up() -> (Server, tempfile::TempDir) {
    let (server, to) = three_pieces().await;
    back_up(&server, "first", to.path()).await;
    (server, to)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_byte_is_read_before_all_have_come_and_a_kill_loses_nothing() {
    let (server, to) = backed_up().await;
    let mut server = server.with_variables(&SLOWLY).await;
    restore(&server, to.path()).await.expect("a volume");
    assert_io(
        &server.qemu_io("now", &["read -P 1 0 16M", "read -P 3 32M 8M", "read -P 0 40M 24M"]),
    );
    let written = ["write -P 7 4k 64k", "write -P 8 16M 64k", "read -P 8 16M 64k", "flush"];
    assert_io(&server.qemu_io("now", &written));
    let left = restoring(&server).await;
    assert!(left.len() == 1 && left[0].missing_bytes > 15 * MIB, "{left:?}");
    server.kill();
    server.start_process().await;
    assert_io(
        &server.qemu_io("now", &["read -P 7 4k 64k", "read -P 3 32M 8M", "read -P 8 16M 64k"]),
    );
    assert_eq!(restoring(&server).await.len(), 1);
    let server = server.with_variables(&[]).await;
    until("all bytes", async || restoring(&server).await.is_empty()).await;
    std::fs::remove_dir_all(to.path().join("layers")).expect("the backup goes");
    assert_io(&server.qemu_io(
        "now",
        &[
            "read -P 1 0 4k",
            "read -P 7 4k 64k",
            "read -P 1 68k 16316k",
            "read -P 8 16M 64k",
            "read -P 2 16448k 16320k",
            "read -P 3 32M 8M",
            "read -P 0 40M 24M",
        ],
    ));
    check_pool(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_bytes_are_an_error_the_others_come_and_a_mended_backup_is_used() {
    let (mut server, to) = backed_up().await;
    let pieces = files(to.path(), "/00000001-");
    flip(&pieces[0], 5 * MIB);
    restore(&server, to.path()).await.expect("a volume");
    let refused = said(&server.qemu_io("now", &["read 20M 4k"]));
    assert!(refused.contains("read failed"), "{refused}");
    assert_io(&server.qemu_io("now", &["read -P 1 0 16M", "read -P 3 32M 8M"]));
    until("the others", async || restoring(&server).await[0].is_damaged).await;
    let left = restoring(&server).await;
    assert_eq!(left[0].missing_bytes, 16 * MIB, "{left:?}");
    assert!(left[0].problem.contains("not what was shipped"), "{left:?}");
    flip(&pieces[0], 5 * MIB);
    // A server that runs asks again after a while.
    server.kill();
    server.start_process().await;
    until("all bytes", async || restoring(&server).await.is_empty()).await;
    assert_io(&server.qemu_io("now", &["read -P 2 16M 16M"]));
    check_pool(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_deleted_while_it_comes_leaves_nothing() {
    let (server, to) = backed_up().await;
    let server = server.with_variables(&SLOWLY).await;
    restore(&server, to.path()).await.expect("a volume");
    assert_io(&server.qemu_io("now", &["read -P 1 0 1M", "write -P 9 0 1M"]));
    server.control.delete("/v1/volumes/now").await.expect("deleted");
    assert!(restoring(&server).await.is_empty());
    check_pool(&server).await;
}

/// The indexes of a version that did not write heads.
fn without_heads(target: &Path) {
    for index in files(target, "/index") {
        let text = std::fs::read_to_string(&index).expect("an index");
        let line = text.lines().next().expect("a line");
        let mut list: serde_json::Value = serde_json::from_str(line).expect("JSON");
        for piece in list["pieces"].as_array_mut().expect("pieces") {
            piece.as_object_mut().expect("a piece").remove("head").expect("it had one");
        }
        let file = index.with_extension("json");
        std::fs::write(&file, list.to_string()).expect("written");
        let sum = run(&["sha256sum", &file.display().to_string()]);
        let sum = sum.split(' ').next().expect("a checksum");
        std::fs::write(&index, format!("{list}\n{sum}\n")).expect("written");
        std::fs::remove_file(&file).expect("removed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_an_older_version_is_restored_whole() {
    let (server, to) = backed_up().await;
    without_heads(to.path());
    restore(&server, to.path()).await.expect("a volume");
    assert!(restoring(&server).await.is_empty());
    assert_io(
        &server.qemu_io("now", &["read -P 1 0 16M", "read -P 2 16M 16M", "read -P 3 32M 8M"]),
    );
    check_pool(&server).await;
}

/// An older version has shipped a layer again while a volume got its bytes: after a restart nothing more came.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_gets_its_bytes_though_the_backup_has_lost_what_says_where_they_are() {
    let (server, to) = backed_up().await;
    let mut server = server.with_variables(&SLOWLY).await;
    restore(&server, to.path()).await.expect("a volume");
    without_heads(to.path());
    server.kill();
    server.start_process().await;
    assert_io(
        &server.qemu_io("now", &["read -P 1 0 16M", "read -P 2 16M 16M", "read -P 3 32M 8M"]),
    );
    check_pool(&server).await;
}
