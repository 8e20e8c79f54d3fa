//! Decides which of the waiting jobs starts now, and where. It is a pure function of a snapshot.
//!
//! - **Order**: the tenant with the smallest share of the cluster comes next. Of its jobs a higher priority comes first, so
//!   nobody overtakes another tenant with a priority; within a priority comes the owner with the smallest share. The share
//!   is the larger of the shares of CPUs and memory (dominant resource fairness, Ghodsi et al., NSDI 2011). Of one owner's
//!   jobs the one that was submitted first comes next. Between equal shares the earlier submission decides.
//! - **Quotas**: a job waits while its tenant's quota has no room for it. What of the quota is not in use is reserved for the
//!   first job that waits for nothing else but the ends of others: the tenant's jobs behind it wait until it has started. So
//!   small jobs never starve a large one of their tenant. What VMs without a job have may never be free, so nothing is reserved
//!   for that.
//! - **Money**: a job waits while what its plan may cost at most has no room in its tenant's budget for the month, beside what is spent
//!   and reserved. What starts in this pass counts at once. Nothing is reserved for a job that waits for money.
//! - **Ageing**: a waiting job gains a point of priority over its tenant's jobs of other priorities in each
//!   [`AGEING_STEP_MS`], so that none starves. Ageing does not change the order within a priority.
//! - **Room**: a host takes a job when its vCPUs, its memory and a start slot are free for it.
//! - **Backfill**: if a job does not fit, the jobs behind it may start first, but a host is reserved for it:
//!   nothing else starts there until the job fits. For each start condition (anywhere, a site, a host) a host
//!   is reserved for the first such job only. So small jobs never starve a large one, and most hosts stay
//!   available. What VMs without a job have may never be free, so no host is reserved for that.
//! - **Gangs**: the VMs of a job with several ones start all or none, and at one site wherever a site is large enough for
//!   them; a gang waits for such a site rather than be torn apart. All are decided about at once, so two gangs never wait for
//!   what the other one holds. A gang that does not fit reserves as many hosts as it needs.
//! - **Groups**: a host counts as having no room for a job whose rules about other VMs it would break ([`Groups`]); what starts in this
//!   pass counts at once.
//! - **Rented hosts**: at a host that the cluster has rented by itself only those jobs start that the renting rule has put there ([`Rented`]).
//! - **Volumes**: a job that waits for a volume reserves it against the jobs behind it.
//! - **Plans**: while what a job's plan needs is being read, the room that it could have is kept for it.
//!
//! [`pass()`] is the whole of it, with the plans of the jobs that start; [`schedule`] asks for each of them where it starts.
//!
//! A job for which a host or room is kept has its volumes and its part of the quota reserved too. Else it could have one or the
//! other in turn, and never all.

mod gang;
mod groups;
mod pass;
mod refusals;
mod rented;
mod room;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use perigee_model::budget::Spending;
use perigee_model::job::{Access, JobVolume, Start};
use perigee_model::tenant::{Quota, Running, tenant_of};
use perigee_model::{HostId, JobId, SiteId, VolumeName};

pub use groups::{Bounds, Grouped, Groups};
pub use pass::{JobGrant, Known, NotMeasured, PassDecision, PassSnapshot, Read, pass};
pub use refusals::Refusals;
pub use rented::{Goes, Rented};
use room::{Rooms, Ruled, Wait};

/// The waiting time that is worth one point of priority.
pub const AGEING_STEP_MS: u64 = 10 * 60 * 1000;

/// The input of a scheduling decision.
#[derive(Debug, Clone, Default)]
pub struct Queue {
    /// Hosts that are up and not drained.
    pub hosts: Vec<HostRoom>,
    /// Hosts that are up and drained: nothing starts there. A job that could start nowhere else says so.
    pub drained: Vec<HostRoom>,
    /// The jobs that wait, in any order.
    pub waiting: Vec<Waiting>,
    /// The resources of each owner's jobs that no longer wait.
    pub held: BTreeMap<Holder, Demand>,
    /// The tenants that have a quota.
    pub quotas: BTreeMap<String, QuotaUse>,
    /// The volumes that these jobs use.
    pub uses: Vec<VolumeUse>,
    /// Where the VMs are that have rules about each other.
    pub grouped: Grouped,
    /// What the renting rule says.
    pub rented: Arc<Rented>,
}

