//! Decides which jobs continue elsewhere when their host is gone.
//!
//! A job whose VM was not requested yet is placed again. If the VM was requested, it may run there unseen. Then
//! the job begins anew only if its file says `restart: on-host-failure`, and only after the host is fenced: the
//! epochs of all volumes that the VM writes at other homes are raised first, so that a host that comes back
//! can't write there. What exists at the host itself is removed when it is back, even if a person has removed
//! the host from the cluster in the meantime.
//!
//! A job also leaves a host that cannot start its VM, for example because it has no suitable accelerator. The
//! VM never ran there. Such a job ends when no other host is left to try, or after [`REFUSALS`] hosts.

use perigee_model::job::{Restart, Start};
use perigee_model::limits::{REFUSALS, RESTARTS};
use perigee_model::states::JobEvent;
use perigee_model::vm::HostReport;
use perigee_model::waiting::in_words;
use perigee_model::{HostId, Problem, ProblemKind};

use super::cancel::CANCELLED;
use super::driver::{Run, Step};
use super::follow_moves::incomplete;
use super::persistent_vm::of_one_run;
use super::{log, stage};
use crate::cleaner::{self, Cleanup};
use crate::cluster::Cluster;
use crate::planning;
use crate::records::{
    Ending, JobRecord, MigrationRecord, PlacedDisk, Traced, owner_of, start_of, vm_of,
};
use crate::storage::volumes;

/// How a host was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// It does not answer, and may come back.
    Silent,
    /// A person removed it for good.
    Removed,
    /// Its kernel booted again: the VM is gone, its volumes still exist.
    Rebooted,
}

/// What happens to a job whose host is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// It begins anew at another host.
    Again,
    /// It waits for its host, for this reason.
    Wait(String),
    /// It fails, because its host will not come back.
    Fail(String),
}

/// `host` is the host of the VM or of one of its disks.
pub fn fate(record: &JobRecord, host: &HostId, loss: Loss) -> Fate {
    let or_wait = |why: &str| match loss {
        Loss::Removed => Fate::Fail(format!("host {host} was removed: {why}")),
        Loss::Rebooted => Fate::Fail(format!("host {host} rebooted: {why}")),
        Loss::Silent => Fate::Wait(why.to_owned()),
    };
    let is_back = loss == Loss::Rebooted;
    if record.ending.is_some() {
        return Fate::Wait("it ends".to_owned());
    }
    if record.cancelled_ms.is_some() {
        return Fate::Wait("it is cancelled".to_owned());
    }
    let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
    let is_persistent = record.kind.is_persistent_vm();
    let is_kept = |disk: &PlacedDisk| !disk.temporary || (is_persistent && disk.role.lasts());
    let kept_there = disks.find(|disk| is_kept(disk) && disk.home == *host);
    if let Some(disk) = kept_there.filter(|_| !is_back) {
        return or_wait(&format!("it uses volume {}, which is there", disk.volume));
    }
    if record.job.spec.start == Start::Host(host.clone()) && !is_back {
        return or_wait("the job's file has it start there");
    }
    if is_persistent && is_back {
        return Fate::Again;
    }
    let never_started = record.job.started_ms.is_none();
    if !never_started && record.job.spec.restart == Restart::Never {
        return or_wait("the job's VM or its disks were there, and its `restart` is `never`");
    }
    // Each refusal also made the job begin anew.
    let refusals = u32::try_from(record.refused_by.len()).unwrap_or(u32::MAX);
    let losses = record.restarts.saturating_sub(refusals);
    // A job that loses its host repeatedly may itself be the reason.
    if !is_persistent && RESTARTS.check(losses + 1).is_err() {
        return or_wait(&format!("the job has started again {losses} times before"));
    }
    Fate::Again
}

impl Run {
    /// `Some` if the job's host is gone and the job does not wait for it.
    pub(super) async fn leave_gone_host(&mut self) -> Result<Option<Step>, Problem> {
        if let Some(host) = self.record.value.leaving.clone() {
            if self.record.value.cancelled_ms.is_some() {
                let why = format!("{CANCELLED}; its outputs are lost with host {host}");
                self.end(Ending::Cancelled, why).await?;
                return Ok(Some(Step::Again));
            }
            self.begin_anew(&host).await?;
            return Ok(Some(Step::Again));
        }
        let Some(host) = self.job().host.clone() else { return Ok(None) };
        if let Some((disk, removed)) = incomplete(&self.cluster, &self.record.value)
            && !disk.temporary
        {
            let why = format!(
                "host {removed} was removed while volume {} moved away from it: a part of the volume \
                 is lost",
                disk.volume
            );
            self.end(Ending::Failed, why).await?;
            return Ok(Some(Step::Again));
        }
        let Some((lost, loss)) = lost_host(&self.cluster, &self.record.value, &host) else {
            return Ok(None);
        };
        match fate(&self.record.value, &lost, loss) {
            Fate::Wait(_) => return Ok(None),
            Fate::Fail(why) => {
                self.note_idle_loss().await?;
                self.end(Ending::Failed, why).await?;
            }
            Fate::Again => self.leave(&host).await?,
        }
        Ok(Some(Step::Again))
    }

