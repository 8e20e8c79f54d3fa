//! The owner of one VM: the only task that acts on its QEMU.
//!
//! It waits for requests, QEMU's events and the clock, and publishes what it sees in
//! [`Vm::observed`]. While a migration runs, its task acts on the migration, and in its pause on
//! whether the guest runs; the owner then only looks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use perigee_model::vm::{MigrateOut, VmStatus};
use perigee_model::{Problem, VmId};
use serde_json::json;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::MissedTickBehavior;

use super::migrate::{self, Record};
use super::start::{Started, listen_for_migration, start};
use super::{Request, Vm, decide};
use crate::command::mark;
use crate::host::Host;
use crate::process::Process;
use crate::qmp::{BlockIoError, Event, Qmp, QmpError, StatusInfo};
use crate::{cgroup, files, guest};

const TICK: Duration = Duration::from_secs(1);
/// For the console and for QEMU's stderr.
const LOG_BYTES_MAX: u64 = 4 << 20;
const LOG_KEEP_BYTES: u64 = 1 << 20;
/// A QEMU that hangs must not keep an agent from starting or answering; the clock's tick tries again.
const RECONNECT_DEADLINE: Duration = Duration::from_secs(3);

pub struct Owner {
    host: Arc<Host>,
    vm: Arc<Vm>,
    requests: mpsc::Receiver<Request>,
    /// `None` while QEMU's monitor is not connected.
    events: Option<mpsc::UnboundedReceiver<Event>>,
    /// The last disk error was a write that the volume's epoch refused.
    fenced: bool,
    /// The disk error that was logged; the same one every second is not news.
    logged: String,
    migration: Option<Migration>,
    guest: Option<AbortHandle>,
}

/// The task of an outgoing migration and the ways to reach it.
struct Migration {
    task: AbortHandle,
    cancel: Arc<AtomicBool>,
    nudge: Arc<Notify>,
}

/// What woke the owner up.
enum Wake {
    Request(Option<Request>),
    Event(Option<Event>),
    Tick,
}

/// Why the owner has ended: the VM is no more, and somebody waits to hear it.
pub type Deleted = Option<oneshot::Sender<Result<(), Problem>>>;

impl Owner {
    pub fn new(host: Arc<Host>, vm: Arc<Vm>, requests: mpsc::Receiver<Request>) -> Self {
        Self {
            host,
            vm,
            requests,
            events: None,
            fenced: false,
            logged: String::new(),
            migration: None,
            guest: None,
        }
    }

    /// Starts QEMU; when it fails, nothing of the VM is left.
    pub async fn start(&mut self) -> Result<(), Problem> {
        let begun = match start(&self.vm, &self.host).await {
            Ok(started) => self.take_over(started).await,
            Err(problem) => Err(problem),
        };
        if let Err(problem) = begun {
            self.end_process().await?;
            self.vm.dir.remove()?;
            return Err(problem);
        }
        Ok(())
    }

    async fn take_over(&mut self, started: Started) -> Result<(), Problem> {
        self.watch_process(started.process);
        self.connected(started.qmp, started.events)
            .await
            .map_err(|e| Problem::internal(format!("start the VM {}", self.vm.id()), e))
    }

    /// Finds the QEMU of an agent that ran before, and goes on with its migration.
    pub async fn adopt(&mut self) {
        let record = Record::load(&self.vm);
        let migrated = record.as_ref().is_some_and(Record::is_completed);
        let ran = !self.vm.spec.incoming || self.vm.dir.ran().exists();
        self.vm.observed(|seen| {
            seen.ran = ran;
            seen.migration = record.as_ref().map(|record| record.report.clone());
            if migrated {
                seen.status = VmStatus::Migrated;
            }
        });
        match Process::find(&mark(&self.vm.dir)) {
            Some(process) => {
                tracing::info!(vm = %self.vm.id(), pid = process.pid, "adopted");
                self.watch_process(process);
                self.reconnect_soon().await;
            }
            None => self.gone(),
        }
        if let Some(record) = record.filter(|record| !decide::is_final(record.report.phase)) {
            self.begin_migration(record, true);
        }
    }

    fn watch_process(&mut self, process: Process) {
        self.vm.observed(|seen| seen.process = Some(process));
        let (vm, from_start) = (self.vm.clone(), !self.vm.spec.incoming);
        let listening = tokio::spawn(async move {
            guest::listen(&vm.dir.job(), vm.log.clone(), from_start, process).await;
        });
        self.guest = Some(listening.abort_handle());
    }

    async fn connected(
        &mut self,
        qmp: Qmp,
        events: mpsc::UnboundedReceiver<Event>,
    ) -> Result<(), QmpError> {
        self.events = Some(events);
        self.look(&qmp).await?;
        if self.vm.observed(|seen| seen.status) == VmStatus::Incoming {
            let uri = listen_for_migration(&qmp, &self.host.ip).await?;
            self.vm.observed(|seen| seen.incoming_uri = Some(uri));
        }
        self.vm.observed(|seen| seen.qmp = Some(qmp));
        Ok(())
    }

