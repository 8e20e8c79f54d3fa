//! Moves of all VMs of a gang, or of none: [`perigee_model::gang::moving`] decides, this carries it out.
//!
//! A move is in the gang's record before any VM moves, with both hosts of each, and the index keeps the room at both until it
//! is over. Each VM moves with a migration of its own, as a job's only VM does, and no other one may be asked for meanwhile. So
//! a controller that is stopped anywhere finds in its records what is left to do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::gang::member_of;
use perigee_model::gang::moving::{Failed, GangMove, Leg, Next, SeenVm, next};
use perigee_model::job::{HostState, JobMoveAsked, JobState, MigrationState, MoveJob};
use perigee_model::plan::{Decision, Plan, Trigger};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, HostRules, JobId, Problem, ProblemKind, SiteId};
use perigee_planner::gangs::{Room, at_site, ruled};

use super::copying::MOVED;
use super::{GangRun, Members, members};
use crate::cleaner::Pending;
use crate::clock::now_ms;
use crate::cluster::{Cluster, Hold, capacity, groups_of};
use crate::jobs::cancel::CANCELLED;
use crate::jobs::driver::Step;
use crate::jobs::record;
use crate::migration::{self, by_itself};
use crate::planning;
use crate::records::{
    Gang, GangMoveRequest, JobIntent, JobRecord, Kind, MigrationIntent, job_intent_key,
    migration_intent_key, vm_of,
};
use crate::storage::replicas;

/// How long a host may be silent until a move that has begun, and needs it, is undone.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Has all VMs of a gang move. The gang's driver does it.
///
/// # Errors
/// `Conflict`, `Invalid` or `NotFound`, if one of them can't.
pub async fn ask_to_move(
    cluster: &Arc<Cluster>,
    id: &JobId,
    ask: MoveJob,
) -> Result<JobMoveAsked, Problem> {
    request(cluster, id, ask, None).await
}

/// The same because a host is drained that some of them are at.
///
/// # Errors
/// As [`ask_to_move`].
pub async fn ask_to_leave(
    cluster: &Arc<Cluster>,
    id: &JobId,
    ask: MoveJob,
    host: &HostId,
) -> Result<(), Problem> {
    request(cluster, id, ask, Some(host.clone())).await.map(drop)
}

async fn request(
    cluster: &Arc<Cluster>,
    id: &JobId,
    ask: MoveJob,
    drains: Option<HostId>,
) -> Result<JobMoveAsked, Problem> {
    let gang = gang_of(cluster, id).await?;
    let refuse = |why: &str| Err(Problem::conflict(format!("can't move job {id}"), why));
    let Some(of) = gang.kind.gang() else { return refuse("it has no VMs") };
    if of.open_move().is_some() {
        return refuse("its VMs are being moved already");
    }
    let all = members(cluster, &gang).await?;
    let all: Vec<&JobRecord> = all.iter().collect();
    let (volumes, confirmed) = (ask.volumes, ask.confirmed);
    let hosts = destinations(cluster, &gang, &all, ask)?;
    drop(may_move(cluster, &gang, &all, &hosts).await?);
    if volumes == VolumesOnMove::Follow && !confirmed {
        check_far(cluster, id, &all, &hosts).await?;
    }
    let request = GangMoveRequest::To { hosts: hosts.clone(), drains, volumes };
    let request = intend(cluster, id, request).await?;
    Ok(JobMoveAsked { request, hosts })
}

/// Refuses that volumes come to the site of their only replica.
async fn check_far(
    cluster: &Cluster,
    id: &JobId,
    members: &[&JobRecord],
    hosts: &[HostId],
) -> Result<(), Problem> {
    for (member, to) in members.iter().zip(hosts) {
        let disks = member.placement.iter().flat_map(|placement| &placement.disks);
        for disk in disks.filter(|disk| !disk.read_only && disk.home != *to) {
            let checked = replicas::check_far(cluster, &disk.volume, to).await;
            checked.map_err(|problem| {
                let next = format!(
                    "move the VMs alone, or the volumes too anyway: `perigee job move {id} … --volumes follow --yes`"
                );
                if problem.kind == ProblemKind::Conflict { problem.next(next) } else { problem }
            })?;
        }
    }
    Ok(())
}

