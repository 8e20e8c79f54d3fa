//! When a job that is not submitted yet could start at hosts that have no room for it now: the queue's drain, as the rule that rents hosts
//! predicts it, by what is expected and by both ends of the ranges. A job with several VMs waits until all have room at once, as one
//! does that waits before it.
//!
//! Jobs that wait with less priority come after it. What tenants' quotas, rules of hosts and networks keep from starting is not in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::job::{JobSpec, JobState, Start};
use perigee_model::job_plan::HostWait;
use perigee_model::money::Money;
use perigee_model::plan::Estimate;
use perigee_model::tenant::tenant_of;
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::gangs::GangFacts;
use perigee_planner::queue::Demand;
use perigee_planner::rent::{self, JOBS_MOST, NEVER_S};
use perigee_planner::{Cluster as Facts, HostFacts, Prepared, Snapshot};

use super::renting::{forget_money, key_of, place_of, read_facts};
use super::{gangs, leave_out, seconds};
use crate::cluster::{Cluster, Used, capacity, demand_of};
use crate::records::JobRecord;

/// So many kinds of waiting jobs are predicted for one plan. Jobs that take the same are of one kind.
const KINDS_MOST: usize = 32;

/// A plan waits so long for these predictions.
const PREDICT_MAX: Duration = Duration::from_secs(10);

/// What a VM without a job takes.
const NEVER: Estimate = Estimate { expected_s: NEVER_S, low_s: NEVER_S, high_s: NEVER_S };

/// The hosts that the cluster has rented by itself: only the rule lets jobs start there, and a job file that names the host.
pub fn rented_for_others(cluster: &Cluster, spec: &JobSpec) -> BTreeSet<HostId> {
    let mut of_rule = cluster.rentals.hosts_by_rule();
    if let Start::Host(named) = &spec.start {
        of_rule.remove(named);
    }
    of_rule
}

/// The hosts that have no room for the job now, each with its whole capacity, without those of `rented`, which are for others.
pub fn without_room(
    cluster: &Cluster,
    spec: &JobSpec,
    rented: &BTreeSet<HostId>,
) -> BTreeMap<HostId, Demand> {
    let used = cluster.index.used();
    let up = cluster.hosts.up().into_iter().filter(|host| !rented.contains(&host.id));
    let full = up.filter_map(|host| {
        let report = cluster.hosts.report(&host.id)?;
        let total = capacity(&report);
        let mut free = total;
        free.take(used.get(&host.id).copied().unwrap_or_default().demand);
        let has_room = free.cpus >= spec.cpus && free.memory_bytes >= spec.memory_bytes;
        let would_have = total.cpus >= spec.cpus && total.memory_bytes >= spec.memory_bytes;
        (!has_room && would_have).then(|| (host.id.clone(), total))
    });
    full.collect()
}

/// Lets the hosts look as they will when there is room for the job.
pub fn make_room(facts: &mut Facts, full: &BTreeMap<HostId, Demand>, spec: &JobSpec) {
    for host in &mut facts.hosts {
        let Some(total) = full.get(&host.id) else { continue };
        host.memory_free_bytes = total.memory_bytes;
        // Which of its VMs will be there then, nobody knows.
        host.running_vcpus = host.running_vcpus.min(total.cpus.saturating_sub(spec.cpus));
        host.cpu_load = None;
    }
}

/// Lets the hosts look as if all jobs had ended, for a gang that has no room for all of its VMs now. VMs without a job do not end by
/// themselves, and stay.
pub fn make_room_for_all(
    cluster: &Cluster,
    facts: &mut Facts,
    (spec, rented): (&JobSpec, &BTreeSet<HostId>),
) {
    let (used, demand) = (cluster.index.used(), demand_for(spec));
    for host in facts.hosts.iter_mut().filter(|host| !rented.contains(&host.id)) {
        let Some(left) = for_jobs(cluster, &used, &host.id) else { continue };
        let stay = used.get(&host.id).map_or(0, |used| used.persistent.cpus);
        let vcpus = host.running_vcpus.min(stay);
        let is_full = host.memory_free_bytes < left.memory_bytes || host.running_vcpus > vcpus;
        if left.holds(demand) > 0 && is_full {
            host.memory_free_bytes = left.memory_bytes;
            (host.running_vcpus, host.cpu_load) = (vcpus, None);
        }
    }
}

/// What each VM of a job takes.
fn demand_for(spec: &JobSpec) -> Demand {
    Demand { cpus: spec.cpus, memory_bytes: spec.memory_bytes }
}

