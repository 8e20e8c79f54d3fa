//! One rule of copies of own blocks each.

use futures_util::future::join_all;
use perigee_block::device::{Origin, OriginRun};
use perigee_model::ProblemKind;
use perigee_model::home::{Depart, HomeState, OwnBlocks, ServerAddresses, TakeVolume};
use perigee_model::volume::{CheckScope, CopyImage, Keep};

use super::*;
use crate::layers::layer::data_name;

/// Two layers and a head at one host: `below` has blocks 0..8, the layer on it blocks 2 and 5, and zeros in 3.
async fn two_layers() -> (Site, Vec<u8>) {
    let site = Site::new();
    let device = empty(&site.pool, "v", 12 * BLOCK).await;
    device.write(0, bytes(1, 8 * 4096), false).await.unwrap();
    snapshot(&site.pool, "v", "below").await;
    device.write(2 * BLOCK, bytes(2, 4096), false).await.unwrap();
    device.write(5 * BLOCK, bytes(3, 4096), false).await.unwrap();
    device.zero(3 * BLOCK, BLOCK, Zeroing::FreeSpace, false).await.unwrap();
    snapshot(&site.pool, "v", "above").await;
    checksums(&site.pool).await;
    let content = all(&device).await;
    (site, content)
}

/// A second host, which has `below` and takes the volume.
async fn taken(from: &Site) -> Site {
    let site = Site::new();
    site.way.lead(&from.pool);
    let chain = sealed_chain(&from.pool, "v");
    site.pool.stage_layers(&volume_name("v"), "there:1", &chain[1..]).await.unwrap();
    site.fill().await;
    site.take(&from.pool, "v").await;
    site.way.reads.lock().unwrap().clear();
    site
}

