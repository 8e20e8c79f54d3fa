//! When a job that is not submitted yet could start at hosts that have no room for it now: the queue's drain, as the rule that rents hosts
//! predicts it, by what is expected and by both ends of the ranges.
//!
//! Jobs that wait with less priority come after it. What tenants' quotas, rules of hosts and networks keep from starting is not in it.

use std::collections::{BTreeMap, BTreeSet};

use perigee_model::job::{JobSpec, JobState, Start};
use perigee_model::job_plan::HostWait;
use perigee_model::money::Money;
use perigee_model::plan::Estimate;
use perigee_model::tenant::tenant_of;
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::queue::Demand;
use perigee_planner::rent::{self, NEVER_S};
use perigee_planner::{Cluster as Facts, Prepared, Snapshot};

use super::{leave_out, prepare_record, seconds};
use crate::cluster::{Cluster, capacity, demand_of};
use crate::records::JobRecord;

/// So many waiting jobs are predicted for one plan.
const PREDICTED_MOST: usize = 100;

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

/// When the job could start at each host that it has to wait for.
///
/// # Errors
/// If the store fails.
pub async fn waits(cluster: &Cluster, spec: &JobSpec) -> Result<Vec<HostWait>, Problem> {
    let rented = rented_for_others(cluster, spec);
    let full = without_room(cluster, spec, &rented);
    if full.is_empty() {
        return Ok(Vec::new());
    }
    let queue = before(cluster, spec);
    let unknown = |why: &str| {
        let why = format!("not known when it has room: {why}");
        let hosts = full.keys().cloned();
        hosts.map(|host| HostWait { host, wait: None, why: why.clone() }).collect()
    };
    if queue.len() > PREDICTED_MOST {
        let why = format!(
            "{} jobs wait, and a plan predicts at most {PREDICTED_MOST} of them",
            queue.len()
        );
        return Ok(unknown(&why));
    }
    let mut jobs = Vec::new();
    for record in &queue {
        match run_of(cluster, record).await {
            Some(run) => jobs.extend((0..record.job.spec.count.max(1)).map(|_| job(record, run))),
            None => {
                // Jobs of other tenants have no names here.
                let is_own = tenant_of(&record.job.spec.name) == tenant_of(&spec.name);
                let which =
                    if is_own { format!("job {}", record.job.id) } else { "a job".to_owned() };
                let why = format!("how long {which} takes that waits is not known");
                return Ok(unknown(&why));
            }
        }
    }
    let own = Waiting {
        id: JobId::new("planned").map_err(|e| Problem::internal("can't plan the job", e))?,
        demand: Demand { cpus: spec.cpus, memory_bytes: spec.memory_bytes },
        run: Estimate::default(),
    };
    let hosts = hosts(cluster, &rented);
    let by_end = [End::Expected, End::Low, End::High].map(|end| {
        let waits = rent::waits(&snapshot(&hosts, &jobs, end), &own.as_job(end));
        waits.into_iter().collect::<BTreeMap<_, _>>()
    });
    let wait = |host: HostId| {
        let [expected_s, low_s, high_s] =
            [0, 1, 2].map(|end: usize| by_end[end].get(&host).copied().flatten());
        let wait = expected_s.zip(low_s).zip(high_s).map(|((expected_s, low_s), high_s)| {
            Estimate { expected_s, low_s: low_s.min(expected_s), high_s: high_s.max(expected_s) }
        });
        let why = match (wait, queue.len()) {
            (None, _) => {
                "not known when it has room: a VM is there whose end is not known".to_owned()
            }
            (Some(_), 0) => "waits for those that run there".to_owned(),
            (Some(_), 1) => "waits for 1 job, and for those that run there".to_owned(),
            (Some(_), jobs) => format!("waits for {jobs} jobs, and for those that run there"),
        };
        HostWait { host, wait, why }
    };
    Ok(full.into_keys().map(wait).collect())
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
fn before(cluster: &Cluster, spec: &JobSpec) -> Vec<std::sync::Arc<JobRecord>> {
    let mut waiting = cluster.index.waiting();
    waiting.retain(|record| record.job.spec.priority >= spec.priority);
    waiting.sort_by_key(|record| record.job.submitted_ms);
    waiting
}

/// How long a waiting job will run, from its VM's start; `None` if that is not known.
async fn run_of(cluster: &Cluster, record: &JobRecord) -> Option<Estimate> {
    let Prepared { job, history, others } = prepare_record(cluster, record).await.ok()?;
    let mut facts = super::facts(cluster);
    let spec = &record.job.spec;
    let rented = rented_for_others(cluster, spec);
    make_room(&mut facts, &without_room(cluster, spec, &rented), spec);
    leave_out(&mut facts, &rented);
    let plan = perigee_planner::plan(&Snapshot { cluster: facts, job, history, others }).ok()?;
    let total = plan.options.first()?.total;
    total.helps().then_some(total)
}

/// A waiting job, or the one that is planned.
struct Waiting {
    id: JobId,
    demand: Demand,
    run: Estimate,
}

fn job(record: &JobRecord, run: Estimate) -> Waiting {
    Waiting { id: record.job.id.clone(), demand: demand_of(record), run }
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
type HostNow = (Demand, Vec<(Demand, Option<Estimate>)>);

/// The hosts that take jobs, without those of `rented`.
fn hosts(cluster: &Cluster, rented: &BTreeSet<HostId>) -> BTreeMap<HostId, HostNow> {
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
        let at = record.job.host.as_ref().filter(|_| !record.kind.is_gang());
        if let Some((_, running)) = at.and_then(|host| hosts.get_mut(host)) {
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
        arrived: Vec::new(),
        hosts: hosts.iter().map(host).collect(),
        offers: Vec::new(),
        starts: BTreeMap::new(),
        refusals: Vec::new(),
        budget_left: Money::ZERO,
        period: None,
        rented_most: 0,
    }
}
