//! The prices that count now: those of the file that the controller was told, as it was when it could last be read, and of rented hosts that
//! the file has no entry for, what their providers have said.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use perigee_model::limits::DOCUMENT_BYTES;
use perigee_model::money::Price;
use perigee_model::prices::{KnownPrice, KnownPrices, PriceList, of_provider};
use perigee_model::rental::Rental;
use perigee_model::{HostId, Problem, SiteId};

use super::rentals::{Rentals, Renting};
use crate::clock::now_ms;
use crate::records::Records;

/// `prices`: the text of the file as it could last be read. A controller that starts while the file is broken goes on with it.
const LAST_GOOD: &str = "prices";

/// The file's prices.
pub struct Prices {
    file: Option<PathBuf>,
    max_ages_s: Arc<MaxAges>,
    records: Records,
    state: Mutex<State>,
}

/// How old the prices of each provider may be, in seconds, as `providers.yaml` says.
#[derive(Default)]
struct MaxAges(BTreeMap<String, u64>);

impl MaxAges {
    fn of(renting: &Renting) -> Self {
        let all = renting.providers.iter();
        Self(all.map(|one| (one.name().to_owned(), one.price_age_max_s())).collect())
    }

    /// What counts of the price of a provider, which may have none of these names any more, and what does not and why.
    fn counts(
        &self,
        list: &PriceList,
        provider: &str,
        price: &Price,
        now_s: u64,
    ) -> (Price, Vec<String>) {
        let max_age_s = self.0.get(provider).copied().unwrap_or_else(|| list.max_age_s());
        of_provider(price, now_s, max_age_s)
    }
}

#[derive(Default)]
struct State {
    list: Arc<PriceList>,
    /// The text that was read last, good or not.
    read: Option<String>,
    /// Why that one does not count.
    problem: Option<Problem>,
}

