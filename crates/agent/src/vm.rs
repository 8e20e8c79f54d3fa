//! One virtual machine: its published state, and the requests to its owner.
//!
//! [`owner`] is the only task that acts on the VM's QEMU. A migration's task ([`migrate`]) sends it requests.
//! [`decide`] contains the decisions, without I/O.

mod arrival;
pub mod console;
pub mod decide;
mod dirty;
pub mod guest_agent;
mod memory;
pub mod migrate;
pub mod network;
pub mod owner;
mod phases;
pub mod since;
pub mod socket;
mod start;
mod start_error;
mod strangers;
mod tls;
pub mod tpm;
pub mod tunnel;

use std::net::IpAddr;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use perigee_model::load::{MemoryUse, VmLoad};
use perigee_model::states::{Refused, VmEvent};
use perigee_model::switchover::{Arrival, Fate, Switchover};
use perigee_model::vm::{
    CancelMigration, ChangeVm, MigrateOut, MigrationPhase, MigrationReport, RenewGrant, VmChanged,
    VmReport, VmSpec, VmStatus,
};
use perigee_model::volume::{ExportStats, IoStats};
use perigee_model::waiting::{Waiting, WaitsFor};
use perigee_model::{
    DiskRole, HostId, MigrationId, Problem, ProblemKind, VmId, VmStart, VolumeName,
};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use crate::changes::{Changed, Changes};
use crate::files::{VmDir, tail};
use crate::guest::{GuestLog, Intents};
use crate::load::LastMinute;
use crate::process::Process;
use crate::qmp::{BalloonInfo, Qmp};
use phases::Moments;
use since::Since;

/// How much of the console's end is shown.
const CONSOLE_TAIL_BYTES: u64 = 64 << 10;
/// How much of QEMU's stderr becomes a reason.
const REASON_BYTES: u64 = 2000;

/// How long a guest that gives memory back is looked at, and how often.
const BALLOON_PATIENCE: Duration = Duration::from_secs(8);
const BALLOON_LOOK: Duration = Duration::from_millis(200);
/// How long a guest may take to let a disk go.
const UNPLUG_PATIENCE: Duration = Duration::from_secs(20);
/// The guest has given enough when only this differs.
const PAGES_LEFT_BYTES: u64 = 1 << 20;

/// Where the result of a request goes.
pub type Answer<T> = oneshot::Sender<Result<T, Problem>>;

/// A request to the owner.
#[derive(Debug)]
pub enum Request {
    /// Answered when the VM has started; not answered if it could not start.
    Started(Answer<()>),
    Migrate(Box<MigrateOut>, Answer<()>),
    CancelMigration(CancelMigration, Answer<()>),
    RenewGrant(RenewGrant, Answer<()>),
    Delete(Answer<()>),
    /// Changes the VM while it runs.
    Change(ChangeVm, Answer<()>),
    /// Tells the guest to power off. Answered when QEMU was told.
    PressPowerButton(Answer<()>),
    /// Asks for the fate of the VM that this migration was to bring. The VM is stopped unless it has run.
    EndUnlessRan(MigrationId, Answer<Fate>),
}

/// The state of a VM as it is known now. Only its owner and its migration write it.
#[derive(Debug)]
pub struct Observed {
    /// Changed only by [`Vm::take`].
    status: VmStatus,
    pub reason: String,
    /// Why its guest has no network, although the VM has a card.
    no_network: String,
    /// Why its guest's TPM does not answer, although the VM has one.
    no_tpm: String,
    pub process: Option<Process>,
    /// What it comes through, while it is to come by migration, if its QEMU does not listen itself.
    tunnel: Option<Process>,
    /// Whether the agent could not yet examine all processes to find the VM's.
    pub is_searched: bool,
    /// Whether the guest has run in this QEMU.
    pub arrival: Arrival,
    pub incoming_uri: Option<String>,
    pub migration: Option<MigrationReport>,
    /// Where frames for the VM wait in the pause of a move from here or to here.
    frames_to: Option<HostId>,
    /// The switchover of the last migration; `None` if its record cannot be read.
    pub switchover: Option<Switchover>,
    /// The moments of a migration from here or to here, from QEMU's events.
    pub moments: Moments,
    pub qmp: Option<Qmp>,
    /// Since when QEMU has not answered how the VM is.
    qemu_silent_since_ms: Option<u64>,
    /// The last error of a disk for which the guest stands still, and since when it has done so.
    disk_error: Option<(String, u64)>,
    /// What the disks wait for, as far as the volume server says, or because it does not answer.
    pub disks_wait: Vec<Waiting>,
}

type News = (VmStatus, String, Vec<Waiting>, bool, Option<(MigrationId, MigrationPhase)>);

