//! What another host's volume has in common with the layers here, beside what the volume shows.

use perigee_model::volume::Resize;

use super::*;
use crate::tests::incoming_layers::replicas::{pin, pull, two};
use crate::{Compared, SharedLayers};

/// What a volume at the home has in common with the other pool's layers. What is read here and what is read at the
/// home together are the volume.
pub(super) async fn check(home: &Site, to: &Site, name: &str) -> Option<SharedLayers> {
    let common = match to.pool.common_with(&volume_name(name), "there:1", None, &[]).await {
        Ok(Compared::Other(common)) => common,
        Ok(Compared::Nothing) => return None,
        Ok(Compared::Same) => panic!("nothing was known"),
        Err(problem) if problem.why.contains("stands on none") => return None,
        Err(problem) => panic!("{problem}"),
    };
    let volume = session(&home.pool, name).await;
    let blocks = volume.size_bytes() / BLOCK;
    let mut at = 0;
    for (run, is_here) in common.runs(&(0..blocks)) {
        assert_eq!(run.start, at);
        at = run.end;
        let (start, length) = (run.start * BLOCK, (run.end - run.start) * BLOCK);
        let length = u32::try_from(length).unwrap();
        assert_eq!(common.has(&run), is_here);
        if is_here {
            let (here, there) = (common.device().read(start, length), volume.read(start, length));
            assert!(here.await.unwrap() == there.await.unwrap(), "blocks {run:?}");
        }
    }
    assert_eq!(at, blocks);
    Some(common)
}

fn here(common: &SharedLayers) -> Vec<(std::ops::Range<u64>, bool)> {
    common.runs(&(0..8))
}

async fn replicated() -> (Site, Site) {
    let (home, to) = two().await;
    session(&home.pool, "v").await.write(0, bytes(1, 8 * 4096), false).await.unwrap();
    pull(&home, &to, 1, 1).await.unwrap();
    to.fill().await;
    pin(&home, to.pool.replica(&volume_name("v")).await.unwrap().points[0].layer).await;
    (home, to)
}

#[tokio::test]
async fn what_was_written_discarded_or_cut_off_after_the_replica_is_read_at_the_home() {
    let (home, to) = replicated().await;
    let device = session(&home.pool, "v").await;
    assert_eq!(here(&check(&home, &to, "v").await.unwrap()), [(0..8, true)]);
    device.write(4096, bytes(2, 4096), false).await.unwrap();
    snapshot(&home.pool, "v", "between").await;
    device.write(2 * BLOCK, bytes(3, 100), false).await.unwrap();
    device.zero(4 * BLOCK, BLOCK, Zeroing::FreeSpace, false).await.unwrap();
    let common = check(&home, &to, "v").await.unwrap();
    let expected = [(0..1, true), (1..3, false), (3..4, true), (4..5, false), (5..8, true)];
    assert_eq!(here(&common), expected);
    assert_eq!(common.changed_bytes(), 3 * BLOCK);
    common.note_write(&(5..20));
    assert_eq!(here(&common).last(), Some(&(4..8, false)));
    // The layer is known already.
    let known = Some(common.layer());
    let again = to.pool.common_with(&volume_name("v"), "there:1", known, &[]).await.unwrap();
    assert!(matches!(again, Compared::Same));
    drop(device);
    for (size_bytes, shrink) in [(6 * BLOCK, true), (10 * BLOCK, false)] {
        let resize = Resize { size_bytes, shrink };
        home.pool.resize_volume(&volume_name("v"), resize).await.unwrap();
    }
    let common = check(&home, &to, "v").await.unwrap();
    assert_eq!(here(&common).last(), Some(&(6..8, false)), "it was cut off, and is zeros now");
}

#[tokio::test]
async fn a_layer_that_could_not_be_read_here_is_passed_over_with_all_that_stands_on_it() {
    let (home, to) = replicated().await;
    let first = check(&home, &to, "v").await.unwrap().layer();
    session(&home.pool, "v").await.write(0, bytes(4, 4096), false).await.unwrap();
    pull(&home, &to, 2, 2).await.unwrap();
    to.fill().await;
    let newest = check(&home, &to, "v").await.unwrap().layer();
    assert_ne!(newest, first);
    for (unreadable, expected) in [(newest, Some(first)), (first, None)] {
        let (v, unreadable) = (volume_name("v"), [unreadable]);
        let compared = to.pool.common_with(&v, "there:1", None, &unreadable).await.unwrap();
        let layer = match compared {
            Compared::Other(common) => Some(common.layer()),
            _ => None,
        };
        assert_eq!(layer, expected);
    }
}

#[tokio::test]
async fn a_copy_that_is_not_complete_is_not_read_instead_of_the_home() {
    let (home, to) = replicated().await;
    session(&home.pool, "v").await.write(0, bytes(4, 4096), false).await.unwrap();
    let first = check(&home, &to, "v").await.unwrap().layer();
    pull(&home, &to, 1, 2).await.unwrap();
    assert_eq!(check(&home, &to, "v").await.unwrap().layer(), first, "the new one is not here");
    to.fill().await;
    let newest = check(&home, &to, "v").await.unwrap();
    assert!(newest.layer() != first && newest.has(&(0..8)));
}

#[tokio::test]
async fn a_clone_and_a_host_with_only_the_image_below_have_something_in_common_too() {
    let (home, to) = replicated().await;
    let clone = create("c", None, VolumeSource::Volume(volume_name("v")));
    home.pool.create_volume(clone).await.unwrap();
    session(&home.pool, "c").await.write(0, bytes(5, 4096), false).await.unwrap();
    let common = check(&home, &to, "c").await.unwrap();
    assert_eq!(here(&common), [(0..1, false), (1..8, true)]);
    // Files of the replica that is dropped stay readable while they are used.
    to.pool.drop_replica(&volume_name("v")).await.unwrap();
    assert!(all(common.device()).await == vec![1; 8 * 4096]);
    let known = Some(common.layer());
    let now = to.pool.common_with(&volume_name("c"), "there:1", known, &[]).await.unwrap();
    assert!(matches!(now, Compared::Nothing), "so the files can be closed");
    drop(empty(&home.pool, "new", 8 * BLOCK).await);
    assert!(check(&home, &to, "new").await.is_none(), "it stands on nothing");
}
