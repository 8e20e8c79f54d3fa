//! What is reserved for rented hosts, what they cost, and which offer is taken.

use std::collections::BTreeMap;

use perigee_model::budget::Spending;

use perigee_model::renting::RentedFor;

use super::*;
use crate::cluster::ledger::book::{Line, What};
use crate::records::{RentalIntent, rental_intent_key};

/// What the ledger has for rented hosts.
pub fn in_ledger(rented: &Rented) -> Spending {
    rented.cluster.ledger.rented("", |_| true)
}

/// Adds the ledger's lines up anew, as the one who reads them afterwards: at no reservation was more spent and reserved than the budget.
pub async fn never_over(rented: &Rented, budget: Money) {
    let lines: Vec<Line> = rented.cluster.records.list("ledger/lines/").await.expect("lines");
    let mut all = BTreeMap::<String, Money>::new();
    for line in lines {
        let of = all.entry(line.owner.clone()).or_default();
        match &line.what {
            What::Reserved { tenant: None, micros } => {
                *of = of.plus(*micros);
                let sum: Money = all.values().copied().sum();
                assert!(sum <= budget, "{sum} of {budget} with {line:?}: {all:?}");
            }
            What::Settled { micros } => *of = *micros,
            What::Released => *of = Money::ZERO,
            What::Reserved { .. } | What::Forgotten => panic!("not of a rented host: {line:?}"),
        }
    }
}

