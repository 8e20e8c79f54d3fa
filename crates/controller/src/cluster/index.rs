//! The index of unfinished jobs and migrations in memory, so that the store need not be listed to place, move
//! or show a job.
//!
//! The store is written before the index: every owner of a record updates the index after it has saved the
//! record. The index also has reservations that are not stored: hosts given to queued jobs, room for a VM
//! that is about to move, and the [`holds::Hold`]s that replace locks over calls to hosts. All of these are decided
//! under one lock that is never held while waiting. After a restart they are decided again.

pub mod groups;
pub mod holds;
mod homes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::budget::MoneyRange;
use perigee_model::gang::member_of;
use perigee_model::job::{Access, JobState, JobVolume, Migration, MigrationState};
use perigee_model::plan::{Estimate, Plan, PredictedEnd};
use perigee_model::tenant::{Running, tenant_of};
use perigee_model::{HostId, JobId, Problem, VmId, VolumeName};
use perigee_planner::Traits;
use perigee_planner::queue::{Demand, Groups, Holder, VolumeUse};
use tokio::sync::Notify;

use holds::Held;

use crate::records::{
    JobRecord, Kind, MigrationRecord, PROMOTIONS, PromotedVolume, Records, VolumeMoveRecord, vm_of,
};

/// Predictions that are older are not shown.
const END_AGE_MAX: Duration = Duration::from_secs(10);

/// So many of a tenant's last jobs that have failed are kept in memory.
const FAILED_MAX: usize = 100;

/// How many of the last completed migrations the planner learns from: of one tenant's VMs, if others' have moved too, and of all.
const PAST_MOVES_OF_TENANT_MAX: usize = 10;
const PAST_MOVES_MAX: usize = 50;

/// What is not over, by what it is asked for: jobs, migrations, moves of volumes, and what holds volumes and VMs. It
/// follows the records, and has nothing that they do not say, but for grants, waits, predicted ends and holds, which a
/// restarted controller makes again.
#[derive(Debug, Default)]
pub struct Index {
    inner: Mutex<Inner>,
    /// Notified of changes after which a queued job may start.
    pub changed: Notify,
    /// Notified when a VM or a volume has moved, or has not, and when a job's record says where its VM is now.
    pub moved: Notify,
    pub tally: Tally,
}

/// What has ended since the controller started.
#[derive(Debug, Default)]
pub struct Tally {
    pub jobs_succeeded: AtomicU64,
    pub jobs_failed: AtomicU64,
    pub jobs_cancelled: AtomicU64,
    pub moves_completed: AtomicU64,
    pub moves_aborted: AtomicU64,
    /// Of completed migrations.
    pub moved_bytes: AtomicU64,
    /// Of completed migrations.
    pub downtime_ms: AtomicU64,
}

