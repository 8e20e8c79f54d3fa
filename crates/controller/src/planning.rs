//! Brings the planner its snapshot and keeps what it says: decisions, and what ended jobs teach.
//!
//! The planner itself is pure; everything it is told stands in the store or comes from the hosts.

use std::sync::Arc;

use perigee_model::job::{Job, JobSpec};
use perigee_model::plan::{Basis, Decision, Plan, Score, Seconds, Trigger};
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::{
    Boot, Cluster as Facts, DiskFacts, HostFacts, JobFacts, LinkFacts, Measured, MeasuredVolume,
    PastMove, PastRun, Refused, Running, Snapshot, Traits, Verdict, VolumeFacts,
};
use sha2::{Digest, Sha256};

use crate::cluster::taught::{BOOTS, History};
use crate::cluster::{Cluster, capacity, now_ms};
use crate::meter::Totals;
use crate::records::{JobRecord, Placement, Traced};
use crate::{catalog, files, links};

/// Of the records of all jobs' decisions.
const DECISIONS: &str = "decisions/";

/// Boots kept for each host.
const BOOTS_KEPT: usize = 5;

/// What the planner is told of a job before it starts, beside the cluster.
#[derive(Debug, Clone)]
pub struct Prepared {
    pub job: JobFacts,
    pub history: Vec<PastRun>,
}

/// Finds the job's volumes and what earlier runs taught.
///
/// # Errors
/// `NotFound` for an unknown volume, `Unavailable` when its home does not answer.
pub async fn prepare(cluster: &Cluster, spec: &JobSpec) -> Result<Prepared, Problem> {
    let mut volumes = Vec::new();
    for volume in &spec.volumes {
        let record = catalog::find(cluster, &volume.volume).await?;
        catalog::reachable(cluster, &record.home)?;
        volumes.push(VolumeFacts {
            volume: volume.volume.clone(),
            home: record.home,
            allocated_bytes: record.seen.map_or(0, |seen| seen.allocated_bytes),
        });
    }
    let history = history(cluster, spec).await?;
    let data_bytes = volumes.iter().map(|volume| volume.allocated_bytes).collect();
    let job = JobFacts {
        traits: traits(spec, data_bytes),
        memory_bytes: spec.memory_bytes,
        start: spec.start.clone(),
        may_migrate: spec.may_migrate,
        volumes,
        dirty_bytes_per_s: history.dirty_bytes_per_s,
    };
    Ok(Prepared { job, history: history.runs.clone() })
}

/// The ways to run a job that has not started. Links it needs are measured first.
///
/// # Errors
/// `NotFound` for an unknown volume, `Unavailable` when nothing can take the job now.
pub async fn plan(cluster: &Cluster, spec: &JobSpec) -> Result<Plan, Problem> {
    let Prepared { job, history } = prepare(cluster, spec).await?;
    let homes: Vec<HostId> = job.volumes.iter().map(|volume| volume.home.clone()).collect();
    let not_measured = links::ensure(cluster, &homes).await;
    let snapshot = Snapshot { cluster: facts(cluster), job, history };
    perigee_planner::plan(&snapshot).map_err(|refused| match (refused, not_measured) {
        (Refused::LinkNotMeasured { .. }, Some(problem)) => problem,
        (refused, _) => refused.into(),
    })
}

/// Whether a running job's VM moves now.
pub async fn consider(cluster: &Cluster, record: &JobRecord) -> Result<Option<Verdict>, Problem> {
    let (Some(host), Some(placement)) = (&record.job.host, &record.placement) else {
        return Ok(None);
    };
    let here = record.meter.totals.since(&record.meter.at_arrival);
    let spec = &record.job.spec;
    let history = history(cluster, spec).await?;
    let dirty_bytes_per_s = last_dirty_rate(cluster, record).or(history.dirty_bytes_per_s);
    let since_command = record.meter.totals.since(&record.meter.at_command);
    let requests = data_disks(placement, &since_command).iter().map(requests).sum();
    let running = Running {
        cluster: facts(cluster),
        traits: placement.traits.clone(),
        history: history.runs.clone(),
        progress: crate::jobs::progress(&record.job),
        progress_at_arrival: record.meter.progress_at_arrival,
        requests,
        host: host.clone(),
        memory_bytes: spec.memory_bytes,
        cpus: spec.cpus,
        may_migrate: spec.may_migrate,
        moves: record.moves,
        dirty_bytes_per_s,
        wall_s: seconds(now_ms().saturating_sub(record.meter.arrived_ms)),
        vcpu_s: seconds(here.vcpu_ms),
        disks: data_disks(placement, &here),
    };
    Ok(Some(perigee_planner::consider(&running)))
}

