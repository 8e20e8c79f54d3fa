//! The controller is killed at each of its writes around a rental: of its record, of what people ask for, of its host and of its host's drain. Its host
//! is given back, taken back, kept until more money is reserved, or found without a record.

use tokio::task::JoinHandle;

use super::*;

/// What happens to the rental.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Story {
    /// A person gives the joined host back.
    Ended,
    /// The provider takes the joined host back.
    TakenBack,
    /// The joined host stays until more money was reserved for it, and a person gives it back.
    Stays,
    /// After a restore from an older backup no record knows the instance of a host of the cluster.
    Adopted,
}

/// What runs beside the controller. At the cut it hangs, and is given up.
#[derive(Default)]
struct Beside {
    asks: Option<JoinHandle<()>>,
    joins: Option<JoinHandle<()>>,
    ends: Option<JoinHandle<()>>,
}

impl Beside {
    fn is_free(of: &Option<JoinHandle<()>>) -> bool {
        of.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn give_up(&mut self) {
        for task in [&mut self.asks, &mut self.joins, &mut self.ends] {
            task.take().inspect(JoinHandle::abort);
        }
    }

    fn ask(&mut self, rented: &Rented, story: Story) {
        let cluster = Arc::clone(&rented.cluster);
        let ask = RentHost { spot: story == Story::TakenBack, ..ask("rent-1") };
        // The one who asked asks again, with the same id.
        self.asks = (story != Story::Adopted).then(|| {
            tokio::spawn(async move {
                rentals::rent(&cluster, ask, "ann".to_owned()).await.ok();
            })
        });
    }

    fn join(&mut self, rented: &Rented, host: &FakeHost) {
        let (cluster, id) = (Arc::clone(&rented.cluster), host.id.clone());
        let addresses = host.addresses.clone();
        self.joins = Some(tokio::spawn(async move {
            hosts::register(&cluster, &id, addresses).await.ok();
        }));
    }

    fn end(&mut self, rented: &Rented) {
        let cluster = Arc::clone(&rented.cluster);
        self.ends = Some(tokio::spawn(async move {
            let of = id("rent-1");
            rentals::end(&cluster, &of, "ann".to_owned(), EndRental::default()).await.ok();
        }));
    }

    /// What becomes of the host that has joined.
    fn goes_on(&mut self, rented: &Rented, rental: &Rental, story: Story) {
        let more_ms = |rental: &Rental| {
            let first_ms = rental.since_ms(RentalState::Asked).unwrap_or(0);
            rental.reserved_until_ms.unwrap_or(0).saturating_sub(first_ms)
        };
        match story {
            Story::TakenBack => {
                let instance = rental.instance.clone().expect("its instance");
                rented.double.inside().notices =
                    vec![Notice { instance, ends_unix_s: 2_000_000_000 }];
            }
            // Its first money is for an hour and a quarter.
            Story::Stays if more_ms(rental) <= 4_500_000 => use_up(rented, rental),
            Story::Stays | Story::Ended if Self::is_free(&self.ends) => self.end(rented),
            _ => {}
        }
    }
}

/// Time passes once until more money is reserved.
fn use_up(rented: &Rented, rental: &Rental) {
    if rented.cluster.clock.age_ms(rental.steps[0].at_ms) < 3_901_000 {
        rented.cluster.clock.pretend_passed(Duration::from_secs(3901));
    }
}

/// The controller is killed instead of this write, and started again. Returns false if the rental was over with fewer writes.
async fn killed_at(write: u64, story: Story) -> bool {
    let mut rented = Rented::up(TIMING).await;
    rented.double.inside().listed_after = Duration::from_millis(100);
    let mut host = None::<FakeHost>;
    match story {
        Story::Adopted => {
            host = Some(rented.join("rent-1").await);
            rented.double.plant(Some("rent-1"));
        }
        Story::Ended | Story::TakenBack | Story::Stays => {}
    }
    // Each of these records has the name of the rental or of its host in its key.
    let cut = rented.cluster.records.counts.cut_at("rent-1", write);
    let (mut is_cut, mut beside) = (false, Beside::default());
    let begun = std::time::Instant::now();
    beside.ask(&rented, story);
    loop {
        if !is_cut && cut.is_reached() {
            is_cut = true;
            beside.give_up();
            rented.restart(TIMING).await;
            beside.ask(&rented, story);
        }
        let rental = rentals::get(&rented.cluster, &id("rent-1")).ok();
        match rental.as_ref().map(|rental| rental.state) {
            Some(RentalState::Starting) if Beside::is_free(&beside.joins) => {
                if host.is_none() {
                    host = Some(FakeHost::start("rent-1", "lab").await);
                }
                host.iter().for_each(|host| beside.join(&rented, host));
            }
            Some(RentalState::Joined) => {
                rental.iter().for_each(|rental| beside.goes_on(&rented, rental, story));
            }
            Some(RentalState::Gone) if is_cut || !cut.is_reached() => break,
            _ => {}
        }
        if let Some(host) = host.as_ref().filter(|_| rented.double.alive().is_empty()) {
            host.inside().down = true;
        }
        assert!(begun.elapsed() < PATIENCE, "{story:?} without write {write}: {rental:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    beside.give_up();
    assert!(rented.double.alive().is_empty(), "{story:?} without write {write}");
    assert_eq!(rented.double.made(), 1, "{story:?} without write {write}");
    rented.nothing_wrong();
    let name = HostId::new("rent-1").expect("a name");
    rented.cluster.hosts.get(&name).expect_err("its host is forgotten");
    rented.supervisor.stop().await;
    is_cut
}

async fn killed_at_every_write(story: Story, least: usize) {
    const AT_ONCE: u64 = 6;
    let mut tried = 0;
    for first in (1..).step_by(6) {
        let tries = (first..first + AT_ONCE).map(|write| killed_at(write, story));
        let were_cut = futures_util::future::join_all(tries).await;
        tried += were_cut.iter().filter(|was_cut| **was_cut).count();
        if were_cut.contains(&false) {
            break;
        }
    }
    assert!(tried >= least, "{story:?}: it was killed at {tried} writes only");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_rented_host_s_drain_ends_the_host() {
    killed_at_every_write(Story::Ended, 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_after_a_notice_gives_the_host_back() {
    killed_at_every_write(Story::TakenBack, 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_while_it_reserves_more_money_has_one_instance_and_ends_it() {
    killed_at_every_write(Story::Stays, 11).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_while_it_owns_what_nobody_owned_drains_and_ends_it() {
    killed_at_every_write(Story::Adopted, 5).await;
}