impl Prices {
    /// Reads the file.
    ///
    /// # Errors
    /// If it can't be read or is no list of prices, and never was: hosts that have to be paid for would cost nothing.
    pub async fn load(
        file: Option<PathBuf>,
        renting: &Renting,
        records: &Records,
    ) -> Result<Self, Problem> {
        let max_ages_s = Arc::new(MaxAges::of(renting));
        let prices = Self { file, max_ages_s, records: records.clone(), state: Mutex::default() };
        let Some(file) = &prices.file else {
            // The next file is another one.
            records.remove(LAST_GOOD).await?;
            return Ok(prices);
        };
        let last_good: Option<String> = records.read(LAST_GOOD).await?;
        if let Some(list) = last_good.and_then(|text| PriceList::parse(&text, &name(file)).ok()) {
            prices.lock().list = Arc::new(list);
            if let Err(problem) = prices.read_again().await {
                tracing::error!("the prices are those of before: {problem}");
            }
            return Ok(prices);
        }
        prices.read_again().await?;
        Ok(prices)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the file again, if there is one. Says whether its prices are others than before.
    ///
    /// # Errors
    /// Why it can't be read, or line and field. The prices of before go on to count.
    pub async fn read_again(&self) -> Result<bool, Problem> {
        let Some(file) = &self.file else { return Ok(false) };
        let path = file.clone();
        let read = tokio::task::spawn_blocking(move || read(&path)).await;
        let read = read.map_err(|e| Problem::internal("can't read the prices", e))?;
        let text = match read {
            Ok(text) => text,
            Err(problem) => {
                let mut state = self.lock();
                (state.read, state.problem) = (None, Some(problem.clone()));
                return Err(problem);
            }
        };
        if self.lock().read.as_ref() == Some(&text) {
            let problem = self.lock().problem.clone();
            return problem.map_or(Ok(false), Err);
        }
        let parsed = PriceList::parse(&text, &name(file));
        if parsed.is_ok() {
            self.records.put(LAST_GOOD, &text).await?;
        }
        let mut state = self.lock();
        state.read = Some(text);
        match parsed {
            Ok(list) => {
                let is_new = *state.list != list;
                (state.list, state.problem) = (Arc::new(list), None);
                Ok(is_new)
            }
            Err(problem) => {
                state.problem = Some(problem.clone());
                Err(problem)
            }
        }
    }

    /// What is known now, for people. `site_of` says at which site a host is.
    pub fn known(
        &self,
        rentals: &Rentals,
        site_of: impl Fn(&HostId) -> Option<SiteId>,
    ) -> KnownPrices {
        let state = self.lock();
        let problem = state.problem.as_ref().map(ToString::to_string).unwrap_or_default();
        let list = Arc::clone(&state.list);
        drop(state);
        let file = self.file.as_ref().map(|file| file.display().to_string());
        let now_s = now_ms() / 1000;
        let mut prices = list.known(now_s, site_of);
        prices.extend(rentals.all_alive().into_iter().filter_map(|rental| {
            let (provider, price) = (&rental.provider, &rental.offer.price);
            let (price, unknown) = self.max_ages_s.counts(&list, provider, price, now_s);
            let price = Price { source: format!("rental {}", rental.id), ..price };
            let host = Some(rental.host.clone());
            let is_named = list.covers(&rental.host, &rental.site);
            (!is_named).then_some(KnownPrice { site: None, host, price, unknown })
        }));
        KnownPrices { file, problem, prices }
    }

    /// The prices as they count now; `None` if nothing costs anything.
    pub fn now(&self, rentals: &Rentals) -> Option<PricesNow> {
        let list = Arc::clone(&self.lock().list);
        let mut now = PricesNow {
            list,
            max_ages_s: Arc::clone(&self.max_ages_s),
            now_s: now_ms() / 1000,
            of_sites: HashMap::new(),
            rented: HashMap::new(),
        };
        let mut alike: HashMap<_, Arc<Price>> = HashMap::new();
        for rental in rentals.all_alive() {
            let price = now.said(&rental);
            // Hosts of one price are looked at together, whenever they were rented.
            let micros = [
                price.per_hour_micros,
                price.egress_per_gib_micros,
                price.disk_per_gib_month_micros,
            ];
            let price = alike.entry((micros, price.minimum_s)).or_insert_with(|| Arc::new(price));
            now.rented.insert(rental.host, Arc::clone(price));
        }
        let is_any = !now.list.is_empty() || rentals.is_any();
        is_any.then_some(now)
    }
}

/// The prices at one moment. Hosts that cost the same share one.
pub struct PricesNow {
    list: Arc<PriceList>,
    max_ages_s: Arc<MaxAges>,
    now_s: u64,
    of_sites: HashMap<SiteId, Option<Arc<Price>>>,
    rented: HashMap<HostId, Arc<Price>>,
}

impl PricesNow {
    /// What counts of what the provider has said.
    fn said(&self, rental: &Rental) -> Price {
        let (provider, price) = (&rental.provider, &rental.offer.price);
        self.max_ages_s.counts(&self.list, provider, price, self.now_s).0
    }

    /// What the host of a rental costs, which may be gone.
    pub fn of_rental(&mut self, rental: &Rental) -> Option<Arc<Price>> {
        match self.list.covers(&rental.host, &rental.site) {
            true => self.of(&rental.host, &rental.site),
            false => Some(Arc::new(self.said(rental))),
        }
    }

