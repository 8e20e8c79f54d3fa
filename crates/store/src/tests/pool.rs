//! Creating, sealing, cloning and deleting in a real directory.

use perigee_model::volume::{
    CachePolicy, CreateVolumes, EpochChange, Snapshot, VolumeHealth, VolumeSource,
};
use perigee_model::{Epoch, ProblemKind};
use tokio::sync::{Notify, Semaphore};

use super::*;

fn layer_files(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("layers")).unwrap().count()
}

#[tokio::test]
async fn what_was_written_is_there_after_opening_again() {
    let dir = tempfile::tempdir().unwrap();
    {
        let pool = open_real(dir.path()).await;
        let device = empty(&pool, "v", 1 << 20).await;
        device.write(4095, bytes(7, 2), true).await.unwrap();
        device.write(65536, bytes(8, 8192), false).await.unwrap();
    }
    let pool = open_real(dir.path()).await;
    let device = session(&pool, "v").await;
    assert_eq!(device.read(4094, 4).await.unwrap()[..], [0, 7, 7, 0]);
    assert_eq!(device.read(65536, 8192).await.unwrap(), bytes(8, 8192));
    let info = pool.volume_info(&volume_name("v")).await.unwrap();
    assert_eq!((info.head_bytes, info.sessions), (4 * 4096, 1));
    assert_eq!(info.epoch, Epoch::first(info.epoch.incarnation()));
    assert_eq!(info.health, VolumeHealth::Ok);
}

#[tokio::test]
async fn a_second_server_is_kept_out() {
    let dir = tempfile::tempdir().unwrap();
    let _pool = open_real(dir.path()).await;
    let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect: connector() };
    let Err(problem) = Pool::open(config).await else { panic!("two servers opened one pool") };
    assert_eq!(problem.kind, ProblemKind::Conflict);
}

#[tokio::test]
async fn a_snapshot_keeps_what_was_and_the_volume_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", 8 * 4096).await;
    device.write(0, bytes(1, 8192), false).await.unwrap();
    let request = Snapshot { image: image_name("s") };
    let image = pool.snapshot(&volume_name("v"), request.clone()).await.unwrap();
    assert_eq!((image.allocated_bytes, image.children), (8192, 1));

    device.write(100, bytes(2, 4096), false).await.unwrap();
    let snapshot = pool.open_image(&image_name("s")).await.unwrap();
    assert_eq!(snapshot.read(0, 8192).await.unwrap(), bytes(1, 8192));
    assert!(matches!(snapshot.write(0, bytes(3, 1), false).await, Err(IoError::ReadOnly)));
    let expected = [vec![1; 100], vec![2; 4096], vec![1; 3996], vec![0; 6 * 4096]].concat();
    assert_eq!(all(&device).await, expected);

    let taken = pool.snapshot(&volume_name("v"), request).await.unwrap_err();
    assert_eq!(taken.kind, ProblemKind::Conflict);
}

#[tokio::test]
async fn a_clone_is_the_source_at_that_moment_and_may_be_larger() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let source = empty(&pool, "v", 4 * 4096).await;
    source.write(0, bytes(1, 4 * 4096), false).await.unwrap();
    let from = || VolumeSource::Volume(volume_name("v"));
    let clone = create("c", Some(6 * 4096), from());
    pool.create_volume(clone).await.unwrap();
    source.write(0, bytes(2, 4096), false).await.unwrap();
    let clone = session(&pool, "c").await;
    clone.write(4096, bytes(3, 1), false).await.unwrap();
    let expected = [vec![1; 4096], vec![3], vec![1; 3 * 4096 - 1], vec![0; 2 * 4096]].concat();
    assert_eq!(all(&clone).await, expected);
    assert_eq!(source.read(4096, 1).await.unwrap()[..], [1]);

    let smaller = pool.create_volume(create("d", Some(4096), from())).await.unwrap_err();
    assert_eq!(smaller.kind, ProblemKind::Invalid);
}

#[tokio::test]
async fn clones_of_a_quiet_volume_make_no_deeper_chain() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    empty(&pool, "v", 4096).await.write(0, bytes(1, 10), false).await.unwrap();
    for name in ["a", "b", "c"] {
        let clone = create(name, None, VolumeSource::Volume(volume_name("v")));
        let info = pool.create_volume(clone).await.unwrap();
        assert_eq!(info.chain.len(), 2, "clone {name}");
    }
    assert_eq!(pool.volume_info(&volume_name("v")).await.unwrap().chain.len(), 2);
}

