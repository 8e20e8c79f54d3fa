//! What the providers offer, as plans are told it too.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use perigee_model::SiteId;
use perigee_model::rental::{Offer, RENT_DISK_DEFAULT_BYTES, Rental};
use perigee_planner::rent::OFFERS_MOST;

use crate::cluster::Cluster;
use crate::planning::renting::{self, Kind, Sites};
use crate::rentals::plan;

/// What each provider has said last. An error is not known, and is not nothing.
#[derive(Default)]
pub struct Market(BTreeMap<String, Result<Arc<Vec<Offer>>, String>>);

impl Market {
    /// What all say now, or have said a short time ago.
    pub async fn ask(&mut self, cluster: &Arc<Cluster>) {
        let asked = cluster.settings.renting.providers.iter();
        let answers = asked.map(async |provider| {
            let name = provider.name().to_owned();
            (name, plan::ask(cluster, provider).await)
        });
        self.0 = join_all(answers).await.into_iter().collect();
    }

    /// The offers with the provider's name: the cheapest for each CPU first, and those without a known price last.
    pub fn offers(&self) -> Vec<(String, Offer)> {
        let all = self.0.iter().flat_map(|(name, said)| {
            said.iter().flat_map(|all| all.iter()).map(|offer| (name.clone(), offer.clone()))
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
        let unknown = self.0.iter().filter_map(|(name, said)| Some((name, said.as_ref().err()?)));
        unknown.map(|(name, why)| format!("what provider {name} offers: {why}")).collect()
    }
}

/// The kinds for which runs are predicted, each at one site: those of hosts that are rented, and those of the first offers, with KVM before those without.
pub fn kinds(cluster: &Cluster, offers: &[(String, Offer)], rented: &[Rental]) -> Vec<Kind> {
    kinds_at(&Sites::of(cluster), offers, rented)
}

fn kinds_at(sites: &Sites, offers: &[(String, Offer)], rented: &[Rental]) -> Vec<Kind> {
    let there = rented.iter().filter(|rental| !rental.state.is_over());
    let there = there.map(|rental| Kind {
        provider: rental.provider.clone(),
        offer: rental.offer.clone(),
        site: rental.site.clone(),
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
    fn kinds_without_kvm_leave_room_for_those_with_it() {
        let name = |number: usize| format!("cheap-{number}");
        let mut offers: Vec<_> = (0..100).map(|n| offer(&name(n), "a", false)).collect();
        offers.push(offer("dear", "a", true));
        let kinds = kinds_at(&Sites::default(), &offers, &[]);
        let (first, count) = (&kinds[0].offer.kind, kinds.len());
        assert_eq!((first.as_str(), count), ("dear", 2 * OFFERS_MOST));
    }

    #[test]
    fn a_kind_is_offered_only_at_the_site_for_which_it_is_predicted() {
        let offers = [offer("m1", "a", true), offer("m1", "b", true), offer("m1", "c", true)];
        let sites = Sites { own: ["b".parse().expect("a name")].into(), ..Sites::default() };
        let zones = |rented: &[Rental]| {
            let kinds = kinds_at(&sites, &offers, rented);
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
