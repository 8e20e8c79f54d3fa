//! The index of unfinished jobs and migrations in memory, so that the store need not be listed to place, move
//! or show a job.
//!
//! The store is written before the index: every owner of a record updates the index after it has saved the
//! record. The index also has reservations that are not stored: hosts given to queued jobs, room for a VM
//! that is about to move, and the [`Hold`]s that replace locks over calls to hosts. All of these are decided
//! under one lock that is never held while waiting. After a restart they are decided again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::job::{Access, JobState, MigrationState};
use perigee_model::plan::{Estimate, Plan};
use perigee_model::{HostId, ImageName, JobId, Problem, VmId, VolumeName};
use perigee_planner::Traits;
use perigee_planner::queue::{Demand, VolumeUse};
use tokio::sync::Notify;

use crate::records::{JobRecord, MigrationRecord, Records};

/// Completed migrations that the planner learns from, the last ones.
const PAST_MOVES_MAX: usize = 50;

#[derive(Debug, Default)]
pub struct Index {
    inner: Mutex<Inner>,
    /// Notified of changes after which a queued job may start.
    pub changed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    /// The jobs that are not in a final state.
    jobs: BTreeMap<JobId, Arc<JobRecord>>,
    /// The migrations of these jobs' VMs.
    migrations: BTreeMap<(VmId, u32), Arc<MigrationRecord>>,
    /// The VMs whose last migration was aborted: the migration's number, and when this became known.
    aborted: BTreeMap<VmId, (u32, Instant)>,
    /// The last completed migrations of all jobs.
    past_moves: Vec<Arc<MigrationRecord>>,
    /// Queued jobs that may start, until their driver has recorded it.
    grants: BTreeMap<JobId, Arc<Grant>>,
    /// The positions of the other queued jobs, and the reasons why they wait.
    waits: BTreeMap<JobId, (u32, String)>,
    held: Vec<Held>,
}

/// The host where a queued job starts, with the plan that explains the choice.
#[derive(Debug)]
pub struct Grant {
    pub host: HostId,
    pub plan: Plan,
    pub predicted: Estimate,
    /// The traits by which later jobs find this run.
    pub traits: Traits,
    /// In the order of the job file.
    pub volume_homes: Vec<HostId>,
}

/// Work of one task that no other task may do, or undo, at the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Held {
    /// A job with these volumes is being recorded.
    Submission(Vec<VolumeName>),
    Deletion(VolumeName),
    Detachment(HostId, VolumeName),
    /// A cleanup, by its key.
    Cleanup(String),
    /// The image is imported or deleted.
    Import(ImageName),
    /// A migration of the VM to the host is being recorded.
    Move(VmId, HostId),
}

/// Ends the exclusive work when it is dropped.
#[derive(Debug)]
pub struct Hold<'a> {
    index: &'a Index,
    held: Held,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut inner = self.index.lock();
        if let Some(at) = inner.held.iter().position(|held| *held == self.held) {
            inner.held.swap_remove(at);
        }
    }
}

/// The reserved capacity of a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    pub demand: Demand,
    pub vms: u32,
    /// Jobs among them whose volumes are being made or whose guest boots.
    pub starting: u32,
}

