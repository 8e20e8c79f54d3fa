//! Live migrations: one task each, which alone writes the migration's record.
//!
//! ```text
//! preparing   epochs issued, volumes attached, the destination's QEMU waits
//! copying     the source sends memory
//! switching   the source is paused, epochs are raised, the rest is sent
//! completed | aborted
//! ```
//!
//! The source's agent does the sending and the epochs; here its work is prepared and watched.
//! What happened is judged from what both agents say ([`judge()`]), so a controller that was away in
//! the middle judges as if it had been there. Once the source was asked, only what an agent says
//! ends a migration. One that takes too long is called off at the source, which then says so.
//! A host that a person removed is dead: it is not waited for. The other agent decides, and the VM's
//! job takes the write right from whatever may still run ([`crate::jobs`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use perigee_model::job::{Migration, MigrationState};
use perigee_model::phases::{DOWNTIME_LIMIT_FIRST_MS, Phases, Prepare, copy_left_s};
use perigee_model::states::MigrationEvent;
use perigee_model::switchover::{Fate, Seen, SeenVm, Verdict, judge};
use perigee_model::vm::{
    CancelMigration, Disk, EndUnlessRan, EpochRaise, LinkProbe, MigrateOut, MigrationPhase,
    MigrationReport, VmReport, VmSpec, VmStatus,
};
use perigee_model::{HostId, MigrationId, Problem, ProblemKind, VmId};
use perigee_planner::queue::Demand;

use crate::cleaner;
use crate::cluster::{Cluster, HostLink, capacity, now_ms};
use crate::jobs;
use crate::records::{
    JobRecord, MigrationIntent, MigrationRecord, MovePlan, Owned, PlacedDisk, migration_intent_key,
    migration_prefix, vm_of,
};
use crate::{catalog, disks, links, planning};

/// From the destination's start until it listens.
const LISTEN_DEADLINE: Duration = Duration::from_secs(60);

/// A migration that takes longer does not converge: it is called off. The time while no controller
/// looked does not count.
const TOTAL_MAX: Duration = Duration::from_secs(15 * 60);

/// So near to the end of the copying it is looked at more often.
const NEAR_END_S: f64 = 1.0;

/// How long the end of a migration waits for the destination to say that the VM runs.
const RUN_DEADLINE: Duration = Duration::from_secs(3);

/// A source that holds its guest because it cannot learn what became of it at a removed destination is
/// given up after this time.
const HELD_MAX: Duration = Duration::from_secs(30);

/// Why a migration ended that a person did not want any more.
const CANCELLED: &str = "cancelled";

/// Gives the time since the lap before.
struct Stopwatch(Instant);

impl Stopwatch {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn lap_ms(&mut self) -> u64 {
        let lap = self.0.elapsed();
        self.0 += lap;
        u64::try_from(lap.as_millis()).unwrap_or(u64::MAX)
    }
}

/// A migration somebody wants.
#[derive(Debug, Clone)]
pub struct Wish {
    pub to: HostId,
    pub reason: String,
    pub predicted_s: Option<f64>,
    pub job_progress: Option<f64>,
}

