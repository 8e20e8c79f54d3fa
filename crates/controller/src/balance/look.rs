//! Gathers the loads of a site's hosts and VMs, and what their moves would cost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::balance::LoadNotKnown;
use perigee_model::job::{HostState, JobState, Migration, MigrationState};
use perigee_model::load::VcpuUse;
use perigee_model::{HostId, Problem, ProblemKind, SiteId, VmId};
use perigee_planner::Refused;
use perigee_planner::balance::{Accounts, Elsewhere, HostLoad, Look, VmLoad, pairs, price_s};

use crate::cluster::{Cluster, Used, capacity, demand_of};
use crate::migration;
use crate::planning;
use crate::records::{JobRecord, MigrationRecord, vm_of};

/// An older report says nothing of the last minute.
const LOAD_AGE_MAX: Duration = Duration::from_secs(60);

/// A host where something waits for memory in no more than this share of the time does not lack any.
const STALLED: f64 = 0.01;

/// What was seen.
pub(super) struct Seen {
    pub look: Look,
    ways: BTreeMap<(VmId, HostId), Elsewhere>,
    not_known: BTreeMap<HostId, String>,
}

impl Seen {
    pub fn elsewhere(&self, vm: &VmId, host: &HostId) -> Option<Elsewhere> {
        self.ways.get(&(vm.clone(), host.clone())).copied()
    }

    /// Why the loads of these hosts are not known.
    pub fn not_known(&self, hosts: &[HostId]) -> Vec<LoadNotKnown> {
        let why = |host: &HostId| self.not_known.get(host).cloned().unwrap_or_default();
        hosts.iter().map(|host| LoadNotKnown { host: host.clone(), why: why(host) }).collect()
    }
}

/// # Errors
/// If the store can't be read.
pub(super) async fn gather(
    cluster: &Cluster,
    site: &SiteId,
    passed: Duration,
    accounts: &Accounts,
) -> Result<Seen, Problem> {
    let here = Here::of(cluster, site);
    let (mut vms, mut records) = (Vec::new(), BTreeMap::new());
    for record in cluster.unfinished_jobs() {
        let Some(host) = cluster.index.host_of(&record).filter(|host| here.has(host)) else {
            continue;
        };
        if !record.vm_started || here.is_moving(&vm_of(&record.job.id)) {
            continue;
        }
        vms.push(here.vm(&record, host));
        records.insert(vm_of(&record.job.id), record);
    }
    let mut not_known = BTreeMap::new();
    let hosts: Vec<HostLoad> =
        here.hosts.iter().map(|host| here.host(host, &vms, &mut not_known)).collect();
    let look = Look { passed_s: passed.as_secs_f64(), hosts, vms };
    let mut ways = BTreeMap::new();
    for (vm, targets) in pairs(accounts, &look) {
        let of_vm = look.vms.iter().find(|load| load.vm == vm);
        if let Some((load, record)) = of_vm.zip(records.get(&vm)) {
            here.ways(load, record, &targets, &mut ways).await?;
        }
    }
    Ok(Seen { look, ways, not_known })
}

fn is_at(migration: &Migration, host: &HostId) -> bool {
    migration.from == *host || migration.to == *host
}

struct Here<'a> {
    cluster: &'a Cluster,
    site: &'a SiteId,
    hosts: Vec<HostId>,
    /// Under way.
    moves: Vec<Arc<MigrationRecord>>,
    /// Completed, the newest last.
    done: Vec<Arc<MigrationRecord>>,
    used: BTreeMap<HostId, Used>,
}

impl<'a> Here<'a> {
    fn of(cluster: &'a Cluster, site: &'a SiteId) -> Self {
        let all = cluster.hosts.all();
        let hosts = all.iter().filter(|host| host.addresses.site == *site);
        Self {
            cluster,
            site,
            hosts: hosts.map(|host| host.id.clone()).collect(),
            moves: cluster.unfinished_migrations(),
            done: cluster.index.past_moves(),
            used: cluster.index.used(),
        }
    }

    fn has(&self, host: &HostId) -> bool {
        self.hosts.contains(host)
    }

    fn is_moving(&self, vm: &VmId) -> bool {
        self.moves.iter().any(|record| record.migration.vm == *vm)
    }

    /// Why the means of the last minute do not show how the host is now: a VM is leaving it or coming to it, or has just done so.
    fn just_moved(&self, host: &HostId) -> Option<String> {
        let is_recent = |migration: &&Migration| {
            let age_ms =
                migration.ended_ms.map_or(0, |ended_ms| self.cluster.clock.age_ms(ended_ms));
            is_at(migration, host) && Duration::from_millis(age_ms) < self.cluster.timing.load_mean
        };
        let last = self.moves.iter().chain(&self.done).map(|record| &record.migration);
        last.clone().find(is_recent).map(|migration| {
            let of = &migration.vm;
            format!("VM {of} has moved in the last minute, of which the figures are means")
        })
    }

    fn load(&self, host: &HostId, vm: &VmId) -> Option<VcpuUse> {
        self.cluster.hosts.fresh_vm(host, vm, LOAD_AGE_MAX)?.1.load.vcpus_1m
    }

