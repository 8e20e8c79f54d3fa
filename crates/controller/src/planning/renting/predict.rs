//! How the waiting jobs would run at own hosts and at each kind that can be rented.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::job::JobSpec;
use perigee_model::money::{Money, Price};
use perigee_model::plan::{CostOf, PlanOption};
use perigee_model::rental::{RENT_DISK_DEFAULT_BYTES, Rental};
use perigee_model::tenant::tenant_of;
use perigee_model::vm::LinkProbe;
use perigee_model::{HostId, JobId, Problem, SiteId};
use perigee_planner::offers::{close_all, idle_host};
use perigee_planner::rent::Run;
use perigee_planner::{
    Cluster as Facts, HostFacts, JobFacts, LinkFacts, LinkForMoves, MeasuredHost, MoneyFacts,
    Prepared, Snapshot,
};
use tokio::task::JoinSet;

use super::Kind;
use crate::cluster::renter::{Predicted, kind_key};
use crate::cluster::{Cluster, capacity, capacity_of};
use crate::planning::measured::{Known, digest as digest_of};
use crate::planning::{digest, facts, links, prepare_record};
use crate::records::JobRecord;

/// Of so many kinds of jobs what they would take is read and predicted at one look. The others come at the next looks.
const AT_ONCE_MAX: usize = 128;

/// A home that does not answer in time is not waited for. All are asked side by side, so none of them holds up a look for longer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// What a job takes at most beside its command's timeout, in seconds: its boot.
pub const AROUND_S: f64 = 300.0;

/// Of a link that was never measured, if none between two sites was.
const UNKNOWN_LINK: LinkProbe = LinkProbe { rtt_ms: 50.0, rate_bytes_per_s: 12_500_000 };

/// What each of the jobs would take, and in words what is not known or assumed.
pub async fn predict(
    cluster: &Arc<Cluster>,
    records: &[Arc<JobRecord>],
    kinds: &[Kind],
) -> (BTreeMap<JobId, Arc<Predicted>>, Vec<String>) {
    let ways = Ways::of(cluster, kinds);
    let (from, age) = (ways.from, cluster.timing.renter.predicted);
    let mut known = BTreeMap::new();
    let mut missing: BTreeMap<String, Vec<&Arc<JobRecord>>> = BTreeMap::new();
    // The first ones of the queue come first.
    let mut asked: Vec<(String, Arc<JobRecord>)> = Vec::new();
    for record in records {
        let key = key_of(&record.job.spec);
        if let Some(predicted) = cluster.renter.predicted(&key, from, age) {
            known.insert(record.job.id.clone(), predicted);
            continue;
        }
        let alike = missing.entry(key.clone()).or_default();
        if alike.is_empty() {
            asked.push((key, Arc::clone(record)));
        }
        alike.push(record);
    }
    let mut not_known = ways.assumed.clone();
    let later = asked.len().saturating_sub(AT_ONCE_MAX);
    if later > 0 {
        not_known.push(format!(
            "what {later} kinds of jobs would take is predicted at the next looks, of which each predicts {AT_ONCE_MAX}"
        ));
    }
    asked.truncate(AT_ONCE_MAX);
    let facts = read_facts(cluster, &asked).await;
    let mut ready = Vec::new();
    for (key, facts) in facts {
        match facts {
            Ok(facts) => ready.push((key, facts)),
            Err(problem) => {
                let job = missing.get(&key).and_then(|alike| alike.first());
                let job = job.map_or("", |record| record.job.id.as_str());
                not_known
                    .push(format!("what job {job} would take: {}: {}", problem.what, problem.why));
            }
        }
    }
    // It takes some milliseconds for each kind of job and of machine.
    let done = tokio::task::spawn_blocking(move || ways.predict(ready)).await;
    for (key, predicted) in done.unwrap_or_default() {
        let predicted = Arc::new(predicted);
        for record in missing.get(&key).into_iter().flatten() {
            known.insert(record.job.id.clone(), Arc::clone(&predicted));
        }
        cluster.renter.note_predicted(key, from, predicted, age);
    }
    (known, not_known)
}

