//! What past rentals have shown: how long the starts of a kind take, how long its spot hosts stay, and where it was refused. All of it is in the
//! rentals' records, of which there are at most [`perigee_model::limits::RENTALS`].

use std::collections::{BTreeMap, BTreeSet};

use perigee_model::rental::states::RentalState;
use perigee_model::rental::{EndedBy, HostFound, Offer, Rental};
use perigee_model::renting::LearnedStart;
use perigee_model::units::format_seconds;
use perigee_planner::rent::{REFUSED_S, Refusal, Start, refused_for_s};

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

/// What a host has shown to be counts for the next ones of its kind for a day: that may have been one host's fault.
const FOUND_MS: u64 = 86_400_000;

/// Of each kind what its newest host has shown to be, by the name that the planner has of the kind.
pub fn found(rentals: &[Rental], age_ms: impl Fn(u64) -> u64) -> BTreeMap<String, HostFound> {
    let mut all: Vec<&Rental> =
        rentals.iter().filter(|rental| age_ms(rental.begun_ms()) < FOUND_MS).collect();
    all.sort_by_key(|rental| rental.begun_ms());
    // The newest one is the last.
    let found = all
        .into_iter()
        .filter_map(|rental| Some((kind_key(&rental.provider, &rental.offer.kind), rental.found?)));
    found.collect()
}

/// How a rental has gone; `None` if that is not known yet.
fn went_well(rental: &Rental) -> Option<bool> {
    let has_joined = rental.since_ms(RentalState::Joined).is_some();
    let ends = rental.ends_because.is_some() || rental.refused.is_some() || rental.state.is_over();
    if !ends {
        return has_joined.then_some(true);
    }
    use EndedBy::{Money, NotOwned, Person, Time};
    let is_by_us = matches!(rental.ended_by, Some(Person | Time | Money | NotOwned));
    if is_by_us && rental.rented_for.is_none() && !has_joined {
        return None;
    }
    // One for which no job was there in the end would be rented again for the same jobs.
    let is_useless = rental.rented_for.is_some() && rental.first_job_ms.is_none();
    Some(has_joined && !is_useless && !is_taken_away(rental))
}

/// By the time that was seen to pass, which no clock that is set changes.
fn newest_first(rentals: &mut [&Rental], age_ms: impl Fn(u64) -> u64) {
    rentals.sort_by_key(|rental| {
        let begun_ms = rental.begun_ms();
        (age_ms(begun_ms), std::cmp::Reverse(begun_ms))
    });
}

/// When it failed; Unix time.
fn failed_ms(rental: &Rental) -> u64 {
    let refused_ms = rental.refused.as_ref().map(|refused| refused.at_ms);
    refused_ms.or_else(|| rental.steps.last().map(|step| step.at_ms)).unwrap_or(0)
}

/// Where requests have failed since the last good start there: they were refused, no host has joined, or no job has run there.
pub fn refusals(rentals: &[Rental], age_ms: impl Fn(u64) -> u64) -> Vec<Refusal> {
    let mut places: BTreeMap<(String, &str, bool), Vec<&Rental>> = BTreeMap::new();
    for rental in rentals {
        let offer = &rental.offer;
        let kind = kind_key(&rental.provider, &offer.kind);
        places.entry((kind, offer.zone.as_str(), offer.spot)).or_default().push(rental);
    }
    let refused = |((kind, zone, spot), mut all): ((String, &str, bool), Vec<&Rental>)| {
        newest_first(&mut all, &age_ms);
        let known = all.iter().filter_map(|rental| Some((rental, went_well(rental)?)));
        let failed: Vec<&&Rental> =
            known.take_while(|(_, went_well)| !went_well).map(|(rental, _)| rental).collect();
        Some(Refusal {
            kind,
            zone: zone.to_owned(),
            spot,
            ago_s: age_ms(failed_ms(failed.first()?)) as f64 / 1e3,
            times: u32::try_from(failed.len()).unwrap_or(u32::MAX),
        })
    };
    places.into_iter().filter_map(refused).collect()
}

