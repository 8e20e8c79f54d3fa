//! What past rentals have shown: how long the starts of a kind take, how long its spot hosts stay, and where it was refused. All of it is in the
//! rentals' records, of which there are at most [`perigee_model::limits::RENTALS`].

use std::collections::BTreeMap;

use perigee_model::rental::states::RentalState;
use perigee_model::rental::{EndedBy, Rental};
use perigee_model::renting::LearnedStart;
use perigee_planner::rent::{Refusal, Start};

use crate::cluster::renter::kind_key;

/// Of each kind the last so many starts count.
const STARTS_MAX: usize = 20;

/// A host that got its first job so long after it had joined was not waited for, in milliseconds.
const WAITED_FOR_MS: u64 = 120_000;

/// A start takes a second at least.
const START_LEAST_S: f64 = 1.0;

fn seconds(from_ms: u64, until_ms: u64) -> f64 {
    until_ms.saturating_sub(from_ms) as f64 / 1e3
}

/// From the request until the first job, or until the host joined if no job was there at once; `None` if it has not joined.
fn start_s(rental: &Rental) -> Option<f64> {
    let asked_ms = rental.since_ms(RentalState::Asked)?;
    let joined_ms = rental.since_ms(RentalState::Joined)?;
    let waits_until_ms = joined_ms.saturating_add(WAITED_FOR_MS);
    let first_ms = rental.first_job_ms.filter(|first_ms| *first_ms <= waits_until_ms);
    Some(seconds(asked_ms, first_ms.unwrap_or(joined_ms)).max(START_LEAST_S))
}

/// For how long it had its host, and whether the provider took the host back; `None` if it has not joined.
fn stay(rental: &Rental, now_ms: u64) -> Option<(f64, bool)> {
    let joined_ms = rental.since_ms(RentalState::Joined)?;
    let left = [RentalState::Draining, RentalState::Ending].map(|state| rental.since_ms(state));
    let vanished = left[0].is_none() && left[1].is_some();
    let left_ms = left.into_iter().flatten().min().unwrap_or(now_ms);
    Some((seconds(joined_ms, left_ms), rental.notice_ms.is_some() || vanished))
}

/// What was learned of each kind that was rented, and that has started.
pub fn starts(rentals: &[Rental], now_ms: u64) -> Vec<LearnedStart> {
    let mut kinds: BTreeMap<(&str, &str), Vec<&Rental>> = BTreeMap::new();
    for rental in rentals {
        let kind = (rental.provider.as_str(), rental.offer.kind.as_str());
        kinds.entry(kind).or_default().push(rental);
    }
    let learned = |((provider, kind), mut all): ((&str, &str), Vec<&Rental>)| {
        all.sort_by_key(|rental| std::cmp::Reverse(rental.begun_ms()));
        let lasted: Vec<f64> =
            all.iter().filter_map(|rental| start_s(rental)).take(STARTS_MAX).collect();
        let (expected_s, high_s) = ranged(lasted.clone())?;
        let spot = all.iter().filter(|rental| rental.offer.spot);
        let stays: Vec<(f64, bool)> = spot.filter_map(|rental| stay(rental, now_ms)).collect();
        let taken = stays.iter().filter(|(_, is_taken)| *is_taken).count();
        let there_s: f64 = stays.iter().map(|(stayed_s, _)| stayed_s).sum();
        Some(LearnedStart {
            provider: provider.to_owned(),
            kind: kind.to_owned(),
            starts: u32::try_from(lasted.len()).unwrap_or(u32::MAX),
            expected_s,
            high_s,
            // Those that are still there, and those that were given back, count for the time that they stayed.
            taken_back_every_s: (taken > 0).then(|| (there_s / taken as f64).max(1.0)),
        })
    };
    kinds.into_iter().filter_map(learned).collect()
}

/// The one in the middle, and an upper end that 9 of 10 do not reach: of a few starts the longest one says less.
fn ranged(mut all: Vec<f64>) -> Option<(f64, f64)> {
    all.sort_by(f64::total_cmp);
    let (count, expected_s) = (all.len(), *all.get(all.len() / 2)?);
    let upper = all[(count * 9).div_ceil(10).saturating_sub(1)];
    Some((expected_s, upper * (1.0 + 1.0 / count as f64)))
}

/// The same, by the names that the planner has of the kinds.
pub fn by_kind(learned: &[LearnedStart]) -> BTreeMap<String, Start> {
    let start = |one: &LearnedStart| {
        let LearnedStart { expected_s, high_s, taken_back_every_s, .. } = *one;
        (kind_key(&one.provider, &one.kind), Start { expected_s, high_s, taken_back_every_s })
    };
    learned.iter().map(start).collect()
}

/// Whether a person has ended a host that the rule has rented: the rule does not rent another one at once.
fn is_taken_away(rental: &Rental) -> bool {
    rental.rented_for.is_some() && rental.ended_by == Some(EndedBy::Person)
}

