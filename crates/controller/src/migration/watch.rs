//! Watches a migration from the request to the source until one of the agents reports the end.
//!
//! Each agent has one open request, which it answers when the VM has changed there. So the controller knows of
//! the end half a round trip later. The last report of one agent may be older than that of the other. That does
//! no harm: a report that ends a migration ([`judge()`]) stays true, and everything else is asked of the agent
//! that decides it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use perigee_model::grant::{Allowed, GRANT_LIFE_MS};
use perigee_model::phases::{DOWNTIME_LIMIT_FIRST_MS, TOTAL_MAX_S};
use perigee_model::switchover::{Fate, Seen, SeenVm, Verdict, judge};
use perigee_model::vm::{
    CancelMigration, ENDED_SILENTLY, EndUnlessRan, EpochRaise, MigrateOut, MigrationPhase,
    MigrationReport, RenewGrant, VmReport, VmStatus,
};
use perigee_model::{HostId, MigrationId, Problem, ProblemKind};

use super::{CANCELLED, Run};
use crate::cluster::Cluster;

/// A migration that takes longer does not converge and is cancelled. Time in which no controller ran does not
/// count.
const TOTAL_MAX: Duration = Duration::from_secs(TOTAL_MAX_S);

/// How long a request may stay open if no figures are needed.
const QUIET_WAIT: Duration = Duration::from_secs(10);

/// How much longer than a request's wait its answer may take. After that, the agent's state is not known.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// A source pauses its guest while it cannot find out whether the guest ran at a removed destination. The
/// controller waits for such a source only for this time.
const HELD_MAX: Duration = Duration::from_secs(30);

/// How long the end of a migration that failed waits until the destination reports that its QEMU has ended.
const END_DEADLINE: Duration = Duration::from_millis(500);

/// A quarter of the time for which a grant counts.
const RENEW_AFTER: Duration = Duration::from_millis(GRANT_LIFE_MS / 4);
/// From when the source holds the VM until it gets one, and between two tries.
const HELD_FOR: Duration = Duration::from_secs(60);

/// How long the end of a migration waits until the destination reports that the VM runs.
const RUN_DEADLINE: Duration = Duration::from_secs(3);

/// The last report of an agent about the VM.
enum Answer {
    Vm(Box<VmReport>),
    NotThere,
    NotKnown,
    /// The host was removed, so it is not asked.
    Removed,
}

impl Answer {
    fn seen(&self) -> Seen<'_> {
        match self {
            Self::Vm(report) => Seen::Vm(SeenVm {
                status: report.status,
                outgoing: self.outgoing().map(|own| (&own.migration, own.phase)),
                arrives_by: report.spec.arrives_by.as_ref(),
            }),
            // If the VM still runs there, its writer epochs are taken before the job continues.
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

    /// Whether the source's agent answers and reports that it pauses the guest in this migration. A source that
    /// does not answer may run the guest again.
    fn is_held(&self, migration: &MigrationId) -> bool {
        let own = self.outgoing().filter(|own| own.migration == *migration);
        own.is_some_and(|own| own.phase == MigrationPhase::Switching)
    }

    fn is_known(&self) -> bool {
        !matches!(self, Self::NotKnown | Self::Removed)
    }

    fn revision(&self) -> u64 {
        match self {
            Self::Vm(report) => report.revision,
            Self::NotThere | Self::NotKnown | Self::Removed => 0,
        }
    }
}

/// Why the source does not send the VM.
struct Refusal {
    why: String,
    may_pass: bool,
}

/// One of the two agents: its last report, and the open request.
struct Poller {
    host: HostId,
    path: String,
    /// Without a change the request is answered after this time.
    wait: Duration,
    answer: Answer,
    open: Option<BoxFuture<'static, Answer>>,
}

impl Poller {
    fn new(host: &HostId, path: String, wait: Duration) -> Self {
        Self { host: host.clone(), path, wait, answer: Answer::NotKnown, open: None }
    }

    /// Waits for the next answer. It may be dropped while it waits: the request stays open.
    async fn hear(&mut self, cluster: &Arc<Cluster>) {
        let open = self.open.get_or_insert_with(|| {
            let (cluster, host) = (Arc::clone(cluster), self.host.clone());
            ask(cluster, host, self.path.clone(), self.answer.revision(), self.wait).boxed()
        });
        self.answer = open.await;
        self.open = None;
    }

