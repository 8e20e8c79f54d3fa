//! Agents in this process, real QEMU, and stand-ins for the volume server: `qemu-storage-daemon`
//! exports the blocks, and a few lines here keep the writer epoch of one volume. (The whole system
//! with real volume servers is tested in crate `perigee`.)

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::{get, post, put};
use perigee_agent::{Config, VmUids};
use perigee_http::{Client, Failure, Json, Listen, Network, Reply};
use perigee_model::grant::{GRANT_HEADER, SignedGrant};
use perigee_model::network::{HostNetworks, NetworksKnown};
use perigee_model::switchover::{Fate, WriterEpochs};
use perigee_model::vm::{
    CancelMigration, ChangeVm, Disk, EndUnlessRan, EpochRaise, MigrateOut, MigrationPhase,
    VmChanged, VmReport, VmSpec, VmStatus,
};
use perigee_model::volume::{
    CachePolicy, EpochChange, EpochChanges, ExportStats, FlushVolumes, VmSocket, VmSocketAt,
    VolumeHealth, VolumeInfo,
};
use perigee_model::{
    DiskRole, Epoch, HostId, MigrationId, Problem, SiteId, TenantName, VmId, VmStart, VolumeName,
};
use tokio::runtime::Runtime;
use tokio::sync::watch;

const WANTED: &str = "the test wants it so";
/// Far more than anything here takes on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory that QEMU's user can pass through.
pub fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    dir
}