fn many(names: &[String], source: VolumeSource) -> CreateVolumes {
    let mut request = CreateVolumes::from(create("x", None, source));
    request.names = names.iter().map(|name| volume_name(name)).collect();
    request
}

#[tokio::test]
async fn a_thousand_clones_are_one_change_and_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    empty(&pool, "v", 1 << 20).await.write(0, bytes(1, 4096), false).await.unwrap();
    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    let before = layer_files(dir.path());
    let names: Vec<String> = (0..1000).map(|n| format!("c{n}")).collect();
    let image = || VolumeSource::Image(image_name("s"));
    let made = pool.create_volumes(many(&names, image())).await.unwrap();
    assert_eq!(made.len(), 1000);
    assert_eq!(layer_files(dir.path()), before, "a clone has no files before its first write");
    drop(pool);
    let pool = open_real(dir.path()).await;
    assert_eq!(pool.volumes().await.unwrap().len(), 1001);
    assert_eq!(session(&pool, "c999").await.read(0, 1).await.unwrap()[..], [1]);
}

#[tokio::test]
async fn of_many_volumes_there_are_all_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    empty(&pool, "b", 4096).await;
    let from = || VolumeSource::Volume(volume_name("b"));
    let name = |names: [&str; 2]| names.map(str::to_owned);
    let taken = pool.create_volumes(many(&name(["a", "b"]), from())).await.unwrap_err();
    assert_eq!(taken.kind, ProblemKind::Conflict);
    let twice = pool.create_volumes(many(&name(["a", "a"]), from())).await.unwrap_err();
    assert_eq!(twice.kind, ProblemKind::Invalid);
    let none = pool.create_volumes(many(&[], from())).await.unwrap_err();
    assert_eq!(none.kind, ProblemKind::Invalid);
    assert_eq!(pool.volumes().await.unwrap().len(), 1);
}

#[tokio::test]
async fn deleting_everything_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", 4096).await;
    assert_eq!(layer_files(dir.path()), 0, "a head has no files before its first write");
    device.write(0, bytes(1, 1), false).await.unwrap();
    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    device.write(0, bytes(1, 1), false).await.unwrap();
    let clone = create("c", None, VolumeSource::Volume(volume_name("v")));
    pool.create_volume(clone).await.unwrap();

    let in_use = pool.delete_volume(&volume_name("v")).await.unwrap_err();
    assert_eq!(in_use.kind, ProblemKind::Conflict);
    drop(device);
    pool.delete_volume(&volume_name("v")).await.unwrap();
    pool.delete_volume(&volume_name("c")).await.unwrap();
    assert_eq!(layer_files(dir.path()), 2, "the snapshot's data and map");
    pool.delete_image(&image_name("s")).await.unwrap();
    assert_eq!(layer_files(dir.path()), 0);
    let gone = pool.delete_volume(&volume_name("v")).await.unwrap_err();
    assert_eq!(gone.kind, ProblemKind::NotFound);
}

#[tokio::test]
async fn what_a_killed_server_left_behind_is_removed_at_opening() {
    let dir = tempfile::tempdir().unwrap();
    drop(open_real(dir.path()).await);
    let layers = dir.path().join("layers");
    std::fs::write(layers.join("import-1.tmp"), "half").unwrap();
    std::fs::write(layers.join(format!("{}.data", Uuid::new_v4())), "no volume has it").unwrap();
    open_real(dir.path()).await;
    assert_eq!(layer_files(dir.path()), 0);
}

