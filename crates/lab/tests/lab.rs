//! Labs with real namespaces and stand-ins for the daemons. Needs root, like the lab itself.
//!
//! The stand-in for the `perigee` binary is a script: as supervisor and as controller it runs this
//! test binary again (the two ignored tests at the end), as any other daemon it sleeps.

use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use perigee_lab::{Definition, Lab, LabId, Options, Steps};
use perigee_model::job::{Host, HostState};
use perigee_model::vm::HostAddresses;
use perigee_model::{HostId, Problem, SiteId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const DEADLINE: Duration = Duration::from_secs(30);
const RTT_MS: u32 = 20;
/// wirefilter counts in whole milliseconds: a packet may be up to one too early in each direction.
const WAN_MIN: Duration = Duration::from_millis(RTT_MS as u64 - 2);

struct Bench {
    base: tempfile::TempDir,
    options: Options,
}

impl Bench {
    fn new() -> Self {
        let base = tempfile::Builder::new().prefix("pgl").tempdir().expect("a directory");
        let program = base.path().join("perigee");
        let me = std::env::current_exe().expect("this test");
        let script = format!(
            "#!/bin/sh\nexport LAB_TEST_ARGS=\"$*\"\ncase \"$1\" in\n\
             lab) exec {me} --exact as_supervisor --ignored --nocapture ;;\n\
             controller) exec {me} --exact as_controller --ignored --nocapture ;;\n\
             *) exec sleep 1000 ;;\nesac\n",
            me = me.display()
        );
        std::fs::write(&program, script).expect("a script");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("mode");
        let labs = base.path().join("labs");
        Self { options: Options { base: labs, program, deadline: DEADLINE }, base }
    }

    async fn up(&self) -> Lab {
        let definition = Definition::default_demo(LabId::random(), RTT_MS);
        perigee_lab::up(definition, &self.options, &Steps::default()).await.expect("lab up")
    }

    async fn down(&self, id: &LabId) {
        assert!(perigee_lab::down(&self.options.base, id).await.expect("lab down"), "it was there");
        self.assert_nothing_left(id);
        assert!(!perigee_lab::down(&self.options.base, id).await.expect("again"), "nothing there");
    }

    fn assert_nothing_left(&self, id: &LabId) {
        assert_eq!(namespaces(id), Vec::<String>::new(), "namespaces");
        assert!(!self.options.base.join(id.to_string()).exists(), "directory");
        assert_eq!(processes_of(self.base.path(), id), Vec::<String>::new(), "processes");
    }
}

/// A test that failed leaves no lab behind either.
impl Drop for Bench {
    fn drop(&mut self) {
        let base = self.options.base.clone();
        let down = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(perigee_lab::down_all(&base)).expect("lab down");
        };
        // A thread of its own, because a runtime cannot be made inside another.
        let _ = std::thread::spawn(down).join();
    }
}

fn namespaces(id: &LabId) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return Vec::new() };
    let names = entries.flatten().filter_map(|e| e.file_name().into_string().ok());
    names.filter(|n| n.starts_with(&format!("pg-{id}-"))).collect()
}

/// Command lines below the lab's directory, or of its supervisor by what its environment says.
fn processes_of(base: &Path, id: &LabId) -> Vec<String> {
    let dir = base.join("labs").join(id.to_string()).to_string_lossy().into_owned();
    let supervise = format!("LAB_TEST_ARGS=lab supervise {id}");
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let read = |path: PathBuf| {
        String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
    };
    entries
        .filter(|e| e.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit()))
        .map(|e| (read(e.path().join("cmdline")), read(e.path().join("environ"))))
        .filter(|(line, env)| line.contains(&dir) || env.contains(&dir) || env.contains(&supervise))
        .map(|(line, _)| line)
        .collect()
}

fn host(name: &str) -> HostId {
    HostId::new(name).expect("a name")
}

/// The shortest of several TCP connects to a closed port, from inside a host's namespace.
fn round_trip(lab: &Lab, from: &str, to: &str) -> Duration {
    let namespace = format!("/run/netns/{}", lab.definition.host_namespace(&host(from)));
    let address = lab.definition.host_address(&host(to)).expect("an address");
    let measure = move || {
        let namespace = std::fs::File::open(namespace).expect("a namespace");
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).expect("setns");
        let connect = || {
            let began = Instant::now();
            let answer = TcpStream::connect_timeout(&SocketAddr::from((address, 9)), DEADLINE);
            let kind = answer.expect_err("nothing listens").kind();
            assert_eq!(kind, std::io::ErrorKind::ConnectionRefused, "{address} must answer");
            began.elapsed()
        };
        (0..5).map(|_| connect()).min().expect("five")
    };
    std::thread::spawn(measure).join().expect("a measurement")
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < end, "waited {DEADLINE:?} for: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn kill(pid: i32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)
        .expect("kill");
}