/// Calls off that the VMs of a gang leave a host that is drained, if their driver has not begun that.
///
/// # Errors
/// If the store fails.
pub async fn call_off_leaving(
    cluster: &Arc<Cluster>,
    id: &JobId,
    host: &HostId,
) -> Result<(), Problem> {
    let Some(gang) = cluster.index.job(id) else { return Ok(()) };
    let applied = gang.kind.gang().map_or(0, |gang| gang.applied_move);
    let asked: Option<JobIntent> = cluster.records.read(&job_intent_key(id)).await?;
    let leaves = |request: &GangMoveRequest| matches!(request, GangMoveRequest::To { drains: Some(drained), .. } if drained == host);
    match asked.and_then(|asked| asked.move_gang) {
        Some((number, request)) if number > applied && leaves(&request) => {
            intend(cluster, id, GangMoveRequest::Stay).await.map(drop)
        }
        _ => Ok(()),
    }
}

/// Has the VMs of a gang that move stay, and those that were moved go back.
///
/// # Errors
/// `Conflict` if they do not move.
pub async fn call_off_move(cluster: &Arc<Cluster>, id: &JobId) -> Result<JobMoveAsked, Problem> {
    let gang = gang_of(cluster, id).await?;
    let of = gang.kind.gang();
    let open = of.and_then(Gang::open_move).filter(|open| !open.is_undone());
    let asked: Option<JobIntent> = cluster.records.read(&job_intent_key(id)).await?;
    let asked = asked.and_then(|asked| asked.move_gang);
    let is_pending = asked.is_some_and(|(number, request)| {
        request != GangMoveRequest::Stay && of.is_some_and(|of| number > of.applied_move)
    });
    if open.is_none() && !is_pending {
        let what = format!("can't call off the move of job {id}");
        return Err(Problem::conflict(what, "its VMs do not move, or go back already"));
    }
    let hosts = open.map(|open| open.legs.iter().map(|leg| leg.from.clone()).collect());
    let request = intend(cluster, id, GangMoveRequest::Stay).await?;
    Ok(JobMoveAsked { request, hosts: hosts.unwrap_or_default() })
}

async fn gang_of(cluster: &Cluster, id: &JobId) -> Result<JobRecord, Problem> {
    let found = record(cluster, id).await?;
    let refuse = |why: String| Problem::conflict(format!("can't move job {id}"), why);
    match &found.kind {
        Kind::Member(member) => Err(refuse(format!("it is a VM of job {}", member.gang))
            .next(format!("`perigee job move {}` moves all of its VMs", member.gang))),
        Kind::Job | Kind::PersistentVm(_) => {
            Err(refuse("it has one VM".to_owned()).next("`perigee vm move` moves it"))
        }
        Kind::Gang(_) if found.job.state.is_final() => Err(refuse("it has ended".to_owned())),
        Kind::Gang(_) => Ok(found),
    }
}

async fn intend(cluster: &Cluster, id: &JobId, request: GangMoveRequest) -> Result<u64, Problem> {
    let change = |old: Option<JobIntent>| {
        let old = old.unwrap_or_default();
        let number = old.move_gang.as_ref().map_or(1, |(number, _)| number + 1);
        JobIntent { move_gang: Some((number, request.clone())), ..old }
    };
    let intent = cluster.records.update(&job_intent_key(id), change).await?;
    cluster.drive_job(id);
    Ok(intent.move_gang.map_or(0, |(number, _)| number))
}

/// The host of each rank.
fn destinations(
    cluster: &Cluster,
    gang: &JobRecord,
    members: &[&JobRecord],
    ask: MoveJob,
) -> Result<Vec<HostId>, Problem> {
    let count = gang.job.spec.count as usize;
    let invalid = |why: String| Problem::invalid(format!("can't move job {}", gang.job.id), why);
    match (ask.hosts.as_slice(), ask.site) {
        ([], Some(site)) => {
            let now: Option<Vec<HostId>> =
                members.iter().map(|member| member.job.host.clone()).collect();
            let now = now.filter(|now| now.len() == count).unwrap_or_default();
            let rooms = rooms(cluster, gang);
            if !rooms.iter().any(|room| room.site == site) {
                return Err(Problem::not_found(format!("site {site}"), "no host there is up")
                    .next("`perigee host list` shows the sites"));
            }
            at_site(&rooms, &site, &now, &sent(members))
                .ok_or_else(|| too_full(gang, &site, &rooms))
        }
        ([one], None) => Ok(vec![one.clone(); count]),
        (each, None) if each.len() == count => Ok(each.to_vec()),
        (each, None) => Err(invalid(format!(
            "hosts: it has {count} VMs, and {} hosts are named: name one for all, or one for each rank",
            each.len()
        ))),
        (_, Some(_)) => Err(invalid("name hosts or a site, not both".to_owned())),
    }
}

