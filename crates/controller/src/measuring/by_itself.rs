//! The first rented host of each kind is measured without being asked to: right after it has joined, if no job waits and no VM is there. A VM that
//! comes meanwhile ends that. No job waits for a measurement.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use perigee_model::job::{HostState, JobState};
use perigee_model::measurement::{MeasureHost, RentedKind};
use perigee_model::rental::states::RentalState;
use perigee_model::{HostId, Problem};

use super::{start, vms_at};
use crate::cluster::Cluster;

/// Each figure is measured so long; seconds. A job may come at any time.
const LENGTH_S: u64 = 3;

/// Who has asked for it.
pub(super) const ITSELF: &str = "Perigee, because no host of this kind was measured yet";

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
            let by_itself = cluster.measurements.of(host).is_some_and(|view| view.by == ITSELF);
            if is_busy && by_itself {
                cluster.measurements.stop(host);
            }
            continue;
        }
        let kind =
            RentedKind { provider: rental.provider.clone(), kind: rental.offer.kind.clone() };
        let is_wanted = rental.state == RentalState::Joined
            && cluster.measurements.of_kind(&kind).is_none()
            && cluster.hosts.state(host) == HostState::Up;
        if is_busy || !is_wanted || tried.0.contains_key(host) {
            continue;
        }
        tried.0.insert(host.clone(), Instant::now());
        let ask = MeasureHost { against: Vec::new(), length_s: LENGTH_S, beside_vms: false };
        if let Err(problem) = start(cluster, host, ask, ITSELF.to_owned()).await {
            tracing::info!("host {host} of a new kind is measured later: {problem}");
        }
    }
    Ok(())
}