/// Waits until `look` gives something; says what it waited for when it does not.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match look() {
            Ok(found) => return found,
            Err(seen) => assert!(Instant::now() < deadline, "waited for {what}, saw {seen}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A boot sector that writes `value` to `port` and halts.
pub fn writes_port(port: u16, value: u8) -> [u8; 512] {
    let [low, high] = port.to_le_bytes();
    let mut sector = [0; 512];
    // mov dx, port; mov al, value; out dx, al; hlt; jmp to the hlt
    sector[..9].copy_from_slice(&[0xba, low, high, 0xb0, value, 0xee, 0xf4, 0xeb, 0xfd]);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// Exports `root@1`, `root@2` and `root@3`, one disk, on a unix socket. It begins with this sector, if any. `tpm@1` and so on are another one.
pub struct Blocks {
    daemon: Child,
    socket: PathBuf,
}

/// Sends commands to a monitor of QEMU's, one after the other. Each has to succeed.
fn tell(monitor: &Path, commands: &[serde_json::Value]) -> Vec<serde_json::Value> {
    let answers = ask(monitor, commands).into_iter().zip(commands);
    let answers = answers.map(|(answer, command)| {
        assert!(answer.get("return").is_some(), "{command}: {answer}");
        answer["return"].clone()
    });
    answers.collect()
}

/// As [`tell`], and gives errors too.
fn ask(monitor: &Path, commands: &[serde_json::Value]) -> Vec<serde_json::Value> {
    let stream = UnixStream::connect(monitor).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let begin = serde_json::json!({"execute": "qmp_capabilities"});
    let commands = [begin].into_iter().chain(commands.iter().cloned());
    let answers = commands.map(|command| {
        writeln!(&stream, "{command}").unwrap();
        let answers = lines.by_ref().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        let mut answers: Box<dyn Iterator<Item = serde_json::Value>> = Box::new(answers);
        let is_answer =
            |line: &serde_json::Value| line.get("return").is_some() || line.get("error").is_some();
        answers.find(is_answer).unwrap()
    });
    answers.skip(1).collect()
}

impl Blocks {
    pub fn serve(socket: &Path, boot_sector: &[u8]) -> Self {
        let disk = disk_of(socket);
        std::fs::write(&disk, boot_sector).unwrap();
        std::fs::File::options().write(true).open(&disk).unwrap().set_len(64 << 20).unwrap();
        std::fs::File::create_new(tpm_of(socket)).unwrap().set_len(TPM_BYTES).unwrap();
        Self { daemon: serve_blocks(socket), socket: socket.to_owned() }
    }

    /// As when the volume is resized at its home. A client that is connected has to connect again.
    pub fn grow(&mut self, size_bytes: u64) {
        self.end();
        let disk = std::fs::File::options().write(true).open(disk_of(&self.socket));
        disk.unwrap().set_len(size_bytes).unwrap();
        std::fs::remove_file(&self.socket).unwrap();
        self.daemon = serve_blocks(&self.socket);
    }

    /// It answers nothing until it goes on.
    pub fn pause(&self) {
        self.signal(nix::sys::signal::Signal::SIGSTOP);
    }

    pub fn go_on(&self) {
        self.signal(nix::sys::signal::Signal::SIGCONT);
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = i32::try_from(self.daemon.id()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    }

    /// The file of the volume `tpm`.
    pub fn tpm(&self) -> PathBuf {
        tpm_of(&self.socket)
    }

    pub fn wipe_tpm(&self) {
        let file = std::fs::File::options().write(true).open(self.tpm()).unwrap();
        file.set_len(0).unwrap();
        file.set_len(TPM_BYTES).unwrap();
    }

    fn end(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
    }
}

const TPM_BYTES: u64 = 4 << 20;

fn disk_of(socket: &Path) -> PathBuf {
    socket.with_extension("disk")
}

fn tpm_of(socket: &Path) -> PathBuf {
    socket.with_extension("tpm")
}

fn serve_blocks(socket: &Path) -> Child {
    let mut command = Command::new("qemu-storage-daemon");
    for (node, file) in [("blocks", disk_of(socket)), ("tpm", tpm_of(socket))] {
        let node = format!("file,node-name={node},filename={}", file.display());
        command.args(["--blockdev", &node]);
    }
    let address = format!("addr.type=unix,addr.path={},max-connections=0", socket.display());
    command.args(["--nbd-server", &address]);
    for epoch in 1..=3 {
        for (node, name) in [("blocks", "root"), ("tpm", "tpm")] {
            let export = format!("nbd,id={name}{epoch},node-name={node},name={name}@{epoch}");
            command.args(["--export", &format!("{export},writable=on")]);
        }
    }
    let daemon = command.spawn().unwrap();
    wait_for("the NBD socket", || socket.exists().then_some(()).ok_or_else(|| "no socket".into()));
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666)).unwrap();
    daemon
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.end();
    }
}

/// The writer epoch of the volume `root`, behind the volume server's API.
#[derive(Clone)]
pub struct Home {
    inner: Arc<HomeInner>,
    pub url: String,
}

struct HomeInner {
    epochs: Mutex<WriterEpochs>,
    /// No change is answered while this is false.
    open: watch::Sender<bool>,
    refuses: Mutex<bool>,
    /// Who shows another grant may change nothing.
    expects: Mutex<Option<SignedGrant>>,
    asked: watch::Sender<u32>,
    /// Requests that are being answered.
    waiting: AtomicU32,
}

/// A request that is being answered, until its client is gone.
struct Waiting(Arc<HomeInner>);

