//! The driver of a gang: a job with several VMs ([`perigee_model::gang`] decides, this carries it out).
//!
//! ```text
//! queued      the scheduler gives hosts for all members, or for none; they are recorded with one write, and with the
//!             members' addresses: a gang that waits for its network or for addresses holds no host
//! staging     the members are made, each with its placement, so that none waits in the queue
//! starting    each member's guest has its address and says that it is ready
//! running     all were ready: each is told to begin
//! collecting  (shown while the last members end)
//! ```
//!
//! A member is a job of its own to the driver of jobs ([`super::driver`]): it stages, starts, follows, fetches and cleans up as
//! every job does. It differs in four things. It is made with its placement. Its guest waits before its command. What makes other
//! jobs begin anew makes it end as lost. And only its gang has it end.
//!
//! While its commands run, all members may be moved ([`perigee_model::gang::moving`] decides, `moving` carries it out), or their data come to
//! them (`copying`).
//!
//! Only this driver writes the gang's record, and only a member's driver writes the member's. They tell each other nothing but
//! what is recorded: the gang reads its members' records, the members read the gang's, and an intent ends a member. So each of
//! them may be stopped anywhere, and goes on from the records.

use std::sync::Arc;
use std::time::Instant;

use perigee_model::gang::{EndRequest, Next, Seen, Verdict, member_of, next};
use perigee_model::guest::GuestKey;
use perigee_model::job::{HostState, Job, JobOutputs, JobState, JobVolume, Restart};
use perigee_model::network::Card;
use perigee_model::plan::Basis;
use perigee_model::states::JobEvent;
use perigee_model::{HostId, JobId, Problem, ProblemKind};
use perigee_planner::gangs::{self, left};
use russh::keys::PrivateKey;
use russh::keys::ssh_key::LineEnding;
use russh::keys::ssh_key::private::Ed25519Keypair;

use super::cancel::{CANCELLED, STOPPED};
use super::cost;
use super::driver::Step;
use super::finish::kept_outputs;
use super::guest::EARLY;
use super::place::{self, job_disks};
use super::restart::{Fate, Loss, fate};
use super::{ended, erase_all_but_log, log, new_record};
use crate::clock::now_ms;
use crate::cluster::Grant;
use crate::cluster::members::{is_of, members};
use crate::files::outputs;
use crate::planning::gang_traffic;
use crate::records::Talk;
use crate::records::{
    Ending, Gang, GangKeys, GangMoveRequest, JobIntent, JobRecord, KeptOutputs, Kind, Membership,
    Placement, job_intent_key, job_key, vm_of,
};
use crate::storage::{leave_site, volumes};
use crate::{networks, planning};

mod check;
mod copying;
mod decide_move;
mod member;
mod moving;
mod run;
mod view;

pub use check::{check, check_network, check_ranks, prepare};
pub(super) use member::AT_BARRIER;
pub use moving::{ask_to_leave, ask_to_move, call_off_leaving, call_off_move};
pub(super) use run::GangRun;
pub use view::{last_message_of, log_of, log_of_all, with_members};

/// A key that nobody else has.
fn new_key(job: &JobId) -> Result<GuestKey, Problem> {
    let fault = |e: &dyn std::fmt::Display| {
        Problem::internal(format!("can't make the keys of job {job}"), e)
    };
    let mut seed = [0_u8; 32];
    let mut filled = 0;
    while filled < seed.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        let more = rustix::rand::getrandom(&mut seed[filled..], flags).map_err(|e| fault(&e))?;
        filled += more;
    }
    let key = PrivateKey::from(Ed25519Keypair::from_seed(&seed));
    let private = key.to_openssh(LineEnding::LF).map_err(|e| fault(&e))?.to_string();
    let public = key.public_key().to_openssh().map_err(|e| fault(&e))?;
    Ok(GuestKey { private, public })
}

/// A gang's members as their driver sees them; `None` for one without a record.
type Members = [Option<Arc<JobRecord>>];

