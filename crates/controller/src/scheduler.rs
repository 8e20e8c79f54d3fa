//! The scheduler: the only task that gives hosts to queued jobs.
//!
//! It gathers a snapshot, passes that to a pure function ([`pass()`]), checks each grant of the decision
//! against the present, and carries it out. A grant is only in the index: the job's driver records the placement, and after a
//! restart the job is queued again. The facts that a job's plan needs (the homes of its volumes, earlier runs) are read
//! in separate tasks; the scheduler never waits for a host.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use perigee_model::gang::member_of;
use perigee_model::job::HostState;
use perigee_model::{HostId, JobId, Problem, SiteId};
use perigee_planner::Prepared;
use perigee_planner::queue::{
    Holder, HostRoom, JobGrant, Known, PassSnapshot, Queue, Read, Refusals, Waiting, pass,
};
use tokio::task::JoinSet;

use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, Grant, HostLink, capacity, demand_of, groups_of, starts_at_once};
use crate::planning::links;
use crate::records::JobRecord;
use crate::storage::{leave_site, volumes};
use crate::{cleaner, networks, planning, tpm};

/// The pause between two decisions, so that many concurrent changes cause only one.
const GAP: Duration = Duration::from_millis(20);

/// Who has not answered a question about a job for so long is asked again.
const ASKED_MAX: Duration = Duration::from_secs(60);

/// What was read of a queued job beyond its record.
#[derive(Debug)]
struct JobEntry {
    at: Instant,
    /// Before it was read: a volume may have got another home since.
    homes_at: u64,
    facts: Result<Arc<Prepared>, Problem>,
    /// Where all VMs of a gang have to be, because data of it may not leave that site.
    site: Option<SiteId>,
}

type Learned = (JobId, u64, Result<(Prepared, Option<SiteId>), Problem>);

#[derive(Default)]
struct Scheduler {
    known: BTreeMap<JobId, JobEntry>,
    learning: JoinSet<Learned>,
    asked: BTreeMap<JobId, Instant>,
    /// The homes of each queued job's volumes, as last heard. They are asked for its facts.
    homes: BTreeMap<JobId, Vec<HostId>>,
    /// Since when a job's links have been missing.
    unmeasured: BTreeMap<JobId, Instant>,
    refusals: Refusals,
}

