//! Which disk the pool of a host gets that is about to be asked for.

use perigee_cloud::Provider;
use perigee_model::Problem;
use perigee_model::kept::{KeptDisk, KeptState, PoolDisk};
use perigee_model::rental::Rental;
use perigee_model::rental::states::Requested;

use crate::cluster::Cluster;
use crate::records::{KEPT_DISKS, KeptUse, kept_use_key};

/// Whether the provider keeps disks, and says for how much.
pub fn keeps(provider: &dyn Provider) -> bool {
    let price = provider.snapshots().and_then(|of| of.price().per_gib_month_micros);
    price.is_some()
}

/// A blank one, or one of the kept disk of the rental's site, which no other rental uses from then on. `None`: the pool is on the root disk. Asked
/// again for one rental the answer is the same, unless the kept disk has ended meanwhile.
///
/// # Errors
/// If the store can't be used.
pub async fn disk(
    cluster: &Cluster,
    provider: &dyn Provider,
    rental: &Rental,
) -> Result<Option<PoolDisk>, Problem> {
    let blank = PoolDisk::of(rental.disk_bytes).filter(|_| keeps(provider));
    let Some(blank) = blank else { return Ok(None) };
    let _turn = cluster.kept_disks.lock().await;
    let all: Vec<KeptDisk> = cluster.records.list(KEPT_DISKS).await?;
    let fits = |kept: &&KeptDisk| {
        let is_there = (&kept.provider, &kept.site) == (&rental.provider, &rental.site);
        is_there && kept.state == KeptState::Kept && kept.disk_bytes <= blank.bytes
    };
    let (mut own, mut free) = (None, None);
    for kept in all.iter().filter(fits) {
        let used: KeptUse =
            cluster.records.read(&kept_use_key(&kept.id)).await?.unwrap_or_default();
        match &used.rental {
            Some(user) if *user == rental.id => own = Some(kept),
            Some(_) => {}
            None => free = free.or(Some((kept, used.failed))),
        }
    }
    let kept = match (own, free) {
        (Some(own), _) => own,
        // A request that may have been made was for a blank one, and the same is asked for again.
        (None, Some((kept, failed))) if rental.requested != Requested::Perhaps => {
            let used = KeptUse { rental: Some(rental.id.clone()), failed };
            cluster.records.put(&kept_use_key(&kept.id), &used).await?;
            kept
        }
        _ => return Ok(Some(blank)),
    };
    Ok(Some(PoolDisk { snapshot: kept.snapshot.clone(), ..blank }))
}
