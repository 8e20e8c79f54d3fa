//! The states from starting to collecting: checks the VM repeatedly, and records the guest's messages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::guest::GuestEvent;
use perigee_model::job::{HostState, JobState, Sample};
use perigee_model::starts::VmStart;
use perigee_model::vm::{Disk, HostReport, Machine, VmReport, VmSpec, VmStatus};
use perigee_model::volume::ExportStats;
use perigee_model::waiting::in_words;
use perigee_model::{HostId, Problem, ProblemKind, VolumeName};

use super::cancel::CANCELLING;
use super::driver::{Run, Step};
use super::finish::Fetched;
use super::gang::AT_BARRIER;
use super::guest::Said;
use super::{ended, guest, log};
use crate::clock::now_ms;
use crate::cluster::HostLink;
use crate::files::outputs::left_out;
use crate::meter::Reading;
use crate::records::{Ending, JobRecord, Kind, PlacedDisk, Placement, start_of, vm_of};
use crate::storage::{attach, leave_site, volumes};
use crate::{networks, tpm};

/// How much longer than the job's own timeout and stop-grace the guest may take to report the end.
const TIMEOUT_GRACE_MS: u64 = 30_000;

/// The time for writing the outputs, counted from the command's end.
const COLLECT_MS_MAX: u64 = 20 * 60 * 1000;

/// How often the time that counts for these limits is stored. At most this much is lost when the controller
/// stops.
const COUNT_STORED_EVERY_MS: u64 = 10_000;

/// Number of console lines that are shown with a lost VM, and with a guest that does not start its job.
const CONSOLE_LINES: usize = 12;

/// A VM that can't start is tried again after a pause that is doubled each time, up to this.
const START_AGAIN_MAX: Duration = Duration::from_secs(60);

/// Tries of a host to start the VM in one run, each of which has failed.
#[derive(Debug)]
pub struct FailedStarts {
    host: HostId,
    run: VmStart,
    count: u32,
    again: Instant,
}

/// What a look at the VM has brought.
struct News {
    /// The figures were due, and were read.
    figures_due: bool,
    /// The command has started since the last look.
    begins: bool,
}

impl Run {
    /// Looks at the VM once, and does what follows from what its host and its guest say.
    pub(super) async fn follow(&mut self) -> Result<Step, Problem> {
        if !self.record.value.vm_started {
            if let Some(step) = self.leave_gone_host().await? {
                return Ok(step);
            }
            return self.start_vm().await;
        }
        if let Some(step) = self.end_late_cancel().await? {
            return Ok(step);
        }
        let seen_before = self.seen_at_work.take();
        let Some(moving) = self.settle_migrations().await? else { return Ok(Step::Again) };
        let gone = match moving {
            true => self.wait_for_the_move().await?,
            false => self.leave_gone_host().await?,
        };
        if let Some(step) = gone {
            return Ok(step);
        }
        let host = self.host()?;
        let (reported, report) = match self.look(&host).await {
            Ok(looked) => looked,
            Err(problem) => return self.not_seen(&host, moving, problem).await,
        };
        self.note_boot(&report).await?;
        if self.persistent().is_some() {
            return self.follow_persistent(&report, moving).await;
        }
        let news = self.take_news(&host, reported, &report).await?;
        if let Some(step) = self.end_if_over(&report, moving).await? {
            return Ok(step);
        }
        let runs = self.say_how_it_stands(&report).await?;
        self.count(seen_before, !moving && runs).await?;
        if let Some(step) = self.end_late_release().await? {
            return Ok(step);
        }
        if let Some(reason) = self.overdue(&report) {
            return self.end_overdue(reason).await;
        }
        if news.figures_due && !moving {
            self.bring_data_for_gang().await?;
            self.bring_volumes().await?;
        }
        // A change that history is sure of is made when the command starts, and not at the next figures.
        if news.figures_due || news.begins {
            self.decide_move(moving).await?;
        }
        self.pause()
    }

