//! Gathers what is at a host that is drained, and where each thing could go.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::drain::{Drain, DrainedKind};
use perigee_model::gang::member_of;
use perigee_model::job::{HostState, JobState};
use perigee_model::plan::Estimate;
use perigee_model::replica::Replica;
use perigee_model::units::format_seconds;
use perigee_model::volume::{ImageInfo, VolumeInfo};
use perigee_model::volume_move::{VolumeMove, VolumeMoveCause, VolumeMoveState};
use perigee_model::{HostId, Problem, ProblemKind, VolumeName};
use perigee_planner::Refused;
use perigee_planner::balance::TAKEN;
use perigee_planner::drain::{
    Cost, DISKS_NOT_KNOWN, Leaving, LeavingGang, LeavingVm, LeavingVolume, Now, Other, Refusal, Way,
};

use crate::cleaner::Pending;
use crate::cluster::{Cluster, HostLink, capacity, groups_of};
use crate::migration::{self, by_itself};
use crate::networks;
use crate::planning::{Prices, VmPrices, links};
use crate::records::{
    GangMoveRequest, JobIntent, JobRecord, Kind, VolumeRecord, job_intent_key, vm_of,
};
use crate::storage::replicas;

/// When so many hosts can take a VM, no more are looked at: of thousands, those of its site come first that are to get VMs first.
const ENOUGH: usize = 8;

/// So long a drain waits for jobs that seem to end before their move would be over. What a guest says of its progress holds no drain for ever.
const WAITS_FOR_ENDS_MS: u64 = 3_600_000;

/// How long a volume or a job with several VMs stays after its move has failed.
const AFTER_FAILURE_MS: u64 = 60_000;

/// What is at the host now.
///
/// # Errors
/// `NotFound`; if the store can't be read.
pub(super) async fn gather(cluster: &Arc<Cluster>, host: &HostId) -> Result<Leaving, Problem> {
    let link = cluster.hosts.get(host)?;
    let disks = Disks::ask(&link).await;
    let others = others(cluster, &link);
    let (prices, pending) = (Prices::of(cluster), Pending::all(cluster).await?);
    let at = At {
        cluster,
        host,
        link: &link,
        others,
        disks: &disks,
        prices: &prices,
        pending: &pending,
    };
    let jobs = cluster.unfinished_jobs();
    let (mut vms, mut gangs) = (Vec::new(), Vec::new());
    for record in &jobs {
        match &record.kind {
            Kind::Job | Kind::PersistentVm(_) if at.is_here(record) => {
                vms.push(at.vm(record).await)
            }
            Kind::Gang(_) => gangs.extend(at.gang(record).await),
            Kind::Job | Kind::PersistentVm(_) | Kind::Member(_) => {}
        }
    }
    let mut volumes = at.volumes(&jobs).await?;
    let gateways = at.gateways().await?;
    let age_ms = |drain: &Drain| cluster.clock.age_ms(drain.asked_ms);
    let waits_for_ends =
        cluster.hosts.drain(host).is_none_or(|drain| age_ms(&drain) < WAITS_FOR_ENDS_MS);
    if cluster.hosts.state(host) == HostState::Unreachable {
        let silence = Now::Waits(format!(
            "it goes on when the host is back: {}",
            cluster.hosts.silence(host)
        ));
        let all =
            vms.iter_mut().map(|vm| &mut vm.now).chain(gangs.iter_mut().map(|gang| &mut gang.now));
        for now in all.chain(volumes.iter_mut().map(|volume| &mut volume.now)) {
            if *now == Now::Ready {
                now.clone_from(&silence);
            }
        }
    }
    Ok(Leaving {
        host: host.clone(),
        site: link.addresses.site.clone(),
        others: at.others,
        waits_for_ends,
        vms,
        gangs,
        volumes,
        gateways,
    })
}

