//! The planner's decisions about each job. They are kept with the job.

use perigee_model::plan::{Basis, Decision, Plan, Score, Trigger};
use perigee_model::{JobId, Problem};

use crate::cluster::taught::{History, RUNS};
use crate::cluster::{Cluster, now_ms};

/// The prefix of the records of all decisions.
const DECISIONS: &str = "decisions/";

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
    let mut number = cluster.records.keys(&prefix(job)).await?.len();
    while !cluster.records.create(&format!("{}{number:04}", prefix(job)), &decision).await? {
        number += 1;
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

/// Compares the predictions for all stored jobs whose full names are wanted with their measured times, and equal runs with
/// each other.
pub async fn score(cluster: &Cluster, is_wanted: impl Fn(&str) -> bool) -> Result<Score, Problem> {
    let mut decisions: Vec<Decision> = cluster.records.list(DECISIONS).await?;
    decisions.retain(|decision| is_wanted(decision.job.as_str()));
    let mut histories: Vec<History> = cluster.records.list(RUNS).await?;
    histories.retain(|history| history.runs.iter().all(|run| is_wanted(&run.traits.name)));
    let noise = perigee_planner::noise(histories.iter().map(|history| history.runs.as_slice()));
    Ok(Score { noise, ..Score::of(&decisions) })
}

pub async fn decisions(cluster: &Cluster, job: &JobId) -> Result<Vec<Decision>, Problem> {
    cluster.records.list(&prefix(job)).await
}

pub(super) fn prefix(job: &JobId) -> String {
    format!("{DECISIONS}{job}/")
}