/// What a migration will take; `None` where the link is not measured.
pub fn move_cost_s(cluster: &Cluster, record: &JobRecord, to: &HostId) -> Option<f64> {
    let from = record.job.host.as_ref()?;
    let dirty = last_dirty_rate(cluster, record);
    let facts = facts(cluster);
    let memory_bytes = record.job.spec.memory_bytes;
    let cost = perigee_planner::move_cost(&facts, from, to, memory_bytes, dirty);
    cost.ok().map(|cost| cost.total_s)
}

/// The data volumes' counters, by the names in the job file. The VM's own disks are left out: what
/// the boot and the start of a program read of the root disk is in the guest's memory and is hardly
/// read again, so it says nothing about what a move would cost or save.
fn data_disks(placement: &Placement, totals: &Totals) -> Vec<DiskFacts> {
    let disks = placement.disks.iter().zip(&totals.disks);
    disks
        .filter_map(|(disk, stats)| {
            Some(DiskFacts {
                volume: disk.data_of.clone()?,
                home: disk.home.clone(),
                client: stats.client,
                at_home: stats.home,
                outage_ns: stats.outage_ns,
            })
        })
        .collect()
}

fn requests(disk: &DiskFacts) -> f64 {
    (disk.client.reads + disk.client.writes + disk.client.flushes) as f64
}

/// The hosts that are up and what was measured between them: all of it is in memory.
pub fn facts(cluster: &Cluster) -> Facts {
    let used = cluster.index.used();
    let mut hosts = Vec::new();
    for host in cluster.hosts.up() {
        let Some(report) = cluster.hosts.report(&host.id) else { continue };
        let used = used.get(&host.id).copied().unwrap_or_default();
        let mut free = capacity(&report);
        free.take(used.demand);
        hosts.push(HostFacts {
            id: host.id.clone(),
            site: host.addresses.site.clone(),
            cpus: report.cpus,
            memory_free_bytes: free.memory_bytes,
            running_vms: used.vms,
            takes_jobs: true,
            accelerator: report.accelerator,
            cpu_model: report.cpu_model,
            boots: cluster.taught.boots(&host.id),
            local_blocks: cluster.links.local(&host.id).and_then(|local| local.blocks),
        });
    }
    let site = |host: &HostId| cluster.hosts.get(host).ok().map(|h| h.addresses.site.clone());
    let links = links::list(cluster).into_iter().filter_map(|link| {
        Some(LinkFacts {
            from_site: site(&link.from)?,
            to_site: site(&link.to)?,
            from: link.from,
            to: link.to,
            probe: link.probe,
            blocks: link.blocks,
        })
    });
    Facts {
        hosts,
        links: links.collect(),
        probe_request_bytes: u64::from(links::PROBE_REQUEST_BYTES),
        past_moves: past_moves(cluster),
    }
}

/// Whether a VM that runs at one host can go on at another.
///
/// # Errors
/// The reason, in plain words.
pub fn can_move(cluster: &Cluster, from: &HostId, to: &HostId) -> Result<(), Problem> {
    let facts = facts(cluster);
    let of = |id: &HostId| facts.hosts.iter().find(|host| host.id == *id);
    match (of(from), of(to)) {
        // A source that is silent just now may still send.
        (Some(from), Some(to)) => Ok(from.can_send_to(to)?),
        _ => Ok(()),
    }
}

/// Moves teach with the link of their time; one without it teaches nothing.
pub(crate) fn past_moves(cluster: &Cluster) -> Vec<PastMove> {
    let moves = cluster.index.past_moves();
    let completed = moves.iter().filter_map(|record| {
        let link = record.migration.link?;
        Some(PastMove {
            memory_bytes: record.plan.as_ref()?.spec.memory_bytes,
            rate_bytes_per_s: link.rate_bytes_per_s,
            rtt_ms: link.rtt_ms,
            phases: record.migration.phases.clone(),
        })
    });
    completed.collect()
}

/// By the last migration of the job's VM.
fn last_dirty_rate(cluster: &Cluster, record: &JobRecord) -> Option<u64> {
    let moves = cluster.index.migrations_of(record.job.vm.as_ref()?);
    moves.iter().rev().map(|m| m.migration.dirty_bytes_per_s).find(|rate| *rate > 0)
}

// --- decisions ---

