//! `perigee lab run boot-storm`: VMs without disks boot at the same time from their own clones.
//!
//! A storm has one image, one volume server, one boot server, and QEMU guests with only a network card
//! with iPXE in its ROM. It records all their requests (`perigee volume trace`).

mod outcome;
mod report;
mod servers;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use perigee_model::client::Over;
use perigee_model::{Problem, units};
use tokio::process::Child;

use crate::command;
use crate::definition::LabId;
use crate::diskless::{MACHINES_MAX, Network};
use crate::measuring::{self, QEMU, VERSION};
use crate::process::Process;
use crate::progress::{Step, Steps};
use crate::state::LabDir;
use crate::up::then_down;
use crate::usage::Usage;
pub use outcome::{MachineOutcome, Outcome};
use servers::Servers;

/// How long the first machine may take to boot, and each one more: enough on a busy machine without
/// hardware virtualisation.
const UP_MAX: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(60));
/// What QEMU needs in addition to a machine's memory.
const QEMU_MIB: u64 = 64;
/// How many of the last lines of a console or log a problem shows.
const LAST_LINES: usize = 12;

/// How many machines boot, over what, and from which image.
#[derive(Debug, Clone)]
pub struct Options {
    pub id: LabId,
    /// The base directory of all labs.
    pub base: PathBuf,
    /// The `perigee` binary.
    pub program: PathBuf,
    pub image: Image,
    pub machines: u16,
    pub over: Over,
    pub memory_mib: u32,
    /// Directory for `report.html` and `results.json`.
    pub out: PathBuf,
    /// Where to keep the recorded trace; `None` discards it.
    pub trace: Option<PathBuf>,
}

/// A golden image, and the kernel and initramfs for machines with their root over NBD.
#[derive(Debug, Clone)]
pub struct Image {
    disk: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
}

impl Image {
    /// Finds the files in the directory that `scripts/golden-image` prints, or beside a disk's file in it.
    ///
    /// # Errors
    /// `Invalid` when a file is missing that booting over this protocol needs.
    pub fn find(path: &Path, over: Over) -> Result<Self, Problem> {
        let disk = if path.is_dir() { path.join("debian-pg.raw") } else { path.to_owned() };
        let beside = |name| disk.with_file_name(name);
        let image = Self { kernel: beside("vmlinuz"), initrd: beside("initrd-nbd"), disk };
        let needed: &[&PathBuf] = match over {
            Over::Iscsi => &[&image.disk],
            Over::Nbd => &[&image.disk, &image.kernel, &image.initrd],
        };
        for file in needed {
            File::open(file).map_err(|error| {
                Problem::invalid(format!("can't use the image {}", file.display()), error)
                    .next("scripts/golden-image builds one and prints its directory")
            })?;
        }
        Ok(image)
    }
}

/// Runs a storm in a lab of its own, which is always removed afterwards.
///
/// # Errors
/// The step that failed; `Invalid` when this machine has too little memory.
pub async fn storm(options: &Options, steps: &Steps) -> Result<Outcome, Problem> {
    check(options)?;
    let dir = LabDir::new(&options.base, &options.id);
    take_id(&dir)?;
    let work = async { tell(options, dir.path(), steps).await };
    then_down(&options.base, &options.id, steps, work).await
}

fn check(options: &Options) -> Result<(), Problem> {
    let Options { machines, memory_mib, .. } = options;
    let what = format!("can't boot {machines} machines");
    if !(1..=MACHINES_MAX).contains(machines) {
        return Err(Problem::invalid(what, format!("the number must be from 1 to {MACHINES_MAX}")));
    }
    let needed = (u64::from(*machines) * (u64::from(*memory_mib) + QEMU_MIB)) << 20;
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let free = kib.map_or(u64::MAX, |kib| kib << 10);
    if needed > free {
        let [needed, free] = [needed, free].map(units::format_bytes);
        let why = format!("they need {needed} of memory, and {free} is free");
        return Err(Problem::invalid(what, why)
            .next("boot fewer; `make experiments NAME=boot-storm` replays a boot by many"));
    }
    Ok(())
}

/// Makes the lab's directory, with this process as the lab's supervisor.
fn take_id(dir: &LabDir) -> Result<(), Problem> {
    let path = dir.path();
    let what = || format!("can't make {}", path.display());
    if let Some(base) = path.parent() {
        fs::create_dir_all(base).map_err(|error| Problem::internal(what(), error))?;
    }
    fs::create_dir(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            Problem::conflict(what(), "a lab with this id exists already")
                .next("choose another id, or take it down with `perigee lab down`")
        }
        _ => Problem::internal(what(), error),
    })?;
    let own = i32::try_from(std::process::id()).ok().and_then(Process::of);
    own.map_or(Ok(()), |own| dir.set_supervisor(own))
}