    /// Whether a person removed the host. Then its answer is not waited for.
    fn is_removed(&mut self, cluster: &Cluster) -> bool {
        if cluster.hosts.get(&self.host).is_ok() {
            return false;
        }
        (self.answer, self.open) = (Answer::Removed, None);
        true
    }

    /// Drops the last report.
    fn forget(&mut self) {
        self.answer = Answer::NotKnown;
        self.open = None;
    }
}

async fn ask(
    cluster: Arc<Cluster>,
    host: HostId,
    path: String,
    after: u64,
    wait: Duration,
) -> Answer {
    let begun = Instant::now();
    // The first request is answered at once.
    let wait = if after == 0 { Duration::ZERO } else { wait };
    let question = format!("{path}?after={after}&wait_ms={}", wait.as_millis());
    let answer = match cluster.hosts.get(&host) {
        Err(_) => Answer::Removed,
        Ok(link) => {
            let asked = link.agent_wait.get::<VmReport>(&question);
            match tokio::time::timeout(wait + ANSWER_DEADLINE, asked).await {
                Ok(Ok(report)) => Answer::Vm(Box::new(report)),
                Ok(Err(problem)) if problem.kind == ProblemKind::NotFound => Answer::NotThere,
                Ok(Err(_)) | Err(_) => Answer::NotKnown,
            }
        }
    };
    // The pause is for an agent that answers without a change.
    let is_news = matches!(&answer, Answer::Vm(report) if report.revision > after);
    if !is_news {
        tokio::time::sleep(cluster.timing.poll.saturating_sub(begun.elapsed())).await;
    }
    answer
}

/// When the source of a migration gets another grant. It may hold its VM for longer than one counts.
#[derive(Debug, Default)]
struct Grants {
    /// Since when the source holds the VM.
    held: Option<Instant>,
    /// When it got its last grant. A controller that has just started does not know.
    given: Option<Instant>,
    /// When it was last tried, if the source did not take it.
    tried: Option<Instant>,
}

impl Grants {
    fn is_due(&mut self, is_held: bool, now: Instant) -> bool {
        if !is_held {
            self.held = None;
            return false;
        }
        let held = *self.held.get_or_insert(now);
        let is_old = self.given.is_none_or(|given| now.duration_since(given) >= RENEW_AFTER);
        let last = self.tried.map_or(held, |tried| tried.max(held));
        // The pause of a migration that goes well is not disturbed.
        is_old && now.duration_since(last) >= HELD_FOR
    }

    fn given(&mut self, is_given: bool, now: Instant) {
        match is_given {
            true => (self.given, self.tried) = (Some(now), None),
            false => self.tried = Some(now),
        }
    }
}

/// What the controller knows of a migration while it watches it.
struct Watch {
    source: Poller,
    destination: Poller,
    /// Why the migration is called off, from when that is so.
    calls_off: Option<String>,
    /// Since when the source refuses to send the VM.
    refused_since: Option<Instant>,
    /// When both agents were known last.
    heard: Instant,
    grants: Grants,
    /// Since when the source has held the VM although the destination is removed.
    held_since: Option<Instant>,
}

impl Watch {
    /// The source is asked often, because its figures are needed too.
    fn new(from: &HostId, to: &HostId, path: String, poll: Duration) -> Self {
        Self {
            source: Poller::new(from, path.clone(), poll),
            destination: Poller::new(to, path, QUIET_WAIT),
            calls_off: None,
            refused_since: None,
            heard: Instant::now(),
            grants: Grants::default(),
            held_since: None,
        }
    }

    /// Waits for the next answer of one of the agents. Returns whether the destination was removed.
    async fn hear(&mut self, cluster: &Arc<Cluster>) -> bool {
        tokio::select! {
            () = self.source.hear(cluster) => {}
            () = self.destination.hear(cluster) => {}
        }
        self.source.is_removed(cluster);
        let is_lost = self.destination.is_removed(cluster);
        if self.source.answer.is_known() && self.destination.answer.is_known() {
            self.heard = Instant::now();
        }
        is_lost
    }

