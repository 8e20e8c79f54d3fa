//! An outgoing migration, from the order to its end, also across a restart of the agent.
//!
//! What comes next is decided by [`Outgoing`] of the model; here it is done. QEMU pauses the guest
//! before the switch (`pause-before-switchover`), and in this pause every volume's writer epoch is
//! raised at its home, so that from then on only the destination may write. That the switch is
//! made is stored before it is made ([`Record`]).
//!
//! This task looks at QEMU and asks other hosts. What it wants done with QEMU it asks of the VM's
//! owner. A QEMU whose migration fails in the pause runs the guest by itself: it is held at once,
//! and cannot write where the epochs are raised.
//!
//! QEMU's `return-path` makes `completed` mean that the destination has loaded everything.

mod steps;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use perigee_model::Problem;
use perigee_model::phases::Prepare;
use perigee_model::states::{Refused, VmEvent};
use perigee_model::switchover::{Outgoing, Sending, Step, Switchover, Wish};
use perigee_model::vm::{CancelMigration, MigrateOut, MigrationPhase, MigrationReport};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{Notify, mpsc, oneshot};

use super::phases::Watch;
use super::{Vm, decide};
use crate::files::{self, VmDir};
use crate::qmp::{MigrateInfo, QmpError, StatusInfo};

/// How often the figures are read; a change of state is told by an event.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// How long the owner may take to connect again to a monitor that closed.
const RECONNECT_DEADLINE: Duration = Duration::from_secs(30);
const RESUME_DEADLINE: Duration = Duration::from_secs(30);
/// Between two tries of what another host must answer, or of what should never be.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// What must survive the agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// `None` for a migration that was called off before its order came.
    pub order: Option<MigrateOut>,
    pub report: MigrationReport,
    pub switchover: Switchover,
}

impl Record {
    pub fn new(order: MigrateOut) -> Self {
        let MigrateOut { migration, number, .. } = &order;
        let report = MigrationReport::new(migration.clone(), *number, MigrationPhase::Setup);
        Self { order: Some(order), report, switchover: Switchover::Source }
    }

    /// So that the order, should it come late, is known and begins nothing.
    pub fn called_off(asked: &CancelMigration) -> Self {
        let CancelMigration { migration, number, .. } = asked;
        let mut report =
            MigrationReport::new(migration.clone(), *number, MigrationPhase::Cancelled);
        report.reason.clone_from(&asked.reason);
        Self { order: None, report, switchover: Switchover::Source }
    }

    /// # Errors
    /// When there is a record that cannot be read: then it is not known where the VM may run.
    pub fn load(dir: &VmDir) -> Result<Option<Self>, Problem> {
        files::read_json(&dir.migration())
    }

    pub fn save(&self, vm: &Vm) -> Result<(), Problem> {
        files::write_json(&vm.dir.migration(), self)
    }
}

/// Why it does not go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Stop {
    #[error("cancelled")]
    Cancelled,
    #[error("{0}")]
    Failed(String),
}

