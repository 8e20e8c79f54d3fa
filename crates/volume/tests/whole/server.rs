//! Starts volume servers and tools, and stops them again.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use perigee_http::certificate::IDENTITY_FILE;
use perigee_http::{Client, Identity, Listen, Network};
use perigee_model::volume::{CreateVolume, VolumeInfo, VolumeSource};
use perigee_model::{ImageName, VolumeName};
use perigee_volume::{
    Config, IscsiOptions, RemoteOptions, RemoteTlsFiles, ServerOptions, ServerTls, TlsFiles, serve,
};
use tempfile::TempDir;

const DEADLINE: Duration = Duration::from_secs(240);
const POOL_VARIABLE: &str = "PERIGEE_TEST_POOL";
/// A directory with `ca.pem`, `cert.pem` and `key.pem`: the server then wants TLS, and speaks it. Or one with the identity
/// of a host: then it is a server of that host's cluster.
const CERTIFICATES_VARIABLE: &str = "PERIGEE_TEST_CERTIFICATES";
pub const MIB: u64 = 1 << 20;
/// How many bytes a second the background fetches for copies.
pub const FILL_RATE_VARIABLE: &str = "PERIGEE_TEST_FILL_RATE";
/// How much of a server's log is printed when a test fails.
const LOG_BYTES_MAX: usize = 256 << 10;

/// Is the server when a test starts it so; it ends with the test that started it.
#[test]
#[ignore = "the other tests start it as the server's process"]
fn server_process() {
    let Ok(pool) = std::env::var(POOL_VARIABLE) else { return };
    let pool = PathBuf::from(pool);
    let log = File::options().append(true).create(true).open(log_file(&pool)).expect("a file");
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .with_ansi(false)
        .with_writer(log)
        .init();
    let certificates = std::env::var(CERTIFICATES_VARIABLE).ok().map(PathBuf::from);
    let identity = certificates.clone().filter(|dir| dir.join(IDENTITY_FILE).exists());
    let certificates = certificates.filter(|_| identity.is_none());
    let network = identity.map(|dir| Network::Tls(Identity::load(&dir).expect("an identity")));
    let network = network.unwrap_or_default();
    let file = |name: &str| Some(certificates.as_ref()?.join(name));
    let own = file("cert.pem").zip(file("key.pem"));
    let tls =
        own.clone().map(|(cert, key)| TlsFiles { cert, key, ca: file("ca.pem"), required: true });
    let tls = tls.map(ServerTls::Files);
    let remote_tls = file("ca.pem").map(|ca| RemoteTlsFiles { ca, own });
    let patience = Duration::from_secs(10);
    let rate = std::env::var(FILL_RATE_VARIABLE).map(|rate| rate.parse().expect("a rate"));
    let fill_bytes_per_s = rate.unwrap_or(RemoteOptions::default().fill_bytes_per_s);
    let config = Config {
        nbd: vec![
            Listen::Unix(sockets(&pool).join("nbd.sock")),
            Listen::Tcp(std::env::var("PERIGEE_TEST_NBD").expect("an address")),
        ],
        private: None,
        clients: ServerOptions { tls, ..ServerOptions::default() },
        iscsi: iscsi_options(&pool),
        remotes: RemoteOptions {
            network,
            tls: remote_tls,
            patience,
            fill_bytes_per_s,
            ..RemoteOptions::default()
        },
        control: vec![
            Listen::Unix(sockets(&pool).join("control.sock")),
            Listen::Tcp(std::env::var("PERIGEE_TEST_CONTROL").expect("an address")),
        ],
        image_dirs: Vec::new(),
        vm_sockets: sockets(&pool).join("run/vms"),
        boot_id: boot_id(&pool),
        pool,
    };
    std::thread::spawn(|| {
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).expect("the parent's pipe");
        std::process::exit(9);
    });
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(serve(config)).expect("the server");
}

/// A target; which initiators it knows is in a file that a test may have made.
fn iscsi_options(pool: &Path) -> IscsiOptions {
    let listen = vec![std::env::var("PERIGEE_TEST_ISCSI").expect("an address")];
    let clients = Some(clients_file(pool)).filter(|path| path.exists());
    IscsiOptions { listen, clients }
}