fn seen(member: Option<&JobRecord>) -> Seen {
    let Some(record) = member else { return Seen::Missing };
    let of = record.kind.member();
    let is_ready = of.is_some_and(|member| member.ready);
    let is_lost = of.is_some_and(|member| member.lost.is_some());
    let ends = matches!(record.ending, Some(Ending::Failed | Ending::Cancelled));
    // Its VM has ended under it, so it fails, whatever becomes of its outputs.
    let exit_code = record.job.exit_code.filter(|_| record.collect.is_none());
    let lacks_process = ended::fails_of_memory(&record.job);
    let exit_code = exit_code.map(|code| if lacks_process { code.max(1) } else { code });
    let ends = ends || record.collect.is_some();
    Seen::of(record.job.state, (is_ready, is_lost), ends, exit_code)
}

impl GangRun {
    pub(super) async fn gang_step(&mut self) -> Result<Step, Problem> {
        let intent: Option<JobIntent> =
            self.cluster.records.read(&job_intent_key(&self.id)).await?;
        let intent = intent.unwrap_or_default();
        let now = intent.now || intent.stop_vm;
        let request = EndRequest { cancel: intent.cancel, now };
        let state = self.gang()?.state;
        if intent.stop_vm && !intent.cancel && self.record.value.ending.is_none() {
            // As a job with one VM ends.
            self.record.end(Ending::Failed, STOPPED.to_owned()).await?;
        }
        let fails = self.record.value.ending.is_some() && state.verdict.is_none();
        let is_queued = self.job().state == JobState::Queued;
        if is_queued && state.verdict.is_none() && !request.cancel && !fails {
            return self.place_gang().await;
        }
        let members = self.members().await?;
        let all_seen: Vec<Seen> = members.iter().map(|member| seen(member.as_deref())).collect();
        let decided = match fails {
            // A step of the gang itself has failed, and its reason is there.
            true => Next::Judge(Verdict::Failed, None),
            false => next(state, self.job().spec.mpi, request, &all_seen),
        };
        match decided {
            Next::Make => self.make_members(&members).await,
            Next::Begin => self.begin().await,
            Next::Release => {
                self.gang()?.state.released = true;
                self.record.save().await?;
                self.wake_members();
                Ok(Step::Again)
            }
            Next::Judge(verdict, rank) => self.judge(verdict, rank, &members).await,
            Next::EndMembers => self.end_members(&members, now, intent.gives_up).await,
            Next::Succeed => self.finish_gang(None, &members).await,
            Next::End(verdict) => self.finish_gang(Some(verdict), &members).await,
            Next::StartAgain => self.start_gang_again(&members).await,
            Next::Wait => match self.move_gang(&members, intent.move_gang).await? {
                Some(step) => Ok(step),
                None => self.wait_for_members(&members).await,
            },
        }
    }

    /// Members that have ended are not in the index.
    async fn members(&self) -> Result<Vec<Option<Arc<JobRecord>>>, Problem> {
        let mut members = Vec::new();
        for rank in 0..self.job().spec.count {
            let id = member_of(&self.id, rank);
            let indexed = self.cluster.index.job(&id);
            let found = match &indexed {
                Some(found) => Some(Arc::clone(found)),
                None => self.cluster.records.read::<JobRecord>(&job_key(&id)).await?.map(Arc::new),
            };
            let found = found.filter(|found| is_of(found, &self.record.value));
            if indexed.is_none() && found.as_ref().is_some_and(|one| !one.job.state.is_final()) {
                // Its record was written when the step that made it was cut, so nobody has asked for its driver.
                self.cluster.drive_job(&id);
            }
            members.push(found);
        }
        Ok(members)
    }

