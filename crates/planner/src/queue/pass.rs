//! One pass of the scheduler over all waiting jobs: which of them start where, with which plans, why the others wait, and what has
//! to be read and measured before they can be planned.
//!
//! It is a pure function of a snapshot. The controller gathers that, checks the decision against the present, and carries it out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use perigee_model::budget::{MoneyRange, Spending};
use perigee_model::money::Money;
use perigee_model::plan::{Estimate, Plan};
use perigee_model::tenant::tenant_of;
use perigee_model::{HostId, JobId, SiteId};

use super::{NotChosen, Queue, Refusals, Rented, Turn, Waiting, schedule};
use crate::facts::{Before, Cluster, Prepared, Snapshot};
use crate::options::way_name;

/// The facts about a queued job are read again after this time.
const FACTS_AGE_MAX_S: f64 = 60.0;

/// Older ones are not planned with.
const FACTS_USE_MAX_S: f64 = 120.0;

/// The pause after a failure to read them.
const RETRY_S: f64 = 2.0;

/// A job waits for this long until its links are measured; then it is placed with the known figures.
const LINKS_PATIENCE_S: f64 = 60.0;

/// Room is kept for a job for this long while its facts are read, or its links are measured.
const ROOM_PATIENCE_S: f64 = 5.0;

/// What the plans of so many of each tenant's next jobs need is read early, so that free hosts do not wait for it.
const READ_AHEAD: u32 = 16;

/// A home is asked for the facts about so many jobs at once. One that does not answer holds up these jobs, and
/// until they are given up, others at the other homes of these.
const ASKED_OF_HOME_MAX: u32 = 8;

/// What a pass is made from.
#[derive(Debug, Clone, Default)]
pub struct PassSnapshot {
    /// The jobs that wait, the room at the hosts, and the tenants' quotas.
    pub queue: Queue,
    /// The hosts that are up, and the measurements between them. Whether a job may start at a host follows from `queue`.
    pub cluster: Cluster,
    /// What is not measured between these hosts.
    pub not_measured: NotMeasured,
    /// What is known of waiting jobs. Nothing is known of a job that is not there.
    pub known: BTreeMap<JobId, Known>,
    /// Which plans earlier passes have refused, as the last one left it.
    pub refusals: Refusals,
}

/// Measurements that are missing, though the hosts are up.
#[derive(Debug, Clone, Default)]
pub struct NotMeasured {
    /// Hosts whose block reads from themselves are not measured.
    pub at: Vec<HostId>,
    /// One pair of hosts for each two sites between which nothing is measured, from the one that would read.
    pub between: Vec<(HostId, HostId)>,
}

impl NotMeasured {
    /// What of it a plan with data at these hosts needs: reads of each home from itself, and the links between its site and every
    /// other. A host without a site is not up.
    pub fn of_homes<'a>(
        &self,
        homes: &[HostId],
        site_of: impl Fn(&HostId) -> Option<&'a SiteId>,
    ) -> Vec<(HostId, HostId)> {
        let at = self.at.iter().filter(|at| homes.contains(at)).map(|at| (at.clone(), at.clone()));
        let sites: Vec<&SiteId> = homes.iter().filter_map(&site_of).collect();
        let is_near = |host: &HostId| site_of(host).is_some_and(|site| sites.contains(&site));
        let between = self.between.iter().filter(|(from, to)| is_near(from) || is_near(to));
        let mut needed: Vec<(HostId, HostId)> = at.chain(between.cloned()).collect();
        needed.sort();
        needed.dedup();
        needed
    }
}

/// What is known of a waiting job beyond what it asks for.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// The homes of its volumes, as last heard. They are asked for its facts.
    pub homes: Vec<HostId>,
    /// What was read for its plan; `None` before that.
    pub read: Option<Read>,
    /// For how long that has been asked for; `None` if nobody is being asked.
    pub asked_s: Option<f64>,
    /// For how long its links have been waited for; `None` if they are not.
    pub waits_for_links_s: Option<f64>,
}

/// What was read for a job's plan.
#[derive(Debug, Clone)]
pub struct Read {
    /// The time since then.
    pub age_s: f64,
    /// Whether one of its volumes may have got another home since.
    pub homes_changed: bool,
    /// The facts, or why they could not be read.
    pub facts: Result<Arc<Prepared>, String>,
}

