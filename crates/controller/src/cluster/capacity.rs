//! The capacity of a host for VMs.

use std::sync::atomic::AtomicU64;

use perigee_model::vm::{Accelerator, HostReport};
use perigee_planner::queue::Demand;

/// The virtual CPUs for each CPU of a host. Most jobs wait for their disks most of the time.
pub const VCPUS_PER_CPU: u32 = 4;

/// The limits of the memory that is reserved for the host itself, which is otherwise a sixteenth of it.
const RESERVE_BYTES_MIN: u64 = 64 << 20;
const RESERVE_BYTES_MAX: u64 = 2 << 30;

/// What the scheduler has done since the controller started.
#[derive(Debug, Default)]
pub struct Counters {
    pub passes: AtomicU64,
    pub pass_us: AtomicU64,
    pub placed: AtomicU64,
}

pub fn capacity(report: &HostReport) -> Demand {
    let reserve = (report.memory_bytes / 16).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX);
    Demand {
        cpus: report.cpus.saturating_mul(VCPUS_PER_CPU),
        memory_bytes: report.memory_bytes.saturating_sub(reserve),
    }
}

/// How many jobs a host stages and boots at once. A boot uses one CPU as long as it lasts; with TCG it uses all
/// CPUs that QEMU can get.
pub fn starts_at_once(report: &HostReport) -> u32 {
    match report.accelerator {
        Accelerator::Kvm => report.cpus.saturating_mul(2).max(1),
        Accelerator::Tcg => report.cpus.max(1),
    }
}
