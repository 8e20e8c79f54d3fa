//! A task takes a hold for work that no other task may do or undo at the same time.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::job::JobState;
use perigee_model::{HostId, ImageName, JobId, VmId, VolumeName};
use perigee_planner::queue::{Demand, Groups};

use super::{Index, Inner, Used};
use crate::records::JobRecord;

/// Which hosts of a migration may take part in no other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alone {
    /// None: a person has asked for it, or the VMs of a job move together.
    Nowhere,
    /// The destination: its host is drained.
    AtDestination,
    /// Both: what was measured there is the reason.
    AtBoth,
}

impl Alone {
    pub fn hosts<'a>(self, from: &'a HostId, to: &'a HostId) -> impl Iterator<Item = &'a HostId> {
        let both = [(from, self == Self::AtBoth), (to, self != Self::Nowhere)];
        both.into_iter().filter(|(_, alone)| *alone).map(|(host, _)| host)
    }
}

/// The work that a hold protects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Held {
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
    /// The volume comes to a VM at the host.
    Attachment(HostId, VolumeName),
    /// The VM is changed while it runs.
    Change(VmId),
    /// The VM is getting other rules, with these groups.
    Rules(VmId, Groups),
    /// The filesystems of the VM's guest stand still, and an image of its disk is made.
    Snapshot(VmId),
    /// A move of the volume to another home is being recorded.
    VolumeMove(VolumeName),
    /// The attachment gets another address.
    Reattachment(HostId, VolumeName),
    /// A replica is becoming the volume. It is_persistent as long as the promotion's record.
    Promotion(VolumeName),
    /// Somebody is at the promotion.
    PromotionStep(VolumeName),
    /// The records of an ended job, or of a deleted VM, are removed.
    Erasure(JobId),
}

/// Exclusive work; it ends when this is dropped.
#[derive(Debug)]
pub struct Hold<'a> {
    index: &'a Index,
    held: Held,
}

/// Whether an attachment may be removed.
#[derive(Debug)]
pub enum Detachment<'a> {
    Held(Hold<'a>),
    /// A VM that is at the host, or moves there, needs it.
    Needed,
    /// It is being given another address, or the volume is just coming to a VM there.
    Busy,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut inner = self.index.lock();
        if let Some(at) = inner.held.iter().position(|held| *held == self.held) {
            inner.held.swap_remove(at);
        }
    }
}