/// Takes the room at the destination, records the migration and starts its driver.
///
/// # Errors
/// `Conflict` when the VM cannot move now, `Unavailable` when the destination does not answer.
pub async fn request(
    cluster: &Arc<Cluster>,
    job: &JobRecord,
    wish: Wish,
) -> Result<Migration, Problem> {
    let vm = vm_of(&job.job.id);
    let refusal = |why: String| Problem::conflict(format!("move VM {vm} to {}", wish.to), why);
    let refuse = |why: String| Err(refusal(why));
    let Some(from) = job.job.host.clone() else { return refuse("it is on no host yet".into()) };
    if !job.vm_started || job.ending.is_some() || job.finished.is_some() {
        return refuse(format!("its job is {:?}", job.job.state).to_lowercase());
    }
    if job.leaving.is_some() {
        return refuse("its job begins anew".into());
    }
    if from == wish.to {
        return refuse("it is there already".into());
    }
    let earlier: Vec<MigrationRecord> = cluster.records.list(&migration_prefix(&vm)).await?;
    if earlier.iter().any(|r| !r.migration.state.is_final() || r.number > job.settled) {
        return refuse("it is being moved already".into());
    }
    // What it left goes to the cleaner in the job's next step.
    if job.left.as_ref() == Some(&wish.to)
        || cleaner::is_pending(cluster, &job.job.id, &wish.to).await?
    {
        let why = "what an earlier move left there is not removed yet";
        return Err(refusal(why.into()).next("try again in some seconds"));
    }
    catalog::reachable(cluster, &wish.to)?;
    planning::can_move(cluster, &from, &wish.to)?;
    let Some(report) = cluster.hosts.report(&wish.to) else {
        let what = format!("move VM {vm} to {}", wish.to);
        return Err(Problem::unavailable(what, "the host has not reported yet"));
    };
    let number = earlier.last().map_or(1, |record| record.number + 1);
    let link = links::toward(cluster, &from, &wish.to);
    let record = new_record(&vm, number, from, wish, link)?;
    // Not part of the request: one that is dropped leaves no migration without a driver.
    let made = tokio::spawn(begin(Arc::clone(cluster), record, capacity(&report)));
    made.await.map_err(|e| Problem::internal(format!("move VM {vm}"), e))?
}

async fn begin(
    cluster: Arc<Cluster>,
    record: MigrationRecord,
    total: Demand,
) -> Result<Migration, Problem> {
    let (vm, to) = (&record.migration.vm, &record.migration.to);
    let refusal = |why: String| Problem::conflict(format!("move VM {vm} to {to}"), why);
    let _moving = cluster.index.begin_move(vm, to, total).map_err(refusal)?;
    if !cluster.create_migration(&record).await? {
        return Err(refusal("it is being moved already".to_owned()));
    }
    cluster.drive_migration(&record);
    Ok(record.migration)
}

pub(crate) fn new_record(
    vm: &VmId,
    number: u32,
    from: HostId,
    wish: Wish,
    link: Option<LinkProbe>,
) -> Result<MigrationRecord, Problem> {
    let id = MigrationId::new(format!("{vm}-m{number}"))
        .map_err(|e| Problem::internal("name a migration", e))?;
    let migration = Migration {
        id,
        vm: vm.clone(),
        from,
        to: wish.to,
        state: MigrationState::Preparing,
        reason: wish.reason,
        error: String::new(),
        started_ms: now_ms(),
        ended_ms: None,
        predicted_total_ms: wish.predicted_s.map(planning::milliseconds),
        total_ms: 0,
        downtime_ms: 0,
        bytes: 0,
        job_progress: wish.job_progress,
        link,
        phases: Phases::default(),
        remaining_bytes: 0,
        rate_bytes_per_s: 0,
        dirty_bytes_per_s: 0,
    };
    Ok(MigrationRecord {
        migration,
        number,
        plan: None,
        asked_source: false,
        io_before: Vec::new(),
        watched_ms: 0,
    })
}

/// Calls off the VM's migration, wherever it is: the VM stays at its source, unless it has arrived.
///
/// # Errors
/// `Conflict` when none is under way.
pub async fn cancel(cluster: &Cluster, vm: &VmId) -> Result<Migration, Problem> {
    let all: Vec<MigrationRecord> = cluster.records.list(&migration_prefix(vm)).await?;
    let Some(record) = all.into_iter().next_back().filter(|r| !r.migration.state.is_final()) else {
        let what = format!("cancel the migration of VM {vm}");
        return Err(Problem::conflict(what, "none is under way"));
    };
    let cancel = |intent: Option<MigrationIntent>| MigrationIntent {
        cancel: true,
        ..intent.unwrap_or_default()
    };
    cluster.records.update(&migration_intent_key(vm, record.number), cancel).await?;
    Ok(record.migration)
}

