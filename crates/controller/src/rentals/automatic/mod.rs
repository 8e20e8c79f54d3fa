//! The cluster rents hosts by itself, and gives them back, or says what it would do.
//!
//! A look gathers what the rule needs ([`perigee_planner::rent`] decides), and carries out what is decided (`carry.rs`):
//!
//! - The jobs that wait for nothing but room, in the queue's order, and those that arrived in the last half hour, each with its predicted runs
//!   (`planning/renting/predict.rs`).
//! - The hosts that are there or starting (`planning/renting/hosts.rs`). Those that people have rented are as own ones: the rule never gives them
//!   back.
//! - What the providers offer (`market.rs`). A provider that does not answer is not known: nothing is given back because of it.
//! - What past rentals have shown (`learned.rs`), and what of the budget nobody has reserved.
//!
//! A host that is rented has its rental's record before its provider is asked, and from then on it counts as room. So a controller that is killed
//! anywhere rents nothing twice for one need: without the record nobody was asked, and with it the next look sees the host. What the rule has rented is
//! kept and given back in each mode, so that nobody pays for a host because the mode was changed.

mod arrivals;
mod carry;
mod failed;
pub(super) mod learned;
mod market;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use perigee_model::auto_mode::AutoMode;
use perigee_model::limits::{MONEY_MICROS, RENTED_MOST};
use perigee_model::renting::{LearnedStart, RentSettings, Renting, SetRenting};
use perigee_model::{JobId, Problem, RentalId};
use perigee_planner::rent::{JOBS_MOST, Period, Snapshot, decide};

use super::money;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::renter::{Basis, Look, kind_key};
use crate::cluster::tasks::Task;
use crate::planning::renting;
use crate::records::JobRecord;
use arrivals::Arrivals;
use failed::Failed;
use market::Market;

/// What the task remembers. All of it may be lost.
#[derive(Default)]
struct Memory {
    market: Market,
    arrivals: Arrivals,
    failed: Failed,
    /// The rentals that were given back.
    given_back: BTreeSet<RentalId>,
}

/// `PUT /renting`: what an admin says from now on.
///
/// # Errors
/// `Invalid` for more hosts at once, or more money, than the limits allow; if the store fails.
pub async fn set_renting(cluster: &Cluster, ask: SetRenting) -> Result<Renting, Problem> {
    let what = "can't set how hosts are rented";
    ask.most.map(|most| RENTED_MOST.check(most)).transpose().map_err(|e| e.problem(what))?;
    let costs = ask.waiting_costs_per_hour.unwrap_or_default();
    MONEY_MICROS.check(costs.micros).map_err(|e| e.problem(what))?;
    let _turn = cluster.renter.turn.lock().await;
    cluster.renter.set(&cluster.records, ask).await?;
    Ok(cluster.renter.shown())
}

/// The endless task that looks whether a host is worth its price.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let mut memory = Memory::default();
    loop {
        task.round(look(&cluster, &mut memory)).await;
        tokio::select! {
            () = cluster.renter.look_now.notified() => {}
            () = tokio::time::sleep(cluster.timing.renter.look) => {}
        }
    }
}

async fn look(cluster: &Arc<Cluster>, memory: &mut Memory) -> Result<String, Problem> {
    let settings = cluster.renter.settings();
    let nobody = cluster.settings.renting.providers.is_empty();
    if cluster.rentals.hosts_by_rule().is_empty() && (nobody || settings.mode == AutoMode::Off) {
        let why = match nobody {
            true => "the controller was started without --providers",
            false => "the mode is off",
        };
        let look = Look { nothing_because: why.to_owned(), ..Look::default() };
        cluster.renter.note_look(&cluster.records, look, Vec::new()).await?;
        return Ok(format!("rents nothing, because {why}"));
    }
    if settings.mode != AutoMode::Off {
        memory.market.ask(cluster).await;
    }
    let (basis, starts, not_known) = gather(cluster, memory, settings).await;
    let basis = Arc::new(basis);
    cluster.renter.set_basis(Arc::clone(&basis));
    renting::note_uses(cluster, settings);
    let snapshot = renting::snapshot(cluster, &basis);
    // Of 2,000 jobs that takes long.
    let decided = tokio::task::spawn_blocking(move || (decide(&snapshot), snapshot)).await;
    let (decided, snapshot) =
        decided.map_err(|e| Problem::internal("can't decide whether a host is rented", e))?;
    let nothing_because = why_nothing(cluster, settings, &snapshot, &decided.no_more_because);
    let carried = carry::out(cluster, memory, settings, decided.decisions).await;
    let rents = carried.decisions.iter().any(carry::is_rent);
    let look = Look {
        at_ms: Some(now_ms()),
        budget_left: cluster.settings.renting.budget.get().map(|_| basis.rest.budget_left),
        decisions: carried.decisions,
        nothing_because: if rents { String::new() } else { nothing_because },
        not_known,
        starts,
    };
    let did = format!(
        "{} jobs wait for room, {} hosts are there or starting; {}",
        snapshot.jobs.len(),
        snapshot.hosts.len(),
        carried.did
    );
    cluster.renter.note_look(&cluster.records, look, carried.new).await?;
    if !cluster.rentals.hosts_by_rule().is_empty() {
        // Jobs may start where they were not to be before.
        cluster.index.changed.notify_one();
    }
    carried.problem.map_or(Ok(did), Err)
}

