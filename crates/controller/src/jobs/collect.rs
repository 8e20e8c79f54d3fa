//! The outputs of a job whose VM has ended under it, or was stopped as it was: the guest's kernel has panicked, its QEMU was killed,
//! it does not heed a cancel, or a person wants it to stop at once. What the command has written is on the VM's disks, as
//! filesystems of the guest, and only a guest mounts those. So the VM is started once more where it was, with a seed that says that
//! nothing is run: the runner writes the outputs to their disk as after any end, and they are fetched as always.
//!
//! ```text
//! ends     migrations end; the guest's last messages are fetched; new writer epochs keep the VM of before from writing; the seed
//! ready    the VM is requested, with the last start number of this run
//! started  until the guest says that the outputs are written
//! ```
//!
//! How the job ends is recorded before, and nothing here changes it. There is one start, and one deadline for all of this.

use std::time::Instant;

use perigee_model::job::{HostState, JobState};
use perigee_model::states::JobEvent;
use perigee_model::vm::{VmReport, VmSpec, VmStatus};
use perigee_model::{Problem, ProblemKind};

use super::driver::{Run, Step};
use super::follow::{vm_ended, vm_spec};
use super::stage;
use crate::records::{Collect, CollectStep, Ending, last_start_of, vm_of};
use crate::storage::{attach, volumes};

/// What people see meanwhile.
const COLLECTING: &str =
    "its VM is started once more, without the command, to fetch the outputs that are on its disks";

const GIVEN_UP: &str = "they were given up on request";

impl Collect {
    /// How the job ends if its outputs were fetched, and what is said of them.
    pub(super) fn with_outputs(self, notes: Vec<String>) -> (Ending, String) {
        let is_of_disks = self.step == CollectStep::Started;
        let whose = is_of_disks.then(|| "its outputs are what was on its disks then".to_owned());
        self.said(whose.into_iter().chain(notes))
    }

    fn without_outputs(self, why: &str) -> (Ending, String) {
        self.said([format!("its outputs are lost: {why}")])
    }

    fn said(self, of_outputs: impl IntoIterator<Item = String>) -> (Ending, String) {
        let Self { ending, reason, console, .. } = self;
        let console = (!console.is_empty()).then(|| format!("its console ends with:\n{console}"));
        let parts = [reason].into_iter().chain(of_outputs).chain(console);
        (ending, parts.collect::<Vec<_>>().join("; "))
    }
}

impl Run {
    /// Ends a job whose VM has ended or is to be stopped as it is: after its outputs were fetched, if its command has begun.
    pub(super) async fn end_after_outputs(
        &mut self,
        ending: Ending,
        reason: String,
    ) -> Result<(), Problem> {
        self.end_after_outputs_of((ending, reason), String::new()).await
    }

    /// The same with the last lines of the VM's console.
    pub(super) async fn end_after_outputs_of(
        &mut self,
        (ending, reason): (Ending, String),
        console: String,
    ) -> Result<(), Problem> {
        if self.record.value.collect.is_some() {
            return Ok(());
        }
        let collect = Collect { console, ..Collect::new(ending, reason) };
        if !self.may_have_outputs() {
            let (ending, reason) = collect.said([]);
            return self.end(ending, reason).await;
        }
        self.record.value.collect = Some(collect);
        self.record.save().await
    }

    /// A person does not wait for the outputs.
    pub(super) async fn give_up_outputs(
        &mut self,
        ending: Ending,
        reason: String,
    ) -> Result<(), Problem> {
        match self.record.value.collect.is_some() {
            true => self.end_without_outputs(GIVEN_UP).await,
            false => self.end(ending, reason).await,
        }
    }

    pub(super) async fn end_without_outputs(&mut self, why: &str) -> Result<(), Problem> {
        let Some(collect) = self.record.value.collect.clone() else { return Ok(()) };
        tracing::warn!("job {}: its outputs are lost: {why}", self.id);
        let (ending, reason) = collect.without_outputs(why);
        self.end(ending, reason).await
    }

    pub(super) async fn collect(&mut self, collect: Collect) -> Result<Step, Problem> {
        let since = *self.collect_seen.get_or_insert_with(Instant::now);
        if self.record.value.finished.is_some() {
            return self.collected().await;
        }
        if let Some(why) = self.why_not_collected(&collect, since) {
            self.end_without_outputs(&why).await?;
            return Ok(Step::Again);
        }
        match collect.step {
            CollectStep::Ends => self.prepare_collecting().await,
            CollectStep::Ready => self.start_collecting().await,
            CollectStep::Started => self.follow_collecting().await,
        }
    }