/// The VM's migrations, the oldest first.
pub async fn of_vm(cluster: &Cluster, vm: &VmId) -> Result<Vec<Migration>, Problem> {
    let all: Vec<MigrationRecord> = cluster.records.list(&migration_prefix(vm)).await?;
    Ok(all.into_iter().map(|record| record.migration).collect())
}

/// When the VM's last migration was aborted, if the last one was.
pub fn last_abort_ms(cluster: &Cluster, vm: &VmId) -> Option<u64> {
    let all = cluster.index.migrations_of(vm);
    let last = all.last().filter(|r| r.migration.state == MigrationState::Aborted);
    last.and_then(|record| record.migration.ended_ms)
}

/// Drives a migration to its end.
///
/// # Errors
/// When the store fails; whoever calls tries again.
pub async fn drive(cluster: Arc<Cluster>, vm: VmId, number: u32) -> Result<(), Problem> {
    let intent_key = migration_intent_key(&vm, number);
    let mut intents = cluster.records.watch(&intent_key);
    loop {
        let Some(record) = cluster.own_migration(&vm, number).await? else {
            return Ok(());
        };
        let mut run = Run {
            cluster: Arc::clone(&cluster),
            vm: vm.clone(),
            earlier: Duration::from_millis(record.value.watched_ms),
            begun: Instant::now(),
            record,
            cancel: false,
        };
        if run.state().is_final() {
            return Ok(());
        }
        let intent: Option<MigrationIntent> = cluster.records.read(&intent_key).await?;
        let intent = intent.unwrap_or_default();
        if intent.abandon {
            // The job takes both VMs down itself.
            return run.abort("its job ended".to_owned()).await;
        }
        if intent.cancel && !run.record.value.asked_source {
            return run.abort(CANCELLED.to_owned()).await;
        }
        run.cancel = intent.cancel;
        let ended = tokio::select! {
            ended = run.phases() => ended,
            _ = intents.next() => continue,
        };
        match ended {
            Ok(()) => {}
            Err(problem) if run.record.value.asked_source => return Err(problem),
            Err(problem) => run.give_up(&problem).await?,
        }
    }
}

struct Run {
    cluster: Arc<Cluster>,
    vm: VmId,
    record: Owned<MigrationRecord>,
    /// A person wants the VM to stay; the source is told.
    cancel: bool,
    begun: Instant,
    /// For how long controllers looked that ran before.
    earlier: Duration,
}

/// What an agent says of the VM.
enum Told {
    Vm(Box<VmReport>),
    NotThere,
    NotKnown,
    /// The host was removed: nobody is asked.
    Removed,
}

impl Told {
    fn seen(&self) -> Seen<'_> {
        match self {
            Self::Vm(report) => Seen::Vm(SeenVm {
                status: report.status,
                outgoing: self.outgoing().map(|own| (&own.migration, own.phase)),
                arrives_by: report.spec.arrives_by.as_ref(),
            }),
            // Whatever still runs there loses its right to write before the job goes on.
            Self::NotThere | Self::Removed => Seen::NotThere,
            Self::NotKnown => Seen::NotKnown,
        }
    }

    fn outgoing(&self) -> Option<&MigrationReport> {
        match self {
            Self::Vm(report) => report.migration.as_ref(),
            Self::NotThere | Self::NotKnown | Self::Removed => None,
        }
    }
}

impl Run {
    /// Each phase can be done again after a restart. An error before the source was asked
    /// ends the migration in [`Run::give_up`]; afterwards only what both agents say ends it.
    async fn phases(&mut self) -> Result<(), Problem> {
        if !self.record.value.asked_source {
            self.prepare().await?;
            self.record.value.asked_source = true;
            self.record.save().await?;
        }
        self.watch_over().await
    }

