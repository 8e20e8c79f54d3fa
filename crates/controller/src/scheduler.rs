//! The scheduler: the only task that gives hosts to queued jobs.
//!
//! It passes a snapshot of the index to a pure function ([`perigee_planner::queue`]) and carries out its
//! decision. A grant is only in the index: the job's driver records the placement, and after a restart the
//! job is queued again. The facts that a job's plan needs (the homes of its volumes, earlier runs) are read
//! in separate tasks; the scheduler never waits for a host.

mod refusals;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use perigee_model::gang::member_of;
use perigee_model::job::HostState;
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::queue::{Holder, HostRoom, NotChosen, Queue, Turn, Waiting, schedule};
use perigee_planner::{Cluster as Facts, PastRun, Snapshot};
use refusals::Refusals;
use tokio::task::JoinSet;

use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, Grant, capacity, demand_of, groups_of, starts_at_once};
use crate::planning::links;
use crate::records::JobRecord;
use crate::storage::volumes;
use crate::{cleaner, networks, planning, tpm};

/// The pause between two decisions, so that many concurrent changes cause only one.
const GAP: Duration = Duration::from_millis(20);

/// The facts about a queued job are read again after this time.
const FACTS_AGE_MAX: Duration = Duration::from_secs(60);

/// Older ones are not planned with.
const FACTS_USE_MAX: Duration = Duration::from_secs(120);

/// The pause after a failure to read them.
const RETRY: Duration = Duration::from_secs(2);

/// A job waits for this long until its links are measured; then it is placed with the known figures.
const LINKS_PATIENCE: Duration = Duration::from_secs(60);

/// Room is kept for a job for this long while its facts are read, or its links are measured.
const ROOM_PATIENCE: Duration = Duration::from_secs(5);

/// What the plans of so many of each tenant's next jobs need is read early, so that free hosts do not wait for it.
const READ_AHEAD: u32 = 16;

/// A home is asked for the facts about so many jobs at once. One that does not answer holds up these jobs, and
/// until they are given up, others at the other homes of these.
const ASKED_OF_HOME_MAX: u32 = 8;

/// What is known of a queued job beyond its record.
#[derive(Debug)]
struct JobEntry {
    at: Instant,
    /// Before it was read: a volume may have got another home since.
    homes_at: u64,
    facts: Result<planning::Prepared, Problem>,
}

type Learned = (JobId, u64, Result<planning::Prepared, Problem>);

#[derive(Default)]
struct Scheduler {
    known: BTreeMap<JobId, JobEntry>,
    learning: JoinSet<Learned>,
    asked: BTreeMap<JobId, Instant>,
    /// The homes of each queued job's volumes, as last heard. They are asked for its facts.
    homes: BTreeMap<JobId, Vec<HostId>>,
    /// The number of jobs about which each home is being asked.
    asked_of: BTreeMap<HostId, u32>,
    /// Since when a job's links have been missing.
    unmeasured: BTreeMap<JobId, Instant>,
    /// The links that are missing for data with these homes, as seen in this pass. Many jobs have the same homes.
    missing_links: BTreeMap<Vec<HostId>, Vec<(HostId, HostId)>>,
    refusals: Refusals,
}

