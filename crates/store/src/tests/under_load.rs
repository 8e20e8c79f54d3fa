//! What a client may do while its volume is sealed under it.

use std::sync::atomic::{AtomicBool, Ordering};

use perigee_model::volume::Snapshot;

use super::*;
use crate::layers::layer::data_name;

#[tokio::test]
async fn a_client_writes_while_the_snapshot_s_long_flush_runs() {
    let dir = tempfile::tempdir().unwrap();
    let files = Arc::new(SimFiles::default());
    let pool = open_sim(dir.path(), &files, 1);
    let device = empty(&pool, "v", 16 * 4096).await;
    device.write(0, bytes(1, 8 * 4096), false).await.unwrap();
    let head = pool.volume_info(&volume_name("v")).await.unwrap().chain[0];
    let data = files.file(&data_name(head));
    let written = Arc::new(AtomicBool::new(false));
    let (writer, done) = (Arc::clone(&device), Arc::clone(&written));
    *data.on_sync.lock().unwrap() = Some(Box::new(move || {
        let wrote = writer.try_write(0, &[2; 4096]);
        done.store(matches!(wrote, Some(Ok(()))), Ordering::SeqCst);
    }));
    let syncs = data.syncs();
    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    assert!(written.load(Ordering::SeqCst), "the first flush holds no writer up");
    assert_eq!(data.syncs() - syncs, 2, "one flush before the writers wait, one while they do");
    let image = pool.open_image(&image_name("s")).await.unwrap();
    assert_eq!(image.read(0, 4096).await.unwrap(), bytes(2, 4096), "what came meanwhile is in it");
}

#[tokio::test]
async fn writers_wait_for_no_flush_when_nothing_was_written_during_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let files = Arc::new(SimFiles::default());
    let pool = open_sim(dir.path(), &files, 1);
    let device = empty(&pool, "v", 16 * 4096).await;
    device.write(0, bytes(1, 8 * 4096), false).await.unwrap();
    let head = pool.volume_info(&volume_name("v")).await.unwrap().chain[0];
    let data = files.file(&data_name(head));
    let syncs = data.syncs();
    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    assert_eq!(data.syncs() - syncs, 1);
}
