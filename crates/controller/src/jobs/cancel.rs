//! A job that is cancelled while its command runs: the guest ends the command and writes its outputs, and these are
//! fetched as after any other end. When that takes too long, the VM is stopped as it is, and started once more for its
//! outputs ([`super::collect`]).

use std::time::{Duration, Instant};

use perigee_model::Problem;
use perigee_model::job::JobState;

use super::driver::{Run, Step};
use crate::clock::now_ms;
use crate::cluster::HostLink;
use crate::records::{Ending, Kind, vm_of};

pub(super) const CANCELLED: &str = "cancelled on request";

/// Of a VM without a job.
const DELETED: &str = "deleted on request";

/// A person has stopped its VM.
pub(super) const STOPPED: &str = "its VM was stopped on request";

/// Of a gang's member.
const ENDED_WITH_GANG: &str = "ended with the other VMs of its job";

/// What people see meanwhile.
pub(super) const CANCELLING: &str =
    "it is cancelled: its command ends, and its outputs are fetched";

impl Run {
    /// Why it is cancelled, in plain words.
    pub(super) fn why_cancelled(&self) -> &'static str {
        match self.record.value.kind {
            Kind::Job | Kind::Gang(_) => CANCELLED,
            Kind::Member(_) => ENDED_WITH_GANG,
            Kind::PersistentVm(_) => DELETED,
        }
    }

    /// Whether its command has begun, so that there may be something to fetch. A VM without a job has no command.
    pub(super) fn may_have_outputs(&self) -> bool {
        let has_begun = matches!(self.job().state, JobState::Running | JobState::Collecting);
        has_begun && self.persistent().is_none()
    }

    pub(super) async fn begin_cancel(&mut self) -> Result<(), Problem> {
        let record = &self.record.value;
        if record.cancelled_ms.is_some() || record.ending.is_some() || record.collect.is_some() {
            return Ok(());
        }
        self.record.value.cancelled_ms = Some(now_ms());
        CANCELLING.clone_into(&mut self.record.value.job.reason);
        self.record.save().await
    }

    /// Ends a cancelled job whose guest does not end it in time, or whose host was removed.
    pub(super) async fn end_late_cancel(&mut self) -> Result<Option<Step>, Problem> {
        if self.record.value.cancelled_ms.is_none() {
            return Ok(None);
        }
        let since = *self.cancel_seen.get_or_insert_with(Instant::now);
        if self.record.value.finished.is_some() {
            // The guest has done its part.
            return Ok(None);
        }
        let grace = Duration::from_secs(self.job().spec.stop_grace_s);
        let limit = self.cluster.timing.cancel_deadline.saturating_add(grace);
        let is_gone = self.host().is_err();
        if !is_gone && since.elapsed() <= limit {
            return Ok(None);
        }
        let because = match self.job().reason.as_str() {
            "" | CANCELLING => String::new(),
            reason => format!(": {reason}"),
        };
        let (cancelled, limit_s) = (self.why_cancelled(), limit.as_secs());
        let reason = match is_gone {
            true => cancelled.to_owned(),
            false => format!(
                "{cancelled}; its guest did not write its outputs within {limit_s} s{because}"
            ),
        };
        self.end_after_outputs(Ending::Cancelled, reason).await?;
        Ok(Some(Step::Again))
    }

    /// Asks the guest to end the command. The agent may forget it, so this is repeated.
    pub(super) async fn ask_to_end(&mut self, host: &HostLink) -> Result<(), Problem> {
        if self.job().state != JobState::Running {
            return Ok(());
        }
        let is_to_end = self.record.value.cancelled_ms.is_some() || self.is_released().await?;
        if !is_to_end {
            return Ok(());
        }
        let path = format!("/v1/vms/{}/end-command", vm_of(&self.id));
        let asked = host.agent.post::<serde_json::Value>(&path, &serde_json::json!({})).await;
        if let Err(problem) = asked {
            tracing::debug!("job {}: {problem}", self.id);
        }
        Ok(())
    }
}
