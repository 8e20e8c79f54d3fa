//! What an operator does with a pool and with a cluster, through the command line.

mod cluster;
mod install;
mod terminal;
mod walk;

use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

/// A pool, and perhaps a volume server; both go with it.
struct Pool {
    dir: PathBuf,
    server: Option<Child>,
}

impl Pool {
    fn new(name: &str) -> Self {
        let dir =
            std::env::temp_dir().join(format!("perigee-operator-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let pool = Self { dir, server: None };
        pool.ok(&["pool", "create"]);
        pool
    }

    fn pool(&self) -> PathBuf {
        self.dir.join("pool")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg(DEADLINE.as_secs().to_string()).arg(env!("CARGO_BIN_EXE_perigee"));
        command.args(["--format", "json"]).args(args).arg("--pool").arg(self.pool());
        command.env("PERIGEE_LOG", "warn").stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("coreutils' timeout")
    }

    /// What a command that succeeds prints.
    fn ok(&self, args: &[&str]) -> Value {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// The exit code of a command that fails, and what it says.
    fn fails(&self, args: &[&str]) -> (i32, String) {
        let output = self.run(args);
        let said = [output.stdout, output.stderr].concat();
        let code = output.status.code().expect("an exit code");
        assert_ne!(code, 0, "{args:?}");
        (code, String::from_utf8_lossy(&said).into_owned())
    }

    fn import(&self, image: &str, size_bytes: usize) {
        let bytes: Vec<u8> = (1..=251_u8).cycle().take(size_bytes).collect();
        let file = self.dir.join(format!("{image}.raw"));
        std::fs::write(&file, bytes).expect("a file");
        self.ok(&["image", "import", image, file.to_str().expect("text")]);
    }

    /// Imports an image with this script in the place of `qemu-img`.
    fn import_with(&self, qemu_img: &str) -> Output {
        let (programs, image) = (self.dir.join("programs"), self.dir.join("image.qcow2"));
        std::fs::create_dir_all(&programs).expect("a directory");
        let program = programs.join("qemu-img");
        std::fs::write(&program, qemu_img).expect("a program");
        std::fs::write(&image, [7; 65536]).expect("a file");
        for path in [&self.dir, &programs, &program] {
            set_mode(path, 0o755);
        }
        set_mode(&image, 0o644);
        let path = std::env::var("PATH").expect("a path");
        let mut command = self.command(&["image", "import", "gold", image.to_str().expect("text")]);
        command.env("PATH", format!("{}:{path}", programs.display()));
        command.env("SECRET", "of the server").output().expect("coreutils' timeout")
    }

    fn serve(&mut self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
        command.args(["volume", "serve", "--pool"]).arg(self.pool());
        command.arg("--nbd").arg(format!("unix:{}", self.socket().display()));
        command.env("PERIGEE_LOG", "warn");
        self.server = Some(command.spawn().expect("a server"));
        until("the server to answer", || {
            std::os::unix::net::UnixStream::connect(self.pool().join("control.sock")).is_ok()
        });
    }

    fn stop(&mut self) {
        let Some(mut server) = self.server.take() else { return };
        let pid = server.id().to_string();
        assert!(Command::new("kill").arg(&pid).status().expect("kill").success());
        until("the server to end", || server.try_wait().expect("its state").is_some());
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("nbd.sock")
    }

    fn qemu_io(&self, volume: &str, commands: &[&str]) -> String {
        let uri = format!("nbd+unix:///{volume}?socket={}", self.socket().display());
        let mut command = Command::new("timeout");
        command.args(["60", "qemu-io", "-f", "raw", &uri]);
        command.args(commands.iter().flat_map(|text| ["-c", text]));
        let output = command.stdin(Stdio::null()).output().expect("coreutils' timeout");
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&said).into_owned()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill().expect("a kill");
            server.wait().expect("its end");
        }
        std::fs::remove_dir_all(&self.dir).expect("tidy up");
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("a mode");
}

fn flip_a_byte(file: &Path, offset: u64) {
    let file = std::fs::File::options().read(true).write(true).open(file).expect("the file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], offset).expect("another byte");
}

#[test]
fn without_a_server_a_pool_is_made_filled_cloned_and_told() {
    let pool = Pool::new("offline");
    pool.import("gold", 4 << 20);
    let clones = pool.ok(&["volume", "create", "c", "--image", "gold", "--count", "1000"]);
    assert_eq!(clones.as_array().map(Vec::len), Some(1000));
    assert_eq!((&clones[0]["name"], &clones[999]["name"]), (&"c-0001".into(), &"c-1000".into()));
    let args = ["volume", "clone", "c-0007", "d", "--count", "2"];
    assert_eq!(pool.ok(&args).as_array().map(Vec::len), Some(2));
    let args = ["volume", "create", "e", "--size", "1GiB", "--tenant", "blue", "--cache", "direct"];
    pool.ok(&args);

    let info = pool.ok(&["volume", "info", "c-0001"]);
    assert_eq!((&info["own_bytes"], &info["shared_bytes"]), (&0.into(), &(4 << 20).into()));
    assert_eq!((&info["remote_bytes"], &info["tenant"]), (&0.into(), &"default".into()));
    let info = pool.ok(&["pool", "info"]);
    assert_eq!((&info["volumes"], &info["data_bytes"]), (&1003.into(), &(4 << 20).into()));
    assert_eq!(info["tenants"][0]["tenant"], "blue");
    assert_eq!(info["tenants"][0]["virtual_bytes"], 1_u64 << 30);

    let (code, said) = pool.fails(&["volume", "create", "c", "--image", "gold", "--count", "3"]);
    assert!(code == 5 && said.contains("c-0001"), "{code} {said}");
    assert_eq!(pool.ok(&["pool", "info"])["volumes"], 1003, "all or none");
}

#[test]
fn a_volume_in_use_grows_is_sealed_and_merged_and_keeps_its_bytes() {
    let mut pool = Pool::new("online");
    pool.import("gold", 4 << 20);
    pool.serve();
    pool.ok(&["volume", "create", "v", "--image", "gold"]);
    let said = pool.qemu_io("v", &["write -P 1 0 64k", "flush"]);
    assert!(!said.contains("failed"), "{said}");
    for (number, clone) in ["c1", "c2", "c3"].iter().enumerate() {
        pool.ok(&["volume", "clone", "v", clone]);
        let write = format!("write -P {} {}k 64k", number + 2, 64 * (number + 1));
        let said = pool.qemu_io("v", &[&write, "flush"]);
        assert!(!said.contains("failed"), "{said}");
        pool.ok(&["volume", "delete", clone]);
    }
    assert_eq!(pool.ok(&["volume", "resize", "v", "--size", "8MiB"])["size_bytes"], 8 << 20);
    let (code, said) = pool.fails(&["volume", "resize", "v", "--size", "1MiB"]);
    assert!(code == 3 && said.contains("--shrink"), "{code} {said}");
    pool.ok(&["volume", "resize", "v", "--size", "9MiB"]);
    let done = pool.ok(&["volume", "compact", "v"]);
    assert_eq!((&done["layers_before"], &done["layers_after"]), (&7.into(), &2.into()), "{done}");
    let reads = [
        "read -P 1 0 64k",
        "read -P 2 64k 64k",
        "read -P 3 128k 64k",
        "read -P 4 192k 64k",
        "read -P 0 4M 5M",
    ];
    let said = pool.qemu_io("v", &reads);
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    pool.stop();
    assert_eq!(pool.ok(&["volume", "check"])["faults"], Value::Array(vec![]));
}

#[test]
fn a_check_tells_soundness_by_its_exit_code_and_names_the_damage() {
    let mut pool = Pool::new("check");
    pool.import("gold", 4 << 20);
    pool.ok(&["volume", "create", "v", "--image", "gold"]);
    pool.serve();
    until("the checksums", || {
        pool.ok(&["volume", "check"])["without_checksums"] == Value::Array(vec![])
    });
    assert_eq!(pool.ok(&["volume", "check", "v"])["compared_bytes"], 4 << 20);
    let layer = pool.ok(&["image", "info", "gold"])["layer"].as_str().expect("an id").to_owned();
    flip_a_byte(&pool.pool().join("layers").join(format!("{layer}.data")), 1 << 20);
    for online in [true, false] {
        for args in [&["volume", "check"][..], &["image", "check", "gold"]] {
            let (code, said) = pool.fails(args);
            let named =
                [&layer, "volume v", "image gold", "1048576"].iter().all(|w| said.contains(*w));
            assert!(code == 1 && named, "online {online}: {code} {said}");
        }
        pool.stop();
    }
    assert_eq!(pool.fails(&["volume", "check", "nobody"]).0, 4);
}

#[test]
fn a_pool_of_another_format_or_with_a_damaged_catalog_is_refused_in_plain_words() {
    let pool = Pool::new("format");
    let catalog = pool.pool().join("catalog.sqlite");
    // The header's user_version, big endian.
    let file = std::fs::File::options().write(true).open(&catalog).expect("the catalog");
    file.write_all_at(&99_u32.to_be_bytes(), 60).expect("a version");
    let (code, said) = pool.fails(&["volume", "list"]);
    assert!(code == 5 && said.contains("version 99") && said.contains("newer"), "{code} {said}");
    std::fs::write(&catalog, "no catalog at all, but long enough to be read as one")
        .expect("damage");
    let (code, said) = pool.fails(&["volume", "check"]);
    assert!(code == 1 && said.contains("catalog is damaged"), "{code} {said}");
}

#[test]
fn clients_are_added_bound_and_shown_with_and_without_a_server() {
    let mut pool = Pool::new("clients");
    pool.import("gold", 4 << 20);
    let secret = pool.dir.join("secret");
    std::fs::write(&secret, "correct-horse\n").expect("a file");
    let secret = secret.to_str().expect("text");
    let chap = ["--chap-user", "c1", "--chap-secret", secret];
    pool.ok(&[&["client", "add", "c1", "--mac", "52-54-00-00-00-01"][..], &chap].concat());
    let bound = pool.ok(&["client", "bind", "c1", "--image", "gold", "--ephemeral"]);
    assert_eq!(bound["binding"]["service"]["image"]["lifetime"], "ephemeral");
    let (code, said) = pool.fails(&["client", "add", "c2", "--mac", "52:54:00:00:00:01"]);
    assert!(code == 5 && said.contains("c1"), "{code} {said}");
    let (code, said) = pool.fails(&["client", "bind", "c1", "--volume", "none"]);
    assert!(code == 4 && said.contains("no such volume"), "{code} {said}");

    pool.serve();
    pool.ok(&["client", "add", "c2"]);
    pool.ok(&["volume", "create", "v", "--size", "1MiB"]);
    pool.ok(&["client", "bind", "c2", "--volume", "v", "--over", "nbd"]);
    pool.ok(&["client", "unbind", "c1"]);
    let shown = pool.ok(&["client", "list"]);
    assert_eq!(
        (&shown[0]["chap_user"], &shown[0]["mac"]),
        (&"c1".into(), &"52:54:00:00:00:01".into())
    );
    assert_eq!((&shown[0]["binding"], &shown[1]["binding"]["over"]), (&Value::Null, &"nbd".into()));
    assert!(!shown.to_string().contains("correct-horse"), "{shown}");
    pool.ok(&["client", "remove", "c1"]);
    assert_eq!(pool.fails(&["client", "remove", "c1"]).0, 4);
}

/// A daemon that was started by a shell with the usual umask.
struct Daemon(Child);

impl Daemon {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "umask 022; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_perigee")]);
        command.args(args).env("PERIGEE_LOG", "warn").env("PERIGEE_ACCELERATOR", "tcg");
        Self(command.stdin(Stdio::null()).spawn().expect("a daemon"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.kill().expect("a kill");
        self.0.wait().expect("its end");
    }
}

/// A daemon, and all that it says.
struct Heard {
    daemon: Child,
    log: PathBuf,
}

impl Heard {
    fn start(dir: &Path, args: &[&str]) -> Self {
        let log = dir.join("log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
        command.args(args).env("PERIGEE_LOG", "warn").env("PERIGEE_ACCELERATOR", "tcg");
        command.stdin(Stdio::null()).stderr(std::fs::File::create(&log).expect("a log"));
        Self { daemon: command.spawn().expect("a daemon"), log }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).expect("its log")
    }

