//! kill -9 of the server while fio writes, and what fio finds afterwards.
//!
//! fio itself does not reconnect, so QEMU stands between: `qemu-nbd` with `reconnect-delay` is the
//! client that every VM has. It waits for the server and sends again what was not answered, and
//! nothing else. So fio must not notice that the server died: a write that was answered and is
//! gone, or a write that is there in part, fails its checksums.
//!
//! `PERIGEE_KILLS` is the number of kills (default 3; `make soak` makes 50).

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use perigee_model::ImageName;
use perigee_model::volume::{ImageInfo, Snapshot};

use crate::server::{MIB, Server, assert_io, run, sample, until};

const SIZE_BYTES: u64 = 32 * MIB;
/// A round of fio takes a few seconds.
const ROUND_DEADLINE: Duration = Duration::from_secs(120);

/// A program of ours; it is stopped when this goes.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.try_wait().expect("its state").is_none() {
            self.0.kill().expect("a kill");
            self.0.wait().expect("its end");
        }
    }
}

pub fn has(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok()
}

/// QEMU's NBD client as a server of its own: it reconnects when the server behind it was killed.
pub async fn reconnecting(server: &Server, export: &str, dir: &Path) -> (Running, PathBuf) {
    let socket = dir.join("qemu.sock");
    let behind = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export={export},\
         file.reconnect-delay=60,file.discard=unmap",
        server.socket().display()
    );
    let child = Command::new("qemu-nbd")
        .args(["--persistent", "--shared=8", "--export-name=through", "--image-opts", &behind])
        .arg(format!("--socket={}", socket.display()))
        .spawn()
        .expect("qemu-nbd");
    let running = Running(child);
    until("qemu-nbd to listen", async || socket.exists()).await;
    (running, socket)
}

fn fio_args(uri: &str, round: u64) -> Vec<String> {
    let seed = format!("--randseed={}", round + 1);
    let size = format!("--size={SIZE_BYTES}");
    let fixed = [
        "--name=kills",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--bs=4k",
        "--iodepth=16",
        "--fsync=64",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--output-format=terse",
    ];
    let uri = format!("--uri={uri}");
    fixed.map(str::to_owned).into_iter().chain([uri, seed, size]).collect()
}

fn start_fio(uri: &str, round: u64, said: &Path) -> Running {
    let said = std::fs::File::create(said).expect("a file");
    let child = Command::new("fio")
        .args(fio_args(uri, round))
        .arg("--rate_iops=3000")
        .stdin(Stdio::null())
        .stdout(said.try_clone().expect("a file"))
        .stderr(said)
        .spawn()
        .expect("fio");
    Running(child)
}

/// Reads back what a round wrote, in another order of things: nothing of the first fio is left.
fn verify(server: &Server, export: &str, round: u64) {
    let args = fio_args(&server.uri(export), round);
    let args = args.iter().map(String::as_str).filter(|arg| !arg.starts_with("--fsync"));
    let all: Vec<&str> = ["fio", "--verify_only"].into_iter().chain(args).collect();
    run(&all);
}

/// Times between kills; printed, so that a run can be told.
pub struct Pauses(pub u64);

impl Pauses {
    pub fn next(&mut self) -> Duration {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Duration::from_millis(50 + (self.0 >> 33) % 700)
    }
}

async fn clone_now(server: &Server, round: u64) -> String {
    let image = ImageName::new(format!("s{round}")).expect("a name");
    let path = "/v1/volumes/data/snapshot";
    let _: ImageInfo =
        server.control.post(path, &Snapshot { image: image.clone() }).await.expect("a snapshot");
    let clone = format!("c{round}");
    server.clone_image(&clone, image.as_str()).await;
    clone
}

#[tokio::test(flavor = "multi_thread")]
async fn fio_does_not_notice_that_the_server_is_killed() {
    if !has("qemu-nbd") || !has("fio") || !run(&["fio", "--enghelp"]).contains("nbd") {
        eprintln!("not run: it needs qemu-nbd and a fio with the nbd engine");
        return;
    }
    let kills: u64 = std::env::var("PERIGEE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    let mut pauses = Pauses(std::process::id().into());
    eprintln!("pauses from {}", pauses.0);
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("sample.raw").display().to_string();
    std::fs::write(&file, sample(SIZE_BYTES)).expect("a file");
    let mut server = Server::start().await;
    server.create("base", SIZE_BYTES).await;
    run(&["nbdcopy", "--flush", &file, &server.uri("base")]);
    let golden = Snapshot { image: ImageName::new("golden").expect("a name") };
    let _: ImageInfo =
        server.control.post("/v1/volumes/base/snapshot", &golden).await.expect("a snapshot");
    server.clone_image("data", "golden").await;

    let (mut killed, mut round) = (0, 0);
    while killed < kills {
        let (_qemu, socket) = reconnecting(&server, "data", dir.path()).await;
        let said = dir.path().join("fio.out");
        let uri = format!("nbd+unix:///through?socket={}", socket.display());
        let mut fio = start_fio(&uri, round, &said);
        let started = Instant::now();
        let ended = loop {
            if let Some(ended) = fio.0.try_wait().expect("its state") {
                break ended;
            }
            assert!(started.elapsed() < ROUND_DEADLINE, "waited {ROUND_DEADLINE:?} for fio");
            tokio::time::sleep(pauses.next()).await;
            server.kill();
            server.start_process().await;
            killed += 1;
        };
        let said = std::fs::read_to_string(&said).expect("what fio said");
        assert!(ended.success(), "round {round}, {killed} kills: {said}");
        std::fs::remove_file(&socket).expect("the socket");
        server.kill();
        server.start_process().await;
        verify(&server, "data", round);
        let clone = clone_now(&server, round).await;
        server.kill();
        server.start_process().await;
        verify(&server, &clone, round);
        round += 1;
    }
    run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &file, &server.uri("base")]);
    assert_io(&server.qemu_io("data", &["write -P 1 0 4k", "read -P 1 0 4k", "flush"]));
}