impl Read {
    /// Whether it is no longer planned with. What could not be read is read again soon anyway.
    fn may_be_wrong(&self) -> bool {
        self.facts.is_ok() && (self.homes_changed || self.age_s >= FACTS_USE_MAX_S)
    }

    fn is_fresh(&self) -> bool {
        self.age_s < if self.facts.is_ok() { FACTS_AGE_MAX_S } else { RETRY_S }
    }
}

impl Known {
    /// Why the facts about the job could not be read when that was last tried.
    fn why_unknown(&self) -> Option<&String> {
        self.read.as_ref()?.facts.as_ref().err()
    }
}

/// What a pass decides. The caller checks each grant against the present: the cluster may have changed since the snapshot.
#[derive(Debug, Default)]
pub struct PassDecision {
    /// The jobs that start, the first one first.
    pub grants: Vec<JobGrant>,
    /// The place in the queue of each job that waits, and why.
    pub waits: BTreeMap<JobId, (u32, String)>,
    /// The jobs that wait for nothing but room, in the queue's order.
    pub for_room: Vec<JobId>,
    /// The jobs that can't start at the rented host where the renting rule has put them: their plans are refused there, or they may not go there.
    pub not_at: BTreeMap<JobId, HostId>,
    /// The jobs whose facts are to be read now.
    pub read: Vec<JobId>,
    /// The measurements that are to be made, each from the host that reads.
    pub measure: Vec<(HostId, HostId)>,
    /// Of the jobs that came so far: whether they wait for links.
    pub wait_for_links: BTreeMap<JobId, bool>,
    /// For the next pass.
    pub refusals: Refusals,
}

/// A job that starts.
#[derive(Debug)]
pub struct JobGrant {
    /// Its id.
    pub job: JobId,
    /// The hosts of its VMs, in the order of their ranks.
    pub hosts: Vec<HostId>,
    /// The plan, of a gang that of all of its VMs.
    pub plan: Plan,
    /// What the plan predicts.
    pub predicted: Estimate,
    /// What the plans say that all of its VMs cost; `None` if that is not known, or if nothing costs anything.
    pub cost: Option<MoneyRange>,
    /// What the plan was made from.
    pub facts: Arc<Prepared>,
}

/// Decides about every waiting job.
pub fn pass(snapshot: PassSnapshot) -> PassDecision {
    let PassSnapshot { mut queue, cluster, not_measured, known, mut refusals } = snapshot;
    let waiting: BTreeSet<&JobId> = queue.waiting.iter().map(|waiting| &waiting.job).collect();
    refusals.begin_pass(|job| waiting.contains(job));
    // Nothing is reserved for a job whose data can't be reached.
    for waiting in queue.waiting.iter_mut().filter(|waiting| waiting.blocked.is_none()) {
        waiting.blocked = known.get(&waiting.job).and_then(Known::why_unknown).cloned();
    }
    let mut asked_of: BTreeMap<HostId, u32> = BTreeMap::new();
    for home in known.values().filter(|known| known.asked_s.is_some()).flat_map(|it| &it.homes) {
        *asked_of.entry(home.clone()).or_default() += 1;
    }
    let with_budget = queue
        .quotas
        .iter()
        .filter_map(|(tenant, of)| Some((tenant.clone(), (of.quota.budget_month?, of.spending))));
    let mut pass = Pass {
        budgets: with_budget.collect(),
        costs: BTreeMap::new(),
        cluster,
        not_measured,
        known,
        asked_of,
        needed: BTreeMap::new(),
        gang: None,
        planned: VecDeque::new(),
        plans: BTreeMap::new(),
        rented: Arc::clone(&queue.rented),
        decision: PassDecision { refusals, not_at: may_not_go(&queue), ..PassDecision::default() },
    };
    let turns = schedule(&queue, |waiting, hosts| pass.choose(waiting, hosts));
    pass.decided(&queue, turns)
}

/// The jobs that may not go to the rented host where the renting rule has put them, which knows nothing of that.
fn may_not_go(queue: &Queue) -> BTreeMap<JobId, HostId> {
    let is_drained = |host: &HostId| queue.drained.iter().any(|room| room.id == *host);
    let waiting = queue.waiting.iter().filter_map(|waiting| {
        let host = &queue.rented.goes.get(&waiting.job)?.host;
        // As the queue itself binds them.
        let binds = |host: &HostId| !is_drained(host) && !waiting.lost_at.contains(host);
        let bounds = queue.grouped.bounds(&waiting.job, &waiting.groups, binds);
        let may_go = !waiting.avoid.contains(host) && bounds.allow(host);
        (!may_go).then(|| (waiting.job.clone(), host.clone()))
    });
    waiting.collect()
}