/// Where requests have failed since the last start there: they were refused, or no host has joined.
pub fn refusals(rentals: &[Rental], age_ms: impl Fn(u64) -> u64) -> Vec<Refusal> {
    let mut places: BTreeMap<(String, &str, bool), Vec<&Rental>> = BTreeMap::new();
    for rental in rentals {
        let offer = &rental.offer;
        let kind = kind_key(&rental.provider, &offer.kind);
        places.entry((kind, offer.zone.as_str(), offer.spot)).or_default().push(rental);
    }
    let refused = |((kind, zone, spot), mut all): ((String, &str, bool), Vec<&Rental>)| {
        all.sort_by_key(|rental| std::cmp::Reverse(rental.begun_ms()));
        let ends = |rental: &&&Rental| {
            rental.ends_because.is_some() || rental.refused.is_some() || rental.state.is_over()
        };
        let is_good = |rental: &&Rental| {
            rental.since_ms(RentalState::Joined).is_some() && !is_taken_away(rental)
        };
        let since: Vec<&&Rental> =
            all.iter().filter(ends).take_while(|rental| !is_good(rental)).collect();
        let last = since.first()?;
        let at_ms = last.refused.as_ref().map(|refused| refused.at_ms);
        let at_ms = at_ms.or_else(|| last.steps.last().map(|step| step.at_ms)).unwrap_or(0);
        Some(Refusal {
            kind,
            zone: zone.to_owned(),
            spot,
            ago_s: age_ms(at_ms) as f64 / 1e3,
            times: u32::try_from(since.len()).unwrap_or(u32::MAX),
        })
    };
    places.into_iter().filter_map(refused).collect()
}

#[cfg(test)]
mod tests {
    use perigee_model::rental::RentalStep;

    use super::*;

    const SECOND: u64 = 1000;

    /// One whose states began at these seconds.
    fn rental(number: u64, steps: &[(RentalState, u64)]) -> Rental {
        let mut rental = crate::tests::rental(&format!("rent-{number}"));
        let step = |(state, s): &(RentalState, u64)| RentalStep {
            state: *state,
            at_ms: s * SECOND,
            why: String::new(),
        };
        rental.steps = steps.iter().map(step).collect();
        rental.state = steps.last().expect("a step").0;
        rental
    }

    fn started(number: u64, at_s: u64, takes_s: u64) -> Rental {
        use RentalState::{Asked, Joined, Starting, Wanted};
        let steps = [(Wanted, at_s), (Asked, at_s), (Starting, at_s + 1), (Joined, at_s + takes_s)];
        rental(number, &steps)
    }

    #[test]
    fn starts_are_expected_to_take_as_long_as_before_and_a_few_say_little() {
        let one = [started(1, 0, 100)];
        let learned = starts(&one, 0);
        assert_eq!((learned[0].expected_s, learned[0].high_s), (100.0, 200.0));
        let many: Vec<Rental> = (0..30).map(|n| started(n, n * 1000, 90 + n)).collect();
        let learned = starts(&many, 0);
        // Those of 100 to 119 s are the last ones.
        assert_eq!((learned[0].starts, learned[0].expected_s), (20, 110.0));
        assert!((117.0..125.0).contains(&learned[0].high_s), "{learned:?}");
        assert!(starts(&[rental(1, &[(RentalState::Asked, 0)])], 0).is_empty());
    }

    #[test]
    fn the_first_job_counts_only_if_it_was_there_at_once() {
        for (job_s, expected_s) in [(130, 130.0), (500, 100.0)] {
            let first = Rental { first_job_ms: Some(job_s * SECOND), ..started(1, 0, 100) };
            assert_eq!(starts(&[first], 0)[0].expected_s, expected_s);
        }
    }

    #[test]
    fn spot_hosts_that_were_given_back_count_for_the_time_that_they_stayed() {
        let spot = |rental: Rental| {
            let offer = perigee_model::rental::Offer { spot: true, ..rental.offer.clone() };
            Rental { offer, ..rental }
        };
        let mut given_back = started(1, 0, 100);
        given_back
            .take(perigee_model::rental::states::RentalEvent::GivenBack, 700_000, "")
            .expect("an event");
        let alone = starts(&[spot(given_back.clone())], 0);
        assert_eq!(alone[0].taken_back_every_s, None, "never seen");
        let mut taken = started(2, 0, 100);
        taken.notice_ms = Some(1);
        taken
            .take(perigee_model::rental::states::RentalEvent::GivenBack, 300_000, "")
            .expect("an event");
        let both = starts(&[spot(given_back), spot(taken)], 0);
        assert_eq!(both[0].taken_back_every_s, Some(800.0));
    }

    #[test]
    fn refusals_count_since_the_last_start() {
        let fails = |number: u64, at_s: u64| {
            let mut fails =
                rental(number, &[(RentalState::Wanted, at_s), (RentalState::Gone, at_s)]);
            fails.end(EndedBy::Refused, "no capacity");
            fails
        };
        let gone = |number: u64, at_s: u64, by: EndedBy| {
            let mut gone = started(number, at_s, 10);
            // The words say nothing here.
            gone.end(by, "somebody gave it back");
            gone.rented_for = Some(perigee_model::renting::RentedFor {
                jobs: Vec::new(),
                jobs_count: 0,
                saves: Default::default(),
                costs: Default::default(),
                reserve_s: 0,
                why: String::new(),
            });
            gone
        };
        let ago = |at_ms: u64| 10_000_000 - at_ms;
        let times = |all: &[Rental]| refusals(all, ago).first().map(|one| one.times);
        assert_eq!(times(&[started(1, 0, 10)]), None);
        assert_eq!(times(&[fails(1, 0), fails(2, 5)]), Some(2));
        let old = gone(2, 5, EndedBy::Rule);
        assert_eq!(times(&[fails(1, 0), old.clone()]), None, "it has started since");
        assert_eq!(times(&[fails(1, 0), old, fails(3, 9)]), Some(1));
        assert_eq!(times(&[gone(1, 0, EndedBy::Person)]), Some(1), "a person wants none");
        let last = refusals(&[fails(1, 0), fails(2, 5)], ago);
        assert_eq!((last[0].kind.as_str(), last[0].ago_s), ("lab/m1", 9995.0));
    }
}
