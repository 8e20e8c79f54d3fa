//! Gathers the loads of a site's hosts and VMs, and what their moves would cost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::balance::{LoadNotKnown, VmBalance};
use perigee_model::job::{HostState, JobState, Migration};
use perigee_model::load::VcpuUse;
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::vm::HostReport;
use perigee_model::{DiskRole, HostId, Problem, SiteId, VmId};
use perigee_planner::Refused;
use perigee_planner::balance::{Accounts, Elsewhere, HostLoad, Look, VmLoad, pairs, price_s};

use super::disk_waits::DiskWaits;
use crate::cleaner::Pending;
use crate::cluster::balance::Seen;
use crate::cluster::{Cluster, Used, capacity, groups_of};
use crate::migration::{self, by_itself};
use crate::planning::{Prices, links};
use crate::records::{JobRecord, MigrationRecord, PlacedDisk, VolumeRecord, vm_of, volume_key};

/// An older report says nothing of the last minute.
const LOAD_AGE_MAX: Duration = Duration::from_secs(60);

/// A host where something waits for memory in no more than this share of the time does not lack any.
const STALLED: f64 = 0.01;

impl Seen {
    pub fn elsewhere(&self, vm: &VmId, host: &HostId) -> Option<Elsewhere> {
        self.ways.get(&(vm.clone(), host.clone()))?.as_ref().ok().copied()
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
    (accounts, waits): (&Accounts, &mut DiskWaits),
) -> Result<Seen, Problem> {
    let here = Here::of(cluster, site);
    let (mut vms, mut records) = (Vec::new(), BTreeMap::new());
    let mut far = BTreeMap::new();
    for record in cluster.unfinished_jobs() {
        let Some(host) = cluster.index.host_of(&record).filter(|host| here.has(host)) else {
            continue;
        };
        if !record.vm_started || here.is_moving(&vm_of(&record.job.id)) {
            continue;
        }
        let disks = here.far_disks(&record, &host, waits);
        vms.push(here.vm(&record, host, &disks));
        far.insert(vm_of(&record.job.id), disks);
        records.insert(vm_of(&record.job.id), record);
    }
    waits.end_look();
    let mut not_known = BTreeMap::new();
    let hosts: Vec<HostLoad> =
        here.hosts.iter().map(|host| here.host(host, &vms, &mut not_known)).collect();
    let look = Look { passed_s: passed.as_secs_f64(), hosts, vms };
    let mut ways = BTreeMap::new();
    let pairs = pairs(accounts, &look);
    if !pairs.is_empty() {
        let (prices, pending) = (Prices::of(cluster), Pending::all(cluster).await?);
        let loads: BTreeMap<&VmId, &VmLoad> =
            look.vms.iter().map(|load| (&load.vm, load)).collect();
        for (vm, targets) in pairs {
            if let Some((load, record)) = loads.get(&vm).zip(records.get(&vm)) {
                let far = far.get(&vm).map(Vec::as_slice).unwrap_or_default();
                let (prices, pending) = (&prices, &pending);
                let from_here = Ways { cluster, load, record, far, prices, pending };
                ways.extend(from_here.to(targets).await?);
            }
        }
    }
    Ok(Seen { look, ways, not_known })
}

/// What is copied after a VM that moves, in plain words after its reason; nothing if it has no disk where it is.
///
/// # Errors
/// If the store can't be read.
pub(super) async fn disks_that_follow(
    cluster: &Cluster,
    vm: &VmBalance,
) -> Result<String, Problem> {
    let Some(record) = cluster.index.of_vm(&vm.vm) else { return Ok(String::new()) };
    let mut bytes = 0;
    let disks = record.placement.iter().flat_map(|placement| &placement.disks);
    for disk in disks.filter(|disk| disk.home != vm.to && (disk.temporary || !disk.read_only)) {
        bytes += match disk.role {
            DiskRole::Root => record.job.spec.root_bytes.unwrap_or_default(),
            role if role.is_data() => {
                let volume: Option<VolumeRecord> =
                    cluster.records.read(&volume_key(&disk.volume)).await?;
                let seen = volume.and_then(|volume| volume.seen);
                seen.map_or(0, |seen| seen.allocated_bytes)
            }
            _ => 0,
        };
    }
    let rate = links::toward(cluster, &vm.host, &vm.to).map_or(0, |link| link.rate_bytes_per_s);
    if bytes == 0 || rate == 0 {
        return Ok(String::new());
    }
    let takes = format_seconds(bytes as f64 / rate as f64);
    let bytes = format_bytes(bytes);
    Ok(format!("; then its disks follow: {bytes} at most, {takes} at the link's rate"))
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
        let load = self.cluster.hosts.fresh_vm(host, vm, LOAD_AGE_MAX)?.1.load.vcpus_1m?;
        let can_be = |vcpus: f64| vcpus.is_finite() && vcpus >= 0.0;
        (can_be(load.running_vcpus) && can_be(load.waiting_vcpus)).then_some(load)
    }

