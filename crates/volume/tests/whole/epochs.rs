//! One writer at any time.

use perigee_model::volume::{
    EpochChange, EpochChanges, EpochIssued, FlushVolumes, VolumeEpochChange, VolumeInfo,
};
use perigee_model::{Epoch, Problem, ProblemKind};

use crate::server::{MIB, Server, assert_io, said};

async fn change(server: &Server, from: Epoch, to: Epoch) -> Result<VolumeInfo, Problem> {
    let change = EpochChange { from, to };
    server.control.post("/v1/volumes/data/epoch", &change).await
}

#[tokio::test(flavor = "multi_thread")]
async fn only_sessions_of_the_volume_s_epoch_write() {
    let server = Server::start().await;
    let one = server.create("data", 4 * MIB).await.epoch;
    let two = one.next().expect("an epoch");
    let (data_1, data_2) = (format!("data@{one}"), format!("data@{two}"));
    let not_issued = change(&server, one, two).await.expect_err("2 was never issued");
    assert_eq!(not_issued.kind, ProblemKind::Conflict);
    let issued: EpochIssued =
        server.control.post("/v1/volumes/data/epoch/issue", &()).await.expect("an epoch");
    assert_eq!(issued.epoch, two);

    assert_io(&server.qemu_io(&data_1, &["write -P 1 0 64k"]));
    assert_refused(&server, &data_2);
    assert_eq!(change(&server, one, two).await.expect("the change").epoch, two);
    assert_refused(&server, &data_1);
    assert_io(&server.qemu_io(&data_2, &["write -P 2 0 4k", "flush"]));
    assert_io(&server.qemu_io(&data_1, &["read -P 2 0 4k", "read -P 1 4k 60k", "flush"]));
    assert_io(&server.qemu_io("data", &["write -P 3 0 4k"]));

    change(&server, one, two).await.expect("a repeated call");
    change(&server, two, one).await.expect("back again");
    assert_refused(&server, &data_2);
    assert_io(&server.qemu_io(&data_1, &["write -P 4 0 4k"]));
}

fn assert_refused(server: &Server, export: &str) {
    for command in ["write -P 9 0 4k", "write -z 0 4k", "discard 0 64k"] {
        let refused = server.qemu_io(export, &[command]);
        assert!(said(&refused).contains("Operation not permitted"), "{command}: {refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_meant_for_a_deleted_volume_does_not_reach_the_next_one_of_its_name() {
    let server = Server::start().await;
    let old = server.create("data", 4 * MIB).await.epoch;
    assert_io(&server.qemu_io(&format!("data@{old}"), &["write -P 1 0 64k"]));
    server.control.delete("/v1/volumes/data").await.expect("a deletion");
    let new = server.create("data", 4 * MIB).await.epoch;
    let refused = server.qemu_io(&format!("data@{old}"), &["write -P 2 0 64k"]);
    assert!(said(&refused).contains("another volume was created"), "{refused:?}");
    let raise = change(&server, old, old).await.expect_err("an epoch of the old one");
    assert_eq!(raise.kind, ProblemKind::Conflict);
    assert_io(&server.qemu_io(&format!("data@{new}"), &["read -P 0 0 64k", "write -P 3 0 4k"]));
}

fn changes(changes: &[(&str, Epoch, Epoch)]) -> EpochChanges {
    let change = |(volume, from, to): &(&str, Epoch, Epoch)| VolumeEpochChange {
        volume: volume.parse().expect("a name"),
        change: EpochChange { from: *from, to: *to },
    };
    EpochChanges { changes: changes.iter().map(change).collect() }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_epochs_of_several_volumes_change_in_one_request() {
    let server = Server::start().await;
    let mut epochs = Vec::new();
    for volume in ["data", "root"] {
        let one = server.create(volume, 4 * MIB).await.epoch;
        let issue = format!("/v1/volumes/{volume}/epoch/issue");
        let two = server.control.post::<EpochIssued>(&issue, &()).await.expect("an epoch").epoch;
        epochs.push((one, two));
    }
    let [(data_1, data_2), (root_1, root_2)] = epochs[..] else { panic!("two volumes") };
    let change =
        async |ask: &EpochChanges| server.control.post::<()>("/v1/batch/epochs", ask).await;
    let both = changes(&[("data", data_1, data_2), ("root", root_1, root_2)]);
    change(&both).await.expect("the change");
    change(&both).await.expect("a repeated call");
    assert_refused(&server, &format!("root@{root_1}"));
    assert_io(&server.qemu_io(&format!("data@{data_2}"), &["write -P 2 0 4k"]));

    let data_3 = data_2.next().expect("an epoch");
    let one_is_wrong = changes(&[("data", data_2, data_3), ("root", root_2, root_1)]);
    let refused = change(&one_is_wrong).await.expect_err("the third was never issued");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert_io(&server.qemu_io(&format!("root@{root_1}"), &["write -P 3 0 4k"]));
    let too_many = change(&changes(&[("data", data_1, data_2); 65])).await;
    assert!(too_many.expect_err("too many").why.contains("0 to 64"));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_volumes_are_flushed_in_one_request() {
    let server = Server::start().await;
    server.create("data", 4 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 2 0 64k"]));
    let flush = async |names: &[&str]| {
        let volumes = names.iter().map(|name| name.parse().expect("a name")).collect();
        server.control.post::<()>("/v1/batch/flush", &FlushVolumes { volumes }).await
    };
    flush(&["data"]).await.expect("flushed");
    let missing = flush(&["data", "gone"]).await.expect_err("there is no such volume");
    assert_eq!(missing.kind, ProblemKind::NotFound);
}