/// The endless task that grants hosts to waiting jobs. A pass follows each change after which one may start, and
/// otherwise a time.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut scheduler = Scheduler::default();
    loop {
        let pass = async {
            let waiting = cluster.index.waiting().len();
            scheduler.pass(&cluster).await;
            Ok(format!("went through {waiting} waiting jobs"))
        };
        task.round(pass).await;
        let timing = &cluster.timing;
        let pause = if scheduler.refusals.has_put_off() { timing.poll } else { timing.monitor };
        tokio::select! {
            () = cluster.index.changed.notified() => {}
            Some(learned) = scheduler.learning.join_next() => scheduler.learned(learned),
            () = tokio::time::sleep(pause) => {}
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
                // A volume may have moved since the job was first seen.
                if let Ok(facts) = &facts {
                    let homes = facts.job.volumes.iter().map(|volume| volume.home.clone());
                    let homes: BTreeSet<HostId> = homes.collect();
                    self.homes.insert(job.clone(), homes.into_iter().collect());
                }
                self.known.insert(job, JobEntry { at: Instant::now(), homes_at, facts });
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
        self.homes.retain(|job, _| waiting_ids(job));
        self.refusals.begin_pass(waiting_ids);
        if !records.is_empty() {
            self.look_up_homes(cluster, &records).await;
            let queue = queue(cluster, &records).await;
            self.decide(cluster, &records, queue);
        }
        let spent_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        cluster.counters.passes.fetch_add(1, Ordering::Relaxed);
        cluster.counters.pass_us.fetch_add(spent_us, Ordering::Relaxed);
    }

    /// Learns the homes of new jobs' volumes, and counts for how many jobs each home is being asked.
    async fn look_up_homes(&mut self, cluster: &Cluster, records: &[Arc<JobRecord>]) {
        let is_new = |record: &&Arc<JobRecord>| !self.homes.contains_key(&record.job.id);
        let new: Vec<&Arc<JobRecord>> = records.iter().filter(is_new).collect();
        for record in new {
            let homes = volumes::homes(cluster, &record.job.spec).await;
            self.homes.insert(record.job.id.clone(), homes);
        }
        self.asked_of.clear();
        for home in self.asked.keys().filter_map(|job| self.homes.get(job)).flatten() {
            *self.asked_of.entry(home.clone()).or_default() += 1;
        }
    }

    fn decide(&mut self, cluster: &Arc<Cluster>, records: &[Arc<JobRecord>], mut queue: Queue) {
        self.missing_links.clear();
        let mut facts = planning::facts(cluster);
        let by_id: BTreeMap<&JobId, &Arc<JobRecord>> =
            records.iter().map(|record| (&record.job.id, record)).collect();
        // Nothing is reserved for a job whose data can't be reached.
        for waiting in queue.waiting.iter_mut().filter(|waiting| waiting.blocked.is_none()) {
            waiting.blocked = self.why_unknown(&waiting.job);
        }
        // Of a gang: one for each of its VMs.
        let mut grants: BTreeMap<JobId, Vec<Grant>> = BTreeMap::new();
        // The facts before the first VM of a gang was planned with. If one of them can't be, none is there.
        let mut before_gang: Option<(JobId, Facts)> = None;
        let turns = schedule(&queue, |waiting, hosts| {
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
        let (mut waits, mut next) = (BTreeMap::new(), Vec::new());
        for (job, turn) in turns {
            match turn {
                Turn::Start(_) | Turn::StartAll(_) => {
                    let mut all = grants.remove(&job).into_iter().flatten();
                    let Some(first) = all.next() else { continue };
                    let grant = Grant { others: all.map(|grant| grant.host).collect(), ..first };
                    if !cluster.index.give(&job, grant) {
                        let reason = "one of its volumes is being moved, or was just now, or a VM has just come from which it is kept apart";
                        waits.insert(job, (1, reason.to_owned()));
                        continue;
                    }
                    cluster.counters.placed.fetch_add(1, Ordering::Relaxed);
                    cluster.drive_job(&job);
                }
                Turn::Wait { place, reason } => {
                    if place <= READ_AHEAD {
                        next.push(by_id[&job]);
                    }
                    waits.insert(job, (place, reason));
                }
            }
        }
        cluster.index.set_waits(waits);
        self.read_ahead(cluster, &next);
        for record in records {
            if self.why_unknown(&record.job.id).is_some() {
                self.read_facts(cluster, record);
            }
        }
    }

    /// Requests early what the plans of these jobs need.
    fn read_ahead(&mut self, cluster: &Arc<Cluster>, next: &[&Arc<JobRecord>]) {
        let mut homes: BTreeSet<HostId> = BTreeSet::new();
        for record in next {
            self.read_facts(cluster, record);
            homes.extend(self.homes.get(&record.job.id).into_iter().flatten().cloned());
        }
        let homes: Vec<HostId> = homes.into_iter().collect();
        for (from, to) in links::missing(cluster, &homes) {
            links::want_missing(cluster, &from, &to);
        }
    }

    /// The planner's choice among the hosts with room, or why the job waits.
    fn choose(
        &mut self,
        cluster: &Arc<Cluster>,
        record: &Arc<JobRecord>,
        hosts: &[HostId],
        facts: &mut Facts,
    ) -> Result<Grant, NotChosen> {
        let (job, homes_at) = self.facts_of(cluster, record)?;
        let homes: Vec<HostId> = job.volumes.iter().map(|volume| volume.home.clone()).collect();
        self.links_known(cluster, &record.job.id, &homes)?;
        if let Some(why) = self.refusals.why_not_now(&record.job.id) {
            return Err(why.into());
        }
        for host in &mut facts.hosts {
            host.takes_jobs = hosts.contains(&host.id);
        }
        let traits = job.traits.clone();
        let (history, others) = self.runs(&record.job.id);
        let snapshot = Snapshot { cluster: std::mem::take(facts), job, history, others };
        let planned = perigee_planner::plan(&snapshot);
        *facts = snapshot.cluster;
        let chosen = planned.map_err(|refused| refused.to_string()).and_then(|plan| {
            let chosen = plan.chosen().map(|option| (option.start.clone(), option.total));
            let (host, predicted) = chosen.ok_or("the planner chose nothing")?;
            match hosts.contains(&host) {
                true => Ok((plan, host, predicted)),
                false => {
                    Err(format!("the planner would start it at {host}, which has no room now"))
                }
            }
        });
        let (plan, host, predicted) =
            chosen.inspect_err(|why| self.refusals.note(&record.job.id, why))?;
        // The next one is chosen as if this one ran there.
        if let Some(host) = facts.hosts.iter_mut().find(|facts| facts.id == host) {
            let cpus = record.job.spec.cpus;
            host.running_vcpus = host.running_vcpus.saturating_add(cpus);
            let needed_bytes = record.job.spec.memory_bytes;
            host.memory_free_bytes = host.memory_free_bytes.saturating_sub(needed_bytes);
        }
        let (volume_homes, others) = (homes, Vec::new());
        Ok(Grant { host, plan, predicted, volume_homes, others, homes_at, traits })
    }

    /// Requests the planner's facts about the job, unless they are known or requested.
    fn read_facts(&mut self, cluster: &Arc<Cluster>, record: &Arc<JobRecord>) {
        let id = &record.job.id;
        if self.known.get(id).is_some_and(|known| known.may_be_wrong(cluster)) {
            self.known.remove(id);
        }
        let homes = self.homes.get(id).map(Vec::as_slice).unwrap_or_default();
        let asked_of = |home: &HostId| self.asked_of.get(home).copied().unwrap_or_default();
        let may_ask = homes.iter().all(|home| asked_of(home) < ASKED_OF_HOME_MAX);
        let is_fresh = self.known.get(id).is_some_and(JobEntry::is_fresh);
        if !is_fresh && may_ask && !self.asked.contains_key(id) {
            for home in homes {
                *self.asked_of.entry(home.clone()).or_default() += 1;
            }
            self.asked.insert(id.clone(), Instant::now());
            let (cluster, record) = (Arc::clone(cluster), Arc::clone(record));
            self.learning.spawn(async move {
                let homes_at = cluster.index.home_changes();
                let facts = planning::prepare_record(&cluster, &record).await;
                (record.job.id.clone(), homes_at, facts)
            });
        }
    }

    /// The planner's facts about the job. If they are not known yet, they are requested.
    fn facts_of(
        &mut self,
        cluster: &Arc<Cluster>,
        record: &Arc<JobRecord>,
    ) -> Result<(perigee_planner::JobFacts, u64), NotChosen> {
        self.read_facts(cluster, record);
        let id = &record.job.id;
        if let Some(why) = self.why_unknown(id) {
            return Err(why.into());
        }
        let known = self.known.get(id);
        let facts = known.and_then(|known| Some((known.facts.as_ref().ok()?, known.homes_at)));
        facts.map(|(facts, homes_at)| (facts.job.clone(), homes_at)).ok_or_else(|| {
            not_yet(self.asked.get(id), "the facts for its plan are being read".to_owned())
        })
    }

    /// Why the facts about the job could not be read when that was last tried.
    fn why_unknown(&self, job: &JobId) -> Option<String> {
        let problem = self.known.get(job)?.facts.as_ref().err()?;
        Some(format!("{}: {}", problem.what, problem.why))
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
    ) -> Result<(), NotChosen> {
        let missing = self.missing_links.entry(homes.to_vec());
        let missing = missing.or_insert_with(|| links::missing(cluster, homes));
        let Some((from, to)) = missing.first() else {
            // Other links may be missing when a volume has moved.
            self.unmeasured.remove(job);
            return Ok(());
        };
        let begun = !self.unmeasured.contains_key(job);
        let since = *self.unmeasured.entry(job.clone()).or_insert_with(Instant::now);
        if begun {
            for (from, to) in missing.iter() {
                // The measuring task wakes the scheduler.
                links::want_missing(cluster, from, to);
            }
        }
        if since.elapsed() > LINKS_PATIENCE {
            return Ok(());
        }
        let why = format!("the link between {from} and {to} is being measured");
        Err(not_yet(Some(&since), why))
    }
}

/// Something was requested then that a job's plan needs.
fn not_yet(since: Option<&Instant>, why: String) -> NotChosen {
    match since {
        Some(since) if since.elapsed() < ROOM_PATIENCE => NotChosen::NotYet(why),
        _ => NotChosen::Refused(why),
    }
}

impl JobEntry {
    /// Whether its volumes may have other homes by now. What could not be read is read again soon anyway.
    fn may_be_wrong(&self, cluster: &Cluster) -> bool {
        let Ok(facts) = &self.facts else { return false };
        let volumes = facts.job.volumes.iter().map(|volume| &volume.volume);
        self.at.elapsed() >= FACTS_USE_MAX
            || cluster.index.home_changed_since(volumes, self.homes_at)
    }

    fn is_fresh(&self) -> bool {
        let age_max = if self.facts.is_ok() { FACTS_AGE_MAX } else { RETRY };
        self.at.elapsed() < age_max
    }
}

async fn queue(cluster: &Cluster, records: &[Arc<JobRecord>]) -> Queue {
    let mut waiting = Vec::new();
    // Many jobs ask the same of the hosts.
    let mut without_network = BTreeMap::new();
    let mut without_tpm = None;
    for record in records {
        let mut one = self::waiting(cluster, record, avoided(cluster, record).await);
        let network = &record.job.spec.network;
        let no_network = without_network.entry(networks::needed(network));
        let no_network = no_network.or_insert_with(|| networks::refusing(cluster, network));
        let what = "have VMs in networks such as its own";
        one.blocked = networks::why_blocked(cluster, &one.start, no_network, what);
        if one.blocked.is_none() {
            one.blocked = networks::why_no_cards(cluster, record).await;
        }
        let no_tpm: &[_] = match tpm::has_one(record) {
            true => without_tpm.get_or_insert_with(|| tpm::refusing(cluster, record)).as_slice(),
            false => &[],
        };
        if one.blocked.is_none() {
            let what = "have VMs with a TPM";
            one.blocked = networks::why_blocked(cluster, &one.start, no_tpm, what);
        }
        one.avoid.extend(no_network.iter().chain(no_tpm).map(|(host, _)| host.clone()));
        waiting.push(one);
    }
    let used = cluster.index.used();
    let (mut hosts, mut drained) = (Vec::new(), Vec::new());
    for host in cluster.hosts.able() {
        let Some(report) = cluster.hosts.report(&host.id) else { continue };
        let used = used.get(&host.id).copied().unwrap_or_default();
        let total = capacity(&report);
        let mut free = total;
        free.take(used.demand);
        let is_drained = cluster.hosts.drain(&host.id).is_some();
        let rooms = if is_drained { &mut drained } else { &mut hosts };
        rooms.push(HostRoom {
            id: host.id.clone(),
            site: host.addresses.site.clone(),
            total,
            free,
            persistent: used.persistent,
            start_slots: starts_at_once(&report).saturating_sub(used.starting),
        });
    }
    let taken = cluster.index.taken();
    let quotas = cluster.accounts.quotas(&taken);
    Queue {
        hosts,
        drained,
        waiting,
        held: taken.held,
        quotas,
        uses: taken.uses,
        grouped: cluster.index.grouped(),
    }
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
    if !record.kind.is_gang() {
        return cleaner::is_pending(cluster, id, host).await;
    }
    for rank in 0..record.job.spec.count {
        if cleaner::is_pending(cluster, &member_of(id, rank), host).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn waiting(cluster: &Cluster, record: &JobRecord, avoid: Vec<HostId>) -> Waiting {
    let spec = &record.job.spec;
    Waiting {
        job: record.job.id.clone(),
        holder: Holder::of(&record.job.id, &spec.owner),
        priority: spec.priority,
        submitted: record.job.submitted_ms,
        waited_ms: cluster.clock.age_ms(record.job.submitted_ms),
        demand: demand_of(record),
        count: spec.count,
        start: spec.start.clone(),
        volumes: spec.volumes.clone(),
        groups: groups_of(record),
        lost_at: record.avoid.iter().filter(|host| avoid.contains(host)).cloned().collect(),
        avoid,
        blocked: None,
    }
}
