//! Users who log in with a token, through the command line, at a controller without hosts.

use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(120);

struct Controller {
    dir: tempfile::TempDir,
    port: u16,
    process: Child,
}

impl Drop for Controller {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn perigee(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.arg(DEADLINE.as_secs().to_string()).arg(env!("CARGO_BIN_EXE_perigee"));
    command.args(["--format", "json"]).args(args).stdin(Stdio::null());
    command.env("HOME", home).env("PERIGEE_LOG", "warn");
    command.env_remove("XDG_CONFIG_HOME").env_remove("PERIGEE_API");
    command
}

fn told(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&all).into_owned()
}

fn ok(mut command: Command) -> String {
    let output = command.output().expect("perigee runs");
    assert!(output.status.success(), "{command:?}: {}", told(&output));
    String::from_utf8(output.stdout).expect("text")
}

impl Controller {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let port = perigee_http::unused_port();
        let (state, socket) = (dir.path().join("state"), dir.path().join("socket"));
        let unix = format!("unix:{}", socket.display());
        let tcp = format!("127.0.0.1:{port}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
        command.args(["controller", "run", "--listen", &unix, "--listen", &tcp, "--state"]);
        let process = command.arg(state).stdin(Stdio::null()).spawn().expect("it starts");
        let begun = Instant::now();
        while std::net::TcpStream::connect(&tcp).is_err() || !socket.exists() {
            assert!(begun.elapsed() < DEADLINE, "the controller does not listen");
            std::thread::sleep(Duration::from_millis(50));
        }
        Self { dir, port, process }
    }

