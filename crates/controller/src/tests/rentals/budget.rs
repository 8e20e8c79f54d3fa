//! Hours of renting from a provider that answers as it likes: what all instances have really cost is never over the budget.

use std::collections::BTreeMap;

use perigee_model::rental::RENT_DISK_DEFAULT_BYTES;
use proptest::prelude::*;
use proptest::sample;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;

use super::any_order::{QUICK, Story, story};
use super::*;

/// The provider is as in [`QUICK`], and hosts have their usual time to join, for here time passes in minutes.
const SLOW: Timing =
    Timing { rentals: RentalTiming { join: Duration::from_secs(1200), ..QUICK.rentals }, ..QUICK };

/// Hosts whose instances have ended answer no more.
fn follow(rented: &Rented, hosts: &BTreeMap<HostId, FakeHost>) {
    let alive = rented.double.alive();
    for host in hosts.values() {
        let lives = alive.iter().any(|one| one.rental.as_deref() == Some(host.id.as_str()));
        host.inside().down = !lives;
    }
}

/// Somebody wants more and more hosts for some hours, and gives none back.
async fn spend(story: Story, budget: Money, minutes: u64) {
    let (dir, double) = (tempfile::tempdir().expect("a directory"), Double::default());
    {
        let mut inside = double.inside();
        inside.does = story.does.iter().copied().collect();
        inside.lists = story.lists.iter().copied().collect();
        inside.fails_ends = story.fails_ends;
        inside.listed_after = Duration::from_millis(story.listed_after_ms);
    }
    let supervisor = start_of(dir.path(), &double, SLOW, Traffic::Plain, Some(budget)).await;
    let cluster = Arc::clone(&supervisor.cluster);
    let rented = Rented { dir, double, supervisor, cluster };
    let mut hosts: BTreeMap<HostId, FakeHost> = BTreeMap::new();
    let disk_bytes = RENT_DISK_DEFAULT_BYTES;
    let mut passed = 0;
    while passed < 180 {
        // A request that the budget refuses is made again later.
        let name = format!("rent-{passed}");
        rentals::rent(&rented.cluster, ask(&name), "ann".to_owned()).await.ok();
        rented.has_looked().await;
        for rental in rented.cluster.rentals.all() {
            let starts = rental.state == RentalState::Starting && story.joins;
            if starts && !hosts.contains_key(&rental.host) {
                let host = rented.join(rental.id.as_str()).await;
                hosts.insert(rental.host.clone(), host);
            }
        }
        follow(&rented, &hosts);
        let (bill, all) = (rented.double.bill(disk_bytes), rented.cluster.rentals.all());
        assert!(bill <= budget, "{bill} of {budget} after {passed} minutes: {all:?} in {story:?}");
        rented.cluster.clock.pretend_passed(Duration::from_secs(60 * minutes));
        passed += minutes;
    }
    for rental in rented.cluster.rentals.all() {
        rented.end(rental.id.as_str(), false).await;
    }
    let over = async || {
        follow(&rented, &hosts);
        rented.cluster.rentals.all().iter().all(|one| one.state.is_over()).then_some(())
    };
    wait_for("all rentals to be over", over).await;
    rented.nothing_wrong();
    let (bill, all) = (rented.double.bill(disk_bytes), rentals::list(&rented.cluster));
    let spent: Money = all.iter().filter_map(|rental| rental.spent).sum();
    // What is known to be gone is known later, and counts until then.
    assert!(bill <= spent, "{bill} of {spent}: {all:?} in {story:?}");
    assert!(rented.double.alive().is_empty());
    rented.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_all_instances_have_cost_is_never_over_the_budget_whatever_the_provider_answers() {
    let mut runner = TestRunner::default();
    let with =
        (story(), sample::select(vec![1_300_000, 2_600_000, 4_000_000, 7_000_000]), 2..5_u64);
    let stories: Vec<_> =
        (0..6).map(|_| with.new_tree(&mut runner).expect("a story").current()).collect();
    let all = stories
        .into_iter()
        .map(|(story, micros, minutes)| spend(story, Money::from_micros(micros), minutes));
    futures_util::future::join_all(all).await;
}
