//! Carries out what the rule has decided, and says so.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::auto_mode::AutoMode;
use perigee_model::money::Money;
use perigee_model::rental::states::RentalState;
use perigee_model::rental::{RentHost, Rental};
use perigee_model::renting::{
    RENT_JOBS_NAMED, RENTED_BY_RULE, RentAction, RentDecision, RentSettings, RentedFor,
};
use perigee_model::{Problem, ProblemKind};
use perigee_planner::rent::{Decision, GiveBack, Keep, Rent};

use super::Memory;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::records::{RentalIntent, rental_intent_key};
use crate::rentals::request;

/// A reservation is not made longer for less than this, in seconds.
const LONGER_S: u64 = 60;

/// What became of all decisions.
#[derive(Default)]
pub struct Carried {
    pub decisions: Vec<RentDecision>,
    /// Those of them that are worth keeping.
    pub new: Vec<RentDecision>,
    pub did: String,
    /// The first one that failed.
    pub problem: Option<Problem>,
}

impl Carried {
    /// A decision was not carried out.
    fn failed(&mut self, said: &mut RentDecision, problem: Problem) {
        said.done = false;
        said.why = format!("{}; it is not done: {}", said.why, problem.why);
        self.problem.get_or_insert(problem);
    }
}

/// Whether a host is rented by it, or would be.
pub fn is_rent(decision: &RentDecision) -> bool {
    decision.action == RentAction::Rent
}

/// Carries out all decisions. One that fails holds up none of the others.
pub async fn out(
    cluster: &Arc<Cluster>,
    memory: &mut Memory,
    settings: RentSettings,
    decisions: Vec<Decision>,
) -> Carried {
    let by_host = cluster.rentals.by_rule();
    let mut carried = Carried::default();
    let (mut rented, mut back) = (0, 0);
    for decision in decisions {
        match decision {
            Decision::Rent(rent) => {
                // A person may have changed that meanwhile.
                let modes = [settings.mode, cluster.renter.settings().mode];
                let is_on = modes == [AutoMode::On; 2];
                let said = carry_rent(cluster, memory, *rent, is_on, &mut carried).await;
                rented += usize::from(said.done);
                carried.decisions.push(said);
            }
            Decision::GiveBack(GiveBack { host, why }) => {
                let Some(rental) = by_host.get(&host) else { continue };
                let mut said = of_rental(rental, RentAction::GiveBack, why.clone());
                if !memory.given_back.contains(&rental.id) {
                    match give_back(cluster, rental, why).await {
                        Ok(()) => {
                            memory.given_back.insert(rental.id.clone());
                            back += 1;
                            carried.new.push(said.clone());
                        }
                        // The next look decides it again.
                        Err(problem) => carried.failed(&mut said, problem),
                    }
                }
                carried.decisions.push(said);
            }
            Decision::Keep(keep) => {
                let Some(rental) = by_host.get(&keep.host) else { continue };
                let mut said = of_rental(rental, RentAction::Keep, keep.why.clone());
                if let Err(problem) = self::keep(cluster, rental, &keep).await {
                    carried.failed(&mut said, problem);
                }
                carried.decisions.push(said);
            }
        }
    }
    memory.given_back.retain(|id| by_host.values().any(|rental| rental.id == *id));
    carried.did = format!("rented {rented}, gave {back} back");
    carried
}

/// Asks for the host, or says only that it would be asked for.
async fn carry_rent(
    cluster: &Arc<Cluster>,
    memory: &mut Memory,
    rent: Rent,
    is_on: bool,
    carried: &mut Carried,
) -> RentDecision {
    let mut said = would_rent(&rent);
    if is_on {
        match ask(cluster, memory, &mut said).await {
            Ok(()) => memory.failed.forget(&rent.offer),
            Err(problem) => {
                // A store that fails is no word of the provider.
                if !matches!(problem.kind, ProblemKind::Internal | ProblemKind::NoSpace) {
                    memory.failed.note(&rent.offer, now_ms());
                }
                carried.failed(&mut said, problem);
            }
        }
        carried.new.push(said.clone());
    } else if !was_advised(cluster, &said) {
        carried.new.push(said.clone());
    }
    said
}

/// The provider's name and its kind, of the name among all kinds.
fn kind_of(rent: &Rent) -> (&str, &str) {
    rent.offer.kind.split_once('/').unwrap_or(("", &rent.offer.kind))
}