/// A tenant's quota, and what is in use of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuotaUse {
    /// The most that it may have.
    pub quota: Quota,
    /// What its jobs have that no longer wait, and its VMs without a job.
    pub used: Running,
    /// The part of `used` that VMs without a job have. They do not end by themselves.
    pub persistent: Running,
    /// What it has spent in this month, and what is reserved.
    pub spending: Spending,
}

/// Whose a job is, to share the cluster fairly.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Tenants share the cluster equally.
    pub tenant: String,
    /// Owners share their tenant's part equally.
    pub owner: String,
}

impl Holder {
    /// Of a job with an owner; the job's id names its tenant.
    pub fn of(job: &JobId, owner: &str) -> Self {
        Self { tenant: tenant_of(job.as_str()).to_owned(), owner: owner.to_owned() }
    }
}

/// The resources that a host has for VMs: in total, and now.
#[derive(Debug, Clone)]
pub struct HostRoom {
    /// Unique in the queue.
    pub id: HostId,
    /// The site, for jobs that may start at one site only.
    pub site: SiteId,
    /// The resources without any VM, without the host's own reserve.
    pub total: Demand,
    /// The part of `total` that the placed VMs leave free.
    pub free: Demand,
    /// The part of `total` that VMs without a job have. They do not end by themselves.
    pub persistent: Demand,
    /// How many more jobs may be staged and booted there now.
    pub start_slots: u32,
}

impl HostRoom {
    /// What jobs will have when all that run have ended.
    fn for_jobs(&self) -> Demand {
        let mut room = self.total;
        room.take(self.persistent);
        room
    }
}

/// Resources: those that a VM needs, or those that a host has for VMs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// vCPUs. A host has several for each of its own CPUs.
    pub cpus: u32,
    /// Memory of the guests.
    pub memory_bytes: u64,
}

impl Demand {
    /// What one VM with this demand takes of its tenant's quota.
    pub fn running(self) -> Running {
        Running { vms: 1, cpus: self.cpus, memory_bytes: self.memory_bytes }
    }

    /// Of so many VMs.
    #[must_use]
    pub fn times(self, count: u32) -> Self {
        Self {
            cpus: self.cpus.saturating_mul(count),
            memory_bytes: self.memory_bytes.saturating_mul(count.into()),
        }
    }

    /// Of vCPUs and of memory what is less.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        Self {
            cpus: self.cpus.min(other.cpus),
            memory_bytes: self.memory_bytes.min(other.memory_bytes),
        }
    }

    /// How many VMs with this demand have room.
    pub fn holds(self, demand: Self) -> u32 {
        if !demand.fits(self) {
            return 0;
        }
        let by_cpus = self.cpus.checked_div(demand.cpus).unwrap_or(u32::MAX);
        let by_memory = self.memory_bytes.checked_div(demand.memory_bytes).unwrap_or(u64::MAX);
        by_cpus.min(u32::try_from(by_memory).unwrap_or(u32::MAX))
    }

    fn fits(self, room: Self) -> bool {
        self.cpus <= room.cpus && self.memory_bytes <= room.memory_bytes
    }

    /// Adds another demand.
    pub fn add(&mut self, other: Self) {
        self.cpus = self.cpus.saturating_add(other.cpus);
        self.memory_bytes = self.memory_bytes.saturating_add(other.memory_bytes);
    }

    /// Subtracts another demand; the result is never below 0.
    pub fn take(&mut self, other: Self) {
        self.cpus = self.cpus.saturating_sub(other.cpus);
        self.memory_bytes = self.memory_bytes.saturating_sub(other.memory_bytes);
    }
}

