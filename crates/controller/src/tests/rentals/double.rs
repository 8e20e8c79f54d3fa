//! A provider made of memory, which lists late, loses answers, lies and hangs as a test says.
//!
//! What it does at a time is worked out when it is asked, by the one clock that the controller has too. So it is never later than it says, however
//! busy the machine is.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt as _};
use perigee_cloud::{CloudError, CloudErrorKind, Provider, Snapshots};
use perigee_model::money::{Money, PRICE_AGE_S_DEFAULT, Price};
use perigee_model::rental::states::{RentalState, Requested};
use perigee_model::rental::{Instance, InstanceState, NewInstance, Notice, Offer};

use crate::clock::now_ms;
use crate::cluster::Cluster;

/// What becomes of a request for an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    Makes,
    /// It makes an instance, and the answer is lost.
    LosesAnswer,
    /// It has made none, and the answer is lost.
    LosesRequest,
    /// It answers nothing, and makes an instance a moment later.
    MakesLate,
    /// It answers with an instance that has no id, and has made one.
    Nonsense,
    /// It makes none, and answers with the instance that it has made first, with the tag of this request.
    GivesAnothers,
    Refuses(CloudErrorKind),
}

/// What becomes of a request for a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lists {
    Well,
    Fails,
    Hangs,
    /// With an instance that has no id.
    Nonsense,
    /// The account may not list.
    Forbidden,
}

/// An instance at the provider.
#[derive(Debug, Clone)]
pub struct Made {
    pub instance: Instance,
    /// From then on it is there, and a moment later it is listed.
    from: Instant,
    /// From when until when it costs money, in the time that the controller's clock has seen to pass.
    paid_ms: (u64, Option<u64>),
}

#[derive(Default)]
pub struct Inside {
    pub made: Vec<Made>,
    /// What the next requests lead to; then it makes what it is asked for.
    pub does: VecDeque<Does>,
    pub lists: VecDeque<Lists>,
    /// The next requests to end an instance fail.
    pub fails_ends: u32,
    /// Those after them have no answer, and end nothing.
    pub hangs_ends: u32,
    /// It makes this kind, whatever it is asked for.
    pub makes_kind: Option<String>,
    /// How often it was asked for a list.
    pub list_requests: u32,
    pub honours_tokens: bool,
    /// How long after it was made an instance is listed.
    pub listed_after: Duration,
    /// It does not say what it offers.
    pub hides_offers: bool,
    /// The lists lack all instances.
    pub hides_all: bool,
    /// The address of each instance that is made.
    pub address: Option<String>,
    /// What `m1` costs at `a`; `None`: as [`offer`] says.
    pub price: Option<Price>,
    pub asked: Vec<NewInstance>,
    /// What it keeps of disks.
    pub disks: super::kept::Disks,
    pub notices: Vec<Notice>,
    /// It does not say what it offers while that is so.
    pub hangs_offers: bool,
    /// The controller's own part of it panics when it is asked what it offers.
    pub panics_at_offers: bool,
    /// The quota in which all of its kinds count.
    pub quota: Option<String>,
    /// Its prices are so old.
    pub offered_days_ago: u64,
    /// How old they may be, in seconds; `None`: as by default.
    pub price_age_max_s: Option<u64>,
    /// What must not happen, and did.
    pub wrong: Vec<String>,
    /// Whose requests these are.
    pub cluster: Weak<Cluster>,
    count: u32,
}

/// The provider `lab`.
#[derive(Clone, Default)]
pub struct Double(Arc<Mutex<Inside>>);

/// A request whose answer is late makes an instance so long after it.
const LATE: Duration = Duration::from_millis(60);

impl Double {
    pub fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().expect("no panic under the lock")
    }

    /// The instances that cost money now.
    pub fn alive(&self) -> Vec<Instance> {
        let now = Instant::now();
        let inside = self.inside();
        let alive = inside.made.iter().filter(|made| is_alive(made, now));
        alive.map(|made| made.instance.clone()).collect()
    }

    /// How many instances there ever were.
    pub fn made(&self) -> usize {
        self.inside().made.len()
    }

    /// What all instances have cost, those that run until now, with a disk of this size each.
    pub fn bill(&self, disk_bytes: u64) -> Money {
        let inside = self.inside();
        let now_ms = inside.passed_ms();
        let cost = |made: &Made| {
            let (from_ms, to_ms) = made.paid_ms;
            let seconds = to_ms.unwrap_or(now_ms).saturating_sub(from_ms) / 1000;
            let mut price = offer("m1", "a", false).price;
            if made.instance.zone == "b" {
                price.per_hour_micros = DEAR;
            }
            let disk = price.disk(disk_bytes, seconds).expect("a price");
            price.machine(seconds).expect("a price").plus(disk)
        };
        inside.made.iter().map(cost).sum()
    }

    /// Somebody else than the controller makes an instance with such a tag.
    pub fn plant(&self, rental: Option<&str>) -> String {
        let mut inside = self.inside();
        let instance = inside.instance(rental, ("m1", "a", false));
        let id = instance.id.clone();
        let paid_ms = (inside.passed_ms(), None);
        inside.made.push(Made { instance, from: Instant::now(), paid_ms });
        id
    }

    /// The provider takes an instance back.
    pub fn take_back(&self, id: &str) {
        self.change(id, |instance| instance.state = InstanceState::Gone);
    }

    /// From now on it says something else of an instance.
    pub fn change(&self, id: &str, change: impl Fn(&mut Instance)) {
        let mut inside = self.inside();
        let made = inside.made.iter_mut().find(|made| made.instance.id == id);
        change(&mut made.expect("the instance").instance);
    }
}