    /// Queued: records the hosts that the scheduler has given to all members.
    async fn place_gang(&mut self) -> Result<Step, Problem> {
        let Some(grant) = self.cluster.index.grant_of(&self.id) else {
            cost::release(&self.cluster, &self.record.value).await?;
            return Ok(Step::Leave);
        };
        if self.is_far_from_data(&grant).await? {
            // Its data were confined since the scheduler has read of them.
            self.cluster.index.take_back(&self.id);
            return Ok(Step::Leave);
        }
        let keys = GangKeys { user: new_key(&self.id)?, host: new_key(&self.id)? };
        let hosts = grant.hosts().cloned().collect();
        let cluster = Arc::clone(&self.cluster);
        let network = self.ensure_network().await;
        // All get addresses or none, so two gangs never wait for those that the other one has.
        let _turn = cluster.networks.turn().await;
        let cards = match network {
            Ok(()) => self.new_cards().await,
            Err(problem) => Err(problem),
        };
        let cards = match cards {
            Err(problem) if problem.kind == ProblemKind::NoSpace => {
                // They went in the meantime. The scheduler says so from now on.
                cluster.index.take_back(&self.id);
                return Ok(Step::Leave);
            }
            cards => cards?,
        };
        if !cost::reserve(&self.cluster, &mut self.record.value, grant.cost).await? {
            return Ok(Step::Leave);
        }
        planning::record_submission(&cluster, &self.id, &grant.plan).await?;
        let traits = grant.traits.clone();
        let has_run = grant.plan.basis == Basis::History;
        let gang = self.gang()?;
        *gang = Gang { hosts, traits, cards, keys: Some(keys), has_run, ..gang.of_next_run() };
        let job = &mut self.record.value.job;
        job.state = job.state.next(JobEvent::Placed)?;
        job.started_ms = Some(now_ms());
        job.predicted = Some(grant.predicted);
        job.reason.clear();
        self.record.save().await?;
        Ok(Step::Again)
    }

    /// Whether a host of the grant is not at the site of data that may not leave that site.
    async fn is_far_from_data(&self, grant: &Grant) -> Result<bool, Problem> {
        let confined = leave_site::confined_of(&self.cluster, &self.job().spec).await?;
        let hosts: Vec<HostId> = grant.hosts().cloned().collect();
        Ok(leave_site::check_hosts(&self.cluster, &confined, &self.id, &hosts).is_err())
    }

    /// Its own network is there, if it has one.
    async fn ensure_network(&self) -> Result<(), Problem> {
        match self.job().spec.network.name() == Some(&networks::own_name(&self.id)?) {
            true => networks::ensure_own(&self.cluster, &self.id).await,
            false => Ok(()),
        }
    }

    /// Cards for all members. The caller has its turn until they are recorded.
    async fn new_cards(&self) -> Result<Vec<Card>, Problem> {
        let spec = &self.job().spec;
        let name = spec.network.name().ok_or_else(|| {
            Problem::internal(format!("job {}", self.id), "its VMs have no network")
        })?;
        networks::cards(&self.cluster, name, spec.count as usize, &self.id).await
    }

    /// Makes the members that are missing. One that was made is found again by its name.
    async fn make_members(&mut self, members: &Members) -> Result<Step, Problem> {
        let cluster = Arc::clone(&self.cluster);
        let spec = self.job().spec.clone();
        let changes = cluster.index.home_changes();
        let mut homes = Vec::new();
        for volume in &spec.volumes {
            if cluster.index.is_changing_home(&volume.volume) {
                return Ok(Step::Wait(cluster.timing.poll));
            }
            homes.push(volumes::find(&cluster, &volume.volume).await?.home);
        }
        let confined = leave_site::confined_of(&cluster, &spec).await?;
        let volumes = spec.volumes.iter().map(|volume| &volume.volume);
        if cluster.index.home_changed_since(volumes, changes) {
            return Ok(Step::Again);
        }
        let Gang { hosts, cards, .. } = self.gang()?.clone();
        leave_site::check_hosts(&cluster, &confined, &self.id, &hosts)?;
        let each = (0..).zip(&hosts).zip(&cards).zip(members);
        for (((rank, host), card), _) in each.filter(|(_, member)| member.is_none()) {
            let mut member = self.new_member(rank, host)?;
            member.card = Some(card.clone());
            let has = |(volume, home): (&JobVolume, &HostId)| {
                volume.is_of_rank(rank).then(|| home.clone())
            };
            let homes: Vec<HostId> = spec.volumes.iter().zip(&homes).filter_map(has).collect();
            let placed = place::disks(
                &member.job.id,
                &member.job.spec,
                (host, &confined),
                &homes,
                (job_disks(&member.job.spec), member.restarts),
            );
            if let Some(placement) = &mut member.placement {
                placement.disks = placed;
            }
            let id = &member.job.id;
            if !cluster.records.create(&job_key(id), &member).await? {
                let why = format!("there is a job or a VM with the name {id}");
                return Err(Problem::conflict(format!("can't start job {}", self.id), why));
            }
            cluster.index.note_kept(id);
            cluster.index.put_job(&member);
            cluster.drive_job(id);
        }
        self.gang()?.state.made = true;
        self.record.save().await?;
        Ok(Step::Again)
    }