    /// Everything before the source is asked, and how long each part took.
    async fn prepare(&mut self) -> Result<(), Problem> {
        let mut watch = Stopwatch::start();
        self.plan().await?;
        let epochs_ms = watch.lap_ms();
        self.attach_disks().await?;
        let attach_ms = watch.lap_ms();
        if !self.start_destination().await? {
            self.await_listening().await?;
        }
        let qemu_ms = watch.lap_ms();
        let prepare = Prepare { epochs_ms, attach_ms, qemu_ms, begin_ms: 0 };
        self.record.value.migration.phases.prepare = Some(prepare);
        Ok(())
    }

    fn state(&self) -> MigrationState {
        self.record.value.migration.state
    }

    fn source(&self) -> Result<Arc<HostLink>, Problem> {
        self.cluster.hosts.get(&self.record.value.migration.from)
    }

    fn destination(&self) -> Result<Arc<HostLink>, Problem> {
        self.cluster.hosts.get(&self.record.value.migration.to)
    }

    fn path(&self) -> String {
        format!("/v1/vms/{}", self.vm)
    }

    async fn disks(&self) -> Result<Vec<PlacedDisk>, Problem> {
        let job = jobs::of_vm(&self.cluster, &self.vm);
        job.and_then(|job| job.placement.clone())
            .map(|placement| placement.disks)
            .ok_or_else(|| Problem::conflict(format!("move VM {}", self.vm), "its job has ended"))
    }

    /// A new epoch for every disk that the VM writes.
    async fn plan(&mut self) -> Result<(), Problem> {
        if self.record.value.plan.is_some() {
            return Ok(());
        }
        let disks = self.disks().await?;
        let report: VmReport = self.source()?.agent.get(&self.path()).await?;
        let arrives_by = Some(self.record.value.migration.id.clone());
        let mut spec = VmSpec { arrives_by, ..report.spec };
        let written = spec.disks.iter_mut().filter(|disk| !disk.read_only);
        let raises = try_join_all(written.map(|disk| self.issue(disk, &disks))).await?;
        self.record.value.plan = Some(MovePlan { spec, raises });
        self.record.save().await
    }

    /// Gives a disk its next epoch, issued at its volume's home.
    async fn issue(&self, disk: &mut Disk, placed: &[PlacedDisk]) -> Result<EpochRaise, Problem> {
        let placed =
            placed.iter().find(|placed| placed.volume == disk.volume).ok_or_else(|| {
                Problem::internal(format!("move VM {}", self.vm), "it has a disk of no job")
            })?;
        let home = catalog::reachable(&self.cluster, &placed.home)?;
        let from = disk.epoch;
        disk.epoch = disks::issue_epoch(&home, placed).await?;
        Ok(EpochRaise {
            volume: disk.volume.clone(),
            volume_url: home.addresses.volume_url.clone(),
            from,
            to: disk.epoch,
        })
    }

    fn planned(&self) -> Result<&MovePlan, Problem> {
        self.record.value.plan.as_ref().ok_or_else(|| {
            Problem::internal(format!("move VM {}", self.vm), "its epochs are not issued")
        })
    }

    async fn attach_disks(&self) -> Result<(), Problem> {
        disks::attach(&self.cluster, &self.disks().await?, &self.record.value.migration.to).await
    }

    /// Starts the QEMU that waits; says whether it listens already.
    async fn start_destination(&mut self) -> Result<bool, Problem> {
        let destination = self.destination()?;
        let spec = self.planned()?.spec.clone();
        let report: VmReport = destination.agent_slow.put(&self.path(), &spec).await?;
        let listens = report.incoming_uri.is_some();
        if self.record.value.io_before.is_empty() {
            self.record.value.io_before = report.io;
            self.record.save().await?;
        }
        Ok(listens)
    }

    /// Waits until the destination can be connected to.
    async fn await_listening(&self) -> Result<(), Problem> {
        let destination = self.destination()?;
        let begun = Instant::now();
        while begun.elapsed() < LISTEN_DEADLINE {
            let report: VmReport = destination.agent.get(&self.path()).await?;
            if report.incoming_uri.is_some() {
                return Ok(());
            }
            if report.status == VmStatus::Gone {
                let why = format!("QEMU at {} ended: {}", destination.id, report.reason);
                return Err(Problem::unavailable("start the destination", why));
            }
            tokio::time::sleep(self.cluster.timing.poll).await;
        }
        let why = format!("QEMU at {} did not listen in time", destination.id);
        Err(Problem::unavailable("start the destination", why))
    }