#[tokio::test]
async fn an_old_epoch_reads_and_flushes_and_never_writes() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let source = empty(&pool, "v", 4096).await;
    let volume = pool.volume(&volume_name("v")).await.unwrap();
    let first = volume.epoch();
    let epoch = |number: u64| Epoch(first.0 + number - 1);
    let change = |from, to| EpochChange { from: epoch(from), to: epoch(to) };
    let not_issued = volume.change_epoch(change(1, 2)).await.unwrap_err();
    assert_eq!(not_issued.kind, ProblemKind::Conflict);
    assert_eq!(volume.issue_epoch().await.unwrap().epoch, epoch(2));
    let destination = volume.session(Some(epoch(2)));
    let fenced = destination.write(0, bytes(1, 1), false).await;
    let expected = (epoch(2), first);
    assert!(
        matches!(fenced, Err(IoError::Fenced { session, volume }) if (session, volume) == expected)
    );

    volume.change_epoch(change(1, 2)).await.unwrap();
    volume.change_epoch(change(1, 2)).await.expect("a repeated change succeeds");
    destination.write(0, bytes(1, 1), false).await.unwrap();
    let fenced = source.write(0, bytes(2, 1), false).await;
    assert!(matches!(fenced, Err(IoError::Fenced { .. })));
    let fenced = source.zero(0, 4096, Zeroing::FreeSpace, false).await;
    assert!(matches!(fenced, Err(IoError::Fenced { .. })));
    assert_eq!(source.read(0, 1).await.unwrap()[..], [1]);
    source.flush().await.unwrap();

    volume.change_epoch(change(2, 1)).await.expect("a change back is possible");
    source.write(0, bytes(2, 1), false).await.unwrap();
    assert_eq!(volume.issue_epoch().await.unwrap().epoch, epoch(3), "never given out twice");
    let wrong_from = volume.change_epoch(change(2, 3)).await.unwrap_err();
    assert_eq!(wrong_from.kind, ProblemKind::Conflict);
    volume.change_epoch(change(1, 3)).await.unwrap();
    drop((source, destination, volume, pool));
    let pool = open_real(dir.path()).await;
    assert_eq!(pool.volume(&volume_name("v")).await.unwrap().epoch(), epoch(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_write_is_lost_while_snapshots_are_taken() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", 16 * 4096).await;
    let writers: Vec<_> = (0..4_u64)
        .map(|writer| {
            let device = Arc::clone(&device);
            tokio::spawn(async move {
                for round in 1..=40_u8 {
                    // Four writers share every block.
                    for block in 0..16 {
                        let at = block * 4096 + writer * 1024 + 3;
                        device.write(at, bytes(round, 1000), false).await.unwrap();
                        assert_eq!(device.read(at, 1000).await.unwrap(), bytes(round, 1000));
                    }
                }
            })
        })
        .collect();
    for number in 0..5 {
        let image = image_name(&format!("s{number}"));
        pool.snapshot(&volume_name("v"), Snapshot { image }).await.unwrap();
    }
    for writer in writers {
        writer.await.unwrap();
    }
    for at in (0..64).map(|quarter| quarter * 1024 + 3) {
        assert_eq!(device.read(at, 1000).await.unwrap(), bytes(40, 1000));
    }
}

#[tokio::test]
async fn attachments_are_kept_and_do_not_hide_a_volume() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    empty(&pool, "here", 4096).await;
    let refused = pool.attach(&volume_name("here"), "a:1").await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict);
    pool.attach(&volume_name("away"), "a:1").await.unwrap();
    pool.attach(&volume_name("away"), "b:2").await.unwrap();
    drop(pool);
    let pool = open_real(dir.path()).await;
    assert_eq!(pool.attachments().await.unwrap(), [(volume_name("away"), "b:2".to_owned())]);
    let taken = pool.create_volume(create("away", Some(1), VolumeSource::Empty)).await;
    assert_eq!(taken.unwrap_err().kind, ProblemKind::Conflict);
    pool.detach(&volume_name("away")).await.unwrap();
    let gone = pool.detach(&volume_name("away")).await.unwrap_err();
    assert_eq!(gone.kind, ProblemKind::NotFound);
}

#[tokio::test]
async fn a_volume_past_the_page_cache_reads_what_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut expected = vec![0; 16 * 4096];
    {
        let pool = open_real(dir.path()).await;
        let mut request = create("v", Some(16 * 4096), VolumeSource::Empty);
        request.cache = CachePolicy::Direct;
        pool.create_volume(request).await.unwrap();
        let device = session(&pool, "v").await;
        for (at, length, byte) in [(0, 8192, 1), (100, 5000, 2), (40_000, 1, 3), (20_480, 4096, 4)]
        {
            device.write(at as u64, bytes(byte, length), false).await.unwrap();
            expected[at..at + length].fill(byte);
        }
        assert_eq!(all(&device).await, expected);
        pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
        let image = pool.open_image(&image_name("s")).await.unwrap();
        assert_eq!(all(&image).await, expected);
        device.write(4097, bytes(5, 7), true).await.unwrap();
        expected[4097..4104].fill(5);
    }
    let pool = open_real(dir.path()).await;
    assert_eq!(pool.volume_info(&volume_name("v")).await.unwrap().cache, CachePolicy::Direct);
    let device = session(&pool, "v").await;
    device.write(4100, bytes(6, 100), false).await.unwrap();
    expected[4100..4200].fill(6);
    assert_eq!(all(&device).await, expected);
}