    fn vm(&self, record: &JobRecord, host: HostId) -> VmLoad {
        let vm = vm_of(&record.job.id);
        let load = self.load(&host, &vm);
        let demand = demand_of(record);
        VmLoad {
            vcpus: demand.cpus,
            memory_bytes: demand.memory_bytes,
            used_cpus: load.map(|load| load.running_vcpus),
            waited_cpus: load.map(|load| load.waiting_vcpus),
            // Its disks are at the site, or it does not move from here.
            data_lost: Some(0.0),
            data_at: Vec::new(),
            taken_from: self.taken_from(&vm),
            together: None,
            apart: None,
            may_move: self.may_move(record),
            vm,
            host,
        }
    }

    /// The host from which a person moved the VM last.
    fn taken_from(&self, vm: &VmId) -> Option<HostId> {
        let moves = self.cluster.index.migrations_of(vm).into_iter().rev();
        let mut done = moves.filter(|record| record.migration.state == MigrationState::Completed);
        let last = done.find(|record| record.migration.reason == migration::ASKED)?;
        Some(last.migration.from.clone())
    }

    /// Whether the VM has no job, runs, and has all its disks at the site.
    fn may_move(&self, record: &JobRecord) -> bool {
        let cluster = self.cluster;
        let is_here = |home: &HostId| {
            cluster.hosts.get(home).is_ok_and(|home| home.addresses.site == *self.site)
        };
        let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
        record.kind.is_persistent_vm()
            && record.job.state == JobState::Running
            && disks
                .all(|disk| is_here(&disk.home) && !cluster.index.is_changing_home(&disk.volume))
    }

    fn host(
        &self,
        host: &HostId,
        vms: &[VmLoad],
        not_known: &mut BTreeMap<HostId, String>,
    ) -> HostLoad {
        let hosts = &self.cluster.hosts;
        let is_up = hosts.state(host) == HostState::Up;
        let report = hosts.report(host);
        let used_cpus = report.as_ref().and_then(|report| report.cpus_used_1m).filter(|_| is_up);
        let there = || vms.iter().filter(|vm| vm.host == *host);
        let unmeasured = there().find(|vm| vm.used_cpus.is_none());
        let why = match (is_up, &report, used_cpus, unmeasured) {
            (false, ..) => Some(hosts.silence(host)),
            (true, None, ..) => Some("it has not reported yet".to_owned()),
            (true, Some(_), None, _) => {
                Some("its agent does not know yet how many CPUs are in use, or has only a share of their time".to_owned())
            }
            (true, Some(_), Some(_), Some(vm)) => {
                Some(format!("what VM {} does with its CPUs is not known yet", vm.vm))
            }
            (true, Some(_), Some(_), None) => self.just_moved(host),
        };
        let by_vms: f64 = there().filter_map(|vm| vm.used_cpus).sum();
        let other_cpus = used_cpus.filter(|_| why.is_none()).map(|used| (used - by_vms).max(0.0));
        not_known.extend(why.map(|why| (host.clone(), why)));
        let mut free = report.as_deref().map(capacity).unwrap_or_default();
        free.take(self.used.get(host).copied().unwrap_or_default().demand);
        let pressure = report.as_ref().and_then(|report| report.pressure.memory);
        HostLoad {
            host: host.clone(),
            site: self.site.clone(),
            cpus: report.as_ref().map_or(0.0, |report| f64::from(report.cpus)),
            other_cpus,
            memory_stalled: pressure
                .map(|memory| memory.some.share_60s)
                .map(|stalled| if stalled > STALLED { stalled } else { 0.0 }),
            free_vcpus: free.cpus,
            free_memory_bytes: free.memory_bytes,
            takes_vms: is_up && hosts.drain(host).is_none(),
            in_a_move: self.moves.iter().any(|record| is_at(&record.migration, host)),
        }
    }

    /// What the VM would have at these hosts; nothing of those to which it can't move.
    async fn ways(
        &self,
        load: &VmLoad,
        record: &JobRecord,
        targets: &[HostId],
        ways: &mut BTreeMap<(VmId, HostId), Elsewhere>,
    ) -> Result<(), Problem> {
        let cluster = self.cluster;
        let moves = cluster.index.migrations_of(&load.vm);
        let moves: Vec<&Migration> = moves.iter().map(|record| &record.migration).collect();
        let failed = migration::refused_after(&moves, targets, |at_ms| cluster.clock.age_ms(at_ms));
        for to in targets.iter().filter(|to| failed.iter().all(|failed| failed.to != **to)) {
            match migration::check(cluster, record, to).await {
                Err(problem) if problem.kind == ProblemKind::Internal => return Err(problem),
                Err(_) => continue,
                Ok(()) => {}
            }
            let cost = match planning::move_cost(cluster, record, &load.host, to).await? {
                Ok(cost) if cost.too_long().is_none() => cost,
                Err(Refused::LinkNotMeasured { .. }) => {
                    planning::links::want_missing(cluster, to, &load.host);
                    planning::links::want_missing(cluster, &load.host, to);
                    continue;
                }
                Ok(_) | Err(_) => continue,
            };
            let wanted = load.used_cpus.unwrap_or(0.0) + load.waited_cpus.unwrap_or(0.0);
            let there = Elsewhere { price_s: price_s(&cost, wanted), data_lost: 0.0 };
            ways.insert((load.vm.clone(), to.clone()), there);
        }
        Ok(())
    }
}
