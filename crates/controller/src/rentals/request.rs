//! What people ask for: offers, a host, its end, and what became of it.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::join_all;
use perigee_cloud::{CloudErrorKind, Provider};
use perigee_model::limits::{RENT_DISK_BYTES, RENT_FOR_S, RENTALS};
use perigee_model::money::Money;
use perigee_model::rental::states::{RentalState, Requested};
use perigee_model::rental::{
    EndRental, Offer, OfferRefused, ProviderOffers, RENT_DISK_DEFAULT_BYTES, RentHost, Rental,
    RentalStep,
};
use perigee_model::renting::RentedFor;
use perigee_model::{HostId, Problem, RentalId, SiteId};

use super::{money, offered};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::planning::renting::Sites;
use crate::records::{RentalIntent, RentalRecord, rental_intent_key, rental_key};

/// For so long a kind that a provider has refused somewhere is rented there only if somebody names the zone.
const REFUSED_MS: u64 = 15 * 60_000;

/// `GET /providers`: what can be rented, and what the providers have refused lately.
pub async fn offers(cluster: &Cluster) -> Vec<ProviderOffers> {
    let providers = &cluster.settings.renting.providers;
    join_all(providers.iter().map(async |provider| {
        let (offers, problem) = match offered::ask(cluster, provider).await {
            Ok(offers) => (Some(offers), String::new()),
            Err(error) => (None, format!("{}: {}", error.kind, error.message)),
        };
        let mut refused = refused(cluster, provider.name());
        let more = offers.iter().flatten().filter_map(|offer| {
            let one = refusal_of(cluster, &refused, provider.as_ref(), offer)?;
            let Offer { kind, zone, spot, .. } = offer.clone();
            let is_same = (&one.kind, &one.zone, one.spot) == (&kind, &zone, spot);
            (!is_same).then(|| OfferRefused { kind, zone, spot, ..one.clone() })
        });
        let more: Vec<OfferRefused> = more.collect();
        refused.extend(more);
        ProviderOffers { provider: provider.name().to_owned(), offers, problem, refused }
    }))
    .await
}

/// What the provider has refused lately for want of capacity or quota: the last refusal for each kind and zone.
pub(super) fn refused(cluster: &Cluster, provider: &str) -> Vec<OfferRefused> {
    let of_provider = cluster.rentals.all().into_iter().filter(|one| one.provider == provider);
    let mut all: Vec<OfferRefused> = of_provider.filter_map(|rental| rental.refused).collect();
    let place = |one: &OfferRefused| (one.kind.clone(), one.zone.clone(), one.spot);
    all.sort_by_key(|one| (place(one), std::cmp::Reverse(one.at_ms)));
    all.dedup_by_key(|one| place(one));
    all
}

/// That of these refusals which keeps an offer from being asked for now.
pub(super) fn refusal_of<'a>(
    cluster: &Cluster,
    refused: &'a [OfferRefused],
    provider: &dyn Provider,
    offer: &Offer,
) -> Option<&'a OfferRefused> {
    let quota = provider.quota_of(&offer.kind);
    refused.iter().find(|one| {
        one.holds_for(offer, quota.as_deref()) && cluster.clock.age_ms(one.at_ms) < REFUSED_MS
    })
}

/// `POST /rentals`: records that a host is wanted. Its driver asks the provider. A request with an id that is known changes nothing.
///
/// # Errors
/// `NotFound` for a provider or an offer that is not known; `Conflict` if there are too many rentals; `Unavailable` if the provider does not say
/// what it offers.
pub async fn rent(cluster: &Arc<Cluster>, ask: RentHost, by: String) -> Result<Rental, Problem> {
    if let Some(known) = ask.id.as_ref().and_then(|id| cluster.rentals.get(id)) {
        return Ok(known);
    }
    check(cluster, &ask)?;
    let provider = Arc::clone(cluster.settings.renting.provider(&ask.provider)?);
    let offer = offer(cluster, &provider, &ask).await?;
    record(cluster, ask, offer, by, None).await
}

/// The same for a host that the cluster rents by itself, of an offer that it knows already: the provider is not asked what it offers, and so holds
/// nobody up.
///
/// # Errors
/// As [`rent`].
pub async fn rent_for(
    cluster: &Arc<Cluster>,
    ask: RentHost,
    offer: Offer,
    by: String,
    rented_for: RentedFor,
) -> Result<Rental, Problem> {
    check(cluster, &ask)?;
    record(cluster, ask, offer, by, Some(rented_for)).await
}

