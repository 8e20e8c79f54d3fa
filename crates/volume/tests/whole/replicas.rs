//! Replicas of volumes: rounds that ship only what changed, and the volume's life after its home was lost.

use perigee_model::home::{HomeState, ServerAddresses, Tenure, VolumeHome};
use perigee_model::replica::{
    PinReplica, PromoteReplica, PullReplica, PulledReplica, ReplicaPin, ReplicaPoint, Supersede,
    Superseded, VolumeReplica,
};
use perigee_model::volume::{
    Attach, Attachment, CheckReport, CheckScope, ExportStats, IoStats, VolumeInfo,
};
use perigee_model::{Incarnation, ProblemKind, SiteId};

use crate::handover::Disk;
use crate::server::{MIB, Server, assert_io, said, until};

fn addresses(server: &Server) -> ServerAddresses {
    let control_url = format!("http://{}", server.control_addr);
    ServerAddresses { nbd_addr: server.nbd_addr.clone(), control_url }
}

fn site() -> SiteId {
    SiteId::new("cloud").expect("a name")
}

async fn replica(at: &Server) -> VolumeReplica {
    at.control.get("/v1/volumes/data/replica").await.expect("what it has")
}

/// Begins a round. Returns what it has to ship.
async fn pull(home: &Server, to: &Server, keep: u32) -> u64 {
    let before = replica(to).await.points.first().map_or(0, |point| point.taken_ms);
    let ask = PullReplica {
        from: addresses(home),
        replica: site(),
        keep,
        taken_ms: before + 1000,
        grant: None,
    };
    let begun: PulledReplica =
        to.control.post("/v1/volumes/data/replica/pull", &ask).await.expect("a round");
    begun.ships_bytes
}

/// Waits until a round is complete, and tells the home, as the controller does.
async fn completed(home: &Server, to: &Server) -> ReplicaPoint {
    until("the replica to be complete", async || replica(to).await.points[0].missing_bytes == 0)
        .await;
    let newest = replica(to).await.points[0].clone();
    let pin = PinReplica { replica: site(), layer: Some(newest.layer) };
    let _: () = home.control.post("/v1/volumes/data/replica/pins", &pin).await.expect("a pin");
    newest
}

async fn behind_bytes(home: &Server) -> u64 {
    let pins: Vec<ReplicaPin> =
        home.control.get("/v1/volumes/data/replica/pins").await.expect("pins");
    assert_eq!(pins.len(), 1, "{pins:?}");
    pins[0].newer_bytes
}

async fn tenure(server: &Server) -> Tenure {
    let home: VolumeHome = server.control.get("/v1/volumes/data/home").await.expect("a home");
    match home.home {
        HomeState::Here { tenure, .. } => tenure,
        other => panic!("{other:?}"),
    }
}

