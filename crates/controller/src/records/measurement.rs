//! The records of measurements of hosts.

use perigee_model::measurement::{HostMeasurement, RentedKind};
use perigee_model::{HostId, VolumeName};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::hash::hex;

/// The prefix of the records of measurements.
pub const MEASUREMENTS: &str = "measurements/";

/// The prefix of what was measured of kinds of rented hosts.
pub const MEASURED_KINDS: &str = "measured_kinds/";

/// The last measurement of a host, with everything that is to be removed if the controller is killed meanwhile.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MeasurementRecord {
    /// As shown to people.
    pub view: HostMeasurement,
    /// The volumes that were made for it, and their homes.
    pub volumes: Vec<(HostId, VolumeName)>,
}

/// The key of a [`MeasurementRecord`].
pub fn measurement_key(host: &HostId) -> String {
    format!("{MEASUREMENTS}{host}")
}

/// The key of what was measured of a kind. A provider may give its kinds any names.
pub fn measured_kind_key(kind: &RentedKind) -> String {
    let text = format!("{}\n{}", kind.provider, kind.kind);
    format!("{MEASURED_KINDS}{}", hex(&Sha256::digest(text)))
}