/// Whether there may be such a rental.
fn check(cluster: &Cluster, ask: &RentHost) -> Result<(), Problem> {
    let what = format!("can't rent a {}", ask.kind);
    let disk_bytes = ask.disk_bytes.unwrap_or(RENT_DISK_DEFAULT_BYTES);
    RENT_DISK_BYTES.check(disk_bytes).map_err(|e| e.problem(&what))?;
    ask.for_s.map(|for_s| RENT_FOR_S.check(for_s)).transpose().map_err(|e| e.problem(&what))?;
    RENTALS.check(cluster.rentals.count() + 1).map_err(|e| {
        Problem::conflict(&what, e)
            .next("rentals that are over count too, for 31 days if they have cost something")
    })?;
    Ok(())
}

/// Records that such a host is wanted.
async fn record(
    cluster: &Arc<Cluster>,
    ask: RentHost,
    offer: Offer,
    by: String,
    rented_for: Option<RentedFor>,
) -> Result<Rental, Problem> {
    let what = format!("can't rent a {}", ask.kind);
    let provider = Arc::clone(cluster.settings.renting.provider(&ask.provider)?);
    price_counts(&what, &offer, provider.price_age_max_s())?;
    let site = site_of(&Sites::of(cluster), &ask, &offer)
        .ok_or_else(|| no_site(&what, provider.name()))?;
    let id = match ask.id {
        Some(id) => id,
        None => new_id()?,
    };
    let host = HostId::new(id.as_str()).map_err(|e| Problem::internal(&what, e))?;
    if cluster.hosts.get(&host).is_ok() {
        return Err(Problem::conflict(what, format!("there is a host {host} already"))
            .next("ask with another id"));
    }
    let now_ms = now_ms();
    let mut view = Rental {
        id: id.clone(),
        provider: provider.name().to_owned(),
        offer,
        image: ask.image.unwrap_or_default(),
        disk_bytes: ask.disk_bytes.unwrap_or(RENT_DISK_DEFAULT_BYTES),
        site,
        host,
        by,
        state: RentalState::Wanted,
        steps: vec![RentalStep { state: RentalState::Wanted, at_ms: now_ms, why: String::new() }],
        why: String::new(),
        ends_because: None,
        ended_by: None,
        until_ms: ask.for_s.map(|for_s| now_ms.saturating_add(for_s * 1000)),
        instance: None,
        address: None,
        requested: Requested::Nothing,
        asks: 0,
        asked_ms: None,
        refused: None,
        notice_ms: None,
        joined_ms: None,
        predicted: None,
        reserved: Money::ZERO,
        reserved_until_ms: None,
        left_bytes: 0,
        spent: None,
        rented_for,
        first_job_ms: None,
        found: None,
    };
    view.predicted = money::predicted(&view);
    // What can't be paid is refused at once; the driver reserves.
    let for_s = money::reserve_for_s(cluster, &view, None).unwrap_or_default();
    money::check(cluster, &view, for_s)?;
    let controller_url = controller_url(cluster, ask.controller_url, &what)?;
    let record = RentalRecord { view, controller_url: Some(controller_url), secret: None };
    if cluster.records.create_asked(&rental_key(&id), &record).await? {
        cluster.rentals.put(&record.view);
    }
    cluster.drive_rental(&id);
    get(cluster, &id)
}

/// The address at which hosts reach the controller.
fn controller_url(cluster: &Cluster, asked: Option<String>, what: &str) -> Result<String, Problem> {
    let next =
        "name the address at which the host reaches the controller: --controller https://HOST:PORT";
    let is_tls = cluster.network.identity().is_some();
    let scheme = if is_tls { "https://" } else { "http://" };
    // The controller knows its address as one with certificates.
    let own = || Some(cluster.settings.own_url.as_ref()?.replace("https://", scheme));
    let url = asked.or_else(own).ok_or_else(|| {
        let why = "the controller listens at no address that other machines reach";
        Problem::invalid(what, why).next(next)
    })?;
    if !url.starts_with(scheme) || perigee_http::authority_of(&url).is_none() {
        return Err(Problem::invalid(what, format!("{url:?} is not {scheme}HOST:PORT")).next(next));
    }
    Ok(url)
}

/// The site of a host of this offer: [`Sites::at`] if nobody names one.
fn site_of(sites: &Sites, ask: &RentHost, offer: &Offer) -> Option<SiteId> {
    ask.site.clone().or_else(|| sites.at(&ask.provider, &offer.zone))
}

fn no_site(what: &str, provider: &str) -> Problem {
    let why = format!("no site can have the provider's name {provider:?}");
    Problem::invalid(what, why).next("name the site of the host: --site SITE")
}