    /// Looks at both agents until one of them says how it ended.
    async fn watch_over(&mut self) -> Result<(), Problem> {
        let mut calls_off: Option<String> = None;
        let mut held_since: Option<Instant> = None;
        loop {
            // `None`: a person removed that host.
            let (source, destination) = (self.source().ok(), self.destination().ok());
            let at_source = self.look(source.as_deref()).await;
            let at_destination = self.look(destination.as_deref()).await;
            let id = self.record.value.migration.id.clone();
            match judge(&id, &at_source.seen(), &at_destination.seen()) {
                Verdict::Completed => return self.complete(&at_source).await,
                Verdict::Aborted => return self.abort(reason_of(at_source.outgoing())).await,
                Verdict::SourceEnded
                    if self.end_destination(&at_source, destination.as_deref()).await? =>
                {
                    return Ok(());
                }
                Verdict::NotBegun if calls_off.is_none() => {
                    calls_off = self.ask_source(source.as_deref(), &at_destination).await;
                }
                Verdict::CallOff if calls_off.is_none() => {
                    calls_off = Some("the destination's QEMU ended before the start".to_owned());
                }
                Verdict::UnderWay => self.mirror(at_source.outgoing()).await?,
                _ => {}
            }
            if destination.is_none() {
                calls_off = calls_off.or_else(|| Some("its destination was removed".to_owned()));
                let is_held = self.state() == MigrationState::Switching;
                held_since = held_since.filter(|_| is_held).or_else(|| is_held.then(Instant::now));
                if held_since.is_some_and(|since| since.elapsed() > HELD_MAX) {
                    // It may have run at the host that is gone: there it is lost.
                    return self.complete(&Told::Removed).await;
                }
            }
            if calls_off.is_none() {
                calls_off = self.unwanted();
            }
            if let (Some(source), Some(reason)) = (&source, &calls_off) {
                self.call_off(source, reason).await;
            }
            tokio::time::sleep(self.until_next_look()).await;
        }
    }

    /// Shorter near the end, so that it is seen when it comes.
    fn until_next_look(&self) -> Duration {
        let migration = &self.record.value.migration;
        let (rate, dirty) = (migration.rate_bytes_per_s, migration.dirty_bytes_per_s);
        let left_s = copy_left_s(migration.remaining_bytes, rate, dirty);
        let is_near = left_s.is_some_and(|left_s| left_s < NEAR_END_S);
        let poll = self.cluster.timing.poll;
        if is_near || self.state() == MigrationState::Switching { poll / 8 } else { poll }
    }

    /// Why the migration is not to go on, if so.
    fn unwanted(&self) -> Option<String> {
        if self.cancel {
            return Some(CANCELLED.to_owned());
        }
        (self.age() > TOTAL_MAX)
            .then(|| format!("it took longer than {} minutes", TOTAL_MAX.as_secs() / 60))
    }

    fn age(&self) -> Duration {
        self.earlier + self.begun.elapsed()
    }

    async fn look(&self, host: Option<&HostLink>) -> Told {
        let Some(host) = host else { return Told::Removed };
        match host.agent.get::<VmReport>(&self.path()).await {
            Ok(report) => Told::Vm(Box::new(report)),
            Err(problem) if problem.kind == ProblemKind::NotFound => Told::NotThere,
            Err(_) => Told::NotKnown,
        }
    }

