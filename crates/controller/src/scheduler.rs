//! The scheduler: the only task that gives hosts to queued jobs.
//!
//! It passes a snapshot of the index to a pure function ([`perigee_planner::queue`]) and carries out its
//! decision. A grant is only in the index: the job's driver records the placement, and after a restart the
//! job is queued again. The facts that a job's plan needs (the homes of its volumes, earlier runs) are read
//! in separate tasks; the scheduler never waits for a host.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use perigee_model::gang::member_of;
use perigee_model::job::HostState;
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::queue::{Holder, HostRoom, Queue, Turn, Waiting, schedule};
use perigee_planner::{Cluster as Facts, PastRun, Snapshot};
use tokio::task::JoinSet;

use crate::cluster::{Cluster, Grant, capacity, demand_of, now_ms, starts_at_once};
use crate::records::JobRecord;
use crate::{cleaner, links, networks, planning, tpm};

/// The pause between two decisions, so that many concurrent changes cause only one.
const GAP: Duration = Duration::from_millis(20);

/// The facts about a queued job are read again after this time.
const FACTS_AGE_MAX: Duration = Duration::from_secs(60);

/// The pause after a failure to read them.
const RETRY: Duration = Duration::from_secs(2);

/// A job waits for this long until its links are measured; then it is placed with the known figures.
const LINKS_PATIENCE: Duration = Duration::from_secs(60);

/// What is known of a queued job beyond its record.
#[derive(Debug)]
struct Known {
    at: Instant,
    /// Before it was read: a volume may have got another home since.
    homes_at: u64,
    facts: Result<planning::Prepared, Problem>,
}

type Learned = (JobId, u64, Result<planning::Prepared, Problem>);

#[derive(Default)]
struct Scheduler {
    known: BTreeMap<JobId, Known>,
    learning: JoinSet<Learned>,
    asked: BTreeMap<JobId, Instant>,
    /// Since when a job's links have been missing.
    unmeasured: BTreeMap<JobId, Instant>,
}

pub async fn run(cluster: Arc<Cluster>) {
    let mut scheduler = Scheduler::default();
    loop {
        scheduler.pass(&cluster).await;
        tokio::select! {
            () = cluster.index.changed.notified() => {}
            Some(learned) = scheduler.learning.join_next() => scheduler.learned(learned),
            () = tokio::time::sleep(cluster.timing.monitor) => {}
        }
        tokio::time::sleep(GAP).await;
        while let Some(learned) = scheduler.learning.try_join_next() {
            scheduler.learned(learned);
        }
    }
}

impl Scheduler {
    fn learned(&mut self, learned: Result<Learned, tokio::task::JoinError>) {
        match learned {
            Ok((job, homes_at, facts)) => {
                self.asked.remove(&job);
                self.known.insert(job, Known { at: Instant::now(), homes_at, facts });
            }
            // Facts that are too old are requested again.
            Err(error) => tracing::error!("can't read the facts of a job: {error}"),
        }
    }

    /// One decision over all queued jobs.
    async fn pass(&mut self, cluster: &Arc<Cluster>) {
        let begun = Instant::now();
        let records = cluster.index.waiting();
        let ids: BTreeSet<&JobId> = records.iter().map(|record| &record.job.id).collect();
        let waiting_ids = |job: &JobId| ids.contains(job);
        self.known.retain(|job, _| waiting_ids(job));
        self.unmeasured.retain(|job, _| waiting_ids(job));
        self.asked.retain(|job, at| at.elapsed() < FACTS_AGE_MAX && waiting_ids(job));
        if !records.is_empty() {
            let queue = queue(cluster, &records).await;
            self.decide(cluster, &records, &queue);
        }
        let spent_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        cluster.counters.passes.fetch_add(1, Ordering::Relaxed);
        cluster.counters.pass_us.fetch_add(spent_us, Ordering::Relaxed);
    }

