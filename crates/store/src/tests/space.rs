//! What volumes, tenants and pools take, and that asking for it opens nothing.

use perigee_model::TenantName;
use perigee_model::volume::{CachePolicy, Snapshot, VolumeSource};

use super::*;

const BLOCK: u64 = 4096;

#[tokio::test]
async fn own_shared_and_remote_bytes_follow_who_needs_a_layer() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", 16 * BLOCK).await;
    device.write(0, bytes(1, 3 * 4096), false).await.unwrap();
    let own = pool.volume_info(&volume_name("v")).await.unwrap();
    assert_eq!((own.own_bytes, own.shared_bytes, own.remote_bytes), (3 * BLOCK, 0, 0));

    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    device.write(0, bytes(2, 4096), false).await.unwrap();
    let named = pool.volume_info(&volume_name("v")).await.unwrap();
    assert_eq!((named.own_bytes, named.shared_bytes), (BLOCK, 3 * BLOCK), "the image needs it too");

    let there = VolumeSource::Remote { nbd_addr: "there:1".into(), export: "image:x".into() };
    pool.create_volume(create("r", None, there)).await.unwrap();
    let remote = pool.volume_info(&volume_name("r")).await.unwrap();
    assert_eq!(remote.remote_bytes, remote_bytes().len() as u64);
    assert_eq!((remote.own_bytes, remote.shared_bytes), (0, 0));
}

#[tokio::test]
async fn a_layer_without_a_name_is_shared_while_two_volumes_stand_on_it() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    empty(&pool, "v", 16 * BLOCK).await.write(0, bytes(1, 4096), false).await.unwrap();
    let from = VolumeSource::Volume(volume_name("v"));
    pool.create_volume(create("c", None, from)).await.unwrap();
    let shared = pool.volume_info(&volume_name("c")).await.unwrap();
    assert_eq!((shared.own_bytes, shared.shared_bytes), (0, BLOCK));
    pool.delete_volume(&volume_name("c")).await.unwrap();
    let alone = pool.volume_info(&volume_name("v")).await.unwrap();
    assert_eq!((alone.own_bytes, alone.shared_bytes), (BLOCK, 0));
}

#[tokio::test]
async fn a_tenant_has_the_sum_of_its_volumes_and_the_pool_counts_a_layer_once() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", 16 * BLOCK).await;
    device.write(0, bytes(1, 2 * 4096), false).await.unwrap();
    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    for name in ["a", "b"] {
        let mut clone = create(name, None, VolumeSource::Image(image_name("s")));
        clone.tenant = TenantName::new("blue").unwrap();
        clone.cache = CachePolicy::Direct;
        let info = pool.create_volume(clone).await.unwrap();
        assert_eq!((info.tenant.as_str(), info.cache), ("blue", CachePolicy::Direct));
    }
    session(&pool, "a").await.write(0, bytes(2, 4096), false).await.unwrap();
    let info = pool.info().await.unwrap();
    assert_eq!((info.data_bytes, info.shared_bytes), (3 * BLOCK, 2 * BLOCK));
    assert_eq!((info.images, info.volumes, info.format_version), (1, 3, 1));
    let found: Vec<_> = info
        .tenants
        .iter()
        .map(|t| (t.tenant.as_str(), t.volumes, t.virtual_bytes, t.own_bytes))
        .collect();
    assert_eq!(found, [("blue", 2, 32 * BLOCK, BLOCK), ("default", 1, 16 * BLOCK, 0)]);
}

#[tokio::test]
async fn listing_and_deleting_need_no_file_of_a_volume() {
    let dir = tempfile::tempdir().unwrap();
    {
        let pool = open_real(dir.path()).await;
        let device = empty(&pool, "v", 16 * BLOCK).await;
        device.write(0, bytes(1, 4096), true).await.unwrap();
    }
    let pool = open_real(dir.path()).await;
    for file in std::fs::read_dir(dir.path().join("layers")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "map") {
            std::fs::write(path, "damaged").unwrap();
        }
    }
    let listed = pool.volumes().await.unwrap();
    assert_eq!((listed.len(), listed[0].own_bytes), (1, BLOCK), "from the catalog and the disk");
    assert!(pool.volume(&volume_name("v")).await.is_err(), "it can't be opened");
    pool.delete_volume(&volume_name("v")).await.unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("layers")).unwrap().count(), 0);
}