impl Observed {
    /// The status as last published.
    pub fn status(&self) -> VmStatus {
        self.status
    }

    /// Why the VM is as it is, for people.
    fn told_reason(&self) -> String {
        if self.status != VmStatus::Running || !self.reason.is_empty() {
            return self.reason.clone();
        }
        let troubles = [&self.no_network, &self.no_tpm].into_iter().filter(|why| !why.is_empty());
        troubles.cloned().collect::<Vec<_>>().join("; ")
    }

    /// Whether its QEMU may be asked for figures: it runs, and answers. Requests to one that does not answer would only queue up.
    fn may_be_looked_at(&self) -> bool {
        let answers = self.qemu_silent_since_ms.is_none() && self.disks_wait.is_empty();
        answers && self.status() == VmStatus::Running
    }

    /// What the VM waits for. A disk that waits is why QEMU does not answer, and why the disk has answered with an error.
    fn waits(&self) -> Vec<Waiting> {
        if self.qemu_has_ended() || self.status == VmStatus::Shutdown {
            return Vec::new();
        }
        if !self.disks_wait.is_empty() {
            return self.disks_wait.clone();
        }
        let disk = self.disk_error.clone().filter(|_| self.status == VmStatus::IoError);
        let disk =
            disk.map(|(why, since_ms)| Waiting { waits_for: WaitsFor::Disk { why }, since_ms });
        let qemu = self.qemu_silent_since_ms;
        let qemu = qemu.map(|since_ms| Waiting { waits_for: WaitsFor::Qemu, since_ms });
        disk.or(qemu).into_iter().collect()
    }

    /// Whether QEMU has ended or was never started.
    fn qemu_has_ended(&self) -> bool {
        self.process.map_or(!self.is_searched, |process| process.has_ended())
    }

    /// The parts that are reported to watchers at once when they change. Figures that only grow are not among
    /// them.
    fn news(&self) -> News {
        let migration = self.migration.as_ref();
        (
            self.arrival.told(self.status),
            self.told_reason(),
            self.waits(),
            self.incoming_uri.is_some(),
            migration.map(|report| (report.migration.clone(), report.phase)),
        )
    }
}

/// A VM of this host: what everybody may read of it, and the way to its owner.
#[derive(Debug)]
pub struct Vm {
    /// As it was asked for.
    pub spec: VmSpec,
    since: Mutex<Since>,
    pub dir: VmDir,
    pub log: Arc<GuestLog>,
    /// What the guest is asked for.
    pub intents: Arc<Intents>,
    observed: Mutex<Observed>,
    changed: Arc<Changed>,
    requests: mpsc::Sender<Request>,
    /// QEMU has one client there at a time.
    console_is_free: Arc<Semaphore>,
    /// Places for viewers of its screen.
    viewers: Arc<Semaphore>,
    /// One question at a time.
    guest_agent_is_free: Semaphore,
    /// How often the guest was asked to let its filesystems stand still.
    freezes: AtomicU32,
    /// The address from which the host where the VM comes from has asked for the key.
    source: Mutex<Option<IpAddr>>,
    last_minute: Mutex<LastMinute>,
    memory: Mutex<Option<MemoryUse>>,
    /// Whoever asks QEMU for figures takes turns.
    looking: tokio::sync::Mutex<()>,
    dirty_bytes_per_s: Mutex<Option<u64>>,
}

