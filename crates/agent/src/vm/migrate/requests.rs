//! What a migration asks of the VM's owner, which alone acts on QEMU.

use std::time::Duration;

use perigee_model::switchover::QemuRequest;
use tokio::sync::oneshot;

use super::Migration;
use crate::qmp::{QmpError, StatusInfo};
use crate::vm::decide;

/// How long the owner may take to connect again to a monitor that was closed.
const RECONNECT_DEADLINE: Duration = Duration::from_secs(30);
const RESUME_DEADLINE: Duration = Duration::from_secs(30);

impl Migration {
    /// Sends a request to the owner. It is repeated while the owner connects to QEMU again.
    pub(super) async fn request(&self, request: QemuRequest) -> Result<(), QmpError> {
        let deadline = tokio::time::Instant::now() + RECONNECT_DEADLINE;
        loop {
            let (outcome, granted) = oneshot::channel();
            if self.requests.send((request.clone(), outcome)).await.is_err() {
                // The owner has ended, and this task with it.
                return Err(QmpError::Closed);
            }
            match granted.await.unwrap_or(Err(QmpError::Closed)) {
                Err(QmpError::Closed) => {}
                other => return other,
            }
            if self.vm.qemu_has_ended() || tokio::time::Instant::now() > deadline {
                return Err(QmpError::Closed);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Makes the guest run, in whatever state QEMU has left it. If it does not run by the deadline, this is
    /// left to the owner, which tries again if that may help, and shows why the guest does not run.
    pub(super) async fn run_again(&mut self) {
        let deadline = tokio::time::Instant::now() + RESUME_DEADLINE;
        while !self.vm.qemu_has_ended() {
            let is_late = tokio::time::Instant::now() > deadline;
            if decide::is_resume_over(&self.run_state().await, is_late) {
                return;
            }
            // This is refused while QEMU is still ending the migration.
            let _ = self.request(QemuRequest::Run).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn run_state(&self) -> String {
        let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone()) else { return String::new() };
        qmp.query::<StatusInfo>("query-status").await.unwrap_or_default().status
    }

    /// Makes sure that the guest does not run here.
    pub(super) async fn hold(&mut self) {
        // Without a QEMU process the guest does not run either.
        let _ = self.request(QemuRequest::Hold).await;
    }
}
