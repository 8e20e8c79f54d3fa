//! Backups that are encrypted at their target: nothing of them is there in clear, a wrong key is refused, and damage is named.

use std::path::Path;

use perigee_model::backup::{
    BackupTarget, DeleteBackup, FoundBackup, ListBackups, RestoreVolume, SendBackupKey, ShipBackup,
    ShippedBackup, VerifiedBackup, VerifyBackup,
};
use perigee_model::backup_key::BackupKey;
use perigee_model::volume::VolumeInfo;
use perigee_model::{BackupName, LayerId, LeaveSite, Problem, ProblemKind, TenantName};
use uuid::Uuid;

use crate::backups::{LISTS_BYTES, ask, check_pool, files, flip, target, three_pieces};
use crate::restoring::{SLOWLY, restoring};
use crate::server::{MIB, Server, assert_io, said, until};

fn key(byte: u8) -> Option<BackupKey> {
    Some(BackupKey::new([byte; BackupKey::BYTES]))
}

fn name(name: &str) -> BackupName {
    BackupName::new(name).expect("a name")
}

fn encrypted(name: &str, to: &Path) -> ShipBackup {
    ShipBackup { encrypted: true, key: key(1), ..ask(name, to) }
}

async fn ship(server: &Server, ask: &ShipBackup) -> Result<ShippedBackup, Problem> {
    server.control.post_long("/v1/volumes/data/backup", ask, |_| {}).await
}

async fn list(
    server: &Server,
    at: &BackupTarget,
    key: Option<BackupKey>,
) -> Result<Vec<FoundBackup>, Problem> {
    let encrypted = key.is_some();
    let ask = ListBackups { at: at.clone(), only: None, is_short: true, key, encrypted };
    server.control.post("/v1/backups/list", &ask).await
}

async fn verify(server: &Server, backup: &str, at: &Path) -> VerifiedBackup {
    let ask = VerifyBackup { backup: name(backup), at: target(at), key: key(1), encrypted: true };
    server.control.post_long("/v1/backups/verify", &ask, |_| {}).await.expect("it is read")
}

async fn restore(server: &Server, from: &Path, at_once: bool) -> Result<VolumeInfo, Problem> {
    let ask = RestoreVolume {
        backup: name("first"),
        from: target(from),
        tenant: TenantName::default(),
        leave_site: LeaveSite::Allowed,
        at_once: at_once.then(|| LayerId(Uuid::new_v4())),
        key: key(1),
        encrypted: true,
        layer: None,
        owner: None,
    };
    let path = if at_once { "/v1/volumes/now/restore" } else { "/v1/volumes/whole/restore" };
    server.control.post_long(path, &ask, |_| {}).await
}

/// As [`three_pieces`], with an encrypted backup.
async fn backed_up() -> (Server, tempfile::TempDir) {
    let (server, to) = three_pieces().await;
    ship(&server, &encrypted("first", to.path())).await.expect("a backup");
    (server, to)
}

const ALL: [&str; 4] =
    ["read -P 1 0 16M", "read -P 2 16M 16M", "read -P 3 32M 8M", "read -P 0 40M 24M"];

