//! The host from which a volume comes merges its layers.

use perigee_model::ProblemKind;
use perigee_model::home::{CallOff, Depart, Departed, ServerAddresses, TakeVolume};
use perigee_model::volume::VolumeSource;

use super::*;

/// Volume `v` has three sealed layers without names.
async fn three_layers() -> (Site, Arc<dyn Device>) {
    let from = Site::new();
    let device = empty(&from.pool, "v", 12 * BLOCK).await;
    for layer in 0..3_u8 {
        device
            .write(u64::from(layer) * 2 * BLOCK, bytes(layer + 1, 3 * 4096), false)
            .await
            .unwrap();
        from.pool.seal_ahead(&volume_name("v")).await.unwrap();
    }
    (from, device)
}

fn leading_to(from: &Site) -> Site {
    let site = Site::new();
    site.way.lead(&from.pool);
    site
}

async fn depart(from: &Site) -> (TakeVolume, Departed) {
    let volume = volume_name("v");
    let tenure = from.pool.catalog.tenure(&volume).unwrap().unwrap();
    let there = ServerAddresses { nbd_addr: "there:1".to_owned(), control_url: String::new() };
    let ask = Depart { tenure, to: there.clone() };
    let departed = from.pool.move_step(&volume).await.unwrap().depart(&ask).await.unwrap();
    (TakeVolume { from: there.clone(), to: there, tenure, grant: None }, departed)
}

async fn arrive(site: &Site, (take, departed): (TakeVolume, Departed)) {
    let volume = volume_name("v");
    site.pool.stage_layers(&volume, "there:1", &departed.chain).await.unwrap();
    site.pool.move_step(&volume).await.unwrap().arrive(&take, departed).await.unwrap();
}