impl Vm {
    fn source(&self) -> Option<IpAddr> {
        *self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host that was given the key connects from there.
    pub fn comes_from(&self, source: Option<IpAddr>) {
        *self.source.lock().unwrap_or_else(PoisonError::into_inner) = source;
    }

    /// A VM without a QEMU, and the queue of requests for its owner.
    pub fn new(
        spec: VmSpec,
        dir: VmDir,
        since: Since,
        log: GuestLog,
        status: VmStatus,
        changes: &Arc<Changes>,
    ) -> (Arc<Self>, mpsc::Receiver<Request>) {
        let (requests, queue) = mpsc::channel(16);
        let arrival = if spec.arrives_by.is_none() { Arrival::Ran } else { Arrival::Waits };
        let observed = Observed {
            status,
            reason: String::new(),
            no_network: String::new(),
            no_tpm: String::new(),
            process: None,
            tunnel: None,
            is_searched: false,
            arrival,
            incoming_uri: None,
            migration: None,
            frames_to: None,
            switchover: Some(Switchover::Source),
            moments: Moments::default(),
            qmp: None,
            qemu_silent_since_ms: None,
            disk_error: None,
            disks_wait: Vec::new(),
        };
        let changed = Arc::new(Changed::new(Arc::clone(changes)));
        log.tell(Arc::clone(&changed));
        let log = Arc::new(log);
        let (intents, observed) = (Arc::default(), Mutex::new(observed));
        let console_is_free = Arc::new(Semaphore::new(1));
        let viewers = Arc::new(Semaphore::new(console::VIEWERS_MAX));
        let guest_agent_is_free = Semaphore::new(1);
        let vm = Self {
            spec,
            since: Mutex::new(since),
            dir,
            log,
            intents,
            observed,
            changed,
            requests,
            console_is_free,
            viewers,
            guest_agent_is_free,
            freezes: AtomicU32::new(0),
            source: Mutex::default(),
            last_minute: Mutex::default(),
            memory: Mutex::default(),
            looking: tokio::sync::Mutex::default(),
            dirty_bytes_per_s: Mutex::default(),
        };
        (Arc::new(vm), queue)
    }

    /// As it is now.
    pub fn now(&self) -> VmSpec {
        self.since.lock().unwrap_or_else(PoisonError::into_inner).applied(&self.spec)
    }

    /// Changes it while it runs, in the run that is meant. A guest that is asked for memory gets some seconds to give it.
    pub async fn change(&self, start: VmStart, ask: ChangeVm) -> Result<VmChanged, Problem> {
        let here = self.spec.start;
        if !here.is_in_run_of(start) {
            let what = format!("can't change the VM {}", self.id());
            let why = format!("its start {start} is meant, and its start {here} is here");
            return Err(Problem::conflict(what, why));
        }
        let memory = match ask {
            ChangeVm::Memory { bytes } => Some(bytes),
            ChangeVm::Unplug { role } => return self.unplug(role).await,
            ChangeVm::GrowDisk { .. } | ChangeVm::Cpus { .. } | ChangeVm::Plug(_) => None,
        };
        let answer = self.ask(|answer| Request::Change(ask, answer)).await;
        answer.unwrap_or_else(|| Err(gone(self.id())))?;
        let Some(wanted) = memory else { return Ok(VmChanged::default()) };
        let begun = Instant::now();
        loop {
            let qmp = self.observed(|seen| seen.qmp.clone());
            let has = match qmp {
                Some(qmp) => qmp.query::<BalloonInfo>("query-balloon").await.ok(),
                None => None,
            };
            let has = has.map(|info| info.actual);
            if has.is_none_or(|has| has.abs_diff(wanted) < PAGES_LEFT_BYTES)
                || begun.elapsed() > BALLOON_PATIENCE
            {
                return Ok(VmChanged { memory_bytes: has });
            }
            tokio::time::sleep(BALLOON_LOOK).await;
        }
    }

    /// Asks the guest until it has let the disk go.
    async fn unplug(&self, role: DiskRole) -> Result<VmChanged, Problem> {
        let begun = Instant::now();
        loop {
            let ask = ChangeVm::Unplug { role };
            let answer = self.ask(|answer| Request::Change(ask, answer)).await;
            match answer.unwrap_or_else(|| Err(gone(self.id()))) {
                Ok(()) => return Ok(VmChanged::default()),
                Err(problem)
                    if problem.kind == ProblemKind::Conflict
                        && begun.elapsed() < UNPLUG_PATIENCE => {}
                Err(problem) => return Err(problem),
            }
            tokio::time::sleep(BALLOON_LOOK).await;
        }
    }

    /// Keeps a change that was made. Only its owner changes it.
    fn note_change(&self, change: impl FnOnce(&mut Since)) -> Result<(), Problem> {
        let mut changed = self.since.lock().unwrap_or_else(PoisonError::into_inner).clone();
        change(&mut changed);
        changed.save(&self.dir)?;
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = changed;
        Ok(())
    }

    /// The VM's name.
    pub fn id(&self) -> &VmId {
        &self.spec.vm
    }

    /// Reads or changes the state. `act` must be short and must not wait. Changes for watchers are recorded
    /// here.
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

    /// Whether it has changed since then.
    pub fn changed_since(&self, revision: u64) -> bool {
        self.changed.since(revision)
    }

    /// The VM was removed from the list: requests that wait for its changes are answered.
    pub fn is_no_more(&self) {
        self.changed.note();
    }

    /// Changes the VM's status after an event. An event that is not possible is a fault of the agent: it is
    /// logged and changes nothing.
    pub fn take(&self, event: VmEvent, qemu_says: &str) {
        let changed = self.observed(|seen| {
            let before = seen.status;
            seen.status = before.next(event)?;
            Ok((before, seen.status))
        });
        match changed {
            Ok((before, after)) if before != after => {
                tracing::info!(vm = %self.id(), ?before, ?after, qemu_says, "status");
            }
            Ok(_) => {}
            Err::<_, Refused>(refused) => {
                tracing::error!(vm = %self.id(), %refused, qemu_says, "the VM is not as expected");
            }
        }
    }

    /// The status as last published.
    pub fn status(&self) -> VmStatus {
        self.observed(|seen| seen.status)
    }

    /// Whether its QEMU is known to have ended.
    pub fn qemu_has_ended(&self) -> bool {
        self.observed(|seen| seen.qemu_has_ended())
    }

    /// `boot_id` is the host's; `stats` are the figures of its volume server.
    pub fn report(&self, boot_id: &str, stats: &[ExportStats]) -> VmReport {
        let spec = self.now();
        let io = select_stats(stats, spec.disks.iter().map(|disk| &disk.volume));
        // This is read first, so that later changes are reported the next time.
        let revision = self.changed.last();
        self.observed(|seen| {
            let live = seen.process.filter(|process| !process.has_ended());
            VmReport {
                spec,
                status: seen.arrival.told(seen.status),
                reason: seen.told_reason(),
                waits: seen.waits(),
                boot_id: boot_id.to_owned(),
                qemu_pid: seen.process.map_or(0, |process| process.pid),
                uptime_ms: live.map_or(0, |process| process.uptime_ms()),
                vcpu_ms: live.map_or(0, |process| process.vcpu_ms()),
                load: self.load(live),
                incoming_uri: seen.incoming_uri.clone(),
                migration: seen.migration.clone(),
                resume_us: seen.moments.resume_us(),
                last_seq: self.log.last_seq(),
                revision,
                io,
                sent: Vec::new(),
            }
        })
    }

    /// Looks at what the vCPUs have of the host's CPUs.
    pub fn look_at_load(&self) {
        let live = self.observed(|seen| seen.process.filter(|process| !process.has_ended()));
        let times = live.and_then(|process| process.vcpu_times());
        let mut minute = self.last_minute.lock().unwrap_or_else(PoisonError::into_inner);
        minute.take(std::time::Instant::now(), times);
    }

    /// The load that this QEMU puts on the host; nothing is known without one.
    fn load(&self, live: Option<Process>) -> VmLoad {
        let memory = live.and_then(|_| self.memory_use());
        let dirty_bytes_per_s = live.and_then(|_| self.dirty_rate());
        let Some(times) = live.and_then(|process| process.vcpu_times()) else {
            return VmLoad { memory, dirty_bytes_per_s, ..VmLoad::default() };
        };
        let minute = self.last_minute.lock().unwrap_or_else(PoisonError::into_inner);
        VmLoad {
            run_delay_ms: Some(times.waiting_ns / 1_000_000),
            longest_run_delay_ms: Some(times.longest_waiting_ns / 1_000_000),
            vcpus_1m: minute.vcpus(),
            memory,
            dirty_bytes_per_s,
        }
    }

    /// QEMU's last output on stderr.
    pub fn last_words(&self) -> String {
        let text = tail(&self.dir.log(), REASON_BYTES).unwrap_or_default();
        String::from_utf8_lossy(&text).trim().to_owned()
    }

    /// Queues a request and waits for the owner's answer. `None`: the VM does not exist any more.
    pub async fn ask<T>(
        &self,
        make: impl FnOnce(Answer<T>) -> Request,
    ) -> Option<Result<T, Problem>> {
        let (answer, answered) = oneshot::channel();
        self.requests.send(make(answer)).await.ok()?;
        answered.await.ok()
    }
}

/// The figures of some volumes, in their order. A volume that the server does not know has zeros; the result is
/// empty if the server did not answer.
fn select_stats<'a>(
    all: &[ExportStats],
    volumes: impl Iterator<Item = &'a VolumeName>,
) -> Vec<IoStats> {
    if all.is_empty() {
        return Vec::new();
    }
    let of = |volume: &VolumeName| all.iter().find(|stats| stats.volume == *volume);
    volumes.map(|volume| of(volume).map_or_else(IoStats::default, |found| found.stats)).collect()
}

/// The answer if the VM was deleted during the request.
pub fn gone(id: &VmId) -> Problem {
    Problem::not_found(format!("can't ask the VM {id}"), "it was deleted in the meantime")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_stand_in_the_order_of_the_disks() {
        let volume = |name: &str| VolumeName::new(name).unwrap();
        let stats = |name: &str, reads| ExportStats {
            volume: volume(name),
            stats: IoStats { reads, ..IoStats::default() },
        };
        let all = [stats("b", 2), stats("a", 1)];
        let wanted = [volume("a"), volume("new"), volume("b")];
        let reads: Vec<u64> = select_stats(&all, wanted.iter()).iter().map(|s| s.reads).collect();
        assert_eq!(reads, [1, 0, 2]);
        assert!(select_stats(&[], wanted.iter()).is_empty());
    }
}
