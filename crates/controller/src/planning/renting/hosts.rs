//! The hosts that are there or starting, with the jobs that run there.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::HostId;
use perigee_model::plan::Estimate;
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;
use perigee_model::vm::Accelerator;
use perigee_planner::queue::Demand;
use perigee_planner::rent::{Host, Rented, Running, UNKNOWN_START};

use super::{STARTS_S, with_disk};
use crate::cluster::renter::{Basis, kind_key};
use crate::cluster::{Cluster, capacity, capacity_of, demand_of};
use crate::planning::seconds;
use crate::records::JobRecord;

/// A job whose end nobody knows is expected to run for so long, and at most so much longer.
const UNKNOWN_LEFT_S: (f64, f64) = (600.0, 3600.0);

/// What has taken longer than predicted goes on for a while.
const OVERDUE_S: (f64, f64) = (30.0, 60.0);

/// All hosts to which the rule may let jobs go, each once.
pub fn all(cluster: &Cluster, basis: &Basis) -> Vec<Host> {
    let used = cluster.index.used();
    let rentals = cluster.rentals.all().into_iter().filter(|rental| !rental.state.is_over());
    let rentals: BTreeMap<HostId, Rental> =
        rentals.map(|rental| (rental.host.clone(), rental)).collect();
    let mut running = running(cluster);
    let mut hosts: Vec<Host> = Vec::new();
    for link in cluster.hosts.able() {
        let Some(report) = cluster.hosts.report(&link.id) else { continue };
        let rental = rentals.get(&link.id);
        let of_rule = rental.filter(|rental| rental.rented_for.is_some());
        let is_drained = cluster.hosts.drain(&link.id).is_some();
        if rental.is_some_and(is_leaving) || is_drained && of_rule.is_none() {
            continue;
        }
        let mut room = capacity(&report);
        room.take(used.get(&link.id).map(|used| used.persistent).unwrap_or_default());
        if is_drained {
            // It costs money until it is given back, and has no room.
            room = Demand::default();
        }
        let there = running.remove(&link.id).unwrap_or_default();
        hosts.push(Host {
            host: link.id.clone(),
            cpus: room.cpus,
            memory_bytes: room.memory_bytes,
            kvm: report.accelerator == Accelerator::Kvm,
            ready_in_s: 0.0,
            rented: of_rule.map(|rental| rented(cluster, rental, there.is_empty())),
            running: there,
        });
    }
    for rental in rentals.values().filter(|rental| !is_leaving(rental)) {
        if hosts.iter().any(|host| host.host == rental.host) {
            continue;
        }
        let mut host = starting(cluster, basis, rental);
        if cluster.hosts.drain(&rental.host).is_some() {
            if rental.rented_for.is_none() {
                continue;
            }
            // It does not answer now. It counts, costs money, and has no room.
            let is_idle = !running.contains_key(&rental.host);
            (host.cpus, host.memory_bytes, host.ready_in_s) = (0, 0, 0.0);
            host.rented = Some(rented(cluster, rental, is_idle));
        }
        hosts.push(host);
    }
    hosts
}

fn is_leaving(rental: &Rental) -> bool {
    let is_over =
        matches!(rental.state, RentalState::Draining | RentalState::Ending | RentalState::Gone);
    is_over || rental.ends_because.is_some()
}

/// A host that was asked for, or that has joined and does not answer: it counts as room, so that nothing is rented twice.
fn starting(cluster: &Cluster, basis: &Basis, rental: &Rental) -> Host {
    let kind = kind_key(&rental.provider, &rental.offer.kind);
    let found = basis.found.get(&kind);
    let offer = found.map_or_else(|| rental.offer.clone(), |found| found.correct(&rental.offer));
    let room = capacity_of(offer.cpus, offer.memory_bytes);
    let start = basis.rest.starts.get(&kind);
    let expected_s = start.map_or(UNKNOWN_START.expected_s, |start| start.expected_s);
    let of_rule = rental.rented_for.is_some();
    Host {
        host: rental.host.clone(),
        cpus: room.cpus,
        memory_bytes: room.memory_bytes,
        kvm: offer.kvm == Some(true),
        ready_in_s: (expected_s - asked_s(cluster, rental)).max(STARTS_S),
        running: Vec::new(),
        rented: of_rule.then(|| Rented { idle_s: None, ..rented(cluster, rental, false) }),
    }
}