fn too_full(gang: &JobRecord, site: &SiteId, rooms: &[Room]) -> Problem {
    let there = rooms.iter().filter(|room| room.site == *site);
    let each: Vec<String> = there.map(|room| format!("{} {}", room.host, room.holds)).collect();
    let why = format!(
        "its {} VMs have no room there; so many more would have: {}",
        gang.job.spec.count,
        each.join(", ")
    );
    Problem::conflict(format!("can't move job {} to site {site}", gang.job.id), why)
}

/// How many more VMs of a gang each host has room for that is up and not drained.
pub(super) fn rooms(cluster: &Cluster, gang: &JobRecord) -> Vec<Room> {
    let used = cluster.index.used();
    let bounds = cluster.index.bounds_of(gang, |host| cluster.hosts.binds(host));
    let (mut rooms, demand) = (Vec::new(), cluster.index.demand_to_move_all(gang));
    for host in cluster.hosts.up() {
        if cluster.hosts.drain(&host.id).is_some() {
            continue;
        }
        let Some(report) = cluster.hosts.report(&host.id) else { continue };
        let mut free = capacity(&report);
        free.take(used.get(&host.id).copied().unwrap_or_default().demand);
        let may_be = bounds.as_ref().is_none_or(|bounds| bounds.allow(&host.id));
        rooms.push(Room {
            host: host.id.clone(),
            site: host.addresses.site.clone(),
            holds: if may_be { free.holds(demand) } else { 0 },
        });
    }
    let ranks = 0..gang.job.spec.count;
    let members = ranks.filter_map(|rank| cluster.index.job(&member_of(&gang.job.id, rank)));
    let now: Vec<HostId> = members.filter_map(|member| member.job.host.clone()).collect();
    ruled(rooms, &groups_of(gang), &now)
}

/// What the members have sent to each other: a row for each rank.
pub(super) fn sent(members: &[&JobRecord]) -> Vec<Vec<u64>> {
    let of = |record: &&JobRecord| {
        record.kind.member().map(|member| member.talk.by_rank(member.count)).unwrap_or_default()
    };
    members.iter().map(of).collect()
}

/// Whether all of them may move there now. The room for them is held meanwhile.
pub(super) async fn may_move<'a>(
    cluster: &'a Arc<Cluster>,
    gang: &JobRecord,
    members: &[&JobRecord],
    hosts: &[HostId],
) -> Result<(Vec<Leg>, Vec<Hold<'a>>), Problem> {
    let id = &gang.job.id;
    let refusal = |why: String| Problem::conflict(format!("can't move job {id}"), why);
    let state = gang.kind.gang().map(|gang| gang.state).unwrap_or_default();
    if !state.begun || members.len() != hosts.len() {
        return Err(refusal("not all of its VMs run".to_owned())
            .next("its VMs can be moved when all of their commands run"));
    }
    if state.verdict.is_some() {
        return Err(refusal("it ends".to_owned()));
    }
    let mut legs = Vec::new();
    for (member, to) in members.iter().zip(hosts) {
        let rank = member.kind.member().map_or(0, |member| member.rank);
        let runs = member.job.state == JobState::Running && member.ending.is_none();
        let Some(from) = member.job.host.clone().filter(|_| runs) else {
            return Err(refusal(format!("rank {rank} does not run")));
        };
        cluster.hosts.get(to)?;
        let vm = vm_of(&member.job.id);
        let after = cluster.index.migrations_of(&vm).last().map_or(0, |last| last.number);
        legs.push(Leg { from, to: to.clone(), after });
    }
    if legs.iter().all(|leg| leg.from == leg.to) {
        return Err(refusal("all of its VMs are there already".to_owned()));
    }
    check_rules(&gang.job.spec.rules, hosts)
        .map_err(|why| refusal(why).next("name other hosts: a job keeps the rules of its file"))?;
    for (member, leg) in members.iter().zip(&legs).filter(|(_, leg)| leg.from != leg.to) {
        let pending = Pending::of(cluster, &member.job.id).await?;
        migration::check(cluster, member, &leg.to, &pending)?;
    }
    let moves: Vec<_> = members
        .iter()
        .zip(&legs)
        .filter(|(_, leg)| leg.from != leg.to)
        .map(|(member, leg)| (vm_of(&member.job.id), leg.from.clone(), leg.to.clone()))
        .collect();
    let total = |host: &HostId| cluster.hosts.report(host).map(|report| capacity(&report));
    let holds = cluster
        .index
        .begin_gang_move(&moves, total, |host| cluster.hosts.binds(host))
        .map_err(refusal)?;
    Ok((legs, holds))
}

