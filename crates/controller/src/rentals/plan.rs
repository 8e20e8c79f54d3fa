//! What a job would take and cost: at the hosts that are there, as `planning` plans it, and at hosts that could be rented.
//!
//! What providers offer is asked for at most once a minute, and waited for a few seconds. A provider that takes longer is named, and its answer
//! serves the next plan. Offers are predicted by the planner (`planner/src/offers.rs`); nothing is rented.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{FutureExt as _, join_all};
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
use super::request::{REFUSED_MS, refused};
use super::{money, offers_of};
use crate::clock::now_ms;
use crate::cluster::rentals::OffersAnswer;
use crate::cluster::renter::kind_key;
use crate::cluster::{Cluster, for_vms_bytes};
use crate::planning::renting::{Sites, like};
use crate::planning::{self, Planned, seconds};

/// A plan waits for a provider for so long.
const PATIENCE: Duration = Duration::from_secs(3);

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
    for facts in &mut offers {
        facts.like = like.get(&kind_key(&facts.provider, &facts.offer.kind)).cloned();
    }
    let (rented, refused) = match spec.count {
        0 | 1 => at_offers(&snapshot, offers),
        // No plan compares ways for several VMs.
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
    let asked = providers.iter().map(async |provider| {
        let answer = ask(cluster, provider);
        let said = tokio::time::timeout(PATIENCE, answer).await;
        said.unwrap_or_else(|_| Err(format!("it has not answered for {} s", PATIENCE.as_secs())))
    });
    let (mut all, mut without) = (Vec::new(), Vec::new());
    let starts = learned::by_kind(&learned::starts(&cluster.rentals.all(), now_ms()));
    let sites = Sites::of(cluster);
    for (provider, said) in providers.iter().zip(join_all(asked).await) {
        match said {
            Ok(offers) => {
                let name = provider.name();
                let refused = refused(cluster, name);
                let of = Of { provider: name, starts: &starts, refused, budget_left };
                for offer in offers.iter() {
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

/// A provider's answer, at most a minute old, which goes on to come when nobody waits for it any more, within the deadline for every answer.
pub fn ask(cluster: &Arc<Cluster>, provider: &Arc<dyn Provider>) -> OffersAnswer {
    cluster.rentals.offers(provider.name(), cluster.timing.renter.offers, || {
        let (cluster, provider) = (Arc::clone(cluster), Arc::clone(provider));
        let asked = async move {
            let said = offers_of(&cluster, &provider).await;
            said.map(Arc::new).map_err(|error| format!("{}: {}", error.kind, error.message))
        };
        let answer = asked.boxed().shared();
        tokio::spawn(answer.clone());
        answer
    })
}

/// What is known of one provider.
struct Of<'a> {
    provider: &'a str,
    /// How long the starts of each kind of all providers take.
    starts: &'a BTreeMap<String, Start>,
    refused: Vec<OfferRefused>,
    budget_left: Money,
}

impl Of<'_> {
    /// `site`: where the host would be.
    fn facts(&self, cluster: &Cluster, offer: &Offer, site: SiteId) -> OfferFacts {
        let (price, unknown) = cluster.prices.of_provider(self.provider, &offer.price);
        let is_of = |one: &&OfferRefused| {
            (&one.kind, &one.zone, one.spot) == (&offer.kind, &offer.zone, offer.spot)
                && cluster.clock.age_ms(one.at_ms) < REFUSED_MS
        };
        let refused = self.refused.iter().find(is_of).map(|one| {
            let ago = format_seconds(seconds(cluster.clock.age_ms(one.at_ms)));
            format!("refused {ago} ago: {}", one.why)
        });
        let machine = unknown.iter().find_map(|why| why.strip_prefix("machine: "));
        OfferFacts {
            provider: self.provider.to_owned(),
            offer: Offer { price, ..offer.clone() },
            why_unknown: machine.unwrap_or_default().to_owned(),
            memory_bytes: for_vms_bytes(offer.memory_bytes),
            disk_bytes: RENT_DISK_DEFAULT_BYTES,
            site,
            like: None,
            start: self.starts.get(&kind_key(self.provider, &offer.kind)).copied(),
            refused,
            budget_left: self.budget_left,
        }
    }
}
