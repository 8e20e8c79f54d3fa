//! VMs that live without a job. They go through the same steps as a job's VM; here is what differs: a person starts and
//! stops them, they keep their disks, and they have no command whose end is awaited. What is decided is in
//! [`perigee_model::persistent_vm`].

use std::time::Instant;

use perigee_model::job::{Access, JobState, Start};
use perigee_model::persistent_vm::{Next, PersistentVm, ResizeVm, Seen, SetVm};
use perigee_model::states::JobEvent;
use perigee_model::tenant::SEPARATOR;
use perigee_model::vm::{VmReport, VmStatus};
use perigee_model::volume::VolumeSource;
use perigee_model::{DiskRole, Epoch, HostId, Problem, ProblemKind, VmStart, VolumeName};

use super::driver::{Run, Step};
use super::follow::vm_ended;
use super::stage::write_disk;
use crate::cleaner::{self, Cleanup};
use crate::clock::now_ms;
use crate::cluster::HostLink;
use crate::guest::nocloud::{self, Mounted};
use crate::meter::Meter;
use crate::networks;
use crate::records::{
    JobRecord, Live, MigrationRecord, PlacedDisk, Placement, VolumeChange, owner_of, start_of,
    vm_of,
};
use crate::storage::moves;

impl Run {
    pub(super) fn persistent(&self) -> Option<&PersistentVm> {
        self.record.value.kind.persistent_vm()
    }

    fn change_persistent<T: Default>(&mut self, change: impl FnOnce(&mut PersistentVm) -> T) -> T {
        self.record.value.kind.persistent_vm_mut().map(change).unwrap_or_default()
    }

    /// Whether the VM has got this in the run that it is in, and that is not recorded yet.
    fn is_new<T>(&self, live: &Live<T>, applied: impl Fn(&PersistentVm) -> u64) -> bool {
        let record = &self.record.value;
        let is_next = |persistent: &PersistentVm| live.number > applied(persistent);
        record.is_in_run(live.run) && record.kind.persistent_vm().is_some_and(is_next)
    }

    /// Records what was said of it anew.
    pub(super) async fn apply_set(&mut self, asked: Option<(u64, SetVm)>) -> Result<(), Problem> {
        let record = &mut self.record.value;
        let Some((number, SetVm { may_migrate, rules })) = asked else { return Ok(()) };
        match record.kind.persistent_vm_mut().filter(|persistent| number > persistent.set) {
            Some(persistent) => persistent.set = number,
            None => return Ok(()),
        }
        if let Some(may_migrate) = may_migrate {
            record.job.spec.may_migrate = may_migrate;
        }
        if let Some(rules) = rules {
            record.job.spec.rules = rules;
        }
        self.record.save().await
    }

    /// Records the size that it has got while it ran.
    pub(super) async fn apply_size(&mut self, size: Option<Live<ResizeVm>>) -> Result<(), Problem> {
        let Some(size) = size.filter(|size| self.is_new(size, |persistent| persistent.sized))
        else {
            return Ok(());
        };
        let record = &mut self.record.value;
        let Some(persistent) = record.kind.persistent_vm_mut() else { return Ok(()) };
        persistent.sized = size.number;
        let size = size.change;
        let spec = &mut record.job.spec;
        spec.cpus = size.cpus.unwrap_or(spec.cpus);
        spec.root_bytes = size.disk_bytes.or(spec.root_bytes);
        if let Some(bytes) = size.memory_bytes {
            persistent.memory_next = Some(bytes).filter(|bytes| *bytes != spec.memory_bytes);
        }
        self.record.save().await
    }

    /// Records the volume that has come or gone while it ran. Its host lets one that has gone go.
    pub(super) async fn apply_volume(
        &mut self,
        change: Option<&Live<VolumeChange>>,
    ) -> Result<(), Problem> {
        let Some(Live { number, change, .. }) =
            change.filter(|change| self.is_new(change, |persistent| persistent.plugged))
        else {
            return Ok(());
        };
        let left = self.left_by(change, *number);
        self.change_persistent(|persistent| persistent.plugged = *number);
        change.apply(&mut self.record.value);
        match left {
            Some(left) => cleaner::hand_over_and(&self.cluster, &left, self.record.save()).await,
            None => self.record.save().await,
        }
    }

