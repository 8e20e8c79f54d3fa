//! The rules of the layer store, one by one, on files that fail when told to.
//!
//! Which test fails when a rule is broken. Each line that says how was seen to fail, with the code
//! changed so. The tests of `power` are its workloads: `cuts` a power cut and a kill at every operation, `faults`
//! every operation failing.
//!
//! | rule | broken how | what fails |
//! |---|---|---|
//! | 1 order of a flush | states taken after the data sync; the flag cleared after it | `states_that_change_during_a_flush_belong_to_the_next_one`, `power::faults` |
//! | 1 | no data sync, no map sync, the new map's length not synced | `power::cuts`, `power::faults`, most tests here |
//! | 1 no needless map write | | `a_flush_without_new_blocks_leaves_the_map_alone` |
//! | 2 no state before its data | a live map of another boot believed | `a_live_map_of_another_boot_is_not_believed`, `power::cuts` |
//! | 2 | pages that a killed server left believed without a sync | `power::cuts` |
//! | a kill loses nothing answered | no live map; states written before the bytes | `what_was_acknowledged_outlives_a_kill_of_the_server`, `power::cuts` |
//! | 3 two slots and a checksum | one slot only; no checksum | `map::a_torn_page_costs_nothing_that_was_flushed`, `map::every_page_is_as_flushed_or_newer` |
//! | 4 a failed sync is final | the data's, the map's or the names' sync tried again | `a_failed_sync_makes_the_volume_read_only_for_good`, `power::faults` |
//! | 4 | not noted in the live map | `a_failed_sync_is_known_after_a_kill_that_comes_before_the_catalog_has_it` |
//! | 5 a full disk fails one request | the pages of that flush forgotten; the volume poisoned | `a_full_disk_fails_that_request_and_nothing_else`, `power::faults`, `full` |
//! | 6 zero, never absent | a discard makes a block absent | `zeros_hide_the_parent_and_the_hole_is_punched_after_the_flush`, `power` |
//! | 6 zero first, then the hole | punched before the flush; punched what was written again | the same, `a_block_written_again_is_not_punched`, `a_block_written_while_its_hole_is_about_to_be_punched_keeps_its_bytes` |
//! | 7 parts of blocks | stale bytes of a zero block; no block lock; a block not filled up | `a_small_write_into_a_zero_block_shows_no_stale_bytes`, `power`, `pool::no_write_is_lost_while_snapshots_are_taken` |
//! | 8 sealing | no flush, not drained, names not synced | `a_write_while_the_head_is_sealed_goes_into_the_new_head`, `power::cuts` |
//! | 9 hydration under a lock, only what is absent | no lock; the states not looked at under it | `copies::however_many_clones_read_at_once_each_block_is_fetched_once` |
//! | 9 serve first | answered after the write | `copies::who_reads_is_answered_before_it_is_written` |
//! | 10 growing | a parent shows beyond its end | `resize::what_a_shrunken_volume_had_does_not_come_back_when_it_grows`, `compact`, `power::cuts` |
//! | 10 one inode for all clones | | `clones_share_the_open_layer_below` |
//! | 11 a deleted snapshot | | `released`, `power::cuts::deleted_snapshots_that_are_merged_survive_a_cut_at_every_point` |
//! | 11 deep chains | the index names the wrong layer | `compact`, `resize`, `power::cuts::resizes_and_merged_chains_survive_a_cut_at_every_point` |

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use perigee_model::volume::{EpochChange, Snapshot, VolumeHealth, VolumeSource};
use perigee_model::{Epoch, LayerId, ProblemKind};

use super::*;
use crate::disk::blocks::BlockState;
use crate::disk::files::LayerFiles;
use crate::layers::head::{Head, HeadHome};
use crate::layers::layer::{data_name, live_name, map_name};
use crate::sim::{Dice, SimFile};

const BLOCK: usize = 4096;

/// A pool on simulated files, with one empty volume `v` of eight blocks.
struct Bench {
    dir: tempfile::TempDir,
    files: Arc<SimFiles>,
    pool: Arc<Pool>,
    device: Arc<dyn Device>,
    boot: u128,
}