/// A job that waits.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// Unique in the queue.
    pub job: JobId,
    /// To whose share of the cluster it counts.
    pub holder: Holder,
    /// A higher priority starts sooner, among the jobs of the tenant.
    pub priority: i32,
    /// A number that grows with each submission.
    pub submitted: u64,
    /// Time since its submission.
    pub waited_ms: u64,
    /// The resources that its VM needs, or each of its VMs.
    pub demand: Demand,
    /// vCPUs of each VM that count for the quota, if they are more than those of `demand`.
    pub quota_cpus: u32,
    /// How many VMs it has.
    pub count: u32,
    /// Where the job file lets it start.
    pub start: Start,
    /// Its data volumes. It does not wait for a volume that it only clones.
    pub volumes: Vec<JobVolume>,
    /// Hosts where it may not start now.
    pub avoid: BTreeSet<HostId>,
    /// Its rules about other VMs.
    pub groups: Groups,
    /// Hosts where it was lost, and that still have something of it: the rule `together` does not bind it to them.
    pub lost_at: Vec<HostId>,
    /// Why it cannot start anywhere now; `None` unless the reason is outside this snapshot.
    pub blocked: Option<String>,
}

impl Waiting {
    /// The points of priority that it has gained by waiting.
    fn gained(&self) -> u64 {
        self.waited_ms / AGEING_STEP_MS
    }

    /// What all of its VMs need.
    fn whole(&self) -> Demand {
        self.demand.times(self.count)
    }

    /// What they take of the tenant's quota.
    fn running(&self) -> Running {
        let cpus = self.quota_cpus.max(self.demand.cpus).saturating_mul(self.count);
        Running { vms: self.count, cpus, ..self.whole().running() }
    }

    fn aged_priority(&self) -> i64 {
        i64::from(self.priority).saturating_add_unsigned(self.gained())
    }
}

/// A volume that a job uses directly, not through a clone.
#[derive(Debug, Clone)]
pub struct VolumeUse {
    /// The name in the job file.
    pub volume: VolumeName,
    /// The job that uses it. It is named in the reasons of the jobs that wait for the volume.
    pub job: JobId,
    /// Whether the job writes to it. Readers can share a volume, a writer can't.
    pub writes: bool,
}

/// The decision about a waiting job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// It starts now at this host.
    Start(HostId),
    /// Its VMs start now at these hosts, in the order of their ranks.
    StartAll(Vec<HostId>),
    /// It keeps waiting.
    Wait {
        /// Its position among the jobs of its tenant that wait after this decision, from 1.
        place: u32,
        /// Why, in plain words for its owner.
        reason: String,
        /// It waits for nothing but room at a host.
        for_room: bool,
    },
}

/// Why a job starts at none of the hosts that have room for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotChosen {
    /// No host has room for it, or it waits for a rented host.
    NoRoom(String),
    /// It waits, and others may have the room.
    Refused(String),
    /// What its plan needs is being read. The room is kept for it meanwhile.
    NotYet(String),
}

impl NotChosen {
    fn reason(self) -> String {
        match self {
            Self::NoRoom(reason) | Self::Refused(reason) | Self::NotYet(reason) => reason,
        }
    }
}

impl From<String> for NotChosen {
    fn from(reason: String) -> Self {
        Self::Refused(reason)
    }
}

/// Decides about every waiting job. `choose` picks one of the hosts that have room for a job, or returns why
/// the job starts at none of them. For a gang it is asked once for each VM.
pub fn schedule(
    queue: &Queue,
    choose: impl FnMut(&Waiting, &[HostId]) -> Result<HostId, NotChosen>,
) -> Vec<(JobId, Turn)> {
    let mut turns = Turns::new(queue, choose);
    let mut all = Vec::with_capacity(queue.waiting.len());
    while let Some(waiting) = turns.order.next() {
        all.push((waiting.job.clone(), turns.turn(waiting)));
    }
    all
}

/// What starts by the same decisions, each with the hosts of its VMs in the order of their ranks. Why the others wait is not found out: of
/// thousands of jobs that takes long.
pub fn starts(
    queue: &Queue,
    choose: impl FnMut(&Waiting, &[HostId]) -> Result<HostId, NotChosen>,
) -> Vec<(JobId, Vec<HostId>)> {
    let mut turns = Turns::new(queue, choose);
    let least = queue.waiting.iter().map(|waiting| waiting.demand).reduce(Demand::least);
    let is_rented = !queue.rented.goes.is_empty();
    let mut starts = Vec::new();
    while (is_rented || least.is_some_and(|least| turns.rooms.has_open(least)))
        && let Some(waiting) = turns.order.next()
    {
        if !is_rented && turns.changes_nothing(waiting) {
            continue;
        }
        let hosts = match turns.turn(waiting) {
            Turn::Start(host) => vec![host],
            Turn::StartAll(hosts) => hosts,
            Turn::Wait { .. } => continue,
        };
        starts.push((waiting.job.clone(), hosts));
    }
    starts
}