/// The facts about each job, by what it is alike.
pub async fn read_facts(
    cluster: &Arc<Cluster>,
    jobs: &[(String, Arc<JobRecord>)],
) -> Vec<(String, Result<Prepared, Problem>)> {
    let asked = jobs.iter().map(|(key, record)| {
        let (cluster, record) = (Arc::clone(cluster), Arc::clone(record));
        (key.clone(), async move { prepare_record(&cluster, &record).await })
    });
    side_by_side(asked, ANSWER_MAX).await
}

/// The answers of all, which are asked at the same time, and waited for so long at most.
async fn side_by_side<T, F>(
    asked: impl IntoIterator<Item = (String, F)>,
    max: Duration,
) -> Vec<(String, Result<T, Problem>)>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Problem>> + Send + 'static,
{
    let late = move |_| {
        let why = format!("a home of its volumes has not answered for {} s", max.as_secs());
        Err(Problem::unavailable("can't read its facts", why))
    };
    let mut under_way = JoinSet::new();
    for (key, answer) in asked {
        under_way.spawn(async move {
            (key, tokio::time::timeout(max, answer).await.unwrap_or_else(late))
        });
    }
    let mut answers = Vec::new();
    while let Some(answer) = under_way.join_next().await {
        answers.extend(answer);
    }
    answers
}

/// The same for jobs that take the same: those of one tenant that differ in their names and in what they may cost. What jobs with several VMs
/// have taken is known by their names.
pub fn key_of(spec: &JobSpec) -> String {
    let mut value = serde_json::to_value(spec).unwrap_or_default();
    if let Some(fields) = value.as_object_mut() {
        for field in ["owner", "priority", "money"] {
            fields.remove(field);
        }
        if !spec.is_gang() {
            fields.remove("name");
        }
    }
    digest(&serde_json::json!([tenant_of(&spec.name), value]))
}

/// What the job may cost matters to no prediction here: jobs that take the same may differ in it ([`key_of`]).
pub fn forget_money(job: &mut JobFacts) {
    job.money = MoneyFacts { timeout_s: job.money.timeout_s, ..MoneyFacts::default() };
}

/// The cluster, as it would be with nothing to do: for its own hosts, and for one more host of each kind.
struct Ways {
    own: Facts,
    kinds: Vec<(String, Facts)>,
    /// What the one more host is called.
    would_be: HostId,
    assumed: Vec<String>,
    /// The same number is made from the same hosts and kinds.
    from: u64,
}

impl Ways {
    fn of(cluster: &Cluster, kinds: &[Kind]) -> Self {
        let mut own = facts(cluster);
        links::add_remembered(cluster, &mut own);
        let of_rule = cluster.rentals.hosts_by_rule();
        let used = cluster.index.used();
        for host in &mut own.hosts {
            let report = cluster.hosts.report(&host.id);
            let mut room = report.as_deref().map(capacity).unwrap_or_default();
            room.take(used.get(&host.id).map(|used| used.persistent).unwrap_or_default());
            (host.memory_free_bytes, host.running_vcpus) = (room.memory_bytes, 0);
            host.cpu_load = None;
            host.takes_jobs &= !of_rule.contains(&host.id);
        }
        let mut from = DefaultHasher::new();
        for host in &own.hosts {
            (&host.id, &host.site, host.cpus, host.memory_free_bytes).hash(&mut from);
            host.takes_jobs.hash(&mut from);
        }
        let (mut with_kinds, mut assumed) = (Vec::new(), Vec::new());
        let measured = Known::of(cluster);
        let like = like(&cluster.rentals.all_alive(), &own);
        let mut closed = own.clone();
        let would_be = close_all(&mut closed);
        for kind in kinds {
            let key = kind.key();
            (&key, &kind.site, kind.offer.cpus, kind.offer.memory_bytes).hash(&mut from);
            kind.offer.kvm.hash(&mut from);
            let like = like.get(&key);
            let measured = measured.one_more(&key, like, &own);
            digest_of(measured.as_deref()).hash(&mut from);
            let facts = with_one(&closed, &would_be, kind, (like, measured), &mut assumed);
            with_kinds.push((key, facts));
        }
        assumed.sort();
        assumed.dedup();
        Self { own, kinds: with_kinds, would_be, assumed, from: from.finish() }
    }

