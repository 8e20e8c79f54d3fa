//! What the planner has to know of a job to reckon what it costs.

use perigee_model::budget::Spending;
use perigee_model::job::{Job, JobSpec};
use perigee_model::money::Money;
use perigee_model::plan::Estimate;
use perigee_model::{Problem, TenantName};
use perigee_planner::MoneyFacts;

use super::seconds;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::records::{ImageRecord, image_key};

/// Of a job that was submitted then, a Unix time. What its tenant has left is not among them: that changes with each job that starts.
///
/// # Errors
/// If the store fails.
pub async fn facts(
    cluster: &Cluster,
    spec: &JobSpec,
    submitted_ms: u64,
) -> Result<MoneyFacts, Problem> {
    Ok(MoneyFacts {
        budget: part_of_budget(spec, Money::ZERO),
        spent: Money::ZERO,
        vms: spec.count.max(1),
        month: None,
        deadline_s: deadline_s(spec, submitted_ms),
        waiting_per_hour: spec.money.waiting_costs_per_hour,
        disk_bytes: disk_bytes(cluster, spec).await?,
        timeout_s: spec.timeout_s,
        paid_before: Estimate::default(),
    })
}

/// What each VM of the job has of its budget, without what was spent.
fn part_of_budget(spec: &JobSpec, spent: Money) -> Option<Money> {
    let left = spec.money.budget?.less(spent);
    Some(Money::from_micros(left.micros / u64::from(spec.count.max(1))))
}

/// Takes into account what the job's earlier runs have cost.
pub fn take_spent(facts: &mut MoneyFacts, job: &Job) {
    facts.spent = job.cost.and_then(|cost| cost.spent).unwrap_or_default();
    facts.budget = part_of_budget(&job.spec, facts.spent);
}

/// The seconds until the deadline; below 0 if it is over.
pub fn deadline_s(spec: &JobSpec, submitted_ms: u64) -> Option<f64> {
    let at_ms = spec.money.deadline?.at_ms(submitted_ms);
    Some(seconds(at_ms) - seconds(now_ms()))
}

/// The root and the output disk of one of its VMs. `None` if the image's size is not known, or if nothing costs anything, nor can be rented.
///
/// # Errors
/// If the store fails.
pub async fn disk_bytes(cluster: &Cluster, spec: &JobSpec) -> Result<Option<u64>, Problem> {
    // A host may be rented until this is used.
    let may_rent = !cluster.settings.renting.providers.is_empty();
    if !may_rent && cluster.prices.now(&cluster.rentals).is_none() {
        return Ok(None);
    }
    let root_bytes = match spec.root_bytes {
        Some(root_bytes) => Some(root_bytes),
        None => {
            let image: Option<ImageRecord> = cluster.records.read(&image_key(&spec.image)).await?;
            let more = if spec.has_output_room { spec.output_bytes } else { 0 };
            image.and_then(|image| image.size_bytes).map(|bytes| bytes.saturating_add(more))
        }
    };
    Ok(root_bytes.map(|bytes| bytes.saturating_add(spec.output_bytes)))
}

/// The budget for the month of the tenant of the job with this name, and what is gone of it.
pub fn month(cluster: &Cluster, full: &str) -> Option<(Money, Spending)> {
    let budget = cluster.accounts.quota_of(full).budget_month?;
    Some((budget, cluster.ledger.spending(Some(&TenantName::of(full)))))
}