/// What is left while one waiting job after the other has its turn.
struct Turns<'a, C> {
    rooms: Rooms,
    uses: Uses,
    quotas: BTreeMap<&'a str, Left>,
    /// How many jobs of each tenant wait so far.
    places: BTreeMap<&'a str, u32>,
    order: InOrder<'a>,
    choose: C,
}

impl<'a, C> Turns<'a, C>
where
    C: FnMut(&Waiting, &[HostId]) -> Result<HostId, NotChosen>,
{
    fn new(queue: &'a Queue, choose: C) -> Self {
        let mut uses = Uses::default();
        uses.add(queue.uses.iter().cloned());
        let quotas = queue.quotas.iter().map(|(tenant, of)| (tenant.as_str(), Left::of(*of)));
        Self {
            rooms: Rooms::new(queue),
            uses,
            quotas: quotas.collect(),
            places: BTreeMap::new(),
            order: InOrder::new(queue),
            choose,
        }
    }

    fn turn(&mut self, waiting: &'a Waiting) -> Turn {
        let quota = self.quotas.get_mut(waiting.holder.tenant.as_str());
        let turn = try_start(waiting, &mut self.rooms, &mut self.uses, quota, &mut self.choose);
        turn.unwrap_or_else(|not_chosen| {
            let for_room = matches!(not_chosen, NotChosen::NoRoom(_));
            let mut reason = not_chosen.reason();
            let place = self.places.entry(&waiting.holder.tenant).or_default();
            *place += 1;
            if waiting.gained() > 0 {
                let (from, to) = (waiting.priority, waiting.aged_priority());
                reason = format!("{reason}; its wait has raised its priority from {from} to {to}");
            }
            Turn::Wait { place: *place, reason, for_room }
        })
    }

    /// Whether it waits for a host, and nothing is reserved for it.
    fn changes_nothing(&self, waiting: &Waiting) -> bool {
        let has_quota = self.quotas.contains_key(waiting.holder.tenant.as_str());
        let may_reserve =
            has_quota || !waiting.volumes.is_empty() || !self.rooms.kept.contains(&waiting.start);
        !may_reserve && !self.rooms.has_open(waiting.demand)
    }
}

fn try_start(
    waiting: &Waiting,
    rooms: &mut Rooms,
    uses: &mut Uses,
    mut quota: Option<&mut Left>,
    choose: &mut impl FnMut(&Waiting, &[HostId]) -> Result<HostId, NotChosen>,
) -> Result<Turn, NotChosen> {
    if let Some(reason) = &waiting.blocked {
        return Err(reason.clone().into());
    }
    if let Some(reason) = quota.as_deref().and_then(|quota| quota.never_has(waiting)) {
        return Err(reason.into());
    }
    if let Some(reason) = uses.why_taken(waiting) {
        uses.add(uses_of(waiting));
        return Err(reason.into());
    }
    let ruled = rooms.ruled(waiting);
    if let Some(reason) = quota.as_deref_mut().and_then(|quota| quota.lacks(&ruled, rooms)) {
        return Err(reason.into());
    }
    let turn = match waiting.count {
        1 => start_one(&ruled, rooms, choose).map(Turn::Start),
        _ if ruled.is_one_host() => start_at_one_host(&ruled, rooms, choose).map(Turn::StartAll),
        _ => gang::start(&ruled, rooms, choose).map(Turn::StartAll),
    };
    match &turn {
        Ok(Turn::Start(host)) => rooms.has_started(waiting, std::slice::from_ref(host)),
        Ok(Turn::StartAll(hosts)) => rooms.has_started(waiting, hosts),
        _ => {}
    }
    let is_kept = match &turn {
        Ok(_) => false,
        Err(NotChosen::NotYet(_)) => true,
        Err(NotChosen::NoRoom(_) | NotChosen::Refused(_)) => rooms.keep_one_for(&waiting.job),
    };
    if turn.is_ok() || is_kept {
        uses.add(uses_of(waiting));
    }
    if let Some(quota) = quota {
        if turn.is_ok() {
            quota.of.used.add(waiting.running());
        } else if is_kept {
            quota.keep(waiting);
        }
    }
    turn
}

