//! Moves of volumes in the index. While a volume's home may change, nothing begins that needs to know it: no
//! job that uses the volume starts, and no VM that has it open is migrated. A move in turn does not begin
//! while one of these is under way.

use std::sync::Arc;

use perigee_model::job::JobState;
use perigee_model::volume_move::VolumeMoveState;
use perigee_model::{HostId, VolumeName};

use super::holds::{Held, Hold};
use super::{Index, Inner};
use crate::records::{JobRecord, VolumeMoveRecord};

impl Index {
    /// Takes over the record of a volume's last move, after each write of it. Each new state of the move counts as a
    /// change of the volume's home.
    pub fn put_volume_move(&self, record: &VolumeMoveRecord) {
        let mut inner = self.lock();
        let volume = record.view.volume.clone();
        let before = inner.volume_moves.insert(volume, Arc::new(record.clone()));
        let state = |record: &VolumeMoveRecord| (record.number, record.view.state);
        if before.is_none_or(|before| state(&before) != state(record)) {
            inner.note_home_change(&record.view.volume);
            drop(inner);
            self.changed.notify_one();
            self.moved.notify_one();
        }
    }

    /// Forgets a volume's last move when its record is removed. Whoever read [`Self::home_changes`] before that still
    /// learns of it.
    pub fn forget_volume_move(&self, volume: &VolumeName) {
        let mut inner = self.lock();
        inner.volume_moves.remove(volume);
        let change = inner.last_home_changes.remove(volume).unwrap_or_default();
        inner.forgotten_home_change = inner.forgotten_home_change.max(change);
    }

    /// The volume's last move.
    pub fn volume_move(&self, volume: &VolumeName) -> Option<Arc<VolumeMoveRecord>> {
        self.lock().volume_moves.get(volume).cloned()
    }

    /// The moves of volumes that are not in a final state.
    pub fn unfinished_volume_moves(&self) -> Vec<Arc<VolumeMoveRecord>> {
        let inner = self.lock();
        let unfinished = inner.volume_moves.values().filter(|r| !r.view.state.is_final());
        unfinished.cloned().collect()
    }

    /// The volume's move, while its new home has not copied all of it. Clones, snapshots and images that
    /// stand on the volume may need the rest, so it is not deleted then.
    pub fn incomplete_move(&self, volume: &VolumeName) -> Option<Arc<VolumeMoveRecord>> {
        self.volume_move(volume)
            .filter(|last| !last.view.state.is_final() && last.view.missing_bytes != Some(0))
    }

    /// Grows whenever a volume may have got another home. Whoever reads it before it looks for a home
    /// can tell afterwards whether the home may be an old one.
    pub fn home_changes(&self) -> u64 {
        self.lock().home_changes
    }

    /// Whether one of these volumes may have got another home since [`Self::home_changes`] was this number.
    pub fn home_changed_since<'a>(
        &self,
        mut volumes: impl Iterator<Item = &'a VolumeName>,
        at: u64,
    ) -> bool {
        let inner = self.lock();
        volumes.any(|volume| inner.home_changed_since(volume, at))
    }

    /// Whether the volume's home may change now, by a move or a promotion.
    pub fn is_changing_home(&self, volume: &VolumeName) -> bool {
        self.lock().is_changing_home(volume)
    }

    /// Where a disk's volume has its home now, if a move has taken it away from `home`.
    pub fn moved_from(&self, volume: &VolumeName, home: &HostId) -> Option<HostId> {
        let inner = self.lock();
        let shown = &inner.volume_moves.get(volume)?.view;
        let is_redirecting = shown.state == VolumeMoveState::Redirecting && shown.from == *home;
        is_redirecting.then(|| shown.to.clone())
    }

    /// The old home of a disk's volume, where it is again because the host `home`, which had taken it, was removed.
    pub fn returned_from(&self, volume: &VolumeName, home: &HostId) -> Option<HostId> {
        let inner = self.lock();
        let shown = &inner.volume_moves.get(volume)?.view;
        let is_back = shown.state == VolumeMoveState::CalledOff && shown.taken_ms.is_some();
        (is_back && shown.to == *home).then(|| shown.from.clone())
    }

    /// The jobs whose records name this home of the volume.
    pub fn jobs_that_name(&self, volume: &VolumeName, home: &HostId) -> Vec<Arc<JobRecord>> {
        let inner = self.lock();
        let jobs = inner.jobs.values().filter(|record| {
            let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
            disks.any(|disk| disk.volume == *volume && disk.home == *home)
        });
        jobs.cloned().collect()
    }

    /// Holds a volume while its move away from `home` is recorded.
    ///
    /// # Errors
    /// Why it cannot move now, in plain words.
    pub fn begin_volume_move(
        &self,
        volume: &VolumeName,
        home: &HostId,
    ) -> Result<Hold<'_>, String> {
        let mut inner = self.lock();
        if let Some(last) = inner.volume_moves.get(volume).filter(|r| !r.view.state.is_final()) {
            return Err(format!("it is being moved to {} already", last.view.to));
        }
        if inner.held.contains(&Held::VolumeMove(volume.clone())) {
            return Err("it is being moved already".to_owned());
        }
        if inner.held.contains(&Held::Deletion(volume.clone())) {
            return Err("it is being deleted".to_owned());
        }
        if inner.is_promoted(volume) {
            return Err("a replica of it is becoming the volume".to_owned());
        }
        if inner.is_being_attached(volume) {
            return Err("a VM is just getting it".to_owned());
        }
        for record in inner.jobs.values() {
            if let Some(why) = inner.why_it_stays(record, volume, home) {
                return Err(why);
            }
        }
        let held = Held::VolumeMove(volume.clone());
        inner.held.push(held.clone());
        drop(inner);
        Ok(self.hold(held))
    }

    /// Holds an attachment while it gets its home's new address; `None` while it is being removed.
    pub fn begin_reattachment(&self, host: &HostId, volume: &VolumeName) -> Option<Hold<'_>> {
        let mut inner = self.lock();
        if inner.held.contains(&Held::Detachment(host.clone(), volume.clone())) {
            return None;
        }
        let held = Held::Reattachment(host.clone(), volume.clone());
        inner.held.push(held.clone());
        drop(inner);
        Some(self.hold(held))
    }
}

