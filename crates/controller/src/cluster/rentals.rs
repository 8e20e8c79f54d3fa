//! Rented hosts: who has machines for rent, the rentals as they were last saved, what is reserved for them and has left their sites, and what the
//! providers' lists said last.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, Shared};
use perigee_cloud::Provider;
use perigee_model::money::Money;
use perigee_model::rental::states::Seen;
use perigee_model::rental::{Instance, InstanceState, Notice, Offer, Rental};
use perigee_model::{HostId, Problem, RentalId};
use tokio::sync::Notify;

use super::ledger::Ledger;
use crate::live::Live;
use crate::records::{LEFT_SITES, LeftSite, RENTALS, Records, RentalRecord};

/// Who has machines for rent, and how much may be spent there.
#[derive(Clone, Default)]
pub struct Renting {
    pub providers: Vec<Arc<dyn Provider>>,
    /// What all rented hosts of the last 30 days together may cost; `None`: nothing is rented.
    pub budget: Live<Option<Money>>,
}

impl fmt::Debug for Renting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.providers.iter().map(|provider| provider.name()).collect();
        f.debug_struct("Renting").field("providers", &names).field("budget", &self.budget).finish()
    }
}

impl Renting {
    /// # Errors
    /// `NotFound` if `providers.yaml` has no such provider.
    pub fn provider(&self, name: &str) -> Result<&Arc<dyn Provider>, Problem> {
        self.providers.iter().find(|provider| provider.name() == name).ok_or_else(|| {
            let known: Vec<&str> = self.providers.iter().map(|provider| provider.name()).collect();
            let why = match known.is_empty() {
                true => "the controller was started without --providers".to_owned(),
                false => format!("the controller's file of providers has {}", known.join(", ")),
            };
            Problem::not_found(format!("provider {name}"), why)
                .next("name it in the file of `perigee controller run --providers`, and start the controller again")
        })
    }
}

/// Intervals and deadlines of rented hosts.
#[derive(Debug, Clone, Copy)]
pub struct RentalTiming {
    /// Between two lists of a provider with rentals that wait for nothing.
    pub compare: Duration,
    /// Between two lists while the instance of a rental comes or goes, and between two requests to end one.
    pub hurry: Duration,
    /// Between two questions for notices, while a spot host is rented.
    pub notices: Duration,
    /// The longest that a provider is waited for, which has a deadline of its own too.
    pub answer: Duration,
    /// A provider that has an instance lists it after so long.
    pub grace: Duration,
    /// Between two requests for an instance.
    pub again: Duration,
    /// From the last request until the host has joined. A join token counts for so long after each request, and less than an hour.
    pub join: Duration,
    /// A rented host that has not heard of its controller for so long powers itself off.
    pub lease: Duration,
}

impl Default for RentalTiming {
    fn default() -> Self {
        Self {
            compare: Duration::from_secs(60),
            hurry: Duration::from_secs(10),
            notices: Duration::from_secs(5),
            answer: Duration::from_secs(180),
            grace: Duration::from_secs(300),
            again: Duration::from_secs(30),
            join: Duration::from_secs(1200),
            lease: Duration::from_secs(600),
        }
    }
}

/// A provider's last list that was complete.
struct List {
    /// When it was asked for.
    begun: Instant,
    instances: Arc<Vec<Instance>>,
}

/// Which lists say something of a rental.
#[derive(Default)]
struct Watch {
    /// Those that were asked for since; `None` while a request is under way.
    from: Option<Instant>,
    /// When the first one was asked for, of those in a row that are without it.
    absent_since: Option<Instant>,
}

/// What a provider offers, once it has said so, or why it does not say.
pub type OffersAnswer = Shared<BoxFuture<'static, Result<Arc<Vec<Offer>>, String>>>;

/// What has left the site of a rented host.
#[derive(Default)]
struct Left {
    /// Because of what is over, as it is stored.
    over: LeftSite,
    /// Because of each source that goes on.
    going_on: BTreeMap<String, u64>,
}

impl Left {
    fn bytes(&self) -> u64 {
        let going_on = self.going_on.values().copied();
        going_on.fold(self.over.bytes(), u64::saturating_add)
    }
}

/// Whom the ledger knows a rental as.
pub fn owner(id: &RentalId) -> String {
    format!("rental/{id}")
}

