//! The planner's decisions about each job. They are kept with the job.

use perigee_model::budget::MoneyRange;
use perigee_model::job::JobState;
use perigee_model::money::Money;
use perigee_model::plan::{Basis, Decision, Plan, Score, ScoreOf, Trigger};
use perigee_model::rental::Rental;
use perigee_model::{JobId, Problem};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::history_cache::{History, RUNS};
use crate::records::{JobRecord, in_order};

/// The prefix of the records of all decisions.
const DECISIONS: &str = "decisions/";

/// How many decisions about a job are kept beside the first one.
const KEPT: usize = 100;

/// Stores a decision.
pub async fn record(
    cluster: &Cluster,
    job: &JobId,
    trigger: Trigger,
    plan: Plan,
    summary: String,
) -> Result<(), Problem> {
    let decision = Decision {
        job: job.clone(),
        at_ms: now_ms(),
        trigger,
        plan,
        summary,
        outcome: String::new(),
        measured_s: None,
        measured: None,
    };
    let key_of = |number: u32| format!("{}{}", prefix(job), in_order(number));
    let mut keys = cluster.records.keys(&prefix(job)).await?;
    keys.sort();
    let number_of =
        |key: &String| key.rsplit('/').next()?.trim_start_matches('n').parse::<u32>().ok();
    let mut number = keys.last().and_then(number_of).map_or(0, |last| last + 1);
    while !cluster.records.create(&key_of(number), &decision).await? {
        number += 1;
    }
    // The first one is that of the job's submission.
    let excess = keys.len().saturating_sub(KEPT);
    for key in keys.iter().skip(1).take(excess) {
        cluster.records.remove(key).await?;
    }
    Ok(())
}

/// Adds to the job's last decision what of it was not carried out. Repeating this changes nothing.
pub async fn not_done(cluster: &Cluster, job: &JobId, what: &str) -> Result<(), Problem> {
    let keys = cluster.records.keys(&prefix(job)).await?;
    let Some(last) = keys.into_iter().max() else { return Ok(()) };
    let Some(mut decision) = cluster.records.own::<Decision>(&last).await? else { return Ok(()) };
    let outcome = &mut decision.value.outcome;
    if outcome.contains(what) {
        return Ok(());
    }
    if !outcome.is_empty() {
        outcome.push_str("; ");
    }
    outcome.push_str(what);
    decision.save().await
}

/// Stores the decision with which a job begins. A driver that starts again does not store it twice.
pub async fn record_submission(cluster: &Cluster, job: &JobId, plan: &Plan) -> Result<(), Problem> {
    if !decisions(cluster, job).await?.is_empty() {
        return Ok(());
    }
    let summary =
        plan.chosen().map_or_else(String::new, |o| format!("start at {}: {}", o.start, o.reason));
    record(cluster, job, Trigger::Submitted, plan.clone(), summary).await
}

/// The plan of a move that a person asked for. It has no options to compare.
pub fn asked_plan(figures: Vec<String>) -> Plan {
    Plan { basis: Basis::Running, options: Vec::new(), figures, moves: true }
}

/// Compares the predictions for all stored jobs whose full names are wanted with their measured times and with what was spent, and equal runs
/// with each other; for admins also the predictions for rented hosts with what those have cost.
pub async fn score(
    cluster: &Cluster,
    is_wanted: impl Fn(&str) -> bool,
    is_admin: bool,
) -> Result<Score, Problem> {
    let mut decisions: Vec<Decision> = cluster.records.list(DECISIONS).await?;
    decisions.retain(|decision| is_wanted(decision.job.as_str()));
    let mut histories: Vec<History> = cluster.records.list(RUNS).await?;
    histories.retain(|history| history.runs.iter().all(|run| is_wanted(&run.traits.name)));
    let noise = perigee_planner::noise(histories.iter().map(|history| history.runs.as_slice()));
    let jobs = cluster.jobs().await?;
    let jobs = jobs.iter().filter(|record| is_wanted(record.job.id.as_str()));
    let money = ScoreOf::of_money(jobs.filter_map(cost_of_job));
    let rentals = cluster.rentals.all().into_iter().filter(|_| is_admin);
    let rentals = ScoreOf::of_money(rentals.filter_map(|rental| cost_of_rental(&rental)));
    Ok(Score { noise, money, rentals, ..Score::of(&decisions) })
}

/// What a job was predicted to cost, and what was spent; `None` if one of them says nothing of the other one. Each run has a prediction of
/// its own, and what was spent is for all runs.
fn cost_of_job(record: &JobRecord) -> Option<(MoneyRange, Money)> {
    let counts =
        record.job.state == JobState::Succeeded && record.restarts == 0 && !record.kind.is_member();
    let cost = record.job.cost.filter(|_| counts)?;
    Some((cost.predicted, cost.spent?))
}

/// The same of a rented host.
fn cost_of_rental(rental: &Rental) -> Option<(MoneyRange, Money)> {
    let counts = rental.state.is_over() && !rental.is_spent_at_least();
    Some((rental.predicted.filter(|_| counts)?, rental.spent?))
}

/// The recorded decisions about a job, the oldest first; none if there is no such job.
pub async fn decisions(cluster: &Cluster, job: &JobId) -> Result<Vec<Decision>, Problem> {
    cluster.records.list(&prefix(job)).await
}

/// Below it are the decisions about a job.
pub fn prefix(job: &JobId) -> String {
    format!("{DECISIONS}{job}/")
}
