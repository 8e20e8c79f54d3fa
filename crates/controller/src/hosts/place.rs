//! In which order the hosts of a site get VMs.

use perigee_model::balance::SetPlace;
use perigee_model::job::Site;
use perigee_model::{Problem, SiteId};

use crate::cluster::Cluster;
use crate::cluster::balance::{BalanceRecord, balance_key};

/// `PUT /sites/{site}/place`. VMs that run stay where they are.
///
/// # Errors
/// `NotFound` for a site without a host.
pub async fn set(cluster: &Cluster, site: &SiteId, ask: SetPlace) -> Result<Site, Problem> {
    let _turn = cluster.balances.turn.lock().await;
    let known = super::site(cluster, site)?;
    let change = |record: Option<BalanceRecord>| BalanceRecord {
        place: ask.place,
        ..record.unwrap_or_default()
    };
    cluster.records.update(&balance_key(site), change).await?;
    cluster.balances.set_place(site, ask.place);
    Ok(Site { place: ask.place, ..known })
}