/// For how long the provider has been asked for it, or would have been.
fn asked_s(cluster: &Cluster, rental: &Rental) -> f64 {
    let asked_ms = rental.since_ms(RentalState::Asked);
    seconds(cluster.clock.age_ms(asked_ms.unwrap_or_else(|| rental.begun_ms())))
}

/// Whether a host that is starting should have come in 9 of 10 cases.
pub fn is_late(cluster: &Cluster, basis: &Basis, rental: &Rental) -> bool {
    let start = basis.rest.starts.get(&kind_key(&rental.provider, &rental.offer.kind));
    asked_s(cluster, rental) > start.map_or(UNKNOWN_START.high_s, |start| start.high_s)
}

fn rented(cluster: &Cluster, rental: &Rental, is_idle: bool) -> Rented {
    let (idle_since_ms, waiting_per_hour) = cluster.renter.last_use(&rental.host);
    let idle_s = idle_since_ms.map_or(0.0, |since_ms| seconds(cluster.clock.age_ms(since_ms)));
    let first_ms = rental.since_ms(RentalState::Asked);
    let reserved = rental.reserved_until_ms.zip(first_ms);
    let reserved_s = reserved.map_or(0.0, |(until, first)| seconds(until.saturating_sub(first)));
    let paid_s = if first_ms.is_some() { asked_s(cluster, rental) } else { 0.0 };
    // Before it is asked for, what it will reserve is not in the budget either.
    let will_s = rental.rented_for.as_ref().map_or(0, |of| of.reserve_s) as f64;
    let reserved_s = if first_ms.is_some() { reserved_s } else { will_s };
    Rented {
        kind: kind_key(&rental.provider, &rental.offer.kind),
        spot: rental.offer.spot,
        price: with_disk(&rental.offer.price, rental.disk_bytes),
        paid_s,
        idle_s: is_idle.then_some(idle_s),
        reserved_s: (reserved_s - paid_s).max(0.0),
        waiting_per_hour,
    }
}

/// Where a job's VM is, or starts.
pub fn place_of(cluster: &Cluster, record: &JobRecord) -> Option<HostId> {
    let granted = || Some(cluster.index.grant_of(&record.job.id)?.host.clone());
    cluster.index.host_of(record).or_else(granted)
}

/// The jobs and VMs that are at a host.
pub fn records_at(cluster: &Cluster, host: &HostId) -> Vec<Arc<JobRecord>> {
    let is_there =
        |record: &Arc<JobRecord>| place_of(cluster, record).is_some_and(|place| place == *host);
    cluster.unfinished_jobs().into_iter().filter(is_there).collect()
}

/// What runs at each host, without VMs that have no job: what these have is never free.
fn running(cluster: &Cluster) -> BTreeMap<HostId, Vec<Running>> {
    let mut all: BTreeMap<HostId, Vec<Running>> = BTreeMap::new();
    for record in cluster.unfinished_jobs() {
        if record.kind.is_persistent_vm() || record.kind.is_gang() {
            continue;
        }
        let Some(host) = place_of(cluster, &record) else { continue };
        let demand = demand_of(&record);
        let (left_s, left_high_s) = left(cluster, &record);
        let (cpus, memory_bytes) = (demand.cpus, demand.memory_bytes);
        all.entry(host).or_default().push(Running { cpus, memory_bytes, left_s, left_high_s });
    }
    all
}

/// The seconds until its end: by its figures, else by what was predicted before, else by its timeout.
fn left(cluster: &Cluster, record: &JobRecord) -> (f64, f64) {
    let now = cluster.index.predicted_end(&record.job.id).left;
    let begun_s = record.job.started_ms.map_or(0.0, |ms| seconds(cluster.clock.age_ms(ms)));
    let rest = |whole: Estimate| (whole.expected_s - begun_s, whole.high_s - begun_s);
    let predicted = now.map(|left| (left.expected_s, left.high_s));
    let predicted = predicted.or_else(|| record.job.predicted.map(rest));
    let (expected_s, high_s) = predicted.unwrap_or(UNKNOWN_LEFT_S);
    let most_s =
        record.job.spec.timeout_s.map_or(f64::INFINITY, |timeout_s| {
            timeout_s as f64 + super::predict::AROUND_S - begun_s
        });
    let bounded = |s: f64, least_s: f64| s.min(most_s).max(least_s);
    (bounded(expected_s, OVERDUE_S.0), bounded(high_s, OVERDUE_S.1))
}