    /// Whether the source holds the VM for a destination that is removed, and has done so for too long.
    fn is_held_too_long(&mut self, migration: &MigrationId) -> bool {
        let is_held = self.source.answer.is_held(migration);
        self.held_since = self.held_since.filter(|_| is_held).or(is_held.then(Instant::now));
        self.held_since.is_some_and(|since| since.elapsed() > HELD_MAX)
    }
}

impl Run {
    /// Watches both agents until one of them reports the end. `waiting` is the destination's last report if the
    /// source was never asked.
    pub(super) async fn watch_over(&mut self, waiting: Option<VmReport>) -> Result<(), Problem> {
        let cluster = Arc::clone(&self.cluster);
        let migration = &self.record.value.migration;
        let id = migration.id.clone();
        let (from, to) = (&migration.from, &migration.to);
        let mut watch = Watch::new(from, to, self.path(), cluster.timing.poll);
        if let Some(report) = waiting {
            watch.destination.answer = Answer::Vm(Box::new(report));
            self.ask_source(&mut watch).await;
        }
        loop {
            watch.calls_off = watch.calls_off.or_else(|| self.unwanted());
            if let Some(reason) = &watch.calls_off {
                self.call_off(reason).await;
            }
            let is_lost = watch.hear(&cluster).await;
            if watch.heard.elapsed() > cluster.timing.host_deadline {
                // Nobody knows when this migration ends, so the next one may move.
                self.leave_queue();
            }
            if watch.grants.is_due(watch.source.answer.is_held(&id), Instant::now()) {
                watch.grants.given(self.renew_grant().await, Instant::now());
            }
            if self.follow_verdict(&mut watch).await? {
                return Ok(());
            }
            if is_lost {
                let why = || "its destination was removed".to_owned();
                watch.calls_off = watch.calls_off.or_else(|| Some(why()));
                if watch.is_held_too_long(&id) {
                    // The VM may have run at the host that is gone; there it is lost.
                    return self.complete().await;
                }
            }
        }
    }

    /// Does what follows from the last answers of both agents. Returns whether the migration has ended with that.
    async fn follow_verdict(&mut self, watch: &mut Watch) -> Result<bool, Problem> {
        let (source, destination) = (&watch.source.answer, &mut watch.destination);
        let id = &self.record.value.migration.id;
        match judge(id, &source.seen(), &destination.answer.seen()) {
            Verdict::Completed => self.arrived(source, destination).await.map(|()| true),
            Verdict::Aborted => {
                let why = self.why_aborted(watch).await;
                self.abort(why).await.map(|()| true)
            }
            Verdict::SourceEnded => self.end_destination(source, destination).await,
            Verdict::NotBegun if watch.calls_off.is_none() => {
                self.ask_source(watch).await;
                watch.source.forget();
                Ok(false)
            }
            Verdict::CallOff if watch.calls_off.is_none() => {
                let to = &destination.host;
                watch.calls_off = Some(format!("its QEMU at {to} ended before the start"));
                Ok(false)
            }
            Verdict::UnderWay => self.mirror(source.outgoing()).await.map(|()| false),
            Verdict::NotBegun | Verdict::CallOff | Verdict::NotKnown => Ok(false),
        }
    }

    /// Why the VM stayed at the source: what the source says, and how the destination's QEMU has ended.
    async fn why_aborted(&self, watch: &mut Watch) -> String {
        let why = reason_of(watch.source.answer.outgoing());
        if watch.calls_off.is_some() {
            // A QEMU that waits for a VM ends when its migration is called off.
            return why;
        }
        // Its agent notices at the same time. One that does not answer delays nothing.
        let destination = &mut watch.destination;
        match tokio::time::timeout(END_DEADLINE, self.see_it_end(destination)).await {
            Ok(Some(ended)) => with_end(&why, &destination.host, &ended),
            Ok(None) | Err(_) => why,
        }
    }

    /// Asks the source to send the VM, and calls the migration off if the source refuses for good.
    async fn ask_source(&mut self, watch: &mut Watch) {
        let refusal = self.request_from_source(&watch.destination.answer).await;
        watch.calls_off = self.why_over(refusal, &mut watch.refused_since);
    }

    /// Why the source is not asked again, if so. What may pass, as a VM that stands still after an error of a disk, is not
    /// waited for without end.
    fn why_over(&self, refusal: Option<Refusal>, since: &mut Option<Instant>) -> Option<String> {
        let Some(refusal) = refusal else {
            *since = None;
            return None;
        };
        let since = *since.get_or_insert_with(Instant::now);
        let is_over = since.elapsed() > self.cluster.timing.host_deadline;
        (is_over || !refusal.may_pass).then_some(refusal.why)
    }

    /// Why the migration should not continue, if so.
    fn unwanted(&self) -> Option<String> {
        if self.cancel {
            return Some(CANCELLED.to_owned());
        }
        (self.age() > TOTAL_MAX)
            .then(|| format!("it took longer than {} minutes", TOTAL_MAX.as_secs() / 60))
    }

