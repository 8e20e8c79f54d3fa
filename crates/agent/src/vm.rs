//! One virtual machine: what others see of it, and what they may ask its owner.
//!
//! [`owner`] is the one task that acts on the VM's QEMU. It lends the power to act to
//! [`migrate`] while the VM is paused in a migration. [`decide`] holds what is decided, without I/O.

pub mod decide;
pub mod migrate;
pub mod owner;
mod start;

use std::sync::{Arc, Mutex, PoisonError};

use perigee_model::vm::{MigrateOut, MigrationPhase, MigrationReport, VmReport, VmSpec, VmStatus};
use perigee_model::volume::ExportStats;
use perigee_model::{MigrationId, Problem, VmId};
use tokio::sync::{mpsc, oneshot};

use crate::changes::{Changed, Changes};
use crate::files::{VmDir, tail};
use crate::guest::GuestLog;
use crate::host::select_stats;
use crate::process::Process;
use crate::qmp::Qmp;

/// How much of the console is shown.
const CONSOLE_TAIL_BYTES: u64 = 64 << 10;
/// How much of QEMU's stderr becomes a reason.
const REASON_BYTES: u64 = 2000;

type Answer = oneshot::Sender<Result<(), Problem>>;

/// What the owner is asked to do.
#[derive(Debug)]
pub enum Request {
    /// Answered when the VM has started, and not at all when it could not.
    Started(Answer),
    Migrate(Box<MigrateOut>, Answer),
    CancelMigration(Answer),
    /// With `unless_ran`: refused when the guest has run here.
    Delete {
        unless_ran: bool,
        answer: Answer,
    },
}

/// What is known of a VM now; written by its owner and its migration only.
#[derive(Debug)]
pub struct Observed {
    pub status: VmStatus,
    pub reason: String,
    pub process: Option<Process>,
    /// The guest has run in this QEMU.
    pub ran: bool,
    pub incoming_uri: Option<String>,
    pub migration: Option<MigrationReport>,
    pub qmp: Option<Qmp>,
}

impl Observed {
    /// What others are told at once when it changes; figures that only grow are not among it.
    fn news(&self) -> (VmStatus, String, bool, Option<(MigrationId, MigrationPhase)>) {
        let migration = self.migration.as_ref();
        (
            self.status,
            self.reason.clone(),
            self.incoming_uri.is_some(),
            migration.map(|report| (report.migration.clone(), report.phase)),
        )
    }
}

#[derive(Debug)]
pub struct Vm {
    pub spec: VmSpec,
    pub dir: VmDir,
    pub log: Arc<GuestLog>,
    observed: Mutex<Observed>,
    changed: Arc<Changed>,
    requests: mpsc::Sender<Request>,
}

impl Vm {
    pub fn new(
        spec: VmSpec,
        dir: VmDir,
        log: GuestLog,
        changes: &Arc<Changes>,
    ) -> (Arc<Self>, mpsc::Receiver<Request>) {
        let (requests, queue) = mpsc::channel(16);
        let observed = Observed {
            status: VmStatus::Starting,
            reason: String::new(),
            process: None,
            ran: !spec.incoming,
            incoming_uri: None,
            migration: None,
            qmp: None,
        };
        let changed = Arc::new(Changed::new(Arc::clone(changes)));
        log.tell(Arc::clone(&changed));
        let log = Arc::new(log);
        let vm = Self { spec, dir, log, observed: Mutex::new(observed), changed, requests };
        (Arc::new(vm), queue)
    }

    pub fn id(&self) -> &VmId {
        &self.spec.vm
    }

    /// Reads or changes what is known; short, and without waiting inside. What is news to others is
    /// noted here, for all who change it.
    pub fn observed<T>(&self, act: impl FnOnce(&mut Observed) -> T) -> T {
        let mut seen = self.observed.lock().unwrap_or_else(PoisonError::into_inner);
        let before = seen.news();
        let answer = act(&mut seen);
        let changed = before != seen.news();
        drop(seen);
        if changed {
            self.changed.note();
        }
        answer
    }

    /// Whether there is news of it since then.
    pub fn changed_since(&self, revision: u64) -> bool {
        self.changed.since(revision)
    }

    pub fn report(&self, stats: &[ExportStats]) -> VmReport {
        let volumes = self.spec.disks.iter().map(|disk| &disk.volume);
        let io = select_stats(stats, volumes);
        self.observed(|seen| {
            let live = seen.process.filter(Process::is_alive);
            VmReport {
                spec: self.spec.clone(),
                status: seen.status,
                reason: seen.reason.clone(),
                qemu_pid: seen.process.map_or(0, |process| process.pid),
                uptime_ms: live.map_or(0, |process| process.uptime_ms()),
                vcpu_ms: live.map_or(0, |process| process.vcpu_ms()),
                waiting_ms: live.and_then(|process| process.vcpu_waiting_ms()),
                incoming_uri: seen.incoming_uri.clone(),
                migration: seen.migration.clone(),
                last_seq: self.log.last_seq(),
                io,
            }
        })
    }

    pub fn console(&self) -> Result<String, Problem> {
        let text = tail(&self.dir.console(), CONSOLE_TAIL_BYTES)
            .map_err(|e| Problem::internal(format!("read the console of {}", self.id()), e))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// What QEMU said last on stderr.
    pub fn last_words(&self) -> String {
        let text = tail(&self.dir.log(), REASON_BYTES).unwrap_or_default();
        String::from_utf8_lossy(&text).trim().to_owned()
    }

    /// Queues a request and waits for the owner's answer. `None`: the VM is no more.
    pub async fn ask(&self, make: impl FnOnce(Answer) -> Request) -> Option<Result<(), Problem>> {
        let (answer, answered) = oneshot::channel();
        self.requests.send(make(answer)).await.ok()?;
        answered.await.ok()
    }
}