impl Waiting {
    fn at(home: &Arc<HomeInner>) -> Self {
        home.waiting.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(home))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Home {
    /// `blocks` is the socket that every VM gets: the stand-in for the blocks serves them all.
    pub fn serve(runtime: &Runtime, blocks: &Path) -> Self {
        let port = perigee_http::unused_port();
        let inner = Arc::new(HomeInner {
            epochs: Mutex::new(WriterEpochs {
                current: Epoch(1),
                issued_max: Epoch(3),
                returned_max: Epoch(0),
            }),
            open: watch::Sender::new(true),
            refuses: Mutex::new(false),
            expects: Mutex::new(None),
            asked: watch::Sender::new(0),
            waiting: AtomicU32::new(0),
        });
        let at = VmSocketAt { path: blocks.to_path_buf() };
        let router = axum::Router::new()
            .route("/v1/volumes/root", get(volume))
            .route("/v1/volumes/root/epoch", post(change_epoch))
            .route("/v1/batch/epochs", post(change_epochs))
            .route("/v1/batch/flush", post(async |_: Json<FlushVolumes>| Json(())))
            .route("/v1/vms", get(async || Json(Vec::<VmSocket>::new())))
            .route("/v1/vms/{vm}/socket", put(async |_: Json<VmSocket>| Json(at)))
            .route("/v1/stats", get(async || Json(Vec::<ExportStats>::new())))
            .with_state(inner.clone());
        runtime.spawn(async move {
            let listen = [Listen::Tcp(format!("127.0.0.1:{port}"))];
            perigee_http::serve(router, &listen, &Network::Plain).await
        });
        Self { inner, url: format!("http://127.0.0.1:{port}") }
    }

    pub fn epoch(&self) -> u64 {
        self.inner.epochs.lock().unwrap().current.0
    }

    pub fn set_epoch(&self, epoch: u64) {
        self.inner.epochs.lock().unwrap().current = Epoch(epoch);
    }

    /// Lets requests wait, or go on.
    pub fn open(&self, open: bool) {
        self.inner.open.send_replace(open);
    }

    pub fn refuse(&self) {
        *self.inner.refuses.lock().unwrap() = true;
    }

    /// From now on, who changes the epoch has to show this.
    pub fn expect(&self, grant: &SignedGrant) {
        *self.inner.expects.lock().unwrap() = Some(grant.clone());
    }

    /// Waits until somebody wants to change the epoch.
    pub fn wait_until_asked(&self) {
        wait_for("a change of the epoch", || match *self.inner.asked.borrow() {
            0 => Err("none".into()),
            _ => Ok(()),
        });
    }

    /// Waits until the home has seen that the clients of all its requests are gone.
    pub fn wait_until_left(&self) {
        wait_for("the end of the requests", || match self.inner.waiting.load(Ordering::SeqCst) {
            0 => Ok(()),
            count => Err(format!("{count} wait")),
        });
    }
}

async fn change_epoch(
    State(home): State<Arc<HomeInner>>,
    headers: HeaderMap,
    Json(change): Json<EpochChange>,
) -> Reply<VolumeInfo> {
    let _waiting = Waiting::at(&home);
    home.asked.send_modify(|asked| *asked += 1);
    home.open.subscribe().wait_for(|open| *open).await.expect("the sender lives in `home`");
    if *home.refuses.lock().unwrap() {
        return Err(Failure(Problem::conflict("change the epoch", WANTED)));
    }
    if let Some(expected) = &*home.expects.lock().unwrap()
        && headers.get(GRANT_HEADER).is_none_or(|shown| *shown != *expected.0)
    {
        return Err(Failure(Problem::forbidden("change the epoch", "the grant is too old")));
    }
    let mut epochs = home.epochs.lock().unwrap();
    let changed = epochs.apply(change);
    *epochs = changed.map_err(|e| Failure(Problem::conflict("change the epoch", e)))?;
    Ok(Json(info(epochs.current)))
}

async fn change_epochs(
    State(home): State<Arc<HomeInner>>,
    headers: HeaderMap,
    Json(ask): Json<EpochChanges>,
) -> Reply<()> {
    for one in ask.changes {
        assert_eq!(one.volume.as_str(), "root");
        change_epoch(State(home.clone()), headers.clone(), Json(one.change)).await?;
    }
    Ok(Json(()))
}

async fn volume(State(home): State<Arc<HomeInner>>) -> Reply<VolumeInfo> {
    Ok(Json(info(home.epochs.lock().unwrap().current)))
}

fn info(epoch: Epoch) -> VolumeInfo {
    VolumeInfo {
        name: VolumeName::new("root").unwrap(),
        size_bytes: 0,
        head_bytes: 0,
        allocated_bytes: 0,
        own_bytes: 0,
        shared_bytes: 0,
        remote_bytes: 0,
        chain: vec![],
        epoch,
        health: VolumeHealth::Ok,
        sessions: 0,
        tenant: TenantName::default(),
        cache: CachePolicy::default(),
        owner: None,
        leave_site: Default::default(),
    }
}

/// An agent with a runtime of its own: dropping that ends all its tasks at once, like a kill.
pub struct Agent {
    config: Config,
    runtime: Option<Runtime>,
    client: Client,
    here: Runtime,
}

impl Agent {
    pub fn start(name: &str, dir: &Path, home: &Home) -> Self {
        let port = perigee_http::unused_port();
        let agent_url = format!("http://127.0.0.1:{port}");
        let config = Config {
            host: HostId::new(name).unwrap(),
            site: SiteId::new("here").unwrap(),
            listen: vec![Listen::Tcp(format!("127.0.0.1:{port}"))],
            state: dir.join(name),
            vm_uids: VmUids::default(),
            guests_reach: Vec::new(),
            outside_addresses: Vec::new(),
            bridges: Vec::new(),
            volume_control: home.url.clone(),
            volume_url: home.url.clone(),
            nbd_addr: "127.0.0.1:1".into(),
            agent_url: agent_url.clone(),
            controller: None,
            // No kernel: a probe of KVM fails at once and TCG is used.
            probe_kernel: Some(PathBuf::from("/dev/null")),
            boot_id: dir.join(format!("{name}-boot-id")),
            network: Network::Plain,
            leased: None,
        };
        std::fs::write(&config.boot_id, "boot-1\n").unwrap();
        let client = Client::new(&agent_url, PATIENCE).unwrap();
        let mut agent = Self { config, runtime: None, client, here: Runtime::new().unwrap() };
        agent.run();
        agent
    }