fn would_rent(rent: &Rent) -> RentDecision {
    let (provider, kind) = kind_of(rent);
    let reserved = Duration::try_from_secs_f64(rent.reserved_s.ceil()).unwrap_or_default();
    let rented_for = RentedFor {
        jobs: rent.jobs.iter().take(RENT_JOBS_NAMED).cloned().collect(),
        jobs_count: u32::try_from(rent.jobs.len()).unwrap_or(u32::MAX),
        saves: rent.saves,
        costs: rent.costs,
        reserve_s: reserved.as_secs(),
        why: rent.why.clone(),
    };
    RentDecision {
        at_ms: now_ms(),
        action: RentAction::Rent,
        done: false,
        rental: None,
        provider: provider.to_owned(),
        kind: kind.to_owned(),
        zone: rent.offer.zone.clone(),
        spot: rent.offer.spot,
        why: rent.why.clone(),
        rented_for: Some(rented_for),
    }
}

/// RECORDED HERE, before the provider is asked: from then on the host counts as room.
async fn ask(
    cluster: &Arc<Cluster>,
    memory: &Memory,
    said: &mut RentDecision,
) -> Result<(), Problem> {
    let offer = memory.market.find(&said.provider, &said.kind, &said.zone, said.spot).cloned();
    let (Some(offer), Some(rented_for)) = (offer, said.rented_for.clone()) else {
        let what = format!("can't rent a {}", said.kind);
        return Err(Problem::not_found(what, "the provider offers no such kind there any more"));
    };
    let id = request::new_id()?;
    let ask = RentHost {
        id: Some(id.clone()),
        provider: said.provider.clone(),
        kind: said.kind.clone(),
        zone: Some(said.zone.clone()),
        spot: said.spot,
        site: None,
        for_s: None,
        image: None,
        disk_bytes: None,
        controller_url: None,
    };
    let by = RENTED_BY_RULE.to_owned();
    request::rent_for(cluster, ask, offer, by, rented_for).await?;
    tracing::info!(rental = %id, "the cluster rents a {} of {}: {}", said.kind, said.provider, said.why);
    (said.rental, said.done) = (Some(id), true);
    Ok(())
}

/// Whether the last look has said the same.
fn was_advised(cluster: &Cluster, said: &RentDecision) -> bool {
    let place =
        |one: &RentDecision| (one.provider.clone(), one.kind.clone(), one.zone.clone(), one.spot);
    let before = cluster.renter.decided();
    before.iter().any(|one| is_rent(one) && place(one) == place(said))
}

fn of_rental(rental: &Rental, action: RentAction, why: String) -> RentDecision {
    RentDecision {
        at_ms: now_ms(),
        action,
        done: true,
        rental: Some(rental.id.clone()),
        provider: rental.provider.clone(),
        kind: rental.offer.kind.clone(),
        zone: rental.offer.zone.clone(),
        spot: rental.offer.spot,
        rented_for: rental.rented_for.clone(),
        why,
    }
}

async fn give_back(cluster: &Cluster, rental: &Rental, why: String) -> Result<(), Problem> {
    tracing::info!(rental = %rental.id, "the cluster gives its host back: {why}");
    let change = |intent: Option<RentalIntent>| {
        let intent = intent.unwrap_or_default();
        match intent.ended_by {
            // A person was first.
            Some(_) => intent,
            None => RentalIntent {
                ended_by: Some(RENTED_BY_RULE.to_owned()),
                by_rule: true,
                why: Some(why.clone()),
                ..intent
            },
        }
    };
    cluster.records.update(&rental_intent_key(&rental.id), change).await?;
    cluster.drive_rental(&rental.id);
    cluster.rentals.changed.notify_waiters();
    Ok(())
}

/// Has more reserved for a host if what is reserved does not reach as far as its jobs need.
async fn keep(cluster: &Cluster, rental: &Rental, keep: &Keep) -> Result<(), Problem> {
    if keep.reserve > Money::ZERO {
        let needed = Duration::try_from_secs_f64(keep.reserved_s).unwrap_or_default();
        let needed_ms = u64::try_from(needed.as_millis()).unwrap_or(u64::MAX);
        let first = rental.since_ms(RentalState::Asked);
        let until_ms = first.map(|first_ms| {
            first_ms.saturating_add(cluster.clock.age_ms(first_ms)).saturating_add(needed_ms)
        });
        let held_ms = rental.reserved_until_ms.unwrap_or(0);
        let is_longer =
            until_ms.is_some_and(|until_ms| until_ms > held_ms.saturating_add(LONGER_S * 1000));
        if is_longer {
            let change = |intent: Option<RentalIntent>| RentalIntent {
                reserve_until_ms: until_ms,
                ..intent.unwrap_or_default()
            };
            cluster.records.update(&rental_intent_key(&rental.id), change).await?;
            cluster.drive_rental(&rental.id);
            cluster.rentals.changed.notify_waiters();
        }
    }
    Ok(())
}
