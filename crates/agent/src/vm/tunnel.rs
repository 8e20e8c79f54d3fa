//! What a migration sends is encrypted by a process beside QEMU: [`carry`].
//!
//! QEMU's own TLS makes a record of each page's header and of each page, and sends each alone, which makes a migration
//! about four times as long as without encryption (`experiments/tls`). QEMU sends to a socket of its tunnel here, and what comes from
//! another host reaches a waiting QEMU through its own tunnel. Both have the migration's key, the VM's user, and nothing of their
//! host. The destination's agent decides, and says it with the address where it listens: [`SCHEME`] is for a tunnel, `tcp:` for QEMU's own
//! TLS with the same key (`VmSpec::arrives_tunnelled`).
//!
//! QEMU also encrypts itself what it sends compressed. It makes several connections then, and they have to arrive in their
//! order. Compressed memory is sent in large parts, so there is little to gain.

mod carry;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

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
use crate::programs;
use crate::qmp::{Qmp, QmpError};

pub use carry::carry_for_ever;

/// It reads a small file and listens.
const START_DEADLINE: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
const LOOK: Duration = Duration::from_secs(1);
/// For how long it may still pass on what QEMU has said last.
const LAST_WORDS_MAX: Duration = Duration::from_secs(30);
/// Before the address where a tunnel listens.
pub const SCHEME: &str = "tunnel:";
/// This program, also if its file was replaced meanwhile.
const OWN: &str = "/proc/self/exe";
/// What agents of the version before have started in its place.
const BEFORE: &str = "stunnel";
const REASON_BYTES: u64 = 1000;

/// One end of a tunnel.
pub struct Tunnel<'a> {
    pub dir: &'a VmDir,
    pub user: Option<QemuUser>,
    pub end: End,
}

impl<'a> Tunnel<'a> {
    fn of(vm: &'a Vm, host: &Host, end: End) -> Result<Self, Problem> {
        Ok(Self { dir: &vm.dir, user: host.user_of(&vm.dir)?, end })
    }

    /// QEMU connects to [`VmDir::migration_out`], and what it sends comes to `to`.
    pub async fn send(&self, to: SocketAddr) -> Result<Process, Problem> {
        let socket = self.dir.migration_out();
        remove(&socket).map_err(cannot_start)?;
        let process = self.start(&socket.display().to_string(), &to.to_string())?;
        // The socket's file is there before it takes connections.
        self.ready(process, || Ok((!listening(&process)?.is_empty()).then_some(process))).await
    }

    /// What comes to the address that is returned goes to a QEMU that listens at [`VmDir::migration_in`].
    pub async fn receive(&self, ip: &str) -> Result<(Process, SocketAddr), Problem> {
        let socket = self.dir.migration_in();
        let process = self.start(&format!("{ip}:0"), &socket.display().to_string())?;
        let listens = || Ok(listens_at(&process)?.map(|at| (process, at)));
        self.ready(process, listens).await
    }