    /// Gives the source a grant that counts from now on. Returns whether it has it.
    async fn renew_grant(&self) -> bool {
        let migration = &self.record.value.migration;
        let renew = async {
            let changes = self.planned()?.raises.iter().map(EpochRaise::change).collect();
            let allows = Allowed::Epochs(changes);
            // In a cluster without certificates everybody may do everything.
            let Some(grant) = self.cluster.grant(&migration.from, allows)? else { return Ok(()) };
            let path = format!("{}/migrate/grant", self.path());
            let ask = RenewGrant { migration: migration.id.clone(), grant };
            self.source()?.agent.post::<()>(&path, &ask).await
        };
        let renewed = renew.await;
        if let Err(problem) = &renewed {
            tracing::warn!("{}: its source has no newer grant: {problem}", migration.id);
        }
        renewed.is_ok()
    }

    /// Asks the source to send the VM, and returns what it says if it refuses. If no answer comes, it is asked again. A
    /// conflict may pass, or mean this same migration, which is not in its report yet; its next report decides. So may a
    /// refusal of a connection that shows a replaced certificate: the next one shows the new one.
    async fn request_from_source(&mut self, destination: &Answer) -> Option<Refusal> {
        let Answer::Vm(report) = destination else { return None };
        let max_bytes_per_s = self.limit_rate();
        let migration = &self.record.value.migration;
        let epochs = self.planned().ok()?.raises.clone();
        let changes = epochs.iter().map(EpochRaise::change).collect();
        let grant = match self.cluster.grant(&migration.from, Allowed::Epochs(changes)) {
            Ok(grant) => grant,
            Err(problem) => return Some(Refusal { why: problem.to_string(), may_pass: false }),
        };
        let ask = MigrateOut {
            migration: migration.id.clone(),
            number: self.record.value.number,
            uri: report.incoming_uri.clone()?,
            destination_agent_url: self.destination().ok()?.addresses.agent_url.clone(),
            destination: Some(migration.to.clone()),
            epochs,
            downtime_limit_ms: u64::from(DOWNTIME_LIMIT_FIRST_MS),
            compressed: migration.compressed,
            max_bytes_per_s,
            throttle_percent: migration.throttle_percent,
            grant,
        };
        let path = format!("{}/migrate", self.path());
        let asked = self.source().ok()?.agent.post::<serde_json::Value>(&path, &ask).await;
        let problem = asked.err().filter(|problem| problem.kind != ProblemKind::Unavailable)?;
        let may_pass = matches!(problem.kind, ProblemKind::Conflict | ProblemKind::Forbidden);
        Some(Refusal { why: format!("{}: {}", problem.what, problem.why), may_pass })
    }

    /// The source ends the migration, or promises that it never begins, because a request may still be on its
    /// way. Its next report shows the result.
    async fn call_off(&self, reason: &str) {
        let path = format!("{}/migrate/cancel", self.path());
        let migration = self.record.value.migration.id.clone();
        let number = self.record.value.number;
        let ask = CancelMigration { migration, number, reason: reason.to_owned() };
        let asked = async { self.source()?.agent.post::<serde_json::Value>(&path, &ask).await };
        if let Err(problem) = asked.await {
            tracing::debug!("{} is not called off yet: {problem}", self.record.value.migration.id);
        }
    }

