//! Backups of volumes: what is shipped, what comes back, and targets that are full, damaged or away.

use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use perigee_model::backup::{
    BackupRoom, BackupTarget, DeleteBackup, FoundBackup, RestoreVolume, SealForBackup,
    SealedForBackup, ShipBackup, ShippedBackup, VerifiedBackup, VerifyBackup,
};
use perigee_model::volume::{
    CheckReport, CheckScope, Compacted, CreateVolume, Resize, VolumeInfo, VolumeSource,
};
use perigee_model::{BackupName, LayerId, LeaveSite, Problem, ProblemKind, TenantName, VolumeName};
use uuid::Uuid;

use crate::restoring::restoring;
use crate::s3::{KEY, S3};
use crate::server::{MIB, Server, assert_io, run, sample, until};
use crate::small::Small;

/// What a backup ships beside the data: the lists, and the heads of pieces.
pub const LISTS_BYTES: u64 = 64 << 10;

pub fn target(dir: &Path) -> BackupTarget {
    BackupTarget { address: dir.display().to_string(), endpoint: None }
}

pub fn ask(name: &str, to: &Path) -> ShipBackup {
    let name = BackupName::new(name).expect("a name");
    let to = target(to);
    let (is_known, whole, sealed, vm, room, encrypted, key) = Default::default();
    ShipBackup { name, to, now_ms: 1000, is_known, whole, sealed, vm, room, encrypted, key }
}

async fn ship(server: &Server, ask: &ShipBackup) -> Result<ShippedBackup, Problem> {
    server.control.post_long("/v1/volumes/data/backup", ask, |_| {}).await
}

pub async fn back_up(server: &Server, name: &str, to: &Path) -> ShippedBackup {
    ship(server, &ask(name, to)).await.expect("a backup")
}

/// A server with a volume `data` that a backup has in three pieces, 16 MiB of 1, 16 MiB of 2 and 8 MiB of 3, and a directory for its backups.
pub async fn three_pieces() -> (Server, tempfile::TempDir) {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    server.create("data", 64 * MIB).await;
    let written = ["write -P 1 0 16M", "write -P 2 16M 16M", "write -P 3 32M 8M", "flush"];
    assert_io(&server.qemu_io("data", &written));
    (server, to)
}

async fn restore(server: &Server, backup: &str, from: &Path) -> Result<VolumeInfo, Problem> {
    let ask = RestoreVolume {
        backup: BackupName::new(backup).expect("a name"),
        from: target(from),
        tenant: TenantName::default(),
        leave_site: LeaveSite::Allowed,
        at_once: None,
        layer: Some(LayerId(Uuid::new_v4())),
        owner: Some("web-1".parse().expect("a name")),
        key: None,
        encrypted: false,
    };
    let path = format!("/v1/volumes/{backup}/restore");
    let made: VolumeInfo = server.control.post_long(&path, &ask, |_| {}).await?;
    let is_it = ask.layer.is_some_and(|layer| made.chain.contains(&layer));
    assert!(is_it && made.owner == ask.owner, "{made:?}");
    Ok(made)
}

async fn damage(server: &Server, backup: &str, at: &Path) -> Vec<String> {
    let backup = BackupName::new(backup).expect("a name");
    let ask = VerifyBackup { backup, at: target(at), key: None, encrypted: false };
    let read: VerifiedBackup =
        server.control.post_long("/v1/backups/verify", &ask, |_| {}).await.expect("it is read");
    read.problems
}

async fn found(server: &Server, at: &Path) -> Vec<FoundBackup> {
    server.control.post("/v1/backups/list", &target(at)).await.expect("a list")
}

pub async fn check_pool(server: &Server) {
    let report: CheckReport =
        server.control.post_long("/v1/check", &CheckScope::Pool, |_| {}).await.expect("a report");
    assert!(report.faults.is_empty() && report.leftovers.is_empty(), "{report:?}");
}

async fn compact(server: &Server) {
    let path = "/v1/volumes/data/compact";
    let _: Compacted = server.control.post_long(path, &(), |_| {}).await.expect("merged");
}

/// All files below a directory whose names have this in them.
pub fn files(dir: &Path, with: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(dir) else { return found };
    for entry in entries {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => found.extend(files(&path, with)),
            false if path.display().to_string().contains(with) => found.push(path),
            false => {}
        }
    }
    found.sort();
    found
}

