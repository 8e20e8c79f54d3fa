//! What rented hosts may cost: the high end is reserved in the ledger before the provider is asked, more before that is used up, and what was
//! spent is settled at the end.
//!
//! The ledger's entry comes before the record that follows from it, and asking for the same again changes nothing. So a controller that is killed
//! between the two reserves nothing twice, and loses nothing: the driver asks again, and either has all that it needs or reserves the rest.

use perigee_model::budget::{MoneyRange, Spending};
use perigee_model::money::Money;
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;
use perigee_model::{Problem, RentalId};

use crate::cluster::Cluster;
use crate::cluster::rentals::owner;
use crate::records::left_site_key;

/// How long what was spent counts against the budget.
pub const PERIOD_S: u64 = 30 * 86_400;

/// Money is reserved for so long at a time, if the rental's end is not known.
const SLICE_S: u64 = 3600;

/// For the time that a host takes to leave, and in which its lease ends it when the controller is away.
const TAIL_S: u64 = 900;

/// The same for a host that the cluster has rented by itself: at each look the rule says how long its jobs need it.
const RULE_SLICE_S: u64 = 300;

/// More is reserved when less than so much is left beside the host's lease, for which it runs on when the controller is away.
const MARGIN_S: u64 = 120;

/// A host that never hears of its controller may cost so much: a start, and the half hour after which its first boot ends it (`user_data.rs`).
const UNHEARD_S: u64 = 300 + 1800;

/// Until how many seconds after its first request a rental's money is to be reserved, if somebody wants it reserved until then, a Unix time;
/// `None`: what is reserved is enough now.
///
/// The ages do not go by the clock, which may be set.
pub fn reserve_for_s(cluster: &Cluster, rental: &Rental, until_ms: Option<u64>) -> Option<u64> {
    let Some(first_ms) = rental.since_ms(RentalState::Asked) else {
        if let Some(of_rule) = &rental.rented_for {
            return Some(of_rule.reserve_s.max(UNHEARD_S));
        }
        return Some(most_s(wanted_for_s(rental).unwrap_or(SLICE_S)));
    };
    let rental = cluster.rentals.with_money(rental.clone());
    let age_s = cluster.clock.age_ms(first_ms) / 1000;
    let lease_s = cluster.timing.rentals.lease.as_secs();
    let slice_s = lease_s + if rental.rented_for.is_some() { RULE_SLICE_S } else { SLICE_S };
    let margin_s = lease_s + MARGIN_S;
    let is_reserved = |for_s| rental.cost_so_far(for_s).is_some_and(|high| high <= rental.reserved);
    let next_s =
        (!is_reserved(age_s.saturating_add(margin_s))).then(|| age_s.saturating_add(slice_s));
    let wanted_s = until_ms.map(|until_ms| until_ms.saturating_sub(first_ms) / 1000);
    next_s.max(wanted_s.filter(|wanted_s| !is_reserved(*wanted_s)))
}

/// For how long one may cost money that is wanted for so long.
fn most_s(for_s: u64) -> u64 {
    for_s.saturating_add(TAIL_S).max(UNHEARD_S)
}

/// For how long somebody wants it; `None` if nobody has said so.
fn wanted_for_s(rental: &Rental) -> Option<u64> {
    let wanted_ms = rental.since_ms(RentalState::Wanted).unwrap_or(0);
    rental.until_ms.map(|until_ms| until_ms.saturating_sub(wanted_ms) / 1000)
}

/// What a rental that is asked for now will cost, if somebody says for how long it is wanted: at its high end, what is reserved.
pub fn predicted(rental: &Rental) -> Option<MoneyRange> {
    let for_s = wanted_for_s(rental)?;
    MoneyRange::of([for_s, for_s, most_s(for_s)], |seconds| rental.cost(seconds))
}

/// Reserves the most that the rental costs in its first `for_s` seconds, with what has left its site already.
///
/// # Errors
/// `Conflict` if the budget of the cluster does not allow that; `Invalid` if the price is not known; if the store fails.
pub async fn reserve(cluster: &Cluster, rental: &Rental, for_s: u64) -> Result<(), Problem> {
    let (owner, ask) = (owner(&rental.id), Ask::of(cluster, rental, for_s)?);
    let counts = |at_ms| counts(cluster, at_ms);
    cluster.ledger.reserve_rented(&owner, ask.high, counts, |others| ask.allowed(others)).await
}

/// Whether [`reserve`] would do so now.
///
/// # Errors
/// As there.
pub fn check(cluster: &Cluster, rental: &Rental, for_s: u64) -> Result<(), Problem> {
    let ask = Ask::of(cluster, rental, for_s)?;
    ask.allowed(cluster.ledger.rented(&owner(&rental.id), |at_ms| counts(cluster, at_ms)))
}

/// Whether what ended then counts against the budget; Unix time.
pub(super) fn counts(cluster: &Cluster, at_ms: u64) -> bool {
    cluster.clock.age_ms(at_ms) / 1000 <= PERIOD_S
}

