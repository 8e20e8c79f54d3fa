//! The owner's QEMU process and the connection to its monitor: found, made again, and lost.

use std::sync::Arc;
use std::time::Duration;

use perigee_http::certificate::now_ms;
use perigee_model::states::VmEvent;
use perigee_model::vm::{ENDED_SILENTLY, VmNetwork, VmStatus};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::Owner;
use crate::command::{QEMU, mark};
use crate::guest;
use crate::process::{Looks, Process};
use crate::qmp::{Event, Qmp, QmpError};
use crate::vm::network::keep;
use crate::vm::strangers::keep_away;
use crate::vm::{tpm, tunnel};

/// A QEMU that hangs must not delay the agent's start or its answers. The next tick of the clock tries again.
const RECONNECT_DEADLINE: Duration = Duration::from_secs(3);

impl Owner {
    /// Searches for the QEMU of an earlier agent until it is known whether there is one.
    pub(super) fn find_process(&mut self) {
        let mark = mark(&self.vm.dir);
        let arguments = mark.each_ref().map(String::as_str);
        let found = match self.vm.dir.user() {
            // Its directories were never made.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            user => user.and_then(|uid| Process::find(Looks { program: QEMU, arguments, uid })),
        };
        match found {
            Ok(found) => {
                self.vm.observed(|seen| seen.is_searched = false);
                match found {
                    Some(process) => {
                        tracing::info!(vm = %self.vm.id(), pid = process.pid, "adopted");
                        self.watch_process(process);
                    }
                    None => self.gone(),
                }
            }
            Err(error) => {
                tracing::warn!(vm = %self.vm.id(), %error, "whether its QEMU runs is not known");
            }
        }
    }

    pub(super) fn watch_process(&mut self, process: Process) {
        self.vm.observed(|seen| seen.process = Some(process));
        let (vm, from_start) = (self.vm.clone(), self.vm.spec.arrives_by.is_none());
        let listening = tokio::spawn(async move {
            let (log, intents) = (vm.log.clone(), vm.intents.clone());
            guest::listen(&vm.dir.job(), log, intents, from_start, process).await;
        });
        self.guest = Some(listening.abort_handle());
        if self.vm.spec.network == VmNetwork::User {
            let kept = tokio::spawn(keep(Arc::clone(&self.vm), Arc::clone(&self.host)));
            self.network = Some(kept.abort_handle());
        }
        if self.vm.spec.arrives_by.is_some() {
            self.tunnel = Some(tokio::spawn(tunnel::keep(Arc::clone(&self.vm))).abort_handle());
        }
        if self.vm.spec.tpm().is_some() {
            self.tpm = Some(tokio::spawn(tpm::keep(Arc::clone(&self.vm))).abort_handle());
        }
    }

    pub(super) async fn connected(
        &mut self,
        qmp: Qmp,
        events: mpsc::Receiver<Event>,
    ) -> Result<(), QmpError> {
        self.events = Some(events);
        self.run_state.clear();
        self.look(&qmp).await?;
        if self.vm.status() == VmStatus::Incoming {
            let uri = tunnel::way_in(&self.vm, &self.host, &qmp).await?;
            self.vm.observed(|seen| seen.incoming_uri = Some(uri));
        }
        self.vm.observed(|seen| (seen.qmp, seen.qemu_silent_since_ms) = (Some(qmp), None));
        // Without a key nobody can tell who a stranger is.
        let waits =
            self.vm.status() == VmStatus::Incoming && self.host.network.identity().is_some();
        if waits && self.door.as_ref().is_none_or(AbortHandle::is_finished) {
            self.door = Some(tokio::spawn(keep_away(Arc::clone(&self.vm))).abort_handle());
        }
        Ok(())
    }

    /// The monitor was closed: QEMU has ended, or another client has connected to it.
    pub(super) fn disconnected(&mut self) {
        self.events = None;
        self.question = None;
        self.vm.observed(|seen| seen.qmp = None);
        if let Some(migration) = &self.migration {
            migration.nudge.notify_one();
        }
    }

    /// Whether a QEMU may exist. Notices when it has ended.
    pub(super) fn look_at_process(&mut self) -> bool {
        let has_ended = self.vm.qemu_has_ended();
        if has_ended && self.vm.status() != VmStatus::Gone {
            self.gone();
        }
        !has_ended
    }

    pub(super) async fn reconnect_soon(&mut self) {
        if tokio::time::timeout(RECONNECT_DEADLINE, self.reconnect()).await.is_err() {
            tracing::warn!(vm = %self.vm.id(), "QEMU does not answer yet");
            self.disconnected();
            self.vm
                .observed(|seen| seen.qemu_silent_since_ms.get_or_insert_with(now_ms).to_owned());
        }
    }

    async fn reconnect(&mut self) {
        match Qmp::connect(&self.vm.dir.qmp()).await {
            Ok((qmp, events)) => {
                if let Err(error) = self.connected(qmp, events).await {
                    tracing::warn!(vm = %self.vm.id(), %error, "QEMU does not answer");
                    self.events = None;
                }
            }
            Err(error) => tracing::debug!(vm = %self.vm.id(), %error, "no connection to QEMU"),
        }
    }

    /// The process has ended. A VM that was handed over stays `Migrated`.
    pub(super) fn gone(&mut self) {
        self.disconnected();
        if matches!(self.vm.status(), VmStatus::Gone | VmStatus::Migrated) {
            return;
        }
        let words = self.vm.last_words();
        self.vm.observed(|seen| {
            seen.incoming_uri = None;
            seen.reason = if words.is_empty() {
                ENDED_SILENTLY.to_owned()
            } else {
                format!("QEMU has ended: {words}")
            };
        });
        self.vm.take(VmEvent::ProcessEnded, "");
        tracing::warn!(vm = %self.vm.id(), words, "QEMU has ended");
    }
}