pub fn flip(file: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(file).expect("a file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 4], at).expect("written");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_backup_ships_what_changed_and_each_one_restores_what_was_there_then() {
    let (mut one, two) = (Server::start().await, Server::start().await);
    let to = tempfile::tempdir().expect("a directory");
    one.create("data", 64 * MIB).await;
    assert_io(&one.qemu_io("data", &["write -P 1 0 20M", "flush"]));
    let first = back_up(&one, "first", to.path()).await;
    assert_eq!((first.size_bytes, first.data_bytes), (64 * MIB, 20 * MIB));
    assert!(first.shipped_bytes <= 20 * MIB + LISTS_BYTES, "{first:?}");
    assert_io(&one.qemu_io("data", &["write -P 2 4M 1M", "discard 8M 1M", "flush"]));
    // Merged layers are not shipped again, nor after a kill.
    compact(&one).await;
    one.kill();
    one.start_process().await;
    let second = back_up(&one, "second", to.path()).await;
    assert!((MIB..=MIB + LISTS_BYTES).contains(&second.shipped_bytes), "{second:?}");
    compact(&one).await;
    let same = back_up(&one, "same", to.path()).await;
    assert!(same.shipped_bytes <= LISTS_BYTES, "nothing has changed: {same:?}");

    let names: Vec<String> =
        found(&two, to.path()).await.iter().map(|one| one.name.to_string()).collect();
    assert_eq!(names, ["first", "same", "second"]);
    for (backup, check) in [
        ("first", &["read -P 1 0 20M", "read -P 0 20M 44M"][..]),
        ("second", &["read -P 1 0 4M", "read -P 2 4M 1M", "read -P 0 8M 1M", "read -P 1 9M 11M"]),
    ] {
        assert!(damage(&two, backup, to.path()).await.is_empty());
        let restored = restore(&two, backup, to.path()).await.expect("restored");
        assert_eq!(restored.size_bytes, 64 * MIB);
        assert_io(&two.qemu_io(backup, check));
    }
    let taken = restore(&two, "first", to.path()).await.expect_err("it is there");
    assert_eq!(taken.kind, ProblemKind::Conflict, "{taken}");
    // A volume that was restored has a layer of its own, which is shipped whole.
    assert_io(&two.qemu_io("second", &["write -P 7 0 64k", "flush"]));
    let path = "/v1/volumes/second/backup";
    let ask = ask("third", to.path());
    let third: ShippedBackup = two.control.post_long(path, &ask, |_| {}).await.expect("a backup");
    assert!((18 * MIB..=21 * MIB).contains(&third.shipped_bytes), "{third:?}");
    restore(&one, "third", to.path()).await.expect("restored");
    assert_io(&one.qemu_io("third", &["read -P 7 0 64k", "read -P 2 4M 1M", "read -P 1 9M 11M"]));
    for server in [&one, &two] {
        check_pool(server).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_was_shrunk_and_grown_comes_back_as_it_was() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    server.create("data", 16 * MIB).await;
    let resize = async |size_bytes| {
        let ask = Resize { size_bytes, shrink: true };
        let _: VolumeInfo =
            server.control.post("/v1/volumes/data/resize", &ask).await.expect("its size");
    };
    assert_io(&server.qemu_io("data", &["write -P 1 0 16M", "flush"]));
    back_up(&server, "large", to.path()).await;
    resize(8 * MIB).await;
    resize(12 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 2 11M 1M", "flush"]));
    back_up(&server, "small", to.path()).await;
    let restored = restore(&server, "small", to.path()).await.expect("restored");
    assert_eq!(restored.size_bytes, 12 * MIB);
    assert_io(&server.qemu_io("small", &["read -P 1 0 8M", "read -P 0 8M 3M", "read -P 2 11M 1M"]));
    check_pool(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backup_of_a_large_volume_ships_little_more_than_what_changed() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    let size_bytes: u64 = 50 << 30;
    server.create("data", size_bytes).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 8M", "write -P 1 49G 8M", "flush"]));
    let first = back_up(&server, "first", to.path()).await;
    assert!(first.shipped_bytes <= 16 * MIB + LISTS_BYTES, "{first:?}");
    // 20 MiB in 80 places.
    let apart = size_bytes / 80 / MIB * MIB;
    let writes = (0..80).map(|place| format!("write -P 2 {} 256k", place * apart));
    let commands: Vec<String> = writes.chain(["flush".to_owned()]).collect();
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    assert_io(&server.qemu_io("data", &commands));
    let second = back_up(&server, "second", to.path()).await;
    eprintln!(
        "20 MiB of a volume of 50 GiB have changed: {:.2} MiB are shipped",
        second.shipped_bytes as f64 / MIB as f64
    );
    assert!((20 * MIB..=21 * MIB).contains(&second.shipped_bytes), "{second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disks_of_a_vm_are_backed_up_as_they_were_at_one_moment() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    let names = ["one", "two"].map(|name| VolumeName::new(name).expect("a name"));
    for name in &names {
        server.create(name.as_str(), MIB).await;
    }
    // In each round the second disk follows the first.
    let (control, stop) = (server.control.clone(), Arc::new(AtomicBool::new(false)));
    let (written, stopped) = (names.clone(), Arc::clone(&stop));
    let writing = tokio::spawn(async move {
        for round in 1_u64.. {
            for name in &written {
                let path = format!("/v1/volumes/{name}/data");
                let mut bytes = vec![0; 4096];
                bytes[..8].copy_from_slice(&round.to_le_bytes());
                control
                    .send_body::<()>(perigee_http::Method::PUT, &path, bytes)
                    .await
                    .expect("written");
            }
            if stopped.load(Ordering::SeqCst) {
                return;
            }
        }
    });
    for round in 0..5 {
        let volumes = names.to_vec();
        let seal = SealForBackup { volumes, to: target(to.path()), now_ms: 7 };
        let sealed: Vec<SealedForBackup> =
            server.control.post("/v1/backups/seal", &seal).await.expect("sealed");
        let mut had = Vec::new();
        for (name, sealed) in names.iter().zip(sealed) {
            let backup = format!("{name}-{round}");
            let asked = ShipBackup { sealed: Some(sealed), ..ask(&backup, to.path()) };
            let path = format!("/v1/volumes/{name}/backup");
            let shipped: ShippedBackup =
                server.control.post_long(&path, &asked, |_| {}).await.expect("a backup");
            assert_eq!((shipped.taken_ms, shipped.size_bytes), (7, MIB));
            restore(&server, &backup, to.path()).await.expect("restored");
            let path = format!("/v1/volumes/{backup}/data?length_bytes=8");
            let bytes = server.control.get_bytes(&path).await.expect("its bytes");
            had.push(u64::from_le_bytes(bytes[..].try_into().expect("eight bytes")));
        }
        assert!(had[0] == had[1] || had[0] == had[1] + 1, "{had:?}");
    }
    stop.store(true, Ordering::SeqCst);
    writing.await.expect("no panic");
    let twice = SealForBackup {
        volumes: vec![names[0].clone(), names[0].clone()],
        to: target(to.path()),
        now_ms: 7,
    };
    let twice = server.control.post::<Vec<SealedForBackup>>("/v1/backups/seal", &twice).await;
    assert_eq!(twice.expect_err("it would wait for itself").kind, ProblemKind::Invalid);
    check_pool(&server).await;
}

/// Numbers that look random, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// One round of writes to the volume, and to a model of it.
fn write(server: &Server, numbers: &mut Numbers, model: &mut [u8]) {
    let mut commands = Vec::new();
    for _ in 0..1 + numbers.below(5) {
        // Half of the writes begin and end within blocks.
        let unit = if numbers.below(2) == 0 { 4096 } else { 512 };
        let length = unit * (1 + numbers.below(64));
        let at = unit * numbers.below((model.len() as u64 - length) / unit);
        let pattern = u8::try_from(1 + numbers.below(255)).expect("a byte");
        let range =
            usize::try_from(at).expect("small")..usize::try_from(at + length).expect("small");
        if numbers.below(4) == 0 {
            commands.push(format!("write -z {at} {length}"));
            model[range].fill(0);
        } else {
            commands.push(format!("write -P {pattern} {at} {length}"));
            model[range].fill(pattern);
        }
    }
    commands.push("flush".to_owned());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    assert_io(&server.qemu_io("data", &commands));
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_volumes_are_what_a_model_says_after_any_writes_merges_and_kills() {
    for seed in [1, 2] {
        let (mut home, other) = (Server::start().await, Server::start().await);
        let [first, second] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        home.create("data", 4 * MIB).await;
        let (mut numbers, mut model) = (Numbers(seed), vec![0; 4 << 20]);
        let mut taken: Vec<(String, &Path, Vec<u8>)> = Vec::new();
        for round in 0..12 {
            write(&home, &mut numbers, &mut model);
            match numbers.below(4) {
                0 => compact(&home).await,
                1 => {
                    home.kill();
                    home.start_process().await;
                }
                _ => {}
            }
            let to = if numbers.below(3) == 0 { second.path() } else { first.path() };
            let name = format!("b{seed}-{round}");
            back_up(&home, &name, to).await;
            taken.push((name, to, model.clone()));
        }
        for (name, to, wanted) in taken {
            restore(&other, &name, to).await.expect("restored");
            let path = format!("/v1/volumes/{name}/data?length_bytes={}", wanted.len());
            let bytes = other.control.get_bytes(&path).await.expect("its bytes");
            let differs = bytes.iter().zip(&wanted).position(|(is, wanted)| is != wanted);
            assert_eq!((bytes.len(), differs), (wanted.len(), None), "{name} of seed {seed}");
        }
        check_pool(&other).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_that_a_kill_has_cut_off_is_none_and_the_next_one_goes_on() {
    let mut server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    let size_bytes = 96 * MIB;
    server.create("data", size_bytes).await;
    let file = to.path().with_extension("raw");
    std::fs::write(&file, sample(size_bytes)).expect("a file");
    let raw = file.display().to_string();
    run(&["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &raw, &server.uri("data")]);
    let asked = ask("cut", to.path());
    let control = server.control.clone();
    let shipping = tokio::spawn(async move {
        control.post_long::<ShippedBackup>("/v1/volumes/data/backup", &asked, |_| {}).await
    });
    until("a piece", async || !files(to.path(), "0000000").is_empty()).await;
    server.kill();
    let shipped = shipping.await.expect("no panic");
    server.start_process().await;
    // Wherever the kill came: a backup that is listed is whole.
    assert!(shipped.is_err() || found(&server, to.path()).await.len() == 1);
    for listed in found(&server, to.path()).await {
        assert!(damage(&server, listed.name.as_str(), to.path()).await.is_empty(), "{listed:?}");
    }
    let there: u64 = files(to.path(), "/layers/")
        .iter()
        .map(|file| std::fs::metadata(file).expect("it").len())
        .sum();
    let next = back_up(&server, "next", to.path()).await;
    assert!(next.shipped_bytes + there <= next.data_bytes + LISTS_BYTES * 4, "{next:?} {there}");
    restore(&server, "next", to.path()).await.expect("restored");
    run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &raw, &server.uri("next")]);
    std::fs::remove_file(&file).expect("removed");
    check_pool(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_target_is_told_and_earlier_backups_stay() {
    let Some(small) = Small::mount() else {
        return eprintln!("skipped: only root can mount a small filesystem");
    };
    let server = Server::start().await;
    server.create("data", 64 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 2M", "flush"]));
    back_up(&server, "first", &small.path).await;
    small.fill(14);
    assert_io(&server.qemu_io("data", &["write -P 2 8M 10M", "flush"]));
    let full = ship(&server, &ask("second", &small.path)).await.expect_err("it is full");
    assert_eq!(full.kind, ProblemKind::NoSpace, "{full}");
    assert!(full.what.contains("small") && full.next.contains("free space there"), "{full}");
    assert_eq!(found(&server, &small.path).await.len(), 1, "no half backup");
    assert!(damage(&server, "first", &small.path).await.is_empty());
    small.make_room();
    back_up(&server, "second", &small.path).await;
    restore(&server, "second", &small.path).await.expect("restored");
    assert_io(&server.qemu_io("second", &["read -P 1 0 2M", "read -P 2 8M 10M"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_at_the_target_is_named_and_a_whole_backup_mends_it() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    server.create("data", 64 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 2M", "flush"]));
    back_up(&server, "first", to.path()).await;
    let piece = files(to.path(), "00000000-").pop().expect("a piece");
    let index = files(to.path(), "index").pop().expect("an index");
    let manifest = files(to.path(), "backups/first").pop().expect("a manifest");
    let mode = std::fs::metadata(&piece).expect("it").permissions().mode();
    assert_eq!(mode & 0o077, 0, "nobody else may read it");
    for (file, at) in [(&piece, 1 << 20), (&piece, 9), (&index, 30), (&manifest, 40)] {
        flip(file, at);
        let problems = damage(&server, "first", to.path()).await;
        assert_eq!(problems.len(), 1, "{file:?}: {problems:?}");
        let refused = restore(&server, "first", to.path()).await.expect_err("it is damaged");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
        flip(file, at);
    }
    flip(&piece, 5000);
    // The target has the layer: it is not looked at again.
    back_up(&server, "second", to.path()).await;
    assert_eq!(damage(&server, "second", to.path()).await.len(), 1);
    ship(&server, &ShipBackup { whole: true, ..ask("third", to.path()) }).await.expect("a backup");
    for backup in ["first", "second", "third"] {
        assert!(damage(&server, backup, to.path()).await.is_empty(), "{backup}");
    }
    std::fs::remove_file(&piece).expect("removed");
    let problems = damage(&server, "first", to.path()).await;
    assert!(problems[0].contains("is missing"), "{problems:?}");
    // One that can't be read at all, as on a disk that fails.
    std::fs::create_dir(&piece).expect("a directory in its place");
    let problems = damage(&server, "first", to.path()).await;
    assert!(problems.len() == 1 && problems[0].contains("00000000-"), "{problems:?}");
    flip(&manifest, 40);
    let bad: Vec<_> =
        found(&server, to.path()).await.into_iter().filter(|one| !one.problem.is_empty()).collect();
    assert_eq!(bad.len(), 1, "{bad:?}");
    check_pool(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_is_deleted_with_the_layers_that_no_other_one_needs() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    server.create("data", 16 * MIB).await;
    for (backup, pattern) in [("first", "1"), ("second", "2"), ("third", "3")] {
        let command = format!("write -P {pattern} 0 1M");
        assert_io(&server.qemu_io("data", &[&command, "flush"]));
        back_up(&server, backup, to.path()).await;
    }
    let delete = async |backup: &str| {
        let backup = BackupName::new(backup).expect("a name");
        let ask = DeleteBackup { backup, at: target(to.path()), counts: false, key: None };
        server.control.post_long::<()>("/v1/backups/delete", &ask, |_| {}).await
    };
    let pieces = || files(to.path(), "00000000-").len();
    // What is gone already is no error.
    for (backup, left) in [("second", 3), ("third", 1), ("third", 1)] {
        delete(backup).await.expect("deleted");
        assert_eq!(pieces(), left, "{backup}");
    }
    assert!(damage(&server, "first", to.path()).await.is_empty());
    restore(&server, "first", to.path()).await.expect("restored");
    assert_io(&server.qemu_io("first", &["read -P 1 0 1M"]));
    // Of the volume's layers the target has the lowest one only.
    back_up(&server, "fourth", to.path()).await;
    flip(&files(to.path(), "backups/first").pop().expect("a manifest"), 40);
    let refused = delete("fourth").await.expect_err("nobody knows what the first one needs");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert!(pieces() > 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_not_leave_its_site_may_not_after_a_restore() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    let name = "data".parse().expect("a name");
    let new = CreateVolume::new(name, Some(8 * MIB), VolumeSource::Empty);
    let new = CreateVolume { leave_site: LeaveSite::Never, ..new };
    let _: VolumeInfo = server.control.post("/v1/volumes", &new).await.expect("a volume");
    assert_io(&server.qemu_io("data", &["write -P 1 0 1M", "flush"]));
    back_up(&server, "first", to.path()).await;
    let restored = restore(&server, "first", to.path()).await.expect("restored");
    assert_eq!(restored.leave_site, LeaveSite::Never);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_that_is_asked_for_again_when_it_is_complete_stays_as_it_is() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    server.create("data", 8 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 1M", "flush"]));
    let first = back_up(&server, "first", to.path()).await;
    assert_io(&server.qemu_io("data", &["write -P 2 0 1M", "flush"]));
    let later = ShipBackup { now_ms: 2000, ..ask("first", to.path()) };
    let again = ship(&server, &later).await.expect("the same one");
    assert_eq!(again, ShippedBackup { shipped_bytes: 0, ..first });
    restore(&server, "first", to.path()).await.expect("restored");
    assert_io(&server.qemu_io("first", &["read -P 1 0 1M"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_is_away_gets_no_backup_and_nothing_is_written_in_its_place() {
    let server = Server::start().await;
    server.create("data", 16 * MIB).await;
    let dir = tempfile::tempdir().expect("a directory");
    let gone = dir.path().join("not-there");
    for (to, is_known) in [(gone.as_path(), false), (gone.as_path(), true), (dir.path(), true)] {
        let asked = ShipBackup { is_known, ..ask("first", to) };
        let away = ship(&server, &asked).await.expect_err("it is away");
        assert_eq!(away.kind, ProblemKind::Unavailable, "{away}");
        assert!(away.next.contains("mount"), "{away}");
    }
    let none = restore(&server, "first", dir.path()).await.expect_err("there is none");
    assert_eq!(none.kind, ProblemKind::Unavailable, "{none}");
    assert!(files(dir.path(), "").is_empty() && !gone.exists());
    back_up(&server, "first", dir.path()).await;
    let none = restore(&server, "second", dir.path()).await.expect_err("there is none");
    assert_eq!(none.kind, ProblemKind::NotFound, "{none}");
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_at_the_home_is_not_backed_up_as_if_it_was_sound() {
    let server = Server::start().await;
    let to = tempfile::tempdir().expect("a directory");
    server.create("data", 16 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 2M", "flush"]));
    back_up(&server, "first", to.path()).await;
    let layers = server.pool.join("layers");
    // The header of the checksums is written last.
    until("the checksums", async || {
        let sums = files(&layers, ".sum");
        sums.iter().any(|file| std::fs::read(file).is_ok_and(|bytes| bytes[0] != 0))
    })
    .await;
    let data = files(&layers, ".data");
    let sealed = data.iter().find(|file| file.with_extension("sum").exists()).expect("the layer");
    flip(sealed, 1 << 20);
    let asked = ShipBackup { whole: true, ..ask("second", to.path()) };
    let refused = ship(&server, &asked).await.expect_err("it is damaged");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert!(refused.why.contains("damaged at offset"), "{refused}");
    assert_eq!(found(&server, to.path()).await.len(), 1);
}

/// An S3 store with one bucket.
pub struct Store {
    _server: S3,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Store {
    pub async fn start() -> Self {
        let (dir, port) = (tempfile::tempdir().expect("a directory"), perigee_http::unused_port());
        Self { _server: S3::start(dir.path(), "bucket", port).await, port, _dir: dir }
    }

    pub fn target(&self) -> BackupTarget {
        let endpoint = Some(format!("http://127.0.0.1:{}", self.port));
        BackupTarget { address: "s3://bucket/of/perigee".to_owned(), endpoint }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_s_backups_hold_no_more_than_they_may() {
    let (server, to) = (Server::start().await, tempfile::tempdir().expect("a directory"));
    server.create("data", 64 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 20M", "flush"]));
    let room = |limit_bytes: u64| {
        let tenant = TenantName::new("acme").expect("a name");
        Some(BackupRoom { tenant, limit_bytes: Some(limit_bytes), elsewhere_bytes: MIB })
    };
    let asked = |name: &str, limit| ShipBackup { room: room(limit), ..ask(name, to.path()) };
    let full = ship(&server, &asked("first", 20 * MIB)).await.expect_err("there is no room");
    assert_eq!(full.kind, ProblemKind::NoSpace);
    assert!(full.why.contains("tenant acme may have 20 MiB of backups and has 17"), "{full}");
    assert!(found(&server, to.path()).await.is_empty());
    // What was shipped counts, and is used.
    let first = ship(&server, &asked("first", 22 * MIB)).await.expect("a backup");
    assert!(first.shipped_bytes < 5 * MIB, "{first:?}");
    let on_disk: u64 =
        files(to.path(), "").iter().map(|file| file.metadata().expect("a file").len()).sum();
    assert_eq!(first.held_bytes, Some(on_disk));
    // Nothing is shipped twice, so what is there needs no room.
    ship(&server, &asked("second", 22 * MIB)).await.expect("a backup");
    ship(&server, &ShipBackup { whole: true, ..asked("third", 22 * MIB) }).await.expect("a backup");
    let backup = BackupName::new("first").expect("a name");
    let ask = DeleteBackup { backup, at: target(to.path()), counts: true, key: None };
    let held: Option<u64> =
        server.control.post_long("/v1/backups/delete", &ask, |_| {}).await.expect("deleted");
    assert!(held.is_some_and(|held| (20 * MIB..=21 * MIB).contains(&held)), "{held:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_s3_store_is_a_target_as_a_directory_is() {
    let store = Store::start().await;
    let variables = [("AWS_ACCESS_KEY_ID", KEY), ("AWS_SECRET_ACCESS_KEY", KEY)];
    let server = Server::start().await.with_variables(&variables).await;
    server.create("data", 64 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 20M", "flush"]));
    let to = store.target();
    let asked = |name: &str| ShipBackup { to: to.clone(), ..ask(name, Path::new("/")) };
    ship(&server, &asked("first")).await.expect("a backup");
    assert_io(&server.qemu_io("data", &["write -P 2 4M 1M", "flush"]));
    let second =
        ship(&server, &ShipBackup { is_known: true, ..asked("second") }).await.expect("a backup");
    assert!(second.shipped_bytes <= MIB + LISTS_BYTES, "{second:?}");
    let backup = asked("second").name;
    let ask = VerifyBackup { backup: backup.clone(), at: to.clone(), key: None, encrypted: false };
    let read: VerifiedBackup =
        server.control.post_long("/v1/backups/verify", &ask, |_| {}).await.expect("it is read");
    assert!(read.problems.is_empty() && read.read_bytes > 20 * MIB, "{read:?}");
    let all: Vec<FoundBackup> = server.control.post("/v1/backups/list", &to).await.expect("a list");
    assert_eq!(all.len(), 2);
    let delete =
        DeleteBackup { backup: asked("first").name, at: to.clone(), counts: true, key: None };
    let room = BackupRoom { tenant: TenantName::default(), limit_bytes: None, elsewhere_bytes: 0 };
    let counted = ShipBackup { room: Some(room), ..asked("third") };
    let counted = ship(&server, &counted).await.expect("a backup").held_bytes;
    assert!((21 * MIB..=21 * MIB + 2 * LISTS_BYTES).contains(&counted.unwrap_or(0)), "{counted:?}");
    let held: Option<u64> =
        server.control.post_long("/v1/backups/delete", &delete, |_| {}).await.expect("deleted");
    assert!(
        held.is_some_and(|held| (21 * MIB..=21 * MIB + 2 * LISTS_BYTES).contains(&held)),
        "{held:?}"
    );
    let new = CreateVolume::new("kept".parse().expect("a name"), Some(MIB), VolumeSource::Empty);
    let new = CreateVolume { leave_site: LeaveSite::Never, ..new };
    let _: VolumeInfo = server.control.post("/v1/volumes", &new).await.expect("a volume");
    let third = asked("fourth");
    let leaves =
        server.control.post_long::<ShippedBackup>("/v1/volumes/kept/backup", &third, |_| {});
    let refused = leaves.await.expect_err("it would leave its site");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    let ask = RestoreVolume {
        backup,
        from: to,
        tenant: TenantName::default(),
        leave_site: LeaveSite::Allowed,
        at_once: None,
        layer: None,
        owner: None,
        key: None,
        encrypted: false,
    };
    let restored = server.control.post_long::<VolumeInfo>("/v1/volumes/copy/restore", &ask, |_| {});
    restored.await.expect("restored");
    let check = ["read -P 1 0 4M", "read -P 2 4M 1M", "read -P 1 5M 15M", "read -P 0 20M 44M"];
    assert_io(&server.qemu_io("copy", &check));
    let ask = RestoreVolume { at_once: Some(LayerId(Uuid::new_v4())), ..ask };
    let at_once = server.control.post_long::<VolumeInfo>("/v1/volumes/now/restore", &ask, |_| {});
    at_once.await.expect("a volume");
    assert_io(&server.qemu_io("now", &check));
    until("all bytes", async || restoring(&server).await.is_empty()).await;
    check_pool(&server).await;
}