    fn predict(mut self, jobs: Vec<(String, Prepared)>) -> Vec<(String, Predicted)> {
        let mut all = Vec::new();
        for (key, prepared) in jobs {
            let Prepared { mut job, history, others } = prepared;
            let timeout_s = job.money.timeout_s;
            let is_confined =
                job.uses_confined || job.volumes.iter().any(|volume| volume.copy.confined);
            forget_money(&mut job);
            let mut snapshot = Snapshot { cluster: Facts::default(), job, history, others };
            let mut chosen = |cluster: &mut Facts| {
                std::mem::swap(&mut snapshot.cluster, cluster);
                let plan = perigee_planner::plan(&snapshot);
                std::mem::swap(&mut snapshot.cluster, cluster);
                plan.ok().and_then(|plan| plan.chosen().cloned())
            };
            let own = chosen(&mut self.own);
            let mut predicted = Predicted {
                own: own.as_ref().map(|option| run(option, timeout_s, 0)),
                own_egress: own.as_ref().map_or(Money::ZERO, |option| egress(option, |_| true)),
                rented: BTreeMap::new(),
                may_leave: !is_confined,
            };
            if !is_confined {
                for (kind, cluster) in &mut self.kinds {
                    let Some(option) = chosen(cluster) else { continue };
                    let bytes = egress(&option, |host| *host == self.would_be).micros;
                    predicted.rented.insert(kind.clone(), run(&option, timeout_s, bytes));
                }
            }
            all.push((key, predicted));
        }
        all
    }
}

/// At most until the command's timeout.
fn run(option: &PlanOption, timeout_s: Option<u64>, egress_bytes: u64) -> Run {
    let most_s = timeout_s.map_or(f64::INFINITY, |timeout_s| timeout_s as f64 + AROUND_S);
    let total = &option.total;
    let (expected_s, high_s) = (total.expected_s.min(most_s), total.high_s.min(most_s));
    Run { expected_s, high_s, egress_bytes }
}

/// What leaves the sites of such hosts, at most. What is not known is as dear as can be.
fn egress(option: &PlanOption, of: impl Fn(&HostId) -> bool) -> Money {
    let items = option.cost.iter().flat_map(|cost| &cost.items);
    let leaves = items.filter(|item| item.of == CostOf::Egress && of(&item.host));
    leaves.map(|item| item.cost.map_or(Money::from_micros(u64::MAX), |cost| cost.high)).sum()
}

/// Of each kind that is rented a host that is there, by [`kind_key`].
pub fn like(rentals: &[Rental], facts: &Facts) -> BTreeMap<String, HostFacts> {
    let kind = |rental: &Rental| kind_key(&rental.provider, &rental.offer.kind);
    let kinds: BTreeMap<&HostId, String> =
        rentals.iter().map(|rental| (&rental.host, kind(rental))).collect();
    let there = facts.hosts.iter();
    there.filter_map(|host| Some((kinds.get(&host.id)?.clone(), host.clone()))).collect()
}

/// The closed cluster with one more host of the kind.
fn with_one(
    closed: &Facts,
    id: &HostId,
    kind: &Kind,
    (like, measured): (Option<&HostFacts>, Option<Arc<MeasuredHost>>),
    assumed: &mut Vec<String>,
) -> Facts {
    let mut all = closed.clone();
    assume_links(&mut all, (id, kind), measured.as_deref(), assumed);
    let offer = &kind.offer;
    let room = (capacity_of(offer.cpus, offer.memory_bytes).memory_bytes, RENT_DISK_DEFAULT_BYTES);
    all.hosts.push(HostFacts {
        // As of the own hosts.
        cpu_load: None,
        // A millionth of a dollar for each byte that leaves.
        price: Some(Arc::new(Price {
            per_hour_micros: None,
            minimum_s: 0,
            egress_per_gib_micros: NonZeroU64::new(1 << 30),
            disk_per_gib_month_micros: None,
            source: String::new(),
            as_of_unix_s: 0,
        })),
        ..idle_host(id.clone(), kind.site.clone(), offer, room, (like, measured.as_deref()))
    });
    all
}