fn is_alive(made: &Made, now: Instant) -> bool {
    made.from <= now && made.instance.state != InstanceState::Gone
}

impl Inside {
    /// The time that the controller's clock has seen to pass.
    pub fn passed_ms(&self) -> u64 {
        self.cluster.upgrade().map_or(0, |cluster| cluster.clock.passed_ms())
    }

    fn make(&mut self, new: &NewInstance, from: Instant) -> Instance {
        let now = Instant::now();
        let same = |made: &&Made| made.instance.rental.as_deref() == Some(new.rental.as_str());
        if let Some(known) = self.made.iter().find(same).filter(|_| self.honours_tokens) {
            return known.instance.clone();
        }
        if self.made.iter().filter(same).any(|made| made.instance.state != InstanceState::Gone) {
            self.wrong.push(format!("a second instance of {}", new.rental));
        }
        let kind = self.makes_kind.clone().unwrap_or_else(|| new.kind.clone());
        let place = (kind.as_str(), new.zone.as_str(), new.spot);
        let instance = self.instance(Some(&new.rental), place);
        let paid_ms = (self.passed_ms(), None);
        self.made.push(Made { instance: instance.clone(), from: from.max(now), paid_ms });
        instance
    }

    fn instance(
        &mut self,
        rental: Option<&str>,
        (kind, zone, spot): (&str, &str, bool),
    ) -> Instance {
        self.count += 1;
        Instance {
            id: format!("i-{}", self.count),
            rental: rental.map(str::to_owned),
            state: InstanceState::Running,
            kind: kind.to_owned(),
            zone: zone.to_owned(),
            spot,
            address: self.address.clone(),
            started_unix_s: Some(u64::from(self.count)),
        }
    }

    /// The record says that it asks, and the money is reserved, before it asks.
    fn check_recorded(&mut self, new: &NewInstance) {
        let Some(cluster) = self.cluster.upgrade() else { return };
        let snapshot = new.pool.as_ref().and_then(|pool| pool.snapshot.as_ref());
        if snapshot.is_some_and(|id| !self.disks.made.iter().any(|one| one.id == *id)) {
            self.wrong.push(format!("a disk of {snapshot:?}, which is not there"));
        }
        let id = new.rental.parse().expect("the id of a rental");
        let Some(rental) = cluster.rentals.get(&id) else {
            return self.wrong.push(format!("{id} was asked for, and has no record"));
        };
        let is_recorded = rental.state == RentalState::Asked
            && rental.requested == Requested::Perhaps
            && rental.reserved > Money::ZERO;
        if !is_recorded {
            self.wrong.push(format!("asked for before that was recorded: {rental:?}"));
        }
        let reserved: Money = cluster
            .rentals
            .all()
            .iter()
            .filter(|rental| !rental.state.is_over())
            .map(|rental| rental.reserved)
            .sum();
        let budget = cluster.settings.renting.budget.get().expect("a budget");
        if reserved > budget {
            self.wrong.push(format!("{reserved} is reserved of {budget}"));
        }
    }
}

/// What an hour costs at `b`.
const DEAR: Option<NonZeroU64> = NonZeroU64::new(3_000_000);

/// What the provider offers: a dollar an hour.
pub fn offer(kind: &str, zone: &str, spot: bool) -> Offer {
    Offer {
        kind: kind.to_owned(),
        zone: zone.to_owned(),
        spot,
        cpus: 4,
        memory_bytes: 8 << 30,
        kvm: Some(true),
        price: Price {
            per_hour_micros: std::num::NonZeroU64::new(1_000_000),
            minimum_s: 60,
            egress_per_gib_micros: None,
            disk_per_gib_month_micros: std::num::NonZeroU64::new(100_000),
            source: "test".to_owned(),
            as_of_unix_s: now_ms() / 1000,
        },
    }
}

pub fn fails<T>(kind: CloudErrorKind) -> Result<T, CloudError> {
    Err(CloudError { kind, message: "as the test says".to_owned() })
}