    /// The disks of a VM without a job whose home is another host, and the share of the time in which it waits for each; `None` where that is
    /// not known.
    fn far_disks(
        &self,
        record: &JobRecord,
        host: &HostId,
        waits: &mut DiskWaits,
    ) -> Vec<(HostId, Option<f64>)> {
        if !record.kind.is_persistent_vm() {
            return Vec::new();
        }
        let vm = vm_of(&record.job.id);
        let report = self.cluster.hosts.fresh_vm(host, &vm, LOAD_AGE_MAX);
        let mut share = |disk: &PlacedDisk| {
            let (at, report) = report.as_ref()?;
            let mut disks = report.spec.disks.iter().zip(&report.io);
            let (_, io) = disks.find(|(of, _)| of.volume == disk.volume)?;
            let disk = (vm.clone(), host.clone(), disk.volume.clone());
            waits.note(disk, *at, io.network_busy_ns)
        };
        let far = record.disks_needed().filter(|disk| disk.home != *host);
        far.map(|disk| (disk.home.clone(), share(disk))).collect()
    }

    fn vm(&self, record: &JobRecord, host: HostId, far: &[(HostId, Option<f64>)]) -> VmLoad {
        let vm = vm_of(&record.job.id);
        let load = self.load(&host, &vm);
        let (demand, groups) = (self.cluster.index.demand_to_move(record), groups_of(record));
        VmLoad {
            vcpus: demand.cpus,
            memory_bytes: demand.memory_bytes,
            used_cpus: load.map(|load| load.running_vcpus),
            waited_cpus: load.map(|load| load.waiting_vcpus),
            data_lost: far
                .iter()
                .map(|(_, share)| *share)
                .sum::<Option<f64>>()
                .map(|lost| lost.min(1.0)),
            data_at: far.iter().map(|(home, _)| home.clone()).collect(),
            taken_from: by_itself::taken_from(self.cluster, &vm),
            together: groups.together,
            apart: groups.apart,
            may_move: self.may_move(record),
            vm,
            host,
        }
    }

    /// Whether the VM has no job, may move by itself, runs, and has all its disks at the site.
    fn may_move(&self, record: &JobRecord) -> bool {
        let cluster = self.cluster;
        let is_here = |home: &HostId| {
            cluster.hosts.get(home).is_ok_and(|home| home.addresses.site == *self.site)
        };
        let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
        record.kind.is_persistent_vm()
            && record.job.spec.may_migrate
            && record.job.state == JobState::Running
            // Until they are there, it seems to have lost less where it was.
            && record.to_follow.is_empty()
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
            site: self.site.clone(),
            cpus: report.as_ref().map_or(0.0, |report| f64::from(report.cpus)),
            other_cpus,
            memory_stalled: pressure
                .map(|memory| memory.some.share_60s)
                .map(|stalled| if stalled > STALLED { stalled } else { 0.0 }),
            free_vcpus: free.cpus,
            free_memory_bytes: free.memory_bytes,
            takes_vms: is_up && hosts.drain(host).is_none() && !waits_for_it,
            in_a_move: self.moves.iter().any(|record| is_at(&record.migration, host)),
        }
    }
}

/// The ways of one VM.
struct Ways<'a> {
    cluster: &'a Cluster,
    load: &'a VmLoad,
    record: &'a JobRecord,
    far: &'a [(HostId, Option<f64>)],
    prices: &'a Prices<'a>,
    pending: &'a Pending,
}

type Way = ((VmId, HostId), Result<Elsewhere, String>);

impl Ways<'_> {
    async fn to(&self, targets: Vec<HostId>) -> Result<Vec<Way>, Problem> {
        let (cluster, load) = (self.cluster, self.load);
        let failed = by_itself::failed_lately(cluster, &load.vm, &targets);
        let prices = self.prices.of_vm(self.record, &load.host, &targets).await?;
        let wanted = load.used_cpus.unwrap_or(0.0) + load.waited_cpus.unwrap_or(0.0);
        // Hosts of one site are equally far from each other.
        let data_lost = |to: &HostId| {
            let still_far = self.far.iter().filter(|(home, _)| home != to);
            still_far.filter_map(|(_, share)| *share).sum::<f64>().min(1.0)
        };
        let elsewhere = |to: &HostId| {
            if let Some(failed) = failed.iter().find(|failed| failed.to == *to) {
                return Err(format!("{}; it is tried again later", failed.why));
            }
            migration::check(cluster, self.record, to, self.pending)
                .map_err(|problem| problem.why)?;
            let cost = prices.to(to).map_err(|refused| {
                if matches!(refused, Refused::LinkNotMeasured { .. }) {
                    links::want_missing(cluster, to, &load.host);
                    links::want_missing(cluster, &load.host, to);
                }
                refused.to_string()
            })?;
            match cost.too_long() {
                Some(too_long) => Err(too_long),
                None => Ok(Elsewhere { price_s: price_s(&cost, wanted), data_lost: data_lost(to) }),
            }
        };
        let of_target = |to: HostId| {
            let there = elsewhere(&to);
            ((load.vm.clone(), to), there)
        };
        Ok(targets.into_iter().map(of_target).collect())
    }
}