async fn check_pool(server: &Server) {
    let report: CheckReport =
        server.control.post_long("/v1/check", &CheckScope::Pool, |_| {}).await.expect("a report");
    assert!(report.faults.is_empty() && report.leftovers.is_empty(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_ships_what_changed_and_a_lost_home_is_replaced_by_the_replica() {
    let (mut one, mut two) = (Server::start().await, Server::start().await);
    let epoch = one.create("data", 64 * MIB).await.epoch;
    let export = format!("data@{epoch}");
    assert_io(&one.qemu_io(&export, &["write -P 1 0 16M", "flush"]));
    assert_eq!(pull(&one, &two, 2).await, 16 * MIB);
    completed(&one, &two).await;
    assert_io(&one.qemu_io(&export, &["write -P 2 4M 1M", "discard 8M 1M", "flush"]));
    assert_eq!(behind_bytes(&one).await, MIB);
    // Either server is killed in the middle of a round, and it goes on.
    assert_eq!(pull(&one, &two, 2).await, MIB, "only what changed is shipped");
    two.kill();
    two.start_process().await;
    one.kill();
    one.start_process().await;
    let second = completed(&one, &two).await;
    assert_eq!(behind_bytes(&one).await, 0);
    assert_io(&one.qemu_io(&export, &["write -P 3 5M 64k", "flush"]));
    assert_eq!(replica(&two).await.points.len(), 2);
    let lost = tenure(&one).await;
    one.kill();

    let promote = PromoteReplica { layer: second.layer, tenure: Tenure::first(Incarnation(77)) };
    for _ in 0..2 {
        let home: VolumeHome =
            two.control.post("/v1/volumes/data/replica/promote", &promote).await.expect("it");
        assert_eq!(home.home, HomeState::Here { tenure: promote.tenure, missing_bytes: 0 });
    }
    let info: VolumeInfo = two.control.get("/v1/volumes/data").await.expect("the volume");
    assert_eq!((info.epoch.incarnation(), info.size_bytes), (Incarnation(77), 64 * MIB));
    let check = ["read -P 1 0 4M", "read -P 2 4M 1M", "read -P 1 5M 3M", "read -P 0 8M 1M"];
    assert_io(&two.qemu_io("data", &check));
    let old = said(&two.qemu_io(&export, &["read 0 4k"]));
    assert!(old.contains("another volume was created with its name"), "{old}");
    assert_io(&two.qemu_io("data", &["write -P 9 0 64k", "flush"]));
    check_pool(&two).await;

    // The old home comes back, and is told.
    one.start_process().await;
    let supersede = Supersede { lost, tenure: promote.tenure, to: addresses(&two) };
    for _ in 0..2 {
        let told: Superseded =
            one.control.post("/v1/volumes/data/supersede", &supersede).await.expect("it is told");
        let image = told.image.expect("what it was is kept").to_string();
        let volume = format!("{image}-clone");
        let _ = one.control.delete(&format!("/v1/volumes/{volume}")).await;
        one.clone_image(&volume, &image).await;
        assert_io(&one.qemu_io(&volume, &["read -P 3 5M 64k", "read -P 2 4M 1M"]));
    }
    let gone = one.control.get::<VolumeInfo>("/v1/volumes/data").await.expect_err("it left");
    assert_eq!(gone.kind, ProblemKind::NotFound);
    let old = said(&one.qemu_io(&export, &["write -P 4 0 4k"]));
    assert!(old.contains("another volume was created with its name"), "{old}");
    assert_io(&one.qemu_io("data", &["read -P 9 0 64k"]));
    check_pool(&one).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_that_was_lost_and_comes_back_under_open_sessions_takes_no_write_when_it_is_told() {
    let (one, two, third) = (Server::start().await, Server::start().await, Server::start().await);
    let epoch = one.create("data", 8 * MIB).await.epoch;
    let attach = Attach { nbd_addr: one.nbd_addr.clone() };
    let _: Attachment =
        third.control.put("/v1/attachments/data", &attach).await.expect("an attachment");
    let export = format!("data@{epoch}");
    assert_io(&one.qemu_io(&export, &["write -P 1 0 1M", "flush"]));
    pull(&one, &two, 1).await;
    let point = completed(&one, &two).await;
    let lost = tenure(&one).await;
    let promote = PromoteReplica { layer: point.layer, tenure: Tenure::first(Incarnation(78)) };
    let supersede = Supersede { lost, tenure: promote.tenure, to: addresses(&two) };
    let mut disks = Vec::new();
    for server in [&one, &third] {
        let mut disk = Disk::open(server, epoch);
        disk.tell("write -P 5 1M 64k").await;
        disks.push(disk);
    }
    let _: Superseded =
        one.control.post("/v1/volumes/data/supersede", &supersede).await.expect("it is told");
    let _: VolumeHome =
        two.control.post("/v1/volumes/data/replica/promote", &promote).await.expect("it");
    for disk in &mut disks {
        disk.begin("write -P 6 0 64k");
    }
    for server in [&one, &third] {
        let said = said(&server.qemu_io(&export, &["write -P 6 0 64k"]));
        assert!(!said.contains("wrote"), "{said}");
    }
    assert_io(&two.qemu_io("data", &["read -P 1 0 1M", "read -P 0 1M 64k"]));
    drop(disks);
    // What its image lacks is not shipped again when it becomes a replica of the new home.
    assert_io(&two.qemu_io("data", &["write -P 7 2M 64k", "flush"]));
    assert_eq!(pull(&two, &one, 1).await, 64 * 1024);
    completed(&two, &one).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chains_stay_short_and_points_that_are_not_kept_are_dropped() {
    let (one, two) = (Server::start().await, Server::start().await);
    let epoch = one.create("data", 8 * MIB).await.epoch;
    let export = format!("data@{epoch}");
    for round in 1..=6 {
        let write = format!("write -P {round} {}k 128k", round * 64);
        assert_io(&one.qemu_io(&export, &[&write, "flush"]));
        assert!(pull(&one, &two, 2).await <= 128 * 1024, "round {round}");
        completed(&one, &two).await;
        for (server, path) in [(&one, "compact"), (&two, "replica/compact")] {
            let path = format!("/v1/volumes/data/{path}");
            let _: serde_json::Value =
                server.control.post_long(&path, &(), |_| {}).await.expect("compaction");
        }
        assert!(replica(&two).await.points.len() <= 3, "two, and the one of this round");
    }
    let info: VolumeInfo = one.control.get("/v1/volumes/data").await.expect("the volume");
    assert!(info.chain.len() <= 4, "{info:?}");
    assert!(replica(&two).await.layers <= 6, "{:?}", replica(&two).await);
    let newest = replica(&two).await.points[0].clone();
    let promote = PromoteReplica { layer: newest.layer, tenure: Tenure::first(Incarnation(79)) };
    let _: VolumeHome =
        two.control.post("/v1/volumes/data/replica/promote", &promote).await.expect("it");
    for round in 1..6 {
        let read = format!("read -P {round} {}k 64k", round * 64);
        assert_io(&two.qemu_io("data", &[&read]));
    }
    check_pool(&one).await;
    check_pool(&two).await;
}

async fn figures(at: &Server) -> IoStats {
    let all: Vec<ExportStats> = at.control.get("/v1/stats").await.expect("figures");
    let of_volume = all.iter().find(|stats| stats.volume.as_str() == "data");
    of_volume.map(|of_volume| of_volume.stats).unwrap_or_default()
}

/// The bytes that came over the network for the volume's sessions here.
async fn network_bytes(at: &Server) -> u64 {
    figures(at).await.network_bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_a_replica_reads_there_what_has_not_changed_and_the_rest_at_the_home() {
    let (one, two) = (Server::start().await, Server::start().await);
    let epoch = one.create("data", 64 * MIB).await.epoch;
    let export = format!("data@{epoch}");
    assert_io(&one.qemu_io(&export, &["write -P 1 0 32M", "flush"]));
    pull(&one, &two, 1).await;
    completed(&one, &two).await;
    assert_io(&one.qemu_io(&export, &["write -P 2 4M 1M", "discard 8M 1M", "flush"]));
    let attach = Attach { nbd_addr: one.nbd_addr.clone() };
    let _: Attachment = two.control.put("/v1/attachments/data", &attach).await.expect("it");
    let all = ["read -P 1 0 4M", "read -P 2 4M 1M", "read -P 1 5M 3M", "read -P 0 8M 1M"];
    let all = [&["read 40M 4k", "sleep 300"], &all[..], &["read -P 1 9M 7M"]].concat();
    until("reads from the replica", async || {
        let before = network_bytes(&two).await;
        assert_io(&two.qemu_io(&export, &all));
        let came_bytes = network_bytes(&two).await - before;
        assert!(came_bytes > MIB, "{came_bytes} bytes: what has changed is at the home only");
        came_bytes < 4 * MIB
    })
    .await;
    let IoStats { reads, replica_reads, .. } = figures(&two).await;
    assert!(replica_reads > 0 && replica_reads < reads, "{replica_reads} of {reads}");
    // What either host writes is read at both.
    assert_io(&two.qemu_io(&export, &["sleep 300", "write -P 3 12M 64k", "read -P 3 12M 64k"]));
    assert_io(&one.qemu_io(&export, &["read -P 3 12M 64k", "write -P 4 13M 64k"]));
    let both = ["sleep 300", "read -P 3 12M 64k", "read -P 4 13M 64k", "read -P 1 14M 1M"];
    assert_io(&two.qemu_io(&export, &both));
    // The replica is dropped under an open session.
    let mut disk = Disk::open(&two, epoch);
    disk.tell("read -P 1 14M 1M").await;
    let _: () = two.control.delete("/v1/volumes/data/replica").await.expect("it is dropped");
    disk.tell("read -P 1 10M 1M").await;
    disk.tell("read -P 4 13M 64k").await;
}