    /// What the VM's host has attached of a volume that goes with this change.
    fn left_by(&self, change: &VolumeChange, number: u64) -> Option<Cleanup> {
        let record = &self.record.value;
        let (VolumeChange::Goes(volume), Some(host)) = (change, &record.job.host) else {
            return None;
        };
        let disks = record.placement.iter().flat_map(|placement| &placement.disks);
        let gone = disks.filter(|disk| disk.role.is_data() && disk.volume == *volume).cloned();
        let name = cleaner::name_of(&record.job, &format!("u{number}"));
        let mut left = Cleanup::new(&self.id, &name, VmStart::default());
        left.add_attachments(host, &gone.collect::<Vec<_>>());
        (!left.attachments.is_empty()).then_some(left)
    }

    /// The step of a VM without a job, if it is not one of those that a job's VM has too.
    pub(super) async fn persistent_step(&mut self) -> Result<Option<Step>, Problem> {
        let (state, runs) = (self.job().state, self.seen_running);
        let seen = Seen { state, is_started: self.record.value.vm_started, runs };
        let passed_ms = self.cluster.clock.passed_ms();
        match self.persistent().map(|persistent| persistent.next(seen, passed_ms)) {
            None | Some(Next::GoOn) => Ok(None),
            Some(Next::Rest) => self.rest().await.map(Some),
            Some(Next::TakeDown) => self.take_down().await.map(Some),
            Some(Next::Press) => {
                self.press_power_button().await?;
                Ok(None)
            }
        }
    }

    /// Gives the root disks to the cleaner in whose place another image was restored.
    pub(super) async fn drop_old_roots(&mut self) -> Result<(), Problem> {
        let Some(persistent) =
            self.persistent().filter(|persistent| !persistent.dropped.is_empty())
        else {
            return Ok(());
        };
        let name = cleaner::name_of(self.job(), &format!("d{}", persistent.root_number));
        let mut cleanup = Cleanup::new(&self.id, &name, VmStart::default());
        cleanup.owner = Some(owner_of(self.job()));
        cleanup.volumes.clone_from(&persistent.dropped);
        for (_, volume) in &cleanup.volumes {
            let last = self.cluster.index.volume_move(volume);
            if last.is_some_and(|last| last.view.state.is_final()) {
                moves::forget(&self.cluster, volume).await?;
            }
        }
        cleaner::hand_over(&self.cluster, &cleanup).await?;
        self.change_persistent(|persistent| persistent.dropped.clear());
        self.record.save().await
    }

    /// It is off. Only a host that was removed changes something for it.
    async fn rest(&mut self) -> Result<Step, Problem> {
        let disks = self.record.value.placement.iter().flat_map(|placement| &placement.disks);
        let mut own = disks.filter(|disk| disk.temporary);
        // One that moved there may yet go back to its old home.
        let is_over = |volume: &VolumeName| {
            let last = self.cluster.index.volume_move(volume);
            last.is_none_or(|last| last.view.state.is_final())
        };
        let is_lost = |disk: &&PlacedDisk| {
            self.cluster.hosts.get(&disk.home).is_err() && is_over(&disk.volume)
        };
        let lost = own.find(is_lost).cloned();
        if let Some(disk) = lost {
            let why = format!(
                "its disk {} is lost with host {}, which was removed; the VM can only be deleted",
                disk.volume, disk.home
            );
            self.say(&why).await?;
        }
        Ok(Step::Leave)
    }

    async fn press_power_button(&mut self) -> Result<(), Problem> {
        // What follows when its host was removed meanwhile is decided where the VM is looked at.
        let Ok(host) = self.host() else { return Ok(()) };
        let path = format!("/v1/vms/{}/power-button", vm_of(&self.id));
        // An agent that does not answer is asked again later; how long that may take is counted from the first answer.
        match host.agent.post::<()>(&path, &()).await {
            Ok(()) => {
                let passed_ms = self.cluster.clock.passed_ms();
                self.change_persistent(|persistent| persistent.pressed(passed_ms));
                self.record.save().await
            }
            Err(problem) => {
                tracing::debug!("VM {}: {problem}", self.id);
                Ok(())
            }
        }
    }

