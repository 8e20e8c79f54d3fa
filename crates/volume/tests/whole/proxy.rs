//! Volumes of another host.

use std::io::Write;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use perigee_model::volume::{
    Attach, Attachment, EpochChange, EpochIssued, ExportStats, ImageInfo, ImportImage, IoStats,
    OpenAhead, Snapshot, VolumeInfo, VolumeSource,
};
use perigee_model::{Epoch, ImageName, Problem, ProblemKind};
use tokio::net::{TcpListener, TcpStream};

use crate::server::{MIB, Server, assert_io, run, said, sample, try_run, until};

async fn attach(server: &Server, volume: &str, home: &Server) {
    let path = format!("/v1/attachments/{volume}");
    let attach = Attach { nbd_addr: home.nbd_addr.clone() };
    let _: Attachment = server.control.put(&path, &attach).await.expect("an attachment");
}

async fn stats(server: &Server) -> IoStats {
    let all: Vec<ExportStats> = server.control.get("/v1/stats").await.expect("figures");
    all.iter().find(|s| s.volume.as_str() == "data").map(|s| s.stats).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attached_volume_is_like_one_s_own() {
    let (home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 16 * MIB).await.epoch;
    attach(&host, "data", &home).await;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("sample.raw").display().to_string();
    std::fs::write(&file, sample(16 * MIB)).expect("a file");
    run(&["nbdcopy", "--flush", &file, &host.uri("data")]);
    run(&[
        "qemu-img",
        "compare",
        "-f",
        "raw",
        "-F",
        "raw",
        &file,
        &host.uri(&format!("data@{epoch}")),
    ]);
    run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &file, &home.uri("data")]);
    assert!(run(&["nbdinfo", "--list", &host.uri("")]).contains("data"));
    let figures = stats(&host).await;
    assert!(figures.network_requests >= figures.reads + figures.writes, "{figures:?}");
    assert!(figures.network_bytes >= 16 * MIB && figures.network_busy_ns > 0, "{figures:?}");
    until("the end of all sessions", async || open_at(&host).await == 0).await;
    host.control.delete("/v1/attachments/data").await.expect("a detachment");
    assert!(!try_run(&["nbdinfo", &host.uri("data")]).status.success());
}

/// Sessions on the only attached volume.
async fn open_at(host: &Server) -> u64 {
    let attachments: Vec<Attachment> = host.control.get("/v1/attachments").await.expect("a list");
    assert_eq!(attachments.len(), 1);
    attachments[0].sessions
}