    pub fn run(&mut self) {
        let runtime = Runtime::new().unwrap();
        runtime.spawn(perigee_agent::serve(self.config.clone()));
        self.runtime = Some(runtime);
        wait_for("the agent", || {
            let report = self.here.block_on(self.client.get::<serde_json::Value>("/v1/host"));
            report.map_err(|e| e.to_string())
        });
    }

    /// What the kernel says after a reboot.
    pub fn boot_anew(&self, boot_id: &str) {
        std::fs::write(&self.config.boot_id, boot_id).unwrap();
    }

    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(10));
        }
    }

    pub fn put(&self, spec: &VmSpec) -> Result<VmReport, Problem> {
        self.here.block_on(self.client.put(&format!("/v1/vms/{}", spec.vm), spec))
    }

    /// As the controller says which hosts the cluster has: this one alone.
    pub fn know_the_hosts(&self) {
        let known = HostNetworks { made_ms: 1, ..HostNetworks::default() };
        let _: NetworksKnown =
            self.here.block_on(self.client.put("/v1/networks", &known)).expect("it takes them");
    }

    pub fn get(&self) -> Result<VmReport, Problem> {
        self.here.block_on(self.client.get("/v1/vms/vm-1"))
    }

    /// Deletes the start that is there.
    pub fn delete(&self) -> Result<(), Problem> {
        self.delete_start(self.get().map_or_else(|_| VmStart::default(), |vm| vm.spec.start))
    }

    /// Deletes the starts up to this one.
    pub fn delete_start(&self, start: VmStart) -> Result<(), Problem> {
        self.here.block_on(self.client.delete(&format!("/v1/vms/vm-1?{}", start.query())))
    }

    pub fn end_unless_ran(&self, migration: &str) -> Result<Fate, Problem> {
        let asked = EndUnlessRan { migration: MigrationId::new(migration).unwrap() };
        self.here.block_on(self.client.post("/v1/vms/vm-1/end-unless-ran", &asked))
    }

    /// The first bytes that come over a tunnel.
    pub fn first_bytes(&self, path: &str, length: usize) -> Result<Vec<u8>, Problem> {
        let path = format!("/v1/vms/vm-1/{path}");
        self.here.block_on(async {
            let mut tunnel = self.client.tunnel(&path).await?;
            let mut bytes = vec![0; length];
            let read = tokio::io::AsyncReadExt::read_exact(&mut tunnel, &mut bytes);
            let read = tokio::time::timeout(PATIENCE, read).await;
            read.expect("it says something").expect("it goes on");
            Ok(bytes)
        })
    }

    pub fn post(&self, path: &str, body: &impl serde::Serialize) -> Result<(), Problem> {
        let path = format!("/v1/vms/vm-1/{path}");
        self.here.block_on(self.client.post::<serde_json::Value>(&path, body)).map(drop)
    }

    pub fn cancel(&self, migration: &str) -> Result<(), Problem> {
        let migration = MigrationId::new(migration).unwrap();
        self.post(
            "migrate/cancel",
            &CancelMigration { migration, number: 1, reason: WANTED.to_owned() },
        )
    }

    /// A command to the QEMU of an agent that does not run.
    pub fn tell_qemu(&self, command: &str) {
        let stream = UnixStream::connect(self.vm_dir().join("run/qmp.sock")).unwrap();
        let mut answers = BufReader::new(stream.try_clone().unwrap()).lines();
        for (id, command) in ["qmp_capabilities", command].iter().enumerate() {
            writeln!(&stream, "{{\"execute\": \"{command}\", \"id\": {id}}}").unwrap();
            let is_answer = |line: &String| line.contains(&format!("\"id\": {id}"));
            let answer = answers.by_ref().map(Result::unwrap).find(is_answer).unwrap();
            assert!(answer.contains("return"), "{answer}");
        }
    }

    /// As [`Self::tell_qemu`], and gives the answer.
    pub fn ask_qemu(&self, command: &str) -> serde_json::Value {
        let command = serde_json::json!({"execute": command});
        tell(&self.vm_dir().join("run/qmp.sock"), &[command]).remove(0)
    }

    /// What QEMU's monitor for people says, while the agent does not run.
    pub fn ask_monitor(&self, line: &str) -> String {
        let ask = serde_json::json!({
            "execute": "human-monitor-command", "arguments": {"command-line": line},
        });
        let answer = tell(&self.vm_dir().join("run/qmp.sock"), &[ask]).remove(0);
        answer.as_str().expect("a text").to_owned()
    }

    /// Why its QEMU can't open this file, while the agent does not run; `None` if it can.
    pub fn qemu_opens(&self, file: &str) -> Option<String> {
        let name = format!("file{}", file.replace('/', "."));
        let node = serde_json::json!({
            "driver": "file", "node-name": name, "read-only": true, "filename": file,
        });
        let open = serde_json::json!({"execute": "blockdev-add", "arguments": node});
        let answer = ask(&self.vm_dir().join("run/qmp.sock"), &[open]).remove(0);
        answer.get("error").map(|error| error["desc"].to_string())
    }

    /// What the host lacks, as `perigee host info` says it.
    pub fn warnings(&self) -> String {
        let report: serde_json::Value =
            self.here.block_on(self.client.get("/v1/host")).expect("it answers");
        report["warnings"].to_string()
    }

    pub fn change(&self, ask: &ChangeVm) -> Result<VmChanged, Problem> {
        self.change_start(self.get()?.spec.start, ask)
    }

    pub fn change_start(&self, start: VmStart, ask: &ChangeVm) -> Result<VmChanged, Problem> {
        let path = format!("/v1/vms/vm-1/change?{}", start.query());
        self.here.block_on(self.client.post(&path, ask))
    }

    pub fn vm_dir(&self) -> PathBuf {
        self.config.state.join("vms/vm-1")
    }

    pub fn wait_for_status(&self, status: VmStatus) -> VmReport {
        wait_for(&format!("status {status:?}"), || {
            let report = self.get().map_err(|e| e.to_string())?;
            if report.status == status { Ok(report) } else { Err(format!("{report:?}")) }
        })
    }

    /// The status comes from QEMU, and the reason with its event, which may be handled later.
    pub fn wait_for_end(&self, reason: &str) {
        wait_for(&format!("an end, because {reason}"), || {
            let report = self.get().map_err(|e| e.to_string())?;
            let has_ended =
                report.status == VmStatus::Shutdown && report.reason.starts_with(reason);
            has_ended.then_some(()).ok_or_else(|| format!("{report:?}"))
        });
    }

    pub fn wait_for_phase(&self, phase: MigrationPhase) -> VmReport {
        wait_for(&format!("migration {phase:?}"), || {
            let report = self.get().map_err(|e| e.to_string())?;
            let seen = report.migration.as_ref().map(|migration| migration.phase);
            if seen == Some(phase) { Ok(report) } else { Err(format!("{report:?}")) }
        })
    }

    /// Orders the migration of `vm-1` to an agent where it waits.
    pub fn migrate_to(&self, there: &Agent, home: &Home) {
        let waiting = there.put(&spec(2, true)).unwrap();
        let uri = waiting.incoming_uri.expect("it waits for the migration");
        self.order("m-1", 1, uri, there, home);
    }

    /// Orders a migration; see [`order`].
    pub fn order(&self, migration: &str, number: u32, uri: String, there: &Agent, home: &Home) {
        self.post("migrate", &order(migration, number, uri, there, home)).unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.runtime.is_none() {
            self.run();
        }
        let result = self.delete();
        self.kill();
        if !std::thread::panicking() {
            result.unwrap();
        }
    }
}