/// The endless task that grants hosts to waiting jobs. A pass follows each change after which one may start, and
/// otherwise a time.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut scheduler = Scheduler::default();
    loop {
        let pass = async {
            let waiting = cluster.index.waiting().len();
            scheduler.pass(&cluster).await?;
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
                let (facts, site) = match facts {
                    Ok((facts, site)) => (Ok(Arc::new(facts)), site),
                    Err(problem) => (Err(problem), None),
                };
                if let Ok(facts) = &facts {
                    let homes = facts.job.volumes.iter().map(|volume| volume.home.clone());
                    let homes: BTreeSet<HostId> = homes.collect();
                    self.homes.insert(job.clone(), homes.into_iter().collect());
                }
                self.known.insert(job, JobEntry { at: Instant::now(), homes_at, facts, site });
            }
            // Facts that are too old are requested again.
            Err(error) => tracing::error!("can't read the facts of a job: {error}"),
        }
    }

    /// One decision over all queued jobs: gathers what it is made from, asks for it, and carries it out.
    async fn pass(&mut self, cluster: &Arc<Cluster>) -> Result<(), Problem> {
        let begun = Instant::now();
        let records = cluster.index.waiting();
        let by_id: BTreeMap<&JobId, &Arc<JobRecord>> =
            records.iter().map(|record| (&record.job.id, record)).collect();
        self.forget_all_but(&by_id);
        if records.is_empty() {
            self.refusals = Refusals::default();
            cluster.renter.note_pass(Vec::new(), &BTreeSet::new(), []);
        } else {
            self.look_up_homes(cluster, &records).await;
            let queue = queue(cluster, &records, &self.known).await?;
            self.decide(cluster, &by_id, queue);
        }
        let spent_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        cluster.counters.passes.fetch_add(1, Ordering::Relaxed);
        cluster.counters.pass_us.fetch_add(spent_us, Ordering::Relaxed);
        Ok(())
    }

    /// Drops what is known of jobs that wait no more.
    fn forget_all_but(&mut self, waiting: &BTreeMap<&JobId, &Arc<JobRecord>>) {
        self.known.retain(|job, _| waiting.contains_key(job));
        self.unmeasured.retain(|job, _| waiting.contains_key(job));
        self.asked.retain(|job, at| at.elapsed() < ASKED_MAX && waiting.contains_key(job));
        self.homes.retain(|job, _| waiting.contains_key(job));
    }

    /// Learns the homes of new jobs' volumes.
    async fn look_up_homes(&mut self, cluster: &Cluster, records: &[Arc<JobRecord>]) {
        let is_new = |record: &&Arc<JobRecord>| !self.homes.contains_key(&record.job.id);
        let new: Vec<&Arc<JobRecord>> = records.iter().filter(is_new).collect();
        for record in new {
            let homes = volumes::homes(cluster, &record.job.spec).await;
            self.homes.insert(record.job.id.clone(), homes);
        }
    }

    fn decide(
        &mut self,
        cluster: &Arc<Cluster>,
        records: &BTreeMap<&JobId, &Arc<JobRecord>>,
        queue: Queue,
    ) {
        let decision = pass(PassSnapshot {
            queue,
            cluster: planning::facts(cluster),
            not_measured: links::not_measured(cluster),
            known: records.keys().map(|job| ((*job).clone(), self.known(cluster, job))).collect(),
            refusals: std::mem::take(&mut self.refusals),
        });
        self.refusals = decision.refusals;
        let waits = records.keys().copied().collect();
        cluster.renter.note_pass(decision.for_room, &waits, decision.not_at.into_keys());
        for (job, waits) in decision.wait_for_links {
            if waits {
                self.unmeasured.entry(job).or_insert_with(Instant::now);
            } else {
                self.unmeasured.remove(&job);
            }
        }
        let mut waits = decision.waits;
        for grant in decision.grants {
            if let Err(job) = self.give(cluster, grant) {
                let reason = "one of its volumes is being moved, or was just now, or a VM has just come or gone beside which it is to be, or never";
                waits.insert(job, (1, reason.to_owned()));
            }
        }
        cluster.index.set_waits(waits);
        for (from, to) in decision.measure {
            // The measuring task wakes the scheduler.
            links::want_missing(cluster, &from, &to);
        }
        for record in decision.read.iter().filter_map(|job| records.get(job)) {
            self.read_facts(cluster, record);
        }
    }

    /// What is known of a job, with how long ago it was learned or asked for.
    fn known(&self, cluster: &Cluster, job: &JobId) -> Known {
        let age_s = |at: &Instant| at.elapsed().as_secs_f64();
        let read = self.known.get(job).map(|known| Read {
            age_s: age_s(&known.at),
            homes_changed: known.has_other_homes(cluster),
            facts: known
                .facts
                .clone()
                .map_err(|problem| format!("{}: {}", problem.what, problem.why)),
        });
        Known {
            homes: self.homes.get(job).cloned().unwrap_or_default(),
            read,
            asked_s: self.asked.get(job).map(age_s),
            waits_for_links_s: self.unmeasured.get(job).map(age_s),
        }
    }

    /// Carries out a grant, unless the job or one of its volumes has changed since the snapshot: then returns the job.
    fn give(&self, cluster: &Arc<Cluster>, grant: JobGrant) -> Result<(), JobId> {
        let JobGrant { job, hosts, plan, predicted, cost, facts } = grant;
        let mut hosts = hosts.into_iter();
        let (Some(host), Some(known)) = (hosts.next(), self.known.get(&job)) else {
            return Err(job);
        };
        let volume_homes = facts.job.volumes.iter().map(|volume| volume.home.clone());
        let grant = Grant {
            host,
            plan,
            predicted,
            cost,
            traits: facts.job.traits.clone(),
            volume_homes: volume_homes.collect(),
            others: hosts.collect(),
            homes_at: known.homes_at,
        };
        if !cluster.index.give(&job, grant, |host| cluster.hosts.binds(host)) {
            return Err(job);
        }
        cluster.counters.placed.fetch_add(1, Ordering::Relaxed);
        cluster.drive_job(&job);
        Ok(())
    }

    /// Requests the planner's facts about the job.
    fn read_facts(&mut self, cluster: &Arc<Cluster>, record: &Arc<JobRecord>) {
        self.asked.insert(record.job.id.clone(), Instant::now());
        let (cluster, record) = (Arc::clone(cluster), Arc::clone(record));
        self.learning.spawn(async move {
            let homes_at = cluster.index.home_changes();
            let facts = async {
                let mut facts = planning::prepare_record(&cluster, &record).await?;
                planning::gangs::add(&cluster, &record.job.spec, &mut facts).await?;
                Ok((facts, leave_site::site_of_gang(&cluster, &record.job.spec).await?))
            };
            (record.job.id.clone(), homes_at, facts.await)
        });
    }
}

