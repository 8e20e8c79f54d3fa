//! A pool that runs full, on a real filesystem of a few MiB. Needs root for the mount; the
//! simulated files of `rules` cover the store's own part for everybody.

use std::io::Write;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use perigee_model::home::{HomeState, ServerAddresses, Tenure};
use perigee_model::replica::Supersede;
use perigee_model::volume::ImportImage;
use perigee_model::{Incarnation, ProblemKind};

use super::*;

const MIB: usize = 1 << 20;

/// A tmpfs of 4 MiB that goes away with the test.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not run: mounting a small filesystem needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let (kind, options) = (Some("tmpfs"), Some("size=4m"));
        mount(Some("tmpfs"), dir.path(), kind, MsFlags::empty(), options).unwrap();
        Some(Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
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
    let full = std::fs::File::create(disk.path().join("others")).unwrap();
    while (&full).write_all(&[1; 4096]).is_ok() {}
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
async fn a_volume_can_be_deleted_although_the_disk_is_full() {
    let Some(disk) = SmallDisk::mount() else { return };
    let pool = open_real(disk.path()).await;
    for name in ["a", "b"] {
        empty(&pool, name, 64 << 20).await.write(0, bytes(1, MIB), true).await.unwrap();
    }
    for name in ["a", "b"] {
        let full = std::fs::File::create(disk.path().join(name)).unwrap();
        while (&full).write_all(&[1; 4096]).is_ok() {}
        pool.delete_volume(&volume_name(name)).await.expect("it gives space back");
    }
    empty(&pool, "c", 64 << 20).await.write(0, bytes(1, MIB / 4), true).await.unwrap();
}