impl Tally {
    fn job_ended(&self, state: JobState) {
        let count = match state {
            JobState::Succeeded => &self.jobs_succeeded,
            JobState::Failed => &self.jobs_failed,
            _ => &self.jobs_cancelled,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    fn migration_ended(&self, migration: &Migration) {
        if migration.state != MigrationState::Completed {
            self.moves_aborted.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.moves_completed.fetch_add(1, Ordering::Relaxed);
        self.moved_bytes.fetch_add(migration.bytes, Ordering::Relaxed);
        self.downtime_ms.fetch_add(migration.downtime_ms, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Inner {
    /// The jobs that are not in a final state.
    jobs: BTreeMap<JobId, Arc<JobRecord>>,
    /// The migrations of these jobs' VMs.
    migrations: BTreeMap<(VmId, u32), Arc<MigrationRecord>>,
    /// The last completed migrations of all jobs.
    past_moves: Vec<Arc<MigrationRecord>>,
    /// Queued jobs that may start, until their driver has recorded it.
    grants: BTreeMap<JobId, Arc<Grant>>,
    /// The positions of the other queued jobs, and the reasons why they wait.
    waits: BTreeMap<JobId, (u32, String)>,
    /// The predicted ends of running jobs, and when they were predicted.
    ends: BTreeMap<JobId, (Instant, PredictedEnd)>,
    held: Vec<Held>,
    /// The last move of each volume that ever moved.
    volume_moves: BTreeMap<VolumeName, Arc<VolumeMoveRecord>>,
    /// How often a volume may have got another home since the controller started.
    home_changes: u64,
    /// Which of these changes was each volume's last one.
    last_home_changes: BTreeMap<VolumeName, u64>,
    /// The last one of the volumes that are no longer among them.
    forgotten_home_change: u64,
    /// How many records of jobs and VMs each tenant has in the store.
    kept: BTreeMap<String, u64>,
    /// The groups of the rules that VMs were given and that their drivers have not recorded yet, with the number of the request.
    rules_asked: BTreeMap<JobId, (u64, Groups)>,
    /// What VMs have above the least of their memory and can't give back.
    lent: BTreeMap<VmId, Lent>,
    /// The last jobs that have failed.
    failed: BTreeMap<JobId, Arc<JobRecord>>,
}

/// The host where a queued job starts, with the plan that explains the choice.
#[derive(Debug)]
pub struct Grant {
    pub host: HostId,
    pub plan: Plan,
    pub predicted: Estimate,
    /// What all of its VMs cost, as their plans say; `None` if that is not known, or if nothing costs anything.
    pub cost: Option<MoneyRange>,
    /// The traits by which later jobs find this run.
    pub traits: Traits,
    /// In the order of the job file.
    pub volume_homes: Vec<HostId>,
    /// Where the other VMs of a gang start, in the order of their ranks.
    pub others: Vec<HostId>,
    /// [`Index::home_changes`] before these homes were looked for.
    pub homes_at: u64,
}

impl Grant {
    /// Where the job's VMs start, in the order of their ranks.
    pub fn hosts(&self) -> impl Iterator<Item = &HostId> {
        std::iter::once(&self.host).chain(&self.others)
    }
}

/// What the jobs have that no longer wait.
#[derive(Debug, Default)]
pub struct Usage {
    pub held: BTreeMap<Holder, Demand>,
    /// By tenant.
    pub running: BTreeMap<String, Running>,
    /// The part of it that VMs without a job have.
    pub persistent: BTreeMap<String, Running>,
    pub uses: Vec<VolumeUse>,
}

/// The reserved capacity of a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    pub demand: Demand,
    /// The part of it that VMs without a job have.
    pub persistent: Demand,
    /// The vCPUs that its VMs have, also those that are lent.
    pub vcpus: u32,
    pub vms: u32,
    /// Jobs among them whose volumes are being made or whose guest boots.
    pub starting: u32,
}

impl Used {
    fn add(&mut self, record: &JobRecord, demand: Demand) {
        self.demand.add(demand);
        if record.kind.is_persistent_vm() {
            self.persistent.add(demand);
        }
        self.vcpus = self.vcpus.saturating_add(record.job.spec.cpus_most());
        self.vms += 1;
    }
}

/// Why a host has a VM, or is kept for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It is being staged, or boots there.
    Starts,
    Runs,
    /// It moves there.
    Comes,
}

/// What a VM has above the least of its memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lent {
    /// What it can't give back.
    pub keeps_bytes: u64,
    /// What it has, or may have. That goes with it when it moves.
    pub has_bytes: u64,
}

/// The vCPUs and the memory that a job's VM always has; of a gang, those of one of its VMs.
pub fn demand_of(record: &JobRecord) -> Demand {
    let spec = &record.job.spec;
    Demand { cpus: spec.cpus, memory_bytes: spec.memory_bytes }
}

/// The volumes that a placed job uses exclusively. A clone is its own and does not count.
fn volume_uses(record: &JobRecord) -> Vec<VolumeUse> {
    let shared = record.job.spec.volumes.iter().filter(|v| v.access != Access::Clone);
    shared
        .map(|volume| VolumeUse {
            volume: volume.volume.clone(),
            job: record.job.id.clone(),
            writes: volume.access == Access::Write,
        })
        .collect()
}

impl Index {
    /// The unfinished job with this VM, or the VM's own record if it lives without a job.
    pub fn of_vm(&self, vm: &VmId) -> Option<Arc<JobRecord>> {
        let id = JobId::new(vm.as_str()).ok()?;
        self.job(&id).filter(|record| record.job.vm.as_ref() == Some(vm))
    }

    /// Makes the index from the store.
    ///
    /// # Errors
    /// If the store does not answer, or a record can't be read.
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let index = Self::default();
        for record in records.list::<JobRecord>("jobs/").await? {
            index.note_kept(&record.job.id);
            index.put_job(&record);
        }
        index.keep_rules_asked_for(records).await?;
        let mut migrations: Vec<MigrationRecord> = records.list("migrations/").await?;
        migrations.sort_by_key(|record| record.migration.started_ms);
        migrations.iter().for_each(|record| index.put_migration(record));
        for record in records.list::<VolumeMoveRecord>("volume_moves/").await? {
            index.put_volume_move(&record);
        }
        for promoted in records.list::<PromotedVolume>(PROMOTIONS).await? {
            index.keep_promotion(&promoted.volume);
        }
        Ok(index)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over a job's record, after each write of it. An ended job leaves the index.
    pub fn put_job(&self, record: &JobRecord) {
        let id = &record.job.id;
        let mut inner = self.lock();
        let rests = record.kind.rests();
        if record.job.state != JobState::Queued || rests {
            inner.grants.remove(id);
            inner.waits.remove(id);
        }
        if record.job.state != JobState::Running {
            inner.ends.remove(id);
        }
        let before = if record.job.state.is_final() {
            if let Some(vm) = &record.job.vm {
                inner.migrations.retain(|(of, _), _| of != vm);
            }
            inner.keep_failed(record);
            inner.jobs.remove(id)
        } else {
            inner.jobs.insert(id.clone(), Arc::new(record.clone()))
        };
        inner.forget_rules_recorded(id);
        drop(inner);
        let is_a_job = record.kind.is_a_job();
        if record.job.state.is_final() && before.is_some() && is_a_job {
            self.tally.job_ended(record.job.state);
        }
        let same = before.is_some_and(|old| {
            (old.job.state, &old.job.host, old.kind.persistent_vm())
                == (record.job.state, &record.job.host, record.kind.persistent_vm())
        });
        if !same {
            self.changed.notify_one();
            self.moved.notify_one();
        }
    }

    /// Takes over a migration's record, after each write of it.
    pub fn put_migration(&self, record: &MigrationRecord) {
        let vm = &record.migration.vm;
        let mut inner = self.lock();
        let state = record.migration.state;
        if state == MigrationState::Completed
            && !inner.past_moves.iter().any(|past| past.migration.id == record.migration.id)
        {
            inner.add_past_move(record);
        }
        // The migrations of an ended job are not needed.
        let mut before = None;
        if inner.job_of(vm).is_some() {
            before = inner.migrations.insert((vm.clone(), record.number), Arc::new(record.clone()));
        }
        drop(inner);
        if state.is_final() {
            if before.is_some_and(|before| !before.migration.state.is_final()) {
                self.tally.migration_ended(&record.migration);
            }
            self.changed.notify_one();
            self.moved.notify_one();
        }
    }

    /// The store has one more record of a job or VM.
    pub fn note_kept(&self, id: &JobId) {
        *self.lock().kept.entry(tenant_of(id.as_str()).to_owned()).or_default() += 1;
    }

    /// The store has one less.
    pub fn note_erased(&self, id: &JobId) {
        let mut inner = self.lock();
        inner.failed.remove(id);
        if let Some(kept) = inner.kept.get_mut(tenant_of(id.as_str())) {
            *kept = kept.saturating_sub(1);
        }
    }

    /// The last jobs that have failed, of each tenant at most [`FAILED_MAX`].
    pub fn failed(&self) -> Vec<Arc<JobRecord>> {
        self.lock().failed.values().cloned().collect()
    }

    /// How many records of jobs and VMs a tenant has in the store.
    pub fn kept_of(&self, tenant: &str) -> u64 {
        self.lock().kept.get(tenant).copied().unwrap_or(0)
    }

    /// How many jobs of a tenant have not ended, each with all of its VMs as one.
    pub fn unfinished_of(&self, tenant: &str) -> u64 {
        let inner = self.lock();
        let own = inner
            .jobs
            .values()
            .filter(|record| record.kind.is_a_job() && tenant_of(record.job.id.as_str()) == tenant);
        own.count() as u64
    }

    /// The records of all jobs and VMs that are not in a final state.
    pub fn jobs(&self) -> Vec<Arc<JobRecord>> {
        self.lock().jobs.values().cloned().collect()
    }

    /// The record of a job or VM that is not in a final state.
    pub fn job(&self, id: &JobId) -> Option<Arc<JobRecord>> {
        self.lock().jobs.get(id).cloned()
    }

    /// A running job's end, predicted from figures that were read then.
    pub fn put_end(&self, job: &JobId, read: Instant, end: PredictedEnd) {
        self.lock().ends.insert(job.clone(), (read, end));
    }

    /// Whether its end was predicted this long ago, or never.
    pub fn is_end_older(&self, job: &JobId, age: Duration) -> bool {
        self.lock().ends.get(job).is_none_or(|(at, _)| at.elapsed() >= age)
    }

    /// When a running job ends, as it was last predicted.
    pub fn predicted_end(&self, job: &JobId) -> PredictedEnd {
        let found = self.lock().ends.get(job).cloned();
        let not_known = |why| PredictedEnd { left: None, why };
        let Some((at, end)) = found else {
            return not_known("the figures of its VM were not read yet".to_owned());
        };
        let age = at.elapsed();
        if age > END_AGE_MAX {
            return not_known(format!(
                "the figures of its VM were last read {} s ago",
                age.as_secs()
            ));
        }
        let left = end.left.map(|left| left.after(age.as_secs_f64()));
        if left.is_some_and(|left| left.high_s <= 0.0) {
            return not_known("it takes longer than its last figures have shown".to_owned());
        }
        PredictedEnd { left, ..end }
    }

    /// The last completed migrations, the newest last, as many as the planner learns from.
    pub fn past_moves(&self) -> Vec<Arc<MigrationRecord>> {
        self.lock().past_moves.clone()
    }

    /// The migrations of a VM up to this one are not kept any more.
    pub fn forget_migrations(&self, vm: &VmId, last: u32) {
        self.lock().migrations.retain(|(of, number), _| of != vm || *number > last);
    }

    /// The migrations of an unfinished job's VM that are kept, the first one first.
    pub fn migrations_of(&self, vm: &VmId) -> Vec<Arc<MigrationRecord>> {
        let inner = self.lock();
        let of_vm = inner.migrations.range((vm.clone(), 0)..=(vm.clone(), u32::MAX));
        of_vm.map(|(_, record)| Arc::clone(record)).collect()
    }

    /// Where a job's VM is. A VM that has just arrived is at its new host, also before its driver has recorded that.
    pub fn host_of(&self, record: &JobRecord) -> Option<HostId> {
        let moves = self.migrations_of(&vm_of(&record.job.id)).into_iter().rev();
        let arrived = moves.take_while(|moved| moved.number > record.settled);
        let mut arrived =
            arrived.filter(|moved| moved.migration.state == MigrationState::Completed);
        let to = arrived.next().map(|moved| moved.migration.to.clone());
        to.or_else(|| record.job.host.clone())
    }

    /// The migrations that are not in a final state.
    pub fn unfinished_migrations(&self) -> Vec<Arc<MigrationRecord>> {
        let inner = self.lock();
        let unfinished = inner.migrations.values().filter(|r| !r.migration.state.is_final());
        unfinished.cloned().collect()
    }

    /// The hosts that VMs leave or come to.
    pub fn hosts_in_moves(&self) -> BTreeSet<HostId> {
        self.lock().hosts_in_moves()
    }

    /// The reserved capacity of each host: for every VM that is or will be there, and for every VM that is moving
    /// there or has arrived.
    pub fn used(&self) -> BTreeMap<HostId, Used> {
        self.lock().used()
    }

    /// What a job's VM has now that nobody else can have.
    pub fn demand_now(&self, record: &JobRecord) -> Demand {
        self.lock().demand_now(record)
    }

    /// What a job's VM takes along when it moves.
    pub fn demand_to_move(&self, record: &JobRecord) -> Demand {
        self.lock().demand_to_move(record)
    }

    /// What a VM of a gang takes along when all of them move: of memory that is lent, as much as the one that has most.
    pub fn demand_to_move_all(&self, gang: &JobRecord) -> Demand {
        let inner = self.lock();
        let ranks = 0..gang.job.spec.count;
        let members = ranks.filter_map(|rank| inner.jobs.get(&member_of(&gang.job.id, rank)));
        members.fold(demand_of(gang), |most, member| {
            let of_it = inner.demand_to_move(member);
            Demand {
                cpus: most.cpus.max(of_it.cpus),
                memory_bytes: most.memory_bytes.max(of_it.memory_bytes),
            }
        })
    }

    /// Notes what VMs have above the least of their memory. Of all others that is nothing.
    pub fn note_lent(&self, lent: BTreeMap<VmId, Lent>) {
        self.lock().lent = lent;
    }

    // --- the queue ---

    /// The queued jobs that no host was given to.
    pub fn waiting(&self) -> Vec<Arc<JobRecord>> {
        let inner = self.lock();
        let waiting = inner.jobs.values().filter(|record| {
            record.job.state == JobState::Queued
                && record.ending.is_none()
                && record.kind.waits_for_a_host()
                && !inner.grants.contains_key(&record.job.id)
        });
        waiting.cloned().collect()
    }

    /// The capacity of the jobs that no longer wait, and the volumes that they use.
    pub fn taken(&self) -> Usage {
        let inner = self.lock();
        let mut taken = Usage::default();
        for (id, record) in &inner.jobs {
            let granted = inner.grants.contains_key(id);
            if record.job.state == JobState::Queued && !granted {
                continue;
            }
            let holder = Holder::of(id, &record.job.spec.owner);
            // The members of a gang count by themselves as soon as they are there.
            let count = match &record.kind {
                Kind::Gang(_) if granted => record.job.spec.count,
                Kind::Gang(_) => inner.missing_members(record).len().try_into().unwrap_or(u32::MAX),
                Kind::Job | Kind::Member(_) | Kind::PersistentVm(_) => 1,
            };
            let demand = inner.demand_now(record).times(count);
            // Nobody takes vCPUs back, so all of them count.
            let cpus = record.job.spec.cpus_most().saturating_mul(count);
            let running = Running { vms: count, cpus, ..demand.running() };
            taken.running.entry(holder.tenant.clone()).or_default().add(running);
            if record.kind.is_persistent_vm() {
                taken.persistent.entry(holder.tenant.clone()).or_default().add(running);
            }
            taken.held.entry(holder).or_default().add(demand);
            taken.uses.extend(volume_uses(record));
        }
        taken
    }

    /// Lets a queued job start, unless a volume of it may have got another home in the meantime, or its rules about other VMs do not let it be
    /// there any more. `binds` says whether a host keeps the others of a group together.
    pub fn give(&self, job: &JobId, grant: Grant, binds: impl Fn(&HostId) -> bool) -> bool {
        let mut inner = self.lock();
        let Some(record) = inner.jobs.get(job) else { return false };
        let mut volumes = record.job.spec.volumes.iter();
        // The job may have been cancelled in the meantime.
        let rests = record.kind.rests();
        if record.job.state != JobState::Queued
            || rests
            || inner.is_ruled_out(record, &grant.hosts().collect::<Vec<_>>(), binds)
            || volumes.any(|JobVolume { volume, .. }| {
                inner.home_changed_since(volume, grant.homes_at)
                    || inner.is_changing_home(volume)
                    || inner.is_being_attached(volume)
            })
        {
            return false;
        }
        inner.waits.remove(job);
        inner.grants.insert(job.clone(), Arc::new(grant));
        true
    }

    /// Where the scheduler lets a queued job start; `None` while it waits.
    pub fn grant_of(&self, job: &JobId) -> Option<Arc<Grant>> {
        self.lock().grants.get(job).cloned()
    }

    /// The job can't start now: its hosts are free for others, from the next pass of the scheduler on.
    pub fn take_back(&self, job: &JobId) {
        self.lock().grants.remove(job);
    }

    /// Sets the reasons why jobs wait.
    pub fn set_waits(&self, waits: BTreeMap<JobId, (u32, String)>) {
        self.lock().waits = waits;
    }

    /// The job's place in the queue and why it waits, as of the scheduler's last pass.
    pub fn wait_of(&self, job: &JobId) -> Option<(u32, String)> {
        self.lock().waits.get(job).cloned()
    }
}

impl Inner {
    /// Adds a move, the newest last. A tenant whose VMs move often doesn't push out those of another one.
    fn add_past_move(&mut self, newest: &MigrationRecord) {
        self.past_moves.push(Arc::new(newest.clone()));
        let of = |past: &MigrationRecord| tenant_of(past.migration.vm.as_str()).to_owned();
        let newest_of = of(newest);
        // A tenant whose VMs alone have moved may have them all.
        if self.past_moves.iter().any(|past| of(past) != newest_of) {
            let mut counts: BTreeMap<String, usize> = BTreeMap::new();
            // The newest ones stay.
            self.past_moves.reverse();
            self.past_moves.retain(|past| {
                let count = counts.entry(of(past)).or_default();
                *count += 1;
                *count <= PAST_MOVES_OF_TENANT_MAX
            });
            self.past_moves.reverse();
        }
        let excess = self.past_moves.len().saturating_sub(PAST_MOVES_MAX);
        self.past_moves.drain(..excess);
    }

    fn keep_failed(&mut self, record: &JobRecord) {
        if record.job.state != JobState::Failed || !record.kind.is_a_job() {
            return;
        }
        self.failed.insert(record.job.id.clone(), Arc::new(record.clone()));
        // A tenant whose jobs fail again and again pushes out its own, and nobody else's.
        let tenant = tenant_of(record.job.id.as_str());
        let own = || self.failed.values().filter(|one| tenant_of(one.job.id.as_str()) == tenant);
        if own().count() > FAILED_MAX {
            let oldest = own().min_by_key(|one| one.job.ended_ms).map(|one| one.job.id.clone());
            oldest.and_then(|id| self.failed.remove(&id));
        }
    }

    fn hosts_in_moves(&self) -> BTreeSet<HostId> {
        let moves = self.migrations.values().filter(|r| !r.migration.state.is_final());
        let mut hosts: BTreeSet<HostId> = moves
            .flat_map(|record| [&record.migration.from, &record.migration.to])
            .cloned()
            .collect();
        for held in &self.held {
            if let Held::Move(vm, to) = held {
                let from = self.job_of(vm).and_then(|record| record.job.host.clone());
                hosts.extend(from.into_iter().chain([to.clone()]));
            }
        }
        hosts
    }

    fn is_move_being_recorded(&self, vm: &VmId) -> bool {
        self.held.iter().any(|held| matches!(held, Held::Move(of, _) if of == vm))
    }

    /// A job's VM carries the job's name.
    fn job_of(&self, vm: &VmId) -> Option<&Arc<JobRecord>> {
        let id = JobId::new(vm.as_str()).ok()?;
        self.jobs.get(&id).filter(|record| record.job.vm.as_ref() == Some(vm))
    }

    /// The hosts of a gang's members that have no record yet. They are taken for them.
    fn missing_members<'a>(&self, record: &'a JobRecord) -> Vec<&'a HostId> {
        let Some(gang) = record.kind.gang().filter(|gang| !gang.state.made) else {
            return Vec::new();
        };
        let ranked = (0..).zip(&gang.hosts);
        let missing = ranked.filter(|(rank, _)| {
            gang.state.verdict.is_none()
                && !self.jobs.contains_key(&member_of(&record.job.id, *rank))
        });
        missing.map(|(_, host)| host).collect()
    }

    /// Migrations that their jobs have not taken into account: the VM is moving, or it has arrived and its job's
    /// record still names the source.
    fn unsettled(&self) -> impl Iterator<Item = &Arc<MigrationRecord>> {
        self.migrations.values().filter(|record| {
            record.migration.state != MigrationState::Aborted
                && self.job_of(&record.migration.vm).is_some_and(|job| record.number > job.settled)
        })
    }

    /// The hosts that are kept for the VMs of gangs that move: where they go, and where they were, so that there is a way back.
    /// Where a VM is now it has its room anyway.
    fn kept_for_moves(&self) -> impl Iterator<Item = (VmId, &HostId)> {
        let open = self
            .jobs
            .values()
            .filter_map(|record| Some((&record.job.id, record.kind.gang()?.open_move()?)));
        let legs = open.flat_map(|(id, open)| {
            (0..).zip(&open.legs).map(move |(rank, leg)| (vm_of(&member_of(id, rank)), leg))
        });
        legs.flat_map(|(vm, leg)| {
            let now = self.job_of(&vm).and_then(|record| record.job.host.as_ref());
            let hosts = [&leg.from, &leg.to].into_iter().filter(move |host| Some(*host) != now);
            hosts.map(move |host| (vm.clone(), host))
        })
    }

    fn demand_now(&self, record: &JobRecord) -> Demand {
        let mut demand = demand_of(record);
        demand.memory_bytes = demand.memory_bytes.saturating_add(self.lent_to(record).keeps_bytes);
        demand
    }

    fn demand_to_move(&self, record: &JobRecord) -> Demand {
        let mut demand = demand_of(record);
        let Lent { keeps_bytes, has_bytes } = self.lent_to(record);
        demand.memory_bytes = demand.memory_bytes.saturating_add(has_bytes.max(keeps_bytes));
        demand
    }

    fn lent_to(&self, record: &JobRecord) -> Lent {
        record.job.vm.as_ref().and_then(|vm| self.lent.get(vm)).copied().unwrap_or_default()
    }

    fn used(&self) -> BTreeMap<HostId, Used> {
        let mut used: BTreeMap<HostId, Used> = BTreeMap::new();
        self.each_place(|record, host, place| {
            let of_host = used.entry(host.clone()).or_default();
            let demand = match place {
                Place::Comes => self.demand_to_move(record),
                Place::Starts | Place::Runs => self.demand_now(record),
            };
            of_host.add(record, demand);
            of_host.starting += u32::from(place == Place::Starts);
        });
        used
    }

    /// Each VM with each host that has it or is kept for it.
    fn each_place(&self, mut each: impl FnMut(&JobRecord, &HostId, Place)) {
        for record in self.jobs.values() {
            let missing = self.missing_members(record).into_iter();
            missing.for_each(|host| each(record, host, Place::Starts));
            let Some(host) = &record.job.host else { continue };
            // A guest that waits for the others of its gang has booted.
            let waits = record.kind.is_at_barrier();
            let is_starting =
                matches!(record.job.state, JobState::Staging | JobState::Starting) && !waits;
            each(record, host, if is_starting { Place::Starts } else { Place::Runs });
        }
        for (id, grant) in &self.grants {
            let Some(record) = self.jobs.get(id) else { continue };
            grant.hosts().for_each(|host| each(record, host, Place::Starts));
        }
        let mut moving: BTreeSet<(VmId, &HostId)> = BTreeSet::new();
        let unsettled = self.unsettled();
        moving.extend(unsettled.map(|moved| (moved.migration.vm.clone(), &moved.migration.to)));
        for held in &self.held {
            if let Held::Move(vm, to) = held {
                moving.insert((vm.clone(), to));
            }
        }
        moving.extend(self.kept_for_moves());
        for (vm, to) in moving {
            if let Some(record) = self.job_of(&vm) {
                each(record, to, Place::Comes);
            }
        }
    }
}

#[cfg(test)]
pub mod tests {
    use perigee_model::VmStart;

