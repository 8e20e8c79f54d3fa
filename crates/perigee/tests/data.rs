//! `perigee data` with a controller of its own: sends, fetches, shares, and goes on after a kill of the controller.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(300);

/// A controller and its directory; both go with it.
struct Cluster {
    dir: PathBuf,
    controller: Child,
}

fn start(dir: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
    command.args(["controller", "run", "--state"]).arg(dir.join("state"));
    command.arg("--listen").arg(format!("unix:{}", dir.join("api.sock").display()));
    command.env("PERIGEE_LOG", "warn").stdin(Stdio::null());
    let controller = command.spawn().expect("a controller");
    let until = Instant::now() + DEADLINE;
    while std::os::unix::net::UnixStream::connect(dir.join("api.sock")).is_err() {
        assert!(Instant::now() < until, "the controller does not answer");
        std::thread::sleep(Duration::from_millis(50));
    }
    controller
}

impl Cluster {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("perigee-data-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let controller = start(&dir);
        Self { dir, controller }
    }

    /// SIGKILL: nothing is tidied up.
    fn kill(&mut self) {
        self.controller.kill().expect("a kill");
        self.controller.wait().expect("its end");
    }

    fn data(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.arg(DEADLINE.as_secs().to_string()).arg(env!("CARGO_BIN_EXE_perigee"));
        command.args(["--format", "json", "data"]).args(arguments);
        command.env("PERIGEE_API", format!("unix:{}", self.dir.join("api.sock").display()));
        command.current_dir(&self.dir).stdin(Stdio::null());
        command.output().expect("coreutils' timeout")
    }

    fn ok(&self, arguments: &[&str]) -> Value {
        let output = self.data(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    fn fails(&self, arguments: &[&str]) -> Option<i32> {
        self.data(arguments).status.code()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.kill();
        fs::remove_dir_all(&self.dir).expect("tidy up");
    }
}

/// Bytes that do not repeat soon.
fn content(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    let mut bytes: Vec<u8> = words.take(length / 8 + 1).flatten().collect();
    bytes.truncate(length);
    bytes
}

#[test]
fn files_and_directories_go_there_and_come_back() {
    let cluster = Cluster::new("round");
    // Larger than one part, so it is sent and fetched in several at the same time.
    let large = content(40 << 20);
    fs::create_dir_all(cluster.dir.join("in/sub")).expect("a directory");
    fs::write(cluster.dir.join("in/large"), &large).expect("a file");
    fs::write(cluster.dir.join("in/sub/small ü"), "small").expect("a file");
    fs::write(cluster.dir.join("in/empty"), "").expect("a file");
    cluster.ok(&["put", "in", "repo://default/set"]);
    let list = cluster.ok(&["list", "set"]);
    let names: Vec<_> =
        list.as_array().expect("rows").iter().map(|row| row["name"].clone()).collect();
    assert_eq!(names, ["empty", "large", "sub"]);
    cluster.ok(&["get", "set", "out"]);
    assert_eq!(fs::read(cluster.dir.join("out/large")).expect("it came"), large);
    assert_eq!(fs::read(cluster.dir.join("out/sub/small ü")).expect("it came"), b"small");
    assert_eq!(fs::read(cluster.dir.join("out/empty")).expect("it came"), b"");
    assert_eq!(
        fs::read_dir(cluster.dir.join("out")).expect("a directory").count(),
        3,
        "no parts are left"
    );
    let stored = cluster.dir.join("state/data/tenants/default/tree/set/large");
    assert_eq!(fs::metadata(stored).expect("a file").permissions().mode() & 0o777, 0o600);
    let fifo = cluster.dir.join("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().expect("coreutils' mkfifo");
    assert!(made.success());
    // It would be an empty file, and replace the good one.
    assert_eq!(cluster.fails(&["put", "fifo", "repo://default/set/large"]), Some(3));
    // Whoever reads from it would get nothing, and it would be a file from then on.
    assert_eq!(cluster.fails(&["get", "set/empty", "fifo"]), Some(3));
    assert!(!fs::metadata(&fifo).expect("it is there").is_file());
    fs::remove_dir_all(cluster.dir.join("out")).expect("a directory");
    fs::create_dir(cluster.dir.join("out")).expect("a directory");
    cluster.ok(&["get", "set/large", "out"]);
    assert_eq!(fs::read(cluster.dir.join("out/large")).expect("it came"), large);
    cluster.ok(&["share", "set", "--with", "physics"]);
    let shares = cluster.ok(&["share", "set"]);
    assert_eq!(shares[0]["with"], "physics");
    cluster.ok(&["share", "set", "--with", "physics", "--stop"]);
    assert_eq!(cluster.fails(&["delete", "set"]), Some(5), "it is not empty");
    cluster.ok(&["delete", "set", "--recursive"]);
    assert_eq!(cluster.fails(&["get", "set/large"]), Some(4));
}

#[test]
fn what_was_acknowledged_is_there_after_a_kill_and_a_cut_transfer_goes_on() {
    let mut cluster = Cluster::new("kill");
    let sent = content(100 << 20);
    fs::write(cluster.dir.join("large"), &sent).expect("a file");
    fs::write(cluster.dir.join("small"), "kept").expect("a file");
    cluster.ok(&["put", "small", "small"]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
    command.args(["data", "put", "large", "large"]).current_dir(&cluster.dir);
    command.env("PERIGEE_API", format!("unix:{}", cluster.dir.join("api.sock").display()));
    let mut put = command.stdin(Stdio::null()).spawn().expect("a command");
    let parts = cluster.dir.join("state/data/tenants/default/parts");
    let begun = || fs::read_dir(&parts).is_ok_and(|parts| parts.count() > 0);
    let until = Instant::now() + DEADLINE;
    while !begun() && put.try_wait().expect("its state").is_none() {
        assert!(Instant::now() < until, "the transfer does not begin");
    }
    cluster.kill();
    assert!(!cluster.dir.join("state/data/tenants/default/tree/large").exists() || !begun());
    cluster.controller = start(&cluster.dir);
    assert!(put.wait().expect("its end").success(), "it goes on by itself");
    for (name, content) in [("large", &sent[..]), ("small", b"kept")] {
        cluster.ok(&["get", name, "got"]);
        assert!(fs::read(cluster.dir.join("got")).expect("it came") == content, "{name}");
    }
    // A fetch that was cut: the beginning is there already.
    let sha256 = cluster.ok(&["list", "large"])[0]["sha256"].as_str().expect("a hash").to_owned();
    let part = cluster.dir.join(format!("again.part-{}", &sha256[..12]));
    fs::write(&part, &sent[..30 << 20]).expect("a part");
    cluster.ok(&["get", "large", "again"]);
    assert!(fs::read(cluster.dir.join("again")).expect("it came") == sent);
    assert!(!part.exists());
}
