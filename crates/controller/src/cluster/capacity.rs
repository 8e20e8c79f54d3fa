//! The capacity of a host for VMs.

use std::sync::atomic::{AtomicU64, Ordering};

use perigee_model::vm::{Accelerator, HostReport};
use perigee_planner::queue::Demand;

/// The virtual CPUs for each CPU of a host. Most jobs wait for their disks most of the time.
pub const VCPUS_PER_CPU: u32 = 4;

/// The limits of the memory that is reserved for the host itself, which is otherwise a sixteenth of it.
const RESERVE_BYTES_MIN: u64 = 64 << 20;
const RESERVE_BYTES_MAX: u64 = 2 << 30;

/// The upper ends of the classes into which the errors of predictions are counted, as shares of the measured time.
pub const ERROR_BUCKETS: [f64; 6] = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0];

/// What the scheduler has done since the controller started, and how its predictions came true.
#[derive(Debug, Default)]
pub struct Counters {
    pub passes: AtomicU64,
    pub pass_us: AtomicU64,
    pub placed: AtomicU64,
    /// Predictions with which jobs began that have succeeded since.
    pub predictions: AtomicU64,
    pub predictions_in_range: AtomicU64,
    /// How many errors are in each class of [`ERROR_BUCKETS`] and in none below; larger ones are in no class.
    pub prediction_errors: [AtomicU64; ERROR_BUCKETS.len()],
    /// Their sum.
    pub prediction_error_millionths: AtomicU64,
}

impl Counters {
    /// A prediction's job has ended. Infinite errors count as the largest.
    pub fn came_true(&self, in_range: bool, error: f64) {
        let add = |counter: &AtomicU64, by| counter.fetch_add(by, Ordering::Relaxed);
        add(&self.predictions, 1);
        add(&self.predictions_in_range, u64::from(in_range));
        let class = ERROR_BUCKETS.iter().position(|most| error <= *most);
        if let Some(count) = class.and_then(|class| self.prediction_errors.get(class)) {
            add(count, 1);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is clamped"
        )]
        add(&self.prediction_error_millionths, (error.clamp(0.0, 1e6) * 1e6) as u64);
    }
}

/// What VMs may take of a host: [`VCPUS_PER_CPU`] vCPUs for each CPU, and its memory but a sixteenth, which is bounded,
/// for the host itself.
pub fn capacity(report: &HostReport) -> Demand {
    capacity_of(report.cpus, report.memory_bytes)
}

/// The same for a machine with so many CPUs and so much memory.
pub fn capacity_of(cpus: u32, memory_bytes: u64) -> Demand {
    Demand { cpus: cpus.saturating_mul(VCPUS_PER_CPU), memory_bytes: for_vms_bytes(memory_bytes) }
}

/// What VMs may have of a host's memory.
pub fn for_vms_bytes(memory_bytes: u64) -> u64 {
    let reserve = (memory_bytes / 16).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX);
    memory_bytes.saturating_sub(reserve)
}

/// How many jobs a host stages and boots at once. A boot uses one CPU as long as it lasts; with TCG it uses all
/// CPUs that QEMU can get.
pub fn starts_at_once(report: &HostReport) -> u32 {
    match report.accelerator {
        Accelerator::Kvm => report.cpus.saturating_mul(2).max(1),
        Accelerator::Tcg => report.cpus.max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prediction_is_counted_in_the_class_of_its_error() {
        let counters = Counters::default();
        counters.came_true(true, 0.07);
        counters.came_true(false, 3.0);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        assert_eq!((read(&counters.predictions), read(&counters.predictions_in_range)), (2, 1));
        let classes: Vec<u64> = counters.prediction_errors.iter().map(read).collect();
        assert_eq!(classes, [0, 0, 1, 0, 0, 0]);
        assert_eq!(read(&counters.prediction_error_millionths), 3_070_000);
    }
}
