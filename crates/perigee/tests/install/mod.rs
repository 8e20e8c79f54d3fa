//! From a bare machine to a cluster, as `docs/cluster.md` says: the files that `controller init` and `host join` make are all that the daemons are told.
//! The machine is a mount namespace and a network namespace, without systemd.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde_json::Value;
use tempfile::TempDir;

use super::{DEADLINE, Daemon, until};

/// What is written below `/etc`, `/run` and `/var/lib` is in memory, and goes with the namespace.
const MOUNTS: &str = r#"
set -eu
mount -t tmpfs -o size=64g perigee-test "$1"
cd "$1"
for dir in etc run var/lib; do
  mkdir -p "upper/$dir" "work/$dir"
  mount -t overlay -o "lowerdir=/$dir,upperdir=upper/$dir,workdir=work/$dir" perigee-test "/$dir"
done
rm -rf /run/systemd/system /run/perigee /etc/perigee /var/lib/perigee
ip link set lo up
ip address add 10.99.0.1/32 dev lo
ip address add 10.99.0.2/32 dev lo
echo ready
exec sleep 3600 >/dev/null
"#;

struct Machine {
    /// It holds the namespaces.
    holder: Child,
    _dir: TempDir,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--net", "--propagation", "private", "--", "/bin/sh", "-c"]);
        command.args([MOUNTS, "mounts"]).arg(dir.path()).stdin(Stdio::null());
        let mut holder = command.stdout(Stdio::piped()).spawn().expect("util-linux' unshare");
        let mut said = String::new();
        let output = holder.stdout.take().expect("it has one");
        BufReader::new(output).read_line(&mut said).expect("its first line");
        assert_eq!(said, "ready\n");
        Self { holder, _dir: dir }
    }

    /// A command inside.
    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        let pid = self.holder.id().to_string();
        command.args(["--target", &pid, "--mount", "--net", "--", program]).args(args);
        command.env("PERIGEE_LOG", "warn").env("PERIGEE_ACCELERATOR", "tcg");
        command.env_remove("PERIGEE_API").env("HOME", "/var/lib");
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        let deadline = DEADLINE.as_secs().to_string();
        let words = [&[&deadline, env!("CARGO_BIN_EXE_perigee")][..], args].concat();
        self.command("timeout", &words).stdin(Stdio::null()).output().expect("coreutils' timeout")
    }

    /// What a command that succeeds prints.
    fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).expect("a text")
    }

    /// As the unit starts it: with no flags.
    fn daemon(&self, words: [&str; 2]) -> Daemon {
        let mut command = self.command(env!("CARGO_BIN_EXE_perigee"), &words);
        Daemon(command.stdin(Stdio::null()).spawn().expect("a daemon"))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.holder.kill().expect("a kill");
        self.holder.wait().expect("its end");
    }
}

/// The token in the line that is printed for the first host.
fn token(said: &str) -> String {
    let line = said.lines().find_map(|line| line.trim().strip_prefix("perigee host join "));
    line.unwrap_or_else(|| panic!("no line for the first host: {said}")).to_owned()
}

#[test]
fn a_machine_becomes_a_cluster_by_one_command_for_the_controller_and_one_for_the_host() {
    let machine = Machine::new();
    let init = ["controller", "init", "--listen", "10.99.0.1"];
    let said = machine.ok(&init);
    assert!(said.contains("\n    perigee controller run\n"), "{said}");
    let made = machine.command("install", &["-d", "-m", "0755", "/run/perigee"]).status();
    assert!(made.expect("coreutils' install").success());
    let _controller = machine.daemon(["controller", "run"]);
    let mut said = String::new();
    until("the controller", || {
        said = machine.ok(&init);
        said.contains("perigee host join ")
    });
    let token = token(&said);
    assert!(token.starts_with("host1,") && token.ends_with(",https://10.99.0.1:7000"), "{token}");
    let other = machine.run(&["controller", "init", "--listen", "10.99.0.9"]);
    let refused = String::from_utf8_lossy(&other.stderr).into_owned();
    assert_eq!(other.status.code(), Some(5), "{refused}");
    assert!(
        refused.contains("`listen` says unix:/run/perigee/controller.sock, 10.99.0.1:7000"),
        "{refused}"
    );

    let join = ["host", "join", &token, "--address", "10.99.0.2"];
    let said = machine.ok(&join);
    assert!(said.contains("\n    perigee volume serve &\n    perigee agent run &\n"), "{said}");
    let _daemons = (machine.daemon(["volume", "serve"]), machine.daemon(["agent", "run"]));
    until("the host", || {
        let hosts: Value =
            serde_json::from_str(&machine.ok(&["-f", "json", "host", "list"])).expect("JSON");
        (&hosts[0]["state"], &hosts[0]["addresses"]["site"]) == (&"up".into(), &"home".into())
            && hosts[0]["waits"] == Value::Array(vec![])
    });
    // The token was used, and the host has its certificate.
    assert!(machine.ok(&join).contains("host host1 has joined before"));
    let said = machine.ok(&["host", "doctor"]);
    assert!(said.contains("good     cluster: host host1 is up at site home\n"), "{said}");
    assert_eq!(machine.ok(&["config", "check"]).matches(": sound\n").count(), 3);
}

