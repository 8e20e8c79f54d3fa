//! What was measured, as results.json has it.

use std::collections::BTreeMap;

use perigee_lab::paper::Figure;
use perigee_model::HostId;
use perigee_model::measurement::{DiskFigures, DiskPath, HostMeasurement, NetworkFigures};
use serde::{Deserialize, Serialize};

/// One run of the experiment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    pub versions: BTreeMap<String, String>,
    pub cpus: usize,
    /// The machine's load at the end, which other processes may have caused.
    pub load_1min: f64,
    pub is_quick: bool,
    /// Of the WAN.
    pub rtt_ms: u64,
    pub rate_bits_per_s: u64,
    /// How long each figure was measured at most.
    pub length_s: u64,
    /// A host of the own site: against its neighbour, and against the rented host.
    pub own: HostMeasurement,
    /// The rented host: against its neighbour, and against the own host.
    pub rented: HostMeasurement,
    /// It follows from the rest.
    #[serde(skip_deserializing)]
    pub paper: Vec<Figure>,
}

/// Against which other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// Of the same site.
    Near,
    /// At the other end of the WAN.
    Far,
}

impl Where {
    pub fn words(self) -> &'static str {
        match self {
            Self::Near => "in its site",
            Self::Far => "over the WAN",
        }
    }
}

pub fn link(of: &HostMeasurement, at: Where) -> Option<&NetworkFigures> {
    of.networks.get(match at {
        Where::Near => 0,
        Where::Far => 1,
    })
}

/// Its own disk, or one of another host.
pub fn disk(of: &HostMeasurement, path: DiskPath, at: Where) -> Option<&DiskFigures> {
    let with: &HostId = match path {
        DiskPath::Pool => &of.host,
        DiskPath::Nbd | DiskPath::Iscsi => &link(of, at)?.with,
    };
    let found = of.disks.iter().find(|disk| disk.path == path && disk.at == *with);
    found.and_then(|disk| disk.figures.as_ref())
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub fn mbits(bytes_per_s: u64) -> f64 {
    bytes_per_s as f64 * 8.0 / 1e6
}
