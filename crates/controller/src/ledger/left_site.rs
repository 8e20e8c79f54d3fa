//! What leaves the sites of rented hosts: the provider wants money for that.
//!
//! The counters are those from which the cost of a job is reckoned: what goes over the network for a VM's disks, its migrations, and the volumes
//! that move. Each source says its own sum. While the source goes on, the sum is in memory, for the counters are still there after a restart;
//! at the end of the source the sum is stored, before the source's own record says that it is over.

use std::collections::BTreeMap;

use perigee_model::{HostId, Problem};

use crate::cluster::Cluster;
use crate::records::{LeftSite, left_site_key};

/// Whether what goes from one host to another one leaves the site of a rented host. Where an own host was is not known any more if it was
/// removed: that counts as another site.
pub fn leaves(cluster: &Cluster, from: &HostId, to: &HostId) -> bool {
    if from == to || cluster.rentals.alive_of_host(from).is_none() {
        return false;
    }
    let (left, reached) = (cluster.site_of(from), cluster.site_of(to));
    left.is_none() || left != reached
}

/// Notes what has left because of a source that goes on, by the host that it left from.
pub fn so_far(cluster: &Cluster, source: &str, left: &BTreeMap<HostId, u64>) {
    for (host, bytes) in left {
        if let Some(rental) = cluster.rentals.alive_of_host(host) {
            cluster.rentals.note_leaving(&rental, source, *bytes);
        }
    }
}

/// Notes what has left because of a source that is over. Once more changes nothing.
///
/// # Errors
/// If the store fails.
pub async fn over(
    cluster: &Cluster,
    source: &str,
    left: &BTreeMap<HostId, u64>,
) -> Result<(), Problem> {
    for (host, bytes) in left {
        let Some(rental) = cluster.rentals.alive_of_host(host) else { continue };
        let _turn = cluster.rentals.leaving.lock().await;
        let change = |known: Option<LeftSite>| {
            let mut known = known.unwrap_or_default();
            known.note(source, *bytes);
            known
        };
        let known = cluster.records.update(&left_site_key(&rental), change).await?;
        cluster.rentals.put_left(&rental, known);
    }
    Ok(())
}
