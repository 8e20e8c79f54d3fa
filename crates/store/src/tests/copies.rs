//! Copies of another host's images: what is fetched, how often, what is kept, and what stays when
//! the other host goes away.

mod contents;
mod sources;
mod troubles;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures_util::future::join_all;
use perigee_block::device::{Origin, OriginRun};
use perigee_model::volume::{
    CheckScope, CopyImage, CreateVolumes, ImageInfo, Keep, Resize, Snapshot,
};
use perigee_model::{LayerId, ProblemKind};
use tokio::sync::Semaphore;

use super::*;
use crate::disk::files::BlockFile;
use crate::layers::layer::data_name;
use crate::sim::Dice;
use crate::work::Work;

const BLOCK: usize = 4096;
const BLOCKS: usize = 24;
/// Blocks that are empty on the other host.
const HOLE: std::ops::Range<usize> = 8..12;

/// The other host: a sealed layer of which every read is counted.
struct Home {
    bytes: Vec<u8>,
    layer: Option<LayerId>,
    /// How often each block was read.
    reads: Mutex<Vec<u32>>,
    away: AtomicBool,
    /// It does not answer who asks for its checksums.
    hides_checksums: AtomicBool,
    /// How many reads have come.
    asked: AtomicUsize,
    /// A read takes a permit and gives it back.
    gate: Semaphore,
}

impl Home {
    fn new() -> Arc<Self> {
        // A last block of 512 bytes.
        let length = (BLOCKS - 1) * BLOCK + 512;
        let mut bytes: Vec<u8> = (1..=251).cycle().take(length).collect();
        bytes[HOLE.start * BLOCK..HOLE.end * BLOCK].fill(0);
        let (reads, away) = (Mutex::new(vec![0; BLOCKS]), AtomicBool::new(false));
        let (layer, asked) = (Some(LayerId(Uuid::from_u128(77))), AtomicUsize::new(0));
        let (hides_checksums, gate) = (AtomicBool::new(false), Semaphore::new(1000));
        Arc::new(Self { bytes, layer, reads, away, hides_checksums, asked, gate })
    }

    /// What an image of it has.
    fn content(&self) -> Vec<u8> {
        let mut content = self.bytes.clone();
        content.resize(BLOCKS * BLOCK, 0);
        content
    }

    fn reads(&self) -> Vec<u32> {
        self.reads.lock().unwrap().clone()
    }
}

