//! An outgoing migration from its order to its end, also across a restart of the agent.
//!
//! [`Outgoing`] of the model decides the next step, and this module carries it out. QEMU pauses the guest
//! before the switch (`pause-before-switchover`). In this pause every volume's writer epoch is raised at its
//! home, so that from then on only the destination may write. Before the switch is made, it is stored that it
//! will be made ([`Record`]).
//!
//! This task reads QEMU's state and sends requests to other hosts. For every change to QEMU it sends a request to
//! the VM's owner. If a migration fails in the pause, QEMU runs the guest by itself. The guest is then stopped
//! at once, and it cannot write to volumes whose epochs are raised.
//!
//! QEMU's `return-path` makes `completed` mean that the destination has loaded everything.

pub(super) mod cut;
mod figures;
mod record;
mod requests;
mod steps;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::Problem;
use perigee_model::grant::SignedGrant;
use perigee_model::phases::Prepare;
use perigee_model::states::{Refused, VmEvent};
use perigee_model::switchover::{Outgoing, QemuRequest, Sending, Step, Switchover};
use perigee_model::vm::{MigrateOut, MigrationPhase};
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{Notify, mpsc, oneshot};

use super::phases::Watch;
use super::tls::End;
use super::{Vm, decide, tunnel};
use crate::host::Host;
use crate::qmp::{MigrateInfo, QmpError};

pub use record::Record;

/// How often the figures are read. Events report changes of state.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// The time between two tries of a request that another host must answer, or after a state that should never
/// occur.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// How long QEMU may be silent after it was told to send: it may stand in its handshake with the destination, and its
/// guest with it. Later it is told to people from then on.
const SILENT_MAX: Duration = Duration::from_secs(10);
/// How long connecting to the destination may take, while QEMU answers.
const CONNECT_MAX: Duration = Duration::from_secs(60);
/// How long QEMU may take from the switch, or from its cancelling, to its end. It has no deadline itself for a destination
/// that has got everything and says nothing.
const END_MAX: Duration = Duration::from_secs(30);
/// How long QEMU may take to stop sending.
const STOP_MAX: Duration = Duration::from_secs(20);

/// Why the migration does not continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Stop {
    /// The reason is that of whoever has asked for it.
    #[error("{0}")]
    Cancelled(String),
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

/// A request, and the channel for its result.
pub type SentRequest = (QemuRequest, oneshot::Sender<Result<(), QmpError>>);

type Renewed = Arc<Mutex<Option<SignedGrant>>>;

/// Why the migration is to end; `None` while nobody has asked for that.
type Cancel = Arc<Mutex<Option<String>>>;

/// The owner's handle of a migration.
pub struct Handle {
    pub cancel: Cancel,
    pub nudge: Arc<Notify>,
    /// A newer grant, until the migration's task has taken it.
    pub renewed: Renewed,
    pub requests: mpsc::Receiver<SentRequest>,
    pub task: tokio::task::AbortHandle,
}

/// Starts a migration, or continues one that an earlier agent has started.
pub fn spawn(
    vm: Arc<Vm>,
    host: Arc<Host>,
    record: Record,
    order: MigrateOut,
    resumed: bool,
) -> Handle {
    let (cancel, nudge) = (Cancel::default(), Arc::new(Notify::new()));
    let (requests, received) = mpsc::channel(1);
    let renewed = Renewed::default();
    let downtime_limit_ms = order.downtime_limit_ms;
    let is_connecting =
        record.switchover == Switchover::Source && record.report.transferred_bytes == 0;
    let migration = Migration {
        homes: steps::Home::all(&order, &host.network),
        host,
        greeting: None,
        machine: Outgoing::new(record.switchover),
        vm,
        order,
        record,
        stop: None,
        watch: Watch::new(downtime_limit_ms),
        cancel: cancel.clone(),
        nudge: nudge.clone(),
        renewed: Arc::clone(&renewed),
        requests,
        warmed: Instant::now(),
        connecting: is_connecting.then(Instant::now),
        stopping: None,
        is_cut: false,
        ending: None,
        silent: None,
    };
    let task = tokio::spawn(migration.run(resumed)).abort_handle();
    Handle { cancel, nudge, renewed, requests: received, task }
}