    /// A member about to be staged at its host. Its disks are still to be named.
    fn new_member(&self, rank: u32, host: &HostId) -> Result<JobRecord, Problem> {
        let gang = &self.record.value;
        let mut spec = gang.job.spec.clone();
        let member = Membership {
            gang: self.id.clone(),
            rank,
            count: spec.count,
            mpi: spec.mpi,
            ready: false,
            begun: false,
            released: false,
            lost: None,
            talk: Talk::default(),
            copied: 0,
            copy_refused: String::new(),
            run: None,
        };
        if member.serves() {
            // It ends when the first member's command does, which has a limit.
            spec.timeout_s = None;
        }
        (spec.count, spec.mpi, spec.may_migrate) = (1, false, false);
        spec.outputs_to = spec.outputs_to.map(|to| outputs::of_rank(&to, rank));
        spec.volumes.retain(|volume| volume.is_of_rank(rank));
        spec.volumes.iter_mut().for_each(|volume| volume.ranks.clear());
        let mut traits = gang.kind.gang().map(|gang| gang.traits.clone()).unwrap_or_default();
        let sizes = std::mem::take(&mut traits.data_bytes);
        let own = planning::gangs::numbers_of(&gang.job.spec.volumes, rank);
        traits.data_bytes = own.into_iter().filter_map(|at| sizes.get(at).copied()).collect();
        let mut made = new_record(member_of(&self.id, rank), spec);
        made.job.submitted_ms = gang.job.submitted_ms;
        made.job.state = made.job.state.next(JobEvent::Placed)?;
        made.job.host = Some(host.clone());
        made.job.vm = Some(vm_of(&made.job.id));
        made.placement = Some(Placement {
            start: host.clone(),
            disks: Vec::new(),
            traits,
            has_user_card: false,
        });
        // Its VM and volumes have other names and numbers than those of an earlier run.
        made.restarts = gang.restarts;
        made.inputs.clone_from(&gang.inputs);
        made.refused_by.clone_from(&gang.refused_by);
        made.kind = Kind::Member(member);
        let lost = gang.kind.gang().and_then(|gang| gang.logs.get(&rank)).copied();
        (made.log, made.last_seq) = lost.unwrap_or_default();
        made.seq_before = made.last_seq;
        Ok(made)
    }

    /// All members are ready.
    async fn begin(&mut self) -> Result<Step, Problem> {
        self.gang()?.state.begun = true;
        let job = &mut self.record.value.job;
        if job.state == JobState::Staging {
            job.state = job.state.next(JobEvent::Staged)?;
        }
        job.state = job.state.next(JobEvent::CommandStarted)?;
        job.running_ms = Some(now_ms());
        job.reason.clear();
        self.record.save().await?;
        self.wake_members();
        Ok(Step::Again)
    }

    fn wake_members(&self) {
        for rank in 0..self.job().spec.count {
            self.cluster.wakes.wake(&vm_of(&member_of(&self.id, rank)));
        }
    }

    /// Shows how far the members are.
    async fn wait_for_members(&mut self, members: &Members) -> Result<Step, Problem> {
        let all: Vec<&JobRecord> = members.iter().flatten().map(|member| &**member).collect();
        let is_past = |states: &[JobState]| !all.iter().any(|m| states.contains(&m.job.state));
        let state = self.job().state;
        self.predict_end(&all);
        let event = match state {
            JobState::Staging if is_past(&[JobState::Staging]) => Some(JobEvent::Staged),
            JobState::Running if is_past(&[JobState::Starting, JobState::Running]) => {
                Some(JobEvent::CommandEnded)
            }
            _ => None,
        };
        let has_news = |member: &&&JobRecord| {
            let reason = &member.job.reason;
            !reason.is_empty() && reason != AT_BARRIER && !member.job.state.is_final()
        };
        let first = all.iter().find(has_news);
        let first = first.map(|member| {
            let rank = member.kind.member().map_or(0, |member| member.rank);
            format!("rank {rank}: {}", member.job.reason)
        });
        let changes = self.move_in_words(&all).into_iter().chain(self.copy_in_words(&all));
        let reason = changes.chain(first).collect::<Vec<String>>().join("; ");
        if let Some(event) = event {
            self.record.value.job.state = state.next(event)?;
            self.record.value.job.reason = reason;
            self.record.save().await?;
        } else {
            self.record.say(&reason, Vec::new()).await?;
        }
        Ok(Step::Wait(self.cluster.timing.poll))
    }

