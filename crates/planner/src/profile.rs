//! What a finished run teaches about a job.

use std::collections::BTreeMap;

use perigee_model::VolumeName;
use serde::{Deserialize, Serialize};

use crate::DiskFacts;

/// A finished run, whether it was local, remote or migrated midway.
#[derive(Debug, Clone)]
pub struct Measured {
    /// From VM start to the command's start.
    pub boot_s: f64,
    /// From the command's start to its end.
    pub wall_s: f64,
    /// Time of that in which the VM stood still for migrations.
    pub paused_s: f64,
    /// vCPU time from the command's start to its end, of all vCPUs and hosts.
    pub vcpu_s: f64,
    pub cpus: u32,
    /// The data volumes, by the names in the job file.
    pub volumes: Vec<DiskFacts>,
}

/// What a job does, wherever it runs. The controller keeps it as JSON, one for each history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkProfile {
    /// Runs it was learned from.
    pub runs: u32,
    pub boot_s: f64,
    /// Time in which the command computes.
    pub cpu_s: f64,
    /// Disk time that passes while the command computes (read-ahead, several processes).
    pub overlap_s: f64,
    /// Time in which it neither computes nor waits for its data volumes.
    pub other_s: f64,
    pub volumes: BTreeMap<VolumeName, VolumeWork>,
}

/// What the job does to one volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeWork {
    pub reads: f64,
    pub writes: f64,
    pub flushes: f64,
    pub bytes: f64,
    /// Mean requests in flight while there is at least one.
    pub queue_depth: f64,
    /// Mean time of a request at the volume's home.
    pub home_latency_us: f64,
}
