//! Programs that know nothing of us say whether the bytes are right: on clones of clones, after
//! snapshots, and after the server was killed.
//!
//! What is done to an export is done to a plain file too, by the same program.

use std::path::Path;

use perigee_model::volume::{ImageInfo, Snapshot, VolumeSource};
use perigee_model::{ImageName, VolumeName};

use crate::server::{MIB, Server, assert_io, run, sample, try_run};

const SIZE_BYTES: u64 = 16 * MIB;

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Writes to an export and to its twin, a file.
fn change(server: &Server, export: &str, twin: &Path, commands: &[&str]) {
    assert_io(&server.qemu_io(export, commands));
    let mut args = vec!["qemu-io", "-f", "raw"];
    args.extend(commands.iter().flat_map(|command| ["-c", command]));
    let twin = text(twin);
    args.push(&twin);
    assert_io(&try_run(&args));
}

async fn snapshot(server: &Server, volume: &str, image: &str) {
    let request = Snapshot { image: ImageName::new(image).expect("a name") };
    let path = format!("/v1/volumes/{volume}/snapshot");
    let _: ImageInfo = server.control.post(&path, &request).await.expect("a snapshot");
}

fn sha256(path: &Path) -> String {
    run(&["sha256sum", &text(path)]).split_whitespace().next().expect("a sum").to_owned()
}

/// `qemu-img compare` and `nbdcopy` with a hash, each over its own transport.
fn assert_same(server: &Server, export: &str, twin: &Path, dir: &Path) {
    let uri = server.uri(export);
    run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &text(twin), &uri]);
    let copy = dir.join("copy.raw");
    run(&["nbdcopy", &server.tcp_uri(export), &text(&copy)]);
    assert_eq!(sha256(&copy), sha256(twin), "{export}");
    std::fs::remove_file(copy).expect("the copy");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_tools_agree_on_clones_of_clones_after_snapshots_and_a_kill() {
    let mut server = Server::start().await;
    let dir = tempfile::tempdir().expect("a directory");
    let twin = |name: &str| dir.path().join(format!("{name}.raw"));
    std::fs::write(twin("base"), sample(SIZE_BYTES)).expect("a file");
    server.create("base", SIZE_BYTES).await;
    run(&["nbdcopy", "--flush", &text(&twin("base")), &server.uri("base")]);
    snapshot(&server, "base", "first").await;

    server.clone_image("child", "first").await;
    std::fs::copy(twin("base"), twin("child")).expect("a copy");
    let commands = ["write -P 0xa1 1000 70000", "write -z 2M 1M", "write -P 0xa2 9M 100k", "flush"];
    change(&server, "child", &twin("child"), &commands);
    snapshot(&server, "child", "second").await;

    let child = VolumeName::new("child").expect("a name");
    server.create_from("grandchild", VolumeSource::Volume(child), None).await;
    std::fs::copy(twin("child"), twin("grandchild")).expect("a copy");
    let commands = ["write -P 0xb1 2500k 7k", "write -z -u 9M 64k", "write -P 0xb2 0 512", "flush"];
    change(&server, "grandchild", &twin("grandchild"), &commands);
    std::fs::copy(twin("child"), twin("second")).expect("a copy");
    change(&server, "child", &twin("child"), &["write -P 0xa3 3M 3M", "write -z 5000 1"]);

    let exports = [
        ("base", "base"),
        ("image:first", "base"),
        ("child", "child"),
        ("image:second", "second"),
        ("grandchild", "grandchild"),
    ];
    for (export, name) in exports {
        assert_same(&server, export, &twin(name), dir.path());
    }
    server.kill();
    server.start_process().await;
    for (export, name) in exports {
        assert_same(&server, export, &twin(name), dir.path());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fio_verifies_a_clone_of_a_clone_after_a_snapshot_and_a_kill() {
    if !run(&["fio", "--enghelp"]).lines().any(|line| line.trim() == "nbd") {
        eprintln!("not run: this fio has no nbd engine");
        return;
    }
    let mut server = Server::start().await;
    server.create("base", SIZE_BYTES).await;
    assert_io(&server.qemu_io("base", &["write -P 7 0 16M", "flush"]));
    snapshot(&server, "base", "first").await;
    server.clone_image("child", "first").await;
    assert_io(&server.qemu_io("child", &["write -P 8 4M 4M"]));
    let child = VolumeName::new("child").expect("a name");
    server.create_from("grandchild", VolumeSource::Volume(child), None).await;

    let fio = |server: &Server, export: &str, more: &[&str]| {
        let uri = format!("--uri={}", server.uri(export));
        let fixed = ["fio", "--name=oracle", "--ioengine=nbd", "--rw=randwrite", "--bs=4k"];
        let verify = ["--size=16m", "--iodepth=16", "--verify=crc32c", "--verify_fatal=1"];
        run(&[&fixed[..], &verify, &["--verify_state_save=0", "--randseed=5", &uri], more].concat());
    };
    fio(&server, "grandchild", &["--do_verify=0", "--end_fsync=1"]);
    snapshot(&server, "grandchild", "third").await;
    server.clone_image("last", "third").await;
    // The clone goes its own way; what it stands on does not.
    assert_io(&server.qemu_io("last", &["write -P 9 0 1M", "flush"]));
    server.kill();
    server.start_process().await;
    fio(&server, "grandchild", &["--verify_only"]);
    assert_io(&server.qemu_io("last", &["read -P 9 0 1M"]));
    assert_io(&server.qemu_io("child", &["read -P 7 0 4M", "read -P 8 4M 4M", "read -P 7 8M 8M"]));
}
