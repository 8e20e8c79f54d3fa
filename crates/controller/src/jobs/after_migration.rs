//! After a migration, the job follows its VM to the other host.

use std::time::Duration;

use perigee_model::job::{HostState, Migration, MigrationState};
use perigee_model::vm::VmReport;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem, ProblemKind, VmStart};

use super::driver::Run;
use crate::cleaner::{self, Cleanup};
use crate::clock::now_ms;
use crate::migration::{self, by_itself};
use crate::records::{
    MigrationIntent, MigrationRecord, PlacedDisk, Traced, migration_intent_key, start_of, vm_of,
};

/// How long the old host may take to say what the VM did there last.
const FIGURES_MAX: Duration = Duration::from_secs(2);

impl Run {
    /// Takes ended migrations into account. `Some(true)` while a migration is running; `None` if something
    /// changed and the step must be repeated.
    pub(super) async fn settle_migrations(&mut self) -> Result<Option<bool>, Problem> {
        if let Some(left) = self.record.value.left.clone() {
            let settled = self.record.value.settled;
            let start = start_of(&self.record.value, settled);
            self.clean_up(settled, start, &left).await?;
            self.record.value.left = None;
            self.record.save().await?;
            return Ok(None);
        }
        let moves = self.cluster.index.migrations_of(&vm_of(&self.id));
        let settled = self.record.value.settled;
        let Some(next) = moves.into_iter().find(|record| record.number > settled) else {
            return Ok(Some(false));
        };
        match next.migration.state {
            MigrationState::Completed => self.follow_vm(&next).await?,
            MigrationState::Aborted => {
                self.clean_up(next.number, next.start, &next.migration.to).await?;
                self.record.value.settled = next.number;
                self.record.value.meter.paused_ms += next.migration.downtime_ms;
                self.record.save().await?;
                self.forget_old_moves().await?;
            }
            MigrationState::Preparing | MigrationState::Copying | MigrationState::Switching => {
                return Ok(Some(true));
            }
        }
        Ok(None)
    }

    /// Records a cleanup for what a migration left at a host: the VM's starts up to the migration's. A job that
    /// began anew may have its VM there now.
    async fn clean_up(&self, number: u32, up_to: VmStart, host: &HostId) -> Result<(), Problem> {
        if self.job().host.as_ref() == Some(host) {
            return Ok(());
        }
        let disks = &self.placement()?.disks;
        let name = cleaner::name_of(self.job(), &format!("m{number:04}"));
        let cleanup = Cleanup::of_host(&self.id, &name, up_to, host, disks);
        cleaner::hand_over(&self.cluster, &cleanup).await
    }

    /// The VM runs at the destination. First its messages at the source are fetched, then those at the
    /// destination. A VM without a job has none.
    async fn follow_vm(&mut self, moved: &MigrationRecord) -> Result<(), Problem> {
        // A source that was removed is not asked. At any other source the VM is stopped, so there is a last
        // message.
        if let Ok(source) = self.cluster.hosts.get(&moved.migration.from)
            && self.persistent().is_none()
        {
            match self.take_events(&source, u64::MAX).await {
                Ok(()) => {}
                Err(problem) if problem.kind == ProblemKind::NotFound => {}
                Err(problem) if self.cluster.hosts.state(&source.id) == HostState::Unreachable => {
                    tracing::warn!(
                        "job {}: can't read its last messages at {}: {problem}",
                        self.id,
                        source.id
                    );
                }
                Err(problem) => return Err(problem),
            }
        }
        let to = moved.migration.to.clone();
        self.take_last_figures(moved).await?;
        self.starts_there_from_now_on(&to);
        let intent = migration_intent_key(&vm_of(&self.id), moved.number);
        let intent: Option<MigrationIntent> = self.cluster.records.read(&intent).await?;
        // The VM arrived before it could be called off. At least its volumes stay.
        let is_called_off = intent.is_some_and(|intent| intent.cancel);
        self.drop_trace(&moved.migration.from).await;
        let index = &self.cluster.index;
        let record = &mut self.record.value;
        let Some(placement) = &mut record.placement else { return Ok(()) };
        for raise in moved.plan.iter().flat_map(|plan| &plan.raises) {
            for disk in placement.disks.iter_mut().filter(|disk| disk.volume == raise.volume) {
                disk.epoch = Some(raise.to);
            }
        }
        let at_home: Vec<bool> = placement.disks.iter().map(|disk| disk.home == to).collect();
        let progress = record.job.progress_part().unwrap_or_default();
        let arrived_ms = moved.migration.ended_ms.unwrap_or(u64::MAX).min(now_ms());
        record.meter.arrived(arrived_ms, progress, &moved.io_before, &at_home);
        record.to_follow = match moved.migration.volumes {
            VolumesOnMove::Stay => Vec::new(),
            VolumesOnMove::Follow if is_called_off => Vec::new(),
            VolumesOnMove::Follow => {
                // Also its own disks that it only reads: the VM does not need its old host any more. A disk that is on its way to another
                // host comes back.
                let leaves = |disk: &PlacedDisk| {
                    let last = index.volume_move(&disk.volume);
                    last.is_some_and(|last| !last.view.state.is_final() && last.view.to != to)
                };
                let disks = placement.disks.iter();
                let disks = disks.filter(|disk| disk.home != to || leaves(disk));
                let disks = disks.filter(|disk| disk.temporary || !disk.read_only);
                disks.map(|disk| disk.volume.clone()).collect()
            }
        };
        self.migration_has_sent(&moved.migration);
        let record = &mut self.record.value;
        record.left = Some(moved.migration.from.clone());
        if record.leaving.is_some() {
            record.leaving = Some(to.clone());
        }
        record.job.host = Some(to);
        record.boot_id.clone_from(&moved.boot_id);
        record.settled = moved.number;
        record.meter.paused_ms += moved.migration.downtime_ms;
        record.moves += 1;
        // A trace of a part of the run says nothing about the whole run.
        record.traced = Traced::Not;
        // The balancer has noted its own ones when it decided them. A controller that ends before the record is saved notes it twice, and
        // never not at all.
        if moved.of_load && self.persistent().is_none() {
            let hosts = (&moved.migration.from, &moved.migration.to);
            by_itself::note(&self.cluster, &vm_of(&self.id), hosts).await;
        }
        self.record.save().await?;
        self.forget_old_moves().await
    }

    pub(super) async fn forget_old_moves(&self) -> Result<(), Problem> {
        migration::forget_old(&self.cluster, &vm_of(&self.id), self.record.value.settled).await
    }

    /// Counts what the VM did at its old host since the figures were last read there. A host that does not answer, or has
    /// another VM of this name by now, delays nothing.
    async fn take_last_figures(&mut self, moved: &MigrationRecord) -> Result<(), Problem> {
        let Migration { id, from, to, .. } = &moved.migration;
        let Ok(source) = self.cluster.hosts.get(from) else { return Ok(()) };
        if self.job().host.as_ref() != Some(from) {
            return Ok(());
        }
        let path = format!("/v1/vms/{}", vm_of(&self.id));
        let asked = tokio::time::timeout(FIGURES_MAX, source.agent.get::<VmReport>(&path));
        let is_its = |report: &VmReport| {
            report.migration.as_ref().is_some_and(|outgoing| outgoing.migration == *id)
        };
        match asked.await {
            Ok(Ok(report)) if is_its(&report) => self.read_last_figures(&report, to).await,
            _ => Ok(()),
        }
    }
}