/// Whether the VMs of a gang may be at these hosts, for what they are to each other.
fn check_rules(rules: &HostRules, hosts: &[HostId]) -> Result<(), String> {
    if let Some(group) = &rules.apart
        && let Some((_, twice)) =
            hosts.iter().enumerate().find(|(at, to)| hosts[..*at].contains(to))
    {
        return Err(format!(
            "two of its VMs would be at {twice}, and the VMs of group {group} are kept apart"
        ));
    }
    match &rules.together {
        Some(group) if hosts.iter().any(|to| *to != hosts[0]) => Err(format!(
            "they would be at several hosts, and the VMs of group {group} are kept together"
        )),
        _ => Ok(()),
    }
}

/// Whether a member's VM has no command to run any more.
pub(super) fn has_ended(member: &JobRecord) -> bool {
    let job = &member.job;
    job.state != JobState::Running || member.ending.is_some() || job.host.is_none()
}

/// What is seen of a member whose gang moves.
fn seen(cluster: &Cluster, member: Option<&Arc<JobRecord>>, of: &GangMove, leg: &Leg) -> SeenVm {
    let Some(record) = member else { return SeenVm { is_over: true, ..SeenVm::default() } };
    let vm = vm_of(&record.job.id);
    let moves = cluster.index.migrations_of(&vm);
    let open = moves.iter().find(|moved| moved.number > record.settled);
    let to_goal = moves.iter().rev().take_while(|moved| {
        moved.number > leg.after && moved.migration.state == MigrationState::Aborted
    });
    let failed: Vec<_> = to_goal.filter(|moved| moved.migration.to == *of.goal(leg)).collect();
    let is_last = |last: &&&Arc<_>| moves.last().is_some_and(|newest| Arc::ptr_eq(newest, **last));
    let passed_at = |at_ms| cluster.clock.passed_ms().saturating_sub(cluster.clock.age_ms(at_ms));
    SeenVm {
        at: record.job.host.clone(),
        is_over: has_ended(record),
        has_no_way_back: cluster.hosts.get(&leg.from).is_err(),
        is_moving: open.is_some() || cluster.index.is_move_being_recorded(&vm),
        is_silent: (record.job.host.as_ref())
            .is_some_and(|host| cluster.hosts.state(host) != HostState::Up),
        moves_to: open
            .filter(|moved| !moved.migration.state.is_final())
            .map(|moved| moved.migration.to.clone()),
        failed: failed.first().filter(is_last).map(|last| Failed {
            why: last.migration.error.clone(),
            at_ms: last.migration.ended_ms.map_or(0, passed_at),
            times: u32::try_from(failed.len()).unwrap_or(u32::MAX),
        }),
    }
}

