//! Lends memory to the VMs that may have more or less of it while they run, and asks for it back.
//!
//! The facts are gathered from the hosts' last reports, [`perigee_planner::amounts`] decides, and here the guests are asked, through their hosts'
//! agents. At its start a VM has its least (`agent/src/vm/memory.rs`), so nothing is lent while no controller runs. What a guest can't give
//! back counts for its host's room and its tenant's quota ([`crate::cluster::Index::note_lent`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use perigee_model::job::HostState;
use perigee_model::tenant::tenant_of;
use perigee_model::vm::{ChangeVm, VmReport, VmStatus};
use perigee_model::{HostId, Problem, VmId};
use perigee_planner::amounts::{Decided, HostMemory, Look, TenantMemory, VmMemory, decide};

use crate::cluster::amounts::{Amount, Looked};
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, Lent, capacity};
use crate::records::{JobRecord, start_of, vm_of};
use crate::storage::volumes;
use crate::vms::live;

/// So many checks of the hosts are from one look to the next one.
const CHECKS: u32 = 5;

/// The guests of so many VMs are asked at once.
const ASKED_AT_ONCE: usize = 32;

/// A host that takes longer to ask a guest delays the others no more. The next look shows what the guest has.
const ASK_PATIENCE: Duration = Duration::from_secs(10);

/// An older report does not say what a guest has.
const REPORT_AGE_MAX: Duration = Duration::from_secs(30);

/// Looks at all VMs with a range, again and again.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    loop {
        task.round(round(&cluster)).await;
        tokio::time::sleep(cluster.timing.monitor * CHECKS).await;
    }
}

/// A VM that has a range.
struct Ranged {
    record: Arc<JobRecord>,
    host: HostId,
    memory: VmMemory,
    before: Amount,
}

async fn round(cluster: &Arc<Cluster>) -> Result<String, Problem> {
    let moves = cluster.unfinished_migrations();
    let moving: BTreeSet<&VmId> = moves.iter().map(|moved| &moved.migration.vm).collect();
    let jobs = cluster.unfinished_jobs();
    let ranged: Vec<Ranged> =
        jobs.iter().filter_map(|record| ranged(cluster, record, &moving)).collect();
    let decided = decide(&look(cluster, &ranged));
    let lent = decided.iter().zip(&ranged).map(|(decided, Ranged { memory, .. })| {
        let above = |bytes: u64| bytes.saturating_sub(memory.least_bytes);
        let has_bytes = above(memory.has_bytes.unwrap_or(memory.most_bytes));
        // What a VM takes along when it moves is not given back meanwhile.
        let keeps_bytes = if memory.may_change {
            above(decided.keeps_bytes)
        } else {
            has_bytes.max(above(decided.keeps_bytes))
        };
        (decided.vm.clone(), Lent { keeps_bytes, has_bytes })
    });
    cluster.index.note_lent(lent.collect());
    let carried_out: Vec<_> =
        ranged.iter().zip(&decided).map(|(of, decided)| carry_out(cluster, of, decided)).collect();
    let carried_out = futures_util::stream::iter(carried_out).buffer_unordered(ASKED_AT_ONCE);
    let vms: BTreeMap<VmId, Amount> = carried_out.collect().await;
    // A guest that does not give back what it was asked for keeps nobody waiting.
    let gives = |(of, decided): &(&Ranged, &Decided)| {
        let is_asked = decided.bytes.zip(of.memory.has_bytes).is_some_and(|(to, has)| to < has);
        of.memory.on_its_way_back() > 0 || is_asked && !of.memory.is_overdue()
    };
    let giving = ranged.iter().zip(&decided).filter(gives).map(|(of, _)| of.host.clone());
    cluster.amounts.note(Looked { vms, giving: giving.collect() });
    let asked = decided.iter().filter(|decided| decided.bytes.is_some()).count();
    Ok(format!(
        "{} VMs have a range of memory; {asked} were asked to have another amount",
        ranged.len()
    ))
}

/// `None` for a VM that has no range, or does not run.
fn ranged(cluster: &Cluster, record: &Arc<JobRecord>, moving: &BTreeSet<&VmId>) -> Option<Ranged> {
    let spec = &record.job.spec;
    let most_bytes = spec.memory_max_bytes.filter(|_| record.vm_started)?;
    let host = cluster.index.host_of(record)?;
    let vm = vm_of(&record.job.id);
    let report = cluster.hosts.fresh_vm(&host, &vm, REPORT_AGE_MAX).map(|(_, report)| report);
    if report.as_ref().is_some_and(|report| report.spec.machine.memory_least_bytes.is_none()) {
        return None;
    }
    let run = start_of(record, 0).run;
    let before = cluster.amounts.of(&vm, run);
    let before = before.unwrap_or_else(|| begun(run, spec.memory_bytes, report.as_ref()));
    let is_moving = moving.contains(&vm) || cluster.index.is_move_being_recorded(&vm);
    let runs = report.as_ref().is_some_and(|report| report.status == VmStatus::Running);
    let has = report.and_then(|report| report.load.memory);
    let memory = VmMemory {
        host: host.clone(),
        tenant: tenant_of(record.job.id.as_str()).to_owned(),
        least_bytes: spec.memory_bytes,
        most_bytes,
        has_bytes: has.map(|has| has.has_bytes),
        available_bytes: has.and_then(|has| has.available_bytes),
        asked: before.asked.map(|(bytes, since)| (bytes, since.elapsed().as_secs())),
        may_change: runs && !is_moving && record.leaving.is_none(),
        vm,
    };
    Some(Ranged { record: Arc::clone(record), host, memory, before })
}

