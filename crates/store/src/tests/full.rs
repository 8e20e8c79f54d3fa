//! A pool that runs full, on a real filesystem of a few MiB. Needs root for the mount; the
//! simulated files of `rules` cover the store's own part for everybody.

use std::io::Write;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use perigee_block::lease::{LeaseAsk, LeaseRequest};
use perigee_model::home::{CallOff, Depart, HomeState, ServerAddresses, Tenure};
use perigee_model::replica::Supersede;
use perigee_model::volume::{EpochChange, ImportImage};
use perigee_model::{Incarnation, ProblemKind};

use super::*;

const MIB: usize = 1 << 20;

/// A tmpfs of 4 MiB that goes away with the test.
pub(crate) struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    pub(crate) fn mount() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not run: mounting a small filesystem needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let (kind, options) = (Some("tmpfs"), Some("size=4m"));
        mount(Some("tmpfs"), dir.path(), kind, MsFlags::empty(), options).unwrap();
        Some(Self(dir))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// A file of this name gets all that is free.
    pub(crate) fn fill(&self, name: &str) {
        let file = std::fs::File::create(self.path().join(name)).unwrap();
        while (&file).write_all(&[1; 4096]).is_ok() {}
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        umount2(self.0.path(), MntFlags::MNT_DETACH).expect("it was mounted");
    }
}

#[tokio::test]
async fn an_import_into_a_full_pool_fails_and_leaves_nothing() {
    let Some(disk) = SmallDisk::mount() else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let pool = open_real(disk.path()).await;
    let import = |name: &str, mib: usize| {
        let source = elsewhere.path().join(name);
        std::fs::write(&source, vec![7; mib * MIB]).unwrap();
        let source = source.to_str().unwrap().to_owned();
        ImportImage {
            name: image_name(name),
            source,
            layer: None,
            leave_site: Default::default(),
            format: None,
        }
    };
    let problem = pool.import_image(import("large", 6), &Arc::default()).await.unwrap_err();
    assert_eq!(problem.kind, ProblemKind::NoSpace, "{problem}");
    assert_eq!(std::fs::read_dir(disk.path().join("layers")).unwrap().count(), 0);
    pool.import_image(import("small", 1), &Arc::default())
        .await
        .expect("there is room for this one");
}

#[tokio::test]
async fn an_import_leaves_room_for_what_clients_write() {
    let Some(disk) = SmallDisk::mount() else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let pool = open_real(disk.path()).await;
    let source = elsewhere.path().join("tiny");
    std::fs::write(&source, [7; 4096]).unwrap();
    let request = ImportImage {
        name: image_name("tiny"),
        source: source.to_str().unwrap().to_owned(),
        layer: None,
        leave_site: Default::default(),
        format: None,
    };
    let free = || rustix::fs::statvfs(disk.path()).unwrap();
    let mut file = std::fs::File::create(disk.path().join("ballast")).unwrap();
    while free().f_bavail * free().f_frsize > 64 << 10 {
        file.write_all(&[1; 4096]).unwrap();
    }
    let problem = pool.import_image(request.clone(), &Arc::default()).await.unwrap_err();
    assert_eq!(problem.kind, ProblemKind::NoSpace, "{problem}");
    assert!(problem.why.contains("left free for clients' writes"), "{problem}");
    file.set_len(0).unwrap();
    pool.import_image(request, &Arc::default()).await.expect("there is room again");
}

#[tokio::test]
async fn a_full_pool_keeps_what_it_has_and_takes_more_after_a_trim() {
    let Some(disk) = SmallDisk::mount() else { return };
    let pool = open_real(disk.path()).await;
    let device = empty(&pool, "v", 64 << 20).await;
    let mut written = 0;
    let error = loop {
        match device.write(written, bytes(5, MIB / 4), false).await {
            Ok(()) => written += MIB as u64 / 4,
            Err(error) => break error,
        }
        assert!(written < 8 << 20, "the disk has 4 MiB");
    };
    assert!(matches!(error, IoError::NoSpace), "{error}");
    device.flush().await.unwrap();
    for at in (0..written).step_by(MIB / 4) {
        assert_eq!(device.read(at, 262_144).await.unwrap(), bytes(5, MIB / 4), "at {at}");
    }
    device.zero(0, MIB as u64, Zeroing::FreeSpace, true).await.unwrap();
    device.write(32 << 20, bytes(6, MIB / 2), true).await.expect("the trim gave space back");
    assert_eq!(device.read(0, 1).await.unwrap()[..], [0]);
}

