//! What the providers offer, asked for at most once a minute.

use std::collections::BTreeMap;
use std::time::Instant;

use futures_util::future::join_all;
use perigee_model::rental::{Offer, RENT_DISK_DEFAULT_BYTES, Rental};
use perigee_planner::rent::OFFERS_MOST;

use crate::cluster::Cluster;
use crate::planning::renting::{self, Kind};
use crate::rentals::offers_of;

/// What one provider has said last.
struct Said {
    at: Instant,
    /// `None` if it does not say what it offers: that is not known, and is not nothing.
    offers: Option<Vec<Offer>>,
    problem: String,
}

/// What all have said last.
#[derive(Default)]
pub struct Market(BTreeMap<String, Said>);

impl Market {
    /// Asks those again that were not asked for a minute.
    pub async fn ask(&mut self, cluster: &Cluster) {
        let timing = &cluster.timing;
        let is_old = |name: &str| {
            self.0.get(name).is_none_or(|said| said.at.elapsed() >= timing.renter.offers)
        };
        let asked = cluster.settings.renting.providers.iter().filter(|one| is_old(one.name()));
        let answers = asked.map(async |provider| {
            let answer = offers_of(cluster, provider).await;
            let (offers, problem) = match answer {
                Ok(offers) => (Some(offers), String::new()),
                Err(error) => (None, format!("{}: {}", error.kind, error.message)),
            };
            (provider.name().to_owned(), Said { at: Instant::now(), offers, problem })
        });
        let answers = join_all(answers).await;
        self.0.extend(answers);
    }

    /// The offers with the provider's name: the cheapest for each CPU first, and those without a known price last.
    pub fn offers(&self) -> Vec<(String, Offer)> {
        let all = self.0.iter().flat_map(|(name, said)| {
            said.offers.iter().flatten().map(|offer| (name.clone(), offer.clone()))
        });
        let mut all: Vec<(String, Offer)> = all.collect();
        all.sort_by_cached_key(|(name, offer)| {
            let per_hour = offer.price.per_hour_micros;
            let per_cpu =
                per_hour.map_or(u64::MAX, |micros| micros.get() / u64::from(offer.cpus.max(1)));
            (per_cpu, name.clone(), offer.kind.clone(), offer.zone.clone(), offer.spot)
        });
        all
    }

    /// Who does not say what it offers, and why.
    pub fn not_known(&self) -> Vec<String> {
        let unknown = self.0.iter().filter(|(_, said)| said.offers.is_none());
        unknown
            .map(|(name, said)| format!("what provider {name} offers: {}", said.problem))
            .collect()
    }
}

/// The kinds for which runs are predicted: those of the first offers, and those of hosts that are rented.
pub fn kinds(cluster: &Cluster, offers: &[(String, Offer)], rented: &[Rental]) -> Vec<Kind> {
    let there = rented.iter().filter(|rental| !rental.state.is_over());
    let there = there.map(|rental| Kind {
        provider: rental.provider.clone(),
        offer: rental.offer.clone(),
        site: rental.site.clone(),
    });
    let offered = offers.iter().filter_map(|(provider, offer)| {
        let site = renting::site_of(cluster, provider, &offer.zone)?;
        Some(Kind { provider: provider.clone(), offer: offer.clone(), site })
    });
    let mut all: Vec<Kind> = Vec::new();
    for kind in there.chain(offered) {
        if all.len() < 2 * OFFERS_MOST && !all.iter().any(|one| one.key() == kind.key()) {
            all.push(kind);
        }
    }
    all
}

/// The offers as the rule sees them.
pub fn as_seen(offers: &[(String, Offer)]) -> Vec<Offer> {
    let seen = |(provider, offer): &(String, Offer)| {
        renting::as_seen(provider, offer, RENT_DISK_DEFAULT_BYTES)
    };
    offers.iter().map(seen).collect()
}