impl GangRun {
    /// Does what is next of a move of all members: of the one under way, of one that a person asks for, or of one that the
    /// planner wants. `None` if nothing is to be done now.
    pub(super) async fn move_gang(
        &mut self,
        members: &Members,
        asked: Option<(u64, GangMoveRequest)>,
    ) -> Result<Option<Step>, Problem> {
        if !self.gang()?.state.begun {
            return Ok(None);
        }
        let applied = self.gang()?.applied_move;
        let asked = asked.filter(|(number, _)| *number > applied);
        let Some(of) = self.gang()?.open_move().cloned() else {
            return match asked {
                Some((number, GangMoveRequest::To { hosts, volumes, .. })) => {
                    self.begin_asked_move(members, number, (&hosts, volumes)).await.map(Some)
                }
                Some((number, GangMoveRequest::Stay)) => {
                    let gang = self.gang()?;
                    let was_pending = number > gang.applied_move + 1;
                    gang.applied_move = number;
                    if was_pending {
                        self.refuse_move(number, CANCELLED.to_owned())?;
                    }
                    self.record.save().await?;
                    Ok(None)
                }
                None => self.decide_move(members).await,
            };
        };
        if let Some((number, GangMoveRequest::Stay)) = asked {
            self.gang()?.applied_move = number;
            if !of.is_undone() {
                return self.undo_move(members, CANCELLED.to_owned()).await.map(Some);
            }
            self.record.save().await?;
        }
        let all_seen: Vec<SeenVm> = (of.legs.iter().zip(members).enumerate())
            .map(|(rank, (leg, member))| {
                let mut vm = seen(&self.cluster, member.as_ref(), &of, leg);
                if self.is_called_off(rank, member.as_ref()) {
                    vm.moves_to = None;
                }
                if of.is_undone() && vm.failed.is_none() {
                    vm.failed = self.move_refused.get(&rank).cloned();
                }
                vm
            })
            .collect();
        match next(&of, &all_seen, self.cluster.clock.passed_ms()) {
            Next::Wait => Ok(None),
            Next::CallOff(rank) => self.call_off(members, rank).await,
            Next::Undo(why) => self.undo_move(members, why).await.map(Some),
            Next::Start(rank) => self.move_member(members, &of, rank).await,
            Next::Pause(rank, why) => self.move_troubled(rank, &why).await,
            Next::End => self.end_move(members).await.map(Some),
        }
    }

    /// Records the move before any VM moves, or why there is none.
    async fn begin_asked_move(
        &mut self,
        members: &Members,
        request: u64,
        (hosts, volumes): (&[HostId], VolumesOnMove),
    ) -> Result<Step, Problem> {
        let cluster = Arc::clone(&self.cluster);
        let all: Vec<&JobRecord> = members.iter().flatten().map(|member| &**member).collect();
        let reason = "asked".to_owned();
        match may_move(&cluster, &self.record.value, &all, hosts).await {
            Ok((legs, _room)) => {
                self.gang()?.applied_move = request;
                let plan = planning::asked_plan(Vec::new());
                self.begin_move(legs, (Some(request), volumes), reason, plan).await?;
            }
            Err(problem) if problem.kind == ProblemKind::Internal => return Err(problem),
            Err(problem) if self.waits_for_answers(&problem) => {
                return Ok(Step::Wait(self.cluster.timing.poll));
            }
            Err(problem) => {
                let undone = format!("{}: {}", problem.what, problem.why);
                self.gang()?.applied_move = request;
                self.refuse_move(request, undone)?;
                self.record.save().await?;
            }
        }
        Ok(Step::Again)
    }

    /// Whether a refusal only says that a host does not answer, or that this controller has just been started and has not heard of
    /// it yet. That is no reason to go back before it has lasted for a while.
    fn waits_for_answers(&mut self, problem: &Problem) -> bool {
        if problem.kind != ProblemKind::Unavailable {
            return false;
        }
        let since = *self.move_silent.get_or_insert_with(Instant::now);
        since.elapsed() < SILENCE_MAX
    }

    fn forget_refusals(&mut self) {
        self.move_refused.clear();
        self.move_silent = None;
    }

    /// The request is not carried out.
    pub(super) fn refuse_move(&mut self, request: u64, undone: String) -> Result<(), Problem> {
        self.forget_refusals();
        tracing::info!("job {}: its VMs do not move: {undone}", self.id);
        let of = self.new_move(Vec::new(), Some(request), "asked".to_owned())?;
        let of = GangMove { ended_ms: Some(of.started_ms), undone, ..of };
        self.gang()?.last_move = Some(of);
        Ok(())
    }