/// What stays at a host that is drained, in plain words.
///
/// # Errors
/// `NotFound`; if the store can't be read.
pub(super) async fn keeps(cluster: &Cluster, host: &HostId) -> Result<Vec<String>, Problem> {
    let link = cluster.hosts.get(host)?;
    let replicas = replicas::list(cluster).await?.into_iter();
    let replicas = replicas.filter(|replica| replica.host == *host && !replica.stopping);
    let mut keeps: Vec<String> = replicas
        .map(|replica| {
            format!("the replica of volume {} for site {}", replica.volume, replica.site)
        })
        .collect();
    match link.volume.get::<Vec<ImageInfo>>("/v1/images").await {
        Ok(images) => {
            keeps.extend(images.iter().map(|image| format!("a copy of image {}", image.name)))
        }
        Err(_) => keeps.push("copies of images, which are not known now".to_owned()),
    }
    Ok(keeps)
}

/// The other hosts: those of the same site first, and of these the one that is to get a VM first.
fn others(cluster: &Cluster, link: &HostLink) -> Vec<Other> {
    let (used, packed) = (cluster.index.used(), cluster.balances.packed());
    let all = cluster.hosts.all();
    let mut others: Vec<Other> = Vec::new();
    for other in all.iter().filter(|other| other.id != link.id) {
        let id = &other.id;
        let report = cluster.hosts.report(id);
        let mut free = report.as_deref().map(capacity).unwrap_or_default();
        free.take(used.get(id).copied().unwrap_or_default().demand);
        let refuse = |why: &str, passes| Some(Refusal { why: why.to_owned(), passes });
        let refusal = match (cluster.hosts.drain(id), cluster.hosts.state(id), report) {
            (Some(_), _, _) => refuse("it is drained too", false),
            (None, HostState::Unreachable, _) => refuse("it does not answer", false),
            (None, HostState::Up, None) => refuse("it has not reported yet", true),
            (None, HostState::Up, Some(_)) => None,
        };
        let pool_free_bytes = cluster.hosts.pool_free_bytes(id);
        let site = other.addresses.site.clone();
        let packs = packed.contains(&site);
        others.push(Other { id: id.clone(), site, free, packs, pool_free_bytes, refusal });
    }
    others.sort_by_key(|other| {
        let is_far = other.site != link.addresses.site;
        (is_far, std::cmp::Reverse(other.rank()))
    });
    others
}

/// What the host says of its volumes; `None` if it does not answer.
struct Disks(Option<BTreeMap<VolumeName, VolumeInfo>>);

impl Disks {
    async fn ask(link: &HostLink) -> Self {
        let all = link.volume.get::<Vec<VolumeInfo>>("/v1/volumes").await;
        Self(all.ok().map(|all| all.into_iter().map(|info| (info.name.clone(), info)).collect()))
    }

    /// What a volume takes in another pool, at most; `None` if that is not known: the host does not answer, or does not name the volume.
    fn bytes(&self, volume: &VolumeName) -> Option<u64> {
        Some(self.0.as_ref()?.get(volume)?.allocated_bytes)
    }

    /// Whether the host says that it has no such volume.
    fn lacks(&self, volume: &VolumeName) -> bool {
        self.0.as_ref().is_some_and(|all| !all.contains_key(volume))
    }

    fn is_confined(&self, volume: &VolumeName) -> bool {
        let info = self.0.as_ref().and_then(|all| all.get(volume));
        info.is_some_and(|info| info.leave_site.is_never())
    }
}

struct At<'a> {
    cluster: &'a Arc<Cluster>,
    host: &'a HostId,
    link: &'a HostLink,
    others: Vec<Other>,
    disks: &'a Disks,
    prices: &'a Prices<'a>,
    pending: &'a Pending,
}

/// Where the records of volumes are.
const VOLUMES: &str = "volumes/";

/// What is said of a thing that could not be looked at. The others go on.
fn not_known(problem: &Problem) -> Now {
    tracing::warn!("a thing at a drained host can't be looked at: {problem}");
    Now::Waits(format!("it could not be looked at, and is tried again: {}", problem.why))
}