/// A controller whose unit has `Type=notify` and a watchdog.
struct Notifying {
    dir: TempDir,
    heard: UnixDatagram,
    controller: Child,
}

impl Notifying {
    /// With the settings in a directory.
    fn start(dir: TempDir) -> Self {
        let heard = UnixDatagram::bind(dir.path().join("notify")).expect("a socket");
        heard.set_read_timeout(Some(DEADLINE)).expect("a deadline");
        let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
        command.args(["controller", "run", "--config"]).arg(dir.path().join("controller.yaml"));
        command.env("NOTIFY_SOCKET", dir.path().join("notify")).env("WATCHDOG_USEC", "200000");
        command.env_remove("PERIGEE_LOG").env_remove("WATCHDOG_PID").stdin(Stdio::null());
        command.stderr(std::fs::File::create(dir.path().join("log")).expect("a log"));
        let controller = command.spawn().expect("a controller");
        Self { dir, heard, controller }
    }

    fn message(&self) -> std::io::Result<String> {
        let mut bytes = [0; 512];
        let length = self.heard.recv(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }

    /// Waits for a message that begins like this, and returns the rest of it.
    fn says(&self, begin: &str) -> String {
        loop {
            let message = self.message().unwrap_or_else(|e| panic!("{begin}: {e}"));
            if let Some(rest) = message.strip_prefix(begin) {
                return rest.to_owned();
            }
        }
    }

    /// What it has said since the last look.
    fn said(&self) -> Vec<String> {
        self.heard.set_nonblocking(true).expect("a socket");
        let said = std::iter::from_fn(|| self.message().ok()).collect();
        self.heard.set_nonblocking(false).expect("a socket");
        said
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).expect("its log")
    }

    fn signal(&self, name: &str) {
        let pid = self.controller.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().expect("kill").success());
    }

    /// Has it read its file again.
    fn reload(&self) -> String {
        let before = monotonic_us();
        self.signal("-HUP");
        let at_us = self.says("RELOADING=1\nMONOTONIC_USEC=");
        let at_us: u128 = at_us.parse().expect("a time");
        // With another clock systemd would take the message for one of an earlier reload, and wait on.
        assert!((before..=monotonic_us()).contains(&at_us), "{at_us}");
        self.says("READY=1");
        self.log()
    }
}

impl Drop for Notifying {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.controller.kill();
        let _ = self.controller.wait();
    }
}

fn monotonic_us() -> u128 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
    now.expect("a clock").as_micros()
}

fn write(dir: &Path, more: &str) {
    write_all(dir, &format!("unix:{}/api.sock", dir.display()), more);
}

fn write_all(dir: &Path, listen: &str, more: &str) {
    let text = format!("listen: {listen}\nstate: {}/state\n{more}", dir.display());
    let mut file = std::fs::File::create(dir.join("controller.yaml")).expect("a file");
    file.write_all(text.as_bytes()).expect("it is written");
}

