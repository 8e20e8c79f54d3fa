//! A volume's home moves: back and forth under open sessions, called off, and while servers are killed.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_model::client::Login;
use perigee_model::home::{
    CallOff, Depart, HomeState, ServerAddresses, TakeVolume, Tenure, VolumeHome,
};
use perigee_model::volume::{
    Attach, Attachment, CheckReport, CheckScope, CopyImage, ImageInfo, ImportImage, Keep,
    VolumeInfo,
};
use perigee_model::{Epoch, ImageName, Problem, ProblemKind};

use crate::kills::{Pauses, Running, has, reconnecting};
use crate::server::{MIB, Server, assert_io, run, sample, until};

const DEADLINE: Duration = Duration::from_secs(120);

fn addresses(server: &Server) -> ServerAddresses {
    let control_url = format!("http://{}", server.control_addr);
    ServerAddresses { nbd_addr: server.nbd_addr.clone(), control_url }
}

async fn home(server: &Server) -> HomeState {
    let path = "/v1/volumes/data/home";
    server.control.get::<VolumeHome>(path).await.expect("what it knows").home
}

async fn tenure(server: &Server) -> Tenure {
    match home(server).await {
        HomeState::Here { tenure, .. } => tenure,
        other => panic!("{other:?}"),
    }
}

pub async fn attach(server: &Server, home: &Server) {
    let attach = Attach { nbd_addr: home.nbd_addr.clone() };
    let _: Attachment =
        server.control.put("/v1/attachments/data", &attach).await.expect("an attachment");
}

pub async fn take(to: &Server, ask: &TakeVolume) -> Result<VolumeHome, Problem> {
    to.control.post("/v1/volumes/data/take", ask).await
}

pub async fn ask(from: &Server, to: &Server) -> TakeVolume {
    TakeVolume { from: addresses(from), to: addresses(to), tenure: tenure(from).await, grant: None }
}

/// As the controller does it.
pub async fn carry(from: &Server, to: &Server) {
    let (ask, began) = (ask(from, to).await, Instant::now());
    until("the volume to be taken", async || match take(to, &ask).await {
        Ok(_) => true,
        Err(problem) => {
            assert_eq!(problem.kind, ProblemKind::Unavailable, "{problem}");
            false
        }
    })
    .await;
    eprintln!("taken after {} ms", began.elapsed().as_millis());
    complete(from, to, ask.tenure.next()).await;
}

