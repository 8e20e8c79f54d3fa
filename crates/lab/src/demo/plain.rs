//! The run that people have today: the demo's VM in a QEMU of its own, which reads the data over the WAN from qemu-nbd.
//! No part of Perigee is between QEMU and the data. The disks of the VM itself are at its host, as in the other runs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use perigee_model::job::JobState;
use perigee_model::{HostId, Problem};

use super::outcome::Plain;
use super::work::{OUTPUT_BYTES, QUERY_COMMAND, Stage};
use crate::bare::{Content, Disks, Machine, NbdServer, Qemu, nbd, seed, wait_for_console};
use crate::cluster::Cluster;
use crate::progress::Steps;
use crate::up::Lab;

const BEGUN: &str = "perigee-demo: begun";
/// The checksum of the answers follows.
const DONE: &str = "perigee-demo: done";
const NAME: &str = "plain";
const BOOT_DEADLINE: Duration = Duration::from_secs(180);
const WORK_DEADLINE: Duration = Duration::from_secs(900);

/// A copy of the data for qemu-nbd, at the host of the volume.
pub struct Copied {
    dir: PathBuf,
    raw: PathBuf,
}

/// Copies the tables into a raw file.
///
/// # Errors
/// They can't be read or written.
pub async fn copy(lab: &Lab, stage: &Stage, steps: &Steps) -> Result<Copied, Problem> {
    let step = steps.begin(format!("copy the tables for qemu-nbd at {}", stage.near));
    let dir = lab.dir().join(NAME);
    std::fs::create_dir_all(&dir)
        .map_err(|e| Problem::internal(format!("can't make {}", dir.display()), e))?;
    let raw = dir.join("tpch.raw");
    let (lab, stage, to) = (lab.clone(), stage.clone(), raw.clone());
    let copying = tokio::task::spawn_blocking(move || {
        nbd::copy_volume(&lab, &stage.near, &stage.volume, &to)
    });
    copying.await.map_err(|e| Problem::internal("can't copy the tables", e))??;
    step.done("");
    Ok(Copied { dir, raw })
}

/// Waits until a job's command runs, and returns the command line of its QEMU, and the host.
///
/// # Errors
/// The job fails, or its QEMU is not found.
pub async fn machine_of(
    lab: &Lab,
    cluster: &Cluster,
    job: &perigee_model::JobId,
    step: &mut crate::progress::Step,
) -> Result<(Machine, HostId), Problem> {
    let running = cluster.wait(job, JobState::Running, step).await?;
    let missing = || Problem::internal(format!("can't use job {job}"), "it has no VM");
    let (host, vm) = running.host.zip(running.vm).ok_or_else(missing)?;
    Ok((Machine::of(lab, &host, &vm)?.0, host))
}

/// Runs the queries once.
///
/// # Errors
/// A server or QEMU does not start, or the queries do not end in time.
pub async fn run(
    lab: &Lab,
    stage: &Stage,
    copied: &Copied,
    (machine, host): &(Machine, HostId),
    bundle: &Path,
    steps: &Steps,
) -> Result<Plain, Problem> {
    let mut step = steps.begin(format!("run {NAME}: QEMU reads from qemu-nbd, without Perigee"));
    let server = NbdServer::start(lab, &stage.near, &copied.raw, &copied.dir, NAME).await?;
    let content = Content {
        image: &stage.image,
        seed: &seed(NAME, command(), "/data"),
        bundle: Some(bundle),
        output_bytes: OUTPUT_BYTES,
    };
    let disks = Disks::make(lab, host, NAME, content).await?;
    let run_dir = copied.dir.join("run");
    std::fs::create_dir_all(&run_dir)
        .map_err(|e| Problem::internal(format!("can't make {}", run_dir.display()), e))?;
    let line = disks.line(machine, &copied.dir, &server.node())?;
    let started = Instant::now();
    let qemu = Qemu::start(lab, host, &line, &copied.dir)?;
    step.at("booting");
    wait_for_console(&qemu.console(), BEGUN, BOOT_DEADLINE).await?;
    step.at("running");
    let answers_sha256 = wait_for_console(&qemu.console(), DONE, WORK_DEADLINE).await?;
    let measured_s = started.elapsed().as_secs_f64();
    drop(qemu);
    drop(server);
    disks.delete().await?;
    step.done(&format!("{measured_s:.1} s from the VM's start"));
    Ok(Plain { measured_s, answers_sha256 })
}

fn command() -> Vec<String> {
    let script = format!(
        "set -eu\necho '{BEGUN}' >/dev/console\n{QUERY_COMMAND}\n\
         echo \"{DONE} $(sha256sum <\"$PERIGEE_OUTPUT/answers.txt\" | cut -d' ' -f1)\" >/dev/console\n"
    );
    vec!["sh".to_owned(), "-c".to_owned(), script]
}
