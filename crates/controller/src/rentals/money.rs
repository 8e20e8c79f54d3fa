//! What rented hosts may cost: the high end is reserved before the provider is asked, and again before the reserved time is over.

use perigee_model::Problem;
use perigee_model::money::Money;
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;

use crate::cluster::Cluster;

/// How long what was spent counts against the budget.
pub const PERIOD_S: u64 = 30 * 86_400;

/// Money is reserved for so long at a time, if the rental's end is not known.
const SLICE_S: u64 = 3600;

/// For the time that a host takes to leave, and in which its lease ends it when the controller is away.
const TAIL_S: u64 = 900;

/// More is reserved when less than so much is left.
const MARGIN_S: u64 = 600;

/// Until how many seconds after its first request a rental's money is to be reserved; `None`: what is reserved is enough now.
///
/// The ages do not go by the clock, which may be set.
pub fn reserve_for_s(cluster: &Cluster, rental: &Rental) -> Option<u64> {
    let Some(first_ms) = rental.since_ms(RentalState::Asked) else {
        let wanted_ms = rental.since_ms(RentalState::Wanted).unwrap_or(0);
        let for_s = rental.until_ms.map(|until_ms| until_ms.saturating_sub(wanted_ms) / 1000);
        return Some(for_s.unwrap_or(SLICE_S).saturating_add(TAIL_S));
    };
    let reserved_s = rental.reserved_until_ms.unwrap_or(first_ms).saturating_sub(first_ms) / 1000;
    let age_s = cluster.clock.age_ms(first_ms) / 1000;
    (age_s.saturating_add(MARGIN_S) > reserved_s)
        .then(|| reserved_s.max(age_s).saturating_add(SLICE_S))
}

/// Reserves the most that the rental costs in its first `for_s` seconds, in the rental itself: the caller has its turn
/// (`cluster.rentals.reserving`), and saves the record before it gives the turn back.
///
/// # Errors
/// `Conflict` if the budget of the cluster does not allow that; `Invalid` if the price is not known.
pub fn reserve(
    cluster: &Cluster,
    rental: &mut Rental,
    for_s: u64,
    first_ms: u64,
) -> Result<(), Problem> {
    let what = format!("can't rent host {}", rental.host);
    let high = rental.cost(for_s).ok_or_else(|| {
        let kind = &rental.offer.kind;
        Problem::invalid(
            &what,
            format!(
                "the price of {kind}, or of its disk, is not known, and is not taken for nothing"
            ),
        )
        .next("name the price in the file of prices")
    })?;
    let budget = cluster.settings.renting.budget.ok_or_else(|| {
        Problem::conflict(&what, "the cluster has no budget for rented hosts")
            .next("start the controller with --rent-budget")
    })?;
    let others: Money = cluster
        .rentals
        .all()
        .iter()
        .filter(|other| other.id != rental.id)
        .map(|other| counts(cluster, other))
        .sum();
    if others.plus(high) > budget {
        let why = format!(
            "{high} for {} s with {others} for other rented hosts of the last 30 days is over the budget of {budget}",
            for_s
        );
        return Err(Problem::conflict(what, why)
            .next("give a host back (perigee rent list), or raise --rent-budget"));
    }
    rental.reserved = high;
    rental.reserved_until_ms = Some(first_ms.saturating_add(for_s.saturating_mul(1000)));
    Ok(())
}

/// What a rental counts for against the budget.
fn counts(cluster: &Cluster, rental: &Rental) -> Money {
    if !rental.state.is_over() {
        // One that something can't leave costs more than was reserved.
        return rental.reserved.max(spent(cluster, rental).unwrap_or_default());
    }
    let spent = rental.spent.unwrap_or(rental.reserved);
    let ended_ms = rental.steps.last().map_or(0, |step| step.at_ms);
    if cluster.clock.age_ms(ended_ms) / 1000 > PERIOD_S { Money::ZERO } else { spent }
}

/// What a rental has cost until now: nothing if the provider never showed an instance, and no host of it joined. A rental that is over keeps
/// what it had cost then.
pub fn spent(cluster: &Cluster, rental: &Rental) -> Option<Money> {
    if rental.state.is_over() {
        return rental.spent;
    }
    if rental.instance.is_none() && cluster.hosts.get(&rental.host).is_err() {
        // Its host may have been there, and was removed.
        return Some(rental.spent.unwrap_or_default());
    }
    let first = rental.steps.iter().find(|step| step.state != RentalState::Wanted)?;
    rental.cost(cluster.clock.age_ms(first.at_ms) / 1000)
}