impl Provider for Double {
    fn name(&self) -> &str {
        "lab"
    }

    fn price_age_max_s(&self) -> u64 {
        self.inside().price_age_max_s.unwrap_or(PRICE_AGE_S_DEFAULT)
    }

    fn quota_of(&self, _: &str) -> Option<String> {
        self.inside().quota.clone()
    }

    fn offers(&self) -> BoxFuture<'_, Result<Vec<Offer>, CloudError>> {
        let mut unknown = offer("unknown", "a", false);
        unknown.price.per_hour_micros = None;
        let mut old = offer("old", "a", false);
        old.price.as_of_unix_s -= 31 * 86_400;
        let dear = Price { per_hour_micros: DEAR, ..offer("m1", "b", false).price };
        let usual = offer("m1", "a", false);
        let price = self.inside().price.clone().unwrap_or(usual.price.clone());
        let mut all = vec![
            Offer { price: dear, ..offer("m1", "b", false) },
            Offer { price, ..usual },
            offer("m1", "a", true),
            unknown,
            old,
        ];
        let age_s = self.inside().offered_days_ago * 86_400;
        all.iter_mut().for_each(|offer| offer.price.as_of_unix_s -= age_s);
        let hides = self.inside().hides_offers;
        let panics = self.inside().panics_at_offers;
        async move {
            assert!(!panics, "as the test says");
            while self.inside().hangs_offers {
                tokio::time::sleep(LATE).await;
            }
            if hides { fails(CloudErrorKind::Unclear) } else { Ok(all) }
        }
        .boxed()
    }

    fn create<'a>(&'a self, new: &'a NewInstance) -> BoxFuture<'a, Result<Instance, CloudError>> {
        async move {
            let does = {
                let mut inside = self.inside();
                inside.check_recorded(new);
                inside.asked.push(new.clone());
                let now = Instant::now();
                let does = inside.does.pop_front().unwrap_or(Does::Makes);
                match does {
                    Does::Makes => return Ok(inside.make(new, now)),
                    Does::LosesAnswer => drop(inside.make(new, now)),
                    Does::MakesLate => drop(inside.make(new, now + LATE)),
                    Does::Nonsense => {
                        let instance = inside.make(new, now);
                        return Ok(Instance { id: String::new(), ..instance });
                    }
                    Does::GivesAnothers => {
                        let first = inside.made[0].instance.clone();
                        return Ok(Instance { rental: Some(new.rental.clone()), ..first });
                    }
                    Does::LosesRequest | Does::Refuses(_) => {}
                }
                does
            };
            match does {
                Does::Refuses(kind) => fails(kind),
                Does::MakesLate => std::future::pending().await,
                _ => fails(CloudErrorKind::Unclear),
            }
        }
        .boxed()
    }

    fn list<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        async move {
            let (lists, all) = {
                let mut inside = self.inside();
                inside.list_requests += 1;
                let lists = inside.lists.pop_front().unwrap_or(Lists::Well);
                let (now, after) = (Instant::now(), inside.listed_after);
                let is_listed = |made: &&Made| !inside.hides_all && made.from + after <= now;
                let listed = inside.made.iter().filter(is_listed);
                (lists, listed.map(|made| made.instance.clone()).collect::<Vec<_>>())
            };
            match lists {
                Lists::Well => Ok(all),
                Lists::Fails => fails(CloudErrorKind::Throttled),
                Lists::Forbidden => fails(CloudErrorKind::NotAllowed),
                Lists::Hangs => std::future::pending().await,
                Lists::Nonsense => Ok(vec![Instance {
                    id: String::new(),
                    rental: None,
                    state: InstanceState::Unknown,
                    kind: String::new(),
                    zone: String::new(),
                    spot: false,
                    address: None,
                    started_unix_s: None,
                }]),
            }
        }
        .boxed()
    }

    fn end<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            let hangs = {
                let mut inside = self.inside();
                if let Some(left) = inside.fails_ends.checked_sub(1) {
                    inside.fails_ends = left;
                    return fails(CloudErrorKind::Throttled);
                }
                let left = inside.hangs_ends.checked_sub(1);
                inside.hangs_ends = left.unwrap_or(0);
                left.is_some()
            };
            if hangs {
                std::future::pending::<()>().await;
            }
            let mut inside = self.inside();
            let passed_ms = inside.passed_ms();
            if let Some(made) = inside.made.iter_mut().find(|made| made.instance.id == id) {
                made.instance.state = InstanceState::Gone;
                made.paid_ms.1 = made.paid_ms.1.or(Some(passed_ms));
            }
            Ok(())
        }
        .boxed()
    }

    fn notices<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<Notice>, CloudError>> {
        async move { Ok(self.inside().notices.clone()) }.boxed()
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }
}
