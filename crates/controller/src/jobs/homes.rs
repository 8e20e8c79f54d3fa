//! The homes of a job's volumes: where they are when one has moved, and which are still to come to the VM.

use perigee_model::plan::{Plan, Trigger};
use perigee_model::volume_move::{VolumeMoveCause, VolumeMoveState};
use perigee_model::{HostId, Problem, ProblemKind, VolumeName};

use super::driver::Run;
use crate::cluster::Cluster;
use crate::planning;
use crate::records::{JobRecord, PlacedDisk, vm_of};
use crate::volume_moves;

impl Run {
    /// Takes the moves of its volumes into account: each waits for this.
    pub(super) async fn settle_homes(&mut self) -> Result<(), Problem> {
        let record = &mut self.record.value;
        let here = record.job.host.clone();
        let disks = record.placement.iter_mut().flat_map(|placement| &mut placement.disks);
        let mut changed = false;
        for (index, disk) in disks.enumerate() {
            if let Some(home) = self.cluster.index.moved_from(&disk.volume, &disk.home) {
                record.meter.home_moved(index, here.as_ref() == Some(&home));
                disk.home = home;
                changed = true;
            }
        }
        if changed { self.record.save().await } else { Ok(()) }
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
            let last = self.cluster.index.volume_move(&disk.volume);
            let called_off =
                last.filter(|last| disk.temporary && last.shown.state == VolumeMoveState::Taking);
            if let Some(last) = called_off {
                volume_moves::call_off(&self.cluster, &last).await?;
            }
        }
        Ok(changing)
    }

    /// Whether a volume of the job moves, or is not yet complete at its new home.
    pub(super) fn homes_move(&self) -> Result<bool, Problem> {
        let disks = &self.placement()?.disks;
        let mut moves = disks.iter().filter_map(|d| self.cluster.index.volume_move(&d.volume));
        Ok(moves.any(|last| !last.shown.state.is_final()))
    }

    /// The planner's decision: the data volumes come to the VM's host.
    pub(super) async fn bring_data(
        &mut self,
        host: &HostId,
        plan: Plan,
        reason: &str,
    ) -> Result<(), Problem> {
        let data = self.placement()?.disks.iter().filter(|d| d.data_of.is_some());
        let far = data.filter(|disk| disk.home != *host).map(|disk| disk.volume.clone());
        let far: Vec<VolumeName> = far.collect();
        let Some(first) = far.first() else { return Ok(()) };
        let cause = VolumeMoveCause::Follows(vm_of(&self.id));
        if let Err(problem) = volume_moves::request(&self.cluster, first, host, cause).await {
            tracing::info!("the data of job {} stay where they are: {problem}", self.id);
            return Ok(());
        }
        let record = &mut self.record.value;
        record.to_follow = far;
        record.moves += 1;
        self.record.save().await?;
        let summary = format!("copy the data to {host}: {reason}");
        planning::record(&self.cluster, &self.id, Trigger::TimeLost, plan, summary).await
    }

    /// Brings the volumes that follow the VM to its host, one after the other.
    pub(super) async fn bring_volumes(&mut self) -> Result<(), Problem> {
        let Some(volume) = self.record.value.to_follow.first().cloned() else { return Ok(()) };
        let Some(host) = self.job().host.clone() else { return Ok(()) };
        let cause = VolumeMoveCause::Follows(vm_of(&self.id));
        if self.homes_move()? {
            return Ok(());
        }
        let disks = &self.placement()?.disks;
        let home = disks.iter().find(|disk| disk.volume == volume).map(|disk| &disk.home);
        let is_there = home.is_none_or(|home| *home == host);
        let is_held = disks.iter().any(|disk| disk.volume == volume && disk.leave_site.is_never());
        if is_there || is_held || self.stays(&volume, &host, &cause) {
            self.record.value.to_follow.remove(0);
            return self.record.save().await;
        }
        match volume_moves::request(&self.cluster, &volume, &host, cause).await {
            Ok(_) => Ok(()),
            // Asked again with the next figures.
            Err(problem)
                if matches!(problem.kind, ProblemKind::Unavailable | ProblemKind::Conflict) =>
            {
                tracing::debug!("job {}: {problem}", self.id);
                Ok(())
            }
            Err(problem) => Err(problem),
        }
    }

    /// Whether its move to the VM's host was called off since the VM is there.
    fn stays(&self, volume: &VolumeName, host: &HostId, cause: &VolumeMoveCause) -> bool {
        self.cluster.index.volume_move(volume).is_some_and(|last| {
            let shown = &last.shown;
            let is_this = shown.cause == *cause && shown.to == *host;
            is_this
                && shown.state == VolumeMoveState::CalledOff
                && shown.started_ms >= self.record.value.meter.arrived_ms
        })
    }

    /// Forgets the moves of the volumes that were only for this job.
    pub(super) async fn forget_volume_moves(&self) -> Result<(), Problem> {
        for disk in self.record.value.placement.iter().flat_map(|placement| &placement.disks) {
            let last = self.cluster.index.volume_move(&disk.volume);
            if disk.temporary && last.is_some_and(|last| last.shown.state.is_final()) {
                volume_moves::forget(&self.cluster, &disk.volume).await?;
            }
        }
        Ok(())
    }
}

/// A disk of the job whose volume lost a part with a host that was removed, and that host.
pub(super) fn incomplete<'a>(
    cluster: &Cluster,
    record: &'a JobRecord,
) -> Option<(&'a PlacedDisk, HostId)> {
    let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
    disks.find_map(|disk| {
        let last = cluster.index.volume_move(&disk.volume)?;
        let shown = &last.shown;
        let is_incomplete = shown.state == VolumeMoveState::Lost
            || (shown.state.is_taken() && shown.missing_bytes != Some(0));
        let from_removed = disk.home == shown.to && cluster.hosts.get(&shown.from).is_err();
        (is_incomplete && from_removed).then(|| (disk, shown.from.clone()))
    })
}
