//! What ended jobs teach the planner: their runs, and the boots of their VMs.

use std::sync::Arc;

use perigee_model::job::{Job, JobSpec};
use perigee_model::plan::{Decision, Seconds, Trigger};
use perigee_model::tenant::{DEFAULT_TENANT, tenant_of};
use perigee_model::trace::HELD_BACK_US;
use perigee_model::{HostId, JobId, Problem, TenantName};
use perigee_planner::gangs::RanksRun;
use perigee_planner::replay::Replayed;
use perigee_planner::{Boot, DiskFacts, Measured, MeasuredVolume, PastRun};

use super::decisions::prefix;
use super::{data_disks, digest, facts, gangs, last_dirty_rate, milliseconds, seconds};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::history_cache::{BOOTS, History, RUNS};
use crate::records::{JobRecord, Placement, Traced};

/// Number of boots that are kept for each host, of one image and of all.
const BOOTS_KEPT: usize = 5;
const ALL_BOOTS_KEPT: usize = 50;

/// The most kinds of jobs of one tenant whose histories are kept. A program that gets another argument each time is another
/// kind each time.
const KINDS_MAX: usize = 2000;

/// Writes the measured times beside the predictions, and keeps the run for later predictions. A job whose
/// command failed is not kept: it did not do its work.
pub async fn job_ended(cluster: &Cluster, record: &JobRecord) -> Result<(), Problem> {
    let job = &record.job;
    let (Some(started_ms), Some(running_ms), Some(measured_s), Some(placement)) =
        (job.started_ms, job.running_ms, job.measured_s, &record.placement)
    else {
        return Ok(());
    };
    let ended_ms = started_ms + milliseconds(measured_s);
    let succeeded = job.exit_code == Some(0);
    let newest = learned(cluster, record);
    let parts = newest.as_ref().map(|(run, paused_s)| run.parts(*paused_s));
    note_measured(cluster, &job.id, (ended_ms, measured_s), (parts, held_back(record))).await?;
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
        // A job whose end could not be recorded ends once more.
        if history.newest.as_ref() != Some(&job.id) {
            perigee_planner::keep(&mut history.runs, newest.clone());
            history.keep_dirty_rate(dirty);
        }
        history.newest = Some(job.id.clone());
        history.ended_ms = now_ms();
        history
    };
    let key = history_key(&job.spec);
    make_room(cluster, &key, tenant_of(&job.spec.name), KINDS_MAX).await?;
    let kept = cluster.records.update(&key, keep).await?;
    cluster.history_cache.set_history(&key, Arc::new(kept));
    Ok(())
}

/// What the run of a member of a gang shows; `None` of another record, if it has failed, or if its counters were read too late.
pub fn run_of_member(cluster: &Cluster, record: &JobRecord) -> Option<PastRun> {
    record.kind.is_member().then(|| learned(cluster, record))?.map(|(run, _)| run)
}

/// What a run shows, with the seconds in which its VM stood still; `None` if it has failed, or if its counters were read too late.
fn learned(cluster: &Cluster, record: &JobRecord) -> Option<(PastRun, f64)> {
    let (job, placement) = (&record.job, record.placement.as_ref()?);
    let ended_ms = job.started_ms? + milliseconds(job.measured_s?);
    let is_sharp = record.meter.is_sharp(ended_ms.saturating_sub(job.running_ms?));
    (job.exit_code == Some(0) && is_sharp).then(|| {
        let measured = measured(cluster, record, placement, ended_ms);
        (PastRun::learn(&measured), measured.paused_s)
    })
}

/// Writes the measured times of a gang that has succeeded beside its predictions: the parts are those of the rank that took longest.
pub async fn gang_ended(
    cluster: &Cluster,
    gang: &JobId,
    (ended_ms, measured_s): (u64, f64),
    ranks: Option<&RanksRun>,
) -> Result<(), Problem> {
    let slowest = ranks.and_then(RanksRun::slowest).map(|(rank, run)| {
        let still_s = (measured_s - run.parts(0.0).total_s).max(0.0);
        let parts = run.parts(if run.moved { still_s } else { 0.0 });
        (parts, format!("measured: rank {rank} took longest, and the parts are its own"))
    });
    let (parts, figure) = slowest.unzip();
    note_measured(cluster, gang, (ended_ms, measured_s), (parts, figure)).await
}

/// Writes what was measured beside the predictions about a job; `figure` stands with the first one's.
async fn note_measured(
    cluster: &Cluster,
    job: &JobId,
    (ended_ms, measured_s): (u64, f64),
    (parts, figure): (Option<Seconds>, Option<String>),
) -> Result<(), Problem> {
    for key in cluster.records.keys(&prefix(job)).await? {
        if let Some(mut decision) = cluster.records.own::<Decision>(&key).await? {
            let is_new = decision.value.measured_s.is_none();
            measure(&mut decision.value, ended_ms, measured_s, parts);
            if let Some(came) = decision.value.came_true().filter(|_| is_new) {
                cluster.counters.came_true(came.in_range, came.error);
            }
            if decision.value.trigger == Trigger::Submitted {
                let figures = &mut decision.value.plan.figures;
                let new = figure.clone().filter(|figure| !figures.contains(figure));
                figures.extend(new);
            }
            decision.save().await?;
        }
    }
    Ok(())
}

