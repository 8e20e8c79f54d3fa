//! The controller is killed at each of its writes of a kept disk, and of who uses it.

use perigee_model::kept::KeptState;
use tokio::task::JoinHandle;

use super::kept::Kept;
use super::*;

/// Runs in the background: at the cut it hangs.
fn spawn(work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(work)
}

/// What a person does, once each, until it is done.
#[derive(Default)]
struct Hands {
    ends: Option<JoinHandle<()>>,
    rents: Option<JoinHandle<()>>,
    joins: Option<JoinHandle<()>>,
}

impl Hands {
    fn abort(&mut self) {
        for hand in [&mut self.ends, &mut self.rents, &mut self.joins] {
            hand.take().inspect(JoinHandle::abort);
        }
    }

    fn is_free(hand: &Option<JoinHandle<()>>) -> bool {
        hand.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// Does what a person and a machine do next.
async fn goes_on(kept: &Kept, hands: &mut Hands, second: &mut Option<FakeHost>) {
    let cluster = Arc::clone(&kept.rented.cluster);
    let state = |name: &str| rentals::get(&cluster, &id(name)).ok().map(|rental| rental.state);
    match (state("rent-1"), state("rent-2")) {
        (Some(RentalState::Joined), _) if Hands::is_free(&hands.ends) => {
            hands.ends = Some(spawn(async move {
                let of = id("rent-1");
                rentals::end(&cluster, &of, "ann".to_owned(), EndRental::default()).await.ok();
            }));
        }
        (Some(RentalState::Gone), None) if Hands::is_free(&hands.rents) => {
            hands.rents = Some(spawn(async move {
                rentals::rent(&cluster, ask("rent-2"), "ann".to_owned()).await.ok();
            }));
        }
        (_, Some(RentalState::Starting)) if Hands::is_free(&hands.joins) => {
            if second.is_none() {
                let host = FakeHost::start("rent-2", "lab").await;
                host.inside().pool_free_bytes = Some(1 << 40);
                let asked = kept.rented.double.inside().asked.last().cloned();
                if asked.and_then(|asked| asked.pool?.snapshot).is_some() {
                    let points = kept.first.inside().replicas.points.clone();
                    host.inside().replicas.points = points;
                }
                *second = Some(host);
            }
            let host = second.as_ref().expect("it is there");
            let (id, addresses) = (host.id.clone(), host.addresses.clone());
            hands.joins = Some(spawn(async move {
                hosts::register(&cluster, &id, addresses).await.ok();
            }));
        }
        _ => {}
    }
}

/// The controller is killed instead of this write of keys with `of` in them, and started again. Returns false if all was done with fewer writes.
async fn killed_at(of: &str, write: u64) -> bool {
    let mut kept = Kept::up().await;
    let cut = kept.rented.cluster.records.counts.cut_at(of, write);
    let (mut hands, mut second, mut is_cut) = (Hands::default(), None, false);
    let begun = std::time::Instant::now();
    loop {
        if !is_cut && cut.is_reached() {
            is_cut = true;
            hands.abort();
            kept.rented.restart(TIMING).await;
        }
        goes_on(&kept, &mut hands, &mut second).await;
        if !kept.rented.double.alive().iter().any(|one| one.rental.as_deref() == Some("rent-1")) {
            kept.first.inside().down = true;
        }
        let (disk, replica) = (kept.disk().await, kept.replica().await);
        let is_over = disk.as_ref().is_none_or(|disk| disk.state == KeptState::Gone);
        let is_there = replica.as_ref().is_some_and(|one| {
            one.host.as_str() == "rent-2" && one.complete_ms.is_some() && one.kept.is_none()
        });
        let is_done = is_over && is_there && kept.snapshots() == 0;
        if is_done && (is_cut || !cut.is_reached()) {
            break;
        }
        let now = kept.rented.cluster.rentals.all();
        assert!(begun.elapsed() < PATIENCE, "{of} {write}: {disk:?} {replica:?} {now:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    hands.abort();
    kept.rented.nothing_wrong();
    let alive = kept.rented.double.alive();
    assert!(alive.len() == 1 && kept.rented.double.made() == 2, "{of} {write}: {alive:?}");
    let entry = kept.rented.cluster.ledger.entry("rental/rent-1/disk");
    assert!(entry.is_none_or(|entry| entry.spent.is_some()), "{of} {write}");
    kept.rented.supervisor.stop().await;
    is_cut
}

async fn killed_at_every_write(of: &str, more_than: usize) {
    const AT_ONCE: u64 = 4;
    let mut tried = 0;
    for first in (1..).step_by(4) {
        let tries = (first..first + AT_ONCE).map(|write| killed_at(of, write));
        let were_cut = futures_util::future::join_all(tries).await;
        tried += were_cut.iter().filter(|was_cut| **was_cut).count();
        if were_cut.contains(&false) {
            break;
        }
    }
    assert!(tried > more_than, "{of}: it was killed at {tried} writes only");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_kept_disk_leaves_no_snapshot() {
    killed_at_every_write("kept_disks/", 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_the_use_of_a_kept_disk_leaves_no_snapshot() {
    killed_at_every_write("kept_uses/", 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_while_a_replica_stands_still_leaves_no_snapshot() {
    killed_at_every_write("replicas/", 1).await;
}