    fn new_move(
        &mut self,
        legs: Vec<Leg>,
        asked: Option<u64>,
        reason: String,
    ) -> Result<GangMove, Problem> {
        let number = self.gang()?.last_move.as_ref().map_or(1, |last| last.number + 1);
        let (undone, trouble) = (String::new(), String::new());
        let (started_ms, ended_ms, volumes) = (now_ms(), None, VolumesOnMove::Stay);
        Ok(GangMove { number, asked, reason, started_ms, ended_ms, legs, undone, trouble, volumes })
    }

    /// The caller holds the room until this is recorded.
    pub(super) async fn begin_move(
        &mut self,
        legs: Vec<Leg>,
        (asked, volumes): (Option<u64>, VolumesOnMove),
        reason: String,
        plan: Plan,
    ) -> Result<(), Problem> {
        let to: Vec<&str> = legs.iter().map(|leg| leg.to.as_str()).collect();
        let summary = format!("move all VMs to {}: {reason}", to.join(", "));
        tracing::info!("job {}: {summary}", self.id);
        let trigger = if asked.is_some() { Trigger::Asked } else { Trigger::TimeLost };
        self.end_copy(MOVED.to_owned()).await?;
        self.record_decision(trigger, plan, summary).await?;
        let of = GangMove { volumes, ..self.new_move(legs, asked, reason)? };
        self.forget_refusals();
        self.gang()?.last_move = Some(of);
        self.record.save().await
    }

    /// Records a decision before what follows from it is: a step that is cut between the two is done again, and a change never lacks its
    /// decision.
    pub(super) async fn record_decision(
        &self,
        trigger: Trigger,
        plan: Plan,
        summary: String,
    ) -> Result<(), Problem> {
        let decisions = planning::decisions(&self.cluster, &self.id).await?;
        let is_recorded = |last: &Decision| last.summary == summary && last.outcome.is_empty();
        match decisions.last().is_some_and(is_recorded) {
            true => Ok(()),
            false => planning::record(&self.cluster, &self.id, trigger, plan, summary).await,
        }
    }

    /// Records that all go back. Failures before do not count for the way back.
    async fn undo_move(&mut self, members: &Members, why: String) -> Result<Step, Problem> {
        tracing::warn!("job {}: its VMs go back: {why}", self.id);
        let cluster = Arc::clone(&self.cluster);
        let last = |member: &Arc<JobRecord>| {
            cluster.index.migrations_of(&vm_of(&member.job.id)).last().map_or(0, |last| last.number)
        };
        self.forget_refusals();
        let Some(of) = &mut self.gang()?.last_move else { return Ok(Step::Again) };
        of.undone = why;
        for (leg, member) in of.legs.iter_mut().zip(members) {
            leg.after = member.as_ref().map_or(leg.after, last);
        }
        self.record.save().await?;
        Ok(Step::Again)
    }

    fn is_called_off(&self, rank: usize, member: Option<&Arc<JobRecord>>) -> bool {
        let last = member.and_then(|member| {
            self.cluster.index.migrations_of(&vm_of(&member.job.id)).into_iter().next_back()
        });
        last.is_some_and(|last| self.called_off.get(&rank) == Some(&last.number))
    }

    async fn call_off(&mut self, members: &Members, rank: usize) -> Result<Option<Step>, Problem> {
        let Some(Some(member)) = members.get(rank) else { return Ok(None) };
        let vm = vm_of(&member.job.id);
        let open = self.cluster.index.migrations_of(&vm).into_iter().next_back();
        if let Some(open) = open.filter(|open| !open.migration.state.is_final()) {
            let number = open.number;
            let key = migration_intent_key(&vm, open.number);
            let asked: Option<MigrationIntent> = self.cluster.records.read(&key).await?;
            if !asked.is_some_and(|asked| asked.cancel) {
                let cancel = |old: Option<MigrationIntent>| MigrationIntent {
                    cancel: true,
                    ..old.unwrap_or_default()
                };
                self.cluster.records.update(&key, cancel).await?;
            }
            self.called_off.insert(rank, number);
        }
        Ok(None)
    }