    /// What is recorded of a VM without a job when its host has reported it. Its guest's messages are nobody's.
    pub(super) async fn follow_persistent(
        &mut self,
        report: &VmReport,
        moving: bool,
    ) -> Result<Step, Problem> {
        let figures_due =
            self.figures_read.is_none_or(|at| at.elapsed() >= self.cluster.timing.figures);
        if figures_due {
            self.read_figures(report).await?;
            self.figures_read = Some(Instant::now());
            self.take_sample().await?;
        }
        let has_ended = matches!(report.status, VmStatus::Gone | VmStatus::Shutdown);
        if has_ended && !moving {
            return self.guest_ended(report).await;
        }
        let is_up = !has_ended && !matches!(report.status, VmStatus::Starting | VmStatus::Incoming);
        if is_up && self.job().state == JobState::Starting {
            let job = &mut self.record.value.job;
            job.state = job.state.next(JobEvent::GuestRuns)?;
            job.running_ms = Some(now_ms());
            self.record.save().await?;
        }
        self.seen_running = report.status == VmStatus::Running && !moving;
        let passed_ms = self.cluster.clock.passed_ms();
        if !self.seen_running
            && !moving
            && self.change_persistent(|persistent| persistent.stands_still(passed_ms))
        {
            self.record.save().await?;
        }
        if self.change_persistent(|persistent| persistent.give_up(passed_ms)) {
            tracing::warn!("VM {}: its guest does not power off", self.id);
            self.record.save().await?;
        }
        let note = self.persistent().map(|persistent| persistent.note.clone()).unwrap_or_default();
        let trouble = self.reason(report);
        let waits = self.cluster.hosts.named_waits(&report.waits);
        self.say_waiting(if trouble.is_empty() { &note } else { &trouble }, waits).await?;
        if figures_due && !moving {
            self.bring_volumes().await?;
        }
        self.pause()
    }

    /// A person has moved it to this host. It starts there, or at that site, from now on, if it was bound to another one.
    pub(super) fn starts_there_from_now_on(&mut self, to: &HostId) {
        if self.persistent().is_none() {
            return;
        }
        let site = self.cluster.hosts.get(to).map(|host| host.addresses.site.clone());
        let start = &mut self.record.value.job.spec.start;
        *start = match (std::mem::take(start), site) {
            (Start::Host(_), _) => Start::Host(to.clone()),
            (Start::Site(_), Ok(site)) => Start::Site(site),
            (start, _) => start,
        };
    }

    /// The guest powered off or panicked, or its QEMU is gone.
    async fn guest_ended(&mut self, report: &VmReport) -> Result<Step, Problem> {
        if report.status == VmStatus::Gone
            && let Some(step) = self.leave_rebooted_host().await?
        {
            return Ok(step);
        }
        let why = vm_ended(report);
        self.change_persistent(|persistent| persistent.ended(&why));
        self.record.save().await?;
        Ok(Step::Again)
    }

    /// The VM can't run any more. It is off from now on, and keeps its disks.
    pub(super) async fn fail_persistent(&mut self, why: &str) -> Result<(), Problem> {
        self.change_persistent(|persistent| persistent.fail(why));
        self.record.save().await
    }

