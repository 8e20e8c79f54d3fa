//! A VM whose disks are being made of the backup of one. Its record names each disk, its host and its layer before any host is asked, and then which disks are there.
//! So a controller that was killed goes on with the disk that comes next, and finds by its layer or owner one that was made without an answer. The VM does not start
//! before all are there. If one can't be made, those that were made are deleted, and the VM with them.

use std::time::{Duration, Instant};

use perigee_model::from_backup::{DiskFromBackup, FromBackup};
use perigee_model::{LeaveSite, Problem, ProblemKind};

use super::driver::{Run, Step};
use crate::records::{Ending, owner_of};
use crate::storage::{backups, volumes};

/// A host or target that is away is waited for so long.
const PATIENCE: Duration = Duration::from_secs(3600);
/// What else has failed is tried again for so long: a write to the store may have failed. What has gone well for so long begins anew to be waited for.
const MINUTE: Duration = Duration::from_secs(60);

impl Run {
    /// What the disks of this VM are being made of.
    fn its_backup(&self) -> Option<&FromBackup> {
        self.persistent().and_then(|persistent| persistent.from_backup.as_ref())
    }

    /// The step of a VM whose disks are not all there yet; `None`: they are.
    pub(super) async fn make_of_backup(&mut self) -> Result<Option<Step>, Problem> {
        let Some(of) = self.its_backup().cloned() else { return Ok(None) };
        // None is deleted before the disks that come last have begun to need theirs.
        let named = of.disks.iter().filter_map(|disk| disk.backup.as_ref());
        let _reading: Vec<_> = named.map(backups::begin_reading).collect();
        for (at, disk) in of.disks.iter().enumerate().filter(|(_, disk)| !disk.is_made) {
            match self.make_patiently(&of, disk).await? {
                Ok(leave_site) => self.disk_is_made(at, leave_site).await?,
                Err(problem) => return self.give_up_restore(problem).await.map(Some),
            }
        }
        if let Some(persistent) = self.record.value.kind.persistent_vm_mut() {
            persistent.from_backup = None;
        }
        self.record.value.job.reason.clear();
        self.record.save().await?;
        Ok(Some(Step::Again))
    }

    /// Tries until the disk is there, or can't be made. The outer error is the store's.
    async fn make_patiently(
        &mut self,
        of: &FromBackup,
        disk: &DiskFromBackup,
    ) -> Result<Result<LeaveSite, Problem>, Problem> {
        let mut failing_since = None::<Instant>;
        loop {
            let begun = Instant::now();
            let problem = match self.make_one(of, disk).await {
                Err(problem) => problem,
                made => return Ok(made),
            };
            let patience = match problem.kind {
                ProblemKind::Unavailable => PATIENCE,
                ProblemKind::Internal => MINUTE,
                _ => return Ok(Err(problem)),
            };
            failing_since = failing_since.filter(|_| begun.elapsed() < MINUTE);
            if failing_since.get_or_insert_with(Instant::now).elapsed() > patience {
                return Ok(Err(problem));
            }
            self.say(&format!("{}: {}", problem.what, problem.why)).await?;
            tokio::time::sleep(self.cluster.timing.monitor).await;
        }
    }

    async fn make_one(&self, of: &FromBackup, disk: &DiskFromBackup) -> Result<LeaveSite, Problem> {
        let owner = owner_of(self.job());
        if let Some(backup) = &disk.backup {
            return backups::restore_disk(&self.cluster, of, disk, backup, &owner).await;
        }
        // An older version has backed it up, without this disk.
        let placed = self.placement()?.disks.iter().find(|placed| placed.volume == disk.volume);
        let placed = placed.ok_or_else(|| {
            Problem::internal(format!("can't make disk {}", disk.volume), "it is not placed")
        })?;
        let home = volumes::reachable(&self.cluster, &placed.home)?;
        self.make_new(&home, placed).await.map(|_| placed.leave_site)
    }

    async fn disk_is_made(&mut self, at: usize, leave_site: LeaveSite) -> Result<(), Problem> {
        let record = &mut self.record.value;
        let of = record.kind.persistent_vm_mut().and_then(|vm| vm.from_backup.as_mut());
        let Some(disk) = of.and_then(|of| of.disks.get_mut(at)) else { return Ok(()) };
        disk.is_made = true;
        let placed = record.placement.iter_mut().flat_map(|placement| &mut placement.disks);
        placed.filter(|placed| placed.volume == disk.volume).for_each(|placed| {
            placed.leave_site = leave_site;
        });
        self.record.save().await
    }

    /// The VM is deleted, and uses no volume from now on: those that were made can be deleted.
    async fn give_up_restore(&mut self, problem: Problem) -> Result<Step, Problem> {
        let record = &mut self.record.value;
        tracing::warn!("VM {} can't be made of a backup: {problem}", record.job.id);
        let why = format!("{}: {}", problem.what, problem.why);
        record.job.spec.volumes.clear();
        let disks = record.placement.iter_mut().map(|placement| &mut placement.disks);
        disks.for_each(|disks| disks.retain(|disk| !disk.role.is_data()));
        if let Some(persistent) = record.kind.persistent_vm_mut() {
            persistent.mounts.clear();
            if let Some(of) = &mut persistent.from_backup {
                of.failed = Some(problem);
            }
        }
        self.record.end(Ending::Cancelled, why).await?;
        Ok(Step::Again)
    }

    /// Deletes the volumes that were made for a VM whose other disks could not be made. Its own disks go as those of every VM do.
    pub(super) async fn drop_restored_volumes(&self) -> Result<(), Problem> {
        let Some(of) = self.its_backup() else { return Ok(()) };
        // Somebody has to find that nothing comes to a disk any more of which the host was just asked.
        of.disks.iter().for_each(|disk| self.cluster.drive_restore(disk.layer));
        let data = of.disks.iter().filter(|disk| disk.role.is_data());
        if of.failed.is_none() {
            // A person has deleted the VM, and keeps the volumes that are there.
            for disk in data.filter(|disk| !disk.is_made) {
                backups::forget_disk(&self.cluster, disk).await?;
            }
            return Ok(());
        }
        let owner = owner_of(self.job());
        let mut away = None;
        for disk in data {
            match backups::drop_disk(&self.cluster, of, disk, &owner).await {
                // Its host was not removed, and may have it.
                Err(problem) if problem.kind == ProblemKind::Unavailable => {
                    away.get_or_insert(problem);
                }
                Err(problem) => tracing::warn!(
                    %problem, "volume {} of a restore that has failed stays", disk.volume
                ),
                Ok(()) => {}
            }
        }
        away.map_or(Ok(()), Err)
    }
}