    /// The VM's host has said nothing of the VM. During a migration the destination's agent decides what it means that the host does
    /// not know the VM.
    async fn not_seen(
        &mut self,
        host: &HostLink,
        moving: bool,
        problem: Problem,
    ) -> Result<Step, Problem> {
        match problem.kind {
            ProblemKind::NotFound if moving => self.pause(),
            ProblemKind::NotFound if self.is_found_elsewhere(host).await? => Ok(Step::Again),
            ProblemKind::NotFound => self.lost("its host does not know it").await,
            ProblemKind::Unavailable => self.host_silent(host, problem).await,
            _ => Err(problem),
        }
    }

    /// Reads the VM's figures, if they are due, and the guest's messages. `reported`: when the report was made, at the earliest.
    async fn take_news(
        &mut self,
        host: &HostLink,
        reported: Instant,
        report: &VmReport,
    ) -> Result<News, Problem> {
        let said = report.last_seq.saturating_add(self.record.value.seq_before);
        let has_news = said > self.record.value.last_seq;
        let figures_due =
            self.figures_read.is_none_or(|at| at.elapsed() >= self.cluster.timing.figures);
        if has_news || figures_due {
            // The figures are read before the messages, because the command's start and end use them.
            self.read_figures(report).await?;
            self.reported = reported;
        }
        if figures_due {
            self.ask_to_end(host).await?;
        }
        self.ask_to_begin(host).await?;
        let ran_before = self.job().state == JobState::Running;
        if has_news {
            self.take_events(host, said).await?;
            self.trace(host).await?;
        }
        let begins = !ran_before && self.job().state == JobState::Running;
        if figures_due {
            self.figures_read = Some(Instant::now());
            self.take_sample().await?;
        }
        Ok(News { figures_due, begins })
    }

    /// The next step of a job whose command or VM has ended; `None` while both go on.
    async fn end_if_over(
        &mut self,
        report: &VmReport,
        moving: bool,
    ) -> Result<Option<Step>, Problem> {
        if self.record.value.ending.is_some() || self.record.value.collect.is_some() {
            return Ok(Some(Step::Again));
        }
        if self.record.value.finished.is_some() {
            return self.collected().await.map(Some);
        }
        if !moving && matches!(report.status, VmStatus::Gone | VmStatus::Shutdown) {
            return self.lost(&vm_ended(report)).await.map(Some);
        }
        Ok(None)
    }

    /// Shows people why the VM does not run, if so, and for what it waits. Returns whether it runs and waits for nothing.
    async fn say_how_it_stands(&mut self, report: &VmReport) -> Result<bool, Problem> {
        let waits = self.cluster.hosts.named_waits(&report.waits);
        let runs = report.status == VmStatus::Running && waits.is_empty();
        self.note_stand(!waits.is_empty());
        self.say_waiting(&self.reason(report), waits).await?;
        Ok(runs)
    }

    /// Ends a job whose time is over, with the outputs that it has.
    async fn end_overdue(&mut self, reason: String) -> Result<Step, Problem> {
        match self.job().state {
            JobState::Running => self.end_after_outputs(Ending::Failed, reason).await?,
            JobState::Starting => {
                let console = self.end_of_console().await?;
                self.end_after_outputs_of((Ending::Failed, reason), console).await?;
            }
            _ => self.end(Ending::Failed, reason).await?,
        }
        Ok(Step::Again)
    }

    /// What people are to know of the running job: why its VM does not run, or does not get nearer to its data.
    pub(super) fn reason(&self, report: &VmReport) -> String {
        let waits = in_words(&self.cluster.hosts.named_waits(&report.waits));
        match trouble_of(report) {
            _ if !waits.is_empty() => waits,
            trouble if !trouble.is_empty() => trouble,
            _ if self.record.value.cancelled_ms.is_some() => CANCELLING.to_owned(),
            _ if self.waits_for_gang() => {
                self.not_begun.clone().unwrap_or_else(|| AT_BARRIER.to_owned())
            }
            _ => ended::out_of_memory(self.job()).unwrap_or_else(|| self.refusals()),
        }
    }