/// What a host has when all jobs have ended: VMs without a job do not end by themselves. `None` if it has not reported.
pub fn for_jobs(cluster: &Cluster, used: &BTreeMap<HostId, Used>, host: &HostId) -> Option<Demand> {
    let report = cluster.hosts.report(host)?;
    let mut left = capacity(&report);
    left.take(used.get(host).copied().unwrap_or_default().persistent);
    Some(left)
}

/// When all VMs of a gang have room at once, at the hosts of each place where they could start together: a site, a host, or all hosts.
/// `facts` says where they may start.
///
/// # Errors
/// As [`waits`].
pub async fn waits_for_all(
    cluster: &Arc<Cluster>,
    spec: &JobSpec,
    rented: &BTreeSet<HostId>,
    (facts, gang): (&Facts, &GangFacts),
) -> Result<Vec<HostWait>, Problem> {
    let may_start = |host: &&HostFacts| {
        let is_allowed = gangs::may_start(&spec.start, &host.id, &host.site);
        host.takes_jobs && is_allowed && !rented.contains(&host.id)
    };
    let (used, demand) = (cluster.index.used(), demand_for(spec));
    let (count, most_each) = (spec.count.max(1), gang.apart.then_some(1));
    let mut places: BTreeMap<String, (u32, BTreeSet<HostId>)> = BTreeMap::new();
    for host in facts.hosts.iter().filter(may_start) {
        let place = match (gang.together, gang.one_site) {
            (true, _) => host.id.to_string(),
            (false, true) => host.site.to_string(),
            (false, false) => String::new(),
        };
        let holds = for_jobs(cluster, &used, &host.id).map_or(0, |left| left.holds(demand));
        let (all, hosts) = places.entry(place).or_default();
        *all = all.saturating_add(most_each.map_or(holds, |most| holds.min(most)));
        hosts.insert(host.id.clone());
    }
    let large = places.into_values().filter(|(holds, _)| *holds >= count);
    let large: Vec<BTreeSet<HostId>> = large.map(|(_, hosts)| hosts).collect();
    let hosts: Vec<HostId> = large.iter().flatten().cloned().collect();
    let waits = predicted_waits(cluster, spec, rented, &hosts, move |snapshot, job| {
        rent::waits_for_all(snapshot, job, (count, most_each), &large)
    });
    let mut waits = waits.await?;
    waits.retain(|wait| wait.wait.is_none_or(|wait| wait.high_s > 0.0));
    Ok(waits)
}

/// When the job could start at each host that it has to wait for: those of `full` ([`without_room`]). `rented`: [`rented_for_others`].
///
/// # Errors
/// Never, but for a fault of this program.
pub async fn waits(
    cluster: &Arc<Cluster>,
    spec: &JobSpec,
    rented: &BTreeSet<HostId>,
    full: &BTreeMap<HostId, Demand>,
) -> Result<Vec<HostWait>, Problem> {
    let hosts: Vec<HostId> = full.keys().cloned().collect();
    predicted_waits(cluster, spec, rented, &hosts, rent::waits).await
}

/// When the job has room at these hosts, as `waits` says it of the queue's drain.
async fn predicted_waits<W>(
    cluster: &Arc<Cluster>,
    spec: &JobSpec,
    rented: &BTreeSet<HostId>,
    at: &[HostId],
    waits: W,
) -> Result<Vec<HostWait>, Problem>
where
    W: Fn(&rent::Snapshot, &rent::Job) -> Vec<(HostId, Option<f64>)> + Send + 'static,
{
    if at.is_empty() {
        return Ok(Vec::new());
    }
    let all = if spec.count > 1 { "all of its VMs have" } else { "it has" };
    let queue = before(cluster, spec);
    let predicted = tokio::time::timeout(PREDICT_MAX, predicted(cluster, spec, &queue)).await;
    let predicted = predicted.unwrap_or_else(|_| {
        let s = PREDICT_MAX.as_secs();
        Err(format!("how long the jobs take that wait was not predicted within {s} s"))
    });
    let jobs = match predicted {
        Ok(jobs) => jobs,
        Err(why) => {
            let why = format!("not known when {all} room: {why}");
            let wait =
                |host: &HostId| HostWait { host: host.clone(), wait: None, why: why.clone() };
            return Ok(at.iter().map(wait).collect());
        }
    };
    let what = "can't plan the job";
    let own = Waiting {
        id: JobId::new("planned").map_err(|e| Problem::internal(what, e))?,
        demand: demand_for(spec),
        run: Estimate::default(),
    };
    let hosts = hosts(cluster, rented);
    // Of 2,000 jobs that takes long.
    let by_end = tokio::task::spawn_blocking(move || {
        [End::Expected, End::Low, End::High].map(|end| {
            let waits = waits(&snapshot(&hosts, &jobs, end), &own.as_job(end));
            waits.into_iter().collect::<BTreeMap<_, _>>()
        })
    });
    let by_end = by_end.await.map_err(|e| Problem::internal(what, e))?;
    let wait = |host: &HostId| {
        let [expected_s, low_s, high_s] =
            [0, 1, 2].map(|end: usize| by_end[end].get(host).copied().flatten());
        let wait = expected_s.zip(low_s).zip(high_s).map(|((expected_s, low_s), high_s)| {
            Estimate { expected_s, low_s: low_s.min(expected_s), high_s: high_s.max(expected_s) }
        });
        let why = match (wait, queue.len()) {
            (None, _) if queue.iter().any(|record| record.kind.is_persistent_vm()) => {
                format!(
                    "not known when {all} room: a VM is there, or comes there first, whose end is not known"
                )
            }
            (None, _) => {
                format!("not known when {all} room: a VM is there whose end is not known")
            }
            (Some(_), 0) => "waits for those that run there".to_owned(),
            (Some(_), 1) => "waits for 1 job, and for those that run there".to_owned(),
            (Some(_), jobs) => format!("waits for {jobs} jobs, and for those that run there"),
        };
        HostWait { host: host.clone(), wait, why }
    };
    Ok(at.iter().map(wait).collect())
}