    pub(super) async fn leave(&mut self, host: &HostId) -> Result<(), Problem> {
        if let Some(member) = self.record.value.kind.member_mut() {
            // Its gang starts again as a whole.
            member.lost = Some(host.clone());
            return self.end(Ending::Failed, format!("it was lost at host {host}")).await;
        }
        self.record.value.leaving = Some(host.clone());
        self.record.save().await?;
        self.begin_anew(host).await
    }

    /// The host cannot start the VM, now or later: the job is placed elsewhere, or it ends.
    pub(super) async fn leave_refusing_host(
        &mut self,
        host: &HostId,
        problem: &Problem,
    ) -> Result<Step, Problem> {
        let refused_by = &mut self.record.value.refused_by;
        if !refused_by.contains(host) {
            refused_by.push(host.clone());
        }
        let count = refused_by.len();
        let left = self.hosts_left();
        if left && REFUSALS.check(count + 1).is_ok() {
            tracing::warn!("job {}: host {host} cannot start its VM: {problem}", self.id);
            self.leave(host).await?;
        } else {
            let tried =
                if left { format!("{count} hosts cannot") } else { "no host can".to_owned() };
            let why = format!(
                "{tried} start its VM; the last one was {host}: {}: {}",
                problem.what, problem.why
            );
            self.end(Ending::Failed, why).await?;
        }
        Ok(Step::Again)
    }

    /// Whether another host of the cluster, which has not refused, may start the job now or when it is back.
    fn hosts_left(&self) -> bool {
        let (start, refused_by) = (&self.job().spec.start, &self.record.value.refused_by);
        self.cluster.hosts.all().iter().any(|host| {
            let may_start = match start {
                Start::Anywhere => true,
                Start::Site(site) => host.addresses.site == *site,
                Start::Host(id) => host.id == *id,
            };
            may_start && !refused_by.contains(&host.id)
        })
    }

    /// `Some` if the VM is not at its host any more because the host's kernel booted again.
    pub(super) async fn leave_rebooted_host(&mut self) -> Result<Option<Step>, Problem> {
        let host = self.host()?;
        let report: HostReport = host.agent.get("/v1/host").await?;
        let before = &self.record.value.boot_id;
        if before.is_empty() || report.boot_id.is_empty() || report.boot_id == *before {
            return Ok(None);
        }
        match fate(&self.record.value, &host.id, Loss::Rebooted) {
            Fate::Wait(why) | Fate::Fail(why) => {
                self.note_idle_loss().await?;
                self.end_after_outputs(Ending::Failed, why).await?;
            }
            Fate::Again => self.leave(&host.id).await?,
        }
        Ok(Some(Step::Again))
    }

    /// Why the job waits for a host that does not answer. If its file asks for a restart elsewhere, it also
    /// says why there is none.
    pub(super) fn why_it_stays(&self, host: &HostId) -> String {
        if !self.cluster.hosts.is_lost(host, &vm_of(&self.id)) {
            let waits = in_words(&self.cluster.hosts.waits(host));
            return format!("{waits}; its VM goes on, and the job when the agent is back");
        }
        let waits = format!("host {host} is unreachable; the job continues when it is back");
        match fate(&self.record.value, host, Loss::Silent) {
            Fate::Wait(why) if self.job().spec.restart == Restart::OnHostFailure => format!(
                "{waits}. `restart: on-host-failure` cannot help: {why}. If the host is gone for \
                 good: perigee host remove {host} --force"
            ),
            _ => waits,
        }
    }