/// What is known of rented hosts.
pub struct Rentals {
    /// What is reserved for them: their records don't say it.
    ledger: Arc<Ledger>,
    /// By provider: when it was last asked what it offers for plans and for the rule that rents hosts, and its answer.
    offers: Mutex<BTreeMap<String, (Instant, OffersAnswer)>>,
    known: Mutex<BTreeMap<RentalId, Rental>>,
    left: Mutex<BTreeMap<RentalId, Left>>,
    /// Whoever stores what has left a site takes turns.
    pub leaving: tokio::sync::Mutex<()>,
    lists: Mutex<BTreeMap<String, List>>,
    /// Why the last list of a provider did not come.
    no_lists: Mutex<BTreeMap<String, String>>,
    watches: Mutex<BTreeMap<RentalId, Watch>>,
    /// By provider and its id of the instance.
    notices: Mutex<BTreeMap<(String, String), u64>>,
    /// Since when a provider lists an instance that no unfinished rental owns.
    unowned: Mutex<BTreeMap<(String, String), Instant>>,
    /// Wakes those who wait for a list or a person's request.
    pub changed: Notify,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Rentals {
    pub(super) async fn load(records: &Records, ledger: Arc<Ledger>) -> Result<Self, Problem> {
        let rentals = Self {
            ledger,
            offers: Mutex::default(),
            known: Mutex::default(),
            left: Mutex::default(),
            leaving: tokio::sync::Mutex::default(),
            lists: Mutex::default(),
            no_lists: Mutex::default(),
            watches: Mutex::default(),
            notices: Mutex::default(),
            unowned: Mutex::default(),
            changed: Notify::new(),
        };
        for record in records.list::<RentalRecord>(RENTALS).await? {
            rentals.put(&record.view);
        }
        for (key, left) in records.list_each::<LeftSite>(LEFT_SITES).await? {
            let id = key.strip_prefix(LEFT_SITES).and_then(|id| id.parse().ok());
            if let Some(id) = id {
                rentals.put_left(&id, left?);
            }
        }
        Ok(rentals)
    }

    /// Notes what its record says.
    pub fn put(&self, rental: &Rental) {
        lock(&self.known).insert(rental.id.clone(), rental.clone());
    }

    pub fn forget(&self, id: &RentalId) {
        lock(&self.known).remove(id);
        lock(&self.watches).remove(id);
        lock(&self.left).remove(id);
    }

    /// As they were last saved.
    fn saved(&self) -> Vec<Rental> {
        lock(&self.known).values().cloned().collect()
    }

    /// How many are kept.
    pub fn count(&self) -> usize {
        lock(&self.known).len()
    }

    /// All that are kept, sorted by id.
    pub fn all(&self) -> Vec<Rental> {
        self.saved().into_iter().map(|rental| self.with_money(rental)).collect()
    }

    /// The answer of a provider that was asked for its offers so short a time ago, or whose answer is not there yet; if there is none, `ask` asks.
    pub fn offers(
        &self,
        provider: &str,
        max_age: Duration,
        ask: impl FnOnce() -> OffersAnswer,
    ) -> OffersAnswer {
        let mut offers = lock(&self.offers);
        let counts = |(at, answer): &&(Instant, OffersAnswer)| match answer.peek() {
            // It has a deadline of its own.
            None => true,
            Some(Ok(_)) => at.elapsed() < max_age,
            // A problem may be over soon.
            Some(Err(_)) => at.elapsed() < max_age / 10,
        };
        if let Some((_, answer)) = offers.get(provider).filter(counts) {
            return answer.clone();
        }
        let answer = ask();
        offers.insert(provider.to_owned(), (Instant::now(), answer.clone()));
        answer
    }

    /// Those that are not over, sorted by id.
    pub fn all_alive(&self) -> Vec<Rental> {
        let known = lock(&self.known);
        known.values().filter(|rental| !rental.state.is_over()).cloned().collect()
    }

    /// Whether something is rented, or was lately.
    pub fn is_any(&self) -> bool {
        !lock(&self.known).is_empty()
    }

    /// The rental of a host, which may be gone.
    pub fn of_host(&self, host: &HostId) -> Option<Rental> {
        lock(&self.known).values().find(|rental| rental.host == *host).cloned()
    }

    /// The hosts that the cluster has rented by itself, of the rentals that are not over.
    pub fn hosts_by_rule(&self) -> BTreeSet<HostId> {
        let known = lock(&self.known);
        let of_rule = known.values().filter(|one| one.rented_for.is_some() && !one.state.is_over());
        of_rule.map(|rental| rental.host.clone()).collect()
    }

    /// The rentals of the same, by their hosts.
    pub fn by_rule(&self) -> BTreeMap<HostId, Rental> {
        let mut of_rule = self.all_alive();
        of_rule.retain(|one| one.rented_for.is_some());
        let with_money = of_rule.into_iter().map(|rental| self.with_money(rental));
        with_money.map(|rental| (rental.host.clone(), rental)).collect()
    }

    pub fn get(&self, id: &RentalId) -> Option<Rental> {
        let rental = lock(&self.known).get(id).cloned();
        rental.map(|rental| self.with_money(rental))
    }

    /// With what the ledger and the counters say, whatever was saved: what is reserved, until when, what was spent in the end, and what has left
    /// its site.
    pub fn with_money(&self, mut rental: Rental) -> Rental {
        rental.left_bytes = lock(&self.left).get(&rental.id).map_or(0, Left::bytes);
        let entry = self.ledger.entry(&owner(&rental.id));
        rental.spent = entry.as_ref().and_then(|entry| entry.spent);
        rental.reserved = entry.map(|entry| entry.reserved).unwrap_or_default();
        if let Some(spent) = rental.spent.take_if(|_| !rental.state.is_over()) {
            // It was taken for one that is over.
            rental.reserved = spent;
        }
        rental.reserved_until_ms = rental.reserved_until_ms();
        rental
    }

    /// The rental whose host this is, and that is not over.
    pub fn alive_of_host(&self, host: &HostId) -> Option<RentalId> {
        let known = lock(&self.known);
        if known.is_empty() {
            return None;
        }
        // A rental's host has its name.
        let rental = known.get(&RentalId::new(host.as_str()).ok()?)?;
        (!rental.state.is_over() && rental.host == *host).then(|| rental.id.clone())
    }

    /// What has left its site because of a source that goes on.
    pub fn note_leaving(&self, id: &RentalId, source: &str, bytes: u64) {
        let mut left = lock(&self.left);
        let left = left.entry(id.clone()).or_default();
        if left.over.knows(source) {
            return;
        }
        let known = left.going_on.entry(source.to_owned()).or_default();
        *known = bytes.max(*known);
    }

    /// What has left its site because of what is over, as it is stored now.
    pub fn put_left(&self, id: &RentalId, over: LeftSite) {
        let mut left = lock(&self.left);
        let left = left.entry(id.clone()).or_default();
        left.going_on.retain(|source, _| !over.knows(source));
        left.over = over;
    }

    /// A request for the rental's instance begins: no list says anything of it until the request is over.
    pub fn request_begins(&self, id: &RentalId) {
        lock(&self.watches).insert(id.clone(), Watch::default());
    }

    /// Whether it is known which lists say something of the rental.
    pub fn is_watched(&self, id: &RentalId) -> bool {
        lock(&self.watches).get(id).is_some_and(|watch| watch.from.is_some())
    }

    /// Lists that are asked for from now on say something of the rental.
    pub fn look_anew(&self, id: &RentalId) {
        let watch = Watch { from: Some(Instant::now()), absent_since: None };
        lock(&self.watches).insert(id.clone(), watch);
    }

    /// The provider has given a complete list, which was asked for at `begun`.
    pub fn note_list(&self, provider: &str, begun: Instant, instances: Vec<Instance>) {
        let of_provider: Vec<Rental> =
            self.saved().into_iter().filter(|rental| rental.provider == provider).collect();
        let owners = owners(&of_provider, provider);
        let mut watches = lock(&self.watches);
        for rental in &of_provider {
            let Some(watch) = watches.get_mut(&rental.id) else { continue };
            let is_listed = instances.iter().any(|instance| owns(rental, instance, &owners));
            let counts = watch.from.is_some_and(|from| from <= begun);
            watch.absent_since = match (is_listed, counts) {
                (false, true) => watch.absent_since.or(Some(begun)),
                _ => None,
            };
        }
        drop(watches);
        let list = List { begun, instances: Arc::new(instances) };
        lock(&self.lists).insert(provider.to_owned(), list);
        lock(&self.no_lists).remove(provider);
        self.changed.notify_waiters();
    }

    /// The provider has given no list, or none that makes sense.
    pub fn note_no_list(&self, provider: &str, why: &str) {
        lock(&self.no_lists).insert(provider.to_owned(), why.to_owned());
    }

    /// Why the provider's last list did not come; `None` if it came, or if none was asked for yet.
    pub fn no_list(&self, provider: &str) -> Option<String> {
        lock(&self.no_lists).get(provider).cloned()
    }

    /// Whether the provider has given a list since the controller's start. One that never did may hide what is made there.
    pub fn has_listed(&self, provider: &str) -> bool {
        lock(&self.lists).contains_key(provider)
    }

    /// What the provider has last listed of the rental.
    pub fn listed(&self, rental: &Rental) -> Vec<Instance> {
        let lists = lock(&self.lists);
        let list = lists.get(&rental.provider).map(|list| Arc::clone(&list.instances));
        drop(lists);
        let known = lock(&self.known);
        let owners = owners(known.values(), &rental.provider);
        let all = list.iter().flat_map(|list| list.iter());
        all.filter(|instance| owns(rental, instance, &owners)).cloned().collect()
    }

    /// Whether another rental that is not over has this instance.
    pub fn is_anothers(&self, rental: &Rental, instance: &Instance) -> bool {
        let known = lock(&self.known);
        let owner = owners(known.values(), &rental.provider).get(instance.id.as_str()).copied();
        owner.is_some_and(|owner| *owner != rental.id)
    }

    /// What the provider's lists say of the rental.
    pub fn seen(&self, rental: &Rental, grace: Duration) -> Seen {
        let begun = lock(&self.lists).get(&rental.provider).map(|list| list.begun);
        let watches = lock(&self.watches);
        let watch = watches.get(&rental.id);
        let from = watch.and_then(|watch| watch.from);
        let absent_since = watch.and_then(|watch| watch.absent_since);
        drop(watches);
        let (Some(begun), Some(from)) = (begun, from) else { return Seen::NotKnown };
        let all = self.listed(rental);
        let is_there = |instance: &Instance| instance.state != InstanceState::Gone;
        match absent_since {
            _ if all.iter().any(is_there) => Seen::There,
            _ if begun < from => Seen::NotKnown,
            _ if !all.is_empty() => Seen::Ended,
            Some(since) if begun.duration_since(since) >= grace => Seen::AbsentForLong,
            _ => Seen::Absent,
        }
    }

    /// Notes of which instances the provider says that it takes them back.
    pub fn note_notices(&self, provider: &str, all: Vec<Notice>) {
        let mut notices = lock(&self.notices);
        notices.retain(|(of, _), _| of != provider);
        let keyed =
            all.into_iter().map(|one| ((provider.to_owned(), one.instance), one.ends_unix_s));
        notices.extend(keyed);
        drop(notices);
        self.changed.notify_waiters();
    }

    /// When the provider takes the rental's instance back; Unix time. `None` if it has not said so.
    pub fn notice_ms(&self, rental: &Rental) -> Option<u64> {
        let instance = rental.instance.clone()?;
        let ends_s = lock(&self.notices).get(&(rental.provider.clone(), instance)).copied();
        ends_s.map(|ends_s| ends_s.saturating_mul(1000))
    }

    /// The instances of the provider's last list that cost money and that no unfinished rental owned in any list for so long.
    pub fn unowned(&self, provider: &str, grace: Duration) -> Vec<Instance> {
        let Some(list) =
            lock(&self.lists).get(provider).map(|list| (list.begun, Arc::clone(&list.instances)))
        else {
            return Vec::new();
        };
        let (begun, instances) = list;
        let rentals = self.saved();
        let owners = owners(&rentals, provider);
        let is_owned = |instance: &Instance| {
            let owned_by = |one: &Rental| one.provider == provider && owns(one, instance, &owners);
            rentals.iter().any(|one| !one.state.is_over() && owned_by(one))
        };
        let mut since = lock(&self.unowned);
        let (mut still, mut old) = (BTreeMap::new(), Vec::new());
        for instance in instances.iter().filter(|one| one.state != InstanceState::Gone) {
            if is_owned(instance) {
                continue;
            }
            let key = (provider.to_owned(), instance.id.clone());
            let first = since.get(&key).copied().unwrap_or(begun);
            still.insert(key, first);
            if begun.duration_since(first) >= grace {
                old.push(instance.clone());
            }
        }
        since.retain(|(of, _), _| of != provider);
        since.append(&mut still);
        old
    }
}

/// Whose the instances of a provider are by their ids, as the rentals that are not over have them.
fn owners<'a>(
    rentals: impl IntoIterator<Item = &'a Rental>,
    provider: &str,
) -> BTreeMap<&'a str, &'a RentalId> {
    let mut owners = BTreeMap::new();
    for rental in rentals {
        if rental.provider == provider
            && !rental.state.is_over()
            && let Some(instance) = &rental.instance
        {
            owners.entry(instance.as_str()).or_insert(&rental.id);
        }
    }
    owners
}

/// Whether the instance is the rental's: by its id, or by its tag if no other rental has its id. A tag that somebody has changed, or that the provider
/// invents, makes no rental end the host of another one.
fn owns(rental: &Rental, instance: &Instance, owners: &BTreeMap<&str, &RentalId>) -> bool {
    match owners.get(instance.id.as_str()) {
        Some(owner) => **owner == rental.id,
        None => {
            instance.rental.as_deref() == Some(rental.id.as_str())
                || rental.instance.as_ref() == Some(&instance.id)
        }
    }
}
