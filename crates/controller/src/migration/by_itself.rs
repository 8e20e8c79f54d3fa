//! Moves that no person has asked for. Whoever wants one comes here: a job's driver (`jobs/decide_move.rs`, and `jobs/gang/decide_move.rs` for
//! a job with several VMs), the balancer (`balance/`), and drains (`drain/`). What holds for all of them:
//!
//! - A VM does not go back by itself to the host from which a person has moved it last. A drain is a person's wish too, and a newer one: it
//!   takes such a host if there is no other.
//! - After moves that failed a VM stays for a while ([`refused_after`]).
//! - A host takes part in one move at a time ([`Alone`]): loads that one move changes are no reason for another one. A drain empties its host
//!   whatever the loads are, so that rule holds only for where its VMs go.
//! - A job that has a budget, or whose tenant has one for the month, goes to no host that has to be paid for and has another price: nothing
//!   was reserved for that.
//! - Each move makes that VM's next one dearer ([`note`], `Balances::price_factor`). A drain has no price.

use std::sync::Arc;

use perigee_model::job::{Migration, MigrationState};
use perigee_model::plan::{Trigger, Way};
use perigee_model::{HostId, Problem, VmId};
use perigee_planner::RefusedWay;
use perigee_planner::balance::TAKEN;

use super::aborted::refused_after;
use super::request::{ASKED, Request, requested};
use crate::cluster::{Alone, Cluster};
use crate::planning::shared_links;
use crate::records::{JobRecord, vm_of};
use crate::{networks, planning, tpm};

/// The host from which a person has moved the VM last, if it may not go back there by itself.
pub fn taken_from(cluster: &Cluster, vm: &VmId) -> Option<HostId> {
    let moves = cluster.index.migrations_of(vm).into_iter().rev();
    let mut done = moves.filter(|record| record.migration.state == MigrationState::Completed);
    let last = done.find(|record| record.migration.reason == ASKED)?;
    Some(last.migration.from.clone())
}

/// To which of these hosts a VM does not move now, because moves there have failed.
pub fn failed_lately(cluster: &Cluster, vm: &VmId, hosts: &[HostId]) -> Vec<RefusedWay> {
    let moves = cluster.index.migrations_of(vm);
    let moves: Vec<&Migration> = moves.iter().map(|record| &record.migration).collect();
    refused_after(&moves, hosts, |at_ms| cluster.clock.age_ms(at_ms))
}

/// Where a job's VM does not go by itself now.
pub fn refused(cluster: &Cluster, record: &JobRecord, vm: &VmId) -> Vec<RefusedWay> {
    let hosts: Vec<HostId> = cluster.hosts.up().into_iter().map(|host| host.id.clone()).collect();
    let mut all = failed_lately(cluster, vm, &hosts);
    let no_move = |(to, why)| RefusedWay { way: Way::Migrate, to, why };
    all.extend(taken_from(cluster, vm).map(|from| no_move((from, TAKEN.to_owned()))));
    for host in cluster.hosts.drained() {
        let why = cluster.hosts.why_drained(&host).unwrap_or_default();
        let ways = [Way::Migrate, Way::Copy];
        all.extend(ways.map(|way| RefusedWay { way, to: host.clone(), why: why.clone() }));
    }
    let unable = networks::refusing(cluster, &networks::kind_of(record));
    let unable = unable.into_iter().chain(tpm::refusing(cluster, record));
    let unable = unable.chain(super::ruled_out(cluster, record));
    all.extend(unable.chain(with_other_price(cluster, record)).map(no_move));
    all
}

/// The hosts that have to be paid for and whose price is another one than that of the VM's host. What a job with a budget costs there was
/// not reserved when the job started.
pub fn with_other_price(cluster: &Cluster, record: &JobRecord) -> Vec<(HostId, String)> {
    let has_budget = record.job.spec.money.budget.is_some()
        || cluster.accounts.quota_of(record.job.id.as_str()).budget_month.is_some();
    let prices = cluster.prices.now(&cluster.rentals).filter(|_| has_budget);
    let Some(mut prices) = prices else { return Vec::new() };
    let mut price = |host: &HostId| {
        let site = cluster.hosts.get(host).ok()?.addresses.site.clone();
        prices.of(host, &site)
    };
    let own = record.job.host.as_ref().and_then(&mut price);
    let up = cluster.hosts.up().into_iter().filter_map(|host| {
        let its = price(&host.id)?;
        let why = "it has another price, and the job has a budget".to_owned();
        (own.as_ref() != Some(&its)).then(|| (host.id.clone(), why))
    });
    up.collect()
}

/// Which other move a move from one host to the other would have to wait for, in plain words. By the time of its turn a move that load is the
/// reason of may not pay any more, so nobody queues for it.
pub fn waits_for(cluster: &Cluster, from: &HostId, to: &HostId, alone: Alone) -> Option<String> {
    let in_moves = cluster.index.hosts_in_moves();
    if let Some(host) = alone.hosts(from, to).find(|host| in_moves.contains(host)) {
        return Some(format!("host {host} takes part in another move"));
    }
    let is_of_load = alone == Alone::AtBoth;
    (is_of_load && shared_links::is_busy(cluster, from, to))
        .then(|| format!("another VM moves over the link to {to}"))
}

/// Begins a move of a VM that is at this host.
///
/// # Errors
/// `Conflict` if the VM has left, or one of the hosts is in another move; as [`super::request()`].
pub async fn begin(
    cluster: &Arc<Cluster>,
    record: &JobRecord,
    from: &HostId,
    request: Request,
    alone: Alone,
) -> Result<Migration, Problem> {
    let vm = vm_of(&record.job.id);
    if cluster.index.host_of(record).as_ref() != Some(from) {
        let what = format!("can't move VM {vm} to {}", request.to);
        return Err(Problem::conflict(what, "it has left already"));
    }
    if alone == Alone::AtBoth && taken_from(cluster, &vm).as_ref() == Some(&request.to) {
        return Err(Problem::conflict(format!("can't move VM {vm} to {}", request.to), TAKEN));
    }
    requested(cluster, record, request, alone).await
}

/// The same, with a record of why.
///
/// # Errors
/// `NotFound` if the VM has ended; as [`begin`].
pub async fn begin_recorded(
    cluster: &Arc<Cluster>,
    (vm, from): (&VmId, &HostId),
    request: Request,
    alone: Alone,
    (trigger, summary): (Trigger, String),
) -> Result<(), Problem> {
    let Some(record) = cluster.index.of_vm(vm) else {
        return Err(Problem::not_found(format!("VM {vm}"), "it has just ended"));
    };
    let cost = planning::move_cost(cluster, &record, from, &request.to).await?;
    begin(cluster, &record, from, request, alone).await?;
    let figures = cost.map_or_else(|why| vec![why.to_string()], |cost| cost.figures);
    let plan = planning::asked_plan(figures);
    // The VM moves, whether that is recorded or not.
    if let Err(problem) = planning::record(cluster, &record.job.id, trigger, plan, summary).await {
        tracing::warn!("VM {vm} moves, and why could not be recorded: {problem}");
    }
    Ok(())
}

/// Notes a change that nobody has asked for: each one makes the VM's next one dearer. Where that can't be recorded, it counts until the
/// controller ends.
pub async fn note(cluster: &Cluster, vm: &VmId, hosts: (&HostId, &HostId)) {
    if let Err(problem) = cluster.note_change(vm, hosts).await {
        tracing::warn!("how dear the next move of VM {vm} is could not be recorded: {problem}");
    }
}
