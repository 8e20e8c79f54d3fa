//! What goes wrong around a rental: prices, permissions, clocks, budgets, hosts that never join or do not answer any more.

use super::*;

/// Nobody joins and nothing is listed for longer than a host's first money lasts: an hour and a quarter, less the time in which more is reserved.
const FIRST_MONEY: Duration = Duration::from_secs(3901);

/// What a first request reserves, and nothing more after it.
const FIRST_BUDGET: Money = Money::from_micros(1_300_000);

#[tokio::test]
async fn a_price_that_is_too_old_is_not_paid_and_the_reason_says_how_old_it_is() {
    let rented = Rented::up(TIMING).await;
    let old = RentHost { kind: "old".to_owned(), ..ask("rent-1") };
    let refused = rentals::rent(&rented.cluster, old, "ann".to_owned()).await;
    let problem = refused.expect_err("its price is of last month");
    assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
    assert!(problem.why.contains("31 days old, more than 30d"), "{problem}");
    assert!(problem.next.contains("max-age"), "{problem}");
    let offers = rentals::offers(&rented.cluster).await.remove(0).offers.expect("offers");
    let known = |kind: &str| {
        let offer = offers.iter().find(|offer| offer.kind == kind).expect(kind);
        offer.price.machine(1).is_some()
    };
    assert_eq!((known("old"), known("m1")), (false, true), "nobody sees it as one that counts");
    assert!(rented.double.inside().asked.is_empty());
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn what_a_provider_refuses_for_good_ends_the_rental_with_its_reason_and_costs_nothing() {
    for (kind, why) in [
        (CloudErrorKind::NotAllowed, "not allowed"),
        (CloudErrorKind::Quota, "over the account's quota"),
        (CloudErrorKind::Refused, "refused"),
    ] {
        let rented = Rented::up(TIMING).await;
        rented.double.inside().does = [Does::Refuses(kind)].into();
        rented.rent("rent-1").await;
        let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
        assert!(gone.ends_because.as_ref().is_some_and(|said| said.contains(why)), "{gone:?}");
        assert_eq!((gone.asks, gone.spent), (1, Some(Money::ZERO)), "{gone:?}");
        assert_eq!(gone.refused.is_some(), kind == CloudErrorKind::Quota, "{gone:?}");
        assert_eq!(rented.double.made(), 0);
        rented.supervisor.stop().await;
    }
}

/// An instance whose answer is lost could never be found there.
#[tokio::test]
async fn nothing_is_asked_for_where_the_account_may_not_list_until_it_may() {
    let double = Double::default();
    double.inside().lists = vec![Lists::Forbidden; 100_000].into();
    let rented = Rented::up_with(TIMING, double).await;
    rented.rent("rent-1").await;
    let says = |rental: &Rental| rental.why.contains("not allowed");
    let waits = rented.wait("rent-1", "its reason", says).await;
    assert_eq!((waits.state, waits.asks), (RentalState::Wanted, 0), "{waits:?}");
    rented.has_looked().await;
    assert!(rented.double.inside().asked.is_empty());
    assert_eq!(rented.get("rent-1").spent, Some(Money::ZERO));
    rented.double.inside().lists.clear();
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn an_account_that_may_not_list_any_more_ends_what_it_has_and_says_that_more_is_not_known() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    rented.lists(&[Lists::Forbidden]).await;
    rented.end("rent-1", false).await;
    let says = |rental: &Rental| rental.why.contains("not known: not allowed");
    let ending = rented.wait("rent-1", "what is not known", says).await;
    assert_eq!(ending.state, RentalState::Ending, "{ending:?}");
    assert_eq!(rented.double.alive(), [], "it is ended all the same");
    rented.has_looked().await;
    assert_eq!(rented.get("rent-1").state, RentalState::Ending, "nobody knows that it is gone");
    rented.double.inside().lists.clear();
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_provider_that_hangs_at_the_end_of_an_instance_is_asked_again() {
    let rented = Rented::up(TIMING).await;
    rented.double.inside().hangs_ends = 2;
    rented.double.inside().fails_ends = 1;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    rented.end("rent-1", false).await;
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert_eq!(rented.double.alive(), []);
    let left = {
        let inside = rented.double.inside();
        (inside.hangs_ends, inside.fails_ends)
    };
    assert_eq!(left, (0, 0), "all of it has happened");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_notice_before_the_host_has_joined_ends_the_rental() {
    let rented = Rented::up(TIMING).await;
    let spot = RentHost { spot: true, ..ask("rent-1") };
    rentals::rent(&rented.cluster, spot, "ann".to_owned()).await.expect("a rental");
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    let instance = starting.instance.expect("an instance");
    rented.double.inside().notices = vec![Notice { instance, ends_unix_s: 2_000_000_000 }];
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    let asked = rented.double.inside().asked[0].clone();
    assert_eq!(asked.max_per_hour_micros, gone.offer.price.per_hour_micros, "what is reserved");
    assert_eq!(gone.ends_because.as_deref(), Some("the provider takes it back"));
    assert!(!states(&gone).contains(&RentalState::Draining), "{gone:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_clock_that_is_set_ends_no_rental_and_makes_none_longer() {
    let rented = Rented::up(TIMING).await;
    let two_hours = RentHost { for_s: Some(7200), ..ask("rent-1") };
    rentals::rent(&rented.cluster, two_hours, "ann".to_owned()).await.expect("a rental");
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    let joined = rented.wait_for_state("rent-1", RentalState::Joined).await;
    for by_h in [48, -96] {
        rented.cluster.clock.pretend_set(by_h * 3_600_000);
        rented.has_looked().await;
        let now = rented.get("rent-1");
        assert_eq!((now.state, &now.ends_because), (RentalState::Joined, &None), "{by_h}: {now:?}");
        assert_eq!(
            (now.reserved, now.reserved_until_ms),
            (joined.reserved, joined.reserved_until_ms)
        );
        assert!(now.spent < Some(Money::from_micros(1_000_000)), "{by_h}: {now:?}");
    }
    rented.cluster.clock.pretend_passed(Duration::from_secs(7000));
    rented.has_looked().await;
    assert_eq!(rented.get("rent-1").state, RentalState::Joined, "its time is not over");
    rented.cluster.clock.pretend_passed(Duration::from_secs(200));
    rented.goes_down_with_instance(&host).await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    let why = "the time for which it was rented is over";
    assert_eq!(gone.ends_because.as_deref(), Some(why));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_budget_that_is_cut_below_what_is_reserved_rents_nothing_more_and_ends_what_it_can_t_pay()
{
    for budget in [Some(Money::from_micros(500_000)), None] {
        let mut rented = Rented::up(TIMING).await;
        rented.rent("rent-1").await;
        rented.wait_for_state("rent-1", RentalState::Starting).await;
        let host = rented.join("rent-1").await;
        let joined = rented.wait_for_state("rent-1", RentalState::Joined).await;
        rented.restart_with_budget(budget).await;
        let more = rentals::rent(&rented.cluster, ask("rent-2"), "ann".to_owned()).await;
        let problem = more.expect_err("more than the budget is reserved");
        assert!(problem.why.contains("budget"), "{problem}");
        rented.has_looked().await;
        let still = rented.get("rent-1");
        assert_eq!(still.state, RentalState::Joined, "its money is reserved: {still:?}");
        rented.cluster.clock.pretend_passed(FIRST_MONEY);
        rented.goes_down_with_instance(&host).await;
        let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
        assert!(gone.ends_because.as_ref().is_some_and(|why| why.contains("budget")), "{gone:?}");
        assert_eq!(gone.reserved, joined.reserved, "no more was reserved");
        assert!(gone.spent <= Some(gone.reserved), "{gone:?}");
        rented.supervisor.stop().await;
    }
}

/// Nothing was reserved for it beyond its first hour, and it went on for as long as its provider did not list.
#[tokio::test]
async fn a_host_that_no_list_shows_is_drained_when_the_budget_has_no_more_for_it() {
    let mut rented = Rented::up(TIMING).await;
    rented.restart_with_budget(Some(FIRST_BUDGET)).await;
    rented.lists(&[Lists::Fails]).await;
    rented.double.inside().does = [Does::LosesAnswer].into();
    rented.rent("rent-1").await;
    rented.wait("rent-1", "a request", |rental| rental.asks == 1).await;
    let host = rented.join("rent-1").await;
    rented.has_looked().await;
    assert_eq!(rented.get("rent-1").ends_because, None);
    rented.cluster.clock.pretend_passed(FIRST_MONEY);
    let is_over = |rental: &Rental| rental.ends_because.is_some();
    let ends = rented.wait("rent-1", "its end", is_over).await;
    assert!(ends.ends_because.as_ref().is_some_and(|why| why.contains("budget")), "{ends:?}");
    assert_eq!(ends.state, RentalState::Asked, "no list has shown it");
    let drained = async || rented.cluster.hosts.drain(&host.id).map(drop);
    wait_for("its host to be drained", drained).await;
    rented.supervisor.stop().await;
}

/// Its agent has ended, so that nothing at the host powers it off.
#[tokio::test]
async fn an_instance_whose_host_is_silent_for_its_lease_is_ended_and_one_that_comes_back_is_not() {
    let mut rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    for (down, why) in [(true, "its host does not answer"), (false, "its host is up")] {
        host.inside().down = down;
        let now = rented.wait("rent-1", why, |rental| rental.why == why).await;
        assert_eq!(now.state, RentalState::Joined, "{now:?}");
    }
    assert_eq!(rented.double.alive().len(), 1);
    host.inside().down = true;
    let short = RentalTiming { lease: Duration::from_secs(1), ..TIMING.rentals };
    rented.restart(Timing { rentals: short, ..TIMING }).await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    let why = gone.ends_because.as_deref().unwrap_or_default();
    assert!(why.contains("the length of its lease"), "{gone:?}");
    assert_eq!(rented.double.alive(), []);
    rented.cluster.hosts.get(&host.id).expect_err("it is forgotten");
    rented.supervisor.stop().await;
}