fn clients_file(pool: &Path) -> PathBuf {
    sockets(pool).join("iscsi-clients")
}

/// Sockets are beside the pool, so that a full pool still has room for them.
fn sockets(pool: &Path) -> PathBuf {
    pool.with_extension("sockets")
}

fn boot_id(pool: &Path) -> PathBuf {
    sockets(pool).join("boot-id")
}

/// What its server says. It is printed when a test fails.
fn log_file(pool: &Path) -> PathBuf {
    sockets(pool).join("log")
}

/// The end of a server's log, from a whole line on.
fn end_of(log: &[u8]) -> String {
    let cut = log.len().saturating_sub(LOG_BYTES_MAX);
    let text = String::from_utf8_lossy(&log[cut..]);
    if cut == 0 { text.into_owned() } else { text.lines().skip(1).collect::<Vec<_>>().join("\n") }
}

/// A volume server with a pool; both end with it.
pub struct Server {
    pub pool: PathBuf,
    pub nbd_addr: String,
    pub iscsi_addr: String,
    pub control: Client,
    /// The same over TCP, as other hosts reach it.
    pub control_addr: String,
    child: Option<Child>,
    certificates: Option<PathBuf>,
    /// Beside those of this process.
    variables: Vec<(&'static str, &'static str)>,
    /// Held until the server has ended.
    dir: Option<TempDir>,
}