/// Forgets the tenth of a tenant's kinds of jobs that succeeded longest ago, if it has so many and this is one more. To find
/// them, all are read.
pub(crate) async fn make_room(
    cluster: &Cluster,
    key: &str,
    tenant: &str,
    max: usize,
) -> Result<(), Problem> {
    if cluster.records.read::<History>(key).await?.is_some() {
        return Ok(());
    }
    if cluster.records.keys(RUNS).await?.len() < max {
        return Ok(());
    }
    let all = cluster.records.list_after::<History>(RUNS, "", usize::MAX).await?;
    let is_own =
        |history: &History| history.runs.iter().any(|run| tenant_of(&run.traits.name) == tenant);
    let mut own: Vec<(u64, String)> = all
        .into_iter()
        .filter(|(_, history)| is_own(history))
        .map(|(key, history)| (history.ended_ms, key))
        .collect();
    if own.len() < max {
        return Ok(());
    }
    own.sort();
    for (_, old) in own.into_iter().take(max.div_ceil(10)) {
        cluster.records.remove(&old).await?;
        cluster.history_cache.forget_history(&old);
    }
    Ok(())
}

/// Says that the volume server has delayed some requests of the job, and what that has shown; `None` if it has not.
fn held_back(record: &JobRecord) -> Option<String> {
    let Traced::Replayed(Replayed { depth: Some(depth), held, requests, .. }) = record.traced
    else {
        return None;
    };
    Some(format!(
        "while it ran, {held} of its {requests} requests were held back by {} ms, which shows that it keeps \
         {depth:.0} reads in flight",
        HELD_BACK_US / 1000
    ))
}