#[tokio::test]
async fn a_volume_is_deleted_for_its_owner_and_not_for_another_one_of_that_name() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let owner = |name: &str| Some(perigee_model::OwnerName::new(name).unwrap());
    let new = create("q-0001-root", Some(1 << 20), VolumeSource::Empty);
    let info = pool.create_volume(CreateVolume { owner: owner("q-0001"), ..new }).await.unwrap();
    assert_eq!(info.owner, owner("q-0001"));
    let name = volume_name("q-0001-root");
    let refused = pool.delete_volume_of(&name, owner("q-0002")).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::NotFound);
    drop(pool);
    let pool = open_real(dir.path()).await;
    assert_eq!(pool.volume_info(&name).await.unwrap().owner, owner("q-0001"));
    pool.delete_volume_of(&name, owner("q-0001")).await.unwrap();
    pool.volume_info(&name).await.unwrap_err();
}

#[tokio::test]
async fn a_session_of_a_volume_that_was_deleted_does_not_open_the_next_one_of_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    drop(empty(&pool, "v", 4096).await);
    let old = pool.volume(&volume_name("v")).await.unwrap().epoch();
    pool.delete_volume(&volume_name("v")).await.unwrap();
    drop(empty(&pool, "v", 4096).await);
    let volume = pool.volume(&volume_name("v")).await.unwrap();
    assert_ne!(volume.epoch(), old);
    let refused =
        pool.open_session(&volume_name("v"), Some(old), NO_HOST).await.err().expect("a refusal");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    let late = EpochChange { from: old, to: old };
    assert_eq!(volume.change_epoch(late).await.unwrap_err().kind, ProblemKind::Conflict);
    let opened = pool.open_session(&volume_name("v"), Some(volume.epoch()), NO_HOST).await.unwrap();
    opened.write(0, bytes(1, 1), false).await.unwrap();
}

/// Another host that answers when it is let.
struct Stalling {
    remote: FakeRemote,
    asked: Notify,
    answers: Semaphore,
}

impl Device for Stalling {
    fn size_bytes(&self) -> u64 {
        self.remote.size_bytes()
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            self.asked.notify_one();
            self.answers.acquire().await.unwrap().forget();
            self.remote.read(offset, length_bytes).await
        })
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, offset: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        self.remote.extents(offset, length)
    }
}

#[tokio::test]
async fn a_raise_of_the_epoch_does_not_wait_for_another_host() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, answers) = (Notify::new(), Semaphore::new(0));
    let remote = Arc::new(Stalling { remote: FakeRemote(remote_bytes(), None), asked, answers });
    let connect = reach(Arc::clone(&remote) as _);
    let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect };
    let pool = Pool::open(config).await.unwrap();
    let source = VolumeSource::Remote { nbd_addr: "there:1".into(), export: "image:x".into() };
    pool.create_volume(create("v", None, source)).await.unwrap();
    let [first, second] = [session(&pool, "v").await, session(&pool, "v").await];
    let write = tokio::spawn(async move { first.write(100, bytes(1, 10), false).await });
    remote.asked.notified().await;
    let zero = async move { second.zero(5000, 100, Zeroing::FreeSpace, false).await };
    let zero = tokio::spawn(zero);
    remote.asked.notified().await;

    let volume = pool.volume(&volume_name("v")).await.unwrap();
    let (from, to) = (volume.epoch(), volume.issue_epoch().await.unwrap().epoch);
    let raised = volume.change_epoch(EpochChange { from, to });
    let raised = tokio::time::timeout(Duration::from_secs(120), raised).await;
    raised.expect("a raise while the other host is silent").unwrap();
    remote.answers.add_permits(100);
    for late in [write.await.unwrap(), zero.await.unwrap()] {
        assert!(matches!(late, Err(IoError::Fenced { .. })), "{late:?}");
    }
    let now = session(&pool, "v").await;
    now.write(100, bytes(2, 10), false).await.unwrap();
    let mut expected = remote_bytes()[..4096].to_vec();
    expected[100..110].fill(2);
    assert!(now.read(0, 4096).await.unwrap() == expected);
}

#[tokio::test]
async fn a_volume_whose_opening_panics_takes_no_other_volume_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let refused = pool.with_open::<()>("can't open volume v", |_| panic!("a fault of ours"));
    assert_eq!(refused.unwrap_err().kind, ProblemKind::Internal);
    let device = empty(&pool, "other", 4096).await;
    device.write(0, bytes(1, 1), false).await.unwrap();
}