impl Bench {
    async fn new() -> Self {
        let (dir, files) = (tempfile::tempdir().unwrap(), Arc::default());
        let pool = open_sim(dir.path(), &files, 1);
        let device = empty(&pool, "v", 8 * 4096).await;
        Self { dir, files, pool, device, boot: 1 }
    }

    async fn kill_and_restart(self) -> Self {
        let Self { dir, files, pool, device, boot } = self;
        drop((pool, device));
        let pool = open_sim(dir.path(), &files, boot);
        let device = session(&pool, "v").await;
        Self { dir, files, pool, device, boot }
    }

    async fn power_cut(mut self, seed: u64) -> Self {
        self.files.power_cut(&mut Dice(seed));
        self.boot += 1;
        self.kill_and_restart().await
    }

    async fn head(&self) -> LayerId {
        self.pool.volume_info(&volume_name("v")).await.unwrap().chain[0]
    }

    async fn file(&self, name: fn(LayerId) -> String) -> Arc<SimFile> {
        self.files.file(&name(self.head().await))
    }

    async fn snapshot(&self, name: &str) {
        let request = Snapshot { image: image_name(name) };
        self.pool.snapshot(&volume_name("v"), request).await.unwrap();
    }
}

fn home(files: &Arc<SimFiles>, boot: u128) -> Arc<HeadHome> {
    let boot = Uuid::from_u128(boot);
    Arc::new(HeadHome { files: files.clone(), boot, record_touched: Box::new(|_| Ok(())) })
}

const ID: LayerId = LayerId(Uuid::from_u128(5));

/// A head of eight blocks whose first one has been written.
fn written_head(files: &Arc<SimFiles>) -> Arc<Head> {
    let head = Arc::new(Head::new(&home(files, 1), ID, 8 * 4096));
    write(&head, 0, 1);
    head
}

fn write(head: &Head, block: u64, byte: u8) {
    head.write(block * 4096, &[byte; BLOCK]).unwrap();
}

#[test]
fn states_that_change_during_a_flush_belong_to_the_next_one() {
    let files = Arc::default();
    let head = written_head(&files);
    let meanwhile = Arc::clone(&head);
    *files.file(&data_name(ID)).on_sync.lock().unwrap() =
        Some(Box::new(move || write(&meanwhile, 1, 2)));
    head.flush_now().unwrap();

    let durable = |boot| {
        let head = Head::open(&home(&files, boot), ID, 8 * 4096, false).unwrap();
        [0, 1].map(|block| head.layer.states.get(block))
    };
    assert_eq!(durable(2), [BlockState::Data, BlockState::Absent]);
    head.flush_now().unwrap();
    assert_eq!(durable(3), [BlockState::Data, BlockState::Data]);
}

#[test]
fn a_block_written_while_its_hole_is_about_to_be_punched_keeps_its_bytes() {
    let files = Arc::default();
    let head = written_head(&files);
    head.flush_now().unwrap();
    head.zero(0..2, Zeroing::FreeSpace).unwrap();
    let meanwhile = Arc::clone(&head);
    *files.file(&map_name(ID)).on_sync.lock().unwrap() =
        Some(Box::new(move || write(&meanwhile, 0, 2)));
    head.flush_now().unwrap();
    let mut found = [0; BLOCK];
    head.layer.data().read_at(0, &mut found).unwrap();
    assert_eq!(found, [2; BLOCK]);
    assert_eq!(files.file(&data_name(ID)).punched_bytes(), 4096, "the other block's hole");
}

#[test]
fn a_zero_that_came_during_a_flush_is_punched_after_the_next_one() {
    let files = Arc::default();
    let head = written_head(&files);
    let meanwhile = Arc::clone(&head);
    let data = files.file(&data_name(ID));
    *data.on_sync.lock().unwrap() =
        Some(Box::new(move || meanwhile.zero(0..1, Zeroing::FreeSpace).unwrap()));
    head.flush_now().unwrap();
    assert_eq!(data.punched_bytes(), 0, "the map says data");
    head.flush_now().unwrap();
    assert_eq!(data.punched_bytes(), 4096);
}

