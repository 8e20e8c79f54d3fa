//! What a migration sends is encrypted by `stunnel`, beside QEMU.
//!
//! QEMU's own TLS makes a record of each page's header and of each page, and sends each alone, which makes a migration
//! about four times as long as without encryption (`experiments/tls`). QEMU sends to a socket of its `stunnel` here, and what comes from
//! another host reaches a waiting QEMU through its own `stunnel`. Both have the migration's key, the VM's user, and nothing of their
//! host. On the wire it is the same as QEMU's own: TLS 1.3 with this key. So a host without `stunnel` and an agent of another version
//! do their end with QEMU's TLS.
//!
//! QEMU also encrypts itself what it sends compressed. It makes several connections then, and they have to arrive in their
//! order. Compressed memory is sent in large parts, so there is little to gain.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use perigee_http::certificate::CA_FILE;
use perigee_model::Problem;
use perigee_model::vm::VmStatus;
use tokio::time::{Instant, sleep};

use super::Vm;
use super::migrate::cut::{listening, listens_at, peers_at};
use super::start::{listen_for_migration, waits_at};
use super::tls::End;
use crate::cgroup;
use crate::confinement::Sandbox;
use crate::files::{VmDir, tail};
use crate::host::Host;
use crate::process::{self, Looks, Process, QemuUser};
use crate::programs::{STUNNEL, no_tunnel};
use crate::qmp::{Qmp, QmpError};

/// It reads a small file and listens.
const START_DEADLINE: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
const LOOK: Duration = Duration::from_secs(1);
/// For how long it may still pass on what QEMU has said last.
const LAST_WORDS_MAX: Duration = Duration::from_secs(30);
/// For how long the other end of a connection may keep the handshake waiting. It holds nothing up meanwhile.
const HANDSHAKE_MAX_S: u32 = 60;
/// Its descriptors. It takes about half as many connections, from whoever makes them, and has memory and a thread for each.
const FILES: u32 = 2048;
const REASON_BYTES: u64 = 1000;

/// One end of a tunnel.
pub struct Tunnel<'a> {
    pub dir: &'a VmDir,
    pub user: Option<QemuUser>,
    pub end: End,
}

impl<'a> Tunnel<'a> {
    /// `None` if this host has no `stunnel`, or the VM's memory may not be swapped.
    fn of(vm: &'a Vm, host: &Host, end: End) -> Result<Option<Self>, Problem> {
        if no_tunnel().is_some() || vm.spec.locks_memory {
            return Ok(None);
        }
        Ok(Some(Self { dir: &vm.dir, user: host.user_of(&vm.dir)?, end }))
    }

    /// QEMU connects to [`VmDir::migration_out`], and what it sends comes to `to`.
    ///
    /// `cluster`: the certificate of the cluster's authority. A server with a certificate instead of the key would have to show
    /// just this one; so there is none. Without it `stunnel` takes any.
    pub async fn send(&self, to: SocketAddr, cluster: &Path) -> Result<Process, Problem> {
        let socket = self.dir.migration_out();
        remove(&socket).map_err(cannot_start)?;
        let cluster = std::fs::read_to_string(cluster).map_err(cannot_start)?;
        let settings = format!(
            "client = yes\naccept = {}\nconnect = {to}\nverifyPeer = yes\nCAfile = {}\n",
            socket.display(),
            self.write("ca.pem", &cluster)?.display()
        );
        let process = self.start(&settings)?;
        // The socket's file is there before it takes connections.
        self.ready(process, || Ok((!listening(&process)?.is_empty()).then_some(process))).await
    }

    /// What comes to the address that is returned goes to a QEMU that listens at [`VmDir::migration_in`].
    pub async fn receive(&self, ip: &str) -> Result<(Process, SocketAddr), Problem> {
        let socket = self.dir.migration_in();
        let process = self.start(&format!("accept = {ip}:0\nconnect = {}\n", socket.display()))?;
        let listens = || Ok(listens_at(&process)?.map(|at| (process, at)));
        self.ready(process, listens).await
    }

