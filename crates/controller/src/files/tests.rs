//! What is kept, refused and collected.

use super::*;
use crate::tars::tests::tar_of;

fn body(bytes: Vec<u8>) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Unpin {
    futures_util::stream::iter([Ok(Bytes::from(bytes))])
}

#[tokio::test]
async fn an_entry_that_leaves_its_directory_is_refused() {
    let dir = tempfile::tempdir().expect("tempdir");
    std::fs::create_dir(dir.path().join("bundles")).expect("mkdir");
    for bad in ["/etc/passwd", "a/../../b", ".."] {
        let tar = tar_of(&[(bad, tar::EntryType::Regular)]);
        let problem =
            store_bundle(dir.path(), &TenantName::default(), body(tar)).await.expect_err(bad);
        assert_eq!(problem.kind, perigee_model::ProblemKind::Invalid);
    }
    let device = tar_of(&[("disk", tar::EntryType::Block)]);
    assert!(store_bundle(dir.path(), &TenantName::default(), body(device)).await.is_err());
    assert!(store_bundle(dir.path(), &TenantName::default(), body(vec![7; 2000])).await.is_err());
    let left = std::fs::read_dir(dir.path().join("bundles")).expect("ls").count();
    assert_eq!(left, 0, "nothing stays of a refused bundle");
}

#[tokio::test]
async fn an_output_that_differs_from_what_the_guest_wrote_is_refused() {
    let dir = tempfile::tempdir().expect("tempdir");
    std::fs::create_dir(dir.path().join("outputs")).expect("mkdir");
    let job = JobId::new("j-0001").expect("id");
    let sha256 = hex(&Sha256::digest(b"right"));
    let stored = store_output(dir.path(), &job, body(b"wrong".to_vec()), 5, &sha256).await;
    assert!(stored.is_err());
    assert!(!output_path(dir.path(), &job).exists());
    let stored = store_output(dir.path(), &job, body(b"right".to_vec()), 5, &sha256).await;
    stored.expect("whole");
    assert!(output_path(dir.path(), &job).exists());
}

#[test]
fn bundles_that_nothing_needs_are_collected_after_a_while() {
    let dir = tempfile::tempdir().expect("tempdir");
    std::fs::create_dir(dir.path().join("bundles")).expect("mkdir");
    let names: Vec<String> = ["a", "b", "c"].iter().map(|letter| letter.repeat(64)).collect();
    for name in &names {
        let file = std::fs::File::create(bundle_path(dir.path(), name)).expect("a bundle");
        file.set_modified(SystemTime::now() - BUNDLE_KEPT * 2).expect("long ago");
    }
    let needed = BTreeSet::from([names[0].clone()]);
    assert!(keep_bundle(dir.path(), &names[1]), "a job is about to need it");
    assert_eq!(collect_bundles(dir.path(), &needed).expect("collect"), 1);
    assert!(bundle_path(dir.path(), &names[0]).exists());
    assert!(bundle_path(dir.path(), &names[1]).exists());
    assert!(!keep_bundle(dir.path(), &names[2]));
}

#[test]
fn what_would_take_the_stores_room_is_refused_with_the_figures() {
    let dir = tempfile::tempdir().expect("tempdir");
    let problem = check_room(&dir.path().join("x"), u64::MAX).expect_err("no disk is so large");
    assert_eq!(problem.kind, perigee_model::ProblemKind::NoSpace);
    assert!(problem.why.contains("256 MiB are kept"), "{problem}");
}
