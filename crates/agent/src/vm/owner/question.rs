//! The question how a VM is, which waits for QEMU's answer as long as it takes.
//!
//! QEMU answers nothing while it stops a guest whose disk has failed: it flushes all disks first, and their homes may be away
//! for long. Nothing tells when it is done, so a question that was given up would leave the VM standing still for good.

use std::time::Duration;

use perigee_http::certificate::now_ms;
use perigee_model::vm::VmStatus;
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::Owner;
use crate::qmp::{Qmp, QmpError, StatusInfo};

pub(super) const COMMAND: &str = "query-status";
/// QEMU is asked this often even if no event says that something has changed, and more often if the guest stands still.
const LOOK_EVERY: Duration = Duration::from_secs(30);
const LOOK_AT_STOPPED_EVERY: Duration = Duration::from_secs(5);
/// A QEMU that is busy for a moment is not told.
const SILENCE_TOLD: Duration = Duration::from_secs(3);

/// A question to QEMU how the VM is, which is not answered yet.
pub struct Question {
    since: Instant,
    since_ms: u64,
    answer: oneshot::Receiver<Result<StatusInfo, QmpError>>,
    task: JoinHandle<()>,
}

/// Its connection would stay open, and QEMU serves one at a time.
impl Drop for Question {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Question {
    /// `resume`: QEMU is first told to let the guest run.
    fn ask(qmp: Qmp, resume: bool) -> Self {
        let (told, answer) = oneshot::channel();
        let task = tokio::spawn(async move {
            if resume {
                // The status says what became of it.
                let _ = qmp.execute("cont", json!({})).await;
            }
            let _ = told.send(qmp.query_patiently(COMMAND).await);
        });
        Self { since: Instant::now(), since_ms: now_ms(), answer, task }
    }
}

impl Owner {
    /// Asks QEMU for the VM's status, once more if it is asked already: that answer may be older than what has happened.
    pub(super) fn ask_status(&mut self, resume: bool) {
        if self.question.is_some() {
            self.asks_again = true;
            return;
        }
        let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone()) else { return };
        self.asks_again = false;
        self.asked = Instant::now();
        self.question = Some(Question::ask(qmp, resume));
    }

    pub(super) async fn on_status(&mut self, answer: Result<StatusInfo, QmpError>) {
        self.question = None;
        match answer {
            Ok(info) => {
                let Some(qmp) = self.vm.observed(|seen| {
                    seen.qemu_silent_since_ms = None;
                    seen.qmp.clone()
                }) else {
                    return;
                };
                self.take_status(&info, &qmp).await;
            }
            Err(error) => {
                tracing::warn!(vm = %self.vm.id(), %error, "QEMU did not tell its status; it is asked again");
                self.asks_again = true;
            }
        }
        if self.asks_again {
            self.ask_status(false);
        }
    }

    /// Whether QEMU owes an answer. Meanwhile it is asked for nothing more, because it answers in order.
    pub(super) fn is_asking(&mut self) -> bool {
        let Some(question) = &self.question else { return false };
        let since_ms = question.since_ms;
        if question.since.elapsed() >= SILENCE_TOLD {
            self.vm.observed(|seen| seen.qemu_silent_since_ms.get_or_insert(since_ms).to_owned());
        }
        true
    }

    /// Asks now and then, whatever happens.
    pub(super) fn look_now_and_then(&mut self) {
        let runs = self.vm.status() == VmStatus::Running;
        let every = if runs { LOOK_EVERY } else { LOOK_AT_STOPPED_EVERY };
        if self.asked.elapsed() >= every {
            self.ask_status(false);
        }
    }
}

pub(super) async fn next_answer(question: &mut Option<Question>) -> Result<StatusInfo, QmpError> {
    match question {
        // A task that has ended without an answer has panicked.
        Some(question) => (&mut question.answer).await.unwrap_or(Err(QmpError::Closed)),
        None => std::future::pending().await,
    }
}