#[test]
fn a_controller_tells_systemd_that_it_answers_lives_reads_its_file_again_and_stops() {
    let dir = tempfile::tempdir().expect("a directory");
    write(dir.path(), "keep-outputs: 7d\n");
    let mut notifying = Notifying::start(dir);
    notifying.says("READY=1");
    let dir = notifying.dir.path().to_owned();
    UnixStream::connect(dir.join("api.sock")).expect("it answers");
    notifying.says("WATCHDOG=1");
    assert!(notifying.reload().contains("nothing has changed"));
    write(&dir, "keep-outputs: for ever\n");
    let log = notifying.reload();
    assert!(
        log.contains("the settings stay as they were") && log.contains("controller.yaml:3"),
        "{log}"
    );
    write(&dir, "keep-outputs: 7d\n");
    assert_eq!(notifying.reload().matches("nothing has changed").count(), 2, "the old ones count");
    write(&dir, "keep-outputs: 1d\nsite: home\n");
    let log = notifying.reload();
    assert!(log.contains("keep-outputs counts from now on"), "{log}");
    assert!(
        log.contains("site in") && log.contains("systemctl restart perigee-controller"),
        "{log}"
    );
    UnixStream::connect(dir.join("api.sock")).expect("it goes on");
    notifying.signal("-TERM");
    notifying.says("STOPPING=1");
    assert!(notifying.controller.wait().expect("its end").success());
}

/// systemd would take the end of reading for the end of the start, and start what comes after the controller.
#[test]
fn a_controller_that_reads_its_file_again_before_it_answers_does_not_say_that_it_answers() {
    // An S3 store that answers nothing: the controller waits for it before it answers itself.
    let store = TcpListener::bind("127.0.0.1:0").expect("a port");
    let keys = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&keys, "[default]\naws_access_key_id=key\naws_secret_access_key=key\n")
        .expect("it is written");
    let dir = tempfile::tempdir().expect("a directory");
    let more = format!(
        "data: s3://files\ndata-endpoint: http://{}\ndata-credentials: {}\n",
        store.local_addr().expect("an address"),
        keys.path().display()
    );
    write(dir.path(), &more);
    let notifying = Notifying::start(dir);
    // It looks out for signals before this.
    notifying.says("WATCHDOG=1");
    notifying.signal("-HUP");
    until("it has read its file again", || notifying.log().contains("nothing has changed"));
    let mut said = notifying.said();
    said.push(notifying.message().expect("a sign of life"));
    // It waits for some seconds only.
    let waits_no_more = notifying.log().contains("the S3 store does not answer");
    let lives = |message: &String| message == "WATCHDOG=1";
    assert!(waits_no_more || said.iter().all(lives), "{said:?}");
}

/// A certificate that signs itself, and its key.
fn make_certificate(dir: &Path) {
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]);
    openssl.args(["-nodes", "-days", "2", "-subj", "/CN=pages", "-keyout", "pages.key"]);
    openssl.args(["-addext", "subjectAltName=DNS:pages.example", "-out", "pages.pem"]);
    let made = openssl.current_dir(dir).output().expect("openssl");
    assert!(made.status.success(), "{made:?}");
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(dir.join("pages.key"), private).expect("a mode");
}

#[test]
fn browsers_get_the_operator_s_certificate_and_a_reload_reads_it_again() {
    let dir = tempfile::tempdir().expect("a directory");
    make_certificate(dir.path());
    let port = perigee_http::unused_port();
    let shown = dir.path().display();
    let more = format!("web-cert: {shown}/pages.pem\nweb-key: {shown}/pages.key\n");
    write_all(dir.path(), &format!("127.0.0.1:{port}"), &more);
    let notifying = Notifying::start(dir);
    notifying.says("READY=1");
    let dir = notifying.dir.path().to_owned();
    let ask = |trusted: &str| {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--noproxy", "*", "--cacert", trusted, "--resolve"]);
        curl.arg(format!("pages.example:{port}:127.0.0.1"));
        curl.arg(format!("https://pages.example:{port}/login")).current_dir(&dir);
        let said = curl.output().expect("curl");
        String::from_utf8_lossy(&said.stdout).contains("Log in").then_some(()).ok_or(said)
    };
    ask("pages.pem").expect("it is shown");
    ask("state/authority/ca.pem").expect_err("the cluster's is not");
    std::fs::rename(dir.join("pages.pem"), dir.join("former.pem")).expect("renamed");
    make_certificate(&dir);
    notifying.reload();
    ask("pages.pem").expect("the new one is shown");
    ask("former.pem").expect_err("the former one is not");
    std::fs::write(dir.join("pages.key"), "no key").expect("written");
    let log = notifying.reload();
    assert!(log.contains("there is no private key in it"), "{log}");
    ask("pages.pem").expect("the last good one is shown");
}