    /// Acts until the VM is deleted.
    pub async fn run(mut self) -> Deleted {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let wake = tokio::select! {
                request = self.requests.recv() => Wake::Request(request),
                event = next_event(&mut self.events) => Wake::Event(event),
                _ = tick.tick() => Wake::Tick,
            };
            match wake {
                // Nobody can ask any more: the agent ends.
                Wake::Request(None) => return None,
                Wake::Request(Some(Request::Started(answer))) => drop(answer.send(Ok(()))),
                Wake::Request(Some(Request::Migrate(order, answer))) => {
                    let _ = answer.send(self.migrate(*order));
                }
                Wake::Request(Some(Request::CancelMigration(answer))) => {
                    let _ = answer.send(self.cancel_migration());
                }
                Wake::Request(Some(Request::Delete { unless_ran, answer })) => {
                    match self.delete(unless_ran).await {
                        Ok(()) => return Some(answer),
                        Err(problem) => drop(answer.send(Err(problem))),
                    }
                }
                Wake::Event(Some(event)) => self.on_event(&event).await,
                Wake::Event(None) => {
                    self.disconnected();
                    self.look_at_process();
                }
                Wake::Tick => self.on_tick().await,
            }
        }
    }

    async fn on_event(&mut self, event: &Event) {
        match event.name.as_str() {
            "BLOCK_IO_ERROR" => self.on_disk_error(event),
            "RESUME" => self.note_run(),
            "STOP" | "SHUTDOWN" | "POWERDOWN" => {}
            "MIGRATION" => {
                if let Some(migration) = &self.migration {
                    migration.nudge.notify_one();
                }
            }
            _ => return,
        }
        let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone()) else { return };
        if let Err(error) = self.look(&qmp).await {
            tracing::debug!(vm = %self.vm.id(), %error, "QEMU did not tell its status");
        }
    }

    fn on_disk_error(&mut self, event: &Event) {
        let error: BlockIoError = serde_json::from_value(event.data.clone()).unwrap_or_default();
        if error.action != "stop" {
            return;
        }
        self.fenced = decide::is_fenced(&error);
        let reason = decide::describe(&error);
        self.vm.observed(|seen| seen.reason.clone_from(&reason));
        if self.logged != reason {
            tracing::warn!(vm = %self.vm.id(), reason, "the VM is paused");
            self.logged = reason;
        }
    }

    /// The guest is here from now on. For a VM that came by migration this is written down: a
    /// source that does not know how its migration ended asks for it.
    fn note_run(&self) {
        if self.vm.observed(|seen| std::mem::replace(&mut seen.ran, true)) {
            return;
        }
        if let Err(problem) = files::write_json(&self.vm.dir.ran(), &true) {
            tracing::error!(%problem, "the arrival of a VM is not written down");
        }
    }

    /// Asks QEMU for the VM's status.
    async fn look(&mut self, qmp: &Qmp) -> Result<(), QmpError> {
        let info: StatusInfo = qmp.query("query-status").await?;
        let (before, after) = self.vm.observed(|seen| {
            let before = seen.status;
            seen.status = decide::observe(before, &info.status);
            match seen.status {
                VmStatus::Running | VmStatus::Shutdown => seen.reason.clear(),
                VmStatus::IoError if seen.reason.is_empty() => {
                    seen.reason = "a disk answered with an error".to_owned();
                }
                _ => {}
            }
            (before, seen.status)
        });
        if decide::has_arrived(after) {
            self.note_run();
        }
        if before != after && self.logged.is_empty() {
            tracing::info!(vm = %self.vm.id(), ?before, ?after, "status");
        }
        Ok(())
    }

    /// The monitor has closed: QEMU has ended, or somebody else connected to it.
    fn disconnected(&mut self) {
        self.events = None;
        self.vm.observed(|seen| seen.qmp = None);
        if let Some(migration) = &self.migration {
            migration.nudge.notify_one();
        }
    }

    async fn on_tick(&mut self) {
        let (status, phase) = self
            .vm
            .observed(|seen| (seen.status, seen.migration.as_ref().map(|report| report.phase)));
        if !self.look_at_process() {
            return;
        }
        if status == VmStatus::Running {
            self.logged.clear();
        }
        if self.events.is_none() {
            self.reconnect().await;
        }
        for path in [self.vm.dir.console(), self.vm.dir.log()] {
            if let Err(error) = files::bound(&path, LOG_BYTES_MAX, LOG_KEEP_BYTES) {
                tracing::debug!(path = %path.display(), %error, "a long log is not cut");
            }
        }
        if decide::may_retry(status, phase, self.fenced, self.vm.spec.incoming)
            && let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone())
        {
            // What comes of it is told by events.
            let _ = qmp.execute("cont", json!({})).await;
        }
    }

    /// Whether there is one; notices when it has ended.
    fn look_at_process(&mut self) -> bool {
        let (process, status) = self.vm.observed(|seen| (seen.process, seen.status));
        let is_alive = process.is_some_and(|process| process.is_alive());
        if !is_alive && status != VmStatus::Gone {
            self.gone();
        }
        is_alive
    }

    async fn reconnect_soon(&mut self) {
        if tokio::time::timeout(RECONNECT_DEADLINE, self.reconnect()).await.is_err() {
            tracing::warn!(vm = %self.vm.id(), "QEMU does not answer yet");
            self.disconnected();
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
    fn gone(&mut self) {
        self.disconnected();
        let words = self.vm.last_words();
        let was_migrated = self.vm.observed(|seen| {
            if seen.status == VmStatus::Migrated {
                return true;
            }
            seen.status = VmStatus::Gone;
            seen.incoming_uri = None;
            seen.reason = if words.is_empty() {
                "QEMU has ended and said nothing".to_owned()
            } else {
                format!("QEMU has ended: {words}")
            };
            false
        });
        if !was_migrated {
            tracing::warn!(vm = %self.vm.id(), words, "QEMU has ended");
        }
    }

    fn migrate(&mut self, order: MigrateOut) -> Result<(), Problem> {
        let (status, last) = self.vm.observed(|seen| (seen.status, seen.migration.clone()));
        let begin = decide::may_begin(status, last.as_ref(), &order, &self.host.agent_url)
            .map_err(|refusal| migrate_refused(self.vm.id(), &refusal))?;
        if !begin {
            return Ok(());
        }
        let record = Record::new(order);
        record.save(&self.vm)?;
        self.vm.observed(|seen| seen.migration = Some(record.report.clone()));
        self.begin_migration(record, false);
        Ok(())
    }

    fn begin_migration(&mut self, record: Record, resumed: bool) {
        let (cancel, nudge) = (Arc::new(AtomicBool::new(false)), Arc::new(Notify::new()));
        let work = migrate::run(self.vm.clone(), record, resumed, cancel.clone(), nudge.clone());
        let task = tokio::spawn(work).abort_handle();
        self.migration = Some(Migration { task, cancel, nudge });
    }

    fn cancel_migration(&mut self) -> Result<(), Problem> {
        let phase = self.vm.observed(|seen| seen.migration.as_ref().map(|report| report.phase));
        match (&self.migration, phase) {
            (Some(migration), Some(phase)) if !decide::is_final(phase) => {
                migration.cancel.store(true, Ordering::SeqCst);
                migration.nudge.notify_one();
                Ok(())
            }
            _ => Err(Problem::conflict(
                format!("cancel the migration of {}", self.vm.id()),
                "none is under way",
            )),
        }
    }

    /// Ends QEMU and forgets the VM.
    async fn delete(&mut self, unless_ran: bool) -> Result<(), Problem> {
        let ran_here = Problem::conflict(
            format!("delete the VM {} that was to come here", self.vm.id()),
            "it has arrived and has run here",
        );
        if unless_ran && self.events.is_none() && self.look_at_process() {
            self.reconnect_soon().await;
            if self.events.is_none() {
                let why = "its QEMU does not answer: whether it has run here is not known";
                return Err(Problem::unavailable(ran_here.what, why));
            }
        }
        if unless_ran && self.vm.observed(|seen| seen.ran) {
            return Err(ran_here);
        }
        if let Some(migration) = self.migration.take() {
            migration.task.abort();
        }
        self.end_process().await?;
        if unless_ran && self.arrived_at_last().await {
            self.note_run();
            self.gone();
            return Err(ran_here);
        }
        if let Some(guest) = self.guest.take() {
            guest.abort();
        }
        self.vm.dir.remove()?;
        tracing::info!(vm = %self.vm.id(), "deleted");
        Ok(())
    }

    /// Whether the guest ran in the last moment before its process was ended. QEMU says RESUME
    /// before it lets a CPU run, so what stands in the socket up to its end is the whole truth.
    async fn arrived_at_last(&mut self) -> bool {
        let Some(mut events) = self.events.take() else { return false };
        while let Some(event) = events.recv().await {
            if event.name == "RESUME" {
                return true;
            }
        }
        false
    }

    async fn end_process(&mut self) -> Result<(), Problem> {
        if let Some(process) = self.vm.observed(|seen| seen.process) {
            process.kill().await?;
            cgroup::forget(&process);
        }
        Ok(())
    }
}

fn migrate_refused(vm: &VmId, refusal: &decide::Refusal) -> Problem {
    let what = format!("migrate the VM {vm}");
    match refusal {
        decide::Refusal::Uri(_) => Problem::invalid(what, refusal),
        _ => Problem::conflict(what, refusal),
    }
}

async fn next_event(events: &mut Option<mpsc::UnboundedReceiver<Event>>) -> Option<Event> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}