    /// Waits for its end, and returns whether it was successful.
    fn ends(&mut self) -> bool {
        let mut status = None;
        until("the daemon to end", || {
            status = self.daemon.try_wait().expect("its state");
            status.is_some()
        });
        status.is_some_and(|status| status.success())
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Whether somebody answers plain HTTP there. A server that wants TLS hangs up, or sends an alert of TLS.
fn answers_plainly(address: &str) -> bool {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("a deadline");
    let request = format!("GET /v1/host HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    let mut answer = Vec::new();
    let _ = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_end(&mut answer));
    answer.starts_with(b"HTTP/")
}

#[test]
fn each_daemon_is_plain_on_tcp_only_with_insecure_and_says_so_at_each_start() {
    const EVERYTHING: &str = "--insecure: nothing is encrypted";
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).expect("a mode");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let tcp = || format!("127.0.0.1:{}", perigee_http::unused_port());
    let (none, state, pool) = (path("no-identity"), path("state"), path("pool"));
    let agent_state = path("agent");
    let [controller, agent, control, nbd, iscsi] = std::array::from_fn(|_| tcp());
    let control_socket = format!("unix:{}/control.sock", path("pool"));
    let with_identity = ["--identity", &none];
    let as_controller = ["controller", "run", "--state", &state, "--listen", &controller];
    let as_agent = [
        &[
            "agent",
            "run",
            "--host",
            "a",
            "--site",
            "s",
            "--listen",
            &agent,
            "--state",
            &agent_state,
        ][..],
        &["--volume-url", "http://127.0.0.1:1", "--nbd-addr", "127.0.0.1:1"],
        &["--volume-control", &control_socket, "--probe-kernel", "/dev/null"],
    ]
    .concat();
    let as_volume = ["volume", "serve", "--pool", &pool];
    let nbd_socket = format!("unix:{}", path("nbd.sock"));
    let over_control = [&as_volume[..], &["--control", &control, "--nbd", &nbd_socket]].concat();
    let over_nbd = [&as_volume[..], &["--nbd", &nbd]].concat();
    let over_iscsi = [&as_volume[..], &["--iscsi", &iscsi]].concat();

    // Without certificates and without a word nothing plain is served.
    for daemon in [&as_agent, &over_control, &over_nbd] {
        let mut heard = Heard::start(dir.path(), &[&daemon[..], &with_identity].concat());
        assert!(!heard.ends(), "{daemon:?}");
        assert!(
            heard.said().contains("or, on a network that you trust: --insecure"),
            "{}",
            heard.said()
        );
    }
    let mut heard = Heard::start(dir.path(), &over_iscsi);
    assert!(!heard.ends() && heard.said().contains("iSCSI is not encrypted"), "{}", heard.said());
    let listens = |address: &str| std::net::TcpStream::connect(address).is_ok();
    {
        // The controller makes its certificates itself.
        let heard = Heard::start(dir.path(), &as_controller);
        until("the controller", || listens(&controller));
        assert!(!answers_plainly(&controller), "it wants TLS");
        assert!(!heard.said().contains("--insecure"), "{}", heard.said());
    }
    // At each start: also at the second one.
    for start in 1..=2 {
        for (daemon, address) in
            [(&as_controller[..], &controller), (&as_agent, &agent), (&over_control, &control)]
        {
            let heard = Heard::start(dir.path(), &[daemon, &["--insecure"]].concat());
            until("the daemon", || listens(address));
            assert!(answers_plainly(address), "{daemon:?}");
            assert!(heard.said().contains(EVERYTHING), "start {start}: {}", heard.said());
        }
        // A second warning names what can't be encrypted at all.
        let heard = Heard::start(dir.path(), &[&over_iscsi[..], &["--insecure"]].concat());
        until("the target", || listens(&iscsi));
        let said = heard.said();
        let both = said.contains(EVERYTHING) && said.contains("--insecure: iSCSI is not encrypted");
        assert!(both, "start {start}: {said}");
    }
}

/// A `qemu-img` that an image has taken over. It says what it has, and then does what it may not.
const TAKEN_OVER: &str = r#"#!/bin/sh
if [ "$1" = info ]; then
    echo '{"format": "vmdk", "virtual-size": 1048576}'
    exit 0
fi
if [ "$1" = map ]; then
    echo '[{"start": 0, "length": 65536, "depth": 0, "zero": false, "data": true, "offset": 0}]'
    exit 0
fi
{
    echo "user $(id -u) group $(id -g) groups $(id -G)"
    echo "networks $(grep -c : /proc/net/dev) $(grep -o 'lo:' /proc/net/dev)"
    echo "memory $(ulimit -v) cpu $(ulimit -t) file $(ulimit -f) core $(ulimit -c) files $(ulimit -n)"
    echo "$(grep 'Max processes' /proc/self/limits | tr -s ' ')"
    echo "privileges $(grep NoNewPrivs /proc/self/status | tr -d '[:space:]')"
    echo "capabilities $(grep CapEff /proc/self/status | tr -d '[:space:]')"
    echo "environment $(env | grep -c SECRET)"
    cat "POOL/catalog.sqlite" > /dev/null 2>&1 && echo "it reads the catalog"
    cat "POOL/../secret" > /dev/null 2>&1 && echo "it reads a file of root"
} >&2
# Its output ends where the image does.
head -c 4194304 /dev/zero && echo "it wrote 4 MiB" >&2
exit 1
"#;

#[test]
fn a_qemu_img_that_was_taken_over_reaches_nothing_but_its_output() {
    if std::fs::metadata("/proc/self").expect("this process").uid() != 0 {
        return;
    }
    let pool = Pool::new("confined");
    std::fs::write(pool.dir.join("secret"), "secret").expect("a file");
    set_mode(&pool.dir.join("secret"), 0o600);
    let output = pool.import_with(&TAKEN_OVER.replace("POOL", pool.pool().to_str().expect("text")));
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(!output.status.success(), "{said}");
    for part in [
        "memory 4194304 cpu 60 file 2048 core 0 files 64",
        "Max processes 128 128",
        // Loopback only.
        "networks 1 lo:",
        "privileges NoNewPrivs:1",
        "capabilities CapEff:0000000000000000",
        "environment 0",
    ] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    // Its own user and group, and none besides.
    let ids = said.split("user ").nth(1).expect("its user");
    let ids: Vec<&str> = ids.split_whitespace().take(5).collect();
    assert_eq!((ids[0], ids[1], ids[2], ids[3]), (ids[0], "group", ids[0], "groups"), "{said}");
    assert_eq!(ids[4], ids[0], "{said}");
    let uid: u32 = ids[0].parse().expect("a number");
    assert!((1_920_000_000..1_936_777_216).contains(&uid), "{uid}");
    for bad in ["it reads", "it wrote 4 MiB"] {
        assert!(!said.contains(bad), "{said}");
    }
    assert_eq!(pool.fails(&["image", "info", "gold"]).0, 4, "nothing of it stays");
}

#[test]
fn a_qemu_img_that_says_too_much_is_stopped() {
    let pool = Pool::new("loud");
    for to in ["1", "2"] {
        // It would go on for an hour.
        let script = format!("#!/bin/sh\nhead -c 2097152 /dev/zero >&{to}\nexec sleep 3600\n");
        let output = pool.import_with(&script);
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains("qemu-img said more than 1048576 bytes"), "{said}");
    }
}

#[test]
fn nothing_that_the_daemons_make_is_open_to_other_users() {
    if std::fs::metadata("/proc/self").expect("this process").uid() != 0 {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).expect("a mode");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let unix = |name: &str| format!("unix:{}", path(name));
    let agent = format!("127.0.0.1:{}", perigee_http::unused_port());
    std::fs::write(dir.path().join("gold.raw"), vec![1; 1 << 20]).expect("a file");
    std::fs::set_permissions(path("gold.raw"), PermissionsExt::from_mode(0o600)).expect("a mode");
    // Somebody has made it with the usual mode.
    std::fs::create_dir(dir.path().join("state")).expect("a directory");
    let _controller = Daemon::start(
        &[
            &["controller", "run", "--state", &path("state")][..],
            &["--listen", &unix("controller.sock")],
        ]
        .concat(),
    );
    let _volume = Daemon::start(
        &[
            &["volume", "serve", "--pool", &path("pool"), "--nbd", &unix("nbd.sock")][..],
            &["--vm-sockets", &path("vms")],
        ]
        .concat(),
    );
    let answers = |name: &str| std::os::unix::net::UnixStream::connect(path(name)).is_ok();
    until("the controller and the volume server", || {
        answers("controller.sock") && answers("pool/control.sock") && answers("nbd.sock")
    });
    let _agent = Daemon::start(
        &[
            &["agent", "run", "--host", "a", "--site", "s", "--listen", &agent][..],
            &["--state", &path("agent"), "--volume-control", &unix("pool/control.sock")],
            &["--volume-url", "http://127.0.0.1:1", "--nbd-addr", "127.0.0.1:1", "--insecure"],
        ]
        .concat(),
    );
    until("the agent", || std::net::TcpStream::connect(&agent).is_ok());
    let make = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
        let made = command.args(args).args(["--pool", &path("pool")]).output().expect("a command");
        assert!(made.status.success(), "{args:?}: {made:?}");
    };
    make(&["image", "import", "gold", &path("gold.raw")]);
    make(&["volume", "create", "data", "--image", "gold"]);
    let uri = format!("nbd+unix:///data?socket={}", path("nbd.sock"));
    let wrote = Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 4k", &uri]).status();
    assert!(wrote.expect("qemu-io").success());
    // QEMU's users pass through these, and dnsmasq's group through the last.
    let passed =
        ["", "agent", "agent/vms", "vms", "agent/networks"].map(|name| dir.path().join(name));
    let open = walk::open_to_others(dir.path(), |found| passed.iter().any(|may| may == found));
    assert!(open.is_empty(), "{open:#?}");
}