#[tokio::test]
async fn two_labs_stand_side_by_side_with_a_wan_in_each() {
    let bench = Bench::new();
    let (one, two) = (bench.up().await, bench.up().await);
    for lab in [&one, &two] {
        assert!(round_trip(lab, "home1", "cloud1") >= WAN_MIN);
        assert!(round_trip(lab, "home1", "home2") < DEADLINE);
    }
    assert_eq!(perigee_lab::list(&bench.options.base).expect("a list").len(), 2);
    bench.down(&one.definition.id).await;
    assert!(round_trip(&two, "cloud1", "home2") >= WAN_MIN);
    bench.down(&two.definition.id).await;
}

#[tokio::test]
async fn a_killed_daemon_is_started_again() {
    let bench = Bench::new();
    let lab = bench.up().await;
    for daemon in ["volume", "agent"] {
        // The stand-in for the controller says that all hosts are up before their daemons are.
        let pid = || lab.host_pid(&host("home2"), daemon);
        until(&format!("the first {daemon}"), || pid().is_ok()).await;
        let old = pid().expect("it runs");
        kill(old);
        until(&format!("a new {daemon}"), || pid().is_ok_and(|new| new != old)).await;
    }
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn nothing_stays_when_the_supervisor_was_killed() {
    let bench = Bench::new();
    let lab = bench.up().await;
    let file = lab.dir().join("supervisor.json");
    let text = std::fs::read_to_string(file).expect("supervisor.json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let pid = i32::try_from(json["pid"].as_i64().expect("a pid")).expect("a pid");
    kill(pid);
    until("the supervisor's end", || {
        perigee_lab::list(&bench.options.base).expect("a list").iter().all(|l| !l.supervised)
    })
    .await;
    assert!(round_trip(&lab, "home1", "cloud1") >= WAN_MIN, "the WAN lives on");
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn a_lab_that_fails_half_way_leaves_nothing() {
    let bench = Bench::new();
    let definition = Definition::default_demo(LabId::random(), RTT_MS);
    let id = definition.id.clone();
    let taken = format!("pg-{id}-cloud1");
    let add = std::process::Command::new("ip").args(["netns", "add", &taken]).status();
    assert!(add.expect("ip").success());
    let refused = perigee_lab::up(definition, &bench.options, &Steps::default()).await;
    assert!(refused.expect_err("the name is taken").to_string().contains(&taken));
    bench.assert_nothing_left(&id);
}

#[tokio::test]
async fn an_error_in_the_work_takes_the_lab_down() {
    let bench = Bench::new();
    let definition = Definition::default_demo(LabId::random(), RTT_MS);
    let id = definition.id.clone();
    let work = async |_lab: Lab| Err::<(), _>(Problem::internal("work", "it went wrong"));
    let steps = Steps::default();
    let result = perigee_lab::with_lab(definition, &bench.options, &steps, work).await;
    assert_eq!(result.expect_err("the work's error").why, "it went wrong");
    bench.assert_nothing_left(&id);
}

#[tokio::test]
async fn run_gives_the_command_the_api_and_its_exit_code_back() {
    let bench = Bench::new();
    let definition = Definition::default_demo(LabId::random(), RTT_MS);
    let id = definition.id.clone();
    let command = ["sh", "-c", "test -S \"${PERIGEE_API#unix:}\" && exit 7"].map(str::to_owned);
    let code = perigee_lab::run(definition, &bench.options, &Steps::default(), &command).await;
    assert_eq!(code.expect("a code"), 7);
    bench.assert_nothing_left(&id);
}

#[tokio::test]
#[ignore = "the stand-in's supervisor"]
async fn as_supervisor() {
    let args = std::env::var("LAB_TEST_ARGS").expect("run by the stand-in");
    let args: Vec<&str> = args.split(' ').collect();
    let id = args[2].parse().expect("an id");
    perigee_lab::supervise(Path::new(args[4]), &id).await.expect("supervise");
}

/// Answers every request with three hosts that are up.
#[tokio::test]
#[ignore = "the stand-in's controller"]
async fn as_controller() {
    let args = std::env::var("LAB_TEST_ARGS").expect("run by the stand-in");
    let socket = args.split(' ').find_map(|a| a.strip_prefix("unix:")).expect("a socket");
    let hosts = serde_json::to_string(&["a", "b", "c"].map(up_host)).expect("JSON");
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{hosts}",
        hosts.len()
    );
    let listener = tokio::net::UnixListener::bind(socket).expect("listen");
    loop {
        let (mut stream, _) = listener.accept().await.expect("accept");
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).await;
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}

fn up_host(name: &str) -> Host {
    Host {
        id: host(name),
        addresses: HostAddresses {
            site: SiteId::new("s").expect("a name"),
            agent_url: String::new(),
            volume_url: String::new(),
            nbd_addr: String::new(),
        },
        state: HostState::Up,
        cpus: 1,
        memory_bytes: 1,
        memory_used_bytes: 0,
        accelerator: None,
        warnings: Vec::new(),
        last_seen_ms: 0,
    }
}
