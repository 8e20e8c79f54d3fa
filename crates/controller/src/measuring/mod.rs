//! Measures what hosts can do: links, disks, and disks of other hosts (`perigee host measure`).
//!
//! One task carries all measurements out, each in a task of its own. A host takes part in one at a time. What is made for a measurement is recorded
//! before it is made, and the cleaner removes it afterwards, also after a restart of the controller: the measurement itself does not go on
//! then.

mod by_itself;
mod steps;

#[cfg(test)]
pub(crate) use by_itself::idle_neighbour;

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::limits::{MEASURE_S, MEASURED_AGAINST, MEASURED_KINDS, OutOfLimits};
use perigee_model::measurement::{
    HostMeasurement, MeasureHost, MeasurementState, NetworkFigures, RentedKind,
};
use perigee_model::rental::states::RentalState;
use perigee_model::{HostId, Problem, SiteId};
use tokio::task::JoinSet;

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::tasks::Task;
use crate::records::{MEASUREMENTS, MeasurementRecord, measured_kind_key, measurement_key};
use crate::storage::volumes::reachable;

/// Begins to measure a host. The answer comes before anything is measured.
///
/// # Errors
/// `NotFound`; `Conflict` while VMs are there or another measurement needs one of the hosts; `Invalid` beyond a limit; `Unavailable` if one of the hosts
/// does not answer.
pub async fn start(
    cluster: &Cluster,
    host: &HostId,
    ask: MeasureHost,
    by: String,
) -> Result<HostMeasurement, Problem> {
    let what = format!("can't measure host {host}");
    let beyond = |error: OutOfLimits| error.problem(&what);
    MEASURE_S.check(ask.length_s).map_err(beyond)?;
    MEASURED_AGAINST.check(ask.against.len()).map_err(beyond)?;
    reachable(cluster, host)?;
    cluster.hosts.check_not_drained(host, &what)?;
    let vms = vms_at(cluster, host);
    if vms > 0 && !ask.beside_vms {
        let why = format!(
            "VMs are there ({vms}): they would disturb the measurement and be disturbed by it"
        );
        return Err(Problem::conflict(what, why)
            .next("wait until they have ended, move them, or measure beside them: --beside-vms"));
    }
    let against = against(cluster, host, &ask.against)?;
    begin(cluster, host, &against, ask.length_s, by).await
}

/// Records it, and has it carried out.
async fn begin(
    cluster: &Cluster,
    host: &HostId,
    against: &[HostId],
    length_s: u64,
    by: String,
) -> Result<HostMeasurement, Problem> {
    let what = format!("can't measure host {host}");
    cluster.measurements.reserve(host, against).map_err(|(busy, other)| {
        let why = format!("host {busy} takes part in the measurement of host {other}");
        Problem::conflict(&what, why).next(format!(
            "wait until that has ended, or call it off: perigee host measure {other} --cancel"
        ))
    })?;
    let view = HostMeasurement {
        host: host.clone(),
        kind: kind_of(cluster, host),
        state: MeasurementState::Measuring,
        now: "it begins".to_owned(),
        by,
        begun_ms: now_ms(),
        ended_ms: None,
        length_s,
        networks: steps::networks(cluster, against),
        disks: Vec::new(),
    };
    let record = MeasurementRecord { view: view.clone(), volumes: Vec::new() };
    if let Err(problem) = cluster.records.put(&measurement_key(host), &record).await {
        cluster.measurements.ended(host);
        return Err(problem);
    }
    cluster.measurements.note(view.clone());
    cluster.measurements.ready(host);
    Ok(view)
}

/// What was measured of a host last. If it was never measured, what was measured of another host of its kind.
///
/// # Errors
/// `NotFound`.
pub fn get(cluster: &Cluster, host: &HostId) -> Result<HostMeasurement, Problem> {
    // Whoever follows a measurement of this host sees its end, also without figures.
    cluster.measurements.of(host).or_else(|| known(cluster, host)).ok_or_else(|| {
        Problem::not_found(format!("the figures of host {host}"), "it was not measured yet")
            .next(format!("measure it: perigee host measure {host}"))
    })
}

/// As [`get`], but what was called off without a figure counts only where no figures of the host's kind are known; `None` if there is nothing.
pub fn known(cluster: &Cluster, host: &HostId) -> Option<HostMeasurement> {
    let of_kind = || cluster.measurements.of_kind(&kind_of(cluster, host)?);
    let own = || cluster.measurements.of(host);
    let counts =
        |view: &HostMeasurement| view.state != MeasurementState::CalledOff || has_figures(view);
    own().filter(counts).or_else(of_kind).or_else(own)
}

