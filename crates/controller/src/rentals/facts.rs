//! What is known of a rental when its driver decides.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::drain::DrainHost;
use perigee_model::job::HostState;
use perigee_model::rental::states::{Known, RentalState, RentedHost, Requested};
use perigee_model::rental::{EndedBy, HostFound, Rental, is_machine};
use perigee_model::vm::Accelerator;
use perigee_model::{HostId, Problem};

use super::kept;
use crate::cluster::Cluster;
use crate::drain;
use crate::records::{HostRecord, RentalIntent};

/// Why one is given back whose host is silent.
const LEASE_OVER: &str =
    "its host has not answered for the length of its lease, after which a host ends itself";

/// How often a provider is asked for one rental.
pub const ASKS_MAX: u32 = 5;

/// Its host, as the cluster knows it.
///
/// # Errors
/// If the store can't be read.
pub async fn rented_host(cluster: &Cluster, host: &HostId) -> Result<RentedHost, Problem> {
    if cluster.hosts.get(host).is_ok() {
        return Ok(match cluster.hosts.state(host) {
            HostState::Up => RentedHost::Up,
            HostState::Unreachable => RentedHost::Silent,
        });
    }
    // One with addresses that this controller can't use is not in memory.
    let record: Option<HostRecord> = cluster.records.read(&format!("hosts/{host}")).await?;
    Ok(record.map_or(RentedHost::Unknown, |_| RentedHost::Silent))
}

/// How long the host has been silent. One that is not in memory was asked for nothing since the controller's start.
fn silent_for(cluster: &Cluster, host: &HostId) -> Duration {
    match cluster.hosts.get(host) {
        Ok(_) => cluster.hosts.silent_for(host),
        Err(_) => Duration::from_millis(cluster.clock.age_ms(cluster.begun_ms)),
    }
}

/// What is known now.
///
/// # Errors
/// If the store can't be read.
pub async fn known(
    cluster: &Arc<Cluster>,
    rental: &Rental,
    intent: &RentalIntent,
) -> Result<Known, Problem> {
    let timing = cluster.timing.rentals;
    let is_past = |since_ms: Option<u64>, length: Duration| {
        since_ms.is_some_and(|ms| Duration::from_millis(cluster.clock.age_ms(ms)) >= length)
    };
    let asked_all = rental.asks >= ASKS_MAX;
    let is_late = match rental.state {
        RentalState::Asked => asked_all,
        RentalState::Starting => is_past(rental.asked_ms, timing.join),
        _ => false,
    };
    let pause_is_over = rental.asks == 0 || is_past(rental.asked_ms, timing.again);
    let host = rented_host(cluster, &rental.host).await?;
    // Whoever ends it at once waits for nothing that is there.
    let looks = rental.state == RentalState::Draining && host == RentedHost::Up && !intent.now;
    Ok(Known {
        state: rental.state,
        requested: rental.requested,
        seen: cluster.rentals.seen(rental, timing.grace),
        host,
        is_lease_over: host == RentedHost::Silent
            && silent_for(cluster, &rental.host) >= timing.lease,
        is_given_back: rental.ends_because.is_some(),
        is_forced: intent.now,
        is_late,
        // What is made where nothing is listed could not be found again.
        may_ask: !asked_all && pause_is_over && cluster.rentals.has_listed(&rental.provider),
        is_empty: if looks { is_empty(cluster, rental).await? } else { None },
    })
}

/// Whether nothing is at the host, which is drained, and its replicas let it go; `None` if that is not known.
async fn is_empty(cluster: &Arc<Cluster>, rental: &Rental) -> Result<Option<bool>, Problem> {
    let host = &rental.host;
    if cluster.hosts.drain(host).is_none() {
        return Ok(None);
    }
    let look = drain::drain(cluster, host, String::new(), DrainHost { dry_run: true }).await;
    match look.ok().and_then(|look| look.left).map(|left| left.is_empty()) {
        Some(true) => kept::lets_go(cluster, rental).await.map(Some),
        other => Ok(other),
    }
}

/// What the rental's host has shown to be; `None` if it has said nothing yet, or what can't be.
pub fn found(cluster: &Cluster, rental: &Rental) -> Option<HostFound> {
    let report = cluster.hosts.report(&rental.host)?;
    let kvm = report.accelerator == Accelerator::Kvm;
    let found = HostFound { cpus: report.cpus, memory_bytes: report.memory_bytes, kvm };
    is_machine(found.cpus, found.memory_bytes).then_some(found)
}

/// When the first job began that runs at the rental's host; Unix time.
pub fn first_job_ms(cluster: &Cluster, rental: &Rental) -> Option<u64> {
    let jobs = cluster.unfinished_jobs().into_iter().filter(|record| {
        let is_there = cluster.index.host_of(record).as_ref() == Some(&rental.host);
        record.vm_started && !record.kind.is_persistent_vm() && is_there
    });
    jobs.filter_map(|record| record.job.started_ms).min()
}

/// Who or what ends a rental that was not to end yet, and why.
pub fn why_ends(
    cluster: &Cluster,
    rental: &Rental,
    intent: &RentalIntent,
) -> Option<(EndedBy, String)> {
    if let Some(by) = &intent.ended_by {
        let why = intent.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        let ended_by = if intent.by_rule { EndedBy::Rule } else { EndedBy::Person };
        return Some((ended_by, format!("{by} gave it back{why}")));
    }
    if rental.notice_ms.is_some() {
        return Some((EndedBy::Provider, "the provider takes it back".to_owned()));
    }
    let refused_all = rental.requested == Requested::Nothing && rental.asks >= ASKS_MAX;
    if rental.state == RentalState::Asked && refused_all {
        let why = format!("the provider was asked {ASKS_MAX} times: {}", rental.why);
        return Some((EndedBy::Refused, why));
    }
    let wanted_ms = rental.since_ms(RentalState::Wanted)?;
    let for_ms = rental.until_ms?.saturating_sub(wanted_ms);
    let is_over = cluster.clock.age_ms(wanted_ms) >= for_ms;
    is_over.then(|| (EndedBy::Time, "the time for which it was rented is over".to_owned()))
}

/// Why one that nobody has given back is given up.
pub fn why_late(cluster: &Cluster, rental: &Rental) -> (EndedBy, String) {
    let is_known = cluster.hosts.get(&rental.host).is_ok();
    match (rental.state, rental.requested) {
        (RentalState::Asked | RentalState::Joined, _) if is_known => {
            (EndedBy::Silent, LEASE_OVER.to_owned())
        }
        (RentalState::Asked, Requested::Perhaps) => {
            let asks = rental.asks;
            let why = format!("the provider was asked {asks} times, and never showed an instance");
            (EndedBy::NeverCame, why)
        }
        (RentalState::Joined, _) => {
            (EndedBy::Person, "its host was removed from the cluster".to_owned())
        }
        _ => (EndedBy::NeverCame, "its host did not join in time".to_owned()),
    }
}
