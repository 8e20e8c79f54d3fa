//! The rounds of replicas that are made here.

use std::collections::HashMap;

use perigee_model::VolumeName;

/// The rounds of replicas that are made here, in memory only: a round ends with the server.
#[derive(Default)]
pub(crate) struct Pulls {
    /// The number of the last one.
    pub(crate) last: u64,
    /// The number of each replica's last one.
    pub(crate) of: HashMap<VolumeName, u64>,
}