    /// Removes the VM from its hosts, and keeps its disks. Nothing goes on before it is known to be gone.
    async fn take_down(&mut self) -> Result<Step, Problem> {
        let poll = self.cluster.timing.poll;
        if self.cluster.index.is_move_being_recorded(&vm_of(&self.id)) {
            return Ok(Step::Wait(poll));
        }
        let moves = self.unsettled().await?;
        if moves.iter().any(|record| !record.migration.state.is_final()) {
            return Ok(Step::Wait(poll));
        }
        // A move that is just being recorded has to be known, so that the disk is deleted where it goes.
        if self.call_off_moves_of_one_run().await? {
            return Ok(Step::Wait(poll));
        }
        if !self.persistent().is_some_and(PersistentVm::is_taken_down) {
            self.change_persistent(PersistentVm::takes_down);
            self.record.save().await?;
        }
        if let Some(cleanup) = self.of_this_run(&moves) {
            cleaner::hand_over(&self.cluster, &cleanup).await?;
            cleaner::try_now(&self.cluster, &self.id).await?;
            if let Some(host) = cleaner::may_run_at(&self.cluster, &cleanup).await? {
                self.say(&format!("it is off when host {host} answers, where it may still run"))
                    .await?;
                return Ok(Step::Wait(self.cluster.timing.monitor));
            }
        }
        let last = moves.iter().map(|moved| moved.number).max();
        self.settle().await?;
        let record = &mut self.record.value;
        record.settled = record.settled.max(last.unwrap_or_default());
        record.restarts += 1;
        record.forget_run();
        // What a host refused at this start it may do at the next one.
        record.refused_by.clear();
        record.job.state = record.job.state.next(JobEvent::TakenDown)?;
        record.job.reason =
            record.kind.persistent_vm_mut().map(PersistentVm::is_down).unwrap_or_default();
        self.seen_running = false;
        self.record.save().await?;
        self.forget_old_moves().await?;
        Ok(Step::Again)
    }

    /// Calls off the moves of volumes that are made anew for each start. Returns whether one is just being recorded.
    async fn call_off_moves_of_one_run(&self) -> Result<bool, Problem> {
        let disks = self.record.value.placement.iter().flat_map(|placement| &placement.disks);
        let disks: Vec<PlacedDisk> = disks.cloned().collect();
        let mut is_unknown = false;
        for (_, volume) in of_one_run(&disks) {
            if !self.cluster.index.is_changing_home(&volume) {
                continue;
            }
            let last = self.cluster.index.volume_move(&volume);
            is_unknown |= last.is_none_or(|last| last.view.state.is_final());
            self.call_off_taking(&volume).await?;
        }
        Ok(is_unknown)
    }

    /// The VM and its attachments at every host where it may be. `None` if it has none.
    fn of_this_run(&self, unsettled: &[MigrationRecord]) -> Option<Cleanup> {
        let record = &self.record.value;
        let placement = record.placement.as_ref()?;
        let went = unsettled.iter().filter(|moved| moved.may_have_begun());
        let moved = went.flat_map(|m| [&m.migration.from, &m.migration.to]);
        let mut hosts: Vec<&HostId> =
            record.job.host.iter().chain(&record.left).chain(moved).collect();
        hosts.sort();
        hosts.dedup();
        if hosts.is_empty() {
            return None;
        }
        let name = cleaner::name_of(&record.job, &format!("s{}", record.restarts));
        let mut cleanup = Cleanup::new(&self.id, &name, start_of(record, 0).whole_run());
        cleanup.owner = Some(owner_of(&record.job));
        // A host that was never asked to start it does not run it.
        let may_run = record.vm_started || record.job.started_ms.is_some();
        for host in hosts {
            match may_run {
                true => cleanup.add_host(&self.id, host, &placement.disks),
                false => cleanup.add_attachments(host, &placement.disks),
            }
        }
        cleanup.volumes = of_one_run(&placement.disks);
        // A move that is not over may bring it to either end. The cleaner waits for the move.
        for (home, volume) in of_one_run(&placement.disks) {
            let last = self.cluster.index.volume_move(&volume);
            let Some(last) = last.filter(|last| !last.view.state.is_final()) else { continue };
            let others = [&last.view.from, &last.view.to].into_iter().filter(|at| **at != home);
            cleanup.volumes.extend(others.map(|at| (at.clone(), volume.clone())));
        }
        Some(cleanup)
    }

