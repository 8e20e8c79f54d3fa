//! Replicas at rented hosts that are given back, whose disk is kept at the provider.

use std::collections::VecDeque;
use std::num::NonZeroU64;

use futures_util::future::{BoxFuture, FutureExt as _};
use perigee_cloud::{CloudError, Snapshots};
use perigee_model::drain::DrainHost;
use perigee_model::job::NewVolume;
use perigee_model::kept::{
    KeptDisk, KeptState, NewSnapshot, Snapshot, SnapshotPrice, SnapshotState,
};
use perigee_model::money::PRICE_AGE_S_DEFAULT;
use perigee_model::replica::{Replica, ReplicateVolume};
use perigee_model::units::format_time;
use perigee_model::volume::VolumeSource;
use perigee_model::{SiteId, VolumeName};

use super::double::fails;
use super::*;
use crate::drain;
use crate::records::{KeptUse, kept_disk_key, kept_use_key};
use crate::storage::{replicas, volumes};
use crate::tests::data_volume;

/// What the provider keeps.
pub struct Disks {
    /// Millionths of a dollar for a GiB and month; `None`: it keeps nothing.
    pub price: Option<u64>,
    /// The price is so old.
    pub priced_days_ago: u64,
    pub made: Vec<Snapshot>,
    /// What the next requests lead to; then it makes what it is asked for.
    pub does: VecDeque<Does>,
    /// What it says that it has stored.
    pub stored_bytes: u64,
    pub asked: Vec<NewSnapshot>,
    /// It gives no list.
    pub hides_list: bool,
    /// How often it was asked for a list.
    pub lists: u32,
}

impl Default for Disks {
    fn default() -> Self {
        Self {
            price: None,
            priced_days_ago: 0,
            made: Vec::new(),
            does: VecDeque::new(),
            stored_bytes: 50 << 20,
            asked: Vec::new(),
            hides_list: false,
            lists: 0,
        }
    }
}

impl Disks {
    fn make(&mut self, rental: Option<&str>) -> Snapshot {
        let snapshot = Snapshot {
            id: format!("snap-{}-{}", self.asked.len(), self.made.len()),
            rental: rental.map(str::to_owned),
            state: SnapshotState::Complete,
            stored_bytes: Some(self.stored_bytes),
        };
        self.made.push(snapshot.clone());
        snapshot
    }
}

impl Snapshots for Double {
    fn price(&self) -> SnapshotPrice {
        let disks = &self.inside().disks;
        SnapshotPrice {
            per_gib_month_micros: disks.price.and_then(NonZeroU64::new),
            as_of_unix_s: now_ms() / 1000 - disks.priced_days_ago * 86_400,
            age_max_s: PRICE_AGE_S_DEFAULT,
        }
    }

    fn take<'a>(&'a self, new: &'a NewSnapshot) -> BoxFuture<'a, Result<Snapshot, CloudError>> {
        async move {
            let cluster = self.inside().cluster.upgrade().expect("a controller");
            let key = kept_disk_key(&new.rental.parse().expect("the id of a rental"));
            let kept: Option<KeptDisk> = cluster.records.read(&key).await.expect("the store");
            let mut inside = self.inside();
            if kept.is_none_or(|kept| kept.state != KeptState::Asked) {
                inside.wrong.push(format!("asked for before that was recorded: {new:?}"));
            }
            let is_there = |made: &double::Made| {
                made.instance.id == new.instance && made.instance.state == InstanceState::Running
            };
            if !inside.made.iter().any(is_there) {
                inside.wrong.push(format!("there is no instance: {new:?}"));
            }
            if inside.disks.made.iter().any(|one| one.rental.as_ref() == Some(&new.rental)) {
                inside.wrong.push(format!("a second snapshot: {new:?}"));
            }
            inside.disks.asked.push(new.clone());
            match inside.disks.does.pop_front().unwrap_or(Does::Makes) {
                Does::Refuses(kind) => fails(kind),
                Does::LosesRequest => fails(CloudErrorKind::Unclear),
                Does::LosesAnswer => {
                    inside.disks.make(Some(&new.rental));
                    fails(CloudErrorKind::Unclear)
                }
                _ => Ok(inside.disks.make(Some(&new.rental))),
            }
        }
        .boxed()
    }