struct Migration {
    vm: Arc<Vm>,
    host: Arc<Host>,
    order: MigrateOut,
    record: Record,
    homes: Vec<steps::Home>,
    /// The result of asking the homes and the destination whether the switch can be made.
    greeting: Option<oneshot::Receiver<Result<(), Stop>>>,
    machine: Outgoing,
    /// Why it was given up.
    stop: Option<Stop>,
    watch: Watch,
    cancel: Cancel,
    nudge: Arc<Notify>,
    renewed: Renewed,
    requests: mpsc::Sender<SentRequest>,
    /// When the connections that the pause needs were last used.
    warmed: Instant,
    /// Since when the destination has taken nothing; `None` once it has surely taken something.
    connecting: Option<Instant>,
    /// Since when QEMU is to stop sending.
    stopping: Option<Instant>,
    /// Whether QEMU's connection was ended so that it stops sending.
    is_cut: bool,
    /// Since when QEMU has nothing left but to come to an end.
    ending: Option<Instant>,
    /// Since when QEMU does not answer.
    silent: Option<Instant>,
}

impl Migration {
    async fn run(mut self, resumed: bool) {
        if !self.machine.is_greeted() {
            self.greeting = Some(self.greet());
        }
        if !resumed && let Err(stop) = self.begin().await {
            self.give_up(stop);
        }
        self.connecting = self.connecting.map(|_| Instant::now());
        let end = loop {
            match self.advance().await {
                Ok(Some(end)) => break end,
                Ok(None) => {}
                Err(refused) => self.stand_still(&refused).await,
            }
        };
        self.finish(end).await;
    }

    /// QEMU copies memory while the homes and the destination are asked. Until they have agreed, nothing is
    /// stored, raised or switched, so an order that came too late ends without harm.
    async fn begin(&mut self) -> Result<(), Stop> {
        let begun = Instant::now();
        if self.host.network.identity().is_some() {
            self.fetch_key().await?;
        }
        let MigrateOut {
            uri,
            downtime_limit_ms,
            compressed,
            max_bytes_per_s,
            throttle_percent,
            ..
        } = self.order.clone();
        let begin = QemuRequest::Begin {
            uri,
            downtime_limit_ms,
            compressed,
            max_bytes_per_s,
            throttle_percent,
        };
        self.request(begin).await?;
        self.record.report.phase = MigrationPhase::Copying;
        let begin_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.record.report.phases.prepare = Some(Prepare { begin_ms, ..Prepare::default() });
        self.save()?;
        Ok(())
    }