    /// The source is gone in the middle of the migration. Either the VM ran at the destination, or it is lost.
    /// The destination's agent stops a VM that has not run, and this decides it for good. Returns `false` if
    /// the agent does not know. If the source was removed, no other agent can know. Then a VM that the
    /// destination does not know is lost, and the job's driver removes what is there.
    async fn end_destination(
        &mut self,
        source: &Answer,
        destination: &mut Poller,
    ) -> Result<bool, Problem> {
        let from = &self.record.value.migration.from;
        let (is_removed, why) = match source {
            Answer::Removed => (true, format!("its source {from} was removed")),
            _ => (false, "the VM ended at the source".to_owned()),
        };
        let Ok(link) = self.destination() else {
            self.abort(format!("{why}, and so was its destination")).await?;
            return Ok(true);
        };
        let path = format!("{}/end-unless-ran", self.path());
        let asked = EndUnlessRan { migration: self.record.value.migration.id.clone() };
        match link.agent.post::<Fate>(&path, &asked).await {
            Ok(Fate::Ran) => self.arrived(source, destination).await?,
            Ok(Fate::DidNotRun) => self.abort(why).await?,
            Ok(Fate::NotKnown) if is_removed => {
                self.abort(format!("{why}, and {} knows nothing of it", link.id)).await?;
            }
            Ok(Fate::NotKnown) => return Ok(false),
            Err(problem) => {
                tracing::debug!("{}: {problem}", self.record.value.migration.id);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The VM is at the destination: reads its figures and ends the migration.
    async fn arrived(&mut self, source: &Answer, destination: &mut Poller) -> Result<(), Problem> {
        let id = &self.record.value.migration.id;
        if let Some(report) = source.outgoing().filter(|report| report.migration == *id) {
            self.take_figures(report);
        }
        // A destination that does not answer delays nothing.
        let runs = tokio::time::timeout(RUN_DEADLINE, self.see_it_run(destination));
        if let Ok(Some(resume_us)) = runs.await {
            self.take_resume(resume_us);
        }
        self.complete().await
    }

    /// What the destination's agent says when its QEMU has ended; `None` if it does not answer.
    async fn see_it_end(&self, destination: &mut Poller) -> Option<String> {
        loop {
            match &destination.answer {
                Answer::Vm(report) if report.status == VmStatus::Gone => {
                    return Some(report.reason.clone());
                }
                Answer::Vm(_) => destination.hear(&self.cluster).await,
                Answer::NotThere | Answer::NotKnown | Answer::Removed => return None,
            }
        }
    }

    /// The destination's agent lets the VM run when it has stored that the VM is there. Returns how long this
    /// took; `None` if it is not reported.
    async fn see_it_run(&self, destination: &mut Poller) -> Option<u64> {
        let runs = |status| !matches!(status, VmStatus::Incoming | VmStatus::Paused);
        loop {
            if let Answer::Vm(report) = &destination.answer
                && runs(report.status)
            {
                return Some(report.resume_us.unwrap_or(0));
            }
            destination.hear(&self.cluster).await;
            if !matches!(destination.answer, Answer::Vm(_)) {
                return None;
            }
        }
    }
}

/// Why a migration failed, with the end of the destination's QEMU. One that said nothing was killed, which is the reason;
/// other ends may be the reason or a consequence.
fn with_end(why: &str, to: &HostId, ended: &str) -> String {
    match ended {
        ENDED_SILENTLY => format!("its QEMU at {to} ended without a message"),
        _ => format!("{why}; its QEMU at {to} says: {ended}"),
    }
}

/// Why the source gave the migration up.
fn reason_of(report: Option<&MigrationReport>) -> String {
    match report {
        Some(report) if report.reason.is_empty() => {
            format!("the source says: {:?}", report.phase).to_lowercase()
        }
        Some(report) => report.reason.clone(),
        None => "the source says nothing of it".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_holds_its_vm_for_days_gets_a_grant_before_the_last_one_ends() {
        let (mut grants, begun) = (Grants::default(), Instant::now());
        let at = |minutes: u64| begun + Duration::from_secs(60 * minutes);
        assert!(!grants.is_due(false, at(0)));
        assert!(!grants.is_due(true, at(0)), "a pause that is over soon is not disturbed");
        assert!(grants.is_due(true, at(1)), "how old its grant is, nobody knows");
        grants.given(false, at(1));
        assert!(!grants.is_due(true, at(1)) && grants.is_due(true, at(2)), "it is tried again");
        grants.given(true, at(2));
        assert!(!grants.is_due(true, at(100)));
        for hour in [6, 12, 18, 24, 30] {
            assert!(grants.is_due(true, at(2 + hour * 60)), "{hour} h");
            grants.given(true, at(2 + hour * 60));
        }
        assert!(RENEW_AFTER * 2 < Duration::from_millis(GRANT_LIFE_MS));
    }

    #[test]
    fn a_source_that_is_silent_or_runs_the_guest_again_does_not_hold_it() {
        let name = |text: &str| MigrationId::new(text).expect("name");
        let spec = crate::tests::vm_spec();
        let says = |phase| {
            let mut report = crate::tests::report(spec.clone());
            report.migration = Some(MigrationReport::new(name("q-0001-m1"), 1, phase));
            Answer::Vm(Box::new(report))
        };
        assert!(says(MigrationPhase::Switching).is_held(&name("q-0001-m1")));
        assert!(!says(MigrationPhase::Switching).is_held(&name("q-0001-m2")));
        assert!(!says(MigrationPhase::Failed).is_held(&name("q-0001-m1")));
        assert!(!Answer::NotKnown.is_held(&name("q-0001-m1")));
    }
}