    /// What a host costs; `None` if it is the users' own. An entry of the file counts before what a provider has said.
    pub fn of(&mut self, host: &HostId, site: &SiteId) -> Option<Arc<Price>> {
        if self.list.names(host) {
            return self.list.of(Some(host), site, self.now_s).map(Arc::new);
        }
        if let Some(price) = self.rented.get(host).filter(|_| !self.list.covers(host, site)) {
            return Some(Arc::clone(price));
        }
        if let Some(price) = self.of_sites.get(site) {
            return price.clone();
        }
        let price = self.list.of(None, site, self.now_s).map(Arc::new);
        self.of_sites.insert(site.clone(), price.clone());
        price
    }
}

fn name(file: &Path) -> String {
    file.display().to_string()
}

fn read(file: &Path) -> Result<String, Problem> {
    use std::io::Read;
    let what = || format!("can't read the prices in {}", file.display());
    let opened = std::fs::File::open(file).map_err(|e| Problem::invalid(what(), e))?;
    let most = u64::try_from(DOCUMENT_BYTES.max).unwrap_or(u64::MAX);
    let mut text = String::new();
    // One byte more, so that a longer one is refused and not cut.
    let mut bounded = opened.take(most.saturating_add(1));
    bounded.read_to_string(&mut text).map_err(|e| Problem::invalid(what(), e))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ledger::Ledger;
    use crate::store::SqliteStore;

    fn prices(per_hour: &str) -> String {
        format!("sites:\n  cloud: {{machine: {per_hour}/h, as-of: 2025-01-01, max-age: 3650d}}\n")
    }

    fn per_hour(prices: &Prices, rentals: &Rentals) -> Option<u64> {
        let (host, site) = ("cloud1".parse().expect("a name"), "cloud".parse().expect("a name"));
        Some(prices.now(rentals)?.of(&host, &site)?.per_hour_micros?.get())
    }

    #[tokio::test]
    async fn a_file_that_is_broken_keeps_the_last_good_prices_also_over_a_restart() {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("prices.yaml");
        let store = SqliteStore::open(&dir.path().join("state.db")).expect("a store");
        let records = Records::new(Arc::new(store));
        let ledger = Arc::new(Ledger::load(&records).await.expect("a ledger"));
        let rentals = &Rentals::load(&records, ledger).await.expect("no rentals");
        let renting = &Renting::default();
        let load = async || Prices::load(Some(file.clone()), renting, &records).await;
        std::fs::write(&file, "sites: [").expect("write");
        assert!(load().await.is_err(), "no prices are known that could count");
        std::fs::write(&file, prices("$1")).expect("write");
        let read = load().await.expect("prices");
        assert_eq!(per_hour(&read, rentals), Some(1_000_000));
        std::fs::write(&file, prices("$2")).expect("write");
        assert!(read.read_again().await.expect("prices"));
        assert!(!read.read_again().await.expect("the same prices"));
        std::fs::write(&file, prices("2 dollars")).expect("write");
        for _ in 0..2 {
            let problem = read.read_again().await.expect_err("it is broken");
            assert!(problem.what.contains("prices.yaml:2: sites.cloud.machine"), "{problem}");
        }
        assert_eq!(per_hour(&read, rentals), Some(2_000_000));
        let known = read.known(rentals, |_| None);
        assert!(
            known.problem.contains("sites.cloud.machine") && known.prices.len() == 1,
            "{known:?}"
        );
        let again = load().await.expect("the last good prices");
        assert_eq!(per_hour(&again, rentals), Some(2_000_000));
        assert!(!again.known(rentals, |_| None).problem.is_empty());
        std::fs::remove_file(&file).expect("remove");
        assert!(again.read_again().await.is_err());
        assert_eq!(per_hour(&again, rentals), Some(2_000_000));
        let none = Prices::load(None, renting, &records).await.expect("nothing to read");
        assert!(none.now(rentals).is_none());
    }

    #[tokio::test]
    async fn hosts_with_one_entry_share_one_price() {
        let list = PriceList::parse(&prices("$1"), "p.yaml").expect("prices");
        let mut now = PricesNow {
            list: Arc::new(list),
            max_ages_s: Arc::default(),
            now_s: now_ms() / 1000,
            of_sites: HashMap::new(),
            rented: HashMap::new(),
        };
        let mut of = |host: &str, site: &str| {
            now.of(&host.parse().expect("a name"), &site.parse().expect("a name"))
        };
        let (one, other) = (of("cloud1", "cloud"), of("cloud2", "cloud"));
        assert!(Arc::ptr_eq(&one.expect("a price"), &other.expect("a price")));
        assert_eq!(of("home1", "home"), None);
    }
}
