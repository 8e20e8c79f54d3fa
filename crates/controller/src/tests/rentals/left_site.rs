//! What leaves the site of a rented host is paid for.

use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, JobSpec, JobState, NewVolume};
use perigee_model::money::Price;
use perigee_model::volume::VolumeSource;
use perigee_model::volume_move::VolumeMoveCause;
use perigee_model::{JobId, VmId};

use super::*;
use crate::ledger::left_site;
use crate::storage::{moves, volumes};
use crate::tests::{data_volume, finish, spec, vm_of};

const GIB: u64 = 1 << 30;
/// Of each piece that the job's disk sends and gets, this much is read.
const READ: u64 = 3 * GIB / 4;

/// A rented host where the data volume is, and an own one where a job runs that reads and writes the data.
struct Reads {
    rented: Rented,
    there: FakeHost,
    home: FakeHost,
    id: JobId,
    vm: VmId,
}

async fn reads(egress_per_gib_micros: u64) -> Reads {
    let rented = Rented::up(TIMING).await;
    let egress_per_gib_micros = std::num::NonZeroU64::new(egress_per_gib_micros);
    let price = Price { egress_per_gib_micros, ..double::offer("m1", "a", false).price };
    rented.double.inside().price = Some(price);
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let there = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    let home = FakeHost::start("home1", "home").await;
    hosts::register(&rented.cluster, &home.id, home.addresses.clone()).await.expect("register");
    let new = NewVolume {
        name: data_volume(),
        host: Some(there.id.clone()),
        size_bytes: Some(GIB),
        source: VolumeSource::Empty,
        leave_site: Default::default(),
    };
    volumes::create(&rented.cluster, new).await.expect("create");
    let job = JobSpec { may_migrate: false, ..spec(Access::Write) };
    let id = crate::jobs::submit(&rented.cluster, job).await.expect("submit").id;
    let vm = vm_of(&id);
    wait_for("the VM", async || home.inside().vms.contains_key(&vm).then_some(())).await;
    home.say(&vm, GuestBody::Started);
    wait_for_job(&rented, &id, JobState::Running).await;
    Reads { rented, there, home, id, vm }
}

async fn wait_for_job(rented: &Rented, id: &JobId, state: JobState) {
    let is = async || {
        let job = crate::jobs::get(&rented.cluster, id).await.expect("the job");
        (job.state == state).then_some(())
    };
    wait_for(&format!("the job to be {state:?}"), is).await;
}

/// What went to the host that is gone was paid for as if it had left.
#[tokio::test]
async fn nothing_leaves_a_site_for_a_rented_host_that_was_there_and_is_gone() {
    let rented = Rented::up(TIMING).await;
    let mut hosts = Vec::new();
    for name in ["rent-1", "rent-2"] {
        rented.rent(name).await;
        rented.wait_for_state(name, RentalState::Starting).await;
        hosts.push(rented.join(name).await);
        rented.wait_for_state(name, RentalState::Joined).await;
    }
    let leaves = || left_site::leaves(&rented.cluster, &hosts[0].id, &hosts[1].id);
    assert!(!leaves(), "they are at one site");
    rented.end("rent-2", false).await;
    wait_for("its end", async || (rented.double.alive().len() == 1).then_some(())).await;
    hosts[1].inside().down = true;
    rented.wait_for_state("rent-2", RentalState::Gone).await;
    assert!(rented.cluster.hosts.get(&hosts[1].id).is_err() && !leaves());
    rented.supervisor.stop().await;
}

impl Reads {
    /// Whatever was read before the controller looked first does not count. So this goes on until something does.
    async fn go_on_until_something_counts(&self) -> u64 {
        wait_for("something to leave the site", async || {
            {
                let mut inside = self.home.inside();
                let io = &mut inside.vms.get_mut(&self.vm).expect("the VM").report.io[3];
                io.reads += 1;
                io.writes += 1;
                io.read_bytes += READ;
                io.write_bytes += GIB - READ;
                io.network_bytes += GIB;
            }
            let left = self.rented.get("rent-1").left_bytes;
            (left > 0).then_some(left)
        })
        .await
    }

    async fn give_back(&self) -> Rental {
        self.rented.end("rent-1", true).await;
        self.rented.goes_down_with_instance(&self.there).await;
        self.rented.wait_for_state("rent-1", RentalState::Gone).await
    }
}

#[tokio::test]
async fn what_a_job_reads_from_a_rented_host_is_in_what_that_has_cost() {
    let mut reads = reads(100_000).await;
    reads.go_on_until_something_counts().await;
    let running = reads.rented.get("rent-1");
    assert!(running.spent >= running.egress(), "{running:?}");
    finish(&reads.home, &reads.home, &reads.vm);
    wait_for_job(&reads.rented, &reads.id, JobState::Succeeded).await;
    let left = reads.rented.get("rent-1").left_bytes;
    assert!(left > 0 && left.is_multiple_of(READ), "what is written goes the other way: {left}");
    reads.rented.restart(TIMING).await;
    assert_eq!(reads.rented.get("rent-1").left_bytes, left);
    // A volume that moves home leaves the site too.
    reads.home.inside().moves.missing_bytes = GIB;
    let (to, cause) = (&reads.home.id, VolumeMoveCause::Asked);
    moves::request(&reads.rented.cluster, &data_volume(), to, cause).await.expect("it moves");
    let with_volume = left + GIB;
    reads.rented.wait("rent-1", "the volume", |rental| rental.left_bytes == with_volume).await;
    reads.home.inside().moves.missing_bytes = 0;
    let gone = reads.give_back().await;
    assert_eq!(gone.left_bytes, with_volume);
    assert!(!gone.is_spent_at_least());
    let egress = Money::from_micros(100_000).of(with_volume, GIB);
    assert!(gone.spent > Some(egress), "{gone:?}");
    assert_eq!(Some(money::in_ledger(&reads.rented).spent), gone.spent);
    reads.rented.supervisor.stop().await;
}

#[tokio::test]
async fn what_leaves_a_site_for_a_price_that_is_not_known_is_said_and_not_taken_for_nothing() {
    let reads = reads(0).await;
    reads.go_on_until_something_counts().await;
    let running = reads.rented.get("rent-1");
    assert!(running.is_spent_at_least() && running.egress().is_none(), "{running:?}");
    assert!(running.spent_in_words().starts_with("at least $"), "{running:?}");
    finish(&reads.home, &reads.home, &reads.vm);
    wait_for_job(&reads.rented, &reads.id, JobState::Succeeded).await;
    let gone = reads.give_back().await;
    assert!(gone.is_spent_at_least() && gone.spent > Some(Money::ZERO), "{gone:?}");
    let score = crate::planning::score(&reads.rented.cluster, |_| true, true).await;
    assert_eq!(score.expect("a score").rentals.jobs, 0, "nobody knows what it has cost");
    reads.rented.supervisor.stop().await;
}