#[tokio::test]
async fn a_flush_without_new_blocks_leaves_the_map_alone() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
    let (map, data) = (bench.file(map_name).await, bench.file(data_name).await);
    let (map_syncs, data_syncs) = (map.syncs(), data.syncs());
    bench.device.write(100, bytes(2, 100), true).await.unwrap();
    assert_eq!((map.syncs(), data.syncs()), (map_syncs, data_syncs + 1));
    bench.device.flush().await.unwrap();
    assert_eq!(data.syncs(), data_syncs + 1, "nothing was written since");
}

#[tokio::test]
async fn what_was_acknowledged_outlives_a_kill_of_the_server() {
    let bench = Bench::new().await;
    bench.device.write(10, bytes(1, BLOCK), false).await.unwrap();
    bench.device.zero(0, 100, Zeroing::FreeSpace, false).await.unwrap();
    let bench = bench.kill_and_restart().await;
    let expected = [vec![0; 100], vec![1; 4006], vec![0; 6 * 4096 + 4086]].concat();
    assert_eq!(all(&bench.device).await, expected);
    bench.device.flush().await.unwrap();
    let bench = bench.power_cut(1).await;
    assert_eq!(all(&bench.device).await, expected, "the flush made durable what it found");
}

#[tokio::test]
async fn a_live_map_of_another_boot_is_not_believed() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
    bench.device.write(4096, bytes(2, BLOCK), false).await.unwrap();
    // The live map is on the disk as it is, the second block's data may not be.
    bench.file(live_name).await.on_sync.lock().unwrap().take();
    let mut bench = bench;
    bench.boot += 1;
    let bench = bench.kill_and_restart().await;
    assert_eq!(all(&bench.device).await, [vec![1; BLOCK], vec![0; 7 * BLOCK]].concat());
}

#[tokio::test]
async fn a_failed_sync_makes_the_volume_read_only_for_good() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
    bench.device.write(0, bytes(2, 1), false).await.unwrap();
    let data = bench.file(data_name).await;
    data.fail_sync.store(true, Ordering::SeqCst);
    assert!(matches!(bench.device.flush().await, Err(IoError::Poisoned(_))));
    data.fail_sync.store(false, Ordering::SeqCst);
    assert!(matches!(bench.device.flush().await, Err(IoError::Poisoned(_))), "not tried again");

    let bench = bench.kill_and_restart().await;
    assert_eq!(bench.device.read(1, 1).await.unwrap()[..], [1]);
    let write = bench.device.write(0, bytes(3, 1), false).await;
    assert!(matches!(write, Err(IoError::Poisoned(_))));
    let zero = bench.device.zero(0, 4096, Zeroing::FreeSpace, false).await;
    assert!(matches!(zero, Err(IoError::Poisoned(_))));
    let info = bench.pool.volume_info(&volume_name("v")).await.unwrap();
    assert_eq!(info.health, VolumeHealth::Poisoned);
    let request = Snapshot { image: image_name("s") };
    let snapshot = bench.pool.snapshot(&volume_name("v"), request).await;
    assert_eq!(snapshot.unwrap_err().kind, ProblemKind::Conflict);
}

#[test]
fn a_failed_sync_is_known_after_a_kill_that_comes_before_the_catalog_has_it() {
    let files = Arc::default();
    let head = written_head(&files);
    head.flush_now().unwrap();
    write(&head, 1, 2);
    files.file(&data_name(ID)).fail_sync.store(true, Ordering::SeqCst);
    assert!(matches!(head.flush_now(), Err(IoError::Poisoned(_))));
    files.file(&data_name(ID)).fail_sync.store(false, Ordering::SeqCst);
    drop(head);
    let after = |boot| Head::open(&home(&files, boot), ID, 8 * 4096, false).unwrap();
    let killed = after(1);
    assert!(matches!(killed.flush_now(), Err(IoError::Poisoned(_))), "it would succeed");
    assert!(killed.check_writable().is_err());
    let rebooted = after(2);
    assert!(rebooted.poisoned().is_none(), "it has what was flushed, as after a power cut");
    assert_eq!(rebooted.layer.states.get(1), BlockState::Absent);
}

