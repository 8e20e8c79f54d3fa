//! Moves VMs without a job away from overloaded hosts of their site, and to their data, or says which would move, and why.
//!
//! [`look`] gathers what was measured, [`perigee_planner::balance`] decides, and here the moves are asked for, as a person would ask for
//! them. A job's VM is weighed with its neighbours and not moved from here: its own driver decides, because it knows what the job still has
//! to do (`jobs/decide_move.rs`). The disks of a VM that moves come after it.
//!
//! A VM goes to another site only for its data ([`data`]), and only where both sites are switched on: the look at its own site has the hosts of
//! its data too. What is remembered of it comes to the accounts of the site where it is.
//!
//! Decided moves are in the record of the site before they are asked for, so that a controller that is started again does not repeat them at
//! the price of first ones.

mod data;
mod disk_waits;
pub mod explain;
mod look;
mod ways;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::{SetBalance, SiteBalance, VmBalance};
use perigee_model::plan::Trigger;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem, SiteId, VmId};
use perigee_planner::balance::{Balanced, advise, balance};

use disk_waits::DiskWaits;

use crate::clock::now_ms;
use crate::cluster::balance::{BalanceRecord, Looked, Seen, balance_key};
use crate::cluster::tasks::Task;
use crate::cluster::{Alone, Cluster};
use crate::migration::by_itself;
use crate::planning::shared_links::site_of;
use crate::{hosts, migration};

/// So many checks of the hosts are from one look at their loads to the next one.
const CHECKS: u32 = 5;

/// What is remembered of the last look at a site, beside the accounts.
struct LastLook {
    at: Instant,
    waits: DiskWaits,
}

impl Default for LastLook {
    fn default() -> Self {
        Self { at: Instant::now(), waits: DiskWaits::default() }
    }
}

/// `GET /balance`: each site that has a host.
pub fn list(cluster: &Cluster) -> Vec<SiteBalance> {
    hosts::sites(cluster).iter().map(|site| cluster.balances.shown(&site.id)).collect()
}

/// `PUT /sites/{site}/balance`: what is done about overloaded hosts of a site from now on. Moves that are under way come to their end.
///
/// # Errors
/// `NotFound` for a site without a host.
pub async fn set_mode(
    cluster: &Cluster,
    site: &SiteId,
    ask: SetBalance,
) -> Result<SiteBalance, Problem> {
    hosts::site(cluster, site)?;
    let change = |record: Option<BalanceRecord>| BalanceRecord {
        mode: ask.mode,
        ..record.unwrap_or_default()
    };
    let _turn = cluster.balances.turn.lock().await;
    let record = cluster.records.update(&balance_key(site), change).await?;
    cluster.balances.set_mode(site, record.mode);
    Ok(cluster.balances.shown(site))
}

/// Looks at the loads of all sites, again and again.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut known = BTreeMap::new();
    loop {
        task.round(round(&cluster, &mut known)).await;
        tokio::time::sleep(cluster.timing.monitor * CHECKS).await;
    }
}

async fn round(
    cluster: &Arc<Cluster>,
    known: &mut BTreeMap<SiteId, LastLook>,
) -> Result<String, Problem> {
    let sites = hosts::sites(cluster);
    known.retain(|id, _| sites.iter().any(|site| site.id == *id));
    let (mut did, mut failed) = (Vec::new(), None);
    for site in sites {
        let mode = cluster.balances.mode(&site.id);
        if mode == AutoMode::Off {
            known.remove(&site.id);
            continue;
        }
        let last = known.entry(site.id.clone()).or_default();
        match look_at(cluster, &site.id, mode, last).await {
            Ok(seen) => did.push(seen),
            Err(problem) => failed = Some(problem),
        }
    }
    if let Some(problem) = failed {
        return Err(problem);
    }
    Ok(if did.is_empty() { "no site is looked at".to_owned() } else { did.join("; ") })
}

