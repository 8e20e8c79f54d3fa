//! The owner of one VM, the only task that acts on its QEMU.
//!
//! It waits for requests, QEMU's events, the clock and the requests of a migration, and publishes the VM's state
//! in [`Vm::observed`]. A migration's task only reads QEMU's state. Its requests are carried out here, if its
//! [`Switchover`] allows that.

mod change;
mod connection;
mod ending;
mod orders;
mod qemu_requests;
mod question;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use perigee_http::certificate::now_ms;
use perigee_model::switchover::{Arrival, ArrivalStep, Fate, Switchover, on_arrival};
use perigee_model::vm::VmStatus;
use perigee_model::{DiskRole, Problem};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior};

use super::decide::DiskError;
use super::migrate::{self, Handle, Record, SentRequest};
use super::start::{Started, start};
use super::tls::End;
use super::{Answer, Request, Vm, arrival, decide};
use crate::files;
use crate::host::Host;
use crate::qmp::{BlockIoError, Event, Qmp, QmpError, StatusInfo};
use question::{Question, next_answer};

const TICK: Duration = Duration::from_secs(1);
/// The limit for the console's log and for QEMU's stderr.
const LOG_BYTES_MAX: u64 = 4 << 20;
const LOG_KEEP_BYTES: u64 = 1 << 20;

/// The only one who acts on a VM's QEMU: see the module.
pub struct Owner {
    host: Arc<Host>,
    vm: Arc<Vm>,
    requests: mpsc::Receiver<Request>,
    /// `None` while QEMU's monitor is not connected.
    events: Option<mpsc::Receiver<Event>>,
    /// Whether the last disk error was a write that the volume's epoch refused.
    is_fenced: bool,
    /// The last logged trouble, so that the same one is not logged every second.
    logged: String,
    /// QEMU's last run state. Nothing changes while it stays the same.
    run_state: String,
    /// The question how the VM is that QEMU has not answered yet.
    question: Option<Question>,
    /// Something has happened since that was asked.
    asks_again: bool,
    /// When QEMU was last asked.
    asked: Instant,
    /// Why the guest powered off, if QEMU gave a special reason.
    ended_because: &'static str,
    migration: Option<Handle>,
    guest: Option<AbortHandle>,
    /// Keeps the VM's user network going.
    network: Option<AbortHandle>,
    /// Looks after the VM's TPM.
    tpm: Option<AbortHandle>,
    /// Keeps strangers away while QEMU waits for the VM.
    door: Option<AbortHandle>,
    tunnel: Option<AbortHandle>,
    /// Disks whose devices have gone, and which QEMU has not closed yet.
    leaving: BTreeSet<DiskRole>,
}

/// What woke the owner up.
enum Wake {
    Request(Option<Request>),
    Event(Option<Event>),
    QemuRequest(Option<SentRequest>),
    Status(Result<StatusInfo, QmpError>),
    Tick,
}

/// Why the owner has ended, and who waits for that.
pub enum Farewell {
    /// The agent is stopping.
    Nobody,
    Deleted(Answer<()>),
    DidNotRun(Answer<Fate>),
}

impl Owner {
    /// The owner of a VM, which has no QEMU yet.
    pub fn new(host: Arc<Host>, vm: Arc<Vm>, requests: mpsc::Receiver<Request>) -> Self {
        Self {
            host,
            vm,
            requests,
            events: None,
            is_fenced: false,
            logged: String::new(),
            run_state: String::new(),
            question: None,
            asks_again: false,
            asked: Instant::now(),
            ended_because: "",
            migration: None,
            guest: None,
            network: None,
            tpm: None,
            door: None,
            tunnel: None,
            leaving: BTreeSet::new(),
        }
    }

    /// Starts QEMU. After a failure nothing of the VM is left.
    pub async fn start(&mut self) -> Result<(), Problem> {
        let begun = match start(&self.vm, &self.host).await {
            Ok(started) => self.take_over(started).await,
            Err(problem) => Err(problem),
        };
        if let Err(problem) = begun {
            self.undo_start().await?;
            return Err(problem);
        }
        Ok(())
    }

