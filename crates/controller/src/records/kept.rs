//! The records of disks that are kept at providers.

use perigee_model::RentalId;
use serde::{Deserialize, Serialize};

/// The prefix of the records of [`perigee_model::kept::KeptDisk`].
pub const KEPT_DISKS: &str = "kept_disks/";

/// The key of a [`perigee_model::kept::KeptDisk`]: by the rental whose disk it is.
pub fn kept_disk_key(of: &RentalId) -> String {
    format!("{KEPT_DISKS}{of}")
}

/// Which rental's host has a disk made of a kept one. It is written before the provider is asked for the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptUse {
    pub rental: Option<RentalId>,
    /// How many rentals before it had an instance whose host did not join.
    pub failed: u32,
}

/// The key of a [`KeptUse`].
pub fn kept_use_key(of: &RentalId) -> String {
    format!("kept_uses/{of}")
}