/// One of the three figures of an [`Estimate`].
#[derive(Debug, Clone, Copy)]
enum End {
    Expected,
    Low,
    High,
}

impl End {
    fn of(self, estimate: &Estimate) -> f64 {
        match self {
            Self::Expected => estimate.expected_s,
            Self::Low => estimate.low_s,
            Self::High => estimate.high_s,
        }
    }
}

/// The waiting jobs that come before one that is submitted now.
fn before(cluster: &Cluster, spec: &JobSpec) -> Vec<Arc<JobRecord>> {
    let mut waiting = cluster.index.waiting();
    waiting.retain(|record| record.job.spec.priority >= spec.priority);
    waiting.sort_by_key(|record| record.job.submitted_ms);
    waiting
}

/// The jobs of the queue, each with how long it will run from its VM's start. Those that take the same are predicted once.
///
/// # Errors
/// Why that is not known, in words.
async fn predicted(
    cluster: &Arc<Cluster>,
    spec: &JobSpec,
    queue: &[Arc<JobRecord>],
) -> Result<Vec<Waiting>, String> {
    let all: usize = queue.iter().map(|record| vms(record)).sum();
    if all > JOBS_MOST {
        return Err(format!("{all} jobs wait, and a plan looks at {JOBS_MOST} of them at most"));
    }
    let mut kinds: BTreeMap<String, Arc<JobRecord>> = BTreeMap::new();
    for record in queue.iter().filter(|record| !record.kind.is_persistent_vm()) {
        kinds.entry(key_of(&record.job.spec)).or_insert_with(|| Arc::clone(record));
    }
    if kinds.len() > KINDS_MOST {
        let kinds = kinds.len();
        return Err(format!(
            "{kinds} kinds of jobs wait, and a plan predicts {KINDS_MOST} of them at most"
        ));
    }
    let unknown = |record: &JobRecord| {
        let name = &record.job.spec.name;
        // Jobs of other tenants have no names here.
        let is_own = tenant_of(name) == tenant_of(&spec.name);
        let which = if is_own { format!("job {}", record.job.id) } else { "a job".to_owned() };
        format!("how long {which} takes that waits is not known")
    };
    let asked: Vec<_> = kinds.iter().map(|(key, one)| (key.clone(), Arc::clone(one))).collect();
    let now = super::facts(cluster);
    let mut snapshots = Vec::new();
    for (key, facts) in read_facts(cluster, &asked).await {
        let record = &kinds[&key];
        let prepared = facts.map_err(|_| unknown(record))?;
        let with_room = with_room(cluster, &record.job.spec, now.clone(), prepared).await;
        snapshots.push((key, with_room.map_err(|_| unknown(record))?));
    }
    // It takes some milliseconds for each kind.
    let runs = tokio::task::spawn_blocking(move || {
        let run = |(key, snapshot): (String, Snapshot)| (key, run_of(&snapshot));
        snapshots.into_iter().map(run).collect::<BTreeMap<String, Option<Estimate>>>()
    });
    let runs = runs.await.map_err(|e| format!("the prediction has failed: {e}"))?;
    let mut jobs = Vec::new();
    for record in queue {
        let run = match record.kind.is_persistent_vm() {
            true => NEVER,
            false => {
                let run = runs.get(&key_of(&record.job.spec)).copied().flatten();
                run.ok_or_else(|| unknown(record))?
            }
        };
        let waiting = || Waiting { id: record.job.id.clone(), demand: demand_of(record), run };
        jobs.extend(std::iter::repeat_with(waiting).take(vms(record)));
    }
    Ok(jobs)
}