/// Its agent has asked the guest of a VM that began at its host to have the least.
fn begun(run: u32, least_bytes: u64, report: Option<&VmReport>) -> Amount {
    let began = report.filter(|report| report.spec.arrives_by.is_none());
    let asked = began.and_then(|report| {
        let since = Instant::now().checked_sub(Duration::from_millis(report.uptime_ms))?;
        Some((least_bytes, since))
    });
    Amount { run, asked, reason: String::new() }
}

fn look(cluster: &Cluster, ranged: &[Ranged]) -> Look {
    let mut at: BTreeMap<&HostId, u64> = BTreeMap::new();
    let mut of: BTreeMap<&str, u64> = BTreeMap::new();
    for Ranged { record, host, memory, .. } in ranged {
        let has_bytes = cluster.index.demand_now(record).memory_bytes;
        *at.entry(host).or_default() += has_bytes;
        *of.entry(memory.tenant.as_str()).or_default() += has_bytes;
    }
    let used = cluster.index.used();
    // Of a host that has not reported nothing is known, and nothing changes there.
    let hosts = at.into_iter().filter_map(|(host, theirs)| {
        let used_bytes = used.get(host).map_or(0, |used| used.demand.memory_bytes);
        host_memory(cluster, host, used_bytes.saturating_sub(theirs))
    });
    let quotas = cluster.accounts.quotas(&cluster.index.taken(), &cluster.ledger);
    let tenants = of.into_iter().filter_map(|(tenant, theirs)| {
        let all = quotas.get(tenant)?;
        let quota_bytes = all.quota.memory_bytes?;
        let taken_bytes = all.used.memory_bytes.saturating_sub(theirs);
        Some((tenant.to_owned(), TenantMemory { quota_bytes, taken_bytes }))
    });
    let vms = ranged.iter().map(|ranged| ranged.memory.clone()).collect();
    Look { hosts: hosts.collect(), vms, tenants: tenants.collect() }
}

fn host_memory(cluster: &Cluster, host: &HostId, taken_bytes: u64) -> Option<HostMemory> {
    let report = cluster.hosts.report(host)?;
    let is_up = cluster.hosts.state(host) == HostState::Up;
    let now = is_up.then_some(&report);
    let for_vms_bytes = capacity(&report).memory_bytes;
    Some(HostMemory {
        host: host.clone(),
        for_vms_bytes,
        taken_bytes,
        reserve_bytes: report.memory_bytes.saturating_sub(for_vms_bytes),
        available_bytes: now.and_then(|report| report.memory_available_bytes),
        stalled: now.and_then(|report| Some(report.pressure.memory?.some.share_10s)),
    })
}

/// Asks the guest for what was decided. Without an answer it may have heard it all the same: the next look shows what it has.
async fn carry_out(cluster: &Cluster, of: &Ranged, decided: &Decided) -> (VmId, Amount) {
    let mut amount = Amount { reason: decided.reason.clone(), ..of.before.clone() };
    if let Some(bytes) = decided.bytes {
        let ask = ChangeVm::Memory { bytes };
        let asked = async {
            let at = volumes::reachable(cluster, &of.host)?;
            let change = live::change(&at, &of.record, &ask);
            let silent = |_| {
                let why =
                    format!("{} has not answered within {} s", of.host, ASK_PATIENCE.as_secs());
                Problem::unavailable(format!("can't ask the guest of VM {}", decided.vm), why)
            };
            tokio::time::timeout(ASK_PATIENCE, change).await.map_err(silent)?
        };
        // One that still owes what it was asked for before has not got more time for that.
        let owes =
            |before: u64| of.memory.has_bytes.is_some_and(|has| has > before) && before <= bytes;
        let since = of.before.asked.filter(|(before, _)| owes(*before)).map(|(_, since)| since);
        match asked.await {
            Ok(_) => amount.asked = Some((bytes, since.unwrap_or_else(Instant::now))),
            Err(problem) => {
                amount.reason =
                    format!("{}, but could not be asked: {}", decided.reason, problem.why)
            }
        }
    }
    (decided.vm.clone(), amount)
}