    /// Leaves nothing of a VM that did not start.
    ///
    /// # Errors
    /// If its QEMU can't be ended, or its files can't be removed.
    pub async fn undo_start(&mut self) -> Result<(), Problem> {
        self.end_tasks();
        self.end_process().await?;
        self.vm.dir.remove()
    }

    /// Whether the agent of before ended between storing this VM and starting its QEMU. Then the VM has not ended: it has not
    /// begun. What a migration was to bring has an end of its own.
    pub fn was_never_started(&self) -> bool {
        let is_gone = self.vm.observed(|seen| !seen.is_searched && seen.process.is_none());
        let dir = &self.vm.dir;
        // A log alone proves nothing: a host that loses power may keep the spec and lose the log's name.
        let of_qemu = [dir.log(), dir.pid(), dir.console(), dir.migration()];
        let has_none = of_qemu.iter().all(|path| matches!(path.try_exists(), Ok(false)));
        self.vm.spec.arrives_by.is_none() && is_gone && has_none
    }

    async fn take_over(&mut self, started: Started) -> Result<(), Problem> {
        self.watch_process(started.process);
        self.connected(started.qmp, started.events)
            .await
            .map_err(|e| Problem::internal(format!("can't start the VM {}", self.vm.id()), e))
    }

    /// Finds the QEMU of an earlier agent, and continues its migration.
    pub async fn adopt(&mut self, record: Result<Option<Record>, Problem>) {
        let (record, switchover) = match record {
            Ok(Some(record)) => {
                let switchover = record.switchover;
                (Some(record), Some(switchover))
            }
            Ok(None) => (None, Some(Switchover::Source)),
            Err(problem) => {
                tracing::error!(vm = %self.vm.id(), %problem, "the VM stays as it is");
                (None, None)
            }
        };
        let arrival = match self.vm.spec.arrives_by {
            Some(_) => arrival::read(&self.vm.dir.arrival()),
            None => Arrival::Ran,
        };
        self.vm.observed(|seen| {
            seen.arrival = arrival;
            seen.migration = record.as_ref().map(|record| record.report.clone());
            seen.switchover = switchover;
            seen.is_searched = true;
            if switchover.is_none() {
                let why =
                    "the record of its migration cannot be read: where it may run is not known";
                seen.reason = why.to_owned();
            }
        });
        self.find_process();
        if self.vm.observed(|seen| seen.process.is_some()) {
            self.reconnect_soon().await;
        }
        if let Some(record) = record {
            self.continue_migration(record);
        }
    }

    fn continue_migration(&mut self, record: Record) {
        if record.report.phase.is_final() {
            return;
        }
        if let Some(order) = record.order.clone() {
            self.migration =
                Some(migrate::spawn(self.vm.clone(), self.host.clone(), record, order, true));
        }
    }

    /// Starts a migration's task again if it has ended before the migration: then it has panicked. The migration
    /// continues from its record, as after a restart of the agent.
    fn continue_after_panic(&mut self) {
        if self.migration.is_some() || !self.is_migrating() {
            return;
        }
        match Record::load(&self.vm.dir) {
            Ok(Some(record)) => {
                tracing::error!(vm = %self.vm.id(), "its migration's task has panicked, and is started again");
                self.vm.observed(|seen| seen.switchover = Some(record.switchover));
                self.continue_migration(record);
            }
            Ok(None) => {}
            Err(problem) => self.trouble(format!("can't continue its migration: {problem}")),
        }
    }

