//! Starts a lab, and runs a command or a closure in it that ends before the lab does.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use perigee_http::Client;
use perigee_model::job::{Host, HostState};
use perigee_model::{HostId, Problem};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::command::cannot_start;
use crate::definition::{Definition, LabId, Link, SiteDef};
use crate::down::down;
use crate::process::Process;
use crate::progress::Steps;
use crate::state::{self, LabDir, LabFile};
use crate::wan;

const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// How a lab is started.
#[derive(Debug, Clone)]
pub struct Options {
    /// The base directory of all labs.
    pub base: PathBuf,
    /// The `perigee` binary.
    pub program: PathBuf,
    /// How long the lab's start may take until all hosts are up.
    pub deadline: Duration,
}

impl Options {
    /// The default base directory and the binary of this process.
    ///
    /// # Errors
    /// `Internal` when the system does not tell the path of this binary.
    pub fn new() -> Result<Self, Problem> {
        let program =
            std::env::current_exe().map_err(|e| Problem::internal("can't find this program", e))?;
        let base = PathBuf::from(state::DEFAULT_BASE);
        Ok(Self { base, program, deadline: Duration::from_secs(120) })
    }
}

/// A lab that was up when this value was made.
#[derive(Debug, Clone)]
pub struct Lab {
    pub definition: Definition,
    /// The address of the controller's API, `unix:PATH`, for `PERIGEE_API`.
    pub api: String,
    dir: LabDir,
}

impl Lab {
    /// A lab that was started earlier.
    ///
    /// # Errors
    /// `NotFound` when no lab has this id.
    pub fn open(base: &Path, id: &LabId) -> Result<Self, Problem> {
        let dir = LabDir::new(base, id);
        Ok(Self::of(dir.load()?.definition, dir))
    }

    fn of(definition: Definition, dir: LabDir) -> Self {
        let api = format!("unix:{}", dir.controller_socket().display());
        Self { definition, api, dir }
    }

    /// The lab's directory, with its logs and sockets.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The program of the lab as a provider of rented hosts. It takes a verb and reads one JSON object.
    pub fn provider(&self) -> PathBuf {
        self.dir.provider()
    }

    /// A client of the controller for requests that are answered within `timeout`.
    ///
    /// # Errors
    /// As [`Client::new`].
    pub fn client(&self, timeout: Duration) -> Result<Client, Problem> {
        Client::new(&self.api, timeout)
    }

    /// The current process of a host's daemon, `agent` or `volume`.
    ///
    /// # Errors
    /// `NotFound` when it does not run at this moment.
    pub fn host_pid(&self, host: &HostId, daemon: &str) -> Result<i32, Problem> {
        self.pid(&format!("{host}/{daemon}"))
    }

    /// From now on a host's daemon, `agent` or `volume`, is not started again when it has ended; or it is.
    ///
    /// # Errors
    /// When the lab's directory can't be written.
    pub fn keep_away(&self, host: &HostId, daemon: &str, away: bool) -> Result<(), Problem> {
        self.dir.keep_away(&format!("{host}/{daemon}"), away)
    }

    /// The process that carries frames between sites if the kernel has no netem.
    ///
    /// # Errors
    /// `NotFound` when it does not run at this moment.
    pub fn relay_pid(&self) -> Result<i32, Problem> {
        self.pid("relay")
    }

    /// The links with their current settings.
    ///
    /// # Errors
    /// `NotFound` when the lab has no network yet.
    pub fn links(&self) -> Result<Vec<Link>, Problem> {
        Ok(self.dir.wan()?.links)
    }

    pub(crate) fn lab_dir(&self) -> &LabDir {
        &self.dir
    }

    /// The controller's process.
    ///
    /// # Errors
    /// `NotFound` when it does not run at this moment.
    pub fn controller_pid(&self) -> Result<i32, Problem> {
        self.pid("ctl")
    }

    fn pid(&self, name: &str) -> Result<i32, Problem> {
        let process = self.dir.processes()?.get(name).copied();
        process.filter(|p| p.alive()).map(|p| p.pid).ok_or_else(|| {
            Problem::not_found(
                format!("can't find daemon {name} of lab {}", self.definition.id),
                "it is not running at this moment",
            )
        })
    }
}