    /// Checks QEMU once and does what is due. Returns the end when it has come.
    async fn advance(&mut self) -> Result<Option<MigrationPhase>, Refused> {
        let asked = Instant::now();
        let looked = self.look().await;
        self.bound_handshake(looked.is_some()).await;
        self.bound_end(looked).await;
        let Some(sending) = looked else {
            // It is carried out when QEMU answers.
            self.hear_cancel();
            self.note_silence(asked);
            self.pause().await;
            return Ok(None);
        };
        self.end_silence();
        loop {
            self.hear_greeting();
            self.hear_cancel();
            self.hear_grant();
            match self.machine.step(sending)? {
                // In the pause each of these steps leads directly to the next.
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
                    self.stop_sending(sending).await;
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

    /// Checks whether the homes and the destination have agreed in the meantime.
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
        let asked = self.cancel.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(why) = asked.filter(|_| !self.machine.is_given_up()) else { return };
        self.machine.cancel();
        if self.machine.is_given_up() {
            self.give_up(Stop::Cancelled(why));
        }
    }

    /// Shows the homes the newest grant. It is stored, because an agent that starts again needs it too.
    fn hear_grant(&mut self) {
        let renewed = self.renewed.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(grant) = renewed else { return };
        self.order.grant = Some(grant);
        self.homes = steps::Home::all(&self.order, &self.host.network);
        self.record.order = Some(self.order.clone());
        if let Err(problem) = self.save() {
            tracing::error!(vm = %self.vm.id(), %problem, "a migration's new grant is not written down");
        }
    }

    /// Stores that the switch is about to be made. This is done while memory is copied, when there is time.
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
        self.send_frames();
        match self.raise_epochs().await {
            Ok(()) => self.machine.raised(),
            Err(stop) => self.give_up(stop),
        }
        Ok(())
    }

    async fn let_go(&mut self) -> Result<(), Refused> {
        self.machine.letting_go()?;
        self.ending = Some(Instant::now());
        self.publish();
        if let Err(error) = self.request(QemuRequest::LetGo).await {
            self.give_up(error.into());
        }
        Ok(())
    }

    /// The guest runs here again.
    async fn resume(&mut self) -> MigrationPhase {
        self.note_switchover();
        self.run_again().await;
        match self.stop {
            Some(Stop::Cancelled(_)) => MigrationPhase::Cancelled,
            _ => MigrationPhase::Failed,
        }
    }

    async fn finish(&mut self, end: MigrationPhase) {
        if let Err(problem) = tunnel::end(&self.vm.dir, End::Source).await {
            tracing::warn!(vm = %self.vm.id(), %problem, "what carried its migration goes on");
        }
        if end == MigrationPhase::Completed {
            self.final_figures().await;
            self.tell_pause().await;
            // The guest is at the destination, even if this QEMU thinks that the migration failed.
            self.hold().await;
            self.vm.take(VmEvent::HandedOver, "");
            self.record.report.reason.clear();
        } else {
            self.vm.keep_frames();
            if let Some(stop) = &self.stop {
                self.record.report.reason = stop.to_string();
            }
        }
        // This is set last, so that everybody who sees it also sees the VM's final state.
        self.record.report.phase = end;
        self.record.switchover = self.machine.at().stored();
        if let Err(problem) = self.save() {
            tracing::error!(%problem, "the end of a migration is not written down");
        }
        tracing::info!(vm = %self.vm.id(), ?end, "the migration has ended");
    }

    /// Only the first reason counts.
    fn give_up(&mut self, stop: Stop) {
        self.machine.give_up();
        tracing::warn!(vm = %self.vm.id(), %stop, "the migration is given up");
        if self.stop.is_none() {
            self.say(stop.to_string());
            self.stop = Some(stop);
        }
    }

    /// Says that QEMU does not answer. Nothing else is known of the migration meanwhile.
    fn note_silence(&mut self, asked: Instant) {
        let since = *self.silent.get_or_insert(asked);
        if since.elapsed() < SILENT_MAX {
            return;
        }
        let silent = format!("QEMU has not answered for more than {} s", SILENT_MAX.as_secs());
        let reason = match &self.stop {
            Some(stop) => format!("{stop}; {silent}"),
            None => silent,
        };
        if reason != self.record.report.reason {
            self.say(reason);
        }
    }

    /// QEMU answers again, or has ended.
    fn end_silence(&mut self) {
        if self.silent.take().is_some_and(|since| since.elapsed() >= SILENT_MAX) {
            self.say(self.stop.as_ref().map(ToString::to_string).unwrap_or_default());
        }
    }

    /// The state is one that should never occur. The guest stays stopped, the reason is shown, and the state is
    /// checked again.
    async fn stand_still(&mut self, refused: &Refused) {
        tracing::error!(vm = %self.vm.id(), %refused, "the migration stands still");
        self.say(format!("the migration stands still: {refused}"));
        self.hold().await;
        tokio::time::sleep(ASK_AGAIN).await;
    }

    /// QEMU's migration now; this also updates the report. `None` if QEMU does not answer.
    async fn look(&mut self) -> Option<Sending> {
        let qmp = self.vm.observed(|seen| seen.qmp.clone());
        let limit = self.silent_max();
        let looked = match qmp {
            Some(qmp) => {
                let query = qmp.query::<MigrateInfo>("query-migrate");
                let late = |_| Err(QmpError::Late { command: "query-migrate".to_owned() });
                tokio::time::timeout(limit, query).await.unwrap_or_else(late)
            }
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
        if !decide::is_connecting(&info) {
            self.connecting = None;
        } else if info.ram.transferred > self.record.report.transferred_bytes {
            self.connecting = self.connecting.map(|_| Instant::now());
        }
        let sending = decide::sending(&info);
        self.follow(&info, sending).await;
        self.read_figures(&info);
        if sending == Sending::Ended {
            self.ended(&decide::why_ended(&info));
        }
        Some(sending)
    }

    /// How long QEMU may be silent. Behind its handshake it is so for other reasons, as a disk that does not answer.
    fn silent_max(&self) -> Duration {
        match self.connecting {
            Some(_) if self.record.report.transferred_bytes == 0 => SILENT_MAX,
            Some(_) => CONNECT_MAX,
            None => Duration::MAX,
        }
    }

    /// Gives a connection up that does not come about, or over which the destination takes nothing. QEMU itself has no deadline for it.
    async fn bound_handshake(&mut self, qemu_answers: bool) {
        let limit = if qemu_answers { CONNECT_MAX } else { self.silent_max() };
        if self.connecting.is_none_or(|since| since.elapsed() < limit) {
            return;
        }
        if !self.machine.is_given_up() {
            let limit_s = limit.as_secs();
            let why = format!("the destination has taken nothing for {limit_s} s");
            self.give_up(Stop::Failed(why));
        }
        if !qemu_answers {
            self.cut().await;
        }
    }

    /// Gives a connection up over which nothing comes any more while the guest is stopped. QEMU fails then, and where the guest
    /// has run is found out. A QEMU that is blocked in its sending does not answer.
    async fn bound_end(&mut self, looked: Option<Sending>) {
        if matches!(looked, Some(Sending::BehindSwitch | Sending::Ending)) {
            self.ending.get_or_insert_with(Instant::now);
        }
        if self.ending.is_some_and(|since| since.elapsed() > END_MAX) {
            self.cut().await;
        }
    }

    /// A QEMU that still copies loses its connection, and only one that waits at the switch is told to cancel. QEMU up
    /// to 8.2 misses a `migrate_cancel` that comes while it goes from the one to the other, and then waits for ever
    /// with its guest stopped (`migration_maybe_pause` in its `migration.c`).
    async fn stop_sending(&mut self, sending: Sending) {
        let since = *self.stopping.get_or_insert_with(Instant::now);
        let is_late = since.elapsed() > STOP_MAX;
        if sending == Sending::Copying || is_late {
            self.is_cut |= self.cut().await;
        }
        if sending != Sending::Copying || !self.is_cut || is_late {
            // This is refused only if the migration has just ended, which the next check finds.
            let _ = self.request(QemuRequest::StopSending).await;
        }
    }

    /// Ends QEMU's connection to the destination. Returns whether it had one.
    async fn cut(&self) -> bool {
        match tunnel::end(&self.vm.dir, End::Source).await {
            Ok(true) => return true,
            Ok(false) => {}
            Err(problem) => tracing::error!(vm = %self.vm.id(), %problem, "a migration goes on"),
        }
        let to = self.order.uri.strip_prefix("tcp:").and_then(|address| address.parse().ok());
        let process = self.vm.observed(|seen| seen.process);
        let (Some(to), Some(process)) = (to, process) else { return false };
        let cut = tokio::task::spawn_blocking(move || cut::cut(&process, to)).await;
        match cut.map_err(std::io::Error::other).flatten() {
            Ok(0) => false,
            Ok(count) => {
                tracing::warn!(vm = %self.vm.id(), %to, count, "connections of QEMU are ended");
                true
            }
            Err(error) => {
                tracing::error!(vm = %self.vm.id(), %error, "QEMU's connection can't be ended");
                false
            }
        }
    }

    fn ended(&mut self, why: &str) {
        if self.stop.is_none() {
            let said = tunnel::said(&self.vm.dir, End::Source);
            let said = said.map_or_else(String::new, |said| format!(" (tunnel: {said})"));
            self.give_up(Stop::Failed(format!("{why}{said}")));
        }
    }

    /// Waits until something may have changed.
    async fn pause(&self) {
        // A timeout is also a reason to check.
        let _ = tokio::time::timeout(LOOK_AGAIN, self.nudge.notified()).await;
    }

    fn save(&self) -> Result<(), Problem> {
        let saved = self.record.save(&self.vm);
        self.publish();
        saved
    }

    /// Stores where the VM may run. If that fails, the older state on disk is the more careful one.
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
}