    /// Records the boot of the VM's host. After a reboot the agent may not know at once that the VM is gone.
    async fn note_boot(&mut self, report: &VmReport) -> Result<(), Problem> {
        let is_there = !matches!(report.status, VmStatus::Starting | VmStatus::Gone);
        if is_there && self.record.value.boot_id != report.boot_id {
            self.record.value.boot_id.clone_from(&report.boot_id);
            self.record.save().await?;
        }
        Ok(())
    }

    /// The VM's source was removed. Its migration decides where the job continues.
    async fn wait_for_the_move(&mut self) -> Result<Option<Step>, Problem> {
        let Some(host) = self.job().host.clone() else { return Ok(None) };
        if self.cluster.hosts.get(&host).is_ok() {
            return Ok(None);
        }
        let moves = self.cluster.index.migrations_of(&vm_of(&self.id));
        let to = moves.last().map_or_else(String::new, |moved| moved.migration.to.to_string());
        let reason = format!(
            "host {host} was removed while the VM moved to {to}; whether it came to run there, \
             {to} must say"
        );
        self.say(&reason).await?;
        self.pause().map(Some)
    }

    /// Waits until the next figures are due, or until the VM has changed.
    pub(super) fn pause(&self) -> Result<Step, Problem> {
        Ok(Step::Wait(self.cluster.timing.figures))
    }

    /// The report that the host's agent sent by itself. The agent is asked if that report is old, or if it
    /// would end the job. With it comes when it was made, at the earliest.
    pub(super) async fn look(&self, host: &HostLink) -> Result<(Instant, VmReport), Problem> {
        let vm = vm_of(&self.id);
        let heard = self.cluster.hosts.fresh_vm(&host.id, &vm, self.cluster.timing.monitor);
        if let Some((at, report)) = heard
            && !matches!(report.status, VmStatus::Gone | VmStatus::Shutdown)
        {
            return Ok((at, report));
        }
        let asked = Instant::now();
        let report = host.agent.get::<VmReport>(&format!("/v1/vms/{vm}")).await?;
        self.cluster.hosts.remember_vm(&host.id, &report);
        Ok((asked, report))
    }

    pub(super) fn host(&self) -> Result<Arc<HostLink>, Problem> {
        let Some(host) = &self.job().host else {
            return Err(Problem::internal(format!("job {}", self.id), "its VM has no host"));
        };
        self.cluster.hosts.get(host)
    }

    /// Looks for the VM at the other hosts, and takes it up where it is: the record may be older than its last move, because the controller was
    /// restored from a backup.
    async fn is_found_elsewhere(&mut self, before: &HostLink) -> Result<bool, Problem> {
        let Some((host, report)) = self.at_another_host(&before.id).await else { return Ok(false) };
        tracing::warn!("job {}: its VM is at host {host}, and not at {}", self.id, before.id);
        let record = &mut self.record.value;
        record.left = Some(before.id.clone());
        record.job.host = Some(host);
        record.boot_id = report.boot_id;
        // A trace of a part of the run says nothing about the whole run.
        record.traced = crate::records::Traced::Not;
        self.record.save().await?;
        Ok(true)
    }

    /// The host where a VM of this run, or of a later one, runs. Hosts that do not answer are not waited for.
    async fn at_another_host(&self, but: &HostId) -> Option<(HostId, VmReport)> {
        let (path, own) = (format!("/v1/vms/{}", vm_of(&self.id)), start_of(&self.record.value, 0));
        let others = self.cluster.hosts.up().into_iter().filter(|host| host.id != *but);
        let asked = others.map(async |host| {
            let report = host.agent.get::<VmReport>(&path).await.ok()?;
            Some((host.id.clone(), report))
        });
        let is_its = |(_, report): &(HostId, VmReport)| {
            // What a migration that was given up has left waits or stands still.
            let runs = [VmStatus::Running, VmStatus::IoError];
            report.spec.start.submitted_ms == own.submitted_ms
                && report.spec.start.whole_run() >= own.whole_run()
                && runs.contains(&report.status)
        };
        futures_util::future::join_all(asked).await.into_iter().flatten().find(is_its)
    }

