//! A run of the job by Perigee.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use perigee_lab::bare::Machine;
use perigee_lab::measuring::load_1min;
use perigee_model::job::{Job, JobSpec, JobState, MigrationState, MoveVm};
use perigee_model::volume_move::{VolumeMoveState, VolumesOnMove};
use perigee_model::{HostId, VolumeName};

use crate::bench::Bench;
use crate::case::{Way, Work};
use crate::results::{Copied, Moved, Run, float};

/// A run, and the command line of its QEMU for others to copy.
pub struct Done {
    pub run: Run,
    pub machine: Machine,
}

/// Runs the job once on its own clone of the data. `Way::Again` needs the volume of the run before.
pub async fn run(
    bench: &Bench<'_>,
    (rtt_ms, round): (u32, u32),
    work: Work,
    way: Way,
    volume: &VolumeName,
) -> Result<Done> {
    let mut step = bench.step(format!("{rtt_ms} ms, {}: {}", work.name(), way.words()));
    let at = if way == Way::Local { &bench.far } else { &bench.near };
    let spec = spec(bench, work, at, volume);
    let sites = &bench.lab.definition.sites;
    let near = sites.iter().find(|site| site.hosts.contains(&bench.near));
    let near = &near.context("the near host has a site")?.name;
    if way == Way::Replica {
        bench.cluster.replicate(volume, near).await?;
    }
    let load_1min = load_1min()?;
    let before = bench.wan_bytes();
    let job = bench.cluster.submit(&spec).await?;
    let running = bench.cluster.wait(&job.id, JobState::Running, &mut step).await?;
    let vm = running.vm.clone().context("a running job has a VM")?;
    let (machine, _) = Machine::of(bench.lab, at, &vm)?;
    let asked = Instant::now();
    match way {
        Way::Stay | Way::Follow => {
            let volumes =
                if way == Way::Follow { VolumesOnMove::Follow } else { VolumesOnMove::Stay };
            let wish = MoveVm { host: bench.far.clone(), volumes, confirmed: false };
            bench.cluster.ask_to_move(&vm, &wish).await?;
        }
        Way::Copy => drop(bench.cluster.move_volume(volume, &bench.near).await?),
        Way::Local | Way::Remote | Way::Again | Way::Replica => {}
        Way::Iscsi | Way::Nbd => bail!("{} is not run by Perigee here", way.words()),
    }
    let job = bench.cluster.wait(&job.id, JobState::Succeeded, &mut step).await?;
    let mut run = figures(bench, &job, work).await?;
    // A copy that outlasts the job is a part of what this way needs of the WAN.
    if way == Way::Copy {
        run.copy = Some(copied(bench, volume, &job).await?);
    }
    (run.rtt_ms, run.round, run.way, run.load_1min) = (rtt_ms, round, way, load_1min);
    run.migration = moved(&job, way, asked)?;
    run.wan_bytes = bench.wan_bytes_since(before);
    // A volume with a replica can't be deleted.
    if way == Way::Replica {
        bench.cluster.stop_replica(volume, near).await?;
    }
    step.done(&format!("work {:.1} s", run.work_s));
    Ok(Done { run, machine })
}

fn spec(bench: &Bench<'_>, work: Work, at: &HostId, volume: &VolumeName) -> JobSpec {
    let name = bench.unique(work.name());
    let inputs = (work == Work::Tpch).then(|| bench.bundle_id.clone());
    JobSpec { inputs, ..bench.job(&name, work.command(), at, Some(volume.clone())) }
}

async fn figures(bench: &Bench<'_>, job: &Job, work: Work) -> Result<Run> {
    let (started, running) = (job.started_ms.context("a start")?, job.running_ms.context("a run")?);
    let boot_s = float(running.saturating_sub(started)) / 1e3;
    let whole_s = job.measured_s.context("a measured time")?;
    let files = bench.cluster.output(&job.id).await?;
    let result = files.iter().find(|(name, _)| name == "result").context("a result")?.1.trim();
    Ok(Run { boot_s, work_s: whole_s - boot_s, ..said(work, result)? })
}

/// What the guest says of its work.
pub fn said(work: Work, result: &str) -> Result<Run> {
    let mut run = Run {
        rtt_ms: 0,
        round: 0,
        work,
        way: Way::Local,
        boot_s: 0.0,
        work_s: 0.0,
        passes_s: Vec::new(),
        answers_sha256: String::new(),
        migration: None,
        copy: None,
        wan_bytes: None,
        load_1min: 0.0,
        perigee: String::new(),
    };
    match work {
        Work::Tpch => run.answers_sha256 = result.to_owned(),
        Work::Scan => {
            let times: Vec<f64> = result
                .split(' ')
                .map(str::parse)
                .collect::<Result<_, _>>()
                .context(result.to_owned())?;
            let (pairs, rest) = times.as_chunks::<2>();
            ensure!(pairs.len() == 2 && rest.is_empty(), "the scan has two passes: {result}");
            run.passes_s = pairs.iter().map(|[from, to]| to - from).collect();
        }
    }
    Ok(run)
}

fn moved(job: &Job, way: Way, asked: Instant) -> Result<Option<Moved>> {
    if !matches!(way, Way::Stay | Way::Follow) {
        ensure!(job.migrations.is_empty(), "the job moved although nobody asked for it");
        return Ok(None);
    }
    let migration = job.migrations.last().context("a migration")?;
    let whole_s = asked.elapsed().as_secs_f64();
    ensure!(
        migration.state == MigrationState::Completed,
        "the migration ended so, {whole_s:.0} s after it was asked for: {}",
        migration.error
    );
    Ok(Some(Moved {
        total_ms: migration.total_ms,
        pause_ms: migration.downtime_ms,
        memory_bytes: migration.bytes,
        during_work: migration.ended_ms.is_some_and(|at_ms| at_ms < work_ended_ms(job)),
    }))
}

fn work_ended_ms(job: &Job) -> u64 {
    let whole = Duration::from_secs_f64(job.measured_s.unwrap_or(0.0));
    job.started_ms.unwrap_or(0) + u64::try_from(whole.as_millis()).unwrap_or(u64::MAX)
}

async fn copied(bench: &Bench<'_>, volume: &VolumeName, job: &Job) -> Result<Copied> {
    let moved = bench.cluster.volume_moved(volume).await?;
    ensure!(
        moved.state == VolumeMoveState::Completed,
        "the volume's move ended as {:?}: {}",
        moved.state,
        moved.problem
    );
    let ended_ms = moved.ended_ms.context("a move that is over has an end")?;
    Ok(Copied {
        taken_ms: moved.taken_ms.map(|at_ms| at_ms.saturating_sub(moved.started_ms)),
        total_ms: ended_ms.saturating_sub(moved.started_ms),
        during_work: ended_ms < work_ended_ms(job),
    })
}