#[tokio::test]
async fn a_full_disk_fails_that_request_and_nothing_else() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, 2 * BLOCK), true).await.unwrap();
    bench.snapshot("s").await;
    // The new head has its files from now on.
    bench.device.write(7 * 4096, bytes(0, 1), false).await.unwrap();
    for name in [data_name, live_name] {
        let file = bench.file(name).await;
        file.full.store(true, Ordering::SeqCst);
        let write = bench.device.write(100, bytes(2, BLOCK), false).await;
        assert!(matches!(write, Err(IoError::NoSpace)), "{write:?}");
        file.full.store(false, Ordering::SeqCst);
        assert_eq!(bench.device.read(0, 8192).await.unwrap(), bytes(1, 8192));
    }
    let map = bench.file(map_name).await;
    bench.device.write(0, bytes(3, BLOCK), false).await.unwrap();
    map.full.store(true, Ordering::SeqCst);
    assert!(matches!(bench.device.flush().await, Err(IoError::NoSpace)));
    map.full.store(false, Ordering::SeqCst);
    bench.device.flush().await.expect("tried again, with the same pages");
    let bench = bench.power_cut(3).await;
    assert_eq!(bench.device.read(0, 8192).await.unwrap(), [[3; BLOCK], [1; BLOCK]].concat());
}

#[tokio::test]
async fn zeros_hide_the_parent_and_the_hole_is_punched_after_the_flush() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, 4 * BLOCK), false).await.unwrap();
    bench.snapshot("s").await;
    bench.device.write(0, bytes(2, 2 * BLOCK), true).await.unwrap();
    bench.device.zero(100, 3 * 4096, Zeroing::FreeSpace, false).await.unwrap();
    let data = bench.file(data_name).await;
    assert_eq!(data.punched_bytes(), 0, "zero is not durable yet");
    bench.device.flush().await.unwrap();
    assert_eq!(data.punched_bytes(), 2 * 4096);
    let bench = bench.power_cut(4).await;
    let expected = [vec![2; 100], vec![0; 3 * BLOCK], vec![1; BLOCK - 100]].concat();
    assert_eq!(bench.device.read(0, 4 * 4096).await.unwrap(), expected);
}

#[tokio::test]
async fn a_block_written_again_is_not_punched() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, 3 * BLOCK), true).await.unwrap();
    bench.device.zero(0, 3 * 4096, Zeroing::FreeSpace, false).await.unwrap();
    bench.device.write(4096, bytes(2, BLOCK), true).await.unwrap();
    let expected = [[0; BLOCK], [2; BLOCK], [0; BLOCK]].concat();
    assert_eq!(bench.device.read(0, 3 * 4096).await.unwrap(), expected);
    assert_eq!(bench.file(data_name).await.punched_bytes(), 2 * 4096);
}

#[tokio::test]
async fn zeros_that_keep_their_space_are_not_punched() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
    bench.device.zero(0, 4096, Zeroing::KeepSpace, true).await.unwrap();
    assert_eq!(bench.device.read(0, 4096).await.unwrap(), bytes(0, BLOCK));
    assert_eq!(bench.file(data_name).await.punched_bytes(), 0);
}

#[tokio::test]
async fn a_small_write_into_a_zero_block_shows_no_stale_bytes() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
    bench.device.zero(0, 4096, Zeroing::KeepSpace, false).await.unwrap();
    bench.device.write(1000, bytes(2, 10), false).await.unwrap();
    let expected = [vec![0; 1000], vec![2; 10], vec![0; 3086]].concat();
    assert_eq!(bench.device.read(0, 4096).await.unwrap(), expected);
}

#[tokio::test]
async fn a_sector_that_is_filled_up_is_never_half_old_and_half_zeros() {
    for seed in 0..16 {
        let bench = Bench::new().await;
        bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
        bench.device.zero(0, 4096, Zeroing::FreeSpace, false).await.unwrap();
        bench.device.write(100, bytes(2, 100), false).await.unwrap();
        let bench = bench.power_cut(seed).await;
        let sector = bench.device.read(0, 512).await.unwrap();
        let new = [vec![0; 100], vec![2; 100], vec![0; 312]].concat();
        assert!(sector == bytes(1, 512) || sector == new, "seed {seed}: {sector:?}");
    }
}