impl Used {
    fn add(&mut self, record: &JobRecord) {
        self.demand.add(demand_of(record));
        self.vms += 1;
    }
}

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
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let index = Self::default();
        for record in records.list::<JobRecord>("jobs/").await? {
            index.put_job(&record);
        }
        let mut migrations: Vec<MigrationRecord> = records.list("migrations/").await?;
        migrations.sort_by_key(|record| record.migration.started_ms);
        migrations.iter().for_each(|record| index.put_migration(record));
        Ok(index)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn put_job(&self, record: &JobRecord) {
        let id = &record.job.id;
        let mut inner = self.lock();
        if record.job.state != JobState::Queued {
            inner.grants.remove(id);
            inner.waits.remove(id);
        }
        let before = if record.job.state.is_final() {
            if let Some(vm) = &record.job.vm {
                inner.migrations.retain(|(of, _), _| of != vm);
                inner.aborted.remove(vm);
            }
            inner.jobs.remove(id)
        } else {
            inner.jobs.insert(id.clone(), Arc::new(record.clone()))
        };
        drop(inner);
        let same = before.is_some_and(|old| {
            (old.job.state, &old.job.host) == (record.job.state, &record.job.host)
        });
        if !same {
            self.changed.notify_one();
        }
    }

    pub fn put_migration(&self, record: &MigrationRecord) {
        let vm = &record.migration.vm;
        let mut inner = self.lock();
        let state = record.migration.state;
        if state == MigrationState::Completed
            && !inner.past_moves.iter().any(|past| past.migration.id == record.migration.id)
        {
            inner.past_moves.push(Arc::new(record.clone()));
            let excess = inner.past_moves.len().saturating_sub(PAST_MOVES_MAX);
            inner.past_moves.drain(..excess);
        }
        // The migrations of an ended job are not needed.
        if inner.job_of(vm).is_some() {
            inner.migrations.insert((vm.clone(), record.number), Arc::new(record.clone()));
            inner.note_abort(vm, record.number, state);
        }
        drop(inner);
        if state.is_final() {
            self.changed.notify_one();
        }
    }

    pub fn jobs(&self) -> Vec<Arc<JobRecord>> {
        self.lock().jobs.values().cloned().collect()
    }

    pub fn job(&self, id: &JobId) -> Option<Arc<JobRecord>> {
        self.lock().jobs.get(id).cloned()
    }

    pub fn past_moves(&self) -> Vec<Arc<MigrationRecord>> {
        self.lock().past_moves.clone()
    }

    /// Of the VM of an unfinished job, the first one first.
    pub fn migrations_of(&self, vm: &VmId) -> Vec<Arc<MigrationRecord>> {
        let inner = self.lock();
        let of_vm = inner.migrations.range((vm.clone(), 0)..=(vm.clone(), u32::MAX));
        of_vm.map(|(_, record)| Arc::clone(record)).collect()
    }

    /// How long ago the VM's last migration was aborted; `None` if it was not. After a restart of the controller
    /// the time counts from the restart.
    pub fn since_abort(&self, vm: &VmId) -> Option<Duration> {
        self.lock().aborted.get(vm).map(|(_, at)| at.elapsed())
    }

    pub fn unfinished_migrations(&self) -> Vec<Arc<MigrationRecord>> {
        let inner = self.lock();
        let unfinished = inner.migrations.values().filter(|r| !r.migration.state.is_final());
        unfinished.cloned().collect()
    }

    /// The reserved capacity of each host: for every VM that is or will be there, and for every VM that is moving
    /// there or has arrived.
    pub fn used(&self) -> BTreeMap<HostId, Used> {
        self.lock().used()
    }

    // --- the queue ---

    /// Jobs that wait for a place.
    pub fn waiting(&self) -> Vec<Arc<JobRecord>> {
        let inner = self.lock();
        let waiting = inner.jobs.values().filter(|record| {
            record.job.state == JobState::Queued
                && record.ending.is_none()
                && !inner.grants.contains_key(&record.job.id)
        });
        waiting.cloned().collect()
    }

    /// The capacity of each owner's jobs that no longer wait, and the volumes that they use.
    pub fn taken(&self) -> (BTreeMap<String, Demand>, Vec<VolumeUse>) {
        let inner = self.lock();
        let (mut held, mut uses) = (BTreeMap::<String, Demand>::new(), Vec::new());
        for (id, record) in &inner.jobs {
            let granted = inner.grants.contains_key(id);
            if record.job.state == JobState::Queued && !granted {
                continue;
            }
            held.entry(record.job.spec.owner.clone()).or_default().add(demand_of(record));
            uses.extend(volume_uses(record));
        }
        (held, uses)
    }

    pub fn give(&self, job: &JobId, grant: Grant) {
        let mut inner = self.lock();
        inner.waits.remove(job);
        // The job may have been cancelled in the meantime.
        if inner.jobs.get(job).is_some_and(|record| record.job.state == JobState::Queued) {
            inner.grants.insert(job.clone(), Arc::new(grant));
        }
    }

    pub fn grant_of(&self, job: &JobId) -> Option<Arc<Grant>> {
        self.lock().grants.get(job).cloned()
    }

    /// Sets the reasons why jobs wait.
    pub fn set_waits(&self, waits: BTreeMap<JobId, (u32, String)>) {
        self.lock().waits = waits;
    }

    pub fn wait_of(&self, job: &JobId) -> Option<(u32, String)> {
        self.lock().waits.get(job).cloned()
    }

    // --- holds ---

    fn hold(&self, held: Held) -> Hold<'_> {
        Hold { index: self, held }
    }

    /// While a job with these volumes is recorded.
    ///
    /// # Errors
    /// The volume that is being deleted.
    pub fn begin_submission(&self, volumes: Vec<VolumeName>) -> Result<Hold<'_>, VolumeName> {
        let mut inner = self.lock();
        let deleted = |name: &&VolumeName| inner.held.contains(&Held::Deletion((*name).clone()));
        if let Some(name) = volumes.iter().find(deleted) {
            return Err(name.clone());
        }
        let held = Held::Submission(volumes);
        inner.held.push(held.clone());
        drop(inner);
        Ok(self.hold(held))
    }

    /// While a volume is deleted.
    ///
    /// # Errors
    /// Why it may not be, in plain words.
    pub fn begin_deletion(&self, name: &VolumeName) -> Result<Hold<'_>, String> {
        let mut inner = self.lock();
        for record in inner.jobs.values() {
            let wanted = record.job.spec.volumes.iter().any(|volume| volume.volume == *name);
            let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
            if wanted || disks.any(|disk| disk.volume == *name) {
                return Err(format!("job {} uses it", record.job.id));
            }
        }
        let submitted = inner.held.iter().any(|held| match held {
            Held::Submission(volumes) => volumes.contains(name),
            _ => false,
        });
        let held = Held::Deletion(name.clone());
        if submitted || inner.held.contains(&held) {
            return Err(
                "a job that uses it is being submitted, or it is already being deleted".to_owned()
            );
        }
        inner.held.push(held.clone());
        drop(inner);
        Ok(self.hold(held))
    }

    /// While an attachment is removed; `None` when a VM that is or comes there needs it.
    pub fn begin_detachment(&self, host: &HostId, volume: &VolumeName) -> Option<Hold<'_>> {
        let mut inner = self.lock();
        let needed = inner.jobs.values().filter(|record| record.ending.is_none()).any(|record| {
            let comes = inner.unsettled().any(|moved| {
                Some(&moved.migration.vm) == record.job.vm.as_ref() && moved.migration.to == *host
            });
            let is_there = record.job.host.as_ref() == Some(host);
            let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
            (is_there || comes) && disks.any(|disk| disk.volume == *volume)
        });
        if needed {
            return None;
        }
        let held = Held::Detachment(host.clone(), volume.clone());
        inner.held.push(held.clone());
        drop(inner);
        Some(self.hold(held))
    }

    pub fn is_being_detached(&self, host: &HostId, volume: &VolumeName) -> bool {
        self.lock().held.contains(&Held::Detachment(host.clone(), volume.clone()))
    }

    /// Holds a cleanup while it is worked on; `None` if another task holds it.
    pub fn begin_cleanup(&self, key: &str) -> Option<Hold<'_>> {
        self.hold_alone(Held::Cleanup(key.to_owned()))
    }

    /// Holds an image while it is imported or deleted; `None` if another task holds it.
    pub fn begin_import(&self, name: &ImageName) -> Option<Hold<'_>> {
        self.hold_alone(Held::Import(name.clone()))
    }

    fn hold_alone(&self, held: Held) -> Option<Hold<'_>> {
        let mut inner = self.lock();
        if inner.held.contains(&held) {
            return None;
        }
        inner.held.push(held.clone());
        drop(inner);
        Some(self.hold(held))
    }

    /// Holds the room at the destination while a migration is recorded.
    ///
    /// # Errors
    /// Why the VM cannot go there, in plain words.
    pub fn begin_move(
        &self,
        vm: &VmId,
        from: &HostId,
        to: &HostId,
        total: Demand,
    ) -> Result<Hold<'_>, String> {
        let mut inner = self.lock();
        let job = inner.job_of(vm).filter(|record| record.ending.is_none());
        let Some(record) = job else {
            return Err("its job has ended".to_owned());
        };
        // Whoever asks may have read the job's record before it left its host.
        if record.leaving.is_some() || record.job.host.as_ref() != Some(from) {
            return Err("its job begins anew".to_owned());
        }
        let demand = demand_of(record);
        if inner.is_move_being_recorded(vm)
            || inner.unsettled().any(|moved| moved.migration.vm == *vm)
        {
            return Err("it is being moved already".to_owned());
        }
        let mut free = total;
        free.take(inner.used().get(to).map(|used| used.demand).unwrap_or_default());
        if demand.memory_bytes > free.memory_bytes {
            return Err(format!("only {} MiB of memory are free there", free.memory_bytes >> 20));
        }
        if demand.cpus > free.cpus {
            return Err(format!("only {} virtual CPUs are free there", free.cpus));
        }
        let held = Held::Move(vm.clone(), to.clone());
        inner.held.push(held.clone());
        drop(inner);
        Ok(self.hold(held))
    }

    pub fn is_move_being_recorded(&self, vm: &VmId) -> bool {
        self.lock().is_move_being_recorded(vm)
    }
}

