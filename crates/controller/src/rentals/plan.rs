//! What a job would take and cost: at the hosts that are there, as `planning` plans it, and at hosts that could be rented.
//!
//! A provider that does not say in a few seconds what it offers is named (`offered.rs`). Offers are predicted by the planner (`planner/src/offers.rs`); nothing is rented.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use perigee_cloud::Provider;
use perigee_model::job::JobSpec;
use perigee_model::job_plan::{JobPlan, NotConsidered};
use perigee_model::money::Money;
use perigee_model::plan::{Basis, Plan};
use perigee_model::rental::{Offer, OfferRefused, RENT_DISK_DEFAULT_BYTES};
use perigee_model::units::format_seconds;
use perigee_model::{Problem, SiteId};
use perigee_planner::offers::{OfferFacts, at_offers, weigh};
use perigee_planner::rent::Start;

use super::automatic::learned;
use super::money;
use super::offered::{late, offered};
use super::request::{refusal_of, refused};
use crate::clock::now_ms;
use crate::cluster::renter::kind_key;
use crate::cluster::{Cluster, for_vms_bytes};
use crate::planning::measured::Known;
use crate::planning::renting::{Sites, like};
use crate::planning::{self, Planned, seconds};

/// `POST /jobs/plan`.
///
/// # Errors
/// `NotFound` for an unknown volume, `Unavailable` when no host that is there can take the job, nor one that could be rented.
pub async fn plan(cluster: &Arc<Cluster>, spec: &JobSpec) -> Result<JobPlan, Problem> {
    let (planned, (mut offers, mut not_considered)) =
        tokio::join!(planning::plan(cluster, spec), offers(cluster));
    let Planned { mut snapshot, waits, plan } = planned?;
    planning::links::add_remembered(cluster, &mut snapshot.cluster);
    let like = like(&cluster.rentals.all_alive(), &snapshot.cluster);
    let measured = Known::of(cluster);
    for facts in &mut offers {
        let kind = kind_key(&facts.provider, &facts.offer.kind);
        facts.like = like.get(&kind).cloned();
        facts.measured = measured.one_more(&kind, facts.like.as_ref(), &snapshot.cluster);
    }
    let (rented, refused) = match spec.count {
        0 | 1 => at_offers(&snapshot, offers),
        // All VMs of a job start together, and one offer is one host.
        _ => (Vec::new(), Vec::new()),
    };
    not_considered.extend(refused);
    let plan = match plan {
        Ok(plan) => plan,
        Err(problem) if rented.is_empty() => return Err(problem),
        Err(problem) => no_plan(&problem, !snapshot.history.is_empty()),
    };
    let mut plan = JobPlan { plan, waits, rented, not_considered };
    weigh(&mut plan);
    Ok(plan)
}

/// No host that is there can take the job.
fn no_plan(problem: &Problem, has_run: bool) -> Plan {
    let basis = if has_run { Basis::History } else { Basis::OnePass };
    let figures = vec![format!("hosts that are there: {}", problem.why)];
    Plan { basis, options: Vec::new(), figures, moves: false }
}

/// What can be rented now, and the providers of which nobody knows.
async fn offers(cluster: &Arc<Cluster>) -> (Vec<OfferFacts>, Vec<NotConsidered>) {
    let providers = &cluster.settings.renting.providers;
    let Some(budget_left) = money::left(cluster) else {
        let why = "the controller was started without --rent-budget";
        let all = providers.iter().map(|provider| nothing_of(provider.name(), why.to_owned()));
        return (Vec::new(), all.collect());
    };
    let asked = providers.iter().map(|provider| offered(cluster, provider));
    let (mut all, mut without) = (Vec::new(), Vec::new());
    let rentals = cluster.rentals.all();
    let starts = learned::by_kind(&learned::starts(&rentals, now_ms()));
    let found = learned::found(&rentals, |ms| cluster.clock.age_ms(ms));
    let sites = Sites::of(cluster);
    for (provider, said) in providers.iter().zip(join_all(asked).await) {
        match said.unwrap_or_else(|| Err(late())) {
            Ok(offers) => {
                let name = provider.name();
                let refused = refused(cluster, name);
                let price_age_max_s = provider.price_age_max_s();
                let (provider, starts) = (provider.as_ref(), &starts);
                let of = Of { provider, starts, refused, price_age_max_s, budget_left };
                for offer in offers.iter() {
                    let found = found.get(&kind_key(name, &offer.kind));
                    let offer = found.map_or_else(|| offer.clone(), |found| found.correct(offer));
                    if let Some(site) = sites.at(name, &offer.zone) {
                        all.push(of.facts(cluster, offer, site));
                    }
                }
            }
            Err(why) => without.push(nothing_of(provider.name(), why)),
        }
    }
    (all, without)
}

fn nothing_of(provider: &str, why: String) -> NotConsidered {
    NotConsidered { provider: provider.to_owned(), kind: None, spot: false, why }
}

/// What is known of one provider.
struct Of<'a> {
    provider: &'a dyn Provider,
    /// How long the starts of each kind of all providers take.
    starts: &'a BTreeMap<String, Start>,
    refused: Vec<OfferRefused>,
    price_age_max_s: u64,
    budget_left: Money,
}

impl Of<'_> {
    /// `site`: where the host would be.
    fn facts(&self, cluster: &Cluster, offer: Offer, site: SiteId) -> OfferFacts {
        let too_old = offer.price.out_of_date(now_ms() / 1000, self.price_age_max_s);
        let (of, name) = (self.provider, self.provider.name());
        let refused = refusal_of(cluster, &self.refused, of, &offer).map(|one| {
            let ago = format_seconds(seconds(cluster.clock.age_ms(one.at_ms)));
            format!("refused {ago} ago: {}", one.why)
        });
        OfferFacts {
            provider: name.to_owned(),
            why_unknown: too_old.unwrap_or_else(|| "the provider does not say it".to_owned()),
            memory_bytes: for_vms_bytes(offer.memory_bytes),
            disk_bytes: RENT_DISK_DEFAULT_BYTES,
            site,
            like: None,
            measured: None,
            start: self.starts.get(&kind_key(name, &offer.kind)).copied(),
            refused,
            budget_left: self.budget_left,
            offer,
        }
    }
}