    fn list<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<Snapshot>, CloudError>> {
        async move {
            let disks = &mut self.inside().disks;
            disks.lists += 1;
            if disks.hides_list {
                fails(CloudErrorKind::NotAllowed)
            } else {
                Ok(disks.made.clone())
            }
        }
        .boxed()
    }

    fn delete<'a>(&'a self, snapshot: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            self.inside().disks.made.retain(|one| one.id != snapshot);
            Ok(())
        }
        .boxed()
    }
}

/// What an own volume costs that leaves its site.
fn prices() -> String {
    let today: String = format_time(now_ms()).chars().take(10).collect();
    format!("sites:\n  home: {{machine: $1/h, egress: $0.09/GiB, as-of: {today}}}\n")
}

/// What the provider says counts, however busy the machine is.
const PATIENT: Timing =
    Timing { rentals: RentalTiming { answer: PATIENCE, ..TIMING.rentals }, ..TIMING };

/// A rented host with a complete replica of an own volume.
pub struct Kept {
    pub rented: Rented,
    pub home: FakeHost,
    pub first: FakeHost,
}

impl Kept {
    pub async fn up() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("prices.yaml"), prices()).expect("write");
        let double = Double::default();
        double.inside().disks.price = Some(50_000);
        let supervisor = start(dir.path(), &double, PATIENT).await;
        let cluster = Arc::clone(&supervisor.cluster);
        let rented = Rented { dir, double, supervisor, cluster };
        let home = FakeHost::start("home1", "home").await;
        let registered = hosts::register(&rented.cluster, &home.id, home.addresses.clone());
        registered.await.expect("it registers");
        rented.rent("rent-1").await;
        rented.wait_for_state("rent-1", RentalState::Starting).await;
        let first = rented.join("rent-1").await;
        first.inside().pool_free_bytes = Some(1 << 40);
        rented.wait_for_state("rent-1", RentalState::Joined).await;
        let up = Self { rented, home, first };
        up.replicate(&data_volume()).await;
        up
    }

    /// A new volume at its home, with a complete replica.
    async fn replicate(&self, name: &VolumeName) {
        let cluster = &self.rented.cluster;
        let new = NewVolume {
            name: name.clone(),
            host: Some(self.home.id.clone()),
            size_bytes: Some(1 << 30),
            source: VolumeSource::Empty,
            leave_site: Default::default(),
        };
        volumes::create(cluster, new).await.expect("create");
        let to = SiteId::new("lab").expect("a name");
        let ask = ReplicateVolume { to, every_s: 3600, keep: 1 };
        replicas::replicate(cluster, name, &ask).await.expect("a replica");
        let shown = async || self.replica_of(name).await.filter(|one| one.behind_bytes.is_some());
        wait_for("the first round", shown).await;
    }

    async fn replica_of(&self, volume: &VolumeName) -> Option<Replica> {
        replicas::of_volume(&self.rented.cluster, volume).await.ok()?.pop()
    }

    pub async fn replica(&self) -> Option<Replica> {
        self.replica_of(&data_volume()).await
    }

    pub async fn disk(&self) -> Option<KeptDisk> {
        rentals::kept_disks(&self.rented.cluster).await.expect("the store").pop()
    }

    async fn wait_for_disk(&self, state: KeptState) -> KeptDisk {
        let is = async || self.disk().await.filter(|kept| kept.state == state);
        wait_for(&format!("a disk that is {state}"), is).await
    }

    /// How many hosts with a disk made of it did not join.
    async fn failed(&self) -> u32 {
        let key = kept_use_key(&id("rent-1"));
        let used: Option<KeptUse> = self.rented.cluster.records.read(&key).await.expect("read");
        used.map_or(0, |used| used.failed)
    }

    pub fn snapshots(&self) -> usize {
        self.rented.double.inside().disks.made.len()
    }

    /// Another host of the site, which has not got the disk.
    async fn joins(&self, name: &str) -> FakeHost {
        let host = FakeHost::start(name, "lab").await;
        host.inside().pool_free_bytes = Some(1 << 40);
        let registered = hosts::register(&self.rented.cluster, &host.id, host.addresses.clone());
        registered.await.expect("it registers");
        host
    }

    /// Waits until the replica is made anew at this host.
    async fn wait_for_replica_at(&self, host: &FakeHost) {
        let is_there = async || {
            let shown = self.replica().await?;
            let is_at_host = shown.host == host.id && shown.kept.is_none();
            (is_at_host && host.inside().replicas.pulls > 0).then_some(())
        };
        wait_for(&format!("the replica at {}", host.id), is_there).await;
    }

    /// Waits until the provider was asked for lists a few times.
    async fn has_compared(&self) {
        let lists = || self.rented.double.inside().disks.lists;
        let before = lists();
        wait_for("more lists", async || (lists() > before + 3).then_some(())).await;
    }

    /// Waits until the controller knows whether the volume's home is up.
    async fn wait_for_home(&self, state: HostState) {
        let is = async || (self.rented.cluster.hosts.state(&self.home.id) == state).then_some(());
        wait_for(&format!("a home that is {state:?}"), is).await;
    }

    /// The first host is given back.
    async fn give_back(&self) {
        self.rented.end("rent-1", false).await;
        self.rented.goes_down_with_instance(&self.first).await;
        self.rented.wait_for_state("rent-1", RentalState::Gone).await;
    }

    /// Nothing is kept and nothing is reserved for it, and the provider was not misused.
    async fn nothing_is_left(&self) -> KeptDisk {
        let gone = self.wait_for_disk(KeptState::Gone).await;
        assert_eq!(self.snapshots(), 0, "{gone:?}");
        let entry = self.rented.cluster.ledger.entry("rental/rent-1/disk");
        assert!(entry.is_none_or(|entry| entry.spent.is_some()), "{gone:?}");
        self.rented.nothing_wrong();
        gone
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_disk_with_a_replica_is_kept_and_the_next_host_ships_only_what_changed() {
    let kept = Kept::up().await;
    let (rented, pulls) = (&kept.rented, kept.first.inside().replicas.pulls);
    let pin = kept.home.inside().replicas.pins.clone();
    kept.give_back().await;
    let disk = kept.wait_for_disk(KeptState::Kept).await;
    assert_eq!((disk.disk_bytes, disk.stored_bytes), (34 << 30, 50 << 20));
    assert!(disk.reserved > Money::from_micros(1_600_000), "30 days of 34 GiB: {disk:?}");
    let instance = rented.double.inside().disks.asked[0].instance.clone();
    assert_eq!(instance, "i-1");
    let shown = kept.replica().await.expect("the replica");
    let view = shown.kept.expect("it is kept");
    assert_eq!((view.provider.as_str(), view.monthly), ("lab", disk.monthly()));
    assert!(view.monthly > Money::ZERO && view.since_ms.is_some() && shown.problem.is_empty());
    // Its home keeps what the snapshot has.
    assert_eq!(kept.home.inside().replicas.pins, pin);
    assert_eq!(kept.first.inside().replicas.pulls, pulls, "no round began meanwhile");

    rented.rent("rent-2").await;
    rented.wait_for_state("rent-2", RentalState::Starting).await;
    let asked = rented.double.inside().asked.last().cloned().expect("a request");
    let pool = asked.pool.expect("a disk for its pool");
    assert_eq!((pool.bytes, pool.snapshot), (34 << 30, disk.snapshot));
    assert!(asked.user_data.contains("perigee-pool"), "{}", asked.user_data);
    let second = FakeHost::start("rent-2", "lab").await;
    second.inside().pool_free_bytes = Some(1 << 40);
    second.inside().replicas.points = kept.first.inside().replicas.points.clone();
    let registered = hosts::register(&rented.cluster, &second.id, second.addresses.clone());
    registered.await.expect("it registers");
    let gone = kept.nothing_is_left().await;
    assert!(gone.why.contains("rent-2") && gone.spent > Some(Money::ZERO), "{gone:?}");
    let at_second = async || {
        let shown = kept.replica().await?;
        let is_there = shown.host == second.id && shown.behind_bytes.is_some();
        (is_there && shown.kept.is_none()).then_some(shown)
    };
    let shown = wait_for("the replica at the next host", at_second).await;
    assert_eq!((shown.points, shown.problem.as_str()), (1, ""));
    assert_eq!(second.inside().replicas.pulls, 0, "its point is not older than an hour");
}

#[tokio::test]
async fn what_is_not_worth_its_price_is_not_kept_and_the_host_goes() {
    for (price, days_ago, why) in
        [(50_000, 31, "is not known"), (50_000_000_000, 0, "keeping costs")]
    {
        let kept = Kept::up().await;
        {
            let disks = &mut kept.rented.double.inside().disks;
            (disks.price, disks.priced_days_ago) = (Some(price), days_ago);
        }
        // What would be paid for.
        kept.first.inside().pool_data_bytes = 50 << 20;
        kept.give_back().await;
        let gone = kept.nothing_is_left().await;
        assert!(gone.why.contains(why) && gone.asked_ms.is_none(), "{gone:?}");
        assert!(kept.rented.double.inside().disks.asked.is_empty());
    }
}

#[tokio::test]
async fn a_provider_that_refuses_keeps_no_host() {
    let kept = Kept::up().await;
    kept.rented.double.inside().disks.does = [Does::Refuses(CloudErrorKind::NotAllowed)].into();
    kept.give_back().await;
    let gone = kept.nothing_is_left().await;
    assert!(gone.why.contains("not allowed"), "{gone:?}");
}

#[tokio::test]
async fn a_snapshot_whose_answer_was_lost_is_found_and_one_that_was_not_made_is_given_up() {
    let kept = Kept::up().await;
    kept.rented.double.inside().disks.does = [Does::LosesAnswer].into();
    kept.give_back().await;
    kept.wait_for_disk(KeptState::Kept).await;
    assert_eq!((kept.snapshots(), kept.rented.double.inside().disks.asked.len()), (1, 1));
    kept.rented.nothing_wrong();
    let kept = Kept::up().await;
    kept.rented.double.inside().disks.does = [Does::LosesRequest].into();
    kept.give_back().await;
    let gone = kept.nothing_is_left().await;
    assert_eq!(
        (gone.spent, gone.why.as_str()),
        (Some(Money::ZERO), "the provider has no snapshot of it")
    );
}

#[tokio::test]
async fn a_replica_that_is_dropped_ends_what_is_kept_of_it() {
    let kept = Kept::up().await;
    kept.give_back().await;
    kept.wait_for_disk(KeptState::Kept).await;
    let site = SiteId::new("lab").expect("a name");
    replicas::stop(&kept.rented.cluster, &data_volume(), &site).await.expect("it is dropped");
    let gone = kept.nothing_is_left().await;
    assert!(gone.why.contains("dropped"), "{gone:?}");
    let is_free = async || kept.home.inside().replicas.pins.is_empty().then_some(());
    wait_for("its home to keep nothing for it", is_free).await;
}

/// No volume with the name of the dropped one could have a replica there.
#[tokio::test]
async fn what_a_kept_disk_has_of_a_replica_that_was_dropped_meanwhile_is_dropped_at_the_next_host()
{
    let kept = Kept::up().await;
    let other = VolumeName::new("other").expect("a name");
    kept.replicate(&other).await;
    kept.give_back().await;
    let disk = kept.wait_for_disk(KeptState::Kept).await;
    assert_eq!(disk.volumes.len(), 2, "{disk:?}");
    let site = SiteId::new("lab").expect("a name");
    replicas::stop(&kept.rented.cluster, &other, &site).await.expect("it is dropped");
    let is_over = async || kept.replica_of(&other).await.is_none().then_some(());
    wait_for("the other replica to be dropped", is_over).await;
    kept.rented.rent("rent-2").await;
    kept.rented.wait_for_state("rent-2", RentalState::Starting).await;
    let second = FakeHost::start("rent-2", "lab").await;
    second.inside().pool_free_bytes = Some(1 << 40);
    // What the snapshot has. Without a point, that of the first volume would be in the way of a new one too.
    second.inside().replicas.points = kept.first.inside().replicas.points.clone();
    let registered = hosts::register(&kept.rented.cluster, &second.id, second.addresses.clone());
    registered.await.expect("it registers");
    kept.nothing_is_left().await;
    assert_eq!(second.inside().replicas.dropped, [other]);
    assert!(kept.first.inside().replicas.dropped.is_empty());
}

#[tokio::test]
async fn a_host_that_is_ended_at_once_has_no_snapshot_begun() {
    let kept = Kept::up().await;
    let cluster = &kept.rented.cluster;
    // It is empty before it is given back.
    let ask = DrainHost { dry_run: false };
    drain::drain(cluster, &kept.first.id, "ann".to_owned(), ask).await.expect("it is drained");
    kept.rented.end("rent-1", true).await;
    kept.rented.goes_down_with_instance(&kept.first).await;
    kept.rented.wait_for_state("rent-1", RentalState::Gone).await;
    kept.has_compared().await;
    assert_eq!(kept.disk().await.map(|kept| kept.why), None);
    assert!(kept.rented.double.inside().disks.asked.is_empty());
}

#[tokio::test]
async fn a_replica_whose_host_was_given_back_long_ago_is_made_anew_at_the_next_host() {
    let kept = Kept::up().await;
    kept.rented.double.inside().disks.price = None;
    kept.give_back().await;
    // A rental's record is kept for 31 days.
    kept.rented.cluster.clock.pretend_passed(Duration::from_secs(40 * 86_400));
    kept.rented.has_looked().await;
    assert_eq!(kept.rented.get("rent-1").state, RentalState::Gone, "it is not forgotten");
    assert_eq!(kept.replica().await.expect("the replica").host, kept.first.id);
    let other = kept.joins("lab2").await;
    kept.wait_for_replica_at(&other).await;
    let is_forgotten = async || {
        let rental = rentals::get(&kept.rented.cluster, &id("rent-1"));
        rental.is_err().then_some(())
    };
    wait_for("the rental to be forgotten", is_forgotten).await;
}

#[tokio::test]
async fn once_keeping_has_cost_as_much_as_shipping_it_ends() {
    let kept = Kept::up().await;
    // A week of it costs cents a moment.
    kept.rented.double.inside().disks.stored_bytes = 1 << 50;
    kept.give_back().await;
    let gone = kept.nothing_is_left().await;
    assert!(gone.why.contains("as much as shipping"), "{gone:?}");
    assert!(gone.spent >= Some(gone.shipping), "{gone:?}");
}

impl Rented {
    /// Whoever names the zone gets it, also if it was refused lately.
    async fn rent_at_a(&self, name: &str) {
        let ask = RentHost { zone: Some("a".to_owned()), ..ask(name) };
        rentals::rent(&self.cluster, ask, "ann".to_owned()).await.expect("a rental");
    }
}

#[tokio::test]
async fn a_host_that_does_not_come_leaves_the_disk_to_the_next_one() {
    let kept = Kept::up().await;
    kept.give_back().await;
    let disk = kept.wait_for_disk(KeptState::Kept).await;
    let double = &kept.rented.double;
    // As often as hosts that do not join would end it.
    for name in ["rent-2", "rent-3", "rent-4"] {
        double.inside().does = [Does::Refuses(CloudErrorKind::Quota)].into();
        kept.rented.rent_at_a(name).await;
        kept.rented.wait_for_state(name, RentalState::Gone).await;
        let is_free = async || kept.disk().await.filter(|disk| disk.used_by.is_none());
        wait_for("the disk to be free", is_free).await;
        assert_eq!(kept.failed().await, 0, "{name}: no host was made");
    }
    kept.rented.rent_at_a("rent-5").await;
    kept.rented.wait_for_state("rent-5", RentalState::Starting).await;
    assert_eq!(kept.wait_for_disk(KeptState::Kept).await.snapshot, disk.snapshot);
    let asked = double.inside().asked.clone();
    assert_eq!(asked.len(), 5);
    for (number, new) in asked.iter().enumerate() {
        let snapshot = new.pool.as_ref().and_then(|pool| pool.snapshot.clone());
        assert_eq!(snapshot, disk.snapshot.clone().filter(|_| number > 0), "{number}");
    }
    kept.rented.nothing_wrong();
}

#[tokio::test]
async fn a_disk_of_which_three_hosts_were_made_that_do_not_join_is_deleted() {
    let kept = Kept::up().await;
    kept.give_back().await;
    kept.wait_for_disk(KeptState::Kept).await;
    for (name, failed) in [("rent-2", 1), ("rent-3", 2), ("rent-4", 3)] {
        kept.rented.rent(name).await;
        kept.rented.wait_for_state(name, RentalState::Starting).await;
        kept.rented.end(name, true).await;
        kept.rented.wait_for_state(name, RentalState::Gone).await;
        wait_for("it to count", async || (kept.failed().await == failed).then_some(())).await;
    }
    let gone = kept.nothing_is_left().await;
    assert!(gone.why.contains("3 hosts"), "{gone:?}");
}

#[tokio::test]
async fn a_host_of_the_site_that_did_not_get_the_disk_gets_the_replica_and_the_disk_is_deleted() {
    let kept = Kept::up().await;
    kept.give_back().await;
    kept.wait_for_disk(KeptState::Kept).await;
    let other = kept.joins("lab2").await;
    kept.wait_for_replica_at(&other).await;
    let gone = kept.nothing_is_left().await;
    assert!(gone.why.contains("dropped"), "{gone:?}");
}

#[tokio::test]
async fn a_provider_that_never_lists_its_snapshots_holds_no_replica_for_ever() {
    let kept = Kept::up().await;
    kept.rented.double.inside().disks.hides_list = true;
    kept.rented.end("rent-1", false).await;
    kept.wait_for_disk(KeptState::Wanted).await;
    kept.has_compared().await;
    assert_eq!(kept.wait_for_disk(KeptState::Wanted).await.why, "", "its host waits");
    // The host would end by itself after 10 minutes.
    kept.rented.end("rent-1", true).await;
    kept.rented.goes_down_with_instance(&kept.first).await;
    kept.rented.wait_for_state("rent-1", RentalState::Gone).await;
    let gone = kept.nothing_is_left().await;
    assert_eq!((gone.why.as_str(), gone.asked_ms), ("its host has ended before", None));
    let other = kept.joins("lab2").await;
    kept.wait_for_replica_at(&other).await;
    assert!(kept.rented.double.inside().disks.asked.is_empty());
}

#[tokio::test]
async fn while_the_home_is_lost_the_disk_stays_and_no_replica_is_made_anew() {
    let kept = Kept::up().await;
    kept.give_back().await;
    kept.wait_for_disk(KeptState::Kept).await;
    kept.home.inside().down = true;
    kept.wait_for_home(HostState::Unreachable).await;
    let other = kept.joins("lab2").await;
    kept.rented.double.inside().disks.price = None;
    kept.has_compared().await;
    let disk = kept.wait_for_disk(KeptState::Kept).await;
    let shown = kept.replica().await.expect("the replica");
    assert_eq!((kept.snapshots(), shown.host.as_str()), (1, "rent-1"), "{disk:?}");
    kept.home.inside().down = false;
    kept.wait_for_home(HostState::Up).await;
    kept.wait_for_replica_at(&other).await;
    kept.nothing_is_left().await;
}

#[tokio::test]
async fn a_snapshot_of_a_cluster_whose_file_has_no_price_any_more_is_deleted() {
    let kept = Kept::up().await;
    kept.give_back().await;
    kept.wait_for_disk(KeptState::Kept).await;
    kept.rented.double.inside().disks.price = None;
    kept.nothing_is_left().await;
    kept.rented.double.inside().disks.make(Some("rent-9"));
    wait_for("its end", async || (kept.snapshots() == 0).then_some(())).await;
}

#[tokio::test]
async fn a_request_that_may_have_been_made_is_repeated_with_the_same_disk() {
    let kept = Kept::up().await;
    // It was asked for before the disk was kept.
    let rental =
        Rental { requested: perigee_model::rental::states::Requested::Perhaps, ..rental("rent-2") };
    kept.give_back().await;
    let disk = kept.wait_for_disk(KeptState::Kept).await;
    let pool = async |rental: &Rental| {
        let cluster = &kept.rented.cluster;
        let pool = rentals::pool_disk_of(cluster, &kept.rented.double, rental).await;
        pool.expect("the store").expect("a disk").snapshot
    };
    assert_eq!(pool(&rental).await, None);
    let nothing = perigee_model::rental::states::Requested::Nothing;
    let first = Rental { requested: nothing, ..rental.clone() };
    assert_eq!(pool(&first).await, disk.snapshot);
}

#[tokio::test]
async fn a_snapshot_that_no_record_owns_is_deleted() {
    let kept = Kept::up().await;
    for tag in [None, Some("rent-9")] {
        kept.rented.double.inside().disks.make(tag);
    }
    wait_for("their end", async || (kept.snapshots() == 0).then_some(())).await;
    kept.rented.nothing_wrong();
}

#[tokio::test]
async fn without_a_price_a_pool_has_no_disk_of_its_own() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    assert_eq!(rented.double.inside().asked[0].pool, None);
}