/// Not a byte is left, also not for the catalog.
#[tokio::test]
async fn a_lost_home_gives_its_volume_up_although_its_disk_is_full() {
    let Some(disk) = SmallDisk::mount() else { return };
    let pool = open_real(disk.path()).await;
    let device = empty(&pool, "v", 64 << 20).await;
    device.write(0, bytes(1, 4096), true).await.unwrap();
    disk.fill("others");
    device.write(4096, bytes(2, 4096), false).await.expect_err("no space");
    let v = volume_name("v");
    let HomeState::Here { tenure: lost, .. } = pool.home(&v).await.unwrap().home else {
        panic!("it is here");
    };
    let to = ServerAddresses { nbd_addr: "there:1".into(), control_url: "http://there".into() };
    let ask = Supersede { lost, tenure: Tenure::first(Incarnation(9)), to };
    let done = pool.supersede(&v, &ask).await.expect("it gives it up");
    let image = pool.open_image(&done.image.expect("it is kept")).await.unwrap();
    assert_eq!(image.read(0, 4096).await.unwrap(), bytes(1, 4096));
    pool.volume(&v).await.map(drop).expect_err("it is not here any more");
}

#[tokio::test]
async fn a_move_is_called_off_although_the_disks_are_full() {
    let Some(disk) = SmallDisk::mount() else { return };
    let pool = open_real(disk.path()).await;
    let device = empty(&pool, "v", 64 << 20).await;
    device.write(0, bytes(1, 4096), true).await.unwrap();
    let v = volume_name("v");
    let HomeState::Here { tenure, .. } = pool.home(&v).await.unwrap().home else {
        panic!("it is here");
    };
    let to = ServerAddresses { nbd_addr: "there:1".into(), control_url: "http://there".into() };
    let step = pool.move_step(&v).await.unwrap();
    step.depart(&Depart { tenure, to }).await.unwrap();
    disk.fill("others");
    let step = pool.move_step(&v).await.unwrap();
    step.return_home(CallOff { tenure }).await.expect("else the volume is nowhere");
    assert_eq!(session(&pool, "v").await.read(0, 4096).await.unwrap(), bytes(1, 4096));
}

#[tokio::test]
async fn a_volume_is_refused_for_good_although_the_disk_is_full() {
    let Some(disk) = SmallDisk::mount() else { return };
    let pool = open_real(disk.path()).await;
    disk.fill("others");
    let off = CallOff { tenure: Tenure::first(Incarnation(9)) };
    let home = pool.refuse_home(&volume_name("v"), off).await.expect("its old home waits for this");
    assert!(matches!(home.home, HomeState::NotHere { .. }), "{home:?}");
}

#[tokio::test]
async fn a_vm_that_is_paused_to_move_goes_on_although_the_disk_is_full() {
    let Some(disk) = SmallDisk::mount() else { return };
    let pool = open_real(disk.path()).await;
    drop(empty(&pool, "v", 64 << 20).await);
    let volume = pool.volume(&volume_name("v")).await.unwrap();
    let (from, to) = (volume.epoch(), volume.issue_epoch().await.unwrap().epoch);
    disk.fill("others");
    volume.change_epoch(EpochChange { from, to }).await.expect("the VM waits for this");
    assert_eq!(volume.epoch(), to);
}

/// It can read at the home instead. The reserve is for what can't wait.
#[tokio::test]
async fn a_host_that_wants_to_keep_blocks_in_memory_does_not_take_the_catalog_s_reserve() {
    let Some(disk) = SmallDisk::mount() else { return };
    let pool = open_real(disk.path()).await;
    drop(empty(&pool, "v", 64 << 20).await);
    let device = pool.open_session(&volume_name("v"), None, 7).await.unwrap();
    disk.fill("others");
    let ask = LeaseAsk { request: LeaseRequest::Hold, number: 1 };
    let refused = device.lease(ask).await;
    assert!(matches!(refused, Err(IoError::NoSpace)), "{refused:?}");
    assert!(disk.path().join("catalog.reserve").exists());
}

#[tokio::test]
async fn a_server_starts_although_the_disk_is_full() {
    let Some(disk) = SmallDisk::mount() else { return };
    let device = empty(&open_real(disk.path()).await, "v", 64 << 20).await;
    device.write(0, bytes(1, MIB), true).await.unwrap();
    drop(device);
    disk.fill("others");
    for _ in 0..2 {
        let pool = open_real(disk.path()).await;
        assert_eq!(session(&pool, "v").await.read(0, 4096).await.unwrap(), bytes(1, 4096));
    }
    let pool = open_real(disk.path()).await;
    pool.delete_volume(&volume_name("v")).await.expect("it gives space back");
    empty(&pool, "w", 64 << 20).await.write(0, bytes(1, MIB / 4), true).await.unwrap();
}

#[tokio::test]
async fn a_volume_can_be_deleted_although_the_disk_is_full() {
    let Some(disk) = SmallDisk::mount() else { return };
    let pool = open_real(disk.path()).await;
    for name in ["a", "b"] {
        empty(&pool, name, 64 << 20).await.write(0, bytes(1, MIB), true).await.unwrap();
    }
    for name in ["a", "b"] {
        disk.fill(name);
        pool.delete_volume(&volume_name(name)).await.expect("it gives space back");
    }
    empty(&pool, "c", 64 << 20).await.write(0, bytes(1, MIB / 4), true).await.unwrap();
}