/// Keeps a decision for good.
pub async fn record(
    cluster: &Cluster,
    job: &JobId,
    trigger: Trigger,
    plan: Plan,
    summary: String,
) -> Result<(), Problem> {
    let decision = Decision {
        job: job.clone(),
        at_ms: now_ms(),
        trigger,
        plan,
        summary,
        measured_s: None,
        measured: None,
    };
    let mut number = cluster.records.keys(&prefix(job)).await?.len();
    while !cluster.records.create(&format!("{}{number:04}", prefix(job)), &decision).await? {
        number += 1;
    }
    Ok(())
}

/// The decision with which a job begins; recorded once, also when its driver starts over.
pub async fn record_submission(cluster: &Cluster, job: &JobId, plan: &Plan) -> Result<(), Problem> {
    if !decisions(cluster, job).await?.is_empty() {
        return Ok(());
    }
    let summary =
        plan.chosen().map_or_else(String::new, |o| format!("start at {}: {}", o.start, o.reason));
    record(cluster, job, Trigger::Submitted, plan.clone(), summary).await
}

/// A person's wish is a decision too; there is nothing to compare.
pub fn asked_plan() -> Plan {
    Plan { basis: Basis::Running, options: Vec::new(), figures: Vec::new(), moves: true }
}

/// How well the predictions of all jobs that are kept came true.
pub async fn score(cluster: &Cluster) -> Result<Score, Problem> {
    let decisions: Vec<Decision> = cluster.records.list(DECISIONS).await?;
    Ok(Score::of(&decisions))
}

pub async fn decisions(cluster: &Cluster, job: &JobId) -> Result<Vec<Decision>, Problem> {
    cluster.records.list(&prefix(job)).await
}

fn prefix(job: &JobId) -> String {
    format!("{DECISIONS}{job}/")
}

// --- what an ended job teaches ---

/// Writes the measurement beside the predictions, and keeps what the run taught.
/// Only a job whose command succeeded teaches: another one did not do the work.
pub async fn job_ended(cluster: &Cluster, record: &JobRecord) -> Result<(), Problem> {
    let job = &record.job;
    let (Some(started_ms), Some(running_ms), Some(measured_s), Some(placement)) =
        (job.started_ms, job.running_ms, job.measured_s, &record.placement)
    else {
        return Ok(());
    };
    let ended_ms = started_ms + milliseconds(measured_s);
    let succeeded = job.exit_code == Some(0);
    let is_sharp = record.meter.is_sharp(ended_ms.saturating_sub(running_ms));
    let newest = (succeeded && is_sharp).then(|| {
        let measured = measured(cluster, record, placement, ended_ms);
        (PastRun::learn(&measured), measured.paused_s)
    });
    let parts = newest.as_ref().map(|(run, paused_s)| run.parts(*paused_s));
    for key in cluster.records.keys(&prefix(&job.id)).await? {
        if let Some(mut decision) = cluster.records.own::<Decision>(&key).await? {
            measure(&mut decision.value, ended_ms, measured_s, parts);
            decision.save().await?;
        }
    }
    if !succeeded {
        return Ok(());
    }
    let boot = Boot {
        image: job.spec.image.to_string(),
        seconds: seconds(running_ms.saturating_sub(started_ms)),
        cpu_s: seconds(record.meter.at_command.vcpu_ms),
    };
    keep_boot(cluster, &placement.start, &boot).await?;
    let Some((newest, _)) = newest else {
        tracing::info!("job {} teaches nothing: its counters were read too late", job.id);
        return Ok(());
    };
    let dirty = last_dirty_rate(cluster, record);
    let keep = |old: Option<History>| {
        let mut history = old.unwrap_or_default();
        perigee_planner::keep(&mut history.runs, newest.clone());
        history.dirty_bytes_per_s = dirty.or(history.dirty_bytes_per_s);
        history
    };
    let key = history_key(&job.spec);
    let kept = cluster.records.update(&key, keep).await?;
    cluster.taught.set_history(&key, Arc::new(kept));
    Ok(())
}

/// The submission's prediction covers the whole job; a later one what was left of it.
fn measure(decision: &mut Decision, ended_ms: u64, measured_s: f64, parts: Option<Seconds>) {
    (decision.measured_s, decision.measured) = match decision.trigger {
        Trigger::Submitted => (Some(measured_s), parts),
        Trigger::TimeLost | Trigger::Asked => {
            (Some(seconds(ended_ms.saturating_sub(decision.at_ms))), None)
        }
    };
}