    /// Makes the disk that cloud-init reads, anew for each start.
    pub(super) async fn make_cloud_init(
        &self,
        home: &HostLink,
        disk: &PlacedDisk,
    ) -> Result<Epoch, Problem> {
        let job = self.job();
        let Some(persistent) = self.persistent() else {
            return Err(Problem::internal(format!("job {}", self.id), "it has no such disk"));
        };
        let mounts = job.spec.volumes.iter().zip(&persistent.mounts).enumerate();
        let mounts = mounts.filter_map(|(index, (volume, path))| {
            Some(Mounted {
                serial: persistent.role_of(index)?.to_string(),
                path: path.clone()?,
                read_only: volume.access == Access::Read,
            })
        });
        let mounts: Vec<Mounted> = mounts.collect();
        let instance = format!("{}-{}", self.id, job.submitted_ms);
        let host_name = self.id.as_str().rsplit(SEPARATOR).next().unwrap_or_default();
        let wanted = &persistent.cloud_init;
        let network = networks::of_vm(&self.record.value)?;
        let made = nocloud::disk(&instance, host_name, &network, &mounts, wanted);
        let fat =
            made.map_err(|why| Problem::invalid(format!("can't start VM {}", self.id), why))?;
        self.make_with(home, disk, fat.disk_bytes, fat.bytes).await
    }

    /// Makes a volume of this size that begins with these bytes.
    pub(super) async fn make_with(
        &self,
        home: &HostLink,
        disk: &PlacedDisk,
        size_bytes: u64,
        bytes: Vec<u8>,
    ) -> Result<Epoch, Problem> {
        let epoch = self.create(home, disk, Some(size_bytes), VolumeSource::Empty).await?;
        write_disk(home, disk, bytes).await?;
        Ok(epoch)
    }

    /// The root disk of a VM that has run before has to be at its home.
    pub(super) fn root_is_lost(&self, home: &HostLink, problem: Problem) -> Problem {
        if problem.kind != ProblemKind::NotFound {
            return problem;
        }
        let what = format!("can't start VM {}", self.id);
        Problem::conflict(what, format!("its root disk is not at {} any more", home.id))
            .next("delete the VM and make it anew")
    }
}

impl JobRecord {
    /// What is no more when a VM has left its host, for whatever reason. A VM without a job keeps its disks.
    pub(super) fn forget_run(&mut self) {
        match &mut self.placement {
            Some(placement) if self.kind.is_persistent_vm() => {
                // They get new epochs, so that nobody else writes them any more.
                placement.disks.retain(|disk| disk.role != DiskRole::CloudInit);
                placement.disks.iter_mut().for_each(|disk| disk.epoch = None);
            }
            placement => *placement = None,
        }
        let next =
            self.kind.persistent_vm_mut().and_then(|persistent| persistent.memory_next.take());
        self.job.spec.memory_bytes = next.unwrap_or(self.job.spec.memory_bytes);
        self.vm_started = false;
        self.boot_id.clear();
        (self.last_seq, self.seq_before) = (0, 0);
        self.finished = None;
        self.left = None;
        self.leaving = None;
        self.meter = Meter::default();
        self.to_follow.clear();
        self.counted_ms = 0;
        self.moves = 0;
        let job = &mut self.job;
        job.host = None;
        job.waits.clear();
        if !self.kind.is_persistent_vm() {
            job.vm = None;
        }
        (job.exit_code, job.end, job.oom_kills) = (None, None, None);
        (job.progress, job.predicted) = (None, None);
        job.left_out = 0;
        (job.started_ms, job.running_ms, job.measured_s) = (None, None, None);
    }

    /// The disks that a VM without a job has kept; none before it was placed first.
    pub fn kept(&self) -> Option<&Placement> {
        self.placement.as_ref().filter(|_| self.kind.is_persistent_vm())
    }
}

/// The volumes of a VM without a job that are made anew for each start.
pub(super) fn of_one_run(disks: &[PlacedDisk]) -> Vec<(HostId, VolumeName)> {
    let own = disks.iter().filter(|disk| disk.role == DiskRole::CloudInit);
    own.map(|disk| (disk.home.clone(), disk.volume.clone())).collect()
}