/// What is left of a tenant's quota while the queue is processed.
struct Left {
    of: QuotaUse,
    /// What is reserved beside what is in use.
    kept: Running,
    /// The last job for which something is.
    kept_for: Option<JobId>,
}

impl Left {
    fn of(of: QuotaUse) -> Self {
        Self { of, kept: Running::default(), kept_for: None }
    }

    fn keep(&mut self, waiting: &Waiting) {
        self.kept.add(waiting.running());
        self.kept_for = Some(waiting.job.clone());
    }

    /// Why the quota has no room for the job when all of the tenant's jobs have ended.
    fn never_has(&self, waiting: &Waiting) -> Option<String> {
        let QuotaUse { quota, used, persistent, .. } = &self.of;
        quota.lacks(*persistent, waiting.running())?;
        let reason = quota.lacks(*used, waiting.running())?;
        Some(match quota.lacks(Running::default(), waiting.running()) {
            Some(_) => reason,
            None => format!("{reason}; VMs without a job leave less than it needs"),
        })
    }

    /// Why the quota has no room for the job now. If nothing is missing but what other jobs have, all of the rest is reserved
    /// for it, unless it is for another one.
    fn lacks(&mut self, waiting: &Ruled, rooms: &Rooms) -> Option<String> {
        let all = Running { vms: u32::MAX, cpus: u32::MAX, memory_bytes: u64::MAX };
        let QuotaUse { quota, used, .. } = &self.of;
        if let Some(reason) = quota.lacks(*used, waiting.running()) {
            if self.kept == all || !gang::may_have_room(waiting, rooms) {
                return Some(reason);
            }
            (self.kept, self.kept_for) = (all, Some(waiting.job.clone()));
            return Some(format!("{reason}; the rest of the quota is reserved for it"));
        }
        let mut taken = *used;
        taken.add(self.kept);
        quota.lacks(taken, waiting.running())?;
        let other = self.kept_for.as_ref()?;
        Some(format!("the rest of the tenant's quota is reserved for job {other}"))
    }
}

fn start_one(
    waiting: &Ruled,
    rooms: &mut Rooms,
    choose: &mut impl FnMut(&Waiting, &[HostId]) -> Result<HostId, NotChosen>,
) -> Result<HostId, NotChosen> {
    let Some(goes) = &waiting.goes else { return start_at_one(waiting, rooms, choose) };
    if let Some(reason) = goes.why_wait() {
        return Err(NotChosen::NoRoom(reason));
    }
    // The renting rule knows less of it and of the host's room than its plan and the queue.
    let there = match start_at_one(waiting, rooms, choose) {
        Err(there @ (NotChosen::NoRoom(_) | NotChosen::Refused(_))) => there,
        chosen => return chosen,
    };
    match (start_at_one(&waiting.at_own_hosts(), rooms, choose), there) {
        (Err(NotChosen::NoRoom(_)), there @ NotChosen::NoRoom(_)) => Err(there),
        (Err(not @ (NotChosen::NoRoom(_) | NotChosen::Refused(_))), _) => Err(not),
        (own, _) => {
            rooms.keep_none_for(waiting);
            own
        }
    }
}

fn start_at_one(
    waiting: &Ruled,
    rooms: &mut Rooms,
    choose: &mut impl FnMut(&Waiting, &[HostId]) -> Result<HostId, NotChosen>,
) -> Result<HostId, NotChosen> {
    let hosts = rooms.with_room(waiting).map_err(|wait| {
        let is_for_ever = matches!(
            wait,
            Wait::NoHost | Wait::RuledOut | Wait::TooLarge(..) | Wait::PersistentVms
        );
        let drained = rooms.why_drained(waiting).filter(|_| is_for_ever);
        let reason = drained.unwrap_or_else(|| wait.reason(waiting));
        NotChosen::NoRoom(waiting.with_rules(reason))
    })?;
    let chosen = choose(waiting, &hosts);
    let taken = match &chosen {
        Ok(host) => Some(host),
        // Which one it will be is not known yet.
        Err(NotChosen::NotYet(_)) => hosts.first(),
        Err(NotChosen::NoRoom(_) | NotChosen::Refused(_)) => None,
    };
    if let Some(host) = taken {
        rooms.take(host, waiting.demand);
    }
    chosen
}

