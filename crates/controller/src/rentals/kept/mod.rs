//! Replicas at rented hosts that are given back: the disk of the pool is kept at the provider, if that is worth its price.
//!
//! ```text
//! the host is empty ─▶ a record ─▶ its replicas stand still ─▶ worth it, and paid for? ─▶ asked ─▶ kept ─▶ a host has a disk made of it ─▶ deleted
//!                                                                    └─ no: the host goes, and its replicas are shipped again
//! ```
//!
//! The rental's driver makes the record, and gives the host back only when the snapshot is complete, or none comes ([`lets_go`]). From then on one
//! task writes the record (`keep.rs`). The record says that the provider is asked before it is asked, and its id is a tag of the
//! snapshot. A snapshot that no record owns is deleted after the grace period, as instances are.

mod keep;
mod pool;
mod record;
mod worth;

pub use keep::run;
pub use pool::disk;
pub use record::list;

use perigee_model::kept::{KeptDisk, KeptState, PoolDisk};
use perigee_model::limits::KEPT_DISKS as LIMIT;
use perigee_model::money::Money;
use perigee_model::rental::Rental;
use perigee_model::{HostId, Problem};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::records::{KEPT_DISKS, is_late, kept_disk_key};
use crate::storage::replicas::{self, ReplicaRecord};

/// Whether a host at which nothing else is may be given back, as far as its replicas go. The first time that this is asked, their disk is wanted.
///
/// # Errors
/// If the store can't be used.
pub async fn lets_go(cluster: &Cluster, rental: &Rental) -> Result<bool, Problem> {
    let key = kept_disk_key(&rental.id);
    if let Some(kept) = cluster.records.read::<KeptDisk>(&key).await? {
        return Ok(!kept.state.is_being_made() || is_late(&kept, |ms| cluster.clock.age_ms(ms)));
    }
    let provider = cluster.settings.renting.provider(&rental.provider);
    let keeps = provider.is_ok_and(|provider| pool::keeps(provider.as_ref()));
    let (Some(instance), Some(disk)) = (&rental.instance, PoolDisk::of(rental.disk_bytes)) else {
        return Ok(true);
    };
    if !keeps || has_other_host(cluster, rental) {
        return Ok(true);
    }
    let mut replicas = replicas::at_host(cluster, &rental.host).await?;
    replicas.retain(|one| one.view.complete_ms.is_some());
    if replicas.is_empty() {
        return Ok(true);
    }
    let count = cluster.records.keys(KEPT_DISKS).await?.len() + 1;
    if let Err(error) = LIMIT.check(count) {
        tracing::warn!(rental = %rental.id, "its replicas are not kept: {error}");
        return Ok(true);
    }
    let kept = KeptDisk {
        id: rental.id.clone(),
        provider: rental.provider.clone(),
        site: rental.site.clone(),
        host: rental.host.clone(),
        instance: instance.clone(),
        volumes: replicas.into_iter().map(|one| one.view.volume).collect(),
        state: KeptState::Wanted,
        why: String::new(),
        wanted_ms: now_ms(),
        asked_ms: None,
        kept_ms: None,
        ended_ms: None,
        snapshot: None,
        disk_bytes: disk.bytes,
        stored_bytes: disk.bytes,
        per_gib_month: Money::ZERO,
        shipping: Money::ZERO,
        used_by: None,
        spent: None,
        reserved: Money::ZERO,
    };
    cluster.records.create(&key, &kept).await?;
    Ok(false)
}

/// What an empty host waits for; empty if it waits for nothing here.
///
/// # Errors
/// If the store can't be read.
pub async fn why_waits(cluster: &Cluster, rental: &Rental) -> Result<String, Problem> {
    let kept: Option<KeptDisk> = cluster.records.read(&kept_disk_key(&rental.id)).await?;
    Ok(match kept.is_some_and(|kept| kept.state.is_being_made()) {
        true => "the disk with its replicas is kept at the provider first".to_owned(),
        false => String::new(),
    })
}

/// Whether another host of the site is up and stays, to which its replicas can be shipped at once.
fn has_other_host(cluster: &Cluster, rental: &Rental) -> bool {
    cluster.hosts.up().iter().any(|host| {
        let is_there = host.addresses.site == rental.site && host.id != rental.host;
        is_there && cluster.hosts.drain(&host.id).is_none()
    })
}

/// The replicas of a kept disk that are wanted and are at no other host.
async fn replicas_of(cluster: &Cluster, kept: &KeptDisk) -> Result<Vec<ReplicaRecord>, Problem> {
    let mut all = replicas::at_host(cluster, &kept.host).await?;
    all.retain(|one| kept.volumes.contains(&one.view.volume) && one.view.site == kept.site);
    Ok(all)
}

/// Whether a host is up.
fn is_up(cluster: &Cluster, host: &HostId) -> bool {
    cluster.hosts.get(host).is_ok()
        && cluster.hosts.state(host) == perigee_model::job::HostState::Up
}