/// Where requests would fail for want of a quota that is used up: at all of the offers whose CPUs count in it, and that have as many of them as what was
/// refused since something as large has started. `quota_of`: the quota in which a provider's kind counts, if the provider can tell.
pub fn over_quota(
    rentals: &[Rental],
    offers: &[(String, Offer)],
    quota_of: impl Fn(&str, &str) -> Option<String>,
    age_ms: impl Fn(u64) -> u64,
) -> Vec<Refusal> {
    let is_over = |rental: &Rental| {
        let refused = rental.refused.as_ref()?;
        Some((rental.provider.clone(), refused.quota.clone()?, refused.spot))
    };
    let used_up: BTreeSet<_> = rentals.iter().filter_map(is_over).collect();
    if used_up.is_empty() {
        return Vec::new();
    }
    let mut all: Vec<&Rental> = rentals.iter().collect();
    newest_first(&mut all, &age_ms);
    let mut known: BTreeMap<_, Option<(f64, u32)>> = BTreeMap::new();
    let mut refusals = Vec::new();
    for (provider, offer) in offers {
        let Some(quota) = quota_of(provider, &offer.kind) else { continue };
        let key = (provider.clone(), quota, offer.spot);
        if !used_up.contains(&key) {
            continue;
        }
        let (_, quota, _) = &key;
        let entry = known.entry((key.clone(), offer.cpus));
        let refused = entry.or_insert_with(|| {
            let counts = |one: &&&Rental| {
                (&one.provider, one.offer.spot) == (provider, offer.spot)
                    && quota_of(provider, &one.offer.kind).as_ref() == Some(quota)
            };
            refused_by_quota(all.iter().filter(counts).copied(), offer, quota, &age_ms)
        });
        refusals.extend(refused.map(|(ago_s, times)| Refusal {
            kind: kind_key(provider, &offer.kind),
            zone: offer.zone.clone(),
            spot: offer.spot,
            ago_s,
            times,
        }));
    }
    refusals
}

/// How long ago the last request was refused because of the quota, and how many were in a row. The newest one is the first.
fn refused_by_quota<'a>(
    rentals: impl Iterator<Item = &'a Rental>,
    offer: &Offer,
    quota: &str,
    age_ms: impl Fn(u64) -> u64,
) -> Option<(f64, u32)> {
    let has_started = |one: &&Rental| went_well(one) == Some(true) && one.offer.cpus >= offer.cpus;
    let since = rentals.take_while(|one| !has_started(one));
    let refused = since.filter_map(|one| one.refused.as_ref());
    let refused =
        refused.filter(|one| one.quota.as_deref() == Some(quota) && one.cpus <= offer.cpus);
    in_a_row(refused.map(|one| age_ms(one.at_ms) as f64 / 1e3))
}

/// Of what failed so many seconds ago, the newest first: how long ago the last time was, and how many there were. Several that were asked for together
/// are one.
fn in_a_row(ages_s: impl Iterator<Item = f64>) -> Option<(f64, u32)> {
    let mut ages_s: Vec<f64> = ages_s.collect();
    ages_s.dedup_by(|older, newer| *older - *newer < REFUSED_S);
    Some((*ages_s.first()?, u32::try_from(ages_s.len()).unwrap_or(u32::MAX)))
}