fn measured(
    cluster: &Cluster,
    record: &JobRecord,
    placement: &Placement,
    ended_ms: u64,
) -> Measured {
    let job: &Job = &record.job;
    let meter = &record.meter;
    let work = meter.at_exit.as_ref().unwrap_or(&meter.totals).since(&meter.at_command);
    let (started_ms, running_ms) =
        (job.started_ms.unwrap_or(ended_ms), job.running_ms.unwrap_or(ended_ms));
    let moves = job.vm.as_ref().map(|vm| cluster.index.migrations_of(vm)).unwrap_or_default();
    let paused_ms: u64 = moves.iter().map(|m| m.migration.downtime_ms).sum();
    let disks = data_disks(placement, &work);
    // Disks at one home wait for the same outage.
    let outage_ns = disks.iter().map(|disk| disk.outage_ns).max().unwrap_or_default();
    let facts = facts(cluster);
    let volume = |disk: DiskFacts| {
        let path = facts.path(&placement.start, &disk.home);
        MeasuredVolume {
            round_trip_s: path.map_or(0.0, |path| path.round_trip_s),
            rate_bytes_per_s: path.map(|path| path.rate_bytes_per_s),
            disk,
        }
    };
    Measured {
        traits: placement.traits.clone(),
        host: placement.start.clone(),
        moved: record.moves > 0,
        boot_s: seconds(running_ms.saturating_sub(started_ms)),
        wall_s: seconds(ended_ms.saturating_sub(running_ms)),
        paused_s: seconds(paused_ms) + outage_ns as f64 / 1e9,
        vcpu_s: seconds(work.vcpu_ms),
        cpus: job.spec.cpus,
        volumes: disks.into_iter().map(volume).collect(),
        replayed_round_trips: match record.traced {
            Traced::Replayed { round_trips } => Some(round_trips),
            Traced::NotYet | Traced::Not | Traced::Since { .. } => None,
        },
    }
}

/// Whether a block trace of the job would say something new: how many round trips it would wait for
/// far from its data. A run that was far has said so.
pub async fn wants_trace(cluster: &Cluster, record: &JobRecord) -> Result<bool, Problem> {
    let (Some(placement), Some(host)) = (&record.placement, &record.job.host) else {
        return Ok(false);
    };
    let data: Vec<_> = placement.disks.iter().filter(|disk| disk.data_of.is_some()).collect();
    if data.is_empty() || data.iter().any(|disk| disk.home != *host) {
        return Ok(false);
    }
    let history = history(cluster, &record.job.spec).await?;
    Ok(history.runs.iter().all(PastRun::leaves_depth_unknown))
}

async fn history(cluster: &Cluster, spec: &JobSpec) -> Result<Arc<History>, Problem> {
    let key = history_key(spec);
    if let Some(history) = cluster.taught.history(&key) {
        return Ok(history);
    }
    let history = Arc::new(cluster.records.read(&key).await?.unwrap_or_default());
    cluster.taught.set_history(&key, Arc::clone(&history));
    Ok(history)
}

/// Jobs of one image and command share a history; what else differs is in their [`Traits`].
fn history_key(spec: &JobSpec) -> String {
    format!("runs/{}", digest(&serde_json::json!([spec.image, spec.command])))
}

fn traits(spec: &JobSpec, data_bytes: Vec<u64>) -> Traits {
    Traits {
        name: spec.name.clone(),
        cpus: spec.cpus,
        memory_bytes: spec.memory_bytes,
        inputs: digest(&serde_json::json!([spec.env, spec.inputs, spec.volumes])),
        data_bytes,
    }
}

fn digest(value: &serde_json::Value) -> String {
    files::hex(&Sha256::digest(value.to_string()))
}

async fn keep_boot(cluster: &Cluster, host: &HostId, boot: &Boot) -> Result<(), Problem> {
    let keep = |old: Option<Vec<Boot>>| {
        let mut boots = old.unwrap_or_default();
        boots.push(boot.clone());
        let excess = boots.len().saturating_sub(BOOTS_KEPT);
        boots.drain(..excess);
        boots
    };
    let boots = cluster.records.update(&format!("{BOOTS}{host}"), keep).await?;
    cluster.taught.set_boots(host, boots);
    Ok(())
}

pub fn seconds(ms: u64) -> f64 {
    ms as f64 / 1e3
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a measured time is positive and small; the cast saturates"
)]
pub fn milliseconds(s: f64) -> u64 {
    (s * 1e3).round() as u64
}
