//! An outgoing migration, from the order to its end, also across a restart of the agent.
//!
//! ```text
//! begin -> copying -> paused: raise the epochs -> let go -> completed
//!     \_______\______________\____________________\-> fall_back: failed or cancelled
//! ```
//!
//! QEMU pauses the guest before the switch (`pause-before-switchover`). In this pause every
//! volume's writer epoch is raised at its home, so that from then on only the destination may
//! write. What was begun is written down before it is done ([`Record`]), because the record says
//! who may run the guest after a crash:
//!
//! - `raising` false: the source may.
//! - `raising`, not `let_go`: the destination never got the last state. Once QEMU has stopped
//!   sending it never will; the epochs go back and the source runs.
//! - `let_go`: the destination may have it. Only when its agent says that the guest did not run
//!   there, and its QEMU is gone, the epochs go back. If the guest did run there, the migration
//!   has succeeded, whatever the source's QEMU thinks. While the destination's agent does not
//!   answer, nobody knows, and the guest stays paused here.
//!
//! QEMU's `return-path` makes `completed` mean that the destination has loaded everything.

mod steps;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use perigee_model::Problem;
use perigee_model::states::{WriteRight, WriteRightEvent};
use perigee_model::vm::{MigrateOut, MigrationPhase, MigrationReport, VmStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::Vm;
use super::decide::{self, Copying, Sending};
use crate::files;
use crate::qmp::{MigrateInfo, QmpError, StatusInfo};

/// How often the figures are read; a change of state is told by an event.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// How long the owner may take to connect again to a monitor that closed.
const RECONNECT_DEADLINE: Duration = Duration::from_secs(30);
const RESUME_DEADLINE: Duration = Duration::from_secs(30);

/// What must survive the agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    pub order: MigrateOut,
    pub report: MigrationReport,
    /// From before the first raise until every epoch is back.
    raising: bool,
    /// From before QEMU may send the last state. On disk it is set with `raising`, in one write,
    /// because the guest waits for it; a QEMU that is still before the switch tells the difference.
    let_go: bool,
}

impl Record {
    pub fn new(order: MigrateOut) -> Self {
        let report = MigrationReport::new(order.migration.clone(), MigrationPhase::Setup);
        Self { order, report, raising: false, let_go: false }
    }

    pub fn load(vm: &Vm) -> Option<Self> {
        files::read_json(&vm.dir.migration()).unwrap_or_else(|problem| {
            tracing::error!(%problem, "the record of a migration is lost");
            None
        })
    }

    pub fn save(&self, vm: &Vm) -> Result<(), Problem> {
        files::write_json(&vm.dir.migration(), self)
    }

    pub fn is_completed(&self) -> bool {
        self.report.phase == MigrationPhase::Completed
    }

