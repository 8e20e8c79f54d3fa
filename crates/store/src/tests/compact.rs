//! Merged chains read as before, whatever was in them, and a crash leaves one or the other.

use perigee_model::leave_site::{LeaveSite, SetLeaveSite};
use perigee_model::volume::{CheckScope, Resize, Snapshot, VolumeSource};

use super::*;
use crate::Work;
use crate::catalog::{LayerRow, NewVolume, first_epoch};
use crate::homes::confined::Data;
use perigee_model::{LayerId, ProblemKind};

const BLOCKS: u64 = 64;

async fn compact(pool: &Arc<Pool>, name: &str) -> Result<(u64, u64), ProblemKind> {
    let done = pool.compact_volume(&volume_name(name), Arc::default()).await;
    done.map(|done| (done.layers_before, done.layers_after)).map_err(|problem| problem.kind)
}

/// Seals the head under a name that goes again, so that nothing but the chain needs the layer.
async fn seal(pool: &Arc<Pool>, name: &str) {
    let image = image_name("passing");
    pool.snapshot(&volume_name(name), Snapshot { image: image.clone() }).await.unwrap();
    pool.catalog.delete_image(&image).unwrap();
}

async fn resize(pool: &Arc<Pool>, name: &str, blocks: u64) {
    let request = Resize { size_bytes: blocks * 4096, shrink: true };
    pool.resize_volume(&volume_name(name), request).await.unwrap();
}

/// Volume `v` over image `base`, with sealed layers that hide each other in all ways.
async fn deep(pool: &Arc<Pool>) -> Arc<dyn Device> {
    let device = empty(pool, "v", BLOCKS * 4096).await;
    device.write(0, bytes(9, 64 * 4096), false).await.unwrap();
    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("base") }).await.unwrap();
    for layer in 0..5_u8 {
        let at = u64::from(layer) * 5 * 4096;
        device.write(at, bytes(layer + 1, 10 * 4096), false).await.unwrap();
        device.zero(at + 4 * 4096, 2 * 4096, Zeroing::FreeSpace, false).await.unwrap();
        device.write(at + 100, bytes(layer + 100, 300), false).await.unwrap();
        seal(pool, "v").await;
    }
    device
}

#[tokio::test]
async fn a_merged_chain_reads_as_before_and_writes_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = deep(&pool).await;
    let mut expected = all(&device).await;
    assert_eq!(compact(&pool, "v").await, Ok((7, 2)), "head, image");
    assert_eq!(all(&device).await, expected);
    device.write(7 * 4096 + 5, bytes(77, 5000), true).await.unwrap();
    expected[7 * 4096 + 5..7 * 4096 + 5005].fill(77);
    assert_eq!(all(&device).await, expected);
    assert_eq!(compact(&pool, "v").await, Ok((2, 2)), "nothing is left to merge");

    let report = pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
    assert_eq!((report.faults, report.leftovers), (vec![], vec![]));
    drop((device, pool));
    let pool = open_real(dir.path()).await;
    assert_eq!(all(&session(&pool, "v").await).await, expected, "opened again");
}

#[tokio::test]
async fn what_is_confined_stays_so_when_its_marked_layers_are_merged() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    drop(deep(&pool).await);
    let (volume, base) = (Data::Volume(volume_name("v")), Data::Image(image_name("base")));
    let never = SetLeaveSite { leave_site: LeaveSite::Never, confirmed: false };
    let set = pool.set_leave_site(&volume, never).await.unwrap();
    assert_eq!((set.layers.len(), set.may_leave), (6, vec!["image base".to_owned()]));
    assert_eq!(compact(&pool, "v").await, Ok((7, 2)), "head, image");
    seal(&pool, "v").await;
    drop(pool);
    let pool = open_real(dir.path()).await;
    assert_eq!(pool.leave_site(&volume).await.unwrap(), Some(LeaveSite::Never));
    assert_eq!(pool.leave_site(&base).await.unwrap(), Some(LeaveSite::Allowed));
}

#[tokio::test]
async fn what_others_need_stays() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = deep(&pool).await;
    let expected = all(&device).await;
    // A clone stands on the topmost sealed layer: no head can take it.
    let clone = create("c", None, VolumeSource::Volume(volume_name("v")));
    pool.create_volume(clone).await.unwrap();
    let shared = pool.volume_info(&volume_name("c")).await.unwrap().chain;
    assert_eq!(compact(&pool, "v").await, Ok((7, 3)), "head, the layer that both stand on, image");
    for name in ["v", "c"] {
        assert_eq!(all(&session(&pool, name).await).await, expected, "{name}");
    }
    let chain = pool.volume_info(&volume_name("c")).await.unwrap().chain;
    assert_eq!((chain.len(), chain[2]), (3, shared[6]), "its head, the same layer, image");
    assert_eq!(pool.volume_info(&volume_name("v")).await.unwrap().chain[1..], chain[1..]);
    drop((device, pool));
    let pool = open_real(dir.path()).await;
    assert_eq!(all(&session(&pool, "c").await).await, expected, "opened again");
}