/// Where a VM starts, and what it costs there; `None` if that is not known, or if nothing costs anything.
type Chosen = (HostId, Option<MoneyRange>);

/// Why a plan has ways and none is chosen.
fn why_none(plan: &Plan) -> String {
    let first = plan.options.first();
    first.map_or_else(
        || "the planner chose nothing".to_owned(),
        |option| {
            let (way, start) = (way_name(option.way), &option.start);
            format!(
                "{way} at {start}, which ends first of what its file allows, is {}",
                option.reason
            )
        },
    )
}

/// What a plan has chosen, if that is at one of these hosts.
fn may_start(plan: Plan, hosts: &[HostId]) -> Result<(Plan, Chosen, Estimate), String> {
    let option = plan.chosen().ok_or_else(|| why_none(&plan))?;
    let (host, predicted) = (option.start.clone(), option.total);
    let cost = option.cost.as_ref().and_then(|cost| cost.total);
    match hosts.contains(&host) {
        true => Ok((plan, (host, cost), predicted)),
        false => Err(format!("the planner would start it at {host}, which has no room now")),
    }
}

/// Says in the plan of a gang where its VMs start, if that is not as it has planned.
fn note_other_hosts(plan: &mut Plan, hosts: &[HostId]) {
    let planned = plan.chosen().filter(|option| !option.hosts.is_empty());
    if planned.is_some_and(|option| option.hosts != hosts) {
        let names: Vec<&str> = hosts.iter().map(HostId::as_str).collect();
        let figure = format!("its VMs start at {}, where there was room", names.join(", "));
        plan.figures.push(figure);
    }
}

/// The plan of a job, and what it was made from.
type Planned = (Plan, Estimate, Arc<Prepared>);

/// A pass under way.
struct Pass {
    /// With the VMs that this pass has placed.
    cluster: Cluster,
    not_measured: NotMeasured,
    known: BTreeMap<JobId, Known>,
    /// The number of jobs about which each home is being asked.
    asked_of: BTreeMap<HostId, u32>,
    /// The measurements that data with these homes need. Many jobs have the same homes.
    needed: BTreeMap<Vec<HostId>, Vec<(HostId, HostId)>>,
    /// The last gang, and what the hosts of its VMs were before. If one of its VMs can't be planned, none is there.
    gang: Option<(JobId, Vec<Before>)>,
    /// The hosts of its next VMs, as its plan has them.
    planned: VecDeque<HostId>,
    plans: BTreeMap<JobId, Planned>,
    /// Of each tenant that has one: the budget for the month, with what is spent, and reserved also in this pass.
    budgets: BTreeMap<String, (Money, Spending)>,
    /// What the VMs cost that this pass has placed.
    costs: BTreeMap<JobId, MoneyRange>,
    rented: Arc<Rented>,
    decision: PassDecision,
}

impl Pass {
    /// The planner's choice among the hosts with room, or why the job waits. The next one is chosen as if this one ran there.
    fn choose(&mut self, waiting: &Waiting, hosts: &[HostId]) -> Result<HostId, NotChosen> {
        let (job, demand) = (&waiting.job, waiting.demand);
        let is_of_gang = self.gang.as_ref().is_some_and(|(gang, _)| gang == job);
        let chosen = match self.planned_next(is_of_gang, hosts) {
            Some(host) => Ok(host),
            None => self.plan(job, is_of_gang, hosts).map(|(host, cost)| {
                self.reserve(waiting, cost);
                host
            }),
        };
        match &chosen {
            Ok(host) => {
                let before = self.cluster.occupy(
                    host,
                    waiting.quota_cpus.max(demand.cpus),
                    demand.memory_bytes,
                );
                if waiting.count > 1 {
                    let mut gang = self.gang.take().filter(|_| is_of_gang);
                    gang.get_or_insert_with(|| (job.clone(), Vec::new())).1.extend(before);
                    self.gang = gang;
                }
            }
            Err(_) => {
                self.give_back(waiting);
                self.planned.clear();
                let placed =
                    self.gang.take_if(|_| is_of_gang).into_iter().flat_map(|(_, placed)| placed);
                placed.rev().for_each(|before| self.cluster.leave(&before));
            }
        }
        chosen
    }