impl Device for Home {
    fn size_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn layer(&self) -> Option<LayerId> {
        self.layer
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        let from = usize::try_from(offset).unwrap();
        let to = from + length_bytes as usize;
        Box::pin(async move {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let _turn = self.gate.acquire().await.unwrap();
            if self.away.load(Ordering::SeqCst) {
                return Err(IoError::Unreachable("it is away".to_owned()));
            }
            for count in &mut self.reads.lock().unwrap()[from / BLOCK..to.div_ceil(BLOCK)] {
                *count += 1;
            }
            Ok(Bytes::copy_from_slice(&self.bytes[from..to]))
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
        let block = usize::try_from(offset).unwrap() / BLOCK;
        let zero = HOLE.contains(&block);
        let length_bytes = length.min(4096 - offset % 4096);
        Box::pin(async move { Ok(vec![Extent { length_bytes, hole: zero, zero }]) })
    }
}

/// A pool on simulated files beside a home.
struct Bench {
    dir: tempfile::TempDir,
    files: Arc<SimFiles>,
    home: Arc<Home>,
    pool: Arc<Pool>,
    boot: u128,
}

impl Bench {
    fn new() -> Self {
        let (dir, files, home) = (tempfile::tempdir().unwrap(), Arc::default(), Home::new());
        let pool = open(&dir, &files, &home, 1);
        Self { dir, files, home, pool, boot: 1 }
    }

    async fn copied(keep: Keep) -> Self {
        let bench = Self::new();
        bench.copy(keep).await.unwrap();
        bench
    }

    async fn copy(&self, keep: Keep) -> Result<ImageInfo, perigee_model::Problem> {
        let request = CopyImage {
            content: None,
            nbd_addr: "there:1".to_owned(),
            export: None,
            keep,
            layer: None,
        };
        self.pool.copy_image(&image_name("i"), request).await
    }

    async fn info(&self) -> ImageInfo {
        self.pool.image_info(&image_name("i")).await.unwrap()
    }

    async fn missing_bytes(&self) -> u64 {
        self.settle().await;
        self.info().await.remote.unwrap().missing_bytes
    }

    async fn clone_it(&self, name: &str) -> Arc<dyn Device> {
        let source = VolumeSource::Image(image_name("i"));
        self.pool.create_volume(create(name, None, source)).await.unwrap();
        session(&self.pool, name).await
    }

    async fn fill(&self) -> Result<ImageInfo, perigee_model::Problem> {
        self.pool.fill_image(&image_name("i"), Arc::default()).await
    }

    /// Until what was read is written.
    async fn settle(&self) {
        self.pool.settle_copies().await;
    }

    async fn restart(self, power_cut: Option<u64>) -> Self {
        self.settle().await;
        let Self { dir, files, home, pool, mut boot } = self;
        drop(pool);
        if let Some(seed) = power_cut {
            files.power_cut(&mut Dice(seed));
            boot += 1;
        }
        let pool = open(&dir, &files, &home, boot);
        Self { dir, files, home, pool, boot }
    }
}

fn open(dir: &tempfile::TempDir, files: &Arc<SimFiles>, home: &Arc<Home>, boot: u128) -> Arc<Pool> {
    let mut connect = reach(home.clone());
    connect.patience = Duration::from_millis(50);
    let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect };
    Pool::open_with(config, Arc::clone(files) as _, Uuid::from_u128(boot)).unwrap()
}

async fn read(device: &Arc<dyn Device>, block: usize) -> Result<Bytes, IoError> {
    device.read((block * BLOCK) as u64, 4096).await
}

#[tokio::test(flavor = "multi_thread")]
async fn however_many_clones_read_at_once_each_block_is_fetched_once() {
    let bench = Bench::copied(Keep::Read).await;
    let names = (0..64).map(|n| volume_name(&format!("c{n}"))).collect();
    let source = VolumeSource::Image(image_name("i"));
    let request = CreateVolumes { names, ..create("x", None, source).into() };
    bench.pool.create_volumes(request).await.unwrap();
    let content = bench.home.content();
    let clients = (0..64).map(|n| {
        let (pool, content) = (Arc::clone(&bench.pool), content.clone());
        tokio::spawn(async move {
            let device = session(&pool, &format!("c{n}")).await;
            for at in 0..BLOCKS {
                let block = (at * 7 + n) % BLOCKS;
                let found = read(&device, block).await.unwrap();
                assert!(found == content[block * BLOCK..(block + 1) * BLOCK], "block {block}");
            }
            assert!(all(&device).await == content);
        })
    });
    for client in join_all(clients).await {
        client.unwrap();
    }
    assert_eq!(bench.home.reads(), [1; BLOCKS]);
    assert_eq!(bench.missing_bytes().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_reads_is_answered_before_it_is_written() {
    let bench = Bench::copied(Keep::Read).await;
    let device = bench.clone_it("c").await;
    read(&device, 0).await.unwrap();
    bench.settle().await;
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let data = bench.files.file(&data_name(bench.info().await.layer));
    *data.on_write.lock().unwrap() = Some(Box::new(move || wait.recv().unwrap()));
    let answered = tokio::time::timeout(Duration::from_secs(120), read(&device, 1)).await;
    assert!(answered.unwrap().unwrap() == bench.home.content()[BLOCK..2 * BLOCK]);
    go.send(()).unwrap();
    bench.settle().await;
    read(&device, 1).await.unwrap();
    assert_eq!(bench.home.reads()[1], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_s_write_while_its_block_is_fetched_stays() {
    let bench = Bench::copied(Keep::Read).await;
    let device = bench.clone_it("c").await;
    let held = bench.home.gate.acquire_many(1000).await.unwrap();
    let reader = tokio::spawn({
        let device = Arc::clone(&device);
        async move { read(&device, 2).await.unwrap() }
    });
    device.write(2 * 4096, bytes(9, BLOCK), false).await.unwrap();
    drop(held);
    let found = reader.await.unwrap();
    assert!(found == bytes(9, BLOCK) || found == bench.home.content()[2 * BLOCK..3 * BLOCK]);
    bench.settle().await;
    assert_eq!(read(&device, 2).await.unwrap(), bytes(9, BLOCK));
    device.write(3 * 4096 + 10, bytes(8, 5), false).await.unwrap();
    let mut expected = bench.home.content()[3 * BLOCK..4 * BLOCK].to_vec();
    expected[10..15].fill(8);
    assert_eq!(read(&device, 3).await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_copy_is_the_same_layer_and_needs_nobody() {
    let bench = Bench::copied(Keep::Read).await;
    let (before, image) =
        (bench.clone_it("before").await, bench.pool.open_image(&image_name("i")).await.unwrap());
    read(&before, 3).await.unwrap();
    assert_eq!(bench.missing_bytes().await, ((BLOCKS - 1) * BLOCK) as u64);
    let info = bench.fill().await.unwrap();
    assert_eq!((info.remote, Some(info.layer)), (None, bench.home.layer));
    let expected: Vec<u32> = (0..BLOCKS).map(|n| u32::from(!HOLE.contains(&n))).collect();
    assert_eq!(bench.home.reads(), expected, "what is empty is not read");
    bench.home.away.store(true, Ordering::SeqCst);
    let after = bench.clone_it("after").await;
    for device in [&before, &image, &after] {
        assert!(all(device).await == bench.home.content());
    }
    let volume = bench.pool.volume_info(&volume_name("before")).await.unwrap();
    assert_eq!((volume.remote_bytes, volume.shared_bytes), (0, ((BLOCKS - 4) * BLOCK) as u64));
    assert_eq!(bench.fill().await.unwrap().remote, None, "again changes nothing");
    drop((before, image, after));
    let bench = bench.restart(Some(3)).await;
    assert!(all(&session(&bench.pool, "after").await).await == bench.home.content());
    let report = bench.pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
    assert!(report.faults.is_empty() && report.leftovers.is_empty(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_read_outlives_a_kill_and_what_was_flushed_a_power_cut() {
    let bench = Bench::copied(Keep::Read).await;
    read(&bench.clone_it("c").await, 1).await.unwrap();
    let bench = bench.restart(None).await;
    read(&session(&bench.pool, "c").await, 1).await.unwrap();
    assert_eq!(bench.home.reads()[1], 1);
    bench.pool.flush().await.unwrap();
    read(&session(&bench.pool, "c").await, 2).await.unwrap();
    let bench = bench.restart(Some(3)).await;
    let device = session(&bench.pool, "c").await;
    assert!(all(&device).await == bench.home.content());
    assert_eq!(bench.home.reads()[1..3], [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_here_is_served_while_the_other_host_is_away() {
    let bench = Bench::copied(Keep::Read).await;
    let device = bench.clone_it("c").await;
    read(&device, 1).await.unwrap();
    device.write(5 * 4096, bytes(9, BLOCK), false).await.unwrap();
    bench.home.away.store(true, Ordering::SeqCst);
    read(&device, 1).await.unwrap();
    assert_eq!(read(&device, 5).await.unwrap(), bytes(9, BLOCK));
    assert!(matches!(read(&device, 2).await, Err(IoError::Unreachable(_))));
    assert_eq!(bench.fill().await.unwrap_err().kind, ProblemKind::Unavailable);
    bench.home.away.store(false, Ordering::SeqCst);
    read(&device, 2).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_does_not_answer_is_waited_for_until_a_deadline() {
    let (dir, files, home) = (tempfile::tempdir().unwrap(), Arc::default(), Home::new());
    let pool = open(&dir, &files, &home, 1);
    let request = CopyImage {
        content: None,
        nbd_addr: "there:1".to_owned(),
        export: None,
        keep: Keep::Read,
        layer: None,
    };
    pool.copy_image(&image_name("i"), request).await.unwrap();
    drop(pool);
    // Nobody is there any more: `reach` knows this address only.
    let catalog = rusqlite::Connection::open(dir.path().join("catalog.sqlite")).unwrap();
    catalog.execute("UPDATE remote_parents SET nbd_addr = 'gone:1'", []).unwrap();
    let pool = open(&dir, &files, &home, 1);
    let image = pool.open_image(&image_name("i")).await.unwrap();
    let Err(IoError::Unreachable(why)) = read(&image, 0).await else { panic!("it is gone") };
    assert!(why.contains("image:i at gone:1"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_that_is_another_layer_than_the_one_wanted_is_not_copied() {
    let bench = Bench::new();
    let request = |layer| CopyImage {
        content: None,
        nbd_addr: "there:1".to_owned(),
        export: None,
        keep: Keep::All,
        layer: Some(layer),
    };
    let wrong = request(LayerId(uuid::Uuid::new_v4()));
    let refused = bench.pool.copy_image(&image_name("i"), wrong).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert!(bench.pool.images().await.unwrap().is_empty());
    let layer = bench.copy(Keep::All).await.unwrap().layer;
    bench.pool.copy_image(&image_name("i"), request(layer)).await.expect("the same again");
}

#[tokio::test(flavor = "multi_thread")]
async fn data_that_may_not_leave_its_site_is_never_kept() {
    let bench = Bench::copied(Keep::Never).await;
    let device = bench.clone_it("c").await;
    assert!(all(&device).await == bench.home.content());
    assert!(all(&device).await == bench.home.content());
    assert_eq!(bench.home.reads()[0], 2);
    device.write(0, bytes(9, BLOCK), true).await.unwrap();
    let head = bench.pool.volume_info(&volume_name("c")).await.unwrap().chain[0].to_string();
    let foreign: Vec<_> =
        bench.files.disk().names().into_iter().filter(|name| !name.starts_with(&head)).collect();
    assert!(foreign.is_empty(), "{foreign:?}");
    assert_eq!(bench.fill().await.unwrap_err().kind, ProblemKind::Conflict);
    let kept = bench.pool.keep_image(&image_name("i"), Keep::All).await;
    assert_eq!(kept.unwrap_err().kind, ProblemKind::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_keeps_nobody_from_reading() {
    let bench = Bench::copied(Keep::Read).await;
    let device = bench.clone_it("c").await;
    read(&device, 0).await.unwrap();
    bench.settle().await;
    let data = bench.files.file(&data_name(bench.info().await.layer));
    data.full.store(true, Ordering::SeqCst);
    assert!(all(&device).await == bench.home.content());
    bench.settle().await;
    assert_eq!(bench.fill().await.unwrap_err().kind, ProblemKind::NoSpace);
    assert!(all(&device).await == bench.home.content());
    data.full.store(false, Ordering::SeqCst);
    assert_eq!(bench.fill().await.unwrap().remote, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_files_fail_is_read_from_the_other_host_and_begins_anew() {
    let bench = Bench::copied(Keep::Read).await;
    let device = bench.clone_it("c").await;
    assert!(all(&device).await == bench.home.content());
    bench.settle().await;
    let data = bench.files.file(&data_name(bench.info().await.layer));
    data.fail_sync.store(true, Ordering::SeqCst);
    bench.pool.flush().await.unwrap_err();
    data.write_at(0, &[0xbd; BLOCK]).unwrap();
    assert!(all(&device).await == bench.home.content(), "nothing of it is believed");
    assert_eq!(bench.fill().await.unwrap_err().kind, ProblemKind::Conflict);
    drop((device, data));
    let bench = bench.restart(None).await;
    assert_eq!(bench.missing_bytes().await, (BLOCKS * BLOCK) as u64);
    assert!(all(&session(&bench.pool, "c").await).await == bench.home.content());
    assert_eq!(bench.fill().await.unwrap().remote, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_are_snapshotted_resized_compacted_and_checked_over_a_copy() {
    let bench = Bench::copied(Keep::Read).await;
    let device = bench.clone_it("c").await;
    let mut expected = bench.home.content();
    for round in 1..=3 {
        let at = usize::from(round) * 2 * BLOCK + 100;
        device.write(at as u64, bytes(round, 600), false).await.unwrap();
        expected[at..at + 600].fill(round);
        let resize = Resize { size_bytes: (expected.len() + BLOCK) as u64, shrink: false };
        bench.pool.resize_volume(&volume_name("c"), resize).await.unwrap();
        expected.extend([0; BLOCK]);
    }
    let compacted = bench.pool.compact_volume(&volume_name("c"), Arc::default()).await.unwrap();
    assert_eq!((compacted.layers_before, compacted.layers_after), (5, 2));
    let partly_here = bench.missing_bytes().await;
    assert!(partly_here > 0, "compacting fetches nothing");
    let request = Snapshot { image: image_name("s") };
    bench.pool.snapshot(&volume_name("c"), request).await.unwrap();
    let report = bench.pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
    assert!(report.faults.is_empty(), "{report:?}");
    let snapshot = bench.pool.open_image(&image_name("s")).await.unwrap();
    assert!(all(&snapshot).await == expected);
    assert!(all(&device).await == expected);
    bench.fill().await.unwrap();
    bench.home.away.store(true, Ordering::SeqCst);
    assert!(all(&device).await == expected && all(&snapshot).await == expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_here_says_so() {
    let bench = Bench::copied(Keep::Read).await;
    let device = bench.clone_it("c").await;
    read(&device, 1).await.unwrap();
    read(&device, HOLE.start).await.unwrap();
    device.write(3 * 4096, bytes(9, BLOCK), false).await.unwrap();
    bench.settle().await;
    let run = |blocks: u64, origin| OriginRun { length_bytes: blocks * 4096, origin };
    let expected = [
        run(1, Origin::Remote),
        run(1, Origin::Source),
        run(1, Origin::Remote),
        run(1, Origin::Head),
        run(4, Origin::Remote),
        run(1, Origin::Nobody),
        run(15, Origin::Remote),
    ];
    assert_eq!(device.origins(0, (BLOCKS * BLOCK) as u64).await.unwrap(), expected);
    let allocation = device.extents(0, (BLOCKS * BLOCK) as u64).await.unwrap();
    let zero_bytes: u64 = allocation.iter().filter(|e| e.zero).map(|e| e.length_bytes).sum();
    // The block in which the image ends counts as data.
    assert_eq!(zero_bytes, (HOLE.len() * BLOCK) as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_copy_is_not_completed() {
    let bench = Bench::copied(Keep::All).await;
    let held = bench.home.gate.acquire_many(1000).await.unwrap();
    let filling = tokio::spawn({
        let pool = Arc::clone(&bench.pool);
        async move { pool.fill_image(&image_name("i"), Arc::<Work>::default()).await }
    });
    // Either order has to be right.
    tokio::task::yield_now().await;
    bench.pool.delete_image(&image_name("i")).await.unwrap();
    drop(held);
    drop(filling.await.unwrap());
    assert_eq!(bench.files.disk().names(), Vec::<String>::new());
    bench.copy(Keep::All).await.unwrap();
    assert_eq!(bench.fill().await.unwrap().remote, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_power_cut_brings_back_nothing_of_a_copy_that_was_deleted_before() {
    for seed in 0..12 {
        let bench = Bench::copied(Keep::Read).await;
        let image = bench.pool.open_image(&image_name("i")).await.unwrap();
        all(&image).await;
        bench.settle().await;
        bench.pool.flush().await.unwrap();
        bench.pool.delete_image(&image_name("i")).await.unwrap();
        bench.copy(Keep::Read).await.unwrap();
        let image = bench.pool.open_image(&image_name("i")).await.unwrap();
        read(&image, 1).await.unwrap();
        let bench = bench.restart(Some(seed)).await;
        let image = bench.pool.open_image(&image_name("i")).await.unwrap();
        assert!(all(&image).await == bench.home.content(), "seed {seed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_background_completes_what_is_to_be_kept_whole() {
    let bench = Bench::copied(Keep::Read).await;
    let background = tokio::spawn(Arc::clone(&bench.pool).fill_copies(1 << 30));
    bench.pool.keep_image(&image_name("i"), Keep::All).await.unwrap();
    let started = std::time::Instant::now();
    while bench.info().await.remote.is_some() {
        assert!(started.elapsed() < Duration::from_secs(120), "{:?}", bench.info().await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    background.abort();
    bench.home.away.store(true, Ordering::SeqCst);
    assert!(all(&bench.clone_it("c").await).await == bench.home.content());
}

#[tokio::test(flavor = "multi_thread")]
async fn another_layer_of_the_same_name_is_never_mixed_in() {
    let bench = Bench::copied(Keep::Read).await;
    read(&bench.clone_it("c").await, 0).await.unwrap();
    bench.settle().await;
    let Bench { dir, files, pool, .. } = bench;
    drop(pool);
    let mut other = Home::new();
    Arc::get_mut(&mut other).unwrap().layer = Some(LayerId(Uuid::from_u128(78)));
    let pool = open(&dir, &files, &other, 1);
    let device = session(&pool, "c").await;
    read(&device, 0).await.unwrap();
    let Err(IoError::Unreachable(why)) = read(&device, 1).await else { panic!("another layer") };
    assert!(why.contains("it is now layer"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_goes_on_by_the_image_s_name_and_by_its_layer() {
    let bench = Bench::copied(Keep::Never).await;
    bench.settle().await;
    let Bench { dir, files, home, pool, boot } = bench;
    drop(pool);
    // An access list may know only the name, and hosts of a cluster give images by their layers only.
    for prefix in ["image:i", "layer:"] {
        let shown = Arc::clone(&home);
        let connect = move |_: String, export: String| -> BoxFuture<'static, _> {
            let missing = || perigee_model::Problem::not_found("can't open it", "it is not there");
            let device = export.starts_with(prefix).then(|| Arc::clone(&shown) as Arc<dyn Device>);
            Box::pin(async move { device.ok_or_else(missing) })
        };
        let patience = Duration::from_secs(10);
        let connect = Connector { patience, connect: Arc::new(connect) };
        let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect };
        let files = Arc::clone(&files) as _;
        let pool = Pool::open_with(config, files, Uuid::from_u128(boot)).unwrap();
        let image = pool.open_image(&image_name("i")).await.unwrap();
        let found = read(&image, 1).await.unwrap();
        assert_eq!(found, home.content()[BLOCK..2 * BLOCK], "{prefix}");
    }
}
