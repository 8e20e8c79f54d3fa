//! Other sizes of a volume in use.

use perigee_model::ProblemKind;
use perigee_model::volume::{Resize, Snapshot, VolumeSource};

use super::*;

async fn resize(pool: &Arc<Pool>, blocks: u64, shrink: bool) -> Result<u64, ProblemKind> {
    let request = Resize { size_bytes: blocks * 4096, shrink };
    let resized = pool.resize_volume(&volume_name("v"), request).await;
    resized.map(|info| info.size_bytes / 4096).map_err(|problem| problem.kind)
}

#[tokio::test]
async fn a_session_reads_and_writes_what_the_volume_grew_by() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", 4 * 4096).await;
    device.write(0, bytes(1, 4 * 4096), false).await.unwrap();
    assert!(device.write(4 * 4096, bytes(2, 1), false).await.is_err(), "beyond the end");
    assert_eq!(resize(&pool, 8, false).await, Ok(8));
    assert_eq!(device.size_bytes(), 8 * 4096);
    device.write(7 * 4096, bytes(2, 4096), true).await.unwrap();
    let expected = [vec![1; 4 * 4096], vec![0; 3 * 4096], vec![2; 4096]].concat();
    assert_eq!(all(&device).await, expected);
    drop((device, pool));
    let pool = open_real(dir.path()).await;
    assert_eq!(all(&session(&pool, "v").await).await, expected);
}

#[tokio::test]
async fn what_a_shrunken_volume_had_does_not_come_back_when_it_grows() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", 8 * 4096).await;
    device.write(0, bytes(1, 8 * 4096), false).await.unwrap();
    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    assert_eq!(resize(&pool, 4, false).await, Err(ProblemKind::Invalid), "not asked for");
    assert_eq!(resize(&pool, 4, true).await, Err(ProblemKind::Conflict), "in use");
    drop(device);
    assert_eq!(resize(&pool, 4, true).await, Ok(4));

    // Its head is untouched, and the layer below is larger than the volume.
    let clone = create("c", Some(8 * 4096), VolumeSource::Volume(volume_name("v")));
    pool.create_volume(clone).await.unwrap();
    assert_eq!(resize(&pool, 8, false).await, Ok(8));
    let expected = [vec![1; 4 * 4096], vec![0; 4 * 4096]].concat();
    assert_eq!(all(&session(&pool, "c").await).await, expected, "the clone");
    assert_eq!(all(&session(&pool, "v").await).await, expected, "the volume");
    drop(pool);
    let pool = open_real(dir.path()).await;
    assert_eq!(all(&session(&pool, "v").await).await, expected, "opened again");
}

#[tokio::test]
async fn a_size_that_a_volume_has_changes_nothing_and_one_that_no_layer_has_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    empty(&pool, "v", 4 * 4096).await;
    assert_eq!(resize(&pool, 4, false).await, Ok(4));
    assert_eq!(pool.volume_info(&volume_name("v")).await.unwrap().chain.len(), 1);
    assert_eq!(resize(&pool, 0, true).await, Err(ProblemKind::Invalid));
    assert_eq!(resize(&pool, 5 << 40, false).await, Err(ProblemKind::Invalid));
}