    /// Records how it ends before anybody is told.
    async fn judge(
        &mut self,
        verdict: Verdict,
        rank: Option<u32>,
        members: &Members,
    ) -> Result<Step, Problem> {
        if verdict == Verdict::Failed && self.may_be_a_lost_host(members) {
            return Ok(Step::Wait(self.cluster.timing.poll));
        }
        self.record.value.end_goes_on();
        let because = rank.and_then(|rank| Some((rank, members.get(rank as usize)?.as_ref()?)));
        let why = match (verdict, because) {
            (Verdict::Cancelled { .. }, _) => CANCELLED.to_owned(),
            (_, Some((rank, member))) => format!("rank {rank}: {}", reason_of(member)),
            (_, None) if !self.job().reason.is_empty() => self.job().reason.clone(),
            (_, None) => "the record of one of its VMs is gone".to_owned(),
        };
        tracing::info!("job {} ends: {verdict:?}: {why}", self.id);
        let of = because.map(|(_, member)| &member.job);
        let how = of.map(|job| (job.exit_code, job.end, job.oom_kills)).unwrap_or_default();
        let job = &mut self.record.value.job;
        (job.exit_code, job.end, job.oom_kills) = how;
        self.record.value.job.reason = why;
        self.gang()?.state.verdict = Some(verdict);
        self.record.save().await?;
        Ok(Step::Again)
    }

    /// A program often fails because another VM's host is gone, and before anybody else notices that. A gang that would start
    /// again then waits until the hosts of the other members have answered since the failure.
    fn may_be_a_lost_host(&mut self, members: &Members) -> bool {
        if self.job().spec.restart != Restart::OnHostFailure {
            return false;
        }
        let since = *self.failure_seen.get_or_insert_with(Instant::now);
        let open = members.iter().flatten().filter(|member| !member.job.state.is_final());
        open.filter_map(|member| Some((member, member.job.host.as_ref()?))).any(|(member, host)| {
            let is_silent = self.cluster.hosts.state(host) == HostState::Unreachable;
            let starts_again = || fate(member, host, Loss::Silent) == Fate::Again;
            !self.cluster.hosts.heard_since(host, since) && (!is_silent || starts_again())
        })
    }

    /// Has the members end that do not end by themselves. Repeating this changes nothing.
    async fn end_members(
        &mut self,
        members: &Members,
        at_once: bool,
        gives_up: bool,
    ) -> Result<Step, Problem> {
        let verdict = self.gang()?.state.verdict;
        let now = at_once || verdict.is_some_and(Verdict::is_at_once);
        // What a run has written that begins anew is not wanted.
        let gives_up = gives_up || verdict == Some(Verdict::Lost);
        for member in members.iter().flatten() {
            let ends = member.ending.is_some()
                || member.collect.is_some()
                || member.job.state == JobState::Collecting;
            if member.job.state.is_final() || (ends && !now) {
                continue;
            }
            let key = job_intent_key(&member.job.id);
            let asked: Option<JobIntent> = self.cluster.records.read(&key).await?;
            let is_asked = |asked: JobIntent| {
                asked.cancel && (asked.now || !now) && (asked.gives_up || !gives_up)
            };
            if asked.is_some_and(is_asked) {
                continue;
            }
            let request = |old: Option<JobIntent>| {
                let old = old.unwrap_or_default();
                let (now, gives_up) = (old.now || now, old.gives_up || gives_up);
                JobIntent { cancel: true, now, gives_up, ..old }
            };
            self.cluster.records.update(&key, request).await?;
            self.cluster.drive_job(&member.job.id);
        }
        Ok(Step::Wait(self.cluster.timing.poll))
    }