    fn start(&self, at: &str, to: &str) -> Result<Process, Problem> {
        let key = self.dir.migration_key_file().display().to_string();
        let own = [key.as_str(), self.end.name(), at, to].map(ToOwned::to_owned);
        let line: Vec<String> = command().map(ToOwned::to_owned).into_iter().chain(own).collect();
        let log = self.dir.tunnel_log(self.end.name());
        remove(&log).map_err(cannot_start)?;
        let sandbox = Sandbox::new(OWN, &self.dir.root(), &self.dir.run())?;
        Ok(process::start(OWN, &line, self.user, &log, None, Some(sandbox))?.0)
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

/// The program's command that is [`carry_for_ever`].
#[cfg(not(test))]
fn command() -> [&'static str; 2] {
    ["agent", "tunnel"]
}

/// The tests' program has another one.
#[cfg(test)]
fn command() -> [&'static str; 3] {
    ["--exact", "vm::tunnel::carry::tests::it_is_the_process_of_a_tunnel", "--nocapture"]
}

fn cannot_start(why: impl std::fmt::Display) -> Problem {
    Problem::unavailable("can't start what encrypts a VM's migration", why)
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
    log.lines().next_back().map(|line| line.trim().to_owned())
}

/// # Errors
/// `Unavailable` if this host's processes can't be read.
fn find(dir: &VmDir, end: End) -> Result<Option<Process>, Problem> {
    let [key, settings] =
        [dir.migration_key_file(), dir.tls().join(format!("{}.conf", end.name()))]
            .map(|path| path.display().to_string());
    let look = || {
        let uid = match dir.user() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            user => user?,
        };
        let own = programs::own_name()?;
        let found = Process::find(Looks { program: &own, arguments: [&key, end.name()], uid })?;
        let before =
            || Process::find(Looks { program: BEFORE, arguments: [BEFORE, &settings], uid });
        found.map_or_else(before, |found| Ok(Some(found)))
    };
    look().map_err(|error: std::io::Error| {
        let what = format!("can't tell whether a migration is encrypted with {key}");
        Problem::unavailable(what, error)
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

/// Where QEMU sends to so that it comes encrypted to the destination. `None` if QEMU is to encrypt itself.
///
/// # Errors
/// If the destination waits for what comes through a tunnel, and there can be none here.
pub async fn way_out(vm: &Vm, host: &Host, uri: &str) -> Result<Option<String>, Problem> {
    end(&vm.dir, End::Source).await?;
    remove(&vm.dir.tunnel_log(End::Source.name())).map_err(cannot_start)?;
    let Some(to) = uri.strip_prefix(SCHEME) else { return Ok(None) };
    let to = to.parse().map_err(|_| cannot_start(format!("{to} is no address")))?;
    let process = Tunnel::of(vm, host, End::Source)?.send(to).await?;
    share_limits(vm, host, &process);
    Ok(Some(format!("unix:{}", vm.dir.migration_out().display())))
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
    // A tunnel's memory could be swapped.
    let can_be = vm.spec.arrives_tunnelled && !compressed && !vm.spec.locks_memory;
    let is_to_be = is_behind.unwrap_or(tls.is_some() && can_be);
    let tunnel = if is_to_be { receive(vm, host).await } else { Ok(None) };
    let tunnel = match tunnel {
        Ok(tunnel) => tunnel,
        // The VM may be coming through one.
        Err(problem) if is_behind == Some(true) => return Err(odd(problem)),
        // Without a tunnel the VM can come all the same.
        Err(problem) => {
            tracing::warn!(vm = %vm.id(), %problem, "QEMU encrypts what it sends itself");
            None
        }
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
    let scheme = if vm.spec.arrives_tunnelled { SCHEME } else { "tcp:" };
    Ok(format!("{scheme}{at}"))
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

/// `None` if the VM's source has no tunnel.
async fn receive(vm: &Vm, host: &Host) -> Result<Option<(Process, SocketAddr)>, Problem> {
    if let Some(process) = find(&vm.dir, End::Destination)? {
        match listens_at(&process) {
            Ok(Some(at)) => return Ok(Some((process, at))),
            Ok(None) => process.kill().await?,
            Err(error) => {
                let what = "can't tell where what encrypts its migration listens";
                return Err(Problem::unavailable(what, error));
            }
        }
    }
    if !vm.spec.arrives_tunnelled {
        return Ok(None);
    }
    Tunnel::of(vm, host, End::Destination)?.receive(&host.ip).await.map(Some)
}

fn share_limits(vm: &Vm, host: &Host, process: &Process) {
    let qemu = vm.observed(|seen| seen.process).filter(|_| host.has_cgroups);
    if let Some(qemu) = qemu
        && let Err(error) = cgroup::join(&qemu, process)
    {
        tracing::warn!(vm = %vm.id(), %error, "its tunnel runs without limits");
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
        tracing::warn!(vm = %vm.id(), %error, "whether its tunnel still passes something on is not known");
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