/// What all rentals but this one have cost beyond what is reserved for them, as one that something can't leave.
pub(super) fn beyond(cluster: &Cluster, without: Option<&RentalId>) -> Money {
    let all = cluster.rentals.all().into_iter();
    let others = all.filter(|other| Some(&other.id) != without && !other.state.is_over());
    others.map(|other| spent(cluster, &other).unwrap_or_default().less(other.reserved)).sum()
}

/// What is to be reserved for a rental.
struct Ask {
    what: String,
    for_s: u64,
    high: Money,
    budget: Money,
    /// What the others have cost beyond what is reserved for them, as one that something can't leave.
    beyond: Money,
}

impl Ask {
    fn of(cluster: &Cluster, rental: &Rental, for_s: u64) -> Result<Self, Problem> {
        let what = format!("can't rent host {}", rental.host);
        let rental = cluster.rentals.with_money(rental.clone());
        let high = rental.cost_so_far(for_s).ok_or_else(|| {
            let kind = &rental.offer.kind;
            let why = format!(
                "the price of {kind}, or of its disk, is not known, and is not taken for nothing"
            );
            Problem::invalid(&what, why).next("have the provider or its program say a price that is not older than max-age in the file of providers")
        })?;
        let budget = cluster.settings.renting.budget.get().ok_or_else(|| {
            Problem::conflict(&what, "the cluster has no budget for rented hosts")
                .next("start the controller with --rent-budget")
        })?;
        let beyond = beyond(cluster, Some(&rental.id));
        Ok(Self { what, for_s, high, budget, beyond })
    }

    fn allowed(&self, others: Spending) -> Result<(), Problem> {
        let Self { what, for_s, high, budget, beyond } = self;
        let others = others.taken().plus(*beyond);
        if others.plus(*high) <= *budget {
            return Ok(());
        }
        let why = format!(
            "{high} for {for_s} s with {others} for other rented hosts of the last 30 days is over the budget of {budget}"
        );
        Err(Problem::conflict(what, why)
            .next("give a host back (perigee rent list), or raise --rent-budget"))
    }
}

/// What of the budget nobody has reserved; `None` without a budget. What is about to be reserved does not count as left.
pub fn left(cluster: &Cluster) -> Option<Money> {
    let taken = cluster.ledger.rented("", |at_ms| counts(cluster, at_ms)).taken();
    let all = cluster.rentals.all().into_iter();
    let soon = all.filter(|rental| rental.state == RentalState::Wanted).map(|rental| {
        let for_s = reserve_for_s(cluster, &rental, None).unwrap_or_default();
        rental.cost(for_s).unwrap_or_default().less(rental.reserved)
    });
    let taken = taken.plus(beyond(cluster, None)).plus(soon.sum());
    Some(cluster.settings.renting.budget.get()?.less(taken))
}

/// In how many seconds the first of what was spent counts no more; `None` without a budget.
pub fn period_left_s(cluster: &Cluster) -> Option<f64> {
    cluster.settings.renting.budget.get()?;
    let all = cluster.rentals.all();
    let counting = all.iter().filter(|rental| {
        let ended_ms = rental.steps.last().map_or(0, |step| step.at_ms);
        let has_spent = rental.spent.is_some_and(|spent| spent > Money::ZERO);
        !rental.state.is_over() || has_spent && counts(cluster, ended_ms)
    });
    let ages_s = counting.filter_map(|rental| {
        Some(cluster.clock.age_ms(rental.since_ms(RentalState::Asked)?) / 1000)
    });
    let oldest_s = ages_s.max().unwrap_or(0);
    Some(PERIOD_S.saturating_sub(oldest_s).max(SLICE_S) as f64)
}

/// What a rental has cost until now, as far as that is known: nothing if the provider never showed an instance, and no host of it joined. A rental
/// that is over has cost what was settled.
pub fn spent(cluster: &Cluster, rental: &Rental) -> Option<Money> {
    if rental.state.is_over() {
        let nothing = rental.cost(0).map(|_| Money::ZERO);
        return rental.spent.or(nothing);
    }
    let is_joined = rental.joined_ms.is_some() || cluster.hosts.get(&rental.host).is_ok();
    if rental.instance.is_none() && !is_joined {
        return Some(Money::ZERO);
    }
    let first = rental.steps.iter().find(|step| step.state != RentalState::Wanted)?;
    rental.cost_so_far(cluster.clock.age_ms(first.at_ms) / 1000)
}

/// Settles what a rental has cost that is about to be over. Its record says so afterwards: until then this may be repeated.
///
/// # Errors
/// If the store fails.
pub async fn settle(cluster: &Cluster, rental: &Rental) -> Result<(), Problem> {
    let owner = owner(&rental.id);
    let rental = cluster.rentals.with_money(rental.clone());
    match spent(cluster, &rental) {
        Some(spent) if spent > Money::ZERO => cluster.ledger.settle_rented(&owner, spent).await,
        _ => cluster.ledger.release(&owner).await,
    }
}

/// Forgets one whose record is about to be removed.
///
/// # Errors
/// If the store fails.
pub async fn forget(cluster: &Cluster, id: &RentalId) -> Result<(), Problem> {
    cluster.ledger.forget(&owner(id)).await?;
    cluster.records.remove(&left_site_key(id)).await
}