    fn start(&self, settings: &str) -> Result<Process, Problem> {
        let settings = format!(
            "foreground = yes\npid =\nsyslog = no\ndebug = warning\n\
             [migration]\n\
             PSKsecrets = {}\nsslVersionMin = TLSv1.3\nTIMEOUTbusy = {HANDSHAKE_MAX_S}\n{settings}",
            self.dir.migration_key_file().display()
        );
        let settings = self.write(self.end.settings(), &settings)?.display().to_string();
        let log = self.dir.tunnel_log(self.end.name());
        remove(&log).map_err(cannot_start)?;
        let sandbox = Sandbox::new(STUNNEL, &self.dir.root(), &self.dir.run())?;
        let limited = [format!("--nofile={FILES}:{FILES}"), STUNNEL.to_owned(), settings];
        let started = process::start("prlimit", &limited, self.user, &log, None, Some(sandbox))?;
        Ok(started.0)
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, Problem> {
        let path = self.dir.tls().join(name);
        self.dir.write_for_user(&path, text).map_err(cannot_start)?;
        Ok(path)
    }

    /// After a failure no process is left.
    async fn ready<T>(
        &self,
        process: Process,
        is_ready: impl Fn() -> std::io::Result<Option<T>>,
    ) -> Result<T, Problem> {
        let deadline = Instant::now() + START_DEADLINE;
        let why = loop {
            match is_ready() {
                Ok(Some(ready)) => return Ok(ready),
                Ok(None) => {}
                // It may just have ended.
                Err(error) => break said(self.dir, self.end).unwrap_or_else(|| error.to_string()),
            }
            if process.has_ended() {
                break said(self.dir, self.end).unwrap_or_else(|| "it ended at once".to_owned());
            }
            if Instant::now() > deadline {
                break format!("it did not listen within {} s", START_DEADLINE.as_secs());
            }
            sleep(LOOK_AGAIN).await;
        };
        process.kill().await?;
        Err(cannot_start(why))
    }
}

fn cannot_start(why: impl std::fmt::Display) -> Problem {
    Problem::unavailable(format!("can't start {STUNNEL}"), why)
}

fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The last thing that went wrong at this end, in its words.
pub fn said(dir: &VmDir, end: End) -> Option<String> {
    let log = tail(&dir.tunnel_log(end.name()), REASON_BYTES).unwrap_or_default();
    let log = String::from_utf8_lossy(&log).into_owned();
    // `2026.11.26 12:25:56 LOG3[0]: SSL_connect: …`: 3 is an error.
    let mut errors = log.lines().rev().filter(|line| line.contains(" LOG3["));
    errors.find_map(|line| Some(line.split_once("]: ")?.1.trim().to_owned()))
}

/// # Errors
/// `Unavailable` if this host's processes can't be read.
fn find(dir: &VmDir, end: End) -> Result<Option<Process>, Problem> {
    let settings = dir.tls().join(end.settings()).display().to_string();
    let found = match dir.user() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        user => user.and_then(|uid| {
            Process::find(Looks { program: STUNNEL, arguments: [STUNNEL, &settings], uid })
        }),
    };
    found.map_err(|error| {
        Problem::unavailable(format!("can't tell whether {STUNNEL} runs with {settings}"), error)
    })
}

/// Ends what carries a migration at this end, and its connections. Returns whether there was something.
///
/// # Errors
/// `Unavailable` if this host's processes can't be read.
pub async fn end(dir: &VmDir, end: End) -> Result<bool, Problem> {
    let Some(process) = find(dir, end)? else { return Ok(false) };
    process.kill().await?;
    Ok(true)
}

/// Where QEMU sends to so that it comes encrypted to the destination. `None` if QEMU is to encrypt itself, which it does with what is
/// `compressed`.
pub async fn way_out(vm: &Vm, host: &Host, uri: &str, compressed: bool) -> Option<String> {
    let to = uri.strip_prefix("tcp:")?.parse().ok()?;
    let cluster = host.network.identity()?.dir()?.join(CA_FILE);
    let begin = async || {
        end(&vm.dir, End::Source).await?;
        remove(&vm.dir.tunnel_log(End::Source.name())).map_err(cannot_start)?;
        let tunnel = if compressed { None } else { Tunnel::of(vm, host, End::Source)? };
        let Some(tunnel) = tunnel else { return Ok(None) };
        tunnel.send(to, &cluster).await.map(Some)
    };
    let process = or_not(vm, begin().await)?;
    share_limits(vm, host, &process);
    Some(format!("unix:{}", vm.dir.migration_out().display()))
}

