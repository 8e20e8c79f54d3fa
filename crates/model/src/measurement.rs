//! What a host can do, as it is measured: its links, its pool's disk, and disks at other hosts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::units::format_bytes;
use crate::{HostId, Problem, SiteId, VolumeName};

/// The most bytes of a file or a volume that is measured.
pub const MEASURED_BYTES_MAX: u64 = 256 << 20;

/// The fewest that show anything.
pub const MEASURED_BYTES_MIN: u64 = 16 << 20;

/// A measurement takes at most this part of what is free in a pool.
pub const FREE_PART: u64 = 8;

/// The names of volumes that are made to be measured begin so. What is in them is overwritten.
pub const MEASURED_PREFIX: &str = "perigee-measured-";

/// How many bytes may be written to a pool with so many free bytes, to measure its disk.
///
/// # Errors
/// `NoSpace` if that are fewer than show anything.
pub fn measured_bytes(free_bytes: u64) -> Result<u64, Problem> {
    let part = free_bytes / FREE_PART;
    if part < MEASURED_BYTES_MIN {
        let why = format!(
            "its pool has {} free; a measurement takes at most an eighth of that, and needs {}",
            format_bytes(free_bytes),
            format_bytes(MEASURED_BYTES_MIN)
        );
        return Err(Problem::no_space("can't measure a disk", why).next("free space in the pool"));
    }
    // Whole MiB, the size of a request.
    Ok(part.min(MEASURED_BYTES_MAX) >> 20 << 20)
}

/// Has a host measured.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MeasureHost {
    /// The other hosts. Default: another one of its site, and one of each other site.
    #[serde(default)]
    pub against: Vec<HostId>,
    /// For how long each figure is measured; seconds. A slow disk takes longer.
    #[serde(default = "default_length_s")]
    pub length_s: u64,
    /// Also while VMs run there, which disturb the measurement and are disturbed by it.
    #[serde(default)]
    pub beside_vms: bool,
}

/// How long each figure is measured by default; seconds.
pub fn default_length_s() -> u64 {
    10
}

/// How far a measurement is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MeasurementState {
    /// It is under way.
    Measuring,
    /// All that could be measured was.
    Done,
    /// It ended before, with what was measured until then.
    CalledOff,
}

/// A kind of machine of a provider.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct RentedKind {
    /// The provider's name.
    pub provider: String,
    /// Its name of the kind.
    pub kind: String,
}

/// What was measured of one host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostMeasurement {
    /// The host.
    pub host: HostId,
    /// What was rented, if the host was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<RentedKind>,
    /// How far it is.
    pub state: MeasurementState,
    /// What is measured now; when it is over, why it ended before its end. Empty if there is nothing to say.
    pub now: String,
    /// Who has asked for it.
    pub by: String,
    /// When it began; Unix time of the controller.
    pub begun_ms: u64,
    /// When it ended; `None` while it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// For how long each figure was measured; seconds. A slow disk took longer.
    pub length_s: u64,
    /// The links to other hosts.
    pub networks: Vec<NetworkFigures>,
    /// Its own pool's disk, and volumes of other hosts.
    pub disks: Vec<DiskMeasurement>,
}

/// The link with another host, over the connections that hosts have with each other: HTTP, with TLS unless the cluster has none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkFigures {
    /// The other host.
    pub with: HostId,
    /// Its site.
    pub site: SiteId,
    /// Median of several TCP connects; milliseconds.
    pub rtt_ms: Option<f64>,
    /// From the host to the other one, with one stream; bytes per second.
    pub to_bytes_per_s: Option<u64>,
    /// From the other one, with one stream; bytes per second.
    pub from_bytes_per_s: Option<u64>,
    /// To the other one, with [`STREAMS`] streams; bytes per second.
    pub to_streams_bytes_per_s: Option<u64>,
    /// From the other one, with [`STREAMS`] streams; bytes per second.
    pub from_streams_bytes_per_s: Option<u64>,
    /// Why something of it was not measured; empty if all was.
    pub problem: String,
}

/// So many streams are measured beside a single one.
pub const STREAMS: u32 = 4;

/// How a disk is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskPath {
    /// A file in the host's own pool.
    Pool,
    /// A volume of another host, through the volume servers of both, as a VM reads and writes it.
    Nbd,
    /// A volume of another host, over iSCSI from that host's volume server. Nothing is encrypted.
    Iscsi,
}

/// A disk that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskMeasurement {
    /// How it was reached.
    pub path: DiskPath,
    /// The host that has it.
    pub at: HostId,
    /// Its figures; `None` if it was not measured.
    pub figures: Option<DiskFigures>,
    /// Why it was not measured; empty if it was.
    pub problem: String,
}

/// The figures of a disk. Sequential requests have 1 MiB, 4 at a time. Random ones have 4 KiB, one after another; each random write is followed
/// by a flush.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskFigures {
    /// The size of what was read and written.
    pub size_bytes: u64,
    /// Sequential reads; bytes per second.
    pub read_bytes_per_s: f64,
    /// Sequential writes; bytes per second.
    pub write_bytes_per_s: f64,
    /// Random reads per second.
    pub random_reads_per_s: f64,
    /// Random writes per second.
    pub random_writes_per_s: f64,
    /// Whether the page cache was passed by. A volume of another host may be in the memory of that host.
    pub direct: bool,
}

/// Has a volume server measure a disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MeasureDisk {
    /// Which.
    pub disk: MeasuredDisk,
    /// Bytes to read and write at most.
    pub size_bytes: u64,
    /// For how long each of the four figures is measured; milliseconds. A slow disk takes longer.
    pub length_ms: u64,
}

/// A disk that a volume server measures. All of its content is lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredDisk {
    /// A file in its pool, which nobody else sees.
    Pool,
    /// An export of its own, as a VM of its host opens it.
    Export {
        /// The export's name: `VOLUME@EPOCH`.
        export: String,
    },
    /// A target of another host.
    Iscsi {
        /// Where it is.
        at: IscsiPortal,
        /// The name with which this host logs in.
        initiator: String,
    },
}

/// Has a volume server serve one volume over iSCSI to one initiator for a while.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OpenPortal {
    /// The volume.
    pub volume: VolumeName,
    /// The IP address to listen at; the port is any that is free.
    pub address: std::net::IpAddr,
    /// The name of the only initiator that may log in.
    pub initiator: String,
    /// It ends after so long; seconds.
    pub for_s: u64,
}

/// Where a target is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IscsiPortal {
    /// `IP:PORT`.
    pub portal: String,
    /// The target's iSCSI name.
    pub target: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProblemKind;

    #[test]
    fn a_measurement_takes_an_eighth_of_what_is_free_and_no_more_than_its_limit() {
        assert_eq!(measured_bytes(1 << 40).expect("room"), MEASURED_BYTES_MAX);
        assert_eq!(measured_bytes(1 << 30).expect("room"), 128 << 20);
        assert_eq!(measured_bytes((128 << 20) + 5).expect("room"), MEASURED_BYTES_MIN);
        let refused = measured_bytes((128 << 20) - 1).expect_err("too little");
        assert_eq!(refused.kind, ProblemKind::NoSpace);
        assert!(refused.why.contains("needs 16") && refused.why.contains("an eighth"), "{refused}");
    }
}