/// Why no host is rented.
fn why_nothing(
    cluster: &Cluster,
    settings: RentSettings,
    snapshot: &Snapshot,
    no_more: &str,
) -> String {
    if cluster.settings.renting.budget.get().is_none() {
        return "the controller was started without --rent-budget".to_owned();
    }
    if settings.mode == AutoMode::Off {
        return "the mode is off".to_owned();
    }
    // What is not predicted yet is no reason.
    let for_room = cluster.renter.for_room();
    let known: BTreeSet<&JobId> = snapshot.jobs.iter().map(|job| &job.job).collect();
    let unknown = for_room.iter().filter(|job| !known.contains(job)).count();
    match unknown {
        0 => no_more.to_owned(),
        unknown => format!(
            "{no_more}; {unknown} more jobs wait for room for which nothing is rented: they have several VMs or name their host, or what they \
             take is not known"
        ),
    }
}

/// What does not change until the next look, with what was learned, and what is not known.
async fn gather(
    cluster: &Arc<Cluster>,
    memory: &mut Memory,
    settings: RentSettings,
) -> (Basis, Vec<LearnedStart>, Vec<String>) {
    let rentals = cluster.rentals.all();
    let age_ms = |ms: u64| cluster.clock.age_ms(ms);
    let barred = learned::not_allowed(&rentals, age_ms);
    let found = learned::found(&rentals, age_ms);
    let mut offers = memory.market.offers();
    offers.retain(|(provider, _)| !barred.contains_key(provider));
    for (provider, offer) in &mut offers {
        if let Some(found) = found.get(&kind_key(provider, &offer.kind)) {
            *offer = found.correct(offer);
        }
    }
    let kinds = market::kinds(cluster, &offers, &rentals, &found);
    let records = wanted(cluster, memory);
    let (predicted, unpredicted) = renting::predict(cluster, &records, &kinds).await;
    let without_kvm = renting::runs_without_kvm(cluster);
    let mut jobs = BTreeMap::new();
    for record in &records {
        let id = &record.job.id;
        let Some(predicted) = predicted.get(id) else { continue };
        let job = renting::job_of(cluster, record, predicted, settings, without_kvm);
        let Some(job) = job else { continue };
        memory.arrivals.note(record.job.submitted_ms, &job);
        jobs.insert(id.clone(), job);
    }
    let starts = learned::starts(&rentals, now_ms());
    let mut refusals = learned::refusals(&rentals, age_ms);
    refusals.extend(memory.failed.refusals(age_ms));
    let quota_of = |provider: &str, kind: &str| {
        cluster.settings.renting.provider(provider).ok()?.quota_of(kind)
    };
    refusals.extend(learned::over_quota(&rentals, &offers, quota_of, age_ms));
    let mut not_known = memory.market.not_known();
    not_known
        .extend(barred.into_iter().map(|(provider, why)| format!("provider {provider}: {why}")));
    not_known.extend(unpredicted);
    let rest = Snapshot {
        arrived: memory.arrivals.all(age_ms),
        offers: market::as_seen(cluster, &offers, &kinds),
        starts: learned::by_kind(&starts),
        refusals,
        budget_left: money::left(cluster).unwrap_or_default(),
        period: money::period_left_s(cluster).map(|left_s| Period { left_s }),
        rented_most: rented_most(cluster, settings),
        ..Snapshot::default()
    };
    (Basis { jobs, found, rest }, starts, not_known)
}

/// How many hosts the rule may have, of those that are there or starting.
fn rented_most(cluster: &Cluster, settings: RentSettings) -> usize {
    let most = if settings.mode == AutoMode::Off { 0 } else { settings.most as usize };
    let all = cluster.rentals.all();
    let others = all.iter().filter(|rental| {
        let is_its = rental.rented_for.is_some() && rental.ends_because.is_none();
        !rental.state.is_over() && !is_its
    });
    most.saturating_sub(others.count())
}

/// The jobs about which the rule has to know something: those that wait for room, and those that came lately.
fn wanted(cluster: &Cluster, memory: &Memory) -> Vec<Arc<JobRecord>> {
    let for_room = cluster.renter.for_room();
    let mut records: Vec<Arc<JobRecord>> =
        for_room.iter().take(JOBS_MOST).filter_map(|job| cluster.index.job(job)).collect();
    let known: BTreeSet<JobId> = records.iter().map(|record| record.job.id.clone()).collect();
    let age_ms = |ms: u64| cluster.clock.age_ms(ms);
    let is_new = |record: &Arc<JobRecord>| {
        let job = &record.job;
        !known.contains(&job.id) && memory.arrivals.lacks(&job.id, job.submitted_ms, age_ms)
    };
    let new: Vec<Arc<JobRecord>> =
        cluster.unfinished_jobs().into_iter().filter(is_new).take(JOBS_MOST).collect();
    records.extend(new);
    records.retain(|record| renting::is_asked_for(record));
    records
}