    fn decide(&mut self, cluster: &Arc<Cluster>, records: &[Arc<JobRecord>], queue: &Queue) {
        let mut facts = planning::facts(cluster);
        let by_id: BTreeMap<&JobId, &Arc<JobRecord>> =
            records.iter().map(|record| (&record.job.id, record)).collect();
        // Of a gang: one for each of its VMs.
        let mut grants: BTreeMap<JobId, Vec<Grant>> = BTreeMap::new();
        // The facts before the first VM of a gang was planned with. If one of them can't be, none is there.
        let mut before_gang: Option<(JobId, Facts)> = None;
        let turns = schedule(queue, |waiting, hosts| {
            if waiting.count > 1 && before_gang.as_ref().is_none_or(|(of, _)| *of != waiting.job) {
                before_gang = Some((waiting.job.clone(), facts.clone()));
            }
            let chosen = self.choose(cluster, by_id[&waiting.job], hosts, &mut facts);
            if chosen.is_err()
                && let Some((_, before)) = before_gang.take_if(|(of, _)| *of == waiting.job)
            {
                facts = before;
            }
            let grant = chosen?;
            let host = grant.host.clone();
            grants.entry(waiting.job.clone()).or_default().push(grant);
            Ok(host)
        });
        let mut waits = BTreeMap::new();
        for (job, turn) in turns {
            match turn {
                Turn::Start(_) | Turn::StartAll(_) => {
                    let mut all = grants.remove(&job).into_iter().flatten();
                    let Some(first) = all.next() else { continue };
                    let grant = Grant { others: all.map(|grant| grant.host).collect(), ..first };
                    if !cluster.index.give(&job, grant) {
                        let reason = "one of its volumes is being moved, or was just now";
                        waits.insert(job, (1, reason.to_owned()));
                        continue;
                    }
                    cluster.counters.placed.fetch_add(1, Ordering::Relaxed);
                    cluster.drive_job(&job);
                }
                Turn::Wait { place, reason } => {
                    waits.insert(job, (place, reason));
                }
            }
        }
        cluster.index.set_waits(waits);
    }

    /// The planner's choice among the hosts with room, or why the job waits.
    fn choose(
        &mut self,
        cluster: &Arc<Cluster>,
        record: &Arc<JobRecord>,
        hosts: &[HostId],
        facts: &mut Facts,
    ) -> Result<Grant, String> {
        let (job, homes_at) = self.facts_of(cluster, record)?;
        let homes: Vec<HostId> = job.volumes.iter().map(|volume| volume.home.clone()).collect();
        self.links_known(cluster, &record.job.id, &homes)?;
        for host in &mut facts.hosts {
            host.takes_jobs = hosts.contains(&host.id);
        }
        let traits = job.traits.clone();
        let (history, others) = self.runs(&record.job.id);
        let snapshot = Snapshot { cluster: std::mem::take(facts), job, history, others };
        let planned = perigee_planner::plan(&snapshot);
        *facts = snapshot.cluster;
        let plan = planned.map_err(|refused| refused.to_string())?;
        let chosen = plan.chosen().map(|option| (option.start.clone(), option.total));
        let Some((host, predicted)) = chosen else {
            return Err("the planner chose nothing".to_owned());
        };
        if !hosts.contains(&host) {
            return Err(format!("the planner would start it at {host}, which has no room now"));
        }
        // The next one is chosen as if this one ran there.
        if let Some(host) = facts.hosts.iter_mut().find(|facts| facts.id == host) {
            host.running_vms += 1;
            let needed_bytes = record.job.spec.memory_bytes;
            host.memory_free_bytes = host.memory_free_bytes.saturating_sub(needed_bytes);
        }
        let (volume_homes, others) = (homes, Vec::new());
        Ok(Grant { host, plan, predicted, volume_homes, others, homes_at, traits })
    }

    /// The planner's facts about the job. If they are not known yet, they are requested.
    fn facts_of(
        &mut self,
        cluster: &Arc<Cluster>,
        record: &Arc<JobRecord>,
    ) -> Result<(perigee_planner::JobFacts, u64), String> {
        let id = &record.job.id;
        let homes_at = cluster.index.home_changes();
        // Homes that may be old ones are not planned with.
        if self.known.get(id).is_some_and(|known| known.homes_at != homes_at) {
            self.known.remove(id);
        }
        let known = self.known.get(id);
        if known.is_none_or(|known| !known.is_fresh()) && !self.asked.contains_key(id) {
            self.asked.insert(id.clone(), Instant::now());
            let (cluster, record) = (Arc::clone(cluster), Arc::clone(record));
            self.learning.spawn(async move {
                let homes_at = cluster.index.home_changes();
                let facts = planning::prepare_record(&cluster, &record).await;
                (record.job.id.clone(), homes_at, facts)
            });
        }
        match known.map(|known| &known.facts) {
            Some(Ok(facts)) => Ok((facts.job.clone(), homes_at)),
            Some(Err(problem)) => Err(format!("{}: {}", problem.what, problem.why)),
            None => Err("the facts for its plan are being read".to_owned()),
        }
    }