    fn admin(&self, args: &[&str]) -> String {
        let mut command = perigee(self.dir.path(), args);
        command.env("PERIGEE_API", format!("unix:{}", self.dir.path().join("socket").display()));
        ok(command)
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    fn login(&self, home: &Path, fingerprint: &str, token: &str) -> Output {
        let mut command = perigee(home, &["login", &self.url(), "--fingerprint", fingerprint]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("perigee runs");
        let mut stdin = process.stdin.take().expect("a pipe");
        stdin.write_all(token.as_bytes()).expect("it reads");
        drop(stdin);
        process.wait_with_output().expect("it ends")
    }
}

#[test]
fn a_user_logs_in_with_a_token_and_is_known_until_it_logs_out() {
    let controller = Controller::start();
    let state = controller.dir.path().join("state");
    let fingerprint = controller.admin(&["controller", "init", "--state", state.to_str().unwrap()]);
    let fingerprint = fingerprint.trim();
    controller.admin(&["tenant", "create", "acme", "--vms", "2"]);
    controller.admin(&["user", "add", "acme/ann", "--role", "member"]);
    let mut create = perigee(controller.dir.path(), &["token", "create", "--user", "acme/ann"]);
    let socket = format!("unix:{}", controller.dir.path().join("socket").display());
    let created = create.env("PERIGEE_API", socket).output().expect("perigee runs");
    let how = format!("perigee login https://HOST:PORT --fingerprint {fingerprint}");
    assert!(told(&created).contains(&how), "{}", told(&created));
    let token = String::from_utf8(created.stdout).expect("a word");
    let home = tempfile::tempdir().expect("a home");
    let wrong = controller.login(home.path(), &"0".repeat(64), &token);
    assert!(!wrong.status.success(), "it is another controller's fingerprint");
    let wrong = controller.login(home.path(), fingerprint, "perigee_0_0");
    assert_eq!(wrong.status.code(), Some(9), "{}", told(&wrong));
    let file = home.path().join(".config/perigee/login.json");
    assert!(!file.exists(), "what does not count is not kept");
    let logged_in = controller.login(home.path(), fingerprint, &token);
    assert!(logged_in.status.success(), "{}", told(&logged_in));
    assert_eq!(std::fs::metadata(&file).expect("it is kept").mode() & 0o777, 0o600);
    let me: Value = serde_json::from_str(&ok(perigee(home.path(), &["whoami"]))).expect("JSON");
    assert_eq!(me, serde_json::json!({"tenant": "acme", "user": "ann", "role": "member"}));
    let jobs = ok(perigee(home.path(), &["job", "list"]));
    assert_eq!(jobs.trim(), "[]");
    let refused = perigee(home.path(), &["host", "list"]).output().expect("perigee runs");
    assert_eq!(refused.status.code(), Some(9), "{}", told(&refused));
    // Its own token is its own to revoke.
    let tokens = ok(perigee(home.path(), &["token", "list"]));
    let tokens: Value = serde_json::from_str(&tokens).expect("JSON");
    let id = tokens[0]["id"].as_str().expect("an id");
    ok(perigee(home.path(), &["token", "revoke", id]));
    let gone = perigee(home.path(), &["whoami"]).output().expect("perigee runs");
    assert_eq!(gone.status.code(), Some(9), "{}", told(&gone));
    ok(perigee(home.path(), &["logout"]));
    assert!(!file.exists());
    let log = controller.admin(&["audit"]);
    assert!(log.contains("POST /v1/tenants/acme/users/ann/tokens"), "{log}");
    assert!(!log.contains(token.trim()), "no secret is in the log");
}

/// A process that ends with the test.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The FTPS gateway speaks TLS with the controller, which it knows by the fingerprint, and has no rights but the user's.
#[test]
fn the_ftps_gateway_has_a_user_s_rights_until_the_token_is_revoked() {
    let controller = Controller::start();
    let home = tempfile::tempdir().expect("a home");
    let at = |name: &str| home.path().join(name).to_str().expect("UTF-8").to_owned();
    let state = controller.dir.path().join("state");
    let fingerprint = controller.admin(&["controller", "init", "--state", state.to_str().unwrap()]);
    controller.admin(&["tenant", "create", "acme"]);
    controller.admin(&["user", "add", "acme/ann", "--role", "member"]);
    let token = controller.admin(&["token", "create", "--user", "acme/ann"]);
    let (certificate, key) = (at("ftps.pem"), at("ftps.key"));
    let mut make = Command::new("openssl");
    make.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]);
    make.args(["-days", "2", "-subj", "/CN=files", "-addext", "subjectAltName=IP:127.0.0.1"]);
    make.args(["-keyout", &key, "-out", &certificate]);
    ok(make);
    let listen = format!("127.0.0.1:{}", perigee_http::unused_port());
    let gateway = |fingerprint: &str| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../gateways/ftps/perigee-ftps");
        let mut command = Command::new(path);
        command.args(["--api", &controller.url(), "--fingerprint", fingerprint]);
        command.args(["--listen", &listen, "--cert", &certificate, "--key", &key]);
        command
    };
    let other = gateway(&"0".repeat(64)).output().expect("python3; `make setup` installs it");
    assert!(told(&other).contains("its authority has another fingerprint"), "{}", told(&other));
    let process = gateway(fingerprint.trim()).stdin(Stdio::null()).spawn().expect("it starts");
    let _gateway = Ending(process);
    let begun = Instant::now();
    while std::net::TcpStream::connect(&listen).is_err() {
        assert!(begun.elapsed() < DEADLINE, "the gateway does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::fs::write(at("sent"), "over both").expect("a file");
    let user = format!("ann:{}", token.trim());
    let curl = |arguments: &[&str], path: &str| {
        let mut command = Command::new("curl");
        command.args(["-sS", "--ssl-reqd", "--cacert", &certificate, "-u", &user]);
        command.args(arguments).arg(format!("ftp://{listen}/{path}"));
        command
    };
    ok(curl(&["-T", &at("sent")], "f"));
    assert_eq!(ok(curl(&[], "f")), "over both");
    assert_eq!(ok(curl(&["-l"], "/")), "acme\n");
    let id = token.trim().split('_').nth(1).expect("the token's id").to_owned();
    controller.admin(&["token", "revoke", &id, "--user", "acme/ann"]);
    let refused = curl(&[], "f").output().expect("curl runs");
    assert_eq!(refused.status.code(), Some(67), "curl: the login was denied");
}