    /// Requests the VM. Repeating this with the same spec changes nothing, so a crash here does no harm.
    async fn start_vm(&mut self) -> Result<Step, Problem> {
        (self.seen_to_stand, self.stood_still) = (None, Duration::ZERO);
        let placement = self.placement()?;
        let start = placement.start.clone();
        let run = start_of(&self.record.value, 0);
        let is_now = |failed: &&FailedStarts| failed.host == start && failed.run == run;
        let failed = self.failed_starts.as_ref().filter(is_now);
        let left = failed.and_then(|failed| failed.again.checked_duration_since(Instant::now()));
        if let Some(left) = left {
            return Ok(Step::Wait(left));
        }
        let spec = vm_spec(self, placement, &start)?;
        let host = volumes::reachable(&self.cluster, &start)?;
        let vm = &spec.vm;
        let may_be_old = self.job().submitted_ms < self.cluster.begun_ms;
        if may_be_old && let Some((at, _)) = self.at_another_host(&start).await {
            let why = format!(
                "host {at} has it already: what this controller knows of it is older, perhaps from a backup"
            );
            let next =
                format!("if it is not needed there, end it: perigee vm end {vm} --host {at}");
            return Err(Problem::unavailable(format!("can't start VM {vm}"), why).next(next));
        }
        // What the controller has heard may be old, or nothing yet after a restart.
        let report: HostReport = host.agent.get("/v1/host").await?;
        let network = networks::kind_of(&self.record.value);
        let no_network = networks::refusal_of(&host, Some(&report), &network);
        if let Some(why) = no_network.or_else(|| tpm::refusal(&self.record.value, Some(&report)))
            && !self.has_arrived(&host, spec.start).await?
        {
            // It was able when the job was placed. Another one may be, and else the job waits for one.
            tracing::warn!("job {}: host {start} can't have such VMs: {why}", self.id);
            self.leave(&start).await?;
            return Ok(Step::Again);
        }
        if self.job().started_ms.is_none() {
            // The answer may be lost, and the host may reboot before the next one.
            self.record.value.boot_id = report.boot_id;
            self.record.value.job.started_ms = Some(now_ms());
            self.record.save().await?;
        }
        attach::attach(&self.cluster, &self.placement()?.disks.clone(), &start).await?;
        let path = format!("/v1/vms/{}", spec.vm);
        let report = match host.agent_slow.put::<VmReport>(&path, &spec).await {
            Err(problem) if problem.kind == ProblemKind::Unsupported && self.gives_up_card() => {
                // It may be the card, for which nobody has asked.
                tracing::warn!("job {}: it starts without a network card: {problem}", self.id);
                self.record.save().await?;
                return Ok(Step::Again);
            }
            Err(problem) if problem.kind == ProblemKind::Unsupported => {
                return self.leave_refusing_host(&host.id, &problem).await;
            }
            Err(problem) => return Err(self.start_has_failed(&start, problem)),
            Ok(report) => report,
        };
        self.record.value.vm_started = true;
        if report.status != VmStatus::Gone {
            self.record.value.boot_id.clone_from(&report.boot_id);
        }
        self.read_figures(&report).await?;
        self.record.save().await?;
        Ok(Step::Again)
    }

    /// Says when it is tried again, unless the job asks for what can't be had.
    fn start_has_failed(&mut self, host: &HostId, problem: Problem) -> Problem {
        use ProblemKind::{Conflict, Invalid, NotFound};
        if matches!(problem.kind, Invalid | NotFound | Conflict) {
            return problem;
        }
        let run = start_of(&self.record.value, 0);
        let is_now = |failed: &FailedStarts| failed.host == *host && failed.run == run;
        let before = self.failed_starts.take().filter(is_now);
        let count = before.map_or(0, |failed| failed.count);
        let pause = self.cluster.timing.monitor.saturating_mul(1 << count.min(16));
        let pause = pause.min(START_AGAIN_MAX);
        let (count, again) = (count + 1, Instant::now() + pause);
        self.failed_starts = Some(FailedStarts { host: host.clone(), run, count, again });
        let pause_s = pause.as_millis().div_ceil(1000);
        Problem { why: format!("{}; it is tried again in {pause_s} s", problem.why), ..problem }
    }

