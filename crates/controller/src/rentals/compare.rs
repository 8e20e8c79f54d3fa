//! Compares what the providers list with the records, and hears their notices.
//!
//! A list that is not complete, late or makes no sense changes nothing. What nobody owns is ended only after it was in each list of a grace period.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures_util::future::join_all;
use perigee_cloud::{CloudError, CloudErrorKind, Provider};
use perigee_model::limits::RENTALS;
use perigee_model::money::{Money, Price};
use perigee_model::rental::states::{RentalState, RentedHost, Requested};
use perigee_model::rental::{EndedBy, Instance, Notice, Offer, Rental, RentalStep};
use perigee_model::{HostId, Problem, RentalId, SiteId};

use super::ask::{TEXT_MAX, is_sane};
use super::facts::rented_host;
use super::{cluster_id, money, within};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::tasks::Task;
use crate::records::{RentalRecord, rental_intent_key, rental_key};
use crate::storage::replicas;

/// A list with more than this is no list.
const INSTANCES_MAX: usize = 10_000;

/// How the last round of each provider went. Providers share a task, and none waits for another one that is slow: so that a good round of one
/// does not hide that another one fails, the task reports what all of them came to.
#[derive(Default)]
pub(super) struct Rounds(Mutex<BTreeMap<String, Result<String, Problem>>>);

impl Rounds {
    /// Notes how a provider's round went. Returns what all providers came to, as [`joined`] says it.
    pub(super) fn note(
        &self,
        provider: &str,
        went: Result<String, Problem>,
    ) -> Result<String, Problem> {
        let mut rounds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        rounds.insert(provider.to_owned(), went);
        joined(rounds.values().cloned().collect())
    }

    /// Nothing is asked of the provider now.
    fn forget(&self, provider: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(provider);
    }
}

/// Runs an endless loop for each provider, side by side. It does not end, also without any provider.
pub(super) async fn with_each<F: Future<Output = ()>>(
    cluster: &Cluster,
    one: impl Fn(Arc<Rounds>, Arc<dyn Provider>) -> F,
) {
    let rounds = Arc::new(Rounds::default());
    let providers = cluster.settings.renting.providers.iter();
    join_all(providers.map(|provider| one(Arc::clone(&rounds), Arc::clone(provider)))).await;
    std::future::pending().await
}

/// What all came to: the first problem with the others' sentences, if there is a problem.
fn joined(all: Vec<Result<String, Problem>>) -> Result<String, Problem> {
    let (mut first, mut others) = (None::<Problem>, Vec::new());
    for went in all {
        match went {
            Ok(did) => others.push(did),
            Err(problem) if first.is_none() => first = Some(problem),
            Err(problem) => others.push(format!("{}: {}", problem.what, problem.why)),
        }
    }
    let others = others.join("; ");
    match first {
        None => Ok(others),
        Some(first) if others.is_empty() => Err(first),
        Some(first) => {
            let why = format!("{}; {others}", first.why);
            Err(Problem { why, ..first })
        }
    }
}

/// Lists the instances of each provider again and again. It does not end.
pub async fn compare(cluster: Arc<Cluster>, task: Task) {
    let (cluster, task) = (&cluster, &task);
    with_each(cluster, |rounds, provider| async move {
        lists_of(cluster, task, &rounds, &provider).await;
    })
    .await;
}

async fn lists_of(
    cluster: &Arc<Cluster>,
    task: &Task,
    rounds: &Rounds,
    provider: &Arc<dyn Provider>,
) {
    let timing = cluster.timing.rentals;
    let mut looked: Option<Instant> = None;
    loop {
        let hurries = cluster.rentals.all().iter().any(|rental| {
            let is_changing = matches!(
                rental.state,
                RentalState::Asked | RentalState::Starting | RentalState::Ending
            );
            is_changing && rental.provider == provider.name()
        });
        let pause = if hurries { timing.hurry } else { timing.compare };
        if looked.is_none_or(|at| at.elapsed() >= pause) {
            let all = async { rounds.note(provider.name(), round(cluster, provider).await) };
            task.round(all).await;
            looked = Some(Instant::now());
        }
        let left = pause.saturating_sub(looked.map_or(pause, |at| at.elapsed()));
        tokio::time::sleep(left.min(timing.hurry)).await;
    }
}

async fn round(cluster: &Arc<Cluster>, provider: &Arc<dyn Provider>) -> Result<String, Problem> {
    let name = provider.name().to_owned();
    let (begun, of) = (Instant::now(), cluster_id(cluster));
    let list = within(cluster.timing.rentals.answer, provider.list(&of)).await;
    let list = list.and_then(sane).map_err(|error| {
        let problem = not_known(&name, &error);
        cluster.rentals.note_no_list(&name, &problem.why);
        problem
    })?;
    let count = list.len();
    cluster.rentals.note_list(&name, begun, list);
    // They make room for others.
    let pruned = prune(cluster).await;
    let unowned = cluster.rentals.unowned(&name, cluster.timing.rentals.grace);
    let mut problems: Vec<Problem> = pruned.err().into_iter().collect();
    for instance in &unowned {
        problems.extend(own(cluster, &name, instance).await.err());
    }
    let more = problems.len().saturating_sub(1);
    match problems.into_iter().next() {
        None => {
            Ok(format!("{name} has {count} instances, of which nobody owned {}", unowned.len()))
        }
        Some(first) if more == 0 => Err(first),
        Some(first) => {
            let why = format!("{}; {more} more failed", first.why);
            Err(Problem { why, ..first })
        }
    }
}