impl Inner {
    fn note_abort(&mut self, vm: &VmId, number: u32, state: MigrationState) {
        let last = self.aborted.get(vm).map(|(last, _)| *last);
        if last.is_some_and(|last| last > number) {
            return;
        }
        if state != MigrationState::Aborted {
            self.aborted.remove(vm);
        } else if last != Some(number) {
            self.aborted.insert(vm.clone(), (number, Instant::now()));
        }
    }

    fn is_move_being_recorded(&self, vm: &VmId) -> bool {
        self.held.iter().any(|held| matches!(held, Held::Move(of, _) if of == vm))
    }

    /// A job's VM carries the job's name.
    fn job_of(&self, vm: &VmId) -> Option<&Arc<JobRecord>> {
        let id = JobId::new(vm.as_str()).ok()?;
        self.jobs.get(&id).filter(|record| record.job.vm.as_ref() == Some(vm))
    }

    /// Migrations that their jobs have not taken into account: the VM is on its way, or at the
    /// destination already while its job's record still names the source.
    fn unsettled(&self) -> impl Iterator<Item = &Arc<MigrationRecord>> {
        self.migrations.values().filter(|record| {
            record.migration.state != MigrationState::Aborted
                && self.job_of(&record.migration.vm).is_some_and(|job| record.number > job.settled)
        })
    }

    fn used(&self) -> BTreeMap<HostId, Used> {
        let mut used: BTreeMap<HostId, Used> = BTreeMap::new();
        for record in self.jobs.values() {
            let Some(host) = &record.job.host else { continue };
            let of_host = used.entry(host.clone()).or_default();
            of_host.add(record);
            if matches!(record.job.state, JobState::Staging | JobState::Starting) {
                of_host.starting += 1;
            }
        }
        for (id, grant) in &self.grants {
            let Some(record) = self.jobs.get(id) else { continue };
            let of_host = used.entry(grant.host.clone()).or_default();
            of_host.add(record);
            of_host.starting += 1;
        }
        let mut moving: BTreeSet<(&VmId, &HostId)> = BTreeSet::new();
        moving.extend(self.unsettled().map(|moved| (&moved.migration.vm, &moved.migration.to)));
        for held in &self.held {
            if let Held::Move(vm, to) = held {
                moving.insert((vm, to));
            }
        }
        for (vm, to) in moving {
            if let Some(record) = self.job_of(vm) {
                used.entry(to.clone()).or_default().add(record);
            }
        }
        used
    }
}