    /// Whether the host has the VM already: an earlier request's answer may be lost.
    async fn has_arrived(&self, host: &HostLink, start: VmStart) -> Result<bool, Problem> {
        match host.agent.get::<VmReport>(&format!("/v1/vms/{}", vm_of(&self.id))).await {
            Ok(report) => Ok(report.spec.start == start),
            Err(problem) if problem.kind == ProblemKind::NotFound => Ok(false),
            Err(problem) => Err(problem),
        }
    }

    /// Whether the VM had a card of which nothing was said; it has none from now on.
    fn gives_up_card(&mut self) -> bool {
        let placement = self.record.value.placement.as_mut();
        placement.is_some_and(|placement| std::mem::take(&mut placement.has_user_card))
    }

    /// Fetches the guest's messages since the last check, at least up to this message, and stores them before
    /// they count as seen. A long answer comes in parts.
    pub(super) async fn take_events(
        &mut self,
        host: &HostLink,
        up_to_seq: u64,
    ) -> Result<(), Problem> {
        while self.record.value.last_seq < up_to_seq {
            let disks = &self.placement()?.disks;
            let hides_output = leave_site::hides_output(&self.cluster, disks, &host.id);
            // Messages count as taken when their lines are in the log, and not before.
            let mut record = self.record.value.clone();
            let before = record.seq_before;
            let after = record.last_seq.saturating_sub(before);
            let path = format!("/v1/vms/{}/events?after={after}", vm_of(&self.id));
            let mut events: Vec<GuestEvent> = host.agent.get(&path).await?;
            if events.is_empty() {
                return Ok(());
            }
            for event in &mut events {
                event.message.seq = event.message.seq.saturating_add(before);
            }
            let Said { mut lines, left_out } = guest::apply(&mut record, now_ms(), events);
            log::hide(&mut record.log, hides_output, &mut lines);
            left_out::add_of_guest(&self.cluster, &self.id, left_out).await?;
            log::store(&self.cluster, &self.files, &mut record.log, lines).await?;
            self.record.value = record;
            self.record.save().await?;
        }
        Ok(())
    }

    /// A host that does not answer for a moment is asked again. One that goes on to be silent is shown as the reason.
    async fn host_silent(&mut self, host: &HostLink, problem: Problem) -> Result<Step, Problem> {
        let waits = self.cluster.hosts.waits(&host.id);
        if self.cluster.hosts.state(&host.id) == HostState::Unreachable {
            self.say_waiting(&self.why_it_stays(&host.id), waits).await?;
        } else if !waits.is_empty() {
            self.say_waiting(&in_words(&waits), waits).await?;
        } else {
            tracing::debug!("job {}: {problem}", self.id);
        }
        Ok(Step::Wait(self.cluster.timing.figures))
    }

    /// The VM does not exist any more, and the job's command has not ended.
    async fn lost(&mut self, why: &str) -> Result<Step, Problem> {
        if self.record.value.cancelled_ms.is_some() {
            let cancelled = self.why_cancelled();
            let reason =
                format!("{cancelled}; its VM ended before its outputs were written: {why}");
            self.end_after_outputs(Ending::Cancelled, reason).await?;
            return Ok(Step::Again);
        }
        if let Some(step) = self.leave_rebooted_host().await? {
            return Ok(step);
        }
        if self.persistent().is_some() {
            self.fail_persistent(why).await?;
            return Ok(Step::Again);
        }
        let console = self.end_of_console().await?;
        let reason = format!("the VM ended before the job did: {why}");
        self.note_idle_loss().await?;
        self.end_after_outputs_of((Ending::Failed, reason), console).await?;
        Ok(Step::Again)
    }