/// # Errors
/// `Unclear` for a list that can't be one.
fn sane(list: Vec<Instance>) -> Result<Vec<Instance>, CloudError> {
    if list.len() <= INSTANCES_MAX && list.iter().all(is_sane) {
        return Ok(list);
    }
    let message = format!(
        "its list has more than {INSTANCES_MAX} instances, or one without an id or with texts that are too long"
    );
    Err(CloudError { kind: CloudErrorKind::Unclear, message })
}

/// # Errors
/// As [`sane`].
fn sane_notices(notices: Vec<Notice>) -> Result<Vec<Notice>, CloudError> {
    let is_sane = |notice: &Notice| notice.instance.len() <= TEXT_MAX;
    if notices.len() <= INSTANCES_MAX && notices.iter().all(is_sane) {
        return Ok(notices);
    }
    let message = format!(
        "it has more than {INSTANCES_MAX} notices, or one of an instance whose id has more than {TEXT_MAX} bytes"
    );
    Err(CloudError { kind: CloudErrorKind::Unclear, message })
}

fn not_known(provider: &str, error: &CloudError) -> Problem {
    Problem::unavailable(
        format!("can't compare the instances of provider {provider} with the rentals"),
        format!("{}: {}", error.kind, error.message),
    )
    .next("nothing is ended or made because of this; it is tried again")
}

/// Gives an instance that no unfinished rental owns to one: the rental of its tag, if that is over, else a new one. If a host of the rental's name
/// belongs to the cluster, the host is drained first.
async fn own(cluster: &Arc<Cluster>, provider: &str, instance: &Instance) -> Result<(), Problem> {
    let tagged = instance.rental.as_deref().and_then(|tag| tag.parse::<RentalId>().ok());
    let known = tagged.clone().and_then(|id| cluster.rentals.get(&id));
    if let Some(rental) = known.as_ref().filter(|rental| rental.provider == provider) {
        tracing::warn!(rental = %rental.id, "provider {provider} still has instance {}", instance.id);
        cluster.drive_rental(&rental.id);
        return Ok(());
    }
    let id = match tagged.filter(|_| known.is_none()) {
        Some(id) => id,
        None => super::request::new_id()?,
    };
    RENTALS.check(cluster.rentals.count() + 1).map_err(|e| {
        Problem::conflict(format!("can't end instance {} of {provider}", instance.id), e)
            .next("end the instance with the provider's own tools, or wait until old rentals are forgotten")
    })?;
    let why = format!("no rental of this cluster owned instance {} of {provider}", instance.id);
    tracing::warn!(rental = %id, "{why}; it is ended");
    let record = found(cluster, provider, instance, id, why).await?;
    if cluster.records.create(&rental_key(&record.view.id), &record).await? {
        cluster.rentals.put(&record.view);
    }
    cluster.drive_rental(&record.view.id);
    Ok(())
}

async fn found(
    cluster: &Cluster,
    provider: &str,
    instance: &Instance,
    id: RentalId,
    why: String,
) -> Result<RentalRecord, Problem> {
    let name = |e| Problem::internal("can't own an instance", e);
    let host = HostId::new(id.as_str()).map_err(name)?;
    let site = match cluster.hosts.get(&host) {
        Ok(link) => link.addresses.site.clone(),
        Err(_) => SiteId::new(provider).or_else(|_| SiteId::new("rented")).map_err(name)?,
    };
    let state = match rented_host(cluster, &host).await? {
        RentedHost::Unknown => RentalState::Ending,
        RentedHost::Up | RentedHost::Silent => RentalState::Draining,
    };
    let price = Price {
        per_hour_micros: None,
        minimum_s: 0,
        egress_per_gib_micros: None,
        disk_per_gib_month_micros: None,
        source: String::new(),
        as_of_unix_s: 0,
    };
    let offer = Offer {
        kind: instance.kind.clone(),
        zone: instance.zone.clone(),
        spot: instance.spot,
        cpus: 0,
        memory_bytes: 0,
        kvm: None,
        price,
    };
    let view = Rental {
        id,
        provider: provider.to_owned(),
        offer,
        image: String::new(),
        disk_bytes: 0,
        site,
        host,
        by: "the controller".to_owned(),
        state,
        steps: vec![RentalStep { state, at_ms: now_ms(), why: why.clone() }],
        why: why.clone(),
        ends_because: Some(why),
        ended_by: Some(EndedBy::NotOwned),
        until_ms: None,
        instance: Some(instance.id.clone()),
        address: instance.address.clone(),
        requested: Requested::Perhaps,
        asks: 0,
        asked_ms: None,
        refused: None,
        notice_ms: None,
        joined_ms: None,
        predicted: None,
        reserved: Money::ZERO,
        reserved_until_ms: None,
        left_bytes: 0,
        spent: None,
        rented_for: None,
        first_job_ms: None,
        found: None,
    };
    Ok(RentalRecord { view, controller_url: None, secret: None })
}

