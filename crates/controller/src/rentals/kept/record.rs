//! What is shown of kept disks, and what the ledger has of them.

use perigee_model::Problem;
use perigee_model::kept::KeptDisk;
use perigee_model::money::Money;

use super::super::money;
use crate::cluster::Cluster;
use crate::cluster::rentals::owner;
use crate::records::{KEPT_DISKS, KeptUse, kept_disk_key, kept_use_key};

/// Whom the ledger knows it as: what is spent for it counts for the budget of rented hosts.
fn payer(kept: &KeptDisk) -> String {
    format!("{}/disk", owner(&kept.id))
}

/// `GET /kept-disks`: all that are kept or were lately, the newest one last.
///
/// # Errors
/// If the store can't be read.
pub async fn list(cluster: &Cluster) -> Result<Vec<KeptDisk>, Problem> {
    let mut all: Vec<KeptDisk> = cluster.records.list(KEPT_DISKS).await?;
    all.sort_by_key(|kept| kept.wanted_ms);
    for kept in &mut all {
        let used: Option<KeptUse> = cluster.records.read(&kept_use_key(&kept.id)).await?;
        kept.used_by = used.and_then(|used| used.rental);
        kept.reserved = cluster.ledger.entry(&payer(kept)).map_or(Money::ZERO, |one| one.reserved);
        kept.spent = Some(spent(cluster, kept));
    }
    Ok(all)
}

/// What it has cost until now, or in all.
pub fn spent(cluster: &Cluster, kept: &KeptDisk) -> Money {
    if let Some(spent) = cluster.ledger.entry(&payer(kept)).and_then(|entry| entry.spent) {
        return spent;
    }
    // One that was not made costs nothing.
    let is_there = kept.snapshot.is_some() && !kept.state.is_over();
    let Some(asked_ms) = kept.asked_ms.filter(|_| is_there) else {
        return Money::ZERO;
    };
    let seconds = cluster.clock.age_ms(asked_ms) / 1000;
    KeptDisk::cost(kept.per_gib_month, kept.stored_bytes, seconds)
}

/// Reserves the most that it may cost.
///
/// # Errors
/// `Conflict` if the budget does not allow that; if the store fails.
pub async fn reserve(cluster: &Cluster, kept: &KeptDisk) -> Result<(), Problem> {
    let what = || format!("can't keep the disk of host {}", kept.host);
    let budget = cluster.settings.renting.budget.get().ok_or_else(|| {
        Problem::conflict(what(), "the cluster has no budget for rented hosts")
            .next("start the controller with --rent-budget")
    })?;
    let (high, beyond) = (kept.high(), money::beyond(cluster, None));
    let counts = |at_ms| money::counts(cluster, at_ms);
    let allows = |others: perigee_model::budget::Spending| {
        let others = others.taken().plus(beyond);
        if others.plus(high) <= budget {
            return Ok(());
        }
        let why = format!("{high} with {others} for rented hosts is over the budget of {budget}");
        Err(Problem::conflict(what(), why))
    };
    cluster.ledger.reserve_rented(&payer(kept), high, counts, allows).await
}

/// Settles what one has cost that is about to be over, or reserves nothing any more for one that was not made. This may be repeated.
///
/// # Errors
/// If the store fails.
pub async fn settle(cluster: &Cluster, kept: &KeptDisk) -> Result<(), Problem> {
    let payer = payer(kept);
    match spent(cluster, kept) {
        Money::ZERO => cluster.ledger.release(&payer).await,
        spent => cluster.ledger.settle_rented(&payer, spent).await,
    }
}

/// Reserves nothing any more for one that the provider has refused.
///
/// # Errors
/// If the store fails.
pub async fn release(cluster: &Cluster, kept: &KeptDisk) -> Result<(), Problem> {
    cluster.ledger.release(&payer(kept)).await
}

/// Removes the records of those that were over long ago, and of those that have cost nothing a day after their end.
///
/// # Errors
/// If the store fails.
pub async fn prune(cluster: &Cluster) -> Result<(), Problem> {
    let all: Vec<KeptDisk> = cluster.records.list(KEPT_DISKS).await?;
    for kept in all.into_iter().filter(|kept| kept.state.is_over()) {
        let age_s = cluster.clock.age_ms(kept.ended_ms.unwrap_or(0)) / 1000;
        let has_cost = spent(cluster, &kept) > Money::ZERO;
        let kept_s = if has_cost { money::PERIOD_S + 86_400 } else { 86_400 };
        if age_s > kept_s {
            cluster.ledger.forget(&payer(&kept)).await?;
            cluster.records.remove(&kept_use_key(&kept.id)).await?;
            cluster.records.remove(&kept_disk_key(&kept.id)).await?;
        }
    }
    Ok(())
}