    /// What the guest has said last, if that can be had.
    async fn end_of_console(&self) -> Result<String, Problem> {
        let host = self.host()?;
        let path = format!("/v1/vms/{}/console", vm_of(&self.id));
        let console = host.agent.get_bytes(&path).await.unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        // OpenRC's lines end with the two characters the other way round.
        let lines: Vec<&str> = console.lines().map(|line| line.trim_matches('\r')).collect();
        Ok(lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n"))
    }

    /// Counts the time since the previous check if the VM was at work at both. So migrations, hosts or homes
    /// that do not answer, and I/O errors do not count.
    async fn count(&mut self, before: Option<Instant>, runs: bool) -> Result<(), Problem> {
        let now = Instant::now();
        let is_up = |home: &HostId| self.cluster.hosts.state(home) == HostState::Up;
        let is_filling_from_up = |volume: &VolumeName| {
            let last = self.cluster.index.volume_move(volume).map(|last| last.view.clone());
            last.is_none_or(|last| last.state.is_final() || is_up(&last.from))
        };
        let is_reachable =
            |disk: &PlacedDisk| is_up(&disk.home) && is_filling_from_up(&disk.volume);
        if !runs || !self.record.value.disks_needed().all(is_reachable) {
            return Ok(());
        }
        self.seen_at_work = Some(now);
        let Some(before) = before else { return Ok(()) };
        let counted_ms = self.record.value.counted_ms;
        let seen_ms = u64::try_from((now - before).as_millis()).unwrap_or(u64::MAX);
        // Checks may be less than a millisecond apart. The rest counts at the next one.
        self.seen_at_work = Some(before + Duration::from_millis(seen_ms));
        self.record.value.counted_ms = counted_ms.saturating_add(seen_ms);
        if self.record.value.counted_ms / COUNT_STORED_EVERY_MS > counted_ms / COUNT_STORED_EVERY_MS
        {
            self.record.save().await?;
        }
        Ok(())
    }

    /// Counts how long the VM has stood still, because its disks waited for somebody.
    fn note_stand(&mut self, stands: bool) {
        let now = Instant::now();
        let before = self.seen_to_stand.take();
        self.seen_to_stand = stands.then_some(now);
        if let (true, Some(before)) = (stands, before) {
            self.stood_still += now - before;
        }
    }

    /// Why the job has taken too long, if it has. Only time in which its VM was seen running counts.
    fn overdue(&self, report: &VmReport) -> Option<String> {
        let job = self.job();
        let counted_ms = self.record.value.counted_ms;
        match (job.state, job.started_ms) {
            // The others that it waits for have time limits of their own, and then it has one.
            (JobState::Starting, _) if self.waits_for_gang() => self.begins_late(),
            (JobState::Starting, Some(started_ms)) => {
                let limit = self.cluster.timing.boot_deadline;
                let booted = boot_time(report, self.cluster.clock.age_ms(started_ms));
                let late = booted.saturating_sub(self.stood_still) > limit;
                late.then(|| {
                    let limit_s = limit.as_secs();
                    format!(
                        "the guest had a CPU for {limit_s} s and did not start the job{}",
                        guest::why_not_started(&self.record.value)
                    )
                })
            }
            (JobState::Collecting, _) => (counted_ms > COLLECT_MS_MAX).then(|| {
                let limit_s = COLLECT_MS_MAX / 1000;
                format!("the guest did not write its outputs within {limit_s} s")
            }),
            (JobState::Running, _) => {
                let timeout_s = job.spec.timeout_s?;
                let limit_s = timeout_s.saturating_add(job.spec.stop_grace_s);
                let limit_ms = limit_s.saturating_mul(1000).saturating_add(TIMEOUT_GRACE_MS);
                (counted_ms > limit_ms)
                    .then(|| format!("the command took longer than its timeout of {timeout_s} s"))
            }
            _ => None,
        }
    }

    /// Adds the disks' counters, at this host and at their homes, to the job's totals.
    pub(super) async fn read_figures(&mut self, report: &VmReport) -> Result<(), Problem> {
        self.read_figures_since(report, self.cluster.timing.figures / 2, None).await
    }

    /// Adds what the VM did at its old host since the last reading. It stands still there, and runs at `to`.
    pub(super) async fn read_last_figures(
        &mut self,
        report: &VmReport,
        to: &HostId,
    ) -> Result<(), Problem> {
        self.read_figures_since(report, Duration::ZERO, Some(to)).await
    }

    async fn read_figures_since(
        &mut self,
        report: &VmReport,
        age_max: Duration,
        moved_to: Option<&HostId>,
    ) -> Result<(), Problem> {
        let placement = self.placement()?.clone();
        let Some(here) = self.job().host.clone() else { return Ok(()) };
        let mut disks = Vec::new();
        let mut at_homes: Vec<(HostId, Option<Arc<Vec<ExportStats>>>)> = Vec::new();
        for (index, disk) in placement.disks.iter().enumerate() {
            let client = report.io.get(index).copied();
            if disk.home != here && !at_homes.iter().any(|(home, _)| *home == disk.home) {
                // A host that a person removed may be the home of a seed that nobody reads any more.
                let stats = match self.cluster.hosts.get(&disk.home) {
                    Ok(_) => self.cluster.hosts.volume_stats(&disk.home, age_max).await?,
                    Err(_) => None,
                };
                at_homes.push((disk.home.clone(), stats));
            }
            let home = if disk.home == here {
                client
            } else {
                stats_of(&at_homes, &disk.home, &disk.volume)
            };
            // The VM's counters at a home that is its new host begin with the home's last reading.
            let is_old = moved_to == Some(&disk.home) && home.is_none();
            let client = client.filter(|_| !is_old);
            disks.push(Reading { client, home, far: disk.home != here });
        }
        let meter = &mut self.record.value.meter;
        let before = meter.totals.disks.clone();
        meter.read(report.vcpu_ms, &disks);
        meter.waited(report.load.longest_run_delay_ms);
        self.disks_have_sent(&here, &before);
        if let Some(member) = self.record.value.kind.member_mut() {
            member.talk.read(&here, &report.sent);
        }
        Ok(())
    }

    pub(super) async fn take_sample(&mut self) -> Result<(), Problem> {
        let Some(host) = self.job().host.clone() else { return Ok(()) };
        self.samples.push(Sample {
            at_ms: now_ms(),
            host,
            progress: self.job().progress_part(),
            io: self.record.value.meter.io(),
            vcpu_ms: self.record.value.meter.totals.vcpu_ms,
        });
        self.samples.store_sometimes(&self.cluster, &self.files).await
    }

    /// The guest's outputs are on their disk: fetches them and ends the job.
    pub(super) async fn collected(&mut self) -> Result<Step, Problem> {
        self.take_sample().await?;
        self.samples.store(&self.cluster, &self.files).await?;
        let Fetched { damaged, mut notes, refused } = self.fetch_output().await?;
        let left_out = left_out::set_of_repository(&self.cluster, &self.id, refused).await?;
        self.record.value.job.left_out = left_out.count();
        let lacks = self.record.value.finished.as_ref().and_then(|output| output.lacks.clone());
        let is_whole = damaged.is_none() && lacks.is_none() && !left_out.has_lost();
        notes.extend(damaged);
        notes.extend(left_out.in_words());
        notes.extend(lacks.map(|lacks| format!("its outputs are not complete: {lacks}")));
        if let Some(collect) = self.record.value.collect.clone() {
            let (ending, reason) = collect.with_outputs(notes);
            self.end(ending, reason).await?;
            return Ok(Step::Again);
        }
        let code = self.job().exit_code.unwrap_or_default();
        let lacks_process = code == 0 && ended::fails_of_memory(self.job());
        let is_cancelled = self.record.value.cancelled_ms.is_some();
        let ending = match is_whole && !lacks_process {
            _ if is_cancelled => Ending::Cancelled,
            true => Ending::Collected { exit_code: code },
            false => Ending::Failed,
        };
        let cancelled = is_cancelled.then(|| self.why_cancelled().to_owned());
        let said = cancelled.into_iter().chain([ended::in_words(self.job())]).chain(notes);
        let said = said.filter(|text| !text.is_empty());
        self.end(ending, said.collect::<Vec<_>>().join("; ")).await?;
        Ok(Step::Again)
    }
}

pub(super) fn vm_spec(run: &Run, placement: &Placement, at: &HostId) -> Result<VmSpec, Problem> {
    let spec = &run.job().spec;
    let locks_memory = leave_site::is_far_from_confined(&run.cluster, &placement.disks, at);
    // What is locked in memory is all there from the beginning.
    let most_bytes = spec.memory_max_bytes.filter(|_| !locks_memory);
    let disks = placement.disks.iter().map(|disk| {
        let epoch = disk.epoch.ok_or_else(|| {
            Problem::internal(format!("can't start job {}", run.id), "a disk has no epoch")
        })?;
        Ok(Disk { role: disk.role, volume: disk.volume.clone(), epoch, read_only: disk.read_only })
    });
    Ok(VmSpec {
        vm: vm_of(&run.id),
        start: start_of(&run.record.value, 0),
        cpus: spec.cpus_most(),
        memory_bytes: most_bytes.unwrap_or(spec.memory_bytes),
        disks: disks.collect::<Result<_, Problem>>()?,
        arrives_by: None,
        arrives_from: None,
        arrives_compressed: false,
        arrives_tunnelled: false,
        locks_memory,
        hides_output: leave_site::hides_output(&run.cluster, &placement.disks, at),
        network: networks::of_vm(&run.record.value)?,
        machine: Machine {
            cpus_least: spec.cpus_max.map(|_| spec.cpus),
            memory_least_bytes: most_bytes.map(|_| spec.memory_bytes),
            keeps_free_memory: leave_site::may_be_locked(&run.record.value, placement),
            ..machine_of(&run.record.value)
        },
    })
}

fn machine_of(record: &JobRecord) -> Machine {
    let (kind, spec) = (&record.kind, &record.job.spec);
    let (firmware, hardware) = (kind.firmware(spec), kind.hardware(spec));
    match kind {
        Kind::Job | Kind::Member(_) | Kind::Gang(_) => {
            Machine { firmware, hardware, ..Machine::default() }
        }
        Kind::PersistentVm(_) => Machine {
            persistent: true,
            firmware,
            hardware,
            cpus_max: Machine::cpus_max_of(spec.cpus_most()),
            ports: Machine::PORTS,
            ..Machine::default()
        },
    }
}

/// How long the guest was able to boot. While its CPUs wait for a CPU of the host, its clock does not run.
fn boot_time(report: &VmReport, since_start_ms: u64) -> Duration {
    // 0 is reported for a VM without a QEMU process, and only for a short time.
    let up_ms = if report.uptime_ms == 0 { since_start_ms } else { report.uptime_ms };
    Duration::from_millis(up_ms.saturating_sub(report.load.longest_run_delay_ms.unwrap_or(0)))
}

fn stats_of(
    at_homes: &[(HostId, Option<Arc<Vec<ExportStats>>>)],
    home: &HostId,
    volume: &VolumeName,
) -> Option<perigee_model::volume::IoStats> {
    let (_, stats) = at_homes.iter().find(|(id, _)| id == home)?;
    stats.as_ref()?.iter().find(|export| export.volume == *volume).map(|export| export.stats)
}

pub(super) fn vm_ended(report: &VmReport) -> String {
    match report.status {
        VmStatus::Shutdown if report.reason.is_empty() => "the guest powered off".to_owned(),
        VmStatus::Shutdown => report.reason.clone(),
        _ if report.reason.is_empty() => "its QEMU is gone".to_owned(),
        _ => format!("its QEMU is gone ({})", report.reason),
    }
}

/// Why an existing VM does not run; empty if it runs.
fn trouble_of(report: &VmReport) -> String {
    match report.status {
        VmStatus::IoError if report.reason.is_empty() => {
            "a disk answers with errors; the VM waits for it".to_owned()
        }
        VmStatus::IoError => format!("a disk answers with errors: {}", report.reason),
        VmStatus::Paused => report.reason.clone(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_waits_for_a_cpu_is_not_late_with_its_boot() {
        let mut report = crate::tests::report(crate::tests::vm_spec());
        (report.uptime_ms, report.load.longest_run_delay_ms) = (900_000, Some(880_000));
        assert_eq!(boot_time(&report, 900_000), Duration::from_secs(20));
        report.load.longest_run_delay_ms = None;
        assert_eq!(boot_time(&report, 900_000), Duration::from_secs(900));
    }
}