    /// A host that does not answer may be back before the deadline, but who cancels at once does not wait for it.
    fn why_not_collected(&self, collect: &Collect, since: Instant) -> Option<String> {
        let host = self.job().host.as_ref()?;
        let limit = self.cluster.timing.collect_deadline;
        if self.cluster.hosts.get(host).is_err() {
            return Some(format!("host {host} was removed"));
        }
        let is_silent = self.cluster.hosts.state(host) == HostState::Unreachable;
        if is_silent && self.is_hurried {
            return Some(format!("host {host} does not answer"));
        }
        if since.elapsed() > limit {
            let because = match self.job().reason.as_str() {
                "" | COLLECTING => String::new(),
                reason => format!(": {reason}"),
            };
            return Some(format!("that took longer than {} s{because}", limit.as_secs()));
        }
        collect.failed.clone().filter(|_| collect.step == CollectStep::Started)
    }

    /// Makes sure that nothing of the VM of before writes any more, and that the next guest runs nothing. Each part can be
    /// repeated.
    async fn prepare_collecting(&mut self) -> Result<Step, Problem> {
        let poll = Step::Wait(self.cluster.timing.poll);
        if self.cluster.index.is_move_being_recorded(&vm_of(&self.id)) {
            return Ok(poll);
        }
        if self.unsettled().await?.iter().any(|moved| !moved.migration.state.is_final()) {
            return Ok(poll);
        }
        if self.homes_are_changing().await? {
            if let Some(why) = self.why_homes_wait() {
                self.say(&why).await?;
            }
            return Ok(poll);
        }
        if self.settle_migrations().await?.is_none() {
            return Ok(Step::Again);
        }
        let host = self.host()?;
        match self.take_events(&host, u64::MAX).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => {}
            taken => taken?,
        }
        if self.record.value.finished.is_some() {
            return Ok(Step::Again);
        }
        let disks = self.placement()?.disks.clone();
        for (index, disk) in disks.iter().enumerate().filter(|(_, disk)| !disk.read_only) {
            let home = volumes::reachable(&self.cluster, &disk.home)?;
            let epoch = match stage::take_over(&home, disk).await {
                // The VM's host may be changing it at the same time.
                Err(problem) if problem.kind == ProblemKind::Conflict => {
                    return Err(Problem { kind: ProblemKind::Unavailable, ..problem });
                }
                taken => taken?,
            };
            if let Some(placement) = &mut self.record.value.placement {
                placement.disks[index].epoch = Some(epoch);
            }
        }
        self.write_collecting_seed().await?;
        let record = &mut self.record.value;
        if record.job.state == JobState::Running {
            record.job.state = record.job.state.next(JobEvent::CommandEnded)?;
        }
        if let Some(collect) = &mut record.collect {
            (collect.step, collect.failed) = (CollectStep::Ready, None);
            record.seq_before = record.last_seq;
        }
        COLLECTING.clone_into(&mut record.job.reason);
        self.record.save().await?;
        Ok(Step::Again)
    }

    /// Requests the VM. The agent ends the one of before first. Repeating this with the same spec changes nothing.
    async fn start_collecting(&mut self) -> Result<Step, Problem> {
        let host = self.host()?;
        let placement = self.placement()?.clone();
        attach::attach(&self.cluster, &placement.disks, &host.id).await?;
        let spec = VmSpec {
            start: last_start_of(&self.record.value),
            ..vm_spec(self, &placement, &host.id)?
        };
        let path = format!("/v1/vms/{}", spec.vm);
        let report: VmReport = host.agent_slow.put(&path, &spec).await?;
        self.cluster.hosts.remember_vm(&host.id, &report);
        if let Some(collect) = &mut self.record.value.collect {
            collect.step = CollectStep::Started;
        }
        self.record.value.boot_id = report.boot_id;
        COLLECTING.clone_into(&mut self.record.value.job.reason);
        self.record.save().await?;
        Ok(Step::Again)
    }

    async fn follow_collecting(&mut self) -> Result<Step, Problem> {
        let host = self.host()?;
        let report = match self.look(&host).await {
            Ok((_, report)) => report,
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                self.end_without_outputs("the host does not know the VM that was to write them")
                    .await?;
                return Ok(Step::Again);
            }
            Err(problem) => return Err(problem),
        };
        if report.spec.start != last_start_of(&self.record.value) {
            // It is older than the request.
            return self.pause();
        }
        let said = report.last_seq.saturating_add(self.record.value.seq_before);
        self.take_events(&host, said).await?;
        let record = &self.record.value;
        let has_failed = record.collect.as_ref().is_some_and(|collect| collect.failed.is_some());
        if record.finished.is_some() || has_failed {
            return Ok(Step::Again);
        }
        if matches!(report.status, VmStatus::Gone | VmStatus::Shutdown) {
            let why = format!("the VM that was to write them ended: {}", vm_ended(&report));
            self.end_without_outputs(&why).await?;
            return Ok(Step::Again);
        }
        let trouble = self.reason(&report);
        let waits = self.cluster.hosts.named_waits(&report.waits);
        self.say_waiting(if trouble.is_empty() { COLLECTING } else { &trouble }, waits).await?;
        self.pause()
    }
}