    /// Asks for the migration of one member. What is refused on the way there undoes the move; on the way back it is asked for again.
    async fn move_member(
        &mut self,
        members: &Members,
        of: &GangMove,
        rank: usize,
    ) -> Result<Option<Step>, Problem> {
        let (Some(Some(member)), Some(leg)) = (members.get(rank), of.legs.get(rank)) else {
            return Ok(None);
        };
        let request = migration::Request {
            to: of.goal(leg).clone(),
            reason: match of.is_undone() {
                true => format!("all VMs of job {} go back: {}", self.id, of.undone),
                false => format!("all VMs of job {} move: {}", self.id, of.reason),
            },
            job_progress: member.job.progress_part(),
            volumes: of.volumes,
        };
        let Err(problem) = migration::request(&self.cluster, member, request).await else {
            self.move_refused.remove(&rank);
            self.move_silent = None;
            return Ok(Some(Step::Wait(self.cluster.timing.poll)));
        };
        if seen(&self.cluster, Some(member), of, leg).is_moving {
            // A step that was cut has asked for it.
            return Ok(None);
        }
        let why = format!("{}: {}", problem.what, problem.why);
        if of.is_undone() {
            // The others are asked for meanwhile.
            let refused =
                Failed { why: why.clone(), at_ms: self.cluster.clock.passed_ms(), times: 1 };
            self.move_refused.insert(rank, refused);
            return self.move_troubled(rank, &why).await;
        }
        if self.waits_for_answers(&problem) {
            return Ok(None);
        }
        self.undo_move(members, format!("rank {rank} did not move: {why}")).await.map(Some)
    }

    /// Shows why a member that is to go back can't do so now.
    async fn move_troubled(&mut self, rank: usize, why: &str) -> Result<Option<Step>, Problem> {
        let why = self.cluster.hosts.named(&format!("rank {rank}: {why}"));
        let Some(of) = &mut self.gang()?.last_move else { return Ok(None) };
        if of.trouble != why {
            of.trouble = why;
            self.record.save().await?;
        }
        Ok(None)
    }

    async fn end_move(&mut self, members: &Members) -> Result<Step, Problem> {
        let all: Vec<&JobRecord> = members.iter().flatten().map(|member| &**member).collect();
        let sent = sent(&all);
        let Some(of) = self.gang()?.last_move.clone() else { return Ok(Step::Again) };
        if of.is_undone() {
            let what = format!("its VMs went back: {}", of.undone);
            planning::not_done(&self.cluster, &self.id, &what).await?;
        }
        // A controller that ends before the record is saved notes the move twice, and never not at all.
        if of.asked.is_none() && !of.is_undone() {
            for (leg, member) in of.legs.iter().zip(members).filter(|(leg, _)| leg.from != leg.to) {
                let Some(member) = member else { continue };
                let vm = vm_of(&member.job.id);
                by_itself::note(&self.cluster, &vm, (&leg.from, &leg.to)).await;
            }
        }
        let gang = self.gang()?;
        gang.sent_before = sent;
        gang.undone = if of.is_undone() { gang.undone + 1 } else { 0 };
        let torn = (of.legs.iter().zip(&all)).find(|(leg, member)| {
            member.job.host.as_ref() != Some(of.goal(leg)) && !has_ended(member)
        });
        let trouble = torn.map_or_else(String::new, |(leg, member)| {
            let vm = vm_of(&member.job.id);
            format!("{vm} can't go back, because host {} is no host of the cluster now", leg.from)
        });
        gang.last_move = Some(GangMove { ended_ms: Some(now_ms()), trouble, ..of });
        self.forget_refusals();
        self.record.save().await?;
        tracing::info!("job {}: the move of its VMs is over", self.id);
        Ok(Step::Again)
    }

    /// How far the move is that is under way.
    pub(super) fn move_in_words(&self, members: &[&JobRecord]) -> Option<String> {
        let of = self.record.value.kind.gang()?.open_move()?;
        let at_goal = of.legs.iter().zip(members);
        let at_goal = at_goal.filter(|(leg, one)| one.job.host.as_ref() == Some(of.goal(leg)));
        let far = format!("{} of {} are there", at_goal.count(), of.legs.len());
        if !of.is_undone() {
            return Some(format!("its VMs move one after another ({}): {far}", of.reason));
        }
        let trouble = match of.trouble.as_str() {
            "" => String::new(),
            trouble => format!("; one of them can't yet and is tried again: {trouble}"),
        };
        Some(format!("its VMs go back to where they were ({}): {far}{trouble}", of.undone))
    }
}
