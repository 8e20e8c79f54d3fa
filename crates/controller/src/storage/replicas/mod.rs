//! Replicas of volumes at other sites: one driver each, which alone writes the replica's record.
//!
//! A replica is wanted as long as its intent is in the store. The driver begins a round when one is due, waits until
//! the round is complete, and then tells the volume's home, which keeps the layers that the replica stands on
//! ([`perigee_model::replica`]). Of a rented host that is given back the disk may be kept meanwhile (`kept.rs`). Each request can be repeated, so a controller or a volume server that is killed in
//! the middle goes on where it was.

mod carry_out;
mod driver;
mod kept;
mod lost;
mod promote;
mod request;

pub use driver::drive;
pub use kept::{at_host, has_home, is_still};
pub use lost::{is_superseded, run};
pub use promote::promote;
pub use request::{being_shipped, check_far, list, of_volume, replicate, stop};

use perigee_model::home::Tenure;
use perigee_model::replica::Replica;
use perigee_model::{HostId, Problem, RentalId, SiteId, VolumeName};
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;

/// What people asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaIntent {
    pub volume: VolumeName,
    pub site: SiteId,
    pub every_s: u64,
    pub keep: u32,
    /// It is to be dropped.
    pub stop: bool,
}

/// A replica as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaRecord {
    /// As shown to people.
    pub view: Replica,
    /// The volume's home when that last answered.
    pub home: Option<HostId>,
    /// The volume's tenure there.
    pub tenure: Option<Tenure>,
    /// Whether the volume had sessions there.
    pub in_use: Option<bool>,
    /// The NBD address of the home from which the present round comes; `None`: not known.
    pub from_nbd_addr: Option<String>,
    /// It stands still for this kept disk: no round is made, and its home is told nothing.
    #[serde(default)]
    pub held: Option<RentalId>,
}

impl ReplicaRecord {
    /// One of which nothing was seen yet but this.
    pub fn new(view: Replica) -> Self {
        Self { view, home: None, tenure: None, in_use: None, from_nbd_addr: None, held: None }
    }
}

const INTENTS: &str = "intents/replicas/";

fn intents_of(volume: &VolumeName) -> String {
    format!("{INTENTS}{volume}/")
}

fn intent_key(volume: &VolumeName, site: &SiteId) -> String {
    format!("{INTENTS}{volume}/{site}")
}

fn records_of(volume: &VolumeName) -> String {
    format!("replicas/{volume}/")
}

fn record_key(volume: &VolumeName, site: &SiteId) -> String {
    format!("replicas/{volume}/{site}")
}

/// Starts the drivers of all replicas, after a restart.
///
/// # Errors
/// If the store can't be read.
pub async fn drive_all(cluster: &Cluster) -> Result<(), Problem> {
    for intent in cluster.records.list::<ReplicaIntent>(INTENTS).await? {
        cluster.drive_replica(&intent.volume, &intent.site);
    }
    Ok(())
}