    /// Gives the reason when the source refuses. An answer that does not come is asked for again,
    /// and a conflict may be this very migration, not yet in the report: the next look tells.
    async fn ask_source(&self, source: Option<&HostLink>, destination: &Told) -> Option<String> {
        let (Some(source), Told::Vm(report)) = (source, destination) else { return None };
        let ask = MigrateOut {
            migration: self.record.value.migration.id.clone(),
            number: self.record.value.number,
            uri: report.incoming_uri.clone()?,
            destination_agent_url: self.destination().ok()?.addresses.agent_url.clone(),
            epochs: self.planned().ok()?.raises.clone(),
            downtime_limit_ms: u64::from(DOWNTIME_LIMIT_FIRST_MS),
        };
        let path = format!("{}/migrate", self.path());
        match source.agent.post::<serde_json::Value>(&path, &ask).await {
            Err(problem)
                if !matches!(problem.kind, ProblemKind::Unavailable | ProblemKind::Conflict) =>
            {
                Some(format!("{}: {}", problem.what, problem.why))
            }
            _ => None,
        }
    }

    /// The source ends it, or promises that it never begins: an order may still be on its way.
    /// What comes of it is told by the next look.
    async fn call_off(&self, source: &HostLink, reason: &str) {
        let path = format!("{}/migrate/cancel", self.path());
        let migration = self.record.value.migration.id.clone();
        let number = self.record.value.number;
        let ask = CancelMigration { migration, number, reason: reason.to_owned() };
        if let Err(problem) = source.agent.post::<serde_json::Value>(&path, &ask).await {
            tracing::debug!("{} is not called off yet: {problem}", self.record.value.migration.id);
        }
    }

    /// The source's figures and phase become the record's.
    async fn mirror(&mut self, report: Option<&MigrationReport>) -> Result<(), Problem> {
        let Some(report) = report else { return Ok(()) };
        let before = self.record.value.migration.clone();
        self.take_figures(report);
        match report.phase {
            MigrationPhase::Setup | MigrationPhase::Copying => {
                self.advance_to(MigrationState::Copying)?;
            }
            _ => self.advance_to(MigrationState::Switching)?,
        }
        let after = &self.record.value.migration;
        if (before.state, before.bytes) != (after.state, after.bytes) {
            self.record.value.watched_ms =
                u64::try_from(self.age().as_millis()).unwrap_or(u64::MAX);
            self.record.save().await?;
        }
        Ok(())
    }

    fn take_figures(&mut self, report: &MigrationReport) {
        let migration = &mut self.record.value.migration;
        migration.downtime_ms = report.downtime_ms;
        migration.bytes = report.transferred_bytes;
        migration.remaining_bytes = report.remaining_bytes;
        migration.rate_bytes_per_s = report.rate_bytes_per_s;
        if report.dirty_bytes_per_s > 0 {
            migration.dirty_bytes_per_s = report.dirty_bytes_per_s;
        }
        if let (Some(own), Some(source)) = (&mut migration.phases.prepare, report.phases.prepare) {
            own.begin_ms = source.begin_ms;
        }
        migration.phases.rounds.clone_from(&report.phases.rounds);
        migration.phases.pause = report.phases.pause;
        let prepare_ms = migration.phases.prepare.map_or(0, |prepare| prepare.total_ms());
        migration.total_ms = prepare_ms + report.total_ms;
    }

    /// Goes through the states in their order; between two looks several may have passed.
    fn advance_to(&mut self, target: MigrationState) -> Result<(), Problem> {
        let state = &mut self.record.value.migration.state;
        while *state != target && !state.is_final() {
            let event = match *state {
                MigrationState::Preparing => MigrationEvent::Sending,
                MigrationState::Copying => MigrationEvent::Paused,
                MigrationState::Switching if target == MigrationState::Completed => {
                    MigrationEvent::Arrived
                }
                // A look that came late shows an earlier phase: nothing goes back.
                _ => return Ok(()),
            };
            *state = state.next(event)?;
        }
        Ok(())
    }