async fn compact(pool: &Arc<Pool>, name: &str) -> (u64, u64) {
    let done = pool.compact_volume(&volume_name(name), Arc::default()).await.unwrap();
    (done.layers_before, done.layers_after)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_volume_that_departed_stands_on_is_not_merged() {
    let (from, device) = three_layers().await;
    let clone = create("c", None, VolumeSource::Volume(volume_name("v")));
    from.pool.create_volume(clone).await.unwrap();
    device.write(9 * BLOCK, bytes(9, 4096), false).await.unwrap();
    let content = all(&device).await;
    let site = leading_to(&from);
    // A compaction runs already.
    let clone = from.pool.catalog.volume(&volume_name("c")).unwrap().expect("it was created");
    let (runs, _) = from.pool.runs("compact", clone.head).unwrap();
    let run = runs.into_iter().next().expect("the layers on which both stand");
    let (row, run) = from.pool.merge("compact", run, &crate::Work::default()).unwrap();
    arrive(&site, depart(&from).await).await;
    let late = from.pool.put_in_place("compact", &run, &row).unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    assert_eq!(compact(&from.pool, "c").await, (4, 4));
    assert!(all(&session(&site.pool, "v").await).await == content);
    site.fill().await;
    let tenure = site.pool.catalog.tenure(&volume_name("v")).unwrap().unwrap();
    from.pool.forget_departed(&volume_name("v"), tenure).await.unwrap();
    assert_eq!(compact(&from.pool, "c").await, (4, 1), "nobody else needs them any more");
    assert!(all(&session(&site.pool, "v").await).await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_that_are_merged_before_the_volume_departs_are_staged_anew() {
    for named in [false, true] {
        let (from, device) = three_layers().await;
        if named {
            device.write(7 * BLOCK, bytes(7, 4096), false).await.unwrap();
            snapshot(&from.pool, "v", "s").await;
        }
        let site = leading_to(&from);
        let volume = volume_name("v");
        let sealed = from.pool.seal_ahead(&volume).await.unwrap();
        site.pool.stage_layers(&volume, "there:1", &sealed).await.unwrap();
        // The head takes all, or it stands on the snapshot, which stands on the merged layer.
        assert_eq!(compact(&from.pool, "v").await.1, if named { 3 } else { 1 });
        device.write(9 * BLOCK, bytes(9, 4096), false).await.unwrap();
        let content = all(&device).await;
        let (take, departed) = depart(&from).await;
        let layers = departed.chain.len();
        arrive(&site, (take, departed)).await;
        assert!(all(&session(&site.pool, "v").await).await == content);
        site.fill().await;
        let here = site.pool.catalog.layers().unwrap().len();
        assert_eq!(here, layers + 1, "the head stands on what departed, and nothing else is left");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_take_that_goes_on_after_it_was_refused_stages_nothing() {
    let (from, _device) = three_layers().await;
    let site = leading_to(&from);
    let volume = volume_name("v");
    let sealed = from.pool.seal_ahead(&volume).await.unwrap();
    let tenure = from.pool.catalog.tenure(&volume).unwrap().unwrap();
    let there = ServerAddresses { nbd_addr: "there:1".to_owned(), control_url: String::new() };
    let take = TakeVolume { from: there.clone(), to: there, tenure, grant: None };
    site.pool.stage_arrival(&volume, &take, &sealed[2..]).await.unwrap();
    assert_eq!(site.pool.catalog.layers().unwrap().len(), 1);
    site.pool.refuse_home(&volume, CallOff { tenure }).await.unwrap();
    let late = site.pool.stage_arrival(&volume, &take, &sealed).await.unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    assert!(site.pool.catalog.layers().unwrap().is_empty());
    assert!(site.files.disk().names().is_empty());
    // The same layers for somebody who wants them, and then does not.
    site.pool.stage_layers(&volume, "there:1", &sealed).await.unwrap();
    site.pool.forget_staged(&volume).await;
    assert!(site.pool.catalog.layers().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_an_earlier_move_has_left_goes_on_from_the_volume_s_present_home() {
    let (from, device) = three_layers().await;
    let site = leading_to(&from);
    let (volume, content) = (volume_name("v"), all(&device).await);
    let sealed = from.pool.seal_ahead(&volume).await.unwrap();
    site.pool.stage_layers(&volume, "gone:1", &sealed).await.unwrap();
    *site.way.gone.lock().unwrap() = Some("gone:1".to_owned());
    arrive(&site, depart(&from).await).await;
    assert!(all(&session(&site.pool, "v").await).await == content);
    site.fill().await;
    assert_eq!(site.pool.volume_info(&volume).await.unwrap().remote_bytes, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_is_refused_leaves_no_staged_layers() {
    let (from, _device) = three_layers().await;
    let site = leading_to(&from);
    let volume = volume_name("v");
    let sealed = from.pool.seal_ahead(&volume).await.unwrap();
    // The move of another volume, whose layer stands on the lowest one too, goes on.
    let other = volume_name("other");
    let layer = LayerId(Uuid::from_u128(7));
    let above = DepartedLayer { layer, own: Some(Vec::new()), ..sealed[2].clone() };
    let others = [above, sealed[2].clone()];
    site.pool.stage_layers(&other, "there:1", &others).await.unwrap();
    site.pool.stage_layers(&volume, "there:1", &sealed).await.unwrap();
    let tenure = from.pool.catalog.tenure(&volume).unwrap().unwrap();
    site.pool.refuse_home(&volume, CallOff { tenure }).await.unwrap();
    let left = site.pool.catalog.chain(layer).unwrap();
    assert_eq!(left.iter().map(|row| row.id).collect::<Vec<_>>(), [layer, sealed[2].layer]);
    assert_eq!(site.pool.catalog.layers().unwrap().len(), 2);
    site.pool.refuse_home(&other, CallOff { tenure }).await.unwrap();
    assert!(site.pool.catalog.layers().unwrap().is_empty());
    assert!(site.files.disk().names().is_empty());
}
