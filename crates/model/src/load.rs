//! The load of hosts and VMs, as the hosts' agents measure it.
//!
//! A figure that can't be read is `None`, which is never 0: a host whose figures are not known is not idle.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a VM has of its host: its vCPU threads of the CPUs, and its guest of the memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmLoad {
    /// How long the vCPU threads were ready to run and had no CPU, all threads together, since this QEMU started. This is the
    /// kernel's run delay (second field of /proc/PID/task/TID/schedstat; Documentation/scheduler/sched-stats.rst).
    pub run_delay_ms: Option<u64>,
    /// The run delay of the vCPU thread that has most of it. The threads wait at the same time, so a program in the guest has lost
    /// about this much.
    pub longest_run_delay_ms: Option<u64>,
    /// What the vCPUs did in the last minute; `None` also in the first 10 s of a QEMU.
    pub vcpus_1m: Option<VcpuUse>,
    /// Of a VM that may have more or less memory while it runs: what it has. `None` also until its QEMU has said it.
    pub memory: Option<MemoryUse>,
    /// How fast its guest changed its memory in the second that was sampled last, once a minute, rounded down to MiB. `None` until then, and
    /// while it moves or stands still.
    pub dirty_bytes_per_s: Option<u64>,
}

/// What a VM's guest has of its host's memory, and does with it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryUse {
    /// What the guest has: all but what it has given back (`query-balloon`), and more where more than that is in RAM.
    pub has_bytes: u64,
    /// How much of that its programs can still get without swapping (`MemAvailable` of the guest); `None` if the guest has not said it
    /// lately.
    pub available_bytes: Option<u64>,
}

/// How many vCPUs had a CPU and how many waited for one, as means over the last minute: over the last 60 to 70 s, or since the
/// QEMU started if that is shorter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VcpuUse {
    /// vCPUs that ran on a CPU.
    pub running_vcpus: f64,
    /// vCPUs that were ready to run and had no CPU. This is also the time lost, in seconds of vCPUs for each second.
    pub waiting_vcpus: f64,
}

impl VcpuUse {
    /// Less is no load: a guest's clock and its daemons take this much of an idle VM.
    const NO_LOAD_VCPUS: f64 = 0.02;

    /// vCPUs that wanted a CPU, whether they had one or not.
    pub fn wanted_vcpus(self) -> f64 {
        self.running_vcpus + self.waiting_vcpus
    }

    /// The run delay as a share of the time in which the vCPUs wanted a CPU, from 0 to 1. 0 for vCPUs that wanted none.
    pub fn run_delay_share(self) -> f64 {
        let wanted = self.wanted_vcpus();
        if wanted > Self::NO_LOAD_VCPUS {
            (self.waiting_vcpus / wanted).clamp(0.0, 1.0)
        } else {
            0.0
        }
    }

    /// Of two VMs together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            running_vcpus: self.running_vcpus + other.running_vcpus,
            waiting_vcpus: self.waiting_vcpus + other.waiting_vcpus,
        }
    }
}

/// What the tasks of a host wait for, by the kernel's pressure stall information (/proc/pressure;
/// Documentation/accounting/psi.rst). All of it is `None` where the kernel does not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostPressure {
    /// Tasks that wait for a CPU.
    pub cpu: Option<Pressure>,
    /// Tasks that wait for memory: for pages that were taken from them, or until others' pages are written.
    pub memory: Option<Pressure>,
    /// Tasks that wait for a disk.
    pub io: Option<Pressure>,
}

/// The pressure on one resource of a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pressure {
    /// The time in which at least one task waited for the resource.
    pub some: StalledTime,
    /// The time in which all tasks that had something to do waited for the resource; `None` where the kernel does not tell. The kernel
    /// gives 0 for the CPU.
    pub full: Option<StalledTime>,
}

/// A time in which tasks waited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StalledTime {
    /// As a share of the last 10 s, from 0 to 1. The kernel lets older times count less and less.
    pub share_10s: f64,
    /// The same of the last 60 s.
    pub share_60s: f64,
    /// Since the host's kernel started.
    pub total_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_of_the_time_in_which_a_cpu_was_wanted() {
        let busy = VcpuUse { running_vcpus: 1.0, waiting_vcpus: 0.5 };
        let idle = VcpuUse { running_vcpus: 0.005, waiting_vcpus: 0.005 };
        assert!((busy.run_delay_share() - 1.0 / 3.0).abs() < 1e-9);
        assert!((busy.plus(busy).wanted_vcpus() - 3.0).abs() < 1e-9);
        assert!(idle.run_delay_share() < 1e-9, "an idle VM starves for nothing");
    }
}