/// Where no link between the site and another one was measured, nor one of the kind, one that is as slow as the slowest between two sites is assumed.
fn assume_links(
    all: &mut Facts,
    (host, kind): (&HostId, &Kind),
    of_kind: Option<&MeasuredHost>,
    assumed: &mut Vec<String>,
) {
    let site = &kind.site;
    let is_measured = |link: &&LinkFacts| link.probe.rate_bytes_per_s > 0;
    let measured: Vec<LinkFacts> = all.links.iter().filter(is_measured).cloned().collect();
    let between = measured.iter().filter(|link| link.from_site != link.to_site);
    let slowest = between.map(|link| link.probe).reduce(|one, other| LinkProbe {
        rtt_ms: one.rtt_ms.max(other.rtt_ms),
        rate_bytes_per_s: one.rate_bytes_per_s.min(other.rate_bytes_per_s),
    });
    let probe = slowest.unwrap_or(UNKNOWN_LINK);
    // Of each site one host stands for all.
    let sites: BTreeMap<SiteId, HostId> =
        all.hosts.iter().map(|host| (host.site.clone(), host.id.clone())).collect();
    for (other_site, other) in sites {
        let ends = [(site, host, &other_site, &other), (&other_site, &other, site, host)];
        for (from_site, from, to_site, to) in ends {
            let is_it = |link: &LinkFacts| link.from_site == *from_site && link.to_site == *to_site;
            let is_of_kind = |of_kind: &&MeasuredHost| {
                let is_same_end = |link: &LinkFacts| (link.from == of_kind.host) == (from == host);
                of_kind.links.iter().any(|link| is_it(link) && is_same_end(link))
            };
            if let Some(measured) = of_kind.filter(is_of_kind) {
                assumed.push(format!(
                    "the link of {} between sites {site} and {other_site} counts as {}",
                    kind.key(),
                    measured.source
                ));
                continue;
            }
            if measured.iter().any(is_it) {
                continue;
            }
            assumed.push(format!(
                "the link between sites {site} and {other_site} was not measured: {:.0} ms and {} MB/s are assumed",
                probe.rtt_ms,
                probe.rate_bytes_per_s / 1_000_000
            ));
            all.links.push(LinkFacts {
                from: from.clone(),
                to: to.clone(),
                from_site: from_site.clone(),
                to_site: to_site.clone(),
                probe,
                blocks: None,
                moves: LinkForMoves::default(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Barrier;

    use super::*;

    #[tokio::test]
    async fn all_homes_are_asked_at_the_same_time_and_one_that_hangs_holds_up_none_of_the_others() {
        let all = Arc::new(Barrier::new(AT_ONCE_MAX));
        let asked = (0..AT_ONCE_MAX).map(|number| {
            let all = Arc::clone(&all);
            // None of them answers before each one was asked.
            (number.to_string(), async move { Ok(all.wait().await.is_leader()) })
        });
        let answers = side_by_side(asked, crate::tests::PATIENCE).await;
        assert!(answers.len() == AT_ONCE_MAX && answers.iter().all(|(_, answer)| answer.is_ok()));
        let asked = ["hangs", "answers"].map(|name| {
            let answer = async move {
                if name == "hangs" {
                    std::future::pending::<()>().await;
                }
                Ok(())
            };
            (name.to_owned(), answer)
        });
        for (name, answer) in side_by_side(asked, Duration::from_millis(50)).await {
            assert_eq!(answer.is_err(), name == "hangs", "{answer:?}");
        }
    }
}