impl Server {
    pub async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let pool = dir.path().join("pool");
        let mut server = Self::start_in(pool).await;
        server.dir = Some(dir);
        server
    }

    /// With its pool in a directory of the caller's.
    pub async fn start_in(pool: PathBuf) -> Self {
        std::fs::create_dir_all(sockets(&pool)).expect("a directory");
        std::fs::write(boot_id(&pool), "boot-1").expect("a file");
        let [nbd_addr, iscsi_addr, control_addr] =
            [(); 3].map(|()| format!("127.0.0.1:{}", perigee_http::unused_port()));
        let control = format!("unix:{}", sockets(&pool).join("control.sock").display());
        let control = Client::new(&control, DEADLINE).expect("a client");
        let (child, certificates, variables, dir) = Default::default();
        let mut server = Self {
            pool,
            nbd_addr,
            iscsi_addr,
            control,
            control_addr,
            child,
            certificates,
            variables,
            dir,
        };
        server.start_process().await;
        server
    }

    pub async fn start_process(&mut self) {
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "server::server_process", "--ignored", "--nocapture"])
            .env(POOL_VARIABLE, &self.pool)
            .env("PERIGEE_TEST_NBD", &self.nbd_addr)
            .envs(self.certificates.iter().map(|dir| (CERTIFICATES_VARIABLE, dir)))
            .envs(self.variables.iter().copied())
            .env("PERIGEE_TEST_ISCSI", &self.iscsi_addr)
            .env("PERIGEE_TEST_CONTROL", &self.control_addr)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a server");
        self.child = Some(child);
        let control = self.control.clone();
        until("the server to answer", async || {
            control.get::<serde_json::Value>("/v1/pool").await.is_ok()
        })
        .await;
    }

    /// Wants TLS of its clients and speaks it to other hosts, from now on.
    pub async fn with_tls(mut self, certificates: &Path) -> Self {
        self.terminate().await;
        self.certificates = Some(certificates.to_owned());
        self.start_process().await;
        self
    }

    /// Has these environment variables from now on.
    pub async fn with_variables(mut self, variables: &[(&'static str, &'static str)]) -> Self {
        self.terminate().await;
        self.variables = variables.to_vec();
        self.start_process().await;
        self
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("a running server").id()
    }

    /// From now on only these initiators are known to the target.
    pub async fn know_clients(&mut self, list: &str) {
        let path = clients_file(&self.pool);
        let new = !path.exists();
        std::fs::write(&path, list).expect("a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("a mode");
        if new {
            self.terminate().await;
            self.start_process().await;
        }
    }

    /// A volume as libiscsi's programs name it.
    pub fn iscsi_url(&self, volume: &str) -> String {
        self.iscsi_url_of("", volume)
    }

    /// `user`: `USER%SECRET@`.
    pub fn iscsi_url_of(&self, user: &str, volume: &str) -> String {
        format!("iscsi://{user}{}/iqn.2026-11.org.perigee:{volume}/0", self.iscsi_addr)
    }

    pub fn signal(&self, name: &str) {
        run(&["kill", &format!("-{name}"), &self.pid().to_string()]);
    }

    /// What its process has caused to be read from disks.
    pub fn read_bytes(&self) -> u64 {
        let pid = self.child.as_ref().expect("a running server").id();
        let counters = std::fs::read_to_string(format!("/proc/{pid}/io")).expect("its counters");
        let line = counters.lines().find_map(|line| line.strip_prefix("read_bytes: "));
        line.and_then(|n| n.parse().ok()).expect("a number")
    }

    /// As a power-off of the process: nothing is flushed.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("a running server");
        child.kill().expect("a kill");
        child.wait().expect("its end");
    }

    /// Its host has booted anew when it starts again.
    pub fn boot_anew(&self, boot: &str) {
        std::fs::write(boot_id(&self.pool), boot).expect("a file");
    }

    /// Ends it in order.
    pub async fn terminate(&mut self) {
        self.signal("TERM");
        let mut child = self.child.take().expect("a running server");
        until("the server to end", async || child.try_wait().expect("its state").is_some()).await;
        assert!(child.wait().expect("its end").success(), "it ends without an error");
    }

    pub fn socket(&self) -> PathBuf {
        sockets(&self.pool).join("nbd.sock")
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    pub fn tcp_uri(&self, export: &str) -> String {
        format!("nbd://{}/{export}", self.nbd_addr)
    }

    pub async fn create(&self, name: &str, size_bytes: u64) -> VolumeInfo {
        self.create_from(name, VolumeSource::Empty, Some(size_bytes)).await
    }

    pub async fn clone_image(&self, name: &str, image: &str) -> VolumeInfo {
        let image = ImageName::new(image).expect("a name");
        self.create_from(name, VolumeSource::Image(image), None).await
    }

    pub async fn create_from(
        &self,
        name: &str,
        source: VolumeSource,
        size_bytes: Option<u64>,
    ) -> VolumeInfo {
        let name = VolumeName::new(name).expect("a name");
        let request = CreateVolume::new(name, size_bytes, source);
        self.control.post("/v1/volumes", &request).await.expect("a volume")
    }

    pub fn qemu_io(&self, export: &str, commands: &[&str]) -> Output {
        let uri = self.uri(export);
        let mut args = vec!["qemu-io", "-f", "raw", &uri];
        args.extend(commands.iter().flat_map(|command| ["-c", command]));
        try_run(&args)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("a kill");
            child.wait().expect("its end");
        }
        if std::thread::panicking() {
            let log = std::fs::read(log_file(&self.pool)).unwrap_or_default();
            eprintln!("--- the log of the server at {}:\n{}", self.nbd_addr, end_of(&log));
        }
        drop(self.dir.take());
    }
}

/// Runs a program to its end, with a deadline.
pub fn try_run(args: &[&str]) -> Output {
    Command::new("timeout")
        .arg(DEADLINE.as_secs().to_string())
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("coreutils' timeout")
}

/// As [`try_run`], and it must succeed. Gives what it printed.
pub fn run(args: &[&str]) -> String {
    let output = try_run(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

pub fn said(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

/// qemu-io succeeds as a program when a read or write fails: what it says counts.
pub fn assert_io(output: &Output) {
    let said = said(output);
    let failed = ["failed", "error", "verification"].iter().any(|word| said.contains(word));
    assert!(output.status.success() && !failed, "{said}");
}

/// Waits for something that has to come.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !holds().await {
        assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Bytes that are different at every place, with a hole in the middle.
pub fn sample(size_bytes: u64) -> Vec<u8> {
    let size = usize::try_from(size_bytes).expect("a small sample");
    let mut bytes = Vec::with_capacity(size);
    let mut state = 1_u64;
    while bytes.len() < size {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bytes.extend_from_slice(&state.to_be_bytes());
    }
    bytes.truncate(size);
    bytes[size / 4..size / 2].fill(0);
    bytes
}
