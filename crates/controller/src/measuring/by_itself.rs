//! The first rented host of each kind is measured without being asked to, and another one when the figures are old: right after it has joined, if no job waits and no VM is there. A VM that
//! comes meanwhile ends that. No job waits for a measurement. The other host is an idle one of the same site: what goes between sites may cost money.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use perigee_model::job::{HostState, JobState};
use perigee_model::measurement::{HostMeasurement, MeasurementState, RentedKind};
use perigee_model::rental::states::RentalState;
use perigee_model::{HostId, Problem};

use super::{begin, vms_at};
use crate::cluster::Cluster;
use crate::planning::measured;

/// Each figure is measured so long; seconds. A job may come at any time.
const LENGTH_S: u64 = 3;

/// Who has asked for it.
pub(super) const ITSELF: &str =
    "Perigee, because no host of this kind was measured in the last month";

/// Until the same host is tried again.
const AGAIN: Duration = Duration::from_secs(600);

/// When hosts were tried.
#[derive(Default)]
pub(super) struct Tried(BTreeMap<HostId, Instant>);

/// Begins the measurements that are missing, and ends those that VMs now disturb.
pub(super) async fn look(cluster: &Cluster, tried: &mut Tried) -> Result<(), Problem> {
    tried.0.retain(|_, at| at.elapsed() < AGAIN);
    let waits = cluster.unfinished_jobs().iter().any(|job| job.job.state == JobState::Queued);
    for rental in cluster.rentals.all() {
        let host = &rental.host;
        let is_drained = cluster.hosts.drain(host).is_some();
        let is_busy = vms_at(cluster, host) > 0 || waits || is_drained;
        if cluster.measurements.is_running(host) {
            let is_own = |view: &HostMeasurement| {
                view.by == ITSELF && view.state == MeasurementState::Measuring
            };
            let view = cluster.measurements.of(host).filter(is_own);
            let is_disturbed = |view: HostMeasurement| {
                is_busy || view.networks.iter().any(|link| vms_at(cluster, &link.with) > 0)
            };
            if view.is_some_and(is_disturbed) {
                cluster.measurements.stop(host);
            }
            continue;
        }
        let kind =
            RentedKind { provider: rental.provider.clone(), kind: rental.offer.kind.clone() };
        let known = cluster.measurements.of_kind(&kind);
        let is_wanted = rental.state == RentalState::Joined
            && !known.is_some_and(|view| measured::counts(cluster, &view))
            && cluster.hosts.state(host) == HostState::Up;
        if is_busy || !is_wanted || tried.0.contains_key(host) {
            continue;
        }
        tried.0.insert(host.clone(), Instant::now());
        let against: Vec<HostId> = idle_neighbour(cluster, host).into_iter().collect();
        if let Err(problem) = begin(cluster, host, &against, LENGTH_S, ITSELF.to_owned()).await {
            tracing::info!("host {host} of a new kind is measured later: {problem}");
        }
    }
    Ok(())
}

/// Another host of the site, which is not drained and has no VM.
pub(crate) fn idle_neighbour(cluster: &Cluster, host: &HostId) -> Option<HostId> {
    let site = cluster.hosts.get(host).ok()?.addresses.site.clone();
    let is_idle = |other: &HostId| {
        other != host
            && vms_at(cluster, other) == 0
            && cluster.hosts.drain(other).is_none()
            && !cluster.measurements.is_busy(other)
    };
    let mut up = cluster.hosts.up().into_iter();
    let found = up.find(|other| other.addresses.site == site && is_idle(&other.id));
    found.map(|other| other.id.clone())
}
