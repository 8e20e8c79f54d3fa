//! What a member's own driver does for its gang.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::Problem;
use perigee_model::gang::{Seen, member_of};
use perigee_model::guest::{GuestGang, GuestMember};
use perigee_model::job::JobState;
use perigee_model::tenant::SEPARATOR;

use super::seen;
use crate::cluster::HostLink;
use crate::jobs::driver::{Run, Step};
use crate::records::{Ending, JobRecord, job_key, vm_of};

/// Shown of a member that is at the barrier.
pub(in crate::jobs) const AT_BARRIER: &str = "it waits for the other VMs of its job";

/// Whether it is at the barrier.
fn waits(record: &JobRecord) -> bool {
    record.kind.is_at_barrier() && record.job.state == JobState::Starting
}

/// What a member's own driver does for its gang.
impl Run {
    /// What the gang's driver wants to know at once.
    pub(in crate::jobs) fn seen_as_member(&self) -> Option<Seen> {
        let is_member = self.record.value.kind.is_member();
        is_member.then(|| seen(Some(&self.record.value)))
    }

    pub(in crate::jobs) fn wake_own_gang(&self) {
        if let Some(member) = self.record.value.kind.member() {
            self.cluster.wakes.wake(&vm_of(&member.gang));
        }
    }

    /// Whether its guest is at the barrier.
    pub(in crate::jobs) fn waits_for_gang(&self) -> bool {
        waits(&self.record.value)
    }

    /// Whether it has no command of its own, and the first member's has ended. From then on the guest has as long to end as for its
    /// boot, of the time in which its VM was seen running.
    pub(in crate::jobs) async fn is_released(&mut self) -> Result<bool, Problem> {
        let run = self.record.value.restarts;
        let member = self.record.value.kind.member_mut().filter(|member| member.serves());
        let Some(member) = member else { return Ok(false) };
        // Its gang may not have recorded yet that the first member is done.
        let first = member_of(&member.gang, 0);
        let first = match self.cluster.index.job(&first) {
            Some(first) => Some(first),
            None => self.cluster.records.read(&job_key(&first)).await?.map(Arc::new),
        };
        let first = first.filter(|first: &Arc<JobRecord>| first.restarts == run);
        let is_released =
            member.begun && matches!(seen(first.as_deref()), Seen::Done | Seen::Succeeded);
        if is_released && !member.released {
            member.released = true;
            self.record.value.counted_ms = 0;
            self.record.save().await?;
        }
        Ok(is_released)
    }

    /// Of one that was released, nothing is left to do that its gang needs. The caller saves this with its end.
    pub(in crate::jobs) async fn note_idle_loss(&mut self) -> Result<(), Problem> {
        if self.is_released().await? {
            let host = self.job().host.clone();
            if let Some(member) = self.record.value.kind.member_mut() {
                member.lost = host;
            }
        }
        Ok(())
    }

    /// Ends a member that was released that long ago, without the job's stop-grace, as one whose host was lost.
    pub(in crate::jobs) async fn end_late_release(&mut self) -> Result<Option<Step>, Problem> {
        let grace = Duration::from_secs(self.job().spec.stop_grace_s);
        let limit = self.cluster.timing.boot_deadline.saturating_add(grace);
        let is_late = Duration::from_millis(self.record.value.counted_ms) > limit;
        let Some(member) = self.record.value.kind.member() else { return Ok(None) };
        if !member.released || !is_late || self.job().state != JobState::Running {
            return Ok(None);
        }
        let (rank, limit_s) = (member.rank, limit.as_secs_f64());
        let reason = format!(
            "the guest of rank {rank} did not end within {limit_s} s after the job's command"
        );
        self.note_idle_loss().await?;
        self.end_after_outputs(Ending::Failed, reason).await?;
        Ok(Some(Step::Again))
    }

    /// Lets the guest's command start, once all are ready. The agent may forget it, so this is repeated. From the first time
    /// on the guest has as long for it as for its boot, of the time in which its VM was seen running.
    pub(in crate::jobs) async fn ask_to_begin(&mut self, host: &HostLink) -> Result<(), Problem> {
        if !self.waits_for_gang() {
            return Ok(());
        }
        let Some(member) = self.record.value.kind.member_mut() else { return Ok(()) };
        let gang = self.cluster.index.job(&member.gang);
        let state = gang.and_then(|gang| Some(gang.kind.gang()?.state)).unwrap_or_default();
        if !state.begun || state.verdict.is_some() {
            return Ok(());
        }
        if !member.begun {
            member.begun = true;
            self.record.value.counted_ms = 0;
            self.record.save().await?;
        }
        let path = format!("/v1/vms/{}/begin-command", vm_of(&self.id));
        let asked = host.agent.post::<serde_json::Value>(&path, &serde_json::json!({})).await;
        self.not_begun = asked.err().map(|problem| {
            format!(
                "host {} can't tell its guest to begin: {}: {}",
                host.id, problem.what, problem.why
            )
        });
        Ok(())
    }

    /// Why its command has not begun in time, if the others were all ready that long ago.
    pub(in crate::jobs) fn begins_late(&self) -> Option<String> {
        let member = self.record.value.kind.member()?;
        let limit = self.cluster.timing.boot_deadline;
        let is_late = Duration::from_millis(self.record.value.counted_ms) > limit;
        (member.begun && is_late).then(|| {
            let why = self.not_begun.as_ref().map_or_else(String::new, |why| format!(": {why}"));
            format!("the guest did not begin its command within {} s{why}", limit.as_secs_f64())
        })
    }

    /// A member's seed names all the others, so it is written when each has its card.
    pub(in crate::jobs) fn knows_all_addresses(&self) -> bool {
        let Some(member) = self.record.value.kind.member() else { return true };
        (0..member.count).all(|rank| {
            let other = self.cluster.index.job(&member_of(&member.gang, rank));
            other.is_some_and(|other| other.card.is_some())
        })
    }

    /// What a member's guest is told of the others.
    pub(in crate::jobs) fn guest_gang(&self) -> Result<Option<GuestGang>, Problem> {
        let Some(member) = self.record.value.kind.member() else { return Ok(None) };
        let lacks = |what: &str| {
            Problem::unavailable(format!("can't start job {}", self.id), format!("{what} yet"))
        };
        let gang = self.cluster.index.job(&member.gang);
        let keys = gang.and_then(|gang| gang.kind.gang()?.keys.clone());
        let keys = keys.ok_or_else(|| lacks("its gang has no keys"))?;
        let mut members = Vec::new();
        for rank in 0..member.count {
            let id = member_of(&member.gang, rank);
            let card = self.cluster.index.job(&id).and_then(|other| other.card.clone());
            let address = card.ok_or_else(|| lacks("another VM of it has no address"))?.address;
            let name = id.as_str().rsplit(SEPARATOR).next().unwrap_or_default().to_owned();
            members.push(GuestMember { name, address });
        }
        let card = self.record.value.card.as_ref().ok_or_else(|| lacks("it has no card"))?;
        Ok(Some(GuestGang {
            rank: member.rank,
            members,
            slots: self.job().spec.cpus_most(),
            subnet: card.subnet.to_string(),
            mpi: member.mpi,
            user: keys.user,
            host: keys.host,
        }))
    }
}