impl Inner {
    pub(super) fn note_home_change(&mut self, volume: &VolumeName) {
        self.home_changes += 1;
        self.last_home_changes.insert(volume.clone(), self.home_changes);
    }

    pub(super) fn home_changed_since(&self, volume: &VolumeName, at: u64) -> bool {
        let last = self.last_home_changes.get(volume).copied().unwrap_or_default();
        last.max(self.forgotten_home_change) > at
    }

    pub(super) fn is_changing_home(&self, volume: &VolumeName) -> bool {
        let last = self.volume_moves.get(volume);
        last.is_some_and(|record| record.view.state.is_changing_home())
            || self.held.contains(&Held::VolumeMove(volume.clone()))
    }

    /// Why a job keeps a volume from moving away from its home, in plain words.
    fn why_it_stays(
        &self,
        record: &JobRecord,
        volume: &VolumeName,
        home: &HostId,
    ) -> Option<String> {
        let job = &record.job.id;
        let wanted = record.job.spec.volumes.iter().any(|wanted| wanted.volume == *volume);
        let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
        let disk = disks.find(|disk| disk.volume == *volume);
        let waits = record.job.state == JobState::Queued && !self.grants.contains_key(job);
        if waits || !(wanted || disk.is_some()) {
            return None;
        }
        let user = record.in_words();
        if record.ending.is_some() {
            return Some(format!("{user}, which uses it, is ending"));
        }
        if record.leaving.is_some() {
            return Some(format!("{user}, which uses it, begins anew"));
        }
        if !record.vm_started {
            return Some(format!("{user}, which uses it, is starting"));
        }
        let disk = disk?;
        if disk.home != *home {
            return Some(format!("its home is {} by now", disk.home));
        }
        let vm = record.job.vm.as_ref()?;
        let moves = self.is_move_being_recorded(vm)
            || self.unsettled().any(|moved| moved.migration.vm == *vm);
        moves.then(|| format!("VM {vm}, which uses it, is being moved"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// While volumes moved one after the other, no job got a host.
    #[test]
    fn a_move_changes_the_home_of_its_volume_and_of_no_other() {
        let index = Index::default();
        let [moved, other] = ["moved", "other"].map(|name| VolumeName::new(name).expect("a name"));
        let before = index.home_changes();
        index.lock().note_home_change(&moved);
        let changed = |volume: &VolumeName, at| index.home_changed_since([volume].into_iter(), at);
        assert!(changed(&moved, before) && !changed(&other, before));
        assert!(!changed(&moved, index.home_changes()));
        // Whose the change was is not known any more.
        index.forget_volume_move(&moved);
        assert!(changed(&moved, before) && changed(&other, before));
        assert!(!changed(&moved, index.home_changes()));
    }
}
