//! The process that makes a lab and keeps its daemons running.
//!
//! It starts each daemon in its host's namespace. When a daemon ends, it starts it again after 0.2 s, or
//! later if the daemon keeps ending soon. On SIGTERM it ends and leaves the rest to [`crate::down()`],
//! which must be able to clean up without it anyway.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::{HostId, Problem, SiteId};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::command::cannot_start;
use crate::definition::{AGENT_PORT, CONTROLLER_PORT, Definition, LabId, NBD_PORT, VOLUME_PORT};
use crate::images;
use crate::net;
use crate::process::Process;
use crate::state::{LabDir, LabFile, open_log};
use crate::wan::Emulator;

const RESTART_MIN: Duration = Duration::from_millis(200);
const RESTART_MAX: Duration = Duration::from_secs(5);
/// A daemon that ran at least this long is started again without a longer wait.
const LIVED_WELL: Duration = Duration::from_secs(3);

/// Runs until SIGTERM. This is the command `perigee lab supervise`.
///
/// # Errors
/// The lab does not exist or cannot be made. `lab up` finds the reason in the lab's directory.
pub async fn supervise(base: &Path, id: &LabId) -> Result<(), Problem> {
    // This fails only if the process leads a session already, which is just as good.
    let _ = nix::unistd::setsid();
    perigee_http::prepare_daemon();
    let dir = LabDir::new(base, id);
    let file = dir.load()?;
    let mut stop = signal(SignalKind::terminate())
        .map_err(|e| Problem::internal("can't wait for SIGTERM", e))?;
    // This is not interrupted: an interrupted step could still make something after the cleanup.
    let made = net::create(&file.definition, &dir).await;
    let emulator = match made {
        Ok(emulator) => emulator,
        Err(problem) => {
            dir.set_failure(&problem)?;
            return Err(problem);
        }
    };
    let registry = Registry::new(dir.clone());
    let mut tasks = tokio::task::JoinSet::new();
    let relay = (emulator == Emulator::Relay).then(|| relay(&file, &dir)).flatten();
    for daemon in relay.into_iter().chain(daemons(&file, &dir)) {
        tasks.spawn(keep(daemon, registry.clone()));
    }
    stop.recv().await;
    tracing::info!(lab = %id, "the supervisor ends");
    Ok(())
}

/// The running daemons, as in `processes.json`.
#[derive(Clone)]
struct Registry {
    dir: LabDir,
    running: Arc<Mutex<BTreeMap<String, Process>>>,
}

impl Registry {
    fn new(dir: LabDir) -> Self {
        Self { dir, running: Arc::default() }
    }

    fn set(&self, name: &str, process: Option<Process>) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match process {
            Some(process) => running.insert(name.to_owned(), process),
            None => running.remove(name),
        };
        if let Err(problem) = self.dir.set_processes(&running) {
            tracing::warn!(%problem, "processes.json is out of date");
        }
    }
}

fn process_of(child: &Child) -> Option<Process> {
    Process::of(i32::try_from(child.id()?).ok()?)
}

/// A daemon's command line, its namespace, its CPUs and its log file.
struct Daemon {
    name: String,
    namespace: String,
    /// As [`Definition::cpu_list`].
    cpus: Option<String>,
    program: PathBuf,
    args: Vec<String>,
    log: PathBuf,
}

impl Daemon {
    fn spawn(&self) -> Result<Child, Problem> {
        // Like `nsenter`, `taskset` replaces itself with the program.
        let pinned = self.cpus.iter().flat_map(|cpus| ["taskset", "--cpu-list", cpus.as_str()]);
        let mut line = pinned.map(Path::new).chain([self.program.as_path()]);
        let first = line.next().unwrap_or(&self.program);
        let mut command: Command = net::in_namespace(&self.namespace, first);
        command
            .args(line)
            .args(&self.args)
            .stdin(Stdio::null())
            .stdout(open_log(&self.log)?)
            .stderr(open_log(&self.log)?)
            .spawn()
            .map_err(|e| cannot_start("nsenter", &e))
    }
}

/// Starts a daemon again whenever it ends.
async fn keep(daemon: Daemon, registry: Registry) {
    let mut pause = RESTART_MIN;
    loop {
        while registry.dir.is_kept_away(&daemon.name) {
            tokio::time::sleep(RESTART_MIN).await;
        }
        let began = Instant::now();
        match daemon.spawn() {
            Ok(mut child) => {
                registry.set(&daemon.name, process_of(&child));
                let status = child.wait().await;
                registry.set(&daemon.name, None);
                tracing::warn!(daemon = daemon.name, ?status, "a daemon ended; starting it again");
            }
            Err(problem) => tracing::error!(daemon = daemon.name, %problem, "can't start a daemon"),
        }
        pause = if began.elapsed() >= LIVED_WELL { RESTART_MIN } else { pause };
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RESTART_MAX);
    }
}

fn daemons(file: &LabFile, dir: &LabDir) -> Vec<Daemon> {
    let definition = &file.definition;
    let mut daemons = vec![controller(file, dir)];
    for (site, host) in definition.hosts() {
        let Some(address) = definition.host_address(host) else { continue };
        let address = address.to_string();
        daemons.push(volume_server(file, dir, host, &address));
        daemons.push(agent(file, dir, site, host, &address));
    }
    daemons
}