/// The order of a migration that raises the epoch from its number by one.
pub fn order(migration: &str, number: u32, uri: String, there: &Agent, home: &Home) -> MigrateOut {
    MigrateOut {
        migration: MigrationId::new(migration).unwrap(),
        number,
        uri,
        destination_agent_url: there.config.agent_url.clone(),
        destination: Some(there.config.host.clone()),
        epochs: vec![EpochRaise {
            volume: VolumeName::new("root").unwrap(),
            volume_url: home.url.clone(),
            from: Epoch(number.into()),
            to: Epoch(u64::from(number) + 1),
        }],
        downtime_limit_ms: 300,
        compressed: false,
        max_bytes_per_s: None,
        throttle_percent: None,
        grant: None,
    }
}

/// The start of a VM that boots, in this run of its job.
pub fn start(run: u32) -> VmStart {
    VmStart { submitted_ms: 1000, run, migration: 0 }
}

/// A VM with one disk on which there is nothing: the firmware runs, and waits for ever.
pub fn spec(epoch: u64, is_incoming: bool) -> VmSpec {
    VmSpec {
        vm: VmId::new("vm-1").unwrap(),
        start: start(0).by_migration(u32::from(is_incoming)),
        cpus: 1,
        memory_bytes: 64 << 20,
        disks: vec![Disk {
            role: DiskRole::Root,
            volume: VolumeName::new("root").unwrap(),
            epoch: Epoch(epoch),
            read_only: false,
        }],
        arrives_by: is_incoming.then(|| MigrationId::new("m-1").unwrap()),
        arrives_from: None,
        arrives_compressed: false,
        arrives_tunnelled: false,
        locks_memory: false,
        hides_output: false,
        network: Default::default(),
        machine: Default::default(),
    }
}

pub fn kill_9(pid: u32) {
    signal("-KILL", pid);
}

pub fn signal(name: &str, pid: u32) {
    let status = Command::new("kill").args([name, &pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill {name} {pid}");
}