async fn tell(options: &Options, dir: &Path, steps: &Steps) -> Result<Outcome, Problem> {
    let network = Network::create(&options.id).await?;
    let step = steps.begin("import the image");
    let mut servers = Servers::prepare(options, &network, dir).await?;
    step.done("");
    let step = steps.begin("start the servers");
    servers.start_volume_server().await?;
    let mut machines = Vec::new();
    for number in 1..=options.machines {
        let (name, card) = (format!("m{number}"), network.plug(number).await?);
        servers.bind(&name, &card.mac, options.over).await?;
        let console = dir.join(format!("{name}.console"));
        let command = network.machine(
            &card,
            options.memory_mib,
            &console,
            &dir.join(format!("{name}.socket")),
        );
        machines.push(Machine { name, console, command, qemu: None, up: None });
    }
    servers.start_boot_server().await?;
    servers.start_trace().await?;
    step.done("");

    let before = servers.volume_usage()?;
    let mut step = steps.begin(format!("{} machines boot over {}", machines.len(), options.over));
    boot(&mut machines, &mut servers, options.over, &mut step).await?;
    let usage = servers.volume_usage()?;
    let trace = servers.stop_trace().await?;
    let bytes = fs::read(&trace)
        .map_err(|error| Problem::internal(format!("can't read {}", trace.display()), error))?;
    let last = machines.iter().filter_map(|machine| machine.up).max().unwrap_or_default();
    step.done(&format!("the last was up after {:.1} s", last.as_secs_f64()));

    let up_s = machines.into_iter().filter_map(|m| Some((m.name, m.up?.as_secs_f64()))).collect();
    let usage = Usage {
        cpu_s: usage.cpu_s - before.cpu_s,
        read_bytes: usage.read_bytes - before.read_bytes,
        ..usage
    };
    let mut outcome = Outcome::new(up_s, &bytes, usage)?;
    outcome.over = options.over;
    outcome.memory_mib = options.memory_mib;
    outcome.page_cache_bytes = servers.page_cache_bytes().await?;
    outcome.versions = measuring::versions(VERSION, &[QEMU]);
    keep(options, &outcome, &bytes)?;
    Ok(outcome)
}

struct Machine {
    name: String,
    console: PathBuf,
    command: tokio::process::Command,
    qemu: Option<Child>,
    /// When the machine was up, counted from the start of the first one.
    up: Option<Duration>,
}

impl Machine {
    fn said(&self) -> String {
        let bytes = fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }
}

/// Starts all machines and waits until each reports that it is up.
async fn boot(
    machines: &mut [Machine],
    servers: &mut Servers,
    over: Over,
    step: &mut Step,
) -> Result<(), Problem> {
    let (all, each) = (machines.len(), u32::try_from(machines.len()).unwrap_or(u32::MAX));
    let deadline = UP_MAX.0 + UP_MAX.1 * each;
    let marker = format!("perigee: up, root over {over}");
    let begin = Instant::now();
    for machine in machines.iter_mut() {
        let qemu = machine.command.stdin(std::process::Stdio::null()).kill_on_drop(true).spawn();
        machine.qemu = Some(qemu.map_err(|e| command::cannot_start("qemu-system-x86_64", &e))?);
    }
    loop {
        for machine in machines.iter_mut().filter(|machine| machine.up.is_none()) {
            if machine.said().contains(&marker) {
                machine.up = Some(begin.elapsed());
                continue;
            }
            let ended = machine.qemu.as_mut().and_then(|qemu| qemu.try_wait().ok().flatten());
            if let Some(status) = ended {
                return Err(not_up(machine, &format!("QEMU ended with {status}")));
            }
        }
        servers.check()?;
        let up = machines.iter().filter(|machine| machine.up.is_some()).count();
        step.at(&format!("{up} of {all} up"));
        if up == all {
            return Ok(());
        }
        if let Some(machine) = machines.iter().find(|machine| machine.up.is_none())
            && begin.elapsed() > deadline
        {
            return Err(not_up(machine, &format!("it was not up within {deadline:?}")));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn not_up(machine: &Machine, why: &str) -> Problem {
    Problem::unavailable(format!("can't boot machine {}", machine.name), why)
        .next(format!("the end of its console:\n{}", last_lines(&machine.said())))
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

fn keep(options: &Options, outcome: &Outcome, trace: &[u8]) -> Result<(), Problem> {
    let out = &options.out;
    let fail = |path: &Path, error: &dyn std::fmt::Display| {
        Problem::internal(format!("can't write {}", path.display()), error)
    };
    fs::create_dir_all(out).map_err(|error| fail(out, &error))?;
    let json = serde_json::to_vec_pretty(outcome).map_err(|error| fail(out, &error))?;
    let page = report::html(outcome).into_bytes();
    let files = [(out.join("results.json"), &json[..]), (out.join("report.html"), &page)];
    let trace = options.trace.as_ref().map(|path| (path.clone(), trace));
    for (path, bytes) in files.into_iter().chain(trace) {
        fs::write(&path, bytes).map_err(|error| fail(&path, &error))?;
    }
    Ok(())
}
