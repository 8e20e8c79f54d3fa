//! A cluster of several machines, made as `docs/cluster.md` says: here on one machine, each host with an address of loopback.

mod backup;
mod python;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, SystemTime};

use perigee_http::authority::NewKey;
use perigee_http::certificate::now_ms;
use perigee_http::identity::Strangers;
use perigee_http::{Authority, Certified, Expected, Identity, Network, PeerIdentity, unused_port};
use perigee_model::{HostId, Problem, ProblemKind};
use serde_json::Value;
use tempfile::TempDir;

use super::{DEADLINE, Daemon, until};

/// A controller, and commands that ask it over its unix socket.
struct Cluster {
    dir: TempDir,
    /// Where hosts and operators reach it.
    url: String,
    api: String,
    _controller: Daemon,
}

/// The addresses of a host's daemons.
struct Host<'a> {
    cluster: &'a Cluster,
    name: &'static str,
    agent: String,
    control: String,
}

/// A directory that QEMU's users can pass through.
fn directory() -> TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).expect("a mode");
    dir
}

fn host_id(name: &str) -> HostId {
    name.parse().expect("a name")
}

impl Cluster {
    fn up() -> Self {
        Self::up_in(directory())
    }

    fn up_in(dir: TempDir) -> Self {
        let socket = dir.path().join("controller.sock");
        let api = format!("unix:{}", socket.display());
        let address = format!("127.0.0.1:{}", unused_port());
        let state = dir.path().join("state").display().to_string();
        let listen = ["--listen", &api, "--listen", &address];
        let controller =
            Daemon::start(&[&["controller", "run", "--state", &state][..], &listen].concat());
        until("the controller", || UnixStream::connect(&socket).is_ok());
        Self { dir, url: format!("https://{address}"), api, _controller: controller }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Runs a command that reads this from its standard input.
    fn run(&self, args: &[&str], input: &str) -> Output {
        let mut command = Command::new("timeout");
        command.arg(DEADLINE.as_secs().to_string()).arg(env!("CARGO_BIN_EXE_perigee")).args(args);
        command.env("PERIGEE_API", &self.api).env("HOME", self.dir.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("coreutils' timeout");
        // One that does not read it may have ended.
        let _ = child.stdin.take().expect("it has one").write_all(input.as_bytes());
        child.wait_with_output().expect("its end")
    }

    /// What a command that succeeds prints.
    fn ok(&self, args: &[&str], input: &str) -> String {
        let output = self.run(args, input);
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).expect("a text")
    }

    fn token(&self, host: &str) -> String {
        self.ok(&["host", "token", host, "--controller", &self.url], "")
    }

    /// A host that has joined, with daemons that will listen at this address.
    fn host(&self, name: &'static str, address: &str) -> Host<'_> {
        let identity = self.path(&format!("{name}-identity"));
        let join =
            ["host", "join", "--identity-only", "--identity", &identity, "--address", address];
        self.ok(&join, &self.token(name));
        Host::at(self, name, address)
    }
}

impl<'a> Host<'a> {
    fn at(cluster: &'a Cluster, name: &'static str, address: &str) -> Self {
        let [agent, control] = [(); 2].map(|()| format!("{address}:{}", unused_port()));
        Self { cluster, name, agent, control }
    }

    fn path(&self, of: &str) -> String {
        self.cluster.path(&format!("{}-{of}", self.name))
    }

    fn identity(&self) -> String {
        self.path("identity")
    }

    fn control_socket(&self) -> String {
        format!("unix:{}", self.path("control.sock"))
    }

    fn volume_server(&self) -> Daemon {
        let (pool, vms, nbd) =
            (self.path("pool"), self.path("vms"), format!("unix:{}", self.path("nbd.sock")));
        Daemon::start(
            &[
                &["volume", "serve", "--pool", &pool, "--nbd", &nbd, "--vm-sockets", &vms][..],
                &["--identity", &self.identity()],
                &["--control", &self.control_socket(), "--control", &self.control],
            ]
            .concat(),
        )
    }

    fn agent(&self) -> Daemon {
        let volume_url = format!("https://{}", self.control);
        Daemon::start(
            &[
                &["agent", "run", "--host", self.name, "--site", "home", "--listen", &self.agent][..],
                &["--controller", &self.cluster.url, "--identity", &self.identity()],
                &["--state", &self.path("agent"), "--volume-control", &self.control_socket()],
                &["--volume-url", &volume_url, "--nbd-addr", &self.control],
                &["--probe-kernel", "/dev/null"],
            ]
            .concat(),
        )
    }

    /// How its volume server refuses another host that asks for a volume. There is no such volume.
    fn refuses(&self, other: &Host<'_>) -> Problem {
        let own = Identity::load(Path::new(&other.identity())).expect("an identity");
        let expected = Expected::Identity(PeerIdentity::Host(host_id(self.name)));
        let url = format!("https://{}", self.control);
        let client = Network::Tls(own).client(&url, expected, DEADLINE).expect("a client");
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(client.get::<Value>("/v1/volumes/none")).expect_err("there is none")
    }
}

#[test]
fn a_host_joins_with_a_token_that_is_good_for_one_time_and_an_operator_sees_it() {
    let cluster = Cluster::up();
    let token = cluster.token("home1");
    let join = |identity: &str| {
        let identity = cluster.path(identity);
        cluster.run(&["host", "join", "--identity-only", "--identity", &identity], &token)
    };
    let joined = join("home1-identity");
    assert!(joined.status.success(), "{joined:?}");
    let again = join("again");
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert_eq!(again.status.code(), Some(9), "{said}");
    assert!(said.contains("the token is wrong, used, or older"), "{said}");

    let host = Host::at(&cluster, "home1", "127.0.0.1");
    let (_volume, _agent) = (host.volume_server(), host.agent());
    let (operator, state) = (cluster.path("operator"), cluster.path("state"));
    cluster.ok(&["controller", "operator", &operator, "--state", &state], "");
    let over_tls = ["--api", &cluster.url, "--operator", &operator, "-f", "json", "host", "list"];
    until("the host", || {
        let hosts: Value = serde_json::from_str(&cluster.ok(&over_tls, "")).expect("JSON");
        (&hosts[0]["id"], &hosts[0]["state"]) == (&"home1".into(), &"up".into())
    });
    cluster.ok(&["controller", "revoke-operators"], "");
    let refused = cluster.run(&over_tls, "");
    assert_eq!(refused.status.code(), Some(9), "{refused:?}");
}

/// The agent hears of it from the controller, and the volume server reads what the agent has written.
#[test]
fn a_host_that_is_revoked_is_refused_by_the_volume_server_of_another_host() {
    let cluster = Cluster::up();
    let (home, cloud) = (cluster.host("home1", "127.0.0.1"), cluster.host("cloud1", "127.0.0.2"));
    let _volume = home.volume_server();
    until("the volume server", || home.refuses(&cloud).kind == ProblemKind::NotFound);
    cluster.ok(&["host", "revoke", "cloud1"], "");
    assert_eq!(home.refuses(&cloud).kind, ProblemKind::NotFound, "home1 was not told");
    let _agent = home.agent();
    until("the refusal", || {
        let refused = home.refuses(&cloud);
        refused.kind == ProblemKind::Forbidden && refused.why.contains("host:cloud1 is revoked")
    });
}

/// The certificate that the server at this address shows now.
fn certificate_at(address: &str, own: &Identity) -> Option<Certified> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(address).await.ok()?;
        let shaken = own.connect(address, Expected::Address, stream);
        let stream = tokio::time::timeout(DEADLINE, shaken).await.ok()?.ok()?;
        Certified::of(stream.get_ref().1.peer_certificates()?.first()?)
    })
}

