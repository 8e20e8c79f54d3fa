//! Catalogs and maps that no program of ours would write. What the fuzz targets found is here.

use perigee_model::volume::Snapshot;
use rusqlite::Connection;

use super::*;

/// A pool with the volume `v`, its image `s`, and the change made to its catalog.
async fn pool_with(change: &str) -> (tempfile::TempDir, Arc<Pool>) {
    let dir = tempfile::tempdir().unwrap();
    {
        let pool = open_real(dir.path()).await;
        let device = empty(&pool, "v", 8 * 4096).await;
        device.write(0, bytes(1, 4096), true).await.unwrap();
        pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    }
    let catalog = Connection::open(dir.path().join("catalog.sqlite")).unwrap();
    catalog.pragma_update(None, "foreign_keys", false).unwrap();
    catalog.execute_batch(change).unwrap();
    drop(catalog);
    let pool = open_real(dir.path()).await;
    (dir, pool)
}

async fn problem_of_opening(pool: &Arc<Pool>) -> String {
    match pool.volume(&volume_name("v")).await {
        Ok(_) => panic!("a damaged volume was opened"),
        Err(problem) => problem.to_string(),
    }
}

#[tokio::test]
async fn a_chain_that_goes_round_in_a_circle_is_refused_and_walked_once() {
    let (_dir, pool) = pool_with("UPDATE layers SET parent = id").await;
    let why = problem_of_opening(&pool).await;
    assert!(why.contains("is its own ancestor"), "{why}");
    drop(pool.info().await);
    drop(pool.volumes().await);
    drop(pool.images().await);
}

#[tokio::test]
async fn a_size_that_no_layer_has_takes_no_memory_and_is_refused() {
    for size_bytes in [0_u64, 1, 16 << 40, 0x7869_6eff << 32] {
        let change = format!("UPDATE volumes SET size_bytes = {size_bytes}");
        let (_dir, pool) = pool_with(&change).await;
        let why = problem_of_opening(&pool).await;
        assert!(why.contains(&format!("no layer has {size_bytes} bytes")), "{why}");
    }
}

#[tokio::test]
async fn layers_of_more_bytes_than_there_are_are_listed() {
    let huge = i64::MAX;
    let change = format!(
        "INSERT INTO layers (id, size_bytes) VALUES ('{a}', 4096), ('{b}', 4096);
         UPDATE layers SET data_bytes = {huge}",
        a = uuid::Uuid::from_u128(1),
        b = uuid::Uuid::from_u128(2),
    );
    let (_dir, pool) = pool_with(&change).await;
    assert_eq!(pool.info().await.expect("an answer").data_bytes, u64::MAX);
    assert_eq!(pool.volumes().await.expect("a list").len(), 1);
}
