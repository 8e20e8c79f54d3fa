//! Hosts that are rented from a provider made of memory: what becomes of them, whatever the provider does.

#[path = "rentals/any_order.rs"]
mod any_order;
#[path = "rentals/bad_cases.rs"]
mod bad_cases;
#[path = "rentals/budget.rs"]
mod budget;
#[path = "rentals/by_itself.rs"]
mod by_itself;
#[path = "rentals/double.rs"]
mod double;
#[path = "rentals/kept.rs"]
mod kept;
#[path = "rentals/kept_killed.rs"]
mod kept_killed;
#[path = "rentals/killed.rs"]
mod killed;
#[path = "rentals/killed_later.rs"]
mod killed_later;
#[path = "rentals/left_site.rs"]
mod left_site;
#[path = "rentals/lies.rs"]
mod lies;
#[path = "rentals/measured.rs"]
mod measured;
#[path = "rentals/money.rs"]
mod money;
#[path = "rentals/price.rs"]
mod price;
#[path = "rentals/program.rs"]
mod program;

use std::sync::Arc;
use std::time::Duration;

use perigee_cloud::CloudErrorKind;
use perigee_http::authority::NewKey;
use perigee_model::enrol::{Enrol, JoinToken};
use perigee_model::job::HostState;
use perigee_model::lease::HostNotice;
use perigee_model::limits::RENTALS;
use perigee_model::money::Money;
use perigee_model::rental::states::{RentalState, Seen};
use perigee_model::rental::{EndRental, InstanceState, Notice, RentHost, Rental, RentalStep};
use perigee_model::{HostId, ProblemKind, RentalId};

use super::fake::FakeHost;
use super::persistent_vms::new_vm;
use super::{PATIENCE, TIMING, wait_for};
use crate::clock::now_ms;
use crate::cluster::rentals::{RentalTiming, Renting};
use crate::cluster::{Cluster, Settings, Timing, Traffic};
use crate::hosts::enrol;
use crate::records::HostRecord;
use crate::supervisor::Supervisor;
use crate::vms::persistent;
use crate::{hosts, rentals};
use double::{Does, Double, Lists};

const BUDGET: Money = Money::from_micros(20_000_000);

/// Hosts that do not join are given up.
const HASTY: Timing = Timing {
    rentals: RentalTiming { join: Duration::from_millis(300), ..TIMING.rentals },
    ..TIMING
};

/// A controller whose provider is a double.
struct Rented {
    dir: tempfile::TempDir,
    double: Double,
    supervisor: Arc<Supervisor>,
    cluster: Arc<Cluster>,
}

async fn start(dir: &std::path::Path, double: &Double, timing: Timing) -> Arc<Supervisor> {
    start_with(dir, double, timing, Traffic::Plain).await
}

async fn start_with(
    dir: &std::path::Path,
    double: &Double,
    timing: Timing,
    traffic: Traffic,
) -> Arc<Supervisor> {
    start_of(dir, double, timing, traffic, Some(BUDGET)).await
}

async fn start_of(
    dir: &std::path::Path,
    double: &Double,
    timing: Timing,
    traffic: Traffic,
    budget: Option<Money>,
) -> Arc<Supervisor> {
    let renting =
        Renting { providers: vec![Arc::new(double.clone())], budget: crate::Live::new(budget) };
    let own_url = Some("https://127.0.0.1:7000".to_owned());
    // Of the tests that have one.
    let prices = Some(dir.join("prices.yaml")).filter(|file| file.exists());
    let settings = Settings { own_url, renting, prices, ..Settings::default() };
    let supervisor = Supervisor::start_with(dir, timing, traffic, settings, None)
        .await
        .expect("the controller starts");
    double.inside().cluster = Arc::downgrade(&supervisor.cluster);
    supervisor
}

fn id(name: &str) -> RentalId {
    RentalId::new(name).expect("a name")
}

