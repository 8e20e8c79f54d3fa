//! Copies of which it is known what they have to show.

use perigee_model::volume::ContentDigest;

use super::*;
use crate::layers::content::Content;

pub(super) fn digest(bytes: &[u8]) -> ContentDigest {
    let mut content = Content::new((bytes.len() / BLOCK) as u64);
    content.add(0, bytes);
    content.digest()
}

impl Bench {
    fn at(home: Arc<Home>) -> Self {
        let (dir, files) = (tempfile::tempdir().unwrap(), Arc::default());
        let pool = open(&dir, &files, &home, 1);
        Self { dir, files, home, pool, boot: 1 }
    }

    async fn copy_of(&self, content: ContentDigest) -> Result<ImageInfo, perigee_model::Problem> {
        let (nbd_addr, export, layer) = ("there:1".to_owned(), None, None);
        let request =
            CopyImage { content: Some(content), nbd_addr, export, keep: Keep::All, layer };
        self.pool.copy_image(&image_name("i"), request).await
    }

    async fn is_refused(&self) -> bool {
        self.info().await.remote.is_some_and(|remote| remote.refused)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_with_the_content_of_the_image_is_complete_and_keeps_it() {
    let bench = Bench::new();
    let content = digest(&bench.home.content());
    bench.copy_of(content).await.unwrap();
    let filled = bench.fill().await.expect("it is the image's content");
    assert_eq!((filled.content, filled.remote), (Some(content), None));
    let bench = bench.restart(Some(3)).await;
    assert_eq!(bench.info().await.content, Some(content));
    let other = bench.copy_of(digest(&[1; BLOCK])).await.expect_err("it shows something else");
    assert_eq!(other.kind, ProblemKind::Conflict, "{other}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_with_other_content_is_dropped_and_not_fetched_again_also_after_a_restart() {
    let bench = Bench::new();
    bench.copy_of(digest(&[1; BLOCK])).await.unwrap();
    let device = bench.clone_it("c").await;
    device.write(0, bytes(9, BLOCK), true).await.unwrap();
    let refused = bench.fill().await.expect_err("it is not the image's content");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert!(bench.is_refused().await);
    assert_eq!(bench.missing_bytes().await, (BLOCKS * BLOCK) as u64, "nothing of it is kept");
    assert_eq!(read(&device, 0).await.unwrap(), bytes(9, BLOCK), "what the clone has written");
    let bench = bench.restart(Some(5)).await;
    assert!(bench.is_refused().await && bench.pool.copies_to_fill().is_empty());
    assert_eq!(bench.fill().await.unwrap_err().kind, ProblemKind::Conflict);
    bench.pool.delete_volume(&volume_name("c")).await.unwrap();
    bench.pool.delete_image(&image_name("i")).await.unwrap();
    bench.copy_of(digest(&bench.home.content())).await.expect("it is copied again");
    bench.fill().await.expect("now it is right");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_bad_copy_of_that_layer_is_deleted_where_that_is_asked_for() {
    let bench = Bench::new();
    let content = digest(&bench.home.content());
    let other = digest(&[1; BLOCK]);
    let delete = async |layer, wanted| {
        bench.pool.delete_bad_copy(&image_name("i"), layer, Some(wanted)).await.map_err(|p| p.kind)
    };
    let layer = bench.copy_of(content).await.unwrap().layer;
    assert_eq!(delete(layer, other).await, Err(ProblemKind::Conflict), "it is not complete");
    bench.fill().await.expect("it is the image's content");
    assert_eq!(delete(layer, content).await, Err(ProblemKind::Conflict), "it is good");
    let another = LayerId(uuid::Uuid::new_v4());
    assert_eq!(delete(another, other).await, Err(ProblemKind::Conflict), "another layer");
    assert_eq!(delete(layer, other).await, Ok(()), "it shows something else");
    assert_eq!(delete(layer, other).await, Err(ProblemKind::NotFound));
    bench.copy_of(other).await.unwrap();
    bench.fill().await.expect_err("it is not the image's content");
    assert_eq!(delete(layer, other).await, Ok(()), "it was refused");
}

/// The background asks what is empty, and a reader just reads.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_host_has_called_empty_and_gives_to_a_reader_is_compared_too() {
    let mut home = Home::new();
    let right = digest(&home.content());
    let inside = Arc::get_mut(&mut home).unwrap();
    inside.bytes[HOLE.start * BLOCK..HOLE.end * BLOCK].fill(66);
    let bench = Bench::at(home);
    bench.copy_of(right).await.unwrap();
    let device = bench.clone_it("c").await;
    assert_eq!(read(&device, HOLE.start).await.unwrap(), bytes(66, BLOCK));
    bench.settle().await;
    assert_eq!(bench.fill().await.unwrap_err().kind, ProblemKind::Conflict);
    assert!(bench.is_refused().await);
}

/// An image that was copied before anybody knew what it shows.
#[tokio::test(flavor = "multi_thread")]
async fn the_content_of_a_copy_that_nobody_could_compare_is_found_in_the_background() {
    let bench = Bench::copied(Keep::All).await;
    bench.pool.find_contents().await;
    assert_eq!(bench.info().await.content, None, "blocks are missing");
    let filled = bench.fill().await.unwrap();
    assert_eq!((filled.content, filled.remote), (None, None));
    bench.pool.find_contents().await;
    assert_eq!(bench.info().await.content, Some(digest(&bench.home.content())));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_content_that_becomes_known_while_the_copy_is_fetched_is_compared() {
    let bench = Bench::copied(Keep::All).await;
    bench.copy_of(digest(&[1; BLOCK])).await.expect("the same copy");
    assert_eq!(bench.fill().await.unwrap_err().kind, ProblemKind::Conflict);
}
