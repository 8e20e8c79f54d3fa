//! The controller is killed at each of its writes of a rental, and of the ledger's lines for it.

use perigee_model::budget::Spending;
use tokio::task::JoinHandle;

use super::*;

/// The controller is killed instead of this write of keys with `of` in them, and started again. Returns false if the rental was over with fewer
/// writes.
async fn killed_at(of: &str, write: u64, does: Does) -> bool {
    let mut rented = Rented::up(TIMING).await;
    rented.double.inside().does = [does].into();
    rented.double.inside().listed_after = Duration::from_millis(100);
    let cut = rented.cluster.records.counts.cut_at(of, write);
    let (mut is_cut, mut host) = (false, None::<FakeHost>);
    let begun = std::time::Instant::now();
    let mut asked = spawn_rent(&rented);
    let (mut ended, mut joins) = (None::<JoinHandle<()>>, None::<JoinHandle<()>>);
    loop {
        if !is_cut && cut.is_reached() {
            is_cut = true;
            asked.abort();
            ended.take().inspect(JoinHandle::abort);
            joins.take().inspect(JoinHandle::abort);
            rented.restart(TIMING).await;
            // The one who asked asks again, with the same id.
            asked = spawn_rent(&rented);
        }
        let rental = rentals::get(&rented.cluster, &id("rent-1")).ok();
        match rental.as_ref().map(|rental| rental.state) {
            // Nothing that writes is waited for here: at the cut it hangs.
            Some(RentalState::Starting) if joins.as_ref().is_none_or(JoinHandle::is_finished) => {
                if host.is_none() {
                    host = Some(FakeHost::start("rent-1", "lab").await);
                }
                joins = host.as_ref().map(|host| {
                    let (cluster, id) = (Arc::clone(&rented.cluster), host.id.clone());
                    let addresses = host.addresses.clone();
                    tokio::spawn(async move {
                        hosts::register(&cluster, &id, addresses).await.ok();
                    })
                });
            }
            Some(RentalState::Joined) if ended.is_none() => {
                let cluster = Arc::clone(&rented.cluster);
                ended = Some(tokio::spawn(async move {
                    let of = id("rent-1");
                    rentals::end(&cluster, &of, "ann".to_owned(), EndRental::default()).await.ok();
                }));
            }
            Some(RentalState::Gone) if is_cut || !cut.is_reached() => break,
            _ => {}
        }
        if let Some(rental) = rental.as_ref().filter(|rental| !rental.state.is_over()) {
            // Once, or not yet, whoever was killed between the ledger and the record.
            let reserved = money::in_ledger(&rented).reserved;
            let is_once = reserved == Money::ZERO || Some(reserved) == rental.cost(3600 + 900);
            assert!(is_once, "{does:?} without write {write}: {reserved} for {rental:?}");
        }
        if let Some(host) = host.as_ref().filter(|_| rented.double.alive().is_empty()) {
            host.inside().down = true;
        }
        assert!(begun.elapsed() < PATIENCE, "{does:?} without write {write}: {rental:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    asked.abort();
    joins.inspect(JoinHandle::abort);
    assert!(rented.double.alive().is_empty(), "{does:?} without write {write}");
    assert_eq!(rented.double.made(), 1, "{does:?} without write {write}");
    rented.nothing_wrong();
    let gone = rented.get("rent-1");
    let spending = Spending { spent: gone.spent.expect("it is known"), reserved: Money::ZERO };
    assert_eq!(money::in_ledger(&rented), spending, "{does:?} without write {write}");
    assert!(spending.spent > Money::ZERO, "{does:?} without write {write}: {gone:?}");
    money::never_over(&rented, BUDGET).await;
    let name = HostId::new("rent-1").expect("a name");
    rented.cluster.hosts.get(&name).expect_err("its host is forgotten");
    rented.supervisor.stop().await;
    is_cut
}

fn spawn_rent(rented: &Rented) -> JoinHandle<()> {
    let cluster = Arc::clone(&rented.cluster);
    tokio::spawn(async move {
        rentals::rent(&cluster, ask("rent-1"), "ann".to_owned()).await.ok();
    })
}

async fn killed_at_every_write(of: &str, does: Does, more_than: usize) {
    const AT_ONCE: u64 = 6;
    let mut tried = 0;
    for first in (1..).step_by(6) {
        let tries = (first..first + AT_ONCE).map(|write| killed_at(of, write, does));
        let were_cut = futures_util::future::join_all(tries).await;
        tried += were_cut.iter().filter(|was_cut| **was_cut).count();
        if were_cut.contains(&false) {
            break;
        }
    }
    assert!(tried > more_than, "{does:?}: it was killed at {tried} writes only");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_rental_has_one_instance_and_ends_it() {
    killed_at_every_write("rentals/", Does::Makes, 6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_while_an_answer_is_lost_has_one_instance_and_ends_it() {
    killed_at_every_write("rentals/", Does::LosesAnswer, 6).await;
}

/// One line reserves, and one settles.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_a_line_of_the_ledger_reserves_once_and_settles_once() {
    for does in [Does::Makes, Does::LosesAnswer] {
        killed_at_every_write("ledger/lines/", does, 1).await;
    }
}
