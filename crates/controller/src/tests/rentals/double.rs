//! A provider made of memory, which lists late, loses answers, lies and hangs as a test says.
//!
//! What it does at a time is worked out when it is asked, by the one clock that the controller has too. So it is never later than it says, however
//! busy the machine is.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt as _};
use perigee_cloud::{CloudError, CloudErrorKind, Provider};
use perigee_model::money::{Money, Price};
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
}

/// An instance at the provider.
#[derive(Debug, Clone)]
pub struct Made {
    pub instance: Instance,
    /// From then on it is there, and a moment later it is listed.
    from: Instant,
}

#[derive(Default)]
pub struct Inside {
    pub made: Vec<Made>,
    /// What the next requests lead to; then it makes what it is asked for.
    pub does: VecDeque<Does>,
    pub lists: VecDeque<Lists>,
    /// The next requests to end an instance fail.
    pub fails_ends: u32,
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
    pub notices: Vec<Notice>,
    /// It does not say what it offers while that is so.
    pub hangs_offers: bool,
    /// Its prices are so old.
    pub offered_days_ago: u64,
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

    /// Somebody else than the controller makes an instance with such a tag.
    pub fn plant(&self, rental: Option<&str>) -> String {
        let mut inside = self.inside();
        let instance = inside.instance(rental, ("m1", "a", false));
        let id = instance.id.clone();
        inside.made.push(Made { instance, from: Instant::now() });
        id
    }

    /// The provider takes an instance back.
    pub fn take_back(&self, id: &str) {
        let mut inside = self.inside();
        let made = inside.made.iter_mut().find(|made| made.instance.id == id);
        made.expect("the instance").instance.state = InstanceState::Gone;
    }
}

fn is_alive(made: &Made, now: Instant) -> bool {
    made.from <= now && made.instance.state != InstanceState::Gone
}

impl Inside {
    fn make(&mut self, new: &NewInstance, from: Instant) -> Instance {
        let now = Instant::now();
        let same = |made: &&Made| made.instance.rental.as_deref() == Some(new.rental.as_str());
        if let Some(known) = self.made.iter().find(same).filter(|_| self.honours_tokens) {
            return known.instance.clone();
        }
        if self.made.iter().filter(same).any(|made| made.instance.state != InstanceState::Gone) {
            self.wrong.push(format!("a second instance of {}", new.rental));
        }
        let place = (new.kind.as_str(), new.zone.as_str(), new.spot);
        let instance = self.instance(Some(&new.rental), place);
        self.made.push(Made { instance: instance.clone(), from: from.max(now) });
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
        let budget = cluster.settings.renting.budget.expect("a budget");
        if reserved > budget {
            self.wrong.push(format!("{reserved} is reserved of {budget}"));
        }
    }
}

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

fn fails<T>(kind: CloudErrorKind) -> Result<T, CloudError> {
    Err(CloudError { kind, message: "as the test says".to_owned() })
}

impl Provider for Double {
    fn name(&self) -> &str {
        "lab"
    }

    fn offers(&self) -> BoxFuture<'_, Result<Vec<Offer>, CloudError>> {
        let mut unknown = offer("unknown", "a", false);
        unknown.price.per_hour_micros = None;
        let dear = Price {
            per_hour_micros: std::num::NonZeroU64::new(3_000_000),
            ..offer("m1", "b", false).price
        };
        let usual = offer("m1", "a", false);
        let price = self.inside().price.clone().unwrap_or(usual.price.clone());
        let mut all = vec![
            Offer { price: dear, ..offer("m1", "b", false) },
            Offer { price, ..usual },
            offer("m1", "a", true),
            unknown,
        ];
        let age_s = self.inside().offered_days_ago * 86_400;
        all.iter_mut().for_each(|offer| offer.price.as_of_unix_s -= age_s);
        let hides = self.inside().hides_offers;
        async move {
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
                let lists = inside.lists.pop_front().unwrap_or(Lists::Well);
                let (now, after) = (Instant::now(), inside.listed_after);
                let is_listed = |made: &&Made| !inside.hides_all && made.from + after <= now;
                let listed = inside.made.iter().filter(is_listed);
                (lists, listed.map(|made| made.instance.clone()).collect::<Vec<_>>())
            };
            match lists {
                Lists::Well => Ok(all),
                Lists::Fails => fails(CloudErrorKind::Throttled),
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
            let mut inside = self.inside();
            if let Some(left) = inside.fails_ends.checked_sub(1) {
                inside.fails_ends = left;
                return fails(CloudErrorKind::Throttled);
            }
            if let Some(made) = inside.made.iter_mut().find(|made| made.instance.id == id) {
                made.instance.state = InstanceState::Gone;
            }
            Ok(())
        }
        .boxed()
    }

    fn notices<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<Notice>, CloudError>> {
        async move { Ok(self.inside().notices.clone()) }.boxed()
    }
}