/// The prediction at submission covers the whole job. A later one covers the rest of it.
fn measure(decision: &mut Decision, ended_ms: u64, measured_s: f64, parts: Option<Seconds>) {
    (decision.measured_s, decision.measured) = match decision.trigger {
        Trigger::Submitted => (Some(measured_s), parts),
        Trigger::TimeLost | Trigger::Asked | Trigger::Drained | Trigger::Balanced => {
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
    let unsettled = moves.iter().filter(|moved| moved.number > record.settled);
    let paused_ms = meter.paused_ms + unsettled.map(|m| m.migration.downtime_ms).sum::<u64>();
    let mut disks = data_disks(placement, &work);
    if let Some(member) = record.kind.member() {
        let data = placement.disks.iter().filter(|disk| disk.data_of.is_some());
        for (disk, placed) in disks.iter_mut().zip(data) {
            let readers = gangs::readers_beside(cluster, member, placed);
            disk.client = gangs::part_of(disk.client, readers);
            disk.far_requests /= readers;
        }
    }
    // Disks of one home wait for the same outage, so it counts once.
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
    // Where a VM has more vCPUs than its host has CPUs, the next run there waits for itself as this one did.
    let waits_for_itself = facts.hosts.iter().any(|host| {
        let was_there = host.id == placement.start || job.host.as_ref() == Some(&host.id);
        was_there && host.cpus < job.spec.cpus
    });
    Measured {
        traits: placement.traits.clone(),
        host: placement.start.clone(),
        moved: record.moves > 0,
        boot_s: seconds(running_ms.saturating_sub(started_ms)),
        wall_s: seconds(ended_ms.saturating_sub(running_ms)),
        paused_s: seconds(paused_ms) + outage_ns as f64 / 1e9,
        vcpu_s: seconds(work.vcpu_ms),
        run_delay_s: work.run_delay_ms.map(seconds).filter(|_| !waits_for_itself),
        cpus: job.spec.cpus_most(),
        volumes: disks.into_iter().map(volume).collect(),
        distance_changed: distance_changed(record, placement),
        replayed: match record.traced {
            Traced::Replayed(replayed) => Some(replayed),
            Traced::NotYet | Traced::Not | Traced::Since { .. } => None,
        },
    }
}

/// Whether the distance to the data changed while the job ran, so that its times belong to no one distance. A VM that
/// moved to its data has one distance for a known share of its requests, and none for the rest.
fn distance_changed(record: &JobRecord, placement: &Placement) -> bool {
    let disks = placement.disks.iter().zip(&record.meter.totals.disks);
    let mut data = disks.filter(|(disk, _)| disk.data_of.is_some());
    let host = record.job.host.as_ref();
    data.any(|(disk, sums)| {
        let left_its_data = disk.home == placement.start && sums.far_requests > 0;
        let far_at_both = record.moves > 0
            && disk.home != placement.start
            && host.is_some_and(|host| *host != disk.home);
        disk.home_changed || left_its_data || far_at_both
    })
}

/// Whether a block trace of the job would show something new: for how many round trips it would wait if it ran
/// far from its data. A job that has run far from its data needs no trace.
pub async fn wants_trace(cluster: &Cluster, record: &JobRecord) -> Result<bool, Problem> {
    let (Some(placement), Some(host)) = (&record.placement, &record.job.host) else {
        return Ok(false);
    };
    let data: Vec<_> = placement.disks.iter().filter(|disk| disk.data_of.is_some()).collect();
    if data.is_empty() || data.iter().any(|disk| disk.home != *host) {
        return Ok(false);
    }
    if let Some(member) = record.kind.member() {
        if !data.iter().all(|disk| gangs::readers_beside(cluster, member, disk) == 1) {
            // The trace would have the others' requests too.
            return Ok(false);
        }
        let runs = gangs::runs_of_rank(cluster, record, member).await?;
        return Ok(runs.iter().all(PastRun::leaves_depth_unknown));
    }
    let history = history(cluster, &record.job.spec).await?;
    Ok(history.runs.iter().all(PastRun::leaves_depth_unknown))
}

pub(super) async fn history(cluster: &Cluster, spec: &JobSpec) -> Result<Arc<History>, Problem> {
    let key = history_key(spec);
    if let Some(history) = cluster.history_cache.history(&key) {
        return Ok(history);
    }
    let history = Arc::new(cluster.records.read(&key).await?.unwrap_or_default());
    cluster.history_cache.set_history(&key, Arc::clone(&history));
    Ok(history)
}

/// A tenant's jobs with the same image and command share a history. Their other differences are in their
/// [`perigee_planner::Traits`].
pub(crate) fn history_key(spec: &JobSpec) -> String {
    let of = match tenant_of(&spec.name) {
        DEFAULT_TENANT => serde_json::json!([spec.image, spec.command]),
        tenant => serde_json::json!([spec.image, spec.command, tenant]),
    };
    format!("{RUNS}{}", digest(&of))
}

/// Forgets what a deleted tenant's jobs have shown.
pub async fn forget_tenant(cluster: &Cluster, tenant: &TenantName) -> Result<(), Problem> {
    let is_own = |history: &History| history.runs.iter().any(|run| tenant.owns(&run.traits.name));
    for (key, history) in cluster.records.list_after::<History>(RUNS, "", usize::MAX).await? {
        if is_own(&history) {
            cluster.records.remove(&key).await?;
            cluster.history_cache.forget_history(&key);
        }
    }
    crate::planning::gang_traffic::forget_tenant(cluster, tenant).await
}

async fn keep_boot(cluster: &Cluster, host: &HostId, boot: &Boot) -> Result<(), Problem> {
    let keep = |old: Option<Vec<Boot>>| with_boot(old.unwrap_or_default(), boot.clone());
    let boots = cluster.records.update(&format!("{BOOTS}{host}"), keep).await?;
    cluster.history_cache.set_boots(host, boots);
    Ok(())
}

/// Forgets the boots at a removed host: the next machine with its name may be another one.
pub async fn forget_host(cluster: &Cluster, host: &HostId) -> Result<(), Problem> {
    cluster.records.remove(&format!("{BOOTS}{host}")).await?;
    cluster.history_cache.forget_boots(host);
    Ok(())
}

/// Adds a boot, the newest last. Jobs of one image don't push out the boots of another one.
fn with_boot(mut boots: Vec<Boot>, newest: Boot) -> Vec<Boot> {
    if boots.iter().filter(|boot| boot.image == newest.image).count() >= BOOTS_KEPT
        && let Some(oldest) = boots.iter().position(|boot| boot.image == newest.image)
    {
        boots.remove(oldest);
    }
    boots.push(newest);
    let excess = boots.len().saturating_sub(ALL_BOOTS_KEPT);
    boots.drain(..excess);
    boots
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(image: &str, seconds: f64) -> Boot {
        Boot { image: image.to_owned(), seconds, cpu_s: 1.0 }
    }

    #[test]
    fn many_boots_of_one_image_do_not_push_out_those_of_another() {
        let mut boots = vec![boot("debian", 10.0)];
        for _ in 0..20 {
            boots = with_boot(boots, boot("other", 600.0));
        }
        assert_eq!((boots.len(), boots[0].seconds), (1 + BOOTS_KEPT, 10.0));
        for number in 0..100 {
            boots = with_boot(boots, boot(&format!("image-{number}"), 1.0));
        }
        assert_eq!(boots.len(), ALL_BOOTS_KEPT);
        assert_eq!(boots[ALL_BOOTS_KEPT - 1].image, "image-99");
    }
}