/// One line of `lab list`.
#[derive(Debug, Clone, Serialize)]
pub struct LabSummary {
    pub id: LabId,
    /// Empty if the lab is not complete.
    pub sites: Vec<SiteDef>,
    /// The links with their current settings.
    pub links: Vec<Link>,
    /// Whether its supervisor is running.
    pub supervised: bool,
    pub api: String,
}

/// # Errors
/// `Internal` when the base directory cannot be read.
pub fn list(base: &Path) -> Result<Vec<LabSummary>, Problem> {
    let summary = |id: LabId| {
        let dir = LabDir::new(base, &id);
        let definition = dir.load().ok().map(|file| file.definition);
        LabSummary {
            links: dir.wan().map(|wan| wan.links).unwrap_or_default(),
            sites: definition.map(|d| d.sites).unwrap_or_default(),
            supervised: dir.supervisor().is_some_and(Process::alive),
            api: format!("unix:{}", dir.controller_socket().display()),
            id,
        }
    };
    Ok(state::ids(base)?.into_iter().map(summary).collect())
}

/// Starts a lab and waits until the controller sees all its hosts as up.
///
/// # Errors
/// The problem says what was waited for. A lab that did not come up is taken down again.
pub async fn up(definition: Definition, options: &Options, steps: &Steps) -> Result<Lab, Problem> {
    definition.check()?;
    let dir = LabDir::new(&options.base, &definition.id);
    let file = LabFile { definition, program: options.program.clone() };
    dir.create(&file)?;
    let lab = Lab::of(file.definition, dir);
    match bring_up(&lab, options, steps).await {
        Ok(()) => Ok(lab),
        Err(problem) => {
            let problem = with_log(problem, &lab);
            down(&options.base, &lab.definition.id).await?;
            Err(problem)
        }
    }
}