/// Sessions of the volume that are open at its home.
async fn sessions(home: &Server) -> u64 {
    let info: VolumeInfo = home.control.get("/v1/volumes/data").await.expect("the volume");
    info.sessions
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_was_opened_ahead_is_its_client_s_and_goes_with_the_attachment() {
    let (home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", MIB).await.epoch;
    attach(&host, "data", &home).await;
    let export = format!("data@{epoch}");
    let ask = OpenAhead { exports: vec![export.clone(), "nothing@1".to_owned()] };
    let ahead = async || host.control.post::<()>("/v1/batch/open", &ask).await.expect("no error");
    ahead().await;
    until("the session to stand", async || sessions(&home).await >= 1).await;
    ahead().await;
    assert_io(&host.qemu_io(&export, &["write -P 1 0 4k", "read -P 1 0 4k"]));
    until("it to end with its client", async || sessions(&home).await == 0).await;
    ahead().await;
    until("another one to stand", async || sessions(&home).await >= 1).await;
    host.control.delete("/v1/attachments/data").await.expect("a detachment");
    until("it to end with the attachment", async || sessions(&home).await == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_home_refuses_an_old_epoch_through_the_proxy() {
    let (home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", MIB).await.epoch;
    attach(&host, "data", &home).await;
    let data_1 = format!("data@{epoch}");
    assert_io(&host.qemu_io(&data_1, &["write -P 1 0 4k"]));
    let data_2 = format!("data@{}", raise(&home, epoch).await);
    let refused = host.qemu_io(&data_1, &["write -P 2 0 4k"]);
    assert!(said(&refused).contains("Operation not permitted"), "{refused:?}");
    assert_io(&host.qemu_io(&data_1, &["read -P 1 0 4k"]));
    assert_io(&host.qemu_io(&data_2, &["write -P 2 0 4k"]));
    assert_eq!(stats(&host).await.fenced, 1);
}

/// The volume gets a new epoch.
async fn raise(home: &Server, from: Epoch) -> Epoch {
    let EpochIssued { epoch } =
        home.control.post("/v1/volumes/data/epoch/issue", &()).await.expect("an epoch");
    let change = EpochChange { from, to: epoch };
    let _: serde_json::Value =
        home.control.post("/v1/volumes/data/epoch", &change).await.expect("the change");
    epoch
}

#[tokio::test(flavor = "multi_thread")]
async fn attachments_never_go_round_in_a_circle_and_never_hide_a_volume() {
    let (one, two) = (Server::start().await, Server::start().await);
    attach(&one, "data", &two).await;
    attach(&two, "data", &one).await;
    let refused = try_run(&["nbdinfo", &one.uri("data")]);
    assert!(said(&refused).contains("data"), "{refused:?}");
    assert!(!refused.status.success());
    one.create("own", MIB).await;
    let path = "/v1/attachments/own";
    let attach = Attach { nbd_addr: two.nbd_addr.clone() };
    let hidden = one.control.put::<Attachment>(path, &attach).await.expect_err("it is here");
    assert_eq!(hidden.kind, ProblemKind::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_that_is_gone_is_a_clear_error() {
    let (mut home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", MIB).await.epoch;
    attach(&host, "data", &home).await;
    home.kill();
    let refused = try_run(&["qemu-img", "info", &host.uri(&format!("data@{epoch}"))]);
    assert!(!refused.status.success());
    assert!(said(&refused).contains(&home.nbd_addr), "it names the home: {refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_copied_or_read_from_another_host() {
    let (home, host) = (Server::start().await, Server::start().await);
    home.create("data", 4 * MIB).await;
    assert_io(&home.qemu_io("data", &["write -P 5 1M 1M"]));
    let kept = ImageName::new("kept").expect("a name");
    let request = Snapshot { image: kept.clone() };
    let image: ImageInfo =
        home.control.post("/v1/volumes/data/snapshot", &request).await.expect("a snapshot");

    let source = home.tcp_uri("image:kept");
    let request = ImportImage {
        format: None,
        name: kept,
        source,
        layer: Some(image.layer),
        leave_site: Default::default(),
    };
    let copy: ImageInfo =
        host.control.post_long("/v1/images", &request, |_| {}).await.expect("a copy");
    assert_eq!((copy.layer, copy.size_bytes), (image.layer, image.size_bytes));
    host.clone_image("copied", "kept").await;
    assert_io(&host.qemu_io("copied", &["read -P 0 0 1M", "read -P 5 1M 1M", "read -P 0 2M 2M"]));

    let (nbd_addr, export) = (home.nbd_addr.clone(), "image:kept".to_owned());
    host.create_from("remote", VolumeSource::Remote { nbd_addr, export }, None).await;
    assert_io(&host.qemu_io("remote", &["write -P 6 1000 1M"]));
    assert_io(&host.qemu_io("remote", &["read -P 6 1000 1M", "read -P 5 1049576 1047576"]));
}

/// fio through the proxy, slow enough to last for 16 s. After a pause `--rate` lets it catch up, so it ends at the same time.
fn fio(host: &Server, epoch: Epoch) -> Child {
    Command::new("timeout")
        .args(["60", "fio", "--name=verify", "--ioengine=nbd", "--rw=randwrite", "--bs=16k"])
        .args(["--iodepth=16", "--size=64m", "--rate=4m", "--verify=crc32c", "--fsync=32"])
        .args([
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--output-format=terse",
            &format!("--uri={}", host.uri(&format!("data@{epoch}"))),
        ])
        .stdout(Stdio::null())
        .spawn()
        .expect("fio")
}

async fn writes_arrive(home: &Server) {
    until("writes at the home", async || stats(home).await.writes > 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_home_shows_only_as_a_pause() {
    let (mut home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 64 * MIB).await.epoch;
    attach(&host, "data", &home).await;
    let mut fio = fio(&host, epoch);
    writes_arrive(&home).await;
    home.kill();
    home.start_process().await;
    writes_arrive(&home).await;
    home.terminate().await;
    home.start_process().await;
    writes_arrive(&home).await;
    let mut ended = None;
    until("fio to end", async || {
        ended = fio.try_wait().expect("its state");
        ended.is_some()
    })
    .await;
    assert!(ended.expect("it ended").success(), "fio found every block as it wrote it");
}

/// qemu-io as patient as a VM's disk, taking commands one after the other.
struct Disk {
    qemu_io: Child,
    commands: ChildStdin,
    said: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

impl Disk {
    fn open(host: &Server, epoch: Epoch) -> Self {
        Self::open_export(host, &format!("data@{epoch}"))
    }

    fn open_export(host: &Server, export: &str) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let said = dir.path().join("said");
        let out = std::fs::File::create(&said).expect("a file");
        let disk = format!(
            "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},\
             file.export={export},file.reconnect-delay=60",
            host.socket().display()
        );
        let mut qemu_io = Command::new("timeout")
            .args(["60", "stdbuf", "-oL", "qemu-io", "-t", "writeback", "--image-opts", &disk])
            .stdin(Stdio::piped())
            .stderr(out.try_clone().expect("a second handle"))
            .stdout(out)
            .spawn()
            .expect("qemu-io");
        let commands = qemu_io.stdin.take().expect("a pipe");
        Self { qemu_io, commands, said, _dir: dir }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.said).expect("what it said")
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").expect("a living qemu-io");
    }

    /// qemu-io reads the next command only after it has asked for it.
    async fn has_done(&self, commands: usize) {
        let prompts = async || self.said().matches("qemu-io> ").count() > commands;
        let what = format!("qemu-io to go on after {commands} commands");
        until(&what, prompts).await;
    }

    async fn end(mut self) -> String {
        self.tell("quit");
        until("qemu-io to end", async || self.qemu_io.try_wait().expect("its state").is_some())
            .await;
        self.said()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_with_open_sessions_stays_attached_where_that_is_asked() {
    let (home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", MIB).await.epoch;
    attach(&host, "data", &home).await;
    let mut disk = Disk::open(&host, epoch);
    disk.tell("write -P 1 0 4k");
    disk.has_done(1).await;
    let path = "/v1/attachments/data?unless_open=true";
    let refused = host.control.delete(path).await.expect_err("it is open");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert_eq!(open_at(&host).await, 1);
    disk.end().await;
    until("the end of all sessions", async || open_at(&host).await == 0).await;
    host.control.delete(path).await.expect("a detachment");
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_that_the_home_s_host_lost_with_its_power_fail_the_flush() {
    let (mut home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 8 * MIB).await.epoch;
    attach(&host, "data", &home).await;
    let mut disk = Disk::open(&host, epoch);
    let mut done = 0;
    let mut tell = async |disk: &mut Disk, command: &str| {
        disk.tell(command);
        done += 1;
        disk.has_done(done).await;
    };
    // qemu-io says nothing of a flush that fails. A write with FUA fails as well, which it says.
    let durable = "write -f -P 4 1M 4k";
    tell(&mut disk, "write -P 1 0 4k").await;
    home.kill();
    home.start_process().await;
    tell(&mut disk, durable).await;
    tell(&mut disk, "flush").await;
    home.kill();
    home.boot_anew("boot-2");
    home.start_process().await;
    tell(&mut disk, durable).await;
    assert!(!disk.said().contains("failed"), "nothing was lost: {}", disk.said());
    tell(&mut disk, "write -P 2 0 4k").await;
    home.kill();
    home.boot_anew("boot-3");
    home.start_process().await;
    for failed in 1..=2 {
        tell(&mut disk, durable).await;
        let said = disk.said();
        assert_eq!(said.matches("Input/output error").count(), failed, "{said}");
    }
    disk.end().await;
    assert_io(&host.qemu_io(&format!("data@{epoch}"), &["write -f -P 3 0 4k"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_before_this_host_s_server_was_started_again_is_flushed_at_once() {
    let (home, mut host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 8 * MIB).await.epoch;
    attach(&host, "data", &home).await;
    let mut disk = Disk::open(&host, epoch);
    disk.tell("write -P 1 0 4k");
    disk.has_done(1).await;
    let flushes = stats(&home).await.flushes;
    host.kill();
    host.start_process().await;
    // For this qemu-io connects again.
    disk.tell("read -P 1 0 4k");
    disk.has_done(2).await;
    until("a flush at the home", async || stats(&home).await.flushes > flushes).await;
    let said = disk.end().await;
    assert!(!said.contains("failed"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_without_an_epoch_stays_fenced_when_it_is_connected_anew() {
    let (mut home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 8 * MIB).await.epoch;
    attach(&host, "data", &home).await;
    let mut disk = Disk::open_export(&host, "data");
    disk.tell("write -P 1 0 4k");
    disk.has_done(1).await;
    raise(&home, epoch).await;
    home.kill();
    home.start_process().await;
    disk.tell("write -P 2 0 4k");
    disk.has_done(2).await;
    let second = SecondAddress::of(&home).await;
    attach_at(&host, &second.addr).await;
    disk.tell("write -P 3 0 4k");
    disk.has_done(3).await;
    let said = disk.end().await;
    assert_eq!(said.matches("Operation not permitted").count(), 2, "{said}");
    // At another host than the home's, nobody joins the present writer.
    let refused = host.qemu_io("data", &["write -P 5 0 4k"]);
    assert!(crate::server::said(&refused).contains("data@N"), "{refused:?}");
    assert_io(&home.qemu_io("data", &["read -P 1 0 4k", "write -P 4 0 4k"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_of_either_server_shows_to_qemu_only_as_a_pause() {
    let (mut home, mut host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 8 * MIB).await.epoch;
    attach(&host, "data", &home).await;
    let mut disk = Disk::open(&host, epoch);
    disk.tell("write -P 1 0 1M");
    disk.has_done(1).await;
    host.kill();
    disk.tell("write -P 2 512k 1M");
    host.start_process().await;
    disk.has_done(2).await;
    home.kill();
    disk.tell("write -P 3 1M 1M");
    host.kill();
    host.start_process().await;
    home.start_process().await;
    disk.has_done(3).await;
    let check = ["flush", "read -P 1 0 512k", "read -P 2 512k 512k", "read -P 3 1M 1M"];
    for (done, command) in check.iter().enumerate() {
        disk.tell(command);
        disk.has_done(4 + done).await;
    }
    let said = disk.end().await;
    assert!(!said.contains("failed"), "{said}");
    assert_io(&home.qemu_io("data", &["read -P 1 0 512k", "read -P 3 1M 1M"]));
}

/// Another address of a server, until it is cut: every connection to it is passed on.
struct SecondAddress {
    addr: String,
    cut: tokio_util::sync::CancellationToken,
}

impl SecondAddress {
    async fn of(server: &Server) -> Self {
        Self::after(server, Duration::ZERO).await
    }

    /// Each connection is passed on after a while.
    async fn after(server: &Server, delay: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("its address").to_string();
        let (cut, there) = (tokio_util::sync::CancellationToken::new(), server.nbd_addr.clone());
        tokio::spawn(cut.clone().run_until_cancelled_owned(async move {
            let mut passing = tokio::task::JoinSet::new();
            while let Ok((mut from, _)) = listener.accept().await {
                let there = there.clone();
                passing.spawn(async move {
                    tokio::time::sleep(delay).await;
                    let mut to = TcpStream::connect(there).await?;
                    from.set_nodelay(true)?;
                    to.set_nodelay(true)?;
                    tokio::io::copy_bidirectional(&mut from, &mut to).await
                });
            }
        }));
        Self { addr, cut }
    }
}

async fn try_attach_at(host: &Server, nbd_addr: &str) -> Result<Attachment, Problem> {
    let attach = Attach { nbd_addr: nbd_addr.to_owned() };
    host.control.put("/v1/attachments/data", &attach).await
}

async fn attach_at(host: &Server, nbd_addr: &str) -> Attachment {
    try_attach_at(host, nbd_addr).await.expect("an attachment")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_goes_on_while_its_volume_s_home_gets_a_hundred_addresses() {
    let (home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 64 * MIB).await.epoch;
    attach(&host, "data", &home).await;
    let second = SecondAddress::of(&home).await;
    let mut changes = 0;
    while changes < 100 {
        let mut fio = fio(&host, epoch);
        let ended = loop {
            if let Some(ended) = fio.try_wait().expect("its state") {
                break ended;
            }
            let nbd_addr = if changes % 2 == 0 { &second.addr } else { &home.nbd_addr };
            // Changes that no session sees don't count.
            changes += u32::from(attach_at(&host, nbd_addr).await.sessions > 0);
        };
        assert!(ended.success(), "fio found every block as it wrote it");
    }
    until("nothing to be left behind", async || open_at(&host).await == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_addresses_at_once_sessions_go_on_at_the_one_that_is_kept() {
    let (home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 8 * MIB).await.epoch;
    attach(&host, "data", &home).await;
    let mut disk = Disk::open(&host, epoch);
    disk.tell("write -P 1 0 4k");
    let mut done = 1;
    disk.has_done(done).await;
    for _ in 0..10 {
        // While the first one has its turn the others come, and which of them is next is open.
        let slow = SecondAddress::after(&home, Duration::from_millis(250)).await;
        let (one, other) = (SecondAddress::of(&home).await, SecondAddress::of(&home).await);
        let later = async |nbd_addr: &str, delay_ms| {
            tokio::time::sleep(Duration::from_millis(delay_ms)).await;
            try_attach_at(&host, nbd_addr).await
        };
        let last = later(&other.addr, 80);
        let (_, _, last) = tokio::join!(later(&slow.addr, 0), later(&one.addr, 30), last);
        let kept: Vec<Attachment> = host.control.get("/v1/attachments").await.expect("a list");
        // One that did not get its turn in time has said so.
        if last.is_ok() && kept[0].nbd_addr == other.addr {
            slow.cut.cancel();
            one.cut.cancel();
        }
        disk.tell("write -P 1 0 4k");
        done += 1;
        disk.has_done(done).await;
        attach_at(&host, &home.nbd_addr).await;
    }
    let said = disk.end().await;
    assert!(!said.contains("failed"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_at_a_lost_address_is_asked_at_the_home_s_new_one() {
    let (home, host) = (Server::start().await, Server::start().await);
    let epoch = home.create("data", 8 * MIB).await.epoch;
    let first = SecondAddress::of(&home).await;
    attach_at(&host, &first.addr).await;
    let mut disk = Disk::open(&host, epoch);
    disk.tell("write -P 1 0 1M");
    disk.has_done(1).await;
    first.cut.cancel();
    disk.tell("write -P 2 512k 1M");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(disk.said().matches("qemu-io> ").count(), 2, "it waits");
    attach_at(&host, &home.nbd_addr).await;
    disk.has_done(2).await;
    disk.tell("read -P 1 0 512k");
    disk.has_done(3).await;
    disk.tell("flush");
    disk.has_done(4).await;
    let said = disk.end().await;
    assert!(!said.contains("failed"), "{said}");
    assert_io(&home.qemu_io("data", &["read -P 1 0 512k", "read -P 2 512k 1M"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_has_another_volume_of_the_name_changes_nothing_for_open_sessions() {
    let (home, other, host) = (Server::start().await, Server::start().await, Server::start().await);
    let epoch = home.create("data", 8 * MIB).await.epoch;
    other.create("data", 8 * MIB).await;
    attach(&host, "data", &home).await;
    let mut disk = Disk::open(&host, epoch);
    disk.tell("write -P 1 0 1M");
    disk.has_done(1).await;
    let attach = Attach { nbd_addr: other.nbd_addr.clone() };
    let refused = host.control.put::<Attachment>("/v1/attachments/data", &attach).await;
    let refused = refused.expect_err("it is another one");
    assert_eq!(refused.kind, ProblemKind::Unavailable, "{refused}");
    disk.tell("write -P 2 0 1M");
    disk.has_done(2).await;
    assert!(!disk.end().await.contains("failed"));
    assert_io(&home.qemu_io("data", &["read -P 2 0 1M"]));
}

/// Reads until the home is not asked any more.
async fn read_from_memory(disk: &mut Disk, host: &Server, done: &mut usize, command: &str) {
    until("reads from memory", async || {
        let before = stats(host).await.network_bytes;
        disk.tell(command);
        *done += 1;
        disk.has_done(*done).await;
        stats(host).await.network_bytes == before
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_host_has_in_memory_is_never_older_than_what_another_has_written() {
    let (mut home, reader, writer) =
        (Server::start().await, Server::start().await, Server::start().await);
    let epoch = home.create("data", 8 * MIB).await.epoch;
    attach(&reader, "data", &home).await;
    attach(&writer, "data", &home).await;
    let export = format!("data@{epoch}");
    assert_io(&writer.qemu_io(&export, &["write -P 1 0 1M"]));
    let (mut disk, mut done) = (Disk::open(&reader, epoch), 0);
    read_from_memory(&mut disk, &reader, &mut done, "read -P 1 0 1M").await;
    assert_io(&writer.qemu_io(&export, &["write -P 2 0 512k"]));
    for command in ["read -P 2 0 512k", "read -P 1 512k 512k", "write -P 3 0 4k", "read -P 3 0 4k"]
    {
        disk.tell(command);
        done += 1;
        disk.has_done(done).await;
    }
    // A home that was started again remembers who may have blocks in memory.
    read_from_memory(&mut disk, &reader, &mut done, "read -P 3 0 4k").await;
    home.kill();
    home.start_process().await;
    assert_io(&home.qemu_io(&export, &["write -P 4 0 4k"]));
    disk.tell("read -P 4 0 4k");
    disk.has_done(done + 1).await;
    let said = disk.end().await;
    assert!(!said.contains("failed"), "{said}");
}