async fn look_at(
    cluster: &Arc<Cluster>,
    site: &SiteId,
    mode: AutoMode,
    last: &mut LastLook,
) -> Result<String, Problem> {
    let accounts = cluster.balances.accounts(site);
    let passed = last.at.elapsed();
    let seen = look::gather(cluster, site, passed, (&accounts, &mut last.waits)).await?;
    last.at = Instant::now();
    let Balanced { decisions: mut vms, not_known } = decide(cluster, site, mode, &seen).await?;
    for vm in vms.iter_mut().filter(|vm| vm.moves) {
        match ways::disks_that_follow(cluster, vm).await {
            Ok(disks) => vm.reason.push_str(&disks),
            Err(problem) => tracing::warn!("what follows VM {} is not known: {problem}", vm.vm),
        }
        let other = site_of(cluster, &vm.to).filter(|_| seen.only_advises(&vm.to));
        if let Some(other) = other {
            let needs = format!(
                "; it does when site {other} is switched on too: perigee site balance {other} on"
            );
            vm.reason.push_str(&needs);
        }
    }
    if mode == AutoMode::On {
        let mut stay = Vec::new();
        for vm in vms.iter_mut().filter(|vm| vm.moves && !seen.only_advises(&vm.to)) {
            // A person may have switched that off meanwhile.
            if cluster.balances.mode(site) != AutoMode::On {
                break;
            }
            if let Err(problem) = move_vm(cluster, vm).await {
                tracing::info!("VM {} stays at {}: {problem}", vm.vm, vm.host);
                vm.moves = false;
                vm.reason = format!("stays at {}: {}: {}", vm.host, problem.what, problem.why);
                stay.push((vm.vm.clone(), vm.host.clone()));
            }
        }
        undo(cluster, site, &stay).await?;
    }
    let is_made =
        |vm: &&VmBalance| vm.moves && (mode != AutoMode::On || !seen.only_advises(&vm.to));
    let (all, moving) = (vms.len(), vms.iter().filter(is_made).count());
    let moves = if mode == AutoMode::On { "move" } else { "would move" };
    let not_known = seen.not_known(&not_known);
    let unknown = not_known.len();
    let looked = Looked { at_ms: now_ms(), vms, not_known, seen: Arc::new(seen) };
    cluster.balances.note(site, mode, looked);
    Ok(format!(
        "{site}: {all} VMs would lose less elsewhere, {moving} {moves}, {unknown} hosts have no known load"
    ))
}

/// Adds up what was seen, and decides. Moves are recorded before they are asked for.
async fn decide(
    cluster: &Cluster,
    site: &SiteId,
    mode: AutoMode,
    seen: &Seen,
) -> Result<Balanced, Problem> {
    let _turn = cluster.balances.turn.lock().await;
    // A person has changed it meanwhile: what was seen counts no longer.
    if cluster.balances.mode(site) != mode {
        return Ok(Balanced::default());
    }
    let adopted = cluster.balances.adopt(site, &seen.look);
    let mut accounts = cluster.balances.accounts(site);
    let balanced = match mode {
        AutoMode::On => balance(&mut accounts, &seen.look, |vm, host| seen.elsewhere(vm, host)),
        _ => advise(&mut accounts, &seen.look, |vm, host| seen.elsewhere(vm, host)),
    };
    let is_made = |one: &VmBalance| one.moves && !seen.only_advises(&one.to);
    if adopted || (mode == AutoMode::On && balanced.decisions.iter().any(is_made)) {
        cluster.keep_accounts(site, &accounts).await?;
    }
    cluster.balances.set_accounts(site, accounts);
    Ok(balanced)
}

/// Takes back what the accounts say of moves that were refused.
async fn undo(cluster: &Cluster, site: &SiteId, stay: &[(VmId, HostId)]) -> Result<(), Problem> {
    if stay.is_empty() {
        return Ok(());
    }
    let _turn = cluster.balances.turn.lock().await;
    let mut accounts = cluster.balances.accounts(site);
    stay.iter().for_each(|(vm, host)| accounts.undo(vm, host));
    cluster.keep_accounts(site, &accounts).await?;
    cluster.balances.set_accounts(site, accounts);
    Ok(())
}

async fn move_vm(cluster: &Arc<Cluster>, vm: &VmBalance) -> Result<(), Problem> {
    let VmBalance { vm, host, to, reason, .. } = vm;
    let request = migration::Request {
        to: to.clone(),
        reason: reason.clone(),
        job_progress: None,
        volumes: VolumesOnMove::Follow,
    };
    let other = site_of(cluster, to);
    if other.is_some_and(|other| cluster.balances.mode(&other) != AutoMode::On) {
        let what = format!("can't move VM {vm} to {to}");
        return Err(Problem::conflict(what, "its site was switched off meanwhile"));
    }
    if let Some(why) = by_itself::waits_for(cluster, host, to, Alone::AtBoth) {
        return Err(Problem::conflict(format!("can't move VM {vm} to {to}"), why));
    }
    let why = (Trigger::Balanced, reason.clone());
    by_itself::begin_recorded(cluster, (vm, host), request, Alone::AtBoth, why).await?;
    tracing::info!("VM {vm} {reason}");
    Ok(())
}