#[tokio::test]
async fn the_end_of_a_merged_layer_still_hides_what_is_below() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = deep(&pool).await;
    drop(device);
    resize(&pool, "v", 30).await;
    resize(&pool, "v", BLOCKS).await;
    resize(&pool, "v", BLOCKS + 9).await;
    let device = session(&pool, "v").await;
    let expected = all(&device).await;
    assert!(expected[30 * 4096..].iter().all(|byte| *byte == 0));
    assert_eq!(compact(&pool, "v").await, Ok((10, 2)));
    assert_eq!(all(&device).await, expected);
}

#[tokio::test]
async fn a_remote_parent_stays_below_the_merged_layer() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let there = VolumeSource::Remote { nbd_addr: "there:1".into(), export: "image:x".into() };
    pool.create_volume(create("v", Some(8 * 4096), there)).await.unwrap();
    let device = session(&pool, "v").await;
    for block in [1, 3] {
        device.write(block * 4096, bytes(9, 4096), false).await.unwrap();
        seal(&pool, "v").await;
    }
    let expected = all(&device).await;
    assert_eq!(compact(&pool, "v").await, Ok((3, 1)), "the head is over the other host");
    assert_eq!(all(&device).await, expected);
    assert_eq!(&expected[..4096], &remote_bytes()[..4096]);
}

#[tokio::test]
async fn a_layer_that_is_named_meanwhile_stops_the_change_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = deep(&pool).await;
    let expected = all(&device).await;
    let chain = pool.volume_info(&volume_name("v")).await.unwrap().chain;
    let base = pool.catalog.chain(chain[0]).unwrap();
    let by = LayerRow::new(LayerId(Uuid::new_v4()), BLOCKS * 4096, base[3].parent);
    let clone = LayerRow::new_head(BLOCKS * 4096, Some(chain[3]));
    let volume = NewVolume {
        name: volume_name("c"),
        head: clone,
        epoch: first_epoch(),
        tenant: Default::default(),
        cache: Default::default(),
        owner: None,
    };
    pool.catalog.add_volumes(&[volume]).unwrap();
    assert!(!pool.catalog.replace_layers(&chain[2..4], &by).unwrap(), "a clone stands on it");
    assert!(!pool.catalog.replace_layers(&[chain[2], chain[4]], &by).unwrap(), "no neighbours");
    assert_eq!(all(&device).await, expected);
}

#[tokio::test]
async fn a_damaged_layer_is_not_sealed_anew() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let _device = deep(&pool).await;
    let chain = pool.volume_info(&volume_name("v")).await.unwrap().chain;
    let rows = pool.catalog.chain(chain[0]).unwrap();
    pool.make_checksums(&rows[2], &Work::default()).unwrap();
    let path = dir.path().join("layers").join(format!("{}.data", chain[2]));
    let mut damaged = std::fs::read(&path).unwrap();
    damaged[16 * 4096 + 10] ^= 1;
    std::fs::write(&path, damaged).unwrap();
    assert_eq!(compact(&pool, "v").await, Err(ProblemKind::Conflict));
    assert_eq!(pool.volume_info(&volume_name("v")).await.unwrap().chain, chain);
}

#[tokio::test]
async fn work_that_is_stopped_leaves_the_chain_and_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let _device = deep(&pool).await;
    let work = Arc::new(Work::default());
    work.stop();
    let stopped = pool.compact_volume(&volume_name("v"), work).await.unwrap_err();
    assert_eq!(stopped.kind, ProblemKind::Unavailable, "{stopped}");
    assert_eq!(pool.volume_info(&volume_name("v")).await.unwrap().chain.len(), 7);
    let report = pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
    assert_eq!((report.faults, report.leftovers), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keeper_merges_a_deep_chain_while_clients_write() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", BLOCKS * 4096).await;
    for round in 0..20_u8 {
        device.write(u64::from(round) * 4096, bytes(round + 1, 4096), false).await.unwrap();
        seal(&pool, "v").await;
    }
    let keeper = tokio::spawn(Arc::clone(&pool).keep());
    let begun = std::time::Instant::now();
    let mut round = 0_u8;
    while pool.volume_info(&volume_name("v")).await.unwrap().chain.len() > 16 {
        assert!(begun.elapsed().as_secs() < 30, "waited 30 s for the chain to be merged");
        round = round.wrapping_add(1);
        device.write(40 * 4096, bytes(round, 4096), false).await.unwrap();
        assert_eq!(device.read(40 * 4096, 4096).await.unwrap(), bytes(round, 4096));
    }
    keeper.abort();
    for block in 0..20_u8 {
        let found = device.read(u64::from(block) * 4096, 4096).await.unwrap();
        assert_eq!(found, bytes(block + 1, 4096), "block {block}");
    }
}
