//! The homes of a job's volumes: where they are when one has moved, and which are still to come to the VM.

use std::time::{Duration, Instant};

use perigee_model::job::{HostState, JobState};
use perigee_model::plan::Way;
use perigee_model::volume_move::{VolumeMove, VolumeMoveCause, VolumeMoveState};
use perigee_model::{HostId, Problem, ProblemKind, VolumeName};

use super::decide_move::Change;
use super::driver::Run;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::migration::by_itself;
use crate::planning;
use crate::records::{
    JobIntent, JobRecord, PlacedDisk, VolumeMoveIntent, job_intent_key, vm_of,
    volume_move_intent_key,
};
use crate::storage::{leave_site, moves, replicas};

/// Why a volume does not follow its VM any more.
const CALLED_OFF: &str = "a person called it off";

impl Run {
    /// Takes the moves of its volumes into account: each waits for this.
    pub(super) async fn follow_homes(&mut self) -> Result<(), Problem> {
        let record = &mut self.record.value;
        let here = record.job.host.clone();
        // A VM that runs can't go on with its disk as it was at an earlier time; one that is off can start with it.
        // While it starts, the loss of the host ends that first; one that is deleted is deleted where its disk is.
        let is_off = record.kind.is_persistent_vm()
            && (record.job.state == JobState::Queued || record.ending.is_some());
        let disks = record.placement.iter_mut().flat_map(|placement| &mut placement.disks);
        let (mut changed, index) = (false, &self.cluster.index);
        for (number, disk) in disks.enumerate() {
            let back = index.returned_from(&disk.volume, &disk.home).filter(|_| is_off);
            if let Some(home) = &back {
                let PlacedDisk { volume, home: lost, .. } = &disk;
                record.job.reason = format!(
                    "its disk {volume} is what it was when it left {home}: host {lost} was removed"
                );
            }
            if let Some(home) = index.moved_from(&disk.volume, &disk.home).or(back) {
                record.meter.home_moved(number, here.as_ref() == Some(&home));
                disk.home = home;
                disk.home_changed = true;
                changed = true;
            }
        }
        if !changed {
            return Ok(());
        }
        self.note_came();
        self.record.save().await
    }

    /// Whether the home of a volume may change at any moment. Those that are only for this job stay where
    /// they are: it is about to delete them.
    pub(super) async fn homes_are_changing(&self) -> Result<bool, Problem> {
        let mut changing = false;
        for disk in self.record.value.placement.iter().flat_map(|placement| &placement.disks) {
            if !self.cluster.index.is_changing_home(&disk.volume) {
                continue;
            }
            changing = true;
            if disk.temporary {
                self.call_off_taking(&disk.volume).await?;
            }
        }
        Ok(changing)
    }

    /// What a change of a volume's home waits for, if that is a host that does not answer. It ends when the host is back or is
    /// removed. Otherwise it is over in a moment.
    pub(super) fn why_homes_wait(&self) -> Option<String> {
        let hosts = &self.cluster.hosts;
        let mut disks = self.record.value.placement.iter().flat_map(|placement| &placement.disks);
        disks.find_map(|disk| {
            let last = self.cluster.index.volume_move(&disk.volume)?;
            let VolumeMove { volume, from, to, state, .. } = &last.view;
            if !state.is_changing_home() {
                return None;
            }
            let is_silent =
                |host: &&HostId| hosts.get(host).is_ok() && hosts.state(host) == HostState::Unreachable;
            let silent = [to, from].into_iter().find(is_silent)?;
            let goes_on = match state {
                VolumeMoveState::CallingOff => "is being called off",
                _ => "is under way",
            };
            Some(format!(
                "it waits for its volume {volume}, whose move from {from} to {to} {goes_on}: {silent} does not \
                 answer; if {silent} is gone for good: perigee host remove {silent} --force"
            ))
        })
    }

    /// Calls off the move of a volume that its new home has not taken yet.
    pub(super) async fn call_off_taking(&self, volume: &VolumeName) -> Result<(), Problem> {
        let last = self.cluster.index.volume_move(volume);
        match last.filter(|last| last.view.state == VolumeMoveState::Taking) {
            Some(last) => moves::call_off(&self.cluster, &last).await,
            None => Ok(()),
        }
    }

    /// Whether a volume of the job moves, or is not yet complete at its new home.
    pub(super) fn homes_move(&self) -> Result<bool, Problem> {
        let disks = &self.placement()?.disks;
        let mut moves = disks.iter().filter_map(|d| self.cluster.index.volume_move(&d.volume));
        Ok(moves.any(|last| !last.view.state.is_final()))
    }

