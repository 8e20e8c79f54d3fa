//! Replicas: what a round ships, what each point shows, and what is kept through kills and power cuts.

use perigee_model::home::{HomeState, ServerAddresses, Tenure};
use perigee_model::replica::{PinReplica, PromoteReplica, PullReplica, SealReplica, Supersede};
use perigee_model::{Incarnation, ProblemKind, SiteId};
use proptest::prelude::*;

use super::*;
use crate::disk::files::LayerFiles;
use crate::layers::layer::{data_name, map_name};
use crate::sim::{Fault, Faults};

fn place(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

fn site() -> SiteId {
    SiteId::new("cloud").unwrap()
}

/// As a volume server does it. Returns what is shipped.
pub(super) async fn pull(home: &Site, to: &Site, keep: u32, taken_ms: u64) -> Result<u64, Problem> {
    pull_from("there:1", home, to, keep, taken_ms).await
}

async fn pull_from(
    nbd_addr: &str,
    home: &Site,
    to: &Site,
    keep: u32,
    taken_ms: u64,
) -> Result<u64, Problem> {
    let v = volume_name("v");
    let round = to.pool.begin_pull(&v, keep).await?;
    let sealed = home.pool.seal_replica(&v, SealReplica { replica: site() }).await?;
    let control_url = "http://there".to_owned();
    let from = ServerAddresses { nbd_addr: nbd_addr.to_owned(), control_url };
    to.pool
        .add_point(
            &v,
            &PullReplica { from, replica: site(), keep, taken_ms, grant: None },
            round,
            sealed,
        )
        .await
}

pub(super) async fn pin(home: &Site, layer: LayerId) {
    let pin = PinReplica { replica: site(), layer: Some(layer) };
    home.pool.pin_replica(&volume_name("v"), pin).await.unwrap();
}

async fn point_content(pool: &Arc<Pool>, layer: LayerId) -> Vec<u8> {
    all(&pool.open_layer(layer).await.unwrap()).await
}

pub(super) async fn two() -> (Site, Site) {
    let (home, to) = (Site::new(), Site::new());
    drop(empty(&home.pool, "v", 8 * BLOCK).await);
    to.way.lead(&home.pool);
    (home, to)
}

#[tokio::test]
async fn a_volume_to_which_nothing_was_written_has_a_replica_too() {
    let (home, to) = two().await;
    assert_eq!(pull(&home, &to, 1, 1).await.unwrap(), 0);
    to.fill().await;
    let replica = to.pool.replica(&volume_name("v")).await.unwrap();
    let newest = replica.complete().expect("it is complete").clone();
    pin(&home, newest.layer).await;
    assert_eq!(pull(&home, &to, 1, 2).await.unwrap(), 0);
    let again = to.pool.replica(&volume_name("v")).await.unwrap();
    assert_eq!(again.points.len(), 1, "the same point, and newer: {again:?}");
    assert_eq!((again.points[0].layer, again.points[0].taken_ms), (newest.layer, 2));
}

#[tokio::test]
async fn a_point_that_is_not_complete_is_not_promoted_and_one_is_promoted_once() {
    let (home, to) = two().await;
    let device = session(&home.pool, "v").await;
    device.write(0, bytes(1, 4096), false).await.unwrap();
    to.way.away.store(true, Ordering::SeqCst);
    pull(&home, &to, 1, 1).await.unwrap();
    let v = volume_name("v");
    let layer = to.pool.replica(&v).await.unwrap().points[0].layer;
    let promote = PromoteReplica { layer, tenure: Tenure::first(Incarnation(9)) };
    let refused = to.pool.promote(&v, promote).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    to.way.away.store(false, Ordering::SeqCst);
    to.fill().await;
    to.pool.promote(&v, promote).await.unwrap();
    let other = PromoteReplica { tenure: Tenure::first(Incarnation(10)), ..promote };
    to.pool.promote(&v, other).await.expect_err("it is the volume already");
    to.pool.delete_volume(&v).await.unwrap();
    let nothing: [String; 0] = [];
    assert_eq!(to.files.names().unwrap().into_iter().collect::<Vec<_>>(), nothing);
}

#[tokio::test]
async fn a_replica_of_a_deleted_volume_is_not_mixed_with_the_next_one_of_its_name() {
    let (home, to) = two().await;
    session(&home.pool, "v").await.write(0, bytes(1, 4096), false).await.unwrap();
    pull(&home, &to, 1, 1).await.unwrap();
    to.fill().await;
    home.pool.delete_volume(&volume_name("v")).await.unwrap();
    drop(empty(&home.pool, "v", 8 * BLOCK).await);
    let refused = pull(&home, &to, 1, 2).await.unwrap_err();
    assert!(refused.why.contains("an earlier volume"), "{refused}");
    to.pool.drop_replica(&volume_name("v")).await.unwrap();
    pull(&home, &to, 1, 3).await.unwrap();
}

#[tokio::test]
async fn a_round_that_was_under_way_when_its_replica_was_dropped_or_promoted_leaves_nothing() {
    for is_promoted in [false, true] {
        let (home, to) = two().await;
        let v = volume_name("v");
        session(&home.pool, "v").await.write(0, bytes(1, 4096), false).await.unwrap();
        pull(&home, &to, 1, 1).await.unwrap();
        to.fill().await;
        let point = to.pool.replica(&v).await.unwrap().points[0].clone();
        session(&home.pool, "v").await.write(4096, bytes(2, 4096), false).await.unwrap();
        let round = to.pool.begin_pull(&v, 1).await.unwrap();
        let sealed = home.pool.seal_replica(&v, SealReplica { replica: site() }).await.unwrap();
        match is_promoted {
            true => {
                let tenure = Tenure::first(Incarnation(9));
                let promote = PromoteReplica { layer: point.layer, tenure };
                drop(to.pool.promote(&v, promote).await.unwrap());
            }
            false => to.pool.drop_replica(&v).await.unwrap(),
        }
        let from =
            ServerAddresses { nbd_addr: "there:1".into(), control_url: "http://there".into() };
        let ask = PullReplica { from, replica: site(), keep: 1, taken_ms: 2, grant: None };
        let late = to.pool.add_point(&v, &ask, round, sealed).await.unwrap_err();
        assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
        assert!(to.pool.replica(&v).await.unwrap().points.is_empty());
        if is_promoted {
            to.pool.delete_volume(&v).await.unwrap();
        }
        let left: Vec<String> = to.files.names().unwrap().into_iter().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[tokio::test]
async fn a_new_home_keeps_what_a_replica_stands_on_from_the_first_time_that_it_is_told() {
    let (home, to) = two().await;
    let v = volume_name("v");
    session(&home.pool, "v").await.write(0, bytes(1, 4096), false).await.unwrap();
    pull(&home, &to, 1, 1).await.unwrap();
    let top = to.pool.replica(&v).await.unwrap().points[0].layer;
    // The pins of a volume go with it when it moves.
    let none = PinReplica { replica: site(), layer: None };
    home.pool.pin_replica(&v, none).await.unwrap();
    pin(&home, top).await;
    let pins = home.pool.replica_pins(&v).await.unwrap();
    assert_eq!(pins.iter().map(|pin| (pin.layer, pin.filling)).collect::<Vec<_>>(), [(top, false)]);
    pin(&home, LayerId(uuid::Uuid::from_u128(7))).await;
    assert!(home.pool.replica_pins(&v).await.unwrap().is_empty(), "it has no such layer");
}

#[tokio::test]
async fn a_lost_home_whose_disk_fails_gives_its_volume_up_and_keeps_what_it_can_read() {
    let (home, _) = two().await;
    let v = volume_name("v");
    let device = session(&home.pool, "v").await;
    device.write(0, bytes(1, 4096), true).await.unwrap();
    let head = home.pool.volume(&v).await.unwrap().stack().head.layer.id;
    home.files.file(&data_name(head)).fail_sync.store(true, Ordering::SeqCst);
    device.write(4096, bytes(2, 4096), false).await.unwrap();
    device.flush().await.unwrap_err();
    let HomeState::Here { tenure: lost, .. } = home.pool.home(&v).await.unwrap().home else {
        panic!("it is here");
    };
    let to = ServerAddresses { nbd_addr: "there:1".into(), control_url: "http://there".into() };
    let ask = Supersede { lost, tenure: Tenure::first(Incarnation(9)), to };
    for _ in 0..2 {
        let image = home.pool.supersede(&v, &ask).await.unwrap().image.expect("it is kept");
        assert_eq!(all(&home.pool.open_image(&image).await.unwrap()).await[..4096], [1; 4096]);
    }
    assert!(home.pool.volume(&v).await.is_err(), "it is not here any more");
}

#[tokio::test]
async fn a_lost_home_that_can_not_open_its_volume_gives_it_up() {
    let (home, _) = two().await;
    let v = volume_name("v");
    let device = session(&home.pool, "v").await;
    device.write(0, bytes(1, 4096), true).await.unwrap();
    let head = home.pool.volume(&v).await.unwrap().stack().head.layer.id;
    drop(device);
    let home = home.restart(None).await;
    let map = home.files.file(&map_name(head));
    crate::disk::files::BlockFile::write_at(&*map, 0, &[0xbd; 4096]).unwrap();
    home.pool.volume(&v).await.map(drop).expect_err("its map is damaged");
    let HomeState::Here { tenure: lost, .. } = home.pool.home(&v).await.unwrap().home else {
        panic!("it is here");
    };
    let to = ServerAddresses { nbd_addr: "there:1".into(), control_url: "http://there".into() };
    let ask = Supersede { lost, tenure: Tenure::first(Incarnation(9)), to };
    for _ in 0..2 {
        let done = home.pool.supersede(&v, &ask).await.expect("nobody can use it here");
        assert_eq!(
            home.pool.image_info(&done.image.expect("its files stay")).await.unwrap().layer,
            head
        );
        let now = home.pool.home(&v).await.unwrap().home;
        assert!(matches!(now, HomeState::NotHere { .. }), "{now:?}");
    }
}

/// What was acknowledged and not flushed is only in the live map, which is removed with the volume.
#[tokio::test]
async fn a_lost_home_without_a_free_descriptor_gives_nothing_up() {
    let (home, _) = two().await;
    let v = volume_name("v");
    let device = session(&home.pool, "v").await;
    device.write(0, bytes(1, 4096), false).await.unwrap();
    drop(device);
    let home = home.restart(None).await;
    let HomeState::Here { tenure: lost, .. } = home.pool.home(&v).await.unwrap().home else {
        panic!("it is here");
    };
    let to = ServerAddresses { nbd_addr: "there:1".into(), control_url: "http://there".into() };
    let ask = Supersede { lost, tenure: Tenure::first(Incarnation(9)), to };
    home.files.fail(Some(Faults { fault: Fault::NoDescriptor, operations: 0..u64::MAX }));
    let refused = home.pool.supersede(&v, &ask).await.expect_err("it can't be opened now");
    assert_eq!(refused.kind, ProblemKind::Unavailable, "{refused}");
    home.files.fail(None);
    let done = home.pool.supersede(&v, &ask).await.expect("it can be opened");
    let image = home.pool.open_image(&done.image.expect("it is kept")).await.unwrap();
    assert_eq!(image.read(0, 4096).await.unwrap(), bytes(1, 4096));
}

#[tokio::test]
async fn the_image_of_a_lost_volume_whose_flush_failed_shows_the_same_after_a_restart() {
    for (was_flushed, map_fails) in [(true, false), (false, false), (true, true), (false, true)] {
        let (home, _) = two().await;
        let v = volume_name("v");
        let device = session(&home.pool, "v").await;
        device.write(0, bytes(1, 4096), was_flushed).await.unwrap();
        device.write(4096, bytes(2, 4096), false).await.unwrap();
        device.zero(0, BLOCK, Zeroing::KeepSpace, false).await.unwrap();
        let head = home.pool.volume(&v).await.unwrap().stack().head.layer.id;
        home.files.file(&data_name(head)).fail_sync.store(true, Ordering::SeqCst);
        home.files.file(&map_name(head)).fail_sync.store(map_fails, Ordering::SeqCst);
        device.flush().await.unwrap_err();
        let shown = all(&device).await;
        let HomeState::Here { tenure: lost, .. } = home.pool.home(&v).await.unwrap().home else {
            panic!("it is here");
        };
        let to = ServerAddresses { nbd_addr: "there:1".into(), control_url: "http://there".into() };
        let ask = Supersede { lost, tenure: Tenure::first(Incarnation(9)), to };
        let image = home.pool.supersede(&v, &ask).await.unwrap().image.expect("it is kept");
        drop(device);
        let home = home.restart(None).await;
        let now = all(&home.pool.open_image(&image).await.unwrap()).await;
        assert!(now == shown, "flushed before: {was_flushed}, the map fails too: {map_fails}");
    }
}

/// The map can't be written, and nothing says that the disk has failed.
#[tokio::test]
async fn a_lost_home_whose_disk_is_full_at_a_flush_gives_its_volume_up() {
    for was_flushed in [true, false] {
        let (home, _) = two().await;
        let v = volume_name("v");
        let device = session(&home.pool, "v").await;
        device.write(0, bytes(1, 4096), was_flushed).await.unwrap();
        device.write(4096, bytes(2, 4096), false).await.unwrap();
        let head = home.pool.volume(&v).await.unwrap().stack().head.layer.id;
        home.files.file(&map_name(head)).full.store(true, Ordering::SeqCst);
        assert!(matches!(device.flush().await, Err(IoError::NoSpace)));
        let HomeState::Here { tenure: lost, .. } = home.pool.home(&v).await.unwrap().home else {
            panic!("it is here");
        };
        let to = ServerAddresses { nbd_addr: "there:1".into(), control_url: "http://there".into() };
        let ask = Supersede { lost, tenure: Tenure::first(Incarnation(9)), to };
        let done = home.pool.supersede(&v, &ask).await.expect("a full disk does not keep it");
        let image = done.image.expect("it is kept");
        device.write(0, bytes(3, 4096), false).await.expect_err("it is not here any more");
        let shown = all(&home.pool.open_image(&image).await.unwrap()).await;
        assert_eq!((shown[0], shown[4096]), (1, 2));
        drop(device);
        // What could not be written is lost at the latest with this server.
        let home = home.restart(None).await;
        let shown = all(&home.pool.open_image(&image).await.unwrap()).await;
        assert_eq!(shown[0], u8::from(was_flushed));
    }
}

/// Its disk fails while it is filled. What is there is not used any more, and says so.
#[tokio::test]
async fn a_point_whose_copy_has_failed_says_that_it_can_not_be_completed() {
    let (home, to) = two().await;
    let v = volume_name("v");
    session(&home.pool, "v").await.write(0, bytes(1, 4096), true).await.unwrap();
    pull(&home, &to, 1, 1).await.unwrap();
    let point = to.pool.replica(&v).await.unwrap().points[0].clone();
    assert!(!point.broken && point.missing_bytes > 0, "{point:?}");
    let copy = to.pool.layer_copy(point.layer).expect("a copy");
    to.files.file(&data_name(point.layer)).fail_sync.store(true, Ordering::SeqCst);
    fill_all(&to.pool).await.unwrap_err();
    copy.filled(Some("its disk failed".to_owned()));
    let point = to.pool.replica(&v).await.unwrap().points[0].clone();
    assert!(point.broken && point.problem == "its disk failed", "{point:?}");
    // Another round ships it again.
    to.files.file(&data_name(point.layer)).fail_sync.store(false, Ordering::SeqCst);
    pull(&home, &to, 1, 2).await.unwrap();
    to.fill().await;
    let point = to.pool.replica(&v).await.unwrap().points[0].clone();
    assert!(!point.broken && point.missing_bytes == 0 && point.problem.is_empty(), "{point:?}");
}

/// The home has another address, and something was written since.
#[tokio::test(flavor = "multi_thread")]
async fn a_round_that_begins_anew_ships_only_what_has_not_come() {
    let (home, to) = two().await;
    let v = volume_name("v");
    let device = session(&home.pool, "v").await;
    device.write(0, bytes(1, place(4 * BLOCK)), false).await.unwrap();
    assert_eq!(pull(&home, &to, 1, 1).await.unwrap(), 4 * BLOCK);
    let first = to.pool.replica(&v).await.unwrap().points[0].layer;
    to.pool.open_layer(first).await.unwrap().read(BLOCK, 4096).await.unwrap();
    to.pool.settle_copies().await;
    *to.way.gone.lock().unwrap() = Some("there:1".to_owned());
    device.write(5 * BLOCK, bytes(2, 4096), false).await.unwrap();
    let ships = pull_from("elsewhere:1", &home, &to, 1, 2).await.unwrap();
    assert_eq!(ships, 4 * BLOCK, "three of the first round, and the new one");
    to.way.reads.lock().unwrap().clear();
    to.fill().await;
    assert_eq!(to.way.read_bytes(OWN_SUFFIX), 4 * BLOCK);
    let points = to.pool.replica(&v).await.unwrap().points;
    assert_eq!((points.len(), points[0].missing_bytes), (1, 0), "{points:?}");
    assert!(point_content(&to.pool, points[0].layer).await == all(&device).await);
    // What nobody needs any more is dropped: the next round stands on this one.
    pin(&home, points[0].layer).await;
    to.pool.drop_replica(&v).await.unwrap();
    assert!(to.files.names().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_that_begins_anew_ships_what_is_damaged_and_nothing_else() {
    let home = Site::new();
    let to = Site::new();
    drop(empty(&home.pool, "v", 64 * BLOCK).await);
    to.way.lead(&home.pool);
    let v = volume_name("v");
    let device = session(&home.pool, "v").await;
    device.write(0, bytes(1, place(64 * BLOCK)), false).await.unwrap();
    pull(&home, &to, 1, 1).await.unwrap();
    checksums(&home.pool).await;
    let layer = to.pool.replica(&v).await.unwrap().points[0].layer;
    *to.way.damage.lock().unwrap() = Some(0xbd);
    to.pool.open_layer(layer).await.unwrap().read(40 * BLOCK, 4096).await.unwrap();
    to.pool.settle_copies().await;
    *to.way.damage.lock().unwrap() = None;
    fill_all(&to.pool).await.unwrap_err();
    assert!(to.pool.replica(&v).await.unwrap().points[0].broken);
    let ships = pull(&home, &to, 1, 2).await.unwrap();
    assert_eq!(ships, 16 * BLOCK, "the blocks of one checksum");
    to.fill().await;
    let point = to.pool.replica(&v).await.unwrap().points[0].clone();
    assert!(!point.broken && point.missing_bytes == 0, "{point:?}");
    assert!(point_content(&to.pool, layer).await == all(&device).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_that_begins_anew_after_the_home_has_merged_its_layers_stands_on_them() {
    let (home, to) = two().await;
    let v = volume_name("v");
    let device = session(&home.pool, "v").await;
    for at in 0..3 {
        device.write(at * BLOCK, bytes(1, 4096), false).await.unwrap();
        pull(&home, &to, 1, at).await.unwrap();
    }
    // The home has forgotten the replica, so nothing keeps its layers as they are.
    let none = PinReplica { replica: site(), layer: None };
    home.pool.pin_replica(&v, none).await.unwrap();
    home.pool.compact_volume(&v, Arc::default()).await.unwrap();
    device.write(3 * BLOCK, bytes(1, 4096), false).await.unwrap();
    assert_eq!(pull(&home, &to, 1, 4).await.unwrap(), 4 * BLOCK);
    to.fill().await;
    let points = to.pool.replica(&v).await.unwrap().points;
    assert_eq!((points.len(), points[0].missing_bytes), (1, 0), "{points:?}");
    assert!(point_content(&to.pool, points[0].layer).await == all(&device).await);
    to.pool.drop_replica(&v).await.unwrap();
    assert!(to.files.names().unwrap().is_empty());
}

#[tokio::test]
async fn a_promotion_does_not_wait_for_others_for_ever() {
    tokio::time::pause();
    let (home, to) = two().await;
    let v = volume_name("v");
    let _others = Arc::clone(&to.pool.changes).lock_owned().await;
    let _others_at_home = Arc::clone(&home.pool.changes).lock_owned().await;
    let layer = LayerId(uuid::Uuid::nil());
    let promote = PromoteReplica { layer, tenure: Tenure::first(Incarnation(9)) };
    let busy = to.pool.promote(&v, promote).await.unwrap_err();
    assert_eq!(busy.kind, ProblemKind::Unavailable, "{busy}");
    let seal = home.pool.seal_replica(&v, SealReplica { replica: site() }).await.unwrap_err();
    assert_eq!(seal.kind, ProblemKind::Unavailable, "{seal}");
}

/// Rounds, compaction at both, kills and power cuts at any time. Each complete point shows what the volume had
/// when it was sealed; a round ships no more than what was written since the last complete one.
async fn through_everything(seed: u64) {
    let mut dice = Dice(seed);
    let v = volume_name("v");
    let (mut home, mut to) = two().await;
    let mut now = vec![0_u8; place(8 * BLOCK)];
    let mut points: std::collections::HashMap<LayerId, Vec<u8>> = Default::default();
    // Bytes written in all, and how many of them each point has.
    let (mut written, mut sealed) = (0, std::collections::HashMap::new());
    let (mut newest, mut clock) = (None, 0);
    for _ in 0..30 {
        match dice.below(10) {
            // A round that begins anew finds a part of the last one.
            0 if dice.below(2) == 0 => {
                let points = to.pool.replica(&v).await.unwrap().points;
                if let Some(newest) = points.first() {
                    let at = dice.below(8) as u64 * BLOCK;
                    to.pool.open_layer(newest.layer).await.unwrap().read(at, 4096).await.unwrap();
                    to.pool.settle_copies().await;
                }
            }
            0..=3 => {
                let (at, byte) = (dice.below(8) as u64, 1 + u8::try_from(dice.below(250)).unwrap());
                let device = session(&home.pool, "v").await;
                device.write(at * BLOCK, bytes(byte, place(BLOCK)), false).await.unwrap();
                device.flush().await.unwrap();
                now[place(at * BLOCK)..place((at + 1) * BLOCK)].fill(byte);
                written += BLOCK;
            }
            4 | 5 => {
                clock += 1;
                let ships = pull(&home, &to, 2, clock).await.unwrap();
                let most = newest.map_or(written, |newest| written - sealed[&newest]);
                assert!(ships <= most, "{ships} bytes are shipped, and {most} were written");
                let top = to.pool.replica(&v).await.unwrap().points[0].layer;
                points.insert(top, now.clone());
                sealed.insert(top, written);
            }
            6 => {
                to.fill().await;
                let replica = to.pool.replica(&v).await.unwrap();
                if let Some(point) = replica.points.first() {
                    pin(&home, point.layer).await;
                    newest = Some(point.layer);
                }
            }
            7 => {
                let work = Arc::default();
                home.pool.compact_volume(&v, work).await.unwrap();
                to.pool.compact_replica(&v, Arc::default()).await.unwrap();
            }
            8 => {
                *to.way.to.lock().unwrap() = None;
                home = home.restart(Some(dice.below(1 << 30) as u64)).await;
            }
            _ => {
                let cut = (dice.below(2) == 0).then(|| dice.below(1 << 30) as u64);
                to = to.restart(cut).await;
            }
        }
        to.way.lead(&home.pool);
        crate::tests::incoming_layers::shared_layers::check(&home, &to, "v").await;
        let replica = to.pool.replica(&v).await.unwrap();
        assert!(replica.points.len() <= 4, "{replica:?}");
        assert!(newest.is_none() || replica.complete().is_some(), "a complete point stays");
        for point in replica.points.iter().filter(|point| point.missing_bytes == 0) {
            assert!(
                point_content(&to.pool, point.layer).await == points[&point.layer],
                "point {} shows something else",
                point.layer
            );
        }
    }
    let Some(best) = to.pool.replica(&v).await.unwrap().complete().cloned() else { return };
    let promote = PromoteReplica { layer: best.layer, tenure: Tenure::first(Incarnation(5)) };
    to.pool.promote(&v, promote).await.unwrap();
    to = to.restart(Some(seed)).await;
    let home = to.pool.home(&v).await.unwrap().home;
    assert_eq!(home, HomeState::Here { tenure: promote.tenure, missing_bytes: 0 });
    assert!(all(&session(&to.pool, "v").await).await == points[&best.layer]);
    assert!(to.pool.replica(&v).await.unwrap().points.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..Default::default() })]

    #[test]
    fn points_of_a_replica_stay_what_they_were_through_compaction_kills_and_power_cuts(
        seed in any::<u64>()
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(through_everything(seed));
    }
}
