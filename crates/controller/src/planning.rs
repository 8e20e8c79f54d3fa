//! Brings the planner its snapshot and keeps what it says: decisions, and what ended jobs teach.
//!
//! The planner itself is pure; everything it is told stands in the store or comes from the hosts.

use perigee_model::job::{Job, JobSpec};
use perigee_model::plan::{Basis, Decision, Plan, Trigger};
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::{
    Cluster as Facts, DiskFacts, HostFacts, JobFacts, LinkFacts, Measured, PastMove, Refused,
    Running, Snapshot, Verdict, VolumeFacts, WorkProfile,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cluster::{Cluster, capacity, now_ms};
use crate::meter::Totals;
use crate::records::{JobRecord, Placement};
use crate::{catalog, files, links};

/// Boot times kept for each host.
const BOOTS_KEPT: usize = 5;

/// What earlier runs of a job taught.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct History {
    profile: WorkProfile,
    /// By the last migration of such a job.
    dirty_bytes_per_s: Option<u64>,
}

/// What the planner is told of a job before it starts, beside the cluster.
#[derive(Debug, Clone)]
pub struct Prepared {
    pub job: JobFacts,
    pub history: Option<WorkProfile>,
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
    let job = JobFacts {
        memory_bytes: spec.memory_bytes,
        start: spec.start.clone(),
        may_migrate: spec.may_migrate,
        volumes,
        dirty_bytes_per_s: history.as_ref().and_then(|h| h.dirty_bytes_per_s),
    };
    Ok(Prepared { job, history: history.map(|h| h.profile) })
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
    let dirty_bytes_per_s = match last_dirty_rate(cluster, record) {
        Some(rate) => Some(rate),
        None => taught_dirty_rate(cluster, spec).await?,
    };
    let running = Running {
        cluster: facts(cluster),
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
            })
        })
        .collect()
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
            boot_s: cluster.taught.boot_s(&host.id),
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

/// By earlier runs of such a job; asked again and again while it runs, so it is kept in memory.
async fn taught_dirty_rate(cluster: &Cluster, spec: &JobSpec) -> Result<Option<u64>, Problem> {
    let key = history_key(spec);
    if let Some(rate) = cluster.taught.dirty_rate(&key) {
        return Ok(rate);
    }
    let rate = history(cluster, spec).await?.and_then(|h| h.dirty_bytes_per_s);
    cluster.taught.set_dirty_rate(&key, rate);
    Ok(rate)
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
    let decision =
        Decision { job: job.clone(), at_ms: now_ms(), trigger, plan, summary, measured_s: None };
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
    let summary = plan
        .options
        .iter()
        .find(|option| option.chosen)
        .map_or_else(String::new, |o| format!("start at {}: {}", o.start, o.reason));
    record(cluster, job, Trigger::Submitted, plan.clone(), summary).await
}

/// A person's wish is a decision too; there is nothing to compare.
pub fn asked_plan() -> Plan {
    Plan { basis: Basis::Running, options: Vec::new(), figures: Vec::new(), moves: true }
}

pub async fn decisions(cluster: &Cluster, job: &JobId) -> Result<Vec<Decision>, Problem> {
    cluster.records.list(&prefix(job)).await
}

fn prefix(job: &JobId) -> String {
    format!("decisions/{job}/")
}

// --- what an ended job teaches ---

/// Writes the measurement beside the predictions, and keeps what the run taught.
/// Only a job whose command succeeded teaches: another one did not do the work.
pub async fn job_ended(cluster: &Cluster, record: &JobRecord) -> Result<(), Problem> {
    let job = &record.job;
    let (Some(started_ms), Some(running_ms), Some(measured_s)) =
        (job.started_ms, job.running_ms, job.measured_s)
    else {
        return Ok(());
    };
    let ended_ms = started_ms + milliseconds(measured_s);
    for key in cluster.records.keys(&prefix(&job.id)).await? {
        if let Some(mut decision) = cluster.records.own::<Decision>(&key).await? {
            measure(&mut decision.value, ended_ms, measured_s);
            decision.save().await?;
        }
    }
    if job.exit_code != Some(0) {
        return Ok(());
    }
    if let Some(start) = record.placement.as_ref().map(|placement| &placement.start) {
        keep_boot(cluster, start, seconds(running_ms.saturating_sub(started_ms))).await?;
    }
    if !record.meter.is_sharp(ended_ms.saturating_sub(running_ms)) {
        tracing::info!("job {} teaches nothing: its counters were read too late", job.id);
        return Ok(());
    }
    let newest = WorkProfile::learn(&measured(cluster, record, ended_ms));
    let dirty = last_dirty_rate(cluster, record);
    let keep = |old: Option<History>| History {
        profile: old.as_ref().map_or_else(|| newest.clone(), |h| h.profile.with(&newest)),
        dirty_bytes_per_s: dirty.or(old.and_then(|h| h.dirty_bytes_per_s)),
    };
    let key = history_key(&job.spec);
    let kept = cluster.records.update(&key, keep).await?;
    cluster.taught.set_dirty_rate(&key, kept.dirty_bytes_per_s);
    Ok(())
}

/// The submission's prediction covers the whole job; a later one what was left of it.
fn measure(decision: &mut Decision, ended_ms: u64, measured_s: f64) {
    decision.measured_s = Some(match decision.trigger {
        Trigger::Submitted => measured_s,
        Trigger::TimeLost | Trigger::Asked => seconds(ended_ms.saturating_sub(decision.at_ms)),
    });
}

fn measured(cluster: &Cluster, record: &JobRecord, ended_ms: u64) -> Measured {
    let job: &Job = &record.job;
    let meter = &record.meter;
    let work = meter.at_exit.as_ref().unwrap_or(&meter.totals).since(&meter.at_command);
    let (started_ms, running_ms) =
        (job.started_ms.unwrap_or(ended_ms), job.running_ms.unwrap_or(ended_ms));
    let mut paused_ms = 0;
    if let Some(vm) = &job.vm {
        let moves = cluster.index.migrations_of(vm);
        paused_ms = moves.iter().map(|m| m.migration.downtime_ms).sum();
    }
    Measured {
        boot_s: seconds(running_ms.saturating_sub(started_ms)),
        wall_s: seconds(ended_ms.saturating_sub(running_ms)),
        paused_s: seconds(paused_ms),
        vcpu_s: seconds(work.vcpu_ms),
        cpus: job.spec.cpus,
        volumes: record.placement.as_ref().map(|p| data_disks(p, &work)).unwrap_or_default(),
    }
}

async fn history(cluster: &Cluster, spec: &JobSpec) -> Result<Option<History>, Problem> {
    cluster.records.read(&history_key(spec)).await
}

/// Jobs of one name, image, command and volumes share a history.
fn history_key(spec: &JobSpec) -> String {
    let identity = serde_json::json!([spec.name, spec.image, spec.command, spec.volumes]);
    format!("history/{}", files::hex(&Sha256::digest(identity.to_string())))
}

async fn keep_boot(cluster: &Cluster, host: &HostId, boot_s: f64) -> Result<(), Problem> {
    let keep = |old: Option<Vec<f64>>| {
        let mut boots = old.unwrap_or_default();
        boots.push(boot_s);
        let excess = boots.len().saturating_sub(BOOTS_KEPT);
        boots.drain(..excess);
        boots
    };
    let boots = cluster.records.update(&format!("boots/{host}"), keep).await?;
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
