//! Files as the doors read them.

use proptest::prelude::*;
use tempfile::tempdir;

use super::{path, put, space};
use crate::transfer::Reading;

const LENGTH: u32 = 1_500_000;

fn content() -> Vec<u8> {
    (0..LENGTH).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    /// A client may read on, or go to any other place; and rest, so that nobody takes what is read ahead.
    #[test]
    fn what_is_read_at_a_place_is_what_stands_there(
        places in prop::collection::vec((prop::option::of(0..u64::from(LENGTH) + 10), 1..400_000_usize, any::<bool>()), 1..30),
    ) {
        let dir = tempdir().expect("a directory");
        let space = space(dir.path());
        let content = content();
        put(&space, "a", &content).expect("a file");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
        runtime.expect("a runtime").block_on(async {
            let mut reading = Reading::new(space.read(&path("a")).expect("it opens"));
            let mut at = 0;
            for (place, max, rests) in places {
                at = place.unwrap_or(at);
                let piece = reading.read(at, max).await.expect("a piece");
                let from = usize::try_from(at).map_or(content.len(), |at| content.len().min(at));
                assert!(piece.len() <= max && content[from..].starts_with(&piece), "at {at}");
                assert_eq!(piece.is_empty(), from == content.len(), "at {at}");
                at += piece.len() as u64;
                if rests {
                    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                }
            }
            let mut whole = Vec::new();
            while whole.len() < content.len() {
                let piece = reading.read(whole.len() as u64, content.len()).await.expect("a piece");
                assert!(!piece.is_empty(), "it ends at {}", whole.len());
                whole.extend_from_slice(&piece);
            }
            assert!(whole == content);
        });
    }
}

#[tokio::test]
async fn of_a_damaged_file_nobody_gets_the_end() {
    use std::os::unix::fs::FileExt as _;
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    put(&space, "a", &content()).expect("a file");
    let file = std::fs::File::options().write(true).open(dir.path().join("tree/a"));
    file.and_then(|file| file.write_all_at(b"xyz", 50)).expect("damaged bytes");
    let mut reading = Reading::new(space.read(&path("a")).expect("it opens"));
    let mut at = 0;
    let problem = loop {
        match reading.read(at, 100_000).await {
            Ok(piece) => at += piece.len() as u64,
            Err(problem) => break problem,
        }
        assert!(at < u64::from(LENGTH), "all of it was read");
    };
    assert!(problem.why.contains("damaged"), "{problem}");
    reading.read(at, 100_000).await.expect_err("again");
}
