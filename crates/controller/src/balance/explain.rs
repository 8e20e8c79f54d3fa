//! Where one VM stands: `GET /vms/{vm}/balance`.

use std::time::Duration;

use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::{MOVES_SHOWN, Moved, VmFigures, VmStanding};
use perigee_model::job::JobState;
use perigee_model::{HostId, Problem, SiteId, VmId};
use perigee_planner::Verdict;
use perigee_planner::balance::explain;

use crate::cluster::Cluster;
use crate::cluster::balance::Looked;
use crate::migration::by_itself;
use crate::planning::shared_links::site_of;
use crate::records::JobRecord;
use crate::{planning, vms};

/// What the last look has shown of the VM, its accounts and moves, and what comes next.
///
/// # Errors
/// `NotFound`; if the store can't be read.
pub async fn of_vm(cluster: &Cluster, vm: &VmId) -> Result<VmStanding, Problem> {
    let record = cluster.index.of_vm(vm).ok_or_else(|| vms::unknown(vm))?;
    let host = cluster.index.host_of(&record);
    let at = host.as_ref().and_then(|host| cluster.hosts.get(host).ok());
    let site = at.map(|host| host.addresses.site.clone());
    let mode = site.as_ref().map(|site| cluster.balances.mode(site));
    let looked = site.as_ref().and_then(|site| cluster.balances.looked(site));
    let figures = site.as_ref().zip(looked.as_ref());
    let figures = figures.and_then(|(site, looked)| figures_of(cluster, vm, site, looked));
    let price_factor = cluster.balances.price_factor(vm);
    let figures = figures.unwrap_or_default();
    let figures = VmFigures { price_factor, ..figures };
    let next = match (&host, &site) {
        (Some(host), Some(site)) => {
            next(cluster, (vm, &record), (host, site), looked.as_ref()).await?
        }
        _ => "it is at no host".to_owned(),
    };
    let gang = record.kind.member().and_then(|member| cluster.index.job(&member.gang));
    Ok(VmStanding {
        vm: vm.clone(),
        job: record.kind.job_of(&record.job.id).cloned(),
        host,
        site,
        mode,
        looked_ms: looked.map(|looked| looked.at_ms),
        may_migrate: gang.as_deref().unwrap_or(&record).job.spec.may_migrate,
        figures,
        moves: moves(cluster, vm),
        next,
    })
}

fn figures_of(cluster: &Cluster, vm: &VmId, site: &SiteId, looked: &Looked) -> Option<VmFigures> {
    let seen = &looked.seen;
    let elsewhere = |host: &HostId| {
        let way = seen.ways.get(&(vm.clone(), host.clone()));
        way.cloned().unwrap_or_else(|| Err(String::new()))
    };
    explain(&cluster.balances.accounts(site), &seen.look, vm, elsewhere)
}

fn moves(cluster: &Cluster, vm: &VmId) -> Vec<Moved> {
    let all = cluster.index.migrations_of(vm).into_iter().rev();
    let shown = all.take(MOVES_SHOWN).map(|record| {
        let of = &record.migration;
        Moved {
            at_ms: of.started_ms,
            from: of.from.clone(),
            to: of.to.clone(),
            state: of.state,
            reason: of.reason.clone(),
        }
    });
    shown.collect()
}

/// What would happen next, and why.
async fn next(
    cluster: &Cluster,
    (vm, record): (&VmId, &JobRecord),
    (host, site): (&HostId, &SiteId),
    looked: Option<&Looked>,
) -> Result<String, Problem> {
    let under_way = cluster.index.migrations_of(vm).into_iter();
    let mut under_way = under_way.filter(|record| !record.migration.state.is_final());
    if let Some(moving) = under_way.next() {
        return Ok(format!("it moves to {} now", moving.migration.to));
    }
    if let Some(drain) = cluster.hosts.why_drained(host) {
        return Ok(format!("{drain}: `perigee host info {host}` says what becomes of it"));
    }
    if record.job.state != JobState::Running {
        return Ok(format!("stays at {host}: it does not run"));
    }
    if let Some(member) = record.kind.member() {
        let gang = &member.gang;
        return Ok(format!(
            "moves with the other VMs of its job, or not: perigee job explain {gang}"
        ));
    }
    if !record.kind.is_persistent_vm() {
        return of_job(cluster, (vm, record), host).await;
    }
    if !record.job.spec.may_migrate {
        return Ok(format!(
            "stays at {host}: it has move: never (`perigee vm set {vm} --move auto` lets it move)"
        ));
    }
    let Some(looked) = looked else {
        return Ok(match cluster.balances.mode(site) {
            AutoMode::Off => format!(
                "stays at {host}: nobody looks at the loads of site {site} (perigee site balance {site} advise)"
            ),
            _ => format!("stays at {host}: site {site} has not been looked at yet"),
        });
    };
    if let Some(decision) = looked.vms.iter().find(|decision| decision.vm == *vm) {
        return Ok(decision.reason.clone());
    }
    // The reason may name VMs of other tenants; `GET /balance` has it, for admins.
    if looked.not_known.iter().any(|one| one.host == *host) {
        return Ok(format!("stays at {host}: the host's load is not known now"));
    }
    let not_weighed = data_not_weighed(cluster, record, site);
    Ok(format!("stays at {host}: it would have lost no less elsewhere{not_weighed}"))
}

/// That nobody looks at the sites of some of its data, so that it can't go there; nothing if that is not so.
fn data_not_weighed(cluster: &Cluster, record: &JobRecord, site: &SiteId) -> String {
    let sites = record.disks_needed().filter_map(|disk| site_of(cluster, &disk.home));
    let mut others = sites.filter(|other| other != site);
    let is_off = |other: &SiteId| cluster.balances.mode(other) == AutoMode::Off;
    let off = others.find(is_off).map(|other| {
        format!("; nobody looks at site {other}, where it has data (perigee site balance {other} advise)")
    });
    off.unwrap_or_default()
}

/// A job's own driver decides.
async fn of_job(
    cluster: &Cluster,
    (vm, record): (&VmId, &JobRecord),
    host: &HostId,
) -> Result<String, Problem> {
    let Some(mut running) = planning::running(cluster, record, Duration::ZERO).await? else {
        return Ok(format!("stays at {host}: its command has not begun"));
    };
    running.refused = by_itself::refused(cluster, record, vm);
    Ok(match perigee_planner::consider(&running) {
        Verdict::Stay { reason, .. } => format!("stays at {host}: {reason}"),
        Verdict::Move { to, reason, .. } if to == *host => format!("its data come to it: {reason}"),
        Verdict::Move { to, reason, .. } => format!("moves {host} → {to}: {reason}"),
    })
}
