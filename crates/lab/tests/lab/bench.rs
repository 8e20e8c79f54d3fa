//! A lab for one test, and what is looked at from outside.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use perigee_lab::{Definition, Lab, LabId, Options, Steps};
use perigee_model::HostId;

pub const DEADLINE: Duration = Duration::from_secs(120);
pub const RTT_MS: u32 = 20;
/// No frame is ever early; how late one is says how busy the machine is.
pub const WAN_MIN: Duration = Duration::from_millis(RTT_MS as u64);
/// Who has not answered after so long is cut off.
const SILENCE: Duration = Duration::from_secs(2);

pub struct Bench {
    base: tempfile::TempDir,
    pub options: Options,
}

impl Bench {
    pub fn new() -> Self {
        let base = tempfile::Builder::new().prefix("pgl").tempdir().expect("a directory");
        let program = base.path().join("perigee");
        let me = std::env::current_exe().expect("this test");
        let script = format!(
            "#!/bin/sh\nexport LAB_TEST_ARGS=\"$*\"\ncase \"$1\" in\n\
             lab) exec {me} --exact as_$2 --ignored --nocapture ;;\n\
             controller) exec {me} --exact as_controller --ignored --nocapture ;;\n\
             *) exec sleep 1000 ;;\nesac\n",
            me = me.display()
        );
        std::fs::write(&program, script).expect("a script");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("mode");
        let labs = base.path().join("labs");
        Self { options: Options { base: labs, program, deadline: DEADLINE }, base }
    }

    pub async fn up(&self) -> Lab {
        self.up_as(Definition::default_demo(LabId::random(), RTT_MS)).await
    }

    pub async fn up_as(&self, definition: Definition) -> Lab {
        perigee_lab::up(definition, &self.options, &Steps::default()).await.expect("lab up")
    }

    pub async fn down(&self, id: &LabId) {
        assert!(perigee_lab::down(&self.options.base, id).await.expect("lab down"), "it was there");
        self.assert_nothing_left(id);
        assert!(!perigee_lab::down(&self.options.base, id).await.expect("again"), "nothing there");
    }

    pub fn assert_nothing_left(&self, id: &LabId) {
        assert_eq!(perigee_lab::remains(&self.options.base, id), Vec::<String>::new());
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

pub fn host(name: &str) -> HostId {
    HostId::new(name).expect("a name")
}

/// The shortest of several TCP connects to a closed port, from inside a host's namespace; `None`
/// when none is answered.
pub fn answers(lab: &Lab, from: &str, to: &str) -> Option<Duration> {
    connects(lab, from, lab.definition.host_address(&host(to)).expect("an address"))
}

fn connects(lab: &Lab, from: &str, address: Ipv4Addr) -> Option<Duration> {
    let namespace = format!("/run/netns/{}", lab.definition.host_namespace(&host(from)));
    let measure = move || {
        let namespace = std::fs::File::open(namespace).expect("a namespace");
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).expect("setns");
        let connect = || {
            let began = Instant::now();
            let answer = TcpStream::connect_timeout(&SocketAddr::from((address, 9)), SILENCE);
            let kind = answer.expect_err("nothing listens").kind();
            (kind == std::io::ErrorKind::ConnectionRefused).then(|| began.elapsed())
        };
        connect()?;
        (0..5).filter_map(|_| connect()).min()
    };
    std::thread::spawn(measure).join().expect("a measurement")
}

pub fn round_trip(lab: &Lab, from: &str, to: &str) -> Duration {
    round_trip_to(lab, from, lab.definition.host_address(&host(to)).expect("an address"))
}

/// The same to an address.
pub fn round_trip_to(lab: &Lab, from: &str, to: Ipv4Addr) -> Duration {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(answer) = connects(lab, from, to) {
            return answer;
        }
        assert!(Instant::now() < end, "waited {DEADLINE:?} for {to} to answer {from}");
    }
}

pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < end, "waited {DEADLINE:?} for: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub fn kill(pid: i32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)
        .expect("kill");
}