#[test]
fn a_host_renews_its_certificate_and_its_volume_server_shows_the_new_one_without_a_restart() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let dir = directory();
    // It has one day left.
    let authority = Authority::open(&dir.path().join("state/authority")).expect("an authority");
    let (name, here) = (host_id("home1"), ["127.0.0.1".parse().expect("an address")]);
    authority.enrol(&name, &here).expect("it is noted");
    let (key, to) = (NewKey::generate().expect("a key"), PeerIdentity::Host(name));
    let issued_ms = now_ms() - u64::try_from((29 * DAY).as_millis()).expect("it is short");
    let old = authority.issue(&to, &here, &key.public(), SystemTime::now() - 29 * DAY, issued_ms);
    let old = key.credentials(&old.expect("a certificate"), authority.ca_pem());
    let own = authority.credentials(&PeerIdentity::Operator, &[]).expect("a certificate");
    let own = Identity::new(&own, Strangers::Refused).expect("an identity");

    let cluster = Cluster::up_in(dir);
    let host = Host::at(&cluster, "home1", "127.0.0.1");
    old.save(Path::new(&host.identity())).expect("it is kept");
    let mut volume = host.volume_server();
    until("the volume server", || certificate_at(&host.control, &own).is_some());
    let shown = certificate_at(&host.control, &own).expect("a certificate");
    assert_eq!((&shown.identity, shown.issued_ms), (&to, issued_ms));
    let _agent = host.agent();
    let is_new = |shown: Certified| shown.identity == to && shown.issued_ms > issued_ms;
    for address in [&host.agent, &host.control] {
        until("the new certificate", || certificate_at(address, &own).is_some_and(is_new));
    }
    assert!(volume.0.try_wait().expect("its state").is_none(), "it was not started again");
}

/// A copy of a controller's directory was started beside it, and both commanded the hosts.
#[test]
fn a_second_controller_on_a_copy_starts_only_when_it_is_told_to_and_the_hosts_refuse_the_first() {
    let cluster = Cluster::up();
    let host = cluster.host("home1", "127.0.0.1");
    let (_volume, _agent) = (host.volume_server(), host.agent());
    let create = ["volume", "create", "data", "--size", "1MiB", "--host", "home1"];
    until("the volume", || cluster.run(&create, "").status.success());
    let (copy, second) = (cluster.path("copy"), cluster.path("second.sock"));
    let copied = Command::new("cp").args(["-a", &cluster.path("state"), &copy]).status();
    assert!(copied.expect("cp").success());
    let second_api = format!("unix:{second}");
    let run = ["controller", "run", "--state", &copy, "--listen", &second_api];
    let refused = cluster.run(&run, "");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(10), "{said}");
    assert!(said.contains(&format!("perigee controller take-over --state {copy}")), "{said}");
    cluster.ok(&["volume", "info", "data"], "");

    cluster.ok(&["controller", "take-over", "--state", &copy], "");
    let _second = Daemon::start(&run);
    until("the second controller", || UnixStream::connect(&second).is_ok());
    let delete = ["volume", "delete", "data"];
    let mut said = String::new();
    until("the first controller to be refused", || {
        let listed = cluster.run(&["host", "list"], "");
        said = String::from_utf8_lossy(&listed.stderr).into_owned();
        said.contains("another controller commands the hosts")
    });
    let refused = cluster.run(&delete, "");
    assert_eq!(refused.status.code(), Some(10), "{refused:?}");
    let ask_second = |args: &[&str]| cluster.ok(&[&["--api", &second_api], args].concat(), "");
    until("the host to be up", || ask_second(&["host", "list"]).contains("up"));
    ask_second(&["volume", "info", "data"]);
    ask_second(&delete);
}