impl From<QmpError> for Stop {
    fn from(error: QmpError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<Problem> for Stop {
    fn from(problem: Problem) -> Self {
        Self::Failed(problem.to_string())
    }
}

impl From<Refused> for Stop {
    fn from(refused: Refused) -> Self {
        Self::Failed(refused.to_string())
    }
}

/// A wish and where its outcome goes.
pub type Wished = (Wish, oneshot::Sender<Result<(), QmpError>>);

/// The owner's end of a migration.
pub struct Handle {
    pub cancel: Arc<AtomicBool>,
    pub nudge: Arc<Notify>,
    pub wishes: mpsc::Receiver<Wished>,
    pub task: tokio::task::AbortHandle,
}

/// Begins a migration, or goes on with one that an agent began which ran before.
pub fn spawn(vm: Arc<Vm>, record: Record, order: MigrateOut, resumed: bool) -> Handle {
    let (cancel, nudge) = (Arc::new(AtomicBool::new(false)), Arc::new(Notify::new()));
    let (wishes, wished) = mpsc::channel(1);
    let downtime_limit_ms = order.downtime_limit_ms;
    let migration = Migration {
        homes: steps::Home::all(&order.epochs),
        greeting: None,
        machine: Outgoing::new(record.switchover),
        vm,
        order,
        record,
        stop: None,
        watch: Watch::new(downtime_limit_ms),
        cancel: cancel.clone(),
        nudge: nudge.clone(),
        wishes,
        warmed: Instant::now(),
    };
    let task = tokio::spawn(migration.run(resumed)).abort_handle();
    Handle { cancel, nudge, wishes: wished, task }
}

struct Migration {
    vm: Arc<Vm>,
    order: MigrateOut,
    record: Record,
    homes: Vec<steps::Home>,
    /// The homes and the destination are being asked whether the switch can be made.
    greeting: Option<oneshot::Receiver<Result<(), Stop>>>,
    machine: Outgoing,
    /// Why it was given up.
    stop: Option<Stop>,
    watch: Watch,
    cancel: Arc<AtomicBool>,
    nudge: Arc<Notify>,
    wishes: mpsc::Sender<Wished>,
    /// When the homes were last asked over the connections that the pause needs.
    warmed: Instant,
}

impl Migration {
    async fn run(mut self, resumed: bool) {
        if !self.machine.is_greeted() {
            self.greeting = Some(self.greet());
        }
        if !resumed && let Err(stop) = self.begin().await {
            self.give_up(stop);
        }
        let end = loop {
            match self.advance().await {
                Ok(Some(end)) => break end,
                Ok(None) => {}
                Err(refused) => self.stand_still(&refused).await,
            }
        };
        self.finish(end).await;
    }

    /// QEMU copies while the homes and the destination are asked: until they have agreed nothing is
    /// stored, raised or switched, and an order that came too late ends with no harm done.
    async fn begin(&mut self) -> Result<(), Stop> {
        let begun = Instant::now();
        let MigrateOut { uri, downtime_limit_ms, .. } = self.order.clone();
        self.wish(Wish::Begin { uri, downtime_limit_ms }).await?;
        self.record.report.phase = MigrationPhase::Copying;
        let begin_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.record.report.phases.prepare = Some(Prepare { begin_ms, ..Prepare::default() });
        self.save()?;
        Ok(())
    }

    /// Looks at QEMU once and does what is due; gives the end once it has come.
    async fn advance(&mut self) -> Result<Option<MigrationPhase>, Refused> {
        let Some(sending) = self.look().await else {
            self.pause().await;
            return Ok(None);
        };
        loop {
            self.hear_greeting();
            self.hear_cancel();
            match self.machine.step(sending)? {
                // In the pause each of these leads at once to the next.
                Step::Store => self.store_switch(sending)?,
                Step::Raise => self.raise().await?,
                Step::LetGo => {
                    self.let_go().await?;
                    return Ok(None);
                }
                Step::Wait => {
                    self.pause().await;
                    return Ok(None);
                }
                Step::StopSending => {
                    // Refused only when it has just ended, which the next look tells.
                    let _ = self.wish(Wish::StopSending).await;
                    self.pause().await;
                    return Ok(None);
                }
                Step::AskDestination => {
                    self.hold().await;
                    let fate = self.ask_destination().await;
                    self.machine.answered(fate)?;
                    self.note_switchover();
                }
                Step::FlipBack => {
                    self.hold().await;
                    self.note_switchover();
                    self.flip_back().await;
                    self.machine.flipped_back()?;
                }
                Step::Resume => return Ok(Some(self.resume().await)),
                Step::Complete => return Ok(Some(MigrationPhase::Completed)),
            }
        }
    }

    /// Whether the homes and the destination have agreed meanwhile.
    fn hear_greeting(&mut self) {
        let Some(greeting) = &mut self.greeting else { return };
        let answer = match greeting.try_recv() {
            Err(TryRecvError::Empty) => return,
            Ok(answer) => answer,
            Err(TryRecvError::Closed) => Err(Stop::Failed("the homes were not asked".to_owned())),
        };
        self.greeting = None;
        match answer {
            Ok(()) => self.machine.greeted(),
            Err(stop) => self.give_up(stop),
        }
    }

    fn hear_cancel(&mut self) {
        if self.cancel.load(Ordering::SeqCst) && !self.machine.is_given_up() {
            self.machine.cancel();
            if self.machine.is_given_up() {
                self.give_up(Stop::Cancelled);
            }
        }
    }

    /// Writes down what comes, before any of it is done; while memory is copied, where there is time.
    fn store_switch(&mut self, sending: Sending) -> Result<(), Refused> {
        let begun = Instant::now();
        let mut noted = self.machine;
        noted.noted()?;
        self.record.switchover = noted.at().stored();
        match self.save() {
            Ok(()) => self.machine = noted,
            Err(problem) => {
                self.record.switchover = self.machine.at().stored();
                self.give_up(problem.into());
            }
        }
        self.publish();
        if sending == Sending::AtSwitch {
            self.watch.stored(begun.elapsed());
        }
        Ok(())
    }

    async fn raise(&mut self) -> Result<(), Refused> {
        self.machine.raising()?;
        self.record.report.phase = MigrationPhase::Switching;
        self.publish();
        match self.raise_epochs().await {
            Ok(()) => self.machine.raised(),
            Err(stop) => self.give_up(stop),
        }
        Ok(())
    }

    async fn let_go(&mut self) -> Result<(), Refused> {
        self.machine.letting_go()?;
        self.publish();
        if let Err(error) = self.wish(Wish::LetGo).await {
            self.give_up(error.into());
        }
        Ok(())
    }

    /// The guest runs here again.
    async fn resume(&mut self) -> MigrationPhase {
        self.note_switchover();
        self.run_again().await;
        match self.stop {
            Some(Stop::Cancelled) => MigrationPhase::Cancelled,
            _ => MigrationPhase::Failed,
        }
    }

    async fn finish(&mut self, end: MigrationPhase) {
        if end == MigrationPhase::Completed {
            self.final_figures().await;
            self.tell_pause().await;
            // The guest is elsewhere: also where this QEMU thinks that it failed.
            self.hold().await;
            self.vm.take(VmEvent::HandedOver, "");
            self.record.report.reason.clear();
        } else if let Some(stop) = &self.stop {
            self.record.report.reason = stop.to_string();
        }
        // Said last: whoever sees it sees the VM as it is then.
        self.record.report.phase = end;
        self.record.switchover = self.machine.at().stored();
        if let Err(problem) = self.save() {
            tracing::error!(%problem, "the end of a migration is not written down");
        }
        tracing::info!(vm = %self.vm.id(), ?end, "the migration has ended");
    }

    /// The first reason counts.
    fn give_up(&mut self, stop: Stop) {
        self.machine.give_up();
        tracing::warn!(vm = %self.vm.id(), %stop, "the migration is given up");
        if self.stop.is_none() {
            self.say(stop.to_string());
            self.stop = Some(stop);
        }
    }

    /// Something is as it can't be: the guest stays held, whoever looks is told, and it is looked
    /// at again.
    async fn stand_still(&mut self, refused: &Refused) {
        tracing::error!(vm = %self.vm.id(), %refused, "the migration stands still");
        self.say(format!("the migration stands still: {refused}"));
        self.hold().await;
        tokio::time::sleep(ASK_AGAIN).await;
    }

    /// Makes the guest run, whatever state QEMU left it in. A guest that does not run by the deadline is
    /// left to the owner, which tries again where that may help and says why the guest stands still.
    async fn run_again(&mut self) {
        let deadline = tokio::time::Instant::now() + RESUME_DEADLINE;
        while !self.vm.qemu_has_ended() {
            let is_late = tokio::time::Instant::now() > deadline;
            if decide::is_resume_over(&self.run_state().await, is_late) {
                return;
            }
            // Refused while QEMU is still on its way out of the migration.
            let _ = self.wish(Wish::Run).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn run_state(&self) -> String {
        let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone()) else { return String::new() };
        qmp.query::<StatusInfo>("query-status").await.unwrap_or_default().status
    }

    /// Makes sure that the guest does not run here.
    async fn hold(&mut self) {
        // Without a QEMU it does not run either.
        let _ = self.wish(Wish::Hold).await;
    }

    /// QEMU's migration now, with the report brought up to date; `None` when it does not say.
    async fn look(&mut self) -> Option<Sending> {
        let qmp = self.vm.observed(|seen| seen.qmp.clone());
        let looked = match qmp {
            Some(qmp) => qmp.query::<MigrateInfo>("query-migrate").await,
            None => Err(QmpError::Closed),
        };
        let info = match looked {
            Ok(info) => info,
            Err(_) if self.vm.qemu_has_ended() => {
                self.ended("QEMU has ended");
                return Some(Sending::Ended);
            }
            Err(error) => {
                // A QEMU that waits for a disk does not answer, and may still be sending.
                tracing::debug!(vm = %self.vm.id(), %error, "QEMU is asked again");
                return None;
            }
        };
        let sending = decide::sending(&info);
        self.follow(&info, sending).await;
        self.read_figures(&info);
        if sending == Sending::Ended {
            self.ended(&decide::why_ended(&info));
        }
        Some(sending)
    }

    /// Keeps account of the phases, and does early what would take time in the pause.
    async fn follow(&mut self, info: &MigrateInfo, sending: Sending) {
        let phases = &mut self.record.report.phases;
        match sending {
            Sending::Copying => {
                let seen = self.watch.copying(info, phases);
                if seen.is_near {
                    self.machine.near_switch();
                }
                if seen.is_flush_due {
                    self.flush_homes();
                } else {
                    self.keep_warm();
                }
                if let Some(downtime_limit_ms) = seen.new_limit_ms {
                    // Refused only when the copying has just ended.
                    let _ = self.wish(Wish::AllowPause { downtime_limit_ms }).await;
                }
            }
            Sending::AtSwitch => self.watch.at_switch(info, phases),
            Sending::BehindSwitch => {
                let now_us = unix_us();
                self.vm.observed(|seen| {
                    seen.moments.sent_us.get_or_insert(now_us);
                });
            }
            Sending::Ending | Sending::Completed | Sending::Ended => {}
        }
    }

    /// The parts of the pause, once QEMU's last event has come.
    async fn tell_pause(&mut self) {
        for _ in 0..20 {
            let moments = self.vm.observed(|seen| seen.moments);
            self.record.report.phases.pause =
                self.watch.pause(&moments, self.record.report.transferred_bytes);
            if moments.completed_us.is_some() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn ended(&mut self, why: &str) {
        if self.stop.is_none() {
            self.give_up(Stop::Failed(why.to_owned()));
        }
    }

    fn read_figures(&mut self, info: &MigrateInfo) {
        let report = &mut self.record.report;
        if info.total_time > 0 {
            report.total_ms = info.total_time;
            report.downtime_ms = info.downtime;
            report.transferred_bytes = info.ram.transferred;
            report.remaining_bytes = info.ram.remaining;
            report.dirty_bytes_per_s = info.ram.dirty_pages_rate * info.ram.page_size;
            report.rate_bytes_per_s = bits_to_bytes(info.ram.mbps);
        }
        self.publish();
    }

    /// QEMU works out the times just after it has said that it completed.
    async fn final_figures(&mut self) {
        for _ in 0..50 {
            let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone()) else { return };
            match qmp.query::<MigrateInfo>("query-migrate").await {
                Ok(info) if info.status == "completed" && info.total_time == 0 => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Ok(info) if info.status == "completed" => return self.read_figures(&info),
                // Also where QEMU thinks that it failed: there will be no others.
                _ => return,
            }
        }
    }

    /// Until something may have changed.
    async fn pause(&self) {
        // A timeout is a reason to look as well.
        let _ = tokio::time::timeout(LOOK_AGAIN, self.nudge.notified()).await;
    }

    fn save(&self) -> Result<(), Problem> {
        let saved = self.record.save(&self.vm);
        self.publish();
        saved
    }

    /// Stores where the VM may run. Where that fails, the older word on disk is the more careful one.
    fn note_switchover(&mut self) {
        self.record.switchover = self.machine.at().stored();
        if let Err(problem) = self.save() {
            tracing::error!(vm = %self.vm.id(), %problem, "a step of a migration is not written down");
        }
    }

    fn say(&mut self, reason: String) {
        self.record.report.reason = reason;
        self.publish();
    }

    fn publish(&self) {
        self.vm.observed(|seen| {
            seen.migration = Some(self.record.report.clone());
            seen.switchover = Some(self.machine.at());
        });
    }

    /// Asks the owner; again, while its connection to QEMU is being made anew.
    async fn wish(&self, wish: Wish) -> Result<(), QmpError> {
        let deadline = tokio::time::Instant::now() + RECONNECT_DEADLINE;
        loop {
            let (outcome, granted) = oneshot::channel();
            if self.wishes.send((wish.clone(), outcome)).await.is_err() {
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
}

/// By this host's clock, as QEMU's events are.
fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Megabits to bytes.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a measured rate: neither negative nor near 2^64"
)]
pub(super) fn bits_to_bytes(megabits: f64) -> u64 {
    (megabits * 1e6 / 8.0) as u64
}