    /// The record says that the job is leaving its host, so each part of this can be repeated.
    async fn begin_anew(&mut self, host: &HostId) -> Result<(), Problem> {
        self.wait_for_moves().await?;
        self.fence(host).await?;
        let number = self.record.value.restarts + 1;
        let disks = self.placement()?.disks.clone();
        let lost = start_of(&self.record.value, 0).whole_run();
        let name = cleaner::name_of(self.job(), &format!("r{number}"));
        let mut cleanup = Cleanup::of_host(&self.id, &name, lost, host, &disks);
        cleanup.owner = Some(owner_of(self.job()));
        let own = disks.iter().filter(|disk| disk.temporary);
        cleanup.volumes = match self.persistent() {
            Some(_) => of_one_run(&disks),
            None => own.map(|disk| (disk.home.clone(), disk.volume.clone())).collect(),
        };
        cleaner::hand_over(&self.cluster, &cleanup).await?;
        self.drop_outputs().await;
        if self.persistent().is_none() {
            // What was predicted for the run that was lost does not come true in the next one.
            self.cluster.records.remove_all(&planning::decisions_prefix(&self.id)).await?;
            self.forget_volume_moves().await?;
        }
        // Last: what comes before may be repeated.
        let why = format!(
            "host {host} was lost, and the job starts again: what follows is of its start {}",
            number + 1
        );
        let record = &mut self.record.value;
        let (kept, last_seq) = (&mut record.log, &mut record.last_seq);
        log::mark(&self.cluster, &self.files, kept, last_seq, why).await?;
        tracing::warn!("job {} begins anew: host {host} is gone", self.id);
        self.settle().await?;
        let record = &mut self.record.value;
        record.restarts = number;
        if !record.avoid.contains(host) {
            record.avoid.push(host.clone());
        }
        record.traced = Traced::default();
        // The messages of the next run come after those of this one in the log.
        let said = record.last_seq;
        record.forget_run();
        (record.last_seq, record.seq_before) = (said, said);
        let job = &mut record.job;
        job.outputs = None;
        job.state = job.state.next(JobEvent::HostLost)?;
        job.reason = format!("it was lost at host {host} and starts again");
        self.record.save().await
    }

    /// A move that was requested just before must end first. It is settled while the job is still at the VM's
    /// old host, because a later cleanup would take down the new VM.
    async fn wait_for_moves(&self) -> Result<(), Problem> {
        let is_recorded = self.cluster.index.is_move_being_recorded(&vm_of(&self.id));
        let moves = self.unsettled().await?;
        let is_open = |moved: &MigrationRecord| {
            self.record.value.vm_started || !moved.migration.state.is_final()
        };
        if is_recorded || moves.iter().any(is_open) {
            let what = format!("can't start job {} again yet", self.id);
            return Err(Problem::unavailable(what, "a move of its VM has not ended"));
        }
        if self.homes_are_changing().await? {
            let what = format!("can't start job {} again yet", self.id);
            return Err(Problem::unavailable(what, "a volume of it is moving to another home"));
        }
        Ok(())
    }

    /// Takes the writer epochs from the lost VM. If a home does not answer, the job waits.
    async fn fence(&self, host: &HostId) -> Result<(), Problem> {
        if self.job().started_ms.is_none() {
            return Ok(());
        }
        let written = self.placement()?.disks.iter().filter(|disk| !disk.read_only);
        for disk in written.filter(|disk| disk.home != *host) {
            // A home that was removed has no volumes left to protect.
            if self.cluster.hosts.get(&disk.home).is_err() {
                continue;
            }
            let home = volumes::reachable(&self.cluster, &disk.home)?;
            match stage::take_over(&home, disk).await {
                Err(problem) if problem.kind == ProblemKind::NotFound => {}
                // The lost host may be changing the epoch at the same time. The next try uses its result.
                Err(problem) if problem.kind == ProblemKind::Conflict => {
                    return Err(Problem { kind: ProblemKind::Unavailable, ..problem });
                }
                fenced => drop(fenced?),
            }
        }
        Ok(())
    }
}

/// The host that the job cannot continue without: the host of its VM, or the removed home of a disk.
fn lost_host(cluster: &Cluster, record: &JobRecord, host: &HostId) -> Option<(HostId, Loss)> {
    let mut needed = std::iter::once(host).chain(record.disks_needed().map(|disk| &disk.home));
    if let Some(removed) = needed.find(|host| cluster.hosts.get(host).is_err()) {
        return Some((removed.clone(), Loss::Removed));
    }
    if let Some((_, removed)) = incomplete(cluster, record) {
        return Some((removed, Loss::Removed));
    }
    let is_lost = cluster.hosts.is_lost(host, &vm_of(&record.job.id));
    is_lost.then(|| (host.clone(), Loss::Silent))
}