    /// Runs until the VM is deleted.
    pub async fn run(mut self) -> Farewell {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let wake = tokio::select! {
                request = self.requests.recv() => Wake::Request(request),
                event = next_event(&mut self.events) => Wake::Event(event),
                request = next_request_of_migration(&mut self.migration) => Wake::QemuRequest(request),
                answer = next_answer(&mut self.question) => Wake::Status(answer),
                _ = tick.tick() => Wake::Tick,
            };
            match wake {
                // No more requests can come: the agent is stopping.
                Wake::Request(None) => return Farewell::Nobody,
                Wake::Request(Some(request)) => {
                    if let Some(farewell) = self.on_request(request).await {
                        return farewell;
                    }
                }
                Wake::Event(Some(event)) => self.on_event(&event).await,
                Wake::Event(None) => {
                    self.disconnected();
                    self.look_at_process();
                }
                Wake::QemuRequest(Some((request, outcome))) => {
                    let _ = outcome.send(self.grant(request).await);
                }
                Wake::QemuRequest(None) => self.migration = None,
                Wake::Status(answer) => self.on_status(answer).await,
                Wake::Tick => self.on_tick().await,
            }
        }
    }

    /// The requester may be gone when the answer is sent.
    async fn on_request(&mut self, request: Request) -> Option<Farewell> {
        match request {
            Request::Started(answer) => drop(answer.send(Ok(()))),
            Request::Migrate(order, answer) => drop(answer.send(self.migrate(*order))),
            Request::CancelMigration(asked, answer) => {
                drop(answer.send(self.cancel_migration(&asked)));
            }
            Request::RenewGrant(renewed, answer) => drop(answer.send(self.renew_grant(renewed))),
            Request::Delete(answer) => match self.delete().await {
                Ok(()) => return Some(Farewell::Deleted(answer)),
                Err(problem) => drop(answer.send(Err(problem))),
            },
            Request::Change(ask, answer) => drop(answer.send(self.change(ask).await)),
            Request::PressPowerButton(answer) => drop(answer.send(self.press_power_button().await)),
            Request::EndUnlessRan(migration, answer) => {
                match self.end_unless_ran(&migration).await {
                    Ok(Fate::DidNotRun) => return Some(Farewell::DidNotRun(answer)),
                    other => drop(answer.send(other)),
                }
            }
        }
        None
    }

    async fn on_event(&mut self, event: &Event) {
        self.vm.observed(|seen| seen.moments.on_event(event));
        match event.name.as_str() {
            "BLOCK_IO_ERROR" => self.on_disk_error(event),
            "SHUTDOWN" => {
                let reason = event.data.get("reason").and_then(serde_json::Value::as_str);
                self.ended_because = reason.and_then(decide::shutdown_reason).unwrap_or_default();
            }
            "DEVICE_DELETED" => return self.on_device_gone(event).await,
            "RESUME" => self.vm.tell_time(),
            "STOP" | "POWERDOWN" | "GUEST_PANICKED" => {}
            "MIGRATION" | "MIGRATION_PASS" => {
                if let Some(migration) = &self.migration {
                    migration.nudge.notify_one();
                }
                if event.name == "MIGRATION_PASS" {
                    return;
                }
            }
            _ => return,
        }
        self.ask_status(false);
    }

    fn on_disk_error(&mut self, event: &Event) {
        let error: BlockIoError = serde_json::from_value(event.data.clone()).unwrap_or_default();
        if error.action != "stop" {
            return;
        }
        self.is_fenced = DiskError::of(&error) == DiskError::Fenced;
        let why = decide::describe(&error);
        self.vm.observed(|seen| {
            seen.disk_error = Some((
                why.clone(),
                seen.disk_error.take().map_or_else(now_ms, |(_, since_ms)| since_ms),
            ))
        });
        self.trouble(why);
    }

    fn trouble(&mut self, reason: String) {
        self.vm.observed(|seen| seen.reason.clone_from(&reason));
        if self.logged != reason {
            tracing::warn!(vm = %self.vm.id(), reason, "the VM does not run");
            self.logged = reason;
        }
    }

    /// Reads the VM's status from QEMU.
    async fn look(&mut self, qmp: &Qmp) -> Result<(), QmpError> {
        let info: StatusInfo = qmp.query(question::COMMAND).await?;
        self.take_status(&info, qmp).await;
        Ok(())
    }

    /// Takes over what QEMU has said, and lets a VM run that has arrived by migration.
    async fn take_status(&mut self, info: &StatusInfo, qmp: &Qmp) {
        if info.status != self.run_state {
            if let Some(event) = decide::event_of(&info.status) {
                self.vm.take(event, &info.status);
            }
            self.run_state.clone_from(&info.status);
        }
        let ended_because = self.ended_because;
        self.vm.observed(|seen| match seen.status() {
            VmStatus::Running => seen.reason.clear(),
            VmStatus::Shutdown => {
                seen.reason = decide::reason_of(&info.status).unwrap_or(ended_because).to_owned();
            }
            VmStatus::IoError if seen.reason.is_empty() => {
                seen.reason = "a disk answered with an error".to_owned();
            }
            VmStatus::Paused => {
                if let Some(reason) = decide::reason_of(&info.status) {
                    seen.reason = reason.to_owned();
                }
            }
            _ => {}
        });
        self.on_arrival(qmp).await;
    }

    /// Stores that the VM has arrived by migration, and then lets it run. This also applies to a VM that an
    /// earlier agent left paused for no other reason.
    async fn on_arrival(&mut self, qmp: &Qmp) {
        let may_run = self.run_state == "paused" && !self.is_migrating();
        let step = self.vm.observed(|seen| {
            let at_source = seen.switchover.is_some_and(Switchover::may_source_run);
            on_arrival(seen.status(), seen.arrival, may_run && at_source)
        });
        match step {
            ArrivalStep::Nothing => return,
            ArrivalStep::Run => {}
            ArrivalStep::Store => {
                if let Err(problem) = arrival::store_ran(&self.vm.dir.arrival()) {
                    return self.trouble(format!("its arrival is not stored: {problem}"));
                }
                self.vm.observed(|seen| {
                    seen.arrival = Arrival::Ran;
                    seen.incoming_uri = None;
                });
                if !may_run {
                    return;
                }
            }
        }
        // Events report the result.
        if let Err(error) = qmp.execute("cont", json!({})).await {
            tracing::warn!(vm = %self.vm.id(), %error, "QEMU does not let the VM run yet");
            return;
        }
        if self.vm.spec.machine.persistent {
            // A snapshot may have begun at the source, which asks the guest no more.
            let vm = self.vm.clone();
            tokio::spawn(async move { vm.thaw().await });
        }
    }

    fn is_migrating(&self) -> bool {
        self.vm.observed(|seen| seen.migration.as_ref().is_some_and(|m| !m.phase.is_final()))
    }

    async fn on_tick(&mut self) {
        if self.vm.observed(|seen| seen.is_searched) {
            self.find_process();
        }
        self.continue_after_panic();
        if !self.look_at_process() {
            return;
        }
        if self.vm.status() == VmStatus::Running {
            self.logged.clear();
            self.vm.observed(|seen| seen.disk_error = None);
            self.vm.intents.tell_time_again();
        }
        if self.events.is_none() {
            self.reconnect_soon().await;
        }
        let dir = &self.vm.dir;
        let tunnels = [End::Source, End::Destination].map(|end| dir.tunnel_log(end.name()));
        let own = [dir.console(), dir.log(), dir.tpm_log(), dir.network_log()];
        for path in own.into_iter().chain(tunnels) {
            if let Err(error) = files::bound(&path, LOG_BYTES_MAX, LOG_KEEP_BYTES) {
                tracing::debug!(path = %path.display(), %error, "a long log is not cut");
            }
        }
        let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone()) else { return };
        if self.is_asking() {
            return;
        }
        self.forget_leaving(&qmp).await;
        if self.vm.status() == VmStatus::Paused || self.is_waiting_to_be_stored() {
            self.on_arrival(&qmp).await;
        }
        let (status, switchover) = self.vm.observed(|seen| (seen.status(), seen.switchover));
        let has_come = self.vm.spec.arrives_by.is_some();
        if decide::may_retry(status, switchover, self.is_fenced, has_come)
            && !self.is_waiting_to_be_stored()
        {
            self.ask_status(true);
        } else {
            self.look_now_and_then();
        }
    }

    fn is_waiting_to_be_stored(&self) -> bool {
        self.vm.observed(|seen| seen.arrival == Arrival::Waits)
    }
}

async fn next_event(events: &mut Option<mpsc::Receiver<Event>>) -> Option<Event> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

async fn next_request_of_migration(migration: &mut Option<Handle>) -> Option<SentRequest> {
    match migration {
        Some(migration) => migration.requests.recv().await,
        None => std::future::pending().await,
    }
}
