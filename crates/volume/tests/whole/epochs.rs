//! One writer at any time.

use perigee_model::volume::{EpochChange, EpochIssued, VolumeInfo};
use perigee_model::{Epoch, Problem, ProblemKind};

use crate::server::{MIB, Server, assert_io, said};

async fn change(server: &Server, from: u64, to: u64) -> Result<VolumeInfo, Problem> {
    let change = EpochChange { from: Epoch(from), to: Epoch(to) };
    server.control.post("/v1/volumes/data/epoch", &change).await
}

#[tokio::test(flavor = "multi_thread")]
async fn only_sessions_of_the_volume_s_epoch_write() {
    let server = Server::start().await;
    assert_eq!(server.create("data", 4 * MIB).await.epoch, Epoch(1));
    let not_issued = change(&server, 1, 2).await.expect_err("2 was never issued");
    assert_eq!(not_issued.kind, ProblemKind::Conflict);
    let issued: EpochIssued =
        server.control.post("/v1/volumes/data/epoch/issue", &()).await.expect("an epoch");
    assert_eq!(issued.epoch, Epoch(2));

    assert_io(&server.qemu_io("data@1", &["write -P 1 0 64k"]));
    assert_refused(&server, "data@2");
    assert_eq!(change(&server, 1, 2).await.expect("the change").epoch, Epoch(2));
    assert_refused(&server, "data@1");
    assert_io(&server.qemu_io("data@2", &["write -P 2 0 4k", "flush"]));
    assert_io(&server.qemu_io("data@1", &["read -P 2 0 4k", "read -P 1 4k 60k", "flush"]));
    assert_io(&server.qemu_io("data", &["write -P 3 0 4k"]));

    change(&server, 1, 2).await.expect("a repeated call");
    change(&server, 2, 1).await.expect("back again");
    assert_refused(&server, "data@2");
    assert_io(&server.qemu_io("data@1", &["write -P 4 0 4k"]));
}

fn assert_refused(server: &Server, export: &str) {
    for command in ["write -P 9 0 4k", "write -z 0 4k", "discard 0 64k"] {
        let refused = server.qemu_io(export, &[command]);
        assert!(said(&refused).contains("Operation not permitted"), "{command}: {refused:?}");
    }
}
