//! What the providers offer, as they have said last (`rentals/offered.rs`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use perigee_model::SiteId;
use perigee_model::rental::{HostFound, Offer, RENT_DISK_DEFAULT_BYTES, Rental};
use perigee_planner::rent::OFFERS_MOST;

use crate::cluster::Cluster;
use crate::cluster::renter::kind_key;
use crate::planning::renting::{self, Kind, Sites};
use crate::rentals::offered::{late, offered};

/// What one provider has said last.
struct Said {
    at: Instant,
    /// `None` if it does not say what it offers: that is not known, and is not nothing.
    offers: Option<Arc<Vec<Offer>>>,
    problem: String,
}

impl Said {
    fn of(answer: Result<Arc<Vec<Offer>>, String>) -> Self {
        let (offers, problem) = match answer {
            Ok(offers) => (Some(offers), String::new()),
            Err(problem) => (None, problem),
        };
        Self { at: Instant::now(), offers, problem }
    }
}

/// What all have said last.
#[derive(Default)]
pub struct Market(BTreeMap<String, Said>);

impl Market {
    /// Hears what they offer now. What one has said before counts while its next answer is late, for as long as an answer may take.
    pub async fn ask(&mut self, cluster: &Arc<Cluster>) {
        let providers = &cluster.settings.renting.providers;
        let answers = join_all(providers.iter().map(|provider| offered(cluster, provider))).await;
        let counts = cluster.timing.renter.offers + cluster.timing.rentals.answer;
        for (provider, answer) in providers.iter().zip(answers) {
            self.note(provider.name(), answer, counts);
        }
    }

    /// `None` is an answer that is late.
    fn note(
        &mut self,
        provider: &str,
        answer: Option<Result<Arc<Vec<Offer>>, String>>,
        counts: Duration,
    ) {
        let before = self.0.get(provider);
        if answer.is_none() && before.is_some_and(|said| said.at.elapsed() < counts) {
            return;
        }
        self.0.insert(provider.to_owned(), Said::of(answer.unwrap_or_else(|| Err(late()))));
    }

    /// What was offered there, as the provider has said it.
    pub fn find(&self, provider: &str, kind: &str, zone: &str, spot: bool) -> Option<&Offer> {
        let offers = self.0.get(provider)?.offers.as_ref()?;
        offers.iter().find(|one| one.kind == kind && one.zone == zone && one.spot == spot)
    }