    /// All members are over: so is the gang. `None`: it has succeeded.
    async fn finish_gang(
        &mut self,
        verdict: Option<Verdict>,
        members: &Members,
    ) -> Result<Step, Problem> {
        networks::remove_own(&self.cluster, &self.id).await?;
        let all = || members.iter().flatten().map(|member| &member.job);
        let measured_s = all().filter_map(|job| job.measured_s).reduce(f64::max);
        self.learn(measured_s.filter(|_| verdict.is_none()), members).await?;
        let job = &mut self.record.value.job;
        job.measured_s = measured_s;
        job.progress = all().next().and_then(|first| first.progress.clone());
        job.outputs = outputs_of(all());
        job.left_out = all().map(|job| job.left_out).sum();
        if job.outputs.is_some() {
            // From its own end on, and not from those of its members.
            let kept = kept_outputs(&self.cluster, job, &outputs::OutputPlace::of(job)?);
            if let Some(outputs) = &mut job.outputs {
                outputs.kept_until_ms = kept.as_ref().map(KeptOutputs::until_ms);
            }
            self.record.value.kept_outputs = kept;
        }
        self.record.value.end_goes_on();
        let runs: Vec<&JobRecord> = members.iter().flatten().map(Arc::as_ref).collect();
        let cost = self.settle(&runs).await?;
        let job = &mut self.record.value.job;
        job.cost = cost;
        let event = match verdict {
            Some(Verdict::Cancelled { .. }) => JobEvent::Cancelled,
            Some(Verdict::Failed | Verdict::Lost) => JobEvent::Failed,
            None => {
                if job.state == JobState::Running {
                    job.state = job.state.next(JobEvent::CommandEnded)?;
                }
                let notes: Vec<&str> =
                    all().map(|job| job.reason.as_str()).filter(|text| !text.is_empty()).collect();
                job.reason = notes.first().map_or_else(String::new, |note| (*note).to_owned());
                job.exit_code = Some(0);
                JobEvent::Collected { exit_code: 0 }
            }
        };
        job.state = job.state.next(event)?;
        job.ended_ms = Some(now_ms());
        let gang = self.gang()?;
        gang.keys = None;
        gang.close_changes("the job ended");
        self.record.save().await?;
        Ok(Step::Again)
    }

    /// Remembers what the run has shown, and writes the measured times beside the predictions. `seconds`: what it took, if it has
    /// succeeded.
    async fn learn(&mut self, seconds: Option<f64>, members: &Members) -> Result<(), Problem> {
        let traits = self.gang()?.traits.clone();
        let of = |member: &Arc<JobRecord>| member.kind.member().map(|m| m.talk.by_rank(m.count));
        let sent = members.iter().map(|member| member.as_ref().and_then(of).unwrap_or_default());
        let sent: Vec<Vec<u64>> = sent.collect();
        let run = seconds.map(|seconds| gangs::GangRun { traits, seconds });
        let (cluster, job) = (&self.cluster, self.job());
        let ranks = seconds.and_then(|_| planning::gangs::run_of(cluster, job, members, &sent));
        let ended = |member: &Arc<JobRecord>| {
            let job = &member.job;
            Some(job.started_ms? + planning::milliseconds(job.measured_s?))
        };
        let ended_ms = members.iter().flatten().filter_map(ended).max();
        if let Some((seconds, ended_ms)) = seconds.zip(ended_ms) {
            planning::gang_ended(cluster, &job.id, (ended_ms, seconds), ranks.as_ref()).await?;
        }
        gang_traffic::remember(cluster, job, sent, (run, ranks)).await
    }

