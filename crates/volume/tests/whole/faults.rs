//! What a server that was stopped or killed, or a full disk, leaves behind.

use perigee_model::volume::{
    CopyImage, CreateVolume, EpochIssued, ImageInfo, Keep, Resize, Snapshot, VolumeInfo,
    VolumeSource,
};
use perigee_model::{ImageName, Problem, ProblemKind, VolumeName};

use crate::handover::{ask, attach, carry, take};
use crate::server::{MIB, Server, assert_io, run, said, until};
use crate::small::Small;

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_is_there_after_a_stop_and_after_a_kill() {
    let mut server = Server::start().await;
    server.create("data", 8 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 1M", "write -P 1 1M 1000"]));
    server.terminate().await;
    server.start_process().await;
    assert_io(
        &server.qemu_io("data", &["read -P 1 0 1M", "read -P 1 1M 1000", "write -P 2 3M 1M"]),
    );
    server.kill();
    server.start_process().await;
    assert_io(&server.qemu_io("data", &["read -P 1 0 1M", "read -P 2 3M 1M", "read -P 0 4M 4M"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_was_answered_survives_a_kill_before_any_flush() {
    let mut server = Server::start().await;
    server.create("data", 8 * MIB).await;
    let uri = server.uri("data");
    // -t unsafe: qemu-io sends no flush at its end.
    run(&["qemu-io", "-t", "unsafe", "-f", "raw", "-c", "write -P 7 1M 1M", &uri]);
    server.kill();
    server.start_process().await;
    assert_io(&server.qemu_io("data", &["read -P 7 1M 1M", "read -P 0 0 1M"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_is_open_in_one_server_only() {
    let server = Server::start().await;
    let config = perigee_volume::Config {
        iscsi: perigee_volume::IscsiOptions::default(),
        private: None,
        pool: server.pool.clone(),
        nbd: Vec::new(),
        remotes: perigee_volume::RemoteOptions::default(),
        clients: perigee_volume::ServerOptions::default(),
        control: Vec::new(),
        image_dirs: Vec::new(),
        vm_sockets: server.pool.join("vms"),
        boot_id: perigee_http::BOOT_ID.into(),
    };
    let problem: Problem = perigee_volume::serve(config).await.expect_err("it is open already");
    assert_eq!(problem.kind, ProblemKind::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_refuses_that_write_and_goes_on_when_there_is_space() {
    match Small::mount() {
        Some(small) => fill_and_go_on(small).await,
        None => eprintln!("skipped: only root can mount a small filesystem"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_on_ext4_refuses_that_write_and_goes_on_when_there_is_space() {
    match Small::mount_ext4() {
        Some(small) => fill_and_go_on(small).await,
        None => eprintln!("skipped: only root with loop devices can mount a small ext4"),
    }
}

async fn fill_and_go_on(small: Small) {
    let server = Server::start_in(small.path.join("pool")).await;
    server.create("data", 64 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 4M", "flush"]));
    small.fill(14);
    let full = server.qemu_io("data", &["write -P 2 4M 16M"]);
    assert!(said(&full).contains("No space left on device"), "{full:?}");
    assert_io(&server.qemu_io("data", &["read -P 1 0 4M", "write -P 3 0 1M", "flush"]));
    small.make_room();
    assert_io(&server.qemu_io("data", &["write -P 2 4M 10M", "flush"]));
    assert_io(&server.qemu_io("data", &["read -P 3 0 1M", "read -P 1 1M 3M", "read -P 2 4M 10M"]));
    let info: VolumeInfo = server.control.get("/v1/volumes/data").await.expect("the volume");
    assert!(info.head_bytes >= 14 * MIB, "{info:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fails_under_the_catalog_is_a_clean_error_and_loses_nothing() {
    let Some(small) = Small::mount_ext4() else {
        return eprintln!("skipped: only root with loop devices can mount a small ext4");
    };
    let mut server = Server::start_in(small.path.join("pool")).await;
    server.create("data", 64 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 1 0 1M", "flush"]));
    let before: VolumeInfo = server.control.get("/v1/volumes/data").await.expect("the volume");
    small.pull_the_cable();
    let source = || VolumeSource::Volume(VolumeName::new("data").expect("a name"));
    for (name, source) in [("empty", VolumeSource::Empty), ("clone", source())] {
        let name = VolumeName::new(name).expect("a name");
        let request = CreateVolume::new(name, Some(64 * MIB), source);
        let refused = server.control.post::<VolumeInfo>("/v1/volumes", &request).await;
        let refused = refused.expect_err("it can't be recorded");
        assert_eq!(refused.kind, ProblemKind::Internal, "{refused}");
        assert!(refused.what.starts_with("can't create volume"), "{refused}");
    }
    let resize = Resize { size_bytes: 128 * MIB, shrink: false };
    let resized = server.control.post::<VolumeInfo>("/v1/volumes/data/resize", &resize).await;
    assert_eq!(resized.expect_err("nor this").kind, ProblemKind::Internal);
    let issued = server.control.post::<EpochIssued>("/v1/volumes/data/epoch/issue", &()).await;
    assert_eq!(issued.expect_err("nor this").kind, ProblemKind::Internal);
    let deleted = server.control.delete("/v1/volumes/data").await;
    assert_eq!(deleted.expect_err("nor this").kind, ProblemKind::Internal);
    server.kill();
    small.plug_it_in_again();
    server.start_process().await;
    let after: Vec<VolumeInfo> = server.control.get("/v1/volumes").await.expect("the volumes");
    let names: Vec<_> = after.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["data"]);
    assert_eq!((&after[0].chain, after[0].size_bytes), (&before.chain, before.size_bytes));
    assert_io(&server.qemu_io("data", &["read -P 1 0 1M", "write -P 2 1M 1M", "flush"]));
    server.create("empty", MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fails_at_the_home_is_an_error_elsewhere_only_until_it_is_right_again() {
    let Some(small) = Small::mount_ext4() else {
        return eprintln!("skipped: only root with loop devices can mount a small ext4");
    };
    let mut home = Server::start_in(small.path.join("pool")).await;
    let host = Server::start().await;
    let epoch = home.create("data", 16 * MIB).await.epoch;
    let export = format!("data@{epoch}");
    assert_io(&home.qemu_io(&export, &["write -P 1 0 4M", "flush"]));
    let golden = ImageName::new("golden").expect("a name");
    let snapshot = Snapshot { image: golden };
    let _: ImageInfo =
        home.control.post("/v1/volumes/data/snapshot", &snapshot).await.expect("an image");
    assert_io(&home.qemu_io(&export, &["write -P 2 4M 1M", "flush"]));
    let nbd_addr = home.nbd_addr.clone();
    let copy = CopyImage { content: None, nbd_addr, export: None, keep: Keep::Read, layer: None };
    let _: ImageInfo =
        host.control.post("/v1/images/golden/copy", &copy).await.expect("a copy of it");
    host.clone_image("clone", "golden").await;
    assert_io(&host.qemu_io("clone", &["read -P 1 0 64k", "write -P 3 8M 64k", "flush"]));
    attach(&host, &home).await;
    let ask = ask(&home, &host).await;

    small.pull_the_cable();
    for (export, read) in [(export.as_str(), "read 4M 4k"), ("clone", "read 1M 4k")] {
        let failed = said(&host.qemu_io(export, &[read]));
        assert!(failed.contains("Input/output error"), "{export}: {failed}");
    }
    let path = "/v1/images/golden/keep";
    let _: ImageInfo = host.control.put(path, &Keep::All).await.expect("that it begins");
    until("the copy to say why it is not complete", async || {
        let remote = image(&host).await.remote.expect("the disk is away");
        remote.failed.is_some_and(|why| why.contains("Input/output error"))
    })
    .await;
    let refused = take(&host, &ask).await.expect_err("a home that can't seal gives nothing away");
    assert!(!refused.why.is_empty(), "{refused}");
    assert_io(&host.qemu_io("clone", &["read -P 3 8M 64k", "write -P 4 9M 64k", "flush"]));

    home.kill();
    small.plug_it_in_again();
    home.start_process().await;
    assert_io(&host.qemu_io(&export, &["read -P 2 4M 1M", "write -P 5 6M 64k", "flush"]));
    assert_io(&host.qemu_io("clone", &["read -P 1 1M 64k", "read -P 4 9M 64k"]));
    until("the background to go on", async || image(&host).await.remote.is_none()).await;
    carry(&home, &host).await;
    assert_io(&host.qemu_io(&export, &["read -P 1 0 4M", "read -P 2 4M 1M", "read -P 5 6M 64k"]));
}

async fn image(host: &Server) -> ImageInfo {
    host.control.get("/v1/images/golden").await.expect("the image")
}