/// What a job that waits is predicted from: the hosts as they will be when they have room for it.
async fn with_room(
    cluster: &Cluster,
    spec: &JobSpec,
    mut facts: Facts,
    mut prepared: Prepared,
) -> Result<Snapshot, Problem> {
    gangs::add(cluster, spec, &mut prepared).await?;
    let Prepared { mut job, history, others } = prepared;
    forget_money(&mut job);
    let rented = rented_for_others(cluster, spec);
    match spec.is_gang() {
        true => {
            make_room_for_all(cluster, &mut facts, (spec, &rented));
            gangs::keep_to_site(cluster, spec, &mut facts).await?;
        }
        false => make_room(&mut facts, &without_room(cluster, spec, &rented), spec),
    }
    leave_out(&mut facts, &rented);
    Ok(Snapshot { cluster: facts, job, history, others })
}

/// Of a job with several VMs each one takes room.
fn vms(record: &JobRecord) -> usize {
    record.job.spec.count.max(1) as usize
}

/// How long a job runs; `None` if the prediction does not help.
fn run_of(snapshot: &Snapshot) -> Option<Estimate> {
    let total = perigee_planner::plan(snapshot).ok()?.chosen()?.total;
    total.helps().then_some(total)
}

/// A waiting job, or the one that is planned.
struct Waiting {
    id: JobId,
    demand: Demand,
    run: Estimate,
}

impl Waiting {
    fn as_job(&self, end: End) -> rent::Job {
        let run =
            rent::Run { expected_s: end.of(&self.run), high_s: self.run.high_s, egress_bytes: 0 };
        rent::Job {
            job: self.id.clone(),
            cpus: self.demand.cpus,
            memory_bytes: self.demand.memory_bytes,
            own: Some(run),
            own_egress: Money::ZERO,
            rented: BTreeMap::new(),
            may_leave: false,
            without_kvm: true,
            worth: rent::Worth::default(),
        }
    }
}

/// What a host has, and the VMs that run there with the time that is left of each; `None` if that is not known.
pub type HostNow = (Demand, Vec<(Demand, Option<Estimate>)>);

/// The hosts that take jobs, without those of `rented`.
pub fn hosts(cluster: &Cluster, rented: &BTreeSet<HostId>) -> BTreeMap<HostId, HostNow> {
    let up = cluster.hosts.up().into_iter().filter(|host| !rented.contains(&host.id));
    let up = up.filter(|host| cluster.hosts.drain(&host.id).is_none());
    let mut hosts: BTreeMap<HostId, HostNow> = up
        .filter_map(|host| {
            let report = cluster.hosts.report(&host.id)?;
            Some((host.id.clone(), (capacity(&report), Vec::new())))
        })
        .collect();
    for record in cluster.unfinished_jobs() {
        // The members of a gang have records of their own.
        let at = if record.kind.is_gang() { None } else { place_of(cluster, &record) };
        if let Some((_, running)) = at.and_then(|host| hosts.get_mut(&host)) {
            running.push((demand_of(&record), left(cluster, &record)));
        }
    }
    hosts
}

/// How long a VM that has a host still has it.
fn left(cluster: &Cluster, record: &JobRecord) -> Option<Estimate> {
    if record.kind.is_persistent_vm() {
        return None;
    }
    if record.job.state == JobState::Running {
        return cluster.index.predicted_end(&record.job.id).left;
    }
    let predicted = record.job.predicted.filter(Estimate::helps)?;
    let age_ms = record.job.started_ms.map_or(0, |started_ms| cluster.clock.age_ms(started_ms));
    Some(predicted.after(seconds(age_ms)))
}

fn snapshot(hosts: &BTreeMap<HostId, HostNow>, jobs: &[Waiting], end: End) -> rent::Snapshot {
    let host = |(host, (total, running)): (&HostId, &HostNow)| {
        let running = running.iter().map(|(demand, left)| rent::Running {
            cpus: demand.cpus,
            memory_bytes: demand.memory_bytes,
            left_s: left.map_or(NEVER_S, |left| end.of(&left)),
            left_high_s: left.map_or(NEVER_S, |left| left.high_s),
        });
        rent::Host {
            host: host.clone(),
            cpus: total.cpus,
            memory_bytes: total.memory_bytes,
            kvm: true,
            ready_in_s: 0.0,
            running: running.collect(),
            // What it costs matters to none of them.
            rented: None,
        }
    };
    rent::Snapshot {
        jobs: jobs.iter().map(|job| job.as_job(end)).collect(),
        hosts: hosts.iter().map(host).collect(),
        ..rent::Snapshot::default()
    }
}