#[tokio::test(flavor = "multi_thread")]
async fn an_own_export_has_only_what_the_layer_itself_has() {
    let (from, content) = two_layers().await;
    let top = sealed_chain(&from.pool, "v")[0].layer;
    let own = from.pool.open_own(top).await.unwrap();
    assert_eq!((own.layer(), own.size_bytes()), (Some(top), 12 * BLOCK));
    let mut expected = vec![0; content.len()];
    for block in [2, 5] {
        let at = block * 4096..(block + 1) * 4096;
        expected[at.clone()].copy_from_slice(&content[at]);
    }
    assert!(all(&own).await == expected, "what it does not have is zeros");
    let extent = |blocks: u64, hole, zero| Extent { length_bytes: blocks * BLOCK, hole, zero };
    let told = [
        extent(2, true, false),
        extent(1, false, false),
        extent(1, true, true),
        extent(1, true, false),
        extent(1, false, false),
        extent(6, true, false),
    ];
    assert_eq!(own.extents(0, 12 * BLOCK).await.unwrap(), told);
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_and_incomplete_layers_have_no_own_export() {
    let (from, content) = two_layers().await;
    let head = from.pool.catalog.volume(&volume_name("v")).unwrap().unwrap().head;
    let refused = |refused: Result<Arc<dyn Device>, Problem>| refused.err().unwrap().kind;
    assert_eq!(refused(from.pool.open_own(head).await), ProblemKind::NotFound);
    let between = Site::new();
    between.way.lead(&from.pool);
    between.take(&from.pool, "v").await;
    let top = sealed_chain(&between.pool, "v")[0].layer;
    assert_eq!(refused(between.pool.open_own(top).await), ProblemKind::NotFound);
    // The next host reads through this one.
    let last = Site::new();
    last.way.lead(&between.pool);
    last.take(&between.pool, "v").await;
    assert_eq!(sealed_chain(&last.pool, "v").len(), 1, "all that the layer shows is one layer");
    assert!(all(&session(&last.pool, "v").await).await == content);
    last.fill().await;
    last.way.away.store(true, Ordering::SeqCst);
    assert!(all(&session(&last.pool, "v").await).await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_over_one_that_is_here_ships_only_its_own_blocks() {
    let (from, content) = two_layers().await;
    let site = taken(&from).await;
    let device = session(&site.pool, "v").await;
    let run = |blocks: u64, origin| OriginRun { length_bytes: blocks * BLOCK, origin };
    let origins = [
        run(2, Origin::Source),
        run(1, Origin::Remote),
        run(1, Origin::Nobody),
        run(1, Origin::Source),
        run(1, Origin::Remote),
        run(2, Origin::Source),
        run(4, Origin::Nobody),
    ];
    assert_eq!(device.origins(0, 12 * BLOCK).await.unwrap(), origins);
    let missing = site.pool.volume_info(&volume_name("v")).await.unwrap().remote_bytes;
    assert_eq!(missing, 2 * BLOCK);
    assert!(all(&device).await == content);
    site.pool.settle_copies().await;
    assert_eq!(site.way.read_bytes(OWN_SUFFIX), 2 * BLOCK, "{:?}", site.way.reads);
    site.fill().await;
    assert_eq!(site.way.read_bytes(OWN_SUFFIX), 2 * BLOCK);
    assert!(site.way.read_bytes(CHECKSUMS_SUFFIX) > 0, "they were compared");
    site.way.away.store(true, Ordering::SeqCst);
    assert!(all(&device).await == content);
    let info = site.pool.volume_info(&volume_name("v")).await.unwrap();
    assert_eq!((info.remote_bytes, info.chain.len()), (0, 3));
    let report = site.pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
    assert!(report.faults.is_empty() && report.leftovers.is_empty(), "{report:?}");
    // It is a sealed layer as any other: the next host can have it from here.
    let next = Site::new();
    next.way.lead(&site.pool);
    next.take(&site.pool, "v").await;
    assert!(all(&session(&next.pool, "v").await).await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn however_many_read_a_copy_in_the_middle_each_block_is_fetched_once() {
    let (from, content) = two_layers().await;
    let site = Site::new();
    site.way.lead(&from.pool);
    site.take(&from.pool, "v").await;
    let source = || VolumeSource::Volume(volume_name("v"));
    for n in 0..8 {
        site.pool.create_volume(create(&format!("c{n}"), None, source())).await.unwrap();
    }
    let readers = (0..8).map(|n| {
        let (pool, content) = (Arc::clone(&site.pool), content.clone());
        tokio::spawn(async move {
            let device = session(&pool, &format!("c{n}")).await;
            assert!(all(&device).await == content);
        })
    });
    join_all(readers).await.into_iter().for_each(|read| read.unwrap());
    site.pool.settle_copies().await;
    // Blocks 2, 3 and 5 of the lower layer are never shown.
    assert_eq!(site.way.read_bytes(OWN_SUFFIX), (2 + 5) * BLOCK);
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_of_one_volume_that_come_to_a_host_ship_once_what_they_share() {
    let (from, content) = two_layers().await;
    for name in ["c0", "c1", "c2"] {
        let clone = create(name, None, VolumeSource::Volume(volume_name("v")));
        from.pool.create_volume(clone).await.unwrap();
    }
    let device = session(&from.pool, "c1").await;
    device.write(7 * BLOCK, bytes(7, 4096), false).await.unwrap();
    from.pool.seal_ahead(&volume_name("c1")).await.unwrap();
    let changed = all(&device).await;
    let site = Site::new();
    site.way.lead(&from.pool);
    // Two come at the same time, and one when these are complete.
    tokio::join!(site.take(&from.pool, "c0"), site.take(&from.pool, "c1"));
    site.fill().await;
    site.take(&from.pool, "c2").await;
    site.fill().await;
    // Both layers, and what one clone has written.
    assert_eq!(site.way.read_bytes(OWN_SUFFIX), (8 + 2 + 1) * BLOCK, "{:?}", site.way.reads);
    site.way.away.store(true, Ordering::SeqCst);
    for (name, content) in [("c0", &content), ("c1", &changed), ("c2", &content)] {
        assert!(all(&session(&site.pool, name).await).await == *content, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_write_over_a_copy_and_what_they_wrote_stays() {
    let (from, mut content) = two_layers().await;
    let site = taken(&from).await;
    let device = session(&site.pool, "v").await;
    device.write(2 * BLOCK + 10, bytes(9, 5), false).await.unwrap();
    content[2 * 4096 + 10..2 * 4096 + 15].fill(9);
    device.write(5 * BLOCK, bytes(8, 4096), false).await.unwrap();
    content[5 * 4096..6 * 4096].fill(8);
    site.fill().await;
    assert!(all(&device).await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_on_which_nothing_stands_are_gone_after_a_restart() {
    let (from, content) = two_layers().await;
    let site = Site::new();
    site.way.lead(&from.pool);
    let chain = sealed_chain(&from.pool, "v");
    site.pool.stage_layers(&volume_name("v"), "there:1", &chain).await.unwrap();
    site.pool.stage_layers(&volume_name("v"), "there:1", &chain).await.expect("the same again");
    site.fill().await;
    assert_eq!(site.pool.catalog.layers().unwrap().len(), 2);
    let site = site.restart(None).await;
    assert!(site.pool.catalog.layers().unwrap().is_empty());
    assert!(site.files.disk().names().is_empty());
    site.take(&from.pool, "v").await;
    let site = site.restart(Some(3)).await;
    assert!(all(&session(&site.pool, "v").await).await == content, "a volume keeps its layers");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_fetched_goes_with_the_volume() {
    let (from, content) = two_layers().await;
    let site = Site::new();
    site.way.lead(&from.pool);
    site.take(&from.pool, "v").await;
    assert!(all(&session(&site.pool, "v").await).await == content);
    site.pool.settle_copies().await;
    site.pool.delete_volume(&volume_name("v")).await.unwrap();
    assert!(site.pool.open_copies().is_empty());
    assert!(site.files.disk().names().is_empty());
    site.take(&from.pool, "v").await;
    assert!(all(&session(&site.pool, "v").await).await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_files_fail_keeps_its_map_and_fetches_again() {
    for power_cut in [None, Some(5)] {
        let (from, content) = two_layers().await;
        let site = taken(&from).await;
        let top = sealed_chain(&from.pool, "v")[0].layer;
        let device = session(&site.pool, "v").await;
        device.read(2 * BLOCK, 4096).await.unwrap();
        site.pool.settle_copies().await;
        site.pool.flush().await.unwrap();
        assert!(all(&device).await == content);
        site.pool.settle_copies().await;
        let data = site.files.file(&data_name(top));
        data.fail_sync.store(true, Ordering::SeqCst);
        site.pool.flush().await.unwrap_err();
        crate::disk::files::BlockFile::write_at(&*data, 2 * BLOCK, &[0xbd; 4096]).unwrap();
        assert!(all(&device).await == content, "nothing of its data is believed");
        data.fail_sync.store(false, Ordering::SeqCst);
        drop((device, data));
        let site = site.restart(power_cut).await;
        let info = site.pool.volume_info(&volume_name("v")).await.unwrap();
        assert_eq!(info.remote_bytes, 2 * BLOCK);
        assert!(all(&session(&site.pool, "v").await).await == content);
        site.fill().await;
        site.way.away.store(true, Ordering::SeqCst);
        assert!(all(&session(&site.pool, "v").await).await == content);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_differ_from_the_other_host_s_checksums_complete_nothing() {
    let (from, _) = two_layers().await;
    let site = taken(&from).await;
    *site.way.damage.lock().unwrap() = Some(0xbd);
    let refused = fill_all(&site.pool).await.unwrap_err();
    assert!(refused.to_string().contains("differ from the other host's checksums"), "{refused}");
    assert_eq!(site.pool.copies_to_fill().len(), 1);
}

/// Nobody begins a move anew, as a replica's round.
#[tokio::test(flavor = "multi_thread")]
async fn what_differs_from_the_other_host_s_checksums_is_fetched_again() {
    let (from, content) = two_layers().await;
    let site = taken(&from).await;
    *site.way.damage.lock().unwrap() = Some(0xbd);
    session(&site.pool, "v").await.read(2 * BLOCK, 4096).await.unwrap();
    site.pool.settle_copies().await;
    *site.way.damage.lock().unwrap() = None;
    fill_in_background(&site.pool).await;
    // The second time also the block of zeros between them, which has no other checksum.
    assert_eq!(site.way.read_bytes(OWN_SUFFIX), (2 + 3) * BLOCK);
    site.way.away.store(true, Ordering::SeqCst);
    assert!(all(&session(&site.pool, "v").await).await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_checksums_are_not_to_be_had_is_not_complete() {
    let (from, content) = two_layers().await;
    let site = taken(&from).await;
    site.way.no_checksums.store(true, Ordering::SeqCst);
    let refused = fill_all(&site.pool).await.unwrap_err();
    assert!(refused.to_string().contains("the checksums of"), "{refused}");
    assert_eq!(site.pool.copies_to_fill().len(), 1);
    site.way.no_checksums.store(false, Ordering::SeqCst);
    site.fill().await;
    assert!(site.way.read_bytes(CHECKSUMS_SUFFIX) > 0, "they were compared");
    site.way.away.store(true, Ordering::SeqCst);
    assert!(all(&session(&site.pool, "v").await).await == content);
}

/// The last layer of a move was sealed a moment ago. When nothing is missing here, the original is deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_was_just_sealed_is_compared_too() {
    let from = Site::new();
    let device = empty(&from.pool, "v", 12 * BLOCK).await;
    device.write(0, bytes(1, 8 * 4096), false).await.unwrap();
    let content = all(&device).await;
    drop(device);
    snapshot(&from.pool, "v", "top").await;
    let site = Site::new();
    site.way.lead(&from.pool);
    site.take(&from.pool, "v").await;
    *site.way.damage.lock().unwrap() = Some(0xbd);
    let refused = fill_all(&site.pool).await.unwrap_err();
    assert!(refused.to_string().contains("differ from the other host's checksums"), "{refused}");
    assert!(!site.pool.copies_to_fill().is_empty(), "the original is still needed");
    *site.way.damage.lock().unwrap() = None;
    fill_in_background(&site.pool).await;
    site.way.away.store(true, Ordering::SeqCst);
    assert!(all(&session(&site.pool, "v").await).await == content);
}

/// A host that lacks a part of a layer itself gives all that the layer shows, and keeps no checksums of that.
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_copy_that_came_with_a_volume_is_compared_too() {
    let (from, content) = two_layers().await;
    let between = taken(&from).await;
    let site = Site::new();
    site.way.lead(&between.pool);
    site.take(&between.pool, "v").await;
    let top = sealed_chain(&from.pool, "v")[0].layer;
    assert!(!site.pool.layer_copy(top).expect("a copy").is_own());
    *site.way.damage.lock().unwrap() = Some(0xbd);
    let refused = fill_all(&site.pool).await.unwrap_err();
    assert!(refused.to_string().contains("differ from the other host's checksums"), "{refused}");
    let home = site.pool.home(&volume_name("v")).await.unwrap();
    assert!(
        !matches!(home.home, HomeState::Here { missing_bytes: 0, .. }),
        "the original is still needed: {home:?}"
    );
    *site.way.damage.lock().unwrap() = None;
    fill_in_background(&site.pool).await;
    assert!(site.way.read_bytes(VISIBLE_CHECKSUMS_SUFFIX) > 0, "they were compared");
    site.way.away.store(true, Ordering::SeqCst);
    assert!(all(&session(&site.pool, "v").await).await == content);
}

/// A bit of a copied layer changes on its disk. Then this host is the source of other copies, of both kinds.
#[tokio::test(flavor = "multi_thread")]
async fn damage_of_a_copied_layer_is_not_passed_on() {
    let (from, _) = two_layers().await;
    let between = taken(&from).await;
    between.fill().await;
    checksums(&between.pool).await;
    let chain = sealed_chain(&from.pool, "v");
    let [top, below] = [chain[0].layer, chain[1].layer];
    let data = between.files.file(&data_name(below));
    let mut byte = [0];
    crate::disk::files::BlockFile::read_at(&*data, 4096 + 77, &mut byte).unwrap();
    crate::disk::files::BlockFile::write_at(&*data, 4096 + 77, &[byte[0] ^ 1]).unwrap();

    let home = Site::new();
    home.way.lead(&between.pool);
    home.take(&between.pool, "v").await;
    assert!(home.pool.layer_copy(below).expect("a copy").is_own());
    let refused = fill_all(&home.pool).await.unwrap_err();
    assert!(refused.to_string().contains("differ from the other host's checksums"), "{refused}");

    let copy = Site::new();
    copy.way.lead(&between.pool);
    let (nbd_addr, export) = ("there:1".to_owned(), Some(format!("{LAYER_PREFIX}{top}")));
    let request = CopyImage { content: None, nbd_addr, export, keep: Keep::All, layer: Some(top) };
    copy.pool.copy_image(&image_name("above"), request).await.unwrap();
    let refused = fill_all(&copy.pool).await.unwrap_err().to_string();
    assert!(refused.contains(&format!("layer {below} is damaged at offset 0")), "{refused}");
    assert_eq!(copy.pool.copies_to_fill().len(), 1);
}

/// What another host had asked for went on when the server stopped, and held it up.
#[tokio::test(flavor = "multi_thread")]
async fn checksums_that_were_asked_for_are_not_computed_when_the_server_stops() {
    let site = Site::new();
    let device = empty(&site.pool, "v", 12 * BLOCK).await;
    device.write(0, bytes(1, 8 * 4096), false).await.unwrap();
    snapshot(&site.pool, "v", "top").await;
    let layer = sealed_chain(&site.pool, "v")[0].layer;
    site.pool.stop_work();
    let refused = site.pool.open_checksums(layer, true).await.err().expect("a refusal");
    assert!(refused.to_string().contains("interrupted"), "{refused}");
}

/// The progress of a move began with the whole size, and its time left with the rate at which parts without data vanished.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_zeros_at_the_other_host_is_not_missing_once_the_background_has_begun() {
    let from = Site::new();
    let device = empty(&from.pool, "v", 64 * BLOCK).await;
    device.write(3 * BLOCK, bytes(1, 2 * 4096), false).await.unwrap();
    drop(device);
    snapshot(&from.pool, "v", "thin").await;
    let site = Site::new();
    site.way.lead(&from.pool);
    let (nbd_addr, export) = ("there:1".to_owned(), Some("image:thin".to_owned()));
    let request = CopyImage { content: None, nbd_addr, export, keep: Keep::All, layer: None };
    site.pool.copy_image(&image_name("thin"), request).await.unwrap();
    let missing = async || {
        let info = site.pool.image_info(&image_name("thin")).await.unwrap();
        info.remote.map_or(0, |remote| remote.missing_bytes)
    };
    assert_eq!(missing().await, 64 * BLOCK, "nobody has looked yet");
    let held = site.way.gate.acquire_many(GATE).await.unwrap();
    let background = tokio::spawn(Arc::clone(&site.pool).fill_copies(u64::MAX));
    let started = std::time::Instant::now();
    while missing().await != 2 * BLOCK {
        assert!(started.elapsed() < Duration::from_secs(120), "{} bytes", missing().await);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    drop(held);
    background.abort();
}

/// Fills the copies in the background, until all are complete.
async fn fill_in_background(pool: &Arc<Pool>) {
    let background = tokio::spawn(Arc::clone(pool).fill_copies(u64::MAX));
    let started = std::time::Instant::now();
    while !pool.copies_to_fill().is_empty() {
        assert!(started.elapsed() < Duration::from_secs(120), "waited 120 s for the whole copy");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    background.abort();
}

/// What guests read of an image must be right sooner or later.
#[tokio::test(flavor = "multi_thread")]
async fn what_differs_in_a_whole_copy_is_fetched_again_too() {
    let (from, content) = two_layers().await;
    let layer = sealed_chain(&from.pool, "v")[1].layer;
    let site = Site::new();
    site.way.lead(&from.pool);
    let request = CopyImage {
        content: None,
        nbd_addr: "there:1".to_owned(),
        export: Some("image:below".to_owned()),
        keep: Keep::All,
        layer: Some(layer),
    };
    site.pool.copy_image(&image_name("below"), request).await.unwrap();
    let image = site.pool.open_image(&image_name("below")).await.unwrap();
    let size_bytes = u32::try_from(image.size_bytes()).unwrap();
    let right = from.pool.open_layer(layer).await.unwrap().read(0, size_bytes).await.unwrap();
    assert!(right.len() <= content.len());
    *site.way.damage.lock().unwrap() = Some(0xbd);
    image.read(0, size_bytes).await.unwrap();
    site.pool.settle_copies().await;
    drop(image);
    *site.way.damage.lock().unwrap() = None;
    fill_in_background(&site.pool).await;
    site.way.away.store(true, Ordering::SeqCst);
    let image = site.pool.open_image(&image_name("below")).await.unwrap();
    assert!(image.read(0, size_bytes).await.unwrap() == right);
}

/// The source has a block of zeros that a guest wrote, so it is fetched as data.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_block_of_zeros_is_mended() {
    let from = Site::new();
    let device = empty(&from.pool, "v", 16 * BLOCK).await;
    device.write(2 * BLOCK, bytes(7, 4096), true).await.unwrap();
    device.write(4 * BLOCK, bytes(0, 4096), true).await.unwrap();
    drop(device);
    snapshot(&from.pool, "v", "top").await;
    checksums(&from.pool).await;
    let site = Site::new();
    site.way.lead(&from.pool);
    site.take(&from.pool, "v").await;
    *site.way.damage.lock().unwrap() = Some(0xbd);
    session(&site.pool, "v").await.read(4 * BLOCK, 4096).await.unwrap();
    site.pool.settle_copies().await;
    *site.way.damage.lock().unwrap() = None;
    fill_in_background(&site.pool).await;
    site.way.away.store(true, Ordering::SeqCst);
    let device = session(&site.pool, "v").await;
    assert_eq!(device.read(4 * BLOCK, 4096).await.unwrap(), bytes(0, 4096));
    assert_eq!(device.read(2 * BLOCK, 4096).await.unwrap(), bytes(7, 4096));
}

#[tokio::test(flavor = "multi_thread")]
async fn checksums_that_never_fit_are_not_tried_for_ever() {
    let (from, _) = two_layers().await;
    let site = taken(&from).await;
    *site.way.damage.lock().unwrap() = Some(0xbd);
    let background = tokio::spawn(Arc::clone(&site.pool).fill_copies(u64::MAX));
    let fetched = || site.way.read_bytes(OWN_SUFFIX);
    let started = std::time::Instant::now();
    let four_tries = (2 + 3 * 3) * BLOCK;
    while fetched() < four_tries {
        assert!(started.elapsed() < Duration::from_secs(120), "waited 120 s for four tries");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    background.abort();
    assert_eq!(fetched(), four_tries, "the other host was asked in vain");
    assert_eq!(site.pool.copies_to_fill().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_whose_layer_came_with_a_volume_only_gets_its_name() {
    let (from, content) = two_layers().await;
    let site = Site::new();
    site.way.lead(&from.pool);
    site.take(&from.pool, "v").await;
    let layer = sealed_chain(&from.pool, "v")[1].layer;
    let request = || CopyImage {
        content: None,
        nbd_addr: "there:1".to_owned(),
        export: Some("image:below".to_owned()),
        keep: Keep::All,
        layer: Some(layer),
    };
    let info = site.pool.copy_image(&image_name("below"), request()).await.unwrap();
    assert_eq!((info.layer, info.remote.unwrap().missing_bytes), (layer, 8 * BLOCK));
    site.pool.copy_image(&image_name("below"), request()).await.expect("the same again");
    let other = site.pool.copy_image(&image_name("other"), request()).await.unwrap_err();
    assert_eq!(other.kind, ProblemKind::Conflict);
    let info = site.pool.fill_image(&image_name("below"), Arc::default()).await.unwrap();
    assert_eq!(info.remote, None);
    assert!(all(&session(&site.pool, "v").await).await == content);
    let own = CopyImage { content: None, export: Some(format!("layer:{layer}@own")), ..request() };
    let refused = site.pool.copy_image(&image_name("own"), own).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Invalid);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_does_not_go_on_from_itself_or_another_that_lacks_blocks() {
    let (from, _) = two_layers().await;
    let layer = sealed_chain(&from.pool, "v")[1].layer;
    let site = Site::new();
    site.way.lead(&from.pool);
    let copy = async |from: &str| {
        let (nbd_addr, keep) = (from.to_owned(), Keep::Read);
        let request = CopyImage { content: None, nbd_addr, export: None, keep, layer: Some(layer) };
        site.pool.copy_image(&image_name("below"), request).await
    };
    copy("there:1").await.unwrap();
    // At this address is the copy itself.
    site.way.lead(&site.pool);
    let refused = copy("here:1").await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    let info = site.pool.image_info(&image_name("below")).await.unwrap();
    assert_eq!(info.remote.unwrap().nbd_addr, "there:1");
    site.way.lead(&from.pool);
    let info = copy("complete:1").await.unwrap();
    assert_eq!(info.remote.unwrap().nbd_addr, "complete:1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_away_or_has_another_layer_leaves_nothing_behind() {
    let (from, _) = two_layers().await;
    let site = Site::new();
    site.way.lead(&from.pool);
    let mut chain = sealed_chain(&from.pool, "v");
    site.way.away.store(true, Ordering::SeqCst);
    let away = site.pool.stage_layers(&volume_name("v"), "there:1", &chain).await.unwrap_err();
    assert_eq!(away.kind, ProblemKind::Unavailable, "not known is not no: {away}");
    site.way.away.store(false, Ordering::SeqCst);
    chain[1].size_bytes += BLOCK;
    let differs = site.pool.stage_layers(&volume_name("v"), "there:1", &chain).await.unwrap_err();
    assert_eq!(differs.kind, ProblemKind::Conflict, "{differs}");
    assert!(site.pool.catalog.layers().unwrap().is_empty());
    assert!(site.files.disk().names().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_departs_tells_what_was_written_last_so_that_nobody_has_to_ask() {
    let (from, _) = two_layers().await;
    let site = Site::new();
    site.way.lead(&from.pool);
    let (volume, device) = (volume_name("v"), session(&from.pool, "v").await);
    device.write(6 * BLOCK, bytes(4, 4096), false).await.unwrap();
    let sealed = from.pool.seal_ahead(&volume).await.unwrap();
    assert_eq!(from.pool.seal_ahead(&volume).await.unwrap(), sealed, "nothing new is not sealed");
    site.pool.stage_layers(&volume_name("v"), "there:1", &sealed).await.unwrap();
    site.fill().await;
    device.write(7 * BLOCK, bytes(5, 4096), false).await.unwrap();
    device.zero(8 * BLOCK, BLOCK, Zeroing::FreeSpace, false).await.unwrap();
    let content = all(&device).await;
    let tenure = from.pool.catalog.tenure(&volume).unwrap().unwrap();
    let there = ServerAddresses { nbd_addr: "there:1".to_owned(), control_url: String::new() };
    let depart = Depart { tenure, to: there.clone() };
    let departed = from.pool.move_step(&volume).await.unwrap().depart(&depart).await.unwrap();
    let own = |first, count, zero| OwnBlocks { first, count, zero };
    assert_eq!(departed.chain[0].own, Some(vec![own(7, 1, false), own(8, 1, true)]));
    assert_eq!(departed.chain[1..].iter().map(|l| l.layer).collect::<Vec<_>>(), ids(&sealed));
    site.way.away.store(true, Ordering::SeqCst);
    site.pool
        .stage_layers(&volume_name("v"), "there:1", &departed.chain)
        .await
        .expect("nobody is asked");
    let take = TakeVolume { from: there.clone(), to: there, tenure, grant: None };
    site.pool.move_step(&volume).await.unwrap().arrive(&take, departed).await.unwrap();
    let missing = site.pool.volume_info(&volume).await.unwrap().remote_bytes;
    assert_eq!(missing, BLOCK);
    site.way.away.store(false, Ordering::SeqCst);
    assert!(all(&session(&site.pool, "v").await).await == content);
}

fn ids(chain: &[DepartedLayer]) -> Vec<LayerId> {
    chain.iter().map(|layer| layer.layer).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_a_layer_can_t_have_are_refused() {
    let (from, _) = two_layers().await;
    let site = Site::new();
    let own = |first, count| OwnBlocks { first, count, zero: false };
    for wrong in [
        vec![own(0, 13)],
        vec![own(12, 1)],
        vec![own(u64::MAX, 1)],
        vec![own(3, 0)],
        vec![own(3, 2), own(4, 1)],
    ] {
        let mut chain = sealed_chain(&from.pool, "v");
        chain.truncate(1);
        chain[0].own = Some(wrong);
        let refused =
            site.pool.stage_layers(&volume_name("v"), "there:1", &chain).await.unwrap_err();
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    }
    assert!(site.files.disk().names().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_background_goes_on_where_a_reader_missed_a_block_and_still_finishes() {
    const PIECE: u64 = 32 * BLOCK;
    let from = Site::new();
    let device = empty(&from.pool, "v", 64 * PIECE).await;
    for piece in 0..64 {
        device.write(piece * PIECE, bytes(1, 32 * 4096), false).await.unwrap();
    }
    snapshot(&from.pool, "v", "s").await;
    let content = all(&device).await;
    let site = Site::new();
    site.way.lead(&from.pool);
    site.take(&from.pool, "v").await;
    // How many pieces are in flight depends on the measured link.
    let waiting = async |what: &str, from: u64| {
        let started = std::time::Instant::now();
        while !site.way.reads.lock().unwrap().iter().any(|read| read.at >= from) {
            assert!(started.elapsed() < Duration::from_secs(120), "waited 120 s for {what}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let held = site.way.gate.acquire_many(GATE).await.unwrap();
    let filling = tokio::spawn({
        let pool = Arc::clone(&site.pool);
        async move { fill_all(&pool).await }
    });
    waiting("the background", 0).await;
    let device = session(&site.pool, "v").await;
    let reader = tokio::spawn(async move { device.read(40 * PIECE, 4096).await });
    waiting("the reader", 40 * PIECE).await;
    drop(held);
    reader.await.unwrap().unwrap();
    filling.await.unwrap().unwrap();
    let reads = site.way.reads.lock().unwrap().clone();
    let missed = reads.iter().position(|read| read.at >= 40 * PIECE).unwrap();
    // Pieces that were asked for before the reader's may be recorded behind it.
    let next = reads[missed + 1..].iter().map(|read| read.at / PIECE);
    let first = next.clone().find(|piece| [39, 41].contains(piece));
    assert_eq!(first, Some(41), "it went on at {:?}", next.collect::<Vec<_>>());
    assert_eq!(site.way.read_bytes(OWN_SUFFIX), 64 * PIECE, "each block once");
    site.way.away.store(true, Ordering::SeqCst);
    assert!(all(&session(&site.pool, "v").await).await == content);
}

/// The figure that this is about: an image that is there already is not shipped.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_of_8_gib_with_16_mib_written_ships_about_16_mib() {
    const MIB: u64 = 1 << 20;
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let ways = [Way::new(), Way::new()];
    let mut pools = Vec::new();
    for (dir, way) in dirs.iter().zip(&ways) {
        let connect = way.connector();
        let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect };
        pools.push(Pool::open(config).await.unwrap());
    }
    let (from, to) = (&pools[0], &pools[1]);
    ways[1].lead(from);
    let image = empty(from, "image", 8192 * MIB).await;
    for part in 0..64 {
        image.write(part * 128 * MIB, bytes(7, 1 << 20), false).await.unwrap();
    }
    snapshot(from, "image", "debian").await;
    let request = CopyImage {
        content: None,
        nbd_addr: "there:1".to_owned(),
        export: None,
        keep: Keep::All,
        layer: None,
    };
    to.copy_image(&image_name("debian"), request).await.unwrap();
    to.fill_image(&image_name("debian"), Arc::default()).await.unwrap();
    let source = VolumeSource::Image(image_name("debian"));
    from.create_volume(create("v", None, source)).await.unwrap();
    let device = session(from, "v").await;
    for part in 0..256 {
        device.write(part * 31 * MIB + 4096, bytes(9, 1 << 16), false).await.unwrap();
    }
    snapshot(from, "v", "s").await;
    ways[1].reads.lock().unwrap().clear();
    let chain = sealed_chain(from, "v");
    to.stage_layers(&volume_name("v"), "there:1", &chain).await.unwrap();
    put_head(to, "v", 8192 * MIB, Some(chain[0].layer));
    let taken = session(to, "v").await;
    assert_eq!(taken.read(31 * MIB, 3 * 4096).await.unwrap()[4096..], bytes(9, 2 * 4096));
    fill_all(to).await.unwrap();
    let shipped_bytes = ways[1].read_bytes("");
    assert!((16 * MIB..20 * MIB).contains(&shipped_bytes), "{shipped_bytes} bytes");
    ways[1].away.store(true, Ordering::SeqCst);
    for at in [0, 128 * MIB, 31 * MIB, 62 * MIB, 5000 * MIB] {
        let [here, there] = [&taken, &device].map(|device| device.read(at, 1 << 17));
        assert!(here.await.unwrap() == there.await.unwrap(), "at {at}");
    }
}