/// Removes the records of rentals that were over long ago, and of those that cost nothing a day after their end. One that can't be removed now keeps
/// none of the others.
async fn prune(cluster: &Cluster) -> Result<(), Problem> {
    let mut old = cluster.rentals.all();
    old.retain(|rental| rental.state.is_over() && is_old(cluster, rental));
    if old.is_empty() {
        return Ok(());
    }
    // Without the record nobody knows that a replica's host does not come back, and the replica would stay there for ever.
    let replicas = replicas::list(cluster).await?;
    let mut first = Ok(());
    for rental in old {
        if !replicas.iter().any(|replica| replica.host == rental.host) {
            first = first.and(forget(cluster, &rental.id).await);
        }
    }
    first
}

/// Whether one that is over is kept no longer.
fn is_old(cluster: &Cluster, rental: &Rental) -> bool {
    let ended_ms = rental.steps.last().map_or(0, |step| step.at_ms);
    let age_s = cluster.clock.age_ms(ended_ms) / 1000;
    let has_cost = money::spent(cluster, rental) != Some(Money::ZERO);
    age_s > if has_cost { money::PERIOD_S + 86_400 } else { 86_400 }
}

async fn forget(cluster: &Cluster, id: &RentalId) -> Result<(), Problem> {
    money::forget(cluster, id).await?;
    cluster.records.remove(&rental_intent_key(id)).await?;
    cluster.records.remove(&rental_key(id)).await?;
    cluster.rentals.forget(id);
    Ok(())
}

/// Asks the providers of spot hosts which of them they take back. It does not end.
pub async fn hear(cluster: Arc<Cluster>, task: Task) {
    let (cluster, task) = (&cluster, &task);
    with_each(cluster, |rounds, provider| async move {
        notices_of(cluster, task, &rounds, &provider).await;
    })
    .await;
}

async fn notices_of(
    cluster: &Arc<Cluster>,
    task: &Task,
    rounds: &Rounds,
    provider: &Arc<dyn Provider>,
) {
    let of = cluster_id(cluster);
    loop {
        tokio::time::sleep(cluster.timing.rentals.notices).await;
        let has_spot = cluster.rentals.all().iter().any(|rental| {
            rental.state.may_cost() && rental.offer.spot && rental.provider == provider.name()
        });
        if !has_spot {
            rounds.forget(provider.name());
            continue;
        }
        let hear = async {
            let notices = within(cluster.timing.rentals.answer, provider.notices(&of)).await;
            let notices = notices.and_then(sane_notices);
            let notices = notices.map_err(|error| not_known(provider.name(), &error))?;
            let count = notices.len();
            cluster.rentals.note_notices(provider.name(), notices);
            Ok(format!("{} takes {count} instances back", provider.name()))
        };
        task.round(async { rounds.note(provider.name(), hear.await) }).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_round_of_one_provider_does_not_hide_that_another_one_fails() {
        let rounds = Rounds::default();
        let fails = || Problem::unavailable("can't list a", "no route");
        rounds.note("a", Err(fails())).expect_err("it fails");
        let both = rounds.note("b", Ok("b has 2 instances".to_owned())).expect_err("a still fails");
        assert_eq!(both, Problem { why: "no route; b has 2 instances".to_owned(), ..fails() });
        let all = rounds.note("a", Ok("a has 1 instance".to_owned())).expect("all is well");
        assert_eq!(all, "a has 1 instance; b has 2 instances");
    }

    #[test]
    fn more_notices_than_instances_can_be_are_no_notices() {
        let notice = |instance: String| Notice { instance, ends_unix_s: 7 };
        sane_notices(vec![notice("i".repeat(256)); INSTANCES_MAX]).expect("as many as may be");
        sane_notices(vec![notice("i".to_owned()); INSTANCES_MAX + 1]).expect_err("too many");
        sane_notices(vec![notice("i".repeat(257))]).expect_err("too long");
    }

    #[test]
    fn a_list_with_texts_that_are_too_long_to_be_kept_is_no_list() {
        let instance = |kind: String| Instance {
            id: "i-1".to_owned(),
            rental: None,
            state: perigee_model::rental::InstanceState::Running,
            kind,
            zone: "a".to_owned(),
            spot: false,
            address: None,
            started_unix_s: None,
        };
        sane(vec![instance("k".repeat(256))]).expect("as long as it may be");
        sane(vec![instance("k".repeat(257))]).expect_err("too long");
    }
}