#[tokio::test]
async fn clones_share_the_open_layer_below() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), false).await.unwrap();
    bench.snapshot("s").await;
    let below = |volume: Arc<crate::Volume>| volume.stack().below;
    let own = below(bench.pool.volume(&volume_name("v")).await.unwrap());
    for name in ["a", "b"] {
        let clone = create(name, None, VolumeSource::Image(image_name("s")));
        bench.pool.create_volume(clone).await.unwrap();
        let shared = below(bench.pool.volume(&volume_name(name)).await.unwrap());
        assert!(Arc::ptr_eq(&own, &shared), "clone {name} opened the layer again");
    }
}

#[tokio::test]
async fn a_remote_parent_is_read_through_and_hidden_by_writes() {
    let bench = Bench::new().await;
    let remote = |nbd_addr: &str| VolumeSource::Remote {
        nbd_addr: nbd_addr.to_owned(),
        export: "image:x".to_owned(),
    };
    let gone = bench.pool.create_volume(create("g", None, remote("gone:1"))).await.unwrap_err();
    assert_eq!(gone.kind, ProblemKind::Unavailable);
    let info = bench.pool.create_volume(create("r", Some(8 * 4096), remote("there:1"))).await;
    assert_eq!((info.as_ref().unwrap().size_bytes, info.unwrap().allocated_bytes), (8 * 4096, 0));

    let device = session(&bench.pool, "r").await;
    let mut expected = remote_bytes();
    expected.resize(8 * BLOCK, 0);
    device.write(5000, bytes(9, 5000), false).await.unwrap();
    expected[5000..10000].fill(9);
    assert_eq!(all(&device).await, expected);
    let behind_its_end = device.read(5 * 4096 + 1000, 100).await.unwrap();
    assert_eq!(behind_its_end, bytes(0, 100));
    let extents = device.extents(0, 8 * 4096).await.unwrap();
    // The block in which the export ends counts as data, all of it.
    let data = Extent { length_bytes: 6 * 4096, hole: false, zero: false };
    let beyond = Extent { length_bytes: 2 * 4096, hole: true, zero: true };
    assert_eq!(extents, [data, beyond]);
}