/// All VMs of a gang that are kept together, as if they were one large VM.
fn start_at_one_host(
    waiting: &Ruled,
    rooms: &mut Rooms,
    choose: &mut impl FnMut(&Waiting, &[HostId]) -> Result<HostId, NotChosen>,
) -> Result<Vec<HostId>, NotChosen> {
    let whole = waiting.as_one();
    let ruled = rooms.ruled(&whole);
    let before = rooms.clone();
    // The whole of it has to fit; each VM of it is planned and placed as one.
    let host =
        start_one(&ruled, rooms, &mut |_: &Waiting, hosts: &[HostId]| choose(waiting, hosts))?;
    for _ in 1..waiting.count {
        if let Err(not_chosen) = choose(waiting, std::slice::from_ref(&host)) {
            if !matches!(not_chosen, NotChosen::NotYet(_)) {
                *rooms = before;
            }
            return Err(not_chosen);
        }
    }
    Ok(vec![host; waiting.count as usize])
}

fn uses_of(waiting: &Waiting) -> impl Iterator<Item = VolumeUse> {
    let shared = waiting.volumes.iter().filter(|volume| volume.access != Access::Clone);
    shared.map(|volume| VolumeUse {
        volume: volume.volume.clone(),
        job: waiting.job.clone(),
        writes: volume.access == Access::Write,
    })
}

/// Who uses each volume, or has it reserved.
#[derive(Default)]
struct Uses(BTreeMap<VolumeName, Vec<VolumeUse>>);

impl Uses {
    fn add(&mut self, uses: impl Iterator<Item = VolumeUse>) {
        for one in uses {
            self.0.entry(one.volume.clone()).or_default().push(one);
        }
    }

    /// A volume that is written has one user, because a reader cannot use a filesystem that changes underneath.
    fn why_taken(&self, waiting: &Waiting) -> Option<String> {
        let taken = uses_of(waiting).find_map(|own| {
            let mut others = self.0.get(&own.volume)?.iter();
            others.find(|other| own.writes || other.writes)
        })?;
        Some(format!("volume {} is in use by {}", taken.volume, named(&taken.job, waiting)))
    }
}

/// A job as the owner of another one may know it.
fn named(job: &JobId, to: &Waiting) -> String {
    if tenant_of(job.as_str()) == to.holder.tenant {
        format!("job {job}")
    } else {
        "another job".to_owned()
    }
}

/// Jobs from which one is chosen. The key is the share to which a job counts, and the order between equal shares.
type Firsts<'a> = BTreeMap<(u64, u64, &'a JobId), &'a Waiting>;

fn key(share: u64, first: &Waiting) -> (u64, u64, &JobId) {
    (share, first.submitted, &first.job)
}

/// A tenant's jobs of one priority.
#[derive(Default)]
struct Line<'a> {
    /// Each owner's first submission comes first.
    owners: BTreeMap<&'a Holder, VecDeque<&'a Waiting>>,
    /// The first one of each owner, by the owner's share.
    firsts: Firsts<'a>,
}

impl<'a> Line<'a> {
    fn push(&mut self, share: u64, waiting: &'a Waiting) {
        let of_owner = self.owners.entry(&waiting.holder).or_default();
        if of_owner.is_empty() {
            self.firsts.insert(key(share, waiting), waiting);
        }
        of_owner.push_back(waiting);
    }

    /// The owner's share was `before` and is `now`. If `is_taken`, its first job is not in the line any more.
    fn changed(&mut self, holder: &Holder, (before, now): (u64, u64), is_taken: bool) {
        let Some(of_owner) = self.owners.get_mut(holder) else { return };
        if let Some(first) = of_owner.front().copied() {
            self.firsts.remove(&key(before, first));
        }
        if is_taken {
            of_owner.pop_front();
        }
        if let Some(first) = of_owner.front().copied() {
            self.firsts.insert(key(now, first), first);
        } else {
            self.owners.remove(holder);
        }
    }
}