async fn bring_up(lab: &Lab, options: &Options, steps: &Steps) -> Result<(), Problem> {
    let id = &lab.definition.id;
    let mut step = steps.begin(format!("lab {id} up"));
    start_supervisor(lab, options)?;
    let all = lab.definition.hosts().count();
    let end = tokio::time::Instant::now() + options.deadline;
    let client = lab.client(ASK_TIMEOUT)?;
    loop {
        // In this order: if the supervisor has ended, its last file is already written.
        let supervised = lab.dir.supervisor().is_some_and(Process::alive);
        if let Some(problem) = lab.dir.failure() {
            return Err(problem);
        }
        if !supervised {
            return Err(Problem::internal(format!("can't start lab {id}"), "its supervisor ended"));
        }
        let (up, state) = match client.get::<Vec<Host>>("/v1/hosts").await {
            Ok(hosts) => {
                let up = hosts.iter().filter(|h| h.state == HostState::Up).count();
                (up, format!("{up} of {all} hosts up"))
            }
            Err(_) => (0, "waiting for the controller".to_owned()),
        };
        step.at(&state);
        if up == all {
            step.done(&lab.api);
            verify_wan(lab, steps).await;
            return Ok(());
        }
        if tokio::time::Instant::now() >= end {
            let why = format!("{state} after {:?}", options.deadline);
            return Err(Problem::unavailable(format!("can't start lab {id}"), why));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Measures the WAN and prints the result. A failed measurement is only printed: the lab stays usable.
async fn verify_wan(lab: &Lab, steps: &Steps) {
    let definition = lab.definition.clone();
    let links = definition.links.clone();
    let verified = tokio::task::spawn_blocking(move || wan::verify(&definition, &links)).await;
    match verified {
        Ok(Ok(lines)) => lines.iter().for_each(|line| steps.say(&format!("    WAN {line}"))),
        Ok(Err(problem)) => steps.say(&format!("    the WAN could not be measured: {problem}")),
        Err(error) => steps.say(&format!("    the WAN could not be measured: {error}")),
    }
}

fn start_supervisor(lab: &Lab, options: &Options) -> Result<(), Problem> {
    let log = lab.dir.path().join("supervisor.log");
    let child = tokio::process::Command::new(&options.program)
        .args(["lab", "supervise", &lab.definition.id.to_string(), "--base"])
        .arg(&options.base)
        .stdin(Stdio::null())
        .stdout(state::open_log(&log)?)
        .stderr(state::open_log(&log)?)
        .spawn()
        .map_err(|e| cannot_start(&options.program.to_string_lossy(), &e))?;
    // This is written before anything can interrupt, so that `down` finds the supervisor at any time.
    let process = child.id().and_then(|pid| Process::of(i32::try_from(pid).ok()?));
    match process {
        Some(process) => lab.dir.set_supervisor(process),
        None => Err(Problem::internal("can't start the lab's supervisor", "it ended at once")),
    }
}

/// Adds the ends of the logs, because the logs are removed with the lab.
fn with_log(problem: Problem, lab: &Lab) -> Problem {
    let mut logs = ["supervisor.log", "net/relay.log", "ctl/controller.log"]
        .map(|log| lab.dir.path().join(log))
        .to_vec();
    for (_, host) in lab.definition.hosts() {
        logs.push(lab.dir.host(host).join("agent.log"));
        logs.push(lab.dir.host(host).join("volume.log"));
    }
    let mut next = problem.next.clone();
    for log in logs {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(5).collect();
        let name = log.strip_prefix(lab.dir.path()).unwrap_or(&log).display();
        for line in lines.iter().rev() {
            next = format!("{next}\n  {name}: {line}");
        }
    }
    problem.next(next.trim_start().to_owned())
}

/// Starts a lab, lets `work` use it, and takes it down: at the end, after an error, and on Ctrl-C,
/// SIGTERM and SIGHUP.
///
/// # Errors
/// Those of `up`, the work and `down`. A signal is an error too.
pub async fn with_lab<T, W>(
    definition: Definition,
    options: &Options,
    steps: &Steps,
    work: impl FnOnce(Lab) -> W,
) -> Result<T, Problem>
where
    W: Future<Output = Result<T, Problem>>,
{
    let id = definition.id.clone();
    let dir = LabDir::new(&options.base, &id);
    if dir.path().exists() {
        return Err(Problem::conflict(format!("can't make lab {id}"), "it exists already"));
    }
    let all = async { work(up(definition, options, steps).await?).await };
    then_down(&options.base, &id, steps, all).await
}

/// Runs `work`, which makes a lab itself, and then takes the lab down: also after an error, and on
/// Ctrl-C, SIGTERM and SIGHUP.
///
/// # Errors
/// Those of the work and `down`. A signal is an error too.
pub async fn then_down<T>(
    base: &Path,
    id: &LabId,
    steps: &Steps,
    work: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let result = tokio::select! {
        result = work => result,
        name = stop_signal() => Err(Problem::internal("the lab's work was not finished", format!("{} stopped it", name?))),
    };
    let step = steps.begin(format!("lab {id} down"));
    let removed = down(base, id).await;
    if removed.is_ok() {
        step.done("");
    }
    let value = result?;
    removed?;
    Ok(value)
}

async fn stop_signal() -> Result<&'static str, Problem> {
    let listen = |kind| signal(kind).map_err(|e| Problem::internal("can't wait for signals", e));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => "Ctrl-C",
        _ = terminate.recv() => "SIGTERM",
        _ = hangup.recv() => "SIGHUP",
    })
}

/// `lab run`: runs a command (default: the user's shell) with `PERIGEE_API` set and this `perigee` first
/// in its `PATH`, and returns its exit code.
///
/// # Errors
/// As [`with_lab`]; also if the command cannot be started.
pub async fn run(
    definition: Definition,
    options: &Options,
    steps: &Steps,
    command: &[String],
) -> Result<i32, Problem> {
    let shell = std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned());
    let (program, args) = match command {
        [program, args @ ..] => (program.clone(), args.to_vec()),
        [] => (shell, Vec::new()),
    };
    let directories = options.program.parent().map(PathBuf::from).into_iter();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(directories.chain(std::env::split_paths(&path)))
        .map_err(|e| Problem::invalid("can't put perigee into the command's PATH", e))?;
    with_lab(definition, options, steps, async |lab: Lab| {
        let mut child = tokio::process::Command::new(&program)
            .args(&args)
            .env("PATH", &path)
            .env("PERIGEE_API", &lab.api)
            .env("PERIGEE_LAB", lab.definition.id.to_string())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| match e.kind() {
                // This is the user's program: `make setup` would not help.
                std::io::ErrorKind::NotFound => {
                    Problem::not_found(format!("can't start {program}"), e)
                }
                _ => Problem::invalid(format!("can't start {program}"), e),
            })?;
        let status = child
            .wait()
            .await
            .map_err(|e| Problem::internal(format!("can't wait for {program}"), e))?;
        Ok(status
            .code()
            .unwrap_or(128 + std::os::unix::process::ExitStatusExt::signal(&status).unwrap_or(0)))
    })
    .await
}
