//! Whatever the provider answers and whenever: no instance is left without a rental that ends it, none is made twice for one rental, and the
//! money is reserved before the provider is asked, and never more than the budget with what was spent.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;

use perigee_model::money::Price;

use super::*;

/// What the provider does, and what people and hosts do meanwhile.
#[derive(Debug, Clone)]
pub struct Story {
    pub does: Vec<Does>,
    pub lists: Vec<Lists>,
    pub fails_ends: u32,
    honours_tokens: bool,
    pub listed_after_ms: u64,
    /// After so many looks at the rentals the controller is killed.
    killed_after: Vec<u8>,
    pub joins: bool,
    /// Somebody else makes instances with these tags.
    planted: Vec<Option<String>>,
    /// What the rented hosts cost an hour, one after the other, in cents. Both together may be over the budget.
    cents: [u64; 2],
    /// After so many looks an hour has passed.
    hour_after: u8,
}

fn does() -> impl Strategy<Value = Does> {
    use CloudErrorKind::{NoCapacity, NotAllowed, Quota, Refused, Throttled};
    let kinds = [NoCapacity, NotAllowed, Quota, Refused, Throttled];
    prop_oneof![
        Just(Does::Makes),
        Just(Does::LosesAnswer),
        Just(Does::LosesRequest),
        Just(Does::MakesLate),
        Just(Does::Nonsense),
        proptest::sample::select(kinds.to_vec()).prop_map(Does::Refuses),
    ]
}

fn lists() -> impl Strategy<Value = Lists> {
    prop_oneof![
        4 => Just(Lists::Well),
        1 => Just(Lists::Fails),
        1 => Just(Lists::Nonsense),
        1 => Just(Lists::Forbidden),
        1 => Just(Lists::Hangs),
    ]
}

pub fn story() -> impl Strategy<Value = Story> {
    let tag = prop_oneof![Just(None), Just(Some("rent-8".to_owned())), Just(Some("?".to_owned()))];
    let provider = (vec(does(), 1..5), vec(lists(), 0..12), 0..3_u32, any::<bool>(), 0..150_u64);
    let money = ([1..1200_u64, 1..1200_u64], 5..40_u8);
    let others = (vec(1..30_u8, 0..3), any::<bool>(), vec(tag, 0..2), money);
    (provider, others).prop_map(|(provider, others)| {
        let (does, lists, fails_ends, honours_tokens, listed_after_ms) = provider;
        let (killed_after, joins, planted, (cents, hour_after)) = others;
        Story {
            does,
            lists,
            fails_ends,
            honours_tokens,
            listed_after_ms,
            killed_after,
            joins,
            planted,
            cents,
            hour_after,
        }
    })
}

/// The grace period is longer than what the double needs to list an instance, by the same clock.
pub const QUICK: Timing = Timing {
    rentals: RentalTiming {
        grace: Duration::from_millis(600),
        answer: Duration::from_millis(150),
        join: Duration::from_secs(3),
        ..TIMING.rentals
    },
    ..TIMING
};

async fn play(story: Story) {
    let double = Double::default();
    {
        let mut inside = double.inside();
        inside.does = story.does.iter().copied().collect();
        inside.lists = story.lists.iter().copied().collect();
        inside.fails_ends = story.fails_ends;
        inside.honours_tokens = story.honours_tokens;
        inside.listed_after = Duration::from_millis(story.listed_after_ms);
    }
    let mut rented = Rented::up_with(QUICK, double).await;
    for tag in &story.planted {
        rented.double.plant(tag.as_deref());
    }
    for (name, cents) in ["rent-1", "rent-2"].into_iter().zip(story.cents) {
        let per_hour_micros = std::num::NonZeroU64::new(cents * 10_000);
        let price = Price { per_hour_micros, ..double::offer("m1", "a", false).price };
        rented.double.inside().price = Some(price);
        if let Err(problem) = rentals::rent(&rented.cluster, ask(name), "ann".to_owned()).await {
            assert!(problem.why.contains("over the budget"), "{problem} in {story:?}");
        }
    }
    let mut hosts: Vec<FakeHost> = Vec::new();
    let mut kills = story.killed_after.clone();
    let (begun, mut looks, mut hours) = (std::time::Instant::now(), 0_u32, 0);
    loop {
        looks += 1;
        if kills.last().is_some_and(|after| looks % u32::from(*after) == 0) {
            kills.pop();
            rented.restart(QUICK).await;
        }
        // Not so many that one that cost nothing is forgotten.
        if looks % u32::from(story.hour_after) == 0 && hours < 20 {
            hours += 1;
            rented.cluster.clock.pretend_passed(Duration::from_secs(3600));
        }
        let all = rented.cluster.rentals.all();
        for rental in &all {
            let has_host = hosts.iter().any(|host| host.id == rental.host);
            if rental.state == RentalState::Starting && story.joins && !has_host {
                hosts.push(rented.join(rental.id.as_str()).await);
            }
            if rental.state == RentalState::Joined && rental.ends_because.is_none() {
                rented.end(rental.id.as_str(), false).await;
            }
        }
        let alive = rented.double.alive();
        for host in &hosts {
            let lives = alive.iter().any(|one| one.rental.as_deref() == Some(host.id.as_str()));
            host.inside().down = !lives;
        }
        let wrong = rented.double.inside().wrong.clone();
        assert!(wrong.is_empty(), "{wrong:?} in {story:?}");
        let is_over = all.iter().all(|rental| rental.state.is_over());
        if is_over && alive.is_empty() && kills.is_empty() {
            break;
        }
        let waited = PATIENCE.as_secs();
        assert!(begun.elapsed() < PATIENCE, "waited {waited} s: {alive:?} {all:?} in {story:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    money::never_over(&rented, BUDGET).await;
    assert_eq!(money::in_ledger(&rented).reserved, Money::ZERO, "all is settled in {story:?}");
    rented.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_provider_answers_no_instance_is_made_twice_or_left_without_its_rental() {
    let mut runner = TestRunner::default();
    let stories: Vec<Story> =
        (0..24).map(|_| story().new_tree(&mut runner).expect("a story").current()).collect();
    // Most of their time they wait.
    for some in stories.chunks(8) {
        futures_util::future::join_all(some.iter().cloned().map(play)).await;
    }
}
