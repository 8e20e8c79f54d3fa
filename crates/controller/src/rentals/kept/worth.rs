//! What the planner has to know to say whether a disk is worth to be kept.

use perigee_model::kept::KeptDisk;
use perigee_model::money::Money;
use perigee_model::rental::states::RentalState;
use perigee_model::volume::{PoolInfo, VolumeInfo};
use perigee_model::{HostId, Problem, SiteId};
use perigee_planner::rent::keep::{KeepFacts, Shipped};

use crate::cluster::Cluster;
use crate::planning::links;
use crate::storage::replicas::ReplicaRecord;
use crate::storage::volumes;

/// What is known now of the disk and of its replicas.
///
/// # Errors
/// If the host, or the home of a volume, does not say what it has.
pub async fn facts(
    cluster: &Cluster,
    kept: &KeptDisk,
    replicas: &[ReplicaRecord],
    per_gib_month: Option<Money>,
) -> Result<KeepFacts, Problem> {
    let host = cluster.hosts.get(&kept.host)?;
    let pool: PoolInfo = host.volume.get("/v1/pool").await?;
    let mut shipped = Vec::new();
    for replica in replicas {
        let volume = &replica.view.volume;
        let home = cluster.hosts.get(&volumes::find(cluster, volume).await?.home)?;
        let info: VolumeInfo = home.volume.get(&format!("/v1/volumes/{volume}")).await?;
        shipped.push(Shipped {
            bytes: info.allocated_bytes,
            egress_per_gib: egress(cluster, &home.id, &home.addresses.site),
            bytes_per_s: links::toward(cluster, &home.id, &kept.host)
                .map(|link| link.rate_bytes_per_s),
        });
    }
    let waiting = cluster.renter.settings().waiting_costs_per_hour;
    Ok(KeepFacts {
        stored_bytes: pool.data_bytes.min(kept.disk_bytes),
        per_gib_month,
        gaps_s: gaps_s(cluster, kept),
        waiting_per_hour: waiting.unwrap_or_default(),
        replicas: shipped,
    })
}

/// What each GiB costs that leaves the site of a home; `None`: not known. Nobody is paid for what leaves the users' own sites.
fn egress(cluster: &Cluster, home: &HostId, site: &SiteId) -> Option<Money> {
    let price = cluster.prices.now(&cluster.rentals).and_then(|mut now| now.of(home, site));
    match price {
        None => Some(Money::ZERO),
        Some(price) => price.egress_per_gib_micros.map(|micros| Money::from_micros(micros.get())),
    }
}

/// For how long no host was rented at its site, each time.
fn gaps_s(cluster: &Cluster, kept: &KeptDisk) -> Vec<f64> {
    let all = cluster.rentals.all().into_iter();
    let of_site = all.filter(|one| one.site == kept.site && one.joined_ms.is_some());
    let mut times: Vec<(u64, u64)> = of_site
        .filter_map(|one| {
            let end = one.steps.last().filter(|last| last.state == RentalState::Gone);
            Some((one.since_ms(RentalState::Asked)?, end.map_or(u64::MAX, |end| end.at_ms)))
        })
        .collect();
    times.sort_unstable();
    let (mut gaps_s, mut until_ms) = (Vec::new(), None::<u64>);
    for (from_ms, to_ms) in times {
        let gap_ms = until_ms.and_then(|until_ms| from_ms.checked_sub(until_ms));
        gaps_s.extend(gap_ms.map(|ms| ms as f64 / 1000.0));
        until_ms = until_ms.max(Some(to_ms));
    }
    gaps_s
}