impl JobEntry {
    /// Whether its volumes may have other homes by now.
    fn has_other_homes(&self, cluster: &Cluster) -> bool {
        self.facts.as_ref().is_ok_and(|facts| {
            let volumes = facts.job.volumes.iter().map(|volume| &volume.volume);
            cluster.index.home_changed_since(volumes, self.homes_at)
        })
    }
}

async fn queue(
    cluster: &Cluster,
    records: &[Arc<JobRecord>],
    known: &BTreeMap<JobId, JobEntry>,
) -> Result<Queue, Problem> {
    let mut waiting = Vec::new();
    // Many jobs ask the same of the hosts.
    let mut without_network = BTreeMap::new();
    let mut without_tpm = None;
    for record in records {
        let avoid = avoided(cluster, record).await.into_iter().collect();
        let mut one = self::waiting(cluster, record, avoid);
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
        let site = known.get(&record.job.id).and_then(|known| known.site.as_ref());
        let far = site.map_or_else(Vec::new, |site| elsewhere(cluster, site));
        if one.blocked.is_none() {
            let what = "have VMs with its data";
            one.blocked = networks::why_blocked(cluster, &one.start, &far, what);
        }
        let unable = no_network.iter().chain(no_tpm).chain(&far);
        one.avoid.extend(unable.map(|(host, _)| host.clone()));
        waiting.push(one);
    }
    let rented = Arc::new(planning::renting::rented(cluster).await?);
    // From here on nothing is waited for: what is free, and what jobs have, is as of one moment.
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
    let quotas = cluster.accounts.quotas(&taken, &cluster.ledger);
    Ok(Queue {
        hosts,
        drained,
        waiting,
        held: taken.held,
        quotas,
        uses: taken.uses,
        grouped: cluster.index.grouped(),
        rented,
    })
}

/// The hosts that are not at the site of a gang's data.
fn elsewhere(cluster: &Cluster, site: &SiteId) -> Vec<(HostId, String)> {
    let mut others = cluster.hosts.all();
    others.retain(|host| host.addresses.site != *site);
    let why = |host: &HostLink| {
        format!("data of the job may not leave site {site}, and it is at {}", host.addresses.site)
    };
    others.iter().map(|host| (host.id.clone(), why(host))).collect()
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

fn waiting(cluster: &Cluster, record: &JobRecord, avoid: BTreeSet<HostId>) -> Waiting {
    let spec = &record.job.spec;
    Waiting {
        job: record.job.id.clone(),
        holder: Holder::of(&record.job.id, &spec.owner),
        priority: spec.priority,
        submitted: record.job.submitted_ms,
        waited_ms: cluster.clock.age_ms(record.job.submitted_ms),
        demand: demand_of(record),
        quota_cpus: spec.cpus_most(),
        count: spec.count,
        start: spec.start.clone(),
        volumes: spec.volumes.clone(),
        groups: groups_of(record),
        lost_at: record.avoid.iter().filter(|host| avoid.contains(host)).cloned().collect(),
        avoid,
        blocked: None,
    }
}
