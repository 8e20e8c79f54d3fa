//! What is kept, refused and collected.

use super::*;

fn body(bytes: Vec<u8>) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Unpin {
    futures_util::stream::iter([Ok(Bytes::from(bytes))])
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
fn what_would_take_the_stores_room_is_refused_with_the_figures() {
    let dir = tempfile::tempdir().expect("tempdir");
    let problem = check_room(&dir.path().join("x"), u64::MAX).expect_err("no disk is so large");
    assert_eq!(problem.kind, perigee_model::ProblemKind::NoSpace);
    assert!(problem.why.contains("256 MiB are kept"), "{problem}");
}