    /// The earlier runs of such jobs, and of others.
    fn runs(&self, job: &JobId) -> (Vec<PastRun>, Vec<PastRun>) {
        let known = self.known.get(job).and_then(|known| known.facts.as_ref().ok());
        known.map(|facts| (facts.history.clone(), facts.others.clone())).unwrap_or_default()
    }

    /// Requests missing measurements. After some time the job is planned without them.
    fn links_known(
        &mut self,
        cluster: &Cluster,
        job: &JobId,
        homes: &[HostId],
    ) -> Result<(), String> {
        let missing = links::missing(cluster, homes);
        let Some((from, to)) = missing.first() else {
            // Other links may be missing when a volume has moved.
            self.unmeasured.remove(job);
            return Ok(());
        };
        let begun = !self.unmeasured.contains_key(job);
        let since = *self.unmeasured.entry(job.clone()).or_insert_with(Instant::now);
        if begun {
            for (from, to) in &missing {
                // The measuring task wakes the scheduler.
                links::want_missing(cluster, from, to);
            }
        }
        if since.elapsed() > LINKS_PATIENCE {
            return Ok(());
        }
        Err(format!("the link between {from} and {to} is being measured"))
    }
}

impl Known {
    fn is_fresh(&self) -> bool {
        let age_max = if self.facts.is_ok() { FACTS_AGE_MAX } else { RETRY };
        self.at.elapsed() < age_max
    }
}

async fn queue(cluster: &Cluster, records: &[Arc<JobRecord>]) -> Queue {
    let mut waiting = Vec::new();
    for record in records {
        let mut one = self::waiting(record, avoided(cluster, record).await);
        let no_network = networks::refusing(cluster, &record.job.spec.network);
        let what = "have VMs in networks such as its own";
        one.blocked = networks::why_blocked(cluster, &one.start, &no_network, what);
        if one.blocked.is_none() {
            one.blocked = networks::why_no_cards(cluster, record).await;
        }
        let no_tpm = tpm::refusing(cluster, record);
        if one.blocked.is_none() {
            let what = "have VMs with a TPM";
            one.blocked = networks::why_blocked(cluster, &one.start, &no_tpm, what);
        }
        one.avoid.extend(no_network.into_iter().chain(no_tpm).map(|(host, _)| host));
        waiting.push(one);
    }
    let used = cluster.index.used();
    let mut hosts = Vec::new();
    for host in cluster.hosts.up() {
        let Some(report) = cluster.hosts.report(&host.id) else { continue };
        let used = used.get(&host.id).copied().unwrap_or_default();
        let total = capacity(&report);
        let mut free = total;
        free.take(used.demand);
        hosts.push(HostRoom {
            id: host.id.clone(),
            site: host.addresses.site.clone(),
            total,
            free,
            lasting: used.lasting,
            start_slots: starts_at_once(&report).saturating_sub(used.starting),
        });
    }
    let taken = cluster.index.taken();
    let quotas = cluster.accounts.quotas(&taken);
    Queue { hosts, waiting, held: taken.held, quotas, uses: taken.uses }
}

/// Of the hosts that the job was lost at, those that still have something of it.
pub(crate) async fn avoided(cluster: &Cluster, record: &JobRecord) -> Vec<HostId> {
    let mut avoided = record.refused_by.clone();
    for host in &record.avoid {
        let is_up = cluster.hosts.state(host) == HostState::Up;
        if !is_up || is_pending(cluster, record, host).await.unwrap_or(true) {
            avoided.push(host.clone());
        }
    }
    avoided
}

/// Whether something of the job, or of a VM of it, is still to be taken down there.
async fn is_pending(cluster: &Cluster, record: &JobRecord, host: &HostId) -> Result<bool, Problem> {
    let id = &record.job.id;
    if record.gang.is_none() {
        return cleaner::is_pending(cluster, id, host).await;
    }
    for rank in 0..record.job.spec.count {
        if cleaner::is_pending(cluster, &member_of(id, rank), host).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn waiting(record: &JobRecord, avoid: Vec<HostId>) -> Waiting {
    let spec = &record.job.spec;
    Waiting {
        job: record.job.id.clone(),
        holder: Holder::of(&record.job.id, &spec.owner),
        priority: spec.priority,
        submitted: record.job.submitted_ms,
        waited_ms: now_ms().saturating_sub(record.job.submitted_ms),
        demand: demand_of(record),
        count: spec.count,
        start: spec.start.clone(),
        volumes: spec.volumes.clone(),
        avoid,
        blocked: None,
    }
}