fn ask(name: &str) -> RentHost {
    RentHost {
        id: Some(id(name)),
        provider: "lab".to_owned(),
        kind: "m1".to_owned(),
        zone: None,
        spot: false,
        site: None,
        for_s: None,
        image: None,
        disk_bytes: None,
        controller_url: None,
    }
}

/// One that nobody has asked the provider for.
pub fn rental(name: &str) -> Rental {
    Rental {
        id: id(name),
        provider: "lab".to_owned(),
        offer: double::offer("m1", "a", false),
        image: String::new(),
        disk_bytes: 50 << 30,
        site: "lab".parse().expect("a name"),
        host: HostId::new(name).expect("a name"),
        by: "ann".to_owned(),
        state: RentalState::Wanted,
        steps: Vec::new(),
        why: String::new(),
        ends_because: None,
        ended_by: None,
        until_ms: None,
        instance: None,
        address: None,
        requested: perigee_model::rental::states::Requested::Nothing,
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
    }
}

impl Rented {
    async fn up(timing: Timing) -> Self {
        Self::up_with(timing, Double::default()).await
    }

    async fn up_with(timing: Timing, double: Double) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let supervisor = start(dir.path(), &double, timing).await;
        let cluster = Arc::clone(&supervisor.cluster);
        Self { dir, double, supervisor, cluster }
    }

    async fn restart(&mut self, timing: Timing) {
        self.supervisor.stop().await;
        self.supervisor = start(self.dir.path(), &self.double, timing).await;
        self.cluster = Arc::clone(&self.supervisor.cluster);
    }

    async fn restart_with_budget(&mut self, budget: Option<Money>) {
        self.supervisor.stop().await;
        let (dir, double) = (self.dir.path(), &self.double);
        self.supervisor = start_of(dir, double, TIMING, Traffic::Plain, budget).await;
        self.cluster = Arc::clone(&self.supervisor.cluster);
    }

    /// From now on the provider's lists are such ones. Before, it has given a good one.
    async fn lists(&self, lists: &[Lists]) {
        let listed = async || self.cluster.rentals.has_listed("lab").then_some(());
        wait_for("a list", listed).await;
        self.double.inside().lists = lists.iter().copied().cycle().take(100_000).collect();
    }

    /// Waits until the driver has looked at what is so now: each list wakes it.
    async fn has_looked(&self) {
        let before = self.double.inside().list_requests;
        let looked = async || (self.double.inside().list_requests > before + 4).then_some(());
        wait_for("the next lists", looked).await;
        tokio::time::sleep(2 * TIMING.monitor).await;
    }

    async fn rent(&self, name: &str) -> Rental {
        rentals::rent(&self.cluster, ask(name), "ann".to_owned()).await.expect("a rental")
    }

    fn get(&self, name: &str) -> Rental {
        rentals::get(&self.cluster, &id(name)).expect("the rental")
    }

    async fn end(&self, name: &str, now: bool) {
        let (of, by) = (id(name), "ann".to_owned());
        let ended = rentals::end(&self.cluster, &of, by, EndRental { now }).await;
        ended.expect("it is to end");
    }

    async fn wait(&self, name: &str, what: &str, is: impl Fn(&Rental) -> bool) -> Rental {
        let begun = std::time::Instant::now();
        loop {
            let rental = self.get(name);
            if is(&rental) {
                return rental;
            }
            let waited = PATIENCE.as_secs();
            assert!(begun.elapsed() < PATIENCE, "waited {waited} s for {what}: {rental:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn wait_for_state(&self, name: &str, state: RentalState) -> Rental {
        self.wait(name, &state.to_string(), |rental| rental.state == state).await
    }

    /// Its host boots and joins.
    async fn join(&self, name: &str) -> FakeHost {
        let host = FakeHost::start(name, "lab").await;
        let registered = hosts::register(&self.cluster, &host.id, host.addresses.clone());
        registered.await.expect("it registers");
        host
    }

    /// Once its instance has ended, its host answers no more.
    async fn goes_down_with_instance(&self, host: &FakeHost) {
        let ended = async || self.double.alive().is_empty().then_some(());
        wait_for("the instance to end", ended).await;
        host.inside().down = true;
    }

    fn nothing_wrong(&self) {
        let wrong = self.double.inside().wrong.clone();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

fn states(rental: &Rental) -> Vec<RentalState> {
    rental.steps.iter().map(|step| step.state).collect()
}

#[tokio::test]
async fn a_rented_host_joins_is_drained_and_given_back() {
    let rented = Rented::up(TIMING).await;
    let wanted = rented.rent("rent-1").await;
    assert_eq!(wanted.site.as_str(), "lab");
    assert_eq!(wanted.offer.zone, "a", "the cheapest one");
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    assert!(starting.reserved > Money::from_micros(1_000_000), "{starting:?}");
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    rented.end("rent-1", false).await;
    rented.goes_down_with_instance(&host).await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert_eq!(states(&gone), RentalState::ALL);
    assert_eq!(gone.ends_because.as_deref(), Some("ann gave it back"));
    assert!(gone.spent > Some(Money::ZERO) && gone.spent <= Some(gone.reserved), "{gone:?}");
    rented.cluster.hosts.get(&gone.host).expect_err("its host is forgotten");
    assert_eq!(rented.double.made(), 1);
    rented.nothing_wrong();
    let user_data = rented.double.inside().asked[0].user_data.clone();
    assert!(user_data.contains("agent run --host rent-1 --site lab"), "{user_data}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn an_instance_whose_answer_was_lost_is_found_by_its_tag() {
    let rented = Rented::up(TIMING).await;
    rented.double.inside().does = [Does::LosesAnswer].into();
    rented.rent("rent-1").await;
    let found = rented.wait_for_state("rent-1", RentalState::Starting).await;
    assert_eq!((found.instance.as_deref(), found.asks), (Some("i-1"), 1));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_request_that_was_lost_is_repeated_as_it_was_after_the_grace_period() {
    let rented = Rented::up(TIMING).await;
    rented.double.inside().does = [Does::LosesRequest].into();
    rented.rent("rent-1").await;
    let found = rented.wait_for_state("rent-1", RentalState::Starting).await;
    assert_eq!(found.asks, 2);
    let asked = rented.double.inside().asked.clone();
    assert_eq!(asked[0], asked[1]);
    let first = found.since_ms(RentalState::Asked).expect("asked");
    let again = found.asked_ms.expect("asked again");
    assert!(again - first >= 2000, "the grace period is 2 s: {found:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_provider_that_does_not_list_is_not_asked_twice() {
    let rented = Rented::up(TIMING).await;
    rented.double.inside().does = [Does::LosesRequest].into();
    rented.lists(&[Lists::Fails, Lists::Nonsense]).await;
    rented.rent("rent-1").await;
    let failures = async || {
        let all = rented.cluster.tasks.all();
        let task = all.into_iter().find(|task| task.name == "the lists of providers")?;
        (task.failures > 100 && rented.get("rent-1").asks > 0).then_some(())
    };
    // Of 100 lists of 20 ms.
    wait_for("lists longer than the grace period", failures).await;
    let asked = rented.get("rent-1");
    assert_eq!((asked.state, asked.asks), (RentalState::Asked, 1), "{asked:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_refusal_for_want_of_capacity_is_remembered_and_costs_nothing() {
    let rented = Rented::up(TIMING).await;
    rented.double.inside().does = [Does::Refuses(CloudErrorKind::NoCapacity)].into();
    rented.rent("rent-1").await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert_eq!(gone.spent, Some(Money::ZERO));
    assert!(gone.why.contains("no capacity"), "{gone:?}");
    let offers = rentals::offers(&rented.cluster).await;
    let refused = &offers[0].refused;
    assert_eq!((refused[0].kind.as_str(), refused[0].zone.as_str()), ("m1", "a"), "{refused:?}");
    assert_eq!(rented.rent("rent-2").await.offer.zone, "b", "the other zone");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_quota_that_is_used_up_is_remembered_for_all_zones_that_count_in_it() {
    let rented = Rented::up(TIMING).await;
    rented.double.inside().quota = Some("standard".to_owned());
    rented.double.inside().does = [Does::Refuses(CloudErrorKind::Quota)].into();
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    let offers = rentals::offers(&rented.cluster).await;
    let zones: Vec<&str> = offers[0]
        .refused
        .iter()
        .filter(|one| one.kind == "m1" && !one.spot)
        .map(|one| one.zone.as_str())
        .collect();
    assert_eq!(zones, ["a", "b"], "{offers:?}");
    let again = rentals::rent(&rented.cluster, ask("rent-2"), "ann".to_owned()).await;
    let problem = again.expect_err("it was refused in each zone");
    assert_eq!(problem.kind, ProblemKind::Conflict, "{problem}");
    let spot = RentHost { spot: true, ..ask("rent-3") };
    rentals::rent(&rented.cluster, spot, "ann".to_owned()).await.expect("it has another quota");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn an_instance_that_nobody_owns_is_ended_and_one_with_a_host_is_drained_first() {
    let rented = Rented::up(TIMING).await;
    let untagged = rented.double.plant(None);
    rented.double.plant(Some("rent-7"));
    let host = rented.join("rent-9").await;
    let with_host = rented.double.plant(Some("rent-9"));
    wait_for("all to end", async || rented.double.alive().is_empty().then_some(())).await;
    host.inside().down = true;
    let drained = rented.wait_for_state("rent-9", RentalState::Gone).await;
    assert_eq!(states(&drained), [RentalState::Draining, RentalState::Ending, RentalState::Gone]);
    assert_eq!(drained.instance, Some(with_host));
    let ended = rented.wait_for_state("rent-7", RentalState::Gone).await;
    assert_eq!(states(&ended), [RentalState::Ending, RentalState::Gone]);
    let own = rented.cluster.rentals.all().into_iter();
    let mut own = own.filter(|rental| rental.instance.as_ref() == Some(&untagged));
    assert!(own.next().expect("its rental").why.contains("owned"));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_host_that_never_joins_is_ended_with_its_reason() {
    let rented = Rented::up(HASTY).await;
    rented.rent("rent-1").await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert_eq!(gone.ends_because.as_deref(), Some("its host did not join in time"));
    assert!(rented.double.alive().is_empty());
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_notice_of_the_provider_begins_a_drain_at_once() {
    let rented = Rented::up(TIMING).await;
    let spot = RentHost { spot: true, ..ask("rent-1") };
    rentals::rent(&rented.cluster, spot, "ann".to_owned()).await.expect("a rental");
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    let instance = starting.instance.expect("an instance");
    rented.double.inside().notices = vec![Notice { instance, ends_unix_s: 2_000_000_000 }];
    rented.goes_down_with_instance(&host).await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert_eq!(gone.ends_because.as_deref(), Some("the provider takes it back"));
    assert_eq!(gone.notice_ms, Some(2_000_000_000_000));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_notice_that_the_host_has_heard_ends_its_rental() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    let action = "terminate".to_owned();
    host.inside().notice = Some(HostNotice { action, ends_unix_s: 2_000_000_000 });
    rented.goes_down_with_instance(&host).await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert_eq!(gone.ends_because.as_deref(), Some("the provider takes it back"));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn two_instances_that_a_provider_makes_for_one_rental_become_one() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let second = rented.double.plant(Some("rent-1"));
    wait_for("one of them to end", async || (rented.double.alive().len() == 1).then_some(())).await;
    assert_ne!(rented.double.alive()[0].id, second);
    assert_eq!(rented.get("rent-1").state, RentalState::Starting);
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_host_with_a_vm_that_can_t_leave_stays_until_a_person_forces_its_end() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    let mut vm = new_vm("rent-1");
    vm.volumes.clear();
    persistent::create(&rented.cluster, vm, "ann".to_owned()).await.expect("a VM");
    let runs = async || (!host.inside().vms.is_empty()).then_some(());
    wait_for("the VM", runs).await;
    rented.end("rent-1", false).await;
    let stays =
        rented.wait("rent-1", "what stays", |rental| rental.why.contains("can't leave")).await;
    assert!(stays.state == RentalState::Draining && stays.why.contains("--now"), "{stays:?}");
    assert_eq!(rented.double.alive().len(), 1, "never under a running VM");
    rented.end("rent-1", true).await;
    rented.goes_down_with_instance(&host).await;
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_host_that_the_provider_took_is_forgotten_and_one_that_answers_is_not() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    // The provider says so, and the host answers: the provider may lie.
    rented.double.take_back(&starting.instance.expect("an instance"));
    let again = rented.get("rent-1");
    let listed = async || {
        let state = rented.cluster.rentals.seen(&again, Duration::from_secs(2));
        (state == Seen::Ended).then_some(())
    };
    wait_for("the list", listed).await;
    assert_eq!(rented.cluster.hosts.state(&host.id), HostState::Up);
    assert_eq!(rented.get("rent-1").state, RentalState::Joined);
    host.inside().down = true;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert!(gone.ends_because.is_some_and(|why| why.contains("no such instance")));
    let name = HostId::new("rent-1").expect("a name");
    rented.cluster.hosts.get(&name).expect_err("it is forgotten");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn the_host_of_a_late_request_has_its_whole_time_to_join() {
    let throttled = Does::Refuses(CloudErrorKind::Throttled);
    for (does, asks) in [(vec![throttled; 4], 5), (vec![Does::LosesRequest], 2)] {
        let rented = Rented::up(HASTY).await;
        rented.double.inside().does = does.into();
        rented.rent("rent-1").await;
        let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
        assert_eq!((gone.asks, rented.double.made()), (asks, 1), "{gone:?}");
        let given_up_ms = gone.since_ms(RentalState::Ending).expect("it was given up");
        let asked_ms = gone.asked_ms.expect("asked");
        assert!(given_up_ms - asked_ms >= 300, "{gone:?}");
        rented.supervisor.stop().await;
    }
}

#[tokio::test]
async fn a_token_is_bound_to_the_address_that_the_answer_to_the_request_has() {
    let (dir, double) = (tempfile::tempdir().expect("a directory"), Double::default());
    double.inside().address = Some("10.9.0.1".to_owned());
    let supervisor = start_with(dir.path(), &double, TIMING, Traffic::Tls(Vec::new())).await;
    let cluster = Arc::clone(&supervisor.cluster);
    let rented = Rented { dir, double, supervisor, cluster };
    rented.rent("rent-1").await;
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    assert_eq!(starting.address.as_deref(), Some("10.9.0.1"));
    let user_data = rented.double.inside().asked[0].user_data.clone();
    let token = user_data.split('\'').find_map(|word| word.parse::<JoinToken>().ok());
    let token = token.expect("a token in the user-data");
    let key = NewKey::generate().expect("a key");
    let ask = |address: &str| Enrol {
        host: token.host.clone(),
        secret: token.secret.clone(),
        public_key: key.public().to_hex(),
        addresses: vec![address.parse().expect("an address")],
    };
    let other = enrol::enrol(&rented.cluster, ask("10.9.0.2")).await.map(drop);
    let problem = other.expect_err("the token is for another address");
    assert!(problem.why.contains("10.9.0.1"), "{problem}");
    enrol::enrol(&rented.cluster, ask("10.9.0.1")).await.expect("it joins");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_host_that_lists_lack_is_not_removed_at_its_first_silence_but_after_its_lease() {
    let mut rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    let joined = rented.wait_for_state("rent-1", RentalState::Joined).await;
    // Somebody has changed its tags.
    rented.double.inside().hides_all = true;
    let grace = TIMING.rentals.grace;
    let lacks =
        async || (rented.cluster.rentals.seen(&joined, grace) == Seen::AbsentForLong).then_some(());
    wait_for("a whole grace period of lists without it", lacks).await;
    host.inside().down = true;
    let is_decided = |rental: &Rental| {
        rental.state != RentalState::Joined || rental.why == "its host does not answer"
    };
    let silent = rented.wait("rent-1", "its host to be silent", is_decided).await;
    assert_eq!(silent.state, RentalState::Joined, "{silent:?}");
    rented.cluster.hosts.get(&silent.host).expect("its host is not removed");
    // A request that took too long on a busy machine would count as answered by the lists, which lack the host.
    let lease = Duration::from_secs(1);
    let short = RentalTiming { lease, answer: PATIENCE, ..TIMING.rentals };
    rented.restart(Timing { rentals: short, ..TIMING }).await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert!(gone.ends_because.is_some_and(|why| why.contains("the length of its lease")));
    assert_eq!(rented.double.alive(), [], "it is ended by its id, which no list has");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_host_that_no_list_shows_is_drained_when_it_is_given_back_and_costs_money() {
    let rented = Rented::up(TIMING).await;
    rented.double.inside().does = [Does::LosesAnswer].into();
    rented.lists(&[Lists::Fails]).await;
    rented.rent("rent-1").await;
    rented.wait("rent-1", "a request", |rental| rental.asks == 1).await;
    let host = rented.join("rent-1").await;
    rented.end("rent-1", false).await;
    let drained = async || rented.cluster.hosts.drain(&host.id).map(drop);
    wait_for("its host to be drained", drained).await;
    let asked = rented.get("rent-1");
    assert_eq!(asked.state, RentalState::Asked, "{asked:?}");
    assert!(asked.spent > Some(Money::ZERO), "{asked:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn lists_fill_the_store_with_no_more_rentals_than_its_limit_and_old_ones_make_room() {
    let rented = Rented::up(TIMING).await;
    let at_ms = now_ms();
    let steps = vec![RentalStep { state: RentalState::Gone, at_ms, why: String::new() }];
    let over = Rental { state: RentalState::Gone, steps, ..rental("rent-over") };
    rented.cluster.rentals.put(&over);
    for number in 1..RENTALS.max {
        rented.cluster.rentals.put(&rental(&format!("rent-{number}")));
    }
    rented.double.plant(None);
    let problem = async || {
        let all = rented.cluster.tasks.all();
        let task = all.into_iter().find(|task| task.name == "the lists of providers")?;
        task.problem.contains("number of rented hosts").then_some(())
    };
    wait_for("the limit to be named", problem).await;
    assert_eq!(rented.double.alive().len(), 1);
    rented.cluster.clock.pretend_passed(Duration::from_secs(32 * 86_400));
    wait_for("it to end", async || rented.double.alive().is_empty().then_some(())).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_host_whose_addresses_can_t_be_used_is_removed_with_its_record() {
    let rented = Rented::up(TIMING).await;
    let host = FakeHost::start("rent-9", "lab").await;
    let addresses = host.addresses.clone();
    let (interfaces, versions) = Default::default();
    let record = HostRecord { addresses, registered_ms: 0, interfaces, drain: None, versions };
    let key = format!("hosts/{}", host.id);
    // It is not in memory, as after a start that could not use its addresses.
    rented.cluster.records.put(&key, &record).await.expect("a store");
    hosts::remove(&rented.cluster, &host.id, true).await.expect("it is removed");
    let left: Option<HostRecord> = rented.cluster.records.read(&key).await.expect("a store");
    assert!(left.is_none());
    let again = hosts::remove(&rented.cluster, &host.id, true).await;
    assert_eq!(again.expect_err("it is gone").kind, ProblemKind::NotFound);
    rented.supervisor.stop().await;
}