#[tokio::test]
async fn nothing_is_rented_that_the_budget_does_not_allow_or_whose_price_is_not_known() {
    let rented = Rented::up(TIMING).await;
    let long = RentHost { for_s: Some(20 * 3600), ..ask("rent-1") };
    let refused = rentals::rent(&rented.cluster, long, "ann".to_owned()).await;
    let problem = refused.expect_err("it is over the budget");
    assert!(problem.kind == ProblemKind::Conflict && problem.why.contains("$20.00"), "{problem}");
    let unknown = RentHost { kind: "unknown".to_owned(), ..ask("rent-1") };
    let refused = rentals::rent(&rented.cluster, unknown, "ann".to_owned()).await;
    let problem = refused.expect_err("no price");
    assert!(problem.why.contains("not known"), "{problem}");
    assert!(rented.double.inside().asked.is_empty());
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_host_that_costs_more_than_was_reserved_counts_for_what_it_costs() {
    let rented = Rented::up(TIMING).await;
    let (state, at_ms) = (RentalState::Draining, now_ms());
    let asked = RentalStep { state: RentalState::Asked, at_ms, why: String::new() };
    let (instance, steps) = (Some("i-9".to_owned()), vec![asked]);
    let stuck = Rental { state, steps, instance, ..rental("rent-9") };
    rented.cluster.rentals.put(&stuck);
    let ledger = &rented.cluster.ledger;
    let reserved = Money::from_micros(1_000_000);
    ledger.reserve_rented("rental/rent-9", reserved, |_| true, |_| Ok(())).await.expect("room");
    assert_eq!(rented.get("rent-9").reserved, reserved);
    rented.cluster.clock.pretend_passed(Duration::from_secs(20 * 3600));
    let refused = rentals::rent(&rented.cluster, ask("rent-2"), "ann".to_owned()).await;
    let problem = refused.expect_err("it has cost $20");
    assert!(problem.why.contains("budget"), "{problem}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn the_end_settles_what_was_spent_and_what_was_predicted_stands_beside() {
    let mut rented = Rented::up(TIMING).await;
    let short = RentHost { for_s: Some(3600), ..ask("rent-1") };
    rentals::rent(&rented.cluster, short, "ann".to_owned()).await.expect("a rental");
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    let predicted = starting.predicted.expect("an hour");
    assert_eq!(
        (Some(predicted.expected), predicted.high),
        (starting.cost(3600), starting.reserved)
    );
    assert_eq!(in_ledger(&rented), Spending { spent: Money::ZERO, reserved: predicted.high });
    let until_ms = starting.reserved_until_ms.expect("it is known");
    let first_ms = starting.since_ms(RentalState::Asked).expect("asked");
    // A part of the last second may be paid for as well.
    assert!((4500..4510).contains(&((until_ms - first_ms) / 1000)), "{starting:?}");
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    rented.cluster.clock.pretend_passed(Duration::from_secs(3600));
    rented.goes_down_with_instance(&host).await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    let spent = gone.spent.expect("it is known");
    assert!(spent >= predicted.low && spent <= predicted.high, "{gone:?}");
    assert_eq!(in_ledger(&rented), Spending { spent, reserved: Money::ZERO });
    let score = async |cluster: &Cluster, is_admin| {
        crate::planning::score(cluster, |_| true, is_admin).await.expect("a score").rentals
    };
    let admins = score(&rented.cluster, true).await;
    assert_eq!((admins.jobs, admins.in_range), (1, 1));
    assert!(admins.median_error.is_some_and(|error| error < 0.2), "{admins:?}");
    assert_eq!(score(&rented.cluster, false).await.jobs, 0, "it is no tenant's");
    rented.restart(TIMING).await;
    assert_eq!(rented.get("rent-1").spent, Some(spent));
    let long = || RentHost { for_s: Some(19 * 3600), ..ask("rent-2") };
    let refused = rentals::rent(&rented.cluster, long(), "ann".to_owned()).await;
    assert_eq!(refused.expect_err("it is over the budget").kind, ProblemKind::Conflict);
    // It is kept for a day more, and does not count any more.
    rented.cluster.clock.pretend_passed(Duration::from_secs(30 * 86_400 + 3600));
    rentals::rent(&rented.cluster, long(), "ann".to_owned()).await.expect("the whole budget");
    assert_eq!(rented.get("rent-1").spent, Some(spent));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn more_is_reserved_before_the_time_is_over_until_the_budget_does_not_allow_that() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    let first = rented.wait_for_state("rent-1", RentalState::Joined).await;
    let mut hours = 1;
    let ending = loop {
        rented.cluster.clock.pretend_passed(Duration::from_secs(3600));
        let needs = first.cost(hours * 3600 + 600);
        let is_there =
            |rental: &Rental| rental.ends_because.is_some() || Some(rental.reserved) >= needs;
        let rental = rented.wait("rent-1", "the next hour's money", is_there).await;
        if rental.ends_because.is_some() {
            break rental;
        }
        hours += 1;
        assert!(hours < 25, "$20 do not last so long: {rental:?}");
    };
    assert!(hours > 15, "it ends with most of the budget unused: {ending:?}");
    let why = ending.ends_because.expect("a reason");
    assert!(why.contains("over the budget of $20.00"), "{why}");
    rented.goes_down_with_instance(&host).await;
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    never_over(&rented, BUDGET).await;
    rented.supervisor.stop().await;
}

/// Rents one as the rule does, which reserves its money for so long.
async fn rent_by_rule(rented: &Rented, reserve_s: u64) {
    let rented_for = RentedFor {
        jobs: Vec::new(),
        jobs_count: 1,
        saves: Money::from_micros(1),
        costs: Money::ZERO,
        reserve_s,
        why: "as the test says".to_owned(),
    };
    let (offer, by) = (double::offer("m1", "a", false), "the rule".to_owned());
    rentals::rent_for(&rented.cluster, ask("rent-1"), offer, by, rented_for)
        .await
        .expect("a rental");
}

#[tokio::test]
async fn the_money_of_a_rented_host_covers_what_it_costs_until_its_lease_ends_it_without_a_controller()
 {
    let rented = Rented::up(TIMING).await;
    rent_by_rule(&rented, 60).await;
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    // If it never hears of its controller, its first boot ends it half an hour after its begin.
    assert!(Some(starting.reserved) >= starting.cost(1800 + 300), "{starting:?}");
    // Its host does not join in time, and until its instance has ended it costs money.
    rented.cluster.clock.pretend_passed(Duration::from_secs(2100));
    let needs = starting.cost(2100 + TIMING.rentals.lease.as_secs());
    let is_paid = |one: &Rental| Some(one.reserved) >= needs;
    rented.wait("rent-1", "the money of its lease", is_paid).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_longer_stay_that_the_budget_does_not_allow_ends_no_host_whose_money_is_there() {
    let mut rented = Rented::up(TIMING).await;
    rented.restart_with_budget(Some(Money::from_micros(600_000))).await;
    rent_by_rule(&rented, 1200).await;
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    let until_ms = starting.since_ms(RentalState::Asked).map(|first_ms| first_ms + 36_000_000);
    let change = |intent: Option<RentalIntent>| RentalIntent {
        reserve_until_ms: until_ms,
        ..intent.unwrap_or_default()
    };
    let key = rental_intent_key(&id("rent-1"));
    rented.cluster.records.update(&key, change).await.expect("a store");
    rented.cluster.drive_rental(&id("rent-1"));
    rented.has_looked().await;
    let still = rented.get("rent-1");
    assert_eq!((still.state, &still.ends_because), (RentalState::Starting, &None), "{still:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn without_a_zone_the_zone_of_the_site_s_other_hosts_is_taken_before_a_cheaper_one() {
    let rented = Rented::up(TIMING).await;
    let other = RentHost { zone: Some("b".to_owned()), ..ask("rent-1") };
    rentals::rent(&rented.cluster, other, "ann".to_owned()).await.expect("a rental");
    assert_eq!(rented.rent("rent-2").await.offer.zone, "b", "beside the other one");
    let elsewhere = RentHost { site: Some("far".parse().expect("a name")), ..ask("rent-3") };
    let far = rentals::rent(&rented.cluster, elsewhere, "ann".to_owned()).await.expect("a rental");
    assert_eq!(far.offer.zone, "a", "the cheapest one of a site without hosts");
    let (zone, site) = (Some("a".to_owned()), Some("lab".parse().expect("a name")));
    let third = RentHost { zone, site, ..ask("rent-4") };
    rentals::rent(&rented.cluster, third, "ann".to_owned()).await.expect("a rental");
    assert_eq!(rented.rent("rent-5").await.offer.zone, "a", "the site is in two zones");
    rented.supervisor.stop().await;
}

/// A person's host was at the provider's site, and one of the rule at the zone's.
#[tokio::test]
async fn without_a_site_a_host_is_where_the_plan_and_the_rule_expect_it() {
    let rented = Rented::up(TIMING).await;
    let own = FakeHost::start("home1", "b").await;
    hosts::register(&rented.cluster, &own.id, own.addresses.clone()).await.expect("register");
    let in_zone = async |zone: &str, name: &str, site: Option<&str>| {
        let site = site.map(|site| site.parse().expect("a name"));
        let ask = RentHost { zone: Some(zone.to_owned()), site, ..ask(name) };
        let rental = rentals::rent(&rented.cluster, ask, "ann".to_owned()).await;
        rental.expect("a rental").site.to_string()
    };
    assert_eq!(in_zone("a", "rent-1", None).await, "lab", "no own host is there");
    assert_eq!(in_zone("b", "rent-2", None).await, "b", "an own host is at a site of this name");
    assert_eq!(in_zone("a", "rent-3", Some("cloud")).await, "cloud");
    assert_eq!(in_zone("a", "rent-4", None).await, "cloud", "as the newest one in this zone");
    rented.supervisor.stop().await;
}