/// The providers that do not let the account ask for anything, each with what is said of that: nothing else is asked of them for a while, twice as long
/// after each further time.
pub fn not_allowed(rentals: &[Rental], age_ms: impl Fn(u64) -> u64) -> BTreeMap<String, String> {
    let mut providers: BTreeMap<&str, Vec<&Rental>> = BTreeMap::new();
    for rental in rentals.iter().filter(|rental| went_well(rental).is_some()) {
        providers.entry(&rental.provider).or_default().push(rental);
    }
    let barred = |(provider, mut all): (&str, Vec<&Rental>)| {
        newest_first(&mut all, &age_ms);
        let no = all.iter().take_while(|rental| rental.ended_by == Some(EndedBy::NotAllowed));
        let (ago_s, times) = in_a_row(no.map(|rental| age_ms(failed_ms(rental)) as f64 / 1e3))?;
        let left_s = refused_for_s(times) - ago_s;
        let why = all.first()?.ends_because.clone().unwrap_or_default();
        let says = format!("{why}: it is asked for a host again in {}", format_seconds(left_s));
        (left_s > 0.0).then(|| (provider.to_owned(), says))
    };
    providers.into_iter().filter_map(barred).collect()
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
        assert_eq!(
            times(&[fails(1, 0), started(2, 5, 10)]),
            None,
            "one has joined since, and stays"
        );
        assert_eq!(times(&[gone(1, 0, EndedBy::Rule)]), Some(1), "no job has run there");
        let old = Rental { first_job_ms: Some(6), ..gone(2, 5, EndedBy::Rule) };
        assert_eq!(times(&[fails(1, 0), old.clone()]), None, "it has started since");
        assert_eq!(times(&[fails(1, 0), old, fails(3, 9)]), Some(1));
        assert_eq!(times(&[gone(1, 0, EndedBy::Person)]), Some(1), "a person wants none");
        let last = refusals(&[fails(1, 0), fails(2, 5)], ago);
        assert_eq!((last[0].kind.as_str(), last[0].ago_s), ("lab/m1", 9995.0));
    }

    #[test]
    fn a_provider_that_lets_the_account_ask_for_nothing_is_asked_for_no_other_kind_for_a_while() {
        let no = |number: u64, at_s: u64| {
            let mut no = rental(number, &[(RentalState::Wanted, at_s), (RentalState::Gone, at_s)]);
            no.end(EndedBy::NotAllowed, "not allowed: a person has to act");
            no
        };
        let at = |now_s: u64, all: &[Rental]| {
            let barred = not_allowed(all, |at_ms| now_s * SECOND - at_ms);
            barred.get("lab").cloned()
        };
        let twice = [no(1, 0), no(2, 1)];
        let says = at(200, &twice).expect("it was so 199 s ago");
        assert!(says.contains("a person has to act") && says.contains("again in"), "{says}");
        assert_eq!(at(302, &twice), None, "both were asked for together");
        let again = [no(1, 0), no(2, 1), no(3, 310)];
        assert!(at(800, &again).is_some() && at(911, &again).is_none(), "twice as long");
        let good = [no(1, 0), Rental { first_job_ms: Some(7), ..started(2, 5, 10) }];
        assert_eq!(at(20, &good), None);
    }

    #[test]
    fn a_quota_that_is_used_up_holds_for_all_kinds_and_zones_that_count_in_it_and_are_as_large() {
        let offer = |kind: &str, zone: &str, cpus: u32, spot: bool| {
            let offer = crate::tests::rental("rent-1").offer;
            let (kind, zone) = (kind.to_owned(), zone.to_owned());
            ("lab".to_owned(), Offer { kind, zone, cpus, spot, ..offer })
        };
        let offers = [
            offer("m1", "a", 4, false),
            offer("m2", "b", 8, false),
            offer("m0", "b", 2, false),
            offer("m2", "b", 8, true),
            offer("g1", "b", 8, false),
        ];
        let refused = |number: u64, at_s: u64, cpus: u32| {
            let mut no = rental(number, &[(RentalState::Wanted, at_s), (RentalState::Gone, at_s)]);
            no.end(EndedBy::Refused, "over the account's quota");
            no.refused = Some(perigee_model::rental::OfferRefused {
                kind: "m1".to_owned(),
                zone: "a".to_owned(),
                spot: false,
                why: String::new(),
                at_ms: at_s * SECOND,
                quota: Some("m".to_owned()),
                cpus,
            });
            no
        };
        let quota_of = |_: &str, kind: &str| Some(kind[..1].to_owned());
        let at = |now_s: u64, all: &[Rental]| {
            let over = over_quota(all, &offers, quota_of, |at_ms| now_s * SECOND - at_ms);
            let of = |one: Refusal| (one.kind, one.ago_s, one.times);
            over.into_iter().map(of).collect::<Vec<_>>()
        };
        let both = |ago_s, times| ["lab/m1", "lab/m2"].map(|kind| (kind.to_owned(), ago_s, times));
        assert_eq!(at(100, &[refused(1, 90, 4)]), both(10.0, 1));
        assert_eq!(at(100, &[refused(1, 89, 4), refused(2, 90, 4)]), both(10.0, 1), "together");
        assert_eq!(at(500, &[refused(1, 90, 4), refused(2, 490, 4)]), both(10.0, 2));
        // Something as large has started since: of the larger kind nothing new is known.
        let since = [refused(1, 90, 4), Rental { first_job_ms: Some(7), ..started(2, 95, 1) }];
        assert_eq!(at(100, &since), [("lab/m2".to_owned(), 10.0, 1)]);
        let unknown = |_: &str, _: &str| None;
        assert!(over_quota(&[refused(1, 90, 4)], &offers, unknown, |_| 1).is_empty());
    }

    #[test]
    fn a_kind_is_as_its_newest_host_has_shown_to_be() {
        let shown = |number: u64, at_s: u64, cpus: u32| {
            let found = Some(HostFound { cpus, memory_bytes: 5, kvm: false });
            Rental { found, ..started(number, at_s, 10) }
        };
        let all = [shown(1, 50, 3), shown(2, 0, 4), started(3, 90, 10)];
        let at = |now_s: u64| found(&all, |at_ms| now_s * SECOND - at_ms);
        let offer = at(100)["lab/m1"].correct(&all[0].offer);
        assert_eq!((offer.cpus, offer.memory_bytes, offer.kvm), (3, 5, Some(false)));
        assert!(at(86_450).is_empty(), "that may have been one host's fault");
        let lies = HostFound { cpus: u32::MAX, memory_bytes: 5, kvm: true };
        assert_eq!(lies.correct(&all[0].offer), all[0].offer);
    }
}