    use super::*;

    /// A completed migration of a VM.
    pub fn moved(vm: &str, number: u32) -> MigrationRecord {
        let hosts = ["home1", "cloud1"].map(|host| host.parse().expect("a name"));
        let (id, vm) = (format!("{vm}-m{number}"), vm.parse().expect("a name"));
        let id = id.parse().expect("a name");
        let new = Migration::new(id, vm, hosts, "asked".to_owned(), 0);
        MigrationRecord {
            migration: Migration { state: MigrationState::Completed, ended_ms: Some(1), ..new },
            number,
            start: VmStart::default(),
            plan: None,
            asked_source: true,
            io_before: Vec::new(),
            boot_id: String::new(),
            watched_ms: 0,
            of_load: false,
        }
    }

    #[test]
    fn a_vm_that_has_just_arrived_is_shown_at_its_new_host() {
        let index = Index::default();
        let id: JobId = "q-0001".parse().expect("a name");
        let spec = crate::tests::spec(Access::Read);
        let mut record = crate::jobs::new_record(id, spec);
        record.job.vm = Some("q-0001".parse().expect("a name"));
        record.job.host = Some("home1".parse().expect("a name"));
        index.put_job(&record);
        let host = |record: &JobRecord| index.host_of(record).expect("it has one").to_string();
        assert_eq!(host(&record), "home1");
        index.put_migration(&moved("q-0001", 1));
        assert_eq!(host(&record), "cloud1", "its driver has not recorded that yet");
        record.settled = 1;
        record.job.host = Some("home2".parse().expect("a name"));
        assert_eq!(host(&record), "home2", "the move is an old one");
    }

    /// How many of the moves that the planner learns from are of this tenant.
    fn of(index: &Index, tenant: &str) -> usize {
        let moves = index.past_moves();
        moves.iter().filter(|past| tenant_of(past.migration.vm.as_str()) == tenant).count()
    }

    #[test]
    fn a_tenant_whose_vms_move_often_does_not_push_out_the_moves_of_others() {
        let index = Index::default();
        (1..=60).for_each(|number| index.put_migration(&moved("q-0001", number)));
        assert_eq!(of(&index, "default"), PAST_MOVES_MAX);
        let index = Index::default();
        (1..=3).for_each(|number| index.put_migration(&moved("acme~q-0001", number)));
        (1..=60).for_each(|number| index.put_migration(&moved("q-0001", number)));
        assert_eq!((of(&index, "acme"), of(&index, "default")), (3, PAST_MOVES_OF_TENANT_MAX));
        assert_eq!(index.past_moves().last().expect("the newest").number, 60);
        for tenant in 0..60 {
            index.put_migration(&moved(&format!("t{tenant}~q-0001"), 1));
        }
        assert_eq!(index.past_moves().len(), PAST_MOVES_MAX);
    }
}