    /// The offers with the provider's name: the cheapest for each CPU first, and those without a known price last.
    pub fn offers(&self) -> Vec<(String, Offer)> {
        let all = self.0.iter().flat_map(|(name, said)| {
            said.offers.iter().flat_map(|all| all.iter()).map(|offer| (name.clone(), offer.clone()))
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

/// The kinds for which runs are predicted, each at one site: those of hosts that are rented, and those of the first offers, with KVM before those without.
/// `found`: of each kind what its hosts have shown to be.
pub fn kinds(
    cluster: &Cluster,
    offers: &[(String, Offer)],
    rented: &[Rental],
    found: &BTreeMap<String, HostFound>,
) -> Vec<Kind> {
    kinds_at(&Sites::of(cluster), offers, rented, found)
}

fn kinds_at(
    sites: &Sites,
    offers: &[(String, Offer)],
    rented: &[Rental],
    found: &BTreeMap<String, HostFound>,
) -> Vec<Kind> {
    let is_known = |rental: &&Rental| !rental.state.is_over() && rental.offer.cpus > 0;
    let there = rented.iter().filter(is_known).map(|rental| {
        let found = found.get(&kind_key(&rental.provider, &rental.offer.kind));
        Kind {
            provider: rental.provider.clone(),
            offer: found.map_or_else(|| rental.offer.clone(), |it| it.correct(&rental.offer)),
            site: rental.site.clone(),
        }
    });
    let has_kvm = |(_, offer): &&(String, Offer)| offer.kvm == Some(true);
    let with_kvm = offers.iter().filter(has_kvm);
    let without = offers.iter().filter(|offer| !has_kvm(offer));
    let offered = with_kvm.chain(without).filter_map(|(provider, offer)| {
        let site = sites.at(provider, &offer.zone)?;
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

/// The offers as the rule sees them. A kind is predicted at one site, so its zones that belong to other sites are left out.
pub fn as_seen(cluster: &Cluster, offers: &[(String, Offer)], kinds: &[Kind]) -> Vec<Offer> {
    seen_at(&Sites::of(cluster), offers, kinds)
}

fn seen_at(sites: &Sites, offers: &[(String, Offer)], kinds: &[Kind]) -> Vec<Offer> {
    let at: BTreeMap<String, &SiteId> = kinds.iter().map(|kind| (kind.key(), &kind.site)).collect();
    let seen = |(provider, offer): &(String, Offer)| {
        let seen = renting::as_seen(provider, offer, RENT_DISK_DEFAULT_BYTES);
        let predicted_at = at.get(&seen.kind).copied();
        let is_there = predicted_at
            .is_none_or(|site| sites.at(provider, &offer.zone).is_some_and(|other| other == *site));
        is_there.then_some(seen)
    };
    offers.iter().filter_map(seen).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(kind: &str, zone: &str, kvm: bool) -> (String, Offer) {
        let Rental { offer, .. } = crate::tests::rental("rent-1");
        let (kind, zone) = (kind.to_owned(), zone.to_owned());
        ("lab".to_owned(), Offer { kind, zone, kvm: Some(kvm), ..offer })
    }

    #[test]
    fn what_was_offered_counts_while_the_next_answer_is_late_and_then_is_not_known() {
        let mut market = Market::default();
        market.note("lab", None, Duration::MAX);
        assert!(market.offers().is_empty() && market.not_known()[0].contains("has not answered"));
        let (_, small) = offer("m1", "a", true);
        market.note("lab", Some(Ok(Arc::new(vec![small.clone()]))), Duration::MAX);
        market.note("lab", None, Duration::MAX);
        assert_eq!(
            (market.find("lab", "m1", "a", false), market.not_known().len()),
            (Some(&small), 0)
        );
        assert_eq!(market.find("lab", "m1", "b", false), None);
        market.note("lab", None, Duration::ZERO);
        assert!(market.offers().is_empty() && market.not_known().len() == 1);
    }

    #[test]
    fn kinds_without_kvm_leave_room_for_those_with_it() {
        let name = |number: usize| format!("cheap-{number}");
        let mut offers: Vec<_> = (0..100).map(|n| offer(&name(n), "a", false)).collect();
        offers.push(offer("dear", "a", true));
        let kinds = kinds_at(&Sites::default(), &offers, &[], &BTreeMap::new());
        let (first, count) = (&kinds[0].offer.kind, kinds.len());
        assert_eq!((first.as_str(), count), ("dear", 2 * OFFERS_MOST));
    }

    #[test]
    fn a_kind_is_offered_only_at_the_site_for_which_it_is_predicted() {
        let offers = [offer("m1", "a", true), offer("m1", "b", true), offer("m1", "c", true)];
        let sites = Sites { own: ["b".parse().expect("a name")].into(), ..Sites::default() };
        let zones = |rented: &[Rental]| {
            let kinds = kinds_at(&sites, &offers, rented, &BTreeMap::new());
            assert_eq!(kinds.len(), 1, "{kinds:?}");
            let seen = seen_at(&sites, &offers, &kinds).into_iter();
            seen.map(|offer| offer.zone).collect::<Vec<String>>()
        };
        assert_eq!(zones(&[]), ["a", "c"], "the cheapest one is at lab, as c is");
        let mut there = crate::tests::rental("rent-1");
        there.site = "b".parse().expect("a name");
        assert_eq!(zones(&[there]), ["b"], "a host of the kind is at b");
    }
}
