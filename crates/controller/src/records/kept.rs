//! The records of disks that are kept at providers.

use std::time::Duration;

use perigee_model::RentalId;
use perigee_model::kept::{KeptDisk, KeptState};
use serde::{Deserialize, Serialize};

/// A host waits for so long until its replicas stand still and somebody can tell what keeping them is worth.
const WANTED_MAX: Duration = Duration::from_secs(600);

/// A host waits for so long for a snapshot that the provider was asked for.
const ASKED_MAX: Duration = Duration::from_secs(3600);

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

/// Whether the host of such a disk has waited for long enough until it is kept.
pub fn is_late(kept: &KeptDisk, age_ms: impl FnOnce(u64) -> u64) -> bool {
    let (since_ms, max) = match kept.state {
        KeptState::Wanted => (Some(kept.wanted_ms), WANTED_MAX),
        KeptState::Asked => (kept.asked_ms, ASKED_MAX),
        KeptState::Kept | KeptState::Ending | KeptState::Gone => (None, ASKED_MAX),
    };
    since_ms.is_some_and(|ms| Duration::from_millis(age_ms(ms)) >= max)
}