impl Index {
    pub(super) fn hold(&self, held: Held) -> Hold<'_> {
        Hold { index: self, held }
    }

    /// Holds a job's volumes while the job is recorded.
    ///
    /// # Errors
    /// The name of a volume that is being deleted or promoted.
    pub fn begin_submission(&self, volumes: Vec<VolumeName>) -> Result<Hold<'_>, VolumeName> {
        let mut inner = self.lock();
        let deleted = |name: &&VolumeName| {
            inner.held.contains(&Held::Deletion((*name).clone())) || inner.is_promoted(name)
        };
        if let Some(name) = volumes.iter().find(deleted) {
            return Err(name.clone());
        }
        let held = Held::Submission(volumes);
        inner.held.push(held.clone());
        drop(inner);
        Ok(self.hold(held))
    }

    /// Holds a volume while it is deleted.
    ///
    /// # Errors
    /// Why it may not be deleted, in plain words.
    pub fn begin_deletion(&self, name: &VolumeName) -> Result<Hold<'_>, String> {
        let mut inner = self.lock();
        for record in inner.jobs.values() {
            let wanted = record.job.spec.volumes.iter().any(|volume| volume.volume == *name);
            let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
            if wanted || disks.any(|disk| disk.volume == *name) {
                return Err(format!("{} uses it", record.in_words()));
            }
        }
        let submitted = inner.held.iter().any(|held| match held {
            Held::Submission(volumes) => volumes.contains(name),
            Held::Attachment(_, volume) => volume == name,
            _ => false,
        });
        if inner.is_changing_home(name) {
            return Err("it is being moved to another home".to_owned());
        }
        if inner.is_promoted(name) {
            return Err("a replica of it is becoming the volume".to_owned());
        }
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

    /// From here to [`Self::end_promotion`] no job that uses the volume begins, and it is neither moved nor deleted.
    ///
    /// # Errors
    /// Why no replica may become the volume now, in plain words.
    pub fn begin_promotion(&self, name: &VolumeName) -> Result<(), String> {
        let _deletion = self.begin_deletion(name)?;
        self.keep_promotion(name);
        Ok(())
    }

    /// As [`Self::begin_promotion`], for one that is recorded.
    pub fn keep_promotion(&self, name: &VolumeName) {
        self.lock().held.push(Held::Promotion(name.clone()));
    }

    /// Ends what [`Self::begin_promotion`] or [`Self::keep_promotion`] holds.
    pub fn end_promotion(&self, name: &VolumeName) {
        self.lock().held.retain(|held| *held != Held::Promotion(name.clone()));
    }

    /// Whether a replica is becoming this volume.
    pub fn is_promoted(&self, name: &VolumeName) -> bool {
        self.lock().is_promoted(name)
    }

    /// Holds a promotion while it is worked on; `None` if another task holds it.
    pub fn begin_promotion_step(&self, name: &VolumeName) -> Option<Hold<'_>> {
        self.hold_alone(Held::PromotionStep(name.clone()))
    }

    /// Holds an attachment while it is removed.
    pub fn begin_detachment(&self, host: &HostId, volume: &VolumeName) -> Detachment<'_> {
        let mut inner = self.lock();
        let stays =
            |record: &&Arc<JobRecord>| record.ending.is_none() && !record.kind.is_taken_down();
        let needed = inner.jobs.values().filter(stays).any(|record| {
            let comes = inner.unsettled().any(|moved| {
                Some(&moved.migration.vm) == record.job.vm.as_ref() && moved.migration.to == *host
            });
            let is_there = record.job.host.as_ref() == Some(host);
            let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
            (is_there || comes) && disks.any(|disk| disk.volume == *volume)
        });
        if needed {
            return Detachment::Needed;
        }
        // A VM that just gets the volume may be taken down meanwhile, and its host get it only then.
        let busy = inner.held.iter().any(|held| match held {
            Held::Reattachment(at, of) | Held::Attachment(at, of) => at == host && of == volume,
            _ => false,
        });
        if busy {
            return Detachment::Busy;
        }
        let held = Held::Detachment(host.clone(), volume.clone());
        inner.held.push(held.clone());
        drop(inner);
        Detachment::Held(self.hold(held))
    }

    /// Whether the volume's attachment at the host is being removed.
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

    /// Holds a VM while a snapshot of it is made; `None` if another task makes one.
    pub fn begin_snapshot(&self, vm: &VmId) -> Option<Hold<'_>> {
        self.hold_alone(Held::Snapshot(vm.clone()))
    }

    /// Holds the records of an ended job while they are removed; `None` if another task removes them.
    pub fn begin_erasure(&self, job: &JobId) -> Option<Hold<'_>> {
        self.hold_alone(Held::Erasure(job.clone()))
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

    /// Holds the room at the destination while a migration is recorded. `binds` says whether a host keeps the others of a group together.
    ///
    /// # Errors
    /// Why the VM cannot go there, in plain words.
    pub fn begin_move(
        &self,
        vm: &VmId,
        (from, to): (&HostId, &HostId),
        (total, binds): (Demand, impl Fn(&HostId) -> bool),
        alone: Alone,
    ) -> Result<Hold<'_>, String> {
        let mut inner = self.lock();
        let record = inner.may_move(vm, from)?;
        let demand = inner.demand_to_move(record);
        if let Some(why) = inner.why_ruled_out(record, to, binds) {
            return Err(why);
        }
        let in_moves = inner.hosts_in_moves();
        if let Some(host) = alone.hosts(from, to).find(|host| in_moves.contains(host)) {
            return Err(format!("host {host} takes part in another move"));
        }
        // The room for it may be kept already, if all VMs of its gang move.
        let is_kept = inner.kept_for_moves().any(|(of, at)| of == *vm && at == to);
        if !is_kept {
            has_room(total, inner.used().get(to), demand)?;
        }
        let held = Held::Move(vm.clone(), to.clone());
        inner.held.push(held.clone());
        drop(inner);
        Ok(self.hold(held))
    }

    /// Holds the room for VMs that all move, while that is recorded: each with where it is and where it goes.
    ///
    /// # Errors
    /// Why one of them can't, in plain words; then nothing is held.
    pub fn begin_gang_move(
        &self,
        moves: &[(VmId, HostId, HostId)],
        total: impl Fn(&HostId) -> Option<Demand>,
        binds: impl Fn(&HostId) -> bool,
    ) -> Result<Vec<Hold<'_>>, String> {
        let mut inner = self.lock();
        let mut needed: BTreeMap<&HostId, Demand> = BTreeMap::new();
        for (vm, from, to) in moves {
            let record = inner.may_move(vm, from).map_err(|why| format!("VM {vm}: {why}"))?;
            if let Some(why) = inner.why_ruled_out(record, to, &binds) {
                return Err(format!("host {to}: {why}"));
            }
            needed.entry(to).or_default().add(inner.demand_to_move(record));
        }
        let used = inner.used();
        for (to, needed) in needed {
            let total = total(to).ok_or_else(|| format!("host {to} has not reported yet"))?;
            has_room(total, used.get(to), needed).map_err(|_| {
                let mut free = total;
                free.take(used.get(to).map(|used| used.demand).unwrap_or_default());
                let words = |of: Demand| {
                    format!("{} MiB of memory and {} virtual CPUs", of.memory_bytes >> 20, of.cpus)
                };
                format!(
                    "host {to}: its VMs that go there need {}, and {} are free",
                    words(needed),
                    words(free)
                )
            })?;
        }
        let held = moves.iter().map(|(vm, _, to)| Held::Move(vm.clone(), to.clone()));
        let held: Vec<Held> = held.collect();
        inner.held.extend(held.iter().cloned());
        drop(inner);
        Ok(held.into_iter().map(|held| self.hold(held)).collect())
    }

    /// Holds a volume while it comes to a VM that runs at a host.
    ///
    /// # Errors
    /// Why it can't, in plain words.
    pub fn begin_attachment(
        &self,
        (vm, host): (&VmId, &HostId),
        volume: &VolumeName,
        writes: bool,
    ) -> Result<Hold<'_>, String> {
        let mut inner = self.lock();
        if inner.held.contains(&Held::Deletion(volume.clone())) || inner.is_promoted(volume) {
            return Err("it is being deleted, or a replica of it is becoming the volume".to_owned());
        }
        if inner.is_changing_home(volume) {
            return Err("it is being moved to another home".to_owned());
        }
        if inner.is_being_attached(volume) {
            return Err("another VM is just getting it".to_owned());
        }
        for (id, record) in &inner.jobs {
            let waits = record.job.state == JobState::Queued && !inner.grants.contains_key(id);
            if waits || record.job.vm.as_ref() == Some(vm) {
                continue;
            }
            let mut uses = super::volume_uses(record).into_iter();
            if uses.any(|used| used.volume == *volume && (writes || used.writes)) {
                return Err(format!("{} uses it", record.in_words()));
            }
        }
        let held = Held::Attachment(host.clone(), volume.clone());
        inner.held.push(held.clone());
        drop(inner);
        Ok(self.hold(held))
    }

    /// Keeps a VM that runs from being moved while it is changed. Gives its record and its host at that moment too. It may still be
    /// stopped, or begin anew elsewhere: then what was changed is not recorded.
    ///
    /// # Errors
    /// Why it can't be changed now, in plain words.
    pub fn begin_change(&self, vm: &VmId) -> Result<(Hold<'_>, Arc<JobRecord>, HostId), String> {
        let mut inner = self.lock();
        let job = inner.job_of(vm).filter(|record| record.ending.is_none());
        let Some(record) = job else { return Err("it is being deleted".to_owned()) };
        let is_persistent = record.kind.is_persistent_vm() && !record.kind.goes_down();
        let stays = record.vm_started && record.leaving.is_none() && is_persistent;
        let host = record.job.host.clone().filter(|_| stays);
        let Some(host) = host.filter(|_| record.job.state == JobState::Running) else {
            return Err("it is neither off nor does it run".to_owned());
        };
        if inner.is_move_being_recorded(vm)
            || inner.unsettled().any(|moved| moved.migration.vm == *vm)
        {
            return Err("it is being moved".to_owned());
        }
        let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
        if let Some(disk) = disks.find(|disk| inner.is_changing_home(&disk.volume)) {
            return Err(format!("its volume {} is being moved", disk.volume));
        }
        let (record, held) = (Arc::clone(record), Held::Change(vm.clone()));
        if inner.held.contains(&held) {
            return Err("it is being changed already".to_owned());
        }
        inner.held.push(held.clone());
        drop(inner);
        Ok((self.hold(held), record, host))
    }

    /// Whether somebody is about to record a migration of this VM, so that the index does not have it yet.
    pub fn is_move_being_recorded(&self, vm: &VmId) -> bool {
        self.lock().is_move_being_recorded(vm)
    }
}