    /// The planner's decision: the data volumes come to the VM's host.
    pub(super) async fn bring_data(&mut self, host: &HostId) -> Result<Change, Problem> {
        let data = self.placement()?.disks.iter().filter(|d| d.data_of.is_some());
        let far = data.filter(|disk| disk.home != *host).map(|disk| disk.volume.clone());
        let far: Vec<VolumeName> = far.collect();
        let Some(first) = far.first() else { return Ok(Change::NotNow) };
        for volume in &far {
            match replicas::check_far(&self.cluster, volume, host).await {
                Err(problem) if problem.kind == ProblemKind::Conflict => {
                    return Ok(Change::Refused(problem));
                }
                checked => checked?,
            }
        }
        let cause = VolumeMoveCause::Follows(vm_of(&self.id));
        if let Err(problem) = moves::request(&self.cluster, first, host, cause).await {
            return Ok(Change::Refused(problem));
        }
        self.record.value.to_follow = far;
        self.record.save().await?;
        Ok(Change::Begun)
    }

    /// Brings the volumes that follow the VM to its host, one after the other.
    pub(super) async fn bring_volumes(&mut self) -> Result<(), Problem> {
        if self.let_volumes_stay().await? {
            return Ok(());
        }
        let Some(volume) = self.record.value.to_follow.first().cloned() else {
            self.follow_refused = None;
            return Ok(());
        };
        let Some(host) = self.job().host.clone() else { return Ok(()) };
        let cause = VolumeMoveCause::Follows(vm_of(&self.id));
        if self.homes_move()? {
            return Ok(());
        }
        let disk = self.placement()?.disks.iter().find(|disk| disk.volume == volume).cloned();
        let Some(disk) = disk.filter(|disk| disk.home != host) else {
            return self.came(&volume).await;
        };
        if leave_site::is_far_from_confined(&self.cluster, std::slice::from_ref(&disk), &host) {
            return self.leave_volume(&disk, "its policy is leave-site: never").await;
        }
        let ended = self.called_off(&volume, &host, &cause).await?;
        if let Some(CalledOff { why, may_pass }) = &ended
            && (!may_pass || self.has_no_patience())
        {
            return self.leave_volume(&disk, why).await;
        }
        let asked = moves::request(&self.cluster, &volume, &host, cause).await;
        let Err(problem) = asked else {
            if ended.is_none() {
                self.follow_refused = None;
            }
            return Ok(());
        };
        let why = format!("{}: {}", problem.what, problem.why);
        if self.has_no_patience() {
            return self.leave_volume(&disk, &why).await;
        }
        // Asked again with the next figures.
        self.refuse(Way::Copy, host, why);
        Ok(())
    }

    /// Whether a volume that is to come to the VM has been refused for too long.
    fn has_no_patience(&mut self) -> bool {
        let since = *self.follow_refused.get_or_insert_with(Instant::now);
        since.elapsed() >= self.cluster.timing.follow_patience
    }

    /// If a person has called off that volumes come to the VM, those that have not come stay where they are. A volume
    /// that is there already goes on copying its data, and one that a person moves goes on moving. Returns whether it
    /// waits for a move that is being called off.
    async fn let_volumes_stay(&mut self) -> Result<bool, Problem> {
        let key = job_intent_key(&self.id);
        let intent: Option<JobIntent> = self.cluster.records.read(&key).await?;
        let stay = intent.map_or(0, |intent| intent.stay);
        if stay == self.record.value.stayed {
            return Ok(false);
        }
        let cause = VolumeMoveCause::Follows(vm_of(&self.id));
        for volume in self.record.value.to_follow.clone() {
            let last = self.cluster.index.volume_move(&volume);
            let last = last.filter(|last| last.view.cause == cause);
            match last.as_ref().map(|last| last.view.state) {
                Some(VolumeMoveState::Taking) => {
                    moves::call_off(&self.cluster, last.as_ref().expect("it moves")).await?;
                    return Ok(true);
                }
                Some(VolumeMoveState::CallingOff) => return Ok(true),
                _ => {}
            }
            let here = self.job().host.clone();
            let disk = self.placement()?.disks.iter().find(|disk| disk.volume == volume).cloned();
            match disk.filter(|disk| Some(&disk.home) != here.as_ref()) {
                Some(disk) => self.leave_volume(&disk, CALLED_OFF).await?,
                None => self.came(&volume).await?,
            }
        }
        self.record.value.stayed = stay;
        self.record.save().await?;
        Ok(false)
    }

