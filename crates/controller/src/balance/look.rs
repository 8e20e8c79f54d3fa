//! Gathers the loads of a site's hosts and VMs, and of the hosts of other sites that have data of these VMs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::LoadNotKnown;
use perigee_model::job::{HostState, JobState, Migration};
use perigee_model::load::VcpuUse;
use perigee_model::vm::HostReport;
use perigee_model::{HostId, Problem, SiteId, VmId};
use perigee_planner::balance::{Accounts, Comes, Elsewhere, HostLoad, Look, VmLoad, pairs};

use super::data::Data;
use super::disk_waits::DiskWaits;
use super::ways::Ways;
use crate::cleaner::Pending;
use crate::cluster::balance::Seen;
use crate::cluster::{Cluster, HostLink, Used, capacity, groups_of};
use crate::migration::by_itself;
use crate::planning::Prices;
use crate::planning::shared_links::site_of;
use crate::records::{JobRecord, MigrationRecord, vm_of};

/// An older report says nothing of the last minute.
pub(super) const LOAD_AGE_MAX: Duration = Duration::from_secs(60);

/// A host where something waits for memory in no more than this share of the time does not lack any.
const STALLED: f64 = 0.01;

impl Seen {
    pub fn elsewhere(&self, vm: &VmId, host: &HostId) -> Option<Elsewhere> {
        self.ways.get(&(vm.clone(), host.clone()))?.as_ref().ok().copied()
    }

    fn comes(&self, host: &HostId) -> Comes {
        // They are in order.
        let at = self.look.hosts.binary_search_by(|load| load.host.cmp(host));
        at.map_or(Comes::All, |at| self.look.hosts[at].comes)
    }

    /// Whether VMs are only advised to go to the host, because its site is not switched on.
    pub fn only_advises(&self, host: &HostId) -> bool {
        self.comes(host) == Comes::ForDataAdvised
    }

    /// Why the loads of these hosts are not known. Those of other sites are named by the looks there.
    pub fn not_known(&self, hosts: &[HostId]) -> Vec<LoadNotKnown> {
        let why = |host: &HostId| self.not_known.get(host).cloned().unwrap_or_default();
        let is_own = |host: &&HostId| self.comes(host) == Comes::All;
        hosts
            .iter()
            .filter(is_own)
            .map(|host| LoadNotKnown { host: host.clone(), why: why(host) })
            .collect()
    }
}

/// # Errors
/// If the store can't be read.
pub(super) async fn gather(
    cluster: &Cluster,
    site: &SiteId,
    passed: Duration,
    (accounts, waits): (&Accounts, &mut DiskWaits),
) -> Result<Seen, Problem> {
    let here = Here::of(cluster, site, accounts);
    let (mut vms, mut known) = (Vec::new(), BTreeMap::new());
    for record in cluster.unfinished_jobs() {
        let Some(host) =
            cluster.index.host_of(&record).filter(|host| here.hosts.contains_key(host))
        else {
            continue;
        };
        if !record.vm_started || here.is_moving(&vm_of(&record.job.id)) {
            continue;
        }
        // Of what is at other sites their own looks decide.
        let data = match here.is_own(&host) {
            true => Data::of(cluster, &record, &host, waits).await?,
            false => Data::default(),
        };
        vms.push(here.vm(&record, host, &data));
        known.insert(vm_of(&record.job.id), (record, data));
    }
    waits.end_look();
    let mut not_known = BTreeMap::new();
    let hosts = here.hosts.iter();
    let hosts: Vec<HostLoad> =
        hosts.map(|(host, part)| here.host(host, part, &vms, &mut not_known)).collect();
    let look = Look { passed_s: passed.as_secs_f64(), hosts, vms };
    let mut ways = BTreeMap::new();
    let pairs = pairs(accounts, &look);
    if !pairs.is_empty() {
        let (prices, pending) = (Prices::of(cluster), Pending::all(cluster).await?);
        let loads: BTreeMap<&VmId, &VmLoad> =
            look.vms.iter().map(|load| (&load.vm, load)).collect();
        for (vm, targets) in pairs {
            if let Some((load, (record, data))) = loads.get(&vm).zip(known.get(&vm)) {
                let (prices, pending) = (&prices, &pending);
                let from_here = Ways { cluster, load, record, data, prices, pending };
                ways.extend(from_here.to(targets).await?);
            }
        }
    }
    Ok(Seen { look, ways, not_known })
}

fn is_at(migration: &Migration, host: &HostId) -> bool {
    migration.from == *host || migration.to == *host
}

/// How many CPUs of the host are in use; `None` if that is not known, or the figure can't be.
fn used_cpus(report: &HostReport) -> Option<f64> {
    // The kernel counts in ticks, so of a host that is all busy it may be a little more than all.
    let most = f64::from(report.cpus) * 1.1;
    report.cpus_used_1m.filter(|used| (0.0..=most).contains(used))
}

/// A host's part in a look.
struct Part {
    site: SiteId,
    comes: Comes,
}

struct Here<'a> {
    cluster: &'a Cluster,
    /// Those of the site, and those of other sites that count for its VMs.
    hosts: BTreeMap<HostId, Part>,
    /// Under way.
    moves: Vec<Arc<MigrationRecord>>,
    /// Completed, the newest last.
    done: Vec<Arc<MigrationRecord>>,
    used: BTreeMap<HostId, Used>,
    /// Those that the cluster has rented: they are for jobs that wait.
    rented: BTreeSet<HostId>,
}

