//! Rented hosts: one driver for each rental that is not over, which alone writes the rental's record, and the lists of the providers, which are
//! compared with the records.
//!
//! What the driver does next is [`perigee_model::rental::states::decide`]'s, from what [`facts`] gathers. The record says that the provider is asked
//! before the provider is asked, and the money is reserved before ([`money`]). No provider is called under a lock, and each is waited for so
//! long at most. An instance of the cluster that no unfinished rental owns gets a rental that drains its host and ends it (`compare.rs`).
//! So each instance has a record that ends it, whatever was killed in between. What becomes of replicas at a host that is given back: `kept/`.

mod ask;
mod automatic;
mod compare;
mod driver;
mod facts;
mod kept;
mod money;
mod offered;
mod plan;
mod pool_disk;
mod request;
mod user_data;

pub use automatic::{run as rent_by_itself, set_renting};
pub use compare::{compare, hear};
pub use driver::drive;
#[cfg(test)]
pub use kept::disk as pool_disk_of;
pub use kept::{list as kept_disks, run as keep_disks};
pub use plan::plan;
#[cfg(test)]
pub use request::rent_for;
pub use request::{end, get, list, offers, rent};

use std::time::Duration;

use perigee_cloud::{CloudError, CloudErrorKind};

use crate::cluster::Cluster;

/// The id of the cluster in the tags of its instances.
fn cluster_id(cluster: &Cluster) -> String {
    cluster.authority.fingerprint().chars().take(32).collect()
}

/// Starts the drivers of all rentals that are not over, after a restart.
pub fn drive_all(cluster: &Cluster) {
    for rental in cluster.rentals.all() {
        if !rental.state.is_over() {
            cluster.drive_rental(&rental.id);
        }
    }
}

/// What a provider answers, if it does so in time.
async fn within<T>(
    max: Duration,
    answer: impl Future<Output = Result<T, CloudError>>,
) -> Result<T, CloudError> {
    tokio::time::timeout(max, answer).await.unwrap_or_else(|_| {
        let message = format!("the provider has not answered for {} s", max.as_secs());
        Err(CloudError { kind: CloudErrorKind::Unclear, message })
    })
}