    /// A volume that was to follow the VM is at its host.
    async fn came(&mut self, volume: &VolumeName) -> Result<(), Problem> {
        let disks = &self.placement()?.disks;
        let is_data = disks.iter().any(|disk| disk.volume == *volume && disk.data_of.is_some());
        let progress = self.job().progress_part().unwrap_or_default();
        self.follow_refused = None;
        let record = &mut self.record.value;
        if is_data {
            // What was lost before has paid for the copy, and does not pay for another change.
            record.meter.begin_account(now_ms(), progress);
            record.moves += 1;
        }
        record.to_follow.retain(|other| other != volume);
        let is_all = is_data && record.to_follow.is_empty();
        // As after a migration: rather twice than not at all.
        if let Some(host) =
            self.job().host.clone().filter(|_| is_all && self.persistent().is_none())
        {
            by_itself::note(&self.cluster, &vm_of(&self.id), (&host, &host)).await;
        }
        self.record.save().await
    }

    /// A volume that was to follow the VM stays where it is.
    async fn leave_volume(&mut self, disk: &PlacedDisk, why: &str) -> Result<(), Problem> {
        let PlacedDisk { volume, home, .. } = disk;
        let outcome = format!("volume {volume} stays at {home}: {why}");
        match self.record.value.kind.member_mut() {
            // What was decided is its gang's.
            Some(member) => member.copy_refused.clone_from(&outcome),
            None => planning::not_done(&self.cluster, &self.id, &outcome).await?,
        }
        if let Some(host) = self.job().host.clone() {
            self.refuse(Way::Copy, host, outcome);
        }
        self.follow_refused = None;
        self.record.value.to_follow.retain(|other| other != volume);
        self.record.save().await
    }

    /// How its move to the VM's host was called off since the VM is there; `None` if it was not.
    async fn called_off(
        &self,
        volume: &VolumeName,
        host: &HostId,
        cause: &VolumeMoveCause,
    ) -> Result<Option<CalledOff>, Problem> {
        let Some(last) = self.cluster.index.volume_move(volume) else { return Ok(None) };
        let shown = &last.view;
        let is_called_off = shown.cause == *cause
            && shown.to == *host
            && shown.state == VolumeMoveState::CalledOff
            && shown.started_ms >= self.record.value.meter.arrived_ms;
        if !is_called_off {
            return Ok(None);
        }
        let intent: Option<VolumeMoveIntent> =
            self.cluster.records.read(&volume_move_intent_key(volume)).await?;
        let is_asked = intent.is_some_and(|intent| intent.cancel == last.number);
        let lasted_ms = shown.ended_ms.unwrap_or(shown.started_ms) - shown.started_ms;
        // What refuses it for good ends it at once.
        let may_pass =
            !is_asked && Duration::from_millis(lasted_ms) >= self.cluster.timing.take_patience;
        Ok(Some(CalledOff { why: shown.problem.clone(), may_pass }))
    }

    /// Forgets the moves of the volumes that were only for this job. What came with them is in the record before.
    pub(super) async fn forget_volume_moves(&mut self) -> Result<(), Problem> {
        if self.note_came() {
            self.record.save().await?;
        }
        for disk in self.record.value.placement.iter().flat_map(|placement| &placement.disks) {
            let last = self.cluster.index.volume_move(&disk.volume);
            if disk.temporary && last.is_some_and(|last| last.view.state.is_final()) {
                moves::forget(&self.cluster, &disk.volume).await?;
            }
        }
        Ok(())
    }
}

/// How a volume's move was called off.
struct CalledOff {
    why: String,
    /// A host did not answer for too long: the next move may do better.
    may_pass: bool,
}

/// A disk of the job whose volume lost a part with a host that was removed, and that host.
pub(super) fn incomplete<'a>(
    cluster: &Cluster,
    record: &'a JobRecord,
) -> Option<(&'a PlacedDisk, HostId)> {
    record.disks_needed().find_map(|disk| {
        let last = cluster.index.volume_move(&disk.volume)?;
        let shown = &last.view;
        let is_incomplete = shown.state == VolumeMoveState::Lost
            || (shown.state.is_taken() && shown.missing_bytes != Some(0));
        let from_removed = disk.home == shown.to && cluster.hosts.get(&shown.from).is_err();
        (is_incomplete && from_removed).then(|| (disk, shown.from.clone()))
    })
}