/// The relay runs in a site's namespace, where `down` finds it. `None` if there is no WAN.
fn relay(file: &LabFile, dir: &LabDir) -> Option<Daemon> {
    let definition = &file.definition;
    let site = definition.sites.first().filter(|_| !definition.links.is_empty())?;
    let base = dir.path().parent()?;
    Some(Daemon {
        name: "relay".to_owned(),
        namespace: definition.site_namespace(&site.name),
        cpus: None,
        program: file.program.clone(),
        args: words(&[
            "lab",
            "relay",
            &definition.id.to_string(),
            "--base",
            &base.to_string_lossy(),
        ]),
        log: dir.path().join("net/relay.log"),
    })
}

/// The files in `/etc/perigee` are those of a host that this machine may be, and not of the lab's.
const NO_FILE: &str = "/dev/null";

fn controller(file: &LabFile, dir: &LabDir) -> Daemon {
    let definition = &file.definition;
    let ctl = dir.path().join("ctl");
    let mut args = words(&[
        "controller",
        "run",
        "--config",
        NO_FILE,
        "--state",
        &dir.controller_state().to_string_lossy(),
        "--listen",
        &unix(&dir.controller_socket()),
        "--listen",
        &format!("{}:{CONTROLLER_PORT}", definition.controller_address()),
        "--site",
        definition.sites[0].name.as_str(),
        "--providers",
        &dir.providers().to_string_lossy(),
        "--rent-budget",
        &definition.rent.budget.exact(),
    ]);
    if definition.insecure {
        args.push("--insecure".to_owned());
    }
    Daemon {
        name: "ctl".to_owned(),
        namespace: definition.controller_namespace(),
        cpus: None,
        program: file.program.clone(),
        args,
        log: ctl.join("controller.log"),
    }
}

fn volume_server(file: &LabFile, dir: &LabDir, host: &HostId, address: &str) -> Daemon {
    let home = dir.host(host);
    Daemon {
        name: format!("{host}/volume"),
        namespace: file.definition.host_namespace(host),
        cpus: file.definition.cpu_list(host),
        program: file.program.clone(),
        args: volume_server_args(file, dir, host, address),
        log: home.join("volume.log"),
    }
}

fn volume_server_args(file: &LabFile, dir: &LabDir, host: &HostId, address: &str) -> Vec<String> {
    let home = dir.host(host);
    let mut args = words(&[
        "volume",
        "serve",
        "--config",
        NO_FILE,
        "--pool",
        &home.join("pool").to_string_lossy(),
        "--nbd",
        &unix(&dir.volume_socket(host)),
        "--nbd",
        &format!("{address}:{NBD_PORT}"),
        "--control",
        &unix(&home.join("volume-control.sock")),
        "--control",
        &format!("{address}:{VOLUME_PORT}"),
        "--vm-sockets",
        &home.join("vms").to_string_lossy(),
        "--boot-id",
        &dir.boot_id(host).to_string_lossy(),
    ]);
    args.extend(network_args(&file.definition, dir, host));
    if let Some(patience_s) = file.definition.home_patience_s {
        args.extend(words(&["--home-patience", &patience_s.to_string()]));
    }
    if let Some(bytes_per_s) = file.definition.fill_bytes_per_s {
        args.extend(words(&["--fill-rate", &format!("{bytes_per_s}B")]));
    }
    if let Some(cache) = images::cache() {
        args.extend(words(&["--image-dir", &cache.to_string_lossy()]));
    }
    args
}

fn agent(file: &LabFile, dir: &LabDir, site: &SiteId, host: &HostId, address: &str) -> Daemon {
    let definition: &Definition = &file.definition;
    let home = dir.host(host);
    let scheme = if definition.insecure { "http" } else { "https" };
    let mut args = words(&[
        "agent",
        "run",
        "--config",
        NO_FILE,
        "--host",
        host.as_str(),
        "--site",
        site.as_str(),
        "--listen",
        &format!("{address}:{AGENT_PORT}"),
        "--state",
        &home.join("agent").to_string_lossy(),
        "--volume-control",
        &unix(&home.join("volume-control.sock")),
        "--volume-url",
        &format!("{scheme}://{address}:{VOLUME_PORT}"),
        "--nbd-addr",
        &format!("{address}:{NBD_PORT}"),
        "--controller",
        &format!("{scheme}://{}:{CONTROLLER_PORT}", definition.controller_address()),
        "--boot-id",
        &dir.boot_id(host).to_string_lossy(),
        "--vm-uids",
        &definition.vm_uids(host),
    ]);
    args.extend(network_args(definition, dir, host));
    for reach in &definition.guests_reach {
        args.extend(words(&["--guests-reach", reach]));
    }
    for bridge in &definition.bridges {
        args.extend(words(&["--bridge", bridge]));
    }
    if let Some(kernel) = &definition.probe_kernel {
        args.extend(words(&["--probe-kernel", &kernel.to_string_lossy()]));
    }
    Daemon {
        name: format!("{host}/agent"),
        namespace: definition.host_namespace(host),
        cpus: definition.cpu_list(host),
        program: file.program.clone(),
        args,
        log: home.join("agent.log"),
    }
}

/// How a host's daemons talk with the other hosts.
fn network_args(definition: &Definition, dir: &LabDir, host: &HostId) -> Vec<String> {
    if definition.insecure {
        return words(&["--insecure"]);
    }
    words(&["--identity", &dir.identity(host).to_string_lossy()])
}

fn unix(path: &Path) -> String {
    format!("unix:{}", path.display())
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| (*w).to_owned()).collect()
}