impl<'a> Here<'a> {
    fn of(cluster: &'a Cluster, site: &SiteId, accounts: &Accounts) -> Self {
        let all = cluster.hosts.all();
        let own = all.iter().filter(|host| host.addresses.site == *site);
        let part = |host: &Arc<HostLink>| {
            (host.id.clone(), Part { site: site.clone(), comes: Comes::All })
        };
        let mut here = Self {
            cluster,
            hosts: own.map(part).collect(),
            moves: cluster.unfinished_migrations(),
            done: cluster.index.past_moves(),
            used: cluster.index.used(),
            rented: cluster.rentals.hosts_by_rule(),
        };
        here.add_others(accounts);
        here
    }

    /// The hosts of other sites that have data of VMs here, or that such a VM has left for its data a short time ago. A site where nobody looks
    /// at loads gets no VM.
    fn add_others(&mut self, accounts: &Accounts) {
        let cluster = self.cluster;
        let mut others: BTreeSet<HostId> = accounts.left_on_trial().cloned().collect();
        for record in cluster.unfinished_jobs() {
            let host = cluster.index.host_of(&record).filter(|_| record.kind.is_persistent_vm());
            if host.is_some_and(|host| self.is_own(&host)) {
                others.extend(record.disks_needed().map(|disk| disk.home.clone()));
            }
        }
        others.retain(|host| !self.hosts.contains_key(host));
        for host in others {
            let Some(site) = site_of(cluster, &host) else { continue };
            let comes = match cluster.balances.mode(&site) {
                AutoMode::Off => continue,
                AutoMode::Advise => Comes::ForDataAdvised,
                AutoMode::On => Comes::ForData,
            };
            self.hosts.insert(host, Part { site, comes });
        }
    }

    fn is_own(&self, host: &HostId) -> bool {
        self.hosts.get(host).is_some_and(|part| part.comes == Comes::All)
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
        let load = self.cluster.hosts.fresh_vm(host, vm, LOAD_AGE_MAX)?.1.load.vcpus_1m?;
        let can_be = |vcpus: f64| vcpus.is_finite() && vcpus >= 0.0;
        (can_be(load.running_vcpus) && can_be(load.waiting_vcpus)).then_some(load)
    }

    fn vm(&self, record: &JobRecord, host: HostId, data: &Data) -> VmLoad {
        let vm = vm_of(&record.job.id);
        let load = self.load(&host, &vm);
        let (demand, groups) = (self.cluster.index.demand_to_move(record), groups_of(record));
        VmLoad {
            vcpus: demand.cpus,
            memory_bytes: demand.memory_bytes,
            used_cpus: load.map(|load| load.running_vcpus),
            waited_cpus: load.map(|load| load.waiting_vcpus),
            data_lost: data.lost(),
            data_at: data.far.clone(),
            taken_from: by_itself::taken_from(self.cluster, &vm),
            together: groups.together,
            apart: groups.apart,
            may_move: self.is_own(&host) && self.may_move(record),
            vm,
            host,
        }
    }

    /// Whether the VM has no job, may move by itself, and runs.
    fn may_move(&self, record: &JobRecord) -> bool {
        let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
        record.kind.is_persistent_vm()
            && record.job.spec.may_migrate
            && record.job.state == JobState::Running
            // Until they are there, it seems to have lost less where it was.
            && record.to_follow.is_empty()
            && disks.all(|disk| !self.cluster.index.is_changing_home(&disk.volume))
    }

    fn host(
        &self,
        host: &HostId,
        part: &Part,
        vms: &[VmLoad],
        not_known: &mut BTreeMap<HostId, String>,
    ) -> HostLoad {
        let hosts = &self.cluster.hosts;
        let is_up = hosts.state(host) == HostState::Up;
        let report = hosts.report(host);
        let used_cpus = report.as_deref().and_then(used_cpus).filter(|_| is_up);
        let there = || vms.iter().filter(|vm| vm.host == *host);
        let unmeasured = there().find(|vm| vm.used_cpus.is_none());
        let why = match (is_up, report.as_deref(), used_cpus, unmeasured) {
            (false, ..) => Some(hosts.silence(host)),
            (true, None, ..) => Some("it has not reported yet".to_owned()),
            (true, Some(HostReport { cpus_used_1m: Some(used), cpus, .. }), None, _) => {
                Some(format!("its agent says that {used} of its {cpus} CPUs are in use"))
            }
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
        // Memory that VMs have above their least is given back before any of them moves for want of memory.
        let waits_for_it = self.cluster.amounts.gives_back(host);
        let pressure = report.as_ref().filter(|_| !waits_for_it);
        let pressure = pressure.and_then(|report| report.pressure.memory);
        HostLoad {
            host: host.clone(),
            site: part.site.clone(),
            cpus: report.as_ref().map_or(0.0, |report| f64::from(report.cpus)),
            other_cpus,
            memory_stalled: pressure
                .map(|memory| memory.some.share_60s)
                .map(|stalled| if stalled > STALLED { stalled } else { 0.0 }),
            free_vcpus: free.cpus,
            free_memory_bytes: free.memory_bytes,
            takes_vms: is_up
                && hosts.drain(host).is_none()
                && !waits_for_it
                && !self.rented.contains(host),
            comes: part.comes,
            in_a_move: self.moves.iter().any(|record| is_at(&record.migration, host)),
        }
    }
}
