//! A network of machines without disks, as the lab makes it, with a volume server and a boot server
//! that tests stop and start.
//!
//! `ip netns list` shows what a killed test leaves, and `perigee lab down ID` ends it. All processes
//! are ended by their ids, whatever happens.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use perigee_lab::LabId;
use perigee_lab::diskless::{self, ADDRESS, Card};
use perigee_model::Problem;
use serde_json::Value;

/// How long any one thing may take on a busy machine before the test gives up.
const PATIENCE: Duration = Duration::from_secs(400);
const BOOT_PORT: u16 = 7003;
const MEMORY_MIB: u32 = 256;
/// UEFI firmware, of Debian's package ovmf.
const UEFI: &str = "/usr/share/ovmf/OVMF.fd";

pub struct Network {
    dir: tempfile::TempDir,
    network: diskless::Network,
    pub processes: Vec<(String, Child)>,
    cards: u16,
}

/// A machine without a disk.
pub struct Machine {
    pub name: String,
    pub mac: String,
    /// Its firmware is UEFI, with the PXE that comes with it; else a BIOS, with iPXE in the card's ROM.
    pub uefi: bool,
    console: PathBuf,
    card: Card,
    qemu: Option<Child>,
}

impl Network {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("pgd").tempdir().expect("a directory");
        let network = done(diskless::Network::create(&LabId::random()));
        Self { dir, network, processes: Vec::new(), cards: 0 }
    }

    pub fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A command that runs in the network.
    fn inside(&self, program: &str) -> Command {
        let mut command = self.network.command(Path::new(program)).into_std();
        command.stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = self.inside("timeout");
        command.arg("60").arg(env!("CARGO_BIN_EXE_perigee")).args(["--format", "json"]);
        command.args(args).arg("--pool").arg(self.pool()).env("PERIGEE_LOG", "warn");
        command.output().expect("coreutils' timeout")
    }

    /// What `perigee` prints.
    pub fn ok(&self, args: &[&str]) -> Value {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// The exit code of `perigee`, and what it prints.
    pub fn code(&self, args: &[&str]) -> (i32, Value) {
        let output = self.run(args);
        let printed = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (output.status.code().expect("an exit code"), printed)
    }

    fn serve(&mut self, name: &str, args: &[&str]) {
        let log = std::fs::File::create(self.path(&format!("{name}.log"))).expect("a log");
        let mut command = self.inside(env!("CARGO_BIN_EXE_perigee"));
        command.args(args).arg("--pool").arg(self.pool());
        let child = command.env("PERIGEE_LOG", "info").stderr(log).spawn().expect("a server");
        self.processes.push((name.to_owned(), child));
    }

    pub fn volume_server(&mut self) {
        let (nbd, iscsi) = (format!("{ADDRESS}:10809"), format!("{ADDRESS}:3260"));
        self.serve("volume", &["volume", "serve", "--insecure", "--nbd", &nbd, "--iscsi", &iscsi]);
        let socket = self.pool().join("control.sock");
        until("the volume server", || UnixStream::connect(&socket).ok().map(drop));
    }

    pub fn boot_server(&mut self, options: &[&str]) {
        self.boot_server_of("10.77.0.100-10.77.0.200", options);
    }

    /// It has these addresses to give.
    pub fn boot_server_of(&mut self, range: &str, options: &[&str]) {
        let range = ["boot", "serve", "--interface", "br0", "--range", range];
        self.serve("boot", &[&range[..], options].concat());
        until("the boot server", || self.get("/boot.ipxe"));
    }

    /// The network namespace in which the servers are. Its bridge is `br0`.
    pub fn namespace(&self) -> &str {
        &self.network.namespace
    }

    /// Ends a server: by SIGTERM, or by SIGKILL.
    pub fn end(&mut self, name: &str, signal: &str) {
        let at = self.processes.iter().position(|(n, _)| n == name).expect("it runs");
        let (_, mut child) = self.processes.remove(at);
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(sent.expect("kill").success());
        until("its end", || child.try_wait().expect("its state"));
    }

    /// What the boot server answers to a machine.
    pub fn get(&self, path: &str) -> Option<String> {
        let namespace = format!("/run/netns/{}", self.network.namespace);
        let request = format!("GET {path} HTTP/1.0\r\nHost: {ADDRESS}\r\n\r\n");
        let asked = std::thread::spawn(move || {
            let namespace = std::fs::File::open(namespace).expect("the namespace");
            setns(namespace, CloneFlags::CLONE_NEWNET).expect("root");
            let mut stream = TcpStream::connect((ADDRESS, BOOT_PORT)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a deadline");
            stream.write_all(request.as_bytes()).ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
        });
        asked.join().expect("it does not panic")
    }

    /// The targets that an initiator is told of.
    pub fn targets(&self, initiator: &str) -> Vec<String> {
        let mut command = self.inside("timeout");
        command.args(["60", "iscsi-ls", "-i", initiator, &format!("iscsi://{ADDRESS}:3260")]);
        let output = command.output().expect("coreutils' timeout");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = said.lines().filter_map(|line| line.strip_prefix("Target:"));
        names.filter_map(|rest| rest.split_whitespace().next()).map(str::to_owned).collect()
    }

    /// A machine that is plugged in but not switched on.
    pub fn machine(&mut self, name: &str) -> Machine {
        self.cards += 1;
        let card = done(self.network.plug(self.cards));
        let console = self.path(&format!("{name}.console"));
        let (name, mac) = (name.to_owned(), card.mac.clone());
        Machine { name, mac, uefi: false, console, card, qemu: None }
    }

    /// Switches a machine on. It has no disk.
    pub fn start(&self, machine: &mut Machine) {
        std::fs::File::create(&machine.console).expect("a console");
        let keyboard = machine.keyboard();
        let network = &self.network;
        let mut command =
            network.machine(&machine.card, MEMORY_MIB, &machine.console, &keyboard).into_std();
        if machine.uefi {
            command.args(["-bios", UEFI, "-global", "virtio-net-pci.romfile="]);
        }
        command.stdin(Stdio::null());
        machine.qemu = Some(command.spawn().expect("QEMU"));
    }

    /// The end of a server's log.
    pub fn log(&self, name: &str) -> String {
        let text = std::fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(15).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// Waits until a machine's console has said this.
    pub fn says(&self, machine: &Machine, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // This is read first: a machine that has ended says nothing more.
            let has_ended = machine.has_ended();
            if machine.console().contains(text) {
                return;
            }
            let (volume, boot) = (self.log("volume"), self.log("boot"));
            assert!(
                !has_ended && Instant::now() < deadline,
                "{} did not say {text:?} before its end or within {PATIENCE:?}. Its console:\n{}\n\
                 volume server:\n{volume}\nboot server:\n{boot}",
                machine.name,
                machine.console()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for (_, child) in &mut self.processes {
            child.kill().ok();
            child.wait().ok();
        }
        let namespace = &self.network.namespace;
        let left = Command::new("ip").args(["netns", "pids", namespace]).output();
        for id in String::from_utf8_lossy(&left.expect("iproute2").stdout).lines() {
            Command::new("kill").args(["-9", id]).status().ok();
        }
        let deleted = Command::new("ip").args(["netns", "delete", namespace]).status();
        assert!(deleted.expect("iproute2").success(), "{namespace} is left");
    }
}

/// The lab's code is asynchronous, tests are not.
fn done<T>(work: impl Future<Output = Result<T, Problem>>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(work).expect("root, and a kernel with namespaces")
}

impl Machine {
    fn keyboard(&self) -> PathBuf {
        self.console.with_extension("socket")
    }

    /// Types a line on the console.
    pub fn types(&self, line: &str) {
        let mut console = UnixStream::connect(self.keyboard()).expect("QEMU's socket");
        console.write_all(format!("{line}\n").as_bytes()).expect("a line");
    }

    pub fn console(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }

    /// Whether it has switched itself off.
    fn has_ended(&self) -> bool {
        let pid = self.qemu.as_ref().expect("it was started").id();
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        state.rsplit(") ").next().is_some_and(|fields| fields.starts_with('Z'))
    }

    /// Pulls the plug.
    pub fn kill(&mut self) {
        if let Some(mut qemu) = self.qemu.take() {
            qemu.kill().expect("a kill");
            qemu.wait().expect("its end");
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The golden image's directory.
pub fn golden_image() -> PathBuf {
    let dir = std::env::var("PERIGEE_TEST_IMAGE")
        .expect("PERIGEE_TEST_IMAGE names the golden image's directory; make test sets it");
    Path::new(&dir).to_owned()
}