/// Has QEMU wait for its VM. Returns where the VM's source connects to.
///
/// # Errors
/// If QEMU refuses that; if an earlier agent had it wait behind a tunnel, and there is none any more and no other one.
pub async fn way_in(vm: &Vm, host: &Host, qmp: &Qmp) -> Result<String, QmpError> {
    let compressed = vm.spec.arrives_compressed;
    let odd = |problem: Problem| QmpError::Odd {
        command: "migrate-incoming".to_owned(),
        reason: problem.to_string(),
    };
    let tls = host.network.identity().map(|_| vm.dir.tls());
    check_encrypted(vm, host).map_err(odd)?;
    if tls.is_some() {
        vm.make_migration_key().map_err(odd)?;
    }
    // An earlier agent may have done it.
    let is_behind = waits_at(qmp).await?.map(|at| at.port.is_empty());
    let is_to_be = is_behind.unwrap_or(tls.is_some() && !compressed);
    let tunnel = if is_to_be { receive(vm, host).await } else { Ok(None) };
    let tunnel = match tunnel {
        // The VM may be coming through one.
        Err(problem) if is_behind == Some(true) => return Err(odd(problem)),
        tunnel => or_not(vm, tunnel),
    };
    let Some((process, at)) = tunnel else {
        if is_behind == Some(true) {
            return Err(odd(cannot_start("QEMU waits for what comes through it")));
        }
        let open = format!("tcp:{}:0", host.ip);
        let at = listen_for_migration(qmp, &open, compressed, tls.as_deref()).await?;
        return Ok(format!("tcp:{}:{}", host.ip, at.port));
    };
    share_limits(vm, host, &process);
    vm.observed(|seen| seen.tunnel = Some(process));
    let inside = format!("unix:{}", vm.dir.migration_in().display());
    listen_for_migration(qmp, &inside, compressed, None).await?;
    Ok(format!("tcp:{at}"))
}

/// # Errors
/// `Unsupported` if the VM has data that may not leave another site, and nothing would encrypt its memory on the way.
pub fn check_encrypted(vm: &Vm, host: &Host) -> Result<(), Problem> {
    if !vm.spec.locks_memory || host.network.identity().is_some() {
        return Ok(());
    }
    let why =
        "it has data that may not leave another site, and the hosts of this cluster do not encrypt";
    Err(Problem::unsupported(format!("can't migrate the VM {}", vm.id()), why))
}

async fn receive(vm: &Vm, host: &Host) -> Result<Option<(Process, SocketAddr)>, Problem> {
    if let Some(process) = find(&vm.dir, End::Destination)? {
        match listens_at(&process) {
            Ok(Some(at)) => return Ok(Some((process, at))),
            Ok(None) => process.kill().await?,
            Err(error) => {
                let what = format!("can't tell where its {STUNNEL} listens");
                return Err(Problem::unavailable(what, error));
            }
        }
    }
    let Some(tunnel) = Tunnel::of(vm, host, End::Destination)? else { return Ok(None) };
    tunnel.receive(&host.ip).await.map(Some)
}

/// Without a tunnel the VM can move all the same.
fn or_not<T>(vm: &Vm, tunnel: Result<Option<T>, Problem>) -> Option<T> {
    tunnel.unwrap_or_else(|problem| {
        tracing::warn!(vm = %vm.id(), %problem, "QEMU encrypts what it sends itself");
        None
    })
}

fn share_limits(vm: &Vm, host: &Host, process: &Process) {
    let qemu = vm.observed(|seen| seen.process).filter(|_| host.has_cgroups);
    if let Some(qemu) = qemu
        && let Err(error) = cgroup::join(&qemu, process)
    {
        tracing::warn!(vm = %vm.id(), %error, "its {STUNNEL} runs without limits");
    }
}

/// Whether somebody is connected to what the VM has come through. It ends a connection when QEMU has ended it and all is passed on.
async fn is_in_use(vm: &Vm) -> bool {
    let Some(process) = vm.observed(|seen| seen.tunnel) else { return false };
    let looked = move || match listens_at(&process)? {
        Some(at) => Ok(!peers_at(&process, at)?.is_empty()),
        None => Ok(false),
    };
    let looked = tokio::task::spawn_blocking(looked).await;
    looked.map_err(std::io::Error::other).flatten().unwrap_or_else(|error| {
        tracing::warn!(vm = %vm.id(), %error, "whether its {STUNNEL} still passes something on is not known");
        true
    })
}

/// Ends what a VM comes through when it has come.
pub async fn keep(vm: Arc<Vm>) {
    while matches!(vm.status(), VmStatus::Starting | VmStatus::Incoming) && !vm.qemu_has_ended() {
        sleep(LOOK).await;
    }
    let deadline = Instant::now() + LAST_WORDS_MAX;
    while !vm.qemu_has_ended() && Instant::now() < deadline && is_in_use(&vm).await {
        sleep(LOOK).await;
    }
    if let Err(problem) = end(&vm.dir, End::Destination).await {
        tracing::warn!(vm = %vm.id(), %problem, "what it has come through goes on");
    }
}