fn has_room(total: Demand, used: Option<&Used>, demand: Demand) -> Result<(), String> {
    let mut free = total;
    free.take(used.map(|used| used.demand).unwrap_or_default());
    if demand.memory_bytes > free.memory_bytes {
        return Err(format!("only {} MiB of memory are free there", free.memory_bytes >> 20));
    }
    if demand.cpus > free.cpus {
        return Err(format!("only {} virtual CPUs are free there", free.cpus));
    }
    Ok(())
}

impl Inner {
    /// The job of a VM that may move now, if there is room.
    fn may_move(&self, vm: &VmId, from: &HostId) -> Result<&JobRecord, String> {
        let job = self.job_of(vm).filter(|record| record.ending.is_none());
        let Some(record) = job else {
            return Err("its job has ended".to_owned());
        };
        // The caller may have read the record before the job left its host.
        if record.leaving.is_some() || record.job.host.as_ref() != Some(from) {
            return Err("its job begins anew".to_owned());
        }
        // It runs once more only to write its outputs, or has written them.
        if record.collect.is_some() || record.finished.is_some() {
            return Err("its job ends".to_owned());
        }
        if record.kind.goes_down() {
            return Err("it is being stopped".to_owned());
        }
        if self.is_move_being_recorded(vm)
            || self.unsettled().any(|moved| moved.migration.vm == *vm)
        {
            return Err("it is being moved already".to_owned());
        }
        if self.held.contains(&Held::Change(vm.clone())) {
            return Err("it is being changed".to_owned());
        }
        // Its guest, which may stand still for that, would arrive so.
        if self.held.contains(&Held::Snapshot(vm.clone())) {
            return Err("a snapshot of it is just being made".to_owned());
        }
        let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
        if let Some(disk) = disks.find(|disk| self.is_changing_home(&disk.volume)) {
            return Err(format!("its volume {} is being moved", disk.volume));
        }
        Ok(record)
    }

    pub(super) fn is_being_attached(&self, name: &VolumeName) -> bool {
        self.held.iter().any(|held| matches!(held, Held::Attachment(_, volume) if volume == name))
    }

    pub(super) fn is_promoted(&self, name: &VolumeName) -> bool {
        self.held.contains(&Held::Promotion(name.clone()))
    }
}