/// A tenant's jobs.
type Lines<'a> = BTreeMap<Reverse<i32>, Line<'a>>;

/// A tenant's next job.
fn first_of<'a>(lines: &Lines<'a>) -> Option<&'a Waiting> {
    let firsts = lines.values().filter_map(|line| line.firsts.first_key_value());
    // Of equal priorities `min_by_key` returns the first, which is the higher one before ageing.
    firsts.map(|(_, first)| *first).min_by_key(|first| Reverse(first.aged_priority()))
}

/// The waiting jobs in scheduling order. Each job counts to its owner's share as soon as it was returned. With each job only
/// its owner and its tenant are looked at again: there may be thousands of them.
struct InOrder<'a> {
    tenants: BTreeMap<&'a str, Lines<'a>>,
    /// The next one of each tenant, by the tenant's share.
    firsts: Firsts<'a>,
    held: BTreeMap<&'a Holder, Demand>,
    held_by_tenants: BTreeMap<&'a str, Demand>,
    total: Demand,
}

impl<'a> InOrder<'a> {
    fn new(queue: &'a Queue) -> Self {
        let mut all: Vec<&Waiting> = queue.waiting.iter().collect();
        all.sort_by_key(|waiting| (waiting.submitted, &waiting.job));
        let mut total = Demand::default();
        queue.hosts.iter().for_each(|host| total.add(host.total));
        let (held, held_by_tenants) = (BTreeMap::new(), BTreeMap::new());
        let (tenants, firsts) = (BTreeMap::new(), BTreeMap::new());
        let mut order = Self { tenants, firsts, held, held_by_tenants, total };
        queue.held.iter().for_each(|(holder, held)| order.hold(holder, *held));
        for waiting in all {
            let share = order.owners_share(&waiting.holder);
            let lines = order.tenants.entry(waiting.holder.tenant.as_str()).or_default();
            lines.entry(Reverse(waiting.priority)).or_default().push(share, waiting);
        }
        let firsts = order.tenants.iter().filter_map(|(tenant, lines)| {
            let first = first_of(lines)?;
            Some((key(order.tenants_share(tenant), first), first))
        });
        order.firsts = firsts.collect();
        order
    }

    fn hold(&mut self, holder: &'a Holder, demand: Demand) {
        self.held.entry(holder).or_default().add(demand);
        self.held_by_tenants.entry(&holder.tenant).or_default().add(demand);
    }

    fn owners_share(&self, holder: &Holder) -> u64 {
        self.share(self.held.get(holder).copied().unwrap_or_default())
    }

    fn tenants_share(&self, tenant: &str) -> u64 {
        self.share(self.held_by_tenants.get(tenant).copied().unwrap_or_default())
    }

    /// The larger of the shares of CPUs and memory, in millionths of the cluster.
    fn share(&self, held: Demand) -> u64 {
        let of = |part: u64, whole: u64| {
            let share = u128::from(part) * 1_000_000 / u128::from(whole.max(1));
            u64::try_from(share).unwrap_or(u64::MAX)
        };
        of(held.cpus.into(), self.total.cpus.into())
            .max(of(held.memory_bytes, self.total.memory_bytes))
    }
}

impl<'a> Iterator for InOrder<'a> {
    type Item = &'a Waiting;

    fn next(&mut self) -> Option<&'a Waiting> {
        let (_, waiting) = self.firsts.pop_first()?;
        let holder = &waiting.holder;
        let before = self.owners_share(holder);
        self.hold(holder, waiting.whole());
        let shares = (before, self.owners_share(holder));
        let tenants_share = self.tenants_share(&holder.tenant);
        let lines = self.tenants.get_mut(holder.tenant.as_str())?;
        for (priority, line) in &mut *lines {
            line.changed(holder, shares, priority.0 == waiting.priority);
        }
        if let Some(first) = first_of(lines) {
            self.firsts.insert(key(tenants_share, first), first);
        }
        Some(waiting)
    }
}
