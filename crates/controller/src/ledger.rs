//! What jobs may cost, beside the budgets of their tenants, and what they have cost.
//!
//! Whoever starts something that costs a tenant money reserves the high end of its price before anything is asked for, and settles what was
//! spent when that is over. Both can be repeated: an owner, such as `job/NAME/RUN`, has one entry. See [`crate::cluster::ledger`]. Rented
//! hosts are no tenant's, and have a budget of their own (`rentals/money.rs`); what they send out of their sites is counted in [`left_site`].

pub mod left_site;

use std::sync::Arc;
use std::time::Duration;

use perigee_model::money::Money;
use perigee_model::{Problem, TenantName};

use crate::cluster::Cluster;
use crate::cluster::tasks::Task;

/// How often somebody looks whether there are many lines.
const SUM_UP_EVERY: Duration = Duration::from_secs(60);

/// Reserves so much for an owner. Once more with the same amount or a lower one changes nothing; with a higher one, the difference is
/// reserved too. `None`: it is no tenant's, and no budget limits it.
///
/// # Errors
/// `NoSpace` if the tenant's budget for the month has no room for it; `Conflict` if the owner's entry is settled.
pub async fn reserve(
    cluster: &Cluster,
    owner: &str,
    tenant: Option<TenantName>,
    high: Money,
) -> Result<(), Problem> {
    let quota = tenant.as_ref().and_then(|tenant| cluster.accounts.quota(tenant).ok());
    let budget = quota.and_then(|quota| quota.budget_month);
    cluster.ledger.reserve(owner, tenant, high, budget).await
}

/// Notes what an owner has spent; nothing is reserved for it any more. Once more changes nothing, and so it is for an owner that has
/// reserved nothing.
///
/// # Errors
/// If the store fails.
pub async fn settle(cluster: &Cluster, owner: &str, spent: Money) -> Result<(), Problem> {
    cluster.ledger.settle(owner, spent).await?;
    // A job may wait for what is left.
    cluster.index.changed.notify_one();
    Ok(())
}

/// Reserves nothing any more for what has not begun.
///
/// # Errors
/// If the store fails.
pub async fn release(cluster: &Cluster, owner: &str) -> Result<(), Problem> {
    cluster.ledger.release(owner).await?;
    // A job may wait for that, also the owner itself.
    cluster.index.changed.notify_one();
    Ok(())
}

/// The endless task that sums up old lines.
pub async fn keep(cluster: Arc<Cluster>, task: Task) {
    loop {
        task.round(async {
            let removed = cluster.ledger.sum_up().await?;
            Ok(format!("removed {removed} lines that are summed up"))
        })
        .await;
        tokio::time::sleep(SUM_UP_EVERY).await;
    }
}