    /// Takes what a VM may cost at most from its tenant's budget for the month, which has room for that.
    fn reserve(&mut self, waiting: &Waiting, cost: Option<MoneyRange>) {
        let Some(cost) = cost else { return };
        if let Some((budget, spending)) = self.budgets.get_mut(&waiting.holder.tenant) {
            debug_assert!(cost.high == Money::ZERO || spending.lacks(*budget, cost.high).is_none());
            spending.reserved = spending.reserved.plus(cost.high);
        }
        let sum = self.costs.entry(waiting.job.clone()).or_default();
        *sum = sum.plus(cost);
    }

    /// None of the job's VMs starts.
    fn give_back(&mut self, waiting: &Waiting) {
        let Some(cost) = self.costs.remove(&waiting.job) else { return };
        if let Some((_, spending)) = self.budgets.get_mut(&waiting.holder.tenant) {
            spending.reserved = spending.reserved.less(cost.high);
        }
    }

    /// Where the next VM of a gang starts by the plan of all of them; `None` if there is no such plan, or no room now. Then the rest of the
    /// plan does not count either.
    fn planned_next(&mut self, is_of_gang: bool, hosts: &[HostId]) -> Option<HostId> {
        let next = self.planned.pop_front().filter(|next| is_of_gang && hosts.contains(next));
        if next.is_none() {
            self.planned.clear();
        }
        next
    }

    /// `is_next`: one more VM of a gang of which some are placed, as if it were a job of its own. It costs nothing more if the plan of all VMs
    /// was made: that plan has what all of them cost.
    fn plan(&mut self, job: &JobId, is_next: bool, hosts: &[HostId]) -> Result<Chosen, NotChosen> {
        let facts = self.facts_of(job)?;
        self.links_known(job, &facts)?;
        if let Some(why) = self.decision.refusals.why_not_now(job) {
            return Err(why.into());
        }
        self.cluster.start_only_at(hosts);
        let Prepared { job: mut of_job, history, others } = facts.as_ref().clone();
        let age_s = self.known.get(job).and_then(|known| Some(known.read.as_ref()?.age_s));
        of_job.money.pass_s(age_s.unwrap_or_default());
        of_job.money.month = self.budgets.get(tenant_of(job.as_str())).copied();
        let whole = self.plans.get(job).and_then(|(plan, ..)| plan.chosen());
        let is_paid = is_next && whole.is_some_and(|option| !option.hosts.is_empty());
        if is_paid {
            // What is left of the budget is already without it.
            of_job.money.month = None;
        }
        of_job.gang.take_if(|_| is_next);
        let cluster = std::mem::take(&mut self.cluster);
        let mut snapshot = Snapshot { cluster, job: of_job, history, others };
        let planned = crate::plan(&snapshot).or_else(|refused| {
            // The queue knows more of the rooms, and places its VMs one by one.
            snapshot.job.gang.take().ok_or(refused)?;
            crate::plan(&snapshot)
        });
        self.cluster = snapshot.cluster;
        let chosen = planned.map_err(|refused| refused.to_string());
        let chosen = chosen.and_then(|plan| may_start(plan, hosts));
        let (plan, (host, cost), predicted) =
            chosen.inspect_err(|why| self.is_refused(job, hosts, why))?;
        if let Some(option) = plan.chosen().filter(|_| !is_next) {
            self.planned = option.hosts.iter().skip(1).cloned().collect();
        }
        if !is_next {
            self.plans.insert(job.clone(), (plan, predicted, facts));
        }
        Ok((host, cost.filter(|_| !is_paid)))
    }

    /// The job's plan is refused at these hosts.
    fn is_refused(&mut self, job: &JobId, hosts: &[HostId], why: &str) {
        self.decision.refusals.note(job, why);
        if let Some(goes) = self.rented.goes.get(job).filter(|goes| hosts.contains(&goes.host)) {
            self.decision.not_at.insert(job.clone(), goes.host.clone());
        }
    }

