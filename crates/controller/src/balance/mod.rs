//! Moves VMs without a job away from overloaded hosts of their site, or says which would move, and why.
//!
//! [`look`] gathers what was measured, [`perigee_planner::balance`] decides, and here the moves are asked for, as a person would ask for
//! them. A job's VM is weighed with its neighbours and not moved from here: its own driver decides, because it knows what the job still has
//! to do (`jobs/decide_move.rs`). The disks of a VM that moves come after it.
//!
//! Decided moves are in the record of the site before they are asked for, so that a controller that is started again does not repeat them at
//! the price of first ones.

mod look;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use perigee_model::balance::{BalanceMode, SetBalance, SiteBalance, VmBalance};
use perigee_model::plan::Trigger;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{Problem, SiteId};
use perigee_planner::balance::{Accounts, advise, balance};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::balance::{BalanceRecord, Looked, balance_key};
use crate::cluster::tasks::Task;
use crate::{hosts, migration, vms};

/// So many checks of the hosts are from one look at their loads to the next one.
const CHECKS: u32 = 5;

/// What is remembered of a site between two looks.
struct Site {
    looked: Instant,
    accounts: Accounts,
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
    if hosts::sites(cluster).iter().all(|known| known.id != *site) {
        return Err(Problem::not_found(format!("site {site}"), "no host is there")
            .next("`perigee site list` shows the sites"));
    }
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
    let mut sites = BTreeMap::new();
    loop {
        task.round(round(&cluster, &mut sites)).await;
        tokio::time::sleep(cluster.timing.monitor * CHECKS).await;
    }
}

async fn round(
    cluster: &Arc<Cluster>,
    known: &mut BTreeMap<SiteId, Site>,
) -> Result<String, Problem> {
    let sites = hosts::sites(cluster);
    known.retain(|id, _| sites.iter().any(|site| site.id == *id));
    let (mut did, mut failed) = (Vec::new(), None);
    for site in sites {
        let mode = cluster.balances.mode(&site.id);
        if mode == BalanceMode::Off {
            known.remove(&site.id);
            continue;
        }
        let seen = async {
            let mut remembered = match known.remove(&site.id) {
                Some(remembered) => remembered,
                None => Site { looked: Instant::now(), accounts: kept(cluster, &site.id).await? },
            };
            let seen = look_at(cluster, &site.id, mode, &mut remembered).await;
            known.insert(site.id.clone(), remembered);
            seen
        };
        match seen.await {
            Ok(seen) => did.push(seen),
            Err(problem) => failed = Some(problem),
        }
    }
    if let Some(problem) = failed {
        return Err(problem);
    }
    Ok(if did.is_empty() { "no site is looked at".to_owned() } else { did.join("; ") })
}

/// What is kept of the site's accounts: how dear the moves of its VMs are.
async fn kept(cluster: &Cluster, site: &SiteId) -> Result<Accounts, Problem> {
    let record = cluster.records.read::<BalanceRecord>(&balance_key(site)).await?;
    let BalanceRecord { accounts, decided_ms, .. } = record.unwrap_or_default();
    let age = std::time::Duration::from_millis(cluster.clock.age_ms(decided_ms));
    Ok(accounts.after(age.as_secs_f64()))
}

async fn look_at(
    cluster: &Arc<Cluster>,
    site: &SiteId,
    mode: BalanceMode,
    remembered: &mut Site,
) -> Result<String, Problem> {
    let seen =
        look::gather(cluster, site, remembered.looked.elapsed(), &remembered.accounts).await?;
    remembered.looked = Instant::now();
    let decide = |accounts: &mut Accounts| match mode {
        BalanceMode::On => balance(accounts, &seen.look, |vm, host| seen.elsewhere(vm, host)),
        _ => advise(accounts, &seen.look, |vm, host| seen.elsewhere(vm, host)),
    };
    let mut accounts = remembered.accounts.clone();
    let balanced = decide(&mut accounts);
    if mode == BalanceMode::On && balanced.decisions.iter().any(|decision| decision.moves) {
        let kept = &accounts;
        let change = |record: Option<BalanceRecord>| BalanceRecord {
            accounts: kept.clone(),
            decided_ms: now_ms(),
            ..record.unwrap_or_default()
        };
        cluster.records.update(&balance_key(site), change).await?;
    }
    remembered.accounts = accounts;
    let mut decisions = balanced.decisions;
    if mode == BalanceMode::On {
        for vm in decisions.iter_mut().filter(|vm| vm.moves) {
            // A person may have switched that off meanwhile.
            if cluster.balances.mode(site) != BalanceMode::On {
                break;
            }
            if let Err(problem) = move_vm(cluster, vm).await {
                tracing::info!("VM {} stays at {}: {problem}", vm.vm, vm.host);
                vm.moves = false;
                vm.reason = format!("stays at {}: {}: {}", vm.host, problem.what, problem.why);
            }
        }
    }
    let (all, moving) = (decisions.len(), decisions.iter().filter(|vm| vm.moves).count());
    let moves = if mode == BalanceMode::On { "move" } else { "would move" };
    let not_known = seen.not_known(&balanced.not_known);
    let unknown = not_known.len();
    cluster.balances.note(site, mode, Looked { at_ms: now_ms(), vms: decisions, not_known });
    Ok(format!(
        "{site}: {all} VMs would lose less elsewhere, {moving} {moves}, {unknown} hosts have no known load"
    ))
}

async fn move_vm(cluster: &Arc<Cluster>, vm: &VmBalance) -> Result<(), Problem> {
    let VmBalance { vm, host, to, reason, .. } = vm;
    let request = migration::Request {
        to: to.clone(),
        reason: reason.clone(),
        job_progress: None,
        volumes: VolumesOnMove::Follow,
    };
    vms::move_by_itself(cluster, (vm, host), request, Trigger::Balanced, reason.clone()).await?;
    tracing::info!("VM {vm} {reason}");
    Ok(())
}