fn has_figures(view: &HostMeasurement) -> bool {
    let has_link = |link: &NetworkFigures| link.rtt_ms.is_some() || link.to_bytes_per_s.is_some();
    view.disks.iter().any(|disk| disk.figures.is_some()) || view.networks.iter().any(has_link)
}

/// Calls a measurement off. What was measured is kept.
///
/// # Errors
/// `Conflict` if the host is not measured now.
pub fn cancel(cluster: &Cluster, host: &HostId) -> Result<HostMeasurement, Problem> {
    if !cluster.measurements.stop(host) {
        let what = format!("can't call the measurement of host {host} off");
        return Err(Problem::conflict(what, "none is under way"));
    }
    get(cluster, host)
}

fn vms_at(cluster: &Cluster, host: &HostId) -> u32 {
    cluster.index.used().get(host).map_or(0, |used| used.vms)
}

/// What was rented, if the host was.
fn kind_of(cluster: &Cluster, host: &HostId) -> Option<RentedKind> {
    let all = cluster.rentals.all();
    let rental = all.into_iter().find(|one| one.host == *host && one.state != RentalState::Gone)?;
    Some(RentedKind { provider: rental.provider, kind: rental.offer.kind })
}

/// Those that were named; otherwise another one of its site and one of each other site. None is drained.
fn against(cluster: &Cluster, host: &HostId, named: &[HostId]) -> Result<Vec<HostId>, Problem> {
    let what = format!("can't measure host {host}");
    let mut hosts: Vec<HostId> = Vec::new();
    for other in named {
        reachable(cluster, other)?;
        cluster.hosts.check_not_drained(other, &what)?;
        if other == host || hosts.contains(other) {
            let why = format!("host {other} is named twice");
            return Err(Problem::invalid(what, why).next("name each other host once"));
        }
        hosts.push(other.clone());
    }
    if !named.is_empty() {
        return Ok(hosts);
    }
    let mut of_sites: BTreeMap<SiteId, HostId> = BTreeMap::new();
    for other in cluster.hosts.up() {
        if other.id != *host && cluster.hosts.drain(&other.id).is_none() {
            of_sites.entry(other.addresses.site.clone()).or_insert_with(|| other.id.clone());
        }
    }
    let most = usize::try_from(MEASURED_AGAINST.max).unwrap_or(usize::MAX);
    Ok(of_sites.into_values().take(most).collect())
}

/// Carries measurements out, and has the first host of each kind of rented ones measured.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut under_way = JoinSet::new();
    let mut by_itself = by_itself::Tried::default();
    // Records of measurements that nobody carries out.
    let mut is_left = true;
    let mut why = "the controller was started again meanwhile";
    loop {
        let look = async {
            if is_left {
                end_left(&cluster, why).await?;
                is_left = false;
                why = "its end could not be recorded, or its task failed";
            }
            by_itself::look(&cluster, &mut by_itself).await?;
            while let Some((host, stop)) = cluster.measurements.take() {
                under_way.spawn(steps::carry_out(Arc::clone(&cluster), host, stop));
            }
            while let Some(ended) = under_way.try_join_next() {
                is_left |= !ended.unwrap_or(false);
            }
            Ok(format!("{} hosts are measured", under_way.len()))
        };
        task.round(look).await;
        tokio::select! {
            () = cluster.measurements.wanted.notified() => {}
            () = tokio::time::sleep(cluster.timing.monitor) => {}
        }
    }
}

/// Ends measurements that an earlier controller has begun, or whose task has panicked. `why` nobody carries them out.
async fn end_left(cluster: &Cluster, why: &str) -> Result<(), Problem> {
    for record in cluster.records.list::<MeasurementRecord>(MEASUREMENTS).await? {
        let is_left =
            record.view.state == MeasurementState::Measuring || !record.volumes.is_empty();
        if is_left && !cluster.measurements.is_running(&record.view.host) {
            steps::end(cluster, record, Some(why.to_owned())).await?;
        }
    }
    Ok(())
}

/// Keeps figures of a kind, and drops the oldest beyond the limit.
pub(crate) async fn keep_kind(cluster: &Cluster, view: &HostMeasurement) -> Result<(), Problem> {
    let Some(kind) = &view.kind else { return Ok(()) };
    cluster.records.put(&measured_kind_key(kind), view).await?;
    cluster.measurements.note_kind(view.clone());
    let kinds = cluster.measurements.kinds();
    let most = usize::try_from(MEASURED_KINDS.max).unwrap_or(usize::MAX);
    for (_, old) in kinds.iter().take(kinds.len().saturating_sub(most)) {
        tracing::info!(
            "the figures of {} of {} are dropped: {most} kinds are kept",
            old.kind,
            old.provider
        );
        cluster.records.remove(&measured_kind_key(old)).await?;
        cluster.measurements.forget_kind(old);
    }
    Ok(())
}