#[tokio::test(flavor = "multi_thread")]
async fn an_encrypted_backup_comes_back_with_its_key_only_and_nothing_is_there_in_clear() {
    let (server, to) = backed_up().await;
    for file in files(to.path(), "") {
        let mut bytes = std::fs::read(&file).expect("a file");
        bytes.truncate(64 << 10);
        for clear in [&[1; 64][..], &[2; 64], b"size_bytes", b"PERIGEEB", b"data_bytes"] {
            let is_there = bytes.windows(clear.len()).any(|window| window == clear);
            assert!(!is_there, "{} has {clear:?}", file.display());
        }
    }
    assert!(verify(&server, "first", to.path()).await.problems.is_empty());
    restore(&server, to.path(), false).await.expect("a volume");
    assert_io(&server.qemu_io("whole", &ALL));
    // The next one ships what has changed, and needs the key.
    assert_io(&server.qemu_io("data", &["write -P 4 0 1M", "flush"]));
    let again = ShipBackup { is_known: true, ..encrypted("second", to.path()) };
    let second = ship(&server, &again).await.expect("a backup");
    assert!((MIB..=MIB + LISTS_BYTES).contains(&second.shipped_bytes), "{second:?}");
    let at = target(to.path());
    assert_eq!(list(&server, &at, key(1)).await.expect("a list").len(), 2);
    for wrong in [None, key(2)] {
        let refused = list(&server, &at, wrong.clone()).await.expect_err("it is another key");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
        assert!(refused.why.contains("they are encrypted with key"), "{refused}");
        let plain = ShipBackup { encrypted: false, key: wrong, ..encrypted("third", to.path()) };
        let refused = ship(&server, &plain).await.expect_err("nothing is put there in clear");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    }
    let ask = DeleteBackup { backup: name("second"), at, counts: true, key: key(1) };
    let held: Option<u64> =
        server.control.post_long("/v1/backups/delete", &ask, |_| {}).await.expect("deleted");
    let on_disk: u64 =
        files(to.path(), "").iter().map(|file| file.metadata().expect("a file").len()).sum();
    assert_eq!(held, Some(on_disk));
    assert!(verify(&server, "first", to.path()).await.problems.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn encrypted_backups_are_not_put_beside_others() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    server.create("data", 16 * MIB).await;
    let without = ShipBackup { key: None, ..encrypted("first", to.path()) };
    let refused = ship(&server, &without).await.expect_err("there is no key");
    assert!(refused.why.contains("the tenant has no key"), "{refused}");
    ship(&server, &ShipBackup { key: key(1), ..ask("first", to.path()) }).await.expect("in clear");
    let refused = ship(&server, &encrypted("second", to.path())).await.expect_err("others are not");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    // Somebody has replaced what was encrypted.
    for at_once in [true, false] {
        let refused = restore(&server, to.path(), at_once).await.expect_err("it is another one");
        assert!(refused.why.contains("the backup was encrypted"), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_of_an_encrypted_backup_is_named_and_the_rest_comes() {
    let (server, to) = backed_up().await;
    let pieces = files(to.path(), "/00000001-");
    flip(&pieces[0], 5 * MIB);
    let problems = verify(&server, "first", to.path()).await.problems;
    let piece = pieces[0].file_name().expect("a name").to_string_lossy().into_owned();
    assert!(problems.len() == 1 && problems[0].contains(&piece), "{problems:?}");
    restore(&server, to.path(), true).await.expect("a volume");
    let refused = said(&server.qemu_io("now", &["read 20M 4k"]));
    assert!(refused.contains("read failed"), "{refused}");
    assert_io(&server.qemu_io("now", &["read -P 1 0 16M", "read -P 3 32M 8M"]));
    // A piece that takes the place of another one is refused too.
    flip(&pieces[0], 5 * MIB);
    std::fs::copy(&files(to.path(), "/00000000-")[0], &pieces[0]).expect("a copy");
    let problems = verify(&server, "first", to.path()).await.problems;
    assert!(problems.len() == 1 && problems[0].contains(&piece), "{problems:?}");
    // And so is a changed list.
    flip(&to.path().join("backups/first"), 60);
    let problems = verify(&server, "first", to.path()).await.problems;
    assert!(problems.len() == 1 && problems[0].contains("backups/first"), "{problems:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_killed_asks_for_the_key_before_it_reads_on() {
    let (server, to) = backed_up().await;
    let mut server = server.with_variables(&SLOWLY).await;
    restore(&server, to.path(), true).await.expect("a volume");
    assert_io(&server.qemu_io("now", &["read -P 1 0 16M"]));
    assert!(!restoring(&server).await[0].lacks_key);
    server.kill();
    server.start_process().await;
    until("it to ask", async || restoring(&server).await[0].lacks_key).await;
    let mut send = SendBackupKey { at: target(to.path()), key: key(2).expect("a key") };
    let wrong = server.control.post::<()>("/v1/backups/key", &send).await;
    assert_eq!(wrong.expect_err("it is another key").kind, ProblemKind::Conflict);
    send.key = key(1).expect("a key");
    server.control.post::<()>("/v1/backups/key", &send).await.expect("it is the key");
    assert!(!restoring(&server).await[0].lacks_key);
    assert_io(&server.qemu_io("now", &ALL));
    check_pool(&server).await;
}