    /// The facts about the job. If they are not known yet, they are to be read.
    fn facts_of(&mut self, job: &JobId) -> Result<Arc<Prepared>, NotChosen> {
        self.read(job);
        let known = self.known.entry(job.clone()).or_default();
        match known.read.as_ref().map(|read| &read.facts) {
            Some(Ok(facts)) => Ok(Arc::clone(facts)),
            Some(Err(why)) => Err(why.clone().into()),
            None => Err(not_yet(known.asked_s, "the facts for its plan are being read".to_owned())),
        }
    }

    /// Lets the facts about the job be read, unless they are known or asked for.
    fn read(&mut self, job: &JobId) {
        let known = self.known.entry(job.clone()).or_default();
        known.read.take_if(|read| read.may_be_wrong());
        let asked_of = |home: &HostId| self.asked_of.get(home).copied().unwrap_or_default();
        let may_ask = known.homes.iter().all(|home| asked_of(home) < ASKED_OF_HOME_MAX);
        let is_fresh = known.read.as_ref().is_some_and(Read::is_fresh);
        if !is_fresh && may_ask && known.asked_s.is_none() {
            for home in &known.homes {
                *self.asked_of.entry(home.clone()).or_default() += 1;
            }
            known.asked_s = Some(0.0);
            self.decision.read.push(job.clone());
        }
    }

    /// Missing measurements are to be made. After some time the job is planned without them.
    fn links_known(&mut self, job: &JobId, facts: &Prepared) -> Result<(), NotChosen> {
        let homes: Vec<HostId> =
            facts.job.volumes.iter().map(|volume| volume.home.clone()).collect();
        let (not_measured, cluster) = (&self.not_measured, &self.cluster);
        let needed = self.needed.entry(homes);
        let needed = needed.or_insert_with_key(|homes| needed_of(not_measured, cluster, homes));
        let known = self.known.entry(job.clone()).or_default();
        // Other links may be missing when a volume has moved.
        self.decision.wait_for_links.insert(job.clone(), !needed.is_empty());
        let Some((from, to)) = needed.first() else { return Ok(()) };
        if known.waits_for_links_s.is_none() {
            self.decision.measure.extend(needed.iter().cloned());
        }
        let waits_s = *known.waits_for_links_s.get_or_insert(0.0);
        if waits_s > LINKS_PATIENCE_S {
            return Ok(());
        }
        let why = format!("the link between {from} and {to} is being measured");
        Err(not_yet(Some(waits_s), why))
    }

    /// Grants, waits, and what the next jobs need.
    fn decided(mut self, queue: &Queue, turns: Vec<(JobId, Turn)>) -> PassDecision {
        let mut next = Vec::new();
        for (job, turn) in turns {
            let hosts = match turn {
                Turn::Start(host) => vec![host],
                Turn::StartAll(hosts) => hosts,
                Turn::Wait { place, reason, for_room } => {
                    if for_room {
                        self.decision.for_room.push(job.clone());
                    }
                    if place <= READ_AHEAD {
                        next.push(job.clone());
                    }
                    self.decision.waits.insert(job, (place, reason));
                    continue;
                }
            };
            let Some((mut plan, predicted, facts)) = self.plans.remove(&job) else { continue };
            note_other_hosts(&mut plan, &hosts);
            let cost = self.costs.remove(&job);
            self.decision.grants.push(JobGrant { job, hosts, plan, predicted, cost, facts });
        }
        let mut homes: Vec<HostId> = Vec::new();
        for job in &next {
            self.read(job);
            homes.extend(self.known.get(job).into_iter().flat_map(|known| known.homes.clone()));
        }
        homes.sort();
        homes.dedup();
        self.decision.measure.extend(needed_of(&self.not_measured, &self.cluster, &homes));
        for waiting in &queue.waiting {
            if self.known.get(&waiting.job).and_then(Known::why_unknown).is_some() {
                self.read(&waiting.job);
            }
        }
        self.decision
    }
}

fn needed_of(
    not_measured: &NotMeasured,
    cluster: &Cluster,
    homes: &[HostId],
) -> Vec<(HostId, HostId)> {
    not_measured.of_homes(homes, |host| cluster.host(host).ok().map(|host| &host.site))
}

/// Something that a job's plan needs has been asked for since then.
fn not_yet(since_s: Option<f64>, why: String) -> NotChosen {
    match since_s {
        Some(since_s) if since_s < ROOM_PATIENCE_S => NotChosen::NotYet(why),
        _ => NotChosen::Refused(why),
    }
}

#[cfg(test)]
mod tests;