    fn write_right(&self) -> WriteRight {
        if self.raising { WriteRight::Destination } else { WriteRight::Source }
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

/// Runs a migration to its end. `resumed`: an agent that ran before has begun it.
pub async fn run(
    vm: Arc<Vm>,
    record: Record,
    resumed: bool,
    cancel: Arc<AtomicBool>,
    nudge: Arc<Notify>,
) {
    let homes = record.order.epochs.iter().cloned().map(steps::Home::new).collect();
    let mut outgoing = Outgoing { vm, record, homes, cancel, nudge };
    let end = match outgoing.send(resumed).await {
        Ok(()) => MigrationPhase::Completed,
        Err(stop) => outgoing.fall_back(stop).await,
    };
    outgoing.finish(end).await;
}

struct Outgoing {
    vm: Arc<Vm>,
    record: Record,
    homes: Vec<steps::Home>,
    cancel: Arc<AtomicBool>,
    nudge: Arc<Notify>,
}

impl Outgoing {
    async fn send(&mut self, resumed: bool) -> Result<(), Stop> {
        if !resumed {
            self.greet_homes().await?;
            self.begin().await?;
        }
        match self.copy().await? {
            Copying::Completed => return Ok(()),
            Copying::BehindSwitch => {}
            _ => {
                self.note_switch()?;
                self.raise_epochs().await?;
                self.let_go().await?;
            }
        }
        self.wait_for_arrival().await
    }

    async fn begin(&mut self) -> Result<(), Stop> {
        let on = |name: &str| json!({"capability": name, "state": true});
        let capabilities =
            ["pause-before-switchover", "return-path", "events", "auto-converge"].map(on);
        self.execute("migrate-set-capabilities", json!({"capabilities": capabilities})).await?;
        let parameters = json!({
            "downtime-limit": self.record.order.downtime_limit_ms.clamp(1, 2_000_000),
            // In bytes per second: what the link gives. The default would be 128 MiB/s.
            "max-bandwidth": 1_u64 << 40,
        });
        self.execute("migrate-set-parameters", parameters).await?;
        self.execute("migrate", json!({"uri": self.record.order.uri})).await?;
        self.enter(MigrationPhase::Copying)
    }

    /// Until the pause, or until there is nothing more to do in it.
    async fn copy(&mut self) -> Result<Copying, Stop> {
        loop {
            let next = decide::while_copying(&self.look().await?);
            match next {
                Copying::Ended(why) if self.is_cancelled() => {
                    tracing::debug!(why, "QEMU stopped sending");
                    return Err(Stop::Cancelled);
                }
                Copying::Ended(why) => return Err(Stop::Failed(why)),
                Copying::Completed | Copying::BehindSwitch => return Ok(next),
                _ if self.is_cancelled() => return Err(Stop::Cancelled),
                Copying::AtSwitch => return Ok(next),
                Copying::GoOn => self.pause().await,
            }
        }
    }

    /// Writes down what comes now, before any of it is done.
    fn note_switch(&mut self) -> Result<(), Stop> {
        (self.record.raising, self.record.let_go) = (true, true);
        let noted = self.enter(MigrationPhase::Switching);
        self.record.raising = noted.is_ok();
        self.record.let_go = false;
        noted
    }

    /// The point of no simple return.
    async fn let_go(&mut self) -> Result<(), Stop> {
        if self.is_cancelled() {
            return Err(Stop::Cancelled);
        }
        self.record.let_go = true;
        self.execute("migrate-continue", json!({"state": "pre-switchover"})).await?;
        Ok(())
    }

    async fn wait_for_arrival(&mut self) -> Result<(), Stop> {
        loop {
            match decide::while_copying(&self.look().await?) {
                Copying::Completed => return Ok(()),
                Copying::Ended(why) => return Err(Stop::Failed(why)),
                _ => self.pause().await,
            }
        }
    }

    /// The one failure path: ends with the guest running here, or known to run there.
    async fn fall_back(&mut self, stop: Stop) -> MigrationPhase {
        tracing::warn!(vm = %self.vm.id(), %stop, "the migration is given up");
        self.say(stop.to_string());
        if self.stop_sending().await == Sending::Completed {
            return MigrationPhase::Completed;
        }
        let mut right = self.record.write_right();
        if right != WriteRight::Source {
            if self.record.let_go && self.destination_ran(&stop).await {
                return MigrationPhase::Completed;
            }
            right = right.next(WriteRightEvent::DestinationGone).unwrap_or(right);
            self.flip_back(&stop).await;
            right = right.next(WriteRightEvent::FlippedBack).unwrap_or(right);
        }
        self.say(stop.to_string());
        if right.may_source_run() {
            self.record.raising = false;
            self.record.let_go = false;
            if let Err(problem) = self.record.save(&self.vm) {
                tracing::error!(%problem, "the end of a migration is not written down");
            }
            self.run_again().await;
        }
        match stop {
            Stop::Cancelled => MigrationPhase::Cancelled,
            Stop::Failed(_) => MigrationPhase::Failed,
        }
    }

    async fn finish(&mut self, end: MigrationPhase) {
        if end == MigrationPhase::Completed {
            self.final_figures().await;
            // The guest runs elsewhere: also where this QEMU thinks that it failed.
            self.hold().await;
            self.vm.observed(|seen| {
                seen.status = VmStatus::Migrated;
                seen.reason.clear();
            });
            self.say(String::new());
        }
        if let Err(stop) = self.enter(end) {
            tracing::error!(%stop, "the end of a migration is not written down");
        }
        tracing::info!(vm = %self.vm.id(), ?end, "the migration has ended");
    }

    /// Makes QEMU stop sending and waits until it has; a QEMU that has ended has stopped.
    async fn stop_sending(&mut self) -> Sending {
        loop {
            let info = match self.look().await {
                Ok(info) => info,
                Err(_) if !self.qemu_is_alive() => return Sending::Ended,
                Err(stop) => {
                    // A QEMU that waits for a disk does not answer, and may still be sending.
                    tracing::warn!(vm = %self.vm.id(), %stop, "QEMU is asked again");
                    self.pause().await;
                    continue;
                }
            };
            match decide::while_stopping(&info.status) {
                end @ (Sending::Completed | Sending::Ended) => return end,
                Sending::Ending => {}
                Sending::Active => {
                    // Refused only when it has just ended, which the next look tells.
                    let _ = self.execute("migrate_cancel", json!({})).await;
                }
            }
            self.pause().await;
        }
    }

    /// Makes the guest run, whatever state QEMU left it in.
    async fn run_again(&mut self) {
        let deadline = tokio::time::Instant::now() + RESUME_DEADLINE;
        while self.qemu_is_alive() {
            let status = self.execute("query-status", json!({})).await.unwrap_or_default();
            let info: StatusInfo = serde_json::from_value(status).unwrap_or_default();
            match info.status.as_str() {
                "running" | "shutdown" => return,
                // From here on the owner tries, as with any disk error.
                "io-error" if tokio::time::Instant::now() > deadline => return,
                _ => {}
            }
            // Refused while QEMU is still on its way out of the migration.
            let _ = self.execute("cont", json!({})).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn qemu_is_alive(&self) -> bool {
        self.vm.observed(|seen| seen.process).is_some_and(|process| process.is_alive())
    }

    /// Makes sure that the guest does not run here.
    async fn hold(&mut self) {
        // Without a QEMU it does not run either.
        let _ = self.execute("stop", json!({})).await;
    }

    /// QEMU's migration now, with the report brought up to date.
    async fn look(&mut self) -> Result<MigrateInfo, Stop> {
        let answer = self.execute("query-migrate", json!({})).await?;
        let info: MigrateInfo = serde_json::from_value(answer)
            .map_err(|e| Stop::Failed(format!("QEMU's answer to query-migrate: {e}")))?;
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
        Ok(info)
    }

    /// QEMU works out the times just after it has said that it completed.
    async fn final_figures(&mut self) {
        for _ in 0..50 {
            match self.look().await {
                Ok(info) if info.status == "completed" && info.total_time == 0 => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
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

    fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::SeqCst)
    }

    fn enter(&mut self, phase: MigrationPhase) -> Result<(), Stop> {
        self.record.report.phase = phase;
        let saved = self.record.save(&self.vm);
        self.publish();
        Ok(saved?)
    }

    fn say(&mut self, reason: String) {
        self.record.report.reason = reason;
        self.publish();
    }

    fn publish(&self) {
        self.vm.observed(|seen| seen.migration = Some(self.record.report.clone()));
    }

    /// Sends a command on the owner's connection; waits for a new one when it has closed.
    async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let deadline = tokio::time::Instant::now() + RECONNECT_DEADLINE;
        loop {
            let qmp = self.vm.observed(|seen| seen.qmp.clone());
            if let Some(qmp) = qmp {
                match qmp.execute(command, arguments.clone()).await {
                    Err(QmpError::Closed) => {}
                    other => return other,
                }
            }
            if !self.qemu_is_alive() || tokio::time::Instant::now() > deadline {
                return Err(QmpError::Closed);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Megabits to bytes.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a measured rate: neither negative nor near 2^64"
)]
fn bits_to_bytes(megabits: f64) -> u64 {
    (megabits * 1e6 / 8.0) as u64
}
