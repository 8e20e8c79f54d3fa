//! Gathers the loads of a site's hosts and VMs, and what their moves would cost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::balance::LoadNotKnown;
use perigee_model::job::{HostState, JobState, Migration, MigrationState};
use perigee_model::load::VcpuUse;
use perigee_model::{HostId, Problem, ProblemKind, SiteId, VmId};
use perigee_planner::balance::{Accounts, Elsewhere, HostLoad, Look, VmLoad, price_s};

use crate::cluster::{Cluster, capacity, demand_of};
use crate::migration;
use crate::planning;
use crate::records::{JobRecord, MigrationRecord, vm_of};

/// An older report says nothing of the last minute.
const LOAD_AGE_MAX: Duration = Duration::from_secs(60);

/// For so many hosts of its site it is found out what a VM's move there costs: those with the most free memory.
const TARGETS_MAX: usize = 16;

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
    for load in look.vms.iter().filter(|load| load.may_move) {
        let Some(record) = records.get(&load.vm) else { continue };
        if accounts.has(&load.vm) || is_short(&look, &load.host) {
            here.ways(&look, load, record, &mut ways).await?;
        }
    }
    Ok(Seen { look, ways, not_known })
}

/// Whether anything at the host may lack a CPU or memory, so that another host could be better for a VM there.
fn is_short(look: &Look, host: &HostId) -> bool {
    let wanted: f64 = look
        .vms
        .iter()
        .filter(|vm| vm.host == *host)
        .filter_map(|vm| Some(vm.used_cpus? + vm.waited_cpus?))
        .sum();
    let of = look.hosts.iter().find(|load| load.host == *host);
    of.is_some_and(|of| {
        wanted + of.other_cpus.unwrap_or(0.0) > of.cpus || of.memory_stalled.unwrap_or(0.0) > 0.0
    })
}

struct Here<'a> {
    cluster: &'a Cluster,
    site: &'a SiteId,
    hosts: Vec<HostId>,
    moves: Vec<Arc<MigrationRecord>>,
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
        }
    }

    fn has(&self, host: &HostId) -> bool {
        self.hosts.contains(host)
    }

    fn is_moving(&self, vm: &VmId) -> bool {
        self.moves.iter().any(|record| record.migration.vm == *vm)
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
                Some("how many of its CPUs are in use is not known yet".to_owned())
            }
            (true, Some(_), Some(_), Some(vm)) => {
                Some(format!("what VM {} does with its CPUs is not known yet", vm.vm))
            }
            (true, Some(_), Some(_), None) => None,
        };
        not_known.extend(why.map(|why| (host.clone(), why)));
        let by_vms: f64 = there().filter_map(|vm| vm.used_cpus).sum();
        let comes = |record: &&Arc<MigrationRecord>| record.migration.to == *host;
        let coming = self.moves.iter().filter(comes).filter_map(|record| {
            let Migration { from, vm, .. } = &record.migration;
            self.load(from, vm).map(VcpuUse::wanted_vcpus)
        });
        let other_cpus = used_cpus.map(|used| (used - by_vms).max(0.0) + coming.sum::<f64>());
        let mut free = report.as_deref().map(capacity).unwrap_or_default();
        free.take(self.cluster.index.used().get(host).copied().unwrap_or_default().demand);
        let pressure = report.as_ref().and_then(|report| report.pressure.memory);
        HostLoad {
            host: host.clone(),
            site: self.site.clone(),
            cpus: report.as_ref().map_or(0.0, |report| f64::from(report.cpus)),
            other_cpus,
            memory_stalled: pressure.map(|memory| memory.some.share_60s),
            free_vcpus: free.cpus,
            free_memory_bytes: free.memory_bytes,
            takes_vms: is_up && hosts.drain(host).is_none(),
            in_a_move: self
                .moves
                .iter()
                .any(|record| record.migration.from == *host || record.migration.to == *host),
        }
    }

    /// What the VM would have at the other hosts of the site that it may go to.
    async fn ways(
        &self,
        look: &Look,
        load: &VmLoad,
        record: &JobRecord,
        ways: &mut BTreeMap<(VmId, HostId), Elsewhere>,
    ) -> Result<(), Problem> {
        let cluster = self.cluster;
        let moves = cluster.index.migrations_of(&load.vm);
        let moves: Vec<&Migration> = moves.iter().map(|record| &record.migration).collect();
        let failed =
            migration::refused_after(&moves, &self.hosts, |at_ms| cluster.clock.age_ms(at_ms));
        let mut others: Vec<&HostLoad> = look
            .hosts
            .iter()
            .filter(|other| other.host != load.host && other.takes_vms)
            .filter(|other| failed.iter().all(|failed| failed.to != other.host))
            .collect();
        others.sort_by_key(|other| std::cmp::Reverse(other.free_memory_bytes));
        for other in others.into_iter().take(TARGETS_MAX) {
            match migration::check(cluster, record, &other.host).await {
                Err(problem) if problem.kind == ProblemKind::Internal => return Err(problem),
                Err(_) => continue,
                Ok(()) => {}
            }
            let cost = planning::move_cost(cluster, record, &load.host, &other.host).await?;
            let Some(cost) = cost.ok().filter(|cost| cost.too_long().is_none()) else {
                planning::links::want_missing(cluster, &other.host, &load.host);
                planning::links::want_missing(cluster, &load.host, &other.host);
                continue;
            };
            let wanted = load.used_cpus.unwrap_or(0.0) + load.waited_cpus.unwrap_or(0.0);
            let there = Elsewhere { price_s: price_s(&cost, wanted), data_lost: 0.0 };
            ways.insert((load.vm.clone(), other.host.clone()), there);
        }
        Ok(())
    }
}