impl At<'_> {
    /// Whether the VM of a record is here, is about to start here, or just comes here.
    fn is_here(&self, record: &JobRecord) -> bool {
        let index = &self.cluster.index;
        let is_given = |host: &HostId| host == self.host;
        let comes = || {
            let moves = index.migrations_of(&vm_of(&record.job.id));
            let last = moves.last().filter(|last| !last.migration.state.is_final());
            last.is_some_and(|last| last.migration.to == *self.host)
        };
        index.host_of(record).as_ref() == Some(self.host)
            || index.grant_of(&record.job.id).is_some_and(|grant| is_given(&grant.host))
            || comes()
    }

    /// The networks whose gateway is here although a host that takes VMs has VMs of theirs: the gateway is about to go there.
    async fn gateways(&self) -> Result<Vec<String>, Problem> {
        let takes_vms = |host: &HostId| {
            self.others.iter().any(|other| other.id == *host && other.refusal.is_none())
        };
        let all = networks::list(self.cluster).await?.into_iter();
        let due = all.filter(|network| {
            let mut at = network.vms.iter().filter_map(|vm| vm.host.as_ref());
            network.gateway_host.as_ref() == Some(self.host) && at.any(takes_vms)
        });
        Ok(due.map(|network| network.name.to_string()).collect())
    }

    /// What the VM's disks that are here take in another pool, at most; `None` if that is not known.
    fn disk_bytes(&self, record: &JobRecord) -> Option<u64> {
        let disks = record.placement.iter().flat_map(|placement| &placement.disks);
        let here = disks.filter(|disk| disk.home == *self.host);
        here.map(|disk| self.disks.bytes(&disk.volume)).sum()
    }

    async fn vm(&self, record: &JobRecord) -> LeavingVm {
        let disk_bytes = self.disk_bytes(record);
        let left = self.cluster.index.predicted_end(&record.job.id).left;
        let now = self.now_of(record).unwrap_or_else(|| self.policy(record, left));
        let ways = match now {
            Now::Ready => self.ways(record).await,
            _ => Ok(Vec::new()),
        };
        let (now, ways) = match ways {
            Ok(ways) => (now, ways),
            Err(problem) => (not_known(&problem), Vec::new()),
        };
        let name = vm_of(&record.job.id).to_string();
        let demand = self.cluster.index.demand_to_move(record);
        let together = groups_of(record).together;
        LeavingVm { name, demand, now, left, disk_bytes, ways, together }
    }

    /// What a VM does that can't move now; `None` if it runs.
    fn now_of(&self, record: &JobRecord) -> Option<Now> {
        let waits = |why: &str| Some(Now::Waits(why.to_owned()));
        let index = &self.cluster.index;
        let vm = vm_of(&record.job.id);
        let moves = index.migrations_of(&vm);
        if let Some(last) = moves.last().filter(|last| !last.migration.state.is_final()) {
            return match last.migration.to == *self.host {
                true => waits("it just comes here, and leaves again when it is there"),
                false => Some(Now::Moving(vec![last.migration.to.clone()])),
            };
        }
        if record.ending.is_some() || record.finished.is_some() || record.collect.is_some() {
            return waits("it ends");
        }
        if record.leaving.is_some() {
            return waits("it begins anew");
        }
        if record.kind.goes_down() || record.kind.is_taken_down() {
            return waits("it is being stopped");
        }
        if !record.vm_started || record.job.state != JobState::Running {
            return waits("it is starting, and moves when it runs");
        }
        let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
        if let Some(disk) = disks.find(|disk| index.is_changing_home(&disk.volume)) {
            return Some(Now::Waits(format!("its volume {} is being moved", disk.volume)));
        }
        // Its driver has not taken the last one into account.
        moves
            .last()
            .filter(|last| last.number > record.settled)
            .and_then(|_| waits("it has just moved"))
    }

    /// A job whose file lets it move nowhere is waited for, if its end is known.
    fn policy(&self, record: &JobRecord, left: Option<Estimate>) -> Now {
        if record.job.spec.may_migrate {
            return Now::Ready;
        }
        if record.kind.is_persistent_vm() {
            let vm = vm_of(&record.job.id);
            return Now::Stays(format!(
                "it has move: never; move it yourself (perigee vm move {vm} HOST), or let it leave (perigee vm set {vm} --move auto)"
            ));
        }
        let why = "its file says move: never";
        match left {
            Some(left) => {
                Now::Waits(format!("{why}; it ends in about {}", format_seconds(left.expected_s)))
            }
            None => Now::Stays(format!("{why}, and it is not known when it ends")),
        }
    }

    /// The hosts where a VM that runs here could go.
    async fn ways(&self, record: &JobRecord) -> Result<Vec<Way>, Problem> {
        let (vm, disk_bytes) = (vm_of(&record.job.id), self.disk_bytes(record));
        let hosts: Vec<HostId> = self.others.iter().map(|other| other.id.clone()).collect();
        let failed = by_itself::failed_lately(self.cluster, &vm, &hosts);
        let prices = self.prices.of_vm(record, self.host, &hosts).await?;
        let taken_from = by_itself::taken_from(self.cluster, &vm);
        let (mut ways, mut open) = (Vec::new(), 0);
        let bounds = self.cluster.index.bounds_of(record, |host| self.cluster.hosts.binds(host));
        for other in self.others.iter().filter(|other| other.refusal.is_none()) {
            if let Some(why) = bounds.as_ref().and_then(|bounds| bounds.why_not(&other.id)) {
                ways.push(Way { to: other.id.clone(), cost: Err(Refusal { why, passes: false }) });
                continue;
            }
            let cost = match failed.iter().find(|failed| failed.to == other.id) {
                Some(failed) => {
                    Err(Refusal { why: format!("{}; it is tried again", failed.why), passes: true })
                }
                None => self.way((record, &prices), &other.id),
            };
            let has_room = other.free.holds(self.cluster.index.demand_to_move(record)) > 0
                && other.pool_free_bytes.zip(disk_bytes).is_some_and(|(free, needs)| free >= needs);
            open += usize::from(cost.is_ok() && has_room && taken_from.as_ref() != Some(&other.id));
            ways.push(Way { to: other.id.clone(), cost });
            if open >= ENOUGH {
                break;
            }
        }
        if open > 0 {
            let back = ways.iter_mut().find(|way| Some(&way.to) == taken_from.as_ref());
            if let Some(back) = back {
                back.cost = Err(Refusal { why: TAKEN.to_owned(), passes: true });
            }
        }
        Ok(ways)
    }

    fn way(&self, (record, prices): (&JobRecord, &VmPrices), to: &HostId) -> Result<Cost, Refusal> {
        let refuse = |why: String, passes| Err(Refusal { why, passes });
        if record.left.as_ref() == Some(to) || self.pending.has(&record.job.id, to) {
            return refuse("the remains of an earlier move are being removed".to_owned(), true);
        }
        if let Err(problem) = migration::check(self.cluster, record, to, self.pending) {
            return refuse(problem.why, problem.kind == ProblemKind::Unavailable);
        }
        let cost = match prices.to(to) {
            Ok(cost) => cost,
            Err(Refused::LinkNotMeasured { .. }) => return Err(self.not_measured(to)),
            Err(refused) => return refuse(refused.to_string(), false),
        };
        if let Some(too_long) = cost.too_long() {
            return refuse(too_long, false);
        }
        self.copy(to, self.disk_bytes(record)).map(|disks| Cost {
            seconds: cost.total_s + disks.seconds,
            bytes: whole(cost.bytes).saturating_add(disks.bytes),
        })
    }

    /// What a copy of so much takes. How long one takes of which the size is not known, is not known either.
    fn copy(&self, to: &HostId, bytes: Option<u64>) -> Result<Cost, Refusal> {
        let Some(bytes) = bytes else {
            return Err(Refusal { why: DISKS_NOT_KNOWN.to_owned(), passes: true });
        };
        let probe = links::toward(self.cluster, self.host, to);
        let Some(probe) = probe.filter(|probe| probe.rate_bytes_per_s > 0) else {
            return Err(self.not_measured(to));
        };
        Ok(Cost { seconds: bytes as f64 / probe.rate_bytes_per_s as f64, bytes })
    }

    /// It will be measured.
    fn not_measured(&self, to: &HostId) -> Refusal {
        links::want_missing(self.cluster, to, self.host);
        links::want_missing(self.cluster, self.host, to);
        Refusal { why: "the link to it is being measured".to_owned(), passes: true }
    }

    /// A job with several VMs, if one of them is here.
    async fn gang(&self, record: &JobRecord) -> Option<LeavingGang> {
        let index = &self.cluster.index;
        let ranks = 0..record.job.spec.count;
        let members: Vec<Arc<JobRecord>> =
            ranks.filter_map(|rank| index.job(&member_of(&record.job.id, rank))).collect();
        let is_due = index
            .grant_of(&record.job.id)
            .is_some_and(|grant| grant.hosts().any(|host| host == self.host));
        let here: Vec<&Arc<JobRecord>> =
            members.iter().filter(|member| self.is_here(member)).collect();
        if here.is_empty() && !is_due {
            return None;
        }
        let left = index.predicted_end(&record.job.id).left;
        let mut now = self.now_of_gang(record).await.unwrap_or_else(|problem| not_known(&problem));
        if now == Now::Ready {
            now = self.policy(record, left);
        }
        let mut ways = Vec::new();
        if let (Now::Ready, [first, rest @ ..]) = (&now, here.as_slice()) {
            match self.ways_of_gang(first, rest).await {
                Ok(found) => ways = found,
                Err(problem) => now = not_known(&problem),
            }
        }
        let disks: Option<Vec<u64>> = here.iter().map(|member| self.disk_bytes(member)).collect();
        let disk_bytes = disks.map(|bytes| bytes.into_iter().max().unwrap_or_default());
        let hosts = members.iter().filter_map(|member| member.job.host.clone()).collect();
        let of = |member: &Arc<JobRecord>| {
            member.kind.member().map(|member| member.talk.by_rank(member.count)).unwrap_or_default()
        };
        let sent = members.iter().map(of).collect();
        let (name, demand, groups) =
            (record.job.id.to_string(), index.demand_to_move_all(record), groups_of(record));
        Some(LeavingGang { name, demand, now, left, disk_bytes, hosts, sent, ways, groups })
    }

    async fn now_of_gang(&self, record: &JobRecord) -> Result<Now, Problem> {
        let Some(gang) = record.kind.gang() else { return Ok(Now::Ready) };
        let waits = |why: &str| Ok(Now::Waits(why.to_owned()));
        if let Some(open) = gang.open_move() {
            let goals = open.legs.iter().map(|leg| open.goal(leg).clone());
            return Ok(match open.is_undone() {
                true => Now::Waits(format!("its VMs go back: {}", open.undone)),
                false => Now::Moving(goals.collect()),
            });
        }
        if gang.state.verdict.is_some() {
            return waits("it ends");
        }
        if !gang.state.begun {
            return waits("not all of its VMs run yet");
        }
        let intent: Option<JobIntent> =
            self.cluster.records.read(&job_intent_key(&record.job.id)).await?;
        let asked = intent.and_then(|intent| intent.move_gang);
        if let Some((number, GangMoveRequest::To { hosts, .. })) = asked
            && number > gang.applied_move
        {
            return Ok(Now::Moving(hosts));
        }
        let undone = gang.last_move.as_ref().filter(|of| of.is_undone());
        let is_recent = |ended_ms| {
            let pause_ms =
                AFTER_FAILURE_MS.saturating_mul(1 << gang.undone.saturating_sub(1).min(6));
            self.cluster.clock.age_ms(ended_ms) < pause_ms
        };
        Ok(match undone.filter(|of| of.ended_ms.is_some_and(is_recent)) {
            Some(of) => {
                Now::Waits(format!("its last move was undone, and is tried again: {}", of.undone))
            }
            None => Now::Ready,
        })
    }

    /// Where each of the VMs can go that are here.
    async fn ways_of_gang(
        &self,
        first: &JobRecord,
        rest: &[&Arc<JobRecord>],
    ) -> Result<Vec<Way>, Problem> {
        let mut ways = self.ways(first).await?;
        let hosts: Vec<HostId> = ways.iter().map(|way| way.to.clone()).collect();
        for member in rest {
            let prices = self.prices.of_vm(member, self.host, &hosts).await?;
            for way in ways.iter_mut().filter(|way| way.cost.is_ok()) {
                if let Err(refusal) = self.way((member, &prices), &way.to) {
                    way.cost = Err(refusal);
                }
            }
        }
        Ok(ways)
    }

    /// The volumes whose home is here, those of people and those of jobs and VMs.
    async fn volumes(&self, jobs: &[Arc<JobRecord>]) -> Result<Vec<LeavingVolume>, Problem> {
        let listed = self.cluster.records.list_each::<VolumeRecord>(VOLUMES).await?;
        let replicas = replicas::list(self.cluster).await?;
        let mut volumes = self.on_their_way();
        for (key, record) in listed {
            match record {
                Ok(record) if record.home == *self.host => {
                    let is_being_made = record.seen.is_none();
                    volumes.push(self.volume(&record.name, is_being_made, jobs, &replicas));
                }
                Ok(_) => {}
                Err(problem) => volumes.extend(self.unreadable(&key, &problem)),
            }
        }
        let disks =
            jobs.iter().flat_map(|job| job.placement.iter().flat_map(|placement| &placement.disks));
        for disk in disks.filter(|disk| disk.temporary && disk.home == *self.host) {
            volumes.push(self.volume(&disk.volume, false, jobs, &replicas));
        }
        Ok(volumes)
    }

    /// A volume whose record can't be read counts as one that is here, unless the host says that the volume is not here.
    fn unreadable(&self, key: &str, problem: &Problem) -> Option<LeavingVolume> {
        let name = key.strip_prefix(VOLUMES).unwrap_or(key);
        let volume = VolumeName::new(name).ok();
        let is_elsewhere = volume.as_ref().is_some_and(|volume| self.disks.lacks(volume));
        (!is_elsewhere).then(|| LeavingVolume {
            name: name.to_owned(),
            bytes: volume.and_then(|volume| self.disks.bytes(&volume)),
            now: not_known(problem),
            with: None,
            beside: None,
            group: None,
            ways: Vec::new(),
        })
    }

    /// Volumes that have a new home already, and are still copied from here.
    fn on_their_way(&self) -> Vec<LeavingVolume> {
        let moves = self.cluster.index.unfinished_volume_moves().into_iter();
        let taken = moves.filter(|of| of.view.from == *self.host && of.view.state.is_taken());
        let leaving = taken.map(|of| LeavingVolume {
            name: of.view.volume.to_string(),
            bytes: self.disks.bytes(&of.view.volume),
            now: Now::Moving(vec![of.view.to.clone()]),
            with: None,
            beside: None,
            group: None,
            ways: Vec::new(),
        });
        leaving.collect()
    }

    fn volume(
        &self,
        volume: &VolumeName,
        is_being_made: bool,
        jobs: &[Arc<JobRecord>],
        replicas: &[Replica],
    ) -> LeavingVolume {
        let users: Vec<&Arc<JobRecord>> = jobs
            .iter()
            .filter(|job| {
                let mut disks = job.placement.iter().flat_map(|placement| &placement.disks);
                disks.any(|disk| disk.volume == *volume)
            })
            .collect();
        let with = users.iter().find(|user| self.is_here(user)).map(|user| match &user.kind {
            Kind::Member(member) => (DrainedKind::Job, member.gang.to_string()),
            _ => (DrainedKind::Vm, vm_of(&user.job.id).to_string()),
        });
        let beside = users.iter().find_map(|user| {
            let other_disk = || {
                let disks = user.placement.iter().flat_map(|placement| &placement.disks);
                disks.map(|disk| &disk.home).find(|home| *home != self.host).cloned()
            };
            let host = self.cluster.index.host_of(user);
            let host = host.or_else(|| other_disk().filter(|_| user.kind.rests()))?;
            Some((vm_of(&user.job.id).to_string(), host))
        });
        let now = match is_being_made {
            true => Now::Waits("it is being made".to_owned()),
            false => self.now_of_volume(volume, &users),
        };
        let group = users.first().map(|user| user.job.id.to_string());
        let ways = self.others.iter().filter(|other| other.refusal.is_none());
        let ways = ways.map(|other| {
            let cost = self.way_of_volume(volume, other, replicas);
            Way { to: other.id.clone(), cost }
        });
        LeavingVolume {
            name: volume.to_string(),
            bytes: self.disks.bytes(volume),
            now,
            with,
            beside,
            group,
            ways: ways.collect(),
        }
    }

    fn now_of_volume(&self, volume: &VolumeName, users: &[&Arc<JobRecord>]) -> Now {
        let index = &self.cluster.index;
        if let Some(last) = index.volume_move(volume) {
            let VolumeMove { to, state, cause, problem, ended_ms, .. } = &last.view;
            if !state.is_final() {
                return match to == self.host {
                    true => Now::Waits(
                        "it just comes here, and leaves again when it is there".to_owned(),
                    ),
                    false => Now::Moving(vec![to.clone()]),
                };
            }
            let is_recent =
                ended_ms.is_some_and(|at_ms| self.cluster.clock.age_ms(at_ms) < AFTER_FAILURE_MS);
            let is_ours = *cause == VolumeMoveCause::Drains(self.host.clone());
            if *state == VolumeMoveState::CalledOff && is_ours && is_recent {
                return Now::Waits(format!(
                    "its move to {to} was called off, and is tried again: {problem}"
                ));
            }
        }
        for user in users {
            let of = user.in_words();
            if user.ending.is_some() {
                return Now::Waits(format!("{of}, which uses it, ends"));
            }
            // Its disks may move while the VM is off, and while it runs.
            if !user.vm_started && user.job.host.is_some() && !self.is_here(user) {
                return Now::Waits(format!("{of}, which uses it, is starting"));
            }
            let moves = index.migrations_of(&vm_of(&user.job.id));
            let is_moving = moves.last().is_some_and(|last| last.number > user.settled);
            if is_moving && !self.is_here(user) {
                return Now::Waits(format!("{of}, which uses it, is just arriving elsewhere"));
            }
        }
        Now::Ready
    }

    fn way_of_volume(
        &self,
        volume: &VolumeName,
        other: &Other,
        replicas: &[Replica],
    ) -> Result<Cost, Refusal> {
        let is_far = other.site != self.link.addresses.site;
        if is_far && self.disks.is_confined(volume) {
            let why = "another site, and its policy is leave-site: never".to_owned();
            return Err(Refusal { why, passes: false });
        }
        let has_replica =
            |replica: &&Replica| replica.volume == *volume && replica.site == other.site;
        if let Some(replica) = replicas.iter().find(has_replica) {
            let why = format!(
                "its replica is at site {}, and no other site would have a copy of it",
                replica.site
            );
            return Err(Refusal { why, passes: false });
        }
        self.copy(&other.id, self.disks.bytes(volume))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}