async fn complete(from: &Server, to: &Server, tenure: Tenure) {
    until("the volume's layers to be copied", async || {
        matches!(home(to).await, HomeState::Here { missing_bytes: 0, .. })
    })
    .await;
    let path = format!("/v1/volumes/data/departed?tenure={tenure}");
    from.control.delete(&path).await.expect("that it is forgotten");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_moves_to_another_host_and_back_and_is_found_at_both() {
    let (one, two) = (Server::start().await, Server::start().await);
    let epoch = one.create("data", 8 * MIB).await.epoch;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("sample.raw").display().to_string();
    std::fs::write(&file, sample(8 * MIB)).expect("a file");
    run(&["nbdcopy", "--flush", &file, &one.uri("data")]);
    attach(&two, &one).await;
    for (from, to) in [(&one, &two), (&two, &one)] {
        carry(from, to).await;
        let info: VolumeInfo = to.control.get("/v1/volumes/data").await.expect("the volume");
        assert_eq!((info.epoch, info.size_bytes, info.remote_bytes), (epoch, 8 * MIB, 0));
        let gone = from.control.get::<VolumeInfo>("/v1/volumes/data").await.expect_err("it left");
        assert_eq!(gone.kind, ProblemKind::NotFound);
        for server in [from, to] {
            let export = server.uri(&format!("data@{epoch}"));
            run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &file, &export]);
        }
    }
    let pool: perigee_model::volume::PoolInfo = two.control.get("/v1/pool").await.expect("it");
    assert_eq!((pool.volumes, pool.data_bytes), (0, 0), "nothing of it is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_the_new_home_has_is_not_shipped_again() {
    let (one, two) = (Server::start().await, Server::start().await);
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("sample.raw").display().to_string();
    std::fs::write(&file, sample(32 * MIB)).expect("a file");
    let name = ImageName::new("golden").expect("a name");
    let request = ImportImage {
        name,
        source: file,
        layer: None,
        leave_site: Default::default(),
        format: None,
    };
    let image: ImageInfo =
        one.control.post_long("/v1/images", &request, |_| {}).await.expect("an image");
    let request = CopyImage {
        content: None,
        nbd_addr: one.nbd_addr.clone(),
        export: None,
        keep: Keep::All,
        layer: None,
    };
    let _: ImageInfo = two.control.post("/v1/images/golden/copy", &request).await.expect("a copy");
    until("the image to be copied", async || {
        let image = two.control.get::<ImageInfo>("/v1/images/golden").await.expect("an image");
        image.remote.is_none()
    })
    .await;
    one.clone_image("data", "golden").await;
    let info: VolumeInfo = one.control.get("/v1/volumes/data").await.expect("the volume");
    let epoch = info.epoch;
    assert_io(&one.qemu_io(&format!("data@{epoch}"), &["write -P 7 4M 1M", "discard 8M 1M"]));
    attach(&two, &one).await;
    // The new home has a part of it before, and the rest is written since.
    let all: serde_json::Value =
        one.control.post("/v1/volumes/data/seal", &()).await.expect("its layers");
    assert_eq!(all.as_array().map(Vec::len), Some(2), "{all}");
    assert_io(&two.qemu_io(&format!("data@{epoch}"), &["write -P 8 5M 64k"]));
    let ask = ask(&one, &two).await;
    take(&two, &ask).await.expect("the volume");
    let info: VolumeInfo = two.control.get("/v1/volumes/data").await.expect("the volume");
    assert_eq!(info.chain.last(), Some(&image.layer), "it stands on the image that was there");
    assert!(info.remote_bytes <= MIB + 64 * 1024, "{info:?}");
    let check = ["read -P 7 4M 1M", "read -P 8 5M 64k", "read -P 0 8M 1M"];
    assert_io(&two.qemu_io(&format!("data@{epoch}"), &check));
    complete(&one, &two, ask.tenure.next()).await;
    assert_io(&two.qemu_io(&format!("data@{epoch}"), &check));
    let report: CheckReport =
        two.control.post_long("/v1/check", &CheckScope::Pool, |_| {}).await.expect("a report");
    assert!(report.faults.is_empty() && report.leftovers.is_empty(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_is_called_off_shows_to_open_sessions_only_as_a_pause() {
    let (one, two) = (Server::start().await, Server::start().await);
    let epoch = one.create("data", 8 * MIB).await.epoch;
    attach(&two, &one).await;
    let mut disk = Disk::open(&one, epoch);
    let mut other = Disk::open(&two, epoch);
    disk.tell("write -P 1 0 1M").await;
    let ask = ask(&one, &two).await;
    let depart = Depart { tenure: ask.tenure, to: ask.to.clone() };
    let path = "/v1/volumes/data/depart";
    let _: serde_json::Value = one.control.post(path, &depart).await.expect("a departure");
    disk.begin("write -P 2 1M 1M");
    other.begin("write -P 3 2M 1M");
    let off = CallOff { tenure: ask.tenure };
    let refused: VolumeHome =
        two.control.post("/v1/volumes/data/refuse", &off).await.expect("a refusal");
    let never = HomeState::NotHere { refused: ask.tenure.next(), had: Tenure(0) };
    assert_eq!(refused.home, never);
    let back: VolumeHome =
        one.control.post("/v1/volumes/data/return", &off).await.expect("its return");
    let tenure = ask.tenure.next().next();
    assert_eq!(back.home, HomeState::Here { tenure, missing_bytes: 0 });
    disk.done().await;
    other.done().await;
    let late = take(&two, &ask).await.expect_err("it comes late");
    assert_eq!(late.kind, ProblemKind::Conflict);
    for check in ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 1M", "flush"] {
        disk.tell(check).await;
        other.tell(check).await;
    }
    for disk in [disk, other] {
        let said = disk.end().await;
        assert!(!said.contains("failed"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_comes_while_the_volume_is_nowhere_waits_for_its_new_home() {
    let (one, two, third) = (Server::start().await, Server::start().await, Server::start().await);
    let epoch = one.create("data", 8 * MIB).await.epoch;
    attach(&two, &one).await;
    attach(&third, &one).await;
    let ask = ask(&one, &two).await;
    let depart = Depart { tenure: ask.tenure, to: ask.to.clone() };
    let _: serde_json::Value =
        one.control.post("/v1/volumes/data/depart", &depart).await.expect("a departure");
    let mut disks = [&one, &two, &third].map(|server| Disk::open(server, epoch));
    for (disk, command) in disks.iter_mut().zip(["write 0 1M", "write 1M 1M", "write 2M 1M"]) {
        disk.begin(command);
    }
    // Long enough for each to look for it and to find it nowhere.
    tokio::time::sleep(Duration::from_secs(2)).await;
    take(&two, &ask).await.expect("the volume");
    for mut disk in disks {
        disk.done().await;
        let said = disk.end().await;
        assert!(!said.contains("failed"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_third_host_finds_the_volume_where_it_went() {
    let (one, two, third) = (Server::start().await, Server::start().await, Server::start().await);
    let epoch = one.create("data", 8 * MIB).await.epoch;
    attach(&third, &one).await;
    let mut disk = Disk::open(&third, epoch);
    disk.tell("write -P 1 0 1M").await;
    carry(&one, &two).await;
    disk.tell("write -P 2 1M 1M").await;
    disk.tell("read -P 1 0 1M").await;
    carry(&two, &one).await;
    disk.tell("write -P 3 2M 1M").await;
    let attachments: Vec<Attachment> = third.control.get("/v1/attachments").await.expect("a list");
    assert_eq!(attachments[0].nbd_addr, one.nbd_addr);
    let said = disk.end().await;
    assert!(!said.contains("failed"), "{said}");
    let check = ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 1M"];
    assert_io(&third.qemu_io(&format!("data@{epoch}"), &check));
    // It was away during a move.
    carry(&one, &two).await;
    assert_io(&third.qemu_io(&format!("data@{epoch}"), &check));
}

/// qemu-io as patient as a VM's disk, taking commands one after the other.
pub struct Disk {
    qemu_io: Running,
    commands: std::process::ChildStdin,
    said: std::path::PathBuf,
    begun: usize,
    _dir: tempfile::TempDir,
}

impl Disk {
    pub fn open(host: &Server, epoch: Epoch) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let said = dir.path().join("said");
        let out = std::fs::File::create(&said).expect("a file");
        let disk = format!(
            "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},\
             file.export=data@{epoch},file.reconnect-delay=60",
            host.socket().display()
        );
        let mut qemu_io = Command::new("timeout")
            .args(["600", "stdbuf", "-oL", "qemu-io", "--image-opts", &disk])
            .stdin(Stdio::piped())
            .stderr(out.try_clone().expect("a second handle"))
            .stdout(out)
            .spawn()
            .expect("qemu-io");
        let commands = qemu_io.stdin.take().expect("a pipe");
        Self { qemu_io: Running(qemu_io), commands, said, begun: 0, _dir: dir }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.said).expect("what it said")
    }

    pub fn begin(&mut self, command: &str) {
        use std::io::Write;
        writeln!(self.commands, "{command}").expect("a living qemu-io");
        self.begun += 1;
    }

    /// qemu-io reads the next command only after it has asked for it.
    pub async fn done(&mut self) {
        let what = format!("qemu-io to go on after {} commands", self.begun);
        until(&what, async || {
            let said = self.said();
            let ended = self.qemu_io.0.try_wait().expect("its state");
            assert!(ended.is_none(), "qemu-io has ended: {said}");
            said.matches("qemu-io> ").count() > self.begun
        })
        .await;
    }

    pub async fn tell(&mut self, command: &str) {
        self.begin(command);
        self.done().await;
    }

    pub async fn end(mut self) -> String {
        self.begin("quit");
        let qemu_io = &mut self.qemu_io.0;
        until("qemu-io to end", async || qemu_io.try_wait().expect("its state").is_some()).await;
        self.said()
    }
}

/// fio that verifies what it wrote in a part of the volume.
fn fio(uri: &str, offset_bytes: u64, seed: u64) -> Running {
    let child = Command::new("timeout")
        .args(["300", "fio", "--name=verify", "--ioengine=nbd", "--rw=randwrite", "--bs=4k"])
        .args(["--iodepth=16", "--size=8m", "--rate_iops=500", "--verify=crc32c", "--fsync=64"])
        .args(["--verify_fatal=1", "--verify_state_save=0", "--output-format=terse"])
        .arg(format!("--offset={offset_bytes}"))
        .arg(format!("--randseed={seed}"))
        .arg(format!("--uri={uri}"))
        .stdout(Stdio::null())
        .spawn()
        .expect("fio");
    Running(child)
}

fn is_missing() -> bool {
    let missing = !has("qemu-nbd") || !has("fio") || !run(&["fio", "--enghelp"]).contains("nbd");
    if missing {
        eprintln!("not run: it needs qemu-nbd and a fio with the nbd engine");
    }
    missing
}

#[tokio::test(flavor = "multi_thread")]
async fn fio_at_both_homes_does_not_notice_that_the_volume_moves_back_and_forth() {
    if is_missing() {
        return;
    }
    let (one, two) = (Server::start().await, Server::start().await);
    let epoch = one.create("data", 32 * MIB).await.epoch;
    attach(&two, &one).await;
    let mut pauses = Pauses(std::process::id().into());
    let (mut moves, mut round) = (0, 0);
    let mut here = (&one, &two);
    while moves < 20 {
        round += 1;
        let uri = |server: &Server| server.uri(&format!("data@{epoch}"));
        let mut fios = [fio(&uri(&one), 0, round), fio(&uri(&two), 16 * MIB, round)];
        let started = Instant::now();
        loop {
            let ended = fios.iter_mut().filter_map(|fio| fio.0.try_wait().expect("its state"));
            let ended: Vec<bool> = ended.map(|status| status.success()).collect();
            assert!(ended.iter().all(|well| *well), "after {moves} moves, round {round}");
            if ended.len() == fios.len() {
                break;
            }
            assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} for fio");
            tokio::time::sleep(pauses.next()).await;
            carry(here.0, here.1).await;
            here = (here.1, here.0);
            moves += 1;
        }
    }
    for server in [&one, &two] {
        until("every session to end", async || {
            let open: Vec<Login> = server.control.get("/v1/logins").await.expect("a list");
            open.is_empty()
        })
        .await;
    }
}

/// What the controller knows of the move that is under way.
struct Move {
    ask: TakeVolume,
    from: usize,
}

async fn once(client: &Client, path: &str, body: &impl serde::Serialize) -> Option<VolumeHome> {
    client.post(path, body).await.ok()
}

/// Calls a move off, as the controller does it. Where the volume is then.
async fn call_off(servers: &[Server; 2], moving: &Move) -> Option<usize> {
    let off = CallOff { tenure: moving.ask.tenure };
    let to = 1 - moving.from;
    match once(&servers[to].control, "/v1/volumes/data/refuse", &off).await?.home {
        HomeState::Here { .. } => Some(to),
        HomeState::NotHere { refused, .. } if refused >= off.tenure.next() => {
            let from = &servers[moving.from].control;
            match once(from, "/v1/volumes/data/return", &off).await?.home {
                HomeState::Here { .. } => Some(moving.from),
                other => panic!("{other:?}"),
            }
        }
        other => panic!("{other:?}"),
    }
}

/// `PERIGEE_KILLS` is the number of moves with a kill (default 6).
#[tokio::test(flavor = "multi_thread")]
async fn no_write_is_lost_when_servers_are_killed_while_the_volume_moves() {
    if is_missing() {
        return;
    }
    let kills: u64 = std::env::var("PERIGEE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    let mut pauses = Pauses(std::process::id().into());
    eprintln!("pauses from {}", pauses.0);
    let mut servers = [Server::start().await, Server::start().await];
    let epoch = servers[0].create("data", 32 * MIB).await.epoch;
    attach(&servers[1], &servers[0]).await;
    let (mut at, mut killed, mut round) = (0, 0, 0);
    while killed < kills {
        round += 1;
        let dir = tempfile::tempdir().expect("a directory");
        let export = format!("data@{epoch}");
        let (_qemu, socket) = reconnecting(&servers[0], &export, dir.path()).await;
        let mut fio = fio(&format!("nbd+unix:///through?socket={}", socket.display()), 0, round);
        let started = Instant::now();
        loop {
            if let Some(ended) = fio.0.try_wait().expect("its state") {
                assert!(ended.success(), "round {round}, {killed} kills");
                break;
            }
            assert!(started.elapsed() < 3 * DEADLINE, "waited {:?} for fio", 3 * DEADLINE);
            tokio::time::sleep(pauses.next()).await;
            at = move_with_a_kill(&mut servers, at, &mut pauses).await;
            killed += 1;
        }
    }
}

/// Begins a move, kills one of the servers within it, and ends the move either way.
async fn move_with_a_kill(servers: &mut [Server; 2], at: usize, pauses: &mut Pauses) -> usize {
    let ask = ask(&servers[at], &servers[1 - at]).await;
    let moving = Move { ask, from: at };
    let (client, body) = (servers[1 - at].control.clone(), moving.ask.clone());
    let taking = tokio::spawn(async move {
        let _lost = once(&client, "/v1/volumes/data/take", &body).await;
    });
    let dice = pauses.next().as_micros();
    tokio::time::sleep(Duration::from_micros(u64::try_from(dice).expect("short") % 60_000)).await;
    let victim = usize::from(dice.is_multiple_of(2));
    servers[victim].kill();
    servers[victim].start_process().await;
    taking.await.expect("the request's end");
    let calls_off = dice.is_multiple_of(3);
    let mut is = at;
    until("the move to end", async || {
        if calls_off {
            let now = call_off(servers, &moving).await;
            is = now.unwrap_or(is);
            return now.is_some();
        }
        let taken = take(&servers[1 - at], &moving.ask).await.is_ok();
        is = if taken { 1 - at } else { is };
        taken
    })
    .await;
    if is != at {
        complete(&servers[at], &servers[is], moving.ask.tenure.next()).await;
    }
    is
}