/// The offer that is meant. Without a zone: one where the provider has refused nothing lately; of those the one in the zone of the site's other
/// rented hosts, for what goes between zones is slower and may cost money; else the cheapest one.
async fn offer(
    cluster: &Cluster,
    provider: &Arc<dyn Provider>,
    ask: &RentHost,
) -> Result<Offer, Problem> {
    let (name, kind) = (provider.name(), &ask.kind);
    let what = format!("can't rent a {kind} of {name}");
    let offers = offered::ask(cluster, provider).await.map_err(|error| {
        let why = format!("{}: {}", error.kind, error.message);
        match error.kind {
            CloudErrorKind::NotAllowed => Problem::forbidden(&what, why),
            _ => Problem::unavailable(&what, why),
        }
    })?;
    let refused = refused(cluster, name);
    let is_meant = |offer: &Offer| {
        let zone = ask.zone.as_ref();
        offer.kind == *kind && offer.spot == ask.spot && zone.is_none_or(|zone| *zone == offer.zone)
    };
    let mut meant: Vec<Offer> = offers.into_iter().filter(is_meant).collect();
    if meant.is_empty() {
        let why = "the provider offers no such kind there";
        return Err(
            Problem::not_found(what, why).next("`perigee rent offers` shows what it offers")
        );
    }
    if ask.zone.is_none() {
        let provider = provider.as_ref();
        meant.retain(|offer| refusal_of(cluster, &refused, provider, offer).is_none());
    }
    let sites = Sites::of(cluster);
    // A price that is not known is last.
    meant.sort_by_cached_key(|offer| {
        let zone = site_of(&sites, ask, offer).and_then(|site| zone_of_site(cluster, name, &site));
        let is_elsewhere = zone.is_some_and(|zone| zone != offer.zone);
        let price = offer.price.per_hour_micros.map_or(u64::MAX, std::num::NonZeroU64::get);
        (is_elsewhere, price)
    });
    meant.into_iter().next().ok_or_else(|| {
        let why = "the provider has refused it in each zone lately";
        Problem::conflict(&what, why)
            .next("`perigee rent offers` says why; another kind, or --zone to try one all the same")
    })
}

/// Whether the price of an offer is of a time that counts.
fn price_counts(what: &str, offer: &Offer, max_age_s: u64) -> Result<(), Problem> {
    match offer.price.out_of_date(now_ms() / 1000, max_age_s) {
        None => Ok(()),
        Some(why) => {
            let why = format!("its price does not count: {why}");
            Err(Problem::invalid(what, why).next("say in providers.yaml when the prices held last (as-of), or how old they may be (max-age)"))
        }
    }
}

/// The zone of the provider's hosts at a site; `None` if there are none, or if they are in several zones.
fn zone_of_site(cluster: &Cluster, provider: &str, site: &SiteId) -> Option<String> {
    let all = cluster.rentals.all().into_iter();
    let of_site =
        all.filter(|one| one.provider == provider && one.site == *site && !one.state.is_over());
    let zones: BTreeSet<String> = of_site.map(|one| one.offer.zone).collect();
    zones.first().filter(|_| zones.len() == 1).cloned()
}

/// An id of a rental, which is also its host's name.
pub fn new_id() -> Result<RentalId, Problem> {
    let random = uuid::Uuid::new_v4().simple().to_string();
    RentalId::new(format!("rent-{}", &random[..12]))
        .map_err(|e| Problem::internal("can't make an id", e))
}

/// `GET /rentals`: all rentals that are kept, the newest one last.
pub fn list(cluster: &Cluster) -> Vec<Rental> {
    let mut all = cluster.rentals.all();
    all.sort_by_key(Rental::begun_ms);
    all.into_iter().map(|rental| shown(cluster, rental)).collect()
}

fn shown(cluster: &Cluster, rental: Rental) -> Rental {
    Rental { spent: money::spent(cluster, &rental), ..rental }
}

/// `GET /rentals/{rental}`.
///
/// # Errors
/// `NotFound`.
pub fn get(cluster: &Cluster, id: &RentalId) -> Result<Rental, Problem> {
    let known = cluster.rentals.get(id).map(|rental| shown(cluster, rental));
    known.ok_or_else(|| {
        Problem::not_found(format!("rental {id}"), "there is none, or it was over long ago")
            .next("`perigee rent list` shows the rented hosts")
    })
}

/// `POST /rentals/{rental}/end`: gives a host back. Repeating this changes nothing.
///
/// # Errors
/// `NotFound`.
pub async fn end(
    cluster: &Arc<Cluster>,
    id: &RentalId,
    by: String,
    ask: EndRental,
) -> Result<Rental, Problem> {
    let rental = get(cluster, id)?;
    if rental.state.is_over() {
        return Ok(rental);
    }
    let change = |intent: Option<RentalIntent>| {
        let intent = intent.unwrap_or_default();
        RentalIntent {
            ended_by: intent.ended_by.or_else(|| Some(by.clone())),
            now: intent.now || ask.now,
            ..intent
        }
    };
    cluster.records.update(&rental_intent_key(id), change).await?;
    cluster.drive_rental(id);
    cluster.rentals.changed.notify_waiters();
    get(cluster, id)
}