    /// The source is gone in the middle: either the VM came to run at the destination, or it is
    /// lost. The destination's agent ends what has not run, and so decides it for good. `false`:
    /// it does not know. When the source was removed, nobody else will: a VM of which the
    /// destination knows nothing is lost, and the job's driver removes what is there.
    async fn end_destination(
        &mut self,
        at_source: &Told,
        destination: Option<&HostLink>,
    ) -> Result<bool, Problem> {
        let from = &self.record.value.migration.from;
        let (is_removed, why) = match at_source {
            Told::Removed => (true, format!("its source {from} was removed")),
            _ => (false, "the VM ended at the source".to_owned()),
        };
        let Some(destination) = destination else {
            self.abort(format!("{why}, and so was its destination")).await?;
            return Ok(true);
        };
        let path = format!("{}/end-unless-ran", self.path());
        let asked = EndUnlessRan { migration: self.record.value.migration.id.clone() };
        match destination.agent.post::<Fate>(&path, &asked).await {
            Ok(Fate::Ran) => self.complete(&Told::NotThere).await?,
            Ok(Fate::DidNotRun) => self.abort(why).await?,
            Ok(Fate::NotKnown) if is_removed => {
                self.abort(format!("{why}, and {} knows nothing of it", destination.id)).await?;
            }
            Ok(Fate::NotKnown) => return Ok(false),
            Err(problem) => {
                tracing::debug!("{}: {problem}", self.record.value.migration.id);
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn complete(&mut self, source: &Told) -> Result<(), Problem> {
        let own = |report: &&MigrationReport| report.migration == self.record.value.migration.id;
        if let Some(report) = source.outgoing().filter(own) {
            self.take_figures(report);
        }
        self.see_it_run().await?;
        self.advance_to(MigrationState::Completed)?;
        self.record.value.migration.ended_ms = Some(now_ms());
        self.record.save().await?;
        let migration = &self.record.value.migration;
        tracing::info!(
            "VM {} moved from {} to {} in {} ms",
            self.vm,
            migration.from,
            migration.to,
            migration.total_ms
        );
        Ok(())
    }

    /// The destination's agent lets the VM run when it has stored that it is there: that belongs to
    /// the pause. A destination that does not answer keeps nothing up.
    async fn see_it_run(&mut self) -> Result<(), Problem> {
        let destination = self.destination().ok();
        let begun = Instant::now();
        while begun.elapsed() < RUN_DEADLINE {
            let Told::Vm(report) = self.look(destination.as_deref()).await else { return Ok(()) };
            if !matches!(report.status, VmStatus::Incoming | VmStatus::Paused) {
                self.take_resume(report.resume_us.unwrap_or(0));
                return Ok(());
            }
            tokio::time::sleep(self.cluster.timing.poll / 8).await;
        }
        Ok(())
    }

    fn take_resume(&mut self, resume_us: u64) {
        let migration = &mut self.record.value.migration;
        if let Some(pause) = &mut migration.phases.pause {
            pause.resume_us = resume_us;
        }
        migration.downtime_ms += resume_us.div_ceil(1000);
        migration.total_ms += resume_us.div_ceil(1000);
    }

    /// The source was never asked, so the destination's QEMU never ran: it just goes away.
    async fn give_up(&mut self, problem: &Problem) -> Result<(), Problem> {
        self.abort(format!("{}: {}", problem.what, problem.why)).await
    }

    /// The one place where a migration fails: the VM is at the source. What was made at the
    /// destination is handed to the cleaner by the job's driver, when it sees the record.
    async fn abort(&mut self, why: String) -> Result<(), Problem> {
        tracing::warn!("{} is aborted: {why}", self.record.value.migration.id);
        let migration = &mut self.record.value.migration;
        migration.state = migration.state.next(MigrationEvent::GivenUp)?;
        migration.error = why;
        migration.ended_ms = Some(now_ms());
        self.record.save().await
    }
}

/// Why the source gave it up.
fn reason_of(report: Option<&MigrationReport>) -> String {
    match report {
        Some(report) if report.reason.is_empty() => {
            format!("the source says: {:?}", report.phase).to_lowercase()
        }
        Some(report) => report.reason.clone(),
        None => "the source says nothing of it".to_owned(),
    }
}