#[tokio::test]
async fn extents_tell_data_from_holes() {
    let bench = Bench::new().await;
    bench.device.write(2 * 4096, bytes(1, 2 * BLOCK), false).await.unwrap();
    bench.device.zero(3 * 4096, 4096, Zeroing::FreeSpace, false).await.unwrap();
    let hole = |length_bytes| Extent { length_bytes, hole: true, zero: true };
    let data = |length_bytes| Extent { length_bytes, hole: false, zero: false };
    let extents = bench.device.extents(4096 + 10, 5 * 4096).await.unwrap();
    assert_eq!(extents, [hole(4086), data(4096), hole(3 * 4096 + 10)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn raising_the_epoch_waits_for_a_write_in_flight() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(0, 1), false).await.unwrap();
    let (release, released) = mpsc::channel::<()>();
    let (started, mut has_started) = tokio::sync::mpsc::channel(1);
    *bench.file(data_name).await.on_write.lock().unwrap() = Some(Box::new(move || {
        started.try_send(()).unwrap();
        released.recv_timeout(Duration::from_secs(120)).expect("released within 120 s");
    }));
    let device = Arc::clone(&bench.device);
    let write = tokio::spawn(async move { device.write(0, bytes(1, BLOCK), false).await });
    has_started.recv().await.unwrap();

    let volume = bench.pool.volume(&volume_name("v")).await.unwrap();
    volume.issue_epoch().await.unwrap();
    let from = volume.epoch();
    let change = EpochChange { from, to: from.next().unwrap() };
    let raise = tokio::spawn({
        let volume = Arc::clone(&volume);
        async move { volume.change_epoch(change).await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!raise.is_finished(), "a write of the old epoch is in flight");
    release.send(()).unwrap();
    write.await.unwrap().unwrap();
    raise.await.unwrap().unwrap();
    let late = bench.device.write(0, bytes(2, 1), false).await;
    assert!(matches!(late, Err(IoError::Fenced { .. })));
}

#[tokio::test]
async fn a_raise_that_comes_after_it_was_taken_back_is_refused() {
    let bench = Bench::new().await;
    let volume = bench.pool.volume(&volume_name("v")).await.unwrap();
    let first = volume.epoch();
    let change = async |from, to| {
        let epoch = |number: u64| Epoch(first.0 + number - 1);
        volume.change_epoch(EpochChange { from: epoch(from), to: epoch(to) }).await
    };
    volume.issue_epoch().await.unwrap();
    // The raise to 2 is on its way and lost for now; its migration has given up.
    change(2, 1).await.unwrap();
    let late = change(1, 2).await.unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    bench.device.write(0, bytes(1, 1), false).await.expect("the writer is as before");
    volume.issue_epoch().await.unwrap();
    change(1, 3).await.expect("the next migration");
    change(1, 3).await.expect("a repeated call");
    change(3, 1).await.expect("back");
    change(3, 1).await.expect("a repeated call");
    assert_eq!(volume.epoch(), first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_while_the_head_is_sealed_goes_into_the_new_head() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), false).await.unwrap();
    let (release, released) = mpsc::channel::<()>();
    let (started, mut has_started) = tokio::sync::mpsc::channel(1);
    let data = bench.file(data_name).await;
    let (second, third) = (Arc::clone(&data), Arc::clone(&data));
    let writer = Arc::clone(&bench.device);
    // The flush that writers wait for is the third one, of what came during the second.
    *data.on_sync.lock().unwrap() = Some(Box::new(move || {
        assert!(matches!(writer.try_write(0, &[1; BLOCK]), Some(Ok(()))), "nobody waits yet");
        *second.on_sync.lock().unwrap() = Some(Box::new(move || {
            assert!(matches!(writer.try_write(0, &[1; BLOCK]), Some(Ok(()))), "still nobody");
            *third.on_sync.lock().unwrap() = Some(Box::new(move || {
                started.try_send(()).unwrap();
                released.recv_timeout(Duration::from_secs(120)).expect("released within 120 s");
            }));
        }));
    }));
    let pool = Arc::clone(&bench.pool);
    let snapshot = tokio::spawn(async move {
        let request = Snapshot { image: image_name("s") };
        pool.snapshot(&volume_name("v"), request).await
    });
    has_started.recv().await.unwrap();
    let device = Arc::clone(&bench.device);
    let write = tokio::spawn(async move { device.write(0, bytes(2, BLOCK), false).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!write.is_finished(), "the head is being sealed");
    release.send(()).unwrap();
    snapshot.await.unwrap().unwrap();
    write.await.unwrap().unwrap();
    let image = bench.pool.open_image(&image_name("s")).await.unwrap();
    assert_eq!(image.read(0, 4096).await.unwrap(), bytes(1, BLOCK));
    assert_eq!(bench.device.read(0, 4096).await.unwrap(), bytes(2, BLOCK));
}

#[tokio::test]
async fn a_request_beyond_the_end_is_refused() {
    let bench = Bench::new().await;
    for (offset, length) in [(8 * 4096, 1), (u64::MAX, 2)] {
        let read = bench.device.read(offset, length).await;
        assert!(matches!(read, Err(IoError::Invalid(_))));
        let zero = bench.device.zero(offset, length.into(), Zeroing::FreeSpace, false).await;
        assert!(matches!(zero, Err(IoError::Invalid(_))));
    }
    bench.device.write(8 * 4096, Bytes::new(), false).await.expect("nothing is nothing");
}

#[tokio::test]
async fn what_needs_no_waiting_is_done_at_once_and_reads_as_ever() {
    let bench = Bench::new().await;
    let mut found = vec![9; 3 * BLOCK];
    bench.device.try_read(100, &mut found).expect("zeros are known").unwrap();
    assert_eq!(found, [0; 3 * BLOCK]);
    assert!(bench.device.try_write(0, &[1; BLOCK]).is_none(), "there are no files yet");
    bench.device.write(0, bytes(1, BLOCK), false).await.unwrap();
    bench.device.try_write(4096, &[2; 2 * BLOCK]).expect("whole blocks").unwrap();
    bench.device.try_write(4000, &[3; 200]).expect("parts of blocks that are there").unwrap();
    assert!(bench.device.try_write(12288, &[4; 100]).is_none(), "it would have to be filled up");
    let expected = [vec![1; 4000], vec![3; 200], vec![2; 2 * BLOCK - 104], vec![0; 96]].concat();
    let mut found = vec![9; expected.len()];
    bench.device.try_read(0, &mut found).expect("it is all in memory").unwrap();
    assert_eq!(found, expected);
    let bench = bench.kill_and_restart().await;
    assert_eq!(bench.device.read(0, 3 * 4096 + 96).await.unwrap(), expected);
}

#[tokio::test]
async fn a_write_at_once_is_refused_as_any_other() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
    let volume = bench.pool.volume(&volume_name("v")).await.unwrap();
    let other = volume.session(Some(Epoch(2)));
    let fenced = other.try_write(0, &[2; BLOCK]).expect("an answer");
    assert!(matches!(fenced, Err(IoError::Fenced { .. })));
    let beyond = bench.device.try_write(8 * 4096 - 1, &[2; 2]).expect("an answer");
    assert!(matches!(beyond, Err(IoError::Invalid(_))));
    bench.device.write(0, bytes(2, 1), false).await.unwrap();
    bench.file(data_name).await.fail_sync.store(true, Ordering::SeqCst);
    assert!(bench.device.flush().await.is_err());
    let poisoned = bench.device.try_write(0, &[3; BLOCK]).expect("an answer");
    assert!(matches!(poisoned, Err(IoError::Poisoned(_))));
}

#[tokio::test]
async fn an_untouched_head_is_empty_whatever_a_crash_left_of_its_files() {
    for seed in 0..8 {
        let bench = Bench::new().await;
        bench.device.write(0, bytes(1, 3 * BLOCK), false).await.unwrap();
        let bench = bench.power_cut(seed).await;
        assert_eq!(all(&bench.device).await, [0; 8 * BLOCK], "nothing was flushed");
        bench.device.write(4096, bytes(2, BLOCK), true).await.unwrap();
        let bench = bench.power_cut(seed).await;
        assert_eq!(bench.device.read(0, 8192).await.unwrap(), [[0; BLOCK], [2; BLOCK]].concat());
    }
    // Files that were made and not written to, then none but one.
    let bench = Bench::new().await;
    let head = bench.head().await;
    for name in [data_name(head), map_name(head), live_name(head)] {
        bench.files.create(&name, 4096).unwrap();
    }
    let bench = bench.kill_and_restart().await;
    assert_eq!(all(&bench.device).await, [0; 8 * BLOCK]);
    for name in [data_name(head), live_name(head)] {
        bench.files.remove(&name).unwrap();
    }
    let bench = bench.kill_and_restart().await;
    assert_eq!(all(&bench.device).await, [0; 8 * BLOCK]);
    bench.device.write(0, bytes(3, BLOCK), true).await.expect("the files are made anew");
}

#[tokio::test]
async fn a_head_that_was_flushed_is_never_taken_for_an_empty_one() {
    let bench = Bench::new().await;
    bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
    let head = bench.head().await;
    for name in [map_name(head), data_name(head)] {
        bench.files.remove(&name).unwrap();
    }
    let Bench { dir, files, pool, device, .. } = bench;
    drop((pool, device));
    let pool = open_sim(dir.path(), &files, 1);
    let Err(problem) = pool.volume(&volume_name("v")).await else { panic!("its files are gone") };
    assert!(problem.why.contains(&head.to_string()), "{problem}");
}

#[tokio::test]
async fn an_untouched_head_can_be_sealed() {
    let bench = Bench::new().await;
    bench.snapshot("s").await;
    bench.device.write(0, bytes(1, BLOCK), true).await.unwrap();
    let bench = bench.power_cut(1).await;
    let image = bench.pool.open_image(&image_name("s")).await.unwrap();
    assert_eq!(all(&image).await, [0; 8 * BLOCK]);
    assert_eq!(bench.device.read(0, 4096).await.unwrap(), bytes(1, BLOCK));
}