    /// The members of this run are removed, and it is queued. What is left of them at a lost host is known by the run's number.
    async fn start_gang_again(&mut self, members: &Members) -> Result<Step, Problem> {
        let intent: Option<JobIntent> =
            self.cluster.records.read(&job_intent_key(&self.id)).await?;
        let record = &mut self.record.value;
        for member in members.iter().flatten() {
            let lost = member.kind.member().and_then(|member| member.lost.clone());
            if let Some(host) = lost.filter(|host| !record.avoid.contains(host)) {
                record.avoid.push(host);
            }
            for host in &member.refused_by {
                if !record.refused_by.contains(host) {
                    record.refused_by.push(host.clone());
                }
            }
        }
        let number = record.restarts + 2;
        for member in members.iter().flatten() {
            let (mut kept, mut last_seq) = (member.log, member.last_seq);
            let why =
                format!("all VMs of the job start again: what follows is of its start {number}");
            let files = log::files_of(&self.cluster, member);
            log::mark(&self.cluster, &files, &mut kept, &mut last_seq, why).await?;
            if let (Some(gang), Some(of)) =
                (self.record.value.kind.gang_mut(), member.kind.member())
            {
                gang.logs.insert(of.rank, (kept, last_seq));
            }
        }
        let runs: Vec<&JobRecord> = members.iter().flatten().map(Arc::as_ref).collect();
        // Before the members are erased, which tell it. It is stored with the end of this run, below: what comes before may be repeated.
        let cost = self.settle(&runs).await?;
        self.record.save().await?;
        if let Err(problem) = outputs::remove(&self.cluster, self.job()).await {
            tracing::warn!("job {}: outputs of an earlier start stay: {problem}", self.id);
        }
        for member in members.iter().flatten() {
            erase_all_but_log(&self.cluster, member).await?;
        }
        let record = &mut self.record.value;
        record.job.cost = cost;
        record.restarts += 1;
        if let Some(gang) = record.kind.gang_mut() {
            *gang = gang.of_next_run();
        }
        record.ending = None;
        // A request was for the hosts of this run.
        let applied = self.gang()?.applied_move;
        let asked = intent.and_then(|intent| intent.move_gang);
        if let Some((number, request)) = asked.filter(|(number, _)| *number > applied) {
            if request != GangMoveRequest::Stay {
                self.refuse_move(number, "the job began anew".to_owned())?;
            }
            self.gang()?.applied_move = number;
        }
        self.record.value.end_goes_on();
        let job = &mut self.record.value.job;
        job.state = job.state.next(JobEvent::HostLost)?;
        (job.started_ms, job.running_ms) = (None, None);
        (job.exit_code, job.end, job.oom_kills) = (None, None, None);
        job.reason = format!("{}; all of its VMs start again", job.reason);
        self.failure_seen = None;
        self.record.save().await?;
        tracing::warn!("job {} begins anew: {}", self.id, self.job().reason);
        Ok(Step::Again)
    }
}

/// Why a member ends, as far as that is known.
fn reason_of(member: &JobRecord) -> String {
    let job = &member.job;
    if let Some(collect) = &member.collect {
        return collect.reason.clone();
    }
    match job.exit_code.filter(|_| job.state == JobState::Collecting) {
        Some(code) => match ended::in_words(job) {
            words if words.is_empty() => format!("the command ended with code {code}"),
            words => words,
        },
        None if job.state == JobState::Running && member.ending.is_none() => EARLY.to_owned(),
        None if job.reason.is_empty() => "its VM ended".to_owned(),
        None => member.ends_because.as_ref().unwrap_or(&job.reason).clone(),
    }
}

impl GangRun {
    /// When the gang ends, by equal gangs' runs and by the first one's progress.
    fn predict_end(&self, members: &[&JobRecord]) {
        let (job, index) = (self.job(), &self.cluster.index);
        if job.state != JobState::Running
            || !index.is_end_older(&self.id, self.cluster.timing.monitor)
        {
            return;
        }
        let since = |ms: u64| planning::seconds(self.cluster.clock.age_ms(ms));
        let started_ms = members.iter().filter_map(|member| member.job.started_ms).min();
        let first = members.first().and_then(|first| first.job.progress_part());
        let ran_s = job.running_ms.map_or(0.0, since);
        let has_run = self.record.value.kind.gang().is_some_and(|gang| gang.has_run);
        let predicted = job.predicted.filter(|_| has_run);
        let end = left(predicted, started_ms.map_or(0.0, since), (first, ran_s));
        index.put_end(&self.id, Instant::now(), end);
    }
}

/// What all members have in the repository; each has a directory in that of the gang.
fn outputs_of<'a>(members: impl Iterator<Item = &'a Job>) -> Option<JobOutputs> {
    let each = members.filter_map(|job| job.outputs.as_ref());
    let sum = each.fold(None, |sum: Option<JobOutputs>, of: &JobOutputs| {
        let sum = sum.unwrap_or_else(|| JobOutputs { files: 0, bytes: 0, ..of.clone() });
        Some(JobOutputs {
            files: sum.files.saturating_add(of.files),
            bytes: sum.bytes.saturating_add(of.bytes),
            kept_until_ms: sum.kept_until_ms.max(of.kept_until_ms),
            at: sum.at,
        })
    })?;
    let at = sum.at.rsplit_once('/').map_or_else(|| sum.at.clone(), |(above, _)| above.to_owned());
    Some(JobOutputs { at, ..sum })
}
